//! The helper thread: lets peers in, watches over their lives, carries notices, maps the regions that peers make known,
//! and drives operations that no thread waits for.
//!
//! This rank has a stream, Unix or TCP, to every peer that it communicates with. The stream begins with a hello from
//! both sides (with descriptors, if it is Unix), then carries control frames. A stream that ends without a goodbye means that
//! the peer died. So does the end of its process, which is watched by a pidfd on one host: a child that the peer forked, such as
//! a worker that loads data, keeps copies of the streams, and they do not end before it does. A peer that is alive but
//! unresponsive is given up after the heartbeat's limit: on one host a counter in its segment must move, between
//! hosts one rank of each asks one of the other (see `beats`). If a peer does not answer, it is also asked on a new
//! connection: after packets were lost, TCP retransmits at ever longer intervals, so a stream may stay unresponsive for
//! twice as long as the network was.
//!
//! Here is the loop, and what streams carry; `watch/strangers.rs` lets peers in, `watch/lives.rs` watches over their lives,
//! `watch/questions.rs` asks and answers, and `watch/stream.rs` is one stream.

#![expect(clippy::disallowed_methods, reason = "owns the helper thread, and its clock")]

#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod hostile;
mod letters;
mod lives;
mod questions;
mod strangers;
mod stream;

use std::collections::{HashMap, VecDeque};
use std::io::{self, Read as _};
use std::net::TcpListener;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use rustix::buffer::spare_capacity;
use rustix::event::Timespec;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;
use tenfold_memory::NotInherited;

use super::beats::Beats;
use super::progress::Progress;
use super::regions::{Announced, Announcement, Answer};
use super::{Fabric, Fate, Order, Peer, lock};
use crate::network::explain;
use crate::wire::{ControlFrame, FabricId, Hello, Purpose, RAILS_MAX};
use lives::Pulse;
use strangers::Complaints;
use stream::{Io, Stream, connect, connect_near, receive_descriptors};

const WAKER: u64 = 0;
const UNIX: u64 = 1;
const ALARM: u64 = 2;
/// One for each rail.
const TCP: u64 = 3;
const FIRST_STREAM: u64 = TCP + RAILS_MAX as u64;

/// Events that one call fetches, at most.
const EVENTS: usize = 256;

/// Between two looks at the peers, at most.
const TICK: Duration = Duration::from_millis(500);

/// Reads from one stream, of up to 16 KiB each, before beats and other streams have their turn again.
const READS: usize = 64;

/// Bytes of answers that a peer may leave unread.
const ANSWERS_MAX: usize = 1 << 20;

/// After how long a peer is dialled again that has no room for another caller.
const DIAL_REST: Duration = Duration::from_millis(10);

/// How often a peer is dialled again that closes before it says hello.
const TRIES_MAX: u32 = 5;

pub(super) fn start(
    fabric: Arc<Fabric>,
    unix: UnixListener,
    tcp: Vec<TcpListener>,
) -> io::Result<JoinHandle<()>> {
    let mut watch = prepare(fabric, unix, tcp)?;
    Builder::new().name("tenfold".to_string()).spawn(move || watch.run())
}

/// What the helper thread works with.
fn prepare(fabric: Arc<Fabric>, unix: UnixListener, tcp: Vec<TcpListener>) -> io::Result<Watch> {
    let poll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    unix.set_nonblocking(true)?;
    epoll::add(&poll, &fabric.waker, EventData::new_u64(WAKER), EventFlags::IN)?;
    epoll::add(&poll, &fabric.alarm, EventData::new_u64(ALARM), EventFlags::IN)?;
    epoll::add(&poll, &unix, EventData::new_u64(UNIX), EventFlags::IN)?;
    for (token, tcp) in (TCP..).zip(&tcp) {
        tcp.set_nonblocking(true)?;
        epoll::add(&poll, tcp, EventData::new_u64(token), EventFlags::IN)?;
    }
    let now = Instant::now();
    let stuck = fabric.options.stuck.after.map_or(TICK, |after| after / 2);
    let tick = TICK.min(fabric.options.heartbeat / 16).min(stuck).max(Duration::from_millis(10));
    let progress = fabric.options.progress.as_deref().map(|folder| Progress::new(folder, fabric.id));
    let beats = Beats::new(fabric.id.mark(), tick, fabric.options.heartbeat);
    Ok(Watch {
        fabric,
        poll,
        unix: unix.into(),
        tcp: tcp.into_iter().map(NotInherited::from).collect(),
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
        beats,
        near: Vec::new(),
        informed: HashMap::new(),
        doings: HashMap::new(),
        next_wanted: 0,
        processes: HashMap::new(),
        progress,
        has_letters: false,
        deliberate_at: None,
        tick,
        next_tick: now + tick,
    })
}

/// What became of a stream after something was read.
enum After {
    Keep,
    /// There is more to read.
    Again,
    Close(Fate),
    /// It has done what it was for.
    Drop,
    /// It is a line: it goes to the groups.
    HandOver(Hello),
}

struct Watch {
    fabric: Arc<Fabric>,
    poll: OwnedFd,
    unix: NotInherited<UnixListener>,
    /// By rail.
    tcp: Vec<NotInherited<TcpListener>>,
    /// No caller is accepted before this time.
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
    /// Peers on other hosts, and which of them to ask.
    beats: Beats,
    /// Peers of this host, as of the last tick.
    near: Vec<Arc<Peer>>,
    /// Peers of this host that know which ranks this one hears; false if they missed something of it.
    informed: HashMap<FabricId, bool>,
    /// Peers on other hosts that have said what they do, and when.
    doings: HashMap<FabricId, (Arc<Peer>, Instant)>,
    /// Which peer to ask first what it does, if this rank waits for many.
    next_wanted: usize,
    /// Processes of peers on this host, by token.
    processes: HashMap<u64, (Arc<Peer>, OwnedFd)>,
    progress: Option<Progress>,
    /// Councils may have something to do.
    has_letters: bool,
    /// When they have, at the latest.
    deliberate_at: Option<Instant>,
    tick: Duration,
    next_tick: Instant,
}

impl Watch {
    fn run(&mut self) {
        crate::work::callbacks_go_elsewhere();
        let mut events = Vec::with_capacity(EVENTS);
        loop {
            let pauses = [self.resting_until, self.dial_at, self.deliberate_at].into_iter().flatten();
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
                    ALARM => self.fabric.silence_alarm(),
                    UNIX => self.accept_unix(),
                    token @ TCP..FIRST_STREAM => self.accept_tcp((token - TCP) as usize),
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
                    Order::Send(post) => self.send(post),
                    Order::Hear { from, frame } => self.hear_letter(from, &frame),
                    Order::Deliberate => self.has_letters = true,
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
            if self.deliberate_at.is_some_and(|at| now >= at) {
                self.deliberate_at = None;
                self.has_letters = true;
            }
            self.deliberate();
        }
    }

    fn stop(&mut self) {
        for stream in self.streams.values_mut().filter(|stream| stream.peer.is_some()) {
            ControlFrame::Goodbye.encode(&mut stream.to_write);
            let _ = stream.write(); // a peer that does not read it sees the end of the stream
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
            answers: 0,
        };
        // Edge-triggered, so each event is served by reading and writing until the system would block.
        let flags = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
        if let Err(error) = epoll::add(&self.poll, stream.io.fd(), EventData::new_u64(token), flags) {
            tracing::warn!("cannot watch a stream: {error}");
            return token;
        }
        self.streams.insert(token, stream);
        token
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
            // The peer was listening there a moment ago, and no process listens there now: the peer has died.
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => self.end(peer, Fate::Died),
            // As many callers wait there as may. This thread must not wait, too: it lets in those who call this rank.
            Err(error) if peer.is_near() && error.kind() == io::ErrorKind::WouldBlock => {
                self.dial_later(peer);
            }
            Err(error) => self.end(peer, Fate::Unreachable(explain(&error))),
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
        if stream.io.is_unix() {
            self.forget_near(peer.id());
        }
        let goes_on = |other: &Stream| other.greeted() && other.is_of(peer.id());
        if peer.is_thread() || self.streams.values().any(goes_on) {
            return tracing::debug!("a stream of {peer} ended, and another goes on");
        }
        self.end(&Arc::clone(peer), fate);
    }

    /// Reads what there is, and not for long. Only the hello of a line is read to its end and not further.
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
            if let Some(peer) = stream.peer.as_ref().filter(|_| !stream.io.is_unix()) {
                self.beats.hear(peer.id().mark(), Instant::now());
            }
            if !stream.greeted() {
                let hello = Hello::decode(&stream.arrived, self.fabric.id).map_err(io::Error::other)?;
                let Some(hello) = hello else { continue };
                stream.arrived.clear();
                match (hello.purpose, &stream.probe) {
                    (Purpose::Probe, _) => return self.respond(stream, &hello),
                    (_, Some(_)) => return Err(io::Error::other("a probe was answered by something else")),
                    (Purpose::Line { .. }, None) => return Ok(After::HandOver(hello)),
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
                ControlFrame::Letter { .. } | ControlFrame::Room { .. } | ControlFrame::Reshape { .. } => {
                    if let Some(from) = stream.peer.as_ref().map(|peer| peer.id()) {
                        self.hear_letter(from, &frame);
                    }
                }
                ControlFrame::Pulse { groups } => self.hear_doing(stream, &groups),
                ControlFrame::Want => self.answer_want(stream)?,
                ControlFrame::Ask { company } => self.answer_ask(stream, &company)?,
                ControlFrame::Beat { company } => self.hear_company(stream, &company)?,
                ControlFrame::Hears { afresh, marks } => self.hear_hears(stream, afresh, marks)?,
                ControlFrame::Misses { seen } => self.hear_misses(stream, &seen)?,
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
        for token in self.told_streams(to.iter().map(|peer| peer.id())) {
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

    /// On which streams to tell these peers something, if there are any. If both have dialled there are two. All notices and
    /// letters go by the same one, so that they are heard in order.
    fn told_streams(&self, to: impl Iterator<Item = FabricId>) -> Vec<u64> {
        let mut chosen: HashMap<FabricId, (bool, bool, u64)> =
            to.map(|id| (id, (true, true, u64::MAX))).collect();
        for (token, stream) in &self.streams {
            let best = stream.peer.as_ref().and_then(|peer| chosen.get_mut(&peer.id()));
            if let Some(best) = best {
                *best = (*best).min((!stream.has_told, !stream.greeted(), *token));
            }
        }
        chosen.into_values().map(|(_, _, token)| token).filter(|token| *token != u64::MAX).collect()
    }

    fn told_stream(&self, to: FabricId) -> Option<u64> {
        self.told_streams(std::iter::once(to)).pop()
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
        self.forget_near(peer.id());
        self.processes.retain(|_, (other, process)| {
            let stays = other.id() != peer.id();
            if !stays {
                let _ = epoll::delete(&self.poll, process); // the end of its process adds nothing now
            }
            stays
        });
        if peer.end(fate) {
            self.fabric.tell_news();
            self.has_letters = true;
        }
    }
}

#[cfg(test)]
mod tests;
