//! The ring: the last so many operations, written without locks and read without waiting for writers.
//!
//! A slot is a stamp and fifteen words. The stamp is a number that only grows. It says which record the slot holds and how often
//! that was changed, and it is odd while a thread writes. A writer makes it odd by compare-and-swap, so that only one thread
//! writes to a slot. If another thread is writing, the writer drops its own record instead of waiting. A reader takes what it
//! read only if the stamp was even and the same before and after.
//!
//! Not here: what the words mean (see `entry`).

use std::sync::atomic::{AtomicU64, Ordering, fence};

/// Words of a record; with the stamp two cache lines.
pub(super) const WORDS: usize = 15;

/// How often a reader looks again at a slot that is being written, before it leaves it out.
const LOOKS: u32 = 1000;

/// The largest ring: 128 MiB.
pub(super) const CAPACITY_MAX: usize = 1 << 20;

/// Stamps of one record: it is written, and changed at most twice.
const STEPS: u64 = 8;

pub(super) type Words = [u64; WORDS];

#[derive(Debug)]
#[repr(align(128))]
struct Slot {
    stamp: AtomicU64,
    words: [AtomicU64; WORDS],
}

#[derive(Debug)]
pub(super) struct Ring {
    /// A power of two, so that a place is found without dividing; the last `capacity` records count.
    slots: Box<[Slot]>,
    capacity: u64,
    next: AtomicU64,
    /// Records before this one were dropped by a reset.
    first: AtomicU64,
    lost: AtomicU64,
}

impl Ring {
    pub(super) fn new(capacity: usize) -> Self {
        let capacity = capacity.clamp(1, CAPACITY_MAX);
        let slot = || Slot { stamp: AtomicU64::new(0), words: [const { AtomicU64::new(0) }; WORDS] };
        Ring {
            slots: (0..capacity.next_power_of_two()).map(|_| slot()).collect(),
            capacity: capacity as u64,
            next: AtomicU64::new(0),
            first: AtomicU64::new(0),
            lost: AtomicU64::new(0),
        }
    }

    pub(super) fn capacity(&self) -> usize {
        self.capacity as usize
    }

    /// The number of the next record: how many were written.
    pub(super) fn next(&self) -> u64 {
        self.next.load(Ordering::Acquire)
    }

    /// Records that were given up because another thread was writing in their place.
    pub(super) fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }

    fn slot(&self, id: u64) -> &Slot {
        &self.slots[(id & (self.slots.len() as u64 - 1)) as usize]
    }

    /// Writes a record; its number.
    #[inline]
    pub(super) fn push(&self, words: &Words) -> u64 {
        let id = self.next.fetch_add(1, Ordering::AcqRel);
        let slot = self.slot(id);
        let writing = (id + 1) * STEPS + 1;
        let found = slot.stamp.load(Ordering::Relaxed);
        let claimed = found & 1 == 0
            && found < writing
            && slot.stamp.compare_exchange(found, writing, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        if !claimed {
            self.lost.fetch_add(1, Ordering::Relaxed);
            return id;
        }
        fence(Ordering::Release); // a reader that sees a new word must see that it is being written
        for (word, value) in slot.words.iter().zip(words) {
            word.store(*value, Ordering::Relaxed);
        }
        slot.stamp.store(writing + 1, Ordering::Release);
        id
    }

    /// Changes some words of record `id`, if it is still there.
    #[inline]
    pub(super) fn update<const N: usize>(&self, id: u64, changes: [(usize, u64); N]) {
        let slot = self.slot(id);
        let found = slot.stamp.load(Ordering::Relaxed);
        if found & 1 == 1 || found / STEPS != id + 1 || found % STEPS + 2 >= STEPS {
            return; // overwritten, or about to be; or changed often enough
        }
        if slot.stamp.compare_exchange(found, found + 1, Ordering::AcqRel, Ordering::Relaxed).is_err() {
            return;
        }
        fence(Ordering::Release);
        for (index, value) in changes {
            slot.words[index].store(value, Ordering::Relaxed);
        }
        slot.stamp.store(found + 2, Ordering::Release);
    }

    /// Forgets everything, for readers: what was written stays until it is overwritten.
    pub(super) fn reset(&self) {
        self.first.store(self.next(), Ordering::Release);
    }

    /// The records that count, oldest first: their numbers and their words.
    pub(super) fn read(&self) -> Vec<(u64, Words)> {
        let next = self.next();
        let first = next.saturating_sub(self.capacity).max(self.first.load(Ordering::Acquire));
        (first..next).filter_map(|id| Some((id, self.read_one(id)?))).collect()
    }

    /// Nothing if it is not there, or written all the time.
    pub(super) fn read_one(&self, id: u64) -> Option<Words> {
        let slot = self.slot(id);
        for look in 0..LOOKS {
            let before = slot.stamp.load(Ordering::Acquire);
            if before / STEPS != id + 1 {
                return None;
            }
            if before & 1 == 0 {
                let words = std::array::from_fn(|index| slot.words[index].load(Ordering::Relaxed));
                fence(Ordering::Acquire);
                if slot.stamp.load(Ordering::Relaxed) == before {
                    return Some(words);
                }
            }
            if look < LOOKS / 2 { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::sync::atomic::AtomicBool;

    /// Words of which every one says which record and which change they belong to.
    fn words(id_like: u64, change: u64) -> Words {
        std::array::from_fn(|index| mixed(id_like, change, index as u64))
    }

    fn mixed(writer_and_number: u64, change: u64, index: u64) -> u64 {
        writer_and_number << 16 | change << 8 | index
    }

    /// Whose words they are; fails if they are of more than one record or change.
    fn owner(words: &Words) -> (u64, u64) {
        let (number, change) = (words[0] >> 16, words[0] >> 8 & 0xff);
        for (index, word) in words.iter().enumerate() {
            assert_eq!(*word, mixed(number, change, index as u64), "torn: {words:x?}");
        }
        (number, change)
    }

    #[test]
    fn the_last_records_are_there_in_order_and_no_more_than_the_bound() {
        for capacity in [1, 2, 3, 5, 8, 1000] {
            let ring = Ring::new(capacity);
            for id in 0..2500_u64 {
                assert_eq!(ring.push(&words(id, 0)), id);
                let read = ring.read();
                let expected = id.saturating_sub(capacity as u64 - 1);
                assert!(read.len() <= capacity);
                assert_eq!((read[0].0, read[read.len() - 1].0), (expected, id));
                assert_eq!(owner(&read[0].1), (expected, 0));
            }
        }
    }

    #[test]
    fn a_record_can_be_changed_while_it_is_there_and_not_after() {
        let ring = Ring::new(2);
        let id = ring.push(&[7; WORDS]);
        ring.update(id, [(3, 8), (4, 9)]);
        let read = ring.read_one(id).unwrap();
        assert_eq!((read[2], read[3], read[4], read[5]), (7, 8, 9, 7));
        ring.push(&[1; WORDS]);
        ring.push(&[2; WORDS]);
        ring.update(id, [(0, 100)]);
        assert_eq!(ring.read(), [(1, [1; WORDS]), (2, [2; WORDS])]);
    }

    #[test]
    fn a_reset_hides_what_was_written_before_it() {
        let ring = Ring::new(4);
        ring.push(&[1; WORDS]);
        ring.reset();
        assert_eq!(ring.read(), []);
        ring.push(&[2; WORDS]);
        assert_eq!(ring.read(), [(1, [2; WORDS])]);
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]

        #[test]
        fn readers_beside_writers_see_whole_records_and_no_more_than_the_bound(
            capacity in 1_usize..40, writers in 1_u64..4, changes in 0_u64..3,
        ) {
            const EACH: u64 = 3000;
            let (ring, over) = (Ring::new(capacity), AtomicBool::new(false));
            std::thread::scope(|scope| {
                let write = |writer: u64| {
                    let ring = &ring;
                    scope.spawn(move || for number in 0..EACH {
                        let number = number << 2 | writer;
                        let id = ring.push(&words(number, 0));
                        for change in 1..=changes {
                            let changed = words(number, change);
                            ring.update::<WORDS>(id, std::array::from_fn(|index| (index, changed[index])));
                        }
                    })
                };
                let writing: Vec<_> = (0..writers).map(write).collect();
                let (ring, over) = (&ring, &over);
                let reading = scope.spawn(move || {
                    let mut reads = 0_u64;
                    while !over.load(Ordering::Acquire) || reads == 0 {
                        let read = ring.read();
                        assert!(read.len() <= capacity);
                        assert!(read.is_sorted_by_key(|(id, _)| *id));
                        for (_, words) in &read {
                            let (number, change) = owner(words);
                            assert!(number & 3 < writers && number >> 2 < EACH && change <= changes);
                        }
                        reads += 1;
                    }
                });
                writing.into_iter().for_each(|writer| writer.join().unwrap());
                over.store(true, Ordering::Release);
                reading.join().unwrap();
            });
            prop_assert_eq!(ring.next(), writers * EACH);
            let whole = ring.read();
            prop_assert!(whole.len() as u64 + ring.lost() >= (capacity as u64).min(EACH));
            whole.iter().for_each(|(_, words)| _ = owner(words));
        }
    }
}
