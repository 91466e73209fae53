//! The map, the queues, and who waits for what.
//!
//! `Table` is the whole meaning of a store with nothing around it: no socket, no thread, no lock, no clock (the
//! time is handed in). A request goes in, the replies it causes come out: one to the client that asked, and one
//! to each parked client whose wait it ended. So the server, the in-process store, and a test that runs random
//! programs all share one behaviour.
//!
//! How waiting works: a wait registers its client under every key that is missing and counts them. A write to a
//! key takes that key off the count of everybody registered under it; a count of zero ends the wait. A key that
//! was seen is not looked at again: deleting it does not prolong the wait. This is c10d's rule. What is not
//! c10d's: nobody is woken for a key that is not there, a `MultiSet` happens at once or not at all, and an item
//! pushed for a client that then dies is offered to the next one.
//!
//! Not here: bytes on the wire (`wire`), timeouts (`server` and `hash` cancel waits), limits of single messages.

use std::collections::VecDeque;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::time::Instant;

use foldhash::HashMap;

use crate::error::{Fault, FaultKind};
use crate::request::{Bytes, Operation, Request, Response, Value, show_keys};

/// Who asks. The owner of the table hands these out and may use them again after [`Table::forget`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ClientId(pub usize);

/// What one key, queue item or registration costs beyond its bytes: a slot in a hash table, reference counts,
/// the allocator's own. Measured as 90 to 110 bytes a key with 16-byte keys and values.
const ENTRY: usize = 96;

/// Values at least this long are shared by replies instead of copied; below it a copy is cheaper than a chunk.
pub(crate) const SHARED_VALUE: usize = 16 * 1024;

/// How much a table may hold. Beyond a limit writes are refused and reads go on.
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

/// Why a table did not do what it was asked; nothing was changed.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Refusal {
    /// The client waits already; a connection carries one wait at a time.
    AlreadyWaiting,
    /// A limit is reached.
    Full { what: &'static str, limit: usize },
    /// `Add` or `Barrier` on a value that is no 64-bit number.
    NotANumber { key: Value },
}

impl From<Refusal> for Fault {
    fn from(refusal: Refusal) -> Fault {
        match refusal {
            Refusal::AlreadyWaiting => Fault::new(FaultKind::Protocol, "this client waits already")
                .hint("a connection carries one wait at a time: clone the store"),
            Refusal::Full { what, limit } => {
                Fault::new(FaultKind::Limit, format!("the store is full: its limit is {limit} {what}"))
                    .hint("delete keys that are no longer needed, or raise the limit")
            }
            Refusal::NotANumber { key } => {
                let key = show_keys(&[key]);
                Fault::new(FaultKind::NotANumber, format!("the value of {key} is not a 64-bit number"))
                    .hint("counters are decimal text; something else was set under this key")
            }
        }
    }
}

/// A wait that has not ended.
#[derive(Debug)]
struct Wait {
    /// Every key that was missing when the wait began.
    missing: Vec<Value>,
    /// How many of them have not been seen since.
    left: usize,
    /// What it is charged for until it ends: `missing` keeps the names of keys that came and went meanwhile.
    bytes: usize,
    since: Instant,
    operation: Operation,
}

/// Who waits for what, since when: for error texts and the dashboard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Waiter {
    pub client: ClientId,
    pub operation: Operation,
    /// The first few keys it has not seen.
    pub missing: Vec<Value>,
    /// How many keys it has not seen.
    pub missing_count: usize,
    pub since: Instant,
}

/// State of a store.
#[derive(Debug, Default)]
pub struct Table {
    map: HashMap<Value, Value>,
    /// No queue in here is empty.
    queues: HashMap<Value, VecDeque<Value>>,
    /// Clients registered under a key, oldest first. No list in here is empty.
    waiting: HashMap<Value, VecDeque<ClientId>>,
    waits: HashMap<ClientId, Wait>,
    /// Clients woken by a push that have not come back for the item.
    promised: HashMap<ClientId, Value>,
    /// Long values that were replaced while a reply still held them: they take memory until it is sent.
    retired: Vec<Value>,
    limits: TableLimits,
    bytes: usize,
    queue_items: usize,
}

/// Replies that a request causes, to the client that asked or to parked ones.
pub type Replies = Vec<(ClientId, Response)>;

impl Table {
    pub fn new(limits: TableLimits) -> Self {
        Table { limits, ..Table::default() }
    }

    /// Applies `request`; appends every reply it causes. A `Wait` or `Barrier` that must wait causes none yet.
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
            Request::Get { key } => Response::Value(self.map.get(&*key).cloned()),
            Request::Set { key, value } => {
                self.write(&key, &value, replies)?;
                Response::Done
            }
            Request::Add { key, delta } => {
                let sum = self.add(&key, delta)?;
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
                let old = self.map.get(&*key).map_or(&[][..], AsRef::as_ref);
                let longer = [old, &value].concat();
                self.write(&key, &longer, replies)?;
                Response::Done
            }
            Request::Delete { key } => Response::Deleted(self.delete(&key)),
            Request::MultiGet { keys } => {
                Response::Values(keys.iter().map(|key| self.map.get(&**key).cloned()).collect())
            }
            Request::MultiSet { pairs } => {
                self.multi_set(&pairs, replies)?;
                Response::Done
            }
            Request::NumKeys => Response::Number(as_number(self.map.len())),
            Request::ListKeys => Response::Keys(self.map.keys().cloned().collect()),
            Request::QueuePush { key, value } => {
                self.push(&key, &value, replies)?;
                Response::Done
            }
            Request::QueuePop { key } => Response::Popped(self.pop(&key)),
            Request::QueueLen { key } => {
                Response::Number(as_number(self.queues.get(&*key).map_or(0, VecDeque::len)))
            }
            Request::Barrier { key, world } => {
                if !self.arrive(client, &key, world, now, replies)? {
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

    /// The client is gone: drops what it waited for, and offers an item meant for it to the next in line.
    pub fn forget(&mut self, client: ClientId, replies: &mut Replies) {
        self.cancel(client, replies);
    }

    /// The client needs no reminder of what was pushed for it.
    pub(crate) fn drop_promise(&mut self, client: ClientId) {
        self.promised.remove(&client);
    }

    /// Is there such a key, or a queue of that name with something in it?
    pub fn has(&self, key: &[u8]) -> bool {
        self.map.contains_key(key) || (!self.queues.is_empty() && self.queues.contains_key(key))
    }

    /// Keys in the map.
    pub fn keys(&self) -> usize {
        self.map.len()
    }

    /// Bytes held, overhead and values that only a reply still holds included.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Items in all queues.
    pub fn queue_items(&self) -> usize {
        self.queue_items
    }

    /// How many clients wait.
    pub fn waiters_count(&self) -> usize {
        self.waits.len()
    }

    /// Who waits for what, since when; the longest first.
    pub fn waiters(&self) -> Vec<Waiter> {
        self.oldest_waiters(usize::MAX)
    }

    /// As [`Table::waiters`], but no more than `count`: describing one can take long.
    pub fn oldest_waiters(&self, count: usize) -> Vec<Waiter> {
        const KEYS_SHOWN: usize = 8;
        let waits_for = |client: ClientId, key: &Value| {
            self.waiting.get(key).is_some_and(|clients| clients.contains(&client))
        };
        let mut oldest: Vec<_> = self.waits.iter().collect();
        oldest.sort_unstable_by_key(|(client, wait)| (wait.since, **client));
        oldest.truncate(count);
        oldest
            .into_iter()
            .map(|(&client, wait)| Waiter {
                client,
                operation: wait.operation,
                missing: wait
                    .missing
                    .iter()
                    .filter(|key| waits_for(client, key))
                    .take(KEYS_SHOWN)
                    .cloned()
                    .collect(),
                missing_count: wait.left,
                since: wait.since,
            })
            .collect()
    }

    // ── writing ────────────────────────────────────────────────────────────────────────────────────────

    fn write(&mut self, key: &[u8], value: &[u8], replies: &mut Replies) -> Result<(), Refusal> {
        self.store(key, value)?;
        self.wake_all(key, replies);
        Ok(())
    }

    /// Puts a value in place and wakes nobody.
    fn store(&mut self, key: &[u8], value: &[u8]) -> Result<(), Refusal> {
        let Some(old) = self.map.get_mut(key) else {
            if self.map.len() >= self.limits.keys {
                return Err(Refusal::Full { what: "keys", limit: self.limits.keys });
            }
            let size = ENTRY + key.len() + value.len();
            self.make_room(size)?;
            self.bytes += size;
            self.map.insert(key.into(), value.into());
            return Ok(());
        };
        if old.len() == value.len()
            && let Some(place) = Arc::get_mut(old)
        {
            place.copy_from_slice(value); // counters and flags are rewritten where they are
            return Ok(());
        }
        // What a reply still holds stays in memory beside what takes its place.
        let gone = if is_held(old) { 0 } else { old.len() };
        self.make_room(value.len().saturating_sub(gone))?;
        let old = self.map.get_mut(key).expect("it was there above");
        let old = std::mem::replace(old, value.into());
        self.bytes += value.len();
        self.release(old);
        Ok(())
    }

    fn multi_set(&mut self, pairs: &[(Bytes<'_>, Bytes<'_>)], replies: &mut Replies) -> Result<(), Refusal> {
        // The worst case is checked first, so that nothing is written if not everything can be.
        if self.map.len() + pairs.len() > self.limits.keys {
            let fresh = pairs.iter().filter(|(key, _)| !self.map.contains_key(&**key)).count();
            if self.map.len() + fresh > self.limits.keys {
                return Err(Refusal::Full { what: "keys", limit: self.limits.keys });
            }
        }
        self.make_room(pairs.iter().map(|(key, value)| ENTRY + key.len() + value.len()).sum())?;
        for (key, value) in pairs {
            self.store(key, value).expect("room for all pairs was checked above");
        }
        for (key, _) in pairs {
            self.wake_all(key, replies);
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
        let Some(value) = self.map.remove(key) else { return false };
        self.bytes -= ENTRY + key.len();
        self.release(value);
        true
    }

    /// Adds to a counter in place where its text does not get longer, which is nearly always.
    fn add(&mut self, key: &[u8], delta: i64) -> Result<i64, Refusal> {
        let Some(text) = self.map.get_mut(key) else {
            self.store(key, Decimal::new(delta).text())?;
            return Ok(delta);
        };
        let old = parse_number(text).ok_or_else(|| Refusal::NotANumber { key: key.into() })?;
        let sum = old.wrapping_add(delta);
        let decimal = Decimal::new(sum);
        let new = decimal.text();
        match Arc::get_mut(text) {
            Some(place) if place.len() == new.len() => place.copy_from_slice(new),
            _ => self.store(key, new)?,
        }
        Ok(sum)
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
        let size = ENTRY + value.len() + if self.queues.contains_key(key) { 0 } else { ENTRY + key.len() };
        self.make_room(size)?;
        self.bytes += size;
        self.queue_items += 1;
        match self.queues.get_mut(key) {
            Some(queue) => queue.push_back(value.into()),
            None => drop(self.queues.insert(key.into(), VecDeque::from([value.into()]))),
        }
        self.wake_one(key, replies);
        Ok(())
    }

    fn pop(&mut self, key: &[u8]) -> Option<(Value, usize)> {
        let queue = self.queues.get_mut(key)?;
        let length = queue.len();
        let item = queue.pop_front().expect("no queue in the table is empty");
        if queue.is_empty() {
            self.queues.remove(key);
            self.bytes -= ENTRY + key.len();
        }
        self.queue_items -= 1;
        // The item leaves with the reply; it no longer counts here.
        self.bytes -= ENTRY + item.len();
        Some((item, length))
    }

    // ── waiting ────────────────────────────────────────────────────────────────────────────────────────

    /// Parks the client until every key has been seen; true if there is nothing to wait for.
    fn park(&mut self, client: ClientId, keys: Vec<Bytes<'_>>, now: Instant) -> Result<bool, Refusal> {
        if keys.iter().all(|key| self.has(key)) {
            return Ok(true);
        }
        let mut missing: Vec<Value> =
            keys.iter().filter(|key| !self.has(key)).map(|key| (&**key).into()).collect();
        missing.sort_unstable();
        missing.dedup();
        self.register(client, missing, now, Operation::Wait)?;
        Ok(false)
    }

    fn register(
        &mut self,
        client: ClientId,
        missing: Vec<Value>,
        now: Instant,
        operation: Operation,
    ) -> Result<(), Refusal> {
        if self.waits.contains_key(&client) {
            return Err(Refusal::AlreadyWaiting);
        }
        let size = missing.iter().map(|key| registration(key)).sum();
        self.make_room(size)?;
        self.bytes += size;
        for key in &missing {
            self.waiting.entry(key.clone()).or_default().push_back(client);
        }
        self.waits.insert(client, Wait { left: missing.len(), missing, bytes: size, since: now, operation });
        Ok(())
    }

    /// Counts the client in; true if the barrier is complete.
    fn arrive(
        &mut self,
        client: ClientId,
        key: &[u8],
        world: i64,
        now: Instant,
        replies: &mut Replies,
    ) -> Result<bool, Refusal> {
        if self.waits.contains_key(&client) {
            return Err(Refusal::AlreadyWaiting);
        }
        let arrived = self.number(key)?.wrapping_add(1);
        let text = arrived.to_string();
        if arrived >= world {
            self.write(key, text.as_bytes(), replies)?;
            return Ok(true);
        }
        // Registered before it is counted, so that one for whom there is no room is not counted.
        self.register(client, vec![key.into()], now, Operation::Barrier)?;
        // Not `write`: an arrival wakes nobody until the last one.
        if let Err(refusal) = self.store(key, text.as_bytes()) {
            self.end_wait(client);
            return Err(refusal);
        }
        Ok(false)
    }

    /// `key` is there now: takes it off everybody's list and ends the waits that have nothing left.
    fn wake_all(&mut self, key: &[u8], replies: &mut Replies) {
        if self.waiting.is_empty() {
            return; // the common case of a busy store costs one comparison
        }
        let Some(clients) = self.waiting.remove(key) else { return };
        for client in clients {
            self.saw(client, replies);
        }
    }

    /// A queue got one item: ends the oldest wait that has nothing else left, so that one popper comes.
    fn wake_one(&mut self, key: &[u8], replies: &mut Replies) {
        while let Some(clients) = self.waiting.get_mut(key) {
            let client = clients.pop_front().expect("no list of waiting clients is empty");
            let key = if clients.is_empty() {
                self.waiting.remove_entry(key).expect("it was just looked up").0
            } else {
                Value::from(key)
            };
            if self.saw(client, replies) {
                self.promised.insert(client, key);
                return;
            }
        }
    }

    /// The client has seen a key it waited for; true if that ends its wait.
    fn saw(&mut self, client: ClientId, replies: &mut Replies) -> bool {
        let Entry::Occupied(mut entry) = self.waits.entry(client) else {
            unreachable!("a client registered under a key waits")
        };
        entry.get_mut().left -= 1;
        if entry.get().left > 0 {
            return false;
        }
        self.bytes -= entry.remove().bytes;
        replies.push((client, Response::Ready));
        true
    }

    fn end_wait(&mut self, client: ClientId) -> Option<Wait> {
        let wait = self.waits.remove(&client)?;
        self.bytes -= wait.bytes;
        for key in &wait.missing {
            // A key that was seen may have a list again, of others.
            let Some(clients) = self.waiting.get_mut(key) else { continue };
            let Some(index) = clients.iter().position(|&other| other == client) else { continue };
            clients.remove(index);
            if clients.is_empty() {
                self.waiting.remove(key);
            }
        }
        Some(wait)
    }

    /// A client that was woken by a push comes back: for the item, or for something else.
    fn settle_promise(&mut self, client: ClientId, request: &Request<'_>, replies: &mut Replies) {
        match (self.promised.get(&client), request) {
            (Some(queue), Request::QueuePop { key }) if **queue == **key => {
                drop(self.promised.remove(&client));
            }
            (Some(_), _) => self.pass_promise_on(client, replies),
            (None, _) => {}
        }
    }

    /// Offers what was pushed for this client to the next one in line, if it is still there.
    fn pass_promise_on(&mut self, client: ClientId, replies: &mut Replies) {
        if let Some(queue) = self.promised.remove(&client)
            && self.queues.contains_key(&queue)
        {
            self.wake_one(&queue, replies);
        }
    }

    // ── memory ─────────────────────────────────────────────────────────────────────────────────────────

    fn make_room(&mut self, size: usize) -> Result<(), Refusal> {
        if self.bytes.saturating_add(size) <= self.limits.bytes {
            return Ok(());
        }
        self.sweep();
        if self.bytes.saturating_add(size) <= self.limits.bytes {
            return Ok(());
        }
        Err(Refusal::Full { what: "bytes", limit: self.limits.bytes })
    }

    /// A value that nobody will ask for again: gone at once, or when the last reply that holds it is sent.
    fn release(&mut self, value: Value) {
        if is_held(&value) {
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
        let bytes = &mut self.bytes;
        self.retired.retain(|value| {
            let held = Arc::strong_count(value) > 1;
            *bytes -= if held { 0 } else { value.len() };
            held
        });
    }
}

/// Is this value in a reply that has not been sent?
fn is_held(value: &Value) -> bool {
    value.len() >= SHARED_VALUE && Arc::strong_count(value) > 1
}

/// What waiting for one key costs.
fn registration(key: &[u8]) -> usize {
    2 * ENTRY + key.len()
}

fn as_number(count: usize) -> i64 {
    i64::try_from(count).expect("a count of things in memory fits 63 bits")
}

/// A number's decimal text without an allocation: counters are the busiest keys there are.
struct Decimal {
    digits: [u8; 20], // i64::MIN
    start: usize,
}

impl Decimal {
    fn new(number: i64) -> Self {
        let mut digits = [0; 20];
        let mut start = digits.len();
        let mut rest = number.unsigned_abs();
        loop {
            start -= 1;
            digits[start] = b'0' + (rest % 10) as u8;
            rest /= 10;
            if rest == 0 {
                break;
            }
        }
        if number < 0 {
            start -= 1;
            digits[start] = b'-';
        }
        Decimal { digits, start }
    }

    fn text(&self) -> &[u8] {
        &self.digits[self.start..]
    }
}

/// A counter's text as C's `strtoll` reads it, since that is what c10d does: white space and a sign may lead, junk
/// may follow.
pub(crate) fn parse_number(text: &[u8]) -> Option<i64> {
    let spaces = text.iter().take_while(|byte| matches!(byte, b' ' | b'\t'..=b'\r')).count();
    let text = &text[spaces..];
    let (negative, digits) = match text.first() {
        Some(b'-') => (true, &text[1..]),
        Some(b'+') => (false, &text[1..]),
        _ => (false, text),
    };
    let end = digits.iter().position(|byte| !byte.is_ascii_digit()).unwrap_or(digits.len());
    if end == 0 {
        return None;
    }
    let mut number: i64 = 0;
    for digit in &digits[..end] {
        let digit = i64::from(digit - b'0');
        number = number.checked_mul(10)?;
        number = if negative { number.checked_sub(digit)? } else { number.checked_add(digit)? };
    }
    Some(number)
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "a table wants to be told the time, whatever it is")]
mod tests {
    use std::time::Duration;

    use super::Response::{Deleted, Done, Keys, Number, Popped, Present, Ready, Values};
    use super::*;

    const ALICE: ClientId = ClientId(1);
    const BOB: ClientId = ClientId(2);
    const CAROL: ClientId = ClientId(3);

    /// What a bare `get` of a missing key is answered.
    const NONE: Response = Response::Value(None);

    fn table() -> Table {
        Table::default()
    }

    fn limited(change: impl FnOnce(&mut TableLimits)) -> Table {
        let mut limits = TableLimits::default();
        change(&mut limits);
        Table::new(limits)
    }

    fn full<T>(what: &'static str, limit: usize) -> Result<T, Refusal> {
        Err(Refusal::Full { what, limit })
    }

    fn bytes(text: &str) -> Bytes<'_> {
        text.as_bytes().into()
    }

    fn value(text: &str) -> Value {
        text.as_bytes().into()
    }

    fn some(text: &str) -> Response {
        Response::Value(Some(value(text)))
    }

    fn item(text: &str, length: usize) -> Response {
        Popped(Some((value(text), length)))
    }

    fn keys<'a>(keys: &[&'a str]) -> Vec<Bytes<'a>> {
        keys.iter().map(|key| bytes(key)).collect()
    }

    /// What the tests below say, in words as short as the store's own.
    impl Table {
        fn ask(&mut self, client: ClientId, request: Request<'_>) -> Result<Replies, Refusal> {
            let mut replies = Replies::new();
            self.apply(client, request, Instant::now(), &mut replies).map(|()| replies)
        }

        /// Asks as somebody who never waits; returns the reply to that one, and those to others.
        fn tell(&mut self, request: Request<'_>) -> (Response, Replies) {
            let passer_by = ClientId(0);
            let mut replies = self.ask(passer_by, request).expect("not refused");
            let (client, own) = replies.pop().expect("everything but a wait is answered");
            assert_eq!(client, passer_by);
            (own, replies)
        }

        /// Asks as somebody who never waits; nobody else must notice.
        fn one(&mut self, request: Request<'_>) -> Response {
            let (own, others) = self.tell(request);
            assert_eq!(others, []);
            own
        }

        fn set(&mut self, key: &str, value: &str) -> Replies {
            let (done, woken) = self.tell(Request::Set { key: bytes(key), value: bytes(value) });
            assert_eq!(done, Done);
            woken
        }

        fn get(&mut self, key: &str) -> Response {
            self.one(Request::Get { key: bytes(key) })
        }

        fn try_add(&mut self, key: &str, delta: i64) -> Result<Replies, Refusal> {
            self.ask(ClientId(0), Request::Add { key: bytes(key), delta })
        }

        fn add(&mut self, key: &str, delta: i64) -> Response {
            self.one(Request::Add { key: bytes(key), delta })
        }

        fn remove(&mut self, key: &str) -> Response {
            self.one(Request::Delete { key: bytes(key) })
        }

        fn compare_set_of(&mut self, key: &str, expected: &str, desired: &str) -> (Response, Replies) {
            let (expected, desired) = (bytes(expected), bytes(desired));
            self.tell(Request::CompareSet { key: bytes(key), expected, desired })
        }

        fn multi_set_of(&mut self, pairs: &[(&str, &str)]) -> Result<Replies, Refusal> {
            let pairs = pairs.iter().map(|(key, value)| (bytes(key), bytes(value))).collect();
            self.ask(ClientId(0), Request::MultiSet { pairs })
        }

        fn push_of(&mut self, key: &str, item: &str) -> Replies {
            let (done, woken) = self.tell(Request::QueuePush { key: bytes(key), value: bytes(item) });
            assert_eq!(done, Done);
            woken
        }

        fn pop_of(&mut self, client: ClientId, key: &str) -> Replies {
            self.ask(client, Request::QueuePop { key: bytes(key) }).expect("a pop is never refused")
        }

        fn queue_len(&mut self, key: &str) -> Response {
            self.one(Request::QueueLen { key: bytes(key) })
        }

        fn wait(&mut self, client: ClientId, names: &[&str]) -> Result<Replies, Refusal> {
            self.ask(client, Request::Wait { keys: keys(names) })
        }

        fn waits(&mut self, client: ClientId, names: &[&str]) {
            assert_eq!(self.wait(client, names), Ok(vec![]));
        }

        fn barrier(&mut self, client: ClientId, key: &str, world: i64) -> Result<Replies, Refusal> {
            self.ask(client, Request::Barrier { key: bytes(key), world })
        }

        fn cancels(&mut self, client: ClientId) -> (bool, Replies) {
            let mut replies = Replies::new();
            (self.cancel(client, &mut replies), replies)
        }

        fn forgets(&mut self, client: ClientId) -> Replies {
            let mut replies = Replies::new();
            self.forget(client, &mut replies);
            replies
        }

        /// Everything a client could find out, to show that a refusal changed nothing.
        fn picture(&self) -> (Vec<(Value, Value)>, Vec<(Value, VecDeque<Value>)>, Vec<Waiter>, [usize; 4]) {
            let mut map: Vec<_> = self.map.iter().map(|(k, v)| (k.clone(), v.clone())).collect();
            let mut queues: Vec<_> = self.queues.iter().map(|(k, v)| (k.clone(), v.clone())).collect();
            map.sort();
            queues.sort();
            let counts = [self.bytes, self.queue_items, self.waiting.len(), self.promised.len()];
            (map, queues, self.waiters(), counts)
        }
    }

    // ── keys ───────────────────────────────────────────────────────────────────────────────────────────

    #[test]
    fn a_key_is_what_was_last_written_to_it() {
        let mut table = table();
        assert_eq!(table.get("k"), NONE);
        assert_eq!(table.set("k", "one"), []);
        assert_eq!(table.get("k"), some("one"));
        for text in ["two", "longer", "", "x"] {
            table.set("k", text); // the same length, longer, empty, longer again
            assert_eq!(table.get("k"), some(text));
        }
        assert_eq!(table.remove("k"), Deleted(true));
        assert_eq!(table.remove("k"), Deleted(false));
        assert_eq!(table.get("k"), NONE);
    }

    #[test]
    fn a_reply_keeps_the_value_it_was_given() {
        let mut table = table();
        table.set("k", "old");
        let Response::Value(Some(reply)) = table.get("k") else { panic!("the key is there") };
        table.set("k", "new"); // as long as the old one: must not be written over it
        assert_eq!(*reply, *b"old");
        assert_eq!(table.get("k"), some("new"));
    }

    #[test]
    fn appending_creates_and_lengthens() {
        let mut table = table();
        for (part, whole) in [("a", "a"), ("", "a"), ("bc", "abc")] {
            assert_eq!(table.one(Request::Append { key: bytes("k"), value: bytes(part) }), Done);
            assert_eq!(table.get("k"), some(whole));
        }
        assert_eq!(table.one(Request::Append { key: bytes("new"), value: bytes("") }), Done);
        assert_eq!(table.get("new"), some(""));
    }

    #[test]
    fn several_keys_are_read_and_written_in_the_order_asked() {
        let mut table = table();
        table.multi_set_of(&[("a", "1"), ("b", "2"), ("a", "3")]).expect("not refused");
        let read = table.one(Request::MultiGet { keys: keys(&["b", "none", "a", "b"]) });
        assert_eq!(read, Values(vec![Some(value("2")), None, Some(value("3")), Some(value("2"))]));
        assert_eq!(table.one(Request::MultiGet { keys: vec![] }), Values(vec![]));
        assert_eq!(table.multi_set_of(&[]), Ok(vec![(ClientId(0), Done)]));
    }

    #[test]
    fn checking_wants_all_keys_and_counts_a_queue_with_something_in_it() {
        let mut table = table();
        table.set("k", "");
        table.push_of("q", "item");
        for (names, present) in [
            (&[][..], true),
            (&["k"], true),
            (&["q"], true),
            (&["k", "q", "k"], true),
            (&["k", "none"], false),
            (&["none", "q"], false),
        ] {
            assert_eq!(table.one(Request::Check { keys: keys(names) }), Present(present), "{names:?}");
        }
        table.pop_of(ALICE, "q");
        assert_eq!(table.one(Request::Check { keys: keys(&["q"]) }), Present(false));
    }

    #[test]
    fn keys_are_counted_and_listed_and_queues_are_not() {
        let mut table = table();
        assert_eq!(table.one(Request::NumKeys), Number(0));
        table.set("a", "1");
        table.set("b", "2");
        table.set("a", "3");
        table.push_of("q", "item");
        table.waits(ALICE, &["missing"]);
        assert_eq!(table.one(Request::NumKeys), Number(2));
        let Keys(mut listed) = table.one(Request::ListKeys) else { panic!("keys are listed") };
        listed.sort();
        assert_eq!(listed, [value("a"), value("b")]);
    }

    #[test]
    fn compare_set_answers_and_wakes_in_its_four_cases() {
        // (there before, expected, reply, there after, are those who wait woken)
        for (before, expected, reply, after, wakes) in [
            (None, "", "new", some("new"), true),
            (None, "old", "old", NONE, false),
            (Some("old"), "old", "new", some("new"), true),
            (Some(""), "", "new", some("new"), true),
            (Some("other"), "old", "other", some("other"), false),
            (Some("other"), "", "other", some("other"), false),
        ] {
            let mut table = table();
            table.barrier(ALICE, "k", 9).expect("not refused"); // waits for a write, be the key there or not
            table.remove("k");
            if let Some(before) = before {
                table.store(b"k", before.as_bytes()).expect("there is room");
            }
            let woken = if wakes { vec![(ALICE, Ready)] } else { vec![] };
            assert_eq!(table.compare_set_of("k", expected, "new"), (some(reply), woken), "{before:?}");
            assert_eq!(table.get("k"), after);
        }
    }

    // ── numbers ────────────────────────────────────────────────────────────────────────────────────────

    #[test]
    fn adding_counts_from_zero_and_keeps_decimal_text() {
        let mut table = table();
        assert_eq!(table.add("n", 0), Number(0));
        assert_eq!(table.get("n"), some("0"));
        assert_eq!(table.add("n", -12), Number(-12));
        assert_eq!(table.get("n"), some("-12"));
        assert_eq!(table.add("n", 22), Number(10));
        assert_eq!(table.get("n"), some("10"));
    }

    #[test]
    fn numbers_are_read_as_strtoll_reads_them() {
        for (text, number) in [
            ("0", Some(0)),
            ("-0", Some(0)),
            ("007", Some(7)),
            (" \t\n\u{b}\u{c}\r+5", Some(5)),
            ("  -5", Some(-5)),
            ("12abc", Some(12)),
            ("12 34", Some(12)),
            ("1.9", Some(1)),
            ("0x10", Some(0)),
            ("9223372036854775807", Some(i64::MAX)),
            ("-9223372036854775808", Some(i64::MIN)),
            ("00000000000000000000000000009", Some(9)),
            ("9223372036854775808", None),
            ("-9223372036854775809", None),
            ("99999999999999999999999", None),
            ("99999999999999999999999junk", None),
            ("", None),
            (" ", None),
            ("-", None),
            ("+", None),
            ("+-1", None),
            ("- 1", None),
            ("abc", None),
            ("\01", None),
            ("é1", None),
        ] {
            assert_eq!(parse_number(text.as_bytes()), number, "{text:?}");
        }
    }

    #[test]
    fn a_sum_wraps_and_what_is_no_number_stays_as_it_is() {
        let mut table = table();
        table.set("n", "9223372036854775807");
        assert_eq!(table.add("n", 1), Number(i64::MIN));
        assert_eq!(table.add("n", -1), Number(i64::MAX));
        table.set("n", "12abc");
        assert_eq!(table.add("n", 1), Number(13));
        assert_eq!(table.get("n"), some("13"));
        for text in ["", "abc", "9223372036854775808"] {
            table.set("n", text);
            let refusal = Refusal::NotANumber { key: value("n") };
            assert_eq!(table.try_add("n", 1), Err(refusal.clone()));
            assert_eq!(table.barrier(ALICE, "n", 1), Err(refusal));
            assert_eq!(table.get("n"), some(text));
        }
    }

    // ── waiting ────────────────────────────────────────────────────────────────────────────────────────

    #[test]
    fn waiting_for_what_is_there_is_over_at_once() {
        let mut table = table();
        assert_eq!(table.wait(ALICE, &[]), Ok(vec![(ALICE, Ready)]));
        table.set("k", "1");
        table.push_of("q", "item");
        assert_eq!(table.wait(ALICE, &["k", "q", "k"]), Ok(vec![(ALICE, Ready)]));
        assert_eq!(table.waiters_count(), 0);
    }

    #[test]
    fn every_kind_of_write_ends_a_wait() {
        let key = || bytes("k");
        for write in [
            Request::Set { key: key(), value: bytes("1") },
            Request::Append { key: key(), value: bytes("") },
            Request::Add { key: key(), delta: 0 },
            Request::CompareSet { key: key(), expected: bytes(""), desired: bytes("1") },
            Request::MultiSet { pairs: vec![(bytes("other"), bytes("1")), (key(), bytes("1"))] },
            Request::Barrier { key: key(), world: 1 },
            Request::QueuePush { key: key(), value: bytes("1") },
        ] {
            let mut table = table();
            table.waits(ALICE, &["k"]);
            let name = write.operation().name();
            assert_eq!(table.tell(write).1, [(ALICE, Ready)], "{name}");
            assert_eq!(table.set("k", "2"), [], "{name} ended the wait for good");
        }
    }

    #[test]
    fn a_wait_is_over_with_its_last_key_and_a_key_listed_twice_counts_once() {
        let mut table = table();
        table.waits(ALICE, &["a", "b", "a", "a"]);
        assert_eq!(table.set("a", "1"), []);
        assert_eq!(table.set("a", "2"), []);
        assert_eq!(table.set("b", "1"), [(ALICE, Ready)]);
        assert_eq!(table.set("b", "1"), []);
    }

    #[test]
    fn a_write_wakes_everybody_who_waits_for_it_and_the_oldest_first() {
        let mut table = table();
        table.waits(BOB, &["k"]);
        table.waits(ALICE, &["k"]);
        table.waits(CAROL, &["k", "more"]);
        assert_eq!(table.set("k", "1"), [(BOB, Ready), (ALICE, Ready)]);
        assert_eq!(table.set("more", "1"), [(CAROL, Ready)]);
    }

    #[test]
    fn deleting_a_key_that_was_seen_does_not_prolong_the_wait() {
        let mut table = table();
        table.set("there", "1");
        table.waits(ALICE, &["there", "a", "b"]);
        table.set("a", "1");
        assert_eq!(table.remove("there"), Deleted(true));
        assert_eq!(table.remove("a"), Deleted(true));
        assert_eq!(table.set("b", "1"), [(ALICE, Ready)]);
    }

    #[test]
    fn a_client_that_waits_may_ask_and_may_wake_itself() {
        let mut table = table();
        table.waits(ALICE, &["k"]);
        assert_eq!(table.ask(ALICE, Request::NumKeys), Ok(vec![(ALICE, Number(0))]));
        let woken_first = vec![(ALICE, Ready), (ALICE, Number(1))];
        assert_eq!(table.ask(ALICE, Request::Add { key: bytes("k"), delta: 1 }), Ok(woken_first));
    }

    #[test]
    fn a_second_wait_is_refused_and_the_first_one_stays() {
        let mut table = table();
        table.set("there", "1");
        table.waits(ALICE, &["k"]);
        let before = table.picture();
        assert_eq!(table.wait(ALICE, &["other"]), Err(Refusal::AlreadyWaiting));
        assert_eq!(table.barrier(ALICE, "b", 2), Err(Refusal::AlreadyWaiting));
        assert_eq!(table.barrier(ALICE, "b", 1), Err(Refusal::AlreadyWaiting));
        assert_eq!(table.picture(), before);
        assert_eq!(table.wait(ALICE, &["there"]), Ok(vec![(ALICE, Ready)])); // nothing to wait for
        assert_eq!(table.set("k", "1"), [(ALICE, Ready)]);
    }

    #[test]
    fn a_cancelled_wait_and_a_forgotten_client_are_never_woken() {
        let mut table = table();
        assert_eq!(table.cancels(ALICE), (false, vec![]));
        table.waits(ALICE, &["a", "b"]);
        table.waits(BOB, &["b", "c"]);
        table.waits(CAROL, &["b"]);
        table.set("a", "1");
        assert_eq!(table.cancels(ALICE), (true, vec![]));
        assert_eq!(table.cancels(ALICE), (false, vec![]));
        assert_eq!(table.forgets(BOB), []);
        assert_eq!(table.set("b", "1"), [(CAROL, Ready)]);
        assert_eq!(table.set("c", "1"), []);
        // The ids may be used again.
        table.waits(ALICE, &["d"]);
        assert_eq!(table.set("d", "1"), [(ALICE, Ready)]);
    }

    #[test]
    fn those_who_wait_are_listed_with_what_they_miss_and_the_longest_first() {
        let mut table = table();
        let start = Instant::now();
        let mut wait = |client, names: &[&str], seconds| {
            let mut replies = Replies::new();
            let now = start + Duration::from_secs(seconds);
            table.apply(client, Request::Wait { keys: keys(names) }, now, &mut replies).expect("not refused");
        };
        let many: Vec<String> = (10..30).map(|index| format!("k{index}")).collect();
        wait(ALICE, &many.iter().map(String::as_str).collect::<Vec<_>>(), 2);
        wait(BOB, &["z", "a"], 1);
        table.set("k10", "seen");
        let [bob, alice] = &table.waiters()[..] else { panic!("two wait") };
        assert_eq!((bob.client, bob.missing_count, bob.since), (BOB, 2, start + Duration::from_secs(1)));
        assert_eq!(bob.missing, [value("a"), value("z")]);
        assert_eq!((alice.client, alice.missing_count, alice.operation), (ALICE, 19, Operation::Wait));
        assert_eq!((alice.missing.len(), &alice.missing[0]), (8, &value("k11")));
    }

    // ── queues ─────────────────────────────────────────────────────────────────────────────────────────

    #[test]
    fn a_queue_is_first_in_first_out_and_apart_from_a_key_of_its_name() {
        let mut table = table();
        assert_eq!(table.queue_len("q"), Number(0));
        assert_eq!(table.pop_of(ALICE, "q"), [(ALICE, Popped(None))]);
        for text in ["1", "", "3"] {
            table.push_of("q", text);
        }
        table.set("q", "key");
        assert_eq!(table.queue_len("q"), Number(3));
        assert_eq!(table.remove("q"), Deleted(true));
        for (text, length) in [("1", 3), ("", 2), ("3", 1)] {
            assert_eq!(table.pop_of(ALICE, "q"), [(ALICE, item(text, length))]);
        }
        assert_eq!(table.pop_of(ALICE, "q"), [(ALICE, Popped(None))]);
        assert_eq!(table.get("q"), NONE);
        assert_eq!((table.queue_items(), table.bytes()), (0, 0));
    }

    #[test]
    fn a_push_wakes_exactly_one_the_oldest_that_waits_for_nothing_else() {
        let mut table = table();
        table.waits(ALICE, &["q", "k"]);
        table.waits(BOB, &["q"]);
        table.waits(CAROL, &["q"]);
        assert_eq!(table.push_of("q", "1"), [(BOB, Ready)]);
        assert_eq!(table.push_of("q", "2"), [(CAROL, Ready)]);
        assert_eq!(table.push_of("q", "3"), []);
        assert_eq!(table.set("k", "1"), [(ALICE, Ready)]); // it saw the queue with the first push
    }

    #[test]
    fn a_client_woken_by_a_push_is_not_woken_by_the_next_for_something_unrelated() {
        let mut table = table();
        table.waits(ALICE, &["q"]);
        assert_eq!(table.push_of("q", "1"), [(ALICE, Ready)]);
        assert_eq!(table.pop_of(ALICE, "q"), [(ALICE, item("1", 1))]);
        table.waits(ALICE, &["unrelated"]);
        assert_eq!(table.push_of("q", "2"), []); // PyTorch's server wakes it here
        assert_eq!(table.set("unrelated", "1"), [(ALICE, Ready)]);
    }

    #[test]
    fn a_wait_for_a_filled_queue_and_a_missing_key_is_over_when_the_key_comes() {
        let mut table = table();
        table.push_of("q", "1");
        table.waits(ALICE, &["q", "k"]);
        table.pop_of(BOB, "q");
        assert_eq!(table.set("k", "1"), [(ALICE, Ready)]); // PyTorch's server sleeps on
    }

    #[test]
    fn an_item_for_a_client_that_does_not_come_for_it_is_offered_to_the_next() {
        type Leave = fn(&mut Table) -> Replies;
        let leaves: [(&str, Leave); 6] = [
            ("dies", |table| table.forgets(ALICE)),
            ("cancels", |table| table.cancels(ALICE).1),
            ("asks for another queue", |table| table.pop_of(ALICE, "other")),
            ("asks for a key", |table| table.ask(ALICE, Request::NumKeys).expect("not refused")),
            ("waits for something else", |table| table.wait(ALICE, &["else"]).expect("not refused")),
            ("fails", |table| {
                let mut replies = Replies::new();
                let request = Request::Add { key: bytes("text"), delta: 1 };
                table.apply(ALICE, request, Instant::now(), &mut replies).expect_err("no number");
                replies
            }),
        ];
        for (how, leave) in leaves {
            let mut table = table();
            table.set("text", "no number");
            table.waits(ALICE, &["q"]);
            table.waits(BOB, &["q"]);
            assert_eq!(table.push_of("q", "item"), [(ALICE, Ready)]);
            let woken: Vec<_> =
                leave(&mut table).into_iter().filter(|(client, _)| *client != ALICE).collect();
            assert_eq!(woken, [(BOB, Ready)], "the one that waits {how}");
            assert_eq!(table.pop_of(BOB, "q"), [(BOB, item("item", 1))]);
            assert!(table.promised.is_empty());
        }
    }

    #[test]
    fn an_item_is_passed_on_until_somebody_takes_it() {
        let mut table = table();
        for client in [ALICE, BOB, CAROL] {
            table.waits(client, &["q"]);
        }
        assert_eq!(table.push_of("q", "item"), [(ALICE, Ready)]);
        assert_eq!(table.forgets(ALICE), [(BOB, Ready)]);
        assert_eq!(table.cancels(BOB), (false, vec![(CAROL, Ready)]));
        assert_eq!(table.forgets(CAROL), []);
        assert_eq!(table.wait(ALICE, &["q"]), Ok(vec![(ALICE, Ready)])); // nothing is lost
        assert_eq!(table.pop_of(ALICE, "q"), [(ALICE, item("item", 1))]);
    }

    #[test]
    fn nobody_is_offered_an_item_that_somebody_else_took() {
        let mut table = table();
        table.waits(ALICE, &["q"]);
        table.waits(BOB, &["q"]);
        table.push_of("q", "item");
        assert_eq!(table.pop_of(CAROL, "q"), [(CAROL, item("item", 1))]);
        assert_eq!(table.forgets(ALICE), []);
        assert_eq!(table.push_of("q", "next"), [(BOB, Ready)]);
    }

    #[test]
    fn a_client_that_comes_for_its_item_wakes_nobody_else() {
        let mut table = table();
        table.waits(ALICE, &["q"]);
        table.waits(BOB, &["q"]);
        table.push_of("q", "item");
        assert_eq!(table.pop_of(ALICE, "q"), [(ALICE, item("item", 1))]);
        assert_eq!(table.forgets(ALICE), []);
        assert_eq!(table.waiters_count(), 1);
    }

    // ── barriers ───────────────────────────────────────────────────────────────────────────────────────

    #[test]
    fn a_barrier_opens_with_its_last_arrival_and_stays_open() {
        let mut table = table();
        assert_eq!(table.barrier(ALICE, "b", 3), Ok(vec![]));
        assert_eq!(table.barrier(BOB, "b", 3), Ok(vec![]));
        let all = vec![(ALICE, Ready), (BOB, Ready), (CAROL, Ready)];
        assert_eq!(table.barrier(CAROL, "b", 3), Ok(all));
        assert_eq!(table.barrier(ALICE, "b", 3), Ok(vec![(ALICE, Ready)]));
        assert_eq!(table.get("b"), some("4"));
        assert_eq!(table.waiters_count(), 0);
    }

    #[test]
    fn an_arrival_that_gave_up_stays_counted() {
        let mut table = table();
        assert_eq!(table.barrier(ALICE, "b", 2), Ok(vec![]));
        assert_eq!(table.cancels(ALICE), (true, vec![]));
        assert_eq!(table.barrier(BOB, "b", 2), Ok(vec![(BOB, Ready)]));
    }

    #[test]
    fn a_barrier_of_nobody_is_open() {
        for world in [1, 0, -1, i64::MIN] {
            let mut table = table();
            assert_eq!(table.barrier(ALICE, "b", world), Ok(vec![(ALICE, Ready)]));
            assert_eq!(table.get("b"), some("1"));
        }
    }

    #[test]
    fn any_other_write_opens_a_barrier_and_a_failed_compare_set_does_not() {
        let mut table = table();
        assert_eq!(table.barrier(ALICE, "b", 9), Ok(vec![]));
        assert_eq!(table.barrier(BOB, "b", 9), Ok(vec![])); // an arrival alone wakes nobody
        assert_eq!(table.compare_set_of("b", "7", "9"), (some("2"), vec![]));
        assert_eq!(table.remove("b"), Deleted(true));
        assert_eq!(table.set("b", "x"), [(ALICE, Ready), (BOB, Ready)]);
    }

    #[test]
    fn a_barrier_shows_who_waits_at_it() {
        let mut table = table();
        table.barrier(ALICE, "b", 2).expect("not refused");
        let [waiter] = &table.waiters()[..] else { panic!("one waits") };
        assert_eq!((waiter.operation, &waiter.missing[..]), (Operation::Barrier, &[value("b")][..]));
    }

    // ── limits and memory ──────────────────────────────────────────────────────────────────────────────

    #[test]
    fn a_table_with_all_its_keys_refuses_new_ones_and_changes_old_ones() {
        let mut table = limited(|limits| limits.keys = 2);
        table.set("a", "1");
        table.set("b", "2");
        table.waits(ALICE, &["c"]);
        let before = table.picture();
        let key = || bytes("c");
        for write in [
            Request::Set { key: key(), value: bytes("1") },
            Request::Append { key: key(), value: bytes("1") },
            Request::Add { key: key(), delta: 1 },
            Request::CompareSet { key: key(), expected: bytes(""), desired: bytes("1") },
            Request::MultiSet { pairs: vec![(bytes("a"), bytes("changed")), (key(), bytes("1"))] },
            Request::Barrier { key: key(), world: 1 },
            Request::Barrier { key: key(), world: 2 },
        ] {
            let name = write.operation().name();
            assert_eq!(table.ask(BOB, write), full("keys", 2), "{name}");
            assert_eq!(table.picture(), before, "{name}");
        }
        table.set("a", "3");
        assert_eq!(table.multi_set_of(&[("a", "4"), ("b", "5")]), Ok(vec![(ClientId(0), Done)]));
        table.remove("b");
        assert_eq!(table.set("c", "1"), [(ALICE, Ready)]);
    }

    #[test]
    fn a_table_at_its_limit_of_bytes_refuses_to_grow_and_is_left_as_it_was() {
        for room in 0..600 {
            let mut table = limited(|limits| limits.bytes = room);
            let long = "x".repeat(40);
            for (client, request) in [
                (BOB, Request::Set { key: bytes("k"), value: bytes(&long) }),
                (BOB, Request::Set { key: bytes("k"), value: bytes(&long[1..]) }),
                (BOB, Request::Append { key: bytes("k"), value: bytes(&long) }),
                (BOB, Request::Add { key: bytes("n"), delta: 1 }),
                (BOB, Request::CompareSet { key: bytes("c"), expected: bytes(""), desired: bytes(&long) }),
                (ALICE, Request::Barrier { key: bytes("b"), world: 2 }),
                (CAROL, Request::Wait { keys: keys(&["x", "y"]) }),
                (BOB, Request::QueuePush { key: bytes("q"), value: bytes(&long) }),
                (BOB, Request::QueuePush { key: bytes("q"), value: bytes(&long) }),
                (BOB, Request::MultiSet { pairs: vec![(bytes("k"), bytes("")), (bytes("m"), bytes(&long))] }),
                (BOB, Request::Barrier { key: bytes("b"), world: 2 }),
            ] {
                let (before, name) = (table.picture(), request.operation().name());
                match table.ask(client, request) {
                    Ok(_) => assert!(table.bytes() <= room, "{name} with room for {room} bytes"),
                    refused => {
                        assert_eq!(refused, full("bytes", room), "{name}");
                        assert_eq!(table.picture(), before, "{name} with room for {room} bytes");
                    }
                }
            }
        }
    }

    #[test]
    fn queues_hold_so_many_items_together_and_no_more() {
        let mut table = limited(|limits| limits.queue_items = 2);
        table.push_of("q", "1");
        table.push_of("r", "2");
        let before = table.picture();
        for queue in ["q", "new"] {
            let push = Request::QueuePush { key: bytes(queue), value: bytes("3") };
            assert_eq!(table.ask(ALICE, push), full("queue items", 2));
            assert_eq!(table.picture(), before);
        }
        table.pop_of(ALICE, "q");
        assert_eq!(table.push_of("new", "3"), []);
    }

    #[test]
    fn memory_is_counted_back_to_nothing() {
        let mut table = table();
        assert_eq!(table.bytes(), 0);
        table.set("a", "value");
        table.set("a", "a longer value");
        table.set("a", "short");
        table.one(Request::Append { key: bytes("a"), value: bytes("er") });
        table.add("n", 99);
        table.add("n", 1);
        table.compare_set_of("a", "shorter", "x");
        table.multi_set_of(&[("m", "1"), ("m", "22"), ("a", "")]).expect("not refused");
        table.push_of("q", "one");
        table.push_of("q", "two");
        table.waits(ALICE, &["w1", "w2", "w1"]);
        table.barrier(BOB, "b", 2).expect("not refused");
        table.waits(CAROL, &["w1", "q2"]);
        table.set("w1", "seen");
        table.push_of("q2", "three");
        let with_everything = table.bytes();
        table.cancels(ALICE);
        assert!(table.bytes() < with_everything);
        table.forgets(BOB);
        table.forgets(CAROL);
        for queue in ["q", "q", "q2"] {
            table.pop_of(ALICE, queue);
        }
        for key in ["a", "n", "m", "b", "w1"] {
            assert_eq!(table.remove(key), Deleted(true));
        }
        assert_eq!((table.bytes(), table.keys(), table.queue_items(), table.waiters_count()), (0, 0, 0, 0));
    }

    #[test]
    fn a_long_value_counts_until_the_last_reply_that_holds_it_is_gone() {
        let mut table = table();
        let long = "x".repeat(SHARED_VALUE);
        table.set("k", &long);
        let full = table.bytes();
        let reply = table.get("k");
        let other = table.get("k");
        assert_eq!(table.remove("k"), Deleted(true));
        table.sweep();
        assert_eq!(table.bytes(), SHARED_VALUE);
        drop(reply);
        table.sweep();
        assert_eq!(table.bytes(), SHARED_VALUE);
        drop(other);
        table.sweep();
        assert_eq!(table.bytes(), 0);
        // A short one is copied into its reply and counts no longer than the key.
        table.set("k", &long[1..]);
        let reply = table.get("k");
        assert_eq!(table.remove("k"), Deleted(true));
        assert_eq!(table.bytes(), 0);
        drop(reply);
        assert!(full > SHARED_VALUE);
    }

    #[test]
    fn values_that_only_replies_hold_give_way_when_room_is_needed() {
        let mut table = limited(|limits| limits.bytes = 3 * SHARED_VALUE);
        let long = "x".repeat(SHARED_VALUE);
        let mut replies = Vec::new();
        for _ in 0..2 {
            table.set("k", &long);
            replies.push(table.get("k"));
        }
        assert!(table.bytes() > 2 * SHARED_VALUE);
        let set = || Request::Set { key: bytes("other"), value: bytes(&long) };
        assert_eq!(table.ask(ALICE, set()), full("bytes", 3 * SHARED_VALUE));
        replies.clear();
        assert_eq!(table.ask(ALICE, set()), Ok(vec![(ALICE, Done)]));
    }

    #[test]
    fn a_value_that_a_reply_still_holds_leaves_no_room_for_its_successor() {
        let limit = ENTRY + 1 + SHARED_VALUE + 10;
        let mut table = limited(|limits| limits.bytes = limit);
        let long = "x".repeat(SHARED_VALUE);
        table.set("k", &long);
        let reply = table.get("k");
        let before = table.picture();
        let writes = || {
            [
                Request::Set { key: bytes("k"), value: bytes(&long) },
                Request::Append { key: bytes("k"), value: bytes("1") },
            ]
        };
        for write in writes() {
            assert_eq!(table.ask(ALICE, write), full("bytes", limit));
            assert_eq!(table.picture(), before);
        }
        drop((reply, before));
        for write in writes() {
            assert_eq!(table.ask(ALICE, write), Ok(vec![(ALICE, Done)]));
        }
    }
}
