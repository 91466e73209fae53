//! The helper thread: lets peers in, watches over their lives, carries notices, maps the regions that peers make known,
//! and drives what nobody waits for.
//!
//! Every peer with whom this rank speaks has a stream to it, Unix or TCP. The stream begins with a hello from both sides
//! (with descriptors, if it is Unix), then carries control frames. A stream that ends without a goodbye means that
//! the peer died. So does the end of its process, which is watched by a pidfd on one host: a child that the peer forked, such as
//! a worker that loads data, keeps copies of the streams, and they do not end before it does. A peer that is there but shows no sign of life is given up after the heartbeat's limit: on one host a
//! counter in its segment must move, between hosts frames must come. If none come, the peer is also asked on a new connection:
//! after packets were lost, TCP retransmits at ever longer intervals, so a stream may stay unresponsive for twice as long as the
//! network was.

#![expect(clippy::disallowed_methods, reason = "owns the helper thread, and its clock")]

#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod hostile;

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::io::{self, Read as _, Write as _};
use std::mem::MaybeUninit;
use std::net::{IpAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant, SystemTime};

use rustix::buffer::spare_capacity;
use rustix::event::Timespec;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use rustix::process::{PidfdFlags, pidfd_open};
use tenfold_memory::{Doing, FileIdentity, NotInherited, PeerRegion, PeerSegment, Region};
use tenfold_store::owner::{self, Owner};

use super::early::Kept;
use super::progress::Progress;
use super::regions::{Announced, Announcement, Answer};
use super::silence::{Look, Silence};
use super::{Bell, Fabric, Fate, LinkId, Order, Peer, UNCLAIMED_FOR, UNCLAIMED_MAX, Unclaimed, lock};
use crate::fault::show_duration;
use crate::network::{explain, is_exhaustion};
use crate::recorder;
use crate::wire::{ControlFrame, FabricId, GroupPulse, Hello, Purpose};

const WAKER: u64 = 0;
const UNIX: u64 = 1;
const TCP: u64 = 2;
const ALARM: u64 = 3;
const FIRST_STREAM: u64 = 4;

/// Events that are fetched at once.
const EVENTS: usize = 256;

/// Between two looks at the peers, at most.
const TICK: Duration = Duration::from_millis(500);

/// A stranger has so long to say hello.
const GREETING_MAX: Duration = Duration::from_secs(10);

/// Streams of strangers who have not said hello yet. Beyond it the oldest is closed and not the newest: a peer says hello as
/// soon as it is connected, and must not be kept out by those who say nothing.
const STRANGERS_MAX: usize = 384;

/// Connections accepted at a time, before beats and streams have their turn again.
const ACCEPTS: usize = 64;

/// Reads from one stream, of up to 16 KiB each, before beats and other streams have their turn again.
const READS: usize = 64;

/// Bytes of answers that a peer may leave unread.
const ANSWERS_MAX: usize = 1 << 20;

/// How long accepting rests when there are no descriptors.
const ACCEPT_REST: Duration = Duration::from_millis(50);

/// After how long a peer is dialled again that has no room for another caller.
const DIAL_REST: Duration = Duration::from_millis(10);

/// How often a peer is dialled again that closes before it says hello.
const TRIES_MAX: u32 = 5;

/// Between two lines of the log about strangers; those in between are counted.
const COMPLAINT_INTERVAL: Duration = Duration::from_secs(1);

pub(super) fn start(fabric: Arc<Fabric>, unix: UnixListener, tcp: TcpListener) -> io::Result<JoinHandle<()>> {
    let mut watch = prepare(fabric, unix, tcp)?;
    Builder::new().name("tenfold".to_string()).spawn(move || watch.run())
}

/// What the helper thread works with.
fn prepare(fabric: Arc<Fabric>, unix: UnixListener, tcp: TcpListener) -> io::Result<Watch> {
    let poll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    unix.set_nonblocking(true)?;
    tcp.set_nonblocking(true)?;
    epoll::add(&poll, &fabric.waker, EventData::new_u64(WAKER), EventFlags::IN)?;
    epoll::add(&poll, &fabric.alarm, EventData::new_u64(ALARM), EventFlags::IN)?;
    epoll::add(&poll, &unix, EventData::new_u64(UNIX), EventFlags::IN)?;
    epoll::add(&poll, &tcp, EventData::new_u64(TCP), EventFlags::IN)?;
    let now = Instant::now();
    let stuck = fabric.options.stuck.after.map_or(TICK, |after| after / 2);
    let tick = TICK.min(fabric.options.heartbeat / 16).min(stuck).max(Duration::from_millis(10));
    let progress = fabric.options.progress.as_deref().map(|folder| Progress::new(folder, fabric.id));
    Ok(Watch {
        fabric,
        poll,
        unix: unix.into(),
        tcp: tcp.into(),
        resting_until: None,
        complaints: Complaints::default(),
        to_dial: Vec::new(),
        dial_at: None,
        tries: HashMap::new(),
        streams: HashMap::new(),
        next_token: FIRST_STREAM,
        unread: Vec::new(),
        announced: Announced::default(),
        pulses: HashMap::new(),
        silences: HashMap::new(),
        processes: HashMap::new(),
        progress,
        tick,
        next_tick: now + tick,
    })
}

/// A stream to somebody.
struct Stream {
    io: Io,
    /// Nothing before its hello.
    peer: Option<Arc<Peer>>,
    /// We opened it, and have not been answered.
    ours: bool,
    /// The peer opened it.
    accepted: bool,
    arrived: Vec<u8>,
    descriptors: Vec<OwnedFd>,
    to_write: Vec<u8>,
    /// Regions whose descriptor travels with the byte of `to_write` at this place; in order.
    enclosed: VecDeque<(usize, Arc<Region>)>,
    since: Instant,
    /// It only asks whether this peer responds: its end means nothing.
    probe: Option<Arc<Peer>>,
    /// Notices were sent on it.
    has_told: bool,
}

enum Io {
    Unix(NotInherited<UnixStream>),
    Tcp(NotInherited<TcpStream>),
}

impl Io {
    fn fd(&self) -> BorrowedFd<'_> {
        match self {
            Io::Unix(stream) => stream.as_fd(),
            Io::Tcp(stream) => stream.as_fd(),
        }
    }

    fn is_unix(&self) -> bool {
        matches!(self, Io::Unix(_))
    }
}

/// How a peer on this host was last seen.
struct Pulse {
    last: u64,
    silence: Silence,
}

/// What became of a stream after something was read.
enum After {
    Keep,
    /// There is more to read.
    Again,
    Close(Fate),
    /// It has done what it was for.
    Drop,
    /// It is a data link: it goes to its group.
    HandOver(Hello),
}

struct Watch {
    fabric: Arc<Fabric>,
    poll: OwnedFd,
    unix: NotInherited<UnixListener>,
    tcp: NotInherited<TcpListener>,
    /// Nobody is accepted before.
    resting_until: Option<Instant>,
    complaints: Complaints,
    /// Peers on this host to dial again, and when.
    to_dial: Vec<Arc<Peer>>,
    dial_at: Option<Instant>,
    /// How often a peer has closed before it said hello.
    tries: HashMap<FabricId, u32>,
    streams: HashMap<u64, Stream>,
    next_token: u64,
    /// Streams with more to read than one turn allows.
    unread: Vec<u64>,
    announced: Announced,
    pulses: HashMap<FabricId, Pulse>,
    /// When peers on other hosts were last heard.
    silences: HashMap<FabricId, Silence>,
    /// Processes of peers on this host, by token.
    processes: HashMap<u64, (Arc<Peer>, OwnedFd)>,
    progress: Option<Progress>,
    tick: Duration,
    next_tick: Instant,
}

impl Watch {
    fn run(&mut self) {
        crate::work::callbacks_go_elsewhere();
        let mut events = Vec::with_capacity(EVENTS);
        loop {
            let pauses = [self.resting_until, self.dial_at].into_iter().flatten();
            let next = pauses.fold(self.next_tick, Instant::min);
            let mut left = next.saturating_duration_since(Instant::now());
            if !self.unread.is_empty() {
                left = Duration::ZERO;
            }
            if self.fabric.helper_is_called() {
                // Sleeps in there, on everything that the control plane sleeps on too.
                self.fabric.engine.helper_turn(&self.fabric, self.poll.as_fd(), left);
                left = Duration::ZERO;
            }
            events.clear();
            let limit = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) };
            match epoll::wait(&self.poll, spare_capacity(&mut events), Some(&limit)) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return tracing::error!("the helper thread cannot poll and ends: {error}"),
            }
            for event in &events {
                match event.data.u64() {
                    WAKER => self.fabric.waker.silence(),
                    ALARM => _ = rustix::io::read(&self.fabric.alarm, &mut [0_u8; 8]), // how often it went off
                    UNIX => self.accept_unix(),
                    TCP => self.accept_tcp(),
                    token if self.processes.contains_key(&token) => self.process_ended(token),
                    token => self.serve(token),
                }
            }
            for token in std::mem::take(&mut self.unread) {
                self.serve(token);
            }
            let orders = std::mem::take(&mut *lock(&self.fabric.orders));
            for order in orders {
                match order {
                    Order::Stop => return self.stop(),
                    Order::Answer(asker) => _ = asker.send(()), // it may have stopped waiting
                    Order::Dial(peer) => self.dial(&peer),
                    Order::Told { from, group, text } => self.hear(from, group, &text),
                    Order::Tell { to, group, text } => self.tell(&to, group, &text),
                    Order::Announce(announcement) => self.announce(announcement),
                    Order::Retire { offset } => self.retire(offset),
                }
            }
            let now = Instant::now();
            if self.resting_until.is_some_and(|until| now >= until) {
                self.resting_until = None;
                self.listen(EventFlags::IN);
            }
            if self.dial_at.is_some_and(|at| now >= at) {
                self.dial_at = None;
                let peers = std::mem::take(&mut self.to_dial);
                peers.iter().for_each(|peer| self.dial(peer));
            }
            if now >= self.next_tick {
                self.look_around(now);
            }
        }
    }

    fn stop(&mut self) {
        for stream in self.streams.values_mut().filter(|stream| stream.peer.is_some()) {
            ControlFrame::Goodbye.encode(&mut stream.to_write);
            let _ = stream.write(); // whoever does not read it sees the end of the stream
        }
        self.streams.clear();
    }

    fn add(&mut self, io: Io, peer: Option<Arc<Peer>>, ours: bool) -> u64 {
        let token = self.next_token;
        self.next_token += 1;
        let stream = Stream {
            io,
            peer,
            ours,
            accepted: !ours,
            arrived: Vec::new(),
            descriptors: Vec::new(),
            to_write: Vec::new(),
            enclosed: VecDeque::new(),
            since: Instant::now(),
            probe: None,
            has_told: false,
        };
        // Edge-triggered: whoever serves it reads and writes until there is no more.
        let flags = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
        if let Err(error) = epoll::add(&self.poll, stream.io.fd(), EventData::new_u64(token), flags) {
            tracing::warn!("cannot watch a stream: {error}");
            return token;
        }
        self.streams.insert(token, stream);
        token
    }

    fn accept_unix(&mut self) {
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
    fn rest(&mut self, error: &io::Error) {
        self.complain(&format!("cannot accept a peer: {}", explain(error)));
        self.resting_until = Some(Instant::now() + ACCEPT_REST);
        self.listen(EventFlags::empty());
    }

    fn listen(&self, flags: EventFlags) {
        let unix = epoll::modify(&self.poll, &self.unix, EventData::new_u64(UNIX), flags);
        let tcp = epoll::modify(&self.poll, &self.tcp, EventData::new_u64(TCP), flags);
        if let Err(error) = unix.and(tcp) {
            tracing::warn!("cannot watch who connects: {error}");
        }
    }

    /// A line of the log that strangers can cause.
    fn complain(&mut self, line: &str) {
        if let Some(line) = self.complaints.show(line, Instant::now()) {
            tracing::warn!("{line}");
        }
    }

    /// Closes the stream that has said nothing for longest, if there are too many of them.
    fn make_room_for_stranger(&mut self) {
        let strangers = self.streams.iter().filter(|(_, stream)| stream.peer.is_none());
        let tokens: Vec<u64> = strangers.map(|(&token, _)| token).collect();
        if tokens.len() >= STRANGERS_MAX
            && let Some(oldest) = tokens.into_iter().min()
        {
            self.streams.remove(&oldest);
        }
    }

    /// Other users of this host have no business with our memory.
    fn is_welcome(&mut self, stream: &UnixStream) -> bool {
        let same_user = rustix::net::sockopt::socket_peercred(stream)
            .is_ok_and(|them| them.uid == rustix::process::geteuid());
        if !same_user {
            self.complain("refused a process of another user that tried to join");
        }
        same_user
    }

    /// The same for a caller from this host; the kernel knows its user. Of others nothing can be known.
    fn is_served(&mut self, stream: &TcpStream, caller: std::net::SocketAddr) -> bool {
        let Ok(own) = stream.local_addr() else { return false }; // it is gone
        if !caller.ip().is_loopback() && caller.ip() != own.ip() {
            return true;
        }
        let same_user = owner::of_connection(caller, own).is_none_or(Owner::is_trusted);
        if !same_user {
            self.complain("refused a process of another user that tried to join");
        }
        same_user
    }

    fn accept_tcp(&mut self) {
        for _ in 0..ACCEPTS {
            match self.tcp.accept() {
                Ok((stream, caller)) => {
                    if !self.is_served(&stream, caller) || stream.set_nonblocking(true).is_err() {
                        continue;
                    }
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

    /// Opens a stream to `peer`: Unix if it is on this host, else TCP.
    fn dial(&mut self, peer: &Arc<Peer>) {
        let opened = match peer.near_name() {
            Some(name) => connect_near(&name).map(|stream| Io::Unix(stream.into())),
            None => match peer.address() {
                Some(address) => {
                    connect(address, self.fabric.interface()).map(|stream| Io::Tcp(stream.into()))
                }
                None => Err(io::Error::other("it has no TCP address")),
            },
        };
        match opened {
            Ok(io) => {
                let token = self.add(io, Some(Arc::clone(peer)), true);
                self.greet(token);
                self.serve(token);
            }
            // Nobody listens where it did a moment ago: it is gone.
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => self.end(peer, Fate::Died),
            // As many callers wait there as may. This thread must not wait, too: it lets in those who call this rank.
            Err(error) if peer.is_near() && error.kind() == io::ErrorKind::WouldBlock => {
                self.dial_later(peer);
            }
            Err(error) => self.end(peer, Fate::Unreachable(explain(&error))),
        }
    }

    /// Says hello; on a Unix stream with the descriptors of our segment and our bell.
    fn greet(&mut self, token: u64) {
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

    /// Something can be read or written.
    fn serve(&mut self, token: u64) {
        let Some(mut stream) = self.streams.remove(&token) else { return };
        match self.read(&mut stream) {
            Ok(After::Keep) => match stream.write() {
                Ok(()) => _ = self.streams.insert(token, stream),
                Err(error) => self.lose(&stream, &error),
            },
            Ok(After::Again) => match stream.write() {
                Ok(()) => {
                    self.streams.insert(token, stream);
                    self.unread.push(token);
                }
                Err(error) => self.lose(&stream, &error),
            },
            // It let us in and closed before it said hello, as a rank does that too many strangers call.
            Ok(After::Close(Fate::Died)) if stream.is_unanswered() && self.dials_again(&stream) => {}
            Ok(After::Close(fate)) => {
                if let Some(peer) = &stream.peer {
                    self.serve_all_of(&Arc::clone(peer)); // its last words may be on another stream
                }
                self.part(&stream, fate);
            }
            Ok(After::Drop) => {}
            Ok(After::HandOver(hello)) => self.hand_over(stream, &hello),
            Err(error) => self.lose(&stream, &error),
        }
    }

    /// Dials a peer again whose stream ended, unless that was tried too often.
    fn dials_again(&mut self, stream: &Stream) -> bool {
        let Some(peer) = &stream.peer else { return false };
        let tries = self.tries.entry(peer.id()).or_default();
        *tries += 1;
        if *tries > TRIES_MAX || peer.fate().is_some() {
            return false;
        }
        self.dial_later(peer);
        true
    }

    fn dial_later(&mut self, peer: &Arc<Peer>) {
        self.to_dial.push(Arc::clone(peer));
        self.dial_at = Some(Instant::now() + DIAL_REST);
    }

    fn lose(&mut self, stream: &Stream, error: &io::Error) {
        if error.kind() == io::ErrorKind::ConnectionReset
            && stream.is_unanswered()
            && self.dials_again(stream)
        {
            return;
        }
        match &stream.peer {
            Some(_) => {
                let refused = error.kind() == io::ErrorKind::ConnectionRefused;
                let died = refused
                    || matches!(error.kind(), io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe);
                let fate = if died { Fate::Died } else { Fate::Unreachable(error.to_string()) };
                self.part(stream, fate);
            }
            None => tracing::debug!("a stranger was turned away: {error}"),
        }
    }

    /// A stream has ended, and so has its peer, unless another stream of the peer goes on: a process that has only learned the
    /// peer's name can open a stream in that name, and must not be able to end the peer with it.
    fn part(&mut self, stream: &Stream, fate: Fate) {
        let Some(peer) = &stream.peer else { return };
        let goes_on = |other: &Stream| other.greeted() && other.is_of(peer.id());
        if peer.is_thread() || self.streams.values().any(goes_on) {
            return tracing::debug!("a stream of {peer} ended, and another goes on");
        }
        self.end(&Arc::clone(peer), fate);
    }

    /// A data link belongs to the engine from here on.
    fn hand_over(&mut self, stream: Stream, hello: &Hello) {
        let Purpose::Data { group, from, lane, .. } = hello.purpose else { return };
        let link = LinkId { group, sender: hello.sender, from, lane };
        let Io::Tcp(socket) = stream.io else { return };
        let _ = epoll::delete(&self.poll, &socket);
        if lock(&self.fabric.early).has_left(group) {
            return; // nobody will ask for it
        }
        let mut unclaimed = lock(&self.fabric.unclaimed);
        if unclaimed.len() >= UNCLAIMED_MAX {
            return tracing::warn!(
                "refused a connection: {UNCLAIMED_MAX} others wait for groups that nobody made"
            );
        }
        let new = Unclaimed { stream: socket, since: Instant::now() };
        match unclaimed.entry(link) {
            // What may be read from it already is a message that the group waits for.
            Entry::Occupied(known) if is_open(&known.get().stream) => {
                drop(unclaimed);
                return self.complain("refused a second connection for the same messages");
            }
            Entry::Occupied(mut known) => _ = known.insert(new),
            Entry::Vacant(place) => _ = place.insert(new),
        }
        drop(unclaimed);
        self.fabric.tell_news();
    }

    /// Reads what there is, and not for long. Only the hello of a data link is read to its end and not further.
    fn read(&mut self, stream: &mut Stream) -> io::Result<After> {
        for _ in 0..READS {
            let greeted = stream.greeted();
            let mut buffer = [0; 16 * 1024];
            let room = if greeted { buffer.len() } else { Hello::LEN - stream.arrived.len() };
            let count = match &mut stream.io {
                Io::Unix(socket) => receive_descriptors(socket, &mut buffer[..room], &mut stream.descriptors),
                Io::Tcp(socket) => socket.read(&mut buffer[..room]),
            };
            match count {
                Ok(0) => return Ok(After::Close(Fate::Died)),
                Ok(count) => stream.arrived.extend_from_slice(&buffer[..count]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(After::Keep),
                // A connection that is being made.
                Err(error) if error.kind() == io::ErrorKind::NotConnected => return Ok(After::Keep),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            }
            if let Some(peer) = &stream.peer {
                self.heard(peer.id());
            }
            if !stream.greeted() {
                let hello = Hello::decode(&stream.arrived, self.fabric.id).map_err(io::Error::other)?;
                let Some(hello) = hello else { continue };
                stream.arrived.clear();
                match (hello.purpose, &stream.probe) {
                    (Purpose::Probe, _) => return self.respond(stream, &hello),
                    (_, Some(_)) => return Err(io::Error::other("a probe was answered by something else")),
                    (Purpose::Data { .. }, None) => return Ok(After::HandOver(hello)),
                    (Purpose::Control, None) => self.meet(stream, &hello)?,
                }
                continue;
            }
            if let Some(fate) = self.read_frames(stream)? {
                return Ok(After::Close(fate));
            }
        }
        Ok(After::Again)
    }

    /// A peer showed a sign of life.
    fn heard(&mut self, peer: FabricId) {
        if let Some(silence) = self.silences.get_mut(&peer) {
            silence.heard(Instant::now());
        }
    }

    /// A peer asks whether this rank responds, or has answered the same question.
    fn respond(&mut self, stream: &mut Stream, hello: &Hello) -> io::Result<After> {
        self.heard(hello.sender);
        if stream.probe.is_none() {
            let answer = Hello { purpose: Purpose::Probe, sender: self.fabric.id, receiver: hello.sender };
            stream.to_write.extend(answer.encode());
            stream.write()?; // a new socket has room for it
        }
        Ok(After::Drop)
    }

    /// Asks a peer on another host whether it responds, on a new connection.
    fn probe(&mut self, peer: &Arc<Peer>) {
        let earlier = self
            .streams
            .iter()
            .find(|(_, stream)| stream.probe.as_ref().is_some_and(|asked| asked.id() == peer.id()));
        if let Some((&token, stream)) = earlier {
            // The peer's kernel has answered, so the peer will, too, as soon as it runs.
            if matches!(&stream.io, Io::Tcp(socket) if socket.peer_addr().is_ok()) {
                return;
            }
            self.streams.remove(&token);
        }
        let Some(address) = peer.address() else { return };
        let Ok(socket) = connect(address, self.fabric.interface()) else { return }; // the stream's own end is the news
        let token = self.add(Io::Tcp(socket.into()), None, true);
        let Some(stream) = self.streams.get_mut(&token) else { return };
        stream.probe = Some(Arc::clone(peer));
        let hello = Hello { purpose: Purpose::Probe, sender: self.fabric.id, receiver: peer.id() };
        stream.to_write.extend(hello.encode());
        self.serve(token);
    }

    /// A peer said hello: we know it from here on.
    fn meet(&mut self, stream: &mut Stream, hello: &Hello) -> io::Result<()> {
        if stream.peer.as_ref().is_some_and(|dialled| dialled.id() != hello.sender) {
            return Err(io::Error::other("somebody else answered"));
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
        // What went wrong before we met: it should not wait for us in vain.
        for (group, text) in self.fabric.engine.notices(peer.id()) {
            ControlFrame::Notice { group, text }.encode(&mut stream.to_write);
        }
        self.fabric.tell_news();
        Ok(())
    }

    /// Watches the process at the other end of a Unix stream; if that cannot be, the end of the stream must do.
    fn watch_process(&mut self, peer: &Arc<Peer>, io: &Io) {
        let is_known = self.processes.values().any(|(known, _)| known.id() == peer.id());
        let Ok(them) = rustix::net::sockopt::socket_peercred(io.fd()) else { return };
        // In another PID namespace there may be no name for it; its own process is this one if ranks are threads.
        if is_known || them.pid == rustix::process::getpid() {
            return;
        }
        let Ok(process) = pidfd_open(them.pid, PidfdFlags::empty()) else { return };
        let token = self.next_token;
        self.next_token += 1;
        if epoll::add(&self.poll, &process, EventData::new_u64(token), EventFlags::IN).is_ok() {
            self.processes.insert(token, (Arc::clone(peer), process));
        }
    }

    fn process_ended(&mut self, token: u64) {
        let Some((peer, process)) = self.processes.remove(&token) else { return };
        let _ = epoll::delete(&self.poll, &process);
        // What it said before it ended still counts, its goodbye for one.
        self.serve_all_of(&peer);
        self.end(&peer, Fate::Died);
    }

    /// Reads what a peer has said on any stream.
    fn serve_all_of(&mut self, peer: &Peer) {
        let of_peer = self.streams.iter().filter(|(_, stream)| stream.is_of(peer.id()));
        let tokens: Vec<u64> = of_peer.map(|(token, _)| *token).collect();
        tokens.into_iter().for_each(|token| self.serve(token));
    }

    fn read_frames(&mut self, stream: &mut Stream) -> io::Result<Option<Fate>> {
        let mut used = 0;
        while let Some((frame, len)) =
            ControlFrame::decode(&stream.arrived[used..]).map_err(io::Error::other)?
        {
            used += len;
            match frame {
                ControlFrame::Goodbye => return Ok(Some(Fate::Left)),
                ControlFrame::Notice { group, text } => {
                    if let Some(from) = stream.peer.as_ref().map(|peer| peer.id()) {
                        self.hear(from, group, &text);
                    }
                }
                ControlFrame::Pulse { groups } => {
                    if let Some(peer) = &stream.peer {
                        peer.set_doing(&groups, recorder::host_now());
                    }
                }
                ControlFrame::Region { offset, len, file } => {
                    let refusal = stream.map_region(offset, len, file).err();
                    let refusal = refusal.map_or_else(Vec::new, |error| error.to_string().into_bytes());
                    ControlFrame::Mapped { offset, refusal }.encode(&mut stream.to_write);
                    if stream.to_write.len() > ANSWERS_MAX {
                        return Err(io::Error::other("it does not read the answers that it asks for"));
                    }
                }
                ControlFrame::Mapped { offset, refusal } => self.hear_answer(stream, offset, &refusal),
                ControlFrame::Retired { offset } => {
                    let segment = stream.peer.as_ref().and_then(|peer| peer.segment());
                    if let (Some(segment), Ok(offset)) = (segment, usize::try_from(offset)) {
                        segment.remove_region(offset);
                    }
                }
            }
        }
        stream.arrived.drain(..used);
        Ok(None)
    }

    fn hear(&mut self, from: FabricId, group: u64, text: &[u8]) {
        if !self.fabric.engine.hear(&self.fabric, from, group, text) {
            lock(&self.fabric.early).keep(from, group, text.to_vec(), Instant::now());
        }
    }

    fn tell(&mut self, to: &[Arc<Peer>], group: u64, text: &[u8]) {
        for peer in to {
            if let Some(thread) = peer.thread() {
                #[cfg(test)]
                self.fabric.notices_sent.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                thread.order(Order::Told { from: self.fabric.id, group, text: text.to_vec() });
            }
        }
        let frame = ControlFrame::Notice { group, text: text.to_vec() };
        // If both have dialled there are two streams. All notices go by the same one, so that they are heard in order.
        let mut chosen: HashMap<FabricId, (bool, bool, u64)> =
            to.iter().map(|peer| (peer.id(), (true, true, u64::MAX))).collect();
        for (token, stream) in &self.streams {
            let best = stream.peer.as_ref().and_then(|peer| chosen.get_mut(&peer.id()));
            if let Some(best) = best {
                *best = (*best).min((!stream.has_told, !stream.greeted(), *token));
            }
        }
        for (_, _, token) in chosen.into_values() {
            let Some(stream) = self.streams.get_mut(&token) else { continue };
            #[cfg(test)]
            self.fabric.notices_sent.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            stream.has_told = true;
            frame.encode(&mut stream.to_write);
            if stream.write().is_err() {
                self.serve(token); // finds out why
            }
        }
    }

    /// Makes a region known to peers on this host.
    fn announce(&mut self, announcement: Announcement) {
        let Announcement { offset, region, to, answers } = announcement;
        let (offset, len) = (offset as u64, region.len() as u64);
        self.announced.begin(offset, to.iter().map(|peer| peer.id()).collect(), answers);
        let frame = ControlFrame::Region { offset, len, file: region.identity() };
        for peer in to {
            let sent = self.write_near(peer.id(), |stream| {
                stream.enclosed.push_back((stream.to_write.len(), Arc::clone(&region)));
                frame.encode(&mut stream.to_write);
            });
            if peer.fate().is_some() {
                self.announced.lose(peer.id());
            } else if !sent {
                let refusal = Answer::Refused("there is no stream to it".to_string());
                self.announced.answered(offset, peer.id(), refusal);
            }
        }
    }

    /// Nothing points into a region any more.
    fn retire(&mut self, offset: usize) {
        self.fabric.retire_in_threads(offset);
        let frame = ControlFrame::Retired { offset: offset as u64 };
        for reader in self.announced.retire(offset as u64) {
            self.write_near(reader, |stream| frame.encode(&mut stream.to_write));
        }
    }

    fn hear_answer(&mut self, stream: &mut Stream, offset: u64, refusal: &[u8]) {
        let Some(peer) = &stream.peer else { return };
        let answer = match refusal {
            [] => Answer::Mapped,
            why => Answer::Refused(String::from_utf8_lossy(why).into_owned()),
        };
        if self.announced.answered(offset, peer.id(), answer) {
            ControlFrame::Retired { offset }.encode(&mut stream.to_write);
        }
    }

    /// Writes something to a peer on this host: always on the same stream, if both have dialled. False if there is none.
    fn write_near(&mut self, to: FabricId, put: impl FnOnce(&mut Stream)) -> bool {
        let streams = self.streams.iter_mut().filter(|(_, stream)| stream.io.is_unix() && stream.is_of(to));
        let Some((&token, stream)) = streams.min_by_key(|(token, _)| **token) else { return false };
        put(stream);
        if stream.write().is_err() {
            self.serve(token); // finds out why
        }
        true
    }

    fn end(&mut self, peer: &Arc<Peer>, fate: Fate) {
        self.announced.lose(peer.id());
        if peer.end(fate) {
            self.fabric.tell_news();
        }
    }

    /// Shows that we live, and looks who else does.
    fn look_around(&mut self, now: Instant) {
        // If this thread did not run for long, neither peers' silence nor their deadlines count: we were away, not they.
        let away_after = (self.fabric.options.heartbeat / 2).min(2 * TICK).max(2 * self.tick);
        let away = now.saturating_duration_since(self.next_tick) > away_after;
        self.next_tick = now + self.tick;
        self.fabric.segment.beat();
        let early = lock(&self.fabric.early).take(now);
        for Kept { from, group, text, came } in early {
            if !self.fabric.engine.hear(&self.fabric, from, group, &text) {
                lock(&self.fabric.early).keep(from, group, text, came);
            }
        }
        let is_fresh = |unclaimed: &Unclaimed| now.saturating_duration_since(unclaimed.since) < UNCLAIMED_FOR;
        lock(&self.fabric.unclaimed).retain(|_, unclaimed| is_fresh(unclaimed));
        self.fabric.bury(None);
        self.watch_near(now, away);
        self.watch_far(now, away);
        if !away {
            self.fabric.engine.look_at_others(&self.fabric);
        }
        recorder::dump_if_signalled();
        if let Some(progress) = &mut self.progress {
            progress.tell(&self.fabric.engine.progress(), SystemTime::now());
        }
    }

    fn watch_near(&mut self, now: Instant, away: bool) {
        let peers: Vec<Arc<Peer>> = lock(&self.fabric.peers).values().cloned().collect();
        for peer in peers {
            let Some(pulse) = peer.pulse() else { continue };
            let seen = self
                .pulses
                .entry(peer.id())
                .or_insert_with(|| Pulse { last: pulse, silence: Silence::new(now) });
            if pulse != seen.last || away {
                *seen = Pulse { last: pulse, silence: Silence::new(now) };
            }
            let look = seen.silence.look(now, self.fabric.options.heartbeat);
            self.judge(&peer, &look);
        }
    }

    fn judge(&mut self, peer: &Arc<Peer>, look: &Look) {
        if look.warn {
            self.warn(peer, look.silence);
        }
        if look.over && peer.fate().is_none() {
            self.end(peer, Fate::Silent(look.silence));
        }
    }

    fn watch_far(&mut self, now: Instant, away: bool) {
        let host_now = recorder::host_now();
        let groups = self.fabric.engine.doing().into_iter().map(|(group, doing)| {
            let Doing { current, finished, since } = doing;
            GroupPulse { group, current, finished, ages: since.map(|since| host_now.saturating_sub(since)) }
        });
        let pulse = ControlFrame::Pulse { groups: groups.collect() };
        let (mut peers, mut broken, mut late) = (HashMap::new(), Vec::new(), Vec::new());
        for (token, stream) in &mut self.streams {
            if !stream.greeted() && stream.peer.is_none() {
                if now.saturating_duration_since(stream.since) > GREETING_MAX {
                    late.push(*token);
                }
                continue;
            }
            if stream.io.is_unix() {
                continue;
            }
            if let Some(peer) = &stream.peer {
                peers.insert(peer.id(), Arc::clone(peer));
            }
            if stream.greeted() && stream.to_write.len() < ControlFrame::LEN_MAX {
                pulse.encode(&mut stream.to_write);
            }
            if stream.write().is_err() {
                broken.push(*token);
            }
        }
        self.silences.retain(|peer, _| peers.contains_key(peer));
        for peer in peers.into_values().filter(|peer| peer.fate().is_none()) {
            let silence = self.silences.entry(peer.id()).or_insert_with(|| Silence::new(now));
            if away {
                silence.heard(now);
            }
            let look = silence.look(now, self.fabric.options.heartbeat);
            self.judge(&peer, &look);
            if look.probe && !look.over {
                self.probe(&peer);
            }
        }
        broken.into_iter().for_each(|token| self.serve(token));
        late.into_iter().for_each(|token| _ = self.streams.remove(&token));
    }

    fn warn(&self, peer: &Peer, silence: Duration) {
        if let Some(who) = self.fabric.engine.waiting_for(peer.id()) {
            tracing::warn!("no sign of life for {} from {peer}, {who}", show_duration(silence));
        }
    }
}

impl Stream {
    /// Both sides have said hello.
    fn greeted(&self) -> bool {
        self.peer.is_some() && !self.ours
    }

    fn is_of(&self, id: FabricId) -> bool {
        self.peer.as_ref().is_some_and(|peer| peer.id() == id)
    }

    /// We have said hello, and the peer has not.
    fn is_unanswered(&self) -> bool {
        self.ours && self.probe.is_none()
    }

    /// Maps a region of the peer's, whose descriptor has come with the announcement.
    fn map_region(&mut self, offset: u64, len: u64, file: FileIdentity) -> io::Result<()> {
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

    fn write(&mut self) -> io::Result<()> {
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
fn connect_near(name: &str) -> io::Result<UnixStream> {
    let (family, flags) = (AddressFamily::UNIX, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC);
    let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)?;
    Ok(socket.into())
}

/// Begins to connect to another host, from the same address as the data links.
fn connect(address: std::net::SocketAddr, from: Option<IpAddr>) -> io::Result<TcpStream> {
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

fn send_descriptors(socket: &UnixStream, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    let sent = send_with(socket, bytes, descriptors)?;
    if sent == bytes.len() { Ok(()) } else { Err(io::Error::other("a hello was cut short")) }
}

/// Writes some bytes, with which up to two descriptors travel.
fn send_with(socket: &UnixStream, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<usize> {
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
fn receive_descriptors(
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

/// Has its other end neither closed nor broken it, or is there something to read?
fn is_open(socket: &TcpStream) -> bool {
    match socket.peek(&mut [0]) {
        Ok(count) => count > 0,
        Err(error) => error.kind() == io::ErrorKind::WouldBlock,
    }
}

/// Lines of the log that strangers can cause: one at a time, then a count.
#[derive(Debug, Default)]
struct Complaints {
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
    use super::*;
    use crate::fabric::{FabricHandle, FabricOptions};

    fn fabric() -> FabricHandle {
        FabricHandle::new(FabricOptions::for_tests()).unwrap()
    }

    /// Whoever knows the id is let in on TCP, and every user can list the names of sockets.
    #[test]
    fn the_name_of_the_socket_does_not_tell_the_id() {
        let fabric = fabric();
        let names = std::fs::read_to_string("/proc/net/unix").unwrap();
        assert!(names.contains(&fabric.socket_name), "it is listed");
        let id = fabric.id.to_string();
        assert!(!names.contains(&id) && !names.contains(&id[..16]) && !names.contains(&id[16..]));
    }

    /// Connections that say nothing must not keep out a peer that says hello.
    #[test]
    fn those_who_say_nothing_are_closed_to_make_room() {
        let fabric = fabric();
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

    /// Two helpers that wait for each other to accept would wait for ever.
    #[test]
    fn a_peer_without_room_for_callers_does_not_stop_the_helper_and_is_dialled_again() {
        let fabric = fabric();
        let name = format!("tenfold-test/{}/{:032x}", std::process::id(), crate::fabric::random().unwrap());
        let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap();
        let full = rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
        rustix::net::bind(&full, &address).unwrap();
        rustix::net::listen(&full, 0).unwrap();
        let callers: Vec<UnixStream> = std::iter::from_fn(|| connect_near(&name).ok()).collect();
        assert!(!callers.is_empty());
        let peer = fabric.peer(FabricId(7));
        let pid = std::process::id();
        let (host, socket_name) = (String::new(), name);
        peer.set_whereabouts(crate::fabric::Whereabouts {
            host,
            pid,
            socket_name,
            near: true,
            address: None,
        });
        fabric.dial(&peer);
        let (sender, receiver) = std::sync::mpsc::channel();
        fabric.order(Order::Answer(sender));
        receiver.recv_timeout(Duration::from_secs(40)).expect("the helper does not wait for the peer");
        assert_eq!(peer.fate(), None);
        let listener = UnixListener::from(full);
        callers.iter().for_each(|_| drop(listener.accept().unwrap()));
        let (mut dialled, _) = listener.accept().unwrap();
        dialled.set_read_timeout(Some(Duration::from_secs(40))).unwrap();
        let mut hello = [0; Hello::LEN];
        dialled.read_exact(&mut hello).expect("it is dialled again");
        let hello = Hello::decode(&hello, FabricId(7)).unwrap().unwrap();
        assert_eq!(hello, Hello { purpose: Purpose::Control, sender: fabric.id, receiver: FabricId(7) });
    }

    /// A rank closes the oldest of too many callers, and that may be a peer.
    #[test]
    fn a_peer_that_closes_before_its_hello_is_dialled_again_and_not_for_ever() {
        let fabric = fabric();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let peer = fabric.peer(FabricId(7));
        let (host, socket_name, address) = (String::new(), String::new(), listener.local_addr().ok());
        let pid = std::process::id();
        peer.set_whereabouts(crate::fabric::Whereabouts { host, pid, socket_name, near: false, address });
        fabric.dial(&peer);
        for _ in 0..TRIES_MAX {
            drop(listener.accept().unwrap());
        }
        let (mut dialled, _) = listener.accept().unwrap();
        dialled.set_read_timeout(Some(Duration::from_secs(40))).unwrap();
        dialled.read_exact(&mut [0; Hello::LEN]).expect("it says hello again");
        assert_eq!(peer.fate(), None);
        drop(dialled);
        let start = Instant::now();
        while peer.fate().is_none() {
            assert!(start.elapsed() < Duration::from_secs(40), "it is given up at last");
            std::thread::yield_now();
        }
        assert_eq!(peer.fate(), Some(&Fate::Died));
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
