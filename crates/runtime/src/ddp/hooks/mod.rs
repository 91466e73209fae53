//! Ways to reduce a bucket.
//!
//! | hook | bytes that travel, of f32 | what is lost |
//! |---|---|---|
//! | none, [`AllReduce`] | all | nothing |
//! | [`Compress`] to f16 or bf16 | half | bits of each gradient |
//! | [`Int8`] | a quarter, to every rank | bits, which later iterations make up for |
//! | [`PowerSgd`] | `rank · (rows + columns)` of a matrix | all but a few directions, which later iterations make up for |
//! | [`PostLocalSgd`] | only between neighbours | agreement, until [`OuterAveraging`] restores it |

mod all_reduce;
mod compress;
mod post_local;
mod power_sgd;
mod quantize;

pub use all_reduce::AllReduce;
pub use compress::Compress;
pub use post_local::{OuterAveraging, PostLocalSgd};
pub use power_sgd::PowerSgd;
pub use quantize::Int8;

use std::collections::HashMap;

use super::bucket::allocate;
use super::{GradBucket, numbers};
use crate::{Buffer, DType, Group};

/// Tensors that a hook needs for each bucket, kept from one iteration to the next.
#[derive(Debug, Default)]
struct Spare(HashMap<usize, Buffer>);

impl Spare {
    /// That of a bucket, with whatever it holds; zeroes if there is none of this kind.
    fn of(&mut self, bucket: usize, group: &Group, dtype: DType, elements: usize) -> &mut Buffer {
        let fits =
            |tensor: &Buffer| tensor.dtype() == dtype && tensor.elements() == elements && !tensor.is_lent();
        if !self.0.get(&bucket).is_some_and(fits) {
            self.0.insert(bucket, allocate(group, dtype, elements));
        }
        self.0.get_mut(&bucket).expect("it was just put there")
    }

    fn get(&self, bucket: usize) -> &Buffer {
        self.0.get(&bucket).expect("a bucket is launched before it lands")
    }
}

/// `bucket /= ranks`
fn average(bucket: &mut GradBucket, ranks: usize) {
    let buffer = bucket.buffer_mut();
    let dtype = buffer.dtype();
    numbers::divide(buffer.as_mut_bytes(), dtype, ranks);
}

#[cfg(test)]
mod tests;
