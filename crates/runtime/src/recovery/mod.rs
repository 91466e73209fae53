//! Which ranks continue after a failure, and which processes become a group: decisions only.
//!
//! When ranks die, the survivors must continue with the same smaller group, although each of them notices a death at its own
//! time, may be wrong about it, and may die while they agree. An [`agreement`](agreement) decides that, and is all of
//! `shrink` and `agree`; [`ledger`](ledger) keeps the agreements of a group apart. A [`reshape`](reshape) decides with the
//! same protocol whether a list of processes becomes a group, or each of them keeps the group that it has.
//!
//! No store takes part. Letters travel on the control streams between ranks (see `fabric::councils`); a
//! [`council`](council) is all agreements of a group on one rank.
//!
//! Everything here is pure: no clock, no sockets, no threads. `model` runs random schedules of all of it with deaths, wrong
//! suspicions, partitions and lost messages, `small` every schedule of three ranks up to a bound.
//!
//! Not here: detecting deaths (see `fabric::watch`), connecting, making the new group (see `group::survivors` and `group::reconfigure`).

mod agreement;
mod council;
mod ledger;
mod message;
#[cfg(test)]
mod model;
mod quorum;
#[cfg(test)]
mod random;
mod ranks;
mod reshape;
#[cfg(test)]
mod small;

pub(crate) use council::{Agreed, Council, Limits, Question};
pub use quorum::Quorum;
pub(crate) use reshape::{Reshape, Reshaped, UsedIds};
