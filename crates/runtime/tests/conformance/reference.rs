//! What a reduction must give, computed one element at a time.
//!
//! Integers are computed in i128 and cut off, floats in f32 or f64 in the order of ranks with one rounding to the dtype
//! at the end. Where an algorithm combines in another order, or rounds more often, the result may be off by one rounding for
//! each time it does.

use std::ops::{Add, Div, Mul, Sub};

use tenfold::{DType, ReduceOp};

use super::values::{Format, PERIOD, format_of, part_of};

/// The factor that `rank` gives to a sum with factors.
pub fn factor(rank: usize) -> f64 {
    [0.5, -0.75, 1.25][rank % 3]
}

/// The operation as `rank` calls it: a sum with factors has a factor of its own on every rank.
pub fn as_called(op: &ReduceOp, rank: usize) -> ReduceOp {
    match op {
        ReduceOp::PremulSum(_) => ReduceOp::PremulSum(factor(rank)),
        other => other.clone(),
    }
}

/// How exactly a result must be what the reference says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// Combined once, in the order of ranks: the same bits.
    Bits,
    /// Combined in any order and rounded each time.
    EveryStepRounded,
}

/// Panics unless `actual` is the reduction of the ranks' `inputs`, which may be one period of longer ones.
pub fn check(
    op: &ReduceOp,
    dtype: DType,
    inputs: &[Vec<u8>],
    actual: &[u8],
    precision: Precision,
    what: &str,
) {
    let expected = reduce(op, dtype, inputs);
    let size = dtype.size();
    for (period, actual) in actual.chunks(expected.len().max(1)).enumerate() {
        let expected = &expected[..actual.len()];
        if actual == expected {
            continue;
        }
        for at in (0..expected.len()).step_by(size) {
            let (got, want) = (&actual[at..at + size], &expected[at..at + size]);
            let tolerable =
                || precision == Precision::EveryStepRounded && is_near(op, dtype, inputs, at, got);
            if got != want && !tolerable() {
                let all: Vec<_> = inputs.iter().map(|input| &input[at..at + size]).collect();
                let element = period * PERIOD + at / size;
                panic!(
                    "{what} ({precision:?}): element {element} is {got:02x?}, not {want:02x?}, of {all:02x?}"
                );
            }
        }
    }
}

/// The reduction in one pass over the ranks.
pub fn reduce(op: &ReduceOp, dtype: DType, inputs: &[Vec<u8>]) -> Vec<u8> {
    let size = dtype.size();
    let mut result = vec![0; inputs[0].len()];
    for (at, place) in (0..inputs[0].len()).step_by(size).zip(result.chunks_mut(size)) {
        let elements = inputs.iter().map(|input| &input[at..at + size]);
        match (format_of(part_of(dtype)), dtype) {
            (None, DType::Bool) => place[0] = u8::from(truth(op, elements.map(|bytes| bytes[0] != 0))),
            (None, _) => {
                let value = integer(op, elements.map(|bytes| read_integer(dtype, bytes)));
                place.copy_from_slice(&value.to_le_bytes()[..size]);
            }
            (Some(format), DType::F64 | DType::Complex128) => {
                let value = float(
                    op,
                    elements.enumerate().map(|(rank, bytes)| prepared(op, format, rank, bytes)),
                    |n| n as f64,
                );
                value.write(format, place, |value| value);
            }
            (Some(format), _) => {
                let narrow =
                    |value: Complex<f64>| Complex { re: value.re as f32, im: value.im.map(|im| im as f32) };
                let elements =
                    elements.enumerate().map(|(rank, bytes)| narrow(prepared(op, format, rank, bytes)));
                float(op, elements, |n| n as f32).write(format, place, f64::from);
            }
        }
    }
    result
}

fn truth(op: &ReduceOp, values: impl Iterator<Item = bool>) -> bool {
    let two = |a: bool, b: bool| match op {
        ReduceOp::Sum | ReduceOp::Max | ReduceOp::Bor => a || b,
        ReduceOp::Product | ReduceOp::Min | ReduceOp::Band => a && b,
        _ => a != b,
    };
    values.reduce(two).expect("a group has ranks")
}

fn read_integer(dtype: DType, bytes: &[u8]) -> i128 {
    let mut word = [0; 16];
    word[..bytes.len()].copy_from_slice(bytes);
    let is_signed = matches!(dtype, DType::I8 | DType::I16 | DType::I32 | DType::I64);
    if is_signed && bytes[bytes.len() - 1] & 0x80 != 0 {
        word[bytes.len()..].fill(0xff);
    }
    i128::from_le_bytes(word)
}

fn integer(op: &ReduceOp, values: impl Iterator<Item = i128>) -> i128 {
    let two = |a: i128, b: i128| match op {
        ReduceOp::Sum => a.wrapping_add(b),
        ReduceOp::Product => a.wrapping_mul(b),
        ReduceOp::Min => a.min(b),
        ReduceOp::Max => a.max(b),
        ReduceOp::Band => a & b,
        ReduceOp::Bor => a | b,
        ReduceOp::Bxor => a ^ b,
        other => unreachable!("integers have no {other}"),
    };
    values.reduce(two).expect("a group has ranks")
}

/// A number that may have an imaginary part.
#[derive(Clone, Copy, Debug)]
struct Complex<T> {
    re: T,
    im: Option<T>,
}

trait Real:
    Copy + PartialOrd + Add<Output = Self> + Sub<Output = Self> + Mul<Output = Self> + Div<Output = Self>
{
}
impl Real for f32 {}
impl Real for f64 {}

impl<T: Real> Complex<T> {
    fn each(self, other: Self, two: impl Fn(T, T) -> T) -> Self {
        Complex { re: two(self.re, other.re), im: self.im.zip(other.im).map(|(a, b)| two(a, b)) }
    }

    fn product(self, other: Self) -> Self {
        match (self.im, other.im) {
            (Some(b), Some(d)) => {
                Complex { re: self.re * other.re - b * d, im: Some(self.re * d + b * other.re) }
            }
            _ => self.each(other, |a, b| a * b),
        }
    }

    fn write(self, format: Format, place: &mut [u8], widen: impl Fn(T) -> f64) {
        let (re, im) = place.split_at_mut(if self.im.is_some() { place.len() / 2 } else { place.len() });
        format.write(widen(self.re), re);
        if let Some(value) = self.im {
            format.write(widen(value), im);
        }
    }
}

/// An element as it goes into the reduction: a factor is applied, and rounded, before anything is combined.
fn prepared(op: &ReduceOp, format: Format, rank: usize, bytes: &[u8]) -> Complex<f64> {
    let read = |bytes: &[u8]| {
        let value = format.read(bytes);
        let ReduceOp::PremulSum(_) = op else { return value };
        let mut rounded = [0; 8];
        // The factors are exact in f32, where narrow floats are computed: one rounding is what there is.
        format.write(value * factor(rank), &mut rounded[..bytes.len()]);
        format.read(&rounded[..bytes.len()])
    };
    let half = format.size();
    Complex { re: read(&bytes[..half]), im: (bytes.len() > half).then(|| read(&bytes[half..])) }
}

fn float<T: Real>(
    op: &ReduceOp,
    values: impl ExactSizeIterator<Item = Complex<T>>,
    number: impl Fn(usize) -> T,
) -> Complex<T> {
    let count = number(values.len());
    let is_nan = |value: T| value.partial_cmp(&value).is_none();
    let two = |a: Complex<T>, b: Complex<T>| match op {
        ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PremulSum(_) => a.each(b, |a, b| a + b),
        ReduceOp::Product => a.product(b),
        ReduceOp::Min => a.each(b, |a, b| if is_nan(b) || b < a { b } else { a }),
        ReduceOp::Max => a.each(b, |a, b| if is_nan(b) || b > a { b } else { a }),
        other => unreachable!("floats have no {other}"),
    };
    let value = values.reduce(two).expect("a group has ranks");
    match op {
        ReduceOp::Avg => Complex { re: value.re / count, im: value.im.map(|im| im / count) },
        _ => value,
    }
}

/// Is `actual` what steps in any order may give of the elements at `at`, each of them rounded?
fn is_near(op: &ReduceOp, dtype: DType, inputs: &[Vec<u8>], at: usize, actual: &[u8]) -> bool {
    let Some(format) = format_of(part_of(dtype)) else { return false };
    let elements = || {
        let element =
            |(rank, input): (usize, &Vec<u8>)| prepared(op, format, rank, &input[at..at + dtype.size()]);
        inputs.iter().enumerate().map(element).collect::<Vec<_>>().into_iter()
    };
    let exact = float(op, elements(), |n| n as f64);
    let lengths = elements().map(|element| match op {
        ReduceOp::Product => Complex { re: element.re.hypot(element.im.unwrap_or(0.0)), im: None },
        _ => Complex { re: element.re.abs(), im: element.im.map(f64::abs) },
    });
    let magnitude = float(op, lengths, |n| n as f64);
    // A complex product takes three roundings, and in f64 the reference is not better than what it judges.
    let roundings = inputs.len() + 1;
    let roundings = if dtype.size() > 4 { 4 * roundings } else { roundings };
    let growth = (roundings as f64 * (format.epsilon() / 2.0).ln_1p()).exp_m1();
    let near = |actual: f64, exact: f64, magnitude: f64| {
        let slack = match op {
            ReduceOp::Min | ReduceOp::Max => 0.0, // zeros of both signs are equal
            _ => magnitude * growth + format.smallest() * inputs.len() as f64,
        };
        let within = exact.is_finite() && (actual - exact).abs() <= slack;
        actual == exact || within || (actual.is_nan() && exact.is_nan())
    };
    let (re, im) = actual.split_at(format.size());
    near(format.read(re), exact.re, magnitude.re)
        && exact.im.is_none_or(|exact| near(format.read(im), exact, magnitude.im.unwrap_or(magnitude.re)))
}
