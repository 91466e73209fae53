//! Which threads wait in an engine, which of them watches, and which must be woken. Pure: no clock, no lock, no descriptor.
//!
//! A waiting thread is awake, and then polls everything that is under way, or asleep. One sleeper *watches*: it sleeps on
//! the bell and on the sockets, on behalf of everything that was under way when it fell asleep. A thread that falls asleep
//! later watches in its place if the wants have changed since. All others are woken by name only.
//!
//! So that nothing stands still, three rules hold whenever the engine's lock is free and something is under way:
//! 1. A waiting thread is awake, or a thread watches, or the helper has been called and does not rest.
//! 2. If the wants have changed since the watching thread fell asleep, it has been woken or another thread is awake.
//! 3. A sleeper whose operation is over has been woken.

/// A thread in `wait`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Waiter(u64);

/// Who sleeps on the bell and the sockets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Watching {
    Helper,
    Waiter(Waiter),
}

/// Who has to act now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wake {
    /// Another thread is awake, or watches with the latest wants, or nothing is under way.
    Nobody,
    /// This thread sleeps and must drive.
    Waiter(Waiter),
    /// No thread waits: the helper must drive.
    Helper,
}

#[derive(Debug, Default)]
pub(super) struct Roster {
    /// Waiters that are awake.
    awake: usize,
    /// In the order in which they fell asleep, with whether they were woken since.
    asleep: Vec<(Waiter, bool)>,
    watching: Option<Watching>,
    /// The wants have changed since the watching thread fell asleep.
    stale: bool,
    /// The helper sleeps: it watches, or watched until it was relieved, or rests because threads waited when it looked around.
    helper_sleeps: bool,
    next: u64,
}

impl Roster {
    /// A thread begins to wait; it is awake.
    pub(super) fn enter(&mut self) -> Waiter {
        self.awake += 1;
        self.next += 1;
        Waiter(self.next)
    }

    /// Does any thread wait?
    #[inline]
    pub(super) fn is_waited_in(&self) -> bool {
        self.awake > 0 || !self.asleep.is_empty()
    }

    #[inline]
    pub(super) fn has_sleepers(&self) -> bool {
        !self.asleep.is_empty()
    }

    #[cfg(test)]
    fn sleepers(&self) -> impl Iterator<Item = Waiter> + '_ {
        self.asleep.iter().filter(|(_, woken)| !woken).map(|(waiter, _)| *waiter)
    }

    /// Does a thread that falls asleep now have to watch? Not if another waiter watches with the latest wants. The helper
    /// is relieved in any case: it would have to wake the waiter in turn.
    pub(super) fn must_watch(&self) -> bool {
        self.stale || !matches!(self.watching, Some(Watching::Waiter(_)))
    }

    /// A thread falls asleep; with `watches` on the bell and the sockets, with the latest wants.
    pub(super) fn fall_asleep(&mut self, who: Watching, watches: bool) {
        match who {
            Watching::Waiter(waiter) => {
                self.awake -= 1;
                self.asleep.push((waiter, false));
            }
            Watching::Helper => self.helper_sleeps = true,
        }
        if watches {
            self.watching = Some(who);
            self.stale = false;
        }
    }

    /// Does the helper watch with wants that are not the latest, or sleep without watching although no thread waits any more?
    pub(super) fn helper_is_behind(&self) -> bool {
        match self.watching {
            Some(Watching::Helper) => self.stale,
            _ => self.helper_sleeps && !self.is_waited_in(),
        }
    }

    #[cfg(test)]
    pub(super) fn helper_watches(&self) -> bool {
        self.watching == Some(Watching::Helper)
    }

    /// The helper looks around. True if it rests now: threads wait, and drive what is under way.
    pub(super) fn helper_rests(&mut self, is_busy: bool) -> bool {
        self.helper_sleeps = is_busy && self.is_waited_in();
        self.helper_sleeps
    }

    /// A thread has woken up, by itself or not. True if it was the watching thread: then it must silence the bell and tell the
    /// peers that this rank is awake.
    pub(super) fn wake_up(&mut self, who: Watching) -> bool {
        match who {
            Watching::Waiter(waiter) => {
                self.asleep.retain(|(other, _)| *other != waiter);
                self.awake += 1;
            }
            Watching::Helper => self.helper_sleeps = false,
        }
        let watched = self.watching == Some(who);
        if watched {
            self.watching = None;
        }
        watched
    }

    /// A thread wakes this one.
    pub(super) fn woken(&mut self, waiter: Waiter) {
        for (other, woken) in &mut self.asleep {
            *woken |= *other == waiter;
        }
    }

    /// Something moved or was called: what is wanted now is not what it was.
    #[inline]
    pub(super) fn wants_changed(&mut self) {
        self.stale = true;
    }

    /// A thread that was awake stops waiting.
    pub(super) fn leave(&mut self, is_busy: bool) -> Wake {
        self.awake -= 1;
        self.successor(is_busy)
    }

    /// Who has to act if the calling thread, which does not wait, does nothing more.
    pub(super) fn successor(&self, is_busy: bool) -> Wake {
        if !is_busy || self.awake > 0 || self.asleep.iter().any(|(_, woken)| *woken) {
            return Wake::Nobody;
        }
        match (self.watching, self.asleep.last()) {
            (Some(_), _) if !self.stale => Wake::Nobody,
            (Some(Watching::Waiter(waiter)), _) | (None | Some(Watching::Helper), Some(&(waiter, _))) => {
                Wake::Waiter(waiter)
            }
            (None | Some(Watching::Helper), None) => Wake::Helper,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asleep(roster: &mut Roster) -> Waiter {
        let waiter = roster.enter();
        let watches = roster.must_watch();
        roster.fall_asleep(Watching::Waiter(waiter), watches);
        waiter
    }

    #[test]
    fn a_thread_that_is_awake_drives_for_all() {
        let mut roster = Roster::default();
        asleep(&mut roster);
        let _awake = roster.enter();
        roster.wants_changed();
        assert_eq!(roster.successor(true), Wake::Nobody);
    }

    #[test]
    fn the_last_waiter_leaves_to_the_helper_what_is_under_way_and_nothing_else() {
        let mut roster = Roster::default();
        roster.enter();
        assert!(roster.is_waited_in());
        assert_eq!(roster.leave(true), Wake::Helper);
        assert!(!roster.is_waited_in());
        roster.enter();
        assert_eq!(roster.leave(false), Wake::Nobody);
    }

    #[test]
    fn the_last_waiter_wakes_a_helper_that_watches_old_wants_and_no_other() {
        let mut roster = Roster::default();
        roster.fall_asleep(Watching::Helper, true);
        roster.enter();
        assert_eq!(roster.leave(true), Wake::Nobody);
        roster.enter();
        roster.wants_changed();
        assert_eq!(roster.leave(true), Wake::Helper);
        assert!(roster.wake_up(Watching::Helper));
        assert!(!roster.wake_up(Watching::Helper));
    }

    #[test]
    fn a_thread_that_watched_and_leaves_wakes_the_last_that_fell_asleep() {
        let mut roster = Roster::default();
        let (first, _second, third) = (asleep(&mut roster), asleep(&mut roster), asleep(&mut roster));
        assert!(roster.has_sleepers());
        assert!(roster.wake_up(Watching::Waiter(first)), "the first watched for all");
        assert_eq!(roster.leave(true), Wake::Waiter(third));
    }

    #[test]
    fn a_thread_that_falls_asleep_watches_unless_another_waiter_does_with_the_latest_wants() {
        let mut roster = Roster::default();
        assert!(roster.must_watch());
        roster.fall_asleep(Watching::Helper, true);
        assert!(roster.must_watch(), "a waiter relieves the helper");
        asleep(&mut roster);
        assert!(!roster.must_watch());
        roster.wants_changed();
        assert!(roster.must_watch());
    }

    #[test]
    fn the_helper_is_behind_only_while_it_watches_with_old_wants() {
        let mut roster = Roster::default();
        roster.wants_changed();
        assert!(!roster.helper_is_behind(), "it does not watch");
        roster.fall_asleep(Watching::Helper, true);
        assert!(!roster.helper_is_behind());
        roster.wants_changed();
        assert!(roster.helper_is_behind());
        asleep(&mut roster);
        roster.wants_changed();
        assert!(!roster.helper_is_behind(), "it was relieved");
    }

    #[test]
    fn the_helper_rests_while_threads_wait_and_is_behind_once_none_does() {
        let mut roster = Roster::default();
        assert!(!roster.helper_rests(true), "no thread waits");
        assert!(!roster.helper_is_behind());
        roster.enter();
        assert!(!roster.helper_rests(false), "nothing is under way");
        assert!(roster.helper_rests(true));
        assert!(!roster.helper_is_behind(), "a thread waits");
        assert_eq!(roster.leave(false), Wake::Nobody, "nothing is under way");
        assert!(roster.helper_is_behind(), "the next call has to wake it");
        assert!(!roster.helper_rests(true));
        assert!(!roster.helper_is_behind());
    }

    #[test]
    fn a_helper_that_was_relieved_is_behind_once_no_thread_waits() {
        let mut roster = Roster::default();
        roster.fall_asleep(Watching::Helper, true);
        let waiter = asleep(&mut roster);
        assert!(!roster.helper_is_behind(), "it was relieved");
        assert!(roster.wake_up(Watching::Waiter(waiter)));
        assert_eq!(roster.leave(false), Wake::Nobody, "nothing is under way");
        assert!(roster.helper_is_behind(), "it still sleeps: the next call has to wake it");
        assert!(!roster.wake_up(Watching::Helper));
        assert!(!roster.helper_is_behind());
    }

    #[test]
    fn a_thread_that_was_relieved_does_not_silence_the_bell_when_it_wakes_up() {
        let mut roster = Roster::default();
        let first = asleep(&mut roster);
        roster.wants_changed();
        let second = asleep(&mut roster);
        assert!(!roster.wake_up(Watching::Waiter(first)));
        assert_eq!(roster.sleepers().collect::<Vec<_>>(), [second]);
        assert_eq!(roster.leave(true), Wake::Nobody, "the second watches");
    }

    #[test]
    fn the_watching_thread_is_woken_if_the_wants_have_changed_and_only_once() {
        let mut roster = Roster::default();
        let first = asleep(&mut roster);
        let _second = asleep(&mut roster);
        assert_eq!(roster.successor(true), Wake::Nobody);
        roster.wants_changed();
        assert_eq!(roster.successor(false), Wake::Nobody, "nothing is under way");
        assert_eq!(roster.successor(true), Wake::Waiter(first));
        roster.woken(first);
        assert_eq!(roster.successor(true), Wake::Nobody);
        assert_eq!(roster.sleepers().count(), 1);
        roster.wake_up(Watching::Waiter(first));
        roster.fall_asleep(Watching::Waiter(first), true);
        assert_eq!(roster.successor(true), Wake::Nobody, "it knows the latest wants");
    }

    /// Random schedules of threads that enter, sleep, are woken and leave: the rules at the top of the file hold after each step.
    #[test]
    fn somebody_always_drives() {
        for seed in 1..=2000_u64 {
            let mut roster = Roster::default();
            let (mut awake, mut sleeping): (Vec<Waiter>, Vec<Waiter>) = (Vec::new(), Vec::new());
            let (mut helper_sleeps, mut helper_called) = (false, true);
            let mut random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
            for _ in 0..60 {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                let pick = (random >> 32) as usize;
                let mut act = |wake: Wake, roster: &mut Roster| match wake {
                    Wake::Nobody => {}
                    Wake::Waiter(waiter) => roster.woken(waiter),
                    Wake::Helper => helper_called = true,
                };
                match random % 7 {
                    0 => awake.push(roster.enter()),
                    1 if !awake.is_empty() => {
                        let waiter = awake.swap_remove(pick % awake.len());
                        let watches = roster.must_watch() || pick.is_multiple_of(2);
                        roster.fall_asleep(Watching::Waiter(waiter), watches);
                        sleeping.push(waiter);
                    }
                    2 if !sleeping.is_empty() => {
                        let waiter = sleeping.swap_remove(pick % sleeping.len());
                        roster.wake_up(Watching::Waiter(waiter));
                        awake.push(waiter);
                    }
                    3 if !awake.is_empty() => {
                        awake.swap_remove(pick % awake.len());
                        let wake = roster.leave(true);
                        act(wake, &mut roster);
                    }
                    4 => {
                        roster.wants_changed();
                        let wake = roster.successor(true);
                        act(wake, &mut roster);
                    }
                    5 if !helper_sleeps && !roster.is_waited_in() => {
                        roster.fall_asleep(Watching::Helper, true);
                        (helper_sleeps, helper_called) = (true, false);
                    }
                    6 if helper_sleeps => {
                        roster.wake_up(Watching::Helper);
                        (helper_sleeps, helper_called) = (false, true);
                    }
                    _ => {}
                }
                let woken = roster.asleep.iter().any(|(_, woken)| *woken);
                let watched = roster.watching.is_some() && !roster.stale;
                let helped = helper_called && !roster.is_waited_in();
                assert!(!awake.is_empty() || woken || watched || helped, "seed {seed}: {roster:?}");
                let watcher = match roster.watching {
                    Some(Watching::Waiter(waiter)) => sleeping.contains(&waiter),
                    Some(Watching::Helper) => helper_sleeps,
                    None => true,
                };
                assert!(watcher, "seed {seed}: a thread that is awake cannot watch: {roster:?}");
            }
        }
    }
}
