//! Many groups at the same time, and how groups end.

use super::*;

#[test]
fn fifty_groups_at_once_do_not_disturb_each_other() {
    ranks(3, |group| {
        let groups: Vec<Group> = (0..50)
            .map(|number| {
                group
                    .subgroup(&[0, 1, 2], Options::new(format!("g{number}")).timeout(LIMIT))
                    .unwrap()
                    .unwrap()
            })
            .collect();
        for round in 0..5 {
            let mut tensors: Vec<Buffer> = (0..50).map(|index| number(index * round)).collect();
            let mut works: Vec<(usize, Work)> = tensors
                .iter_mut()
                .enumerate()
                .map(|(index, tensor)| {
                    (index, groups[index].start_all_reduce(tensor.lend(), ReduceOp::Sum).unwrap())
                })
                .collect();
            // Every rank waits in an order of its own.
            works.rotate_left(17 * group.rank());
            for (_, work) in works {
                work.wait()?;
            }
            assert!(tensors.iter().zip(0..).all(|(tensor, index)| value(tensor) == 3 * index * round));
        }
        Ok(())
    });
}

#[test]
fn every_choice_of_ranks_can_be_a_subgroup_in_any_direction() {
    ranks(5, |group| {
        for chosen in 1..32_usize {
            let mut members: Vec<usize> = (0..5).filter(|rank| chosen >> rank & 1 == 1).collect();
            for direction in ["up", "down"] {
                let name = format!("{chosen} {direction}");
                let made = group.subgroup(&members, Options::new(name).timeout(LIMIT))?;
                assert_eq!(made.is_some(), members.contains(&group.rank()));
                if let Some(subgroup) = made {
                    assert_eq!(members[subgroup.rank()], group.rank());
                    assert_eq!(subgroup.size(), members.len());
                    let expected: usize = members.iter().map(|rank| 1 << rank).sum();
                    assert_eq!(sum(&subgroup, 1 << group.rank())?, expected as i64);
                }
                members.reverse();
            }
        }
        Ok(())
    });
}

#[test]
fn every_colouring_splits_a_group_as_it_says() {
    ranks(4, |group| {
        for colouring in 0..3_usize.pow(4) {
            let colours: Vec<Option<u32>> = (0..4)
                .map(|rank| (colouring / 3_usize.pow(rank) % 3).checked_sub(1).map(|c| c as u32))
                .collect();
            let rank = group.rank();
            let options = Options::new(format!("c{colouring}")).timeout(LIMIT);
            // Keys run against the ranks, so members are numbered backwards.
            let made = group.split(colours[rank], -(rank as i64), options)?;
            assert_eq!(made.is_some(), colours[rank].is_some());
            let Some(part) = made else { continue };
            let members: Vec<usize> = (0..4).rev().filter(|peer| colours[*peer] == colours[rank]).collect();
            assert_eq!((members[part.rank()], part.size()), (rank, members.len()));
            let expected: usize = members.iter().map(|rank| 1 << rank).sum();
            assert_eq!(sum(&part, 1 << rank)?, expected as i64);
        }
        Ok(())
    });
}

#[test]
fn parts_of_a_split_can_be_split_again() {
    ranks(8, |group| {
        let mut part = group.clone();
        for level in 0..3 {
            let colour = (part.rank() % 2) as u32;
            let options = Options::new(format!("level {level}")).timeout(LIMIT);
            part = part.split(Some(colour), 0, options)?.expect("every rank has a colour");
            assert_eq!(part.size(), 8 >> (level + 1));
        }
        assert_eq!(sum(&part, group.rank() as i64)?, group.rank() as i64);
        assert_eq!(sum(&group, 1)?, 8, "the whole group still works, though its parts are in use");
        Ok(())
    });
}

#[test]
fn groups_may_be_made_and_dropped_a_thousand_times() {
    for carrier in ["shm", "tcp"] {
        let store = local_store();
        let job = Job::new("make_and_drop", 3).environment("TENFOLD_TRANSPORT", carrier);
        job.start(store.address()).join_well(LIMIT);
    }
}

/// What a process holds: descriptors, threads, MiB of shared memory.
pub(super) fn holdings() -> [usize; 3] {
    let count = |path| std::fs::read_dir(path).unwrap().count();
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let shared = status.lines().find_map(|line| line.strip_prefix("RssShmem:")).unwrap();
    let kib: usize = shared.trim().trim_end_matches(" kB").parse().unwrap();
    [count("/proc/self/fd"), count("/proc/self/task"), kib >> 10]
}

pub(super) fn make_and_drop(rank: &Rank) {
    let group = Group::connect(rank.store(), rank.seat(), Options::default().timeout(LIMIT)).unwrap();
    let everybody: Vec<usize> = (0..rank.size).collect();
    let use_one = |number: usize| {
        let options = Options::new(format!("g{number}")).timeout(LIMIT);
        let subgroup = group.subgroup(&everybody, options).unwrap().unwrap();
        let mut tensor = subgroup.shared_buffer(DType::F32, 1000).unwrap();
        subgroup.start_all_reduce(tensor.lend(), ReduceOp::Sum).unwrap().wait().unwrap();
        assert_eq!(sum(&subgroup, 1).unwrap(), rank.size as i64);
    };
    (0..20).for_each(use_one);
    group.start_barrier().unwrap().wait().unwrap();
    let before = holdings();
    (20..1020).for_each(use_one);
    group.start_barrier().unwrap().wait().unwrap();
    let after = holdings();
    let no_more = before.iter().zip(&after).all(|(before, after)| after <= before);
    assert!(no_more, "descriptors, threads, MiB of shared memory: {before:?}, then {after:?}");
}

// ── ends ───────────────────────────────────────────────────────────────────────────────────────────────────

#[test]
fn dropping_a_group_ends_what_is_under_way() {
    let dropped = Barrier::new(2);
    ranks(2, |group| {
        if group.rank() == 1 {
            dropped.wait();
            // What it had sent before it left may be enough for the call that it made, but not for the next.
            let error = sum(&group, 1).and_then(|_| sum(&group, 1)).unwrap_err();
            assert_eq!((error.kind(), error.peer()), (ErrorKind::PeerLost, Some(0)));
            return Ok(());
        }
        let mut tensor = number(1);
        let work = group.start_all_reduce(tensor.lend(), ReduceOp::Sum)?;
        drop(group);
        let error = work.wait().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Closed);
        assert_eq!(error.message(), "the group was dropped while this was under way");
        assert!(work.is_done() && !work.succeeded() && !tensor.is_lent());
        dropped.wait();
        Ok(())
    });
}

#[test]
fn a_failure_ends_nothing_that_was_complete_before_it() {
    for round in 0..200 {
        ranks(3, |group| {
            assert_eq!(sum(&group, 1)?, 3, "round {round}");
            if group.rank() < 2 {
                // The first to notice tells the other, which may still be in the call before.
                let error = sum(&group, 1).unwrap_err();
                assert_eq!((error.kind(), error.peer()), (ErrorKind::PeerLost, Some(2)));
            }
            Ok(())
        });
    }
}

pub(super) fn introduced(rank: usize) -> String {
    let name = rustix::system::uname();
    format!("rank {rank} (host {}, pid {})", name.nodename().to_str().unwrap(), std::process::id())
}

#[test]
fn a_group_that_was_aborted_says_so_to_everybody_for_ever() {
    // No rank aborts before all have called, or leaves before all have raised.
    let (called, heard) = (Barrier::new(3), Barrier::new(3));
    ranks(3, |group| {
        let why = format!("{} aborted the group: loss is not a number", introduced(1));
        let work = group.start_recv(number(1).lend(), (group.rank() + 1) % 3, Tag(0))?;
        called.wait();
        if group.rank() == 1 {
            group.abort("loss is not a number");
        }
        let error = work.wait().unwrap_err();
        assert_eq!((error.kind(), error.peer()), (ErrorKind::Aborted, Some(1)));
        assert_eq!(error.message(), why);
        for error in
            [group.start_barrier().unwrap_err(), group.start_broadcast(number(1).lend(), 0).unwrap_err()]
        {
            assert_eq!(error.message(), format!("the group has failed before: {why}"));
        }
        assert_eq!(group.failure().unwrap().message(), why);
        heard.wait();
        Ok(())
    });
}
