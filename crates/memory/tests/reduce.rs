//! Compares every operation on every dtype, to the last bit, with a reference that is written in another way.
//!
//! The reference computes one element at a time, finds the nearest narrow float by looking at all of them, and does not use
//! vectors. Kernels must agree with it at every level this processor has, at any alignment, for any length and cut.

#![expect(clippy::unwrap_used, reason = "the helpers of a test may panic as it may")]

#[path = "reduce/model.rs"]
mod model;

use half::{bf16, f16};
use num_complex::Complex;
use proptest::prelude::*;
use tenfold_memory::{
    Bytes, CustomOp, DType, F8E4M3FN, F8E4M3FNUZ, F8E5M2, F8E5M2FNUZ, Level, ReduceOp, Reduction, Span,
    supports,
};

use model::*;

/// Lengths in elements: around the sizes of registers and blocks.
const LENGTHS: &[usize] =
    if cfg!(miri) { &[0, 1, 17, 70] } else { &[0, 1, 2, 7, 15, 16, 17, 63, 64, 65, 127, 1000, 4099] };
const SOURCES_MAX: usize = if cfg!(miri) { 3 } else { 9 };

fn ops() -> Vec<ReduceOp> {
    use ReduceOp::*;
    vec![Sum, Avg, Product, Min, Max, Band, Bor, Bxor, PremulSum(0.3)]
}

fn pairs() -> impl Iterator<Item = (ReduceOp, DType)> {
    let all = ops().into_iter().flat_map(|op| DType::ALL.map(|dtype| (op.clone(), dtype)));
    all.filter(|(op, dtype)| supports(op, *dtype))
}

fn levels() -> impl Iterator<Item = Level> {
    Level::ALL.into_iter().filter(|level| level.is_available())
}

#[test]
fn every_operation_on_every_dtype_does_what_the_reference_does() {
    for (op, dtype) in pairs() {
        for count in 1..=SOURCES_MAX {
            let sources: Vec<_> =
                (0..count).map(|rank| elements(dtype, LENGTHS[LENGTHS.len() - 1], rank)).collect();
            for finish in [false, true] {
                let expected = reference(&op, dtype, &sources, finish);
                for level in levels() {
                    let reduction = Reduction::with_level(&op, dtype, count, level).unwrap();
                    compare(
                        &reduction,
                        &sources,
                        &expected,
                        finish,
                        &format!("{op} of {count} {dtype} at {level:?}"),
                    );
                }
            }
        }
    }
}

/// All lengths, all of them off any alignment but one, in place and out of place.
fn compare(reduction: &Reduction, sources: &[Vec<u8>], expected: &[u8], finish: bool, what: &str) {
    let size = expected.len() / LENGTHS[LENGTHS.len() - 1];
    for (shift, length) in LENGTHS.iter().enumerate() {
        let len = length * size;
        let shifted: Vec<Vec<u8>> =
            sources.iter().map(|source| [&vec![0; shift], &source[..len]].concat()).collect();
        let mut sources: Vec<Bytes<'_>> = shifted.iter().map(|source| Bytes::of(&source[shift..])).collect();
        let mut target = vec![0xaa; len + 2];
        reduction.combine(Span::of(&mut target[1..=len]), &sources, finish);
        assert_eq!((target[0], target[len + 1]), (0xaa, 0xaa), "{what} writes beyond {length} elements");
        assert_same(&target[1..=len], &expected[..len], size, what);

        let place = length % sources.len();
        let mut target = sources[place].to_vec();
        let in_place = Span::of(&mut target);
        sources[place] = in_place.bytes();
        reduction.combine(in_place, &sources, finish);
        assert_same(&target, &expected[..len], size, &format!("{what} in place of {place}"));
    }
}

fn assert_same(actual: &[u8], expected: &[u8], size: usize, what: &str) {
    if let Some(at) =
        (0..actual.len()).step_by(size).find(|at| actual[*at..at + size] != expected[*at..at + size])
    {
        let (actual, expected) = (&actual[at..at + size], &expected[at..at + size]);
        panic!("{what}: element {} is {actual:02x?}, not {expected:02x?}", at / size);
    }
}

#[test]
fn preparing_multiplies_for_premul_sum_and_copies_for_all_else() {
    for (op, dtype) in pairs() {
        let source = elements(dtype, 1003 / LENGTHS.len(), 5);
        let expected = match op {
            ReduceOp::PremulSum(factor) => scaled(dtype, &source, factor),
            _ => source.clone(),
        };
        for level in levels() {
            let reduction = Reduction::with_level(&op, dtype, 2, level).unwrap();
            assert_eq!(reduction.needs_preparation(), matches!(op, ReduceOp::PremulSum(_)));
            assert!(!reduction.must_keep_order());
            let mut apart = vec![0; source.len()];
            reduction.prepare(Span::of(&mut apart), Bytes::of(&source));
            assert_same(&apart, &expected, dtype.size(), &format!("{op} of {dtype} at {level:?}"));
            let mut same = source.clone();
            let span = Span::of(&mut same);
            reduction.prepare(span, span.bytes());
            assert_same(&same, &expected, dtype.size(), &format!("{op} of {dtype} at {level:?} in place"));
        }
    }
}

#[test]
fn a_sum_of_pieces_of_f32_in_turn_is_the_sum_at_once() {
    for dtype in [DType::F32, DType::F64, DType::I16, DType::Complex64] {
        let sources: Vec<_> = (0..4).map(|rank| elements(dtype, 500, rank)).collect();
        let sum = Reduction::new(&ReduceOp::Sum, dtype, 4).unwrap();
        let at_once = combine(&sum, &sources, false);
        let mut in_turn = sources[0].clone();
        for source in &sources[1..] {
            let target = Span::of(&mut in_turn);
            sum.combine(target, &[target.bytes(), Bytes::of(source)], false);
        }
        assert_eq!(at_once, in_turn, "{dtype}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: if cfg!(miri) { 4 } else { 256 }, ..Default::default() })]

    /// Any bits, any number of sources, cut anywhere: the whole is what the pieces are, and what the reference says.
    #[test]
    fn where_a_piece_is_cut_makes_no_difference(
        pair in 0..128usize,
        count in 1..6usize,
        length in 0..200usize,
        cuts in proptest::collection::vec(0..200usize, 0..4),
        seed in any::<u64>(),
    ) {
        let all: Vec<_> = pairs().collect();
        let (op, dtype) = &all[pair % all.len()];
        let mut random = Random(seed | 1);
        let sources: Vec<Vec<u8>> =
            (0..count).map(|_| (0..length * dtype.size()).map(|_| random.next() as u8).collect()).collect();
        let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(length) * dtype.size()).collect();
        cuts.extend([0, length * dtype.size()]);
        cuts.sort_unstable();
        let expected = reference(op, *dtype, &sources, true);
        for level in levels() {
            let reduction = Reduction::with_level(op, *dtype, count, level).unwrap();
            let mut target = vec![0; length * dtype.size()];
            let span = Span::of(&mut target);
            for cut in cuts.windows(2) {
                let pieces: Vec<_> = sources.iter().map(|source| Bytes::of(source).part(cut[0], cut[1])).collect();
                reduction.combine(span.part(cut[0], cut[1]), &pieces, true);
            }
            prop_assert_eq!(&target, &expected, "{} of {} {} at {:?}", op, count, dtype, level);
        }
    }
}

#[test]
fn zeros_infinities_subnormals_and_nans_come_out_as_pytorch_has_them() {
    let f32s = |op: ReduceOp, sources: &[f32]| -> f32 {
        let sources: Vec<_> = sources.iter().map(|value| value.to_ne_bytes().to_vec()).collect();
        let reduction = Reduction::new(&op, DType::F32, sources.len()).unwrap();
        f32::from_ne_bytes(combine(&reduction, &sources, true).try_into().unwrap())
    };
    let (inf, nan) = (f32::INFINITY, f32::NAN);
    assert_eq!(f32s(ReduceOp::Min, &[-0.0, 0.0]).to_bits(), (-0.0f32).to_bits());
    assert_eq!(f32s(ReduceOp::Min, &[0.0, -0.0]).to_bits(), 0.0f32.to_bits());
    assert_eq!(f32s(ReduceOp::Max, &[-0.0, 0.0]).to_bits(), (-0.0f32).to_bits());
    assert_eq!(f32s(ReduceOp::Sum, &[-0.0, -0.0]).to_bits(), (-0.0f32).to_bits());
    for op in [ReduceOp::Min, ReduceOp::Max, ReduceOp::Sum, ReduceOp::Product, ReduceOp::Avg] {
        for sources in [[nan, 1.0, 2.0], [1.0, -nan, 2.0], [1.0, inf, nan]] {
            assert_eq!(f32s(op.clone(), &sources).to_bits(), 0x7fc0_0000, "{op} of {sources:?}");
        }
    }
    assert_eq!(f32s(ReduceOp::Sum, &[inf, -inf]).to_bits(), 0x7fc0_0000);
    assert_eq!(f32s(ReduceOp::Sum, &[1e-45, 1e-45]).to_bits(), 2);
    assert_eq!(f32s(ReduceOp::Avg, &[1e-45, 2e-45]).to_bits(), 1);
    assert_eq!(f32s(ReduceOp::Avg, &[1.0, 0.0, 0.0]), 1.0 / 3.0);
}

#[test]
fn a_narrow_float_is_rounded_once_however_many_are_summed() {
    let ones = vec![bf16::from_f32(1.0).to_ne_bytes().to_vec(); 7];
    let mut sources = vec![bf16::from_f32(256.0).to_ne_bytes().to_vec()];
    sources.extend(ones);
    let sum = Reduction::new(&ReduceOp::Sum, DType::BF16, 8).unwrap();
    // 256 + 1 is 256 in bfloat16: rounded at each step, the sum would never leave it.
    assert_eq!(combine(&sum, &sources, true), bf16::from_f32(264.0).to_ne_bytes());
}

#[test]
fn a_narrow_float_that_overflows_becomes_what_pytorch_makes_of_it() {
    let sum_of_largest = |dtype: DType, largest: u8| {
        let sum = Reduction::new(&ReduceOp::Sum, dtype, 2).unwrap();
        combine(&sum, &[vec![largest], vec![largest]], true)[0]
    };
    assert_eq!(sum_of_largest(DType::F8E4M3FN, 0x7e), 0x7e);
    assert_eq!(sum_of_largest(DType::F8E4M3FN, 0xfe), 0xfe);
    assert_eq!(sum_of_largest(DType::F8E5M2, 0x7b), 0x7c);
    assert_eq!(sum_of_largest(DType::F8E4M3FNUZ, 0x7f), 0x80);
    assert_eq!(sum_of_largest(DType::F8E5M2FNUZ, 0xff), 0x80);
    let half = Reduction::new(&ReduceOp::Sum, DType::F16, 2).unwrap();
    let largest = f16::MAX.to_ne_bytes().to_vec();
    assert_eq!(combine(&half, &[largest.clone(), largest], true), f16::INFINITY.to_ne_bytes());
}

#[test]
fn truth_is_any_byte_but_zero_and_is_written_as_one() {
    let truth = |op: ReduceOp| {
        let reduction = Reduction::new(&op, DType::Bool, 2).unwrap();
        combine(&reduction, &[vec![0, 0, 2, 255], vec![0, 7, 0, 128]], true)
    };
    for any in [ReduceOp::Sum, ReduceOp::Max, ReduceOp::Bor] {
        assert_eq!(truth(any), [0, 1, 1, 1]);
    }
    for all in [ReduceOp::Product, ReduceOp::Min, ReduceOp::Band] {
        assert_eq!(truth(all), [0, 0, 0, 1]);
    }
    assert_eq!(truth(ReduceOp::Bxor), [0, 1, 1, 0]);
}

#[test]
fn a_custom_operation_gets_plain_aligned_slices_in_the_order_of_the_ranks() {
    let op = CustomOp::new("last difference", |accumulator, next, dtype| {
        assert_eq!(dtype, DType::Complex128);
        assert_eq!(accumulator.as_ptr().align_offset(16), 0);
        assert_eq!(next.as_ptr().align_offset(16), 0);
        for (accumulator, next) in accumulator.iter_mut().zip(next) {
            *accumulator = accumulator.wrapping_mul(3).wrapping_add(*next);
        }
    });
    let reduction = Reduction::new(&ReduceOp::Custom(op), DType::Complex128, 3).unwrap();
    assert!(reduction.must_keep_order());
    let length = if cfg!(miri) { 32 } else { 5 << 16 };
    let sources: Vec<Vec<u8>> =
        (1..4u8).map(|rank| (0..length).map(|i| rank * (i % 7) as u8).collect()).collect();
    let expected: Vec<u8> = (0..length).map(|i| (3 * 3 + 3 * 2 + 3) * (i % 7) as u8).collect();
    assert_eq!(combine(&reduction, &sources, true), expected);
}

#[test]
fn which_operation_works_on_which_dtype() {
    let mut table = String::new();
    for dtype in DType::ALL {
        let ops: Vec<_> =
            ops().iter().filter(|op| supports(op, dtype)).map(|op| op.name().to_owned()).collect();
        table.push_str(&format!("{dtype:16} {}\n", ops.join(" ")));
        for op in self::ops() {
            assert_eq!(Reduction::new(&op, dtype, 2).is_ok(), supports(&op, dtype), "{op} of {dtype}");
        }
    }
    let expected = "\
float32          sum avg product min max premul_sum
float64          sum avg product min max premul_sum
float16          sum avg product min max premul_sum
bfloat16         sum avg product min max premul_sum
float8_e4m3fn    sum avg product min max premul_sum
float8_e5m2      sum avg product min max premul_sum
float8_e4m3fnuz  sum avg product min max premul_sum
float8_e5m2fnuz  sum avg product min max premul_sum
int8             sum product min max band bor bxor
uint8            sum product min max band bor bxor
int16            sum product min max band bor bxor
uint16           sum product min max band bor bxor
int32            sum product min max band bor bxor
uint32           sum product min max band bor bxor
int64            sum product min max band bor bxor
uint64           sum product min max band bor bxor
bool             sum product min max band bor bxor
complex64        sum avg product premul_sum
complex128       sum avg product premul_sum
";
    assert_eq!(table, expected);
}

#[test]
fn a_refusal_says_what_works_instead() {
    let refusal = |op: ReduceOp, dtype: DType| Reduction::new(&op, dtype, 2).unwrap_err().to_string();
    assert_eq!(
        refusal(ReduceOp::Band, DType::F32),
        "`band` does not work on float32; float32 has sum, avg, product, min, max, premul_sum; `band` works on int8, \
         uint8, int16, uint16, int32, uint32, int64, uint64, bool"
    );
    assert_eq!(
        refusal(ReduceOp::Avg, DType::I64),
        "`avg` does not work on int64; int64 has sum, product, min, max, band, bor, bxor; `avg` works on float32, \
         float64, float16, bfloat16, float8_e4m3fn, float8_e5m2, float8_e4m3fnuz, float8_e5m2fnuz, complex64, complex128"
    );
    assert_eq!(
        refusal(ReduceOp::Max, DType::Complex64),
        "`max` does not work on complex64; complex64 has sum, avg, product, premul_sum; `max` works on float32, \
         float64, float16, bfloat16, float8_e4m3fn, float8_e5m2, float8_e4m3fnuz, float8_e5m2fnuz, int8, uint8, int16, \
         uint16, int32, uint32, int64, uint64, bool"
    );
}

#[test]
#[should_panic(expected = "6 bytes are not a multiple of float32")]
fn half_an_element_is_refused() {
    combine(&Reduction::new(&ReduceOp::Sum, DType::F32, 1).unwrap(), &[vec![0; 6]], true);
}

#[test]
#[should_panic(expected = "8 bytes combined into 4")]
fn a_source_of_another_length_is_refused() {
    combine(&Reduction::new(&ReduceOp::Sum, DType::F32, 1).unwrap(), &[vec![0; 4], vec![0; 8]], true);
}

fn combine(reduction: &Reduction, sources: &[Vec<u8>], finish: bool) -> Vec<u8> {
    let mut target = vec![0; sources[0].len()];
    let sources: Vec<_> = sources.iter().map(|source| Bytes::of(source)).collect();
    reduction.combine(Span::of(&mut target), &sources, finish);
    target
}

const KINDS: [DType; 4] = [DType::F8E4M3FN, DType::F8E5M2, DType::F8E4M3FNUZ, DType::F8E5M2FNUZ];

#[test]
fn eight_bit_floats_survive_the_way_to_f32_and_back() {
    for (kind, dtype) in KINDS.into_iter().enumerate() {
        for code in 0..=255u8 {
            let value = float8_value(kind, code);
            let expected = value_of(dtype, code);
            assert!(value == expected || value.is_nan() && expected.is_nan(), "{dtype} {code:#x}: {value}");
            if !value.is_nan() {
                assert_eq!(value.is_sign_negative(), expected.is_sign_negative(), "{dtype} {code:#x}");
                assert_eq!(code_of(kind, value), code, "{dtype}");
            }
        }
    }
}

/// The file is written by `data/float8.py`, which says what is in it.
#[test]
fn eight_bit_floats_are_converted_as_pytorch_converts_them() {
    for line in include_str!("data/float8.txt").lines().filter(|line| !line.starts_with('#')) {
        let words: Vec<&str> = line.split(' ').collect();
        let bits = |word: &str| u32::from_str_radix(word, 16).unwrap();
        let kind = || KINDS.iter().position(|dtype| dtype.name() == words[1]).unwrap();
        match words[0] {
            "values" => {
                for (code, word) in words[2..].iter().enumerate() {
                    let value = float8_value(kind(), code as u8);
                    let is_same = if *word == "nan" { value.is_nan() } else { value.to_bits() == bits(word) };
                    assert!(is_same, "{} {code:#x}: {value}, not {word}", words[1]);
                }
            }
            "single" => {
                let value = f32::from_bits(bits(words[1]));
                for (kind, word) in words[2..].iter().enumerate() {
                    assert_eq!(u32::from(code_of(kind, value)), bits(word), "{} of {value:e}", KINDS[kind]);
                }
            }
            "halves" if cfg!(miri) => {}
            "halves" => {
                let halves = (0..=u16::MAX).map(|bits| f16::from_bits(bits).to_f32());
                let codes = halves.map(|value| if value.is_nan() { 0 } else { code_of(kind(), value) });
                let hash = codes.fold(0xcbf2_9ce4_8422_2325u64, |hash, code| {
                    (hash ^ u64::from(code)).wrapping_mul(0x0100_0000_01b3)
                });
                assert_eq!(format!("{hash:016x}"), words[2], "{}", words[1]);
            }
            other => panic!("no such line: {other}"),
        }
    }
}
