//! Known values, so that a result can be checked before it is timed.
//!
//! Every element is a small integer made from its rank and its position: exact in every dtype, and so are the
//! sums over 64 ranks, in any order. So results can be compared byte by byte. `peers/` has the same numbers
//! in C and Python.

use super::operation::{Dtype, Operation};

/// Which rank's result, and of which operation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scene {
    pub(crate) operation: Operation,
    pub(crate) dtype: Dtype,
    pub(crate) rank: usize,
    pub(crate) ranks: usize,
    /// Elements of one rank's part, where each rank has one.
    pub(crate) block: usize,
}

impl Scene {
    /// The input of `rank`.
    pub(crate) fn fill(&self, input: &mut [u8]) {
        let modulus = if self.is_reduction() { TERM_MODULUS } else { MODULUS };
        for (index, element) in input.chunks_exact_mut(self.dtype.size()).enumerate() {
            put(element, self.dtype, number(self.rank, index, modulus));
        }
    }

    /// Where the result first differs from the expected one.
    pub(crate) fn first_difference(&self, result: &[u8]) -> Option<usize> {
        let mut right = [0; 8];
        let right = &mut right[..self.dtype.size()];
        result.chunks_exact(self.dtype.size()).enumerate().find_map(|(index, element)| {
            put(right, self.dtype, self.expected(index));
            (element != right).then_some(index)
        })
    }

    fn is_reduction(&self) -> bool {
        matches!(self.operation, Operation::AllReduce | Operation::Reduce | Operation::ReduceScatter)
    }

    fn expected(&self, index: usize) -> u8 {
        let Scene { rank, ranks, block, .. } = *self;
        let sum = |index| (0..ranks).map(|rank| number(rank, index, TERM_MODULUS)).sum();
        let (source, place) = (index / block.max(1), index % block.max(1));
        match self.operation {
            Operation::AllReduce | Operation::Reduce => sum(index),
            Operation::ReduceScatter => sum(rank * block + index),
            Operation::AllGather | Operation::Gather => number(source, place, MODULUS),
            Operation::AllToAll => number(source, rank * block + place, MODULUS),
            Operation::Scatter => number(0, rank * block + index, MODULUS),
            Operation::Broadcast | Operation::SendRecv | Operation::Barrier => number(0, index, MODULUS),
        }
    }
}

/// Prime, so that blocks of a power of two differ.
const MODULUS: u32 = 127;
/// The sum over 64 ranks is at most 128, which bf16 and u8 can represent.
const TERM_MODULUS: u32 = 3;

fn number(rank: usize, index: usize, modulus: u32) -> u8 {
    let mixed =
        (index as u32).wrapping_mul(2_654_435_761).wrapping_add((rank as u32).wrapping_mul(2_246_822_519));
    ((mixed >> 16) % modulus) as u8
}

fn put(element: &mut [u8], dtype: Dtype, number: u8) {
    match dtype {
        Dtype::F32 => element.copy_from_slice(&f32::from(number).to_ne_bytes()),
        Dtype::F64 => element.copy_from_slice(&f64::from(number).to_ne_bytes()),
        Dtype::F16 => element.copy_from_slice(&half_bits(number).to_ne_bytes()),
        Dtype::Bf16 => element.copy_from_slice(&((f32::from(number).to_bits() >> 16) as u16).to_ne_bytes()),
        Dtype::I32 => element.copy_from_slice(&i32::from(number).to_ne_bytes()),
        Dtype::I64 => element.copy_from_slice(&i64::from(number).to_ne_bytes()),
        Dtype::U8 => element[0] = number,
    }
}

/// An integer up to 255 as f16: the same digits as in f32, an exponent with another bias.
fn half_bits(number: u8) -> u16 {
    const BIAS_DIFFERENCE: u32 = 127 - 15;
    match number {
        0 => 0,
        _ => ((f32::from(number).to_bits() >> 13) - (BIAS_DIFFERENCE << 10)) as u16,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scene(operation: Operation, rank: usize, block: usize) -> Scene {
        Scene { operation, dtype: Dtype::U8, rank, ranks: 3, block }
    }

    fn input(operation: Operation, rank: usize, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        scene(operation, rank, 1).fill(&mut bytes);
        bytes
    }

    #[test]
    fn a_right_result_has_no_difference_and_a_changed_byte_is_found() {
        const BLOCK: usize = 50;
        let all = 3 * BLOCK;
        let add = |operation, at: usize| -> u8 { (0..3).map(|rank| input(operation, rank, all)[at]).sum() };
        for (operation, result) in [
            (Operation::AllReduce, (0..all).map(|at| add(Operation::AllReduce, at)).collect::<Vec<u8>>()),
            (
                Operation::ReduceScatter,
                (BLOCK..2 * BLOCK).map(|at| add(Operation::ReduceScatter, at)).collect(),
            ),
            (
                Operation::AllGather,
                (0..3).flat_map(|rank| input(Operation::AllGather, rank, BLOCK)).collect(),
            ),
            (Operation::Scatter, input(Operation::Scatter, 0, all)[BLOCK..2 * BLOCK].to_vec()),
            (Operation::Broadcast, input(Operation::Broadcast, 0, all)),
            (
                Operation::AllToAll,
                (0..3)
                    .flat_map(|rank| input(Operation::AllToAll, rank, all)[BLOCK..2 * BLOCK].to_vec())
                    .collect(),
            ),
        ] {
            let (scene, mut result) = (scene(operation, 1, BLOCK), result);
            assert_eq!(scene.first_difference(&result), None, "{operation}");
            result[33] ^= 1;
            assert_eq!(scene.first_difference(&result), Some(33), "{operation}");
        }
    }

    #[test]
    fn numbers_are_written_as_their_dtype_has_them() {
        let written = |dtype: Dtype, number| {
            let mut bytes = vec![0; dtype.size()];
            put(&mut bytes, dtype, number);
            bytes
        };
        assert_eq!(written(Dtype::F16, 0), [0, 0]);
        assert_eq!(written(Dtype::F16, 1), 0x3c00u16.to_ne_bytes());
        assert_eq!(written(Dtype::F16, 100), 0x5640u16.to_ne_bytes());
        assert_eq!(written(Dtype::Bf16, 1), 0x3f80u16.to_ne_bytes());
        assert_eq!(written(Dtype::F32, 128), 128f32.to_ne_bytes());
        assert_eq!(written(Dtype::I64, 7), 7i64.to_ne_bytes());
    }

    #[test]
    fn ranks_have_different_values() {
        assert_ne!(input(Operation::AllGather, 0, 16), input(Operation::AllGather, 1, 16));
        assert_ne!(input(Operation::AllReduce, 0, 16), input(Operation::AllReduce, 2, 16));
    }
}
