//! The relay's part of the loop: requests are merged and passed on.

use std::collections::VecDeque;
use std::hash::BuildHasher as _;
use std::io::{self, IoSlice, Read as _, Write as _};
use std::time::Instant;

use mio::Interest;
use mio::net::TcpStream;
use tenfold_memory::NotInherited;

use super::dial::{Dialed, Line};
use super::merge::{AlreadyWaiting, Effects, LocalId, Merge, Reply};
use super::{Order, RelayFacts};
use crate::connection::Connection;
use crate::request::show_keys;
use crate::server::{Closed, WaiterFacts};
use crate::table::SHARED_VALUE;
use crate::turns::{BACKEND, Backend, End, Loop, Turn, refuse};
use crate::value::Value;
use crate::wire::{self, Answer, Command, ReplySink as _, Status, Welcome};
use tenfold_base::show_duration;

/// Reads of the server's answers in one round, before clients get their turn.
const READS: usize = 16;
/// The longest answer that is passed on. A longer one costs its client the connection.
const ANSWER_MAX: u64 = 1 << 30;

/// The connection to the server and what is on its way.
pub(super) struct Passing {
    line: Line,
    token: [u8; 16],
    pub(super) merge: Merge,
    uplink: Option<Uplink>,
    /// The store that the server has: if it changes, the keys are lost.
    store: Option<u128>,
    lost_at: Option<Instant>,
    reconnects: u64,
    /// The client of each connection.
    clients: Vec<Option<LocalId>>,
    next_client: u64,
    /// Connections that may be served further.
    resumed: VecDeque<usize>,
    effects: Effects,
    /// Long values in replies to several clients, and their bytes.
    shared: Vec<Value>,
    shared_bytes: usize,
}

struct Uplink {
    stream: NotInherited<TcpStream>,
    /// Part of an answer.
    input: Vec<u8>,
    /// Bytes of an answer that is too long to be passed on.
    skip: u64,
    is_readable: bool,
    is_writable: bool,
}

/// A new name of a session: 128 random bits.
pub(super) fn new_token() -> [u8; 16] {
    let random = || std::hash::RandomState::new().hash_one(0).to_le_bytes();
    let mut token = [0; 16];
    token[..8].copy_from_slice(&random());
    token[8..].copy_from_slice(&random());
    token
}

impl Passing {
    pub(super) fn new(token: [u8; 16], line: Line) -> Self {
        Passing {
            line,
            token,
            merge: Merge::new(token),
            uplink: None,
            store: None,
            lost_at: None,
            reconnects: 0,
            clients: Vec::new(),
            next_client: 0,
            resumed: VecDeque::new(),
            effects: Effects::default(),
            shared: Vec::new(),
            shared_bytes: 0,
        }
    }

    fn client(&mut self, slot: usize) -> LocalId {
        if self.clients.len() <= slot {
            self.clients.resize(slot + 1, None);
        }
        *self.clients[slot].get_or_insert_with(|| {
            self.next_client += 1;
            LocalId(self.next_client << SLOT_BITS | slot as u64)
        })
    }

    /// The connection of a client, if it is still there.
    fn slot(&self, client: LocalId) -> Option<usize> {
        let slot = (client.0 & ((1 << SLOT_BITS) - 1)) as usize;
        (self.clients.get(slot) == Some(&Some(client))).then_some(slot)
    }

    fn sweep(&mut self) {
        let bytes = &mut self.shared_bytes;
        self.shared.retain(|value| {
            let is_held = value.is_shared();
            if !is_held {
                *bytes -= value.len();
            }
            is_held
        });
    }
}

/// The lower bits of a client's name are its connection.
const SLOT_BITS: u32 = 24;

impl Backend for Passing {
    type Order = Order;

    const NAME: &'static str = "relay";

    fn begin_round(_front: &mut Loop<Self>) {}

    #[inline]
    fn allows(front: &mut Loop<Self>, turn: &Turn, command: &Command<'_>) -> bool {
        let client = front.back.client(turn.slot);
        match command {
            Command::Call(_) | Command::Info => front.back.merge.allows_request(client),
            Command::Ping { .. } | Command::CancelWait => front.back.merge.allows_answer(client),
            _ => true,
        }
    }

    #[inline]
    fn execute(
        front: &mut Loop<Self>,
        turn: &mut Turn,
        command: Command<'_>,
        _length: usize,
    ) -> Result<(), End> {
        let back = &mut front.back;
        let client = back.client(turn.slot);
        match command {
            Command::Call(request) => {
                turn.connection.last_operation = Some(request.operation());
                back.merge.ask(client, request).map_err(|AlreadyWaiting| {
                    refuse(Closed::AlreadyWaiting, "this client is already waiting".into())
                })
            }
            Command::Ping { nonce } => {
                turn.pong(nonce, &mut front.pool);
                Ok(())
            }
            Command::CancelWait => {
                back.merge.cancel(client, &mut back.effects);
                wire::encode_cancelled(&mut turn.connection.output.sink(&mut front.pool));
                front.deliver(Some(turn));
                Ok(())
            }
            Command::Info => {
                back.merge.ask_info(client);
                Ok(())
            }
            Command::Validate { magic } => turn.validate(magic),
            Command::Session(_) | Command::Numbered { .. } | Command::Acknowledge { .. } | Command::Bye => {
                Err(refuse(
                    Closed::UnknownOpcode,
                    "it asked for a session, which a relay does not have".into(),
                ))
            }
        }
    }

    fn call(front: &mut Loop<Self>) -> Option<usize> {
        front.back.resumed.pop_front()
    }

    fn forget(front: &mut Loop<Self>, slot: usize, _connection: &Connection) {
        if let Some(client) = front.back.clients.get_mut(slot).and_then(Option::take) {
            front.back.merge.forget(client, &mut front.back.effects);
            front.deliver(None);
        }
    }

    fn end_round(front: &mut Loop<Self>, _is_idle: bool) {
        front.write_upstream();
    }

    fn obey(front: &mut Loop<Self>, order: Order) {
        match order {
            Order::Tell(answer) => drop(answer.send(front.relay_facts())), // the asker may have timed out
            Order::Waiters(answer) => drop(answer.send(front.waiters())),  // the same
            Order::Connected(dialed) => front.connected(*dialed),
            Order::Stop { grace } => front.stop(grace),
        }
    }

    fn attend(front: &mut Loop<Self>, is_ready: bool, buffer: &mut [u8]) {
        let Some(uplink) = &mut front.back.uplink else { return };
        if is_ready {
            (uplink.is_readable, uplink.is_writable) = (true, true);
        }
        if uplink.is_readable {
            front.read_upstream(buffer);
        }
    }

    fn tick(front: &mut Loop<Self>) {
        front.back.sweep();
    }

    fn end(_front: &mut Loop<Self>) {}

    /// What clients that have left asked for last, such as a SET, must reach the server, too.
    fn is_settled(&self) -> bool {
        self.uplink.is_none() || self.merge.under_way() == 0
    }

    fn last(front: &mut Loop<Self>) {
        front.write_upstream();
        let mut bye = Vec::new();
        wire::encode(&Command::Bye, &mut bye);
        if front.back.merge.pipe.to_write().0.is_empty()
            && let Some(uplink) = &mut front.back.uplink
        {
            let _gone_or_full = uplink.stream.write(&bye); // then the session expires
        }
    }

    fn bytes(&self) -> usize {
        let input = self.uplink.as_ref().map_or(0, |uplink| uplink.input.capacity());
        self.merge.pipe.bytes() + self.shared_bytes + input
    }

    fn is_busy(&self) -> bool {
        !self.resumed.is_empty() || self.uplink.as_ref().is_some_and(|uplink| uplink.is_readable)
    }
}

impl Loop<Passing> {
    fn relay_facts(&self) -> RelayFacts {
        let back = &self.back;
        RelayFacts {
            address: self.address.to_string(),
            upstream: back.line.upstream.to_string(),
            is_connected: back.uplink.is_some(),
            reconnects: back.reconnects,
            connections: self.count,
            accepted: self.counters.accepted,
            closed: self.counters.closed.values().sum(),
            requests: back.merge.asked,
            requests_sent: back.merge.pipe.last(),
            under_way: back.merge.under_way(),
            registering: back.merge.registering(),
            bytes_in: self.counters.bytes_in,
            bytes_out: self.counters.bytes_out,
            waiting: back.merge.waiting(),
            waits: back.merge.waits(),
        }
    }

    fn waiters(&self) -> Vec<WaiterFacts> {
        const KEYS_SHOWN: usize = 8;
        let waiting = |(slot, client): (usize, &Option<LocalId>)| {
            let connection = self.connections.get(slot)?.as_ref()?;
            let (operation, keys) = self.back.merge.waits_for((*client)?)?;
            Some(WaiterFacts {
                peer: connection.peer.to_string(),
                operation: operation.name().to_string(),
                keys: show_keys(&keys[..keys.len().min(KEYS_SHOWN)]),
                keys_count: keys.len(),
                // A client that waits sends nothing, except to cancel its wait.
                seconds: self.now.duration_since(connection.last_heard).as_secs_f64(),
            })
        };
        self.back.clients.iter().enumerate().filter_map(waiting).collect()
    }

    /// The server has welcomed the session on a new connection.
    pub(super) fn connected(&mut self, dialed: Dialed) {
        let welcome = &dialed.welcome;
        let is_resumed =
            welcome.flags & Welcome::RESUMED != 0 && self.back.merge.pipe.resume(welcome.requests);
        if !is_resumed && self.back.merge.pipe.is_used() {
            self.give_up(welcome);
        }
        self.back.reconnects += u64::from(self.back.store.is_some());
        self.back.store = Some(welcome.store);
        self.limits.message.key = self.limits.message.key.min(welcome.limits.key);
        self.limits.message.value = self.limits.message.value.min(welcome.limits.value);
        self.limits.message.keys = self.limits.message.keys.min(welcome.limits.keys);
        self.limits.message.request = self.limits.message.request.min(welcome.limits.request);
        if let Some(since) = self.back.lost_at.take() {
            let upstream = &self.back.line.upstream;
            let elapsed = show_duration(self.now.duration_since(since));
            tracing::info!("relay: connected to the store server at {upstream} again after {elapsed}");
        }
        let mut stream = TcpStream::from_std(dialed.stream);
        let interest = Interest::READABLE | Interest::WRITABLE;
        if let Err(error) = self.poll.registry().register(&mut stream, BACKEND, interest) {
            return self.lose_upstream(&format!("cannot poll it: {error}"));
        }
        self.back.merge.set_connected(true, &mut self.back.effects);
        self.back.uplink = Some(Uplink {
            stream: stream.into(),
            input: dialed.rest,
            skip: 0,
            is_readable: true,
            is_writable: true,
        });
        self.write_upstream();
    }

    /// The server does not know the session any more: what became of its requests is unknown, and perhaps the
    /// keys are lost. All clients are closed, as the server's end would have closed them without a relay.
    #[cold]
    fn give_up(&mut self, welcome: &Welcome) {
        let upstream = self.back.line.upstream.to_string();
        let elapsed = self.back.lost_at.map_or(String::new(), |since| {
            format!(" after {} without a connection", show_duration(self.now.duration_since(since)))
        });
        let reason = if self.back.store == Some(welcome.store) {
            format!("the store server at {upstream} has forgotten this relay's session{elapsed}")
        } else {
            format!("the store server at {upstream} was started again{elapsed}, and its keys are lost")
        };
        tracing::error!("relay: {reason}: closing {} clients", self.count);
        for slot in 0..self.connections.len() {
            if let Some(connection) = self.connections[slot].take() {
                self.close(Turn::of(connection, slot), refuse(Closed::Session, reason.clone()));
            }
        }
        // What the clients' ends have caused is for the old session.
        self.back.merge = Merge::new(self.back.token);
        self.back.resumed.clear();
        self.back.effects = Effects::default();
    }

    #[cold]
    fn lose_upstream(&mut self, reason: &str) {
        let Some(mut uplink) = self.back.uplink.take() else { return };
        let _ = self.poll.registry().deregister(&mut *uplink.stream);
        drop(uplink);
        self.back.lost_at = Some(self.now);
        self.back.merge.set_connected(false, &mut self.back.effects);
        self.deliver(None);
        tracing::warn!("relay: lost the store server at {}: {reason}", self.back.line.upstream);
        self.back.line.reconnect(self.back.merge.pipe.hello());
    }

    fn read_upstream(&mut self, buffer: &mut [u8]) {
        for _ in 0..READS {
            if let Err(reason) = self.take_answers() {
                return self.lose_upstream(&reason);
            }
            let Some(uplink) = &mut self.back.uplink else { return };
            match uplink.stream.read(buffer) {
                Ok(0) => return self.lose_upstream("it closed the connection"),
                Ok(length) => {
                    let skipped = uplink.skip.min(length as u64) as usize;
                    uplink.skip -= skipped as u64;
                    uplink.input.extend_from_slice(&buffer[skipped..length]);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    uplink.is_readable = false;
                    break;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return self.lose_upstream(&error.to_string()),
            }
        }
        if let Err(reason) = self.take_answers() {
            self.lose_upstream(&reason);
        }
    }

    /// Handles every whole answer that has arrived.
    fn take_answers(&mut self) -> Result<(), String> {
        const KEPT: usize = 256 << 10;
        let Some(uplink) = &mut self.back.uplink else { return Ok(()) };
        let input = std::mem::take(&mut uplink.input);
        let mut at = 0;
        let mut result = Ok(());
        while let Some(head) = input.get(at..at + Answer::HEAD) {
            let head = head.try_into().expect("it has this length");
            let Some((number, status, length)) = Answer::decode_head(head) else {
                result = Err("it sent an answer of an unknown kind".into());
                break;
            };
            let from = at + Answer::HEAD;
            let effects = &mut self.back.effects;
            let answered = if length > ANSWER_MAX {
                let here = (input.len() - from) as u64;
                uplink.skip = length.saturating_sub(here);
                at = from + length.min(here) as usize;
                let reason = format!("its reply of {length} bytes is over the relay's limit of {ANSWER_MAX}");
                self.back.merge.answer(number, Status::Refused, reason.as_bytes(), effects)
            } else {
                let Some(body) = input.get(from..from + length as usize) else { break };
                at = from + length as usize;
                self.back.merge.answer(number, status, body, effects)
            };
            if let Err(nonsense) = answered {
                result = Err(nonsense.to_string());
                break;
            }
        }
        let mut input = input;
        input.drain(..at);
        if input.is_empty() && input.capacity() > KEPT {
            input = Vec::new();
        }
        uplink.input = input;
        self.deliver(None);
        result
    }

    /// Writes what the server accepts.
    fn write_upstream(&mut self) {
        while let Some(uplink) = self.back.uplink.as_mut().filter(|uplink| uplink.is_writable) {
            let (first, second) = self.back.merge.pipe.to_write();
            if first.is_empty() {
                return;
            }
            let slices = [IoSlice::new(first), IoSlice::new(second)];
            match uplink.stream.write_vectored(&slices) {
                Ok(count) => self.back.merge.pipe.wrote(count),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => uplink.is_writable = false,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return self.lose_upstream(&error.to_string()),
            }
        }
    }

    /// Carries out what answers have caused.
    fn deliver(&mut self, turn: Option<&mut Turn>) {
        let mut own = turn;
        let mut effects = std::mem::take(&mut self.back.effects);
        for (client, reply) in effects.replies.drain(..) {
            let Some(slot) = self.back.slot(client) else { continue };
            let connection = match &mut own {
                Some(turn) if turn.slot == slot => &mut turn.connection,
                _ => {
                    let Some(Some(connection)) = self.connections.get_mut(slot) else { continue };
                    self.woken.push(slot);
                    connection
                }
            };
            let mut sink = connection.output.sink(&mut self.pool);
            match reply {
                Reply::Bytes(value) => {
                    // The output does not count a value that others hold as well.
                    let is_counted =
                        self.back.shared.last().is_some_and(|last| last.as_ptr() == value.as_ptr());
                    if value.len() >= SHARED_VALUE && !is_counted {
                        self.back.shared_bytes += value.len();
                        self.back.shared.push(value.clone());
                    }
                    sink.value(&value);
                }
                Reply::Number(number) => sink.bytes(&number.to_le_bytes()),
                Reply::Ready => sink.bytes(&[0]),
            }
        }
        for client in effects.resumed.drain(..) {
            self.back.resumed.extend(self.back.slot(client));
        }
        let refused = std::mem::take(&mut effects.refused);
        self.back.effects = effects;
        for (client, reason) in refused {
            let Some(slot) = self.back.slot(client) else { continue };
            let Some(connection) = self.connections.get_mut(slot).and_then(Option::take) else { continue };
            self.close(Turn::of(connection, slot), refuse(Closed::Upstream, reason));
        }
    }
}
