//! `tenfold run`: starts the ranks of a program, on this node and together with other nodes, and sees to it that all of
//! them end.
//!
//! One thread does everything that concerns ranks. It waits for the first of: a signal (a child's end is one), something
//! in a rank's pipe, room to write, news. News come from a thread that finds the store, and then from the rendezvous: a
//! round begins with these nodes, stop, the job is over. One node alone takes the same path, with a store of its own. The
//! store server, with its own thread, lives in the launcher of one node: a rank that dies takes no store with it.
//!
//! The ranks of a round are in one of four phases: they run; they are about to be asked to end, and may write down what they
//! did; they were asked and have some time for it; they were killed. The first failure here or the rendezvous begins the
//! second, which is over at once where nobody writes; a signal to the launcher begins the third. When the last has ended,
//! what they left behind is ended too, and only then the rendezvous is told: no two rounds ever run at once.
//!
//! `args` is what was typed and what follows from it, `endpoint` finds the store, `program` what to run; `environment`
//! tells a rank its place, `numa` its processors, `rank` is its process, `signals` what it survives, `pipes` and `output` what it writes; `guard` leaves
//! nobody behind; `inspect` is what the dashboard is told.
#![expect(clippy::disallowed_methods, reason = "ranks have some time to end, and are told how long they ran")]

mod args;
mod endpoint;
mod environment;
mod failure;
mod guard;
mod inspect;
mod lines;
mod logs;
mod numa;
mod output;
mod pipes;
mod program;
mod progress;
mod rank;
mod ranks_store;
mod rendezvous;
mod signals;
mod status;
mod worker_sockets;

use std::ffi::OsString;
use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant, SystemTime};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::Signal;
use signal_hook::consts::SIGCHLD;
use signal_hook::iterator::backend::SignalDelivery;
use signal_hook::iterator::exfiltrator::SignalOnly;

use crate::dashboard::{self, Dashboard};
use crate::{FAILURE, Outcome, Program, SUCCESS};
pub(crate) use args::Args;
use args::{Endpoint, Meeting, Plan};
use endpoint::Home;
use environment::{Job, Place, environment};
use failure::{Failure, MemoryWatch, Words};
pub(crate) use guard::stand_guard;
use guard::{Finder, Guard, Mark};
use inspect::{Connections, RankStatus};
use logs::{Logs, RankLogs};
use output::{Outlet, Prefix, Speaker};
use progress::{Progress, Stuck};
use rank::{Birth, Rank, signal_name};
use ranks_store::RanksStore;
use rendezvous::{Assignment, Event, JobFailure, NodeInfo, Order, Rendezvous};
use status::Status;
use worker_sockets::WorkerSockets;

/// Exit code of a command that cannot mean anything.
const USAGE: u8 = 2;
/// Open files that a rank costs the launcher: two pipes, and its connections to the store.
const FILES_A_RANK: usize = 16;
/// For the others to read how the job ended, when this node hosts the store.
const LAST_WORDS: Duration = Duration::from_secs(5);
/// For the rendezvous to say that the job is over, when this node leaves.
const LEAVING: Duration = Duration::from_secs(5);
/// From the start of ranks to the first look at what they do.
const FIRST_LOOK: Duration = Duration::from_secs(1);

pub(crate) fn run(args: &Args) -> Outcome {
    let plan = match args.plan() {
        Ok(plan) => plan,
        Err(text) => {
            eprintln!("error: {text}");
            return Ok(USAGE);
        }
    };
    for warning in &plan.warnings {
        eprintln!("tenfold: warning: {warning}");
    }
    let python = plan.python.as_deref().or(Program::own().python());
    let program =
        program::resolve(&plan.program, plan.kind, python).map_err(|missing| missing.to_string())?;
    let processors = plan.binding.map(|binding| numa::processors(binding, plan.ranks)).transpose()?;
    make_room_for_files(plan.ranks * FILES_A_RANK);
    let mut launch = Launch::new(Arc::new(plan), program, processors)?;
    let outcome = launch.work();
    launch.finish(outcome)
}

/// Raises the limit of open files if it is too low. Ranks inherit it, so it is left alone where it will do.
fn make_room_for_files(needed: usize) {
    use rustix::process::{Resource, getrlimit};
    if getrlimit(Resource::Nofile).current.is_some_and(|limit| limit < needed as u64) {
        crate::serve::descriptors();
    }
}

/// What other threads tell the main one.
enum News {
    /// A line for people.
    Note(String),
    /// The store is found.
    Arrived(Home),
    /// It is not.
    Lost(String),
    /// A round begins; the ranks' store is there.
    Start(Assignment, Endpoint),
    Stop {
        round: u64,
        reason: String,
    },
    Over(rendezvous::Outcome),
}

/// Brings news to the main thread, and wakes it.
#[derive(Clone)]
struct Herald {
    news: mpsc::Sender<News>,
    bell: Arc<UnixStream>,
}

impl Herald {
    fn tell(&self, news: News) {
        let _it_has_ended = self.news.send(news);
        self.ring();
    }

    fn ring(&self) {
        let _rings_already = (&*self.bell).write(&[0]); // a full socket wakes as well
    }
}

/// How long ranks may go on writing dumps after another has failed, and how often it is looked whether they do.
const DUMPS_MAX: Duration = Duration::from_secs(1);
const DUMPS_LOOK: Duration = Duration::from_millis(5);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Phase {
    Running,
    /// To be asked to end, with these words, as soon as none of them writes a dump; at that time at the latest.
    LettingDump {
        until: Instant,
        look_at: Instant,
        note: String,
    },
    /// Asked to end; killed at that time, if it can be told.
    Stopping(Option<Instant>),
    Killed,
}

/// One start of this node's ranks.
#[derive(Debug)]
struct Round {
    assignment: Assignment,
    ranks: Vec<Rank>,
    phase: Phase,
    /// It ended because of a failure, here or elsewhere.
    failed: bool,
    started: Instant,
    store: Endpoint,
    /// All have ended, with what they left behind, and the rendezvous was told.
    closed: bool,
}

impl Round {
    fn is_running(&self) -> bool {
        self.ranks.iter().any(Rank::is_running)
    }
}

struct Launch {
    plan: Arc<Plan>,
    program: Vec<OsString>,
    processors: Option<Vec<Vec<usize>>>,
    job: Job,
    node_id: String,
    signals: SignalDelivery<UnixStream, SignalOnly>,
    herald: Herald,
    news: mpsc::Receiver<News>,
    bell: UnixStream,
    outlet: Outlet,
    logs: Logs,
    memory: MemoryWatch,
    started: Instant,
    restarts_used: u64,
    guard: Guard,
    /// Everybody whom ranks started becomes a child of ours at last.
    is_foster_parent: bool,
    mark: Mark,
    progress: Progress,
    /// What was said about ranks that keep others waiting.
    stuck: Stuck,
    worker_sockets: Option<WorkerSockets>,
    dashboard: Option<Dashboard>,
    home: Option<Home>,
    rendezvous: Option<Rendezvous>,
    round: Option<Round>,
    /// The signal that ended the run, and until when the rendezvous is waited for.
    leaving: Option<(i32, Instant)>,
    over: Option<rendezvous::Outcome>,
    /// Somebody told us to end more than once.
    impatient: bool,
    status_at: Option<Instant>,
}

/// What can go on without waiting.
#[derive(Debug, Default)]
struct Ready {
    write: bool,
    /// Local rank and which of its pipes.
    read: Vec<(usize, usize)>,
}

impl Launch {
    fn new(
        plan: Arc<Plan>,
        program: Vec<OsString>,
        processors: Option<Vec<Vec<usize>>>,
    ) -> Result<Self, Box<dyn std::error::Error>> {
        let (wake, waker) = UnixStream::pair()?;
        let signals = SignalDelivery::with_pipe(wake, waker, SignalOnly, signals::heard(&plan.signals))?;
        let is_foster_parent = guard::become_foster_parent(); // before there are children
        let mark = Mark::new()?;
        let guard = Guard::start(&mark)?;
        let (bell, ringer) = UnixStream::pair()?;
        bell.set_nonblocking(true)?;
        ringer.set_nonblocking(true)?;
        let (sender, news) = mpsc::channel();
        let host = plan.local_address.clone().unwrap_or_else(host_name);
        let node_id = format!("{host}-{}-{}", std::process::id(), mark.short());
        let run_id = plan.run_id.clone().unwrap_or_else(|| format!("tenfold-{node_id}"));
        let logs = Logs::open(plan.logs.clone(), &run_id, &mark.folders())?;
        let progress = Progress::new(&mark.folders());
        let asked = plan.worker_server.as_deref();
        let worker_sockets = asked.map(|asked| WorkerSockets::open(asked, &mark.folders())).transpose()?;
        let job = Job {
            run_id,
            role: plan.role.clone(),
            max_restarts: plan.max_restarts,
            signals: plan.signals_named.clone(),
            virtual_local_rank: plan.virtual_local_rank,
            mark: mark.variable(),
        };
        Ok(Launch {
            plan,
            program,
            processors,
            job,
            node_id,
            signals,
            herald: Herald { news: sender, bell: Arc::new(ringer) },
            news,
            bell,
            outlet: Outlet::standard()?,
            logs,
            memory: MemoryWatch::begin(),
            started: Instant::now(),
            restarts_used: 0,
            guard,
            is_foster_parent,
            mark,
            progress,
            stuck: Stuck::default(),
            worker_sockets,
            dashboard: None,
            home: None,
            rendezvous: None,
            round: None,
            leaving: None,
            over: None,
            impatient: false,
            status_at: None,
        })
    }

    /// Until the job is over here. The error is one of the launcher's own; then nobody of ours may stay either.
    fn work(&mut self) -> Result<(), Box<dyn std::error::Error>> {
        if let Some(folder) = self.logs.folder() {
            let line = format!("log files are in {}", folder.display());
            self.outlet.note(&line);
        }
        if let Some(sockets) = &self.worker_sockets {
            let line = format!("ranks can be asked what they do: tenfold worker {sockets}");
            self.outlet.note(&line);
        }
        self.find_store()?;
        while !self.is_over() {
            self.show_status();
            self.outlet.tick(Instant::now());
            let ready = self.wait(self.next_time())?;
            if ready.write {
                self.outlet.write();
            }
            let now = Instant::now();
            for (rank, pipe) in ready.read {
                if let Some(round) = &mut self.round {
                    round.ranks[rank].pipes.read(pipe, now, &mut self.outlet);
                }
            }
            self.hear_signals();
            while let Ok(news) = self.news.try_recv() {
                self.learn(news)?;
            }
            self.keep_time(Instant::now());
            self.close_round()?;
        }
        Ok(())
    }

    fn is_over(&self) -> bool {
        let is_closed = self.round.as_ref().is_none_or(|round| round.closed);
        let left =
            self.leaving.is_some_and(|(_, until)| self.rendezvous.is_none() || Instant::now() >= until);
        is_closed && (self.over.is_some() || left)
    }

    /// On a thread of its own: another node may host it, and come late.
    fn find_store(&self) -> io::Result<()> {
        let (plan, herald) = (self.plan.clone(), self.herald.clone());
        let find = move || {
            let note = |line| herald.tell(News::Note(line));
            match endpoint::open(&plan, &note) {
                Ok(home) => herald.tell(News::Arrived(home)),
                Err(text) => herald.tell(News::Lost(text)),
            }
        };
        std::thread::Builder::new().name("run-endpoint".into()).spawn(find).map(drop)
    }

    /// When to go on even if nothing happens.
    fn next_time(&self) -> Option<Instant> {
        let phase_at = self.round.as_ref().and_then(|round| match round.phase {
            Phase::Stopping(kill_at) if round.is_running() => kill_at,
            Phase::LettingDump { look_at, .. } => Some(look_at),
            _ => None,
        });
        let is_closed = self.round.as_ref().is_none_or(|round| round.closed);
        let leave_at = self.leaving.map(|(_, until)| until).filter(|_| is_closed);
        let words =
            self.round.iter().flat_map(|round| &round.ranks).filter_map(|rank| rank.pipes.next_wake());
        let times = [phase_at, leave_at, self.status_at, self.outlet.next_wake()];
        times.into_iter().flatten().chain(words).min()
    }

    fn keep_time(&mut self, now: Instant) {
        let Some(round) = &mut self.round else { return };
        round.ranks.iter_mut().for_each(|rank| rank.pipes.wake(now, &mut self.outlet));
        if matches!(round.phase, Phase::Stopping(Some(kill_at)) if now >= kill_at) {
            self.kill();
        }
        self.look_for_dumps(now);
        if self.status_at.is_some_and(|at| now >= at) {
            self.report_status(now);
        }
    }

    /// Asleep until there is something to do, or it is time.
    fn wait(&self, until: Option<Instant>) -> io::Result<Ready> {
        let mut watched =
            vec![PollFd::new(self.signals.get_read(), PollFlags::IN), PollFd::new(&self.bell, PollFlags::IN)];
        let fixed = watched.len();
        watched.extend(self.outlet.next_file().map(|file| PollFd::from_borrowed_fd(file, PollFlags::OUT)));
        let pipes_from = watched.len();
        let mut pipes = Vec::new();
        let ranks = self.round.iter().flat_map(|round| &round.ranks);
        if !self.outlet.is_full() {
            for (number, rank) in ranks.enumerate() {
                for (pipe, source) in rank.pipes.open() {
                    pipes.push((number, pipe));
                    watched.push(PollFd::from_borrowed_fd(source, PollFlags::IN));
                }
            }
        }
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        let timeout = left.and_then(|left| Timespec::try_from(left).ok()); // more seconds than fit are for ever
        match poll(&mut watched, timeout.as_ref()) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => return Ok(Ready::default()),
            Err(error) => return Err(error.into()),
        }
        let mut rung = [0; 64];
        while matches!((&self.bell).read(&mut rung), Ok(count) if count == rung.len()) {}
        let is_ready = |watched: &PollFd<'_>| !watched.revents().is_empty();
        let read = pipes.into_iter().zip(&watched[pipes_from..]).filter(|(_, watched)| is_ready(watched));
        Ok(Ready {
            write: watched[fixed..pipes_from].iter().any(is_ready),
            read: read.map(|(pipe, _)| pipe).collect(),
        })
    }

    fn learn(&mut self, news: News) -> Result<(), Box<dyn std::error::Error>> {
        match news {
            News::Note(line) => self.outlet.note(&line),
            News::Arrived(home) => self.join(home)?,
            News::Lost(text) => {
                self.tell(Order::Leave { reason: text.clone() }); // if it is the ranks' store that was not found
                self.over.get_or_insert(rendezvous::Outcome::Closed(text));
            }
            News::Start(assignment, store) => self.start_round(assignment, store)?,
            News::Stop { round, reason } => self.told_to_stop(round, &reason),
            News::Over(outcome) => {
                self.over.get_or_insert(outcome);
                self.stop_after_dumps("the job is over: all ranks are asked to end".into());
            }
        }
        Ok(())
    }

    fn join(&mut self, home: Home) -> Result<(), Box<dyn std::error::Error>> {
        let plan = &self.plan;
        let settings = rendezvous::Settings {
            run_id: self.job.run_id.clone(),
            nodes_min: plan.nodes.min,
            nodes_max: plan.nodes.max,
            max_restarts: plan.max_restarts,
            join_timeout: plan.settings.join_timeout,
            last_call: plan.settings.last_call,
            beat_interval: plan.settings.beat_interval,
            beats_missed_max: plan.settings.beats_missed_max,
        };
        let fixed_rank = match plan.meeting {
            Meeting::Static { node_rank, .. } => Some(node_rank),
            Meeting::Alone | Meeting::Elastic { .. } => None,
        };
        let node = NodeInfo {
            id: self.node_id.clone(),
            host: plan.local_address.clone().unwrap_or_else(host_name),
            ranks: plan.ranks,
            role: plan.role.clone(),
            fixed_rank,
            worker_store: home.server.as_ref().map(|_| home.endpoint.to_string()),
        };
        let (store, herald) = (home.store.clone(), self.herald.clone());
        let ranks_store = RanksStore {
            store: store.clone(),
            met_at: home.endpoint.clone(),
            local_address: plan.local_address.clone(),
            hosted: home.server.clone(),
            node_id: self.node_id.clone(),
            prefix: format!("tenfold/run/{}/store", self.job.run_id),
            own: Mutex::new(None),
        };
        let tell = move |event| {
            herald.tell(match event {
                Event::Start(assignment) => match ranks_store.of(&assignment) {
                    Ok(endpoint) => News::Start(assignment, endpoint),
                    Err(text) => News::Lost(text),
                },
                Event::Stop { round, reason } => News::Stop { round, reason },
                Event::Over(outcome) => News::Over(outcome),
                Event::Note(line) => News::Note(line),
            });
        };
        self.show_dashboard(&home)?;
        self.rendezvous = Some(Rendezvous::join(store, settings, node, tell)?);
        self.home = Some(home);
        Ok(())
    }

    /// The page shows what is in the store, so it is with the node that hosts it.
    fn show_dashboard(&mut self, home: &Home) -> io::Result<()> {
        let Some(options) = self.plan.dashboard.clone() else { return Ok(()) };
        let Some(server) = &home.server else {
            let note = "no dashboard here: this node does not host the store, and whoever does can show one";
            self.outlet.note(note);
            return Ok(());
        };
        let dashboard = dashboard::start(options, server.clone())?;
        self.outlet.note(&dashboard.to_string());
        if let Some(warning) = dashboard.warning() {
            self.outlet.note(&format!("warning: {warning}"));
        }
        self.dashboard = Some(dashboard);
        Ok(())
    }

    fn tell(&self, order: Order) {
        if let Some(rendezvous) = &self.rendezvous {
            rendezvous.tell(order);
        }
    }

    fn start_round(
        &mut self,
        assignment: Assignment,
        store: Endpoint,
    ) -> Result<(), Box<dyn std::error::Error>> {
        if self.leaving.is_some() || self.over.is_some() {
            return Ok(());
        }
        let (first, local, world) = (assignment.first_rank(), self.plan.ranks, assignment.world_size());
        let number = assignment.round;
        let mut beginning = String::new();
        if self.round.as_ref().is_some_and(|round| round.failed) {
            self.restarts_used += 1;
            beginning = format!("restart {} of {}: ", self.restarts_used, self.plan.max_restarts);
        }
        if assignment.nodes.len() > 1 || number > 0 {
            let Assignment { node_rank, nodes, .. } = &assignment;
            let last = first + local - 1;
            let own = if local == 1 { format!("rank {first}") } else { format!("ranks {first} to {last}") };
            let nodes = if nodes.len() == 1 { "1 node".into() } else { format!("{} nodes", nodes.len()) };
            self.outlet.note(&format!(
                "{beginning}round {number} begins with {nodes}: this one is node {node_rank}, with {own} of {world}"
            ));
        }
        let mut round = Round {
            assignment,
            ranks: Vec::with_capacity(local),
            phase: Phase::Running,
            failed: false,
            started: Instant::now(),
            store,
            closed: false,
        };
        let mut unstarted = None;
        for (local_rank, logs) in self.logs.start_round(number, local)?.into_iter().enumerate() {
            match self.start_rank(local_rank, logs, &round) {
                Ok(rank) => round.ranks.push(rank),
                Err(error) => {
                    unstarted = Some((first + local_rank, error));
                    break;
                }
            }
        }
        round.failed = unstarted.is_some();
        self.round = Some(round);
        self.report_status(Instant::now());
        if let Some((rank, error)) = unstarted {
            let summary = "could not be started";
            self.fail(rank, summary.into(), format!("cannot start rank {rank}: {error}"));
            self.stop_after_dumps(format!("rank {rank} {summary}: the others are asked to end"));
        }
        Ok(())
    }

    fn start_rank(&self, local_rank: usize, logs: RankLogs, round: &Round) -> Result<Rank, String> {
        let Round { assignment, store, .. } = round;
        let (number, world_size) = (assignment.first_rank() + local_rank, assignment.world_size());
        let error_file = logs.traces.error_file.as_deref();
        let progress = self.progress.make_folder(assignment.round, local_rank);
        let socket = self.worker_sockets.as_ref().map(|sockets| sockets.of(number));
        let place = Place {
            local_rank,
            assignment,
            store: (&store.host, store.port),
            error_file,
            progress: progress.as_deref(),
            worker_server: socket.as_deref(),
        };
        let environment = environment(&self.job, place, |name| std::env::var_os(name))?;
        let (role, host) = (&*self.plan.role, &*assignment.node().host);
        let speaker = Speaker { rank: number, local_rank, world_size, role, host };
        let template = self.plan.template.as_deref();
        let has_prefix = world_size > 1 || template.is_some();
        let birth = Birth {
            local_rank,
            number,
            program: &program::fill_in(&self.program, local_rank),
            environment,
            processors: self.processors.as_ref().map(|lists| lists[local_rank].as_slice()),
            prefix: has_prefix.then(|| Prefix::new(&speaker, template, &self.outlet)),
            logs,
            now: SystemTime::now(),
        };
        Rank::start(birth).map_err(|error| program::cannot_run(&self.program[0], &error))
    }

    fn hear_signals(&mut self) {
        let signals: Vec<i32> = self.signals.pending().collect();
        for signal in signals {
            match signal {
                SIGCHLD => self.notice_ends(),
                ending if self.plan.signals.contains(&ending) => self.told_to_end(ending),
                other => self.pass_on(other),
            }
        }
    }

    fn notice_ends(&mut self) {
        let ended = rank::reap();
        if ended.iter().any(|&(process, _)| process == self.guard.process()) {
            self.replace_guard();
        }
        let Some(round) = &mut self.round else { return };
        let mut failed = Vec::new();
        for rank in &mut round.ranks {
            if let Some(&(_, end)) =
                ended.iter().find(|&&(process, _)| rank.is_running() && process == rank.process())
            {
                rank.end = Some(end);
                failed.extend(end.is_failure().then_some(rank.local_rank));
            }
        }
        if round.phase != Phase::Running || failed.is_empty() {
            return;
        }
        let now = Instant::now();
        for &rank in &failed {
            round.ranks[rank].pipes.catch_up(now, &mut self.outlet); // what it said last is wanted in the report
        }
        round.failed = true;
        let failure = self.describe(&failed);
        let (rank, summary) = (failure.rank, failure.summary());
        self.fail(rank, summary.clone(), failure.text());
        self.stop_after_dumps(format!("rank {rank} failed ({summary}): the others are asked to end"));
    }

    /// What is known of ranks that were found to have failed in one look. The first is the one that wrote down its error
    /// first, else the lowest.
    fn describe(&self, failed: &[usize]) -> Failure {
        let round = self.round.as_ref().expect("its ranks failed");
        let mut ranks: Vec<(&Rank, Words)> =
            failed.iter().map(|&rank| (&round.ranks[rank], round.ranks[rank].pipes.words())).collect();
        let written = |words: &Words| match &words.error_file {
            Some(Ok(file)) => file.timestamp.unwrap_or(u64::MAX),
            _ => u64::MAX,
        };
        ranks.sort_by_key(|(rank, words)| (written(words), rank.number));
        let ended = |rank: &Rank| rank.end.expect("it failed by ending");
        let together = ranks[1..].iter().map(|(rank, _)| (rank.number, ended(rank))).collect();
        let (rank, words) = ranks.swap_remove(0);
        let Round { assignment, started, .. } = round;
        Failure {
            rank: rank.number,
            world_size: assignment.world_size(),
            local_rank: rank.local_rank,
            host: (assignment.nodes.len() > 1).then(|| assignment.node().host.clone()),
            process: rank.process().as_raw_pid().cast_unsigned(),
            end: ended(rank),
            ran: started.elapsed(),
            words,
            memory: self.memory.kills(),
            program: self.program[0].to_string_lossy().into_owned(),
            together,
        }
    }

    /// Tells the others of a failure here.
    fn fail(&self, rank: usize, summary: String, text: String) {
        let Some(Round { assignment, .. }) = &self.round else { return };
        let host = assignment.node().host.clone();
        let (round, node_rank) = (assignment.round, assignment.node_rank);
        self.tell(Order::Failed {
            round,
            failure: JobFailure { round, node_rank, host, rank, summary, text },
        });
    }

    fn replace_guard(&mut self) {
        if let Err(error) = self.guard.replace() {
            self.outlet.note(&format!(
                "warning: the guard process ended and cannot be replaced ({error}): if this launcher is killed now, \
                 processes that ranks started may stay"
            ));
        }
    }

    /// A signal that ends nothing: to ranks that expect it, not to what they started.
    fn pass_on(&mut self, signal: i32) {
        self.notice_ends(); // or one that has ended would be said not to catch it
        let ranks = self.round.iter().flat_map(|round| &round.ranks).filter(|rank| rank.is_running());
        let (expecting, others): (Vec<&Rank>, Vec<&Rank>) =
            ranks.partition(|rank| signals::is_expected(rank.process(), signal));
        if let Some(signal) = Signal::from_named_raw(signal) {
            expecting.iter().for_each(|rank| rank.signal_alone(signal));
        }
        let numbers = |ranks: &[&Rank]| ranks.iter().map(|rank| rank.number).collect::<Vec<_>>();
        let note = signals::note(&signal_name(signal), &numbers(&expecting), &numbers(&others));
        self.outlet.note(&note);
    }

    fn told_to_end(&mut self, signal: i32) {
        if self.leaving.is_some() {
            self.impatient = true;
            self.leaving = Some((signal, Instant::now()));
            self.kill();
            return;
        }
        let name = signal_name(signal);
        self.tell(Order::Leave { reason: name.clone() });
        let until = Instant::now() + LEAVING;
        self.leaving = Some((signal, until));
        let seconds = self.plan.shutdown_timeout.as_secs_f64();
        let note = format!("{name}: passed on to all ranks, which have {seconds} s");
        if self.hosts_others() {
            self.outlet.note("this node hosts the store: the job ends for the other nodes, too");
        }
        self.stop(Signal::from_named_raw(signal).unwrap_or(Signal::TERM), &note);
    }

    fn told_to_stop(&mut self, number: u64, reason: &str) {
        match &mut self.round {
            Some(round) if round.assignment.round == number && !round.closed => {
                round.failed |= reason.contains(" failed");
                self.stop_after_dumps(format!("{reason}: the ranks are asked to end"));
            }
            _ => self.tell(Order::Stopped { round: number }), // they have ended by themselves
        }
    }

    /// Ranks whose group has failed write down what they did, in milliseconds. To end them before that would leave the dumps of a job
    /// that failed with gaps.
    fn stop_after_dumps(&mut self, note: String) {
        let Some(round) = &mut self.round else { return };
        if round.phase == Phase::Running {
            let now = Instant::now();
            round.phase = Phase::LettingDump { until: now + DUMPS_MAX, look_at: now, note };
            self.look_for_dumps(now);
        }
    }

    /// Ranks that are about to be asked to end are, if it is time and nobody writes any more.
    fn look_for_dumps(&mut self, now: Instant) {
        let Some(round) = &mut self.round else { return };
        let Phase::LettingDump { until, look_at, note } = &mut round.phase else { return };
        if now < *look_at {
            return;
        }
        let number = round.assignment.round;
        let is_writing = |rank: &Rank| rank.is_running() && self.progress.is_dumping(number, rank.local_rank);
        if now < *until && round.ranks.iter().any(is_writing) {
            *look_at = now + DUMPS_LOOK;
        } else {
            let note = std::mem::take(note);
            self.stop(Signal::TERM, &note);
        }
    }

    /// Asks ranks to end, once.
    fn stop(&mut self, signal: Signal, note: &str) {
        let Some(round) = &mut self.round else { return };
        if !matches!(round.phase, Phase::Running | Phase::LettingDump { .. }) {
            return;
        }
        round.phase = Phase::Stopping(Instant::now().checked_add(self.plan.shutdown_timeout));
        let running: Vec<&Rank> = round.ranks.iter().filter(|rank| rank.is_running()).collect();
        running.iter().for_each(|rank| rank.signal(signal));
        if round.assignment.world_size() > 1 && !running.is_empty() {
            self.outlet.note(note);
        }
    }

    fn kill(&mut self) {
        let Some(round) = &mut self.round else { return };
        round.phase = Phase::Killed;
        for rank in round.ranks.iter_mut().filter(|rank| rank.is_running()) {
            rank.killed = true;
            rank.signal(Signal::KILL);
        }
    }

    /// When the last rank of a round has ended: ends what they left behind, shows what they left in their pipes, and tells
    /// the others.
    fn close_round(&mut self) -> io::Result<()> {
        let Some(round) = &self.round else { return Ok(()) };
        if round.closed || round.is_running() {
            return Ok(());
        }
        self.end_leftovers();
        self.drain()?;
        self.herald.ring(); // for news that came while nobody but `drain` listened
        let Some(round) = &mut self.round else { return Ok(()) };
        round.closed = true;
        let number = round.assignment.round;
        let is_done = round.phase == Phase::Running;
        self.report_status(Instant::now());
        self.status_at = None;
        self.tell(if is_done { Order::Done { round: number } } else { Order::Stopped { round: number } });
        if let Some((_, until)) = &mut self.leaving {
            *until = Instant::now() + if self.impatient { Duration::ZERO } else { LEAVING };
        }
        Ok(())
    }

    fn end_leftovers(&mut self) {
        let finder = if self.is_foster_parent {
            Finder::Tree { without: Some(self.guard.process()) }
        } else {
            Finder::Marked(self.mark.clone())
        };
        let left = guard::end_leftovers(&finder);
        if left > 0 {
            self.outlet.note(&format!(
                "warning: {left} processes that ranks started do not end, not even when killed"
            ));
        }
    }

    /// Shows what ranks left in their pipes; who was told twice to end does not wait for a reader.
    fn drain(&mut self) -> io::Result<()> {
        loop {
            let mut all = true;
            let now = Instant::now();
            for rank in self.round.iter_mut().flat_map(|round| &mut round.ranks) {
                all &= rank.pipes.drain(now, &mut self.outlet);
            }
            if all && self.outlet.is_empty() {
                return Ok(());
            }
            let until = self.impatient.then(Instant::now);
            if self.wait(until)?.write {
                self.outlet.write();
            } else if self.impatient {
                return Ok(());
            }
            self.hear_signals();
        }
    }

    /// What the dashboard is told, with the next beat.
    fn report_status(&mut self, now: Instant) {
        let Some(round) = &self.round else { return };
        let is_first = self.status_at.is_none();
        self.status_at = Some(now + if is_first { FIRST_LOOK } else { self.plan.settings.beat_interval });
        // Nobody has connected to anything when ranks were just started, nor when they have ended.
        let looks = !is_first && round.is_running();
        let connections = if looks { Connections::to(round.store.port) } else { Connections::default() };
        let clock = SystemTime::now();
        let collectives = |rank: &Rank| self.progress.of(round.assignment.round, rank.local_rank, clock);
        let statuses: Vec<RankStatus> = round
            .ranks
            .iter()
            .map(|rank| RankStatus::of(rank, now, &connections, collectives(rank)))
            .collect();
        let told = statuses.iter().map(|status| (status.rank, &status.collectives[..]));
        for line in self.stuck.news(told) {
            self.outlet.note(&format!("warning: {line}"));
        }
        if let Ok(statuses) = serde_json::to_value(statuses) {
            self.tell(Order::Status(statuses));
        }
    }

    /// Ends everybody, the rendezvous and the store; says what there is to say. The exit code.
    fn finish(mut self, outcome: Result<(), Box<dyn std::error::Error>>) -> Outcome {
        if let Err(error) = &outcome {
            self.tell(Order::Leave { reason: error.to_string() });
            self.kill();
            self.end_leftovers();
        }
        let Launch { outlet, logs, .. } = &mut self;
        outlet.set_status(None);
        if let Some(line) = logs.reminder() {
            outlet.note(&line);
        }
        self.drain()?;
        self.guard.end();
        let report = self.report();
        if let (Ok(()), Some(message)) = (&outcome, &report) {
            // Not `eprintln!`, which panics where nobody reads.
            let _nobody_reads = writeln!(io::stderr(), "error: {message}");
        }
        if self.hosts_others() && !self.impatient {
            let impatient = Arc::new(AtomicBool::new(false));
            for &signal in &self.plan.signals {
                signal_hook::flag::register_conditional_shutdown(signal, FAILURE.into(), impatient.clone())?;
            }
            impatient.store(true, Ordering::SeqCst); // from here on a signal ends at once
            if let Some(rendezvous) = &self.rendezvous {
                rendezvous.settle(LAST_WORDS);
            }
        }
        drop(self.rendezvous.take());
        drop(self.dashboard.take());
        if let Some(Home { server: Some(server), store, .. }) = self.home.take() {
            drop(store);
            server.shutdown(Duration::ZERO);
        }
        outcome.map(|()| if report.is_some() { FAILURE } else { SUCCESS })
    }

    fn hosts_others(&self) -> bool {
        self.plan.nodes.max > 1 && self.home.as_ref().is_some_and(|home| home.server.is_some())
    }

    /// What went wrong, if something did.
    fn report(&self) -> Option<String> {
        let message = match (self.leaving, &self.over) {
            (Some((signal, _)), _) => format!("ended by {}", signal_name(signal)),
            (None, None | Some(rendezvous::Outcome::Success)) => return None,
            (None, Some(rendezvous::Outcome::Closed(text))) => text.clone(),
            (None, Some(rendezvous::Outcome::Failed(failure))) => failure.text.clone(),
        };
        Some(format!("{message}{}", self.stubborn()))
    }

    /// Ranks that had to be killed.
    fn stubborn(&self) -> String {
        let ranks = self.round.iter().flat_map(|round| &round.ranks);
        let killed: Vec<usize> = ranks.filter(|rank| rank.killed).map(|rank| rank.number).collect();
        failure::stubborn(&killed)
    }

    /// The line at the bottom of a terminal.
    fn show_status(&mut self) {
        let Some(round) = self.round.as_ref().filter(|round| round.assignment.world_size() > 1) else {
            return;
        };
        let status = Status {
            round: round.assignment.round,
            nodes: round.assignment.nodes.len(),
            ranks_running: round.ranks.iter().filter(|rank| rank.is_running()).count(),
            ranks: round.ranks.len(),
            stopping: round.phase != Phase::Running,
            restarts_used: self.restarts_used,
            restarts_max: self.plan.max_restarts,
            dashboard: self.dashboard.as_ref().map(|dashboard| format!("http://{}/", dashboard.address())),
            ..Status::new(self.started)
        };
        self.outlet.set_status(Some(status));
    }
}

fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}
