//! Replaces ranks that die, while the others go on (`--on-failure=recover`).
//!
//! Carries out what the crew decides: starts processes, ends what dead ones left behind, reads what the ranks
//! write about themselves, and tells the user. Not here: the decisions (`crew`), and what happens if the ranks
//! cannot recover (`round`).

#![expect(clippy::disallowed_methods, reason = "spares have some time to exit")]

use std::io;
use std::time::Instant;

use rustix::process::Signal;
use tenfold_dashboard::job;

use super::crew::{Act, Crew, Id, Part, Seen, Terms};
use super::generation::{self, Generation, Reader, Sources};
use super::leftovers::{self, Finder};
use super::logs::Writer;
use super::rank::{End, Rank, Seat};
use super::round::{Phase, Role, Round};
use super::{Launch, News, host_name};
use tenfold_dashboard::job::Keys;

/// Generations that are kept for the dashboard.
const GENERATIONS_MAX: usize = 32;

/// What a round has if its ranks may recover.
#[derive(Debug)]
pub(super) struct Recovery {
    pub(super) crew: Crew,
    reader: Option<Reader>,
    /// The number of the next process.
    next: Id,
}

impl Recovery {
    /// The round is over: nothing is read any more.
    pub(super) fn end(&mut self) {
        self.crew.stop();
        self.reader = None;
    }
}

impl Launch {
    /// The ranks of the round run: starts its spares.
    pub(super) fn begin_recovery(&mut self) -> io::Result<()> {
        if !self.plan.recovers {
            return Ok(());
        }
        let (Some(round), Some(home)) = (&mut self.round, &self.home) else { return Ok(()) };
        let assignment = &round.assignment;
        let number = assignment.round;
        let mut hosts = vec![host_name()];
        hosts.extend(self.plan.local_address.clone());
        let terms = Terms {
            round: number,
            has_others: assignment.nodes > 1,
            hosts,
            restarts_max: self.plan.max_restarts,
            restarts_used: assignment.restarts_used,
        };
        let mut crew = Crew::new(terms);
        for rank in &round.ranks {
            let part = Part::Rank(rank.seat.map_or(rank.id, |seat| seat.number));
            crew.started(rank.id, rank.process().as_raw_pid().cast_unsigned(), None, part);
        }
        let sources = Sources {
            ranks: round.door.endpoint.clone(),
            key: Generation::key(number),
            tally: (assignment.nodes > 1).then(|| Generation::tally_keys(number)),
            launchers: home.store.clone(),
            counter: Keys::new(&self.job.run_id).replaced(assignment.job),
        };
        let herald = self.herald.clone();
        let tell = move |seen| herald.tell(News::Seen { round: number, seen: Box::new(seen) });
        let reader = Some(Reader::start(sources, tell)?);
        round.recovery = Some(Recovery { crew, reader, next: round.ranks.len() });
        for _ in 0..self.plan.spares {
            self.start_joiner(Part::Spare);
        }
        Ok(())
    }

    /// A process has ended while the others may recover.
    pub(super) fn recover_from(&mut self, id: Id, end: End) {
        if end.is_failure() {
            self.clean_up_after(id);
        }
        self.with_crew(|crew| crew.ended(id, end));
    }

    /// The generation was read.
    pub(super) fn learn_generation(&mut self, round: u64, seen: Seen) {
        let is_open = |open: &Round| open.assignment.round == round && open.phase == Phase::Running;
        if self.round.as_ref().is_some_and(is_open) {
            self.with_crew(|crew| crew.seen(seen));
        }
    }

    /// Looks for a new generation that no death of a local rank has led to.
    pub(super) fn look_for_generation(&self) {
        let recovery = self.round.as_ref().and_then(|round| round.recovery.as_ref());
        if let Some(Recovery { crew, reader: Some(reader), .. }) = recovery {
            reader.look(crew.last_look());
        }
    }

    fn with_crew(&mut self, decide: impl FnOnce(&mut Crew) -> Vec<Act>) {
        let Some(recovery) = self.round.as_mut().and_then(|round| round.recovery.as_mut()) else { return };
        for act in decide(&mut recovery.crew) {
            self.act(act);
        }
        let recovery = self.round.as_ref().and_then(|round| round.recovery.as_ref());
        if let Some(Recovery { crew, reader: Some(reader), .. }) = recovery {
            reader.watch(crew.is_recovering());
        }
    }

    fn act(&mut self, act: Act) {
        let Some(round) = &mut self.round else { return };
        let Some(recovery) = &mut round.recovery else { return };
        match act {
            Act::Look(number) => {
                if let Some(reader) = &recovery.reader {
                    reader.look(number);
                }
            }
            Act::Tally { missing, finished } => {
                if let Some(reader) = &recovery.reader {
                    reader.tally(missing, finished);
                }
            }
            Act::Start { part, of } => self.replace(part, of),
            Act::Admit { id, seat } => self.admit(id, seat),
            Act::Show(facts) => self.show_generation(facts),
            Act::Forget(id) => {
                round.failed.retain(|&failed| failed != id);
                if let Some(rank) = round.rank_mut(id) {
                    rank.is_forgotten = true;
                }
            }
            Act::Kill(id) => {
                if let Some(rank) = round.rank(id) {
                    rank.signal(Signal::KILL);
                    let note = format!(
                        "{} (pid {}) is killed: the others went on without it",
                        rank.name(),
                        rank.process()
                    );
                    self.outlet.note(&note);
                }
            }
            Act::StopSpares => self.stop_spares(),
            Act::Refund(count) => {
                if let Some(reader) = &recovery.reader {
                    reader.count(-i64::try_from(count).unwrap_or(0));
                }
            }
            Act::Note(line) => self.outlet.note(&line),
            Act::GiveUp(reason) => {
                self.outlet.note(&format!("the ranks cannot recover: {reason}"));
                self.notice_failures();
            }
        }
    }

    /// Tells about a death, and starts a process because of it.
    fn replace(&mut self, part: Part, of: Id) {
        self.report_death(of);
        let Some(round) = &self.round else { return };
        let Some(recovery) = &round.recovery else { return };
        if let Some(reader) = &recovery.reader {
            reader.count(1);
        }
        let used = round.assignment.restarts_used + recovery.crew.replaced();
        let count = format!("replacement {used} of {}", self.plan.max_restarts);
        let Some(process) = self.start_joiner(part) else { return };
        self.outlet.note(&match part {
            Part::Replacement(rank) | Part::Rank(rank) => {
                format!("{count}: started pid {process} in place of rank {rank}")
            }
            Part::Spare => format!("{count}: started the spare pid {process}"),
        });
        self.report_status(Instant::now());
    }

    fn report_death(&mut self, id: Id) {
        let Some(round) = &mut self.round else { return };
        let Some(rank) = round.ranks.iter_mut().find(|rank| rank.id == id) else { return };
        rank.pipes.catch_up(Instant::now(), &mut self.outlet); // the report needs its last output
        let Some(rank) = self.round.as_ref().and_then(|round| round.rank(id)) else { return };
        let text = match self.report_of(rank, rank.pipes.words()) {
            Some(failure) => super::failure::Failure { is_first: false, ..failure }.text(),
            None => {
                let end = rank.end.map_or_else(String::new, |end| format!(" ({end})"));
                format!("{} ended{end}", rank.name())
            }
        };
        self.outlet.note(&text);
    }

    /// Starts a process that joins the ranks. If that is impossible, the round ends.
    fn start_joiner(&mut self, part: Part) -> Option<u32> {
        let round = self.round.as_mut()?;
        let (number, node_rank) = (round.assignment.round, round.assignment.node_rank);
        let first = round.assignment.first_rank();
        let recovery = round.recovery.as_mut()?;
        let id = recovery.next;
        recovery.next += 1;
        let serial = format!("{node_rank}-{id}");
        let seat = match part {
            Part::Rank(rank) | Part::Replacement(rank) => {
                let dead =
                    round.ranks.iter().rev().filter_map(|rank| rank.seat).find(|seat| seat.number == rank);
                Some(dead.unwrap_or(Seat { number: rank, local_rank: rank.saturating_sub(first) }))
            }
            Part::Spare => None,
        };
        let writer = match seat.filter(|&seat| round.owns(seat)) {
            Some(seat) => Writer::replacement(seat.local_rank, &serial),
            None => Writer::spare(&serial),
        };
        let round = self.round.as_ref()?;
        let started = self
            .logs
            .of(number, &writer)
            .and_then(|logs| self.start_rank(Role { id, seat, serial: Some(&serial) }, logs, round));
        let round = self.round.as_mut()?;
        let recovery = round.recovery.as_mut()?;
        match started {
            Ok(rank) => {
                let process = rank.process().as_raw_pid().cast_unsigned();
                self.guard.watch(rank.process(), rank.pipes.numbers());
                recovery.crew.started(id, process, Some(serial), part);
                round.ranks.push(rank);
                Some(process)
            }
            Err(error) => {
                recovery.crew.stop();
                self.outlet.note(&format!("the ranks cannot recover: cannot start another process: {error}"));
                self.notice_failures();
                None
            }
        }
    }

    /// A spare has become a rank: from now on it is shown and judged as that rank.
    fn admit(&mut self, id: Id, seat: Seat) {
        let Some(round) = &self.round else { return };
        let (number, node_rank) = (round.assignment.round, round.assignment.node_rank);
        let prefix = self.prefix_of(Some(seat), &round.assignment);
        let serial = format!("{node_rank}-{id}");
        let writer = match round.owns(seat) {
            true => Writer::former_spare(seat.local_rank, &serial),
            false => Writer::spare(&serial), // another rank of this node has the files of that local rank
        };
        let logs = self.logs.of(number, &writer);
        let Some(round) = &mut self.round else { return };
        let Some(rank) = round.ranks.iter_mut().find(|rank| rank.id == id) else { return };
        rank.seat = Some(seat);
        let name = rank.name();
        if let Ok(logs) = logs {
            rank.pipes.hand_over(name, prefix, logs, Instant::now(), &mut self.outlet);
        }
        let has_failed = rank.end.is_some_and(End::is_failure);
        if has_failed && !round.failed.contains(&id) {
            round.failed.push(id);
        }
    }

    fn show_generation(&mut self, facts: job::Generation) {
        let has_others = self.round.as_ref().is_some_and(|round| round.assignment.nodes > 1);
        if let Some(line) = generation::line(&facts, has_others) {
            self.outlet.note(&line);
        }
        self.generations.push(facts);
        let old = self.generations.len().saturating_sub(GENERATIONS_MAX);
        self.generations.drain(..old);
        self.report_status(Instant::now());
    }

    /// Processes that a dead rank has started do not outlive it.
    fn clean_up_after(&mut self, id: Id) {
        let Some(rank) = self.round.as_ref().and_then(|round| round.rank(id)) else { return };
        let Some(mark) = rank.mark.clone() else { return };
        let tree = self.is_subreaper.then(|| self.guard.process());
        let left = leftovers::kill(&Finder::Of { mark, leader: rank.process(), tree });
        if left > 0 {
            let note = format!(
                "warning: {left} processes that {} started are still alive after SIGKILL",
                rank.name()
            );
            self.outlet.note(&note);
        }
    }

    /// All ranks of this node have succeeded.
    fn stop_spares(&mut self) {
        let Some(round) = &mut self.round else { return };
        let spares: Vec<&Rank> = round.ranks.iter().filter(|rank| rank.is_running()).collect();
        if !spares.is_empty() {
            spares.iter().for_each(|spare| spare.signal(Signal::TERM));
            round.phase = Phase::Finishing(Instant::now().checked_add(self.plan.shutdown_timeout));
        }
    }

    /// Shows the last output of forgotten processes, and forgets them.
    pub(super) fn drop_forgotten(&mut self, now: Instant) {
        let Some(round) = &mut self.round else { return };
        let outlet = &mut self.outlet;
        round
            .ranks
            .retain_mut(|rank| !(rank.is_forgotten && !rank.is_running() && rank.pipes.drain(now, outlet)));
    }
}
