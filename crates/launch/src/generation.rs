//! What ranks that recover by themselves write about each of their generations, and how it is shown.
//!
//! Rank 0 of each new generation writes it into the ranks' store (see `docs/recovery.md`). The text comes from
//! a program, so it is bounded, unknown fields are ignored, and missing ones have defaults. Not here: how it
//! is read (`generation/reader`), and what follows from it (`crew`).

mod reader;

use serde::Deserialize;
use tenfold_dashboard::job;

pub(super) use reader::{Reader, Sources};

/// Bytes of a generation: more than a hundred thousand ranks need.
const TEXT_MAX: usize = 16 << 20;
/// Ranks that left or joined which are shown.
const CHANGES_MAX: usize = 64;
/// Characters of a host's name that are shown.
const HOST_MAX: usize = 255;

/// The ranks that continue together, by rank.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(super) struct Generation {
    pub(super) generation: u64,
    /// How long the ranks needed to make it.
    pub(super) took_ms: f64,
    pub(super) at_unix_ms: f64,
    pub(super) ranks: Vec<Member>,
    pub(super) left: Vec<Member>,
    pub(super) joined: Vec<Member>,
}

/// A process in a generation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(super) struct Member {
    pub(super) rank: Option<usize>,
    pub(super) pid: u32,
    pub(super) host: String,
    /// Its `TENFOLD_JOINING`, if it had one.
    pub(super) joining: Option<String>,
    pub(super) local_rank: usize,
}

impl Generation {
    /// The key under which ranks of a round write it: in the ranks' store, with PyTorch's prefix.
    pub(super) fn key(round: u64) -> String {
        format!("/worker/attempt_{round}/recover/generation")
    }

    /// The keys beside it by which launchers count ranks that are missing, and that have finished.
    pub(super) fn tally_keys(round: u64) -> [String; 2] {
        ["missing", "finished"].map(|what| format!("/worker/attempt_{round}/recover/launchers/{what}"))
    }

    pub(super) fn parse(text: &[u8]) -> Result<Generation, String> {
        if text.len() > TEXT_MAX {
            return Err(format!("its generation is {} bytes long, the limit is {TEXT_MAX}", text.len()));
        }
        serde_json::from_slice(text).map_err(|error| format!("its generation cannot be read: {error}"))
    }

    /// What the dashboard shows. `end` tells how a process has ended, if that is known here.
    pub(super) fn facts(&self, round: u64, end: impl Fn(&Member) -> Option<String>) -> job::Generation {
        let change = |member: &Member| job::Change {
            rank: member.rank,
            pid: member.pid.into(),
            host: member.host.chars().take(HOST_MAX).collect(),
            end: end(member),
        };
        job::Generation {
            round,
            generation: self.generation,
            seconds: (self.took_ms / 1000.0).max(0.0),
            at_unix: self.at_unix_ms / 1000.0,
            left: self.left.iter().take(CHANGES_MAX).map(change).collect(),
            joined: self.joined.iter().take(CHANGES_MAX).map(change).collect(),
        }
    }
}

/// One line for the user; nothing if no rank has left or joined. Hosts are named if there are several nodes.
pub(super) fn line(facts: &job::Generation, has_others: bool) -> Option<String> {
    let changes = facts.changes(has_others);
    let head = format!("generation {} after {:.2} s", facts.generation, facts.seconds);
    (!changes.is_empty()).then(|| format!("{head}: {}", changes.join("; ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Generation {
        Generation::parse(text.as_bytes()).unwrap()
    }

    #[test]
    fn a_generation_is_shown_in_one_line() {
        let text = r#"{"generation": 2, "took_ms": 314, "at_unix_ms": 1763280000500,
            "ranks": [{"pid": 4711, "host": "a", "joining": null, "local_rank": 0, "new": [1]}],
            "left": [{"rank": 1, "pid": 4712, "host": "a"}, {"rank": 3, "pid": 4714, "host": "b"}],
            "joined": [{"rank": 1, "pid": 4800, "host": "a", "joining": "0-4"}, {"rank": 4, "pid": 9, "host": "b"}]}"#;
        let facts = parsed(text).facts(5, |member| (member.pid == 4712).then(|| "killed by SIGKILL".into()));
        assert_eq!((facts.round, facts.generation, facts.seconds), (5, 2, 0.314));
        assert_eq!(facts.at_unix, 1_763_280_000.5);
        let expected = "generation 2 after 0.31 s: rank 1 (pid 4712, killed by SIGKILL) was replaced by pid 4800; \
                        rank 3 (pid 4714) left; rank 4 joined (pid 9)";
        assert_eq!(line(&facts, false).as_deref(), Some(expected));
        let expected = "generation 2 after 0.31 s: rank 1 (pid 4712 on a, killed by SIGKILL) was replaced by pid 4800 on a; \
                        rank 3 (pid 4714 on b) left; rank 4 joined (pid 9 on b)";
        assert_eq!(line(&facts, true).as_deref(), Some(expected));
        assert_eq!(line(&parsed(r#"{"generation": 1}"#).facts(0, |_| None), false), None);
    }

    #[test]
    fn what_a_program_writes_is_bounded() {
        let text = |error: Result<Generation, String>| error.unwrap_err();
        let expected = "its generation cannot be read: ";
        assert!(text(Generation::parse(b"[1")).starts_with(expected));
        assert!(text(Generation::parse(br#"{"generation": -1}"#)).starts_with(expected));
        let long = vec![b' '; TEXT_MAX + 1];
        assert_eq!(
            text(Generation::parse(&long)),
            "its generation is 16777217 bytes long, the limit is 16777216"
        );
        let left = vec![Member { host: "x".repeat(1000), ..Member::default() }; 1000];
        let facts = Generation { left, took_ms: -5.0, ..Generation::default() }.facts(0, |_| None);
        assert_eq!((facts.left.len(), facts.left[0].host.len(), facts.seconds), (64, 255, 0.0));
    }
}
