//! Ranks that die, freeze or are cut off, and those that continue as a smaller group.

#![expect(clippy::unwrap_used, reason = "tests: a helper may fail too")]

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use support::{Hosts, Job, Jobs, Rank, Ranks, local_store, run_as_rank};
use tenfold::{Error, ErrorKind, Group, Options, Quorum, ReduceOp, Result};

/// How long something may take before it is said to hang.
const SOON: Duration = Duration::from_secs(60);

/// For tests in which no rank must be given up, however busy the machine is.
const HEARTBEAT_LONG: Duration = Duration::from_secs(20);

/// For tests that wait until a rank is given up.
const HEARTBEAT: Duration = Duration::from_secs(2);

const JOBS: Jobs = &[
    ("survive", survive),
    ("survive_the_silent", survive_the_silent),
    ("never_call", never_call),
    ("agree", agree),
];

#[test]
#[ignore = "a rank, started by the tests"]
fn rank_entry() {
    run_as_rank(JOBS);
}

fn options(rank: &Rank) -> Options {
    let options = Options::new("default").timeout(SOON).heartbeat(HEARTBEAT_LONG);
    match rank.argument.split(' ').nth(1) {
        Some("majority") => options.quorum(Quorum::Majority),
        Some("reachable") => options.quorum(Quorum::AllReachable),
        _ => options,
    }
}

/// Sums until that fails, then continues with those that are left, and so on until the test has told all of them to end. The
/// argument: elements, and the quorum.
fn survive(rank: &Rank) {
    survive_with(rank, options(rank));
}

fn survive_the_silent(rank: &Rank) {
    survive_with(rank, options(rank).heartbeat(HEARTBEAT).timeout(Duration::from_secs(10)));
}

fn survive_with(rank: &Rank, options: Options) {
    let mut group = Group::connect(rank.store(), rank.seat(), options).unwrap();
    let ended = Arc::new(AtomicUsize::new(0));
    std::thread::scope(|threads| {
        let told = Arc::clone(&ended);
        threads.spawn(move || {
            rank.order();
            told.store(1, Ordering::Relaxed);
        });
        loop {
            rank.event(format!("rank {} of {} in `{}`", group.rank(), group.size(), group.name()));
            let Err(error) = sum_until_told(rank, &group, &ended) else { return };
            rank.event(format!("raised {:?}\n{error}", error.kind()));
            match group.shrink() {
                Ok(smaller) => group = smaller,
                Err(error) => {
                    rank.event(format!("alone {:?}\n{error}", error.kind()));
                    if error.kind() == ErrorKind::Closed {
                        let again = group.shrink().expect_err("it is not let in again");
                        assert_eq!(again.kind(), ErrorKind::Closed, "{again}");
                    }
                    return;
                }
            }
        }
    });
}

/// Returns once all ranks of the group have been told to end.
fn sum_until_told(rank: &Rank, group: &Group, ended: &AtomicUsize) -> Result<()> {
    let elements: usize = rank.argument.split(' ').next().unwrap().parse().unwrap();
    for round in 1.. {
        let mut values = vec![1.0_f32; elements + 1];
        values[elements] = ended.load(Ordering::Relaxed) as f32;
        group.all_reduce(&mut values, ReduceOp::Sum)?;
        let size = group.size() as f32;
        assert!(values[..elements].iter().all(|value| *value == size), "round {round}: not {size}");
        if round == 1 {
            rank.event(format!("summed {size}"));
        }
        if values[elements] == size {
            break;
        }
    }
    Ok(())
}

/// Which ranks continue, as what.
fn continue_as(ranks: &mut Ranks, survivors: &[usize]) {
    for (now, &rank) in survivors.iter().enumerate() {
        let beginning = format!("rank {now} of {}", survivors.len());
        let event = ranks.wait_for_event(rank, &beginning, SOON);
        println!("rank {rank}: {}", event.text);
    }
    for &rank in survivors {
        ranks.wait_for_event(rank, &format!("summed {}", survivors.len()), SOON);
    }
}

fn end_well(mut ranks: Ranks, dead: &[usize]) {
    ranks.tell_all("end");
    for (rank, ended) in ranks.join(SOON).into_iter().enumerate() {
        assert!(dead.contains(&rank) || ended.status.success(), "rank {rank}: {ended:?}");
    }
}

const TRANSPORTS: [&str; 2] = ["auto", "tcp"];

#[test]
fn survivors_of_a_killed_rank_continue_over_shared_memory_and_tcp() {
    for transport in TRANSPORTS {
        for (elements, dead) in [(1, 2), (300_000, 0), (1000, 3)] {
            let store = local_store();
            let job = Job::new("survive", 4).argument(elements).environment("TENFOLD_TRANSPORT", transport);
            let mut ranks = job.start(store.address());
            ranks.wait_for_all("summed 4", SOON);
            ranks.kill(dead);
            let survivors: Vec<usize> = (0..4).filter(|rank| *rank != dead).collect();
            continue_as(&mut ranks, &survivors);
            end_well(ranks, &[dead]);
        }
    }
}

#[test]
fn survivors_need_no_store_and_shrink_as_often_as_ranks_die() {
    for transport in TRANSPORTS {
        let store = local_store();
        let job = Job::new("survive", 5).argument(1000).environment("TENFOLD_TRANSPORT", transport);
        let mut ranks = job.start(store.address());
        ranks.wait_for_all("summed 5", SOON);
        drop(store);
        let mut alive = vec![0, 1, 2, 3, 4];
        for dead in [0, 3, 1] {
            ranks.kill(dead);
            alive.retain(|rank| *rank != dead);
            continue_as(&mut ranks, &alive);
        }
        end_well(ranks, &[0, 3, 1]);
    }
}

/// On one host a death is seen, so no majority is needed.
#[test]
fn one_of_two_continues_alone_whichever_dies() {
    for dead in [0, 1] {
        let store = local_store();
        let mut ranks = Job::new("survive", 2).argument(10).start(store.address());
        ranks.wait_for_all("summed 2", SOON);
        ranks.kill(dead);
        continue_as(&mut ranks, &[1 - dead]);
        end_well(ranks, &[dead]);
    }
}

#[test]
fn two_ranks_that_die_at_once_are_both_left_out_and_so_is_one_that_dies_during_recovery() {
    let store = local_store();
    let mut ranks = Job::new("survive", 6).argument(1000).start(store.address());
    ranks.wait_for_all("summed 6", SOON);
    ranks.kill(0);
    ranks.kill(4);
    // The lowest that is left leads the agreement.
    ranks.wait_for_event(1, "raised", SOON);
    ranks.kill(1);
    for rank in [2, 3, 5] {
        ranks.wait_for_event(rank, "summed 3", SOON);
    }
    end_well(ranks, &[0, 1, 4]);
}

#[test]
fn without_a_majority_survivors_stop_and_say_what_is_missing() {
    let store = local_store();
    let mut ranks = Job::new("survive_the_silent", 4).argument("10 majority").start(store.address());
    ranks.wait_for_all("summed 4", SOON);
    ranks.kill(0);
    ranks.kill(1);
    ranks.kill(2);
    let event = ranks.wait_for_event(3, "alone", 3 * SOON);
    let text = event.text;
    println!("{text}");
    assert!(
        text.contains("shrink in group `default` failed on rank 3 of 4: no agreement: it needs"),
        "{text}"
    );
    assert!(
        text.contains("more than half of 4 ranks, or half with rank 0; no answer from ranks 0, 1, 2"),
        "{text}"
    );
    drop(ranks);
}

#[test]
fn a_frozen_rank_is_left_out_and_learns_that_when_it_wakes_up() {
    let store = local_store();
    let mut ranks = Job::new("survive_the_silent", 3).argument(10).start(store.address());
    ranks.wait_for_all("summed 3", SOON);
    ranks.stop(1);
    continue_as(&mut ranks, &[0, 2]);
    ranks.cont(1);
    let text = ranks.wait_for_event(1, "alone", 3 * SOON).text;
    assert!(text.contains("ranks 0, 2 agreed without rank 1, which is left out"), "{text}");
    end_well(ranks, &[]);
}

#[test]
fn between_hosts_the_larger_side_of_a_partition_continues_and_the_smaller_one_stops() {
    let Some(hosts) = Hosts::near(3) else { return };
    let store = hosts.serve_store();
    let job = Job::spread("survive_the_silent", 2, &hosts).argument("1000");
    let mut ranks = job.start(store.address());
    ranks.wait_for_all("summed 6", SOON);
    hosts.isolate(0);
    continue_as(&mut ranks, &[2, 3, 4, 5]);
    for rank in [0, 1] {
        let text = ranks.wait_for_event(rank, "alone", 3 * SOON).text;
        println!("{text}");
        assert!(text.contains("no agreement"), "{text}");
    }
    hosts.heal();
    end_well(ranks, &[]);
}

#[test]
fn between_hosts_survivors_of_a_killed_rank_continue() {
    let Some(hosts) = Hosts::near(2) else { return };
    for dead in [0, 3] {
        let store = hosts.serve_store();
        let mut ranks = Job::spread("survive", 2, &hosts).argument("100000").start(store.address());
        ranks.wait_for_all("summed 4", SOON);
        drop(store);
        ranks.kill(dead);
        let survivors: Vec<usize> = (0..4).filter(|rank| *rank != dead).collect();
        continue_as(&mut ranks, &survivors);
        end_well(ranks, &[dead]);
    }
}

/// Rank 2 lives, and does not call.
fn never_call(rank: &Rank) {
    let options = Options::new("default").timeout(Duration::from_secs(4)).heartbeat(HEARTBEAT_LONG);
    let patient = rank.argument == "patient";
    let options = options.patience(if patient { SOON } else { Duration::from_secs(1) });
    let group = Group::connect(rank.store(), rank.seat(), options).unwrap();
    group.barrier().unwrap();
    if rank.rank == 2 {
        rank.order();
        let error = group.shrink().unwrap_err();
        rank.event(format!("{error}"));
    } else {
        match group.shrink() {
            Ok(group) => {
                group.barrier().unwrap();
                rank.event(format!("rank {} of {}", group.rank(), group.size()));
            }
            Err(error) => rank.event(format!("{:?} {:?}\n{error}", error.kind(), error.peer())),
        }
        rank.order();
    }
}

#[test]
fn a_rank_that_does_not_call_is_left_out_after_a_while_and_named_if_there_is_still_patience() {
    let store = local_store();
    let mut ranks = Job::new("never_call", 3).start(store.address());
    for rank in [0, 1] {
        ranks.wait_for_event(rank, &format!("rank {rank} of 2"), SOON);
    }
    ranks.tell(2, "call");
    let text = ranks.wait_for_event(2, "shrink", SOON).text;
    assert!(text.contains("ranks 0, 1 agreed without rank 2, which is left out"), "{text}");
    end_well(ranks, &[]);

    let store = local_store();
    let mut ranks = Job::new("never_call", 3).argument("patient").start(store.address());
    let text = ranks.wait_for_event(0, "Timeout Some(2)", SOON).text;
    assert!(text.contains("no agreement: rank 2 has not called"), "{text}");
    assert!(text.contains("started 4.0") && text.contains("ago, timeout 4.0 s"), "{text}");
    drop(ranks);
}

/// Contributes all bits but that of its rank, again and again.
fn agree(rank: &Rank) {
    let options = Options::new("default").timeout(SOON).heartbeat(HEARTBEAT_LONG);
    let group = Group::connect(rank.store(), rank.seat(), options).unwrap();
    for round in 0.. {
        let all = group.agree(!(1 << rank.rank)).unwrap();
        rank.event(format!("round {round}: {:b}", !all));
        if round > 2 && !all == 0b1101 {
            break;
        }
    }
    rank.order();
}

#[test]
fn ranks_agree_on_a_number_while_others_die() {
    let store = local_store();
    let mut ranks = Job::new("agree", 4).start(store.address());
    ranks.wait_for_all("round 3: 1111", SOON);
    ranks.kill(1);
    end_well(ranks, &[1]);
}

#[test]
fn ranks_that_are_threads_shrink_without_those_that_leave() {
    let results = Group::threads(5, |group| {
        if group.rank() == 3 {
            return Ok((0, 0, 0));
        }
        let mut group = group;
        if group.rank() == 1 {
            group.revoke("a test");
        }
        let error = group.barrier().and_then(|()| group.barrier()).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Aborted | ErrorKind::PeerLost), "{error}");
        group = group.shrink()?;
        let mut sum = [1];
        group.all_reduce(&mut sum, ReduceOp::Sum)?;
        Ok((group.rank(), group.size(), sum[0]))
    });
    assert_eq!(results.unwrap(), [(0, 4, 4), (1, 4, 4), (2, 4, 4), (0, 0, 0), (3, 4, 4)]);
}

#[test]
fn all_ranks_continue_if_none_died_and_some_if_they_are_told_to_do_without_others() {
    let results = Group::threads(4, |group| {
        let all = group.shrink()?;
        assert_eq!((all.rank(), all.size(), all.name()), (group.rank(), 4, "default@2"));
        let mut sum = [1];
        all.all_reduce(&mut sum, ReduceOp::Sum)?;
        assert_eq!(sum, [4]);
        let error = all.shrink_without(&[4]).unwrap_err();
        assert!(error.to_string().contains("rank 4 is out of range"), "{error}");
        let error = all.shrink_without(&[all.rank()]).unwrap_err();
        assert!(error.to_string().contains("is this rank itself"), "{error}");
        if all.rank() == 0 {
            group.barrier()?; // the first group goes on
            return Ok(0);
        }
        let some = all.shrink_without(&[0])?;
        some.all_reduce(&mut sum, ReduceOp::Sum)?;
        group.barrier()?;
        Ok(sum[0])
    });
    assert_eq!(results.unwrap(), [0, 12, 12, 12]);
}

#[test]
fn a_revoked_group_says_who_revoked_it_and_why_on_all_ranks() {
    Group::threads(3, |group| {
        if group.rank() == 2 {
            group.revoke("the loss is not a number");
        }
        let wait = || group.barrier().and_then(|()| group.barrier());
        let error: Error = wait().unwrap_err();
        assert_eq!((error.kind(), error.peer()), (ErrorKind::Aborted, Some(2)));
        assert!(error.message().contains("rank 2 (host "), "{error}");
        assert!(error.message().ends_with(") revoked the group: the loss is not a number"), "{error}");
        Ok(())
    })
    .unwrap();
}
