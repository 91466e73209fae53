//! What a rank keeps in its segment for one group of peers.
//!
//! ```text
//! Room: a block of the owner's segment, read by everyone else in the group
//! ┌ board     what the owner is doing and what it finished last
//! ├ records   one page per place: messages to that peer, and what was read of its own (see `mailbox`)
//! └ slots     128 KiB each: staging for bytes that peers cannot reach where they are
//! ```
//!
//! Every page exists only once it is written, so that a room for 500 costs what the used records cost. When the owner
//! leaves, the room's memory goes back: a reader then sees zeroes where the room's key was.

use std::cell::{Cell, OnceCell};
use std::fmt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::mailbox::{Arrived, Head, Inbox, Lane, Outbox, Pair, Record, Wanted};
use crate::segment::PAGE;
use crate::{Block, Bytes, PeerRegion, PeerSegment, Segment, Span};

/// Bytes of a staging slot: small enough that it stays in a core's cache between writer and reader.
pub const SLOT: usize = 128 * 1024;

/// Point-to-point: slots that each peer may always have, so that a peer that does not read holds up no message to
/// another. Two, so that one is filled while the other is read.
pub const SLOTS_OWN: usize = 2;

/// Point-to-point: slots beyond those, for all peers together.
pub const SLOTS_SHARED: usize = 8;

/// Peers on one host at most: slots are numbered with 16 bits.
const NEAR_MAX: usize = 8192;

/// Staging slots of a room with `places`, by lane: how many pieces may be on their way before the first was read. For
/// collectives there are never fewer slots than peers: a step that combines pieces of all peers waits until each has sent
/// one.
pub fn slots(places: usize) -> [usize; 2] {
    [places.max(16), SLOTS_SHARED + SLOTS_OWN * places.min(NEAR_MAX)]
}

#[repr(C, align(4096))]
struct Board {
    key: AtomicU64,
    /// Not zero after the owner has taken back memory that it lent in place.
    withdrawn: AtomicU64,
    /// Odd while the words below are being written.
    version: AtomicU64,
    current: [AtomicU64; 3],
    finished: [AtomicU64; 3],
    since: [AtomicU64; 2],
}

const _: () = assert!(size_of::<Board>() == PAGE);

/// What a rank does, as peers can see it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Doing {
    /// The head of the operation under way, or of the last one.
    pub current: Head,
    /// The head of the operation that finished last.
    pub finished: Head,
    /// When the current one was begun, and the one before it, in nanoseconds by the host's monotonic clock; 0 if unknown.
    pub since: [u64; 2],
}

/// This rank's room.
pub struct Room {
    block: Block,
    key: u32,
    places: usize,
    /// Places that a link writes to.
    taken: Mutex<Vec<bool>>,
}

impl Room {
    /// Bytes of a room with `places`.
    pub fn len_for(places: usize) -> usize {
        PAGE * (1 + places) + SLOT * slots(places).iter().sum::<usize>()
    }

    /// Makes a room for links with `places` peers. All of them know it by `key`.
    pub fn new(segment: &Arc<Segment>, places: usize, key: u32) -> std::io::Result<Self> {
        let block = segment.allocate(Self::len_for(places))?;
        let room = Room { block, key, places, taken: Mutex::new(vec![false; places]) };
        room.board().withdrawn.store(0, Ordering::Relaxed);
        room.board().key.store(u64::from(key), Ordering::Release);
        Ok(room)
    }

    /// Memory that was lent in place goes back to its owner although peers may not have read it. What they read there from
    /// now on does not count, and they find out: see [`Link::take`]. Staged and short messages stay valid.
    pub fn withdraw(&self) {
        self.board().withdrawn.store(1, Ordering::Relaxed);
        fence(Ordering::Release); // a peer that sees what the owner writes next sees this, too
    }

    /// Where it begins, as peers see it.
    pub fn offset(&self) -> usize {
        self.block.offset()
    }

    /// The key by which peers know it.
    pub fn key(&self) -> u32 {
        self.key
    }

    /// Tells peers what this rank does now.
    #[inline]
    pub fn show(&self, doing: &Doing) {
        let board = self.board();
        let version = board.version.load(Ordering::Relaxed);
        board.version.store(version | 1, Ordering::Relaxed);
        fence(Ordering::Release);
        for (word, value) in board.current.iter().zip(doing.current) {
            word.store(value, Ordering::Relaxed);
        }
        for (word, value) in board.finished.iter().zip(doing.finished) {
            word.store(value, Ordering::Relaxed);
        }
        for (word, value) in board.since.iter().zip(doing.since) {
            word.store(value, Ordering::Relaxed);
        }
        board.version.store((version | 1).wrapping_add(1), Ordering::Release);
    }

    /// Memory of slot `index`.
    #[inline]
    pub fn slot(&self, index: usize) -> Span<'_> {
        let from = PAGE * (1 + self.places) + SLOT * index;
        self.block.span(from, from + SLOT)
    }

    /// Where slot `index` begins, as peers see it.
    #[inline]
    pub fn slot_place(&self, index: usize) -> u64 {
        (self.block.offset() + PAGE * (1 + self.places) + SLOT * index) as u64
    }

    /// Everything that peers see of it: for tests that play a rank whose memory is damaged.
    #[doc(hidden)]
    pub fn bytes_of_room(&self) -> Span<'_> {
        self.block.span(0, Self::len_for(self.places))
    }

    /// The segment that it is in.
    pub fn segment(&self) -> &Arc<Segment> {
        self.block.segment()
    }

    fn taken(&self) -> MutexGuard<'_, Vec<bool>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn board(&self) -> &Board {
        // SAFETY: the first page of the block, which lives as long as `self`; any bytes are a value of these atomics.
        unsafe { self.block.start().cast().as_ref() }
    }

    fn record(&self, place: usize) -> NonNull<Record> {
        assert!(place < self.places, "place {place} of {}", self.places);
        // SAFETY: `len_for` counted this page.
        unsafe { self.block.start().add(PAGE * (1 + place)).cast() }
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        if !self.segment().is_abandoned() {
            // Peers see immediately that this rank left, also if the memory cannot be given back.
            self.board().key.store(0, Ordering::Release);
        }
    }
}

impl fmt::Debug for Room {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Room({} places at {})", self.places, self.offset())
    }
}

/// A peer's room, read by this rank.
#[derive(Clone, Debug)]
pub struct PeerRoom {
    segment: Arc<PeerSegment>,
    offset: usize,
    key: u32,
    places: usize,
}

impl PeerRoom {
    /// Nothing if there can be no such room in the segment.
    pub fn new(segment: Arc<PeerSegment>, offset: usize, places: usize, key: u32) -> Option<Self> {
        let whole = segment.bytes(offset, Room::len_for(places))?;
        (whole.start() as usize).is_multiple_of(PAGE).then_some(())?;
        Some(PeerRoom { segment, offset, key, places })
    }

    /// Is the owner still in the group?
    #[inline]
    pub fn is_open(&self) -> bool {
        self.board().key.load(Ordering::Acquire) == u64::from(self.key)
    }

    /// Does what was just read from memory that the owner lent count?
    fn still_lends(&self) -> bool {
        fence(Ordering::Acquire); // see `Room::withdraw`
        self.board().withdrawn.load(Ordering::Relaxed) == 0 && self.is_open()
    }

    /// Does a message lie in one of the owner's staging slots?
    #[inline]
    fn is_staged(&self, place: u64) -> bool {
        let slots = self.offset + PAGE * (1 + self.places)..self.offset + Room::len_for(self.places);
        usize::try_from(place).is_ok_and(|place| slots.contains(&place))
    }

    /// What the owner does now; nothing while it is not in the group.
    pub fn doing(&self) -> Option<Doing> {
        let board = self.board();
        // Bounded: a writer is between its two stores for some nanoseconds, unless it was stopped there.
        for _ in 0..1000 {
            let before = board.version.load(Ordering::Acquire);
            let doing = Doing {
                current: std::array::from_fn(|word| board.current[word].load(Ordering::Relaxed)),
                finished: std::array::from_fn(|word| board.finished[word].load(Ordering::Relaxed)),
                since: std::array::from_fn(|word| board.since[word].load(Ordering::Relaxed)),
            };
            fence(Ordering::Acquire);
            if before & 1 == 0 && board.version.load(Ordering::Relaxed) == before {
                return self.is_open().then_some(doing);
            }
        }
        None
    }

    /// Bytes of the owner's segment, if they lie within it.
    #[inline]
    pub fn bytes(&self, place: u64, len: usize) -> Option<Bytes<'_>> {
        self.segment.bytes(usize::try_from(place).ok()?, len)
    }

    fn board(&self) -> &Board {
        let page = self.segment.bytes(self.offset, PAGE).expect("`new` checked it");
        // SAFETY: a page of a mapping that lives as long as `self`, aligned (checked by `new`); any bytes are a value of
        // these atomics, which are only read.
        unsafe { &*page.start().cast::<Board>() }
    }

    fn record(&self, place: usize) -> NonNull<Record> {
        assert!(place < self.places, "place {place} of {}", self.places);
        let page = self.segment.bytes(self.offset + PAGE * (1 + place), PAGE).expect("`new` checked it");
        NonNull::new(page.start().cast_mut().cast()).expect("a mapping does not begin at null")
    }
}

/// Both directions between this rank and one peer, on both lanes.
#[derive(Debug)]
pub struct Link {
    outboxes: [Outbox; 2],
    inboxes: [Inbox; 2],
    pair: Pair,
    theirs: PeerRoom,
    /// By lane: the next message as it was at the first look, until it is taken. Its cell is not believed twice: a peer
    /// that changes it meanwhile is broken or hostile.
    seen: [Cell<Option<Arrived>>; 2],
    /// By lane: the region in which the next message lies, and its offset. Held from the first look at the message until
    /// it is taken, so that its bytes stay where they are whatever the peer says meanwhile.
    read_now: [OnceCell<(usize, Arc<PeerRegion>)>; 2],
    room: Arc<Room>,
    place: usize,
}

impl Link {
    /// Joins place `place` of our room, which is the peer's, with place `mine` of its room, which is ours. Nothing if that
    /// place is joined already: a record has one writer.
    pub fn new(room: &Arc<Room>, place: usize, theirs: PeerRoom, mine: usize) -> Option<Self> {
        if place >= room.places || mine >= theirs.places || room.taken()[place] {
            return None;
        }
        room.taken()[place] = true;
        // SAFETY: the link keeps both rooms, and `taken` makes it the only one that writes to this record.
        let pair = unsafe { Pair::new(room.record(place), theirs.record(mine)) };
        let key = room.key;
        let lanes = [Lane::Collective, Lane::PointToPoint];
        Some(Link {
            outboxes: lanes.map(|lane| Outbox::new(pair, lane, key)),
            inboxes: lanes.map(|lane| Inbox::new(pair, lane, key)),
            pair,
            theirs,
            seen: Default::default(),
            read_now: Default::default(),
            room: Arc::clone(room),
            place,
        })
    }

    #[inline]
    /// The messages to the peer.
    pub fn outbox(&mut self, lane: Lane) -> &mut Outbox {
        &mut self.outboxes[lane as usize]
    }

    /// The next message of `lane`, if it is there: what it is, and its bytes unless they cannot be where it says.
    #[inline]
    pub fn peek(&self, lane: Lane) -> Option<(Head, Option<Bytes<'_>>)> {
        let inbox = &self.inboxes[lane as usize];
        let seen = &self.seen[lane as usize];
        let arrived = match seen.get() {
            Some(arrived) => arrived,
            None => {
                let arrived = inbox.peek()?;
                seen.set(Some(arrived));
                arrived
            }
        };
        let bytes = usize::try_from(arrived.len).ok().and_then(|len| match arrived.place {
            None => inbox.inline(len),
            Some(place) => self.theirs.bytes(place, len).or_else(|| self.in_region(lane, place, len)),
        });
        Some((arrived.head, bytes))
    }

    /// The bytes of the next message of `lane`, which do not lie in the peer's segment.
    fn in_region(&self, lane: Lane, place: u64, len: usize) -> Option<Bytes<'_>> {
        let place = usize::try_from(place).ok()?;
        let read_now = &self.read_now[lane as usize];
        if read_now.get().is_none() {
            let _ = read_now.set(self.theirs.segment.region_at(place)?); // it is empty
        }
        let (offset, region) = read_now.get()?;
        region.bytes(place.checked_sub(*offset)?, len)
    }

    /// Has read the next message of `lane`. False if what was read does not count: the peer had lent it in place, and took it
    /// back before or while it was read.
    #[inline]
    #[must_use]
    pub fn take(&mut self, lane: Lane) -> bool {
        let place = self.seen[lane as usize].take().and_then(|arrived| arrived.place);
        let counts = place.is_none_or(|place| self.theirs.is_staged(place) || self.theirs.still_lends());
        self.read_now[lane as usize].take();
        self.inboxes[lane as usize].take();
        counts
    }

    /// Has the peer read everything that was sent to it?
    pub fn is_read(&mut self) -> bool {
        self.outboxes.iter_mut().all(|outbox| outbox.sent() == outbox.read())
    }

    /// The peer's room.
    pub fn theirs(&self) -> &PeerRoom {
        &self.theirs
    }

    /// Does the peer sleep until we do something? Asked after [`before_looking`](crate::before_looking).
    #[inline]
    pub fn peer_sleeps(&self) -> bool {
        self.pair.theirs().is_wanted()
    }

    /// Says that this rank is about to sleep until the peer does something on this link, or that it woke up.
    pub fn want(&self, wanted: Wanted) {
        self.pair.mine().want(wanted);
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.room.taken()[self.place] = false;
    }
}

#[cfg(all(test, not(miri)))] // Miri has no memfd.
#[expect(clippy::unwrap_used, reason = "a test may")]
mod tests;
