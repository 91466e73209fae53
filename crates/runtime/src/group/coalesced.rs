//! Several tensors or several calls as one.

use tenfold_memory::{Buffer, BufferView, ReduceOp, Reduction};
use tenfold_plan::{Kind, Rank};

use super::Group;
use super::submit::Request;
use crate::fault::Result;
use crate::label::{Label, OpKind};
use crate::run::Buffers;
use crate::work::Work;

impl Group {
    pub(crate) fn begin_all_reduce_several(&self, tensors: Vec<BufferView>, op: &ReduceOp) -> Result<Work> {
        let label = Label::new(OpKind::AllReduce, 0).reduction(op);
        let first = self.check_alike(&label, &tensors)?;
        let (dtype, elements) = (first.dtype(), first.elements());
        if self.inner.checks_numbers {
            self.check_tensors(&label, tensors.iter())?; // while they are still separate tensors
        }
        // Factors and division are for the call between ranks; before it, tensors are only summed.
        let local = match op {
            ReduceOp::Avg | ReduceOp::PremulSum(_) => ReduceOp::Sum,
            other => other.clone(),
        };
        let reduction: Reduction = self.reduction(&label, &local, dtype)?;
        let (mut flat, mut next) = (Buffer::zeros(dtype, elements), Buffer::zeros(dtype, elements));
        let (view, packed) = (flat.lend(), next.lend());
        first.pack(view.span());
        for tensor in &tensors[1..] {
            tensor.pack(packed.span());
            reduction.combine(view.span(), &[view.span().bytes(), packed.span().bytes()], false);
        }
        let finish = move |flat: BufferView| copy_to_all(&flat, &tensors);
        self.all_reduce_packed(OpKind::AllReduce, view, op, finish)
    }

    pub(crate) fn begin_broadcast_several(
        &self,
        tensors: Vec<BufferView>,
        root: Rank,
        root_tensor: usize,
    ) -> Result<Work> {
        let label = Label::new(OpKind::Broadcast, 0).root(root);
        let first = self.check_alike(&label, &tensors)?;
        let label = label.elements(first.dtype(), first.elements());
        if root >= self.size() {
            let last = self.size() - 1;
            return self.refuse(&label, format!("root {root} is out of range: ranks are 0 to {last}"));
        }
        if root_tensor >= tensors.len() {
            let last = tensors.len() - 1;
            return self.refuse(
                &label,
                format!("root tensor {root_tensor} is out of range: tensors are 0 to {last}"),
            );
        }
        let mut others = tensors;
        let sent = others.swap_remove(root_tensor);
        let bytes = sent.byte_len();
        let mut request = Request::new(label, Kind::Broadcast, self.rank(), bytes, Buffers::of(sent), None);
        (request.in_place, request.root) = (true, root);
        request.finish = Some(Box::new(move |buffers| copy_to_all(&buffers.into_first(), &others)));
        self.submit_request(label, request)
    }

    /// The first of tensors that have one dtype and one length.
    fn check_alike<'a>(&self, label: &Label, tensors: &'a [BufferView]) -> Result<&'a BufferView> {
        let Some(first) = tensors.first() else {
            return self.refuse(label, "there are no tensors".to_string());
        };
        let (dtype, elements) = (first.dtype(), first.elements());
        let differs = |tensor: &BufferView| tensor.dtype() != dtype || tensor.elements() != elements;
        match tensors.iter().position(differs) {
            None => Ok(first),
            Some(place) => {
                let (other, count) = (tensors[place].dtype(), tensors[place].elements());
                let message = format!(
                    "tensor {place} has {count} elements of {other}, but tensor 0 has {elements} of {dtype}"
                );
                self.refuse(label, message)
            }
        }
    }

    pub(crate) fn begin_all_reduce_coalesced(&self, tensors: Vec<BufferView>, op: &ReduceOp) -> Result<Work> {
        let label = Label::new(OpKind::AllReduceCoalesced, 0).reduction(op);
        let Some(dtype) = tensors.first().map(BufferView::dtype) else {
            return self.refuse(&label, "there are no tensors".to_string());
        };
        if let Some(other) = tensors.iter().find(|tensor| tensor.dtype() != dtype) {
            return self.refuse(&label, format!("tensors of {dtype} and {} cannot be one", other.dtype()));
        }
        if self.inner.checks_numbers {
            self.check_tensors(&label, tensors.iter())?; // while they are still separate tensors
        }
        let total = tensors.iter().map(BufferView::elements).sum();
        let mut flat = Buffer::zeros(dtype, total);
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
        let finish = Box::new(move |flat: BufferView| {
            for (tensor, end) in tensors.iter().zip(ends) {
                tensor.unpack(flat.span().part(end - tensor.byte_len(), end).bytes());
            }
        });
        self.all_reduce_packed(OpKind::AllReduceCoalesced, view, op, finish)
    }

    pub(crate) fn begin_all_gather_into_coalesced(
        &self,
        outputs: Vec<BufferView>,
        inputs: Vec<BufferView>,
    ) -> Result<Work> {
        self.check_pairs(OpKind::AllGatherIntoCoalesced, outputs.len(), inputs.len())?;
        self.coalesce_as(OpKind::AllGatherIntoCoalesced, |group| {
            outputs
                .into_iter()
                .zip(inputs)
                .map(|(output, input)| group.start_all_gather_into(output, input))
                .collect()
        })
    }

    pub(crate) fn begin_all_gather_coalesced(
        &self,
        outputs: Vec<Vec<BufferView>>,
        inputs: Vec<BufferView>,
    ) -> Result<Work> {
        self.check_pairs(OpKind::AllGatherCoalesced, outputs.len(), inputs.len())?;
        self.coalesce_as(OpKind::AllGatherCoalesced, |group| {
            let pairs = outputs.into_iter().zip(inputs);
            pairs
                .map(|(outputs, input)| group.all_gather_as(OpKind::AllGatherCoalesced, outputs, input))
                .collect()
        })
    }

    pub(crate) fn begin_reduce_scatter_into_coalesced(
        &self,
        outputs: Vec<BufferView>,
        inputs: Vec<BufferView>,
        op: &ReduceOp,
    ) -> Result<Work> {
        self.check_pairs(OpKind::ReduceScatterIntoCoalesced, outputs.len(), inputs.len())?;
        self.coalesce_as(OpKind::ReduceScatterIntoCoalesced, |group| {
            let pairs = outputs.into_iter().zip(inputs);
            pairs.map(|(output, input)| group.start_reduce_scatter_into(output, input, op.clone())).collect()
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
    /// # use tenfold::{Group, ReduceOp, Buffer};
    /// # Group::threads(2, |group| {
    /// let (mut one, mut two) = (Buffer::from_slice(&[1.0_f32]), Buffer::from_slice(&[2_i64]));
    /// let work = group.coalesce(|group| {
    ///     Ok(vec![group.start_all_reduce(one.lend(), ReduceOp::Sum)?, group.start_broadcast(two.lend(), 0)?])
    /// })?;
    /// work.wait()?;
    /// # Ok(()) }).unwrap();
    /// ```
    ///
    /// # Errors
    /// The first call that was refused; those before it go on.
    pub fn coalesce(&self, calls: impl FnOnce(&Group) -> Result<Vec<Work>>) -> Result<Work> {
        self.coalesce_as(OpKind::Coalesced, calls)
    }

    fn coalesce_as(&self, kind: OpKind, calls: impl FnOnce(&Group) -> Result<Vec<Work>>) -> Result<Work> {
        let works = calls(self)?;
        let label = Label::new(kind, works.last().map_or(0, Work::sequence_number));
        Ok(Work::join(label, works))
    }
}

fn copy_to_all(source: &BufferView, tensors: &[BufferView]) {
    for tensor in tensors {
        tensor.unpack(source.span().bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_tensors_are_reduced_as_if_each_had_a_rank_of_its_own() {
        let cases = [
            (ReduceOp::Sum, 2.0 + 3.0 + 4.0 + 5.0),
            (ReduceOp::Product, 2.0 * 3.0 * 4.0 * 5.0),
            (ReduceOp::Min, 2.0),
            (ReduceOp::Avg, (2.0 + 3.0 + 4.0 + 5.0) / 2.0),
            (ReduceOp::PremulSum(0.5), (2.0 + 3.0 + 4.0 + 5.0) / 2.0),
        ];
        for (op, expected) in cases {
            let all = Group::threads(2, |group| {
                let first = (2 + 2 * group.rank()) as f32;
                let mut one = Buffer::from_slice(&[first, -1.0, first]);
                let mut two = Buffer::from_slice(&[first + 1.0; 2]);
                let views = vec![one.lend_strided(0, &[2], &[2]), two.lend()];
                group.start_all_reduce_several(views, op.clone())?.wait()?;
                assert_eq!(one.as_slice::<f32>(), [expected, -1.0, expected], "{op:?}");
                assert_eq!(two.as_slice::<f32>(), [expected; 2], "{op:?}");
                Ok(())
            });
            all.unwrap();
        }
    }

    #[test]
    fn one_tensor_of_the_root_is_broadcast_to_every_tensor() {
        for root_tensor in 0..3 {
            let all = Group::threads(3, |group| {
                let mut tensors: Vec<Buffer> = (0..3)
                    .map(|number| Buffer::from_slice(&[(10 * group.rank() + number) as i64, 7]))
                    .collect();
                let views = tensors.iter_mut().map(Buffer::lend).collect();
                group.start_broadcast_several(views, 1, root_tensor)?.wait()?;
                for tensor in &tensors {
                    assert_eq!(tensor.as_slice::<i64>(), [10 + root_tensor as i64, 7]);
                }
                Ok(())
            });
            all.unwrap();
        }
    }

    #[test]
    fn tensors_that_differ_and_roots_that_do_not_exist_are_refused() {
        let said = |call: fn(&Group, Vec<BufferView>) -> Result<Work>, lengths: &[usize]| {
            let outcome = Group::threads(1, |group| {
                let mut tensors: Vec<Buffer> =
                    lengths.iter().map(|length| Buffer::from_slice(&vec![1.0_f32; *length])).collect();
                call(&group, tensors.iter_mut().map(Buffer::lend).collect())?.wait()
            });
            outcome.unwrap_err().message().to_string()
        };
        assert_eq!(
            said(|group, views| group.start_all_reduce_several(views, ReduceOp::Sum), &[]),
            "there are no tensors"
        );
        assert_eq!(
            said(|group, views| group.start_all_reduce_several(views, ReduceOp::Sum), &[2, 3]),
            "tensor 1 has 3 elements of float32, but tensor 0 has 2 of float32"
        );
        assert_eq!(
            said(|group, views| group.start_broadcast_several(views, 0, 2), &[2, 2]),
            "root tensor 2 is out of range: tensors are 0 to 1"
        );
        assert_eq!(
            said(|group, views| group.start_broadcast_several(views, 3, 0), &[2, 2]),
            "root 3 is out of range: ranks are 0 to 0"
        );
    }

    #[test]
    fn coalesced_works_say_which_operation_they_are() {
        let all = Group::threads(2, |group| {
            let mut tensors: Vec<Buffer> = (0..4).map(|_| Buffer::from_slice(&[1.0_f32; 4])).collect();
            let (mut small, mut wide) =
                (Buffer::from_slice(&[1.0_f32; 2]), Buffer::from_slice(&[1.0_f32; 8]));
            let mut views = tensors.iter_mut().map(Buffer::lend);
            let mut next = || views.next().expect("there are four");
            let works = [
                group.start_all_gather_into_coalesced(vec![wide.lend()], vec![next()])?,
                group.start_reduce_scatter_into_coalesced(vec![small.lend()], vec![next()], ReduceOp::Sum)?,
            ];
            let kinds = [OpKind::AllGatherIntoCoalesced, OpKind::ReduceScatterIntoCoalesced];
            for (work, kind) in works.iter().zip(kinds) {
                assert_eq!(work.kind(), kind);
                work.wait()?;
            }
            Ok(())
        });
        all.unwrap();
    }
}
