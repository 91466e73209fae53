//! `tenfold bench scale`: as many clients as this machine can hold, on one server and through relays.
//!
//! One machine plays all clients, over loopback. A process may have 20,000 open files here, so clients and
//! relays are spread over several processes: a *crew* drives some thousand clients from one thread
//! (`scale/crew`), and a process of relays runs some relays. This process starts them, tells all crews what
//! to do next, and measures until the last one has done it.
//!
//! What a job does when it starts: connect and be counted, meet in a barrier, wait for a key and read it,
//! exchange addresses.
#![expect(clippy::disallowed_methods, reason = "a benchmark reads the clock")]

pub(crate) mod crew;

use std::fmt::Write as _;
use std::io::Write as _;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use tenfold_console::ProgressLine;
use tenfold_store::{Limits, Relay, RelayOptions, StoreExt, TcpStore, TcpStoreOptions};

use self::crew::Crew;
use super::cores::Cores;
use super::report::median;
use super::server::{Implementation, Recipe, Server, raise_file_limit, tie_to_parent};
use super::{Failure, Interrupt};

/// Measure how a store starts jobs of many thousand clients, directly and through relays.
///
/// Clients connect and are counted, meet in a barrier, wait for one key and read it, and exchange addresses. All
/// processes run on this machine and use loopback only. With `--against torch` PyTorch's own server does the same in
/// turns, for the direct clients.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct ScaleArgs {
    /// Clients that connect directly to the server; up to about 19,000, because a process may have 20,000 open files
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_value = "1000,5000,19000")]
    clients: Vec<usize>,
    /// Clients that connect through relays; 0 for none
    #[arg(long, value_name = "N", default_value_t = 100_000)]
    relayed: usize,
    /// Relays between these and the server
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=4096))]
    relays: u32,
    /// Also measure this server, in turns
    #[arg(long, value_name = "PEER")]
    against: Option<Peer>,
    /// The Python that has PyTorch, for `--against torch`
    #[arg(long, value_name = "PATH", env = "TENFOLD_PYTHON", default_value = "python3")]
    python: PathBuf,
    /// How often everything is measured; the table shows the median
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
}

const EXAMPLES: &str = "\
Examples:
  tenfold bench scale                                            direct and through relays, about a minute
  tenfold bench scale --against torch                            with PyTorch's server for the direct clients
  tenfold bench scale --clients 2000 --relayed 0                 only 2,000 direct clients
  tenfold bench scale --clients 0 --relayed 100000 --relays 100  only relays";

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum Peer {
    /// PyTorch's TCPStore, its default server (libuv)
    Torch,
}

/// Clients of one process, if there are several processes: 20,000 files are the limit of many systems.
const CREW_MAX: usize = 17_000;
/// Addresses that each client reads.
const GATHERED: usize = 64;

pub(crate) fn run(args: &ScaleArgs) -> Result<(), Failure> {
    let interrupt = Interrupt::install()?;
    let files = raise_file_limit();
    let core_count = std::thread::available_parallelism().map_or(1, usize::from); // before any is given up
    let clients: Vec<usize> = args.clients.iter().copied().filter(|count| *count > 0).collect();
    if let Some(most) = clients.iter().max().filter(|most| **most as u64 + FILES_SPARE > files) {
        return Err(Failure::new(format!("cannot connect {most} clients: the limit is {files} open files"))
            .hint(format!(
                "pass at most `--clients {}`, or raise the hard limit (`ulimit -Hn`)",
                files.saturating_sub(FILES_SPARE)
            )));
    }
    let progress = ProgressLine::new();
    let mut text = String::new();
    // Relays first: the direct clients are bound to one core, so that those of both servers have the same.
    if args.relayed > 0 {
        let rows = relayed(args, &progress, &interrupt)?;
        let _ = writeln!(text, "{} clients through {} relays\n{}", args.relayed, args.relays, table(&rows));
    }
    if !clients.is_empty() {
        let mut recipes = vec![Recipe::tenfold(None)?.with(&["--max-connections", "19900"])];
        if let Some(Peer::Torch) = args.against {
            recipes.push(Recipe::torch(args.python.clone()));
        }
        let cores = Cores::settle()?;
        let servers: Vec<Server> = recipes
            .iter()
            .map(|recipe| Server::start(recipe, &cores, &interrupt))
            .collect::<Result<_, _>>()?;
        for count in clients {
            let rows = direct(count, args.rounds, &servers, &progress, &interrupt)?;
            let _ = writeln!(text, "{count} direct clients\n{}", table(&rows));
        }
    }
    progress.clear();
    let _ = write!(
        text,
        "Medians of {} rounds on {core_count} cores, loopback; one machine plays all clients.\n{NOTES}",
        args.rounds
    );
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(Failure::new(format!("cannot print: {error}")))
        }
        _ => Ok(()),
    }
}

const FILES_SPARE: u64 = 64;

const NOTES: &str = "\
wall: from the first connection or byte until the last client has its answer. CPU: of the server (and of all relays) per
client. connect: connection, PING and ADD. barrier: one BARRIER of all. read: all WAIT for one key, it is SET, all GET
it. gather: each SETs its address, and WAITs for and MULTI_GETs 64 of them. memory: resident memory per idle client.
";

/// What a job does, in this order.
const PHASES: [&str; 4] = ["connect", "barrier", "read", "gather"];

/// One phase of one run.
#[derive(Clone, Copy, Debug)]
struct Figure {
    wall: Duration,
    server_cpu: f64,
    relay_cpu: f64,
}

/// One line of a table.
struct Row {
    who: Implementation,
    phase: &'static str,
    figures: Vec<Figure>,
    /// Bytes per client of the server and of the relays, where it was measured.
    memory: Option<(f64, f64)>,
}

/// The processes of one run.
struct Run<'a> {
    server: &'a Server,
    relays: &'a [Server],
    crews: Vec<Crew>,
    clients: usize,
    /// Makes keys of its own.
    name: String,
    interrupt: &'a Interrupt,
}

fn direct(
    count: usize,
    rounds: u32,
    servers: &[Server],
    progress: &ProgressLine,
    interrupt: &Interrupt,
) -> Result<Vec<Row>, Failure> {
    let mut rows: Vec<Row> = Vec::new();
    for round in 0..rounds {
        for server in servers {
            progress.show(format_args!("{count} clients of {}, round {}", server.implementation, round + 1));
            let crews = vec![Crew::start(&[server.address], 1, 0..count, count)?];
            let name = format!("{count}-{round}");
            let run = Run { server, relays: &[], crews, clients: count, name, interrupt };
            run.all(round == 0, &mut rows).map_err(|failure| {
                failure.during(format_args!("{count} clients of {}", server.implementation))
            })?;
        }
    }
    Ok(rows)
}

fn relayed(args: &ScaleArgs, progress: &ProgressLine, interrupt: &Interrupt) -> Result<Vec<Row>, Failure> {
    let anywhere = Cores::default();
    let clients = args.relayed;
    let relays = args.relays as usize;
    let mut rows = Vec::new();
    for round in 0..args.rounds {
        progress.show(format_args!("{clients} clients through {relays} relays, round {}", round + 1));
        let server = Server::start(&Recipe::tenfold(None)?, &anywhere, interrupt)?;
        let hosts = clients.div_ceil(CREW_MAX).min(relays);
        let (mut processes, mut addresses) = (Vec::new(), Vec::new());
        for host in 0..hosts {
            let share = relays * (host + 1) / hosts - relays * host / hosts;
            let recipe = Recipe::relays(server.address, share);
            let (process, lines) = Server::start_talkative(&recipe, &anywhere, interrupt)?;
            addresses.push(process.address);
            for _ in 1..share {
                let line = lines.next(interrupt)?;
                let address = line.strip_prefix("listening on ").and_then(|text| text.parse().ok());
                addresses.push(address.ok_or_else(|| Failure::new(format!("a relay printed `{line}`")))?);
            }
            processes.push(process);
        }
        let crews = clients.div_ceil(CREW_MAX);
        let crew = |index: usize| {
            let (first, end) = (clients * index / crews, clients * (index + 1) / crews);
            // A client's relay is that of its rank, so each relay has clients of consecutive ranks.
            let relay_of = |client: usize| client * relays / clients;
            Crew::start(&addresses[relay_of(first)..=relay_of(end - 1)], relays, first..end, clients)
        };
        let crews = (0..crews).map(crew).collect::<Result<Vec<_>, _>>()?;
        let name = format!("relayed-{round}");
        let run = Run { server: &server, relays: &processes, crews, clients, name, interrupt };
        run.all(round == 0, &mut rows)?;
    }
    Ok(rows)
}

impl Run<'_> {
    /// All phases; adds their figures to the rows.
    fn all(mut self, measure_memory: bool, rows: &mut Vec<Row>) -> Result<(), Failure> {
        let setter = self.setter()?;
        for (index, phase) in PHASES.into_iter().enumerate() {
            let before = measure_memory.then(|| self.memory());
            let figure = self.phase(index, &setter)?;
            let memory = (index == 0).then(|| before.map(|before| self.grown(before))).flatten();
            let who = self.server.implementation;
            match rows.iter_mut().find(|row| row.who == who && row.phase == phase) {
                Some(row) => row.figures.push(figure),
                None => rows.push(Row { who, phase, figures: vec![figure], memory }),
            }
        }
        let arrived = setter.add(format!("count-{}", self.name), 0).map_err(store_failure)?;
        if arrived != self.clients as i64 {
            return Err(Failure::new(format!("{arrived} of {} clients were counted", self.clients)));
        }
        for crew in &mut self.crews {
            crew.end();
        }
        Ok(())
    }

    fn setter(&self) -> Result<TcpStore, Failure> {
        let address = self.server.address;
        let options =
            TcpStoreOptions::new(address.ip().to_string(), address.port()).timeout(Duration::from_secs(60));
        TcpStore::open(options).map_err(store_failure)
    }

    fn phase(&mut self, index: usize, setter: &TcpStore) -> Result<Figure, Failure> {
        let cpu = |servers: &[Server]| servers.iter().filter_map(Server::cpu_time).sum::<Duration>();
        let before = (self.server.cpu_time(), cpu(self.relays));
        let start = Instant::now();
        let name = self.name.clone();
        match PHASES[index] {
            "connect" => self.tell(&format!("connect count-{name}"))?,
            "barrier" => self.tell(&format!("barrier barrier-{name}"))?,
            "read" => {
                self.tell(&format!("park key-{name}"))?;
                setter.set(format!("key-{name}"), crew::VALUE).map_err(store_failure)?;
                self.tell(&format!("read key-{name}"))?;
            }
            _ => {
                self.tell(&format!("publish {name}"))?;
                self.tell(&format!("gather {name} {GATHERED}"))?;
            }
        }
        let wall = start.elapsed();
        let per_client = |before: Duration, after: Duration| {
            after.saturating_sub(before).as_secs_f64() * 1e6 / self.clients as f64
        };
        let server_cpu = before
            .0
            .zip(self.server.cpu_time())
            .map_or(f64::NAN, |(before, after)| per_client(before, after));
        Ok(Figure { wall, server_cpu, relay_cpu: per_client(before.1, cpu(self.relays)) })
    }

    /// Lets all crews do something, and waits for all.
    fn tell(&mut self, order: &str) -> Result<(), Failure> {
        self.crews.iter_mut().try_for_each(|crew| crew.tell(order))?;
        self.crews.iter().try_for_each(|crew| crew.wait(self.interrupt))
    }

    fn memory(&self) -> (u64, u64) {
        let relays = self.relays.iter().filter_map(Server::resident).sum();
        (self.server.resident().unwrap_or(0), relays)
    }

    fn grown(&self, before: (u64, u64)) -> (f64, f64) {
        let after = self.memory();
        let per_client = |before: u64, after: u64| after.saturating_sub(before) as f64 / self.clients as f64;
        (per_client(before.0, after.0), per_client(before.1, after.1))
    }
}

fn store_failure(error: tenfold_store::Error) -> Failure {
    Failure::new(error.to_string())
}

fn table(rows: &[Row]) -> String {
    let mut text = format!(
        "{:<9} {:<8} {:>10} {:>16} {:>16} {:>16} {:>8}\n",
        "", "", "wall ms", "server CPU us", "relay CPU us", "memory B", "ratio"
    );
    let figure = |row: &Row, of: fn(&Figure) -> f64| median(row.figures.iter().map(of).collect());
    let wall = |row: &Row| figure(row, |figure| figure.wall.as_secs_f64() * 1e3);
    let (mut total, mut total_cpu) = (0.0, 0.0);
    for phase in PHASES {
        let ours = rows.iter().find(|row| row.phase == phase && row.who == Implementation::Tenfold);
        for row in rows.iter().filter(|row| row.phase == phase) {
            let is_peer = row.who != Implementation::Tenfold;
            let ratio = ours
                .filter(|_| is_peer)
                .map_or(String::new(), |ours| format!("{:.2}", wall(row) / wall(ours)));
            let memory = row.memory.map_or(String::new(), |(server, relays)| {
                if relays > 0.0 { format!("{server:.0} + {relays:.0}") } else { format!("{server:.0}") }
            });
            let relay_cpu = figure(row, |figure| figure.relay_cpu);
            let relay_cpu = if relay_cpu > 0.0 { format!("{relay_cpu:.2}") } else { String::new() };
            let _ = writeln!(
                text,
                "{phase:<9} {:<8} {:>10.1} {:>16.2} {relay_cpu:>16} {memory:>16} {ratio:>8}",
                row.who,
                wall(row),
                figure(row, |figure| figure.server_cpu),
            );
            if !is_peer {
                total += wall(row);
                total_cpu += figure(row, |figure| figure.server_cpu);
            }
        }
    }
    let _ = writeln!(text, "{:<9} {:<8} {total:>10.1} {total_cpu:>16.2}", "all", Implementation::Tenfold);
    text
}

/// Relays of one process.
#[derive(Debug, clap::Args)]
pub(crate) struct RelaysArgs {
    #[arg(long)]
    upstream: SocketAddr,
    #[arg(long)]
    count: usize,
}

/// Runs relays until this process is killed.
pub(crate) fn host_relays(args: &RelaysArgs) -> Result<(), Failure> {
    tie_to_parent()?;
    raise_file_limit();
    let mut limits = Limits::default();
    limits.other_users = false; // as `tenfold relay`
    let relays: Vec<Relay> = (0..args.count)
        .map(|_| {
            let upstream = args.upstream;
            Relay::start(RelayOptions::new(upstream.ip().to_string(), upstream.port()).limits(limits))
        })
        .collect::<Result<_, _>>()
        .map_err(store_failure)?;
    for relay in &relays {
        println!("listening on {}", relay.address());
    }
    loop {
        std::thread::park();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_a_row_per_phase_and_ratios_against_the_peer() {
        let figure =
            |millis, cpu| Figure { wall: Duration::from_millis(millis), server_cpu: cpu, relay_cpu: 0.0 };
        let row = |who, phase, millis| Row {
            who,
            phase,
            figures: vec![figure(millis, 2.5), figure(millis + 2, 2.5), figure(millis + 1, 2.5)],
            memory: None,
        };
        let rows: Vec<Row> = PHASES
            .into_iter()
            .flat_map(|phase| [row(Implementation::Tenfold, phase, 9), row(Implementation::Torch, phase, 29)])
            .collect();
        let text = table(&rows);
        assert_eq!(text.lines().count(), 10, "{text}");
        assert!(text.contains("barrier   torch          30.0"), "{text}");
        assert_eq!(text.matches(" 3.00\n").count(), 4, "{text}");
        assert!(text.ends_with("all       tenfold        40.0            10.00\n"), "{text}");
    }
}
