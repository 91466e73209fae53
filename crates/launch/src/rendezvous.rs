//! The nodes of a job find each other, agree on the nodes and ranks of each round, and restart together.
//!
//! There is no coordinator. The whole agreement is one small [`State`](state::State) under one key of the
//! store. Every node reads it, decides by itself what should change, and proposes that by compare_set. A
//! proposal that is too late changes nothing: its node reads and decides again. A proposal follows only from
//! the state and from what the node knows of itself, so a proposal whose answer was lost can be repeated
//! without harm.
//!
//! Clocks of different nodes are never compared. A node writes a number that grows. A node that has read the
//! same number for too long, by its own clock, considers the other node dead and proposes a state without it.
//! A node that was only frozen finds itself removed when it reads the state again, stops its ranks, and joins
//! again.
//!
//! `state` is what is agreed on and how it may change, `member` the decisions of one node. Both are pure:
//! time is an argument. `driver` has the threads, the clock and the store. `model` runs many members under
//! random schedules.

mod driver;
mod member;
#[cfg(test)]
mod model;
#[cfg(test)]
mod scenarios;
mod state;

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

pub(super) use driver::Rendezvous;

/// Nodes of one job, spares included.
pub(super) const NODES_MAX: usize = 4096;

/// Ranks of one node, as a state may have them: far more than a machine can run, and sums of them cannot overflow.
pub(super) const NODE_RANKS_MAX: usize = 1 << 20;

/// The properties of a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct NodeInfo {
    /// Unique for this launcher's process: host, process, something random.
    pub(super) id: String,
    /// Name of the host, for the user.
    pub(super) host: String,
    /// Ranks on this node; nodes may differ.
    pub(super) ranks: usize,
    pub(super) role: String,
    /// The node rank that it must have.
    pub(super) fixed_rank: Option<usize>,
    /// HOST:PORT of a store for workers that this node offers.
    pub(super) worker_store: Option<String>,
}

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

/// The nodes of a round.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Assignment {
    /// Counts the jobs that have had this run id in this store; rounds begin at 0 in each.
    pub(super) job: u64,
    pub(super) round: u64,
    /// By the whole job so far, including rounds before this node joined.
    pub(super) restarts_used: u64,
    pub(super) node_rank: usize,
    /// By node rank.
    pub(super) nodes: Vec<NodeInfo>,
}

impl Assignment {
    pub(super) fn node(&self) -> &NodeInfo {
        &self.nodes[self.node_rank]
    }

    /// Grows from round to round and from job to job under the same run id, as long as the store keeps its keys.
    pub(super) fn fence(&self) -> u64 {
        self.job << 32 | self.round & u64::from(u32::MAX)
    }

    /// Rank of this node's first local rank.
    pub(super) fn first_rank(&self) -> usize {
        self.nodes[..self.node_rank].iter().map(|node| node.ranks).sum()
    }

    pub(super) fn world_size(&self) -> usize {
        self.nodes.iter().map(|node| node.ranks).sum()
    }

    /// Rank of this node's first local rank among the ranks of the same role.
    pub(super) fn first_role_rank(&self) -> usize {
        self.of_role(&self.nodes[..self.node_rank])
    }

    /// Ranks of this node's role.
    pub(super) fn role_world_size(&self) -> usize {
        self.of_role(&self.nodes)
    }

    fn of_role(&self, nodes: &[NodeInfo]) -> usize {
        let role = &self.node().role;
        nodes.iter().filter(|node| node.role == *role).map(|node| node.ranks).sum()
    }
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Outcome {
    Success,
    Failed(JobFailure),
    /// It ended without a failed rank: the text of the error.
    Closed(String),
}

/// The failure that ended the job or a round, as it is reported to all nodes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct JobFailure {
    pub(super) round: u64,
    pub(super) node_rank: usize,
    pub(super) host: String,
    /// Of the whole job.
    pub(super) rank: usize,
    /// "exit code 3"
    pub(super) summary: String,
    /// Several lines, see [`FAILURE_TEXT_MAX`].
    pub(super) text: String,
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
    Status(serde_json::Value),
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
            let at = Assignment { job: 0, round: 0, restarts_used: 0, node_rank, nodes: nodes.clone() };
            (at.first_rank(), at.world_size(), at.first_role_rank(), at.role_world_size())
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
            "invalid number of nodes, 3 to 2: expected 1 to 4096, the smaller first"
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
