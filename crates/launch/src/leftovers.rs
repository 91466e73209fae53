//! Finds the processes that belong to a run, and ends them.
//!
//! While the launcher lives it is a subreaper: a descendant that loses its own parent becomes the launcher's
//! child, so the tree below the launcher has all of them. When the launcher has died, the tree is lost. Then
//! a process belongs to the run if it has something that processes inherit by default: the run's mark in its
//! environment, the process group of a rank, or the pipes that a rank writes to.
//!
//! No other process is affected. A process is opened by its number and then checked again; from there on the
//! handle refers to that process alone. A pipe's inode is unique while the pipe is open, and the launcher
//! keeps those of its ranks open. A group has the number of a rank, which the kernel gives to no other
//! process while the group has members. The guard is notified when a rank exits and no longer looks for its
//! group. A group that got the number later has a leader that started later: see [`Leader::leads`].
//!
//! A process survives a launcher that is killed only if it left its group, emptied its environment *and* closed the rank's
//! pipes. With `--redirects` there are no pipes to close. A launcher that lives finds such processes as well.

#![expect(clippy::disallowed_methods, reason = "leftovers have some time to exit")]

use std::collections::HashSet;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, getpid, pidfd_open, pidfd_send_signal, set_child_subreaper};

use super::mark::Mark;
use super::proc::{self, Stat, Unnamed};

/// From SIGTERM to SIGKILL.
const PATIENCE: Duration = Duration::from_secs(1);
/// How long to continue killing: a process that hangs in the kernel cannot be killed.
const KILLING_MAX: Duration = Duration::from_secs(10);
/// The same while the other ranks go on: their output waits meanwhile.
const KILLING_MAX_SHORT: Duration = Duration::from_secs(1);

/// Makes this process the subreaper of its descendants, so that [`Finder::Tree`] finds them. False if the kernel does not
/// support it, or if this process already has children: those are not ours to end.
pub(super) fn become_subreaper() -> bool {
    let own = getpid();
    proc::lists_children(own) && proc::children(own).is_empty() && set_child_subreaper(Some(own)).is_ok()
}

/// Finds the processes of a run whose launcher is this process.
#[derive(Debug)]
pub(super) enum Finder {
    /// The tree below this process, without one child and its descendants.
    Tree { without: Option<Pid> },
    /// All processes that have the mark.
    Marked(Mark),
    /// What one process of the run has left behind: processes of its group, and those that have its own mark. They
    /// are in the tree below this process, without the given child, if there is one.
    Of { mark: Mark, leader: Pid, tree: Option<Pid> },
}

impl Finder {
    fn find(&self) -> Vec<Pid> {
        match self {
            Finder::Tree { without } => tree(getpid(), *without),
            Finder::Marked(mark) => all_but_us().filter(|&process| mark.is_on(process)).collect(),
            Finder::Of { mark, leader, tree: guard } => {
                let all: Vec<Pid> = match guard {
                    Some(guard) => tree(getpid(), Some(*guard)),
                    None => all_but_us().collect(),
                };
                // If its number belongs to another process by now, so may the group.
                let group = Stat::read(*leader).is_none().then_some(leader.as_raw_pid());
                let is_of_group =
                    |&process: &Pid| group.is_some() && Stat::read(process).map(|stat| stat.group) == group;
                all.into_iter().filter(|process| is_of_group(process) || mark.is_on(*process)).collect()
            }
        }
    }
}

/// All descendants of a process, as far as the kernel shows them.
fn tree(root: Pid, without: Option<Pid>) -> Vec<Pid> {
    let (mut all, mut next) = (Vec::new(), vec![root]);
    let mut seen: HashSet<Pid> = without.into_iter().chain([root]).collect(); // it changes while we look
    while let Some(process) = next.pop() {
        for child in proc::children(process) {
            if seen.insert(child) {
                all.push(child);
                next.push(child);
            }
        }
    }
    all
}

fn all_but_us() -> impl Iterator<Item = Pid> {
    let own = getpid();
    proc::processes().filter(move |&process| process != own)
}

/// What is known of a run by a process that is not its launcher.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Orphans {
    pub(super) mark: Mark,
    /// Ranks that have not exited.
    pub(super) leaders: Vec<Leader>,
    /// Inodes of the pipes that ranks were given, also of those that have exited.
    pub(super) pipes: HashSet<u64>,
    /// The launcher if it lives: it holds pipes of ranks but is not to be ended.
    pub(super) launcher: Option<Pid>,
}

/// A rank, which leads the process group of its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Leader {
    pub(super) process: Pid,
    pub(super) started: u64,
}

impl Leader {
    /// Is a group of this number the rank's? Another process that leads it now has another start time. For a mistake, another
    /// process would have to have got the number, led a group, left a member in it and exited, all since the launcher ended.
    fn leads(self, now: Option<Stat>) -> bool {
        now.is_none_or(|stat| stat.started == self.started)
    }
}

impl Orphans {
    pub(super) fn new(mark: Mark) -> Self {
        Orphans { mark, leaders: Vec::new(), pipes: HashSet::new(), launcher: None }
    }

    pub(super) fn find(&self) -> Vec<Pid> {
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

/// Does a process have one of these pipes open? Unknown for processes of other users.
fn holds_any(process: Pid, pipes: &HashSet<u64>) -> bool {
    !pipes.is_empty()
        && proc::open_inodes(process, Unnamed::Pipe, usize::MAX).any(|pipe| pipes.contains(&pipe))
}

/// A process as it was when it was found. Its start time distinguishes it from a later one with the same number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Found {
    process: Pid,
    started: u64,
}

impl Found {
    /// Nothing if it is not alive.
    fn of(process: Pid) -> Option<Found> {
        let stat = Stat::read(process).filter(|stat| stat.is_alive())?;
        Some(Found { process, started: stat.started })
    }

    /// A handle on the process, if it is still the same one.
    fn open(self) -> Option<OwnedFd> {
        let handle = pidfd_open(self.process, PidfdFlags::empty()).ok()?;
        (Found::of(self.process) == Some(self)).then_some(handle)
    }
}

/// Terminates every process that `find` returns: SIGTERM, a grace period, then SIGKILL, until none is left. Returns how
/// many were alive when it gave up.
pub(super) fn end_all(find: impl Fn() -> Vec<Pid>, patience: Duration) -> usize {
    end_all_within(find, patience, KILLING_MAX)
}

fn end_all_within(find: impl Fn() -> Vec<Pid>, patience: Duration, killing_max: Duration) -> usize {
    let start = Instant::now();
    let (kill_at, give_up_at) = (start + patience, start + patience + killing_max);
    let mut asked: HashSet<Found> = HashSet::new();
    loop {
        let found: Vec<Found> = find().into_iter().filter_map(Found::of).collect();
        let now = Instant::now();
        if found.is_empty() || now >= give_up_at {
            return found.len();
        }
        let handles: Vec<OwnedFd> = found
            .iter()
            .filter_map(|&found| {
                let handle = found.open()?;
                if now >= kill_at {
                    let _exited_meanwhile = pidfd_send_signal(&handle, Signal::KILL);
                } else if asked.insert(found) {
                    let _exited_meanwhile = pidfd_send_signal(&handle, Signal::TERM);
                }
                Some(handle)
            })
            .collect();
        // A process may have started more children before it was killed: look again soon.
        let until = if now >= kill_at { now + Duration::from_millis(100) } else { kill_at };
        wait_for_any(&handles, until.saturating_duration_since(now));
    }
}

/// Kills leftovers. Returns how many were alive when it gave up.
pub(super) fn kill(finder: &Finder) -> usize {
    end_all_within(|| finder.find(), Duration::ZERO, KILLING_MAX_SHORT)
}

/// Asks leftovers to exit and gives them some time.
pub(super) fn end_leftovers(finder: &Finder) -> usize {
    end_all(|| finder.find(), PATIENCE)
}

fn wait_for_any(handles: &[OwnedFd], limit: Duration) {
    let mut watched: Vec<PollFd<'_>> =
        handles.iter().map(|handle| PollFd::new(handle, PollFlags::IN)).collect();
    let limit = Timespec::try_from(limit).ok();
    let _interrupted = poll(&mut watched, limit.as_ref()); // the caller looks again anyway
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::linux::fs::MetadataExt as _;

    #[test]
    fn a_group_with_another_leader_is_left_alone() {
        let own = Stat::read(getpid()).unwrap();
        let leader = Leader { process: getpid(), started: own.started };
        assert!(leader.leads(Some(own)) && leader.leads(None));
        assert!(!leader.leads(Some(Stat { started: own.started + 1, ..own })));
    }

    #[test]
    fn a_process_that_holds_a_pipe_is_found() {
        let (reader, _writer) = std::io::pipe().unwrap();
        let inode = std::fs::File::from(OwnedFd::from(reader)).metadata().unwrap().st_ino();
        assert!(holds_any(getpid(), &HashSet::from([inode])));
        assert!(!holds_any(getpid(), &HashSet::new()));
    }

    #[test]
    fn a_handle_is_not_given_for_another_process_with_the_same_number() {
        let own = Found::of(getpid()).unwrap();
        assert!(own.open().is_some());
        assert!(Found { started: own.started + 1, ..own }.open().is_none());
    }
}
