//! What a framework needs of a reducer beyond what its users do.

use std::ops::Range;
use std::time::Duration;

use tenfold_store::Deadline;

use super::super::numbers;
use super::{Buckets, CommHook, Graph, Group, Logger, Param, Phase, Rebuilt, Reducer, SparseTensor};
use crate::fault::Result;

/// A [`Reducer`] as a framework sees it, whose gradients and hooks have a life of their own.
///
/// ```
/// use tenfold::ddp::raw::Framework as _;
/// use tenfold::ddp::{Options, Param, Reducer};
/// use tenfold::{DType, Group};
///
/// Group::threads(2, |group| {
///     let model = [Param::new("weight", &[2], DType::F32)];
///     let mut reducer = Reducer::new(&group, &model, Options::default())?;
///     reducer.start_backward()?;
///     let gradient: Vec<u8> = [1.0_f32, 3.0].iter().flat_map(|value| value.to_ne_bytes()).collect();
///     reducer.grad_ready_from(0, &gradient)?; // copied from the framework's own memory
///     reducer.finish()?;
///     assert_eq!(reducer.gradient::<f32>(0)?, [1.0, 3.0]);
///     Ok(())
/// })?;
/// # Ok::<(), tenfold::Error>(())
/// ```
pub trait Framework: sealed::Sealed {
    /// The bytes of a whole bucket, as its [`GradBucket`](crate::ddp::GradBucket) has them.
    ///
    /// # Errors
    /// If there is none, or it is being reduced.
    fn bucket_bytes(&mut self, index: usize) -> Result<&mut [u8]>;

    /// Where a parameter's gradient is: its bucket, and its elements there.
    ///
    /// # Errors
    /// If there is no such parameter.
    fn place(&self, param: usize) -> Result<(usize, Range<usize>)>;

    /// Its bytes, whatever the dtype. They stay where they are until buckets are rebuilt
    /// (see [`rebuild_buckets`](Framework::rebuild_buckets)).
    ///
    /// # Errors
    /// If it is being reduced, or is sparse.
    fn gradient_bytes(&mut self, param: usize) -> Result<&mut [u8]>;

    /// For a framework that accumulates gradients itself: what lies in this parameter's memory, or in its sparse gradient, goes
    /// into the next reduction even if the parameter gets none in that iteration. `used` says whether it counts as used.
    ///
    /// # Errors
    /// If there is no such parameter, or an iteration is under way that is not the first of a static graph.
    fn keep(&mut self, param: usize, used: bool) -> Result<()>;

    /// As [`keep`](Framework::keep), with a sparse gradient.
    ///
    /// # Errors
    /// See there; or if the tensor does not fit the parameter.
    fn keep_sparse(&mut self, param: usize, gradient: SparseTensor, used: bool) -> Result<()>;

    /// As [`Options::hook`](crate::ddp::Options::hook), for a reducer that has none. All ranks do the same, between the same iterations.
    ///
    /// # Errors
    /// If there is a hook, or an iteration is under way.
    fn set_hook(&mut self, hook: impl CommHook + 'static) -> Result<()>;

    /// As [`Options::static_graph`](crate::ddp::Options::static_graph), for a reducer that has reduced nothing yet. All ranks do the same.
    ///
    /// # Errors
    /// If it is too late.
    fn set_static_graph(&mut self) -> Result<()>;

    /// As [`start_forward`](Reducer::start_forward), for callers that choose when buckets are rebuilt, by
    /// [`rebuild_buckets`](Framework::rebuild_buckets): no rank waits for another here, unless something is wrong.
    ///
    /// # Errors
    /// See there.
    fn start_forward_as_is(&mut self) -> Result<()>;

    /// The parameter has its turn and no gradient, such as one of an output that the loss ignores: it adds what was accumulated
    /// before, or nothing, and does not count as used.
    ///
    /// # Errors
    /// As for [`grad_ready`](Reducer::grad_ready).
    fn ready_without_gradient(&mut self, param: usize) -> Result<()>;

    /// The parameter was used once more, and more is to come: counts only, for a static graph and a framework that accumulates
    /// gradients itself. The last time, and at the end of the first iteration, it gives the whole gradient.
    ///
    /// # Errors
    /// As for [`grad_ready`](Reducer::grad_ready).
    fn count_ready(&mut self, param: usize) -> Result<()>;

    /// As [`grad_ready`](Reducer::grad_ready), with a gradient from elsewhere: the bytes of all its elements. It is added to
    /// what earlier iterations without synchronisation have left, else it replaces what is there.
    ///
    /// # Errors
    /// See there; or if there are not as many bytes as the gradient has.
    fn grad_ready_from(&mut self, param: usize, gradient: &[u8]) -> Result<()>;

    /// Is every gradient of this iteration ready, and every bucket on its way? Never in the first iteration of a static graph.
    fn is_whole(&self) -> bool;

    /// Waits for what is on its way, but at most so long; true if there is nothing left to wait for, or if something failed, which
    /// [`finish`](Reducer::finish) will tell.
    fn wait_for(&mut self, limit: Duration) -> bool;

    /// The group it works in: a twin of the one it was made with, whose operations go on in the background.
    fn group(&self) -> &Group;

    /// The parameters that it was made with.
    fn params(&self) -> &[Param];

    /// Which parameters are reduced together, and what has become of them in this iteration.
    fn buckets(&self) -> &Buckets;

    /// Did any rank use the parameter in the last iteration? Known with `find_unused_parameters`, and of the first iteration
    /// of a static graph. The gradient of one that no rank used is zero.
    fn is_used_anywhere(&self, param: usize) -> bool;

    /// What happened, in c10d's words.
    fn logger(&self) -> &Logger;

    /// The same, for what only the framework knows.
    fn logger_mut(&mut self) -> &mut Logger;

    /// Cuts the buckets along the order in which rank 0's gradients came, if that is due: once, before the second iteration
    /// (with a static graph the third). [`start_forward`](Reducer::start_forward) does it too. Gradients keep their values.
    ///
    /// # Errors
    /// If an iteration is under way, or the group fails.
    fn rebuild_buckets(&mut self) -> Result<Option<Rebuilt>>;

    /// Continues in new memory, with the same gradients, and returns the old: for callers that find gradients of earlier iterations
    /// still in use.
    ///
    /// # Errors
    /// If an iteration is under way.
    fn renew_memory(&mut self) -> Result<Rebuilt>;

    /// Adds only what was accumulated before to an iteration of the other ranks. As [`shadow`](Reducer::shadow), for ranks that
    /// know by other means that a rank still has data.
    ///
    /// # Errors
    /// If an iteration is under way, or the group fails.
    fn take_part(&mut self) -> Result<()>;
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for super::Reducer {}
}

impl Framework for Reducer {
    fn bucket_bytes(&mut self, index: usize) -> Result<&mut [u8]> {
        match self.memory.get_mut(index) {
            None => Err(self.refuse(format!("there is no bucket {index}: there are {}", self.memory.len()))),
            Some(bucket) if bucket.memory().is_lent() => {
                Err(self.refuse(format!("bucket {index} is being reduced")))
            }
            Some(_) => Ok(self.memory[index].memory_mut().as_mut_bytes()),
        }
    }

    fn place(&self, param: usize) -> Result<(usize, Range<usize>)> {
        self.check_param(param)?;
        Ok((self.buckets.home(param), self.places[param].clone()))
    }

    fn gradient_bytes(&mut self, param: usize) -> Result<&mut [u8]> {
        self.check_gradient(param, None)?;
        Ok(self.bytes(param))
    }

    fn keep(&mut self, param: usize, used: bool) -> Result<()> {
        self.check_keeping(param)?;
        self.states[param].accumulated = true;
        self.states[param].used |= used;
        Ok(())
    }

    fn keep_sparse(&mut self, param: usize, gradient: SparseTensor, used: bool) -> Result<()> {
        self.check_keeping(param)?;
        self.check_sparse(param, &gradient)?;
        let state = &mut self.states[param];
        (state.sparse, state.accumulated) = (Some(gradient), true);
        state.used |= used;
        Ok(())
    }

    fn set_hook(&mut self, hook: impl CommHook + 'static) -> Result<()> {
        self.check_usable()?;
        if self.options.hook.is_some() {
            return Err(self.refuse("the reducer has a hook already, and can have one only"));
        }
        if self.phase == Phase::Backward {
            return Err(self.refuse("a hook cannot be set before `finish`"));
        }
        self.logger.set("comm_hook", hook.name());
        self.options.hook = Some(Box::new(hook));
        Ok(())
    }

    fn set_static_graph(&mut self) -> Result<()> {
        self.check_usable()?;
        self.check_before_training("a static graph is declared")?;
        self.options.graph = Graph::Static;
        self.buckets =
            Buckets::with_layout(&self.params, &self.layout(), &self.options.limits, Graph::Static);
        self.logger.set_integer("static_graph", 1);
        Ok(())
    }

    fn start_forward_as_is(&mut self) -> Result<()> {
        self.check_finished()?;
        self.logger.forward_starts();
        self.phase = Phase::Forward;
        Ok(())
    }

    fn ready_without_gradient(&mut self, param: usize) -> Result<()> {
        self.check_turn(param)?;
        if !self.sync {
            return Ok(());
        }
        let launch = self.make_ready(param)?;
        self.states[param].absent = true;
        self.settle(param);
        self.launch(launch)
    }

    fn count_ready(&mut self, param: usize) -> Result<()> {
        self.check_turn(param)?;
        let launch = self.make_ready(param)?;
        self.launch(launch)
    }

    fn grad_ready_from(&mut self, param: usize, gradient: &[u8]) -> Result<()> {
        self.check_gradient_turn(param)?;
        if gradient.len() != self.params[param].bytes() {
            let (name, want) = (&self.params[param].name, self.params[param].bytes());
            let have = gradient.len();
            let message = format!("the gradient of parameter {param} `{name}` has {want} bytes, not {have}");
            return Err(self.refuse(message));
        }
        let dtype = self.params[param].dtype;
        let adds = self.states[param].accumulated || self.sync && self.buckets.is_used(param);
        let completes = self.sync && self.buckets.completes(param);
        let launch = if self.sync { self.make_ready(param)? } else { 0..0 };
        self.states[param].copied = true;
        self.states[param].accumulated |= !self.sync;
        self.states[param].used |= !self.sync;
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

    fn is_whole(&self) -> bool {
        self.phase == Phase::Backward && self.sync && !self.buckets.learns() && self.buckets.all_launched()
    }

    fn wait_for(&mut self, limit: Duration) -> bool {
        self.logger.backward_ends();
        let until = Deadline::after(limit);
        self.works.iter().flatten().all(|work| match work.wait_by(until) {
            Ok(()) => true,
            Err(_) => work.is_done(),
        })
    }

    fn group(&self) -> &Group {
        &self.group
    }

    fn params(&self) -> &[Param] {
        &self.params
    }

    fn buckets(&self) -> &Buckets {
        &self.buckets
    }

    fn is_used_anywhere(&self, param: usize) -> bool {
        !self.unused_everywhere.contains(&param)
    }

    fn logger(&self) -> &Logger {
        &self.logger
    }

    fn logger_mut(&mut self) -> &mut Logger {
        &mut self.logger
    }

    fn rebuild_buckets(&mut self) -> Result<Option<Rebuilt>> {
        Reducer::rebuild_buckets(self)
    }

    fn renew_memory(&mut self) -> Result<Rebuilt> {
        Reducer::renew_memory(self)
    }

    fn take_part(&mut self) -> Result<()> {
        Reducer::take_part(self)
    }
}
