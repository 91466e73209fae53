//! What is recorded of one operation, and how it lies in the words of a slot.

use tenfold_memory::DType;
use tenfold_plan::Rank;

use super::ring::{WORDS, Words};
use crate::label::{OpKind, reduction_name};

/// How far an operation is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It was called, and others are before it.
    Scheduled,
    /// It is under way, or was when it failed.
    Started,
    /// It ended well.
    Completed,
}

impl State {
    /// As c10d calls it, such as `completed`.
    pub fn name(self) -> &'static str {
        match self {
            State::Scheduled => "scheduled",
            State::Started => "started",
            State::Completed => "completed",
        }
    }
}

/// Lengths of the tensors of one side of an operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Sizes {
    /// How many tensors.
    pub tensors: u32,
    /// Elements of each, if all are alike; else of all together.
    pub elements: u64,
    pub alike: bool,
}

/// In the number of tensors: they differ in length.
const DIFFERENT: u32 = 1 << 31;

impl Sizes {
    pub(crate) const NONE: Sizes = Sizes { tensors: 0, elements: 0, alike: true };

    #[inline]
    pub(crate) fn one(elements: usize) -> Self {
        Sizes { tensors: 1, elements: elements as u64, alike: true }
    }

    pub(crate) fn of(lengths: impl Iterator<Item = usize>) -> Self {
        let (mut tensors, mut first, mut total, mut alike) = (0_u32, 0, 0_u64, true);
        for length in lengths {
            first = if tensors == 0 { length } else { first };
            alike &= length == first;
            tensors += 1;
            total += length as u64;
        }
        Sizes { tensors, elements: if alike { first as u64 } else { total }, alike }
    }

    /// Of all tensors together.
    #[inline]
    pub(crate) fn total(self) -> u64 {
        if self.alike { self.elements * u64::from(self.tensors) } else { self.elements }
    }

    /// Each tensor's elements; one length for all together where they differ.
    pub(crate) fn lengths(self) -> Vec<u64> {
        if self.alike { vec![self.elements; self.tensors as usize] } else { vec![self.elements] }
    }

    #[inline]
    fn encode(self) -> u32 {
        self.tensors & !DIFFERENT | if self.alike { 0 } else { DIFFERENT }
    }

    fn decode(code: u32, elements: u64) -> Self {
        Sizes { tensors: code & !DIFFERENT, elements, alike: code & DIFFERENT == 0 }
    }
}

/// An operation that is being called.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Called {
    pub kind: OpKind,
    pub dtype: Option<DType>,
    /// The label's code for its reduce operation.
    pub reduction: u8,
    /// Collectives of the group up to this call, messages, and both.
    pub collectives: u64,
    pub messages: u64,
    pub input: Sizes,
    pub output: Sizes,
    /// The peer of a message; `None` if any rank may send it. The root of a rooted collective.
    pub peer: Option<Rank>,
    pub timeout_ms: u64,
    /// Nothing is before it.
    pub starts: bool,
}

/// Places in the words of what changes later.
pub(super) const STARTED: usize = 5;
pub(super) const COMPLETED: usize = 6;
pub(super) const RETIRED: usize = 7;

const NO_DTYPE: u8 = u8::MAX;
const NO_PEER: u32 = u32::MAX;

/// In the flags: there is a [`CallSite`](super::CallSite) for it.
const HAS_SITE: u8 = 1;

/// What a slot holds, as numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Record {
    pub kind: OpKind,
    pub dtype: Option<DType>,
    pub reduction: u8,
    pub has_site: bool,
    pub group: u32,
    pub collectives: u64,
    pub messages: u64,
    pub input: Sizes,
    pub output: Sizes,
    pub peer: Option<Rank>,
    pub timeout_ms: u64,
    pub thread: u32,
    /// By the recorder's clock; 0 if it has not happened.
    pub created: u64,
    pub started: u64,
    pub completed: u64,
    /// When nothing more was to happen: at its end, well or not.
    pub retired: u64,
}

impl Record {
    #[inline]
    pub(super) fn new(call: &Called, group: u32, thread: u32, has_site: bool, now: u64) -> Self {
        let &Called {
            kind,
            dtype,
            reduction,
            collectives,
            messages,
            input,
            output,
            peer,
            timeout_ms,
            starts,
        } = call;
        Record {
            kind,
            dtype,
            reduction,
            has_site,
            group,
            collectives,
            messages,
            input,
            output,
            peer,
            timeout_ms,
            thread,
            created: now,
            started: if starts { now } else { 0 },
            completed: 0,
            retired: 0,
        }
    }

    #[inline]
    pub(super) fn encode(&self) -> Words {
        let dtype = self.dtype.map_or(NO_DTYPE, DType::code);
        let flags = if self.has_site { HAS_SITE } else { 0 };
        let what = u32::from_le_bytes([self.kind as u8, dtype, flags, self.reduction]);
        let mut words = [0; WORDS];
        words[0] = u64::from(what) | u64::from(self.group) << 32;
        words[1] = self.collectives;
        words[2] = self.messages;
        words[3] = u64::from(self.thread) | u64::from(self.peer.map_or(NO_PEER, |peer| peer as u32)) << 32;
        words[4] = self.created;
        words[STARTED] = self.started;
        words[COMPLETED] = self.completed;
        words[RETIRED] = self.retired;
        words[8] = self.timeout_ms;
        words[9] = u64::from(self.input.encode()) | u64::from(self.output.encode()) << 32;
        words[10] = self.input.elements;
        words[11] = self.output.elements;
        words
    }

    /// Nothing if no record was encoded so.
    pub(super) fn decode(words: &Words) -> Option<Self> {
        let [kind, dtype, flags, reduction, ..] = words[0].to_le_bytes();
        let peer = (words[3] >> 32) as u32;
        Some(Record {
            kind: OpKind::from_code(kind)?,
            dtype: if dtype == NO_DTYPE { None } else { Some(DType::from_code(dtype)?) },
            reduction,
            has_site: flags & HAS_SITE != 0,
            group: (words[0] >> 32) as u32,
            collectives: words[1],
            messages: words[2],
            thread: words[3] as u32,
            peer: (peer != NO_PEER).then_some(peer as Rank),
            created: words[4],
            started: words[STARTED],
            completed: words[COMPLETED],
            retired: words[RETIRED],
            timeout_ms: words[8],
            input: Sizes::decode(words[9] as u32, words[10]),
            output: Sizes::decode((words[9] >> 32) as u32, words[11]),
        })
    }

    pub(super) fn state(&self) -> State {
        match (self.started, self.completed) {
            (_, 1..) => State::Completed,
            (1.., 0) => State::Started,
            (0, 0) => State::Scheduled,
        }
    }

    pub(super) fn is_message(&self) -> bool {
        self.kind.is_message()
    }

    pub(super) fn reduce_op(&self) -> Option<&'static str> {
        reduction_name(self.reduction)
    }

    pub(super) fn root(&self) -> Option<Rank> {
        self.peer.filter(|_| !self.is_message())
    }

    pub(super) fn input_lengths(&self) -> Vec<u64> {
        self.input.lengths()
    }

    pub(super) fn output_lengths(&self) -> Vec<u64> {
        self.output.lengths()
    }

    /// As c10d's tools know it: `tenfold:all_reduce`, `tenfold:send 0->1`.
    pub(super) fn profiling_name(&self, rank: Rank) -> String {
        let name = c10d_name(self.kind);
        match (self.kind, self.peer) {
            (OpKind::Send, Some(to)) => format!("tenfold:{name} {rank}->{to}"),
            (OpKind::Recv | OpKind::RecvAnySource, Some(from)) => format!("tenfold:{name} {rank}<-{from}"),
            (OpKind::Recv | OpKind::RecvAnySource, None) => format!("tenfold:{name} {rank}<-?"),
            _ => format!("tenfold:{name}"),
        }
    }
}

/// What c10d's recorder calls an operation, which is what its analyser understands.
pub(crate) fn c10d_name(kind: OpKind) -> &'static str {
    match kind {
        OpKind::AllReduceCoalesced => "allreduce_coalesced",
        OpKind::AllGatherInto => "_all_gather_base",
        OpKind::AllGatherCoalesced => "allgather_coalesced",
        OpKind::ReduceScatterInto => "_reduce_scatter_base",
        OpKind::AllReduceSparse => "all_reduce",
        OpKind::RecvAnySource => "recv",
        OpKind::MonitoredBarrier => "barrier",
        other => other.name(),
    }
}

/// The name that PyTorch's recorder has for a dtype.
pub(super) fn dtype_name(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "Float",
        DType::F64 => "Double",
        DType::F16 => "Half",
        DType::BF16 => "BFloat16",
        DType::F8E4M3FN => "Float8_e4m3fn",
        DType::F8E5M2 => "Float8_e5m2",
        DType::F8E4M3FNUZ => "Float8_e4m3fnuz",
        DType::F8E5M2FNUZ => "Float8_e5m2fnuz",
        DType::I8 => "Char",
        DType::U8 => "Byte",
        DType::I16 => "Short",
        DType::U16 => "UInt16",
        DType::I32 => "Int",
        DType::U32 => "UInt32",
        DType::I64 => "Long",
        DType::U64 => "UInt64",
        DType::Bool => "Bool",
        DType::Complex64 => "ComplexFloat",
        DType::Complex128 => "ComplexDouble",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sizes() -> impl Strategy<Value = Sizes> {
        (0_u32..1 << 20, any::<u64>(), any::<bool>()).prop_map(|(tensors, elements, alike)| Sizes {
            tensors,
            elements,
            alike,
        })
    }

    proptest! {
        #[test]
        fn a_record_survives_its_words(
            (kind, dtype) in (0..OpKind::ALL.len(), proptest::option::of(0..DType::ALL.len())),
            (group, thread, has_site, reduction) in any::<(u32, u32, bool, u8)>(),
            (collectives, messages, timeout_ms) in any::<(u64, u64, u64)>(),
            (created, started, completed, retired) in any::<(u64, u64, u64, u64)>(),
            (input, output) in (sizes(), sizes()),
            peer in proptest::option::of(0_usize..1 << 31),
        ) {
            let (kind, dtype) = (OpKind::ALL[kind], dtype.map(|index| DType::ALL[index]));
            let record = Record {
                kind, dtype, reduction, has_site, group, collectives, messages, input, output, peer, timeout_ms, thread,
                created, started, completed, retired,
            };
            prop_assert_eq!(Record::decode(&record.encode()), Some(record));
        }
    }

    #[test]
    fn lengths_are_exact_where_they_are_alike_and_a_sum_where_not() {
        assert_eq!(Sizes::of([3, 3, 3].into_iter()).lengths(), [3, 3, 3]);
        assert_eq!(Sizes::of([3, 4].into_iter()).lengths(), [7]);
        assert_eq!(Sizes::of([].into_iter()), Sizes::NONE);
        assert_eq!((Sizes::of([2, 2].into_iter()).total(), Sizes::of([2, 5].into_iter()).total()), (4, 7));
    }
}
