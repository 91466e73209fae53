//! An iteration: gradients become ready, buckets are launched, and all ranks end with the average.
//!
//! The reducer has a group of its own: its collectives never mix with the caller's, and when it fails it takes that group along,
//! so that no rank waits for a bucket that will not come; the caller's group goes on.
//!
//! Bits are PyTorch's: each gradient is divided before the sum, by multiplication with the inverse where it is copied in and by
//! division where it lies in the bucket already.

use std::collections::BTreeSet;
use std::fmt;
use std::ops::Range;

use super::bucket::GradBucket;
use super::buckets::{Buckets, Graph, Misuse, is_order_of};
use super::logger::{Logger, Statistics};
use super::options::{Divisor, Options};
use super::{Param, complaint, numbers, verify};
use crate::fault::{Error, Fault, Result};
use crate::work::Work;
use crate::{DType, Element, FaultKind, Group, Rank, ReduceOp, SparseTensor, Tensor};

/// Averages gradients over all ranks while backward computes them. See [the module](super) for an example.
///
/// Parameters are known by their number. An iteration is [`start_backward`](Reducer::start_backward), then
/// [`grad_ready`](Reducer::grad_ready) for each of them, then [`finish`](Reducer::finish); with
/// [`start_forward`](Reducer::start_forward) before it, time spent in forward is known too. After an error the reducer is
/// of no use, on any rank.
pub struct Reducer {
    group: Group,
    complaints: Group,
    params: Vec<Param>,
    options: Options,
    buckets: Buckets,
    memory: Vec<GradBucket>,
    /// Each parameter's elements within its bucket.
    places: Vec<Range<usize>>,
    states: Vec<State>,
    works: Vec<Option<Work>>,
    phase: Phase,
    sync: bool,
    /// Counted from 1.
    iteration: u64,
    divisor: usize,
    /// Parameters that no rank used in the last iteration.
    unused_everywhere: BTreeSet<usize>,
    failure: Option<Error>,
    logger: Logger,
}

/// Of one parameter's gradient.
#[derive(Debug, Default)]
struct State {
    /// It holds what iterations without synchronisation have left.
    accumulated: bool,
    /// It was copied in, in this iteration.
    copied: bool,
    /// Of a sparse one: what this rank has, and what came out.
    sparse: Option<SparseTensor>,
    sparse_average: Option<SparseTensor>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Idle,
    Forward,
    Backward,
}

/// The memory of buckets that were cut anew. Whoever has pointers into it keeps it until they are gone.
#[derive(Debug)]
pub struct Rebuilt {
    pub memory: Vec<Tensor>,
}

impl Reducer {
    /// For the parameters of a model, in the order of their definition. Every rank of the group calls it.
    ///
    /// # Errors
    /// If ranks have different models or options (the first difference is named on all of them), or a parameter can have
    /// no gradient.
    pub fn new(group: &Group, params: &[Param], options: Options) -> Result<Self> {
        let own = group.twin("ddp")?;
        verify::verify(&own, params, &options.describe())?;
        if let Err(message) = check_model(params, &options) {
            return Err(own.ddp_error(Fault::argument(message)));
        }
        let buckets = Buckets::new(params, &options.limits, options.graph);
        let mut reducer = Reducer {
            complaints: group.twin("ddp/complaints")?,
            divisor: own.size(),
            logger: Logger::new(&own, params, &options, &buckets),
            group: own.background(),
            places: vec![0..0; params.len()],
            states: params.iter().map(|_| State::default()).collect(),
            params: params.to_vec(),
            memory: Vec::new(),
            works: Vec::new(),
            options,
            buckets,
            phase: Phase::Idle,
            sync: true,
            iteration: 1,
            unused_everywhere: BTreeSet::new(),
            failure: None,
        };
        reducer.allocate();
        Ok(reducer)
    }

    /// Memory for all buckets; returns the former.
    fn allocate(&mut self) -> Vec<GradBucket> {
        let count = self.buckets.len();
        let is_dense = |index: &usize| !self.params[self.buckets.bucket(*index).params[0]].sparse;
        let last = (0..count).rev().find(is_dense); // hooks never see the sparse ones
        let bucket = |index| {
            let members = &self.buckets.bucket(index).params;
            let params = members.iter().map(|number| (*number, self.params[*number].clone()));
            GradBucket::new(&self.group, index, Some(index) == last, params)
        };
        let memory: Vec<GradBucket> = (0..count).map(bucket).collect();
        for bucket in &memory {
            for ((number, _), range) in bucket.parameters().zip(bucket.ranges()) {
                self.places[number] = range;
            }
        }
        self.works = vec![None; count];
        std::mem::replace(&mut self.memory, memory)
    }

    // ── gradients ──────────────────────────────────────────────────────────────────────────────────────────

    /// A parameter's gradient: the average once [`finish`](Reducer::finish) has returned.
    ///
    /// # Errors
    /// If it is being reduced, is sparse, or has another dtype.
    pub fn gradient<T: Element>(&self, param: usize) -> Result<&[T]> {
        self.check_gradient(param, Some(T::DTYPE))?;
        let place = self.places[param].clone();
        Ok(&self.memory[self.buckets.home(param)].memory().as_slice()[place])
    }

    /// The same, to be written: set, or added to where iterations shall accumulate.
    ///
    /// # Errors
    /// See [`gradient`](Reducer::gradient).
    pub fn gradient_mut<T: Element>(&mut self, param: usize) -> Result<&mut [T]> {
        self.check_gradient(param, Some(T::DTYPE))?;
        let place = self.places[param].clone();
        Ok(&mut self.memory[self.buckets.home(param)].memory_mut().as_mut_slice()[place])
    }

    /// Its bytes, whatever the dtype. They stay where they are until buckets are cut anew
    /// (see [`rebuild_buckets`](Reducer::rebuild_buckets)).
    ///
    /// # Errors
    /// If it is being reduced, or is sparse.
    pub fn gradient_bytes(&mut self, param: usize) -> Result<&mut [u8]> {
        self.check_gradient(param, None)?;
        Ok(self.bytes(param))
    }

    /// The average of a sparse gradient; nothing before the first iteration has ended.
    pub fn sparse_gradient(&self, param: usize) -> Option<&SparseTensor> {
        self.states.get(param)?.sparse_average.as_ref()
    }

    /// Sets all dense gradients to zero, and forgets what was accumulated.
    ///
    /// # Errors
    /// If an iteration is under way.
    pub fn zero_gradients(&mut self) -> Result<()> {
        self.check_usable()?;
        if self.phase == Phase::Backward {
            return Err(self.refuse("gradients cannot be zeroed before `finish`"));
        }
        self.memory.iter_mut().for_each(|bucket| bucket.memory_mut().as_mut_bytes().fill(0));
        for state in &mut self.states {
            (state.accumulated, state.sparse) = (false, None);
        }
        Ok(())
    }

    fn bytes(&mut self, param: usize) -> &mut [u8] {
        let size = self.params[param].dtype.size();
        let Range { start, end } = self.places[param];
        &mut self.memory[self.buckets.home(param)].memory_mut().as_mut_bytes()[start * size..end * size]
    }

    fn check_gradient(&self, param: usize, dtype: Option<DType>) -> Result<()> {
        self.check_param(param)?;
        let Param { name, dtype: own, sparse, .. } = &self.params[param];
        if *sparse {
            return Err(
                self.refuse(format!("parameter {param} `{name}` is sparse: it has no gradient in memory"))
            );
        }
        if let Some(dtype) = dtype.filter(|dtype| dtype != own) {
            return Err(
                self.refuse(format!("parameter {param} `{name}` has a gradient of {own}, not {dtype}"))
            );
        }
        if self.memory[self.buckets.home(param)].memory().is_lent() {
            let message = format!("the gradient of parameter {param} `{name}` is being reduced");
            return Err(self
                .group
                .ddp_error(Fault::argument(message).hint("it is yours again after `finish`")));
        }
        Ok(())
    }

    fn check_param(&self, param: usize) -> Result<()> {
        if param < self.params.len() {
            return Ok(());
        }
        Err(self.refuse(format!("there is no parameter {param}: there are {}", self.params.len())))
    }

    // ── an iteration ───────────────────────────────────────────────────────────────────────────────────────

    /// With `false`, iterations from the next on only accumulate; the next one with `true` reduces what all of them have added
    /// up. As c10d's `no_sync`. All ranks do the same.
    pub fn set_sync(&mut self, sync: bool) {
        self.sync = sync;
    }

    /// Begins an iteration, where time spent in forward shall be measured. Cuts buckets anew when that is due.
    ///
    /// # Errors
    /// If the last iteration has not been finished: what is missing is named, on all ranks.
    pub fn start_forward(&mut self) -> Result<()> {
        self.rebuild_buckets()?;
        self.logger.forward_starts();
        self.phase = Phase::Forward;
        Ok(())
    }

    /// Begins backward, in which every parameter gets a gradient.
    ///
    /// # Errors
    /// As for [`start_forward`](Reducer::start_forward).
    pub fn start_backward(&mut self) -> Result<()> {
        self.start_backward_without(&[])
    }

    /// Begins backward, in which these parameters get no gradient on this rank.
    ///
    /// # Errors
    /// As for [`start_forward`](Reducer::start_forward), or if the reducer was not made with `find_unused_parameters`.
    pub fn start_backward_without(&mut self, unused: &[usize]) -> Result<()> {
        if self.phase != Phase::Forward {
            self.rebuild_buckets()?;
        }
        self.check_usable()?;
        unused.iter().try_for_each(|param| self.check_param(*param))?;
        if !unused.is_empty() && self.options.graph != Graph::Unused {
            let fault = Fault::argument("this reducer expects a gradient of every parameter");
            return Err(self.group.ddp_error(fault.hint("make it with `find_unused_parameters`")));
        }
        if self.options.join.is_some() {
            self.count_live(true)?;
        }
        self.logger.backward_starts();
        self.phase = Phase::Backward;
        if !self.sync {
            return Ok(());
        }
        self.states.iter_mut().for_each(|state| state.copied = false);
        let launch = self.buckets.start(unused);
        self.settle_unused();
        self.launch(launch)
    }

    /// The gradient of `param` is in its memory. A bucket that is whole by this begins to travel.
    ///
    /// # Errors
    /// If it was ready before, or the group fails.
    pub fn grad_ready(&mut self, param: usize) -> Result<()> {
        self.check_gradient_turn(param)?;
        if !self.sync {
            self.states[param].accumulated = true;
            return Ok(());
        }
        let completes = self.buckets.completes(param);
        let launch = self.make_ready(param)?;
        if completes {
            self.divide(param);
        }
        self.launch(launch)
    }

    /// As [`grad_ready`](Reducer::grad_ready), with a gradient from elsewhere: the bytes of all its elements. It is added to
    /// what earlier iterations without synchronisation have left, else it replaces what is there.
    ///
    /// # Errors
    /// See there; or if there are not as many bytes as the gradient has.
    pub fn grad_ready_from(&mut self, param: usize, gradient: &[u8]) -> Result<()> {
        self.check_gradient_turn(param)?;
        if gradient.len() != self.params[param].bytes() {
            let (name, want) = (&self.params[param].name, self.params[param].bytes());
            let message = format!(
                "the gradient of parameter {param} `{name}` has {want} bytes, not {}",
                gradient.len()
            );
            return Err(self.refuse(message));
        }
        let dtype = self.params[param].dtype;
        let adds = self.states[param].accumulated || self.sync && self.buckets.is_used(param);
        let completes = self.sync && self.buckets.completes(param);
        let launch = if self.sync { self.make_ready(param)? } else { 0..0 };
        self.states[param].copied = true;
        self.states[param].accumulated |= !self.sync;
        let divisor = if completes { self.divisor() } else { 1 };
        let target = self.bytes(param);
        match (adds, divisor) {
            (true, _) => numbers::add(target, gradient, dtype),
            (false, 1) => target.copy_from_slice(gradient),
            (false, _) => numbers::copy_divided(target, gradient, dtype, divisor),
        }
        if adds && completes {
            self.divide(param);
        }
        self.launch(launch)
    }

    /// As [`grad_ready`](Reducer::grad_ready), for a sparse parameter: rows of its first dimension.
    ///
    /// # Errors
    /// See there; or if the tensor does not fit the parameter.
    pub fn grad_ready_sparse(&mut self, param: usize, gradient: SparseTensor) -> Result<()> {
        self.check_turn(param)?;
        let Param { name, dtype, sparse, .. } = &self.params[param];
        if !sparse {
            let fault =
                Fault::argument(format!("parameter {param} `{name}` is not sparse, and its gradient is"));
            return Err(self.group.ddp_error(fault.hint("declare it with `Param::sparse`")));
        }
        let like = self.no_rows(param);
        if gradient.shape != like.shape || gradient.dense != like.dense || gradient.values.dtype() != *dtype {
            return Err(self.refuse(format!(
                "the gradient of parameter {param} `{name}` has {:?} rows of {} {}, not {:?} rows of {} {dtype}",
                gradient.shape, gradient.dense, gradient.values.dtype(), like.shape, like.dense,
            )));
        }
        let launch = if self.sync { self.make_ready(param)? } else { 0..0 };
        let state = &mut self.states[param];
        state.accumulated |= !self.sync;
        state.sparse = Some(match state.sparse.take() {
            Some(before) => both(before, &gradient),
            None => gradient,
        });
        self.launch(launch)
    }

    /// Waits until all gradients are averages. Returns at once in an iteration without synchronisation.
    ///
    /// # Errors
    /// If parameters are missing: they are named, with the ranks that miss them, on all ranks. If the group fails.
    pub fn finish(&mut self) -> Result<()> {
        self.check_usable()?;
        if self.phase != Phase::Backward {
            return Err(self.refuse("`finish` without `start_backward`: there is nothing to finish"));
        }
        self.logger.backward_ends();
        if !self.sync {
            self.end_iteration();
            return Ok(());
        }
        let learns = self.buckets.learns();
        let rest = match self.buckets.finish() {
            Ok(rest) => rest,
            Err(misuse) => return Err(self.misused(misuse)),
        };
        if !learns {
            return self.land(rest, learns);
        }
        for param in 0..self.params.len() {
            if self.buckets.is_used(param) {
                self.divide(param);
            } else {
                self.settle(param);
            }
        }
        self.land(rest, learns)
    }

    fn make_ready(&mut self, param: usize) -> Result<Range<usize>> {
        self.buckets.ready(param).map_err(|misuse| self.misused(misuse))
    }

    /// Unused gradients have a part in the sum all the same.
    fn settle_unused(&mut self) {
        for param in self.buckets.unused() {
            self.settle(param);
        }
    }

    /// A parameter without a gradient in this iteration adds what was accumulated before, or nothing.
    fn settle(&mut self, param: usize) {
        if self.states[param].accumulated {
            self.divide(param);
        } else if !self.params[param].sparse {
            self.bytes(param).fill(0);
        }
    }

    /// Nobody but a hook divides where there is one.
    fn divisor(&self) -> usize {
        if self.options.hook.is_some() { 1 } else { self.divisor }
    }

    fn divide(&mut self, param: usize) {
        let (dtype, divisor) = (self.params[param].dtype, self.divisor());
        if self.params[param].sparse || divisor == 1 {
            return; // sparse ones are divided when they land
        }
        if self.states[param].copied {
            numbers::divide_as_copied(self.bytes(param), dtype, divisor);
        } else {
            numbers::divide(self.bytes(param), dtype, divisor);
        }
    }

    // ── communication ──────────────────────────────────────────────────────────────────────────────────────

    fn launch(&mut self, range: Range<usize>) -> Result<()> {
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
                None => self.group.all_reduce(bucket.buffer_mut().lend(), ReduceOp::Sum).map(Some),
            };
            match launched {
                Ok(work) => self.works[index] = work,
                Err(error) => return Err(self.broken(Some(index), error)),
            }
        }
        Ok(())
    }

    /// Launches the rest, and waits for all buckets by index: the order of calls is the same everywhere.
    fn land(&mut self, rest: Range<usize>, learns: bool) -> Result<()> {
        let asks = learns || self.options.graph == Graph::Unused;
        let mut map = self.used_map();
        let mut asked = None;
        if learns {
            asked = Some(self.group.all_reduce(map.lend(), ReduceOp::Sum));
        }
        self.launch(rest)?;
        if asks && !learns {
            asked = Some(self.group.all_reduce(map.lend(), ReduceOp::Sum));
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

    fn land_bucket(&mut self, index: usize) -> Result<()> {
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

    fn reduce_sparse(&mut self, param: usize) -> Result<()> {
        let mut own = self.states[param].sparse.take().unwrap_or_else(|| self.no_rows(param));
        let dtype = own.values.dtype();
        numbers::divide(own.values.as_mut_bytes(), dtype, self.divisor);
        self.states[param].sparse_average = Some(self.group.all_reduce_sparse(&own)?);
        Ok(())
    }

    /// A sparse gradient in which nothing is.
    fn no_rows(&self, param: usize) -> SparseTensor {
        let Param { shape, dtype, .. } = &self.params[param];
        let dense = shape.iter().skip(1).product();
        SparseTensor { shape: vec![shape[0]], indices: Vec::new(), dense, values: Tensor::zeros(*dtype, 0) }
    }

    /// Which parameters this rank used since the last reduction: a 1 for each.
    fn used_map(&self) -> Tensor {
        let used = |param| i32::from(self.buckets.is_used(param) || self.states[param].accumulated);
        Tensor::from_slice(&(0..self.params.len()).map(used).collect::<Vec<i32>>())
    }

    fn end_iteration(&mut self) {
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
            self.states.iter_mut().for_each(|state| state.accumulated = false);
        }
        self.phase = Phase::Idle;
        self.iteration += 1;
    }

    /// Cuts the buckets along the order in which rank 0's gradients came, if that is due: once, before the second iteration
    /// (with a static graph the third). [`start_forward`](Reducer::start_forward) does it too. Gradients keep their values.
    ///
    /// # Errors
    /// If an iteration is under way, or the group fails.
    pub fn rebuild_buckets(&mut self) -> Result<Option<Rebuilt>> {
        self.check_usable()?;
        if self.phase == Phase::Backward {
            let missing = if self.sync { self.buckets.missing() } else { Vec::new() };
            if !missing.is_empty() && !self.buckets.learns() {
                return Err(self.misused(Misuse::Missing { params: missing }));
            }
            return Err(self.refuse(format!("iteration {} has begun and is not finished", self.iteration)));
        }
        if !self.buckets.rebuild_due() {
            return Ok(None);
        }
        let own: Vec<i64> = self.buckets.arrival().iter().map(|param| *param as i64).collect();
        let mut order = Tensor::from_slice(&own);
        let sent = self.group.broadcast(order.lend(), 0).and_then(|work| work.wait());
        sent.map_err(|error| self.broken(None, error))?;
        let order: Vec<usize> = order.as_slice::<i64>().iter().map(|param| *param as usize).collect();
        if !is_order_of(&order, self.params.len()) {
            let fault =
                Fault::new(FaultKind::Protocol, "rank 0 sent an order that is none of all parameters");
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

    /// The parameters of each bucket.
    fn layout(&self) -> Vec<Vec<usize>> {
        (0..self.buckets.len()).map(|index| self.buckets.bucket(index).params.clone()).collect()
    }

    // ── uneven inputs ──────────────────────────────────────────────────────────────────────────────────────

    /// Takes part in an iteration of the others, for a rank that has no more data, by adding nothing. False once nobody has
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
        let learns = self.buckets.learns();
        let all = self.buckets.shadow();
        (0..self.params.len()).for_each(|param| self.settle(param));
        self.sync = true;
        self.land(all, learns)?;
        Ok(true)
    }

    /// The rank that had data longest, and of several the last: its model is the one to broadcast at the end, where those that
    /// ran out made no more steps. `steps` is how many batches this rank has had. Every rank calls it.
    ///
    /// # Errors
    /// If the group fails.
    pub fn last_with_data(&mut self, steps: u64) -> Result<Rank> {
        self.check_usable()?;
        let size = self.group.size() as i64;
        let mut best = Tensor::from_slice(&[(steps as i64).saturating_mul(size) + self.group.rank() as i64]);
        let found = self.group.all_reduce(best.lend(), ReduceOp::Max).and_then(|work| work.wait());
        found.map_err(|error| self.broken(None, error))?;
        Ok((best.as_slice::<i64>()[0] % size) as Rank)
    }

    /// How many ranks have data, and how many of them synchronise; decides about the divisor.
    fn count_live(&mut self, own: bool) -> Result<(usize, usize)> {
        let mut counts = Tensor::from_slice(&[i32::from(own), i32::from(own && self.sync)]);
        let counted = self.group.all_reduce(counts.lend(), ReduceOp::Sum).and_then(|work| work.wait());
        counted.map_err(|error| self.broken(None, error))?;
        let counts = counts.as_slice::<i32>();
        let (live, syncing) = (counts[0] as usize, counts[1] as usize);
        self.divisor = match self.options.join {
            Some(Divisor::Live) => live.max(1),
            _ => self.group.size(),
        };
        Ok((live, syncing))
    }

    // ── what is known ──────────────────────────────────────────────────────────────────────────────────────

    pub fn params(&self) -> &[Param] {
        &self.params
    }

    pub fn buckets(&self) -> &Buckets {
        &self.buckets
    }

    /// Did any rank use the parameter in the last iteration? Known with `find_unused_parameters`, and of the first iteration
    /// of a static graph. The gradient of one that nobody used is zero.
    pub fn is_used_anywhere(&self, param: usize) -> bool {
        !self.unused_everywhere.contains(&param)
    }

    /// Of the last iteration.
    pub fn statistics(&self) -> &Statistics {
        self.logger.statistics()
    }

    pub fn logger(&self) -> &Logger {
        &self.logger
    }

    pub fn logger_mut(&mut self) -> &mut Logger {
        &mut self.logger
    }

    /// Why it can no longer be used, if so.
    pub fn failure(&self) -> Option<&Error> {
        self.failure.as_ref()
    }

    // ── what goes wrong ────────────────────────────────────────────────────────────────────────────────────

    fn check_usable(&self) -> Result<()> {
        let Some(error) = &self.failure else { return Ok(()) };
        let message = format!("the reducer has failed before: {}", error.message());
        let fault = Fault { message, peer: error.peer(), ..Fault::new(error.kind(), "") };
        Err(self.group.ddp_error(fault))
    }

    fn check_turn(&self, param: usize) -> Result<()> {
        self.check_usable()?;
        self.check_param(param)?;
        if self.phase == Phase::Backward {
            return Ok(());
        }
        let name = &self.params[param].name;
        Err(self.refuse(format!("parameter {param} `{name}` was made ready without `start_backward`")))
    }

    fn check_gradient_turn(&self, param: usize) -> Result<()> {
        self.check_turn(param)?;
        if self.params[param].sparse {
            let name = &self.params[param].name;
            let fault =
                Fault::argument(format!("parameter {param} `{name}` is sparse, and its gradient is not"));
            return Err(self.group.ddp_error(fault.hint("give it with `grad_ready_sparse`")));
        }
        Ok(())
    }

    /// A call that makes no sense and did no harm.
    #[cold]
    fn refuse(&self, message: impl Into<String>) -> Error {
        self.group.ddp_error(Fault::argument(message))
    }

    #[cold]
    fn misused(&mut self, misuse: Misuse) -> Error {
        let name = |param: usize| format!("parameter {param} `{}`", self.params[param].name);
        let iteration = self.iteration;
        let fault = match misuse {
            Misuse::ReadyTwice { param } => {
                Fault::argument(format!("{} was made ready twice in iteration {iteration}", name(param))).hint(
                    "call `finish` between two backward passes; a parameter that is used several times in one needs \
                     `static_graph`",
                )
            }
            Misuse::UsedAfterAll { param } => Fault::argument(format!(
                "{} was named unused in iteration {iteration}, and then got a gradient",
                name(param)
            )),
            Misuse::GraphChanged { param, expected, seen } => Fault::argument(format!(
                "the graph is not static: {} was made ready {} in iteration {iteration}, and {} in the first",
                name(param),
                show_times(seen),
                show_times(expected)
            ))
            .hint("make the reducer without `static_graph`"),
            Misuse::Missing { params } => {
                let mut own = vec![0; self.params.len()];
                params.iter().for_each(|param| own[*param] = 1);
                let alone: Vec<Option<Vec<u8>>> =
                    (0..self.group.size()).map(|rank| (rank == self.group.rank()).then(|| own.clone())).collect();
                let reason = complaint::describe(&self.params, &alone, iteration).unwrap_or_default();
                return self.complain(&own, Some(&reason)).unwrap_or_else(|| self.fail(Fault::argument(reason)));
            }
        };
        self.fail(fault)
    }

    /// The group failed in this bucket. Perhaps because gradients are missing elsewhere.
    #[cold]
    fn broken(&mut self, bucket: Option<usize>, error: Error) -> Error {
        if error.kind() == FaultKind::Aborted
            && error.message().contains(complaint::MISSING)
            && let Some(error) = self.complain(&vec![0; self.params.len()], None)
        {
            return error;
        }
        let place =
            bucket.map_or_else(String::new, |index| format!(", in {}", self.memory[index].describe()));
        let fault = Fault {
            kind: error.kind(),
            peer: error.peer(),
            message: format!("{}{place}", error.message()),
            hint: error.hint().map(str::to_owned),
        };
        let error = Error::new(error.scene().clone(), fault);
        // An error of a hook, say, of which the group knows nothing yet.
        if self.group.failure().is_none() {
            self.group.abort(error.message());
        }
        self.remember(error)
    }

    /// Finds out which gradients are missing where; gives the group up for a reason, unless somebody has.
    fn complain(&mut self, own: &[u8], reason: Option<&str>) -> Option<Error> {
        let disturb = || reason.into_iter().for_each(|reason| self.group.abort(reason));
        let all = complaint::exchange(&self.complaints, own, disturb);
        let fault = Fault::argument(complaint::describe(&self.params, &all, self.iteration)?);
        let fault = fault.hint(
            "give every parameter a gradient in every iteration, or set `find_unused_parameters` and name the unused ones",
        );
        Some(self.remember(self.group.ddp_error(fault)))
    }

    fn fail(&mut self, fault: Fault) -> Error {
        self.group.abort(&fault.message);
        self.remember(self.group.ddp_error(fault))
    }

    fn remember(&mut self, error: Error) -> Error {
        self.logger.failed(&error);
        self.failure = Some(error.clone());
        error
    }
}

impl fmt::Debug for Reducer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (params, buckets) = (self.params.len(), self.buckets.len());
        write!(f, "Reducer({params} parameters in {buckets} buckets, iteration {})", self.iteration)
    }
}

/// Alike on all ranks, once they are known to have the same model.
fn check_model(params: &[Param], options: &Options) -> std::result::Result<(), String> {
    if params.is_empty() {
        return Err("the model has no parameters".to_owned());
    }
    for (number, Param { name, shape, dtype, sparse }) in params.iter().enumerate() {
        if !numbers::is_gradient(*dtype) {
            return Err(format!("parameter {number} `{name}` of {dtype} can have no gradient"));
        }
        let bytes = shape.iter().try_fold(dtype.size(), |bytes, len| bytes.checked_mul(*len));
        if bytes.is_none_or(|bytes| bytes > isize::MAX as usize) {
            return Err(format!("parameter {number} `{name}` of {shape:?} does not fit the address space"));
        }
        if *sparse && shape.is_empty() {
            return Err(format!("parameter {number} `{name}` has no dimension and cannot be sparse"));
        }
        if let Some(reduced) = options.reduce_dtype
            && !*sparse
            && !(numbers::is_convertible(*dtype) && numbers::is_convertible(reduced))
        {
            return Err(format!("parameter {number} `{name}` of {dtype} cannot be reduced as {reduced}"));
        }
    }
    Ok(())
}

/// The rows of two sparse gradients; one that is in both is added up when it is reduced.
fn both(first: SparseTensor, second: &SparseTensor) -> SparseTensor {
    let mut values = Tensor::zeros(first.values.dtype(), first.values.elements() + second.values.elements());
    let (head, tail) = values.as_mut_bytes().split_at_mut(first.values.as_bytes().len());
    head.copy_from_slice(first.values.as_bytes());
    tail.copy_from_slice(second.values.as_bytes());
    let indices = first.indices.iter().chain(&second.indices).copied().collect();
    SparseTensor { indices, values, ..first }
}

fn show_times(count: u32) -> String {
    match count {
        0 => "not at all".to_owned(),
        1 => "once".to_owned(),
        count => format!("{count} times"),
    }
}
