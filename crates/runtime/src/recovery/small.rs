//! Every schedule of three ranks that agree, up to a bound, and random ones of more.
//!
//! A schedule is an order in which messages arrive and other things happen: a rank dies, notices a death, suspects a rank
//! that may be alive, or has waited so long that all its timeouts have passed. How often each of them happens is bounded, and
//! when it happens is not. States that were seen are not visited again, so this is complete within the bound.
//!
//! Without timeouts, a schedule shows more than those of `model`: what makes a rank wait for a repeated message is an error
//! here, and only a delay there.

use std::collections::hash_map::DefaultHasher;
use std::collections::{BTreeMap, BTreeSet, HashSet, VecDeque};
use std::hash::{Hash, Hasher};
use std::time::Duration;

use super::agreement::{Agreement, Outcome, Rule, Settings, To};
use super::message::{Message, Proposal};
use super::quorum::Quorum;
use super::random::Random;
use super::ranks::Ranks;

const TIMEOUT: Duration = Duration::from_secs(1000);

/// What is left to happen.
#[derive(Clone, Copy, Debug, Hash)]
struct Budget {
    deaths: usize,
    /// Of ranks that are alive.
    suspicions: usize,
    timeouts: usize,
}

#[derive(Clone, Copy, Debug)]
enum Event {
    /// The next message from one rank to another arrives.
    Arrival(usize, usize),
    Suspicion(usize, usize),
    /// All timeouts of the rank have passed.
    Timeout(usize),
    /// Of what it has sent, nothing arrives any more at these ranks, as bits.
    Death(usize, usize),
}

#[derive(Clone, Hash)]
struct State {
    quorum: Quorum,
    ranks: Vec<Agreement>,
    is_alive: Vec<bool>,
    suspects: BTreeSet<(usize, usize)>,
    /// Without those that are empty.
    wires: BTreeMap<(usize, usize), VecDeque<Message>>,
    budget: Budget,
    now: Duration,
    /// Of any rank, also of those that died since; if the quorum is `Living`, only of those that are alive.
    decision: Option<Proposal>,
}

impl State {
    fn new(size: usize, quorum: Quorum, budget: Budget) -> State {
        let settings = Settings {
            quorum,
            rule: Rule::Survivors,
            repeat: Duration::from_secs(1),
            patience: Duration::from_secs(2),
            grace: Duration::from_secs(1),
        };
        let mut state = State {
            quorum,
            ranks: (0..size).map(|me| Agreement::new(me, size, settings.clone())).collect(),
            is_alive: vec![true; size],
            suspects: BTreeSet::new(),
            wires: BTreeMap::new(),
            budget,
            now: Duration::ZERO,
            decision: None,
        };
        for rank in 0..size {
            state.act(rank, |agreement, now| agreement.call(State::value(rank), TIMEOUT, now));
        }
        state
    }

    fn value(rank: usize) -> u64 {
        u64::MAX ^ 1 << rank
    }

    fn size(&self) -> usize {
        self.ranks.len()
    }

    fn act(&mut self, rank: usize, act: impl FnOnce(&mut Agreement, Duration)) {
        act(&mut self.ranks[rank], self.now);
        for (to, message) in self.ranks[rank].take_sends() {
            for other in (0..self.size()).filter(|other| *other != rank && self.is_alive[*other]) {
                if to == To::All || to == To::Rank(other) {
                    self.wires.entry((rank, other)).or_default().push_back(message.clone());
                }
            }
        }
        if let Some(decision) = self.ranks[rank].decision() {
            if self.quorum.counts_dead() {
                let mut live = (0..self.size()).filter(|other| self.is_alive[*other]);
                self.decision = live.find_map(|other| self.ranks[other].decision().cloned());
            }
            let known = self.decision.get_or_insert_with(|| decision.clone());
            assert_eq!(known, decision, "rank {rank} decided differently");
            let value = decision.members.iter().fold(u64::MAX, |all, member| all & State::value(member));
            assert_eq!(decision.value, value);
        }
    }

    /// All that may happen next.
    fn events(&self) -> Vec<Event> {
        let mut events: Vec<Event> = self.wires.keys().map(|&(from, to)| Event::Arrival(from, to)).collect();
        for rank in self.live() {
            let others = (0..self.size()).filter(|other| *other != rank);
            for other in others.filter(|other| !self.suspects.contains(&(rank, *other))) {
                if !self.is_alive[other] || self.budget.suspicions > 0 {
                    events.push(Event::Suspicion(rank, other));
                }
            }
            if self.budget.timeouts > 0 {
                events.push(Event::Timeout(rank));
            }
            if self.budget.deaths > 0 {
                let is_sent = |to| self.wires.contains_key(&(rank, to));
                let is_possible =
                    |lost: &usize| (0..self.size()).all(|to| lost >> to & 1 == 0 || is_sent(to));
                let losses = (0..1 << self.size()).filter(is_possible);
                events.extend(losses.map(|lost| Event::Death(rank, lost)));
            }
        }
        events
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Arrival(from, to) => {
                let wire = self.wires.get_mut(&(from, to)).expect("it is not empty");
                let message = wire.pop_front().expect("it is not empty");
                if wire.is_empty() {
                    self.wires.remove(&(from, to));
                }
                self.act(to, |agreement, now| agreement.on_message(from, message, now).expect("it is right"));
            }
            Event::Suspicion(rank, other) => {
                self.budget.suspicions -= usize::from(self.is_alive[other]);
                self.suspects.insert((rank, other));
                if self.quorum.counts_dead() && !self.is_alive[other] {
                    self.wires.remove(&(other, rank));
                    self.act(rank, |agreement, now| agreement.on_dead(other, now));
                } else {
                    self.act(rank, |agreement, now| agreement.on_suspect(other, now));
                }
            }
            Event::Timeout(rank) => {
                self.budget.timeouts -= 1;
                self.now += Duration::from_secs(100);
                self.act(rank, Agreement::on_tick);
            }
            Event::Death(rank, lost) => {
                self.budget.deaths -= 1;
                self.is_alive[rank] = false;
                self.wires.retain(|(from, to), _| *to != rank && (*from != rank || lost >> to & 1 == 0));
            }
        }
    }

    fn live(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.size()).filter(|rank| self.is_alive[*rank])
    }

    /// Nothing is on its way, and all deaths are known: without a timeout, nothing more happens.
    fn is_end(&self) -> bool {
        let mut dead = (0..self.size()).filter(|rank| !self.is_alive[*rank]);
        let is_known = dead.all(|dead| self.live().all(|rank| self.suspects.contains(&(rank, dead))));
        is_known && self.wires.is_empty()
    }

    /// If no rank was suspected that was alive.
    fn check_end(&self) {
        let live = Ranks::of(self.size(), self.live());
        for rank in live.iter().filter(|_| self.quorum.allows(&live, &live.others())) {
            let outcome = self.ranks[rank].outcome();
            let is_over = matches!(outcome, Some(Outcome::Decided(_) | Outcome::Excluded(_)));
            assert!(is_over, "rank {rank} waits: {:?}", self.ranks[rank]);
        }
    }
}

/// Returns the number of states, and in how many of them no more can happen.
fn visit_all(quorum: Quorum, budget: Budget) -> (usize, usize) {
    let (mut seen, mut ends) = (HashSet::new(), 0);
    let mut left = vec![State::new(3, quorum, budget)];
    while let Some(state) = left.pop() {
        let mut hasher = DefaultHasher::new();
        state.hash(&mut hasher);
        if !seen.insert(hasher.finish()) {
            continue;
        }
        let is_settled = state.budget.suspicions == budget.suspicions && state.now == Duration::ZERO;
        if is_settled && state.is_end() {
            state.check_end();
            ends += 1;
        }
        for event in state.events() {
            let mut next = state.clone();
            next.happen(event);
            left.push(next);
        }
    }
    println!("{quorum:?}, {budget:?}: {} states, {ends} ends", seen.len());
    (seen.len(), ends)
}

#[test]
fn three_ranks_agree_in_every_order_of_messages_and_one_death_without_any_timeout() {
    for quorum in [Quorum::Majority, Quorum::Living, Quorum::AllReachable] {
        let (states, ends) = visit_all(quorum, Budget { deaths: 1, suspicions: 0, timeouts: 0 });
        assert!(states > 500 && ends > 10);
    }
}

#[test]
fn three_ranks_never_decide_differently_whatever_they_suspect() {
    let budget = Budget { deaths: 0, suspicions: 2, timeouts: 0 };
    assert!(visit_all(Quorum::Majority, budget).0 > 1_000);
}

#[test]
fn three_ranks_never_decide_differently_if_one_of_them_times_out() {
    let budget = Budget { deaths: 0, suspicions: 0, timeouts: 1 };
    assert!(visit_all(Quorum::Majority, budget).0 > 500);
}

/// One of them may be suspected while it is alive, decide by itself, and die.
#[test]
fn of_three_ranks_that_see_deaths_no_two_that_are_alive_decide_differently() {
    let budget = Budget { deaths: 1, suspicions: 1, timeouts: 0 };
    assert!(visit_all(Quorum::Living, budget).0 > 1_000);
}

/// All schedules of more ranks are too many.
#[test]
fn six_ranks_agree_in_many_orders_of_messages_and_deaths_without_any_timeout() {
    for seed in 0..4_000 {
        let mut random = Random(seed);
        let quorum = [Quorum::Majority, Quorum::Living, Quorum::AllReachable][random.pick(3)];
        let size = 4 + random.pick(3);
        let deaths = random.pick(size);
        let mut state = State::new(size, quorum, Budget { deaths, suspicions: 0, timeouts: 0 });
        // A rank dies after so many events, so that not all of them die before anything arrives.
        let pace = 1 + random.pick(20 * size);
        let run = std::panic::catch_unwind(move || {
            while !state.is_end() {
                let (deaths, others): (Vec<Event>, Vec<Event>) =
                    state.events().into_iter().partition(|event| matches!(event, Event::Death(..)));
                let dies = !deaths.is_empty() && (others.is_empty() || random.pick(pace) == 0);
                let events = if dies { deaths } else { others };
                state.happen(events[random.pick(events.len())]);
            }
            state.check_end();
        });
        assert!(run.is_ok(), "seed {seed}");
    }
}
