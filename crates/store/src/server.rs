//! The store server: one thread, one poll loop, many connections, around one [`Table`].
//!
//! A turn of the loop: bytes are read, every whole message among them is applied to the table, the replies (to the
//! client that asked, and to parked ones whose wait ended) are encoded into each connection's output, and what can be
//! written is written. There is no lock and no task: a waiting client is an entry in the table.
//!
//! No client can harm another. Whatever it sends or does not send, read or does not read, costs it its own connection
//! and bounded memory: see [`Limits`]. The reason goes to the log and a counter; the protocol has no way to tell the
//! client.
//!
//! Not here: what requests mean (`table`), what bytes mean (`wire`), how buffers work (`connection`).

#![expect(clippy::disallowed_methods, reason = "the edge: reads the clock once a turn, owns the thread")]

use std::collections::BTreeMap;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use mio::{Events, Interest, Poll, Token, Waker};
use serde::{Deserialize, Serialize};

use crate::connection::{Connection, Pool};
use crate::error::{Fault, FaultKind, show_duration};
use crate::listen;
use crate::request::{Operation, Request, Response, show_keys};
use crate::table::{ClientId, Refusal, Replies, Table, TableLimits};
use crate::wire::{self, Command, Decoded, Malformed, MessageLimits};

/// What one server may be made to hold and to wait for. Each refusal closes the connection that caused it, with a line
/// in the log and a counter in [`Facts::closed`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// Parts of one message.
    pub message: MessageLimits,
    /// What the table holds; its bytes are also the limit for table and connections together.
    pub table: TableLimits,
    /// Clients at a time; more are closed as they come.
    pub connections: usize,
    /// Unsent bytes of one connection beyond which its requests are not served until it reads.
    pub output: usize,
    /// From connecting to the magic words.
    pub handshake_timeout: Duration,
    /// From the first byte of a message to its last.
    pub message_timeout: Duration,
    /// Without the peer taking a single byte of what it asked for.
    pub write_timeout: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            message: MessageLimits::default(),
            table: TableLimits::default(),
            connections: 16 << 10,
            output: 16 << 20,
            handshake_timeout: Duration::from_secs(10),
            message_timeout: Duration::from_secs(60),
            write_timeout: Duration::from_secs(30),
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
    /// A socket that is bound already; `host` is then not used, and `port` must be 0 or the socket's.
    pub listener: Option<TcpListener>,
    pub limits: Limits,
}

impl ServerOptions {
    pub fn new(host: impl Into<String>, port: u16) -> Self {
        ServerOptions { host: host.into(), port, listener: None, limits: Limits::default() }
    }

    #[must_use]
    pub fn listener(mut self, listener: TcpListener) -> Self {
        self.listener = Some(listener);
        self
    }

    #[must_use]
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
    /// The magic words did not come in time.
    HandshakeTimeout,
    /// Table and buffers together are at the memory limit.
    Memory,
    /// A started message was not finished in time.
    MessageTimeout,
    /// `add` or `barrier` on a value that is no number.
    NotANumber,
    /// A length over its limit.
    TooLong,
    /// No such opcode.
    UnknownOpcode,
    /// The client did not read what it asked for.
    WriteTimeout,
}

/// What a server can tell about itself.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Facts {
    pub address: String,
    pub uptime_seconds: f64,
    pub connections: usize,
    pub connections_max: usize,
    /// Connections accepted since the start.
    pub accepted: u64,
    /// Connections that the server closed, by reason.
    pub closed: BTreeMap<Closed, u64>,
    /// Operations served since the start, by name; those that were never asked for are left out.
    pub operations: BTreeMap<String, u64>,
    pub bytes_in: u64,
    pub bytes_out: u64,
    pub keys: usize,
    pub queue_items: usize,
    /// Bytes of keys, values, queues and waiters.
    pub table_bytes: usize,
    /// Bytes of half messages and unsent replies.
    pub buffer_bytes: usize,
    pub memory_max: usize,
    pub waiters_count: usize,
    /// Who waits for what, since when: the longest first, at most [`Facts::WAITERS_MAX`].
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
    pub peer: String,
    pub operation: String,
    /// The first few keys that are missing, as a person can read them.
    pub keys: String,
    pub keys_count: usize,
    pub seconds: f64,
}

/// A running server. Dropping it ends it.
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
    Tell(mpsc::Sender<Facts>),
    Stop { grace: Duration },
}

impl Server {
    /// Binds, listens, and serves on a thread of its own.
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
            addresses.map_err(|error| Fault::io("cannot tell the address of a listening socket", error))?;
        let build = || -> io::Result<(Loop, Arc<Waker>, mpsc::Sender<Order>)> {
            let poll = Poll::new()?;
            let waker = Arc::new(Waker::new(poll.registry(), WAKE)?);
            let (orders, inbox) = mpsc::channel();
            let server = Loop::new(poll, listeners, inbox, options.limits, addresses[0])?;
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

    /// Can nobody but this machine reach it?
    pub fn is_private(&self) -> bool {
        self.addresses.iter().all(|address| listen::is_private(address.ip()))
    }

    /// What it can tell about itself now; all zero after the end.
    pub fn facts(&self) -> Facts {
        let (answer, facts) = mpsc::channel();
        let asked = self.orders.send(Order::Tell(answer)).is_ok() && self.waker.wake().is_ok();
        if asked { facts.recv().unwrap_or_default() } else { Facts::default() }
    }

    /// Accepts nobody new, serves those that are there until they have left or `grace` has passed, answers what has
    /// arrived, and ends.
    pub fn shutdown(&self, grace: Duration) {
        let Some(thread) = self.thread.lock().expect("nothing panics while holding it").take() else {
            return;
        };
        if self.orders.send(Order::Stop { grace }).is_ok() {
            let _ = self.waker.wake(); // fails only if the loop is gone, and then so is the wish
        }
        let _ = thread.join(); // a panic there was printed there
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shutdown(Duration::ZERO);
    }
}

fn adopt_listener(listener: TcpListener, port: u16) -> Result<TcpListener, Fault> {
    let bound =
        listener.local_addr().map_err(|error| Fault::io("the listening socket given is unusable", error))?;
    if port != 0 && bound.port() != port {
        return Err(Fault::new(
            FaultKind::Argument,
            format!("the listening socket given is bound to port {}, expected port {port}", bound.port()),
        ));
    }
    listen::adopt(listener).map_err(|error| Fault::io(format!("cannot listen on {bound}"), error))
}

// ── the loop ───────────────────────────────────────────────────────────────────────────────────────────────

const WAKE: Token = Token(usize::MAX);
/// Listeners' tokens count down from here.
const LISTENERS: usize = usize::MAX - 1;
const LISTENERS_MAX: usize = 64;

/// One read of a connection, and so the most work one client gets before the next one has its turn.
const READ: usize = 64 << 10;
/// A client whose dear request has taken the server to this point of a round lets others go on.
const SHARE: Duration = Duration::from_millis(1);
/// Reads in a row for a message that is longer than one: its bytes cost little until it is whole.
const READS_OF_LONG_MESSAGE: usize = 16;
/// Connections accepted before clients that are here already have their turn again.
const ACCEPTS: usize = 128;
/// An idle connection keeps an input buffer up to this size for its next message.
const INPUT_KEPT: usize = 256;
/// How often deadlines are looked at, unless a limit is shorter than that.
const TICK: Duration = Duration::from_secs(1);
/// How long accepting rests when there are no descriptors.
const ACCEPT_REST: Duration = Duration::from_millis(50);
/// Log lines a second about closed connections; more are counted and summed up.
const LOG_LINES: u32 = 10;

struct Loop {
    poll: Poll,
    listeners: Vec<mio::net::TcpListener>,
    inbox: mpsc::Receiver<Order>,
    limits: Limits,
    tick: Duration,
    address: SocketAddr,
    table: Table,
    connections: Vec<Option<Box<Connection>>>,
    free: Vec<usize>,
    count: usize,
    pool: Pool,
    replies: Replies,
    /// Connections that got a reply through somebody else's request.
    woken: Vec<usize>,
    /// Connections that had more to say than one turn allows.
    again: Vec<usize>,
    accept_again: Option<Instant>,
    /// Given up to accept and close one connection when there are no descriptors left.
    spare: Option<std::fs::File>,
    buffered: usize,
    now: Instant,
    started: Instant,
    stop_at: Option<Instant>,
    counters: Counters,
    log: LogBudget,
}

#[derive(Debug, Default)]
struct Counters {
    accepted: u64,
    closed: BTreeMap<Closed, u64>,
    operations: [u64; Operation::ALL.len()],
    bytes_in: u64,
    bytes_out: u64,
}

/// Why a connection ends.
enum End {
    /// It left, or the network took it.
    Left,
    /// The server will not have it any longer.
    Refused(Closed, String),
}

impl Loop {
    fn new(
        poll: Poll,
        listeners: Vec<TcpListener>,
        inbox: mpsc::Receiver<Order>,
        limits: Limits,
        address: SocketAddr,
    ) -> io::Result<Self> {
        let mut listeners: Vec<_> = listeners.into_iter().map(mio::net::TcpListener::from_std).collect();
        assert!(listeners.len() <= LISTENERS_MAX, "a name has fewer addresses than that");
        for (index, listener) in listeners.iter_mut().enumerate() {
            poll.registry().register(listener, Token(LISTENERS - index), Interest::READABLE)?;
        }
        let shortest = limits.handshake_timeout.min(limits.message_timeout).min(limits.write_timeout);
        let now = Instant::now();
        Ok(Loop {
            poll,
            listeners,
            inbox,
            limits,
            tick: TICK.min(shortest / 4).max(Duration::from_millis(1)),
            address,
            table: Table::new(limits.table),
            connections: Vec::new(),
            free: Vec::new(),
            count: 0,
            pool: Pool::default(),
            replies: Vec::new(),
            woken: Vec::new(),
            again: Vec::new(),
            accept_again: None,
            spare: std::fs::File::open("/dev/null").ok(),
            buffered: 0,
            now,
            started: now,
            stop_at: None,
            counters: Counters::default(),
            log: LogBudget::new(now),
        })
    }

    fn run(mut self) {
        let mut events = Events::with_capacity(1024);
        let mut buffer = vec![0; READ];
        let mut next_tick = self.now + self.tick;
        loop {
            if let Err(error) = self.poll.poll(&mut events, self.patience(next_tick))
                && error.kind() != io::ErrorKind::Interrupted
            {
                tracing::error!(%error, "the store server cannot poll and ends");
                return;
            }
            self.now = Instant::now();
            let mut orders = false;
            for event in &events {
                match event.token() {
                    WAKE => orders = true,
                    Token(token) if token > LISTENERS - LISTENERS_MAX => self.accept_again = Some(self.now),
                    Token(slot) => {
                        if event.is_writable() {
                            self.flush(slot);
                        }
                        if event.is_readable() || event.is_read_closed() || event.is_error() {
                            self.hear(slot, event.is_read_closed());
                            self.serve(slot, &mut buffer);
                        }
                    }
                }
            }
            for slot in std::mem::take(&mut self.again) {
                self.serve(slot, &mut buffer);
            }
            if self.accept_again.is_some_and(|at| at <= self.now) {
                self.accept();
            }
            if orders {
                self.obey();
            }
            if self.now >= next_tick {
                next_tick = self.now + self.tick;
                self.tick();
            }
            if self.stop_at.is_some_and(|at| self.count == 0 || self.now >= at) {
                self.last_words(&mut buffer);
                return;
            }
        }
    }

    /// How long there is nothing to do unless something happens.
    fn patience(&self, next_tick: Instant) -> Option<Duration> {
        if !self.again.is_empty() {
            return Some(Duration::ZERO);
        }
        let tick = (self.count > 0 || self.log.suppressed > 0).then_some(next_tick);
        let next = [tick, self.accept_again, self.stop_at].into_iter().flatten().min();
        next.map(|at| at.saturating_duration_since(self.now))
    }

    // ── one connection's turn ──────────────────────────────────────────────────────────────────────────

    fn hear(&mut self, slot: usize, peer_is_done: bool) {
        if let Some(Some(connection)) = self.connections.get_mut(slot) {
            connection.readable = true;
            connection.peer_is_done |= peer_is_done;
        }
    }

    fn serve(&mut self, slot: usize, buffer: &mut [u8]) {
        // Taken out of the list while it has its turn, so that replies to others can be written meanwhile.
        let Some(connection) = self.connections.get_mut(slot).and_then(Option::take) else { return };
        let mut turn = Turn { connection, slot, is_over: false };
        let result = self.take_turn(&mut turn, buffer);
        self.end_turn(turn, result);
        while let Some(woken) = self.woken.pop() {
            self.flush(woken);
        }
    }

    fn take_turn(&mut self, turn: &mut Turn, buffer: &mut [u8]) -> Result<(), End> {
        for _ in 0..READS_OF_LONG_MESSAGE {
            if turn.connection.output.len() > self.limits.output || turn.is_over {
                break; // it must read before it may ask for more, or has had its share
            }
            if turn.has_whole_input() {
                let input = std::mem::take(&mut turn.connection.input);
                let used = self.serve_bytes(turn, &input)?;
                turn.keep(input, used);
                continue;
            }
            let Some(length) = turn.connection.read(buffer).map_err(|_| End::Left)? else { break };
            if length == 0 {
                let _ = turn.connection.flush(&mut self.pool, self.now, &mut self.counters.bytes_out);
                return Err(End::Left);
            }
            self.counters.bytes_in += length as u64;
            let bytes = &buffer[..length];
            if turn.connection.input.is_empty() {
                let used = self.serve_bytes(turn, bytes)?;
                turn.connection.input.extend_from_slice(&bytes[used..]);
            } else {
                turn.connection.input.extend_from_slice(bytes);
                if turn.has_whole_input() {
                    let input = std::mem::take(&mut turn.connection.input);
                    let used = self.serve_bytes(turn, &input)?;
                    turn.keep(input, used);
                }
            }
            let in_long_message = turn.connection.needs > READ;
            if !turn.connection.readable || !in_long_message {
                break;
            }
        }
        let connection = &mut turn.connection;
        connection.message_since = match connection.input.is_empty() {
            true => None,
            false => connection.message_since.or(Some(self.now)),
        };
        connection.flush(&mut self.pool, self.now, &mut self.counters.bytes_out).map_err(|_| End::Left)?;
        self.check_memory(connection)
    }

    /// Serves every whole message in `bytes`; returns how many bytes they took.
    fn serve_bytes(&mut self, turn: &mut Turn, bytes: &[u8]) -> Result<usize, End> {
        let mut at = 0;
        turn.connection.needs = 0;
        while at < bytes.len() && turn.connection.output.len() <= self.limits.output && !turn.is_over {
            if !turn.connection.validated && bytes[at] != 0 {
                return Err(refuse(Closed::Handshake, format!("it began with byte {:#04x}", bytes[at])));
            }
            match wire::decode(&bytes[at..], &self.limits.message, &mut turn.connection.scan) {
                Ok(Decoded::Whole(command, length)) => {
                    at += length;
                    turn.connection.message_since = None;
                    let is_dear = is_dear(&command);
                    self.execute(turn, command)?;
                    turn.is_over = is_dear && self.now.elapsed() > SHARE;
                }
                Ok(Decoded::Needs(needs)) => {
                    turn.connection.needs = needs;
                    break;
                }
                Err(malformed @ Malformed::Opcode(_)) => {
                    return Err(refuse(Closed::UnknownOpcode, malformed.to_string()));
                }
                Err(malformed @ Malformed::TooLong { .. }) => {
                    return Err(refuse(Closed::TooLong, malformed.to_string()));
                }
            }
        }
        Ok(at)
    }

    #[inline]
    fn execute(&mut self, turn: &mut Turn, command: Command<'_>) -> Result<(), End> {
        let client = ClientId(turn.slot);
        match command {
            Command::Call(request) => {
                self.counters.operations[request.operation() as usize] += 1;
                let applied = self.table.apply(client, request, self.now, &mut self.replies);
                self.deliver(Some(turn));
                applied.map_err(|refusal| match &refusal {
                    Refusal::AlreadyWaiting => {
                        refuse(Closed::AlreadyWaiting, Fault::from(refusal).message().into())
                    }
                    Refusal::Full { .. } => refuse(Closed::Full, Fault::from(refusal).message().into()),
                    // Keys and values are the job's own business and stay out of the log.
                    Refusal::NotANumber { key } => {
                        let length = key.len();
                        refuse(
                            Closed::NotANumber,
                            format!("it counted on a value that is no number (key of {length} bytes)"),
                        )
                    }
                })
            }
            Command::Ping { nonce } => {
                wire::encode_pong(nonce, &mut turn.connection.output.sink(&mut self.pool));
                Ok(())
            }
            Command::CancelWait => {
                self.table.cancel(client, &mut self.replies);
                self.deliver(Some(turn));
                wire::encode_cancelled(&mut turn.connection.output.sink(&mut self.pool));
                Ok(())
            }
            Command::Validate { magic: wire::MAGIC } if !turn.connection.validated => {
                turn.connection.validated = true;
                Ok(())
            }
            Command::Validate { magic } if !turn.connection.validated => {
                Err(refuse(Closed::Handshake, format!("wrong magic number {magic:#010x}")))
            }
            Command::Validate { .. } => Err(refuse(Closed::UnknownOpcode, "it said hello twice".into())),
            Command::Info => {
                let facts = serde_json::to_vec(&self.facts()).expect("facts are plain data");
                let response = Response::Value(Some(facts.into()));
                wire::encode_response(&response, &mut turn.connection.output.sink(&mut self.pool));
                Ok(())
            }
        }
    }

    /// Hands out the replies that piled up: to the connection whose turn it is, and to others.
    #[inline]
    fn deliver(&mut self, turn: Option<&mut Turn>) {
        let mut own = turn;
        for (ClientId(slot), response) in self.replies.drain(..) {
            let connection = match &mut own {
                Some(turn) if turn.slot == slot => &mut turn.connection,
                _ => {
                    self.woken.push(slot);
                    self.connections[slot].as_mut().expect("the table forgets those who left")
                }
            };
            wire::encode_response(&response, &mut connection.output.sink(&mut self.pool));
        }
    }

    fn end_turn(&mut self, mut turn: Turn, result: Result<(), End>) {
        match result {
            Ok(()) => {
                if turn.connection.readable && turn.connection.output.len() <= self.limits.output
                    || turn.has_whole_input() && turn.connection.output.len() <= self.limits.output
                {
                    self.again.push(turn.slot);
                }
                self.count_memory(&mut turn.connection);
                self.connections[turn.slot] = Some(turn.connection);
            }
            Err(end) => self.close(turn, end),
        }
    }

    fn close(&mut self, mut turn: Turn, end: End) {
        // Replies to requests before the one that was refused are still owed.
        if matches!(end, End::Refused(..)) {
            let _ = turn.connection.flush(&mut self.pool, self.now, &mut self.counters.bytes_out);
        }
        self.buffered -= turn.connection.counted;
        self.count -= 1;
        let _ = self.poll.registry().deregister(&mut turn.connection.stream);
        self.table.forget(ClientId(turn.slot), &mut self.replies);
        self.deliver(None);
        self.free.push(turn.slot);
        if let End::Refused(closed, reason) = end {
            self.note(closed, Some(turn.connection.peer), &reason);
        }
    }

    /// Writes what a connection's peer will take; a peer that has caught up may ask again.
    fn flush(&mut self, slot: usize) {
        let unsent = |connection: &mut Option<Box<Connection>>| {
            connection.take_if(|connection| !connection.output.is_empty())
        };
        let Some(mut connection) = self.connections.get_mut(slot).and_then(unsent) else { return };
        let held_back = connection.output.len() > self.limits.output;
        let result = connection.flush(&mut self.pool, self.now, &mut self.counters.bytes_out);
        let may_ask = connection.output.len() <= self.limits.output;
        if may_ask && (held_back || !connection.input.is_empty()) {
            self.again.push(slot);
        }
        let turn = Turn { connection, slot, is_over: false };
        match result {
            Ok(_) => {
                let mut connection = turn.connection;
                self.count_memory(&mut connection);
                self.connections[slot] = Some(connection);
            }
            Err(_) => self.close(turn, End::Left),
        }
    }

    fn count_memory(&mut self, connection: &mut Connection) {
        let held = connection.held();
        self.buffered = self.buffered + held - connection.counted;
        connection.counted = held;
    }

    /// A connection that grows while the server is at its memory limit has to go.
    fn check_memory(&self, connection: &Connection) -> Result<(), End> {
        let held = connection.held();
        let total = self.table.bytes() + self.buffered + held - connection.counted;
        if held > READ && total > self.limits.table.bytes {
            let limit = self.limits.table.bytes;
            let reason =
                format!("it holds {held} bytes of buffers and the server is at its limit of {limit} bytes");
            return Err(refuse(Closed::Memory, reason));
        }
        Ok(())
    }

    // ── the server's own business ──────────────────────────────────────────────────────────────────────

    fn accept(&mut self) {
        self.accept_again = None;
        for index in 0..self.listeners.len() {
            for accepted in 0.. {
                if accepted == ACCEPTS {
                    self.accept_again = Some(self.now);
                    break;
                }
                match self.listeners[index].accept() {
                    Ok((stream, peer)) => self.admit(stream, peer),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    Err(error) if is_exhaustion(&error) => {
                        self.turn_away(index, &error);
                        break;
                    }
                    // The peer changed its mind between connecting and being accepted.
                    Err(error) => tracing::debug!(%error, "a connection was gone before it was accepted"),
                }
            }
        }
    }

    fn admit(&mut self, mut stream: mio::net::TcpStream, peer: SocketAddr) {
        self.counters.accepted += 1;
        if self.count >= self.limits.connections {
            return self.note(
                Closed::Connections,
                Some(peer),
                "there are as many connections as the limit allows",
            );
        }
        #[cfg(not(target_os = "linux"))] // Linux hands the listener's options on
        if let Err(error) = listen::set_options(&socket2::SockRef::from(&stream)) {
            tracing::debug!(%error, %peer, "cannot set socket options");
        }
        let slot = self.free.pop().unwrap_or_else(|| {
            self.connections.push(None);
            self.connections.len() - 1
        });
        let interest = Interest::READABLE | Interest::WRITABLE;
        if let Err(error) = self.poll.registry().register(&mut stream, Token(slot), interest) {
            self.free.push(slot);
            return self.note(Closed::Connections, Some(peer), &format!("cannot poll it: {error}"));
        }
        self.count += 1;
        self.connections[slot] = Some(Box::new(Connection::new(stream, peer, self.now)));
    }

    /// No descriptor is left: lets the next client know by closing it, and rests.
    fn turn_away(&mut self, index: usize, error: &io::Error) {
        self.accept_again = Some(self.now + ACCEPT_REST);
        drop(self.spare.take());
        let peer = self.listeners[index].accept().ok().map(|(_, peer)| peer);
        self.spare = std::fs::File::open("/dev/null").ok();
        self.note(Closed::Connections, peer, &format!("cannot accept: {error}"));
    }

    fn tick(&mut self) {
        self.table.sweep();
        if let Some(line) = self.log.renew(self.now) {
            tracing::warn!("{line}");
        }
        for slot in 0..self.connections.len() {
            let Some(connection) = &self.connections[slot] else { continue };
            if let Some(end) = overdue(connection, &self.limits, self.now) {
                let connection = self.connections[slot].take().expect("it was just looked at");
                self.close(Turn { connection, slot, is_over: false }, end);
            }
        }
        while let Some(woken) = self.woken.pop() {
            self.flush(woken);
        }
    }

    fn obey(&mut self) {
        while let Ok(order) = self.inbox.try_recv() {
            match order {
                Order::Tell(answer) => drop(answer.send(self.facts())), // an asker that left is fine
                Order::Stop { grace } => {
                    self.stop_at = Some(self.now + grace);
                    for mut listener in self.listeners.drain(..) {
                        let _ = self.poll.registry().deregister(&mut listener);
                    }
                }
            }
        }
    }

    /// What has arrived is answered before the end.
    fn last_words(&mut self, buffer: &mut [u8]) {
        for slot in 0..self.connections.len() {
            self.serve(slot, buffer);
        }
    }

    #[cold]
    fn note(&mut self, closed: Closed, peer: Option<SocketAddr>, reason: &str) {
        *self.counters.closed.entry(closed).or_default() += 1;
        if self.log.allows() {
            let peer = peer.map_or("a client".to_string(), |peer| peer.to_string());
            tracing::warn!("store server at {} closed the connection of {peer}: {reason}", self.address);
        }
    }

    fn facts(&self) -> Facts {
        let waiters = self.table.oldest_waiters(Facts::WAITERS_MAX);
        let operations =
            Operation::ALL.into_iter().zip(self.counters.operations).filter(|(_, count)| *count > 0);
        Facts {
            address: self.address.to_string(),
            uptime_seconds: self.now.duration_since(self.started).as_secs_f64(),
            connections: self.count,
            connections_max: self.limits.connections,
            accepted: self.counters.accepted,
            closed: self.counters.closed.clone(),
            operations: operations.map(|(operation, count)| (operation.name().to_string(), count)).collect(),
            bytes_in: self.counters.bytes_in,
            bytes_out: self.counters.bytes_out,
            keys: self.table.keys(),
            queue_items: self.table.queue_items(),
            table_bytes: self.table.bytes(),
            buffer_bytes: self.buffered,
            memory_max: self.limits.table.bytes,
            waiters_count: self.table.waiters_count(),
            waiters: waiters
                .into_iter()
                .map(|waiter| WaiterFacts {
                    peer: self.peer_of(waiter.client),
                    operation: waiter.operation.name().to_string(),
                    keys: show_keys(&waiter.missing),
                    keys_count: waiter.missing_count,
                    seconds: self.now.duration_since(waiter.since).as_secs_f64(),
                })
                .collect(),
        }
    }

    fn peer_of(&self, client: ClientId) -> String {
        match self.connections.get(client.0).and_then(Option::as_ref) {
            Some(connection) => connection.peer.to_string(),
            None => "the client that asks".into(), // it has its turn and is out of the list
        }
    }
}

/// A connection that has its turn.
struct Turn {
    connection: Box<Connection>,
    slot: usize,
    /// It has done something that took long; the next message waits until others have had their turn.
    is_over: bool,
}

impl Turn {
    /// Is there input that was kept and is worth looking at?
    fn has_whole_input(&self) -> bool {
        !self.connection.input.is_empty() && self.connection.input.len() >= self.connection.needs
    }

    /// Puts back the part of the input that was not used.
    fn keep(&mut self, mut input: Vec<u8>, used: usize) {
        input.drain(..used);
        if input.is_empty() && input.capacity() > INPUT_KEPT {
            input = Vec::new();
        }
        self.connection.input = input;
    }
}

fn overdue(connection: &Connection, limits: &Limits, now: Instant) -> Option<End> {
    let over = |since: Instant, limit: Duration| now.duration_since(since) >= limit;
    if !connection.validated && over(connection.since, limits.handshake_timeout) {
        let limit = show_duration(limits.handshake_timeout);
        return Some(refuse(Closed::HandshakeTimeout, format!("it did not say hello within {limit}")));
    }
    if connection.message_since.is_some_and(|since| over(since, limits.message_timeout))
        && connection.output.is_empty()
    {
        let (got, limit) = (connection.input.len(), show_duration(limits.message_timeout));
        let reason = format!(
            "it did not finish a message within {limit}: {got} bytes of at least {}",
            connection.needs
        );
        return Some(refuse(Closed::MessageTimeout, reason));
    }
    if connection.stalled_since.is_some_and(|since| over(since, limits.write_timeout)) {
        let (unsent, limit) = (connection.output.len(), show_duration(limits.write_timeout));
        return Some(refuse(
            Closed::WriteTimeout,
            format!("it took none of the {unsent} bytes it asked for in {limit}"),
        ));
    }
    None
}

/// Can it cost far more than the bytes it came in? All others cost about as much as their bytes, or as the reply.
fn is_dear(command: &Command<'_>) -> bool {
    matches!(command, Command::Info | Command::Call(Request::Append { .. } | Request::ListKeys))
}

#[cold]
fn refuse(closed: Closed, reason: String) -> End {
    End::Refused(closed, reason)
}

/// Out of descriptors or memory, as opposed to a connection that went away.
fn is_exhaustion(error: &io::Error) -> bool {
    use rustix::io::Errno;
    let errno = Errno::from_io_error(error);
    [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM].map(Some).contains(&errno)
}

/// A log that strangers can fill is a weapon: a few lines a second, then a count.
#[derive(Debug)]
struct LogBudget {
    left: u32,
    suppressed: u64,
    renewed: Instant,
}

impl LogBudget {
    fn new(now: Instant) -> Self {
        LogBudget { left: LOG_LINES, suppressed: 0, renewed: now }
    }

    fn allows(&mut self) -> bool {
        if self.left == 0 {
            self.suppressed += 1;
            return false;
        }
        self.left -= 1;
        true
    }

    /// A new second, new lines; and one about those that were swallowed.
    fn renew(&mut self, now: Instant) -> Option<String> {
        if now.duration_since(self.renewed) < Duration::from_secs(1) {
            return None;
        }
        self.renewed = now;
        self.left = LOG_LINES;
        let suppressed = std::mem::take(&mut self.suppressed);
        (suppressed > 0)
            .then(|| format!("store server closed {suppressed} more connections for such reasons"))
    }
}
