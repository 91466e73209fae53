//! The operations that training relies on, one by one: those of the store and of a group, checked and timed.

#![expect(clippy::disallowed_methods, reason = "reports how long things took")]

use std::io::{self, Write};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tenfold::{Buffer, DType, Group, ReduceOp, Work};
use tenfold_store::{StoreCollectives, StoreExt, TcpStore};

use super::progress::Screen;
use tenfold_console::show_size;

/// The results of one worker.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Tour {
    /// Workers whose value arrived, and the sum of all workers' numbers squared.
    met: usize,
    sum: i64,
    /// Median microseconds by operation.
    medians: Vec<(String, f64)>,
    collectives: Vec<Collective>,
}

/// How long a collective took on one rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Collective {
    operation: String,
    bytes: usize,
    algorithm: String,
    /// Median microseconds, with tensors in private memory and in shared memory.
    private_us: f64,
    shared_us: f64,
}

/// How much to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Length {
    /// What fits on a line, and takes little time even on a busy machine.
    Short,
    Whole,
}

/// Every worker calls it, with its store and its group.
pub(super) fn take(
    store: &std::sync::Arc<TcpStore>,
    group: &Group,
    operations: u32,
    length: Length,
    limit: Duration,
) -> Result<Tour, Box<dyn std::error::Error>> {
    let (rank, workers) = (group.rank(), group.size());
    let ranks = StoreCollectives::new(store.clone(), rank, workers);
    let names = ranks.all_gather("demo/names", format!("worker {rank}"), limit)?;
    let met = names
        .iter()
        .enumerate()
        .filter(|(rank, name)| ***name == *format!("worker {rank}").as_bytes())
        .count();
    let sum = ranks.all_sum("demo/sum", (rank * rank) as i64, limit)?;
    let medians = store_operations(store, rank, workers, operations)?;
    Ok(Tour { met, sum, medians, collectives: collectives(group, length)? })
}

fn store_operations(
    store: &TcpStore,
    rank: usize,
    workers: usize,
    operations: u32,
) -> tenfold_store::Result<Vec<(String, f64)>> {
    let own = format!("demo/own/{rank}");
    let next = format!("demo/own/{}", (rank + 1) % workers);
    store.set(&own, [7; 64])?;
    let mut medians = Vec::new();
    let mut measure =
        |name: &str, count: u32, mut operation: Box<dyn FnMut(u32) -> tenfold_store::Result<()> + '_>| {
            let mut times = Vec::with_capacity(count as usize);
            for turn in 0..count {
                let begin = Instant::now();
                operation(turn)?;
                times.push(begin.elapsed());
            }
            times.sort_unstable();
            medians.push((name.to_string(), times[times.len() / 2].as_secs_f64() * 1e6));
            Ok::<(), tenfold_store::Error>(())
        };
    measure(
        "set + check",
        operations,
        Box::new(|_| store.set(&own, [8; 64]).and_then(|()| store.check(&[&own]).map(drop))),
    )?;
    measure("get", operations, Box::new(|_| store.get(&next).map(drop)))?;
    measure("add", operations, Box::new(|_| store.add("demo/counter", 1).map(drop)))?;
    measure(
        "barrier",
        operations.min(200),
        Box::new(|turn| store.barrier(format!("demo/barrier/{turn}"), workers)),
    )?;
    Ok(medians)
}

/// Checks sums, and measures a few operations.
fn collectives(group: &Group, length: Length) -> Result<Vec<Collective>, Box<dyn std::error::Error>> {
    let turns_max = if length == Length::Short { 20 } else { 500 };
    let mut rows = Vec::new();
    for elements in [2, 1 << 10, 1 << 16, 1 << 20] {
        let mut tensors = [Buffer::zeros(DType::F32, elements), group.shared_buffer(DType::F32, elements)?];
        for tensor in &mut tensors {
            check_sum(group, tensor)?;
        }
        rows.push(time_both(group, "all_reduce", turns_max, &mut tensors, |group, tensor| {
            group.start_all_reduce(tensor.lend(), ReduceOp::Max)
        })?);
        if length == Length::Whole {
            rows.push(time_both(group, "broadcast", turns_max, &mut tensors, |group, tensor| {
                group.start_broadcast(tensor.lend(), 0)
            })?);
        }
    }
    if length == Length::Whole {
        let mut nothing = [Buffer::zeros(DType::U8, 0), Buffer::zeros(DType::U8, 0)];
        rows.push(time_both(group, "barrier", turns_max, &mut nothing, |group, _| group.start_barrier())?);
    }
    rows.sort_by_key(|row| (row.operation.clone(), row.bytes));
    Ok(rows)
}

/// Every rank contributes its number plus one, plus the position; the sum is known.
fn check_sum(group: &Group, tensor: &mut Buffer) -> Result<(), Box<dyn std::error::Error>> {
    let ranks = group.size();
    for (place, value) in tensor.as_mut_slice::<f32>().iter_mut().enumerate() {
        *value = (group.rank() + 1 + place % 100) as f32;
    }
    group.start_all_reduce(tensor.lend(), ReduceOp::Sum)?.wait()?;
    for (place, value) in tensor.as_slice::<f32>().iter().enumerate() {
        let expected = (ranks * (ranks + 1) / 2 + ranks * (place % 100)) as f32;
        if *value != expected {
            return Err(format!(
                "rank {} got the sum {value} instead of {expected} at {place}",
                group.rank()
            )
            .into());
        }
    }
    Ok(())
}

/// Median times of an operation on a private and on a shared tensor.
fn time_both(
    group: &Group,
    operation: &str,
    turns_max: usize,
    tensors: &mut [Buffer; 2],
    call: impl Fn(&Group, &mut Buffer) -> tenfold::Result<Work>,
) -> tenfold::Result<Collective> {
    let bytes = tensors[0].elements() * tensors[0].dtype().size();
    let turns = ((8 << 20) / bytes.max(1)).clamp(5, turns_max);
    let (mut medians, mut algorithm) = ([0.0; 2], "");
    for (tensor, median) in tensors.iter_mut().zip(&mut medians) {
        group.start_barrier()?.wait()?;
        let mut times = Vec::with_capacity(turns);
        for _ in 0..turns {
            let begin = Instant::now();
            let work = call(group, tensor)?;
            work.wait()?;
            times.push(begin.elapsed());
            algorithm = work.algorithm();
        }
        times.sort_unstable();
        *median = times[turns / 2].as_secs_f64() * 1e6;
    }
    let [private_us, shared_us] = medians;
    let (operation, algorithm) = (operation.to_string(), algorithm.to_string());
    Ok(Collective { operation, bytes, algorithm, private_us, shared_us })
}

/// A worker that did not get all values, or got a wrong sum, is an error.
pub(super) fn check<'a>(tours: impl Iterator<Item = &'a Tour>, workers: usize) -> Result<(), String> {
    let expected: i64 = (0..workers as i64).map(|rank| rank * rank).sum();
    for (rank, Tour { met, sum, .. }) in tours.enumerate() {
        if *met != workers || *sum != expected {
            return Err(format!(
                "worker {rank} got {met} of {workers} values and the sum {sum} instead of {expected}"
            ));
        }
    }
    Ok(())
}

/// Two lines.
pub(super) fn print_short(screen: &mut Screen<impl Write>, tours: &[&Tour]) -> io::Result<()> {
    let store: Vec<String> = store_rows(tours)
        .into_iter()
        .map(|(operation, median)| format!("{operation} {median:.0} µs"))
        .collect();
    screen.line(format_args!("store      {}", store.join(", ")))?;
    let reduces = collective_rows(tours).into_iter().filter(|row| row.operation == "all_reduce");
    let times: Vec<String> =
        reduces.map(|row| format!("{} {}", show_size(row.bytes), show_time(row.shared_us))).collect();
    screen.line(format_args!("all_reduce {}", times.join(", ")))
}

/// Two tables.
pub(super) fn print_whole(screen: &mut Screen<impl Write>, tours: &[&Tour]) -> io::Result<()> {
    screen.line(format_args!("\n{:<14} {:>14} {:>16}", "operation", "median µs", "all workers/s"))?;
    for (operation, median) in store_rows(tours) {
        let rate = tours.len() as f64 * 1e6 / median;
        screen.line(format_args!("{operation:<14} {median:>14.1} {rate:>16.0}"))?;
    }
    screen.line(format_args!(
        "\n{:<14} {:>9} {:>16} {:>12} {:>12} {:>16}",
        "collective", "size", "algorithm", "private µs", "shared µs", "shared GB/s"
    ))?;
    for Collective { operation, bytes, algorithm, private_us, shared_us } in collective_rows(tours) {
        let (size, speed) = match bytes {
            0 => ("".to_string(), "".to_string()),
            bytes => (show_size(bytes), format!("{:.2}", bytes as f64 / shared_us / 1e3)),
        };
        screen.line(format_args!(
            "{operation:<14} {size:>9} {algorithm:>16} {private_us:>12.1} {shared_us:>12.1} {speed:>16}"
        ))?;
    }
    Ok(())
}

/// The median of all workers' medians.
fn store_rows(tours: &[&Tour]) -> Vec<(String, f64)> {
    let row = |(index, (operation, _)): (usize, &(String, f64))| {
        let mut medians: Vec<f64> = tours.iter().map(|tour| tour.medians[index].1).collect();
        medians.sort_unstable_by(f64::total_cmp);
        (operation.clone(), medians[medians.len() / 2])
    };
    tours[0].medians.iter().enumerate().map(row).collect()
}

/// The slowest rank's medians: a collective is complete when its last rank is done.
fn collective_rows(tours: &[&Tour]) -> Vec<Collective> {
    let row = |(index, row): (usize, &Collective)| {
        let slowest = |time: fn(&Collective) -> f64| {
            tours.iter().map(|tour| time(&tour.collectives[index])).fold(0.0, f64::max)
        };
        Collective {
            private_us: slowest(|row| row.private_us),
            shared_us: slowest(|row| row.shared_us),
            ..row.clone()
        }
    };
    tours[0].collectives.iter().enumerate().map(row).collect()
}

fn show_time(microseconds: f64) -> String {
    if microseconds < 10.0 {
        format!("{microseconds:.1} µs")
    } else if microseconds < 10_000.0 {
        format!("{microseconds:.0} µs")
    } else {
        format!("{:.1} ms", microseconds / 1e3)
    }
}
