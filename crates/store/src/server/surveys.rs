//! When the server surveys its keys (see `survey`), and how long an answer stays valid.
//!
//! All requests for the same prefix get the same answer. An answer that took the server `t` is reused for 100
//! `t`, so surveys take about a hundredth of the server's time, however many clients ask. While a survey is
//! being made, a step is followed by nine times as long without one, unless the server was idle meanwhile. If
//! turns take long, because there are thousands of clients, several steps are made after each turn. Otherwise
//! a survey would never finish.

use std::collections::VecDeque;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use crate::survey::{STEP, Survey, Tally, Walk};
use crate::table::Table;
use crate::value::Value;

/// An answer is valid for this many times what it took.
const GOOD_FOR: u32 = 100;
/// After a step that took `t`, clients have this many `t`, if they need them.
const REST: u32 = 9;
/// The most time that a long turn of clients counts towards the next steps: a tenth of it goes into steps.
const CREDIT: Duration = Duration::from_millis(10);
/// Prefixes that are being surveyed or are waiting for it. A request for one more gets no answer.
const WAITING_MAX: usize = 16;
/// Requests that wait for the same answer.
const ASKERS_MAX: usize = 64;
/// How many answers are kept, and for how long at most.
const KEPT_MAX: usize = 16;
const KEPT_FOR: Duration = Duration::from_secs(300);
/// If a survey takes longer than this, the previous answer is returned while a new one is made.
const PATIENCE: Duration = Duration::from_millis(20);

/// The result for the thread that asked, which makes it readable.
#[derive(Clone, Debug)]
pub(super) struct Surveyed {
    tally: Arc<Tally>,
    cost: Duration,
    age: Duration,
    seconds: u32,
}

impl Surveyed {
    pub(super) fn show(&self, prefix: &[u8]) -> Survey {
        Survey {
            seconds_ago: self.age.as_secs_f64(),
            cost_microseconds: u64::try_from(self.cost.as_micros()).unwrap_or(u64::MAX),
            ..self.tally.show(prefix, self.seconds)
        }
    }
}

#[derive(Debug)]
struct Pending {
    walk: Walk,
    askers: Vec<mpsc::Sender<Surveyed>>,
    cost: Duration,
}

#[derive(Debug)]
struct Done {
    prefix: Value,
    tally: Arc<Tally>,
    cost: Duration,
    at: Instant,
}

/// The surveys of one server.
#[derive(Debug, Default)]
pub(super) struct Surveys {
    /// The first one is being made.
    pending: VecDeque<Pending>,
    /// The newest last.
    done: VecDeque<Done>,
    /// When the next step may be made although clients want something.
    next: Option<Instant>,
}

impl Surveys {
    /// Answers now or later; drops `asker` if no answer can be given.
    pub(super) fn ask(&mut self, prefix: Value, asker: mpsc::Sender<Surveyed>, table: &Table, now: Instant) {
        let mut askers = vec![asker];
        if let Some(done) = self.done.iter().find(|done| done.prefix == prefix) {
            let age = now.duration_since(done.at);
            let is_good = age < done.cost * GOOD_FOR;
            if is_good || done.cost > PATIENCE && age < KEPT_FOR {
                done.tell(&mut askers, table, now);
            }
            if is_good {
                return;
            }
        }
        if let Some(pending) = self.pending.iter_mut().find(|pending| *pending.walk.prefix() == prefix) {
            if pending.askers.len() + askers.len() <= ASKERS_MAX {
                pending.askers.append(&mut askers);
            }
        } else if self.pending.len() < WAITING_MAX {
            self.pending.push_back(Pending { walk: Walk::new(prefix), askers, cost: Duration::ZERO });
        }
    }

    /// Is there a step to be made?
    #[inline]
    pub(super) fn is_pending(&self) -> bool {
        !self.pending.is_empty()
    }

    /// May it be made now? `is_idle`: no client wanted anything from the server.
    pub(super) fn is_due(&self, is_idle: bool, now: Instant) -> bool {
        self.is_pending() && (is_idle || self.next.is_none_or(|at| at <= now))
    }

    /// Makes a step.
    pub(super) fn step(&mut self, table: &Table, clock: impl Fn() -> Instant) {
        let Some(pending) = self.pending.front_mut() else { return };
        let start = clock();
        let is_whole = pending.walk.step(table, STEP);
        let end = clock();
        let took = end.duration_since(start);
        pending.cost += took;
        // Time that clients had beyond their due counts for the following steps, up to a small limit.
        let earliest = start.checked_sub(CREDIT).unwrap_or(start);
        let from = self.next.map_or(start, |next| next.max(earliest));
        self.next = Some((from + took * (REST + 1)).min(end + took * REST));
        if is_whole {
            let mut pending = self.pending.pop_front().expect("it was just looked at");
            let prefix = pending.walk.prefix().clone();
            let done = Done { tally: Arc::new(pending.walk.finish()), prefix, cost: pending.cost, at: end };
            done.tell(&mut pending.askers, table, end);
            self.keep(done);
        }
    }

    /// Removes answers that are too old.
    pub(super) fn tidy(&mut self, now: Instant) {
        self.done.retain(|done| now.duration_since(done.at) < KEPT_FOR);
    }

    fn keep(&mut self, done: Done) {
        self.done.retain(|other| other.prefix != done.prefix);
        if self.done.len() == KEPT_MAX {
            self.done.pop_front();
        }
        self.done.push_back(done);
    }
}

impl Done {
    fn tell(&self, askers: &mut Vec<mpsc::Sender<Surveyed>>, table: &Table, now: Instant) {
        for asker in askers.drain(..) {
            let age = now.duration_since(self.at);
            let answer =
                Surveyed { tally: Arc::clone(&self.tally), cost: self.cost, age, seconds: table.seconds() };
            let _ = asker.send(answer); // the asker may have timed out
        }
    }
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "surveys need a time, any time")]
mod tests {
    use super::*;
    use crate::request::Request;
    use crate::table::{ClientId, Replies, TableLimits};
    use std::cell::Cell;

    const MICROSECOND: Duration = Duration::from_micros(1);

    fn table_of(keys: usize) -> Table {
        let mut table = Table::new(TableLimits::default());
        for key in 0..keys {
            let request = Request::Set { key: key.to_string().into_bytes().into(), value: b"v".into() };
            table.apply(ClientId(0), request, Instant::now(), &mut Replies::new()).unwrap();
        }
        table
    }

    /// Surveys of one table, in a test world where reading the clock takes a while.
    struct World {
        surveys: Surveys,
        table: Table,
        now: Cell<Instant>,
        /// How long each step takes.
        step: Duration,
    }

    impl World {
        fn new(keys: usize, step: Duration) -> Self {
            World { surveys: Surveys::default(), table: table_of(keys), now: Cell::new(Instant::now()), step }
        }

        fn ask(&mut self, prefix: &str) -> mpsc::Receiver<Surveyed> {
            let (asker, answers) = mpsc::channel();
            self.surveys.ask(prefix.into(), asker, &self.table, self.now.get());
            answers
        }

        fn pass(&self, time: Duration) {
            self.now.set(self.now.get() + time);
        }

        fn step(&mut self) {
            let now = &self.now;
            self.surveys.step(&self.table, || {
                let at = now.get();
                now.set(at + self.step);
                at
            });
            now.set(now.get() - self.step); // reading the clock after the step is not part of it
        }

        fn steps(&mut self) -> usize {
            (0..).take_while(|_| self.surveys.is_pending().then(|| self.step()).is_some()).count()
        }
    }

    fn ages(answers: &mpsc::Receiver<Surveyed>) -> Vec<Duration> {
        answers.try_iter().map(|surveyed| surveyed.age).collect()
    }

    #[test]
    fn an_answer_is_good_for_a_hundred_times_what_it_took() {
        let mut world = World::new(10, 20 * MICROSECOND);
        let first = world.ask("");
        assert_eq!(world.steps(), 1);
        assert_eq!(ages(&first), [Duration::ZERO]);

        world.pass(1999 * MICROSECOND);
        let second = world.ask("");
        assert_eq!((ages(&second), world.steps()), (vec![1999 * MICROSECOND], 0));

        world.pass(MICROSECOND);
        let third = world.ask("");
        assert_eq!((ages(&third), world.steps()), (vec![], 1));
        assert_eq!(ages(&third), [Duration::ZERO]);
    }

    #[test]
    fn a_survey_that_takes_long_is_told_as_it_was_while_a_new_one_is_made() {
        let mut world = World::new(10, 30_000 * MICROSECOND);
        let first = world.ask("");
        assert_eq!((world.steps(), ages(&first).len()), (1, 1));
        world.pass(Duration::from_secs(3));
        let second = world.ask("");
        assert_eq!(ages(&second), [Duration::from_secs(3)]);
        assert_eq!(world.steps(), 1, "made again, for the next");
        assert_eq!(ages(&world.ask("")), [Duration::ZERO]);

        world.pass(KEPT_FOR);
        let third = world.ask("");
        assert_eq!(ages(&third), [], "too old to be returned");
        world.surveys.tidy(world.now.get());
        assert!(world.surveys.done.is_empty());
    }

    #[test]
    fn those_who_ask_for_the_same_share_an_answer_and_too_many_get_none() {
        let mut world = World::new(5000, MICROSECOND);
        let askers: Vec<_> = (0..ASKERS_MAX + 1).map(|_| world.ask("a")).collect();
        let others: Vec<_> = (0..WAITING_MAX).map(|number| world.ask(&number.to_string())).collect();
        assert_eq!(world.surveys.pending.len(), WAITING_MAX);
        assert_eq!(askers[ASKERS_MAX].try_recv().unwrap_err(), mpsc::TryRecvError::Disconnected);
        assert_eq!(others[WAITING_MAX - 1].try_recv().unwrap_err(), mpsc::TryRecvError::Disconnected);
        let steps = world.steps();
        assert!(steps >= 5 * WAITING_MAX, "{steps} steps for 5,000 keys and {WAITING_MAX} prefixes");
        assert!(askers[..ASKERS_MAX].iter().all(|asker| ages(asker).len() == 1));
        assert!(others[..WAITING_MAX - 1].iter().all(|asker| ages(asker).len() == 1));
        assert_eq!(world.surveys.done.len(), KEPT_MAX);
    }

    #[test]
    fn others_have_nine_times_as_long_as_a_step_unless_they_want_nothing() {
        let mut world = World::new(5000, 100 * MICROSECOND);
        let _answers = world.ask("");
        assert!(world.surveys.is_due(false, world.now.get()));
        world.step();
        world.pass(899 * MICROSECOND);
        assert!(!world.surveys.is_due(false, world.now.get()));
        assert!(world.surveys.is_due(true, world.now.get()));
        world.pass(MICROSECOND);
        assert!(world.surveys.is_due(false, world.now.get()));
    }

    #[test]
    fn after_a_long_turn_of_others_several_steps_are_due_and_not_too_many() {
        let mut world = World::new(100_000, 100 * MICROSECOND);
        let _answers = world.ask("");
        world.step();
        world.pass(Duration::from_millis(500));
        let mut steps = 0;
        while world.surveys.is_due(false, world.now.get()) {
            world.step();
            steps += 1;
        }
        assert_eq!(steps, 12, "a tenth of the credit and of their own time, and the one that was due");
    }
}
