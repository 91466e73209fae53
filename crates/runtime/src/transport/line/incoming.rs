//! The half of a line on which this process receives: a connection that the peer opened, and the message that is being read.

use std::io;
use std::net::TcpStream;
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::task::Poll;

use socket2::SockRef;
use tenfold_memory::{Bytes, Head, NotInherited, Span, socket};

use super::frame::{Frame, HEADER, LinkId};
use super::{LOCAL_BUFFER, Message, SHORT, is_within_host, set_options};
use crate::transport::Socket;

/// After so many messages within a host the system is asked again not to acknowledge each of them: it forgets that when
/// a line was idle.
const RENEWAL: u32 = 32;

/// Buffers that are kept for the next messages.
const SPARE_MAX: usize = 2;

#[derive(Debug)]
pub(super) struct Incoming {
    pub(super) stream: Socket,
    within_host: bool,
    header: [u8; HEADER],
    /// How much of `header` was read.
    header_read: usize,
    /// The message under way, once its header was read.
    pub(super) current: Option<Current>,
    /// What was read too far; comes before what the socket has.
    ahead: Ahead,
    /// How long the last message was that came into a buffer: the next will be, too.
    pub(super) guess: usize,
    /// How many messages were read, modulo 2³².
    count: u32,
    spare: Vec<Vec<u8>>,
}

/// A message that is being read.
#[derive(Debug)]
pub(super) struct Current {
    pub(super) link: LinkId,
    pub(super) head: Head,
    pub(super) len: usize,
    /// How much of the payload was read.
    pub(super) read: usize,
    pub(super) place: Place,
}

/// Bytes that were read and not used. The memory is kept.
#[derive(Debug, Default)]
struct Ahead {
    bytes: Vec<u8>,
    used: usize,
    end: usize,
}

impl Ahead {
    #[inline]
    fn is_empty(&self) -> bool {
        self.used == self.end
    }

    /// Room for so many bytes, of which [`Ahead::filled`] says how many there are.
    fn room(&mut self, len: usize) -> Span<'_> {
        assert!(self.is_empty(), "nothing is read while something was read ahead");
        if self.bytes.len() < len {
            self.bytes.resize(len, 0);
        }
        Span::of(&mut self.bytes[..len])
    }

    fn filled(&mut self, count: usize) {
        (self.used, self.end) = (0, count);
    }

    fn take(&mut self, count: usize) -> &[u8] {
        let count = count.min(self.end - self.used);
        self.used += count;
        &self.bytes[self.used - count..self.used]
    }
}

/// Where a payload goes. Once some of it was read, the rest follows.
#[derive(Debug)]
pub(super) enum Place {
    Undecided,
    /// Into memory of the line.
    Buffer(Vec<u8>),
    /// Into the memory of the operation that receives it, which alone can go on.
    Target,
    /// It is not wanted any more.
    Nowhere,
}

impl Incoming {
    /// The receiving end of `stream`, of which the hello has been read and nothing else.
    pub(super) fn new(stream: NotInherited<TcpStream>) -> io::Result<Incoming> {
        stream.set_nonblocking(true)?;
        set_options(&SockRef::from(&*stream));
        let ends = (stream.local_addr(), stream.peer_addr());
        let within_host = matches!(ends, (Ok(local), Ok(peer)) if is_within_host(local, peer));
        if within_host {
            SockRef::from(&*stream).set_recv_buffer_size(LOCAL_BUFFER)?;
            acknowledge_less(&stream);
        }
        Ok(Incoming {
            stream: Arc::new(stream),
            within_host,
            header: [0; HEADER],
            header_read: 0,
            current: None,
            ahead: Ahead::default(),
            guess: 0,
            count: 0,
            spare: Vec::new(),
        })
    }

    /// Has its other end neither closed nor broken it, or is there something to read?
    pub(super) fn is_open(&self) -> bool {
        if !self.ahead.is_empty() || self.header_read > 0 {
            return true;
        }
        match self.stream.peek(&mut [0]) {
            Ok(count) => count > 0,
            Err(error) => error.kind() == io::ErrorKind::WouldBlock,
        }
    }

    /// Reads a header, and with the same system call what follows it into `guess`: says how much. That may be more than
    /// the message has.
    pub(super) fn poll_header(
        &mut self,
        guess: Span<'_>,
        len_max: usize,
    ) -> io::Result<Poll<(Frame, usize)>> {
        let mut too_far = 0;
        while self.header_read < HEADER {
            // No guess while something was read ahead: it would be copied twice.
            let guess = if self.ahead.is_empty() { guess } else { Span::empty() };
            let mut header = self.header;
            let count = self.read(&mut header[self.header_read..], guess);
            self.header = header;
            match count? {
                Poll::Pending => return Ok(Poll::Pending),
                Poll::Ready(0) if self.header_read == 0 => {
                    return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "closed between messages"));
                }
                Poll::Ready(0) => return Err(ended_inside()),
                Poll::Ready(count) => {
                    let of_header = count.min(HEADER - self.header_read);
                    self.header_read += of_header;
                    too_far = count - of_header;
                }
            }
        }
        let frame = Frame::decode(&self.header, len_max)?;
        self.header_read = 0;
        Ok(Poll::Ready((frame, too_far)))
    }

    /// Reads the header of a message that is probably short. One system call then takes all that is there of this message and of
    /// those behind it, up to [`SHORT`]: what follows is found ahead.
    pub(super) fn poll_short_header(&mut self, len_max: usize) -> io::Result<Poll<Frame>> {
        if self.ahead.is_empty() && self.header_read < HEADER {
            match socket::receive(self.stream.as_fd(), &mut [], self.ahead.room(HEADER + SHORT)) {
                Ok(count) => self.ahead.filled(count), // nothing at its end, which is looked at next
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(Poll::Pending),
                Err(error) => return Err(error),
            }
        }
        Ok(self.poll_header(Span::empty(), len_max)?.map(|(frame, _)| frame))
    }

    /// Bytes that were read and belong to what comes next.
    pub(super) fn put_ahead(&mut self, bytes: Bytes<'_>) {
        if !bytes.is_empty() {
            self.ahead.room(bytes.len()).copy_from(bytes);
            self.ahead.filled(bytes.len());
        }
    }

    /// Was something read that comes after the last message? It is not on the socket any more.
    #[inline]
    pub(super) fn has_more(&self) -> bool {
        self.header_read == HEADER || !self.ahead.is_empty()
    }

    /// Reads what is missing of the current message into `target`, which is as long as its payload; and with the same system call
    /// the header that follows it, if that is there.
    pub(super) fn poll_payload(&mut self, target: Span<'_>) -> io::Result<Poll<()>> {
        let mut read = self.current.as_ref().map_or(0, |current| current.read);
        while read < target.len() {
            match self.read_rest(target.part(read, target.len()))? {
                Poll::Pending => {
                    if let Some(current) = &mut self.current {
                        current.read = read;
                    }
                    return Ok(Poll::Pending);
                }
                Poll::Ready(0) => return Err(ended_inside()),
                Poll::Ready(count) => {
                    let of_target = count.min(target.len() - read);
                    read += of_target;
                    self.header_read = count - of_target;
                }
            }
        }
        self.finish();
        Ok(Poll::Ready(()))
    }

    /// Reads the current message into a buffer, unless only its receiver can read on: the message, and its link.
    pub(super) fn poll_rest(&mut self) -> io::Result<Poll<(LinkId, Message)>> {
        let Some(current) = &mut self.current else { return Ok(Poll::Pending) };
        if matches!(current.place, Place::Target) {
            return Ok(Poll::Pending);
        }
        let (head, len, link) = (current.head, current.len, current.link);
        let mut buffer = match std::mem::replace(&mut current.place, Place::Nowhere) {
            Place::Buffer(buffer) => buffer,
            _ => self.buffer(len),
        };
        let polled = self.poll_payload(Span::of(&mut buffer[..len]))?;
        if polled.is_pending() {
            if let Some(current) = &mut self.current {
                current.place = Place::Buffer(buffer); // one that is not wanted is thrown away when it is whole
            }
            return Ok(Poll::Pending);
        }
        Ok(Poll::Ready((link, Message { head, len, buffer })))
    }

    /// Reads once: what was read ahead if there is any, else from the socket.
    #[inline]
    fn read(&mut self, header: &mut [u8], target: Span<'_>) -> io::Result<Poll<usize>> {
        if !self.ahead.is_empty() {
            return Ok(Poll::Ready(self.read_ahead(header, target)));
        }
        match socket::receive(self.stream.as_fd(), header, target) {
            Ok(count) => Ok(Poll::Ready(count)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(Poll::Pending),
            Err(error) => Err(error),
        }
    }

    /// The same, with a header at the end.
    #[inline]
    fn read_rest(&mut self, target: Span<'_>) -> io::Result<Poll<usize>> {
        if !self.ahead.is_empty() {
            return Ok(Poll::Ready(self.read_ahead(&mut [], target)));
        }
        match socket::receive_rest(self.stream.as_fd(), target, &mut self.header) {
            Ok(count) => Ok(Poll::Ready(count)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(Poll::Pending),
            Err(error) => Err(error),
        }
    }

    fn read_ahead(&mut self, header: &mut [u8], target: Span<'_>) -> usize {
        let of_header = self.ahead.take(header.len());
        header[..of_header.len()].copy_from_slice(of_header);
        let count = of_header.len();
        let of_target = self.ahead.take(target.len());
        target.part(0, of_target.len()).copy_from(Bytes::of(of_target));
        count + of_target.len()
    }

    /// A message was read to its end.
    fn finish(&mut self) {
        self.current = None;
        self.count = self.count.wrapping_add(1);
        if self.within_host && self.count.is_multiple_of(RENEWAL) {
            acknowledge_less(&self.stream);
        }
    }

    /// A buffer of at least `len` bytes: if there is one that was used before, that one.
    pub(super) fn buffer(&mut self, len: usize) -> Vec<u8> {
        let mut buffer = self.spare.pop().unwrap_or_default();
        if buffer.len() < len {
            buffer.resize(len, 0);
        }
        buffer
    }

    /// Keeps a buffer for the next message.
    pub(super) fn recycle(&mut self, buffer: Vec<u8>) {
        if self.spare.len() < SPARE_MAX {
            self.spare.push(buffer);
        }
    }
}

#[cold]
fn ended_inside() -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, "closed in the middle of a message")
}

/// Nothing flows back, so Linux answers each short message with a packet that says only that it came, and does so before
/// the receiver gets it. Asked for less it answers every second: 8 bytes one way took 8.2 µs instead of 11.2.
fn acknowledge_less(stream: &TcpStream) {
    #[cfg(target_os = "linux")]
    let _ = SockRef::from(stream).set_tcp_quickack(false); // a system that refuses is only slower
    #[cfg(not(target_os = "linux"))]
    let _ = stream;
}
