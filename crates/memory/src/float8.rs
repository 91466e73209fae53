//! Floats of eight bits, converted as PyTorch converts them.
//!
//! The four formats differ in a few numbers, so one widening and one rounding serve all of them; float16 is the same
//! with more bits and shares the code where the processor has no instruction for it. Both directions are free of
//! branches and tables: the compiler turns them into vector code.
//!
//! None of it relies on subnormal *f32* arithmetic, so a thread that flushes those to zero computes the same.
//!
//! Names: E and M count the bits of exponent and mantissa, FN means finite (no infinities), UZ means unsigned zero.

use std::fmt;

/// What tells one narrow float from another. Codes are magnitudes without the sign bit, unless they say otherwise.
pub(crate) trait Narrow {
    const BITS: u32;
    const MANTISSA: u32;
    const BIAS: u32;
    /// The largest finite magnitude.
    const FINITE_MAX: u32;
    /// What a value beyond the largest becomes.
    const OVERFLOW: u32;
    /// The magnitude of the NaN that is written.
    const NAN: u32;
    /// Zero has no sign, and the code of negative zero is the only NaN.
    const UNSIGNED_ZERO: bool;

    const SIGN: u32 = 1 << (Self::BITS - 1);
    /// Bits of an f32's mantissa that the format has no room for.
    const DROPPED: u32 = 23 - Self::MANTISSA;
    /// The smallest subnormal.
    const SMALLEST: f32 = power_of_two(1 - Self::BIAS as i32 - Self::MANTISSA as i32);
    /// Added to this number, a value loses the bits below the smallest subnormal, rounded by the addition itself.
    const COARSE: f32 = power_of_two(24 - Self::BIAS as i32 - Self::MANTISSA as i32);
}

/// The value of a code.
#[inline(always)]
pub(crate) fn widen<F: Narrow>(code: u32) -> f32 {
    let magnitude = code & (F::SIGN - 1);
    let sign = (code & F::SIGN) << (32 - F::BITS);
    let normal = (magnitude << F::DROPPED).wrapping_add((127 - F::BIAS) << 23);
    let subnormal = (magnitude as i32 as f32 * F::SMALLEST).to_bits();
    let finite = if magnitude < 1 << F::MANTISSA { subnormal } else { normal };
    if F::UNSIGNED_ZERO {
        return f32::from_bits(if code == F::SIGN { QUIET_NAN } else { sign | finite });
    }
    let infinite = if F::OVERFLOW > F::FINITE_MAX && magnitude == F::OVERFLOW { INFINITY } else { QUIET_NAN };
    f32::from_bits(sign | if magnitude > F::FINITE_MAX { infinite } else { finite })
}

/// The code nearest to a value, the even one of two as near.
#[inline(always)]
pub(crate) fn narrow<F: Narrow>(value: f32) -> u32 {
    let bits = value.to_bits();
    let magnitude = bits & 0x7fff_ffff;
    let sign = (bits >> 31) * F::SIGN;
    let is_odd = (magnitude >> F::DROPPED) & 1;
    let rounded = magnitude.wrapping_add((1 << (F::DROPPED - 1)) - 1).wrapping_add(is_odd);
    let normal = (rounded >> F::DROPPED).wrapping_sub((127 - F::BIAS) << F::MANTISSA);
    let subnormal = (f32::from_bits(magnitude) + F::COARSE).to_bits().wrapping_sub(F::COARSE.to_bits());
    let nearest = if magnitude < (128 - F::BIAS) << 23 { subnormal } else { normal };
    let is_nan = magnitude > INFINITY;
    if F::UNSIGNED_ZERO {
        // Overflow has no code but NaN's, and the negative zero that would be NaN is plain zero.
        let signed = if nearest == 0 { 0 } else { nearest | sign };
        return if is_nan || nearest > F::FINITE_MAX { F::SIGN } else { signed };
    }
    let bounded = if nearest > F::FINITE_MAX { F::OVERFLOW } else { nearest };
    sign | if is_nan { F::NAN } else { bounded }
}

const INFINITY: u32 = 0x7f80_0000;
pub(crate) const QUIET_NAN: u32 = 0x7fc0_0000;

const fn power_of_two(exponent: i32) -> f32 {
    f32::from_bits(((127 + exponent) as u32) << 23)
}

macro_rules! float8 {
    ($($(#[$doc:meta])* $name:ident { $($number:tt)* })*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Default)]
        #[repr(transparent)]
        pub struct $name(u8);

        impl Narrow for $name {
            const BITS: u32 = 8;
            $($number)*
        }

        impl $name {
            /// The number with these bits.
            pub const fn from_bits(code: u8) -> Self {
                $name(code)
            }

            /// Its bits.
            pub const fn to_bits(self) -> u8 {
                self.0
            }

            /// The nearest value, the even one of two as near; what is too large becomes what PyTorch makes of it.
            pub fn from_f32(value: f32) -> Self {
                $name(narrow::<$name>(value) as u8)
            }

            /// The same number as an `f32`, exactly.
            pub fn to_f32(self) -> f32 {
                widen::<$name>(u32::from(self.0))
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(&self.to_f32(), f)
            }
        }

        impl PartialEq for $name {
            fn eq(&self, other: &Self) -> bool {
                self.to_f32() == other.to_f32()
            }
        }
    )*};
}

float8! {
    /// `float8_e4m3fn`: up to 448, no infinities; too large a value becomes the largest.
    F8E4M3FN {
        const MANTISSA: u32 = 3;
        const BIAS: u32 = 7;
        const FINITE_MAX: u32 = 0x7e;
        const OVERFLOW: u32 = 0x7e;
        const NAN: u32 = 0x7f;
        const UNSIGNED_ZERO: bool = false;
    }

    /// `float8_e5m2`: up to 57 344; too large a value becomes infinite.
    F8E5M2 {
        const MANTISSA: u32 = 2;
        const BIAS: u32 = 15;
        const FINITE_MAX: u32 = 0x7b;
        const OVERFLOW: u32 = 0x7c;
        const NAN: u32 = 0x7f;
        const UNSIGNED_ZERO: bool = false;
    }

    /// `float8_e4m3fnuz`: up to 240; too large a value becomes NaN.
    F8E4M3FNUZ {
        const MANTISSA: u32 = 3;
        const BIAS: u32 = 8;
        const FINITE_MAX: u32 = 0x7f;
        const OVERFLOW: u32 = 0x80;
        const NAN: u32 = 0x80;
        const UNSIGNED_ZERO: bool = true;
    }

    /// `float8_e5m2fnuz`: up to 57 344; too large a value becomes NaN.
    F8E5M2FNUZ {
        const MANTISSA: u32 = 2;
        const BIAS: u32 = 16;
        const FINITE_MAX: u32 = 0x7f;
        const OVERFLOW: u32 = 0x80;
        const NAN: u32 = 0x80;
        const UNSIGNED_ZERO: bool = true;
    }
}
