#![doc = include_str!("story.md")]
#![warn(missing_docs)]

#[cfg(test)]
extern crate self as tenfold_store; // a test shares a file with those outside

mod client;
mod collectives;
mod connect;
mod connection;
mod error;
mod file;
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub mod fuzzing;
mod hash;
mod listen;
mod map;
mod ops;
pub mod owner;
mod prefix;
mod relay;
mod request;
mod server;
mod sessions;
mod survey;
mod table;
mod turns;
mod value;
pub mod wire;

pub use client::{TcpStore, TcpStoreOptions};
pub use collectives::{StoreCollectives, init_barrier};
pub use error::{Error, Result, Scene};
pub use file::{FileStore, FileStoreOptions};
pub use hash::HashStore;
pub use listen::listen;
pub use ops::{DEFAULT_TIMEOUT, Store, StoreExt};
pub use prefix::PrefixStore;
pub use relay::{Relay, RelayFacts, RelayOptions};
pub use request::{Bytes, Operation, Request, Response, show_keys};
pub use server::{
    ClientFacts, Clients, Closed, Facts, Limits, Server, ServerOptions, SlowOperation, WaiterFacts,
};
pub use survey::{KeyKind, Survey, SurveyEntry, SurveyGroup};
pub use table::{ClientId, Refusal, Replies, Table, TableLimits, Waiter};
pub use tenfold_base::{Deadline, ErrorKind, Fault, show_duration};
pub use value::Value;
pub use wire::MessageLimits;
