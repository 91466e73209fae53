//! The server's loop: each connection has its turn when its socket is ready, and a deadline for its current
//! phase.
//!
//! A connection's requests are answered one at a time, in order, and the next is read after the answer was
//! taken. So a client that sends many in one write gets all answers, and holds at most one answer and one
//! head.
//!
//! Handlers that may take long run on other threads (`workers`): the connection waits for its answer, other
//! connections do not.
//!
//! When there are too many connections, those that keep us waiting are closed first: a client that sends a
//! whole request quickly is answered, however many others have sent half of one.

#![expect(
    clippy::disallowed_methods,
    reason = "the outermost layer: reads the clock once a round and after each answer"
)]

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use mio::{Events, Poll, Token};

use super::Limits;
use super::workers::{Ticket, Workers};
use crate::connection::{Asked, Connection, Phase, Tried};
use crate::head::{HeadLimits, HeadParser, Refusal};
use crate::host;
use crate::request::{Method, Request};
use crate::response::Response;
use crate::stream::Listener;

/// The token that wakes the loop to stop, or to take answers of handlers.
pub(super) const WAKE: Token = Token(usize::MAX);
/// Listeners' tokens count down from here.
const LISTENERS: usize = usize::MAX - 1;
const LISTENERS_MAX: usize = 64;

/// Bytes of one read. Heads are usually shorter than this.
const READ: usize = 4 << 10;
/// Requests of one connection that are answered before other connections have their turn.
const SHARE: usize = 8;
/// Reads in a row of a connection that is being closed.
const SWALLOWS: usize = 64;
/// Connections accepted before existing ones have their turn again.
const ACCEPTS: usize = 64;
/// How much of an answer must be taken for its deadline to restart: a slow client has enough time, but not
/// one that takes a byte now and then.
const PROGRESS: usize = 64 << 10;
/// How long a client that is being closed may take to read why.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(1);
/// How long accepting pauses when no descriptors are left.
const ACCEPT_REST: Duration = Duration::from_millis(50);

/// What decides about answers.
pub(super) struct Policy {
    pub(super) limits: Limits,
    pub(super) names: Vec<String>,
    pub(super) name_hint: String,
    pub(super) handler: Handler,
}

/// Where handlers run.
pub(super) enum Handler {
    /// The loop's thread.
    Here(Box<dyn Fn(&Request) -> Response + Send>),
    /// Separate threads.
    There(Workers),
}

pub(super) struct Loop {
    poll: Poll,
    listeners: Vec<Listener>,
    policy: Policy,
    stop: Arc<AtomicBool>,
    connections: Vec<Option<Box<Connection>>>,
    /// Connections that have more to send than one turn allows.
    again: Vec<usize>,
    accept_again: Option<Instant>,
    /// Requests that were handed to threads so far.
    handed: u64,
    now: Instant,
    /// When this round began. Deadlines are checked against it: what arrived while a handler worked is not
    /// late.
    woke: Instant,
}

/// What happens to a connection after its turn.
enum Fate {
    Stays,
    StaysAndGoesOn,
    Ends,
}

impl Loop {
    pub(super) fn new(
        poll: Poll,
        mut listeners: Vec<Listener>,
        policy: Policy,
        stop: Arc<AtomicBool>,
    ) -> io::Result<Self> {
        assert!(listeners.len() <= LISTENERS_MAX, "a name has fewer addresses than that");
        assert!(policy.limits.connections > 0, "the limit of connections must not be zero");
        for (index, listener) in listeners.iter_mut().enumerate() {
            listener.register(poll.registry(), Token(LISTENERS - index))?;
        }
        let connections = Vec::new();
        let now = Instant::now();
        let again = Vec::new();
        let (accept_again, handed, woke) = (None, 0, now);
        Ok(Loop { poll, listeners, policy, stop, connections, again, accept_again, handed, now, woke })
    }

    pub(super) fn run(mut self) {
        let mut events = Events::with_capacity(256);
        loop {
            if let Err(error) = self.poll.poll(&mut events, self.patience())
                && error.kind() != io::ErrorKind::Interrupted
            {
                tracing::error!(%error, "the HTTP server cannot poll and stops");
                return;
            }
            if self.stop.load(Ordering::SeqCst) {
                return;
            }
            self.now = Instant::now();
            self.woke = self.now;
            self.take_answers();
            let again = std::mem::take(&mut self.again);
            for event in &events {
                match event.token() {
                    WAKE => {}
                    Token(token) if token > LISTENERS - LISTENERS_MAX => self.accept_again = Some(self.now),
                    Token(slot) => self.serve(slot),
                }
            }
            again.into_iter().for_each(|slot| self.serve(slot));
            if self.accept_again.is_some_and(|at| at <= self.now) {
                self.accept();
            }
            self.end_overdue();
        }
    }

    /// How long the loop may sleep if nothing happens.
    fn patience(&self) -> Option<Duration> {
        if !self.again.is_empty() {
            return Some(Duration::ZERO);
        }
        let deadlines = self.connections.iter().flatten().map(|connection| self.deadline(connection));
        let next = deadlines.chain(self.accept_again).min();
        // A poll counts in whole milliseconds; one more, so that what is due then has passed.
        next.map(|at| at.saturating_duration_since(self.now) + Duration::from_millis(1))
    }

    fn deadline(&self, connection: &Connection) -> Instant {
        let limits = &self.policy.limits;
        connection.since
            + match connection.phase {
                Phase::Asking => limits.head_timeout,
                Phase::Idle => limits.idle_timeout,
                Phase::Working => limits.handler_timeout,
                Phase::Answering => limits.write_timeout,
                Phase::Leaving => LEAVE_TIMEOUT,
            }
    }

    // ── one connection's turn ──────────────────────────────────────────────────────────────────────────

    fn serve(&mut self, slot: usize) {
        let Some(mut connection) = self.connections.get_mut(slot).and_then(Option::take) else { return };
        match self.take_turn(slot, &mut connection) {
            Ok(Fate::Stays) => {}
            Ok(Fate::StaysAndGoesOn) => self.again.push(slot),
            Ok(Fate::Ends) | Err(_) => return, // dropped, and so closed
        }
        let answers = connection.phase == Phase::Answering;
        self.connections[slot] = Some(connection);
        if answers {
            self.bound_output();
        }
    }

    fn take_turn(&mut self, slot: usize, connection: &mut Connection) -> io::Result<Fate> {
        let mut buffer = [0; READ];
        let mut answered = 0;
        loop {
            match connection.phase {
                Phase::Answering => {
                    if connection.poll_write()? == Tried::Blocked {
                        if connection.has_taken(PROGRESS) {
                            connection.since = self.now;
                        }
                        return Ok(Fate::Stays);
                    }
                    answered += 1;
                    if connection.closes {
                        connection.shut();
                        connection.enter(Phase::Leaving, self.now);
                    } else if connection.input.is_empty() {
                        connection.input = Vec::new(); // an idle connection holds almost no memory
                        connection.enter(Phase::Idle, self.now);
                    } else {
                        connection.enter(Phase::Asking, self.now);
                    }
                }
                Phase::Leaving => return swallow(connection, &mut buffer),
                // What it sends meanwhile stays in the socket.
                Phase::Working => return Ok(Fate::Stays),
                Phase::Asking | Phase::Idle if answered == SHARE => return Ok(Fate::StaysAndGoesOn),
                Phase::Asking | Phase::Idle => match next_request(connection, self.policy.limits.head) {
                    Ok(Some(request)) => self.answer(slot, connection, request),
                    Err(refusal) => self.refuse(connection, refusal, Method::Get),
                    Ok(None) => match connection.poll_read(&mut buffer)? {
                        None => return Ok(Fate::Stays),
                        Some(0) => return Ok(Fate::Ends),
                        Some(length) => {
                            connection.input.extend_from_slice(&buffer[..length]);
                            if connection.phase == Phase::Idle {
                                connection.enter(Phase::Asking, self.now);
                            }
                        }
                    },
                },
            }
        }
    }

    fn answer(&mut self, slot: usize, connection: &mut Connection, request: Request) {
        if let Err(refusal) = self.admit(connection, &request) {
            return self.refuse(connection, refusal, request.method());
        }
        // Not the query: it has names of keys, which do not belong in the log.
        tracing::debug!(peer = %connection.peer, path = request.path(), "asked");
        let method = request.method();
        let asked = Asked { number: self.handed, method, keep_alive: request.keep_alive };
        match &self.policy.handler {
            // The handler may be called again after a panic: it is `Fn`, so what it changes is behind its own
            // locks, and those are poisoned.
            Handler::Here(handler) => {
                let answer = catch_unwind(AssertUnwindSafe(|| handler(&request))).ok();
                self.now = Instant::now(); // time spent in the handler does not count against the client
                self.reply(connection, asked, answer);
            }
            Handler::There(workers) => {
                if !workers.submit(Ticket { slot, number: self.handed }, request) {
                    return self.refuse(connection, Refusal::Busy, method);
                }
                self.handed += 1;
                connection.asked = Some(asked);
                connection.enter(Phase::Working, self.now);
            }
        }
    }

    /// May this be answered at all? A client that can open our socket file may send any request.
    fn admit(&self, connection: &Connection, request: &Request) -> Result<(), Refusal> {
        let Some(local) = connection.local else { return Ok(()) };
        let named = request.header("host").unwrap_or_default();
        if !host::is_ours(named, local, &self.policy.names) {
            return Err(Refusal::Host);
        }
        let origin =
            request.values("origin").next().map(|origin| std::str::from_utf8(origin).unwrap_or_default());
        if request.method() == Method::Post && !host::is_own_page(origin, named) {
            return Err(Refusal::Origin);
        }
        Ok(())
    }

    fn reply(&self, connection: &mut Connection, asked: Asked, answer: Option<Response>) {
        let Some(response) = answer else {
            return self.refuse(connection, Refusal::Handler, asked.method);
        };
        tracing::debug!(peer = %connection.peer, status = response.status(), "answered");
        connection.answer(response, asked.method != Method::Head, !asked.keep_alive, self.now);
    }

    /// Passes the answers of handlers on other threads to the connections that still wait for them.
    fn take_answers(&mut self) {
        let Handler::There(workers) = &self.policy.handler else { return };
        for (ticket, answer) in workers.take_done() {
            let Some(mut connection) = self.connections.get_mut(ticket.slot).and_then(Option::take) else {
                continue;
            };
            if let Some(asked) = connection.asked.take_if(|asked| asked.number == ticket.number) {
                self.reply(&mut connection, asked, answer);
            }
            self.connections[ticket.slot] = Some(connection);
            self.serve(ticket.slot);
        }
    }

    fn refuse(&self, connection: &mut Connection, refusal: Refusal, method: Method) {
        tracing::debug!(peer = %connection.peer, status = refusal.status(), %refusal, "refused");
        let response = Response::refusal(refusal, &self.policy.name_hint);
        connection.asked = None;
        connection.answer(response, method != Method::Head, true, self.now);
    }

    // ── accepting and closing ───────────────────────────────────────────────────────────────────────────

    fn accept(&mut self) {
        self.accept_again = None;
        for index in 0..self.listeners.len() {
            for turn in 0.. {
                if turn == ACCEPTS {
                    self.accept_again = Some(self.now);
                    break;
                }
                match self.listeners[index].accept() {
                    Ok((stream, peer)) => {
                        let limits = self.policy.limits.head;
                        self.welcome(Connection::new(stream, peer, limits, self.now));
                    }
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    // The connection was closed before it was accepted, or no descriptor is left: others
                    // continue meanwhile.
                    Err(error) => {
                        tracing::debug!(%error, "cannot accept a connection");
                        self.accept_again = Some(self.now + ACCEPT_REST);
                        break;
                    }
                }
            }
        }
    }

    /// Its request has usually arrived already, and is answered before another connection can displace it.
    fn welcome(&mut self, connection: Connection) {
        let mut connection = Box::new(connection);
        let free = self.connections.iter().position(Option::is_none);
        let slot = match free {
            Some(slot) => slot,
            None if self.connections.len() < self.policy.limits.connections => {
                self.connections.push(None);
                self.connections.len() - 1
            }
            None => self.make_room(),
        };
        if let Err(error) = connection.stream.register(self.poll.registry(), Token(slot)) {
            tracing::debug!(%error, "cannot watch a connection");
            return;
        }
        self.connections[slot] = Some(connection);
        self.serve(slot);
    }

    /// Closes the connection that deserves its slot least, and returns the slot.
    fn make_room(&mut self) -> usize {
        let rank = |connection: &Connection| match connection.phase {
            Phase::Leaving => 0,
            Phase::Asking => 1,
            Phase::Idle => 2,
            Phase::Answering => 3,
            Phase::Working => 4,
        };
        let present = self.connections.iter().enumerate();
        let present = present.filter_map(|(slot, connection)| Some((slot, connection.as_deref()?)));
        let victim = present.min_by_key(|(_, connection)| (rank(connection), connection.since));
        let (slot, connection) = victim.expect("every place is taken");
        tracing::debug!(peer = %connection.peer, phase = ?connection.phase, "closed to make room");
        self.connections[slot] = None;
        slot
    }

    /// Drops unread answers when all of them together are too much: first those of which nothing was taken
    /// for longest. The last one stays, however large: it harms no other client.
    fn bound_output(&mut self) {
        loop {
            let unread = self.connections.iter().enumerate();
            let unread = unread.filter_map(|(slot, connection)| Some((slot, connection.as_deref()?)));
            let unread = unread.filter(|(_, connection)| connection.phase == Phase::Answering);
            let held: usize = unread.clone().map(|(_, connection)| connection.held()).sum();
            if held <= self.policy.limits.output || unread.clone().count() == 1 {
                return;
            }
            let Some((slot, _)) = unread.min_by_key(|(_, connection)| connection.since) else { return };
            tracing::debug!(held, "gave up an answer that was not read");
            self.connections[slot] = None;
        }
    }

    fn end_overdue(&mut self) {
        for slot in 0..self.connections.len() {
            let Some(connection) = &self.connections[slot] else { continue };
            if self.deadline(connection) > self.woke {
                continue;
            }
            tracing::debug!(peer = %connection.peer, phase = ?connection.phase, "closed: timed out");
            // A client in the middle of a request can still read why; an idle one is just closed.
            let is_in_request = !connection.input.is_empty() || connection.begun.is_some();
            let told = match connection.phase {
                Phase::Asking if is_in_request => Some(Refusal::Slow),
                Phase::Working => Some(Refusal::Busy),
                _ => None,
            };
            if let (Some(mut connection), Some(refusal)) = (self.connections[slot].take(), told) {
                let method = connection.asked.map_or(Method::Get, |asked| asked.method);
                self.refuse(&mut connection, refusal, method);
                self.connections[slot] = Some(connection);
                self.serve(slot);
            }
        }
    }
}

/// The next request that has arrived completely.
fn next_request(connection: &mut Connection, limits: HeadLimits) -> Result<Option<Request>, Refusal> {
    if connection.begun.is_none() {
        let Some((request, length)) = connection.parser.advance(&connection.input)? else { return Ok(None) };
        connection.input.drain(..length);
        connection.parser = HeadParser::new(limits);
        connection.begun = Some(request);
    }
    let length = connection.input.len();
    let whole = connection.begun.take_if(|request| request.body_length() <= length);
    Ok(whole.map(|mut request| {
        request.body = connection.input.drain(..request.body_length()).collect();
        request
    }))
}

/// Reads and discards what a client sends that is being closed, until it closes.
fn swallow(connection: &mut Connection, buffer: &mut [u8]) -> io::Result<Fate> {
    for _ in 0..SWALLOWS {
        match connection.poll_read(buffer)? {
            None => return Ok(Fate::Stays),
            Some(0) => return Ok(Fate::Ends),
            Some(_) => {}
        }
    }
    Ok(Fate::StaysAndGoesOn)
}
