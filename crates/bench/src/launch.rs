//! `tenfold bench launch`: the time from the start of a launcher to its exit.
//!
//! Ranks do almost nothing: the launcher is measured. It and its peer take turns, so that a busy machine
//! affects both.
#![expect(clippy::disallowed_methods, reason = "a benchmark reads the clock")]

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use serde_json::json;

use super::collectives::python_with_torch;
use super::report::{align, median};
use super::{Failure, Interrupt, nodes};
use tenfold_console::{Program, ProgressLine};

/// Measures how long it takes to run programs that do nothing: `true`, and an empty Python file.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  tenfold bench launch                       2 and 8 ranks
  tenfold bench launch --against torchrun    the same under torchrun, in the same rounds
  tenfold bench launch --ranks 64 --rounds 20 --json rows.json
  tenfold bench launch --simulated-nodes 4000    nodes without ranks that join a job")]
pub(crate) struct LaunchArgs {
    /// How many ranks to launch
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_value = "2,8")]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=1024))]
    ranks: Vec<u16>,
    /// Launchers to compare with
    #[arg(long, value_name = "LAUNCHER", value_delimiter = ',')]
    against: Vec<Peer>,
    /// How often each case is measured; the table shows the median
    #[arg(long, value_name = "N", default_value = "7", value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// Measure instead how long so many nodes without ranks take to join a job
    #[arg(long, value_name = "N,…", value_delimiter = ',', conflicts_with_all = ["ranks", "against", "rounds"])]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=16384))]
    simulated_nodes: Vec<u16>,
    /// The Python for the Python program and for torchrun [default: the one that ./test set up, else python3]
    #[arg(long, value_name = "PATH", env = "TENFOLD_PYTHON")]
    python: Option<PathBuf>,
    /// Also write the figures to this file, as a list of rows
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Peer {
    Torchrun,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Launcher {
    Tenfold,
    Torchrun,
}

impl fmt::Display for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Launcher::Tenfold => "tenfold run",
            Launcher::Torchrun => "torchrun",
        })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Job {
    True,
    Python,
}

impl Job {
    fn name(self) -> &'static str {
        match self {
            Job::True => "true",
            Job::Python => "empty.py",
        }
    }
}

/// One line of the table: for each launcher its times in milliseconds, in the order of the rounds.
#[derive(Debug)]
struct Row {
    job: Job,
    ranks: u16,
    times: Vec<(Launcher, Vec<f64>)>,
}

impl Row {
    /// How many times quicker than the first launcher this one is: the median over the rounds.
    fn ratio(&self, peer: usize) -> f64 {
        let (ours, theirs) = (&self.times[0].1, &self.times[peer].1);
        median(ours.iter().zip(theirs).map(|(ours, theirs)| theirs / ours).collect())
    }
}

pub(crate) fn run(args: &LaunchArgs) -> Result<(), Failure> {
    let interrupt = Interrupt::install()?;
    if !args.simulated_nodes.is_empty() {
        return run_nodes(args, &interrupt);
    }
    let folder =
        tempfile::tempdir().map_err(|error| Failure::new(format!("no temporary folder: {error}")))?;
    let script = folder.path().join(Job::Python.name());
    std::fs::write(&script, "")
        .map_err(|error| Failure::new(format!("cannot write {}: {error}", script.display())))?;
    let python = python_with_torch(args.python.as_deref());
    let mut launchers = vec![Launcher::Tenfold];
    if args.against.contains(&Peer::Torchrun) {
        launchers.push(Launcher::Torchrun);
    }
    let stage = Stage { python: python.as_os_str(), script: &script, interrupt: &interrupt };
    let (mut rows, progress) = (Vec::new(), ProgressLine::new());
    for job in [Job::True, Job::Python] {
        for &ranks in &args.ranks {
            let mut row =
                Row { job, ranks, times: launchers.iter().map(|&launcher| (launcher, Vec::new())).collect() };
            progress.show(format_args!("{} on {ranks} ranks", job.name()));
            // The first of each warms caches and is not counted.
            for round in 0..=args.rounds {
                for (launcher, times) in &mut row.times {
                    let time = stage.time(*launcher, job, ranks)?;
                    times.extend((round > 0).then_some(time));
                }
            }
            rows.push(row);
        }
    }
    progress.clear();
    print(args, &json_rows(&rows), &table(&rows, args.rounds))
}

fn run_nodes(args: &LaunchArgs, interrupt: &Interrupt) -> Result<(), Failure> {
    let counts: Vec<usize> = args.simulated_nodes.iter().map(|&count| count.into()).collect();
    let rows = nodes::measure(&counts, interrupt)?;
    print(args, &nodes::json_rows(&rows), &nodes::table(&rows))
}

fn print(args: &LaunchArgs, rows: &str, table: &str) -> Result<(), Failure> {
    if let Some(path) = &args.json {
        std::fs::write(path, rows)
            .map_err(|error| Failure::new(format!("cannot write `{}`: {error}", path.display())))?;
    }
    match std::io::stdout().write_all(table.as_bytes()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(Failure::new(format!("cannot print: {error}")))
        }
        _ => Ok(()),
    }
}

/// What all measurements have in common.
struct Stage<'a> {
    python: &'a OsStr,
    script: &'a Path,
    interrupt: &'a Interrupt,
}

impl Stage<'_> {
    /// Milliseconds from starting the launcher to its end.
    fn time(&self, launcher: Launcher, job: Job, ranks: u16) -> Result<f64, Failure> {
        self.interrupt.check()?;
        let mut command = self.command(launcher, job, ranks);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let started = Instant::now();
        let ended = command.output();
        let time = started.elapsed().as_secs_f64() * 1e3;
        self.interrupt.check()?;
        let ended = ended.map_err(|error| {
            Failure::new(format!("cannot start {}: {error}", command.get_program().display()))
        })?;
        if !ended.status.success() {
            let said = String::from_utf8_lossy(&ended.stderr);
            let last = said.trim_end().lines().last().unwrap_or_default();
            let failure =
                Failure::new(format!("{launcher} of `{}` failed: {}: {last}", job.name(), ended.status));
            return Err(match launcher {
                Launcher::Tenfold => failure,
                Launcher::Torchrun => {
                    failure.hint("name a Python that has PyTorch with `--python` or TENFOLD_PYTHON")
                }
            });
        }
        Ok(time)
    }

    fn command(&self, launcher: Launcher, job: Job, ranks: u16) -> Command {
        let ranks = ranks.to_string();
        let mut command = match launcher {
            Launcher::Tenfold => {
                let mut command = Program::own().command();
                command.args(["run", "-n", &ranks, "--python"]).arg(self.python);
                command
            }
            Launcher::Torchrun => {
                let mut command = Command::new(self.python);
                command.args(["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", &ranks]);
                if job == Job::True {
                    command.arg("--no-python");
                }
                command
            }
        };
        command.arg(match job {
            Job::True => OsString::from("true"),
            Job::Python => self.script.into(),
        });
        command
    }
}

fn table(rows: &[Row], rounds: u32) -> String {
    let mut header = vec!["program".to_string(), "ranks".into()];
    let Some(first) = rows.first() else { return String::new() };
    header.extend(first.times.iter().map(|(launcher, _)| format!("{launcher} (min–max)")));
    header.extend(first.times[1..].iter().map(|_| "ratio".to_string()));
    let mut lines = vec![header];
    for row in rows {
        let mut line = vec![row.job.name().to_string(), row.ranks.to_string()];
        line.extend(row.times.iter().map(|(_, times)| show(times)));
        line.extend((1..row.times.len()).map(|peer| format!("{:.0}×", row.ratio(peer))));
        lines.push(line);
    }
    let notes = format!(
        "\nThe median of {rounds} rounds, from starting the launcher to its end. A ratio above 1 means that tenfold is \
         quicker.\n"
    );
    align(&lines) + &notes
}

fn show(times: &[f64]) -> String {
    let (least, most) =
        times.iter().fold((f64::INFINITY, 0.0_f64), |(least, most), &time| (least.min(time), most.max(time)));
    format!("{:.1} ms ({least:.1}–{most:.1})", median(times.to_vec()))
}

fn json_rows(rows: &[Row]) -> String {
    let rows: Vec<_> = rows
        .iter()
        .flat_map(|row| {
            row.times.iter().enumerate().map(|(index, (launcher, times))| {
                json!({
                    "op": "launch",
                    "program": row.job.name(),
                    "ranks": row.ranks,
                    "implementation": launcher.to_string(),
                    "median_us": median(times.clone()) * 1e3,
                    "ratio": (index > 0).then(|| row.ratio(index)),
                })
            })
        })
        .collect();
    format!("{:#}\n", serde_json::Value::from(rows))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row() -> Row {
        let times = vec![
            (Launcher::Tenfold, vec![10.0, 20.0, 12.0]),
            (Launcher::Torchrun, vec![2000.0, 3000.0, 2500.0]),
        ];
        Row { job: Job::True, ranks: 2, times }
    }

    #[test]
    fn a_ratio_is_the_middle_one_of_the_rounds() {
        assert_eq!(row().ratio(1), 200.0);
        assert_eq!(
            table(&[row()], 3).lines().take(2).collect::<Vec<_>>(),
            [
                "program  ranks  tenfold run (min–max)         torchrun (min–max)  ratio",
                "true         2    12.0 ms (10.0–20.0)  2500.0 ms (2000.0–3000.0)   200×",
            ]
        );
    }

    #[test]
    fn a_program_can_read_the_rows() {
        let rows: serde_json::Value = serde_json::from_str(&json_rows(&[row()])).expect("it is JSON");
        assert_eq!(rows[0]["median_us"], 12000.0);
        assert_eq!(rows[0]["ratio"], serde_json::Value::Null);
        assert_eq!(rows[1]["implementation"], "torchrun");
        assert_eq!(rows[1]["ratio"], 200.0);
    }
}
