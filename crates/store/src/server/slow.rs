//! The slowest operations of the last minutes.
//!
//! Only requests that can be slow are timed: see `Weight` in `turns`. There are two lists, one for the
//! current period and one for the period before it, so the result covers between one and two periods.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::survey::readable;

/// An operation that took the server long.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct SlowOperation {
    /// Its name.
    pub operation: String,
    /// The first key in readable form, cut to 100 characters; empty if it names none.
    pub key: String,
    /// How many keys it names.
    pub keys_count: usize,
    /// Of the request and its reply.
    pub bytes: u64,
    /// Of the server's time, without sending and receiving.
    pub microseconds: u64,
    /// The address of the client.
    pub peer: String,
    /// When it was served.
    pub seconds_ago: f64,
}

impl SlowOperation {
    /// How many are kept.
    pub const MAX: usize = 32;
}

const SPELL: Duration = Duration::from_secs(300);
/// Bytes of a key that are worth keeping; more than 100 characters need.
const KEY_BYTES: usize = 400;
const KEY_CHARACTERS: usize = 100;

/// What is known before the operation runs. It allocates nothing, because most operations turn out to be
/// quick.
#[derive(Debug)]
pub(super) struct Suspect {
    operation: &'static str,
    key: [u8; KEY_BYTES],
    key_length: usize,
    keys_count: usize,
    peer: SocketAddr,
}

impl Suspect {
    pub(super) fn new(
        operation: &'static str,
        first_key: &[u8],
        keys_count: usize,
        peer: SocketAddr,
    ) -> Self {
        let key_length = first_key.len().min(KEY_BYTES);
        let mut key = [0; KEY_BYTES];
        key[..key_length].copy_from_slice(&first_key[..key_length]);
        Suspect { operation, key, key_length, keys_count, peer }
    }
}

#[derive(Debug)]
struct Culprit {
    suspect: Suspect,
    bytes: u64,
    took: Duration,
    at: Instant,
}

#[derive(Debug)]
pub(super) struct Slowest {
    now: Vec<Culprit>,
    before: Vec<Culprit>,
    since: Instant,
    /// An operation that takes at most this long is not one of the slowest.
    bar: Duration,
}

impl Slowest {
    pub(super) fn new(now: Instant) -> Self {
        Slowest { now: Vec::new(), before: Vec::new(), since: now, bar: Duration::ZERO }
    }

    pub(super) fn note(&mut self, suspect: Suspect, bytes: usize, took: Duration, at: Instant) {
        self.turn_over(at);
        if took <= self.bar {
            return;
        }
        let quickest = |list: &[Culprit]| (0..list.len()).min_by_key(|&index| list[index].took);
        if self.now.len() == SlowOperation::MAX {
            self.now.swap_remove(quickest(&self.now).expect("it is full"));
        }
        self.now.push(Culprit { suspect, bytes: bytes as u64, took, at });
        if self.now.len() == SlowOperation::MAX {
            self.bar = self.now[quickest(&self.now).expect("it is full")].took;
        }
    }

    /// The slowest first.
    pub(super) fn list(&mut self, now: Instant) -> Vec<SlowOperation> {
        self.turn_over(now);
        let mut all: Vec<&Culprit> = self.now.iter().chain(&self.before).collect();
        all.sort_unstable_by_key(|culprit| std::cmp::Reverse((culprit.took, culprit.at)));
        all.truncate(SlowOperation::MAX);
        all.into_iter().map(|culprit| culprit.show(now)).collect()
    }

    fn turn_over(&mut self, now: Instant) {
        let age = now.duration_since(self.since);
        if age >= SPELL {
            self.before = std::mem::take(&mut self.now);
            if age >= 2 * SPELL {
                self.before.clear();
            }
            self.since = now;
            self.bar = Duration::ZERO;
        }
    }
}

impl Culprit {
    fn show(&self, now: Instant) -> SlowOperation {
        let (text, _) = readable(&self.suspect.key[..self.suspect.key_length]);
        let mut key: String = text.chars().take(KEY_CHARACTERS).collect();
        if key.len() < text.len() {
            key.pop();
            key.push('…');
        }
        SlowOperation {
            operation: self.suspect.operation.into(),
            key,
            keys_count: self.suspect.keys_count,
            bytes: self.bytes,
            microseconds: u64::try_from(self.took.as_micros()).unwrap_or(u64::MAX),
            peer: self.suspect.peer.to_string(),
            seconds_ago: now.duration_since(self.at).as_secs_f64(),
        }
    }
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "a list needs a time, any time")]
mod tests {
    use super::*;

    fn suspect(key: &[u8]) -> Suspect {
        Suspect::new("append", key, 1, SocketAddr::from(([127, 0, 0, 1], 4000)))
    }

    #[test]
    fn the_slowest_are_kept_and_listed_first() {
        let start = Instant::now();
        let mut slowest = Slowest::new(start);
        for micros in (1..=100).rev().chain(101..=200) {
            slowest.note(suspect(b"k"), 7, Duration::from_micros(micros), start);
        }
        let listed: Vec<u64> = slowest.list(start).iter().map(|slow| slow.microseconds).collect();
        assert_eq!(listed, (169..=200).rev().collect::<Vec<_>>());
    }

    #[test]
    fn what_is_older_than_ten_minutes_is_forgotten() {
        let start = Instant::now();
        let after = |seconds| start + Duration::from_secs(seconds);
        let mut slowest = Slowest::new(start);
        slowest.note(suspect(b"first"), 7, Duration::from_micros(5), start);
        slowest.note(suspect(b"second"), 7, Duration::from_micros(4), after(301));
        let keys = |slowest: &mut Slowest, at| {
            slowest.list(at).into_iter().map(|slow| (slow.key, slow.seconds_ago as u64)).collect::<Vec<_>>()
        };
        assert_eq!(keys(&mut slowest, after(310)), [("first".into(), 310), ("second".into(), 9)]);
        assert_eq!(keys(&mut slowest, after(700)), [("second".into(), 399)]);
        assert_eq!(keys(&mut slowest, after(10_000)), []);
    }

    #[test]
    fn a_key_is_shown_so_that_a_person_can_read_it() {
        let start = Instant::now();
        let mut slowest = Slowest::new(start);
        slowest.note(suspect(b"a\x1b[31m"), 7, Duration::from_micros(5), start);
        slowest.note(suspect("ü".repeat(4000).as_bytes()), 7, Duration::from_micros(4), start);
        slowest.note(Suspect { keys_count: 0, ..suspect(b"") }, 7, Duration::from_micros(3), start);
        let keys: Vec<_> = slowest.list(start).into_iter().map(|slow| slow.key).collect();
        assert_eq!(keys, [r"a\u{1b}[31m".to_string(), "ü".repeat(99) + "…", String::new()]);
    }
}
