//! A limited number of log lines about closed connections.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use super::{Backend, LOG_LINES, Loop};
use crate::server::Closed;

impl<B: Backend> Loop<B> {
    #[cold]
    pub(crate) fn note(&mut self, closed: Closed, peer: Option<SocketAddr>, reason: &str) {
        *self.counters.closed.entry(closed).or_default() += 1;
        if self.log.allows() {
            let peer = peer.map_or("a client".to_string(), |peer| peer.to_string());
            tracing::warn!("{} at {} closed the connection of {peer}: {reason}", B::NAME, self.address);
        }
    }
}

/// Clients must not be able to fill the log: a few lines per second, then a count.
#[derive(Debug)]
pub(super) struct LogBudget {
    pub(super) left: u32,
    pub(super) suppressed: u64,
    pub(super) renewed: Instant,
}

impl LogBudget {
    pub(super) fn new(now: Instant) -> Self {
        LogBudget { left: LOG_LINES, suppressed: 0, renewed: now }
    }

    pub(super) fn allows(&mut self) -> bool {
        if self.left == 0 {
            self.suppressed += 1;
            return false;
        }
        self.left -= 1;
        true
    }

    /// Starts a new second, and returns a line about those that were suppressed.
    pub(super) fn renew(&mut self, name: &str, now: Instant) -> Option<String> {
        if now.duration_since(self.renewed) < Duration::from_secs(1) {
            return None;
        }
        self.renewed = now;
        self.left = LOG_LINES;
        let suppressed = std::mem::take(&mut self.suppressed);
        (suppressed > 0).then(|| format!("{name} closed {suppressed} more connections for similar reasons"))
    }
}
