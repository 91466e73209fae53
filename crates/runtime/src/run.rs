//! Executes one rank's plan over the memory of one operation.
//!
//! A run never waits, reads no clock and logs nothing: [`Run::poll`] goes as far as it can, and [`Run::wants`] says what
//! it needs to go on. Long operations run the same plan over successive *pieces* of all parts, so that what is being
//! reduced stays in the core's cache however large the tensor is.
//!
//! Every step of the first round sends its message even if there is nothing in it: an empty message still says who
//! called what. In later rounds both sides skip parts that have ended.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::task::Poll;

use tenfold_memory::{Buffer, BufferView, Bytes, Head, Lane, Reduction, Span};
use tenfold_plan::{Area, Chunk, Place, Plan, Rank, Step};

use crate::fault::{ErrorKind, Fault, panic_text};
use crate::label::{Label, Roots};
use crate::recorder::Sizes;
use crate::transport::{Stage, Transport, Wants};

/// Collectives have links of their own.
const LANE: Lane = Lane::Collective;

/// Lent chunks that may be on their way before the run waits for one of them to be taken.
const OPEN_MAX: usize = 64;

/// Sources that are combined without allocating.
const SOURCES: usize = 16;

/// A run without a plan does nothing.
const UNPLANNED: Result<Poll<()>, Fault> = Ok(Poll::Pending);

/// Memory of an operation: views, and which part of which view a part of a plan's buffer is.
#[derive(Debug, Default)]
pub(crate) struct Buffers {
    /// Most operations have one or two views: no list is made for those.
    first: Option<BufferView>,
    second: Option<BufferView>,
    others: Vec<BufferView>,
    input: Parts,
    output: Parts,
    scratch: Parts,
}

/// How a buffer is cut into parts.
#[derive(Debug, Default)]
pub(crate) enum Parts {
    #[default]
    None,
    /// One part: a whole view.
    One(usize),
    /// Of one view, each `part` bytes, the last ones shorter or empty.
    Equal { view: usize, part: usize },
    /// Each where it is: view, first byte, bytes.
    Table(Vec<(usize, usize, usize)>),
}

impl Buffers {
    /// With one view, number 0.
    #[inline]
    pub(crate) fn of(view: BufferView) -> Self {
        Buffers { first: Some(view), ..Buffers::default() }
    }

    /// Adds a view; the result is its index.
    pub(crate) fn add(&mut self, view: BufferView) -> usize {
        let views = self.len();
        match views {
            0 => self.first = Some(view),
            1 => self.second = Some(view),
            _ => self.others.push(view),
        }
        views
    }

    /// Is a view not contiguous?
    #[inline]
    pub(crate) fn has_strided(&self) -> bool {
        (0..self.len()).any(|index| !self.view(index).is_contiguous())
    }

    /// Puts a contiguous copy in the place of every view that is not; the originals and their numbers.
    pub(crate) fn pack_strided(&mut self) -> Vec<(usize, BufferView)> {
        let strided = |buffers: &Buffers, index: &usize| !buffers.view(*index).is_contiguous();
        let indices: Vec<usize> = (0..self.len()).filter(|index| strided(self, index)).collect();
        indices.into_iter().map(|index| (index, self.replace_by_copy(index))).collect()
    }

    /// Puts a copy in the place of every view of the input, with what `reduction` does to elements before they are combined.
    fn prepare_inputs(&mut self, reduction: &Reduction) {
        for index in self.indices(Area::Input) {
            self.replace_by_copy(index);
            let copy = self.view(index).span();
            reduction.prepare(copy, copy.bytes());
        }
    }

    /// Puts a contiguous copy in the place of a view, which is returned.
    fn replace_by_copy(&mut self, index: usize) -> BufferView {
        let view = match index {
            0 => self.first.as_mut(),
            1 => self.second.as_mut(),
            _ => self.others.get_mut(index - 2),
        };
        let view = view.expect("parts lie in views that were added");
        let copy = Buffer::zeros(view.dtype(), view.elements()).lend();
        view.pack(copy.span());
        std::mem::replace(view, copy)
    }

    fn len(&self) -> usize {
        usize::from(self.first.is_some()) + usize::from(self.second.is_some()) + self.others.len()
    }

    /// The first view; the others are dropped.
    pub(crate) fn into_first(self) -> BufferView {
        self.first.expect("an operation has a view")
    }

    #[inline]
    pub(crate) fn view(&self, index: usize) -> &BufferView {
        let view = match index {
            0 => self.first.as_ref(),
            1 => self.second.as_ref(),
            _ => self.others.get(index - 2),
        };
        view.expect("parts lie in views that were added")
    }

    /// The tensors that the caller gave for a buffer.
    pub(crate) fn views(&self, buffer: Area) -> Vec<&BufferView> {
        self.indices(buffer).into_iter().map(|index| self.view(index)).collect()
    }

    /// The numbers of those tensors.
    pub(crate) fn indices(&self, buffer: Area) -> Vec<usize> {
        let mut indices = match self.parts(buffer) {
            Parts::None => Vec::new(),
            Parts::One(view) | Parts::Equal { view, .. } => vec![*view],
            Parts::Table(table) => table.iter().map(|part| part.0).collect(),
        };
        indices.dedup(); // parts of one view are one tensor, cut by splits
        indices
    }

    /// How long the tensors are that the caller gave for a buffer.
    pub(crate) fn sizes(&self, buffer: Area) -> Sizes {
        match self.parts(buffer) {
            Parts::None => Sizes::NONE,
            Parts::One(view) | Parts::Equal { view, .. } => Sizes::one(self.view(*view).elements()),
            Parts::Table(table) => {
                // Parts of one view are one tensor, cut by splits.
                let ends_view =
                    |index: usize| table.get(index + 1).is_none_or(|next| next.0 != table[index].0);
                let last_of_views = (0..table.len()).filter(|index| ends_view(*index));
                Sizes::of(last_of_views.map(|index| self.view(table[index].0).elements()))
            }
        }
    }

    pub(crate) fn set(&mut self, buffer: Area, parts: Parts) {
        *match buffer {
            Area::Input => &mut self.input,
            Area::Output => &mut self.output,
            Area::Scratch => &mut self.scratch,
        } = parts;
    }

    fn parts(&self, buffer: Area) -> &Parts {
        match buffer {
            Area::Input => &self.input,
            Area::Output => &self.output,
            Area::Scratch => &self.scratch,
        }
    }

    /// View, first byte and bytes of a part.
    #[inline]
    fn part(&self, buffer: Area, index: usize) -> (usize, usize, usize) {
        match self.parts(buffer) {
            Parts::None => unreachable!("a plan uses only buffers that its operation has"),
            Parts::One(view) => (*view, 0, self.view(*view).byte_len()),
            Parts::Equal { view, part } => {
                let whole = self.view(*view).byte_len();
                let start = (index * part).min(whole);
                (*view, start, (*part).min(whole - start))
            }
            Parts::Table(table) => table[index],
        }
    }

    /// The bytes of `chunk` in this round, to be written.
    #[inline]
    fn span(&self, chunk: Chunk, piece: usize, round: usize) -> Span<'_> {
        let (view, start, end) = self.range(chunk, piece, round);
        if chunk.count == 0 { Span::empty() } else { self.view(view).span().part(start, end) }
    }

    /// The bytes of `chunk` in this round, to be read.
    #[inline]
    fn bytes(&self, chunk: Chunk, piece: usize, round: usize) -> Bytes<'_> {
        let (view, start, end) = self.range(chunk, piece, round);
        if chunk.count == 0 { Bytes::of(&[]) } else { self.view(view).bytes().part(start, end) }
    }

    /// Where the bytes of `chunk` are in this round: view, first byte, end.
    #[inline]
    fn range(&self, chunk: Chunk, piece: usize, round: usize) -> (usize, usize, usize) {
        match chunk.count {
            0 => (0, 0, 0),
            1 => {
                let (view, start, len) = self.part(chunk.buffer, chunk.first);
                let skipped = (round * piece).min(len);
                let len = piece.min(len - skipped);
                // Scratch is the same memory in every round.
                let start = if chunk.buffer == Area::Scratch { start } else { start + skipped };
                (view, start, start + len)
            }
            count => {
                let (view, start, _) = self.part(chunk.buffer, chunk.first);
                let (last, end, len) = self.part(chunk.buffer, chunk.first + count - 1);
                assert_eq!(view, last, "parts that travel together lie together");
                (view, start, end + len)
            }
        }
    }

    /// Memory for the scratch parts of `plan`.
    fn make_scratch(&mut self, plan: &Plan, piece: usize) {
        let (mut end, views) = (0, self.len());
        let table: Vec<_> = plan
            .scratch
            .iter()
            .map(|&(buffer, index)| {
                let len = self.part(buffer, index).2;
                let start = end;
                end += len.min(piece);
                (views, start, len)
            })
            .collect();
        self.add(Buffer::zeros(tenfold_memory::DType::U8, end).lend());
        self.scratch = Parts::Table(table);
    }

    /// How many rounds it takes to run `plan` over pieces.
    fn rounds(&self, plan: &Plan, piece: usize) -> usize {
        let whole = self.first.as_ref().map_or(0, BufferView::byte_len);
        if self.second.is_none() && whole <= piece {
            return 1; // the usual short operation
        }
        let longest = |buffer, count| (0..count).map(|index| self.part(buffer, index).2).max().unwrap_or(0);
        let longest = longest(Area::Input, plan.input).max(longest(Area::Output, plan.output));
        if plan.pieces { longest.div_ceil(piece).max(1) } else { 1 }
    }
}

/// A chunk that not all peers have taken yet.
#[derive(Debug)]
struct Open {
    to: Vec<Rank>,
    chunk: Chunk,
    round: usize,
    stage: Option<Stage>,
}

/// One operation under way.
#[derive(Debug)]
pub(crate) struct Run {
    label: Label,
    head: Head,
    algorithm: &'static str,
    plan: Option<Arc<Plan>>,
    buffers: Buffers,
    reduction: Option<Reduction>,
    rank: Rank,
    piece: usize,
    rounds: usize,
    place: Place,
    /// Within the step: receivers that have it, or sources that are here.
    done: usize,
    /// Sources that are not here yet.
    missing: Vec<Rank>,
    stage: Option<Stage>,
    open: Vec<Open>,
}

impl Run {
    /// An operation whose plan is not chosen yet.
    #[inline]
    pub(crate) fn unplanned(
        label: Label,
        rank: Rank,
        buffers: Buffers,
        reduction: Option<Reduction>,
    ) -> Self {
        Run {
            label,
            head: [0; 3],
            algorithm: "",
            plan: None,
            buffers,
            reduction,
            rank,
            piece: 0,
            rounds: 0,
            place: Place::default(),
            done: 0,
            missing: Vec::new(),
            stage: None,
            open: Vec::new(),
        }
    }

    /// Has all ranks agree about a number made of their shapes.
    pub(crate) fn set_shape(&mut self, hash: u64) {
        self.label = self.label.shape(hash);
    }

    /// Is there anything that [`Run::prepare`] may have to do?
    #[inline]
    pub(crate) fn may_need_preparation(&self) -> bool {
        self.reduction.as_ref().is_some_and(Reduction::may_need_preparation)
    }

    /// Does to this rank's elements what must happen before any are combined: with `in_place` where they are, else in a copy.
    pub(crate) fn prepare(&mut self, in_place: bool, rounds_partial_sums: bool) {
        let Some(reduction) = &mut self.reduction else { return };
        if rounds_partial_sums && let Some(scaling_first) = reduction.scaling_first() {
            *reduction = scaling_first;
        }
        if !reduction.needs_preparation() {
            return;
        }
        if in_place {
            let own = self.buffers.view(0).span();
            reduction.prepare(own, own.bytes());
        } else {
            self.buffers.prepare_inputs(reduction);
        }
    }

    /// Has its label tell which roots calls before it had.
    #[inline]
    pub(crate) fn follow(&mut self, roots: &mut Roots) {
        roots.follow(&mut self.label);
    }

    /// Gives it its number and its plan.
    #[inline]
    pub(crate) fn assign(&mut self, seq: u64, algorithm: &'static str, plan: Arc<Plan>, piece: usize) {
        self.label.seq = seq;
        self.head = self.label.head();
        self.algorithm = algorithm;
        if !plan.scratch.is_empty() {
            self.buffers.make_scratch(&plan, piece);
        }
        self.piece = piece;
        self.rounds = self.buffers.rounds(&plan, piece);
        self.place.settle(&plan, self.rounds);
        self.plan = Some(plan);
    }

    #[cfg(test)]
    pub(crate) fn new(
        label: Label,
        rank: Rank,
        plan: Arc<Plan>,
        buffers: Buffers,
        reduction: Option<Reduction>,
        piece: usize,
    ) -> Self {
        let mut run = Run::unplanned(label, rank, buffers, reduction);
        run.assign(label.seq, "", plan, piece);
        run
    }

    fn steps(&self) -> &[Step] {
        self.plan.as_ref().map_or(&[], |plan| &plan.steps)
    }

    pub(crate) fn buffers(&mut self) -> &mut Buffers {
        &mut self.buffers
    }

    /// Changes whenever the run moves.
    #[inline]
    pub(crate) fn position(&self) -> (usize, usize, usize, usize) {
        (self.place.round, self.place.step, self.done, self.open.len())
    }

    pub(crate) fn algorithm(&self) -> &'static str {
        self.algorithm
    }

    #[inline]
    pub(crate) fn label(&self) -> &Label {
        &self.label
    }

    /// The memory, which no peer uses any more.
    pub(crate) fn into_buffers(self) -> Buffers {
        self.buffers
    }

    /// The bytes from an address on, if they are memory of this run: what a peer that was lent them would read now.
    #[cfg(test)]
    pub(crate) fn bytes_at(&self, start: usize, len: usize) -> Option<Bytes<'_>> {
        let place = |view: &BufferView| start.checked_sub(view.bytes().start().addr());
        let here = |view: &&BufferView| place(view).is_some_and(|place| place + len <= view.byte_len());
        let view = (0..self.buffers.len()).map(|index| self.buffers.view(index)).find(|view| here(view))?;
        let place = place(view)?;
        Some(view.bytes().part(place, place + len))
    }

    /// As in `step 4 of 14, piece 2 of 9`.
    pub(crate) fn progress(&self) -> String {
        let Place { round, step, .. } = self.place;
        let mut text = format!("step {} of {}", (step + 1).min(self.steps().len()), self.steps().len());
        if self.rounds > 1 {
            text += &format!(", piece {} of {}", (round + 1).min(self.rounds), self.rounds);
        }
        text
    }

    /// Goes as far as it can.
    #[inline]
    pub(crate) fn poll<T: Transport>(&mut self, transport: &mut T) -> Result<Poll<()>, Fault> {
        if !self.open.is_empty() {
            self.poll_open(transport)?;
        }
        while self.place.round < self.rounds {
            if self.poll_step(transport)?.is_pending() {
                return Ok(Poll::Pending);
            }
            let Some(plan) = &self.plan else { break };
            self.place.advance(plan, self.rounds);
            self.done = 0;
        }
        if !self.open.is_empty() {
            return Ok(Poll::Pending);
        }
        transport.poll_flush(LANE)
    }

    fn poll_step<T: Transport>(&mut self, transport: &mut T) -> Result<Poll<()>, Fault> {
        let Run { plan: Some(plan), buffers, head, piece, place, done, missing, .. } = self else {
            return UNPLANNED;
        };
        let Place { round, step, .. } = *place;
        let span = |chunk| buffers.span(chunk, *piece, round);
        let bytes = |chunk| buffers.bytes(chunk, *piece, round);
        let is_over = |bytes: Bytes<'_>| round > 0 && bytes.is_empty();
        match &plan.steps[step] {
            Step::Send { chunk, .. } => {
                if is_over(bytes(*chunk)) {
                    return Ok(Poll::Ready(()));
                }
                self.poll_send(transport)
            }
            Step::Recv { from, chunk } => {
                let target = span(*chunk);
                if is_over(target.bytes()) {
                    return Ok(Poll::Ready(()));
                }
                transport.poll_recv(LANE, *from, head, target)
            }
            Step::Reduce { from, own, to, finish } => {
                let (own, target) = (bytes(*own), span(*to));
                if is_over(target.bytes()) {
                    return Ok(Poll::Ready(()));
                }
                missing.clear();
                for source in &from[*done..] {
                    if transport.poll_ready(LANE, *source, head, target.len())?.is_pending() {
                        missing.push(*source);
                    } else if missing.is_empty() {
                        *done += 1; // need not be asked again
                    }
                }
                if !missing.is_empty() {
                    return Ok(Poll::Pending);
                }
                let reduction = self.reduction.as_ref().expect("a plan that reduces has a reduction");
                combine(reduction, transport, self.rank, from, own, target, *finish)?;
                for source in from {
                    transport.take(LANE, *source)?;
                }
                Ok(Poll::Ready(()))
            }
            Step::Copy { from, to } => {
                span(*to).copy_from(bytes(*from));
                Ok(Poll::Ready(()))
            }
        }
    }

    /// The step is a send.
    fn poll_send<T: Transport>(&mut self, transport: &mut T) -> Result<Poll<()>, Fault> {
        let Run { plan: Some(plan), buffers, head, piece, place, done, stage, open, .. } = self else {
            return UNPLANNED;
        };
        let Place { round, step, .. } = *place;
        let Step::Send { to, chunk } = &plan.steps[step] else { unreachable!("the caller looked") };
        let (bytes, lend) = (buffers.bytes(*chunk, *piece, round), plan.lends);
        let mut later = Vec::new();
        if open.len() >= OPEN_MAX {
            return Ok(Poll::Pending);
        }
        while let Some(&peer) = to.get(*done) {
            // A link is first in, first out: nothing overtakes what that peer has not taken yet.
            let behind = open.iter().any(|open| open.to.contains(&peer));
            if behind || transport.poll_send(LANE, peer, stage, head, bytes, lend)?.is_pending() {
                if !lend {
                    return Ok(Poll::Pending);
                }
                later.push(peer);
            }
            *done += 1;
        }
        let stage = stage.take();
        if later.is_empty() {
            transport.close(LANE, stage);
        } else {
            open.push(Open { to: later, chunk: *chunk, round, stage });
        }
        Ok(Poll::Ready(()))
    }

    /// Offers again what was not taken yet.
    fn poll_open<T: Transport>(&mut self, transport: &mut T) -> Result<(), Fault> {
        let mut blocked: Vec<Rank> = Vec::new();
        for open in &mut self.open {
            let bytes = self.buffers.bytes(open.chunk, self.piece, open.round);
            let mut waiting = Vec::new();
            for &peer in &open.to {
                if blocked.contains(&peer)
                    || transport.poll_send(LANE, peer, &mut open.stage, &self.head, bytes, true)?.is_pending()
                {
                    blocked.push(peer);
                    waiting.push(peer);
                }
            }
            open.to = waiting;
            if open.to.is_empty() {
                transport.close(LANE, open.stage.take());
            }
        }
        self.open.retain(|open| !open.to.is_empty());
        Ok(())
    }

    /// What it waits for.
    pub(crate) fn wants(&self, wants: &mut Wants) {
        wants.room.extend(self.open.iter().flat_map(|open| &open.to));
        if self.place.round >= self.rounds {
            wants.flush = true;
            return;
        }
        match &self.steps()[self.place.step] {
            Step::Send { to, .. } => wants.room.extend(&to[self.done..]),
            Step::Recv { from, .. } => wants.messages.push(*from),
            Step::Reduce { .. } => wants.messages.extend(&self.missing),
            Step::Copy { .. } => {}
        }
    }
}

/// Combines our own bytes and those that arrived, in the order of ranks.
#[inline]
fn combine<T: Transport>(
    reduction: &Reduction,
    transport: &T,
    rank: Rank,
    from: &[Rank],
    own: Bytes<'_>,
    target: Span<'_>,
    finish: bool,
) -> Result<(), Fault> {
    // A verified plan lists them in ascending order.
    let place = from.iter().take_while(|source| **source < rank).count();
    let mut few = [own; SOURCES];
    let mut many;
    let sources: &mut [Bytes<'_>] = if from.len() < SOURCES {
        &mut few[..=from.len()]
    } else {
        many = vec![own; from.len() + 1];
        &mut many
    };
    for (index, source) in from.iter().enumerate() {
        sources[index + usize::from(index >= place)] = transport.peek(LANE, *source);
    }
    if reduction.must_keep_order() {
        return combine_by_user(rank, || reduction.combine(target, sources, finish));
    }
    reduction.combine(target, sources, finish);
    Ok(())
}

/// Runs a function of the user's, which may panic: the thread may be the helper, on which the whole rank depends.
#[cold]
fn combine_by_user(rank: Rank, combine: impl FnOnce()) -> Result<(), Fault> {
    catch_unwind(AssertUnwindSafe(combine)).map_err(|panic| {
        let text = panic_text(&*panic);
        let message = format!("the custom reduce operation of rank {rank} panicked: {text}");
        Fault::new(ErrorKind::Aborted, message).peer(rank)
    })
}
