//! The only arithmetic: several chunks of elements become one.
//!
//! A [`Reduction`] is prepared once per collective: it looks up which kernel computes its operation on its dtype with
//! the best instructions this processor has, and keeps the pointer. [`Reduction::combine`] then combines any number of
//! sources in one pass: it reads each byte once and writes each byte once.
//!
//! Ranks must end with the same bits, whatever processors they have and wherever a piece was cut. So in every kernel an
//! element is computed by itself, in the order of the sources, with each step rounded, and a NaN that comes out is
//! always the same NaN (processors disagree about its sign and payload). Floats narrower than 32 bits are computed in f32
//! and rounded once per `combine`.
//!
//! Memory is read and written through raw pointers of any alignment: another process may map it too.
//!
//! - `storage`: what the bytes of a dtype are, and what they are computed in; `avx2`: the same by hand
//! - `operation`: sum, product, …, of two such values
//! - `kernel`: the loops
//! - `level`: the same loops for each instruction set, and which of them an operation takes

#[cfg(target_arch = "x86_64")]
mod avx2;
mod kernel;
mod level;
mod operation;
mod storage;

use std::fmt;

pub use self::level::Level;

use self::kernel::{Combine, Prepare, Scale};
use crate::dtype::DType;
use crate::reduce_op::{CustomOp, ReduceOp, Unsupported, supports};
use crate::span::{Bytes, Span};

/// An operation on a dtype, ready to run.
///
/// ```
/// use tenfold_memory::{Bytes, DType, ReduceOp, Reduction, Span};
///
/// let average = Reduction::new(&ReduceOp::Avg, DType::F32, 2).unwrap();
/// let (mut mine, theirs) = (1.0f32.to_ne_bytes(), 4.0f32.to_ne_bytes());
/// let target = Span::of(&mut mine);
/// average.combine(target, &[target.bytes(), Bytes::of(&theirs)], true);
/// assert_eq!(f32::from_ne_bytes(mine), 2.5);
/// ```
#[derive(Clone)]
pub struct Reduction {
    dtype: DType,
    how: How,
    /// What AVG does at the end.
    finish: Scale,
    /// What PREMUL_SUM does at the beginning.
    preparation: Option<(Prepare, f64)>,
}

#[derive(Clone)]
enum How {
    BuiltIn(Combine),
    Custom(CustomOp),
}

impl Reduction {
    /// For `ranks` ranks in all, which is what AVG divides by.
    pub fn new(op: &ReduceOp, dtype: DType, ranks: usize) -> Result<Reduction, Unsupported> {
        Reduction::prepared(op, dtype, ranks, Level::best())
    }

    /// With the instructions of a given level, so that tests and measurements can compare them.
    ///
    /// # Panics
    /// If this processor does not have them.
    pub fn with_level(
        op: &ReduceOp,
        dtype: DType,
        ranks: usize,
        level: Level,
    ) -> Result<Reduction, Unsupported> {
        assert!(level.is_available(), "this processor has no {level:?}");
        Reduction::prepared(op, dtype, ranks, level)
    }

    /// The processor has `level`.
    fn prepared(op: &ReduceOp, dtype: DType, ranks: usize, level: Level) -> Result<Reduction, Unsupported> {
        assert!(ranks > 0, "a reduction has ranks");
        let unsupported = || Unsupported { op: op.clone(), dtype };
        if !supports(op, dtype) {
            return Err(unsupported());
        }
        let (how, prepare) = match op {
            ReduceOp::Custom(custom) => (How::Custom(custom.clone()), None),
            _ => {
                let (combine, prepare) = level.kernels(op, dtype).ok_or_else(unsupported)?;
                (How::BuiltIn(combine), prepare)
            }
        };
        let finish = if *op == ReduceOp::Avg { Scale::divide(ranks) } else { Scale::Keep };
        let factor = if let ReduceOp::PremulSum(factor) = op { Some(*factor) } else { None };
        Ok(Reduction { dtype, how, finish, preparation: prepare.zip(factor) })
    }

    /// `target = sources[0] op sources[1] op …`, in that order. With `finish`, also what the operation does at the very
    /// end: AVG divides.
    ///
    /// The target may be one of the sources, or apart from all of them.
    ///
    /// # Panics
    /// If there is no source, or one is not as long as the target, or that is not a whole number of elements.
    #[inline]
    pub fn combine(&self, target: Span<'_>, sources: &[Bytes<'_>], finish: bool) {
        let bytes = target.len();
        assert!(bytes & (self.dtype.size() - 1) == 0, "{bytes} bytes are not a multiple of {}", self.dtype);
        for source in sources {
            assert!(source.len() == bytes, "{} bytes combined into {bytes}", source.len());
        }
        let scale = if finish { self.finish } else { Scale::Keep };
        match (sources, &self.how) {
            ([], _) => panic!("nothing to combine"),
            ([only], _) if scale == Scale::Keep => target.copy_from(*only),
            (_, How::BuiltIn(combine)) => {
                // SAFETY: all are `bytes` long and valid for it, as spans are; the level is one the processor has
                // (`best`, or asserted by `with_level`).
                unsafe { combine(target.start(), sources, bytes, scale) }
            }
            (_, How::Custom(custom)) => combine_custom(custom, self.dtype, target, sources),
        }
    }

    /// What a rank does to its own elements before anything is combined. PREMUL_SUM multiplies with its factor, all
    /// others copy.
    ///
    /// # Panics
    /// If the lengths differ or are not a multiple of the element's size.
    pub fn prepare(&self, target: Span<'_>, source: Bytes<'_>) {
        let bytes = target.len();
        assert!(bytes & (self.dtype.size() - 1) == 0, "{bytes} bytes are not a multiple of {}", self.dtype);
        assert!(source.len() == bytes, "{} bytes prepared into {bytes}", source.len());
        match self.preparation {
            Some((prepare, factor)) => {
                // SAFETY: both are `bytes` long and valid for it; the level is one the processor has (asserted by
                // `with_level`).
                unsafe { prepare(target.start(), source.start(), bytes, factor) }
            }
            _ if source.start() == target.start().cast_const() => {}
            _ => target.copy_from(source),
        }
    }

    /// The same reduction for a plan that rounds partial sums: these can overflow although the average does not. So AVG then
    /// multiplies every element first, instead of dividing at the end. None where nothing can overflow in between.
    pub fn scaling_first(&self) -> Option<Reduction> {
        let factor = match self.finish {
            Scale::Keep => return None,
            Scale::Multiply(factor) => factor,
            Scale::Divide(divisor) => 1.0 / divisor,
        };
        // The sum of two elements is rounded only after it was divided.
        let may_overflow = self.dtype.has_narrow_range() && factor < 0.5;
        let scaled = || Reduction::new(&ReduceOp::PremulSum(factor), self.dtype, 1).ok();
        may_overflow.then(scaled).flatten()
    }

    /// Can [`Reduction::prepare`] be more than a copy, for this reduction or for [`Reduction::scaling_first`]?
    #[inline]
    pub fn may_need_preparation(&self) -> bool {
        self.preparation.is_some() || self.finish != Scale::Keep && self.dtype.has_narrow_range()
    }

    /// Whether [`Reduction::prepare`] is more than a copy.
    pub fn needs_preparation(&self) -> bool {
        self.preparation.is_some()
    }

    /// Whether elements must be combined in the order of the ranks. A custom function may depend on the order.
    pub fn must_keep_order(&self) -> bool {
        matches!(self.how, How::Custom(_))
    }
}

impl fmt::Debug for Reduction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("Reduction");
        shown
            .field("dtype", &self.dtype)
            .field("finish", &self.finish)
            .field("factor", &self.preparation.map(|(_, factor)| factor));
        if let How::Custom(custom) = &self.how {
            shown.field("custom", custom);
        }
        shown.finish_non_exhaustive()
    }
}

/// Bytes that a custom function gets per call: large enough to make the call cheap, small enough for the L2 cache.
const CUSTOM_PIECE: usize = 64 * 1024;
const _: () = assert!(CUSTOM_PIECE.is_multiple_of(DType::Complex128.size()));

/// Copies pieces into private memory: the function gets plain slices, which memory that others map must never be.
fn combine_custom(op: &CustomOp, dtype: DType, target: Span<'_>, sources: &[Bytes<'_>]) {
    let (first, others) = sources.split_first().expect("`combine` refuses to combine nothing");
    let piece_max = CUSTOM_PIECE.min(target.len());
    let mut accumulator = Scratch::new(piece_max);
    let mut next = Scratch::new(piece_max);
    let mut from = 0;
    while from < target.len() {
        let to = target.len().min(from + CUSTOM_PIECE);
        accumulator.fill(first.part(from, to));
        for other in others {
            next.fill(other.part(from, to));
            op.apply(accumulator.bytes(to - from), next.bytes(to - from), dtype);
        }
        target.part(from, to).copy_from(Bytes::of(accumulator.bytes(to - from)));
        from = to;
    }
}

/// Bytes that are aligned for elements of any dtype.
struct Scratch(Vec<u128>);

impl Scratch {
    fn new(bytes: usize) -> Scratch {
        Scratch(vec![0; bytes.div_ceil(size_of::<u128>())])
    }

    fn bytes(&mut self, len: usize) -> &mut [u8] {
        let all = size_of_val(self.0.as_slice());
        // SAFETY: a `u128` is sixteen bytes without padding, and the borrow of `self` covers all of them.
        let bytes = unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast::<u8>(), all) };
        &mut bytes[..len]
    }

    fn fill(&mut self, source: Bytes<'_>) {
        Span::of(self.bytes(source.len())).copy_from(source);
    }
}
