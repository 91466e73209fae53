//! Nobody is left behind: not when a run ends, and not when its launcher is killed.
//!
//! Whatever a rank starts is found in two ways. While the launcher lives it is its descendants' foster parent: a process
//! that loses its own parent becomes the launcher's child, so the tree below the launcher holds everybody. When the
//! launcher is gone the tree is gone with it, but what a process inherits by default still tells whose it is: a mark in its
//! environment, a rank's process group, and the pipes that a rank writes to. Who has any of them belongs to the run.
//!
//! The guard is a process that does nothing but wait for the launcher's end, which it sees by a pipe that only the
//! launcher holds open, and then kills everybody who belongs to the run and removes its temporary folders. Through the same pipe it is
//! told the ranks and their pipes. It has a session of its own and none of the launcher's
//! files. A launcher that ends in order has ended everybody itself, and kills the guard.
//!
//! Where a job has other nodes, ranks run on a lease: the launcher tells the guard until when, each time that the store has
//! answered a beat. A launcher that is frozen, or cut off from the store, cannot: then the guard ends the ranks before the
//! other nodes take this one for dead and start the next round without it. So no two rounds of a job run at once.
//!
//! No stranger is hit: a process is opened by its number, then looked at again; from there on the handle means it alone. A pipe's number
//! is its own as long as somebody holds the pipe, and the launcher holds those of its ranks. A group has the number of a rank, which the
//! kernel gives to nobody else while anybody is in the group. When a rank has ended the guard is told, and from then on leaves its group
//! to marks and pipes; so a rank that counts ended with the launcher at the earliest, and a group of strangers with its number has a
//! leader that was born since: see [`Leader::leads`].
//!
//! Who survives a launcher that is killed: a process that has left its group, emptied its environment *and* closed the rank's pipes; with
//! `--redirects` there are no pipes to close. A launcher that lives finds such processes, too.

#![expect(clippy::disallowed_methods, reason = "leftovers have some time to end")]

use std::collections::HashSet;
use std::io::{self, BufRead as _, PipeWriter, Read as _, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, getpid, pidfd_open, pidfd_send_signal, set_child_subreaper};

use tenfold_console::{Outcome, Program, SUCCESS};

/// The variable that holds the marks of all runs that a process belongs to, the outermost first.
pub(super) const VARIABLE: &str = "TENFOLD_RUN_MARK";

/// From asking leftovers to end to killing them.
const PATIENCE: Duration = Duration::from_secs(1);
/// How long to go on killing: a process that hangs in the kernel does not go, whatever one does.
const KILLING_MAX: Duration = Duration::from_secs(10);
/// A guard that is killed is started again, this often.
const STARTS_MAX: u32 = 20;

/// What tells the processes of one run from all others: 128 random bits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mark(String);

impl Mark {
    pub(super) fn new() -> io::Result<Mark> {
        let mut bits = [0; 16];
        std::fs::File::open("/dev/urandom")?.read_exact(&mut bits)?;
        Ok(Mark(bits.iter().map(|byte| format!("{byte:02x}")).collect()))
    }

    /// The variable's value for ranks: who runs within a rank of another run belongs to that one too.
    pub(super) fn variable(&self) -> String {
        match std::env::var(VARIABLE) {
            Ok(outer) if !outer.is_empty() => format!("{outer},{}", self.0),
            _ => self.0.clone(),
        }
    }

    /// How the names of temporary folders begin that go with the run.
    pub(super) fn folders(&self) -> String {
        format!("tenfold-run-{}-", &self.0[..16])
    }

    /// The first digits, for names that must differ.
    pub(super) fn short(&self) -> &str {
        &self.0[..8]
    }

    fn is_on(&self, process: Pid) -> bool {
        std::fs::read(format!("/proc/{process}/environ")).is_ok_and(|text| self.is_in(&text))
    }

    fn is_in(&self, environment: &[u8]) -> bool {
        let variables = environment.split(|&byte| byte == 0);
        let beginning = VARIABLE.as_bytes();
        let mut values = variables
            .filter_map(|variable| variable.strip_prefix(beginning).and_then(|rest| rest.strip_prefix(b"=")));
        values.any(|value| value.split(|&byte| byte == b',').any(|mark| mark == self.0.as_bytes()))
    }
}

/// Makes this process the foster parent of all its descendants, so that [`Finder::Tree`] finds them. False where that
/// cannot be had, or where it already has children: those are not ours to end.
pub(super) fn become_foster_parent() -> bool {
    let own = getpid();
    let is_told = std::path::Path::new(&format!("/proc/{own}/task/{own}/children")).exists();
    is_told && children(own).is_empty() && set_child_subreaper(Some(own)).is_ok()
}

/// A process as it was when it was found; its start tells it from a later one with the same number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Found {
    process: Pid,
    started: u64,
}

/// Who belongs to a run, found anew each time.
#[derive(Debug)]
pub(super) enum Finder {
    /// The tree below this process, without one child and what is below it.
    Tree { without: Option<Pid> },
    /// All that have the mark.
    Marked(Mark),
    /// All that have anything of a run whose launcher is gone.
    Orphans(Orphans),
}

impl Finder {
    fn find(&self) -> Vec<Found> {
        let processes = match self {
            Finder::Tree { without } => tree(getpid(), *without),
            Finder::Marked(mark) => all_but_us().filter(|&process| mark.is_on(process)).collect(),
            Finder::Orphans(orphans) => orphans.find(),
        };
        let found = processes.into_iter().filter_map(|process| {
            let stat = Stat::read(process)?;
            stat.is_alive().then_some(Found { process, started: stat.started })
        });
        found.collect()
    }
}

/// Everybody below a process, as far as the kernel tells.
fn tree(root: Pid, without: Option<Pid>) -> Vec<Pid> {
    let (mut all, mut next) = (Vec::new(), vec![root]);
    let mut seen: HashSet<Pid> = without.into_iter().chain([root]).collect(); // it changes while we look
    while let Some(process) = next.pop() {
        for child in children(process) {
            if seen.insert(child) {
                all.push(child);
                next.push(child);
            }
        }
    }
    all
}

fn children(process: Pid) -> Vec<Pid> {
    let Ok(threads) = std::fs::read_dir(format!("/proc/{process}/task")) else { return Vec::new() };
    let lists =
        threads.flatten().filter_map(|thread| std::fs::read_to_string(thread.path().join("children")).ok());
    lists.flat_map(|list| list.split_whitespace().filter_map(parse_pid).collect::<Vec<_>>()).collect()
}

/// Everybody whom the kernel shows us, except ourselves.
fn all_but_us() -> impl Iterator<Item = Pid> {
    let own = getpid();
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| parse_pid(entry.file_name().to_str()?)).filter(move |&process| process != own)
}

/// What the guard knows of a run.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Orphans {
    mark: Mark,
    /// Ranks that had not ended.
    leaders: Vec<Leader>,
    /// The numbers of the pipes that ranks were given, also of those that have ended.
    pipes: HashSet<u64>,
    /// Until when ranks may run, if that is limited.
    lease: Option<BootTime>,
    /// The launcher, which holds pipes of ranks and is none of those to be ended.
    launcher: Option<Pid>,
}

/// A rank, which leads the process group of its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Leader {
    process: Pid,
    started: u64,
}

impl Leader {
    /// Is a group of this number the rank's? A stranger who leads it now has another start. One who had led it and is gone would have
    /// been born, have started somebody and have ended since the launcher did, just when all other numbers were used up.
    fn leads(self, now: Option<Stat>) -> bool {
        now.is_none_or(|stat| stat.started == self.started)
    }
}

impl Orphans {
    fn new(mark: Mark) -> Self {
        Orphans { mark, leaders: Vec::new(), pipes: HashSet::new(), lease: None, launcher: None }
    }

    /// A line from the launcher; what is not understood is not known.
    fn learn(&mut self, line: &str) {
        if let Some(until) = line.strip_prefix(LEASE) {
            self.lease = until.trim().parse().ok().map(BootTime);
            return;
        }
        let mut words = line.split_whitespace();
        match (words.next(), words.next().and_then(parse_pid)) {
            (Some(ROUND), None) => {
                self.leaders.clear();
                self.pipes.clear();
            }
            (Some(RANK), Some(process)) => {
                if let Some(started) = words.next().and_then(|started| started.parse().ok()) {
                    self.leaders.push(Leader { process, started });
                }
                self.pipes.extend(words.filter_map(|pipe| pipe.parse::<u64>().ok()));
            }
            (Some(ENDED), Some(process)) => self.leaders.retain(|leader| leader.process != process),
            _ => {}
        }
    }

    fn find(&self) -> Vec<Pid> {
        let leaders = self.leaders.iter().filter(|leader| leader.leads(Stat::read(leader.process)));
        let groups: HashSet<i32> = leaders.map(|leader| leader.process.as_raw_pid()).collect();
        let is_ours = |&process: &Pid| {
            Stat::read(process).is_some_and(|stat| groups.contains(&stat.group))
                || self.mark.is_on(process)
                || holds_any(process, &self.pipes)
        };
        all_but_us().filter(|&process| Some(process) != self.launcher).filter(is_ours).collect()
    }
}

/// Milliseconds of the clock that all processes of a machine share, and that goes on while the machine sleeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct BootTime(u64);

impl BootTime {
    fn now() -> BootTime {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
        BootTime(now.tv_sec.cast_unsigned() * 1000 + now.tv_nsec.cast_unsigned() / 1_000_000)
    }

    /// The time that will be then.
    fn at(then: Instant) -> BootTime {
        let left = then.saturating_duration_since(Instant::now()).as_millis();
        BootTime(BootTime::now().0.saturating_add(u64::try_from(left).unwrap_or(u64::MAX)))
    }

    fn left(self) -> Duration {
        Duration::from_millis(self.0.saturating_sub(BootTime::now().0))
    }
}

/// Has it one of these pipes open? Not known of processes of other users.
fn holds_any(process: Pid, pipes: &HashSet<u64>) -> bool {
    let files = std::fs::read_dir(format!("/proc/{process}/fd")).into_iter().flatten().flatten();
    let mut links = files.filter_map(|file| std::fs::read_link(file.path()).ok());
    !pipes.is_empty() && links.any(|link| pipe_number(&link).is_some_and(|pipe| pipes.contains(&pipe)))
}

/// From `pipe:[4711]`.
fn pipe_number(link: &Path) -> Option<u64> {
    link.to_str()?.strip_prefix("pipe:[")?.strip_suffix(']')?.parse().ok()
}

fn parse_pid(text: &str) -> Option<Pid> {
    text.parse().ok().and_then(Pid::from_raw)
}

/// What is needed of `/proc/PID/stat`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stat {
    state: u8,
    group: i32,
    started: u64,
}

impl Stat {
    fn read(process: Pid) -> Option<Stat> {
        Stat::parse(&std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?)
    }

    fn parse(text: &str) -> Option<Stat> {
        let (_, fields) = text.rsplit_once(") ")?; // the name before it may hold anything
        let mut fields = fields.split(' ');
        let state = *fields.next()?.as_bytes().first()?;
        const GROUP: usize = 5 - 4; // fields that lie between
        let group = fields.nth(GROUP)?.parse().ok()?;
        const STARTED: usize = 22 - 6;
        Some(Stat { state, group, started: fields.nth(STARTED)?.trim_end().parse().ok()? })
    }

    /// In a container the first process often reaps nobody: the dead stay.
    fn is_alive(self) -> bool {
        !matches!(self.state, b'Z' | b'X')
    }
}

/// A handle on the process that was found, if it is still that one.
fn open(found: Found) -> Option<OwnedFd> {
    let handle = pidfd_open(found.process, PidfdFlags::empty()).ok()?;
    let is_same =
        Stat::read(found.process).is_some_and(|stat| stat.started == found.started && stat.is_alive());
    is_same.then_some(handle)
}

/// Ends everybody whom `finder` finds: asks, waits a little, kills; until nobody is found. How many were still there when
/// it gave up.
pub(super) fn end_all(finder: &Finder, patience: Duration) -> usize {
    let start = Instant::now();
    let (kill_at, give_up_at) = (start + patience, start + patience + KILLING_MAX);
    let mut asked: HashSet<Found> = HashSet::new();
    loop {
        let found = finder.find();
        let now = Instant::now();
        if found.is_empty() || now >= give_up_at {
            return found.len();
        }
        let handles: Vec<OwnedFd> = found
            .iter()
            .filter_map(|&found| {
                let handle = open(found)?;
                if now >= kill_at {
                    let _gone_meanwhile = pidfd_send_signal(&handle, Signal::KILL);
                } else if asked.insert(found) {
                    let _gone_meanwhile = pidfd_send_signal(&handle, Signal::TERM);
                }
                Some(handle)
            })
            .collect();
        // Who started more children before it was killed is not the last to go: look again soon.
        let until = if now >= kill_at { now + Duration::from_millis(100) } else { kill_at };
        wait_for_any(&handles, until.saturating_duration_since(now));
    }
}

/// Asks leftovers to end and gives them some time.
pub(super) fn end_leftovers(finder: &Finder) -> usize {
    end_all(finder, PATIENCE)
}

fn wait_for_any(handles: &[OwnedFd], limit: Duration) {
    let mut watched: Vec<PollFd<'_>> =
        handles.iter().map(|handle| PollFd::new(handle, PollFlags::IN)).collect();
    let limit = Timespec::try_from(limit).ok();
    let _interrupted = poll(&mut watched, limit.as_ref()); // the caller looks again anyway
}

/// What the launcher tells its guard, a line each: that a round begins, and what was told before is over; a rank's process, its start and
/// the numbers of its pipes; that it has ended; until when ranks may run.
const ROUND: &str = "round";
const RANK: &str = "rank";
const ENDED: &str = "ended";
/// Until when ranks may run, as [`BootTime`].
const LEASE: &str = "lease ";
/// A line that is longer is none of the launcher's.
const LINE_MAX: u64 = 1 << 10;

/// The launcher's hold on its guard.
#[derive(Debug)]
pub(super) struct Guard {
    mark: Mark,
    child: Child,
    /// Closed by the launcher's end, however it comes. Never waited for.
    lifeline: PipeWriter,
    /// Of what it is to be told, what did not fit into the pipe yet.
    untold: Vec<u8>,
    /// What it was told since the round began, for the next one.
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
        let mut untold = format!("{}\n{told}", mark.0).into_bytes();
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

    /// All ranks of the round before have ended, with what they left behind.
    pub(super) fn begin_round(&mut self) {
        self.told.clear();
        self.tell(ROUND);
    }

    /// A rank was started, and given these pipes.
    pub(super) fn watch(&mut self, rank: Pid, pipes: impl Iterator<Item = u64>) {
        let Some(stat) = Stat::read(rank) else { return }; // nothing can be known of its group
        let pipes: String = pipes.map(|pipe| format!(" {pipe}")).collect();
        self.tell(&format!("{RANK} {rank} {}{pipes}", stat.started));
    }

    /// A rank has ended, and its number may be given to a stranger.
    pub(super) fn forget(&mut self, rank: Pid) {
        self.tell(&format!("{ENDED} {rank}"));
    }

    /// Ranks may run until then; longer if this is called again before. The last line counts, so a guard that takes the place
    /// of this one is told with the next.
    pub(super) fn hold(&mut self, until: Instant) {
        const UNTOLD_MAX: usize = 4 << 10; // a guard that does not read needs no more of them
        if self.untold.len() < UNTOLD_MAX {
            self.untold.extend(format!("{LEASE}{}\n", BootTime::at(until).0).bytes());
        }
        self.catch_up();
    }

    /// Ranks may run as long as the launcher lets them: the job is over, and they have the time that they have to end.
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

    /// Tells what there is room for: a guard that somebody stopped must not stop the launcher.
    pub(super) fn catch_up(&mut self) {
        write_what_fits(&self.lifeline, &mut self.untold);
    }

    /// Called when it has ended, which it does not do by itself.
    pub(super) fn replace(&mut self) -> io::Result<()> {
        if self.starts >= STARTS_MAX {
            return Err(io::Error::other(format!("it ended {STARTS_MAX} times")));
        }
        *self = Guard::start_again(&self.mark, std::mem::take(&mut self.told), self.starts + 1)?;
        Ok(())
    }

    /// When there is nobody left to guard against.
    pub(super) fn end(&mut self) {
        let _ended_already = self.child.kill();
        let _reaped_already = self.child.wait();
    }
}

/// Writes to a pipe that does not block, and removes what was written from `bytes`. The rest stays if the pipe is full, or if
/// the guard has exited: the next guard is told everything.
fn write_what_fits(mut pipe: &PipeWriter, bytes: &mut Vec<u8>) {
    while !bytes.is_empty() {
        match pipe.write(bytes) {
            Ok(count) => drop(bytes.drain(..count)),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return,
        }
    }
}

/// The hidden command `tenfold run-guard`: listens to the launcher until the pipe ends, and kills who is left of the run.
pub fn stand_guard() -> Outcome {
    let signals = (1..=31).filter(|signal| !signal_hook::consts::FORBIDDEN.contains(signal));
    for signal in signals {
        // Not ignored but of no effect, and SIGHUP, SIGTERM and the like are meant for the launcher.
        let _not_for_us = signal_hook::flag::register(signal, Arc::new(AtomicBool::new(false)));
    }
    let _stays_here = rustix::process::chdir("/"); // a folder can be removed, a disk unmounted
    let launcher = rustix::process::getppid();
    let mut input = io::BufReader::new(io::stdin().as_fd().try_clone_to_owned().map(std::fs::File::from)?);
    let mark = next_line(&mut input)?.filter(|mark| is_mark(mark));
    let mark = Mark(mark.ok_or("run-guard is started by `tenfold run`, and by nobody else")?);
    let mut orphans = Orphans { launcher, ..Orphans::new(mark.clone()) };
    loop {
        if input.buffer().is_empty() && !is_readable(input.get_ref(), orphans.lease.map(BootTime::left)) {
            if orphans.lease.is_some_and(|lease| lease.left().is_zero()) {
                orphans.lease = None;
                let finder = Finder::Orphans(orphans);
                end_all(&finder, Duration::ZERO);
                let Finder::Orphans(same) = finder else { unreachable!("it was just made") };
                orphans = same;
            }
            continue;
        }
        let Some(line) = next_line(&mut input)? else { break };
        orphans.learn(&line);
    }
    orphans.launcher = None; // it has ended
    end_all(&Finder::Orphans(orphans), Duration::ZERO);
    remove_folders(&std::env::temp_dir(), &mark);
    Ok(SUCCESS)
}

/// Waits until there is something to read, or the end, at most this long.
fn is_readable(file: &std::fs::File, limit: Option<Duration>) -> bool {
    let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
    matches!(poll(&mut [PollFd::new(file, PollFlags::IN)], limit.as_ref()), Ok(count) if count > 0)
}

fn is_mark(text: &str) -> bool {
    text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// None at the end, which is the launcher's. A line that it did not live to finish is empty.
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

    #[test]
    fn a_mark_is_found_alone_and_among_others_and_nowhere_else() {
        let mark = Mark("00ff".into());
        assert!(mark.is_in(b"A=1\0TENFOLD_RUN_MARK=00ff\0"));
        assert!(mark.is_in(b"TENFOLD_RUN_MARK=aa,00ff,bb\0B=2"));
        for other in [
            &b"TENFOLD_RUN_MARK=00ff0"[..],
            b"TENFOLD_RUN_MARKS=00ff",
            b"X=TENFOLD_RUN_MARK=00ff",
            b"",
            b"\0\0",
        ] {
            assert!(!mark.is_in(other), "{}", other.escape_ascii());
        }
    }

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
    fn what_the_guard_is_told_is_what_it_looks_for() {
        let orphans = |text: &str| {
            let (mut input, mut orphans) = (text.as_bytes(), Orphans::new(Mark("00ff".into())));
            while let Some(line) = next_line(&mut input).unwrap() {
                orphans.learn(&line);
            }
            orphans
        };
        let leader = |process: &str, started| Leader { process: parse_pid(process).unwrap(), started };
        let told = orphans("rank 7 100 41 42\nrank 8 101\nended 7\nnonsense\nrank x y\nrank 9 10");
        assert_eq!(told.leaders, [leader("8", 101)]);
        assert_eq!(told.pipes, HashSet::from([41, 42]));
        let told = orphans("rank 7 100 41\nround\nrank 9 102 43\n");
        assert_eq!((told.leaders, told.pipes), (vec![leader("9", 102)], HashSet::from([43])));
        assert_eq!(orphans("lease 5\nrank 7 1 2\nround\nlease 70\nlease").lease, Some(BootTime(70)));
        assert_eq!(orphans("lease 5\nlease \n").lease, None);
    }

    #[test]
    fn a_group_with_a_stranger_as_its_leader_is_left_alone() {
        let leader = Leader { process: getpid(), started: 5 };
        let now = |started| Some(Stat { state: b'S', group: 1, started });
        assert!(leader.leads(now(5)) && leader.leads(None) && !leader.leads(now(6)));
    }

    #[test]
    fn who_holds_a_pipe_is_found() {
        use std::os::linux::fs::MetadataExt as _;
        let (reader, _writer) = io::pipe().unwrap();
        let number = std::fs::File::from(OwnedFd::from(reader)).metadata().unwrap().st_ino();
        assert!(holds_any(getpid(), &HashSet::from([number])));
        assert!(!holds_any(getpid(), &HashSet::new()));
        assert_eq!(pipe_number(Path::new("pipe:[12]")), Some(12));
        assert_eq!(pipe_number(Path::new("socket:[12]")), None);
    }

    #[test]
    fn a_time_is_the_same_for_all_processes() {
        let soon = BootTime::at(Instant::now() + Duration::from_secs(100));
        assert!(soon > BootTime::now() && soon.left() <= Duration::from_secs(100));
        assert!(soon.left() > Duration::from_secs(50));
        assert_eq!(BootTime(1).left(), Duration::ZERO);
    }

    #[test]
    fn marks_differ() {
        assert_ne!(Mark::new().unwrap(), Mark::new().unwrap());
    }

    #[test]
    fn the_state_and_the_start_are_read_whatever_the_name_is() {
        let stat = "7 (a ) Z b) S 1 7 8 0 -1 4194304 93 0 0 0 0 0 0 0 20 0 1 0 481 2400256 218\n";
        assert_eq!(Stat::parse(stat), Some(Stat { state: b'S', group: 7, started: 481 }));
        assert_eq!(Stat::parse("7 (sh) Z 1"), None);
        assert_eq!(Stat::parse(""), None);
        let own = Stat::read(getpid()).unwrap();
        assert!(own.is_alive() && own.started > 0);
    }
}
