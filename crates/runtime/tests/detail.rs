//! Debug level DETAIL: what errors tell of calls, and which shapes must agree. The level is the process's, so all that needs
//! it is here; texts without it are in `faults.rs`.

#![expect(clippy::disallowed_methods, reason = "waits for what must not happen")]

use std::time::Duration;

use tenfold::recorder::{self, CallSite, Frame};
use tenfold::{Buffer, Error, ErrorKind, Group, OpKind, Options, ReduceOp, Tag, debug};

/// What each rank's call came to.
fn outcomes(
    size: usize,
    options: &Options,
    call: impl Fn(&Group) -> tenfold::Result<()> + Sync,
) -> Vec<Result<(), Error>> {
    debug::set_level(debug::Level::Detail);
    Group::threads_with(size, options, |group| Ok(call(&group))).expect("the calls are what fails")
}

/// As a language binding calls, from line `line` of train.py.
fn shaped<R>(shape: &[u64], line: u32, call: impl FnOnce() -> R) -> R {
    let frame = |name: &str, line| Frame { name: name.into(), file: "/home/me/train.py".into(), line };
    let site = CallSite {
        frames: vec![frame("step", line), frame("main", 90)],
        input_shapes: Some(vec![shape.to_vec()]),
        output_shapes: Some(vec![shape.to_vec()]),
    };
    recorder::with_call_site(site, call)
}

fn sum(group: &Group, elements: usize) -> tenfold::Result<()> {
    let mut tensor = Buffer::from_slice(&vec![1.0_f32; elements]);
    group.start_all_reduce(tensor.lend(), ReduceOp::Sum)?.wait()
}

#[test]
fn shapes_that_differ_are_a_mismatch_even_where_sizes_agree() {
    for options in [Options::new("shm"), Options::new("tcp").only_tcp()] {
        let call = |group: &Group| {
            shaped(&[6], 1, || sum(group, 6))?;
            let shape = if group.rank() == 2 { [3, 2] } else { [2, 3] };
            shaped(&shape, 42 + group.rank() as u32 / 2, || sum(group, 6))
        };
        for outcome in outcomes(3, &options, call) {
            let error = outcome.expect_err("shapes differ");
            assert_eq!((error.kind(), error.peer()), (ErrorKind::Mismatch, Some(2)));
            assert_eq!(
                error.message(),
                "ranks called different operations as #2: ranks 0, 1 called all_reduce(sum, float32 × 6) \
                 [input 2×3, at train.py:42 in step ← train.py:90 in main]; \
                 rank 2 called all_reduce(sum, float32 × 6) [input 3×2, at train.py:43 in step ← train.py:90 in main]"
            );
        }
    }
}

#[test]
fn roots_that_differ_fail_the_call_itself_on_every_rank_also_in_subgroups() {
    let options = Options::new("roots").timeout(Duration::from_secs(100));
    for roots in [[0, 0, 0, 1], [0, 0, 2, 2], [1, 0, 3, 2]] {
        for in_subgroup in [false, true] {
            let call = |group: &Group| {
                let sub =
                    group.subgroup(&[0, 1, 2, 3], Options::new("sub").timeout(Duration::from_secs(100)))?;
                let sub = sub.expect("all are members");
                let group = if in_subgroup { &sub } else { group };
                let mut tensor = Buffer::from_slice(&[1.0_f32; 500]);
                group.start_broadcast(tensor.lend(), 2)?.wait()?; // what all agree about goes well
                group.start_broadcast(tensor.lend(), roots[group.rank()])?.wait()
            };
            for outcome in outcomes(4, &options, call) {
                let error = outcome.expect_err("roots differ");
                assert_eq!(error.kind(), ErrorKind::Mismatch, "{error}");
                assert_eq!(error.scene().unwrap().label.kind, OpKind::Broadcast, "{error}");
            }
        }
    }
}

#[test]
fn ranks_that_do_not_know_their_shapes_agree_with_all_that_do() {
    for options in [Options::new("shm"), Options::new("tcp").only_tcp()] {
        let call = |group: &Group| match group.rank() {
            0 => sum(group, 6),
            _ => shaped(&[2, 3], 1, || sum(group, 6)),
        };
        for outcome in outcomes(3, &options, call) {
            outcome.expect("sizes agree");
        }
    }
}

#[test]
fn without_a_binding_lengths_and_the_lines_of_the_program_are_told() {
    let line = line!() + 2;
    let call = |group: &Group| match group.rank() {
        0 => group.start_barrier()?.wait(),
        _ => sum(group, 5),
    };
    for outcome in outcomes(2, &Options::new("rust"), call) {
        let error = outcome.expect_err("calls differ");
        let (first, second) = error.message().split_once("; ").expect("two ranks called");
        let barrier = "ranks called different operations as #1: rank 0 called barrier [at ";
        assert!(first.starts_with(barrier), "{first}");
        assert!(first.contains(&format!("detail.rs:{line} in ")), "{first}");
        assert!(
            second.starts_with("rank 1 called all_reduce(sum, float32 × 5) [input 5, at detail.rs:"),
            "{second}"
        );
        let own = error.to_string();
        let own = own.lines().find(|line| line.starts_with("  called ")).expect("its own call").to_string();
        assert!(own.contains("at detail.rs:"), "{own}");
    }
}

#[test]
fn a_timeout_says_where_this_rank_waits() {
    let call = |group: &Group| match group.rank() {
        0 => shaped(&[2, 2], 7, || sum(&group.with_timeout(Duration::from_millis(50)), 4)),
        // Until the other has given up, which it tells.
        _ => {
            while group.failure().is_none() {
                std::thread::sleep(Duration::from_millis(1));
            }
            Ok(())
        }
    };
    let error =
        outcomes(2, &Options::new("late"), call).swap_remove(0).expect_err("the other rank did not join");
    let text = error.to_string();
    assert!(
        text.contains("\n  called with input 2×2 at train.py:7 in step ← train.py:90 in main\n  hint: "),
        "{text}"
    );
}

#[test]
fn a_message_that_nobody_sends_says_so_too() {
    let call = |group: &Group| {
        let mut tensor = Buffer::from_slice(&[0.0_f32; 3]);
        let group = group.with_timeout(Duration::from_millis(50));
        shaped(&[3], 8, || group.start_recv(tensor.lend(), 1 - group.rank(), Tag(0)))?.wait()
    };
    let error = outcomes(2, &Options::new("unsent"), call).swap_remove(0).expect_err("no rank sends");
    assert_eq!(error.scene().unwrap().label.kind, OpKind::Recv);
    let text = error.to_string();
    assert!(text.contains("\n  called with input 3 at train.py:8 in step ← train.py:90 in main"), "{text}");
}

#[test]
fn dumps_have_the_places_of_calls() {
    for outcome in outcomes(1, &Options::new("dumped"), |group| shaped(&[1, 2], 9, || sum(group, 2))) {
        outcome.expect("one rank is enough");
    }
    let entries = recorder::entries();
    let entry = entries.iter().rfind(|entry| entry.group == "dumped").expect("it was recorded");
    assert_eq!(entry.input_shapes, [[1, 2]]);
    assert_eq!((entry.frames[0].name.as_str(), entry.frames[0].line), ("step", 9));
}
