//! The links of one rank in one group: shared memory to peers on this host, TCP to the others.
//!
//! A route to a peer is made when it is first needed. On one host that takes the peer's segment, which the fabric fetches
//! (see `fabric`); between hosts it takes a line, which all groups of both
//! processes share (see `line`).
//!
//! Bytes that a peer cannot reach where they are go through a slot, once for all readers; the slot is free again when the
//! last of them has read it. Nothing here waits or sleeps: what cannot go on is `Pending`, and the engine asks
//! [`Mesh::prepare_to_sleep`] what to sleep on.

mod far;
mod near;
mod waits;

use std::sync::Arc;
use std::task::Poll;

use tenfold_memory::{
    Bytes, Doing, Head, Lane, Link, PeerRoom, Room, SLOTS_OWN, SLOTS_SHARED, Span, before_looking, slots,
};
use tenfold_plan::Rank;

use crate::fabric::{Fabric, Peer};
use crate::fault::{ErrorKind, Fault};
use crate::group::directory::Directory;
use crate::label::{Label, is_same_call};
use crate::transport::line::{Message, Unexpected};
use crate::transport::{Stage, Transport};
use far::{Far, lost};
use near::{Near, Slots, damaged, withdrawn};

pub(crate) use near::Remains;

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
    /// Nothing for this rank itself, and for a rank of a large group that was not needed yet.
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
    /// Finds members that are not known yet.
    directory: Option<Arc<Directory>>,
    room: Arc<Room>,
    routes: Vec<Route>,
    /// Peers on other hosts with bytes that their socket did not take yet.
    unwritten: Vec<Rank>,
    /// Staged bytes go past the caches, and no peer reads in place; see [`Fabric::lends`].
    streams: bool,
    slots: [Slots; 2],
    /// Peers that may sleep, and to which this rank sent something, or from which it took something, since the last look.
    to_look_at: Vec<Rank>,
    /// Peers that were sent something which they may not have read yet, by lane.
    unread: [Vec<Rank>; 2],
    /// Peers that have slots of ours, by lane.
    holders: [Vec<Rank>; 2],
    /// A message that does not belong to the operation that read it: its sender, and what it is.
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
            directory: None,
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

    pub(crate) fn with_directory(self, directory: Option<Arc<Directory>>) -> Self {
        Mesh { directory, ..self }
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
        if self.members[to].peer.is_none() && !self.look_up(to)? {
            return Ok(());
        }
        let member = &self.members[to];
        let Some(peer) = &member.peer else {
            return Err(Fault::argument(format!("rank {to} is this rank itself")).peer(to));
        };
        if !member.near {
            // Also watches over the peer's life.
            self.fabric.dial(peer);
            self.routes[to] = Route::Far(Box::new(Far::new(&self.fabric, self.group, Arc::clone(peer))));
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

    /// Finds out how to reach `to`, a rank of a large group; false if that is not known yet.
    #[cold]
    fn look_up(&mut self, to: Rank) -> Result<bool, Fault> {
        let Some(directory) = self.directory.as_ref().filter(|_| to != self.rank) else { return Ok(true) };
        let Some(found) = directory.poll(&self.fabric, to)? else { return Ok(false) };
        self.members[to].peer = Some(found);
        Ok(true)
    }

    #[inline]
    fn look_later(&mut self, peer: Rank) {
        if self.to_look_at.last() != Some(&peer) && !self.to_look_at.contains(&peer) {
            self.to_look_at.push(peer);
        }
    }

    /// Wakes the peers on this host that sleep until they hear from us. Must be called after every
    /// poll of this mesh.
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
            Route::Far(far) => {
                let polled = far.poll_message(&self.fabric, lane);
                if far.owes_credit() {
                    self.write_later(from);
                }
                polled.map_err(|error| lost(from, &error))
            }
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

    /// Memory that peers were lent is the caller's again, whether they have read it or not.
    pub(crate) fn withdraw(&self) {
        self.room.withdraw();
        for route in &self.routes {
            if let Route::Far(far) = route {
                far.fail();
            }
        }
    }

    /// Bytes for `peer` wait until its socket takes them.
    #[inline]
    fn write_later(&mut self, peer: Rank) {
        if !self.unwritten.contains(&peer) {
            self.unwritten.push(peer);
        }
    }

    pub(crate) fn poll_flush_of(&mut self, lane: Lane, peer: Rank) -> Result<Poll<()>, Fault> {
        match &mut self.routes[peer] {
            Route::Unknown => Ok(Poll::Ready(())),
            Route::Near(near) => {
                let lent = near.lent[lane as usize];
                let outbox = near.link.outbox(lane);
                let sent = outbox.sent();
                let is_read =
                    lent.is_none_or(|until| sent.wrapping_sub(until) >= sent.wrapping_sub(outbox.read()));
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
            Route::Far(far) => far.poll_flush(lane).map_err(|error| lost(peer, &error)),
        }
    }

    /// Writes the bytes that sockets did not take immediately.
    #[inline]
    pub(crate) fn pump(&mut self) -> Result<(), Fault> {
        if self.unwritten.is_empty() { Ok(()) } else { self.pump_far() }
    }

    /// Peers that were sent something in a collective which they may not have read yet.
    pub(crate) fn unread(&self) -> &[Rank] {
        &self.unread[Lane::Collective as usize]
    }
}

impl Transport for Mesh {
    #[inline]
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
                let (sent, has_unwritten) = far.poll_send(&self.fabric, to, lane, head, bytes)?;
                if has_unwritten {
                    self.write_later(to);
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

    fn close(&mut self, lane: Lane, stage: Option<Stage>) {
        if let Some(Stage(slot)) = stage {
            self.slots[lane as usize].close(slot);
        }
    }

    #[inline]
    fn poll_ready(&mut self, lane: Lane, from: Rank, head: &Head, len: usize) -> Result<Poll<()>, Fault> {
        match self.poll_any(lane, from)? {
            Poll::Pending => Ok(Poll::Pending),
            Poll::Ready((theirs, their_len)) if is_same_call(&theirs, head) && their_len == len => {
                Ok(Poll::Ready(()))
            }
            Poll::Ready((theirs, their_len)) => Err(self.unexpected(from, theirs, their_len, head, len)),
        }
    }

    #[inline]
    fn peek(&self, lane: Lane, from: Rank) -> Bytes<'_> {
        let bytes = match &self.routes[from] {
            Route::Near(near) => near.link.peek(lane).and_then(|(_, bytes)| bytes),
            Route::Far(far) => far.here[lane as usize].as_ref().map(Message::bytes),
            Route::Unknown => None,
        };
        bytes.expect("the message was ready, and stays until it is taken")
    }

    #[inline]
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
                far.take(lane);
                if far.owes_credit() {
                    self.write_later(from);
                }
            }
            Route::Unknown => unreachable!("the message was ready"),
        }
        Ok(())
    }

    #[inline]
    fn poll_recv(
        &mut self,
        lane: Lane,
        from: Rank,
        head: &Head,
        target: Span<'_>,
    ) -> Result<Poll<()>, Fault> {
        if let Route::Far(far) = &mut self.routes[from] {
            let polled = far.poll_recv(&self.fabric, lane, head, target);
            if far.owes_credit() {
                self.write_later(from);
            }
            return match polled {
                Ok(poll) => Ok(poll),
                Err(Unexpected::Io(error)) => Err(lost(from, &error)),
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

    #[inline]
    fn poll_flush(&mut self, lane: Lane) -> Result<Poll<()>, Fault> {
        let mut waiting = Poll::Ready(());
        let mut index = 0;
        while let Some(&peer) = self.unread[lane as usize].get(index) {
            if self.poll_flush_of(lane, peer)?.is_pending() {
                waiting = Poll::Pending;
                index += 1;
            } else {
                self.unread[lane as usize].swap_remove(index);
            }
        }
        Ok(waiting)
    }
}

#[cfg(test)]
mod tests;
