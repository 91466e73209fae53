//! One round: all ranks of one implementation are started, work, and lose one of them.
//!
//! Nothing is kept for the next round, because most implementations have no way to get the dead rank back.
#![expect(clippy::disallowed_methods, reason = "a benchmark waits for its children, and reads the clock")]

use std::os::fd::AsFd as _;
use std::path::PathBuf;
use std::process::Child;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use super::super::Failure;
use super::super::Interrupt;
use super::super::children::{Speaker, end, last_lines, sleep_until_one_speaks, spawn};
use super::super::collectives::hosts::{Hosts, host_address};
use super::super::collectives::peer::Start;
use super::super::collectives::team::Coordinator;
use super::contender::{Contender, Scene};
use super::figures::{Heard, Round};
use super::protocol::{Answer, monotonic_ns, store_order};

/// Importing PyTorch from a cold disk takes a while, on every rank.
const START_MAX: Duration = Duration::from_secs(180);
/// How long survivors may take in addition to the timeout of their group: Gloo needs all of it before it begins to recover.
const GRACE: Duration = Duration::from_secs(10);

/// The limit for survivors of a group with this timeout.
pub(crate) fn patience(timeout: Duration) -> Duration {
    timeout + GRACE
}

/// All ranks of one round. They are killed with this value.
#[derive(Debug)]
pub(crate) struct Crew<'a> {
    coordinator: &'a Coordinator,
    interrupt: &'a Interrupt,
    team: String,
    log: PathBuf,
    children: Vec<Child>,
    /// By rank.
    members: Vec<Member>,
    pub(crate) version: String,
}

#[derive(Debug)]
struct Member {
    pid: i32,
    speaker: Speaker,
}

impl<'a> Crew<'a> {
    /// Starts all ranks, and returns when each has reported, or why they cannot take part.
    pub(crate) fn start(
        contender: &Contender,
        scene: Scene<'_>,
        team: String,
        coordinator: &'a Coordinator,
        interrupt: &'a Interrupt,
    ) -> Result<Result<Self, String>, Failure> {
        let log = coordinator.folder().join(format!("{team}.log"));
        let (children, members) = (Vec::new(), Vec::new());
        let mut crew = Crew { coordinator, interrupt, team, log, children, members, version: String::new() };
        for Start { place, command } in contender.starts(scene, &crew.team, &coordinator.socket())? {
            let start = || spawn(&command, &crew.log);
            let child = match scene.site.hosts().zip(place) {
                Some((hosts, place)) => hosts.inside(place, start).and_then(|child| child),
                None => start(),
            };
            crew.children.push(child?);
        }
        Ok(crew.meet(scene.site.ranks())?.map_or(Ok(crew), Err))
    }

    /// Until all ranks have reported; or why one cannot take part.
    fn meet(&mut self, ranks: usize) -> Result<Option<String>, Failure> {
        let start = Instant::now();
        let mut strangers: Vec<Speaker> = Vec::new();
        let mut seats: Vec<Option<Member>> = Vec::new();
        seats.resize_with(ranks, || None);
        while seats.iter().any(Option::is_none) {
            self.look_after(start)?;
            strangers.extend(self.coordinator.accept()?);
            let sources = strangers.iter().map(Speaker::as_fd);
            sleep_until_one_speaks(sources.chain([self.coordinator.as_fd()]))?;
            let mut index = 0;
            while index < strangers.len() {
                match strangers[index].poll_parsed(Answer::parse) {
                    Ok(None) => index += 1,
                    Ok(Some(Answer::Hello { team, rank, pid, version })) if team == self.team => {
                        let seat = seats.get_mut(rank).filter(|seat| seat.is_none());
                        let seat = seat.ok_or_else(|| {
                            Failure::new(format!("rank {rank} is a duplicate or out of range"))
                        })?;
                        *seat = Some(Member { pid, speaker: strangers.swap_remove(index) });
                        self.version = version;
                    }
                    Ok(Some(Answer::Missing { team, reason })) if team == self.team => {
                        return Ok(Some(reason));
                    }
                    // A rank of an earlier round, which was killed meanwhile. If one of this round is killed, its
                    // process has ended early.
                    Ok(Some(_)) | Err(_) => drop(strangers.swap_remove(index)),
                }
            }
        }
        self.members = seats.into_iter().flatten().collect();
        Ok(None)
    }

    /// Lets the ranks meet and work, kills the victim, and hears the survivors.
    pub(crate) fn lose_one(
        mut self,
        contender: &Contender,
        scene: Scene<'_>,
        victim_hosts_store: bool,
    ) -> Result<Round, Failure> {
        let all: Vec<usize> = (0..self.members.len()).collect();
        if contender.needs_store() {
            self.name_store(scene, victim_hosts_store)?;
        }
        for (rank, answer) in self.answers(&all, START_MAX)?.into_iter().enumerate() {
            self.expect(answer, rank, "complete an all-reduce", |answer| {
                matches!(answer, Answer::Running).then_some(())
            })?;
        }
        let survivors: Vec<usize> = all.iter().copied().filter(|rank| *rank != scene.victim).collect();
        let victim = Pid::from_raw(self.members[scene.victim].pid)
            .ok_or_else(|| Failure::new("a rank sent an invalid process id"))?;
        let killed_ns = monotonic_ns();
        kill_process(victim, Signal::KILL)
            .map_err(|error| Failure::new(format!("cannot kill rank {}: {error}", scene.victim)))?;
        let answers = self.answers(&survivors, patience(scene.timeout))?;
        let heard = survivors.iter().zip(answers).map(|(rank, answer)| Heard { rank: *rank, answer });
        let round = Round::judge(scene.victim, killed_ns, all.len(), heard.collect());
        match &round.reason {
            // Others may have such results, and have no figures then; ours is not measured until it is repaired.
            Some(reason) if round.is_wrong && matches!(contender, Contender::Tenfold) => {
                Err(self.explained(Failure::new(reason)))
            }
            _ => Ok(round),
        }
    }

    fn name_store(&mut self, scene: Scene<'_>, victim_hosts_store: bool) -> Result<(), Failure> {
        let outside = scene.site.hosts().map_or(self.coordinator.store(), Hosts::store);
        let (host, mut port, mut clients) = (outside.ip(), outside.port(), 0..self.members.len());
        let mut host = host.to_string();
        if victim_hosts_store {
            host = scene.site.hosts().map_or(host, |_| host_address(0, 0).to_string());
            self.members[0].speaker.tell(&store_order(&host, 0))?;
            let answer = self.answers(&[0], START_MAX)?.pop().flatten();
            port = self.expect(answer, 0, "host a store", |answer| match answer {
                Answer::Store(port) => Some(port),
                _ => None,
            })?;
            clients.start = 1;
        }
        clients.try_for_each(|rank| self.members[rank].speaker.tell(&store_order(&host, port)))
    }

    /// One answer of each of these ranks, or why there is none; nothing if it stays silent for so long.
    fn answers(
        &mut self,
        ranks: &[usize],
        limit: Duration,
    ) -> Result<Vec<Option<Result<Answer, String>>>, Failure> {
        let start = Instant::now();
        let mut answers = vec![None; ranks.len()];
        loop {
            for (rank, answer) in ranks.iter().zip(&mut answers).filter(|(_, answer)| answer.is_none()) {
                *answer = match self.members[*rank].speaker.poll_parsed(Answer::parse) {
                    Ok(said) => said.map(Ok),
                    Err(failure) => Some(Err(failure.to_string())),
                };
            }
            if answers.iter().all(Option::is_some) || start.elapsed() > limit {
                return Ok(answers);
            }
            self.interrupt.check()?;
            let silent = ranks.iter().zip(&answers).filter(|(_, answer)| answer.is_none());
            sleep_until_one_speaks(silent.map(|(rank, _)| self.members[*rank].speaker.as_fd()))?;
        }
    }

    /// The answer of a rank that is to be alive.
    fn expect<T>(
        &self,
        answer: Option<Result<Answer, String>>,
        rank: usize,
        what: &str,
        meant: impl FnOnce(Answer) -> Option<T>,
    ) -> Result<T, Failure> {
        let reason = match answer {
            None => format!("did not {what} within {} s", START_MAX.as_secs()),
            Some(Err(reason)) => reason,
            Some(Ok(answer)) => {
                let said = format!("did not {what}, but sent {answer:?}");
                match meant(answer) {
                    Some(meant) => return Ok(meant),
                    None => said,
                }
            }
        };
        Err(self.explained(Failure::new(format!("rank {rank}: {reason}"))))
    }

    fn explained(&self, failure: Failure) -> Failure {
        failure.followed_by(&last_lines(&self.log))
    }

    /// Fails when waiting for ranks any longer is pointless.
    fn look_after(&mut self, start: Instant) -> Result<(), Failure> {
        self.interrupt.check()?;
        for child in &mut self.children {
            if let Ok(Some(status)) = child.try_wait() {
                let failure = Failure::new(format!("a process ended early ({status})"));
                return Err(failure.followed_by(&last_lines(&self.log)));
            }
        }
        if start.elapsed() > START_MAX {
            let failure = Failure::new(format!("the ranks did not start within {} s", START_MAX.as_secs()));
            return Err(self.explained(failure));
        }
        Ok(())
    }
}

impl Drop for Crew<'_> {
    fn drop(&mut self) {
        // A launcher removes its files when it is asked to exit, and its ranks die with it.
        self.children.iter_mut().for_each(end);
    }
}
