//! What a rank called, in 24 bytes that travel with every message.
//!
//! Two ranks are in the same operation if their labels are equal. A message whose label differs from the reader's is not
//! read: both sides then tell what they called (see `comparison`).
//!
//! At debug level DETAIL a label also has a hash of the tensors' shapes, in bits that are zero otherwise. Ranks may run at
//! different levels, so a label without one is equal to any that says the same otherwise ([`is_same_call`]).
//!
//! A collective's label also has a number made of the roots of all calls before it. A rank that got its data from a root that
//! meant the same has finished that call, even if another rank named another root; but then no later call that needs both
//! ranks can succeed, whichever ranks exchange messages in it.

use std::fmt;

use tenfold_memory::{DType, Head, ReduceOp};
use tenfold_plan::Rank;

/// The operations of c10d, with c10d's numbers, and ours, with numbers above 100.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
#[non_exhaustive]
pub enum OpKind {
    /// [`Call::Broadcast`](crate::Call::Broadcast), or of several tensors.
    Broadcast = 0,
    /// [`Call::AllReduce`](crate::Call::AllReduce), or of several tensors.
    AllReduce = 1,
    /// [`Call::AllReduceCoalesced`](crate::Call::AllReduceCoalesced).
    AllReduceCoalesced = 2,
    /// [`Call::Reduce`](crate::Call::Reduce).
    Reduce = 3,
    /// [`Call::AllGather`](crate::Call::AllGather).
    AllGather = 4,
    /// [`Call::AllGatherInto`](crate::Call::AllGatherInto).
    AllGatherInto = 5,
    /// [`Call::AllGatherCoalesced`](crate::Call::AllGatherCoalesced).
    AllGatherCoalesced = 6,
    /// [`Call::Gather`](crate::Call::Gather) or [`Call::GatherInto`](crate::Call::GatherInto).
    Gather = 7,
    /// [`Call::Scatter`](crate::Call::Scatter) or [`Call::ScatterFrom`](crate::Call::ScatterFrom).
    Scatter = 8,
    /// [`Call::ReduceScatter`](crate::Call::ReduceScatter).
    ReduceScatter = 9,
    /// [`Call::AllToAllSingle`](crate::Call::AllToAllSingle).
    AllToAllSingle = 10,
    /// [`Call::AllToAll`](crate::Call::AllToAll).
    AllToAll = 11,
    /// [`Call::Send`](crate::Call::Send).
    Send = 12,
    /// [`Call::Recv`](crate::Call::Recv).
    Recv = 13,
    /// [`Call::RecvAny`](crate::Call::RecvAny).
    RecvAnySource = 14,
    /// [`Call::Barrier`](crate::Call::Barrier).
    Barrier = 15,
    /// [`Call::ReduceScatterInto`](crate::Call::ReduceScatterInto).
    ReduceScatterInto = 16,
    /// [`Group::coalesce`](crate::Group::coalesce).
    Coalesced = 17,
    /// [`Group::all_reduce_sparse`](crate::Group::all_reduce_sparse).
    AllReduceSparse = 18,
    /// [`Call::ReduceScatterIntoCoalesced`](crate::Call::ReduceScatterIntoCoalesced).
    ReduceScatterIntoCoalesced = 19,
    /// [`Call::AllGatherIntoCoalesced`](crate::Call::AllGatherIntoCoalesced).
    AllGatherIntoCoalesced = 20,
    /// [`Group::monitored_barrier`](crate::Group::monitored_barrier).
    MonitoredBarrier = 101,
    /// Making a group of ranks of another one.
    Split = 102,
    /// [`Group::connect`](crate::Group::connect).
    Connect = 103,
    /// [`Group::register`](crate::Group::register).
    Register = 104,
    /// A call of a [`Reducer`](crate::ddp::Reducer).
    Ddp = 105,
    /// [`Call::Scan`](crate::Call::Scan).
    Scan = 106,
    /// [`Group::shrink`](crate::Group::shrink).
    Shrink = 107,
    /// [`Group::agree`](crate::Group::agree).
    Agree = 108,
    /// [`Group::reconfigure`](crate::Group::reconfigure).
    Reconfigure = 109,
    /// [`Group::hand_over`](crate::Group::hand_over).
    HandOver = 110,
}

impl OpKind {
    /// Every kind.
    pub const ALL: [OpKind; 31] = [
        OpKind::Broadcast,
        OpKind::AllReduce,
        OpKind::AllReduceCoalesced,
        OpKind::Reduce,
        OpKind::AllGather,
        OpKind::AllGatherInto,
        OpKind::AllGatherCoalesced,
        OpKind::Gather,
        OpKind::Scatter,
        OpKind::ReduceScatter,
        OpKind::AllToAllSingle,
        OpKind::AllToAll,
        OpKind::Send,
        OpKind::Recv,
        OpKind::RecvAnySource,
        OpKind::Barrier,
        OpKind::ReduceScatterInto,
        OpKind::Coalesced,
        OpKind::AllReduceSparse,
        OpKind::ReduceScatterIntoCoalesced,
        OpKind::AllGatherIntoCoalesced,
        OpKind::MonitoredBarrier,
        OpKind::Split,
        OpKind::Connect,
        OpKind::Register,
        OpKind::Ddp,
        OpKind::Scan,
        OpKind::Shrink,
        OpKind::Agree,
        OpKind::Reconfigure,
        OpKind::HandOver,
    ];

    /// As the Rust method is called.
    pub const fn name(self) -> &'static str {
        match self {
            OpKind::Broadcast => "broadcast",
            OpKind::AllReduce => "all_reduce",
            OpKind::AllReduceCoalesced => "all_reduce_coalesced",
            OpKind::Reduce => "reduce",
            OpKind::AllGather => "all_gather",
            OpKind::AllGatherInto => "all_gather_into",
            OpKind::AllGatherCoalesced => "all_gather_coalesced",
            OpKind::Gather => "gather",
            OpKind::Scatter => "scatter",
            OpKind::ReduceScatter => "reduce_scatter",
            OpKind::AllToAllSingle => "all_to_all_single",
            OpKind::AllToAll => "all_to_all",
            OpKind::Send => "send",
            OpKind::Recv => "recv",
            OpKind::RecvAnySource => "recv_any_source",
            OpKind::Barrier => "barrier",
            OpKind::ReduceScatterInto => "reduce_scatter_into",
            OpKind::Coalesced => "coalesced",
            OpKind::AllReduceSparse => "all_reduce_sparse",
            OpKind::ReduceScatterIntoCoalesced => "reduce_scatter_into_coalesced",
            OpKind::AllGatherIntoCoalesced => "all_gather_into_coalesced",
            OpKind::MonitoredBarrier => "monitored_barrier",
            OpKind::Split => "split",
            OpKind::Connect => "connect",
            OpKind::Register => "register",
            OpKind::Ddp => "ddp",
            OpKind::Scan => "scan",
            OpKind::Shrink => "shrink",
            OpKind::Agree => "agree",
            OpKind::Reconfigure => "reconfigure",
            OpKind::HandOver => "hand_over",
        }
    }

    /// From one rank to one other?
    #[inline]
    pub(crate) fn is_message(self) -> bool {
        matches!(self, OpKind::Send | OpKind::Recv | OpKind::RecvAnySource)
    }

    pub(crate) fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| *kind as u8 == code)
    }
}

impl fmt::Display for OpKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// No root, no tag.
const NONE: u32 = u32::MAX;

/// Code of "no reduction".
const NO_REDUCTION: u8 = 255;

/// What was called: enough to tell two calls apart, and to say how they differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Label {
    /// Which operation.
    pub kind: OpKind,
    /// The type of its elements, if it has any.
    pub dtype: Option<DType>,
    /// c10d's number of the reduce operation.
    reduction: u8,
    /// Root of a rooted collective, tag of a point-to-point message.
    root_or_tag: u32,
    /// Which call of the group it is, counted from 1; of a message of its link for point-to-point.
    pub seq: u64,
    /// Elements; 0 where ranks may differ (all_to_all with splits).
    pub count: u64,
    /// What [`Label::shape`] made of the shapes; 0 if they are not known.
    shape: u32,
    /// The roots of the calls before; see [`Roots`].
    roots: u32,
}

/// A number made of the roots of all calls so far: equal on ranks that named the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Roots(u32);

impl Roots {
    /// Another collective was called: its label gets what came before.
    #[inline]
    pub(crate) fn follow(&mut self, label: &mut Label) {
        let is_rooted = label.root_of().is_some();
        label.roots = self.0 & if is_rooted { ROOTS_BESIDE_ROOT } else { ROOTS_ALONE };
        if is_rooted {
            let mixed = (self.0 ^ label.root_or_tag.wrapping_add(1)).wrapping_mul(0x9e37_79b1);
            self.0 = mixed ^ mixed >> 15;
        }
    }
}

/// In the half word of the root: set if there is none, and all other bits are of the roots before.
const ROOTLESS: u32 = 1 << 31;
const ROOTS_ALONE: u32 = ROOTLESS - 1;

/// Bits of a root, and of the roots before it, which are above.
const ROOT_BITS: u32 = 20;
const ROOTS_BESIDE_ROOT: u32 = (1 << (31 - ROOT_BITS)) - 1;

/// Where the shape's hash begins in the word of the count, which has room for it: no tensor has 2^48 elements.
const COUNT_BITS: u32 = 48;

/// Where it begins in the first word: eight bits that are not all zero.
const SHAPE_START: u32 = 24;

impl Label {
    pub(crate) fn new(kind: OpKind, seq: u64) -> Self {
        Label {
            kind,
            dtype: None,
            reduction: NO_REDUCTION,
            root_or_tag: NONE,
            seq,
            count: 0,
            shape: 0,
            roots: 0,
        }
    }

    #[must_use]
    pub(crate) fn elements(mut self, dtype: DType, count: usize) -> Self {
        (self.dtype, self.count) = (Some(dtype), count as u64);
        self
    }

    #[must_use]
    pub(crate) fn reduction(mut self, op: &ReduceOp) -> Self {
        self.reduction = op.code();
        self
    }

    #[must_use]
    pub(crate) fn root(mut self, root: Rank) -> Self {
        self.root_or_tag = root as u32;
        self
    }

    #[must_use]
    pub(crate) fn tag(mut self, tag: u32) -> Self {
        self.root_or_tag = tag;
        self
    }

    /// Has all ranks agree about a number made of their shapes.
    #[must_use]
    pub(crate) fn shape(mut self, hash: u64) -> Self {
        // 24 bits, of which the lower eight say that there is something.
        let folded = (hash ^ hash >> 32) as u32;
        if self.count >> COUNT_BITS == 0 {
            self.shape = (folded & 0xff_ff00) | (folded % 255 + 1);
        }
        self
    }

    pub(crate) fn tag_of(&self) -> u32 {
        self.root_or_tag
    }

    /// The root of a rooted collective.
    #[inline]
    pub(crate) fn root_of(&self) -> Option<Rank> {
        (self.root_or_tag != NONE && !self.kind.is_message()).then_some(self.root_or_tag as Rank)
    }

    /// The code of its reduce operation; [`reduction_name`] reads it.
    #[inline]
    pub(crate) fn reduction_code(&self) -> u8 {
        self.reduction
    }

    /// As it travels.
    #[inline]
    pub(crate) fn head(&self) -> Head {
        let dtype = self.dtype.map_or(NO_REDUCTION, DType::code);
        let first =
            u64::from_le_bytes([self.kind as u8, dtype, self.reduction, self.shape as u8, 0, 0, 0, 0]);
        let count = self.count | u64::from(self.shape >> 8) << COUNT_BITS;
        let root_or_tag = match self.root_or_tag {
            tag if self.kind.is_message() => tag,
            NONE => ROOTLESS | self.roots,
            root => root | self.roots << ROOT_BITS,
        };
        [first | u64::from(root_or_tag) << 32, self.seq, count]
    }

    /// The label that a head describes; `None` if the head is invalid.
    pub(crate) fn from_head(head: &Head) -> Option<Self> {
        let [kind, dtype, reduction, ..] = head[0].to_le_bytes();
        let dtype = if dtype == NO_REDUCTION { None } else { Some(DType::from_code(dtype)?) };
        let kind = OpKind::from_code(kind)?;
        let (root_or_tag, roots) = match (head[0] >> 32) as u32 {
            tag if kind.is_message() => (tag, 0),
            word if word & ROOTLESS != 0 => (NONE, word & ROOTS_ALONE),
            word => (word & ((1 << ROOT_BITS) - 1), word >> ROOT_BITS),
        };
        let (shape, count) = match shape_of(head) {
            0 => (0, head[2]),
            shape => (shape, head[2] & ((1 << COUNT_BITS) - 1)),
        };
        Some(Label { kind, dtype, reduction, root_or_tag, seq: head[1], count, shape, roots })
    }
}

/// The hash in a head; 0 if there is none.
fn shape_of(head: &Head) -> u32 {
    match (head[0] >> SHAPE_START) as u8 {
        0 => 0,
        flag => u32::from(flag) | ((head[2] >> COUNT_BITS) as u32) << 8,
    }
}

/// Are these the same call? Shapes count where both have them.
#[inline]
pub(crate) fn is_same_call(one: &Head, other: &Head) -> bool {
    one == other || is_same_but_for_shape(one, other)
}

#[cold]
fn is_same_but_for_shape(one: &Head, other: &Head) -> bool {
    let bare = |head: &Head| match shape_of(head) {
        0 => *head,
        _ => [head[0] & !(0xff << SHAPE_START), head[1], head[2] & ((1 << COUNT_BITS) - 1)],
    };
    (shape_of(one) == 0 || shape_of(other) == 0) && bare(one) == bare(other)
}

/// Are these the same call, made by ranks that named different roots before it?
pub(crate) fn differ_in_earlier_roots(one: &Head, other: &Head) -> bool {
    let (Some(mut one), Some(other)) = (Label::from_head(one), Label::from_head(other)) else { return false };
    if one.roots == other.roots {
        return false;
    }
    one.roots = other.roots;
    is_same_call(&one.head(), &other.head())
}

/// Nothing if there is no reduction.
pub(crate) fn reduction_name(code: u8) -> Option<&'static str> {
    const NAMES: [&str; 9] = ["sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum"];
    (code != NO_REDUCTION).then(|| *NAMES.get(usize::from(code)).unwrap_or(&"custom"))
}

/// As in `all_reduce(sum, float32 × 1000)`.
impl fmt::Display for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut facts = Vec::new();
        facts.extend(reduction_name(self.reduction).map(str::to_string));
        if let Some(dtype) = self.dtype {
            facts.push(if self.count == 0 && self.kind == OpKind::AllToAllSingle {
                format!("{dtype}")
            } else {
                format!("{dtype} × {}", self.count)
            });
        }
        match self.kind {
            _ if self.root_or_tag == NONE => {}
            OpKind::Send | OpKind::Recv | OpKind::RecvAnySource => {
                facts.push(format!("tag {}", self.root_or_tag));
            }
            _ => facts.push(format!("root {}", self.root_or_tag)),
        }
        write!(f, "{}", self.kind)?;
        if facts.is_empty() { Ok(()) } else { write!(f, "({})", facts.join(", ")) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_survives_the_journey() {
        for kind in OpKind::ALL {
            let labels = [
                Label::new(kind, 7),
                Label::new(kind, u64::MAX).elements(DType::BF16, 1 << 40).reduction(&ReduceOp::Max).root(63),
            ];
            for label in labels {
                assert_eq!(Label::from_head(&label.head()), Some(label));
            }
        }
    }

    #[test]
    fn a_label_tells_whether_earlier_roots_were_the_same_and_nothing_else_of_them() {
        let reduce =
            |seq| Label::new(OpKind::AllReduce, seq).elements(DType::F32, 5).reduction(&ReduceOp::Sum);
        let calls = |roots: &[usize]| -> Vec<Label> {
            let mut so_far = Roots::default();
            let rooted = |(seq, root): (usize, &usize)| Label::new(OpKind::Broadcast, seq as u64).root(*root);
            let mut labels: Vec<Label> =
                roots.iter().enumerate().map(rooted).chain([reduce(9), reduce(10)]).collect();
            labels.iter_mut().for_each(|label| so_far.follow(label));
            labels
        };
        let usual = calls(&[0, 3, 1]);
        for label in &usual {
            assert_eq!(Label::from_head(&label.head()), Some(*label));
        }
        assert_eq!(usual, calls(&[0, 3, 1]));
        assert_eq!(usual[4].to_string(), "all_reduce(sum, float32 × 5)");
        for other in [&[0, 3, 2][..], &[1, 3, 1], &[3, 0, 1], &[0, 0, 1], &[0, 3]] {
            let other = calls(other);
            let (one, other) = (usual[3].head(), other[other.len() - 2].head());
            assert!(!is_same_call(&one, &other) && differ_in_earlier_roots(&one, &other));
            assert!(!differ_in_earlier_roots(&one, &usual[4].head()), "another call");
        }
        let message = Label::new(OpKind::Send, 1).tag(u32::MAX - 3);
        assert_eq!(Label::from_head(&message.head()), Some(message), "a tag has all bits for itself");
    }

    #[test]
    fn shapes_count_where_both_ranks_have_them() {
        let label = |count| Label::new(OpKind::AllReduce, 7).elements(DType::F32, count).root(1);
        let hashes = (0..1000).map(|hash: u64| hash.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        for hash in hashes.chain([0, u64::MAX, 255, 256]) {
            let shaped = label(6).shape(hash);
            assert_eq!(Label::from_head(&shaped.head()), Some(shaped));
            assert_eq!(shaped.to_string(), label(6).to_string());
            assert!(is_same_call(&shaped.head(), &shaped.head()));
            assert!(is_same_call(&shaped.head(), &label(6).head()), "one rank does not know its shapes");
            assert!(is_same_call(&label(6).head(), &shaped.head()));
            assert!(!is_same_call(&shaped.head(), &label(7).head()), "and yet the count differs");
            assert!(!is_same_call(&shaped.head(), &label(6).root(2).head()));
            assert!(!is_same_call(&shaped.head(), &label(6).shape(hash ^ 0x100).head()));
            assert!(!is_same_call(&shaped.head(), &label(6).shape(hash ^ 0x1).head()));
        }
        let huge = label(1 << 50);
        assert_eq!(huge.shape(5), huge, "no room for it");
    }

    #[test]
    fn what_is_no_label_is_not_read_as_one() {
        assert_eq!(Label::from_head(&[u64::MAX; 3]), None);
        assert_eq!(Label::from_head(&[77, 0, 0]), None, "no such operation");
        assert_eq!(Label::from_head(&[0x6300, 0, 0]), None, "no such dtype");
    }

    #[test]
    fn labels_read_as_calls() {
        let label = Label::new(OpKind::AllReduce, 3).elements(DType::F32, 1000).reduction(&ReduceOp::Sum);
        assert_eq!(label.to_string(), "all_reduce(sum, float32 × 1000)");
        let label = Label::new(OpKind::Broadcast, 3).elements(DType::I64, 5).root(2);
        assert_eq!(label.to_string(), "broadcast(int64 × 5, root 2)");
        assert_eq!(Label::new(OpKind::Barrier, 3).to_string(), "barrier");
        let label = Label::new(OpKind::Send, 1).elements(DType::U8, 9).tag(4);
        assert_eq!(label.to_string(), "send(uint8 × 9, tag 4)");
    }
}
