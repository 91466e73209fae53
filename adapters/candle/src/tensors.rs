//! Operations on single tensors.

use candle_core::{Tensor, WithDType};
use tenfold::{Element, Group, Rank, ReduceOp};

use crate::{Error, Result};

/// Runs `$body` with `$T` as the Rust type of a dtype that both libraries have.
macro_rules! with_element {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            candle_core::DType::F32 => {
                type $T = f32;
                $body
            }
            candle_core::DType::F64 => {
                type $T = f64;
                $body
            }
            candle_core::DType::F16 => {
                type $T = half::f16;
                $body
            }
            candle_core::DType::BF16 => {
                type $T = half::bf16;
                $body
            }
            candle_core::DType::U8 => {
                type $T = u8;
                $body
            }
            candle_core::DType::U32 => {
                type $T = u32;
                $body
            }
            candle_core::DType::I16 => {
                type $T = i16;
                $body
            }
            candle_core::DType::I32 => {
                type $T = i32;
                $body
            }
            candle_core::DType::I64 => {
                type $T = i64;
                $body
            }
            other => Err(crate::Error::DType(other)),
        }
    };
}
pub(crate) use with_element;

/// The elements of a tensor, in order.
pub(crate) fn elements<T: WithDType>(tensor: &Tensor) -> Result<Vec<T>> {
    Ok(tensor.flatten_all()?.to_vec1()?)
}

/// A tensor of the same shape, on the same device, with other elements.
fn like<T: WithDType>(tensor: &Tensor, elements: Vec<T>) -> Result<Tensor> {
    Ok(Tensor::from_vec(elements, tensor.shape(), tensor.device())?)
}

/// The combination of the tensors of all ranks. All have the same dtype and number of elements. The result is not connected
/// with `tensor` for autograd.
///
/// # Errors
/// If the dtype cannot be sent or does not have the operation, or if the group fails.
pub fn all_reduce(group: &Group, tensor: &Tensor, op: ReduceOp) -> Result<Tensor> {
    fn run<T: WithDType + Element>(group: &Group, tensor: &Tensor, op: ReduceOp) -> Result<Tensor> {
        let mut values = elements::<T>(tensor)?;
        group.all_reduce(&mut values, op)?;
        like(tensor, values)
    }
    with_element!(tensor.dtype(), T => run::<T>(group, tensor, op))
}

/// The tensor of rank `root`, on all ranks. The other ranks give one of the same dtype and shape.
///
/// # Errors
/// If the dtype cannot be sent, or if the group fails.
pub fn broadcast(group: &Group, tensor: &Tensor, root: Rank) -> Result<Tensor> {
    fn run<T: WithDType + Element>(group: &Group, tensor: &Tensor, root: Rank) -> Result<Tensor> {
        let mut values = elements::<T>(tensor)?;
        group.broadcast(&mut values, root)?;
        like(tensor, values)
    }
    with_element!(tensor.dtype(), T => run::<T>(group, tensor, root))
}

/// The tensors of all ranks along a new first dimension, on all ranks. All have the same dtype and shape.
///
/// # Errors
/// If the dtype cannot be sent, or if the group fails.
pub fn all_gather(group: &Group, tensor: &Tensor) -> Result<Tensor> {
    fn run<T: WithDType + Element>(group: &Group, tensor: &Tensor) -> Result<Tensor> {
        let own = elements::<T>(tensor)?;
        let mut all = vec![<T as Element>::zero(); own.len() * group.size()];
        group.all_gather_into(&mut all, &own)?;
        let shape: Vec<usize> = std::iter::once(group.size()).chain(tensor.dims().iter().copied()).collect();
        Ok(Tensor::from_vec(all, shape, tensor.device())?)
    }
    with_element!(tensor.dtype(), T => run::<T>(group, tensor))
}

/// The dtype as tenfold calls it.
pub(crate) fn dtype_of(dtype: candle_core::DType) -> Result<tenfold::DType> {
    with_element!(dtype, T => Ok::<_, Error>(<T as Element>::DTYPE))
}
