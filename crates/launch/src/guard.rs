//! The guard: a process that ends what is left of a run whose launcher was killed.
//!
//! It waits for the launcher's end, which it sees by a pipe that only the launcher holds open. Then it kills every process
//! that belongs to the run (see [`super::leftovers`]) and removes the run's temporary folders. Through the same pipe it
//! learns the ranks and their pipes. It has its own session and none of the launcher's files. A launcher that exits
//! normally has ended all processes itself, and kills the guard.
//!
//! If a job has other nodes, its ranks run on a lease: each time the store answers a heartbeat, the launcher
//! sends the guard the time until which they may run. A launcher that is frozen or cut off from the store
//! cannot. Then the guard ends the ranks before the other nodes declare this one dead and start the next
//! round without it, so two rounds of a job never run at the same time.

#![expect(clippy::disallowed_methods, reason = "a lease is a time of a clock that all processes share")]

use std::io::{self, BufRead as _, PipeWriter, Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::Pid;

use tenfold_console::{Outcome, Program, SUCCESS};

use super::leftovers::{Leader, Orphans, end_all};
use super::mark::Mark;
use super::proc::{Stat, parse_pid};

/// A guard that is killed is started again, this often.
const STARTS_MAX: u32 = 20;

/// What the launcher sends its guard, one line each: a round begins, which ends what was sent before; a
/// rank's process, its start and the numbers of its pipes; a rank has exited; until when ranks may run.
const ROUND: &str = "round";
const RANK: &str = "rank";
const ENDED: &str = "ended";
/// Until when ranks may run, as [`BootTime`].
const LEASE: &str = "lease ";
/// A longer line was not written by the launcher.
const LINE_MAX: u64 = 1 << 10;

/// The launcher's side of its guard.
#[derive(Debug)]
pub(super) struct Guard {
    mark: Mark,
    child: Child,
    /// Closed when the launcher ends, for whatever reason. The launcher never blocks on it.
    lifeline: PipeWriter,
    /// What did not fit into the pipe yet.
    untold: Vec<u8>,
    /// What was sent since the round began, for the next guard.
    told: String,
    starts: u32,
}

impl Guard {
    /// Starts the guard without waiting for it to read.
    pub(super) fn start(mark: &Mark) -> io::Result<Guard> {
        Guard::start_again(mark, String::new(), 1)
    }

    fn start_again(mark: &Mark, told: String, starts: u32) -> io::Result<Guard> {
        let (reader, lifeline) = io::pipe()?;
        rustix::io::ioctl_fionbio(&lifeline, true)?;
        // Written before the guard starts: if the launcher is killed right after, the guard still knows its run.
        let mut untold = format!("{}\n{told}", mark.as_str()).into_bytes();
        write_what_fits(&lifeline, &mut untold);
        let mut command = Program::own().command();
        command.arg("run-guard").stdin(reader).stdout(Stdio::null()).stderr(Stdio::null());
        tenfold_memory::spawn::lead_session(&mut command);
        let child = command.spawn()?;
        Ok(Guard { mark: mark.clone(), child, lifeline, untold, told, starts })
    }

    pub(super) fn process(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// All ranks of the previous round have exited, with all processes that they left behind.
    pub(super) fn begin_round(&mut self) {
        self.told.clear();
        self.tell(ROUND);
    }

    /// A rank was started, and given these pipes.
    pub(super) fn watch(&mut self, rank: Pid, pipes: impl Iterator<Item = u64>) {
        let Some(stat) = Stat::read(rank) else { return }; // its group cannot be determined
        let pipes: String = pipes.map(|pipe| format!(" {pipe}")).collect();
        self.tell(&format!("{RANK} {rank} {}{pipes}", stat.started));
    }

    /// A rank has exited, and its number may be reused by another process.
    pub(super) fn forget(&mut self, rank: Pid) {
        self.tell(&format!("{ENDED} {rank}"));
    }

    /// Ranks may run until then; longer if this is called again before. Only the last line counts, so a
    /// replacement guard gets it with the next one.
    pub(super) fn hold(&mut self, until: Instant) {
        const UNTOLD_MAX: usize = 4 << 10; // a guard that does not read gets no more of them
        if self.untold.len() < UNTOLD_MAX {
            self.untold.extend(format!("{LEASE}{}\n", BootTime::at(until).0).bytes());
        }
        self.catch_up();
    }

    /// Ranks may run as long as the launcher lets them: the job is over, and they have their usual time to
    /// exit.
    pub(super) fn release(&mut self) {
        self.untold.extend(format!("{LEASE}\n").bytes());
        self.catch_up();
    }

    fn tell(&mut self, line: &str) {
        let line = format!("{line}\n");
        self.told += &line;
        self.untold.extend(line.bytes());
        self.catch_up();
    }

    /// Writes as much as fits: a stopped guard must not block the launcher.
    pub(super) fn catch_up(&mut self) {
        write_what_fits(&self.lifeline, &mut self.untold);
    }

    /// Called when the guard has exited, which it does not do by itself.
    pub(super) fn replace(&mut self) -> io::Result<()> {
        if self.starts >= STARTS_MAX {
            return Err(io::Error::other(format!("it ended {STARTS_MAX} times")));
        }
        *self = Guard::start_again(&self.mark, std::mem::take(&mut self.told), self.starts + 1)?;
        Ok(())
    }

    /// Called when no process is left to guard.
    pub(super) fn end(&mut self) {
        let _ended_already = self.child.kill();
        let _reaped_already = self.child.wait();
    }
}

/// Writes to a pipe that does not block, and removes what was written from `bytes`. The rest stays if the
/// pipe is full, or if the guard has exited: the next guard gets everything.
fn write_what_fits(mut pipe: &PipeWriter, bytes: &mut Vec<u8>) {
    while !bytes.is_empty() {
        match pipe.write(bytes) {
            Ok(count) => drop(bytes.drain(..count)),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return,
        }
    }
}

/// What the launcher has sent to the guard.
#[derive(Debug)]
struct Known {
    orphans: Orphans,
    /// Until when ranks may run, if that is limited.
    lease: Option<BootTime>,
}

impl Known {
    /// Takes one line from the launcher; lines that are not understood are ignored.
    fn learn(&mut self, line: &str) {
        if let Some(until) = line.strip_prefix(LEASE) {
            self.lease = until.trim().parse().ok().map(BootTime);
            return;
        }
        let Orphans { leaders, pipes, .. } = &mut self.orphans;
        let mut words = line.split_whitespace();
        match (words.next(), words.next().and_then(parse_pid)) {
            (Some(ROUND), None) => {
                leaders.clear();
                pipes.clear();
            }
            (Some(RANK), Some(process)) => {
                if let Some(started) = words.next().and_then(|started| started.parse().ok()) {
                    leaders.push(Leader { process, started });
                }
                pipes.extend(words.filter_map(|pipe| pipe.parse::<u64>().ok()));
            }
            (Some(ENDED), Some(process)) => leaders.retain(|leader| leader.process != process),
            _ => {}
        }
    }
}

/// Milliseconds of the clock that all processes of a machine share, and that continues while the machine
/// sleeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct BootTime(u64);

impl BootTime {
    fn now() -> BootTime {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
        BootTime(now.tv_sec.cast_unsigned() * 1000 + now.tv_nsec.cast_unsigned() / 1_000_000)
    }

    /// Converts a time of this process's clock.
    fn at(then: Instant) -> BootTime {
        let left = then.saturating_duration_since(Instant::now()).as_millis();
        BootTime(BootTime::now().0.saturating_add(u64::try_from(left).unwrap_or(u64::MAX)))
    }

    fn left(self) -> Duration {
        Duration::from_millis(self.0.saturating_sub(BootTime::now().0))
    }
}

/// The hidden command `tenfold run-guard`: listens to the launcher until the pipe closes, and kills what is left of the run.
pub fn stand_guard() -> Outcome {
    let signals = (1..=31).filter(|signal| !signal_hook::consts::FORBIDDEN.contains(signal));
    for signal in signals {
        // Handled without effect rather than ignored: SIGHUP, SIGTERM and the like are meant for the
        // launcher.
        let _not_for_us = signal_hook::flag::register(signal, Arc::new(AtomicBool::new(false)));
    }
    let _stays_here = rustix::process::chdir("/"); // a folder can be removed, a disk unmounted
    let launcher = rustix::process::getppid();
    let mut input = io::BufReader::new(io::stdin().as_fd().try_clone_to_owned().map(std::fs::File::from)?);
    let mark = next_line(&mut input)?.as_deref().and_then(Mark::parse);
    let mark = mark.ok_or("run-guard is started by `tenfold run` only")?;
    let mut known = Known { orphans: Orphans { launcher, ..Orphans::new(mark.clone()) }, lease: None };
    loop {
        if input.buffer().is_empty() && !is_readable(input.get_ref(), known.lease.map(BootTime::left)) {
            if known.lease.is_some_and(|lease| lease.left().is_zero()) {
                known.lease = None;
                end_all(|| known.orphans.find(), Duration::ZERO);
            }
            continue;
        }
        let Some(line) = next_line(&mut input)? else { break };
        known.learn(&line);
    }
    known.orphans.launcher = None; // it has exited
    end_all(|| known.orphans.find(), Duration::ZERO);
    remove_folders(&std::env::temp_dir(), &mark);
    Ok(SUCCESS)
}

/// Waits until there is something to read, or the end, at most this long.
fn is_readable(file: &std::fs::File, limit: Option<Duration>) -> bool {
    let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
    matches!(poll(&mut [PollFd::new(file, PollFlags::IN)], limit.as_ref()), Ok(count) if count > 0)
}

/// None at the end of the stream, which means that the launcher has ended. An unfinished last line is empty.
fn next_line(input: &mut impl io::BufRead) -> io::Result<Option<String>> {
    let mut line = Vec::new();
    if input.take(LINE_MAX).read_until(b'\n', &mut line)? == 0 {
        return Ok(None);
    }
    let whole = line.strip_suffix(b"\n").unwrap_or_default();
    Ok(Some(String::from_utf8_lossy(whole).into_owned()))
}

/// What the launcher would have removed.
fn remove_folders(temporary: &Path, mark: &Mark) {
    let beginning = mark.folders();
    for entry in std::fs::read_dir(temporary).into_iter().flatten().flatten() {
        if entry.file_name().as_encoded_bytes().starts_with(beginning.as_bytes()) {
            let _it_was_worth_a_try = std::fs::remove_dir_all(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn only_the_runs_own_folders_are_removed() {
        let temporary = tempfile::tempdir().unwrap();
        let (own, other) = (Mark::new().unwrap(), Mark::new().unwrap());
        let make = |mark: &Mark| {
            let path = temporary.path().join(format!("{}x", mark.folders()));
            std::fs::create_dir_all(path.join("a/b")).unwrap();
            path
        };
        let (gone, kept) = (make(&own), make(&other));
        remove_folders(temporary.path(), &own);
        assert!(!gone.exists() && kept.exists());
        remove_folders(&kept.join("nowhere"), &own);
    }

    #[test]
    fn the_guard_looks_for_what_the_launcher_sent() {
        let known = |text: &str| {
            let orphans = Orphans::new(Mark::new().unwrap());
            let (mut input, mut known) = (text.as_bytes(), Known { orphans, lease: None });
            while let Some(line) = next_line(&mut input).unwrap() {
                known.learn(&line);
            }
            known
        };
        let leader = |process: &str, started| Leader { process: parse_pid(process).unwrap(), started };
        let told = known("rank 7 100 41 42\nrank 8 101\nended 7\nnonsense\nrank x y\nrank 9 10").orphans;
        assert_eq!(told.leaders, [leader("8", 101)]);
        assert_eq!(told.pipes, HashSet::from([41, 42]));
        let told = known("rank 7 100 41\nround\nrank 9 102 43\n").orphans;
        assert_eq!((told.leaders, told.pipes), (vec![leader("9", 102)], HashSet::from([43])));
        assert_eq!(known("lease 5\nrank 7 1 2\nround\nlease 70\nlease").lease, Some(BootTime(70)));
        assert_eq!(known("lease 5\nlease \n").lease, None);
    }

    #[test]
    fn a_time_is_the_same_for_all_processes() {
        let soon = BootTime::at(Instant::now() + Duration::from_secs(100));
        assert!(soon > BootTime::now() && soon.left() <= Duration::from_secs(100));
        assert!(soon.left() > Duration::from_secs(50));
        assert_eq!(BootTime(1).left(), Duration::ZERO);
    }
}
