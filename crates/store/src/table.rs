//! The map, the queues, and the waits of clients.
//!
//! `Table` is the whole semantics of a store with nothing around it: no socket, no thread, no lock, no clock
//! (the time is passed in). A request goes in, and the replies that it causes come out: one to the client
//! that asked, and one to each parked client whose wait it ended. So the server, the in-process store, and a
//! test that runs random programs all share one behaviour.
//!
//! How waiting works: a wait registers its client under every missing key and counts these keys. A write to a
//! key decrements the count of every client registered under it; a count of zero ends the wait. A key that
//! was seen is not checked again: deleting it does not prolong the wait. This is c10d's rule. Unlike c10d: no
//! client is woken for a key that does not exist, a `MultiSet` is one step (all or nothing), and an item
//! pushed for a client that then dies is offered to the next one.
//!
//! Not here: bytes on the wire (`wire`), timeouts (`server` and `hash` cancel waits), limits of single
//! messages.

mod forgetting;
mod number;
mod waits;

use std::collections::{BTreeMap, VecDeque};
use std::hash::BuildHasher as _;
use std::time::Instant;

use foldhash::HashMap;

use self::number::{Decimal, as_number};
use self::waits::Wait;
use crate::map::Map;
use crate::request::{Bytes, Operation, Request, Response, show_keys};
use crate::value::Value;
use tenfold_base::{ErrorKind, Fault};

pub(crate) use self::forgetting::Forgetting;
pub(crate) use self::number::parse_number;

/// Identifies a client. The owner of the table assigns these and may reuse them after [`Table::forget`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ClientId(pub usize);

/// What one key, queue item or registration costs beyond its bytes: a slot in a hash table (57 bytes, 130
/// right after it has grown), and for anything longer than 22 bytes the reference counts and the allocator's
/// overhead. An upper bound: 300,000 keys of 17 bytes with values of 16 take 100 bytes each in all (131 at
/// worst) and are counted as 225; keys of 40 with values of 100 take 292 (322) and are counted as 332.
const ENTRY: usize = 192;

/// Values at least this long are shared by replies instead of copied; below it a copy is cheaper than a chunk.
pub(crate) const SHARED_VALUE: usize = 16 * 1024;

/// How much a table may hold. Beyond a limit, writes are refused and reads still work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TableLimits {
    /// Keys in the map.
    pub keys: usize,
    /// Bytes of keys, values, queue items and waiters, each with its overhead.
    pub bytes: usize,
    /// Items in all queues together.
    pub queue_items: usize,
}

impl Default for TableLimits {
    fn default() -> Self {
        TableLimits { keys: 4 << 20, bytes: 1 << 30, queue_items: 1 << 20 }
    }
}

/// Why a table refused a request; nothing was changed.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
#[expect(missing_docs, reason = "each variant says what its fields are")]
pub enum Refusal {
    /// The client is already waiting; a connection carries one wait at a time.
    AlreadyWaiting,
    /// A limit is reached.
    Full { what: &'static str, limit: usize },
    /// `Add` or `Barrier` on a value that is not a 64-bit number.
    NotANumber { key: Value },
}

impl Refusal {
    /// The reason without the key: keys and values belong to the job and stay out of logs.
    pub(crate) fn without_key(self) -> String {
        match self {
            Refusal::NotANumber { key } => {
                let length = key.len();
                format!("ADD or BARRIER failed: the value is not a number (key of {length} bytes)")
            }
            other => Fault::from(other).message,
        }
    }
}

impl From<Refusal> for Fault {
    fn from(refusal: Refusal) -> Fault {
        match refusal {
            Refusal::AlreadyWaiting => Fault::new(ErrorKind::Protocol, "this client is already waiting")
                .hint("clone the store: a connection carries one wait at a time"),
            Refusal::Full { what, limit } => {
                Fault::new(ErrorKind::Limit, format!("the store is full: its limit is {limit} {what}"))
                    .hint("delete keys that are no longer needed, or raise the limit")
            }
            Refusal::NotANumber { key } => {
                let key = show_keys(&[key]);
                Fault::new(ErrorKind::NotANumber, format!("the value of {key} is not a 64-bit number"))
                    .hint("use another key: counters are decimal text, and this key holds something else")
            }
        }
    }
}

/// One wait: its client, its missing keys, and since when; for error messages and the dashboard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Waiter {
    /// The client.
    pub client: ClientId,
    /// What it waits in.
    pub operation: Operation,
    /// The first few keys it has not seen.
    pub missing: Vec<Value>,
    /// How many keys it has not seen.
    pub missing_count: usize,
    /// When the wait began.
    pub since: Instant,
}

/// State of a store.
#[derive(Debug, Default)]
pub struct Table {
    map: Map<Value>,
    /// No queue in here is empty.
    queues: Map<Queue>,
    /// Clients registered under a key by the tickets of their waits, so that the oldest is first and each is
    /// found quickly. No list in here is empty.
    waiting: HashMap<Value, BTreeMap<u64, ClientId>>,
    /// The ticket of the next wait.
    next_ticket: u64,
    waits: HashMap<ClientId, Wait>,
    /// Clients woken by a push that have not fetched the item yet.
    promised: HashMap<ClientId, Value>,
    /// Values that were replaced while a reply still held them: they take memory until the reply is sent.
    retired: Vec<Value>,
    /// Their bytes.
    retired_bytes: usize,
    limits: TableLimits,
    bytes: usize,
    queue_items: usize,
    /// The time that writes are stamped with.
    seconds: u32,
    dice: Dice,
}

/// Random numbers that reveal nothing about the map's own.
#[derive(Debug)]
struct Dice(u64);

impl Default for Dice {
    fn default() -> Self {
        Dice(std::hash::RandomState::new().hash_one(0))
    }
}

impl Dice {
    /// As in SplitMix64; the remainder is uneven by less than one in 2⁴⁰ for any list that fits in memory.
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ mixed >> 31) % end as u64) as usize
    }
}

/// A queue and the total size of its items.
#[derive(Debug)]
pub(crate) struct Queue {
    pub(crate) items: VecDeque<Value>,
    pub(crate) bytes: usize,
}

/// Replies that a request causes, to the client that asked or to parked ones.
pub type Replies = Vec<(ClientId, Response)>;

impl Table {
    /// An empty table with these limits.
    pub fn new(limits: TableLimits) -> Self {
        Table { limits, ..Table::default() }
    }

    /// Sets the time that writes are stamped with from now on, in seconds since any moment that the owner
    /// chooses. If the owner never sets it, keys have no age.
    #[inline]
    pub fn set_seconds(&mut self, seconds: u32) {
        self.seconds = seconds;
    }

    /// Applies `request` and appends every reply it causes. A `Wait` or `Barrier` that has to wait causes
    /// none yet.
    pub fn apply(
        &mut self,
        client: ClientId,
        request: Request<'_>,
        now: Instant,
        replies: &mut Replies,
    ) -> Result<(), Refusal> {
        if !self.promised.is_empty() {
            self.settle_promise(client, &request, replies);
        }
        let response = match request {
            Request::Get { key } => Response::Value(self.map.get(&key).cloned()),
            Request::Set { key, value } => {
                self.write(&key, &value, replies)?;
                Response::Done
            }
            Request::Add { key, delta } => {
                let sum = self.count(&key, delta)?;
                self.wake_all(&key, replies);
                Response::Number(sum)
            }
            Request::Check { keys } => Response::Present(keys.iter().all(|key| self.has(key))),
            Request::Wait { keys } => {
                if !self.park(client, keys, now)? {
                    return Ok(());
                }
                Response::Ready
            }
            Request::CompareSet { key, expected, desired } => {
                Response::Value(Some(self.compare_set(&key, expected, &desired, replies)?))
            }
            Request::Append { key, value } => {
                self.append(&key, &value)?;
                self.wake_all(&key, replies);
                Response::Done
            }
            Request::Delete { key } => Response::Deleted(self.delete(&key)),
            Request::MultiGet { keys } => {
                Response::Values(keys.iter().map(|key| self.map.get(key).cloned()).collect())
            }
            Request::MultiSet { pairs } => {
                self.multi_set(&pairs, replies)?;
                Response::Done
            }
            Request::NumKeys => Response::Number(as_number(self.map.len())),
            Request::ListKeys => Response::Keys(self.list_keys()),
            Request::QueuePush { key, value } => {
                self.push(&key, &value, replies)?;
                Response::Done
            }
            Request::QueuePop { key } => Response::Popped(self.pop(&key)),
            Request::QueueLen { key } => {
                Response::Number(as_number(self.queues.get(&key).map_or(0, |queue| queue.items.len())))
            }
            Request::Barrier { key, world } => {
                if !self.arrive(client, &key, (world, 1), now, replies)? {
                    return Ok(());
                }
                Response::Ready
            }
        };
        replies.push((client, response));
        Ok(())
    }

    /// Ends the client's wait without a reply; true if there was one.
    pub fn cancel(&mut self, client: ClientId, replies: &mut Replies) -> bool {
        self.pass_promise_on(client, replies);
        self.end_wait(client).is_some()
    }

    /// The client has left: drops what it waited for, and offers an item meant for it to the next waiting
    /// client.
    pub fn forget(&mut self, client: ClientId, replies: &mut Replies) {
        self.cancel(client, replies);
    }

    /// Whether the key exists, or a queue of that name that is not empty.
    pub fn has(&self, key: &[u8]) -> bool {
        self.map.contains(key) || (!self.queues.is_empty() && self.queues.contains(key))
    }

    /// Keys in the map.
    pub fn keys(&self) -> usize {
        self.map.len()
    }

    /// Bytes held, including overhead and values that only a reply still holds.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Items in all queues.
    pub fn queue_items(&self) -> usize {
        self.queue_items
    }

    /// The value of a key, for the server's own use.
    pub(crate) fn value(&self, key: &[u8]) -> Option<Value> {
        self.map.get(key).cloned()
    }

    /// The map, for walks.
    pub(crate) fn values(&self) -> &Map<Value> {
        &self.map
    }

    /// How often keys and queues have been moved to other places.
    fn moves(&self) -> (u64, u64) {
        (self.map.moves(), self.queues.moves())
    }

    /// The queues, for walks.
    pub(crate) fn queues(&self) -> &Map<Queue> {
        &self.queues
    }

    /// The time that writes are stamped with now.
    pub(crate) fn seconds(&self) -> u32 {
        self.seconds
    }

    // ── writing ────────────────────────────────────────────────────────────────────────────────────────

    fn write(&mut self, key: &[u8], value: &[u8], replies: &mut Replies) -> Result<(), Refusal> {
        self.store(key, value)?;
        self.wake_all(key, replies);
        Ok(())
    }

    /// Stores a value without waking any client.
    fn store(&mut self, key: &[u8], value: &[u8]) -> Result<(), Refusal> {
        let Some(slot) = self.map.get_mut(key) else {
            if self.map.len() >= self.limits.keys {
                return Err(Refusal::Full { what: "keys", limit: self.limits.keys });
            }
            let size = ENTRY + key.len() + value.len();
            self.make_room(size)?;
            self.bytes += size;
            self.map.insert(key, value.into(), self.seconds);
            return Ok(());
        };
        let old = &mut slot.held;
        // Counters and flags are overwritten in place; a few extra bytes must still be within the limit.
        let others = self.bytes - old.len();
        if others + value.len() <= self.limits.bytes && old.rewrite(value) {
            slot.written = self.seconds;
            self.bytes = others + value.len();
            return Ok(());
        }
        // A value that a reply still holds stays in memory beside its replacement.
        let gone = if is_held(old) { 0 } else { old.len() };
        self.make_room(value.len().saturating_sub(gone))?;
        let slot = self.map.get_mut(key).expect("it was there above");
        slot.written = self.seconds;
        let old = std::mem::replace(&mut slot.held, value.into());
        self.bytes += value.len();
        self.release(old);
        Ok(())
    }

    /// Appends to a value without waking any client. A long value is not copied: it may use a large part of
    /// all memory, and a copy would double that and make all clients wait.
    fn append(&mut self, key: &[u8], more: &[u8]) -> Result<(), Refusal> {
        let Some(slot) = self.map.get_mut(key) else { return self.store(key, more) };
        let length = slot.held.len() + more.len();
        if length < SHARED_VALUE {
            let longer = [&slot.held, more].concat();
            return self.store(key, &longer);
        }
        let fits = self.bytes + more.len() <= self.limits.bytes;
        if fits && slot.held.extend(more) {
            slot.written = self.seconds;
            self.bytes += more.len();
            return Ok(());
        }
        // A value that a reply still holds stays in memory beside its replacement.
        let gone = if is_held(&slot.held) { 0 } else { slot.held.len() };
        self.make_room(length - gone)?;
        let slot = self.map.get_mut(key).expect("it was there above");
        slot.written = self.seconds;
        let longer = slot.held.grown(more);
        let old = std::mem::replace(&mut slot.held, longer);
        self.bytes += length;
        self.release(old);
        Ok(())
    }

    fn multi_set(&mut self, pairs: &[(Bytes<'_>, Bytes<'_>)], replies: &mut Replies) -> Result<(), Refusal> {
        // The worst case is checked first, so that nothing is written unless everything can be.
        if self.map.len() + pairs.len() > self.limits.keys {
            let fresh = pairs.iter().filter(|(key, _)| !self.map.contains(key)).count();
            if self.map.len() + fresh > self.limits.keys {
                return Err(Refusal::Full { what: "keys", limit: self.limits.keys });
            }
        }
        self.make_room(pairs.iter().map(|(key, value)| ENTRY + key.len() + value.len()).sum())?;
        for (key, value) in pairs {
            self.store(key, value).expect("room for all pairs was checked above");
        }
        if !self.waiting.is_empty() {
            pairs.iter().for_each(|(key, _)| self.wake_all(key, replies));
        }
        Ok(())
    }

    fn compare_set(
        &mut self,
        key: &[u8],
        expected: Bytes<'_>,
        desired: &[u8],
        replies: &mut Replies,
    ) -> Result<Value, Refusal> {
        match self.map.get(key) {
            Some(current) if **current != *expected => return Ok(current.clone()),
            None if !expected.is_empty() => return Ok(expected.as_ref().into()), // c10d's answer
            _ => self.write(key, desired, replies)?,
        }
        Ok(desired.into())
    }

    fn delete(&mut self, key: &[u8]) -> bool {
        let Some((name, value)) = self.map.remove(key) else { return false };
        self.bytes -= ENTRY;
        self.release(name); // a list of keys may hold it
        self.release(value);
        true
    }

    /// All keys, in an order that does not reveal where the map has them: a client that knew this could find
    /// keys that are slow to look up.
    fn list_keys(&mut self) -> Vec<Value> {
        let mut keys: Vec<Value> = self.map.iter().map(|slot| slot.key.clone()).collect();
        for end in (1..keys.len()).rev() {
            keys.swap(end, self.dice.below(end + 1));
        }
        keys
    }

    /// Adds to a counter with a single look-up: counters are the busiest keys.
    fn count(&mut self, key: &[u8], delta: i64) -> Result<i64, Refusal> {
        let Some(slot) = self.map.get_mut(key) else {
            self.store(key, Decimal::new(delta).text())?;
            return Ok(delta);
        };
        let text = &mut slot.held;
        let old = parse_number(text).ok_or_else(|| Refusal::NotANumber { key: key.into() })?;
        let sum = Decimal::new(old.wrapping_add(delta));
        let others = self.bytes - text.len();
        if others + sum.text().len() <= self.limits.bytes && text.rewrite(sum.text()) {
            slot.written = self.seconds;
            self.bytes = others + sum.text().len();
        } else {
            self.store(key, sum.text())?; // at the limit, or not a counter but text that begins with a number
        }
        Ok(sum.number)
    }

    /// The value as a number; a missing key is zero.
    fn number(&self, key: &[u8]) -> Result<i64, Refusal> {
        match self.map.get(key) {
            None => Ok(0),
            Some(text) => parse_number(text).ok_or_else(|| Refusal::NotANumber { key: key.into() }),
        }
    }

    // ── queues ─────────────────────────────────────────────────────────────────────────────────────────

    fn push(&mut self, key: &[u8], value: &[u8], replies: &mut Replies) -> Result<(), Refusal> {
        if self.queue_items >= self.limits.queue_items {
            return Err(Refusal::Full { what: "queue items", limit: self.limits.queue_items });
        }
        let size = ENTRY + value.len() + if self.queues.contains(key) { 0 } else { ENTRY + key.len() };
        self.make_room(size)?;
        self.bytes += size;
        self.queue_items += 1;
        match self.queues.get_mut(key) {
            Some(slot) => {
                slot.held.items.push_back(value.into());
                slot.held.bytes += value.len();
                slot.written = self.seconds;
            }
            None => {
                let queue = Queue { items: VecDeque::from([value.into()]), bytes: value.len() };
                self.queues.insert(key, queue, self.seconds);
            }
        }
        self.wake_one(key, replies);
        Ok(())
    }

    fn pop(&mut self, key: &[u8]) -> Option<(Value, usize)> {
        let slot = self.queues.get_mut(key)?;
        slot.written = self.seconds;
        let queue = &mut slot.held;
        let length = queue.items.len();
        let item = queue.items.pop_front().expect("no queue in the table is empty");
        queue.bytes -= item.len();
        if queue.items.is_empty() {
            self.queues.remove(key);
            self.bytes -= ENTRY + key.len();
        }
        self.queue_items -= 1;
        // The item leaves with the reply; it no longer counts here.
        self.bytes -= ENTRY + item.len();
        Some((item, length))
    }

    // ── memory ─────────────────────────────────────────────────────────────────────────────────────────

    fn make_room(&mut self, size: usize) -> Result<(), Refusal> {
        let needed = self.bytes.saturating_add(size);
        if needed <= self.limits.bytes {
            return Ok(());
        }
        if needed - self.retired_bytes <= self.limits.bytes {
            self.sweep();
        }
        if self.bytes.saturating_add(size) <= self.limits.bytes {
            return Ok(());
        }
        Err(Refusal::Full { what: "bytes", limit: self.limits.bytes })
    }

    /// A value that no client can ask for again: freed immediately, or when the last reply that holds it is
    /// sent.
    fn release(&mut self, value: Value) {
        if is_held(&value) {
            self.retired_bytes += value.len();
            self.retired.push(value);
            if self.retired.len().is_power_of_two() {
                self.sweep();
            }
        } else {
            self.bytes -= value.len();
        }
    }

    /// Stops counting retired values that no reply holds any more.
    pub fn sweep(&mut self) {
        let (bytes, retired_bytes) = (&mut self.bytes, &mut self.retired_bytes);
        self.retired.retain(|value| {
            let held = value.is_shared();
            if !held {
                *bytes -= value.len();
                *retired_bytes -= value.len();
            }
            held
        });
    }
}

/// Is this value in a reply that has not been sent?
fn is_held(value: &Value) -> bool {
    value.is_shared()
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "a table needs a time, any time")]
mod tests;
