//! The server's part of the loop: requests are executed by a table.
//!
//! Also here: sessions of relays, what is timed or put in line because it may take long, and what other
//! threads ask of the server.

#![expect(clippy::disallowed_methods, reason = "times expensive requests")]

use std::collections::VecDeque;
use std::hash::BuildHasher as _;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use super::dear::Dear;
use super::roll::Roll;
use super::slow::{Slowest, Suspect};
use super::surveys::Surveys;
use super::{Closed, Facts, Limits, Order, WaiterFacts};
use crate::connection::Connection;
use crate::request::{Operation, Request, Response, show_keys};
use crate::sessions::{SessionId, Sessions, Violation};
use crate::table::{ClientId, Forgetting, Refusal, Replies, SHARED_VALUE, Table};
use crate::turns::{Backend, End, Loop, Turn, refuse};
use crate::wire::{self, Answer, Ask, Body, Command, Hello, Status, Welcome};

/// A request with more keys than this is timed.
const KEYS_LIGHT: usize = 16;
/// A message shorter than this has neither more keys than that nor a long value, so most messages need no
/// further check.
const LIGHT: usize = (KEYS_LIGHT + 1) * size_of::<u64>();
/// How many requests for the list of clients may be pending.
const ROLLS_MAX: usize = 8;

/// A table and what is around it.
pub(super) struct Serving {
    table: Table,
    replies: Replies,
    sessions: Sessions,
    /// Names this table; a server that is started again has another.
    store: u128,
    operations: [u64; Operation::ALL.len()],
    /// When the table's time is next advanced.
    next_second: Option<Instant>,
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

/// A request that may take long.
struct Watch {
    suspect: Suspect,
    start: Instant,
    /// Its bytes.
    length: usize,
    /// Unsent bytes that its client had before it.
    unsent: usize,
}

impl Serving {
    pub(super) fn new(limits: &Limits) -> Self {
        let random = || u128::from(std::hash::RandomState::new().hash_one(0));
        Serving {
            table: Table::new(limits.table),
            replies: Vec::new(),
            sessions: Sessions::new(limits.connections, limits.session_timeout),
            store: random() << 64 | random(),
            operations: [0; Operation::ALL.len()],
            next_second: None,
            slowest: Slowest::new(Instant::now()),
            dear: Dear::default(),
            watch: None,
            surveys: Surveys::default(),
            rolls: VecDeque::new(),
            forgetting: VecDeque::new(),
        }
    }
}

impl Backend for Serving {
    type Order = Order;

    const NAME: &'static str = "store server";

    fn begin_round(front: &mut Loop<Self>) {
        front.back.dear.renew();
        if front.back.next_second.is_none_or(|at| front.now >= at) {
            front.count_seconds();
        }
    }

    #[inline]
    fn allows(front: &mut Loop<Self>, turn: &Turn, command: &Command<'_>) -> bool {
        let allows = !is_dear(command) || front.back.dear.allows(turn.slot);
        if !allows {
            front.back.dear.wait(turn.slot);
        }
        allows
    }

    #[inline]
    fn execute(
        front: &mut Loop<Self>,
        turn: &mut Turn,
        command: Command<'_>,
        length: usize,
    ) -> Result<(), End> {
        let is_dear = is_dear(&command);
        // One call of `execute`, so that it is compiled into the loop.
        let is_watched = (is_dear || length >= LIGHT) && front.watch(turn, &command, length);
        front.execute(turn, command)?;
        if is_watched {
            front.end_watch(turn, is_dear);
        }
        Ok(())
    }

    fn call(front: &mut Loop<Self>) -> Option<usize> {
        front.back.dear.call()
    }

    fn forget(front: &mut Loop<Self>, slot: usize, connection: &Connection) {
        let back = &mut front.back;
        back.table.forget(ClientId(slot), &mut back.replies);
        if let Some(session) = connection.session {
            back.sessions.leave(session, slot, front.now, &mut back.table, &mut back.replies);
        }
        front.deliver(None);
    }

    fn end_round(front: &mut Loop<Self>, is_idle: bool) {
        let back = &front.back;
        if back.surveys.is_pending() || !back.rolls.is_empty() || !back.forgetting.is_empty() {
            front.look_around(is_idle);
        }
    }

    fn obey(front: &mut Loop<Self>, order: Order) {
        front.obey(order);
    }

    fn tick(front: &mut Loop<Self>) {
        let back = &mut front.back;
        back.table.sweep();
        back.surveys.tidy(front.now);
        back.sessions.expire(front.now, &mut back.table, &mut back.replies);
        front.deliver(None);
    }

    fn relieve(front: &mut Loop<Self>) -> bool {
        let back = &mut front.back;
        let ended =
            back.sessions.bytes() > 0 && back.sessions.end_oldest_alone(&mut back.table, &mut back.replies);
        front.deliver(None);
        ended
    }

    fn end(front: &mut Loop<Self>) {
        front.back.dear.open();
    }

    fn bytes(&self) -> usize {
        self.table.bytes() + self.sessions.bytes()
    }

    fn is_busy(&self) -> bool {
        self.dear.is_pending()
            || self.surveys.is_pending()
            || !self.rolls.is_empty()
            || !self.forgetting.is_empty()
    }

    fn wants_round_at(&self) -> Option<Instant> {
        // Sessions without a connection expire.
        self.next_second.filter(|_| self.sessions.count() > 0)
    }
}

impl Loop<Serving> {
    /// Reads the clock if what follows may take long.
    #[cold]
    fn watch(&mut self, turn: &Turn, command: &Command<'_>, length: usize) -> bool {
        if !is_dear(command) && !is_heavy(command) {
            return false;
        }
        let (operation, (key, keys_count)) = match request_of(command) {
            Some(request) => (request.operation().name(), request.first_key()),
            None => ("info", (None, 0)),
        };
        let suspect = Suspect::new(operation, key.unwrap_or_default(), keys_count, turn.connection.peer);
        let unsent = turn.connection.output.len();
        self.back.watch = Some(Watch { suspect, length, unsent, start: Instant::now() });
        true
    }

    #[cold]
    fn end_watch(&mut self, turn: &mut Turn, is_dear: bool) {
        let Some(watch) = self.back.watch.take() else { return };
        let end = Instant::now();
        let bytes = watch.length + turn.connection.output.len() - watch.unsent;
        self.back.slowest.note(watch.suspect, bytes, end.duration_since(watch.start), end);
        if is_dear {
            self.back.dear.note(end.duration_since(watch.start));
        }
    }

    #[inline]
    fn execute(&mut self, turn: &mut Turn, command: Command<'_>) -> Result<(), End> {
        let client = ClientId(turn.slot);
        match command {
            Command::Call(request) => {
                let operation = request.operation();
                self.back.operations[operation as usize] += 1;
                turn.connection.last_operation = Some(operation);
                let applied = self.back.table.apply(client, request, self.now, &mut self.back.replies);
                self.deliver(Some(turn));
                applied.map_err(|refusal| {
                    let closed = match &refusal {
                        Refusal::AlreadyWaiting => Closed::AlreadyWaiting,
                        Refusal::Full { .. } => Closed::Full,
                        Refusal::NotANumber { .. } => Closed::NotANumber,
                    };
                    refuse(closed, refusal.without_key())
                })
            }
            Command::Ping { nonce } => {
                turn.pong(nonce, &mut self.pool);
                Ok(())
            }
            Command::CancelWait => {
                self.back.table.cancel(client, &mut self.back.replies);
                self.deliver(Some(turn));
                wire::encode_cancelled(&mut turn.connection.output.sink(&mut self.pool));
                Ok(())
            }
            Command::Validate { magic } => turn.validate(magic),
            Command::Info => {
                let response = self.info();
                wire::encode_response(response, &mut turn.connection.output.sink(&mut self.pool));
                Ok(())
            }
            Command::Numbered { number, ask } => self.execute_numbered(turn, number, ask),
            Command::Acknowledge { answers } => {
                let session = session_of(turn)?;
                self.back.sessions.acknowledge(session, answers).map_err(violation)
            }
            Command::Session(hello) => self.open_session(turn, &hello),
            Command::Bye => {
                let session = session_of(turn)?;
                turn.connection.session = None;
                self.back.sessions.end(session, &mut self.back.table, &mut self.back.replies);
                self.deliver(Some(turn));
                Err(End::Left)
            }
        }
    }

    fn info(&self) -> Response {
        let facts = serde_json::to_vec(&self.facts(Facts::WAITERS_MAX)).expect("facts are plain data");
        Response::Value(Some(facts.into()))
    }

    // ── sessions ───────────────────────────────────────────────────────────────────────────────────────

    #[cold]
    fn open_session(&mut self, turn: &mut Turn, hello: &Hello) -> Result<(), End> {
        if turn.connection.session.is_some() {
            return Err(refuse(Closed::Session, "it opened a second session".into()));
        }
        let mut welcome = Welcome {
            version: wire::VERSION,
            flags: 0,
            store: self.back.store,
            requests: 0,
            kept_for: u64::try_from(self.back.sessions.kept_for().as_millis()).unwrap_or(u64::MAX),
            limits: self.limits.message,
        };
        if hello.version != wire::VERSION {
            welcome.encode(&mut turn.connection.output.sink(&mut self.pool));
            let reason =
                format!("it speaks version {} of sessions, this server {}", hello.version, wire::VERSION);
            return Err(refuse(Closed::Session, reason));
        }
        let back = &mut self.back;
        let opened = back.sessions.open(hello, turn.slot, self.now, &mut back.table, &mut back.replies);
        let opened = opened.map_err(violation)?;
        turn.connection.session = Some(opened.session);
        welcome.requests = opened.executed;
        if opened.resumed {
            welcome.flags |= Welcome::RESUMED;
        }
        let mut sink = turn.connection.output.sink(&mut self.pool);
        welcome.encode(&mut sink);
        self.back.sessions.unacknowledged(opened.session).for_each(|answer| answer.encode(&mut sink));
        if let Some(slot) = opened.replaces
            && let Some(Some(old)) = self.connections.get_mut(slot)
        {
            old.session = None;
            let connection = self.connections[slot].take().expect("it was just looked at");
            self.close(Turn::of(connection, slot), End::Left);
        }
        self.deliver(Some(turn));
        Ok(())
    }

    fn execute_numbered(&mut self, turn: &mut Turn, number: u64, ask: Ask<'_>) -> Result<(), End> {
        let session = session_of(turn)?;
        if let Ask::Call(request) | Ask::CallAfter(_, request) = &ask {
            let operation = request.operation();
            self.back.operations[operation as usize] += 1;
            turn.connection.last_operation = Some(operation);
        }
        let is_info = ask == Ask::Info;
        let back = &mut self.back;
        let answer =
            back.sessions.execute(session, number, ask, self.now, &mut back.table, &mut back.replies);
        self.deliver(Some(turn));
        let mut answer = answer.map_err(violation)?;
        if is_info {
            answer = Some(Answer { number, status: Status::Done, body: Body::Reply(self.info()) });
        }
        if let Some(answer) = answer {
            self.answer(session, answer, &mut Some(turn));
        }
        Ok(())
    }

    /// Keeps an answer and sends it, if the session has a connection.
    fn answer(&mut self, session: SessionId, answer: Answer, own: &mut Option<&mut Turn>) {
        let (slot, answer) = self.back.sessions.keep(session, answer);
        let Some(slot) = slot else { return };
        let connection = match own {
            Some(turn) if turn.slot == slot => &mut turn.connection,
            _ => {
                let Some(Some(connection)) = self.connections.get_mut(slot) else { return };
                self.woken.push(slot);
                connection
            }
        };
        answer.encode(&mut connection.output.sink(&mut self.pool));
    }

    /// Delivers the accumulated replies: to the connection whose turn it is, and to others.
    #[inline]
    fn deliver(&mut self, turn: Option<&mut Turn>) {
        let mut own = turn;
        let mut next = 0;
        while next < self.back.replies.len() {
            let (client, response) = std::mem::replace(&mut self.back.replies[next], DELIVERED);
            next += 1;
            if Sessions::has(client) {
                self.deliver_to_session(client, response, &mut own);
                continue;
            }
            if response == Response::Done {
                continue; // nothing to send
            }
            let ClientId(slot) = client;
            let connection = match &mut own {
                Some(turn) if turn.slot == slot => &mut turn.connection,
                _ => {
                    self.woken.push(slot);
                    self.connections[slot].as_mut().expect("the table forgets those who left")
                }
            };
            wire::encode_response(response, &mut connection.output.sink(&mut self.pool));
        }
        self.back.replies.clear();
    }

    fn deliver_to_session(&mut self, client: ClientId, response: Response, own: &mut Option<&mut Turn>) {
        let back = &mut self.back;
        if let Some((session, answer)) =
            back.sessions.hear(client, response, self.now, &mut back.table, &mut back.replies)
        {
            self.answer(session, answer, own);
        }
    }

    // ── what other threads ask ─────────────────────────────────────────────────────────────────────────

    fn obey(&mut self, order: Order) {
        match order {
            // The asker may have timed out, here and below.
            Order::Tell { waiters, answer } => drop(answer.send(self.facts(waiters))),
            Order::Values { keys, answer } => {
                drop(answer.send(keys.iter().map(|key| self.back.table.value(key)).collect()));
            }
            Order::Forget { all_but, answer } => {
                self.back.forgetting.push_back((Forgetting::new(&self.back.table, all_but), answer));
            }
            Order::Slowest(answer) => drop(answer.send(self.back.slowest.list(self.now))),
            Order::Clients { limit, answer } => {
                if self.back.rolls.len() < ROLLS_MAX {
                    self.back.rolls.push_back(Roll::new(limit, answer));
                }
            }
            Order::Survey { prefix, answer } => {
                self.back.surveys.ask(prefix, answer, &self.back.table, self.now);
            }
            Order::Stop { grace } => self.stop(grace),
        }
    }

    /// Does a small part of pending reports about the server; then clients get their turns again.
    #[cold]
    fn look_around(&mut self, is_idle: bool) {
        if let Some(roll) = self.back.rolls.front_mut()
            && roll.step(&self.connections, &self.back.table)
        {
            let roll = self.back.rolls.pop_front().expect("it was just looked at");
            roll.answer(self.count, self.now);
        }
        if let Some((forgetting, _)) = self.back.forgetting.front_mut()
            && forgetting.step(&mut self.back.table)
            && let Some((forgetting, answer)) = self.back.forgetting.pop_front()
        {
            let _ = answer.send(forgetting.count()); // the asker may have timed out
        }
        // If no client waits, one step is enough: the loop continues immediately, and checks for clients
        // first.
        while self.back.surveys.is_due(is_idle, self.now) {
            self.back.surveys.step(&self.back.table, Instant::now);
            if is_idle {
                break;
            }
        }
    }

    /// Sets the table's time.
    #[cold]
    fn count_seconds(&mut self) {
        let seconds = self.now.duration_since(self.started).as_secs();
        self.back.next_second = Some(self.started + Duration::from_secs(seconds + 1));
        self.back.table.set_seconds(seconds as u32); // 136 years
    }

    fn facts(&self, waiters_max: usize) -> Facts {
        let waiters = self.back.table.oldest_waiters(waiters_max);
        let operations = Operation::ALL.into_iter().zip(self.back.operations).filter(|(_, count)| *count > 0);
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
            keys: self.back.table.keys(),
            keys_max: self.limits.table.keys,
            queue_items: self.back.table.queue_items(),
            queue_items_max: self.limits.table.queue_items,
            sessions: self.back.sessions.count(),
            table_bytes: self.back.table.bytes(),
            buffer_bytes: self.buffered,
            memory_max: self.limits.table.bytes,
            waiters_count: self.back.table.waiters_count(),
            oldest_wait_seconds: self
                .back
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
        let slot = if Sessions::has(client) { self.back.sessions.slot_of(client) } else { Some(client.0) };
        let Some(slot) = slot else { return "a relay without a connection".into() };
        match self.connections.get(slot).and_then(Option::as_ref) {
            Some(connection) => connection.peer.to_string(),
            None => "the client that asks".into(), // it is not in the list during its turn
        }
    }
}

/// Takes the place of a reply that was delivered.
const DELIVERED: (ClientId, Response) = (ClientId(usize::MAX), Response::Done);

fn session_of(turn: &Turn) -> Result<SessionId, End> {
    turn.connection.session.ok_or_else(|| refuse(Closed::Session, "it has not opened a session".into()))
}

#[cold]
fn violation(violation: Violation) -> End {
    let closed = match violation {
        Violation::TooMany { .. } => Closed::Connections,
        _ => Closed::Session,
    };
    refuse(closed, violation.to_string())
}

/// The request in a message.
#[inline]
fn request_of<'a, 'b>(command: &'b Command<'a>) -> Option<&'b Request<'a>> {
    match command {
        Command::Call(request)
        | Command::Numbered { ask: Ask::Call(request) | Ask::CallAfter(_, request), .. } => Some(request),
        _ => None,
    }
}

/// Whether it can cost far more than its bytes. All others cost about as much as their bytes or their reply.
#[inline]
fn is_dear(command: &Command<'_>) -> bool {
    match command {
        Command::Info | Command::Numbered { ask: Ask::Info, .. } => true,
        _ => matches!(request_of(command), Some(Request::Append { .. } | Request::ListKeys)),
    }
}

/// Whether it has so many bytes or keys that it may take a while.
fn is_heavy(command: &Command<'_>) -> bool {
    if let Command::Numbered { ask: Ask::Join(_, keys), .. } = command {
        return keys.len() > KEYS_LIGHT;
    }
    let Some(request) = request_of(command) else { return false };
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
