//! Floats that are computed in f32, eight to a register, with AVX2 and F16C.
//!
//! Each storage here does to vectors what its scalar in `storage` does to one element, to the last bit. Dtypes narrower
//! than f32 come sixteen at a time: as two registers.
//!
//! Only levels that have AVX2 and F16C name these types (`level::Instructions`), and a level is only ever run on
//! a processor that has it (`Reduction::with_level`). That is what every SAFETY note here relies on.

use std::arch::x86_64::*;
use std::marker::PhantomData;

use super::kernel::Scale;
use super::operation::Numbers;
use super::storage::Storage;
use crate::float8::{Narrow, QUIET_NAN};

impl Numbers for __m256 {
    #[inline(always)]
    fn sum(self, later: Self) -> Self {
        // SAFETY: the processor has AVX2.
        unsafe { _mm256_add_ps(self, later) }
    }

    #[inline(always)]
    fn product(self, later: Self) -> Self {
        // SAFETY: the processor has AVX2.
        unsafe { _mm256_mul_ps(self, later) }
    }

    #[inline(always)]
    fn min(self, later: Self) -> Self {
        // SAFETY: the processor has AVX2. The instruction answers its second operand unless the first is less, so an
        // earlier NaN stays; a later one is asked for.
        unsafe {
            let least = _mm256_min_ps(later, self);
            _mm256_blendv_ps(least, later, _mm256_cmp_ps::<_CMP_UNORD_Q>(later, later))
        }
    }

    #[inline(always)]
    fn max(self, later: Self) -> Self {
        // SAFETY: the processor has AVX2. As for `min`.
        unsafe {
            let greatest = _mm256_max_ps(later, self);
            _mm256_blendv_ps(greatest, later, _mm256_cmp_ps::<_CMP_UNORD_Q>(later, later))
        }
    }
}

#[inline(always)]
fn scale(wide: __m256, scale: Scale) -> __m256 {
    // SAFETY: the processor has AVX2.
    unsafe {
        match scale {
            Scale::Keep => wide,
            Scale::Multiply(factor) => _mm256_mul_ps(wide, _mm256_set1_ps(factor as f32)),
            Scale::Divide(divisor) => _mm256_div_ps(wide, _mm256_set1_ps(divisor as f32)),
        }
    }
}

/// The one NaN for any.
#[inline(always)]
fn with_one_nan(wide: __m256) -> __m256 {
    // SAFETY: the processor has AVX2.
    unsafe {
        let is_nan = _mm256_cmp_ps::<_CMP_UNORD_Q>(wide, wide);
        _mm256_blendv_ps(wide, _mm256_castsi256_ps(all(QUIET_NAN)), is_nan)
    }
}

/// The same number in all eight lanes.
#[inline(always)]
fn all(bits: u32) -> __m256i {
    // SAFETY: the processor has AVX2.
    unsafe { _mm256_set1_epi32(bits as i32) }
}

/// `float32`.
pub(super) struct F32s;

impl Storage for F32s {
    type Wide = __m256;
    const BYTES: usize = 32;

    #[inline(always)]
    unsafe fn load(place: *const u8) -> __m256 {
        // SAFETY: the processor has AVX2; the caller promises 32 bytes.
        unsafe { _mm256_loadu_ps(place.cast()) }
    }

    #[inline(always)]
    unsafe fn store(place: *mut u8, wide: __m256) {
        // SAFETY: the processor has AVX2; the caller promises 32 bytes.
        unsafe { _mm256_storeu_ps(place.cast(), with_one_nan(wide)) }
    }

    #[inline(always)]
    fn scale(wide: __m256, by: Scale) -> __m256 {
        scale(wide, by)
    }
}

/// `bfloat16`: the elements of even places in one register, those of odd places in the other, so that each is already
/// in the upper half of its lane or a shift away from it.
pub(super) struct BF16s;

impl Storage for BF16s {
    type Wide = [__m256; 2];
    const BYTES: usize = 32;

    #[inline(always)]
    unsafe fn load(place: *const u8) -> [__m256; 2] {
        // SAFETY: the processor has AVX2; the caller promises 32 bytes.
        unsafe {
            let both = _mm256_loadu_si256(place.cast());
            let even = _mm256_slli_epi32::<16>(both);
            let odd = _mm256_and_si256(both, all(0xffff_0000));
            [_mm256_castsi256_ps(even), _mm256_castsi256_ps(odd)]
        }
    }

    #[inline(always)]
    unsafe fn store(place: *mut u8, [even, odd]: [__m256; 2]) {
        // SAFETY: the processor has AVX2; the caller promises 32 bytes.
        unsafe {
            let even = _mm256_srli_epi32::<16>(round_to_bf16(even));
            let both = _mm256_blend_epi16::<0b1010_1010>(even, round_to_bf16(odd));
            _mm256_storeu_si256(place.cast(), both);
        }
    }

    #[inline(always)]
    fn scale([low, high]: [__m256; 2], by: Scale) -> [__m256; 2] {
        [scale(low, by), scale(high, by)]
    }
}

/// The nearest bfloat16 in the upper half of each lane, anything in the lower.
#[inline(always)]
fn round_to_bf16(wide: __m256) -> __m256i {
    // SAFETY: the processor has AVX2.
    unsafe {
        let bits = _mm256_castps_si256(wide);
        let is_odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), all(1));
        let rounded = _mm256_add_epi32(_mm256_add_epi32(bits, all(0x7fff)), is_odd);
        let is_nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(wide, wide));
        _mm256_blendv_epi8(rounded, all(QUIET_NAN), is_nan)
    }
}

/// `float16`, by the processor's own conversion.
pub(super) struct F16s;

impl Storage for F16s {
    type Wide = [__m256; 2];
    const BYTES: usize = 32;

    #[inline(always)]
    unsafe fn load(place: *const u8) -> [__m256; 2] {
        // SAFETY: the processor has AVX2 and F16C; the caller promises 32 bytes.
        unsafe {
            [
                _mm256_cvtph_ps(_mm_loadu_si128(place.cast())),
                _mm256_cvtph_ps(_mm_loadu_si128(place.add(16).cast())),
            ]
        }
    }

    #[inline(always)]
    unsafe fn store(place: *mut u8, [low, high]: [__m256; 2]) {
        const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT;
        // SAFETY: the processor has AVX2 and F16C; the caller promises 32 bytes.
        unsafe {
            _mm_storeu_si128(place.cast(), _mm256_cvtps_ph::<NEAREST>(with_one_nan(low)));
            _mm_storeu_si128(place.add(16).cast(), _mm256_cvtps_ph::<NEAREST>(with_one_nan(high)));
        }
    }

    #[inline(always)]
    fn scale([low, high]: [__m256; 2], by: Scale) -> [__m256; 2] {
        [scale(low, by), scale(high, by)]
    }
}

/// Eight-bit floats: `float8::widen` and `float8::narrow`, line by line.
pub(super) struct F8s<F>(PhantomData<F>);

impl<F: Narrow> Storage for F8s<F> {
    type Wide = [__m256; 2];
    const BYTES: usize = 16;

    #[inline(always)]
    unsafe fn load(place: *const u8) -> [__m256; 2] {
        // SAFETY: the processor has AVX2; the caller promises 16 bytes.
        unsafe {
            let codes = _mm_loadu_si128(place.cast());
            [
                widen::<F>(_mm256_cvtepu8_epi32(codes)),
                widen::<F>(_mm256_cvtepu8_epi32(_mm_unpackhi_epi64(codes, codes))),
            ]
        }
    }

    #[inline(always)]
    unsafe fn store(place: *mut u8, [low, high]: [__m256; 2]) {
        // SAFETY: the processor has AVX2; the caller promises 16 bytes. Packing goes by halves of a register, so the
        // middle quarters are exchanged in between.
        unsafe {
            let words = _mm256_packus_epi32(narrow::<F>(low), narrow::<F>(high));
            let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(words);
            let bytes = _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256::<1>(words));
            _mm_storeu_si128(place.cast(), bytes);
        }
    }

    #[inline(always)]
    fn scale([low, high]: [__m256; 2], by: Scale) -> [__m256; 2] {
        [scale(low, by), scale(high, by)]
    }
}

#[inline(always)]
fn widen<F: Narrow>(codes: __m256i) -> __m256 {
    // SAFETY: the processor has AVX2.
    unsafe {
        let magnitude = _mm256_and_si256(codes, all(F::SIGN - 1));
        let sign = shift_left(_mm256_and_si256(codes, all(F::SIGN)), 32 - F::BITS);
        let normal = _mm256_add_epi32(shift_left(magnitude, F::DROPPED), all((127 - F::BIAS) << 23));
        let least = _mm256_set1_ps(F::SMALLEST);
        let subnormal = _mm256_castps_si256(_mm256_mul_ps(_mm256_cvtepi32_ps(magnitude), least));
        let finite = select(is_less(magnitude, all(1 << F::MANTISSA)), subnormal, normal);
        let signed = _mm256_or_si256(sign, finite);
        let value = if F::UNSIGNED_ZERO {
            select(_mm256_cmpeq_epi32(codes, all(F::SIGN)), all(QUIET_NAN), signed)
        } else {
            let is_beyond = is_less(all(F::FINITE_MAX), magnitude);
            let beyond = if F::OVERFLOW > F::FINITE_MAX {
                let is_infinite = _mm256_cmpeq_epi32(magnitude, all(F::OVERFLOW));
                select(is_infinite, all(INFINITY), all(QUIET_NAN))
            } else {
                all(QUIET_NAN)
            };
            _mm256_or_si256(sign, select(is_beyond, beyond, finite))
        };
        _mm256_castsi256_ps(value)
    }
}

/// As if `with_one_nan` had come before: NaN loses its sign.
#[inline(always)]
fn narrow<F: Narrow>(wide: __m256) -> __m256i {
    // SAFETY: the processor has AVX2.
    unsafe {
        let bits = _mm256_castps_si256(wide);
        let magnitude = _mm256_and_si256(bits, all(0x7fff_ffff));
        let sign = _mm256_and_si256(shift_right(bits, 32 - F::BITS), all(F::SIGN));
        let is_odd = _mm256_and_si256(shift_right(magnitude, F::DROPPED), all(1));
        let rounded = _mm256_add_epi32(magnitude, all((1 << (F::DROPPED - 1)) - 1));
        let rounded = _mm256_add_epi32(rounded, is_odd);
        let rebased = all((127 - F::BIAS) << F::MANTISSA);
        let normal = _mm256_sub_epi32(shift_right(rounded, F::DROPPED), rebased);
        let sum = _mm256_add_ps(_mm256_castsi256_ps(magnitude), _mm256_set1_ps(F::COARSE));
        let subnormal = _mm256_sub_epi32(_mm256_castps_si256(sum), all(F::COARSE.to_bits()));
        let is_subnormal = is_less(magnitude, all((128 - F::BIAS) << 23));
        let nearest = select(is_subnormal, subnormal, normal);
        let is_nan = is_less(all(INFINITY), magnitude);
        let is_beyond = is_less(all(F::FINITE_MAX), nearest);
        if F::UNSIGNED_ZERO {
            let is_zero = _mm256_cmpeq_epi32(nearest, all(0));
            let signed = _mm256_andnot_si256(is_zero, _mm256_or_si256(nearest, sign));
            return select(_mm256_or_si256(is_nan, is_beyond), all(F::SIGN), signed);
        }
        let bounded = select(is_beyond, all(F::OVERFLOW), nearest);
        select(is_nan, all(F::NAN), _mm256_or_si256(sign, bounded))
    }
}

const INFINITY: u32 = 0x7f80_0000;

/// Of numbers below 2³¹.
#[inline(always)]
fn is_less(left: __m256i, right: __m256i) -> __m256i {
    // SAFETY: the processor has AVX2.
    unsafe { _mm256_cmpgt_epi32(right, left) }
}

#[inline(always)]
fn select(condition: __m256i, yes: __m256i, no: __m256i) -> __m256i {
    // SAFETY: the processor has AVX2.
    unsafe { _mm256_blendv_epi8(no, yes, condition) }
}

#[inline(always)]
fn shift_left(lanes: __m256i, by: u32) -> __m256i {
    // SAFETY: the processor has AVX2. The compiler knows `by` and uses the instruction that has it built in.
    unsafe { _mm256_sll_epi32(lanes, _mm_cvtsi32_si128(by as i32)) }
}

#[inline(always)]
fn shift_right(lanes: __m256i, by: u32) -> __m256i {
    // SAFETY: the processor has AVX2. As for `shift_left`.
    unsafe { _mm256_srl_epi32(lanes, _mm_cvtsi32_si128(by as i32)) }
}
