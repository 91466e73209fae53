//! `tenfold bench`: benchmarks, alone or against other implementations.
//!
//! A benchmark here is a table of cases. Every implementation runs the same case back to back, round after
//! round in alternating order, so that a busy machine affects all of them. The result is the ratio within one
//! run.
//!
//! `collectives` and `launch` (with `nodes`) stand alone. For the store server, `store` runs the cases, `script` has their
//! bytes, `load` and `crowd` drive connections, `dashboard` observes the server meanwhile, `server` and
//! `cores` manage the child processes, `report` prints. `scale` is about very many clients. `recover` kills ranks, on the hosts
//! of `collectives`; `children` is about processes that report to a benchmark.

mod case;
mod children;
mod collectives;
mod cores;
mod crowd;
mod dashboard;
mod launch;
mod load;
mod nodes;
mod recover;
mod report;
mod scale;
mod script;
mod server;
mod store;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Measure speed, alone or against other implementations.
///
/// Starts the ranks as processes of this machine, checks that results are right, and prints a table of times for each
/// operation. With `--against`, peers run the same cases in the same rounds, and the table shows how many times faster
/// tenfold is than the best of them. What a peer needs must be installed; what is missing is named.
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true, after_help = collectives::EXAMPLES)]
pub struct Args {
    #[command(subcommand)]
    what: Option<What>,
    #[command(flatten)]
    collectives: collectives::CollectiveArgs,
}

#[derive(Debug, clap::Subcommand)]
enum What {
    Launch(launch::LaunchArgs),
    Store(store::StoreArgs),
    Scale(scale::ScaleArgs),
    Dashboard(dashboard::DashboardArgs),
    Recover(recover::RecoverArgs),
    #[command(hide = true)]
    CollectiveRank(collectives::rank::RankArgs),
    #[command(hide = true)]
    RecoverRank(recover::rank::RankArgs),
    #[command(hide = true)]
    ScaleClients(scale::crew::ClientsArgs),
    #[command(hide = true)]
    ScaleRelays(scale::RelaysArgs),
    #[command(hide = true)]
    HostServer(server::HostArgs),
}

/// Runs the benchmark and prints its tables.
///
/// # Errors
/// If a server or a rank cannot be started, a result is wrong, or the user interrupts.
pub fn run(args: Args) -> Result<(), Failure> {
    match args.what {
        None => collectives::run(&args.collectives),
        Some(What::Launch(args)) => launch::run(&args),
        Some(What::Store(args)) => store::run(&args),
        Some(What::Scale(args)) => scale::run(&args),
        Some(What::ScaleClients(args)) => scale::crew::host(&args),
        Some(What::ScaleRelays(args)) => scale::host_relays(&args),
        Some(What::Dashboard(args)) => dashboard::run(&args),
        Some(What::Recover(args)) => recover::run(&args),
        Some(What::RecoverRank(args)) => recover::rank::run(&args),
        Some(What::CollectiveRank(args)) => collectives::rank::run(&args),
        Some(What::HostServer(args)) => server::host(&args),
    }
}

/// Why a benchmark gave no figures, and what to do about it.
#[derive(Debug)]
pub struct Failure {
    message: String,
    hint: Option<String>,
}

impl Failure {
    fn new(message: impl Into<String>) -> Self {
        Failure { message: message.into(), hint: None }
    }

    fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// The same failure, with the output of another process.
    fn followed_by(mut self, text: &str) -> Self {
        self.message += text;
        self
    }

    /// The same failure, with the place where it happened.
    fn during(mut self, what: impl fmt::Display) -> Self {
        self.message = format!("{what}: {}", self.message);
        self
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        match &self.hint {
            None => Ok(()),
            Some(hint) => write!(f, "\n  hint: {hint}"),
        }
    }
}

impl std::error::Error for Failure {}

/// Ctrl-C and SIGTERM as a flag: every wait checks it and returns, so that every server is ended on the way
/// out.
#[derive(Clone, Debug, Default)]
struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    fn install() -> Result<Self, Failure> {
        let flag = Arc::new(AtomicBool::new(false));
        for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
            // The second signal ends the program immediately; the servers die with it, see `server::host`.
            signal_hook::flag::register_conditional_shutdown(signal, 130, Arc::clone(&flag))
                .and_then(|_| signal_hook::flag::register(signal, Arc::clone(&flag)))
                .map_err(|error| Failure::new(format!("cannot listen for signals: {error}")))?;
        }
        Ok(Interrupt(flag))
    }

    fn check(&self) -> Result<(), Failure> {
        if self.0.load(Ordering::Relaxed) { Err(Failure::new("interrupted")) } else { Ok(()) }
    }
}
