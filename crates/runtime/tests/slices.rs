//! Operations on borrowed slices, blocking and in scopes: what they compute, and that the memory is the caller's again
//! whatever happens.

#![expect(clippy::unwrap_used, reason = "tests: a helper may fail too")]

mod support;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Barrier;
use std::sync::mpsc::channel;
use std::time::Duration;

use support::{Job, Jobs, Rank, local_store, run_as_rank};
use tenfold::{Buffer, ErrorKind, Group, Options, ReduceOp, Result, Tag};

/// How long something may take before it is said to hang.
const SOON: Duration = Duration::from_secs(60);

/// The limit of operations that are to exceed it.
const SHORT: Duration = Duration::from_millis(200);

/// Too long to be done before the call returns.
const LONG: usize = 1 << 20;

const JOBS: Jobs = &[("sum_until_a_rank_dies", sum_until_a_rank_dies)];

#[test]
#[ignore = "a rank, started by the tests"]
fn rank_entry() {
    run_as_rank(JOBS);
}

fn options() -> Options {
    Options::default().timeout(SOON)
}

/// Runs `body` with one to three ranks, over shared memory and over TCP.
fn everywhere(body: impl Fn(&Group) -> Result<()> + Sync) {
    for size in 1..=3 {
        for options in [options(), options().only_tcp()] {
            Group::threads_with(size, &options, |group| body(&group)).unwrap();
        }
    }
}

#[test]
fn every_operation_on_slices_gives_its_result() {
    everywhere(|group| {
        let (rank, size) = (group.rank(), group.size());
        let total = (size * (size + 1) / 2) as f32;
        let own = rank as f32 + 1.0;

        let mut values = [own; 5];
        group.all_reduce(&mut values, ReduceOp::Sum)?;
        assert_eq!(values, [total; 5]);

        let mut values = [rank as u16; 3];
        group.broadcast(&mut values, size - 1)?;
        assert_eq!(values, [size as u16 - 1; 3]);

        let mut values = [own as f64];
        group.reduce(&mut values, ReduceOp::Sum, 0)?;
        assert!(rank > 0 || values == [f64::from(total)]);

        let mut values = [own, -own];
        group.scan(&mut values, ReduceOp::Sum)?;
        let so_far = own * (own + 1.0) / 2.0;
        assert_eq!(values, [so_far, -so_far]);

        let ranks: Vec<i32> = (0..size as i32).collect();
        let mut all = vec![0; size];
        group.all_gather_into(&mut all, &[rank as i32])?;
        assert_eq!(all, ranks);

        let mut all = vec![0; size];
        group.gather_into((rank == 0).then_some(&mut all[..]), &[rank as i32], 0)?;
        assert!(if rank == 0 { all == ranks } else { all == vec![0; size] });
        let gathered = group.gather(&[rank as i32], 0)?;
        assert_eq!(gathered, (rank == 0).then(|| ranks.iter().map(|rank| vec![*rank]).collect()));

        let mut part = [-1];
        group.scatter_from(&mut part, (rank == 0).then_some(&ranks[..]), 0)?;
        assert_eq!(part, [rank as i32]);
        let lists: Vec<&[i32]> = ranks.chunks(1).collect();
        let mut part = [-1];
        group.scatter(&mut part, if rank == 0 { &lists } else { &[] }, 0)?;
        assert_eq!(part, [rank as i32]);

        let inputs: Vec<Vec<f32>> = (0..size).map(|to| vec![own; to + 1]).collect();
        let lists: Vec<&[f32]> = inputs.iter().map(Vec::as_slice).collect();
        let mut part = vec![0.0; rank + 1];
        group.reduce_scatter(&mut part, &lists, ReduceOp::Sum)?;
        assert_eq!(part, vec![total; rank + 1]);
        let mut part = [0.0];
        group.reduce_scatter_into(&mut part, &vec![own; size], ReduceOp::Max)?;
        assert_eq!(part, [size as f32]);

        let mut all = vec![0; size];
        group.all_to_all_single(&mut all, &vec![rank as i32; size], &[], &[])?;
        assert_eq!(all, ranks);
        let splits: Vec<usize> = (0..size).collect();
        let (sent, mut received) = (vec![rank as i32; splits.iter().sum()], vec![0; rank * size]);
        group.all_to_all_single(&mut received, &sent, &vec![rank; size], &splits)?;
        assert_eq!(received, ranks.iter().flat_map(|from| vec![*from; rank]).collect::<Vec<_>>());

        let inputs: Vec<Vec<i32>> = (0..size).map(|to| vec![rank as i32; to]).collect();
        let lists: Vec<&[i32]> = inputs.iter().map(Vec::as_slice).collect();
        let received = group.all_to_all(&lists)?;
        assert_eq!(received, ranks.iter().map(|from| vec![*from; rank]).collect::<Vec<_>>());
        let words = group.all_gather(&vec![7_u8; rank])?;
        assert_eq!(words, (0..size).map(|rank| vec![7; rank]).collect::<Vec<_>>());

        if size > 1 {
            let mut values = [0_i64; 2];
            match rank {
                0 => assert_eq!(group.recv_any(&mut values, Tag(3))?, 1),
                1 => group.send(&[4_i64, 5], 0, Tag(3))?,
                _ => {}
            }
            assert_eq!(values, if rank == 0 { [4, 5] } else { [0, 0] });
            match rank {
                0 => group.send(&[6_i64], 1, Tag(9))?,
                1 => group.recv(&mut values, 0, Tag(9))?,
                _ => {}
            }
            assert_eq!(values, [[4, 5], [6, 0], [0, 0]][rank]);
        }
        group.barrier()
    });
}

#[test]
fn slices_without_elements_are_fine() {
    everywhere(|group| {
        let mut none: [f32; 0] = [];
        group.all_reduce(&mut none, ReduceOp::Sum)?;
        group.broadcast(&mut none, 0)?;
        group.all_gather_into(&mut none, &[])?;
        group.all_to_all_single(&mut none, &[], &[], &[])?;
        assert_eq!(group.all_gather::<f32>(&[])?, vec![Vec::<f32>::new(); group.size()]);
        group.scope(|scope| scope.reduce(&mut none, ReduceOp::Sum, 0)?.wait())
    });
}

#[test]
fn slices_and_buffers_of_two_ranks_meet_in_one_operation() {
    Group::threads_with(2, &options(), |group| {
        let mut sum = vec![1.0_f32; LONG];
        if group.rank() == 0 {
            group.all_reduce(&mut sum, ReduceOp::Sum)?;
        } else {
            let mut buffer = Buffer::from_slice(&sum);
            group.start_all_reduce(buffer.lend(), ReduceOp::Sum)?.wait()?;
            sum = buffer.as_slice().to_vec();
        }
        assert!(sum.iter().all(|value| *value == 2.0));
        Ok(())
    })
    .unwrap();
}

/// A refused call sends nothing, and the group goes on.
#[test]
fn arguments_that_do_not_fit_are_refused_and_the_group_goes_on() {
    Group::threads_with(2, &options(), |group| {
        let (mut values, input) = ([1.0_f32; 3], [1.0_f32; 3]);
        let refusals = [
            group.broadcast(&mut values, 2),
            group.all_gather_into(&mut values, &input),
            group.reduce_scatter(&mut values, &[&input], ReduceOp::Sum),
            group.all_to_all_single(&mut values, &input, &[], &[]),
            group.all_to_all(&[&input[..]]).map(drop),
            group.send(&input, group.rank(), Tag(0)),
            group.recv_any(&mut values, Tag(u32::MAX)).map(drop),
            group.gather(&input, 5).map(drop),
            group.scope(|scope| scope.broadcast(&mut values, 2)?.wait()),
        ];
        for refusal in refusals {
            assert_eq!(refusal.unwrap_err().kind(), ErrorKind::Argument);
        }
        let mut integers = [1_i32];
        let refused = group.all_reduce(&mut integers, ReduceOp::PremulSum(0.5));
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::Argument);
        assert_eq!(values, input);
        group.all_reduce(&mut values, ReduceOp::Sum)?;
        assert_eq!(values, [2.0; 3]);
        Ok(())
    })
    .unwrap();
}

#[test]
fn after_a_timeout_the_slice_is_the_callers_again() {
    for options in [options(), options().only_tcp()] {
        let is_over = Barrier::new(2);
        Group::threads_with(2, &options, |group| {
            if group.rank() == 0 {
                let mut values = vec![1_u32; LONG];
                let outcome = group.with_timeout(SHORT).all_reduce(&mut values, ReduceOp::Sum);
                values.fill(7);
                assert!(outcome.unwrap_err().is_timeout());
                is_over.wait();
                assert!(values.iter().all(|value| *value == 7));
            } else {
                is_over.wait(); // it does not take part
            }
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn after_an_abort_by_another_thread_the_slice_is_the_callers_again() {
    Group::threads_with(2, &options(), |group| {
        if group.rank() == 1 {
            let error = group.barrier().unwrap_err();
            assert!(error.message().contains("enough"), "{error}");
            return Ok(());
        }
        let mut values = vec![1_u32; LONG];
        std::thread::scope(|threads| {
            threads.spawn(|| group.abort("enough"));
            let outcome = group.recv(&mut values, 1, Tag(0));
            assert_eq!(outcome.unwrap_err().kind(), ErrorKind::Aborted);
        });
        values.fill(7);
        Ok(())
    })
    .unwrap();
}

/// The argument: `tcp` or `shm`.
fn sum_until_a_rank_dies(rank: &Rank) {
    let options = if rank.argument == "tcp" { options().only_tcp() } else { options() };
    let group = Group::connect(rank.store(), rank.seat(), options).unwrap();
    for round in 1.. {
        let mut values = vec![1.0_f32; LONG];
        rank.event(format!("round {round}"));
        let outcome = group.all_reduce(&mut values, ReduceOp::Sum);
        values.fill(round as f32); // immediately: nothing else may write here
        let Err(error) = outcome else { continue };
        assert!(values.iter().all(|value| *value == round as f32));
        assert_eq!(error.kind(), ErrorKind::PeerLost, "{error}");
        rank.event("lost a peer");
        break;
    }
    rank.order();
}

#[test]
fn when_a_peer_is_killed_in_the_middle_the_slice_is_the_callers_again() {
    for transport in ["shm", "tcp"] {
        let store = local_store();
        let mut ranks = Job::new("sum_until_a_rank_dies", 3).argument(transport).start(store.address());
        ranks.wait_for_event(1, "round 3", SOON);
        ranks.kill(1);
        for rank in [0, 2] {
            ranks.wait_for_event(rank, "lost a peer", SOON);
        }
        ranks.pass_over(1);
        ranks.tell_all("leave");
        drop(ranks.join(SOON));
    }
}

/// A subscriber that panics when a group fails, which is inside the engine.
struct PanicsOnFailure;

impl tracing_subscriber::Layer<tracing_subscriber::Registry> for PanicsOnFailure {
    fn on_event(
        &self,
        event: &tracing::Event<'_>,
        _: tracing_subscriber::layer::Context<'_, tracing_subscriber::Registry>,
    ) {
        struct Text(String);
        impl tracing::field::Visit for Text {
            fn record_debug(&mut self, _: &tracing::field::Field, value: &dyn std::fmt::Debug) {
                self.0 += &format!("{value:?}");
            }
        }
        let mut text = Text(String::new());
        event.record(&mut text);
        assert!(!text.0.contains("failed:"), "a subscriber that panics");
    }
}

#[test]
fn a_panic_inside_the_engine_leaves_no_view_behind() {
    use tracing_subscriber::layer::SubscriberExt as _;
    let is_over = Barrier::new(2);
    Group::threads_with(2, &options(), |group| {
        if group.rank() == 1 {
            is_over.wait();
            return Ok(());
        }
        let subscriber = tracing_subscriber::registry().with(PanicsOnFailure);
        let mut values = vec![1_u32; LONG];
        let caught = tracing::subscriber::with_default(subscriber, || {
            catch_unwind(AssertUnwindSafe(|| {
                group.with_timeout(SHORT).all_reduce(&mut values, ReduceOp::Sum)
            }))
        });
        values.fill(7);
        // The helper thread, which has no such subscriber, may have noticed the timeout first.
        assert!(caught.is_err() || caught.is_ok_and(|outcome| outcome.is_err()));
        assert!(group.failure().is_some());
        is_over.wait();
        assert!(values.iter().all(|value| *value == 7));
        Ok(())
    })
    .unwrap();
}

// ── scopes ─────────────────────────────────────────────────────────────────────────────────────────────────

#[test]
fn operations_of_a_scope_overlap_and_give_their_results() {
    everywhere(|group| {
        let (rank, size) = (group.rank(), group.size());
        let (mut sum, mut root, mut all) = (vec![1.0_f32; LONG], [rank as i64], vec![0_u8; size]);
        let mut part = [0_i32];
        let own = [rank as u8];
        let answer = group.scope(|scope| {
            let first = scope.all_reduce(&mut sum, ReduceOp::Sum)?;
            let second = scope.broadcast(&mut root, size - 1)?;
            scope.all_gather_into(&mut all, &own)?; // not waited for by name
            scope.reduce_scatter_into(&mut part, ones(size), ReduceOp::Sum)?;
            second.wait()?;
            first.wait()?;
            scope.barrier()?.wait()?;
            Ok(42)
        })?;
        assert_eq!(answer, 42);
        assert!(sum.iter().all(|value| *value == size as f32));
        assert_eq!((root, part), ([size as i64 - 1], [size as i32]));
        assert_eq!(all, (0..size as u8).collect::<Vec<_>>());
        Ok(())
    });
}

/// Ones that live as long as the test.
fn ones(size: usize) -> &'static [i32] {
    &[1; 8][..size]
}

#[test]
fn a_scope_waits_for_an_operation_whose_handle_was_forgotten() {
    Group::threads_with(2, &options(), |group| {
        let mut sum = vec![1_i32; LONG];
        group.scope(|scope| {
            std::mem::forget(scope.all_reduce(&mut sum, ReduceOp::Sum)?);
            Ok(())
        })?;
        assert!(sum.iter().all(|value| *value == 2));
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_scope_that_panics_waits_for_its_operations_first() {
    Group::threads_with(2, &options(), |group| {
        let mut sum = vec![1_i32; LONG];
        let caught = catch_unwind(AssertUnwindSafe(|| {
            group.scope(|scope| -> Result<()> {
                scope.all_reduce(&mut sum, ReduceOp::Sum)?;
                panic!("on purpose")
            })
        }));
        assert_eq!(caught.unwrap_err().downcast_ref(), Some(&"on purpose"));
        assert!(sum.iter().all(|value| *value == 2));
        group.barrier() // the group goes on
    })
    .unwrap();
}

#[test]
fn a_scope_returns_the_error_that_no_caller_asked_for() {
    let is_over = Barrier::new(2);
    Group::threads_with(2, &options(), |group| {
        if group.rank() == 1 {
            is_over.wait();
            return Ok(());
        }
        let patient = group.with_timeout(SHORT);
        let mut value = [0_u8];
        let unasked = patient.scope(|scope| {
            scope.recv(&mut value, 1, Tag(0))?;
            Ok(())
        });
        assert!(unasked.unwrap_err().is_timeout());
        is_over.wait();
        // An error that the body has seen is its own affair; the next operation is refused.
        let outcome = patient.scope(|scope| Ok(scope.recv(&mut value, 1, Tag(0)).is_err()));
        assert!(outcome?);
        Ok(())
    })
    .unwrap();
}

#[test]
fn an_error_that_the_body_has_handled_is_not_returned() {
    let is_over = Barrier::new(2);
    Group::threads_with(2, &options(), |group| {
        if group.rank() == 0 {
            let mut value = [0_u8];
            let seen = group.with_timeout(SHORT).scope(|scope| {
                let error = scope.recv(&mut value, 1, Tag(0))?.wait().unwrap_err();
                Ok(error.is_timeout())
            })?;
            assert!(seen);
        }
        is_over.wait();
        Ok(())
    })
    .unwrap();
}

#[test]
fn the_error_of_the_body_is_returned_after_its_operations_are_done() {
    Group::threads_with(2, &options(), |group| {
        let mut sum = vec![1_i32; LONG];
        let outcome: Result<()> = group.scope(|scope| {
            scope.all_reduce(&mut sum, ReduceOp::Sum)?;
            Err(group.broadcast(&mut [0_u8], 9).unwrap_err())
        });
        assert_eq!(outcome.unwrap_err().kind(), ErrorKind::Argument);
        assert!(sum.iter().all(|value| *value == 2));
        Ok(())
    })
    .unwrap();
}

#[test]
fn scopes_nest() {
    everywhere(|group| {
        let (mut outer, mut inner) = ([1_i64; 100], [1_i64; 100]);
        group.scope(|scope| {
            let first = scope.all_reduce(&mut outer, ReduceOp::Sum)?;
            group.scope(|scope| scope.all_reduce(&mut inner, ReduceOp::Sum)?.wait())?;
            assert_eq!(inner, [group.size() as i64; 100]);
            first.wait()
        })?;
        assert_eq!(outer, [group.size() as i64; 100]);
        Ok(())
    });
}

#[test]
fn two_threads_have_scopes_of_one_group() {
    for options in [options(), options().only_tcp()] {
        Group::threads_with(2, &options, |group| {
            let peer = 1 - group.rank();
            std::thread::scope(|threads| {
                for tag in 0..2 {
                    let group = &group;
                    threads.spawn(move || {
                        let (sent, mut received) = (vec![tag; LONG / 4], vec![0_u32; LONG / 4]);
                        let outcome = group.scope(|scope| {
                            let receiving = scope.recv(&mut received, peer, Tag(tag))?;
                            scope.send(&sent, peer, Tag(tag))?.wait()?;
                            receiving.wait()
                        });
                        outcome.unwrap();
                        assert_eq!(received, sent);
                    });
                }
            });
            group.barrier()
        })
        .unwrap();
    }
}

#[test]
fn threads_share_a_scope() {
    Group::threads_with(2, &options(), |group| {
        let (mut one, mut two) = ([0_u32; 8], [0_u32; 8]);
        let peer = 1 - group.rank();
        group.scope(|scope| {
            std::thread::scope(|threads| {
                let first = threads.spawn(|| scope.recv(&mut one, peer, Tag(1))?.wait());
                let second = threads.spawn(|| scope.recv_any(&mut two, Tag(2))?.wait());
                scope.send(&[1_u32; 8], peer, Tag(1))?;
                scope.send(&[2_u32; 8], peer, Tag(2))?;
                first.join().unwrap()?;
                second.join().unwrap()
            })
        })?;
        assert_eq!((one, two), ([1; 8], [2; 8]));
        Ok(())
    })
    .unwrap();
}

/// A callback runs on the thread that waits, and its panic must not get past the borrowed slice.
#[test]
fn a_callback_that_panics_does_not_end_a_blocking_call() {
    let is_registered = Barrier::new(2);
    Group::threads_with(2, &options(), |group| {
        let (mut word, mut values) = (Buffer::from_slice(&[0_u8]), vec![1_i32; LONG]);
        let (said, hears) = channel();
        if group.rank() == 0 {
            let receiving = group.start_recv(word.lend(), 1, Tag(0))?;
            receiving.on_done(move |_| {
                said.send(()).unwrap();
                panic!("on purpose");
            });
            is_registered.wait();
        } else {
            is_registered.wait();
            group.send(&[1_u8], 0, Tag(0))?;
        }
        group.all_reduce(&mut values, ReduceOp::Sum)?;
        assert!(values.iter().all(|value| *value == 2));
        if group.rank() == 0 {
            hears.recv_timeout(SOON).unwrap();
        }
        group.barrier()
    })
    .unwrap();
}
