//! One value of two, for each operation and each type that values are computed in.
//!
//! No result may depend on how many values one instruction computes. A sum or product rounds once. Of equal values (zeros of
//! both signs), minimum and maximum keep the earlier one, as PyTorch does for single elements.

use num_complex::Complex;

/// What two values become.
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

/// Values, or vectors of them, that can be added, multiplied and compared.
pub(super) trait Numbers: Copy {
    fn sum(self, later: Self) -> Self;
    fn product(self, later: Self) -> Self;
    /// NaN if either is.
    fn min(self, later: Self) -> Self;
    /// NaN if either is.
    fn max(self, later: Self) -> Self;
}

macro_rules! of_numbers {
    ($($operation:ident $method:ident)*) => {$(
        impl<W: Numbers> Operation<W> for $operation {
            #[inline(always)]
            fn apply(earlier: W, later: W) -> W {
                earlier.$method(later)
            }
        }
    )*};
}

of_numbers!(Sum sum Product product Min min Max max);

/// With loops, not closures: those are compiled by themselves, without the instructions of a level.
impl<W: Numbers, const N: usize> Numbers for [W; N] {
    #[inline(always)]
    fn sum(mut self, later: Self) -> Self {
        for i in 0..N {
            self[i] = self[i].sum(later[i]);
        }
        self
    }

    #[inline(always)]
    fn product(mut self, later: Self) -> Self {
        for i in 0..N {
            self[i] = self[i].product(later[i]);
        }
        self
    }

    #[inline(always)]
    fn min(mut self, later: Self) -> Self {
        for i in 0..N {
            self[i] = self[i].min(later[i]);
        }
        self
    }

    #[inline(always)]
    fn max(mut self, later: Self) -> Self {
        for i in 0..N {
            self[i] = self[i].max(later[i]);
        }
        self
    }
}

macro_rules! integers {
    ($($integer:ident)*) => {$(
        impl Numbers for $integer {
            #[inline(always)]
            fn sum(self, later: Self) -> Self {
                self.wrapping_add(later)
            }

            #[inline(always)]
            fn product(self, later: Self) -> Self {
                self.wrapping_mul(later)
            }

            #[inline(always)]
            fn min(self, later: Self) -> Self {
                Ord::min(self, later)
            }

            #[inline(always)]
            fn max(self, later: Self) -> Self {
                Ord::max(self, later)
            }
        }
    )*};
}

integers!(i8 u8 i16 u16 i32 u32 i64 u64);

macro_rules! floats {
    ($($float:ident)*) => {$(
        impl Numbers for $float {
            #[inline(always)]
            fn sum(self, later: Self) -> Self {
                self + later
            }

            #[inline(always)]
            fn product(self, later: Self) -> Self {
                self * later
            }

            /// No comparison lets a later NaN through, so it is asked for.
            #[inline(always)]
            fn min(self, later: Self) -> Self {
                let least = if later < self { later } else { self };
                if later.is_nan() { later } else { least }
            }

            #[inline(always)]
            fn max(self, later: Self) -> Self {
                let greatest = if later > self { later } else { self };
                if later.is_nan() { later } else { greatest }
            }
        }

        impl<const N: usize> Operation<[Complex<$float>; N]> for Product {
            /// Each product and each sum rounded: fused, the result would depend on the processor.
            #[inline(always)]
            fn apply(earlier: [Complex<$float>; N], later: [Complex<$float>; N]) -> [Complex<$float>; N] {
                std::array::from_fn(|i| {
                    let (a, b, c, d) = (earlier[i].re, earlier[i].im, later[i].re, later[i].im);
                    Complex::new(a * c - b * d, a * d + b * c)
                })
            }
        }
    )*};
}

floats!(f32 f64);

macro_rules! bits {
    ($($name:ident $operator:tt)*) => {$(
        impl<const N: usize> Operation<[u8; N]> for $name {
            #[inline(always)]
            fn apply(earlier: [u8; N], later: [u8; N]) -> [u8; N] {
                std::array::from_fn(|i| earlier[i] $operator later[i])
            }
        }
    )*};
}

bits!(Band & Bor | Bxor ^);
