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

mod folding;
mod line;

use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use tenfold_dashboard::job::{Ending, Head, JobFailure, Keys, NodeText, Seat, page_of, parse_page};
use tenfold_store::{Request, Response, Store, Value};

use super::inbox::Inbox;
use super::member::{Member, Wish};
use super::state::{PAGE_TEXT_MAX, Place, State, View, parse_head};
use super::{Event, NodeInfo, NodeStatus, Order, Settings};
use line::{Line, Trouble};

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
            status: NodeStatus { ranks: serde_json::Value::Array(Vec::new()), ..NodeStatus::default() },
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
    status: NodeStatus,
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
                Message::Order(Order::Status(status)) => (self.status, self.has_news) = (*status, true),
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
            let (spares, generations) = (self.status.spares.clone(), self.status.generations.clone());
            let node = self.node.clone();
            let text = NodeText { beat: self.beat, node, silence_max_seconds, ranks, spares, generations };
            serde_json::to_vec(&text).map_err(|error| Trouble::Final(error.to_string()))
        };
        let mut value = text(&self.status.ranks)?;
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
