//! Every rank gets the combination of the values of all ranks up to its own, in place.
//!
//! A partial result goes on to other ranks, so it is finished only after it was sent.

use crate::{Algorithm, Chunk, Kind, Plan, Rank, Topology};

pub(crate) static DIRECT: Algorithm =
    Algorithm { in_rank_order: true, ..Algorithm::new(Kind::Scan, "direct", direct) };
pub(crate) static RECURSIVE_DOUBLING: Algorithm =
    Algorithm::new(Kind::Scan, "recursive_doubling", recursive_doubling);
pub(crate) static CHAIN: Algorithm = Algorithm::new(Kind::Scan, "chain", chain);

/// Every rank sends to all higher ranks, then adds up alone. One round.
///
/// Does not lend: the sum overwrites what peers may still be reading.
fn direct(topology: &Topology, rank: Rank, _root: Rank) -> Plan {
    let (lower, higher): (Vec<Rank>, Vec<Rank>) =
        topology.others(rank).into_iter().partition(|&peer| peer < rank);
    let mut plan = Plan::new(0, 1);
    plan.send_all(&higher, Chunk::output(0));
    plan.reduce_last(&lower, Chunk::output(0), Chunk::output(0));
    plan
}

/// At distances 1, 2, 4, … every rank passes on what it has, which is the sum of so many ranks up to itself:
/// ⌈log2(n)⌉ rounds of the whole vector. Does not lend, for the same reason.
fn recursive_doubling(topology: &Topology, rank: Rank, _root: Rank) -> Plan {
    let size = topology.size();
    let all = Chunk::output(0);
    let mut plan = Plan::new(0, 1);
    for distance in std::iter::successors(Some(1), |distance| Some(2 * distance)).take_while(|&it| it < size)
    {
        if rank + distance < size {
            plan.send(rank + distance, all);
        }
        if rank >= distance {
            plan.reduce(&[rank - distance], all, all);
        }
    }
    plan.reduce_last(&[], all, all);
    plan
}

/// From rank to rank: each adds its values and passes the sum on. Every rank sends the vector once, the
/// minimum, and the pieces of a long one follow each other along the chain.
fn chain(topology: &Topology, rank: Rank, _root: Rank) -> Plan {
    let all = Chunk::output(0);
    let mut plan = Plan::new(0, 1);
    if rank > 0 {
        plan.reduce(&[rank - 1], all, all);
    }
    if rank + 1 < topology.size() {
        plan.send(rank + 1, all);
    }
    plan.reduce_last(&[], all, all);
    plan
}
