//! The rendezvous at work: two threads between a store and a launcher.
//!
//! The *agent* does everything: it takes the launcher's orders, beats, listens to the others' beats, decides, writes. It
//! sleeps in one channel. The *watcher* only waits, with a connection of its own, for the key `version/<n>` that appears
//! with the next state, and puts that state into the agent's channel.
//!
//! A wake-up may get lost, since who writes a state may die before it has written the key that tells of it. So the agent
//! also reads the state with every beat.

#![expect(clippy::disallowed_methods, reason = "owns the threads of the rendezvous, and its clock")]

use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tenfold_store::{Deadline, ErrorKind, Fault, Request, Response, Store, Value};

use super::member::Member;
use super::state::State;
use super::{Event, NodeInfo, Order, Settings};

/// How many `version/<n>` keys are left in the store: who is that far behind finds the state by its next beat.
const VERSIONS_KEPT: u64 = 64;
/// Jobs that have ended whose keys are left in the store, for the dashboard; those of the older ones are removed.
const RUNS_KEPT: usize = 32;
/// Jobs that are removed at a time: who begins a job does not wait for long.
const RUNS_REMOVED: usize = 32;
/// How long who drops a rendezvous waits for its last words to be written.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// Bytes of one node's beat; what its ranks do is left out rather than more.
const BEAT_MAX: usize = 1 << 20;
/// From a request that failed to the next one.
const RETRY: Duration = Duration::from_millis(100);
/// From one beat to the next if there is something new about ranks: sooner than life demands.
const NEWS: Duration = Duration::from_secs(1);

/// A node's part in a job. Dropping it without [`Order::Leave`] looks to the others like death.
pub(crate) struct Rendezvous {
    inbox: Sender<Message>,
    /// Closed when the agent has ended.
    ended: Receiver<()>,
}

impl fmt::Debug for Rendezvous {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rendezvous").finish_non_exhaustive()
    }
}

enum Message {
    Order(Order),
    /// The state as it was read by the watcher.
    State(Value),
    End,
}

impl Rendezvous {
    /// Starts the threads; `events` is called from one of them, in order.
    pub(crate) fn join(
        store: Arc<dyn Store>,
        settings: Settings,
        node: NodeInfo,
        events: impl Fn(Event) + Send + 'static,
    ) -> io::Result<Rendezvous> {
        settings.check().map_err(|text| io::Error::new(io::ErrorKind::InvalidInput, text))?;
        let watched = store.duplicate().map_err(|fault| {
            io::Error::other(format!(
                "cannot open a second connection to the store at {}: {}",
                store.name(),
                fault.message()
            ))
        })?;
        let (inbox, messages) = channel();
        let (alive, ended) = channel();
        let keys = Keys { prefix: format!("tenfold/run/{}", settings.run_id) };
        let watcher =
            Watcher { line: Line::new(watched, &settings), keys: keys.clone(), inbox: inbox.clone() };
        let agent = Agent {
            line: Line::new(store, &settings),
            keys,
            messages,
            member: Member::new(settings.clone(), node.clone()),
            settings,
            node,
            current: None,
            beat: 0,
            beat_last: Duration::ZERO,
            has_news: false,
            status: serde_json::Value::Array(Vec::new()),
            started: Instant::now(),
            _alive: alive,
        };
        std::thread::Builder::new().name("rendezvous-watch".into()).spawn(move || watcher.run())?;
        std::thread::Builder::new().name("rendezvous".into()).spawn(move || agent.run(&events))?;
        Ok(Rendezvous { inbox, ended })
    }

    pub(crate) fn tell(&self, order: Order) {
        let _is_over = self.inbox.send(Message::Order(order));
    }

    /// After [`Event::Over`]: waits until all other nodes know that the job is over, or are dead. Who hosts the store
    /// must not close it earlier. False if the time was up before.
    pub(crate) fn settle(&self, patience: Duration) -> bool {
        self.ended.recv_timeout(patience) == Err(RecvTimeoutError::Disconnected)
    }
}

impl Drop for Rendezvous {
    fn drop(&mut self) {
        if self.inbox.send(Message::End).is_ok() {
            self.settle(LAST_WORDS);
        }
    }
}

#[derive(Clone)]
struct Keys {
    prefix: String,
}

impl Keys {
    fn state(&self) -> String {
        format!("{}/state", self.prefix)
    }
    fn version(&self, version: u64) -> String {
        format!("{}/version/{version}", self.prefix)
    }
    fn node(&self, id: &str) -> String {
        format!("{}/node/{id}", self.prefix)
    }
}

/// A store that is asked again while there is hope.
struct Line {
    store: Arc<dyn Store>,
    /// For one request.
    patience: Duration,
    /// For a store that cannot be reached.
    lost_after: Duration,
    /// For one that can, but does not answer.
    slow_after: Duration,
    /// Since when nothing has succeeded.
    broken: Option<Instant>,
}

/// Why a request has no answer.
enum Trouble {
    /// Ask again.
    Passing,
    /// The store is of no use any more: the error's text.
    Final(String),
}

impl Line {
    fn new(store: Arc<dyn Store>, settings: &Settings) -> Line {
        let lost_after = settings.silence_max();
        let patience = lost_after.max(Duration::from_secs(1));
        Line { store, patience, lost_after, slow_after: settings.join_timeout.max(patience), broken: None }
    }

    fn ask(&mut self, request: Request<'_>) -> Result<Response, Trouble> {
        self.ask_for(request, self.patience)
    }

    fn ask_for(&mut self, request: Request<'_>, patience: Duration) -> Result<Response, Trouble> {
        let is_wait = matches!(request, Request::Wait { .. });
        match self.store.call(request, Deadline::after(patience)) {
            Ok(response) => {
                self.broken = None;
                Ok(response)
            }
            Err(fault) if is_wait && fault.kind() == ErrorKind::Timeout => Err(Trouble::Passing),
            Err(fault) => Err(self.judge(&fault)),
        }
    }

    fn judge(&mut self, fault: &Fault) -> Trouble {
        let broken_for = self.broken.get_or_insert_with(Instant::now).elapsed();
        let limit = match fault.kind() {
            ErrorKind::Timeout => self.slow_after,
            ErrorKind::Connect | ErrorKind::Io | ErrorKind::Lost => self.lost_after,
            _ => Duration::ZERO,
        };
        if broken_for < limit {
            tracing::debug!("the store at {} is in trouble: {}", self.store.name(), fault.message());
            return Trouble::Passing;
        }
        let (name, message) = (self.store.name(), fault.message());
        Trouble::Final(match limit.is_zero() {
            true => format!("the store at {name} cannot be used: {message}"),
            false => format!(
                "the store at {name} was lost: {message}\n  hint: did the launcher or server end that hosts it?"
            ),
        })
    }

    fn get(&mut self, key: &str) -> Result<Option<Value>, Trouble> {
        match self.ask(Request::Get { key: key.as_bytes().into() })? {
            Response::Value(value) => Ok(value.filter(|value| !value.is_empty())),
            _ => Err(self.wrong_answer()),
        }
    }

    fn set(&mut self, key: &str, value: &[u8]) -> Result<(), Trouble> {
        self.ask(Request::Set { key: key.as_bytes().into(), value: value.into() }).map(|_| ())
    }

    fn wrong_answer(&self) -> Trouble {
        Trouble::Final(format!("the store at {} gave an answer of the wrong kind", self.store.name()))
    }
}

struct Watcher {
    line: Line,
    keys: Keys,
    inbox: Sender<Message>,
}

impl Watcher {
    /// Until the agent has ended, or the store is lost: the agent will notice that by itself.
    fn run(mut self) {
        let (mut version, mut is_woken) = (0, false);
        loop {
            let known = version;
            match self.line.get(&self.keys.state()) {
                Ok(Some(state)) => {
                    // One that cannot be read is for the agent to complain about.
                    version = State::from_text(&state).map_or(version, |state| state.version);
                    if self.inbox.send(Message::State(state)).is_err() {
                        return;
                    }
                }
                Ok(None) | Err(Trouble::Passing) => {}
                Err(Trouble::Final(_)) => return,
            }
            // Woken without news: the store is in trouble, or somebody left a key there.
            if is_woken && version == known {
                std::thread::park_timeout(RETRY);
            }
            let key = self.keys.version(version + 1);
            let wait = Request::Wait { keys: vec![key.as_bytes().into()] };
            is_woken = match self.line.ask_for(wait, self.line.patience) {
                Ok(_) => true,
                Err(Trouble::Passing) => self.line.broken.is_some(),
                Err(Trouble::Final(_)) => return,
            };
        }
    }
}

/// What a node writes with every beat.
#[derive(Serialize)]
struct Beat<'a> {
    beat: u64,
    node: &'a NodeInfo,
    /// How long it may be silent: for the dashboard, which knows no settings.
    silence_max_seconds: f64,
    ranks: &'a serde_json::Value,
}

/// What of it others need.
#[derive(Deserialize)]
struct Heard {
    beat: u64,
}

struct Agent {
    line: Line,
    keys: Keys,
    messages: Receiver<Message>,
    member: Member,
    settings: Settings,
    node: NodeInfo,
    /// The state as it was last read or written, and its exact text.
    current: Option<(Value, State)>,
    beat: u64,
    beat_last: Duration,
    /// The launcher said something about ranks since the last beat.
    has_news: bool,
    status: serde_json::Value,
    started: Instant,
    _alive: Sender<()>,
}

impl Agent {
    fn run(mut self, events: &impl Fn(Event)) {
        if let Err(Trouble::Final(text)) = self.work(events) {
            self.member.lose(text).into_iter().for_each(events);
        }
    }

    fn now(&self) -> Duration {
        self.started.elapsed()
    }

    fn work(&mut self, events: &impl Fn(Event)) -> Result<(), Trouble> {
        let mut beat_at = Duration::ZERO;
        let mut wake = None;
        let mut end_at: Option<Duration> = None;
        loop {
            self.take_messages(wake.map_or(beat_at, |wake: Duration| wake.min(beat_at)), &mut end_at)?;
            if self.has_news {
                beat_at = beat_at.min(self.beat_last + NEWS);
            }
            // Who ends without a word is done; who has something to say has a little time for it.
            let has_words = self.member.is_leaving() || self.member.is_over();
            if end_at.is_some_and(|end_at| !has_words || self.now() >= end_at) {
                return Ok(());
            }
            if self.now() >= beat_at {
                beat_at = self.now() + self.settings.beat_interval;
                // A frozen node must not take the time after its thaw for that of the beat.
                let sent = Instant::now();
                match self.beat() {
                    Ok(()) => events(Event::Held(sent + self.settings.lease())),
                    Err(Trouble::Passing) => {
                        (beat_at, wake) = (self.now() + RETRY, None);
                        continue;
                    }
                    Err(trouble) => return Err(trouble),
                }
            }
            let now = self.now();
            let decision = self.member.decide(self.current.as_ref().map(|(_, state)| state), now);
            decision.events.into_iter().for_each(events);
            wake = decision.wake;
            if let Some(next) = decision.write {
                wake = Some(now); // decide again, after a look at the messages
                match self.write(&next) {
                    Ok(()) => {}
                    // Did it happen? The beat reads the state.
                    Err(Trouble::Passing) => (beat_at, wake) = (self.now() + RETRY, None),
                    Err(trouble) => return Err(trouble),
                }
            } else if decision.finished || (end_at.is_some() && self.member.is_over()) {
                return Ok(());
            }
        }
    }

    /// Sleeps until `until` or the first message, then takes all that are there.
    fn take_messages(&mut self, until: Duration, end_at: &mut Option<Duration>) -> Result<(), Trouble> {
        let mut wait = until.saturating_sub(self.now());
        let mut newest = None;
        // A rendezvous that is gone has said `End`; the watcher's end alone leaves that sender.
        while let Ok(message) = self.messages.recv_timeout(wait) {
            wait = Duration::ZERO;
            match message {
                Message::Order(Order::Status(status)) => (self.status, self.has_news) = (status, true),
                Message::Order(order) => self.member.obey(order),
                Message::End => *end_at = Some(self.now() + LAST_WORDS),
                Message::State(text) => newest = Some(text),
            }
        }
        if let Some(text) = newest {
            let state = self.parse(&text)?;
            // It was read by another connection, perhaps before our last look.
            if self.current.as_ref().is_none_or(|(_, current)| current.version < state.version) {
                self.current = Some((text, state));
            }
        }
        Ok(())
    }

    fn parse(&self, text: &[u8]) -> Result<State, Trouble> {
        State::from_text(text).map_err(|what| {
            let key = self.keys.state();
            Trouble::Final(format!(
                "the key `{key}` of the store at {} holds no state of a job: {what}\n  \
                 hint: does something else use that key? another version of tenfold? take another run id",
                self.line.store.name()
            ))
        })
    }

    /// Writes this node's beat, and reads the state and the others'.
    fn beat(&mut self) -> Result<(), Trouble> {
        self.beat += 1;
        (self.beat_last, self.has_news) = (self.now(), false);
        let text = |ranks: &serde_json::Value| {
            let silence_max_seconds = self.settings.silence_max().as_secs_f64();
            let beat = Beat { beat: self.beat, node: &self.node, silence_max_seconds, ranks };
            serde_json::to_vec(&beat).map_err(|error| Trouble::Final(error.to_string()))
        };
        let mut value = text(&self.status)?;
        if value.len() > BEAT_MAX {
            value = text(&serde_json::Value::Array(Vec::new()))?;
        }
        self.line.set(&self.keys.node(&self.node.id), &value)?;

        let now = self.now(); // before the reading: what comes out of it is not older
        let ids = self.current.as_ref().map_or(Vec::new(), |(_, state)| self.member.listens_to(state));
        let mut names = vec![self.keys.state()];
        names.extend(ids.iter().map(|id| self.keys.node(id)));
        let mut values = self.read(&names)?.into_iter();
        let state = values.next().flatten();
        for (id, value) in ids.iter().zip(values) {
            let heard = value.and_then(|value| serde_json::from_slice::<Heard>(&value).ok());
            self.member.hear(id, heard.map(|heard| heard.beat), now);
        }
        self.adopt(state)
    }

    fn read(&mut self, names: &[String]) -> Result<Vec<Option<Value>>, Trouble> {
        let keys = names.iter().map(|name| name.as_bytes().into()).collect();
        match self.line.ask(Request::MultiGet { keys })? {
            Response::Values(values) if values.len() == names.len() => {
                Ok(values.into_iter().map(|value| value.filter(|value| !value.is_empty())).collect())
            }
            _ => Err(self.line.wrong_answer()),
        }
    }

    /// Takes what is in the store for the present state. If nobody told of it, the one who wrote it could not.
    fn adopt(&mut self, text: Option<Value>) -> Result<(), Trouble> {
        let known = self.current.as_ref().map_or(0, |(_, state)| state.version);
        let Some(text) = text else {
            self.current = None;
            return Ok(());
        };
        let state = self.parse(&text)?;
        let version = state.version;
        let is_created = known == 0 && version == 1 && state.ids().next() == Some(&self.node.id);
        self.current = Some((text, state));
        if is_created {
            self.list_run(); // by us: the answer was lost
        }
        if version > known { self.line.set(&self.keys.version(version), b"1") } else { Ok(()) }
    }

    /// Proposes a state in place of the present one, and takes what is there afterwards for the present one.
    fn write(&mut self, next: &State) -> Result<(), Trouble> {
        let text = next.to_text().map_err(|what| {
            Trouble::Final(format!(
                "the state of the job `{}` cannot be written: {what}",
                self.settings.run_id
            ))
        })?;
        let key = self.keys.state();
        let expected = self.current.as_ref().map_or(&b""[..], |(text, _)| text);
        let request = Request::CompareSet {
            key: key.as_bytes().into(),
            expected: expected.into(),
            desired: text.as_slice().into(),
        };
        let Response::Value(Some(found)) = self.line.ask(request)? else {
            return Err(self.line.wrong_answer());
        };
        if *found != *text {
            // What was expected comes back if the key is gone.
            let gone = *found == *expected;
            let found = if gone { self.line.get(&key)? } else { Some(found) };
            return self.adopt(found);
        }
        let before = self.current.replace((found, next.clone()));
        self.line.set(&self.keys.version(next.version), b"1")?;
        if next.version > VERSIONS_KEPT {
            self.forget(&self.keys.version(next.version - VERSIONS_KEPT))?;
        }
        match before {
            None => self.list_run(),
            // Those that were taken out do not beat any more, or will again.
            Some((_, before)) => {
                for id in before.ids().filter(|id| next.ids().all(|next| next != *id)) {
                    self.forget(&self.keys.node(id))?;
                }
            }
        }
        Ok(())
    }

    fn forget(&mut self, key: &str) -> Result<(), Trouble> {
        self.line.ask(Request::Delete { key: key.as_bytes().into() }).map(|_| ())
    }

    /// For the dashboard; a store that cannot append is good enough without.
    fn list_run(&mut self) {
        let line = format!("{}\n", self.settings.run_id);
        let request = Request::Append { key: RUNS.as_bytes().into(), value: line.as_bytes().into() };
        if self.line.ask(request).is_ok() {
            let _next_time = self.forget_old_runs();
        }
    }

    /// A server may outlive thousands of jobs. Those that began long ago and are over for all their nodes are removed with all
    /// their keys; one that is not over, or whose nodes all died, stays.
    fn forget_old_runs(&mut self) -> Result<(), Trouble> {
        let Some(list) = self.line.get(RUNS)? else { return Ok(()) };
        let text = String::from_utf8_lossy(&list).into_owned();
        let lines: Vec<&str> = text.lines().collect();
        let old = lines.len().saturating_sub(RUNS_KEPT);
        let mut removed: Vec<&str> = Vec::new();
        for &run in &lines[..old] {
            if removed.len() == RUNS_REMOVED {
                break;
            }
            let is_recent = lines[old..].contains(&run) || run == self.settings.run_id;
            if !is_recent && !removed.contains(&run) && self.forget_run(run)? {
                removed.push(run);
            }
        }
        if removed.is_empty() {
            return Ok(());
        }
        let is_kept = |(index, run): &(usize, &&str)| *index >= old || !removed.contains(run);
        let kept: String =
            lines.iter().enumerate().filter(is_kept).map(|(_, run)| format!("{run}\n")).collect();
        // If another job was listed meanwhile, the next one to begin finds these gone.
        let (expected, desired) = ((&*list).into(), kept.as_bytes().into());
        self.line.ask(Request::CompareSet { key: RUNS.as_bytes().into(), expected, desired }).map(|_| ())
    }

    /// Removes the keys of a job that is over; false if it is not.
    fn forget_run(&mut self, run: &str) -> Result<bool, Trouble> {
        let keys = Keys { prefix: format!("tenfold/run/{run}") };
        let Some(text) = self.line.get(&keys.state())? else { return Ok(true) };
        let Ok(state) = State::from_text(&text) else { return Ok(false) };
        if !state.is_settled() {
            return Ok(false);
        }
        // The state last: who does not get that far leaves the job listed, and the next one goes on.
        for id in state.ids() {
            self.forget(&keys.node(id))?;
        }
        for version in state.version.saturating_sub(VERSIONS_KEPT)..=state.version {
            self.forget(&keys.version(version))?;
        }
        self.forget(&keys.state())?;
        Ok(true)
    }
}

/// Lists the jobs, in the order in which they began.
const RUNS: &str = "tenfold/runs";

#[cfg(test)]
mod tests {
    use super::super::{Assignment, JobFailure, Outcome, scenarios};
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::sync::{Condvar, Mutex};
    use tenfold_store::{HashStore, Server, ServerOptions, StoreExt, TcpStore};

    /// Longer than anything here takes.
    const GUARD: Duration = Duration::from_secs(60);

    struct Node {
        rendezvous: Rendezvous,
        events: Receiver<Event>,
    }

    impl Node {
        fn join(store: &Arc<dyn Store>, settings: &Settings, id: &str) -> Node {
            let (sender, events) = channel();
            let tell = move |event| drop(sender.send(event));
            let node = scenarios::node(id);
            let rendezvous =
                Rendezvous::join(store.duplicate().unwrap(), settings.clone(), node, tell).unwrap();
            Node { rendezvous, events }
        }

        /// The next event that is no note.
        fn event(&self) -> Event {
            loop {
                match self.events.recv_timeout(GUARD).expect("there is an event") {
                    Event::Note(_) | Event::Held(_) => {}
                    event => return event,
                }
            }
        }

        fn start(&self) -> Assignment {
            match self.event() {
                Event::Start(assignment) => assignment,
                other => panic!("no start but {other:?}"),
            }
        }

        /// Expects to be stopped, and obeys.
        fn stop(&self) -> String {
            match self.event() {
                Event::Stop { round, reason } => {
                    self.rendezvous.tell(Order::Stopped { round });
                    reason
                }
                other => panic!("no stop but {other:?}"),
            }
        }

        fn done(&self, round: u64) {
            self.rendezvous.tell(Order::Done { round });
        }
    }

    fn settings(nodes_min: usize, nodes_max: usize) -> Settings {
        Settings {
            beat_interval: Duration::from_millis(40),
            beats_missed_max: 250, // nobody is missed who only waits for a busy core
            ..scenarios::settings(nodes_min, nodes_max)
        }
    }

    fn hosts(assignment: &Assignment) -> Vec<&str> {
        assignment.nodes.iter().map(|node| node.host.as_str()).collect()
    }

    fn failure(round: u64) -> JobFailure {
        scenarios::failure(round, "b", 1)
    }

    #[test]
    fn a_store_that_outlives_many_jobs_keeps_the_last_ones() {
        const JOBS: usize = RUNS_KEPT + 8;
        let store: Arc<dyn Store> = Arc::new(HashStore::new());
        let settings = |job: usize| Settings { run_id: format!("job-{job}"), ..settings(1, 1) };
        // One that is not over is kept, however old.
        let _running = Node::join(&store, &settings(0), "a");
        _running.start();
        for job in 1..JOBS {
            let node = Node::join(&store, &settings(job), "a");
            node.start();
            node.done(0);
            assert_eq!(node.event(), Event::Over(Outcome::Success));
            assert!(node.rendezvous.settle(GUARD));
        }
        let keys: Vec<String> =
            store.list_keys().unwrap().iter().map(|key| String::from_utf8_lossy(key).into()).collect();
        let of = |job: usize| {
            keys.iter().filter(|key| key.starts_with(&format!("tenfold/run/job-{job}/"))).count()
        };
        assert!(of(0) > 0, "it runs");
        assert!((1..8).all(|job| of(job) == 0), "{keys:?}");
        assert!((8..JOBS).all(|job| of(job) > 0), "{keys:?}");
        let runs = store.get("tenfold/runs").unwrap();
        let runs: Vec<&str> = std::str::from_utf8(&runs).unwrap().lines().collect();
        assert_eq!((runs.len(), runs[0], runs[1]), (RUNS_KEPT + 1, "job-0", "job-8"));
    }

    /// Every store is one: in this process, and behind a server.
    fn for_each_store(test: impl Fn(Arc<dyn Store>)) {
        test(Arc::new(HashStore::new()));
        let server = Server::start(ServerOptions::new("127.0.0.1", 0)).unwrap();
        test(Arc::new(TcpStore::connect("127.0.0.1", server.address().port()).unwrap()));
    }

    #[test]
    fn nodes_start_together_fail_together_take_one_more_in_lose_one_and_succeed() {
        for_each_store(|store| {
            let settings = Settings { last_call: Duration::ZERO, ..settings(3, 4) };
            let mut nodes: Vec<Node> = ["a", "b", "c"].map(|id| Node::join(&store, &settings, id)).into();
            let mut order: Vec<String> = Vec::new();
            for node in &nodes {
                let start = node.start();
                assert_eq!((start.round, start.nodes.len()), (0, 3));
                order = hosts(&start).iter().map(|&host| host.into()).collect();
            }
            nodes[1].rendezvous.tell(Order::Failed { round: 0, failure: failure(0) });
            for node in &nodes {
                assert_eq!(node.stop(), "rank 1 on node b failed: exit code 3");
            }
            for node in &nodes {
                assert_eq!((node.start().round), 1);
            }
            nodes.push(Node::join(&store, &settings, "d"));
            for node in &nodes[..3] {
                assert_eq!(node.stop(), "node d joined");
            }
            order.push("d".into());
            for node in &nodes {
                let start = node.start();
                assert_eq!((start.round, hosts(&start)), (2, order.iter().map(String::as_str).collect()));
            }
            drop(nodes.remove(1));
            for node in &nodes {
                assert_eq!(node.stop(), "node b was not heard of for 10 s");
            }
            for node in &nodes {
                assert_eq!(node.start().round, 3);
                node.done(3);
            }
            for node in &nodes {
                assert_eq!(node.event(), Event::Over(Outcome::Success));
            }
            for node in nodes {
                assert!(node.rendezvous.settle(GUARD));
            }
            assert_eq!(store.get("tenfold/runs").unwrap(), b"job\n");
            assert!(!store.check(&["tenfold/run/job/node/b"]).unwrap());
        });
    }

    #[test]
    fn a_node_that_leaves_is_answered_and_the_others_go_on() {
        for_each_store(|store| {
            let nodes = ["a", "b"].map(|id| Node::join(&store, &settings(1, 2), id));
            nodes.iter().for_each(|node| assert_eq!(node.start().round, 0));
            nodes[0].rendezvous.tell(Order::Leave { reason: "SIGTERM".into() });
            assert_eq!(nodes[0].event(), Event::Stop { round: 0, reason: "node a left: SIGTERM".into() });
            let outcome = Outcome::Closed("this node left the job: SIGTERM".into());
            assert_eq!(nodes[0].event(), Event::Over(outcome));
            assert_eq!(nodes[1].stop(), "node a left: SIGTERM");
            let start = nodes[1].start();
            assert_eq!((start.round, hosts(&start)), (1, vec!["b"]));
            // Also when nobody waits for the answer.
            nodes[1].rendezvous.tell(Order::Leave { reason: "SIGINT".into() });
            let [_, b] = nodes;
            drop(b.rendezvous);
            let state = State::from_text(&store.get("tenfold/run/job/state").unwrap()).unwrap();
            assert_eq!((state.members.len(), state.reason.as_str()), (0, "node b left: SIGINT"));
        });
    }

    #[test]
    fn the_next_job_under_the_same_id_begins_when_the_one_before_is_over() {
        for_each_store(|store| {
            for job in 0..3 {
                let nodes = ["a", "b"].map(|id| Node::join(&store, &settings(2, 2), &format!("{id}{job}")));
                for node in &nodes {
                    assert_eq!(node.start().round, 0);
                    node.done(0);
                }
                for node in nodes {
                    assert_eq!(node.event(), Event::Over(Outcome::Success));
                }
            }
        });
    }

    #[test]
    fn what_a_rank_does_goes_out_with_the_beat() {
        let store: Arc<dyn Store> = Arc::new(HashStore::new());
        let node = Node::join(&store, &settings(1, 1), "a");
        node.start();
        node.rendezvous.tell(Order::Status(serde_json::json!([{"rank": 0, "pid": 7}])));
        let beat = |key: &str| serde_json::from_slice::<serde_json::Value>(&store.get(key).unwrap()).unwrap();
        loop {
            let seen = beat("tenfold/run/job/node/a");
            assert_eq!(seen["node"]["host"], "a");
            assert_eq!(seen["silence_max_seconds"], settings(1, 1).silence_max().as_secs_f64());
            if seen["ranks"][0]["pid"] == 7 {
                break;
            }
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_store_that_is_gone_for_good_ends_the_job_with_an_error_that_names_it() {
        let server = Server::start(ServerOptions::new("127.0.0.1", 0)).unwrap();
        let address = server.address();
        let store: Arc<dyn Store> = Arc::new(TcpStore::connect("127.0.0.1", address.port()).unwrap());
        let settings = Settings { beats_missed_max: 2, ..settings(1, 1) };
        let node = Node::join(&store, &settings, "a");
        node.start();
        drop(server);
        let Event::Stop { round: 0, reason } = node.event() else { panic!("it is stopped") };
        let Event::Over(Outcome::Closed(text)) = node.event() else { panic!("it is over") };
        assert!(text.starts_with(&format!("the store at {address} was lost: ")), "{text}");
        assert!(text.starts_with(&reason), "{reason}");
        assert!(node.rendezvous.settle(GUARD));
    }

    #[test]
    fn a_key_that_holds_something_else_is_named_in_the_error() {
        let store: Arc<dyn Store> = Arc::new(HashStore::new());
        store.set("tenfold/run/job/state", "hello").unwrap();
        let node = Node::join(&store, &settings(1, 1), "a");
        let text = "the key `tenfold/run/job/state` of the store at this process holds no state of a job: \
                    expected value at line 1 column 1\n  \
                    hint: does something else use that key? another version of tenfold? take another run id";
        assert_eq!(node.event(), Event::Over(Outcome::Closed(text.into())));
    }

    #[test]
    fn a_store_does_not_fill_with_versions() {
        let store: Arc<dyn Store> = Arc::new(HashStore::new());
        let settings = Settings { max_restarts: 100, ..settings(1, 1) };
        let node = Node::join(&store, &settings, "a");
        for round in 0..100 {
            assert_eq!(node.start().round, round);
            node.rendezvous.tell(Order::Failed { round, failure: failure(round) });
            node.stop();
        }
        assert_eq!(node.start().round, 100);
        let keys = u64::try_from(store.num_keys().unwrap()).unwrap();
        assert!(keys <= VERSIONS_KEPT + 4, "{keys} keys");
    }

    /// Every fifth answer gets lost, whether the request was served or not.
    #[derive(Clone)]
    struct Lossy {
        store: HashStore,
        calls: Arc<AtomicU64>,
    }

    impl Store for Lossy {
        fn call(&self, request: Request<'_>, deadline: Deadline) -> Result<Response, Fault> {
            let lost = || Err(Fault::new(ErrorKind::Lost, "the connection is gone"));
            match self.calls.fetch_add(1, Ordering::Relaxed) % 10 {
                4 => lost(),
                9 => self.store.call(request, deadline).and_then(|_| lost()),
                _ => self.store.call(request, deadline),
            }
        }
        fn duplicate(&self) -> Result<Arc<dyn Store>, Fault> {
            Ok(Arc::new(self.clone()))
        }
    }

    #[test]
    fn requests_and_answers_that_get_lost_change_nothing() {
        let store = Lossy { store: HashStore::new(), calls: Arc::default() };
        let store: Arc<dyn Store> = Arc::new(store);
        let settings = Settings { max_restarts: 5, ..settings(3, 3) };
        let nodes = ["a", "b", "c"].map(|id| Node::join(&store, &settings, id));
        for round in 0..5 {
            nodes.iter().for_each(|node| assert_eq!(node.start().round, round));
            nodes[1].rendezvous.tell(Order::Failed { round, failure: failure(round) });
            nodes.iter().for_each(|node| assert_eq!(node.stop(), "rank 1 on node b failed: exit code 3"));
        }
        for node in &nodes {
            assert_eq!(node.start().round, 5);
            node.done(5);
        }
        nodes.iter().for_each(|node| assert_eq!(node.event(), Event::Over(Outcome::Success)));
    }

    /// Answers nothing until it is let go.
    struct Stuck(Arc<(Mutex<bool>, Condvar)>);

    impl Store for Stuck {
        fn call(&self, _: Request<'_>, _: Deadline) -> Result<Response, Fault> {
            let (is_free, freed) = &*self.0;
            drop(freed.wait_while(is_free.lock().unwrap(), |is_free| !*is_free).unwrap());
            Err(Fault::new(ErrorKind::Protocol, "it was stuck"))
        }
        fn duplicate(&self) -> Result<Arc<dyn Store>, Fault> {
            Ok(Arc::new(Stuck(self.0.clone())))
        }
    }

    #[test]
    fn a_store_that_does_not_answer_does_not_keep_a_rendezvous_from_being_dropped() {
        let gate: Arc<(Mutex<bool>, Condvar)> = Arc::default();
        let store: Arc<dyn Store> = Arc::new(Stuck(gate.clone()));
        let node = Node::join(&store, &settings(1, 1), "a");
        node.rendezvous.tell(Order::Leave { reason: "SIGTERM".into() });
        drop(node.rendezvous);
        *gate.0.lock().unwrap() = true;
        gate.1.notify_all();
        let text = "the store at a store of this program cannot be used: it was stuck";
        let last = node.events.iter().find(|event| !matches!(event, Event::Note(_) | Event::Held(_)));
        assert_eq!(last, Some(Event::Over(Outcome::Closed(text.into()))));
    }

    #[test]
    fn a_state_that_nobody_tells_of_is_found_with_the_next_beat() {
        let store: Arc<dyn Store> = Arc::new(HashStore::new());
        let node = Node::join(&store, &Settings { last_call: Duration::ZERO, ..settings(1, 2) }, "a");
        node.start();
        // One that dies as soon as it has written the state.
        let text = store.get("tenfold/run/job/state").unwrap();
        let mut state = State::from_text(&text).unwrap();
        state.join(&scenarios::node("z"));
        state.version += 1;
        let written = store.compare_set("tenfold/run/job/state", text, state.to_text().unwrap()).unwrap();
        assert_eq!(State::from_text(&written), Ok(state));
        assert_eq!(node.stop(), "node z joined");
        let start = node.start();
        assert_eq!(hosts(&start), ["a", "z"], "nothing is known against it");
        assert_eq!(node.stop(), "node z was not heard of for 10 s");
        assert_eq!(hosts(&node.start()), ["a"]);
    }

    #[test]
    fn many_nodes_find_each_other() {
        let server = Server::start(ServerOptions::new("127.0.0.1", 0)).unwrap();
        let store: Arc<dyn Store> =
            Arc::new(TcpStore::connect("127.0.0.1", server.address().port()).unwrap());
        let count = 40;
        // Nobody is missed, however long forty threads have to share a busy core.
        let settings = Settings { beats_missed_max: 1000, ..settings(count, count) };
        let nodes: Vec<Node> =
            (0..count).map(|at| Node::join(&store, &settings, &format!("n{at}"))).collect();
        let mut ranks: Vec<usize> = nodes.iter().map(|node| node.start().node_rank).collect();
        ranks.sort_unstable();
        assert!(ranks.into_iter().eq(0..count));
        nodes.iter().for_each(|node| node.done(0));
        nodes.iter().for_each(|node| assert_eq!(node.event(), Event::Over(Outcome::Success)));
        assert!(nodes[0].rendezvous.settle(GUARD));
    }

    #[test]
    fn settings_that_cannot_work_are_an_error_at_once() {
        let store: Arc<dyn Store> = Arc::new(HashStore::new());
        let error = Rendezvous::join(store, settings(2, 1), scenarios::node("a"), |_| {}).unwrap_err();
        assert_eq!(error.to_string(), "2 to 1 nodes: the least must be 1 or more, the most 4096 or less");
    }
}
