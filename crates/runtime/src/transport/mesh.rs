//! The links of one rank in one group: shared memory to peers on this host, TCP to the others.
//!
//! A route to a peer is made when it is first needed. On one host that takes the peer's segment, which the fabric fetches
//! (see `fabric`); between hosts it takes a connection, which the sender opens and the receiver finds in the fabric.
//!
//! Bytes that a peer cannot reach where they are go through a slot, once for all readers; the slot is free again when the
//! last of them has read it. Nothing here waits or sleeps: what cannot go on is `Pending`, and the engine asks
//! [`Mesh::prepare_to_sleep`] what to sleep on.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use tenfold_memory::{
    Bytes, Doing, Head, INLINE, Lane, Lease, Link, Payload, PeerRoom, Room, SLOT, SLOTS_OWN, SLOTS_SHARED,
    Segment, Span, Wanted, before_looking, slots,
};
use tenfold_plan::Rank;

use crate::fabric::{Fabric, Fate, Peer};
use crate::fault::{ErrorKind, Fault};
use crate::label::{Label, is_same_call};
use crate::transport::tcp::{TcpIn, TcpOut, Unexpected};
use crate::transport::{Socket, Stage, Transport, Wants};
use crate::wire::{FabricId, Hello, Purpose};

/// From this size on, a slot that has just been read is worth looking for: it is still in the cache.
const REUSE_MIN: usize = 16 * 1024;

/// From this size on, bytes are staged past the caches where that is quicker: below, it took longer.
const STREAM_MIN: usize = 2048;

/// If no byte of a rank that has left arrives for this long, none will.
const STALLED: Duration = Duration::from_secs(2);

/// A rank that will never answer.
#[derive(Debug)]
pub(crate) struct Lost {
    pub fault: Fault,
    /// It left, and may have said why.
    pub has_left: bool,
}

/// A member of the group as its links need to know it.
#[derive(Clone, Debug)]
pub(crate) struct Member {
    /// Nothing for this rank itself.
    pub peer: Option<Arc<Peer>>,
    /// Shares memory with this rank.
    pub near: bool,
    /// Where its room for this group begins.
    pub room: usize,
}

#[derive(Debug)]
pub(crate) struct Mesh {
    rank: Rank,
    /// Names the group on the wire.
    group: u64,
    key: u32,
    fabric: Arc<Fabric>,
    members: Vec<Member>,
    room: Arc<Room>,
    routes: Vec<Route>,
    /// Peers on other hosts with bytes that their socket did not take yet.
    unwritten: Vec<Rank>,
    /// Staged bytes go past the caches, and nobody reads in place; see [`Fabric::lends`].
    streams: bool,
    slots: [Slots; 2],
    /// Peers that may sleep, and were sent something or had something taken since somebody looked.
    to_look_at: Vec<Rank>,
    /// Peers that were sent something which they may not have read yet, by lane.
    unread: [Vec<Rank>; 2],
    /// Peers that have slots of ours, by lane.
    holders: [Vec<Rank>; 2],
    /// A message that does not belong to the operation that read it: from whom, and what it is.
    pub(crate) stray: Option<(Rank, Head)>,
    /// A peer that took memory back which this rank was reading: its group has failed, and word of why is on its way.
    pub(crate) withdrawn: Option<Rank>,
    /// Peers whose flags in the records say that we sleep.
    sleeping_on: Vec<Rank>,
}

#[derive(Debug)]
enum Route {
    Unknown,
    Near(Box<Near>),
    Far(Box<Far>),
}

#[derive(Debug)]
struct Near {
    link: Link,
    peer: Arc<Peer>,
    /// Slots on their way, by lane: number of the message, slot.
    staged: [VecDeque<(u32, u16)>; 2],
    /// Number of the last message that points into memory of the caller, until it was read; by lane.
    lent: [Option<u32>; 2],
    /// The regions into which those messages point; by lane.
    leases: [Vec<Arc<Lease>>; 2],
}

#[derive(Debug, Default)]
struct Far {
    /// Whose connections are taken for its own.
    peer: Option<FabricId>,
    outgoing: [Option<TcpOut>; 2],
    incoming: [Option<TcpIn>; 2],
    /// Nothing more comes on that lane: sleeping on its socket would be no sleep.
    ended: [bool; 2],
    /// How many bytes had arrived at the last look that found more than before, and when that was.
    progress: Option<(u64, Instant)>,
}

/// Which staging slots are in use.
#[derive(Debug)]
struct Slots {
    first: u16,
    free: Vec<u16>,
    readers: Vec<u16>,
    open: Vec<bool>,
    /// Slots that each peer may always have, and that all of them may have together beyond those.
    quota: (usize, usize),
    /// Slots that peers have beyond their own.
    extra: usize,
}

impl Slots {
    fn new(first: usize, count: usize, quota: (usize, usize)) -> Self {
        let free = (first..first + count).rev().map(|slot| slot as u16).collect();
        let first = first as u16;
        Slots { first, free, readers: vec![0; count], open: vec![false; count], quota, extra: 0 }
    }

    /// May a peer that has `held` slots have another? A peer that reads nothing must leave some to the others.
    fn admits(&self, held: usize) -> bool {
        held < self.quota.0 || self.extra < self.quota.1
    }

    /// A peer that had `held` slots has another.
    fn lend_to(&mut self, held: usize, slot: u16) {
        self.extra += usize::from(held >= self.quota.0);
        self.readers[usize::from(slot - self.first)] += 1;
    }

    /// A peer has read a slot, and has `held` others.
    fn take_back(&mut self, held: usize, slot: u16) {
        self.extra -= usize::from(held >= self.quota.0);
        self.readers[usize::from(slot - self.first)] -= 1;
        self.free_if_unused(slot);
    }

    fn open(&mut self) -> Option<u16> {
        let slot = self.free.pop()?;
        self.open[usize::from(slot - self.first)] = true;
        Some(slot)
    }

    fn close(&mut self, slot: u16) {
        self.open[usize::from(slot - self.first)] = false;
        self.free_if_unused(slot);
    }

    fn free_if_unused(&mut self, slot: u16) {
        let index = usize::from(slot - self.first);
        if self.readers[index] == 0 && !self.open[index] {
            self.free.push(slot);
        }
    }
}

impl Near {
    /// Gives back the slots that the peer has read; true if it has others.
    fn reap(&mut self, lane: Lane, slots: &mut Slots) -> bool {
        let staged = &mut self.staged[lane as usize];
        let outbox = self.link.outbox(lane);
        let (read, sent) = (outbox.read(), outbox.sent());
        while let Some(&(number, slot)) = staged.front()
            && sent.wrapping_sub(number) >= sent.wrapping_sub(read)
        {
            staged.pop_front();
            slots.take_back(staged.len(), slot);
        }
        !staged.is_empty()
    }

    /// Where the peer can read `bytes` in place, if it can; what they lie in stays there until they were read.
    #[inline]
    fn place_of(&mut self, lane: Lane, bytes: Bytes<'_>, segment: &Segment) -> Option<usize> {
        if let Some(place) = segment.offset_of(bytes) {
            return Some(place);
        }
        let (place, lease) = segment.offset_in_region(bytes)?;
        // One that was given up when the region was made known may not have it.
        if self.peer.fate().is_some() {
            return None;
        }
        let leases = &mut self.leases[lane as usize];
        if !leases.iter().any(|held| Arc::ptr_eq(held, &lease)) {
            leases.push(lease);
        }
        Some(place)
    }
}

impl Mesh {
    pub(crate) fn new(
        rank: Rank,
        group: u64,
        fabric: Arc<Fabric>,
        room: Arc<Room>,
        members: Vec<Member>,
    ) -> Self {
        let [collective, messages] = slots(members.len());
        let streams = !fabric.lends();
        Mesh {
            rank,
            group,
            key: room.key(),
            fabric,
            routes: members.iter().map(|_| Route::Unknown).collect(),
            members,
            room,
            unwritten: Vec::new(),
            streams,
            to_look_at: Vec::new(),
            slots: [
                Slots::new(0, collective, (usize::MAX, 0)),
                Slots::new(collective, messages, (SLOTS_OWN, SLOTS_SHARED)),
            ],
            unread: [Vec::new(), Vec::new()],
            holders: [Vec::new(), Vec::new()],
            stray: None,
            withdrawn: None,
            sleeping_on: Vec::new(),
        }
    }

    /// This mesh as the carrier of one lane.
    #[inline]
    pub(crate) fn lane(&mut self, lane: Lane) -> OnLane<'_> {
        OnLane { mesh: self, lane }
    }

    pub(crate) fn members(&self) -> &[Member] {
        &self.members
    }

    #[cfg(test)]
    pub(crate) fn room(&self) -> Arc<Room> {
        Arc::clone(&self.room)
    }

    pub(crate) fn show(&self, doing: &Doing) {
        self.room.show(doing);
    }

    /// What `peer` does and what it finished last, as far as it can be seen.
    pub(crate) fn doing(&self, peer: Rank) -> Option<Doing> {
        if let Route::Near(near) = &self.routes[peer] {
            return near.link.theirs().doing();
        }
        let member = &self.members[peer];
        let known = member.peer.as_ref()?;
        // A thread of this process sends no pulses, even if its messages go by TCP: its board can be seen.
        let board = || PeerRoom::new(known.segment()?, member.room, self.members.len(), self.key)?.doing();
        known.doing(self.group).or_else(board)
    }

    /// Makes sure that there is a route, or that one is being made.
    fn connect(&mut self, to: Rank) -> Result<(), Fault> {
        if !matches!(self.routes[to], Route::Unknown) {
            return Ok(());
        }
        let member = &self.members[to];
        let Some(peer) = &member.peer else {
            return Err(Fault::argument(format!("rank {to} is this rank itself")).peer(to));
        };
        if !member.near {
            // Also watches over the peer's life.
            self.fabric.dial(peer);
            self.routes[to] = Route::Far(Box::new(Far { peer: Some(peer.id()), ..Far::default() }));
            return Ok(());
        }
        let Some(segment) = peer.segment() else {
            self.fabric.dial(peer);
            return Ok(());
        };
        let damaged =
            || Fault::new(ErrorKind::Protocol, format!("rank {to} has no room where it said")).peer(to);
        let theirs = PeerRoom::new(segment, member.room, self.members.len(), self.key).ok_or_else(damaged)?;
        let link = Link::new(&self.room, to, theirs, self.rank).ok_or_else(damaged)?;
        let near = Near {
            link,
            peer: Arc::clone(peer),
            staged: Default::default(),
            lent: [None; 2],
            leases: Default::default(),
        };
        self.routes[to] = Route::Near(Box::new(near));
        Ok(())
    }

    fn poll_send(
        &mut self,
        lane: Lane,
        to: Rank,
        stage: &mut Option<Stage>,
        head: &Head,
        bytes: Bytes<'_>,
        lend: bool,
    ) -> Result<Poll<()>, Fault> {
        if matches!(self.routes[to], Route::Unknown) {
            self.connect(to)?;
        }
        match &mut self.routes[to] {
            Route::Unknown => return Ok(Poll::Pending),
            Route::Near(_) => {
                if self.post(lane, to, stage, head, bytes, lend)?.is_pending() {
                    return Ok(Poll::Pending);
                }
            }
            Route::Far(far) => {
                let outgoing = match &mut far.outgoing[lane as usize] {
                    Some(outgoing) => outgoing,
                    none => {
                        let member = &self.members[to];
                        let peer = member.peer.as_ref().expect("there is a route to it");
                        let hello = hello(&self.fabric, self.group, self.rank, to, lane, peer);
                        none.insert(open(&self.fabric, peer, to, &hello)?)
                    }
                };
                let sent = outgoing.poll_send(head, bytes, lend).map_err(|error| lost(to, &error))?;
                if !outgoing.is_idle() && !self.unwritten.contains(&to) {
                    self.unwritten.push(to);
                }
                if sent.is_pending() {
                    return Ok(Poll::Pending);
                }
            }
        }
        let unread = &mut self.unread[lane as usize];
        if unread.last() != Some(&to) && !unread.contains(&to) {
            unread.push(to);
        }
        Ok(Poll::Ready(()))
    }

    /// Puts a message into the mailbox for a peer on this host.
    #[inline]
    fn post(
        &mut self,
        lane: Lane,
        to: Rank,
        stage: &mut Option<Stage>,
        head: &Head,
        bytes: Bytes<'_>,
        lend: bool,
    ) -> Result<Poll<()>, Fault> {
        let Route::Near(near) = &mut self.routes[to] else { unreachable!("the caller looked") };
        if !near.link.outbox(lane).has_room() {
            return Ok(Poll::Pending);
        }
        if bytes.len() <= INLINE {
            let mut copy = [0; INLINE];
            let copy = &mut copy[..bytes.len()];
            Span::of(copy).copy_from(bytes);
            near.link.outbox(lane).post(head, Payload::Inline(copy));
        } else if lend
            && !self.streams
            && let Some(place) = near.place_of(lane, bytes, self.room.segment())
        {
            let payload = Payload::At { place: place as u64, len: bytes.len() as u64 };
            near.link.outbox(lane).post(head, payload);
            near.lent[lane as usize] = Some(near.link.outbox(lane).sent());
        } else {
            let slot = match stage {
                Some(Stage(slot)) => *slot,
                None => match self.stage(lane, to, bytes) {
                    Some(slot) => {
                        *stage = Some(Stage(slot));
                        slot
                    }
                    None => return Ok(Poll::Pending),
                },
            };
            let Route::Near(near) = &mut self.routes[to] else { unreachable!("as above") };
            let payload =
                Payload::At { place: self.room.slot_place(usize::from(slot)), len: bytes.len() as u64 };
            near.link.outbox(lane).post(head, payload);
            let number = near.link.outbox(lane).sent();
            if near.staged[lane as usize].is_empty() && !self.holders[lane as usize].contains(&to) {
                self.holders[lane as usize].push(to);
            }
            self.slots[lane as usize].lend_to(near.staged[lane as usize].len(), slot);
            near.staged[lane as usize].push_back((number, slot));
        }
        self.look_later(to);
        Ok(Poll::Ready(()))
    }

    #[inline]
    fn look_later(&mut self, peer: Rank) {
        if self.to_look_at.last() != Some(&peer) && !self.to_look_at.contains(&peer) {
            self.to_look_at.push(peer);
        }
    }

    /// Wakes the peers on this host that sleep until they hear from us. Whoever polls this mesh must call it afterwards.
    #[inline]
    pub(crate) fn wake_sleepers(&mut self) {
        if self.to_look_at.is_empty() {
            return;
        }
        before_looking();
        for peer in self.to_look_at.drain(..) {
            if let Route::Near(near) = &self.routes[peer]
                && near.link.peer_sleeps()
            {
                near.peer.ring();
            }
        }
    }

    /// Slots that `peer` has.
    fn held(&self, lane: Lane, peer: Rank) -> usize {
        match &self.routes[peer] {
            Route::Near(near) => near.staged[lane as usize].len(),
            _ => 0,
        }
    }

    /// Copies bytes into a free slot, if there is one for `to`.
    fn stage(&mut self, lane: Lane, to: Rank, bytes: Bytes<'_>) -> Option<u16> {
        let is_short = |mesh: &Mesh| {
            let slots = &mesh.slots[lane as usize];
            slots.free.is_empty() || !slots.admits(mesh.held(lane, to))
        };
        if bytes.len() >= REUSE_MIN || is_short(self) {
            let slots = &mut self.slots[lane as usize];
            let routes = &mut self.routes;
            self.holders[lane as usize].retain(|peer| match &mut routes[*peer] {
                Route::Near(near) => near.reap(lane, slots),
                _ => false,
            });
        }
        if is_short(self) {
            return None;
        }
        let slot = self.slots[lane as usize].open()?;
        assert!(bytes.len() <= SLOT, "a piece fits a slot");
        let target = self.room.slot(usize::from(slot)).part(0, bytes.len());
        if self.streams && bytes.len() >= STREAM_MIN {
            target.stream_from(bytes);
        } else {
            target.copy_from(bytes);
        }
        Some(slot)
    }

    fn close(&mut self, lane: Lane, stage: Option<Stage>) {
        if let Some(Stage(slot)) = stage {
            self.slots[lane as usize].close(slot);
        }
    }

    /// The next message of `from`, if it is here: what it is and how long.
    pub(crate) fn poll_any(&mut self, lane: Lane, from: Rank) -> Result<Poll<(Head, usize)>, Fault> {
        if matches!(self.routes[from], Route::Unknown) {
            self.connect(from)?;
        }
        match &mut self.routes[from] {
            Route::Unknown => Ok(Poll::Pending),
            Route::Near(near) => match near.link.peek(lane) {
                None => Ok(Poll::Pending),
                Some((head, Some(bytes))) => Ok(Poll::Ready((head, bytes.len()))),
                Some((_, None)) => Err(damaged(from)),
            },
            Route::Far(far) => match accepted(&self.fabric, far, self.group, from, lane)? {
                None => Ok(Poll::Pending),
                Some(incoming) => {
                    let polled = incoming.poll_message();
                    far.ended[lane as usize] |= polled.is_err();
                    polled.map_err(|error| lost(from, &error))
                }
            },
        }
    }

    fn poll_ready(&mut self, lane: Lane, from: Rank, head: &Head, len: usize) -> Result<Poll<()>, Fault> {
        match self.poll_any(lane, from)? {
            Poll::Pending => Ok(Poll::Pending),
            Poll::Ready((theirs, their_len)) if is_same_call(&theirs, head) && their_len == len => {
                Ok(Poll::Ready(()))
            }
            Poll::Ready((theirs, their_len)) => Err(self.unexpected(from, theirs, their_len, head, len)),
        }
    }

    /// A message that is not the one that should come now.
    #[cold]
    fn unexpected(&mut self, from: Rank, theirs: Head, their_len: usize, head: &Head, len: usize) -> Fault {
        if !is_same_call(&theirs, head) {
            self.stray = Some((from, theirs));
            return Fault::new(ErrorKind::Mismatch, format!("rank {from} called something else")).peer(from);
        }
        let what = Label::from_head(head).map_or_else(String::new, |label| format!(" of {label}"));
        let message = format!("rank {from} sent {their_len} bytes{what} where {len} were expected");
        let hint = "the splits of all_to_all must agree: what one rank sends is what the other receives";
        Fault::new(ErrorKind::Mismatch, message).peer(from).hint(hint)
    }

    fn peek(&self, lane: Lane, from: Rank) -> Bytes<'_> {
        let bytes = match &self.routes[from] {
            Route::Near(near) => near.link.peek(lane).and_then(|(_, bytes)| bytes),
            Route::Far(far) => far.incoming[lane as usize].as_ref().map(TcpIn::bytes),
            Route::Unknown => None,
        };
        bytes.expect("the message was ready, and stays until it is taken")
    }

    fn take(&mut self, lane: Lane, from: Rank) -> Result<(), Fault> {
        match &mut self.routes[from] {
            Route::Near(near) => {
                if !near.link.take(lane) {
                    self.withdrawn = Some(from);
                    return Err(withdrawn(from));
                }
                self.look_later(from);
            }
            Route::Far(far) => {
                if let Some(incoming) = &mut far.incoming[lane as usize] {
                    incoming.take();
                }
            }
            Route::Unknown => unreachable!("the message was ready"),
        }
        Ok(())
    }

    /// Memory that peers were lent is the caller's again, whether they have read it or not.
    pub(crate) fn withdraw(&self) {
        self.room.withdraw();
    }

    fn poll_recv(
        &mut self,
        lane: Lane,
        from: Rank,
        head: &Head,
        target: Span<'_>,
    ) -> Result<Poll<()>, Fault> {
        if let Route::Far(far) = &mut self.routes[from] {
            let Some(incoming) = accepted(&self.fabric, far, self.group, from, lane)? else {
                return Ok(Poll::Pending);
            };
            return match incoming.poll_recv(head, target) {
                Ok(poll) => Ok(poll),
                Err(Unexpected::Io(error)) => {
                    far.ended[lane as usize] = true;
                    Err(lost(from, &error))
                }
                Err(Unexpected::Other { head: theirs, len }) => {
                    Err(self.unexpected(from, theirs, len, head, target.len()))
                }
            };
        }
        if self.poll_ready(lane, from, head, target.len())?.is_pending() {
            return Ok(Poll::Pending);
        }
        target.copy_from(self.peek(lane, from));
        self.take(lane, from)?;
        Ok(Poll::Ready(()))
    }

    fn poll_flush(&mut self, lane: Lane, all: bool) -> Result<Poll<()>, Fault> {
        let mut waiting = Poll::Ready(());
        let mut index = 0;
        while let Some(&peer) = self.unread[lane as usize].get(index) {
            if self.poll_flush_of(lane, peer, all)?.is_pending() {
                waiting = Poll::Pending;
                index += 1;
            } else {
                self.unread[lane as usize].swap_remove(index);
            }
        }
        Ok(waiting)
    }

    pub(crate) fn poll_flush_of(&mut self, lane: Lane, peer: Rank, all: bool) -> Result<Poll<()>, Fault> {
        match &mut self.routes[peer] {
            Route::Unknown => Ok(Poll::Ready(())),
            Route::Near(near) => {
                let lent = near.lent[lane as usize];
                let outbox = near.link.outbox(lane);
                let sent = outbox.sent();
                let until = if all { Some(sent) } else { lent };
                let is_read =
                    until.is_none_or(|until| sent.wrapping_sub(until) >= sent.wrapping_sub(outbox.read()));
                // A peer that left the group reads nothing any more, and took its counts with it.
                if is_read || !near.link.theirs().is_open() {
                    if near.lent[lane as usize].take().is_some() {
                        near.leases[lane as usize].clear();
                    }
                    Ok(Poll::Ready(()))
                } else {
                    Ok(Poll::Pending)
                }
            }
            Route::Far(far) => match &mut far.outgoing[lane as usize] {
                None => Ok(Poll::Ready(())),
                Some(outgoing) => outgoing.poll_flush().map_err(|error| lost(peer, &error)),
            },
        }
    }

    /// Writes out what sockets did not take at once.
    #[inline]
    pub(crate) fn pump(&mut self) -> Result<(), Fault> {
        if self.unwritten.is_empty() { Ok(()) } else { self.pump_far() }
    }

    fn pump_far(&mut self) -> Result<(), Fault> {
        let mut index = 0;
        while let Some(&peer) = self.unwritten.get(index) {
            let mut is_idle = true;
            if let Route::Far(far) = &mut self.routes[peer] {
                for outgoing in far.outgoing.iter_mut().flatten().filter(|outgoing| !outgoing.is_idle()) {
                    let _ = outgoing.poll_flush().map_err(|error| lost(peer, &error))?;
                    is_idle &= outgoing.is_idle();
                }
            }
            if is_idle {
                self.unwritten.swap_remove(index);
            } else {
                index += 1;
            }
        }
        Ok(())
    }

    /// Peers that were sent something in a collective which they may not have read yet.
    pub(crate) fn unread(&self) -> &[Rank] {
        &self.unread[Lane::Collective as usize]
    }

    /// Somebody among those that are waited for who will never answer, with the reason.
    pub(crate) fn lost_among(&mut self, wants: &Wants, now: Instant) -> Option<Lost> {
        let flushed = if wants.flush { self.unread().to_vec() } else { Vec::new() };
        if let Some(lost) = wants.room.iter().chain(&flushed).find_map(|rank| self.gone(*rank)) {
            return Some(lost);
        }
        if let Some(lost) = wants.messages.iter().find_map(|rank| self.ended(*rank, now)) {
            return Some(lost);
        }
        // Of those who may all send, one is enough.
        let mut reasons = wants.any_of.iter().map(|rank| self.ended(*rank, now));
        let first = reasons.next()??;
        reasons.all(|reason| reason.is_some()).then(|| {
            let message = format!("every rank that could send is gone; {}", first.fault.message);
            Lost { fault: Fault { message, ..first.fault }, ..first }
        })
    }

    fn gone(&self, rank: Rank) -> Option<Lost> {
        let peer = self.members[rank].peer.as_ref()?;
        let (fate, since) = peer.fate_and_age()?;
        // What another host sent before may still be on its way, on another connection than the news of its end.
        let settled = self.members[rank].near || since >= fate.grace();
        settled.then(|| Lost { fault: fate.fault(rank, peer), has_left: *fate == Fate::Left })
    }

    /// Is `rank` gone, with nothing left of it that may still arrive?
    fn ended(&mut self, rank: Rank, now: Instant) -> Option<Lost> {
        let lost = self.gone(rank)?;
        (!self.is_arriving(rank, now)).then_some(lost)
    }

    /// Do bytes of a rank that has left or died still arrive? As long as they do, the end of its data link is the truth: the
    /// kernel sends what a process wrote before its end, however long that takes.
    pub(crate) fn is_arriving(&mut self, rank: Rank, now: Instant) -> bool {
        let Some(peer) = &self.members[rank].peer else { return false };
        if matches!(peer.fate(), Some(Fate::Silent(_) | Fate::Unreachable(_))) {
            return false;
        }
        let Route::Far(far) = &mut self.routes[rank] else { return false };
        let open = far.incoming.iter().zip(far.ended).filter(|(_, ended)| !ended);
        let mut open = open.filter_map(|(incoming, _)| incoming.as_ref()).peekable();
        if open.peek().is_none() {
            return false;
        }
        let arrived = open.map(TcpIn::arrived).sum();
        match far.progress {
            Some((before, at)) if before == arrived => now.saturating_duration_since(at) < STALLED,
            _ => {
                far.progress = Some((arrived, now));
                true
            }
        }
    }

    /// Looks for messages that the operation under way, called `head`, will never read: somebody called something else.
    pub(crate) fn find_stray(&mut self, head: &Head) -> Option<(Rank, Head)> {
        for rank in 0..self.routes.len() {
            let theirs = match &mut self.routes[rank] {
                Route::Unknown => continue,
                Route::Near(near) => near.link.peek(Lane::Collective).map(|(head, _)| head),
                Route::Far(far) => match accepted(&self.fabric, far, self.group, rank, Lane::Collective) {
                    Ok(Some(incoming)) => match incoming.peek_head() {
                        Ok(Poll::Ready((head, _))) => Some(head),
                        _ => None,
                    },
                    _ => None,
                },
            };
            if let Some(theirs) = theirs
                && theirs[1] <= head[1]
                && !is_same_call(&theirs, head)
            {
                return Some((rank, theirs));
            }
            // Nobody sends if everybody waits for another root: then only the boards tell.
            if let Some(theirs) = self.doing(rank).map(|doing| doing.current)
                && theirs[1] == head[1]
                && !is_same_call(&theirs, head)
            {
                return Some((rank, theirs));
            }
        }
        None
    }

    /// Tells the peers that are waited for that this rank sleeps, and lists the sockets to sleep on, with whether to write.
    pub(crate) fn prepare_to_sleep(&mut self, wants: &Wants, sockets: &mut Vec<(Socket, bool)>) {
        let none: &[Rank] = &[];
        let flushed = if wants.flush { &self.unread[0] } else { none };
        // A free slot may be what is missing, and anybody who has one may give it back.
        let [first, second] = &self.holders;
        let holders =
            if wants.room.is_empty() { none.iter().chain(none) } else { first.iter().chain(second) };
        let near =
            wants.messages.iter().chain(&wants.any_of).chain(&wants.room).chain(flushed).chain(holders);
        for &rank in near {
            if let Route::Near(near) = &self.routes[rank] {
                near.link.want(Wanted::ANYTHING);
                self.sleeping_on.push(rank);
            }
        }
        let room = distinct(wants.room.iter());
        for rank in distinct(self.unwritten.iter().chain(&room)) {
            let Route::Far(far) = &self.routes[rank] else { continue };
            // Of a message that is lent nothing may have been written yet.
            let is_wanted = room.binary_search(&rank).is_ok();
            let writers = far.outgoing.iter().flatten().filter(|outgoing| is_wanted || !outgoing.is_idle());
            sockets.extend(writers.map(|outgoing| (outgoing.socket(), true)));
        }
        for rank in distinct(wants.messages.iter().chain(&wants.any_of)) {
            let Route::Far(far) = &self.routes[rank] else { continue };
            let open = far.incoming.iter().zip(far.ended).filter(|(_, ended)| !ended);
            sockets.extend(open.filter_map(|(incoming, _)| Some((incoming.as_ref()?.socket(), false))));
        }
    }

    /// This rank is awake again.
    pub(crate) fn wake_up(&mut self) {
        for rank in self.sleeping_on.drain(..) {
            if let Route::Near(near) = &self.routes[rank] {
                near.link.want(Wanted::NOTHING);
            }
        }
    }
}

/// Each rank once: many receives may wait for the same rank, and a socket that is slept on twice takes two places.
fn distinct<'a>(ranks: impl Iterator<Item = &'a Rank>) -> Vec<Rank> {
    let mut ranks: Vec<Rank> = ranks.copied().collect();
    ranks.sort_unstable();
    ranks.dedup();
    ranks
}

/// What a rank leaves behind in a group that it left: messages that not everybody has read.
#[derive(Debug)]
pub(crate) struct Remains {
    unread: Vec<Near>,
    /// Its memory goes back with the last message.
    _room: Arc<Room>,
}

impl Mesh {
    /// Nothing if everybody has read everything.
    pub(crate) fn into_remains(self) -> Option<Remains> {
        let near = self.routes.into_iter().filter_map(|route| match route {
            Route::Near(near) => Some(*near),
            _ => None,
        });
        let mut remains = Remains { unread: near.collect(), _room: self.room };
        (!remains.are_read()).then_some(remains)
    }
}

impl Remains {
    /// Can they go?
    pub(crate) fn are_read(&mut self) -> bool {
        self.unread.retain_mut(|near| {
            near.peer.fate().is_none() && near.link.theirs().is_open() && !near.link.is_read()
        });
        self.unread.is_empty()
    }
}

fn hello(fabric: &Fabric, group: u64, from: Rank, to: Rank, lane: Lane, peer: &Peer) -> Hello {
    let purpose = Purpose::Data { group, from: from as u32, to: to as u32, lane: lane as u8 };
    Hello { purpose, sender: fabric.id(), receiver: peer.id() }
}

fn open(fabric: &Fabric, peer: &Peer, rank: Rank, hello: &Hello) -> Result<TcpOut, Fault> {
    let address: SocketAddr = peer.address().ok_or_else(|| {
        Fault::new(ErrorKind::Connect, format!("rank {rank} ({peer}) has no TCP address")).peer(rank)
    })?;
    TcpOut::connect(address, fabric.interface(), hello).map_err(|error| {
        let reason = crate::network::explain(&error);
        Fault::new(ErrorKind::Connect, format!("cannot reach rank {rank} ({peer}) at {address}: {reason}"))
            .peer(rank)
    })
}

/// The connection on which `from` sends, once it is here.
fn accepted<'a>(
    fabric: &Fabric,
    far: &'a mut Far,
    group: u64,
    from: Rank,
    lane: Lane,
) -> Result<Option<&'a mut TcpIn>, Fault> {
    let incoming = &mut far.incoming[lane as usize];
    if incoming.is_none()
        && let Some(peer) = far.peer
        && let Some(stream) = fabric.claim(group, peer, from, lane)
    {
        *incoming = Some(TcpIn::new(stream, SLOT.max(TCP_PIECE)).map_err(|error| lost(from, &error))?);
    }
    Ok(incoming.as_mut())
}

/// Longest message on a TCP link.
pub(crate) const TCP_PIECE: usize = 512 * 1024;

#[cold]
fn lost(peer: Rank, error: &std::io::Error) -> Fault {
    // The fabric knows more about a peer that died than its broken connection does; see `Mesh::lost_among`.
    Fault::new(ErrorKind::PeerLost, format!("the connection with rank {peer} broke: {error}")).peer(peer)
}

#[cold]
fn withdrawn(peer: Rank) -> Fault {
    let message = format!("rank {peer} gave up the operation while its memory was read");
    Fault::new(ErrorKind::PeerLost, message).peer(peer)
}

#[cold]
fn damaged(peer: Rank) -> Fault {
    let message = format!("rank {peer} sent a message that points outside its memory");
    Fault::new(ErrorKind::Protocol, message).peer(peer)
}

/// One lane of a mesh.
pub(crate) struct OnLane<'a> {
    mesh: &'a mut Mesh,
    lane: Lane,
}

impl<'a> OnLane<'a> {
    /// The bytes of a message that is here, for as long as the mesh is not touched.
    pub(crate) fn peek_now(self, from: Rank) -> Bytes<'a> {
        self.mesh.peek(self.lane, from)
    }
}

impl Transport for OnLane<'_> {
    #[inline]
    fn poll_send(
        &mut self,
        to: Rank,
        stage: &mut Option<Stage>,
        head: &Head,
        bytes: Bytes<'_>,
        lend: bool,
    ) -> Result<Poll<()>, Fault> {
        self.mesh.poll_send(self.lane, to, stage, head, bytes, lend)
    }

    fn close(&mut self, stage: Option<Stage>) {
        self.mesh.close(self.lane, stage);
    }

    #[inline]
    fn poll_ready(&mut self, from: Rank, head: &Head, len: usize) -> Result<Poll<()>, Fault> {
        self.mesh.poll_ready(self.lane, from, head, len)
    }

    #[inline]
    fn peek(&self, from: Rank) -> Bytes<'_> {
        self.mesh.peek(self.lane, from)
    }

    #[inline]
    fn take(&mut self, from: Rank) -> Result<(), Fault> {
        self.mesh.take(self.lane, from)
    }

    #[inline]
    fn poll_recv(&mut self, from: Rank, head: &Head, target: Span<'_>) -> Result<Poll<()>, Fault> {
        self.mesh.poll_recv(self.lane, from, head, target)
    }

    #[inline]
    fn poll_flush(&mut self, all: bool) -> Result<Poll<()>, Fault> {
        self.mesh.poll_flush(self.lane, all)
    }
}

#[cfg(test)]
mod tests;
