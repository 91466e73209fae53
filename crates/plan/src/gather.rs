//! The root gets every rank's part, in order of rank.

use crate::{Algorithm, Area, Chunk, Kind, Plan, Rank, Topology};

pub(crate) static DIRECT: Algorithm = Algorithm::new(Kind::Gather, "direct", direct);
pub(crate) static LEADERS: Algorithm =
    Algorithm { equal_parts: true, pieces: false, ..Algorithm::new(Kind::Gather, "leaders", leaders) };

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

/// The leader of each other host collects what its host has and sends it to the root: one message for each host.
///
/// Nothing is written twice, so it lends.
fn leaders(topology: &Topology, rank: Rank, root: Rank) -> Plan {
    if topology.hosts() == 1 {
        return direct(topology, rank, root).whole();
    }
    let here = topology.ranks_of(topology.host_of(rank));
    let mut plan = Plan::new(1, if rank == root { topology.size() } else { 0 }).lending().whole();
    if rank == root {
        plan.copy(Chunk::input(0), Chunk::output(root));
        for peer in topology.neighbours(root) {
            plan.recv(peer, Chunk::output(peer));
        }
        for there in topology.hosts_without(root) {
            let packet = plan.add_packet(Area::Input, 0, there.len());
            plan.recv(there[0], packet);
            for (index, &source) in there.iter().enumerate() {
                plan.copy(Chunk::scratch(packet.first + index), Chunk::output(source));
            }
        }
    } else if topology.host_of(rank) == topology.host_of(root) {
        plan.send(root, Chunk::input(0));
    } else if rank == here[0] {
        let packet = plan.add_packet(Area::Input, 0, here.len());
        plan.copy(Chunk::input(0), Chunk::scratch(packet.first));
        for (index, &follower) in here.iter().enumerate().skip(1) {
            plan.recv(follower, Chunk::scratch(packet.first + index));
        }
        plan.send(root, packet);
    } else {
        plan.send(here[0], Chunk::input(0));
    }
    plan
}
