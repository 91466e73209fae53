//! What elements are: the dtypes of PyTorch that collectives carry.
//!
//! A [`DType`] is a name and a size for bytes that arrive from elsewhere; an [`Element`] is a Rust type with the layout
//! of one. Which operation a dtype has is said in `reduce_op`, how it is computed in `reduce`.

use std::fmt;
use std::str::FromStr;

use half::{bf16, f16};
use num_complex::Complex;

use crate::float8::{F8E4M3FN, F8E4M3FNUZ, F8E5M2, F8E5M2FNUZ};

/// The kind of a tensor's elements.
///
/// ```
/// use tenfold_memory::DType;
/// assert_eq!("bfloat16".parse(), Ok(DType::BF16));
/// assert_eq!((DType::BF16.name(), DType::BF16.size()), ("bfloat16", 2));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum DType {
    /// 32-bit float.
    F32,
    /// 64-bit float.
    F64,
    /// 16-bit float of IEEE 754.
    F16,
    /// 16-bit float with the exponent of [`DType::F32`].
    BF16,
    /// 8-bit float with 4 bits of exponent, without infinities.
    F8E4M3FN,
    /// 8-bit float with 5 bits of exponent.
    F8E5M2,
    /// As [`DType::F8E4M3FN`], with one zero and another bias.
    F8E4M3FNUZ,
    /// As [`DType::F8E5M2`], with one zero and another bias, without infinities.
    F8E5M2FNUZ,
    /// 8-bit integer.
    I8,
    /// 8-bit unsigned integer.
    U8,
    /// 16-bit integer.
    I16,
    /// 16-bit unsigned integer.
    U16,
    /// 32-bit integer.
    I32,
    /// 32-bit unsigned integer.
    U32,
    /// 64-bit integer.
    I64,
    /// 64-bit unsigned integer.
    U64,
    /// One byte, 0 or 1.
    Bool,
    /// Two 32-bit floats: real and imaginary part.
    Complex64,
    /// Two 64-bit floats: real and imaginary part.
    Complex128,
}

impl DType {
    /// Every dtype, in the order of its code.
    pub const ALL: [DType; 19] = [
        DType::F32,
        DType::F64,
        DType::F16,
        DType::BF16,
        DType::F8E4M3FN,
        DType::F8E5M2,
        DType::F8E4M3FNUZ,
        DType::F8E5M2FNUZ,
        DType::I8,
        DType::U8,
        DType::I16,
        DType::U16,
        DType::I32,
        DType::U32,
        DType::I64,
        DType::U64,
        DType::Bool,
        DType::Complex64,
        DType::Complex128,
    ];

    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            DType::F8E4M3FN | DType::F8E5M2 | DType::F8E4M3FNUZ | DType::F8E5M2FNUZ => 1,
            DType::I8 | DType::U8 | DType::Bool => 1,
            DType::F16 | DType::BF16 | DType::I16 | DType::U16 => 2,
            DType::F32 | DType::I32 | DType::U32 => 4,
            DType::F64 | DType::I64 | DType::U64 | DType::Complex64 => 8,
            DType::Complex128 => 16,
        }
    }

    /// A float whose largest value is so small that sums of ordinary values overflow.
    pub const fn has_narrow_range(self) -> bool {
        matches!(self, DType::F16 | DType::F8E4M3FN | DType::F8E5M2 | DType::F8E4M3FNUZ | DType::F8E5M2FNUZ)
    }

    /// The name PyTorch gives it, without `torch.`.
    pub const fn name(self) -> &'static str {
        self.names().0
    }

    /// The long name and the short one.
    const fn names(self) -> (&'static str, &'static str) {
        match self {
            DType::F32 => ("float32", "f32"),
            DType::F64 => ("float64", "f64"),
            DType::F16 => ("float16", "f16"),
            DType::BF16 => ("bfloat16", "bf16"),
            DType::F8E4M3FN => ("float8_e4m3fn", "f8e4m3fn"),
            DType::F8E5M2 => ("float8_e5m2", "f8e5m2"),
            DType::F8E4M3FNUZ => ("float8_e4m3fnuz", "f8e4m3fnuz"),
            DType::F8E5M2FNUZ => ("float8_e5m2fnuz", "f8e5m2fnuz"),
            DType::I8 => ("int8", "i8"),
            DType::U8 => ("uint8", "u8"),
            DType::I16 => ("int16", "i16"),
            DType::U16 => ("uint16", "u16"),
            DType::I32 => ("int32", "i32"),
            DType::U32 => ("uint32", "u32"),
            DType::I64 => ("int64", "i64"),
            DType::U64 => ("uint64", "u64"),
            DType::Bool => ("bool", "b8"),
            DType::Complex64 => ("complex64", "c64"),
            DType::Complex128 => ("complex128", "c128"),
        }
    }

    /// The number that stands for it in a message.
    pub const fn code(self) -> u8 {
        self as u8
    }

    /// The dtype a message's number stands for.
    pub fn from_code(code: u8) -> Option<DType> {
        DType::ALL.get(usize::from(code)).copied()
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for DType {
    type Err = UnknownDType;

    /// Takes PyTorch's name and the short one: `bfloat16`, `bf16`.
    fn from_str(name: &str) -> Result<DType, UnknownDType> {
        let named = |dtype: &&DType| dtype.names().0 == name || dtype.names().1 == name;
        DType::ALL.iter().find(named).copied().ok_or_else(|| UnknownDType { name: name.to_owned() })
    }
}

/// A name that no dtype has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownDType {
    name: String,
}

impl fmt::Display for UnknownDType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "there is no dtype `{}`; there are ", self.name)?;
        crate::reduce_op::write_list(f, DType::ALL.iter().map(|dtype| dtype.name()))
    }
}

impl std::error::Error for UnknownDType {}

/// A Rust type that is laid out as the elements of one dtype are.
///
/// ```
/// use tenfold_memory::{DType, Element};
/// assert_eq!((f32::DTYPE, f32::zero()), (DType::F32, 0.0));
/// ```
pub trait Element: Copy + Send + 'static + sealed::Sealed {
    /// The dtype of such elements.
    const DTYPE: DType;

    /// Zero, or `false`.
    fn zero() -> Self {
        // SAFETY: implemented only for the numbers and `bool` below, for which all bits may be zero.
        unsafe { std::mem::zeroed() }
    }
}

mod sealed {
    pub trait Sealed {}
}

macro_rules! elements {
    ($($element:ty => $dtype:ident,)*) => {$(
        impl sealed::Sealed for $element {}
        impl Element for $element {
            const DTYPE: DType = DType::$dtype;
        }
        const _: () = assert!(size_of::<$element>() == DType::$dtype.size());
    )*};
}

elements! {
    f32 => F32,
    f64 => F64,
    f16 => F16,
    bf16 => BF16,
    F8E4M3FN => F8E4M3FN,
    F8E5M2 => F8E5M2,
    F8E4M3FNUZ => F8E4M3FNUZ,
    F8E5M2FNUZ => F8E5M2FNUZ,
    i8 => I8,
    u8 => U8,
    i16 => I16,
    u16 => U16,
    i32 => I32,
    u32 => U32,
    i64 => I64,
    u64 => U64,
    bool => Bool,
    Complex<f32> => Complex64,
    Complex<f64> => Complex128,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_and_names_lead_back_to_their_dtype() {
        for (place, dtype) in DType::ALL.into_iter().enumerate() {
            assert_eq!(usize::from(dtype.code()), place);
            assert_eq!(DType::from_code(dtype.code()), Some(dtype));
            assert_eq!(dtype.name().parse(), Ok(dtype));
            assert_eq!(dtype.names().1.parse(), Ok(dtype));
            assert_eq!(dtype.to_string(), dtype.name());
        }
        assert_eq!(DType::from_code(19), None);
    }

    #[test]
    fn an_unknown_name_is_answered_with_the_known_ones() {
        let refusal = "float".parse::<DType>().unwrap_err().to_string();
        assert_eq!(
            refusal,
            "there is no dtype `float`; there are float32, float64, float16, bfloat16, float8_e4m3fn, float8_e5m2, \
             float8_e4m3fnuz, float8_e5m2fnuz, int8, uint8, int16, uint16, int32, uint32, int64, uint64, bool, \
             complex64, complex128"
        );
    }
}
