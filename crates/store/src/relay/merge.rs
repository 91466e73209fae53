//! Which requests of local clients travel together, and who gets which part of an answer.
//!
//! Every merge is such that the server could have executed the requests one after the other, at the moment
//! when it executed the merged one:
//!
//! - `get` and every other request that only reads: those for the same that arrived before it was sent share
//!   its answer. Those that arrive later share the next.
//! - `add`: those that arrive while one of the same key is under way are summed up for the next one. Each
//!   client gets its partial sum, in the order of arrival.
//! - `wait`: one registration at the server serves all local clients that wait for the same keys. A client
//!   that arrives later *joins* it: only the server knows whether a key has been seen meanwhile.
//! - `barrier`: arrivals while one is under way arrive together.
//!
//! Everything else passes through, in order. Values are not cached. If a client leaves, its pops that have not
//! reached the server take no items. A client whose request is held back for
//! the next merged one is not served further until that is sent, so the requests of one client are executed
//! in the order in which it sent them.
//!
//! Pure: no sockets, no clock.

mod answers;

use std::collections::VecDeque;
use std::sync::Arc;

use foldhash::HashMap;

use super::pipe::Pipe;
use crate::request::{Bytes, Operation, Request};
use crate::value::Value;
use crate::wire::{self, Ask, Command, Decoded, MessageLimits, Scan, Status};

/// Requests of one client that may be under way.
const UNDER_WAY_MAX: usize = 64;
/// Bytes of requests that the server has not confirmed, beyond which no client is served.
const UNCONFIRMED_MAX: usize = 32 << 20;
/// Requests under way for all clients together, not counting waits.
const FLIGHTS_MAX: usize = 64 << 10;

/// Requests longer than this are not compared with others.
const READ_MAX: usize = 64 << 10;

/// A local client. Never used again for another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct LocalId(pub(crate) u64);

/// What a client gets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Reply {
    /// These bytes.
    Bytes(Value),
    /// A number.
    Number(i64),
    /// The end of a wait.
    Ready,
}

/// What an answer causes.
#[derive(Debug, Default)]
pub(crate) struct Effects {
    pub(crate) replies: Vec<(LocalId, Reply)>,
    /// Clients whose request was refused, with the reason.
    pub(crate) refused: Vec<(LocalId, String)>,
    /// Clients that may be served further.
    pub(crate) resumed: Vec<LocalId>,
}

/// The server broke a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Nonsense {
    /// An answer to a request that was never made.
    Number(u64),
    /// An answer that cannot be one to this request.
    Answer(u64),
}

impl std::fmt::Display for Nonsense {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Nonsense::Number(number) => write!(f, "it answered request {number}, which was never sent"),
            Nonsense::Answer(number) => write!(f, "its answer to request {number} is invalid"),
        }
    }
}

/// A second wait while one is pending.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct AlreadyWaiting;

pub(crate) type Keys = Arc<[Value]>;

#[derive(Debug)]
pub(crate) struct Merge {
    pub(crate) pipe: Pipe,
    locals: HashMap<LocalId, Local>,
    flights: HashMap<u64, Flight>,
    /// By the bytes of the request.
    reads: HashMap<Value, Shared<LocalId>>,
    adds: HashMap<Value, Shared<(LocalId, i64)>>,
    groups: HashMap<Keys, Group>,
    barriers: HashMap<(Value, i64), Arrivals>,
    /// Waits that the server has or will have, by number.
    waits: HashMap<u64, Wait>,
    /// Clients that were turned down because too much was under way.
    crowded: VecDeque<LocalId>,
    is_connected: bool,
    scratch: Vec<u8>,
    /// How many requests of clients there were.
    pub(crate) asked: u64,
}

#[derive(Debug, Default)]
struct Local {
    /// Requests that have not been answered, other than waits.
    under_way: usize,
    /// Its last request has not been sent.
    is_held: bool,
    /// Its next request was turned down; it is resumed when this may have changed.
    is_turned_down: bool,
    waiting: Option<Waiting>,
    /// The promise of an item that it was woken for.
    promised: Option<u64>,
    /// Its pops among the requests that are under way.
    pops: Vec<u64>,
}

#[derive(Debug, Clone)]
enum Waiting {
    /// Held back for the next request of the group.
    For(Keys),
    /// Held back for the next arrival.
    At(Value, i64),
    /// Part of this wait.
    In(u64),
}

/// Requests of the same kind on one key.
#[derive(Debug)]
struct Shared<T> {
    /// Those that the request under way is for.
    riding: Vec<T>,
    /// Those that the next one will be for.
    held: Vec<T>,
}

/// What an unanswered request is for.
#[derive(Debug)]
enum Flight {
    One(LocalId),
    Read(Value),
    Add(Value),
}

/// Waits for the same keys.
#[derive(Debug, Default)]
struct Group {
    /// The wait that others can join.
    current: Option<u64>,
    /// The registration that is under way.
    under_way: Option<u64>,
    held: Vec<LocalId>,
}

/// Arrivals at the same barrier.
#[derive(Debug)]
struct Arrivals {
    under_way: u64,
    /// How many follow, those included that have left since.
    count: u64,
    held: Vec<LocalId>,
}

/// A wait at the server.
#[derive(Debug)]
struct Wait {
    what: What,
    /// The server has confirmed it.
    is_registered: bool,
    waiters: VecDeque<LocalId>,
}

#[derive(Clone, Debug)]
enum What {
    Keys(Keys),
    Barrier(Value, i64),
}

impl Merge {
    pub(crate) fn new(token: [u8; 16]) -> Self {
        Merge {
            pipe: Pipe::new(token),
            locals: HashMap::default(),
            flights: HashMap::default(),
            reads: HashMap::default(),
            scratch: Vec::new(),
            adds: HashMap::default(),
            groups: HashMap::default(),
            barriers: HashMap::default(),
            waits: HashMap::default(),
            crowded: VecDeque::new(),
            is_connected: true,
            asked: 0,
        }
    }

    /// Clients that wait.
    pub(crate) fn waiting(&self) -> usize {
        self.locals.values().filter(|local| local.waiting.is_some()).count()
    }

    /// Waits that the server has for them.
    pub(crate) fn waits(&self) -> usize {
        self.waits.len()
    }

    /// Requests that are not answered, other than waits.
    pub(crate) fn under_way(&self) -> usize {
        self.flights.len()
    }

    /// Waits that are being registered at the server.
    pub(crate) fn registering(&self) -> usize {
        self.groups.values().filter(|group| group.under_way.is_some()).count() + self.barriers.len()
    }

    /// What this client waits in, and for which keys.
    pub(crate) fn waits_for(&self, client: LocalId) -> Option<(Operation, Keys)> {
        let barrier = |key: &Value| (Operation::Barrier, Keys::from([key.clone()]));
        match self.locals.get(&client)?.waiting.as_ref()? {
            Waiting::For(keys) => Some((Operation::Wait, keys.clone())),
            Waiting::At(key, _) => Some(barrier(key)),
            Waiting::In(number) => Some(match &self.waits.get(number)?.what {
                What::Keys(keys) => (Operation::Wait, keys.clone()),
                What::Barrier(key, _) => barrier(key),
            }),
        }
    }

    // ── may it ask? ────────────────────────────────────────────────────────────────────────────────────

    /// Whether the client's next request may be served now. If not, [`Effects::resumed`] names it later.
    pub(crate) fn allows_request(&mut self, client: LocalId) -> bool {
        let is_crowded = self.is_crowded();
        let local = self.locals.entry(client).or_default();
        let allows = !local.is_held && local.under_way < UNDER_WAY_MAX && !is_crowded;
        if !allows {
            local.is_turned_down = true;
            if is_crowded {
                self.crowded.push_back(client);
            }
        }
        allows
    }

    /// Whether a message that is answered here may be served now: after all that came before it, so that a
    /// wait for a key that exists succeeds even if it is cancelled immediately. Without a connection a wait
    /// cannot be registered, but its client may time out.
    pub(crate) fn allows_answer(&mut self, client: LocalId) -> bool {
        let local = self.locals.entry(client).or_default();
        let is_registered = match &local.waiting {
            None => true,
            Some(Waiting::In(number)) => self.waits.get(number).is_none_or(|wait| wait.is_registered),
            Some(Waiting::For(_) | Waiting::At(..)) => false,
        };
        let allows = local.under_way == 0 && (is_registered || !self.is_connected);
        local.is_turned_down |= !allows;
        allows
    }

    /// The connection to the server is there, or lost.
    pub(crate) fn set_connected(&mut self, is_connected: bool, effects: &mut Effects) {
        self.is_connected = is_connected;
        if !is_connected {
            let waiting: Vec<LocalId> =
                self.locals.iter().filter(|(_, local)| local.waiting.is_some()).map(|(id, _)| *id).collect();
            waiting.into_iter().for_each(|client| self.resume(client, effects));
        }
    }

    fn is_crowded(&self) -> bool {
        self.pipe.bytes() > UNCONFIRMED_MAX || self.flights.len() > FLIGHTS_MAX
    }

    // ── what clients ask ───────────────────────────────────────────────────────────────────────────────

    /// A request of a client that [`Merge::allows_request`].
    pub(crate) fn ask(&mut self, client: LocalId, request: Request<'_>) -> Result<(), AlreadyWaiting> {
        self.asked += 1;
        let local = self.locals.entry(client).or_default();
        if matches!(request, Request::Wait { .. } | Request::Barrier { .. }) && local.waiting.is_some() {
            return Err(AlreadyWaiting);
        }
        if let Some(wait) = local.promised.take() {
            // Only a pop can be for the item.
            if matches!(request, Request::QueuePop { .. }) {
                let number = self.pass(client, &Ask::CallAfter(wait, request));
                self.local(client).pops.push(number);
                return Ok(());
            }
            self.pipe.send(&Ask::Leave(wait));
        }
        match request {
            Request::Add { key, delta } => self.add(client, &key, delta),
            Request::Wait { keys } => self.wait(client, &keys),
            Request::Barrier { key, world } => self.arrive(client, &key, world),
            Request::Get { .. }
            | Request::MultiGet { .. }
            | Request::Check { .. }
            | Request::NumKeys
            | Request::ListKeys
            | Request::QueueLen { .. } => self.read(client, request),
            Request::QueuePop { .. } => {
                let number = self.pass(client, &Ask::Call(request));
                self.local(client).pops.push(number);
            }
            other => drop(self.pass(client, &Ask::Call(other))),
        }
        Ok(())
    }

    /// The client wants the server's facts.
    pub(crate) fn ask_info(&mut self, client: LocalId) {
        self.locals.entry(client).or_default();
        self.pass(client, &Ask::Info);
    }

    fn pass(&mut self, client: LocalId, ask: &Ask<'_>) -> u64 {
        let number = self.pipe.send(ask);
        self.flights.insert(number, Flight::One(client));
        self.local(client).under_way += 1;
        number
    }

    fn read(&mut self, client: LocalId, request: Request<'_>) {
        self.scratch.clear();
        wire::encode(&Command::Call(request), &mut self.scratch);
        let Command::Call(request) = decode(&self.scratch) else { return };
        if self.scratch.len() > READ_MAX {
            let number = self.pipe.send(&Ask::Call(request));
            self.flights.insert(number, Flight::One(client));
            self.local(client).under_way += 1;
            self.scratch = Vec::new();
            return;
        }
        if let Some(shared) = self.reads.get_mut(&self.scratch[..]) {
            shared.held.push(client);
            let local = self.local(client);
            local.under_way += 1;
            local.is_held = true;
            return;
        }
        let number = self.pipe.send(&Ask::Call(request));
        let bytes = Value::from(&self.scratch[..]);
        self.flights.insert(number, Flight::Read(bytes.clone()));
        self.reads.insert(bytes, Shared { riding: vec![client], held: Vec::new() });
        self.local(client).under_way += 1;
    }

    fn add(&mut self, client: LocalId, key: &[u8], delta: i64) {
        self.local(client).under_way += 1;
        if let Some(shared) = self.adds.get_mut(key) {
            shared.held.push((client, delta));
            self.local(client).is_held = true;
            return;
        }
        let number = self.pipe.send(&Ask::Call(Request::Add { key: key.into(), delta }));
        self.flights.insert(number, Flight::Add(key.into()));
        self.adds.insert(key.into(), Shared { riding: vec![(client, delta)], held: Vec::new() });
    }

    fn wait(&mut self, client: LocalId, keys: &[Bytes<'_>]) {
        let keys: Keys = keys.iter().map(|key| Value::from(&**key)).collect();
        let group = self.groups.entry(keys.clone()).or_default();
        group.held.push(client);
        let must_hold = group.under_way.is_some();
        let local = self.local(client);
        local.waiting = Some(Waiting::For(keys.clone()));
        local.is_held = must_hold;
        if !must_hold {
            self.register(&keys, &mut Effects::default());
        }
    }

    /// Sends the next request of a group, for all clients that are held back.
    fn register(&mut self, keys: &Keys, effects: &mut Effects) {
        let Some(group) = self.groups.get_mut(keys) else { return };
        if group.under_way.is_some() {
            return;
        }
        if group.held.is_empty() {
            if group.current.is_none() {
                self.groups.remove(keys);
            }
            return;
        }
        let list = || keys.iter().map(|key| Bytes::from(&**key)).collect();
        let number = self.pipe.send(&match group.current {
            Some(current) => Ask::Join(current, list()),
            None => Ask::Call(Request::Wait { keys: list() }),
        });
        group.under_way = Some(number);
        let waiters = std::mem::take(&mut group.held);
        self.begin_wait(number, What::Keys(keys.clone()), waiters, effects);
    }

    fn arrive(&mut self, client: LocalId, key: &[u8], world: i64) {
        let barrier = (Value::from(key), world);
        if let Some(arrivals) = self.barriers.get_mut(&barrier) {
            arrivals.count += 1;
            arrivals.held.push(client);
            let local = self.local(client);
            local.waiting = Some(Waiting::At(barrier.0, world));
            local.is_held = true;
            return;
        }
        self.local(client).waiting = Some(Waiting::At(barrier.0.clone(), world));
        self.send_arrivals(barrier, 1, vec![client], &mut Effects::default());
    }

    fn send_arrivals(
        &mut self,
        (key, world): (Value, i64),
        count: u64,
        clients: Vec<LocalId>,
        effects: &mut Effects,
    ) {
        let number = self.pipe.send(&Ask::Arrive { count, key: Bytes::from(&*key), world });
        let arrivals = Arrivals { under_way: number, count: 0, held: Vec::new() };
        self.barriers.insert((key.clone(), world), arrivals);
        self.begin_wait(number, What::Barrier(key, world), clients, effects);
    }

    fn begin_wait(&mut self, number: u64, what: What, clients: Vec<LocalId>, effects: &mut Effects) {
        for client in &clients {
            self.local(*client).waiting = Some(Waiting::In(number));
            self.release(*client, effects);
        }
        self.waits.insert(number, Wait { what, is_registered: false, waiters: clients.into() });
    }

    /// Ends the client's wait without a reply.
    pub(crate) fn cancel(&mut self, client: LocalId, effects: &mut Effects) {
        let Some(local) = self.locals.get_mut(&client) else { return };
        if let Some(wait) = local.promised.take() {
            self.pipe.send(&Ask::Leave(wait));
        }
        let Some(waiting) = local.waiting.take() else { return };
        match waiting {
            Waiting::For(keys) => {
                if let Some(group) = self.groups.get_mut(&keys) {
                    group.held.retain(|other| *other != client);
                }
            }
            Waiting::At(key, world) => {
                // It has arrived, and stays counted.
                if let Some(arrivals) = self.barriers.get_mut(&(key, world)) {
                    arrivals.held.retain(|other| *other != client);
                }
            }
            Waiting::In(number) => {
                if let Some(wait) = self.waits.get_mut(&number) {
                    wait.waiters.retain(|other| *other != client);
                }
                self.leave_if_empty(number);
            }
        }
        self.release(client, effects);
    }

    /// The client has left. Items that it has asked for stay in their queues, unless the server has got the
    /// request.
    pub(crate) fn forget(&mut self, client: LocalId, effects: &mut Effects) {
        self.cancel(client, effects);
        let local = self.locals.remove(&client);
        for number in local.into_iter().flat_map(|local| local.pops) {
            self.pipe.withdraw(number);
        }
    }

    /// Ends a wait that no client is in, unless others are about to join it.
    fn leave_if_empty(&mut self, number: u64) {
        let Some(wait) = self.waits.get(&number).filter(|wait| wait.waiters.is_empty()) else { return };
        let what = wait.what.clone();
        if let What::Keys(keys) = &what
            && let Some(group) = self.groups.get_mut(keys)
        {
            let is_joined = group.current == Some(number) && group.under_way.is_some();
            if is_joined || group.under_way == Some(number) {
                return; // looked at again when the answer arrives
            }
            if group.current == Some(number) {
                group.current = None;
            }
            if group.current.is_none() && group.held.is_empty() && group.under_way.is_none() {
                self.groups.remove(keys);
            }
        }
        if let What::Barrier(key, world) = what
            && self.barriers.get(&(key, world)).is_some_and(|arrivals| arrivals.under_way == number)
        {
            return; // the same
        }
        self.waits.remove(&number);
        self.pipe.send(&Ask::Leave(number));
    }

    /// The client's request is sent: it may be served further.
    fn release(&mut self, client: LocalId, effects: &mut Effects) {
        let Some(local) = self.locals.get_mut(&client) else { return };
        local.is_held = false;
        self.resume(client, effects);
    }

    /// If the client was turned down, it may try again.
    fn resume(&mut self, client: LocalId, effects: &mut Effects) {
        let Some(local) = self.locals.get_mut(&client) else { return };
        if std::mem::take(&mut local.is_turned_down) {
            effects.resumed.push(client);
        }
    }

    fn local(&mut self, client: LocalId) -> &mut Local {
        self.locals.entry(client).or_default()
    }
}

/// A request that was encoded here.
fn decode(bytes: &[u8]) -> Command<'_> {
    let most = usize::MAX / 4; // what is encoded here was within the limits
    let limits = MessageLimits { key: most, value: most, keys: most, request: most };
    match wire::decode(bytes, &limits, &mut Scan::default()) {
        Ok(Decoded::Whole(command, _)) => command,
        other => unreachable!("{other:?} was encoded here"),
    }
}

/// The number of a promise.
fn promise(body: &[u8]) -> Option<u64> {
    body.try_into().ok().map(u64::from_le_bytes)
}

fn reason(body: &[u8]) -> String {
    const SHOWN: usize = 1000; // it goes to the log
    String::from_utf8_lossy(&body[..body.len().min(SHOWN)]).into_owned()
}

#[cfg(test)]
mod tests;
