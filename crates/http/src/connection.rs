//! One client: its socket, what it has sent, and what must still be sent to it.

use std::borrow::Cow;
use std::io::{self, IoSlice, Read as _, Write as _};
use std::net::IpAddr;
use std::time::Instant;

use crate::head::{HeadLimits, HeadParser};
use crate::request::{Method, Request};
use crate::response::Response;
use crate::stream::{Peer, Stream};

/// The phase of a connection, and since when. Each phase has its deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Waiting for a request, of which nothing or a part has arrived.
    Asking,
    /// All requests were answered.
    Idle,
    /// A request is with a handler on another thread.
    Working,
    /// An answer is being sent.
    Answering,
    /// The last answer was taken and our side is shut down. What the client was still sending is discarded:
    /// if the socket were closed now, the system would discard the answer.
    Leaving,
}

#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) stream: Stream,
    pub(crate) peer: Peer,
    /// Our address that it connected to; nothing for a Unix socket.
    pub(crate) local: Option<IpAddr>,
    pub(crate) phase: Phase,
    pub(crate) since: Instant,
    pub(crate) input: Vec<u8>,
    pub(crate) parser: HeadParser,
    /// A request whose body is incomplete.
    pub(crate) begun: Option<Request>,
    /// Which request is with a handler, and how its answer is to be sent.
    pub(crate) asked: Option<Asked>,
    output: Output,
    /// Is the answer in progress the last one?
    pub(crate) closes: bool,
}

/// What must be kept of a request once a handler has it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asked {
    pub(crate) number: u64,
    pub(crate) method: Method,
    pub(crate) keep_alive: bool,
}

#[derive(Debug, Default)]
struct Output {
    head: Vec<u8>,
    body: Cow<'static, [u8]>,
    /// Bytes of head and body that were taken.
    written: usize,
    /// What had been taken when that last counted as progress.
    noted: usize,
}

/// The result of an attempt to read or write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tried {
    Done,
    /// Not now; an event will follow.
    Blocked,
}

impl Connection {
    pub(crate) fn new(stream: Stream, peer: Peer, limits: HeadLimits, now: Instant) -> Self {
        Connection {
            local: stream.local(),
            stream,
            peer,
            phase: Phase::Asking,
            since: now,
            input: Vec::new(),
            parser: HeadParser::new(limits),
            begun: None,
            asked: None,
            output: Output::default(),
            closes: false,
        }
    }

    pub(crate) fn enter(&mut self, phase: Phase, now: Instant) {
        self.phase = phase;
        self.since = now;
    }

    /// Bytes of unsent output that only this connection holds.
    pub(crate) fn held(&self) -> usize {
        let body = match &self.output.body {
            Cow::Borrowed(_) => 0,
            Cow::Owned(body) => body.capacity(),
        };
        self.output.head.capacity() + body
    }

    /// Reads once into `buffer`; nothing if no bytes are available, 0 at the end of the stream.
    pub(crate) fn poll_read(&mut self, buffer: &mut [u8]) -> io::Result<Option<usize>> {
        loop {
            match self.stream.read(buffer) {
                Ok(length) => return Ok(Some(length)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    pub(crate) fn answer(&mut self, response: Response, with_body: bool, closes: bool, now: Instant) {
        let (head, body) = response.into_parts(!closes);
        let body = if with_body { body } else { Cow::Borrowed(&[][..]) };
        self.output = Output { head: head.into_bytes(), body, ..Output::default() };
        self.closes = closes;
        self.enter(Phase::Answering, now);
    }

    /// Writes what the client takes.
    pub(crate) fn poll_write(&mut self) -> io::Result<Tried> {
        loop {
            let Output { head, body, written, .. } = &mut self.output;
            let head_left = head.get(*written..).unwrap_or_default();
            let body_left = &body[written.saturating_sub(head.len())..];
            if head_left.is_empty() && body_left.is_empty() {
                self.output = Output::default();
                return Ok(Tried::Done);
            }
            // Both in one call: a small answer is one packet.
            match self.stream.write_vectored(&[IoSlice::new(head_left), IoSlice::new(body_left)]) {
                Ok(length) => *written += length,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(Tried::Blocked),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Whether the client has taken enough of the answer since the last time this was true.
    pub(crate) fn has_taken(&mut self, bytes: usize) -> bool {
        let is_enough = self.output.written - self.output.noted >= bytes;
        if is_enough {
            self.output.noted = self.output.written;
        }
        is_enough
    }

    /// Shuts down our side: nothing more will be sent.
    pub(crate) fn shut(&mut self) {
        let _ = self.stream.shut(); // fails only if the peer has closed
        self.input = Vec::new();
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::disallowed_methods, reason = "a connection begins at some time")]

    use std::io::Read as _;

    use super::*;

    #[test]
    fn an_answer_makes_progress_when_a_good_piece_of_it_was_taken() {
        let (ours, mut theirs) = mio::net::UnixStream::pair().unwrap();
        let now = Instant::now();
        let mut connection = Connection::new(Stream::Unix(ours), Peer::Local, HeadLimits::default(), now);
        connection.answer(Response::new(200, "text/plain", vec![b'x'; 4 << 20]), true, true, now);
        assert_eq!(connection.poll_write().unwrap(), Tried::Blocked);
        assert!(connection.has_taken(1 << 10), "what the socket holds");
        assert_eq!(connection.poll_write().unwrap(), Tried::Blocked);
        assert!(!connection.has_taken(1 << 10), "nothing since");
        let mut buffer = vec![0; 4 << 20];
        while theirs.read(&mut buffer).is_ok_and(|length| length > 0) {}
        assert_eq!(connection.poll_write().unwrap(), Tried::Blocked);
        assert!(connection.has_taken(1 << 10) && !connection.has_taken(1 << 10));
    }
}
