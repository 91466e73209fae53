//! How long a peer has shown no sign of life, and what follows from that. Pure: time is an argument.

use std::time::{Duration, Instant};

/// A peer that has been unresponsive for this long is mentioned in the log.
const WORRY: Duration = Duration::from_millis(1500);

/// A peer on another host that has been unresponsive for this long is asked on a new connection.
const PROBE: Duration = Duration::from_secs(1);

/// A peer, as one that listens for its signs of life knows it.
#[derive(Debug)]
pub(super) struct Silence {
    since: Instant,
    warned: bool,
}

/// What to do about a peer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Look {
    /// For how long nothing was heard of it.
    pub silence: Duration,
    /// Mention it in the log: once for each silence.
    pub warn: bool,
    /// Ask it on a new connection.
    pub probe: bool,
    /// Give it up.
    pub over: bool,
}

impl Silence {
    pub(super) fn new(now: Instant) -> Self {
        Silence { since: now, warned: false }
    }

    /// It showed a sign of life, or this process was not there to see one.
    pub(super) fn heard(&mut self, now: Instant) {
        *self = Silence::new(now);
    }

    /// `limit` is how long a peer may be unresponsive.
    pub(super) fn look(&mut self, now: Instant, limit: Duration) -> Look {
        self.look_back(self.since, now, limit, true)
    }

    /// The same for a peer whose last sign of life was found out otherwise, perhaps to be earlier than it was said before.
    /// Nothing follows from its silence if it was not `asked`.
    pub(super) fn look_back(&mut self, since: Instant, now: Instant, limit: Duration, asked: bool) -> Look {
        self.warned &= since <= self.since;
        self.since = since;
        let silence = now.saturating_duration_since(self.since);
        if !asked {
            return Look { silence, ..Look::default() };
        }
        let warn = silence >= WORRY && !self.warned;
        self.warned |= warn;
        Look { silence, warn, probe: silence >= PROBE.min(limit / 4), over: silence >= limit }
    }
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "a test needs some time to begin with")]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(4);

    #[test]
    fn a_peer_is_asked_then_mentioned_once_then_given_up() {
        let start = Instant::now();
        let mut silence = Silence::new(start);
        let mut look = |ms| silence.look(start + Duration::from_millis(ms), LIMIT);
        let looks = [0, 999, 1000, 1499, 1500, 2000, 3999, 4000].map(|ms| {
            let Look { warn, probe, over, .. } = look(ms);
            (warn, probe, over)
        });
        assert_eq!(
            looks,
            [
                (false, false, false),
                (false, false, false),
                (false, true, false),
                (false, true, false),
                (true, true, false),
                (false, true, false),
                (false, true, false),
                (false, true, true),
            ]
        );
    }

    #[test]
    fn a_sign_of_life_starts_the_count_again() {
        let start = Instant::now();
        let mut silence = Silence::new(start);
        assert!(silence.look(start + LIMIT / 2, LIMIT).warn);
        silence.heard(start + LIMIT - Duration::from_millis(1));
        let look = silence.look(start + LIMIT + Duration::from_millis(499), LIMIT);
        assert_eq!(look, Look { silence: LIMIT / 8, warn: false, probe: false, over: false });
        assert!(silence.look(start + LIMIT * 2, LIMIT).warn, "the next silence is mentioned again");
    }

    #[test]
    fn with_a_short_limit_a_peer_is_asked_before_that_has_passed() {
        let start = Instant::now();
        let look = Silence::new(start).look(start + Duration::from_millis(50), Duration::from_millis(200));
        assert!(look.probe && !look.over);
    }
}
