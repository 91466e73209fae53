//! State that ranks hand over to others.

#![expect(clippy::unwrap_used, reason = "tests: a helper may fail too")]

mod support;

use std::time::Duration;

use support::{Hosts, Job, Jobs, Rank, local_store, run_as_rank};
use tenfold::{Buffer, DType, ErrorKind, Group, Options, ReduceOp};

/// How long something may take before it is said to hang.
const SOON: Duration = Duration::from_secs(60);

const JOBS: Jobs = &[("hand_over", hand_over)];

#[test]
#[ignore = "a rank, started by the tests"]
fn rank_entry() {
    run_as_rank(JOBS);
}

fn options() -> Options {
    Options::default().timeout(SOON).heartbeat(Duration::from_secs(20))
}

/// Tensors of these lengths, each value different.
fn tensors(lengths: &[usize], factor: f32) -> Vec<Buffer> {
    let tensor = |(number, length): (usize, &usize)| {
        let mut tensor = Buffer::zeros(DType::F32, *length);
        let values = tensor.as_mut_slice::<f32>();
        values.iter_mut().enumerate().for_each(|(at, value)| *value = factor * (number * 31 + at) as f32);
        tensor
    };
    lengths.iter().enumerate().map(tensor).collect()
}

fn same(left: &[Buffer], right: &[Buffer]) -> bool {
    left.iter().zip(right).all(|(left, right)| left.as_slice::<f32>() == right.as_slice::<f32>())
}

#[test]
fn every_target_gets_what_the_sources_have_whoever_they_are() {
    // Pieces are 4 MiB, which is 1 Mi elements.
    let lengths = [3, 0, (1 << 20) + 5, 3 << 20, 1];
    for options in [options(), options().only_tcp()] {
        for (from, to) in
            [(vec![0], vec![1]), (vec![0, 1, 3], vec![2]), (vec![2], vec![3, 0, 1]), (vec![3, 1], vec![0, 2])]
        {
            Group::threads_with(4, &options, |group| {
                let has_it = from.contains(&group.rank());
                let mut own = tensors(&lengths, if has_it { 1.0 } else { -1.0 });
                let mut reports = Vec::new();
                let views = own.iter_mut().map(Buffer::lend).collect();
                group.hand_over(views, &from, &to, |done, all| reports.push((done, all)))?;
                let takes_part = has_it || to.contains(&group.rank());
                assert!(same(&own, &tensors(&lengths, if takes_part { 1.0 } else { -1.0 })));
                assert_eq!(reports.is_empty(), !takes_part);
                assert!(reports.is_sorted() && reports.last().is_none_or(|(done, all)| done == all));
                let mut sum = [1];
                group.all_reduce(&mut sum, ReduceOp::Sum)?; // the group goes on
                assert_eq!(sum, [4]);
                Ok(())
            })
            .unwrap();
        }
    }
}

#[test]
fn tensors_that_lists_or_lengths_tell_apart_are_refused_on_all_ranks() {
    let refused = |lengths: fn(usize) -> Vec<usize>, to: fn(usize) -> Vec<usize>| {
        let errors = Group::threads_with(3, &options(), |group| {
            let mut own = tensors(&lengths(group.rank()), 1.0);
            let views = own.iter_mut().map(Buffer::lend).collect();
            let error = group.hand_over(views, &[0, 2], &to(group.rank()), |_, _| {}).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Mismatch, "{error}");
            group.barrier()?; // the group goes on
            Ok(error.message().to_string())
        });
        let errors = errors.unwrap();
        assert!(errors.iter().all(|error| *error == errors[0]), "{errors:?}");
        errors[0].clone()
    };
    assert_eq!(
        refused(|rank| vec![4; rank / 2 + 1], |_| vec![1]),
        "rank 2 has tensors: 2, bytes: 32; rank 0 has tensors: 1, bytes: 16"
    );
    assert_eq!(
        refused(|rank| if rank == 1 { vec![1, 3] } else { vec![2, 2] }, |_| vec![1]),
        "rank 1 has tensors: 2, bytes: 16; rank 0 has tensors: 2, bytes: 16, of other lengths or dtypes"
    );
    assert_eq!(
        refused(|_| vec![1], |rank| vec![1; rank.min(1)]),
        "rank 1 names other sources or targets than rank 0"
    );
}

#[test]
fn lists_that_make_no_sense_are_refused() {
    let refused = |from: &[usize], to: &[usize]| {
        let errors = Group::threads_with(2, &options(), |group| {
            Ok(group.hand_over(Vec::new(), from, to, |_, _| {}).unwrap_err().message().to_string())
        });
        errors.unwrap()[1].clone()
    };
    assert_eq!(refused(&[0], &[0, 1]), "rank 0 is both a source and a target");
    assert_eq!(refused(&[], &[1]), "no source is given for rank 1");
    assert!(refused(&[0], &[2]).starts_with("rank 2 is out of range"), "{}", refused(&[0], &[2]));
    Group::threads_with(2, &options(), |group| group.hand_over(Vec::new(), &[], &[], |_, _| {})).unwrap();
}

/// Hands over again and again until that fails. Rank 1 is the target.
fn hand_over(rank: &Rank) {
    let group = Group::connect(rank.store(), rank.seat(), options()).unwrap();
    let mut own = Buffer::zeros(DType::F32, 8 << 20);
    loop {
        match group.hand_over(vec![own.lend()], &[0, 2], &[1], |_, _| {}) {
            Ok(()) => rank.event("handed over"),
            Err(error) => return rank.event(format!("raised {:?} {error}", error.peer())),
        }
    }
}

#[test]
fn if_a_source_or_the_target_is_killed_the_others_name_it() {
    for transport in ["auto", "tcp"] {
        for dead in [0, 1] {
            let server = local_store();
            let job = Job::new("hand_over", 3).environment("TENFOLD_TRANSPORT", transport);
            let mut ranks = job.start(server.address());
            ranks.wait_for_all("handed over", SOON);
            ranks.kill(dead);
            for rank in (0..3).filter(|rank| *rank != dead) {
                let event = ranks.wait_for_event(rank, "raised ", SOON);
                assert!(event.text.contains(&format!("Some({dead})")), "{}", event.text);
            }
            drop(ranks);
        }
    }
}

#[test]
fn state_travels_between_hosts() {
    let Some(hosts) = Hosts::near(3) else { return };
    let server = hosts.serve_store();
    let mut ranks = Job::spread("hand_over", 1, &hosts).start(server.address());
    ranks.wait_for_all("handed over", SOON);
    drop(ranks);
}
