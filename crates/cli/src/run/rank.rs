//! One rank: a process, its group, and the ends of its pipes.
//!
//! A rank leads a process group of its own, so that a signal reaches the processes it started as well, and Ctrl-C in a
//! terminal reaches the launcher alone. When it ends it is not reaped before the launcher is done with it: until then the
//! kernel gives its number to nobody else, and no signal can hit a stranger.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::fmt;
use std::io::{self, Read as _};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::fs::{OFlags, fcntl_setfl};
use rustix::process::{
    Pid, Signal, WaitId, WaitIdOptions, kill_process_group, test_kill_process_group, waitid,
};

use super::environment::{Job, environment};
use super::output::{Lines, Outlet, Stream};
use crate::{Outcome, Program};

/// What is kept of a rank's words for the report of its failure.
const LAST_LINES: usize = 12;
const LAST_LINE_MAX: usize = 1000;
/// What is read from a pipe at once: what a Linux pipe holds.
const READ_MAX: usize = 64 << 10;

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

    /// As a shell tells it.
    pub(super) fn code(self) -> u8 {
        match self {
            End::Exit(code) => code,
            End::Signal(signal) => signal_code(signal),
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

pub(super) fn signal_code(signal: i32) -> u8 {
    u8::try_from(128 + signal).expect("signals are numbered from 1 to 64")
}

#[derive(Debug)]
pub(super) struct Rank {
    pub(super) number: usize,
    pub(super) end: Option<End>,
    /// It did not go when it was asked to.
    pub(super) killed: bool,
    /// What it wrote last, on either stream.
    pub(super) last_lines: VecDeque<String>,
    /// Before each line; none for a rank that is alone, whose bytes pass as they come.
    prefix: Option<String>,
    child: Child,
    pipes: Vec<Pipe>,
    reaped: bool,
}

#[derive(Debug)]
struct Pipe {
    stream: Stream,
    source: std::fs::File,
    lines: Lines,
    open: bool,
}

impl Rank {
    pub(super) fn start(number: usize, job: &Job, program: &[OsString]) -> io::Result<Self> {
        let mut command = Program::own().command();
        command.args(["run-rank", "--launcher", &std::process::id().to_string(), "--"]).args(program);
        command.envs(environment(number, job, |name| std::env::var_os(name)));
        command.process_group(0).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn()?;
        let output = child.stdout.take().map(OwnedFd::from).expect("it was asked for");
        let error = child.stderr.take().map(OwnedFd::from).expect("it was asked for");
        let prefix = (job.ranks > 1).then(|| format!("[{number}] "));
        let mut rank = Rank {
            number,
            end: None,
            killed: false,
            last_lines: VecDeque::new(),
            prefix,
            child,
            pipes: Vec::new(),
            reaped: false,
        };
        for (stream, source) in [(Stream::Output, output), (Stream::Error, error)] {
            fcntl_setfl(&source, OFlags::NONBLOCK)?;
            rank.pipes.push(Pipe { stream, source: source.into(), lines: Lines::default(), open: true });
        }
        Ok(rank)
    }

    pub(super) fn process(&self) -> u32 {
        self.child.id()
    }

    pub(super) fn is_running(&self) -> bool {
        self.end.is_none()
    }

    /// Looks whether it has ended; true the first time that it has.
    pub(super) fn poll_end(&mut self) -> io::Result<bool> {
        if self.end.is_some() {
            return Ok(false);
        }
        let how = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        let Some(status) = waitid(WaitId::Pid(Pid::from_child(&self.child)), how)? else { return Ok(false) };
        self.end = match (status.exit_status(), status.terminating_signal()) {
            (Some(code), _) => Some(End::Exit((code & 0xff) as u8)),
            (None, Some(signal)) => Some(End::Signal(signal)),
            (None, None) => None, // stopped or continued, which was not asked for
        };
        Ok(self.end.is_some())
    }

    pub(super) fn signal(&self, signal: Signal) {
        if !self.reaped {
            let _nobody_is_left = kill_process_group(Pid::from_child(&self.child), signal);
        }
    }

    /// Pipes that may say more, to wait for.
    pub(super) fn open_pipes(&self) -> impl Iterator<Item = (usize, BorrowedFd<'_>)> {
        self.pipes
            .iter()
            .enumerate()
            .filter(|(_, pipe)| pipe.open)
            .map(|(index, pipe)| (index, pipe.source.as_fd()))
    }

    /// Passes on what is in a pipe, as much as is read at once; false if there is nothing now.
    pub(super) fn read(&mut self, index: usize, outlet: &mut Outlet) -> bool {
        let mut buffer = [0; READ_MAX];
        match self.pipes[index].source.read(&mut buffer) {
            Ok(0) => self.close(index, outlet),
            Ok(count) => {
                self.pass_on(index, &buffer[..count], outlet);
                return true;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return true,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(_) => self.close(index, outlet),
        }
        false
    }

    fn pass_on(&mut self, index: usize, bytes: &[u8], outlet: &mut Outlet) {
        let Rank { prefix, pipes, last_lines, .. } = self;
        let Pipe { stream, lines, .. } = &mut pipes[index];
        match prefix {
            None => outlet.push(*stream, &[bytes]),
            Some(prefix) => lines.take(bytes, |line| show(line, *stream, prefix, last_lines, outlet)),
        }
    }

    /// Shows what has no line end: nothing will follow.
    fn close(&mut self, index: usize, outlet: &mut Outlet) {
        let Rank { prefix, pipes, last_lines, .. } = self;
        let Pipe { stream, lines, open, .. } = &mut pipes[index];
        *open = false;
        if let Some(prefix) = prefix {
            lines.finish(|line| show(line, *stream, prefix, last_lines, outlet));
        }
    }

    /// Passes on the rest of what its processes wrote; true when that was all, also if somebody still could write.
    pub(super) fn drain(&mut self, outlet: &mut Outlet) -> bool {
        for index in 0..self.pipes.len() {
            while self.pipes[index].open {
                if outlet.is_full() {
                    return false;
                }
                if !self.read(index, outlet) && self.pipes[index].open {
                    self.close(index, outlet);
                }
            }
        }
        true
    }

    fn reap(&mut self) {
        self.reaped = self.child.wait().is_ok();
    }
}

/// However the launcher comes to its end.
impl Drop for Rank {
    fn drop(&mut self) {
        if !self.reaped {
            self.signal(Signal::KILL);
            self.reap();
        }
    }
}

/// Ends what ranks left behind when they ended: asks, waits a little, kills.
#[expect(
    clippy::disallowed_methods,
    reason = "processes that are not our children give no sign when they end"
)]
pub(super) fn end_leftovers(ranks: &mut [Rank]) {
    const PATIENCE: Duration = Duration::from_secs(1);
    const NAP: Duration = Duration::from_millis(5);
    let mut groups = Vec::new();
    for rank in ranks {
        rank.signal(Signal::TERM);
        rank.reap();
        groups.push(Pid::from_child(&rank.child));
    }
    // A group that still has a member keeps its number; one that has none is forgotten at once.
    let mut naps = PATIENCE.as_millis() / NAP.as_millis();
    loop {
        groups.retain(|&group| test_kill_process_group(group).is_ok());
        if naps == 0 || !groups.iter().any(|&group| has_living_member(group)) {
            break;
        }
        naps -= 1;
        std::thread::sleep(NAP);
    }
    for group in groups {
        let _gone_meanwhile = kill_process_group(group, Signal::KILL);
    }
}

/// Whether a group has more than dead members: in a container the first process often reaps nobody.
fn has_living_member(group: Pid) -> bool {
    let Ok(processes) = std::fs::read_dir("/proc") else { return true };
    let stats =
        processes.flatten().filter_map(|entry| std::fs::read_to_string(entry.path().join("stat")).ok());
    stats.into_iter().any(|stat| is_living_member(&stat, group.as_raw_nonzero().get()))
}

fn is_living_member(stat: &str, group: i32) -> bool {
    let Some((_, fields)) = stat.rsplit_once(") ") else { return false }; // the name before it may hold anything
    let mut fields = fields.split(' ');
    let (state, _parent, own) = (fields.next(), fields.next(), fields.next());
    !matches!(state, Some("Z" | "X")) && own.and_then(|own| own.parse().ok()) == Some(group)
}

fn show(line: &[u8], stream: Stream, prefix: &str, last_lines: &mut VecDeque<String>, outlet: &mut Outlet) {
    outlet.push(stream, &[prefix.as_bytes(), line, b"\n"]);
    if last_lines.len() == LAST_LINES {
        last_lines.pop_front();
    }
    let kept = &line[..line.len().min(LAST_LINE_MAX)];
    last_lines.push_back(String::from_utf8_lossy(kept).into_owned());
}

/// What a rank's process is at first, before it becomes the program.
#[derive(Debug, clap::Args)]
pub(crate) struct RankArgs {
    #[arg(long)]
    launcher: i32,
    #[arg(required = true, last = true)]
    program: Vec<OsString>,
}

/// Asks the kernel to kill this process when its launcher dies, then becomes the program.
///
/// The kernel means the thread that started this process, not its process: the launcher starts ranks on the thread that
/// watches over them to the end. The wish survives `exec`, and is not inherited by processes that the program starts.
pub(crate) fn become_program(args: &RankArgs) -> Outcome {
    #[cfg(target_os = "linux")]
    {
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
        // Who died before that was not noticed.
        if rustix::process::getppid().map(Pid::as_raw_nonzero).map(i32::from) != Some(args.launcher) {
            return Err(format!("the launcher, process {}, is gone", args.launcher).into());
        }
    }
    let error = Command::new(&args.program[0]).args(&args.program[1..]).exec();
    eprintln!("error: cannot run `{}`: {error}", args.program[0].display());
    Ok(if error.kind() == io::ErrorKind::NotFound { super::NOT_FOUND } else { super::NOT_RUNNABLE })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_reads_as_people_know_it_and_codes_as_shells_do() {
        let of = |end: End| (end.to_string(), end.code(), end.is_failure());
        assert_eq!(of(End::Exit(0)), ("exit code 0".into(), 0, false));
        assert_eq!(of(End::Exit(3)), ("exit code 3".into(), 3, true));
        assert_eq!(of(End::Signal(9)), ("killed by SIGKILL".into(), 137, true));
        assert_eq!(of(End::Signal(40)), ("killed by signal 40".into(), 168, true));
    }

    #[test]
    fn the_dead_do_not_count_as_members_of_a_group() {
        assert!(is_living_member("12 (a ) b) S 1 7 7 0 -1", 7));
        assert!(!is_living_member("12 (a ) b) S 1 8 7 0 -1", 7));
        assert!(!is_living_member("12 (sh) Z 1 7 7 0 -1", 7));
        assert!(!is_living_member("", 7));
    }
}
