//! Processes that a benchmark starts and that report to it on a Unix socket: how they are started, heard and ended.
//!
//! The lines that they send are up to the benchmark, see `collectives/protocol.rs` and `recover/protocol.rs`.
#![expect(clippy::disallowed_methods, reason = "a benchmark waits for its children, and reads the clock")]

use std::fs::File;
use std::io::{ErrorKind, Read as _, Write as _};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tenfold_console::Program;

use super::Failure;

/// How long a process may take to exit before it is killed.
pub(crate) const LEAVE_MAX: Duration = Duration::from_secs(3);
/// Between two checks of something that causes no event, such as a child's exit.
pub(crate) const NAP: Duration = Duration::from_millis(10);
/// The longest wait for an event without a look at what causes none.
const GLANCE: Duration = Duration::from_millis(100);
/// The longest line: the times of a thousand batches.
const LINE_BYTES_MAX: usize = 1 << 16;

/// Starts a command so that the kernel kills it when we die; its output goes to the log.
pub(crate) fn spawn(command: &Command, log: &Path) -> Result<Child, Failure> {
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

/// A launcher that is asked to exit takes its ranks with it; one that does not react is killed.
pub(crate) fn end(child: &mut Child) {
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

/// The last output of a process, for an error.
pub(crate) fn last_lines(log: &Path) -> String {
    const LINES_MAX: usize = 12;
    let text = String::from_utf8_lossy(&std::fs::read(log).unwrap_or_default()).into_owned();
    let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    lines[lines.len().saturating_sub(LINES_MAX)..].iter().map(|line| format!("\n  | {line}")).collect()
}

/// Sleeps until one of these can be read, for a moment at most.
pub(crate) fn sleep_until_one_speaks<'a>(
    sources: impl Iterator<Item = BorrowedFd<'a>>,
) -> Result<(), Failure> {
    let mut watched: Vec<PollFd<'_>> =
        sources.map(|source| PollFd::from_borrowed_fd(source, PollFlags::IN)).collect();
    let timeout = Timespec { tv_sec: 0, tv_nsec: GLANCE.subsec_nanos().into() };
    match poll(&mut watched, Some(&timeout)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(Failure::new(format!("cannot wait for ranks: {error}"))),
    }
}

/// The connection to one rank.
#[derive(Debug)]
pub(crate) struct Speaker {
    stream: UnixStream,
    unread: Vec<u8>,
}

impl Speaker {
    pub(crate) fn new(stream: UnixStream) -> std::io::Result<Self> {
        stream.set_nonblocking(true)?;
        Ok(Speaker { stream, unread: Vec::new() })
    }

    pub(crate) fn tell(&mut self, line: &str) -> Result<(), Failure> {
        self.stream.write_all(line.as_bytes()).map_err(|error| lost(&error))
    }

    /// The next line, if it has arrived completely.
    pub(crate) fn poll_line(&mut self) -> Result<Option<String>, Failure> {
        loop {
            if let Some(end) = self.unread.iter().position(|&byte| byte == b'\n') {
                let line: Vec<u8> = self.unread.drain(..=end).collect();
                return Ok(Some(String::from_utf8_lossy(&line).trim_end().to_owned()));
            }
            if self.unread.len() > LINE_BYTES_MAX {
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

    /// As `poll_line`, and what the line means.
    pub(crate) fn poll_parsed<T>(
        &mut self,
        parse: impl FnOnce(&str) -> Option<T>,
    ) -> Result<Option<T>, Failure> {
        let Some(line) = self.poll_line()? else { return Ok(None) };
        parse(&line).map(Some).ok_or_else(|| Failure::new(format!("invalid answer `{line}`")))
    }
}

impl AsFd for Speaker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

pub(crate) fn lost(error: &std::io::Error) -> Failure {
    Failure::new(format!("lost the connection to it: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_arrive_whole_and_the_end_of_a_connection_is_an_error() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let mut speaker = Speaker::new(ours).unwrap();
        theirs.write_all(b"one\ntw").unwrap();
        assert_eq!(speaker.poll_line().unwrap().as_deref(), Some("one"));
        assert_eq!(speaker.poll_line().unwrap(), None);
        theirs.write_all(b"o\n").unwrap();
        let number = |line: &str| line.parse::<u32>().ok();
        let failure = speaker.poll_parsed(number).unwrap_err().to_string();
        assert_eq!(failure, "invalid answer `two`");
        drop(theirs);
        assert_eq!(speaker.poll_line().unwrap_err().to_string(), "it closed its connection");
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
