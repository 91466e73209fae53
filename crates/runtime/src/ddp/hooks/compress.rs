//! Half the bytes: gradients travel as f16 or bf16.

use super::super::{CommHook, GradBucket, numbers};
use super::{Spare, average};
use crate::fault::Result;
use crate::work::Work;
use crate::{DType, Group, ReduceOp};

/// Converts the bucket, divides in the narrow dtype, adds up, converts back: c10d's `fp16_compress_hook` and
/// `bf16_compress_hook`. Buckets of dtypes that do not convert travel as they are.
#[derive(Debug)]
pub struct Compress {
    dtype: DType,
    narrow: Spare,
}

impl Compress {
    /// Gradients travel as f16.
    pub fn fp16() -> Self {
        Compress { dtype: DType::F16, narrow: Spare::default() }
    }

    /// Gradients travel as bf16.
    pub fn bf16() -> Self {
        Compress { dtype: DType::BF16, narrow: Spare::default() }
    }

    fn converts(&self, bucket: &GradBucket) -> bool {
        numbers::is_convertible(bucket.buffer().dtype())
    }
}

impl CommHook for Compress {
    fn name(&self) -> &str {
        if self.dtype == DType::F16 { "fp16_compress" } else { "bf16_compress" }
    }

    fn launch(&mut self, bucket: &mut GradBucket, group: &Group) -> Result<Option<Work>> {
        if !self.converts(bucket) {
            average(bucket, group.size());
            return group.start_all_reduce(bucket.buffer_mut().lend(), ReduceOp::Sum).map(Some);
        }
        let narrow = self.narrow.of(bucket.index(), group, self.dtype, bucket.buffer().elements());
        numbers::convert(bucket.buffer(), narrow);
        numbers::divide(narrow.as_mut_bytes(), self.dtype, group.size());
        group.start_all_reduce(narrow.lend(), ReduceOp::Sum).map(Some)
    }

    fn land(&mut self, bucket: &mut GradBucket, _: &Group) -> Result<()> {
        if self.converts(bucket) {
            numbers::convert(self.narrow.get(bucket.index()), bucket.buffer_mut());
        }
        Ok(())
    }

    fn rebuilt(&mut self) {
        self.narrow = Spare::default();
    }
}
