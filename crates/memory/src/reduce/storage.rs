//! What the bytes of a dtype are, what they are computed in, and how one becomes the other.
//!
//! A [`Scalar`] says it for one element and is the definition; a [`Storage`] does it for a few elements at a time, which
//! is what kernels are made of. [`Several`] makes a storage of any scalar and leaves the vectors to the compiler, which
//! finds them for all that is computed as it lies there. What it does not find is written out in `avx2`.

use std::marker::PhantomData;

use num_complex::Complex;

use super::kernel::Scale;
use crate::float8::{self, Narrow};

/// One element: as it lies in memory, and the type in which it is computed.
pub(super) trait Scalar {
    type Stored: Copy;
    type Wide: Copy;

    fn widen(stored: Self::Stored) -> Self::Wide;
    fn narrow(wide: Self::Wide) -> Self::Stored;

    /// Multiplies or divides. Only floats are ever asked to: `supports` refuses AVG and PREMUL_SUM of the others.
    #[inline(always)]
    fn scale(wide: Self::Wide, _: Scale) -> Self::Wide {
        wide
    }
}

/// A few elements that are loaded, computed and stored together.
pub(super) trait Storage {
    type Wide: Copy;
    /// Bytes they take in memory.
    const BYTES: usize;

    /// # Safety
    /// `place` is valid for reads of `BYTES`, at any alignment.
    unsafe fn load(place: *const u8) -> Self::Wide;

    /// # Safety
    /// `place` is valid for writes of `BYTES`, at any alignment.
    unsafe fn store(place: *mut u8, wide: Self::Wide);

    fn scale(wide: Self::Wide, scale: Scale) -> Self::Wide;
}

/// `N` elements, one by one.
pub(super) struct Several<S, const N: usize>(PhantomData<S>);

impl<S: Scalar, const N: usize> Storage for Several<S, N> {
    type Wide = [S::Wide; N];
    const BYTES: usize = N * size_of::<S::Stored>();

    #[inline(always)]
    unsafe fn load(place: *const u8) -> [S::Wide; N] {
        // SAFETY: the caller's promise; the type allows any alignment.
        let stored = unsafe { place.cast::<[S::Stored; N]>().read_unaligned() };
        std::array::from_fn(|i| S::widen(stored[i]))
    }

    #[inline(always)]
    unsafe fn store(place: *mut u8, wide: [S::Wide; N]) {
        let stored: [S::Stored; N] = std::array::from_fn(|i| S::narrow(wide[i]));
        // SAFETY: the caller's promise; the type allows any alignment.
        unsafe { place.cast::<[S::Stored; N]>().write_unaligned(stored) }
    }

    #[inline(always)]
    fn scale(wide: [S::Wide; N], scale: Scale) -> [S::Wide; N] {
        std::array::from_fn(|i| S::scale(wide[i], scale))
    }
}

/// Integers, and whatever else is computed as it lies there.
pub(super) struct Plain<T>(PhantomData<T>);

impl<T: Copy> Scalar for Plain<T> {
    type Stored = T;
    type Wide = T;

    #[inline(always)]
    fn widen(stored: T) -> T {
        stored
    }

    #[inline(always)]
    fn narrow(wide: T) -> T {
        wide
    }
}

/// A byte that is zero or not; what is written is 0 or 1.
pub(super) struct Truth;

impl Scalar for Truth {
    type Stored = u8;
    type Wide = u8;

    #[inline(always)]
    fn widen(stored: u8) -> u8 {
        u8::from(stored != 0)
    }

    #[inline(always)]
    fn narrow(wide: u8) -> u8 {
        wide
    }
}

/// f32 or f64. A NaN is written as the one NaN, because its sign and payload depend on the processor.
pub(super) struct Float<T>(PhantomData<T>);

macro_rules! floats {
    ($($float:ident)*) => {$(
        impl Scalar for Float<$float> {
            type Stored = $float;
            type Wide = $float;

            #[inline(always)]
            fn widen(stored: $float) -> $float {
                stored
            }

            #[inline(always)]
            fn narrow(wide: $float) -> $float {
                if wide.is_nan() { $float::NAN } else { wide }
            }

            #[inline(always)]
            fn scale(wide: $float, scale: Scale) -> $float {
                match scale {
                    Scale::Keep => wide,
                    Scale::Multiply(factor) => wide * factor as $float,
                    Scale::Divide(divisor) => wide / divisor as $float,
                }
            }
        }

        /// Only for products: all else is done on the parts, as if they were twice as many floats.
        impl Scalar for Float<Complex<$float>> {
            type Stored = Complex<$float>;
            type Wide = Complex<$float>;

            #[inline(always)]
            fn widen(stored: Complex<$float>) -> Complex<$float> {
                stored
            }

            #[inline(always)]
            fn narrow(wide: Complex<$float>) -> Complex<$float> {
                Complex::new(Float::<$float>::narrow(wide.re), Float::<$float>::narrow(wide.im))
            }
        }
    )*};
}

floats!(f32 f64);

/// The upper half of an f32.
pub(super) struct BFloat16;

impl Scalar for BFloat16 {
    type Stored = u16;
    type Wide = f32;

    #[inline(always)]
    fn widen(stored: u16) -> f32 {
        f32::from_bits(u32::from(stored) << 16)
    }

    /// To the nearest, the even one of two as near. Not by the processor's own instruction (`vcvtneps2bf16`), which
    /// takes subnormal numbers for zero.
    #[inline(always)]
    fn narrow(wide: f32) -> u16 {
        let bits = wide.to_bits();
        let is_odd = (bits >> 16) & 1;
        let rounded = bits.wrapping_add(0x7fff).wrapping_add(is_odd);
        let kept = if wide.is_nan() { float8::QUIET_NAN } else { rounded };
        (kept >> 16) as u16
    }

    #[inline(always)]
    fn scale(wide: f32, scale: Scale) -> f32 {
        Float::<f32>::scale(wide, scale)
    }
}

/// An eight-bit float, by arithmetic.
pub(super) struct Float8<F>(PhantomData<F>);

impl<F: Narrow> Scalar for Float8<F> {
    type Stored = u8;
    type Wide = f32;

    #[inline(always)]
    fn widen(stored: u8) -> f32 {
        float8::widen::<F>(u32::from(stored))
    }

    #[inline(always)]
    fn narrow(wide: f32) -> u8 {
        float8::narrow::<F>(Float::<f32>::narrow(wide)) as u8
    }

    #[inline(always)]
    fn scale(wide: f32, scale: Scale) -> f32 {
        Float::<f32>::scale(wide, scale)
    }
}

/// float16, by the arithmetic that eight-bit floats have.
pub(super) struct Half;

impl Narrow for Half {
    const BITS: u32 = 16;
    const MANTISSA: u32 = 10;
    const BIAS: u32 = 15;
    const FINITE_MAX: u32 = 0x7bff;
    const OVERFLOW: u32 = 0x7c00;
    const NAN: u32 = 0x7e00;
    const UNSIGNED_ZERO: bool = false;
}

impl Scalar for Half {
    type Stored = u16;
    type Wide = f32;

    #[inline(always)]
    fn widen(stored: u16) -> f32 {
        float8::widen::<Self>(u32::from(stored))
    }

    #[inline(always)]
    fn narrow(wide: f32) -> u16 {
        float8::narrow::<Self>(Float::<f32>::narrow(wide)) as u16
    }

    #[inline(always)]
    fn scale(wide: f32, scale: Scale) -> f32 {
        Float::<f32>::scale(wide, scale)
    }
}
