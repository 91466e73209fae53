//! Process groups.

mod environment;
mod fault;
mod label;
mod network;
mod run;
mod transport;
mod wire;

pub use fault::{Error, Fault, FaultKind, Result, Scene};
pub use label::{Label, OpKind};
