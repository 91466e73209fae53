//! Far more ranks than cores: hundreds as threads, dozens as processes.

#![allow(clippy::unwrap_used, reason = "tests: helpers may fail")]

mod support;

use std::time::Duration;

use support::{Job, Jobs, Rank, local_store};
use tenfold::{Buffer, DType, Group, Options, ReduceOp, Result, Tag};

const JOBS: Jobs = &[("crowd", crowd)];

#[test]
#[ignore = "a rank, started by the tests"]
fn rank_entry() {
    support::run_as_rank(JOBS);
}

const LIMIT: Duration = Duration::from_secs(120);

/// One of each, short and long, and what must come out.
fn some_of_everything(group: &Group, long: usize) -> Result<()> {
    let (rank, size) = (group.rank(), group.size());
    let total = (size * (size - 1) / 2) as i64;
    for elements in [1, long] {
        let mut tensor = Buffer::from_slice(&vec![rank as i64; elements]);
        group.start_all_reduce(tensor.lend(), ReduceOp::Sum)?.wait()?;
        assert!(tensor.as_slice::<i64>().iter().all(|sum| *sum == total), "all_reduce of {elements}");

        let root = size / 2;
        let mut tensor = Buffer::from_slice(&vec![rank as i64; elements]);
        group.start_broadcast(tensor.lend(), root)?.wait()?;
        assert!(
            tensor.as_slice::<i64>().iter().all(|value| *value == root as i64),
            "broadcast of {elements}"
        );
    }
    group.start_barrier()?.wait()?;
    let (mut own, mut all) = (Buffer::from_slice(&[rank as i64]), Buffer::zeros(DType::I64, size));
    group.start_all_gather_into(all.lend(), own.lend())?.wait()?;
    assert!(all.as_slice::<i64>().iter().enumerate().all(|(rank, value)| *value == rank as i64));

    // As a list, of which every third tensor is empty.
    let length = |rank: usize| usize::from(rank % 3 != 2);
    let mut own = Buffer::from_slice(&vec![rank as i64; length(rank)]);
    let mut list: Vec<Buffer> = (0..size).map(|rank| Buffer::zeros(DType::I64, length(rank))).collect();
    group.start_all_gather(list.iter_mut().map(Buffer::lend).collect(), own.lend())?.wait()?;
    for (rank, tensor) in list.iter().enumerate() {
        assert!(tensor.as_slice::<i64>().iter().all(|value| *value == rank as i64), "all_gather of {rank}");
    }
    Ok(())
}

#[test]
fn five_hundred_threads_are_a_group() {
    let options = Options::default().timeout(LIMIT);
    Group::threads_with(500, &options, |group| some_of_everything(&group, 100_000)).unwrap();
}

#[test]
fn sixty_four_processes_are_a_group() {
    let store = local_store();
    Job::new("crowd", 64).start(store.address()).join_well(LIMIT);
}

fn crowd(rank: &Rank) {
    let options = Options::default().timeout(LIMIT);
    let group = Group::connect(rank.store(), rank.seat(), options).unwrap();
    some_of_everything(&group, 100_000).unwrap();
}

/// More than a link may have under way. Nothing goes the other way, not even a connection is there.
#[test]
fn a_rank_that_only_receives_gives_credit_to_one_that_only_sends() {
    let options = Options::default().timeout(LIMIT).only_tcp();
    Group::threads_with(2, &options, |group| {
        for round in 0..40 {
            let mut values = vec![group.rank() as u32 + round; 1 << 18];
            if group.rank() == 0 {
                group.send(&values, 1, Tag(3))?;
            } else {
                group.recv(&mut values, 0, Tag(3))?;
                assert!(values.iter().all(|value| *value == round));
            }
        }
        Ok(())
    })
    .unwrap();
}
