//! Keys and values as Python gives them.

use pyo3::exceptions::PyTypeError;
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
