//! What ranks put in: elements of any dtype as a function of seed, rank and index, so that every rank knows what every
//! other one has.
//!
//! Floats of 8 and 16 bits are read and written here by arithmetic on their definition (sign × mantissa × 2^exponent), in
//! f64, whose precision is more than enough to round exactly once.

use tenfold::DType;

/// How ordinary the numbers are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spice {
    /// Positive and negative numbers whose sums and products of eight fit any dtype.
    Tame,
    /// Among them NaN and, where the dtype has them, infinities.
    Endless,
    /// Among them also the largest, the smallest, and negative zero: results depend on the order.
    Wild,
}

/// What elements are for: factors lie around one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    Terms,
    Factors,
}

/// A family of elements, of which every rank has its own.
#[derive(Clone, Copy, Debug)]
pub struct Source {
    pub dtype: DType,
    pub spice: Spice,
    pub purpose: Use,
    pub seed: u64,
}

/// Different floats that one source draws from.
const ALPHABET: u64 = 64;

/// Elements repeat after so many, and so do results: a million of them are checked by computing these. A prime, so that
/// what is cut or put in the wrong place never fits by chance.
pub const PERIOD: usize = 4099;

impl Source {
    /// Elements for something that only moves them.
    pub fn moved(dtype: DType, seed: u64) -> Source {
        Source { dtype, spice: Spice::Wild, purpose: Use::Terms, seed }
    }

    /// Bytes of elements `from..from + count` of `rank`.
    pub fn elements(&self, rank: usize, from: usize, count: usize) -> Vec<u8> {
        let alphabet = self.alphabet();
        let bytes_in_all = count * self.dtype.size();
        let mut bytes = Vec::with_capacity(bytes_in_all);
        for index in from..from + count.min(PERIOD) {
            self.push(&mut bytes, rank, index % PERIOD, &alphabet);
        }
        while bytes.len() < bytes_in_all {
            let again = bytes.len().min(bytes_in_all - bytes.len());
            bytes.extend_from_within(..again);
        }
        bytes
    }

    fn push(&self, bytes: &mut Vec<u8>, rank: usize, index: usize, alphabet: &[u8]) {
        let part = part_of(self.dtype);
        let parts = self.dtype.size() / part.size();
        for index in index * parts..(index + 1) * parts {
            let random = mix(self.seed, rank as u64, index as u64);
            match part {
                DType::Bool => bytes.push((random & 1) as u8),
                _ if alphabet.is_empty() => bytes.extend(&random.to_ne_bytes()[..part.size()]),
                _ => {
                    let letter = (random % ALPHABET) as usize * part.size();
                    bytes.extend(&alphabet[letter..letter + part.size()]);
                }
            }
        }
    }

    /// The floats, as bytes one after the other; nothing for dtypes that take any bits.
    fn alphabet(&self) -> Vec<u8> {
        let part = part_of(self.dtype);
        let Some(format) = format_of(part) else { return Vec::new() };
        let special: &[f64] = match self.spice {
            Spice::Tame => &[],
            Spice::Endless if format.infinite() => &[f64::NAN, f64::INFINITY, f64::NEG_INFINITY],
            Spice::Endless => &[f64::NAN],
            Spice::Wild => &[
                f64::NAN,
                f64::INFINITY,
                f64::NEG_INFINITY,
                -0.0,
                0.0,
                format.largest(),
                -format.largest(),
                format.smallest(),
            ],
        };
        let ordinary = |letter: u64| {
            let fraction = (mix(self.seed, u64::MAX, letter) >> 11) as f64 / (1_u64 << 53) as f64;
            let sign = if letter.is_multiple_of(2) { 1.0 } else { -1.0 };
            match self.purpose {
                Use::Terms => sign * 4.0 * fraction,
                Use::Factors => sign * (0.5 + 1.25 * fraction),
            }
        };
        let letters = (0..ALPHABET)
            .map(|letter| special.get(letter as usize).copied().unwrap_or_else(|| ordinary(letter)));
        let mut bytes = vec![0; ALPHABET as usize * part.size()];
        for (value, place) in letters.zip(bytes.chunks_mut(part.size())) {
            format.write(value, place);
        }
        bytes
    }
}

/// A well-mixed number of three (the finalizer of splitmix64, in turn).
fn mix(seed: u64, rank: u64, index: u64) -> u64 {
    let step = |state: u64, next: u64| {
        let mut mixed = state.wrapping_add(next).wrapping_add(0x9e37_79b9_7f4a_7c15);
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    };
    step(step(seed, rank.wrapping_mul(0x1_0000_0001)), index)
}

/// What a dtype consists of: the real type of a complex one, itself otherwise.
pub fn part_of(dtype: DType) -> DType {
    match dtype {
        DType::Complex64 => DType::F32,
        DType::Complex128 => DType::F64,
        other => other,
    }
}

/// A binary float: how many bits its exponent and mantissa have, and what is odd about it.
#[derive(Clone, Copy, Debug)]
pub struct Format {
    size: usize,
    mantissa: u32,
    bias: i32,
    beyond: Beyond,
}

/// What comes after the largest number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Beyond {
    /// Infinity, as IEEE 754 has it.
    Infinity,
    /// Nothing: too large a number becomes the largest. All ones are NaN.
    Nothing,
    /// NaN, whose only code is that of negative zero.
    NegativeZeroIsNan,
}

/// The format of a real float; nothing for other dtypes.
pub fn format_of(dtype: DType) -> Option<Format> {
    let (size, mantissa, bias, beyond) = match dtype {
        DType::F64 => (8, 52, 1023, Beyond::Infinity),
        DType::F32 => (4, 23, 127, Beyond::Infinity),
        DType::F16 => (2, 10, 15, Beyond::Infinity),
        DType::BF16 => (2, 7, 127, Beyond::Infinity),
        DType::F8E4M3FN => (1, 3, 7, Beyond::Nothing),
        DType::F8E5M2 => (1, 2, 15, Beyond::Infinity),
        DType::F8E4M3FNUZ => (1, 3, 8, Beyond::NegativeZeroIsNan),
        DType::F8E5M2FNUZ => (1, 2, 16, Beyond::NegativeZeroIsNan),
        _ => return None,
    };
    Some(Format { size, mantissa, bias, beyond })
}

impl Format {
    fn infinite(&self) -> bool {
        self.beyond == Beyond::Infinity
    }

    /// Bytes.
    pub fn size(&self) -> usize {
        self.size
    }

    /// The distance from one to the next number.
    pub fn epsilon(&self) -> f64 {
        power_of_two(-(self.mantissa as i32))
    }

    pub fn smallest(&self) -> f64 {
        match self.size {
            8 => f64::from_bits(1),
            _ => power_of_two(1 - self.bias - self.mantissa as i32),
        }
    }

    fn largest(&self) -> f64 {
        self.value(self.largest_code())
    }

    /// Codes are magnitudes: the sign is apart.
    fn largest_code(&self) -> u64 {
        let all_ones = (1 << (self.size * 8 - 1)) - 1;
        match self.beyond {
            Beyond::Infinity => all_ones - (1 << self.mantissa),
            Beyond::Nothing => all_ones - 1,
            Beyond::NegativeZeroIsNan => all_ones,
        }
    }

    fn value(&self, code: u64) -> f64 {
        match self.size {
            8 => return f64::from_bits(code),
            4 => return f64::from(f32::from_bits(code as u32)),
            _ => {}
        }
        let (exponent, mantissa) = ((code >> self.mantissa) as i32, code & ((1 << self.mantissa) - 1));
        let implied = u64::from(exponent > 0) << self.mantissa;
        (implied + mantissa) as f64 * power_of_two(exponent.max(1) - self.bias - self.mantissa as i32)
    }

    pub fn read(&self, bytes: &[u8]) -> f64 {
        let mut word = [0; 8];
        word[..self.size].copy_from_slice(bytes);
        let bits = u64::from_le_bytes(word);
        let sign = 1 << (self.size * 8 - 1);
        let code = bits & (sign - 1);
        let magnitude = match self.beyond {
            Beyond::NegativeZeroIsNan if bits == sign => f64::NAN,
            Beyond::Infinity if code == self.largest_code() + 1 => f64::INFINITY,
            _ if code > self.largest_code() => f64::NAN,
            _ => self.value(code),
        };
        if bits & sign != 0 { -magnitude } else { magnitude }
    }

    /// The nearest number, the even one of two as near; every NaN as the same one.
    pub fn write(&self, value: f64, place: &mut [u8]) {
        let sign = 1 << (self.size * 8 - 1);
        let nan = match self.beyond {
            Beyond::Infinity if self.size == 1 => sign - 1, // PyTorch's NaN of float8_e5m2
            Beyond::Infinity => (self.largest_code() + 1) | 1 << (self.mantissa - 1),
            Beyond::Nothing => sign - 1,
            Beyond::NegativeZeroIsNan => sign,
        };
        let signed = |code: u64| if value.is_sign_negative() { code | sign } else { code };
        let bits = match (self.nearest_code(value.abs()), self.beyond) {
            _ if value.is_nan() => nan,
            (code, Beyond::NegativeZeroIsNan) if code > self.largest_code() => nan,
            (0, Beyond::NegativeZeroIsNan) => 0,
            (code, Beyond::Nothing) => signed(code.min(self.largest_code())),
            (code, _) => signed(code.min(self.largest_code() + 1)),
        };
        place.copy_from_slice(&bits.to_le_bytes()[..self.size]);
    }

    /// As if there were no largest number.
    fn nearest_code(&self, magnitude: f64) -> u64 {
        match self.size {
            8 => return magnitude.to_bits(),
            4 => return u64::from((magnitude as f32).to_bits()),
            _ => {}
        }
        if !magnitude.is_finite() {
            return self.largest_code() + 1;
        }
        let lowest = 1 - self.bias;
        let exponent = exponent_of(magnitude).max(lowest);
        let steps = (magnitude * power_of_two(self.mantissa as i32 - exponent)).round_ties_even() as u64;
        // Rounding up to the next power of two carries into the exponent by itself.
        ((exponent - lowest) as u64) * (1 << self.mantissa) + steps
    }
}

/// Of a magnitude as f64 has it; small enough for zero.
fn exponent_of(magnitude: f64) -> i32 {
    (magnitude.to_bits() >> 52) as i32 - 1023
}

/// For exponents that f64 has without being subnormal.
fn power_of_two(exponent: i32) -> f64 {
    f64::from_bits(((1023 + exponent) as u64) << 52)
}
