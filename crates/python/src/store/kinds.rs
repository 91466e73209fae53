//! `HashStore`, `FileStore`, `PrefixStore` and `FakeStore`.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use pyo3::PyTypeInfo;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use tenfold_store::{DEFAULT_TIMEOUT, Deadline, Fault, Request, Response, StoreExt, Value};

use super::interruptible::Sliced;
use super::tcp::TcpStore;
use super::{Store, Text, from_python};
use crate::waiting::calling;

/// Is it exactly one of our classes, and not a subclass?
pub(super) fn is_ours(object: &Bound<'_, PyAny>) -> bool {
    let (py, kind) = (object.py(), object.get_type());
    let ours = [
        TcpStore::type_object(py),
        HashStore::type_object(py),
        FileStore::type_object(py),
        PrefixStore::type_object(py),
        FakeStore::type_object(py),
    ];
    ours.iter().any(|ours| ours.is(&kind))
}

/// A store for the threads of one process.
///
/// >>> store = HashStore()
/// >>> store.set("color", "blue")
/// >>> store.get("color")
/// b'blue'
#[pyclass(module = "tenfold._tenfold", extends = Store, subclass, frozen)]
pub(crate) struct HashStore {}

#[pymethods]
impl HashStore {
    #[new]
    fn new() -> PyClassInitializer<Self> {
        let store = Store::around(Sliced(Arc::new(tenfold_store::HashStore::new())));
        PyClassInitializer::from(store).add_subclass(HashStore {})
    }

    /// This store: any number of threads may use it at the same time.
    fn clone(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }
}

/// A store in a file that all ranks see, on one host or on a shared file system; PyTorch's processes may use it too.
///
/// With a `world_size` the file is removed when so many ranks have left it; with -1 it stays.
///
/// >>> import os, tempfile
/// >>> path = os.path.join(tempfile.mkdtemp(), "rendezvous")
/// >>> store = FileStore(path, 1)
/// >>> store.set("color", "blue")
/// >>> store.get("color")
/// b'blue'
/// >>> del store
/// >>> os.path.exists(path)
/// False
#[pyclass(module = "tenfold._tenfold", extends = Store, subclass, frozen)]
pub(crate) struct FileStore {
    path: PathBuf,
}

#[pymethods]
impl FileStore {
    #[new]
    #[pyo3(signature = (file_name, world_size=-1), text_signature = "(file_name, world_size=-1)")]
    fn new(py: Python<'_>, file_name: PathBuf, world_size: i64) -> PyResult<PyClassInitializer<Self>> {
        crate::log::start()?;
        let world_size = usize::try_from(world_size).ok(); // as c10d: a negative size is not a size
        let store = calling(py, || tenfold_store::FileStore::open(&file_name, world_size))?;
        let base = Store::around(Sliced(Arc::new(store)));
        Ok(PyClassInitializer::from(base).add_subclass(FileStore { path: file_name }))
    }

    fn clone(slf: &Bound<'_, Self>) -> PyResult<Py<Self>> {
        let store = slf.as_super().get().inner.clone().expect("a FileStore has a store inside");
        let base = Store::around(calling(slf.py(), || store.try_clone())?);
        let clone = FileStore { path: slf.get().path.clone() };
        Py::new(slf.py(), PyClassInitializer::from(base).add_subclass(clone))
    }

    /// The file, as it was given.
    #[getter]
    fn path<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        py.import("os")?.call_method1("fspath", (self.path.as_os_str(),))
    }
}

/// The part of a store whose keys begin with `prefix/`. Prefixes nest. The store may be of any kind, also PyTorch's.
///
/// >>> store = HashStore()
/// >>> PrefixStore("group", store).set("color", "blue")
/// >>> store.get("group/color")
/// b'blue'
#[pyclass(module = "tenfold._tenfold", extends = Store, subclass, frozen)]
pub(crate) struct PrefixStore {
    prefix: Vec<u8>,
    underlying: Py<PyAny>,
}

#[pymethods]
impl PrefixStore {
    #[new]
    fn new(prefix: Text, store: &Bound<'_, PyAny>) -> PyResult<PyClassInitializer<Self>> {
        if store.is_none() {
            return Err(PyValueError::new_err("store argument cannot be None"));
        }
        PrefixStore::over(prefix.as_ref(), store)
    }

    /// A part of a clone of the store below.
    fn clone(slf: &Bound<'_, Self>) -> PyResult<Py<Self>> {
        let own = slf.get();
        let below = own.underlying.bind(slf.py()).call_method0("clone")?;
        Py::new(slf.py(), PrefixStore::over(&own.prefix, &below)?)
    }

    /// The store that this is a part of.
    #[getter]
    fn underlying_store(&self, py: Python<'_>) -> Py<PyAny> {
        self.underlying.clone_ref(py)
    }

    /// The store below all prefixes.
    #[getter]
    fn _underlying_non_prefix_store<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let below = self.underlying.bind(py);
        Ok(below.getattr_opt("_underlying_non_prefix_store")?.unwrap_or_else(|| below.clone()))
    }
}

impl PrefixStore {
    fn over(prefix: &[u8], store: &Bound<'_, PyAny>) -> PyResult<PyClassInitializer<Self>> {
        let base = Store::around(tenfold_store::PrefixStore::new(prefix, from_python(store)?));
        let own = PrefixStore { prefix: prefix.to_vec(), underlying: store.clone().unbind() };
        Ok(PyClassInitializer::from(base).add_subclass(own))
    }
}

/// A store that keeps nothing and finds everything, for programs that pretend to have other ranks.
///
/// >>> store = FakeStore()
/// >>> store.set("color", "blue")
/// >>> store.get("color"), store.check(["anything"]), store.add("counter", 5)
/// (b'', True, 5)
#[pyclass(module = "tenfold._tenfold", extends = Store, subclass, frozen)]
pub(crate) struct FakeStore {}

#[pymethods]
impl FakeStore {
    #[new]
    fn new() -> PyClassInitializer<Self> {
        PyClassInitializer::from(Store::around(Nothing::default())).add_subclass(FakeStore {})
    }

    /// This store.
    fn clone(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }
}

struct Nothing {
    timeout: Mutex<Duration>,
}

impl Default for Nothing {
    fn default() -> Self {
        Nothing { timeout: Mutex::new(DEFAULT_TIMEOUT) }
    }
}

impl tenfold_store::Store for Nothing {
    fn call(&self, request: Request<'_>, _: Deadline) -> Result<Response, Fault> {
        Ok(match request {
            Request::MultiSet { .. } | Request::Set { .. } => Response::Done,
            Request::Add { delta, .. } => Response::Number(delta),
            Request::Check { .. } => Response::Present(true),
            Request::Get { .. } => Response::Value(Some(Value::default())),
            Request::Delete { .. } => Response::Deleted(true),
            Request::MultiGet { keys } => Response::Values(vec![Some(Value::default()); keys.len()]),
            Request::NumKeys => Response::Number(0),
            Request::Wait { .. } | Request::Barrier { .. } => Response::Ready,
            other => return Err(Fault::unsupported(other.operation().name())),
        })
    }

    fn name(&self) -> String {
        "nowhere".into()
    }

    fn timeout(&self) -> Duration {
        *self.timeout.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set_timeout(&self, timeout: Duration) -> bool {
        *self.timeout.lock().unwrap_or_else(PoisonError::into_inner) = timeout;
        true
    }
}
