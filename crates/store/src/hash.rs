//! A store for the threads of one process: the table behind a lock.
//!
//! A thread that waits sleeps on a bell of its own, and only the end of its wait rings it. With one bell for
//! all, every write would wake every thread, and a thousand threads that wait for each other's keys would
//! spend minutes on waking up for nothing.

#![expect(clippy::disallowed_methods, reason = "tells the table when a wait began")]

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use crate::ops::{DEFAULT_TIMEOUT, NO_SUCH_KEY, NO_SUCH_KEY_HINT, Store};
use crate::request::{Request, Response};
use crate::table::{ClientId, Replies, Table, TableLimits, Waiter};
use tenfold_base::{Deadline, Fault};

/// A store in this process, for threads and tests. Clones are handles on the same data.
///
/// ```
/// use tenfold_store::{HashStore, StoreExt};
///
/// let store = HashStore::new();
/// let other = store.clone();
/// std::thread::scope(|scope| {
///     scope.spawn(move || other.set("ready", "yes"));
///     store.wait(&["ready"])
/// })?;
/// # Ok::<(), tenfold_store::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct HashStore {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    timeout_millis: AtomicU64,
    /// How often a sleeping thread has woken up.
    #[cfg(test)]
    woken: AtomicUsize,
}

#[derive(Debug, Default)]
struct State {
    table: Table,
    /// Answers to waits, for the threads that sleep until theirs arrives.
    answers: HashMap<ClientId, Response>,
    /// The bells of these threads.
    sleepers: HashMap<ClientId, Arc<Condvar>>,
}

thread_local! {
    /// Each thread is a client: an item pushed for one that then asks for something else goes to the next
    /// waiting client.
    static THREAD: ClientId = {
        static THREADS: AtomicUsize = AtomicUsize::new(0);
        ClientId(THREADS.fetch_add(1, Ordering::Relaxed))
    };
}

impl HashStore {
    /// An empty store.
    pub fn new() -> Self {
        HashStore::with_limits(TableLimits::default())
    }

    /// A store that refuses to grow beyond `limits`.
    pub fn with_limits(limits: TableLimits) -> Self {
        let state = State { table: Table::new(limits), ..State::default() };
        let timeout_millis = AtomicU64::new(DEFAULT_TIMEOUT.as_millis() as u64);
        HashStore {
            shared: Arc::new(Shared {
                state: Mutex::new(state),
                timeout_millis,
                #[cfg(test)]
                woken: AtomicUsize::new(0),
            }),
        }
    }

    /// Which client waits for which keys, and since when; the longest wait first.
    pub fn waiters(&self) -> Vec<Waiter> {
        self.lock().table.waiters()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock().expect(NO_PANIC)
    }
}

const NO_PANIC: &str = "nothing panics while holding it";

impl Default for HashStore {
    fn default() -> Self {
        HashStore::new()
    }
}

impl Store for HashStore {
    fn call(&self, request: Request<'_>, deadline: Deadline) -> Result<Response, Fault> {
        let client = THREAD.with(|client| *client);
        let mut state = self.lock();
        let mut replies = Replies::new();
        let applied = state.table.apply(client, request, Instant::now(), &mut replies);
        let own = self.hand_out(&mut state, client, replies);
        applied?;
        match own {
            Some(answer) => Ok(answer),
            None => self.sleep(state, client, deadline),
        }
    }

    fn name(&self) -> String {
        "this process".into()
    }

    fn timeout(&self) -> Duration {
        Duration::from_millis(self.shared.timeout_millis.load(Ordering::Relaxed))
    }

    fn set_timeout(&self, timeout: Duration) -> bool {
        let millis = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
        self.shared.timeout_millis.store(millis, Ordering::Relaxed);
        true
    }

    fn has_extended_api(&self) -> bool {
        true
    }

    fn duplicate(&self) -> Result<Arc<dyn Store>, Fault> {
        Ok(Arc::new(self.clone()))
    }
}

impl HashStore {
    /// Returns the caller's own reply and wakes the threads that the other replies are for.
    fn hand_out(&self, state: &mut State, client: ClientId, replies: Replies) -> Option<Response> {
        let mut own = None;
        for (receiver, response) in replies {
            if receiver == client {
                own = Some(response);
            } else {
                state.answers.insert(receiver, response);
                if let Some(bell) = state.sleepers.get(&receiver) {
                    bell.notify_one();
                }
            }
        }
        own
    }

    /// Sleeps until another client's write has ended this client's wait.
    fn sleep(
        &self,
        mut state: MutexGuard<'_, State>,
        client: ClientId,
        deadline: Deadline,
    ) -> Result<Response, Fault> {
        let bell = Arc::new(Condvar::new());
        state.sleepers.insert(client, bell.clone());
        loop {
            if let Some(answer) = state.answers.remove(&client) {
                state.sleepers.remove(&client);
                return Ok(answer);
            }
            let left = deadline.left();
            if left.is_some_and(|left| left.is_zero()) {
                state.sleepers.remove(&client);
                let mut replies = Replies::new();
                state.table.forget(client, &mut replies);
                self.hand_out(&mut state, client, replies);
                return Err(Fault::timeout(NO_SUCH_KEY).hint(NO_SUCH_KEY_HINT));
            }
            state = match left {
                None => bell.wait(state).expect(NO_PANIC),
                Some(left) => bell.wait_timeout(state, left).expect(NO_PANIC).0,
            };
            #[cfg(test)]
            self.shared.woken.fetch_add(1, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::StoreExt;

    #[test]
    fn an_item_that_woke_a_thread_which_does_not_want_it_goes_to_the_next() {
        let store = HashStore::new();
        let parked = |count| {
            while store.waiters().len() < count {
                std::thread::yield_now();
            }
        };
        std::thread::scope(|scope| {
            // The older waiter only wants to know; the younger one wants the item.
            let curious = scope.spawn(|| {
                store.wait(&["q"])?;
                store.check(&["something else"])
            });
            parked(1);
            let popper = scope.spawn(|| store.queue_pop("q"));
            parked(2);
            store.queue_push("q", "item").unwrap();
            assert!(!curious.join().unwrap().unwrap());
            assert_eq!(popper.join().unwrap().unwrap(), b"item");
        });
    }

    #[test]
    fn a_write_wakes_only_the_threads_whose_wait_it_ends() {
        const THREADS: usize = 64;
        let store = HashStore::new();
        std::thread::scope(|scope| {
            let wait = |thread: usize| {
                let store = store.clone();
                scope.spawn(move || store.wait(&[format!("key {thread}")]))
            };
            let waiting: Vec<_> = (0..THREADS).map(wait).collect();
            while store.waiters().len() < THREADS {
                std::thread::yield_now();
            }
            // All of them sleep since they were registered.
            for (thread, waiting) in waiting.into_iter().enumerate() {
                store.set("another key", "").unwrap();
                store.set(format!("key {thread}"), "").unwrap();
                waiting.join().unwrap().unwrap();
            }
        });
        assert_eq!(store.shared.woken.load(Ordering::Relaxed), THREADS, "each of them once");
        let state = store.lock();
        assert!(state.sleepers.is_empty() && state.answers.is_empty());
        assert_eq!(state.table.waiters_count(), 0);
    }

    #[test]
    fn a_thread_that_times_out_leaves_no_bell() {
        let store = HashStore::new();
        let error = store.wait_for(&["never"], Duration::from_millis(1)).unwrap_err();
        assert!(error.is_timeout(), "{error}");
        assert!(store.lock().sleepers.is_empty());
    }
}
