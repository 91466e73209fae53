//! What a program needs of a group, so that it can be given a real one or a fake.

use tenfold_memory::{ReduceOp, TensorView};
use tenfold_plan::Rank;

use crate::fault::Result;
use crate::work::Work;
use crate::{Group, Label, OpKind};

/// The operations of a group. See the methods of [`Group`] of the same names.
#[expect(missing_docs, reason = "each is documented where it is done")]
pub trait Collectives {
    fn rank(&self) -> Rank;
    fn size(&self) -> usize;
    fn all_gather(&self, outputs: Vec<TensorView>, input: TensorView) -> Result<Work>;
    fn all_gather_into(&self, output: TensorView, input: TensorView) -> Result<Work>;
    fn all_reduce(&self, tensor: TensorView, op: ReduceOp) -> Result<Work>;
    fn all_to_all(&self, outputs: Vec<TensorView>, inputs: Vec<TensorView>) -> Result<Work>;
    fn all_to_all_single(
        &self,
        output: TensorView,
        input: TensorView,
        output_splits: &[usize],
        input_splits: &[usize],
    ) -> Result<Work>;
    fn barrier(&self) -> Result<Work>;
    fn broadcast(&self, tensor: TensorView, root: Rank) -> Result<Work>;
    fn gather(&self, outputs: Vec<TensorView>, input: TensorView, root: Rank) -> Result<Work>;
    fn recv(&self, tensor: TensorView, from: Rank, tag: u32) -> Result<Work>;
    fn reduce(&self, tensor: TensorView, op: ReduceOp, root: Rank) -> Result<Work>;
    fn reduce_scatter(&self, output: TensorView, inputs: Vec<TensorView>, op: ReduceOp) -> Result<Work>;
    fn reduce_scatter_into(&self, output: TensorView, input: TensorView, op: ReduceOp) -> Result<Work>;
    fn scatter(&self, output: TensorView, inputs: Vec<TensorView>, root: Rank) -> Result<Work>;
    fn send(&self, tensor: TensorView, to: Rank, tag: u32) -> Result<Work>;
}

/// Every method of the trait, done by the method of the same name.
macro_rules! delegate {
    ($($name:ident($($argument:ident: $kind:ty),*) -> $result:ty;)*) => {
        impl Collectives for Group {
            $(fn $name(&self, $($argument: $kind),*) -> $result {
                Group::$name(self, $($argument),*)
            })*
        }
    };
}

delegate! {
    rank() -> Rank;
    size() -> usize;
    all_gather(outputs: Vec<TensorView>, input: TensorView) -> Result<Work>;
    all_gather_into(output: TensorView, input: TensorView) -> Result<Work>;
    all_reduce(tensor: TensorView, op: ReduceOp) -> Result<Work>;
    all_to_all(outputs: Vec<TensorView>, inputs: Vec<TensorView>) -> Result<Work>;
    all_to_all_single(output: TensorView, input: TensorView, to: &[usize], from: &[usize]) -> Result<Work>;
    barrier() -> Result<Work>;
    broadcast(tensor: TensorView, root: Rank) -> Result<Work>;
    gather(outputs: Vec<TensorView>, input: TensorView, root: Rank) -> Result<Work>;
    recv(tensor: TensorView, from: Rank, tag: u32) -> Result<Work>;
    reduce(tensor: TensorView, op: ReduceOp, root: Rank) -> Result<Work>;
    reduce_scatter(output: TensorView, inputs: Vec<TensorView>, op: ReduceOp) -> Result<Work>;
    reduce_scatter_into(output: TensorView, input: TensorView, op: ReduceOp) -> Result<Work>;
    scatter(output: TensorView, inputs: Vec<TensorView>, root: Rank) -> Result<Work>;
    send(tensor: TensorView, to: Rank, tag: u32) -> Result<Work>;
}

/// A group whose other ranks are not there: everything is over at once, and nothing moves. As c10d's, for running one rank
/// of a large job alone: to see that it gets through, what it allocates, what it would call.
///
/// Tensors stay as they are, except that a gather to all fills every part with this rank's own.
///
/// ```
/// use tenfold::{Collectives, FakeGroup, ReduceOp, Tensor};
/// let group = FakeGroup::new(3, 1024);
/// let mut tensor = Tensor::from_slice(&[1.0_f32]);
/// group.all_reduce(tensor.lend(), ReduceOp::Sum)?.wait()?;
/// assert_eq!(tensor.as_slice::<f32>(), [1.0]);
/// # Ok::<(), tenfold::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct FakeGroup {
    rank: Rank,
    size: usize,
}

impl FakeGroup {
    /// # Panics
    /// If there is no such rank.
    pub fn new(rank: Rank, size: usize) -> Self {
        assert!(rank < size, "rank {rank} of {size}");
        FakeGroup { rank, size }
    }

    fn done(&self, kind: OpKind) -> Result<Work> {
        Ok(Work::done(Label::new(kind, 0), "fake"))
    }
}

impl Collectives for FakeGroup {
    fn rank(&self) -> Rank {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn all_gather(&self, outputs: Vec<TensorView>, input: TensorView) -> Result<Work> {
        for output in outputs.iter().filter(|output| output.byte_len() == input.byte_len()) {
            output.span().copy_from(input.span().bytes());
        }
        self.done(OpKind::AllGather)
    }

    fn all_gather_into(&self, output: TensorView, input: TensorView) -> Result<Work> {
        let part = input.byte_len();
        let parts = output.byte_len().checked_div(part).unwrap_or(0);
        for start in (0..parts).map(|number| number * part) {
            output.span().part(start, start + part).copy_from(input.span().bytes());
        }
        self.done(OpKind::AllGatherInto)
    }

    fn all_reduce(&self, _: TensorView, _: ReduceOp) -> Result<Work> {
        self.done(OpKind::AllReduce)
    }

    fn all_to_all(&self, _: Vec<TensorView>, _: Vec<TensorView>) -> Result<Work> {
        self.done(OpKind::AllToAll)
    }

    fn all_to_all_single(&self, _: TensorView, _: TensorView, _: &[usize], _: &[usize]) -> Result<Work> {
        self.done(OpKind::AllToAllSingle)
    }

    fn barrier(&self) -> Result<Work> {
        self.done(OpKind::Barrier)
    }

    fn broadcast(&self, _: TensorView, _: Rank) -> Result<Work> {
        self.done(OpKind::Broadcast)
    }

    fn gather(&self, _: Vec<TensorView>, _: TensorView, _: Rank) -> Result<Work> {
        self.done(OpKind::Gather)
    }

    fn recv(&self, _: TensorView, _: Rank, _: u32) -> Result<Work> {
        self.done(OpKind::Recv)
    }

    fn reduce(&self, _: TensorView, _: ReduceOp, _: Rank) -> Result<Work> {
        self.done(OpKind::Reduce)
    }

    fn reduce_scatter(&self, _: TensorView, _: Vec<TensorView>, _: ReduceOp) -> Result<Work> {
        self.done(OpKind::ReduceScatter)
    }

    fn reduce_scatter_into(&self, _: TensorView, _: TensorView, _: ReduceOp) -> Result<Work> {
        self.done(OpKind::ReduceScatterInto)
    }

    fn scatter(&self, _: TensorView, _: Vec<TensorView>, _: Rank) -> Result<Work> {
        self.done(OpKind::Scatter)
    }

    fn send(&self, _: TensorView, _: Rank, _: u32) -> Result<Work> {
        self.done(OpKind::Send)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tenfold_memory::{DType, Tensor};

    /// Code that does not know what it talks to.
    fn program(group: &impl Collectives) -> Result<Vec<f32>> {
        let mut own = Tensor::from_slice(&[group.rank() as f32 + 1.0]);
        let mut all = Tensor::zeros(DType::F32, group.size());
        group.all_gather_into(all.lend(), own.lend())?.wait()?;
        group.barrier()?.wait()?;
        Ok(all.as_slice::<f32>().to_vec())
    }

    #[test]
    fn one_program_runs_on_a_real_group_and_on_a_fake() {
        assert_eq!(Group::threads(2, |group| program(&group)).unwrap(), [[1.0, 2.0], [1.0, 2.0]]);
        assert_eq!(program(&FakeGroup::new(1, 3)).unwrap(), [2.0, 2.0, 2.0]);
    }
}
