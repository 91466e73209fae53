//! `tenfold run`: starts the ranks of a program, on this node and together with other nodes, and makes sure
//! that all of them end.
//!
//! One thread does everything that concerns ranks. It waits for the first of: a signal (such as a child's
//! exit), output in a rank's pipe, room to write, or an event. Events come from the thread that locates the
//! store, and later from the rendezvous: a round begins with these nodes, stop, the job is over. A single
//! node takes the same path, with its own store. The store server runs on its own thread in the launcher of
//! one node, so a rank that dies does not take the store with it.
//!
//! The ranks of a round are in one of five phases. They run. Some have failed, and the launcher waits briefly
//! to determine which rank failed first. They are about to be asked to exit, and may write their dumps. They
//! were asked to exit and have some time for it. They were killed. The first local failure begins the second
//! phase. The rendezvous begins the third, which ends immediately if no rank writes a dump. A signal to the
//! launcher begins the fourth. When the last rank has exited, the processes that ranks left behind are ended
//! too, and only then the rendezvous is notified. If this launcher is frozen or cut off from the store, the
//! guard ends them in time. So two rounds never run at the same time.
//!
//! This file has the loop and the shared types. `joining` is the way into the job, `round` one start of the
//! ranks, `ending` the final report. `args` has the flags and the plan that follows from them, `endpoint`
//! finds the store, `relaying` may stand between it and ranks, `program` finds what to run. `environment` makes a rank's variables, `numa` selects its
//! processors, `rank` is its process, `signals` checks which signals it handles, `pipes` and `output` handle
//! its output. `guard` makes sure that no process is left behind. `recovering` replaces ranks that die while the others
//! go on. `inspect` collects what the dashboard
//! shows.

#![warn(missing_docs)]
#![expect(
    clippy::disallowed_methods,
    reason = "ranks have some time to exit, and reports say how long they ran"
)]

mod args;
mod crew;
mod culprit;
mod ending;
mod endpoint;
mod environment;
mod failure;
mod generation;
mod guard;
mod inspect;
mod joining;
mod leftovers;
mod lines;
mod logs;
mod mark;
mod numa;
mod output;
mod pipes;
mod proc;
mod program;
mod progress;
mod rank;
mod ranks_store;
mod recovering;
mod relaying;
mod rendezvous;
mod round;
mod signals;
mod simulation;
mod status;
mod worker_sockets;

use std::ffi::OsString;
use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant, SystemTime};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Resource, Rlimit, Signal, getrlimit};
use signal_hook::consts::SIGCHLD;
use signal_hook::iterator::backend::SignalDelivery;
use signal_hook::iterator::exfiltrator::SignalOnly;

pub use args::Args;
use args::LaunchPlan;
use endpoint::Home;
use environment::Job;
use failure::MemoryWatch;
use guard::Guard;
pub use guard::stand_guard;
use inspect::{Connections, RankStatus, spare_status_of, status_of};
use logs::Logs;
use mark::Mark;
use output::Outlet;
use progress::{Progress, Stuck};
use rank::{Rank, signal_name};
use relaying::Door;
use rendezvous::{Assignment, NodeStatus, Order, Rendezvous};
use round::{Phase, Round};
pub use simulation::Simulation;
use status::Status;
use tenfold_console::{Outcome, printable, raise_open_files};
use tenfold_dashboard::Dashboard;
use tenfold_dashboard::job::Generation;
use worker_sockets::WorkerSockets;

/// Exit code for invalid arguments.
const USAGE: u8 = 2;
/// Open files that a rank costs the launcher: two pipes, and its connections to the store or relay.
const FILES_A_RANK: usize = 16;
/// Time for the rendezvous to report that the job is over, when this node leaves.
const LEAVING: Duration = Duration::from_secs(5);
/// From the start of ranks to the first inspection.
const FIRST_LOOK: Duration = Duration::from_secs(1);

/// Runs the job until all ranks of this node have exited, and returns the exit code.
///
/// # Errors
/// If the program does not exist, the store cannot be reached, or this node cannot start the ranks.
pub fn run(args: &Args) -> Outcome {
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
    let program = program::resolve(&plan.program, plan.kind, plan.python.as_deref())
        .map_err(|missing| missing.to_string())?;
    let processors = plan.binding.map(|binding| numa::processors(binding, plan.ranks)).transpose()?;
    let files_before = make_room_for_files(&plan);
    let mut launch = Launch::new(Arc::new(plan), program, processors)?;
    launch.files_of_ranks = files_before;
    let outcome = launch.work();
    launch.finish(outcome)
}

/// Raises the limit of open files if it is too low for the ranks, or if this launcher may host the store for
/// other nodes, whose ranks all connect to it. Returns the previous limit, which the ranks get: programs that
/// use `select` or close all files at their start do badly with a high one.
fn make_room_for_files(plan: &LaunchPlan) -> Option<Rlimit> {
    let before = getrlimit(Resource::Nofile);
    let needed = (plan.ranks * FILES_A_RANK) as u64;
    if plan.nodes.max == 1 && before.current.is_none_or(|limit| limit >= needed) {
        return None;
    }
    raise_open_files();
    Some(before)
}

/// What other threads report to the main thread.
enum News {
    /// A line for the user.
    Note(String),
    /// The same, about what the rendezvous waits for.
    Awaited(String),
    /// Ranks may run until then without another event of this kind.
    Held(Instant),
    /// The store was found.
    Arrived(Home),
    /// It was not found.
    Lost(String),
    /// A round begins; the ranks' store is ready.
    Start(Box<Assignment>, Door),
    Stop {
        round: u64,
        reason: String,
    },
    Over(rendezvous::Outcome),
    /// What ranks of this round wrote about their generations.
    Seen {
        round: u64,
        seen: Box<crew::Seen>,
    },
}

/// Sends events to the main thread, and wakes it.
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

struct Launch {
    plan: Arc<LaunchPlan>,
    program: Vec<OsString>,
    processors: Option<Vec<Vec<usize>>>,
    /// The limit of open files for ranks, if it differs from the launcher's.
    files_of_ranks: Option<Rlimit>,
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
    /// The last generations of ranks that recovered.
    generations: Vec<Generation>,
    guard: Guard,
    /// We are a subreaper: orphaned descendants of ranks become our children.
    is_subreaper: bool,
    mark: Mark,
    progress: Progress,
    /// The warnings already printed about ranks that keep others waiting.
    stuck: Stuck,
    worker_sockets: Option<WorkerSockets>,
    dashboard: Option<Dashboard>,
    home: Option<Home>,
    rendezvous: Option<Rendezvous>,
    round: Option<Round>,
    /// Until when ranks may run without an answer from the store; then the guard ends them.
    held_until: Option<Instant>,
    /// What the rendezvous waits for, until the next round begins.
    awaited: Option<String>,
    /// The signal that ended the run, and until when to wait for the rendezvous.
    leaving: Option<(i32, Instant)>,
    over: Option<rendezvous::Outcome>,
    /// More than one signal asked the launcher to exit.
    impatient: bool,
    status_at: Option<Instant>,
}

/// What can proceed without blocking.
#[derive(Debug, Default)]
struct Ready {
    write: bool,
    /// Local rank and which of its pipes.
    read: Vec<(usize, usize)>,
}

impl Launch {
    fn new(
        plan: Arc<LaunchPlan>,
        program: Vec<OsString>,
        processors: Option<Vec<Vec<usize>>>,
    ) -> Result<Self, Box<dyn std::error::Error>> {
        let (wake, waker) = UnixStream::pair()?;
        let signals = SignalDelivery::with_pipe(wake, waker, SignalOnly, signals::heard(&plan.signals))?;
        let is_subreaper = leftovers::become_subreaper(); // before there are children
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
            recovers: plan.recovers,
            mark: mark.variable(),
        };
        Ok(Launch {
            plan,
            program,
            processors,
            files_of_ranks: None,
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
            generations: Vec::new(),
            guard,
            is_subreaper,
            mark,
            progress,
            stuck: Stuck::default(),
            worker_sockets,
            dashboard: None,
            home: None,
            rendezvous: None,
            round: None,
            held_until: None,
            awaited: None,
            leaving: None,
            over: None,
            impatient: false,
            status_at: None,
        })
    }

    /// Runs until the job is over on this node. After an error of the launcher itself, no process of ours may
    /// stay either.
    fn work(&mut self) -> Result<(), Box<dyn std::error::Error>> {
        if let Some(folder) = self.logs.folder() {
            let line = format!("log files are in {}", folder.display());
            self.outlet.note(&line);
        }
        if let Some(sockets) = &self.worker_sockets {
            let line = format!("inspect ranks with: tenfold worker {sockets}");
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

    /// When to continue even if nothing happens.
    fn next_time(&self) -> Option<Instant> {
        let phase_at = self.round.as_ref().and_then(|round| match round.phase {
            Phase::Stopping(kill_at) | Phase::Finishing(kill_at) if round.is_running() => kill_at,
            Phase::Settling { look_at, .. } | Phase::LettingDump { look_at, .. } => Some(look_at),
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
        self.guard.catch_up();
        let Some(round) = &mut self.round else { return };
        round.ranks.iter_mut().for_each(|rank| rank.pipes.wake(now, &mut self.outlet));
        match round.phase {
            Phase::Stopping(Some(kill_at)) if now >= kill_at => self.kill(),
            Phase::Finishing(Some(kill_at)) if now >= kill_at => round.kill_all(),
            _ => {}
        }
        self.drop_forgotten(now);
        self.settle(now);
        self.look_for_dumps(now);
        if self.status_at.is_some_and(|at| now >= at) {
            self.report_status(now);
        }
    }

    /// Sleeps until there is something to do, or until the next wake-up time.
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
        let timeout = left.and_then(|left| Timespec::try_from(left).ok()); // more seconds than fit mean no limit
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
            News::Awaited(line) => {
                self.outlet.note(&line);
                self.awaited = Some(printable(&line).into_owned());
            }
            News::Held(until) => {
                self.held_until = Some(until);
                self.guard.hold(until);
            }
            News::Arrived(home) => self.join(home)?,
            News::Lost(text) => {
                self.tell(Order::Leave { reason: text.clone() }); // in case the ranks' store was not found
                self.over.get_or_insert(rendezvous::Outcome::Closed(text));
            }
            News::Start(assignment, door) => self.start_round(*assignment, door)?,
            News::Stop { round, reason } => self.told_to_stop(round, &reason),
            News::Seen { round, seen } => self.learn_generation(round, *seen),
            News::Over(outcome) => {
                self.held_until = None;
                self.guard.release();
                self.over.get_or_insert(outcome);
                self.stop_after_dumps("the job is over: stopping all ranks".into());
            }
        }
        Ok(())
    }

    fn tell(&self, order: Order) {
        if let Some(rendezvous) = &self.rendezvous {
            rendezvous.tell(order);
        }
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

    fn replace_guard(&mut self) {
        if let Err(error) = self.guard.replace() {
            self.outlet.note(&format!(
                "warning: the guard process exited and cannot be replaced ({error}): if this launcher is killed now, \
                 processes that ranks started may stay alive"
            ));
        }
    }

    /// A signal that does not end the run: sent to ranks that handle it, not to processes that they started.
    fn pass_on(&mut self, signal: i32) {
        self.notice_ends(); // or a rank that has exited would be reported as not catching it
        let ranks = self.round.iter().flat_map(|round| &round.ranks).filter(|rank| rank.is_running());
        let (expecting, others): (Vec<&Rank>, Vec<&Rank>) =
            ranks.partition(|rank| signals::is_expected(rank.process(), signal));
        if let Some(signal) = Signal::from_named_raw(signal) {
            expecting.iter().for_each(|rank| rank.signal_alone(signal));
        }
        let numbers =
            |ranks: &[&Rank]| ranks.iter().filter_map(|rank| Some(rank.seat?.number)).collect::<Vec<_>>();
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
        self.judge(); // after leaving, a failure can no longer be reported
        let name = signal_name(signal);
        self.tell(Order::Leave { reason: name.clone() });
        let until = Instant::now() + LEAVING;
        self.leaving = Some((signal, until));
        let seconds = self.plan.shutdown_timeout.as_secs_f64();
        let note = format!("{name}: passed on to all ranks; they have {seconds} s to exit");
        if self.hosts_others() {
            self.outlet.note("this node hosts the store, so the job ends on the other nodes as well");
        }
        // A single rank is as good as the program itself: the user who pressed Ctrl-C knows.
        let is_alone = self.round.as_ref().is_none_or(|round| round.assignment.world_size == 1);
        let signal = Signal::from_named_raw(signal).unwrap_or(Signal::TERM);
        self.stop(signal, (!is_alone).then_some(note.as_str()));
    }

    /// What is reported to the dashboard, with the next beat.
    fn report_status(&mut self, now: Instant) {
        let Some(round) = &self.round else { return };
        let is_first = self.status_at.is_none();
        self.status_at = Some(now + if is_first { FIRST_LOOK } else { self.plan.settings.beat_interval });
        // No rank has connections right after the start or after its exit.
        let looks = !is_first && round.is_running();
        let mut connections = Connections::default();
        if looks {
            connections = Connections::to(round.door.endpoint.port);
            if let Some(waiters) = round.door.waiters() {
                connections.go_to_relay(&round.assignment.node().host, waiters);
            }
        }
        let clock = SystemTime::now();
        let collectives = |rank: &Rank| self.progress.of(round.assignment.round, rank.id, clock);
        let (ranks, spares) = round.shown();
        let statuses: Vec<RankStatus> =
            ranks.iter().map(|rank| status_of(rank, now, &connections, collectives(rank))).collect();
        let spares = spares.iter().map(|spare| spare_status_of(spare)).collect();
        let told = statuses.iter().filter_map(|status| Some((status.rank?, &status.collectives[..])));
        for line in self.stuck.news(told) {
            self.outlet.note(&format!("warning: {line}"));
        }
        if let Ok(ranks) = serde_json::to_value(statuses) {
            let generations = self.generations.clone();
            self.tell(Order::Status(Box::new(NodeStatus { ranks, spares, generations })));
        }
        self.look_for_generation();
    }

    /// The line at the bottom of a terminal.
    fn show_status(&mut self) {
        let dashboard = self.dashboard.as_ref().map(|dashboard| format!("http://{}/", dashboard.address()));
        if let Some(awaited) = &self.awaited {
            let awaited = Some(awaited.clone());
            self.outlet.set_status(Some(Status { awaited, dashboard, ..Status::new(self.started) }));
            return;
        }
        let Some(round) = self.round.as_ref().filter(|round| round.assignment.world_size > 1) else {
            return;
        };
        let (ranks, spares) = round.shown();
        let is_now = |generation: &&Generation| generation.round == round.assignment.round;
        let generation = self.generations.last().filter(is_now);
        let status = Status {
            round: round.assignment.round,
            nodes: round.assignment.nodes,
            ranks_running: ranks.iter().filter(|rank| rank.is_running()).count(),
            ranks: ranks.len(),
            spares: spares.len(),
            generation: generation.map_or(0, |generation| generation.generation),
            replaced: round.recovery.as_ref().map_or(0, |recovery| recovery.crew.replaced()),
            stopping: round.phase != Phase::Running,
            restarts_used: self.restarts_used,
            restarts_max: self.plan.max_restarts,
            dashboard,
            ..Status::new(self.started)
        };
        self.outlet.set_status(Some(status));
    }
}

fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}
