//! Recording an operation allocates nothing: with the recorder there are as many allocations as without it. Nor does a short
//! operation on a borrowed slice.

use std::process::Command;

use tenfold::{Buffer, DType, Group, ReduceOp, recorder};

const TIMES: u64 = 5000; // more than the ring holds

/// Allocations of many operations of a group of one, by kind of operation.
fn count() -> Vec<u64> {
    Group::threads(1, |group| {
        let (mut one, mut two) = (Buffer::zeros(DType::F32, 2), Buffer::zeros(DType::F32, 2));
        let mut calls: [Box<dyn FnMut() -> tenfold::Result<()> + '_>; 3] = [
            Box::new(|| group.start_all_reduce(one.lend(), ReduceOp::Sum)?.wait()),
            Box::new(|| group.start_barrier()?.wait()),
            Box::new(|| group.start_broadcast(two.lend(), 0)?.wait()),
        ];
        let mut counts = Vec::new();
        for call in &mut calls {
            call()?; // the first call on a thread gives the thread a name, and makes the plan
            let measured = allocation_counter::measure(|| {
                (0..TIMES).for_each(|_| call().expect("a group of one rank waits for no other"));
            });
            counts.push(measured.count_total);
        }
        Ok(counts)
    })
    .expect("a group of one rank waits for no other")
    .remove(0)
}

/// What [`recording_allocates_nothing`] runs in another process, with the recorder off.
#[test]
fn without_the_recorder() {
    if !recorder::is_on() {
        println!("@ {:?}", count());
    }
}

#[test]
fn recording_allocates_nothing() {
    assert!(recorder::is_on());
    let with = count();
    let program = std::env::current_exe().unwrap();
    let without = Command::new(program)
        .args(["--exact", "without_the_recorder", "--nocapture"])
        .env("TORCH_FR_BUFFER_SIZE", "0")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&without.stdout).into_owned();
    assert!(said.contains(&format!("@ {with:?}")), "with the recorder {with:?}, without it {said}");
    assert_eq!(recorder::entries().len(), 2000);
}

#[test]
fn a_short_operation_on_a_slice_allocates_nothing() {
    let counts = Group::threads(1, |group| {
        let (mut one, mut all, own) = ([1.0_f32; 2], [0_u64], [1_u64]);
        let mut call = || {
            group.all_reduce(&mut one, ReduceOp::Sum)?;
            group.all_gather_into(&mut all, &own)?;
            group.broadcast(&mut one, 0)?;
            group.barrier()
        };
        (0..100).try_for_each(|_| call())?; // until the list of the last calls is full
        let measured = allocation_counter::measure(|| {
            (0..TIMES).for_each(|_| call().expect("no other rank is needed"));
        });
        Ok(measured.count_total)
    });
    assert_eq!(counts.expect("no other rank is needed"), [0]);
}
