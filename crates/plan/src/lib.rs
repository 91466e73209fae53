//! Collective algorithms as data.

mod plan;
mod topology;

pub use plan::{Buffer, Chunk, Plan, Step};
pub use topology::{Rank, Topology};
