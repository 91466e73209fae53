//! `tenfold bench store`: a store server under load, alone or compared with PyTorch's.
//!
//! The servers are child processes, the load comes from one thread here. Two groups of cases have separate
//! servers: what a fresh server needs for connections (memory, connecting), and everything else.
#![expect(clippy::disallowed_methods, reason = "a benchmark reads the clock")]

use std::fs::File;
use std::io::Write as _;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::case::{Case, Point, Unit};
use super::cores::Cores;
use super::load::Fleet;
use super::report::{self, Row, Sample, median};
use super::script::Scripts;
use super::server::{Implementation, Recipe, Server, raise_file_limit};
use super::{Failure, Interrupt, crowd};
use tenfold_console::ProgressLine;

/// Measures a store server: operations per second, waking, connecting, memory.
///
/// Starts the server as a child process and drives it from one thread. With `--against torch` PyTorch's own server
/// runs the same cases in the same rounds, and the table shows how many times faster tenfold is.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct StoreArgs {
    /// Also measure this server, in the same rounds
    #[arg(long, value_name = "PEER")]
    against: Option<Peer>,

    /// The Python that has PyTorch, for `--against torch`
    #[arg(long, value_name = "PATH", env = "TENFOLD_PYTHON", default_value = "python3")]
    python: PathBuf,

    /// How often each case is measured; the table shows the median [default: 5, with --quick 3]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: Option<u32>,

    /// Fewer cases and shorter rounds: under 30 s
    #[arg(long)]
    quick: bool,

    /// Only these cases
    #[arg(long, value_name = "CASE,…", value_delimiter = ',')]
    only: Vec<Case>,

    /// Also write the figures to this file, as a list of rows
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,

    /// Starts the server in tenfold's column, if not this program
    #[arg(long, value_name = "COMMAND", hide = true)]
    server_command: Option<String>,
}

const EXAMPLES: &str = "\
Examples:
  tenfold bench store                                    tenfold alone, about two minutes
  tenfold bench store --against torch --quick            beside PyTorch's server, under 30 s
  tenfold bench store --against torch --only get,wake    two cases, all sizes
  TENFOLD_PYTHON=venv/bin/python tenfold bench store --against torch --json rows.json";

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum Peer {
    /// PyTorch's TCPStore, its default server (libuv)
    Torch,
}

pub(crate) fn run(args: &StoreArgs) -> Result<(), Failure> {
    let interrupt = Interrupt::install()?;
    let mut json = args.json.as_ref().map(|path| create(path)).transpose()?;
    let mut recipes = vec![Recipe::tenfold(args.server_command.as_deref())?];
    if let Some(Peer::Torch) = args.against {
        recipes.push(Recipe::torch(args.python.clone()));
    }
    let plan = Plan::new(args, raise_file_limit());
    let core_count = std::thread::available_parallelism().map_or(1, usize::from);
    let cores = Cores::settle()?;
    let placement = match cores.generator {
        Some(_) => "the generator on one, the servers on the others",
        None => "shared by the generator and the servers",
    };
    let mut bench =
        Bench { plan, recipes, cores, interrupt, rows: Vec::new(), progress: ProgressLine::new() };
    bench.run()?;

    bench.rows.sort_by_key(|row| row.point);
    if let Some((path, file)) = &mut json {
        file.write_all(report::json(&bench.rows).as_bytes())
            .map_err(|error| Failure::new(format!("cannot write `{}`: {error}", path.display())))?;
    }
    let text = format!(
        "{}\nCores: {core_count}, {placement}; up to {} rounds of {} ms; medians.\n{NOTES}{}",
        report::table(&bench.rows),
        bench.plan.rounds,
        bench.plan.window.as_millis(),
        if args.against.is_some() { TORCH_NOTE } else { "" }
    );
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(Failure::new(format!("cannot print: {error}")))
        }
        _ => Ok(()),
    }
}

const NOTES: &str = "\
A ratio above 1 means that tenfold is better. In flight: operations each client writes in one go, the next when all
are answered. set and multi_set have no reply: each batch ends with one PING. An operation of wait_get, queue and
delete is two requests. wake: from the SET until the last client knows. connect: until all have the answer to PING and
ADD. memory: resident memory of the server for an idle client, without the kernel's. CPU: of the server, all threads.
";

const TORCH_NOTE: &str = "\
torch: libuv server, spared the reverse-DNS look-up it does for every client (5 s for each lost packet as shipped).
";

/// Created before anything is measured: a path that cannot be written should not cost minutes.
pub(crate) fn create(path: &PathBuf) -> Result<(&PathBuf, File), Failure> {
    match File::create(path) {
        Ok(file) => Ok((path, file)),
        Err(error) => Err(Failure::new(format!("cannot write `{}`: {error}", path.display()))),
    }
}

/// What is measured, how often, how long.
#[derive(Debug)]
struct Plan {
    rounds: usize,
    /// How long one case runs in one round.
    window: Duration,
    connections: &'static [usize],
    waiters: &'static [usize],
    arrivals: Vec<usize>,
    idle: usize,
    only: Vec<Case>,
}

/// Files that are open for other reasons than a client.
const FILES_SPARE: u64 = 64;

impl Plan {
    fn new(args: &StoreArgs, files_max: u64) -> Self {
        let clients_max = files_max.saturating_sub(FILES_SPARE).max(1) as usize;
        let (rounds, window, connections, arrivals, idle): (_, _, &[usize], &[usize], _) = match args.quick {
            true => (3, Duration::from_millis(30), &[1, 64], &[100, 1000], 1000),
            false => (5, Duration::from_millis(100), &[1, 8, 64, 512], &[100, 1000, 5000], 2000),
        };
        let cut = |count: usize, case: Case| {
            if count > clients_max {
                eprintln!("note: {} of {count} clients cut to {clients_max} by RLIMIT_NOFILE", case.name());
            }
            count.min(clients_max)
        };
        let mut arrivals: Vec<usize> = arrivals.iter().map(|&count| cut(count, Case::Connect)).collect();
        arrivals.dedup();
        Plan {
            rounds: args.rounds.map_or(rounds, |rounds| rounds as usize),
            window,
            connections,
            waiters: &[1, 512],
            arrivals,
            idle: cut(idle, Case::Memory),
            only: args.only.clone(),
        }
    }

    fn wants(&self, case: Case) -> bool {
        self.only.is_empty() || self.only.contains(&case)
    }

    fn wanted(&self, cases: &[Case]) -> Vec<Case> {
        cases.iter().copied().filter(|&case| self.wants(case)).collect()
    }

    /// Rows the table will have, for the progress line.
    fn rows(&self) -> usize {
        self.wanted(&Case::LOADS).len() * self.connections.len() * IN_FLIGHT.len()
            + self.wanted(&Case::LARGE).len()
            + usize::from(self.wants(Case::Wake)) * self.waiters.len()
            + usize::from(self.wants(Case::Connect)) * self.arrivals.len()
            + usize::from(self.wants(Case::Memory))
    }
}

const IN_FLIGHT: [usize; 2] = [1, 16];

/// A case that has taken this long gets no further round, if it has enough for a median: a busy machine or a
/// slow server should not turn minutes into many.
const POINT_MAX: Duration = Duration::from_millis(1500);
const ROUNDS_LEAST: usize = 3;

struct Bench {
    plan: Plan,
    recipes: Vec<Recipe>,
    cores: Cores,
    interrupt: Interrupt,
    rows: Vec<Row>,
    progress: ProgressLine,
}

/// One server and its clients, while a group of points lasts.
struct Side<'a> {
    server: &'a Server,
    fleet: Fleet,
}

impl Bench {
    fn run(&mut self) -> Result<(), Failure> {
        let fresh = self.plan.wanted(&[Case::Memory, Case::Connect]);
        if !fresh.is_empty() {
            let servers = self.start_servers()?;
            self.memory(&servers)?;
            self.arrivals(&servers)?;
        }
        if fresh.len() < 2 && self.plan.rows() == self.rows.len() {
            return Ok(()); // `--only` selects nothing else
        }
        let servers = self.start_servers()?;
        self.loads(&servers)?;
        self.large(&servers)?;
        self.wakes(&servers)?;
        self.progress.clear();
        Ok(())
    }

    fn start_servers(&self) -> Result<Vec<Server>, Failure> {
        self.recipes.iter().map(|recipe| Server::start(recipe, &self.cores, &self.interrupt)).collect()
    }

    fn open<'a>(&self, servers: &'a [Server], connections: usize) -> Result<Vec<Side<'a>>, Failure> {
        let open = |server: &'a Server| {
            let fleet = Fleet::open(server.address, connections, &self.interrupt)
                .map_err(|failure| failure.during(format_args!("connecting to {}", server.implementation)))?;
            Ok(Side { server, fleet })
        };
        servers.iter().map(open).collect()
    }

    fn memory(&mut self, servers: &[Server]) -> Result<(), Failure> {
        if !self.plan.wants(Case::Memory) {
            return Ok(());
        }
        let idle = self.plan.idle;
        let interrupt = self.interrupt.clone();
        let mut servers: Vec<&Server> = servers.iter().collect();
        let point = Point { case: Case::Memory, in_flight: 1, connections: idle };
        // Only once: a server that has had these clients keeps their memory for the next ones.
        self.measure(
            point,
            1,
            &mut servers,
            |server| *server,
            |server| {
                let _first_touch = Fleet::open(server.address, 16, &interrupt)?;
                let before = server.resident();
                let _clients = Fleet::open(server.address, idle, &interrupt)?;
                let after = server.resident();
                let grown =
                    before.zip(after).map_or(f64::NAN, |(before, after)| after.saturating_sub(before) as f64);
                Ok(Sample { figure: grown / idle as f64, cpu_us: None })
            },
        )
    }

    fn arrivals(&mut self, servers: &[Server]) -> Result<(), Failure> {
        if !self.plan.wants(Case::Connect) {
            return Ok(());
        }
        let interrupt = self.interrupt.clone();
        let mut servers: Vec<&Server> = servers.iter().collect();
        for count in self.plan.arrivals.clone() {
            let point = Point { case: Case::Connect, in_flight: 1, connections: count };
            self.measure(
                point,
                self.plan.rounds,
                &mut servers,
                |server| *server,
                |server| {
                    let before = server.cpu_time(); // also lets it finish with disconnected clients
                    let arrived = crowd::arrive(server.address, count, &interrupt)?;
                    let cpu_us = per_operation(before, server.cpu_time(), count as u64);
                    Ok(Sample { figure: arrived.elapsed.as_secs_f64() * 1e6, cpu_us })
                },
            )?;
        }
        Ok(())
    }

    fn loads(&mut self, servers: &[Server]) -> Result<(), Failure> {
        let cases = self.plan.wanted(&Case::LOADS);
        if cases.is_empty() {
            return Ok(());
        }
        for &connections in self.plan.connections {
            let mut sides = self.open(servers, connections)?;
            for &case in &cases {
                for in_flight in IN_FLIGHT {
                    self.load(Point { case, in_flight, connections }, &mut sides)?;
                }
            }
        }
        Ok(())
    }

    fn large(&mut self, servers: &[Server]) -> Result<(), Failure> {
        let mut sides = self.open(servers, 1)?;
        for case in self.plan.wanted(&Case::LARGE) {
            self.load(Point { case, in_flight: 1, connections: 1 }, &mut sides)?;
        }
        Ok(())
    }

    fn load(&mut self, point: Point, sides: &mut [Side<'_>]) -> Result<(), Failure> {
        let scripts = Scripts::new(point.case, point.connections, point.in_flight);
        let window = self.plan.window;
        self.measure(
            point,
            self.plan.rounds,
            sides,
            |side| side.server,
            |side| {
                let sample = drive(side, &scripts, window)?;
                let us = |rate: f64| 1e6 / rate;
                let figure =
                    if point.case.unit() == Unit::Micros { us(sample.figure) } else { sample.figure };
                Ok(Sample { figure, ..sample })
            },
        )
    }

    fn wakes(&mut self, servers: &[Server]) -> Result<(), Failure> {
        if !self.plan.wants(Case::Wake) {
            return Ok(());
        }
        let window = self.plan.window;
        for &waiters in self.plan.waiters {
            let crowds = self.open(servers, waiters)?;
            let setters = self.open(servers, 1)?;
            let mut sides: Vec<(Side<'_>, Side<'_>)> = crowds.into_iter().zip(setters).collect();
            let point = Point { case: Case::Wake, in_flight: 1, connections: waiters };
            self.measure(
                point,
                self.plan.rounds,
                &mut sides,
                |(crowd, _)| crowd.server,
                |(crowd, setter)| {
                    let before = crowd.server.cpu_time();
                    let start = Instant::now();
                    let mut times = Vec::new();
                    while times.is_empty() || start.elapsed() < window {
                        times.push(crowd::wake(&mut crowd.fleet, &mut setter.fleet)?.as_secs_f64() * 1e6);
                    }
                    let woken = (times.len() * waiters) as u64;
                    let cpu_us = per_operation(before, crowd.server.cpu_time(), woken);
                    Ok(Sample { figure: median(times), cpu_us })
                },
            )?;
        }
        Ok(())
    }

    /// Runs one point on every side, round after round, each round beginning with another side.
    fn measure<S>(
        &mut self,
        point: Point,
        rounds: usize,
        sides: &mut [S],
        server: impl Fn(&S) -> &Server,
        mut run: impl FnMut(&mut S) -> Result<Sample, Failure>,
    ) -> Result<(), Failure> {
        self.progress.show(format_args!("[{}/{}] {point}", self.rows.len() + 1, self.plan.rows()));
        let mut columns: Vec<(Implementation, Vec<Sample>)> =
            sides.iter().map(|side| (server(side).implementation, Vec::new())).collect();
        let start = Instant::now();
        for round in 0..rounds {
            if round >= ROUNDS_LEAST && start.elapsed() > POINT_MAX {
                break;
            }
            for step in 0..sides.len() {
                let index = (round + step) % sides.len();
                let (implementation, samples) = &mut columns[index];
                let sample = run(&mut sides[index])
                    .map_err(|failure| failure.during(format_args!("{point} on {implementation}")))?;
                samples.push(sample);
            }
        }
        self.rows.push(Row { point, columns });
        Ok(())
    }
}

/// One round of a load: prepared, checked before and after, verified at the end.
fn drive(side: &mut Side<'_>, scripts: &Scripts, window: Duration) -> Result<Sample, Failure> {
    let Side { server, fleet } = side;
    fn parts(exchange: &super::script::Exchange) -> (&[u8], &[u8]) {
        (&exchange.request, &exchange.reply)
    }
    fleet.exchange(|index| parts(&scripts.of(index).prepare))?;

    let before = server.cpu_time();
    fleet.exchange(|index| parts(&scripts.of(index).turn))?;
    let steady = fleet.steady(scripts, window)?;
    let last: Vec<_> =
        (0..fleet.len()).map(|index| scripts.of(index).reply(fleet.turns(index) + 1)).collect();
    fleet.exchange(|index| (scripts.of(index).turn.request.as_slice(), &last[index]))?;
    let turns_served = steady.turns_served + 2 * fleet.len() as u64;
    let cpu_us = per_operation(before, server.cpu_time(), turns_served * scripts.in_flight as u64);

    fleet.exchange(|index| parts(&scripts.of(index).proof))?;
    let operations = steady.turns * scripts.in_flight as u64;
    Ok(Sample { figure: operations as f64 / steady.elapsed.as_secs_f64(), cpu_us })
}

fn per_operation(before: Option<Duration>, after: Option<Duration>, operations: u64) -> Option<f64> {
    Some(after?.saturating_sub(before?).as_secs_f64() * 1e6 / operations as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: StoreArgs,
    }

    fn plan(line: &[&str], files_max: u64) -> Plan {
        Plan::new(&Line::parse_from([&["store"], line].concat()).args, files_max)
    }

    #[test]
    fn only_the_cases_asked_for_are_planned() {
        assert_eq!(plan(&[], 20_000).rows(), 10 * 4 * 2 + 3 + 2 + 3 + 1);
        assert_eq!(plan(&["--only", "get,wake"], 20_000).rows(), 4 * 2 + 2);
        assert_eq!(plan(&["--only", "memory"], 20_000).rows(), 1);
    }

    #[test]
    fn clients_beyond_the_file_limit_are_cut() {
        let plan = plan(&[], 1024);
        assert_eq!((plan.arrivals, plan.idle), (vec![100, 960], 960));
    }

    #[test]
    fn cpu_time_is_shared_among_operations() {
        let ms = |count| Some(Duration::from_millis(count));
        assert_eq!(per_operation(ms(10), ms(30), 1000), Some(20.0));
        assert_eq!(per_operation(None, ms(30), 1000), None);
    }
}
