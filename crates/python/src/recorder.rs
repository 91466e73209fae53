//! The flight recorder and the metrics, for Python.

use pyo3::exceptions::PyOSError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyMemoryView};
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
    let bounds: Vec<f64> =
        (0..metrics::BUCKETS).map_while(metrics::bucket_bound).map(|bound| bound.as_secs_f64()).collect();
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
        dict.set_item("bounds", &bounds)?;
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
        dict.set_item("recent", one.recent.as_secs_f64())?;
        Ok(dict)
    };
    metrics::stragglers().into_iter().map(of).collect()
}

/// The same as a table to read.
#[pyfunction]
pub(crate) fn metrics_straggler_report() -> String {
    metrics::straggler_report()
}

/// The shapes of a call's tensors, if they are wanted.
pub(crate) struct Shapes(Option<Box<Sides>>);

/// The shapes of inputs and outputs; `None` for a side with a shape that is unknown.
struct Sides {
    inputs: Option<Vec<Vec<u64>>>,
    outputs: Option<Vec<Vec<u64>>>,
}

impl Shapes {
    #[inline]
    pub(crate) fn of<'a, 'py: 'a>(
        inputs: impl IntoIterator<Item = &'a Bound<'py, PyAny>>,
        outputs: impl IntoIterator<Item = &'a Bound<'py, PyAny>>,
    ) -> Self {
        if !recorder::wants_call_sites() {
            return Shapes(None);
        }
        let inputs = inputs.into_iter().map(shape).collect();
        let outputs = outputs.into_iter().map(shape).collect();
        Shapes(Some(Box::new(Sides { inputs, outputs })))
    }

    /// For what is called without tensors of its own.
    pub(crate) fn unknown() -> Self {
        let wanted = recorder::wants_call_sites();
        Shapes(wanted.then(|| Box::new(Sides { inputs: None, outputs: None })))
    }
}

/// What the object itself calls its shape, or a buffer of it.
fn shape(object: &Bound<'_, PyAny>) -> Option<Vec<u64>> {
    let own = object.getattr(intern!(object.py(), "shape")).and_then(|shape| shape.extract());
    own.or_else(|_| PyMemoryView::from(object)?.getattr("shape")?.extract()).ok()
}

/// Calls an operation; with its shapes and the stack of the Python caller noted, if that is wanted.
pub(crate) fn noted<R: Send>(py: Python<'_>, shapes: Shapes, call: impl FnOnce() -> R + Send) -> PyResult<R> {
    let Shapes(Some(sides)) = shapes else { return Ok(py.detach(call)) };
    let site = CallSite { frames: stack(py)?, input_shapes: sides.inputs, output_shapes: sides.outputs };
    Ok(py.detach(|| recorder::with_call_site(site, call)))
}

/// The innermost frame first, from that which called this package or PyTorch.
fn stack(py: Python<'_>) -> PyResult<Vec<Frame>> {
    let sys = py.import(intern!(py, "sys"))?;
    let modules = sys.getattr(intern!(py, "modules"))?;
    let folder = |module: &str| -> Option<String> {
        let file: String = modules.get_item(module).ok()?.getattr("__file__").ok()?.extract().ok()?;
        Some(file[..=file.rfind('/')?].to_string())
    };
    let libraries: Vec<String> = ["tenfold", "torch"].into_iter().filter_map(folder).collect();
    let is_ours = |file: &str| libraries.iter().any(|library| file.starts_with(library));
    let mut next = sys.call_method0(intern!(py, "_getframe"))?;
    let (mut frames, mut inner): (Vec<Frame>, Vec<Frame>) = Default::default();
    while !next.is_none() && frames.len() < FRAMES_MAX {
        let code = next.getattr(intern!(py, "f_code"))?;
        let frame = Frame {
            name: code.getattr(intern!(py, "co_name"))?.extract()?,
            file: code.getattr(intern!(py, "co_filename"))?.extract()?,
            line: next.getattr(intern!(py, "f_lineno"))?.extract::<Option<u32>>()?.unwrap_or(0),
        };
        let still_inside = frames.is_empty() && is_ours(&frame.file);
        if !still_inside {
            frames.push(frame);
        } else if inner.len() < FRAMES_MAX {
            inner.push(frame);
        }
        next = next.getattr(intern!(py, "f_back"))?;
    }
    Ok(if frames.is_empty() { inner } else { frames }) // the stack of a library's thread has no frames of the user
}
