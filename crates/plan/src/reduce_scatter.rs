//! Every rank has a part for each rank; each rank gets the combination of the parts for it.

use crate::topology::Role;
use crate::{Algorithm, Area, Chunk, Kind, Plan, Rank, Topology};

pub(crate) static DIRECT: Algorithm =
    Algorithm { in_rank_order: true, ..Algorithm::new(Kind::ReduceScatter, "direct", direct) };
pub(crate) static RING: Algorithm = Algorithm::new(Kind::ReduceScatter, "ring", ring);
pub(crate) static TWO_LEVEL: Algorithm = Algorithm::new(Kind::ReduceScatter, "two_level", two_level);
pub(crate) static LEADERS: Algorithm =
    Algorithm { pieces: false, ..Algorithm::new(Kind::ReduceScatter, "leaders", leaders) };

/// Each rank reduces its part from all peers in one pass.
fn direct(topology: &Topology, rank: Rank, _root: Rank) -> Plan {
    let others = topology.others(rank);
    let mut plan = Plan::new(topology.size(), 1).lending();
    for &peer in &others {
        plan.send(peer, Chunk::input(peer));
    }
    plan.reduce_last(&others, Chunk::input(rank), Chunk::output(0));
    plan
}

/// Sums travel around the ring and grow until they reach their owner: n-1 steps to one neighbour.
///
/// Does not lend: the next piece reuses the scratch before all of it is known to be read.
fn ring(topology: &Topology, rank: Rank, _root: Rank) -> Plan {
    let size = topology.size();
    if size == 1 {
        return direct(topology, rank, rank);
    }
    let ring = topology.ring(rank);
    let mut plan = Plan::new(size, 1);
    plan.send(ring.next(), Chunk::input(ring.behind(1)));
    for i in 2..size {
        let part = ring.behind(i);
        let sum = plan.add_scratch(Area::Input, part);
        plan.reduce(&[ring.previous()], Chunk::input(part), sum);
        plan.send(ring.next(), sum);
    }
    plan.reduce_last(&[ring.previous()], Chunk::input(rank), Chunk::output(0));
    plan
}

/// On each host a deputy of every rank reduces that rank's part from its neighbours and sends the sum: one
/// message per host and part instead of one per rank.
///
/// Does not lend, for the same reason as the ring.
fn two_level(topology: &Topology, rank: Rank, _root: Rank) -> Plan {
    let (host, neighbours) = (topology.host_of(rank), topology.neighbours(rank));
    if topology.hosts() == 1 {
        return direct(topology, rank, rank);
    }
    let mut plan = Plan::new(topology.size(), 1);
    let mut sums: Vec<(Rank, Chunk)> = Vec::new();
    for target_host in 0..topology.hosts() {
        // In groups of one per rank of this host, so that no link has to hold two messages.
        for group in topology.ranks_of(target_host).chunks(neighbours.len() + 1) {
            for &target in group.iter().filter(|&&target| topology.deputy(host, target) != rank) {
                plan.send(topology.deputy(host, target), Chunk::input(target));
            }
            for &target in group.iter().filter(|&&target| topology.deputy(host, target) == rank) {
                let own = Chunk::input(target);
                let sum = if neighbours.is_empty() { own } else { plan.add_scratch(Area::Input, target) };
                if sum != own {
                    plan.reduce(&neighbours, own, sum);
                }
                sums.push((target, sum));
            }
        }
    }
    for &(target, sum) in sums.iter().filter(|&&(target, _)| target != rank) {
        plan.send(target, sum);
    }
    for &(_, sum) in sums.iter().filter(|&&(target, _)| target == rank) {
        plan.reduce_last(&topology.deputies(rank), sum, Chunk::output(0));
    }
    plan
}

/// The leader of each host adds up what its host has, sends the leader of each other host the sums for the ranks
/// there, and passes the results on: one message from host to host, if the ranks of a host have consecutive
/// numbers.
///
/// A sum is completed where it is, but only that of the leader's own host, which no peer reads before. So it lends.
/// Leaders send and receive the runs of a host in turn, so that no link has to hold two messages.
fn leaders(topology: &Topology, rank: Rank, _root: Rank) -> Plan {
    if topology.hosts() == 1 {
        return direct(topology, rank, rank).whole();
    }
    let size = topology.size();
    let mut plan = Plan::new(size, 1).lending().whole();
    let inputs = Chunk { buffer: Area::Input, first: 0, count: size };
    let (followers, peers) = match topology.role(rank) {
        Role::Leader { followers, peers } => (followers, peers),
        Role::Follower { leader } => {
            plan.send(leader, inputs);
            plan.recv(leader, Chunk::output(0));
            return plan;
        }
    };
    let is_alone = followers.is_empty();
    let sums = if is_alone { Area::Input } else { Area::Scratch };
    if !is_alone {
        for part in 0..size {
            plan.add_scratch(Area::Input, part);
        }
        plan.reduce(&followers, inputs, Chunk { buffer: sums, ..inputs });
    }
    let runs: Vec<Vec<(Rank, usize)>> = (0..topology.hosts()).map(|host| topology.runs_of(host)).collect();
    let run = |host: usize, index: usize| {
        runs[host].get(index).map(|&(first, count)| Chunk { buffer: sums, first, count })
    };
    for index in 0..runs.iter().map(Vec::len).max().unwrap_or(0) {
        for &peer in &peers {
            run(topology.host_of(peer), index).into_iter().for_each(|theirs| plan.send(peer, theirs));
        }
        if let Some(own) = run(topology.host_of(rank), index) {
            plan.reduce_last(&peers, own, if is_alone { Chunk::output(0) } else { own });
        }
    }
    followers.iter().for_each(|&follower| plan.send(follower, Chunk::scratch(follower)));
    if !is_alone {
        plan.copy(Chunk::scratch(rank), Chunk::output(0));
    }
    plan
}
