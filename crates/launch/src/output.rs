//! Writes the output of ranks to the console.
//!
//! All lines of ranks, notes of the launcher and the status line go through one [`Outlet`] in the order in
//! which they arrived. Each is written whole before the next, even if standard output and standard error are
//! the same file. A [`Prefix`] before each line names its rank.
//!
//! The outlet writes only when a write will not block: if the output goes to a pager and the user does not
//! scroll, it must still be possible to stop the ranks. What it holds is bounded. While it is full, ranks are
//! not read, and wait as they would for a slow terminal.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, IsTerminal as _};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Instant;

use rustix::io::Errno;
use tenfold_console::{command_len, printable};

use super::rank::Seat;
use super::status::{Status, StatusLine};

/// When this much waits to be written, ranks are not read.
const HELD_MAX: usize = 1 << 20;
/// A pipe that is ready accepts this much without blocking: PIPE_BUF.
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

#[derive(Debug)]
pub(super) struct Outlet {
    output: Target,
    error: Target,
    queue: VecDeque<Chunk>,
    held: usize,
    /// Drawn where standard error is a terminal.
    status: StatusLine,
}

#[derive(Debug)]
struct Target {
    file: File,
    is_terminal: bool,
    /// Prefixes are coloured.
    colours: bool,
    /// The reader has closed it, or its disk is full. The ranks continue: their work matters more than their
    /// output.
    lost: bool,
}

/// Whole lines, or raw bytes if the stream is not cut into lines.
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
        Ok(Outlet::to(output, error, |name| std::env::var_os(name)))
    }

    pub(super) fn to(output: File, error: File, variable: impl Fn(&str) -> Option<OsString>) -> Self {
        let is_set = |name| variable(name).is_some_and(|value| !value.is_empty());
        let is_dumb = variable("TERM").is_some_and(|terminal| terminal == "dumb");
        let is_forced = variable("CLICOLOR_FORCE").is_some_and(|value| !value.is_empty() && value != "0");
        let target = |file: File| {
            let is_terminal = file.is_terminal() && !is_dumb;
            let colours = !is_set("NO_COLOR") && (is_terminal || is_forced);
            Target { file, is_terminal, colours, lost: false }
        };
        Outlet {
            output: target(output),
            error: target(error),
            queue: VecDeque::new(),
            held: 0,
            status: StatusLine::default(),
        }
    }

    /// Output for the user: `parts` is whole lines, or raw bytes if the stream is not cut into lines.
    pub(super) fn push(&mut self, stream: Stream, parts: &[&[u8]]) {
        if self.is_terminal(stream)
            && let Some(wipe) = self.status.make_way()
        {
            self.enqueue(Stream::Error, &[wipe.as_bytes()]);
        }
        self.enqueue(stream, parts);
    }

    /// A line of the launcher itself: `tenfold: …`. It may contain names and texts that came from other
    /// nodes.
    pub(super) fn note(&mut self, line: &str) {
        self.push(Stream::Error, &[b"tenfold: ", printable(line).as_bytes(), b"\n"]);
    }

    /// Sets the live line at the bottom of a terminal; elsewhere nothing is shown. None removes it, which
    /// must happen before the end. It is never set for a rank whose raw bytes are passed on.
    pub(super) fn set_status(&mut self, status: Option<Status>) {
        if !self.error.is_terminal {
            return;
        }
        if status.is_none()
            && let Some(wipe) = self.status.make_way()
        {
            self.enqueue(Stream::Error, &[wipe.as_bytes()]);
        }
        self.status.set(status);
    }

    /// Draws the status line if it is due. Call it in each turn of the loop, before waiting.
    pub(super) fn tick(&mut self, now: Instant) {
        if !self.queue.is_empty() || self.status.next_draw().is_none_or(|at| now < at) {
            return;
        }
        let columns = rustix::termios::tcgetwinsize(&self.error.file).map_or(0, |size| size.ws_col);
        // The last column is left free: some terminals wrap when it is written to.
        let width = if columns == 0 { 79 } else { usize::from(columns) - 1 };
        if let Some(text) = self.status.draw(now, width) {
            self.enqueue(Stream::Error, &[text.as_bytes()]);
        }
    }

    /// When to [`Outlet::tick`] if nothing else happens before.
    pub(super) fn next_wake(&self) -> Option<Instant> {
        self.status.next_draw().filter(|_| self.queue.is_empty())
    }

    fn enqueue(&mut self, stream: Stream, parts: &[&[u8]]) {
        if self.target(stream).lost {
            return;
        }
        let len: usize = parts.iter().map(|part| part.len()).sum();
        self.held += len;
        // Many short lines in one write; the first one may be partly written already.
        let joined = self.queue.back().is_some_and(|last| {
            last.stream == stream && last.written == 0 && last.bytes.len() + len <= WRITE_MAX
        });
        if !joined {
            self.queue.push_back(Chunk { stream, bytes: Vec::with_capacity(len), written: 0 });
        }
        let last = self.queue.back_mut().expect("there is one now");
        parts.iter().for_each(|part| last.bytes.extend_from_slice(part));
    }

    pub(super) fn is_terminal(&self, stream: Stream) -> bool {
        match stream {
            Stream::Output => self.output.is_terminal,
            Stream::Error => self.error.is_terminal,
        }
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
            let note =
                format!("tenfold: cannot write to {name}: {error}; further output of ranks there is lost\n");
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

/// The speaker of a line, as a template can name it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Speaker<'a> {
    /// None for a spare.
    pub(super) seat: Option<Seat>,
    pub(super) world_size: usize,
    pub(super) role: &'a str,
    pub(super) host: &'a str,
}

impl Speaker<'_> {
    fn name(&self, number: impl Fn(Seat) -> usize) -> String {
        self.seat.map_or_else(|| "spare".into(), |seat| number(seat).to_string())
    }
}

/// The prefix of each line of a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Prefix {
    /// For files.
    pub(super) plain: Vec<u8>,
    output: Vec<u8>,
    error: Vec<u8>,
}

impl Prefix {
    /// `[3] `, or what the template makes of it (torchrun's `--log-line-prefix-template`).
    pub(super) fn new(speaker: &Speaker<'_>, template: Option<&str>, outlet: &Outlet) -> Self {
        let plain = match template {
            Some(template) => fill(template, speaker),
            None => {
                let width = speaker.world_size.saturating_sub(1).to_string().len() + 3;
                format!("{:width$}", format!("[{}] ", speaker.name(|seat| seat.number)))
            }
        };
        let colour = speaker.seat.map_or(0, |seat| seat.number);
        let on = |target: &Target| if target.colours { paint(&plain, colour) } else { plain.clone() };
        let (output, error) = (on(&outlet.output).into_bytes(), on(&outlet.error).into_bytes());
        Prefix { plain: plain.into_bytes(), output, error }
    }

    pub(super) fn on(&self, stream: Stream) -> &[u8] {
        match stream {
            Stream::Output => &self.output,
            Stream::Error => &self.error,
        }
    }
}

/// Neighbouring ranks differ. Red is reserved for errors; black and white may be the background.
fn paint(text: &str, rank: usize) -> String {
    const COLOURS: [u8; 10] = [36, 33, 35, 32, 34, 96, 93, 95, 92, 94];
    let words = text.trim_end();
    let (colour, blanks) = (COLOURS[rank % COLOURS.len()], &text[words.len()..]);
    format!("\x1b[{colour}m{words}\x1b[0m{blanks}")
}

/// Fills in `$name` and `${name}` as Python's `string.Template.safe_substitute` does, which leaves unknown
/// names unchanged.
fn fill(template: &str, speaker: &Speaker<'_>) -> String {
    let (mut filled, mut rest) = (String::new(), template);
    while let Some((before, after)) = rest.split_once('$') {
        filled += before;
        if let Some(after) = after.strip_prefix('$') {
            filled.push('$');
            rest = after;
            continue;
        }
        let braced = after.strip_prefix('{').and_then(|inner| inner.split_once('}'));
        let is_of_name = |character: char| character.is_ascii_alphanumeric() || character == '_';
        let (name, behind) = braced.unwrap_or_else(|| {
            after.split_at(after.find(|character| !is_of_name(character)).unwrap_or(after.len()))
        });
        match name {
            "rank" => filled += &speaker.name(|seat| seat.number),
            "local_rank" => filled += &speaker.name(|seat| seat.local_rank),
            "role_name" => filled += speaker.role,
            "hostname" => filled += speaker.host,
            _ => {
                filled.push('$');
                rest = after;
                continue;
            }
        }
        rest = behind;
    }
    filled + rest
}

/// A rank's line without the terminal commands that could change lines of other ranks; colours stay.
///
/// Borrowed unless something is removed.
pub(super) fn without_cursor_moves(line: &[u8]) -> Cow<'_, [u8]> {
    if !line.contains(&0x1b) {
        return Cow::Borrowed(line);
    }
    let (mut kept, mut rest) = (Vec::with_capacity(line.len() + RESET.len()), line);
    while let Some(at) = rest.iter().position(|&byte| byte == 0x1b) {
        kept.extend_from_slice(&rest[..at]);
        let command = &rest[at..at + command_len(&rest[at..])];
        if is_harmless(command) {
            kept.extend_from_slice(command);
        }
        rest = &rest[at + command.len()..];
    }
    kept.extend_from_slice(rest);
    if !kept.ends_with(RESET) && kept.contains(&0x1b) {
        kept.extend_from_slice(RESET); // or it would colour the lines of other ranks
    }
    Cow::Owned(kept)
}

const RESET: &[u8] = b"\x1b[0m";

/// Colours, and links (`ESC ] 8`): they do not move the cursor. Some other `ESC ]` commands write to the
/// clipboard, or make the terminal send an answer that the shell would read as input.
fn is_harmless(command: &[u8]) -> bool {
    let is_colour = command.starts_with(b"\x1b[") && command.ends_with(b"m");
    let has_end = command.ends_with(b"\x07") || command.ends_with(b"\x1b\\");
    is_colour || command.starts_with(b"\x1b]8;") && has_end
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Seek as _};

    use super::*;

    fn both_to(file: &File) -> Outlet {
        Outlet::to(file.try_clone().unwrap(), file.try_clone().unwrap(), |_| None)
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
    fn it_is_full_until_the_reader_reads() {
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
    fn a_closed_reader_is_reported_once_and_not_waited_for() {
        let (reader, writer) = io::pipe().unwrap();
        drop(reader);
        let mut errors = tempfile::tempfile().unwrap();
        let mut outlet =
            Outlet::to(File::from(std::os::fd::OwnedFd::from(writer)), errors.try_clone().unwrap(), |_| None);
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
        let note = "tenfold: cannot write to standard output: Broken pipe (os error 32); further output of ranks there is lost\n";
        assert_eq!(text, format!("kept\n{note}kept\nkept\n"));
    }

    fn speaker(rank: usize, world_size: usize) -> Speaker<'static> {
        let seat = Some(Seat { number: rank, local_rank: rank % 2 });
        Speaker { seat, world_size, role: "trainer", host: "b7" }
    }

    #[test]
    fn a_prefix_is_as_wide_as_the_widest_and_says_what_the_template_asks_for() {
        let outlet = both_to(&tempfile::tempfile().unwrap());
        let prefix = |rank, world_size, template| {
            let prefix = Prefix::new(&speaker(rank, world_size), template, &outlet);
            assert_eq!(
                (prefix.on(Stream::Output), prefix.on(Stream::Error)),
                (&*prefix.plain, &*prefix.plain)
            );
            String::from_utf8(prefix.plain).unwrap()
        };
        assert_eq!(prefix(3, 10, None), "[3] ");
        assert_eq!(prefix(3, 11, None), "[3]  ");
        assert_eq!(prefix(10, 11, None), "[10] ");
        assert_eq!(
            prefix(3, 4, Some("${hostname}:[${role_name}${local_rank}] $rank: ")),
            "b7:[trainer1] 3: "
        );
        assert_eq!(
            prefix(3, 4, Some("$$rank $other ${rank $ ${} $ranks")),
            "$rank $other ${rank $ ${} $ranks"
        );
    }

    #[test]
    fn prefixes_are_coloured_on_terminals_unless_the_user_says_otherwise() {
        let file = || tempfile::tempfile().unwrap();
        let (_controller, terminal) = terminal();
        let coloured = |variables: &[(&str, &str)]| {
            let find = |name: &str| {
                variables.iter().find(|(known, _)| *known == name).map(|(_, value)| OsString::from(value))
            };
            let outlet = Outlet::to(file(), terminal.try_clone().unwrap(), find);
            let prefix = Prefix::new(&speaker(1, 2), None, &outlet);
            assert_eq!(prefix.plain, b"[1] ");
            [Stream::Output, Stream::Error].map(|stream| match prefix.on(stream) {
                b"[1] " => false,
                b"\x1b[33m[1]\x1b[0m " => true,
                other => panic!("{}", String::from_utf8_lossy(other)),
            })
        };
        assert_eq!(coloured(&[("TERM", "xterm")]), [false, true]);
        assert_eq!(coloured(&[("NO_COLOR", "1")]), [false, false]);
        assert_eq!(coloured(&[("NO_COLOR", "")]), [false, true]);
        assert_eq!(coloured(&[("TERM", "dumb")]), [false, false]);
        assert_eq!(coloured(&[("CLICOLOR_FORCE", "1")]), [true, true]);
        assert_eq!(coloured(&[("CLICOLOR_FORCE", "0")]), [false, true]);
        assert_eq!(coloured(&[("CLICOLOR_FORCE", "1"), ("NO_COLOR", "1")]), [false, false]);
    }

    #[test]
    fn a_rank_cannot_write_into_lines_of_others() {
        let cleaned = |line: &[u8]| String::from_utf8(without_cursor_moves(line).into_owned()).unwrap();
        assert_eq!(cleaned(b"plain"), "plain");
        assert_eq!(cleaned(b"a\x1b[A\x1b[2Kb\x1b[12;3Hc\x1bM"), "abc");
        assert_eq!(cleaned(b"\x1b[1;31mred"), "\x1b[1;31mred\x1b[0m");
        assert_eq!(cleaned(b"\x1b[31mred\x1b[0m"), "\x1b[31mred\x1b[0m");
        assert_eq!(cleaned(b"\x1b[1mbold\x1b(B\x1b[m"), "\x1b[1mbold\x1b[m\x1b[0m"); // what `tput sgr0` writes
        let link = "\x1b]8;;http://x\x1b\\a link\x1b]8;;\x07";
        assert_eq!(cleaned(link.as_bytes()), format!("{link}\x1b[0m"));
        assert_eq!(cleaned(b"no end \x1b]0;title"), "no end ");
        assert_eq!(cleaned(b"clipboard \x1b]52;c;cHduZWQ=\x07\x1b]52;c;?\x1b\\"), "clipboard ");
        assert_eq!(cleaned("\x1bä\x1b[ä\x1b(ä".as_bytes()), "äää");
        assert_eq!(cleaned(b"cut off \x1b[3"), "cut off ");
        assert_eq!(cleaned(b"cut off \x1b"), "cut off ");
        assert_eq!(without_cursor_moves(b"\xff\x1b[K\xfe").as_ref(), b"\xff\xfe");
    }

    /// Names of hosts and reasons of failures come from the store, where other nodes wrote them.
    #[test]
    fn a_note_has_no_terminal_commands() {
        let mut file = tempfile::tempfile().unwrap();
        let mut outlet = both_to(&file);
        outlet.note("node x\x1b]52;c;cHduZWQ=\x07\x1b[2J\u{9b}2J\r joined\n  hint: none");
        while !outlet.is_empty() {
            outlet.write();
        }
        let mut text = String::new();
        file.rewind().unwrap();
        file.read_to_string(&mut text).unwrap();
        assert_eq!(text, "tenfold: node x2J joined\n  hint: none\n");
    }

    /// A pseudo-terminal of 40 columns: the user's end and ours.
    fn terminal() -> (File, File) {
        use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
        let controller = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&controller).unwrap();
        unlockpt(&controller).unwrap();
        let name = ptsname(&controller, Vec::new()).unwrap();
        let flags = rustix::fs::OFlags::RDWR | rustix::fs::OFlags::NOCTTY;
        let terminal = rustix::fs::open(name, flags, rustix::fs::Mode::empty()).unwrap();
        let size = rustix::termios::Winsize { ws_row: 24, ws_col: 40, ws_xpixel: 0, ws_ypixel: 0 };
        rustix::termios::tcsetwinsize(&terminal, size).unwrap();
        (controller.into(), terminal.into())
    }

    fn flush(outlet: &mut Outlet) {
        while !outlet.is_empty() {
            outlet.write();
        }
    }

    #[test]
    #[expect(clippy::disallowed_methods, reason = "a time to count from")]
    fn the_status_line_makes_way_for_lines_and_comes_back() {
        use std::time::Duration;
        let (mut controller, terminal) = terminal();
        let mut outlet = Outlet::to(terminal.try_clone().unwrap(), terminal, |_| None);
        let start = Instant::now();
        let at = |milliseconds| start + Duration::from_millis(milliseconds);
        let status = Status { ranks: 4, ranks_running: 4, ..Status::new(start) };
        outlet.set_status(Some(status.clone()));
        assert_eq!(outlet.next_wake(), Some(at(50)));
        outlet.tick(at(50));
        flush(&mut outlet);
        assert_eq!(outlet.next_wake(), Some(at(1000)));
        outlet.push(Stream::Output, &[b"[0] one\n"]);
        outlet.push(Stream::Output, &[b"[1] two\n"]);
        outlet.tick(at(200)); // not before the lines are written
        flush(&mut outlet);
        outlet.tick(at(200));
        flush(&mut outlet);
        let dashboard = Some("http://127.0.0.1:29580/".to_string());
        outlet.set_status(Some(Status { dashboard, ..status }));
        outlet.tick(at(449));
        outlet.tick(at(450));
        flush(&mut outlet);
        outlet.set_status(None);
        outlet.push(Stream::Error, &[b"error: the end\n"]);
        outlet.tick(at(2000));
        flush(&mut outlet);
        assert_eq!(outlet.next_wake(), None);
        drop(outlet);
        let (mut text, mut buffer) = (Vec::new(), [0; 4096]);
        while let Ok(count) = controller.read(&mut buffer) {
            text.extend_from_slice(&buffer[..count]); // fails when the other end is closed
        }
        let text = String::from_utf8(text).unwrap();
        let wipe = "\r\x1b[2K";
        let running = format!("{wipe}tenfold 0:00 | 4 ranks running");
        let expected = format!(
            "{running}{wipe}[0] one\r\n[1] two\r\n{running}{running} | http:…{wipe}error: the end\r\n"
        );
        assert_eq!(text, expected);
    }

    #[test]
    #[expect(clippy::disallowed_methods, reason = "a time to count from")]
    fn there_is_no_status_line_where_there_is_no_terminal() {
        let mut file = tempfile::tempfile().unwrap();
        let mut outlet = both_to(&file);
        let now = Instant::now();
        outlet.set_status(Some(Status::new(now)));
        outlet.tick(now + std::time::Duration::from_secs(9));
        outlet.note("a line");
        assert_eq!(outlet.next_wake(), None);
        flush(&mut outlet);
        let mut text = String::new();
        file.rewind().unwrap();
        file.read_to_string(&mut text).unwrap();
        assert_eq!(text, "tenfold: a line\n");
    }
}
