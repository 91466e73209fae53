//! The running rendezvous: two threads between a store and a launcher.
//!
//! The *agent* does everything: it takes the launcher's orders, writes beats, reads other nodes' beats,
//! decides, and writes the state. It sleeps in one channel. The *watcher* only waits, on a separate
//! connection, for the key `version/<n>` that appears with the next state, and sends that state to the
//! agent's channel.
//!
//! A wake-up may get lost, because a node that writes a state may die before it writes the key that announces
//! it. So the agent also reads the state with every beat.

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

/// How many `version/<n>` keys are left in the store: a node that is further behind finds the state with its
/// next beat.
const VERSIONS_KEPT: u64 = 64;
/// Finished jobs whose keys are left in the store, for the dashboard; the keys of older ones are removed.
const RUNS_KEPT: usize = 32;
/// Jobs that are removed at a time, so that a starting job does not wait for long.
const RUNS_REMOVED: usize = 32;
/// How long dropping a rendezvous waits for its last writes.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// Bytes of one node's beat; if it would be longer, what its ranks do is omitted.
const BEAT_MAX: usize = 1 << 20;
/// The pause after a failed request.
const RETRY: Duration = Duration::from_millis(100);
/// From one beat to the next if there is something new about ranks: sooner than the usual interval.
const NEWS: Duration = Duration::from_secs(1);

/// A node's part in a job. Dropping it without [`Order::Leave`] looks like death to the other nodes.
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
                fault.message
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

    /// After [`Event::Over`]: waits until all other nodes know that the job is over, or are dead. A node that
    /// hosts the store must not close it earlier. False if the wait timed out.
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

/// A store whose requests are repeated as long as they may still succeed.
struct Line {
    store: Arc<dyn Store>,
    /// For one request.
    patience: Duration,
    /// The limit for a store that cannot be reached.
    lost_after: Duration,
    /// The limit for one that can be reached, but does not answer.
    slow_after: Duration,
    /// Since when no request has succeeded.
    broken: Option<Instant>,
}

/// Why a request has no answer.
enum Trouble {
    /// Ask again.
    Passing,
    /// The store cannot be used any more: the error's text.
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
            Err(fault) if is_wait && fault.kind == ErrorKind::Timeout => Err(Trouble::Passing),
            Err(fault) => Err(self.judge(&fault)),
        }
    }

    fn judge(&mut self, fault: &Fault) -> Trouble {
        let broken_for = self.broken.get_or_insert_with(Instant::now).elapsed();
        let limit = match fault.kind {
            ErrorKind::Timeout => self.slow_after,
            ErrorKind::Connect | ErrorKind::Io | ErrorKind::Lost => self.lost_after,
            _ => Duration::ZERO,
        };
        if broken_for < limit {
            tracing::debug!("the store at {} is in trouble: {}", self.store.name(), fault.message);
            return Trouble::Passing;
        }
        let (name, message) = (self.store.name(), &fault.message);
        Trouble::Final(match limit.is_zero() {
            true => format!("the store at {name} cannot be used: {message}"),
            false => format!(
                "the store at {name} was lost: {message}\n  hint: check that the launcher or server that hosts it is still running"
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
        Trouble::Final(format!("the store at {} sent an unexpected kind of answer", self.store.name()))
    }
}

struct Watcher {
    line: Line,
    keys: Keys,
    inbox: Sender<Message>,
}

impl Watcher {
    /// Until the agent has ended, or the store is lost: the agent notices that by itself.
    fn run(mut self) {
        let (mut version, mut is_woken) = (0, false);
        loop {
            let known = version;
            match self.line.get(&self.keys.state()) {
                Ok(Some(state)) => {
                    // The agent reports a state that cannot be parsed.
                    version = State::from_text(&state).map_or(version, |state| state.version);
                    if self.inbox.send(Message::State(state)).is_err() {
                        return;
                    }
                }
                Ok(None) | Err(Trouble::Passing) => {}
                Err(Trouble::Final(_)) => return,
            }
            // Woken without a new state: the store has a problem, or another program left a key there.
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
    /// How long it may be unresponsive: for the dashboard, which does not know the settings.
    silence_max_seconds: f64,
    ranks: &'a serde_json::Value,
}

/// The part of it that other nodes need.
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
    /// The launcher reported something about ranks since the last beat.
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
            // A node that ends with nothing to write is done; otherwise it has a little time for it.
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
                wake = Some(now); // decide again, after reading the messages
                match self.write(&next) {
                    Ok(()) => {}
                    // Was it written? The beat reads the state.
                    Err(Trouble::Passing) => (beat_at, wake) = (self.now() + RETRY, None),
                    Err(trouble) => return Err(trouble),
                }
            } else if decision.finished || (end_at.is_some() && self.member.is_over()) {
                return Ok(());
            }
        }
    }

    /// Sleeps until `until` or the first message, then takes all messages.
    fn take_messages(&mut self, until: Duration, end_at: &mut Option<Duration>) -> Result<(), Trouble> {
        let mut wait = until.saturating_sub(self.now());
        let mut newest = None;
        // A dropped rendezvous has sent `End`; if only the watcher ends, that sender is left.
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
            // Another connection read it, perhaps before our last read.
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
                "the key `{key}` of the store at {} does not hold the state of a job: {what}\n  \
                 hint: use another run id, or check whether another program or another version of tenfold uses that key",
                self.line.store.name()
            ))
        })
    }

    /// Writes this node's beat, and reads the state and the other nodes' beats.
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

        let now = self.now(); // before reading, so that what is read is not older
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

    /// Takes what is in the store for the present state. If no key announces it, its writer could not.
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
            self.list_run(); // written by us: the answer was lost
        }
        if version > known { self.line.set(&self.keys.version(version), b"1") } else { Ok(()) }
    }

    /// Proposes a state in place of the present one, and takes what is in the store afterwards for the
    /// present one.
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
            // If the key was deleted, the expected value is returned.
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
            // Removed nodes do not beat any more, or will join again.
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

    /// For the dashboard; a store that cannot append works without it.
    fn list_run(&mut self) {
        let line = format!("{}\n", self.settings.run_id);
        let request = Request::Append { key: RUNS.as_bytes().into(), value: line.as_bytes().into() };
        if self.line.ask(request).is_ok() {
            let _next_time = self.forget_old_runs();
        }
    }

    /// A server may outlive thousands of jobs. Jobs that began long ago and are over for all their nodes are
    /// removed with all their keys. A job that is not over, or whose nodes all died, stays.
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
        // If another job was listed meanwhile, the next one to begin finds these removed.
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
        // The state last: if this node does not get that far, the job stays listed, and the next one
        // continues.
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
mod tests;
