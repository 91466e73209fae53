//! `tenfold demo`: the main job on one machine with nothing else installed.
//!
//! An embedded store server and several worker processes: they find each other, exchange values, meet at barriers, form a
//! group, and report what they saw and how long it took. Every value is checked, and a wrong one is a loud failure.

#![expect(clippy::disallowed_methods, reason = "reports how long things took")]

use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tenfold::{DType, Group, Options, ReduceOp, Tensor, Work};
use tenfold_store::{
    FaultKind, Server, ServerOptions, StoreCollectives, StoreExt, TcpStore, TcpStoreOptions,
};

use crate::{Outcome, Program, SUCCESS};

/// Shows tenfold at work on this machine: an embedded store and worker processes that rendezvous through it.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  tenfold demo                 four workers
  tenfold demo --workers 16")]
pub(crate) struct Args {
    /// Worker processes
    #[arg(long, short = 'n', default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=256))]
    workers: u16,
    /// Operations of each kind that every worker does
    #[arg(long, default_value_t = 2000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    operations: u32,
    /// Print the report as JSON
    #[arg(long)]
    json: bool,
}

/// One worker of `tenfold demo`.
#[derive(clap::Args, Debug)]
pub(crate) struct WorkerArgs {
    #[arg(long)]
    port: u16,
    #[arg(long)]
    rank: usize,
    #[arg(long)]
    workers: usize,
    #[arg(long)]
    operations: u32,
}

/// What a worker tells the parent, through the store.
#[derive(Debug, Serialize, Deserialize)]
struct Report {
    rank: usize,
    pid: u32,
    joined_ms: f64,
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

const LIMIT: Duration = Duration::from_secs(60);

pub(crate) fn run(args: &Args) -> Outcome {
    let workers = usize::from(args.workers);
    let started = Instant::now();
    let server = Server::start(ServerOptions::new("127.0.0.1", 0))?;
    say(args, format_args!("store server on {} in this process", server.address()));

    let mut children = Children(Vec::new());
    for rank in 0..workers {
        children.0.push(spawn_worker(server.address().port(), rank, args)?);
    }
    let pids: Vec<String> = children.0.iter().map(|child| child.id().to_string()).collect();
    say(args, format_args!("{workers} workers started, pids {}", pids.join(" ")));

    let store = TcpStore::open(TcpStoreOptions::new("127.0.0.1", server.address().port()).timeout(LIMIT))?;
    let mut reports: Vec<Report> = Vec::with_capacity(workers);
    for rank in 0..workers {
        let report = wait_for_report(&store, rank, &mut children, started)?;
        reports.push(serde_json::from_slice(&report)?);
    }
    for (rank, child) in children.0.iter_mut().enumerate() {
        let status = child.wait()?;
        if !status.success() {
            return Err(
                format!("worker {rank} (pid {}) ended with {status} after its report", child.id()).into()
            );
        }
    }
    children.0.clear();

    let expected_sum: i64 = (0..workers as i64).map(|rank| rank * rank).sum();
    for report in &reports {
        if report.met != workers || report.sum != expected_sum {
            let Report { rank, met, sum, .. } = report;
            return Err(format!(
                "worker {rank} met {met} of {workers} and got the sum {sum} instead of {expected_sum}"
            )
            .into());
        }
    }
    let facts = server.facts();
    if args.json {
        println!(
            "{}",
            serde_json::json!({ "workers": reports, "server": facts, "seconds": started.elapsed().as_secs_f64() })
        );
        return Ok(SUCCESS);
    }
    let slowest = reports.iter().map(|report| report.joined_ms).fold(0.0, f64::max);
    println!(
        "all {workers} met: every worker saw the values of all others, and the sum {expected_sum}; the last one joined {slowest:.1} ms after it started"
    );
    println!("\n{:<14} {:>14} {:>16}", "operation", "median µs", "all workers/s");
    for (index, (operation, _)) in reports[0].medians.iter().enumerate() {
        let mut medians: Vec<f64> = reports.iter().map(|report| report.medians[index].1).collect();
        medians.sort_unstable_by(f64::total_cmp);
        let median = medians[medians.len() / 2];
        println!("{operation:<14} {median:>14.1} {:>16.0}", workers as f64 * 1e6 / median);
    }
    print_collectives(&reports);
    let operations: u64 = facts.operations.values().sum();
    println!(
        "\nserver: {operations} operations, {} connections, {} keys, {} refused; {:.2} s in all",
        facts.accepted,
        facts.keys,
        facts.closed.values().sum::<u64>(),
        started.elapsed().as_secs_f64()
    );
    Ok(SUCCESS)
}

/// The slowest rank's medians: a collective is over when its last rank is done.
fn print_collectives(reports: &[Report]) {
    println!(
        "\n{:<14} {:>9} {:>16} {:>12} {:>12} {:>16}",
        "collective", "size", "algorithm", "private µs", "shared µs", "shared GB/s"
    );
    for (index, row) in reports[0].collectives.iter().enumerate() {
        let slowest = |time: fn(&Collective) -> f64| {
            reports.iter().map(|report| time(&report.collectives[index])).fold(0.0, f64::max)
        };
        let (private, shared) = (slowest(|row| row.private_us), slowest(|row| row.shared_us));
        let (size, speed) = match row.bytes {
            0 => ("".to_string(), "".to_string()),
            bytes => (crate::units::show_size(bytes), format!("{:.2}", bytes as f64 / shared / 1e3)),
        };
        let Collective { operation, algorithm, .. } = row;
        println!("{operation:<14} {size:>9} {algorithm:>16} {private:>12.1} {shared:>12.1} {speed:>16}");
    }
}

fn say(args: &Args, line: std::fmt::Arguments<'_>) {
    if !args.json {
        println!("{line}");
    }
}

/// Workers that do not outlive the demo, however it ends.
struct Children(Vec<Child>);

impl Drop for Children {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill(); // it may have ended by itself
            let _ = child.wait();
        }
    }
}

fn spawn_worker(port: u16, rank: usize, args: &Args) -> Result<Child, Box<dyn std::error::Error>> {
    let child = Program::own()
        .command()
        .arg("demo-worker")
        .args(["--port", &port.to_string(), "--rank", &rank.to_string()])
        .args(["--workers", &args.workers.to_string(), "--operations", &args.operations.to_string()])
        .stdin(Stdio::null())
        .spawn()?;
    Ok(child)
}

/// A worker's report, or why it will not come.
fn wait_for_report(
    store: &TcpStore,
    rank: usize,
    children: &mut Children,
    started: Instant,
) -> Result<tenfold_store::Value, Box<dyn std::error::Error>> {
    const SLICE: Duration = Duration::from_millis(200);
    let key = format!("demo/report/{rank}");
    loop {
        match store.wait_for(&[&key], SLICE) {
            Ok(()) => return Ok(store.get(&key)?),
            Err(error) if error.kind() == FaultKind::Timeout && started.elapsed() < LIMIT => {}
            Err(error) => return Err(error.into()),
        }
        for (other, child) in children.0.iter_mut().enumerate() {
            if let Some(status) = child.try_wait()?
                && !status.success()
            {
                return Err(format!(
                    "worker {other} (pid {}) ended with {status} before it reported",
                    child.id()
                )
                .into());
            }
        }
    }
}

pub(crate) fn run_worker(args: &WorkerArgs) -> Outcome {
    let started = Instant::now();
    #[cfg(target_os = "linux")] // a demo that is killed leaves nobody behind
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
    let WorkerArgs { port, rank, workers, operations } = *args;
    let options = TcpStoreOptions::new("127.0.0.1", port).timeout(LIMIT).world_size(workers);
    let store = std::sync::Arc::new(TcpStore::open(options)?);
    let ranks = StoreCollectives::new(store.clone(), rank, workers);
    ranks.barrier("demo/start", LIMIT)?;
    let joined_ms = started.elapsed().as_secs_f64() * 1e3;

    let names = ranks.all_gather("demo/names", format!("worker {rank}"), LIMIT)?;
    let met = names
        .iter()
        .enumerate()
        .filter(|(rank, name)| ***name == *format!("worker {rank}").as_bytes())
        .count();
    let sum = ranks.all_sum("demo/sum", (rank * rank) as i64, LIMIT)?;

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

    let collectives = collectives(store.clone(), rank, workers)?;
    let report = Report { rank, pid: std::process::id(), joined_ms, met, sum, medians, collectives };
    store.set(format!("demo/report/{rank}"), serde_json::to_vec(&report)?)?;
    store.ping()?; // the report has arrived before this process ends
    Ok(SUCCESS)
}

/// Forms a group, checks its sums, and measures a few operations.
fn collectives(
    store: std::sync::Arc<TcpStore>,
    rank: usize,
    workers: usize,
) -> Result<Vec<Collective>, Box<dyn std::error::Error>> {
    let group = Group::connect(store, rank, workers, Options::new("demo").timeout(LIMIT))?;
    let mut rows = Vec::new();
    for elements in [2, 1 << 10, 1 << 16, 1 << 20] {
        let mut tensors = [Tensor::zeros(DType::F32, elements), group.shared_tensor(DType::F32, elements)?];
        for tensor in &mut tensors {
            check_sum(&group, tensor)?;
        }
        rows.push(time_both(&group, "all_reduce", &mut tensors, |group, tensor| {
            group.all_reduce(tensor.lend(), ReduceOp::Max)
        })?);
        rows.push(time_both(&group, "broadcast", &mut tensors, |group, tensor| {
            group.broadcast(tensor.lend(), 0)
        })?);
    }
    let mut nothing = [Tensor::zeros(DType::U8, 0), Tensor::zeros(DType::U8, 0)];
    rows.push(time_both(&group, "barrier", &mut nothing, |group, _| group.barrier())?);
    rows.sort_by_key(|row| (row.operation.clone(), row.bytes));
    Ok(rows)
}

/// Every rank gives its number plus one, plus the place; the sum is known.
fn check_sum(group: &Group, tensor: &mut Tensor) -> Result<(), Box<dyn std::error::Error>> {
    let ranks = group.size();
    for (place, value) in tensor.as_mut_slice::<f32>().iter_mut().enumerate() {
        *value = (group.rank() + 1 + place % 100) as f32;
    }
    group.all_reduce(tensor.lend(), ReduceOp::Sum)?.wait()?;
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
    tensors: &mut [Tensor; 2],
    call: impl Fn(&Group, &mut Tensor) -> tenfold::Result<Work>,
) -> tenfold::Result<Collective> {
    let bytes = tensors[0].elements() * tensors[0].dtype().size();
    let turns = ((8 << 20) / bytes.max(1)).clamp(5, 500);
    let (mut medians, mut algorithm) = ([0.0; 2], "");
    for (tensor, median) in tensors.iter_mut().zip(&mut medians) {
        group.barrier()?.wait()?;
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
