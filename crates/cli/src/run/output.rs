//! From what ranks write to what people read.
//!
//! Each stream of a rank is cut into [`Lines`]; all lines go through one [`Outlet`] in the order in which they came, and
//! each is written whole before the next, also where standard output and standard error are the same file.
//!
//! The outlet writes only when the system says that a write will not wait: whoever pipes us into a pager and does not
//! read must still be able to stop the ranks. What it holds is bounded; while it is full, ranks are not read, and wait as
//! they would for a slow terminal.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use rustix::io::Errno;

/// A longer line is shown as several.
const LINE_MAX: usize = 64 << 10;
/// When this much waits to be written, ranks are not read.
const HELD_MAX: usize = 1 << 20;
/// A pipe that is ready takes this much without waiting: PIPE_BUF.
const WRITE_MAX: usize = 4096;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stream {
    Output,
    Error,
}

impl Stream {
    fn name(self) -> &'static str {
        match self {
            Stream::Output => "standard output",
            Stream::Error => "standard error",
        }
    }
}

/// Cuts what is read from a pipe into lines.
#[derive(Debug, Default)]
pub(super) struct Lines {
    unfinished: Vec<u8>,
}

impl Lines {
    /// Calls `each` with every line that is complete now, without its end.
    pub(super) fn take(&mut self, mut bytes: &[u8], mut each: impl FnMut(&[u8])) {
        while !bytes.is_empty() {
            let room = LINE_MAX - self.unfinished.len();
            let end = bytes.iter().take(room).position(|&byte| byte == b'\n');
            let taken = end.unwrap_or(room.min(bytes.len()));
            self.unfinished.extend_from_slice(&bytes[..taken]);
            bytes = &bytes[taken + usize::from(end.is_some())..];
            if end.is_some() || self.unfinished.len() == LINE_MAX {
                each(&self.unfinished);
                self.unfinished.clear();
            }
        }
    }

    /// Calls `each` with what has no line end and will get none.
    pub(super) fn finish(&mut self, each: impl FnOnce(&[u8])) {
        if !self.unfinished.is_empty() {
            each(&std::mem::take(&mut self.unfinished));
        }
    }
}

#[derive(Debug)]
pub(super) struct Outlet {
    output: Target,
    error: Target,
    queue: VecDeque<Chunk>,
    held: usize,
}

#[derive(Debug)]
struct Target {
    file: File,
    /// Nobody reads it any more, or its disk is full. The ranks go on: their work is worth more than their words.
    lost: bool,
}

/// Whole lines, or whatever came if it is not cut into lines.
#[derive(Debug)]
struct Chunk {
    stream: Stream,
    bytes: Vec<u8>,
    written: usize,
}

impl Outlet {
    /// To our own standard output and standard error.
    pub(super) fn standard() -> io::Result<Self> {
        let output = io::stdout().as_fd().try_clone_to_owned()?.into();
        let error = io::stderr().as_fd().try_clone_to_owned()?.into();
        Ok(Outlet::to(output, error))
    }

    fn to(output: File, error: File) -> Self {
        let target = |file| Target { file, lost: false };
        Outlet { output: target(output), error: target(error), queue: VecDeque::new(), held: 0 }
    }

    pub(super) fn push(&mut self, stream: Stream, parts: &[&[u8]]) {
        if self.target(stream).lost {
            return;
        }
        let len: usize = parts.iter().map(|part| part.len()).sum();
        self.held += len;
        // Many short lines in one write; the first one may be on its way already.
        let joined = self.queue.back().is_some_and(|last| {
            last.stream == stream && last.written == 0 && last.bytes.len() + len <= WRITE_MAX
        });
        if !joined {
            self.queue.push_back(Chunk { stream, bytes: Vec::with_capacity(len), written: 0 });
        }
        let last = self.queue.back_mut().expect("there is one now");
        parts.iter().for_each(|part| last.bytes.extend_from_slice(part));
    }

    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    pub(super) fn is_full(&self) -> bool {
        self.held >= HELD_MAX
    }

    /// What to wait for before [`Outlet::write`].
    pub(super) fn next_file(&self) -> Option<BorrowedFd<'_>> {
        let next = self.queue.front()?;
        Some(match next.stream {
            Stream::Output => self.output.file.as_fd(),
            Stream::Error => self.error.file.as_fd(),
        })
    }

    /// Writes once; does not wait if [`Outlet::next_file`] is ready.
    pub(super) fn write(&mut self) {
        let Some(Chunk { stream, bytes, written }) = self.queue.front() else { return };
        let stream = *stream;
        let end = bytes.len().min(written + WRITE_MAX);
        let file = match stream {
            Stream::Output => &self.output.file,
            Stream::Error => &self.error.file,
        };
        match rustix::io::write(file, &bytes[*written..end]) {
            Ok(count) => {
                let next = self.queue.front_mut().expect("it was there");
                next.written += count;
                self.held -= count;
                if next.written == next.bytes.len() {
                    self.queue.pop_front();
                }
            }
            Err(Errno::INTR | Errno::AGAIN) => {}
            Err(error) => self.lose(stream, error),
        }
    }

    fn lose(&mut self, stream: Stream, error: Errno) {
        self.target(stream).lost = true;
        self.queue.retain(|chunk| chunk.stream != stream);
        self.held = self.queue.iter().map(|chunk| chunk.bytes.len() - chunk.written).sum();
        if stream == Stream::Output {
            let name = stream.name();
            let note = format!("tenfold: cannot write to {name}: {error}; what ranks say there is lost\n");
            self.push(Stream::Error, &[note.as_bytes()]);
        }
    }

    fn target(&mut self, stream: Stream) -> &mut Target {
        match stream {
            Stream::Output => &mut self.output,
            Stream::Error => &mut self.error,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Seek as _};

    use super::*;

    fn lines(pieces: &[&[u8]]) -> Vec<Vec<u8>> {
        let (mut lines, mut found) = (Lines::default(), Vec::new());
        for piece in pieces {
            lines.take(piece, |line| found.push(line.to_vec()));
        }
        lines.finish(|line| found.push(line.to_vec()));
        found
    }

    #[test]
    fn lines_are_the_same_however_they_arrive() {
        let text = b"first\n\nthird\r\nlast";
        let expected = [&b"first"[..], b"", b"third\r", b"last"];
        for cut in 0..=text.len() {
            assert_eq!(lines(&[&text[..cut], &text[cut..]]), expected, "cut at {cut}");
        }
        let bytes: Vec<&[u8]> = text.chunks(1).collect();
        assert_eq!(lines(&bytes), expected);
        assert_eq!(lines(&[b"ended\n"]), [b"ended"]);
    }

    #[test]
    fn a_line_without_end_is_shown_in_pieces_of_the_longest_length() {
        let long = vec![b'x'; 2 * LINE_MAX + 1];
        let lengths: Vec<usize> = lines(&[&long]).iter().map(Vec::len).collect();
        assert_eq!(lengths, [LINE_MAX, LINE_MAX, 1]);
    }

    fn both_to(file: &File) -> Outlet {
        Outlet::to(file.try_clone().unwrap(), file.try_clone().unwrap())
    }

    #[test]
    fn a_long_line_on_one_stream_is_whole_before_the_next_one_on_the_other() {
        let mut file = tempfile::tempfile().unwrap();
        let mut outlet = both_to(&file);
        let long = vec![b'o'; 3 * WRITE_MAX];
        outlet.push(Stream::Output, &[&long, b"\n"]);
        outlet.push(Stream::Error, &[b"e\n"]);
        outlet.push(Stream::Output, &[b"o\n"]);
        while outlet.next_file().is_some() {
            outlet.write();
        }
        assert!(outlet.is_empty() && outlet.held == 0);
        let mut text = Vec::new();
        file.rewind().unwrap();
        file.read_to_end(&mut text).unwrap();
        assert_eq!(text, [&long[..], b"\ne\no\n"].concat());
    }

    #[test]
    fn it_is_full_until_somebody_reads() {
        let mut outlet = both_to(&tempfile::tempfile().unwrap());
        let line = vec![b'x'; 1000];
        while !outlet.is_full() {
            outlet.push(Stream::Output, &[&line]);
        }
        assert!(outlet.held < HELD_MAX + line.len());
        outlet.write();
        assert!(!outlet.is_full());
    }

    #[test]
    fn a_reader_that_went_away_is_told_once_and_not_waited_for() {
        let (reader, writer) = io::pipe().unwrap();
        drop(reader);
        let mut errors = tempfile::tempfile().unwrap();
        let mut outlet =
            Outlet::to(File::from(std::os::fd::OwnedFd::from(writer)), errors.try_clone().unwrap());
        for _ in 0..3 {
            outlet.push(Stream::Output, &[b"lost\n"]);
            outlet.push(Stream::Error, &[b"kept\n"]);
            while !outlet.is_empty() {
                outlet.write();
            }
        }
        let mut text = String::new();
        errors.rewind().unwrap();
        errors.read_to_string(&mut text).unwrap();
        let note = "tenfold: cannot write to standard output: Broken pipe (os error 32); what ranks say there is lost\n";
        assert_eq!(text, format!("kept\n{note}kept\nkept\n"));
    }
}
