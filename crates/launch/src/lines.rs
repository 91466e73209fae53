//! Cuts the bytes of a stream into the lines that users see.
//!
//! [`Cutter`] handles bytes alone: `\n` and `\r\n` end a line. Text before any other `\r` is an update, as
//! progress bars write them, which the next one overwrites. The pieces do not depend on how the bytes arrive.
//!
//! [`Lines`] adds time. Ranks share a screen, so nothing can be overwritten there: an update becomes a
//! separate line, at most once a second, and the newest is shown. Text without a line end for a second, such
//! as a prompt, is shown as a line; what follows it is the next line. Time is an argument, and
//! [`Lines::next_wake`] says when it matters.

use std::time::{Duration, Instant};

/// A longer line is shown as several.
pub(super) const LINE_MAX: usize = 64 << 10;
/// From one shown update to the next, and from text without an end to the time when it is shown.
const PATIENCE: Duration = Duration::from_secs(1);

/// A piece of a stream, without its line end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Piece<'a> {
    Line(&'a [u8]),
    /// To be overwritten by what follows.
    Update(&'a [u8]),
}

#[derive(Debug, Default)]
pub(super) struct Cutter {
    unfinished: Vec<u8>,
    /// `\r` was the last byte: the next byte decides what it means.
    returned: bool,
    /// The beginning of this line was already shown, so an end without more text is not an empty line.
    continued: bool,
}

impl Cutter {
    /// Calls `each` with every piece that is complete now.
    pub(super) fn take(&mut self, mut bytes: &[u8], mut each: impl FnMut(Piece<'_>)) {
        while let Some(&first) = bytes.first() {
            if self.returned {
                if first == b'\r' || first == b'\n' {
                    bytes = &bytes[1..];
                }
                if first == b'\r' {
                    continue; // as one
                }
                self.returned = false;
                self.end(first == b'\n', &mut each);
                continue;
            }
            let room = LINE_MAX - self.unfinished.len();
            let end = bytes.iter().take(room).position(|&byte| byte == b'\n' || byte == b'\r');
            let taken = end.unwrap_or(room.min(bytes.len()));
            self.unfinished.extend_from_slice(&bytes[..taken]);
            match end.map(|end| bytes[end]) {
                Some(b'\n') => self.end(true, &mut each),
                Some(_) => self.returned = true,
                None if self.unfinished.len() == LINE_MAX => self.cut(&mut each),
                None => {}
            }
            bytes = &bytes[taken + usize::from(end.is_some())..];
        }
    }

    fn end(&mut self, is_line: bool, each: &mut impl FnMut(Piece<'_>)) {
        if is_line {
            if !self.continued || !self.unfinished.is_empty() {
                each(Piece::Line(&self.unfinished));
            }
        } else if !is_blank(&self.unfinished) {
            each(Piece::Update(&self.unfinished));
        }
        self.unfinished.clear();
        self.continued = false;
    }

    /// Calls `each` with what has no end yet, if there is anything.
    pub(super) fn cut(&mut self, each: &mut impl FnMut(Piece<'_>)) {
        if self.unfinished.is_empty() {
            return;
        }
        if !self.returned {
            each(Piece::Line(&self.unfinished));
        } else if !is_blank(&self.unfinished) {
            each(Piece::Update(&self.unfinished));
        }
        self.unfinished.clear();
        self.continued = true;
    }

    fn has_text(&self) -> bool {
        !self.unfinished.is_empty()
    }
}

/// Progress bars erase themselves with blanks, or by asking the terminal to clear the line.
fn is_blank(update: &[u8]) -> bool {
    update.iter().all(u8::is_ascii_whitespace) || update == b"\x1b[K" || update == b"\x1b[2K"
}

#[derive(Debug, Default)]
pub(super) struct Lines {
    cutter: Cutter,
    /// Since when there is text without an end.
    unfinished_since: Option<Instant>,
    /// The newest update, which is not shown yet.
    update: Option<Vec<u8>>,
    update_shown: Option<Instant>,
}

impl Lines {
    /// Calls `each` with what is to be shown now; skips updates that are overwritten within a second.
    pub(super) fn take(&mut self, bytes: &[u8], now: Instant, mut each: impl FnMut(Piece<'_>)) {
        let Lines { cutter, unfinished_since, update, update_shown } = self;
        cutter.take(bytes, |piece| {
            *unfinished_since = None;
            match piece {
                // On a terminal it would have overwritten the update too.
                Piece::Line(_) => *update = None,
                Piece::Update(text) if update_shown.is_some_and(|shown| now < shown + PATIENCE) => {
                    *update = Some(text.to_vec());
                    return;
                }
                Piece::Update(_) => {
                    *update = None;
                    *update_shown = Some(now);
                }
            }
            each(piece);
        });
        *unfinished_since = cutter.has_text().then(|| unfinished_since.unwrap_or(now));
    }

    /// When to [`Lines::wake`] if no bytes arrive before.
    pub(super) fn next_wake(&self) -> Option<Instant> {
        let update = self.update_shown.filter(|_| self.update.is_some());
        [update, self.unfinished_since].into_iter().flatten().min().map(|since| since + PATIENCE)
    }

    /// Calls `each` with what has waited long enough.
    pub(super) fn wake(&mut self, now: Instant, mut each: impl FnMut(Piece<'_>)) {
        if self.unfinished_since.is_some_and(|since| now >= since + PATIENCE) {
            self.unfinished_since = None;
            self.update = None;
            self.update_shown = Some(now);
            self.cutter.cut(&mut each);
        } else if self.update_shown.is_some_and(|shown| now >= shown + PATIENCE)
            && let Some(update) = self.update.take()
        {
            self.update_shown = Some(now);
            each(Piece::Update(&update));
        }
    }

    /// Calls `each` with what is left: nothing will follow.
    pub(super) fn finish(&mut self, mut each: impl FnMut(Piece<'_>)) {
        if self.cutter.has_text() {
            self.cutter.cut(&mut each);
        } else if let Some(update) = self.update.take() {
            each(Piece::Update(&update));
        }
        *self = Lines::default();
    }
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "a time to count from")]
mod tests {
    use super::*;

    fn text(piece: Piece<'_>) -> String {
        match piece {
            Piece::Line(text) => String::from_utf8_lossy(text).into_owned(),
            Piece::Update(text) => format!("~{}", String::from_utf8_lossy(text)),
        }
    }

    fn pieces(parts: &[&[u8]]) -> Vec<String> {
        let (mut cutter, mut found) = (Cutter::default(), Vec::new());
        for part in parts {
            cutter.take(part, |piece| found.push(text(piece)));
        }
        cutter.cut(&mut |piece| found.push(text(piece)));
        found
    }

    #[test]
    fn pieces_are_the_same_however_they_arrive() {
        for (text, expected) in [
            ("first\n\nthird\r\nlast", &["first", "", "third", "last"][..]),
            ("10 %\r20 %\r\n", &["~10 %", "20 %"]),
            ("\r10 %\r20 %", &["~10 %", "20 %"]),
            ("10 %\r", &["~10 %"]),
            ("a\r\r\nb\r\rc\n\r", &["a", "~b", "c"]),
            ("bar\r   \rsaid\n", &["~bar", "said"]),
            ("\n\r\n", &["", ""]),
            ("", &[]),
        ] {
            let bytes = text.as_bytes();
            for cut in 0..=bytes.len() {
                for second in cut..=bytes.len() {
                    let parts = [&bytes[..cut], &bytes[cut..second], &bytes[second..]];
                    assert_eq!(pieces(&parts), expected, "{text:?} cut at {cut} and {second}");
                }
            }
            assert_eq!(pieces(&bytes.chunks(1).collect::<Vec<_>>()), expected, "{text:?}");
        }
    }

    #[test]
    fn bytes_that_are_not_text_pass_unchanged() {
        let (mut cutter, mut found) = (Cutter::default(), Vec::new());
        let bytes: Vec<u8> = (0..=255).filter(|byte| !b"\r\n".contains(byte)).collect();
        cutter.take(&[&bytes[..], b"\n"].concat(), |piece| {
            found.extend(if let Piece::Line(line) = piece { line.to_vec() } else { Vec::new() });
        });
        assert_eq!(found, bytes);
    }

    #[test]
    fn a_line_without_end_is_shown_in_pieces_of_the_longest_length() {
        let lengths = |text: &[u8]| pieces(&[text]).iter().map(String::len).collect::<Vec<_>>();
        assert_eq!(lengths(&vec![b'x'; 2 * LINE_MAX + 1]), [LINE_MAX, LINE_MAX, 1]);
        let mut exact = vec![b'x'; LINE_MAX];
        exact.extend(b"\ny\n");
        assert_eq!(lengths(&exact), [LINE_MAX, 1]);
    }

    /// What is shown of writes at times in milliseconds; an empty write only reads the clock, and so does the
    /// end.
    fn shown(writes: &[(u64, &str)]) -> Vec<(u64, String)> {
        let (mut lines, mut found, start) = (Lines::default(), Vec::new(), Instant::now());
        for &(at, bytes) in writes {
            let now = start + Duration::from_millis(at);
            while let Some(wake) = lines.next_wake().filter(|&wake| wake <= now) {
                let at = (wake - start).as_millis() as u64;
                lines.wake(wake, |piece| found.push((at, text(piece))));
            }
            lines.take(bytes.as_bytes(), now, |piece| found.push((at, text(piece))));
        }
        lines.finish(|piece| found.push((u64::MAX, text(piece))));
        assert_eq!(lines.next_wake(), None);
        found
    }

    #[track_caller]
    fn assert_shown(writes: &[(u64, &str)], expected: &[(u64, &str)]) {
        let expected: Vec<(u64, String)> = expected.iter().map(|&(at, text)| (at, text.into())).collect();
        assert_eq!(shown(writes), expected);
    }

    #[test]
    fn updates_are_shown_once_a_second_and_the_last_one_always() {
        let writes: Vec<(u64, String)> = (0..25).map(|i| (i * 100, format!("{i} %\r"))).collect();
        let writes: Vec<(u64, &str)> = writes.iter().map(|(at, text)| (*at, text.as_str())).collect();
        // The end of an update is known from the byte after it, 100 ms later.
        let expected = [(100, "~0 %"), (1100, "~9 %"), (2100, "~19 %"), (u64::MAX, "~24 %")];
        let found = shown(&writes);
        assert_eq!(found.len(), expected.len(), "{found:?}");
        assert_shown(&writes, &expected);
    }

    #[test]
    fn a_line_takes_the_place_of_the_update_before_it() {
        assert_shown(
            &[(0, "1 %\r2 %\r"), (10, "3 %\r"), (20, "100 %\n"), (5000, "")],
            &[(0, "~1 %"), (20, "100 %")],
        );
    }

    #[test]
    fn an_update_that_nothing_follows_is_shown_after_a_second_and_once() {
        assert_shown(&[(0, "50 %\r"), (3000, ""), (3100, "\nnext\n")], &[(1000, "~50 %"), (3100, "next")]);
        assert_shown(
            &[(0, "50 %\r"), (3000, ""), (3100, "60 %\r"), (3200, "\n")],
            &[(1000, "~50 %"), (3200, "60 %")],
        );
    }

    #[test]
    fn text_without_an_end_is_shown_after_a_second() {
        assert_shown(
            &[(0, "name? "), (2000, ""), (2500, "Ada\n"), (9000, "")],
            &[(1000, "name? "), (2500, "Ada")],
        );
        assert_shown(
            &[(0, "name? "), (2000, ""), (2500, "\n\n"), (9000, "")],
            &[(1000, "name? "), (2500, "")],
        );
        // Text that arrives quickly is one line.
        assert_shown(&[(0, "so"), (500, "me"), (900, " words\n")], &[(900, "some words")]);
    }
}
