//! For frameworks with autograd: what the events of forward and backward mean for a [`Reducer`](super::Reducer).
//!
//! A framework reports that backward is about to start, and each gradient when it is computed. This state machine says whether a
//! gradient only accumulates, starts a reduction, or takes part in one. It is pure: the framework then calls the reducer.
//!
//! ```
//! use tenfold::ddp::autograd::{Autograd, Step};
//!
//! let mut autograd = Autograd::new(false, false);
//! assert_eq!(autograd.gradient(0), Step::Accumulates); // no backward was announced, as within c10d's `no_sync`
//! autograd.prepare(vec![]);
//! assert_eq!(autograd.gradient(0), Step::Begins);
//! autograd.begun();
//! assert_eq!(autograd.gradient(0), Step::Continues);
//! autograd.finished();
//! assert!(autograd.used().is_empty());
//! ```

use std::collections::BTreeSet;

/// The state of an iteration, as a framework with autograd sees it.
#[derive(Clone, Debug)]
pub struct Autograd {
    stage: Stage,
    finds_unused: bool,
    is_static: bool,
    /// An iteration has been reduced, so the order of gradients is known.
    has_learned: bool,
    /// The caller ends iterations itself.
    is_manual: bool,
    /// Buckets were rebuilt, and the caller has not been told.
    was_rebuilt: bool,
    /// All iterations so far left out the same parameters.
    seems_static: bool,
    /// Parameters without a gradient in this iteration.
    unused: Vec<usize>,
    /// Parameters that got a gradient since the last reduction.
    used: BTreeSet<usize>,
    /// Parameters that were counted in the first iteration of a static graph.
    counted: BTreeSet<usize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Gradients accumulate: there was no forward, or one without synchronisation.
    Idle,
    /// The next gradient starts a reduction.
    Armed,
    Running,
}

/// What a gradient does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// It is not reduced in this iteration.
    Accumulates,
    /// It is the first of an iteration that is reduced. Start that, call [`Autograd::begun`], and ask again.
    Begins,
    /// It takes part in the iteration.
    Continues,
}

impl Autograd {
    /// For a reducer with these options.
    pub fn new(finds_unused: bool, is_static: bool) -> Self {
        Autograd {
            stage: Stage::Idle,
            finds_unused,
            is_static,
            has_learned: false,
            is_manual: false,
            was_rebuilt: false,
            seems_static: true,
            unused: Vec::new(),
            used: BTreeSet::new(),
            counted: BTreeSet::new(),
        }
    }

    /// For the reducer that replaces this one in another group.
    #[must_use]
    pub fn successor(&self) -> Self {
        Autograd { has_learned: false, ..self.clone() }
    }

    /// Backward is about to start, and these parameters get no gradient.
    pub fn prepare(&mut self, unused: Vec<usize>) {
        self.unused = unused;
        self.stage = Stage::Armed;
    }

    /// As [`prepare`](Autograd::prepare), with parameters that the framework found unused by looking at the graph.
    pub fn prepare_found(&mut self, unused: Vec<usize>) {
        self.seems_static &= unused == self.unused || !self.has_learned;
        self.prepare(unused);
    }

    /// A gradient was computed.
    pub fn gradient(&mut self, param: usize) -> Step {
        match self.stage {
            Stage::Running => Step::Continues,
            Stage::Idle if !self.learns() => {
                self.used.insert(param);
                Step::Accumulates
            }
            Stage::Idle | Stage::Armed => Step::Begins,
        }
    }

    /// The reduction has started.
    pub fn begun(&mut self) {
        self.stage = Stage::Running;
    }

    /// A gradient was counted that is not whole yet, in a static graph.
    pub fn counted(&mut self, param: usize) {
        self.counted.insert(param);
    }

    /// The reduction has finished.
    pub fn finished(&mut self) {
        self.has_learned = true;
        self.used.clear();
        self.stage = Stage::Armed; // another backward without a forward is reduced too
    }

    /// This rank took part in an iteration of the other ranks without data of its own.
    pub fn took_part(&mut self) {
        self.has_learned = true;
    }

    /// Buckets were rebuilt.
    pub fn rebuilt(&mut self) {
        self.was_rebuilt = true;
    }

    /// Forward starts. Returns whether buckets were rebuilt since the last call.
    pub fn rest(&mut self) -> bool {
        if self.stage != Stage::Running {
            self.stage = Stage::Idle;
        }
        std::mem::take(&mut self.was_rebuilt)
    }

    /// Drops the iteration.
    pub fn reset(&mut self) {
        self.stage = Stage::Idle;
        self.used.clear();
    }

    /// Declares a static graph.
    pub fn set_static(&mut self) {
        self.is_static = true;
    }

    /// Sets whether the caller ends iterations itself; false if a reduction is running.
    pub fn set_manual(&mut self, is_manual: bool) -> bool {
        if self.is_running() {
            return false;
        }
        self.is_manual = is_manual;
        true
    }

    /// Is a reduction running?
    pub fn is_running(&self) -> bool {
        self.stage == Stage::Running
    }

    /// Is the graph declared as static?
    pub fn is_static(&self) -> bool {
        self.is_static
    }

    /// Is this the first iteration of a static graph, in which nothing is reduced before its end?
    pub fn learns(&self) -> bool {
        self.is_static && !self.has_learned
    }

    /// Has an iteration been reduced?
    pub fn has_learned(&self) -> bool {
        self.has_learned
    }

    /// Does the caller end iterations itself?
    pub fn is_manual(&self) -> bool {
        self.is_manual
    }

    /// May parameters be left out of an iteration?
    pub fn finds_unused(&self) -> bool {
        self.finds_unused && !self.is_static
    }

    /// Did all iterations so far leave out the same parameters?
    pub fn seems_static(&self) -> bool {
        self.seems_static
    }

    /// The parameters without a gradient in this iteration.
    pub fn unused(&self) -> &[usize] {
        &self.unused
    }

    /// The parameters that got a gradient since the last reduction, in order.
    pub fn used(&self) -> Vec<usize> {
        self.used.iter().copied().collect()
    }

    /// Did this parameter get a gradient since the last reduction?
    pub fn is_used(&self, param: usize) -> bool {
        self.used.contains(&param)
    }

    /// Was this parameter counted in the first iteration of a static graph?
    pub fn was_counted(&self, param: usize) -> bool {
        self.counted.contains(&param)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gradients_accumulate_until_backward_is_prepared() {
        let mut autograd = Autograd::new(false, false);
        assert_eq!((autograd.gradient(2), autograd.gradient(1)), (Step::Accumulates, Step::Accumulates));
        assert_eq!((autograd.used(), autograd.is_used(2), autograd.is_used(0)), (vec![1, 2], true, false));
        autograd.prepare(Vec::new());
        assert_eq!(autograd.gradient(1), Step::Begins);
        assert!(!autograd.is_running());
        autograd.begun();
        assert_eq!(autograd.gradient(1), Step::Continues);
        autograd.finished();
        assert_eq!((autograd.used(), autograd.has_learned()), (vec![], true));
    }

    #[test]
    fn a_second_backward_without_a_forward_is_reduced_and_one_after_it_is_not() {
        let mut autograd = Autograd::new(false, false);
        autograd.prepare(Vec::new());
        autograd.begun();
        autograd.finished();
        assert_eq!(autograd.gradient(0), Step::Begins);
        assert!(!autograd.rest());
        assert_eq!(autograd.gradient(0), Step::Accumulates);
    }

    #[test]
    fn forward_does_not_end_a_reduction_that_runs() {
        let mut autograd = Autograd::new(false, false);
        autograd.prepare(Vec::new());
        autograd.begun();
        autograd.rebuilt();
        assert_eq!((autograd.rest(), autograd.rest()), (true, false));
        assert!(autograd.is_running());
        assert!(!autograd.set_manual(true));
        autograd.reset();
        assert!(autograd.set_manual(true));
        assert!(autograd.is_manual());
    }

    #[test]
    fn a_static_graph_learns_in_its_first_iteration_without_being_prepared() {
        let mut autograd = Autograd::new(true, true);
        assert!(!autograd.finds_unused());
        assert_eq!(autograd.gradient(0), Step::Begins);
        autograd.begun();
        autograd.counted(0);
        assert_eq!((autograd.was_counted(0), autograd.was_counted(1)), (true, false));
        autograd.finished();
        autograd.rest();
        assert_eq!(autograd.gradient(0), Step::Accumulates);
        assert!(autograd.successor().learns());
    }

    #[test]
    fn a_graph_seems_static_while_the_same_parameters_are_unused() {
        let mut autograd = Autograd::new(true, false);
        autograd.prepare_found(vec![3]);
        autograd.finished();
        assert!(autograd.seems_static()); // nothing was known before the first iteration
        autograd.prepare_found(vec![3]);
        autograd.finished();
        assert!(autograd.seems_static());
        autograd.prepare_found(vec![2]);
        assert_eq!((autograd.seems_static(), autograd.unused()), (false, &[2][..]));
    }
}
