//! Collective communication for machine learning: c10d's process groups, in Rust.
//!
//! Ranks meet through a store ([`tenfold_store`]) and form a [`Group`]. Between ranks of one host messages go through
//! shared memory, between hosts over TCP; which is which is found out when they meet. A rank may also be a thread.
//!
//! ```
//! use tenfold::{Group, ReduceOp};
//!
//! // Four ranks as threads; processes that `tenfold run` starts call `Group::from_environment` instead.
//! let averages = Group::threads(4, |group| {
//!     let mut gradients = [1.0_f32, 2.0, 3.0];
//!     group.all_reduce(&mut gradients, ReduceOp::Avg)?;
//!     Ok(gradients)
//! })?;
//! assert_eq!(averages[3], [1.0, 2.0, 3.0]);
//! # Ok::<(), tenfold::Error>(())
//! ```
//!
//! Every operation has three forms: [`Group::all_reduce`] blocks, [`Scope::all_reduce`] overlaps with other work on borrowed
//! memory (see [`Group::scope`]), and [`Group::start_all_reduce`] takes a [`BufferView`] and returns a [`Work`].
//!
//! What a call does, in the order of the modules: `group` checks it and picks a plan; `engine` drives it, on the thread that
//! waits; `run` executes the plan's steps; `transport` carries the messages; `fabric` knows the peers and watches
//! over their lives. An operation never hangs silently: see [`Error`].
//!
//! Not here: algorithms (`tenfold-plan`), memory and arithmetic (`tenfold-memory`), rendezvous (`tenfold-store`).

#![warn(missing_docs)]

mod call;
#[cfg(feature = "control")]
pub mod control;
#[cfg(not(feature = "control"))]
#[path = "control/absent.rs"]
mod control;
pub mod ddp;
pub mod debug;
mod engine;
mod environment;
mod fabric;
mod fake;
mod fault;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod group;
mod label;
mod members;
pub mod metrics;
mod network;
mod patience;
pub mod recorder;
mod recovery;
pub mod registry;
mod run;
mod transport;
mod wire;
mod work;

pub use call::{Backend, Call, Tag};
pub use fake::FakeGroup;
pub use fault::{Error, ErrorKind, Result};
pub use group::{Group, Options, Pending, Place, Scope, Seat, SparseTensor, StuckPolicy};
pub use label::OpKind;
pub use members::{Members, Recovered};
pub use recovery::Quorum;
pub use tenfold_memory::{Buffer, BufferView, CustomOp, DType, Element, ReduceOp};
pub use tenfold_plan::{Rank, Topology};
pub use tenfold_store as store;
pub use work::Work;

/// What an [`Error`] is made of.
///
/// ```
/// use tenfold::error::Scene;
///
/// tenfold::Group::threads(1, |group| {
///     let error = group.broadcast(&mut [0_u8], 7).unwrap_err();
///     let scene: &Scene = error.scene().expect("an operation has one");
///     assert_eq!((scene.rank, scene.label.kind), (0, tenfold::OpKind::Broadcast));
///     Ok(())
/// })?;
/// # Ok::<(), tenfold::Error>(())
/// ```
pub mod error {
    pub use crate::fault::{Error, ErrorKind, Fault, Result, Scene};
    pub use crate::label::Label;
    pub use tenfold_memory::UnknownOp;
}

/// For authors of frameworks, bindings and launchers: memory of other libraries that peers read in place, and what a process
/// tells its launcher.
pub mod raw {
    pub use crate::environment::{KnownVariable, VARIABLES};
    pub use crate::fabric::{ProgressEntry, Registration};
    pub use crate::group::StuckReport;
    pub use tenfold_memory::Region;
}

/// The README's Rust runs as a test.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;

/// And that of the guide to groups.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/groups.md")]
struct Guide;

/// And that of the guide to recovery.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/recovery.md")]
struct Recovery;
