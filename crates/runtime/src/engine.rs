//! Drives the operations of all groups of a rank. The waiting thread makes progress for all pending operations.
//!
//! All state is behind one lock. A thread that waits takes it, polls everything that is under way, and spins for a while;
//! then it says in the records what it waits for, looks once more, releases the lock and sleeps. Other threads may do
//! the same at the same time; `roster.rs` decides which of them watches for all, and who must be woken. The helper thread (see
//! `fabric::watch`) drives whatever is under way while no thread waits: every call that is not over when it returns calls the
//! helper, immediately or a little later.
//!
//! Faults are reported from here to the groups, which turn them into errors: ARCHITECTURE.md lists the places.

#![expect(clippy::disallowed_methods, reason = "reads the clock before it sleeps")]

#[cfg(test)]
mod hand_over;
#[cfg(all(test, loom))]
mod model;
mod roster;

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use tenfold_memory::Doing;
use tenfold_store::Deadline;

use crate::fabric::{Bell, Fabric, GroupProgress, When};
use crate::fault::Fault;
use crate::group::state::{Finish, GroupState, Job};
use crate::patience::{Next, Patience};
use crate::recorder::{Stalls, Ticket};
use crate::run::Run;
use crate::transport::Socket;
use crate::wire::FabricId;
use crate::work::{Shared, earlier};
use roster::{Roster, Waiter, Wake, Watching};

/// How often the helper looks for news, and offers its core to others, before it sleeps.
const HELPER_LOOKS: u32 = 64;

/// A sleeper looks around at least this often: first for what went wrong at once, then for the rest.
const LOOK_EARLY: Duration = Duration::from_millis(20);
const LOOK_LATE: Duration = Duration::from_millis(200);

/// How long a sleeper without a bell of its own sleeps: no descriptor was left for one.
const LOOK_BLIND: Duration = Duration::from_millis(1);

#[derive(Debug)]
pub(crate) struct Engine {
    state: Mutex<State>,
    /// Threads that want the lock: whoever spins with it lets them in.
    crowd: AtomicUsize,
    /// In tests: sleepers look around only if they are woken, so that a wake-up that is lost is found out.
    #[cfg(test)]
    looks_rarely: std::sync::atomic::AtomicBool,
    #[cfg(test)]
    interlude: hand_over::Interlude,
}

#[derive(Debug)]
pub(crate) struct State {
    groups: Vec<Option<Box<GroupState>>>,
    patience: Patience,
    /// Finished works that somebody wants to hear of, once the lock is free.
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
        if moved {
            self.roster.wants_changed();
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
        // A caller that starts a second operation before it waits for the first has other things to do.
        let when = if detached || was_busy { When::Now } else { When::Later };
        self.leave_under_way(state, fabric, index, when);
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
        let State { groups, to_tell, patience, .. } = &mut *state;
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
        // A caller that starts a second operation before it waits for the first has other things to do.
        let when = if was_busy || urgency == Urgency::Background { When::Soon } else { When::Later };
        self.leave_under_way(state, fabric, index, when);
        Ok(Submitted::Underway(work))
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
        state.roster.wants_changed();
        let is_busy = state.groups[index.0].as_ref().is_some_and(|group| group.is_busy());
        let is_behind = state.roster.helper_is_behind();
        self.tell(state);
        if is_busy {
            fabric.call_helper(when, is_behind);
        }
    }

    /// Has the helper thread drive while no thread waits.
    pub(crate) fn attend(&self, fabric: &Arc<Fabric>) {
        if fabric.check_process().is_ok() {
            fabric.call_helper(When::Now, false);
        }
    }

    /// Wakes the threads whose operations are over.
    pub(crate) fn wake_sleepers(&self) {
        self.with(State::wake_sleepers);
    }

    /// Polls once, for somebody who asks but does not wait.
    pub(crate) fn look(&self, fabric: &Arc<Fabric>) {
        if fabric.check_process().is_err() {
            return; // what a forked child would drive is its parent's
        }
        let is_behind = self.with(|state| {
            state.poll(fabric);
            state.check(fabric, Instant::now());
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
                    std::thread::yield_now();
                    state = self.lock();
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
        // A core that others need is theirs after each look; one that nobody needs is not worth a sleep.
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

    pub(crate) fn abort_group_of(&self, fabric: &Arc<Fabric>, work: &Shared, reason: &str) {
        if fabric.check_process().is_err() {
            return;
        }
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
        if fabric.check_process().is_err() {
            return;
        }
        self.with(|state| {
            let State { groups, to_tell, .. } = state;
            if let Some(group) = groups[index.0].as_deref_mut() {
                group.fail(fabric, fault, to_tell);
            }
        });
        fabric.bell.ring();
    }

    /// A member of group `id` said something. False if there is no such group (yet).
    pub(crate) fn hear(&self, fabric: &Arc<Fabric>, from: FabricId, id: u64, text: &[u8]) -> bool {
        let heard = self.with(|state| {
            let State { groups, to_tell, .. } = state;
            let group = groups.iter_mut().flatten().find(|group| group.id() == id);
            let group = group?;
            // Group ids can be guessed: what a process says about a group that it is not in does not count.
            if group.has_member(from) {
                group.hear(fabric, text, to_tell);
            }
            Some((group.is_busy(), group.take_warnings()))
        });
        let Some((is_busy, warnings)) = heard else { return false };
        fabric.bell.ring();
        warn(&warnings);
        if is_busy {
            self.attend(fabric); // what it heard may ask for a verdict, and no thread may wait for anything
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

    /// For every peer whose board can be seen, a number that changes with each collective that it calls or finishes.
    pub(crate) fn calls_of_peers(&self) -> HashMap<FabricId, u64> {
        let mut calls = HashMap::new();
        self.with(|state| state.groups.iter().flatten().for_each(|group| group.count_calls(&mut calls)));
        calls
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
    pub(crate) fn notices(&self, to: FabricId) -> Vec<(u64, Vec<u8>)> {
        let of = |group: &mut GroupState| {
            group.notices(to).into_iter().map(|text| (group.id(), text)).collect::<Vec<_>>()
        };
        self.with(|state| state.groups.iter_mut().flatten().flat_map(|group| of(group)).collect())
    }

    /// What waits for the peer `id`, for a warning that it is silent: its rank, the group, the operation.
    pub(crate) fn waiting_for(&self, id: FabricId) -> Option<String> {
        self.with(|state| state.groups.iter().flatten().find_map(|group| group.waiting_for(id)))
    }
}

/// Without the lock, since nobody knows what a subscriber does.
fn warn(warnings: &[String]) {
    for warning in warnings {
        tracing::warn!("{warning}");
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

/// A thread that falls asleep.
#[derive(Clone, Copy)]
enum Asleep<'a> {
    Waiter(Waiter, &'a Arc<Shared>),
    /// Woken by the control plane too.
    Helper(BorrowedFd<'a>),
}

impl Asleep<'_> {
    fn watching(&self) -> Watching {
        match self {
            Asleep::Waiter(waiter, _) => Watching::Waiter(*waiter),
            Asleep::Helper(_) => Watching::Helper,
        }
    }
}

/// A thread in `wait`, for as long as it drives. If it unwinds, another thread takes over all the same.
struct Waiting<'a> {
    engine: &'a Engine,
    fabric: &'a Arc<Fabric>,
    is_inside: bool,
}

impl Waiting<'_> {
    fn enter(&mut self, state: &mut State) -> Waiter {
        self.is_inside = true;
        state.roster.enter()
    }

    fn leave(&mut self, state: &mut State) {
        self.is_inside = false;
        let is_busy = state.is_busy();
        match state.roster.leave(is_busy) {
            Wake::Nobody => {}
            Wake::Waiter(waiter) => state.wake(waiter),
            Wake::Helper => self.fabric.call_helper(When::Now, true),
        }
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if self.is_inside {
            let mut state = self.engine.lock(); // free: the lock is taken after this value is made, so it is released before
            self.leave(&mut state);
        }
    }
}

/// Sleeps on the bell, on `sockets` (each with whether it is to be written), and on `also`.
fn sleep_on(bell: Option<&Bell>, sockets: &[(Socket, bool)], also: Option<BorrowedFd<'_>>, limit: Duration) {
    let mut polled = Vec::with_capacity(2 + sockets.len());
    polled.extend(bell.map(|bell| PollFd::from_borrowed_fd(bell.as_fd(), PollFlags::IN)));
    polled.extend(also.map(|also| PollFd::from_borrowed_fd(also, PollFlags::IN)));
    for (socket, write) in sockets {
        let flags = if *write { PollFlags::OUT } else { PollFlags::IN };
        polled.push(PollFd::from_borrowed_fd(socket.as_fd(), flags));
    }
    let _ = rustix::event::poll(&mut polled, Some(&timespec(limit))); // a signal is as good as news
}

fn timespec(limit: Duration) -> Timespec {
    Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: i64::from(limit.subsec_nanos()) }
}

#[cfg(test)]
mod tests {
    use tenfold_memory::{Buffer, DType, ReduceOp};

    use super::*;
    use crate::{Group, Options, Tag};

    /// Ranks that have left their large group and go on in a small one may spin again.
    #[test]
    fn a_group_with_more_ranks_than_cores_makes_ranks_yield_only_as_long_as_it_exists() {
        let size = crate::group::usable_cores() + 1;
        let options = Options::default().timeout(Duration::from_secs(100));
        let is_crowded =
            |group: &Group| group.fabric().engine.with(|state| state.patience.quick_turns() == 1);
        let outcome = Group::threads_with(size, &options, |group| {
            assert!(is_crowded(&group));
            let alone = group.subgroup(&[group.rank()], Options::new(format!("alone{}", group.rank())));
            group.start_barrier()?.wait()?;
            let alone = alone?.expect("this rank is in it");
            assert!(is_crowded(&alone));
            drop(group);
            assert!(!is_crowded(&alone));
            Ok(())
        });
        outcome.unwrap();
    }

    /// Several threads of rank 0 wait at once; each must be woken by whichever thread completes its operation. Sleepers look
    /// around by themselves only after an hour, so a lost wake-up is a timeout.
    #[test]
    fn every_waiter_whose_operation_another_thread_completes_is_woken() {
        const WAITERS: usize = 4;
        let options = Options::default().timeout(Duration::from_secs(30));
        let outcome = Group::threads_with(2, &options, |group| {
            group.fabric().engine.looks_rarely.store(true, Ordering::Relaxed);
            let groups: Vec<Group> = (0..WAITERS)
                .map(|index| group.subgroup(&[0, 1], Options::new(format!("g{index}"))).unwrap().unwrap())
                .collect();
            // Waits all the time, so that it completes operations of the others and does not leave.
            let mut word = Buffer::zeros(DType::U8, 1);
            let last = (group.rank() == 0).then(|| group.start_recv(word.lend(), 1, Tag(0)).unwrap());
            std::thread::scope(|scope| {
                scope.spawn(|| last.map(|last| last.wait().unwrap()));
                for (index, group) in groups.iter().enumerate() {
                    scope.spawn(move || {
                        let mut tensor = Buffer::zeros(DType::F32, 1 << 12);
                        for round in 0..150 {
                            // So that threads of rank 0 fall asleep, in changing order.
                            if group.rank() == 1 && (round + index) % 3 == 0 {
                                std::thread::sleep(Duration::from_micros(300 * index as u64));
                            }
                            group.start_all_reduce(tensor.lend(), ReduceOp::Sum).unwrap().wait().unwrap();
                        }
                    });
                }
            });
            if group.rank() == 1 {
                group.start_send(Buffer::zeros(DType::U8, 1).lend(), 0, Tag(0))?.wait()?;
            }
            Ok(())
        });
        outcome.unwrap();
    }
}
