//! All ranks get the root's data, in place.
//!
//! Everything is written once and only sent afterwards, so all of these lend.

use crate::{Algorithm, Chunk, Kind, Plan, Rank, Topology, tree};

pub(crate) static DIRECT: Algorithm = Algorithm::new(Kind::Broadcast, "direct", direct);
pub(crate) static BINOMIAL: Algorithm = Algorithm::new(Kind::Broadcast, "binomial", binomial);
pub(crate) static SCATTER_ALL_GATHER: Algorithm =
    Algorithm::new(Kind::Broadcast, "scatter_all_gather", scatter_all_gather);
pub(crate) static TWO_LEVEL: Algorithm = Algorithm::new(Kind::Broadcast, "two_level", two_level);

/// The root sends to every rank.
fn direct(topology: &Topology, rank: Rank, root: Rank) -> Plan {
    let mut plan = Plan::new(0, 1).lending();
    if rank == root {
        plan.send_all(&topology.others(root), Chunk::output(0));
    } else {
        plan.recv(root, Chunk::output(0));
    }
    plan
}

/// Down the binomial tree: every rank that has the data passes it on, ⌈log2(n)⌉ hops to the last.
fn binomial(topology: &Topology, rank: Rank, root: Rank) -> Plan {
    let mut plan = Plan::new(0, 1).lending();
    if let Some(parent) = tree::parent(rank, root, topology.size()) {
        plan.recv(parent, Chunk::output(0));
    }
    plan.send_all(&tree::children(rank, root, topology.size()), Chunk::output(0));
    plan
}

/// The root sends each rank a different part, which that rank passes on to all others: the root sends
/// everything once, not n-1 times.
fn scatter_all_gather(topology: &Topology, rank: Rank, root: Rank) -> Plan {
    let receivers = topology.others(root);
    let mut plan = Plan::new(0, receivers.len().max(1)).lending();
    if rank == root {
        for (part, &receiver) in receivers.iter().enumerate() {
            plan.send(receiver, Chunk::output(part));
        }
        return plan;
    }
    let others: Vec<Rank> = receivers.iter().copied().filter(|&other| other != rank).collect();
    for (part, _) in receivers.iter().enumerate().filter(|&(_, &receiver)| receiver == rank) {
        plan.recv(root, Chunk::output(part));
        plan.send_all(&others, Chunk::output(part));
    }
    for (part, &source) in receivers.iter().enumerate().filter(|&(_, &source)| source != rank) {
        plan.recv(source, Chunk::output(part));
    }
    plan
}

/// The root sends to its neighbours and to one deputy per other host, which sends to its own neighbours.
fn two_level(topology: &Topology, rank: Rank, root: Rank) -> Plan {
    let neighbours = topology.neighbours(rank);
    let leader = topology.deputy(topology.host_of(rank), root);
    let mut plan = Plan::new(0, 1).lending();
    if rank == root {
        plan.send_all(&[topology.deputies(root), neighbours].concat(), Chunk::output(0));
    } else if topology.host_of(rank) == topology.host_of(root) {
        plan.recv(root, Chunk::output(0));
    } else if rank == leader {
        plan.recv(root, Chunk::output(0));
        plan.send_all(&neighbours, Chunk::output(0));
    } else {
        plan.recv(leader, Chunk::output(0));
    }
    plan
}
