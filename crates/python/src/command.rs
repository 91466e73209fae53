//! The command `tenfold`, for the package's entry point.

use std::ffi::OsString;

use pyo3::prelude::*;

/// Does what the words after `tenfold` say, and returns the exit code. `again` starts this same command.
#[pyfunction]
pub(crate) fn command(py: Python<'_>, words: Vec<OsString>, again: Vec<OsString>) -> u8 {
    let mut again = again.into_iter();
    let program = tenfold_cli::Program::new(again.next().unwrap_or_default(), again);
    py.detach(|| tenfold_cli::main(words, program))
}
