//! Which of several ranks failed first.
//!
//! Ranks that lose a peer fail too, within milliseconds, and their exits are noticed in any order: the kernel
//! closes a process's connections before it notifies its parent. So exits are collected for a moment and then
//! ranked by evidence. A death by a signal that this launcher did not send is not a reaction to a peer's
//! exit. An error file says when it was written. An exit code says nothing.
//!
//! Not here: how long exits are collected (`round`), and how they are reported (`failure`).

use std::time::SystemTime;

use signal_hook::consts::SIGPIPE;

use super::failure::ErrorFile;
use super::rank::End;

/// In seconds. A rank that loses a peer has written its error file by then, so only an older file is about
/// something that happened before a death by a signal. Error files have whole seconds.
const ANSWER_MAX: u64 = 2;
/// In seconds. A rank that wrote its error file and still runs is about to exit; one that has run for longer
/// has recovered.
const WAY_OUT_MAX: u64 = 10;

/// The evidence about one rank.
#[derive(Clone, Copy, Debug)]
pub(super) struct Suspect<'a> {
    /// None if it still runs.
    pub(super) end: Option<End>,
    pub(super) error_file: Option<&'a ErrorFile>,
}

/// The index of the rank that probably failed first. Among ranks with equal evidence, this is the first in
/// the list, which is the first that was noticed. `now` is in seconds since 1970, as in error files.
pub(super) fn first(suspects: &[Suspect<'_>], now: u64) -> Option<usize> {
    let keyed = suspects.iter().enumerate().filter(|(_, suspect)| suspect.has_failed(now));
    keyed.min_by_key(|(_, suspect)| suspect.key(now)).map(|(index, _)| index)
}

impl Suspect<'_> {
    fn has_failed(&self, now: u64) -> bool {
        match self.end {
            Some(end) => end.is_failure(),
            None => self.written().is_some_and(|(seconds, _)| seconds + WAY_OUT_MAX >= now),
        }
    }

    /// The time in the file in seconds, and that of the file system, which is more precise.
    fn written(&self) -> Option<(u64, SystemTime)> {
        let file = self.error_file?;
        Some((file.timestamp?, file.modified.unwrap_or(SystemTime::UNIX_EPOCH)))
    }

    /// The smallest is the first. A process that writes to a closed connection dies by SIGPIPE: that is a
    /// reaction.
    fn key(&self, now: u64) -> (u64, Option<SystemTime>) {
        let killed = matches!(self.end, Some(End::Signal(signal)) if signal != SIGPIPE);
        let killed = killed.then_some((now.saturating_sub(ANSWER_MAX), None));
        let written = self.written().map(|(seconds, modified)| (seconds, Some(modified)));
        killed.into_iter().chain(written).min().unwrap_or((u64::MAX, None))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use signal_hook::consts::{SIGKILL, SIGSEGV};

    use super::*;

    const NOW: u64 = 1_000_000;

    fn file(ago: u64, milliseconds: u64) -> ErrorFile {
        let seconds = NOW - ago;
        ErrorFile {
            message: "m".into(),
            traceback: None,
            timestamp: Some(seconds),
            modified: Some(SystemTime::UNIX_EPOCH + Duration::from_millis(seconds * 1000 + milliseconds)),
        }
    }

    fn judged(ends: &[(Option<End>, Option<ErrorFile>)]) -> Option<usize> {
        let suspects: Vec<Suspect<'_>> =
            ends.iter().map(|(end, file)| Suspect { end: *end, error_file: file.as_ref() }).collect();
        first(&suspects, NOW)
    }

    fn exit(code: u8) -> Option<End> {
        Some(End::Exit(code))
    }

    #[test]
    fn a_death_by_a_signal_precedes_exit_codes_that_were_noticed_earlier() {
        let killed = Some(End::Signal(SIGKILL));
        assert_eq!(judged(&[(exit(1), None), (exit(1), None), (killed, None)]), Some(2));
        assert_eq!(judged(&[(exit(1), Some(file(0, 900))), (killed, None)]), Some(1));
        assert_eq!(judged(&[(Some(End::Signal(SIGPIPE)), None), (exit(3), None)]), Some(0));
        assert_eq!(judged(&[(exit(3), None), (Some(End::Signal(SIGPIPE)), None)]), Some(0));
    }

    #[test]
    fn the_error_that_was_written_first_was_first() {
        assert_eq!(judged(&[(exit(1), Some(file(0, 0))), (exit(1), Some(file(1, 0)))]), Some(1));
        assert_eq!(judged(&[(exit(1), Some(file(0, 8))), (exit(1), Some(file(0, 4)))]), Some(1));
        assert_eq!(judged(&[(exit(1), None), (exit(1), Some(file(0, 4)))]), Some(1));
        let killed = Some(End::Signal(SIGSEGV)); // a watchdog did it, long after
        assert_eq!(judged(&[(killed, None), (exit(1), Some(file(ANSWER_MAX + 1, 0)))]), Some(1));
    }

    #[test]
    fn a_rank_that_wrote_its_error_and_has_not_ended_yet_counts() {
        assert_eq!(judged(&[(exit(1), None), (None, Some(file(3, 0)))]), Some(1));
        assert_eq!(judged(&[(exit(1), None), (None, Some(file(WAY_OUT_MAX + 1, 0)))]), Some(0));
        assert_eq!(judged(&[(exit(0), Some(file(3, 0))), (None, None), (exit(1), None)]), Some(2));
        assert_eq!(judged(&[(exit(0), None), (None, None)]), None);
    }

    #[test]
    fn with_equal_evidence_the_first_is_named() {
        assert_eq!(judged(&[(exit(1), None), (exit(2), None)]), Some(0));
    }
}
