//! One start of this node's ranks, from the first process to the final report about them.
//!
//! Ranks run until one fails, the rendezvous sends a stop, or the launcher is asked to exit. After a failure,
//! the launcher waits briefly to determine which rank failed first. Then the other ranks are asked to exit,
//! and killed if they do not, see [`Phase`]. A round is closed when no process is left of it; only then the
//! rendezvous is notified.
//!
//! Not here: a rank's process (`rank`), the report about one that failed (`failure`), and what follows from a
//! failure if ranks recover from it (`recovering`).

#![expect(
    clippy::disallowed_methods,
    reason = "ranks have some time to exit, and reports say how long they ran"
)]

use std::io::{self, IsTerminal as _};
use std::time::{Duration, Instant, SystemTime};

use rustix::process::Signal;

use super::crew::Id;
use super::culprit::{self, Suspect};
use super::environment::{Place, environment, removed};
use super::failure::{Failure, Words};
use super::leftovers::{self, Finder};
use super::logs::RankLogs;
use super::mark::Mark;
use super::output::{Prefix, Speaker};
use super::program;
use super::rank::{self, Birth, End, Rank, Seat};
use super::recovering::Recovery;
use super::relaying::Door;
use super::rendezvous::{Assignment, JobFailure, Order};
use super::worker_sockets::WorkerSockets;
use super::{LEAVING, Launch};

/// How long ranks may continue to write dumps after another has failed, and how often to check whether they
/// do.
const DUMPS_MAX: Duration = Duration::from_secs(1);
const DUMPS_LOOK: Duration = Duration::from_millis(5);
/// From the first local failure to the report about it: ranks that fail because of it, and the rank that
/// caused it, are noticed in any order.
const SETTLING: Duration = Duration::from_millis(50);
/// The same while a rank is seen to be exiting, on a machine that is too busy.
const SETTLING_MAX: Duration = Duration::from_secs(1);
const SETTLING_LOOK: Duration = Duration::from_millis(5);

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    Running,
    /// Some have failed, and this is not reported yet: at that time the launcher determines which was first.
    Settling {
        since: Instant,
        look_at: Instant,
    },
    /// To be asked to exit, with this message, as soon as none of them writes a dump; at that time at the
    /// latest.
    LettingDump {
        until: Instant,
        look_at: Instant,
        note: String,
    },
    /// Asked to exit; killed at that time, if it can be represented.
    Stopping(Option<Instant>),
    /// All ranks have succeeded, and spares were asked to exit; they are killed at that time.
    Finishing(Option<Instant>),
    Killed,
}

/// What a process is started as.
#[derive(Clone, Copy, Debug)]
pub(super) struct Role<'a> {
    pub(super) id: Id,
    /// None for a spare.
    pub(super) seat: Option<Seat>,
    /// The name of a process that joins ranks which run.
    pub(super) serial: Option<&'a str>,
}

/// One start of this node's ranks.
#[derive(Debug)]
pub(super) struct Round {
    pub(super) assignment: Assignment,
    /// And spares.
    pub(super) ranks: Vec<Rank>,
    pub(super) phase: Phase,
    /// Where the ranks reach their store.
    pub(super) door: Door,
    /// Ranks that failed before any rank was asked to exit, in the order in which they were noticed.
    pub(super) failed: Vec<Id>,
    /// If processes that die are replaced.
    pub(super) recovery: Option<Recovery>,
    /// All have exited, with all processes that they left behind, and the rendezvous was notified.
    pub(super) closed: bool,
}

impl Round {
    pub(super) fn is_running(&self) -> bool {
        self.ranks.iter().any(Rank::is_running)
    }

    /// Whether this rank was one of this node at the start of the round. A spare may become a rank of another one.
    pub(super) fn owns(&self, seat: Seat) -> bool {
        let first = self.assignment.first_rank();
        (first..first + self.assignment.node().ranks).contains(&seat.number)
    }

    /// The ranks that count, each with its present or last process, and the spares that wait.
    pub(super) fn shown(&self) -> (Vec<&Rank>, Vec<&Rank>) {
        let mut ranks: Vec<&Rank> = Vec::new();
        for rank in self.ranks.iter().filter(|rank| rank.seat.is_some() && !rank.is_forgotten) {
            ranks.retain(|other| other.is_running() || other.seat != rank.seat);
            ranks.push(rank);
        }
        ranks.sort_by_key(|rank| rank.seat.map(|seat| seat.number));
        let is_spare = |rank: &&Rank| rank.seat.is_none() && rank.is_running();
        (ranks, self.ranks.iter().filter(is_spare).collect())
    }

    /// A process may still be started in place of one that has died.
    fn is_recovering(&self) -> bool {
        let is_recovering = |recovery: &Recovery| recovery.crew.is_recovering();
        self.phase == Phase::Running && self.recovery.as_ref().is_some_and(is_recovering)
    }

    pub(super) fn kill_all(&mut self) {
        for rank in self.ranks.iter_mut().filter(|rank| rank.is_running()) {
            rank.killed = true;
            rank.signal(Signal::KILL);
        }
    }

    pub(super) fn rank(&self, id: Id) -> Option<&Rank> {
        self.ranks.iter().find(|rank| rank.id == id)
    }

    pub(super) fn rank_mut(&mut self, id: Id) -> Option<&mut Rank> {
        self.ranks.iter_mut().find(|rank| rank.id == id)
    }
}

impl Launch {
    pub(super) fn start_round(
        &mut self,
        assignment: Assignment,
        door: Door,
    ) -> Result<(), Box<dyn std::error::Error>> {
        if self.leaving.is_some() || self.over.is_some() {
            return Ok(());
        }
        let (first, local, world) = (assignment.first_rank(), self.plan.ranks, assignment.world_size);
        let number = assignment.round;
        let mut beginning = String::new();
        if self.round.is_some() && assignment.restarts_used > self.restarts_used {
            let used = assignment.restarts_used;
            beginning = format!("restart {used} of {}: ", self.plan.max_restarts);
        }
        self.restarts_used = assignment.restarts_used;
        if self.awaited.take().is_some() {
            self.outlet.set_status(None); // a single rank has none
        }
        if assignment.nodes > 1 || number > 0 {
            let Assignment { node_rank, nodes, .. } = &assignment;
            let last = first + local - 1;
            let own = if local == 1 { format!("rank {first}") } else { format!("ranks {first} to {last}") };
            let nodes = if *nodes == 1 { "1 node".into() } else { format!("{nodes} nodes") };
            self.outlet.note(&format!(
                "{beginning}round {number} starts on {nodes}; this is node {node_rank}, with {own} of {world}"
            ));
        }
        let mut round = Round {
            assignment,
            ranks: Vec::with_capacity(local),
            phase: Phase::Running,
            door,
            failed: Vec::new(),
            recovery: None,
            closed: false,
        };
        let mut unstarted = None;
        self.guard.begin_round();
        for (local_rank, logs) in self.logs.start_round(number, local)?.into_iter().enumerate() {
            let seat = Some(Seat { number: first + local_rank, local_rank });
            match self.start_rank(Role { id: local_rank, seat, serial: None }, logs, &round) {
                Ok(rank) => {
                    self.guard.watch(rank.process(), rank.pipes.numbers());
                    round.ranks.push(rank);
                }
                Err(error) => {
                    unstarted = Some((first + local_rank, error));
                    break;
                }
            }
        }
        self.round = Some(round);
        if unstarted.is_none() {
            self.begin_recovery()?;
        }
        self.report_status(Instant::now());
        if let Some((rank, error)) = unstarted {
            let summary = "could not be started";
            self.fail(rank, summary.into(), format!("cannot start rank {rank}: {error}"));
            self.stop_after_dumps(format!("rank {rank} {summary}: stopping the others"));
        }
        Ok(())
    }

    pub(super) fn start_rank(&self, role: Role<'_>, logs: RankLogs, round: &Round) -> Result<Rank, String> {
        let Round { assignment, door, .. } = round;
        let Role { id, seat, serial } = role;
        let world_size = assignment.world_size;
        let local_rank = seat.map(|seat| seat.local_rank);
        let error_file = logs.traces.error_file.as_deref();
        let progress = self.progress.make_folder(assignment.round, id);
        let socket = |sockets: &WorkerSockets| {
            seat.map_or_else(|| sockets.of_spare(id), |seat| sockets.of(seat.number))
        };
        let socket = self.worker_sockets.as_ref().map(socket);
        let mark = self.plan.recovers.then(Mark::new).transpose().map_err(|error| error.to_string())?;
        let place = Place {
            seat,
            serial,
            mark: mark.as_ref(),
            assignment,
            store: (&door.endpoint.host, door.endpoint.port),
            behind: door.behind(),
            error_file,
            progress: progress.as_deref(),
            worker_server: socket.as_deref(),
        };
        let removed = removed(&self.job, &place);
        let environment = environment(&self.job, place, |name| std::env::var_os(name))?;
        let processors = self.processors.as_ref().zip(local_rank).and_then(|(lists, rank)| lists.get(rank));
        let program = local_rank.map(|local_rank| program::fill_in(&self.program, local_rank));
        let birth = Birth {
            id,
            seat,
            mark,
            program: program.as_ref().unwrap_or(&self.program),
            environment,
            removed,
            processors: processors.map(Vec::as_slice),
            files: self.files_of_ranks,
            prefix: self.prefix_of(seat, assignment),
            logs,
            // A terminal belongs to the launcher's group: it would stop a rank that reads from it.
            reads_input: world_size == 1
                && serial.is_none()
                && self.plan.nodes.max == 1
                && !io::stdin().is_terminal(),
            now: (Instant::now(), SystemTime::now()),
        };
        Rank::start(birth).map_err(|error| program::cannot_run(&self.program[0], &error))
    }

    /// What is put before each line of a process.
    pub(super) fn prefix_of(&self, seat: Option<Seat>, assignment: &Assignment) -> Option<Prefix> {
        let (role, host) = (&*self.plan.role, &*assignment.node().host);
        let speaker = Speaker { seat, world_size: assignment.world_size, role, host };
        let template = self.plan.template.as_deref();
        let has_prefix = assignment.world_size > 1 || template.is_some() || self.plan.spares > 0;
        has_prefix.then(|| Prefix::new(&speaker, template, &self.outlet))
    }

    pub(super) fn notice_ends(&mut self) {
        let ended = rank::reap();
        if ended.iter().any(|&(process, _)| process == self.guard.process()) {
            self.replace_guard();
        }
        let Some(round) = &mut self.round else { return };
        let is_open = matches!(round.phase, Phase::Running | Phase::Settling { .. });
        let mut noticed = Vec::new();
        for rank in &mut round.ranks {
            if let Some(&(_, end)) =
                ended.iter().find(|&&(process, _)| rank.is_running() && process == rank.process())
            {
                rank.end = Some(end);
                self.guard.forget(rank.process());
                noticed.push((rank.id, end));
                round.failed.extend((is_open && end.is_failure() && rank.seat.is_some()).then_some(rank.id));
            }
        }
        if is_open && round.phase == Phase::Running && round.recovery.is_some() && !self.is_lease_over() {
            noticed.into_iter().for_each(|(id, end)| self.recover_from(id, end));
        } else if is_open {
            self.notice_failures();
        }
    }

    /// The guard has killed the ranks.
    fn is_lease_over(&self) -> bool {
        self.held_until.is_some_and(|until| Instant::now() > until)
    }

    /// Begins to determine which rank failed first, if any has.
    pub(super) fn notice_failures(&mut self) {
        let Some(round) = &mut self.round else { return };
        if round.failed.is_empty() {
            return;
        }
        let now = Instant::now();
        if let Some(until) = self.held_until.filter(|&until| round.phase == Phase::Running && now > until) {
            let seconds = now.duration_since(until).as_secs_f64();
            self.outlet.note(&format!(
                "the store has not answered this node for too long (its lease ended {seconds:.1} s ago), so its guard \
                 killed the ranks: the other nodes may be starting them again"
            ));
        }
        if round.phase == Phase::Running {
            round.phase = Phase::Settling { since: now, look_at: now + SETTLING };
        }
        if !round.is_running() {
            self.judge();
        }
    }

    /// Reports which rank failed first, if it is time.
    pub(super) fn settle(&mut self, now: Instant) {
        let Some(round) = &mut self.round else { return };
        let Phase::Settling { since, look_at } = &mut round.phase else { return };
        if now < *look_at {
            return;
        }
        if now < *since + SETTLING_MAX && round.ranks.iter().any(Rank::is_ending) {
            *look_at = now + SETTLING_LOOK;
        } else {
            self.judge();
        }
    }

    /// Reports the first failure to the other nodes, if there is one that is not reported yet. Then ranks are
    /// to be asked to exit.
    pub(super) fn judge(&mut self) {
        let Some(round) = &mut self.round else { return };
        if !matches!(round.phase, Phase::Settling { .. }) {
            return;
        }
        let now = Instant::now();
        for rank in &mut round.ranks {
            rank.pipes.catch_up(now, &mut self.outlet); // the report needs its last output
        }
        let Some(failure) = self.describe() else {
            self.round.iter_mut().for_each(|round| round.phase = Phase::Running); // none has failed after all
            return;
        };
        let (rank, summary) = (failure.rank, failure.summary());
        self.fail(rank, summary.clone(), failure.text());
        let note = format!("rank {rank} failed ({summary}): stopping the others");
        if let Some(round) = &mut self.round {
            round.phase = Phase::LettingDump { until: now + DUMPS_MAX, look_at: now, note };
        }
    }

    /// What is known of the rank that failed first, and which other ranks had failed by then.
    fn describe(&self) -> Option<Failure> {
        let round = self.round.as_ref()?;
        let failed = round.failed.iter().filter_map(|&id| round.rank(id));
        let running = round.ranks.iter().filter(|rank| rank.is_running() && rank.seat.is_some());
        let mut ranks: Vec<(&Rank, Words)> =
            failed.chain(running).map(|rank| (rank, rank.pipes.words())).collect();
        let suspects: Vec<Suspect<'_>> = ranks
            .iter()
            .map(|(rank, words)| Suspect {
                end: rank.end,
                error_file: words.error_file.as_ref().and_then(|file| file.as_ref().ok()),
            })
            .collect();
        let clock = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let first = culprit::first(&suspects, clock.as_secs())?;
        let (rank, words) = ranks.swap_remove(first);
        let mut together: Vec<(usize, End)> =
            ranks.iter().filter_map(|(rank, _)| Some((rank.seat?.number, rank.end?))).collect();
        together.sort_by_key(|&(rank, _)| rank);
        Some(Failure { together, ..self.report_of(rank, words)? })
    }

    /// What is known of the death of one rank.
    pub(super) fn report_of(&self, rank: &Rank, words: Words) -> Option<Failure> {
        let (Round { assignment, .. }, Seat { number, local_rank }) = (self.round.as_ref()?, rank.seat?);
        Some(Failure {
            rank: number,
            world_size: assignment.world_size,
            local_rank,
            host: (assignment.nodes > 1).then(|| assignment.node().host.clone()),
            process: rank.process().as_raw_pid().cast_unsigned(),
            end: rank.end,
            ran: rank.began.elapsed(),
            words,
            memory: self.memory.kills(),
            program: self.program[0].to_string_lossy().into_owned(),
            is_first: true,
            together: Vec::new(),
        })
    }

    /// Reports a local failure to the other nodes.
    fn fail(&self, rank: usize, summary: String, text: String) {
        let Some(Round { assignment, recovery, .. }) = &self.round else { return };
        let host = assignment.node().host.clone();
        let (round, node_rank) = (assignment.round, assignment.node_rank);
        let replaced = recovery.as_ref().map_or(0, |recovery| recovery.crew.replaced());
        self.tell(Order::Failed {
            round,
            failure: JobFailure { round, node_rank, host, rank, summary, text, replaced },
        });
    }

    pub(super) fn told_to_stop(&mut self, number: u64, reason: &str) {
        match &self.round {
            Some(round) if round.assignment.round == number && !round.closed => {
                self.stop_after_dumps(format!("{reason}: stopping the ranks"));
            }
            _ => self.tell(Order::Stopped { round: number }), // they have exited by themselves
        }
    }

    /// Ranks whose group has failed write their dumps, within milliseconds. Ending them earlier would leave
    /// gaps in the dumps of a failed job.
    pub(super) fn stop_after_dumps(&mut self, note: String) {
        let Some(round) = &mut self.round else { return };
        if round.phase == Phase::Running {
            let now = Instant::now();
            round.phase = Phase::LettingDump { until: now + DUMPS_MAX, look_at: now, note };
            self.look_for_dumps(now);
        }
    }

    /// Asks ranks to exit that are about to be asked, if it is time and none writes a dump.
    pub(super) fn look_for_dumps(&mut self, now: Instant) {
        let Some(round) = &mut self.round else { return };
        let Phase::LettingDump { until, look_at, note } = &mut round.phase else { return };
        if now < *look_at {
            return;
        }
        let number = round.assignment.round;
        let is_writing = |rank: &Rank| rank.is_running() && self.progress.is_dumping(number, rank.id);
        if now < *until && round.ranks.iter().any(is_writing) {
            *look_at = now + DUMPS_LOOK;
        } else {
            let note = std::mem::take(note);
            self.stop(Signal::TERM, Some(&note));
        }
    }

    /// Asks ranks to exit, once, and prints that if there are any.
    pub(super) fn stop(&mut self, signal: Signal, note: Option<&str>) {
        self.judge();
        let Some(round) = &mut self.round else { return };
        if !matches!(round.phase, Phase::Running | Phase::LettingDump { .. }) {
            return;
        }
        round.phase = Phase::Stopping(Instant::now().checked_add(self.plan.shutdown_timeout));
        let running: Vec<&Rank> = round.ranks.iter().filter(|rank| rank.is_running()).collect();
        running.iter().for_each(|rank| rank.signal(signal));
        if let Some(note) = note.filter(|_| !running.is_empty()) {
            self.outlet.note(note);
        }
    }

    pub(super) fn kill(&mut self) {
        let Some(round) = &mut self.round else { return };
        round.phase = Phase::Killed;
        round.kill_all();
    }

    /// When the last rank of a round has exited: ends the processes that they left behind, shows their
    /// remaining output, and notifies the rendezvous.
    pub(super) fn close_round(&mut self) -> io::Result<()> {
        let Some(round) = &self.round else { return Ok(()) };
        if round.closed || round.is_running() || round.is_recovering() {
            return Ok(());
        }
        self.end_leftovers();
        self.drain()?;
        self.herald.ring(); // for events that arrived while only `drain` listened
        let Some(round) = &mut self.round else { return Ok(()) };
        round.door.close();
        round.closed = true;
        if let Some(recovery) = &mut round.recovery {
            recovery.end();
        }
        let number = round.assignment.round;
        let is_done = matches!(round.phase, Phase::Running | Phase::Finishing(_));
        self.report_status(Instant::now());
        self.status_at = None;
        self.tell(if is_done { Order::Done { round: number } } else { Order::Stopped { round: number } });
        if let Some((_, until)) = &mut self.leaving {
            *until = Instant::now() + if self.impatient { Duration::ZERO } else { LEAVING };
        }
        Ok(())
    }

    pub(super) fn end_leftovers(&mut self) {
        let finder = if self.is_subreaper {
            Finder::Tree { without: Some(self.guard.process()) }
        } else {
            Finder::Marked(self.mark.clone())
        };
        let left = leftovers::end_leftovers(&finder);
        if left > 0 {
            self.outlet
                .note(&format!("warning: {left} processes that ranks started are still alive after SIGKILL"));
        }
    }
}
