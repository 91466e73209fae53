//! The nodes of a job find each other, agree on who takes part with which rank, and begin again together.
//!
//! There is no coordinator. The whole agreement is one small [`State`](state::State) under one key of the store; every
//! node reads it, decides by itself what should change, and proposes that by compare_set. A proposal that came too late
//! changes nothing: its node reads again and decides again. Whatever a node proposes follows from what the state says and
//! from what the node knows of itself, so a proposal whose answer was lost can be made again without harm.
//!
//! No two clocks are ever compared. A node writes a number that grows; who has read the same number for too long, by its
//! own clock, takes that node for dead and proposes a state without it. A node that was only frozen finds itself gone
//! when it looks again, stops its ranks, and joins anew.
//!
//! `state` is what is agreed on and how it may change, `member` what one node makes of it: both pure, time comes in as
//! an argument. `driver` has the threads, the clock and the store. `model` runs many members under random schedules.

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

/// What a node brings along.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct NodeInfo {
    /// Unique for this launcher's process: host, process, something random.
    pub(super) id: String,
    /// Name of the host, for people.
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
    /// For `nodes_min` nodes to come, or to come again.
    pub(super) join_timeout: Duration,
    /// From `nodes_min` nodes to the start of the first round without more of them.
    pub(super) last_call: Duration,
    pub(super) beat_interval: Duration,
    /// A node whose beat has not moved for so many intervals is dead.
    pub(super) beats_missed_max: u32,
}

impl Settings {
    /// How long a node may be silent.
    fn silence_max(&self) -> Duration {
        self.beat_interval.saturating_mul(self.beats_missed_max)
    }

    /// How long a node may let its ranks run after a beat that was answered. Shorter than the others wait for the next one, so
    /// that its ranks have ended when theirs are started again.
    fn lease(&self) -> Duration {
        self.silence_max() / 6 * 5
    }

    /// Says what is wrong with them, if something is.
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
        const ID_MAX: usize = 256; // it becomes a part of keys, and a line of a list
        let id = &self.run_id;
        if id.is_empty() || id.len() > ID_MAX || id.contains(char::is_control) {
            return Err(format!(
                "invalid run id {id:?}: it is empty, longer than {ID_MAX} bytes, or has control characters"
            ));
        }
        Ok(())
    }
}

/// What the launcher is told, in this order: (Start Stop)* Over, with notes anywhere.
///
/// The last round of a job that ends well has no `Stop`: its ranks have ended. `Over` may follow a `Stop` at once.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Event {
    Start(Assignment),
    /// Stop the ranks of this round, then say [`Order::Stopped`].
    Stop {
        round: u64,
        /// One line for people, such as "node b7 joined".
        reason: String,
    },
    Over(Outcome),
    /// One line for people.
    Note(String),
    /// A beat was answered: until then ranks of this node may run, whatever happens to it. Comes at any time.
    Held(Instant),
}

/// Who takes part in a round.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Assignment {
    /// Counts the jobs that have had this run id in this store; rounds begin at 0 in each.
    pub(super) job: u64,
    pub(super) round: u64,
    /// By the whole job so far: a node that joins late has not seen them all.
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

/// What everybody is told about the failure that ended the job or a round.
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

/// Bytes of what is told about a failure; more are cut off.
pub(super) const FAILURE_TEXT_MAX: usize = 8 << 10;

/// What the launcher tells.
#[derive(Clone, Debug)]
pub(super) enum Order {
    /// All local ranks of that round have ended because they were told to.
    Stopped { round: u64 },
    /// A local rank failed. The launcher stops its others by itself, then says `Stopped`.
    Failed { round: u64, failure: JobFailure },
    /// All local ranks of that round ended well.
    Done { round: u64 },
    /// Somebody wants this node to end; answered by [`Event::Over`].
    Leave { reason: String },
    /// What the dashboard shows of this node's ranks; goes out with the next beat.
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
    fn settings_that_cannot_work_are_refused_with_the_reason() {
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
