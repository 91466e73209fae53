//! Text from elsewhere (other hosts, ranks, files) made safe to print.
//!
//! A terminal obeys some byte sequences: they move the cursor, write to the clipboard, or make the terminal answer as if
//! the user had typed. Other characters are invisible or turn the direction of writing, so that a line reads as what it is
//! not.

use std::borrow::Cow;
use std::ops::RangeInclusive;

/// Removes terminal commands and control characters. Line ends and tabs stay.
///
/// For text of several lines, such as the last lines of a program.
pub fn printable(text: &str) -> Cow<'_, str> {
    let is_kept = |character: char| !character.is_control() || matches!(character, '\t' | '\n');
    if text.chars().all(is_kept) {
        return Cow::Borrowed(text);
    }
    let (mut kept, mut rest) = (String::new(), text);
    while let Some(character) = rest.chars().next() {
        let is_command = character == '\x1b';
        if is_kept(character) {
            kept.push(character);
        }
        rest = &rest[if is_command { command_len(rest.as_bytes()) } else { character.len_utf8() }..];
    }
    Cow::Owned(kept)
}

/// Replaces control characters, line ends and invisible characters by U+FFFD, so that one can see that something was there.
///
/// For names and other short texts within a line.
pub fn one_line(text: &str) -> String {
    text.chars().map(|character| if is_harmful(character) { '\u{fffd}' } else { character }).collect()
}

/// Control characters, and those that are invisible or change the direction of writing.
fn is_harmful(character: char) -> bool {
    character.is_control()
        || matches!(character,
            '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

/// The length of the terminal command that `bytes` begin with. It never ends within a character.
pub fn command_len(bytes: &[u8]) -> usize {
    let run = |from: usize, of: RangeInclusive<u8>| {
        let rest = bytes.get(from..).unwrap_or_default();
        from + rest.iter().take_while(|byte| of.contains(byte)).count()
    };
    let with_last = |end: usize, of: RangeInclusive<u8>| {
        end + usize::from(bytes.get(end).is_some_and(|byte| of.contains(byte)))
    };
    match bytes.get(1) {
        Some(b'[') => with_last(run(2, 0x20..=0x3f), 0x40..=0x7e),
        Some(b']') => {
            let end = |at: &usize| bytes[*at] == 0x07 || bytes[*at..].starts_with(b"\x1b\\");
            let end = (2..bytes.len()).find(end);
            end.map_or(bytes.len(), |at| if bytes[at] == 0x07 { at + 1 } else { at + 2 })
        }
        _ => with_last(run(1, 0x20..=0x2f), 0x30..=0x7e),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn terminal_commands_are_removed() {
        assert_eq!(
            printable("\x1b[31mred\x1b(B\x1b[m\t\x07ä\x1bä\x1b[2ä\x1b]0;title\x07 b\x1b"),
            "red\täää b"
        );
        assert_eq!(printable("\x1b]0;never ends"), "");
        assert!(matches!(printable("two\nlines"), Cow::Borrowed("two\nlines")));
    }

    #[test]
    fn what_could_deceive_within_a_line_can_be_seen() {
        assert_eq!(one_line("a\u{1b}[2Jb\n\u{202e}"), "a\u{fffd}[2Jb\u{fffd}\u{fffd}");
        assert_eq!(one_line("a\u{200b}b\u{2066}\u{feff}\u{9b}"), "a\u{fffd}b\u{fffd}\u{fffd}\u{fffd}");
        assert_eq!(one_line("ärger 漢字 …"), "ärger 漢字 …");
    }
}
