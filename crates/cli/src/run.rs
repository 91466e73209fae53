//! `tenfold run`: starts the ranks of a program on this machine, and sees to it that all of them end.
//!
//! One thread does everything. It waits for the first of: a signal (a child's end is one), something in a rank's pipe,
//! room to write. The store server, with its own thread, lives in this process: a rank that dies takes no store with it.
//!
//! A run is in one of three phases: ranks run; they were asked to end and have some time for it; they were killed. The
//! first failure, or a signal to the launcher, begins the second.
//!
//! `program` finds what to run, `environment` tells a rank its place, `rank` is its process, `output` what it writes.
#![expect(clippy::disallowed_methods, reason = "ranks have some time to end, and are told how long they ran")]

mod environment;
#[allow(dead_code, reason = "until the flags are wired")]
mod failure;
#[allow(dead_code, reason = "until the flags are wired")]
mod lines;
#[allow(dead_code, reason = "until the flags are wired")]
mod logs;
#[allow(dead_code, reason = "until the flags are wired")]
mod output;
#[allow(dead_code, reason = "until the flags are wired")]
mod pipes;
mod program;
mod rank;
#[allow(dead_code, reason = "until the flags are wired")]
mod status;

use std::ffi::OsString;
use std::io::{self, Write as _};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::Signal;
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use signal_hook::iterator::backend::SignalDelivery;
use signal_hook::iterator::exfiltrator::SignalOnly;
use tenfold_store::{Server, ServerOptions};

use crate::units::parse_duration;
use crate::{FAILURE, Outcome, Program, SUCCESS};
use environment::Job;
use logs::{LogOptions, Logs};
use output::{Outlet, Prefix, Speaker, Stream};
use rank::{End, Rank, signal_code, signal_name};
pub(crate) use rank::{RankArgs, become_program};

/// Exit codes of a shell for a program that is not there, or may not be run.
const NOT_FOUND: u8 = 127;
const NOT_RUNNABLE: u8 = 126;

/// Open files that a rank costs the launcher: two pipes, and its connections to the store.
const FILES_A_RANK: usize = 16;

/// Starts the ranks of a program on this machine, as torchrun does.
///
/// Every rank finds torchrun's variables in its environment (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, …)
/// and a store at MASTER_ADDR:MASTER_PORT, which the launcher hosts. PYTHONUNBUFFERED and, with several ranks,
/// OMP_NUM_THREADS are 1 unless they are set. What ranks write passes through line by line behind `[rank]`; they read
/// nothing from standard input.
///
/// The first rank that fails ends the others: SIGTERM, and SIGKILL for those that are still there after the shutdown
/// timeout. Ctrl-C and SIGTERM are passed on to the ranks once; a second one kills them. Processes that ranks started and
/// left behind end with the run. A launcher that is killed takes its ranks along, though not what they started.
///
/// The exit code is that of the rank that failed first: its own, or 128 plus the signal that killed it (torchrun's is
/// always 1). After Ctrl-C or SIGTERM it is 128 plus that signal; 127 and 126 mean that the program was not there or
/// could not be run.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  tenfold run -n 4 train.py --epochs 3         a Python program, under the python3 on PATH
  tenfold run -n 2 --python .venv/bin/python train.py
  tenfold run -n 2 -- ./simulation --steps 10  any other program
  tenfold run -n 2 sh -c 'echo $RANK of $WORLD_SIZE at $MASTER_ADDR:$MASTER_PORT'")]
pub(crate) struct Args {
    /// Ranks to start
    #[arg(
        short = 'n',
        long = "nproc-per-node",
        alias = "nproc_per_node",
        value_name = "N",
        default_value_t = 1
    )]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=1024))]
    ranks: u16,
    /// From asking ranks to end to killing them
    #[arg(long, alias = "shutdown_timeout", value_name = "TIME", default_value = "10s", value_parser = parse_duration)]
    shutdown_timeout: Duration,
    /// Python for a program that ends in .py; if not given, the one that tenfold was installed with by pip, else the
    /// first of python3 and python on PATH
    #[arg(long, value_name = "PATH")]
    python: Option<PathBuf>,
    /// Program and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "PROGRAM")]
    program: Vec<OsString>,
}

pub(crate) fn run(args: &Args) -> Outcome {
    let program = match program::resolve(&args.program, args.python.as_deref().or(Program::own().python())) {
        Ok(program) => program,
        Err(missing) => {
            eprintln!("error: {missing}");
            return Ok(missing.code());
        }
    };
    let ranks = usize::from(args.ranks);
    make_room_for_files(ranks * FILES_A_RANK);
    let mut launch = Launch::new(args.shutdown_timeout)?; // listens for signals before there is anybody to protect
    let server = Server::start(ServerOptions::new("127.0.0.1", 0))?;
    let store_port = server.address().port();
    let job = Job { ranks, store_port, id: format!("tenfold-{}-{store_port}", std::process::id()) };
    let mut logs = Logs::open(LogOptions::default(), &job.id)?;
    for (number, logs) in logs.start_round(0, ranks)?.into_iter().enumerate() {
        let speaker = Speaker {
            rank: number,
            local_rank: number,
            world_size: ranks,
            role: "default",
            host: "localhost",
        };
        let prefix = (ranks > 1).then(|| Prefix::new(&speaker, None, &launch.outlet));
        let rank = Rank::start(number, &job, &program, logs, prefix);
        launch.ranks.push(rank.map_err(|error| format!("cannot start rank {number}: {error}"))?);
    }
    launch.watch()?;
    rank::end_leftovers(&mut launch.ranks);
    launch.drain()?;
    Ok(launch.report())
}

/// Raises the limit of open files if it is too low. Ranks inherit it, so it is left alone where it will do.
fn make_room_for_files(needed: usize) {
    use rustix::process::{Resource, getrlimit};
    if getrlimit(Resource::Nofile).current.is_some_and(|limit| limit < needed as u64) {
        crate::serve::descriptors();
    }
}

/// Signals that whoever started us wants ignored, as `nohup` does with SIGHUP; from the lowest bit on.
fn ignored_signals() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default(); // else nobody tells
    parse_ignored(&status).unwrap_or(0)
}

fn parse_ignored(status: &str) -> Option<u64> {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"))?;
    u64::from_str_radix(mask.trim(), 16).ok()
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Running,
    /// Asked to end; killed at that time, if it can be told.
    Stopping(Option<Instant>),
    Killed,
}

/// Why ranks were asked to end.
#[derive(Debug)]
enum Cause {
    Failure {
        first: usize,
        /// Had ended too when the first was noticed, before anybody was asked to.
        together: Vec<usize>,
        after: Duration,
    },
    Signal(i32),
}

#[derive(Debug)]
struct Launch {
    ranks: Vec<Rank>,
    signals: SignalDelivery<UnixStream, SignalOnly>,
    outlet: Outlet,
    phase: Phase,
    cause: Option<Cause>,
    /// Somebody told us to end more than once.
    impatient: bool,
    started: Instant,
    shutdown_timeout: Duration,
}

/// What can go on without waiting.
#[derive(Debug, Default)]
struct Ready {
    write: bool,
    /// Rank and which of its pipes.
    read: Vec<(usize, usize)>,
}

impl Launch {
    fn new(shutdown_timeout: Duration) -> io::Result<Self> {
        let (wake, waker) = UnixStream::pair()?;
        let heard = [SIGCHLD, SIGHUP, SIGINT, SIGQUIT, SIGTERM];
        let ignored = ignored_signals();
        let heard = heard.into_iter().filter(|&signal| signal == SIGCHLD || ignored >> (signal - 1) & 1 == 0);
        Ok(Launch {
            ranks: Vec::new(),
            signals: SignalDelivery::with_pipe(wake, waker, SignalOnly, heard)?,
            outlet: Outlet::standard()?,
            phase: Phase::Running,
            cause: None,
            impatient: false,
            started: Instant::now(),
            shutdown_timeout,
        })
    }

    /// Until the last rank has ended.
    fn watch(&mut self) -> io::Result<()> {
        while self.ranks.iter().any(Rank::is_running) {
            let now = Instant::now();
            self.ranks.iter_mut().for_each(|rank| rank.pipes.wake(now, &mut self.outlet));
            self.outlet.tick(now);
            let kill_at = if let Phase::Stopping(kill_at) = self.phase { kill_at } else { None };
            let words = self.ranks.iter().filter_map(|rank| rank.pipes.next_wake());
            let wakes = words.chain(self.outlet.next_wake()).chain(kill_at);
            let ready = self.wait(wakes.min())?;
            if ready.write {
                self.outlet.write();
            }
            for (rank, pipe) in ready.read {
                self.ranks[rank].pipes.read(pipe, Instant::now(), &mut self.outlet);
            }
            let signals: Vec<i32> = self.signals.pending().collect();
            for signal in signals {
                if signal == SIGCHLD { self.notice_ends()? } else { self.told_to_end(signal) }
            }
            if matches!(self.phase, Phase::Stopping(Some(kill_at)) if Instant::now() >= kill_at) {
                self.kill();
            }
        }
        Ok(())
    }

    /// Asleep until there is something to do, or it is time.
    fn wait(&self, until: Option<Instant>) -> io::Result<Ready> {
        let mut watched = vec![PollFd::new(self.signals.get_read(), PollFlags::IN)];
        let pipes_from = 1 + usize::from(!self.outlet.is_empty());
        watched.extend(self.outlet.next_file().map(|file| PollFd::from_borrowed_fd(file, PollFlags::OUT)));
        let mut pipes = Vec::new();
        if !self.outlet.is_full() {
            for (number, rank) in self.ranks.iter().enumerate() {
                for (pipe, source) in rank.pipes.open() {
                    pipes.push((number, pipe));
                    watched.push(PollFd::from_borrowed_fd(source, PollFlags::IN));
                }
            }
        }
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        let timeout = left.and_then(|left| Timespec::try_from(left).ok()); // more seconds than fit are for ever
        match poll(&mut watched, timeout.as_ref()) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => return Ok(Ready::default()),
            Err(error) => return Err(error.into()),
        }
        let is_ready = |watched: &PollFd<'_>| !watched.revents().is_empty();
        let read = pipes.into_iter().zip(&watched[pipes_from..]).filter(|(_, watched)| is_ready(watched));
        Ok(Ready {
            write: watched[1..pipes_from].iter().any(is_ready),
            read: read.map(|(pipe, _)| pipe).collect(),
        })
    }

    fn notice_ends(&mut self) -> io::Result<()> {
        let mut failed = Vec::new();
        for rank in &mut self.ranks {
            if rank.poll_end()? {
                failed.extend(rank.end.filter(|end| end.is_failure()).map(|end| (rank.number, end)));
            }
        }
        if self.phase == Phase::Running
            && let Some(&(first, end)) = failed.first()
        {
            let together = failed[1..].iter().map(|&(rank, _)| rank).collect();
            self.cause = Some(Cause::Failure { first, together, after: self.started.elapsed() });
            self.stop(Signal::TERM, &format!("rank {first} failed ({end}): the others are asked to end"));
        }
        Ok(())
    }

    fn told_to_end(&mut self, signal: i32) {
        if self.phase != Phase::Running {
            self.impatient = true;
            self.kill();
            return;
        }
        self.cause = Some(Cause::Signal(signal));
        let seconds = self.shutdown_timeout.as_secs_f64();
        let note = format!("{}: passed on to all ranks, which have {seconds} s", signal_name(signal));
        self.stop(Signal::from_named_raw(signal).unwrap_or(Signal::TERM), &note);
    }

    fn stop(&mut self, signal: Signal, note: &str) {
        self.phase = Phase::Stopping(Instant::now().checked_add(self.shutdown_timeout));
        let running = || self.ranks.iter().filter(|rank| rank.is_running());
        if self.ranks.len() > 1 && running().next().is_some() {
            self.outlet.push(Stream::Error, &[b"tenfold: ", note.as_bytes(), b"\n"]);
        }
        running().for_each(|rank| rank.signal(signal));
    }

    fn kill(&mut self) {
        self.phase = Phase::Killed;
        for rank in self.ranks.iter_mut().filter(|rank| rank.is_running()) {
            rank.killed = true;
            rank.signal(Signal::KILL);
        }
    }

    /// Shows what ranks left in their pipes; who was told twice to end does not wait for a reader.
    fn drain(&mut self) -> io::Result<()> {
        loop {
            let mut all = true;
            for rank in &mut self.ranks {
                all &= rank.pipes.drain(Instant::now(), &mut self.outlet);
            }
            if all && self.outlet.is_empty() {
                return Ok(());
            }
            let until = self.impatient.then(Instant::now);
            if self.wait(until)?.write {
                self.outlet.write();
            } else if self.impatient {
                return Ok(());
            }
            self.impatient |= self.signals.pending().any(|signal| signal != SIGCHLD);
        }
    }

    /// Says who failed; the exit code.
    fn report(&self) -> u8 {
        let (message, code) = match &self.cause {
            None => return SUCCESS,
            Some(Cause::Signal(signal)) => {
                (format!("ended by {}", signal_name(*signal)), signal_code(*signal))
            }
            Some(Cause::Failure { first, together, after }) => {
                let code = self.ranks[*first].end.map_or(FAILURE, End::code);
                (self.describe(*first, together, *after), code)
            }
        };
        // Not `eprintln!`, which panics where nobody reads.
        let _nobody_reads = writeln!(io::stderr(), "error: {message}{}", self.stubborn());
        code
    }

    fn describe(&self, first: usize, together: &[usize], after: Duration) -> String {
        let ended = |rank: usize| self.ranks[rank].end.expect("it failed by ending");
        let (all, end, process) = (self.ranks.len(), ended(first), self.ranks[first].process());
        let seconds = after.as_secs_f64();
        let who =
            if all > 1 { format!("rank {first} of {all} failed first") } else { "the rank failed".into() };
        let mut text = format!("{who}: {end} after {seconds:.1} s (pid {process})");
        let words = self.ranks[first].pipes.words();
        for line in words.last_lines.iter().filter(|_| !words.are_on_screen) {
            text += &format!("\n  | {line}");
        }
        for &rank in together {
            text += &format!("\n  rank {rank} failed at the same time: {}", ended(rank));
        }
        text
    }

    /// Ranks that had to be killed.
    fn stubborn(&self) -> String {
        let killed: Vec<String> =
            self.ranks.iter().filter(|rank| rank.killed).map(|rank| rank.number.to_string()).collect();
        match killed.as_slice() {
            [] => String::new(),
            [one] => format!("\n  rank {one} did not end when asked, and was killed"),
            several => format!("\n  ranks {} did not end when asked, and were killed", several.join(", ")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_tells_which_signals_are_ignored() {
        let status = "Name:\tsh\nSigBlk:\t0000000000000000\nSigIgn:\t0000000000001001\nSigCgt:\t0\n";
        assert_eq!(parse_ignored(status), Some(1 << (SIGHUP - 1) | 1 << 12));
        assert_eq!(parse_ignored("Name:\tsh\n"), None);
    }
}
