//! Stores that are Python objects: subclasses of `tenfold.Store` written by users, and PyTorch's own.
//!
//! Anything with c10d's methods is a store here. Each request becomes the call of one method; what the object does not
//! have, or says that it cannot do, is `unsupported`, and `tenfold-store` takes c10d's way around it.

use std::time::Duration;

use pyo3::exceptions::{PyAttributeError, PyNotImplementedError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDelta, PyString};
use tenfold_store::{Deadline, Fault, FaultKind, Operation, Request, Response, Store, Value};

/// A Python object as a store.
pub(crate) struct ForeignStore {
    object: Py<PyAny>,
}

impl ForeignStore {
    pub(crate) fn new(object: &Bound<'_, PyAny>) -> Self {
        ForeignStore { object: object.clone().unbind() }
    }
}

impl Store for ForeignStore {
    fn call(&self, request: Request<'_>, deadline: Deadline) -> Result<Response, Fault> {
        let operation = request.operation();
        Python::attach(|py| {
            serve(self.object.bind(py), request, deadline).map_err(|error| fault(py, operation, &error))
        })
    }

    fn name(&self) -> String {
        let named = |py: Python<'_>| Ok::<_, PyErr>(self.object.bind(py).get_type().name()?.to_string());
        Python::attach(named)
            .map_or_else(|_| "a Python object".into(), |kind| format!("the Python object {kind}"))
    }

    fn timeout(&self) -> Duration {
        let asked = |py: Python<'_>| self.object.bind(py).getattr("timeout")?.extract::<Duration>();
        Python::attach(asked).unwrap_or(tenfold_store::DEFAULT_TIMEOUT)
    }

    fn set_timeout(&self, timeout: Duration) -> bool {
        Python::attach(|py| self.object.bind(py).call_method1("set_timeout", (timeout,)).is_ok())
    }

    fn has_extended_api(&self) -> bool {
        let asked = |py: Python<'_>| self.object.bind(py).call_method0("has_extended_api")?.is_truthy();
        Python::attach(asked).unwrap_or(false)
    }
}

fn serve(store: &Bound<'_, PyAny>, request: Request<'_>, deadline: Deadline) -> PyResult<Response> {
    let py = store.py();
    Ok(match request {
        Request::Append { key, value } => {
            store.call_method1("append", (text(py, &key)?, bytes(py, &value)))?;
            Response::Done
        }
        Request::Add { key, delta } => {
            Response::Number(store.call_method1("add", (text(py, &key)?, delta))?.extract()?)
        }
        Request::Barrier { .. } => return Err(PyNotImplementedError::new_err("barrier")),
        Request::Check { keys } => {
            let keys = texts(py, keys.iter().map(|key| &**key))?;
            Response::Present(store.call_method1("check", (keys,))?.is_truthy()?)
        }
        Request::CompareSet { key, expected, desired } => {
            let value = store
                .call_method1("compare_set", (text(py, &key)?, bytes(py, &expected), bytes(py, &desired)))?;
            Response::Value(Some(self::value(&value)?))
        }
        Request::Delete { key } => {
            Response::Deleted(store.call_method1("delete_key", (text(py, &key)?,))?.is_truthy()?)
        }
        Request::Get { key } => Response::Value(get(store, &key)?),
        Request::ListKeys => {
            let keys = store.call_method0("list_keys")?;
            let keys = keys.try_iter()?.map(|key| value(&key?)).collect::<PyResult<_>>()?;
            Response::Keys(keys)
        }
        Request::MultiGet { keys } => {
            let keys = texts(py, keys.iter().map(|key| &**key))?;
            let values = store.call_method1("multi_get", (keys,))?;
            let values =
                values.try_iter()?.map(|value| self::value(&value?).map(Some)).collect::<PyResult<_>>()?;
            Response::Values(values)
        }
        Request::MultiSet { pairs } => {
            let keys = texts(py, pairs.iter().map(|(key, _)| &**key))?;
            let values: Vec<_> = pairs.iter().map(|(_, value)| bytes(py, value)).collect();
            store.call_method1("multi_set", (keys, values))?;
            Response::Done
        }
        Request::NumKeys => Response::Number(store.call_method0("num_keys")?.extract()?),
        Request::QueueLen { key } => {
            Response::Number(store.call_method1("queue_len", (text(py, &key)?,))?.extract()?)
        }
        Request::QueuePop { key } => {
            let popped = store.call_method1("queue_pop", (text(py, &key)?, false))?;
            Response::Popped(Some((value(&popped)?, 1)))
        }
        Request::QueuePush { key, value } => {
            store.call_method1("queue_push", (text(py, &key)?, bytes(py, &value)))?;
            Response::Done
        }
        Request::Set { key, value } => {
            store.call_method1("set", (text(py, &key)?, bytes(py, &value)))?;
            Response::Done
        }
        Request::Wait { keys } => {
            let keys = texts(py, keys.iter().map(|key| &**key))?;
            match deadline.left() {
                Some(left) => store.call_method1("wait", (keys, delta(py, left)?))?,
                None => store.call_method1("wait", (keys,))?,
            };
            Response::Ready
        }
        _ => return Err(PyNotImplementedError::new_err("this operation")),
    })
}

/// Without waiting: c10d's `get` waits for a key that is not there.
fn get(store: &Bound<'_, PyAny>, key: &[u8]) -> PyResult<Option<Value>> {
    let py = store.py();
    let key = text(py, key)?;
    if !store.call_method1("check", ([&key],))?.is_truthy()? {
        return Ok(None);
    }
    value(&store.call_method1("get", (key,))?).map(Some)
}

/// c10d's stores take keys as text.
fn text<'py>(py: Python<'py>, key: &[u8]) -> PyResult<Bound<'py, PyString>> {
    let key = std::str::from_utf8(key).map_err(|error| PyErr::from(std::io::Error::other(error)))?;
    Ok(PyString::new(py, key))
}

fn texts<'py, 'a>(
    py: Python<'py>,
    keys: impl Iterator<Item = &'a [u8]>,
) -> PyResult<Vec<Bound<'py, PyString>>> {
    keys.map(|key| text(py, key)).collect()
}

fn bytes<'py>(py: Python<'py>, value: &[u8]) -> Bound<'py, PyBytes> {
    PyBytes::new(py, value)
}

/// Bytes, or text as UTF-8.
fn value(object: &Bound<'_, PyAny>) -> PyResult<Value> {
    if let Ok(bytes) = object.cast::<PyBytes>() {
        return Ok(Value::from(bytes.as_bytes()));
    }
    Ok(Value::from(object.extract::<String>()?.as_bytes()))
}

/// PyTorch's waits count in milliseconds, and zero means for ever.
fn delta(py: Python<'_>, left: Duration) -> PyResult<Bound<'_, PyDelta>> {
    const LONGEST: Duration = Duration::from_secs(10 * 365 * 24 * 3600);
    let left = left.clamp(Duration::from_millis(1), LONGEST);
    PyDelta::new(
        py,
        (left.as_secs() / 86_400) as i32,
        (left.as_secs() % 86_400) as i32,
        left.subsec_micros() as i32,
        true,
    )
}

/// What an exception of the object means.
fn fault(py: Python<'_>, operation: Operation, error: &PyErr) -> Fault {
    if error.is_instance_of::<PyNotImplementedError>(py) || error.is_instance_of::<PyAttributeError>(py) {
        return Fault::unsupported(operation.name());
    }
    let text = error.value(py).str().map_or_else(|_| error.to_string(), |text| text.to_string());
    // PyTorch's stores say it in words, of which only these two have stayed the same.
    let lower = text.to_lowercase();
    if operation == Operation::Wait && (lower.contains("timeout") || lower.contains("timed out")) {
        return Fault::timeout(text.lines().next().unwrap_or("the time is up").to_string());
    }
    if operation == Operation::QueuePop && lower.contains("empty") {
        return Fault::new(FaultKind::QueueEmpty, "queue is empty");
    }
    let kind = error.get_type(py).name().map_or_else(|_| "an exception".to_string(), |kind| kind.to_string());
    Fault::new(FaultKind::Lost, format!("the Python store raised {kind}: {text}"))
}
