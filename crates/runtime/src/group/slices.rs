//! The operations on slices: borrowed for the length of a call, or of a scope.
//!
//! From each line of the table below come a method of [`Group`] that blocks and one of [`Scope`] that does not. The methods
//! that return lists follow it; they exist only on the group.

use tenfold_memory::{Element, Lender, ReduceOp, lend};
use tenfold_plan::Rank;

use super::Group;
use super::scope::{Pending, Scope};
use crate::call::{Call, Tag};
use crate::fault::{ErrorKind, Fault, Result};
use crate::label::{Label, OpKind};

macro_rules! on_slices {
    ($($(#[$about:meta])* $name:ident<$T:ident>($($argument:ident: $kind:ty),*) |$lender:ident| $call:expr;)*) => {
        impl Group {
            $($(#[$about])*
            ///
            /// Returns when the operation is done. [`Group::scope`] has a method of the same name that returns immediately.
            ///
            /// # Errors
            /// If an argument does not fit the operation or the group, or if the operation fails.
            #[inline]
            pub fn $name<'env, $T: Element>(&self, $($argument: $kind),*) -> Result<()> {
                self.lending(|$lender| $call)
            })*
        }

        impl<'scope, 'env> Scope<'scope, 'env> {
            $(#[doc = concat!("Starts what [`Group::", stringify!($name), "`] does.")]
            ///
            /// # Errors
            /// If an argument does not fit the operation or the group, or if the group has failed.
            pub fn $name<$T: Element>(&'scope self, $($argument: $kind),*) -> Result<Pending<'scope>> {
                self.start(|$lender| $call)
            })*
        }
    };
}

on_slices! {
    /// Combines the values of all ranks, on all ranks.
    ///
    /// ```
    /// # use tenfold::{Group, ReduceOp};
    /// # Group::threads(2, |group| {
    /// let mut gradients = [1.0_f32, 2.0];
    /// group.all_reduce(&mut gradients, ReduceOp::Sum)?;
    /// assert_eq!(gradients, [2.0, 4.0]);
    /// # Ok(()) }).unwrap();
    /// ```
    all_reduce<T>(values: &'env mut [T], op: ReduceOp)
        |lender| Call::AllReduce { tensor: lender.write(values), op };

    /// Copies the values of rank `root` to all ranks.
    ///
    /// ```
    /// # use tenfold::Group;
    /// # Group::threads(2, |group| {
    /// let mut weights = [group.rank() as f32; 3];
    /// group.broadcast(&mut weights, 1)?;
    /// assert_eq!(weights, [1.0; 3]);
    /// # Ok(()) }).unwrap();
    /// ```
    broadcast<T>(values: &'env mut [T], root: Rank)
        |lender| Call::Broadcast { tensor: lender.write(values), root };

    /// Combines the values of all ranks on rank `root`. What the other ranks are left with is not specified.
    reduce<T>(values: &'env mut [T], op: ReduceOp, root: Rank)
        |lender| Call::Reduce { tensor: lender.write(values), op, root };

    /// Combines the values of ranks 0 to `r` on rank `r`, for every rank: the inclusive prefix reduction of MPI.
    ///
    /// ```
    /// # use tenfold::{Group, ReduceOp};
    /// # Group::threads(3, |group| {
    /// let mut end = [10 * (group.rank() + 1) as u64]; // rows of this rank
    /// group.scan(&mut end, ReduceOp::Sum)?;
    /// assert_eq!(end, [[10], [30], [60]][group.rank()]); // where the rows of the next rank begin
    /// # Ok(()) }).unwrap();
    /// ```
    scan<T>(values: &'env mut [T], op: ReduceOp)
        |lender| Call::Scan { tensor: lender.write(values), op };

    /// Puts the inputs of all ranks into `output`, in the order of ranks, on all ranks. All inputs have the same length.
    ///
    /// ```
    /// # use tenfold::Group;
    /// # Group::threads(2, |group| {
    /// let mut ranks = [0_u64; 2];
    /// group.all_gather_into(&mut ranks, &[group.rank() as u64])?;
    /// assert_eq!(ranks, [0, 1]);
    /// # Ok(()) }).unwrap();
    /// ```
    all_gather_into<T>(output: &'env mut [T], input: &'env [T])
        |lender| Call::AllGatherInto { output: lender.write(output), input: lender.read(input) };

    /// Puts the inputs of all ranks into `output` of rank `root`, in the order of ranks. All inputs have the same length. Other
    /// ranks give no output.
    gather_into<T>(output: Option<&'env mut [T]>, input: &'env [T], root: Rank)
        |lender| {
            let output = output.map(|output| lender.write(output));
            Call::GatherInto { output, input: lender.read(input), root }
        };

    /// Copies part `r` of the input of rank `root` to `output` of rank `r`. All parts have the same length. Other ranks give no
    /// input.
    ///
    /// ```
    /// # use tenfold::Group;
    /// # Group::threads(2, |group| {
    /// let input = [10, 11, 20, 21];
    /// let mut part = [0; 2];
    /// group.scatter_from(&mut part, (group.rank() == 0).then_some(&input[..]), 0)?;
    /// assert_eq!(part, if group.rank() == 0 { [10, 11] } else { [20, 21] });
    /// # Ok(()) }).unwrap();
    /// ```
    scatter_from<T>(output: &'env mut [T], input: Option<&'env [T]>, root: Rank)
        |lender| {
            let input = input.map(|input| lender.read(input));
            Call::ScatterFrom { output: lender.write(output), input, root }
        };

    /// Copies input `r` of rank `root` to `output` of rank `r`. All inputs have the same length. Other ranks give no inputs.
    scatter<T>(output: &'env mut [T], inputs: &[&'env [T]], root: Rank)
        |lender| {
            let inputs = inputs.iter().map(|input| lender.read(input)).collect();
            Call::Scatter { output: lender.write(output), inputs, root }
        };

    /// Combines input `r` of all ranks into `output` of rank `r`. Inputs may differ in length.
    reduce_scatter<T>(output: &'env mut [T], inputs: &[&'env [T]], op: ReduceOp)
        |lender| {
            let inputs = inputs.iter().map(|input| lender.read(input)).collect();
            Call::ReduceScatter { output: lender.write(output), inputs, op }
        };

    /// Combines the inputs of all ranks, and leaves part `r` of the result in `output` of rank `r`. All parts have the same
    /// length.
    ///
    /// ```
    /// # use tenfold::{Group, ReduceOp};
    /// # Group::threads(2, |group| {
    /// let mut part = [0.0_f32];
    /// group.reduce_scatter_into(&mut part, &[1.0, 5.0], ReduceOp::Sum)?;
    /// assert_eq!(part, if group.rank() == 0 { [2.0] } else { [10.0] });
    /// # Ok(()) }).unwrap();
    /// ```
    reduce_scatter_into<T>(output: &'env mut [T], input: &'env [T], op: ReduceOp)
        |lender| Call::ReduceScatterInto { output: lender.write(output), input: lender.read(input), op };

    /// Sends part `r` of `input` to rank `r`, and receives part `r` of `output` from rank `r`. The splits are the elements of
    /// each part; an empty list means equal parts.
    ///
    /// ```
    /// # use tenfold::Group;
    /// # Group::threads(2, |group| {
    /// let mut output = [0_usize as u64; 2];
    /// group.all_to_all_single(&mut output, &[group.rank() as u64, 7], &[], &[])?;
    /// assert_eq!(output, if group.rank() == 0 { [0, 1] } else { [7, 7] });
    /// # Ok(()) }).unwrap();
    /// ```
    all_to_all_single<T>(output: &'env mut [T], input: &'env [T], output_splits: &[usize], input_splits: &[usize])
        |lender| Call::AllToAllSingle {
            output: lender.write(output),
            input: lender.read(input),
            output_splits: output_splits.to_vec(),
            input_splits: input_splits.to_vec(),
        };

    /// Sends values to rank `to`, which receives them with the same `tag`.
    ///
    /// ```
    /// # use tenfold::{Group, Tag};
    /// # Group::threads(2, |group| {
    /// if group.rank() == 0 {
    ///     group.send(&[1, 2, 3], 1, Tag(0))?;
    /// } else {
    ///     let mut values = [0; 3];
    ///     group.recv(&mut values, 0, Tag(0))?;
    ///     assert_eq!(values, [1, 2, 3]);
    /// }
    /// # Ok(()) }).unwrap();
    /// ```
    send<T>(values: &'env [T], to: Rank, tag: Tag)
        |lender| Call::Send { tensor: lender.read(values), to, tag };

    /// Receives what rank `from` sends with `tag`. A shorter message leaves the rest of `values` as it is.
    recv<T>(values: &'env mut [T], from: Rank, tag: Tag)
        |lender| Call::Recv { tensor: lender.write(values), from, tag };
}

impl<'scope, 'env> Scope<'scope, 'env> {
    /// Starts what [`Group::recv_any`] does; [`Pending::source`] is the rank that sent the message.
    ///
    /// # Errors
    /// If an argument does not fit the operation or the group, or if the group has failed.
    pub fn recv_any<T: Element>(&'scope self, values: &'env mut [T], tag: Tag) -> Result<Pending<'scope>> {
        self.start(|lender| Call::RecvAny { tensor: lender.write(values), tag })
    }

    /// Starts what [`Group::barrier`] does.
    ///
    /// # Errors
    /// If the group has failed.
    pub fn barrier(&'scope self) -> Result<Pending<'scope>> {
        self.start(|_| Call::Barrier {})
    }
}

impl Group {
    /// Returns when all ranks have called it.
    ///
    /// # Errors
    /// If the operation fails.
    #[inline]
    pub fn barrier(&self) -> Result<()> {
        self.submit(Call::Barrier {})?.wait()
    }

    /// Receives what any rank sends with `tag`, and returns which rank that was. A shorter message leaves the rest of `values`
    /// as it is.
    ///
    /// ```
    /// # use tenfold::{Group, Tag};
    /// # Group::threads(2, |group| {
    /// if group.rank() == 1 {
    ///     return group.send(&[7_u8], 0, Tag(5));
    /// }
    /// let mut value = [0_u8];
    /// assert_eq!(group.recv_any(&mut value, Tag(5))?, 1);
    /// assert_eq!(value, [7]);
    /// # Ok(()) }).unwrap();
    /// ```
    ///
    /// # Errors
    /// If an argument does not fit the group, or if the operation fails.
    pub fn recv_any<T: Element>(&self, values: &mut [T], tag: Tag) -> Result<Rank> {
        lend(
            |lender| {
                let work = self.submit(Call::RecvAny { tensor: lender.write(values), tag })?;
                work.wait()?;
                Ok(work.source().expect("a message that was received has a source"))
            },
            || self.let_go(),
        )
    }

    /// The inputs of all ranks, by rank, on all ranks. They may differ in length, so ranks first exchange their lengths; where
    /// all lengths are known to be equal, [`Group::all_gather_into`] does without that.
    ///
    /// ```
    /// # use tenfold::Group;
    /// # Group::threads(3, |group| {
    /// let words = group.all_gather(&vec![1_u8; group.rank()])?;
    /// assert_eq!(words, [vec![], vec![1], vec![1, 1]]);
    /// # Ok(()) }).unwrap();
    /// ```
    ///
    /// # Errors
    /// If there is not enough memory, or if the operation fails.
    pub fn all_gather<T: Element>(&self, input: &[T]) -> Result<Vec<Vec<T>>> {
        let lengths = self.exchange(&[input.len() as i64])?;
        let lengths = lengths.into_iter().map(|[length]| length);
        let mut outputs = self.lists_of::<T>(OpKind::AllGather, lengths)?;
        self.lending(|lender| {
            let outputs = outputs.iter_mut().map(|output| lender.write(output)).collect();
            Call::AllGather { outputs, input: lender.read(input) }
        })?;
        Ok(outputs)
    }

    /// The inputs of all ranks, by rank, on rank `root`; nothing on the others. All inputs have the same length.
    ///
    /// ```
    /// # use tenfold::Group;
    /// # Group::threads(2, |group| {
    /// let gathered = group.gather(&[group.rank() as i64], 0)?;
    /// assert_eq!(gathered, (group.rank() == 0).then(|| vec![vec![0], vec![1]]));
    /// # Ok(()) }).unwrap();
    /// ```
    ///
    /// # Errors
    /// If the root does not exist, there is not enough memory, or the operation fails.
    pub fn gather<T: Element>(&self, input: &[T], root: Rank) -> Result<Option<Vec<Vec<T>>>> {
        let is_root = self.rank() == root;
        let count = if is_root { self.size() } else { 0 };
        let mut outputs =
            self.lists_of::<T>(OpKind::Gather, std::iter::repeat_n(input.len() as i64, count))?;
        self.lending(|lender| {
            let outputs = outputs.iter_mut().map(|output| lender.write(output)).collect();
            Call::Gather { outputs, input: lender.read(input), root }
        })?;
        Ok(is_root.then_some(outputs))
    }

    /// Sends input `r` to rank `r`, and returns what all ranks sent to this one, by rank. Inputs may differ in length, so ranks
    /// first exchange the lengths; [`Group::all_to_all_single`] does without that.
    ///
    /// ```
    /// # use tenfold::Group;
    /// # Group::threads(2, |group| {
    /// let rank = group.rank() as u8;
    /// let received = group.all_to_all(&[&[rank], &[rank, 9]])?;
    /// assert_eq!(received, if rank == 0 { [vec![0], vec![1]] } else { [vec![0, 9], vec![1, 9]] });
    /// # Ok(()) }).unwrap();
    /// ```
    ///
    /// # Errors
    /// If there is not one input for each rank or not enough memory, or if the operation fails.
    pub fn all_to_all<T: Element>(&self, inputs: &[&[T]]) -> Result<Vec<Vec<T>>> {
        if inputs.len() != self.size() {
            let label = Label::new(OpKind::AllToAll, 0).elements(T::DTYPE, 0);
            let message = format!("there are {} inputs for {} ranks", inputs.len(), self.size());
            return self.refuse(&label, message);
        }
        let sent: Vec<i64> = inputs.iter().map(|input| input.len() as i64).collect();
        let mut lengths = vec![0_i64; self.size()];
        self.all_to_all_single(&mut lengths, &sent, &[], &[])?;
        let mut outputs = self.lists_of::<T>(OpKind::AllToAll, lengths.into_iter())?;
        self.lending(|lender| {
            let outputs = outputs.iter_mut().map(|output| lender.write(output)).collect();
            let inputs = inputs.iter().map(|input| lender.read(input)).collect();
            Call::AllToAll { outputs, inputs }
        })?;
        Ok(outputs)
    }

    /// Zeroes, as many as the ranks said.
    fn lists_of<T: Element>(&self, kind: OpKind, lengths: impl Iterator<Item = i64>) -> Result<Vec<Vec<T>>> {
        let list = |length: i64| {
            let mut list = Vec::new();
            let length = usize::try_from(length).unwrap_or(usize::MAX);
            if list.try_reserve_exact(length).is_err() {
                let message = format!("there is no memory for {length} elements of {}", T::DTYPE);
                return Err(self.error(Label::new(kind, 0), Fault::new(ErrorKind::Io, message)));
            }
            list.resize(length, T::zero());
            Ok(list)
        };
        lengths.map(list).collect()
    }

    /// Starts an operation on borrowed slices and waits until it is done, and until no view of them is left.
    #[inline]
    fn lending<'env>(&self, call: impl FnOnce(&Lender<'env>) -> Call) -> Result<()> {
        lend(|lender| self.submit(call(lender))?.wait(), || self.let_go())
    }

    /// Makes the engine let go of borrowed memory, although it has not said that the operation is done: something panicked
    /// inside the engine, such as a subscriber of `tracing`. The group fails.
    #[cold]
    pub(super) fn let_go(&self) {
        let fabric = &self.inner.fabric;
        if fabric.check_process().is_err() {
            // The slices are borrowed by operations of the parent, which this process can neither complete nor abandon.
            eprintln!("tenfold: a forked child left a scope of a group of its parent; ending the child");
            std::process::abort();
        }
        let message = format!("rank {} panicked inside an operation of the group", self.rank());
        let fault = Fault::new(ErrorKind::Aborted, message).peer(self.rank());
        let failed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            fabric.engine.fail(fabric, self.inner.index, fault.clone());
        }));
        if let Err(panic) = failed {
            std::mem::forget(panic); // dropping it may panic again
        }
        let mut finished = Vec::new();
        fabric.engine.with(|state| {
            let group = state.group(self.inner.index);
            if group.is_busy() {
                group.close(fault, &mut finished);
            }
        });
        finished.into_iter().for_each(|work| work.tell());
    }
}
