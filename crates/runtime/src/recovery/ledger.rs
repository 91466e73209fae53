//! The agreements of one group, one after the other.
//!
//! They are numbered. A rank that has decided one goes on to the next, and another rank may still need the decision: its
//! leader died before it sent it. So the ledger remembers the last decisions and answers late messages with them. A rank may
//! also receive messages of the next agreement before it has decided this one. They are kept by that next agreement, which
//! exists before the program calls it. They show that their sender knows this decision, so the ledger asks for it.
//!
//! A rank that an agreement left out is left out of all later ones of its group. If it is so late that no rank remembers what
//! it asks for, it gets a later decision, and learns from that that it was excluded. It passes that on, because it may be the
//! only rank that another excluded one reaches.
//!
//! Memory is bounded: two agreements of a few bytes for each rank, and [`PAST_MAX`] decisions.

use std::collections::VecDeque;
use std::time::Duration;

use super::agreement::{Agreement, Outcome, Settings, To};
use super::message::{Ballot, Instance, Letter, Message, Proposal, Refused};
use super::ranks::Ranks;

/// How many decisions are remembered.
const PAST_MAX: usize = 4;

/// What became of a letter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Heard {
    Current,
    /// About an agreement that this rank has left, or that is decided without it.
    Late,
    /// About an agreement that this rank has not reached.
    Early,
}

#[derive(Debug)]
pub(super) struct Ledger {
    group: u64,
    me: usize,
    size: usize,
    settings: Settings,
    sequence: u32,
    current: Agreement,
    next: Option<Agreement>,
    past: VecDeque<(u32, Proposal)>,
    suspects: Ranks,
    dead: Ranks,
    left: Ranks,
    excluded: Ranks,
    /// A later decision leaves this rank out: what its call returns, and which agreement decided it.
    overtaken: Option<(u32, Outcome)>,
    sends: Vec<(To, Letter)>,
}

impl Ledger {
    /// Of a group of `size` ranks that are all members.
    pub(super) fn new(group: u64, me: usize, size: usize, settings: Settings) -> Ledger {
        Ledger {
            group,
            me,
            size,
            sequence: 0,
            current: Agreement::new(me, size, settings.clone()),
            settings,
            next: None,
            past: VecDeque::new(),
            suspects: Ranks::none(size),
            dead: Ranks::none(size),
            left: Ranks::none(size),
            excluded: Ranks::none(size),
            overtaken: None,
            sends: Vec::new(),
        }
    }

    /// How many agreements of the group this rank has decided and left.
    pub(super) fn sequence(&self) -> u32 {
        self.sequence
    }

    /// Does this rank know what the agreement with this number has decided?
    #[cfg(test)]
    pub(super) fn knows(&self, sequence: u32) -> Option<&Proposal> {
        let overtaken = self.overtaken.as_ref().and_then(|(at, outcome)| match outcome {
            Outcome::Excluded(proposal) if *at == sequence => Some(proposal),
            _ => None,
        });
        let past = self.past.iter().find(|(past, _)| *past == sequence).map(|(_, proposal)| proposal);
        past.or(overtaken).or(self.current.decision().filter(|_| sequence == self.sequence))
    }

    /// What the current agreement has decided, also if the program has not called.
    #[cfg(test)]
    pub(super) fn decision(&self) -> Option<&Proposal> {
        self.current.decision()
    }

    pub(super) fn call(&mut self, value: u64, deadline: Duration, now: Duration) {
        self.current.call(value, deadline, now);
    }

    pub(super) fn outcome(&self) -> Option<&Outcome> {
        match self.current.decision() {
            Some(_) => self.current.outcome(),
            None => self.overtaken.as_ref().map(|(_, outcome)| outcome).or(self.current.outcome()),
        }
    }

    pub(super) fn wake(&self) -> Option<Duration> {
        [Some(&self.current), self.next.as_ref()].into_iter().flatten().filter_map(Agreement::wake).min()
    }

    pub(super) fn on_tick(&mut self, now: Duration) {
        self.current.on_tick(now);
        self.next.iter_mut().for_each(|next| next.on_tick(now));
    }

    pub(super) fn on_suspect(&mut self, rank: usize, now: Duration) {
        if rank < self.size && rank != self.me {
            self.suspects.insert(rank);
            self.current.on_suspect(rank, now);
            self.next.iter_mut().for_each(|next| next.on_suspect(rank, now));
        }
    }

    /// The rank is dead. Nothing that it sent is handled after this.
    pub(super) fn on_dead(&mut self, rank: usize, now: Duration) {
        if rank < self.size && rank != self.me {
            self.suspects.insert(rank);
            self.dead.insert(rank);
            self.current.on_dead(rank, now);
            self.next.iter_mut().for_each(|next| next.on_dead(rank, now));
        }
    }

    /// The program of this rank will call no more.
    pub(super) fn on_left(&mut self, rank: usize, now: Duration) {
        if rank < self.size {
            self.left.insert(rank);
            self.current.on_left(rank, now);
            self.next.iter_mut().for_each(|next| next.on_left(rank, now));
        }
    }

    /// The next call of this agreement does not wait for these ranks, which do not call.
    pub(super) fn expect_no_call(&mut self, ranks: impl IntoIterator<Item = usize>, now: Duration) {
        ranks.into_iter().for_each(|rank| self.current.on_left(rank, now));
    }

    #[cfg(test)] // a fabric gives up a process for good
    pub(super) fn on_trust(&mut self, rank: usize, now: Duration) {
        if rank < self.size && !self.dead.contains(rank) {
            self.suspects.remove(rank);
            self.current.on_trust(rank, now);
            self.next.iter_mut().for_each(|next| next.on_trust(rank, now));
        }
    }

    /// The call has returned a decision that includes this rank: the next agreement of the group begins.
    pub(super) fn advance(&mut self, now: Duration) {
        let Some(decision) = self.current.decision().cloned() else { return };
        self.collect();
        decision.members.others().iter().for_each(|rank| self.excluded.insert(rank));
        if self.past.len() == PAST_MAX {
            self.past.pop_front();
        }
        self.past.push_back((self.sequence, decision));
        self.current = self.next.take().unwrap_or_else(|| self.make(now));
        for rank in self.excluded.iter().filter(|rank| *rank != self.me) {
            self.current.exclude(rank);
        }
        self.sequence += 1;
    }

    /// Handles what another rank sent.
    ///
    /// # Errors
    /// Says what is wrong with a letter that no correct rank sends. It has then changed nothing.
    pub(super) fn on_letter(&mut self, from: usize, letter: Letter, now: Duration) -> Result<Heard, Refused> {
        let Letter { instance: Instance { group, sequence }, message } = letter;
        if group != self.group {
            return Err(Refused::Group { group });
        }
        if from >= self.size || from == self.me {
            return Err(Refused::Rank { rank: from, size: self.size });
        }
        if self.dead.contains(from) {
            return Ok(Heard::Late);
        }
        if self.answers(from, sequence, &message) || sequence < self.sequence {
            return Ok(Heard::Late);
        }
        if sequence == self.sequence {
            self.current.on_message(from, message, now)?;
            self.learn_deaths(now);
            return Ok(Heard::Current);
        }
        if let Message::Decided { proposal } = message {
            if proposal.members.contains(self.me) {
                return Err(Refused::Impossible { from });
            }
            self.overtaken = Some((sequence, Outcome::Excluded(proposal)));
            return Ok(Heard::Early);
        }
        if sequence == self.sequence + 1 {
            if self.next.is_none() {
                self.next = Some(self.make(now));
            }
            self.next.as_mut().expect("it was made").on_message(from, message, now)?;
            self.learn_deaths(now);
        }
        if self.current.decision().is_none() && self.overtaken.is_none() {
            // The sender has decided this one. It answers any question about it with the decision.
            let question = Message::Prepare { ballot: Ballot { round: 0, rank: self.me } };
            self.post(self.sequence, To::Rank(from), question);
        }
        Ok(Heard::Early)
    }

    /// What to send. In this order to each rank.
    pub(super) fn take_sends(&mut self) -> Vec<(To, Letter)> {
        self.collect();
        std::mem::take(&mut self.sends)
    }

    /// Proposals declare ranks dead.
    fn learn_deaths(&mut self, now: Duration) {
        let mut dead = self.current.dead().clone();
        self.next.iter().for_each(|next| dead.add(next.dead()));
        let news: Vec<usize> = dead.iter().filter(|rank| !self.dead.contains(*rank)).collect();
        news.into_iter().for_each(|rank| self.on_dead(rank, now));
    }

    /// Answers a question whose answer is not in the current agreement or the next one.
    fn answers(&mut self, from: usize, sequence: u32, message: &Message) -> bool {
        if matches!(message, Message::Accept { .. } | Message::Decided { .. } | Message::Refuse { .. }) {
            return false;
        }
        let later = match &self.overtaken {
            Some((at, Outcome::Excluded(proposal))) if *at >= sequence => Some((*at, proposal)),
            _ => None,
        };
        let known = || self.past.iter().map(|(at, proposal)| (*at, proposal)).chain(later);
        let excluding =
            || known().filter(|(at, proposal)| *at > sequence && !proposal.members.contains(from));
        let answer = known().find(|(at, _)| *at == sequence).or_else(|| excluding().next_back());
        let Some((at, proposal)) = answer.map(|(at, proposal)| (at, proposal.clone())) else { return false };
        self.post(at, To::Rank(from), Message::Decided { proposal });
        true
    }

    fn make(&self, now: Duration) -> Agreement {
        let mut agreement = Agreement::new(self.me, self.size, self.settings.clone());
        self.suspects.iter().for_each(|rank| agreement.on_suspect(rank, now));
        self.dead.iter().for_each(|rank| agreement.on_dead(rank, now));
        self.left.iter().for_each(|rank| agreement.on_left(rank, now));
        agreement
    }

    fn collect(&mut self) {
        for (to, message) in self.current.take_sends() {
            self.post(self.sequence, to, message);
        }
        let sends = self.next.as_mut().map(Agreement::take_sends).unwrap_or_default();
        for (to, message) in sends {
            self.post(self.sequence + 1, to, message);
        }
    }

    fn post(&mut self, sequence: u32, to: To, message: Message) {
        let instance = Instance { group: self.group, sequence };
        self.sends.push((to, Letter { instance, message }));
    }
}

#[cfg(test)]
mod tests {
    use super::super::agreement::Rule;
    use super::super::quorum::Quorum;
    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(10);

    fn ledgers(size: usize) -> Vec<Ledger> {
        let second = Duration::from_secs(1);
        let quorum = Quorum::Majority;
        let settings =
            Settings { quorum, rule: Rule::Survivors, repeat: second, patience: 2 * second, grace: second };
        (0..size).map(|me| Ledger::new(9, me, size, settings.clone())).collect()
    }

    /// Delivers what the ranks have to send now.
    fn deliver(all: &mut [Ledger], arrives: impl Fn(usize, usize, &Letter) -> bool) -> Vec<Heard> {
        let mut wire = Vec::new();
        for (from, ledger) in all.iter_mut().enumerate() {
            wire.extend(ledger.take_sends().into_iter().map(|(to, letter)| (from, to, letter)));
        }
        let mut heard = Vec::new();
        for (from, receivers, letter) in wire {
            let is_meant = |to: &usize| *to != from && [To::All, To::Rank(*to)].contains(&receivers);
            for to in (0..all.len()).filter(is_meant).filter(|to| arrives(from, *to, &letter)) {
                heard.push(all[to].on_letter(from, letter.clone(), Duration::ZERO).expect("it is right"));
            }
        }
        heard
    }

    /// Delivers everything, except to and from those that are cut off.
    fn settle(all: &mut [Ledger], cut: &[usize]) -> Vec<Heard> {
        let mut heard = Vec::new();
        loop {
            let more = deliver(all, |from, to, _| !cut.contains(&from) && !cut.contains(&to));
            match more.is_empty() {
                true => return heard,
                false => heard.extend(more),
            }
        }
    }

    fn agree(all: &mut [Ledger], ranks: &[usize], cut: &[usize]) {
        ranks.iter().for_each(|rank| all[*rank].call(1, TIMEOUT, Duration::ZERO));
        settle(all, cut);
        for rank in ranks {
            assert!(matches!(all[*rank].outcome(), Some(Outcome::Decided(_))), "{:?}", all[*rank].outcome());
            all[*rank].advance(Duration::ZERO);
        }
    }

    #[test]
    fn a_rank_that_missed_a_decision_gets_it_from_a_rank_that_is_further() {
        let mut all = ledgers(3);
        all.iter_mut().for_each(|ledger| ledger.call(1, TIMEOUT, Duration::ZERO));
        // Everything arrives but the decision at rank 2.
        while all[1].outcome().is_none() {
            deliver(&mut all, |_, to, letter| {
                !(to == 2 && matches!(letter.message, Message::Decided { .. }))
            });
        }
        all[1].advance(Duration::ZERO);
        all[0].advance(Duration::ZERO);
        all[2].on_suspect(0, Duration::ZERO);
        all[1].on_suspect(0, Duration::ZERO);
        all[1].call(1, TIMEOUT, Duration::ZERO);
        let heard = settle(&mut all, &[0]);
        assert!(heard.contains(&Heard::Late), "{heard:?}");
        assert!(matches!(all[2].outcome(), Some(Outcome::Decided(_))), "{:?}", all[2].outcome());
        all[2].advance(Duration::ZERO);
        agree(&mut all, &[2], &[0]);
        let Some(Outcome::Decided(proposal)) = all[1].outcome() else { panic!("it waits") };
        assert_eq!(proposal.members.iter().collect::<Vec<_>>(), [1, 2]);
    }

    #[test]
    fn a_letter_about_the_next_agreement_is_kept_and_used_without_being_repeated() {
        let mut all = ledgers(3);
        all.iter_mut().for_each(|ledger| ledger.call(1, TIMEOUT, Duration::ZERO));
        settle(&mut all, &[]);
        for rank in [1, 2] {
            all[rank].advance(Duration::ZERO);
            all[rank].call(3, TIMEOUT, Duration::ZERO);
        }
        let heard = settle(&mut all, &[]);
        assert_eq!(heard, [Heard::Early, Heard::Early], "both join rank 0, which has not left the first one");
        all[0].advance(Duration::ZERO);
        all[0].call(2, TIMEOUT, Duration::ZERO);
        let heard = settle(&mut all, &[]);
        assert!(heard.iter().all(|heard| *heard == Heard::Current) && heard.len() == 6, "{heard:?}");
        let Some(Outcome::Decided(proposal)) = all[0].outcome() else { panic!("{:?}", all[0].outcome()) };
        assert_eq!((proposal.members.len(), proposal.value), (3, 2));
    }

    #[test]
    fn a_letter_about_the_next_agreement_makes_a_rank_ask_for_the_decision_that_it_missed() {
        let mut all = ledgers(3);
        all.iter_mut().for_each(|ledger| ledger.call(1, TIMEOUT, Duration::ZERO));
        // The decision does not arrive at rank 2, and rank 0 dies.
        while all[1].outcome().is_none() {
            deliver(&mut all, |_, to, letter| {
                !(to == 2 && matches!(letter.message, Message::Decided { .. }))
            });
        }
        all[1].advance(Duration::ZERO);
        all[1].call(1, TIMEOUT, Duration::ZERO);
        all[1].on_suspect(0, Duration::ZERO);
        let heard = settle(&mut all, &[0]);
        assert!(heard.contains(&Heard::Early) && heard.contains(&Heard::Late), "{heard:?}");
        assert!(matches!(all[2].outcome(), Some(Outcome::Decided(_))), "{:?}", all[2].outcome());
        all[2].on_suspect(0, Duration::ZERO);
        all[2].advance(Duration::ZERO);
        agree(&mut all, &[2], &[0]);
        let Some(Outcome::Decided(proposal)) = all[1].outcome() else { panic!("it waits") };
        assert_eq!(proposal.members.iter().collect::<Vec<_>>(), [1, 2]);
    }

    #[test]
    fn a_rank_that_was_excluded_by_a_later_agreement_passes_that_decision_on() {
        let mut all = ledgers(4);
        let decision = |rank: usize| {
            let (members, instance) = (Ranks::of(4, [0, 3]), Instance { group: 9, sequence: 1 });
            let proposal = Proposal { members, value: rank as u64 };
            Letter { instance, message: Message::Decided { proposal } }
        };
        assert_eq!(all[1].on_letter(0, decision(1), Duration::ZERO), Ok(Heard::Early));
        all[1].take_sends();
        for sequence in [0, 1] {
            let instance = Instance { group: 9, sequence };
            let message = Message::Prepare { ballot: Ballot { round: 0, rank: 2 } };
            assert_eq!(all[1].on_letter(2, Letter { instance, message }, Duration::ZERO), Ok(Heard::Late));
            let sends = all[1].take_sends();
            assert_eq!(sends, [(To::Rank(2), decision(1))], "rank 2 asks about #{sequence}");
        }
        // A rank that the later agreement includes may still ask about an earlier one, which it does not answer.
        let instance = Instance { group: 9, sequence: 0 };
        let message = Message::Prepare { ballot: Ballot { round: 1, rank: 3 } };
        assert_eq!(all[1].on_letter(3, Letter { instance, message }, Duration::ZERO), Ok(Heard::Current));
    }

    #[test]
    fn a_rank_that_is_many_decisions_behind_learns_that_it_was_excluded() {
        let mut all = ledgers(3);
        all[2].call(1, TIMEOUT, Duration::ZERO);
        all[2].take_sends();
        for rank in [0, 1] {
            all[rank].on_suspect(2, Duration::ZERO);
        }
        for _ in 0..=PAST_MAX {
            agree(&mut all, &[0, 1], &[2]);
        }
        assert!(all[0].past.len() == PAST_MAX && all[0].past[0].0 > 0, "the first decision is forgotten");
        all[2].on_tick(Duration::from_secs(1));
        settle(&mut all, &[]);
        assert!(matches!(all[2].outcome(), Some(Outcome::Excluded(_))), "{:?}", all[2].outcome());
        assert_eq!(all[0].sequence() as usize, PAST_MAX + 1);
    }

    #[test]
    fn letters_about_other_groups_and_from_strangers_are_refused() {
        let mut all = ledgers(2);
        let letter = |group, sequence, message| Letter { instance: Instance { group, sequence }, message };
        let prepare = Message::Prepare { ballot: Ballot::FIRST };
        let refused = all[1].on_letter(0, letter(8, 0, prepare.clone()), Duration::ZERO);
        assert_eq!(refused, Err(Refused::Group { group: 8 }));
        let refused = all[1].on_letter(2, letter(9, 0, prepare.clone()), Duration::ZERO);
        assert_eq!(refused, Err(Refused::Rank { rank: 2, size: 2 }));
        let heard = all[1].on_letter(0, letter(9, u32::MAX, prepare), Duration::ZERO);
        assert_eq!(heard, Ok(Heard::Early), "it is not kept");
        assert!(all[1].next.is_none());
        let proposal = Proposal { members: Ranks::of(2, [0, 1]), value: 0 };
        let refused = all[1].on_letter(0, letter(9, 1, Message::Decided { proposal }), Duration::ZERO);
        assert_eq!(refused, Err(Refused::Impossible { from: 0 }));
    }
}
