//! Until when an operation may take: a start and a limit.
//!
//! A store's operation reads the clock here and nowhere else; everything below gets the deadline handed down, so that one
//! limit holds for all the steps of a call.

#![expect(clippy::disallowed_methods, reason = "this file is where operations read the clock")]

use std::time::{Duration, Instant};

/// A point in time by which an operation must be done, or never.
#[derive(Clone, Copy, Debug)]
pub struct Deadline {
    start: Instant,
    limit: Option<Duration>,
}

impl Deadline {
    /// `limit` from now. If the limit is too long for the clock, there is no deadline.
    pub fn after(limit: Duration) -> Self {
        let start = Instant::now();
        Deadline { start, limit: start.checked_add(limit).map(|_| limit) }
    }

    /// No limit.
    pub fn never() -> Self {
        Deadline { start: Instant::now(), limit: None }
    }

    /// The time since the operation began.
    pub fn elapsed(&self) -> Duration {
        self.start.elapsed()
    }

    /// The time that is left, zero if none; nothing if there is no limit.
    pub fn left(&self) -> Option<Duration> {
        self.limit.map(|limit| limit.saturating_sub(self.elapsed()))
    }

    /// Is the time up?
    pub fn passed(&self) -> bool {
        self.left().is_some_and(|left| left.is_zero())
    }

    /// The point in time, if there is one.
    pub fn at(&self) -> Option<Instant> {
        self.limit.and_then(|limit| self.start.checked_add(limit))
    }

    /// The limit it was given.
    pub fn limit(&self) -> Option<Duration> {
        self.limit
    }

    /// The earlier of this deadline and `limit` from now, still counted from this start.
    #[must_use]
    pub fn at_most(&self, limit: Duration) -> Self {
        let capped = self.elapsed().saturating_add(limit);
        Deadline { start: self.start, limit: Some(self.limit.map_or(capped, |own| own.min(capped))) }
    }

    /// Lets up to `pause` pass, but not more than is left. For stores that have nothing to be woken by.
    pub fn pause(&self, pause: Duration) {
        std::thread::sleep(self.left().map_or(pause, |left| left.min(pause)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deadline_without_limit_never_passes_and_a_zero_one_has_passed() {
        assert!(!Deadline::never().passed());
        assert!(!Deadline::after(Duration::MAX).passed());
        assert!(Deadline::after(Duration::ZERO).passed());
    }

    #[test]
    fn a_shorter_limit_wins() {
        let deadline = Deadline::after(Duration::from_secs(60));
        assert!(deadline.at_most(Duration::ZERO).passed());
        assert!(!deadline.at_most(Duration::from_secs(600)).passed());
        assert_eq!(deadline.at_most(Duration::from_secs(600)).limit(), Some(Duration::from_secs(60)));
        assert!(Deadline::never().at_most(Duration::ZERO).passed());
    }
}
