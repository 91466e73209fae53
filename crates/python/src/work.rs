//! `Work`: a handle on an operation; `Completions`: what is notified when one is over.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::PyList;
use tenfold::ErrorKind;
use tenfold_store::Deadline;

use crate::exceptions::wait_error;
use crate::waiting;

/// An operation under way. Its tensors belong to it until it is over.
#[pyclass(module = "tenfold._tenfold", frozen)]
pub(crate) struct Work {
    inner: tenfold::Work,
    tensors: Py<PyList>,
}

impl Work {
    pub(crate) fn new(
        py: Python<'_>,
        inner: tenfold::Work,
        tensors: Vec<Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        Ok(Work { inner, tensors: PyList::new(py, tensors)?.unbind() })
    }
}

/// Waits for an operation without the interpreter.
pub(crate) fn wait(py: Python<'_>, work: &tenfold::Work, limit: Option<Duration>) -> PyResult<()> {
    let until = limit.map(Deadline::after);
    let outcome = waiting::in_slices(py, limit, |slice, last| {
        let outcome = match until {
            Some(until) if last => work.wait_by(until),
            _ => work.wait_for(slice),
        };
        match outcome {
            // Too short a wait, or the operation's own timeout? It may also have ended since: the work knows.
            Err(error) if error.kind() == ErrorKind::Timeout && !last => work.result(),
            outcome => Some(outcome),
        }
    })?;
    outcome.map_err(|error| wait_error(py, &error, limit, work.timeout()))
}

#[pymethods]
impl Work {
    /// Waits until the operation is over; with a timeout in seconds at most so long, and the operation goes on.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        wait(py, &self.inner, timeout.map(duration).transpose()?)?;
        Ok(true)
    }

    /// Is it over, well or not?
    fn is_completed(&self, py: Python<'_>) -> bool {
        py.detach(|| self.inner.is_done())
    }

    /// Is it over, and well?
    fn is_success(&self, py: Python<'_>) -> bool {
        py.detach(|| self.inner.succeeded())
    }

    /// What made it fail, or None.
    fn exception(&self, py: Python<'_>) -> Option<PyErr> {
        self.inner.error().map(|error| wait_error(py, &error, None, self.inner.timeout()))
    }

    /// The tensors it was called with.
    fn tensors(&self, py: Python<'_>) -> Py<PyList> {
        self.tensors.clone_ref(py)
    }

    /// The rank that a receive from any source received from, or None.
    fn source_rank(&self) -> Option<usize> {
        self.inner.source()
    }

    /// Seconds from the call to the end; None while it is under way, or if it was over before the call returned.
    fn duration(&self) -> Option<f64> {
        self.inner.duration().map(|duration| duration.as_secs_f64())
    }

    /// Seconds it may take; None if it was over before the call returned.
    fn timeout(&self) -> Option<f64> {
        self.inner.timeout().map(|timeout| timeout.as_secs_f64())
    }

    /// Which operation of its group it is, counted from 1.
    fn sequence_number(&self) -> u64 {
        self.inner.sequence_number()
    }

    /// The number that c10d's `OpType` gives the operation.
    fn op_type(&self) -> u8 {
        self.inner.kind() as u8
    }

    /// The algorithm that was chosen.
    fn algorithm(&self) -> &'static str {
        self.inner.algorithm()
    }

    /// Gives the operation up, and with it its group, on all ranks.
    fn abort(&self, py: Python<'_>, reason: &str) {
        py.detach(|| self.inner.abort(reason));
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.inner)
    }
}

/// A time in seconds as a caller gave it.
pub(crate) fn duration(seconds: f64) -> PyResult<Duration> {
    if seconds.is_infinite() && seconds > 0.0 {
        return Ok(Duration::MAX);
    }
    Duration::try_from_secs_f64(seconds)
        .map_err(|_| pyo3::exceptions::PyValueError::new_err(format!("invalid timeout of {seconds} seconds")))
}

/// Objects that wait for their operations, handed out again when those are over.
///
/// The engine only writes numbers down here; Python's own threads fetch the objects and do with them what they want.
#[pyclass(module = "tenfold._tenfold", frozen)]
pub(crate) struct Completions {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    arrived: Condvar,
}

#[derive(Default)]
struct State {
    next: u64,
    waiting: HashMap<u64, Py<PyAny>>,
    over: VecDeque<u64>,
    closed: bool,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl Completions {
    #[new]
    fn new() -> Self {
        Completions { shared: Arc::default() }
    }

    /// Hands out `object` once `work` is over.
    fn watch(&self, py: Python<'_>, work: &Work, object: Py<PyAny>) {
        let shared = Arc::clone(&self.shared);
        let number = {
            let mut state = shared.state();
            state.next += 1;
            let number = state.next;
            state.waiting.insert(number, object);
            number
        };
        let tell = move |_: &tenfold::Result<()>| {
            shared.state().over.push_back(number);
            shared.arrived.notify_one();
        };
        py.detach(|| work.inner.notify(tell));
    }

    /// The next object whose operation is over; None once this is closed.
    fn next(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        let shared = &self.shared;
        py.detach(|| {
            let mut state = shared.state();
            loop {
                if state.closed {
                    return None;
                }
                let next = state.over.pop_front();
                if let Some(object) = next.and_then(|number| state.waiting.remove(&number)) {
                    return Some(object);
                }
                state = shared.arrived.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        })
    }

    /// Ends every `next`.
    fn close(&self) {
        self.shared.state().closed = true;
        self.shared.arrived.notify_all();
    }
}
