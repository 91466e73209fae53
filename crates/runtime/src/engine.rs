//! Drives the operations of all groups of a rank. Whoever waits drives.
//!
//! All state is behind one lock. A thread that waits takes it, polls everything that is under way, and spins for a while;
//! then it says in the records what it waits for, looks once more, lets go of the lock and sleeps. Other threads may do
//! the same at the same time; the one that is woken polls for all of them. The helper thread (see `fabric::watch`) takes part
//! while work is under way that nobody waits for.
//!
//! Only here a fault becomes an error, because only here operation, group, rank and time are known.

#![expect(clippy::disallowed_methods, reason = "reads the clock before it sleeps")]

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use tenfold_memory::Doing;
use tenfold_store::Deadline;

use crate::fabric::{Fabric, GroupProgress};
use crate::fault::Fault;
use crate::group::state::{Finish, GroupState, Job};
use crate::patience::{Next, Patience};
use crate::recorder::{Stalls, Ticket};
use crate::run::Run;
use crate::transport::Socket;
use crate::work::{Shared, earlier};

/// How often the helper looks for news, and offers its core to others, before it sleeps.
const HELPER_LOOKS: u32 = 64;

/// A sleeper looks around at least this often: first for what went wrong at once, then for the rest.
const LOOK_EARLY: Duration = Duration::from_millis(20);
const LOOK_LATE: Duration = Duration::from_millis(200);

#[derive(Debug)]
pub(crate) struct Engine {
    state: Mutex<State>,
    /// Threads that want the lock: whoever spins with it lets them in.
    crowd: AtomicUsize,
    /// Threads in `wait`.
    waiters: AtomicUsize,
}

#[derive(Debug)]
pub(crate) struct State {
    groups: Vec<Option<Box<GroupState>>>,
    patience: Patience,
    /// Finished works that somebody wants to hear of, once the lock is free.
    to_tell: Vec<Arc<Shared>>,
}

/// How a caller goes on after a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Urgency {
    /// It is short, and likely to be over before the caller could do anything else.
    Quick,
    /// The caller waits, or comes back to it.
    Patient,
    /// The caller has other things to do: the helper thread sees to it.
    Background,
}

/// What became of a collective when it was called.
#[derive(Debug)]
pub(crate) enum Submitted {
    Over,
    Underway(Arc<Shared>),
}

/// Which group of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GroupIndex(usize);

impl State {
    /// Polls everything; true if anything moved.
    #[inline]
    fn poll(&mut self, fabric: &Arc<Fabric>) -> bool {
        let mut moved = false;
        for group in self.groups.iter_mut().flatten() {
            if group.is_busy() {
                moved |= group.poll(fabric, &mut self.to_tell);
            }
        }
        moved
    }

    fn is_busy(&self) -> bool {
        self.groups.iter().flatten().any(|group| group.is_busy())
    }

    /// Looks for what polling cannot see: time that is up, peers that are gone, calls that differ.
    fn check(&mut self, fabric: &Arc<Fabric>, now: Instant) -> bool {
        let mut moved = false;
        for group in self.groups.iter_mut().flatten() {
            if group.is_busy() {
                moved |= group.check(fabric, now, &mut self.to_tell);
            }
        }
        moved
    }

    /// Says everywhere that this rank sleeps; the sockets to sleep on, and until when at most.
    fn prepare_to_sleep(&mut self) -> (Vec<(Socket, bool)>, Option<Instant>) {
        let (mut sockets, mut until) = (Vec::new(), None);
        for group in self.groups.iter_mut().flatten() {
            if group.is_busy() {
                until = earlier(until, group.prepare_to_sleep(&mut sockets));
            }
        }
        (sockets, until)
    }

    fn wake_up(&mut self) {
        for group in self.groups.iter_mut().flatten() {
            group.wake_up();
        }
    }

    pub(crate) fn group(&mut self, index: GroupIndex) -> &mut GroupState {
        self.groups[index.0].as_deref_mut().expect("a group is in its engine until it is dropped")
    }
}

impl Engine {
    pub(crate) fn new() -> Self {
        Engine {
            state: Mutex::new(State { groups: Vec::new(), patience: Patience::new(), to_tell: Vec::new() }),
            crowd: AtomicUsize::new(0),
            waiters: AtomicUsize::new(0),
        }
    }

    #[inline]
    fn lock(&self) -> MutexGuard<'_, State> {
        match self.state.try_lock() {
            Ok(state) => state,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => {
                self.crowd.fetch_add(1, Ordering::Relaxed);
                let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
                self.crowd.fetch_sub(1, Ordering::Relaxed);
                state
            }
        }
    }

    /// Does something with the state, then tells those who wanted to hear of what finished.
    #[inline]
    pub(crate) fn with<R>(&self, action: impl FnOnce(&mut State) -> R) -> R {
        let mut state = self.lock();
        let result = action(&mut state);
        self.tell(state);
        result
    }

    /// Lets go of the lock, then runs callbacks.
    #[inline]
    fn tell(&self, mut state: MutexGuard<'_, State>) {
        if state.to_tell.is_empty() {
            return;
        }
        let finished = std::mem::take(&mut state.to_tell);
        drop(state);
        for work in finished {
            work.tell();
        }
    }

    pub(crate) fn add(&self, group: Box<GroupState>, crowded: bool) -> GroupIndex {
        self.with(|state| {
            if crowded {
                state.patience.set_crowded();
            }
            let free = state.groups.iter().position(Option::is_none);
            let index = free.unwrap_or_else(|| {
                state.groups.push(None);
                state.groups.len() - 1
            });
            state.groups[index] = Some(group);
            GroupIndex(index)
        })
    }

    pub(crate) fn remove(&self, index: GroupIndex) -> Option<Box<GroupState>> {
        self.with(|state| state.groups[index.0].take())
    }

    /// Starts an operation on a group and polls it once, so that what it has to say is said at once.
    #[inline]
    pub(crate) fn submit<R>(
        &self,
        fabric: &Arc<Fabric>,
        index: GroupIndex,
        detached: bool,
        start: impl FnOnce(&mut GroupState) -> R,
    ) -> R {
        let mut state = self.lock();
        let State { groups, to_tell, .. } = &mut *state;
        let group = groups[index.0].as_deref_mut().expect("a group is in its engine until it is dropped");
        let was_busy = group.is_busy();
        let result = start(group);
        if group.is_busy() {
            group.poll(fabric, to_tell);
        }
        // Somebody who starts a second operation before waiting for the first has other things to do.
        let attend = (detached || was_busy) && group.is_busy() && self.waiters.load(Ordering::Relaxed) == 0;
        let ring = group.is_busy() && self.waiters.load(Ordering::Relaxed) > 0;
        self.tell(state);
        if attend {
            self.attend(fabric);
        } else if ring {
            fabric.bell.ring(); // a sleeper does not know this operation's wants yet
        }
        result
    }

    /// Starts a collective, which `plan` has recorded. If it is over at once, there is nothing left to wait for; else `run` and
    /// `finish` go into the queue, with what `note` makes of it.
    #[inline]
    pub(crate) fn submit_run(
        &self,
        fabric: &Arc<Fabric>,
        index: GroupIndex,
        urgency: Urgency,
        (run, finish): (&mut Option<Run>, &mut Option<Finish>),
        plan: impl FnOnce(&mut GroupState, &mut Run) -> Ticket,
        note: impl FnOnce(&Run, Ticket) -> Arc<Shared>,
    ) -> Result<Submitted, Fault> {
        let mut state = self.lock();
        let State { groups, to_tell, patience } = &mut *state;
        let group = groups[index.0].as_deref_mut().expect("a group is in its engine until it is dropped");
        if let Some(fault) = group.failed() {
            return Err(fault.clone());
        }
        let Some(planned) = run else { return Ok(Submitted::Over) };
        let ticket = plan(group, planned);
        group.remember(planned.label(), ticket.called_at());
        let was_busy = group.is_busy() || group.is_doubtful();
        let turns = if was_busy || urgency != Urgency::Quick { 0 } else { patience.quick_turns() };
        if let Some(waited) = group.try_at_once(planned, turns, || self.crowd.load(Ordering::Relaxed) > 0) {
            group.record.completed(&ticket, waited);
            drop(state);
            if let Some(finish) = finish.take() {
                finish(std::mem::take(planned.buffers()));
            }
            return Ok(Submitted::Over);
        }
        let work = note(planned, ticket);
        let Some(run) = run.take() else { return Ok(Submitted::Over) };
        let stalls = Stalls::default();
        group.enqueue(Job { run, work: Arc::clone(&work), finish: finish.take(), stalls });
        group.poll(fabric, to_tell);
        let waiters = self.waiters.load(Ordering::Relaxed);
        let busy = group.is_busy();
        self.tell(state);
        if busy && waiters > 0 {
            fabric.bell.ring(); // a sleeper does not know this operation's wants yet
        } else if busy && (was_busy || urgency == Urgency::Background) {
            // Somebody who starts a second operation before waiting for the first has other things to do.
            fabric.call_helper_soon();
        }
        Ok(Submitted::Underway(work))
    }

    /// Has the helper thread drive while nobody waits.
    pub(crate) fn attend(&self, fabric: &Arc<Fabric>) {
        fabric.call_helper();
    }

    /// Polls once, for somebody who asks but does not wait.
    pub(crate) fn look(&self, fabric: &Arc<Fabric>) {
        self.with(|state| {
            state.poll(fabric);
            state.check(fabric, Instant::now());
        });
    }

    /// Drives until `work` is over; false if `until` came first.
    pub(crate) fn wait(&self, fabric: &Arc<Fabric>, work: &Shared, until: Option<Deadline>) -> bool {
        self.waiters.fetch_add(1, Ordering::AcqRel);
        let done = self.drive(fabric, until, || work.is_done());
        let others = self.waiters.fetch_sub(1, Ordering::AcqRel) - 1;
        if others > 0 {
            fabric.bell.ring(); // whoever sleeps must drive from here on
        } else if fabric.helper_is_called() && self.lock().is_busy() {
            fabric.wake_helper();
        }
        done
    }

    fn drive(&self, fabric: &Arc<Fabric>, until: Option<Deadline>, is_done: impl Fn() -> bool) -> bool {
        let mut state = self.lock();
        state.patience.restart();
        let mut early = 5;
        loop {
            if state.poll(fabric) {
                state.patience.restart();
            }
            if is_done() {
                self.tell(state);
                return true;
            }
            if !state.to_tell.is_empty() {
                self.tell(state);
                state = self.lock();
                continue;
            }
            match state.patience.next() {
                Next::Spin => {
                    std::hint::spin_loop();
                    if self.crowd.load(Ordering::Relaxed) > 0 {
                        drop(state);
                        std::thread::yield_now();
                        state = self.lock();
                    }
                }
                Next::Yield => {
                    drop(state);
                    std::thread::yield_now();
                    state = self.lock();
                }
                Next::Sleep => {
                    if until.is_some_and(|until| until.passed()) {
                        self.tell(state);
                        return false;
                    }
                    let look = if early > 0 { LOOK_EARLY } else { LOOK_LATE };
                    early -= i32::from(early > 0);
                    let limit = until.and_then(|until| until.left()).map_or(look, |left| left.min(look));
                    let before = Instant::now();
                    state = self.sleep(state, fabric, None, limit);
                    state.patience.slept(before.elapsed());
                }
            }
        }
    }

    /// Sleeps until something may have happened: with the lock before and after, without it meanwhile.
    fn sleep<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        fabric: &Arc<Fabric>,
        also: Option<BorrowedFd<'_>>,
        limit: Duration,
    ) -> MutexGuard<'a, State> {
        let now = Instant::now();
        if state.check(fabric, now) {
            return state;
        }
        let (sockets, until) = state.prepare_to_sleep();
        // Whatever came before the peers could see that we sleep is seen now.
        if state.poll(fabric) || !state.to_tell.is_empty() {
            state.wake_up();
            return state;
        }
        drop(state);
        let limit = until.map_or(limit, |until| limit.min(until.saturating_duration_since(now)));
        sleep_on(fabric, &sockets, also, limit);
        fabric.bell.silence();
        let mut state = self.lock();
        state.wake_up();
        state
    }

    /// The helper's turn: drives while there is work that nobody waits for, until the control plane needs it.
    pub(crate) fn helper_turn(&self, fabric: &Arc<Fabric>, control: BorrowedFd<'_>, limit: Duration) {
        let mut state = self.lock();
        if !state.is_busy() {
            fabric.dismiss_helper();
            self.tell(state);
            return;
        }
        let somebody_waits = || self.waiters.load(Ordering::Acquire) > 0;
        if somebody_waits() {
            drop(state);
            sleep_on_control(control, limit.min(LOOK_LATE));
            return;
        }
        // A core that others need is theirs after each look; one that nobody needs is not worth a sleep.
        let mut looks = HELPER_LOOKS;
        while looks > 0 && !somebody_waits() {
            looks = if state.poll(fabric) { HELPER_LOOKS } else { looks - 1 };
            if !state.to_tell.is_empty() || !state.is_busy() {
                return self.tell(state);
            }
            drop(state);
            std::thread::yield_now();
            state = self.lock();
        }
        if state.is_busy() && !somebody_waits() {
            state = self.sleep(state, fabric, Some(control), limit);
            state.poll(fabric);
        }
        self.tell(state);
    }

    pub(crate) fn abort_group_of(&self, fabric: &Arc<Fabric>, work: &Shared, reason: &str) {
        self.with(|state| {
            let State { groups, to_tell, .. } = state;
            for group in groups.iter_mut().flatten().filter(|group| group.has(work)) {
                group.abort(fabric, reason, to_tell);
            }
        });
        fabric.bell.ring();
    }

    /// Fails a group with `fault` and tells its other members.
    pub(crate) fn fail(&self, fabric: &Arc<Fabric>, index: GroupIndex, fault: Fault) {
        self.with(|state| {
            let State { groups, to_tell, .. } = state;
            if let Some(group) = groups[index.0].as_deref_mut() {
                group.fail(fabric, fault, to_tell);
            }
        });
        fabric.bell.ring();
    }

    /// A member of group `id` said something. False if there is no such group (yet).
    pub(crate) fn hear(&self, fabric: &Arc<Fabric>, id: u64, text: &[u8]) -> bool {
        let heard = self.with(|state| {
            let State { groups, to_tell, .. } = state;
            let group = groups.iter_mut().flatten().find(|group| group.id() == id);
            let group = group?;
            group.hear(fabric, text, to_tell);
            Some((group.is_busy(), group.take_warnings()))
        });
        fabric.bell.ring();
        let Some((is_busy, warnings)) = heard else { return false };
        warn(&warnings);
        if is_busy && self.waiters.load(Ordering::Relaxed) == 0 {
            self.attend(fabric); // what it heard may ask for a verdict, and nobody here waits for anything
        }
        true
    }

    /// Looks in every group who is late, and who keeps this rank waiting for too long.
    pub(crate) fn look_at_others(&self, fabric: &Arc<Fabric>) {
        let warnings = self.with(|state| {
            let State { groups, to_tell, .. } = state;
            let mut warnings = Vec::new();
            for group in groups.iter_mut().flatten() {
                group.look_at_others(fabric, to_tell);
                warnings.append(&mut group.take_warnings());
            }
            warnings
        });
        if !warnings.is_empty() {
            fabric.bell.ring(); // a group may have failed
        }
        warn(&warnings);
    }

    /// For every group: its id and what this rank does in it.
    pub(crate) fn doing(&self) -> Vec<(u64, Doing)> {
        self.with(|state| state.groups.iter().flatten().map(|group| (group.id(), *group.doing())).collect())
    }

    /// How far this rank is, in every group.
    pub(crate) fn progress(&self) -> Vec<GroupProgress> {
        self.with(|state| state.groups.iter().flatten().map(|group| group.progress()).collect())
    }

    /// What a peer should know that we have just met: of which group, and what.
    pub(crate) fn notices(&self) -> Vec<(u64, Vec<u8>)> {
        let of = |group: &GroupState| {
            group.notices().into_iter().map(|text| (group.id(), text)).collect::<Vec<_>>()
        };
        self.with(|state| state.groups.iter().flatten().flat_map(|group| of(group)).collect())
    }

    /// What waits for the peer `id`, for a warning that it is silent: its rank, the group, the operation.
    pub(crate) fn waiting_for(&self, id: crate::wire::FabricId) -> Option<String> {
        self.with(|state| state.groups.iter().flatten().find_map(|group| group.waiting_for(id)))
    }
}

/// Without the lock, since nobody knows what a subscriber does.
fn warn(warnings: &[String]) {
    for warning in warnings {
        tracing::warn!("{warning}");
    }
}

/// Sleeps on the bell and `sockets` (each with whether it is to be written).
fn sleep_on(fabric: &Arc<Fabric>, sockets: &[(Socket, bool)], also: Option<BorrowedFd<'_>>, limit: Duration) {
    let mut polled = Vec::with_capacity(2 + sockets.len());
    polled.push(PollFd::from_borrowed_fd(fabric.bell.as_fd(), PollFlags::IN));
    if let Some(also) = also {
        polled.push(PollFd::from_borrowed_fd(also, PollFlags::IN));
    }
    for (socket, write) in sockets {
        let flags = if *write { PollFlags::OUT } else { PollFlags::IN };
        polled.push(PollFd::from_borrowed_fd(socket.as_fd(), flags));
    }
    let _ = rustix::event::poll(&mut polled, Some(&timespec(limit))); // a signal is as good as news
}

fn sleep_on_control(control: BorrowedFd<'_>, limit: Duration) {
    let mut polled = [PollFd::from_borrowed_fd(control, PollFlags::IN)];
    let _ = rustix::event::poll(&mut polled, Some(&timespec(limit)));
}

fn timespec(limit: Duration) -> Timespec {
    Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: i64::from(limit.subsec_nanos()) }
}
