//! From a checked call to the engine: plan, record, submit.

use std::sync::Arc;

use tenfold_memory::{BufferView, Reduction};
use tenfold_plan::{Area, Kind, Needs, Rank};
use tracing::{Level, Span};

use super::Group;
use super::state::{Finish, Job};
use super::trouble::detail::{Detail, hash_of_shapes};
use crate::debug;
use crate::engine::Urgency;
use crate::fault::{Fault, Result};
use crate::label::Label;
use crate::recorder::{self, Called, Sizes, Stalls};
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
    pub(super) fn in_place(
        label: Label,
        kind: Kind,
        rank: Rank,
        view: BufferView,
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
        (run.buffers().sizes(Area::Input), run.buffers().sizes(Area::Output))
    }

    /// Works on contiguous copies of what is not; the results are copied back at the end.
    fn pack_strided(&mut self) {
        let Some(run) = &mut self.run else { return };
        let originals = run.buffers().pack_strided();
        let results = if self.in_place { vec![0] } else { run.buffers().indices(Area::Output) };
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

/// Operations up to this size, in bytes, are likely to be over immediately.
const QUICK: usize = 16 * 1024;

/// Part lengths are rounded up to so many elements where there are plenty, so that parts do not share cache lines.
const ALIGN: usize = 64;

/// Bytes of each of `parts` parts of a view.
fn cut(view: &BufferView, parts: usize) -> usize {
    let elements = view.elements().div_ceil(parts.max(1));
    let rounded = if elements >= 16 * ALIGN { elements.next_multiple_of(ALIGN) } else { elements };
    rounded * view.dtype().size()
}

impl Group {
    /// Submits a checked collective.
    #[inline]
    pub(super) fn submit_request(&self, label: Label, mut request: Request) -> Result<Work> {
        if self.inner.checks_numbers {
            self.check_numbers(&label, &mut request)?;
        }
        if debug::level() == debug::Level::Detail {
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
                [Area::Input, Area::Output].map(|it| run.buffers().sizes(it).total()).into_iter().max()
            }
            None => None,
        });
        let submitted = inner.fabric.engine.submit(&inner.fabric, inner.index, urgency, |state, looks| {
            let run = request.run.as_mut()?;
            let choice = state.planner.plan(request.kind, request.bytes, request.root, needs);
            let output = run.buffers().sizes(Area::Output);
            let whole = request.in_place.then(|| Sizes::one(run.buffers().view(0).elements()));
            let input = whole.unwrap_or_else(|| run.buffers().sizes(Area::Input));
            if request.in_place {
                let part = cut(run.buffers().view(0), choice.plan.output);
                run.buffers().set(Area::Output, Parts::Equal { view: 0, part });
            }
            run.follow(&mut state.roots);
            run.assign(state.next_sequence_number(), choice.name, choice.plan, state.planner.piece());
            if let Some(detail) = &detail {
                state.keep_detail(run.label().seq, detail);
            }
            let sizes = (input, whole.unwrap_or(output));
            let starts = state.begins_next();
            let ticket = state.record.called(&self.call(&label, state.counts(), sizes, None, starts));
            state.remember(run.label(), ticket.called_at());
            if let Some(waited) = state.try_at_once(run, looks.turns, || looks.give_way()) {
                state.record.completed(&ticket, waited);
                return None;
            }
            let run = request.run.take()?;
            let (label, algorithm, size) = (*run.label(), run.algorithm(), inner.topology.size());
            let record = Recorded { group: Arc::clone(&inner.record), ticket, detail };
            let work = Shared::new(label, algorithm, self.deadline(), &inner.name, inner.rank, size, record);
            let finish = request.finish.take();
            state.enqueue(Job { run, work: Arc::clone(&work), finish, stalls: Stalls::default() });
            Some(work)
        });
        match submitted {
            Ok(Some(work)) => {
                work.trace(span);
                Ok(Work::new(work, inner.fabric.clone()))
            }
            Ok(None) => Ok(self.finish_at_once(label, request, &span)),
            Err(fault) => Err(self.error(label, refused(fault))),
        }
    }

    /// A collective was over before its call returned, or has nothing to do.
    #[inline]
    fn finish_at_once(&self, label: Label, request: &mut Request, span: &Span) -> Work {
        let Some(run) = &mut request.run else { return Work::done(label, "") };
        if let Some(finish) = request.finish.take() {
            finish(std::mem::take(run.buffers()));
        }
        if !span.is_disabled() {
            span.record("seq", run.label().seq);
            tracing::debug!(target: OPERATIONS, parent: span, "done");
        }
        Work::done(*run.label(), run.algorithm())
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

    /// For subscribers that follow operations by `tracing`: open from the call to the end. It is made and closed without the
    /// engine's lock, because a subscriber may do anything.
    #[inline]
    pub(super) fn span(&self, label: &Label, elements: impl FnOnce() -> Option<u64>) -> Span {
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
    pub(super) fn call(
        &self,
        label: &Label,
        (collectives, messages): (u64, u64),
        (input, output): (Sizes, Sizes),
        peer: Option<Rank>,
        starts: bool,
    ) -> Called {
        let timeout = self.timeout.unwrap_or(self.inner.options.timeout);
        let timeout_ms =
            timeout.as_secs().saturating_mul(1000).saturating_add(u64::from(timeout.subsec_millis()));
        let (kind, dtype, reduction) = (label.kind, label.dtype, label.reduction_code());
        let peer = peer.or(label.root_of());
        Called { kind, dtype, reduction, collectives, messages, input, output, peer, timeout_ms, starts }
    }
}

/// A failed group says why it failed.
#[cold]
pub(super) fn refused(fault: Fault) -> Fault {
    let message = format!("the group has failed before: {}", fault.message);
    Fault { message, ..fault }
}
