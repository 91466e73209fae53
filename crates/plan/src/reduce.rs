//! The root gets the combination of all ranks' values, in place; the other ranks' buffers are unspecified
//! afterwards.

use crate::{Algorithm, Chunk, Kind, Plan, Rank, Topology, tree};

pub(crate) static DIRECT: Algorithm =
    Algorithm { in_rank_order: true, ..Algorithm::new(Kind::Reduce, "direct", direct) };
pub(crate) static SCATTER_GATHER: Algorithm =
    Algorithm { in_rank_order: true, ..Algorithm::new(Kind::Reduce, "scatter_gather", scatter_gather) };
pub(crate) static BINOMIAL: Algorithm = Algorithm::new(Kind::Reduce, "binomial", binomial);
pub(crate) static TWO_LEVEL: Algorithm = Algorithm::new(Kind::Reduce, "two_level", two_level);

/// The root reduces everything from all peers in one pass.
fn direct(topology: &Topology, rank: Rank, root: Rank) -> Plan {
    let mut plan = Plan::new(0, 1).lending();
    if rank == root {
        plan.reduce_last(&topology.others(root), Chunk::output(0), Chunk::output(0));
    } else {
        plan.send(root, Chunk::output(0));
    }
    plan
}

/// Each rank reduces a part from all peers in one pass and sends it to the root: all ranks share the work.
fn scatter_gather(topology: &Topology, rank: Rank, root: Rank) -> Plan {
    let others = topology.others(rank);
    let mut plan = Plan::new(0, topology.size()).lending();
    for &peer in &others {
        plan.send(peer, Chunk::output(peer));
    }
    plan.reduce_last(&others, Chunk::output(rank), Chunk::output(rank));
    if rank == root {
        others.iter().for_each(|&peer| plan.recv(peer, Chunk::output(peer)));
    } else {
        plan.send(root, Chunk::output(rank));
    }
    plan
}

/// Up the binomial tree: every rank adds its children's values and passes the sum on.
fn binomial(topology: &Topology, rank: Rank, root: Rank) -> Plan {
    let children = tree::children(rank, root, topology.size());
    let all = Chunk::output(0);
    let mut plan = Plan::new(0, 1).lending();
    match tree::parent(rank, root, topology.size()) {
        None => plan.reduce_last(&children, all, all),
        Some(parent) => {
            if !children.is_empty() {
                plan.reduce(&children, all, all);
            }
            plan.send(parent, all);
        }
    }
    plan
}

/// A deputy of the root on each other host reduces the values of its neighbours; the root reduces its
/// neighbours and the deputies.
fn two_level(topology: &Topology, rank: Rank, root: Rank) -> Plan {
    let neighbours = topology.neighbours(rank);
    let leader = topology.deputy(topology.host_of(rank), root);
    let all = Chunk::output(0);
    let mut plan = Plan::new(0, 1).lending();
    if rank == root {
        plan.reduce_last(&[neighbours, topology.deputies(root)].concat(), all, all);
    } else if rank == leader {
        if !neighbours.is_empty() {
            plan.reduce(&neighbours, all, all);
        }
        plan.send(root, all);
    } else {
        plan.send(leader, all);
    }
    plan
}
