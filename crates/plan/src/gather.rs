//! The root gets every rank's part, in order of rank.

use crate::{Algorithm, Chunk, Kind, Plan, Rank, Topology};

pub(crate) static DIRECT: Algorithm = Algorithm::new(Kind::Gather, "direct", direct);

/// Every rank sends to the root.
fn direct(topology: &Topology, rank: Rank, root: Rank) -> Plan {
    if rank != root {
        let mut plan = Plan::new(1, 0).lending();
        plan.send(root, Chunk::input(0));
        return plan;
    }
    let mut plan = Plan::new(1, topology.size()).lending();
    plan.copy(Chunk::input(0), Chunk::output(root));
    for peer in topology.others(root) {
        plan.recv(peer, Chunk::output(peer));
    }
    plan
}
