//! Collective algorithms as data.
#![forbid(unsafe_code)]

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
mod scatter;
mod topology;
mod tree;
pub mod verify;

pub use algorithm::{ALGORITHMS, Algorithm, Kind, named, names};
pub use choose::{Needs, PIECE, choose};
pub use plan::{Buffer, Chunk, Plan, Step};
pub use topology::{Rank, Topology};
