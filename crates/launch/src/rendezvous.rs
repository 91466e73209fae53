//! The nodes of a job find each other, agree on the nodes and ranks of each round, and restart together.
//!
//! No node coordinates the others, and none changes what all read for itself alone: with N nodes, N writers of
//! one value would wake each other N² times. Instead each node puts what it wants into the store as a small
//! [`Wish`](member::Wish). One node at a time, the *folder*, folds all wishes that there are into the next
//! state, by compare_set on the head that it read. The other nodes read the head when its turn comes, and of
//! the rest only the page that they are in. Every change can be made twice without harm, and a wish is
//! repeated until the state shows it, so a lost answer does not matter.
//!
//! Clocks of different nodes are never compared. A node writes a number that grows. A node that has read the
//! same number for too long, by its own clock, considers the other node dead. The folder removes dead nodes;
//! if the folder itself is dead, a node that has noticed takes its task. A node that was only frozen finds
//! itself removed when it reads the state again, stops its ranks, and joins again.
//!
//! `state` is what is agreed on and how it may change, `member` the decisions of one node, `folder` those of
//! the folder, `inbox` the wishes that it has yet to fold. They are pure: time is an argument. `driver` has
//! the threads, the clock and the store. `model` runs many members under random schedules.

mod driver;
mod folder;
mod inbox;
mod member;
#[cfg(test)]
mod model;
#[cfg(test)]
mod scenarios;
mod state;

use std::time::{Duration, Instant};

use tenfold_dashboard::job::{Generation, Seat, SpareStatus, StoreHost};

pub(super) use driver::Rendezvous;
pub(super) use tenfold_dashboard::job::{JobFailure, NODES_MAX, NodeInfo};

/// Ranks of one node, as a state may have them: far more than a machine can run, and sums of them cannot overflow.
pub(super) const NODE_RANKS_MAX: usize = 1 << 20;

#[derive(Clone, Debug)]
pub(super) struct Settings {
    pub(super) run_id: String,
    pub(super) nodes_min: usize,
    pub(super) nodes_max: usize,
    pub(super) max_restarts: u64,
    /// How long to wait for `nodes_min` nodes to join, or to rejoin.
    pub(super) join_timeout: Duration,
    /// From `nodes_min` nodes to the start of the first round without more of them.
    pub(super) last_call: Duration,
    pub(super) beat_interval: Duration,
    /// A node whose beat has not changed for this many intervals is dead.
    pub(super) beats_missed_max: u32,
}

impl Settings {
    /// How long a node may be unresponsive.
    fn silence_max(&self) -> Duration {
        self.beat_interval.saturating_mul(self.beats_missed_max)
    }

    /// How long a node may let its ranks run after an answered beat. Shorter than other nodes wait for the
    /// next beat, so that its ranks have exited when theirs are restarted.
    fn lease(&self) -> Duration {
        self.silence_max() / 6 * 5
    }

    /// What all nodes must have in common.
    fn limits(&self) -> state::Limits {
        let Settings { nodes_min, nodes_max, max_restarts, .. } = *self;
        state::Limits { nodes_min, nodes_max, max_restarts }
    }

    /// Returns what is wrong with the settings, if anything.
    fn check(&self) -> Result<(), String> {
        let (min, max) = (self.nodes_min, self.nodes_max);
        if min == 0 || min > max || max > NODES_MAX {
            return Err(format!(
                "invalid number of nodes, {min} to {max}: expected 1 to {NODES_MAX}, the smaller first"
            ));
        }
        if self.beats_missed_max < 2 || self.beat_interval.is_zero() {
            return Err(
                "a node must be allowed to miss a heartbeat: at least 2 intervals, each longer than 0".into(),
            );
        }
        const ID_MAX: usize = 256; // it becomes part of keys, and a line of a list
        let id = &self.run_id;
        if id.is_empty() || id.len() > ID_MAX || id.contains(char::is_control) {
            return Err(format!(
                "invalid run id {id:?}: it is empty, longer than {ID_MAX} bytes, or has control characters"
            ));
        }
        Ok(())
    }
}

/// What is sent to the launcher, in this order: (Start Stop)* Over, with notes anywhere.
///
/// The last round of a job that succeeds has no `Stop`: its ranks have exited. `Over` may follow a `Stop`
/// immediately.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Event {
    Start(Assignment),
    /// Stop the ranks of this round, then send [`Order::Stopped`].
    Stop {
        round: u64,
        /// One line for the user, such as "node b7 joined".
        reason: String,
    },
    Over(Outcome),
    /// One line for the user.
    Note(String),
    /// A beat was answered: until then ranks of this node may run, whatever happens to it. Sent at any time.
    Held(Instant),
}

/// The part of a node in a round.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Assignment {
    /// Counts the jobs that have had this run id in this store; rounds begin at 0 in each.
    pub(super) job: u64,
    pub(super) round: u64,
    /// By the whole job so far, including rounds before this node joined.
    pub(super) restarts_used: u64,
    pub(super) node_rank: usize,
    /// How many nodes take part.
    pub(super) nodes: usize,
    /// Ranks of all nodes.
    pub(super) world_size: usize,
    pub(super) seat: Seat,
    /// The node that offers a store for ranks.
    pub(super) store: Option<StoreHost>,
}

impl Assignment {
    pub(super) fn node(&self) -> &NodeInfo {
        &self.seat.node
    }

    /// Grows from round to round and from job to job under the same run id, as long as the store keeps its keys.
    pub(super) fn fence(&self) -> u64 {
        self.job << 32 | self.round & u64::from(u32::MAX)
    }

    /// Rank of this node's first local rank.
    pub(super) fn first_rank(&self) -> usize {
        self.seat.first_rank
    }

    /// Rank of this node's first local rank among the ranks of the same role.
    pub(super) fn first_role_rank(&self) -> usize {
        self.seat.first_role_rank
    }

    /// Ranks of this node's role.
    pub(super) fn role_world_size(&self) -> usize {
        self.seat.role_ranks
    }

    /// The part of one of these nodes, which are in the order of their node ranks.
    #[cfg(test)]
    pub(super) fn among(nodes: &[NodeInfo], node_rank: usize) -> Assignment {
        let seat = |node: &NodeInfo| Seat { node: node.clone(), ..Seat::default() };
        let mut seats: Vec<Seat> = nodes.iter().map(seat).collect();
        state::number(&mut seats);
        let world_size = nodes.iter().map(|node| node.ranks).sum();
        let seat = seats.swap_remove(node_rank);
        let nodes = nodes.len();
        Assignment { job: 0, round: 0, restarts_used: 0, node_rank, nodes, world_size, seat, store: None }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Outcome {
    Success,
    Failed(JobFailure),
    /// It ended without a failed rank: the text of the error.
    Closed(String),
}

/// Bytes of a failure report; the rest is cut off.
pub(super) const FAILURE_TEXT_MAX: usize = 8 << 10;

/// What the launcher sends.
#[derive(Clone, Debug)]
pub(super) enum Order {
    /// All local ranks of that round have exited because they were asked to.
    Stopped { round: u64 },
    /// A local rank failed. The launcher stops its other ranks by itself, then sends `Stopped`.
    Failed { round: u64, failure: JobFailure },
    /// All local ranks of that round succeeded.
    Done { round: u64 },
    /// The user wants this node to leave; answered by [`Event::Over`].
    Leave { reason: String },
    /// What the dashboard shows of this node's ranks; sent with the next beat.
    Status(Box<NodeStatus>),
}

/// What a node reports about its processes.
#[derive(Clone, Debug, Default)]
pub(super) struct NodeStatus {
    pub(super) ranks: serde_json::Value,
    pub(super) spares: Vec<SpareStatus>,
    pub(super) generations: Vec<Generation>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(id: &str, ranks: usize, role: &str) -> NodeInfo {
        let (id, host, role) = (id.into(), id.into(), role.into());
        NodeInfo { id, host, ranks, role, fixed_rank: None, worker_store: None }
    }

    #[test]
    fn ranks_are_counted_in_node_order_and_within_a_role() {
        let nodes = vec![node("a", 2, "trainer"), node("b", 1, "reader"), node("c", 3, "trainer")];
        let of = |node_rank| {
            let at = Assignment::among(&nodes, node_rank);
            (at.first_rank(), at.world_size, at.first_role_rank(), at.role_world_size())
        };
        assert_eq!([of(0), of(1), of(2)], [(0, 6, 0, 5), (2, 6, 0, 1), (3, 6, 2, 5)]);
    }

    #[test]
    fn invalid_settings_are_refused_with_the_reason() {
        let good = scenarios::settings(1, 2);
        assert_eq!(good.check(), Ok(()));
        let error = |change: fn(&mut Settings)| {
            let mut settings = good.clone();
            change(&mut settings);
            settings.check().unwrap_err()
        };
        assert_eq!(
            error(|settings| settings.nodes_min = 3),
            "invalid number of nodes, 3 to 2: expected 1 to 16384, the smaller first"
        );
        assert_eq!(
            error(|settings| settings.run_id = "a\nb".into()),
            "invalid run id \"a\\nb\": it is empty, longer than 256 bytes, or has control characters"
        );
        assert_eq!(
            error(|settings| settings.beats_missed_max = 1),
            "a node must be allowed to miss a heartbeat: at least 2 intervals, each longer than 0"
        );
    }
}
