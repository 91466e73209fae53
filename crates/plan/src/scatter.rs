//! Each rank gets its part of the root's data.

use crate::{Algorithm, Area, Chunk, Kind, Plan, Rank, Topology};

pub(crate) static DIRECT: Algorithm = Algorithm::new(Kind::Scatter, "direct", direct);
pub(crate) static LEADERS: Algorithm =
    Algorithm { equal_parts: true, pieces: false, ..Algorithm::new(Kind::Scatter, "leaders", leaders) };

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

/// The root sends the leader of each other host everything for the ranks there: one message for each host. The
/// leader passes it on.
///
/// Nothing is written twice, so it lends.
fn leaders(topology: &Topology, rank: Rank, root: Rank) -> Plan {
    if topology.hosts() == 1 {
        return direct(topology, rank, root).whole();
    }
    let here = topology.ranks_of(topology.host_of(rank));
    let mut plan = Plan::new(if rank == root { topology.size() } else { 0 }, 1).lending().whole();
    if rank == root {
        for there in topology.hosts_without(root) {
            let packet = plan.add_packet(Area::Output, 0, there.len());
            for (index, &target) in there.iter().enumerate() {
                plan.copy(Chunk::input(target), Chunk::scratch(packet.first + index));
            }
            plan.send(there[0], packet);
        }
        for peer in topology.neighbours(root) {
            plan.send(peer, Chunk::input(peer));
        }
        plan.copy(Chunk::input(root), Chunk::output(0));
    } else if topology.host_of(rank) == topology.host_of(root) {
        plan.recv(root, Chunk::output(0));
    } else if rank == here[0] {
        let packet = plan.add_packet(Area::Output, 0, here.len());
        plan.recv(root, packet);
        for (index, &follower) in here.iter().enumerate().skip(1) {
            plan.send(follower, Chunk::scratch(packet.first + index));
        }
        plan.copy(Chunk::scratch(packet.first), Chunk::output(0));
    } else {
        plan.recv(here[0], Chunk::output(0));
    }
    plan
}
