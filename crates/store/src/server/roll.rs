//! The server's list of connected clients, built in small steps.
//!
//! Thousands of connections are scattered over memory, so visiting all of them takes a while: a step visits
//! some, and clients get their turns in between. Only the most recently active are kept.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::net::SocketAddr;
use std::sync::mpsc;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use crate::connection::Connection;
use crate::request::Operation;
use crate::table::{ClientId, Table};

/// The connected clients.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct Clients {
    /// How many there are, listed or not.
    pub count: usize,
    /// The most recently active first.
    pub clients: Vec<ClientFacts>,
}

impl Clients {
    /// How many are listed at most.
    pub const LIMIT_MAX: usize = 1000;
}

/// One connected client.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct ClientFacts {
    /// Its address.
    pub peer: String,
    /// How long it has been connected.
    pub connected_seconds: f64,
    /// Nothing if it has not sent a request yet.
    pub last_operation: Option<String>,
    /// Time since it last sent something.
    pub idle_seconds: f64,
    /// Bytes received from it.
    pub bytes_in: u64,
    /// Bytes sent to it.
    pub bytes_out: u64,
    /// Does it wait for keys?
    pub waits: bool,
}

/// Connections looked at in one step.
const STEP: usize = 1024;

/// A list in the making.
#[derive(Debug)]
pub(super) struct Roll {
    limit: usize,
    answer: mpsc::Sender<Rolled>,
    next: usize,
    /// The least recently active of the kept ones first, to replace it by a more recent one.
    best: BinaryHeap<Reverse<Seen>>,
}

/// The state of one connection, ordered by when it last sent something.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Seen {
    last_heard: Instant,
    slot: usize,
    peer: SocketAddr,
    since: Instant,
    last_operation: Option<&'static str>,
    bytes_in: u64,
    bytes_out: u64,
    waits: bool,
}

/// The result for the thread that asked, which makes it readable.
#[derive(Debug)]
pub(super) struct Rolled {
    count: usize,
    best: BinaryHeap<Reverse<Seen>>,
    now: Instant,
}

impl Roll {
    pub(super) fn new(limit: usize, answer: mpsc::Sender<Rolled>) -> Self {
        Roll { limit, answer, next: 0, best: BinaryHeap::new() }
    }

    /// Visits some more connections; true when all have been visited.
    pub(super) fn step(&mut self, connections: &[Option<Box<Connection>>], table: &Table) -> bool {
        for (slot, connection) in connections.iter().enumerate().skip(self.next).take(STEP) {
            let Some(connection) = connection else { continue };
            if self.best.len() == self.limit {
                let last = self.best.peek().map(|Reverse(seen)| (seen.last_heard, seen.slot));
                if last.is_none_or(|last| (connection.last_heard, slot) <= last) {
                    continue;
                }
                self.best.pop();
            }
            self.best.push(Reverse(Seen {
                last_heard: connection.last_heard,
                slot,
                peer: connection.peer,
                since: connection.since,
                last_operation: connection.last_operation.map(Operation::name),
                bytes_in: connection.bytes_in,
                bytes_out: connection.bytes_out,
                waits: table.is_waiting(ClientId(slot)),
            }));
        }
        self.next += STEP;
        self.next >= connections.len()
    }

    pub(super) fn answer(self, count: usize, now: Instant) {
        let _ = self.answer.send(Rolled { count, best: self.best, now }); // the asker may have timed out
    }
}

impl Rolled {
    pub(super) fn show(self) -> Clients {
        let seconds_since = |then: Instant| self.now.saturating_duration_since(then).as_secs_f64();
        let clients = self.best.into_sorted_vec().into_iter().map(|Reverse(seen)| ClientFacts {
            peer: seen.peer.to_string(),
            connected_seconds: seconds_since(seen.since),
            last_operation: seen.last_operation.map(Into::into),
            idle_seconds: seconds_since(seen.last_heard),
            bytes_in: seen.bytes_in,
            bytes_out: seen.bytes_out,
            waits: seen.waits,
        });
        Clients { count: self.count, clients: clients.collect() }
    }
}
