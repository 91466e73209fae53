//! Every rank has a part for each rank, and gets the parts for it.

use crate::topology::Role;
use crate::{Algorithm, Area, Chunk, Kind, Plan, Rank, Topology};

pub(crate) static DIRECT: Algorithm = Algorithm::new(Kind::AllToAll, "direct", direct);
pub(crate) static PAIRWISE: Algorithm = Algorithm::new(Kind::AllToAll, "pairwise", pairwise);
pub(crate) static BRUCK: Algorithm =
    Algorithm { equal_parts: true, pieces: false, ..Algorithm::new(Kind::AllToAll, "bruck", bruck) };
pub(crate) static LEADERS: Algorithm =
    Algorithm { equal_parts: true, pieces: false, ..Algorithm::new(Kind::AllToAll, "leaders", leaders) };

/// Sends everything first, then receives, nearest rank first so that not all start with rank 0.
fn direct(topology: &Topology, rank: Rank, _root: Rank) -> Plan {
    let size = topology.size();
    let mut plan = Plan::new(size, size).lending();
    for distance in 1..size {
        let peer = (rank + distance) % size;
        plan.send(peer, Chunk::input(peer));
    }
    plan.copy(Chunk::input(rank), Chunk::output(rank));
    if topology.hosts() > 1 {
        plan.seam();
    }
    for distance in 1..size {
        let peer = (rank + size - distance) % size;
        plan.recv(peer, Chunk::output(peer));
    }
    plan
}

/// One peer to send to and one to receive from at a time: n-1 rounds, each link used by one message in each.
fn pairwise(topology: &Topology, rank: Rank, _root: Rank) -> Plan {
    let size = topology.size();
    let mut plan = Plan::new(size, size).lending();
    plan.copy(Chunk::input(rank), Chunk::output(rank));
    for distance in 1..size {
        let (ahead, behind) = ((rank + distance) % size, (rank + size - distance) % size);
        plan.send(ahead, Chunk::input(ahead));
        plan.recv(behind, Chunk::output(behind));
    }
    plan
}

/// A part that must travel a distance moves along its binary digits, together with all others that have the
/// same digit: ⌈log2(n)⌉ messages instead of n-1, each part sent several times.
///
/// Parts stay where they arrive until they are packed for the next hop, and each packet has its own memory:
/// nothing is written twice, so it lends.
fn bruck(topology: &Topology, rank: Rank, _root: Rank) -> Plan {
    let size = topology.size();
    let mut plan = Plan::new(size, size).lending().whole();
    // Where the part is that has to travel this total distance.
    let mut places: Vec<Chunk> = (0..size).map(|distance| Chunk::input((rank + distance) % size)).collect();
    let hops = std::iter::successors(Some(1), |hop| Some(2 * hop));
    for hop in hops.take_while(|&hop| hop < size) {
        let travellers: Vec<usize> = (0..size).filter(|distance| distance & hop != 0).collect();
        let (given, taken) = (
            plan.add_packet(Area::Input, 0, travellers.len()),
            plan.add_packet(Area::Input, 0, travellers.len()),
        );
        for (i, &distance) in travellers.iter().enumerate() {
            plan.copy(places[distance], Chunk::scratch(given.first + i));
            places[distance] = Chunk::scratch(taken.first + i);
        }
        plan.send((rank + hop) % size, given);
        plan.recv((rank + size - hop) % size, taken);
    }
    for (distance, place) in places.into_iter().enumerate() {
        plan.copy(place, Chunk::output((rank + size - distance) % size));
    }
    plan
}

/// The leader of each host collects what its host has, sends the leader of each other host all that is for the
/// ranks there, and passes on what arrives: one message from host to host, instead of one for each pair of ranks.
///
/// Nothing is written twice, so it lends.
fn leaders(topology: &Topology, rank: Rank, _root: Rank) -> Plan {
    let size = topology.size();
    let everything = |buffer| Chunk { buffer, first: 0, count: size };
    let mut plan = Plan::new(size, size).lending().whole();
    let peers = match topology.role(rank) {
        Role::Leader { peers, .. } => peers,
        Role::Follower { leader } => {
            plan.send(leader, everything(Area::Input));
            plan.recv(leader, everything(Area::Output));
            return plan;
        }
    };
    let part = |whole: Chunk, index: usize| Chunk { first: whole.first + index, count: 1, ..whole };
    let here = topology.ranks_of(topology.host_of(rank));
    // By source and target: where the part is.
    let mut places = std::collections::HashMap::new();
    for &source in here {
        let whole =
            if source == rank { everything(Area::Input) } else { plan.add_packet(Area::Input, 0, size) };
        if source != rank {
            plan.recv(source, whole);
        }
        places.extend((0..size).map(|target| ((source, target), part(whole, target))));
    }
    for &peer in &peers {
        let there = topology.ranks_of(topology.host_of(peer));
        let given = plan.add_packet(Area::Input, 0, here.len() * there.len());
        let pairs = here.iter().flat_map(|&source| there.iter().map(move |&target| (source, target)));
        for (index, pair) in pairs.enumerate() {
            plan.copy(places[&pair], part(given, index));
        }
        plan.send(peer, given);
    }
    for &peer in &peers {
        let there = topology.ranks_of(topology.host_of(peer));
        let taken = plan.add_packet(Area::Input, 0, here.len() * there.len());
        plan.recv(peer, taken);
        let pairs = there.iter().flat_map(|&source| here.iter().map(move |&target| (source, target)));
        places.extend(pairs.enumerate().map(|(index, pair)| (pair, part(taken, index))));
    }
    for &target in here {
        let whole =
            if target == rank { everything(Area::Output) } else { plan.add_packet(Area::Input, 0, size) };
        for source in 0..size {
            plan.copy(places[&(source, target)], part(whole, source));
        }
        if target != rank {
            plan.send(target, whole);
        }
    }
    plan
}
