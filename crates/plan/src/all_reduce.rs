//! All ranks get the combination of all ranks' values, in place.
//!
//! The algorithms are fast in different cases: `one_shot`, `recursive_doubling` and `leaders` send whole vectors
//! in few rounds (for small ones), the others split them so that each rank reduces its share (for large ones).

use crate::topology::Role;
use crate::{Algorithm, Chunk, Kind, Plan, Rank, Topology};

pub(crate) static ONE_SHOT: Algorithm =
    Algorithm { in_rank_order: true, ..Algorithm::new(Kind::AllReduce, "one_shot", one_shot) };
pub(crate) static DIRECT: Algorithm =
    Algorithm { in_rank_order: true, ..Algorithm::new(Kind::AllReduce, "direct", direct) };
pub(crate) static RING: Algorithm = Algorithm::new(Kind::AllReduce, "ring", ring);
pub(crate) static RECURSIVE_DOUBLING: Algorithm =
    Algorithm::new(Kind::AllReduce, "recursive_doubling", recursive_doubling);
pub(crate) static HALVING_DOUBLING: Algorithm =
    Algorithm::new(Kind::AllReduce, "halving_doubling", halving_doubling);
pub(crate) static TWO_LEVEL: Algorithm = Algorithm::new(Kind::AllReduce, "two_level", two_level);
pub(crate) static LEADERS: Algorithm = Algorithm::new(Kind::AllReduce, "leaders", leaders);

/// Every rank sends to every other, then adds up alone. One round, the minimum.
///
/// Does not lend: the sum overwrites what peers may still be reading.
fn one_shot(topology: &Topology, rank: Rank, _root: Rank) -> Plan {
    let others = topology.others(rank);
    let mut plan = Plan::new(0, 1);
    plan.send_all(&others, Chunk::output(0));
    plan.reduce_last(&others, Chunk::output(0), Chunk::output(0));
    plan
}

/// Each rank reduces the part it owns from all peers in one pass; then all ranks collect the results.
fn direct(topology: &Topology, rank: Rank, _root: Rank) -> Plan {
    let others = topology.others(rank);
    let mut plan = Plan::new(0, topology.size()).lending();
    for &peer in &others {
        plan.send(peer, Chunk::output(peer));
    }
    plan.reduce_last(&others, Chunk::output(rank), Chunk::output(rank));
    plan.send_all(&others, Chunk::output(rank));
    for &peer in &others {
        plan.recv(peer, Chunk::output(peer));
    }
    plan
}

/// Reduce-scatter, then all-gather around a ring: 2(n-1) steps to one neighbour, the minimum of bytes.
///
/// Every message is taken one phase after it was sent, if there are at most [`crate::plan::SEAMS_MAX`] seams: each
/// rank then has a message under way in every step.
fn ring(topology: &Topology, rank: Rank, _root: Rank) -> Plan {
    let size = topology.size();
    if size == 1 {
        return one_shot(topology, rank, rank);
    }
    let ring = topology.ring(rank);
    let (next, previous) = (ring.next(), ring.previous());
    let chunk = |behind| Chunk::output(ring.behind(behind));
    let seam = |plan: &mut Plan| {
        if topology.hosts() > 1 {
            plan.seam();
        }
    };
    let mut plan = Plan::new(0, size).lending();
    for i in 0..size - 2 {
        plan.send(next, chunk(i));
        seam(&mut plan);
        plan.reduce(&[previous], chunk(i + 1), chunk(i + 1));
    }
    plan.send(next, chunk(size - 2));
    seam(&mut plan);
    plan.reduce_last(&[previous], chunk(size - 1), chunk(size - 1));
    for i in 0..size - 1 {
        plan.send(next, chunk(i + size - 1));
        seam(&mut plan);
        plan.recv(previous, chunk(i));
    }
    plan.with_few_seams()
}

/// Pairs at distance 1, 2, 4, … exchange and add all their values: log2(n) rounds of the whole vector.
///
/// Ranks beyond the largest power of two send theirs to a partner first, and get the result from it at the
/// end. Does not lend: each sum overwrites what the partner may still be reading.
fn recursive_doubling(topology: &Topology, rank: Rank, _root: Rank) -> Plan {
    let fold = Fold::new(topology, rank);
    let all = Chunk::output(0);
    let mut plan = Plan::new(0, 1);
    if let Place::Extra { partner } = fold.place {
        plan.send(partner, all);
        plan.recv(partner, all);
        return plan;
    }
    if fold.core == 1 {
        plan.reduce_last(&[], all, all);
    }
    if let Place::Core { extra: Some(extra) } = fold.place {
        plan.reduce(&[extra], all, all);
    }
    for distance in fold.distances() {
        let peer = rank ^ distance;
        plan.send(peer, all);
        if distance == fold.core / 2 {
            plan.reduce_last(&[peer], all, all);
        } else {
            plan.reduce(&[peer], all, all);
        }
    }
    if let Place::Core { extra: Some(extra) } = fold.place {
        plan.send(extra, all);
    }
    plan
}

/// Reduce-scatter by halving the vector with ever nearer peers, all-gather by doubling it back: as few bytes
/// as the ring, over log2(n) links.
///
/// One part at a time is sent and received in turn, so that long operations can run in pieces.
fn halving_doubling(topology: &Topology, rank: Rank, _root: Rank) -> Plan {
    let fold = Fold::new(topology, rank);
    let part = Chunk::output;
    let mut plan = Plan::new(0, fold.core).lending();
    if let Place::Extra { partner } = fold.place {
        (0..fold.core).for_each(|i| plan.send(partner, part(i)));
        (0..fold.core).for_each(|i| plan.recv(partner, part(i)));
        return plan;
    }
    if fold.core == 1 {
        plan.reduce_last(&[], part(0), part(0));
    }
    if let Place::Core { extra: Some(extra) } = fold.place {
        (0..fold.core).for_each(|i| plan.reduce(&[extra], part(i), part(i)));
    }
    for distance in fold.distances().rev() {
        let kept = rank & !(distance - 1);
        for i in kept..kept + distance {
            plan.send(rank ^ distance, part(i ^ distance));
            if distance == 1 {
                plan.reduce_last(&[rank ^ distance], part(i), part(i));
            } else {
                plan.reduce(&[rank ^ distance], part(i), part(i));
            }
        }
    }
    for distance in fold.distances() {
        let kept = rank & !(distance - 1);
        for i in kept..kept + distance {
            plan.send(rank ^ distance, part(i));
            plan.recv(rank ^ distance, part(i ^ distance));
        }
    }
    if let Place::Core { extra: Some(extra) } = fold.place {
        (0..fold.core).for_each(|i| plan.send(extra, part(i)));
    }
    plan
}

/// Within each host every rank reduces its share from its neighbours. Ranks of different hosts that have the
/// same share reduce it among each other. Then each host collects. Each byte crosses between two hosts once
/// each way.
///
/// The vector is split into as many *lanes* as the fullest host has ranks, each lane into a part per host. On
/// a host with fewer ranks than lanes, a rank has several lanes. Lanes are processed in groups of one per
/// rank, so that no link ever has to hold two messages.
fn two_level(topology: &Topology, rank: Rank, _root: Rank) -> Plan {
    let (hosts, lanes) = (topology.hosts(), topology.fullest());
    let host = topology.host_of(rank);
    let owner = |host: usize, lane: usize| topology.ranks_of(host)[lane % topology.ranks_of(host).len()];
    let part = |lane, host| Chunk::output(lane * hosts + host);
    let neighbours = topology.neighbours(rank);
    let groups = || {
        let width = topology.ranks_of(host).len();
        (0..lanes).step_by(width).map(move |first| first..lanes.min(first + width))
    };
    let mut plan = Plan::new(0, lanes * hosts).lending();

    for (slot, group) in (0..hosts).flat_map(|slot| groups().map(move |group| (slot, group))) {
        for lane in group.clone().filter(|&lane| owner(host, lane) != rank) {
            plan.send(owner(host, lane), part(lane, slot));
        }
        for lane in group.filter(|&lane| owner(host, lane) == rank) {
            if hosts == 1 {
                plan.reduce_last(&neighbours, part(lane, slot), part(lane, slot));
            } else if !neighbours.is_empty() {
                plan.reduce(&neighbours, part(lane, slot), part(lane, slot));
            }
        }
    }
    // All ranks process their lanes in ascending order, so the lowest unfinished lane can always proceed.
    let is_even = (0..hosts).all(|other| topology.ranks_of(other).len() == lanes);
    for lane in (0..lanes).filter(|&lane| hosts > 1 && owner(host, lane) == rank) {
        let away: Vec<usize> = (0..hosts).filter(|&other| other != host).collect();
        let peers: Vec<Rank> = away.iter().map(|&other| owner(other, lane)).collect();
        for &other in &away {
            plan.send(owner(other, lane), part(lane, other));
        }
        if is_even {
            plan.seam(); // this rank has no other lane
        }
        plan.reduce_last(&peers, part(lane, host), part(lane, host));
        plan.send_all(&peers, part(lane, host));
        if is_even {
            plan.seam();
        }
        for &other in &away {
            plan.recv(owner(other, lane), part(lane, other));
        }
    }
    for (slot, group) in (0..hosts).flat_map(|slot| groups().map(move |group| (slot, group))) {
        for lane in group.clone().filter(|&lane| owner(host, lane) == rank) {
            plan.send_all(&neighbours, part(lane, slot));
        }
        for lane in group.filter(|&lane| owner(host, lane) != rank) {
            plan.recv(owner(host, lane), part(lane, slot));
        }
    }
    plan
}

/// The leader of each host adds up what its host has, the leaders exchange their sums, and each passes the
/// result on: one message from host to host, however many ranks there are.
///
/// Does not lend, for the same reason as `one_shot`.
fn leaders(topology: &Topology, rank: Rank, _root: Rank) -> Plan {
    let all = Chunk::output(0);
    let mut plan = Plan::new(0, 1);
    match topology.role(rank) {
        Role::Follower { leader } => {
            plan.send(leader, all);
            plan.recv(leader, all);
        }
        Role::Leader { followers, peers } => {
            if peers.is_empty() {
                plan.reduce_last(&followers, all, all);
            } else {
                if !followers.is_empty() {
                    plan.reduce(&followers, all, all);
                }
                plan.send_all(&peers, all);
                plan.reduce_last(&peers, all, all);
            }
            plan.send_all(&followers, all);
        }
    }
    plan
}

/// Reduces a group of any size to a power of two: each rank beyond it has a partner in the core.
struct Fold {
    /// The largest power of two that is not greater than the size.
    core: usize,
    place: Place,
}

enum Place {
    Core { extra: Option<Rank> },
    Extra { partner: Rank },
}

impl Fold {
    fn new(topology: &Topology, rank: Rank) -> Self {
        let core = 1 << topology.size().ilog2();
        let extra = Some(rank + core).filter(|&extra| extra < topology.size());
        let place = if rank < core { Place::Core { extra } } else { Place::Extra { partner: rank - core } };
        Fold { core, place }
    }

    /// 1, 2, 4, … below the size of the core.
    fn distances(&self) -> impl DoubleEndedIterator<Item = usize> + use<> {
        (0..self.core.ilog2()).map(|bit| 1 << bit)
    }
}
