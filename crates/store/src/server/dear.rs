//! Schedules expensive requests: those that cost far more than their bytes.
//!
//! One byte asks for all facts, or for a list of all keys. Such a request is served immediately if no other
//! one waits and the round has time left for it. Otherwise its client waits in line, and so do its later
//! requests. So all expensive requests of a round together take a [`SHARE`] and one request more, however
//! many clients ask, and each gets its turn.

use std::collections::VecDeque;
use std::time::Duration;

/// How much of one round expensive requests may take.
const SHARE: Duration = Duration::from_millis(1);

/// The connections that wait for an expensive request.
#[derive(Debug, Default)]
pub(super) struct Dear {
    /// Slots of connections, each at most once.
    line: VecDeque<usize>,
    /// Spent in this round.
    spent: Duration,
    /// The connection that was called from the line.
    called: Option<usize>,
    /// All are served now, because the server stops.
    is_open: bool,
}

impl Dear {
    /// A round begins.
    pub(super) fn renew(&mut self) {
        self.spent = Duration::ZERO;
    }

    /// Whether this connection may be served an expensive request now. If not, it has to [`Dear::wait`].
    pub(super) fn allows(&self, slot: usize) -> bool {
        let is_next = self.called == Some(slot) || self.line.is_empty();
        self.is_open || is_next && self.spent <= SHARE
    }

    /// Appends a connection to the line, if it is not in it.
    pub(super) fn wait(&mut self, slot: usize) {
        self.line.push_back(slot);
    }

    /// An expensive request was served.
    pub(super) fn note(&mut self, took: Duration) {
        self.spent += took;
    }

    /// Calls the next connection in line, if there is time left. Its turn lasts until the next
    /// [`Dear::call`].
    pub(super) fn call(&mut self) -> Option<usize> {
        self.called = if self.spent <= SHARE { self.line.pop_front() } else { None };
        self.called
    }

    /// Does a connection wait?
    pub(super) fn is_pending(&self) -> bool {
        !self.line.is_empty()
    }

    /// From now on all are served.
    pub(super) fn open(&mut self) {
        self.is_open = true;
        self.line.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_millis(2);

    /// A round in which `askers` ask in that order, unless they are in line, and each request takes `took`.
    /// Returns those that were served.
    fn round(dear: &mut Dear, askers: &[usize], took: Duration) -> Vec<usize> {
        let mut served = Vec::new();
        let mut ask = |dear: &mut Dear, slot| {
            if dear.allows(slot) {
                served.push(slot);
                dear.note(took);
            } else {
                dear.wait(slot);
            }
        };
        dear.renew();
        for &slot in askers {
            if !dear.line.contains(&slot) {
                ask(dear, slot);
            }
        }
        while let Some(slot) = dear.call() {
            ask(dear, slot);
        }
        served
    }

    #[test]
    fn one_long_request_a_round_however_many_ask_and_everybody_has_a_turn() {
        let mut dear = Dear::default();
        assert_eq!(round(&mut dear, &[1, 2, 3], LONG), [1]);
        assert!(dear.is_pending());
        // A client that asks again and again gets its turn after those that have waited.
        assert_eq!(round(&mut dear, &[1, 2, 3], LONG), [2]);
        assert_eq!(round(&mut dear, &[1, 2, 3], LONG), [3]);
        assert_eq!(round(&mut dear, &[], LONG), [1]);
        assert_eq!(round(&mut dear, &[4], LONG), [2]);
        assert_eq!(round(&mut dear, &[], LONG), [4]);
        assert!(!dear.is_pending());
    }

    #[test]
    fn short_requests_do_not_wait() {
        let mut dear = Dear::default();
        let askers: Vec<_> = (0..100).collect();
        assert_eq!(round(&mut dear, &askers, Duration::from_micros(10)), askers);
        assert!(!dear.is_pending());
    }

    #[test]
    fn at_the_end_everybody_is_served() {
        let mut dear = Dear::default();
        round(&mut dear, &[1, 2, 3], LONG);
        dear.open();
        assert_eq!(round(&mut dear, &[2, 3, 1], LONG), [2, 3, 1]);
    }
}
