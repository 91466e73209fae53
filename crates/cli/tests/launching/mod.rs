//! `tenfold run` as a child process that does not outlive its test, and the processes that it started.

#![allow(dead_code, unreachable_pub, reason = "each test file uses its part")]
#![allow(clippy::unwrap_used, reason = "tests: helpers that may fail")]

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Read as _};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::serving::{Process, TENFOLD};

/// Nothing in these tests takes this long unless it hangs.
pub const HANG: Duration = Duration::from_secs(40);

/// `tenfold run` with these arguments; the last one is a script for `sh`.
pub fn command(words: &[&str]) -> Command {
    let (script, options) = words.split_last().unwrap();
    let mut command = Command::new(TENFOLD);
    command.arg("run").args(options).args(["sh", "-c", script]).stdin(Stdio::null());
    for name in
        ["OMP_NUM_THREADS", "RAYON_NUM_THREADS", "PYTHONUNBUFFERED", "TORCH_NCCL_ASYNC_ERROR_HANDLING"]
    {
        command.env_remove(name);
    }
    command
}

/// Standard output, standard error and exit code of a run that ends by itself.
pub fn finished(words: &[&str]) -> (String, String, Option<i32>) {
    let output = command(words).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (text(output.stdout), text(output.stderr), output.status.code())
}

/// A message without what differs from run to run: `after 0.1 s (pid 7)`.
pub fn without_numbers(text: &str) -> String {
    let Some((before, rest)) = text.split_once(" after ") else { return text.into() };
    let (_, rest) = rest.split_once(" s (pid ").unwrap();
    let (_, rest) = rest.split_once(')').unwrap();
    format!("{before}{rest}")
}

/// A run whose standard output the test reads line by line.
pub struct Run {
    pub launcher: Process,
    pub output: BufReader<std::process::ChildStdout>,
}

impl Run {
    pub fn start(words: &[&str]) -> Run {
        Run::spawn(&mut command(words))
    }

    pub fn spawn(command: &mut Command) -> Run {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Run { launcher: Process(child), output }
    }

    /// The next line of each rank, by rank.
    pub fn lines(&mut self, ranks: usize) -> Vec<String> {
        let lines = (0..ranks).map(|_| {
            let mut line = String::new();
            self.output.read_line(&mut line).unwrap();
            let (rank, text) = line.trim_end().strip_prefix('[').unwrap().split_once("] ").unwrap();
            (rank.parse::<usize>().unwrap(), text.to_string())
        });
        let by_rank: BTreeMap<usize, String> = lines.collect();
        assert_eq!(by_rank.len(), ranks, "one line of each");
        by_rank.into_values().collect()
    }

    /// The next line, of any rank.
    pub fn any_line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.trim_end().split_once("] ").unwrap().1.to_string()
    }

    pub fn ended(self) -> (String, ExitStatus) {
        ended(self.launcher)
    }
}

/// Waits for a launcher to exit; returns its standard error and how it ended.
pub fn ended(mut launcher: Process) -> (String, ExitStatus) {
    wait_until_gone(&handle(&launcher.0.id().to_string()));
    let mut text = String::new();
    launcher.0.stderr.take().unwrap().read_to_string(&mut text).unwrap();
    (text, launcher.0.wait().unwrap())
}

/// A handle on a process by its number, which refers to the same process as long as it is held.
pub fn handle(process: &str) -> OwnedFd {
    pidfd_open(pid(process), PidfdFlags::empty()).unwrap()
}

pub fn pid(process: &str) -> Pid {
    Pid::from_raw(process.parse().unwrap()).unwrap()
}

pub fn wait_until_gone(handle: &OwnedFd) {
    let limit = Timespec { tv_sec: HANG.as_secs() as i64, tv_nsec: 0 };
    let ended = poll(&mut [PollFd::new(handle, PollFlags::IN)], Some(&limit)).unwrap();
    assert_eq!(ended, 1, "it does not end");
}

/// For conditions that no file descriptor reports.
#[expect(clippy::disallowed_methods, reason = "a hang is reported instead of waited for")]
pub fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    let start = std::time::Instant::now();
    while !is_so() {
        assert!(start.elapsed() < HANG, "it does not happen that {what}");
        std::thread::yield_now();
    }
}

pub fn make_fifo(folder: &Path) -> String {
    let path = folder.join("fifo");
    assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
    path.to_str().unwrap().to_string()
}
