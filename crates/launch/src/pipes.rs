//! The read ends of one rank's streams: passes its output on to the console and to files.
//!
//! Nothing here blocks: the launcher asks the system which pipes have data, and reads those. Some text is
//! shown with a delay (see `lines`), so the launcher also asks [`Pipes::next_wake`], and calls
//! [`Pipes::wake`] in each turn of its loop.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Instant;

use rustix::fs::{OFlags, fcntl_setfl};

use super::failure::{ErrorFile, Words, tail};
use super::lines::{Lines, Piece};
use super::logs::{Copies, Destination, RankLogs, Traces};
use super::output::{Outlet, Prefix, Stream, without_cursor_moves};

/// How much of a rank's output is kept for the report of its failure.
const LAST_LINES: usize = 12;
const LAST_LINE_MAX: usize = 1000;
/// How much is read from a pipe in one call: what a Linux pipe holds.
const READ_MAX: usize = 64 << 10;
/// Reads of one pipe to find out why its rank failed. If the rank writes faster than we read, this is enough.
const CATCH_UP_READS: usize = 32;

#[derive(Debug)]
pub(super) struct Pipes {
    /// Whose they are, for notes: `rank 3`.
    speaker: String,
    /// What the rank wrote last, on either stream.
    last_lines: LastLines,
    last_output: Option<Instant>,
    /// The prefix of each line; none for a single rank, whose bytes are passed on unchanged.
    prefix: Option<Prefix>,
    pipes: Vec<Pipe>,
    traces: Traces,
}

#[derive(Debug)]
struct Pipe {
    stream: Stream,
    source: File,
    lines: Lines,
    copies: Copies,
    open: bool,
}

impl Pipes {
    /// `logs` is what the process was given, `output` and `error` the ends that we keep (none for a file).
    pub(super) fn new(
        speaker: String,
        prefix: Option<Prefix>,
        logs: RankLogs,
        output: Option<OwnedFd>,
        error: Option<OwnedFd>,
    ) -> io::Result<Self> {
        let mut pipes = Vec::new();
        let streams = [(Stream::Output, logs.output, output), (Stream::Error, logs.error, error)];
        for (stream, destination, source) in streams {
            let (Destination::Pipe(copies), Some(source)) = (destination, source) else { continue };
            fcntl_setfl(&source, OFlags::NONBLOCK)?;
            pipes.push(Pipe { stream, source: source.into(), lines: Lines::default(), copies, open: true });
        }
        let (last_lines, traces) = (LastLines::default(), logs.traces);
        Ok(Pipes { speaker, last_lines, last_output: None, prefix, pipes, traces })
    }

    /// From now on this is the output of another speaker: a spare has become a rank. What it has written is
    /// shown as its own before that.
    pub(super) fn hand_over(
        &mut self,
        speaker: String,
        prefix: Option<Prefix>,
        logs: RankLogs,
        now: Instant,
        outlet: &mut Outlet,
    ) {
        self.catch_up(now, outlet);
        let Pipes { prefix: old, pipes, last_lines, .. } = self;
        for (pipe, destination) in pipes.iter_mut().zip([logs.output, logs.error]) {
            let Pipe { stream, lines, copies, .. } = pipe;
            copies.finish(old.as_ref().map_or(&b""[..], |prefix| &prefix.plain));
            lines.finish(|piece| show(piece, *stream, old.as_ref(), copies, last_lines, outlet));
            *lines = Lines::default();
            if let Destination::Pipe(new) = destination {
                *copies = new;
            }
        }
        (self.speaker, self.prefix) = (speaker, prefix);
        // It has learned at its start where its error file belongs.
        let error_file = self.traces.error_file.take();
        self.traces = Traces { error_file, log_files: logs.traces.log_files, unread: Vec::new() };
    }

    /// Pipes that may have more data, to wait for.
    pub(super) fn open(&self) -> impl Iterator<Item = (usize, BorrowedFd<'_>)> {
        let open = self.pipes.iter().enumerate().filter(|(_, pipe)| pipe.open);
        open.map(|(index, pipe)| (index, pipe.source.as_fd()))
    }

    /// The system's numbers of the pipes.
    pub(super) fn numbers(&self) -> impl Iterator<Item = u64> {
        self.pipes.iter().filter_map(|pipe| Some(rustix::fs::fstat(&pipe.source).ok()?.st_ino))
    }

    /// When the rank last wrote anything through these pipes.
    pub(super) fn last_output(&self) -> Option<Instant> {
        self.last_output
    }

    /// What the rank left behind that shows why it failed; call [`Pipes::catch_up`] before.
    pub(super) fn words(&self) -> Words {
        let is_error = |path: &&PathBuf| path.ends_with("stderr.log");
        let unread = |wanted: bool| self.traces.unread.iter().filter(move |path| is_error(path) == wanted);
        let seen = self.last_lines.lines.iter().map(|(_, line)| line.clone());
        let lines = unread(false).flat_map(|path| tail(path)).chain(seen);
        let lines: Vec<String> = lines.chain(unread(true).flat_map(|path| tail(path))).collect();
        Words {
            last_lines: lines[lines.len().saturating_sub(LAST_LINES)..].to_vec(),
            are_on_screen: self.prefix.is_none()
                && self.traces.unread.is_empty()
                && self.pipes.iter().all(|pipe| pipe.copies.on_console),
            error_file: self.traces.error_file.as_deref().and_then(ErrorFile::read),
            log_files: self.traces.log_files.clone(),
            full: self.traces.log_files.iter().find(|path| is_disk_full(path)).cloned(),
        }
    }

    /// When to [`Pipes::wake`] if no data arrives before.
    pub(super) fn next_wake(&self) -> Option<Instant> {
        self.pipes.iter().filter_map(|pipe| pipe.lines.next_wake()).min()
    }

    /// Shows what has waited long enough.
    pub(super) fn wake(&mut self, now: Instant, outlet: &mut Outlet) {
        let Pipes { pipes, prefix, last_lines, .. } = self;
        for Pipe { stream, lines, copies, .. } in pipes {
            lines.wake(now, |piece| show(piece, *stream, prefix.as_ref(), copies, last_lines, outlet));
        }
    }

    /// Passes on the data in a pipe, at most one read; false if there is none now.
    pub(super) fn read(&mut self, index: usize, now: Instant, outlet: &mut Outlet) -> bool {
        let mut buffer = [0; READ_MAX];
        match self.pipes[index].source.read(&mut buffer) {
            Ok(0) => self.close(index, outlet),
            Ok(count) => {
                self.last_output = Some(now);
                self.pass_on(index, &buffer[..count], now, outlet);
                return true;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return true,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(_) => self.close(index, outlet),
        }
        false
    }

    fn pass_on(&mut self, index: usize, bytes: &[u8], now: Instant, outlet: &mut Outlet) {
        let Pipes { speaker, prefix, pipes, last_lines, .. } = self;
        let Pipe { stream, lines, copies, .. } = &mut pipes[index];
        let plain = prefix.as_ref().map_or(&b""[..], |prefix| &prefix.plain);
        for lost in copies.write(bytes, plain, speaker) {
            outlet.note(&lost);
        }
        if prefix.is_none() && copies.on_console {
            outlet.push(*stream, &[bytes]);
        }
        lines.take(bytes, now, |piece| show(piece, *stream, prefix.as_ref(), copies, last_lines, outlet));
    }

    /// Shows text without a line end: nothing will follow.
    fn close(&mut self, index: usize, outlet: &mut Outlet) {
        let Pipes { prefix, pipes, last_lines, .. } = self;
        let Pipe { stream, lines, copies, open, .. } = &mut pipes[index];
        *open = false;
        copies.finish(prefix.as_ref().map_or(&b""[..], |prefix| &prefix.plain));
        lines.finish(|piece| show(piece, *stream, prefix.as_ref(), copies, last_lines, outlet));
    }

    /// Passes on what has been written, so that the last lines of a rank that just exited are known. Pipes
    /// stay open, because a process that it left behind may hold them.
    pub(super) fn catch_up(&mut self, now: Instant, outlet: &mut Outlet) {
        for index in 0..self.pipes.len() {
            let mut reads = 0;
            while self.pipes[index].open && reads < CATCH_UP_READS && self.read(index, now, outlet) {
                reads += 1;
            }
        }
    }

    /// Passes on the rest of what was written; true when that was all, even if a process could still write.
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

fn is_disk_full(path: &Path) -> bool {
    rustix::fs::statvfs(path).is_ok_and(|disk| disk.f_blocks > 0 && disk.f_bavail == 0)
}

fn show(
    piece: Piece<'_>,
    stream: Stream,
    prefix: Option<&Prefix>,
    copies: &Copies,
    last_lines: &mut LastLines,
    outlet: &mut Outlet,
) {
    let (Piece::Line(text) | Piece::Update(text)) = piece;
    if let Some(prefix) = prefix
        && copies.on_console
    {
        let line = if outlet.is_terminal(stream) { without_cursor_moves(text) } else { text.into() };
        outlet.push(stream, &[prefix.on(stream), &line, b"\n"]);
    }
    last_lines.keep(stream, piece);
}

#[derive(Debug, Default)]
struct LastLines {
    /// With the stream of an update, which the next one replaces.
    lines: VecDeque<(Option<Stream>, String)>,
}

impl LastLines {
    fn keep(&mut self, stream: Stream, piece: Piece<'_>) {
        let (text, updated) = match piece {
            Piece::Line(text) => (text, None),
            Piece::Update(text) => (text, Some(stream)),
        };
        let is_replaced = updated.is_some() && self.lines.back().is_some_and(|(last, _)| *last == updated);
        if is_replaced {
            self.lines.pop_back();
        } else if self.lines.len() == LAST_LINES {
            self.lines.pop_front();
        }
        let kept = &text[..text.len().min(LAST_LINE_MAX)];
        self.lines.push_back((updated, String::from_utf8_lossy(kept).into_owned()));
    }
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "a time to count from")]
mod tests {
    use std::io::{Seek as _, Write as _};

    use super::super::logs::{LogOptions, Logs, Writer};
    use super::super::output::Speaker;
    use super::super::rank::Seat;
    use super::*;

    fn text_of(mut file: &File) -> String {
        let mut text = String::new();
        file.rewind().unwrap();
        file.read_to_string(&mut text).unwrap();
        text
    }

    /// Rank 3 of 8 with a log folder: its pipes, the ends that it writes, the console, and its files.
    fn rank() -> (Pipes, Vec<io::PipeWriter>, Outlet, File, tempfile::TempDir, Vec<PathBuf>) {
        let folder = tempfile::tempdir().unwrap();
        let options = LogOptions { folder: Some(folder.path().into()), ..LogOptions::default() };
        let logs =
            Logs::open(options, "job", "tenfold-run-test-").unwrap().start_round(0, 1).unwrap().remove(0);
        let files = logs.traces.log_files.clone();
        let console = tempfile::tempfile().unwrap();
        let outlet = Outlet::to(console.try_clone().unwrap(), console.try_clone().unwrap(), |_| None);
        let seat = Some(Seat { number: 3, local_rank: 0 });
        let speaker = Speaker { seat, world_size: 8, role: "default", host: "b7" };
        let prefix = Prefix::new(&speaker, None, &outlet);
        let ((output, out), (error, err)) = (io::pipe().unwrap(), io::pipe().unwrap());
        let pipes =
            Pipes::new("rank 3".into(), Some(prefix), logs, Some(output.into()), Some(error.into())).unwrap();
        (pipes, vec![out, err], outlet, console, folder, files)
    }

    #[test]
    fn files_hold_the_bytes_and_the_console_shows_lines() {
        let (mut pipes, mut ends, mut outlet, console, _folder, files) = rank();
        let now = Instant::now();
        assert_eq!(pipes.open().count(), 2);
        assert_eq!(pipes.last_output(), None);
        assert!(!pipes.read(0, now, &mut outlet));
        ends[0].write_all(b"1 %\r2 %\r3 %\r\nsome").unwrap();
        ends[1].write_all(b"oops\r\n").unwrap();
        pipes.catch_up(now, &mut outlet);
        assert_eq!(pipes.last_output(), Some(now));
        let later = pipes.next_wake().unwrap();
        assert!(later > now);
        pipes.wake(later, &mut outlet);
        assert_eq!(pipes.next_wake(), None);
        ends[0].write_all(b" text").unwrap();
        drop(ends);
        assert!(pipes.drain(later, &mut outlet));
        assert_eq!(pipes.open().count(), 0);
        while !outlet.is_empty() {
            outlet.write();
        }
        assert_eq!(text_of(&console), "[3] 1 %\n[3] 3 %\n[3] oops\n[3] some\n[3]  text\n");
        let kept: Vec<String> = files.iter().map(|file| std::fs::read_to_string(file).unwrap()).collect();
        assert_eq!(kept, ["oops\r\n", "1 %\r2 %\r3 %\r\nsome text"]);
        let words = pipes.words();
        assert_eq!(words.last_lines, ["1 %", "3 %", "oops", "some", " text"]);
        assert!(!words.are_on_screen && words.error_file.is_none());
        assert_eq!(words.log_files, files);
    }

    #[test]
    fn a_spare_that_becomes_a_rank_is_shown_as_that_rank_and_writes_its_files() {
        let folder = tempfile::tempdir().unwrap();
        let options = LogOptions { folder: Some(folder.path().into()), ..LogOptions::default() };
        let mut all = Logs::open(options, "job", "tenfold-run-test-").unwrap();
        all.start_round(0, 1).unwrap();
        let console = tempfile::tempfile().unwrap();
        let mut outlet = Outlet::to(console.try_clone().unwrap(), console.try_clone().unwrap(), |_| None);
        let prefix = |seat, outlet: &Outlet| {
            let speaker = Speaker { seat, world_size: 2, role: "default", host: "b7" };
            Some(Prefix::new(&speaker, None, outlet))
        };
        let ((output, mut out), (error, _err)) = (io::pipe().unwrap(), io::pipe().unwrap());
        let logs = all.of(0, &Writer::spare("0-2")).unwrap();
        let (own, own_error) = (logs.traces.log_files[1].clone(), logs.traces.error_file.clone());
        let ends = (Some(output.into()), Some(error.into()));
        let mut pipes = Pipes::new("the spare".into(), prefix(None, &outlet), logs, ends.0, ends.1).unwrap();
        out.write_all(b"ready\nnot yet").unwrap();
        let logs = all.of(0, &Writer::former_spare(0, "0-2")).unwrap();
        let file = logs.traces.log_files[1].clone();
        let seat = Some(Seat { number: 1, local_rank: 0 });
        let now = Instant::now();
        pipes.hand_over("rank 1".into(), prefix(seat, &outlet), logs, now, &mut outlet);
        out.write_all(b"working\n").unwrap();
        drop(out);
        pipes.drain(now, &mut outlet);
        while !outlet.is_empty() {
            outlet.write();
        }
        assert_eq!(text_of(&console), "[spare] ready\n[spare] not yet\n[1] working\n");
        assert_eq!(std::fs::read_to_string(own).unwrap(), "ready\nnot yet");
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "working\n");
        assert_eq!(pipes.words().log_files[1], file);
        assert_eq!(pipes.traces.error_file, own_error, "it has its path in its environment");
    }

    #[test]
    fn updates_do_not_push_other_lines_out_of_the_last_ones() {
        let mut last = LastLines::default();
        last.keep(Stream::Output, Piece::Line(b"first"));
        for _ in 0..100 {
            last.keep(Stream::Error, Piece::Update(b"50 %"));
        }
        last.keep(Stream::Output, Piece::Update(b"other"));
        let lines: Vec<&str> = last.lines.iter().map(|(_, line)| line.as_str()).collect();
        assert_eq!(lines, ["first", "50 %", "other"]);
        for _ in 0..100 {
            last.keep(Stream::Error, Piece::Line(&[b'x'; 2 * LAST_LINE_MAX]));
        }
        assert!(last.lines.len() == LAST_LINES && last.lines[0].1.len() == LAST_LINE_MAX);
    }

    #[test]
    fn a_ranks_own_file_shows_why_it_failed() {
        let folder = tempfile::tempdir().unwrap();
        let redirects = Some(super::super::logs::parse_selection("2").unwrap());
        let options = LogOptions { folder: Some(folder.path().into()), redirects, ..LogOptions::default() };
        let logs =
            Logs::open(options, "job", "tenfold-run-test-").unwrap().start_round(0, 1).unwrap().remove(0);
        std::fs::write(&logs.traces.unread[0], "why\n").unwrap();
        std::fs::write(logs.traces.error_file.as_ref().unwrap(), "{}").unwrap();
        let (output, mut end) = io::pipe().unwrap();
        let mut pipes = Pipes::new("rank 0".into(), None, logs, Some(output.into()), None).unwrap();
        end.write_all(b"working\n").unwrap();
        let console = tempfile::tempfile().unwrap();
        let mut outlet = Outlet::to(console.try_clone().unwrap(), console, |_| None);
        pipes.catch_up(Instant::now(), &mut outlet);
        let words = pipes.words();
        assert_eq!(words.last_lines, ["working", "why"]);
        assert!(!words.are_on_screen && words.error_file.unwrap().is_err());
    }
}
