//! The command `tenfold`, for the package's entry point.

use std::ffi::OsString;

use pyo3::prelude::*;

/// Does what the words after `tenfold` say, and returns the exit code. `python` is the interpreter, which starts this same
/// command as its module `tenfold`.
#[pyfunction]
pub(crate) fn command(py: Python<'_>, words: Vec<OsString>, python: OsString) -> u8 {
    py.detach(|| tenfold_cli::main(words, tenfold_cli::Program::in_python(python)))
}
