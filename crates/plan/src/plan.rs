//! What one rank does in a collective: a list of steps.
//!
//! Steps run in order. A `Send` offers a chunk to each rank named; links are first in, first out. A `Recv` or `Reduce` waits
//! for the next message of each rank named. Zero-length chunks travel as empty messages: they still say "I am here, and
//! this is what I called".

use crate::Rank;

/// Memory that a plan works on. Each buffer is cut into parts, numbered from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Buffer {
    /// What the caller gave; never written.
    Input,
    /// What the caller gets; holds the input too where the operation works in place.
    Output,
    /// Memory of the run.
    Scratch,
}

/// A run of consecutive parts of a buffer; `count` 0 is the empty chunk of a barrier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Chunk {
    pub buffer: Buffer,
    pub first: usize,
    pub count: usize,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Offers `chunk` to each of `to`.
    Send { to: Vec<Rank>, chunk: Chunk },
    /// Copies the next message of `from` into `chunk`.
    Recv { from: Rank, chunk: Chunk },
    /// Sets `to` to the combination of `own` and the next message of each of `from`, in ascending order of rank
    /// (`own` has this rank's place), in one pass and rounded once. `finish`: the result counts every rank, so
    /// what an operation does at the end (the division of an average) happens here.
    Reduce { from: Vec<Rank>, own: Chunk, to: Chunk, finish: bool },
    /// Copies within this rank.
    Copy { from: Chunk, to: Chunk },
}

/// The steps of one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    pub steps: Vec<Step>,
    /// How many parts `Input` and `Output` are cut into.
    pub input: usize,
    pub output: usize,
    /// Each part of `Scratch` is as long as the part named here.
    pub scratch: Vec<(Buffer, usize)>,
    /// A `Send` need not be taken before the next step begins, and peers may read the chunk in place: nothing is
    /// overwritten that a peer may still read.
    pub lends: bool,
    /// Every chunk has at most one part, so a long operation may run the plan over successive pieces of all parts.
    pub pieces: bool,
}
