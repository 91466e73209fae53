//! The server's loop: clients take turns.
//!
//! A turn: bytes are read, every whole message among them is applied to the table, the replies (to the client whose
//! turn it is, and to parked ones whose wait ended) are encoded into each connection's output, and what can be written
//! is written. There is no lock and no task: a waiting client is an entry in the table. A turn is short: one read, or
//! one request that costs more than its bytes.
//!
//! Not here: what requests mean (`table`), what bytes mean (`wire`), how buffers work (`connection`).

#![expect(clippy::disallowed_methods, reason = "the edge: reads the clock once a round")]

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use mio::{Events, Interest, Poll, Token};
use tenfold_memory::NotInherited;

use super::callers::Callers;
use super::dear::Dear;
use super::roll::Roll;
use super::slow::{Slowest, Suspect};
use super::surveys::Surveys;
use super::{Closed, Facts, Limits, Order, WaiterFacts};
use crate::connection::{Connection, PROGRESS, Pool};
use crate::request::{Operation, Request, Response, show_keys};
use crate::table::{ClientId, Forgetting, Refusal, Replies, SHARED_VALUE, Table};
use crate::wire::{self, Command, Decoded, Malformed};
use tenfold_base::{Fault, show_duration};

/// What wakes the loop for an order.
pub(super) const WAKE: Token = Token(usize::MAX);
/// Listeners' tokens count down from here.
const LISTENERS: usize = usize::MAX - 1;
const LISTENERS_MAX: usize = 64;

/// One read of a connection, and so the most work one client gets before the next one has its turn.
const READ: usize = 64 << 10;
/// Reads in a row for a message that is longer than one: its bytes cost little until it is whole.
const READS_OF_LONG_MESSAGE: usize = 16;
/// Connections accepted before clients that are here already have their turn again.
const ACCEPTS: usize = 128;
/// Messages served in one turn: a read holds thousands of the shortest, which together take longer than others should wait.
const MESSAGES: usize = 512;
/// What a connection may hold even if the server is at its memory limit: a reply's buffer.
const HELD_LIGHT: usize = 4 << 10;
/// An idle connection keeps an input buffer up to this size for its next message.
const INPUT_KEPT: usize = 256;
/// A request with more keys than this is timed.
const KEYS_LIGHT: usize = 16;
/// A message shorter than this has neither more keys than that nor a long value: most are never looked at again.
const LIGHT: usize = (KEYS_LIGHT + 1) * size_of::<u64>();
/// Who may wait to be told who is connected.
const ROLLS_MAX: usize = 8;
/// How often deadlines are looked at, unless a limit is shorter than that.
const TICK: Duration = Duration::from_secs(1);
/// How long accepting rests when there are no descriptors.
const ACCEPT_REST: Duration = Duration::from_millis(50);
/// Log lines a second about closed connections; more are counted and summed up.
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
    /// When the table's time is next counted on.
    next_second: Instant,
    stop_at: Option<Instant>,
    counters: Counters,
    log: LogBudget,
    slowest: Slowest,
    /// Clients that wait to be served something dear.
    dear: Dear,
    /// What is being done and may take long.
    watch: Option<Watch>,
    surveys: Surveys,
    /// Who wants to know who is connected.
    rolls: VecDeque<Roll>,
    /// Keys that are being removed, and who waits for that.
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
    /// Bytes that its client had not taken before.
    unsent: usize,
}

/// Why a connection ends.
enum End {
    /// It left, or the network took it.
    Left,
    /// The server will not have it any longer.
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
            again.dedup(); // reading and writing may both want another turn; it is one turn all the same
            for slot in again {
                self.serve(slot, &mut buffer);
            }
            while let Some(slot) = self.dear.call() {
                if let Some(Some(connection)) = self.connections.get_mut(slot) {
                    connection.in_line = false;
                }
                self.serve(slot, &mut buffer);
            }
            self.flush_woken(); // also those who were woken because somebody else's connection broke
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

    /// How long there is nothing to do unless something happens.
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
        // Taken out of the list while it has its turn, so that replies to others can be written meanwhile.
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
                break; // before it may ask for more, it must read, or others have their turn
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
                return Err(refuse(Closed::Handshake, format!("it began with byte {:#04x}", bytes[at])));
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

    /// Looks at the clock if what follows may take long.
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
            Command::Validate { .. } => Err(refuse(Closed::UnknownOpcode, "it said hello twice".into())),
            Command::Info => {
                let facts =
                    serde_json::to_vec(&self.facts(Facts::WAITERS_MAX)).expect("facts are plain data");
                let response = Response::Value(Some(facts.into()));
                wire::encode_response(response, &mut turn.connection.output.sink(&mut self.pool));
                Ok(())
            }
        }
    }

    /// Hands out the replies that piled up: to the connection whose turn it is, and to others.
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
        // Replies to requests before the one that was refused are still owed.
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

    /// Writes what a connection's peer will take; a peer that has caught up may ask again.
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

    fn count_memory(&mut self, connection: &mut Connection) {
        let held = connection.held();
        self.buffered = self.buffered + held - connection.counted;
        connection.counted = held;
    }

    /// A store that is full still answers: buffers may go an eighth beyond what it may hold.
    fn memory_max(&self) -> usize {
        self.limits.table.bytes + self.limits.table.bytes / 8
    }

    fn is_over_memory(&self) -> bool {
        self.table.bytes() + self.buffered > self.memory_max()
    }

    /// Closes connections until memory is within its limit: first those that have hoarded for longest, and not the one that
    /// happens to ask now, which grows in `slot`.
    #[cold]
    fn relieve(&mut self, slot: usize) {
        while self.is_over_memory() {
            let hoards = |connection: &Connection| {
                let since = connection.hoards_since().filter(|_| connection.counted > HELD_LIGHT);
                since.map(|since| (since, std::cmp::Reverse(connection.counted)))
            };
            let all = self.connections.iter().enumerate();
            let hoarders = all.filter_map(|(slot, connection)| Some((hoards(connection.as_deref()?)?, slot)));
            let worst = hoarders.min().map_or(slot, |(_, slot)| slot);
            let Some(connection) = self.connections[worst].take_if(|worst| worst.counted > HELD_LIGHT) else {
                return; // what is held is the table's, or little by each
            };
            let (held, limit) = (connection.counted, self.memory_max());
            let reason =
                format!("it holds {held} bytes of buffers and the server is at its limit of {limit} bytes");
            self.close(Turn { connection, slot: worst, messages: 0 }, refuse(Closed::Memory, reason));
        }
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
        if !self.limits.other_users
            && peer.ip().to_canonical().is_loopback()
            && let Some(user) = stranger(&stream, peer)
        {
            let reason = format!("it belongs to user {user}, and this server serves its own user only");
            return self.note(Closed::User, Some(peer), &reason);
        }
        if !self.callers.admit(peer) {
            let reason = "its address has as many connections as the limit allows one address";
            return self.note(Closed::Connections, Some(peer), reason);
        }
        #[cfg(not(target_os = "linux"))] // Linux hands the listener's options on
        if let Err(error) = crate::listen::set_options(&socket2::SockRef::from(&stream), peer) {
            tracing::debug!(%error, %peer, "cannot set socket options");
        }
        let slot = self.free.pop().unwrap_or_else(|| {
            self.connections.push(None);
            self.connections.len() - 1
        });
        let interest = Interest::READABLE | Interest::WRITABLE;
        if let Err(error) = self.poll.registry().register(&mut stream, Token(slot), interest) {
            self.free.push(slot);
            self.callers.forget(peer);
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
        self.surveys.tidy(self.now);
        if let Some(line) = self.log.renew(self.now) {
            tracing::warn!("{line}");
        }
        for slot in 0..self.connections.len() {
            let Some(connection) = &self.connections[slot] else { continue };
            if let Some(end) = overdue(connection, &self.limits, self.now) {
                let connection = self.connections[slot].take().expect("it was just looked at");
                self.close(Turn { connection, slot, messages: 0 }, end);
            }
        }
        self.flush_woken();
    }

    fn obey(&mut self) {
        while let Ok(order) = self.inbox.try_recv() {
            match order {
                // An asker that left is fine, here and below.
                Order::Tell { waiters, answer } => drop(answer.send(self.facts(waiters))),
                Order::Values { keys, answer } => {
                    drop(answer.send(keys.iter().map(|key| self.table.value(key)).collect()));
                }
                Order::Forget { all_but, answer } => {
                    self.forgetting.push_back((Forgetting::new(&self.table, all_but), answer));
                }
                Order::Slowest(answer) => drop(answer.send(self.slowest.list(self.now))),
                Order::Clients { limit, answer } => {
                    if self.rolls.len() < ROLLS_MAX {
                        self.rolls.push_back(Roll::new(limit, answer));
                    }
                }
                Order::Survey { prefix, answer } => self.surveys.ask(prefix, answer, &self.table, self.now),
                Order::Stop { grace } => {
                    self.stop_at = Some(self.now + grace);
                    for mut listener in self.listeners.drain(..) {
                        let _ = self.poll.registry().deregister(&mut *listener);
                    }
                }
            }
        }
    }

    /// A little of what those who look at the server want to know; then clients have their turns again.
    #[cold]
    fn look_around(&mut self, is_idle: bool) {
        if let Some(roll) = self.rolls.front_mut()
            && roll.step(&self.connections, &self.table)
        {
            let roll = self.rolls.pop_front().expect("it was just looked at");
            roll.answer(self.count, self.now);
        }
        if let Some((forgetting, _)) = self.forgetting.front_mut()
            && forgetting.step(&mut self.table)
            && let Some((forgetting, answer)) = self.forgetting.pop_front()
        {
            let _ = answer.send(forgetting.count()); // an asker that left is fine
        }
        // Where nobody waits one step is enough: the loop comes back at once, and looks for clients before.
        while self.surveys.is_due(is_idle, self.now) {
            self.surveys.step(&self.table, Instant::now);
            if is_idle {
                break;
            }
        }
    }

    /// Tells the table how many seconds have passed.
    #[cold]
    fn count_seconds(&mut self) {
        let seconds = self.now.duration_since(self.started).as_secs();
        self.next_second = self.started + Duration::from_secs(seconds + 1);
        self.table.set_seconds(seconds as u32); // 136 years
    }

    /// What has arrived is answered before the end, as far as the sockets take it.
    fn last_words(&mut self, buffer: &mut [u8]) {
        self.dear.open();
        for slot in 0..self.connections.len() {
            if let Some(Some(connection)) = self.connections.get_mut(slot) {
                connection.in_line = false;
            }
            self.hear(slot, false);
            self.serve(slot, buffer);
        }
        while let Some(slot) = self.again.pop() {
            self.flush(slot);
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

    fn facts(&self, waiters_max: usize) -> Facts {
        let waiters = self.table.oldest_waiters(waiters_max);
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
            keys_max: self.limits.table.keys,
            queue_items: self.table.queue_items(),
            queue_items_max: self.limits.table.queue_items,
            table_bytes: self.table.bytes(),
            buffer_bytes: self.buffered,
            memory_max: self.limits.table.bytes,
            waiters_count: self.table.waiters_count(),
            oldest_wait_seconds: self
                .table
                .oldest_wait()
                .map_or(0.0, |since| self.now.duration_since(since).as_secs_f64()),
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
    /// Messages that it may still have served.
    messages: usize,
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
        && !connection.in_line
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
            format!("it took fewer than {PROGRESS} of the {unsent} bytes it asked for in {limit}"),
        ));
    }
    None
}

/// The user of a client on this machine, if it is not one whose clients are served.
fn stranger(stream: &mio::net::TcpStream, peer: SocketAddr) -> Option<u32> {
    let owner = crate::owner::of_connection(peer, stream.local_addr().ok()?)?;
    (!owner.is_trusted()).then_some(owner.user)
}

/// Can it cost far more than the bytes it came in? All others cost about as much as their bytes, or as the reply.
fn is_dear(command: &Command<'_>) -> bool {
    matches!(command, Command::Info | Command::Call(Request::Append { .. } | Request::ListKeys))
}

/// Has it so many bytes or keys that it may take a while?
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
