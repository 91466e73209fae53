//! One rank: a process and its group. What it says comes through `pipes`.
//!
//! A rank leads a process group of its own, so that a signal reaches the processes it started as well, and Ctrl-C in a
//! terminal reaches the launcher alone. When it ends it is not reaped before the launcher is done with it: until then the
//! kernel gives its number to nobody else, and no signal can hit a stranger.

use std::ffi::OsString;
use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::process::{
    Pid, Signal, WaitId, WaitIdOptions, kill_process_group, test_kill_process_group, waitid,
};

use super::environment::{Job, environment};
use super::logs::RankLogs;
use super::output::Prefix;
use super::pipes::Pipes;
use crate::{Outcome, Program};

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
    /// What it says.
    pub(super) pipes: Pipes,
    child: Child,
    reaped: bool,
}

impl Rank {
    pub(super) fn start(
        number: usize,
        job: &Job,
        program: &[OsString],
        logs: RankLogs,
        prefix: Option<Prefix>,
    ) -> io::Result<Self> {
        let mut command = Program::own().command();
        command.args(["run-rank", "--launcher", &std::process::id().to_string(), "--"]).args(program);
        command.envs(environment(number, job, |name| std::env::var_os(name)));
        command.envs(logs.traces.error_file.iter().map(|path| ("TORCHELASTIC_ERROR_FILE", path)));
        command
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(logs.output.stdio()?)
            .stderr(logs.error.stdio()?);
        let mut child = command.spawn()?;
        let (output, error) =
            (child.stdout.take().map(OwnedFd::from), child.stderr.take().map(OwnedFd::from));
        let pipes = Pipes::new(number, prefix, logs, output, error)?;
        Ok(Rank { number, end: None, killed: false, pipes, child, reaped: false })
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
