//! Stores that are Python objects: subclasses of `tenfold.Store` written by users, and PyTorch's own.
//!
//! Anything with c10d's methods is a store here. Each request becomes the call of one method; what the object does not
//! have, or says that it cannot do, is `unsupported`, and `tenfold-store` takes c10d's way around it.
//!
//! What a subclass of ours inherits is not called: it would only come back here. It goes to the store inside, if the subclass
//! is one of a `HashStore` or the like, and is otherwise what the object does not have.

use std::net::{SocketAddr, ToSocketAddrs as _};
use std::sync::Arc;
use std::time::Duration;

use pyo3::PyTypeInfo;
use pyo3::exceptions::{PyNotImplementedError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDelta, PyString, PyTuple};
use tenfold_store::{Deadline, ErrorKind, Fault, Operation, Request, Response, Store, Value};

use crate::store::{self, Text};
use crate::waiting;

/// Stores that wrap each other at most.
const WRAPPED_MAX: usize = 16;

/// A Python object as a store.
pub(crate) struct ForeignStore {
    object: Py<PyAny>,
    /// For what a subclass of one of our stores has not overridden.
    inside: Option<Arc<dyn Store>>,
    /// What the caller is the object's own method for.
    without: Option<Operation>,
}

impl ForeignStore {
    pub(crate) fn new(object: &Bound<'_, PyAny>) -> Self {
        ForeignStore { object: object.clone().unbind(), inside: store::inside(object), without: None }
    }

    /// The other methods of an object that has been asked to do `operation` and does not know how.
    pub(crate) fn without(object: &Bound<'_, PyAny>, operation: Operation) -> Self {
        ForeignStore { without: Some(operation), ..ForeignStore::new(object) }
    }

    /// The object's own method for an operation.
    fn method<'py>(
        &self,
        object: &Bound<'py, PyAny>,
        operation: Operation,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let name = operation.name();
        if !object.is_instance_of::<store::Store>() {
            return object.getattr_opt(name);
        }
        let inherited = store::Store::type_object(object.py()).getattr(name)?;
        if self.without != Some(operation) && !object.get_type().getattr(name)?.is(&inherited) {
            return object.getattr(name).map(Some);
        }
        match operation {
            // A store that was written for c10d has these under their C++ names.
            Operation::Delete => object.getattr_opt("deleteKey"),
            Operation::NumKeys => object.getattr_opt("getNumKeys"),
            _ => Ok(None),
        }
    }
}

impl Store for ForeignStore {
    fn call(&self, request: Request<'_>, deadline: Deadline) -> Result<Response, Fault> {
        let operation = request.operation();
        let served = Python::attach(|py| {
            let object = self.object.bind(py);
            let method = self.method(object, operation).map_err(|error| fault(py, operation, error))?;
            let Some(method) = method else { return Ok(None) };
            let check = || self.method(object, Operation::Check);
            let response = serve(&method, check, &request, deadline);
            response.map(Some).map_err(|error| fault(py, operation, error))
        })?;
        match (served, &self.inside) {
            (Some(response), _) => Ok(response),
            (None, Some(inside)) => inside.call(request, deadline),
            (None, None) => Err(Fault::unsupported(operation.name())),
        }
    }

    fn name(&self) -> String {
        let named = |py: Python<'_>| Ok::<_, PyErr>(self.object.bind(py).get_type().name()?.to_string());
        Python::attach(named)
            .map_or_else(|_| "a Python object".into(), |kind| format!("the Python object {kind}"))
    }

    /// Of the store itself or of one that it wraps, as PyTorch's `PrefixStore` wraps its `TCPStore`.
    fn address(&self) -> Option<SocketAddr> {
        let asked = |py: Python<'_>| -> Option<(String, u16)> {
            let mut object = self.object.bind(py).clone();
            for _ in 0..WRAPPED_MAX {
                let host = object.getattr("host").and_then(|host| host.extract::<String>());
                let port = object.getattr("port").and_then(|port| port.extract::<u16>());
                if let (Ok(host), Ok(port)) = (host, port) {
                    return Some((host, port));
                }
                object = object.getattr("underlying_store").ok().filter(|inner| !inner.is_none())?;
            }
            None
        };
        match Python::attach(asked) {
            // Looked up without the GIL: it may take seconds.
            Some((host, port)) => (host.as_str(), port).to_socket_addrs().ok()?.next(),
            None => self.inside.as_ref()?.address(),
        }
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

    fn duplicate(&self) -> Result<Arc<dyn Store>, Fault> {
        let cloned = Python::attach(|py| {
            let clone = self.object.bind(py).call_method0("clone")?;
            store::from_python(&clone)
        });
        cloned.map_err(|error| {
            Python::attach(|py| Fault::unsupported("clone").hint(error.value(py).to_string()))
        })
    }
}

/// Calls one method. `check` finds the object's own, because c10d's `get` waits for what is not there, and here it must not.
fn serve<'py>(
    method: &Bound<'py, PyAny>,
    check: impl FnOnce() -> PyResult<Option<Bound<'py, PyAny>>>,
    request: &Request<'_>,
    deadline: Deadline,
) -> PyResult<Response> {
    let py = method.py();
    Ok(match request {
        Request::Append { key, value } | Request::QueuePush { key, value } | Request::Set { key, value } => {
            method.call1((text(py, key), bytes(py, value)))?;
            Response::Done
        }
        Request::Add { key, delta } => Response::Number(method.call1((text(py, key), delta))?.extract()?),
        Request::Barrier { key, world } => {
            match deadline.left() {
                Some(left) => method.call1((text(py, key), world, delta(py, left)?))?,
                None => method.call1((text(py, key), world))?,
            };
            Response::Ready
        }
        Request::Check { keys } => Response::Present(method.call1((texts(py, keys),))?.is_truthy()?),
        Request::CompareSet { key, expected, desired } => {
            let now = method.call1((text(py, key), bytes(py, expected), bytes(py, desired)))?;
            Response::Value(Some(value(&now)?))
        }
        Request::Delete { key } => Response::Deleted(method.call1((text(py, key),))?.is_truthy()?),
        Request::Get { key } => {
            let key = text(py, key);
            let is_there = match check()? {
                Some(check) => check.call1(([&key],))?.is_truthy()?,
                None => true,
            };
            Response::Value(if is_there { Some(value(&method.call1((key,))?)?) } else { None })
        }
        Request::ListKeys => Response::Keys(values(&method.call0()?)?),
        Request::MultiGet { keys } => {
            let found = values(&method.call1((texts(py, keys),))?)?;
            Response::Values(found.into_iter().map(Some).collect())
        }
        Request::MultiSet { pairs } => {
            let (keys, values): (Vec<_>, Vec<_>) =
                pairs.iter().map(|(key, value)| (text(py, key), bytes(py, value))).unzip();
            method.call1((keys, values))?;
            Response::Done
        }
        Request::NumKeys => Response::Number(method.call0()?.extract()?),
        Request::QueueLen { key } => Response::Number(method.call1((text(py, key),))?.extract()?),
        Request::QueuePop { key } => {
            Response::Popped(Some((value(&method.call1((text(py, key), false))?)?, 1)))
        }
        Request::Wait { keys } => {
            let keys = texts(py, keys);
            match deadline.left() {
                Some(left) if takes(method, 2)? => method.call1((keys, delta(py, left)?))?,
                _ => method.call1((keys,))?,
            };
            Response::Ready
        }
        _ => return Err(PyNotImplementedError::new_err("this operation")),
    })
}

/// Can a method be called with so many arguments? One that does not tell, because it is not written in Python, can.
fn takes(method: &Bound<'_, PyAny>, arguments: usize) -> PyResult<bool> {
    let py = method.py();
    let Ok(signature) = py.import("inspect")?.call_method1("signature", (method,)) else { return Ok(true) };
    let nothing = PyTuple::new(py, (0..arguments).map(|_| py.None()).collect::<Vec<_>>())?;
    match signature.call_method1("bind", nothing) {
        Ok(_) => Ok(true),
        Err(error) if error.is_instance_of::<PyTypeError>(py) => Ok(false),
        Err(error) => Err(error),
    }
}

/// c10d's stores take keys as text. A key that is not valid text is passed as bytes.
fn text<'py>(py: Python<'py>, key: &[u8]) -> Bound<'py, PyAny> {
    match std::str::from_utf8(key) {
        Ok(key) => PyString::new(py, key).into_any(),
        Err(_) => PyBytes::new(py, key).into_any(),
    }
}

fn texts<'py>(py: Python<'py>, keys: &[tenfold_store::Bytes<'_>]) -> Vec<Bound<'py, PyAny>> {
    keys.iter().map(|key| text(py, key)).collect()
}

fn bytes<'py>(py: Python<'py>, value: &[u8]) -> Bound<'py, PyBytes> {
    PyBytes::new(py, value)
}

fn value(object: &Bound<'_, PyAny>) -> PyResult<Value> {
    Ok(Value::from(object.extract::<Text>()?.as_ref()))
}

fn values(list: &Bound<'_, PyAny>) -> PyResult<Vec<Value>> {
    list.try_iter()?.map(|item| value(&item?)).collect()
}

/// PyTorch's waits count in milliseconds, and zero means without limit.
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

/// What an exception of the object means. A Python program that waits for the outcome gets the exception itself.
fn fault(py: Python<'_>, operation: Operation, error: PyErr) -> Fault {
    let text = error.value(py).str().map_or_else(|_| error.to_string(), |text| text.to_string());
    // What a store that was written in Python for PyTorch leaves out, PyTorch calls a pure virtual function.
    if error.is_instance_of::<PyNotImplementedError>(py) || text.contains("call pure virtual function") {
        return Fault::unsupported(operation.name());
    }
    let kind = error.get_type(py).name().map_or_else(|_| "an exception".to_string(), |kind| kind.to_string());
    let waits = matches!(operation, Operation::Wait | Operation::Barrier);
    waiting::raise(error);
    // PyTorch's stores say it in words, of which only these two have stayed the same.
    let lower = text.to_lowercase();
    if waits && (lower.contains("timeout") || lower.contains("timed out")) {
        return Fault::timeout(text.lines().next().unwrap_or("timed out").to_string());
    }
    if operation == Operation::QueuePop && lower.contains("empty") {
        return Fault::new(ErrorKind::QueueEmpty, "queue is empty");
    }
    Fault::new(ErrorKind::Lost, format!("the Python store raised {kind}: {text}"))
}
