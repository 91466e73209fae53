//! The server's event loop: clients take turns.
//!
//! In a turn, bytes are read, and every whole message among them is applied to the table. The replies (to the
//! client whose turn it is, and to parked ones whose wait ended) are encoded into each connection's output,
//! and written as far as the sockets accept them. There is no lock and no task: a waiting client is an entry
//! in the table. A turn is short: one read, or one expensive request.
//!
//! Not here: what requests mean (`table`), what bytes mean (`wire`), how buffers work (`connection`).

#![expect(clippy::disallowed_methods, reason = "the outermost layer: reads the clock once a round")]

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use mio::{Events, Interest, Poll, Token};
use tenfold_memory::NotInherited;

mod door;
mod report;
mod upkeep;

use self::report::LogBudget;
use super::callers::Callers;
use super::dear::Dear;
use super::roll::Roll;
use super::slow::{Slowest, Suspect};
use super::surveys::Surveys;
use super::{Closed, Facts, Limits, Order};
use crate::connection::{Connection, Pool};
use crate::request::{Operation, Request, Response};
use crate::table::{ClientId, Forgetting, Refusal, Replies, SHARED_VALUE, Table};
use crate::wire::{self, Command, Decoded, Malformed};
use tenfold_base::Fault;

/// The token that wakes the loop for an order.
pub(super) const WAKE: Token = Token(usize::MAX);
/// Listeners' tokens count down from here.
const LISTENERS: usize = usize::MAX - 1;
const LISTENERS_MAX: usize = 64;

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
/// A request with more keys than this is timed.
const KEYS_LIGHT: usize = 16;
/// A message shorter than this has neither more keys than that nor a long value, so most messages need no
/// further check.
const LIGHT: usize = (KEYS_LIGHT + 1) * size_of::<u64>();
/// How many requests for the list of clients may be pending.
const ROLLS_MAX: usize = 8;
/// How often deadlines are checked, unless a limit is shorter than that.
const TICK: Duration = Duration::from_secs(1);
/// How long accepting pauses when no descriptors are left.
const ACCEPT_REST: Duration = Duration::from_millis(50);
/// Log lines per second about closed connections; further ones are counted and summed up.
const LOG_LINES: u32 = 10;

pub(super) struct Loop {
    poll: Poll,
    listeners: Vec<NotInherited<mio::net::TcpListener>>,
    inbox: mpsc::Receiver<Order>,
    limits: Limits,
    tick: Duration,
    address: SocketAddr,
    table: Table,
    connections: Vec<Option<Box<Connection>>>,
    free: Vec<usize>,
    count: usize,
    callers: Callers,
    pool: Pool,
    replies: Replies,
    /// Connections that got a reply through another client's request.
    woken: Vec<usize>,
    /// Connections that have more to send than one turn allows.
    again: Vec<usize>,
    accept_again: Option<Instant>,
    /// A spare descriptor, closed to accept and close one connection when no descriptors are left.
    spare: Option<std::fs::File>,
    buffered: usize,
    now: Instant,
    started: Instant,
    /// When the table's time is next advanced.
    next_second: Instant,
    stop_at: Option<Instant>,
    counters: Counters,
    log: LogBudget,
    slowest: Slowest,
    /// Clients that wait for an expensive request.
    dear: Dear,
    /// What is in progress and may take long.
    watch: Option<Watch>,
    surveys: Surveys,
    /// Pending requests for the list of clients.
    rolls: VecDeque<Roll>,
    /// Keys that are being removed, and the requests that wait for it.
    forgetting: VecDeque<(Forgetting, mpsc::Sender<usize>)>,
}

#[derive(Debug, Default)]
struct Counters {
    accepted: u64,
    closed: BTreeMap<Closed, u64>,
    operations: [u64; Operation::ALL.len()],
    bytes_in: u64,
    bytes_out: u64,
}

/// A request that may take long.
struct Watch {
    suspect: Suspect,
    start: Instant,
    /// Its bytes.
    length: usize,
    /// Unsent bytes that its client had before it.
    unsent: usize,
}

/// Why a connection is closed.
enum End {
    /// The client left, or the network failed.
    Left,
    /// The server closes it.
    Refused(Closed, String),
}

impl Loop {
    pub(super) fn new(
        poll: Poll,
        listeners: Vec<TcpListener>,
        inbox: mpsc::Receiver<Order>,
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
            callers: Callers::new(limits.connections_per_address),
            pool: Pool::default(),
            replies: Vec::new(),
            woken: Vec::new(),
            again: Vec::new(),
            accept_again: None,
            spare: std::fs::File::open("/dev/null").ok(),
            buffered: 0,
            now,
            started: now,
            next_second: now,
            stop_at: None,
            counters: Counters::default(),
            log: LogBudget::new(now),
            slowest: Slowest::new(now),
            dear: Dear::default(),
            watch: None,
            surveys: Surveys::default(),
            rolls: VecDeque::new(),
            forgetting: VecDeque::new(),
        })
    }

    pub(super) fn run(mut self) {
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
            self.dear.renew();
            if self.now >= self.next_second {
                self.count_seconds();
            }
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
            let mut again = std::mem::take(&mut self.again);
            again.sort_unstable();
            again.dedup(); // reading and writing may both ask for another turn, but it is a single one
            for slot in again {
                self.serve(slot, &mut buffer);
            }
            while let Some(slot) = self.dear.call() {
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
                self.obey();
            }
            if self.surveys.is_pending() || !self.rolls.is_empty() || !self.forgetting.is_empty() {
                self.look_around(events.is_empty());
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

    /// How long the loop may sleep if nothing happens.
    fn patience(&self, next_tick: Instant) -> Option<Duration> {
        if !self.again.is_empty()
            || self.dear.is_pending()
            || self.surveys.is_pending()
            || !self.rolls.is_empty()
            || !self.forgetting.is_empty()
        {
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
        // Taken out of the list during its turn, so that replies to other clients can be written meanwhile.
        let may_ask = |connection: &mut Option<Box<Connection>>| connection.take_if(|asks| !asks.in_line);
        let Some(connection) = self.connections.get_mut(slot).and_then(may_ask) else { return };
        let mut turn = Turn { connection, slot, messages: MESSAGES };
        let result = self.take_turn(&mut turn, buffer);
        self.end_turn(turn, result);
        self.flush_woken();
    }

    fn flush_woken(&mut self) {
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
                    let is_dear = is_dear(&command);
                    if is_dear && !self.dear.allows(turn.slot) {
                        self.dear.wait(turn.slot);
                        turn.connection.in_line = true;
                        break;
                    }
                    at += length;
                    turn.messages -= 1;
                    turn.connection.message_since = None;
                    // One call of `execute`, so that it is compiled into this loop.
                    let is_watched = (is_dear || length >= LIGHT) && self.watch(turn, &command, length);
                    self.execute(turn, command)?;
                    if is_watched {
                        self.end_watch(turn, is_dear);
                    }
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

    /// Reads the clock if what follows may take long.
    #[cold]
    fn watch(&mut self, turn: &Turn, command: &Command<'_>, length: usize) -> bool {
        if !is_dear(command) && !is_heavy(command) {
            return false;
        }
        let (operation, (key, keys_count)) = match command {
            Command::Call(request) => (request.operation().name(), request.first_key()),
            _ => ("info", (None, 0)),
        };
        let suspect = Suspect::new(operation, key.unwrap_or_default(), keys_count, turn.connection.peer);
        let unsent = turn.connection.output.len();
        self.watch = Some(Watch { suspect, length, unsent, start: Instant::now() });
        true
    }

    #[cold]
    fn end_watch(&mut self, turn: &mut Turn, is_dear: bool) {
        let Some(watch) = self.watch.take() else { return };
        let end = Instant::now();
        let bytes = watch.length + turn.connection.output.len() - watch.unsent;
        self.slowest.note(watch.suspect, bytes, end.duration_since(watch.start), end);
        if is_dear {
            self.dear.note(end.duration_since(watch.start));
        }
    }

    #[inline]
    fn execute(&mut self, turn: &mut Turn, command: Command<'_>) -> Result<(), End> {
        let client = ClientId(turn.slot);
        match command {
            Command::Call(request) => {
                let operation = request.operation();
                self.counters.operations[operation as usize] += 1;
                turn.connection.last_operation = Some(operation);
                let applied = self.table.apply(client, request, self.now, &mut self.replies);
                self.deliver(Some(turn));
                applied.map_err(|refusal| match &refusal {
                    Refusal::AlreadyWaiting => refuse(Closed::AlreadyWaiting, Fault::from(refusal).message),
                    Refusal::Full { .. } => refuse(Closed::Full, Fault::from(refusal).message),
                    // Keys and values belong to the job and stay out of the log.
                    Refusal::NotANumber { key } => {
                        let length = key.len();
                        refuse(
                            Closed::NotANumber,
                            format!(
                                "ADD or BARRIER failed: the value is not a number (key of {length} bytes)"
                            ),
                        )
                    }
                })
            }
            Command::Ping { nonce } => {
                let answer = if nonce == wire::GREETING { wire::GREETING_ANSWER } else { nonce };
                wire::encode_pong(answer, &mut turn.connection.output.sink(&mut self.pool));
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
            Command::Validate { .. } => {
                Err(refuse(Closed::UnknownOpcode, "it sent the handshake twice".into()))
            }
            Command::Info => {
                let facts =
                    serde_json::to_vec(&self.facts(Facts::WAITERS_MAX)).expect("facts are plain data");
                let response = Response::Value(Some(facts.into()));
                wire::encode_response(response, &mut turn.connection.output.sink(&mut self.pool));
                Ok(())
            }
        }
    }

    /// Delivers the accumulated replies: to the connection whose turn it is, and to others.
    #[inline]
    fn deliver(&mut self, turn: Option<&mut Turn>) {
        let mut own = turn;
        for (ClientId(slot), response) in self.replies.drain(..) {
            if response == Response::Done {
                continue; // nothing to send
            }
            let connection = match &mut own {
                Some(turn) if turn.slot == slot => &mut turn.connection,
                _ => {
                    self.woken.push(slot);
                    self.connections[slot].as_mut().expect("the table forgets those who left")
                }
            };
            wire::encode_response(response, &mut connection.output.sink(&mut self.pool));
        }
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

    fn close(&mut self, mut turn: Turn, end: End) {
        // Replies to requests before the refused one must still be sent.
        if matches!(end, End::Refused(..)) {
            let _ = turn.connection.flush(&mut self.pool, self.now, &mut self.counters.bytes_out);
        }
        self.buffered -= turn.connection.counted;
        self.count -= 1;
        self.callers.forget(turn.connection.peer);
        let _ = self.poll.registry().deregister(&mut *turn.connection.stream);
        self.table.forget(ClientId(turn.slot), &mut self.replies);
        self.deliver(None);
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
struct Turn {
    connection: Box<Connection>,
    slot: usize,
    /// How many more messages it may have served.
    messages: usize,
}

impl Turn {
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

/// Whether it can cost far more than its bytes. All others cost about as much as their bytes or their reply.
fn is_dear(command: &Command<'_>) -> bool {
    matches!(command, Command::Info | Command::Call(Request::Append { .. } | Request::ListKeys))
}

/// Whether it has so many bytes or keys that it may take a while.
fn is_heavy(command: &Command<'_>) -> bool {
    let Command::Call(request) = command else { return false };
    let is_long = |bytes: &[u8]| bytes.len() >= SHARED_VALUE;
    match request {
        Request::Set { value, .. } | Request::QueuePush { value, .. } => is_long(value),
        Request::CompareSet { expected, desired, .. } => is_long(expected) || is_long(desired),
        Request::Check { keys } | Request::MultiGet { keys } | Request::Wait { keys } => {
            keys.len() > KEYS_LIGHT
        }
        Request::MultiSet { pairs } => pairs.len() > KEYS_LIGHT,
        _ => false,
    }
}

#[cold]
fn refuse(closed: Closed, reason: String) -> End {
    End::Refused(closed, reason)
}
