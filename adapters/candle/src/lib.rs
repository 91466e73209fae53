//! Data-parallel training with candle.
//!
//! [`DataParallel`] keeps the copies of a model on all ranks equal: it starts with rank 0's values and averages the gradients
//! of every step. [`all_reduce`], [`broadcast`] and [`all_gather`] work on single tensors.
//!
//! ```
//! use candle_core::{Device, Tensor};
//! use tenfold::{Group, ReduceOp};
//!
//! let sums = Group::threads(2, |group| {
//!     let own = Tensor::new(&[1.0_f32, group.rank() as f32], &Device::Cpu).expect("a short tensor");
//!     let sum = tenfold_candle::all_reduce(&group, &own, ReduceOp::Sum).expect("both ranks are alive");
//!     Ok(sum.to_vec1::<f32>().expect("it has one dimension"))
//! })?;
//! assert_eq!(sums, [[2.0, 1.0]; 2]);
//! # Ok::<(), tenfold::Error>(())
//! ```
//!
//! Not here: anything about processes and networks (`tenfold`), layers and optimizers (`candle-nn`).

#![warn(missing_docs)]

mod data_parallel;
mod tensors;

use std::fmt;

pub use data_parallel::DataParallel;
pub use tensors::{all_gather, all_reduce, broadcast};

/// The result of an operation on candle's tensors.
pub type Result<T> = std::result::Result<T, Error>;

/// What went wrong.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// candle reported it.
    Candle(candle_core::Error),
    /// The group failed, or refused the call.
    Group(tenfold::Error),
    /// A dtype that cannot be sent, such as candle's 4-bit floats.
    DType(candle_core::DType),
    /// Ranks whose parameters differ from those of rank 0.
    Replicas(Vec<usize>),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Candle(error) => error.fmt(f),
            Error::Group(error) => error.fmt(f),
            Error::DType(dtype) => write!(f, "tensors of dtype {} cannot be sent", dtype.as_str()),
            Error::Replicas(ranks) => write!(f, "ranks {ranks:?} have other parameters than rank 0"),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Error::Candle(error) => Some(error),
            Error::Group(error) => Some(error),
            Error::DType(_) | Error::Replicas(_) => None,
        }
    }
}

impl From<candle_core::Error> for Error {
    fn from(error: candle_core::Error) -> Self {
        Error::Candle(error)
    }
}

impl From<tenfold::Error> for Error {
    fn from(error: tenfold::Error) -> Self {
        Error::Group(error)
    }
}

/// The README's Rust is compiled as a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
