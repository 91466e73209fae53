//! The event loop of a server or relay: clients take turns.
//!
//! In a turn, bytes are read, and every whole message among them is executed by the [`Backend`]: a table, or
//! the merging of a relay. The replies (to the client whose turn it is, and to parked ones whose wait ended)
//! are encoded into each connection's output, and written as far as the sockets accept them. There is no lock
//! and no task: a waiting client is an entry in the backend. A turn is short: one read, or one expensive
//! request.
//!
//! Not here: what requests mean (`server/serving`, `relay/passing`), what bytes mean (`wire`), how buffers
//! work (`connection`).

#![expect(clippy::disallowed_methods, reason = "the outermost layer: reads the clock once a round")]

use std::collections::BTreeMap;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use mio::{Events, Interest, Poll, Token};
use tenfold_memory::NotInherited;

mod callers;
mod door;
mod report;
mod upkeep;

use self::callers::Callers;
use self::report::LogBudget;
use crate::connection::{Connection, Pool};
use crate::server::{Closed, Limits};
use crate::wire::{self, Command, Decoded, Malformed};

/// The token that wakes the loop for an order.
pub(crate) const WAKE: Token = Token(usize::MAX);
/// Listeners' tokens count down from here.
const LISTENERS: usize = usize::MAX - 1;
const LISTENERS_MAX: usize = 64;
/// The token of a backend's own socket.
pub(crate) const BACKEND: Token = Token(LISTENERS - LISTENERS_MAX);

/// Bytes of one read of a connection, and so the most work that one client gets before the next one's turn.
const READ: usize = 64 << 10;
/// Reads in a row for a message that is longer than one read: its bytes cost little until it is whole.
const READS_OF_LONG_MESSAGE: usize = 16;
/// Connections accepted before connected clients get their turn again.
const ACCEPTS: usize = 128;
/// Messages served in one turn: one read holds thousands of the shortest, which together would make others
/// wait too long.
const MESSAGES: usize = 512;
/// What a connection may hold even if the server is at its memory limit: a reply's buffer.
const HELD_LIGHT: usize = 4 << 10;
/// An idle connection keeps an input buffer up to this size for its next message.
const INPUT_KEPT: usize = 256;
/// How often deadlines are checked, unless a limit is shorter than that.
const TICK: Duration = Duration::from_secs(1);
/// How long accepting pauses when no descriptors are left.
const ACCEPT_REST: Duration = Duration::from_millis(50);
/// Log lines per second about closed connections; further ones are counted and summed up.
const LOG_LINES: u32 = 10;

/// What executes the requests of clients. Its methods get the whole loop, because a request may cause replies
/// to any client.
pub(crate) trait Backend: Sized {
    /// What other threads ask of it.
    type Order;

    /// Its name in log lines.
    const NAME: &'static str;

    /// A round begins.
    fn begin_round(front: &mut Loop<Self>);

    /// Whether this message may be executed now. If not, its connection waits until [`Backend::call`] returns
    /// it.
    fn allows(front: &mut Loop<Self>, turn: &Turn, command: &Command<'_>) -> bool;

    /// Executes a message of `length` bytes.
    fn execute(
        front: &mut Loop<Self>,
        turn: &mut Turn,
        command: Command<'_>,
        length: usize,
    ) -> Result<(), End>;

    /// The next connection that may go on.
    fn call(front: &mut Loop<Self>) -> Option<usize>;

    /// A connection was closed.
    fn forget(front: &mut Loop<Self>, slot: usize, connection: &Connection);

    /// Clients have had their turns. `is_idle`: none wanted anything.
    fn end_round(front: &mut Loop<Self>, is_idle: bool);

    /// Another thread wants something.
    fn obey(front: &mut Loop<Self>, order: Self::Order);

    /// In every round; `is_ready`: its own socket has an event.
    #[inline]
    fn attend(_front: &mut Loop<Self>, _is_ready: bool, _buffer: &mut [u8]) {}

    /// Regularly, about once a second.
    fn tick(front: &mut Loop<Self>);

    /// Frees memory that no connection holds; false if there is none.
    fn relieve(_front: &mut Loop<Self>) -> bool {
        false
    }

    /// The loop is about to end: all messages are allowed from now on.
    fn end(front: &mut Loop<Self>);

    /// Whether everything that clients have asked for has been executed, or cannot be any more.
    fn is_settled(&self) -> bool {
        true
    }

    /// The last thing before the loop ends.
    fn last(_front: &mut Loop<Self>) {}

    /// Bytes of memory that it holds.
    fn bytes(&self) -> usize;

    /// Does it have something to do even if no client wants anything?
    fn is_busy(&self) -> bool;

    /// When it wants a round at the latest.
    fn wants_round_at(&self) -> Option<Instant> {
        None
    }
}

pub(crate) struct Loop<B: Backend> {
    pub(crate) back: B,
    pub(crate) poll: Poll,
    listeners: Vec<NotInherited<mio::net::TcpListener>>,
    inbox: mpsc::Receiver<B::Order>,
    pub(crate) limits: Limits,
    tick: Duration,
    pub(crate) address: SocketAddr,
    pub(crate) connections: Vec<Option<Box<Connection>>>,
    free: Vec<usize>,
    pub(crate) count: usize,
    callers: Callers,
    pub(crate) pool: Pool,
    /// Connections that got a reply through another client's request.
    pub(crate) woken: Vec<usize>,
    /// Connections that have more to send than one turn allows.
    again: Vec<usize>,
    accept_again: Option<Instant>,
    /// A spare descriptor, closed to accept and close one connection when no descriptors are left.
    spare: Option<std::fs::File>,
    pub(crate) buffered: usize,
    pub(crate) now: Instant,
    pub(crate) started: Instant,
    stop_at: Option<Instant>,
    pub(crate) counters: Counters,
    log: LogBudget,
}

#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) accepted: u64,
    pub(crate) closed: BTreeMap<Closed, u64>,
    pub(crate) bytes_in: u64,
    pub(crate) bytes_out: u64,
}

/// Why a connection is closed.
pub(crate) enum End {
    /// The client left, or the network failed.
    Left,
    /// The server closes it.
    Refused(Closed, String),
}

impl<B: Backend> Loop<B> {
    pub(crate) fn new(
        back: B,
        poll: Poll,
        listeners: Vec<TcpListener>,
        inbox: mpsc::Receiver<B::Order>,
        limits: Limits,
        address: SocketAddr,
    ) -> io::Result<Self> {
        let mut listeners: Vec<NotInherited<_>> =
            listeners.into_iter().map(|listener| mio::net::TcpListener::from_std(listener).into()).collect();
        assert!(listeners.len() <= LISTENERS_MAX, "a name has fewer addresses than that");
        for (index, listener) in listeners.iter_mut().enumerate() {
            poll.registry().register(&mut **listener, Token(LISTENERS - index), Interest::READABLE)?;
        }
        let shortest = limits.handshake_timeout.min(limits.message_timeout).min(limits.write_timeout);
        let now = Instant::now();
        Ok(Loop {
            back,
            poll,
            listeners,
            inbox,
            limits,
            tick: TICK.min(shortest / 4).max(Duration::from_millis(1)),
            address,
            connections: Vec::new(),
            free: Vec::new(),
            count: 0,
            callers: Callers::new(limits.connections_per_address),
            pool: Pool::default(),
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

    pub(crate) fn run(mut self) {
        let mut events = Events::with_capacity(1024);
        let mut buffer = vec![0; READ];
        let mut next_tick = self.now + self.tick;
        loop {
            if let Err(error) = self.poll.poll(&mut events, self.patience(next_tick))
                && error.kind() != io::ErrorKind::Interrupted
            {
                tracing::error!(%error, "the {} cannot poll and ends", B::NAME);
                return;
            }
            self.now = Instant::now();
            B::begin_round(&mut self);
            let (mut orders, mut is_ready) = (false, false);
            for event in &events {
                match event.token() {
                    WAKE => orders = true,
                    BACKEND => is_ready = true,
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
            let mut again = std::mem::take(&mut self.again);
            again.sort_unstable();
            again.dedup(); // reading and writing may both ask for another turn, but it is a single one
            for slot in again {
                self.serve(slot, &mut buffer);
            }
            B::attend(&mut self, is_ready, &mut buffer);
            while let Some(slot) = B::call(&mut self) {
                if let Some(Some(connection)) = self.connections.get_mut(slot) {
                    connection.in_line = false;
                }
                self.serve(slot, &mut buffer);
            }
            self.flush_woken(); // also clients that were woken because another connection broke
            if self.accept_again.is_some_and(|at| at <= self.now) {
                self.accept();
            }
            if orders {
                while let Ok(order) = self.inbox.try_recv() {
                    B::obey(&mut self, order);
                }
            }
            B::end_round(&mut self, events.is_empty());
            if self.now >= next_tick {
                next_tick = self.now + self.tick;
                self.tick();
            }
            let is_over = |at| self.count == 0 && self.back.is_settled() || self.now >= at;
            if self.stop_at.is_some_and(is_over) {
                self.last_words(&mut buffer);
                B::last(&mut self);
                return;
            }
        }
    }

    /// How long the loop may sleep if nothing happens.
    fn patience(&self, next_tick: Instant) -> Option<Duration> {
        if !self.again.is_empty() || self.back.is_busy() {
            return Some(Duration::ZERO);
        }
        let tick = (self.count > 0 || self.log.suppressed > 0).then_some(next_tick);
        let next =
            [tick, self.accept_again, self.stop_at, self.back.wants_round_at()].into_iter().flatten().min();
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
        // Taken out of the list during its turn, so that replies to other clients can be written meanwhile.
        let may_ask = |connection: &mut Option<Box<Connection>>| connection.take_if(|asks| !asks.in_line);
        let Some(connection) = self.connections.get_mut(slot).and_then(may_ask) else { return };
        let mut turn = Turn { connection, slot, messages: MESSAGES };
        let result = self.take_turn(&mut turn, buffer);
        self.end_turn(turn, result);
        self.flush_woken();
    }

    pub(crate) fn flush_woken(&mut self) {
        while let Some(woken) = self.woken.pop() {
            self.flush(woken);
        }
    }

    fn take_turn(&mut self, turn: &mut Turn, buffer: &mut [u8]) -> Result<(), End> {
        for _ in 0..READS_OF_LONG_MESSAGE {
            let must_read = turn.connection.output.len() > self.limits.output;
            if must_read || turn.connection.in_line || turn.messages == 0 {
                break; // it must read first, or it is another client's turn
            }
            if turn.has_whole_input() {
                let input = std::mem::take(&mut turn.connection.input);
                let used = self.serve_bytes(turn, &input)?;
                turn.keep(input, used);
                continue;
            }
            if !turn.connection.readable {
                break;
            }
            let Some(length) = turn.connection.read(buffer).map_err(|_| End::Left)? else { break };
            if length == 0 {
                turn.connection.ended = true;
                turn.connection.readable = false;
                break;
            }
            self.counters.bytes_in += length as u64;
            turn.connection.bytes_in += length as u64;
            turn.connection.last_heard = self.now;
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
        if connection.ended && connection.output.is_empty() {
            return Err(End::Left);
        }
        Ok(())
    }

    /// Serves every whole message in `bytes`; returns how many bytes they took.
    fn serve_bytes(&mut self, turn: &mut Turn, bytes: &[u8]) -> Result<usize, End> {
        let mut at = 0;
        turn.connection.needs = 0;
        while at < bytes.len() && turn.messages > 0 && turn.connection.output.len() <= self.limits.output {
            if !turn.connection.validated && bytes[at] != 0 {
                return Err(refuse(Closed::Handshake, format!("the first byte was {:#04x}", bytes[at])));
            }
            match wire::decode(&bytes[at..], &self.limits.message, &mut turn.connection.scan) {
                Ok(Decoded::Whole(command, length)) => {
                    if !B::allows(self, turn, &command) {
                        turn.connection.in_line = true;
                        break;
                    }
                    at += length;
                    turn.messages -= 1;
                    turn.connection.message_since = None;
                    B::execute(self, turn, command, length)?;
                }
                Ok(Decoded::Needs(needs)) => {
                    turn.connection.needs = needs;
                    break;
                }
                Err(malformed @ (Malformed::Opcode(_) | Malformed::Hello(_))) => {
                    return Err(refuse(Closed::UnknownOpcode, malformed.to_string()));
                }
                Err(malformed @ Malformed::TooLong { .. }) => {
                    return Err(refuse(Closed::TooLong, malformed.to_string()));
                }
            }
        }
        Ok(at)
    }

    fn end_turn(&mut self, mut turn: Turn, result: Result<(), End>) {
        match result {
            Ok(()) => {
                let may_ask = turn.connection.output.len() <= self.limits.output;
                let asks = turn.connection.readable || turn.has_whole_input();
                if turn.connection.writable || may_ask && asks {
                    self.again.push(turn.slot);
                }
                self.count_memory(&mut turn.connection);
                self.connections[turn.slot] = Some(turn.connection);
                if self.is_over_memory() {
                    self.relieve(turn.slot);
                }
            }
            Err(end) => self.close(turn, end),
        }
    }

    pub(crate) fn close(&mut self, mut turn: Turn, end: End) {
        // Replies to requests before the refused one must still be sent.
        if matches!(end, End::Refused(..)) {
            let _ = turn.connection.flush(&mut self.pool, self.now, &mut self.counters.bytes_out);
        }
        self.buffered -= turn.connection.counted;
        self.count -= 1;
        self.callers.forget(turn.connection.peer);
        let _ = self.poll.registry().deregister(&mut *turn.connection.stream);
        B::forget(self, turn.slot, &turn.connection);
        self.free.push(turn.slot);
        if let End::Refused(closed, reason) = end {
            self.note(closed, Some(turn.connection.peer), &reason);
        }
    }

    /// Writes what a connection's peer accepts; a peer that has caught up may send requests again.
    fn flush(&mut self, slot: usize) {
        let unsent = |connection: &mut Option<Box<Connection>>| {
            connection.take_if(|connection| !connection.output.is_empty())
        };
        let Some(mut connection) = self.connections.get_mut(slot).and_then(unsent) else { return };
        let held_back = connection.output.len() > self.limits.output;
        let result = connection.flush(&mut self.pool, self.now, &mut self.counters.bytes_out);
        let may_ask = connection.output.len() <= self.limits.output;
        if connection.writable || may_ask && (held_back || !connection.input.is_empty()) {
            self.again.push(slot);
        }
        let turn = Turn { connection, slot, messages: 0 };
        match result {
            Ok(()) if !(turn.connection.ended && turn.connection.output.is_empty()) => {
                let mut connection = turn.connection;
                self.count_memory(&mut connection);
                self.connections[slot] = Some(connection);
            }
            _ => self.close(turn, End::Left),
        }
    }
}

/// A connection during its turn.
pub(crate) struct Turn {
    pub(crate) connection: Box<Connection>,
    pub(crate) slot: usize,
    /// How many more messages it may have served.
    messages: usize,
}

impl Turn {
    /// The magic words: once, and first.
    pub(crate) fn validate(&mut self, magic: u32) -> Result<(), End> {
        if self.connection.validated {
            return Err(refuse(Closed::UnknownOpcode, "it sent the handshake twice".into()));
        }
        if magic != wire::MAGIC {
            return Err(refuse(Closed::Handshake, format!("wrong magic number {magic:#010x}")));
        }
        self.connection.validated = true;
        Ok(())
    }

    /// Answers a ping.
    #[inline]
    pub(crate) fn pong(&mut self, nonce: u32, pool: &mut Pool) {
        let answer = if nonce == wire::GREETING { wire::GREETING_ANSWER } else { nonce };
        wire::encode_pong(answer, &mut self.connection.output.sink(pool));
    }

    /// A connection that has no more messages served.
    pub(crate) fn of(connection: Box<Connection>, slot: usize) -> Self {
        Turn { connection, slot, messages: 0 }
    }

    /// Is there stored input that is worth decoding?
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

#[cold]
pub(crate) fn refuse(closed: Closed, reason: String) -> End {
    End::Refused(closed, reason)
}
