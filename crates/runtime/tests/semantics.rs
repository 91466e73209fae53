//! What holds of operations and groups beside their results: order, waiting, callbacks, sub-groups, ends, refusals.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "tests: threads of their own, helpers may fail"
)]

#[path = "semantics/groups.rs"]
mod groups;
#[path = "semantics/refusals.rs"]
mod refusals;
mod support;

use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Barrier};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::Duration;

use refusals::{on_rank_0_of_3, refused};
use support::{Job, Jobs, Rank, local_store};
use tenfold::{
    Buffer, DType, Error, ErrorKind, Group, OpKind, Options, ReduceOp, Result, Seat, SparseTensor, Tag, Work,
};
use tenfold_plan::{Kind, names};
use tenfold_store::{Deadline, HashStore, Request, Response, Store};

const JOBS: Jobs = &[("make_and_drop", groups::make_and_drop)];

#[test]
#[ignore = "a rank, started by the tests"]
fn rank_entry() {
    support::run_as_rank(JOBS);
}

/// Nothing here takes this long unless it hangs.
const LIMIT: Duration = Duration::from_secs(150);

fn ranks<R: Send>(size: usize, body: impl Fn(Group) -> Result<R> + Sync) -> Vec<R> {
    let body = |group: Group| Ok(body(group).unwrap_or_else(|error| panic!("{error}")));
    Group::threads_with(size, &Options::default().timeout(LIMIT), body).unwrap()
}

fn number(value: i64) -> Buffer {
    Buffer::from_slice(&[value])
}

fn value(tensor: &Buffer) -> i64 {
    tensor.as_slice::<i64>()[0]
}

/// The sum of every rank's `own`.
fn sum(group: &Group, own: i64) -> Result<i64> {
    let mut tensor = number(own);
    group.start_all_reduce(tensor.lend(), ReduceOp::Sum)?.wait()?;
    Ok(value(&tensor))
}

// ── roots ──────────────────────────────────────────────────────────────────────────────────────────────────

/// A root runs ahead of the others as far as links hold messages, and then waits.
#[test]
fn a_root_need_not_wait_for_the_others_and_does_not_run_ahead_without_bound() {
    const CALLS: i64 = 2_000;
    let came = AtomicUsize::new(0);
    let barrier = Barrier::new(2);
    ranks(2, |group| {
        if group.rank() == 1 {
            barrier.wait(); // the root has finished its first calls
        }
        let mut tensors: Vec<Buffer> =
            (0..CALLS).map(|call| number(call * (1 - group.rank() as i64))).collect();
        let works: Vec<Work> = tensors
            .iter_mut()
            .map(|tensor| group.start_broadcast(tensor.lend(), 0))
            .collect::<Result<_>>()?;
        if group.rank() == 0 {
            works[..8].iter().try_for_each(|work| work.wait())?;
            let done = works.iter().filter(|work| work.is_done()).count();
            assert!(done < 100, "{done} calls are over, and no rank has read them");
            came.fetch_add(done, Ordering::Relaxed);
            barrier.wait();
        }
        works.iter().try_for_each(|work| work.wait())?;
        drop(works);
        tensors.iter().enumerate().for_each(|(call, tensor)| assert_eq!(value(tensor), call as i64));
        Ok(())
    });
    assert!(came.into_inner() >= 8);
}

// ── results ────────────────────────────────────────────────────────────────────────────────────────────────

/// Elements of f16, all with the same bits.
fn halves(count: usize, bits: u16) -> Buffer {
    let mut tensor = Buffer::zeros(DType::F16, count);
    tensor.as_mut_bytes().chunks_exact_mut(2).for_each(|half| half.copy_from_slice(&bits.to_ne_bytes()));
    tensor
}

fn all_are(tensor: &Buffer, bits: u16) -> bool {
    tensor.as_bytes().chunks_exact(2).all(|half| half == bits.to_ne_bytes())
}

#[test]
fn an_average_that_fits_does_not_overflow_by_any_algorithm() {
    const LARGE: u16 = 0x7b53; // 60,000; f16 ends at 65,504
    for size in [3, 4, 5] {
        for kind in [Kind::AllReduce, Kind::Reduce, Kind::ReduceScatter, Kind::Scan] {
            for algorithm in names(kind) {
                let options = Options::default().timeout(LIMIT).algorithm(kind.name(), algorithm);
                let outcome = Group::threads_with(size, &options, |group| {
                    let (mut own, mut part) = (halves(64 * size, LARGE), halves(64, 0));
                    let work = match kind {
                        Kind::AllReduce => group.start_all_reduce(own.lend(), ReduceOp::Avg)?,
                        Kind::Scan => group.start_scan(own.lend(), ReduceOp::Avg)?,
                        Kind::Reduce => group.start_reduce(own.lend(), ReduceOp::Avg, 1)?,
                        _ => group.start_reduce_scatter_into(part.lend(), own.lend(), ReduceOp::Avg)?,
                    };
                    work.wait()?;
                    Ok(match kind {
                        Kind::AllReduce | Kind::Scan => all_are(&own, LARGE),
                        Kind::Reduce => group.rank() != 1 || all_are(&own, LARGE),
                        _ => all_are(&part, LARGE) && all_are(&own, LARGE), // the input stays as it was
                    })
                });
                assert!(outcome.unwrap().into_iter().all(|right| right), "{} by {algorithm}", kind.name());
            }
        }
    }
}

#[test]
fn a_call_that_is_refused_leaves_the_tensor_as_it_was() {
    let outcome = Group::threads_with(3, &Options::default().timeout(LIMIT), |group| {
        group.abort("test");
        for op in [ReduceOp::PremulSum(0.5), ReduceOp::Avg] {
            let mut tensor = halves(8, 0x3c00);
            let error = group.start_all_reduce(tensor.lend(), op).and_then(|work| work.wait()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Aborted);
            assert!(all_are(&tensor, 0x3c00));
        }
        Ok(())
    });
    outcome.unwrap();
}

// ── joining ────────────────────────────────────────────────────────────────────────────────────────────────

/// A store that keeps what it is asked to remove, as some do.
struct Keeping(HashStore);

impl Store for Keeping {
    fn call(
        &self,
        request: Request<'_>,
        deadline: Deadline,
    ) -> std::result::Result<Response, tenfold_store::Fault> {
        match request {
            Request::Delete { .. } => Ok(Response::Deleted(false)),
            other => self.0.call(other, deadline),
        }
    }
}

fn join(store: &Arc<dyn Store>, rank: usize, timeout: Duration) -> Result<Group> {
    Group::connect(Arc::clone(store), Seat { rank, size: 2 }, Options::new("again").timeout(timeout))
}

#[test]
fn a_rank_that_failed_to_join_and_tries_again_meets_one_that_comes_late() {
    let stores: [Arc<dyn Store>; 2] = [Arc::new(HashStore::new()), Arc::new(Keeping(HashStore::new()))];
    for store in stores {
        for failures in [[1, 0], [0, 2], [2, 1]] {
            for (rank, count) in failures.into_iter().enumerate() {
                for _ in 0..count {
                    let error = join(&store, rank, Duration::from_millis(50)).expect_err("it is alone");
                    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
                }
            }
            std::thread::scope(|threads| {
                let ranks = [0, 1].map(|rank| {
                    let store = &store;
                    threads.spawn(move || {
                        let group = join(store, rank, LIMIT).unwrap();
                        assert_eq!(sum(&group, rank as i64 + 1).unwrap(), 3);
                    })
                });
                ranks.into_iter().for_each(|rank| rank.join().unwrap());
            });
        }
    }
}

// ── roots ──────────────────────────────────────────────────────────────────────────────────────────────────

#[test]
fn roots_that_differ_fail_the_next_call_on_every_rank_at_the_latest() {
    let (shared, tcp) = (Options::default().timeout(LIMIT), Options::default().timeout(LIMIT).only_tcp());
    // With `[1, 0, 3, 2]` all wait and none sends.
    let cases = [[0, 0, 0, 1], [0, 0, 2, 2], [1, 0, 3, 2]];
    for (roots, options) in cases.into_iter().flat_map(|roots| [(roots, &shared), (roots, &tcp)]) {
        let outcomes = Group::threads_with(4, options, |group| {
            let root = roots[group.rank()];
            let first = group.start_broadcast(number(1).lend(), root).and_then(|work| work.wait());
            Ok(first.and_then(|()| sum(&group, 1)).map(drop))
        });
        for outcome in outcomes.unwrap() {
            let error = outcome.expect_err("roots differ");
            assert_eq!(error.kind(), ErrorKind::Mismatch, "{error}");
            assert!(error.message().starts_with("ranks called different operations as #1: "), "{error}");
        }
    }
}

// ── works ──────────────────────────────────────────────────────────────────────────────────────────────────

#[test]
fn works_are_done_in_the_order_of_their_calls() {
    ranks(3, |group| {
        let mut tensors: Vec<Buffer> = (0..50).map(number).collect();
        let works: Vec<Work> = tensors
            .iter_mut()
            .map(|tensor| group.start_all_reduce(tensor.lend(), ReduceOp::Sum).unwrap())
            .collect();
        for (index, work) in works.iter().enumerate() {
            work.wait()?;
            assert!(works[..index].iter().all(Work::succeeded), "one before #{index} is not done");
            assert_eq!(work.sequence_number(), index as u64 + 1);
            assert_eq!(work.kind(), OpKind::AllReduce);
        }
        assert!(tensors.iter().zip(0..).all(|(tensor, index)| value(tensor) == 3 * index));
        Ok(())
    });
}

fn two_hundred_at_once(calls: &Group) -> Result<()> {
    let rank = calls.rank() as i64;
    let mut tensors: Vec<Buffer> = (0..200).map(|index| number(index + rank)).collect();
    let works: Vec<Work> = tensors
        .iter_mut()
        .map(|tensor| calls.start_all_reduce(tensor.lend(), ReduceOp::Sum))
        .collect::<Result<_>>()?;
    for work in works.iter().rev() {
        work.wait()?;
    }
    assert!(tensors.iter().zip(0..).all(|(tensor, index)| value(tensor) == 4 * index + 6));
    Ok(())
}

#[test]
fn two_hundred_operations_may_be_under_way_at_once() {
    ranks(4, |group| two_hundred_at_once(&group));
}

#[test]
fn two_hundred_operations_may_be_under_way_at_once_in_the_background() {
    ranks(4, |group| two_hundred_at_once(&group.background()));
}

#[test]
fn asking_whether_it_is_done_is_enough_to_get_it_done() {
    ranks(3, |group| {
        let mut tensor = number(1);
        let work = group.start_all_reduce(tensor.lend(), ReduceOp::Sum)?;
        while !work.is_done() {
            std::thread::yield_now();
        }
        assert!(work.succeeded() && work.error().is_none());
        assert_eq!(value(&tensor), 3);
        Ok(())
    });
}

#[test]
fn work_in_the_background_gets_done_while_nobody_waits() {
    let (sender, done) = channel();
    let _groups = ranks(2, |group| {
        let work = group.background().start_all_reduce(number(1).lend(), ReduceOp::Sum)?;
        let sender = sender.clone();
        work.on_done(move |outcome| sender.send(outcome.clone()).unwrap());
        Ok(group)
    });
    for _ in 0..2 {
        done.recv_timeout(LIMIT).unwrap().unwrap();
    }
}

#[test]
fn a_wait_that_was_too_short_can_be_repeated() {
    let waited = Barrier::new(2);
    ranks(2, |group| {
        let mut tensor = number(5);
        if group.rank() == 1 {
            waited.wait();
        }
        let work = group.start_all_reduce(tensor.lend(), ReduceOp::Sum)?;
        if group.rank() == 0 {
            let error = work.wait_for(Duration::from_millis(1)).unwrap_err();
            assert_eq!(
                error.to_string(),
                "all_reduce #1 in group `default` failed on rank 0 of 2: not done after a wait of 1.0 ms\n  \
                 hint: it goes on; wait for it again"
            );
            assert!(error.is_timeout() && !work.is_done() && tensor.is_lent());
            assert!(group.failure().is_none(), "nothing has happened to the group");
            waited.wait();
        }
        work.wait()?;
        assert_eq!(value(&tensor), 10);
        Ok(())
    });
}

#[test]
fn the_time_of_a_single_call_may_be_limited() {
    let errors = ranks(2, |group| {
        let impatient = group.with_timeout(Duration::from_millis(50));
        if group.rank() == 1 {
            let mut never = number(0);
            return Ok(group.start_recv(never.lend(), 0, Tag(9))?.wait().unwrap_err());
        }
        let work = impatient.start_all_reduce(number(1).lend(), ReduceOp::Sum)?;
        assert_eq!(work.timeout(), Some(Duration::from_millis(50)));
        Ok(work.wait().unwrap_err())
    });
    assert_eq!((errors[0].kind(), errors[0].peer()), (ErrorKind::Timeout, Some(1)));
    assert_eq!(
        errors[0].hint(),
        Some("rank 1 has called nothing in this group; see its log, or raise `timeout`")
    );
    assert_eq!(errors[1].kind(), ErrorKind::Timeout, "the other rank hears why the group failed");
    assert!(errors[1].message().ends_with("(seen by rank 0)"), "{}", errors[1]);
}

/// Polls on this thread, parked in between.
fn block_on<F: Future>(future: F) -> F::Output {
    struct Unpark(Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(output) => return output,
            Poll::Pending => std::thread::park(),
        }
    }
}

#[test]
fn a_work_that_is_polled_often_keeps_one_waker() {
    struct Count(AtomicUsize);
    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }
    ranks(2, |group| {
        let mut tensor = number(1);
        if group.rank() == 1 {
            group.start_recv(number(0).lend(), 0, Tag(7))?.wait()?; // the other rank has polled
            return group.start_all_reduce(tensor.lend(), ReduceOp::Sum)?.wait();
        }
        let count = Arc::new(Count(AtomicUsize::new(0)));
        let waker = Waker::from(Arc::clone(&count));
        let mut work = pin!(group.background().start_all_reduce(tensor.lend(), ReduceOp::Sum)?);
        for _ in 0..1000 {
            assert!(work.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        }
        group.start_send(number(0).lend(), 1, Tag(7))?.wait()?;
        work.wait()?;
        while Arc::strong_count(&count) > 2 {
            std::thread::yield_now(); // the waker is used and dropped on another thread
        }
        assert_eq!(count.0.load(Ordering::Relaxed), 1);
        Ok(())
    });
}

#[test]
fn a_work_is_a_future() {
    ranks(3, |group| {
        let mut tensors: Vec<Buffer> = (0..20).map(number).collect();
        let works: Vec<Work> = tensors
            .iter_mut()
            .map(|tensor| group.start_all_reduce(tensor.lend(), ReduceOp::Sum))
            .collect::<Result<_>>()?;
        block_on(async {
            for work in works {
                work.await?;
            }
            Ok::<(), Error>(())
        })?;
        assert!(tensors.iter().zip(0..).all(|(tensor, index)| value(tensor) == 3 * index));
        let (mut one, mut two) = (number(1), number(2));
        let both = group.coalesce(|group| {
            Ok(vec![
                group.start_all_reduce(one.lend(), ReduceOp::Sum)?,
                group.start_all_reduce(two.lend(), ReduceOp::Sum)?,
            ])
        })?;
        block_on(both)?;
        assert_eq!((value(&one), value(&two)), (3, 6));
        Ok(())
    });
}

/// Whether a callback has been called, and how what it called ended.
fn messages() -> (Sender<Result<i64>>, Receiver<Result<i64>>) {
    channel()
}

#[test]
fn a_callback_may_call_and_wait() {
    ranks(3, |group| {
        let (sender, called) = messages();
        let work = group.start_all_reduce(number(1).lend(), ReduceOp::Sum)?;
        work.on_done(move |outcome| sender.send(outcome.clone().and_then(|()| sum(&group, 7))).unwrap());
        work.wait()?;
        assert_eq!(called.recv_timeout(LIMIT).unwrap()?, 21);
        Ok(())
    });
}

#[test]
fn a_callback_of_work_in_the_background_may_call_and_wait() {
    ranks(3, |group| {
        let (sender, called) = messages();
        let work = group.background().start_all_reduce(number(1).lend(), ReduceOp::Sum)?;
        work.on_done(move |outcome| sender.send(outcome.clone().and_then(|()| sum(&group, 7))).unwrap());
        assert_eq!(called.recv_timeout(LIMIT).unwrap()?, 21);
        Ok(())
    });
}

#[test]
fn a_callback_on_what_is_done_is_called_at_once() {
    ranks(2, |group| {
        let work = group.start_barrier()?;
        work.wait()?;
        let (sender, called) = messages();
        work.on_done(move |outcome| sender.send(outcome.clone().map(|()| 1)).unwrap());
        assert_eq!(called.try_recv().unwrap()?, 1);
        Ok(())
    });
}

#[test]
fn a_work_that_is_dropped_goes_on() {
    ranks(3, |group| {
        let mut tensor = number(2);
        drop(group.start_all_reduce(tensor.lend(), ReduceOp::Sum)?);
        group.start_barrier()?.wait()?;
        assert_eq!(value(&tensor), 6);
        Ok(())
    });
}

#[test]
fn numbers_count_collectives_alike_and_all_calls_of_a_rank() {
    ranks(2, |group| {
        assert_eq!(group.sequence_number(), 0);
        let (rank, mut tensor) = (group.rank(), number(1));
        if rank == 0 {
            group.start_send(tensor.lend(), 1, Tag(0))?.wait()?;
            group.start_send(tensor.lend(), 1, Tag(0))?.wait()?;
        } else {
            group.start_recv(tensor.lend(), 0, Tag(0))?.wait()?;
            group.start_recv_any(tensor.lend(), Tag(0))?.wait()?;
        }
        let work = group.start_all_reduce(tensor.lend(), ReduceOp::Sum)?;
        work.wait()?;
        assert_eq!(
            work.sequence_number(),
            1,
            "messages are not counted: ranks may send different numbers of them"
        );
        assert_eq!(group.sequence_number(), 3);
        Ok(())
    });
}

#[test]
fn a_receive_from_anybody_says_from_whom() {
    ranks(4, |group| {
        if group.rank() > 0 {
            group.start_send(number(group.rank() as i64).lend(), 0, Tag(3))?.wait()?;
            return group.start_barrier()?.wait(); // a rank must not leave before the others are done
        }
        for _ in 1..4 {
            let mut tensor = number(0);
            let work = group.start_recv_any(tensor.lend(), Tag(3))?;
            work.wait()?;
            assert_eq!(work.source(), Some(value(&tensor) as usize));
            assert_eq!(work.kind(), OpKind::RecvAnySource);
        }
        group.start_barrier()?.wait()
    });
}

#[test]
fn two_threads_of_a_rank_may_wait_at_once_on_different_groups() {
    ranks(2, |group| {
        let everybody = [0, 1];
        let groups = [1, 2].map(|name| {
            group.subgroup(&everybody, Options::new(format!("g{name}")).timeout(LIMIT)).unwrap().unwrap()
        });
        std::thread::scope(|scope| {
            let threads = groups.each_ref().map(|group| {
                scope.spawn(|| (0..200).for_each(|round| assert_eq!(sum(group, round).unwrap(), 2 * round)))
            });
            threads.into_iter().for_each(|thread| thread.join().unwrap());
        });
        Ok(())
    });
}

// ── sparse tensors ─────────────────────────────────────────────────────────────────────────────────────────

#[test]
fn sparse_tensors_are_added_where_their_coordinates_meet() {
    ranks(3, |group| {
        let rank = group.rank() as i64;
        // Every rank has (0, 1) twice and (1, rank), with two dense elements each.
        let own = SparseTensor {
            shape: vec![2, 3],
            indices: vec![0, 1, 1, rank, 0, 1],
            dense: 2,
            values: Buffer::from_slice(&[1.0_f32, 2.0, 10.0 + rank as f32, 0.5, 3.0, 4.0]),
        };
        let total = group.all_reduce_sparse(&own)?;
        assert_eq!((total.shape, total.dense), (vec![2, 3], 2));
        assert_eq!(total.indices, [0, 1, 1, 0, 1, 1, 1, 2]);
        assert_eq!(total.values.as_slice::<f32>(), [12.0, 18.0, 10.0, 0.5, 11.0, 0.5, 12.0, 0.5]);
        let none =
            SparseTensor { shape: vec![5], indices: vec![], dense: 1, values: Buffer::zeros(DType::F64, 0) };
        assert_eq!(group.all_reduce_sparse(&none)?.indices, [0; 0]);
        Ok(())
    });
}

#[test]
fn sparse_tensors_that_make_no_sense_are_refused() {
    on_rank_0_of_3(|group| {
        let sparse = |shape: &[usize], indices: &[i64], values: usize| {
            let values = Buffer::zeros(DType::F32, values);
            group.all_reduce_sparse(&SparseTensor {
                shape: shape.into(),
                indices: indices.into(),
                dense: 1,
                values,
            })
        };
        let name = "all_reduce_sparse";
        refused(sparse(&[2, 2], &[0, 1, 1], 1), name, "3 coordinates are not a multiple of 2 dimensions");
        refused(sparse(&[2, 2], &[0, 1], 2), name, "there are 2 values where 1 belong");
        refused(sparse(&[2, 2], &[0, 2], 1), name, "coordinate 2 is outside dimension 1 of 2");
        refused(sparse(&[2], &[-1], 1), name, "coordinate -1 is outside dimension 0 of 2");
    });
}

#[test]
fn tensors_that_are_not_contiguous_are_handled_right() {
    Group::threads(3, |group| {
        let rank = group.rank() as f32;
        // A matrix of 2 rows and 3 columns; its middle column is summed, its first row is broadcast backwards.
        let mut matrix = Buffer::from_slice(&[0.0_f32, 1.0, 2.0, 10.0, 11.0, 12.0]);
        group.start_all_reduce(matrix.lend_strided(1, &[2], &[3]), ReduceOp::Sum)?.wait()?;
        assert_eq!(matrix.as_slice::<f32>(), [0.0, 3.0, 2.0, 10.0, 33.0, 12.0]);
        group.start_all_reduce(matrix.lend_strided(1, &[2], &[3]), ReduceOp::PremulSum(0.5))?.wait()?;
        assert_eq!(matrix.as_slice::<f32>(), [0.0, 4.5, 2.0, 10.0, 49.5, 12.0]);
        let mut row = Buffer::from_slice(&[rank, rank + 1.0, rank + 2.0]);
        group.start_broadcast(row.lend_strided(2, &[3], &[-1]), 2)?.wait()?;
        assert_eq!(row.as_slice::<f32>(), [2.0, 3.0, 4.0]);
        // The number of each rank goes into every second element.
        let mut all = Buffer::from_slice(&[-1.0_f32; 6]);
        let mut own = Buffer::from_slice(&[rank]);
        group.start_all_gather_into(all.lend_strided(0, &[3], &[2]), own.lend())?.wait()?;
        assert_eq!(all.as_slice::<f32>(), [0.0, -1.0, 1.0, -1.0, 2.0, -1.0]);
        group
            .start_reduce_scatter_into(own.lend(), all.lend_strided(0, &[3], &[2]), ReduceOp::Sum)?
            .wait()?;
        assert_eq!(own.as_slice::<f32>(), [3.0 * rank]);
        let to = (group.rank() + 1) % 3;
        let error = group.start_send(all.lend_strided(0, &[3], &[2]), to, Tag(0)).unwrap_err();
        assert_eq!(
            error.message(),
            "the tensor is not contiguous; collectives take such tensors, messages do not"
        );
        assert!(!all.is_lent(), "a refused tensor is the caller's again");
        let error = group.start_send(own.lend(), to, Tag(u32::MAX)).unwrap_err();
        assert_eq!(error.message(), "tag 4294967295 is out of range: tags are 0 to 4294967279");
        let barrier = group.start_barrier()?;
        barrier.wait()?;
        assert!(matches!(barrier.result(), Some(Ok(()))));
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_monitored_barrier_names_who_is_late() {
    use std::time::Duration;
    let outcomes = Group::threads(3, |group| {
        group.monitored_barrier(Duration::from_secs(20), true)?;
        // Rank 2 does not enter the second one. Its next call reports the failure.
        let outcome = match group.rank() {
            2 => group.start_barrier().and_then(|work| work.wait()),
            _ => group.monitored_barrier(Duration::from_secs(2), true), // time for rank 1 to come
        };
        Ok(outcome.map_err(|error| (error.kind(), error.message().to_string())))
    });
    for outcome in outcomes.unwrap() {
        let (kind, message) = outcome.unwrap_err();
        assert_eq!(kind, ErrorKind::Timeout);
        assert!(message.contains("rank 2 did not reach the monitored barrier in 2.0 s"), "{message}");
    }
}
