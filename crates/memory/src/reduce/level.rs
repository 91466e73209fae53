//! The kernels for each instruction set, and which of them an operation on a dtype takes.
//!
//! A level is the same loops compiled with more of the processor's features, around storages that agree to the last
//! bit, so levels differ in speed only. On other processors than x86-64 there is one level: what the compiler may use
//! anyway, which on aarch64 is NEON.

use std::sync::OnceLock;

use num_complex::Complex;

#[cfg(target_arch = "x86_64")]
use super::avx2;
use super::kernel::{self, Combine, Prepare, Scale};
use super::operation::{Band, Bor, Bxor, Max, Min, Numbers, Operation, Product, Sum};
use super::storage::{BFloat16, Float, Float8, Half, Plain, Scalar, Several, Storage, Truth};
use crate::dtype::DType;
use crate::float8::{F8E4M3FN, F8E4M3FNUZ, F8E5M2, F8E5M2FNUZ, Narrow};
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
    /// Every level, the plainest first.
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
    pub(super) fn kernels(self, op: &ReduceOp, dtype: DType) -> Kernels {
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

/// Compiles kernels for one level, with the storages that are best there for floats computed in f32.
trait Instructions {
    type F32: Storage<Wide: Numbers>;
    type F16: Storage<Wide: Numbers>;
    type BF16: Storage<Wide: Numbers>;
    type F8<F: Narrow>: Storage<Wide: Numbers>;

    fn combine<V: Storage, S: Storage, O: Operation<V::Wide> + Operation<S::Wide>>() -> Combine;
    fn prepare<V: Storage<Wide: Numbers>, S: Storage<Wide: Numbers>>() -> Prepare;
}

macro_rules! instructions {
    ($name:ident { $($storages:tt)* } $($features:literal)?) => {
        struct $name;

        impl Instructions for $name {
            $($storages)*

            fn combine<V: Storage, S: Storage, O: Operation<V::Wide> + Operation<S::Wide>>() -> Combine {
                /// # Safety
                /// As for [`Combine`].
                $(#[target_feature(enable = $features)])?
                unsafe fn compiled<V: Storage, S: Storage, O: Operation<V::Wide> + Operation<S::Wide>>(
                    target: *mut u8,
                    sources: &[Bytes<'_>],
                    bytes: usize,
                    scale: Scale,
                ) {
                    // SAFETY: passed on as it is.
                    unsafe { kernel::combine::<V, S, O>(target, sources, bytes, scale) }
                }
                compiled::<V, S, O>
            }

            fn prepare<V: Storage<Wide: Numbers>, S: Storage<Wide: Numbers>>() -> Prepare {
                /// # Safety
                /// As for [`Prepare`].
                $(#[target_feature(enable = $features)])?
                unsafe fn compiled<V: Storage<Wide: Numbers>, S: Storage<Wide: Numbers>>(
                    target: *mut u8,
                    source: *const u8,
                    bytes: usize,
                    factor: f64,
                ) {
                    // SAFETY: passed on as it is. One source has nothing to be summed with.
                    unsafe { kernel::prepare::<V, S, Sum>(target, source, bytes, factor) }
                }
                compiled::<V, S>
            }
        }
    };
}

instructions!(Baseline {
    type F32 = Several<Float<f32>, 8>;
    type F16 = Several<Half, 8>;
    type BF16 = Several<BFloat16, 8>;
    type F8<F: Narrow> = Several<Float8<F>, 8>;
});

#[cfg(target_arch = "x86_64")]
instructions!(Avx2 {
    type F32 = avx2::F32s;
    type F16 = avx2::F16s;
    type BF16 = avx2::BF16s;
    type F8<F: Narrow> = avx2::F8s<F>;
} "avx2,f16c");

#[cfg(target_arch = "x86_64")]
instructions!(Avx512 {
    type F32 = avx2::F32s;
    type F16 = avx2::F16s;
    type BF16 = avx2::BF16s;
    type F8<F: Narrow> = avx2::F8s<F>;
} "avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl");

/// What combines, and what prepares where there is such a thing.
type Kernels = Option<(Combine, Option<Prepare>)>;

fn choose<I: Instructions>(op: &ReduceOp, dtype: DType) -> Kernels {
    match dtype {
        DType::F32 => float::<I, I::F32, Float<f32>>(op),
        DType::F64 => float::<I, Several<Float<f64>, 8>, Float<f64>>(op),
        DType::F16 => float::<I, I::F16, Half>(op),
        DType::BF16 => float::<I, I::BF16, BFloat16>(op),
        DType::F8E4M3FN => float8::<I, F8E4M3FN>(op),
        DType::F8E5M2 => float8::<I, F8E5M2>(op),
        DType::F8E4M3FNUZ => float8::<I, F8E4M3FNUZ>(op),
        DType::F8E5M2FNUZ => float8::<I, F8E5M2FNUZ>(op),
        DType::I8 => integer::<I, i8, u8>(op),
        DType::U8 => integer::<I, u8, u8>(op),
        DType::I16 => integer::<I, i16, u16>(op),
        DType::U16 => integer::<I, u16, u16>(op),
        DType::I32 => integer::<I, i32, u32>(op),
        DType::U32 => integer::<I, u32, u32>(op),
        DType::I64 => integer::<I, i64, u64>(op),
        DType::U64 => integer::<I, u64, u64>(op),
        DType::Bool => truth::<I>(op),
        DType::Complex64 => complex::<I, I::F32, f32>(op),
        DType::Complex128 => complex::<I, Several<Float<f64>, 8>, f64>(op),
    }
}

/// Vectors of `V`, single elements of `S`.
fn kernels<I, V, S, O>() -> Kernels
where
    I: Instructions,
    V: Storage,
    S: Scalar,
    O: Operation<V::Wide> + Operation<[S::Wide; 1]>,
{
    Some((I::combine::<V, Several<S, 1>, O>(), None))
}

/// A sum, whose elements may also have to be multiplied first.
fn sums<I: Instructions, V: Storage<Wide: Numbers>, S: Scalar<Wide: Numbers>>() -> Kernels {
    Some((I::combine::<V, Several<S, 1>, Sum>(), Some(I::prepare::<V, Several<S, 1>>())))
}

fn float<I: Instructions, V: Storage<Wide: Numbers>, S: Scalar<Wide: Numbers>>(op: &ReduceOp) -> Kernels {
    match op {
        ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PremulSum(_) => sums::<I, V, S>(),
        ReduceOp::Product => kernels::<I, V, S, Product>(),
        ReduceOp::Min => kernels::<I, V, S, Min>(),
        ReduceOp::Max => kernels::<I, V, S, Max>(),
        _ => None,
    }
}

fn float8<I: Instructions, F: Narrow>(op: &ReduceOp) -> Kernels {
    float::<I, I::F8<F>, Float8<F>>(op)
}

/// `T` is the dtype's own type, `U` the unsigned one as wide: sums and products that wrap are the same bits for both.
/// And bits combine as well a byte at a time.
fn integer<I: Instructions, T: Numbers, U: Numbers>(op: &ReduceOp) -> Kernels {
    match op {
        ReduceOp::Sum => kernels::<I, Several<Plain<U>, 16>, Plain<U>, Sum>(),
        ReduceOp::Product => kernels::<I, Several<Plain<U>, 16>, Plain<U>, Product>(),
        ReduceOp::Min => kernels::<I, Several<Plain<T>, 16>, Plain<T>, Min>(),
        ReduceOp::Max => kernels::<I, Several<Plain<T>, 16>, Plain<T>, Max>(),
        ReduceOp::Band => kernels::<I, Several<Plain<u8>, 32>, Plain<u8>, Band>(),
        ReduceOp::Bor => kernels::<I, Several<Plain<u8>, 32>, Plain<u8>, Bor>(),
        ReduceOp::Bxor => kernels::<I, Several<Plain<u8>, 32>, Plain<u8>, Bxor>(),
        _ => None,
    }
}

fn truth<I: Instructions>(op: &ReduceOp) -> Kernels {
    match op {
        ReduceOp::Sum | ReduceOp::Max | ReduceOp::Bor => kernels::<I, Several<Truth, 32>, Truth, Bor>(),
        ReduceOp::Product | ReduceOp::Min | ReduceOp::Band => kernels::<I, Several<Truth, 32>, Truth, Band>(),
        ReduceOp::Bxor => kernels::<I, Several<Truth, 32>, Truth, Bxor>(),
        _ => None,
    }
}

/// All but products treat the real and the imaginary part alike.
fn complex<I: Instructions, V: Storage<Wide: Numbers>, T: Numbers>(op: &ReduceOp) -> Kernels
where
    Float<T>: Scalar<Wide = T>,
    Float<Complex<T>>: Scalar<Wide = Complex<T>>,
    Product: Operation<[Complex<T>; 8]> + Operation<[Complex<T>; 1]>,
{
    match op {
        ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PremulSum(_) => sums::<I, V, Float<T>>(),
        ReduceOp::Product => kernels::<I, Several<Float<Complex<T>>, 8>, Float<Complex<T>>, Product>(),
        _ => None,
    }
}
