//! The read ends of one rank's two streams: what it writes comes out here, is cut into lines and passed on.
//!
//! Nothing here waits: the launcher asks the system which pipes have something, and reads those.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Instant;

use rustix::fs::{OFlags, fcntl_setfl};

use super::output::{Lines, Outlet, Stream};

/// What is kept of a rank's words for the report of its failure.
const LAST_LINES: usize = 12;
const LAST_LINE_MAX: usize = 1000;
/// What is read from a pipe at once: what a Linux pipe holds.
const READ_MAX: usize = 64 << 10;

#[derive(Debug)]
pub(super) struct Pipes {
    /// What the rank wrote last, on either stream.
    pub(super) last_lines: VecDeque<String>,
    /// When it last wrote anything.
    pub(super) last_output: Option<Instant>,
    /// Before each line; none for a rank that is alone, whose bytes pass as they come.
    prefix: Option<String>,
    pipes: Vec<Pipe>,
}

#[derive(Debug)]
struct Pipe {
    stream: Stream,
    source: File,
    lines: Lines,
    open: bool,
}

impl Pipes {
    pub(super) fn new(prefix: Option<String>, output: OwnedFd, error: OwnedFd) -> io::Result<Self> {
        let mut pipes = Vec::new();
        for (stream, source) in [(Stream::Output, output), (Stream::Error, error)] {
            fcntl_setfl(&source, OFlags::NONBLOCK)?;
            pipes.push(Pipe { stream, source: source.into(), lines: Lines::default(), open: true });
        }
        Ok(Pipes { last_lines: VecDeque::new(), last_output: None, prefix, pipes })
    }

    /// Pipes that may say more, to wait for.
    pub(super) fn open(&self) -> impl Iterator<Item = (usize, BorrowedFd<'_>)> {
        let open = self.pipes.iter().enumerate().filter(|(_, pipe)| pipe.open);
        open.map(|(index, pipe)| (index, pipe.source.as_fd()))
    }

    /// Passes on what is in a pipe, as much as is read at once; false if there is nothing now.
    pub(super) fn read(&mut self, index: usize, now: Instant, outlet: &mut Outlet) -> bool {
        let mut buffer = [0; READ_MAX];
        match self.pipes[index].source.read(&mut buffer) {
            Ok(0) => self.close(index, outlet),
            Ok(count) => {
                self.last_output = Some(now);
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
        let Pipes { prefix, pipes, last_lines, .. } = self;
        let Pipe { stream, lines, .. } = &mut pipes[index];
        match prefix {
            None => outlet.push(*stream, &[bytes]),
            Some(prefix) => lines.take(bytes, |line| show(line, *stream, prefix, last_lines, outlet)),
        }
    }

    /// Shows what has no line end: nothing will follow.
    fn close(&mut self, index: usize, outlet: &mut Outlet) {
        let Pipes { prefix, pipes, last_lines, .. } = self;
        let Pipe { stream, lines, open, .. } = &mut pipes[index];
        *open = false;
        if let Some(prefix) = prefix {
            lines.finish(|line| show(line, *stream, prefix, last_lines, outlet));
        }
    }

    /// Passes on the rest of what was written; true when that was all, also if somebody still could write.
    pub(super) fn drain(&mut self, now: Instant, outlet: &mut Outlet) -> bool {
        for index in 0..self.pipes.len() {
            while self.pipes[index].open {
                if outlet.is_full() {
                    return false;
                }
                if !self.read(index, now, outlet) && self.pipes[index].open {
                    self.close(index, outlet);
                }
            }
        }
        true
    }
}

fn show(line: &[u8], stream: Stream, prefix: &str, last_lines: &mut VecDeque<String>, outlet: &mut Outlet) {
    outlet.push(stream, &[prefix.as_bytes(), line, b"\n"]);
    if last_lines.len() == LAST_LINES {
        last_lines.pop_front();
    }
    let kept = &line[..line.len().min(LAST_LINE_MAX)];
    last_lines.push_back(String::from_utf8_lossy(kept).into_owned());
}
