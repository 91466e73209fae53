//! One agreement, as seen by one rank: which ranks continue, and the AND of what they contribute.
//!
//! It is Paxos for a single decision. All ranks of the last generation are its acceptors, also those whose program has not
//! called. The lowest rank that a rank does not suspect leads it. In the good case, with n ranks:
//!
//! 1. Each rank sends `Join` to its leader when its program calls. That is a promise to follow no lower ballot, so no leader
//!    has to ask for promises first.
//! 2. When all ranks that the leader does not suspect have joined, it sends `Propose` to all ranks.
//! 3. They answer `Accept`.
//! 4. When a [`Quorum`] has accepted, it is decided. The leader sends `Decided` to all ranks, also to those that it
//!    suspects: a rank that lives and is not among the members learns that it was excluded.
//!
//! These are 4 (n − 1) messages and two round trips. If the leader dies, the ranks join the next one as soon as they suspect
//! it, and that one asks all ranks immediately (n − 1 more messages, and their answers). A leader that was refused because a rank
//! follows a higher ballot tries again above that after a pause, which grows, so that of two leaders that suspect each other
//! one gets through. Ranks follow the highest ballot that they have seen from a rank that they do not suspect.
//!
//! Two ballots can propose different things only if no quorum accepted the lower one: the leader of the higher one first
//! hears of a quorum what each rank has accepted, and proposes the latest of that instead of its own. Everything else here,
//! timeouts, suspicions and which rank leads, only decides how soon it ends.
//!
//! A rank that has not called for `patience` is left out, and learns that when it calls. A rank whose call has failed stays
//! an acceptor. Its program may call again, and then gets the same decision as the others.
//!
//! Time is how long ago the agreement was made. Messages may be repeated, and may be lost: what is not answered is sent again
//! after `repeat`, then after twice as long, and so on up to [`REPEAT_MAX`] times as long.
//!
//! Not here: which agreement a message is about (see `ledger`), bytes (see `message`), detecting deaths.

mod lead;

use std::time::Duration;

use super::message::{Accepted, Ballot, Message, Proposal, ROUND_MAX, Refused};
use super::quorum::Quorum;
use super::ranks::Ranks;
use crate::fault::{ErrorKind, Fault, show_ranks};
use lead::{Lead, Votes};

/// How many times `repeat` may grow.
const REPEAT_MAX: u32 = 16;

/// What all ranks of a group must have in common.
#[derive(Clone, Debug, Hash)]
pub(super) struct Settings {
    pub(super) quorum: Quorum,
    pub(super) rule: Rule,
    /// After this long without an answer a message is sent again.
    pub(super) repeat: Duration,
    /// A rank that is alive is left out if it has not joined after this long.
    pub(super) patience: Duration,
    /// The same for a rank that another rank suspects.
    pub(super) grace: Duration,
}

/// What a leader proposes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Rule {
    /// The ranks that joined, without those that cannot reach each other.
    Survivors,
    /// All ranks, or nothing: a rank that is suspected, does not join or contributes 0 makes the value 0.
    Unanimous,
}

/// To which ranks a message goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum To {
    Rank(usize),
    /// All but the sender, also those that it suspects.
    All,
}

/// What a call returns.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Outcome {
    Decided(Proposal),
    /// It was decided without this rank.
    Excluded(Proposal),
    Failed(Failure),
}

/// What an agreement that timed out was waiting for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Failure {
    /// Too few ranks answer, or have called.
    Quorum { quorum: Quorum, size: usize, missing: Vec<usize> },
    /// These ranks have not called, and there was still patience with them.
    NotCalled { ranks: Vec<usize> },
    /// The leader has not decided.
    Leader { rank: usize },
}

impl Failure {
    pub(crate) fn fault(&self) -> Fault {
        match self {
            Failure::Quorum { quorum, size, missing } => {
                let needed = match quorum {
                    Quorum::Majority => format!("more than half of {size} ranks, or half with rank 0"),
                    Quorum::Living => {
                        format!("more than half of {size} ranks, or all whose death was not seen")
                    }
                    Quorum::AllReachable => "all ranks that are not suspected".into(),
                    Quorum::AtLeast(least) => format!("at least {least} of {size} ranks"),
                };
                let missing = show_ranks(missing);
                Fault::timeout(format!("no agreement: it needs {needed}; no answer from {missing}"))
                    .kind_is(ErrorKind::PeerLost)
                    .hint("restart the job, or check the network between the hosts and call again")
            }
            Failure::NotCalled { ranks } => {
                let verb = if ranks.len() == 1 { "has" } else { "have" };
                let waiting = format!("no agreement: {} {verb} not called", show_ranks(ranks));
                Fault::timeout(waiting).peer(ranks[0]).hint("call on all ranks, or raise `timeout`")
            }
            Failure::Leader { rank } => {
                Fault::timeout(format!("no agreement: rank {rank}, which leads it, has not decided"))
                    .peer(*rank)
                    .hint(format!("see the log of rank {rank}, or raise `timeout`"))
            }
        }
    }
}

#[derive(Clone, Debug, Hash)]
pub(super) struct Agreement {
    me: usize,
    size: usize,
    settings: Settings,
    suspects: Ranks,
    /// Those of them that can never answer again: this rank has seen their end and receives nothing more from them.
    dead: Ranks,
    /// Ranks whose programs will not call.
    left: Ranks,
    /// Ranks that an earlier agreement left out.
    excluded: Ranks,
    call: Option<Call>,
    /// When this rank first heard of it: what `patience` counts from.
    since: Option<Duration>,
    promised: Ballot,
    accepted: Option<Accepted>,
    /// The rank that this one follows.
    leader: usize,
    /// The leader has sent something since the last repetition.
    heard: bool,
    votes: Votes,
    /// Ranks that were asked because another rank suspects them.
    asked: Ranks,
    lead: Option<Lead>,
    /// The highest ballot in which this rank has proposed.
    used: Option<Ballot>,
    decision: Option<Proposal>,
    outcome: Option<Outcome>,
    repeat_at: Option<Duration>,
    repeats: u32,
    /// When this rank leads although it does not suspect its leader.
    take_over_at: Option<Duration>,
    now: Duration,
    sends: Vec<(To, Message)>,
}

#[derive(Clone, Copy, Debug, Hash)]
struct Call {
    value: u64,
    deadline: Duration,
}

impl Agreement {
    /// Before the program calls, the agreement answers what others send.
    pub(super) fn new(me: usize, size: usize, settings: Settings) -> Agreement {
        Agreement {
            me,
            size,
            settings,
            suspects: Ranks::none(size),
            dead: Ranks::none(size),
            left: Ranks::none(size),
            excluded: Ranks::none(size),
            call: None,
            since: None,
            promised: Ballot::FIRST,
            accepted: None,
            leader: 0,
            heard: false,
            votes: Votes::new(size),
            asked: Ranks::none(size),
            lead: None,
            used: None,
            decision: None,
            outcome: None,
            repeat_at: None,
            repeats: 0,
            take_over_at: None,
            now: Duration::ZERO,
            sends: Vec::new(),
        }
    }

    /// What to send. In this order to each rank.
    pub(super) fn take_sends(&mut self) -> Vec<(To, Message)> {
        std::mem::take(&mut self.sends)
    }

    /// What the call returns, once it is known.
    pub(super) fn outcome(&self) -> Option<&Outcome> {
        self.outcome.as_ref()
    }

    /// What was decided, also if the program has not called.
    pub(super) fn decision(&self) -> Option<&Proposal> {
        self.decision.as_ref()
    }

    /// Call `on_tick` at this time at the latest.
    pub(super) fn wake(&self) -> Option<Duration> {
        if self.decision.is_some() {
            return None;
        }
        let deadline = self.call.filter(|_| self.outcome.is_none()).map(|call| call.deadline);
        let retry = self.lead.as_ref().and_then(|lead| lead.retry_at);
        let limits = [self.settings.grace, self.settings.patience].map(|limit| {
            let since = self.since.filter(|_| self.lead.is_some());
            since.map(|since| since.saturating_add(limit)).filter(|at| *at > self.now)
        });
        let take_over = self.take_over_at.filter(|_| self.call.is_some());
        [deadline, retry, take_over, self.repeat_at].into_iter().chain(limits).flatten().min()
    }

    /// The program calls. It may do so again after it failed.
    pub(super) fn call(&mut self, value: u64, deadline: Duration, now: Duration) {
        self.awake(now);
        // What was contributed may be part of a proposal already.
        let value = self.votes.value(self.me).unwrap_or(value);
        self.call = Some(Call { value, deadline });
        self.votes.put_value(self.me, value);
        self.outcome = None;
        self.conclude();
        if self.decision.is_some() {
            return;
        }
        self.restart_repeats();
        self.put_off_take_over();
        if self.lead.is_some() {
            self.advance();
        } else if self.lowest() == self.me && self.leader == self.me {
            self.start_lead(Ballot::FIRST, false);
        } else {
            self.join_leader();
        }
    }

    /// The rank is dead, or cannot be reached.
    pub(super) fn on_suspect(&mut self, rank: usize, now: Duration) {
        self.now = self.now.max(now);
        if rank == self.me || rank >= self.size {
            return;
        }
        self.suspects.insert(rank);
        self.on_absent(rank);
    }

    /// The rank is dead. Nothing that it sent is handled after this.
    pub(super) fn on_dead(&mut self, rank: usize, now: Duration) {
        if rank != self.me && rank < self.size {
            self.dead.insert(rank);
            self.on_suspect(rank, now);
            // What it proposes must say that this rank is dead, too: another ballot.
            if self.settings.quorum.counts_dead()
                && let Some(lead) = self.lead.as_ref().filter(|lead| lead.proposal.is_some())
            {
                self.start_lead(lead.ballot.again(), true);
            }
        }
    }

    /// The ranks that this one has seen die, or has heard of.
    pub(super) fn dead(&self) -> &Ranks {
        &self.dead
    }

    /// The rank answers, but its program will not call.
    pub(super) fn on_left(&mut self, rank: usize, now: Duration) {
        self.now = self.now.max(now);
        if rank < self.size {
            self.left.insert(rank);
            self.advance();
        }
    }

    /// The rank answers again.
    pub(super) fn on_trust(&mut self, rank: usize, now: Duration) {
        self.now = self.now.max(now);
        if rank < self.size && self.suspects.contains(rank) && !self.dead.contains(rank) {
            self.suspects.remove(rank);
            if self.lead.is_some() {
                self.ask([rank]);
            } else if !self.is_awake() {
                self.leader = self.lowest();
            }
        }
    }

    /// An earlier agreement left this rank out, so this one does, too.
    pub(super) fn exclude(&mut self, rank: usize) {
        self.excluded.insert(rank);
        self.on_absent(rank);
    }

    fn on_absent(&mut self, rank: usize) {
        if self.decision.is_some() {
            return;
        }
        if rank == self.leader {
            self.follow_lowest(true);
        } else {
            self.advance();
        }
    }

    /// Handles a message.
    ///
    /// # Errors
    /// Says what is wrong with a message that no correct rank sends. It has then changed nothing.
    pub(super) fn on_message(&mut self, from: usize, message: Message, now: Duration) -> Result<(), Refused> {
        if self.dead.contains(from) {
            return Ok(()); // late
        }
        self.check(from, &message)?;
        self.awake(now);
        self.heard |= from == self.leader;
        if let Some(decision) = &self.decision {
            let is_answered = !matches!(message, Message::Accept { .. } | Message::Decided { .. });
            if is_answered {
                self.sends.push((To::Rank(from), Message::Decided { proposal: decision.clone() }));
            }
            return Ok(());
        }
        match message {
            Message::Prepare { ballot } if self.follow(from, ballot) => {
                let join = self.join(ballot);
                self.sends.push((To::Rank(from), join));
            }
            Message::Propose { ballot, proposal, dead } if self.follow(from, ballot) => {
                self.dead.add(&dead);
                self.suspects.add(&dead);
                self.accepted = Some((ballot, proposal));
                self.sends.push((To::Rank(from), Message::Accept { ballot }));
            }
            Message::Prepare { .. } | Message::Propose { .. } => {}
            Message::Join { ballot, value, suspects, left, accepted } => {
                self.left.add(&left);
                let doubtful: Vec<usize> = suspects.iter().collect();
                self.votes.join(from, ballot, value, suspects, accepted);
                self.on_join(from, ballot);
                self.ask_doubtful(doubtful);
            }
            Message::Accept { ballot } => {
                if let Some(lead) = self.lead.as_mut().filter(|lead| lead.ballot == ballot) {
                    lead.accepts.insert(from);
                    self.advance();
                }
            }
            Message::Refuse { ballot, promised } => {
                if let Some(lead) = self.lead.as_mut().filter(|lead| lead.ballot == ballot) {
                    lead.above = lead.above.max(promised);
                    self.schedule_retry();
                }
            }
            Message::Decided { proposal } => self.decide(proposal),
        }
        Ok(())
    }

    /// Something may be due.
    pub(super) fn on_tick(&mut self, now: Duration) {
        self.now = self.now.max(now);
        if self.decision.is_some() {
            return;
        }
        if self.call.is_some_and(|call| call.deadline <= self.now) && self.outcome.is_none() {
            self.outcome = Some(Outcome::Failed(self.failure()));
            self.call = None;
        }
        if let Some(lead) = self.lead.as_ref()
            && lead.retry_at.is_some_and(|at| at <= self.now)
        {
            let refusals = lead.refusals;
            self.start_lead(lead.above.max(lead.ballot.again()), true);
            if let Some(lead) = &mut self.lead {
                lead.refusals = refusals;
            }
        }
        if self.take_over_at.is_some_and(|at| at <= self.now) && self.call.is_some() {
            self.put_off_take_over();
            if self.lead.is_none() {
                self.start_lead(self.promised, true);
            }
        }
        if self.repeat_at.is_some_and(|at| at <= self.now) {
            self.repeat();
        }
        self.advance();
    }

    /// Is this what a correct rank sends?
    fn check(&self, from: usize, message: &Message) -> Result<(), Refused> {
        let (leader, is_mine) = match message {
            Message::Prepare { ballot } | Message::Propose { ballot, .. } => (ballot.rank, false),
            Message::Join { ballot, .. } | Message::Accept { ballot } | Message::Refuse { ballot, .. } => {
                (ballot.rank, true)
            }
            Message::Decided { .. } => (from, false),
        };
        if from >= self.size || from == self.me {
            return Err(Refused::Rank { rank: from, size: self.size });
        }
        if leader != if is_mine { self.me } else { from } {
            return Err(Refused::Leader { from, leader });
        }
        let (proposal, ballot) = match message {
            Message::Propose { dead, .. } if dead.contains(self.me) => {
                return Err(Refused::Impossible { from });
            }
            Message::Propose { ballot, proposal, .. } => (Some(proposal), Some(*ballot)),
            Message::Join { accepted: Some((ballot, proposal)), .. } => (Some(proposal), Some(*ballot)),
            Message::Decided { proposal } => (Some(proposal), None),
            _ => (None, None),
        };
        let Some(proposal) = proposal else { return Ok(()) };
        if self.settings.rule == Rule::Survivors && !self.settings.quorum.may_allow(&proposal.members) {
            return Err(Refused::Members { from });
        }
        if proposal.members.contains(self.me) && self.votes.value(self.me).is_none() {
            return Err(Refused::Impossible { from });
        }
        let known = match (&self.accepted, ballot) {
            (Some((mine, known)), Some(theirs)) if *mine == theirs => Some(known),
            (_, None) => self.decision.as_ref(),
            _ => None,
        };
        match known.is_none_or(|known| known == proposal) {
            true => Ok(()),
            false => Err(Refused::Contradiction { from }),
        }
    }

    /// May this rank follow the ballot? If not, its leader learns which one it follows.
    fn follow(&mut self, from: usize, ballot: Ballot) -> bool {
        if ballot < self.promised {
            let refusal = Message::Refuse { ballot, promised: self.promised };
            self.sends.push((To::Rank(from), refusal));
            return false;
        }
        self.promised = ballot;
        if !self.is_absent(from) {
            (self.leader, self.heard) = (from, true);
            self.lead = None;
        } else if self.lead.is_some() {
            self.schedule_retry();
        }
        true
    }

    fn on_join(&mut self, from: usize, ballot: Ballot) {
        match &self.lead {
            Some(lead) if ballot < lead.ballot => self.ask([from]),
            Some(lead) if ballot == lead.ballot => self.advance(),
            Some(_) => self.start_lead(ballot, true),
            None if ballot < self.promised => {}
            None if self.lowest() == self.me => self.start_lead(ballot, ballot.round > 0),
            None if from == self.leader => self.follow_lowest(true), // it does not lead
            None => {}
        }
    }

    fn is_awake(&self) -> bool {
        self.since.is_some()
    }

    fn awake(&mut self, now: Duration) {
        self.now = self.now.max(now);
        self.since.get_or_insert(self.now);
    }

    fn is_absent(&self, rank: usize) -> bool {
        self.suspects.contains(rank) || self.excluded.contains(rank)
    }

    fn absent(&self) -> Ranks {
        let mut absent = self.suspects.clone();
        absent.add(&self.excluded);
        absent
    }

    /// The rank that leads if all see what this one sees.
    fn lowest(&self) -> usize {
        (0..self.size).find(|rank| *rank == self.me || !self.is_absent(*rank)).unwrap_or(self.me)
    }

    /// `asks`: ranks that have joined another leader, or know the decision, would not join this one by themselves.
    fn follow_lowest(&mut self, asks: bool) {
        self.leader = self.lowest();
        if !self.is_awake() {
        } else if self.leader == self.me {
            self.start_lead(Ballot::FIRST, asks);
        } else {
            self.lead = None;
            self.join_leader();
        }
    }

    fn join_leader(&mut self) {
        if self.call.is_some() && self.leader != self.me {
            let ballot = self.promised.of(self.leader);
            if ballot.round <= ROUND_MAX {
                self.promised = ballot;
                let join = self.join(ballot);
                self.sends.push((To::Rank(self.leader), join));
            }
        }
    }

    fn join(&self, ballot: Ballot) -> Message {
        let value = self.votes.value(self.me);
        let (suspects, left, accepted) = (self.suspects.clone(), self.left.clone(), self.accepted.clone());
        Message::Join { ballot, value, suspects, left, accepted }
    }

    fn ask(&mut self, ranks: impl IntoIterator<Item = usize>) {
        let Some(lead) = &self.lead else { return };
        let ballot = lead.ballot;
        let me = self.me;
        let prepare = |rank| (rank != me).then_some((To::Rank(rank), Message::Prepare { ballot }));
        self.sends.extend(ranks.into_iter().filter_map(prepare));
    }

    /// Another rank suspects these. If this one has never communicated with them, it finds out by asking.
    fn ask_doubtful(&mut self, ranks: Vec<usize>) {
        let Some(lead) = self.lead.as_ref().filter(|lead| lead.proposal.is_none()) else { return };
        let joined = self.votes.joined(lead.ballot);
        let is_open =
            |rank: &usize| !joined.contains(*rank) && !self.is_absent(*rank) && !self.asked.contains(*rank);
        let ranks: Vec<usize> = ranks.into_iter().filter(is_open).collect();
        ranks.iter().for_each(|rank| self.asked.insert(*rank));
        self.ask(ranks);
    }

    fn conclude(&mut self) {
        let Some(decision) = self.decision.as_ref().filter(|_| self.call.is_some()) else { return };
        self.outcome = Some(match decision.members.contains(self.me) {
            true => Outcome::Decided(decision.clone()),
            false => Outcome::Excluded(decision.clone()),
        });
    }

    /// Ranks that have joined this one wait for it, not for the rank that it has the decision from. Some have joined it because
    /// they suspect a leader that this rank still followed.
    fn decide(&mut self, proposal: Proposal) {
        let waiting: Vec<To> = match self.lead {
            Some(_) => vec![To::All],
            None => self.votes.followers().filter(|rank| *rank != self.me).map(To::Rank).collect(),
        };
        let decided = |to| (to, Message::Decided { proposal: proposal.clone() });
        self.sends.extend(waiting.into_iter().map(decided));
        (self.decision, self.lead, self.repeat_at) = (Some(proposal), None, None);
        self.conclude();
    }

    fn restart_repeats(&mut self) {
        self.repeats = 0;
        self.repeat_at = Some(self.now.saturating_add(self.settings.repeat));
    }

    /// A leader that is alive may still be unable to reach a quorum that another rank reaches. Each rank waits a little longer
    /// than the one before it, so that they do not all lead.
    fn put_off_take_over(&mut self) {
        let Settings { patience, repeat, .. } = self.settings;
        let after = patience.saturating_mul(2).saturating_add(repeat.saturating_mul(self.me as u32));
        self.take_over_at = Some(self.now.saturating_add(after));
    }

    /// Sends again what was not answered.
    fn repeat(&mut self) {
        let is_needed = self.call.is_some() || self.lead.is_some() && self.votes.is_wanted(&self.absent());
        self.repeats = (self.repeats + 1).min(REPEAT_MAX);
        let pause =
            self.settings.repeat.saturating_mul((1 << self.repeats.min(REPEAT_MAX.ilog2())).min(REPEAT_MAX));
        self.repeat_at = is_needed.then(|| self.now.saturating_add(pause));
        // After a while also what was answered: since then, ranks may have decided with another leader, which does not reach
        // this one.
        let asks_all = self.repeats > REPEAT_MAX.ilog2();
        match &self.lead {
            Some(lead) => {
                let (ballot, proposal, dead) = (lead.ballot, lead.proposal.clone(), lead.dead.clone());
                let mut answered = match &proposal {
                    _ if asks_all => Ranks::none(self.size),
                    Some(_) => lead.accepts.clone(),
                    None => self.votes.joined_without_suspects(ballot), // the others may not suspect any more
                };
                answered.insert(self.me);
                let others = answered.others();
                match proposal {
                    Some(proposal) => self.sends.extend(others.iter().map(|rank| {
                        let (proposal, dead) = (proposal.clone(), dead.clone());
                        (To::Rank(rank), Message::Propose { ballot, proposal, dead })
                    })),
                    None => self.ask(others.iter()),
                }
            }
            None if !self.heard && self.leader != self.lowest() => self.follow_lowest(true),
            None => self.join_leader(),
        }
        self.heard = false;
    }
}

#[cfg(test)]
mod tests;
