//! A group without other ranks.

use tenfold_memory::BufferView;
use tenfold_plan::Rank;

use crate::Seat;
use crate::call::{Backend, Call};
use crate::fault::Result;
use crate::label::Label;
use crate::work::Work;

/// A group without other ranks: all operations are over immediately, and no data moves. As c10d's, for running one rank of a
/// large job alone, to see that it completes, what it allocates and what it would call.
///
/// Tensors stay as they are, except that a gather to all fills every part with this rank's own.
///
/// ```
/// use tenfold::{Backend as _, Buffer, FakeGroup, ReduceOp, Seat};
/// let group = FakeGroup::new(Seat { rank: 3, size: 1024 });
/// let mut tensor = Buffer::from_slice(&[1.0_f32]);
/// group.start_all_reduce(tensor.lend(), ReduceOp::Sum)?.wait()?;
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
    pub fn new(Seat { rank, size }: Seat) -> Self {
        assert!(rank < size, "rank {rank} of {size}");
        FakeGroup { rank, size }
    }
}

impl Backend for FakeGroup {
    fn rank(&self) -> Rank {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn submit(&self, call: Call) -> Result<Work> {
        match &call {
            Call::AllGather { outputs, input } => copy_to_each(input, outputs),
            Call::AllGatherInto { output, input } => repeat(input, output),
            Call::AllGatherCoalesced { outputs, inputs } => {
                inputs.iter().zip(outputs).for_each(|(input, outputs)| copy_to_each(input, outputs));
            }
            Call::AllGatherIntoCoalesced { outputs, inputs } => {
                inputs.iter().zip(outputs).for_each(|(input, output)| repeat(input, output));
            }
            _ => {}
        }
        Ok(Work::done(Label::new(call.kind(), 0), "fake"))
    }
}

fn copy_to_each(input: &BufferView, outputs: &[BufferView]) {
    for output in outputs.iter().filter(|output| output.byte_len() == input.byte_len()) {
        output.span().copy_from(input.bytes());
    }
}

/// Fills every part of the output with the input.
fn repeat(input: &BufferView, output: &BufferView) {
    let part = input.byte_len();
    let parts = output.byte_len().checked_div(part).unwrap_or(0);
    for start in (0..parts).map(|number| number * part) {
        output.span().part(start, start + part).copy_from(input.bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Group;
    use tenfold_memory::{Buffer, DType};

    /// Code that does not know what it talks to.
    fn program(group: &impl Backend) -> Result<Vec<f32>> {
        let mut own = Buffer::from_slice(&[group.rank() as f32 + 1.0]);
        let mut all = Buffer::zeros(DType::F32, group.size());
        group.start_all_gather_into(all.lend(), own.lend())?.wait()?;
        group.start_barrier()?.wait()?;
        Ok(all.as_slice::<f32>().to_vec())
    }

    #[test]
    fn one_program_runs_on_a_real_group_and_on_a_fake_one() {
        assert_eq!(Group::threads(2, |group| program(&group)).unwrap(), [[1.0, 2.0], [1.0, 2.0]]);
        assert_eq!(program(&FakeGroup::new(Seat { rank: 1, size: 3 })).unwrap(), [2.0, 2.0, 2.0]);
    }
}
