//! How a bucket is reduced, as a program may define it.

use std::fmt;

use super::GradBucket;
use crate::fault::{Error, Fault, Result};
use crate::work::Work;
use crate::{ErrorKind, Group};

/// Reduces buckets in its own way. See [`hooks`](super::hooks) for examples.
///
/// `launch` is called for one bucket after the other by index, in the midst of backward; `land` for each of them, again by
/// index, once all have been launched. So all ranks call the same collectives in the same order, and a hook may start
/// and wait for more of them when it lands.
///
/// What the bucket's buffer holds in the end are its gradients. They come undivided: to average is the hook's part.
pub trait CommHook: Send {
    /// For messages and logs; all ranks have the same.
    fn name(&self) -> &str;

    /// Starts the reduction, or the first part of it. Nothing is returned where there is nothing to wait for.
    ///
    /// # Errors
    /// Whatever goes wrong fails the iteration, on all ranks.
    fn launch(&mut self, bucket: &mut GradBucket, group: &Group) -> Result<Option<Work>>;

    /// Does the rest, once the work of `launch` is done.
    ///
    /// # Errors
    /// As for `launch`.
    fn land(&mut self, bucket: &mut GradBucket, group: &Group) -> Result<()> {
        let _ = (bucket, group);
        Ok(())
    }

    /// Buckets have been cut again, which happens at most once. A hook must forget what it knows about the old ones.
    fn rebuilt(&mut self) {}
}

/// What a hook returns that cannot go on, for a reason of its own. The group is the one it was called with.
#[cold]
pub fn hook_error(group: &Group, message: impl Into<String>) -> Error {
    group.ddp_error(Fault::new(ErrorKind::Aborted, message))
}

impl fmt::Debug for dyn CommHook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CommHook({})", self.name())
    }
}
