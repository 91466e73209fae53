//! The relay's end of a session: numbers requests, keeps them until the server has them, counts answers.
//!
//! A request for an item whose client has left can be *withdrawn*: if the server has not got it, it becomes a
//! request that takes nothing, of the same number and length.
//!
//! Pure: bytes go in and out, a connection can be lost at any byte.

use std::collections::{BTreeSet, VecDeque};

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
    /// Requests to be withdrawn if it turns out that the server has not got them.
    withdrawn: BTreeSet<u64>,
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
            withdrawn: BTreeSet::new(),
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

    /// Nothing needs the answer to this pop: if the server has not got it and will not get it by itself, it
    /// takes no item. Otherwise this is decided by the next connection.
    pub(crate) fn withdraw(&mut self, number: u64) {
        if self.ends.front().is_some_and(|(first, _)| *first <= number) {
            self.withdrawn.insert(number);
            self.blunt();
        }
    }

    /// Changes the withdrawn requests of which no byte was written.
    fn blunt(&mut self) {
        let first = self.ends.front().map_or(u64::MAX, |(first, _)| *first);
        self.withdrawn = self.withdrawn.split_off(&first);
        let Pipe { withdrawn, ends, log, removed, written, .. } = self;
        withdrawn.retain(|number| {
            let index = ends.partition_point(|(other, _)| other < number);
            let start = if index == 0 { *removed } else { ends[index - 1].1 };
            if start < *written {
                return true; // the server may have it
            }
            let mut head: Vec<u8> =
                log.range((start - *removed) as usize..).take(wire::POP_AT_MAX + 1).copied().collect();
            if let Some(at) = wire::blunt_pop(&mut head, *number) {
                log[(start - *removed) as usize + at] = head[at];
            }
            false
        });
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
        self.blunt();
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::Request;
    use crate::wire::{Decoded, MessageLimits, Scan};

    fn pop(key: &'static [u8]) -> Request<'static> {
        Request::QueuePop { key: key.into() }
    }

    fn len(key: &'static [u8]) -> Request<'static> {
        Request::QueueLen { key: key.into() }
    }

    fn add() -> Request<'static> {
        Request::Add { key: b"n".as_slice().into(), delta: 1 }
    }

    /// What is written next, message by message.
    fn written(pipe: &mut Pipe) -> Vec<(u64, Ask<'static>)> {
        let (first, second) = pipe.to_write();
        let bytes = [first, second].concat().leak();
        pipe.wrote(bytes.len());
        let (mut at, mut asks) = (0, Vec::new());
        while at < bytes.len() {
            let decoded = wire::decode(&bytes[at..], &MessageLimits::default(), &mut Scan::default());
            let Ok(Decoded::Whole(command, length)) = decoded else { panic!("{decoded:?}") };
            if let Command::Numbered { number, ask } = command {
                asks.push((number, ask));
            }
            at += length;
        }
        asks
    }

    #[test]
    fn a_pop_that_was_not_written_is_withdrawn_immediately() {
        let mut pipe = Pipe::new([0; 16]);
        pipe.send(&Ask::Call(add()));
        pipe.send(&Ask::Call(pop(b"a")));
        pipe.send(&Ask::CallAfter(7, pop(b"b")));
        pipe.send(&Ask::Call(pop(b"c")));
        pipe.withdraw(2);
        pipe.withdraw(3);
        pipe.withdraw(1); // not a pop
        let expected = [
            (1, Ask::Call(add())),
            (2, Ask::Call(len(b"a"))),
            (3, Ask::CallAfter(7, len(b"b"))),
            (4, Ask::Call(pop(b"c"))),
        ];
        assert_eq!(written(&mut pipe), expected);
    }

    #[test]
    fn the_next_connection_decides_about_a_pop_that_was_written() {
        for executed in 0..=2 {
            let mut pipe = Pipe::new([0; 16]);
            pipe.send(&Ask::Call(pop(b"a")));
            pipe.send(&Ask::Call(pop(b"b")));
            assert_eq!(written(&mut pipe).len(), 2);
            pipe.withdraw(1);
            pipe.withdraw(2);
            assert_eq!(written(&mut pipe), [], "it must not be sent twice");
            assert!(pipe.resume(executed));
            let again = [(1, Ask::Call(len(b"a"))), (2, Ask::Call(len(b"b")))];
            assert_eq!(written(&mut pipe), again[executed as usize..]);
            assert!(pipe.withdrawn.is_empty());
        }
    }

    #[test]
    fn an_answered_pop_is_not_withdrawn_and_its_number_hits_no_other_message() {
        let mut pipe = Pipe::new([0; 16]);
        for _ in 0..ACKNOWLEDGE_AFTER {
            let number = pipe.send(&Ask::Call(pop(b"a")));
            assert_eq!(written(&mut pipe).len(), 1);
            assert!(pipe.answered(number, 16));
        }
        // What is left in the log is an acknowledgement, under the number of the last pop.
        assert!(pipe.bytes() > 0);
        pipe.withdraw(ACKNOWLEDGE_AFTER);
        assert_eq!(written(&mut pipe), []);
        assert!(pipe.resume(ACKNOWLEDGE_AFTER));
        let number = pipe.send(&Ask::Call(pop(b"b")));
        assert_eq!(written(&mut pipe), [(number, Ask::Call(pop(b"b")))]);
    }
}
