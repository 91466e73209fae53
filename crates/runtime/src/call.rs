//! Every operation of a group, as a value.
//!
//! The table below is the one place that lists them. From each line come a variant of [`Call`], a method of [`Group`] and a method
//! of the trait [`Backend`], so a program can be written for any of them, and what looks at calls looks at one type. What a call
//! does is in `group/`.

use tenfold_memory::{BufferView, ReduceOp};
use tenfold_plan::Rank;

use crate::Group;
use crate::fault::Result;
use crate::label::OpKind;
use crate::work::Work;

/// Tells messages between two ranks apart: a receive takes the first message that has its tag.
///
/// ```
/// use tenfold::{Group, Tag};
///
/// const NAMES: Tag = Tag(1);
/// const AGES: Tag = Tag(2);
/// Group::threads(2, |group| {
///     if group.rank() == 0 {
///         group.send(b"Ada", 1, NAMES)?;
///         return group.send(&[36_u8], 1, AGES);
///     }
///     let (mut name, mut age) = ([0; 3], [0_u8]);
///     group.recv(&mut age, 0, AGES)?; // in any order
///     group.recv(&mut name, 0, NAMES)?;
///     assert_eq!((&name, age), (b"Ada", [36]));
///     Ok(())
/// })?;
/// # Ok::<(), tenfold::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Tag(pub u32);

impl From<u32> for Tag {
    fn from(number: u32) -> Self {
        Tag(number)
    }
}

macro_rules! operations {
    ($($(#[$about:meta])* $name:ident($($argument:ident: $kind:ty),*) $variant:ident;)*) => {
        /// An operation of a group with its arguments. A method of [`Group`] starts each variant; [`Group::submit`] starts any.
        ///
        /// ```
        /// use tenfold::{Buffer, Call, OpKind};
        /// let call = Call::Broadcast { tensor: Buffer::from_slice(&[1.0_f32]).lend(), root: 0 };
        /// assert_eq!(call.kind(), OpKind::Broadcast);
        /// ```
        #[derive(Debug)]
        #[non_exhaustive]
        #[expect(missing_docs, reason = "the arguments are documented at the methods")]
        pub enum Call {
            $(#[doc = concat!("See [`Group::", stringify!($name), "`].")] $variant { $($argument: $kind),* },)*
        }

        impl Group {
            $($(#[$about])*
            ///
            /// # Errors
            /// If an argument does not fit the operation or the group, or if the group has failed.
            #[inline]
            pub fn $name(&self, $($argument: $kind),*) -> Result<Work> {
                self.submit(Call::$variant { $($argument),* })
            })*
        }

        /// What can run the operations of a group: a [`Group`], or a [fake one](crate::FakeGroup).
        ///
        /// A program that takes a backend runs on all of them. To write one, write `submit`.
        ///
        /// ```
        /// use tenfold::{Backend, Buffer, FakeGroup, Group, ReduceOp, Seat};
        ///
        /// fn count(group: &impl Backend) -> tenfold::Result<i32> {
        ///     let mut one = Buffer::from_slice(&[1]);
        ///     group.start_all_reduce(one.lend(), ReduceOp::Sum)?.wait()?;
        ///     Ok(one.as_slice::<i32>()[0])
        /// }
        /// assert_eq!(Group::threads(3, |group| count(&group))?, [3; 3]);
        /// assert_eq!(count(&FakeGroup::new(Seat { rank: 0, size: 3 }))?, 1);
        /// # Ok::<(), tenfold::Error>(())
        /// ```
        pub trait Backend {
            /// The number of this rank.
            fn rank(&self) -> Rank;

            /// How many ranks there are.
            fn size(&self) -> usize;

            /// Starts an operation.
            ///
            /// # Errors
            /// If an argument does not fit the operation or the group, or if the group has failed.
            fn submit(&self, call: Call) -> Result<Work>;

            $(#[doc = concat!("See [`Group::", stringify!($name), "`].")]
            ///
            /// # Errors
            /// See [`Backend::submit`].
            fn $name(&self, $($argument: $kind),*) -> Result<Work> {
                self.submit(Call::$variant { $($argument),* })
            })*
        }
    };
}

impl Call {
    /// Which operation this is.
    pub fn kind(&self) -> OpKind {
        match self {
            Call::AllReduce { .. } | Call::AllReduceSeveral { .. } => OpKind::AllReduce,
            Call::AllReduceCoalesced { .. } => OpKind::AllReduceCoalesced,
            Call::Broadcast { .. } | Call::BroadcastSeveral { .. } => OpKind::Broadcast,
            Call::Reduce { .. } => OpKind::Reduce,
            Call::Scan { .. } => OpKind::Scan,
            Call::AllGather { .. } => OpKind::AllGather,
            Call::AllGatherInto { .. } => OpKind::AllGatherInto,
            Call::AllGatherCoalesced { .. } => OpKind::AllGatherCoalesced,
            Call::AllGatherIntoCoalesced { .. } => OpKind::AllGatherIntoCoalesced,
            Call::Gather { .. } | Call::GatherInto { .. } => OpKind::Gather,
            Call::Scatter { .. } | Call::ScatterFrom { .. } => OpKind::Scatter,
            Call::ReduceScatter { .. } => OpKind::ReduceScatter,
            Call::ReduceScatterInto { .. } => OpKind::ReduceScatterInto,
            Call::ReduceScatterIntoCoalesced { .. } => OpKind::ReduceScatterIntoCoalesced,
            Call::AllToAll { .. } => OpKind::AllToAll,
            Call::AllToAllSingle { .. } => OpKind::AllToAllSingle,
            Call::Barrier { .. } => OpKind::Barrier,
            Call::Send { .. } => OpKind::Send,
            Call::Recv { .. } => OpKind::Recv,
            Call::RecvAny { .. } => OpKind::RecvAnySource,
        }
    }
}

operations! {
    /// Combines the tensors of all ranks, in place, on all ranks.
    start_all_reduce(tensor: BufferView, op: ReduceOp) AllReduce;

    /// Combines several tensors of one dtype as if they were one.
    start_all_reduce_coalesced(tensors: Vec<BufferView>, op: ReduceOp) AllReduceCoalesced;

    /// Treats each tensor of this rank as if it belonged to a rank of its own: all tensors of all ranks are combined, and each
    /// gets the result. AVG divides by the number of ranks.
    ///
    /// ```
    /// # use tenfold::{Group, ReduceOp, Buffer};
    /// # Group::threads(2, |group| {
    /// let (mut one, mut two) = (Buffer::from_slice(&[1.0_f32]), Buffer::from_slice(&[10.0_f32]));
    /// group.start_all_reduce_several(vec![one.lend(), two.lend()], ReduceOp::Sum)?.wait()?;
    /// assert_eq!((one.as_slice::<f32>(), two.as_slice::<f32>()), (&[22.0_f32][..], &[22.0_f32][..]));
    /// # Ok(()) }).unwrap();
    /// ```
    start_all_reduce_several(tensors: Vec<BufferView>, op: ReduceOp) AllReduceSeveral;

    /// Copies the root's tensor to all ranks.
    start_broadcast(tensor: BufferView, root: Rank) Broadcast;

    /// Copies tensor `root_tensor` of the root to every tensor of every rank.
    start_broadcast_several(tensors: Vec<BufferView>, root: Rank, root_tensor: usize) BroadcastSeveral;

    /// Combines the tensors of all ranks on `root`. The tensors of the other ranks may be used as scratch memory.
    start_reduce(tensor: BufferView, op: ReduceOp, root: Rank) Reduce;

    /// Combines the tensors of ranks 0 to `r` on rank `r`, in place, for every rank: the inclusive prefix reduction of MPI. AVG
    /// divides by the number of ranks that were combined.
    start_scan(tensor: BufferView, op: ReduceOp) Scan;

    /// Puts the `input` of rank `r` into output `r`, on all ranks. Inputs may differ in length.
    start_all_gather(outputs: Vec<BufferView>, input: BufferView) AllGather;

    /// Puts the inputs of all ranks into `output`, in the order of ranks, on all ranks. All inputs have the same length.
    start_all_gather_into(output: BufferView, input: BufferView) AllGatherInto;

    /// Runs several [`Group::start_all_gather`] as one work: for each input a list of outputs, one per rank.
    start_all_gather_coalesced(outputs: Vec<Vec<BufferView>>, inputs: Vec<BufferView>) AllGatherCoalesced;

    /// Runs several [`Group::start_all_gather_into`] as one work.
    start_all_gather_into_coalesced(outputs: Vec<BufferView>, inputs: Vec<BufferView>) AllGatherIntoCoalesced;

    /// Puts the `input` of rank `r` into output `r` of the root. Other ranks give no outputs.
    start_gather(outputs: Vec<BufferView>, input: BufferView, root: Rank) Gather;

    /// Puts the inputs of all ranks into `output` of the root, in the order of ranks. Other ranks give no output.
    start_gather_into(output: Option<BufferView>, input: BufferView, root: Rank) GatherInto;

    /// Copies input `r` of the root to `output` of rank `r`. Other ranks give no inputs.
    start_scatter(output: BufferView, inputs: Vec<BufferView>, root: Rank) Scatter;

    /// Copies part `r` of the root's `input` to `output` of rank `r`. Other ranks give no input.
    start_scatter_from(output: BufferView, input: Option<BufferView>, root: Rank) ScatterFrom;

    /// Combines input `r` of all ranks into `output` of rank `r`. Inputs may differ in length.
    start_reduce_scatter(output: BufferView, inputs: Vec<BufferView>, op: ReduceOp) ReduceScatter;

    /// Combines the inputs of all ranks, and leaves part `r` of the result in `output` of rank `r`.
    start_reduce_scatter_into(output: BufferView, input: BufferView, op: ReduceOp) ReduceScatterInto;

    /// Runs several [`Group::start_reduce_scatter_into`] as one work.
    start_reduce_scatter_into_coalesced(outputs: Vec<BufferView>, inputs: Vec<BufferView>, op: ReduceOp)
        ReduceScatterIntoCoalesced;

    /// Sends input `r` to rank `r`, and receives output `r` from rank `r`. Tensors may differ in length.
    start_all_to_all(outputs: Vec<BufferView>, inputs: Vec<BufferView>) AllToAll;

    /// Sends part `r` of `input` to rank `r`, and receives part `r` of `output` from rank `r`. The splits are the elements of
    /// each part; an empty list means equal parts.
    start_all_to_all_single(output: BufferView, input: BufferView, output_splits: Vec<usize>, input_splits: Vec<usize>)
        AllToAllSingle;

    /// Completes when all ranks have called it.
    start_barrier() Barrier;

    /// Sends a tensor to rank `to`, which receives it with the same `tag`.
    start_send(tensor: BufferView, to: Rank, tag: Tag) Send;

    /// Receives what rank `from` sends with `tag`. A shorter message leaves the rest of the tensor as it is.
    start_recv(tensor: BufferView, from: Rank, tag: Tag) Recv;

    /// Receives what any rank sends with `tag`; [`Work::source`] is that rank.
    start_recv_any(tensor: BufferView, tag: Tag) RecvAny;
}

impl Backend for Group {
    fn rank(&self) -> Rank {
        Group::rank(self)
    }

    fn size(&self) -> usize {
        Group::size(self)
    }

    fn submit(&self, call: Call) -> Result<Work> {
        Group::submit(self, call)
    }
}

impl Group {
    /// Starts an operation that is given as a value.
    ///
    /// ```
    /// use tenfold::{Call, Group, ReduceOp, Buffer};
    /// Group::threads(2, |group| {
    ///     let mut tensor = Buffer::from_slice(&[1.0_f32]);
    ///     group.submit(Call::AllReduce { tensor: tensor.lend(), op: ReduceOp::Sum })?.wait()?;
    ///     assert_eq!(tensor.as_slice::<f32>(), [2.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), tenfold::Error>(())
    /// ```
    ///
    /// # Errors
    /// If an argument does not fit the operation or the group, or if the group has failed.
    // Always inlined: where the variant is known, as in the methods above, nothing of the match is left.
    #[inline(always)]
    pub fn submit(&self, call: Call) -> Result<Work> {
        match call {
            Call::AllReduce { tensor, op } => self.begin_all_reduce(tensor, &op),
            Call::AllReduceCoalesced { tensors, op } => self.begin_all_reduce_coalesced(tensors, &op),
            Call::AllReduceSeveral { tensors, op } => self.begin_all_reduce_several(tensors, &op),
            Call::Broadcast { tensor, root } => self.begin_broadcast(tensor, root),
            Call::BroadcastSeveral { tensors, root, root_tensor } => {
                self.begin_broadcast_several(tensors, root, root_tensor)
            }
            Call::Reduce { tensor, op, root } => self.begin_reduce(tensor, &op, root),
            Call::Scan { tensor, op } => self.begin_scan(tensor, &op),
            Call::AllGather { outputs, input } => self.begin_all_gather(outputs, input),
            Call::AllGatherInto { output, input } => self.begin_all_gather_into(output, input),
            Call::AllGatherCoalesced { outputs, inputs } => self.begin_all_gather_coalesced(outputs, inputs),
            Call::AllGatherIntoCoalesced { outputs, inputs } => {
                self.begin_all_gather_into_coalesced(outputs, inputs)
            }
            Call::Gather { outputs, input, root } => self.begin_gather(outputs, input, root),
            Call::GatherInto { output, input, root } => self.begin_gather_into(output, input, root),
            Call::Scatter { output, inputs, root } => self.begin_scatter(output, inputs, root),
            Call::ScatterFrom { output, input, root } => self.begin_scatter_from(output, input, root),
            Call::ReduceScatter { output, inputs, op } => self.begin_reduce_scatter(output, inputs, &op),
            Call::ReduceScatterInto { output, input, op } => {
                self.begin_reduce_scatter_into(output, input, &op)
            }
            Call::ReduceScatterIntoCoalesced { outputs, inputs, op } => {
                self.begin_reduce_scatter_into_coalesced(outputs, inputs, &op)
            }
            Call::AllToAll { outputs, inputs } => self.begin_all_to_all(outputs, inputs),
            Call::AllToAllSingle { output, input, output_splits, input_splits } => {
                self.begin_all_to_all_single(output, input, &output_splits, &input_splits)
            }
            Call::Barrier {} => self.begin_barrier(),
            Call::Send { tensor, to, tag } => self.begin_send(tensor, to, tag.0),
            Call::Recv { tensor, from, tag } => self.begin_recv(tensor, from, tag.0),
            Call::RecvAny { tensor, tag } => self.begin_recv_any(tensor, tag.0),
        }
    }
}
