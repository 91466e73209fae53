//! Ranks share memory with a rank whose memory is damaged, by a defect or on purpose. They may fail with an error that names
//! that rank, or get wrong bytes from it. They do not panic, and they do not wait longer than their timeout.
//!
//! And ranks read memory that its owner takes back: they may fail, but they do not succeed with other bytes.

#![expect(clippy::disallowed_methods, reason = "plays a rank that goes on while others read")]

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use tenfold_memory::{Buffer, Bytes, DType, ReduceOp, Room};

use crate::{Group, Options, Result, Tag};

/// The rank whose room is damaged.
const HOSTILE: usize = 1;

/// Nothing here takes this long unless it hangs.
const HANG: Duration = Duration::from_secs(100);

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() >> 16) as usize % end
    }
}

/// Writes something into a room that its owner did not mean to say: noise, words that look like lengths, places and counts,
/// and words that lie elsewhere in the room.
fn damage(room: &Room, random: &mut Random) {
    const PAGE: usize = 4096;
    let whole = room.bytes_of_room();
    // Board and records. What lies in the slots are elements, which mean nothing.
    let told = (4 * PAGE).min(whole.len());
    let at = match random.below(3) {
        0 => random.below(told / 8) * 8,
        // The beginning of a page: key and version of the board, counts and flags of a record.
        1 => random.below(4) * PAGE + random.below(32) * 8,
        // Stamp, head, length or place of a message.
        _ => random.below(4) * PAGE + 256 + random.below(28) * 128 + random.below(6) * 8,
    };
    let target = whole.part(at, at + 8);
    let word = match random.below(6) {
        0 => random.next(),
        1 => 0,
        2 => u64::MAX - random.next() % 4,
        3 => random.next() % (1 << 20),
        4 => {
            let from = random.below(told / 8) * 8;
            return target.copy_from(whole.part(from, from + 8).bytes());
        }
        // A stamp of the same link, with another count.
        _ => (u64::from(room.key()) << 32) | (random.next() % 64),
    };
    target.copy_from(Bytes::of(&word.to_ne_bytes()));
}

/// Operations of all kinds of messages: short, staged, lent; on both lanes.
fn operations(group: &Group, count: usize) -> Result<()> {
    let (rank, size) = (group.rank(), group.size());
    let (next, previous) = ((rank + 1) % size, (rank + size - 1) % size);
    let mut shared = group.shared_buffer(DType::F32, 40_000)?;
    for number in 0..count {
        let mut tensor = Buffer::zeros(DType::F32, [2, 3000, 200_000][number % 3]);
        group.start_all_reduce(tensor.lend(), ReduceOp::Sum)?.wait()?;
        group.start_broadcast(shared.lend(), number % size)?.wait()?;
        let mut received = Buffer::zeros(DType::F32, tensor.elements());
        let sent = group.start_send(tensor.lend(), next, Tag(5))?;
        group.start_recv(received.lend(), previous, Tag(5))?.wait()?;
        sent.wait()?;
        group.start_barrier()?.wait()?;
    }
    Ok(())
}

#[test]
fn a_rank_that_writes_nonsense_into_its_memory_is_named_and_nobody_panics_or_hangs() {
    static PANICS: AtomicUsize = AtomicUsize::new(0);
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |what| {
        PANICS.fetch_add(1, Ordering::Relaxed);
        usual(what);
    }));
    let seeds =
        std::env::var("TENFOLD_HOSTILE_SEEDS").ok().and_then(|seeds| seeds.parse().ok()).unwrap_or(12);
    for seed in 1..=seeds {
        let size = 2 + seed as usize % 2;
        let options = Options::default().read_in_place().timeout(Duration::from_secs(1));
        let (met, stop, done) = (Barrier::new(size), AtomicBool::new(false), AtomicUsize::new(0));
        let started = std::time::Instant::now();
        let outcomes = Group::threads_with(size, &options, |group| {
            group.with_timeout(HANG).start_barrier()?.wait()?; // all links are there
            met.wait();
            let room = group.fabric().engine.with(|state| state.group(group.inner.index).mesh.room());
            std::thread::scope(|scope| {
                if group.rank() == HOSTILE {
                    scope.spawn(|| {
                        let mut random = Random(u64::wrapping_mul(seed, 0x9e37_79b9_7f4a_7c15));
                        let (pause, burst) = (random.below(1000) as u64, 1 + random.below(40));
                        while !stop.load(Ordering::Relaxed) {
                            (0..burst).for_each(|_| damage(&room, &mut random));
                            std::thread::sleep(Duration::from_micros(pause));
                        }
                    });
                }
                let outcome = operations(&group, 30);
                if done.fetch_add(1, Ordering::Relaxed) + 1 == size {
                    stop.store(true, Ordering::Relaxed);
                }
                Ok(outcome)
            })
        });
        assert_eq!(PANICS.load(Ordering::Relaxed), 0, "seed {seed}");
        assert!(started.elapsed() < HANG, "seed {seed}");
        let outcomes = outcomes.unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        let honest = outcomes.iter().enumerate().filter(|(rank, _)| *rank != HOSTILE);
        let texts: Vec<String> =
            honest.filter_map(|(_, outcome)| Some(outcome.as_ref().err()?.to_string())).collect();
        // With a third rank: if it waits for the hostile rank, the first rank may wait for it and name it.
        let is_named =
            size > 2 || texts.iter().all(|text| text.contains("rank 1 ") || text.contains("by rank 1"));
        assert!(is_named, "seed {seed}: {texts:#?}");
    }
}

#[test]
fn an_operation_that_succeeds_has_the_bytes_that_were_lent_whenever_their_owner_gives_up() {
    const ELEMENTS: usize = 1 << 18; // pieces enough for the owner to give up between two of them
    let options = Options::default().read_in_place().timeout(HANG);
    let (gone, torn) = (AtomicUsize::new(0), AtomicUsize::new(0));
    for round in 0..200_u32 {
        let outcome = Group::threads_with(2, &options, |group| {
            let mut tensor = group.shared_buffer(DType::F32, ELEMENTS)?;
            tensor.as_mut_slice::<f32>().fill(if group.rank() == 0 { 1.0 } else { 0.0 });
            group.start_barrier()?.wait()?;
            let work = group.start_broadcast(tensor.lend(), 0);
            if group.rank() == 0 {
                let started = std::time::Instant::now();
                while started.elapsed() < round % 50 * Duration::from_micros(10) {
                    std::hint::spin_loop();
                }
                group.abort("test");
                tensor.as_mut_slice::<f32>().fill(-7.0);
            } else if work.and_then(|work| work.wait()).is_err() {
                gone.fetch_add(1, Ordering::Relaxed);
            } else if tensor.as_slice::<f32>().iter().any(|&element| element != 1.0) {
                torn.fetch_add(1, Ordering::Relaxed);
            }
            Ok(())
        });
        outcome.unwrap();
    }
    let (gone, torn) = (gone.into_inner(), torn.into_inner());
    assert_eq!(torn, 0, "operations that succeeded with other bytes; {gone} failed");
    assert!(gone > 0, "the owner never gave up in time");
}
