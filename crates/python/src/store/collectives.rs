//! Small collectives over a store, as PyTorch had them before 2.15.

use std::time::Duration;

use pyo3::exceptions::{PyNotImplementedError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use tenfold_store::{DEFAULT_TIMEOUT, StoreCollectives as Ranks, Value};

use super::{Text, bytes, from_python};
use crate::waiting::calling;

/// Base class of collectives for control data. Each call wants a key that was not used before.
#[pyclass(module = "tenfold._tenfold", name = "_ControlCollectives", subclass, frozen)]
pub(crate) struct ControlCollectives {
    ranks: Option<Ranks>,
}

impl ControlCollectives {
    fn ranks(&self) -> PyResult<&Ranks> {
        let missing = || PyNotImplementedError::new_err("_ControlCollectives is the base of others");
        self.ranks.as_ref().ok_or_else(missing)
    }
}

fn list<'py>(py: Python<'py>, values: &[Value]) -> Vec<Bound<'py, PyBytes>> {
    values.iter().map(|value| bytes(py, value)).collect()
}

#[pymethods]
impl ControlCollectives {
    /// Waits until every rank has come. Without `block` it only says that this one has.
    #[pyo3(signature = (key, timeout=DEFAULT_TIMEOUT, block=true))]
    fn barrier(&self, py: Python<'_>, key: Text, timeout: Duration, block: bool) -> PyResult<()> {
        let ranks = self.ranks()?;
        calling(py, || if block { ranks.barrier(key, timeout) } else { ranks.arrive(key, timeout) })
    }

    /// The sum of the numbers of all ranks.
    #[pyo3(signature = (key, data, timeout=DEFAULT_TIMEOUT))]
    fn all_sum(&self, py: Python<'_>, key: Text, data: i64, timeout: Duration) -> PyResult<i64> {
        let ranks = self.ranks()?;
        calling(py, || ranks.all_sum(key, data, timeout))
    }

    /// Gives `data` to every rank that calls `broadcast_recv`.
    #[pyo3(signature = (key, data, timeout=DEFAULT_TIMEOUT))]
    fn broadcast_send(&self, py: Python<'_>, key: Text, data: Text, timeout: Duration) -> PyResult<()> {
        let ranks = self.ranks()?;
        calling(py, || ranks.broadcast_send(key, data, timeout))
    }

    /// What the sender gave.
    #[pyo3(signature = (key, timeout=DEFAULT_TIMEOUT))]
    fn broadcast_recv<'py>(
        &self,
        py: Python<'py>,
        key: Text,
        timeout: Duration,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let ranks = self.ranks()?;
        let value = calling(py, || ranks.broadcast_recv(key, timeout))?;
        Ok(bytes(py, &value))
    }

    /// Gives this rank's `data` to the rank that calls `gather_recv`.
    #[pyo3(signature = (key, data, timeout=DEFAULT_TIMEOUT))]
    fn gather_send(&self, py: Python<'_>, key: Text, data: Text, timeout: Duration) -> PyResult<()> {
        let ranks = self.ranks()?;
        calling(py, || ranks.gather_send(key, data, timeout))
    }

    /// The data of all ranks, by rank, including this rank's own.
    #[pyo3(signature = (key, data, timeout=DEFAULT_TIMEOUT))]
    fn gather_recv<'py>(
        &self,
        py: Python<'py>,
        key: Text,
        data: Text,
        timeout: Duration,
    ) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let ranks = self.ranks()?;
        let values = calling(py, || ranks.gather_recv(key, data, timeout))?;
        Ok(list(py, &values))
    }

    /// Gives each rank its item of `data`, and returns this rank's own.
    #[pyo3(signature = (key, data, timeout=DEFAULT_TIMEOUT))]
    fn scatter_send<'py>(
        &self,
        py: Python<'py>,
        key: Text,
        data: Vec<Text>,
        timeout: Duration,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let ranks = self.ranks()?;
        let value = calling(py, || ranks.scatter_send(key, &data, timeout))?;
        Ok(bytes(py, &value))
    }

    /// This rank's item.
    #[pyo3(signature = (key, timeout=DEFAULT_TIMEOUT))]
    fn scatter_recv<'py>(
        &self,
        py: Python<'py>,
        key: Text,
        timeout: Duration,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let ranks = self.ranks()?;
        let value = calling(py, || ranks.scatter_recv(key, timeout))?;
        Ok(bytes(py, &value))
    }

    /// The data of all ranks, by rank.
    #[pyo3(signature = (key, data, timeout=DEFAULT_TIMEOUT))]
    fn all_gather<'py>(
        &self,
        py: Python<'py>,
        key: Text,
        data: Text,
        timeout: Duration,
    ) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let ranks = self.ranks()?;
        let values = calling(py, || ranks.all_gather(key, data, timeout))?;
        Ok(list(py, &values))
    }
}

/// Collectives over any store.
///
/// >>> alone = _StoreCollectives(HashStore(), 0, 1)
/// >>> alone.all_sum("sum", 5)
/// 5
/// >>> alone.all_gather("names", "me")
/// [b'me']
#[pyclass(module = "tenfold._tenfold", name = "_StoreCollectives", extends = ControlCollectives, subclass, frozen)]
pub(crate) struct StoreCollectives {}

#[pymethods]
impl StoreCollectives {
    #[new]
    fn new(store: &Bound<'_, PyAny>, rank: usize, world_size: usize) -> PyResult<PyClassInitializer<Self>> {
        if rank >= world_size {
            return Err(PyValueError::new_err(format!("rank {rank} is outside a world of {world_size}")));
        }
        let ranks = Some(Ranks::new(from_python(store)?, rank, world_size));
        Ok(PyClassInitializer::from(ControlCollectives { ranks }).add_subclass(StoreCollectives {}))
    }
}
