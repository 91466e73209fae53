//! Notices about groups that this rank does not have yet. Pure: time is an argument.
//!
//! Ranks make a group at different times, so a rank may hear of a group that it is about to make. Notices about groups that
//! it has left are not kept: the members of a group say goodbye to each other one after the other.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::wire::FabricId;

/// Notices that are kept at most.
const KEPT_MAX: usize = 1024;

/// How long a notice is kept: making a group takes far less from the first rank to the last, or fails.
const KEPT_FOR: Duration = Duration::from_secs(60);

/// Groups that this rank left and still knows of.
const LEFT_MAX: usize = 4096;

/// A notice, and when it came from which process.
#[derive(Debug)]
pub(super) struct Kept {
    pub from: FabricId,
    pub group: u64,
    pub text: Vec<u8>,
    pub came: Instant,
}

#[derive(Debug, Default)]
pub(super) struct Early {
    kept: VecDeque<Kept>,
    left: VecDeque<u64>,
}

impl Early {
    /// This rank has left the group: nothing about it matters any more.
    pub(super) fn leave(&mut self, group: u64) {
        self.kept.retain(|kept| kept.group != group);
        if self.left.len() == LEFT_MAX {
            self.left.pop_front();
        }
        self.left.push_back(group);
    }

    pub(super) fn has_left(&self, group: u64) -> bool {
        self.left.contains(&group)
    }

    /// Keeps a notice until the group is made. If there are too many, the oldest is the least likely to matter.
    pub(super) fn keep(&mut self, from: FabricId, group: u64, text: Vec<u8>, came: Instant) {
        if self.has_left(group) {
            return;
        }
        if self.kept.len() == KEPT_MAX {
            self.kept.pop_front();
        }
        self.kept.push_back(Kept { from, group, text, came });
    }

    /// Takes all notices that are not too old. The caller keeps those again that still cannot be delivered, with the time at
    /// which they arrived.
    pub(super) fn take(&mut self, now: Instant) -> Vec<Kept> {
        let is_fresh = |kept: &Kept| now.saturating_duration_since(kept.came) < KEPT_FOR;
        self.kept.drain(..).filter(is_fresh).collect()
    }
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "a test needs some time to begin with")]
mod tests {
    use super::*;

    const PEER: FabricId = FabricId(1);

    /// Which groups it would hear of; afterwards there is the group `known`.
    fn heard(early: &mut Early, now: Instant, known: u64) -> Vec<u64> {
        let taken = early.take(now);
        let heard = taken.iter().map(|kept| kept.group).collect();
        for Kept { from, group, text, came } in taken.into_iter().filter(|kept| kept.group != known) {
            early.keep(from, group, text, came);
        }
        heard
    }

    #[test]
    fn a_notice_is_kept_until_its_group_is_made() {
        let (mut early, now) = (Early::default(), Instant::now());
        early.keep(PEER, 1, b"text".to_vec(), now);
        assert_eq!(heard(&mut early, now, 2), [1]);
        assert_eq!(heard(&mut early, now, 1), [1]);
        assert_eq!(heard(&mut early, now, 1), [0; 0]);
    }

    #[test]
    fn notices_about_groups_that_were_left_do_not_crowd_out_others() {
        let (mut early, now) = (Early::default(), Instant::now());
        early.keep(PEER, 7, Vec::new(), now);
        for group in 10..10 + 2 * KEPT_MAX as u64 {
            early.keep(PEER, group, Vec::new(), now); // it comes a little before this rank leaves, …
            early.leave(group);
            early.keep(PEER, group, Vec::new(), now); // … or after
            assert!(early.has_left(group));
        }
        assert_eq!(heard(&mut early, now, 0), [7]);
    }

    #[test]
    fn a_notice_does_not_stay_for_ever_and_the_oldest_gives_way() {
        let (mut early, now) = (Early::default(), Instant::now());
        for group in 0..=KEPT_MAX as u64 {
            early.keep(PEER, group, Vec::new(), now);
        }
        let heard_now = heard(&mut early, now, u64::MAX);
        assert_eq!((heard_now.len(), heard_now[0]), (KEPT_MAX, 1));
        assert_eq!(heard(&mut early, now + KEPT_FOR, u64::MAX), [0; 0]);
    }
}
