//! The decisions of one node: what it sends to its launcher, and what it proposes.
//!
//! [`Member::decide`] takes the state as it was read, and what this node knows of itself and of other nodes'
//! beats. The launcher only gets what the state in the store says, never what was merely proposed. All
//! proposals of one decision are written as one new state.

use std::collections::BTreeMap;
use std::time::Duration;

use super::state::{Phase, Place, Seat, State};
use super::{Assignment, Event, JobFailure, NodeInfo, Order, Outcome, Settings};

/// How many other nodes one node listens to; in a large job those that follow it, in a circle.
const HEARD_MAX: usize = 32;

/// What to do now.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Decision {
    /// To be sent to the launcher first.
    pub(super) events: Vec<Event>,
    /// To be written in place of the state that was read, and of no other. Then decide again.
    pub(super) write: Option<State>,
    /// Decide again at this time at the latest; in any case when the state has changed or other nodes' beats
    /// were read.
    pub(super) wake: Option<Duration>,
    /// Nothing is left to do: the job is over, and all nodes know.
    pub(super) finished: bool,
}

impl Decision {
    /// The last one, for this node at least.
    fn last(events: Vec<Event>) -> Decision {
        Decision { events, finished: true, ..Decision::default() }
    }
}

#[derive(Debug)]
pub(super) struct Member {
    settings: Settings,
    node: NodeInfo,
    others: BTreeMap<String, Silence>,
    /// The job in which this node was seen, and the last version of its state.
    job: Option<u64>,
    version: u64,
    /// The round that the launcher was asked to start and not yet to stop.
    started: Option<u64>,
    /// The round whose ranks may still run.
    ranks: Option<u64>,
    round_last: Option<u64>,
    failed: Option<JobFailure>,
    done: Option<u64>,
    leaving: Option<Leaving>,
    /// The message if this node finds that it was removed, after it timed out.
    timed_out: Option<String>,
    /// When the first round first had enough nodes.
    enough_since: Option<Duration>,
    /// The round that cannot start, and since when.
    waits_since: Option<(u64, Duration)>,
    note: String,
    /// The launcher knows that the job is over.
    over: bool,
}

#[derive(Debug)]
struct Leaving {
    /// For the other nodes.
    why: String,
    /// For this launcher.
    text: String,
}

/// What is known of another node's beat.
#[derive(Debug)]
struct Silence {
    beat: Option<u64>,
    /// The beat has changed since we started to listen.
    moved: bool,
    silent: Duration,
    read: Duration,
}

impl Member {
    pub(super) fn new(settings: Settings, node: NodeInfo) -> Member {
        Member {
            settings,
            node,
            others: BTreeMap::new(),
            job: None,
            version: 0,
            started: None,
            ranks: None,
            round_last: None,
            failed: None,
            done: None,
            leaving: None,
            timed_out: None,
            enough_since: None,
            waits_since: None,
            note: String::new(),
            over: false,
        }
    }

    /// Whether the launcher knows that the job is over.
    pub(super) fn is_over(&self) -> bool {
        self.over
    }

    /// Must something be written before this node may leave?
    pub(super) fn is_leaving(&self) -> bool {
        self.leaving.is_some()
    }

    /// Handles an order of the launcher. Orders about a past round are dropped.
    pub(super) fn obey(&mut self, order: Order) {
        match order {
            Order::Stopped { round } if self.ranks == Some(round) => self.ranks = None,
            Order::Done { round } if self.ranks == Some(round) => {
                (self.ranks, self.done) = (None, Some(round));
            }
            Order::Failed { round, mut failure }
                if self.ranks == Some(round) && self.started == Some(round) =>
            {
                failure.round = round;
                self.failed.get_or_insert(failure);
            }
            Order::Leave { reason } if self.leaving.is_none() => {
                let why = format!("node {} left: {reason}", self.node.host);
                self.leaving = Some(Leaving { why, text: format!("this node left the job: {reason}") });
            }
            _ => {}
        }
    }

    /// The nodes whose beats to read before the next decision.
    pub(super) fn listens_to(&self, state: &State) -> Vec<String> {
        let ids: Vec<&str> = state.ids().collect();
        let own = ids.iter().position(|&id| id == self.node.id);
        let mut heard: Vec<String> = match own {
            Some(own) => {
                ids[own + 1..].iter().chain(&ids[..own]).take(HEARD_MAX).map(|&id| id.into()).collect()
            }
            None => ids.iter().take(HEARD_MAX).map(|&id| id.into()).collect(),
        };
        // A node that blocks us must be known to be alive, or dead.
        if own.is_none()
            && let Some((_, Some(id))) = state.objection(&self.settings, &self.node)
            && !heard.iter().any(|heard| heard == id)
        {
            heard.push(id.into());
        }
        heard
    }

    /// The beat of another node as it was read at `now`. A reader that was frozen itself must not count that
    /// time: from one reading to the next, at most one interval counts against a node.
    pub(super) fn hear(&mut self, id: &str, beat: Option<u64>, now: Duration) {
        let fresh = Silence { beat, moved: false, silent: Duration::ZERO, read: now };
        let other = self.others.entry(id.into()).or_insert(fresh);
        if other.beat == beat {
            other.silent += now.saturating_sub(other.read).min(self.settings.beat_interval);
        } else {
            (other.beat, other.moved, other.silent) = (beat, true, Duration::ZERO);
        }
        other.read = now;
    }

    fn is_dead(&self, id: &str) -> bool {
        self.others.get(id).is_some_and(|other| other.silent >= self.settings.silence_max())
    }

    fn is_alive(&self, id: &str) -> bool {
        self.others.get(id).is_some_and(|other| other.moved && !self.is_dead(id))
    }

    /// The store cannot be used any more.
    pub(super) fn lose(&mut self, text: String) -> Vec<Event> {
        if self.over { Vec::new() } else { self.end(Outcome::Closed(text.clone()), &text) }
    }

    /// Decides what to do about the state that is in the store at `now` of this node's clock.
    pub(super) fn decide(&mut self, state: Option<&State>, now: Duration) -> Decision {
        let events = match state {
            None if self.over => Vec::new(),
            None if self.job.is_some() => self.lose(self.forgotten()),
            None => match self.leaving.take() {
                Some(leaving) => self.end(Outcome::Closed(leaving.text), &leaving.why),
                None => match self.own_objection() {
                    Some(text) => self.lose(text),
                    None => {
                        let write = Some(State::new(&self.settings, &self.node));
                        return Decision { write, ..Decision::default() };
                    }
                },
            },
            Some(state) => return self.decide_on(state, now),
        };
        Decision::last(events)
    }

    fn forgotten(&self) -> String {
        format!(
            "the store has forgotten the job `{}`\n  hint: if its server was restarted, start all nodes again",
            self.settings.run_id
        )
    }

    fn decide_on(&mut self, state: &State, now: Duration) -> Decision {
        if let Some(job) = self.job {
            if state.job > job && !self.over {
                let text =
                    format!("the job `{}` ended while this node was unresponsive", self.settings.run_id);
                return Decision::last(self.lose(text));
            }
            if (state.job, state.version) < (job, self.version) {
                return Decision::last(self.lose(self.forgotten()));
            }
        }
        self.version = state.version;
        self.others.retain(|id, _| state.ids().any(|other| other == id));
        let is_absent = state.place(&self.node.id) == Place::Absent;
        if let Some(text) = self.timed_out.take().filter(|_| is_absent) {
            return Decision::last(self.lose(text));
        }
        if !is_absent && !self.over {
            self.job = Some(state.job);
        }
        let mut decision = match state.phase {
            Phase::Over => self.decide_over(state),
            _ if self.over => Decision::last(Vec::new()), // it has left, or the next job has begun
            _ => self.decide_open(state, now),
        };
        if let Some(write) = &mut decision.write {
            write.version = state.version + 1;
        }
        decision
    }

    /// The job is over. Its nodes acknowledge that; a newcomer waits until all have, and begins another.
    fn decide_over(&mut self, state: &State) -> Decision {
        let mut next = state.clone();
        let unaware = state.members.iter().filter(|seat| !seat.ready).map(|seat| &seat.node);
        for node in unaware.chain(&state.spares).filter(|node| self.is_dead(&node.id)) {
            next.remove(&node.id, "");
        }
        let is_ours = self.job == Some(state.job);
        if self.over && !is_ours {
            return Decision::last(Vec::new());
        }
        let mut decision = Decision::default();
        if is_ours {
            next.acknowledge(&self.node.id);
            decision.finished = state.is_settled();
        }
        if !self.over && (is_ours || self.leaving.is_some() || self.own_objection().is_some()) {
            let left = self.leaving.take().filter(|_| state.place(&self.node.id) == Place::Absent);
            let own = left.map(|left| left.text).or_else(|| self.own_objection()).map(Outcome::Closed);
            let outcome = own.or_else(|| state.outcome()).unwrap_or(Outcome::Closed(state.reason.clone()));
            decision.events = self.end(outcome, &state.reason);
            decision.finished |= !is_ours;
        } else if !is_ours && state.is_settled() {
            next = state.next_job(&self.settings, &self.node);
        } else if !is_ours {
            let note = "the previous job with this run id has not ended on all its nodes; waiting for them";
            decision.events.extend(self.note(note.into()));
        }
        decision.write = (next != *state).then_some(next);
        decision
    }

    fn decide_open(&mut self, state: &State, now: Duration) -> Decision {
        let place = state.place(&self.node.id);
        let mut next = state.clone();
        if let Some(leaving) = &self.leaving {
            next.remove(&self.node.id, &leaving.why);
            if next != *state {
                return Decision { write: Some(next), ..Decision::default() };
            }
            // It was removed; or it was done, and no node waits for it.
            let (text, why) = (leaving.text.clone(), leaving.why.clone());
            return Decision::last(self.end(Outcome::Closed(text), &why));
        }
        let mut decision = Decision::default();
        decision.events.extend(self.stop(state, place));
        decision.events.extend(self.start(state, place));
        if let Err(text) = self.speak(state, place, &mut next) {
            decision.events.extend(self.lose(text));
            return Decision::last(decision.events);
        }
        let silence = self.settings.silence_max().as_secs_f64();
        for node in state.nodes().filter(|node| self.is_dead(&node.id)) {
            if next.phase == Phase::Over {
                break; // a missing node has not acknowledged it
            }
            next.remove(&node.id, &format!("node {} sent no heartbeat for {silence} s", node.host));
        }
        self.time(state, place, now, &mut next, &mut decision);
        decision.events.extend(self.explain(state));
        decision.write = (next != *state).then_some(next);
        decision
    }

    fn stop(&mut self, state: &State, place: Place<'_>) -> Option<Event> {
        let is_member = matches!(place, Place::Member(_));
        let round = self
            .started
            .filter(|&round| state.round != round || state.phase != Phase::Running || !is_member)?;
        self.started = None;
        let reason = match place {
            Place::Member(_) => state.reason.clone(),
            _ => "the others gave this node up, since it sent no heartbeat for some time; it joins again"
                .into(),
        };
        Some(Event::Stop { round, reason })
    }

    fn start(&mut self, state: &State, place: Place<'_>) -> Option<Event> {
        let Place::Member(Seat { rank: Some(node_rank), .. }) = place else { return None };
        let is_new = self.round_last.is_none_or(|last| last < state.round);
        if state.phase != Phase::Running || !is_new || !self.is_idle() {
            return None;
        }
        let State { job, round, restarts_used, .. } = *state;
        (self.started, self.ranks, self.round_last) = (Some(round), Some(round), Some(round));
        (self.failed, self.done) = (None, None);
        let nodes = state.members.iter().map(|seat| seat.node.clone()).collect();
        Some(Event::Start(Assignment { job, round, restarts_used, node_rank: *node_rank, nodes }))
    }

    /// No rank runs, and the launcher knows of every end.
    fn is_idle(&self) -> bool {
        self.started.is_none() && self.ranks.is_none()
    }

    /// Puts what this node has to report about itself into `next`; or returns why it cannot take part.
    fn speak(&self, state: &State, place: Place<'_>, next: &mut State) -> Result<(), String> {
        match place {
            Place::Absent if self.is_idle() => {
                if let Some(text) = self.own_objection() {
                    return Err(text);
                }
                match state.objection(&self.settings, &self.node) {
                    None => next.join(&self.node),
                    // What dead nodes left behind is not a reason: it will be removed.
                    Some((text, who)) => {
                        if state.ids().any(|id| who.is_none_or(|who| who == id) && self.is_alive(id)) {
                            return Err(text);
                        }
                    }
                }
            }
            Place::Member(_) => {
                if let Some(failure) = &self.failed {
                    next.fail(&self.node.id, failure.clone());
                }
                if let Some(round) = self.done {
                    next.done(&self.node.id, round);
                }
                if self.is_idle() {
                    next.ready(&self.node.id);
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// What is wrong with this node, whatever other nodes there are.
    fn own_objection(&self) -> Option<String> {
        let (rank, min, max) = (self.node.fixed_rank?, self.settings.nodes_min, self.settings.nodes_max);
        if min != max {
            return Some(format!(
                "{min} to {max} nodes cannot have fixed node ranks\n  hint: omit the node rank, or give a single number of nodes"
            ));
        }
        (rank >= max).then(|| {
            format!("node rank {rank} is too high: of {max} nodes the last one has rank {}", max - 1)
        })
    }

    /// Begins a round that is due, and does not wait forever for one that never gets ready.
    fn time(
        &mut self,
        state: &State,
        place: Place<'_>,
        now: Duration,
        next: &mut State,
        decision: &mut Decision,
    ) {
        if next.phase != Phase::Joining || !matches!(place, Place::Member(_)) {
            (self.enough_since, self.waits_since) = (None, None);
            return;
        }
        if next.can_begin() {
            self.waits_since = None;
            let enough_since = *self.enough_since.get_or_insert(now);
            let last_call = enough_since.saturating_add(self.settings.last_call);
            if next.round > 0 || next.members.len() == next.nodes_max || now >= last_call {
                next.begin();
            } else {
                decision.wake = Some(last_call);
            }
            return;
        }
        self.enough_since = None;
        let since = match self.waits_since {
            Some((round, since)) if round == next.round => since,
            _ => now,
        };
        self.waits_since = Some((next.round, since));
        let until = since.saturating_add(self.settings.join_timeout);
        decision.wake = Some(until);
        if now >= until {
            // The missing node may join at this moment: this is reported only if the store says so.
            self.timed_out = Some(self.describe_wait(state));
            *next = state.clone();
            next.remove(&self.node.id, &format!("node {} left: it had waited too long", self.node.host));
        }
    }

    fn describe_wait(&self, state: &State) -> String {
        let (count, min) = (state.members.len(), state.nodes_min);
        let seconds = self.settings.join_timeout.as_secs_f64();
        if count >= min {
            let late = state.members.iter().filter(|seat| !seat.ready);
            return format!(
                "the ranks of the previous round did not exit within {seconds} s on {}",
                hosts(late.map(|seat| &seat.node))
            );
        }
        let came = hosts(state.members.iter().map(|seat| &seat.node));
        format!(
            "{count} of {min} nodes joined within {seconds} s: {came}\n  \
             hint: check that the other nodes were started with the same run id and endpoint, or raise the join timeout"
        )
    }

    /// One line about what is waited for, if that has changed.
    fn explain(&mut self, state: &State) -> Option<Event> {
        let (count, min, max) = (state.members.len(), state.nodes_min, state.nodes_max);
        let note = match state.place(&self.node.id) {
            Place::Spare if count == max => {
                format!("{max} nodes have joined already; this node waits as a spare")
            }
            Place::Spare => "the job is about to end; this node waits as a spare".into(),
            Place::Member(_) if state.phase == Phase::Joining && count < min => {
                let seconds = self.settings.join_timeout.as_secs_f64();
                format!("{count} of {min} nodes have joined; waiting for the rest for up to {seconds} s")
            }
            Place::Member(_) if state.phase == Phase::Joining && state.round == 0 && count < max => {
                let seconds = self.settings.last_call.as_secs_f64();
                let here = if count == 1 { "1 node has".into() } else { format!("{count} nodes have") };
                format!("{here} joined; waiting for up to {} more for {seconds} s", max - count)
            }
            _ => String::new(),
        };
        self.note(note)
    }

    fn note(&mut self, note: String) -> Option<Event> {
        let is_new = note != self.note && !note.is_empty();
        self.note.clone_from(&note);
        is_new.then_some(Event::Note(note))
    }

    /// The last events.
    fn end(&mut self, outcome: Outcome, reason: &str) -> Vec<Event> {
        let mut events = Vec::new();
        // A node that was removed may see the others succeed.
        if let Some(round) = self.started.take()
            && (outcome != Outcome::Success || self.ranks.is_some())
        {
            events.push(Event::Stop {
                round,
                reason: reason.lines().next().unwrap_or("the job is over").into(),
            });
        }
        self.over = true;
        events.push(Event::Over(outcome));
        events
    }
}

/// Hosts for the user, not too many of them.
fn hosts<'a>(nodes: impl Iterator<Item = &'a NodeInfo>) -> String {
    const SHOWN_MAX: usize = 16;
    let mut names: Vec<&str> = nodes.map(|node| node.host.as_str()).collect();
    let more = names.len().saturating_sub(SHOWN_MAX);
    names.truncate(SHOWN_MAX);
    let names = names.join(", ");
    if more > 0 { format!("{names} and {more} more") } else { names }
}
