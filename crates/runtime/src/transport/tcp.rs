//! Messages between hosts: a data link is a TCP connection in one direction.
//!
//! The sender opens it to the receiver's port, says hello, and writes one frame after another; nothing flows back. One
//! connection per group, pair of ranks, direction and lane, so no message waits behind another's and none needs an address.
//!
//! ```text
//! magic u32 │ length u32 │ head 3 × u64 │ checksum u64 │ payload           little endian
//! ```
//!
//! A message costs one system call at each end when all goes well: header and payload are written from where they lie, and
//! read to where they belong. For that the receiver asks for a header and a payload in one call *before* it knows
//! either: it expects them. If another message turns up, what was read too far is put aside and read again from there,
//! so a wrong guess loses nothing.
//!
//! Nothing here waits. After `Pending` the system has been asked until it had no more, so sleeping on the next event of
//! the descriptor is safe, edge-triggered too.
//!
//! Not here: the hello (see `wire`), accepting and sleeping (see `fabric`), what messages mean.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use rustix::io::Errno;
use socket2::{Domain, Protocol, SockRef, TcpKeepalive, Type};
use tenfold_memory::{Bytes, Head, NotInherited, Span, socket};

use crate::label::is_same_call;
use crate::transport::Socket;
use crate::wire::Hello;

/// A host that died without a word is noticed within `TIME + RETRIES × INTERVAL`, if nothing else notices it first.
const KEEPALIVE_TIME: Duration = Duration::from_secs(20);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
const KEEPALIVE_RETRIES: u32 = 3;

/// What a socket may hold at either end of a link within a host. Left to itself, the system grows it to several MiB, and the
/// bytes have left the cache before they are read.
const LOCAL_BUFFER: usize = 512 << 10;

/// After so many messages within a host the system is asked again not to acknowledge each of them: it forgets that when
/// a link was idle.
const RENEWAL: u32 = 32;

/// The sending end of a link.
#[derive(Debug)]
pub(crate) struct TcpOut {
    stream: Socket,
    connection: Connection,
    /// Goes out before anything else: the hello, later what the socket did not take of a message that was not lent.
    waiting: Vec<u8>,
    /// How much of `waiting` was written.
    waiting_sent: usize,
    /// How much of a message, its header included, was written from where it lies.
    lent_sent: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Connection {
    Underway,
    Open,
    /// The system says why only once, so it is kept here.
    Failed(Errno),
}

impl TcpOut {
    /// Begins to connect; what is sent meanwhile waits.
    pub(crate) fn connect(
        to: SocketAddr,
        from_interface: Option<IpAddr>,
        hello: &Hello,
    ) -> io::Result<TcpOut> {
        let socket = socket2::Socket::new(Domain::for_address(to), Type::STREAM, Some(Protocol::TCP))?;
        socket.set_nonblocking(true)?;
        set_options(&SockRef::from(&socket))?;
        if let Some(interface) = from_interface {
            crate::network::bind_without_port(&socket, interface)?;
        }
        match socket.connect(&to.into()) {
            Err(error) if !is_in_progress(&error) => return Err(error),
            _ => {}
        }
        if socket.local_addr()?.as_socket().is_some_and(|local| is_within_host(local, to)) {
            unpace(&socket);
            socket.set_send_buffer_size(LOCAL_BUFFER)?;
        }
        let waiting = hello.encode().to_vec();
        Ok(TcpOut {
            stream: Arc::new(TcpStream::from(socket).into()),
            connection: Connection::Underway,
            waiting,
            waiting_sent: 0,
            lent_sent: 0,
        })
    }

    /// Sends a message: all of it, or nothing yet.
    ///
    /// Without `lend`, what the socket does not take immediately is copied and goes out later, by [`TcpOut::poll_flush`] or
    /// before the next message; it is `Pending` only while an earlier copy waits. With `lend`, it is `Pending` until all was
    /// written, and must be called again with the same arguments until then.
    ///
    /// # Panics
    /// If a message is longer than a header can say, which no piece is.
    pub(crate) fn poll_send(&mut self, head: &Head, bytes: Bytes<'_>, lend: bool) -> io::Result<Poll<()>> {
        if self.poll_flush()?.is_pending() {
            return Ok(Poll::Pending);
        }
        let header = encode_header(head, bytes.len());
        let len = HEADER + bytes.len();
        let mut sent = std::mem::take(&mut self.lent_sent);
        assert!(sent < len, "a lent message is sent by calls with the same arguments");
        while sent < len {
            let (of_header, of_bytes) = (sent.min(HEADER), sent.saturating_sub(HEADER));
            let rest = bytes.part(of_bytes, bytes.len());
            match socket::send(self.stream.as_fd(), &header[of_header..], rest) {
                Ok(count) => sent += count,
                Err(error) if error.kind() != io::ErrorKind::WouldBlock => return Err(error),
                Err(_) if lend => {
                    self.lent_sent = sent;
                    return Ok(Poll::Pending);
                }
                Err(_) => {
                    self.keep(&header[of_header..], rest);
                    break;
                }
            }
        }
        Ok(Poll::Ready(()))
    }

    fn keep(&mut self, header: &[u8], bytes: Bytes<'_>) {
        let len = header.len() + bytes.len();
        self.waiting.clear();
        self.waiting.reserve_exact(len);
        self.waiting.extend_from_slice(header);
        self.waiting.resize(len, 0);
        Span::of(&mut self.waiting[header.len()..]).copy_from(bytes);
        self.waiting_sent = 0;
    }

    /// Writes what waits.
    pub(crate) fn poll_flush(&mut self) -> io::Result<Poll<()>> {
        if self.waiting.is_empty() {
            return Ok(Poll::Ready(()));
        }
        if !self.is_connected()? {
            return Ok(Poll::Pending);
        }
        while self.waiting_sent < self.waiting.len() {
            let rest = &self.waiting[self.waiting_sent..];
            match socket::send(self.stream.as_fd(), rest, Bytes::of(&[])) {
                Ok(count) => self.waiting_sent += count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(Poll::Pending),
                Err(error) => return Err(error),
            }
        }
        self.waiting.clear(); // its memory stays for the next
        self.waiting_sent = 0;
        Ok(Poll::Ready(()))
    }

    /// Is all written that was taken, and no lent message half-way?
    pub(crate) fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.lent_sent == 0
    }

    /// Has the connection come about? An error says that it will not.
    pub(crate) fn is_connected(&mut self) -> io::Result<bool> {
        match self.connection {
            Connection::Open => return Ok(true),
            Connection::Failed(why) => return Err(why.into()),
            Connection::Underway => {}
        }
        let (local, peer) = (self.stream.local_addr()?, self.stream.peer_addr());
        let why = self.stream.take_error()?.and_then(|error| Errno::from_io_error(&error));
        match (why, peer) {
            (Some(why), _) => self.connection = Connection::Failed(why),
            // Without a listener, the port called may be picked for the caller: it has reached itself.
            (None, Ok(peer)) if peer == local => self.connection = Connection::Failed(Errno::CONNREFUSED),
            (None, Ok(_)) => self.connection = Connection::Open,
            (None, Err(error)) if error.kind() == io::ErrorKind::NotConnected => return Ok(false),
            (None, Err(error)) => return Err(error),
        }
        self.is_connected()
    }

    /// To be slept on.
    pub(crate) fn socket(&self) -> Socket {
        Arc::clone(&self.stream)
    }
}

/// The receiving end of a link.
#[derive(Debug)]
pub(crate) struct TcpIn {
    stream: Socket,
    len_max: usize,
    within_host: bool,
    /// How many messages were taken, modulo 2³².
    taken: u32,
    header: [u8; HEADER],
    /// How much of `header` was read.
    header_read: usize,
    /// The message under way, once its header was read: what it is and how long.
    message: Option<(Head, usize)>,
    /// Bytes that have arrived since it was opened.
    arrived: u64,
    place: Place,
    /// How much of the payload was read.
    payload_read: usize,
    /// Holds a message that was received without a target. As long as the longest so far.
    buffer: Vec<u8>,
    /// How long the last message was that came into the buffer: the next will be, too.
    guess: usize,
    /// What was read too far; comes before what the socket has.
    ahead: Vec<u8>,
    /// How much of `ahead` was used.
    ahead_used: usize,
}

/// Where a payload goes. Once some of it was read, the rest follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Buffer,
    Target,
}

/// Why a message was not received as expected.
#[derive(Debug)]
pub(crate) enum Unexpected {
    Io(io::Error),
    /// Another one came. It is still there.
    Other {
        head: Head,
        len: usize,
    },
}

impl From<io::Error> for Unexpected {
    fn from(error: io::Error) -> Self {
        Unexpected::Io(error)
    }
}

impl TcpIn {
    /// The receiving end of `stream`, of which the hello has been read and nothing else. Longer messages than `len_max`
    /// are refused.
    pub(crate) fn new(stream: impl Into<NotInherited<TcpStream>>, len_max: usize) -> io::Result<TcpIn> {
        let stream = stream.into();
        stream.set_nonblocking(true)?;
        set_options(&SockRef::from(&stream))?;
        let within_host = is_within_host(stream.local_addr()?, stream.peer_addr()?);
        if within_host {
            SockRef::from(&stream).set_recv_buffer_size(LOCAL_BUFFER)?;
            acknowledge_less(&stream);
        }
        Ok(TcpIn {
            stream: Arc::new(stream),
            len_max,
            within_host,
            taken: 0,
            header: [0; HEADER],
            header_read: 0,
            message: None,
            arrived: 0,
            place: Place::Buffer,
            payload_read: 0,
            buffer: Vec::new(),
            guess: 0,
            ahead: Vec::new(),
            ahead_used: 0,
        })
    }

    /// Is a whole message here? What it is, and how long. It stays until [`TcpIn::take`].
    pub(crate) fn poll_message(&mut self) -> io::Result<Poll<(Head, usize)>> {
        if self.message.is_none() {
            // Taken out for the call, so that it can be lent beside the rest of this link.
            let mut buffer = std::mem::take(&mut self.buffer);
            let guess = self.guess;
            let polled = self.poll_header(Span::of(&mut buffer[..guess]));
            self.buffer = buffer;
            let Poll::Ready(too_far) = polled? else { return Ok(Poll::Pending) };
            let (_, len) = self.message.expect("its header was read");
            self.payload_read = too_far.min(len);
            self.ahead.extend_from_slice(&self.buffer[self.payload_read..too_far]);
        }
        let (head, len) = self.message.expect("its header was read");
        if self.place == Place::Target {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "half of the message is somewhere else"));
        }
        self.guess = len;
        if self.buffer.len() < len {
            let mut longer = vec![0; len];
            longer[..self.payload_read].copy_from_slice(&self.buffer[..self.payload_read]);
            self.buffer = longer;
        }
        let mut buffer = std::mem::take(&mut self.buffer);
        let polled = self.poll_payload(Span::of(&mut buffer[..len]));
        self.buffer = buffer;
        Ok(polled?.map(|()| (head, len)))
    }

    /// The bytes of the message that is here.
    ///
    /// # Panics
    /// If none is.
    pub(crate) fn bytes(&self) -> Bytes<'_> {
        let (_, len) = self.message.expect("a message is here");
        assert!(self.place == Place::Buffer && self.payload_read == len, "all of it is here");
        Bytes::of(&self.buffer[..len])
    }

    /// The message that is here was read.
    pub(crate) fn take(&mut self) {
        let (_, len) = self.message.take().expect("a message is here");
        assert!(self.payload_read == len, "all of it is here");
        self.header_read = 0;
        self.payload_read = 0;
        self.place = Place::Buffer;
        self.taken = self.taken.wrapping_add(1);
        if self.within_host && self.taken.is_multiple_of(RENEWAL) {
            acknowledge_less(&self.stream);
        }
    }

    /// Moves the next message straight into `target`; `Pending` until it is whole, and to be called with the same arguments
    /// until then. It must be described by `head` and be as long as `target`. If it is not, that is said as soon as its
    /// header is there, and it is still there for [`TcpIn::poll_message`]; what is in `target` is lost, though.
    pub(crate) fn poll_recv(&mut self, head: &Head, target: Span<'_>) -> Result<Poll<()>, Unexpected> {
        assert!(target.len() <= self.len_max, "a longer message than is ever let in");
        let mut too_far = 0;
        if self.message.is_none() {
            match self.poll_header(target)? {
                Poll::Pending => return Ok(Poll::Pending),
                Poll::Ready(count) => too_far = count,
            }
        }
        let (their_head, their_len) = self.message.expect("its header was read");
        if !is_same_call(&their_head, head) || their_len != target.len() {
            if too_far > 0 {
                self.ahead = target.part(0, too_far).bytes().to_vec();
            }
            return Err(Unexpected::Other { head: their_head, len: their_len });
        }
        if self.place == Place::Buffer && self.payload_read > 0 {
            if self.poll_message()?.is_pending() {
                return Ok(Poll::Pending);
            }
            target.copy_from(self.bytes());
        } else {
            self.place = Place::Target;
            self.payload_read += too_far;
            if self.poll_payload(target)?.is_pending() {
                return Ok(Poll::Pending);
            }
        }
        self.take();
        Ok(Poll::Ready(()))
    }

    /// Bytes that have arrived so far.
    pub(crate) fn arrived(&self) -> u64 {
        self.arrived
    }

    /// What the next message is and how long, without its payload.
    pub(crate) fn peek_head(&mut self) -> io::Result<Poll<(Head, usize)>> {
        if self.message.is_none() && self.poll_header(Span::empty())?.is_pending() {
            return Ok(Poll::Pending);
        }
        Ok(Poll::Ready(self.message.expect("its header was read")))
    }

    /// To be slept on.
    pub(crate) fn socket(&self) -> Socket {
        Arc::clone(&self.stream)
    }

    /// Reads a header, and with the same system call what follows it into `guess`: says how much. That may be more than
    /// the message has.
    fn poll_header(&mut self, guess: Span<'_>) -> io::Result<Poll<usize>> {
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
        self.message = Some(decode_header(&self.header, self.len_max)?);
        Ok(Poll::Ready(too_far))
    }

    /// Reads what is missing of a payload into `target`, which is as long as the payload.
    fn poll_payload(&mut self, target: Span<'_>) -> io::Result<Poll<()>> {
        while self.payload_read < target.len() {
            match self.read(&mut [], target.part(self.payload_read, target.len()))? {
                Poll::Pending => return Ok(Poll::Pending),
                Poll::Ready(0) => return Err(ended_inside()),
                Poll::Ready(count) => self.payload_read += count,
            }
        }
        Ok(Poll::Ready(()))
    }

    /// Reads once: what was read ahead if there is any, else from the socket.
    #[inline]
    fn read(&mut self, header: &mut [u8], target: Span<'_>) -> io::Result<Poll<usize>> {
        if !self.ahead.is_empty() {
            return Ok(Poll::Ready(self.read_ahead(header, target)));
        }
        match socket::receive(self.stream.as_fd(), header, target) {
            Ok(count) => {
                self.arrived += count as u64;
                Ok(Poll::Ready(count))
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(Poll::Pending),
            Err(error) => Err(error),
        }
    }

    #[cold]
    fn read_ahead(&mut self, header: &mut [u8], target: Span<'_>) -> usize {
        let ahead = &self.ahead[self.ahead_used..];
        let (of_header, ahead) = ahead.split_at(header.len().min(ahead.len()));
        header[..of_header.len()].copy_from_slice(of_header);
        let of_target = &ahead[..target.len().min(ahead.len())];
        target.part(0, of_target.len()).copy_from(Bytes::of(of_target));
        let count = of_header.len() + of_target.len();
        self.ahead_used += count;
        if self.ahead_used == self.ahead.len() {
            self.ahead.clear();
            self.ahead_used = 0;
        }
        count
    }
}

pub(crate) const HEADER: usize = 40;

/// A frame begins with it; `VERSION` of the hello covers what follows.
const MAGIC: u32 = u32::from_le_bytes(*b"10f>");

pub(crate) fn encode_header(head: &Head, len: usize) -> [u8; HEADER] {
    let len = u32::try_from(len).expect("a piece is shorter than 4 GiB");
    let first = u64::from(len) << 32 | u64::from(MAGIC);
    let words = [first, head[0], head[1], head[2]];
    let mut bytes = [0; HEADER];
    for (bytes, word) in bytes.chunks_exact_mut(8).zip(words.into_iter().chain([checksum(&words)])) {
        bytes.copy_from_slice(&word.to_le_bytes());
    }
    bytes
}

pub(crate) fn decode_header(bytes: &[u8; HEADER], len_max: usize) -> io::Result<(Head, usize)> {
    let words: [u64; 5] = std::array::from_fn(|at| {
        u64::from_le_bytes(bytes[8 * at..8 * at + 8].try_into().expect("8 bytes were taken"))
    });
    let [first, head @ .., sum] = words;
    if first as u32 != MAGIC {
        return Err(invalid("no message begins like that"));
    }
    if sum != checksum(&[first, head[0], head[1], head[2]]) {
        return Err(invalid("the header of a message is damaged"));
    }
    let len = (first >> 32) as usize;
    if len > len_max {
        return Err(invalid(format!("a message of {len} bytes where none has more than {len_max}")));
    }
    Ok((head, len))
}

/// Against damage, not against malice: each step maps sums one to one, so a change of any one word always shows, and
/// any other goes unnoticed once in 2⁶⁴ times.
fn checksum(words: &[u64; 4]) -> u64 {
    const ODD: u64 = 0x9e37_79b9_7f4a_7c15; // 2⁶⁴ ÷ the golden ratio: its bits look random
    words.iter().fold(0, |sum: u64, word| (sum ^ word).wrapping_mul(ODD).rotate_left(29))
}

#[cold]
fn invalid(message: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, message.into())
}

#[cold]
fn ended_inside() -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, "closed in the middle of a message")
}

fn is_in_progress(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::WouldBlock || Errno::from_io_error(error) == Some(Errno::INPROGRESS)
}

fn set_options(socket: &SockRef<'_>) -> io::Result<()> {
    socket.set_tcp_nodelay(true)?;
    let keepalive = TcpKeepalive::new()
        .with_time(KEEPALIVE_TIME)
        .with_interval(KEEPALIVE_INTERVAL)
        .with_retries(KEEPALIVE_RETRIES);
    socket.set_tcp_keepalive(&keepalive)
}

/// A host that calls itself does so from the address called, or from one of loopback.
fn is_within_host(local: SocketAddr, peer: SocketAddr) -> bool {
    local.ip() == peer.ip() || peer.ip().is_loopback()
}

/// Within a host there is no congestion, but where BBR is the default it paces all the same. Between hosts the choice stays
/// with the administrator.
fn unpace(socket: &socket2::Socket) {
    #[cfg(target_os = "linux")]
    {
        // Reno needs no privilege where cubic is not the default; a kernel that refuses both is only slower.
        let _ = socket.set_tcp_congestion(b"cubic").or_else(|_| socket.set_tcp_congestion(b"reno"));
    }
    #[cfg(not(target_os = "linux"))]
    let _ = socket;
}

/// Nothing flows back on a link, so Linux answers each short message with a packet that says only that it came, and does so
/// before the receiver gets it. Asked for less it answers every second: 8 bytes one way took 8.2 µs instead of 11.2.
fn acknowledge_less(stream: &TcpStream) {
    #[cfg(target_os = "linux")]
    let _ = SockRef::from(stream).set_tcp_quickack(false); // a system that refuses is only slower
    #[cfg(not(target_os = "linux"))]
    let _ = stream;
}

#[cfg(test)]
mod tests;
