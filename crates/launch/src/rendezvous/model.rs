//! Many members against one store, under random schedules.
//!
//! A seed makes a job of up to a dozen nodes whose clocks run at different speeds. For a while anything may
//! happen: nodes join, die, freeze and thaw, leave; ranks fail or are done; a node is slow between reading,
//! deciding and writing; answers get lost; orders are repeated. Then there are no more faults: a round must
//! start, or the job be over, and in the end all live nodes must know how it ended. The invariants are
//! checked at every write and every event.
//!
//! `TENFOLD_RENDEZVOUS_SEED=17` runs one seed and prints what happens; `TENFOLD_RENDEZVOUS_SEEDS=200000` runs
//! many.

use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use std::time::Duration;

use super::member::Member;
use super::state::{Phase, Place, State};
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

/// Situations that must have occurred often.
const SIGHTS: [&str; 17] = [
    "answer lost",
    "below min",
    "closed",
    "conflict",
    "failed",
    "gave up",
    "killed",
    "left",
    "next job",
    "node joined",
    "promoted",
    "request lost",
    "restart",
    "round",
    "said twice",
    "success",
    "timed out",
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
    state: Option<Rc<State>>,
    beats: BTreeMap<String, u64>,
    nodes: Vec<Node>,
    /// The nodes of a round, in order; by job and round.
    rounds: BTreeMap<(u64, u64), Vec<String>>,
    /// The last rank of the nodes in the state.
    ranks: BTreeMap<String, usize>,
    counts: BTreeMap<&'static str, u64>,
}

struct Node {
    id: String,
    member: Member,
    condition: Condition,
    /// Percent of the true speed, and where its clock began.
    speed: u32,
    clock_start: Duration,
    beat_at: Duration,
    view: Option<Rc<State>>,
    /// A view must be read before it can be decided on.
    has_read: bool,
    writing: Option<(Option<Rc<State>>, State)>,
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
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Condition {
    Alive,
    Frozen,
    Dead,
}

impl Node {
    fn is_up(&self) -> bool {
        self.condition == Condition::Alive && self.over.is_none()
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
        let mut world = World {
            seed,
            random,
            trace,
            now: Duration::ZERO,
            quiet_since: None,
            finishing: false,
            settings,
            is_static,
            state: None,
            beats: BTreeMap::new(),
            nodes: Vec::new(),
            rounds: BTreeMap::new(),
            ranks: BTreeMap::new(),
            counts: BTreeMap::new(),
        };
        log!(world, "{:?}", world.settings);
        for _ in 0..1 + world.random.pick(4) {
            world.launch();
        }
        world
    }

    fn run(mut self) -> BTreeMap<&'static str, u64> {
        let pace = [100, 500, 2_500][self.random.pick(3)];
        let trouble = [2, 6, 12][self.random.pick(3)];
        for _ in 0..60 + self.random.pick(200) {
            self.now += Duration::from_millis(self.random.below(pace));
            if self.random.percent(trouble) {
                self.trouble();
            }
            let node = self.random.pick(self.nodes.len());
            self.step(node);
        }
        self.become_quiet();
        self.run_until("a round runs", World::is_running_well);
        self.finishing = true;
        self.run_until("all know", |world| world.nodes.iter().all(|node| !node.is_up()));
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
            has_read: false,
            writing: None,
            orders: VecDeque::new(),
            orders_past: Vec::new(),
            open: None,
            running: None,
            stopping: false,
            leaving: false,
            round_last: None,
            over: None,
        });
    }

    /// Something goes wrong, or a node joins or leaves.
    fn trouble(&mut self) {
        let at = self.random.pick(self.nodes.len());
        let kind = self.random.below(10);
        let up = self.nodes.iter().filter(|node| node.is_up()).count();
        let has_room = self.nodes.len() < 12 && up < 6;
        let node = &mut self.nodes[at];
        match (kind, node.condition) {
            (0..=3, _) if has_room => self.launch(),
            (4..=5, Condition::Alive | Condition::Frozen) => {
                node.condition = Condition::Dead;
                log!(self, "{} dies", self.nodes[at].id);
                self.count("killed");
            }
            (6..=7, Condition::Alive) => {
                node.condition = Condition::Frozen;
                log!(self, "{} freezes", self.nodes[at].id);
            }
            (8, _) if node.is_up() => {
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
            _ if self.nodes[at].writing.is_some() => self.write(at),
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

    fn read(&mut self, at: usize) {
        let now = self.local(at);
        if now >= self.nodes[at].beat_at {
            self.nodes[at].beat_at = now + self.settings.beat_interval;
            let id = self.nodes[at].id.clone();
            *self.beats.entry(id).or_default() += 1;
            let heard = self.nodes[at].view.as_ref().map(|view| self.nodes[at].member.listens_to(view));
            for id in heard.unwrap_or_default() {
                let beat = self.beats.get(&id).copied();
                self.nodes[at].member.hear(&id, beat, now);
            }
        }
        self.nodes[at].view.clone_from(&self.state);
        self.nodes[at].has_read = true;
    }

    fn decide(&mut self, at: usize) {
        let now = self.local(at);
        let view = self.nodes[at].view.clone();
        let decision = self.nodes[at].member.decide(view.as_deref(), now);
        for event in decision.events {
            self.event(at, view.as_deref(), event);
        }
        let node = &mut self.nodes[at];
        node.has_read = false;
        node.writing = decision.write.map(|next| (view, next));
    }

    fn write(&mut self, at: usize) {
        let Some((expected, next)) = self.nodes[at].writing.take() else { return };
        let loses = if self.quiet_since.is_some() { 50 } else { self.random.below(12) };
        if loses == 0 {
            self.count("request lost");
            return;
        }
        if self.state != expected {
            self.count("conflict");
        } else {
            self.check_write(at, &next);
            log!(self, "{} writes {}", self.nodes[at].id, show(&next));
            self.state = Some(Rc::new(next));
        }
        if loses == 1 {
            self.count("answer lost");
            return;
        }
        self.nodes[at].view.clone_from(&self.state);
        self.nodes[at].has_read = true;
    }

    /// Which state may replace which.
    fn check_write(&mut self, at: usize, next: &State) {
        let writer = self.nodes[at].id.clone();
        if next.version % 8 == 1 || next.phase == Phase::Over {
            let text = next.to_text().unwrap();
            assert_eq!(State::from_text(&text).as_ref(), Ok(next), "a state that others can read");
        }
        let Some(state) = self.state.clone() else {
            assert_eq!((next.version, next.job, next.round), (1, 0, 0));
            return;
        };
        assert_eq!(next.version, state.version + 1, "versions are counted");
        assert!(next.restarts_used <= next.max_restarts, "no more restarts than there may be");
        if next.job != state.job {
            assert_eq!((next.job, next.round), (state.job + 1, 0));
            assert!(state.is_settled(), "the next job disturbs no node");
            self.ranks.clear();
            self.count("next job");
            return;
        }
        assert!(state.phase != Phase::Over || next.phase == Phase::Over, "over is over");
        let rounds = next.round - state.round; // overflows if they shrink
        let used = next.restarts_used - state.restarts_used;
        assert!(rounds <= 1 && used <= 1, "one thing at a time");
        assert!(used == 0 || rounds == 1, "a restart leads to another round");
        if next.failure != state.failure {
            let failure = next.failure.as_ref().expect("one is not forgotten");
            assert_eq!((state.phase, failure.round), (Phase::Running, state.round), "no late failure counts");
            assert_eq!(failure.host, writer);
            assert!(used == 1 || next.phase == Phase::Over);
            self.count(if used == 1 { "restart" } else { "failed" });
        } else if used == 1 {
            assert!(next.members.len() < next.nodes_min, "only a failure or a lack of nodes costs a restart");
            self.count("below min");
        }
        for id in next.ids().filter(|id| state.place(id) == Place::Absent) {
            assert_eq!(id, writer, "nodes join by themselves");
        }
        for id in state.ids().filter(|id| next.place(id) == Place::Absent) {
            let node = self.nodes.iter().find(|node| node.id == id).unwrap();
            let is_calm = self.quiet_since.is_some_and(|since| self.now > since + CALM);
            assert!(!is_calm || id == writer || !node.is_up(), "{id} is alive, and given up by {writer}");
            self.ranks.remove(id);
        }
        for seat in &next.members {
            let Place::Member(before) = state.place(&seat.node.id) else { continue };
            let says_done = seat.done && (!before.done || next.round != state.round);
            let says_ready = seat.ready && (!before.ready || next.round != state.round);
            if says_done || says_ready {
                assert_eq!(seat.node.id, writer, "nodes speak for themselves");
                let is_over = next.phase == Phase::Over && !says_done;
                assert!(is_over || self.nodes[at].running.is_none(), "{writer} still runs ranks");
            }
        }
        if next.members.iter().any(|seat| state.spares.contains(&seat.node)) {
            self.count("promoted");
        }
        if next.phase == Phase::Running && state.phase == Phase::Joining {
            self.check_round(next);
        }
        if next.phase == Phase::Over && state.phase != Phase::Over && next.outcome() == Some(Outcome::Success)
        {
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

    fn event(&mut self, at: usize, view: Option<&State>, event: Event) {
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
                let ids: Vec<String> = start.nodes.iter().map(|node| node.id.clone()).collect();
                assert_eq!(ids[start.node_rank], node.id);
                let job = view.expect("a round is in a state").job;
                assert_eq!(self.rounds.get(&(job, start.round)), Some(&ids), "all agree on who takes part");
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
                    let up = self.nodes.iter().filter(|node| node.is_up()).count() + 1;
                    assert!(up < self.settings.nodes_min, "{up} nodes are alive");
                }
            }
            Event::Note(_) | Event::Held(_) => {}
        }
    }

    fn become_quiet(&mut self) {
        log!(self, "from now on all is quiet");
        self.quiet_since = Some(self.now);
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
                    if self.nodes[at].is_up() {
                        self.write(at);
                        self.read(at);
                        self.decide(at);
                    }
                }
            }
        }
    }

    /// All live nodes take part, as far as the limit allows; or the job is over.
    fn is_running_well(&self) -> bool {
        let up: Vec<&Node> = self.nodes.iter().filter(|node| node.is_up()).collect();
        let Some(state) = self.state.as_ref().filter(|_| !up.is_empty()) else { return true };
        let has_done = state.members.iter().any(|seat| seat.done);
        let is_full = state.spares.is_empty() || state.members.len() == state.nodes_max || has_done;
        let mut dead = self.nodes.iter().filter(|node| !node.is_up());
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
    let spares: Vec<&str> = state.spares.iter().map(|node| node.id.as_str()).collect();
    format!(
        "v{} job {} round {} {:?} [{}] spares {spares:?} restarts {} {:?} {}",
        state.version,
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
            let ids: Vec<&str> = start.nodes.iter().map(|node| node.id.as_str()).collect();
            format!("to start round {} as {} of {ids:?}", start.round, start.node_rank)
        }
        other => format!("{other:?}"),
    }
}
