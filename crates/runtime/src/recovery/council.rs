//! The agreements of one group on one rank, of both kinds, and where members of the next group have their rooms.
//!
//! A rank takes part from the moment at which the group is made, also if its program never calls and after it has left the
//! group: the others need its answers. Most groups never agree on anything, so memory is taken with the first call or letter.
//!
//! Ranks by number, time as an argument, letters as bytes. Not here: which process a rank is, and how letters travel
//! (see `fabric::councils`).

use std::collections::BTreeMap;
use std::time::Duration;

use super::agreement::{Outcome, Rule, Settings, To};
use super::ledger::{Heard, Ledger};
use super::message::{Letter, Refused};
use super::quorum::Quorum;
use super::ranks::{Ranks, SIZE_MAX};
use crate::fault::{ErrorKind, Fault, show_ranks};

/// What a letter is sent again after. Streams lose none unless they break.
const REPEAT: Duration = Duration::from_millis(100);

/// Agreements about whose members' rooms a rank keeps what it hears: the current one and those around it.
const ROOMS_MAX: usize = 4;

/// What the ranks of a group agree on. Each has a sequence of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Question {
    /// Which ranks continue.
    Survivors,
    /// The AND of a value of each.
    Value,
}

impl Question {
    const ALL: [Question; 2] = [Question::Survivors, Question::Value];

    /// Letters about it name this group.
    fn of_group(self, group: u64) -> u64 {
        match self {
            Question::Survivors => group,
            Question::Value => !group,
        }
    }
}

/// What was decided, with this rank among the members.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Agreed {
    /// How many agreements of the same kind the group had before.
    pub sequence: u32,
    pub members: Vec<usize>,
    pub value: u64,
}

/// When to give up on ranks that are alive.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub quorum: Quorum,
    /// A rank whose program does not call is left out after this time.
    pub patience: Duration,
    /// The same for one that another rank suspects.
    pub grace: Duration,
}

#[derive(Debug)]
pub(crate) struct Council {
    group: u64,
    me: usize,
    size: usize,
    limits: Limits,
    ledgers: [Option<Box<Ledger>>; 2],
    suspects: Ranks,
    dead: Ranks,
    left: Ranks,
    /// Where members have their rooms for what an agreement makes: by its number and by rank.
    rooms: BTreeMap<u32, BTreeMap<usize, u64>>,
}

impl Council {
    pub(crate) fn new(group: u64, me: usize, size: usize, limits: Limits) -> Council {
        Council {
            group,
            me,
            size,
            limits,
            ledgers: [None, None],
            suspects: Ranks::none(size),
            dead: Ranks::none(size),
            left: Ranks::none(size),
            rooms: BTreeMap::new(),
        }
    }

    /// Has anything been said or asked?
    pub(crate) fn is_active(&self) -> bool {
        self.ledgers.iter().any(Option::is_some)
    }

    /// The program calls, and expects no call of the ranks `without`.
    ///
    /// # Errors
    /// If the group is too large.
    pub(crate) fn call(
        &mut self,
        question: Question,
        value: u64,
        without: &[usize],
        deadline: Duration,
        now: Duration,
    ) -> Result<(), Fault> {
        if self.size > SIZE_MAX {
            let message =
                format!("the group has {} ranks, and at most {SIZE_MAX} can agree on anything", self.size);
            return Err(Fault::new(ErrorKind::Limit, message));
        }
        let ledger = self.ledger(question, now);
        ledger.expect_no_call(without.iter().copied(), now);
        ledger.call(value, deadline, now);
        Ok(())
    }

    /// What became of the call; nothing as long as that is not known. The next call is about the next agreement.
    pub(crate) fn take_outcome(
        &mut self,
        question: Question,
        now: Duration,
    ) -> Option<Result<Agreed, Fault>> {
        let me = self.me;
        let ledger = self.ledgers[question as usize].as_mut()?;
        let agreed = match ledger.outcome()? {
            Outcome::Decided(proposal) => Agreed {
                sequence: ledger.sequence(),
                members: proposal.members.iter().collect(),
                value: proposal.value,
            },
            Outcome::Excluded(proposal) => {
                let members: Vec<usize> = proposal.members.iter().collect();
                let message = format!("{} agreed without rank {me}, which is left out", show_ranks(&members));
                let hint = "the others did not hear from this rank in time, or expected no call of it: see their logs";
                return Some(Err(Fault::new(ErrorKind::Closed, message).hint(hint)));
            }
            Outcome::Failed(failure) => return Some(Err(failure.fault())),
        };
        ledger.advance(now);
        Some(Ok(agreed))
    }

    /// # Errors
    /// Says what is wrong with a letter that no correct rank sends. It has then changed nothing.
    pub(crate) fn on_letter(&mut self, from: usize, bytes: &[u8], now: Duration) -> Result<(), String> {
        let refused = |refused: Refused| refused.to_string();
        if self.size > SIZE_MAX {
            return Err(refused(Refused::Size { theirs: 0, ours: self.size }));
        }
        let letter = Letter::decode(bytes, self.size).map_err(refused)?;
        let group = letter.instance.group;
        let is_it = |question: &Question| question.of_group(self.group) == group;
        let question = Question::ALL.into_iter().find(is_it);
        let question = question.ok_or_else(|| refused(Refused::Group { group }))?;
        let heard = self.ledger(question, now).on_letter(from, letter, now).map_err(refused)?;
        if heard != Heard::Current {
            tracing::debug!("a letter of rank {from} was {heard:?}");
        }
        Ok(())
    }

    /// A rank has made a room for what the agreement with this number makes.
    pub(crate) fn on_room(&mut self, from: usize, sequence: u32, offset: u64) {
        let current =
            self.ledgers[Question::Survivors as usize].as_ref().map_or(0, |ledger| ledger.sequence());
        let is_expected = sequence <= current.saturating_add(1) && current.saturating_sub(sequence) <= 1;
        if from < self.size && is_expected {
            self.rooms.entry(sequence).or_default().insert(from, offset);
            while self.rooms.len() > ROOMS_MAX {
                self.rooms.pop_first();
            }
        }
    }

    pub(crate) fn room(&self, sequence: u32, rank: usize) -> Option<u64> {
        self.rooms.get(&sequence)?.get(&rank).copied()
    }

    /// The rank seems to be dead, or cannot be reached.
    pub(crate) fn on_suspect(&mut self, rank: usize, now: Duration) {
        if rank < self.size && !self.suspects.contains(rank) {
            self.suspects.insert(rank);
            self.ledgers.iter_mut().flatten().for_each(|ledger| ledger.on_suspect(rank, now));
        }
    }

    /// The rank is dead: nothing that it sent arrives after this.
    pub(crate) fn on_dead(&mut self, rank: usize, now: Duration) {
        if rank < self.size && !self.dead.contains(rank) {
            self.dead.insert(rank);
            self.suspects.insert(rank);
            self.ledgers.iter_mut().flatten().for_each(|ledger| ledger.on_dead(rank, now));
        }
    }

    /// The program of this rank has left the group, and will not call.
    pub(crate) fn on_left(&mut self, rank: usize, now: Duration) {
        if rank < self.size && !self.left.contains(rank) {
            self.left.insert(rank);
            self.ledgers.iter_mut().flatten().for_each(|ledger| ledger.on_left(rank, now));
        }
    }

    pub(crate) fn on_tick(&mut self, now: Duration) {
        for ledger in self.ledgers.iter_mut().flatten() {
            if ledger.wake().is_some_and(|at| at <= now) {
                ledger.on_tick(now);
            }
        }
    }

    /// Call `on_tick` at this time at the latest.
    pub(crate) fn wake(&self) -> Option<Duration> {
        self.ledgers.iter().flatten().filter_map(|ledger| ledger.wake()).min()
    }

    /// What to send: letters, each with its receivers. In this order to each of them.
    pub(crate) fn take_letters(&mut self) -> Vec<(Vec<usize>, Vec<u8>)> {
        let mut letters = Vec::new();
        for ledger in self.ledgers.iter_mut().flatten() {
            for (to, letter) in ledger.take_sends() {
                let to: Vec<usize> = match to {
                    To::Rank(rank) => vec![rank],
                    To::All => (0..self.size).filter(|rank| *rank != self.me).collect(),
                };
                let to: Vec<usize> = to.into_iter().filter(|rank| !self.dead.contains(*rank)).collect();
                if !to.is_empty() {
                    let mut bytes = Vec::new();
                    letter.encode(self.size, &mut bytes);
                    letters.push((to, bytes));
                }
            }
        }
        letters
    }

    fn ledger(&mut self, question: Question, now: Duration) -> &mut Ledger {
        let Council { group, me, size, limits, suspects, dead, left, .. } = self;
        self.ledgers[question as usize].get_or_insert_with(|| {
            let settings = Settings {
                quorum: limits.quorum,
                rule: Rule::Survivors,
                repeat: REPEAT,
                patience: limits.patience,
                grace: limits.grace.min(limits.patience),
            };
            let mut ledger = Ledger::new(question.of_group(*group), *me, *size, settings);
            suspects.iter().for_each(|rank| ledger.on_suspect(rank, now));
            dead.iter().for_each(|rank| ledger.on_dead(rank, now));
            left.iter().for_each(|rank| ledger.on_left(rank, now));
            Box::new(ledger)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(10);

    fn councils(size: usize) -> Vec<Council> {
        let second = Duration::from_secs(1);
        let limits = Limits { quorum: Quorum::Living, patience: second, grace: second };
        (0..size).map(|me| Council::new(77, me, size, limits)).collect()
    }

    fn settle(all: &mut [Council], dead: &[usize]) {
        loop {
            let mut wire = Vec::new();
            for (from, council) in all.iter_mut().enumerate().filter(|(from, _)| !dead.contains(from)) {
                wire.extend(council.take_letters().into_iter().map(|(to, bytes)| (from, to, bytes)));
            }
            if wire.is_empty() {
                return;
            }
            for (from, to, bytes) in wire {
                for to in to.into_iter().filter(|to| !dead.contains(to)) {
                    all[to].on_letter(from, &bytes, Duration::ZERO).expect("it is right");
                }
            }
        }
    }

    #[test]
    fn survivors_and_values_are_agreed_on_independently_of_each_other() {
        let mut all = councils(3);
        all[0].call(Question::Value, 6, &[], TIMEOUT, Duration::ZERO).unwrap();
        for rank in [1, 2] {
            all[rank].on_dead(0, Duration::ZERO);
            all[rank].call(Question::Survivors, 0, &[], TIMEOUT, Duration::ZERO).unwrap();
            all[rank].call(Question::Value, 12 + rank as u64, &[], TIMEOUT, Duration::ZERO).unwrap();
        }
        settle(&mut all, &[0]);
        for rank in [1, 2] {
            let outcome = all[rank].take_outcome(Question::Survivors, Duration::ZERO);
            let agreed = Agreed { sequence: 0, members: vec![1, 2], value: 0 };
            assert_eq!(outcome.unwrap().unwrap(), agreed);
            let outcome = all[rank].take_outcome(Question::Value, Duration::ZERO).unwrap().unwrap();
            assert_eq!((outcome.value, outcome.members), (12, vec![1, 2]));
            assert!(all[rank].take_outcome(Question::Value, Duration::ZERO).is_none(), "it was taken");
        }
    }

    #[test]
    fn ranks_that_were_given_up_before_the_first_call_are_not_waited_for() {
        let mut all = councils(4);
        for council in &mut all[..2] {
            council.on_left(2, Duration::ZERO);
            council.on_suspect(3, Duration::ZERO);
            assert!(!council.is_active());
            council.call(Question::Survivors, 0, &[], TIMEOUT, Duration::ZERO).unwrap();
        }
        settle(&mut all, &[3]);
        let agreed = all[1].take_outcome(Question::Survivors, Duration::ZERO).unwrap().unwrap();
        assert_eq!(agreed.members, [0, 1], "rank 2 has left, and answers all the same");
        all[2].call(Question::Survivors, 0, &[], TIMEOUT, Duration::ZERO).unwrap();
        settle(&mut all, &[3]);
        let excluded = all[2].take_outcome(Question::Survivors, Duration::ZERO).unwrap().unwrap_err();
        assert_eq!(excluded.message, "ranks 0, 1 agreed without rank 2, which is left out");
    }

    #[test]
    fn a_call_without_some_ranks_leaves_them_out_and_the_next_one_does_not() {
        let mut all = councils(3);
        for rank in [0, 2] {
            all[rank].call(Question::Survivors, 0, &[1], TIMEOUT, Duration::ZERO).unwrap();
        }
        settle(&mut all, &[]);
        for rank in [0, 2] {
            let agreed = all[rank].take_outcome(Question::Survivors, Duration::ZERO).unwrap().unwrap();
            assert_eq!(agreed.members, [0, 2]);
        }
    }

    #[test]
    fn rooms_of_agreements_far_from_this_one_take_no_memory() {
        let mut council = councils(3).remove(0);
        council.on_room(1, 0, 10);
        council.on_room(1, 1, 11);
        council.on_room(1, 2, 12);
        council.on_room(3, 0, 13);
        assert_eq!([0, 1, 2].map(|sequence| council.room(sequence, 1)), [Some(10), Some(11), None]);
        assert_eq!(council.room(0, 2), None);
    }

    #[test]
    fn letters_about_another_group_are_refused_and_change_nothing() {
        let mut all = councils(2);
        let mut other = Council::new(78, 1, 2, all[0].limits);
        other.call(Question::Value, 1, &[], TIMEOUT, Duration::ZERO).unwrap();
        let (_, letter) = other.take_letters().remove(0);
        let refused = all[0].on_letter(1, &letter, Duration::ZERO).unwrap_err();
        assert!(refused.contains("which is another one"), "{refused}");
        assert!(all[0].on_letter(1, b"x", Duration::ZERO).is_err() && !all[0].is_active());
    }
}
