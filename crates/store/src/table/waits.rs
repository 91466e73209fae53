//! Waiting clients: for keys, for items of a queue, in a barrier. Which client is woken, and what it is
//! promised.

use std::collections::hash_map::Entry;
use std::time::Instant;

use super::{ClientId, ENTRY, Refusal, Replies, Table, Waiter};
use crate::request::{Bytes, Operation, Request, Response};
use crate::value::Value;

/// A wait that has not ended.
#[derive(Debug)]
pub(super) struct Wait {
    /// Every key that was missing when the wait began.
    pub(super) missing: Vec<Value>,
    /// How many of them have not been seen since.
    pub(super) left: usize,
    /// Its position among the clients that wait for the same key.
    pub(super) ticket: u64,
    /// What it is charged for until it ends: `missing` keeps the names of keys that were set and deleted
    /// meanwhile.
    pub(super) bytes: usize,
    pub(super) since: Instant,
    pub(super) operation: Operation,
}

impl Table {
    /// Does this client wait?
    pub(crate) fn is_waiting(&self, client: ClientId) -> bool {
        self.waits.contains_key(&client)
    }

    /// Was an item pushed for this client that it has not asked for yet?
    pub(crate) fn is_promised(&self, client: ClientId) -> bool {
        self.promised.contains_key(&client)
    }

    /// Does this client wait for exactly these keys, and has it seen none of them? Then another client that
    /// begins to wait for them now is woken at the same moment.
    pub(crate) fn waits_afresh(&self, client: ClientId, keys: &[Bytes<'_>]) -> bool {
        let Some(wait) = self.waits.get(&client) else { return false };
        let is_missing = |key: &Bytes<'_>| wait.missing.binary_search_by(|other| (**other).cmp(key)).is_ok();
        wait.operation == Operation::Wait
            && wait.left == wait.missing.len()
            && keys.len() >= wait.missing.len()
            && keys.iter().all(|key| is_missing(key) && !self.has(key))
    }

    /// A push has ended the wait of `from`, which several clients share: the item is for `to`, and `from`
    /// waits for the next push to the same queue.
    pub(crate) fn share_promise(
        &mut self,
        from: ClientId,
        to: ClientId,
        now: Instant,
    ) -> Result<(), Refusal> {
        let Some(queue) = self.promised.remove(&from) else { return Ok(()) };
        self.promised.insert(to, queue.clone());
        self.register(from, vec![queue], now, Operation::Wait)
    }

    /// The queue that an item was pushed to for this client.
    pub(crate) fn promised_queue(&self, client: ClientId) -> Option<Value> {
        self.promised.get(&client).cloned()
    }

    /// Lets a client wait for a push to `queue` again, after a time in which it was passed over.
    pub(crate) fn wait_for_push(
        &mut self,
        client: ClientId,
        queue: Value,
        now: Instant,
        replies: &mut Replies,
    ) {
        if self.map.contains(&queue)
            || self.register(client, vec![queue.clone()], now, Operation::Wait).is_err()
        {
            return replies.push((client, Response::Ready));
        }
        let promises = self.promised.values().filter(|other| **other == queue).count();
        if self.queues.get(&queue).is_some_and(|queue| queue.items.len() > promises) {
            self.wake_one(&queue, replies);
        }
    }

    /// Since when the longest wait has lasted.
    pub(crate) fn oldest_wait(&self) -> Option<Instant> {
        self.waits.values().map(|wait| wait.since).min()
    }

    /// How many clients wait.
    pub fn waiters_count(&self) -> usize {
        self.waits.len()
    }

    /// Which client waits for which keys, and since when; the longest wait first.
    pub fn waiters(&self) -> Vec<Waiter> {
        self.oldest_waiters(usize::MAX)
    }

    /// As [`Table::waiters`], but at most `count`: describing one can take long.
    pub fn oldest_waiters(&self, count: usize) -> Vec<Waiter> {
        const KEYS_SHOWN: usize = 8;
        // A wait may have seen most of its 100,000 keys, so at most this many are checked for all waits
        // together.
        const KEYS_LOOKED_AT: usize = 16 << 10;
        let mut looks = KEYS_LOOKED_AT;
        let mut missing_of = |wait: &Wait| {
            let keys = wait.missing.iter().take(looks);
            let waits_for = |key: &&Value| {
                looks -= 1;
                self.waiting.get(*key).is_some_and(|clients| clients.contains_key(&wait.ticket))
            };
            keys.filter(waits_for).take(KEYS_SHOWN).cloned().collect()
        };
        let mut oldest: Vec<_> = self.waits.iter().collect();
        if count == 0 {
            return Vec::new();
        }
        if count < oldest.len() {
            oldest.select_nth_unstable_by_key(count - 1, |(client, wait)| (wait.since, **client));
            oldest.truncate(count);
        }
        oldest.sort_unstable_by_key(|(client, wait)| (wait.since, **client));
        oldest
            .into_iter()
            .map(|(&client, wait)| Waiter {
                client,
                operation: wait.operation,
                missing: missing_of(wait),
                missing_count: wait.left,
                since: wait.since,
            })
            .collect()
    }

    /// Parks the client until every key has been seen; true if there is nothing to wait for.
    pub(super) fn park(
        &mut self,
        client: ClientId,
        keys: Vec<Bytes<'_>>,
        now: Instant,
    ) -> Result<bool, Refusal> {
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

    pub(super) fn register(
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
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        for key in &missing {
            self.waiting.entry(key.clone()).or_default().insert(ticket, client);
        }
        let left = missing.len();
        self.waits.insert(client, Wait { left, missing, ticket, bytes: size, since: now, operation });
        Ok(())
    }

    /// Counts `count` arrivals, which then wait as one client; true if the barrier is complete. As if that
    /// many clients had arrived one after the other.
    pub(crate) fn arrive(
        &mut self,
        client: ClientId,
        key: &[u8],
        (world, count): (i64, u64),
        now: Instant,
        replies: &mut Replies,
    ) -> Result<bool, Refusal> {
        if self.waits.contains_key(&client) {
            return Err(Refusal::AlreadyWaiting);
        }
        let arrived = self.number(key)?.wrapping_add(count as i64);
        let text = arrived.to_string();
        if arrived >= world {
            self.write(key, text.as_bytes(), replies)?;
            return Ok(true);
        }
        // Registered before it is counted, so that a client that is refused for lack of memory is not
        // counted.
        self.register(client, vec![key.into()], now, Operation::Barrier)?;
        // Not `write`: an arrival wakes no client until the last one.
        if let Err(refusal) = self.store(key, text.as_bytes()) {
            self.end_wait(client);
            return Err(refusal);
        }
        Ok(false)
    }

    /// `key` exists now: takes it off all lists and ends the waits that have no missing keys left.
    pub(super) fn wake_all(&mut self, key: &[u8], replies: &mut Replies) {
        if self.waiting.is_empty() {
            return; // the common case of a busy store costs one comparison
        }
        let Some(clients) = self.waiting.remove(key) else { return };
        for client in clients.into_values() {
            self.saw(client, replies);
        }
    }

    /// A queue got one item: ends the oldest wait that has no other missing keys, so that one client pops it.
    pub(super) fn wake_one(&mut self, key: &[u8], replies: &mut Replies) {
        while let Some(clients) = self.waiting.get_mut(key) {
            let (_, client) = clients.pop_first().expect("no list of waiting clients is empty");
            let key = if clients.is_empty() {
                self.waiting.remove_entry(key).expect("it was just looked up").0
            } else {
                Value::from(key)
            };
            if self.saw(client, replies) {
                self.bytes += registration(&key); // no more than the wait gave back
                self.promised.insert(client, key);
                return;
            }
        }
    }

    /// The client has seen a key that it waited for; true if that ends its wait.
    pub(super) fn saw(&mut self, client: ClientId, replies: &mut Replies) -> bool {
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

    pub(super) fn end_wait(&mut self, client: ClientId) -> Option<Wait> {
        let wait = self.waits.remove(&client)?;
        self.bytes -= wait.bytes;
        for key in &wait.missing {
            // A key that was seen may have a list again, for other clients.
            let Some(clients) = self.waiting.get_mut(key) else { continue };
            clients.remove(&wait.ticket);
            if clients.is_empty() {
                self.waiting.remove(key);
            }
        }
        Some(wait)
    }

    /// A client that was woken by a push sends a request: for the item, or for something else.
    pub(super) fn settle_promise(&mut self, client: ClientId, request: &Request<'_>, replies: &mut Replies) {
        match (self.promised.get(&client), request) {
            (Some(queue), Request::QueuePop { key }) if **queue == **key => {
                drop(self.take_promise(client));
            }
            (Some(_), _) => self.pass_promise_on(client, replies),
            (None, _) => {}
        }
    }

    pub(super) fn take_promise(&mut self, client: ClientId) -> Option<Value> {
        let queue = self.promised.remove(&client)?;
        self.bytes -= registration(&queue);
        Some(queue)
    }

    /// Offers what was pushed for this client to the next waiting one, if the item is still in the queue.
    pub(super) fn pass_promise_on(&mut self, client: ClientId, replies: &mut Replies) {
        if let Some(queue) = self.take_promise(client)
            && self.queues.contains(&queue)
        {
            self.wake_one(&queue, replies);
        }
    }
}

/// What waiting for one key costs.
pub(super) fn registration(key: &[u8]) -> usize {
    2 * ENTRY + key.len()
}
