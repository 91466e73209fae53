//! Each rank gets its part of the root's data.

use crate::{Algorithm, Chunk, Kind, Plan, Rank, Topology};

pub(crate) static DIRECT: Algorithm = Algorithm::new(Kind::Scatter, "direct", direct);

/// The root sends each rank its part.
fn direct(topology: &Topology, rank: Rank, root: Rank) -> Plan {
    if rank != root {
        let mut plan = Plan::new(0, 1).lending();
        plan.recv(root, Chunk::output(0));
        return plan;
    }
    let mut plan = Plan::new(topology.size(), 1).lending();
    for peer in topology.others(root) {
        plan.send(peer, Chunk::input(peer));
    }
    plan.copy(Chunk::input(root), Chunk::output(0));
    plan
}
