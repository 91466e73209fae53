//! The relay's end of a session: numbers requests, keeps them until the server has them, counts answers.
//!
//! Pure: bytes go in and out, a connection can be lost at any byte.

use std::collections::VecDeque;

use crate::wire::{self, Ask, Command, Hello, VERSION};

/// Answers after which they are acknowledged.
const ACKNOWLEDGE_AFTER: u64 = 256;
/// The same in bytes.
const ACKNOWLEDGE_BYTES: usize = 64 << 10;

#[derive(Debug)]
pub(crate) struct Pipe {
    token: [u8; 16],
    /// The number of the last request.
    last: u64,
    /// Requests that the server may not have, encoded.
    log: VecDeque<u8>,
    /// How many bytes were ever removed from the front of `log`.
    removed: u64,
    /// How many bytes were ever written to the present connection or are known to be there.
    written: u64,
    /// Where in the stream each request of `log` ends.
    ends: VecDeque<(u64, u64)>,
    /// Answers received.
    answers: u64,
    acknowledged: u64,
    unacknowledged_bytes: usize,
    scratch: Vec<u8>,
}

impl Pipe {
    pub(crate) fn new(token: [u8; 16]) -> Self {
        Pipe {
            token,
            last: 0,
            log: VecDeque::new(),
            removed: 0,
            written: 0,
            ends: VecDeque::new(),
            answers: 0,
            acknowledged: 0,
            unacknowledged_bytes: 0,
            scratch: Vec::new(),
        }
    }

    /// What to say on a new connection.
    pub(crate) fn hello(&self) -> Hello {
        Hello { version: VERSION, flags: 0, token: self.token, answers: self.answers }
    }

    /// Bytes of requests that the server may not have.
    pub(crate) fn bytes(&self) -> usize {
        self.log.len()
    }

    /// The number of the last request.
    pub(crate) fn last(&self) -> u64 {
        self.last
    }

    /// Whether the session has been used.
    pub(crate) fn is_used(&self) -> bool {
        self.last > 0 || self.answers > 0
    }

    /// Queues a request; returns its number.
    pub(crate) fn send(&mut self, ask: &Ask<'_>) -> u64 {
        const SCRATCH_KEPT: usize = 64 << 10;
        self.last += 1;
        self.scratch.clear();
        wire::encode_numbered(self.last, ask, &mut self.scratch);
        self.put();
        if self.scratch.capacity() > SCRATCH_KEPT {
            self.scratch = Vec::new();
        }
        self.last
    }

    fn put(&mut self) {
        self.log.extend(&self.scratch);
        let end = self.removed + self.log.len() as u64;
        match self.ends.back_mut() {
            Some((number, last_end)) if *number == self.last => *last_end = end,
            _ => self.ends.push_back((self.last, end)),
        }
    }

    /// An answer of this many bytes to request `number` has arrived; false if there is no such request.
    pub(crate) fn answered(&mut self, number: u64, bytes: usize) -> bool {
        if number == 0 || number > self.last {
            return false;
        }
        self.answers += 1;
        self.unacknowledged_bytes += bytes;
        self.remove_through(number); // it executes in order, so it has all before this one
        if self.answers - self.acknowledged >= ACKNOWLEDGE_AFTER
            || self.unacknowledged_bytes >= ACKNOWLEDGE_BYTES
        {
            self.acknowledged = self.answers;
            self.unacknowledged_bytes = 0;
            self.scratch.clear();
            wire::encode(&Command::Acknowledge { answers: self.answers }, &mut self.scratch);
            self.put();
        }
        true
    }

    fn remove_through(&mut self, number: u64) {
        let mut end = self.removed;
        // Not beyond what was written: an acknowledgement may follow the request that was answered.
        while let Some(&(first, first_end)) = self.ends.front()
            && first <= number
            && first_end <= self.written
        {
            end = first_end;
            self.ends.pop_front();
        }
        self.log.drain(..(end - self.removed) as usize);
        self.removed = end;
    }

    /// The session continues on a new connection: the server has executed `executed` requests. False if that
    /// cannot be.
    pub(crate) fn resume(&mut self, executed: u64) -> bool {
        if executed > self.last || self.ends.front().is_some_and(|(first, _)| executed + 1 < *first) {
            return false;
        }
        self.written = self.removed + self.log.len() as u64;
        self.remove_through(executed);
        self.written = self.removed;
        true
    }

    /// The bytes to be written next, in one or two parts.
    pub(crate) fn to_write(&self) -> (&[u8], &[u8]) {
        let skip = (self.written - self.removed) as usize;
        let (first, second) = self.log.as_slices();
        if skip < first.len() { (&first[skip..], second) } else { (&second[skip - first.len()..], &[]) }
    }

    /// This many of them were written.
    pub(crate) fn wrote(&mut self, count: usize) {
        self.written += count as u64;
    }
}
