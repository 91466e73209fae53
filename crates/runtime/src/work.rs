//! The caller's handle on an operation.

#![expect(clippy::disallowed_methods, reason = "owns the thread for callbacks")]

use std::cell::RefCell;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use tenfold_plan::Rank;
use tenfold_store::Deadline;

use crate::fabric::FabricHandle;
use crate::fault::{Error, Fault, FaultKind, Result, Scene, show_duration};
use crate::label::{Label, OpKind};

type Callback = Box<dyn FnOnce(&Result<()>) + Send>;

/// An operation under way.
///
/// Its tensors are lent until it is done. It goes on while anybody in this process waits for anything of the same group
/// family, and by itself if the call asked for that (see [`Group::background`](crate::Group::background)); dropping
/// the handle neither ends it nor waits for it. A `Work` is also a [`Future`].
#[must_use = "the tensors are lent until `wait` returns"]
#[derive(Clone)]
pub struct Work {
    shared: Arc<Shared>,
    /// Nothing where there is nobody to wait for: a fake group, or several works joined.
    fabric: Option<FabricHandle>,
    parts: Option<Arc<[Work]>>,
}

const PENDING: u8 = 0;
const DONE: u8 = 1;

/// What the engine and the caller both know of an operation.
pub(crate) struct Shared {
    state: AtomicU8,
    outcome: OnceLock<Result<()>>,
    label: Label,
    algorithm: &'static str,
    deadline: Deadline,
    group: Arc<str>,
    rank: Rank,
    size: usize,
    source: AtomicU64,
    duration_ns: AtomicU64,
    after: Mutex<After>,
}

#[derive(Default)]
struct After {
    callbacks: Vec<Callback>,
    wakers: Vec<Waker>,
}

/// No source known.
const NOBODY: u64 = u64::MAX;

impl Shared {
    pub(crate) fn new(
        label: Label,
        algorithm: &'static str,
        deadline: Deadline,
        group: &Arc<str>,
        rank: Rank,
        size: usize,
    ) -> Arc<Self> {
        Arc::new(Shared {
            state: AtomicU8::new(PENDING),
            outcome: OnceLock::new(),
            label,
            algorithm,
            deadline,
            group: Arc::clone(group),
            rank,
            size,
            source: AtomicU64::new(NOBODY),
            duration_ns: AtomicU64::new(0),
            after: Mutex::default(),
        })
    }

    #[inline]
    pub(crate) fn is_done(&self) -> bool {
        self.state.load(Ordering::Acquire) == DONE
    }

    pub(crate) fn label(&self) -> &Label {
        &self.label
    }

    pub(crate) fn deadline(&self) -> &Deadline {
        &self.deadline
    }

    pub(crate) fn set_source(&self, source: Rank) {
        self.source.store(source as u64, Ordering::Relaxed);
    }

    /// The operation is over. True if somebody wants to hear of it: then [`Shared::tell`] must follow, outside any lock.
    pub(crate) fn finish(&self, outcome: Result<()>) -> bool {
        let after = self.after();
        let watched = !after.callbacks.is_empty() || !after.wakers.is_empty();
        if watched || outcome.is_err() {
            self.duration_ns.store(self.deadline.elapsed().as_nanos() as u64, Ordering::Relaxed);
        }
        if self.outcome.set(outcome).is_ok() {
            self.state.store(DONE, Ordering::Release);
        }
        watched
    }

    /// Runs what was to happen afterwards; elsewhere if this thread has other duties.
    pub(crate) fn tell(self: Arc<Self>) {
        let here = ELSEWHERE.with_borrow_mut(|elsewhere| match elsewhere {
            Some(elsewhere) => {
                elsewhere.tell(Arc::clone(&self));
                false
            }
            None => true,
        });
        if here {
            self.tell_here();
        }
    }

    fn tell_here(&self) {
        let after = std::mem::take(&mut *self.after());
        let outcome = self.outcome.get().expect("it is over");
        for waker in after.wakers {
            waker.wake();
        }
        for callback in after.callbacks {
            callback(outcome);
        }
    }

    /// Where it is, for an error.
    pub(crate) fn scene(&self, progress: Option<String>) -> Scene {
        let by = if self.algorithm.is_empty() { String::new() } else { format!(" by `{}`", self.algorithm) };
        Scene {
            label: self.label,
            group: Arc::clone(&self.group),
            rank: self.rank,
            size: self.size,
            elapsed: self.deadline.elapsed(),
            timeout: self.deadline.limit(),
            progress: progress.map(|progress| format!("{by}, {progress}")),
        }
    }

    fn after(&self) -> MutexGuard<'_, After> {
        self.after.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} #{}", self.label, self.label.seq)
    }
}

impl Work {
    pub(crate) fn new(shared: Arc<Shared>, fabric: Option<FabricHandle>) -> Self {
        Work { shared, fabric, parts: None }
    }

    /// One handle on several operations: done when all are, failed with the first that failed.
    pub(crate) fn join(shared: Arc<Shared>, parts: Vec<Work>) -> Self {
        Work { shared, fabric: None, parts: Some(parts.into()) }
    }

    fn parts(&self) -> &[Work] {
        self.parts.as_deref().unwrap_or_default()
    }

    /// Is it over, well or not? Looks after the operation a little if nobody else does.
    pub fn is_done(&self) -> bool {
        if !self.parts().is_empty() {
            return self.parts().iter().all(Work::is_done);
        }
        if !self.shared.is_done()
            && let Some(fabric) = &self.fabric
        {
            fabric.engine.look(fabric);
        }
        self.shared.is_done()
    }

    /// Waits until it is over, however long that is allowed to take by the call's timeout.
    ///
    /// # Errors
    /// What made the operation fail.
    #[inline]
    pub fn wait(&self) -> Result<()> {
        self.wait_until(None)
    }

    /// Waits at most `limit`. If that is not enough the operation goes on, and can be waited for again.
    ///
    /// # Errors
    /// What made the operation fail, or a timeout.
    pub fn wait_for(&self, limit: Duration) -> Result<()> {
        self.wait_until(Some(Deadline::after(limit)))
    }

    fn wait_until(&self, until: Option<Deadline>) -> Result<()> {
        for part in self.parts().iter() {
            part.wait_until(until)?;
        }
        if !self.parts().is_empty() {
            return Ok(());
        }
        if !self.shared.is_done()
            && let Some(fabric) = &self.fabric
        {
            fabric.check_process().map_err(|fault| Error::new(self.shared.scene(None), fault))?;
            if !fabric.engine.wait(fabric, &self.shared, until) {
                return Err(self.not_yet(until));
            }
        }
        match self.shared.outcome.get() {
            Some(outcome) => outcome.clone(),
            None => Ok(()),
        }
    }

    #[cold]
    fn not_yet(&self, until: Option<Deadline>) -> Error {
        let limit = until.and_then(|until| until.limit()).unwrap_or_default();
        let message = format!("not done after a wait of {}", show_duration(limit));
        let fault = Fault::new(FaultKind::Timeout, message).hint("it goes on; wait for it again");
        Error::new(self.shared.scene(None), fault)
    }

    /// What made it fail, if it did.
    pub fn exception(&self) -> Option<Error> {
        let failed = |work: &Work| work.shared.outcome.get().and_then(|outcome| outcome.clone().err());
        self.parts().iter().find_map(failed).or_else(|| failed(self))
    }

    /// Did it end well?
    pub fn is_success(&self) -> bool {
        self.is_done() && self.exception().is_none()
    }

    /// Calls `callback` when it is over; at once if it is. The callback may start other operations and wait for them.
    pub fn on_done(&self, callback: impl FnOnce(&Result<()>) + Send + 'static) {
        self.call_when_done(Box::new(callback));
    }

    fn call_when_done(&self, callback: Callback) {
        if !self.parts().is_empty() {
            return self.call_when_all_done(callback);
        }
        let mut after = self.shared.after();
        if self.shared.is_done() {
            drop(after);
            callback(self.shared.outcome.get().expect("it is over"));
            return;
        }
        after.callbacks.push(callback);
        drop(after);
        self.attend();
    }

    fn call_when_all_done(&self, callback: Callback) {
        let left = Arc::new(Mutex::new((self.parts().len(), Some(callback), Ok(()))));
        for part in self.parts().iter() {
            let left = Arc::clone(&left);
            part.call_when_done(Box::new(move |outcome| {
                let mut left = left.lock().unwrap_or_else(PoisonError::into_inner);
                left.0 -= 1;
                if left.2.is_ok() {
                    left.2 = outcome.clone();
                }
                if left.0 == 0
                    && let Some(callback) = left.1.take()
                {
                    let outcome = left.2.clone();
                    drop(left);
                    callback(&outcome);
                }
            }));
        }
    }

    /// Has the helper thread see to it while nobody waits.
    pub(crate) fn attend(&self) {
        if let Some(fabric) = &self.fabric {
            fabric.engine.attend(fabric);
        }
    }

    /// The rank that a receive from any source received from.
    pub fn source(&self) -> Option<Rank> {
        match self.shared.source.load(Ordering::Relaxed) {
            NOBODY => None,
            rank => Some(rank as Rank),
        }
    }

    /// From the call to the end, once it is over and somebody watched it or it failed; else until now.
    pub fn duration(&self) -> Duration {
        match self.shared.duration_ns.load(Ordering::Relaxed) {
            0 => self.shared.deadline.elapsed(),
            nanoseconds => Duration::from_nanos(nanoseconds),
        }
    }

    /// Which operation of its group it is, counted from 1.
    pub fn sequence_number(&self) -> u64 {
        self.shared.label.seq
    }

    pub fn op_type(&self) -> OpKind {
        self.shared.label.kind
    }

    /// The algorithm that was chosen for it; empty for point-to-point.
    pub fn algorithm(&self) -> &'static str {
        self.shared.algorithm
    }

    /// How long it may take.
    pub fn timeout(&self) -> Option<Duration> {
        self.shared.deadline.limit()
    }

    /// Gives the operation up, and with it its group, on all ranks: a collective cannot end for one alone.
    pub fn abort(&self, reason: &str) {
        for part in self.parts().iter() {
            part.abort(reason);
        }
        if let Some(fabric) = &self.fabric {
            fabric.engine.abort_group_of(fabric, &self.shared, reason);
        }
    }
}

impl Future for Work {
    type Output = Result<()>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        let pending = self.parts().iter().find(|part| !part.shared.is_done()).unwrap_or(&self);
        if !pending.shared.is_done() && pending.fabric.is_some() {
            let mut after = pending.shared.after();
            if !pending.shared.is_done() {
                after.wakers.push(context.waker().clone());
                drop(after);
                pending.attend();
                return Poll::Pending;
            }
        }
        Poll::Ready(self.exception().map_or(Ok(()), Err))
    }
}

impl fmt::Debug for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Work({:?}, {})", self.shared, if self.shared.is_done() { "done" } else { "under way" })
    }
}

/// The earlier of two points in time.
pub(crate) fn earlier(a: Option<Instant>, b: Option<Instant>) -> Option<Instant> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}

thread_local! {
    /// Of a thread with other duties: the thread that runs its callbacks.
    static ELSEWHERE: RefCell<Option<Elsewhere>> = const { RefCell::new(None) };
}

/// A callback may wait for other operations, for which a helper thread must be free: on those it runs elsewhere.
pub(crate) fn callbacks_go_elsewhere() {
    ELSEWHERE.set(Some(Elsewhere::default()));
}

/// The thread for callbacks of operations that one helper thread finished, started by the first of them and ended with the
/// helper. Ranks that are threads of one process have one each: a callback may wait for that of another rank.
#[derive(Default)]
struct Elsewhere {
    sender: Option<Sender<Arc<Shared>>>,
}

impl Elsewhere {
    fn tell(&mut self, work: Arc<Shared>) {
        let sender = self.sender.get_or_insert_with(|| {
            let (sender, receiver) = std::sync::mpsc::channel::<Arc<Shared>>();
            let run = move || receiver.iter().for_each(|work| work.tell_here());
            let started = std::thread::Builder::new().name("tenfold-callbacks".to_string()).spawn(run);
            if let Err(error) = started {
                tracing::error!("cannot start the thread for callbacks: {error}");
            }
            sender
        });
        let _ = sender.send(work); // received for as long as there is a sender
    }
}
