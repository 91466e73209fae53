//! Processes that become another group: join, leave, are replaced, merge; and attempts that fail.

#![expect(clippy::unwrap_used, reason = "tests: a helper may fail too")]

mod support;

use std::sync::{Barrier, Mutex};
use std::time::Duration;

use support::{Hosts, Job, Jobs, Rank, local_store, run_as_rank};
use tenfold::store::StoreExt as _;
use tenfold::{Buffer, DType, ErrorKind, Group, Options, Quorum, ReduceOp, Result, Tag};

/// How long something may take before it is said to hang.
const SOON: Duration = Duration::from_secs(60);

const HEARTBEAT_LONG: Duration = Duration::from_secs(20);

const JOBS: Jobs = &[("take_part", take_part)];

#[test]
#[ignore = "a rank, started by the tests"]
fn rank_entry() {
    run_as_rank(JOBS);
}

fn options() -> Options {
    Options::default().timeout(SOON).heartbeat(HEARTBEAT_LONG)
}

/// Every rank sums, sends its number round, and sees what it should.
fn works(group: &Group, rank: usize, size: usize) -> Result<()> {
    assert_eq!((group.rank(), group.size()), (rank, size));
    let mut sum = [1, rank as i64];
    group.all_reduce(&mut sum, ReduceOp::Sum)?;
    assert_eq!(sum, [size as i64, (size * (size - 1) / 2) as i64]);
    // Names of further groups are made from it, and ids from those.
    let names = group.all_gather(group.name().as_bytes())?;
    assert!(names.iter().all(|name| name == group.name().as_bytes()), "{names:?}");
    if size > 1 {
        let (to, from) = ((rank + 1) % size, (rank + size - 1) % size);
        let (mut out, mut into) = (Buffer::from_slice(&[rank as u64]), Buffer::zeros(DType::U64, 1));
        let sent = group.start_send(out.lend(), to, Tag(7))?;
        group.start_recv(into.lend(), from, Tag(7))?.wait()?;
        sent.wait()?;
        assert_eq!(into.as_slice::<u64>(), [from as u64]);
    }
    group.barrier()
}

/// Runs `body` as each of so many processes that are alone, with the handles of all.
fn processes<R: Send>(
    count: usize,
    options: &Options,
    body: impl Fn(usize, Group, &[String]) -> Result<R> + Sync,
) -> Vec<R> {
    let (handles, ready) = (Mutex::new(vec![String::new(); count]), Barrier::new(count));
    std::thread::scope(|threads| {
        let start = |me: usize| {
            let (handles, ready, body) = (&handles, &ready, &body);
            threads.spawn(move || {
                let alone = Group::alone(options.clone())?;
                works(&alone, 0, 1)?;
                handles.lock().unwrap()[me] = alone.handle()?;
                ready.wait();
                let handles = handles.lock().unwrap().clone();
                body(me, alone, &handles)
            })
        };
        let all: Vec<_> = (0..count).map(start).collect();
        let all: Vec<_> = all.into_iter().map(|thread| thread.join().unwrap()).collect();
        let errors: Vec<_> = all.iter().filter_map(|result| result.as_ref().err()).collect();
        assert!(errors.is_empty(), "{errors:?}");
        all.into_iter().map(Result::unwrap).collect()
    })
}

#[test]
fn processes_that_are_alone_become_a_group_and_are_alone_again() {
    for options in [options(), options().only_tcp()] {
        processes(4, &options, |me, alone, handles| {
            let group = alone.reconfigure(handles, 1)?;
            works(&group, me, 4)?;
            let error = alone.barrier().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
            assert!(
                error.message().ends_with("this process left the group: it is in `default@1` now"),
                "{error}"
            );
            let again = group.reconfigure(&handles[me..=me], 2)?;
            works(&again, 0, 1)?;
            assert_eq!(again.handle()?, handles[me], "a process has one handle");
            let all = again.reconfigure(handles, 3)?;
            works(&all, me, 4)?;
            let same = all.reconfigure(handles, 4)?;
            works(&same, me, 4)
        });
    }
}

#[test]
fn ranks_leave_at_the_end_and_in_the_middle_join_later_and_change_places() {
    processes(4, &options(), |me, alone, handles| {
        // Process 3 joins later.
        let group = match me {
            3 => alone,
            _ => {
                let three = alone.reconfigure(&handles[..3], 1)?;
                works(&three, me, 3)?;
                three
            }
        };
        let group = group.reconfigure(handles, 2)?;
        works(&group, me, 4)?;
        // Process 1 leaves; the others close up.
        let others: Vec<&String> = [0, 2, 3].iter().map(|other| &handles[*other]).collect();
        let group = match me {
            1 => group.reconfigure(&handles[1..2], 3)?,
            _ => {
                let group = group.reconfigure(&others, 3)?;
                works(&group, [0, 9, 1, 2][me], 3)?;
                group
            }
        };
        // All again, the other way round.
        let reverse: Vec<&String> = handles.iter().rev().collect();
        let group = group.reconfigure(&reverse, 4)?;
        works(&group, 3 - me, 4)
    });
}

#[test]
fn two_groups_merge_and_part_at_the_same_time() {
    processes(4, &options(), |me, alone, handles| {
        let pair = if me < 2 { &handles[..2] } else { &handles[2..] };
        let two = alone.reconfigure(pair, 10 + me as u64 / 2)?;
        works(&two, me % 2, 2)?;
        let four = two.reconfigure(handles, 1)?;
        works(&four, me, 4)?;
        let two = four.reconfigure(pair, 20 + me as u64 / 2)?;
        works(&two, me % 2, 2)
    });
}

#[test]
fn a_revoked_group_is_made_again_and_so_is_one_that_shrank() {
    processes(3, &options(), |me, alone, handles| {
        let group = alone.reconfigure(handles, 1)?;
        if me == 1 {
            group.revoke("a test");
        }
        group.barrier().and_then(|()| group.barrier()).unwrap_err();
        let group = group.reconfigure(handles, 2)?;
        works(&group, me, 3)?;
        if me == 2 {
            let alone = group.reconfigure(&handles[2..], 3)?;
            let group = alone.reconfigure(handles, 4)?;
            return works(&group, me, 3);
        }
        let two = group.shrink_without(&[2])?;
        works(&two, me, 2)?;
        let group = two.reconfigure(handles, 4)?;
        works(&group, me, 3)
    });
}

#[test]
fn an_attempt_that_fails_leaves_every_process_in_its_group_and_may_be_repeated() {
    let brief = Duration::from_secs(2);
    processes(3, &options(), |me, alone, handles| {
        let group = if me < 2 { alone.reconfigure(&handles[..2], 1)? } else { alone };
        if me < 2 {
            // Process 2 does not call.
            let error = group.with_timeout(brief).reconfigure(handles, 2).unwrap_err();
            assert!(error.to_string().contains("each process keeps its group"), "{error}");
            assert!(error.to_string().contains("no connection with rank 2"), "{error}");
            works(&group, me, 2)?;
            let error = group.reconfigure(&handles[..2], 2).unwrap_err();
            assert_eq!(error.message(), "the id 2 was already used");
        }
        // Different lists under the same id.
        let turned = [&handles[1], &handles[0], &handles[2]];
        let straight = [&handles[0], &handles[1], &handles[2]];
        let error = group.reconfigure(if me == 1 { &turned } else { &straight }, 3).unwrap_err();
        assert!(error.to_string().contains("each process keeps its group"), "{error}");
        let size = if me < 2 { 2 } else { 1 };
        works(&group, me % 2, size)?;
        works(&group.reconfigure(handles, 4)?, me, 3)
    });
}

#[test]
fn invalid_lists_are_refused_immediately_and_change_nothing() {
    processes(2, &options(), |me, alone, handles| {
        let message = |list: &[&str], id| alone.reconfigure(list, id).unwrap_err().to_string();
        let own = handles[me].as_str();
        assert!(message(&[own, "tenfold:{}"], 1).contains("handle 1 is invalid: missing field"));
        assert!(
            message(&["gloo:0", own], 1).contains("handle 0 is invalid: it does not begin with `tenfold:`")
        );
        assert!(message(&[own, own], 1).contains("handles 0 and 1 are the same"));
        assert!(message(&[handles[1 - me].as_str()], 1).contains("does not contain this process"));
        let none: [&str; 0] = [];
        assert!(message(&none, 1).contains("does not contain this process"));
        works(&alone.reconfigure(handles, 1)?, me, 2) // the id was not used up
    });
}

#[test]
fn processes_with_different_settings_are_refused_by_name() {
    let handles = Mutex::new(Vec::new());
    let ready = Barrier::new(2);
    std::thread::scope(|threads| {
        for quorum in [Quorum::Living, Quorum::AllReachable] {
            let (handles, ready) = (&handles, &ready);
            threads.spawn(move || {
                let alone = Group::alone(options().quorum(quorum)).unwrap();
                handles.lock().unwrap().push(alone.handle().unwrap());
                ready.wait();
                let error = alone.reconfigure(&handles.lock().unwrap().clone(), 1).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Mismatch, "{error}");
                assert!(error.to_string().contains("quorum AllReachable"), "{error}");
            });
        }
    });
}

/// Takes part in groups as the test orders: `ID PROCESS PROCESS …`. Processes find each other's handles in the store.
fn take_part(rank: &Rank) {
    let store = rank.store();
    let mut group = Group::alone(options()).unwrap();
    store.set(format!("handle/{}", rank.rank), group.handle().unwrap()).unwrap();
    rank.event("ready");
    loop {
        let order = rank.order();
        if order == "end" {
            return;
        }
        let numbers: Vec<u64> = order.split(' ').map(|number| number.parse().unwrap()).collect();
        let handles: Vec<String> = numbers[1..]
            .iter()
            .map(|process| {
                String::from_utf8(store.get(format!("handle/{process}")).unwrap().to_vec()).unwrap()
            })
            .collect();
        match group.reconfigure(&handles, numbers[0]) {
            Ok(next) => group = next,
            Err(error) => {
                rank.event(format!("not {}: {error}", numbers[0]));
                continue;
            }
        }
        rank.event(format!("made {}: rank {} of {}", numbers[0], group.rank(), group.size()));
        let mut error = works(&group, group.rank(), group.size()).err();
        rank.event(format!("worked in {}", numbers[0]));
        if numbers.len() > 2 {
            // Until a process dies, or the order ends it.
            while error.is_none() && !store.check(&[format!("stop/{}", numbers[0])]).unwrap_or(false) {
                error = group.all_reduce(&mut vec![1.0_f32; 1000], ReduceOp::Sum).err();
            }
        }
        if let Some(error) = error {
            rank.event(format!("lost {}: {:?} {error}", numbers[0], error.peer()));
        }
    }
}

#[test]
fn a_killed_process_is_replaced_by_one_that_was_kept_ready() {
    for transport in ["auto", "tcp"] {
        let server = local_store();
        let job = Job::new("take_part", 5).environment("TENFOLD_TRANSPORT", transport);
        let mut ranks = job.start(server.address());
        ranks.wait_for_all("ready", SOON);
        (0..4).for_each(|process| ranks.tell(process, "1 0 1 2 3"));
        for process in 0..4 {
            ranks.wait_for_event(process, "worked in 1", SOON);
        }
        ranks.kill(1);
        for process in [0, 2, 3] {
            let event = ranks.wait_for_event(process, "lost 1: ", SOON);
            assert!(event.text.contains("rank 1 (host"), "{}", event.text);
        }
        for process in [0, 2, 3, 4] {
            ranks.tell(process, "2 0 4 2 3");
        }
        for (process, rank) in [(0, 0), (4, 1), (2, 2), (3, 3)] {
            ranks.wait_for_event(process, &format!("made 2: rank {rank} of 4"), SOON);
            ranks.wait_for_event(process, "worked in 2", SOON);
        }
        drop(ranks);
    }
}

#[test]
fn a_process_that_dies_while_it_is_awaited_ends_the_attempt_of_all_others() {
    let server = local_store();
    let mut ranks = Job::new("take_part", 3).start(server.address());
    ranks.wait_for_all("ready", SOON);
    (0..3).for_each(|process| ranks.tell(process, "1 0 1 2"));
    (0..3).for_each(|process| _ = ranks.wait_for_event(process, "worked in 1", SOON));
    ranks.kill(2);
    for process in [0, 1] {
        ranks.wait_for_event(process, "lost 1: ", SOON);
        ranks.tell(process, "2 0 1 2");
        let event = ranks.wait_for_event(process, "not 2: ", SOON);
        assert!(event.text.contains("lost rank 2; each process keeps its group"), "{}", event.text);
    }
    (0..2).for_each(|process| ranks.tell(process, "3 0 1"));
    (0..2).for_each(|process| _ = ranks.wait_for_event(process, "worked in 3", SOON));
    drop(ranks);
}

#[test]
fn processes_of_different_hosts_become_a_group() {
    let Some(hosts) = Hosts::near(2) else { return };
    let server = hosts.serve_store();
    let mut ranks = Job::spread("take_part", 2, &hosts).start(server.address());
    ranks.wait_for_all("ready", SOON);
    ranks.tell_all("1 0 1 2 3");
    (0..4).for_each(|process| _ = ranks.wait_for_event(process, "worked in 1", SOON));
    ranks.kill(3);
    (0..3).for_each(|process| _ = ranks.wait_for_event(process, "lost 1: ", SOON));
    (0..3).for_each(|process| ranks.tell(process, "2 2 0 1"));
    for (process, rank) in [(2, 0), (0, 1), (1, 2)] {
        ranks.wait_for_event(process, &format!("made 2: rank {rank} of 3"), SOON);
        ranks.wait_for_event(process, "worked in 2", SOON);
    }
    drop(ranks);
}

/// Each time, the survivors and one more process become the group. Nothing hangs, and no sum is wrong (see `works`).
#[test]
fn processes_are_killed_and_replaced_again_and_again() {
    const ACTIVE: usize = 4;
    const ROUNDS: usize = 8;
    let server = local_store();
    let mut ranks = Job::new("take_part", ACTIVE + ROUNDS).start(server.address());
    ranks.wait_for_all("ready", SOON);
    let mut active: Vec<usize> = (0..ACTIVE).collect();
    for round in 0..=ROUNDS {
        let list: Vec<String> = active.iter().map(usize::to_string).collect();
        let order = format!("{} {}", round + 1, list.join(" "));
        active.iter().for_each(|process| ranks.tell(*process, &order));
        for process in &active {
            ranks.wait_for_event(*process, &format!("worked in {}", round + 1), SOON);
        }
        if round < ROUNDS {
            let dead = active[(round * 7 + 3) % ACTIVE];
            ranks.kill(dead);
            for process in active.iter().filter(|process| **process != dead) {
                ranks.wait_for_event(*process, &format!("lost {}: ", round + 1), SOON);
            }
            *active.iter_mut().find(|process| **process == dead).unwrap() = ACTIVE + round;
        }
    }
    drop(ranks);
}

/// Process 2 has never mapped what the others registered before it joined.
#[test]
fn a_process_that_joins_later_is_lent_nothing_from_regions_that_it_does_not_know() {
    let options = options().read_in_place();
    let sums = processes(3, &options, |me, alone, handles| {
        let group = if me < 2 { alone.reconfigure(&handles[..2], 1)? } else { alone };
        let (mut tensor, region) = Buffer::in_file(DType::F32, 1 << 18).expect("there is memory");
        let registration = if me < 2 { Some(group.register(&region)?) } else { None };
        let group = group.reconfigure(handles, 2)?;
        for round in 0..3 {
            tensor.as_mut_slice::<f32>().fill((me + 1) as f32);
            if round == 2 && me == 0 {
                drop(group.register(&Buffer::in_file(DType::F32, 10).expect("there is memory").1)?);
            }
            group.start_all_reduce(tensor.lend(), ReduceOp::Sum)?.wait()?;
            assert!(tensor.as_slice::<f32>().iter().all(|value| *value == 6.0), "round {round}");
        }
        group.barrier()?;
        drop(registration);
        Ok(tensor.as_slice::<f32>()[0])
    });
    assert_eq!(sums, [6.0; 3]);
}
