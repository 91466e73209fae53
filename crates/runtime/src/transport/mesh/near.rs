//! A peer on this host: a mailbox in shared memory, slots for bytes that the peer cannot reach where they are, and what is left
//! of them when this rank leaves.

use std::collections::VecDeque;
use std::sync::Arc;
use std::task::Poll;

use tenfold_memory::{Bytes, Head, INLINE, Lane, Lease, Link, Payload, Room, SLOT, Segment, Span};
use tenfold_plan::Rank;

use super::{Mesh, Route};
use crate::fabric::Peer;
use crate::fault::{ErrorKind, Fault};
use crate::transport::Stage;

/// From this size on, a slot that has just been read is worth looking for: it is still in the cache.
const REUSE_MIN: usize = 16 * 1024;

/// From this size on, bytes are staged past the caches where that is quicker: below, it took longer.
const STREAM_MIN: usize = 2048;

#[derive(Debug)]
pub(super) struct Near {
    pub(super) link: Link,
    pub(super) peer: Arc<Peer>,
    /// Slots on their way, by lane: number of the message, slot.
    pub(super) staged: [VecDeque<(u32, u16)>; 2],
    /// Number of the last message that points into memory of the caller, until it was read; by lane.
    pub(super) lent: [Option<u32>; 2],
    /// The regions into which those messages point; by lane.
    pub(super) leases: [Vec<Arc<Lease>>; 2],
}

/// Which staging slots are in use.
#[derive(Debug)]
pub(super) struct Slots {
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
    pub(super) fn new(first: usize, count: usize, quota: (usize, usize)) -> Self {
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

    pub(super) fn close(&mut self, slot: u16) {
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
        // One that was given up when the region was made known, or that has joined later, may not have it.
        if self.peer.fate().is_some() {
            return None;
        }
        let leases = &mut self.leases[lane as usize];
        if !leases.iter().any(|held| Arc::ptr_eq(held, &lease)) {
            if !self.peer.knows_region(lease.offset()) {
                return None;
            }
            leases.push(lease);
        }
        Some(place)
    }
}

impl Mesh {
    /// Puts a message into the mailbox for a peer on this host.
    #[inline]
    pub(super) fn post(
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
}

/// What a rank leaves behind in a group that it left: messages that some peers have not read.
#[derive(Debug)]
pub(crate) struct Remains {
    unread: Vec<Near>,
    /// Its memory goes back with the last message.
    _room: Arc<Room>,
    /// How often they are still looked at, if the group had failed.
    looks_left: Option<u32>,
}

/// Where a group has failed, its ranks read on only until they hear of that. And they may all have left messages for each
/// other, so none must wait for another. That many ticks of the helper are seconds.
const LOOKS_MAX: u32 = 8;

impl Mesh {
    /// Returns `None` if all peers have read everything.
    pub(crate) fn into_remains(self, had_failed: bool) -> Option<Remains> {
        let near = self.routes.into_iter().filter_map(|route| match route {
            Route::Near(near) => Some(*near),
            _ => None,
        });
        let looks_left = had_failed.then_some(LOOKS_MAX);
        let mut remains = Remains { unread: near.collect(), _room: self.room, looks_left };
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

    /// The same for the helper thread, which looks again and again.
    pub(crate) fn are_over(&mut self) -> bool {
        if let Some(left) = &mut self.looks_left {
            *left = left.saturating_sub(1);
        }
        self.looks_left == Some(0) || self.are_read()
    }
}

#[cold]
pub(super) fn withdrawn(peer: Rank) -> Fault {
    let message = format!("rank {peer} gave up the operation while its memory was read");
    Fault::new(ErrorKind::PeerLost, message).peer(peer)
}

#[cold]
pub(super) fn damaged(peer: Rank) -> Fault {
    let message = format!("rank {peer} sent a message that points outside its memory");
    Fault::new(ErrorKind::Protocol, message).peer(peer)
}
