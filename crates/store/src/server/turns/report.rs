//! What the server reports about itself: its facts, and a limited number of log lines.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use super::{LOG_LINES, Loop};
use crate::request::{Operation, show_keys};
use crate::server::{Closed, Facts, WaiterFacts};
use crate::table::ClientId;

impl Loop {
    #[cold]
    pub(super) fn note(&mut self, closed: Closed, peer: Option<SocketAddr>, reason: &str) {
        *self.counters.closed.entry(closed).or_default() += 1;
        if self.log.allows() {
            let peer = peer.map_or("a client".to_string(), |peer| peer.to_string());
            tracing::warn!("store server at {} closed the connection of {peer}: {reason}", self.address);
        }
    }

    pub(super) fn facts(&self, waiters_max: usize) -> Facts {
        let waiters = self.table.oldest_waiters(waiters_max);
        let operations =
            Operation::ALL.into_iter().zip(self.counters.operations).filter(|(_, count)| *count > 0);
        Facts {
            address: self.address.to_string(),
            uptime_seconds: self.now.duration_since(self.started).as_secs_f64(),
            connections: self.count,
            connections_max: self.limits.connections,
            accepted: self.counters.accepted,
            closed: self.counters.closed.clone(),
            operations: operations.map(|(operation, count)| (operation.name().to_string(), count)).collect(),
            bytes_in: self.counters.bytes_in,
            bytes_out: self.counters.bytes_out,
            keys: self.table.keys(),
            keys_max: self.limits.table.keys,
            queue_items: self.table.queue_items(),
            queue_items_max: self.limits.table.queue_items,
            table_bytes: self.table.bytes(),
            buffer_bytes: self.buffered,
            memory_max: self.limits.table.bytes,
            waiters_count: self.table.waiters_count(),
            oldest_wait_seconds: self
                .table
                .oldest_wait()
                .map_or(0.0, |since| self.now.duration_since(since).as_secs_f64()),
            waiters: waiters
                .into_iter()
                .map(|waiter| WaiterFacts {
                    peer: self.peer_of(waiter.client),
                    operation: waiter.operation.name().to_string(),
                    keys: show_keys(&waiter.missing),
                    keys_count: waiter.missing_count,
                    seconds: self.now.duration_since(waiter.since).as_secs_f64(),
                })
                .collect(),
        }
    }

    pub(super) fn peer_of(&self, client: ClientId) -> String {
        match self.connections.get(client.0).and_then(Option::as_ref) {
            Some(connection) => connection.peer.to_string(),
            None => "the client that asks".into(), // it is not in the list during its turn
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
    pub(super) fn renew(&mut self, now: Instant) -> Option<String> {
        if now.duration_since(self.renewed) < Duration::from_secs(1) {
            return None;
        }
        self.renewed = now;
        self.left = LOG_LINES;
        let suppressed = std::mem::take(&mut self.suppressed);
        (suppressed > 0)
            .then(|| format!("store server closed {suppressed} more connections for similar reasons"))
    }
}
