//! Operations on single tensors.
//!
//! burn hands out the elements of a tensor as [`TensorData`], in order and in the memory of the CPU. An operation works on
//! those, in place, and makes a tensor of them again.

use burn_core::tensor::kind::{Basic, Numeric};
use burn_core::tensor::{Element as BurnElement, Tensor, TensorData, TensorReadError};
use tenfold::{Element, Group, Rank, ReduceOp};

use crate::Result;

/// Runs `$body` with `$T` as the Rust type of a dtype that both libraries have.
macro_rules! with_element {
    ($dtype:expr, $T:ident => $body:expr) => {
        crate::tensors::with_element!(@match $dtype, $T => $body,
            F32 => f32, F64 => f64, F16 => burn_core::tensor::f16, BF16 => burn_core::tensor::bf16,
            I8 => i8, I16 => i16, I32 => i32, I64 => i64, U8 => u8, U16 => u16, U32 => u32, U64 => u64)
    };
    (@match $dtype:expr, $T:ident => $body:expr, $($name:ident => $element:ty),*) => {
        match $dtype {
            $(burn_core::tensor::DType::$name => {
                type $T = $element;
                $body
            })*
            burn_core::tensor::DType::Bool(burn_core::tensor::BoolStore::Native) => {
                type $T = bool;
                $body
            }
            burn_core::tensor::DType::Bool(burn_core::tensor::BoolStore::U8) => {
                type $T = u8;
                $body
            }
            burn_core::tensor::DType::Bool(burn_core::tensor::BoolStore::U32) => {
                type $T = u32;
                $body
            }
            other => Err(crate::Error::DType(other, None)),
        }
    };
}
pub(crate) use with_element;

/// The elements of a tensor, in order.
pub(crate) fn read<const D: usize, K: Basic>(tensor: Tensor<D, K>) -> Result<TensorData> {
    Ok(tensor.try_into_data().map_err(TensorReadError::from)?)
}

/// A tensor of the same dtype, on the same device, with other elements.
fn like<const D: usize, K: Basic>(tensor: &Tensor<D, K>, data: TensorData) -> Tensor<D, K> {
    Tensor::from_data(data, (&tensor.device(), tensor.dtype()))
}

/// The combination of the tensors of all ranks. All have the same dtype and number of elements. The result is not connected
/// with `tensor` for autodiff.
///
/// # Errors
/// If the dtype cannot be sent or does not have the operation, or if the group fails.
pub fn all_reduce<const D: usize, K: Numeric>(
    group: &Group,
    tensor: &Tensor<D, K>,
    op: ReduceOp,
) -> Result<Tensor<D, K>> {
    fn run<T: BurnElement + Element>(group: &Group, data: &mut TensorData, op: ReduceOp) -> Result<()> {
        Ok(group.all_reduce(data.as_mut_slice::<T>()?, op)?)
    }
    let mut data = read(tensor.clone())?;
    with_element!(tensor.dtype(), T => run::<T>(group, &mut data, op))?;
    Ok(like(tensor, data))
}

/// The tensor of rank `root`, on all ranks. The other ranks give one of the same dtype and shape.
///
/// # Errors
/// If the dtype cannot be sent, or if the group fails.
pub fn broadcast<const D: usize, K: Basic>(
    group: &Group,
    tensor: &Tensor<D, K>,
    root: Rank,
) -> Result<Tensor<D, K>> {
    fn run<T: BurnElement + Element>(group: &Group, data: &mut TensorData, root: Rank) -> Result<()> {
        Ok(group.broadcast(data.as_mut_slice::<T>()?, root)?)
    }
    let mut data = read(tensor.clone())?;
    with_element!(tensor.dtype(), T => run::<T>(group, &mut data, root))?;
    Ok(like(tensor, data))
}

/// The tensors of all ranks, in the order of ranks, on all ranks. All have the same dtype and shape.
///
/// ```
/// use burn::tensor::{Device, Int, Tensor};
///
/// let rows = tenfold::Group::threads(2, |group| {
///     let own = Tensor::<1, Int>::from_data([group.rank() as i64; 3], &Device::default());
///     let all = tenfold_burn::all_gather(&group, &own).expect("both ranks are alive");
///     Ok(Tensor::stack::<2>(all, 0).to_data().shape().to_vec())
/// })?;
/// assert_eq!(rows, [[2, 3]; 2]);
/// # Ok::<(), tenfold::Error>(())
/// ```
///
/// # Errors
/// If the dtype cannot be sent, or if the group fails.
pub fn all_gather<const D: usize, K: Basic>(
    group: &Group,
    tensor: &Tensor<D, K>,
) -> Result<Vec<Tensor<D, K>>> {
    fn run<T: BurnElement + Element>(group: &Group, own: &TensorData) -> Result<Vec<TensorData>> {
        let elements = own.as_slice::<T>()?;
        let mut all = vec![<T as Element>::zero(); elements.len() * group.size()];
        group.all_gather_into(&mut all, elements)?;
        let part = |rank: usize| {
            let mut data = own.clone();
            data.as_mut_slice::<T>()?.copy_from_slice(&all[rank * elements.len()..][..elements.len()]);
            Ok(data)
        };
        (0..group.size()).map(part).collect()
    }
    let own = read(tensor.clone())?;
    let all = with_element!(tensor.dtype(), T => run::<T>(group, &own))?;
    Ok(all.into_iter().map(|data| like(tensor, data)).collect())
}
