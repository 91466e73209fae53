//! A job as it is shown, and how what its launchers say of their ranks is read.
//!
//! The values in the store are in `job`. A job is shown as one object, whatever pages its nodes are in.

use serde::{Deserialize, Serialize};

use super::super::collectives::Collective;
use super::super::job::{self, Ending, Head, JobFailure, NodeInfo, NodeText, Phase, Seat};
use super::{COLLECTIVES_MAX, LOST_AFTER, LOST_AFTER_MIN};

/// A job's state, as far as it is shown.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct State {
    pub(super) version: u64,
    pub(super) job: u64,
    pub(super) round: u64,
    pub(super) phase: Phase,
    pub(super) nodes_min: usize,
    pub(super) nodes_max: usize,
    pub(super) max_restarts: u64,
    pub(super) restarts_used: u64,
    pub(super) members: Vec<Member>,
    pub(super) spares: Vec<NodeInfo>,
    pub(super) failure: Option<JobFailure>,
    pub(super) outcome: Option<Ending>,
    pub(super) reason: String,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct Member {
    pub(super) node: NodeInfo,
    pub(super) rank: Option<usize>,
    pub(super) ready: bool,
    pub(super) done: bool,
}

impl State {
    pub(super) fn new(head: Head, mut seats: Vec<Seat>, failure: Option<JobFailure>) -> State {
        seats.sort_by_key(|seat| (seat.rank.is_none(), seat.rank, seat.joined));
        let (mut spares, mut members) = (Vec::new(), Vec::new());
        for Seat { node, spare, rank, ready, done, .. } in seats {
            match spare {
                true => spares.push(node),
                false => members.push(Member { node, rank, ready, done }),
            }
        }
        let Head { version, job, round, phase, nodes_min, nodes_max, max_restarts, .. } = head;
        let Head { restarts_used, outcome, reason, .. } = head;
        State {
            version,
            job,
            round,
            phase,
            nodes_min,
            nodes_max,
            max_restarts,
            restarts_used,
            members,
            spares,
            failure,
            outcome,
            reason,
        }
    }

    pub(super) fn nodes(&self) -> impl Iterator<Item = &NodeInfo> {
        self.members.iter().map(|member| &member.node).chain(&self.spares)
    }
}

/// What a node says of its ranks, as far as it can be read.
#[derive(Debug, Default, Deserialize)]
pub(super) struct Ranks(#[serde(deserialize_with = "job::readable")] pub(super) Vec<RankStatus>);

/// How long the node may be unresponsive.
pub(super) fn silence_max(text: &NodeText<Ranks>) -> f64 {
    text.silence_max_seconds.unwrap_or(LOST_AFTER).max(LOST_AFTER_MIN)
}

/// What a launcher knows of one of its ranks.
pub(super) type RankStatus = job::RankStatus<Collective>;

/// The calls of a rank in its groups; nothing if it has exited.
pub(super) fn under_way(status: &RankStatus) -> &[Collective] {
    let count = if status.state == "ended" { 0 } else { status.collectives.len().min(COLLECTIVES_MAX) };
    &status.collectives[..count]
}
