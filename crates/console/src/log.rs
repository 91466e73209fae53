//! Where log lines go: to standard error, and no thread ever waits for it.
//!
//! Lines are written by the threads that serve a store, answer HTTP and keep a rank's heartbeat. If standard error is a pipe
//! that is not read (a pager, a terminal stopped by Ctrl-S, a stuck log collector), a plain write would stop that thread and
//! with it all clients or the rank. So a line is written only if the system takes it without waiting. Otherwise it is kept,
//! and a thread that exists only as long as lines are kept writes it later. What is kept is bounded; further lines are
//! counted, and the count is written as soon as there is space again.

#![expect(
    clippy::disallowed_methods,
    reason = "owns the thread that writes kept lines, and waits for it at the end"
)]

use std::collections::VecDeque;
use std::io::{self, IoSlice, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Condvar, LazyLock, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, ReadWriteFlags};
use tracing_subscriber::filter::Targets;

/// Bytes of lines that are kept while standard error is not read.
const KEPT_MAX: usize = 256 << 10;
/// A pipe that is ready takes this much without waiting: PIPE_BUF.
const WRITE_MAX: usize = 4096;

static LOG: LazyLock<Log> =
    LazyLock::new(|| Log { state: Mutex::new(State::default()), emptied: Condvar::new() });

/// What `TENFOLD_LOG` lets through; `default` if it is not set.
///
/// # Errors
/// If it is not a valid filter; the error shows valid ones.
pub fn log_filter(default: &str) -> Result<Targets, String> {
    let filter = std::env::var("TENFOLD_LOG").unwrap_or_else(|_| default.into());
    filter.parse().map_err(|error| {
        format!(
            "invalid log filter TENFOLD_LOG=`{filter}`: {error}\n  hint: try `info` or `tenfold_store=debug`"
        )
    })
}

/// Writes log lines to standard error without waiting for its reader. For `tracing_subscriber`'s `with_writer`.
#[derive(Clone, Copy, Debug, Default)]
pub struct LogWriter;

impl LogWriter {
    /// For `tracing_subscriber`'s `with_writer`.
    pub fn new() -> LogWriter {
        LogWriter
    }

    /// Waits until all kept lines have been written, at most this long.
    pub fn flush_within(patience: Duration) {
        let until = Instant::now() + patience;
        let mut state = LOG.lock();
        while !state.kept.is_empty() && state.has_writer() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            state = LOG.emptied.wait_timeout(state, left).expect(NO_PANIC).0;
        }
    }
}

impl Write for LogWriter {
    /// Takes one whole line.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let mut state = LOG.lock();
        if state.push(line, |bytes| write_now(io::stderr().as_fd(), bytes)) {
            state.writer = Some(std::process::id());
            let started = std::thread::Builder::new().name("tenfold-log".into()).spawn(write_kept);
            if started.is_err() {
                state.writer = None; // the next line tries again
            }
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

const NO_PANIC: &str = "nothing panics while holding it";

struct Log {
    state: Mutex<State>,
    emptied: Condvar,
}

impl Log {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect(NO_PANIC)
    }
}

/// What came of trying to write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Written {
    Some(usize),
    /// It would have to wait.
    Later,
    /// Standard error is closed, or its disk is full.
    Never,
}

#[derive(Debug, Default)]
struct State {
    kept: VecDeque<u8>,
    /// Lines for which there was no space.
    lost: u64,
    /// The process whose thread writes what is kept; a forked child has not got that thread.
    writer: Option<u32>,
}

impl State {
    fn has_writer(&self) -> bool {
        self.writer == Some(std::process::id())
    }

    /// Writes a line or keeps it; true if a thread has to be started that writes what is kept.
    fn push(&mut self, line: &[u8], mut write: impl FnMut(&[u8]) -> Written) -> bool {
        if !self.has_writer() && self.writer.take().is_some() {
            (self.kept, self.lost) = (VecDeque::new(), 0); // the parent writes them
        }
        let mut rest = line;
        while self.kept.is_empty() && self.lost == 0 && !rest.is_empty() {
            match write(&rest[..rest.len().min(WRITE_MAX)]) {
                Written::Some(count) => rest = &rest[count..],
                Written::Later => break,
                Written::Never => return false,
            }
        }
        if rest.is_empty() {
            return false;
        }
        if self.kept.len() + rest.len() > KEPT_MAX {
            self.lost += 1;
        } else {
            self.report_lost();
            self.kept.extend(rest);
        }
        !self.has_writer()
    }

    /// If there is space again: a line about those for which there was none.
    fn report_lost(&mut self) {
        if self.lost > 0 {
            let lost = std::mem::take(&mut self.lost);
            let note = format!("tenfold: {lost} log lines were lost: standard error was not read\n");
            self.kept.extend(note.as_bytes());
        }
    }

    /// Writes some of what is kept; true if there is more to write.
    fn write_some(&mut self, mut write: impl FnMut(&[u8]) -> Written) -> bool {
        let (first, _) = self.kept.as_slices();
        match write(&first[..first.len().min(WRITE_MAX)]) {
            Written::Some(count) => drop(self.kept.drain(..count)),
            Written::Later => {}
            Written::Never => (self.kept, self.lost) = (VecDeque::new(), 0),
        }
        if self.kept.is_empty() {
            self.report_lost();
        }
        !self.kept.is_empty()
    }
}

/// The thread that writes what is kept. It ends when all is written.
fn write_kept() {
    let error = io::stderr();
    loop {
        let mut watched = [PollFd::from_borrowed_fd(error.as_fd(), PollFlags::OUT)];
        let _is_tried_again = poll(&mut watched, None);
        let mut state = LOG.lock();
        if !state.write_some(|bytes| write_now(error.as_fd(), bytes)) {
            state.writer = None;
            LOG.emptied.notify_all();
            return;
        }
    }
}

/// Writes if that does not have to wait.
fn write_now(file: BorrowedFd<'_>, bytes: &[u8]) -> Written {
    const AT_POSITION: u64 = u64::MAX; // as a plain write
    loop {
        let written =
            match rustix::io::pwritev2(file, &[IoSlice::new(bytes)], AT_POSITION, ReadWriteFlags::NOWAIT) {
                // Terminals cannot be asked like this; nor can files, whose writes do not wait for a reader.
                Err(Errno::OPNOTSUPP | Errno::INVAL | Errno::NOSYS | Errno::SPIPE) => {
                    write_if_ready(file, bytes)
                }
                Err(Errno::AGAIN) if is_file(file) => rustix::io::write(file, bytes),
                written => written,
            };
        return match written {
            Ok(count) => Written::Some(count),
            Err(Errno::INTR) => continue,
            Err(Errno::AGAIN) => Written::Later,
            Err(_) => Written::Never,
        };
    }
}

fn write_if_ready(file: BorrowedFd<'_>, bytes: &[u8]) -> rustix::io::Result<usize> {
    let mut watched = [PollFd::from_borrowed_fd(file, PollFlags::OUT)];
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    match poll(&mut watched, Some(&at_once)) {
        Ok(0) => Err(Errno::AGAIN),
        Ok(_) => rustix::io::write(file, bytes),
        Err(error) => Err(error),
    }
}

fn is_file(file: BorrowedFd<'_>) -> bool {
    rustix::fs::fstat(file).is_ok_and(|stat| rustix::fs::FileType::from_raw_mode(stat.st_mode).is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A pipe's other end.
    #[derive(Default)]
    struct Reader {
        seen: Vec<u8>,
        /// Bytes that it takes before it has to be read.
        space: usize,
    }

    impl Reader {
        fn take(&mut self, bytes: &[u8]) -> Written {
            let count = bytes.len().min(self.space);
            if count == 0 {
                return Written::Later;
            }
            self.space -= count;
            self.seen.extend_from_slice(&bytes[..count]);
            Written::Some(count)
        }

        fn text(&self) -> &str {
            std::str::from_utf8(&self.seen).unwrap()
        }
    }

    #[test]
    fn a_line_is_written_immediately_where_it_is_read_and_kept_where_it_is_not() {
        let (mut state, mut reader) = (State::default(), Reader { space: 7, ..Reader::default() });
        assert!(!state.push(b"one\n", |bytes| reader.take(bytes)));
        assert_eq!(reader.text(), "one\n");
        assert!(state.push(b"two\n", |bytes| reader.take(bytes)), "a writer is needed");
        state.writer = Some(std::process::id());
        reader.space = 100;
        assert!(!state.push(b"three\n", |bytes| reader.take(bytes)), "it stays behind the line before");
        assert_eq!(reader.text(), "one\ntwo");
        assert!(!state.write_some(|bytes| reader.take(bytes)));
        assert_eq!(reader.text(), "one\ntwo\nthree\n");
    }

    #[test]
    fn what_is_kept_is_bounded_and_what_is_lost_is_counted() {
        let (mut state, mut reader) = (State::default(), Reader::default());
        let line = [b"x".repeat(99), b"\n".to_vec()].concat();
        for _ in 0..KEPT_MAX / 100 + 10 {
            state.push(&line, |bytes| reader.take(bytes));
            state.writer = Some(std::process::id());
        }
        assert!(state.kept.len() <= KEPT_MAX);
        assert_eq!(state.lost, 10);
        reader.space = usize::MAX;
        while state.write_some(|bytes| reader.take(bytes)) {}
        let note = "x\ntenfold: 10 log lines were lost: standard error was not read\n";
        assert!(reader.text().ends_with(note), "{:?}", &reader.text()[reader.seen.len() - 200..]);
        assert!(state.kept.is_empty() && state.lost == 0);
    }

    #[test]
    fn a_log_that_cannot_be_written_is_given_up() {
        let mut state = State::default();
        assert!(!state.push(b"one\n", |_| Written::Never));
        state.push(b"two\n", |_| Written::Later);
        assert!(!state.write_some(|_| Written::Never));
        assert!(state.kept.is_empty());
    }

    #[test]
    fn a_full_pipe_is_not_waited_for() {
        let (reader, writer) = io::pipe().unwrap();
        let mut written = 0;
        loop {
            match write_now(writer.as_fd(), &[b'x'; WRITE_MAX]) {
                Written::Some(count) => written += count,
                Written::Later => break,
                Written::Never => panic!("it is open"),
            }
        }
        assert!(written >= WRITE_MAX);
        drop(reader);
        assert_eq!(write_now(writer.as_fd(), b"x"), Written::Never);
    }

    #[test]
    fn a_file_takes_every_line() {
        use std::io::{Read as _, Seek as _};
        let mut file = tempfile::tempfile().unwrap();
        for _ in 0..3 {
            assert_eq!(write_now(file.as_fd(), b"line\n"), Written::Some(5));
        }
        let mut text = String::new();
        file.rewind().unwrap();
        file.read_to_string(&mut text).unwrap();
        assert_eq!(text, "line\nline\nline\n");
    }
}
