//! The running rendezvous: two threads between a store and a launcher.
//!
//! The *agent* does everything: it takes the launcher's orders, writes beats and wishes, reads the state and
//! other nodes' beats, decides, and as folder writes the state. It sleeps in one channel. The *watcher* only
//! waits, on a separate connection, for the key that the agent names, and then wakes the agent. Usually that
//! is `turn/<n>`, which appears when the state has changed in a way that concerns all nodes. For the folder
//! it is the next wish.
//!
//! A wake-up may get lost, because a node that writes a state may die before it writes the key that announces
//! it. So the agent also reads the head with every beat.

#![expect(clippy::disallowed_methods, reason = "owns the threads of the rendezvous, and its clock")]

use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use tenfold_dashboard::job::{
    Ending, Head, JobFailure, Keys, NodeText, Phase, RUNS, Seat, page_of, parse_page,
};
use tenfold_store::{Deadline, ErrorKind, Fault, Request, Response, Store, Value};

use super::inbox::Inbox;
use super::member::{Member, What, Wish};
use super::state::{Change, PAGE_TEXT_MAX, Place, State, View, head_text, parse_head};
use super::{Event, NodeInfo, Order, Settings};

/// How many `turn/<n>` keys are left in the store: a node that is further behind finds the state with its
/// next beat.
const TURNS_KEPT: u64 = 64;
/// Keys that are read with one request.
const KEYS_MAX: usize = 1024;
/// Pages that are written with one request.
const PAGES_WRITTEN_MAX: usize = 64;
/// How often a node reads the head again if it names a page that was replaced meanwhile.
const READS_MAX: usize = 8;
/// While wishes are gathered, the folder looks how many there are this often.
const GATHER_LOOKS: u32 = 8;
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
    /// The key that the watcher waits for has appeared, or it waits no longer.
    Woken,
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
        let (wanted, watched_keys) = channel();
        let watcher =
            Watcher { line: Line::new(watched, &settings), wanted: watched_keys, inbox: inbox.clone() };
        let agent = Agent {
            line: Line::new(store, &settings),
            keys: Keys::new(&settings.run_id),
            messages,
            member: Member::new(settings.clone(), node.clone()),
            settings,
            node,
            text: None,
            view: None,
            folded: None,
            wishes: Vec::new(),
            beat: 0,
            beat_last: Duration::ZERO,
            has_news: false,
            status: serde_json::Value::Array(Vec::new()),
            is_woken: false,
            watch: Watch { wanted, waiting_for: None, came: None },
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

    /// After a lost connection, the request is repeated once, immediately: every request here may be served twice.
    /// A state takes several requests, so a store that loses some of them would otherwise never get one.
    fn ask_for(&mut self, request: Request<'_>, patience: Duration) -> Result<Response, Trouble> {
        let is_wait = matches!(request, Request::Wait { .. });
        let mut answer = self.store.call(request.clone(), Deadline::after(patience));
        if answer.as_ref().is_err_and(|fault| fault.kind == ErrorKind::Lost) && self.broken.is_none() {
            answer = self.store.call(request, Deadline::after(patience));
        }
        match answer {
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

    /// In one step: all of them or none.
    fn set_all(&mut self, pairs: &[(&str, &[u8])]) -> Result<(), Trouble> {
        let pairs = pairs.iter().map(|&(key, value)| (key.as_bytes().into(), value.into())).collect();
        self.ask(Request::MultiSet { pairs }).map(|_| ())
    }

    fn add(&mut self, key: &str, delta: i64) -> Result<u64, Trouble> {
        match self.ask(Request::Add { key: key.as_bytes().into(), delta })? {
            Response::Number(number) => u64::try_from(number).map_err(|_| self.wrong_answer()),
            _ => Err(self.wrong_answer()),
        }
    }

    fn wrong_answer(&self) -> Trouble {
        Trouble::Final(format!("the store at {} sent an unexpected kind of answer", self.store.name()))
    }
}

struct Watcher {
    line: Line,
    wanted: Receiver<String>,
    inbox: Sender<Message>,
}

impl Watcher {
    /// Until the agent has ended, or the store is lost: the agent notices that by itself.
    fn run(mut self) {
        while let Ok(key) = self.wanted.recv() {
            let wait = Request::Wait { keys: vec![key.as_bytes().into()] };
            match self.line.ask_for(wait, self.line.patience) {
                Ok(_) => {}
                Err(Trouble::Passing) if self.line.broken.is_some() => std::thread::park_timeout(RETRY),
                Err(Trouble::Passing) => {}
                Err(Trouble::Final(_)) => return,
            }
            if self.inbox.send(Message::Woken).is_err() {
                return;
            }
        }
    }
}

/// What the watcher waits for.
struct Watch {
    wanted: Sender<String>,
    waiting_for: Option<String>,
    /// The key that it waited for last.
    came: Option<String>,
}

impl Watch {
    /// Makes the watcher wait for this key, as soon as it has ended its present wait. False if it has just
    /// waited for that key: then the store has a problem, or another program left the key there.
    fn wait_for(&mut self, key: String) -> bool {
        if self.waiting_for.is_some() {
            return true;
        }
        if self.came.as_ref() == Some(&key) {
            self.came = None;
            return false;
        }
        let _agent_notices_a_lost_store = self.wanted.send(key.clone());
        self.waiting_for = Some(key);
        true
    }

    fn woken(&mut self) {
        self.came = self.waiting_for.take();
    }
}

/// What the folder has besides its view.
struct Folded {
    state: State,
    inbox: Inbox,
    is_gathering: bool,
}

struct Agent {
    line: Line,
    keys: Keys,
    messages: Receiver<Message>,
    member: Member,
    settings: Settings,
    node: NodeInfo,
    /// The head as it was last read or written, exactly; and what this node sees of that state.
    text: Option<Value>,
    view: Option<View>,
    /// Only if this node is the folder.
    folded: Option<Folded>,
    /// The numbers of its wishes that are in the store.
    wishes: Vec<u64>,
    beat: u64,
    beat_last: Duration,
    /// The launcher reported something about ranks since the last beat.
    has_news: bool,
    status: serde_json::Value,
    /// The watcher has seen its key.
    is_woken: bool,
    watch: Watch,
    started: Instant,
    _alive: Sender<()>,
}

/// What the agent does after a turn.
enum Next {
    Sleep(Option<Duration>),
    Finish,
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
            self.take_messages(wake.map_or(beat_at, |wake: Duration| wake.min(beat_at)), &mut end_at);
            if self.has_news {
                beat_at = beat_at.min(self.beat_last + NEWS);
            }
            // A node that ends with nothing to write is done; otherwise it has a little time for it.
            let has_words = self.member.is_leaving() || self.member.is_over();
            if end_at.is_some_and(|end_at| !has_words || self.now() >= end_at) {
                if has_words {
                    let _others_notice = self.hand_over();
                }
                return Ok(());
            }
            match self.turn(&mut beat_at, end_at.is_some(), events) {
                Ok(Next::Sleep(until)) => wake = until,
                Ok(Next::Finish) => return Ok(()),
                // What was written, and what was not? The beat reads the state.
                Err(Trouble::Passing) => (beat_at, wake) = (self.now() + RETRY, None),
                Err(trouble) => return Err(trouble),
            }
        }
    }

    fn turn(
        &mut self,
        beat_at: &mut Duration,
        is_ending: bool,
        events: &impl Fn(Event),
    ) -> Result<Next, Trouble> {
        let is_beat = self.now() >= *beat_at;
        if is_beat {
            *beat_at = self.now() + self.settings.beat_interval;
            // A frozen node must not take the time after its thaw for that of the beat.
            let sent = Instant::now();
            self.beat()?;
            events(Event::Held(sent + self.settings.lease()));
        } else if std::mem::take(&mut self.is_woken) && self.folded.is_none() {
            let text = self.line.get(&self.keys.state())?;
            self.adopt(text)?;
        }
        let now = self.now();
        let decision = self.member.decide(self.view.as_ref(), now);
        decision.events.into_iter().for_each(events);
        if let Some(claim) = decision.claim {
            self.claim(claim)?;
            return Ok(Next::Sleep(Some(now))); // decide again, after reading the messages
        }
        let mut wake = decision.wake;
        if self.folded.is_some() && !decision.finished {
            let until = self.fold(decision.wish, is_beat).inspect_err(|_| self.fold_again())?;
            wake = wake.into_iter().chain(until).min();
        } else if let Some(wish) = decision.wish {
            self.wish(&wish).inspect_err(|_| self.member.wish_again())?;
        }
        let is_settling = self.folded.as_ref().is_some_and(|folded| !folded.state.settled);
        if decision.finished || (is_ending && self.member.is_over() && !is_settling) {
            return Ok(Next::Finish);
        }
        if !self.watch() {
            let retry = self.now() + RETRY;
            wake = Some(wake.map_or(retry, |wake| wake.min(retry)));
        }
        Ok(Next::Sleep(wake))
    }

    /// Sleeps until `until` or the first message, then takes all messages.
    fn take_messages(&mut self, until: Duration, end_at: &mut Option<Duration>) {
        let mut wait = until.saturating_sub(self.now());
        // A dropped rendezvous has sent `End`; if only the watcher ends, that sender is left.
        while let Ok(message) = self.messages.recv_timeout(wait) {
            wait = Duration::ZERO;
            match message {
                Message::Order(Order::Status(status)) => (self.status, self.has_news) = (status, true),
                Message::Order(order) => self.member.obey(order),
                Message::End => *end_at = Some(self.now() + LAST_WORDS),
                Message::Woken => {
                    self.is_woken = true;
                    self.watch.woken();
                }
            }
        }
    }

    /// Makes the watcher wait for what this node must react to.
    fn watch(&mut self) -> bool {
        let Some(view) = &self.view else { return true };
        match &self.folded {
            Some(folded) if folded.is_gathering => true,
            Some(folded) => self.watch.wait_for(self.keys.wish(folded.inbox.next())),
            None => self.watch.wait_for(self.keys.turn(view.head.turn + 1)),
        }
    }

    // ── what this node reads ───────────────────────────────────────────────────────────────────────────

    /// Writes this node's beat, and reads the head and the other nodes' beats.
    fn beat(&mut self) -> Result<(), Trouble> {
        self.beat += 1;
        (self.beat_last, self.has_news) = (self.now(), false);
        let text = |ranks: &serde_json::Value| {
            let silence_max_seconds = Some(self.settings.silence_max().as_secs_f64());
            let text = NodeText { beat: self.beat, node: self.node.clone(), silence_max_seconds, ranks };
            serde_json::to_vec(&text).map_err(|error| Trouble::Final(error.to_string()))
        };
        let mut value = text(&self.status)?;
        if value.len() > BEAT_MAX {
            value = text(&serde_json::Value::Array(Vec::new()))?;
        }
        let own = [self.keys.node(&self.node.id), self.keys.beat(&self.node.id)];
        self.line.set_all(&[(&own[0], &value), (&own[1], self.beat.to_string().as_bytes())])?;

        let now = self.now(); // before reading, so that what is read is not older
        let state = self.folded.as_ref().map(|folded| &folded.state);
        let ids = self.view.as_ref().map_or(Vec::new(), |view| self.member.listens_to(view, state));
        let is_absent = self.view.as_ref().is_some_and(|view| view.place(&self.node.id) == Place::Absent);
        let mut names = vec![self.keys.state()];
        names.extend(is_absent.then(|| self.keys.answer(&self.node.id)));
        names.extend(ids.iter().map(|id| self.keys.beat(id)));
        let mut values = self.read(&names)?.into_iter();
        let text = values.next().flatten();
        if is_absent && let Some(answer) = values.next().flatten() {
            self.member.refuse(String::from_utf8_lossy(&answer).into_owned());
            for key in own.iter().chain([&self.keys.answer(&self.node.id)]) {
                self.forget(key)?;
            }
        }
        for (id, value) in ids.iter().zip(values) {
            self.member.hear(id, value.and_then(|value| parse_beat(&value)), now);
        }
        if !self.member.has_wish {
            for number in std::mem::take(&mut self.wishes) {
                self.forget(&self.keys.wish(number))?;
            }
        }
        self.adopt(text)
    }

    /// The values of many keys. Empty ones count as missing.
    fn read(&mut self, names: &[String]) -> Result<Vec<Option<Value>>, Trouble> {
        let mut all = Vec::with_capacity(names.len());
        for names in names.chunks(KEYS_MAX) {
            let keys = names.iter().map(|name| name.as_bytes().into()).collect();
            match self.line.ask(Request::MultiGet { keys })? {
                Response::Values(values) if values.len() == names.len() => {
                    all.extend(values.into_iter().map(|value| value.filter(|value| !value.is_empty())));
                }
                _ => return Err(self.line.wrong_answer()),
            }
        }
        Ok(all)
    }

    /// Takes what is in the store for the present head, and reads the rest of what this node must see.
    fn adopt(&mut self, text: Option<Value>) -> Result<(), Trouble> {
        let is_same = text.is_some() && text == self.text;
        let is_folded = |agent: &Agent, head: &Head| {
            agent.folded.as_ref().is_some_and(|folded| folded.state.head == *head)
        };
        if is_same
            && self
                .view
                .as_ref()
                .is_some_and(|view| view.head.folder != self.node.id || is_folded(self, &view.head))
        {
            return Ok(());
        }
        let mut text = text;
        for _ in 0..READS_MAX {
            let Some(found) = text else {
                (self.text, self.view, self.folded) = (None, None, None);
                return Ok(());
            };
            let head = self.parse(&found)?;
            let is_read = match head.folder == self.node.id {
                true => self.read_state(&head)?,
                false => self.read_page(&head)?,
            };
            if is_read {
                let is_created = self.text.replace(found).is_none() && head.version == 1;
                if is_created && self.folded.is_some() {
                    self.list_run();
                }
                return Ok(());
            }
            text = self.line.get(&self.keys.state())?;
        }
        Err(Trouble::Passing)
    }

    fn parse(&self, text: &[u8]) -> Result<Head, Trouble> {
        parse_head(text).map_err(|what| self.not_a_job(&self.keys.state(), &what))
    }

    fn not_a_job(&self, key: &str, what: &str) -> Trouble {
        Trouble::Final(format!(
            "the key `{key}` of the store at {} does not hold the state of a job: {what}\n  \
             hint: use another run id, or check whether another program or another version of tenfold uses that key",
            self.line.store.name()
        ))
    }

    /// Reads the page that this node is in; false if it was replaced meanwhile.
    fn read_page(&mut self, head: &Head) -> Result<bool, Trouble> {
        let index = page_of(&self.node.id, head.pages.len());
        let stamp = head.pages.get(index).copied();
        let known = self.view.as_ref().filter(|view| {
            let pages = &view.head.pages;
            pages.len() == head.pages.len() && pages.get(index).copied() == stamp
        });
        let page = match (known, stamp) {
            (Some(view), _) => Some(view.page.clone()),
            (None, None) => Some(Vec::new()),
            (None, Some(stamp)) => self.seats(&[self.keys.page(index, stamp)])?,
        };
        let failure = match head.failure.filter(|_| head.outcome == Some(Ending::Failed)) {
            Some(stamp) => self.failure(&self.keys.failure(stamp))?,
            None => None,
        };
        let Some(page) = page else { return Ok(false) };
        self.folded = None;
        self.view = Some(View { head: head.clone(), page, failure });
        Ok(true)
    }

    /// Reads the whole state, as its folder; false if it was replaced meanwhile.
    fn read_state(&mut self, head: &Head) -> Result<bool, Trouble> {
        let names: Vec<String> =
            head.pages.iter().enumerate().map(|(index, &stamp)| self.keys.page(index, stamp)).collect();
        let seats = self.seats(&names)?;
        let failure = match head.failure {
            Some(stamp) => self.failure(&self.keys.failure(stamp))?,
            None => None,
        };
        let Some(seats) = seats.filter(|_| failure.is_some() == head.failure.is_some()) else {
            return Ok(false);
        };
        let state = State::assemble(head.clone(), seats, failure)
            .map_err(|what| self.not_a_job(&self.keys.state(), &what))?;
        self.take(state, Inbox::new(head.folded));
        Ok(true)
    }

    /// This is the present state, of which this node is the folder.
    fn take(&mut self, state: State, inbox: Inbox) {
        self.view = Some(state.view(&self.node.id));
        self.folded = Some(Folded { state, inbox, is_gathering: false });
    }

    /// The nodes in these pages; nothing if a page is missing.
    fn seats(&mut self, names: &[String]) -> Result<Option<Vec<Seat>>, Trouble> {
        let mut seats = Vec::new();
        for (name, value) in names.iter().zip(self.read(names)?) {
            let Some(value) = value else { return Ok(None) };
            if value.len() > PAGE_TEXT_MAX {
                let what = format!("it is {} bytes long, the limit is {PAGE_TEXT_MAX}", value.len());
                return Err(self.not_a_job(name, &what));
            }
            seats.extend(parse_page(&value).map_err(|error| self.not_a_job(name, &error.to_string()))?);
        }
        Ok(Some(seats))
    }

    fn failure(&mut self, key: &str) -> Result<Option<JobFailure>, Trouble> {
        let Some(value) = self.line.get(key)? else { return Ok(None) };
        serde_json::from_slice(&value).map(Some).map_err(|error| self.not_a_job(key, &error.to_string()))
    }

    // ── what this node writes ──────────────────────────────────────────────────────────────────────────

    /// Puts a wish among those that the folder will fold.
    fn wish(&mut self, wish: &Wish) -> Result<(), Trouble> {
        let text = serde_json::to_vec(wish).map_err(|error| Trouble::Final(error.to_string()))?;
        let number = self.line.add(&self.keys.wishes(), 1)?;
        // The folder removes the last wish of a node that may exit.
        if !wish.what.is_parting() {
            self.wishes.push(number);
        }
        self.line.set(&self.keys.wish(number), &text)
    }

    /// Writes a head in place of the one that was read: this node begins a job, or takes over as folder.
    fn claim(&mut self, head: Head) -> Result<(), Trouble> {
        let text = self.to_text(&head)?;
        if !self.replace_head(&text)? {
            return Ok(());
        }
        let before = self.view.as_ref().map(|view| &view.head);
        let old = before.filter(|before| before.job != head.job).cloned();
        self.adopt(Some(text.as_slice().into()))?;
        self.announce(head.turn)?;
        for key in old.iter().flat_map(|old| texts(&self.keys, old)).collect::<Vec<_>>() {
            self.forget(&key)?; // of the job before
        }
        Ok(())
    }

    fn to_text(&self, head: &Head) -> Result<Vec<u8>, Trouble> {
        head_text(head).map_err(|what| {
            Trouble::Final(format!(
                "the state of the job `{}` cannot be written: {what}",
                self.settings.run_id
            ))
        })
    }

    /// Writes a head in place of the present one. If another node was quicker, takes what is there.
    fn replace_head(&mut self, text: &[u8]) -> Result<bool, Trouble> {
        let key = self.keys.state();
        let expected = self.text.clone();
        let expected = expected.as_ref().map_or(&b""[..], |text| text);
        let request = Request::CompareSet {
            key: key.as_bytes().into(),
            expected: expected.into(),
            desired: text.into(),
        };
        let Response::Value(Some(found)) = self.line.ask(request)? else {
            return Err(self.line.wrong_answer());
        };
        if *found == *text {
            return Ok(true);
        }
        // If the key was deleted, the expected value is returned.
        let is_deleted = *found == *expected;
        let found = if is_deleted { self.line.get(&key)? } else { Some(found) };
        self.adopt(found)?;
        Ok(false)
    }

    /// Wakes the nodes that wait for this turn.
    fn announce(&mut self, turn: u64) -> Result<(), Trouble> {
        self.line.set(&self.keys.turn(turn), b"1")?;
        if turn > TURNS_KEPT {
            self.forget(&self.keys.turn(turn - TURNS_KEPT))?;
        }
        Ok(())
    }

    /// Folds the wishes that there are, if it is time. Returns when to look again.
    fn fold(&mut self, own: Option<Wish>, is_beat: bool) -> Result<Option<Duration>, Trouble> {
        let count = self.line.add(&self.keys.wishes(), 0)?;
        let now = self.now();
        let Some(folded) = &mut self.folded else { return Ok(None) };
        folded.inbox.counted(count);
        let due = folded.inbox.due(&folded.state, now);
        folded.is_gathering = own.is_none() && !is_beat && due.is_some_and(|due| now < due);
        if let Some(due) = due.filter(|_| folded.is_gathering) {
            let look = now + folded.inbox.gather(&folded.state) / GATHER_LOOKS;
            return Ok(Some(due.min(look.max(now + Duration::from_millis(1)))));
        }
        let (wishes, parting) = self.read_wishes(now)?;
        let wishes: Vec<Wish> = own.into_iter().chain(wishes).collect();
        let Some(folded) = &mut self.folded else { return Ok(None) };
        let fold = self.member.fold(&folded.state, &wishes, folded.inbox.complete(), now);
        folded.inbox.folded(self.settings.silence_max(), now);
        let due = folded.inbox.due(&folded.state, now);
        for (id, text) in fold.answers {
            match id == self.node.id {
                true => self.member.refuse(text),
                false => self.line.set(&self.keys.answer(&id), text.as_bytes())?,
            }
        }
        let Some((next, change)) = fold.next else { return Ok(fold.wake.into_iter().chain(due).min()) };
        if self.write(next, &change)? {
            for number in parting {
                self.forget(&self.keys.wish(number))?;
            }
        }
        Ok(Some(now)) // decide on what was written
    }

    /// Something went wrong after wishes were read: they are still there.
    fn fold_again(&mut self) {
        if let Some(folded) = &mut self.folded {
            folded.inbox = Inbox::new(folded.state.head.folded);
        }
    }

    /// The wishes that the folder has not seen, and the numbers of those that no other node will remove.
    fn read_wishes(&mut self, now: Duration) -> Result<(Vec<Wish>, Vec<u64>), Trouble> {
        let numbers = self.folded.as_ref().map_or(Vec::new(), |folded| folded.inbox.numbers());
        let names: Vec<String> = numbers.iter().map(|&number| self.keys.wish(number)).collect();
        let values = self.read(&names)?;
        let (mut wishes, mut parting) = (Vec::new(), Vec::new());
        for (&number, value) in numbers.iter().zip(values) {
            if let Some(folded) = &mut self.folded {
                folded.inbox.looked(number, value.is_some(), now);
            }
            let wish = value.and_then(|value| serde_json::from_slice::<Wish>(&value).ok());
            let Some(wish) = wish else { continue };
            parting.extend(Some(number).filter(|_| wish.what.is_parting()));
            wishes.push(wish);
        }
        // A node that has left, or is known to be dead, has no beat: a wish of it to join came late.
        let is_join = |wish: &&Wish| matches!(wish.what, What::Join { .. });
        let names: Vec<String> =
            wishes.iter().filter(is_join).map(|wish| self.keys.beat(&wish.node)).collect();
        let mut beats = self.read(&names)?.into_iter();
        wishes.retain(|wish| !is_join(&wish) || beats.next().flatten().is_some());
        Ok((wishes, parting))
    }

    /// Writes the next state; false if this node is not the folder any more.
    fn write(&mut self, next: State, change: &Change) -> Result<bool, Trouble> {
        let json = |error: serde_json::Error| Trouble::Final(error.to_string());
        for pages in change.pages.chunks(PAGES_WRITTEN_MAX) {
            let mut pairs = Vec::new();
            for (index, seats) in pages {
                let key = self.keys.page(*index, change.stamp);
                pairs.push((key, serde_json::to_vec(seats).map_err(json)?));
            }
            let pairs: Vec<(&str, &[u8])> =
                pairs.iter().map(|(key, text)| (key.as_str(), text.as_slice())).collect();
            self.line.set_all(&pairs)?;
        }
        if let Some(failure) = &change.failure {
            let text = serde_json::to_vec(failure).map_err(json)?;
            self.line.set(&self.keys.failure(change.stamp), &text)?;
        }
        let text = self.to_text(&next.head)?;
        if !self.replace_head(&text)? {
            for (index, _) in &change.pages {
                self.forget(&self.keys.page(*index, change.stamp))?;
            }
            return Ok(false);
        }
        self.text = Some(text.as_slice().into());
        match self.folded.take() {
            Some(folded) if next.folder == self.node.id => self.take(next, folded.inbox),
            _ => self.view = Some(next.view(&self.node.id)),
        }
        if let Some(turn) = change.turn {
            self.announce(turn)?;
        }
        self.clean(change)?;
        Ok(true)
    }

    /// Removes what the last write has replaced.
    fn clean(&mut self, change: &Change) -> Result<(), Trouble> {
        for &(index, stamp) in &change.pages_old {
            self.forget(&self.keys.page(index, stamp))?;
        }
        if let Some(stamp) = change.failure_old {
            self.forget(&self.keys.failure(stamp))?;
        }
        // Removed nodes do not beat any more, or will join again.
        for id in &change.removed {
            self.forget(&self.keys.node(id))?;
            self.forget(&self.keys.beat(id))?;
        }
        Ok(())
    }

    /// This node ends: another one has to fold what comes.
    fn hand_over(&mut self) -> Result<(), Trouble> {
        let Some(folded) = self.folded.as_ref().filter(|folded| !folded.state.settled) else { return Ok(()) };
        let next = self.member.hand_over(&folded.state);
        if let Some((next, change)) = next {
            self.write(next, &change)?;
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
        let keys = Keys::new(run);
        let Some(text) = self.line.get(&keys.state())? else { return Ok(true) };
        let Ok(head) = parse_head(&text) else { return Ok(false) };
        if head.phase != Phase::Over || !head.settled {
            return Ok(false);
        }
        // The state last: if this node does not get that far, the job stays listed, and the next one
        // continues.
        let pages: Vec<String> =
            head.pages.iter().enumerate().map(|(index, &stamp)| keys.page(index, stamp)).collect();
        for page in self.read(&pages)?.into_iter().flatten() {
            for seat in parse_page(&page).unwrap_or_default() {
                self.forget(&keys.node(&seat.node.id))?;
                self.forget(&keys.beat(&seat.node.id))?;
            }
        }
        for turn in head.turn.saturating_sub(TURNS_KEPT)..=head.turn {
            self.forget(&keys.turn(turn))?;
        }
        for key in texts(&keys, &head) {
            self.forget(&key)?;
        }
        self.forget(&keys.wishes())?;
        self.forget(&keys.state())?;
        Ok(true)
    }
}

/// The keys that a head names.
fn texts(keys: &Keys, head: &Head) -> Vec<String> {
    let pages = head.pages.iter().enumerate().map(|(index, &stamp)| keys.page(index, stamp));
    pages.chain(head.failure.map(|stamp| keys.failure(stamp))).collect()
}

fn parse_beat(text: &[u8]) -> Option<u64> {
    std::str::from_utf8(text).ok()?.parse().ok()
}

#[cfg(test)]
mod tests;
