//! What the nodes agree on, and the ways in which it may change.
//!
//! A round is joined, runs, and is followed by the next one, until the job is over. While `joining`, `round`
//! is the one that will start; a member is `ready` when none of its ranks run. While `running`, a member is
//! `done` when all its ranks have succeeded. When `over`, a member is `ready` when it has acknowledged the
//! end: only after all have may a node begin another job under the same run id.
//!
//! Every change can be made twice without harm, and does nothing where it does not apply.

use std::collections::HashMap;
use std::ops::{Deref, DerefMut};

use serde::{Deserialize, Serialize};
use tenfold_dashboard::job::{
    Ending, Head, JobFailure, NODES_MAX, NodeInfo, Phase, Seat, Stamp, StoreHost, page_of, pages_for,
};

use super::{FAILURE_TEXT_MAX, NODE_RANKS_MAX, Settings};

/// Bytes of a head as text: twice what a job with all its pages and long names needs.
const TEXT_MAX: usize = 64 << 10;
/// Bytes of a page as text: more than 32 nodes with long names need, even if the hash is unkind.
pub(super) const PAGE_TEXT_MAX: usize = 1 << 20;
/// Bytes of the reason of a stop. All nodes read it with every change of the state.
const REASON_MAX: usize = 2 << 10;
/// In a job with at most so many nodes, all of them see immediately that a node has joined or left. In a
/// larger one they see it with their next heartbeat, or when it leads to something.
const NOTED_MAX: usize = 16;
/// Hosts that are listed in the head, for messages.
pub(super) const HOSTS_MAX: usize = 16;

/// The whole state, as the node has it that changes it. Other nodes have a [`View`].
#[derive(Clone, Debug, PartialEq)]
pub(super) struct State {
    pub(super) head: Head,
    /// By node rank while a round runs, newcomers at the end.
    pub(super) members: Vec<Seat>,
    /// Nodes beyond the maximum, in the order in which they joined.
    pub(super) spares: Vec<Seat>,
    /// The last failure of a rank.
    pub(super) failure: Option<JobFailure>,
}

impl Deref for State {
    type Target = Head;
    fn deref(&self) -> &Head {
        &self.head
    }
}

impl DerefMut for State {
    fn deref_mut(&mut self) -> &mut Head {
        &mut self.head
    }
}

/// What the nodes of a job must have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Limits {
    pub(super) nodes_min: usize,
    pub(super) nodes_max: usize,
    pub(super) max_restarts: u64,
}

/// What one node sees of a state.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct View {
    pub(super) head: Head,
    /// The nodes in the page where this node is, or would be.
    pub(super) page: Vec<Seat>,
    /// Only if the job has failed.
    pub(super) failure: Option<JobFailure>,
}

/// The role of a node in a state.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Place<'a> {
    Member(&'a Seat),
    Spare,
    Absent,
}

impl<'a> Place<'a> {
    fn of(seat: Option<&'a Seat>) -> Place<'a> {
        match seat {
            None => Place::Absent,
            Some(seat) if seat.spare => Place::Spare,
            Some(seat) => Place::Member(seat),
        }
    }
}

impl View {
    pub(super) fn place(&self, id: &str) -> Place<'_> {
        Place::of(self.page.iter().find(|seat| seat.node.id == id))
    }
}

/// What must be written for one state to replace another.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Change {
    /// First these texts, under names of their own.
    pub(super) stamp: Stamp,
    pub(super) pages: Vec<(usize, Vec<Seat>)>,
    pub(super) failure: Option<JobFailure>,
    /// Then the head, in place of the one before. Then the key of its turn, if it has a new one.
    pub(super) turn: Option<u64>,
    /// Then these are not needed any more.
    pub(super) pages_old: Vec<(usize, Stamp)>,
    pub(super) failure_old: Option<Stamp>,
    pub(super) removed: Vec<String>,
}

/// The head of a job without nodes.
pub(super) fn first_head(settings: &Settings, folder: &str) -> Head {
    Head {
        version: 1,
        turn: 1,
        term: 1,
        folder: folder.into(),
        phase: Phase::Joining,
        nodes_min: settings.nodes_min,
        nodes_max: settings.nodes_max,
        max_restarts: settings.max_restarts,
        ..Head::default()
    }
}

/// The same state with another folder.
pub(super) fn taken_over(head: &Head, folder: &str) -> Head {
    let (version, turn, term) = (head.version + 1, head.turn + 1, head.term + 1);
    Head { version, turn, term, folder: folder.into(), ..head.clone() }
}

/// The head of the next job under this run id.
pub(super) fn next_job(head: &Head, settings: &Settings, folder: &str) -> Head {
    let Head { version, turn, term, .. } = taken_over(head, folder);
    let (job, folded, joined) = (head.job + 1, head.folded, head.joined);
    Head { version, turn, term, job, folded, joined, ..first_head(settings, folder) }
}

/// Parses what the store holds; the error says what is wrong with it.
pub(super) fn parse_head(text: &[u8]) -> Result<Head, String> {
    if text.len() > TEXT_MAX {
        return Err(format!("it is {} bytes long, the limit is {TEXT_MAX}", text.len()));
    }
    let head: Head = serde_json::from_slice(text).map_err(|error| error.to_string())?;
    check_head(&head).map_err(|what| format!("it is inconsistent: {what}"))?;
    Ok(head)
}

pub(super) fn head_text(head: &Head) -> Result<Vec<u8>, String> {
    let text = serde_json::to_vec(head).map_err(|error| error.to_string())?;
    match text.len() > TEXT_MAX {
        true => Err(format!("it would be {} bytes long, the limit is {TEXT_MAX}", text.len())),
        false => Ok(text),
    }
}

fn check_head(head: &Head) -> Result<(), &'static str> {
    let nodes = head.members_count.saturating_add(head.spares_count);
    let ended = match head.outcome {
        None => head.phase != Phase::Over,
        Some(Ending::Failed) => head.phase == Phase::Over && head.failure.is_some(),
        Some(_) => head.phase == Phase::Over,
    };
    let counters = [head.version, head.turn, head.term, head.round, head.job, head.folded, head.joined];
    let facts = [
        (head.term > 0 && !head.folder.is_empty(), "no node has the task of changing it"),
        (head.phase != Phase::Unknown, "its phase is unknown"),
        (head.outcome != Some(Ending::Unknown), "its outcome is unknown"),
        (nodes <= NODES_MAX, "too many nodes"),
        (head.pages.len() == pages_for(nodes), "the number of pages is wrong"),
        (
            1 <= head.nodes_min && head.nodes_min <= head.nodes_max,
            "the limits of the number of nodes are wrong",
        ),
        (head.members_count <= head.nodes_max, "more members than allowed"),
        (ended, "phase and outcome contradict each other"),
        (counters.iter().all(|&counter| counter < COUNTER_MAX), "a counter has reached its limit"),
    ];
    facts.iter().find(|(holds, _)| !holds).map_or(Ok(()), |(_, what)| Err(what))
}

/// Far from any overflow, and a number that `add` of a store can count.
const COUNTER_MAX: u64 = 1 << 62;

/// Ranks of all members, of each role, and before each member.
pub(super) fn number(members: &mut [Seat]) {
    let mut roles: HashMap<String, usize> = HashMap::new();
    let mut first = 0;
    for seat in &mut *members {
        let in_role = roles.entry(seat.node.role.clone()).or_default();
        (seat.first_rank, seat.first_role_rank) = (first, *in_role);
        *in_role += seat.node.ranks;
        first += seat.node.ranks;
    }
    for seat in members {
        seat.role_ranks = roles.get(&seat.node.role).copied().unwrap_or(0);
    }
}

impl State {
    /// A job without nodes has only a head.
    #[cfg(test)]
    pub(super) fn of_head(head: Head) -> State {
        State { head, members: Vec::new(), spares: Vec::new(), failure: None }
    }

    /// The state from its parts; the error says what is wrong with them.
    pub(super) fn assemble(
        head: Head,
        seats: Vec<Seat>,
        failure: Option<JobFailure>,
    ) -> Result<State, String> {
        let (mut spares, mut members): (Vec<Seat>, Vec<Seat>) =
            seats.into_iter().partition(|seat| seat.spare);
        members.sort_by_key(|seat| (seat.rank.is_none(), seat.rank, seat.joined));
        spares.sort_by_key(|seat| seat.joined);
        let state = State { head, members, spares, failure };
        state.check().map_err(|what| format!("it is inconsistent: {what}"))?;
        Ok(state)
    }

    /// The invariants that everything here relies on, except for those of the head.
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
        let (members, spares) = (self.head.members_count, self.head.spares_count);
        let facts = [
            ((self.members.len(), self.spares.len()) == (members, spares), "nodes are missing in its pages"),
            (ids.len() == count, "a node is listed twice"),
            (ranks.len() == ranked, "two nodes have the same rank"),
            (fixed.len() == given, "two nodes were given the same rank"),
            (self.nodes().all(|node| node.ranks <= NODE_RANKS_MAX), "a node has too many ranks"),
            (self.phase != Phase::Running || all_ranked, "a round runs without all its ranks"),
            (self.failure.is_some() == self.head.failure.is_some(), "the report of the failure is missing"),
        ];
        facts.iter().find(|(holds, _)| !holds).map_or(Ok(()), |(_, what)| Err(what))
    }

    /// What the node with this id sees of it.
    pub(super) fn view(&self, id: &str) -> View {
        let pages = self.head.pages.len();
        let own = page_of(id, pages);
        let page = self.seats().filter(|seat| page_of(&seat.node.id, pages) == own).cloned().collect();
        let failure = self.failure.clone().filter(|_| self.outcome == Some(Ending::Failed));
        View { head: self.head.clone(), page, failure }
    }

    /// Makes this the state that follows `before`, and returns what must be written for that.
    pub(super) fn seal(&mut self, before: &State, stamp: Stamp) -> Change {
        clip(&mut self.head.reason, REASON_MAX);
        self.summarize();
        self.version = before.version + 1;
        if self.concerns_all(before) {
            self.turn = before.turn + 1;
        }
        let turn = Some(self.turn).filter(|&turn| turn != before.turn);
        let count = pages_for(self.members.len() + self.spares.len());
        let (old, new) = (before.pages_of(count), self.pages_of(count));
        let is_same = before.head.pages.len() == count;
        let changed: Vec<usize> = (0..count).filter(|&index| !is_same || old[index] != new[index]).collect();
        let pages: Vec<(usize, Vec<Seat>)> = changed
            .iter()
            .map(|&index| (index, new[index].iter().map(|&seat| seat.clone()).collect()))
            .collect();
        let named = before.head.pages.iter().copied().enumerate();
        let pages_old = named.filter(|(index, _)| !is_same || changed.contains(index)).collect();
        let kept: std::collections::HashSet<&str> = self.ids().collect();
        let removed = before.ids().filter(|id| !kept.contains(id)).map(String::from).collect();
        let failure = self.failure.clone().filter(|_| self.failure != before.failure);
        if !is_same {
            self.head.pages = vec![stamp; count];
        }
        for &index in &changed {
            self.head.pages[index] = stamp;
        }
        let failure_old = before.head.failure.filter(|_| self.failure != before.failure);
        if self.failure != before.failure {
            self.head.failure = self.failure.as_ref().map(|_| stamp);
        }
        Change { stamp, pages, failure, turn, pages_old, failure_old, removed }
    }

    /// Puts into the head what nodes need that do not see the others.
    fn summarize(&mut self) {
        let count = |is: fn(&Seat) -> bool| self.members.iter().filter(|&seat| is(seat)).count();
        let (ready, done) = (count(|seat| seat.ready), count(|seat| seat.done));
        let hosts: Vec<String> = match self.phase {
            Phase::Joining => {
                let is_enough = self.members.len() >= self.nodes_min;
                let named = self.members.iter().filter(|seat| !is_enough || !seat.ready);
                named.take(HOSTS_MAX).map(|seat| seat.node.host.clone()).collect()
            }
            _ => Vec::new(),
        };
        let store = self.members.iter().find_map(|seat| {
            let address = seat.node.worker_store.clone()?;
            Some(StoreHost { node: seat.node.id.clone(), address })
        });
        (self.head.members_count, self.head.spares_count) = (self.members.len(), self.spares.len());
        (self.head.ready_count, self.head.done_count, self.head.hosts) = (ready, done, hosts);
        self.head.ranks = self.members.iter().map(|seat| seat.node.ranks).sum();
        self.head.store = store;
        self.head.settled = self.is_settled();
    }

    /// Whether all nodes must see this state immediately.
    fn concerns_all(&self, before: &State) -> bool {
        let what = |state: &State| (state.job, state.round, state.phase, state.settled);
        let places = |state: &State| -> Vec<(String, bool)> {
            state.seats().map(|seat| (seat.node.id.clone(), seat.spare)).collect()
        };
        let count = self.members.len() + self.spares.len();
        what(self) != what(before)
            || self.folder != before.folder
            || (count <= NOTED_MAX && places(self) != places(before))
    }

    fn pages_of(&self, count: usize) -> Vec<Vec<&Seat>> {
        let mut pages = vec![Vec::new(); count];
        for seat in self.seats().filter(|_| count > 0) {
            pages[page_of(&seat.node.id, count)].push(seat);
        }
        pages
    }

    /// All nodes, members first.
    pub(super) fn seats(&self) -> impl DoubleEndedIterator<Item = &Seat> {
        self.members.iter().chain(&self.spares)
    }

    pub(super) fn ids(&self) -> impl Iterator<Item = &str> {
        self.nodes().map(|node| node.id.as_str())
    }

    pub(super) fn nodes(&self) -> impl Iterator<Item = &NodeInfo> {
        self.seats().map(|seat| &seat.node)
    }

    pub(super) fn place(&self, id: &str) -> Place<'_> {
        Place::of(self.seats().find(|seat| seat.node.id == id))
    }

    fn seat(&mut self, id: &str) -> Option<&mut Seat> {
        self.members.iter_mut().find(|seat| seat.node.id == id)
    }

    /// Why this node cannot join, and, if another node blocks it, the id of that node.
    pub(super) fn objection(
        &self,
        run_id: &str,
        ours: Limits,
        node: &NodeInfo,
    ) -> Option<(String, Option<String>)> {
        let theirs =
            Limits { nodes_min: self.nodes_min, nodes_max: self.nodes_max, max_restarts: self.max_restarts };
        if theirs != ours {
            let show = |limits: Limits| {
                let Limits { nodes_min, nodes_max, max_restarts } = limits;
                format!("{nodes_min} to {nodes_max} nodes and {max_restarts} restarts")
            };
            let (ours, theirs) = (show(ours), show(theirs));
            return Some((
                format!(
                    "this node was started for {ours}, but the running job `{run_id}` has {theirs}\n  \
                 hint: give all nodes the same settings, or this node another run id"
                ),
                None,
            ));
        }
        if self.members.len() + self.spares.len() >= NODES_MAX {
            return Some((format!("the job `{run_id}` has {NODES_MAX} nodes already"), None));
        }
        let kind = |fixed: bool| if fixed { "a fixed node rank" } else { "no node rank" };
        // All nodes that have joined are of one kind.
        if let Some(other) =
            self.nodes().next().filter(|other| other.fixed_rank.is_some() != node.fixed_rank.is_some())
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
            Some(same.id.clone()),
        ))
    }

    /// A newcomer, or a removed node that is back. If there is room, the next round is opened for it, unless
    /// some nodes are done: then the job is about to end.
    pub(super) fn join(&mut self, node: &NodeInfo) {
        if self.phase == Phase::Over || self.place(&node.id) != Place::Absent {
            return;
        }
        self.joined += 1;
        let (node, joined) = (node.clone(), self.joined);
        let reason = format!("node {} joined", node.host);
        self.spares.push(Seat { node, joined, spare: true, ..Seat::default() });
        let has_room = self.members.len() < self.nodes_max;
        match self.phase {
            Phase::Running if has_room && !self.members.iter().any(|seat| seat.done) => {
                self.reopen(reason);
            }
            Phase::Joining => self.promote(),
            _ => {}
        }
    }

    /// Spares become members while there is room. They have no ranks to stop.
    fn promote(&mut self) {
        let count = self.nodes_max.saturating_sub(self.members.len()).min(self.spares.len());
        let seats = self.spares.drain(..count).map(|seat| Seat { spare: false, ready: true, ..seat });
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
        number(&mut self.members);
        self.phase = Phase::Running;
        self.reason.clear();
    }

    /// A rank failed. Only the first failure of a round counts.
    pub(super) fn fail(&mut self, id: &str, mut failure: JobFailure) {
        if self.phase != Phase::Running || self.round != failure.round || self.seat(id).is_none() {
            return;
        }
        clip(&mut failure.text, FAILURE_TEXT_MAX);
        clip(&mut failure.summary, REASON_MAX);
        self.replaced = self.replaced.max(failure.replaced);
        let reason = format!("rank {} on node {} failed: {}", failure.rank, failure.host, failure.summary);
        self.failure = Some(failure);
        match self.use_restart() {
            true => self.reopen(reason),
            false => self.end(Ending::Failed, reason),
        }
    }

    fn use_restart(&mut self) -> bool {
        let left = self.restarts_used.saturating_add(self.replaced) < self.max_restarts;
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
        self.spares.retain(|seat| seat.node.id != id);
        let Some(at) = self.members.iter().position(|seat| seat.node.id == id) else { return };
        if self.phase == Phase::Running && self.members[at].done {
            return;
        }
        self.members.remove(at);
        match self.phase {
            Phase::Over | Phase::Unknown => return,
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

    /// A node has acknowledged that the job is over.
    pub(super) fn acknowledge(&mut self, id: &str) {
        if self.phase == Phase::Over {
            self.spares.retain(|seat| seat.node.id != id);
            if let Some(seat) = self.seat(id) {
                seat.ready = true;
            }
        }
    }

    /// How many wishes complete what the nodes are doing: after so many, no more are to be expected.
    pub(super) fn awaited(&self) -> usize {
        let missing = |is: fn(&Seat) -> bool| self.members.iter().filter(|&seat| !is(seat)).count();
        match self.phase {
            Phase::Running => missing(|seat| seat.done),
            Phase::Over => missing(|seat| seat.ready) + self.spares.len(),
            _ => missing(|seat| seat.ready) + self.nodes_max.saturating_sub(self.members.len()),
        }
    }

    /// Over, and all nodes know.
    pub(super) fn is_settled(&self) -> bool {
        self.phase == Phase::Over && self.spares.is_empty() && self.members.iter().all(|seat| seat.ready)
    }
}

fn clip(text: &mut String, max: usize) {
    if text.len() <= max {
        return;
    }
    let end = (0..=max).rev().find(|&end| text.is_char_boundary(end));
    text.truncate(end.unwrap_or(0));
}
