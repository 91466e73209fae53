//! Process groups.

mod fault;
mod label;
mod transport;

pub use fault::{Error, Fault, FaultKind, Result, Scene};
pub use label::{Label, OpKind};
