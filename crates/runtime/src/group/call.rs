//! The operations, one by one: checked, cut into parts, submitted.

use std::sync::Arc;
use std::time::Duration;

use tenfold_memory::{DType, ReduceOp, Reduction, Tensor, TensorView};
use tenfold_plan::{Buffer, Kind, Needs, Rank};
use tracing::{Level, Span};

use super::Group;
use super::detail::{Detail, hash_of_shapes};
use super::point_to_point::Receiving;
use super::state::{Finish, GroupState};
use crate::debug_level::{DebugLevel, debug_level};
use crate::engine::{Submitted, Urgency};
use crate::fault::{Fault, FaultKind, Result, show_duration, show_ranks};
use crate::label::{Label, OpKind};
use crate::recorder::{self, Call, Sizes};
use crate::run::{Buffers, Parts, Run};
use crate::work::{OPERATIONS, Recorded, Shared, Work};

/// A collective that was checked and can be submitted.
pub(super) struct Request {
    /// Taken when it goes into the queue.
    pub run: Option<Run>,
    pub kind: Kind,
    /// What decides about the algorithm: the same on all ranks.
    pub bytes: usize,
    pub root: Rank,
    /// All parts of a buffer are equally long and lie together.
    pub regular: bool,
    /// View 0 is input and output, cut as the plan wants it.
    pub in_place: bool,
    pub in_order: bool,
    pub finish: Option<Finish>,
}

impl Request {
    #[inline]
    pub(super) fn new(
        label: Label,
        kind: Kind,
        rank: Rank,
        bytes: usize,
        buffers: Buffers,
        reduction: Option<Reduction>,
    ) -> Self {
        let in_order = reduction.as_ref().is_some_and(Reduction::must_keep_order);
        let run = Some(Run::unplanned(label, rank, buffers, reduction));
        Request { run, kind, bytes, root: 0, regular: true, in_place: false, in_order, finish: None }
    }

    #[inline]
    fn in_place(
        label: Label,
        kind: Kind,
        rank: Rank,
        view: TensorView,
        reduction: Option<Reduction>,
    ) -> Self {
        let bytes = view.byte_len();
        let mut request = Request::new(label, kind, rank, bytes, Buffers::of(view), reduction);
        request.in_place = true;
        request
    }
}

impl Request {
    /// How long its tensors are.
    fn sizes(&mut self) -> (Sizes, Sizes) {
        let Some(run) = &mut self.run else { return (Sizes::NONE, Sizes::NONE) };
        if self.in_place {
            let whole = Sizes::one(run.buffers().view(0).elements());
            return (whole, whole);
        }
        (run.buffers().sizes(Buffer::Input), run.buffers().sizes(Buffer::Output))
    }

    /// Works on contiguous copies of what is not; the results are copied back at the end.
    fn pack_strided(&mut self) {
        let Some(run) = &mut self.run else { return };
        let originals = run.buffers().pack_strided();
        let results = if self.in_place { vec![0] } else { run.buffers().indices(Buffer::Output) };
        let finish = self.finish.take();
        self.finish = Some(Box::new(move |buffers| {
            for (index, original) in originals.iter().filter(|(index, _)| results.contains(index)) {
                original.unpack(buffers.view(*index).span().bytes());
            }
            drop(originals);
            if let Some(finish) = finish {
                finish(buffers);
            }
        }));
    }
}

/// Operations up to this size are likely to be over at once.
const QUICK: usize = 16 * 1024;

/// Tags from here on are for tenfold itself.
const TAGS_RESERVED: u32 = u32::MAX - 15;

/// Part lengths are rounded up to so many elements where there are plenty, so that parts do not share cache lines.
const ALIGN: usize = 64;

/// Bytes of each of `parts` parts of a view.
fn cut(view: &TensorView, parts: usize) -> usize {
    let elements = view.elements().div_ceil(parts.max(1));
    let rounded = if elements >= 16 * ALIGN { elements.next_multiple_of(ALIGN) } else { elements };
    rounded * view.dtype().size()
}

impl Group {
    /// Submits a checked collective.
    #[inline]
    pub(super) fn submit(&self, label: Label, mut request: Request) -> Result<Work> {
        if self.inner.checks_numbers {
            self.check_numbers(&label, &mut request)?;
        }
        if debug_level() == DebugLevel::Detail {
            return self.submit_in_detail(label, request);
        }
        self.submit_with(label, &mut request, None)
    }

    /// The same for a call that tells more of itself. Everything slow happens here, before anything is locked.
    #[cold]
    #[inline(never)]
    fn submit_in_detail(&self, label: Label, mut request: Request) -> Result<Work> {
        let site = recorder::caller();
        let (input, output) = request.sizes();
        let detail = Arc::new(Detail::new(&site, input, output));
        if let (Some(run), Some(hash)) = (&mut request.run, hash_of_shapes(label.kind, label.count, &site)) {
            run.set_shape(hash);
        }
        recorder::with_site(site, || self.submit_with(label, &mut request, Some(detail)))
    }

    /// Takes what it needs out of `request`, which is too large to be handed around.
    #[inline]
    fn submit_with(&self, label: Label, request: &mut Request, detail: Option<Arc<Detail>>) -> Result<Work> {
        let inner = &*self.inner;
        if let Err(fault) = inner.fabric.check_process() {
            return Err(self.error(label, fault));
        }
        if request.run.as_mut().is_some_and(|run| run.buffers().has_strided()) {
            request.pack_strided();
        }
        let in_rank_order = inner.options.deterministic || request.in_order;
        let needs = Needs { in_rank_order, equal_parts: request.regular };
        if request.run.as_ref().is_some_and(Run::may_need_preparation) {
            self.prepare(&label, request, needs)?;
        }
        let urgency = match request.bytes {
            _ if self.background => Urgency::Background,
            0..=QUICK => Urgency::Quick,
            _ => Urgency::Patient,
        };
        let span = self.span(&label, || match request.run.as_mut() {
            Some(run) => {
                [Buffer::Input, Buffer::Output].map(|it| run.buffers().sizes(it).total()).into_iter().max()
            }
            None => None,
        });
        let (kind, bytes, root, in_place) = (request.kind, request.bytes, request.root, request.in_place);
        let plan = |state: &mut GroupState, run: &mut Run| {
            let choice = state.planner.plan(kind, bytes, root, needs);
            let output = run.buffers().sizes(Buffer::Output);
            let whole = in_place.then(|| Sizes::one(run.buffers().view(0).elements()));
            let input = whole.unwrap_or_else(|| run.buffers().sizes(Buffer::Input));
            if in_place {
                let part = cut(run.buffers().view(0), choice.plan.output);
                run.buffers().set(Buffer::Output, Parts::Equal { view: 0, part });
            }
            run.follow(&mut state.roots);
            run.assign(state.next_sequence_number(), choice.name, choice.plan, state.planner.piece());
            if let Some(detail) = &detail {
                state.keep_detail(run.label().seq, detail);
            }
            let starts = state.begins_next();
            state.record.called(&self.call(
                &label,
                state.counts(),
                (input, whole.unwrap_or(output)),
                None,
                starts,
            ))
        };
        let note = |run: &Run, ticket| {
            let size = inner.topology.size();
            let record = Recorded { group: Arc::clone(&inner.record), ticket, detail: detail.clone() };
            Shared::new(*run.label(), run.algorithm(), self.deadline(), &inner.name, inner.rank, size, record)
        };
        let Request { run, finish, .. } = request;
        match inner.fabric.engine.submit_run(&inner.fabric, inner.index, urgency, (run, finish), plan, note) {
            Ok(Submitted::Underway(work)) => {
                work.trace(span);
                Ok(Work::new(work, inner.fabric.clone()))
            }
            Ok(Submitted::Over) => {
                let run = request.run.as_ref();
                if let (Some(run), false) = (run, span.is_disabled()) {
                    span.record("seq", run.label().seq);
                    tracing::debug!(target: OPERATIONS, parent: &span, "done");
                }
                Ok(run.map_or(Work::done(label, ""), |run| Work::done(*run.label(), run.algorithm())))
            }
            Err(fault) => Err(self.error(label, refused(fault))),
        }
    }

    /// What a reduction does to this rank's elements before any are combined. A call that a failed group refuses changes nothing.
    #[cold]
    fn prepare(&self, label: &Label, request: &mut Request, needs: Needs) -> Result<()> {
        let Request { kind, bytes, root, in_place, .. } = *request;
        let chosen = self.inner.fabric.engine.with(|state| {
            let group = state.group(self.inner.index);
            match group.failed() {
                Some(fault) => Err(fault.clone()),
                None => Ok(group.planner.plan(kind, bytes, root, needs)),
            }
        });
        let choice = chosen.map_err(|fault| self.error(*label, refused(fault)))?;
        if let Some(run) = &mut request.run {
            run.prepare(in_place, !choice.in_rank_order);
        }
        Ok(())
    }

    /// For whoever follows operations by `tracing`: open from the call to the end. It is made and closed outside the engine's
    /// lock, because nobody knows what a subscriber does.
    #[inline]
    fn span(&self, label: &Label, elements: impl FnOnce() -> Option<u64>) -> Span {
        if !tracing::enabled!(target: OPERATIONS, Level::DEBUG) {
            return Span::none();
        }
        let element = label.dtype.map_or(0, |dtype| dtype.size() as u64);
        let bytes = elements().unwrap_or(label.count).max(label.count) * element;
        let (group, rank, op) = (&*self.inner.name, self.inner.rank, label.kind.name());
        tracing::debug_span!(target: OPERATIONS, "operation", group, rank, op, bytes, seq = tracing::field::Empty)
    }

    /// What is recorded of a call.
    #[inline]
    fn call(
        &self,
        label: &Label,
        (collectives, messages): (u64, u64),
        (input, output): (Sizes, Sizes),
        peer: Option<Rank>,
        starts: bool,
    ) -> Call {
        let timeout = self.timeout.unwrap_or(self.inner.options.timeout);
        let timeout_ms =
            timeout.as_secs().saturating_mul(1000).saturating_add(u64::from(timeout.subsec_millis()));
        let (kind, dtype, reduction) = (label.kind, label.dtype, label.reduction_code());
        let peer = peer.or(label.root_of());
        Call { kind, dtype, reduction, collectives, messages, input, output, peer, timeout_ms, starts }
    }

    fn check_root(&self, label: &Label, root: Rank, what: &str) -> Result<()> {
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

    /// The root's tensor on all ranks.
    ///
    /// # Errors
    /// If `root` is out of range, or the group has failed.
    pub fn broadcast(&self, tensor: TensorView, root: Rank) -> Result<Work> {
        let label = Label::new(OpKind::Broadcast, 0).elements(tensor.dtype(), tensor.elements()).root(root);
        self.check_root(&label, root, "root")?;
        let request = Request::in_place(label, Kind::Broadcast, self.rank(), tensor, None);
        self.submit(label, Request { root, ..request })
    }

    /// The combination of all ranks' tensors, on all ranks, in place.
    ///
    /// # Errors
    /// If the dtype has no such reduction, or the group has failed.
    #[inline]
    pub fn all_reduce(&self, tensor: TensorView, op: ReduceOp) -> Result<Work> {
        self.all_reduce_as(OpKind::AllReduce, tensor, &op)
    }

    /// As [`Group::all_reduce`] on a flat copy, with what to do with it at the end.
    pub(super) fn all_reduce_packed(
        &self,
        kind: OpKind,
        tensor: TensorView,
        op: &ReduceOp,
        finish: impl FnOnce(TensorView) + Send + 'static,
    ) -> Result<Work> {
        let label = Label::new(kind, 0).elements(tensor.dtype(), tensor.elements()).reduction(op);
        let reduction = self.reduction(&label, op, tensor.dtype())?;
        let mut request = Request::in_place(label, Kind::AllReduce, self.rank(), tensor, Some(reduction));
        request.finish = Some(Box::new(move |buffers| finish(buffers.into_first())));
        self.submit(label, request)
    }

    pub(super) fn all_reduce_as(&self, kind: OpKind, tensor: TensorView, op: &ReduceOp) -> Result<Work> {
        let label = Label::new(kind, 0).elements(tensor.dtype(), tensor.elements()).reduction(op);
        let reduction = self.reduction(&label, op, tensor.dtype())?;
        self.submit(label, Request::in_place(label, Kind::AllReduce, self.rank(), tensor, Some(reduction)))
    }

    /// The combination of all ranks' tensors, on `root`; the others' tensors may be used as scratch.
    ///
    /// # Errors
    /// If `root` is out of range, the dtype has no such reduction, or the group has failed.
    pub fn reduce(&self, tensor: TensorView, op: ReduceOp, root: Rank) -> Result<Work> {
        let label = Label::new(OpKind::Reduce, 0)
            .elements(tensor.dtype(), tensor.elements())
            .reduction(&op)
            .root(root);
        self.check_root(&label, root, "root")?;
        let reduction = self.reduction(&label, &op, tensor.dtype())?;
        let request = Request::in_place(label, Kind::Reduce, self.rank(), tensor, Some(reduction));
        self.submit(label, Request { root, ..request })
    }

    /// All ranks' `input`, one after the other, in `output` on all ranks.
    ///
    /// # Errors
    /// If `output` is not as long as all inputs together, or the group has failed.
    pub fn all_gather_into(&self, output: TensorView, input: TensorView) -> Result<Work> {
        let label = Label::new(OpKind::AllGatherInto, 0).elements(input.dtype(), input.elements());
        self.check_whole(&label, "output", &output, "input", &input)?;
        self.submit(label, self.gathering(label, Kind::AllGather, output, input))
    }

    fn gathering(&self, label: Label, kind: Kind, output: TensorView, input: TensorView) -> Request {
        let (bytes, part) = (output.byte_len(), input.byte_len());
        let mut buffers = Buffers::of(output);
        let input = buffers.add(input);
        buffers.set(Buffer::Output, Parts::Equal { view: 0, part });
        buffers.set(Buffer::Input, Parts::One(input));
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

    /// One tensor must be as long as all ranks' other ones together.
    fn check_whole(
        &self,
        label: &Label,
        whole: &str,
        all: &TensorView,
        part: &str,
        one: &TensorView,
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

    /// Each rank's `input` in the tensor of that number, on all ranks; they may be of different lengths.
    ///
    /// # Errors
    /// If there are not as many outputs as ranks, this rank's input does not fit its own output, or the group has failed.
    pub fn all_gather(&self, outputs: Vec<TensorView>, input: TensorView) -> Result<Work> {
        self.all_gather_as(OpKind::AllGather, outputs, input)
    }

    pub(super) fn all_gather_as(
        &self,
        kind: OpKind,
        outputs: Vec<TensorView>,
        input: TensorView,
    ) -> Result<Work> {
        let total = outputs.iter().map(TensorView::elements).sum();
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
        buffers.set(Buffer::Input, Parts::One(0));
        let table = add_all(&mut buffers, outputs);
        buffers.set(Buffer::Output, Parts::Table(table));
        self.submit(label, self.irregular(label, Kind::AllGather, 0, bytes, buffers, None))
    }

    /// A list with a tensor for every rank, of one dtype and, if given, of one length.
    fn check_list(
        &self,
        label: &Label,
        what: &str,
        list: &[TensorView],
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

    /// All ranks' `input`, each in the tensor of its number, on `root`; elsewhere there are no outputs.
    ///
    /// # Errors
    /// If `root` is out of range, the outputs do not fit, or the group has failed.
    pub fn gather(&self, outputs: Vec<TensorView>, input: TensorView, root: Rank) -> Result<Work> {
        let label = Label::new(OpKind::Gather, 0).elements(input.dtype(), input.elements()).root(root);
        self.check_root(&label, root, "root")?;
        self.check_root_only(&label, "outputs", outputs.len(), root)?;
        if self.rank() == root {
            self.check_list(&label, "outputs", &outputs, input.dtype(), Some(input.elements()))?;
        }
        let bytes = apart(input.byte_len() * self.size());
        let mut buffers = Buffers::of(input);
        buffers.set(Buffer::Input, Parts::One(0));
        let table = add_all(&mut buffers, outputs);
        buffers.set(Buffer::Output, Parts::Table(table));
        self.submit(label, self.irregular(label, Kind::Gather, root, bytes, buffers, None))
    }

    /// As [`Group::gather`], into one tensor.
    ///
    /// # Errors
    /// See there.
    pub fn gather_into(&self, output: Option<TensorView>, input: TensorView, root: Rank) -> Result<Work> {
        let label = Label::new(OpKind::Gather, 0).elements(input.dtype(), input.elements()).root(root);
        self.check_root(&label, root, "root")?;
        self.check_root_only(&label, "output", usize::from(output.is_some()), root)?;
        let bytes = input.byte_len() * self.size();
        let mut buffers = Buffers::default();
        if let Some(output) = output {
            self.check_whole(&label, "output", &output, "input", &input)?;
            let view = buffers.add(output);
            buffers.set(Buffer::Output, Parts::Equal { view, part: input.byte_len() });
        }
        let input = buffers.add(input);
        buffers.set(Buffer::Input, Parts::One(input));
        self.submit(label, self.irregular(label, Kind::Gather, root, bytes, buffers, None))
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

    /// The root's tensor number `r` in `output` of rank `r`; elsewhere there are no inputs.
    ///
    /// # Errors
    /// If `root` is out of range, the inputs do not fit, or the group has failed.
    pub fn scatter(&self, output: TensorView, inputs: Vec<TensorView>, root: Rank) -> Result<Work> {
        let label = Label::new(OpKind::Scatter, 0).elements(output.dtype(), output.elements()).root(root);
        self.check_root(&label, root, "root")?;
        self.check_root_only(&label, "inputs", inputs.len(), root)?;
        if self.rank() == root {
            self.check_list(&label, "inputs", &inputs, output.dtype(), Some(output.elements()))?;
        }
        let bytes = apart(output.byte_len() * self.size());
        let mut buffers = Buffers::of(output);
        buffers.set(Buffer::Output, Parts::One(0));
        let table = add_all(&mut buffers, inputs);
        buffers.set(Buffer::Input, Parts::Table(table));
        self.submit(label, self.irregular(label, Kind::Scatter, root, bytes, buffers, None))
    }

    /// As [`Group::scatter`], from one tensor.
    ///
    /// # Errors
    /// See there.
    pub fn scatter_from(&self, output: TensorView, input: Option<TensorView>, root: Rank) -> Result<Work> {
        let label = Label::new(OpKind::Scatter, 0).elements(output.dtype(), output.elements()).root(root);
        self.check_root(&label, root, "root")?;
        self.check_root_only(&label, "input", usize::from(input.is_some()), root)?;
        let (part, bytes) = (output.byte_len(), output.byte_len() * self.size());
        let mut buffers = Buffers::default();
        if let Some(input) = input {
            self.check_whole(&label, "input", &input, "output", &output)?;
            let view = buffers.add(input);
            buffers.set(Buffer::Input, Parts::Equal { view, part });
        }
        let output = buffers.add(output);
        buffers.set(Buffer::Output, Parts::One(output));
        self.submit(label, self.irregular(label, Kind::Scatter, root, bytes, buffers, None))
    }

    /// Of the combination of all ranks' `input`, the part with this rank's number.
    ///
    /// # Errors
    /// If `input` is not as long as all outputs together, the dtype has no such reduction, or the group has failed.
    pub fn reduce_scatter_into(&self, output: TensorView, input: TensorView, op: ReduceOp) -> Result<Work> {
        let label = Label::new(OpKind::ReduceScatterInto, 0)
            .elements(output.dtype(), output.elements())
            .reduction(&op);
        self.check_whole(&label, "input", &input, "output", &output)?;
        let reduction = self.reduction(&label, &op, input.dtype())?;
        let (bytes, part) = (input.byte_len(), output.byte_len());
        let mut buffers = Buffers::of(output);
        let view = buffers.add(input);
        buffers.set(Buffer::Output, Parts::One(0));
        buffers.set(Buffer::Input, Parts::Equal { view, part });
        self.submit(
            label,
            Request::new(label, Kind::ReduceScatter, self.rank(), bytes, buffers, Some(reduction)),
        )
    }

    /// As [`Group::reduce_scatter_into`], from a list with a tensor for every rank; they may be of different lengths.
    ///
    /// # Errors
    /// See there.
    pub fn reduce_scatter(&self, output: TensorView, inputs: Vec<TensorView>, op: ReduceOp) -> Result<Work> {
        let total: usize = inputs.iter().map(TensorView::elements).sum();
        let label = Label::new(OpKind::ReduceScatter, 0).elements(output.dtype(), total).reduction(&op);
        self.check_list(&label, "inputs", &inputs, output.dtype(), None)?;
        let reduction = self.reduction(&label, &op, output.dtype())?;
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
        buffers.set(Buffer::Output, Parts::One(0));
        let table = add_all(&mut buffers, inputs);
        buffers.set(Buffer::Input, Parts::Table(table));
        self.submit(label, self.irregular(label, Kind::ReduceScatter, 0, bytes, buffers, Some(reduction)))
    }

    /// Part `r` of `input` to rank `r`, and part `r` of `output` from rank `r`. The splits say how many elements each part
    /// has; an empty list means equal parts.
    ///
    /// # Errors
    /// If the splits do not add up, or an equal split is not possible, or the group has failed.
    pub fn all_to_all_single(
        &self,
        output: TensorView,
        input: TensorView,
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
        buffers.set(Buffer::Output, Parts::Table(output));
        buffers.set(Buffer::Input, Parts::Table(input));
        let mut request = Request::new(label, Kind::AllToAll, self.rank(), bytes, buffers, None);
        request.regular = equal;
        self.submit(label, request)
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

    /// Tensor `r` of `inputs` to rank `r`, and tensor `r` of `outputs` from rank `r`; they may be of different lengths.
    ///
    /// # Errors
    /// If there are not as many tensors as ranks, or the group has failed.
    pub fn all_to_all(&self, outputs: Vec<TensorView>, inputs: Vec<TensorView>) -> Result<Work> {
        let dtype = inputs.first().map_or(DType::U8, TensorView::dtype);
        let label = Label::new(OpKind::AllToAll, 0).elements(dtype, 0);
        self.check_list(&label, "inputs", &inputs, dtype, None)?;
        self.check_list(&label, "outputs", &outputs, dtype, None)?;
        // Lengths are known to the two ranks concerned only, so they must not decide about the algorithm.
        let mut buffers = Buffers::default();
        let table = add_all(&mut buffers, inputs);
        buffers.set(Buffer::Input, Parts::Table(table));
        let table = add_all(&mut buffers, outputs);
        buffers.set(Buffer::Output, Parts::Table(table));
        self.submit(label, self.irregular(label, Kind::AllToAll, 0, usize::MAX / 2, buffers, None))
    }

    /// Returns when all ranks have called it.
    ///
    /// # Errors
    /// If the group has failed.
    pub fn barrier(&self) -> Result<Work> {
        let label = Label::new(OpKind::Barrier, 0);
        self.submit(label, Request::new(label, Kind::Barrier, self.rank(), 0, Buffers::default(), None))
    }

    /// Sends a tensor to `to`, which receives it with the same `tag`.
    ///
    /// # Errors
    /// If `to` is out of range or this rank itself, or the group has failed.
    pub fn send(&self, tensor: TensorView, to: Rank, tag: u32) -> Result<Work> {
        self.check_tag(OpKind::Send, tag)?;
        if self.inner.checks_numbers {
            let label = Label::new(OpKind::Send, 0).elements(tensor.dtype(), tensor.elements()).tag(tag);
            self.check_tensors(&label, std::iter::once(&tensor))?;
        }
        self.send_tagged(tensor, to, tag)
    }

    fn send_tagged(&self, tensor: TensorView, to: Rank, tag: u32) -> Result<Work> {
        let label = Label::new(OpKind::Send, 0).elements(tensor.dtype(), tensor.elements()).tag(tag);
        self.check_peer(&label, to)?;
        self.check_contiguous(&label, &tensor)?;
        self.message(label, Some(to), |state, work| {
            state.messages.send(work, tensor, to);
        })
    }

    /// Receives what `from` sends with `tag`. A shorter message leaves the rest of the tensor as it is.
    ///
    /// # Errors
    /// If `from` is out of range or this rank itself, or the group has failed.
    pub fn recv(&self, tensor: TensorView, from: Rank, tag: u32) -> Result<Work> {
        self.check_tag(OpKind::Recv, tag)?;
        self.recv_tagged(tensor, from, tag)
    }

    fn recv_tagged(&self, tensor: TensorView, from: Rank, tag: u32) -> Result<Work> {
        let label = Label::new(OpKind::Recv, 0).elements(tensor.dtype(), tensor.elements()).tag(tag);
        self.check_peer(&label, from)?;
        self.check_contiguous(&label, &tensor)?;
        self.message(label, Some(from), |state, work| {
            state.messages.receive(Receiving { work, view: tensor, from: Some(from), tag });
        })
    }

    /// Receives what anybody sends with `tag`; [`Work::source`] says who it was.
    ///
    /// # Errors
    /// If the group has one rank only, or has failed.
    pub fn recv_any(&self, tensor: TensorView, tag: u32) -> Result<Work> {
        let label = Label::new(OpKind::RecvAnySource, 0).elements(tensor.dtype(), tensor.elements()).tag(tag);
        self.check_tag(OpKind::RecvAnySource, tag)?;
        if self.size() == 1 {
            return self.refuse(&label, "there is nobody else in the group to receive from".to_string());
        }
        self.check_contiguous(&label, &tensor)?;
        self.message(label, None, |state, work| {
            state.messages.receive(Receiving { work, view: tensor, from: None, tag });
        })
    }

    /// Some tags are tenfold's own.
    fn check_tag(&self, kind: OpKind, tag: u32) -> Result<()> {
        if tag < TAGS_RESERVED {
            return Ok(());
        }
        let message = format!("tag {tag} is out of range: tags are 0 to {}", TAGS_RESERVED - 1);
        self.refuse(&Label::new(kind, 0).tag(tag), message)
    }

    fn check_contiguous(&self, label: &Label, tensor: &TensorView) -> Result<()> {
        if tensor.is_contiguous() {
            return Ok(());
        }
        self.refuse(
            label,
            "the tensor is not contiguous; collectives take such tensors, messages do not".to_string(),
        )
    }

    fn check_peer(&self, label: &Label, peer: Rank) -> Result<()> {
        self.check_root(label, peer, "rank")?;
        if peer == self.rank() {
            return self.refuse(label, format!("rank {peer} is this rank itself"));
        }
        Ok(())
    }

    fn message(
        &self,
        label: Label,
        peer: Option<Rank>,
        start: impl FnOnce(&mut GroupState, Arc<Shared>),
    ) -> Result<Work> {
        if debug_level() == DebugLevel::Detail {
            let site = recorder::caller();
            let (input, output) = message_sizes(&label);
            let detail = Arc::new(Detail::new(&site, input, output));
            return recorder::with_site(site, || self.message_with(label, peer, start, Some(detail)));
        }
        self.message_with(label, peer, start, None)
    }

    fn message_with(
        &self,
        mut label: Label,
        peer: Option<Rank>,
        start: impl FnOnce(&mut GroupState, Arc<Shared>),
        detail: Option<Arc<Detail>>,
    ) -> Result<Work> {
        let inner = &self.inner;
        if let Err(fault) = inner.fabric.check_process() {
            return Err(self.error(label, fault));
        }
        let deadline = self.deadline();
        let span = self.span(&label, || None);
        let submitted = inner.fabric.engine.submit(&inner.fabric, inner.index, self.background, |state| {
            if let Some(fault) = state.failed() {
                return Err(fault.clone());
            }
            label.seq = state.next_message_number();
            let sizes = message_sizes(&label);
            let ticket = state.record.called(&self.call(&label, state.counts(), sizes, peer, false));
            let record = Recorded { group: Arc::clone(&inner.record), ticket, detail };
            let size = inner.topology.size();
            let work = Shared::new(label, "", deadline, &inner.name, inner.rank, size, record);
            start(state, Arc::clone(&work));
            Ok(work)
        });
        match submitted {
            Ok(work) => {
                work.trace(span);
                Ok(Work::new(work, inner.fabric.clone()))
            }
            Err(fault) => Err(self.error(label, refused(fault))),
        }
    }

    /// A barrier in which rank 0 finds out who is missing. Blocks. With `wait_for_all` rank 0 names everybody who is late,
    /// else the first it finds.
    ///
    /// # Errors
    /// On rank 0, if ranks are missing when the time is up: they are named, and the group fails on all ranks.
    pub fn monitored_barrier(&self, timeout: Duration, wait_for_all: bool) -> Result<()> {
        const TAG: u32 = TAGS_RESERVED;
        let label = Label::new(OpKind::MonitoredBarrier, self.sequence_number() + 1);
        let calls = self.with_timeout(timeout.saturating_add(Duration::from_secs(5)));
        let word = || Tensor::zeros(DType::U8, 1);
        if self.rank() > 0 {
            let (mut here, mut answer) = (word(), word());
            calls.send_tagged(here.lend(), 0, TAG)?.wait()?;
            return calls.recv_tagged(answer.lend(), 0, TAG)?.wait();
        }
        let mut words: Vec<Tensor> = (0..self.size()).map(|_| word()).collect();
        let waits: Vec<Work> = words
            .iter_mut()
            .enumerate()
            .skip(1)
            .map(|(rank, word)| calls.recv_tagged(word.lend(), rank, TAG))
            .collect::<Result<_>>()?;
        let deadline = tenfold_store::Deadline::after(timeout);
        let mut missing = Vec::new();
        for (index, wait) in waits.iter().enumerate() {
            match wait.wait_for(deadline.left().unwrap_or(Duration::MAX)) {
                Ok(()) => {}
                Err(error) if error.kind() == FaultKind::Timeout && self.failure().is_none() => {
                    missing.push(index + 1);
                }
                Err(error) => return Err(error),
            }
            if !missing.is_empty() && !wait_for_all {
                break;
            }
        }
        if !missing.is_empty() {
            let time = show_duration(timeout);
            let message = format!("{} did not reach the monitored barrier in {time}", show_ranks(&missing));
            let fault = Fault::new(FaultKind::Timeout, message).peer(missing[0]);
            let fault = fault.hint("see that rank's log; it called something else, or is still computing");
            self.inner.fabric.engine.fail(&self.inner.fabric, self.inner.index, fault.clone());
            return Err(self.error(label, fault));
        }
        for (rank, word) in words.iter_mut().enumerate().skip(1) {
            calls.send_tagged(word.lend(), rank, TAG)?.wait()?;
        }
        Ok(())
    }
}

/// What goes out and what comes in.
fn message_sizes(label: &Label) -> (Sizes, Sizes) {
    let whole = Sizes::one(label.count as usize);
    if label.kind == OpKind::Send { (whole, Sizes::NONE) } else { (Sizes::NONE, whole) }
}

/// The size that decides about the algorithm where parts lie apart: too much for algorithms that send several as one.
fn apart(bytes: usize) -> usize {
    bytes.max(tenfold_plan::PIECE + 1)
}

/// Adds views as the parts of a buffer.
fn add_all(buffers: &mut Buffers, views: Vec<TensorView>) -> Vec<(usize, usize, usize)> {
    let add = |view: TensorView| {
        let len = view.byte_len();
        (buffers.add(view), 0, len)
    };
    views.into_iter().map(add).collect()
}

/// A failed group says why it failed.
#[cold]
fn refused(fault: Fault) -> Fault {
    let message = format!("the group has failed before: {}", fault.message);
    Fault { message, ..fault }
}
