//! What the bytes of a dtype are, what they are computed in, and how one becomes the other.

use std::marker::PhantomData;

use num_complex::Complex;

use super::kernel::Scale;
use crate::float8::{self, Narrow};

/// Elements as they lie in memory, and the wider type in which they are computed.
pub(super) trait Storage {
    type Stored: Copy;
    type Wide: Copy;

    fn widen(stored: Self::Stored) -> Self::Wide;
    fn narrow(wide: Self::Wide) -> Self::Stored;

    /// Multiplies or divides. Only floats are ever asked to: `supports` refuses AVG and PREMUL_SUM of the others.
    #[inline(always)]
    fn scale(wide: Self::Wide, _: Scale) -> Self::Wide {
        wide
    }

    #[inline(always)]
    fn widen_all<const N: usize>(stored: [Self::Stored; N]) -> [Self::Wide; N] {
        std::array::from_fn(|i| Self::widen(stored[i]))
    }

    #[inline(always)]
    fn narrow_all<const N: usize>(wide: [Self::Wide; N]) -> [Self::Stored; N] {
        std::array::from_fn(|i| Self::narrow(wide[i]))
    }
}

/// Integers, and whatever else is computed as it lies there.
pub(super) struct Plain<T>(PhantomData<T>);

impl<T: Copy> Storage for Plain<T> {
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

impl Storage for Truth {
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
        impl Storage for Float<$float> {
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
        impl Storage for Float<Complex<$float>> {
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

impl Storage for BFloat16 {
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

impl<F: Narrow> Storage for Float8<F> {
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

/// float16 where the processor has no instruction for it.
pub(super) struct HalfByArithmetic;

impl Narrow for HalfByArithmetic {
    const BITS: u32 = 16;
    const MANTISSA: u32 = 10;
    const BIAS: u32 = 15;
    const FINITE_MAX: u32 = 0x7bff;
    const OVERFLOW: u32 = 0x7c00;
    const NAN: u32 = 0x7e00;
    const UNSIGNED_ZERO: bool = false;
}

impl Storage for HalfByArithmetic {
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

#[cfg(target_arch = "x86_64")]
pub(super) use self::f16c::HalfByF16c;

#[cfg(target_arch = "x86_64")]
mod f16c {
    use std::arch::x86_64::*;

    use super::*;

    /// float16 by the processor's own conversion.
    ///
    /// Only the levels that have F16C (`level::Instructions::Half`) name this type; that is what its SAFETY notes rely on.
    pub(in super::super) struct HalfByF16c;

    const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT;

    impl Storage for HalfByF16c {
        type Stored = u16;
        type Wide = f32;

        #[inline(always)]
        fn widen(stored: u16) -> f32 {
            // SAFETY: the processor has F16C, see the type.
            unsafe { _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(stored)))) }
        }

        #[inline(always)]
        fn narrow(wide: f32) -> u16 {
            let wide = Float::<f32>::narrow(wide);
            // SAFETY: the processor has F16C, see the type.
            unsafe { _mm_cvtsi128_si32(_mm_cvtps_ph::<NEAREST>(_mm_set_ss(wide))) as u16 }
        }

        #[inline(always)]
        fn scale(wide: f32, scale: Scale) -> f32 {
            Float::<f32>::scale(wide, scale)
        }

        #[inline(always)]
        fn widen_all<const N: usize>(stored: [u16; N]) -> [f32; N] {
            let mut wide = [0.0; N];
            for (wide, stored) in wide.chunks_exact_mut(8).zip(stored.chunks_exact(8)) {
                // SAFETY: the processor has F16C, see the type; both slices have eight elements.
                unsafe {
                    let eight = _mm256_cvtph_ps(_mm_loadu_si128(stored.as_ptr().cast()));
                    _mm256_storeu_ps(wide.as_mut_ptr(), eight);
                }
            }
            for i in N - N % 8..N {
                wide[i] = Self::widen(stored[i]);
            }
            wide
        }

        #[inline(always)]
        fn narrow_all<const N: usize>(wide: [f32; N]) -> [u16; N] {
            let mut stored = [0; N];
            for (stored, wide) in stored.chunks_exact_mut(8).zip(wide.chunks_exact(8)) {
                // SAFETY: the processor has F16C, see the type; both slices have eight elements.
                unsafe {
                    let eight = _mm256_loadu_ps(wide.as_ptr());
                    let is_nan = _mm256_cmp_ps::<_CMP_UNORD_Q>(eight, eight);
                    let canonical = _mm256_blendv_ps(eight, _mm256_set1_ps(f32::NAN), is_nan);
                    _mm_storeu_si128(stored.as_mut_ptr().cast(), _mm256_cvtps_ph::<NEAREST>(canonical));
                }
            }
            for i in N - N % 8..N {
                stored[i] = Self::narrow(wide[i]);
            }
            stored
        }
    }
}
