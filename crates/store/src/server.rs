//! The public interface of the store server: options, facts, start and end.
//!
//! No client can harm another. Whatever a client sends or does not send, reads or does not read, costs only
//! its own connection and bounded memory: see [`Limits`]. The reason goes to the log and a counter, because
//! the protocol has no way to tell the client.
//!
//! Not here: the event loop (`turns`), what requests mean (`table`), what bytes mean (`wire`).

#![expect(clippy::disallowed_methods, reason = "owns the server's thread")]

mod dear;
mod roll;
mod serving;
mod slow;
mod surveys;

use std::collections::BTreeMap;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use mio::{Poll, Waker};
use serde::{Deserialize, Serialize};

use crate::listen;
use crate::survey::Survey;
use crate::table::TableLimits;
use crate::turns::{Loop, WAKE};
use crate::value::Value;
use crate::wire::MessageLimits;
use roll::Rolled;
use serving::Serving;
use surveys::Surveyed;
use tenfold_base::{ErrorKind, Fault};

pub use roll::{ClientFacts, Clients};
pub use slow::SlowOperation;

/// How long a caller that inspects the server waits for an answer.
const ANSWER_MAX: Duration = Duration::from_secs(2);
/// The same for facts, which any server that is alive returns immediately.
const FACTS_MAX: Duration = Duration::from_secs(10);

/// Limits on what a server holds and how long it waits. Each refusal closes the connection that caused it,
/// with a line in the log and a counter in [`Facts::closed`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// Parts of one message.
    pub message: MessageLimits,
    /// What the table may hold; its bytes are also the limit for table and connections together.
    pub table: TableLimits,
    /// Clients at a time; further ones are closed when they connect.
    pub connections: usize,
    /// Clients at a time from one address other than loopback (for IPv6, from one /64 network), so that no
    /// single host takes all connections.
    pub connections_per_address: usize,
    /// Also serve clients on this machine's loopback that belong to other users. Root's are always served.
    pub other_users: bool,
    /// Unsent bytes of one connection beyond which its requests are not served until it reads.
    pub output: usize,
    /// Time from connecting to the magic words.
    pub handshake_timeout: Duration,
    /// Time from the first byte of a message to its last.
    pub message_timeout: Duration,
    /// Time in which the peer does not take a single byte of what it asked for.
    pub write_timeout: Duration,
    /// How long a relay's session is kept while the relay has no connection.
    pub session_timeout: Duration,
}

impl Limits {
    /// At most this many connections, of which one address may have seven eighths.
    #[must_use]
    pub fn with_connections(mut self, connections: usize) -> Self {
        self.connections = connections;
        self.connections_per_address = connections - connections / 8;
        self
    }
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            message: MessageLimits::default(),
            table: TableLimits::default(),
            connections: 16 << 10,
            connections_per_address: 14 << 10,
            other_users: true,
            output: 16 << 20,
            handshake_timeout: Duration::from_secs(10),
            message_timeout: Duration::from_secs(60),
            write_timeout: Duration::from_secs(30),
            session_timeout: Duration::from_secs(300),
        }
    }
}

/// Where and how to serve.
#[derive(Debug)]
#[non_exhaustive]
pub struct ServerOptions {
    /// A name or address of this machine; the server listens there and nowhere else. `0.0.0.0` or `::` for all.
    pub host: String,
    /// 0 picks a free one.
    pub port: u16,
    /// A socket that is bound already. Then `host` is ignored, and `port` must be 0 or the socket's.
    pub listener: Option<TcpListener>,
    /// What clients may make it hold.
    pub limits: Limits,
}

impl ServerOptions {
    /// A server at `host`:`port`.
    pub fn new(host: impl Into<String>, port: u16) -> Self {
        ServerOptions { host: host.into(), port, listener: None, limits: Limits::default() }
    }

    #[must_use]
    /// Listens on a socket that is bound already.
    pub fn listener(mut self, listener: TcpListener) -> Self {
        self.listener = Some(listener);
        self
    }

    #[must_use]
    /// Sets the limits.
    pub fn limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }
}

/// Why the server closed a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Closed {
    /// A second wait while one is pending.
    AlreadyWaiting,
    /// Too many connections, or no descriptor left for one more.
    Connections,
    /// The table is full.
    Full,
    /// The first message was not the magic words.
    Handshake,
    /// The magic words did not arrive in time.
    HandshakeTimeout,
    /// Table and buffers together are at the memory limit.
    Memory,
    /// A started message was not finished in time.
    MessageTimeout,
    /// `add` or `barrier` on a value that is not a number.
    NotANumber,
    /// A relay broke a rule of its session.
    Session,
    /// A length over its limit.
    TooLong,
    /// Unknown opcode.
    UnknownOpcode,
    /// The server of a relay refused the request.
    Upstream,
    /// The client is on this machine and belongs to another user.
    User,
    /// The client did not read what it asked for.
    WriteTimeout,
}

/// What a server reports about itself. As JSON it is the answer to INFO on the wire: fields are only ever
/// added, and fields that an older server does not send are zero.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct Facts {
    /// Where it listens.
    pub address: String,
    /// How long it has run.
    pub uptime_seconds: f64,
    /// Clients that are connected.
    pub connections: usize,
    /// The limit of them.
    pub connections_max: usize,
    /// Connections accepted since the start.
    pub accepted: u64,
    /// Connections that the server closed, by reason.
    pub closed: BTreeMap<Closed, u64>,
    /// Operations served since the start, by name; operations never requested are omitted.
    pub operations: BTreeMap<String, u64>,
    /// Bytes received since the start.
    pub bytes_in: u64,
    /// Bytes sent since the start.
    pub bytes_out: u64,
    /// Keys that exist.
    pub keys: usize,
    /// The limit of them.
    pub keys_max: usize,
    /// Items in all queues.
    pub queue_items: usize,
    /// The limit of them.
    pub queue_items_max: usize,
    /// Sessions of relays, with or without a connection.
    pub sessions: usize,
    /// Bytes of keys, values, queues and waiters.
    pub table_bytes: usize,
    /// Bytes of incomplete messages and unsent replies.
    pub buffer_bytes: usize,
    /// The limit of bytes.
    pub memory_max: usize,
    /// Clients that wait.
    pub waiters_count: usize,
    /// How long the longest wait has lasted; zero if no client waits.
    pub oldest_wait_seconds: f64,
    /// Which client waits for which keys, and since when: the longest wait first, at most
    /// [`Facts::WAITERS_MAX`].
    pub waiters: Vec<WaiterFacts>,
}

impl Facts {
    /// How many waiters are listed one by one.
    pub const WAITERS_MAX: usize = 1000;
}

/// One waiting client.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct WaiterFacts {
    /// Its address.
    pub peer: String,
    /// What it waits in.
    pub operation: String,
    /// The first few missing keys, in readable form.
    pub keys: String,
    /// How many keys are missing.
    pub keys_count: usize,
    /// How long it has waited.
    pub seconds: f64,
}

/// A running server. Dropping it stops it.
///
/// ```
/// use tenfold_store::{Server, ServerOptions, StoreExt, TcpStore};
///
/// let server = Server::start(ServerOptions::new("127.0.0.1", 0))?;
/// let store = TcpStore::connect("127.0.0.1", server.address().port())?;
/// store.set("greeting", "hello")?;
/// assert_eq!(&*store.get("greeting")?, b"hello");
/// assert_eq!(server.facts().keys, 1);
/// # Ok::<(), tenfold_store::Error>(())
/// ```
#[derive(Debug)]
pub struct Server {
    addresses: Vec<SocketAddr>,
    orders: mpsc::Sender<Order>,
    waker: Arc<Waker>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

enum Order {
    Tell { waiters: usize, answer: mpsc::Sender<Facts> },
    Values { keys: Vec<Value>, answer: mpsc::Sender<Vec<Option<Value>>> },
    Forget { all_but: Value, answer: mpsc::Sender<usize> },
    Slowest(mpsc::Sender<Vec<SlowOperation>>),
    Clients { limit: usize, answer: mpsc::Sender<Rolled> },
    Survey { prefix: Value, answer: mpsc::Sender<Surveyed> },
    Stop { grace: Duration },
}

impl Server {
    /// Binds, listens, and serves on a separate thread.
    pub fn start(options: ServerOptions) -> crate::Result<Server> {
        let name = format!("{}:{}", options.host, options.port);
        let start = crate::Deadline::never();
        Server::try_start(options).map_err(|fault| crate::ops::failure("serve", &name, start, fault))
    }

    pub(crate) fn try_start(options: ServerOptions) -> Result<Server, Fault> {
        let listeners = match options.listener {
            None => listen::listen(&options.host, options.port)?,
            Some(listener) => vec![adopt_listener(listener, options.port)?],
        };
        let addresses = listeners.iter().map(TcpListener::local_addr).collect::<io::Result<Vec<_>>>();
        let addresses =
            addresses.map_err(|error| Fault::io("cannot read the address of a listening socket", error))?;
        let build = || -> io::Result<(Loop<Serving>, Arc<Waker>, mpsc::Sender<Order>)> {
            let poll = Poll::new()?;
            let waker = Arc::new(Waker::new(poll.registry(), WAKE)?);
            let (orders, inbox) = mpsc::channel();
            let server = Loop::new(
                Serving::new(&options.limits),
                poll,
                listeners,
                inbox,
                options.limits,
                addresses[0],
            )?;
            Ok((server, waker, orders))
        };
        let (server, waker, orders) =
            build().map_err(|error| Fault::io("cannot set up the event loop", error))?;
        let thread = std::thread::Builder::new()
            .name("tenfold-store".into())
            .spawn(move || server.run())
            .map_err(|error| Fault::io("cannot start the server's thread", error))?;
        tracing::debug!(address = %addresses[0], "store server listening");
        Ok(Server { addresses, orders, waker, thread: Mutex::new(Some(thread)) })
    }

    /// The first address it listens on.
    pub fn address(&self) -> SocketAddr {
        self.addresses[0]
    }

    /// Every address it listens on.
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }

    /// Whether only this machine can reach it.
    pub fn is_private(&self) -> bool {
        self.addresses.iter().all(|address| listen::is_private(address.ip()))
    }

    /// What it reports about itself now; all zero after it has stopped.
    pub fn facts(&self) -> Facts {
        self.facts_with(Facts::WAITERS_MAX)
    }

    /// The same with at most `waiters` waiters listed. Listing them is most of the work: each takes the
    /// server about as long as a request.
    pub fn facts_with(&self, waiters: usize) -> Facts {
        self.ask(FACTS_MAX, |answer| Order::Tell { waiters, answer }).unwrap_or_default()
    }

    /// The connected clients: the most recently active first, at most `limit` and [`Clients::LIMIT_MAX`].
    /// Nothing if the server has stopped, or is too busy to answer within two seconds.
    pub fn clients(&self, limit: usize) -> Option<Clients> {
        let limit = limit.min(Clients::LIMIT_MAX);
        self.ask(ANSWER_MAX, |answer| Order::Clients { limit, answer }).map(Rolled::show)
    }

    /// The slowest operations of the last five to ten minutes, the slowest first. Empty in the same cases as
    /// `clients`.
    pub fn slowest(&self) -> Vec<SlowOperation> {
        self.ask(ANSWER_MAX, Order::Slowest).unwrap_or_default()
    }

    /// Keys under a prefix. Nothing in the same cases as `clients`, or if it takes longer than two seconds:
    /// with millions of keys and busy clients, or with many prefixes requested at the same time. The survey
    /// still completes and is ready for the next request.
    pub fn survey(&self, prefix: &[u8]) -> Option<Survey> {
        self.survey_within(prefix, ANSWER_MAX)
    }

    /// As [`Server::survey`], with another limit.
    pub fn survey_within(&self, prefix: &[u8], patience: Duration) -> Option<Survey> {
        let surveyed = self.ask(patience, |answer| Order::Survey { prefix: prefix.into(), answer })?;
        Some(surveyed.show(prefix))
    }

    /// The value of a key; nothing if it does not exist, or in the same cases as `clients`.
    pub fn value(&self, key: &[u8]) -> Option<Value> {
        self.values(vec![key.into()])?.pop().flatten()
    }

    /// The values of keys, all of the same moment; nothing in the same cases as `clients`.
    pub fn values(&self, keys: Vec<Value>) -> Option<Vec<Option<Value>>> {
        self.ask(ANSWER_MAX, |answer| Order::Values { keys, answer })
    }

    /// Removes all keys and queues that do not begin with `prefix`, as if they had never existed. Returns how
    /// many, or nothing if the server did not finish within `patience`. Clients are served meanwhile, and
    /// what they write may be removed too. For a host whose store serves one job after another.
    pub fn forget_all_but(&self, prefix: &[u8], patience: Duration) -> Option<usize> {
        self.ask(patience, |answer| Order::Forget { all_but: prefix.into(), answer })
    }

    /// Sends the loop a question and waits for the answer, up to a limit.
    fn ask<T>(&self, patience: Duration, order: impl FnOnce(mpsc::Sender<T>) -> Order) -> Option<T> {
        let (answer, answers) = mpsc::channel();
        let asked = self.orders.send(order(answer)).is_ok() && self.waker.wake().is_ok();
        if asked { answers.recv_timeout(patience).ok() } else { None }
    }

    /// Accepts no new clients, serves the connected ones until they have left or `grace` has passed, answers
    /// what has arrived, and stops.
    pub fn shutdown(&self, grace: Duration) {
        let Some(thread) = self.thread.lock().expect("nothing panics while holding it").take() else {
            return;
        };
        if self.orders.send(Order::Stop { grace }).is_ok() {
            let _ = self.waker.wake(); // fails only if the loop has ended already
        }
        let _ = thread.join(); // a panic has already been printed
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shutdown(Duration::ZERO);
    }
}

fn adopt_listener(listener: TcpListener, port: u16) -> Result<TcpListener, Fault> {
    let bound =
        listener.local_addr().map_err(|error| Fault::io("the given listening socket is unusable", error))?;
    if port != 0 && bound.port() != port {
        return Err(Fault::new(
            ErrorKind::Argument,
            format!("the given listening socket is bound to port {}, expected port {port}", bound.port()),
        ));
    }
    listen::adopt(listener).map_err(|error| Fault::io(format!("cannot listen on {bound}"), error))
}
