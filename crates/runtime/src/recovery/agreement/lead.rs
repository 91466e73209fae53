//! The side of an agreement that leads: what others have sent, what to propose, when it is decided.

use std::collections::BTreeMap;
use std::time::Duration;

use super::super::message::{Accepted, Ballot, Message, Proposal, ROUND_MAX};
use super::super::ranks::Ranks;
use super::{Agreement, Failure, REPEAT_MAX, Rule, To};

/// One ballot of this rank.
#[derive(Clone, Debug, Hash)]
pub(super) struct Lead {
    pub(super) ballot: Ballot,
    /// Never replaced by another one: a ballot has one proposal.
    pub(super) proposal: Option<Proposal>,
    pub(super) accepts: Ranks,
    /// The ranks that its proposal declares dead.
    pub(super) dead: Ranks,
    /// It was refused, and is tried again at this time above this ballot.
    pub(super) retry_at: Option<Duration>,
    pub(super) above: Ballot,
    pub(super) refusals: u32,
}

/// What ranks have sent with their joins, whether or not this rank leads.
#[derive(Clone, Debug, Hash)]
pub(super) struct Votes {
    /// The ballot of this rank that each rank has joined last.
    joined: Vec<Option<Ballot>>,
    /// A rank contributes one value, and never takes it back.
    values: Vec<Option<u64>>,
    /// The ranks that each rank suspects, if there are any.
    suspects: BTreeMap<usize, Ranks>,
    /// What was accepted in the highest ballot, of all that was reported.
    accepted: Option<Accepted>,
}

impl Votes {
    pub(super) fn new(size: usize) -> Votes {
        Votes {
            joined: vec![None; size],
            values: vec![None; size],
            suspects: BTreeMap::new(),
            accepted: None,
        }
    }

    pub(super) fn value(&self, rank: usize) -> Option<u64> {
        self.values[rank]
    }

    pub(super) fn put_value(&mut self, rank: usize, value: u64) {
        self.values[rank].get_or_insert(value);
    }

    pub(super) fn join(
        &mut self,
        from: usize,
        ballot: Ballot,
        value: Option<u64>,
        suspects: Ranks,
        accepted: Option<Accepted>,
    ) {
        if let Some(value) = value {
            self.put_value(from, value);
        }
        if self.joined[from].is_some_and(|joined| joined > ballot) {
            return; // late
        }
        self.joined[from] = Some(ballot);
        match suspects.is_empty() {
            true => drop(self.suspects.remove(&from)),
            false => drop(self.suspects.insert(from, suspects)),
        }
        self.report(accepted);
    }

    fn report(&mut self, accepted: Option<Accepted>) {
        if let Some((ballot, proposal)) = accepted
            && self.accepted.as_ref().is_none_or(|(known, _)| *known < ballot)
        {
            self.accepted = Some((ballot, proposal));
        }
    }

    /// The ranks that follow this ballot.
    pub(super) fn joined(&self, ballot: Ballot) -> Ranks {
        let ranks = 0..self.joined.len();
        Ranks::of(self.joined.len(), ranks.filter(|rank| self.joined[*rank] == Some(ballot)))
    }

    /// The ranks that have joined this one, in any ballot.
    pub(super) fn followers(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.joined.len()).filter(|rank| self.joined[*rank].is_some())
    }

    pub(super) fn joined_without_suspects(&self, ballot: Ballot) -> Ranks {
        let mut joined = self.joined(ballot);
        self.suspects.keys().for_each(|rank| joined.remove(*rank));
        joined
    }

    /// The highest ballot that a rank has joined.
    fn highest(&self) -> Option<Ballot> {
        self.joined.iter().flatten().max().copied()
    }

    /// Does a rank that is not absent wait for a decision?
    pub(super) fn is_wanted(&self, absent: &Ranks) -> bool {
        (0..self.values.len()).any(|rank| self.values[rank].is_some() && !absent.contains(rank))
    }

    fn is_suspected(&self, rank: usize) -> bool {
        self.suspects.values().any(|suspects| suspects.contains(rank))
    }

    /// The candidates without those that cannot reach each other: again and again the one with the most suspicions, its own
    /// and those of others, is left out, of several the highest. The leader itself remains.
    fn without_conflicts(&self, mut candidates: Ranks, leader: usize) -> Ranks {
        let mut counts = vec![0_usize; candidates.size()];
        for (&from, suspects) in self.suspects.iter().filter(|(from, _)| candidates.contains(**from)) {
            for rank in suspects.iter().filter(|rank| *rank != from && candidates.contains(*rank)) {
                counts[from] += 1;
                counts[rank] += 1;
            }
        }
        loop {
            let others = candidates.iter().filter(|rank| *rank != leader && counts[*rank] > 0);
            let Some(worst) = others.max_by_key(|rank| (counts[*rank], *rank)) else { return candidates };
            candidates.remove(worst);
            for (&from, suspects) in &self.suspects {
                if from == worst {
                    let known = suspects.iter().filter(|rank| candidates.contains(*rank));
                    known.for_each(|rank| counts[rank] -= 1);
                } else if candidates.contains(from) && suspects.contains(worst) {
                    counts[from] -= 1;
                }
            }
        }
    }

    fn and(&self, members: &Ranks) -> u64 {
        members.iter().filter_map(|rank| self.values[rank]).fold(u64::MAX, |all, value| all & value)
    }
}

impl Agreement {
    /// Leads a ballot that is not below `least`, nor below what this rank has promised, nor one that it has used.
    pub(super) fn start_lead(&mut self, least: Ballot, asks: bool) {
        let highest = self.votes.highest().unwrap_or(Ballot::FIRST);
        let mut ballot = self.promised.max(least).max(highest).of(self.me);
        if self.used.is_some_and(|used| used >= ballot) {
            ballot = self.used.map_or(ballot, Ballot::again);
        }
        if ballot.round > ROUND_MAX {
            self.lead = None;
            return;
        }
        (self.promised, self.leader) = (ballot, self.me);
        // Which ranks it suspects itself is known when it proposes.
        let (value, no_suspects) = (self.votes.value(self.me), Ranks::none(self.size));
        self.votes.join(self.me, ballot, value, no_suspects, self.accepted.clone());
        self.lead = Some(Lead {
            ballot,
            proposal: None,
            accepts: Ranks::none(self.size),
            dead: Ranks::none(self.size),
            retry_at: None,
            above: ballot,
            refusals: 0,
        });
        if asks {
            self.sends.push((To::All, Message::Prepare { ballot }));
        }
        self.restart_repeats();
        self.advance();
    }

    /// Proposes if there is a proposal, and decides if enough ranks have accepted it.
    pub(super) fn advance(&mut self) {
        let Some(ballot) = self.lead.as_ref().filter(|lead| lead.proposal.is_none()).map(|lead| lead.ballot)
        else {
            return self.count_accepts();
        };
        if ballot < self.promised {
            return; // it follows a leader that it suspects, and tries again soon
        }
        let Some(proposal) = self.choose(ballot) else { return };
        self.used = Some(ballot);
        self.accepted = Some((ballot, proposal.clone()));
        if let Some(lead) = &mut self.lead {
            lead.proposal = Some(proposal.clone());
            lead.accepts.insert(self.me);
            lead.dead = self.dead.clone();
        }
        self.sends.push((To::All, Message::Propose { ballot, proposal, dead: self.dead.clone() }));
        self.restart_repeats();
        self.count_accepts();
    }

    fn count_accepts(&mut self) {
        let Some(lead) = &self.lead else { return };
        let Some(proposal) = &lead.proposal else { return };
        if self.settings.quorum.is_met(&lead.accepts, &self.absent(), &lead.dead) {
            self.decide(proposal.clone());
        }
    }

    /// What to propose in this ballot, once that is known.
    fn choose(&self, ballot: Ballot) -> Option<Proposal> {
        let absent = self.absent();
        if !self.settings.quorum.is_met(&self.votes.joined(ballot), &absent, &self.dead) {
            return None;
        }
        if let Some((_, proposal)) = &self.votes.accepted {
            return Some(proposal.clone()); // it may be decided already
        }
        let has_value = |rank: &usize| self.votes.value(*rank).is_some();
        let present = Ranks::of(self.size, absent.others().iter().filter(has_value));
        match self.settings.rule {
            Rule::Unanimous => {
                let willing = present.iter().filter(|rank| self.votes.value(*rank) != Some(0));
                let members = Ranks::of(self.size, willing);
                let is_over =
                    members.len() < present.len() || !absent.is_empty() || !self.votes.suspects.is_empty();
                match members.len() == self.size {
                    true => Some(Proposal { value: self.votes.and(&members), members }),
                    false if is_over || self.not_called().is_empty() => Some(Proposal { members, value: 0 }),
                    false => None,
                }
            }
            Rule::Survivors if !self.not_called().is_empty() => None,
            Rule::Survivors => {
                let members = self.votes.without_conflicts(present, self.me);
                let value = self.votes.and(&members);
                // Those that have left, or are left out on purpose, do not object.
                let mut consenting = members.clone();
                self.left
                    .iter()
                    .filter(|rank| !absent.contains(*rank))
                    .for_each(|rank| consenting.insert(rank));
                let is_allowed = self.settings.quorum.may_allow(&members)
                    && self.settings.quorum.allows(&consenting, &self.dead);
                is_allowed.then_some(Proposal { members, value })
            }
        }
    }

    /// The ranks that are still waited for.
    fn not_called(&self) -> Vec<usize> {
        let since = self.since.unwrap_or(self.now);
        let is_waited_for = |rank: &usize| {
            let limit = match self.votes.is_suspected(*rank) {
                true => self.settings.grace,
                false => self.settings.patience,
            };
            !self.is_absent(*rank)
                && !self.left.contains(*rank)
                && self.votes.value(*rank).is_none()
                && self.now < since.saturating_add(limit)
        };
        (0..self.size).filter(is_waited_for).collect()
    }

    /// The pause grows with each refusal and is different for each rank, so that of two leaders one gets through.
    pub(super) fn schedule_retry(&mut self) {
        let Some(lead) = &mut self.lead else { return };
        if lead.retry_at.is_none() {
            let factor = (1 << lead.refusals.min(REPEAT_MAX.ilog2())).min(REPEAT_MAX);
            let mixed = (self.me as u32 + 1)
                .wrapping_mul(0x9e37_79b9)
                .wrapping_add(lead.ballot.round.wrapping_mul(0x85eb_ca6b));
            let eighths = (mixed ^ mixed >> 15) % 8 + 1;
            lead.refusals = lead.refusals.saturating_add(1);
            lead.retry_at = Some(self.now.saturating_add(self.settings.repeat * factor * eighths / 8));
        }
        lead.above = lead.above.max(self.promised);
    }

    /// What the call was waiting for when it timed out.
    pub(super) fn failure(&self) -> Failure {
        let Some(lead) = &self.lead else { return Failure::Leader { rank: self.leader } };
        let not_called = self.not_called();
        let answered = match &lead.proposal {
            Some(_) => lead.accepts.clone(),
            None => self.votes.joined(lead.ballot),
        };
        if self.settings.quorum.is_met(&answered, &self.absent(), &self.dead) && !not_called.is_empty() {
            return Failure::NotCalled { ranks: not_called };
        }
        let is_missing = |rank: &usize| !answered.contains(*rank) || self.votes.value(*rank).is_none();
        let missing = (0..self.size).filter(is_missing).collect();
        Failure::Quorum { quorum: self.settings.quorum, size: self.size, missing }
    }
}
