//! Arguments as Python gives them.

use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::prelude::*;
use pyo3::pybacked::{PyBackedBytes, PyBackedStr};

/// A `str`, as UTF-8, or `bytes`; read in place, also without the interpreter.
pub(crate) enum Text {
    Bytes(PyBackedBytes),
    Str(PyBackedStr),
}

impl AsRef<[u8]> for Text {
    fn as_ref(&self) -> &[u8] {
        match self {
            Text::Bytes(bytes) => bytes,
            Text::Str(text) => text.as_bytes(),
        }
    }
}

impl<'a, 'py> FromPyObject<'a, 'py> for Text {
    type Error = PyErr;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        if object.is_instance_of::<pyo3::types::PyString>() {
            return Ok(Text::Str(object.extract()?));
        }
        match object.extract() {
            Ok(bytes) => Ok(Text::Bytes(bytes)),
            Err(_) => {
                let kind = object.get_type().name()?;
                Err(PyTypeError::new_err(format!("keys and values are str or bytes, not {kind}")))
            }
        }
    }
}

/// A number; one that is too large for its type is, as in c10d, of the wrong type.
pub(crate) struct Fits<T>(pub(crate) T);

impl<'a, 'py, T: FromPyObject<'a, 'py>> FromPyObject<'a, 'py> for Fits<T> {
    type Error = PyErr;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        let py = object.py();
        T::extract(object).map(Fits).map_err(|error| {
            let error: PyErr = error.into();
            match error.is_instance_of::<PyOverflowError>(py) {
                true => PyTypeError::new_err(format!("{} is out of range", &*object)),
                false => error,
            }
        })
    }
}
