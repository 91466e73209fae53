//! Process groups.

mod engine;
mod environment;
mod fabric;
mod fault;
mod group;
mod label;
mod network;
mod patience;
mod run;
mod transport;
mod wire;
mod work;

pub use fault::{Error, Fault, FaultKind, Result, Scene};
pub use group::{Group, Options, SparseTensor};
pub use label::{Label, OpKind};
pub use tenfold_memory::{CustomOp, DType, Element, ReduceOp, Tensor, TensorView, lend};
pub use tenfold_plan::{Rank, Topology};
pub use work::Work;
