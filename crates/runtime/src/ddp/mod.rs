//! Data-parallel training: every rank computes gradients of its own data, and all get the average.
//!
//! A [`Reducer`] owns the memory of the gradients, in buckets that peers on the same host read in place. The caller writes a
//! gradient and says that it is ready; as soon as a bucket and all before it are whole, its reduction begins, while the
//! caller goes on with the next gradients. [`Reducer::finish`] waits for what is left.
//!
//! ```
//! use tenfold::ddp::{Options, Param, Reducer};
//! use tenfold::{DType, Group};
//!
//! let averages = Group::threads(2, |group| {
//!     let model = [Param::new("weight", &[2, 3], DType::F32), Param::new("bias", &[2], DType::F32)];
//!     let mut reducer = Reducer::new(&group, &model, Options::default())?;
//!     for _step in 0..3 {
//!         reducer.start_backward()?;
//!         for param in [1, 0] {
//!             reducer.gradient_mut::<f32>(param)?.fill(group.rank() as f32); // what backward computes
//!             reducer.grad_ready(param)?;
//!         }
//!         reducer.finish()?;
//!     }
//!     Ok(reducer.gradient::<f32>(0)?.to_vec())
//! })?;
//! assert_eq!(averages, [[0.5; 6]; 2]);
//! # Ok::<(), tenfold::Error>(())
//! ```
//!
//! What is reduced how can be replaced by a [`CommHook`]; see [`hooks`] for compression, PowerSGD, quantisation and local SGD.
//! Names, numbers and rounding are those of PyTorch's `DistributedDataParallel`; where it hangs or diverges, this fails on all
//! ranks and says why.
//!
//! - `buckets`: which gradients travel together, and when; pure
//! - `bucket`: the memory of one bucket; `numbers`: its arithmetic
//! - `reducer`: an iteration; `complaint`: what ranks tell each other when one fails
//! - `autograd`: when an iteration starts, for a framework that reports events; pure
//! - `verify`: do all ranks have the same model?; `logger`: what happened, in c10d's words
//!
//! Not here: autograd, and anything else of a framework.

pub mod autograd;
mod broadcast;
mod bucket;
mod buckets;
mod complaint;
mod hook;
pub mod hooks;
mod logger;
mod numbers;
mod options;
mod reducer;
mod verify;

pub use broadcast::{BROADCAST_BYTES, broadcast_coalesced};
pub use bucket::GradBucket;
pub use buckets::{BUCKET_BYTES, FIRST_BUCKET_BYTES};
pub use hook::{CommHook, hook_error};
pub use logger::Statistics;
pub use options::{Divisor, Options};
pub use reducer::Reducer;

/// For authors of frameworks: what [`Reducer`] does beyond what its users need, and the parts it is made of.
pub mod raw {
    pub use super::buckets::{Assignment, Buckets, Graph, Misuse, assign_by_size, is_order_of};
    pub use super::logger::{Logger, LoggingData};
    pub use super::reducer::Rebuilt;
    pub use super::reducer::raw::Framework;
    pub use super::verify::verify_params;
}

use crate::DType;

/// A parameter of a model: what its gradient looks like.
///
/// ```
/// use tenfold::{DType, ddp::Param};
/// let weight = Param::new("layer1.weight", &[2, 3], DType::F32);
/// assert_eq!((weight.elements(), weight.bytes()), (6, 24));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Param {
    /// For messages; ranks need not agree.
    pub name: String,
    /// The lengths of its dimensions.
    pub shape: Vec<usize>,
    /// The type of its elements.
    pub dtype: DType,
    /// Its gradient is given as a [`SparseTensor`](crate::SparseTensor).
    pub sparse: bool,
}

impl Param {
    /// With a dense gradient.
    pub fn new(name: impl Into<String>, shape: &[usize], dtype: DType) -> Self {
        Param { name: name.into(), shape: shape.to_vec(), dtype, sparse: false }
    }

    /// The same with a sparse gradient.
    #[must_use]
    pub fn sparse(mut self) -> Self {
        self.sparse = true;
        self
    }

    /// How many elements it has.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// How many bytes they take.
    pub fn bytes(&self) -> usize {
        self.elements() * self.dtype.size()
    }
}

/// The guide's Rust runs as a test.
#[cfg(doctest)]
#[doc = include_str!("../../../../docs/ddp.md")]
struct Guide;
