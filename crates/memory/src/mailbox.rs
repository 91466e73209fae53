//! Messages between two ranks of one host.
//!
//! Each rank has a [`Record`] for each peer, in its own segment: 4 KiB that it alone writes and the peer reads. A message is
//! a 128-byte cell of the *sender's* record; the receiver says how many it has read by storing a count in *its*
//! record. So no memory has two writers, and nothing here is a lock or a read-modify-write.
//!
//! A cell is published by its stamp, which is written last. The stamp holds the link's key, so that what an earlier owner of
//! the same memory left behind is not taken for a message. A record therefore needs no preparation before it is used, and
//! its pages are allocated with the first write.
//!
//! A rank that goes to sleep writes into its record what it waits for, polls once more, and only then sleeps. A rank that
//! publishes a cell reads that record afterwards. The two fences make sure that at least one of them sees the other.
//!
//! Not here: sleeping and waking themselves, what messages mean, where long payloads lie.

use std::ptr::NonNull;

use crate::sync::{AtomicU64, Ordering, fence};

/// Words of a message that say what it is; this file does not care.
pub type Head = [u64; 3];

/// What fits into a cell beside its head: 128 bytes less stamp, head, length and place.
pub const INLINE: usize = 80;

/// Messages that a link holds before the first must have been read, by lane.
pub const CELLS: [usize; 2] = [16, 12];

/// The two links of a pair: one for collectives, one for point-to-point, so that neither waits behind the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lane {
    /// For collectives.
    Collective = 0,
    /// For point-to-point messages.
    PointToPoint = 1,
}

/// What a sleeping rank waits for, in its record for the peer that should wake it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wanted(pub u64);

impl Wanted {
    /// It does not sleep, or waits for nothing.
    pub const NOTHING: Wanted = Wanted(0);
    /// A message, or word of having been read: anything the peer does on this link.
    pub const ANYTHING: Wanted = Wanted(1);
}

#[repr(C, align(128))]
struct Cell {
    /// Key in the upper half, number of the message in the lower: the message is there. Written last.
    stamp: AtomicU64,
    head: [AtomicU64; 3],
    len: AtomicU64,
    /// Where a payload longer than [`INLINE`] lies in the sender's segment.
    place: AtomicU64,
    inline: [AtomicU64; INLINE / 8],
}

#[repr(C, align(64))]
struct Line(AtomicU64);

/// What one rank writes for one peer: its messages to it, and what it has read of the peer's.
///
/// All zeroes is a valid record in which nothing was said yet.
#[repr(C, align(4096))]
pub struct Record {
    /// Key and count of the peer's messages that were read, by lane. A line each: the peer reads it in a loop.
    read: [Line; 2],
    /// Written only around sleeping, so that looking at it after each message costs the peer nothing.
    wanted: Line,
    collective: [Cell; CELLS[0]],
    point_to_point: [Cell; CELLS[1]],
}

#[cfg(not(loom))] // loom's atomics are larger
const _: () = {
    assert!(size_of::<Cell>() == 128);
    assert!(size_of::<Record>() == 4096);
};

impl Record {
    fn cells(&self, lane: Lane) -> &[Cell] {
        match lane {
            Lane::Collective => &self.collective,
            Lane::PointToPoint => &self.point_to_point,
        }
    }

    /// Says what this rank is about to sleep for. The caller looks once more at what it waits for, then sleeps.
    pub fn want(&self, wanted: Wanted) {
        self.wanted.0.store(wanted.0, Ordering::Relaxed);
        if wanted != Wanted::NOTHING {
            fence(Ordering::SeqCst);
        }
    }

    /// Does the owner of this record sleep, waiting for us? Asked after something was published and [`before_looking`].
    #[inline]
    pub fn is_wanted(&self) -> bool {
        self.wanted.0.load(Ordering::Relaxed) != 0
    }

    #[cfg(any(test, loom))]
    fn for_test() -> Box<Self> {
        #[cfg(not(loom))]
        return Box::new(
            // SAFETY: a record is atomics only, for which all zeroes is a value.
            unsafe { std::mem::zeroed() },
        );
        #[cfg(loom)]
        {
            let cell = |_| Cell {
                stamp: AtomicU64::new(0),
                head: std::array::from_fn(|_| AtomicU64::new(0)),
                len: AtomicU64::new(0),
                place: AtomicU64::new(0),
                inline: std::array::from_fn(|_| AtomicU64::new(0)),
            };
            Box::new(Record {
                read: std::array::from_fn(|_| Line(AtomicU64::new(0))),
                wanted: Line(AtomicU64::new(0)),
                collective: std::array::from_fn(cell),
                point_to_point: std::array::from_fn(cell),
            })
        }
    }
}

impl std::fmt::Debug for Record {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Record")
    }
}

/// The two records of a pair, as one of them sees it.
#[derive(Clone, Copy, Debug)]
pub struct Pair {
    mine: NonNull<Record>,
    theirs: NonNull<Record>,
}

// SAFETY: records are atomics; a pair is two addresses of them.
unsafe impl Send for Pair {}

impl Pair {
    /// # Safety
    /// Both point to records that stay mapped for as long as the pair, its outboxes and inboxes are used. No other code writes
    /// to `mine`.
    pub unsafe fn new(mine: NonNull<Record>, theirs: NonNull<Record>) -> Self {
        Pair { mine, theirs }
    }

    #[inline]
    pub fn mine(&self) -> &Record {
        // SAFETY: stays mapped, by the contract of `new`; a record is atomics, so sharing it is fine.
        unsafe { self.mine.as_ref() }
    }

    #[inline]
    pub fn theirs(&self) -> &Record {
        // SAFETY: as above.
        unsafe { self.theirs.as_ref() }
    }
}

/// The sending end of a link.
#[derive(Debug)]
pub struct Outbox {
    pair: Pair,
    lane: Lane,
    key: u32,
    sent: u32,
    /// The cell of the next message. Counted apart: the number of cells need not divide 2³², at which `sent` wraps.
    cell: usize,
    /// What the peer had read when we last looked.
    read: u32,
}

/// Where the payload of a message lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "each variant says what its fields are")]
pub enum Payload<'a> {
    /// At most [`INLINE`] bytes, in the cell.
    Inline(&'a [u8]),
    /// `len` bytes from `place` in the sender's segment.
    At { place: u64, len: u64 },
}

impl Outbox {
    /// `key` is the same at both ends and differs from the key of the link that used these records before.
    pub fn new(pair: Pair, lane: Lane, key: u32) -> Self {
        Outbox { pair, lane, key, sent: 0, cell: 0, read: 0 }
    }

    /// How many messages were sent, modulo 2³².
    #[inline]
    pub fn sent(&self) -> u32 {
        self.sent
    }

    /// How many of them the peer has read.
    #[inline]
    pub fn read(&mut self) -> u32 {
        let count = self.pair.theirs().read[self.lane as usize].0.load(Ordering::Acquire);
        if (count >> 32) as u32 == self.key {
            let count = count as u32;
            // A peer cannot have read what was not sent; a count that says so is damage, and is not believed.
            if self.sent.wrapping_sub(count) <= self.sent.wrapping_sub(self.read) {
                self.read = count;
            }
        }
        self.read
    }

    /// Is there a free cell?
    #[inline]
    pub fn has_room(&mut self) -> bool {
        let cells = CELLS[self.lane as usize] as u32;
        self.sent.wrapping_sub(self.read) < cells || self.sent.wrapping_sub(self.read()) < cells
    }

    /// Publishes a message.
    ///
    /// # Panics
    /// If there is no room, or an inline payload is too long.
    #[inline]
    pub fn post(&mut self, head: &Head, payload: Payload<'_>) {
        assert!(self.has_room(), "a message needs a free cell");
        let cells = self.pair.mine().cells(self.lane);
        let cell = &cells[self.cell];
        self.cell = after(self.cell, cells.len());
        for (word, value) in cell.head.iter().zip(head) {
            word.store(*value, Ordering::Relaxed);
        }
        match payload {
            Payload::Inline(bytes) => {
                assert!(bytes.len() <= INLINE, "{} bytes do not fit a cell", bytes.len());
                cell.len.store(bytes.len() as u64, Ordering::Relaxed);
                cell.place.store(u64::MAX, Ordering::Relaxed);
                for (word, bytes) in cell.inline.iter().zip(bytes.chunks(8)) {
                    let mut value = [0; 8];
                    value[..bytes.len()].copy_from_slice(bytes);
                    word.store(u64::from_ne_bytes(value), Ordering::Relaxed);
                }
            }
            Payload::At { place, len } => {
                cell.len.store(len, Ordering::Relaxed);
                cell.place.store(place, Ordering::Relaxed);
            }
        }
        self.sent = self.sent.wrapping_add(1);
        // Published last: a reader that sees the stamp must see the rest.
        cell.stamp.store(stamp(self.key, self.sent), Ordering::Release);
    }
}

/// The receiving end of a link.
#[derive(Debug)]
pub struct Inbox {
    pair: Pair,
    lane: Lane,
    key: u32,
    taken: u32,
    /// The cell of the next message; see [`Outbox`].
    cell: usize,
}

/// A message that has arrived, as its sender described it; lengths and places are unchecked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrived {
    pub head: Head,
    pub len: u64,
    /// Where it lies in the sender's segment, unless in the cell.
    pub place: Option<u64>,
}

impl Inbox {
    /// See [`Outbox::new`].
    pub fn new(pair: Pair, lane: Lane, key: u32) -> Self {
        Inbox { pair, lane, key, taken: 0, cell: 0 }
    }

    fn next(&self) -> &Cell {
        &self.pair.theirs().cells(self.lane)[self.cell]
    }

    /// The next message, if it is there. It stays until [`Inbox::take`].
    #[inline]
    pub fn peek(&self) -> Option<Arrived> {
        let cell = self.next();
        if cell.stamp.load(Ordering::Acquire) != stamp(self.key, self.taken.wrapping_add(1)) {
            return None;
        }
        let place = cell.place.load(Ordering::Relaxed);
        Some(Arrived {
            head: std::array::from_fn(|word| cell.head[word].load(Ordering::Relaxed)),
            len: cell.len.load(Ordering::Relaxed),
            place: (place != u64::MAX).then_some(place),
        })
    }

    /// The bytes of a message that lies in its cell.
    #[inline]
    pub fn inline(&self, len: usize) -> Option<crate::Bytes<'_>> {
        let start = NonNull::from(&self.next().inline).cast();
        // SAFETY: at most `INLINE` bytes of a record that stays mapped; the sender does not write them again before
        // `take`.
        (len <= INLINE).then(|| unsafe { crate::Bytes::from_raw(start, len) })
    }

    /// The message was read: its cell, and the memory it points to, belong to the sender again.
    #[inline]
    pub fn take(&mut self) {
        self.taken = self.taken.wrapping_add(1);
        self.cell = after(self.cell, CELLS[self.lane as usize]);
        self.pair.mine().read[self.lane as usize].0.store(stamp(self.key, self.taken), Ordering::Release);
    }
}

/// Belongs between publishing and looking for sleepers: a rank that says later that it sleeps sees what was published.
///
/// One fence is enough for many messages. It waits until the stores before it have reached other cores, so it costs less the
/// later it comes.
#[inline]
pub fn before_looking() {
    fence(Ordering::SeqCst);
}

/// The cell after `cell`, of so many.
#[inline]
fn after(cell: usize, cells: usize) -> usize {
    if cell + 1 == cells { 0 } else { cell + 1 }
}

#[inline]
fn stamp(key: u32, count: u32) -> u64 {
    u64::from(key) << 32 | u64::from(count)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn ends(key: u32) -> (Outbox, Inbox, [NonNull<Record>; 2]) {
        ends_of(Lane::Collective, key)
    }

    fn ends_of(lane: Lane, key: u32) -> (Outbox, Inbox, [NonNull<Record>; 2]) {
        let records = [Record::for_test(), Record::for_test()].map(|record| NonNull::from(Box::leak(record)));
        let (sender, receiver) = pairs(records);
        (Outbox::new(sender, lane, key), Inbox::new(receiver, lane, key), records)
    }

    fn pairs(records: [NonNull<Record>; 2]) -> (Pair, Pair) {
        // SAFETY: leaked until `free`, and each is written through one pair only.
        unsafe { (Pair::new(records[0], records[1]), Pair::new(records[1], records[0])) }
    }

    fn free(records: [NonNull<Record>; 2]) {
        for record in records {
            // SAFETY: leaked by `ends`; its ends are not used again.
            drop(unsafe { Box::from_raw(record.as_ptr()) });
        }
    }

    #[test]
    fn messages_arrive_whole_and_in_order_and_room_comes_back_when_they_are_read() {
        let (mut outbox, mut inbox, records) = ends(7);
        let text = *b"exactly eighty bytes fit into a cell, which is a little more than one line of it";
        assert_eq!(text.len(), INLINE);
        for round in 0..40_u64 {
            assert!(inbox.peek().is_none());
            for number in 0..CELLS[0] as u64 {
                assert!(outbox.has_room());
                outbox.post(&[round, number, 0], Payload::Inline(&text[..(5 * number) as usize]));
            }
            assert!(!outbox.has_room());
            for number in 0..CELLS[0] as u64 {
                let arrived = inbox.peek().expect("it was posted");
                assert_eq!(arrived, Arrived { head: [round, number, 0], len: 5 * number, place: None });
                let bytes = inbox.inline(arrived.len as usize).expect("it is short");
                assert_eq!(bytes.to_vec(), &text[..(5 * number) as usize]);
                inbox.take();
                assert_eq!(outbox.read(), (round * 16 + number + 1) as u32);
            }
        }
        free(records);
    }

    #[test]
    fn what_an_earlier_link_left_behind_is_no_message() {
        let (mut outbox, mut inbox, records) = ends(1);
        outbox.post(&[1, 2, 3], Payload::At { place: 4096, len: 100 });
        assert_eq!(inbox.peek().and_then(|arrived| arrived.place), Some(4096));
        inbox.take();
        let (sender, receiver) = pairs(records);
        let mut outbox = Outbox::new(sender, Lane::Collective, 2);
        let inbox = Inbox::new(receiver, Lane::Collective, 2);
        assert!(inbox.peek().is_none());
        assert_eq!(outbox.read(), 0, "the count of the earlier link does not count");
        outbox.post(&[0; 3], Payload::Inline(&[]));
        assert!(inbox.peek().is_some());
        free(records);
    }

    #[test]
    fn counts_wrap_around() {
        for (lane, outstanding) in [
            (Lane::Collective, 1),
            (Lane::Collective, CELLS[0]),
            (Lane::PointToPoint, 1),
            (Lane::PointToPoint, CELLS[1]),
        ] {
            let (mut outbox, mut inbox, records) = ends_of(lane, 9);
            (outbox.sent, outbox.read, inbox.taken) = (u32::MAX - 7, u32::MAX - 7, u32::MAX - 7);
            let (mut posted, mut taken) = (0..40, 0..40);
            posted
                .by_ref()
                .take(outstanding)
                .for_each(|number| outbox.post(&[number, 0, 0], Payload::Inline(&[])));
            for number in taken.by_ref() {
                let arrived = inbox.peek().map(|arrived| arrived.head[0]);
                assert_eq!(arrived, Some(number), "{lane:?}, {outstanding} outstanding");
                inbox.take();
                if let Some(next) = posted.next() {
                    outbox.post(&[next, 0, 0], Payload::Inline(&[]));
                }
            }
            assert_eq!(outbox.read(), outbox.sent());
            free(records);
        }
    }

    #[test]
    fn a_count_of_messages_never_sent_is_not_believed() {
        let (mut outbox, _, records) = ends(9);
        outbox.post(&[0; 3], Payload::Inline(&[]));
        // SAFETY: alive until `free`.
        unsafe { records[1].as_ref() }.read[0].0.store(stamp(9, 1000), Ordering::Relaxed);
        assert_eq!(outbox.read(), 0);
        free(records);
    }

    #[test]
    fn a_rank_is_wanted_while_it_says_so() {
        let (outbox, inbox, records) = ends(9);
        let (sleeper, waker) = (inbox.pair, outbox.pair);
        assert!(!waker.theirs().is_wanted());
        sleeper.mine().want(Wanted::ANYTHING);
        assert!(waker.theirs().is_wanted());
        assert!(!sleeper.theirs().is_wanted(), "the other one is awake");
        sleeper.mine().want(Wanted::NOTHING);
        assert!(!waker.theirs().is_wanted());
        assert_eq!(format!("{:?}", waker.theirs()), "Record", "what a peer wrote is not printed");
        free(records);
    }

    #[test]
    fn two_threads_pass_a_hundred_thousand_messages() {
        let count = if cfg!(miri) { 100 } else { 100_000 };
        let (mut outbox, mut inbox, records) = ends(3);
        std::thread::scope(|scope| {
            scope.spawn(move || {
                for number in 0..count {
                    while !outbox.has_room() {
                        std::thread::yield_now();
                    }
                    outbox.post(&[number, !number, 0], Payload::Inline(&number.to_ne_bytes()));
                }
            });
            scope.spawn(move || {
                for number in 0..count {
                    let arrived = loop {
                        match inbox.peek() {
                            Some(arrived) => break arrived,
                            None => std::thread::yield_now(),
                        }
                    };
                    assert_eq!(arrived.head, [number, !number, 0]);
                    assert_eq!(inbox.inline(8).expect("short").to_vec(), number.to_ne_bytes());
                    inbox.take();
                }
            });
        });
        free(records);
    }
}

/// `RUSTFLAGS="--cfg loom" cargo test -p tenfold-memory --release loom`: every order that the memory model allows.
#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::thread;

    /// Both records of a pair, shared by two threads of a model.
    struct Shared([NonNull<Record>; 2]);
    // SAFETY: the model's threads use the records through atomics only.
    unsafe impl Send for Shared {}
    // SAFETY: as above.
    unsafe impl Sync for Shared {}

    impl Shared {
        fn new() -> loom::sync::Arc<Self> {
            let records = [Record::for_test(), Record::for_test()];
            loom::sync::Arc::new(Shared(records.map(|record| NonNull::from(Box::leak(record)))))
        }

        fn pair(&self, side: usize) -> Pair {
            // SAFETY: the records live until `Shared` is dropped, after both threads.
            unsafe { Pair::new(self.0[side], self.0[1 - side]) }
        }
    }

    impl Drop for Shared {
        fn drop(&mut self) {
            for record in self.0 {
                // SAFETY: leaked by `new`, dropped once.
                drop(unsafe { Box::from_raw(record.as_ptr()) });
            }
        }
    }

    #[test]
    fn loom_whoever_sees_the_stamp_sees_the_message() {
        loom::model(|| {
            let shared = Shared::new();
            let other = shared.clone();
            let sender = thread::spawn(move || {
                let mut outbox = Outbox::new(other.pair(0), Lane::PointToPoint, 5);
                outbox.post(&[1, 2, 3], Payload::At { place: 64, len: 9 });
                outbox.post(&[4, 5, 6], Payload::At { place: 128, len: 10 });
            });
            let mut inbox = Inbox::new(shared.pair(1), Lane::PointToPoint, 5);
            if let Some(arrived) = inbox.peek() {
                assert_eq!(arrived, Arrived { head: [1, 2, 3], len: 9, place: Some(64) });
                inbox.take();
                if let Some(arrived) = inbox.peek() {
                    assert_eq!(arrived, Arrived { head: [4, 5, 6], len: 10, place: Some(128) });
                }
            }
            sender.join().unwrap();
        });
    }

    #[test]
    fn loom_what_was_read_is_not_overwritten_before_it_was_read() {
        loom::model(|| {
            let shared = Shared::new();
            let other = shared.clone();
            // Stands for memory that a message points to: rewritten only once the message was read.
            let memory = loom::sync::Arc::new(AtomicU64::new(1));
            let lent = memory.clone();
            let sender = thread::spawn(move || {
                let mut outbox = Outbox::new(other.pair(0), Lane::Collective, 5);
                outbox.post(&[0; 3], Payload::At { place: 0, len: 8 });
                if outbox.read() == 1 {
                    lent.store(2, Ordering::Relaxed);
                }
            });
            let mut inbox = Inbox::new(shared.pair(1), Lane::Collective, 5);
            if inbox.peek().is_some() {
                assert_eq!(memory.load(Ordering::Relaxed), 1);
                inbox.take();
            }
            sender.join().unwrap();
        });
    }

    #[test]
    fn loom_a_rank_that_goes_to_sleep_sees_the_message_or_is_woken() {
        loom::model(|| {
            let shared = Shared::new();
            let other = shared.clone();
            let sender = thread::spawn(move || {
                let mut outbox = Outbox::new(other.pair(0), Lane::Collective, 5);
                outbox.post(&[0; 3], Payload::At { place: 0, len: 8 });
                before_looking();
                other.pair(0).theirs().is_wanted()
            });
            let pair = shared.pair(1);
            let inbox = Inbox::new(pair, Lane::Collective, 5);
            pair.mine().want(Wanted::ANYTHING);
            let seen = inbox.peek().is_some();
            let rung = sender.join().unwrap();
            assert!(seen || rung, "the receiver would sleep forever");
        });
    }
}
