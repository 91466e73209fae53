//! The command `tenfold`, as a function.
//!
//! The binary of that name calls [`main`]. Each subcommand has its own file or crate, named after it. This
//! file only selects one of them and prints the error at the end.

mod demo;
mod environment;
mod relay;
mod serve;
mod store;
mod trace;
mod worker;

use std::ffi::OsString;
use std::io::IsTerminal as _;
use std::time::Duration;

use clap::{Parser, Subcommand};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

pub use tenfold_console::Program;
use tenfold_console::{FAILURE, LogWriter, SUCCESS, log_filter};
use tenfold_dashboard::top;
use tenfold_launch as run;

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
    #[cfg(feature = "bench")]
    Bench(tenfold_bench::Args),
    #[cfg(not(feature = "bench"))]
    #[command(hide = true, disable_help_flag = true)]
    Bench {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        _ignored: Vec<OsString>,
    },
    Demo(demo::Args),
    #[command(hide = true)]
    DemoWorker(demo::WorkerArgs),
    Environment(environment::Args),
    Relay(relay::Args),
    Run(Box<run::Args>),
    #[command(hide = true)]
    RunGuard,
    Serve(serve::Args),
    Store(store::Args),
    Top(top::Args),
    Trace(trace::Args),
    Worker(worker::Args),
}

/// Time for remaining log lines when the command ends.
const LAST_LINES: Duration = Duration::from_secs(1);

/// Runs the command given by the words after `tenfold`, and returns the exit code. `program` starts this
/// command again.
///
/// For a process that does nothing else: it handles signals, logs to standard error, may raise the limit of
/// open files, and the second Ctrl-C exits the process from within. A host with its own signal handlers, such
/// as Python, must restore the default action of SIGINT before the call. Otherwise Ctrl-C does not end the
/// commands that leave it to the system.
///
/// ```
/// let program = tenfold_cli::Program::this_executable();
/// assert_eq!(tenfold_cli::main(["--version".into()], program), 0);
/// ```
#[must_use = "it is what the process ends with"]
pub fn main(arguments: impl IntoIterator<Item = OsString>, program: Program) -> u8 {
    // Usage lines begin with this word, whatever the name of the executable.
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
        #[cfg(feature = "bench")]
        Command::Bench(args) => tenfold_bench::run(args).map(|()| SUCCESS).map_err(Into::into),
        #[cfg(not(feature = "bench"))]
        Command::Bench { .. } => Err("this build of tenfold has no benchmarks\n  \
             hint: run `cargo run --release -- bench` in a checkout, or `python -m tenfold.bench` for PyTorch"
            .into()),
        Command::Demo(args) => demo::run(&args),
        Command::DemoWorker(args) => demo::run_worker(&args),
        Command::Environment(args) => environment::run(&args),
        Command::Relay(args) => relay::run(&args),
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
        // The reader of our output may close it: `tenfold store … keys | head` is not a failure.
        Err(error) if is_broken_pipe(&*error) => SUCCESS,
        Err(error) => complain(&error.to_string()),
    }
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
