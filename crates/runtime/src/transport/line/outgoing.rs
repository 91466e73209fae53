//! The half of a line on which this process sends: a connection that it opens, and on which nothing flows back.
//!
//! If anything did, a process that ends with something unread would have its kernel reset the connection, and what it sent
//! before its end would be lost on the way. That is why a line has two connections, and credit goes with the messages of the
//! other direction.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::task::Poll;

use rustix::io::Errno;
use socket2::{Domain, Protocol, SockRef, Type};
use tenfold_memory::{Bytes, Span, socket};

use super::frame::HEADER;
use super::{LOCAL_BUFFER, is_within_host, set_options};
use crate::transport::Socket;
use crate::wire::Hello;

/// Short messages are put together while earlier bytes wait, up to so many.
const BATCH: usize = 64 << 10;

#[derive(Debug)]
pub(super) struct Outgoing {
    stream: Socket,
    connection: Connection,
    /// Goes out before anything else: the hello, later what the socket did not take of a message.
    waiting: Vec<u8>,
    /// How much of `waiting` was written.
    waiting_sent: usize,
    /// Bytes that were taken since the connection was opened, and those of them that were written.
    pub(super) queued: u64,
    pub(super) written: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Connection {
    Underway,
    Open,
    /// The system says why only once, so it is kept here.
    Failed(Errno),
}

impl Outgoing {
    /// Begins to connect; what is sent meanwhile waits.
    pub(super) fn connect(
        to: SocketAddr,
        from_interface: Option<IpAddr>,
        hello: &Hello,
    ) -> io::Result<Outgoing> {
        let socket = socket2::Socket::new(Domain::for_address(to), Type::STREAM, Some(Protocol::TCP))?;
        socket.set_nonblocking(true)?;
        set_options(&SockRef::from(&socket));
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
        Ok(Outgoing {
            stream: Arc::new(TcpStream::from(socket).into()),
            connection: Connection::Underway,
            queued: waiting.len() as u64,
            waiting,
            waiting_sent: 0,
            written: 0,
        })
    }

    /// Takes header and payload, and writes as much as the socket takes; the rest is copied and waits. `Pending` if too much
    /// waits already.
    pub(super) fn poll_send(&mut self, header: &[u8; HEADER], bytes: Bytes<'_>) -> io::Result<Poll<()>> {
        let total = HEADER + bytes.len();
        let left = self.flush()?;
        if left > 0 && left + total > BATCH {
            return Ok(Poll::Pending);
        }
        let mut sent = 0;
        while left == 0 && sent < total {
            let (of_header, of_bytes) = (sent.min(HEADER), sent.saturating_sub(HEADER));
            let rest = bytes.part(of_bytes, bytes.len());
            match socket::send(self.stream.as_fd(), &header[of_header..], rest) {
                Ok(count) => sent += count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
        }
        self.queued += total as u64;
        self.written += sent as u64;
        if sent < total {
            let (of_header, of_bytes) = (sent.min(HEADER), sent.saturating_sub(HEADER));
            self.keep(&header[of_header..], bytes.part(of_bytes, bytes.len()));
        }
        Ok(Poll::Ready(()))
    }

    /// Sends a header alone, now or with what waits.
    pub(super) fn send_soon(&mut self, header: &[u8; HEADER]) -> io::Result<()> {
        self.queued += HEADER as u64;
        self.waiting.extend_from_slice(header);
        self.flush().map(|_| ())
    }

    fn keep(&mut self, header: &[u8], bytes: Bytes<'_>) {
        self.waiting.extend_from_slice(header);
        let start = self.waiting.len();
        self.waiting.resize(start + bytes.len(), 0);
        Span::of(&mut self.waiting[start..]).copy_from(bytes);
    }

    /// Writes what waits; how much still does.
    #[inline]
    pub(super) fn flush(&mut self) -> io::Result<usize> {
        if self.waiting.is_empty() { Ok(0) } else { self.write_waiting() }
    }

    fn write_waiting(&mut self) -> io::Result<usize> {
        while self.waiting_sent < self.waiting.len() && self.is_connected()? {
            let rest = &self.waiting[self.waiting_sent..];
            match socket::send(self.stream.as_fd(), rest, Bytes::of(&[])) {
                Ok(count) => {
                    self.waiting_sent += count;
                    self.written += count as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
        }
        if self.waiting_sent == self.waiting.len() {
            self.waiting.clear(); // its memory stays for the next
            self.waiting_sent = 0;
        }
        Ok(self.waiting.len() - self.waiting_sent)
    }

    pub(super) fn has_unwritten(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Has the connection come about? An error says that it will not.
    fn is_connected(&mut self) -> io::Result<bool> {
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
    pub(super) fn socket(&self) -> Socket {
        Arc::clone(&self.stream)
    }
}

fn is_in_progress(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::WouldBlock || Errno::from_io_error(error) == Some(Errno::INPROGRESS)
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
