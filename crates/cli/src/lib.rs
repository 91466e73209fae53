//! The command `tenfold`, as a function.
//!
//! The binary of that name calls [`main`], and so does the entry point of the Python package, which carries this code in
//! its extension module. Each subcommand has a file of its own, named after it. This one knows only how to choose among
//! them and how an error reads at the end.

mod bench;
mod dashboard;
mod demo;
mod environment;
mod log;
mod program;
mod run;
mod serve;
mod store;
mod top;
mod trace;
mod units;
mod worker;

use std::ffi::OsString;
use std::io::IsTerminal as _;
use std::time::Duration;

use clap::{Parser, Subcommand};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

pub use log::LogWriter;
pub use program::Program;

/// Collective communication for machine learning.
#[derive(Parser)]
#[command(name = "tenfold", version, propagate_version = true, arg_required_else_help = true)]
#[command(after_help = "`tenfold environment` lists the variables that tenfold reads.")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Bench(bench::Args),
    Demo(demo::Args),
    #[command(hide = true)]
    DemoWorker(demo::WorkerArgs),
    Environment(environment::Args),
    Run(Box<run::Args>),
    #[command(hide = true)]
    RunGuard,
    Serve(serve::Args),
    Store(store::Args),
    Top(top::Args),
    Trace(trace::Args),
    Worker(worker::Args),
}

/// For log lines that are still to be written when the command ends.
const LAST_LINES: Duration = Duration::from_secs(1);

const SUCCESS: u8 = 0;
const FAILURE: u8 = 1;

/// What a subcommand ends with: the exit code, or an error for the user.
type Outcome = Result<u8, Box<dyn std::error::Error>>;

/// Does what the words after `tenfold` say, and returns the exit code. `program` starts this command again.
///
/// For a process that does nothing else: it listens for signals, logs to standard error, may raise the limit of open
/// files, and the second Ctrl-C ends the process from within. A host with signal handlers of its own, such as Python,
/// gives SIGINT its default action before the call, or Ctrl-C does not end the commands that leave it to the system.
///
/// ```
/// let program = tenfold_cli::Program::this_executable();
/// assert_eq!(tenfold_cli::main(["--version".into()], program), 0);
/// ```
#[must_use = "it is what the process ends with"]
pub fn main(arguments: impl IntoIterator<Item = OsString>, program: Program) -> u8 {
    // Usage lines begin with this word, whatever the file was called by which we were started.
    let mut words: Vec<OsString> = std::iter::once("tenfold".into()).chain(arguments).collect();
    if words[1..] == ["help", "environment"] {
        words.remove(1); // the list is the help
    }
    let cli = match Cli::try_parse_from(words) {
        Ok(cli) => cli,
        Err(usage) => {
            let _nobody_reads_it = usage.print();
            return u8::try_from(usage.exit_code()).unwrap_or(FAILURE);
        }
    };
    if let Err(problem) = start_log() {
        return complain(&problem);
    }
    program.make_own();
    let outcome = match cli.command {
        Command::Bench(args) => bench::run(args).map(|()| SUCCESS).map_err(Into::into),
        Command::Demo(args) => demo::run(&args),
        Command::DemoWorker(args) => demo::run_worker(&args),
        Command::Environment(args) => environment::run(&args),
        Command::Run(args) => run::run(&args),
        Command::RunGuard => run::stand_guard(),
        Command::Serve(args) => serve::run(args),
        Command::Store(args) => store::run(args),
        Command::Top(args) => top::run(args),
        Command::Trace(args) => trace::run(&args),
        Command::Worker(args) => worker::run(&args),
    };
    LogWriter::flush_within(LAST_LINES);
    match outcome {
        Ok(code) => code,
        // Whoever reads our output may stop reading: `tenfold store … keys | head` is no failure.
        Err(error) if is_broken_pipe(&*error) => SUCCESS,
        Err(error) => complain(&error.to_string()),
    }
}

/// What `TENFOLD_LOG` lets through; `default` if it is not set.
///
/// # Errors
/// If it is no filter; the text says what would be one.
pub fn log_filter(default: &str) -> Result<tracing_subscriber::filter::Targets, String> {
    let filter = std::env::var("TENFOLD_LOG").unwrap_or_else(|_| default.into());
    filter.parse().map_err(|error| {
        format!(
            "TENFOLD_LOG=`{filter}` is no log filter: {error}\n  hint: try `info` or `tenfold_store=debug`"
        )
    })
}

fn start_log() -> Result<(), String> {
    let filter = log_filter("warn")?;
    let colour = std::io::stderr().is_terminal();
    let lines = tracing_subscriber::fmt::layer().with_writer(LogWriter::new).with_ansi(colour);
    let _has_one_already = tracing_subscriber::registry().with(filter).with(lines).try_init();
    Ok(())
}

fn is_broken_pipe(error: &(dyn std::error::Error + 'static)) -> bool {
    error.downcast_ref::<std::io::Error>().is_some_and(|error| error.kind() == std::io::ErrorKind::BrokenPipe)
}

fn complain(message: &str) -> u8 {
    eprintln!("error: {message}");
    FAILURE
}
