//! The kernels for each instruction set, and which of them an operation on a dtype takes.
//!
//! A level is the same source compiled with more of the processor's features, so levels differ in speed only. On other
//! processors than x86-64 there is one level: what the compiler may use anyway, which on aarch64 is NEON.

use std::sync::OnceLock;

use num_complex::Complex;

use super::kernel::{self, Combine, Prepare, Scale};
use super::operation::{Band, Bor, Bxor, Max, Min, Operation, Product, Sum};
use super::storage::{BFloat16, Float, Float8, HalfByArithmetic, Plain, Storage, Truth};
use crate::dtype::DType;
use crate::float8::{F8E4M3FN, F8E4M3FNUZ, F8E5M2, F8E5M2FNUZ};
use crate::reduce_op::ReduceOp;
use crate::span::Bytes;

/// The instructions that kernels use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// What every processor of the architecture has: SSE2, NEON.
    Plain,
    /// x86-64 with AVX2 and F16C.
    Avx2,
    /// x86-64 with the AVX-512 of a Skylake server or a Zen 4.
    Avx512,
}

impl Level {
    pub const ALL: [Level; 3] = [Level::Plain, Level::Avx2, Level::Avx512];

    /// The highest level of this processor; found out once.
    pub fn best() -> Level {
        static BEST: OnceLock<Level> = OnceLock::new();
        *BEST.get_or_init(|| {
            Level::ALL.into_iter().rfind(|level| level.is_available()).expect("`Plain` always is")
        })
    }

    /// Whether this processor has it.
    pub fn is_available(self) -> bool {
        match self {
            Level::Plain => true,
            // Miri knows few vector instructions.
            #[cfg(all(target_arch = "x86_64", not(miri)))]
            Level::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c"),
            #[cfg(all(target_arch = "x86_64", not(miri)))]
            Level::Avx512 => {
                Level::Avx2.is_available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
            #[cfg(not(all(target_arch = "x86_64", not(miri))))]
            Level::Avx2 | Level::Avx512 => false,
        }
    }

    /// `None` where `supports` says no.
    pub(super) fn kernels(self, op: &ReduceOp, dtype: DType) -> Option<(Combine, Prepare)> {
        match self {
            Level::Plain => choose::<Baseline>(op, dtype),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => choose::<Avx2>(op, dtype),
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => choose::<Avx512>(op, dtype),
            #[cfg(not(target_arch = "x86_64"))]
            Level::Avx2 | Level::Avx512 => None,
        }
    }
}

/// Compiles kernels for one level.
trait Instructions {
    /// How float16 is converted.
    type Half: Storage<Stored = u16, Wide = f32>;

    fn combine<S: Storage, O: Operation<S::Wide>>() -> Combine;
    fn prepare<S: Storage, O: Operation<S::Wide>>() -> Prepare;
}

macro_rules! instructions {
    ($(#[$when:meta])* $name:ident, $half:ty $(, $features:literal)?) => {
        $(#[$when])*
        struct $name;

        $(#[$when])*
        impl Instructions for $name {
            type Half = $half;

            fn combine<S: Storage, O: Operation<S::Wide>>() -> Combine {
                /// # Safety
                /// As for [`Combine`].
                $(#[target_feature(enable = $features)])?
                unsafe fn compiled<S: Storage, O: Operation<S::Wide>>(
                    target: *mut u8,
                    sources: &[Bytes<'_>],
                    bytes: usize,
                    scale: Scale,
                ) {
                    // SAFETY: passed on as it is.
                    unsafe { kernel::combine::<S, O>(target, sources, bytes, scale) }
                }
                compiled::<S, O>
            }

            fn prepare<S: Storage, O: Operation<S::Wide>>() -> Prepare {
                /// # Safety
                /// As for [`Prepare`].
                $(#[target_feature(enable = $features)])?
                unsafe fn compiled<S: Storage, O: Operation<S::Wide>>(
                    target: *mut u8,
                    source: *const u8,
                    bytes: usize,
                    factor: f64,
                ) {
                    // SAFETY: passed on as it is.
                    unsafe { kernel::prepare::<S, O>(target, source, bytes, factor) }
                }
                compiled::<S, O>
            }
        }
    };
}

instructions!(Baseline, HalfByArithmetic);
instructions!(
    #[cfg(target_arch = "x86_64")]
    Avx2,
    super::storage::HalfByF16c,
    "avx2,f16c"
);
instructions!(
    #[cfg(target_arch = "x86_64")]
    Avx512,
    super::storage::HalfByF16c,
    "avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl"
);

type Kernels = Option<(Combine, Prepare)>;

fn choose<I: Instructions>(op: &ReduceOp, dtype: DType) -> Kernels {
    match dtype {
        DType::F32 => float::<I, Float<f32>>(op),
        DType::F64 => float::<I, Float<f64>>(op),
        DType::F16 => float::<I, I::Half>(op),
        DType::BF16 => float::<I, BFloat16>(op),
        DType::F8E4M3FN => float::<I, Float8<F8E4M3FN>>(op),
        DType::F8E5M2 => float::<I, Float8<F8E5M2>>(op),
        DType::F8E4M3FNUZ => float::<I, Float8<F8E4M3FNUZ>>(op),
        DType::F8E5M2FNUZ => float::<I, Float8<F8E5M2FNUZ>>(op),
        DType::I8 => integer::<I, i8, u8>(op),
        DType::U8 => integer::<I, u8, u8>(op),
        DType::I16 => integer::<I, i16, u16>(op),
        DType::U16 => integer::<I, u16, u16>(op),
        DType::I32 => integer::<I, i32, u32>(op),
        DType::U32 => integer::<I, u32, u32>(op),
        DType::I64 => integer::<I, i64, u64>(op),
        DType::U64 => integer::<I, u64, u64>(op),
        DType::Bool => truth::<I>(op),
        DType::Complex64 => complex::<I, f32>(op),
        DType::Complex128 => complex::<I, f64>(op),
    }
}

fn kernels<I: Instructions, S: Storage, O: Operation<S::Wide>>() -> Kernels {
    Some((I::combine::<S, O>(), I::prepare::<S, O>()))
}

fn float<I: Instructions, S: Storage>(op: &ReduceOp) -> Kernels
where
    Sum: Operation<S::Wide>,
    Product: Operation<S::Wide>,
    Min: Operation<S::Wide>,
    Max: Operation<S::Wide>,
{
    match op {
        ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PremulSum(_) => kernels::<I, S, Sum>(),
        ReduceOp::Product => kernels::<I, S, Product>(),
        ReduceOp::Min => kernels::<I, S, Min>(),
        ReduceOp::Max => kernels::<I, S, Max>(),
        _ => None,
    }
}

/// `T` is the dtype's own type, `U` the unsigned one as wide: sums and products that wrap are the same bits for both.
/// And bits combine as well a byte at a time.
fn integer<I: Instructions, T: Copy, U: Copy>(op: &ReduceOp) -> Kernels
where
    Sum: Operation<U>,
    Product: Operation<U>,
    Min: Operation<T>,
    Max: Operation<T>,
{
    match op {
        ReduceOp::Sum => kernels::<I, Plain<U>, Sum>(),
        ReduceOp::Product => kernels::<I, Plain<U>, Product>(),
        ReduceOp::Min => kernels::<I, Plain<T>, Min>(),
        ReduceOp::Max => kernels::<I, Plain<T>, Max>(),
        ReduceOp::Band => kernels::<I, Plain<u8>, Band>(),
        ReduceOp::Bor => kernels::<I, Plain<u8>, Bor>(),
        ReduceOp::Bxor => kernels::<I, Plain<u8>, Bxor>(),
        _ => None,
    }
}

fn truth<I: Instructions>(op: &ReduceOp) -> Kernels {
    match op {
        ReduceOp::Sum | ReduceOp::Max | ReduceOp::Bor => kernels::<I, Truth, Bor>(),
        ReduceOp::Product | ReduceOp::Min | ReduceOp::Band => kernels::<I, Truth, Band>(),
        ReduceOp::Bxor => kernels::<I, Truth, Bxor>(),
        _ => None,
    }
}

/// All but products treat the real and the imaginary part alike.
fn complex<I: Instructions, T: Copy>(op: &ReduceOp) -> Kernels
where
    Float<T>: Storage<Wide = T>,
    Float<Complex<T>>: Storage<Wide = Complex<T>>,
    Sum: Operation<T>,
    Product: Operation<Complex<T>>,
{
    match op {
        ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PremulSum(_) => kernels::<I, Float<T>, Sum>(),
        ReduceOp::Product => kernels::<I, Float<Complex<T>>, Product>(),
        _ => None,
    }
}
