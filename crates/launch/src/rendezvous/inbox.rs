//! The wishes that the folder has yet to fold.
//!
//! A node takes the next number of a counter, then writes its wish under that number. So the folder finds new
//! wishes by reading the counter, and waits for the next number instead of polling. A number whose wish is
//! not there yet is a *hole*: its node is slow, or died in between. The folder looks at holes again, and
//! gives them up after a while. The node repeats its wish, under another number.
//!
//! Wishes that pour in are gathered: a state is written for many of them, not for each.

use std::collections::BTreeMap;
use std::time::Duration;

use super::state::State;

/// Wishes that are read at a time.
const READ_MAX: u64 = 4096;
/// From one fold to the next while wishes pour in, for each node and at most. A job of n nodes then has about
/// log n states while its nodes join, and a single wish that comes later does not wait.
const GATHER_PER_NODE: Duration = Duration::from_millis(1);
const GATHER_MAX: Duration = Duration::from_secs(1);
/// A hole is looked at this often at first, and later with every heartbeat.
const HOLE_LOOK: Duration = Duration::from_millis(20);
const HOLE_FRESH: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct Inbox {
    /// The last number that was looked at, and the newest that there is.
    seen: u64,
    count: u64,
    /// Numbers without a wish, and since when.
    holes: BTreeMap<u64, Duration>,
    folded_at: Option<Duration>,
}

impl Inbox {
    /// All wishes up to `folded` have been dealt with.
    pub(super) fn new(folded: u64) -> Inbox {
        Inbox { seen: folded, count: folded, holes: BTreeMap::new(), folded_at: None }
    }

    /// The counter, as it was read.
    pub(super) fn counted(&mut self, count: u64) {
        self.count = self.count.max(count);
    }

    /// The number that the next wish will have.
    pub(super) fn next(&self) -> u64 {
        self.count + 1
    }

    /// The numbers to look at now.
    pub(super) fn numbers(&self) -> Vec<u64> {
        let new = self.seen + 1..=self.count.min(self.seen.saturating_add(READ_MAX));
        self.holes.keys().copied().chain(new).collect()
    }

    /// Whether there was a wish with this number.
    pub(super) fn looked(&mut self, number: u64, is_there: bool, now: Duration) {
        self.seen = self.seen.max(number);
        match is_there {
            true => drop(self.holes.remove(&number)),
            false => drop(self.holes.entry(number).or_insert(now)),
        }
    }

    /// All wishes that were found have been folded. Holes that are older than `patience` are given up.
    pub(super) fn folded(&mut self, patience: Duration, now: Duration) {
        self.holes.retain(|_, since| now < since.saturating_add(patience));
        self.folded_at = Some(now);
    }

    /// All wishes up to this number have been dealt with.
    pub(super) fn complete(&self) -> u64 {
        self.holes.keys().next().map_or(self.seen, |&hole| hole - 1)
    }

    /// When to fold next, if there is anything to fold.
    pub(super) fn due(&self, state: &State, now: Duration) -> Option<Duration> {
        let new = self.count - self.seen;
        let is_fresh = |since: &&Duration| now < since.saturating_add(HOLE_FRESH);
        let holes = self.holes.values().filter(is_fresh).count() as u64;
        if new == 0 && holes == 0 {
            return None;
        }
        let Some(last) = self.folded_at else { return Some(now) };
        if new == 0 {
            return Some(last.saturating_add(HOLE_LOOK));
        }
        if new + holes >= state.awaited() as u64 {
            return Some(now); // no more of them will come
        }
        Some(last.saturating_add(self.gather(state)))
    }

    /// How long to wait for more wishes.
    pub(super) fn gather(&self, state: &State) -> Duration {
        let nodes = u32::try_from(state.seats().count()).unwrap_or(u32::MAX);
        GATHER_PER_NODE.saturating_mul(nodes).min(GATHER_MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::super::state::first_head;
    use super::super::{scenarios, state};
    use super::*;

    fn at(milliseconds: u64) -> Duration {
        Duration::from_millis(milliseconds)
    }

    #[test]
    fn a_hole_is_looked_at_again_and_given_up_after_a_while() {
        let state = State::of_head(first_head(&scenarios::settings(10, 10), "a"));
        let mut inbox = Inbox::new(4);
        assert_eq!((inbox.numbers(), inbox.due(&state, at(0))), (vec![], None));
        inbox.counted(7);
        assert_eq!((inbox.numbers(), inbox.next()), (vec![5, 6, 7], 8));
        assert_eq!(inbox.due(&state, at(0)), Some(at(0)));
        for (number, is_there) in [(5, true), (6, false), (7, true)] {
            inbox.looked(number, is_there, at(0));
        }
        inbox.folded(at(5000), at(0));
        assert_eq!((inbox.numbers(), inbox.complete()), (vec![6], 5));
        assert_eq!(inbox.due(&state, at(0)), Some(at(20)));
        assert_eq!(inbox.due(&state, at(1000)), None, "from now on with the heartbeats");
        inbox.folded(at(5000), at(4999));
        assert_eq!(inbox.complete(), 5);
        inbox.folded(at(5000), at(5000));
        assert_eq!((inbox.numbers(), inbox.complete()), (vec![], 7));
    }

    #[test]
    fn wishes_that_pour_in_are_gathered_unless_they_are_the_last() {
        let settings = scenarios::settings(100, 100);
        let mut state = state::State::of_head(first_head(&settings, "a"));
        (0..50).for_each(|number| state.join(&scenarios::node(&number.to_string())));
        let mut inbox = Inbox::new(0);
        inbox.counted(1);
        inbox.looked(1, true, at(0));
        inbox.folded(at(5000), at(0));
        inbox.counted(50);
        assert_eq!(inbox.due(&state, at(0)), Some(at(50)), "one is missing, and may follow");
        inbox.counted(51);
        assert_eq!(inbox.due(&state, at(0)), Some(at(0)));
        inbox.looked(51, false, at(0));
        inbox.folded(at(5000), at(0));
        inbox.counted(100);
        assert_eq!(inbox.due(&state, at(0)), Some(at(0)), "the node of a fresh hole is on its way");
        inbox.counted(50_000_000);
        assert_eq!(inbox.numbers().len(), 4097, "the hole, and not more at a time whatever the counter says");
    }
}
