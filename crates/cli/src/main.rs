//! The command `tenfold`.
//!
//! Each subcommand has a file of its own, named after it. This one knows only how to choose among them and how an
//! error reads at the end.

mod bench;
mod demo;
mod serve;
mod store;
mod units;

use std::io::IsTerminal as _;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Collective communication for machine learning.
#[derive(Parser)]
#[command(name = "tenfold", version, propagate_version = true, arg_required_else_help = true)]
#[command(after_help = "Environment:
  TENFOLD_LOG      log on standard error: error, warn (the default), info, debug, or a
                   filter such as tenfold_store=debug
  TENFOLD_PYTHON   the Python with PyTorch that `tenfold bench --against torch` starts

Read by every rank of a process group (docs/groups.md says more):
  TENFOLD_TRANSPORT    auto (the default), shm or tcp
  TENFOLD_INTERFACE    the network interface by which other hosts reach this one: eth0, ^lo,docker
  TENFOLD_PORT_RANGE   ports to listen on: 20000-20100
  TENFOLD_ALGORITHM    algorithms to insist on: all_reduce:ring,broadcast:binomial")]
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
    Serve(serve::Args),
    Store(store::Args),
}

/// What a subcommand ends with: how it went, or an error for the user.
type Outcome = Result<ExitCode, Box<dyn std::error::Error>>;

fn main() -> ExitCode {
    let cli = Cli::parse();
    let filter = std::env::var("TENFOLD_LOG").unwrap_or_else(|_| "warn".into());
    let filter = match tracing_subscriber::EnvFilter::try_new(&filter) {
        Ok(filter) => filter,
        Err(error) => {
            return complain(&format!(
                "TENFOLD_LOG=`{filter}` is no log filter: {error}\n  hint: try `info` or `tenfold_store=debug`"
            ));
        }
    };
    let colour = std::io::stderr().is_terminal();
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(colour).init();
    let outcome = match cli.command {
        Command::Bench(args) => bench::run(args).map(|()| ExitCode::SUCCESS).map_err(Into::into),
        Command::Demo(args) => demo::run(&args),
        Command::DemoWorker(args) => demo::run_worker(&args),
        Command::Serve(args) => serve::run(args),
        Command::Store(args) => store::run(args),
    };
    match outcome {
        Ok(code) => code,
        // Whoever reads our output may stop reading: `tenfold store … keys | head` is no failure.
        Err(error) if is_broken_pipe(&*error) => ExitCode::SUCCESS,
        Err(error) => complain(&error.to_string()),
    }
}

fn is_broken_pipe(error: &(dyn std::error::Error + 'static)) -> bool {
    error.downcast_ref::<std::io::Error>().is_some_and(|error| error.kind() == std::io::ErrorKind::BrokenPipe)
}

fn complain(message: &str) -> ExitCode {
    eprintln!("error: {message}");
    ExitCode::FAILURE
}
