//! What can be wrong with a group, and what is said about it: ranks that called different things, ranks that are late or stuck,
//! numbers that are not finite. The pure parts are here; `state/` feeds them.

pub(crate) mod arrivals;
pub(super) mod comparison;
pub(crate) mod detail;
mod nan;
pub(crate) mod stuck;

pub use nan::find_nan;
