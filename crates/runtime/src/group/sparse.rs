//! The sum of sparse tensors.

use std::collections::BTreeMap;

use tenfold_memory::{Buffer, BufferView, Bytes, DType, ReduceOp, Reduction, Span};

use super::Group;
use crate::fault::Result;
use crate::label::{Label, OpKind};

/// A tensor of which only some elements are given: coordinates, and the values there.
///
/// ```
/// use tenfold::{Buffer, Group, SparseTensor};
///
/// Group::threads(2, |group| {
///     let rows = vec![0, group.rank() as i64]; // of a table with 10 rows of one element
///     let own = SparseTensor { shape: vec![10], indices: rows, dense: 1, values: Buffer::from_slice(&[1.0_f32, 1.0]) };
///     let sum = group.all_reduce_sparse(&own)?;
///     assert_eq!(sum.indices, [0, 1]);
///     assert_eq!(sum.values.as_slice::<f32>(), [3.0, 1.0]);
///     Ok(())
/// })?;
/// # Ok::<(), tenfold::Error>(())
/// ```
#[derive(Debug)]
pub struct SparseTensor {
    /// Lengths of the dimensions that have coordinates.
    pub shape: Vec<usize>,
    /// The coordinates of each value, one after the other: `values × shape.len()` numbers.
    pub indices: Vec<i64>,
    /// For every coordinate so many elements: the dense dimensions.
    pub dense: usize,
    /// The values, `dense` elements for each coordinate.
    pub values: Buffer,
}

impl SparseTensor {
    fn count(&self) -> usize {
        self.indices.len() / self.shape.len().max(1)
    }
}

impl Group {
    /// The sum of all ranks' sparse tensors, on all ranks: coordinates in ascending order, each once. Blocks.
    ///
    /// # Errors
    /// If shapes differ between ranks, a coordinate is out of range, or the group fails.
    pub fn all_reduce_sparse(&self, tensor: &SparseTensor) -> Result<SparseTensor> {
        let dtype = tensor.values.dtype();
        let label = Label::new(OpKind::AllReduceSparse, 0).elements(dtype, tensor.shape.iter().product());
        let label = label.reduction(&ReduceOp::Sum);
        let reduction = self.reduction(&label, &ReduceOp::Sum, dtype)?;
        self.check_sparse(&label, tensor)?;
        let dims = tensor.shape.len();
        let facts = [tensor.count() as i64, dims as i64, tensor.dense as i64, fingerprint(&tensor.shape)];
        let all = self.exchange(&facts)?;
        if let Some(other) = all.iter().position(|theirs| theirs[1..] != facts[1..]) {
            return self.refuse(
                &label,
                format!("rank {other} has a sparse tensor of another shape than rank {}", self.rank()),
            );
        }
        let counts: Vec<usize> = all.iter().map(|facts| facts[0] as usize).collect();
        let indices = self.gather_all(TensorSource::Indices(&tensor.indices), &counts, dims)?;
        let values = self.gather_all(TensorSource::Values(&tensor.values), &counts, tensor.dense)?;
        Ok(sum_up(tensor, &reduction, &indices, &values))
    }

    fn check_sparse(&self, label: &Label, tensor: &SparseTensor) -> Result<()> {
        let dims = tensor.shape.len();
        if dims == 0 || !tensor.indices.len().is_multiple_of(dims) {
            let message =
                format!("{} coordinates are not a multiple of {dims} dimensions", tensor.indices.len());
            return self.refuse(label, message);
        }
        if tensor.values.elements() != tensor.count() * tensor.dense {
            let (have, need) = (tensor.values.elements(), tensor.count() * tensor.dense);
            return self.refuse(label, format!("there are {have} values where {need} belong"));
        }
        let inside =
            |(index, at): (usize, &i64)| usize::try_from(*at).is_ok_and(|at| at < tensor.shape[index % dims]);
        match tensor.indices.iter().enumerate().find(|entry| !inside(*entry)) {
            None => Ok(()),
            Some((index, at)) => {
                let message = format!(
                    "coordinate {at} is outside dimension {} of {}",
                    index % dims,
                    tensor.shape[index % dims]
                );
                self.refuse(label, message)
            }
        }
    }

    /// All ranks' numbers, of which rank `r` has `counts[r] × each`.
    fn gather_all(&self, own: TensorSource<'_>, counts: &[usize], each: usize) -> Result<Vec<Buffer>> {
        let dtype = own.dtype();
        let mut outputs: Vec<Buffer> =
            counts.iter().map(|count| Buffer::zeros(dtype, count * each)).collect();
        let mut input = Buffer::zeros(dtype, counts[self.rank()] * each);
        own.copy_to(&mut input);
        let views: Vec<BufferView> = outputs.iter_mut().map(Buffer::lend).collect();
        self.all_gather_as(OpKind::AllReduceSparse, views, input.lend())?.wait()?;
        Ok(outputs)
    }
}

enum TensorSource<'a> {
    Indices(&'a [i64]),
    Values(&'a Buffer),
}

impl TensorSource<'_> {
    fn dtype(&self) -> DType {
        match self {
            TensorSource::Indices(_) => DType::I64,
            TensorSource::Values(values) => values.dtype(),
        }
    }

    fn copy_to(&self, target: &mut Buffer) {
        match self {
            TensorSource::Indices(indices) => target.as_mut_slice().copy_from_slice(indices),
            TensorSource::Values(values) => target.as_mut_bytes().copy_from_slice(values.as_bytes()),
        }
    }
}

/// Adds values with equal coordinates, rank by rank.
fn sum_up(like: &SparseTensor, reduction: &Reduction, indices: &[Buffer], values: &[Buffer]) -> SparseTensor {
    let (dims, dtype) = (like.shape.len(), like.values.dtype());
    let row = like.dense * dtype.size();
    let mut sums: BTreeMap<Vec<i64>, Vec<u8>> = BTreeMap::new();
    for (indices, values) in indices.iter().zip(values) {
        for (number, at) in indices.as_slice::<i64>().chunks(dims).enumerate() {
            let value = &values.as_bytes()[number * row..(number + 1) * row];
            match sums.get_mut(at) {
                None => _ = sums.insert(at.to_vec(), value.to_vec()),
                Some(sum) => {
                    let sum = Span::of(sum);
                    reduction.combine(sum, &[sum.bytes(), Bytes::of(value)], false);
                }
            }
        }
    }
    let mut total = Buffer::zeros(dtype, sums.len() * like.dense);
    let bytes = total.as_mut_bytes();
    for (number, sum) in sums.values().enumerate() {
        bytes[number * row..(number + 1) * row].copy_from_slice(sum);
    }
    let indices = sums.into_keys().flatten().collect();
    SparseTensor { shape: like.shape.clone(), indices, dense: like.dense, values: total }
}

/// A number that differs where shapes do.
fn fingerprint(shape: &[usize]) -> i64 {
    shape.iter().fold(1_i64, |hash, len| hash.wrapping_mul(1_000_003).wrapping_add(*len as i64))
}
