//! Random operations, what a rank gives to them, and what must come out.
//!
//! Elements are small whole numbers, so that every sum is exact in every dtype and no order of adding shows.

use std::sync::Arc;

use tenfold_memory::{Buffer, BufferView, Bytes, DType, ReduceOp, Reduction};
use tenfold_plan::{ALGORITHMS, Algorithm, Area, Kind, Needs, Rank, Topology, choose};

use super::Chance;
use crate::label::{Label, OpKind};
use crate::run::{Buffers, Parts, Run};

/// What memory of no meaning is filled with.
const RUBBISH: u8 = 0xee;

/// An operation as all ranks call it.
#[derive(Clone, Debug)]
pub(super) struct Call {
    algorithm: &'static Algorithm,
    dtype: DType,
    /// Of PREMUL_SUM every rank has its own factor.
    op: ReduceOp,
    root: Rank,
    /// Elements: of the tensor where there is one for all, else of the part of each rank.
    parts: Vec<usize>,
    regular: bool,
    /// Makes the elements of this call different from others'.
    salt: u64,
}

/// A rank's share of a call.
#[derive(Debug)]
pub(super) struct Job {
    pub run: Run,
    /// What the views must hold at the end.
    pub expected: Vec<(usize, Vec<u8>)>,
}

fn is_in_place(kind: Kind) -> bool {
    matches!(kind, Kind::AllReduce | Kind::Reduce | Kind::Scan | Kind::Broadcast)
}

impl Call {
    pub(super) fn random(topology: &Topology, piece: usize, chance: &mut Chance) -> Self {
        loop {
            let algorithm = chance.pick(ALGORITHMS);
            if let Some(call) = Call::by(algorithm, topology, piece, chance) {
                return call;
            }
        }
    }

    /// A random call by an algorithm, or by the one that `choose` takes; nothing if that does not suit.
    fn by(
        algorithm: &'static Algorithm,
        topology: &Topology,
        piece: usize,
        chance: &mut Chance,
    ) -> Option<Self> {
        let size = topology.size();
        let kind = algorithm.kind;
        let dtype = chance.pick(&[DType::F32, DType::I32, DType::U8, DType::BF16]);
        let is_float = matches!(dtype, DType::F32 | DType::BF16);
        let op = match chance.below(5) {
            0 => ReduceOp::Max,
            // By a power of two the division is exact. The ranks of a scan divide by other numbers, too.
            1 if is_float && size.is_power_of_two() && kind != Kind::Scan => ReduceOp::Avg,
            2 if is_float => ReduceOp::PremulSum(1.0),
            _ => ReduceOp::Sum,
        };
        let may_differ = matches!(kind, Kind::AllGather | Kind::ReduceScatter | Kind::AllToAll);
        let regular = !may_differ || chance.once_in(2);
        let (some, many) = (chance.below(20), chance.below(if size > 9 { 90 } else { 300 }));
        let count = |chance: &mut Chance| chance.pick(&[0, 1, size - 1, size + 1, some, many, many]);
        let parts = match kind {
            Kind::Barrier => Vec::new(),
            _ if is_in_place(kind) => vec![count(chance)],
            _ if regular => vec![count(chance) / 2; size],
            _ => (0..size).map(|_| count(chance) / 2).collect(),
        };
        let bytes = parts.iter().sum::<usize>() * dtype.size();
        let needs = Needs { in_rank_order: chance.once_in(4), equal_parts: regular };
        let algorithm = if chance.once_in(4) { choose(kind, bytes, topology, needs) } else { algorithm };
        let fits = algorithm.suits(bytes, needs) && (algorithm.pieces || bytes <= piece)
            // Parts that travel together must lie together.
            && (algorithm.pieces || regular);
        let (root, salt) = (chance.below(size), chance.next());
        fits.then_some(Call { algorithm, dtype, op, root, parts, regular, salt })
    }

    /// What a rank that errs calls instead.
    pub(super) fn mistaken(&self, topology: &Topology, piece: usize, chance: &mut Chance) -> Self {
        loop {
            let mut other = Call::random(topology, piece, chance);
            match chance.below(3) {
                0 => {}
                1 if self.algorithm.kind.reduces() => {
                    other = Call { op: other.op, salt: other.salt, ..self.clone() }
                }
                1 if self.algorithm.kind.has_root() => {
                    other = Call { root: other.root, salt: other.salt, ..self.clone() };
                }
                // Another length.
                _ => match Call::by(self.algorithm, topology, piece, chance) {
                    Some(call) if call.algorithm.kind == self.algorithm.kind => {
                        let (op, dtype) = (self.op.clone(), self.dtype);
                        other = Call { op, dtype, root: self.root, ..call };
                        let bytes = other.parts.iter().sum::<usize>() * dtype.size();
                        if !other.algorithm.pieces && bytes > piece {
                            continue;
                        }
                    }
                    _ => continue,
                },
            }
            if other.reduction(0, topology.size()).is_some() && other.label(1) != self.label(1) {
                return other;
            }
        }
    }

    pub(super) fn label(&self, seq: u64) -> Label {
        let kind = match self.algorithm.kind {
            Kind::AllGather if self.regular => OpKind::AllGatherInto,
            Kind::AllGather => OpKind::AllGather,
            Kind::AllReduce => OpKind::AllReduce,
            Kind::AllToAll => OpKind::AllToAllSingle,
            Kind::Barrier => return Label::new(OpKind::Barrier, seq),
            Kind::Broadcast => OpKind::Broadcast,
            Kind::Gather => OpKind::Gather,
            Kind::Reduce => OpKind::Reduce,
            Kind::ReduceScatter if self.regular => OpKind::ReduceScatterInto,
            Kind::ReduceScatter => OpKind::ReduceScatter,
            Kind::Scan => OpKind::Scan,
            Kind::Scatter => OpKind::Scatter,
        };
        let splits = self.algorithm.kind == Kind::AllToAll && !self.regular;
        let count = if splits { 0 } else { self.parts.iter().sum() };
        let mut label = Label::new(kind, seq).elements(self.dtype, count);
        if self.algorithm.kind.has_root() {
            label = label.root(self.root);
        }
        if self.algorithm.kind.reduces() { label.reduction(&self.op) } else { label }
    }

    fn reduction(&self, rank: Rank, size: usize) -> Option<Reduction> {
        Reduction::new(&self.op_of(rank), self.dtype, size).ok()
    }

    fn op_of(&self, rank: Rank) -> ReduceOp {
        match self.op {
            ReduceOp::PremulSum(_) => ReduceOp::PremulSum(self.factor(rank)),
            _ => self.op.clone(),
        }
    }

    fn factor(&self, rank: Rank) -> f64 {
        if rank.is_multiple_of(2) { 1.0 } else { 2.0 }
    }

    /// Elements of what `from` has for `to`.
    fn count(&self, from: Rank, to: Rank) -> usize {
        match self.algorithm.kind {
            kind if is_in_place(kind) => self.parts[0],
            Kind::AllGather | Kind::Gather => self.parts[from],
            Kind::AllToAll => self.parts[(from + 2 * to) % self.parts.len()],
            _ => self.parts[to],
        }
    }

    /// What `from` has for `to`, which matters only where that is not the same for all.
    fn given(&self, from: Rank, to: Rank) -> Vec<f64> {
        let kind = self.algorithm.kind;
        let for_all = is_in_place(kind) || matches!(kind, Kind::AllGather | Kind::Gather);
        let mut values = Chance(self.salt ^ ((from as u64) << 32) ^ if for_all { 0 } else { 1 + to as u64 });
        (0..self.count(from, to)).map(|_| values.below(8) as f64).collect()
    }

    /// The result for `to`, combined from the inputs of all ranks.
    fn combined(&self, size: usize, to: Rank) -> Vec<f64> {
        let mut total = vec![0.0; self.count(0, to)];
        for rank in 0..size {
            for (total, value) in total.iter_mut().zip(self.given(rank, to)) {
                match self.op {
                    ReduceOp::Max => *total = f64::max(*total, value),
                    ReduceOp::PremulSum(_) => *total += value * self.factor(rank),
                    _ => *total += value,
                }
            }
        }
        if self.op == ReduceOp::Avg {
            total.iter_mut().for_each(|total| *total /= size as f64);
        }
        total
    }

    /// What `rank` runs as call number `seq`.
    pub(super) fn start(&self, seq: u64, rank: Rank, topology: &Topology, piece: usize) -> Job {
        let (size, kind) = (topology.size(), self.algorithm.kind);
        let plan = (self.algorithm.plan)(topology, rank, self.root);
        let reduction = kind.reduces().then(|| self.reduction(rank, size)).flatten();
        let mut memory = Memory { dtype: self.dtype, ..Memory::default() };
        if is_in_place(kind) {
            self.lay_in_place(&mut memory, rank, size, plan.output, reduction.as_ref());
        } else {
            self.lay_apart(&mut memory, rank, size, reduction.as_ref());
        }
        let Memory { buffers, expected, .. } = memory;
        let run = Run::new(self.label(seq), rank, Arc::new(plan), buffers, reduction, piece);
        Job { run, expected }
    }

    fn lay_in_place(
        &self,
        memory: &mut Memory,
        rank: Rank,
        size: usize,
        parts: usize,
        reduction: Option<&Reduction>,
    ) {
        let view = memory.tensor(&self.encode(&self.given(rank, 0)));
        prepare(reduction, memory.buffers.view(view));
        let part = self.parts[0].div_ceil(parts.max(1)) * self.dtype.size();
        memory.buffers.set(Area::Output, Parts::Equal { view, part });
        match self.algorithm.kind {
            Kind::AllReduce => memory.expect(view, self.encode(&self.combined(size, 0))),
            Kind::Scan => memory.expect(view, self.encode(&self.combined(rank + 1, 0))),
            Kind::Reduce if rank == self.root => memory.expect(view, self.encode(&self.combined(size, 0))),
            Kind::Broadcast => memory.expect(view, self.encode(&self.given(self.root, 0))),
            _ => {}
        }
    }

    fn lay_apart(&self, memory: &mut Memory, rank: Rank, size: usize, reduction: Option<&Reduction>) {
        let every =
            |part: &dyn Fn(Rank) -> Vec<f64>| (0..size).map(|peer| self.encode(&part(peer))).collect();
        let all_given = || every(&|peer| self.given(rank, peer));
        let is_root = rank == self.root;
        let input: Vec<Vec<u8>> = match self.algorithm.kind {
            Kind::AllGather | Kind::Gather => vec![self.encode(&self.given(rank, 0))],
            Kind::ReduceScatter | Kind::AllToAll => all_given(),
            Kind::Scatter if is_root => all_given(),
            _ => Vec::new(),
        };
        let output: Vec<Vec<u8>> = match self.algorithm.kind {
            Kind::AllGather | Kind::AllToAll => every(&|peer| self.given(peer, rank)),
            Kind::Gather if is_root => every(&|peer| self.given(peer, rank)),
            Kind::Scatter => vec![self.encode(&self.given(self.root, rank))],
            Kind::ReduceScatter => vec![self.encode(&self.combined(size, rank))],
            _ => Vec::new(),
        };
        // As `group::call` does it: what may differ in length lies anywhere, but for the splits of an all-to-all.
        let together = self.regular || self.algorithm.kind == Kind::AllToAll;
        memory.lay(Area::Output, &output, together, |bytes| vec![RUBBISH; bytes.len()], None);
        memory.lay(Area::Input, &input, together, <[u8]>::to_vec, reduction);
    }

    fn encode(&self, values: &[f64]) -> Vec<u8> {
        let one = |value: &f64| match self.dtype {
            DType::F32 => (*value as f32).to_ne_bytes().to_vec(),
            DType::I32 => (*value as i32).to_ne_bytes().to_vec(),
            DType::BF16 => (((*value as f32).to_bits() >> 16) as u16).to_ne_bytes().to_vec(),
            _ => vec![*value as u8],
        };
        values.iter().flat_map(one).collect()
    }
}

fn prepare(reduction: Option<&Reduction>, view: &BufferView) {
    if let Some(reduction) = reduction.filter(|reduction| reduction.needs_preparation()) {
        reduction.prepare(view.span(), view.span().bytes());
    }
}

/// Buffers under construction.
#[derive(Debug)]
struct Memory {
    buffers: Buffers,
    dtype: DType,
    expected: Vec<(usize, Vec<u8>)>,
}

impl Default for Memory {
    fn default() -> Self {
        Memory { buffers: Buffers::default(), dtype: DType::U8, expected: Vec::new() }
    }
}

impl Memory {
    fn tensor(&mut self, bytes: &[u8]) -> usize {
        let view = Buffer::zeros(self.dtype, bytes.len() / self.dtype.size()).lend();
        view.span().copy_from(Bytes::of(bytes));
        self.buffers.add(view)
    }

    fn expect(&mut self, view: usize, bytes: Vec<u8>) {
        self.expected.push((view, bytes));
    }

    /// The parts of a buffer, in one tensor or in one each. They begin as `fill` says and must end as they are given,
    /// unless a reduction is prepared in them.
    fn lay(
        &mut self,
        buffer: Area,
        parts: &[Vec<u8>],
        together: bool,
        fill: impl Fn(&[u8]) -> Vec<u8>,
        reduction: Option<&Reduction>,
    ) {
        if parts.is_empty() {
            return;
        }
        let tensors: Vec<Vec<u8>> = if together { vec![parts.concat()] } else { parts.to_vec() };
        let views: Vec<usize> = tensors.iter().map(|bytes| self.tensor(&fill(bytes))).collect();
        for (&view, bytes) in views.iter().zip(tensors) {
            prepare(reduction, self.buffers.view(view));
            if reduction.is_none_or(|reduction| !reduction.needs_preparation()) {
                self.expect(view, bytes);
            }
        }
        let mut end = 0;
        let mut place = |(index, part): (usize, &Vec<u8>)| {
            let start = if together { end } else { 0 };
            end += part.len();
            (views[if together { 0 } else { index }], start, part.len())
        };
        let table = parts.iter().enumerate().map(&mut place).collect();
        self.buffers.set(buffer, Parts::Table(table));
    }
}
