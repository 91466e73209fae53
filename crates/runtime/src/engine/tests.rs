use tenfold_memory::{Buffer, DType, ReduceOp};

use super::*;
use crate::{Group, Options, Tag};

/// Ranks that have left their large group and go on in a small one may spin again.
#[test]
fn a_group_with_more_ranks_than_cores_makes_ranks_yield_only_as_long_as_it_exists() {
    let size = crate::group::usable_cores() + 1;
    let options = Options::default().timeout(Duration::from_secs(100));
    let is_crowded = |group: &Group| group.fabric().engine.with(|state| state.patience.is_crowded());
    let outcome = Group::threads_with(size, &options, |group| {
        assert!(is_crowded(&group));
        let alone = group.subgroup(&[group.rank()], Options::new(format!("alone{}", group.rank())));
        group.start_barrier()?.wait()?;
        let alone = alone?.expect("this rank is in it");
        assert!(is_crowded(&alone));
        drop(group);
        assert!(!is_crowded(&alone));
        Ok(())
    });
    outcome.unwrap();
}

#[test]
fn an_operation_is_polled_in_its_call_only_if_it_is_short_and_nothing_is_before_it() {
    for urgency in [Urgency::Quick, Urgency::Patient, Urgency::Background] {
        assert_eq!(urgency.turns(true, 9), 0);
    }
    assert_eq!(Urgency::Quick.turns(false, 9), 9);
    assert_eq!(Urgency::Patient.turns(false, 9), 0);
    assert_eq!(Urgency::Background.turns(false, 9), 0);
}

#[test]
fn the_helper_looks_soon_at_operations_that_the_caller_does_not_wait_for() {
    for urgency in [Urgency::Quick, Urgency::Patient, Urgency::Background] {
        assert_eq!(urgency.helper_looks(true), When::Soon, "{urgency:?}: a second operation was started");
    }
    assert_eq!(Urgency::Quick.helper_looks(false), When::Later);
    assert_eq!(Urgency::Patient.helper_looks(false), When::Later);
    assert_eq!(Urgency::Background.helper_looks(false), When::Soon);
}

#[test]
fn a_thread_that_polls_in_its_call_gives_way_to_those_that_wait_for_the_lock() {
    for waiting in 0..3 {
        let crowd = AtomicUsize::new(waiting);
        assert_eq!(Looks { turns: 1, crowd: &crowd }.give_way(), waiting > 0, "{waiting} threads wait");
    }
}

/// Several threads of rank 0 wait at the same time. Each must be woken by the thread that completes its operation. Sleepers
/// wake up by themselves only after an hour, so a lost wake-up is a timeout.
#[test]
fn every_waiter_whose_operation_another_thread_completes_is_woken() {
    const WAITERS: usize = 4;
    let options = Options::default().timeout(Duration::from_secs(30));
    let outcome = Group::threads_with(2, &options, |group| {
        group.fabric().engine.looks_rarely.store(true, Ordering::Relaxed);
        let groups: Vec<Group> = (0..WAITERS)
            .map(|index| group.subgroup(&[0, 1], Options::new(format!("g{index}"))).unwrap().unwrap())
            .collect();
        // Waits all the time, so that it completes operations of the others and does not leave.
        let mut word = Buffer::zeros(DType::U8, 1);
        let last = (group.rank() == 0).then(|| group.start_recv(word.lend(), 1, Tag(0)).unwrap());
        std::thread::scope(|scope| {
            scope.spawn(|| last.map(|last| last.wait().unwrap()));
            for (index, group) in groups.iter().enumerate() {
                scope.spawn(move || {
                    let mut tensor = Buffer::zeros(DType::F32, 1 << 12);
                    for round in 0..150 {
                        // So that threads of rank 0 fall asleep, in changing order.
                        if group.rank() == 1 && (round + index) % 3 == 0 {
                            std::thread::sleep(Duration::from_micros(300 * index as u64));
                        }
                        group.start_all_reduce(tensor.lend(), ReduceOp::Sum).unwrap().wait().unwrap();
                    }
                });
            }
        });
        if group.rank() == 1 {
            group.start_send(Buffer::zeros(DType::U8, 1).lend(), 0, Tag(0))?.wait()?;
        }
        Ok(())
    });
    outcome.unwrap();
}
