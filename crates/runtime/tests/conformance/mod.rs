//! One suite of operations for every way in which ranks are connected.
//!
//! A suite is a function that every rank of a group calls. Each rank knows what all ranks put in (see `values`) and what
//! must come out (see `reference`); what must be the same everywhere goes into a digest that ranks compare.

#![allow(dead_code, unreachable_pub, reason = "each test file uses its part")]
#![allow(clippy::unwrap_used, reason = "helpers of tests may fail")]

pub mod algorithms;
pub mod movement;
pub mod reductions;
pub mod reference;
pub mod values;

use tenfold::{Buffer, BufferView, DType, Group, Work};

/// Lengths for which everything is tried.
pub const SHORT: [usize; 4] = [0, 1, 7, 1000];

/// A length that no number of ranks divides; only some things are tried with it.
pub const LONG: usize = 1_000_003;

/// How many ranks groups have.
pub const SIZES: [usize; 5] = [1, 2, 3, 4, 8];

/// A rank in the course of a suite.
pub struct Course<'a> {
    pub group: &'a Group,
    /// Operations so far: the same on all ranks.
    number: usize,
    digest: u64,
}

impl<'a> Course<'a> {
    pub fn new(group: &'a Group) -> Course<'a> {
        Course { group, number: 0, digest: 0xcbf2_9ce4_8422_2325 }
    }

    pub fn rank(&self) -> usize {
        self.group.rank()
    }

    pub fn size(&self) -> usize {
        self.group.size()
    }

    /// The number of the next operation, from which its seed, root and the like follow.
    pub fn next(&mut self) -> usize {
        self.number += 1;
        self.number
    }

    /// A tensor with these bytes: in shared memory on every second rank, on every other rank the next time.
    pub fn tensor(&self, dtype: DType, bytes: &[u8]) -> Buffer {
        let elements = bytes.len() / dtype.size();
        let mut tensor = if (self.rank() + self.number).is_multiple_of(2) {
            self.group.shared_buffer(dtype, elements).unwrap()
        } else {
            Buffer::zeros(dtype, elements)
        };
        tensor.as_mut_bytes().copy_from_slice(bytes);
        tensor
    }

    /// A tensor for a result, full of something that is not a result.
    pub fn blank(&self, dtype: DType, elements: usize) -> Buffer {
        self.tensor(dtype, &vec![0x55; elements * dtype.size()])
    }

    /// Notes bytes that all ranks must have alike.
    pub fn note(&mut self, bytes: &[u8]) {
        let word = |word: &[u8]| {
            let mut padded = [0; 8];
            padded[..word.len()].copy_from_slice(word);
            u64::from_le_bytes(padded)
        };
        for chunk in bytes.chunks(8) {
            self.digest = (self.digest ^ word(chunk)).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(23);
        }
    }

    /// Panics unless all ranks noted the same.
    pub fn agree(&self, what: &str) {
        let mut own = Buffer::from_slice(&[self.digest]);
        let mut all = Buffer::zeros(DType::U64, self.size());
        done(self.group.start_all_gather_into(all.lend(), own.lend()));
        let all = all.as_slice::<u64>();
        assert!(
            all.iter().all(|digest| *digest == self.digest),
            "{what}: results differ between ranks: {all:x?}"
        );
    }

    /// What all noted bytes come to.
    pub fn digest(&self) -> u64 {
        self.digest
    }
}

/// What there is to know of an operation that has ended.
#[derive(Clone, Copy, Debug)]
pub struct Outcome {
    pub algorithm: &'static str,
    pub source: Option<usize>,
}

/// The end of an operation that must end well.
#[track_caller]
pub fn done(work: tenfold::Result<Work>) -> Outcome {
    let work = work.unwrap();
    work.wait().unwrap();
    Outcome { algorithm: work.algorithm(), source: work.source() }
}

pub fn lend_all(tensors: &mut [Buffer]) -> Vec<BufferView> {
    tensors.iter_mut().map(Buffer::lend).collect()
}

/// Elements of `rank` where ranks have different numbers of them; every third has none.
pub fn uneven(count: usize, rank: usize) -> usize {
    if rank % 3 == 2 { 0 } else { count + rank }
}
