//! Arguments of operations, as callers in Python give them: reductions, tensors, tags and splits.

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyInt, PyTuple};
use tenfold::error::UnknownOp;
use tenfold::{BufferView, ReduceOp, Tag};

use crate::exceptions::argument;
use crate::tensor::{Access, lend, rows};

type Object<'py> = Bound<'py, PyAny>;

/// An operation as c10d's number, with a factor for PREMUL_SUM, or as its name.
pub(crate) fn reduce_op(op: &Object<'_>) -> PyResult<ReduceOp> {
    if let Ok(code) = op.cast::<PyInt>() {
        let op = match code.extract::<u8>()? {
            0 => ReduceOp::Sum,
            1 => ReduceOp::Avg,
            2 => ReduceOp::Product,
            3 => ReduceOp::Min,
            4 => ReduceOp::Max,
            5 => ReduceOp::Band,
            6 => ReduceOp::Bor,
            7 => ReduceOp::Bxor,
            other => return Err(PyValueError::new_err(format!("there is no reduction number {other}"))),
        };
        return Ok(op);
    }
    if let Ok(pair) = op.cast::<PyTuple>() {
        let (code, factor): (u8, f64) = pair.extract()?;
        if code == 8 {
            return Ok(ReduceOp::PremulSum(factor));
        }
    }
    let Ok(name) = op.extract::<String>() else {
        let message = format!("op must be a ReduceOp or the name of one, not {}", op.get_type().name()?);
        return Err(PyTypeError::new_err(message));
    };
    name.to_lowercase().parse().map_err(|error: UnknownOp| PyValueError::new_err(error.to_string()))
}

pub(crate) fn reduced(object: &Object<'_>, what: &str, access: Access) -> PyResult<BufferView> {
    lend(object, what, access)?.reducible(object, what)
}

pub(crate) fn moved(object: &Object<'_>, what: &str, access: Access) -> PyResult<BufferView> {
    Ok(lend(object, what, access)?.view)
}

/// Every tensor of a list, named by its place.
pub(crate) fn each(
    list: &[Object<'_>],
    what: &str,
    access: Access,
    lend: impl Fn(&Object<'_>, &str, Access) -> PyResult<BufferView>,
) -> PyResult<Vec<BufferView>> {
    list.iter().enumerate().map(|(place, object)| lend(object, &format!("{what}[{place}]"), access)).collect()
}

/// A tag that c10d's protocol can carry; the group refuses those that are its own.
pub(crate) fn checked_tag(py: Python<'_>, tag: i64) -> PyResult<Tag> {
    u32::try_from(tag)
        .map(Tag)
        .map_err(|_| argument(py, format!("tag {tag} is out of range: tags are 32-bit and not negative")))
}

/// Splits in rows, as elements.
pub(crate) fn in_elements(
    object: &Object<'_>,
    what: &str,
    view: &BufferView,
    splits: &[i64],
) -> PyResult<Vec<usize>> {
    if splits.is_empty() {
        return Ok(Vec::new());
    }
    let py = object.py();
    if let Some(split) = splits.iter().find(|split| **split < 0) {
        return Err(argument(py, format!("the split sizes of {what} include {split}, which is negative")));
    }
    let rows = rows(object)?;
    let sum = splits.iter().try_fold(0_i64, |sum, split| sum.checked_add(*split));
    if sum.map(|sum| sum as usize) != Some(rows) {
        let sum = sum.map_or("more than fits".to_string(), |sum| sum.to_string());
        return Err(argument(
            py,
            format!("the split sizes of {what} add up to {sum}, but it has {rows} rows"),
        ));
    }
    let row = view.elements().checked_div(rows).unwrap_or(0);
    Ok(splits.iter().map(|split| *split as usize * row).collect())
}
