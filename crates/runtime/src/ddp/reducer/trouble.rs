//! What goes wrong, and which ranks report it.
//!
//! An invalid call is refused and has no side effects. A mistake after which ranks are in different states fails the reducer
//! and aborts its group, so that the other ranks fail too, with the same cause.

use super::super::buckets::{Graph, Misuse, is_order_of};
use super::super::complaint::Complaint;
use super::super::options::Options;
use super::super::{Param, complaint, numbers};
use super::{Phase, Reducer};
use crate::fault::{Error, Fault, Result};
use crate::{DType, ErrorKind, SparseTensor};

impl Reducer {
    pub(super) fn check_usable(&self) -> Result<()> {
        let Some(error) = &self.failure else { return Ok(()) };
        let message = format!("the reducer has failed before: {}", error.message());
        let fault = Fault { message, peer: error.peer(), ..Fault::new(error.kind(), "") };
        Err(self.group.ddp_error(fault))
    }

    pub(super) fn check_turn(&self, param: usize) -> Result<()> {
        self.check_usable()?;
        self.check_param(param)?;
        if self.phase == Phase::Backward {
            return Ok(());
        }
        let name = &self.params[param].name;
        Err(self.refuse(format!("parameter {param} `{name}` was made ready without `start_backward`")))
    }

    pub(super) fn check_gradient_turn(&self, param: usize) -> Result<()> {
        self.check_turn(param)?;
        if self.params[param].sparse {
            let name = &self.params[param].name;
            let fault =
                Fault::argument(format!("parameter {param} `{name}` is sparse, and its gradient is not"));
            return Err(self.group.ddp_error(fault.hint("give it with `grad_ready_sparse`")));
        }
        Ok(())
    }

    pub(super) fn check_gradient(&self, param: usize, dtype: Option<DType>) -> Result<()> {
        self.check_param(param)?;
        let Param { name, dtype: own, sparse, .. } = &self.params[param];
        if *sparse {
            let message = format!("parameter {param} `{name}` is sparse: it has no gradient in memory");
            return Err(self.refuse(message));
        }
        if let Some(dtype) = dtype.filter(|dtype| dtype != own) {
            let message = format!("parameter {param} `{name}` has a gradient of {own}, not {dtype}");
            return Err(self.refuse(message));
        }
        let launched = self.phase == Phase::Backward && self.sync && self.buckets.is_launched(param);
        if launched || self.memory[self.buckets.home(param)].memory().is_lent() {
            let fault =
                Fault::argument(format!("the gradient of parameter {param} `{name}` is being reduced"));
            return Err(self.group.ddp_error(fault.hint("it is yours again after `finish`")));
        }
        Ok(())
    }

    pub(super) fn check_sparse(&self, param: usize, gradient: &SparseTensor) -> Result<()> {
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
        Ok(())
    }

    pub(super) fn check_keeping(&self, param: usize) -> Result<()> {
        self.check_usable()?;
        self.check_param(param)?;
        if self.phase == Phase::Backward && !self.buckets.learns() {
            return Err(self.refuse("a gradient cannot be kept before `finish`"));
        }
        Ok(())
    }

    pub(super) fn check_before_training(&self, what: &str) -> Result<()> {
        if self.iteration == 1 && self.phase != Phase::Backward {
            return Ok(());
        }
        Err(self.refuse(format!("{what} before the first backward")))
    }

    pub(super) fn check_param(&self, param: usize) -> Result<()> {
        if param < self.params.len() {
            return Ok(());
        }
        Err(self.refuse(format!("there is no parameter {param}: there are {}", self.params.len())))
    }

    /// The error of an invalid call, which had no side effects.
    #[cold]
    pub(super) fn refuse(&self, message: impl Into<String>) -> Error {
        self.group.ddp_error(Fault::argument(message))
    }

    #[cold]
    pub(super) fn misused(&mut self, misuse: Misuse) -> Error {
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
                let mut own = self.complaint();
                params.iter().for_each(|param| own.missing[*param] = 1);
                let mut all = vec![Some(self.complaint()); self.group.size()];
                all[self.group.rank()] = Some(own.clone());
                let reason = complaint::describe(&self.params, &all).unwrap_or_default();
                return self.complain(&own, Some(&reason)).unwrap_or_else(|| self.fail(Fault::argument(reason)));
            }
        };
        self.fail(fault)
    }

    /// The group failed in this bucket. Perhaps because gradients are missing elsewhere.
    #[cold]
    pub(super) fn broken(&mut self, bucket: Option<usize>, error: Error) -> Error {
        if error.kind() == ErrorKind::Aborted
            && error.message().contains(complaint::MISSING)
            && let Some(error) = self.complain(&self.complaint(), None)
        {
            return error;
        }
        let place =
            bucket.map_or_else(String::new, |index| format!(", in {}", self.memory[index].describe()));
        let error = error.in_place(&place);
        // An error of a hook, say, of which the group knows nothing yet.
        if self.group.failure().is_none() {
            self.group.abort(error.message());
        }
        self.remember(error)
    }

    /// That of a rank that misses nothing.
    fn complaint(&self) -> Complaint {
        Complaint { iteration: self.iteration, missing: vec![0; self.params.len()] }
    }

    /// Finds out which gradients are missing on which ranks. Aborts the group with `reason` if the others do not answer.
    pub(super) fn complain(&mut self, own: &Complaint, reason: Option<&str>) -> Option<Error> {
        let disturb = || reason.into_iter().for_each(|reason| self.group.abort(reason));
        let all = complaint::exchange(&self.complaints, own, disturb);
        let fault = Fault::argument(complaint::describe(&self.params, &all)?);
        let fault = fault.hint(match self.options.graph {
            Graph::Static => "the graph has changed since the first iteration: do without `static_graph`",
            _ => "give every parameter a gradient in every iteration, or set `find_unused_parameters`",
        });
        Some(self.remember(self.group.ddp_error(fault)))
    }

    pub(super) fn fail(&mut self, fault: Fault) -> Error {
        self.group.abort(&fault.message);
        self.remember(self.group.ddp_error(fault))
    }

    pub(super) fn remember(&mut self, error: Error) -> Error {
        self.logger.failed(&error);
        self.failure = Some(error.clone());
        error
    }
}

/// Alike on all ranks, once they are known to have the same model.
pub(super) fn check_model(params: &[Param], options: &Options) -> std::result::Result<(), String> {
    if params.is_empty() {
        return Err("the model has no parameters".to_owned());
    }
    let mut total = 0_usize;
    for (number, Param { name, shape, dtype, sparse }) in params.iter().enumerate() {
        if !numbers::is_gradient(*dtype) {
            return Err(format!("parameter {number} `{name}` of {dtype} can have no gradient"));
        }
        let bytes = shape.iter().try_fold(dtype.size(), |bytes, len| bytes.checked_mul(*len));
        match bytes.and_then(|bytes| total.checked_add(bytes)).filter(|total| isize::try_from(*total).is_ok())
        {
            Some(sum) => total = sum,
            None => {
                return Err(format!(
                    "with parameter {number} `{name}` of {shape:?} the model does not fit the address space"
                ));
            }
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
    match options.first_buckets.as_ref().and_then(|layout| layout_fault(params, layout)) {
        Some(fault) => Err(fault),
        None => Ok(()),
    }
}

/// Why these cannot be the buckets.
fn layout_fault(params: &[Param], layout: &[Vec<usize>]) -> Option<String> {
    if !is_order_of(&layout.concat(), params.len()) {
        return Some(format!("the first buckets do not have each of {} parameters once", params.len()));
    }
    let fits = |bucket: &Vec<usize>| {
        let first = bucket.first().map(|param| &params[*param]);
        first.is_some_and(|first| {
            let alike = bucket.iter().all(|param| params[*param].dtype == first.dtype);
            alike && (bucket.len() == 1 || bucket.iter().all(|param| !params[*param].sparse))
        })
    };
    let bad = layout.iter().position(|bucket| !fits(bucket))?;
    Some(format!(
        "first bucket {bad} is empty, of several dtypes, or has a sparse parameter that is not alone"
    ))
}

fn show_times(count: u32) -> String {
    match count {
        0 => "not at all".to_owned(),
        1 => "once".to_owned(),
        count => format!("{count} times"),
    }
}
