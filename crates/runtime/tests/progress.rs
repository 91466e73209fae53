//! Whatever is under way makes progress: while another thread waits, after it stopped waiting, and while no thread waits;
//! whatever a callback does; and whichever peer does not read.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "tests: threads of their own, helpers may fail"
)]

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Barrier, Mutex};
use std::time::{Duration, Instant};

use tenfold::{Buffer, CustomOp, DType, ErrorKind, Group, Options, ReduceOp, Result, Seat, Tag, Work};

/// Nothing here takes this long unless it hangs.
const LIMIT: Duration = Duration::from_secs(30);

fn ranks<R: Send>(size: usize, body: impl Fn(Group) -> Result<R> + Sync) -> Vec<R> {
    let body = |group: Group| Ok(body(group).unwrap_or_else(|error| panic!("{error}")));
    Group::threads_with(size, &Options::default().timeout(LIMIT), body).unwrap()
}

fn bytes(count: usize) -> Buffer {
    Buffer::zeros(DType::U8, count)
}

/// An event that one rank signals and another waits for, without a message of the group.
struct Event(Sender<()>, Mutex<Receiver<()>>);

impl Event {
    fn new() -> Event {
        let (sender, receiver) = channel();
        Event(sender, Mutex::new(receiver))
    }

    fn signal(&self) {
        self.0.send(()).unwrap();
    }

    fn wait(&self) {
        self.1.lock().unwrap().recv_timeout(LIMIT).expect("the event is signalled in time");
    }
}

/// Returns once a thread sleeps: here, in `wait`.
fn until_asleep(thread: rustix::thread::Pid) {
    let (file, start) = (format!("/proc/self/task/{thread}/stat"), Instant::now());
    let sleeps = || {
        let stat = std::fs::read_to_string(&file).unwrap();
        stat.rsplit_once(") ").is_some_and(|(_, state)| state.starts_with('S'))
    };
    while !sleeps() {
        assert!(start.elapsed() < LIMIT, "the thread does not fall asleep");
        std::thread::yield_now();
    }
}

// ── threads that wait, and threads that do not ──────────────────────────────────────────────────────────────

/// Rank 0 starts an all-reduce while another of its threads waits. That thread stops waiting; rank 0 waits for nothing.
fn goes_on_after_the_last_waiter_has_left(calls: impl Fn(&Group) -> Group + Sync) {
    let (called, left, done) = (Event::new(), Event::new(), Event::new());
    ranks(2, |group| {
        let other = group.subgroup(&[0, 1], Options::new("other").timeout(LIMIT))?.unwrap();
        let (mut word, mut large) = (bytes(1), Buffer::zeros(DType::F32, 1 << 20));
        if group.rank() == 0 {
            std::thread::scope(|scope| {
                let waiting = group.start_recv(word.lend(), 1, Tag(0))?;
                let (tell, told) = channel();
                let waiter = scope.spawn(move || {
                    tell.send(rustix::thread::gettid()).unwrap();
                    waiting.wait()
                });
                until_asleep(told.recv().unwrap());
                let work = calls(&other).start_all_reduce(large.lend(), ReduceOp::Sum)?;
                called.signal();
                waiter.join().unwrap()?;
                left.signal();
                done.wait();
                work.wait()
            })
        } else {
            called.wait();
            group.start_send(word.lend(), 0, Tag(0))?.wait()?;
            left.wait();
            other.start_all_reduce(large.lend(), ReduceOp::Sum)?.wait()?;
            done.signal();
            Ok(())
        }
    });
}

#[test]
fn work_in_the_background_goes_on_after_the_last_waiter_has_left() {
    goes_on_after_the_last_waiter_has_left(Group::background);
}

#[test]
fn an_ordinary_call_goes_on_after_the_last_waiter_has_left() {
    goes_on_after_the_last_waiter_has_left(Group::clone);
}

#[test]
fn an_ordinary_call_goes_on_while_no_thread_waits() {
    let done = Event::new();
    ranks(2, |group| {
        let (mut first, mut second) = (Buffer::zeros(DType::F32, 1 << 20), bytes(4 << 20));
        let work = group.start_all_reduce(first.lend(), ReduceOp::Sum)?;
        if group.rank() == 0 {
            let sending = group.start_send(second.lend(), 1, Tag(0))?;
            done.wait();
            work.wait()?;
            sending.wait()
        } else {
            work.wait()?;
            group.start_recv(second.lend(), 0, Tag(0))?.wait()?;
            done.signal();
            Ok(())
        }
    });
}

#[test]
fn a_call_goes_on_while_its_thread_waits_in_a_group_of_another_family() {
    use tenfold_store::HashStore;
    let stores = [HashStore::new(), HashStore::new()];
    std::thread::scope(|scope| {
        let stores = &stores;
        let body = |rank: usize| {
            let connect = |store: &HashStore, name: &str| {
                let options = Options::new(name).timeout(LIMIT);
                Group::connect(std::sync::Arc::new(store.clone()), Seat { rank, size: 2 }, options).unwrap()
            };
            let (one, other) = (connect(&stores[0], "one"), connect(&stores[1], "other"));
            let (mut large, mut word) = (bytes(4 << 20), bytes(1));
            if rank == 0 {
                let sending = one.start_send(large.lend(), 1, Tag(0)).unwrap();
                other.start_recv(word.lend(), 1, Tag(0)).unwrap().wait().unwrap();
                sending.wait().unwrap();
            } else {
                one.start_recv(large.lend(), 0, Tag(0)).unwrap().wait().unwrap();
                other.start_send(word.lend(), 0, Tag(0)).unwrap().wait().unwrap();
            }
            one.start_barrier().unwrap().wait().unwrap();
        };
        let threads: Vec<_> = (0..2).map(|rank| scope.spawn(move || body(rank))).collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

// ── callbacks ───────────────────────────────────────────────────────────────────────────────────────────────

#[test]
fn a_callback_that_panics_on_a_waiting_thread_stops_nothing_else() {
    let done = Event::new();
    let both = Barrier::new(2);
    ranks(2, |group| {
        let mut first = Buffer::zeros(DType::F32, 1 << 20);
        let work = group.start_all_reduce(first.lend(), ReduceOp::Sum)?;
        let (sender, told) = channel();
        if group.rank() == 0 {
            work.on_done(|_| panic!("a mistake in a callback, on purpose"));
            work.on_done(move |_| sender.send(()).unwrap());
        }
        let _ = std::thread::spawn(move || work.wait()).join(); // as a pool of threads would
        both.wait();
        let mut second = Buffer::zeros(DType::F32, 1 << 20);
        if group.rank() == 0 {
            told.recv_timeout(LIMIT).expect("the callbacks behind it are called");
            let work = group.background().start_all_reduce(second.lend(), ReduceOp::Sum)?;
            done.wait();
            work.wait()
        } else {
            group.start_all_reduce(second.lend(), ReduceOp::Sum)?.wait()?;
            done.signal();
            Ok(())
        }
    });
}

#[test]
fn a_callback_that_panics_in_the_background_does_not_lose_later_ones() {
    ranks(2, |group| {
        for round in 0..3 {
            let mut tensor = Buffer::zeros(DType::F32, 1 << 18);
            let work = group.background().start_all_reduce(tensor.lend(), ReduceOp::Sum)?;
            let (sender, told) = channel();
            let sender_of_notice = sender.clone();
            work.notify(move |_| {
                sender_of_notice.send(()).unwrap();
                panic!("a mistake in a notice, on purpose ({round})");
            });
            work.on_done(move |_| {
                sender.send(()).unwrap();
                panic!("a mistake in a callback, on purpose ({round})");
            });
            for _ in 0..2 {
                told.recv_timeout(LIMIT).expect("every callback is called");
            }
        }
        Ok(())
    });
}

#[test]
fn a_reduce_operation_that_panics_fails_its_call_on_all_ranks_and_stops_nothing_else() {
    for size in [8, 1 << 20] {
        ranks(3, |group| {
            let other = group.subgroup(&[0, 1, 2], Options::new("other").timeout(LIMIT))?.unwrap();
            let op = ReduceOp::Custom(CustomOp::new("fragile", |_, _, _| panic!("it broke")));
            let mut tensor = bytes(size);
            let called = group.background().start_all_reduce(tensor.lend(), op);
            let error = called.and_then(|work| work.wait()).expect_err("it panics");
            assert_eq!(error.kind(), ErrorKind::Aborted, "{error}");
            assert!(error.to_string().contains("panicked: it broke"), "{error}");
            // The helper is alive: it drives what no thread waits for.
            let done = Event::new();
            let signal = done.0.clone();
            let work = other.background().start_all_reduce(tensor.lend(), ReduceOp::Sum)?;
            work.on_done(move |_| signal.send(()).unwrap());
            done.wait();
            Ok(())
        });
    }
}

#[test]
fn a_callback_that_blocks_on_a_waiting_thread_does_not_block_other_operations() {
    let done = Event::new();
    ranks(2, |group| {
        let other = group.subgroup(&[0, 1], Options::new("other").timeout(LIMIT))?.unwrap();
        let (mut first, mut second) =
            (Buffer::zeros(DType::F32, 1 << 20), Buffer::zeros(DType::F32, 1 << 20));
        let work = group.start_all_reduce(first.lend(), ReduceOp::Sum)?;
        if group.rank() == 0 {
            let pending = other.background().start_all_reduce(second.lend(), ReduceOp::Sum)?;
            std::thread::scope(|scope| {
                // Runs on the waiting thread, and ends only once the other operation has.
                let (sender, told) = channel::<()>();
                work.on_done(move |_| _ = told.recv_timeout(LIMIT));
                let waiter = scope.spawn(|| work.wait());
                done.wait();
                sender.send(()).unwrap();
                waiter.join().unwrap()
            })?;
            pending.wait()
        } else {
            work.wait()?;
            other.start_all_reduce(second.lend(), ReduceOp::Sum)?.wait()?;
            done.signal();
            Ok(())
        }
    });
}

// ── peers that do not read ──────────────────────────────────────────────────────────────────────────────────

#[test]
fn what_one_peer_does_not_read_holds_up_no_message_to_another() {
    for sizes in [vec![1 << 20], vec![8 << 20], vec![1000; 40]] {
        ranks(3, |group| {
            let (mut large, mut small) =
                (sizes.iter().map(|size| bytes(*size)).collect::<Vec<_>>(), bytes(1024));
            match group.rank() {
                0 => {
                    let send = |tensor: &mut Buffer| group.background().start_send(tensor.lend(), 1, Tag(0));
                    let works = large.iter_mut().map(send).collect::<Result<Vec<Work>>>()?;
                    group.background().start_send(small.lend(), 2, Tag(0))?.wait()?;
                    works.iter().try_for_each(Work::wait)
                }
                1 => {
                    group.start_recv(small.lend(), 2, Tag(0))?.wait()?;
                    large.iter_mut().try_for_each(|tensor| group.start_recv(tensor.lend(), 0, Tag(0))?.wait())
                }
                _ => {
                    group.start_recv(small.lend(), 0, Tag(0))?.wait()?;
                    group.start_send(small.lend(), 1, Tag(0))?.wait()
                }
            }
        });
    }
}

#[test]
fn what_no_peer_reads_holds_up_no_collective() {
    ranks(3, |group| {
        let mut incoming: Vec<Buffer> = (0..3).map(|_| bytes(4 << 20)).collect();
        let peers: Vec<usize> = (0..3).filter(|peer| *peer != group.rank()).collect();
        let mut outgoing: Vec<Buffer> = peers.iter().map(|_| bytes(4 << 20)).collect();
        let sends = peers.iter().zip(&mut outgoing);
        let works: Vec<Work> = sends
            .map(|(peer, tensor)| group.background().start_send(tensor.lend(), *peer, Tag(0)))
            .collect::<Result<_>>()?;
        for _ in 0..20 {
            group.start_all_reduce(Buffer::zeros(DType::F32, 1 << 16).lend(), ReduceOp::Sum)?.wait()?;
        }
        for peer in peers {
            group.start_recv(incoming[peer].lend(), peer, Tag(0))?.wait()?;
        }
        works.iter().try_for_each(Work::wait)
    });
}

#[test]
fn messages_with_the_same_tag_are_received_in_order_also_if_one_begins_to_arrive_before_it_is_asked_for() {
    for _ in 0..20 {
        ranks(2, |group| {
            let (mut first, mut second, mut last) = (bytes(3 << 20), bytes(1), bytes(1));
            if group.rank() == 0 {
                first.as_mut_bytes().fill(1);
                second.as_mut_bytes().fill(2);
                let works = [
                    group.background().start_send(first.lend(), 1, Tag(7))?,
                    group.background().start_send(second.lend(), 1, Tag(7))?,
                    group.background().start_send(last.lend(), 1, Tag(8))?,
                ];
                return works.iter().try_for_each(Work::wait);
            }
            // Asks for the last, so that the first is kept while it arrives.
            let waiting = group.start_recv(last.lend(), 0, Tag(8))?;
            let works =
                [group.start_recv(first.lend(), 0, Tag(7))?, group.start_recv(second.lend(), 0, Tag(7))?];
            works.iter().try_for_each(Work::wait)?;
            assert_eq!(
                (first.as_bytes()[0], first.as_bytes()[(3 << 20) - 1], second.as_bytes()[0]),
                (1, 1, 2)
            );
            waiting.wait()
        });
    }
}

#[test]
fn a_receive_from_any_rank_goes_on_after_another_rank_has_left() {
    for options in [Options::default(), Options::default().only_tcp()] {
        let left = Event::new();
        let body = |group: Group| -> Result<()> {
            let mut word = bytes(1000);
            match group.rank() {
                0 => {
                    group.start_recv_any(word.lend(), Tag(1))?.wait()?;
                    group.start_recv_any(word.lend(), Tag(2))?.wait()
                }
                1 => {
                    group.start_send(word.lend(), 0, Tag(1))?.wait()?;
                    drop(group);
                    left.signal();
                    Ok(())
                }
                _ => {
                    left.wait();
                    // Most likely rank 0 has seen by then that rank 1 has left; if not, nothing is tested.
                    std::thread::sleep(Duration::from_millis(300));
                    group.start_send(word.lend(), 0, Tag(2))?.wait()
                }
            }
        };
        Group::threads_with(3, &options.timeout(LIMIT), body).unwrap();
    }
}
