//! Reconfigurations by hand, and under random schedules: processes die, lose connections and get them back at any time. No
//! process may keep its group while another one commits.
//!
//! `TENFOLD_RESHAPE_SEED=17` runs one seed, `TENFOLD_RESHAPE_SEEDS=200000` runs many.

use std::collections::{BTreeMap, VecDeque};

use super::super::random::Random;
use super::*;

const SEEDS: u64 = 4_000;
const MS: Duration = Duration::from_millis(1);
const ID: u64 = 5;

fn list(size: usize) -> Vec<FabricId> {
    (0..size as u128).map(|process| FabricId(1 << 100 | process)).collect()
}

fn start(rank: usize, size: usize, deadline: Duration) -> Reshape {
    let list = list(size);
    Reshape::new(ID, &list, list[rank], 100 + rank as u64, 20 * MS, deadline).expect("the list is right")
}

/// Processes with everything on its way between them.
struct World {
    now: Duration,
    random: Random,
    all: Vec<Option<Reshape>>,
    wires: BTreeMap<(usize, usize), VecDeque<Vec<u8>>>,
    links: BTreeMap<(usize, usize), bool>,
    outcomes: Vec<Option<Reshaped>>,
}

impl World {
    fn new(seed: u64, size: usize, deadline: impl Fn(&mut Random) -> Duration) -> World {
        let mut random = Random(seed);
        let all = (0..size).map(|rank| Some(start(rank, size, deadline(&mut random)))).collect();
        let links = (0..size).flat_map(|high| (0..high).map(move |low| ((low, high), false))).collect();
        let outcomes = vec![None; size];
        let mut world = World { now: Duration::ZERO, random, all, wires: BTreeMap::new(), links, outcomes };
        (0..size).for_each(|rank| world.after(rank));
        world
    }

    fn after(&mut self, rank: usize) {
        let size = self.all.len();
        let Some(reshape) = &mut self.all[rank] else { return };
        for (to, say) in reshape.take_sends() {
            let mut bytes = Vec::new();
            say.encode(size, &mut bytes);
            let others: Vec<usize> = match to {
                To::Rank(other) => vec![other],
                To::All => (0..size).filter(|other| *other != rank).collect(),
            };
            for other in others {
                if self.links[&(rank.min(other), rank.max(other))] {
                    self.wires.entry((rank, other)).or_default().push_back(bytes.clone());
                }
            }
        }
        let Some(outcome) = reshape.outcome() else { return };
        if self.outcomes[rank].as_ref() != Some(outcome) {
            assert_eq!(self.outcomes[rank], None, "a call returns once");
            self.outcomes[rank] = Some(outcome.clone());
            let is = |outcome: fn(&Reshaped) -> bool| self.outcomes.iter().flatten().any(outcome);
            let both = is(|it| *it == Reshaped::Committed) && is(|it| matches!(it, Reshaped::Aborted(_)));
            assert!(!both, "some processes keep their groups and others do not: {:?}", self.outcomes);
        }
    }

    fn connect(&mut self, low: usize, high: usize) {
        if low == high || self.links[&(low, high)] || self.all[low].is_none() || self.all[high].is_none() {
            return;
        }
        self.links.insert((low, high), true);
        for (rank, other) in [(low, high), (high, low)] {
            self.wires.remove(&(rank, other));
        }
        for (rank, other) in [(low, high), (high, low)] {
            self.all[rank].as_mut().expect("it lives").on_connected(other, self.now);
            self.after(rank);
        }
    }

    /// One end notices later, perhaps.
    fn lose(&mut self, low: usize, high: usize) {
        if low == high || !self.links[&(low, high)] {
            return;
        }
        self.links.insert((low, high), false);
        for (rank, other) in [(low, high), (high, low)] {
            self.wires.remove(&(rank, other));
            if let Some(reshape) = &mut self.all[rank] {
                reshape.on_lost(other, self.now);
                self.after(rank);
            }
        }
    }

    fn die(&mut self, rank: usize) {
        self.all[rank] = None;
        for other in 0..self.all.len() {
            self.lose(rank.min(other), rank.max(other));
        }
    }

    fn deliver(&mut self) {
        let full = self.wires.iter().filter(|(_, wire)| !wire.is_empty()).map(|(pair, _)| *pair);
        let full: Vec<(usize, usize)> = full.collect();
        if full.is_empty() {
            return;
        }
        let (from, to) = full[self.random.pick(full.len())];
        let bytes = self.wires.get_mut(&(from, to)).and_then(VecDeque::pop_front).expect("it is not empty");
        let say = Say::decode(&bytes, self.all.len()).expect("a process sent it");
        if let Some(reshape) = &mut self.all[to] {
            reshape.on_say(from, say, self.now).expect("it is right");
            self.after(to);
        }
    }

    fn tick(&mut self) {
        for rank in 0..self.all.len() {
            if let Some(reshape) = &mut self.all[rank]
                && reshape.wake().is_some_and(|at| at <= self.now)
            {
                reshape.on_tick(self.now);
                assert!(reshape.wake().is_none_or(|at| at > self.now), "what is due was done");
                self.after(rank);
            }
        }
    }

    fn pairs(&self) -> Vec<(usize, usize)> {
        self.links.keys().copied().collect()
    }

    /// All are connected, and nothing goes wrong.
    fn finish(&mut self) {
        for (low, high) in self.pairs() {
            self.connect(low, high);
        }
        for _ in 0..20_000 {
            let is_waiting = |rank: usize| self.all[rank].is_some() && self.outcomes[rank].is_none();
            if !(0..self.all.len()).any(is_waiting) {
                return;
            }
            self.now += 2 * MS;
            self.tick();
            for _ in 0..self.wires.values().map(VecDeque::len).sum() {
                self.deliver();
            }
        }
        panic!("they wait without end: {:?}", self.outcomes);
    }
}

#[test]
fn no_process_keeps_its_group_while_another_one_commits() {
    let number = |name| std::env::var(name).ok().map(|text| text.parse::<u64>().expect(name));
    let one = number("TENFOLD_RESHAPE_SEED");
    let seeds = one.map_or(0..number("TENFOLD_RESHAPE_SEEDS").unwrap_or(SEEDS), |seed| seed..seed + 1);
    let mut counts = BTreeMap::new();
    for seed in seeds.clone() {
        let size = 1 + Random(seed).pick(6);
        let run = std::panic::catch_unwind(|| {
            let mut world = World::new(seed, size, |random| MS * (2000 + random.pick(400) as u32));
            let trouble = [0, 2, 8][world.random.pick(3)];
            // In some schedules most processes die together while the votes are on their way.
            let mut dies_together = trouble > 0 && world.random.percent(30);
            for _ in 0..world.random.pick(50 * size * size) {
                let votes = world.all.iter().flatten().filter(|it| it.vote == Some(YES)).count();
                if dies_together && 2 * votes > size && world.random.percent(20) {
                    dies_together = false;
                    for rank in 0..size {
                        if world.random.percent(70) {
                            world.die(rank);
                        }
                    }
                }
                world.now += Duration::from_micros(world.random.next() % 5_000);
                let (one, other) = (world.random.pick(size), world.random.pick(size));
                match world.random.pick(100) {
                    kind if kind < trouble && world.random.percent(25) => world.die(one),
                    kind if kind < trouble => world.lose(one.min(other), one.max(other)),
                    kind if kind < 30 => world.connect(one.min(other), one.max(other)),
                    kind if kind < 40 => world.tick(),
                    _ => world.deliver(),
                }
            }
            let had_none = world.outcomes.iter().all(Option::is_none);
            let is_early = world.now < 200 * MS;
            world.finish();
            let live = (0..size).filter(|rank| world.all[*rank].is_some());
            if Quorum::Majority.allows(&Ranks::of(size, live), &Ranks::none(size)) && had_none && is_early {
                let in_doubt = |it: &Reshaped| matches!(it, Reshaped::InDoubt(_));
                assert!(!world.outcomes.iter().flatten().any(in_doubt), "{:?}", world.outcomes);
            }
            if trouble == 0 && is_early {
                assert!(world.outcomes.iter().all(|it| *it == Some(Reshaped::Committed)), "without a fault");
            }
            world.outcomes
        });
        let Ok(outcomes) = run else { panic!("replay with TENFOLD_RESHAPE_SEED={seed}") };
        for outcome in outcomes.into_iter().flatten() {
            let what = match outcome {
                Reshaped::Committed => "committed",
                Reshaped::Aborted(cause) => {
                    assert!(cause.fault().hint.is_some());
                    match cause {
                        Cause::NotReady(_) => "not ready",
                        Cause::Lost(_) => "lost",
                        _ => "refused",
                    }
                }
                Reshaped::InDoubt(_) => "in doubt",
            };
            *counts.entry(what).or_insert(0) += 1;
        }
    }
    println!("{counts:?}");
    for what in ["committed", "in doubt", "lost", "not ready", "refused"] {
        assert!(
            seeds.end < SEEDS || one.is_some() || counts.get(what).is_some_and(|&count| count > 20),
            "{what}: {counts:?}"
        );
    }
}

/// Connects all and delivers until every process has voted, with the votes still on their way.
fn voted(size: usize) -> World {
    let mut world = World::new(1, size, |_| 1_000 * MS);
    for (low, high) in world.pairs() {
        world.connect(low, high);
    }
    while world.all.iter().flatten().any(|reshape| reshape.vote.is_none()) {
        world.deliver();
    }
    world
}

#[test]
fn a_process_that_dies_after_its_vote_leaves_no_other_in_doubt() {
    for victim in 0..3 {
        let mut world = voted(3);
        world.die(victim);
        world.finish();
        let others: Vec<&Reshaped> = world.outcomes.iter().flatten().collect();
        assert_eq!(others.len(), 2);
        assert!(others[0] == others[1] && !matches!(others[0], Reshaped::InDoubt(_)), "{others:?}");
    }
}

#[test]
fn without_a_majority_a_process_that_voted_is_in_doubt_and_one_that_did_not_keeps_its_group() {
    let mut world = voted(3);
    world.die(0);
    world.die(1);
    world.finish();
    assert!(matches!(world.outcomes[2], Some(Reshaped::InDoubt(_))), "{:?}", world.outcomes);

    let mut world = World::new(1, 3, |_| 1_000 * MS);
    world.die(1);
    world.finish();
    let cause = Cause::NotReady(vec![1]);
    assert_eq!(world.outcomes[2], Some(Reshaped::Aborted(cause.clone())));
    assert_eq!(
        cause.fault().message,
        "not reconfigured: no connection with rank 1; each process keeps its group"
    );
}

#[test]
fn another_list_under_the_same_id_is_named() {
    let mut reshape = start(0, 3, 1_000 * MS);
    reshape.on_connected(1, MS);
    let sends = reshape.take_sends();
    let [(To::Rank(1), Say::Hello { id: ID, list, room: 100 })] = sends[..] else { panic!("{sends:?}") };
    let say = Say::Hello { id: ID, list: list ^ 1, room: 0 };
    assert_eq!(reshape.on_say(1, say, MS), Err(Refused::List { from: 1 }));
    let Some(Reshaped::Aborted(cause)) = reshape.outcome() else { panic!("it goes on") };
    assert!(cause.fault().message.contains("rank 1 has another list"), "{}", cause.fault());
}

#[test]
fn messages_of_another_attempt_and_impossible_ones_are_refused() {
    use super::super::message::{Ballot, Proposal};
    let mut reshape = start(1, 3, 1_000 * MS);
    let letter = |group, message| Say::Letter(Letter { instance: Instance { group, sequence: 0 }, message });
    let prepare = Message::Prepare { ballot: Ballot::FIRST };
    assert_eq!(reshape.on_say(0, letter(4, prepare.clone()), MS), Err(Refused::Group { group: 4 }));
    assert_eq!(
        reshape.on_say(0, Say::Hello { id: 4, list: 0, room: 0 }, MS),
        Err(Refused::Group { group: 4 })
    );
    let commit = Message::Decided { proposal: Proposal { members: Ranks::of(3, 0..3), value: YES } };
    assert_eq!(
        reshape.on_say(0, letter(ID, commit), MS),
        Err(Refused::Impossible { from: 0 }),
        "it has not voted"
    );
    assert_eq!(reshape.on_say(3, letter(ID, prepare), MS), Err(Refused::Rank { rank: 3, size: 3 }));
    assert_eq!(reshape.outcome(), None);
    assert_eq!(Say::decode(&[HELLO; 16], 3), Err(Refused::Length { len: 16 }));
    assert!(Say::decode(&[], 3).is_err());
}

#[test]
fn lists_and_ids_are_checked() {
    let error =
        |list: &[FabricId], me| Reshape::new(ID, list, me, 0, MS, MS).expect_err("it is wrong").message;
    let three = list(3);
    assert_eq!(error(&three, FabricId(9)), "the list of handles does not contain this process");
    assert_eq!(error(&[three[0], three[1], three[0]], three[1]), "handle 2 is in the list twice");
    assert_eq!(error(&list(SIZE_MAX + 1), three[0]), "4097 handles are too many: the limit is 4096");
    let mut used = UsedIds::default();
    used.take(7).expect("it is new");
    assert_eq!(used.take(7).expect_err("it was used").message, "the id 7 was already used");
    let alone = start(0, 1, MS);
    assert_eq!(alone.outcome(), Some(&Reshaped::Committed), "a group of one needs no messages");
}
