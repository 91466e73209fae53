//! The same reductions, element by element and as simple as possible.

use super::*;

/// A xorshift generator: tests must not differ from run to run.
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 24
    }
}

/// Elements of which a third are any bits, a third ordinary numbers, and a third those with a story.
pub(super) fn elements(dtype: DType, count: usize, rank: usize) -> Vec<u8> {
    let mut random = Random(0x9e37_79b9 * (rank as u64 + 1));
    let special =
        [0.0, -0.0, f64::NAN, f64::INFINITY, -f64::INFINITY, 1e-40, -1e-7, 1e-310, 448.0, 65504.0, 3e38, 1.0];
    let mut bytes = Vec::new();
    while bytes.len() < count * dtype.size() {
        let ordinary = (random.next() % 2000) as f64 / 64.0 - 15.0;
        let value = if random.next().is_multiple_of(2) {
            ordinary
        } else {
            special[random.next() as usize % special.len()]
        };
        let encoded: Option<Vec<u8>> = match dtype {
            DType::F32 | DType::Complex64 => Some((value as f32).to_ne_bytes().into()),
            DType::F64 | DType::Complex128 => Some(value.to_ne_bytes().into()),
            DType::F16 => Some(f16::from_f64(value).to_ne_bytes().into()),
            DType::BF16 => Some(bf16::from_f64(value).to_ne_bytes().into()),
            _ => None,
        };
        match encoded {
            Some(encoded) if !random.next().is_multiple_of(3) => bytes.extend(encoded),
            Some(encoded) => bytes.extend((0..encoded.len()).map(|_| random.next() as u8)),
            None => bytes.push(random.next() as u8),
        }
    }
    bytes
}

/// What `combine` should do.
pub(super) fn reference(op: &ReduceOp, dtype: DType, sources: &[Vec<u8>], finish: bool) -> Vec<u8> {
    let divides = *op == ReduceOp::Avg && finish;
    if sources.len() == 1 && !divides {
        return sources[0].clone();
    }
    macro_rules! fold {
        ($element:ty, |$bytes:ident| $load:expr, |$a:ident, $b:ident| $combine:expr, |$value:ident| $store:expr) => {{
            let load = |$bytes: &[u8]| $load;
            let size = size_of::<$element>();
            let element = |at: usize| {
                let values = sources.iter().map(|source| load(&source[at..at + size]));
                let $value = values.reduce(|$a, $b| $combine).unwrap();
                $store.to_vec()
            };
            (0..sources[0].len()).step_by(size).flat_map(element).collect()
        }};
    }
    macro_rules! integer {
        ($type:ident) => {
            fold!(
                $type,
                |bytes| $type::from_ne_bytes(bytes.try_into().unwrap()),
                |a, b| match op {
                    ReduceOp::Sum => a.wrapping_add(b),
                    ReduceOp::Product => a.wrapping_mul(b),
                    ReduceOp::Min => a.min(b),
                    ReduceOp::Max => a.max(b),
                    ReduceOp::Band => a & b,
                    ReduceOp::Bor => a | b,
                    ReduceOp::Bxor => a ^ b,
                    _ => unreachable!("refused for integers"),
                },
                |value| value.to_ne_bytes()
            )
        };
    }
    let ranks = if divides { sources.len() as f64 } else { 1.0 };
    match dtype {
        DType::I8 => integer!(i8),
        DType::U8 => integer!(u8),
        DType::I16 => integer!(i16),
        DType::U16 => integer!(u16),
        DType::I32 => integer!(i32),
        DType::U32 => integer!(u32),
        DType::I64 => integer!(i64),
        DType::U64 => integer!(u64),
        DType::Bool => fold!(
            u8,
            |bytes| bytes[0] != 0,
            |a, b| match op {
                ReduceOp::Sum | ReduceOp::Max | ReduceOp::Bor => a || b,
                ReduceOp::Product | ReduceOp::Min | ReduceOp::Band => a && b,
                _ => a != b,
            },
            |value| [u8::from(value)]
        ),
        DType::F64 => fold!(
            f64,
            |bytes| f64::from_ne_bytes(bytes.try_into().unwrap()),
            |a, b| two_f64(op, a, b),
            |value| one_nan_f64(value / ranks).to_ne_bytes()
        ),
        DType::Complex64 => fold!(
            Complex<f32>,
            |bytes| (decode(DType::F32, &bytes[..4]), decode(DType::F32, &bytes[4..])),
            |a, b| match op {
                ReduceOp::Product => (a.0 * b.0 - a.1 * b.1, a.0 * b.1 + a.1 * b.0),
                _ => (a.0 + b.0, a.1 + b.1),
            },
            |value| [encode(DType::F32, value.0 / ranks as f32), encode(DType::F32, value.1 / ranks as f32)]
                .concat()
        ),
        DType::Complex128 => fold!(
            Complex<f64>,
            |bytes| Complex::new(
                f64::from_ne_bytes(bytes[..8].try_into().unwrap()),
                f64::from_ne_bytes(bytes[8..].try_into().unwrap())
            ),
            |a, b| if *op == ReduceOp::Product { a * b } else { a + b },
            |value| [
                one_nan_f64(value.re / ranks).to_ne_bytes(),
                one_nan_f64(value.im / ranks).to_ne_bytes()
            ]
            .concat()
        ),
        _ => {
            let size = dtype.size();
            let element = |at: usize| {
                let values = sources.iter().map(|source| decode(dtype, &source[at..at + size]));
                let value = values.reduce(|a, b| two_f32(op, a, b)).unwrap();
                encode(dtype, value / ranks as f32)
            };
            (0..sources[0].len()).step_by(size).flat_map(element).collect()
        }
    }
}

pub(super) fn scaled(dtype: DType, source: &[u8], factor: f64) -> Vec<u8> {
    match dtype {
        DType::F64 | DType::Complex128 => {
            let scale = |bytes: &[u8]| {
                one_nan_f64(f64::from_ne_bytes(bytes.try_into().unwrap()) * factor).to_ne_bytes()
            };
            source.chunks(8).flat_map(scale).collect()
        }
        DType::Complex64 => scaled(DType::F32, source, factor),
        _ => {
            let scale = |bytes: &[u8]| encode(dtype, decode(dtype, bytes) * factor as f32);
            source.chunks(dtype.size()).flat_map(scale).collect()
        }
    }
}

pub(super) fn two_f32(op: &ReduceOp, a: f32, b: f32) -> f32 {
    match op {
        ReduceOp::Product => a * b,
        ReduceOp::Min | ReduceOp::Max if a.is_nan() || b.is_nan() => f32::NAN,
        ReduceOp::Min => {
            if b < a {
                b
            } else {
                a
            }
        }
        ReduceOp::Max => {
            if b > a {
                b
            } else {
                a
            }
        }
        _ => a + b,
    }
}

pub(super) fn two_f64(op: &ReduceOp, a: f64, b: f64) -> f64 {
    match op {
        ReduceOp::Product => a * b,
        ReduceOp::Min | ReduceOp::Max if a.is_nan() || b.is_nan() => f64::NAN,
        ReduceOp::Min => {
            if b < a {
                b
            } else {
                a
            }
        }
        ReduceOp::Max => {
            if b > a {
                b
            } else {
                a
            }
        }
        _ => a + b,
    }
}

pub(super) fn one_nan_f64(value: f64) -> f64 {
    if value.is_nan() { f64::from_bits(0x7ff8_0000_0000_0000) } else { value }
}

pub(super) fn decode(dtype: DType, bytes: &[u8]) -> f32 {
    match dtype {
        DType::F32 => f32::from_ne_bytes(bytes.try_into().unwrap()),
        DType::F16 => f16::from_ne_bytes(bytes.try_into().unwrap()).to_f32(),
        DType::BF16 => bf16::from_ne_bytes(bytes.try_into().unwrap()).to_f32(),
        _ => value_of(dtype, bytes[0]),
    }
}

pub(super) fn encode(dtype: DType, value: f32) -> Vec<u8> {
    let value = if value.is_nan() { f32::from_bits(0x7fc0_0000) } else { value };
    match dtype {
        DType::F32 => value.to_ne_bytes().into(),
        DType::F16 => f16::from_f32(value).to_ne_bytes().into(),
        DType::BF16 => bf16::from_f32(value).to_ne_bytes().into(),
        _ => vec![nearest(dtype, value)],
    }
}

/// From the definition: sign, exponent, mantissa.
pub(super) fn value_of(dtype: DType, code: u8) -> f32 {
    let (mantissa_bits, bias) = match dtype {
        DType::F8E4M3FN => (3, 7),
        DType::F8E5M2 => (2, 15),
        DType::F8E4M3FNUZ => (3, 8),
        DType::F8E5M2FNUZ => (2, 16),
        _ => unreachable!("not eight bits"),
    };
    match (dtype, code & 0x7f) {
        (DType::F8E4M3FN, 0x7f) | (DType::F8E5M2, 0x7d..) => return f32::NAN,
        (DType::F8E5M2, 0x7c) => return if code == 0x7c { f32::INFINITY } else { -f32::INFINITY },
        (DType::F8E4M3FNUZ | DType::F8E5M2FNUZ, 0) if code == 0x80 => return f32::NAN,
        _ => {}
    }
    let exponent = i32::from((code & 0x7f) >> mantissa_bits);
    let mantissa = f32::from(code & ((1 << mantissa_bits) - 1)) / f32::from(1u8 << mantissa_bits);
    let magnitude = if exponent == 0 {
        mantissa * 2f32.powi(1 - bias)
    } else {
        (1.0 + mantissa) * 2f32.powi(exponent - bias)
    };
    if code & 0x80 != 0 { -magnitude } else { magnitude }
}

/// The code whose value is nearest, by looking at all of them.
pub(super) fn nearest(dtype: DType, value: f32) -> u8 {
    let is_unsigned_zero = matches!(dtype, DType::F8E4M3FNUZ | DType::F8E5M2FNUZ);
    if value.is_nan() {
        return if is_unsigned_zero { 0x80 } else { 0x7f };
    }
    let sign = if value.is_sign_negative() { 0x80 } else { 0 };
    let magnitude = f64::from(value.abs());
    let finite: Vec<(u8, f64)> = (0..0x80u8)
        .map(|code| (code, f64::from(value_of(dtype, code))))
        .filter(|(_, value)| value.is_finite())
        .collect();
    let [.., (_, below), (largest, at)] = finite[..] else { unreachable!("there are finite values") };
    if magnitude >= at + (at - below) / 2.0 && dtype != DType::F8E4M3FN {
        return if is_unsigned_zero { 0x80 } else { sign | 0x7c };
    }
    let distance = |value: f64| (value - magnitude).abs();
    let closer = |a: &(u8, f64), b: &(u8, f64)| {
        distance(a.1).total_cmp(&distance(b.1)).then((a.0 & 1).cmp(&(b.0 & 1)))
    };
    let code = if magnitude > at { largest } else { finite.iter().copied().min_by(closer).unwrap().0 };
    if is_unsigned_zero && code == 0 { 0 } else { sign | code }
}

/// A kind's codes by the library.
pub(super) fn code_of(kind: usize, value: f32) -> u8 {
    match kind {
        0 => F8E4M3FN::from_f32(value).to_bits(),
        1 => F8E5M2::from_f32(value).to_bits(),
        2 => F8E4M3FNUZ::from_f32(value).to_bits(),
        _ => F8E5M2FNUZ::from_f32(value).to_bits(),
    }
}

pub(super) fn float8_value(kind: usize, code: u8) -> f32 {
    match kind {
        0 => F8E4M3FN::from_bits(code).to_f32(),
        1 => F8E5M2::from_bits(code).to_f32(),
        2 => F8E4M3FNUZ::from_bits(code).to_f32(),
        _ => F8E5M2FNUZ::from_bits(code).to_f32(),
    }
}
