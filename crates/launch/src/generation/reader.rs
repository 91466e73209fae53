//! Reads the generations of a round's ranks on a thread, because a store may take long to answer.
//!
//! The store has no way to wait for a change of a key. So the thread looks when it is asked to, and, while the
//! launcher waits for the next generation, again and again.

#![expect(clippy::disallowed_methods, reason = "a store may block, and ranks' output must not wait for it")]

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use tenfold_store::{Deadline, Fault, Request, Response, Store, TcpStore, TcpStoreOptions, Value};

use super::super::args::Endpoint;
use super::super::crew::Seen;
use super::Generation;

/// From one look to the next while the launcher waits for a generation.
const LOOK_AGAIN: Duration = Duration::from_millis(20);
/// Time for a store to answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// Where to read.
pub(crate) struct Sources {
    /// The ranks' store, and the key of their generation.
    pub(crate) ranks: Endpoint,
    pub(crate) key: String,
    /// The keys there that count ranks which are missing and which have finished, if there are other nodes.
    pub(crate) tally: Option<[String; 2]>,
    /// The launchers' store, and the key that counts what they have started after deaths.
    pub(crate) launchers: Arc<dyn Store>,
    pub(crate) counter: String,
}

enum Ask {
    Look(u64),
    Count(i64),
    Tally([i64; 2]),
    Watch(bool),
}

/// Dropping it ends the thread.
#[derive(Debug)]
pub(crate) struct Reader {
    asks: Sender<Ask>,
}

impl Reader {
    /// `tell` is called on the thread: after each look, and otherwise when a generation has changed.
    pub(crate) fn start(sources: Sources, tell: impl Fn(Seen) + Send + 'static) -> io::Result<Reader> {
        let (asks, asked) = channel();
        let work = Work { sources, ranks: None, launchers: None, look: 0, last: None, finished: 0 };
        let work = move || work.run(&asked, &tell);
        std::thread::Builder::new().name("run-generations".into()).spawn(work)?;
        Ok(Reader { asks })
    }

    /// Asks for a look; it is answered with this number, also if it fails.
    pub(crate) fn look(&self, number: u64) {
        self.ask(Ask::Look(number));
    }

    /// This launcher has started so many processes after deaths; less than 0 if some do not count.
    pub(crate) fn count(&self, delta: i64) {
        self.ask(Ask::Count(delta));
    }

    /// So many more ranks of this node are missing, and have finished.
    pub(crate) fn tally(&self, missing: i64, finished: i64) {
        self.ask(Ask::Tally([missing, finished]));
    }

    /// Whether to look again and again.
    pub(crate) fn watch(&self, is_wanted: bool) {
        self.ask(Ask::Watch(is_wanted));
    }

    fn ask(&self, ask: Ask) {
        let _its_thread_could_not_continue = self.asks.send(ask);
    }
}

struct Work {
    sources: Sources,
    /// Connections of this thread, opened when they are needed, and again after a failure.
    ranks: Option<Arc<dyn Store>>,
    launchers: Option<Arc<dyn Store>>,
    look: u64,
    /// What was read last: the text, and how many ranks have finished.
    last: Option<Value>,
    finished: u64,
}

impl Work {
    fn run(mut self, asked: &Receiver<Ask>, tell: &impl Fn(Seen)) {
        let mut is_watching = false;
        loop {
            let ask = match is_watching {
                true => asked.recv_timeout(LOOK_AGAIN),
                false => asked.recv().map_err(RecvTimeoutError::from),
            };
            match ask {
                Ok(Ask::Look(number)) => {
                    self.look = number;
                    tell(self.read());
                }
                Ok(Ask::Count(delta)) => drop(self.count(delta)), // if the store is lost, the job ends anyway
                Ok(Ask::Tally(deltas)) => drop(self.tally(deltas)), // as above
                Ok(Ask::Watch(is_wanted)) => is_watching = is_wanted,
                Err(RecvTimeoutError::Timeout) => {
                    let before = (self.last.clone(), self.finished);
                    let seen = self.read();
                    if (&self.last, self.finished) != (&before.0, before.1) {
                        tell(seen);
                    }
                }
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    fn read(&mut self) -> Seen {
        let text = self.text();
        let tally = self.tally([0, 0]);
        let replaced = self.count(0);
        let lost = |fault: Fault| format!("the store of its ranks cannot be read: {}", fault.message);
        let counts = tally.and_then(|tally| Ok((tally, replaced?)));
        let [missing, finished] = counts.as_ref().map_or([0, 0], |(tally, _)| *tally);
        let replaced = counts.as_ref().map_or(0, |(_, replaced)| *replaced);
        let generation = match text.and_then(|text| counts.map(|_| text)) {
            Ok(text) => {
                self.finished = finished;
                self.last = text;
                self.last.as_deref().map(Generation::parse).transpose()
            }
            Err(fault) => Err(lost(fault)),
        };
        Seen { look: self.look, generation, replaced, missing, finished }
    }

    fn text(&mut self) -> Result<Option<Value>, Fault> {
        let key = self.sources.key.clone();
        match self.ask_ranks_store(Request::Get { key: key.as_bytes().into() })? {
            Response::Value(value) => Ok(value.filter(|value| !value.is_empty())),
            _ => Ok(None),
        }
    }

    /// Adds to what launchers count for each other, and returns it.
    fn tally(&mut self, deltas: [i64; 2]) -> Result<[u64; 2], Fault> {
        let Some(keys) = self.sources.tally.clone() else { return Ok([0, 0]) };
        let mut counts = [0, 0];
        for ((key, delta), count) in keys.iter().zip(deltas).zip(&mut counts) {
            let request = Request::Add { key: key.as_bytes().into(), delta };
            if let Response::Number(number) = self.ask_ranks_store(request)? {
                *count = u64::try_from(number).unwrap_or(0);
            }
        }
        Ok(counts)
    }

    fn ask_ranks_store(&mut self, request: Request<'_>) -> Result<Response, Fault> {
        let store = match &self.ranks {
            Some(store) => store.clone(),
            None => {
                let Endpoint { host, port } = &self.sources.ranks;
                let options = TcpStoreOptions::new(host.clone(), *port).timeout(PATIENCE);
                let opened = TcpStore::open(options)
                    .map_err(|error| Fault::new(error.kind(), error.message().to_owned()))?;
                self.ranks.insert(Arc::new(opened)).clone()
            }
        };
        store.call(request, Deadline::after(PATIENCE)).inspect_err(|_| self.ranks = None)
    }

    /// Adds to the count of replaced processes, and returns it.
    fn count(&mut self, delta: i64) -> Result<u64, Fault> {
        let store = match &self.launchers {
            Some(store) => store.clone(),
            None => self.launchers.insert(self.sources.launchers.duplicate()?).clone(),
        };
        let key = self.sources.counter.as_bytes().into();
        match store.call(Request::Add { key, delta }, Deadline::after(PATIENCE)) {
            Ok(Response::Number(number)) => Ok(u64::try_from(number).unwrap_or(0)),
            Ok(_) => Ok(0),
            Err(fault) => {
                self.launchers = None;
                Err(fault)
            }
        }
    }
}
