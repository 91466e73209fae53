//! What the nodes agree on, and the ways in which it may change.
//!
//! A round is joined, runs, and is followed by the next one, until the job is over. While `joining`, `round`
//! is the one that will start; a member is `ready` when none of its ranks run. While `running`, a member is
//! `done` when all its ranks have succeeded. When `over`, a member is `ready` when it has acknowledged the
//! end: only after all have may a node begin another job under the same run id.
//!
//! Every change can be made twice without harm, and does nothing where it does not apply.

use serde::{Deserialize, Serialize};

use super::{FAILURE_TEXT_MAX, JobFailure, NODE_RANKS_MAX, NODES_MAX, NodeInfo, Outcome, Settings};

/// Bytes of a state as text: twice what 4096 nodes with long names need.
const TEXT_MAX: usize = 2 << 20;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct State {
    /// Grows by 1 with every change, also from one job to the next.
    pub(super) version: u64,
    /// Counts the jobs that have had this run id.
    #[serde(default)]
    pub(super) job: u64,
    pub(super) round: u64,
    pub(super) phase: Phase,
    pub(super) nodes_min: usize,
    pub(super) nodes_max: usize,
    pub(super) max_restarts: u64,
    pub(super) restarts_used: u64,
    /// By node rank while a round runs, newcomers at the end.
    pub(super) members: Vec<Seat>,
    /// Nodes beyond the maximum, in the order in which they joined.
    pub(super) spares: Vec<NodeInfo>,
    /// The last failure of a rank.
    pub(super) failure: Option<JobFailure>,
    pub(super) outcome: Option<Ending>,
    /// Why the last round was ended, or the job.
    pub(super) reason: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Phase {
    Joining,
    Running,
    Over,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Ending {
    Success,
    Failed,
    Closed,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Seat {
    pub(super) node: NodeInfo,
    /// In this round, or in the last one that this node took part in.
    pub(super) rank: Option<usize>,
    pub(super) ready: bool,
    pub(super) done: bool,
}

/// The role of a node in a state.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Place<'a> {
    Member(&'a Seat),
    Spare,
    Absent,
}

impl State {
    /// The state of a job that has one node so far.
    pub(super) fn new(settings: &Settings, node: &NodeInfo) -> State {
        let mut state = State {
            version: 1,
            job: 0,
            round: 0,
            phase: Phase::Joining,
            nodes_min: settings.nodes_min,
            nodes_max: settings.nodes_max,
            max_restarts: settings.max_restarts,
            restarts_used: 0,
            members: Vec::new(),
            spares: Vec::new(),
            failure: None,
            outcome: None,
            reason: String::new(),
        };
        state.join(node);
        state
    }

    /// The state of the next job under this run id.
    pub(super) fn next_job(&self, settings: &Settings, node: &NodeInfo) -> State {
        State { version: self.version, job: self.job + 1, ..State::new(settings, node) }
    }

    /// Parses what the store holds; the error says what is wrong with it.
    pub(super) fn from_text(text: &[u8]) -> Result<State, String> {
        if text.len() > TEXT_MAX {
            return Err(format!("it is {} bytes long, the limit is {TEXT_MAX}", text.len()));
        }
        let state: State = serde_json::from_slice(text).map_err(|error| error.to_string())?;
        state.check().map_err(|what| format!("it is inconsistent: {what}"))?;
        Ok(state)
    }

    pub(super) fn to_text(&self) -> Result<Vec<u8>, String> {
        let text = serde_json::to_vec(self).map_err(|error| error.to_string())?;
        match text.len() > TEXT_MAX {
            true => Err(format!("it would be {} bytes long, the limit is {TEXT_MAX}", text.len())),
            false => Ok(text),
        }
    }

    /// The invariants that everything here relies on.
    fn check(&self) -> Result<(), &'static str> {
        let mut ids: Vec<&str> = self.ids().collect();
        let count = ids.len();
        ids.sort_unstable();
        ids.dedup();
        let mut ranks: Vec<usize> = self.members.iter().filter_map(|seat| seat.rank).collect();
        let ranked = ranks.len();
        ranks.sort_unstable();
        ranks.dedup();
        let mut fixed: Vec<usize> = self.nodes().filter_map(|node| node.fixed_rank).collect();
        let given = fixed.len();
        fixed.sort_unstable();
        fixed.dedup();
        let all_ranked = ranks.iter().copied().eq(0..self.members.len());
        let ended = match self.outcome {
            None => self.phase != Phase::Over,
            Some(Ending::Failed) => self.phase == Phase::Over && self.failure.is_some(),
            Some(_) => self.phase == Phase::Over,
        };
        let facts = [
            (count <= NODES_MAX, "too many nodes"),
            (ids.len() == count, "a node is listed twice"),
            (
                1 <= self.nodes_min && self.nodes_min <= self.nodes_max,
                "the limits of the number of nodes are wrong",
            ),
            (self.members.len() <= self.nodes_max, "more members than allowed"),
            (ranks.len() == ranked, "two nodes have the same rank"),
            (fixed.len() == given, "two nodes were given the same rank"),
            (self.nodes().all(|node| node.ranks <= NODE_RANKS_MAX), "a node has too many ranks"),
            (self.phase != Phase::Running || all_ranked, "a round runs without all its ranks"),
            (ended, "phase and outcome contradict each other"),
            (
                self.version < u64::MAX && self.round < u64::MAX && self.job < u64::MAX,
                "a counter has reached its limit",
            ),
        ];
        facts.iter().find(|(holds, _)| !holds).map_or(Ok(()), |(_, what)| Err(what))
    }

    /// All nodes, members first.
    pub(super) fn ids(&self) -> impl Iterator<Item = &str> {
        self.nodes().map(|node| node.id.as_str())
    }

    pub(super) fn nodes(&self) -> impl Iterator<Item = &NodeInfo> {
        self.members.iter().map(|seat| &seat.node).chain(&self.spares)
    }

    pub(super) fn place(&self, id: &str) -> Place<'_> {
        if let Some(seat) = self.members.iter().find(|seat| seat.node.id == id) {
            return Place::Member(seat);
        }
        if self.spares.iter().any(|node| node.id == id) { Place::Spare } else { Place::Absent }
    }

    fn seat(&mut self, id: &str) -> Option<&mut Seat> {
        self.members.iter_mut().find(|seat| seat.node.id == id)
    }

    /// Why this node cannot join, and, if another node blocks it, the id of that node.
    pub(super) fn objection(&self, settings: &Settings, node: &NodeInfo) -> Option<(String, Option<&str>)> {
        let theirs = (self.nodes_min, self.nodes_max, self.max_restarts);
        let ours = (settings.nodes_min, settings.nodes_max, settings.max_restarts);
        if theirs != ours {
            let show = |(min, max, restarts)| format!("{min} to {max} nodes and {restarts} restarts");
            let (ours, theirs) = (show(ours), show(theirs));
            return Some((
                format!(
                    "this node was started for {ours}, but the running job `{}` has {theirs}\n  \
                 hint: give all nodes the same settings, or this node another run id",
                    settings.run_id
                ),
                None,
            ));
        }
        if self.nodes().count() >= NODES_MAX {
            return Some((format!("the job `{}` has {NODES_MAX} nodes already", settings.run_id), None));
        }
        let kind = |fixed: bool| if fixed { "a fixed node rank" } else { "no node rank" };
        if let Some(other) =
            self.nodes().find(|other| other.fixed_rank.is_some() != node.fixed_rank.is_some())
        {
            return Some((
                format!(
                    "this node has {}, but the one on {} has {}\n  hint: give all nodes a node rank, or none",
                    kind(node.fixed_rank.is_some()),
                    other.host,
                    kind(other.fixed_rank.is_some())
                ),
                None,
            ));
        }
        let rank = node.fixed_rank?;
        let same = self.nodes().find(|other| other.fixed_rank == Some(rank))?;
        Some((
            format!(
                "node rank {rank} is taken: the launcher on {} has it\n  hint: give every node a different node rank",
                same.host
            ),
            Some(&same.id),
        ))
    }

    /// A newcomer, or a removed node that is back. If there is room, the next round is opened for it, unless
    /// some nodes are done: then the job is about to end.
    pub(super) fn join(&mut self, node: &NodeInfo) {
        if self.phase == Phase::Over || self.place(&node.id) != Place::Absent {
            return;
        }
        self.spares.push(node.clone());
        let has_room = self.members.len() < self.nodes_max;
        match self.phase {
            Phase::Running if has_room && !self.members.iter().any(|seat| seat.done) => {
                self.reopen(format!("node {} joined", node.host));
            }
            Phase::Joining => self.promote(),
            _ => {}
        }
    }

    /// Spares become members while there is room. They have no ranks to stop.
    fn promote(&mut self) {
        let count = self.nodes_max.saturating_sub(self.members.len()).min(self.spares.len());
        let seats =
            self.spares.drain(..count).map(|node| Seat { node, rank: None, ready: true, done: false });
        self.members.extend(seats);
    }

    /// Ends the running round, and opens the next.
    fn reopen(&mut self, reason: String) {
        self.round += 1;
        self.phase = Phase::Joining;
        self.reason = reason;
        for seat in &mut self.members {
            (seat.ready, seat.done) = (false, false);
        }
        self.promote();
    }

    /// A member has no running ranks.
    pub(super) fn ready(&mut self, id: &str) {
        if self.phase == Phase::Joining
            && let Some(seat) = self.seat(id)
        {
            seat.ready = true;
        }
    }

    /// Whether enough members have joined, and all of them are ready.
    pub(super) fn can_begin(&self) -> bool {
        self.phase == Phase::Joining
            && self.members.len() >= self.nodes_min
            && self.members.iter().all(|seat| seat.ready)
    }

    /// Begins the round. Nodes keep their ranks if these are still valid; the others fill the gaps in order.
    pub(super) fn begin(&mut self) {
        if !self.can_begin() {
            return;
        }
        let count = self.members.len();
        let keeps = |seat: &Seat| seat.node.fixed_rank.or(seat.rank).filter(|&rank| rank < count);
        let mut taken = vec![false; count];
        self.members.iter().filter_map(keeps).for_each(|rank| taken[rank] = true);
        let mut gaps = (0..count).filter(|&rank| !taken[rank]);
        for seat in &mut self.members {
            seat.rank = keeps(seat).or_else(|| gaps.next());
        }
        self.members.sort_by_key(|seat| seat.rank);
        self.phase = Phase::Running;
        self.reason.clear();
    }

    /// A rank failed. Only the first failure of a round counts.
    pub(super) fn fail(&mut self, id: &str, mut failure: JobFailure) {
        if self.phase != Phase::Running || self.round != failure.round || self.seat(id).is_none() {
            return;
        }
        clip(&mut failure.text);
        clip(&mut failure.summary);
        let reason = format!("rank {} on node {} failed: {}", failure.rank, failure.host, failure.summary);
        self.failure = Some(failure);
        match self.use_restart() {
            true => self.reopen(reason),
            false => self.end(Ending::Failed, reason),
        }
    }

    fn use_restart(&mut self) -> bool {
        let left = self.restarts_used < self.max_restarts;
        self.restarts_used += u64::from(left);
        left
    }

    /// All ranks of a member succeeded.
    pub(super) fn done(&mut self, id: &str, round: u64) {
        if self.phase != Phase::Running || self.round != round {
            return;
        }
        if let Some(seat) = self.seat(id) {
            seat.done = true;
        }
        if self.members.iter().all(|seat| seat.done) {
            self.end(Ending::Success, String::new());
        }
    }

    /// A node leaves or is dead. A round cannot continue without a member, unless that one is done.
    pub(super) fn remove(&mut self, id: &str, why: &str) {
        self.spares.retain(|node| node.id != id);
        let Some(at) = self.members.iter().position(|seat| seat.node.id == id) else { return };
        if self.phase == Phase::Running && self.members[at].done {
            return;
        }
        self.members.remove(at);
        match self.phase {
            Phase::Over => return,
            Phase::Joining => self.promote(),
            Phase::Running => {
                self.reopen(why.into());
                let (left, min) = (self.members.len(), self.nodes_min);
                if left < min && !self.use_restart() {
                    let used = self.restarts_used;
                    let text = format!(
                        "{why}; {left} of at least {min} nodes are left, and all restarts are used ({used})"
                    );
                    self.end(Ending::Closed, text);
                }
            }
        }
        if self.members.is_empty() && self.phase != Phase::Over {
            self.end(Ending::Closed, why.into());
        }
    }

    fn end(&mut self, outcome: Ending, reason: String) {
        self.phase = Phase::Over;
        self.outcome = Some(outcome);
        self.reason = reason;
        self.members.iter_mut().for_each(|seat| seat.ready = false);
    }

    /// How the job ended, if it did.
    pub(super) fn outcome(&self) -> Option<Outcome> {
        Some(match self.outcome? {
            Ending::Success => Outcome::Success,
            Ending::Failed => Outcome::Failed(self.failure.clone()?),
            Ending::Closed => Outcome::Closed(self.reason.clone()),
        })
    }

    /// A node has acknowledged that the job is over.
    pub(super) fn acknowledge(&mut self, id: &str) {
        if self.phase == Phase::Over {
            self.spares.retain(|node| node.id != id);
            if let Some(seat) = self.seat(id) {
                seat.ready = true;
            }
        }
    }

    /// Over, and all nodes know.
    pub(super) fn is_settled(&self) -> bool {
        self.phase == Phase::Over && self.spares.is_empty() && self.members.iter().all(|seat| seat.ready)
    }
}

fn clip(text: &mut String) {
    if text.len() <= FAILURE_TEXT_MAX {
        return;
    }
    let end = (0..=FAILURE_TEXT_MAX).rev().find(|&end| text.is_char_boundary(end));
    text.truncate(end.unwrap_or(0));
}
