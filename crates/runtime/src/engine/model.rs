//! Waiters, helper and bell in every order that the memory model allows: do all pending operations complete although no thread
//! wakes up by itself?
//!
//! The real `roster.rs` decides which thread watches and which is woken. Around it, this model does what `engine.rs`,
//! `Fabric::call_helper` and the loop of the helper do, in the same order, but simplified: a descriptor is a flag, an operation
//! is over when one message has arrived, no thread spins, the alarm rings immediately, and no sleep has a limit. So a lost
//! wake-up is a deadlock, which loom detects.
//!
//! `RUSTFLAGS="--cfg loom" cargo test --release -p tenfold --lib loom`

use loom::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
use loom::sync::{Arc, Condvar, Mutex, MutexGuard};
use loom::thread;

use super::roster::{Roster, Waiter, Wake, Watching};

/// Descriptors: the bell that peers ring, the two that wake the helper, and those of single waiters.
const BELL: usize = 0;
const WAKER: usize = 1;
const ALARM: usize = 2;
const OWN: usize = 3;

/// Not of the engine: for each operation, whether it is over.
const OVER: usize = OWN + OPERATIONS;

const OPERATIONS: usize = 2;

/// Who has called the helper, as in `fabric/mod.rs`.
const NOT_CALLED: usize = 0;
const CALLED_LATER: usize = 1;
const CALLED: usize = 3;

/// Eventfds and `poll`.
struct Descriptors {
    rung: Mutex<[bool; OVER + OPERATIONS]>,
    changed: Condvar,
}

impl Descriptors {
    fn ring(&self, bell: usize) {
        self.rung.lock().unwrap()[bell] = true;
        self.changed.notify_all();
    }

    /// True if it had rung.
    fn silence(&self, bell: usize) -> bool {
        std::mem::take(&mut self.rung.lock().unwrap()[bell])
    }

    fn sleep_on(&self, bells: &[usize]) {
        let mut rung = self.rung.lock().unwrap();
        while !bells.iter().any(|bell| rung[*bell]) {
            rung = self.changed.wait(rung).unwrap();
        }
    }
}

/// One operation, each with a peer of its own: what the peer says, and whether this rank says that it sleeps until then.
struct Operation {
    said: AtomicBool,
    wanted: AtomicBool,
}

struct State {
    roster: Roster,
    under_way: Vec<usize>,
    done: [bool; OPERATIONS],
    sleepers: Vec<Sleeper>,
    spare: Vec<usize>,
    bells: usize,
}

struct Sleeper {
    waiter: Waiter,
    operation: usize,
    bell: usize,
    rung: bool,
}

/// A rank with its engine, and the peers' view of it.
struct Rank {
    state: Mutex<State>,
    operations: [Operation; OPERATIONS],
    descriptors: Descriptors,
    call: AtomicUsize,
    alarm_is_set: AtomicUsize,
    stop: AtomicBool,
}

impl State {
    fn is_busy(&self) -> bool {
        !self.under_way.is_empty()
    }

    fn poll(&mut self, rank: &Rank) -> bool {
        let before = self.under_way.len();
        let done = &mut self.done;
        self.under_way.retain(|&operation| {
            done[operation] = rank.operations[operation].said.load(Ordering::Acquire);
            if done[operation] {
                rank.descriptors.ring(OVER + operation);
            }
            !done[operation]
        });
        let moved = self.under_way.len() < before;
        if moved {
            self.roster.wants_changed();
        }
        moved
    }

    fn prepare_to_sleep(&self, rank: &Rank) {
        for operation in &self.under_way {
            rank.operations[*operation].wanted.store(true, Ordering::Relaxed);
            fence(Ordering::SeqCst);
        }
    }

    fn wake_up(&self, rank: &Rank) {
        for operation in &rank.operations {
            operation.wanted.store(false, Ordering::Relaxed);
        }
    }

    fn wake(&mut self, rank: &Rank, waiter: Waiter) {
        self.roster.woken(waiter);
        if let Some(sleeper) =
            self.sleepers.iter_mut().find(|sleeper| sleeper.waiter == waiter && !sleeper.rung)
        {
            sleeper.rung = true;
            rank.descriptors.ring(sleeper.bell);
        }
    }

    fn wake_sleepers(&mut self, rank: &Rank) {
        if !self.roster.has_sleepers() {
            return;
        }
        let over = self.sleepers.iter().filter(|sleeper| self.done[sleeper.operation]);
        let over: Vec<Waiter> = over.map(|sleeper| sleeper.waiter).collect();
        over.into_iter().for_each(|waiter| self.wake(rank, waiter));
        if let Wake::Waiter(waiter) = self.roster.successor(self.is_busy()) {
            self.wake(rank, waiter);
        }
    }

    fn lie_down(&mut self, waiter: Waiter, operation: usize) -> usize {
        let bell = self.spare.pop().unwrap_or_else(|| {
            self.bells += 1;
            OWN + self.bells - 1
        });
        self.sleepers.push(Sleeper { waiter, operation, bell, rung: false });
        bell
    }

    fn get_up(&mut self, rank: &Rank, waiter: Waiter) {
        let index = self.sleepers.iter().position(|sleeper| sleeper.waiter == waiter).unwrap();
        let Sleeper { bell, rung, .. } = self.sleepers.swap_remove(index);
        if rung {
            rank.descriptors.silence(bell);
        }
        self.spare.push(bell);
    }

    fn leave(&mut self, rank: &Rank) {
        let is_busy = self.is_busy();
        match self.roster.leave(is_busy) {
            Wake::Nobody => {}
            Wake::Waiter(waiter) => self.wake(rank, waiter),
            Wake::Helper => rank.call_helper(CALLED, true),
        }
    }
}

impl Rank {
    fn new() -> Self {
        let state = State {
            roster: Roster::default(),
            under_way: Vec::new(),
            done: [false; OPERATIONS],
            sleepers: Vec::new(),
            spare: Vec::new(),
            bells: 0,
        };
        Rank {
            state: Mutex::new(state),
            operations: std::array::from_fn(|_| Operation {
                said: AtomicBool::new(false),
                wanted: AtomicBool::new(false),
            }),
            descriptors: Descriptors {
                rung: Mutex::new([false; OVER + OPERATIONS]),
                changed: Condvar::new(),
            },
            call: AtomicUsize::new(NOT_CALLED),
            alarm_is_set: AtomicUsize::new(NOT_CALLED),
            stop: AtomicBool::new(false),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    fn tell(&self, mut state: MutexGuard<'_, State>) {
        state.wake_sleepers(self);
    }

    fn call_helper(&self, call: usize, again: bool) {
        let is_new = match call {
            CALLED => self.call.swap(CALLED, Ordering::AcqRel) != CALLED,
            call => self.call.fetch_max(call, Ordering::AcqRel) < call,
        };
        if !is_new && !again {
            return;
        }
        if call == CALLED {
            self.descriptors.ring(WAKER);
        } else if self.alarm_is_set.fetch_max(call, Ordering::AcqRel) < call {
            self.descriptors.ring(ALARM);
        }
    }

    /// `Engine::submit`.
    fn call(&self, operation: usize) {
        let mut state = self.lock();
        state.under_way.push(operation);
        state.poll(self);
        state.roster.wants_changed();
        let is_busy = !state.done[operation];
        let is_behind = state.roster.helper_is_behind();
        self.tell(state);
        if is_busy {
            self.call_helper(CALLED_LATER, is_behind);
        }
    }

    /// `Engine::look`.
    fn look(&self) {
        let mut state = self.lock();
        state.poll(self);
        let is_behind = state.roster.helper_is_behind() && state.is_busy();
        self.tell(state);
        if is_behind {
            self.descriptors.ring(WAKER);
        }
    }

    /// `Engine::wait`; one that gives up does so where it would fall asleep.
    fn wait(&self, operation: usize, gives_up: bool) {
        let mut state = self.lock();
        let waiter = state.roster.enter();
        loop {
            if state.poll(self) {
                state.wake_sleepers(self);
            }
            if state.done[operation] || gives_up {
                state.leave(self);
                return self.tell(state);
            }
            state = self.sleep(state, Some((waiter, operation)));
        }
    }

    /// `Engine::sleep`, of a waiter or of the helper.
    fn sleep<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        waits: Option<(Waiter, usize)>,
    ) -> MutexGuard<'a, State> {
        let who = waits.map_or(Watching::Helper, |(waiter, _)| Watching::Waiter(waiter));
        let watches = state.roster.must_watch();
        if watches {
            state.prepare_to_sleep(self);
            if state.poll(self) {
                state.wake_up(self);
                state.roster.wants_changed();
                state.wake_sleepers(self);
                return state;
            }
        }
        state.roster.fall_asleep(who, watches);
        let own = waits.map(|(waiter, operation)| state.lie_down(waiter, operation));
        drop(state);
        let mut bells = own.map_or(vec![WAKER, ALARM], |own| vec![own]);
        bells.extend(watches.then_some(BELL));
        self.descriptors.sleep_on(&bells);
        let mut state = self.lock();
        if state.roster.wake_up(who) {
            self.descriptors.silence(BELL);
            state.wake_up(self);
        }
        if let Some((waiter, _)) = waits {
            state.get_up(self, waiter);
        }
        state
    }

    /// `Watch::run`.
    fn help(&self) {
        loop {
            if self.call.load(Ordering::Acquire) == NOT_CALLED {
                self.descriptors.sleep_on(&[WAKER, ALARM]);
            } else {
                self.helper_turn();
            }
            self.descriptors.silence(WAKER);
            if self.descriptors.silence(ALARM) {
                self.alarm_is_set.swap(NOT_CALLED, Ordering::AcqRel);
            }
            if self.stop.load(Ordering::Acquire) {
                return;
            }
        }
    }

    /// `Engine::helper_turn`.
    fn helper_turn(&self) {
        let mut state = self.lock();
        let is_busy = state.is_busy();
        let rests = state.roster.helper_rests(is_busy);
        if !is_busy {
            self.call.store(NOT_CALLED, Ordering::Release);
            return self.tell(state);
        }
        if rests {
            drop(state);
            return self.descriptors.sleep_on(&[WAKER, ALARM]);
        }
        state.poll(self);
        if state.is_busy() {
            state = self.sleep(state, None);
            state.poll(self);
        }
        self.tell(state);
    }

    /// The peer of an operation sends its message.
    fn peer_says(&self, operation: usize) {
        let Operation { said, wanted } = &self.operations[operation];
        said.store(true, Ordering::Release);
        fence(Ordering::SeqCst);
        if wanted.load(Ordering::Relaxed) {
            self.descriptors.ring(BELL);
        }
    }
}

/// Each thread of the rank runs its function, the first of them on this thread. Peers send the messages of one list without a
/// pause, and those of the next list when the operations of the first are over. In the end, all operations are over.
fn model(said: &'static [&'static [usize]], threads: &'static [fn(&Rank)]) {
    let mut builder = loom::model::Builder::new();
    // How often a thread is stopped where it does not wait. Two stops with four threads take minutes, and found no defect that one
    // did not find; `LOOM_MAX_PREEMPTIONS=2` asks for them.
    let bound = if threads.len() == 1 { 2 } else { 1 };
    builder.preemption_bound = builder.preemption_bound.or(Some(bound));
    builder.check(move || {
        let rank = Arc::new(Rank::new());
        let spawn = |act: Box<dyn Fn(&Rank) + Send>| {
            let rank = Arc::clone(&rank);
            thread::spawn(move || act(&rank))
        };
        let helper = spawn(Box::new(Rank::help));
        let peers = spawn(Box::new(move |rank| {
            for operations in said {
                operations.iter().for_each(|operation| rank.peer_says(*operation));
                operations.iter().for_each(|operation| rank.descriptors.sleep_on(&[OVER + operation]));
            }
        }));
        let others: Vec<_> = threads[1..].iter().map(|act| spawn(Box::new(act))).collect();
        threads[0](&rank);
        others.into_iter().chain([peers]).for_each(|thread| thread.join().unwrap());
        rank.stop.store(true, Ordering::Release);
        rank.descriptors.ring(WAKER);
        helper.join().unwrap();
    });
}

#[test]
fn loom_the_helper_drives_what_nobody_waits_for() {
    model(&[&[0]], &[|rank| rank.call(0)]);
}

#[test]
fn loom_the_helper_drives_what_a_thread_stopped_waiting_for() {
    model(
        &[&[0]],
        &[|rank| {
            rank.call(0);
            rank.wait(0, true);
        }],
    );
}

#[test]
fn loom_the_helper_drives_what_was_called_while_it_slept() {
    model(
        &[&[1, 0]],
        &[|rank| {
            rank.call(0);
            rank.call(1);
        }],
    );
}

#[test]
fn loom_a_thread_that_waits_sees_the_message_or_is_woken() {
    model(
        &[&[0]],
        &[|rank| {
            rank.call(0);
            rank.wait(0, false);
        }],
    );
}

fn calls_and_waits(rank: &Rank, operation: usize) {
    rank.call(operation);
    rank.wait(operation, false);
}

#[test]
fn loom_two_threads_that_wait_are_woken_by_whoever_completes_their_operations() {
    model(&[&[0, 1]], &[|rank| calls_and_waits(rank, 0), |rank| calls_and_waits(rank, 1)]);
}

#[test]
fn loom_a_thread_that_waits_drives_what_another_calls_and_does_not_wait_for() {
    model(&[&[1], &[0]], &[|rank| calls_and_waits(rank, 0), |rank| rank.call(1)]);
    model(&[&[0], &[1]], &[|rank| calls_and_waits(rank, 0), |rank| rank.call(1)]);
}

#[test]
fn loom_of_two_threads_that_wait_the_first_is_woken_although_the_other_waits_on() {
    model(&[&[0], &[1]], &[|rank| calls_and_waits(rank, 0), |rank| calls_and_waits(rank, 1)]);
}

#[test]
fn loom_a_thread_that_only_looks_leaves_nothing_behind() {
    model(
        &[&[0, 1]],
        &[
            |rank| calls_and_waits(rank, 0),
            |rank| {
                rank.call(1);
                rank.look();
            },
        ],
    );
}

#[test]
fn loom_a_thread_that_stops_waiting_leaves_to_another_what_is_under_way() {
    model(
        &[&[0, 1]],
        &[
            |rank| calls_and_waits(rank, 0),
            |rank| {
                rank.call(1);
                rank.wait(1, true);
            },
        ],
    );
}
