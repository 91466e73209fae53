//! All ranks get every rank's part, in order of rank.
//!
//! Every part of the output is written once and only sent afterwards, so all of these lend.

use crate::topology::Role;
use crate::{Algorithm, Area, Chunk, Kind, Plan, Rank, Topology};

pub(crate) static DIRECT: Algorithm = Algorithm::new(Kind::AllGather, "direct", direct);
pub(crate) static RING: Algorithm = Algorithm::new(Kind::AllGather, "ring", ring);
pub(crate) static BRUCK: Algorithm =
    Algorithm { pieces: false, ..Algorithm::new(Kind::AllGather, "bruck", bruck) };
pub(crate) static TWO_LEVEL: Algorithm = Algorithm::new(Kind::AllGather, "two_level", two_level);
pub(crate) static LEADERS: Algorithm =
    Algorithm { pieces: false, ..Algorithm::new(Kind::AllGather, "leaders", leaders) };

/// Every rank sends to every other.
fn direct(topology: &Topology, rank: Rank, _root: Rank) -> Plan {
    let others = topology.others(rank);
    let mut plan = Plan::new(1, topology.size()).lending();
    plan.send_all(&others, Chunk::input(0));
    plan.copy(Chunk::input(0), Chunk::output(rank));
    for peer in others {
        plan.recv(peer, Chunk::output(peer));
    }
    plan
}

/// Parts travel around the ring: n-1 steps to one neighbour.
fn ring(topology: &Topology, rank: Rank, _root: Rank) -> Plan {
    let ring = topology.ring(rank);
    let mut plan = Plan::new(1, topology.size()).lending();
    plan.copy(Chunk::input(0), Chunk::output(rank));
    for i in 0..topology.size() - 1 {
        plan.send(ring.next(), Chunk::output(ring.behind(i)));
        if topology.hosts() > 1 {
            plan.seam();
        }
        plan.recv(ring.previous(), Chunk::output(ring.behind(i + 1)));
    }
    plan.with_few_seams()
}

/// Every rank has a run of parts that starts at its own, and doubles it with the run of the rank after its
/// end: ⌈log2(n)⌉ rounds, whatever the size.
///
/// A run that wraps around is sent as two messages, alternating with those that arrive.
fn bruck(topology: &Topology, rank: Rank, _root: Rank) -> Plan {
    let size = topology.size();
    let mut plan = Plan::new(1, size).lending().whole();
    plan.copy(Chunk::input(0), Chunk::output(rank));
    let distances = std::iter::successors(Some(1), |distance| Some(2 * distance));
    for distance in distances.take_while(|&distance| distance < size) {
        let count = distance.min(size - distance);
        let (ahead, behind) = ((rank + distance) % size, (rank + size - distance) % size);
        let (given, taken) = (runs(rank, count, size), runs(ahead, count, size));
        for i in 0..2 {
            given.get(i).iter().for_each(|&&run| plan.send(behind, run));
            taken.get(i).iter().for_each(|&&run| plan.recv(ahead, run));
        }
    }
    plan
}

/// `count` parts of the output starting at `first`, modulo the size: one chunk, or two if they wrap.
fn runs(first: usize, count: usize, size: usize) -> Vec<Chunk> {
    let chunk = |first, count| Chunk { buffer: Area::Output, first, count };
    let straight = count.min(size - first);
    let mut runs = vec![chunk(first, straight)];
    runs.extend((straight < count).then(|| chunk(0, count - straight)));
    runs
}

/// Each rank sends to its neighbours and to one deputy per other host, which passes it on there: each part
/// reaches a host once.
fn two_level(topology: &Topology, rank: Rank, _root: Rank) -> Plan {
    let host = topology.host_of(rank);
    let neighbours = topology.neighbours(rank);
    let mut plan = Plan::new(1, topology.size()).lending();
    plan.send_all(&[neighbours.clone(), topology.deputies(rank)].concat(), Chunk::input(0));
    plan.copy(Chunk::input(0), Chunk::output(rank));
    for &peer in &neighbours {
        plan.recv(peer, Chunk::output(peer));
    }
    plan.seam();
    for away in (0..topology.hosts()).filter(|&away| away != host) {
        // In groups of one per rank of this host, so that no link has to hold two messages.
        for group in topology.ranks_of(away).chunks(topology.ranks_of(host).len()) {
            for &source in group.iter().filter(|&&source| topology.deputy(host, source) == rank) {
                plan.recv(source, Chunk::output(source));
                plan.send_all(&neighbours, Chunk::output(source));
            }
            for &source in group.iter().filter(|&&source| topology.deputy(host, source) != rank) {
                plan.recv(topology.deputy(host, source), Chunk::output(source));
            }
        }
    }
    plan
}

/// The leader of each host collects the parts of its host, the leaders exchange them, and each passes everything
/// on: one message from host to host, if the ranks of a host have consecutive numbers.
///
/// Leaders send and receive the runs of a host in turn, so that no link has to hold two messages.
fn leaders(topology: &Topology, rank: Rank, _root: Rank) -> Plan {
    let chunk = |first, count| Chunk { buffer: Area::Output, first, count };
    let everything = chunk(0, topology.size());
    let mut plan = Plan::new(1, topology.size()).lending().whole();
    match topology.role(rank) {
        Role::Follower { leader } => {
            plan.send(leader, Chunk::input(0));
            plan.recv(leader, everything);
        }
        Role::Leader { followers, peers } => {
            plan.copy(Chunk::input(0), Chunk::output(rank));
            followers.iter().for_each(|&follower| plan.recv(follower, Chunk::output(follower)));
            let runs: Vec<Vec<(Rank, usize)>> =
                (0..topology.hosts()).map(|host| topology.runs_of(host)).collect();
            for index in 0..runs.iter().map(Vec::len).max().unwrap_or(0) {
                if let Some(&(first, count)) = runs[topology.host_of(rank)].get(index) {
                    plan.send_all(&peers, chunk(first, count));
                }
                for &peer in &peers {
                    if let Some(&(first, count)) = runs[topology.host_of(peer)].get(index) {
                        plan.recv(peer, chunk(first, count));
                    }
                }
            }
            plan.send_all(&followers, everything);
        }
    }
    plan
}
