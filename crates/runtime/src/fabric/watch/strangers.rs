//! Lets peers in: accepts connections, hears their hello, and turns others away.

use std::io;
use std::net::TcpStream;
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, EventData, EventFlags};
use tenfold_memory::PeerSegment;
use tenfold_store::owner::{self, Owner};

use super::stream::{Io, Stream, send_descriptors};
use super::{TCP, UNIX, Watch};
use crate::fabric::{Bell, Fate, UNCLAIMED_MAX};
use crate::network::{explain, is_exhaustion};
use crate::transport::line::Adopted;
use crate::wire::{ControlFrame, Hello, Purpose};

/// Streams of strangers who have not said hello yet. Beyond it the oldest is closed and not the newest: a peer says hello as
/// soon as it is connected, and must not be kept out by those who say nothing.
const STRANGERS_MAX: usize = 384;

/// Connections accepted at a time, before beats and streams have their turn again.
const ACCEPTS: usize = 64;

/// How long accepting rests when there are no descriptors.
const ACCEPT_REST: Duration = Duration::from_millis(50);

/// Between two lines of the log about strangers; those in between are counted.
const COMPLAINT_INTERVAL: Duration = Duration::from_secs(1);

impl Watch {
    pub(super) fn accept_unix(&mut self) {
        for _ in 0..ACCEPTS {
            match self.unix.accept() {
                Ok((stream, _)) => {
                    if !self.is_welcome(&stream) || stream.set_nonblocking(true).is_err() {
                        continue;
                    }
                    self.make_room_for_stranger();
                    let token = self.add(Io::Unix(stream.into()), None, false);
                    self.serve(token);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) if is_exhaustion(&error) => return self.rest(&error),
                Err(_) => {} // it went away before it was accepted
            }
        }
    }

    /// No descriptor is left for the next connection, whose event would wake this thread again and again.
    pub(super) fn rest(&mut self, error: &io::Error) {
        self.complain(&format!("cannot accept a peer: {}", explain(error)));
        self.resting_until = Some(Instant::now() + ACCEPT_REST);
        self.listen(EventFlags::empty());
    }

    pub(super) fn listen(&self, flags: EventFlags) {
        let unix = epoll::modify(&self.poll, &self.unix, EventData::new_u64(UNIX), flags);
        let tcp = (TCP..)
            .zip(&self.tcp)
            .try_for_each(|(token, tcp)| epoll::modify(&self.poll, tcp, EventData::new_u64(token), flags));
        if let Err(error) = unix.and(tcp) {
            tracing::warn!("cannot watch who connects: {error}");
        }
    }

    /// A line of the log that strangers can cause.
    pub(super) fn complain(&mut self, line: &str) {
        if let Some(line) = self.complaints.show(line, Instant::now()) {
            tracing::warn!("{line}");
        }
    }

    /// Closes the stream that has said nothing for longest, if there are too many of them.
    pub(super) fn make_room_for_stranger(&mut self) {
        let strangers = self.streams.iter().filter(|(_, stream)| stream.peer.is_none());
        let tokens: Vec<u64> = strangers.map(|(&token, _)| token).collect();
        if tokens.len() >= STRANGERS_MAX
            && let Some(oldest) = tokens.into_iter().min()
        {
            self.streams.remove(&oldest);
        }
    }

    /// Other users of this host have no business with our memory.
    pub(super) fn is_welcome(&mut self, stream: &UnixStream) -> bool {
        let same_user = rustix::net::sockopt::socket_peercred(stream)
            .is_ok_and(|them| them.uid == rustix::process::geteuid());
        if !same_user {
            self.complain("refused a process of another user that tried to join");
        }
        same_user
    }

    /// The same for a caller from this host; the kernel knows its user. Of others nothing can be known.
    pub(super) fn is_served(&mut self, stream: &TcpStream, caller: std::net::SocketAddr) -> bool {
        let Ok(own) = stream.local_addr() else { return false }; // the caller has disconnected
        if !caller.ip().is_loopback() && caller.ip() != own.ip() {
            return true;
        }
        let same_user = owner::of_connection(caller, own).is_none_or(Owner::is_trusted);
        if !same_user {
            self.complain("refused a process of another user that tried to join");
        }
        same_user
    }

    pub(super) fn accept_tcp(&mut self, rail: usize) {
        for _ in 0..ACCEPTS {
            let Some(tcp) = self.tcp.get(rail) else { return };
            match tcp.accept() {
                Ok((stream, caller)) => {
                    if !self.is_served(&stream, caller) || stream.set_nonblocking(true).is_err() {
                        continue;
                    }
                    // Letters follow each other without an answer in between: each would wait for the receiver's delayed
                    // acknowledgement of the one before. A system that refuses the option is only slower.
                    let _ = stream.set_nodelay(true);
                    self.make_room_for_stranger();
                    let token = self.add(Io::Tcp(stream.into()), None, false);
                    self.serve(token);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) if is_exhaustion(&error) => return self.rest(&error),
                Err(_) => {} // it went away before it was accepted
            }
        }
    }

    /// Says hello; on a Unix stream with the descriptors of our segment and our bell.
    pub(super) fn greet(&mut self, token: u64) {
        let Some(stream) = self.streams.get_mut(&token) else { return };
        let Some(peer) = &stream.peer else { return };
        let hello = Hello { purpose: Purpose::Control, sender: self.fabric.id, receiver: peer.id() }.encode();
        let sent = match &stream.io {
            Io::Tcp(_) => {
                stream.to_write.splice(0..0, hello);
                Ok(())
            }
            Io::Unix(socket) => self.fabric.segment.share().and_then(|segment| {
                let descriptors = [segment.as_fd(), self.fabric.bell.as_fd()];
                send_descriptors(socket, &hello, &descriptors)
            }),
        };
        if let Err(error) = sent {
            let peer = Arc::clone(peer);
            self.streams.remove(&token);
            self.end(&peer, Fate::Unreachable(error.to_string()));
        }
    }

    /// A line belongs to the engine from here on.
    pub(super) fn hand_over(&mut self, stream: Stream, hello: &Hello) {
        let (Io::Tcp(socket), Purpose::Line { rail }) = (stream.io, hello.purpose) else { return };
        let _ = epoll::delete(&self.poll, &socket);
        match self.fabric.adopt(hello.sender, rail, socket, Instant::now()) {
            Ok(Some(Adopted::Yes)) => self.fabric.tell_news(),
            Ok(Some(Adopted::Twin)) => self.complain("refused a second connection for the same messages"),
            Ok(None) => self.complain(&format!(
                "refused a connection: {UNCLAIMED_MAX} others wait for groups that this rank has not made"
            )),
            Err(error) => tracing::debug!("a connection of a peer cannot be used: {error}"),
        }
    }

    /// A peer said hello: we know it from here on.
    pub(super) fn meet(&mut self, stream: &mut Stream, hello: &Hello) -> io::Result<()> {
        if stream.peer.as_ref().is_some_and(|dialled| dialled.id() != hello.sender) {
            return Err(io::Error::other("another process answered"));
        }
        // A process dials another once by each way.
        let is_twin = |other: &Stream| {
            other.accepted && other.io.is_unix() == stream.io.is_unix() && other.is_of(hello.sender)
        };
        if stream.accepted && self.streams.values().any(is_twin) {
            self.complain("refused a second stream of a peer that has one");
            return Err(io::Error::other("the peer of that name has a stream already"));
        }
        let peer = self
            .fabric
            .visitor(hello.sender)
            .ok_or_else(|| io::Error::other("too many processes have said hello that are in no group"))?;
        if stream.io.is_unix() {
            let mut descriptors = std::mem::take(&mut stream.descriptors).into_iter();
            let (Some(segment), Some(bell)) = (descriptors.next(), descriptors.next()) else {
                return Err(io::Error::other("the hello came without its descriptors"));
            };
            peer.meet(PeerSegment::map(&segment)?, Bell::from_descriptor(bell));
            self.watch_process(&peer, &stream.io);
        }
        stream.peer = Some(Arc::clone(&peer));
        peer.set_met();
        if !stream.io.is_unix() {
            self.beats.meet(peer.id().mark(), Instant::now());
        }
        if !stream.ours {
            let answer =
                Hello { purpose: Purpose::Control, sender: self.fabric.id, receiver: peer.id() }.encode();
            match &stream.io {
                Io::Tcp(_) => _ = stream.to_write.splice(0..0, answer),
                Io::Unix(socket) => {
                    let segment = self.fabric.segment.share()?;
                    send_descriptors(socket, &answer, &[segment.as_fd(), self.fabric.bell.as_fd()])?;
                }
            }
        }
        stream.since = Instant::now();
        stream.ours = false; // from here on both sides are alike
        // Failures from before this connection: without these notices the peer would wait for this rank until it times out.
        for (group, text) in self.fabric.engine.notices(peer.id()) {
            ControlFrame::Notice { group, text }.encode(&mut stream.to_write);
        }
        self.fabric.tell_news();
        self.has_letters = true; // a reconfiguration may wait for it
        Ok(())
    }
}

/// Lines of the log that strangers can cause: one at a time, then a count.
#[derive(Debug, Default)]
pub(super) struct Complaints {
    next: Option<Instant>,
    suppressed: u64,
}

impl Complaints {
    fn show(&mut self, line: &str, now: Instant) -> Option<String> {
        if self.next.is_some_and(|next| now < next) {
            self.suppressed += 1;
            return None;
        }
        self.next = Some(now + COMPLAINT_INTERVAL);
        Some(match std::mem::take(&mut self.suppressed) {
            0 => line.into(),
            count => format!("{line} ({count} more such events since the last line)"),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use super::*;
    use crate::fabric::{FabricHandle, FabricOptions};
    use crate::wire::FabricId;

    /// Connections that say nothing must not keep out a peer that says hello.
    #[test]
    fn those_who_say_nothing_are_closed_to_make_room() {
        let fabric = FabricHandle::new(FabricOptions::for_tests()).unwrap();
        let address = fabric.address.unwrap();
        let connect = || TcpStream::connect_timeout(&address, Duration::from_secs(40)).unwrap();
        let mut silent: Vec<TcpStream> = (0..STRANGERS_MAX + 1).map(|_| connect()).collect();
        silent[0].set_read_timeout(Some(Duration::from_secs(40))).unwrap();
        assert_eq!(silent[0].read(&mut [0]).unwrap(), 0, "the oldest is closed");
        let mut caller = connect();
        caller.set_read_timeout(Some(Duration::from_secs(40))).unwrap();
        let hello = Hello { purpose: Purpose::Control, sender: FabricId(7), receiver: fabric.id };
        io::Write::write_all(&mut caller, &hello.encode()).unwrap();
        let mut answer = [0; Hello::LEN];
        caller.read_exact(&mut answer).expect("a peer that says hello is answered");
        // A process without descriptors for them would close the rest of them too.
        silent.clear();
    }

    #[test]
    fn strangers_cannot_fill_the_log() {
        let (mut complaints, start) = (Complaints::default(), Instant::now());
        assert_eq!(complaints.show("refused", start).as_deref(), Some("refused"));
        for _ in 0..1000 {
            assert_eq!(complaints.show("refused", start + COMPLAINT_INTERVAL / 2), None);
        }
        assert_eq!(
            complaints.show("refused", start + COMPLAINT_INTERVAL).as_deref(),
            Some("refused (1000 more such events since the last line)")
        );
    }
}
