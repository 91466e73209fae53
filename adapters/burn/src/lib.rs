//! Data-parallel training with burn.
//!
//! [`DataParallel`] keeps the copies of a model on all ranks equal: it starts with rank 0's values and averages the gradients
//! of every step. [`all_reduce`], [`broadcast`] and [`all_gather`] work on single tensors, and [`broadcast_model`] on a model.
//!
//! ```
//! use burn::tensor::{Device, Tensor};
//! use tenfold::{Group, ReduceOp};
//!
//! let sums = Group::threads(2, |group| {
//!     let own = Tensor::<1>::from_data([1.0, group.rank() as f32], &Device::default());
//!     let sum = tenfold_burn::all_reduce(&group, &own, ReduceOp::Sum).expect("both ranks are alive");
//!     Ok(sum.to_data().try_to_vec::<f32>().expect("it has 32-bit floats"))
//! })?;
//! assert_eq!(sums, [[2.0, 1.0]; 2]);
//! # Ok::<(), tenfold::Error>(())
//! ```
//!
//! The types are those that `burn` exports: this crate depends on the parts of burn that define them.
//!
//! Not here: anything about processes and networks (`tenfold`), layers and optimizers (`burn`).

#![warn(missing_docs)]

mod data_parallel;
mod model;
mod tensors;

use std::fmt;

use burn_core::tensor::{DType, DataError, TensorReadError};
pub use data_parallel::DataParallel;
pub use model::broadcast_model;
pub use tensors::{all_gather, all_reduce, broadcast};

/// The result of an operation on burn's tensors.
pub type Result<T> = std::result::Result<T, Error>;

/// What went wrong.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// burn could not read a tensor.
    Burn(TensorReadError),
    /// The group failed, or refused the call.
    Group(tenfold::Error),
    /// A dtype that cannot be sent, such as quantized floats. Of a parameter with its name, else without.
    DType(DType, Option<String>),
    /// No parameter of the model requires gradients.
    Untrained,
    /// The model is not the one that the [`DataParallel`] was made for, and how it differs.
    Model(String),
    /// Ranks that could not take part. Each of them has reported why.
    Peers(Vec<usize>),
    /// Ranks whose parameters differ from those of rank 0.
    Replicas(Vec<usize>),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Burn(error) => error.fmt(f),
            Error::Group(error) => error.fmt(f),
            Error::DType(dtype, None) => write!(f, "tensors of dtype {} cannot be sent", dtype.name()),
            Error::DType(dtype, Some(parameter)) => {
                let dtype = dtype.name();
                write!(f, "parameter `{parameter}` of dtype {dtype} cannot be sent: cast or dequantize it first")
            }
            Error::Untrained => f.write_str(
                "no parameter of the model requires gradients: create the model on a device with autodiff, such as \
                 `Device::default().autodiff()`",
            ),
            Error::Model(difference) => {
                write!(f, "the model has changed since `DataParallel::new`: {difference}")
            }
            Error::Peers(ranks) => write!(f, "ranks {ranks:?} could not take part: see their errors"),
            Error::Replicas(ranks) => write!(f, "ranks {ranks:?} have other parameters than rank 0"),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Error::Burn(error) => Some(error),
            Error::Group(error) => Some(error),
            _ => None,
        }
    }
}

impl From<TensorReadError> for Error {
    fn from(error: TensorReadError) -> Self {
        Error::Burn(error)
    }
}

impl From<DataError> for Error {
    fn from(error: DataError) -> Self {
        Error::Burn(error.into())
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
