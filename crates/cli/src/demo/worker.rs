//! One worker process: joins the others, trains, takes the tour, reports.
//!
//! It reports everything to the parent through the store, including why it failed. Each worker that noticed a
//! death reports it, and the parent makes one message of that.

#![expect(clippy::disallowed_methods, reason = "reports how long joining took")]

use std::sync::Arc;
use std::time::Instant;

use serde::{Deserialize, Serialize};
use tenfold::{Group, Options, Seat};
use tenfold_store::{StoreExt, TcpStore, TcpStoreOptions};

use super::tour::{self, Length, Tour};
use super::train::{self, Training};
use super::{LIMIT, keys};
use tenfold_console::{FAILURE, Outcome, SUCCESS};

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
    steps: u32,
    #[arg(long)]
    operations: u32,
    #[arg(long)]
    tour: bool,
}

/// The final report of a worker to the parent.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Report {
    pub(super) rank: usize,
    pub(super) pid: u32,
    /// Time from its start until all others had joined.
    pub(super) joined_ms: f64,
    #[serde(flatten)]
    pub(super) training: Training,
    #[serde(flatten)]
    pub(super) tour: Tour,
}

pub(crate) fn run_worker(args: &WorkerArgs) -> Outcome {
    let started = Instant::now();
    let options = TcpStoreOptions::new("127.0.0.1", args.port).timeout(LIMIT).world_size(args.workers);
    let store = Arc::new(TcpStore::open(options)?);
    let (key, value, code) = match work(args, &store, started) {
        Ok(report) => (keys::report(args.rank), serde_json::to_vec(&report)?, SUCCESS),
        Err(error) => (keys::failure(args.rank), error.to_string().into_bytes(), FAILURE),
    };
    store.set(key, value)?;
    store.ping()?; // the report has arrived before this process exits
    Ok(code)
}

fn work(
    args: &WorkerArgs,
    store: &Arc<TcpStore>,
    started: Instant,
) -> Result<Report, Box<dyn std::error::Error>> {
    let WorkerArgs { rank, workers, steps, operations, tour, .. } = *args;
    let group =
        Group::connect(store.clone(), Seat { rank, size: workers }, Options::new("demo").timeout(LIMIT))?;
    let joined_ms = started.elapsed().as_secs_f64() * 1e3;
    let mut told = 0;
    let training = train::train(&group, steps, |progress| {
        if rank == 0 {
            store.set(keys::progress(told), serde_json::to_vec(&progress)?)?;
            told += 1;
        }
        Ok::<(), Box<dyn std::error::Error>>(())
    })?;
    let length = if tour { Length::Whole } else { Length::Short };
    let tour = tour::take(store, &group, operations, length, LIMIT)?;
    Ok(Report { rank, pid: std::process::id(), joined_ms, training, tour })
}
