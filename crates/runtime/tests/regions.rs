//! Memory in files of another library, registered with groups: peers read it in place, results are right, and nothing of it is
//! left behind.
//!
//! All groups here read in place, also on processors where copies would be faster.

#![expect(clippy::unwrap_used, reason = "tests: helpers may fail")]

mod support;

use std::sync::Arc;
use std::time::Duration;

use support::{Job, Jobs, Rank, local_store, run_as_rank};
use tenfold::raw::Region;
use tenfold::{Buffer, DType, ErrorKind, Group, Options, ReduceOp, Tag};

const JOBS: Jobs = &[
    ("collectives", collectives_as_process),
    ("one_sided", one_sided),
    ("through_subgroups", through_subgroups),
    ("unregister_early", unregister_early),
    ("register_often", register_often),
    ("register_without_the_dead", register_without_the_dead),
    ("register_with_the_stopped", register_with_the_stopped),
    ("over_tcp", over_tcp),
];

#[test]
#[ignore = "a rank, started by the tests"]
fn rank_entry() {
    run_as_rank(JOBS);
}

/// Nothing here takes this long unless it hangs.
const LIMIT: Duration = Duration::from_secs(40);

fn options() -> Options {
    Options::default().timeout(LIMIT).read_in_place()
}

fn connect(rank: &Rank, options: Options) -> Group {
    Group::connect(rank.store(), rank.seat(), options).unwrap()
}

fn in_file(values: &[i64]) -> (Buffer, Arc<Region>) {
    let (mut tensor, region) = Buffer::in_file(DType::I64, values.len()).unwrap();
    tensor.as_mut_slice().copy_from_slice(values);
    (tensor, region)
}

fn numbers(rank: usize, elements: usize) -> Vec<i64> {
    (0..elements).map(|index| (index * (rank + 1)) as i64).collect()
}

/// Of the files of registered tensors as far as they are mapped to be read only: how many mappings, and how many KiB this
/// process has ever read there.
fn mapped_for_reading() -> (usize, usize) {
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let (mut mappings, mut kib, mut inside) = (0, 0, false);
    for line in maps.lines() {
        if line.contains(" r--s ") || line.contains(" rw-s ") || line.contains("-p ") {
            inside = line.contains(" r--s ") && line.contains("memfd:tenfold-tensor");
            mappings += usize::from(inside);
        } else if let Some(rss) = line.strip_prefix("Rss:").filter(|_| inside) {
            kib += rss.trim().trim_end_matches(" kB").parse::<usize>().unwrap();
        }
    }
    (mappings, kib)
}

/// One of each, on memory that every rank has registered.
fn collectives(group: &Group) {
    let (rank, size) = (group.rank(), group.size());
    // Short, a piece and a bit, many pieces.
    for elements in [6, 20_000, 300_000] {
        let own = numbers(rank, elements);
        let (mut tensor, region) = in_file(&own);
        let _registration = group.register(&region).unwrap();
        group.start_all_reduce(tensor.lend(), ReduceOp::Sum).unwrap().wait().unwrap();
        let factor = (size * (size + 1) / 2) as i64;
        let sums = tensor.as_slice::<i64>().iter().enumerate();
        assert!(sums.clone().all(|(index, sum)| *sum == index as i64 * factor), "all_reduce of {elements}");

        let root = size - 1;
        tensor.as_mut_slice().copy_from_slice(&own);
        group.start_broadcast(tensor.lend(), root).unwrap().wait().unwrap();
        assert_eq!(tensor.as_slice::<i64>(), numbers(root, elements), "broadcast of {elements}");

        tensor.as_mut_slice().copy_from_slice(&own);
        let (mut all, region) = in_file(&vec![-1; elements * size]);
        let _second = group.register(&region).unwrap();
        group.start_all_gather_into(all.lend(), tensor.lend()).unwrap().wait().unwrap();
        for (rank, part) in all.as_slice::<i64>().chunks(elements).enumerate() {
            assert_eq!(part, numbers(rank, elements), "all_gather of {elements} from {rank}");
        }

        let (next, before) = ((rank + 1) % size, (rank + size - 1) % size);
        let mut received = Buffer::zeros(DType::I64, elements);
        let sent = group.start_send(tensor.lend(), next, Tag(7)).unwrap();
        group.start_recv(received.lend(), before, Tag(7)).unwrap().wait().unwrap();
        sent.wait().unwrap();
        assert_eq!(received.as_slice::<i64>(), numbers(before, elements), "message of {elements}");
    }
}

/// Every rank registers memory and all read it; how many KiB they had read there before.
fn look_and_read(group: &Group) -> usize {
    let (mut tensor, region) = in_file(&[group.rank() as i64; 10_000]);
    let registration = group.register(&region).unwrap();
    group.start_barrier().unwrap().wait().unwrap();
    let (mappings, before) = mapped_for_reading();
    assert_eq!(mappings, group.size(), "one of each rank's memory, also if ranks are threads");
    group.start_all_reduce(tensor.lend(), ReduceOp::Max).unwrap().wait().unwrap();
    assert!(tensor.as_slice::<i64>().iter().all(|value| *value == group.size() as i64 - 1));
    assert!(mapped_for_reading().1 > 0, "it is read in place");
    group.start_barrier().unwrap().wait().unwrap(); // before a rank takes its memory back
    drop(registration);
    before
}

fn collectives_as_process(rank: &Rank) {
    let group = connect(rank, options().only_shared_memory());
    assert_eq!(look_and_read(&group), 0);
    collectives(&group);
}

#[test]
fn two_and_four_processes_read_registered_memory_in_place() {
    for size in [2, 4] {
        let store = local_store();
        Job::new("collectives", size).start(store.address()).join_well(LIMIT);
    }
}

#[test]
fn threads_read_registered_memory_in_place() {
    for size in [2, 4] {
        Group::threads_with(size, &options(), |group| {
            look_and_read(&group);
            collectives(&group);
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn a_registration_may_outlive_its_group() {
    Group::threads_with(2, &options(), |group| {
        let (tensor, region) = in_file(&[1; 1000]);
        let registration = group.register(&region)?;
        drop(group);
        drop((tensor, registration));
        Ok(())
    })
    .unwrap();
}

/// Only rank 0 has registered its memory.
fn one_sided(rank: &Rank) {
    let group = connect(rank, options());
    let (mut tensor, region) = in_file(&numbers(rank.rank, 50_000));
    let _registration = (rank.rank == 0).then(|| group.register(&region).unwrap());
    group.start_broadcast(tensor.lend(), 0).unwrap().wait().unwrap();
    assert_eq!(tensor.as_slice::<i64>(), numbers(0, 50_000));
    let in_place = mapped_for_reading().1 > 0;
    assert_eq!(in_place, rank.rank != 0, "the others read rank 0's memory, and rank 0 reads none");
    group.start_all_reduce(tensor.lend(), ReduceOp::Sum).unwrap().wait().unwrap();
    let sums = tensor.as_slice::<i64>().iter().enumerate();
    assert!(sums.clone().all(|(index, sum)| *sum == (index * rank.size) as i64));
    group.start_barrier().unwrap().wait().unwrap();
}

#[test]
fn a_rank_may_register_memory_alone() {
    let store = local_store();
    Job::new("one_sided", 3).start(store.address()).join_well(LIMIT);
}

/// What is registered with one group of a family is registered with all, whichever came first.
fn through_subgroups(rank: &Rank) {
    let group = connect(rank, options());
    let halves =
        |name: &str| group.split(Some(rank.rank as u32 % 2), 0, options_named(name)).unwrap().unwrap();
    let before = halves("before");
    let (mut tensor, region) = in_file(&vec![rank.rank as i64; 50_000]);
    let registration = before.register(&region).unwrap();
    let after = halves("after");
    for half in [&before, &after] {
        tensor.as_mut_slice::<i64>().fill(rank.rank as i64);
        half.start_all_reduce(tensor.lend(), ReduceOp::Sum).unwrap().wait().unwrap();
        // Ranks 0 and 2, or 1 and 3.
        let sum = if rank.rank.is_multiple_of(2) { 2 } else { 4 };
        assert!(tensor.as_slice::<i64>().iter().all(|value| *value == sum), "{}", half.name());
    }
    assert!(mapped_for_reading().1 > 0, "in place");
    group.start_all_reduce(tensor.lend(), ReduceOp::Sum).unwrap().wait().unwrap();
    assert!(tensor.as_slice::<i64>().iter().all(|value| *value == 12));

    let error = group.register(&region).unwrap_err();
    assert_eq!(
        error.to_string(),
        format!(
            "register in group `default` failed on rank {} of 4: the region cannot be registered: \
             the memory is registered already",
            rank.rank
        )
    );
    drop(registration);
    drop(before);
    let _again = after.register(&region).unwrap();
    group.start_barrier().unwrap().wait().unwrap();
}

fn options_named(name: &str) -> Options {
    Options::new(name).timeout(LIMIT)
}

#[test]
fn memory_is_registered_with_all_groups_of_a_family() {
    let store = local_store();
    Job::new("through_subgroups", 4).start(store.address()).join_well(LIMIT);
}

/// The sender drops its registration while the receiver has not looked at the message.
fn unregister_early(rank: &Rank) {
    let group = connect(rank, options());
    let values = numbers(3, 10_000);
    group.start_barrier().unwrap().wait().unwrap(); // ranks are connected, so that a message is sent immediately
    if rank.rank == 0 {
        let (mut tensor, region) = in_file(&values);
        let registration = group.register(&region).unwrap();
        let sent = group.start_send(tensor.lend(), 1, Tag(0)).unwrap();
        drop(registration);
        group.start_barrier().unwrap().wait().unwrap();
        sent.wait().unwrap();
        drop((tensor, region));
        // Another one: when it is known, the end of the first is known too.
        let (_tensor, region) = in_file(&[0; 1000]);
        let _registration = group.register(&region).unwrap();
        group.start_barrier().unwrap().wait().unwrap();
        group.start_barrier().unwrap().wait().unwrap();
    } else {
        group.start_barrier().unwrap().wait().unwrap();
        assert_eq!(mapped_for_reading(), (1, 0), "it is kept for the message");
        let mut received = Buffer::zeros(DType::I64, values.len());
        group.start_recv(received.lend(), 0, Tag(0)).unwrap().wait().unwrap();
        assert_eq!(received.as_slice::<i64>(), values);
        group.start_barrier().unwrap().wait().unwrap();
        assert_eq!(mapped_for_reading(), (1, 0), "only the other one, of which nothing was read");
        group.start_barrier().unwrap().wait().unwrap();
    }
}

#[test]
fn a_message_can_be_read_after_its_memory_was_unregistered() {
    let store = local_store();
    Job::new("unregister_early", 2).start(store.address()).join_well(LIMIT);
}

fn register_often(rank: &Rank) {
    let group = connect(rank, options());
    let (_last, last) = in_file(&[0; 1000]);
    let use_one = |number: usize| {
        let (mut tensor, region) = in_file(&[number as i64; 100]);
        let _registration = group.register(&region).unwrap();
        group.start_all_reduce(tensor.lend(), ReduceOp::Sum).unwrap().wait().unwrap();
        assert_eq!(tensor.as_slice::<i64>()[99], (number * rank.size) as i64);
    };
    // What a peer has heard on the way to the last one includes the end of all before.
    let holdings = || {
        let _registration = group.register(&last).unwrap();
        group.start_barrier().unwrap().wait().unwrap();
        let descriptors = std::fs::read_dir("/proc/self/fd").unwrap().count();
        let held = (mapped_for_reading().0, descriptors);
        group.start_barrier().unwrap().wait().unwrap();
        held
    };
    (0..10).for_each(use_one);
    let before = holdings();
    assert_eq!(before.0, rank.size, "one of each rank");
    (10..1010).for_each(use_one);
    assert_eq!(holdings(), before, "mappings and descriptors");
}

#[test]
fn registering_a_thousand_times_leaves_nothing_behind() {
    let store = local_store();
    Job::new("register_often", 3).start(store.address()).join_well(LIMIT);
}

fn register_without_the_dead(rank: &Rank) {
    let group = connect(rank, options());
    // Most of them are connected with rank 0 only.
    let others = group.subgroup(&[0, 1, 3], options_named("others")).unwrap();
    rank.event("ready");
    assert_eq!(rank.order(), "go");
    if let Some(others) = others {
        let (mut tensor, region) = in_file(&[rank.rank as i64; 10_000]);
        let _registration = group.register(&region).unwrap();
        others.start_all_reduce(tensor.lend(), ReduceOp::Sum).unwrap().wait().unwrap();
        assert!(tensor.as_slice::<i64>().iter().all(|sum| *sum == 4));
        assert!(mapped_for_reading().1 > 0, "in place");
        others.start_barrier().unwrap().wait().unwrap();
    }
}

#[test]
fn the_dead_are_not_waited_for() {
    let store = local_store();
    let mut ranks = Job::new("register_without_the_dead", 4).start(store.address());
    ranks.wait_for_all("ready", LIMIT);
    ranks.kill(2);
    ranks.tell_all("go");
    let ended = ranks.join(LIMIT);
    for rank in [0, 1, 3] {
        assert!(ended[rank].status.success(), "rank {rank}: {}", ended[rank].stderr);
    }
}

fn register_with_the_stopped(rank: &Rank) {
    let group = connect(rank, options());
    group.start_barrier().unwrap().wait().unwrap();
    rank.event("ready");
    if rank.rank == 0 {
        let (mut tensor, region) = in_file(&[5; 10_000]);
        assert_eq!(rank.order(), "stopped");
        let error = group.with_timeout(Duration::from_millis(300)).register(&region).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout);
        rank.event(error);
        assert_eq!(rank.order(), "continued");
        let _registration = group.register(&region).unwrap();
        // The late answer has arrived before the answer to this registration, and messages to that rank keep their order.
        let (_other, other) = in_file(&[0; 10]);
        let _second = group.register(&other).unwrap();
        group.start_broadcast(tensor.lend(), 0).unwrap().wait().unwrap();
        group.start_barrier().unwrap().wait().unwrap();
    } else {
        let mut tensor = Buffer::zeros(DType::I64, 10_000);
        group.start_broadcast(tensor.lend(), 0).unwrap().wait().unwrap();
        assert!(tensor.as_slice::<i64>().iter().all(|value| *value == 5));
        let (mappings, kib) = mapped_for_reading();
        assert_eq!(mappings, 2, "what came too late was taken back");
        assert!(kib > 0, "in place");
        group.start_barrier().unwrap().wait().unwrap();
    }
}

#[test]
fn a_rank_that_does_not_answer_is_named_and_harms_nobody() {
    let store = local_store();
    let mut ranks = Job::new("register_with_the_stopped", 2).start(store.address());
    ranks.wait_for_all("ready", LIMIT);
    ranks.stop(1);
    ranks.tell(0, "stopped");
    let error = ranks.wait_for_event(0, "register", LIMIT).text;
    let who = format!("pid {}) did not map the region within", ranks.pid(1));
    assert!(error.contains(&who), "{error}");
    ranks.cont(1);
    ranks.tell(0, "continued");
    ranks.join_well(LIMIT);
}

fn over_tcp(rank: &Rank) {
    let group = connect(rank, options().only_tcp());
    collectives(&group);
    assert_eq!(mapped_for_reading().1, 0, "nothing is read in place");
}

#[test]
fn registering_makes_no_difference_over_tcp() {
    let store = local_store();
    Job::new("over_tcp", 2).start(store.address()).join_well(LIMIT);
}
