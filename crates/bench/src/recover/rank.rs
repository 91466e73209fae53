//! One of our ranks: reduces in a loop until a rank dies, then shrinks the group and continues.
//!
//! The peers' are in `peers/recover_gloo.py` and `peers/recover_ulfm.c`.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tenfold::{Group, Options, ReduceOp, Seat};
use tenfold_store::{Server, ServerOptions, TcpStore};

use super::super::Failure;
use super::protocol::{monotonic_ns, parse_store_order};

/// One rank of ours that survives, or is killed.
#[derive(Debug, clap::Args)]
pub(crate) struct RankArgs {
    #[arg(long)]
    coordinator: PathBuf,
    #[arg(long)]
    team: String,
    #[arg(long)]
    rank: usize,
    #[arg(long)]
    ranks: usize,
    #[arg(long)]
    bytes: usize,
    #[arg(long)]
    timeout_ms: u64,
}

/// After so many all-reduces all connections are open.
const TURNS_BEFORE: usize = 20;

pub(crate) fn run(args: &RankArgs) -> Result<(), Failure> {
    let mut coordinator = Coordinator::connect(args)?;
    coordinator.say(format_args!(
        "hello {} {} {} tenfold {}",
        args.team,
        args.rank,
        std::process::id(),
        env!("CARGO_PKG_VERSION")
    ))?;
    let (store, _server) = coordinator.store()?;
    let options = Options::new(args.team.as_str()).timeout(Duration::from_millis(args.timeout_ms));
    let seat = Seat { rank: args.rank, size: args.ranks };
    let group = Group::connect(Arc::new(store), seat, options).map_err(failure)?;
    let mut rank = Rank { rank: args.rank, elements: vec![0.0; args.bytes / size_of::<f64>()] };

    let (error, group) = match rank.work(&group, args.ranks, &mut coordinator)? {
        Ended::Wrong(reason) => return coordinator.finish(format_args!("wrong {reason}")),
        Ended::Error(error_ns) => (error_ns, group),
    };
    match rank.recover(group) {
        Err(reason) => {
            coordinator.finish(format_args!("failed {error} {}", reason.to_string().replace('\n', " ")))
        }
        Ok((done, group)) => {
            let Some(sum) = rank.sum() else {
                return coordinator.finish(format_args!("wrong {}", rank.difference()));
            };
            coordinator.say(format_args!("recovered {error} {done} {sum}"))?;
            // The work of a group that has recovered goes on until the coordinator ends it.
            while rank.all_reduce(&group).is_ok() {}
            coordinator.wait_for_the_end()
        }
    }
}

enum Ended {
    /// When an operation failed.
    Error(u64),
    Wrong(String),
}

struct Rank {
    rank: usize,
    elements: Vec<f64>,
}

impl Rank {
    /// Each rank adds a power of two, so the sum says which ranks took part.
    fn all_reduce(&mut self, group: &Group) -> tenfold::Result<()> {
        self.elements.fill((1_u64 << self.rank) as f64);
        group.all_reduce(&mut self.elements, ReduceOp::Sum)
    }

    /// The result, if all elements are the same.
    fn sum(&self) -> Option<u64> {
        let first = self.elements[0];
        self.elements.iter().all(|element| *element == first).then_some(first as u64)
    }

    fn difference(&self) -> String {
        let at = self.elements.iter().position(|element| *element != self.elements[0]).unwrap_or(0);
        format!("rank {} has {} at 0 and {} at {at}", self.rank, self.elements[0], self.elements[at])
    }

    /// Until an operation fails.
    fn work(&mut self, group: &Group, ranks: usize, coordinator: &mut Coordinator) -> Result<Ended, Failure> {
        let all = (1_u64 << ranks) - 1;
        for turn in 1.. {
            if self.all_reduce(group).is_err() {
                break;
            }
            match self.sum() {
                Some(sum) if sum == all => {}
                Some(sum) => {
                    return Ok(Ended::Wrong(format!("rank {} has {sum} instead of {all}", self.rank)));
                }
                None => return Ok(Ended::Wrong(self.difference())),
            }
            if turn == TURNS_BEFORE {
                coordinator.say(format_args!("running"))?;
            }
        }
        Ok(Ended::Error(monotonic_ns()))
    }

    /// When an all-reduce of the survivors succeeded, and their group.
    fn recover(&mut self, mut group: Group) -> tenfold::Result<(u64, Group)> {
        loop {
            group = group.shrink()?;
            if self.all_reduce(&group).is_ok() {
                return Ok((monotonic_ns(), group));
            }
        }
    }
}

struct Coordinator {
    stream: UnixStream,
    orders: BufReader<UnixStream>,
}

impl Coordinator {
    fn connect(args: &RankArgs) -> Result<Self, Failure> {
        let stream = UnixStream::connect(&args.coordinator).map_err(lost)?;
        let orders = BufReader::new(stream.try_clone().map_err(lost)?);
        Ok(Coordinator { stream, orders })
    }

    fn say(&mut self, line: std::fmt::Arguments<'_>) -> Result<(), Failure> {
        self.stream.write_all(format!("{line}\n").as_bytes()).map_err(lost)
    }

    /// The store that was named, or our own, of which the others hear.
    fn store(&mut self) -> Result<(TcpStore, Option<Server>), Failure> {
        let mut order = String::new();
        self.orders.read_line(&mut order).map_err(lost)?;
        let (host, mut port) = parse_store_order(&order)
            .ok_or_else(|| Failure::new(format!("invalid order `{}`", order.trim_end())))?;
        let mut server = None;
        if port == 0 {
            let started = Server::start(ServerOptions::new(host.as_str(), 0)).map_err(failure)?;
            port = started.address().port();
            self.say(format_args!("store {port}"))?;
            server = Some(started);
        }
        Ok((TcpStore::connect(&host, port).map_err(failure)?, server))
    }

    fn finish(mut self, line: std::fmt::Arguments<'_>) -> Result<(), Failure> {
        self.say(line)?;
        self.wait_for_the_end()
    }

    /// The end of the connection, if this process lives to see it.
    fn wait_for_the_end(mut self) -> Result<(), Failure> {
        self.orders.read_to_end(&mut Vec::new()).map(drop).map_err(lost)
    }
}

fn lost(error: std::io::Error) -> Failure {
    Failure::new(format!("lost the coordinator: {error}"))
}

fn failure(error: impl std::fmt::Display) -> Failure {
    Failure::new(error.to_string())
}
