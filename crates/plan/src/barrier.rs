//! No rank leaves before all have joined.

use crate::topology::Role;
use crate::{Algorithm, Chunk, Kind, Plan, Rank, Topology};

pub(crate) static DIRECT: Algorithm = Algorithm::new(Kind::Barrier, "direct", direct);
pub(crate) static DISSEMINATION: Algorithm = Algorithm::new(Kind::Barrier, "dissemination", dissemination);
pub(crate) static LEADERS: Algorithm = Algorithm::new(Kind::Barrier, "leaders", leaders);

/// Every rank notifies every other: one round.
fn direct(topology: &Topology, rank: Rank, _root: Rank) -> Plan {
    let others = topology.others(rank);
    let mut plan = Plan::new(0, 0).lending();
    plan.send_all(&others, Chunk::EMPTY);
    for peer in others {
        plan.recv(peer, Chunk::EMPTY);
    }
    plan
}

/// The knowledge of which ranks have joined doubles in each of ⌈log2(n)⌉ rounds.
fn dissemination(topology: &Topology, rank: Rank, _root: Rank) -> Plan {
    let size = topology.size();
    let mut plan = Plan::new(0, 0).lending();
    let distances = std::iter::successors(Some(1), |distance| Some(2 * distance));
    for distance in distances.take_while(|&distance| distance < size) {
        plan.send((rank + distance) % size, Chunk::EMPTY);
        plan.recv((rank + size - distance) % size, Chunk::EMPTY);
    }
    plan
}

/// Ranks report to the leader of their host, the leaders to each other, and then the leaders to their ranks: one
/// message from host to host, however many ranks there are.
fn leaders(topology: &Topology, rank: Rank, _root: Rank) -> Plan {
    let mut plan = Plan::new(0, 0).lending();
    match topology.role(rank) {
        Role::Follower { leader } => {
            plan.send(leader, Chunk::EMPTY);
            plan.recv(leader, Chunk::EMPTY);
        }
        Role::Leader { followers, peers } => {
            followers.iter().for_each(|&follower| plan.recv(follower, Chunk::EMPTY));
            plan.send_all(&peers, Chunk::EMPTY);
            peers.iter().for_each(|&peer| plan.recv(peer, Chunk::EMPTY));
            plan.send_all(&followers, Chunk::EMPTY);
        }
    }
    plan
}
