//! What a group does after failures: quorums as Python gives them, calls that wait for other ranks, and `Members`.
//!
//! The calls block in Rust for as long as other ranks need, so each runs on a thread that Ctrl-C can abandon.

#![expect(clippy::too_many_arguments, reason = "Python's keyword arguments")]

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use tenfold::{BufferView, Options, Quorum, Seat};

use crate::exceptions::group_error;
use crate::group::{self, Group};
use crate::waiting;
use crate::work::duration;
use crate::{log, store};

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

/// Copies tensors from ranks that have them to ranks that need them. `progress` is called about ten times per second, and at the end.
pub(crate) fn hand_over(
    py: Python<'_>,
    group: tenfold::Group,
    tensors: Vec<BufferView>,
    from: Vec<usize>,
    to: Vec<usize>,
    progress: Option<Bound<'_, PyAny>>,
) -> PyResult<()> {
    let counts = Arc::new((AtomicU64::new(0), AtomicU64::new(0)));
    let shown = Arc::clone(&counts);
    let move_all = move || {
        group.hand_over(tensors, &from, &to, |done, all| {
            shown.1.store(all, Ordering::Relaxed);
            shown.0.store(done, Ordering::Relaxed);
        })
    };
    let show = || {
        let (done, all) = (counts.0.load(Ordering::Relaxed), counts.1.load(Ordering::Relaxed));
        progress.as_ref().filter(|_| all > 0).map_or(Ok(()), |progress| progress.call1((done, all)).map(drop))
    };
    let outcome = waiting::on_a_thread_showing(py, "tenfold-recover", move_all, show)?;
    outcome.map_err(|error| group_error(py, &error))?;
    show()
}

/// The ranks of a job that outlives the death of some of them.
#[pyclass(module = "tenfold._tenfold", frozen)]
pub(crate) struct Members(Arc<Mutex<tenfold::Members>>);

impl Members {
    fn made(py: Python<'_>, members: tenfold::Result<tenfold::Members>) -> PyResult<Self> {
        let members = members.map_err(|error| group_error(py, &error))?;
        Ok(Members(Arc::new(Mutex::new(members))))
    }

    fn with<R>(&self, look: impl FnOnce(&mut tenfold::Members) -> R) -> R {
        look(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

#[pymethods]
impl Members {
    /// Joins the world that a launcher made; or waits to take the place of a rank that died.
    #[staticmethod]
    #[pyo3(signature = (*, name="default", timeout=None, heartbeat=None, transport=None, deterministic=false, stuck_after=None, on_stuck=None, quorum=None, patience=None))]
    fn from_environment(
        py: Python<'_>,
        name: &str,
        timeout: Option<f64>,
        heartbeat: Option<f64>,
        transport: Option<&str>,
        deterministic: bool,
        stuck_after: Option<f64>,
        on_stuck: Option<&str>,
        quorum: Option<&Bound<'_, PyAny>>,
        patience: Option<f64>,
    ) -> PyResult<Self> {
        log::start()?;
        let options = group::options(name, timeout, heartbeat, transport, deterministic)?;
        let options = group::with_lookout(options, stuck_after, on_stuck)?;
        let options = with_quorum(options, quorum, patience)?;
        let join = move || tenfold::Members::from_environment(options);
        let members = waiting::on_a_thread(py, "tenfold-connect", join)?;
        Members::made(py, members)
    }

    /// The same with a store. If the dead are replaced, others call `join`.
    #[staticmethod]
    #[pyo3(signature = (store, rank, size, *, replaced, name="default", timeout=None))]
    fn connect(
        py: Python<'_>,
        store: &Bound<'_, PyAny>,
        rank: usize,
        size: usize,
        replaced: bool,
        name: &str,
        timeout: Option<f64>,
    ) -> PyResult<Self> {
        log::start()?;
        let store = store::from_python(store)?;
        let options = group::options(name, timeout, None, None, false)?;
        let connect = move || tenfold::Members::connect(store, Seat { rank, size }, options, replaced);
        let members = waiting::on_a_thread(py, "tenfold-connect", connect)?;
        Members::made(py, members)
    }

    /// Waits to take the place of a rank that died: that one, or any.
    #[staticmethod]
    #[pyo3(signature = (store, rank=None, *, name="default", timeout=None))]
    fn join(
        py: Python<'_>,
        store: &Bound<'_, PyAny>,
        rank: Option<usize>,
        name: &str,
        timeout: Option<f64>,
    ) -> PyResult<Self> {
        log::start()?;
        let store = store::from_python(store)?;
        let options = group::options(name, timeout, None, None, false)?;
        let join = move || tenfold::Members::join(store, rank, options);
        let members = waiting::on_a_thread(py, "tenfold-connect", join)?;
        Members::made(py, members)
    }

    /// The group of all members; each recovery makes another.
    fn group(&self) -> Group {
        Group { inner: self.with(|members| members.group().clone()).into() }
    }

    #[getter]
    fn generation(&self) -> u64 {
        self.with(|members| members.generation())
    }

    #[getter]
    fn has_joined(&self) -> bool {
        self.with(|members| members.has_joined())
    }

    #[getter]
    fn local_rank(&self) -> Option<usize> {
        self.with(|members| members.local_rank())
    }

    fn with_state(&self) -> Vec<usize> {
        self.with(|members| members.with_state())
    }

    fn without_state(&self) -> Vec<usize> {
        self.with(|members| members.without_state())
    }

    fn state_is_complete(&self) {
        self.with(tenfold::Members::state_is_complete);
    }

    /// Continues after a failure: the generation, who left, who joined, and the seconds that it took.
    fn recover(&self, py: Python<'_>) -> PyResult<(u64, Vec<usize>, Vec<usize>, f64)> {
        let members = Arc::clone(&self.0);
        let recover = move || members.lock().unwrap_or_else(PoisonError::into_inner).recover();
        let recovered = waiting::on_a_thread(py, "tenfold-recover", recover)?;
        let recovered = recovered.map_err(|error| group_error(py, &error))?;
        let took = recovered.took.as_secs_f64();
        Ok((recovered.generation, recovered.left, recovered.joined, took))
    }
}
