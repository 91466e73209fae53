//! One rank: a process, its group, and the ends of its pipes.
//!
//! A rank leads its own process group, so that a signal also reaches the processes it started, and Ctrl-C in
//! a terminal reaches the launcher alone. Its number stays reserved until it is reaped, which only [`reap`]
//! does. As long as a rank has no end here, a signal cannot hit another process.

use std::ffi::OsString;
use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};
use std::time::{Instant, SystemTime};

use rustix::process::{
    Pid, Rlimit, Signal, WaitOptions, WaitStatus, kill_process, kill_process_group, wait, waitpid,
};

use super::crew::Id;
use super::logs::RankLogs;
use super::mark::Mark;
use super::output::Prefix;
use super::pipes::Pipes;
use super::proc::Stat;

/// How a rank ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    Exit(u8),
    Signal(i32),
}

impl End {
    pub(super) fn is_failure(self) -> bool {
        self != End::Exit(0)
    }

    fn of(status: WaitStatus) -> Option<End> {
        match (status.exit_status(), status.terminating_signal()) {
            (Some(code), _) => Some(End::Exit((code & 0xff) as u8)),
            (None, Some(signal)) => Some(End::Signal(signal)),
            (None, None) => None, // stopped or continued, which we did not ask for
        }
    }
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            End::Exit(code) => write!(f, "exit code {code}"),
            End::Signal(signal) => write!(f, "killed by {}", signal_name(signal)),
        }
    }
}

pub(super) fn signal_name(signal: i32) -> String {
    signal_hook::low_level::signal_name(signal).map_or_else(|| format!("signal {signal}"), str::to_string)
}

/// Which rank a process is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Seat {
    /// Of the whole job.
    pub(super) number: usize,
    pub(super) local_rank: usize,
}

/// What a rank is started with.
#[derive(Debug)]
pub(super) struct Birth<'a> {
    pub(super) id: Id,
    /// None for a spare.
    pub(super) seat: Option<Seat>,
    /// Its own mark, if it has one.
    pub(super) mark: Option<Mark>,
    pub(super) program: &'a [OsString],
    pub(super) environment: Vec<(&'static str, OsString)>,
    /// Variables of the launcher that it does not get.
    pub(super) removed: Vec<&'static str>,
    /// Processors to run on; all if not given.
    pub(super) processors: Option<&'a [usize]>,
    /// Limit of open files; the launcher's own if not given.
    pub(super) files: Option<Rlimit>,
    pub(super) prefix: Option<Prefix>,
    pub(super) logs: RankLogs,
    /// Whether it gets the launcher's standard input; otherwise it has none.
    pub(super) reads_input: bool,
    /// By both clocks.
    pub(super) now: (Instant, SystemTime),
}

/// A process that is a rank, or a spare that may become one.
#[derive(Debug)]
pub(super) struct Rank {
    pub(super) id: Id,
    /// None for a spare.
    pub(super) seat: Option<Seat>,
    pub(super) mark: Option<Mark>,
    pub(super) end: Option<End>,
    /// Its end has no further consequences; its last output may still have to be shown.
    pub(super) is_forgotten: bool,
    /// It did not exit when it was asked to.
    pub(super) killed: bool,
    /// Its output.
    pub(super) pipes: Pipes,
    pub(super) started: SystemTime,
    pub(super) began: Instant,
    process: Pid,
}

impl Rank {
    /// Call this on the thread that lives as long as the launcher: the kernel kills the rank when that thread
    /// ends.
    pub(super) fn start(birth: Birth<'_>) -> io::Result<Self> {
        let mut command = Command::new(&birth.program[0]);
        command.args(&birth.program[1..]);
        for name in birth.removed {
            command.env_remove(name);
        }
        command.envs(birth.environment);
        let input = if birth.reads_input { Stdio::inherit() } else { Stdio::null() };
        command.process_group(0).stdin(input);
        command.stdout(birth.logs.output.stdio()?).stderr(birth.logs.error.stdio()?);
        tenfold_memory::spawn::die_with_parent(&mut command);
        if let Some(processors) = birth.processors {
            tenfold_memory::spawn::run_on(&mut command, processors);
        }
        if let Some(files) = birth.files {
            tenfold_memory::spawn::limit_files(&mut command, files);
        }
        let mut child = command.spawn()?;
        let (output, error) =
            (child.stdout.take().map(OwnedFd::from), child.stderr.take().map(OwnedFd::from));
        let speaker = name(birth.seat, Pid::from_child(&child));
        Ok(Rank {
            id: birth.id,
            seat: birth.seat,
            mark: birth.mark,
            end: None,
            is_forgotten: false,
            killed: false,
            pipes: Pipes::new(speaker, birth.prefix, birth.logs, output, error)?,
            started: birth.now.1,
            began: birth.now.0,
            process: Pid::from_child(&child),
        })
    }

    pub(super) fn process(&self) -> Pid {
        self.process
    }

    /// `rank 3`, or `the spare with pid 7`.
    pub(super) fn name(&self) -> String {
        name(self.seat, self.process)
    }

    pub(super) fn is_running(&self) -> bool {
        self.end.is_none()
    }

    /// Whether it has begun to exit. Its connections are closed by then; its parent is notified later.
    pub(super) fn is_ending(&self) -> bool {
        self.is_running() && Stat::read(self.process).is_some_and(Stat::is_exiting)
    }

    /// Sends a signal to its whole group.
    pub(super) fn signal(&self, signal: Signal) {
        if self.is_running() {
            let _nobody_is_left = kill_process_group(self.process, signal);
        }
    }

    /// Sends a signal to its own process only.
    pub(super) fn signal_alone(&self, signal: Signal) {
        if self.is_running() {
            let _it_has_just_ended = kill_process(self.process, signal);
        }
    }
}

pub(super) fn name(seat: Option<Seat>, process: Pid) -> String {
    seat.map_or_else(|| format!("the spare with pid {process}"), |seat| format!("rank {}", seat.number))
}

/// However the launcher ends.
impl Drop for Rank {
    fn drop(&mut self) {
        if self.is_running() {
            self.signal(Signal::KILL);
            let _reaped = waitpid(Some(self.process), WaitOptions::empty());
        }
    }
}

/// Children of this process that have exited: ranks, the guard, and what ranks left behind. Each is returned
/// once.
pub(super) fn reap() -> Vec<(Pid, End)> {
    let mut ended = Vec::new();
    loop {
        match wait(WaitOptions::NOHANG) {
            Ok(Some((process, status))) => ended.extend(End::of(status).map(|end| (process, end))),
            Err(rustix::io::Errno::INTR) => {}
            Ok(None) | Err(_) => return ended, // no child has exited, or there are no children
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_has_its_usual_name() {
        let of = |end: End| (end.to_string(), end.is_failure());
        assert_eq!(of(End::Exit(0)), ("exit code 0".into(), false));
        assert_eq!(of(End::Exit(3)), ("exit code 3".into(), true));
        assert_eq!(of(End::Signal(9)), ("killed by SIGKILL".into(), true));
        assert_eq!(of(End::Signal(40)), ("killed by signal 40".into(), true));
    }
}
