//! PowerSGD: a gradient that is a matrix travels as two thin ones (Vogels et al., <https://arxiv.org/abs/1905.13727>).
//!
//! M (n × m) is about P Qᵀ with `rank` columns each. From a guess Q, all ranks add up P = M Q, make its columns orthonormal, and add
//! up Q = Mᵀ P: one step of subspace iteration on the average gradient. The next iteration begins with this Q (warm start),
//! and what this one left out is added to the next gradient (error feedback).
//!
//! Vectors, small matrices and buckets that are not f32 are averaged as they are.

use std::collections::HashMap;
use std::ops::Range;

use super::super::{CommHook, GradBucket};
use super::{Spare, average};
use crate::fault::Result;
use crate::work::Work;
use crate::{DType, Group, ReduceOp};

/// Compresses matrices to a low rank. c10d's `powerSGD_hook`.
#[derive(Debug)]
pub struct PowerSgd {
    rank: usize,
    start: u64,
    min_rate: f32,
    error_feedback: bool,
    warm_start: bool,
    epsilon: f64,
    iteration: u64,
    buckets: HashMap<usize, Low>,
    /// What is not compressed, then the Ps; and the Qs.
    first: Spare,
    second: Spare,
    seed: u64,
}

/// What is remembered of a bucket.
#[derive(Debug, Default)]
struct Low {
    matrices: Vec<Matrix>,
    /// Elements that travel as they are.
    others: Vec<Range<usize>>,
    /// This rank's gradients, with the errors of before.
    gradients: Vec<f32>,
    errors: Vec<f32>,
}

#[derive(Debug)]
struct Matrix {
    place: Range<usize>,
    rows: usize,
    columns: usize,
    rank: usize,
    /// `columns × rank`, column by column.
    q: Vec<f32>,
}

impl PowerSgd {
    /// To `rank` columns: 1 or 2, rarely more.
    pub fn new(rank: usize) -> Self {
        PowerSgd {
            rank: rank.max(1),
            start: 1000,
            min_rate: 2.0,
            error_feedback: true,
            warm_start: true,
            epsilon: 0.0,
            iteration: 0,
            buckets: HashMap::new(),
            first: Spare::default(),
            second: Spare::default(),
            seed: 0,
        }
    }

    /// Iterations that are averaged as they are, while gradients change much; 1000 by default.
    #[must_use]
    pub fn start_iteration(mut self, start: u64) -> Self {
        self.start = start;
        self
    }

    /// Compresses only what becomes more than so many times smaller; 2 by default.
    #[must_use]
    pub fn min_compression_rate(mut self, rate: f32) -> Self {
        self.min_rate = rate;
        self
    }

    #[must_use]
    /// Does not add to a gradient what was lost of the one before.
    pub fn without_error_feedback(mut self) -> Self {
        self.error_feedback = false;
        self
    }

    /// Begins each iteration with random directions.
    #[must_use]
    pub fn without_warm_start(mut self) -> Self {
        self.warm_start = false;
        self
    }

    /// Added to the length of each direction, where gradients may vanish.
    #[must_use]
    pub fn orthogonalization_epsilon(mut self, epsilon: f64) -> Self {
        self.epsilon = epsilon;
        self
    }

    fn plain(&self, bucket: &GradBucket) -> bool {
        self.iteration < self.start || bucket.buffer().dtype() != DType::F32
    }

    /// Which parameters are worth it.
    fn divide_up(&self, bucket: &GradBucket) -> Low {
        let mut low = Low { errors: vec![0.0; bucket.buffer().elements()], ..Low::default() };
        for ((_, param), place) in bucket.parameters().zip(bucket.ranges()) {
            let rows = param.shape.first().copied().unwrap_or(1);
            let columns = place.len().checked_div(rows).unwrap_or(0);
            let rank = self.rank.min(rows).min(columns);
            let smaller = ((rows + columns) * rank) as f32 * self.min_rate < (rows * columns) as f32;
            if smaller {
                low.matrices.push(Matrix { place, rows, columns, rank, q: Vec::new() });
            } else {
                low.others.push(place);
            }
        }
        low
    }
}

impl CommHook for PowerSgd {
    fn name(&self) -> &str {
        "power_sgd"
    }

    fn launch(&mut self, bucket: &mut GradBucket, group: &Group) -> Result<Option<Work>> {
        if self.plain(bucket) {
            average(bucket, group.size());
            return group.start_all_reduce(bucket.buffer_mut().lend(), ReduceOp::Sum).map(Some);
        }
        let index = bucket.index();
        if !self.buckets.contains_key(&index) {
            let low = self.divide_up(bucket);
            self.buckets.insert(index, low);
        }
        let low = self.buckets.get_mut(&index).expect("it was just put there");
        low.gradients = bucket.buffer().as_slice().to_vec();
        if self.error_feedback {
            low.gradients.iter_mut().zip(&low.errors).for_each(|(gradient, error)| *gradient += error);
        }
        let mut message = Vec::new();
        low.others.iter().for_each(|place| message.extend_from_slice(&low.gradients[place.clone()]));
        for matrix in &mut low.matrices {
            if matrix.q.is_empty() || !self.warm_start {
                matrix.q = random(matrix.columns * matrix.rank, &mut self.seed);
            }
            orthogonalize(&mut matrix.q, matrix.columns, self.epsilon);
            message.extend(matrix.times(&low.gradients[matrix.place.clone()]));
        }
        let first = self.first.of(index, group, DType::F32, message.len());
        first.as_mut_slice().copy_from_slice(&message);
        group.start_all_reduce(first.lend(), ReduceOp::Sum).map(Some)
    }

    fn land(&mut self, bucket: &mut GradBucket, group: &Group) -> Result<()> {
        if self.plain(bucket) {
            self.iteration += u64::from(bucket.is_last());
            return Ok(());
        }
        self.iteration += u64::from(bucket.is_last());
        let (index, ranks) = (bucket.index(), group.size() as f32);
        let low = self.buckets.get_mut(&index).expect("a bucket is launched before it lands");
        let averages = bucket.buffer_mut().as_mut_slice::<f32>();

        let mut rest = self.first.get(index).as_slice::<f32>();
        for place in &low.others {
            let (values, after) = rest.split_at(place.len());
            let targets = averages[place.clone()].iter_mut();
            targets.zip(values).for_each(|(average, sum)| *average = sum / ranks);
            rest = after;
        }
        let mut ps = Vec::new();
        let mut message = Vec::new();
        for matrix in &low.matrices {
            let (p, after) = rest.split_at(matrix.rows * matrix.rank);
            let mut p = p.to_vec();
            orthogonalize(&mut p, matrix.rows, self.epsilon);
            message.extend(matrix.transposed_times(&low.gradients[matrix.place.clone()], &p));
            ps.push(p);
            rest = after;
        }
        let second = self.second.of(index, group, DType::F32, message.len());
        second.as_mut_slice().copy_from_slice(&message);
        group.start_all_reduce(second.lend(), ReduceOp::Sum)?.wait()?;

        let mut rest = second.as_slice::<f32>();
        for (matrix, p) in low.matrices.iter_mut().zip(&ps) {
            let (q, after) = rest.split_at(matrix.columns * matrix.rank);
            matrix.q = q.iter().map(|sum| sum / ranks).collect();
            matrix.product(p, &mut averages[matrix.place.clone()]);
            if self.error_feedback {
                let place = matrix.place.clone();
                let own = low.gradients[place.clone()].iter().zip(&averages[place.clone()]);
                low.errors[place]
                    .iter_mut()
                    .zip(own)
                    .for_each(|(error, (own, average))| *error = own - average);
            }
            rest = after;
        }
        Ok(())
    }

    fn rebuilt(&mut self) {
        self.buckets.clear();
        (self.first, self.second) = (Spare::default(), Spare::default());
    }
}

impl Matrix {
    /// `M Q`, column by column.
    fn times(&self, values: &[f32]) -> Vec<f32> {
        let columns = self.q.chunks(self.columns);
        let dot = |row: &[f32], column: &[f32]| row.iter().zip(column).map(|(a, b)| a * b).sum();
        columns.flat_map(|column| values.chunks(self.columns).map(move |row| dot(row, column))).collect()
    }

    /// `Mᵀ P`, column by column.
    fn transposed_times(&self, values: &[f32], p: &[f32]) -> Vec<f32> {
        let mut all = Vec::with_capacity(self.columns * self.rank);
        for column in p.chunks(self.rows) {
            let mut sums = vec![0.0; self.columns];
            for (row, weight) in values.chunks(self.columns).zip(column) {
                sums.iter_mut().zip(row).for_each(|(sum, value)| *sum += value * weight);
            }
            all.extend(sums);
        }
        all
    }

    /// `P Qᵀ`
    fn product(&self, p: &[f32], target: &mut [f32]) {
        target.fill(0.0);
        for (p, q) in p.chunks(self.rows).zip(self.q.chunks(self.columns)) {
            for (row, weight) in target.chunks_mut(self.columns).zip(p) {
                row.iter_mut().zip(q).for_each(|(value, q)| *value += weight * q);
            }
        }
    }
}

/// Makes the columns orthonormal, each of so many rows, by the modified Gram-Schmidt process. One that vanishes becomes zero.
pub(super) fn orthogonalize(matrix: &mut [f32], rows: usize, epsilon: f64) {
    for from in (0..matrix.len()).step_by(rows.max(1)) {
        let (before, rest) = matrix.split_at_mut(from);
        let column = &mut rest[..rows];
        for other in before.chunks(rows) {
            let shadow: f64 = column.iter().zip(other).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
            column.iter_mut().zip(other).for_each(|(value, other)| *value -= shadow as f32 * other);
        }
        let length = column.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>().sqrt() + epsilon;
        let factor = if length > 0.0 { 1.0 / length } else { 0.0 };
        column.iter_mut().for_each(|value| *value = (f64::from(*value) * factor) as f32);
    }
}

/// Numbers between -1 and 1, the same on all ranks. The seed goes on.
pub(super) fn random(count: usize, seed: &mut u64) -> Vec<f32> {
    let mut next = || {
        // splitmix64, of Vigna.
        *seed = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = *seed;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (bits ^ (bits >> 31)) >> 40
    };
    (0..count).map(|_| next() as f32 / (1 << 23) as f32 - 1.0).collect()
}
