//! Drives the operations of all groups of a rank. The waiting thread makes progress for all pending operations.
//!
//! All state is behind one lock. A thread that waits takes it, polls all pending operations, and spins for a while. Then it
//! writes into the records what it waits for, polls once more, releases the lock and sleeps. Other threads may do the same at
//! the same time; `roster.rs` decides which of them watches for all, and which must be woken. While no thread waits, the helper
//! thread (see `fabric::watch`) makes progress: every call whose operation is still pending when it returns calls the helper,
//! immediately or a little later.
//!
//! Faults are reported from here to the groups, which turn them into errors: ARCHITECTURE.md lists the places.

#![expect(clippy::disallowed_methods, reason = "reads the clock before it sleeps")]

#[cfg(test)]
mod hand_over;
#[cfg(all(test, loom))]
mod model;
mod news;
mod roster;
mod waiting;

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use tenfold_store::Deadline;

use crate::fabric::{Bell, Fabric, When};
use crate::fault::Fault;
use crate::group::state::GroupState;
use crate::patience::{Next, Patience};
use crate::transport::Socket;
use crate::work::{Shared, earlier};
use roster::{Roster, Waiter, Wake};
use waiting::{Asleep, Waiting, sleep_on};

/// How often the helper looks for news, and offers its core to others, before it sleeps.
const HELPER_LOOKS: u32 = 64;

/// A sleeper checks for failures at least this often: more often in the beginning, when most mistakes show.
const LOOK_EARLY: Duration = Duration::from_millis(20);
const LOOK_LATE: Duration = Duration::from_millis(200);

/// How long a sleeper without a bell of its own sleeps: no descriptor was left for one.
const LOOK_BLIND: Duration = Duration::from_millis(1);

#[derive(Debug)]
pub(crate) struct Engine {
    state: Mutex<State>,
    /// Threads that wait for the lock. A thread that spins with the lock releases it for them.
    crowd: AtomicUsize,
    /// In tests: sleepers check for failures only if they are woken, so that a lost wake-up is detected.
    #[cfg(test)]
    looks_rarely: std::sync::atomic::AtomicBool,
    #[cfg(test)]
    interlude: hand_over::Interlude,
}

#[derive(Debug)]
pub(crate) struct State {
    groups: Vec<Option<Box<GroupState>>>,
    patience: Patience,
    /// Finished works that have callbacks, which run once the lock is free.
    to_tell: Vec<Arc<Shared>>,
    roster: Roster,
    /// The waiters that sleep.
    sleepers: Vec<Sleeper>,
    /// Bells of threads that do not sleep at the moment.
    spare: Vec<Bell>,
}

/// A thread that waits, and sleeps.
#[derive(Debug)]
struct Sleeper {
    waiter: Waiter,
    work: Arc<Shared>,
    /// Wakes this thread and no other. A bell that several threads sleep on would be silenced by the first that wakes up.
    bell: Option<Bell>,
    rung: bool,
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

impl Urgency {
    /// How often an operation is polled before it is put into the queue, of `quick` turns for a short one. What is called after
    /// others that are pending cannot be over before them.
    #[inline]
    fn turns(self, was_busy: bool, quick: u32) -> u32 {
        if was_busy || self != Urgency::Quick { 0 } else { quick }
    }

    /// When the helper looks at an operation that is pending when its call returns. A caller that starts a second operation
    /// before it waits for the first has other things to do.
    #[inline]
    fn helper_looks(self, was_busy: bool) -> When {
        if was_busy || self == Urgency::Background { When::Soon } else { When::Later }
    }
}

/// How often a short operation may be polled before its call returns.
pub(crate) struct Looks<'a> {
    pub turns: u32,
    crowd: &'a AtomicUsize,
}

impl Looks<'_> {
    /// Do other threads wait for the engine's lock?
    #[inline]
    pub(crate) fn give_way(&self) -> bool {
        self.crowd.load(Ordering::Relaxed) > 0
    }
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
        // What one group read from a line may be another's that was polled before it.
        moved |= fabric.news().take();
        if moved {
            self.roster.wants_changed();
        }
        moved
    }

    fn is_busy(&self) -> bool {
        self.groups.iter().flatten().any(|group| group.is_busy())
    }

    /// Looks for what polling cannot see: timeouts, lost peers and mismatches.
    fn check(&mut self, fabric: &Arc<Fabric>, now: Instant) -> bool {
        let mut moved = false;
        for group in self.groups.iter_mut().flatten() {
            if group.is_busy() {
                moved |= group.check(fabric, now, &mut self.to_tell);
            }
        }
        if moved {
            self.roster.wants_changed();
        }
        moved
    }

    /// Does a group have more ranks on this host than there are cores?
    fn look_for_crowd(&mut self) {
        let is_crowded = self.groups.iter().flatten().any(|group| group.is_crowded);
        self.patience.set_crowded(is_crowded);
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

    fn wake(&mut self, waiter: Waiter) {
        self.roster.woken(waiter);
        if let Some(sleeper) =
            self.sleepers.iter_mut().find(|sleeper| sleeper.waiter == waiter && !sleeper.rung)
        {
            sleeper.rung = true;
            if let Some(bell) = &sleeper.bell {
                bell.ring();
            }
        }
    }

    /// Wakes every sleeper whose operation is over, and a watching waiter that does not know the latest wants.
    #[inline]
    fn wake_sleepers(&mut self) {
        if !self.roster.has_sleepers() {
            return;
        }
        let over: Vec<Waiter> = self
            .sleepers
            .iter()
            .filter(|sleeper| sleeper.work.is_done())
            .map(|sleeper| sleeper.waiter)
            .collect();
        over.into_iter().for_each(|waiter| self.wake(waiter));
        if let Wake::Waiter(waiter) = self.roster.successor(self.is_busy()) {
            self.wake(waiter);
        }
    }

    /// Makes a bed for a thread that falls asleep; the bell that wakes it.
    fn lie_down(&mut self, waiter: Waiter, work: &Arc<Shared>) -> Option<Bell> {
        let bell = self.spare.pop().or_else(|| Bell::new().ok());
        self.sleepers.push(Sleeper { waiter, work: Arc::clone(work), bell: bell.clone(), rung: false });
        bell
    }

    fn get_up(&mut self, waiter: Waiter) {
        let Some(index) = self.sleepers.iter().position(|sleeper| sleeper.waiter == waiter) else { return };
        let Sleeper { bell, rung, .. } = self.sleepers.swap_remove(index);
        if let Some(bell) = bell {
            if rung {
                bell.silence();
            }
            self.spare.push(bell);
        }
    }

    pub(crate) fn group(&mut self, index: GroupIndex) -> &mut GroupState {
        self.groups[index.0].as_deref_mut().expect("a group is in its engine until it is dropped")
    }
}

impl Engine {
    pub(crate) fn new() -> Self {
        Engine {
            state: Mutex::new(State {
                groups: Vec::new(),
                patience: Patience::new(),
                to_tell: Vec::new(),
                roster: Roster::default(),
                sleepers: Vec::new(),
                // One from the start: what a process holds does not depend on whether its thread has slept yet.
                spare: Bell::new().into_iter().collect(),
            }),
            crowd: AtomicUsize::new(0),
            #[cfg(test)]
            looks_rarely: false.into(),
            #[cfg(test)]
            interlude: Default::default(),
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

    /// Wakes the threads whose operations are over, releases the lock, then runs callbacks.
    #[inline]
    fn tell(&self, mut state: MutexGuard<'_, State>) {
        state.wake_sleepers();
        if state.to_tell.is_empty() {
            return;
        }
        let finished = std::mem::take(&mut state.to_tell);
        drop(state);
        for work in finished {
            work.tell();
        }
    }

    pub(crate) fn add(&self, mut group: Box<GroupState>, crowded: bool) -> GroupIndex {
        self.with(|state| {
            group.is_crowded = crowded;
            let free = state.groups.iter().position(Option::is_none);
            let index = free.unwrap_or_else(|| {
                state.groups.push(None);
                state.groups.len() - 1
            });
            state.groups[index] = Some(group);
            state.look_for_crowd();
            GroupIndex(index)
        })
    }

    pub(crate) fn remove(&self, index: GroupIndex) -> Option<Box<GroupState>> {
        self.with(|state| {
            let group = state.groups[index.0].take();
            state.look_for_crowd();
            group
        })
    }

    /// Starts an operation of a group. What `start` puts into the queue is polled once, so that what it has to say is said
    /// immediately; an operation that is over within its [`Looks`] need not be put there.
    ///
    /// # Errors
    /// If the group has failed. Then `start` is not called.
    #[inline]
    pub(crate) fn submit<R>(
        &self,
        fabric: &Arc<Fabric>,
        index: GroupIndex,
        urgency: Urgency,
        start: impl FnOnce(&mut GroupState, Looks<'_>) -> R,
    ) -> Result<R, Fault> {
        let mut state = self.lock();
        let State { groups, to_tell, patience, .. } = &mut *state;
        let group = groups[index.0].as_deref_mut().expect("a group is in its engine until it is dropped");
        if let Some(fault) = group.failed() {
            return Err(fault.clone());
        }
        let was_busy = group.is_busy() || group.is_doubtful();
        let turns = urgency.turns(was_busy, patience.quick_turns());
        let result = start(group, Looks { turns, crowd: &self.crowd });
        if group.is_busy() {
            group.poll(fabric, to_tell);
            self.leave_under_way(state, fabric, index, urgency.helper_looks(was_busy));
        } else if fabric.news().are_there() {
            self.pass_on(state, fabric);
        }
        Ok(result)
    }

    /// A call read something from a line that is another group's, which may be waited for by a thread that sleeps.
    #[cold]
    fn pass_on(&self, mut state: MutexGuard<'_, State>, fabric: &Arc<Fabric>) {
        state.poll(fabric);
        self.tell(state);
    }

    /// After a call on a group: what is still under way is driven even if the caller never waits.
    #[inline]
    fn leave_under_way(
        &self,
        mut state: MutexGuard<'_, State>,
        fabric: &Arc<Fabric>,
        index: GroupIndex,
        when: When,
    ) {
        if fabric.news().are_there() {
            state.poll(fabric);
        }
        state.roster.wants_changed();
        let is_busy = state.groups[index.0].as_ref().is_some_and(|group| group.is_busy());
        let is_behind = state.roster.helper_is_behind();
        self.tell(state);
        if is_busy {
            fabric.call_helper(when, is_behind);
        }
    }

    /// Wakes the threads whose operations are over.
    pub(crate) fn wake_sleepers(&self) {
        self.with(State::wake_sleepers);
    }

    /// Polls once, for a caller that asks but does not wait.
    pub(crate) fn look(&self, fabric: &Arc<Fabric>) {
        if fabric.check_process().is_err() {
            return; // what a forked child would drive is its parent's
        }
        let is_behind = self.with(|state| {
            state.poll(fabric);
            state.check(fabric, Instant::now());
            if fabric.news().are_there() {
                state.poll(fabric);
            }
            state.roster.helper_is_behind() && state.is_busy()
        });
        if is_behind {
            fabric.wake_helper();
        }
    }

    /// Drives until `work` is over; false if `until` came first.
    pub(crate) fn wait(&self, fabric: &Arc<Fabric>, work: &Arc<Shared>, until: Option<Deadline>) -> bool {
        let mut early = 5;
        loop {
            match self.drive(fabric, work, until, &mut early) {
                Over::Done => return true,
                Over::TimedOut => return false,
                Over::Callbacks => {}
            }
        }
    }

    /// Drives until `work` is over, or until callbacks were run.
    fn drive(
        &self,
        fabric: &Arc<Fabric>,
        work: &Arc<Shared>,
        until: Option<Deadline>,
        early: &mut i32,
    ) -> Over {
        let mut waiting = Waiting { engine: self, fabric, is_inside: false };
        let mut state = self.lock();
        let waiter = waiting.enter(&mut state);
        state.patience.restart();
        loop {
            if state.poll(fabric) {
                state.patience.restart();
                state.wake_sleepers();
            }
            let over = if work.is_done() { Over::Done } else { Over::Callbacks };
            if over == Over::Done || !state.to_tell.is_empty() {
                waiting.leave(&mut state); // a callback may take its time, and this thread drives nothing meanwhile
                self.tell(state);
                return over;
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
                    let before = Instant::now();
                    std::thread::yield_now();
                    let time = before.elapsed();
                    state = self.lock();
                    state.patience.yielded(time);
                }
                Next::Sleep => {
                    if until.is_some_and(|until| until.passed()) {
                        waiting.leave(&mut state);
                        self.tell(state);
                        return Over::TimedOut;
                    }
                    let look = self.look_after(if *early > 0 { LOOK_EARLY } else { LOOK_LATE });
                    *early -= i32::from(*early > 0);
                    let limit = until.and_then(|until| until.left()).map_or(look, |left| left.min(look));
                    let before = Instant::now();
                    state = self.sleep(state, fabric, Asleep::Waiter(waiter, work), limit);
                    state.patience.slept(before.elapsed());
                }
            }
        }
    }

    fn look_after(&self, usual: Duration) -> Duration {
        #[cfg(test)]
        if self.looks_rarely.load(Ordering::Relaxed) {
            return Duration::from_secs(3600);
        }
        usual
    }

    /// Sleeps until something may have happened: with the lock before and after, without it meanwhile.
    fn sleep<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        fabric: &Arc<Fabric>,
        who: Asleep<'_>,
        limit: Duration,
    ) -> MutexGuard<'a, State> {
        let now = Instant::now();
        if state.check(fabric, now) {
            state.wake_sleepers();
            return state;
        }
        let watches = state.roster.must_watch();
        let (mut sockets, mut until) = (Vec::new(), None);
        if watches {
            #[cfg(test)]
            self.interlude.run();
            (sockets, until) = state.prepare_to_sleep();
            // Whatever came before the peers could see that we sleep is seen now.
            if state.poll(fabric) || !state.to_tell.is_empty() {
                state.wake_up();
                state.roster.wants_changed(); // another sleeper may have counted on the flags
                state.wake_sleepers();
                return state;
            }
        }
        state.roster.fall_asleep(who.watching(), watches);
        let (own, blind) = match who {
            Asleep::Waiter(waiter, work) => {
                let bell = state.lie_down(waiter, work);
                let blind = bell.is_none();
                (bell, blind)
            }
            Asleep::Helper(_) => (None, false),
        };
        drop(state);
        let limit = if blind { limit.min(LOOK_BLIND) } else { limit };
        let limit = until.map_or(limit, |until| limit.min(until.saturating_duration_since(now)));
        let also = match who {
            Asleep::Waiter(..) => own.as_ref().map(AsFd::as_fd),
            Asleep::Helper(control) => Some(control),
        };
        sleep_on(watches.then_some(&fabric.bell), &sockets, also, limit);
        let mut state = self.lock();
        if state.roster.wake_up(who.watching()) {
            fabric.bell.silence();
            state.wake_up();
        }
        if let Asleep::Waiter(waiter, _) = who {
            state.get_up(waiter);
        }
        state
    }

    /// The helper's turn: drives while something is under way and no thread waits, until the control plane needs it.
    pub(crate) fn helper_turn(&self, fabric: &Arc<Fabric>, control: BorrowedFd<'_>, limit: Duration) {
        let mut state = self.lock();
        let is_busy = state.is_busy();
        let rests = state.roster.helper_rests(is_busy);
        if !is_busy {
            fabric.dismiss_helper();
            self.tell(state);
            return;
        }
        if rests {
            drop(state);
            sleep_on(None, &[], Some(control), limit.min(LOOK_LATE));
            return;
        }
        // After each look the helper yields its core. If no other thread needs the core, looking again is cheaper than a sleep.
        let mut looks = HELPER_LOOKS;
        while looks > 0 && !state.roster.is_waited_in() {
            looks = if state.poll(fabric) { HELPER_LOOKS } else { looks - 1 };
            if !state.to_tell.is_empty() || !state.is_busy() {
                return self.tell(state);
            }
            drop(state);
            std::thread::yield_now();
            state = self.lock();
        }
        if state.is_busy() && !state.roster.is_waited_in() {
            state = self.sleep(state, fabric, Asleep::Helper(control), limit);
            state.poll(fabric);
        }
        self.tell(state);
    }
}

/// Why a thread stopped driving.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Over {
    Done,
    TimedOut,
    /// Callbacks were run; the operation is still under way.
    Callbacks,
}

#[cfg(test)]
mod tests;
