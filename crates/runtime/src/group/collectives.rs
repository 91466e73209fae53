//! The collectives, one by one: their arguments checked, their buffers cut into parts.

use tenfold_memory::{BufferView, DType, ReduceOp, Reduction};
use tenfold_plan::{Area, Kind, Rank};

use super::Group;
use super::submit::Request;
use crate::fault::{Fault, Result};
use crate::label::{Label, OpKind};
use crate::run::{Buffers, Parts};
use crate::work::Work;

impl Group {
    pub(super) fn check_root(&self, label: &Label, root: Rank, what: &str) -> Result<()> {
        if root < self.size() {
            return Ok(());
        }
        let message = format!("{what} {root} is out of range: ranks are 0 to {}", self.size() - 1);
        Err(self.error(*label, Fault::argument(message)))
    }

    pub(super) fn reduction(&self, label: &Label, op: &ReduceOp, dtype: DType) -> Result<Reduction> {
        Reduction::new(op, dtype, self.size())
            .map_err(|error| self.error(*label, Fault::argument(error.to_string())))
    }

    pub(super) fn refuse<T>(&self, label: &Label, message: String) -> Result<T> {
        Err(self.error(*label, Fault::argument(message)))
    }

    pub(crate) fn begin_broadcast(&self, tensor: BufferView, root: Rank) -> Result<Work> {
        let label = Label::new(OpKind::Broadcast, 0).elements(tensor.dtype(), tensor.elements()).root(root);
        self.check_root(&label, root, "root")?;
        let request = Request::in_place(label, Kind::Broadcast, self.rank(), tensor, None);
        self.submit_request(label, Request { root, ..request })
    }

    #[inline]
    pub(crate) fn begin_all_reduce(&self, tensor: BufferView, op: &ReduceOp) -> Result<Work> {
        self.all_reduce_as(OpKind::AllReduce, tensor, op)
    }

    /// As [`Group::start_all_reduce`] on a flat copy, with what to do with it at the end.
    pub(super) fn all_reduce_packed(
        &self,
        kind: OpKind,
        tensor: BufferView,
        op: &ReduceOp,
        finish: impl FnOnce(BufferView) + Send + 'static,
    ) -> Result<Work> {
        let label = Label::new(kind, 0).elements(tensor.dtype(), tensor.elements()).reduction(op);
        let reduction = self.reduction(&label, op, tensor.dtype())?;
        let mut request = Request::in_place(label, Kind::AllReduce, self.rank(), tensor, Some(reduction));
        request.finish = Some(Box::new(move |buffers| finish(buffers.into_first())));
        self.submit_request(label, request)
    }

    pub(super) fn all_reduce_as(&self, kind: OpKind, tensor: BufferView, op: &ReduceOp) -> Result<Work> {
        let label = Label::new(kind, 0).elements(tensor.dtype(), tensor.elements()).reduction(op);
        let reduction = self.reduction(&label, op, tensor.dtype())?;
        self.submit_request(
            label,
            Request::in_place(label, Kind::AllReduce, self.rank(), tensor, Some(reduction)),
        )
    }

    pub(crate) fn begin_reduce(&self, tensor: BufferView, op: &ReduceOp, root: Rank) -> Result<Work> {
        let label = Label::new(OpKind::Reduce, 0)
            .elements(tensor.dtype(), tensor.elements())
            .reduction(op)
            .root(root);
        self.check_root(&label, root, "root")?;
        let reduction = self.reduction(&label, op, tensor.dtype())?;
        let request = Request::in_place(label, Kind::Reduce, self.rank(), tensor, Some(reduction));
        self.submit_request(label, Request { root, ..request })
    }

    pub(crate) fn begin_scan(&self, tensor: BufferView, op: &ReduceOp) -> Result<Work> {
        let label = Label::new(OpKind::Scan, 0).elements(tensor.dtype(), tensor.elements()).reduction(op);
        let ranks = self.rank() + 1;
        let reduction = Reduction::new(op, tensor.dtype(), ranks)
            .map_err(|error| self.error(label, Fault::argument(error.to_string())))?;
        let mut request = Request::in_place(label, Kind::Scan, self.rank(), tensor, Some(reduction));
        // Ranks divide by different numbers, so no rank can divide before it passes its sum on.
        request.in_order |= *op == ReduceOp::Avg;
        self.submit_request(label, request)
    }

    pub(crate) fn begin_all_gather_into(&self, output: BufferView, input: BufferView) -> Result<Work> {
        let label = Label::new(OpKind::AllGatherInto, 0).elements(input.dtype(), input.elements());
        self.check_whole(&label, "output", &output, "input", &input)?;
        self.submit_request(label, self.gathering(label, Kind::AllGather, output, input))
    }

    fn gathering(&self, label: Label, kind: Kind, output: BufferView, input: BufferView) -> Request {
        let (bytes, part) = (output.byte_len(), input.byte_len());
        let mut buffers = Buffers::of(output);
        let input = buffers.add(input);
        buffers.set(Area::Output, Parts::Equal { view: 0, part });
        buffers.set(Area::Input, Parts::One(input));
        Request::new(label, kind, self.rank(), bytes, buffers, None)
    }

    /// A request on parts that lie apart or differ in length.
    fn irregular(
        &self,
        label: Label,
        kind: Kind,
        root: Rank,
        bytes: usize,
        buffers: Buffers,
        reduction: Option<Reduction>,
    ) -> Request {
        let request = Request::new(label, kind, self.rank(), bytes, buffers, reduction);
        Request { root, regular: false, ..request }
    }

    /// A gather or scatter: all parts are equally long, and no algorithm takes several parts of the root together, wherever
    /// they lie.
    fn rooted_parts(&self, label: Label, kind: Kind, root: Rank, bytes: usize, buffers: Buffers) -> Request {
        Request { root, ..Request::new(label, kind, self.rank(), bytes, buffers, None) }
    }

    /// One tensor must be as long as all ranks' other ones together.
    fn check_whole(
        &self,
        label: &Label,
        whole: &str,
        all: &BufferView,
        part: &str,
        one: &BufferView,
    ) -> Result<()> {
        if all.dtype() != one.dtype() {
            let (whole_dtype, part_dtype) = (all.dtype(), one.dtype());
            return self
                .refuse(label, format!("the {whole} has dtype {whole_dtype}, the {part} {part_dtype}"));
        }
        if one.elements().checked_mul(self.size()) != Some(all.elements()) {
            let message = format!(
                "the {whole} has {} elements; {} ranks with an {part} of {} need {}",
                all.elements(),
                self.size(),
                one.elements(),
                one.elements() as u128 * self.size() as u128
            );
            return self.refuse(label, message);
        }
        Ok(())
    }

    pub(crate) fn begin_all_gather(&self, outputs: Vec<BufferView>, input: BufferView) -> Result<Work> {
        self.all_gather_as(OpKind::AllGather, outputs, input)
    }

    pub(super) fn all_gather_as(
        &self,
        kind: OpKind,
        outputs: Vec<BufferView>,
        input: BufferView,
    ) -> Result<Work> {
        let total = outputs.iter().map(BufferView::elements).sum();
        let label = Label::new(kind, 0).elements(input.dtype(), total);
        self.check_list(&label, "outputs", &outputs, input.dtype(), None)?;
        if outputs[self.rank()].elements() != input.elements() {
            let (own, rank) = (outputs[self.rank()].elements(), self.rank());
            let message = format!(
                "the input has {} elements, but output {rank}, where it goes, has {own}",
                input.elements()
            );
            return self.refuse(&label, message);
        }
        let bytes = apart(total * input.dtype().size());
        let mut buffers = Buffers::of(input);
        buffers.set(Area::Input, Parts::One(0));
        let table = add_all(&mut buffers, outputs);
        buffers.set(Area::Output, Parts::Table(table));
        self.submit_request(label, self.irregular(label, Kind::AllGather, 0, bytes, buffers, None))
    }

    /// A list with a tensor for every rank, of one dtype and, if given, of one length.
    fn check_list(
        &self,
        label: &Label,
        what: &str,
        list: &[BufferView],
        dtype: DType,
        elements: Option<usize>,
    ) -> Result<()> {
        if list.len() != self.size() {
            return self.refuse(label, format!("there are {} {what} for {} ranks", list.len(), self.size()));
        }
        for (rank, tensor) in list.iter().enumerate() {
            if tensor.dtype() != dtype {
                let message =
                    format!("number {rank} of the {what} has dtype {}, not {dtype}", tensor.dtype());
                return self.refuse(label, message);
            }
            if let Some(elements) = elements
                && tensor.elements() != elements
            {
                let message =
                    format!("number {rank} of the {what} has {} elements, not {elements}", tensor.elements());
                return self.refuse(label, message);
            }
        }
        Ok(())
    }

    pub(crate) fn begin_gather(
        &self,
        outputs: Vec<BufferView>,
        input: BufferView,
        root: Rank,
    ) -> Result<Work> {
        let label = Label::new(OpKind::Gather, 0).elements(input.dtype(), input.elements()).root(root);
        self.check_root(&label, root, "root")?;
        self.check_root_only(&label, "outputs", outputs.len(), root)?;
        if self.rank() == root {
            self.check_list(&label, "outputs", &outputs, input.dtype(), Some(input.elements()))?;
        }
        let bytes = input.byte_len() * self.size();
        let mut buffers = Buffers::of(input);
        buffers.set(Area::Input, Parts::One(0));
        let table = add_all(&mut buffers, outputs);
        buffers.set(Area::Output, Parts::Table(table));
        self.submit_request(label, self.rooted_parts(label, Kind::Gather, root, bytes, buffers))
    }

    pub(crate) fn begin_gather_into(
        &self,
        output: Option<BufferView>,
        input: BufferView,
        root: Rank,
    ) -> Result<Work> {
        let label = Label::new(OpKind::Gather, 0).elements(input.dtype(), input.elements()).root(root);
        self.check_root(&label, root, "root")?;
        self.check_root_only(&label, "output", usize::from(output.is_some()), root)?;
        let bytes = input.byte_len() * self.size();
        let mut buffers = Buffers::default();
        if let Some(output) = output {
            self.check_whole(&label, "output", &output, "input", &input)?;
            let view = buffers.add(output);
            buffers.set(Area::Output, Parts::Equal { view, part: input.byte_len() });
        }
        let input = buffers.add(input);
        buffers.set(Area::Input, Parts::One(input));
        self.submit_request(label, self.rooted_parts(label, Kind::Gather, root, bytes, buffers))
    }

    fn check_root_only(&self, label: &Label, what: &str, count: usize, root: Rank) -> Result<()> {
        match (self.rank() == root, count) {
            (true, 0) => self.refuse(label, format!("rank {root} is the root and needs {what}")),
            (false, 1..) => self.refuse(
                label,
                format!("rank {} is not the root {root} and must not give {what}", self.rank()),
            ),
            _ => Ok(()),
        }
    }

    pub(crate) fn begin_scatter(
        &self,
        output: BufferView,
        inputs: Vec<BufferView>,
        root: Rank,
    ) -> Result<Work> {
        let label = Label::new(OpKind::Scatter, 0).elements(output.dtype(), output.elements()).root(root);
        self.check_root(&label, root, "root")?;
        self.check_root_only(&label, "inputs", inputs.len(), root)?;
        if self.rank() == root {
            self.check_list(&label, "inputs", &inputs, output.dtype(), Some(output.elements()))?;
        }
        let bytes = output.byte_len() * self.size();
        let mut buffers = Buffers::of(output);
        buffers.set(Area::Output, Parts::One(0));
        let table = add_all(&mut buffers, inputs);
        buffers.set(Area::Input, Parts::Table(table));
        self.submit_request(label, self.rooted_parts(label, Kind::Scatter, root, bytes, buffers))
    }

    pub(crate) fn begin_scatter_from(
        &self,
        output: BufferView,
        input: Option<BufferView>,
        root: Rank,
    ) -> Result<Work> {
        let label = Label::new(OpKind::Scatter, 0).elements(output.dtype(), output.elements()).root(root);
        self.check_root(&label, root, "root")?;
        self.check_root_only(&label, "input", usize::from(input.is_some()), root)?;
        let (part, bytes) = (output.byte_len(), output.byte_len() * self.size());
        let mut buffers = Buffers::default();
        if let Some(input) = input {
            self.check_whole(&label, "input", &input, "output", &output)?;
            let view = buffers.add(input);
            buffers.set(Area::Input, Parts::Equal { view, part });
        }
        let output = buffers.add(output);
        buffers.set(Area::Output, Parts::One(output));
        self.submit_request(label, self.rooted_parts(label, Kind::Scatter, root, bytes, buffers))
    }

    pub(crate) fn begin_reduce_scatter_into(
        &self,
        output: BufferView,
        input: BufferView,
        op: &ReduceOp,
    ) -> Result<Work> {
        let label = Label::new(OpKind::ReduceScatterInto, 0)
            .elements(output.dtype(), output.elements())
            .reduction(op);
        self.check_whole(&label, "input", &input, "output", &output)?;
        let reduction = self.reduction(&label, op, input.dtype())?;
        let (bytes, part) = (input.byte_len(), output.byte_len());
        let mut buffers = Buffers::of(output);
        let view = buffers.add(input);
        buffers.set(Area::Output, Parts::One(0));
        buffers.set(Area::Input, Parts::Equal { view, part });
        self.submit_request(
            label,
            Request::new(label, Kind::ReduceScatter, self.rank(), bytes, buffers, Some(reduction)),
        )
    }

    pub(crate) fn begin_reduce_scatter(
        &self,
        output: BufferView,
        inputs: Vec<BufferView>,
        op: &ReduceOp,
    ) -> Result<Work> {
        let total: usize = inputs.iter().map(BufferView::elements).sum();
        let label = Label::new(OpKind::ReduceScatter, 0).elements(output.dtype(), total).reduction(op);
        self.check_list(&label, "inputs", &inputs, output.dtype(), None)?;
        let reduction = self.reduction(&label, op, output.dtype())?;
        if inputs[self.rank()].elements() != output.elements() {
            let (own, rank) = (inputs[self.rank()].elements(), self.rank());
            let message = format!(
                "the output has {} elements, but input {rank}, which goes there, has {own}",
                output.elements()
            );
            return self.refuse(&label, message);
        }
        let bytes = apart(total * output.dtype().size());
        let mut buffers = Buffers::of(output);
        buffers.set(Area::Output, Parts::One(0));
        let table = add_all(&mut buffers, inputs);
        buffers.set(Area::Input, Parts::Table(table));
        self.submit_request(
            label,
            self.irregular(label, Kind::ReduceScatter, 0, bytes, buffers, Some(reduction)),
        )
    }

    pub(crate) fn begin_all_to_all_single(
        &self,
        output: BufferView,
        input: BufferView,
        output_splits: &[usize],
        input_splits: &[usize],
    ) -> Result<Work> {
        let equal = output_splits.is_empty() && input_splits.is_empty();
        let count = if equal { input.elements() } else { 0 };
        let label = Label::new(OpKind::AllToAllSingle, 0).elements(input.dtype(), count);
        if input.dtype() != output.dtype() {
            return self.refuse(
                &label,
                format!("the input has dtype {}, the output {}", input.dtype(), output.dtype()),
            );
        }
        let element = input.dtype().size();
        let (output_len, input_len) = (output.elements(), input.elements());
        let bytes = if equal { input.byte_len() } else { usize::MAX / 2 };
        let mut buffers = Buffers::of(output);
        let input = buffers.add(input);
        let output = self.cut_by(&label, "output", 0, output_len, output_splits, element)?;
        let input = self.cut_by(&label, "input", input, input_len, input_splits, element)?;
        buffers.set(Area::Output, Parts::Table(output));
        buffers.set(Area::Input, Parts::Table(input));
        let mut request = Request::new(label, Kind::AllToAll, self.rank(), bytes, buffers, None);
        request.regular = equal;
        self.submit_request(label, request)
    }

    /// The parts of a view according to its splits.
    fn cut_by(
        &self,
        label: &Label,
        what: &str,
        view: usize,
        elements: usize,
        splits: &[usize],
        element: usize,
    ) -> Result<Vec<(usize, usize, usize)>> {
        let size = self.size();
        if splits.is_empty() {
            if !elements.is_multiple_of(size) {
                let message = format!(
                    "the {what} has {elements} elements, which {size} ranks cannot share equally; give splits"
                );
                return self.refuse(label, message);
            }
            let part = elements / size * element;
            return Ok((0..size).map(|rank| (view, rank * part, part)).collect());
        }
        let sum = splits.iter().try_fold(0_usize, |sum, split| sum.checked_add(*split));
        if splits.len() != size || sum != Some(elements) {
            let message = format!(
                "the {what} has {elements} elements for {size} ranks, but {} splits that add up to {}",
                splits.len(),
                sum.map_or("more than fits".to_string(), |sum| sum.to_string())
            );
            return self.refuse(label, message);
        }
        let mut start = 0;
        let part = |split: &usize| {
            let part = (view, start * element, split * element);
            start += split;
            part
        };
        Ok(splits.iter().map(part).collect())
    }

    pub(crate) fn begin_all_to_all(&self, outputs: Vec<BufferView>, inputs: Vec<BufferView>) -> Result<Work> {
        let dtype = inputs.first().map_or(DType::U8, BufferView::dtype);
        let label = Label::new(OpKind::AllToAll, 0).elements(dtype, 0);
        self.check_list(&label, "inputs", &inputs, dtype, None)?;
        self.check_list(&label, "outputs", &outputs, dtype, None)?;
        // Lengths are known to the two ranks concerned only, so they must not decide about the algorithm.
        let mut buffers = Buffers::default();
        let table = add_all(&mut buffers, inputs);
        buffers.set(Area::Input, Parts::Table(table));
        let table = add_all(&mut buffers, outputs);
        buffers.set(Area::Output, Parts::Table(table));
        self.submit_request(label, self.irregular(label, Kind::AllToAll, 0, usize::MAX / 2, buffers, None))
    }

    pub(crate) fn begin_barrier(&self) -> Result<Work> {
        let label = Label::new(OpKind::Barrier, 0);
        self.submit_request(
            label,
            Request::new(label, Kind::Barrier, self.rank(), 0, Buffers::default(), None),
        )
    }
}

/// The size that decides about the algorithm where parts lie apart: too much for algorithms that send several as one.
fn apart(bytes: usize) -> usize {
    bytes.max(tenfold_plan::PIECE + 1)
}

/// Adds views as the parts of a buffer.
fn add_all(buffers: &mut Buffers, views: Vec<BufferView>) -> Vec<(usize, usize, usize)> {
    let add = |view: BufferView| {
        let len = view.byte_len();
        (buffers.add(view), 0, len)
    };
    views.into_iter().map(add).collect()
}
