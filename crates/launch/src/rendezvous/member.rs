//! The decisions of one node: what it sends to its launcher, and what it wishes.
//!
//! [`Member::decide`] takes what this node sees of the state, and what it knows of itself and of other nodes'
//! beats. The launcher only gets what the state in the store says, never what was merely wished. A wish is
//! repeated until the state shows that it was granted or is void, so it may get lost.

use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tenfold_dashboard::job::{Ending, Head, JobFailure, NodeInfo, Phase, Seat};

use super::state::{HOSTS_MAX, Limits, Place, State, View, first_head, next_job, taken_over};
use super::{Assignment, Event, Order, Outcome, Settings};

/// How many nodes one node listens to, besides the folder: those that follow it in its page, in a circle. They
/// are what it knows when it becomes the folder.
const HEARD_MAX: usize = 8;

/// What to do now.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Decision {
    /// To be sent to the launcher first.
    pub(super) events: Vec<Event>,
    /// To be written in place of the head that was read, and of no other. Then decide again.
    pub(super) claim: Option<Head>,
    /// To be put among the wishes; by the folder, to be folded.
    pub(super) wish: Option<Wish>,
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

/// What a node wants to have in the state. It names what it is about, so it is void if that has passed, and
/// may come late or twice.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Wish {
    pub(super) node: String,
    pub(super) job: u64,
    pub(super) round: u64,
    pub(super) what: What,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum What {
    /// The node wants to take part. None of its ranks run.
    Join {
        node: NodeInfo,
        limits: Limits,
    },
    /// None of its ranks run.
    Ready,
    /// All its ranks have succeeded.
    Done,
    Failed {
        failure: JobFailure,
    },
    /// The node has been asked to leave.
    Leave {
        why: String,
    },
    /// The node has waited too long for the round.
    GiveUp,
    /// The node knows that the job is over.
    Acknowledge,
}

impl What {
    /// Whether the node may exit as soon as it has made this wish.
    pub(super) fn is_parting(&self) -> bool {
        matches!(self, What::Leave { .. } | What::GiveUp | What::Acknowledge)
    }
}

#[derive(Debug)]
pub(super) struct Member {
    pub(super) settings: Settings,
    pub(super) node: NodeInfo,
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
    /// Whether something in the state is not as this node wishes.
    pub(super) has_wish: bool,
    /// The last wish, and when it was made.
    wished: Option<(Wish, Duration)>,
    /// The round that this node gave up, and the message if it finds that it was removed.
    timed_out: Option<(u64, String)>,
    /// Why the folder does not let this node join.
    refused: Option<String>,
    /// As folder: when the first round first had enough nodes.
    pub(super) enough_since: Option<Duration>,
    /// As folder: the term in which this node has read all beats.
    pub(super) heard_in: Option<u64>,
    /// As folder: how many states were made.
    pub(super) stamps: u64,
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
            has_wish: false,
            wished: None,
            timed_out: None,
            refused: None,
            enough_since: None,
            heard_in: None,
            stamps: 0,
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

    /// The last wish did not reach the store.
    pub(super) fn wish_again(&mut self) {
        self.wished = None;
    }

    /// The folder has answered that this node cannot join.
    pub(super) fn refuse(&mut self, text: String) {
        self.refused = Some(text);
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

    /// The nodes whose beats to read before the next decision: the folder listens to all nodes, the others to
    /// it and to some more.
    pub(super) fn listens_to(&mut self, view: &View, folded: Option<&State>) -> Vec<String> {
        let mut heard: Vec<String> = match folded {
            Some(state) => {
                self.heard_in = Some(state.term);
                state.ids().filter(|&id| id != self.node.id).map(String::from).collect()
            }
            None => {
                let own = view.page.iter().position(|seat| seat.node.id == self.node.id);
                let (before, after) = view.page.split_at(own.unwrap_or(0));
                let after = &after[usize::from(own.is_some())..];
                let others = after.iter().chain(before).map(|seat| &seat.node.id);
                others.filter(|&id| *id != view.head.folder).take(HEARD_MAX).cloned().collect()
            }
        };
        if folded.is_none() && view.head.folder != self.node.id {
            heard.push(view.head.folder.clone());
        }
        let known: HashSet<&String> = heard.iter().collect();
        self.others.retain(|id, _| known.contains(id));
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

    /// A node was removed; if it joins again, nothing is known against it.
    pub(super) fn forget(&mut self, id: &str) {
        self.others.remove(id);
    }

    pub(super) fn is_dead(&self, id: &str) -> bool {
        self.others.get(id).is_some_and(|other| other.silent >= self.settings.silence_max())
    }

    pub(super) fn is_alive(&self, id: &str) -> bool {
        id == self.node.id || self.others.get(id).is_some_and(|other| other.moved && !self.is_dead(id))
    }

    /// The store cannot be used any more.
    pub(super) fn lose(&mut self, text: String) -> Vec<Event> {
        if self.over { Vec::new() } else { self.end(Outcome::Closed(text.clone()), &text) }
    }

    /// Decides what to do about the state that is in the store at `now` of this node's clock.
    pub(super) fn decide(&mut self, view: Option<&View>, now: Duration) -> Decision {
        let events = match view {
            None if self.over => Vec::new(),
            None if self.job.is_some() => self.lose(self.forgotten()),
            None => match self.leaving.take() {
                Some(leaving) => self.end(Outcome::Closed(leaving.text), &leaving.why),
                None => match self.own_objection() {
                    Some(text) => self.lose(text),
                    None => {
                        let claim = Some(first_head(&self.settings, &self.node.id));
                        return Decision { claim, ..Decision::default() };
                    }
                },
            },
            Some(view) => return self.decide_on(view, now),
        };
        Decision::last(events)
    }

    fn forgotten(&self) -> String {
        format!(
            "the store has forgotten the job `{}`\n  hint: if its server was restarted, start all nodes again",
            self.settings.run_id
        )
    }

    fn decide_on(&mut self, view: &View, now: Duration) -> Decision {
        let head = &view.head;
        if let Some(job) = self.job {
            if head.job > job && !self.over {
                let text =
                    format!("the job `{}` ended while this node was unresponsive", self.settings.run_id);
                return Decision::last(self.lose(text));
            }
            if (head.job, head.version) < (job, self.version) {
                return Decision::last(self.lose(self.forgotten()));
            }
        }
        self.version = head.version;
        let is_absent = view.place(&self.node.id) == Place::Absent;
        let has_passed = |round: u64| round != head.round || head.phase != Phase::Joining;
        self.timed_out.take_if(|(round, _)| !is_absent && has_passed(*round));
        let gave_up = self.timed_out.take_if(|_| is_absent).map(|(_, text)| text);
        let refused = self.refused.clone().filter(|_| is_absent && head.phase != Phase::Over);
        if let Some(text) = gave_up.or(refused) {
            if head.folder == self.node.id && head.members_count + head.spares_count > 0 {
                let wish = self.wish(head, What::Leave { why: String::new() });
                return Decision { wish, ..Decision::default() };
            }
            return Decision::last(self.lose(text));
        }
        if !is_absent && !self.over {
            self.job = Some(head.job);
        }
        let mut decision = match head.phase {
            Phase::Over => self.decide_over(view),
            _ if self.over => Decision::last(Vec::new()), // it has left, or the next job has begun
            _ => self.decide_open(view, now),
        };
        self.has_wish = decision.wish.is_some();
        if head.folder != self.node.id {
            decision.wish = decision.wish.filter(|wish| self.is_due(wish, now));
            if decision.claim.is_none() && !decision.finished && self.may_replace(&head.folder, is_absent) {
                decision.claim = Some(taken_over(head, &self.node.id));
            }
        }
        decision
    }

    /// A node of the job does not wait longer than it must for a dead folder. A newcomer leaves it to them, if
    /// there are any left.
    fn may_replace(&self, folder: &str, is_absent: bool) -> bool {
        let extra = if is_absent { self.settings.beat_interval } else { Duration::ZERO };
        let limit = self.settings.silence_max().saturating_add(extra);
        self.others.get(folder).is_some_and(|other| other.silent >= limit)
    }

    /// A wish is made once in an interval, until the state shows that it was granted.
    fn is_due(&mut self, wish: &Wish, now: Duration) -> bool {
        let is_new = self
            .wished
            .as_ref()
            .is_none_or(|(last, at)| last != wish || now >= at.saturating_add(self.settings.beat_interval));
        if is_new {
            self.wished = Some((wish.clone(), now));
        }
        is_new
    }

    fn wish(&self, head: &Head, what: What) -> Option<Wish> {
        Some(Wish { node: self.node.id.clone(), job: head.job, round: head.round, what })
    }

    /// The job is over. Its nodes acknowledge that; a newcomer waits until all have, and begins another.
    fn decide_over(&mut self, view: &View) -> Decision {
        let head = &view.head;
        let place = view.place(&self.node.id);
        let is_ours = self.job == Some(head.job);
        if self.over && !is_ours {
            return Decision::last(Vec::new());
        }
        let mut decision = Decision::default();
        if is_ours {
            let is_unaware = match place {
                Place::Member(seat) => !seat.ready,
                Place::Spare => true,
                Place::Absent => false,
            };
            decision.wish = self.wish(head, What::Acknowledge).filter(|_| is_unaware);
            decision.finished = head.settled;
        }
        if !self.over && (is_ours || self.leaving.is_some() || self.own_objection().is_some()) {
            let left = self.leaving.take().filter(|_| place == Place::Absent);
            let own = left.map(|left| left.text).or_else(|| self.own_objection()).map(Outcome::Closed);
            let closed = || Outcome::Closed(head.reason.clone());
            let outcome = own.unwrap_or_else(|| match head.outcome {
                Some(Ending::Success) => Outcome::Success,
                Some(Ending::Failed) => view.failure.clone().map_or_else(closed, Outcome::Failed),
                _ => closed(),
            });
            decision.events = self.end(outcome, &head.reason);
            decision.finished |= !is_ours;
        } else if !is_ours && head.settled {
            decision.claim = Some(next_job(head, &self.settings, &self.node.id));
        } else if !is_ours {
            let note = "the previous job with this run id has not ended on all its nodes; waiting for them";
            decision.events.extend(self.note(note.into()));
        }
        decision
    }

    fn decide_open(&mut self, view: &View, now: Duration) -> Decision {
        let head = &view.head;
        let place = view.place(&self.node.id);
        if let Some(leaving) = &self.leaving {
            let (text, why) = (leaving.text.clone(), leaving.why.clone());
            // A node that is done is not missed; unless it is the folder, and there are other nodes.
            let is_missed = match place {
                Place::Member(seat) => head.phase != Phase::Running || !seat.done,
                Place::Spare => true,
                Place::Absent => false,
            };
            let others = head.members_count + head.spares_count - usize::from(place != Place::Absent);
            if is_missed || (head.folder == self.node.id && others > 0) {
                let wish = self.wish(head, What::Leave { why });
                return Decision { wish, ..Decision::default() };
            }
            return Decision::last(self.end(Outcome::Closed(text), &why));
        }
        let mut decision = Decision::default();
        decision.events.extend(self.stop(head, place));
        decision.events.extend(self.start(head, place));
        match self.speak(head, place) {
            Ok(what) => decision.wish = what.and_then(|what| self.wish(head, what)),
            Err(text) => {
                decision.events.extend(self.lose(text));
                return Decision::last(decision.events);
            }
        }
        self.time(head, place, now, &mut decision);
        decision.events.extend(self.explain(head, place));
        decision
    }

    fn stop(&mut self, head: &Head, place: Place<'_>) -> Option<Event> {
        let is_member = matches!(place, Place::Member(_));
        let round = self
            .started
            .filter(|&round| head.round != round || head.phase != Phase::Running || !is_member)?;
        self.started = None;
        let reason = match place {
            Place::Member(_) => head.reason.clone(),
            _ => "the others gave this node up, since it sent no heartbeat for some time; it joins again"
                .into(),
        };
        Some(Event::Stop { round, reason })
    }

    fn start(&mut self, head: &Head, place: Place<'_>) -> Option<Event> {
        let Place::Member(seat @ Seat { rank: Some(node_rank), .. }) = place else { return None };
        let is_new = self.round_last.is_none_or(|last| last < head.round);
        if head.phase != Phase::Running || !is_new || !self.is_idle() {
            return None;
        }
        let round = head.round;
        (self.started, self.ranks, self.round_last) = (Some(round), Some(round), Some(round));
        (self.failed, self.done) = (None, None);
        Some(Event::Start(Assignment {
            job: head.job,
            round,
            restarts_used: head.restarts_used,
            node_rank: *node_rank,
            nodes: head.members_count,
            world_size: head.ranks,
            seat: seat.clone(),
            store: head.store.clone(),
        }))
    }

    /// No rank runs, and the launcher knows of every end.
    fn is_idle(&self) -> bool {
        self.started.is_none() && self.ranks.is_none()
    }

    /// What this node has to report about itself; or why it cannot take part.
    fn speak(&self, head: &Head, place: Place<'_>) -> Result<Option<What>, String> {
        let (is_running, is_joining) = (head.phase == Phase::Running, head.phase == Phase::Joining);
        Ok(match place {
            Place::Absent if self.is_idle() => {
                if let Some(text) = self.own_objection() {
                    return Err(text);
                }
                Some(What::Join { node: self.node.clone(), limits: self.settings.limits() })
            }
            Place::Member(seat) => match &self.failed {
                Some(failure) if is_running && failure.round == head.round => {
                    Some(What::Failed { failure: failure.clone() })
                }
                _ if is_running && self.done == Some(head.round) && !seat.done => Some(What::Done),
                _ if is_joining && self.is_idle() && !seat.ready => Some(What::Ready),
                _ => None,
            },
            _ => None,
        })
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

    /// Does not wait forever for a round that never gets ready.
    fn time(&mut self, head: &Head, place: Place<'_>, now: Duration, decision: &mut Decision) {
        let can_begin = head.members_count >= head.nodes_min && head.ready_count == head.members_count;
        if head.phase != Phase::Joining || !matches!(place, Place::Member(_)) || can_begin {
            self.waits_since = None;
            return;
        }
        let since = match self.waits_since {
            Some((round, since)) if round == head.round => since,
            _ => now,
        };
        self.waits_since = Some((head.round, since));
        let until = since.saturating_add(self.settings.join_timeout);
        if now < until {
            decision.wake = Some(until);
            return;
        }
        // The missing node may join at this moment: this is reported only if the store says so.
        self.timed_out = Some((head.round, self.describe_wait(head)));
        decision.wish = self.wish(head, What::GiveUp);
    }

    fn describe_wait(&self, head: &Head) -> String {
        let (count, min) = (head.members_count, head.nodes_min);
        let seconds = self.settings.join_timeout.as_secs_f64();
        if count >= min {
            return format!(
                "the ranks of the previous round did not exit within {seconds} s on {}",
                hosts(head, count - head.ready_count)
            );
        }
        let came = hosts(head, count);
        format!(
            "{count} of {min} nodes joined within {seconds} s: {came}\n  \
             hint: check that the other nodes were started with the same run id and endpoint, or raise the join timeout"
        )
    }

    /// One line about what is waited for, if that has changed.
    fn explain(&mut self, head: &Head, place: Place<'_>) -> Option<Event> {
        let (count, min, max) = (head.members_count, head.nodes_min, head.nodes_max);
        let note = match place {
            Place::Spare if count == max => {
                format!("{max} nodes have joined already; this node waits as a spare")
            }
            Place::Spare => "the job is about to end; this node waits as a spare".into(),
            Place::Member(_) if head.phase == Phase::Joining && count < min => {
                let seconds = self.settings.join_timeout.as_secs_f64();
                format!("{count} of {min} nodes have joined; waiting for the rest for up to {seconds} s")
            }
            Place::Member(_) if head.phase == Phase::Joining && head.round == 0 && count < max => {
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

/// The hosts that the head names, for the user.
fn hosts(head: &Head, count: usize) -> String {
    let named = head.hosts.len().min(HOSTS_MAX);
    let names = head.hosts[..named].join(", ");
    match count.saturating_sub(named) {
        0 => names,
        more => format!("{names} and {more} more"),
    }
}
