//! A relay: serves the clients of one node, and speaks for all of them to one server.
//!
//! To its clients a relay is a store server: they speak c10d's protocol and notice no difference. To the
//! server it is one connection with a session (`wire/session`): requests of many clients are merged
//! (`relay/merge`), numbered and kept until they are answered (`relay/pipe`). If the connection is lost, the
//! relay connects again, and every request is still executed once. Until then its clients wait, each up to
//! its own timeout.
//!
//! The event loop is the server's (`turns`); `relay/passing` is the part that differs.

#![expect(clippy::disallowed_methods, reason = "owns the relay's thread")]

mod dial;
mod merge;
mod passing;
mod pipe;

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use mio::{Poll, Waker};

#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use self::merge::{Effects, LocalId, Merge, Reply};

use self::dial::{Dialed, Upstream};
use self::passing::Passing;
use crate::listen;
use crate::server::{Limits, WaiterFacts};
use crate::turns::{Loop, WAKE};
use tenfold_base::{Deadline, Fault};

/// How long a caller that inspects the relay waits for an answer.
const FACTS_MAX: Duration = Duration::from_secs(10);

/// Where to listen, and which server to speak to.
#[derive(Debug)]
#[non_exhaustive]
pub struct RelayOptions {
    /// A name or address of this machine to listen on.
    pub host: String,
    /// 0 picks a free one.
    pub port: u16,
    /// Name or address of the server.
    pub upstream_host: String,
    /// Port of the server.
    pub upstream_port: u16,
    /// How long the first connection to the server may take.
    pub connect_timeout: Duration,
    /// What clients may make the relay hold.
    pub limits: Limits,
}

impl RelayOptions {
    /// A relay on a free port of loopback.
    pub fn new(upstream_host: impl Into<String>, upstream_port: u16) -> Self {
        RelayOptions {
            host: "127.0.0.1".into(),
            port: 0,
            upstream_host: upstream_host.into(),
            upstream_port,
            connect_timeout: Duration::from_secs(60),
            limits: Limits::default(),
        }
    }

    #[must_use]
    /// Listens on this address.
    pub fn listen(mut self, host: impl Into<String>, port: u16) -> Self {
        self.host = host.into();
        self.port = port;
        self
    }

    #[must_use]
    /// Sets [`RelayOptions::connect_timeout`](Self#structfield.connect_timeout).
    pub fn connect_timeout(mut self, limit: Duration) -> Self {
        self.connect_timeout = limit;
        self
    }

    #[must_use]
    /// Sets the limits.
    pub fn limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }
}

/// What a relay reports about itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RelayFacts {
    /// Where it listens.
    pub address: String,
    /// The server.
    pub upstream: String,
    /// Is it connected to the server?
    pub is_connected: bool,
    /// How often it has connected to the server again.
    pub reconnects: u64,
    /// Clients that are connected.
    pub connections: usize,
    /// Connections accepted since the start.
    pub accepted: u64,
    /// Connections that the relay closed.
    pub closed: u64,
    /// Bytes received from clients since the start.
    pub bytes_in: u64,
    /// Bytes sent to clients since the start.
    pub bytes_out: u64,
    /// Requests of clients since the start.
    pub requests: u64,
    /// Requests sent to the server in this session. Fewer, because requests are merged.
    pub requests_sent: u64,
    /// Requests that are not answered yet, other than waits.
    pub under_way: usize,
    /// Waits that are being registered at the server.
    pub registering: usize,
    /// Clients that wait.
    pub waiting: usize,
    /// Waits that the server has for them.
    pub waits: usize,
}

/// A running relay. Dropping it stops it.
///
/// ```
/// use tenfold_store::{Relay, RelayOptions, Server, ServerOptions, StoreExt, TcpStore};
///
/// let server = Server::start(ServerOptions::new("127.0.0.1", 0))?;
/// let relay = Relay::start(RelayOptions::new("127.0.0.1", server.address().port()))?;
/// let store = TcpStore::connect("127.0.0.1", relay.address().port())?;
/// assert_eq!(store.add("ranks", 1)?, 1);
/// assert_eq!(server.facts().connections, 1);
/// # Ok::<(), tenfold_store::Error>(())
/// ```
#[derive(Debug)]
pub struct Relay {
    addresses: Vec<SocketAddr>,
    upstream: SocketAddr,
    orders: mpsc::Sender<Order>,
    waker: Arc<Waker>,
    stopping: Arc<AtomicBool>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

enum Order {
    Tell(mpsc::Sender<RelayFacts>),
    Waiters(mpsc::Sender<Vec<WaiterFacts>>),
    Connected(Box<Dialed>),
    Stop { grace: Duration },
}

impl Relay {
    /// Connects to the server, listens, and serves on a separate thread.
    pub fn start(options: RelayOptions) -> crate::Result<Relay> {
        let start = Deadline::after(options.connect_timeout);
        let name = format!("{}:{}", options.upstream_host, options.upstream_port);
        Relay::try_start(options, start).map_err(|fault| crate::ops::failure("relay", &name, start, fault))
    }

    fn try_start(options: RelayOptions, deadline: Deadline) -> Result<Relay, Fault> {
        let listeners = listen::listen(&options.host, options.port)?;
        let addresses = listeners.iter().map(TcpListener::local_addr).collect::<io::Result<Vec<_>>>();
        let addresses =
            addresses.map_err(|error| Fault::io("cannot read the address of a listening socket", error))?;
        let upstream = Upstream { host: options.upstream_host, port: options.upstream_port };
        let token = passing::new_token();
        let dialed = upstream.dial(&pipe::Pipe::new(token).hello(), deadline)?;
        let server = dialed
            .stream
            .peer_addr()
            .map_err(|error| Fault::io("cannot read the address of the store server", error))?;
        let (orders, inbox) = mpsc::channel();
        let stopping = Arc::new(AtomicBool::new(false));
        let build = || -> io::Result<(Loop<Passing>, Arc<Waker>)> {
            let poll = Poll::new()?;
            let waker = Arc::new(Waker::new(poll.registry(), WAKE)?);
            let line = dial::Line {
                upstream,
                orders: orders.clone(),
                waker: waker.clone(),
                stopping: stopping.clone(),
            };
            let mut front =
                Loop::new(Passing::new(token, line), poll, listeners, inbox, options.limits, addresses[0])?;
            front.connected(dialed);
            Ok((front, waker))
        };
        let (front, waker) = build().map_err(|error| Fault::io("cannot set up the event loop", error))?;
        let thread = std::thread::Builder::new()
            .name("tenfold-relay".into())
            .spawn(move || front.run())
            .map_err(|error| Fault::io("cannot start the relay's thread", error))?;
        let thread = Mutex::new(Some(thread));
        Ok(Relay { addresses, upstream: server, orders, waker, stopping, thread })
    }

    /// The first address it listens on.
    pub fn address(&self) -> SocketAddr {
        self.addresses[0]
    }

    /// Every address it listens on.
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }

    /// The address of the server that it connected to at the start.
    pub fn upstream_address(&self) -> SocketAddr {
        self.upstream
    }

    /// Whether only this machine can reach it.
    pub fn is_private(&self) -> bool {
        self.addresses.iter().all(|address| listen::is_private(address.ip()))
    }

    /// What it reports about itself now; all zero after it has stopped.
    pub fn facts(&self) -> RelayFacts {
        self.ask(Order::Tell)
    }

    /// Which of its clients waits for which keys, and for how long; none after it has stopped. A relay does
    /// not know which of several keys exist already, so it names all of them.
    pub fn waiters(&self) -> Vec<WaiterFacts> {
        self.ask(Order::Waiters)
    }

    fn ask<T: Default>(&self, order: fn(mpsc::Sender<T>) -> Order) -> T {
        let (answer, answers) = mpsc::channel();
        let asked = self.orders.send(order(answer)).is_ok() && self.waker.wake().is_ok();
        if asked { answers.recv_timeout(FACTS_MAX).unwrap_or_default() } else { T::default() }
    }

    /// Accepts no new clients, serves the connected ones until they have left or `grace` has passed, and
    /// stops. If they have left in time, the server has executed all that they asked for when this returns, or
    /// will never execute it because the connection to it was lost.
    pub fn shutdown(&self, grace: Duration) {
        let Some(thread) = self.thread.lock().expect("nothing panics while holding it").take() else {
            return;
        };
        self.stopping.store(true, Ordering::Relaxed);
        if self.orders.send(Order::Stop { grace }).is_ok() {
            let _ = self.waker.wake(); // fails only if the loop has ended already
        }
        let _ = thread.join(); // a panic has already been printed
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.shutdown(Duration::ZERO);
    }
}
