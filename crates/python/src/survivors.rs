//! What `Group` does after failures: quorums as Python gives them, and calls that wait for other ranks.
//!
//! The calls block in Rust for as long as other ranks need, so each runs on a thread that Ctrl-C can abandon.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use tenfold::{Options, Quorum};

use crate::exceptions::group_error;
use crate::group::Group;
use crate::waiting;
use crate::work::duration;

/// # Errors
/// If the quorum is neither a number of ranks nor one of the names.
pub(crate) fn with_quorum(
    mut options: Options,
    quorum: Option<&Bound<'_, PyAny>>,
    patience: Option<f64>,
) -> PyResult<Options> {
    if let Some(quorum) = quorum {
        options = options.quorum(read(quorum)?);
    }
    if let Some(time) = patience {
        options = options.patience(duration(time)?);
    }
    Ok(options)
}

fn read(quorum: &Bound<'_, PyAny>) -> PyResult<Quorum> {
    if let Ok(least) = quorum.extract::<usize>() {
        return Ok(Quorum::AtLeast(least));
    }
    match quorum.extract::<&str>() {
        Ok("living") => Ok(Quorum::Living),
        Ok("majority") => Ok(Quorum::Majority),
        Ok("all_reachable") => Ok(Quorum::AllReachable),
        _ => Err(PyValueError::new_err(format!(
            "invalid quorum {}: expected \"living\", \"majority\", \"all_reachable\" or a number of ranks",
            quorum.repr()?
        ))),
    }
}

/// A group that is made from another.
pub(crate) fn made(
    py: Python<'_>,
    group: tenfold::Group,
    make: impl FnOnce(&tenfold::Group) -> tenfold::Result<tenfold::Group> + Send + 'static,
) -> PyResult<Group> {
    let made = waiting::on_a_thread(py, "tenfold-recover", move || make(&group))?;
    Ok(Group { inner: made.map_err(|error| group_error(py, &error))?.into() })
}

pub(crate) fn agreed(py: Python<'_>, group: tenfold::Group, value: u64) -> PyResult<u64> {
    let agreed = waiting::on_a_thread(py, "tenfold-recover", move || group.agree(value))?;
    agreed.map_err(|error| group_error(py, &error))
}
