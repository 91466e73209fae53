//! One value of two, for each operation and each type that values are computed in.
//!
//! None of it may depend on the order of instructions, so that vectors of any width and single elements agree: a sum or
//! product rounds once, and of equal values (zeros of both signs) minimum and maximum keep the earlier, as PyTorch does
//! on single elements.

use num_complex::Complex;

pub(super) trait Operation<W> {
    fn apply(earlier: W, later: W) -> W;
}

pub(super) struct Sum;
pub(super) struct Product;
pub(super) struct Min;
pub(super) struct Max;
pub(super) struct Band;
pub(super) struct Bor;
pub(super) struct Bxor;

macro_rules! integers {
    ($($integer:ident)*) => {$(
        impl Operation<$integer> for Sum {
            #[inline(always)]
            fn apply(earlier: $integer, later: $integer) -> $integer {
                earlier.wrapping_add(later)
            }
        }

        impl Operation<$integer> for Product {
            #[inline(always)]
            fn apply(earlier: $integer, later: $integer) -> $integer {
                earlier.wrapping_mul(later)
            }
        }

        impl Operation<$integer> for Min {
            #[inline(always)]
            fn apply(earlier: $integer, later: $integer) -> $integer {
                earlier.min(later)
            }
        }

        impl Operation<$integer> for Max {
            #[inline(always)]
            fn apply(earlier: $integer, later: $integer) -> $integer {
                earlier.max(later)
            }
        }
    )*};
}

integers!(i8 u8 i16 u16 i32 u32 i64 u64);

macro_rules! bits {
    ($($name:ident $operator:tt)*) => {$(
        impl Operation<u8> for $name {
            #[inline(always)]
            fn apply(earlier: u8, later: u8) -> u8 {
                earlier $operator later
            }
        }
    )*};
}

bits!(Band & Bor | Bxor ^);

macro_rules! floats {
    ($($float:ident)*) => {$(
        impl Operation<$float> for Sum {
            #[inline(always)]
            fn apply(earlier: $float, later: $float) -> $float {
                earlier + later
            }
        }

        impl Operation<$float> for Product {
            #[inline(always)]
            fn apply(earlier: $float, later: $float) -> $float {
                earlier * later
            }
        }

        impl Operation<$float> for Min {
            /// NaN if either is: a NaN that is later is not less, so it is asked for by name.
            #[inline(always)]
            fn apply(earlier: $float, later: $float) -> $float {
                let least = if later < earlier { later } else { earlier };
                if later.is_nan() { later } else { least }
            }
        }

        impl Operation<$float> for Max {
            /// NaN if either is, as for `Min`.
            #[inline(always)]
            fn apply(earlier: $float, later: $float) -> $float {
                let greatest = if later > earlier { later } else { earlier };
                if later.is_nan() { later } else { greatest }
            }
        }

        impl Operation<Complex<$float>> for Product {
            /// Each product and each sum rounded: fused, the result would depend on the processor.
            #[inline(always)]
            fn apply(earlier: Complex<$float>, later: Complex<$float>) -> Complex<$float> {
                let (a, b, c, d) = (earlier.re, earlier.im, later.re, later.im);
                Complex::new(a * c - b * d, a * d + b * c)
            }
        }
    )*};
}

floats!(f32 f64);
