//! All ranks of one implementation: child processes that sleep until their turn and never outlive us.
//!
//! Each rank has a connection to the coordinator and reads from it. So every rank notices immediately if the
//! coordinator dies. In addition, the kernel kills what we started
//! ([`server::host`](super::super::server::host)), and the ranks tie themselves to the process that started
//! them.
#![expect(clippy::disallowed_methods, reason = "a benchmark waits for its children, and reads the clock")]

use std::fs::File;
use std::io::{ErrorKind, Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tenfold_store::{Server, ServerOptions};

use super::super::{Failure, Interrupt};
use super::hosts::Hosts;
use super::operation::Transport;
use super::peer::{Implementation, Meeting, Recipe, Site, Start};
use super::protocol::{Answer, BYE, Order};
use tenfold_console::Program;

/// Importing PyTorch from a cold disk takes a while, on every rank.
const START_MAX: Duration = Duration::from_secs(180);
/// Far beyond any measurement that is worth waiting for.
const ANSWER_MAX: Duration = Duration::from_secs(120);
/// How long a rank may take to exit before it is killed.
const LEAVE_MAX: Duration = Duration::from_secs(3);
const GLANCE: Duration = Duration::from_millis(100);
/// Between two checks of something that causes no event, such as a child's exit.
const NAP: Duration = Duration::from_millis(10);
/// The longest answer: the times of a thousand batches.
const ANSWER_BYTES_MAX: usize = 1 << 16;
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

    /// The next rank that has connected, if there is one.
    fn accept(&self) -> Result<Option<Member>, Failure> {
        match self.listener.accept() {
            Ok((stream, _)) => {
                Member::new(stream).map(Some).map_err(|error| lost(&error).during("a rank that arrives"))
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
    members: Vec<Member>,
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
        let socket = coordinator.folder().join(ORDERS);
        let agents = site.hosts().map(|hosts| hosts.write_agents(coordinator.folder())).transpose()?;
        let meeting = Meeting {
            team: &name,
            coordinator: &socket,
            store: site.hosts().map_or(coordinator.store.address(), Hosts::store),
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
        let mut strangers: Vec<Member> = Vec::new();
        let mut seats: Vec<Option<Member>> = Vec::new();
        seats.resize_with(meeting.site.ranks(), || None);
        while seats.iter().any(Option::is_none) {
            self.look_after(start, START_MAX, "meet")?;
            strangers.extend(self.coordinator.accept()?);
            // A rank sends hello only once, so checking now and then is enough.
            thread::sleep(NAP);
            let mut index = 0;
            while index < strangers.len() {
                let said = strangers[index].poll_answer();
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
            let written = member.stream.write_all(line.as_bytes());
            written.map_err(|error| failed(rank, lost(&error), &self.log))?;
        }
        let mut answers: Vec<Option<Answer>> = vec![None; self.members.len()];
        let start = Instant::now();
        while answers.iter().any(Option::is_none) {
            self.look_after(start, ANSWER_MAX, "answer")?;
            self.sleep_until_one_speaks(&answers)?;
            for (rank, (member, answer)) in self.members.iter_mut().zip(&mut answers).enumerate() {
                if answer.is_none() {
                    *answer = member.poll_answer().map_err(|failure| failed(rank, failure, &self.log))?;
                }
                if let Some(Answer::Wrong(reason)) = answer {
                    return Err(Failure::new(format!("wrong result: {reason}")));
                }
            }
        }
        slowest(answers.into_iter().flatten())
    }

    fn sleep_until_one_speaks(&self, answers: &[Option<Answer>]) -> Result<(), Failure> {
        let silent = self.members.iter().zip(answers).filter(|(_, answer)| answer.is_none());
        let mut watched: Vec<PollFd<'_>> = silent
            .map(|(member, _)| PollFd::from_borrowed_fd(member.stream.as_fd(), PollFlags::IN))
            .collect();
        let timeout = Timespec { tv_sec: 0, tv_nsec: GLANCE.subsec_nanos().into() };
        match poll(&mut watched, Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(Failure::new(format!("cannot wait for ranks: {error}"))),
        }
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
            let _gone_already = member.stream.write_all(BYE.as_bytes());
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

/// A launcher that is asked to exit takes its ranks with it; one that does not react is killed.
fn end(child: &mut Child) {
    let process = rustix::process::Pid::from_child(child);
    let _gone = rustix::process::kill_process(process, rustix::process::Signal::TERM);
    let start = Instant::now();
    while start.elapsed() < LEAVE_MAX {
        if !matches!(child.try_wait(), Ok(None)) {
            return;
        }
        thread::sleep(NAP);
    }
    let _gone = child.kill();
    let _reaped = child.wait();
}

/// Starts a command so that the kernel kills it when we die; its output goes to the log.
fn spawn(command: &Command, log: &Path) -> Result<Child, Failure> {
    let program = command.get_program();
    let cannot =
        |error: std::io::Error| Failure::new(format!("cannot start `{}`: {error}", program.display()));
    let log = || File::options().create(true).append(true).open(log).map_err(cannot);
    let mut host = Program::own().command();
    host.args(["bench", "host-server", "--"]).arg(program).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => host.env(name, value),
            None => host.env_remove(name),
        };
    }
    host.stdin(Stdio::null()).stdout(log()?).stderr(log()?).spawn().map_err(cannot)
}

/// The last output of a process, for an error.
fn last_lines(log: &Path) -> String {
    const LINES_MAX: usize = 12;
    let text = String::from_utf8_lossy(&std::fs::read(log).unwrap_or_default()).into_owned();
    let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    lines[lines.len().saturating_sub(LINES_MAX)..].iter().map(|line| format!("\n  | {line}")).collect()
}

fn lost(error: &std::io::Error) -> Failure {
    Failure::new(format!("lost the connection to it: {error}"))
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

/// One rank, as the coordinator sees it.
#[derive(Debug)]
struct Member {
    stream: UnixStream,
    unread: Vec<u8>,
}

impl Member {
    fn new(stream: UnixStream) -> std::io::Result<Self> {
        stream.set_nonblocking(true)?;
        Ok(Member { stream, unread: Vec::new() })
    }

    /// The next answer, if it has arrived completely.
    fn poll_answer(&mut self) -> Result<Option<Answer>, Failure> {
        loop {
            if let Some(end) = self.unread.iter().position(|&byte| byte == b'\n') {
                let line: Vec<u8> = self.unread.drain(..=end).collect();
                let line = String::from_utf8_lossy(&line);
                let answer = Answer::parse(&line);
                return answer
                    .map(Some)
                    .ok_or_else(|| Failure::new(format!("invalid answer `{}`", line.trim_end())));
            }
            if self.unread.len() > ANSWER_BYTES_MAX {
                return Err(Failure::new("the answer is too long"));
            }
            let mut buffer = [0; 4096];
            match self.stream.read(&mut buffer) {
                Ok(0) => return Err(Failure::new("it closed its connection")),
                Ok(count) => self.unread.extend_from_slice(&buffer[..count]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(lost(&error)),
            }
        }
    }
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

    #[test]
    fn the_end_of_a_log_goes_into_the_error() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log");
        let text: String = (0..20).map(|line| format!("line {line}\n\n")).collect();
        std::fs::write(&log, text).unwrap();
        let shown = last_lines(&log);
        assert!(shown.starts_with("\n  | line 8\n") && shown.ends_with("\n  | line 19"), "{shown}");
        assert_eq!(last_lines(&folder.path().join("none")), "");
    }
}
