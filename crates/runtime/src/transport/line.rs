//! Messages between hosts: a *line* between two processes carries the messages of all groups that both are in, so connections
//! do not grow with the number of groups. It is a TCP connection in each direction, which the sender opens when it first has
//! something to send.
//!
//! A *link* is what one group sends on one lane, in one direction. Messages of a link arrive in order. A link may have up to
//! [`WINDOW`] bytes under way that its receiver has not taken; then it waits for credit, and others go on. So what is
//! read while another link's message is expected can always be put aside, and no group blocks another.
//!
//! A message is written with one system call when all goes well, header and payload from where they lie. What a socket does not
//! take immediately is copied and goes out later, so a message is never left half written by a group that fails.
//!
//! Short messages are read with one system call, and as many of them as have arrived; they are copied from there. A long one
//! that is only looked at is read with its header: the receiver asks for a header and a payload *before* it knows either,
//! because it expects them. If another message turns up, what was read too far is put aside and read again from there, so a wrong
//! guess loses nothing. A long one that an operation receives goes straight to where it belongs, where it must not be guessed:
//! what is there may still have to be sent. Its header is read together with the message before it, if that works out.
//!
//! Nothing here waits. After `Pending` the system has been asked until it had no more, so sleeping on the next event of
//! the descriptor is safe, edge-triggered too.
//!
//! `frame` is what goes over the line, `outgoing` and `incoming` are its two connections, `receiving` tells the messages of
//! links apart. Not here: accepting and sleeping (see `fabric`), what messages mean.

mod frame;
mod incoming;
mod outgoing;
mod receiving;

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::{Duration, Instant};

use socket2::{SockRef, TcpKeepalive};
use tenfold_memory::{Bytes, Head, NotInherited};

pub(crate) use frame::{Frame, HEADER, LinkId};
use incoming::{Current, Incoming, Place};
use outgoing::Outgoing;
pub(crate) use receiving::{Message, Unexpected};

use crate::transport::Socket;
use crate::wire::{FabricId, Hello, Purpose};

/// A host that died without a word is noticed within `TIME + RETRIES × INTERVAL`, if nothing else notices it first.
const KEEPALIVE_TIME: Duration = Duration::from_secs(20);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
const KEEPALIVE_RETRIES: u32 = 3;

/// What a socket may hold at either end of a line within a host. Left to itself, the system grows it to several MiB, and the
/// bytes have left the cache before they are read.
const LOCAL_BUFFER: usize = 512 << 10;

/// Messages up to this length are read together with their header and with those behind them, and copied.
const SHORT: usize = 16 << 10;

/// Longest message on a line.
pub(crate) const TCP_PIECE: usize = 512 * 1024;

/// Bytes of a link that its receiver has not taken: as much as is under way on 10 Gbit/s with 3 ms between the hosts.
pub(crate) const WINDOW: usize = 4 << 20;

/// After so many bytes the receiver says that it has taken them, if no message of its own could say so.
const CREDIT: usize = WINDOW / 2;

/// Bytes that may wait for groups that this process has not made: a peer may have made them a little earlier.
const UNKNOWN_MAX: usize = 8 * WINDOW;

/// A line that several groups share.
#[derive(Clone, Debug)]
pub(crate) struct SharedLine(Arc<Mutex<Line>>);

impl SharedLine {
    pub(crate) fn new(own: FabricId, peer: FabricId, rail: u8) -> SharedLine {
        SharedLine(Arc::new(Mutex::new(Line::new(own, peer, rail))))
    }

    #[inline]
    pub(crate) fn lock(&self) -> MutexGuard<'_, Line> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does anything but the fabric use it?
    pub(crate) fn is_used(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }
}

/// What all lines of a process share.
#[derive(Debug, Default)]
pub(crate) struct News(AtomicBool);

impl News {
    /// Something came for a link while another was looked at.
    fn tell(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    #[inline]
    pub(crate) fn are_there(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    #[inline]
    pub(crate) fn take(&self) -> bool {
        self.are_there() && self.0.swap(false, Ordering::Relaxed)
    }
}

/// What a line has to know about its process.
pub(crate) trait Surroundings {
    fn news(&self) -> &News;

    /// How this process stands to a group to which it has no link on this line.
    fn standing(&self, group: u64) -> Standing;
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    Member,
    /// It may be about to make the group.
    Unknown,
    Left,
}

#[derive(Debug)]
pub(crate) struct Line {
    own: FabricId,
    peer: FabricId,
    rail: u8,
    outgoing: Half<Outgoing>,
    incoming: Half<Incoming>,
    links: HashMap<LinkId, Link>,
    /// How many connections came before these and broke: a group that used one of them cannot go on with another.
    epoch: u32,
    /// Bytes that wait for groups which this process does not know.
    unknown: usize,
    /// Credit that waits for a connection on which it can be given.
    owed: Vec<Frame>,
    /// When the peer opened it, until a group asks for it.
    unclaimed_since: Option<Instant>,
}

/// One direction of a line.
#[derive(Debug)]
enum Half<T> {
    Absent,
    Open(Box<T>),
    /// Why there is none.
    Broken(io::ErrorKind, String),
}

impl<T> Half<T> {
    #[inline]
    fn open(&mut self) -> Option<&mut T> {
        match self {
            Half::Open(half) => Some(half),
            _ => None,
        }
    }

    fn is_broken(&self) -> bool {
        matches!(self, Half::Broken(..))
    }

    /// Remembers why it cannot be used any more.
    #[cold]
    fn broke(&mut self, error: io::Error) -> io::Error {
        *self = Half::Broken(error.kind(), error.to_string());
        error
    }

    #[inline]
    fn check(&self) -> io::Result<()> {
        match self {
            Half::Broken(kind, why) => Err(io::Error::new(*kind, why.clone())),
            _ => Ok(()),
        }
    }
}

/// What became of a connection that a peer opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Adopted {
    Yes,
    /// There is one already.
    Twin,
}

#[derive(Debug, Default)]
struct Link {
    inbox: VecDeque<Message>,
    /// A group has asked for it.
    claimed: bool,
    /// Its group has failed here: nothing is received any more.
    failed: bool,
    /// Bytes that may be sent: beyond 0 by the last message.
    sendable: Window,
    /// The same for what the peer may send.
    receivable: Window,
    /// Bytes that were taken, and for which no credit was given yet.
    taken: usize,
    /// Bytes of messages that are whole.
    arrived: u64,
    /// Bytes that were counted as unknown.
    unknown: usize,
}

#[derive(Debug)]
struct Window(i64);

impl Default for Window {
    fn default() -> Window {
        Window(WINDOW as i64)
    }
}

impl Window {
    fn is_open(&self) -> bool {
        self.0 > 0
    }

    fn use_up(&mut self, bytes: usize) {
        self.0 -= bytes as i64;
    }

    fn give_back(&mut self, bytes: u64) {
        self.0 = self.0.saturating_add(i64::try_from(bytes).unwrap_or(i64::MAX)).min(WINDOW as i64);
    }
}

/// A group on a line.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Claim {
    pub group: u64,
    epoch: u32,
}

impl Line {
    fn new(own: FabricId, peer: FabricId, rail: u8) -> Line {
        Line {
            own,
            peer,
            rail,
            outgoing: Half::Absent,
            incoming: Half::Absent,
            links: HashMap::new(),
            epoch: 0,
            unknown: 0,
            owed: Vec::new(),
            unclaimed_since: None,
        }
    }

    /// A group begins to use the line. One that broke under earlier groups is opened again.
    pub(crate) fn claim(&mut self, group: u64) -> Claim {
        if self.outgoing.is_broken() || self.incoming.is_broken() {
            self.start_over();
        }
        self.unclaimed_since = None;
        for lane in [0, 1] {
            let link = self.links.entry(LinkId { group, lane }).or_default();
            link.claimed = true;
            self.unknown -= std::mem::take(&mut link.unknown);
        }
        Claim { group, epoch: self.epoch }
    }

    /// The group has failed: what comes for it is not wanted any more.
    pub(crate) fn fail(&mut self, claim: Claim) {
        if claim.epoch != self.epoch {
            return;
        }
        for lane in [0, 1] {
            if let Some(link) = self.links.get_mut(&LinkId { group: claim.group, lane }) {
                link.inbox.clear();
                link.failed = true;
            }
        }
        self.discard(claim.group);
    }

    /// This process has left the group.
    pub(crate) fn forget(&mut self, group: u64) {
        for lane in [0, 1] {
            if let Some(link) = self.links.remove(&LinkId { group, lane }) {
                self.unknown -= link.unknown;
            }
        }
        self.discard(group);
    }

    /// The rest of a message of this group is not wanted any more.
    fn discard(&mut self, group: u64) {
        if let Some(Current { link, place, .. }) = self.incoming.open().and_then(|half| half.current.as_mut())
            && link.group == group
        {
            *place = Place::Nowhere;
        }
    }

    /// Forgets connections that broke.
    fn start_over(&mut self) {
        self.epoch += 1;
        self.links.clear();
        self.unknown = 0;
        self.owed.clear();
        (self.outgoing, self.incoming) = (Half::Absent, Half::Absent);
    }

    /// The connections on which the group began are those that there are.
    #[inline]
    fn check(&self, claim: Claim) -> io::Result<()> {
        if claim.epoch == self.epoch { Ok(()) } else { Err(self.is_another()) }
    }

    #[cold]
    fn is_another(&self) -> io::Error {
        io::Error::new(io::ErrorKind::ConnectionReset, "it was opened again after this group began")
    }

    /// Is a connection missing on which something could be sent?
    #[inline]
    pub(crate) fn cannot_send(&self) -> bool {
        matches!(self.outgoing, Half::Absent)
    }

    /// Is there credit to give, and no connection for it?
    #[inline]
    pub(crate) fn has_owed(&self) -> bool {
        !self.owed.is_empty()
    }

    /// Begins to connect to the peer.
    pub(crate) fn open(&mut self, to: SocketAddr, from_interface: Option<IpAddr>) -> io::Result<()> {
        let hello =
            Hello { purpose: Purpose::Line { rail: self.rail }, sender: self.own, receiver: self.peer };
        let mut outgoing = Outgoing::connect(to, from_interface, &hello)?;
        for frame in self.owed.drain(..) {
            let _ = outgoing.send_soon(&frame.encode()); // the next send reports an error
        }
        self.outgoing = Half::Open(Box::new(outgoing));
        Ok(())
    }

    /// Takes a connection that the peer has opened, and of which the hello has been read and nothing else.
    pub(crate) fn adopt(&mut self, stream: NotInherited<TcpStream>, now: Instant) -> io::Result<Adopted> {
        match &self.incoming {
            Half::Open(incoming) if incoming.is_open() => return Ok(Adopted::Twin),
            // The peer has opened the line again.
            Half::Open(_) | Half::Broken(..) => self.start_over(),
            Half::Absent => {}
        }
        self.incoming = Half::Open(Box::new(Incoming::new(stream)?));
        if self.links.values().all(|link| !link.claimed) {
            self.unclaimed_since = Some(now);
        }
        Ok(Adopted::Yes)
    }

    /// Since when no group has asked for it.
    pub(crate) fn unclaimed_since(&self) -> Option<Instant> {
        self.unclaimed_since
    }

    /// Is nothing open, or has the peer ended? While no group reads from it, an end is not noticed otherwise.
    pub(crate) fn is_over(&self) -> bool {
        match &self.incoming {
            Half::Open(incoming) => !incoming.is_open(),
            _ => !matches!(self.outgoing, Half::Open(_)),
        }
    }

    /// Sends a message: all of it, or nothing yet. Says up to where the line must be written until it is out. What the
    /// socket does not take immediately is copied, and goes out by [`Line::poll_flush`] or before the next message.
    pub(crate) fn poll_send(
        &mut self,
        around: &impl Surroundings,
        claim: Claim,
        lane: u8,
        head: &Head,
        bytes: Bytes<'_>,
    ) -> io::Result<Poll<u64>> {
        self.check(claim)?;
        self.outgoing.check()?;
        let id = LinkId { group: claim.group, lane };
        if !self.sendable(id) {
            // The credit may be behind messages that are not expected now.
            while self.poll_any_frame(around, None)?.is_ready() {}
            if !self.sendable(id) {
                self.flush()?;
                return Ok(Poll::Pending);
            }
        }
        let Some(outgoing) = self.outgoing.open() else { return Ok(Poll::Pending) };
        let Some(link) = self.links.get_mut(&id) else { return Ok(Poll::Pending) };
        let credit = link.taken as u64;
        let header = Frame::Message { link: id, head: *head, len: bytes.len(), credit }.encode();
        match outgoing.poll_send(&header, bytes) {
            Ok(Poll::Pending) => Ok(Poll::Pending),
            Ok(Poll::Ready(())) => {
                link.sendable.use_up(HEADER + bytes.len());
                link.receivable.give_back(credit);
                link.taken = 0;
                Ok(Poll::Ready(outgoing.queued))
            }
            Err(error) => Err(self.outgoing.broke(error)),
        }
    }

    #[inline]
    fn sendable(&self, id: LinkId) -> bool {
        self.links.get(&id).is_some_and(|link| link.sendable.is_open())
    }

    /// Has everything been written up to `until`?
    pub(crate) fn poll_flush(&mut self, claim: Claim, until: u64) -> io::Result<Poll<()>> {
        self.check(claim)?;
        self.flush()?;
        let is_out = self.outgoing.open().is_none_or(|outgoing| outgoing.written >= until);
        Ok(if is_out { Poll::Ready(()) } else { Poll::Pending })
    }

    /// Writes what waits; true if some still does.
    pub(crate) fn flush(&mut self) -> io::Result<bool> {
        self.outgoing.check()?;
        let Some(outgoing) = self.outgoing.open() else { return Ok(false) };
        match outgoing.flush() {
            Ok(left) => Ok(left > 0),
            Err(error) => Err(self.outgoing.broke(error)),
        }
    }

    #[inline]
    pub(crate) fn has_unwritten(&self) -> bool {
        matches!(&self.outgoing, Half::Open(outgoing) if outgoing.has_unwritten())
    }

    /// The sockets to sleep on, with whether to write: until something can be read, or until what waits can be written.
    pub(crate) fn sleep_on(&self, sockets: &mut Vec<(Socket, bool)>) {
        if let Half::Open(outgoing) = &self.outgoing
            && outgoing.has_unwritten()
        {
            sockets.push((outgoing.socket(), true));
        }
        if let Half::Open(incoming) = &self.incoming {
            sockets.push((Arc::clone(&incoming.stream), false));
        }
    }
}

#[cfg(test)]
impl Line {
    pub(crate) fn all_sockets(&self, sockets: &mut Vec<Socket>) {
        if let Half::Open(outgoing) = &self.outgoing {
            sockets.push(outgoing.socket());
        }
        if let Half::Open(incoming) = &self.incoming {
            sockets.push(Arc::clone(&incoming.stream));
        }
    }
}

/// Options of both ends. A system that refuses one of them is only slower.
fn set_options(socket: &SockRef<'_>) {
    let _ = socket.set_tcp_nodelay(true);
    let keepalive = TcpKeepalive::new()
        .with_time(KEEPALIVE_TIME)
        .with_interval(KEEPALIVE_INTERVAL)
        .with_retries(KEEPALIVE_RETRIES);
    let _ = socket.set_tcp_keepalive(&keepalive);
}

/// A host that calls itself does so from the address called, or from one of loopback.
fn is_within_host(local: SocketAddr, peer: SocketAddr) -> bool {
    local.ip() == peer.ip() || peer.ip().is_loopback()
}

#[cfg(test)]
mod tests;
