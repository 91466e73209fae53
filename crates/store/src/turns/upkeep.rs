//! What is done between the turns of clients: memory limits, connections that take too long, the end.

use std::time::{Duration, Instant};

use tenfold_base::show_duration;

use super::{Backend, End, HELD_LIGHT, Loop, Turn, refuse};
use crate::connection::{Connection, PROGRESS};
use crate::server::{Closed, Limits};

impl<B: Backend> Loop<B> {
    pub(super) fn count_memory(&mut self, connection: &mut Connection) {
        let held = connection.held();
        self.buffered = self.buffered + held - connection.counted;
        connection.counted = held;
    }

    /// A full store still answers: buffers may take an eighth more than the store's limit.
    pub(super) fn memory_max(&self) -> usize {
        self.limits.table.bytes + self.limits.table.bytes / 8
    }

    pub(super) fn is_over_memory(&self) -> bool {
        self.back.bytes() + self.buffered > self.memory_max()
    }

    /// Closes connections until memory is within its limit: first those that have held memory for the longest
    /// time, but not the one whose turn it is, which grows in `slot`.
    #[cold]
    pub(super) fn relieve(&mut self, slot: usize) {
        while self.is_over_memory() {
            if B::relieve(self) {
                continue;
            }
            let hoards = |connection: &Connection| {
                let since = connection.hoards_since().filter(|_| connection.counted > HELD_LIGHT);
                since.map(|since| (since, std::cmp::Reverse(connection.counted)))
            };
            let all = self.connections.iter().enumerate();
            let hoarders = all.filter_map(|(slot, connection)| Some((hoards(connection.as_deref()?)?, slot)));
            let worst = hoarders.min().map_or(slot, |(_, slot)| slot);
            let Some(connection) = self.connections[worst].take_if(|worst| worst.counted > HELD_LIGHT) else {
                return; // the table holds the memory, or each connection holds little
            };
            let (held, limit) = (connection.counted, self.memory_max());
            let reason =
                format!("it holds {held} bytes of buffers and the server is at its limit of {limit} bytes");
            self.close(Turn { connection, slot: worst, messages: 0 }, refuse(Closed::Memory, reason));
        }
    }

    pub(super) fn tick(&mut self) {
        B::tick(self);
        if let Some(line) = self.log.renew(B::NAME, self.now) {
            tracing::warn!("{line}");
        }
        for slot in 0..self.connections.len() {
            let Some(connection) = &self.connections[slot] else { continue };
            if let Some(end) = overdue(connection, &self.limits, self.now) {
                let connection = self.connections[slot].take().expect("it was just looked at");
                self.close(Turn { connection, slot, messages: 0 }, end);
            }
        }
        self.flush_woken();
    }

    /// Accepts no further connections and ends after `grace`, or when all connections are closed.
    pub(crate) fn stop(&mut self, grace: Duration) {
        self.stop_at = Some(self.now + grace);
        for mut listener in self.listeners.drain(..) {
            let _ = self.poll.registry().deregister(&mut *listener);
        }
    }

    /// Answers what has arrived before the end, as far as the sockets accept it.
    pub(super) fn last_words(&mut self, buffer: &mut [u8]) {
        B::end(self);
        for slot in 0..self.connections.len() {
            if let Some(Some(connection)) = self.connections.get_mut(slot) {
                connection.in_line = false;
            }
            self.hear(slot, false);
            self.serve(slot, buffer);
        }
        while let Some(slot) = self.again.pop() {
            self.flush(slot);
        }
    }
}

pub(super) fn overdue(connection: &Connection, limits: &Limits, now: Instant) -> Option<End> {
    let over = |since: Instant, limit: Duration| now.duration_since(since) >= limit;
    if !connection.validated && over(connection.since, limits.handshake_timeout) {
        let limit = show_duration(limits.handshake_timeout);
        return Some(refuse(
            Closed::HandshakeTimeout,
            format!("it did not send the handshake within {limit}"),
        ));
    }
    if connection.message_since.is_some_and(|since| over(since, limits.message_timeout))
        && connection.output.is_empty()
        && !connection.in_line
    {
        let (got, limit) = (connection.input.len(), show_duration(limits.message_timeout));
        let reason = format!(
            "it did not finish a message within {limit}: {got} bytes of at least {}",
            connection.needs
        );
        return Some(refuse(Closed::MessageTimeout, reason));
    }
    if connection.stalled_since.is_some_and(|since| over(since, limits.write_timeout)) {
        let (unsent, limit) = (connection.output.len(), show_duration(limits.write_timeout));
        return Some(refuse(
            Closed::WriteTimeout,
            format!("it read fewer than {PROGRESS} of the {unsent} bytes it asked for in {limit}"),
        ));
    }
    None
}
