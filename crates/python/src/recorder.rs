//! The flight recorder and the metrics, for Python.

use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use tenfold::recorder::{self, CallSite, DumpOptions, Frame};
use tenfold::{OpKind, metrics};

/// Frames that are kept of a stack, as for Rust's.
const FRAMES_MAX: usize = 64;

/// What is not said is as the environment has it.
fn options(collectives: Option<bool>, stacks: Option<bool>, only_active: Option<bool>) -> DumpOptions {
    let mut options = DumpOptions::default();
    options.collectives = collectives.unwrap_or(options.collectives);
    options.stacks = stacks.unwrap_or(options.stacks);
    options.only_active = only_active.unwrap_or(options.only_active);
    options
}

/// The recorder's content as c10d's pickle.
#[pyfunction]
#[pyo3(signature = (collectives=None, stacks=None, only_active=None))]
pub(crate) fn recorder_pickle<'py>(
    py: Python<'py>,
    collectives: Option<bool>,
    stacks: Option<bool>,
    only_active: Option<bool>,
) -> Bound<'py, PyBytes> {
    let options = options(collectives, stacks, only_active);
    PyBytes::new(py, &py.detach(|| recorder::dump_pickle(&options)))
}

/// The recorder's content as c10d's JSON.
#[pyfunction]
#[pyo3(signature = (collectives=None, only_active=None))]
pub(crate) fn recorder_json(py: Python<'_>, collectives: Option<bool>, only_active: Option<bool>) -> String {
    let options = options(collectives, None, only_active);
    py.detach(|| recorder::dump_json(&options))
}

/// Writes the pickle to the file of a rank; its path.
#[pyfunction]
#[pyo3(signature = (rank, collectives=None, stacks=None, only_active=None))]
pub(crate) fn recorder_file(
    py: Python<'_>,
    rank: usize,
    collectives: Option<bool>,
    stacks: Option<bool>,
    only_active: Option<bool>,
) -> PyResult<String> {
    let options = options(collectives, stacks, only_active);
    let written = py.detach(|| recorder::dump_file(rank, &options));
    let path = written.map_err(|error| PyOSError::new_err(error.to_string()))?;
    Ok(path.to_string_lossy().into_owned())
}

/// Returns when no dump of a failed group is being written any more, or when the time for that is up.
#[pyfunction]
pub(crate) fn recorder_wait(py: Python<'_>) {
    py.detach(recorder::wait_until_written);
}

/// Forgets what was recorded so far.
#[pyfunction]
pub(crate) fn recorder_reset() {
    recorder::reset();
}

/// Counts, bytes, durations and waits of every operation of every group, as dictionaries.
#[pyfunction]
pub(crate) fn metrics_snapshot(py: Python<'_>) -> PyResult<Vec<Bound<'_, PyDict>>> {
    let of = |one: metrics::OperationMetrics| {
        let dict = PyDict::new(py);
        dict.set_item("group", &one.group)?;
        dict.set_item("rank", one.rank)?;
        dict.set_item("operation", OpKind::name(one.operation))?;
        dict.set_item("count", one.count)?;
        dict.set_item("failed", one.failed)?;
        dict.set_item("bytes", one.bytes)?;
        dict.set_item("duration", one.duration.as_secs_f64())?;
        dict.set_item("wait", one.wait.as_secs_f64())?;
        dict.set_item("wait_max", one.wait_max.as_secs_f64())?;
        dict.set_item("durations", one.durations.to_vec())?;
        dict.set_item("waits", one.waits.to_vec())?;
        dict.set_item("skew", one.skew.as_secs_f64())?;
        dict.set_item("skew_max", one.skew_max.as_secs_f64())?;
        dict.set_item("skews", one.skews.to_vec())?;
        Ok(dict)
    };
    metrics::snapshot().into_iter().map(of).collect()
}

/// The same as Prometheus text.
#[pyfunction]
pub(crate) fn metrics_prometheus() -> String {
    metrics::prometheus()
}

/// Who comes late in each group, as dictionaries; the latest first.
#[pyfunction]
pub(crate) fn metrics_stragglers(py: Python<'_>) -> PyResult<Vec<Bound<'_, PyDict>>> {
    let of = |one: metrics::Straggler| {
        let dict = PyDict::new(py);
        dict.set_item("group", &one.group)?;
        dict.set_item("seen_by", one.seen_by)?;
        dict.set_item("rank", one.rank)?;
        dict.set_item("samples", one.samples)?;
        dict.set_item("last", one.last)?;
        dict.set_item("mean", one.mean.as_secs_f64())?;
        dict.set_item("max", one.max.as_secs_f64())?;
        Ok(dict)
    };
    metrics::stragglers().into_iter().map(of).collect()
}

/// The same as a table to read.
#[pyfunction]
pub(crate) fn metrics_straggler_report() -> String {
    metrics::straggler_report()
}

/// Calls an operation; with the stack of the Python caller noted, if that is wanted.
pub(crate) fn noted<R: Send>(py: Python<'_>, call: impl FnOnce() -> R + Send) -> PyResult<R> {
    if !recorder::wants_call_sites() {
        return Ok(py.detach(call));
    }
    let site = CallSite { frames: stack(py)?, ..CallSite::default() };
    Ok(py.detach(|| recorder::with_call_site(site, call)))
}

/// The innermost frame first.
fn stack(py: Python<'_>) -> PyResult<Vec<Frame>> {
    let mut frame = py.import("sys")?.call_method0("_getframe")?;
    let mut frames = Vec::new();
    while !frame.is_none() && frames.len() < FRAMES_MAX {
        let code = frame.getattr("f_code")?;
        frames.push(Frame {
            name: code.getattr("co_name")?.extract()?,
            file: code.getattr("co_filename")?.extract()?,
            line: frame.getattr("f_lineno")?.extract::<Option<u32>>()?.unwrap_or(0),
        });
        frame = frame.getattr("f_back")?;
    }
    Ok(frames)
}
