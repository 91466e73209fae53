//! Threads that run handlers, for servers whose handlers may take long: the loop continues meanwhile.
//!
//! A thread is started when a request arrives and none is free, up to a limit, and ends after it was idle for
//! a while: an idle server has no thread besides the loop. Beyond the limit, requests wait in a queue, which
//! has its own limit. A thread that hangs in a handler is not available until the handler returns, which
//! cannot be forced. When the handler's time limit passes, the loop answers instead.

#![expect(clippy::disallowed_methods, reason = "owns the threads that run handlers")]

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use mio::Waker;

use crate::request::Request;
use crate::response::Response;

/// How long an idle thread waits for a request before it ends.
const IDLE_MAX: Duration = Duration::from_secs(5);

pub(super) type SharedHandler = Box<dyn Fn(&Request) -> Response + Send + Sync>;

/// Which request of which connection: a connection's slot may have been reused meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ticket {
    pub(super) slot: usize,
    pub(super) number: u64,
}

/// Dropping it lets threads end after their current request; it does not wait for them.
pub(super) struct Workers {
    shared: Arc<Shared>,
}

struct Shared {
    handler: SharedHandler,
    waker: Arc<Waker>,
    threads_max: usize,
    queue_max: usize,
    state: Mutex<State>,
    arrived: Condvar,
}

#[derive(Default)]
struct State {
    queue: VecDeque<(Ticket, Request)>,
    /// Answers that the loop has not taken yet; nothing for a handler that panicked.
    done: Vec<(Ticket, Option<Response>)>,
    threads: usize,
    free: usize,
    closed: bool,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Workers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Workers").field("threads_max", &self.shared.threads_max).finish_non_exhaustive()
    }
}

impl Workers {
    pub(super) fn new(
        handler: SharedHandler,
        waker: Arc<Waker>,
        threads_max: usize,
        queue_max: usize,
    ) -> Self {
        let (state, arrived) = Default::default();
        Workers { shared: Arc::new(Shared { handler, waker, threads_max, queue_max, state, arrived }) }
    }

    /// Hands over a request; false if the queue is full or no thread can be started.
    pub(super) fn submit(&self, ticket: Ticket, request: Request) -> bool {
        let mut state = self.shared.state();
        if state.queue.len() >= self.shared.queue_max {
            return false;
        }
        if state.free <= state.queue.len() && state.threads < self.shared.threads_max {
            match self.start_thread() {
                Ok(()) => state.threads += 1,
                Err(error) => {
                    tracing::warn!(%error, "no further thread to run a handler");
                    if state.threads == 0 {
                        return false;
                    }
                }
            }
        }
        state.queue.push_back((ticket, request));
        self.shared.arrived.notify_one();
        true
    }

    /// The answers since the last call.
    pub(super) fn take_done(&self) -> Vec<(Ticket, Option<Response>)> {
        std::mem::take(&mut self.shared.state().done)
    }

    fn start_thread(&self) -> io::Result<()> {
        let shared = Arc::clone(&self.shared);
        std::thread::Builder::new().name("tenfold-handler".into()).spawn(move || shared.run()).map(drop)
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        let mut state = self.shared.state();
        state.closed = true;
        state.queue.clear();
        self.shared.arrived.notify_all();
    }
}

impl Shared {
    fn run(&self) {
        while let Some((ticket, request)) = self.next() {
            // The handler may be called again after a panic: what it changes is behind its own locks.
            let answer = catch_unwind(AssertUnwindSafe(|| (self.handler)(&request))).ok();
            self.state().done.push((ticket, answer));
            if let Err(error) = self.waker.wake() {
                tracing::warn!(%error, "an answer waits for the next event");
            }
        }
    }

    /// The next request; nothing when this thread is no longer needed.
    fn next(&self) -> Option<(Ticket, Request)> {
        let mut state = self.state();
        let mut waited_in_vain = false;
        loop {
            if let Some(job) = state.queue.pop_front() {
                return Some(job);
            }
            if state.closed || waited_in_vain {
                state.threads -= 1;
                return None;
            }
            state.free += 1;
            let (woken, outcome) =
                self.arrived.wait_timeout(state, IDLE_MAX).unwrap_or_else(PoisonError::into_inner);
            state = woken;
            state.free -= 1;
            waited_in_vain = outcome.timed_out();
        }
    }
}
