//! Several tensors or several calls as one.

use tenfold_memory::{ReduceOp, Tensor, TensorView};

use super::Group;
use crate::fault::Result;
use crate::label::{Label, OpKind};
use crate::work::Work;

impl Group {
    /// As if the tensors were one: combined on all ranks, in place. They have one dtype.
    ///
    /// # Errors
    /// If dtypes differ, or the dtype has no such reduction, or the group has failed.
    pub fn all_reduce_coalesced(&self, tensors: Vec<TensorView>, op: ReduceOp) -> Result<Work> {
        let label = Label::new(OpKind::AllReduceCoalesced, 0).reduction(&op);
        let Some(dtype) = tensors.first().map(TensorView::dtype) else {
            return self.refuse(&label, "there are no tensors".to_string());
        };
        if let Some(other) = tensors.iter().find(|tensor| tensor.dtype() != dtype) {
            return self.refuse(&label, format!("tensors of {dtype} and {} cannot be one", other.dtype()));
        }
        if self.inner.checks_numbers {
            self.check_tensors(&label, tensors.iter())?; // while they can still be told apart
        }
        let total = tensors.iter().map(TensorView::elements).sum();
        let mut flat = Tensor::zeros(dtype, total);
        let view = flat.lend();
        let mut start = 0;
        let ends: Vec<usize> = tensors
            .iter()
            .map(|tensor| {
                let end = start + tensor.byte_len();
                tensor.pack(view.span().part(start, end));
                start = end;
                end
            })
            .collect();
        let finish = Box::new(move |flat: TensorView| {
            for (tensor, end) in tensors.iter().zip(ends) {
                tensor.unpack(flat.span().part(end - tensor.byte_len(), end).bytes());
            }
        });
        self.all_reduce_packed(OpKind::AllReduceCoalesced, view, &op, finish)
    }

    /// Several [`Group::all_gather_into`] as one work.
    ///
    /// # Errors
    /// See there.
    pub fn all_gather_into_coalesced(
        &self,
        outputs: Vec<TensorView>,
        inputs: Vec<TensorView>,
    ) -> Result<Work> {
        self.check_pairs(OpKind::AllGatherCoalesced, outputs.len(), inputs.len())?;
        self.coalesce(|group| {
            outputs
                .into_iter()
                .zip(inputs)
                .map(|(output, input)| group.all_gather_into(output, input))
                .collect()
        })
    }

    /// Several [`Group::all_gather`] as one work: for every input a list of outputs, one per rank.
    ///
    /// # Errors
    /// See there.
    pub fn all_gather_coalesced(
        &self,
        outputs: Vec<Vec<TensorView>>,
        inputs: Vec<TensorView>,
    ) -> Result<Work> {
        self.check_pairs(OpKind::AllGatherCoalesced, outputs.len(), inputs.len())?;
        self.coalesce(|group| {
            let pairs = outputs.into_iter().zip(inputs);
            pairs
                .map(|(outputs, input)| group.all_gather_as(OpKind::AllGatherCoalesced, outputs, input))
                .collect()
        })
    }

    /// Several [`Group::reduce_scatter_into`] as one work.
    ///
    /// # Errors
    /// See there.
    pub fn reduce_scatter_into_coalesced(
        &self,
        outputs: Vec<TensorView>,
        inputs: Vec<TensorView>,
        op: ReduceOp,
    ) -> Result<Work> {
        self.check_pairs(OpKind::ReduceScatterInto, outputs.len(), inputs.len())?;
        self.coalesce(|group| {
            let pairs = outputs.into_iter().zip(inputs);
            pairs.map(|(output, input)| group.reduce_scatter_into(output, input, op.clone())).collect()
        })
    }

    fn check_pairs(&self, kind: OpKind, outputs: usize, inputs: usize) -> Result<()> {
        if outputs == inputs {
            return Ok(());
        }
        self.refuse(&Label::new(kind, 0), format!("there are {outputs} outputs for {inputs} inputs"))
    }

    /// Several calls as one work, which is done when all are. They overlap where they can.
    ///
    /// ```
    /// # use tenfold::{Group, ReduceOp, Tensor};
    /// # Group::threads(2, |group| {
    /// let (mut one, mut two) = (Tensor::from_slice(&[1.0_f32]), Tensor::from_slice(&[2_i64]));
    /// let work = group.coalesce(|group| {
    ///     Ok(vec![group.all_reduce(one.lend(), ReduceOp::Sum)?, group.broadcast(two.lend(), 0)?])
    /// })?;
    /// work.wait()?;
    /// # Ok(()) }).unwrap();
    /// ```
    ///
    /// # Errors
    /// The first call that was refused; those before it go on.
    pub fn coalesce(&self, calls: impl FnOnce(&Group) -> Result<Vec<Work>>) -> Result<Work> {
        let works = calls(self)?;
        let label = Label::new(OpKind::Coalesced, works.last().map_or(0, Work::sequence_number));
        Ok(Work::join(label, works))
    }
}
