//! A quarter of the bytes: each gradient a signed byte, and a scale for every few hundred.
//!
//! Bytes with different scales cannot be added up on the way, so every rank gets all ranks' bytes and adds them up itself, in the
//! order of ranks: all end with the same bits. What rounding takes away is added to the next iteration's gradient (error
//! feedback). In the long run, only what was kept for buckets is lost when the buckets are cut again.

use std::collections::HashMap;

use super::super::{CommHook, GradBucket};
use super::{Spare, average};
use crate::fault::Result;
use crate::work::Work;
use crate::{DType, Group, ReduceOp};

/// Elements that share a scale: one large gradient makes its neighbours coarse, and a scale costs four bytes.
const BLOCK: usize = 512;

/// Quantises f32 buckets to 8 bits with error feedback; others are averaged as they are.
#[derive(Debug, Default)]
pub struct Int8 {
    /// Scales, then bytes, of this rank and of all.
    own: Spare,
    all: Spare,
    /// What rounding has taken away so far, by bucket.
    errors: HashMap<usize, Vec<f32>>,
}

impl Int8 {
    /// A hook that has reduced nothing yet.
    pub fn new() -> Self {
        Int8::default()
    }
}

impl CommHook for Int8 {
    fn name(&self) -> &str {
        "int8"
    }

    fn launch(&mut self, bucket: &mut GradBucket, group: &Group) -> Result<Option<Work>> {
        if bucket.buffer().dtype() != DType::F32 {
            average(bucket, group.size());
            return group.start_all_reduce(bucket.buffer_mut().lend(), ReduceOp::Sum).map(Some);
        }
        let (index, elements) = (bucket.index(), bucket.buffer().elements());
        let errors = self.errors.entry(index).or_insert_with(|| vec![0.0; elements]);
        let message = message_len(elements);
        let own = self.own.of(index, group, DType::U8, message);
        quantize(bucket.buffer().as_slice(), errors, own.as_mut_bytes());
        let all = self.all.of(index, group, DType::U8, message * group.size());
        group.start_all_gather_into(all.lend(), own.lend()).map(Some)
    }

    fn land(&mut self, bucket: &mut GradBucket, group: &Group) -> Result<()> {
        if bucket.buffer().dtype() != DType::F32 {
            return Ok(());
        }
        let all = self.all.get(bucket.index()).as_bytes();
        let sums = bucket.buffer_mut().as_mut_slice::<f32>();
        sums.fill(0.0);
        if !sums.is_empty() {
            all.chunks_exact(message_len(sums.len())).for_each(|message| add_dequantized(message, sums));
        }
        sums.iter_mut().for_each(|sum| *sum /= group.size() as f32);
        Ok(())
    }

    fn rebuilt(&mut self) {
        *self = Int8::default();
    }
}

fn message_len(elements: usize) -> usize {
    elements.div_ceil(BLOCK) * 4 + elements
}

/// Rounds `gradients + errors` into the message, and keeps what is lost as the new errors.
pub(super) fn quantize(gradients: &[f32], errors: &mut [f32], message: &mut [u8]) {
    let (scales, bytes) = message.split_at_mut(gradients.len().div_ceil(BLOCK) * 4);
    let blocks = gradients.chunks(BLOCK).zip(errors.chunks_mut(BLOCK)).zip(bytes.chunks_mut(BLOCK));
    for (((gradients, errors), bytes), scale_place) in blocks.zip(scales.chunks_exact_mut(4)) {
        errors.iter_mut().zip(gradients).for_each(|(error, gradient)| *error += gradient);
        let largest = errors.iter().fold(0.0_f32, |largest, value| largest.max(value.abs()));
        let finite = errors.iter().all(|value| value.is_finite());
        if !finite {
            errors.fill(0.0); // all ranks must see the NaN once, and not in every later iteration
        }
        let scale = if finite { largest / 127.0 } else { f32::NAN };
        scale_place.copy_from_slice(&scale.to_le_bytes());
        for (byte, error) in bytes.iter_mut().zip(errors) {
            // A cast saturates and makes zero of NaN, as of 0 / 0 where all are zero. To cut off after adding a half rounds
            // as `round` does, but for numbers next to a half, and is several times faster.
            let exact = *error / scale;
            let level = (exact + 0.5_f32.copysign(exact)) as i8;
            *byte = level as u8;
            if finite {
                *error -= f32::from(level) * scale;
            }
        }
    }
}

fn add_dequantized(message: &[u8], sums: &mut [f32]) {
    let (scales, bytes) = message.split_at(sums.len().div_ceil(BLOCK) * 4);
    let (scales, _) = scales.as_chunks::<4>();
    for ((sums, bytes), scale) in sums.chunks_mut(BLOCK).zip(bytes.chunks(BLOCK)).zip(scales) {
        let scale = f32::from_le_bytes(*scale);
        sums.iter_mut().zip(bytes).for_each(|(sum, byte)| *sum += f32::from(*byte as i8) * scale);
    }
}
