//! All ranks of one implementation: child processes that sleep until their turn and never outlive us.
//!
//! Each rank has a connection to the coordinator and reads from it. So every rank notices immediately if the
//! coordinator dies. In addition, the kernel kills what we started
//! ([`server::host`](super::super::server::host)), and the ranks tie themselves to the process that started
//! them.
#![expect(clippy::disallowed_methods, reason = "a benchmark waits for its children, and reads the clock")]

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::thread;
use std::time::{Duration, Instant};

use tenfold_store::{Server, ServerOptions};

use super::super::children::{LEAVE_MAX, NAP, Speaker, end, last_lines, lost, sleep_until_one_speaks, spawn};
use super::super::{Failure, Interrupt};
use super::hosts::Hosts;
use super::operation::Transport;
use super::peer::{Implementation, Meeting, Recipe, Site, Start};
use super::protocol::{Answer, BYE, Order};

/// Importing PyTorch from a cold disk takes a while, on every rank.
const START_MAX: Duration = Duration::from_secs(180);
/// Far beyond any measurement that is worth waiting for.
const ANSWER_MAX: Duration = Duration::from_secs(120);
/// The name of the coordinator's socket in its folder.
const ORDERS: &str = "orders";

/// Where ranks report: our socket, a store in which they find each other, a folder for their output.
#[derive(Debug)]
pub(crate) struct Coordinator {
    listener: UnixListener,
    store: Server,
    folder: tempfile::TempDir,
    interrupt: Interrupt,
}

impl Coordinator {
    pub(crate) fn start(interrupt: Interrupt) -> Result<Self, Failure> {
        let store = Server::start(ServerOptions::new("127.0.0.1", 0))
            .map_err(|error| Failure::new(format!("cannot start a store: {error}")))?;
        let folder = tempfile::Builder::new()
            .prefix("tenfold-bench-")
            .tempdir()
            .map_err(|error| Failure::new(format!("cannot make a temporary folder: {error}")))?;
        let socket = folder.path().join(ORDERS);
        let listener = UnixListener::bind(&socket)
            .and_then(|listener| listener.set_nonblocking(true).map(|()| listener))
            .map_err(|error| {
                Failure::new(format!("cannot listen on `{}`: {error}", socket.display()))
                    .hint("set TMPDIR to a folder with a short path")
            })?;
        Ok(Coordinator { listener, store, folder, interrupt })
    }

    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// The socket on which ranks report.
    pub(crate) fn socket(&self) -> PathBuf {
        self.folder.path().join(ORDERS)
    }

    /// The store, for ranks of this machine.
    pub(crate) fn store(&self) -> SocketAddr {
        self.store.address()
    }

    /// Readable when a rank has connected.
    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }

    /// The next rank that has connected, if there is one.
    pub(crate) fn accept(&self) -> Result<Option<Speaker>, Failure> {
        match self.listener.accept() {
            Ok((stream, _)) => {
                Speaker::new(stream).map(Some).map_err(|error| lost(&error).during("a rank that arrives"))
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(Failure::new(format!("cannot accept a rank: {error}"))),
        }
    }
}

/// The result of one measurement of a team.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Outcome {
    /// Nanoseconds of each batch, of the rank that took longest over it.
    Done { algorithm: Option<String>, batches: Vec<u64> },
    /// This implementation has no such case, and why.
    Cannot(String),
}

#[derive(Debug)]
pub(crate) struct Team<'a> {
    pub(crate) implementation: Implementation,
    /// The implementation's own name.
    pub(crate) version: String,
    /// Its transport.
    pub(crate) transport: Transport,
    coordinator: &'a Coordinator,
    /// By rank.
    members: Vec<Speaker>,
    children: Vec<Child>,
    log: PathBuf,
}

impl<'a> Team<'a> {
    /// Starts all ranks and waits until each has joined the others.
    pub(crate) fn start(
        recipe: &Recipe,
        site: Site<'_>,
        coordinator: &'a Coordinator,
    ) -> Result<Self, Failure> {
        let implementation = recipe.implementation;
        let name = format!("{implementation}-{}-{}", site.ranks(), std::process::id());
        let log = coordinator.folder().join(format!("{name}.log"));
        let socket = coordinator.socket();
        let agents = site
            .hosts()
            .map(|hosts| hosts.write_agents(coordinator.folder(), Path::new("orted")))
            .transpose()?;
        let meeting = Meeting {
            team: &name,
            coordinator: &socket,
            store: site.hosts().map_or(coordinator.store(), Hosts::store),
            site,
            agents: agents.as_ref(),
        };
        let mut team = Team {
            implementation,
            version: String::new(),
            transport: recipe.transport(site.transport()),
            coordinator,
            members: Vec::new(),
            children: Vec::new(),
            log,
        };
        let failed = |failure: Failure| failure.during(format_args!("starting {implementation}"));
        for Start { place, command } in recipe.starts(meeting) {
            let start = || spawn(&command, &team.log);
            let child = match site.hosts().zip(place) {
                Some((hosts, place)) => hosts.inside(place, start).and_then(|child| child),
                None => start(),
            };
            team.children.push(child.map_err(failed)?);
        }
        team.meet(meeting).map_err(failed)?;
        Ok(team)
    }

    fn meet(&mut self, meeting: Meeting<'_>) -> Result<(), Failure> {
        let start = Instant::now();
        let mut strangers: Vec<Speaker> = Vec::new();
        let mut seats: Vec<Option<Speaker>> = Vec::new();
        seats.resize_with(meeting.site.ranks(), || None);
        while seats.iter().any(Option::is_none) {
            self.look_after(start, START_MAX, "meet")?;
            strangers.extend(self.coordinator.accept()?);
            // A rank sends hello only once, so checking now and then is enough.
            thread::sleep(NAP);
            let mut index = 0;
            while index < strangers.len() {
                let said = strangers[index].poll_parsed(Answer::parse);
                let lost = |failure: Failure| failure.during("a rank").followed_by(&last_lines(&self.log));
                match said.map_err(lost)? {
                    None => index += 1,
                    Some(Answer::Hello { team, rank, version }) if team == meeting.team => {
                        let member = strangers.swap_remove(index);
                        let seat = seats.get_mut(rank).filter(|seat| seat.is_none());
                        *seat.ok_or_else(|| {
                            Failure::new(format!("rank {rank} is a duplicate or out of range"))
                        })? = Some(member);
                        self.version = version;
                    }
                    Some(Answer::Missing(reason)) => {
                        return Err(Failure::new(format!("a rank cannot take part: {reason}"))
                            .hint("name a Python that has PyTorch with `--python` or TENFOLD_PYTHON"));
                    }
                    Some(other) => {
                        return Err(Failure::new(format!("a rank sent {other:?} instead of hello")));
                    }
                }
            }
        }
        self.members = seats.into_iter().flatten().collect();
        Ok(())
    }

    /// Lets all ranks run it, and sleeps until they have.
    pub(crate) fn measure(&mut self, order: Order) -> Result<Outcome, Failure> {
        let line = format!("{order}\n");
        let failed = |rank: usize, failure: Failure, log: &Path| {
            failure.during(format_args!("rank {rank}")).followed_by(&last_lines(log))
        };
        for (rank, member) in self.members.iter_mut().enumerate() {
            member.tell(&line).map_err(|failure| failed(rank, failure, &self.log))?;
        }
        let mut answers: Vec<Option<Answer>> = vec![None; self.members.len()];
        let start = Instant::now();
        while answers.iter().any(Option::is_none) {
            self.look_after(start, ANSWER_MAX, "answer")?;
            let silent = self.members.iter().zip(&answers).filter(|(_, answer)| answer.is_none());
            sleep_until_one_speaks(silent.map(|(member, _)| member.as_fd()))?;
            for (rank, (member, answer)) in self.members.iter_mut().zip(&mut answers).enumerate() {
                if answer.is_none() {
                    *answer = member
                        .poll_parsed(Answer::parse)
                        .map_err(|failure| failed(rank, failure, &self.log))?;
                }
                if let Some(Answer::Wrong(reason)) = answer {
                    return Err(Failure::new(format!("wrong result: {reason}")));
                }
            }
        }
        slowest(answers.into_iter().flatten())
    }

    /// Fails when waiting any longer is pointless.
    fn look_after(&mut self, start: Instant, patience: Duration, what: &str) -> Result<(), Failure> {
        self.coordinator.interrupt.check()?;
        for child in &mut self.children {
            if let Ok(Some(status)) = child.try_wait() {
                let last = last_lines(&self.log);
                return Err(Failure::new(format!("a process ended early ({status}){last}")));
            }
        }
        if start.elapsed() > patience {
            let (seconds, last) = (patience.as_secs(), last_lines(&self.log));
            return Err(Failure::new(format!("the ranks did not {what} within {seconds} s{last}")));
        }
        Ok(())
    }
}

impl Drop for Team<'_> {
    fn drop(&mut self) {
        for member in &mut self.members {
            let _gone_already = member.tell(BYE);
        }
        let start = Instant::now();
        let mut told = self.members.is_empty();
        for child in &mut self.children {
            while matches!(child.try_wait(), Ok(None)) {
                if told || start.elapsed() > LEAVE_MAX {
                    end(child);
                    told = true;
                    break;
                }
                thread::sleep(NAP);
            }
        }
    }
}

/// A batch took as long as its slowest rank.
fn slowest(answers: impl Iterator<Item = Answer>) -> Result<Outcome, Failure> {
    let mut slowest: Vec<u64> = Vec::new();
    let mut used = None;
    for answer in answers {
        match answer {
            Answer::Done { algorithm, batches } => {
                slowest.resize(slowest.len().max(batches.len()), 0);
                for (most, time) in slowest.iter_mut().zip(batches) {
                    *most = time.max(*most);
                }
                used = used.or(algorithm);
            }
            Answer::Cannot(reason) => return Ok(Outcome::Cannot(reason)),
            other => return Err(Failure::new(format!("a rank sent {other:?} instead of times"))),
        }
    }
    Ok(Outcome::Done { algorithm: used, batches: slowest })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn done(algorithm: Option<&str>, batches: &[u64]) -> Answer {
        Answer::Done { algorithm: algorithm.map(str::to_owned), batches: batches.to_vec() }
    }

    #[test]
    fn each_batch_counts_as_the_slowest_rank_took_it() {
        let outcome = slowest([done(None, &[5, 9]), done(Some("ring"), &[7, 8])].into_iter()).unwrap();
        assert_eq!(outcome, Outcome::Done { algorithm: Some("ring".into()), batches: vec![7, 9] });
    }

    #[test]
    fn one_rank_that_cannot_run_a_case_excludes_all() {
        let outcome =
            slowest([done(None, &[5]), Answer::Cannot("it has no bf16".into())].into_iter()).unwrap();
        assert_eq!(outcome, Outcome::Cannot("it has no bf16".into()));
    }
}
