//! Ranks with different numbers of batches.

use super::super::options::Divisor;
use super::Reducer;
use crate::fault::{Fault, Result};
use crate::{Buffer, Rank, ReduceOp};

impl Reducer {
    /// For a rank that has no more data: takes part in an iteration of the other ranks and adds nothing. False once no rank has
    /// data. A rank that makes the same step with the averages keeps the same model.
    ///
    /// ```
    /// # use tenfold::ddp::{Divisor, Options, Param, Reducer};
    /// # use tenfold::{DType, Group};
    /// Group::threads(2, |group| {
    ///     let model = [Param::new("weight", &[3], DType::F32)];
    ///     let mut reducer = Reducer::new(&group, &model, Options::default().join(Divisor::Live))?;
    ///     for _batch in 0..1 + group.rank() {
    ///         reducer.start_backward()?;
    ///         reducer.gradient_mut::<f32>(0)?.fill(1.0);
    ///         reducer.grad_ready(0)?;
    ///         reducer.finish()?;
    ///     }
    ///     while reducer.shadow()? {
    ///         assert_eq!(reducer.gradient::<f32>(0)?, [1.0; 3]);
    ///     }
    ///     Ok(())
    /// })?;
    /// # Ok::<(), tenfold::Error>(())
    /// ```
    ///
    /// # Errors
    /// If the reducer was not made with `join`, an iteration is under way, or the group fails.
    pub fn shadow(&mut self) -> Result<bool> {
        self.rebuild_buckets()?;
        if self.options.join.is_none() {
            let fault = Fault::argument("this reducer expects the same number of batches on all ranks");
            return Err(self.group.ddp_error(fault.hint("make it with `join`")));
        }
        let (live, syncing) = self.count_live(false)?;
        if live == 0 || syncing == 0 {
            return Ok(live > 0);
        }
        self.take_part()?;
        Ok(true)
    }

    /// See [`Framework::take_part`](super::raw::Framework::take_part).
    pub(super) fn take_part(&mut self) -> Result<()> {
        self.rebuild_buckets()?;
        let learns = self.buckets.learns();
        let all = self.buckets.shadow();
        self.sync = true;
        (0..self.params.len()).for_each(|param| self.settle(param));
        self.land(all, learns)
    }

    /// The rank that had data longest, and of several the last: its model is the one to broadcast at the end, where those that
    /// ran out made no more steps. `steps` is how many batches this rank has had. Every rank calls it.
    ///
    /// # Errors
    /// If the group fails.
    pub fn last_with_data(&mut self, steps: u64) -> Result<Rank> {
        self.check_usable()?;
        let size = self.group.size() as i64;
        let mut best = Buffer::from_slice(&[(steps as i64).saturating_mul(size) + self.group.rank() as i64]);
        let found = self.group.start_all_reduce(best.lend(), ReduceOp::Max).and_then(|work| work.wait());
        found.map_err(|error| self.broken(None, error))?;
        Ok((best.as_slice::<i64>()[0] % size) as Rank)
    }

    /// How many ranks have data, and how many of them synchronise; decides about the divisor.
    pub(super) fn count_live(&mut self, own: bool) -> Result<(usize, usize)> {
        let mut counts = Buffer::from_slice(&[i32::from(own), i32::from(own && self.sync)]);
        let counted = self.group.start_all_reduce(counts.lend(), ReduceOp::Sum).and_then(|work| work.wait());
        counted.map_err(|error| self.broken(None, error))?;
        let counts = counts.as_slice::<i32>();
        let (live, syncing) = (counts[0] as usize, counts[1] as usize);
        self.divisor = match self.options.join {
            Some(Divisor::Live) => live.max(1),
            _ => self.group.size(),
        };
        Ok((live, syncing))
    }
}
