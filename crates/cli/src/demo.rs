//! `tenfold demo`: a data-parallel training on one machine with nothing else installed.
//!
//! An embedded store server, and worker processes that find each other through it and train one small network
//! together, each on its share of the data. At the end all must have bit-identical parameters; a difference
//! is an error.
//!
//! - `workers`: the worker processes, seen from the parent; `worker`: the code of one of them
//! - `train`: the training, with `tenfold::ddp` in the middle; `model`, `data`: the network and its data
//! - `tour`: operations of the store and of the group, checked and timed
//! - `progress`, `curve`: what is drawn

#![expect(clippy::disallowed_methods, reason = "reports how long it took")]

mod curve;
mod data;
mod model;
mod progress;
mod tour;
mod train;
mod worker;
mod workers;

use std::io::{self, IsTerminal as _, Write};
use std::time::{Duration, Instant};

use tenfold_store::{Server, ServerOptions};

use progress::{Progress, Screen};
use tenfold_console::{Outcome, SUCCESS};
use worker::Report;
use workers::Workers;

pub(crate) use worker::{WorkerArgs, run_worker};

/// Show tenfold at work on this machine: worker processes train a network together and stay bit-identical.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  tenfold demo                 four workers
  tenfold demo -n 2 --tour     two, and how long operations take, in tables
  tenfold demo --json | jq .training.accuracy")]
pub(crate) struct Args {
    /// Worker processes
    #[arg(long, short = 'n', default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=256))]
    workers: u16,
    /// Training steps
    #[arg(long, default_value_t = 500, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    steps: u32,
    /// Operations of the store, of each kind, that every worker does
    #[arg(long, default_value_t = 500, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    operations: u32,
    /// Measure more operations, and print tables of how long they take
    #[arg(long)]
    tour: bool,
    /// Print the report as JSON, and nothing before it
    #[arg(long)]
    json: bool,
}

/// How long a worker may report nothing.
const LIMIT: Duration = Duration::from_secs(60);
const CURVE_HEIGHT: usize = 6;
/// The width if the terminal's is unknown.
const WIDTH: usize = 80;
/// A wider curve is not more readable.
const WIDTH_MAX: usize = 120;

/// The keys under which workers leave what the parent reads.
mod keys {
    pub(super) fn progress(number: u32) -> String {
        format!("demo/progress/{number}")
    }

    pub(super) fn report(rank: usize) -> String {
        format!("demo/report/{rank}")
    }

    pub(super) fn failure(rank: usize) -> String {
        format!("demo/failure/{rank}")
    }
}

pub(crate) fn run(args: &Args) -> Outcome {
    let started = Instant::now();
    let server = Server::start(ServerOptions::new("127.0.0.1", 0))?;
    let mut workers = Workers::start(&server, args)?;
    let mut screen = screen();
    if !args.json {
        let pids: Vec<String> = workers.pids().iter().map(u32::to_string).collect();
        let workers = count(pids.len(), "worker process trains", "worker processes train");
        screen.line(format_args!("{workers} one network, each on its share of the points"))?;
        screen.line(format_args!("pids {}, store at {}\n", pids.join(" "), server.address()))?;
    }
    let curve = watch(&mut workers, args, &mut screen)?;
    let reports: Vec<Report> = workers.reports()?;
    let fingerprint = common_fingerprint(&reports)?;
    tour::check(reports.iter().map(|report| &report.tour), reports.len())?;
    if args.json {
        let summary = Summary::of(&reports, &curve);
        let training = serde_json::json!({
            "steps": args.steps,
            "parameters": reports[0].training.parameters,
            "loss": curve.iter().map(|point| (point.step, point.loss)).collect::<Vec<_>>(),
            "loss_first": curve[0].loss,
            "loss_last": summary.loss_last,
            "accuracy": summary.accuracy,
            "step_us": summary.step_us,
            "communication_us": summary.communication_us,
            "communication_share": summary.communication_us / summary.step_us,
            "replicas_identical": true, // else there is no report
            "fingerprint": fingerprint,
        });
        let seconds = started.elapsed().as_secs_f64();
        let report = serde_json::json!({ "training": training, "workers": reports, "server": server.facts(), "seconds": seconds });
        screen.line(format_args!("{report}"))?;
        return Ok(SUCCESS);
    }
    print_training(&mut screen, &reports, &curve, fingerprint)?;
    let tours: Vec<_> = reports.iter().map(|report| &report.tour).collect();
    if args.tour {
        tour::print_whole(&mut screen, &tours)?;
    } else {
        tour::print_short(&mut screen, &tours)?;
    }
    print_end(&mut screen, &server, &reports, started.elapsed())?;
    Ok(SUCCESS)
}

/// Standard output. If its reader closes it, the demo ends, and so do its workers.
fn screen() -> Screen<io::Stdout> {
    let output = io::stdout();
    let is_terminal = output.is_terminal() && std::env::var_os("TERM").is_none_or(|name| name != "dumb");
    let columns = rustix::termios::tcgetwinsize(&output).map_or(0, |size| usize::from(size.ws_col));
    let wants_colours = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let width = if columns == 0 { WIDTH } else { columns.min(WIDTH_MAX) };
    Screen { output, is_terminal, has_colours: is_terminal && wants_colours, width }
}

/// Shows the progress of the workers, until they have trained.
fn watch(
    workers: &mut Workers,
    args: &Args,
    screen: &mut Screen<impl Write>,
) -> Result<Vec<Progress>, Box<dyn std::error::Error>> {
    let mut curve: Vec<Progress> = Vec::new();
    while curve.last().is_none_or(|point| point.step < args.steps) {
        let point = workers.progress(curve.len() as u32);
        if !args.json {
            match &point {
                Ok(point) => screen.progress(curve.last().copied(), *point)?,
                Err(_) => screen.end_of_progress()?, // the message begins on a new line
            }
        }
        curve.push(point?);
    }
    if !args.json {
        screen.end_of_progress()?;
    }
    Ok(curve)
}

/// The same on all workers, or an error that names those that differ.
fn common_fingerprint(reports: &[Report]) -> Result<&str, String> {
    let first = &reports[0].training.fingerprint;
    let differs = |report: &&Report| report.training.fingerprint != *first;
    let others: Vec<String> = reports.iter().filter(differs).map(|report| report.rank.to_string()).collect();
    if others.is_empty() {
        return Ok(first);
    }
    Err(format!(
        "the replicas differ: the parameters of worker {} are not those of worker 0\n  hint: please report this: it is a bug of tenfold, or bad memory in this machine",
        others.join(", ")
    ))
}

/// Means over all workers.
struct Summary {
    loss_last: f32,
    accuracy: f64,
    step_us: f64,
    communication_us: f64,
}

impl Summary {
    fn of(reports: &[Report], curve: &[Progress]) -> Self {
        let mean =
            |number: fn(&Report) -> f64| reports.iter().map(number).sum::<f64>() / reports.len() as f64;
        Summary {
            loss_last: curve.last().map_or(f32::NAN, |point| point.loss),
            accuracy: reports[0].training.accuracy,
            step_us: mean(|report| report.training.step_us),
            communication_us: mean(|report| report.training.communication_us),
        }
    }
}

fn print_training(
    screen: &mut Screen<impl Write>,
    reports: &[Report],
    curve: &[Progress],
    fingerprint: &str,
) -> io::Result<()> {
    let Summary { loss_last, accuracy, step_us, communication_us } = Summary::of(reports, curve);
    let losses: Vec<f32> = curve.iter().map(|point| point.loss).collect();
    screen.line(format_args!("loss"))?;
    for line in curve::draw(&losses, screen.width, CURVE_HEIGHT) {
        screen.line(format_args!("{line}"))?;
    }
    let steps = curve.last().map_or(0, |point| point.step);
    screen.line(format_args!("\nloss       {:.3} → {loss_last:.3} in {steps} steps", losses[0]))?;
    screen.line(format_args!(
        "accuracy   {:.1} % of {} points that were not used for training",
        accuracy * 100.0,
        train::TEST_POINTS
    ))?;
    screen.line(format_args!(
        "a step     {step_us:.0} µs, {communication_us:.0} µs of it ({:.0} %) waiting for gradients of other workers",
        100.0 * communication_us / step_us
    ))?;
    screen.line(format_args!(
        "replicas   bit-identical: {} × {} parameters, {fingerprint}",
        count(reports.len(), "worker", "workers"),
        reports[0].training.parameters
    ))
}

fn print_end(
    screen: &mut Screen<impl Write>,
    server: &Server,
    reports: &[Report],
    elapsed: Duration,
) -> io::Result<()> {
    let facts = server.facts();
    let operations: u64 = facts.operations.values().sum();
    let slowest = reports.iter().map(|report| report.joined_ms).fold(0.0, f64::max);
    screen.line(format_args!(
        "\n{:.2} s in total; all joined after {slowest:.1} ms; the store answered {operations} requests",
        elapsed.as_secs_f64()
    ))
}

fn count(number: usize, one: &str, many: &str) -> String {
    format!("{number} {}", if number == 1 { one } else { many })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(rank: usize, fingerprint: &str) -> Report {
        let report = serde_json::json!({
            "rank": rank, "pid": 1, "joined_ms": 1.0,
            "parameters": 10, "accuracy": 1.0, "step_us": 10.0, "communication_us": 1.0, "fingerprint": fingerprint,
            "met": 3, "sum": 5, "medians": [], "collectives": [],
        });
        serde_json::from_value(report).unwrap()
    }

    #[test]
    fn a_replica_that_differs_is_named() {
        let reports = ["a", "a", "b", "a", "c"].into_iter().enumerate();
        let reports: Vec<Report> = reports.map(|(rank, print)| report(rank, print)).collect();
        assert_eq!(common_fingerprint(&reports[..2]), Ok("a"));
        let text = common_fingerprint(&reports).unwrap_err();
        assert!(
            text.starts_with(
                "the replicas differ: the parameters of worker 2, 4 are not those of worker 0\n"
            )
        );
    }

    #[test]
    fn a_worker_that_met_too_few_or_got_a_wrong_sum_is_named() {
        let reports: Vec<Report> = (0..3).map(|rank| report(rank, "a")).collect();
        let tours = || reports.iter().map(|report| &report.tour);
        assert_eq!(tour::check(tours(), 3), Ok(()));
        assert_eq!(
            tour::check(tours(), 4),
            Err("worker 0 got 3 of 4 values and the sum 5 instead of 14".to_string())
        );
    }
}
