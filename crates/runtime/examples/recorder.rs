//! What the flight recorder costs: `recorder [TIMES]`. An all-reduce of 8 bytes in a group of one, with and without it, and
//! recording alone: called, begun, ended.

#![expect(clippy::disallowed_methods, reason = "measures time")]

use std::process::Command;
use std::time::{Duration, Instant};

use tenfold::{DType, Group, ReduceOp, Tensor, recorder};

/// The machine may be busy with other things: the best of so many counts.
const ROUNDS: u32 = 15;

fn best(times: u32, mut run: impl FnMut(u32)) -> f64 {
    let measure = |_| {
        let start = Instant::now();
        run(times / ROUNDS);
        start.elapsed()
    };
    let best = (0..ROUNDS).map(measure).min().unwrap_or(Duration::ZERO);
    best.as_nanos() as f64 / f64::from(times / ROUNDS)
}

fn main() -> tenfold::Result<()> {
    let times: u32 =
        std::env::args().nth(1).map_or(1_500_000, |times| times.parse().expect("a number of times"));
    let ns = Group::threads(1, |group| {
        let mut tensor = Tensor::zeros(DType::F32, 2);
        Ok(best(times, |times| {
            for _ in 0..times {
                let work = group.all_reduce(tensor.lend(), ReduceOp::Sum).expect("nothing is wrong with it");
                work.wait().expect("nobody else is needed");
            }
        }))
    })?[0];
    if !recorder::is_on() {
        println!("all_reduce of 8 bytes, recorder off: {ns:.0} ns");
        return Ok(());
    }
    println!("all_reduce of 8 bytes, recorder on:  {ns:.0} ns");
    let program = std::env::current_exe().expect("this program has a path");
    let off = Command::new(program).arg(times.to_string()).env("TORCH_FR_BUFFER_SIZE", "0").status();
    assert!(off.is_ok_and(|status| status.success()), "the same without the recorder");
    println!("called, begun and ended, recorded:   {:.0} ns", best(times, recorder::record_for_nothing));
    Ok(())
}
