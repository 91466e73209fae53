//! Memory of tenfold.

mod span;

pub use span::{Bytes, Span};
