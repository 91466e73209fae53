//! Memory of tenfold.

mod dtype;
mod float8;
mod reduce;
mod reduce_op;
mod span;

pub use dtype::{DType, Element, UnknownDType};
pub use float8::{F8E4M3FN, F8E4M3FNUZ, F8E5M2, F8E5M2FNUZ};
pub use reduce::{Level, Reduction};
pub use reduce_op::{CustomFunction, CustomOp, ReduceOp, UnknownOp, Unsupported, supports};
pub use span::{Bytes, Span};
