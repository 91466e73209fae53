//! Many members against one store, under random schedules.
//!
//! A seed makes a job of up to a dozen nodes whose clocks run at different speeds. For a while anything may
//! happen: nodes join, die, freeze and thaw, leave; ranks fail or are done; a node is slow between reading,
//! deciding and each of its writes; requests and answers get lost; a request is served much later, perhaps
//! when its node is dead or not the folder any more; orders are repeated. Then there are no more faults: a
//! round must start, or the job be over, and in the end all live nodes must know how it ended. The invariants
//! are checked at every write and every event.
//!
//! `TENFOLD_RENDEZVOUS_SEED=17` runs one seed and prints what happens; `TENFOLD_RENDEZVOUS_SEEDS=200000` runs
//! many.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::Rc;
use std::time::Duration;

use tenfold_dashboard::job::{Ending, Head, JobFailure, Phase, Seat, Stamp, page_of};

use super::inbox::Inbox;
use super::member::{Member, What, Wish};
use super::state::{Change, Place, State, View, head_text, parse_head};
use super::{Event, Order, Outcome, Settings, scenarios};

const SEEDS: u64 = 5_000;
/// The length of the quiet part, for each of its two halves; far more than all timeouts together.
const PATIENCE: Duration = Duration::from_secs(600);
/// After this long without faults every death has been noticed.
const CALM: Duration = Duration::from_secs(60);

#[test]
fn under_random_schedules_nodes_agree_on_every_round_and_never_get_stuck() {
    let number = |name| std::env::var(name).ok().map(|text| text.parse::<u64>().expect(name));
    if let Some(seed) = number("TENFOLD_RENDEZVOUS_SEED") {
        World::new(seed, true).run();
        return;
    }
    let seeds = number("TENFOLD_RENDEZVOUS_SEEDS").unwrap_or(SEEDS);
    let threads = 2;
    let counts = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|worker| {
                scope.spawn(move || {
                    let mut counts = BTreeMap::new();
                    for seed in (worker..seeds).step_by(threads as usize) {
                        for (what, count) in World::new(seed, false).run() {
                            *counts.entry(what).or_insert(0_u64) += count;
                        }
                    }
                    counts
                })
            })
            .collect();
        let mut all = BTreeMap::new();
        for worker in workers {
            for (what, count) in worker.join().unwrap() {
                *all.entry(what).or_insert(0) += count;
            }
        }
        all
    });
    println!("{counts:?}");
    // A schedule that never gets there proves nothing.
    for what in SIGHTS {
        assert!(seeds < SEEDS || counts.get(what).is_some_and(|&count| count > 20), "{what}: {counts:?}");
    }
}

#[test]
fn the_folder_may_die_after_any_of_its_writes() {
    let settings = Settings { last_call: Duration::ZERO, ..scenarios::settings(2, 3) };
    for writes in 1.. {
        let mut world = World::empty(settings.clone());
        world.quiet_since = Some(Duration::ZERO);
        (0..3).for_each(|_| world.launch());
        world.nodes[0].writes_left = Some(writes);
        world.run_until("a round runs", World::is_running_well);
        world.finishing = true;
        world.run_until("all know", |world| world.nodes.iter().all(|node| !node.is_active()));
        world.run_until("all have exited", |world| world.nodes.iter().all(|node| !node.is_up()));
        assert!(world.nodes[1..].iter().all(|node| node.over == Some(Outcome::Success)));
        if world.nodes[0].condition == Condition::Alive {
            assert!(writes > 12, "a claim, and at least four states of three writes");
            return;
        }
    }
}

/// In virtual time, a node is launched every millisecond. A node does something when it is new, when its beat is
/// due, and when the state has a new turn.
#[test]
fn what_ten_thousand_nodes_ask_of_the_store_grows_with_their_number() {
    let of = |count: usize| {
        let mut world = World::empty(scenarios::settings(count, count));
        world.traffic.is_counted = true;
        let step = Duration::from_millis(10);
        let is_started =
            |world: &World| world.nodes.len() == count && world.nodes.iter().all(|node| node.open == Some(0));
        while !is_started(&world) {
            assert!(world.now < PATIENCE, "stuck: {}", world.state.as_ref().map_or("".into(), |s| show(s)));
            world.now += step;
            for _ in 0..10.min(count - world.nodes.len()) {
                world.launch();
                world.nodes.last_mut().unwrap().speed = 100;
            }
            let turn = world.store.head.as_ref().map_or(0, |head| head.turn);
            for at in 0..world.nodes.len() {
                let (now, node) = (world.local(at), &world.nodes[at]);
                let is_behind = node.view.as_ref().is_none_or(|view| view.head.turn < turn);
                if is_behind || node.folded.is_some() || now >= node.beat_at || !node.ops.is_empty() {
                    world.turn(at);
                }
            }
        }
        println!("{count} nodes: {:?} in {:?} of virtual time", world.traffic, world.now);
        std::mem::take(&mut world.traffic)
    };
    for (count, states) in [(1_000, 30), (10_000, 40)] {
        let traffic = of(count);
        assert!(traffic.requests < 20 * count, "{count} nodes: {traffic:?}");
        assert!(traffic.writes < 10 * count, "{count} nodes: {traffic:?}");
        assert!(traffic.bytes < 64 * 1024 * count, "{count} nodes: {traffic:?}");
        assert!(traffic.states < states, "{count} nodes: {traffic:?}");
    }
}

/// Situations that must have occurred often.
const SIGHTS: [&str; 25] = [
    "answer lost",
    "below min",
    "closed",
    "conflict",
    "failed",
    "folder killed",
    "gave up",
    "handed over",
    "hole",
    "killed",
    "late write",
    "late write refused",
    "left",
    "next job",
    "node joined",
    "page replaced",
    "promoted",
    "request lost",
    "restart",
    "round",
    "said twice",
    "success",
    "timed out",
    "took over",
    "two folders",
];

/// SplitMix64, good enough for this.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }
    fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }
    fn pick(&mut self, length: usize) -> usize {
        self.below(length as u64) as usize
    }
    fn percent(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }
}

struct World {
    seed: u64,
    random: Random,
    trace: bool,
    /// The true time, which no node sees.
    now: Duration,
    quiet_since: Option<Duration>,
    /// Ranks succeed as soon as they run.
    finishing: bool,
    settings: Settings,
    is_static: bool,
    store: Store,
    /// What the store says, put together.
    state: Option<Rc<State>>,
    nodes: Vec<Node>,
    /// Nodes that ever wished to join.
    asked: BTreeSet<String>,
    /// The nodes of a round, in order; by job and round.
    rounds: BTreeMap<(u64, u64), Vec<String>>,
    /// The last rank of the nodes in the state.
    ranks: BTreeMap<String, usize>,
    counts: BTreeMap<&'static str, u64>,
    /// Requests that are on their way, and were given up by their nodes.
    late: Vec<(usize, Op)>,
    traffic: Traffic,
}

/// The keys of the job.
#[derive(Default)]
struct Store {
    head: Option<Rc<Head>>,
    pages: BTreeMap<(usize, Stamp), Rc<Vec<Seat>>>,
    failures: BTreeMap<Stamp, JobFailure>,
    wishes: BTreeMap<u64, Wish>,
    wishes_count: u64,
    beats: BTreeMap<String, u64>,
    answers: BTreeMap<String, String>,
}

/// What nodes ask of the store, counted where a test wants to know it.
#[derive(Debug, Default)]
struct Traffic {
    is_counted: bool,
    requests: usize,
    writes: usize,
    bytes: usize,
    states: usize,
}

impl Traffic {
    fn count(&mut self, requests: usize, bytes: impl FnOnce() -> usize) {
        if self.is_counted {
            self.requests += requests;
            self.bytes += bytes();
        }
    }

    fn count_write(&mut self, bytes: impl FnOnce() -> usize) {
        self.writes += usize::from(self.is_counted);
        self.count(1, bytes);
    }
}

/// Bytes of a value as JSON, with a key.
fn size(value: &impl serde::Serialize) -> usize {
    const KEY: usize = 64;
    KEY + serde_json::to_vec(value).unwrap().len()
}

/// A write, one request to the store.
enum Op {
    Wish(u64, Wish),
    Claim(Option<Rc<Head>>, Head),
    Texts(Rc<(State, Change)>),
    Head(Rc<Head>, Rc<(State, Change)>),
    Clean(Rc<(State, Change)>),
    Answer(String, String),
}

struct Node {
    id: String,
    member: Member,
    condition: Condition,
    /// Percent of the true speed, and where its clock began.
    speed: u32,
    clock_start: Duration,
    beat_at: Duration,
    view: Option<View>,
    folded: Option<(State, Inbox)>,
    /// A head was read, and the rest of what the node must see not yet.
    reading: Option<Rc<Head>>,
    /// A view must be read before it can be decided on.
    has_read: bool,
    ops: VecDeque<Op>,
    /// Dies after so many more writes.
    writes_left: Option<usize>,
    orders: VecDeque<Order>,
    orders_past: Vec<Order>,
    /// Asked to start and not to stop.
    open: Option<u64>,
    /// Ranks that run, and will stop without being asked to.
    running: Option<u64>,
    stopping: bool,
    leaving: bool,
    round_last: Option<u64>,
    over: Option<Outcome>,
    /// It is over, and this node gives up its task before it exits.
    parting: bool,
    finished: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Condition {
    Alive,
    Frozen,
    Dead,
}

impl Node {
    /// It does something.
    fn is_up(&self) -> bool {
        self.condition == Condition::Alive && !self.finished
    }

    /// It takes part in the job.
    fn is_active(&self) -> bool {
        self.is_up() && self.over.is_none()
    }

    fn say(&mut self, order: Order) {
        self.orders_past.push(order.clone());
        self.orders.push_back(order);
    }
}

/// A panic names its seed.
impl Drop for World {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!("replay with TENFOLD_RENDEZVOUS_SEED={}", self.seed);
        }
    }
}

macro_rules! log {
    ($world:expr, $($text:tt)*) => {
        if $world.trace {
            println!("{:8.2} s  {}", $world.now.as_secs_f64(), format!($($text)*));
        }
    };
}

impl World {
    fn empty(settings: Settings) -> World {
        World {
            seed: 0,
            random: Random(0),
            trace: false,
            now: Duration::ZERO,
            quiet_since: None,
            finishing: false,
            settings,
            is_static: false,
            store: Store::default(),
            state: None,
            nodes: Vec::new(),
            asked: BTreeSet::new(),
            rounds: BTreeMap::new(),
            ranks: BTreeMap::new(),
            counts: BTreeMap::new(),
            late: Vec::new(),
            traffic: Traffic::default(),
        }
    }

    fn new(seed: u64, trace: bool) -> World {
        let mut random = Random(seed);
        let is_static = random.percent(15);
        let nodes_min = 1 + random.pick(3);
        let settings = Settings {
            max_restarts: random.below(4),
            join_timeout: Duration::from_secs(60),
            last_call: Duration::from_secs(10),
            ..scenarios::settings(nodes_min, if is_static { nodes_min } else { nodes_min + random.pick(3) })
        };
        let mut world = World::empty(settings);
        (world.seed, world.random, world.trace, world.is_static) = (seed, random, trace, is_static);
        log!(world, "{:?}", world.settings);
        for _ in 0..1 + world.random.pick(4) {
            world.launch();
        }
        world
    }

    fn run(mut self) -> BTreeMap<&'static str, u64> {
        let pace = [100, 500, 2_500][self.random.pick(3)];
        let trouble = [2, 6, 12][self.random.pick(3)];
        for _ in 0..100 + self.random.pick(500) {
            self.now += Duration::from_millis(self.random.below(pace));
            if self.random.percent(trouble) {
                self.trouble();
            }
            if !self.late.is_empty() && self.random.percent(10) {
                self.serve_late();
            }
            let node = self.random.pick(self.nodes.len());
            self.step(node);
        }
        self.become_quiet();
        self.run_until("a round runs", World::is_running_well);
        self.finishing = true;
        self.run_until("all know", |world| world.nodes.iter().all(|node| !node.is_active()));
        self.run_until("all have exited", |world| world.nodes.iter().all(|node| !node.is_up()));
        std::mem::take(&mut self.counts)
    }

    fn count(&mut self, what: &'static str) {
        *self.counts.entry(what).or_default() += 1;
    }

    fn launch(&mut self) {
        let id = format!("n{}", self.nodes.len());
        let mut info = scenarios::node(&id);
        if self.is_static {
            info.fixed_rank = Some(self.nodes.len() % self.settings.nodes_min);
        }
        log!(self, "{id} is launched");
        self.nodes.push(Node {
            id,
            member: Member::new(self.settings.clone(), info),
            condition: Condition::Alive,
            speed: 75 + self.random.below(60) as u32,
            clock_start: self.now,
            beat_at: Duration::ZERO,
            view: None,
            folded: None,
            reading: None,
            has_read: false,
            ops: VecDeque::new(),
            writes_left: None,
            orders: VecDeque::new(),
            orders_past: Vec::new(),
            open: None,
            running: None,
            stopping: false,
            leaving: false,
            round_last: None,
            over: None,
            parting: false,
            finished: false,
        });
    }

    /// Something goes wrong, or a node joins or leaves.
    fn trouble(&mut self) {
        let at = self.random.pick(self.nodes.len());
        let kind = self.random.below(10);
        let up = self.nodes.iter().filter(|node| node.is_active()).count();
        let has_room = self.nodes.len() < 12 && up < 6;
        let node = &mut self.nodes[at];
        match (kind, node.condition) {
            (0..=3, _) if has_room => self.launch(),
            (4..=5, Condition::Alive | Condition::Frozen) => {
                node.condition = Condition::Dead;
                let was_folder = node.folded.is_some();
                log!(self, "{} dies", self.nodes[at].id);
                self.count(if was_folder { "folder killed" } else { "killed" });
            }
            (6..=7, Condition::Alive) => {
                node.condition = Condition::Frozen;
                log!(self, "{} freezes", self.nodes[at].id);
            }
            (8, _) if node.is_active() => {
                node.leaving = true;
                node.say(Order::Leave { reason: "SIGTERM".into() });
                log!(self, "{} wants to leave", self.nodes[at].id);
            }
            (_, Condition::Frozen) => {
                node.condition = Condition::Alive;
                log!(self, "{} thaws", self.nodes[at].id);
            }
            _ => {}
        }
    }

    /// One of the things that a node does, at a random time.
    fn step(&mut self, at: usize) {
        if !self.nodes[at].is_up() {
            return;
        }
        match self.random.below(8) {
            0 => self.launcher(at),
            1 => self.deliver(at),
            2 if self.random.percent(30) => self.repeat_order(at),
            _ if !self.nodes[at].ops.is_empty() => self.write(at),
            _ if self.nodes[at].reading.is_some() => self.read_rest(at),
            _ if !self.nodes[at].has_read => self.read(at),
            _ => self.decide(at),
        }
    }

    fn local(&self, at: usize) -> Duration {
        let node = &self.nodes[at];
        (self.now - node.clock_start) * node.speed / 100
    }

    /// Ranks run, fail, end.
    fn launcher(&mut self, at: usize) {
        let may_end = self.finishing || (self.quiet_since.is_none() && self.random.percent(25));
        let fails = self.quiet_since.is_none() && self.random.percent(25);
        let node = &mut self.nodes[at];
        let Some(round) = node.running else { return };
        if node.stopping {
            (node.running, node.stopping) = (None, false);
            node.say(Order::Stopped { round });
        } else if fails {
            node.stopping = true;
            let failure = scenarios::failure(round, &node.id, 0);
            node.say(Order::Failed { round, failure });
        } else if may_end {
            node.running = None;
            node.say(Order::Done { round });
        } else {
            return;
        }
        log!(self, "{} says {:?}", self.nodes[at].id, self.nodes[at].orders.back());
    }

    fn deliver(&mut self, at: usize) {
        let node = &mut self.nodes[at];
        if let Some(order) = node.orders.pop_front() {
            node.member.obey(order);
        }
    }

    /// An order is repeated, perhaps much later.
    fn repeat_order(&mut self, at: usize) {
        let length = self.nodes[at].orders_past.len();
        if length > 0 {
            let which = self.random.pick(length);
            let node = &mut self.nodes[at];
            let order = node.orders_past[which].clone();
            // Orders that are still in the launcher's queue are not repeated: the queue keeps their order.
            if length - which > node.orders.len() {
                node.member.obey(order);
                self.count("said twice");
            }
        }
    }

    /// Writes a beat, if one is due, and reads the head.
    fn read(&mut self, at: usize) {
        let now = self.local(at);
        let World { store, nodes, traffic, .. } = self;
        let node = &mut nodes[at];
        traffic.count(1, || store.head.as_deref().map_or(64, size));
        if now >= node.beat_at {
            node.beat_at = now + self.settings.beat_interval;
            *store.beats.entry(node.id.clone()).or_default() += 1;
            traffic.count_write(|| 400);
            let state = node.folded.as_ref().map(|(state, _)| state);
            let heard = node.view.as_ref().map_or(Vec::new(), |view| node.member.listens_to(view, state));
            traffic.count(0, || 70 * heard.len());
            for id in heard {
                node.member.hear(&id, store.beats.get(&id).copied(), now);
            }
            if let Some(text) = store.answers.remove(&node.id)
                && node.view.as_ref().is_some_and(|view| view.place(&node.id) == Place::Absent)
            {
                node.member.refuse(text);
            }
        }
        node.reading.clone_from(&store.head);
        if node.reading.is_none() {
            (node.view, node.folded, node.has_read) = (None, None, true);
        }
    }

    /// Reads the page that this node is in; or, as folder, all of them.
    fn read_rest(&mut self, at: usize) {
        let World { store, nodes, traffic, .. } = self;
        let node = &mut nodes[at];
        let Some(head) = node.reading.take() else { return };
        let stamps: Vec<(usize, Stamp)> = head.pages.iter().copied().enumerate().collect();
        let is_folder = head.folder == node.id;
        if is_folder && node.folded.as_ref().is_some_and(|(state, _)| state.head == *head) {
            node.has_read = true;
            return;
        }
        let own = page_of(&node.id, stamps.len());
        let known = node.view.as_ref().filter(|view| {
            view.head.pages.len() == stamps.len() && view.head.pages.get(own) == head.pages.get(own)
        });
        let wanted = match is_folder {
            true => &stamps[..],
            false => stamps.get(own..=own).unwrap_or_default(),
        };
        let seats: Option<Vec<Seat>> = match known.filter(|_| !is_folder) {
            Some(view) => Some(view.page.clone()),
            None => {
                let pages: Option<Vec<&Rc<Vec<Seat>>>> =
                    wanted.iter().map(|stamp| store.pages.get(stamp)).collect();
                traffic.count(1, || pages.iter().flatten().map(|page| size(&***page)).sum());
                pages.map(|pages| pages.into_iter().flat_map(|page| page.iter().cloned()).collect())
            }
        };
        let is_failed = head.outcome == Some(Ending::Failed);
        let stamp = head.failure.filter(|_| is_folder || is_failed);
        let failure = stamp.and_then(|stamp| store.failures.get(&stamp).cloned());
        let Some(seats) = seats.filter(|_| !is_folder || failure.is_some() == stamp.is_some()) else {
            self.count("page replaced");
            return;
        };
        node.has_read = true;
        if is_folder {
            let inbox = Inbox::new(head.folded);
            let state = State::assemble((*head).clone(), seats, failure).expect("a valid state");
            node.view = Some(state.view(&node.id));
            node.folded = Some((state, inbox));
        } else {
            node.view = Some(View { head: (*head).clone(), page: seats, failure });
            node.folded = None;
        }
    }

    fn decide(&mut self, at: usize) {
        let now = self.local(at);
        let view = self.nodes[at].view.clone();
        let decision = self.nodes[at].member.decide(view.as_ref(), now);
        for event in decision.events {
            self.event(at, view.as_ref(), event);
        }
        let expected = self.nodes[at].view.as_ref().map(|view| Rc::new(view.head.clone()));
        let is_folder = self.nodes[at].folded.is_some();
        let node = &mut self.nodes[at];
        node.has_read = false;
        if let Some(claim) = decision.claim {
            node.ops.push_back(Op::Claim(expected, claim));
        } else if is_folder && !decision.finished {
            self.fold(at, decision.wish);
        } else if let Some(wish) = decision.wish {
            self.wish(at, wish);
        }
        let node = &mut self.nodes[at];
        // A launcher that knows the end exits; if it is the folder, when all know.
        let is_quiet = self.quiet_since.is_some();
        let exits = match node.folded.is_some() {
            true => !is_quiet && self.random.percent(20),
            false => node.ops.is_empty() && self.random.percent(50),
        };
        let node = &mut self.nodes[at];
        if decision.finished || (node.over.is_some() && exits && node.folded.is_none()) {
            node.finished = true;
        } else if node.over.is_some() && exits && node.ops.is_empty() && !node.parting {
            node.parting = true;
            let Some((state, _)) = &node.folded else { return };
            let head = Rc::new(state.head.clone());
            let handed = node.member.hand_over(state);
            if let Some(next) = handed {
                self.push_state(at, head, next);
                self.count("handed over");
            }
        }
    }

    /// Takes a number for a wish. The wish follows.
    fn wish(&mut self, at: usize, wish: Wish) {
        self.traffic.count_write(|| 64);
        self.store.wishes_count += 1;
        if matches!(wish.what, What::Join { .. }) {
            self.asked.insert(wish.node.clone());
        }
        self.nodes[at].ops.push_back(Op::Wish(self.store.wishes_count, wish));
    }

    fn fold(&mut self, at: usize, own: Option<Wish>) {
        let now = self.local(at);
        let World { store, nodes, traffic, random, asked, .. } = self;
        let node = &mut nodes[at];
        let Some((state, inbox)) = &mut node.folded else { return };
        traffic.count(1, || 64);
        inbox.counted(store.wishes_count);
        let is_due = inbox.due(state, now).is_some_and(|due| due <= now);
        let is_waiting = if traffic.is_counted { !is_due } else { random.percent(20) };
        if own.is_none() && is_waiting && self.quiet_since.is_none() {
            return; // more may follow
        }
        if let Some(Wish { node, what: What::Join { .. }, .. }) = &own {
            asked.insert(node.clone());
        }
        let mut wishes = Vec::from_iter(own);
        let numbers = inbox.numbers();
        traffic.count(1, || 30 * numbers.len());
        let mut has_hole = false;
        for number in numbers {
            let wish = store.wishes.get(&number);
            inbox.looked(number, wish.is_some(), now);
            has_hole |= wish.is_none();
            traffic.count(0, || wish.map_or(0, size));
            let is_late = wish.is_some_and(|wish| {
                matches!(wish.what, What::Join { .. }) && !store.beats.contains_key(&wish.node)
            });
            wishes.extend(wish.filter(|_| !is_late).cloned());
        }
        let fold = node.member.fold(state, &wishes, inbox.complete(), now);
        inbox.folded(self.settings.silence_max(), now);
        let head = Rc::new(state.head.clone());
        for (id, text) in fold.answers {
            match id == node.id {
                true => node.member.refuse(text),
                false => node.ops.push_back(Op::Answer(id, text)),
            }
        }
        if has_hole {
            self.count("hole");
        }
        if let Some(next) = fold.next {
            self.push_state(at, head, next);
        }
    }

    fn push_state(&mut self, at: usize, expected: Rc<Head>, next: (State, Change)) {
        let next = Rc::new(next);
        let ops = &mut self.nodes[at].ops;
        ops.extend([Op::Texts(next.clone()), Op::Head(expected, next.clone()), Op::Clean(next)]);
    }

    /// One request of a node is served, or not.
    fn write(&mut self, at: usize) {
        let Some(op) = self.nodes[at].ops.pop_front() else { return };
        let has_faults = self.quiet_since.is_none() && !self.traffic.is_counted;
        let fate = if has_faults { self.random.below(18) } else { 50 };
        let is_served = match fate {
            0 => {
                self.count("request lost");
                false
            }
            1 => {
                self.serve(at, &op);
                self.count("answer lost");
                false
            }
            2 => {
                self.late.push((at, op));
                false
            }
            _ => self.serve(at, &op),
        };
        let node = &mut self.nodes[at];
        node.writes_left = node.writes_left.map(|left| left.saturating_sub(1));
        if node.writes_left == Some(0) {
            node.condition = Condition::Dead;
        }
        if !is_served {
            node.ops.clear();
            node.member.wish_again();
            if let Some((state, inbox)) = &mut node.folded {
                *inbox = Inbox::new(state.head.folded);
            }
        }
        if node.ops.is_empty() && node.parting {
            node.finished = true;
        }
    }

    /// A request arrives that its node has given up.
    fn serve_late(&mut self) {
        let which = self.random.pick(self.late.len());
        let (at, op) = self.late.swap_remove(which);
        let is_state = matches!(op, Op::Head(..) | Op::Claim(..));
        let is_served = self.serve(at, &op);
        if is_state {
            self.count(if is_served { "late write" } else { "late write refused" });
        }
    }

    /// What the store does; false if the value was not the expected one.
    fn serve(&mut self, at: usize, op: &Op) -> bool {
        match op {
            Op::Wish(number, wish) => {
                self.traffic.count_write(|| size(wish));
                self.store.wishes.insert(*number, wish.clone());
            }
            Op::Answer(id, text) => {
                self.store.answers.insert(id.clone(), text.clone());
            }
            Op::Claim(expected, head) => {
                self.traffic.count_write(|| 2 * size(head));
                if self.store.head != *expected {
                    self.count("conflict");
                    return false;
                }
                self.check_claim(at, head);
                log!(self, "{} claims {:?}", self.nodes[at].id, head);
                self.store.head = Some(Rc::new(head.clone()));
                self.put_together();
            }
            Op::Texts(next) => {
                let (state, change) = &**next;
                self.traffic.count_write(|| change.pages.iter().map(|(_, page)| size(page)).sum());
                for (index, seats) in &change.pages {
                    let before = self.store.pages.insert((*index, change.stamp), Rc::new(seats.clone()));
                    assert!(before.is_none_or(|before| *before == *seats), "a page never changes");
                }
                if let Some(failure) = &state.failure {
                    self.store.failures.entry(change.stamp).or_insert_with(|| failure.clone());
                }
            }
            Op::Head(expected, next) => {
                let (state, change) = &**next;
                self.traffic.count_write(|| 2 * size(&state.head));
                if self.store.head.as_ref() != Some(expected) {
                    let is_ousted =
                        self.state.as_ref().is_some_and(|state| state.folder != self.nodes[at].id);
                    self.count(if is_ousted { "two folders" } else { "conflict" });
                    for (index, _) in &change.pages {
                        self.store.pages.remove(&(*index, change.stamp));
                    }
                    return false;
                }
                if !self.traffic.is_counted {
                    self.check_write(at, state);
                }
                self.traffic.states += 1;
                log!(self, "{} writes {}", self.nodes[at].id, show(state));
                self.store.head = Some(Rc::new(state.head.clone()));
                self.put_together();
                assert_eq!(self.state.as_deref(), Some(state), "what was written is what others read");
                let node = &mut self.nodes[at];
                if let Some((known, _)) = &mut node.folded {
                    known.clone_from(state);
                    node.view = Some(state.view(&node.id));
                }
            }
            Op::Clean(next) => {
                let change = &next.1;
                for stamp in &change.pages_old {
                    self.traffic.count_write(|| 64);
                    self.store.pages.remove(stamp);
                }
                change.failure_old.iter().for_each(|stamp| drop(self.store.failures.remove(stamp)));
                self.store.beats.retain(|id, _| !change.removed.contains(id));
            }
        }
        true
    }

    /// The state that the head names. All its texts must be there.
    fn put_together(&mut self) {
        let Some(head) = self.store.head.clone() else { return };
        let mut seats = Vec::new();
        for (index, &stamp) in head.pages.iter().enumerate() {
            let page = self.store.pages.get(&(index, stamp));
            seats.extend(page.expect("a head names pages that are there").iter().cloned());
        }
        let failure = head.failure.map(|stamp| self.store.failures[&stamp].clone());
        let state = State::assemble((*head).clone(), seats, failure).expect("a valid state");
        self.state = Some(Rc::new(state));
    }

    /// Which head may be claimed.
    fn check_claim(&mut self, at: usize, head: &Head) {
        let claimer = self.nodes[at].id.clone();
        assert_eq!(head.folder, claimer);
        assert_eq!(parse_head(&head_text(head).unwrap()).as_ref(), Ok(head), "a head that others can read");
        let Some(state) = self.state.clone() else {
            assert_eq!((head.version, head.job, head.round, head.term), (1, 0, 0, 1));
            return;
        };
        assert_eq!((head.version, head.term), (state.version + 1, state.term + 1), "they are counted");
        if head.job != state.job {
            assert_eq!((head.job, head.round), (state.job + 1, 0));
            assert!(state.is_settled(), "the next job disturbs no node");
            self.ranks.clear();
            self.count("next job");
            return;
        }
        let Head { version, turn, term, folder, .. } = head.clone();
        assert_eq!(*head, Head { version, turn, term, folder, ..state.head.clone() }, "nothing else changes");
        self.count("took over");
    }

    /// Which state may replace which.
    fn check_write(&mut self, at: usize, next: &State) {
        let writer = self.nodes[at].id.clone();
        let text = head_text(&next.head).unwrap();
        assert_eq!(parse_head(&text).as_ref(), Ok(&next.head), "a state that others can read");
        let state = self.state.clone().expect("a state follows a claim");
        assert_eq!(next.version, state.version + 1, "versions are counted");
        assert_eq!(state.folder, writer, "only the folder changes the state");
        let terms = next.term - state.term;
        assert!(terms <= 1 && (terms == 1) == (next.folder != writer), "one folder for each term");
        assert!(next.restarts_used <= next.max_restarts, "no more restarts than there may be");
        assert_eq!(next.job, state.job);
        assert!(state.phase != Phase::Over || next.phase == Phase::Over, "over is over");
        let rounds = next.round - state.round; // overflows if they shrink
        let used = next.restarts_used - state.restarts_used;
        assert!(rounds <= 1 && used <= 1, "one thing at a time");
        assert!(used == 0 || rounds == 1, "a restart leads to another round");
        if next.failure != state.failure {
            let failure = next.failure.as_ref().expect("one is not forgotten");
            assert_eq!((state.phase, failure.round), (Phase::Running, state.round), "no late failure counts");
            let says_so =
                |order: &Order| matches!(order, Order::Failed { failure: said, .. } if said == failure);
            let mut failed = self.nodes.iter().filter(|node| node.id == failure.host);
            assert!(failed.any(|node| node.orders_past.iter().any(says_so)), "nodes speak for themselves");
            assert!(used == 1 || next.phase == Phase::Over);
            self.count(if used == 1 { "restart" } else { "failed" });
        } else if used == 1 {
            let left = next.members.iter().filter(|seat| state.place(&seat.node.id) != Place::Absent).count();
            assert!(left < next.nodes_min, "only a failure or a lack of nodes costs a restart");
            self.count("below min");
        }
        for id in next.ids().filter(|id| state.place(id) == Place::Absent) {
            assert!(self.asked.contains(id), "nodes join by themselves");
        }
        for id in state.ids().filter(|id| next.place(id) == Place::Absent) {
            let node = self.nodes.iter().find(|node| node.id == id).unwrap();
            let is_calm = self.quiet_since.is_some_and(|since| self.now > since + CALM);
            let gives_up = self.store.wishes.values().any(|wish| wish.node == id && wish.what.is_parting());
            let is_fair = id == writer || gives_up || node.leaving || !node.is_up();
            assert!(!is_calm || is_fair, "{id} is alive, and given up by {writer}");
            self.ranks.remove(id);
        }
        for seat in &next.members {
            let Place::Member(before) = state.place(&seat.node.id) else { continue };
            let says_done = seat.done && (!before.done || next.round != state.round);
            let says_ready = seat.ready && (!before.ready || next.round != state.round);
            if says_done || says_ready {
                let id = &seat.node.id;
                let node = self.nodes.iter().find(|node| node.id == *id).expect("it joined");
                let is_over = next.phase == Phase::Over && !says_done;
                assert!(is_over || node.running.is_none(), "{id} still runs ranks");
            }
        }
        if next.members.iter().any(|seat| state.place(&seat.node.id) == Place::Spare) {
            self.count("promoted");
        }
        if next.phase == Phase::Running && (state.phase == Phase::Joining || rounds == 1) {
            self.check_round(next);
        }
        let is_end = next.phase == Phase::Over && state.phase != Phase::Over;
        if is_end && next.outcome == Some(Ending::Success) {
            let world = &self.rounds[&(state.job, state.round)];
            let done = next.members.iter().filter(|seat| seat.done).count();
            assert_eq!(done, world.len(), "a job succeeds only if all nodes are done");
        }
    }

    fn check_round(&mut self, next: &State) {
        let count = next.members.len();
        assert!(next.nodes_min <= count && count <= next.nodes_max, "{count} nodes");
        for (rank, seat) in next.members.iter().enumerate() {
            assert_eq!(seat.rank, Some(rank), "ranks are 0, 1, 2…");
            let sticky = self.ranks.get(&seat.node.id).filter(|&&rank| rank < count);
            assert!(sticky.is_none_or(|&last| last == rank), "{} had rank {sticky:?}", seat.node.id);
            assert!(seat.node.fixed_rank.is_none_or(|fixed| fixed == rank));
        }
        self.ranks = next.members.iter().zip(0..).map(|(seat, rank)| (seat.node.id.clone(), rank)).collect();
        let ids = next.ids().take(count).map(String::from).collect();
        assert_eq!(self.rounds.insert((next.job, next.round), ids), None, "a round starts once");
        self.count("round");
    }

    fn event(&mut self, at: usize, view: Option<&View>, event: Event) {
        log!(self, "{} gets {}", self.nodes[at].id, show_event(&event));
        if let Event::Stop { reason, .. } = &event {
            if reason.contains("gave this node up") {
                self.count("gave up");
            } else if reason.ends_with("joined") {
                self.count("node joined");
            }
        }
        let node = &mut self.nodes[at];
        assert_eq!(node.over, None, "nothing follows the end");
        match event {
            Event::Start(start) => {
                assert_eq!((node.open, node.running), (None, None), "one round at a time");
                assert!(node.round_last.is_none_or(|last| last < start.round), "rounds grow");
                assert_eq!(Some(start.job), view.map(|view| view.head.job));
                if let Some(ids) = self.rounds.get(&(start.job, start.round)) {
                    assert_eq!(
                        (&ids[start.node_rank], ids.len()),
                        (&node.id, start.nodes),
                        "all agree on it"
                    );
                    let world = (start.first_rank(), start.world_size, start.role_world_size());
                    assert_eq!(world, (start.node_rank, ids.len(), ids.len()), "each node has one rank");
                } else {
                    assert!(self.traffic.is_counted, "only a round that is in the state starts");
                }
                (node.open, node.running) = (Some(start.round), Some(start.round));
                (node.round_last, node.stopping) = (Some(start.round), false);
            }
            Event::Stop { round, .. } => {
                assert_eq!(node.open, Some(round), "what was started is stopped, once");
                node.open = None;
                node.stopping = true;
            }
            Event::Over(outcome) => {
                assert!(outcome == Outcome::Success || node.open.is_none(), "first stop, then over");
                assert!(node.open.is_none() || node.running.is_none(), "success is when all is done");
                let timed_out = matches!(&outcome, Outcome::Closed(text) if text.contains(" joined within "));
                let what = match &outcome {
                    Outcome::Success => "success",
                    Outcome::Failed(_) => "failed",
                    Outcome::Closed(_) if timed_out => "timed out",
                    Outcome::Closed(_) if node.leaving => "left",
                    Outcome::Closed(_) => "closed",
                };
                node.over = Some(outcome);
                self.count(what);
                if timed_out && self.quiet_since.is_some_and(|since| self.now > since + CALM) {
                    let up = self.nodes.iter().filter(|node| node.is_active()).count() + 1;
                    assert!(up < self.settings.nodes_min, "{up} nodes are alive");
                }
            }
            Event::Note(_) | Event::Held(_) => {}
        }
    }

    fn become_quiet(&mut self) {
        log!(self, "from now on all is quiet");
        self.quiet_since = Some(self.now);
        while !self.late.is_empty() {
            self.serve_late();
        }
        for node in &mut self.nodes {
            if node.condition == Condition::Frozen {
                node.condition = Condition::Alive;
            }
        }
    }

    /// All nodes do what there is to do, and nothing goes wrong, until the condition holds.
    fn run_until(&mut self, what: &str, is_so: impl Fn(&World) -> bool) {
        let until = self.now + PATIENCE;
        while !is_so(self) {
            assert!(
                self.now < until,
                "stuck: never {what}; {}",
                self.state.as_ref().map_or("".into(), |s| show(s))
            );
            self.now += Duration::from_secs(1);
            for at in 0..self.nodes.len() {
                if !self.nodes[at].is_up() {
                    continue;
                }
                self.launcher(at);
                while !self.nodes[at].orders.is_empty() {
                    self.deliver(at);
                }
                for _ in 0..3 {
                    self.turn(at);
                }
            }
        }
    }

    /// One node writes all that it has to, reads, and decides.
    fn turn(&mut self, at: usize) {
        while self.nodes[at].is_up() && !self.nodes[at].ops.is_empty() {
            self.write(at);
        }
        if self.nodes[at].is_up() {
            self.read(at);
            self.read_rest(at);
        }
        if self.nodes[at].is_up() && self.nodes[at].has_read {
            self.decide(at);
        }
    }

    /// All live nodes take part, as far as the limit allows; or the job is over.
    fn is_running_well(&self) -> bool {
        let up: Vec<&Node> = self.nodes.iter().filter(|node| node.is_active()).collect();
        let Some(state) = self.state.as_ref().filter(|_| !up.is_empty()) else { return true };
        let has_done = state.members.iter().any(|seat| seat.done);
        let is_full = state.spares.is_empty() || state.members.len() == state.nodes_max || has_done;
        let mut dead = self.nodes.iter().filter(|node| !node.is_active());
        let has_dead = dead.any(|node| matches!(state.place(&node.id), Place::Member(seat) if !seat.done));
        let takes_part = |node: &&Node| match state.place(&node.id) {
            Place::Member(_) => node.open == Some(state.round),
            Place::Spare => true,
            // The fixed rank that it wants may be held by a node that is done.
            Place::Absent => has_done,
        };
        state.phase == Phase::Running && is_full && !has_dead && up.iter().all(takes_part)
    }
}

fn show(state: &State) -> String {
    let members: Vec<String> = state
        .members
        .iter()
        .map(|seat| {
            let marks = [(seat.ready, "ready"), (seat.done, "done")];
            let marks: Vec<&str> = marks.iter().filter(|(is, _)| *is).map(|(_, mark)| *mark).collect();
            format!("{}:{:?} {}", seat.node.id, seat.rank, marks.join(" "))
        })
        .collect();
    let spares: Vec<&str> = state.spares.iter().map(|seat| seat.node.id.as_str()).collect();
    format!(
        "v{} term {} of {} job {} round {} {:?} [{}] spares {spares:?} restarts {} {:?} {}",
        state.version,
        state.term,
        state.folder,
        state.job,
        state.round,
        state.phase,
        members.join(", "),
        state.restarts_used,
        state.outcome,
        state.reason
    )
}

fn show_event(event: &Event) -> String {
    match event {
        Event::Start(start) => {
            format!("to start round {} as {} of {}", start.round, start.node_rank, start.nodes)
        }
        other => format!("{other:?}"),
    }
}
