//! Buckets on their way: launched, received, and cut again.

use std::ops::Range;

use super::super::bucket::GradBucket;
use super::super::buckets::{Graph, Misuse, is_order_of};
use super::super::logger::Statistics;
use super::super::{Param, numbers};
use super::{Phase, Rebuilt, Reducer, State};
use crate::fault::{Fault, Result};
use crate::{Buffer, ErrorKind, ReduceOp, SparseTensor};

impl Reducer {
    pub(super) fn launch(&mut self, range: Range<usize>) -> Result<()> {
        for index in range {
            self.logger.bucket_starts();
            let bucket = &mut self.memory[index];
            if bucket.is_sparse() {
                continue; // takes several steps, and so its turn when it lands
            }
            if let Some(dtype) = self.options.reduce_dtype {
                bucket.reduce_as(&self.group, dtype);
            }
            let launched = match &mut self.options.hook {
                Some(hook) => hook.launch(bucket, &self.group),
                None => self.group.start_all_reduce(bucket.buffer_mut().lend(), ReduceOp::Sum).map(Some),
            };
            match launched {
                Ok(work) => self.works[index] = work,
                Err(error) => return Err(self.broken(Some(index), error)),
            }
        }
        Ok(())
    }

    /// Launches the rest, and waits for all buckets by index: the order of calls is the same everywhere.
    pub(super) fn land(&mut self, rest: Range<usize>, learns: bool) -> Result<()> {
        let asks = learns || self.options.graph == Graph::Unused;
        let mut map = self.used_map();
        let mut asked = None;
        if learns {
            asked = Some(self.group.start_all_reduce(map.lend(), ReduceOp::Sum));
        }
        self.launch(rest)?;
        if asks && !learns {
            asked = Some(self.group.start_all_reduce(map.lend(), ReduceOp::Sum));
        }
        for index in 0..self.memory.len() {
            if let Err(error) = self.land_bucket(index) {
                return Err(self.broken(Some(index), error));
            }
        }
        if let Some(asked) = asked {
            if let Err(error) = asked.and_then(|work| work.wait()) {
                return Err(self.broken(None, error));
            }
            let counts = map.as_slice::<i32>().iter().enumerate();
            self.unused_everywhere =
                counts.filter(|(_, count)| **count == 0).map(|(param, _)| param).collect();
        }
        self.end_iteration();
        Ok(())
    }

    pub(super) fn land_bucket(&mut self, index: usize) -> Result<()> {
        if let Some(work) = self.works[index].take() {
            work.wait()?;
        }
        if self.memory[index].is_sparse() {
            return self.reduce_sparse(self.buckets.bucket(index).params[0]);
        }
        let bucket = &mut self.memory[index];
        if let Some(hook) = &mut self.options.hook {
            hook.land(bucket, &self.group)?;
        }
        bucket.settle();
        Ok(())
    }

    pub(super) fn reduce_sparse(&mut self, param: usize) -> Result<()> {
        let mut own = self.states[param].sparse.take().unwrap_or_else(|| self.no_rows(param));
        let dtype = own.values.dtype();
        if !self.options.divided {
            numbers::divide(own.values.as_mut_bytes(), dtype, self.divisor);
        }
        self.states[param].sparse_average = Some(self.group.all_reduce_sparse(&own)?);
        Ok(())
    }

    /// A sparse gradient in which nothing is.
    pub(super) fn no_rows(&self, param: usize) -> SparseTensor {
        let Param { shape, dtype, .. } = &self.params[param];
        let dense = shape.iter().skip(1).product();
        SparseTensor { shape: vec![shape[0]], indices: Vec::new(), dense, values: Buffer::zeros(*dtype, 0) }
    }

    /// Which parameters this rank used since the last reduction: a 1 for each.
    pub(super) fn used_map(&self) -> Buffer {
        let used = |param| {
            let State { used, absent, .. } = self.states[param];
            i32::from(self.buckets.is_used(param) && !absent || used)
        };
        Buffer::from_slice(&(0..self.params.len()).map(used).collect::<Vec<i32>>())
    }

    pub(super) fn end_iteration(&mut self) {
        let dense = self.memory.iter().map(|bucket| bucket.memory().as_bytes().len());
        let unused = (0..self.params.len()).filter(|param| !self.buckets.is_used(*param));
        let moved = Statistics {
            iteration: self.iteration,
            buckets_reduced: if self.sync { self.memory.len() } else { 0 },
            bytes_reduced: if self.sync { dense.sum() } else { 0 },
            unused_bytes: if self.sync { unused.map(|param| self.params[param].bytes()).sum() } else { 0 },
            ..Statistics::default()
        };
        self.logger.iteration_ends(moved, &self.buckets);
        if self.sync {
            self.states.iter_mut().for_each(|state| (state.accumulated, state.used) = (false, false));
        }
        self.phase = Phase::Idle;
        self.iteration += 1;
    }

    /// See [`Framework::rebuild_buckets`](super::raw::Framework::rebuild_buckets).
    pub(super) fn rebuild_buckets(&mut self) -> Result<Option<Rebuilt>> {
        self.check_finished()?;
        if !self.buckets.rebuild_due() {
            return Ok(None);
        }
        let own: Vec<i64> = self.buckets.arrival().iter().map(|param| *param as i64).collect();
        let mut order = Buffer::from_slice(&own);
        let sent = self.group.start_broadcast(order.lend(), 0).and_then(|work| work.wait());
        sent.map_err(|error| self.broken(None, error))?;
        let order: Vec<usize> = order.as_slice::<i64>().iter().map(|param| *param as usize).collect();
        if !is_order_of(&order, self.params.len()) {
            let fault = Fault::new(
                ErrorKind::Protocol,
                "rank 0 sent an order that does not have every parameter once",
            );
            return Err(self.fail(fault.peer(0)));
        }
        let homes: Vec<(usize, Range<usize>)> = (0..self.params.len())
            .map(|param| (self.buckets.home(param), self.places[param].clone()))
            .collect();
        let former: Vec<Vec<usize>> = self.layout();
        self.buckets.rebuild(&self.params, &order);
        let changed = self.layout() != former;
        let old = self.allocate();
        for (param, (home, Range { start, end })) in homes.into_iter().enumerate() {
            let size = self.params[param].dtype.size();
            let values = &old[home].memory().as_bytes()[start * size..end * size];
            self.bytes(param).copy_from_slice(values);
        }
        if let Some(hook) = self.options.hook.as_mut().filter(|_| changed) {
            hook.rebuilt();
        }
        self.logger.rebuilt(&self.params, &self.buckets);
        Ok(Some(Rebuilt { memory: old.into_iter().map(GradBucket::into_memory).collect() }))
    }

    /// Between two iterations?
    pub(super) fn check_finished(&mut self) -> Result<()> {
        self.check_usable()?;
        if self.phase != Phase::Backward {
            return Ok(());
        }
        let missing = if self.sync { self.buckets.missing() } else { Vec::new() };
        if !missing.is_empty() && !self.buckets.learns() {
            return Err(self.misused(Misuse::Missing { params: missing }));
        }
        Err(self.refuse(format!("iteration {} has begun and is not finished", self.iteration)))
    }

    /// See [`Framework::renew_memory`](super::raw::Framework::renew_memory).
    pub(super) fn renew_memory(&mut self) -> Result<Rebuilt> {
        self.check_usable()?;
        if self.phase == Phase::Backward {
            return Err(self.refuse("memory cannot be renewed before `finish`"));
        }
        let old = self.allocate();
        for (new, old) in self.memory.iter_mut().zip(&old) {
            new.memory_mut().as_mut_bytes().copy_from_slice(old.memory().as_bytes());
        }
        Ok(Rebuilt { memory: old.into_iter().map(GradBucket::into_memory).collect() })
    }

    /// The parameters of each bucket.
    pub(super) fn layout(&self) -> Vec<Vec<usize>> {
        (0..self.buckets.len()).map(|index| self.buckets.bucket(index).params.clone()).collect()
    }
}
