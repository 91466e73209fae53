//! Collective algorithms as data.
//!
//! What a rank does in an all-reduce, a broadcast or a barrier is a [`Plan`]: a list of steps that send,
//! receive, reduce and copy parts of buffers. An [`Algorithm`] is a function from the placement of ranks
//! ([`Topology`]) to the plan of one rank. It does not depend on bytes or machines, so it reads as in a
//! textbook, and [`verify`] can prove it on symbols before a byte moves: every rank is counted once, all
//! ranks get the same bits, there is no deadlock, and nothing is overwritten that a peer may still read.
//! [`choose`] selects one for a number of bytes.
//!
//! ```
//! use tenfold_plan::{Kind, Topology, named, verify};
//!
//! let ring = named(Kind::AllReduce, "ring").expect("the ring is in the table");
//! let four = Topology::one_host(4);
//! verify::algorithm(ring, &four, 0)?;
//! assert_eq!(
//!     (ring.plan)(&four, 1, 0).to_string(),
//!     "  0  send output[1] to 2
//!   1  reduce output[0] with 0
//!   2  send output[0] to 2
//!   3  reduce output[3] with 0
//!   4  send output[3] to 2
//!   5  reduce output[2] with 0, finish
//!   6  send output[2] to 2
//!   7  receive output[1] from 0
//!   8  send output[1] to 2
//!   9  receive output[0] from 0
//!  10  send output[0] to 2
//!  11  receive output[3] from 0
//! "
//! );
//! # Ok::<(), verify::Flaw>(())
//! ```
//!
//! How each collective uses its buffers, where `n` is the number of ranks:
//!
//! | kind | `Input` | `Output` | parts of one length |
//! |---|---|---|---|
//! | all_reduce, reduce, scan, broadcast | none | `k` parts, in place; those of other ranks are unspecified after a reduce | `Output[i]` everywhere |
//! | reduce_scatter | `n` parts | 1 part | `Input[i]` everywhere and `Output` of rank `i` |
//! | all_gather | 1 part | `n` parts | `Input` of rank `i` and `Output[i]` everywhere |
//! | gather | 1 part | `n` parts on the root, else none | as all_gather |
//! | scatter | `n` parts on the root, else none | 1 part | as reduce_scatter |
//! | all_to_all | `n` parts | `n` parts | `Input[j]` of rank `i` and `Output[i]` of rank `j` |
//! | barrier | none | none | |
//!
//! Parts of different rows of the last column may differ in length, unless the algorithm says `equal_parts`.
//!
//! Not here: bytes, time, threads, failure. A plan cannot fail, only be wrong, and `verify` detects that.

#![warn(missing_docs)]

mod algorithm;
mod all_gather;
mod all_reduce;
mod all_to_all;
mod barrier;
mod broadcast;
mod choose;
mod gather;
mod plan;
mod reduce;
mod reduce_scatter;
mod scan;
mod scatter;
mod topology;
mod tree;
pub mod verify;

pub use algorithm::{ALGORITHMS, Algorithm, Kind, named, names};
pub use choose::{Needs, PIECE, choose, fingerprint};
pub use plan::{Area, Chunk, Place, Plan, Step};
pub use topology::{Rank, Topology};
