//! What the flight recorder costs: `recorder [ROUNDS]`. An all-reduce of 8 bytes in a group of one, with and without it and
//! at debug level DETAIL, and recording alone: called, begun, ended, of which two looks at the clock are a part.

#![expect(clippy::disallowed_methods, reason = "measures time")]

use std::hint::black_box;
use std::process::Command;
use std::time::{Duration, Instant};

use tenfold::{Buffer, DType, Group, ReduceOp, debug, recorder};

/// Operations of a round: about as long as a process is left alone on a busy machine.
const TIMES: u32 = 1000;

/// Nanoseconds of each, in the best round: the others were disturbed.
fn best(rounds: u32, mut run: impl FnMut(u32)) -> f64 {
    let measure = |_| {
        let start = Instant::now();
        run(TIMES);
        start.elapsed()
    };
    let best = (0..rounds).map(measure).min().unwrap_or(Duration::ZERO);
    best.as_nanos() as f64 / f64::from(TIMES)
}

/// An all-reduce of 8 bytes in a group of one.
fn all_reduce(rounds: u32) -> tenfold::Result<f64> {
    let ns = Group::threads(1, |group| {
        let mut tensor = Buffer::zeros(DType::F32, 2);
        Ok(best(rounds, |times| {
            for _ in 0..times {
                let work =
                    group.start_all_reduce(tensor.lend(), ReduceOp::Sum).expect("nothing is wrong with it");
                work.wait().expect("a group of one rank waits for no other");
            }
        }))
    })?;
    Ok(ns[0])
}

fn main() -> tenfold::Result<()> {
    let rounds: u32 =
        std::env::args().nth(1).map_or(2000, |rounds| rounds.parse().expect("a number of rounds"));
    let ns = all_reduce(rounds)?;
    if !recorder::is_on() {
        println!("all_reduce of 8 bytes, recorder off: {ns:.0} ns");
        return Ok(());
    }
    println!("all_reduce of 8 bytes, recorder on:  {ns:.0} ns");
    let program = std::env::current_exe().expect("this program has a path");
    let off = Command::new(program).arg(rounds.to_string()).env("TORCH_FR_BUFFER_SIZE", "0").status();
    assert!(off.is_ok_and(|status| status.success()), "the same without the recorder");
    println!("called, begun and ended, recorded:   {:.0} ns", best(rounds, recorder::record_for_nothing()));
    let clock = |times| (0..times).for_each(|_| _ = black_box(Instant::now()));
    println!("one look at the clock:               {:.0} ns", best(rounds, clock));
    debug::set_level(debug::Level::Detail);
    println!("all_reduce at debug level DETAIL:    {:.0} ns", all_reduce(rounds.div_ceil(20))?);
    Ok(())
}
