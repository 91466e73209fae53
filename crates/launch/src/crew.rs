//! Which process of this node is what while the ranks recover by themselves (`--on-failure=recover`): a rank,
//! the replacement of one that has died, or a spare. And what follows when one of them ends.
//!
//! The ranks decide who takes part, and write that into their store as a [`Generation`]. The launcher sees to
//! it that there are enough processes: for each one that dies it starts one. If a spare waits that was started
//! earlier, it can take the dead rank's place, and another spare is started. Otherwise a replacement is. If
//! the ranks cannot recover, the crew [gives up](Act::GiveUp), and the round ends as without it.
//!
//! A death can only be judged by a generation that was read after it: the process may just have become a rank.
//! So each end leads to a [`Look`](Act::Look), and is decided on when that is answered.
//!
//! Pure. Processes, notes and the store are in `recovering`.

use std::collections::{BTreeMap, BTreeSet};

use tenfold_dashboard::job;

use super::generation::{Generation, Member};
use super::rank::{End, Seat};

/// The number of a process in its round. The first ones have the numbers of their local ranks.
pub(super) type Id = usize;

/// What a process is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// This rank.
    Rank(usize),
    /// Started in place of this rank, and in no generation yet.
    Replacement(usize),
    /// It waits to become a rank.
    Spare,
}

/// What is to be done, in this order.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Act {
    /// Count so many more ranks as missing, and as finished, for the launchers of all nodes.
    Tally {
        missing: i64,
        finished: i64,
    },
    /// Read the generation now, and answer with this number.
    Look(u64),
    /// Start such a process, because that one died.
    Start {
        part: Part,
        of: Id,
    },
    /// The process has become this rank.
    Admit {
        id: Id,
        seat: Seat,
    },
    /// Ranks have made this generation.
    Show(job::Generation),
    /// The death of this process has no further consequences.
    Forget(Id),
    /// The other ranks go on without this process, which still runs.
    Kill(Id),
    /// All ranks have finished.
    StopSpares,
    Note(String),
    /// So many of the started processes do not count, because they have not helped.
    Refund(u64),
    /// The ranks cannot recover, for this reason: end the round because of the deaths that are not forgotten.
    GiveUp(String),
}

/// What was read from the stores.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Seen {
    /// The last [`Act::Look`] before.
    pub(super) look: u64,
    pub(super) generation: Result<Option<Generation>, String>,
    /// Processes that all nodes have started after a death, in the whole job.
    pub(super) replaced: u64,
    /// Ranks of all nodes that have died and are missing, and that have finished; 0 if there are no other nodes.
    pub(super) missing: u64,
    pub(super) finished: u64,
}

/// What the crew is given at the beginning of a round.
#[derive(Clone, Debug)]
pub(super) struct Terms {
    pub(super) round: u64,
    /// Whether other nodes take part.
    pub(super) has_others: bool,
    /// Names of this host.
    pub(super) hosts: Vec<String>,
    /// Restarts and replacements together, for the whole job; and the restarts among them.
    pub(super) restarts_max: u64,
    pub(super) restarts_used: u64,
}

#[derive(Debug)]
pub(super) struct Crew {
    terms: Terms,
    hands: BTreeMap<Id, Hand>,
    /// Ends that are not decided on, each with the look that it waits for.
    pending: Vec<(Id, u64)>,
    looks: u64,
    replaced: u64,
    /// Those of them that this node has started since the last generation in which no rank was missing.
    started: u64,
    generation: Option<Generation>,
    /// Ranks of this node that are counted as missing, and as finished; and those of all nodes.
    tallied: (i64, i64),
    tally: (u64, u64),
    /// Nothing is replaced any more: it has given up, or all ranks have finished.
    is_over: bool,
}

#[derive(Clone, Debug)]
struct Hand {
    process: u32,
    /// Its `TENFOLD_JOINING`, if it was not started with the round.
    serial: Option<String>,
    part: Part,
    end: Option<End>,
    /// It was in a generation.
    was_member: bool,
    /// The others have gone on without it.
    is_left_out: bool,
    /// A spare that was started before the ranks died that are still missing.
    is_warm: bool,
    /// A spare that takes part instead of a replacement of this rank.
    covers: Option<usize>,
    /// A spare whose end was decided on. The next generation may still have it as a rank.
    is_settled: bool,
}

impl Hand {
    fn has_failed(&self) -> bool {
        self.end.is_some_and(End::is_failure)
    }

    /// The rank whose death this hand's end is.
    fn lost(&self) -> Option<usize> {
        match self.part {
            Part::Rank(rank) | Part::Replacement(rank) if self.has_failed() && !self.is_left_out => {
                Some(rank)
            }
            _ => None,
        }
    }
}

impl Crew {
    pub(super) fn new(terms: Terms) -> Crew {
        let (hands, pending) = (BTreeMap::new(), Vec::new());
        Crew {
            terms,
            hands,
            pending,
            looks: 0,
            replaced: 0,
            started: 0,
            generation: None,
            tallied: (0, 0),
            tally: (0, 0),
            is_over: false,
        }
    }

    /// This process was started, as it was asked for.
    pub(super) fn started(&mut self, id: Id, process: u32, serial: Option<String>, part: Part) {
        let is_warm = self.lost().next().is_none();
        let hand = Hand {
            process,
            serial,
            part,
            end: None,
            was_member: false,
            is_left_out: false,
            is_warm,
            covers: None,
            is_settled: false,
        };
        self.hands.insert(id, hand);
    }

    /// A rank has died whose place is not taken, or an end is not decided on.
    pub(super) fn is_recovering(&self) -> bool {
        !self.is_over && (!self.pending.is_empty() || self.lost().next().is_some())
    }

    /// The number of the last [`Act::Look`].
    pub(super) fn last_look(&self) -> u64 {
        self.looks
    }

    /// Processes that were started after a death, in the whole job.
    pub(super) fn replaced(&self) -> u64 {
        self.replaced
    }

    /// A process could not be started, or the round ends for another reason.
    pub(super) fn stop(&mut self) {
        self.is_over = true;
    }

    /// A process has ended.
    pub(super) fn ended(&mut self, id: Id, end: End) -> Vec<Act> {
        let mut acts = self.notice(id, end);
        self.count(&mut acts);
        acts
    }

    fn notice(&mut self, id: Id, end: End) -> Vec<Act> {
        let Some(hand) = self.hands.get_mut(&id) else { return Vec::new() };
        hand.end = Some(end);
        if self.is_over {
            return Vec::new();
        }
        if hand.is_left_out {
            self.hands.remove(&id);
            return vec![Act::Forget(id)];
        }
        let mut acts = Vec::new();
        match hand.part {
            Part::Rank(rank) if !end.is_failure() => {
                let lost = self.lost().next();
                match lost {
                    Some(lost) => self.give_up(too_late(rank, lost), &mut acts),
                    None => self.finish(&mut acts),
                }
                return acts;
            }
            // Its death takes the place of the one that it was started for.
            Part::Replacement(rank) if end.is_failure() => self.forget_lost(rank, Some(id), &mut acts),
            _ => {}
        }
        self.looks += 1;
        self.pending.push((id, self.looks));
        acts.push(Act::Look(self.looks));
        acts
    }

    /// Something was read from the stores.
    pub(super) fn seen(&mut self, seen: Seen) -> Vec<Act> {
        let mut acts = Vec::new();
        if self.is_over {
            return acts;
        }
        self.replaced = self.replaced.max(seen.replaced);
        self.tally = (seen.missing, seen.finished);
        let trouble = match seen.generation {
            Ok(generation) => {
                let last = self.generation.as_ref().map_or(0, |last| last.generation);
                let newer = generation.filter(|new| new.generation > last);
                newer.into_iter().for_each(|new| self.adopt(new, &mut acts));
                None
            }
            Err(text) => Some(text),
        };
        let is_due = |&&(_, look): &&(Id, u64)| look <= seen.look;
        let due: Vec<Id> = self.pending.iter().filter(is_due).map(|&(id, _)| id).collect();
        self.pending.retain(|&(_, look)| look > seen.look);
        for id in due {
            if !self.is_over {
                self.decide(id, trouble.as_deref(), &mut acts);
            }
        }
        // What was started for a rank that is still missing waits for nothing if a rank elsewhere has finished.
        let missing = self.lost().next();
        if let Some(reason) = missing.filter(|_| !self.is_over).and_then(|rank| self.finished(rank)) {
            self.give_up(reason, &mut acts);
        }
        self.finish(&mut acts);
        self.count(&mut acts);
        acts
    }

    /// Reports to the launchers of other nodes what has changed on this one.
    fn count(&mut self, acts: &mut Vec<Act>) {
        let missing: BTreeSet<usize> = self.lost().collect();
        let has_finished =
            |hand: &&Hand| matches!(hand.part, Part::Rank(_)) && hand.end == Some(End::Exit(0));
        let finished = self.hands.values().filter(has_finished).count();
        let now = [missing.len(), finished].map(|count| i64::try_from(count).unwrap_or(i64::MAX));
        let tally = Act::Tally { missing: now[0] - self.tallied.0, finished: now[1] - self.tallied.1 };
        if self.terms.has_others && tally != (Act::Tally { missing: 0, finished: 0 }) {
            self.tallied = (now[0], now[1]);
            acts.insert(0, tally);
        }
    }

    // ── a new generation ───────────────────────────────────────────────────────────────────────────────

    fn adopt(&mut self, new: Generation, acts: &mut Vec<Act>) {
        acts.push(Act::Show(new.facts(self.terms.round, |member| {
            let end = self.find(member).and_then(|id| self.hands[&id].end);
            end.map(|end| end.to_string())
        })));
        let mut present = Vec::new();
        for (rank, member) in new.ranks.iter().enumerate() {
            let holder = self.find(member);
            present.extend(holder);
            if let Some(id) = holder {
                self.admit(id, Seat { number: rank, local_rank: member.local_rank }, acts);
            }
            let is_dead = holder.is_some_and(|id| self.hands[&id].has_failed());
            self.refill(rank, holder, acts);
            self.forget_lost(rank, holder, acts);
            if !is_dead {
                self.fill(rank, holder);
            }
        }
        for (&id, hand) in &mut self.hands {
            let is_out = hand.was_member && hand.end.is_none() && !present.contains(&id);
            if is_out && !hand.is_left_out {
                hand.is_left_out = true;
                acts.push(Act::Kill(id));
            }
        }
        let is_old = |(&id, hand): (&Id, &Hand)| (hand.part == Part::Spare && hand.is_settled).then_some(id);
        let old: Vec<Id> = self.hands.iter().filter_map(is_old).collect();
        old.into_iter().for_each(|id| self.forget(id, acts));
        self.generation = Some(new);
        if self.lost().next().is_none() {
            self.hands.values_mut().for_each(|hand| hand.is_warm = true);
            self.started = 0;
        }
    }

    /// The process that a generation means, if it is one of this node.
    fn find(&self, member: &Member) -> Option<Id> {
        let is_here = self.terms.hosts.contains(&member.host);
        let is_it = |hand: &Hand| match (&member.joining, &hand.serial) {
            (Some(joining), Some(serial)) => joining == serial,
            _ => is_here && hand.process == member.pid,
        };
        // The last one: the system may have given a number again.
        self.hands.iter().rev().find(|(_, hand)| is_it(hand)).map(|(&id, _)| id)
    }

    fn admit(&mut self, id: Id, seat: Seat, acts: &mut Vec<Act>) {
        let Some(hand) = self.hands.get_mut(&id) else { return };
        hand.was_member = true;
        hand.covers = None;
        if hand.part != Part::Rank(seat.number) {
            // A replacement has its rank's seat already.
            if hand.part != Part::Replacement(seat.number) {
                acts.push(Act::Admit { id, seat });
            }
            hand.part = Part::Rank(seat.number);
        }
    }

    /// This rank is alive: nothing is left to do for it.
    fn fill(&mut self, rank: usize, holder: Option<Id>) {
        for (&id, hand) in &mut self.hands {
            if hand.part == Part::Replacement(rank) && Some(id) != holder {
                hand.part = Part::Spare; // another process was quicker
            }
            hand.covers.take_if(|covered| *covered == rank);
        }
    }

    /// A spare took the place of this rank before its death was decided on.
    fn refill(&mut self, rank: usize, holder: Option<Id>, acts: &mut Vec<Act>) {
        let is_it = |&&(id, _): &&(Id, u64)| self.hands[&id].lost() == Some(rank) && Some(id) != holder;
        let undecided = self.pending.iter().find(is_it).map(|&(id, _)| id);
        if let Some(of) = undecided.filter(|_| self.shortage(rank).is_none()) {
            self.start(Part::Spare, of, acts);
        }
    }

    /// Deaths of this rank that another process has made up for, or has followed.
    fn forget_lost(&mut self, rank: usize, except: Option<Id>, acts: &mut Vec<Act>) {
        let is_old =
            |(&id, hand): (&Id, &Hand)| (hand.lost() == Some(rank) && Some(id) != except).then_some(id);
        let old: Vec<Id> = self.hands.iter().filter_map(is_old).collect();
        old.into_iter().for_each(|id| self.forget(id, acts));
    }

    fn forget(&mut self, id: Id, acts: &mut Vec<Act>) {
        self.hands.remove(&id);
        self.pending.retain(|&(pending, _)| pending != id);
        acts.push(Act::Forget(id));
    }

    // ── an end ─────────────────────────────────────────────────────────────────────────────────────────

    fn decide(&mut self, id: Id, trouble: Option<&str>, acts: &mut Vec<Act>) {
        let Some(hand) = self.hands.get(&id) else { return };
        let end = hand.end.map_or_else(String::new, |end| end.to_string());
        match (hand.part, hand.lost()) {
            (Part::Spare, _) => self.decide_spare(id, trouble, &end, acts),
            (_, Some(rank)) => match self.obstacle(id, rank, trouble) {
                Some(reason) => self.give_up(reason, acts),
                None => self.replace(rank, id, acts),
            },
            (Part::Replacement(rank), None) => {
                let process = hand.process;
                let reason = format!(
                    "pid {process}, started in place of rank {rank}, ended ({end}) without taking part"
                );
                self.give_up(reason, acts);
            }
            (Part::Rank(rank), None) => {
                let lost = self.lost().next();
                if let Some(lost) = lost {
                    self.give_up(too_late(rank, lost), acts);
                }
            }
        }
    }

    /// A spare has ended, which is in no generation.
    fn decide_spare(&mut self, id: Id, trouble: Option<&str>, end: &str, acts: &mut Vec<Act>) {
        let Some(hand) = self.hands.get_mut(&id) else { return };
        hand.is_settled = true;
        let hand = hand.clone();
        let awaited = hand.covers.filter(|&rank| self.lost().any(|lost| lost == rank));
        let is_new = self.generation.is_none();
        if let Some(rank) = awaited {
            match trouble.map(str::to_owned).or_else(|| self.shortage(rank)) {
                Some(reason) => self.give_up(reason, acts),
                None => self.start(Part::Replacement(rank), id, acts),
            }
        } else {
            let why = match trouble.map(str::to_owned).or_else(|| self.shortage(usize::MAX)) {
                _ if !hand.has_failed() => Some(String::new()),
                _ if is_new => Some(": the program has not begun to use recovery".to_owned()),
                Some(reason) => Some(format!(": {reason}")),
                None => None,
            };
            match why {
                Some(why) => acts.push(Act::Note(format!(
                    "the spare with pid {} ended ({end}) and is not replaced{why}",
                    hand.process
                ))),
                None => self.start(Part::Spare, id, acts),
            }
        }
    }

    /// Makes up for the death of this rank.
    fn replace(&mut self, rank: usize, of: Id, acts: &mut Vec<Act>) {
        let waits = |hand: &&mut Hand| {
            hand.part == Part::Spare && hand.end.is_none() && hand.is_warm && hand.covers.is_none()
        };
        let spare = self.hands.values_mut().find(waits);
        let part = if spare.is_some() { Part::Spare } else { Part::Replacement(rank) };
        if let Some(spare) = spare {
            spare.covers = Some(rank);
        }
        self.start(part, of, acts);
    }

    fn start(&mut self, part: Part, of: Id, acts: &mut Vec<Act>) {
        self.replaced += 1;
        self.started += 1;
        acts.push(Act::Start { part, of });
    }

    /// Why the others cannot recover from the death of this process, if they cannot.
    fn obstacle(&self, id: Id, rank: usize, trouble: Option<&str>) -> Option<String> {
        if let Some(text) = trouble {
            return Some(text.to_owned());
        }
        let Some(generation) = &self.generation else {
            return Some("the program has not begun to use recovery".into());
        };
        let hand = self.hands.get(&id)?;
        let number = generation.generation;
        if hand.serial.is_none() && !hand.was_member {
            return Some(format!("rank {rank} (pid {}) is not in generation {number}", hand.process));
        }
        let deserted = || self.is_deserted().then(|| format!("no rank of generation {number} is left"));
        self.finished(rank).or_else(deserted).or_else(|| self.spent())
    }

    /// No rank is left that could recover.
    fn is_deserted(&self) -> bool {
        let is_left = |hand: &Hand| hand.was_member && hand.end.is_none() && !hand.is_left_out;
        let (missing, finished) = self.tally;
        let ranks = self.generation.as_ref().map_or(usize::MAX, |generation| generation.ranks.len());
        let is_empty_elsewhere = !self.terms.has_others || missing.saturating_add(finished) >= ranks as u64;
        is_empty_elsewhere && !self.hands.values().any(is_left)
    }

    /// Why no further process may be started.
    fn shortage(&self, rank: usize) -> Option<String> {
        self.finished(rank).or_else(|| self.spent())
    }

    fn finished(&self, rank: usize) -> Option<String> {
        let has_finished = |hand: &Hand| match (hand.part, hand.end) {
            (Part::Rank(rank), Some(end)) if !end.is_failure() => Some(rank),
            _ => None,
        };
        let here = self.hands.values().find_map(has_finished).map(|finished| too_late(finished, rank));
        here.or_else(|| (self.tally.1 > 0).then(|| "a rank of another node has already finished".to_owned()))
    }

    fn spent(&self) -> Option<String> {
        let Terms { restarts_max, restarts_used, .. } = self.terms;
        let is_spent = restarts_used.saturating_add(self.replaced) >= restarts_max;
        is_spent.then(|| format!("all restarts and replacements are used ({restarts_max})"))
    }

    /// Ranks that have died and whose places are not taken.
    fn lost(&self) -> impl Iterator<Item = usize> {
        self.hands.values().filter_map(Hand::lost)
    }

    fn give_up(&mut self, reason: String, acts: &mut Vec<Act>) {
        self.is_over = true;
        // If all ranks have died, one after the other, that is one failure: what was started meanwhile has not helped.
        if self.is_deserted() && self.generation.is_some() && self.started > 0 {
            self.replaced = self.replaced.saturating_sub(self.started);
            acts.push(Act::Refund(self.started));
        }
        acts.push(Act::GiveUp(reason));
    }

    /// Ends the spares if all ranks have finished.
    fn finish(&mut self, acts: &mut Vec<Act>) {
        let is_open = |hand: &Hand| hand.part != Part::Spare && hand.end.is_none_or(End::is_failure);
        if !self.is_over && self.pending.is_empty() && !self.hands.values().any(is_open) {
            self.is_over = true;
            acts.push(Act::StopSpares);
        }
    }
}

fn too_late(finished: usize, lost: usize) -> String {
    match lost {
        usize::MAX => format!("rank {finished} has already finished"),
        _ => {
            format!("rank {finished} has already finished, so the others cannot take in another rank {lost}")
        }
    }
}

#[cfg(test)]
mod tests;
