//! The caller's handle on an operation.

#![expect(clippy::disallowed_methods, reason = "owns the thread for callbacks")]

use std::cell::RefCell;
use std::fmt;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use tenfold_plan::Rank;
use tenfold_store::Deadline;
use tracing::Span;

use crate::fabric::{FabricHandle, When};
use crate::fault::{Error, ErrorKind, Fault, Result, Scene, panic_text, show_duration};
use crate::group::trouble::detail::Detail;
use crate::label::{Label, OpKind};
use crate::recorder::{GroupRecord, Ticket, Waited};

type Callback = Box<dyn FnOnce(&Result<()>) + Send>;

/// An operation under way.
///
/// Its tensors are lent until it is done. It goes on by itself; the thread that waits for it only has it sooner. A call in
/// the background (see [`Group::background`](crate::Group::background)) is looked after immediately, any other within a few
/// milliseconds. Dropping the handle neither ends the operation nor waits for it.
///
/// # Threads
/// Any thread may wait for a work, and several may wait for the same one. A forked child cannot: it gets an error.
///
/// # As a future
/// A `Work` is a [`Future`]. It is cancel-safe: if it is dropped before it is ready, as in a `select`, the operation goes on
/// and another clone can be awaited. Any executor will do; tenfold's threads wake the task.
///
/// ```
/// use tenfold::{Buffer, Group, ReduceOp};
///
/// Group::threads(2, |group| {
///     let mut buffer = Buffer::from_slice(&[1.0_f32; 1000]);
///     let work = group.background().start_all_reduce(buffer.lend(), ReduceOp::Sum)?;
///     // compute something else here
///     work.wait()?;
///     assert!(work.succeeded());
///     assert_eq!(buffer.as_slice::<f32>()[999], 2.0);
///     Ok(())
/// })?;
/// # Ok::<(), tenfold::Error>(())
/// ```
#[must_use = "the tensors are lent until `wait` returns"]
#[derive(Clone)]
pub struct Work(Kind);

#[derive(Clone)]
enum Kind {
    /// It was over before the call returned.
    Done {
        label: Label,
        algorithm: &'static str,
    },
    Single {
        shared: Arc<Shared>,
        fabric: FabricHandle,
    },
    /// Done when all are, failed with the first that failed.
    Joined {
        label: Label,
        parts: Arc<[Work]>,
    },
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
    record: Mutex<Recorded>,
    after: Mutex<After>,
}

/// Its place in the flight recorder.
#[derive(Clone, Debug)]
pub(crate) struct Recorded {
    pub group: Arc<GroupRecord>,
    pub ticket: Ticket,
    /// At debug level DETAIL: what to tell of the call in an error.
    pub detail: Option<Arc<Detail>>,
}

/// Where spans and events of operations are found.
pub(crate) const OPERATIONS: &str = "tenfold::operation";

#[derive(Default)]
struct After {
    /// For a subscriber that follows operations.
    span: Option<Span>,
    callbacks: Vec<Callback>,
    /// Callbacks that take no time.
    notices: Vec<Callback>,
    wakers: Vec<Waker>,
}

impl After {
    fn callbacks(&mut self) -> &mut Vec<Callback> {
        &mut self.callbacks
    }

    fn notices(&mut self) -> &mut Vec<Callback> {
        &mut self.notices
    }

    fn is_empty(&self) -> bool {
        self.callbacks.is_empty() && self.notices.is_empty() && self.wakers.is_empty() && self.span.is_none()
    }
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
        record: Recorded,
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
            record: Mutex::new(record),
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

    /// A message has found its partner.
    pub(crate) fn begin(&self) {
        let Recorded { group, ticket, .. } = &mut *self.record();
        group.started(ticket);
    }

    /// The collective before this one has just ended.
    pub(crate) fn begin_next(&self) {
        let Recorded { group, ticket, .. } = &mut *self.record();
        group.started_next(ticket);
    }

    fn record(&self) -> MutexGuard<'_, Recorded> {
        self.record.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The operation is over and has waited for some time. True if it has callbacks: then [`Shared::tell`] must follow, without
    /// any lock.
    pub(crate) fn finish(&self, outcome: Result<()>, waited: Waited) -> bool {
        {
            let Recorded { group, ticket, .. } = &*self.record();
            if outcome.is_ok() { group.completed(ticket, waited) } else { group.failed(ticket) }
        }
        let after = self.after();
        let watched = !after.is_empty();
        self.duration_ns.store(self.deadline.elapsed().as_nanos() as u64, Ordering::Relaxed);
        if self.outcome.set(outcome).is_ok() {
            self.state.store(DONE, Ordering::Release);
        }
        watched
    }

    /// Runs what was to happen afterwards; elsewhere if this thread has other duties.
    pub(crate) fn tell(self: Arc<Self>) {
        let (notices, span) = {
            let mut after = self.after();
            (std::mem::take(&mut after.notices), after.span.take())
        };
        if let Some(span) = span {
            self.close_span(&span);
        }
        let outcome = self.outcome.get().expect("it is over");
        notices.into_iter().for_each(|notice| self.call(notice, outcome));
        if self.after().is_empty() {
            return;
        }
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
            self.guard("waker", || waker.wake());
        }
        for callback in after.callbacks {
            self.call(callback, outcome);
        }
    }

    fn call(&self, callback: Callback, outcome: &Result<()>) {
        self.guard("callback", || callback(outcome));
    }

    /// A panic ends neither the thread, on which other operations depend, nor the callbacks behind it.
    fn guard(&self, what: &str, run: impl FnOnce()) {
        if let Err(panic) = std::panic::catch_unwind(AssertUnwindSafe(run)) {
            let text = panic_text(&*panic);
            tracing::error!("a {what} of {self:?} in group `{}` panicked: {text}", self.group);
        }
    }

    /// Keeps a span open until it is over.
    pub(crate) fn trace(&self, span: Span) {
        if span.is_disabled() {
            return;
        }
        span.record("seq", self.label.seq);
        let mut after = self.after();
        if self.is_done() {
            drop(after);
            self.close_span(&span);
        } else {
            after.span = Some(span);
        }
    }

    fn close_span(&self, span: &Span) {
        let seconds = Duration::from_nanos(self.duration_ns.load(Ordering::Relaxed)).as_secs_f64();
        match self.outcome.get() {
            Some(Err(error)) => tracing::debug!(target: OPERATIONS, parent: span, seconds, %error, "failed"),
            _ => tracing::debug!(target: OPERATIONS, parent: span, seconds, "done"),
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
            detail: self.record().detail.as_ref().map(|detail| detail.to_string()),
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
    pub(crate) fn new(shared: Arc<Shared>, fabric: FabricHandle) -> Self {
        Work(Kind::Single { shared, fabric })
    }

    pub(crate) fn done(label: Label, algorithm: &'static str) -> Self {
        Work(Kind::Done { label, algorithm })
    }

    /// One handle on several operations.
    pub(crate) fn join(label: Label, parts: Vec<Work>) -> Self {
        Work(Kind::Joined { label, parts: parts.into() })
    }

    /// Is it over, with or without an error? Polls the operation if no other thread does.
    pub fn is_done(&self) -> bool {
        match &self.0 {
            Kind::Done { .. } => true,
            Kind::Joined { parts, .. } => parts.iter().all(Work::is_done),
            Kind::Single { shared, fabric } => {
                if !shared.is_done() {
                    fabric.engine.look(fabric);
                }
                shared.is_done()
            }
        }
    }

    /// Waits until it is over, however long that is allowed to take by the call's timeout.
    ///
    /// # Errors
    /// What made the operation fail.
    #[inline]
    pub fn wait(&self) -> Result<()> {
        if let Kind::Done { .. } = self.0 { Ok(()) } else { self.wait_until(None) }
    }

    /// Waits at most `limit`. If that is not enough the operation goes on, and can be waited for again.
    ///
    /// # Errors
    /// What made the operation fail, or a timeout.
    pub fn wait_for(&self, limit: Duration) -> Result<()> {
        self.wait_by(Deadline::after(limit))
    }

    /// As [`Work::wait_for`], until a point in time that several waits may share.
    ///
    /// # Errors
    /// See there.
    pub fn wait_by(&self, until: Deadline) -> Result<()> {
        self.wait_until(Some(until))
    }

    fn wait_until(&self, until: Option<Deadline>) -> Result<()> {
        match &self.0 {
            Kind::Done { .. } => Ok(()),
            Kind::Joined { parts, .. } => parts.iter().try_for_each(|part| part.wait_until(until)),
            Kind::Single { shared, fabric } => {
                if !shared.is_done() {
                    fabric.check_process().map_err(|fault| Error::new(shared.scene(None), fault))?;
                    if !fabric.engine.wait(fabric, shared, until) {
                        return Err(not_yet(shared, until));
                    }
                    if shared.outcome.get().is_some_and(Result::is_err) {
                        fabric.wait_until_told(); // a process that ends because of this has told the others why
                    }
                }
                shared.outcome.get().cloned().unwrap_or(Ok(()))
            }
        }
    }

    /// How it ended; nothing while it is under way. The tensors are the caller's again by then.
    pub fn result(&self) -> Option<Result<()>> {
        self.is_done().then(|| self.error().map_or(Ok(()), Err))
    }

    /// What made it fail, if it did.
    pub fn error(&self) -> Option<Error> {
        match &self.0 {
            Kind::Done { .. } => None,
            Kind::Joined { parts, .. } => parts.iter().find_map(Work::error),
            Kind::Single { shared, .. } => shared.outcome.get()?.clone().err(),
        }
    }

    /// Is it done, without an error?
    pub fn succeeded(&self) -> bool {
        self.is_done() && self.error().is_none()
    }

    /// Calls `callback` when it is over, or immediately if it is. The callback may start other operations and wait for them.
    pub fn on_done(&self, callback: impl FnOnce(&Result<()>) + Send + 'static) {
        self.call_when_done(Box::new(callback), After::callbacks);
    }

    /// As [`Work::on_done`], for a callback that takes no time and waits for nothing, such as one that wakes another thread: it
    /// may run on a thread on which other operations depend, and so comes earlier.
    pub fn notify(&self, callback: impl FnOnce(&Result<()>) + Send + 'static) {
        self.call_when_done(Box::new(callback), After::notices);
    }

    fn call_when_done(&self, callback: Callback, list: fn(&mut After) -> &mut Vec<Callback>) {
        match &self.0 {
            Kind::Done { .. } => callback(&Ok(())),
            Kind::Joined { parts, .. } => call_when_all_done(parts, callback, list),
            Kind::Single { shared, .. } => {
                let mut after = shared.after();
                if shared.is_done() {
                    drop(after);
                    callback(shared.outcome.get().expect("it is over"));
                    return;
                }
                list(&mut after).push(callback);
                drop(after);
                self.call_helper();
            }
        }
    }

    /// Has the helper thread make progress while no thread waits. A forked child has no helper.
    fn call_helper(&self) {
        if let Kind::Single { fabric, .. } = &self.0
            && fabric.check_process().is_ok()
        {
            fabric.call_helper(When::Now, false);
        }
    }

    /// The rank that a receive from any source received from.
    pub fn source(&self) -> Option<Rank> {
        let Kind::Single { shared, .. } = &self.0 else { return None };
        match shared.source.load(Ordering::Relaxed) {
            NOBODY => None,
            rank => Some(rank as Rank),
        }
    }

    /// From the call to the end, once it is over; nothing for what was over before the call returned.
    pub fn duration(&self) -> Option<Duration> {
        match &self.0 {
            Kind::Done { .. } => None,
            Kind::Joined { parts, .. } => parts.iter().filter_map(Work::duration).max(),
            Kind::Single { shared, .. } => match shared.duration_ns.load(Ordering::Relaxed) {
                0 => None,
                nanoseconds => Some(Duration::from_nanos(nanoseconds)),
            },
        }
    }

    fn label(&self) -> &Label {
        match &self.0 {
            Kind::Done { label, .. } | Kind::Joined { label, .. } => label,
            Kind::Single { shared, .. } => &shared.label,
        }
    }

    /// Which operation of its group it is, counted from 1.
    pub fn sequence_number(&self) -> u64 {
        self.label().seq
    }

    /// Which operation it is.
    pub fn kind(&self) -> OpKind {
        self.label().kind
    }

    /// The algorithm that was chosen for it; empty for point-to-point.
    pub fn algorithm(&self) -> &'static str {
        match &self.0 {
            Kind::Done { algorithm, .. } => algorithm,
            Kind::Joined { .. } => "",
            Kind::Single { shared, .. } => shared.algorithm,
        }
    }

    /// How long it may take; nothing if it was over before the call returned.
    pub fn timeout(&self) -> Option<Duration> {
        match &self.0 {
            Kind::Done { .. } => None,
            Kind::Joined { parts, .. } => parts.iter().filter_map(Work::timeout).max(),
            Kind::Single { shared, .. } => shared.deadline.limit(),
        }
    }

    /// Gives the operation up, and with it its group, on all ranks: a collective cannot end for one alone.
    pub fn abort(&self, reason: &str) {
        match &self.0 {
            Kind::Done { .. } => {}
            Kind::Joined { parts, .. } => parts.iter().for_each(|part| part.abort(reason)),
            Kind::Single { shared, fabric } => fabric.engine.abort_group_of(fabric, shared, reason),
        }
    }
}

#[cold]
fn not_yet(shared: &Shared, until: Option<Deadline>) -> Error {
    let limit = until.and_then(|until| until.limit()).unwrap_or_default();
    let message = format!("not done after a wait of {}", show_duration(limit));
    let fault = Fault::new(ErrorKind::Timeout, message).hint("it goes on; wait for it again");
    Error::new(shared.scene(None), fault)
}

fn call_when_all_done(parts: &[Work], callback: Callback, list: fn(&mut After) -> &mut Vec<Callback>) {
    let left = Arc::new(Mutex::new((parts.len(), Some(callback), Ok(()))));
    for part in parts {
        let left = Arc::clone(&left);
        let count_down = move |outcome: &Result<()>| {
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
        };
        part.call_when_done(Box::new(count_down), list);
    }
}

impl Future for Work {
    type Output = Result<()>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        let parts = match &self.0 {
            Kind::Joined { parts, .. } => parts,
            _ => std::slice::from_ref(&*self),
        };
        for part in parts {
            let Kind::Single { shared, .. } = &part.0 else { continue };
            let mut after = shared.after();
            if !shared.is_done() {
                if !after.wakers.iter().any(|waker| waker.will_wake(context.waker())) {
                    after.wakers.push(context.waker().clone());
                }
                drop(after);
                part.call_helper();
                return Poll::Pending;
            }
        }
        Poll::Ready(self.error().map_or(Ok(()), Err))
    }
}

impl fmt::Debug for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let label = self.label();
        let state = match &self.0 {
            Kind::Single { shared, .. } if !shared.is_done() => "under way",
            Kind::Joined { parts, .. } => return write!(f, "Work({parts:?})"),
            _ => "done",
        };
        write!(f, "Work({label} #{}, {state})", label.seq)
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
        if let Err(unsent) = sender.send(work) {
            // The thread could not be started. The next work tries again. The callbacks of this one run here.
            self.sender = None;
            unsent.0.tell_here();
        }
    }
}
