//! Operations that overlap, on memory that the compiler keeps borrowed meanwhile.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Mutex, MutexGuard, PoisonError};

use tenfold_memory::{Lender, lend};
use tenfold_plan::Rank;

use super::Group;
use crate::call::Call;
use crate::fault::{Error, Result};
use crate::work::Work;

/// Starts operations on slices that are borrowed until the scope ends. See [`Group::scope`] for examples.
pub struct Scope<'scope, 'env> {
    group: Group,
    lender: &'scope Lender<'env>,
    started: Mutex<Vec<Started>>,
}

struct Started {
    work: Work,
    /// The error, if any, is returned to a caller who asked for it.
    is_asked: bool,
}

/// An operation that a [`Scope`] has started.
///
/// If it is dropped, the scope waits for the operation when it ends.
///
/// ```
/// use tenfold::{Group, Tag};
///
/// Group::threads(2, |group| {
///     let mut received = [0_u8; 4];
///     let source = group.scope(|scope| {
///         let receiving = scope.recv_any(&mut received, Tag(0))?;
///         scope.send(&[1_u8; 4], 1 - group.rank(), Tag(0))?.wait()?;
///         while !receiving.is_done() {
///             std::thread::yield_now(); // or compute something
///         }
///         Ok(receiving.source())
///     })?;
///     assert_eq!((source, received), (Some(1 - group.rank()), [1; 4]));
///     Ok(())
/// })?;
/// # Ok::<(), tenfold::Error>(())
/// ```
pub struct Pending<'scope> {
    work: Work,
    started: &'scope Mutex<Vec<Started>>,
    number: usize,
}

impl Group {
    /// Runs operations that overlap with each other and with what `body` computes, as `std::thread::scope` does for threads.
    ///
    /// ```
    /// use tenfold::{Group, ReduceOp};
    ///
    /// Group::threads(2, |group| {
    ///     let (mut gradients, mut weights) = ([1.0_f32; 1000], [group.rank() as f32; 10]);
    ///     group.scope(|scope| {
    ///         let first = scope.all_reduce(&mut gradients, ReduceOp::Avg)?;
    ///         let second = scope.broadcast(&mut weights, 0)?;
    ///         // compute something else here
    ///         first.wait()?;
    ///         second.wait()
    ///     })?;
    ///     assert_eq!((gradients[999], weights), (1.0, [0.0; 10]));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), tenfold::Error>(())
    /// ```
    ///
    /// Slices are borrowed until the scope ends. The compiler refuses to read what an operation may be writing:
    ///
    /// ```compile_fail,E0502
    /// # use tenfold::{Group, ReduceOp};
    /// # Group::threads(1, |group| {
    /// let mut gradients = [1.0_f32; 10];
    /// group.scope(|scope| {
    ///     scope.all_reduce(&mut gradients, ReduceOp::Sum)?;
    ///     println!("{}", gradients[0]);
    ///     Ok(())
    /// })
    /// # }).unwrap();
    /// ```
    ///
    /// and to lend the same slice twice:
    ///
    /// ```compile_fail,E0499
    /// # use tenfold::{Group, ReduceOp};
    /// # Group::threads(1, |group| {
    /// let mut gradients = [1.0_f32; 10];
    /// group.scope(|scope| {
    ///     scope.all_reduce(&mut gradients, ReduceOp::Sum)?;
    ///     scope.broadcast(&mut gradients, 0)?;
    ///     Ok(())
    /// })
    /// # }).unwrap();
    /// ```
    ///
    /// and to lend what does not live as long as the scope:
    ///
    /// ```compile_fail,E0597
    /// # use tenfold::{Group, ReduceOp};
    /// # Group::threads(1, |group| {
    /// group.scope(|scope| {
    ///     let mut gradients = [1.0_f32; 10];
    ///     scope.all_reduce(&mut gradients, ReduceOp::Sum)?;
    ///     Ok(())
    /// })
    /// # }).unwrap();
    /// ```
    ///
    /// When `body` returns or panics, the scope waits until all its operations are done. The operations go on in the
    /// background, as those of [`Group::background`].
    ///
    /// # Errors
    /// The error of `body`. If it returns none, the first error of an operation whose [`Pending::wait`] was not called.
    pub fn scope<'env, R>(
        &self,
        body: impl for<'scope> FnOnce(&'scope Scope<'scope, 'env>) -> Result<R>,
    ) -> Result<R> {
        lend(
            |lender| {
                let scope = Scope { group: self.background(), lender, started: Mutex::default() };
                let outcome = catch_unwind(AssertUnwindSafe(|| body(&scope)));
                let unasked = scope.wait();
                match (outcome, unasked) {
                    (Ok(Ok(_)), Some(error)) => Err(error),
                    (Ok(outcome), _) => outcome,
                    (Err(panic), _) => resume_unwind(panic),
                }
            },
            || self.let_go(),
        )
    }
}

impl<'scope, 'env> Scope<'scope, 'env> {
    /// The group whose operations it starts.
    pub fn group(&self) -> &Group {
        &self.group
    }

    pub(super) fn start(&'scope self, call: impl FnOnce(&Lender<'env>) -> Call) -> Result<Pending<'scope>> {
        let work = self.group.submit(call(self.lender))?;
        let mut started = lock(&self.started);
        started.push(Started { work: work.clone(), is_asked: false });
        Ok(Pending { work, started: &self.started, number: started.len() - 1 })
    }

    /// Waits for everything that was started; the first error that no caller has asked for.
    fn wait(&self) -> Option<Error> {
        let mut first = None;
        let started = std::mem::take(&mut *lock(&self.started));
        for Started { work, is_asked } in started {
            match work.wait() {
                Err(error) if !is_asked => _ = first.get_or_insert(error),
                _ => {}
            }
        }
        first
    }
}

fn lock(started: &Mutex<Vec<Started>>) -> MutexGuard<'_, Vec<Started>> {
    started.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Pending<'_> {
    /// Waits until the operation is done.
    ///
    /// # Errors
    /// What made the operation fail.
    pub fn wait(self) -> Result<()> {
        let outcome = self.work.wait();
        lock(self.started)[self.number].is_asked = true;
        outcome
    }

    /// Is it done, with success or without?
    pub fn is_done(&self) -> bool {
        self.work.is_done()
    }

    /// The rank whose message was received, once a receive is done.
    pub fn source(&self) -> Option<Rank> {
        self.work.source()
    }
}

impl fmt::Debug for Scope<'_, '_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Scope({:?}, {} operations)", self.group, lock(&self.started).len())
    }
}

impl fmt::Debug for Pending<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pending({:?})", self.work)
    }
}
