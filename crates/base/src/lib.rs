#![doc = include_str!("../README.md")]
#![warn(missing_docs)]

mod deadline;
mod exposition;
mod fault;
mod show;

pub use deadline::Deadline;
pub use exposition::Exposition;
pub use fault::{ErrorKind, Fault};
pub use show::{panic_text, show_duration, show_ranks};
