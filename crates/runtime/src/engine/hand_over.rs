//! Several threads of one rank wait at the same time: each is woken by the thread that completes its operation.
//!
//! Here sleepers wake up by themselves only after an hour, so that a lost wake-up is detected.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};

use tenfold_memory::{Buffer, DType};

use super::waiting::timespec;
use super::*;
use crate::{Group, Options, Result, Tag, Work};

/// Nothing here takes this long unless a wake-up was lost.
const LOST: Duration = Duration::from_secs(40);

/// What a test does right before a thread falls asleep that is going to watch.
#[derive(Default)]
pub(super) struct Interlude(Mutex<Option<Box<dyn FnOnce() + Send>>>);

impl Interlude {
    pub(super) fn run(&self) {
        let interlude = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(interlude) = interlude {
            interlude();
        }
    }

    fn set(&self, interlude: impl FnOnce() + Send + 'static) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(interlude));
    }
}

impl std::fmt::Debug for Interlude {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Interlude")
    }
}

/// Rank 0, which shares some groups with rank 1.
struct Scene<'a> {
    engine: &'a Engine,
    fabric: &'a Arc<Fabric>,
    groups: Vec<Group>,
    /// In which groups rank 1 is to send a message.
    orders: Sender<usize>,
    sent: Receiver<()>,
}

impl Scene<'_> {
    fn receive(&self, group: usize) -> Work {
        self.groups[group].start_recv(Buffer::zeros(DType::U8, 1).lend(), 1, Tag(0)).unwrap()
    }

    /// Keeps the helper, which would make up for a lost wake-up at its next tick, busy until what this returns is dropped: in a
    /// callback of an operation in the last group.
    fn hold_helper(&self) -> Sender<()> {
        let (hold, held) = channel();
        let (say, said) = channel();
        let last = self.groups.len() - 1;
        self.receive(last).notify(move |_| {
            say.send(()).unwrap();
            let _ = held.recv(); // an error once the other end is dropped
        });
        self.orders.send(last).unwrap();
        self.hear(&said);
        self.sent.recv().unwrap();
        hold
    }

    /// Waits until so many threads sleep, none of which was woken.
    fn until_asleep(&self, count: usize) {
        self.until(|state| {
            state.sleepers.len() == count && state.sleepers.iter().all(|sleeper| !sleeper.rung)
        });
    }

    /// Waits until the state is so, without waking any thread.
    fn until(&self, is_so: impl Fn(&State) -> bool) {
        let end = Instant::now() + LOST;
        while !is_so(&self.engine.lock()) {
            assert!(Instant::now() < end, "not so after {LOST:?}: {:?}", self.engine.lock());
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Waits until a thread says something; if it sleeps on, it is woken in another way so that the test can end.
    fn hear<T>(&self, said: &Receiver<T>) -> T {
        said.recv_timeout(LOST).unwrap_or_else(|_| {
            self.groups.iter().for_each(|group| group.abort("a wake-up was lost"));
            let state = self.engine.lock();
            state.sleepers.iter().for_each(|sleeper| sleeper.bell.iter().for_each(Bell::ring));
            panic!("a wake-up was lost: {state:?}")
        })
    }
}

fn with_a_peer(groups: usize, body: impl Fn(&mut Scene<'_>) + Sync) {
    let (orders, ordered) = channel();
    let (sends, sent) = channel();
    let rank_0 = Mutex::new(Some((orders, sent)));
    let rank_1 = Mutex::new(Some((ordered, sends)));
    let outcome = Group::threads_with(2, &Options::default(), |group| {
        let groups: Vec<Group> = (0..groups)
            .map(|index| {
                let options = Options::new(format!("g{index}"));
                Ok(group.subgroup(&[0, 1], options)?.expect("both are members"))
            })
            .collect::<Result<_>>()?;
        if group.rank() == 0 {
            let (orders, sent) = rank_0.lock().unwrap().take().expect("there is one rank 0");
            let fabric = group.fabric();
            fabric.engine.looks_rarely.store(true, Ordering::Relaxed);
            body(&mut Scene { engine: &fabric.engine, fabric, groups, orders, sent });
        } else {
            let (ordered, sends) = rank_1.lock().unwrap().take().expect("there is one rank 1");
            for index in ordered {
                let work = groups[index].start_send(Buffer::zeros(DType::U8, 1).lend(), 0, Tag(0))?;
                let _ = sends.send(()); // an error if the message has arrived and rank 0 has finished
                work.wait()?;
            }
        }
        Ok(())
    });
    outcome.unwrap();
}

#[test]
fn each_of_three_sleepers_is_woken_when_its_operation_is_over_in_every_order() {
    with_a_peer(4, |scene| {
        let _held = scene.hold_helper();
        for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
            let (say, said) = channel();
            std::thread::scope(|scope| {
                for index in 0..3 {
                    let (work, say) = (scene.receive(index), say.clone());
                    scope.spawn(move || {
                        work.wait().unwrap();
                        say.send(index).unwrap();
                    });
                    scene.until_asleep(index + 1);
                }
                for (left, index) in [(2, order[0]), (1, order[1]), (0, order[2])] {
                    scene.orders.send(index).unwrap();
                    assert_eq!(scene.hear(&said), index);
                    scene.until_asleep(left);
                }
            });
        }
        let bells = scene.engine.lock().spare.len();
        assert_eq!(bells, 3, "bells are used again");
    });
}

#[test]
fn a_thread_does_not_sleep_over_what_came_right_before() {
    with_a_peer(2, |scene| {
        let _held = scene.hold_helper();
        let (say, said) = channel();
        let (orders, work) = (scene.orders.clone(), scene.receive(0));
        std::thread::scope(|scope| {
            let (sent_before, is_sent) = channel();
            scene.engine.interlude.set(move || {
                orders.send(0).unwrap();
                is_sent.recv().unwrap();
            });
            scope.spawn(move || {
                work.wait().unwrap();
                say.send(()).unwrap();
            });
            scene.hear(&scene.sent);
            sent_before.send(()).unwrap();
            scene.hear(&said);
        });
    });
}

#[test]
fn a_thread_does_not_sleep_over_time_that_is_up() {
    with_a_peer(2, |scene| {
        let _held = scene.hold_helper();
        let (say, said) = channel();
        let impatient = scene.groups[0].with_timeout(Duration::from_millis(200));
        let work = impatient.start_recv(Buffer::zeros(DType::U8, 1).lend(), 1, Tag(0)).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| say.send(work.wait()).unwrap());
            assert!(scene.hear(&said).is_err());
        });
    });
}

#[test]
fn a_thread_that_unwinds_while_it_waits_waits_no_longer() {
    with_a_peer(1, |scene| {
        let (say, said) = channel();
        let work = scene.receive(0);
        scene.engine.interlude.set(|| panic!("on purpose"));
        assert!(catch_unwind(AssertUnwindSafe(|| work.wait())).is_err());
        assert!(!scene.engine.lock().roster.is_waited_in());
        work.notify(move |outcome| say.send(outcome.clone()).unwrap());
        scene.orders.send(0).unwrap();
        scene.hear(&said).unwrap(); // the helper drives
    });
}

#[test]
fn the_helper_goes_when_nothing_is_under_way_and_comes_when_nobody_waits() {
    with_a_peer(2, |scene| {
        for _ in 0..3 {
            let (say, said) = channel();
            let waited = scene.receive(0);
            let work = scene.receive(1);
            work.notify(move |outcome| say.send(outcome.clone()).unwrap());
            std::thread::scope(|scope| {
                scope.spawn(|| waited.wait().unwrap());
                scene.until_asleep(1);
                scene.orders.send(0).unwrap();
            });
            scene.orders.send(1).unwrap();
            scene.hear(&said).unwrap();
            scene.until(|_| !scene.fabric.helper_is_called());
        }
    });
}

#[test]
fn the_helper_sleeps_while_nothing_moves() {
    with_a_peer(1, |scene| {
        let work = scene.receive(0);
        scene.until(|state| state.roster.helper_watches());
        scene.orders.send(0).unwrap();
        work.wait().unwrap();
    });
}

#[test]
fn whoever_asks_drives_without_a_helper() {
    with_a_peer(2, |scene| {
        let _held = scene.hold_helper();
        let work = scene.receive(0);
        scene.orders.send(0).unwrap();
        scene.hear(&scene.sent);
        let end = Instant::now() + LOST;
        while !work.is_done() {
            assert!(Instant::now() < end, "not done after {LOST:?}");
            std::thread::yield_now();
        }
    });
}

#[test]
fn a_thread_that_sleeps_in_a_group_that_is_dropped_is_woken() {
    with_a_peer(2, |scene| {
        let _held = scene.hold_helper();
        let (say, said) = channel();
        let work = scene.receive(0);
        std::thread::scope(|scope| {
            scope.spawn(|| say.send(work.wait()).unwrap());
            scene.until_asleep(1);
            drop(scene.groups.remove(0));
            assert!(scene.hear(&said).is_err());
        });
    });
}

#[test]
fn a_work_that_is_aborted_ends_and_the_engine_tells_what_its_groups_do() {
    with_a_peer(1, |scene| {
        let work = scene.receive(0);
        let doing: Vec<u64> = scene.engine.doing().into_iter().map(|(id, _)| id).collect();
        let progress = scene.engine.progress();
        assert_eq!(doing, progress.iter().map(|group| group.id).collect::<Vec<_>>());
        assert_eq!(progress.last().map(|group| &*group.name), Some("g0"));
        let peer = scene.engine.with(|state| {
            let group = state.groups.iter().flatten().last().expect("there is a group");
            group.peers()[0].id()
        });
        assert_eq!(scene.engine.notices(peer), []);
        let waits = scene.engine.waiting_for(peer).expect("the receive waits for it");
        assert!(waits.starts_with("rank 1 of group `g0`; "), "{waits}");
        assert_eq!(scene.engine.waiting_for(scene.fabric.id()), None, "nothing waits for this rank itself");
        work.abort("told to");
        assert_eq!(work.wait().unwrap_err().kind(), crate::ErrorKind::Aborted);
        let notices = scene.engine.notices(peer);
        assert_eq!(notices.len(), 1);
        assert_eq!(Some(&notices[0].0), doing.last());
        assert!(String::from_utf8_lossy(&notices[0].1).contains("told to"));
    });
}

#[test]
fn a_sleep_is_as_long_as_its_limit_unless_a_bell_rings() {
    let (bell, limit) = (Bell::new().unwrap(), Duration::from_millis(30));
    let start = Instant::now();
    sleep_on(Some(&bell), &[], Some(bell.as_fd()), limit);
    assert!(start.elapsed() >= limit);
    bell.ring();
    sleep_on(Some(&bell), &[], None, LOST * 100);
    sleep_on(None, &[], Some(bell.as_fd()), LOST * 100);
    assert!(start.elapsed() < LOST * 50);
    let time = timespec(Duration::from_millis(2_500));
    assert_eq!((time.tv_sec, time.tv_nsec), (2, 500_000_000));
}

#[test]
fn a_sleeper_looks_around_as_often_as_it_is_told_to() {
    let engine = Engine::new();
    assert_eq!(engine.look_after(LOOK_EARLY), LOOK_EARLY);
    engine.looks_rarely.store(true, Ordering::Relaxed);
    assert_eq!(engine.look_after(LOOK_EARLY), Duration::from_secs(3600));
}
