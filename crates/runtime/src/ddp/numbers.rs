//! The arithmetic of gradients: divide, add, convert.
//!
//! All of it is done by the kernels of collectives, so that it rounds as they do, and as PyTorch does.

use half::slice::HalfFloatSliceExt as _;
use half::{bf16, f16};
use tenfold_memory::{Bytes, Reduction, Span};

use crate::{Buffer, DType, ReduceOp};

/// Dtypes that gradients have, and convert into each other.
pub(super) fn is_convertible(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::F64 | DType::F16 | DType::BF16)
}

fn kernel(op: ReduceOp, dtype: DType, ranks: usize) -> Reduction {
    Reduction::new(&op, dtype, ranks)
        .expect("gradients are floats or complex, which have every kernel used here")
}

/// Can gradients be of this dtype?
pub(super) fn is_gradient(dtype: DType) -> bool {
    tenfold_memory::supports(&ReduceOp::Avg, dtype)
}

/// `target /= divisor`, as PyTorch's reducer does where the gradient lies in the bucket.
pub(super) fn divide(target: &mut [u8], dtype: DType, divisor: usize) {
    if divisor > 1 {
        let target = Span::of(target);
        kernel(ReduceOp::Avg, dtype, divisor).combine(target, &[target.bytes()], true);
    }
}

/// `target = source · (1 / divisor)`, as PyTorch's reducer does where the gradient is copied in: one rounding more.
pub(super) fn copy_divided(target: &mut [u8], source: &[u8], dtype: DType, divisor: usize) {
    kernel(ReduceOp::PremulSum(1.0 / divisor as f64), dtype, 1).prepare(Span::of(target), Bytes::of(source));
}

/// As [`copy_divided`], in place.
pub(super) fn divide_as_copied(target: &mut [u8], dtype: DType, divisor: usize) {
    let target = Span::of(target);
    kernel(ReduceOp::PremulSum(1.0 / divisor as f64), dtype, 1).prepare(target, target.bytes());
}

/// `target += source`
pub(super) fn add(target: &mut [u8], source: &[u8], dtype: DType) {
    let target = Span::of(target);
    kernel(ReduceOp::Sum, dtype, 1).combine(target, &[target.bytes(), Bytes::of(source)], false);
}

/// Writes the elements of `source` in the dtype of `target`, each rounded to the nearest.
///
/// # Panics
/// If the lengths differ, or a dtype is not [convertible](is_convertible).
pub(super) fn convert(source: &Buffer, target: &mut Buffer) {
    assert_eq!(source.elements(), target.elements(), "converted tensors are equally long");
    if source.dtype() == target.dtype() {
        return target.as_mut_bytes().copy_from_slice(source.as_bytes());
    }
    match (source.dtype(), target.dtype()) {
        (DType::F32, DType::F16) => target.as_mut_slice::<f16>().convert_from_f32_slice(source.as_slice()),
        (DType::F32, DType::BF16) => target.as_mut_slice::<bf16>().convert_from_f32_slice(source.as_slice()),
        (DType::F16, DType::F32) => source.as_slice::<f16>().convert_to_f32_slice(target.as_mut_slice()),
        (DType::BF16, DType::F32) => source.as_slice::<bf16>().convert_to_f32_slice(target.as_mut_slice()),
        (_, DType::F64) => {
            let values = to_f64(source);
            target.as_mut_slice::<f64>().copy_from_slice(&values);
        }
        // By way of f32, as PyTorch converts.
        _ => from_f32(to_f64(source).into_iter().map(|value| value as f32), target),
    }
}

fn to_f64(source: &Buffer) -> Vec<f64> {
    match source.dtype() {
        DType::F64 => source.as_slice::<f64>().to_vec(),
        DType::F32 => source.as_slice::<f32>().iter().map(|value| f64::from(*value)).collect(),
        DType::F16 => source.as_slice::<f16>().iter().map(|value| value.to_f64()).collect(),
        DType::BF16 => source.as_slice::<bf16>().iter().map(|value| value.to_f64()).collect(),
        other => unreachable!("{other} is not convertible, which the reducer checks"),
    }
}

fn from_f32(values: impl Iterator<Item = f32>, target: &mut Buffer) {
    match target.dtype() {
        DType::F32 => target.as_mut_slice::<f32>().iter_mut().zip(values).for_each(|(t, v)| *t = v),
        DType::F16 => target.as_mut_slice().iter_mut().zip(values).for_each(|(t, v)| *t = f16::from_f32(v)),
        DType::BF16 => target.as_mut_slice().iter_mut().zip(values).for_each(|(t, v)| *t = bf16::from_f32(v)),
        other => unreachable!("{other} is not convertible, which the reducer checks"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_float_converts_into_every_other_and_back() {
        let kinds = [DType::F32, DType::F64, DType::F16, DType::BF16];
        let mut origin = Buffer::from_slice(&[0.0_f32, -1.5, 3.0, 0.15625]);
        for from in kinds {
            for to in kinds {
                let mut first = Buffer::zeros(from, 4);
                let mut second = Buffer::zeros(to, 4);
                let mut third = Buffer::zeros(DType::F32, 4);
                convert(&origin, &mut first);
                convert(&first, &mut second);
                convert(&second, &mut third);
                assert_eq!(third.as_slice::<f32>(), origin.as_slice::<f32>(), "{from} to {to}");
            }
        }
        origin.as_mut_slice::<f32>().fill(1.0 / 3.0);
        let mut half = Buffer::zeros(DType::BF16, 4);
        convert(&origin, &mut half);
        assert_eq!(half.as_slice::<bf16>()[0], bf16::from_f32(1.0 / 3.0));
    }

    #[test]
    fn a_copied_gradient_is_multiplied_and_one_in_place_divided_as_in_pytorch() {
        let value = 0.9_f32;
        assert_ne!(value / 3.0, value * (1.0 / 3.0), "the case in which it matters");
        let mut place = value.to_ne_bytes();
        divide(&mut place, DType::F32, 3);
        assert_eq!(f32::from_ne_bytes(place), value / 3.0);
        copy_divided(&mut place, &value.to_ne_bytes(), DType::F32, 3);
        assert_eq!(f32::from_ne_bytes(place), value * (1.0 / 3.0));
        let mut place = value.to_ne_bytes();
        divide_as_copied(&mut place, DType::F32, 3);
        assert_eq!(f32::from_ne_bytes(place), value * (1.0 / 3.0));
    }
}
