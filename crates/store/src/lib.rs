#![doc = include_str!("story.md")]

mod deadline;
mod error;
mod file;
mod ops;
mod request;
mod table;
pub mod wire;

pub use deadline::Deadline;
pub use error::{Error, Fault, FaultKind, Result, Scene, show_duration};
pub use file::{FileStore, FileStoreOptions};
pub use ops::{DEFAULT_TIMEOUT, Store, StoreExt};
pub use request::{Bytes, Operation, Request, Response, Value, show_keys};
pub use table::{ClientId, Refusal, Replies, Table, TableLimits, Waiter};
