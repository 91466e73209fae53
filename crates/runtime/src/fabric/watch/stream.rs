//! A stream between two processes, Unix or TCP: what was read and what is to be written, and how descriptors travel.

use std::collections::VecDeque;
use std::io::{self, Write as _};
use std::mem::MaybeUninit;
use std::net::{IpAddr, TcpStream};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Instant;

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use tenfold_memory::{FileIdentity, NotInherited, PeerRegion, Region};

use crate::fabric::Peer;
use crate::wire::FabricId;

/// A stream to a peer, or to a caller that has not said hello yet.
pub(super) struct Stream {
    pub(super) io: Io,
    /// Nothing before its hello.
    pub(super) peer: Option<Arc<Peer>>,
    /// We opened it, and have not been answered.
    pub(super) ours: bool,
    /// The peer opened it.
    pub(super) accepted: bool,
    pub(super) arrived: Vec<u8>,
    pub(super) descriptors: Vec<OwnedFd>,
    pub(super) to_write: Vec<u8>,
    /// Regions whose descriptor travels with the byte of `to_write` at this place; in order.
    pub(super) enclosed: VecDeque<(usize, Arc<Region>)>,
    pub(super) since: Instant,
    /// It only asks whether this peer responds: its end means nothing.
    pub(super) probe: Option<Arc<Peer>>,
    /// Notices were sent on it.
    pub(super) has_told: bool,
    /// Questions that were answered on it since the last tick.
    pub(super) answers: u32,
}

pub(super) enum Io {
    Unix(NotInherited<UnixStream>),
    Tcp(NotInherited<TcpStream>),
}

impl Io {
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        match self {
            Io::Unix(stream) => stream.as_fd(),
            Io::Tcp(stream) => stream.as_fd(),
        }
    }

    pub(super) fn is_unix(&self) -> bool {
        matches!(self, Io::Unix(_))
    }
}

impl Stream {
    /// Both sides have said hello.
    pub(super) fn greeted(&self) -> bool {
        self.peer.is_some() && !self.ours
    }

    pub(super) fn is_of(&self, id: FabricId) -> bool {
        self.peer.as_ref().is_some_and(|peer| peer.id() == id)
    }

    /// We have said hello, and the peer has not.
    pub(super) fn is_unanswered(&self) -> bool {
        self.ours && self.probe.is_none()
    }

    /// Maps a region of the peer's, whose descriptor has come with the announcement.
    pub(super) fn map_region(&mut self, offset: u64, len: u64, file: FileIdentity) -> io::Result<()> {
        let descriptor = (!self.descriptors.is_empty()).then(|| self.descriptors.remove(0));
        let descriptor = descriptor.ok_or_else(|| {
            io::Error::other("its descriptor did not arrive: are too many files open, or is it another host?")
        })?;
        let segment = self.peer.as_ref().and_then(|peer| peer.segment());
        let segment = segment.ok_or_else(|| io::Error::other("there is no shared memory with it"))?;
        let too_large = |_| io::Error::other("it does not fit the address space");
        let (offset, len) = (offset.try_into().map_err(too_large)?, len.try_into().map_err(too_large)?);
        segment.add_region(offset, PeerRegion::map(&descriptor, len, file)?)
    }

    pub(super) fn write(&mut self) -> io::Result<()> {
        while !self.to_write.is_empty() {
            let enclosed = self.enclosed.front();
            let until = match enclosed {
                Some((0, _)) => 1, // a descriptor travels with the first byte of its frame
                Some((next, _)) => *next,
                None => self.to_write.len(),
            };
            let bytes = &self.to_write[..until];
            let written = match (&mut self.io, enclosed) {
                (Io::Unix(socket), Some((0, region))) => send_with(socket, bytes, &[region.as_fd()]),
                (Io::Unix(socket), _) => (&**socket).write(bytes),
                (Io::Tcp(socket), _) => socket.write(bytes),
            };
            match written {
                Ok(count) => {
                    self.to_write.drain(..count);
                    if enclosed.is_some_and(|(place, _)| *place == 0) {
                        self.enclosed.pop_front();
                    }
                    self.enclosed.iter_mut().for_each(|(place, _)| *place -= count);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::NotConnected => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// Connects to a peer on this host. `WouldBlock` if too many callers wait there.
pub(super) fn connect_near(name: &str) -> io::Result<UnixStream> {
    let (family, flags) = (AddressFamily::UNIX, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC);
    let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)?;
    Ok(socket.into())
}

/// Begins to connect to another host, from the same address as the lines.
pub(super) fn connect(address: std::net::SocketAddr, from: Option<IpAddr>) -> io::Result<TcpStream> {
    let socket = socket2::Socket::new(socket2::Domain::for_address(address), socket2::Type::STREAM, None)?;
    socket.set_nonblocking(true)?;
    socket.set_tcp_nodelay(true)?;
    if let Some(from) = from {
        crate::network::bind_without_port(&socket, from)?;
    }
    match socket.connect(&address.into()) {
        Err(error) if error.raw_os_error() != Some(Errno::INPROGRESS.raw_os_error()) => Err(error),
        _ => Ok(socket.into()),
    }
}

pub(super) fn send_descriptors(
    socket: &UnixStream,
    bytes: &[u8],
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let sent = send_with(socket, bytes, descriptors)?;
    if sent == bytes.len() { Ok(()) } else { Err(io::Error::other("a hello was cut short")) }
}

/// Writes some bytes, with which up to two descriptors travel.
pub(super) fn send_with(
    socket: &UnixStream,
    bytes: &[u8],
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    assert!(
        ancillary.push(SendAncillaryMessage::ScmRights(descriptors)),
        "there is space for two descriptors"
    );
    let parts = [io::IoSlice::new(bytes)];
    Ok(rustix::net::sendmsg(socket, &parts, &mut ancillary, SendFlags::NOSIGNAL)?)
}

/// Reads bytes, and up to two descriptors that come with them.
pub(super) fn receive_descriptors(
    socket: &UnixStream,
    buffer: &mut [u8],
    descriptors: &mut Vec<OwnedFd>,
) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut parts = [io::IoSliceMut::new(buffer)];
    let received = rustix::net::recvmsg(socket, &mut parts, &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(sent) = message {
            descriptors.extend(sent);
            descriptors.truncate(2); // whatever else a peer sends is closed
        }
    }
    Ok(received.bytes)
}
