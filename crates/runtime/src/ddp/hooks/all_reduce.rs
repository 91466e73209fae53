//! The average, as without a hook.

use super::super::{CommHook, GradBucket};
use super::average;
use crate::fault::Result;
use crate::work::Work;
use crate::{Group, ReduceOp};

/// Divides the bucket and adds up all ranks': c10d's `allreduce_hook`, a pattern for others.
#[derive(Clone, Copy, Debug, Default)]
pub struct AllReduce;

impl CommHook for AllReduce {
    fn name(&self) -> &str {
        "all_reduce"
    }

    fn launch(&mut self, bucket: &mut GradBucket, group: &Group) -> Result<Option<Work>> {
        average(bucket, group.size());
        group.start_all_reduce(bucket.buffer_mut().lend(), ReduceOp::Sum).map(Some)
    }
}
