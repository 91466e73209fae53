//! Many ranks that agree, under random schedules.
//!
//! A seed makes a group with one of the quorums. For a while anything may happen: ranks call, late or never; messages wait,
//! arrive twice, or are lost with the connection that they are on; ranks die, between any two messages that they send; they
//! suspect ranks that are alive, and trust them again; the network is cut between two ranks or into two parts. Then there are
//! no more faults: dead ranks are suspected and live ones are not, except that two of them may never reach each other again.
//! Now all ranks that call must get a decision or learn that they were excluded, if there is a quorum; if there is none, their
//! calls must fail. The invariants are checked after every step.
//!
//! In half of the seeds ranks see deaths: they know that a rank is dead, and receive nothing that it sent before and that has
//! not arrived yet.
//!
//! With a quorum that is not safe under partitions, a seed either has a detector that suspects only dead ranks, and then all
//! decisions must be equal as well; or it has any detector, and then only what a rank can check by itself must hold.
//!
//! `TENFOLD_MEMBERSHIP_SEED=17` runs one seed and prints what happens; `TENFOLD_MEMBERSHIP_SEEDS=200000` runs many.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use super::agreement::{Outcome, Rule, Settings, To};
use super::ledger::{Heard, Ledger};
use super::message::{Letter, Message, Proposal};
use super::quorum::Quorum;
use super::random::Random;
use super::ranks::Ranks;

const SEEDS: u64 = 5_000;
const GROUP: u64 = 0x7e4f;
const MS: Duration = Duration::from_millis(1);
/// The length of the quiet part at most.
const QUIET: Duration = Duration::from_secs(90);
/// How long calls in the quiet part may take.
const TIMEOUT: Duration = Duration::from_secs(30);

#[test]
fn under_random_schedules_ranks_never_decide_differently_and_never_hang() {
    let number = |name| std::env::var(name).ok().map(|text| text.parse::<u64>().expect(name));
    if let Some(seed) = number("TENFOLD_MEMBERSHIP_SEED") {
        World::new(seed, true).run();
        return;
    }
    let seeds = number("TENFOLD_MEMBERSHIP_SEEDS").unwrap_or(SEEDS);
    const THREADS: u64 = 2;
    let counts = std::thread::scope(|scope| {
        let run = |worker| {
            move || {
                (worker..seeds)
                    .step_by(THREADS as usize)
                    .flat_map(|seed| World::new(seed, false).run())
                    .collect()
            }
        };
        let workers: Vec<_> = (0..THREADS).map(|worker| scope.spawn(run(worker))).collect();
        let mut counts = BTreeMap::new();
        for (what, count) in
            workers.into_iter().flat_map(|worker| -> Vec<(&str, u64)> { worker.join().unwrap() })
        {
            *counts.entry(what).or_insert(0) += count;
        }
        counts
    });
    println!("{counts:?}");
    // A schedule that never gets there proves nothing.
    for what in SIGHTS {
        assert!(seeds < SEEDS || counts.get(what).is_some_and(|&count| count > 20), "{what}: {counts:?}");
    }
}

/// Situations that must have occurred often.
const SIGHTS: [&str; 22] = [
    "called again",
    "cut apart",
    "decided",
    "decided and died",
    "decided differently",
    "decided by a minority that saw the others die",
    "died",
    "death seen",
    "early letter",
    "excluded",
    "failed",
    "half with rank 0",
    "late letter",
    "later agreement",
    "lost",
    "never called",
    "no quorum",
    "refused",
    "said twice",
    "said that it will not call",
    "suspected wrongly",
    "two cannot meet",
];

/// How far suspicions may be wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Detector {
    /// Suspects only dead ranks.
    Accurate,
    /// Suspects any rank.
    Any,
}

struct World {
    seed: u64,
    random: Random,
    trace: bool,
    now: Duration,
    is_quiet: bool,
    size: usize,
    quorum: Quorum,
    detector: Detector,
    sees_deaths: bool,
    ranks: Vec<Rank>,
    /// What is on its way, of each pair in order.
    wires: BTreeMap<(usize, usize), VecDeque<Vec<u8>>>,
    /// Pairs between which nothing arrives, the lower rank first.
    cuts: BTreeSet<(usize, usize)>,
    /// A pair that is cut without end.
    severed: Option<(usize, usize)>,
    decisions: BTreeMap<u32, Vec<Proposal>>,
    counts: BTreeMap<&'static str, u64>,
}

struct Rank {
    ledger: Ledger,
    is_alive: bool,
    calls: bool,
    is_waiting: bool,
    /// It was excluded.
    has_left: bool,
    /// It calls no more after so many agreements.
    agreements: u32,
    suspects: BTreeSet<usize>,
    /// What it contributed to each agreement.
    values: BTreeMap<u32, u64>,
}

/// A panic names its seed.
impl Drop for World {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!("replay with TENFOLD_MEMBERSHIP_SEED={}", self.seed);
        }
    }
}

macro_rules! log {
    ($world:expr, $($text:tt)*) => {
        if $world.trace {
            println!("{:8.1} ms  {}", $world.now.as_secs_f64() * 1e3, format!($($text)*));
        }
    };
}

impl World {
    fn new(seed: u64, trace: bool) -> World {
        let mut random = Random(seed);
        let size = [1 + random.pick(7), 2 + random.pick(4), 3, 9 + random.pick(8)][random.pick(4)];
        let quorum = match random.pick(8) {
            0..=2 => Quorum::Majority,
            3..=4 => Quorum::Living,
            5 => Quorum::AtLeast(1 + random.pick(size)),
            _ => Quorum::AllReachable,
        };
        let detector = match quorum.is_safe_under_partitions(size) || random.percent(25) {
            true => Detector::Any,
            false => Detector::Accurate,
        };
        let sees_deaths = random.percent(50);
        let settings =
            Settings { quorum, rule: Rule::Survivors, repeat: 20 * MS, patience: 1000 * MS, grace: 200 * MS };
        let ranks = (0..size).map(|me| Rank {
            ledger: Ledger::new(GROUP, me, size, settings.clone()),
            is_alive: true,
            calls: !random.percent(6),
            is_waiting: false,
            has_left: false,
            agreements: 3,
            suspects: BTreeSet::new(),
            values: BTreeMap::new(),
        });
        let ranks = ranks.collect();
        let world = World {
            seed,
            trace,
            now: Duration::ZERO,
            is_quiet: false,
            size,
            quorum,
            detector,
            sees_deaths,
            ranks,
            wires: BTreeMap::new(),
            cuts: BTreeSet::new(),
            severed: None,
            decisions: BTreeMap::new(),
            counts: BTreeMap::new(),
            random,
        };
        log!(world, "{size} ranks, {quorum:?}, {detector:?}");
        world
    }

    fn run(mut self) -> BTreeMap<&'static str, u64> {
        let pace = [1, 5, 40][self.random.pick(3)];
        let trouble = [0, 3, 10][self.random.pick(3)];
        let eagerness = [2, 20][self.random.pick(2)];
        for _ in 0..50 + self.random.pick(60 * self.size) {
            self.now += Duration::from_micros(self.random.next() % (1000 * pace));
            let rank = self.random.pick(self.size);
            match self.random.pick(100) as u64 {
                kind if kind < trouble => self.trouble(rank),
                kind if kind < trouble + eagerness => self.call(rank, None),
                kind if kind < trouble + eagerness + 10 => self.tick(rank),
                kind if kind < trouble + eagerness + 15 => self.notice_death(rank),
                _ => self.deliver_any(),
            }
        }
        self.become_quiet();
        let until = self.now + QUIET;
        let target = 1 + self.ranks.iter().map(|rank| rank.ledger.sequence()).max().expect("not empty");
        self.ranks.iter_mut().for_each(|rank| rank.agreements = target);
        let mut failed = BTreeSet::new();
        while self.now < until && self.pending().any(|rank| !failed.contains(&rank)) {
            self.now += 2 * MS;
            let have_all_called =
                self.pending().all(|rank| failed.contains(&rank) || self.ranks[rank].is_waiting);
            if have_all_called && self.wires.values().all(VecDeque::is_empty) {
                let wakes =
                    self.ranks.iter().filter(|rank| rank.is_alive).filter_map(|rank| rank.ledger.wake());
                self.now = self.now.max(wakes.min().unwrap_or(until));
            }
            for rank in 0..self.size {
                let was_waiting = self.ranks[rank].is_waiting;
                self.tick(rank);
                let is_failed = was_waiting && !self.ranks[rank].is_waiting && self.is_pending(rank);
                // Earlier calls had less time.
                if is_failed && self.now + QUIET >= until + TIMEOUT {
                    failed.insert(rank);
                }
                if !failed.contains(&rank) {
                    self.call(rank, Some(TIMEOUT));
                }
            }
            for _ in 0..self.wires.values().map(VecDeque::len).sum() {
                self.deliver_any();
            }
        }
        let stuck: Vec<usize> = self.pending().collect();
        if !stuck.is_empty() {
            assert!(!self.has_quorum(), "ranks {stuck:?} have no decision although there is a quorum");
            assert!(stuck.iter().all(|rank| failed.contains(rank)), "ranks {stuck:?} wait without end");
            for &rank in &stuck {
                let knowing = self.knowing_peer(rank);
                assert_eq!(
                    knowing, None,
                    "rank {rank} has no decision although it reaches a rank that has it"
                );
            }
            self.count("no quorum");
        }
        std::mem::take(&mut self.counts)
    }

    fn count(&mut self, what: &'static str) {
        *self.counts.entry(what).or_default() += 1;
    }

    /// The program of the rank wants something that it does not have.
    fn is_pending(&self, rank: usize) -> bool {
        let Rank { ledger, is_alive, calls, has_left, agreements, .. } = &self.ranks[rank];
        *is_alive && *calls && !has_left && ledger.sequence() < *agreements
    }

    fn pending(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.size).filter(|rank| self.is_pending(*rank))
    }

    /// Can those that wait for a decision expect one?
    fn has_quorum(&self) -> bool {
        if !self.is_safe() {
            return false; // each side may have left out the other
        }
        let mut live = Ranks::of(self.size, (0..self.size).filter(|rank| self.ranks[*rank].is_alive));
        let mut members = Ranks::of(self.size, self.pending());
        let least = self.pending().map(|rank| self.ranks[rank].ledger.sequence()).min().unwrap_or(0);
        for (_, decisions) in self.decisions.range(..least) {
            for rank in decisions[0].members.others().iter() {
                members.remove(rank);
                live.remove(rank); // it has left
            }
        }
        let has_decision = self.decisions.contains_key(&least);
        // At most one of two ranks that never reach each other again is a member, and a leader hears of the other ranks and one
        // of the two. So a decision needs a quorum without one of them, here the lower one, which may be rank 0.
        if let Some((one, _)) = self.severed {
            members.remove(one);
            live.remove(one);
        }
        let dead = self.seen_dead();
        self.quorum.is_met(&live, &live.others(), &dead)
            && (has_decision || self.quorum.allows(&members, &dead))
    }

    /// The ranks that are known to be dead once there are no more faults.
    fn seen_dead(&self) -> Ranks {
        let is_seen = |rank: &usize| self.sees_deaths && !self.ranks[*rank].is_alive;
        Ranks::of(self.size, (0..self.size).filter(is_seen))
    }

    /// A live rank that has the decision that this one waits for, which helps also without a quorum. In seed 11986 the only
    /// rank that another one reached had been left out, and kept to itself the decisions that it had heard of.
    fn knowing_peer(&self, rank: usize) -> Option<usize> {
        let sequence = self.ranks[rank].ledger.sequence();
        (0..self.size).find(|other| {
            let is_severed = self.severed == Some((rank.min(*other), rank.max(*other)));
            self.ranks[*other].is_alive && !is_severed && self.ranks[*other].ledger.knows(sequence).is_some()
        })
    }

    /// Must all decisions be equal?
    fn is_safe(&self) -> bool {
        self.detector == Detector::Accurate || self.quorum.is_safe_under_partitions(self.size)
    }

    fn call(&mut self, rank: usize, timeout: Option<Duration>) {
        if !self.is_pending(rank) || self.ranks[rank].is_waiting {
            return;
        }
        let value = self.random.next() | self.random.next();
        let timeout = timeout.unwrap_or_else(|| MS * (20 + self.random.pick(4000) as u32));
        let now = self.now;
        let Rank { ledger, values, is_waiting, .. } = &mut self.ranks[rank];
        let sequence = ledger.sequence();
        let is_first = !values.contains_key(&sequence);
        let value = *values.entry(sequence).or_insert(value);
        *is_waiting = true;
        ledger.call(value, now + timeout, now);
        log!(self, "{rank} calls #{sequence}");
        if !is_first {
            self.count("called again");
        }
        self.after(rank);
    }

    fn tick(&mut self, rank: usize) {
        let now = self.now;
        let Rank { ledger, is_alive, .. } = &mut self.ranks[rank];
        if *is_alive && ledger.wake().is_some_and(|at| at <= now) {
            ledger.on_tick(now);
            assert!(ledger.wake().is_none_or(|at| at > now), "what is due was done");
            self.after(rank);
        }
    }

    fn suspect(&mut self, rank: usize, other: usize) {
        if self.ranks[rank].is_alive && rank != other && self.ranks[rank].suspects.insert(other) {
            log!(self, "{rank} suspects {other}");
            self.ranks[rank].ledger.on_suspect(other, self.now);
            self.after(rank);
        }
    }

    fn trust(&mut self, rank: usize, other: usize) {
        if self.ranks[rank].is_alive && self.ranks[rank].suspects.remove(&other) {
            log!(self, "{rank} trusts {other}");
            self.ranks[rank].ledger.on_trust(other, self.now);
            self.after(rank);
        }
    }

    fn notice_death(&mut self, rank: usize) {
        let dead: Vec<usize> = (0..self.size).filter(|other| !self.ranks[*other].is_alive).collect();
        if !dead.is_empty() {
            let other = dead[self.random.pick(dead.len())];
            self.learn_death(rank, other);
        }
        let silent: Vec<usize> = (0..self.size).filter(|other| !self.ranks[*other].calls).collect();
        if !silent.is_empty() && self.ranks[rank].is_alive && self.random.percent(30) {
            let other = silent[self.random.pick(silent.len())];
            log!(self, "{rank} hears that {other} will not call");
            self.ranks[rank].ledger.on_left(other, self.now);
            self.count("said that it will not call");
            self.after(rank);
        }
    }

    fn learn_death(&mut self, rank: usize, other: usize) {
        if !self.sees_deaths {
            self.suspect(rank, other);
        } else if self.ranks[rank].is_alive {
            log!(self, "{rank} sees that {other} is dead");
            self.wires.remove(&(other, rank));
            self.ranks[rank].suspects.insert(other);
            self.ranks[rank].ledger.on_dead(other, self.now);
            self.count("death seen");
            self.after(rank);
        }
    }

    fn die(&mut self, rank: usize) {
        self.ranks[rank].is_alive = false;
        log!(self, "{rank} dies");
        for other in 0..self.size {
            self.wires.remove(&(other, rank));
            // What it sent last may not have left the machine.
            let sent = self.wires.get(&(rank, other)).map_or(0, VecDeque::len);
            let left = self.random.pick(sent + 1);
            self.wires.entry((rank, other)).or_default().truncate(left);
        }
    }

    fn trouble(&mut self, rank: usize) {
        let other = self.random.pick(self.size);
        let pair = (rank.min(other), rank.max(other));
        match self.random.pick(10) {
            0 if self.ranks[rank].is_alive => {
                self.die(rank);
                self.count("died");
                if self.random.percent(30) {
                    self.die(other);
                }
            }
            1..=3 if self.detector == Detector::Any => {
                self.suspect(rank, other);
                if self.ranks[other].is_alive {
                    self.count("suspected wrongly");
                }
            }
            4..=5 => {
                for other in self.ranks[rank].suspects.clone() {
                    if self.ranks[other].is_alive || self.detector == Detector::Any {
                        self.trust(rank, other);
                    }
                }
            }
            6 => drop(self.cuts.insert(pair)),
            7 => {
                let side: Vec<bool> = (0..self.size).map(|_| self.random.percent(50)).collect();
                log!(self, "the network is cut apart: {side:?}");
                let pairs = (0..side.len()).flat_map(|high| (0..high).map(move |low| (low, high)));
                for (low, high) in pairs {
                    if side[low] != side[high] {
                        self.cuts.insert((low, high));
                        if self.detector == Detector::Any && self.random.percent(70) {
                            self.suspect(low, high);
                            self.suspect(high, low);
                        }
                    }
                }
                self.count("cut apart");
            }
            8 => {
                log!(self, "the network is whole");
                let loses = self.random.percent(50);
                for (low, high) in std::mem::take(&mut self.cuts) {
                    if loses {
                        self.lose(low, high);
                    }
                }
            }
            9 => self.repeat_letter(),
            _ => {}
        }
    }

    /// The connection between two ranks is made again, without what was on the old one.
    fn lose(&mut self, low: usize, high: usize) {
        for pair in [(low, high), (high, low)] {
            if self.wires.remove(&pair).is_some_and(|wire| !wire.is_empty()) {
                self.count("lost");
            }
        }
    }

    fn repeat_letter(&mut self) {
        let wires: Vec<(usize, usize)> =
            self.wires.iter().filter(|(_, wire)| !wire.is_empty()).map(|(pair, _)| *pair).collect();
        if !wires.is_empty() {
            let pair = wires[self.random.pick(wires.len())];
            let wire = self.wires.get_mut(&pair).expect("it is not empty");
            let letter = wire[self.random.pick(wire.len())].clone();
            wire.push_back(letter);
            self.count("said twice");
        }
    }

    fn is_open(&self, one: usize, other: usize) -> bool {
        !self.cuts.contains(&(one.min(other), one.max(other)))
    }

    fn deliver_any(&mut self) {
        let is_ready = |((from, to), wire): &(&(usize, usize), &VecDeque<Vec<u8>>)| {
            !wire.is_empty() && self.is_open(*from, *to)
        };
        let ready: Vec<(usize, usize)> = self.wires.iter().filter(is_ready).map(|(pair, _)| *pair).collect();
        if ready.is_empty() {
            return;
        }
        let (from, to) = ready[self.random.pick(ready.len())];
        let bytes = self.wires.get_mut(&(from, to)).and_then(VecDeque::pop_front).expect("it is not empty");
        if !self.ranks[to].is_alive {
            return;
        }
        let letter = Letter::decode(&bytes, self.size).expect("a rank sent it");
        log!(self, "{from} → {to} #{} {}", letter.instance.sequence, letter.message);
        if matches!(letter.message, Message::Refuse { .. }) {
            self.count("refused");
        }
        match self.ranks[to].ledger.on_letter(from, letter, self.now) {
            Ok(Heard::Current) => {}
            Ok(Heard::Late) => self.count("late letter"),
            Ok(Heard::Early) => self.count("early letter"),
            Err(refused) => assert!(!self.is_safe(), "{to} refused what {from} sent: {refused}"),
        }
        self.after(to);
    }

    /// Takes what the rank wants to send and has decided, and checks it.
    fn after(&mut self, rank: usize) {
        self.collect(rank);
        let sequence = self.ranks[rank].ledger.sequence();
        if let Some(decision) = self.ranks[rank].ledger.decision().cloned() {
            self.check(rank, sequence, &decision);
        }
        if !self.ranks[rank].is_waiting {
            return;
        }
        let Some(outcome) = self.ranks[rank].ledger.outcome().cloned() else { return };
        log!(self, "{rank} returns from #{sequence} with {outcome:?}");
        self.ranks[rank].is_waiting = false;
        match outcome {
            Outcome::Decided(decision) => {
                assert!(decision.members.contains(rank), "only members continue");
                self.count("decided");
                if sequence > 0 {
                    self.count("later agreement");
                }
                if !self.is_quiet && self.random.percent(5) {
                    self.die(rank);
                    self.count("decided and died");
                    return;
                }
                let now = self.now;
                self.ranks[rank].ledger.advance(now);
                self.after(rank);
            }
            Outcome::Excluded(decision) => {
                assert!(!decision.members.contains(rank));
                self.ranks[rank].has_left = true;
                self.count("excluded");
            }
            Outcome::Failed(failure) => {
                assert!(!failure.fault().message.is_empty());
                self.count("failed");
            }
        }
    }

    fn collect(&mut self, rank: usize) {
        for (to, letter) in self.ranks[rank].ledger.take_sends() {
            let mut bytes = Vec::new();
            letter.encode(self.size, &mut bytes);
            let others: Vec<usize> = match to {
                To::Rank(other) => vec![other],
                To::All => (0..self.size).filter(|other| *other != rank).collect(),
            };
            for other in others {
                assert_ne!(other, rank, "a rank sends nothing to itself");
                if self.ranks[other].is_alive && self.severed != Some((rank.min(other), rank.max(other))) {
                    self.wires.entry((rank, other)).or_default().push_back(bytes.clone());
                }
            }
        }
    }

    /// What must hold of every decision that any rank has ever made.
    fn check(&mut self, rank: usize, sequence: u32, decision: &Proposal) {
        if self.quorum == Quorum::Living {
            for other in self.ranks.iter().filter(|other| other.is_alive) {
                let theirs = other.ledger.knows(sequence).unwrap_or(decision);
                assert_eq!(theirs, decision, "rank {rank} decided differently than a rank that is alive");
            }
        }
        let known = self.decisions.entry(sequence).or_default();
        if known.contains(decision) {
            return;
        }
        known.push(decision.clone());
        log!(self, "#{sequence} is decided: {decision:?}");
        if self.decisions[&sequence].len() > 1 {
            let is_possible = !self.is_safe() || self.quorum == Quorum::Living;
            assert!(is_possible, "rank {rank} decided differently: {:?}", self.decisions[&sequence]);
            self.count(if self.is_safe() {
                "decided differently than the dead"
            } else {
                "decided differently"
            });
        }
        let Proposal { members, value } = decision;
        // A rank that never calls may have said so, and does not object.
        let mut consenting = members.clone();
        (0..self.size).filter(|rank| !self.ranks[*rank].calls).for_each(|rank| consenting.insert(rank));
        let is_usual = self.quorum.allows(&consenting, &Ranks::none(self.size));
        let is_allowed = is_usual || self.sees_deaths && self.quorum.may_allow(members);
        assert!(is_allowed, "{members:?} may not continue");
        if !is_usual {
            self.count("decided by a minority that saw the others die");
        }
        let values = members.iter().map(|member| {
            let value = self.ranks[member].values.get(&sequence);
            *value.unwrap_or_else(|| panic!("rank {member} is a member and has not called"))
        });
        assert_eq!(*value, values.fold(u64::MAX, |all, value| all & value), "the AND of what members gave");
        if self.is_safe() && sequence > 0 && self.decisions[&(sequence - 1)].len() == 1 {
            let before = &self.decisions[&(sequence - 1)][0].members;
            assert!(members.iter().all(|member| before.contains(member)), "no rank comes back");
        }
        if 2 * members.len() == self.size && self.quorum == Quorum::Majority {
            self.count("half with rank 0");
        }
        let never = (0..self.size).any(|rank| !self.ranks[rank].calls && !members.contains(rank));
        if never {
            self.count("never called");
        }
    }

    fn become_quiet(&mut self) {
        log!(self, "from now on there are no faults");
        self.is_quiet = true;
        let live: Vec<usize> = (0..self.size).filter(|rank| self.ranks[*rank].is_alive).collect();
        for (low, high) in std::mem::take(&mut self.cuts) {
            if self.random.percent(30) {
                self.lose(low, high);
            }
        }
        if self.detector == Detector::Any && live.len() > 2 && self.random.percent(20) {
            let (one, other) = (live[self.random.pick(live.len())], live[self.random.pick(live.len())]);
            if one != other {
                self.severed = Some((one.min(other), one.max(other)));
                self.lose(one.min(other), one.max(other));
                self.count("two cannot meet");
            }
        }
        for rank in live {
            for other in 0..self.size {
                let is_severed = self.severed == Some((rank.min(other), rank.max(other)));
                match (self.ranks[other].is_alive, is_severed) {
                    (false, _) => self.learn_death(rank, other),
                    (true, true) => self.suspect(rank, other),
                    (true, false) => self.trust(rank, other),
                }
            }
        }
    }
}
