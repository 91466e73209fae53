//! Ranks of several hosts in virtual time: what they send, and which of them they give up.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use proptest::prelude::*;

use super::*;

const LIMIT: Duration = Duration::from_millis(1600);
const TICK: Duration = Duration::from_millis(100);
/// The world moves in these steps.
const STEP: Duration = Duration::from_millis(5);

/// How long after its last sign of life a rank may be given up: the limit, a tick until its pulse is missed, a tick until
/// the next look, and what a message takes.
const PROMISE: Duration = Duration::from_millis(1600 + 100 + 100 + 50);

/// What two hosts send each other in 100 ticks, at most: a question and an answer with each tick, or two of each if both ask at
/// the same moment.
const MOST: usize = 412;

#[derive(Clone, Debug)]
enum Said {
    Ask(Vec<Seen>),
    Beat(Vec<Seen>),
    Hears(bool, Vec<Mark>),
    Misses(Vec<Seen>),
}

#[derive(Debug)]
struct Rank {
    mark: Mark,
    host: usize,
    beats: Beats,
    pulse: u64,
    next_tick: Instant,
    runs: bool,
    /// It was not running at its last tick.
    was_away: bool,
    exists: bool,
    inbox: VecDeque<(usize, Said)>,
    /// Ranks of this host that have all news.
    informed: BTreeSet<usize>,
    /// The ranks that it gave up, and when.
    given_up: BTreeMap<usize, Instant>,
    mentioned: BTreeSet<usize>,
}

/// What was sent since the count began.
#[derive(Clone, Debug, Default)]
struct Count {
    /// By pair of hosts, the lower one first.
    between_hosts: BTreeMap<(usize, usize), usize>,
    within_hosts: usize,
}

struct World {
    now: Instant,
    ranks: Vec<Rank>,
    /// On their way: when they arrive, from which rank to which.
    sent: VecDeque<(Instant, usize, usize, Said)>,
    latency: Duration,
    /// Pairs of ranks without a stream.
    strangers: BTreeSet<(usize, usize)>,
    /// What the first host says to the second is held back.
    cuts: BTreeSet<(usize, usize)>,
    count: Count,
    random: u64,
}

impl World {
    fn new(hosts: &[usize], seed: u64) -> World {
        #[expect(clippy::disallowed_methods, reason = "a test needs some time to begin with")]
        let now = Instant::now() + Duration::from_secs(3600);
        let mut world = World {
            now,
            ranks: Vec::new(),
            sent: VecDeque::new(),
            latency: Duration::from_millis(5),
            strangers: BTreeSet::new(),
            cuts: BTreeSet::new(),
            count: Count::default(),
            random: seed,
        };
        for (host, ranks) in hosts.iter().enumerate() {
            (0..*ranks).for_each(|_| _ = world.join(host));
        }
        world
    }

    fn draw(&mut self, below: usize) -> usize {
        // A linear congruential generator, with the constants of Knuth's MMIX.
        self.random = self.random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.random >> 33) as usize % below
    }

    /// A rank with the lowest mark joins: the one that the others have to make way for.
    fn join(&mut self, host: usize) -> usize {
        let mark = Mark(1000 - self.ranks.len() as u64);
        let phase = self.draw(20) as u32;
        self.ranks.push(Rank {
            mark,
            host,
            beats: Beats::new(mark, TICK, LIMIT),
            pulse: 0,
            next_tick: self.now + STEP * phase,
            runs: true,
            was_away: false,
            exists: true,
            inbox: VecDeque::new(),
            informed: BTreeSet::new(),
            given_up: BTreeMap::new(),
            mentioned: BTreeSet::new(),
        });
        self.ranks.len() - 1
    }

    fn knows(&self, one: usize, other: usize) -> bool {
        one != other && !self.strangers.contains(&(one.min(other), one.max(other)))
    }

    fn is_near(&self, one: usize, other: usize) -> bool {
        self.knows(one, other) && self.ranks[one].host == self.ranks[other].host
    }

    /// Ranks on other hosts that `rank` has a stream to.
    fn far_of(&self, rank: usize) -> Vec<usize> {
        let is_far = |other: &usize| {
            let them = &self.ranks[*other];
            self.knows(rank, *other) && them.host != self.ranks[rank].host && them.exists
        };
        let is_given_up = |other: &usize| self.ranks[rank].given_up.contains_key(other);
        (0..self.ranks.len()).filter(is_far).filter(|other| !is_given_up(other)).collect()
    }

    fn index_of(&self, mark: Mark) -> usize {
        (1000 - mark.0) as usize
    }

    fn send(&mut self, from: usize, to: usize, said: Said) {
        let (here, there) = (self.ranks[from].host, self.ranks[to].host);
        if here == there {
            self.count.within_hosts += 1;
        } else {
            *self.count.between_hosts.entry((here.min(there), here.max(there))).or_default() += 1;
        }
        let latency = if here == there { Duration::ZERO } else { self.latency };
        self.sent.push_back((self.now + latency, from, to, said));
    }

    /// `rank` looks at the pulses of its host.
    fn see(&mut self, rank: usize) {
        for other in 0..self.ranks.len() {
            if self.is_near(rank, other) && self.ranks[other].exists {
                let (mark, pulse, now) = (self.ranks[other].mark, self.ranks[other].pulse, self.now);
                self.ranks[rank].beats.see(mark, pulse, now);
            }
        }
    }

    fn company(&mut self, rank: usize) -> Vec<Seen> {
        self.see(rank);
        self.ranks[rank].beats.company(self.now)
    }

    fn hear(&mut self, rank: usize, from: usize, said: Said) {
        let (mark, now) = (self.ranks[from].mark, self.now);
        match said {
            Said::Ask(company) => {
                self.ranks[rank].beats.meet(mark, now);
                self.ranks[rank].beats.hear_company(mark, &company, now);
                let answer = Said::Beat(self.company(rank));
                self.send(rank, from, answer);
            }
            Said::Beat(company) => {
                self.ranks[rank].beats.hear(mark, now);
                self.ranks[rank].beats.hear_company(mark, &company, now);
            }
            Said::Hears(afresh, marks) => {
                self.see(rank);
                self.ranks[rank].beats.hear_hears(mark, afresh, marks);
            }
            Said::Misses(misses) => self.ranks[rank].beats.hear_misses(mark, &misses, now),
        }
    }

    fn tick(&mut self, rank: usize) {
        let now = self.now;
        self.ranks[rank].next_tick = now + TICK;
        self.ranks[rank].pulse += 1;
        let away = std::mem::take(&mut self.ranks[rank].was_away);
        self.see(rank);
        let far: Vec<Mark> = self.far_of(rank).into_iter().map(|other| self.ranks[other].mark).collect();
        let Turn { looks, ask, hears, misses } = self.ranks[rank].beats.turn(&far, now, away);
        for (mark, look) in looks {
            let peer = self.index_of(mark);
            if look.warn || look.probe {
                self.ranks[rank].mentioned.insert(peer);
            }
            if look.over {
                self.ranks[rank].given_up.insert(peer, now);
            }
        }
        for (mark, _) in ask {
            let company = self.company(rank);
            self.send(rank, self.index_of(mark), Said::Ask(company));
        }
        for other in 0..self.ranks.len() {
            if !self.is_near(rank, other) || !self.ranks[other].exists {
                continue;
            }
            if self.ranks[rank].informed.insert(other) {
                let told = self.ranks[rank].beats.told();
                self.send(rank, other, Said::Hears(true, told));
                continue;
            }
            if !hears.is_empty() {
                self.send(rank, other, Said::Hears(false, hears.clone()));
            }
            if !misses.is_empty() {
                self.send(rank, other, Said::Misses(misses.clone()));
            }
        }
    }

    fn step(&mut self) {
        self.now += STEP;
        let sent = std::mem::take(&mut self.sent);
        for (at, from, to, said) in sent {
            let is_cut = self.cuts.contains(&(self.ranks[from].host, self.ranks[to].host));
            if at > self.now || is_cut && self.ranks[from].exists {
                self.sent.push_back((at, from, to, said)); // TCP sends it again until it is acknowledged
            } else if self.ranks[to].exists && !is_cut {
                self.ranks[to].inbox.push_back((from, said));
            }
        }
        for rank in 0..self.ranks.len() {
            if !self.ranks[rank].exists || !self.ranks[rank].runs {
                continue;
            }
            while let Some((from, said)) = self.ranks[rank].inbox.pop_front() {
                self.hear(rank, from, said);
            }
            if self.now >= self.ranks[rank].next_tick {
                self.tick(rank);
            }
        }
    }

    fn run(&mut self, time: Duration) {
        let until = self.now + time;
        while self.now < until {
            self.step();
        }
    }

    fn freeze(&mut self, rank: usize) {
        self.ranks[rank].runs = false;
    }

    fn thaw(&mut self, rank: usize) {
        let one = &mut self.ranks[rank];
        one.was_away = self.now.saturating_duration_since(one.next_tick) > 2 * TICK;
        one.runs = true;
    }

    /// It ends, and all that have a stream to it see that.
    fn end(&mut self, rank: usize) {
        self.ranks[rank].exists = false;
        let mark = self.ranks[rank].mark;
        for other in 0..self.ranks.len() {
            if self.is_near(rank, other) {
                self.ranks[other].beats.lose(mark);
            }
        }
    }

    fn cut(&mut self, one: usize, other: usize) {
        self.cuts.extend([(one, other), (other, one)]);
    }

    /// Pairs of a rank and one that it gave up.
    fn given_up(&self) -> BTreeSet<(usize, usize)> {
        let of =
            |(rank, one): (usize, &Rank)| one.given_up.keys().map(|peer| (rank, *peer)).collect::<Vec<_>>();
        self.ranks.iter().enumerate().flat_map(of).collect()
    }

    /// Every rank on another host that runs has given up `peer`, in time, and no other rank; nothing else was given up.
    fn check_given_up(&self, peers: &[usize], since: Instant) {
        let mut expected = BTreeSet::new();
        for &peer in peers {
            let watchers = (0..self.ranks.len()).filter(|rank| {
                let one = &self.ranks[*rank];
                one.runs && one.exists && self.knows(*rank, peer) && one.host != self.ranks[peer].host
            });
            expected.extend(watchers.map(|rank| (rank, peer)));
        }
        assert_eq!(self.given_up(), expected);
        for (rank, peer) in expected {
            let took = self.ranks[rank].given_up[&peer] - since;
            assert!(took <= PROMISE, "rank {rank} took {took:?} for {peer}");
            assert!(took >= LIMIT - 2 * TICK, "rank {rank} gave up {peer} after {took:?}");
        }
    }

    fn no_rank_was_in_doubt(&self) {
        for (rank, one) in self.ranks.iter().enumerate() {
            assert!(one.mentioned.is_empty(), "rank {rank} doubted {:?}", one.mentioned);
        }
    }
}

/// A world past its beginning.
fn settled(hosts: &[usize], seed: u64) -> World {
    let mut world = World::new(hosts, seed);
    world.run(10 * TICK);
    world.no_rank_was_in_doubt();
    world.count = Count::default();
    world
}

/// The rank of `host` that asks for all its ranks: the one with the lowest mark.
fn speaker(world: &World, host: usize) -> usize {
    (0..world.ranks.len()).rev().find(|rank| world.ranks[*rank].host == host).unwrap()
}

// ── what it costs ──────────────────────────────────────────────────────────────────────────────────────────

#[test]
fn what_two_hosts_send_each_other_does_not_depend_on_how_many_ranks_they_have() {
    for hosts in [2, 4, 8] {
        for ranks in [1, 2, 4, 8] {
            for seed in 0..5 {
                let mut world = settled(&vec![ranks; hosts], seed);
                world.run(100 * TICK);
                assert_eq!(world.count.between_hosts.len(), hosts * (hosts - 1) / 2);
                for (pair, count) in &world.count.between_hosts {
                    assert!(
                        (198..=MOST).contains(count),
                        "{hosts} × {ranks}, {pair:?}: {count} in 100 ticks"
                    );
                }
                assert_eq!(world.count.within_hosts, 0, "{hosts} × {ranks}");
                world.no_rank_was_in_doubt();
            }
        }
    }
}

#[test]
fn a_rank_without_others_on_its_host_asks_for_itself_and_once_for_both() {
    let mut world = settled(&[1, 1, 1], 1);
    world.run(100 * TICK);
    assert!(
        world.count.between_hosts.values().all(|count| (198..=MOST).contains(count)),
        "{:?}",
        world.count
    );
}

/// Ranks that have no stream to the one that listens must hear for themselves.
#[test]
fn a_rank_that_alone_knows_some_peer_asks_it_itself() {
    let mut world = World::new(&[3, 2], 3);
    // Rank 0 talks to rank 3 only, the others of its host to rank 4 only, and it shares no memory with them.
    world.strangers.extend([(0, 4), (1, 3), (2, 3), (0, 1), (0, 2), (3, 4)]);
    world.run(10 * TICK);
    let since = world.now;
    world.freeze(3);
    world.run(2 * LIMIT);
    world.check_given_up(&[3], since);
}

// ── one fault ──────────────────────────────────────────────────────────────────────────────────────────────

#[test]
fn a_frozen_rank_is_given_up_in_time_and_no_other_rank_is() {
    for seed in 0..20 {
        for which in 0..9 {
            let mut world = settled(&[3, 3, 3], seed);
            let since = world.now;
            world.freeze(which);
            world.run(2 * LIMIT);
            world.check_given_up(&[which], since);
            let doubted: BTreeSet<_> = world.ranks.iter().flat_map(|rank| rank.mentioned.clone()).collect();
            assert_eq!(doubted, BTreeSet::from([which]), "no other rank is even asked on a new connection");
        }
    }
}

#[test]
fn ranks_of_two_hosts_that_are_cut_off_give_up_each_other_and_no_rank_of_a_third() {
    for seed in 0..20 {
        let mut world = settled(&[2, 3, 2], seed);
        let since = world.now;
        world.cut(0, 1);
        world.run(2 * LIMIT);
        let (first, second) = ([0, 1], [2, 3, 4]);
        let pairs =
            first.iter().flat_map(|one| second.iter().flat_map(|other| [(*one, *other), (*other, *one)]));
        assert_eq!(world.given_up(), pairs.collect());
        let times = world.ranks.iter().flat_map(|rank| rank.given_up.values());
        assert!(times.map(|at| *at - since).all(|took| took <= PROMISE), "seed {seed}");
    }
}

#[test]
fn a_host_that_hears_no_more_gives_up_the_one_that_it_does_not_hear() {
    for seed in 0..20 {
        let mut world = settled(&[2, 2, 2], seed);
        let since = world.now;
        world.cuts.insert((0, 1));
        world.run(2 * LIMIT);
        for deaf in [2, 3] {
            for lost in [0, 1] {
                assert!(world.ranks[deaf].given_up[&lost] - since <= PROMISE, "seed {seed}");
            }
        }
        let elsewhere = [(0, 4), (0, 5), (1, 4), (2, 4), (4, 0), (4, 2), (5, 1)];
        assert!(elsewhere.iter().all(|pair| !world.given_up().contains(pair)));
    }
}

#[test]
fn a_cut_or_a_pause_shorter_than_the_limit_ends_no_rank() {
    for seed in 0..20 {
        let mut world = settled(&[3, 3], seed);
        world.cut(0, 1);
        world.run(LIMIT * 3 / 4);
        world.cuts.clear();
        world.run(LIMIT);
        for rank in 0..6 {
            world.freeze(rank);
            world.run(LIMIT * 3 / 4);
            world.thaw(rank);
            world.run(2 * TICK);
        }
        world.run(2 * LIMIT);
        assert_eq!(world.given_up(), BTreeSet::new(), "seed {seed}");
    }
}

// ── who listens changes ────────────────────────────────────────────────────────────────────────────────────

#[test]
fn a_speaker_that_leaves_is_replaced_and_no_rank_is_in_doubt() {
    for seed in 0..20 {
        let mut world = settled(&[3, 3, 2], seed);
        for host in [0, 1, 0] {
            let speaker = (0..world.ranks.len())
                .rev()
                .find(|rank| world.ranks[*rank].host == host && world.ranks[*rank].exists)
                .unwrap();
            world.end(speaker);
            world.run(3 * LIMIT);
        }
        world.no_rank_was_in_doubt();
        world.count = Count::default();
        world.run(100 * TICK);
        assert!(world.count.between_hosts.values().all(|count| *count <= MOST), "{:?}", world.count);
    }
}

#[test]
fn a_speaker_that_is_killed_hides_no_frozen_rank_of_its_host() {
    for seed in 0..20 {
        for pause in [0, 3, 8, 15] {
            let mut world = settled(&[3, 3], seed);
            let since = world.now;
            world.freeze(0);
            world.run(pause * TICK);
            world.end(speaker(&world, 0));
            world.run(2 * LIMIT);
            world.check_given_up(&[0], since);
        }
    }
}

/// The ranks of a host that have relied on it count from when it was last known to listen.
#[test]
fn a_speaker_that_freezes_together_with_a_rank_of_another_host_delays_little() {
    for seed in 0..20 {
        let mut world = settled(&[3, 3], seed);
        let since = world.now;
        let listener = speaker(&world, 1);
        world.freeze(0);
        world.run(TICK);
        world.freeze(listener);
        world.run(2 * LIMIT);
        for watcher in [3, 4] {
            let took = world.ranks[watcher].given_up[&0] - since;
            assert!(took <= PROMISE + 4 * TICK, "rank {watcher} took {took:?}");
        }
        let gone = BTreeSet::from([0, listener]);
        assert!(world.given_up().iter().all(|(_, peer)| gone.contains(peer)), "{:?}", world.given_up());
    }
}

#[test]
fn ranks_that_join_later_take_over_and_no_rank_is_in_doubt() {
    for seed in 0..20 {
        let mut world = settled(&[2, 2], seed);
        for host in [0, 1, 0, 1] {
            world.join(host);
            world.run(2 * LIMIT);
        }
        world.no_rank_was_in_doubt();
        world.count = Count::default();
        world.run(100 * TICK);
        assert!(world.count.between_hosts.values().all(|count| *count <= MOST), "{:?}", world.count);
        assert_eq!(world.count.within_hosts, 0);
        let since = world.now;
        world.freeze(1);
        world.run(2 * LIMIT);
        world.check_given_up(&[1], since);
    }
}

/// What it reads after it continues was sent long before.
#[test]
fn a_speaker_that_was_away_vouches_for_no_rank_that_ended_meanwhile() {
    for seed in 0..20 {
        let mut world = settled(&[3, 3], seed);
        let listener = speaker(&world, 1);
        world.run(TICK / 2);
        world.freeze(listener);
        let since = world.now;
        world.freeze(0);
        world.run(LIMIT / 2);
        world.thaw(listener);
        world.run(2 * LIMIT);
        for watcher in [3, 4] {
            let took = world.ranks[watcher].given_up[&0] - since;
            assert!(took <= PROMISE + 2 * TICK, "rank {watcher} took {took:?}");
        }
        assert!(world.given_up().iter().all(|(_, peer)| *peer == 0));
    }
}

// ── all of it ──────────────────────────────────────────────────────────────────────────────────────────────

/// What happens to one rank or pair of hosts, and for how many ticks.
#[derive(Clone, Debug)]
enum Event {
    Freeze(usize, u32),
    Kill(usize),
    Join(usize),
    Cut(usize, usize, u32),
    Wait(u32),
}

fn any_event() -> impl Strategy<Value = Event> {
    prop_oneof![
        (0..32_usize, 1..12_u32).prop_map(|(rank, ticks)| Event::Freeze(rank, ticks)),
        (0..32_usize).prop_map(Event::Kill),
        (0..3_usize).prop_map(Event::Join),
        (0..3_usize, 0..3_usize, 1..12_u32).prop_map(|(one, other, ticks)| Event::Cut(one, other, ticks)),
        (1..20_u32).prop_map(Event::Wait),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]
    /// Pauses are shorter than the limit, so no rank may be given up; then some freeze for good, and exactly those must be.
    #[test]
    fn whatever_happened_before_only_a_frozen_rank_is_given_up_and_each_one_is(
        hosts in prop::collection::vec(1..5_usize, 3),
        strangers in prop::collection::vec((0..16_usize, 0..16_usize), 0..12),
        latency in 0..8_u32,
        events in prop::collection::vec(any_event(), 0..12),
        victims in prop::collection::btree_set(0..32_usize, 1..3),
        seed: u64,
    ) {
        let mut world = World::new(&hosts, seed);
        world.strangers.extend(strangers.into_iter().map(|(one, other)| (one.min(other), one.max(other))));
        world.latency = STEP * latency;
        world.run(10 * TICK);
        for event in events {
            let count = world.ranks.len();
            match event {
                Event::Freeze(rank, ticks) => {
                    world.freeze(rank % count);
                    world.run(TICK * ticks);
                    world.thaw(rank % count);
                    world.run(2 * TICK); // two pauses in a row are one that is too long
                }
                Event::Kill(rank) => world.end(rank % count),
                Event::Join(host) => _ = world.join(host),
                Event::Cut(one, other, ticks) if one != other => {
                    world.cut(one, other);
                    world.run(TICK * ticks);
                    world.cuts.clear();
                    world.run(3 * TICK);
                }
                Event::Cut(..) => {}
                Event::Wait(ticks) => world.run(TICK * ticks),
            }
        }
        prop_assert_eq!(world.given_up(), BTreeSet::new());
        world.run(4 * TICK);
        let victims: BTreeSet<usize> =
            victims.into_iter().map(|rank| rank % world.ranks.len()).filter(|rank| world.ranks[*rank].exists).collect();
        let since = world.now;
        victims.iter().for_each(|victim| world.freeze(*victim));
        world.run(3 * LIMIT);
        let mut expected = BTreeSet::new();
        for &victim in &victims {
            for rank in 0..world.ranks.len() {
                let one = &world.ranks[rank];
                if one.exists && one.runs && one.host != world.ranks[victim].host && world.knows(rank, victim) {
                    expected.insert((rank, victim));
                }
            }
        }
        prop_assert_eq!(world.given_up(), expected.clone());
        for (rank, victim) in expected {
            let took = world.ranks[rank].given_up[&victim] - since;
            prop_assert!(took <= PROMISE + 4 * TICK, "rank {} took {:?} for {}", rank, took, victim);
        }
    }
}
