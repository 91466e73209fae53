//! What to do with the elements of several ranks, and which dtype can have it done.
//!
//! Names and numbers are those of c10d, so that a message or a command line means the same in both. The arithmetic itself
//! is in `reduce`.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use crate::dtype::DType;

/// How the elements of several ranks become one.
///
/// ```
/// use tenfold_memory::ReduceOp;
/// assert_eq!("sum".parse(), Ok(ReduceOp::Sum));
/// assert_eq!("premul_sum(0.5)".parse(), Ok(ReduceOp::PremulSum(0.5)));
/// ```
#[derive(Clone, Debug, PartialEq)]
pub enum ReduceOp {
    /// The sum.
    Sum,
    /// The sum, divided by the number of ranks.
    Avg,
    /// The product.
    Product,
    /// The smallest; NaN if there is one.
    Min,
    /// The largest; NaN if there is one.
    Max,
    /// Bitwise and, of integers and bools.
    Band,
    /// Bitwise or.
    Bor,
    /// Bitwise exclusive or.
    Bxor,
    /// The sum of what each rank has times this factor, which may differ from rank to rank.
    PremulSum(f64),
    /// A function of the program's own.
    Custom(CustomOp),
}

impl ReduceOp {
    /// The number c10d gives it; 200 for functions of the program's own.
    pub const fn code(&self) -> u8 {
        match self {
            ReduceOp::Sum => 0,
            ReduceOp::Avg => 1,
            ReduceOp::Product => 2,
            ReduceOp::Min => 3,
            ReduceOp::Max => 4,
            ReduceOp::Band => 5,
            ReduceOp::Bor => 6,
            ReduceOp::Bxor => 7,
            ReduceOp::PremulSum(_) => 8,
            ReduceOp::Custom(_) => 200,
        }
    }

    /// Its name, such as `sum`.
    pub fn name(&self) -> &str {
        match self {
            ReduceOp::Sum => "sum",
            ReduceOp::Avg => "avg",
            ReduceOp::Product => "product",
            ReduceOp::Min => "min",
            ReduceOp::Max => "max",
            ReduceOp::Band => "band",
            ReduceOp::Bor => "bor",
            ReduceOp::Bxor => "bxor",
            ReduceOp::PremulSum(_) => "premul_sum",
            ReduceOp::Custom(custom) => &custom.name,
        }
    }
}

/// The built-in operations; the factor is any.
const BUILT_IN: [ReduceOp; 9] = [
    ReduceOp::Sum,
    ReduceOp::Avg,
    ReduceOp::Product,
    ReduceOp::Min,
    ReduceOp::Max,
    ReduceOp::Band,
    ReduceOp::Bor,
    ReduceOp::Bxor,
    ReduceOp::PremulSum(1.0),
];

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ReduceOp::PremulSum(factor) => write!(f, "premul_sum({factor})"),
            _ => f.pad(self.name()),
        }
    }
}

impl FromStr for ReduceOp {
    type Err = UnknownOp;

    /// Takes what `Display` writes of the built-in ones.
    fn from_str(text: &str) -> Result<ReduceOp, UnknownOp> {
        let unknown = || UnknownOp { text: text.to_owned() };
        if let Some(factor) = text.strip_prefix("premul_sum(").and_then(|rest| rest.strip_suffix(')')) {
            return factor.parse().map(ReduceOp::PremulSum).map_err(|_| unknown());
        }
        let named = |op: &&ReduceOp| op.name() == text && !matches!(op, ReduceOp::PremulSum(_));
        BUILT_IN.iter().find(named).cloned().ok_or_else(unknown)
    }
}

/// A text that names no operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownOp {
    text: String,
}

impl fmt::Display for UnknownOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "there is no operation `{}`; there are ", self.text)?;
        let factored = |op: &ReduceOp| matches!(op, ReduceOp::PremulSum(_));
        write_list(f, BUILT_IN.iter().map(|op| if factored(op) { "premul_sum(FACTOR)" } else { op.name() }))
    }
}

impl std::error::Error for UnknownOp {}

/// `accumulator = function(accumulator, next)`, on elements of the dtype.
///
/// It is called for parts of a tensor in any cut, always in the order of the ranks.
pub type CustomFunction = dyn Fn(&mut [u8], &[u8], DType) + Send + Sync;

/// A function of the program's own that makes one element of two.
///
/// ```
/// use tenfold_memory::{CustomOp, ReduceOp};
///
/// let later = CustomOp::new("later", |accumulator, next, _dtype| accumulator.copy_from_slice(next));
/// assert_eq!(ReduceOp::Custom(later).name(), "later"); // the values of the last rank
/// ```
#[derive(Clone)]
pub struct CustomOp {
    name: Arc<str>,
    function: Arc<CustomFunction>,
}

impl CustomOp {
    /// Both slices that `function` gets are whole elements and aligned for any dtype.
    pub fn new(name: &str, function: impl Fn(&mut [u8], &[u8], DType) + Send + Sync + 'static) -> Self {
        CustomOp { name: name.into(), function: Arc::new(function) }
    }

    /// The name that it was given.
    pub fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn apply(&self, accumulator: &mut [u8], next: &[u8], dtype: DType) {
        (self.function)(accumulator, next, dtype);
    }
}

impl fmt::Debug for CustomOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CustomOp").field(&self.name).finish()
    }
}

/// The same function, not one that does the same.
impl PartialEq for CustomOp {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.function, &other.function)
    }
}

/// What an operation needs of a dtype is decided by its family.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Family {
    Float,
    Integer,
    Bool,
    Complex,
}

fn family(dtype: DType) -> Family {
    match dtype {
        DType::F32 | DType::F64 | DType::F16 | DType::BF16 => Family::Float,
        DType::F8E4M3FN | DType::F8E5M2 | DType::F8E4M3FNUZ | DType::F8E5M2FNUZ => Family::Float,
        DType::I8 | DType::U8 | DType::I16 | DType::U16 => Family::Integer,
        DType::I32 | DType::U32 | DType::I64 | DType::U64 => Family::Integer,
        DType::Bool => Family::Bool,
        DType::Complex64 | DType::Complex128 => Family::Complex,
    }
}

/// Whether elements of `dtype` can be reduced with `op`.
pub fn supports(op: &ReduceOp, dtype: DType) -> bool {
    let family = family(dtype);
    match op {
        ReduceOp::Sum | ReduceOp::Product | ReduceOp::Custom(_) => true,
        ReduceOp::Avg | ReduceOp::PremulSum(_) => matches!(family, Family::Float | Family::Complex),
        ReduceOp::Min | ReduceOp::Max => family != Family::Complex,
        ReduceOp::Band | ReduceOp::Bor | ReduceOp::Bxor => matches!(family, Family::Integer | Family::Bool),
    }
}

/// An operation was asked of a dtype that does not have it.
#[derive(Clone, Debug, PartialEq)]
pub struct Unsupported {
    pub(crate) op: ReduceOp,
    pub(crate) dtype: DType,
}

impl Unsupported {
    /// The operation that was asked for.
    pub fn op(&self) -> &ReduceOp {
        &self.op
    }

    /// The dtype that it does not support.
    pub fn dtype(&self) -> DType {
        self.dtype
    }
}

impl fmt::Display for Unsupported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Unsupported { op, dtype } = self;
        let (op_name, dtype_name) = (op.name(), dtype.name());
        write!(f, "`{op_name}` does not work on {dtype_name}; {dtype_name} has ")?;
        write_list(f, BUILT_IN.iter().filter(|op| supports(op, *dtype)).map(ReduceOp::name))?;
        write!(f, "; `{op_name}` works on ")?;
        write_list(f, DType::ALL.iter().filter(|dtype| supports(op, **dtype)).map(|dtype| dtype.name()))
    }
}

impl std::error::Error for Unsupported {}

/// `a, b, c`
pub(crate) fn write_list<'a>(
    f: &mut fmt::Formatter<'_>,
    names: impl Iterator<Item = &'a str>,
) -> fmt::Result {
    for (place, name) in names.enumerate() {
        let separator = if place == 0 { "" } else { ", " };
        write!(f, "{separator}{name}")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_those_of_c10d() {
        let codes: Vec<_> = BUILT_IN.iter().map(|op| (op.name(), op.code())).collect();
        let expected = [
            ("sum", 0),
            ("avg", 1),
            ("product", 2),
            ("min", 3),
            ("max", 4),
            ("band", 5),
            ("bor", 6),
            ("bxor", 7),
            ("premul_sum", 8),
        ];
        assert_eq!(codes, expected);
        assert_eq!(ReduceOp::Custom(CustomOp::new("first", |_, _, _| {})).code(), 200);
    }

    #[test]
    fn what_is_displayed_can_be_parsed() {
        for op in BUILT_IN.into_iter().chain([ReduceOp::PremulSum(-0.125)]) {
            assert_eq!(op.to_string().parse(), Ok(op));
        }
        for text in ["mean", "premul_sum", "premul_sum(x)", "SUM"] {
            assert_eq!(
                text.parse::<ReduceOp>().unwrap_err().to_string(),
                format!(
                    "there is no operation `{text}`; there are sum, avg, product, min, max, band, bor, bxor, \
                     premul_sum(FACTOR)"
                )
            );
        }
    }

    #[test]
    fn a_custom_operation_equals_its_clones_only() {
        let first = CustomOp::new("first", |_, _, _| {});
        assert_eq!(first, first.clone());
        assert_ne!(first, CustomOp::new("first", |_, _, _| {}));
    }
}
