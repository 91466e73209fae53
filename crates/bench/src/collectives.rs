//! `tenfold bench all_reduce …`: collectives on one machine, or on hosts made of it, alone or compared with
//! Gloo and MPI.
//!
//! For each number of ranks, or of hosts with ranks, every implementation has a team of processes that stay for all cases ([`team`]).
//! A case is checked, paced and then measured round after round; the ranks of other implementations sleep in
//! a read. Operations follow each other without a barrier between them, as in nccl-tests, and a time is that
//! of the slowest rank.
//!
//! `operation` is what can be measured, `peer` the implementations and how to start them, `protocol` the
//! orders to ranks, `rank` one of ours, `values` how results are checked, `figures` the tables. `layout` says
//! which hosts there are, `namespace` makes one, `hosts` all of them and the links between them.
#![expect(clippy::disallowed_methods, reason = "a benchmark reads the clock")]

mod figures;
pub(crate) mod hosts;
pub(crate) mod layout;
pub(crate) mod namespace;
pub(crate) mod operation;
pub(crate) mod peer;
mod protocol;
pub(crate) mod rank;
pub(crate) mod team;
mod values;

use std::io::Write as _;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::store::create;
use super::{Failure, Interrupt};
use figures::{Column, Row, Sample, Subject};
use hosts::Hosts;
use layout::{Delay, Layout, Limits, Rate};
use operation::{Crew, Dtype, Memory, Operation, Point, Transport};
pub(crate) use peer::python_with_torch;
use peer::{Implementation, PeerName, Recipe, Site, core_count};
use protocol::{Order, Pace};
use team::{Coordinator, Outcome, Team};
use tenfold_console::{ProgressLine, parse_size};

/// Beyond this the known values would no longer be exact in every dtype, see `peers/`.
const RANKS_MAX: usize = 64;
const SIZE_MAX: usize = 1 << 30;

#[derive(Debug, clap::Args)]
pub(crate) struct CollectiveArgs {
    /// What to measure
    #[arg(value_name = "OP", default_value = "all_reduce")]
    operations: Vec<Operation>,

    /// How many ranks, all on this machine
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_value = "2", value_parser = parse_ranks)]
    ranks: Vec<usize>,

    /// Make hosts out of network namespaces instead, with this many ranks each: 2x2 is two hosts of two ranks
    #[arg(long, value_name = "HxR,…", value_delimiter = ',', conflicts_with_all = ["ranks", "transport"])]
    hosts: Vec<Layout>,

    /// Limit the link of each host to this many bits per second in each direction, such as 1G
    #[arg(long, value_name = "RATE", requires = "hosts")]
    link_rate: Option<Rate>,

    /// Give each host this many links, each on a network of its own: an implementation may use them all
    #[arg(long, value_name = "N", requires = "hosts", default_value = "1", value_parser = clap::value_parser!(u8).range(1..=8))]
    links: u8,

    /// Delay every packet by this time on the link of its sender and again on that of its receiver, such as 50us
    #[arg(long, value_name = "TIME", requires = "hosts")]
    link_delay: Option<Delay>,

    /// Bytes of the larger buffer of a rank
    #[arg(long, value_name = "SIZE,…", value_delimiter = ',', default_value = SIZES, value_parser = parse_bytes)]
    sizes: Vec<usize>,

    /// The elements
    #[arg(long, default_value = "f32")]
    dtype: Dtype,

    /// What carries the bytes
    #[arg(long, default_value = "shm")]
    transport: Transport,

    /// Also measure these, in the same rounds
    #[arg(long, value_name = "PEER,…", value_delimiter = ',')]
    against: Vec<PeerName>,

    /// Where tenfold's tensors lie [default: private,shared; private alone with --transport tcp or --hosts]
    #[arg(long, value_name = "MEMORY,…", value_delimiter = ',')]
    memory: Vec<Memory>,

    /// How often each case is measured; the table shows the median
    #[arg(long, value_name = "N", default_value = "7", value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,

    /// The Python that has PyTorch [default: the one that ./test set up, else python3]
    #[arg(long, value_name = "PATH", env = "TENFOLD_PYTHON")]
    python: Option<PathBuf>,

    /// Also write the figures to this file, as a list of rows
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

const SIZES: &str = "8,512,4K,32K,256K,2M,16M,64M";

pub(crate) const EXAMPLES: &str = "\
Examples:
  tenfold bench                                            all_reduce, 2 ranks, 8 B to 64 MiB
  tenfold bench --against gloo,openmpi,mpich,intelmpi      against all that are installed
  tenfold bench all_gather barrier --ranks 2,4,8 --sizes 8,64K,1M
  tenfold bench send_recv --transport tcp --against gloo,mpi --json rows.json
  tenfold bench all_reduce --hosts 2x2,4x2 --against gloo,openmpi
  tenfold bench all_reduce --hosts 2x2 --link-rate 1G --sizes 64M
  tenfold bench store --against torch --quick              the store server, see `bench store --help`
  tenfold bench launch --against torchrun                  the launcher, see `bench launch --help`";

fn parse_ranks(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(ranks @ 1..=RANKS_MAX) => Ok(ranks),
        _ => Err(format!("from 1 to {RANKS_MAX} ranks")),
    }
}

fn parse_bytes(text: &str) -> Result<usize, String> {
    match parse_size(text)? {
        bytes if bytes <= SIZE_MAX => Ok(bytes),
        _ => Err("at most 1G".into()),
    }
}

pub(crate) fn run(args: &CollectiveArgs) -> Result<(), Failure> {
    if args.operations.contains(&Operation::SendRecv) {
        if args.hosts.iter().any(|layout| layout.ranks_each > 1) {
            let reason = "`send_recv` is between ranks 0 and 1, which are on the same host";
            return Err(Failure::new(reason).hint("use hosts with one rank each, such as `--hosts 2x1`"));
        }
        if args.ranks.contains(&1) {
            return Err(Failure::new("`send_recv` needs two ranks").hint("leave 1 out of `--ranks`"));
        }
    }
    if !args.hosts.is_empty() {
        namespace::ensure_allowed()?;
    }
    let interrupt = Interrupt::install()?;
    let mut json = args.json.as_ref().map(|path| create(path)).transpose()?;
    let coordinator = Coordinator::start(interrupt.clone())?;
    let load = load_average();
    let progress = ProgressLine::new();
    let mut bench = Bench { args, interrupt, load, rows: Vec::new(), remarks: Vec::new(), progress };
    let recipes = bench.recipes(&coordinator)?;
    for crew in args.crews() {
        bench.measure_teams(crew, &recipes, &coordinator)?;
    }
    bench.progress.clear();

    if let Some((path, file)) = &mut json {
        file.write_all(figures::json(&bench.rows, args.limits()).as_bytes())
            .map_err(|error| Failure::new(format!("cannot write `{}`: {error}", path.display())))?;
    }
    match std::io::stdout().write_all(bench.report().as_bytes()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(Failure::new(format!("cannot print: {error}")))
        }
        _ => Ok(()),
    }
}

impl CollectiveArgs {
    fn crews(&self) -> Vec<Crew> {
        match &self.hosts[..] {
            [] => self.ranks.iter().map(|&ranks| Crew::Machine(ranks)).collect(),
            hosts => hosts.iter().map(|&layout| Crew::Hosts(layout)).collect(),
        }
    }

    fn limits(&self) -> Limits {
        Limits { links: self.links.into(), rate: self.link_rate, delay: self.link_delay }
    }
}

const NOTES: &str = "\
A time is one operation's, of the slowest rank, in a loop without barriers; results were checked first. The size is
that of a rank's larger buffer. A ratio above 1 means that tenfold is faster than the best peer.
";

/// How long one measurement should last: far above the cost of waking all ranks, and short enough for many rounds.
const WINDOW: Duration = Duration::from_millis(30);
/// An inner loop of at least this length gives the time of an operation.
const PACED: Duration = Duration::from_millis(2);
const TURNS_LEAST: u64 = 3;
const BATCHES_MAX: u64 = 10;
/// A case that has taken this long gets no further round, if it has enough for a median.
const POINT_MAX: Duration = Duration::from_secs(10);
const ROUNDS_LEAST: u32 = 3;

struct Bench<'a> {
    args: &'a CollectiveArgs,
    interrupt: Interrupt,
    /// Processes that were ready to run in the minute before we began, if the system reports it.
    load: Option<f64>,
    rows: Vec<Row>,
    progress: ProgressLine,
    /// Remarks for the reader, each once.
    remarks: Vec<String>,
}

/// A column in the making.
struct Contender {
    team: usize,
    column: Column,
    pace: Pace,
}

impl Bench<'_> {
    fn recipes(&self, coordinator: &Coordinator) -> Result<Vec<Recipe>, Failure> {
        let mut recipes = vec![Recipe::tenfold()];
        for peer in &self.args.against {
            let recipe = match peer {
                PeerName::Gloo => Recipe::gloo(self.args.python.as_deref()),
                PeerName::OpenMpi => Recipe::mpi(Implementation::OpenMpi, coordinator.folder())?,
                PeerName::Mpich => Recipe::mpi(Implementation::Mpich, coordinator.folder())?,
                PeerName::IntelMpi => Recipe::mpi(Implementation::IntelMpi, coordinator.folder())?,
                PeerName::Mpi => Recipe::first_mpi(coordinator.folder())?,
            };
            if !self.args.hosts.is_empty() && !recipe.runs_on_hosts() {
                let reason = format!("{} cannot be measured with `--hosts`", recipe.implementation);
                return Err(Failure::new(reason).hint("choose from gloo and openmpi"));
            }
            if !recipes.iter().any(|known| known.implementation == recipe.implementation) {
                recipes.push(recipe);
            }
        }
        Ok(recipes)
    }

    fn measure_teams(
        &mut self,
        crew: Crew,
        recipes: &[Recipe],
        coordinator: &Coordinator,
    ) -> Result<(), Failure> {
        self.show_progress(format_args!("starting {crew} of each"));
        let hosts = match crew {
            Crew::Machine(_) => None,
            Crew::Hosts(layout) => {
                let python = python_with_torch(self.args.python.as_deref());
                let hosts = Hosts::make(layout, self.args.limits(), &python);
                Some(hosts.map_err(|failure| failure.during(format_args!("making {layout}")))?)
            }
        };
        let site = match &hosts {
            Some(hosts) => Site::Hosts(hosts),
            None => Site::Machine { ranks: crew.ranks(), transport: self.args.transport },
        };
        let mut teams = Vec::new();
        for recipe in recipes {
            let team = Team::start(recipe, site, coordinator)?;
            let ranks_max = self.args.crews().into_iter().map(Crew::ranks).max().unwrap_or(1);
            let setting = recipe.remark(site.transport(), ranks_max);
            self.remark(format!("{}: {}; {setting}.", recipe.implementation, team.version));
            teams.push(team);
        }
        for point in self.points(crew) {
            self.measure_point(point, hosts.as_ref(), &mut teams)?;
        }
        Ok(())
    }

    /// Every case of these ranks; sizes that round to the same bytes are measured once.
    fn points(&self, crew: Crew) -> Vec<Point> {
        let dtype = self.args.dtype;
        let mut points: Vec<Point> = Vec::new();
        for &operation in &self.args.operations {
            let bytes = self.args.sizes.iter().map(|&size| operation.bytes(size, dtype, crew.ranks()));
            for point in bytes.map(|bytes| Point { operation, dtype, crew, bytes }) {
                if !points.contains(&point) {
                    points.push(point);
                }
            }
        }
        points
    }

    /// Checks and paces all implementations, then measures in rounds, each beginning with another one.
    fn measure_point(
        &mut self,
        point: Point,
        hosts: Option<&Hosts>,
        teams: &mut [Team<'_>],
    ) -> Result<(), Failure> {
        self.show_progress(point);
        let mut contenders = Vec::new();
        let mut columns_without = Vec::new();
        for (index, team) in teams.iter_mut().enumerate() {
            for subject in self.subjects(team) {
                let during =
                    |failure: Failure| failure.during(format_args!("{point} on {}", subject.implementation));
                let mut column = Column { subject, algorithm: None, samples: Vec::new() };
                match calibrate(point, subject.memory, team).map_err(during)? {
                    Calibration::Paced { algorithm, pace } => {
                        column.algorithm = algorithm;
                        contenders.push(Contender { team: index, column, pace });
                    }
                    Calibration::Cannot(reason) => {
                        self.remark(format!("{} cannot {point}: {reason}.", subject.implementation));
                        columns_without.push((contenders.len() + columns_without.len(), column));
                    }
                }
            }
        }
        self.rounds(point, hosts, &mut contenders, teams)?;
        let mut columns: Vec<Column> = contenders.into_iter().map(|contender| contender.column).collect();
        for (place, column) in columns_without {
            columns.insert(place, column);
        }
        self.rows.push(Row { point, columns });
        Ok(())
    }

    fn rounds(
        &self,
        point: Point,
        hosts: Option<&Hosts>,
        contenders: &mut [Contender],
        teams: &mut [Team<'_>],
    ) -> Result<(), Failure> {
        let start = Instant::now();
        for round in 0..self.args.rounds {
            if round >= ROUNDS_LEAST && start.elapsed() > POINT_MAX {
                break;
            }
            for step in 0..contenders.len() {
                self.interrupt.check()?;
                let index = (round as usize + step) % contenders.len();
                let Contender { team, column, pace } = &mut contenders[index];
                let subject = column.subject;
                let order = Order::new(point, subject.memory, false, *pace);
                let before = hosts.map(Hosts::traffic).transpose()?;
                let outcome = teams[*team].measure(order);
                let after = hosts.map(Hosts::traffic).transpose()?;
                match outcome.map_err(|failure| {
                    failure.during(format_args!("{point} on {}", subject.implementation))
                })? {
                    Outcome::Done { batches, .. } => {
                        let operations = pace.iterations * point.operation.operations_per_turn();
                        let mut sample = Sample::new(&batches, operations);
                        sample.link_bytes = after.zip(before).map(|(after, before)| {
                            let turns = pace.warmup + pace.batches * pace.iterations;
                            let operations = turns * point.operation.operations_per_turn();
                            after.busiest_since(&before) as f64 / operations as f64
                        });
                        column.samples.push(sample);
                    }
                    Outcome::Cannot(reason) => {
                        return Err(Failure::new(format!(
                            "{} could, and now cannot: {reason}",
                            subject.implementation
                        )));
                    }
                }
            }
        }
        Ok(())
    }

    fn subjects(&self, team: &Team<'_>) -> Vec<Subject> {
        let Team { implementation, transport, .. } = *team;
        let memories: &[Memory] = match implementation {
            Implementation::Tenfold if !self.args.memory.is_empty() => &self.args.memory,
            Implementation::Tenfold if transport == Transport::Shm => &[Memory::Private, Memory::Shared],
            _ => &[Memory::Private],
        };
        memories.iter().map(|&memory| Subject { implementation, memory, transport }).collect()
    }

    fn remark(&mut self, remark: String) {
        if !self.remarks.contains(&remark) {
            self.remarks.push(remark);
        }
    }

    fn report(&self) -> String {
        let (tables, cores) = (figures::tables(&self.rows, self.args.limits()), core_count());
        let load = self.load.map_or(String::new(), |load| format!(", load {load} before the run"));
        let (rounds, window) = (self.args.rounds, WINDOW.as_millis());
        let head = format!(
            "{tables}\nCores: {cores}{load}; up to {rounds} rounds of about {window} ms; medians.\n{NOTES}"
        );
        let hosts = if self.args.hosts.is_empty() { String::new() } else { self.remark_on_hosts() };
        self.remarks.iter().fold(head + &hosts, |text, remark| text + remark + "\n")
    }

    fn remark_on_hosts(&self) -> String {
        let rate = self.args.link_rate.map_or("no limit".into(), |rate| format!("{rate} in each direction"));
        let delay =
            self.args.link_delay.map_or(String::new(), |Delay(delay)| format!(", {delay:?} of delay"));
        let counted = match self.args.link_rate {
            Some(_) => "Bytes are counted behind the limit, with the headers of each packet.",
            None => "Bytes are counted by the link, which counts the headers of up to 64 KiB once.",
        };
        let links = self.args.links;
        format!(
            "Hosts: network namespaces of this machine that share its cores, an MTU of 1500; links of a host: {links}; \
             each link: {rate}{delay}. {counted}\n"
        )
    }

    fn show_progress(&self, what: impl std::fmt::Display) {
        self.progress.show(format_args!("[{}] {what}", self.rows.len() + 1));
    }
}

pub(crate) fn load_average() -> Option<f64> {
    parse_load(&std::fs::read_to_string("/proc/loadavg").ok()?)
}

fn parse_load(text: &str) -> Option<f64> {
    text.split(' ').next()?.parse().ok()
}

enum Calibration {
    Paced { algorithm: Option<String>, pace: Pace },
    Cannot(String),
}

/// Checks the result once, then lengthens the loop until it gives the time of an operation.
fn calibrate(point: Point, memory: Memory, team: &mut Team<'_>) -> Result<Calibration, Failure> {
    let mut pace = Pace { warmup: 1, batches: 1, iterations: 1 };
    let mut check = true;
    loop {
        match team.measure(Order::new(point, memory, check, pace))? {
            Outcome::Cannot(reason) => return Ok(Calibration::Cannot(reason)),
            Outcome::Done { algorithm, batches } => {
                let elapsed = Duration::from_nanos(batches.iter().sum::<u64>().max(1));
                if elapsed >= PACED {
                    let pace = pace_for(elapsed.as_secs_f64() / pace.iterations as f64);
                    return Ok(Calibration::Paced { algorithm, pace });
                }
                pace.iterations = longer(pace.iterations, elapsed);
                pace.warmup = pace.iterations / 10 + 1;
            }
        }
        check = false;
    }
}

/// More turns, so that the next loop is likely to be long enough; the first few turns say little about the
/// rest.
fn longer(iterations: u64, elapsed: Duration) -> u64 {
    let factor = PACED.as_secs_f64() * 1.5 / elapsed.as_secs_f64();
    (iterations as f64 * factor.clamp(2.0, 100.0)).ceil() as u64
}

/// The loop of a measurement, for an operation that takes this long.
fn pace_for(seconds: f64) -> Pace {
    let turns = ((WINDOW.as_secs_f64() / seconds) as u64).max(TURNS_LEAST);
    let batches = turns.min(BATCHES_MAX);
    Pace { warmup: turns / 20 + 1, batches, iterations: turns / batches }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: CollectiveArgs,
    }

    fn points(line: &[&str]) -> Vec<(Operation, usize)> {
        let args = Line::try_parse_from([&["bench"], line].concat()).unwrap().args;
        let bench = Bench {
            args: &args,
            interrupt: Interrupt::default(),
            load: None,
            rows: Vec::new(),
            progress: ProgressLine::new(),
            remarks: Vec::new(),
        };
        let points = args.crews().into_iter().flat_map(|crew| bench.points(crew));
        points.map(|point| (point.operation, point.bytes)).collect()
    }

    #[test]
    fn without_arguments_it_is_all_reduce_over_many_sizes() {
        let points = points(&[]);
        assert_eq!(points.len(), 8);
        assert_eq!((points[0], points[7]), ((Operation::AllReduce, 8), (Operation::AllReduce, 64 << 20)));
    }

    #[test]
    fn sizes_that_come_to_the_same_bytes_are_measured_once() {
        assert_eq!(points(&["barrier", "--sizes", "8,64K"]), [(Operation::Barrier, 0)]);
        assert_eq!(
            points(&["all_gather", "broadcast", "--sizes", "1,8", "--dtype", "f64", "--ranks", "2"]),
            [(Operation::AllGather, 16), (Operation::Broadcast, 8)]
        );
    }

    #[test]
    fn what_cannot_be_measured_is_refused_immediately() {
        for (line, reason) in [
            (["--ranks", "0"], "from 1 to 64 ranks"),
            (["--ranks", "2,65"], "from 1 to 64 ranks"),
            (["--sizes", "2G"], "at most 1G"),
            (["--sizes", "many"], "invalid size"),
            (["--hosts", "2"], "expected hosts x ranks of each host"),
            (["--hosts", "2x2,0x2"], "expected hosts x ranks of each host"),
            (["--hosts", "2x33"], "at most 64 ranks in all"),
            (["--link-rate", "1G"], "--hosts <HxR,…>"),
            (["--link-delay", "50us"], "--hosts <HxR,…>"),
            (["--against", "nccl"], "possible values: gloo, openmpi, mpich, intelmpi, mpi"),
        ] {
            let error = Line::try_parse_from(["bench"].iter().chain(&line)).err().unwrap().to_string();
            assert!(error.contains(reason), "{error}");
        }
    }

    #[test]
    fn hosts_exclude_what_is_about_one_machine() {
        assert_eq!(
            points(&["all_to_all", "--hosts", "2x2,3x1", "--sizes", "8"]),
            [(Operation::AllToAll, 16), (Operation::AllToAll, 12)]
        );
        for other in [["--ranks", "2"], ["--transport", "tcp"]] {
            let line = ["bench", "--hosts", "2x2", other[0], other[1]];
            let error = Line::try_parse_from(line).err().unwrap().to_string();
            assert!(error.contains("cannot be used with"), "{error}");
        }
    }

    #[test]
    fn a_measurement_lasts_about_its_window_whatever_the_operation_takes() {
        assert_eq!(pace_for(0.1), Pace { warmup: 1, batches: 3, iterations: 1 });
        assert_eq!(pace_for(0.001), Pace { warmup: 2, batches: 10, iterations: 3 });
        assert_eq!(pace_for(1e-6), Pace { warmup: 1501, batches: 10, iterations: 3000 });
    }

    #[test]
    fn a_report_says_how_busy_the_machine_was() {
        assert_eq!(parse_load("4.87 5.17 3.90 2/241 13328\n"), Some(4.87));
        assert_eq!(parse_load(""), None);
    }

    #[test]
    fn the_loop_gets_longer_until_it_is_long_enough() {
        assert_eq!(longer(1, Duration::from_nanos(500)), 100);
        assert_eq!(longer(100, Duration::from_micros(50)), 6000);
        assert_eq!(longer(6000, Duration::from_micros(1900)), 12_000);
    }
}
