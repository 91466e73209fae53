//! An iteration: gradients become ready, buckets are launched, and all ranks end with the average.
//!
//! The reducer has a group of its own: its collectives never mix with the caller's, and when it fails it takes that group along,
//! so that no rank waits for a bucket that will not come; the caller's group goes on.
//!
//! - `flight`: buckets on their way; `join`: ranks that run out of data; `trouble`: errors
//!
//! Bits are PyTorch's: each gradient is divided before the sum, by multiplication with the inverse where it is copied in and by
//! division where it lies in the bucket already.

mod flight;
mod join;
pub(super) mod raw;
mod trouble;

use std::collections::BTreeSet;
use std::fmt;
use std::ops::Range;

use super::bucket::GradBucket;
use super::buckets::{Buckets, Graph};
use super::hook::CommHook;
use super::logger::{Logger, Statistics};
use super::options::Options;
use super::{Param, numbers, verify};
use crate::fault::{Error, Fault, Result};
use crate::work::Work;
use crate::{Buffer, Element, Group, SparseTensor};

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
    /// Of this iteration, and of those to come.
    sync: bool,
    sync_next: bool,
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
    /// One of them used the parameter.
    used: bool,
    /// It was copied in, in this iteration.
    copied: bool,
    /// Its turn came in this iteration, and there was none.
    absent: bool,
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

/// The memory of buckets that were cut again. A caller that has pointers into it must keep it until it has dropped them.
#[derive(Debug)]
pub struct Rebuilt {
    /// That of each former bucket.
    pub memory: Vec<Buffer>,
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
        if let Err(message) = trouble::check_model(params, &options) {
            return Err(own.ddp_error(Fault::argument(message)));
        }
        let buckets = match &options.first_buckets {
            Some(layout) => Buckets::with_layout(params, layout, &options.limits, options.graph),
            None => Buckets::new(params, &options.limits, options.graph),
        };
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
            sync_next: true,
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

    /// The same, to be written: set it, or add to it if gradients are accumulated over iterations.
    ///
    /// # Errors
    /// See [`gradient`](Reducer::gradient).
    pub fn gradient_mut<T: Element>(&mut self, param: usize) -> Result<&mut [T]> {
        self.check_gradient(param, Some(T::DTYPE))?;
        let place = self.places[param].clone();
        Ok(&mut self.memory[self.buckets.home(param)].memory_mut().as_mut_slice()[place])
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
            (state.accumulated, state.used, state.sparse) = (false, false, None);
        }
        Ok(())
    }

    fn bytes(&mut self, param: usize) -> &mut [u8] {
        let size = self.params[param].dtype.size();
        let Range { start, end } = self.places[param];
        &mut self.memory[self.buckets.home(param)].memory_mut().as_mut_bytes()[start * size..end * size]
    }

    // ── an iteration ───────────────────────────────────────────────────────────────────────────────────────

    /// With `false`, iterations from the next on only accumulate; the next one with `true` reduces what all of them have added
    /// up. As c10d's `no_sync`. All ranks do the same.
    pub fn set_sync(&mut self, sync: bool) {
        self.sync_next = sync;
    }

    /// Begins an iteration and the measurement of the time spent in forward. Cuts the buckets again when that is due.
    ///
    /// # Errors
    /// If the last iteration has not been finished: what is missing is named, on all ranks.
    pub fn start_forward(&mut self) -> Result<()> {
        self.rebuild_buckets()?;
        raw::Framework::start_forward_as_is(self)
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
        self.sync = self.sync_next;
        if self.options.join.is_some() {
            self.count_live(true)?;
        }
        self.logger.backward_starts();
        self.phase = Phase::Backward;
        if !self.sync {
            return Ok(());
        }
        self.states.iter_mut().for_each(|state| (state.copied, state.absent) = (false, false));
        let launch = self.buckets.start(unused);
        self.buckets.unused().into_iter().for_each(|param| self.settle(param));
        self.launch(launch)
    }

    /// The gradient of `param` is in its memory. A bucket that is whole by this begins to travel.
    ///
    /// # Errors
    /// If it was ready before, or the group fails.
    pub fn grad_ready(&mut self, param: usize) -> Result<()> {
        self.check_gradient_turn(param)?;
        if !self.sync {
            (self.states[param].accumulated, self.states[param].used) = (true, true);
            return Ok(());
        }
        let completes = self.buckets.completes(param);
        let launch = self.make_ready(param)?;
        if completes {
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
        self.check_sparse(param, &gradient)?;
        let launch = if self.sync { self.make_ready(param)? } else { 0..0 };
        let state = &mut self.states[param];
        state.accumulated |= !self.sync;
        state.used |= !self.sync;
        state.sparse = Some(match state.sparse.take() {
            Some(before) => both(before, &gradient),
            None => gradient,
        });
        self.launch(launch)
    }

    /// Waits until all gradients are averages. Returns immediately in an iteration without synchronisation.
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
        for param in (0..self.params.len()).filter(|_| learns) {
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

    /// A parameter without a gradient in this iteration adds what was accumulated before, or nothing.
    fn settle(&mut self, param: usize) {
        if self.states[param].accumulated {
            self.divide(param);
        } else if !self.params[param].sparse {
            self.bytes(param).fill(0);
        }
    }

    /// The number by which gradients are divided: 1 if a hook is set, which divides by itself.
    fn divisor(&self) -> usize {
        if self.options.hook.is_some() || self.options.divided { 1 } else { self.divisor }
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

    // ── what is known ──────────────────────────────────────────────────────────────────────────────────────

    /// Of the last iteration.
    pub fn statistics(&self) -> &Statistics {
        self.logger.statistics()
    }

    /// Why it can no longer be used, if so.
    pub fn failure(&self) -> Option<&Error> {
        self.failure.as_ref()
    }
}

impl fmt::Debug for Reducer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (params, buckets) = (self.params.len(), self.buckets.len());
        write!(f, "Reducer({params} parameters in {buckets} buckets, iteration {})", self.iteration)
    }
}

/// The rows of two sparse gradients; one that is in both is added up when it is reduced.
fn both(first: SparseTensor, second: &SparseTensor) -> SparseTensor {
    let mut values = Buffer::zeros(first.values.dtype(), first.values.elements() + second.values.elements());
    let (head, tail) = values.as_mut_bytes().split_at_mut(first.values.as_bytes().len());
    head.copy_from_slice(first.values.as_bytes());
    tail.copy_from_slice(second.values.as_bytes());
    let indices = first.indices.iter().chain(&second.indices).copied().collect();
    SparseTensor { indices, values, ..first }
}
