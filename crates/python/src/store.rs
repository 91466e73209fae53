//! c10d's stores: the base class with every method, and what else counts as a store.
//!
//! There is one set of methods, those of [`Store`], over `tenfold-store`'s operations; the classes ([`kinds`], [`tcp`]) only
//! make a store and tell what is special about it. A class written in Python has no store inside: its own methods are the
//! store, and what it leaves out is done c10d's way with those it has (see [`ForeignStore`]).
//!
//! Every call lets go of the interpreter; what waits is heard by Ctrl-C ([`interruptible`]).

mod arguments;
pub(crate) mod collectives;
mod interruptible;
pub(crate) mod kinds;
pub(crate) mod tcp;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use pyo3::exceptions::{PyNotImplementedError, PyRuntimeError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString};
use tenfold_store::{DEFAULT_TIMEOUT, Operation, StoreExt, Value};

use crate::foreign_store::ForeignStore;
use crate::waiting::calling;
pub(crate) use arguments::{Fits, Text};

/// Base class for all stores: keys and values that all ranks of a job see.
///
/// Keys and values may be `str` or `bytes`; values come back as `bytes`. Subclass it to write a store of your own: override `set`,
/// `get`, `add` and `check`, and what else you can do better than the ways around that are taken for the others.
///
/// >>> class Notes(Store):
/// ...     def __init__(self):
/// ...         super().__init__()
/// ...         self.notes = {}
/// ...     def set(self, key, value):
/// ...         self.notes[key] = value
/// ...     def get(self, key):
/// ...         return self.notes[key]
/// ...     def check(self, keys):
/// ...         return all(key in self.notes for key in keys)
/// >>> notes = Notes()
/// >>> PrefixStore("today", notes).multi_set(["a", "b"], ["1", "2"])
/// >>> sorted(notes.notes)
/// ['today/a', 'today/b']
#[pyclass(module = "tenfold._tenfold", subclass, frozen, weakref)]
pub(crate) struct Store {
    /// Nothing in a class written in Python.
    inner: Option<Arc<dyn tenfold_store::Store>>,
    /// Of a store written in Python; others have their own.
    timeout: Mutex<Duration>,
}

impl Store {
    fn around(inner: impl tenfold_store::Store + 'static) -> Self {
        Store { inner: Some(Arc::new(inner)), timeout: Mutex::new(DEFAULT_TIMEOUT) }
    }

    /// The store inside, of which an operation is asked that has no way around it.
    fn inner(slf: &Bound<'_, Self>, operation: Operation) -> PyResult<Arc<dyn tenfold_store::Store>> {
        match &slf.get().inner {
            Some(inner) => Ok(Arc::clone(inner)),
            None => Err(missing(slf, operation.name())),
        }
    }

    /// The store inside, or one made of the object's other methods.
    fn inner_or_own_methods(slf: &Bound<'_, Self>, operation: Operation) -> Arc<dyn tenfold_store::Store> {
        match &slf.get().inner {
            Some(inner) => Arc::clone(inner),
            None => Arc::new(ForeignStore::without(slf.as_any(), operation)),
        }
    }
}

#[cold]
fn missing(slf: &Bound<'_, Store>, method: &str) -> PyErr {
    let kind = slf.get_type().name().map_or_else(|_| "this store".to_string(), |name| name.to_string());
    PyNotImplementedError::new_err(format!("{kind} has no method `{method}`"))
}

fn bytes<'py>(py: Python<'py>, value: &Value) -> Bound<'py, PyBytes> {
    PyBytes::new(py, value)
}

#[pymethods]
impl Store {
    /// For subclasses, which may have arguments of their own.
    #[new]
    #[pyo3(signature = (*_args, **_kwargs))]
    fn new(_args: &Bound<'_, PyAny>, _kwargs: Option<&Bound<'_, PyAny>>) -> Self {
        Store { inner: None, timeout: Mutex::new(DEFAULT_TIMEOUT) }
    }

    /// Writes a key.
    ///
    /// >>> store = HashStore()
    /// >>> store.set("color", "blue")
    /// >>> store.get("color")
    /// b'blue'
    fn set(slf: &Bound<'_, Self>, key: Text, value: Text) -> PyResult<()> {
        let store = Store::inner(slf, Operation::Set)?;
        calling(slf.py(), || store.set(key, value))
    }

    /// Reads a key; waits for one that is not there, up to the store's timeout.
    ///
    /// >>> store = HashStore()
    /// >>> store.set("color", "blue")
    /// >>> store.get("color")
    /// b'blue'
    fn get<'py>(slf: &Bound<'py, Self>, key: Text) -> PyResult<Bound<'py, PyBytes>> {
        let store = Store::inner(slf, Operation::Get)?;
        let value = calling(slf.py(), || store.get(key))?;
        Ok(bytes(slf.py(), &value))
    }

    /// Adds to a counter and returns its new value; a missing counter is 0.
    ///
    /// >>> store = HashStore()
    /// >>> store.add("ranks", 1)
    /// 1
    /// >>> store.add("ranks", 2)
    /// 3
    fn add(slf: &Bound<'_, Self>, key: Text, value: Fits<i64>) -> PyResult<i64> {
        let store = Store::inner(slf, Operation::Add)?;
        calling(slf.py(), || store.add(key, value.0))
    }

    /// Are all keys there? Never waits.
    ///
    /// >>> store = HashStore()
    /// >>> store.set("a", "")
    /// >>> store.check(["a"]), store.check(["a", "b"])
    /// (True, False)
    fn check(slf: &Bound<'_, Self>, keys: Vec<Text>) -> PyResult<bool> {
        let store = Store::inner(slf, Operation::Check)?;
        calling(slf.py(), || store.check(&keys))
    }

    /// Writes `desired_value` if the value is `expected_value`, or if the key is missing and `expected_value` is empty.
    ///
    /// Returns what the key holds now; for a missing key and an expectation that was not empty, `expected_value`.
    ///
    /// >>> store = HashStore()
    /// >>> store.compare_set("leader", "", "rank 3")
    /// b'rank 3'
    /// >>> store.compare_set("leader", "", "rank 5")
    /// b'rank 3'
    fn compare_set<'py>(
        slf: &Bound<'py, Self>,
        key: Text,
        expected_value: Text,
        desired_value: Text,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let store = Store::inner(slf, Operation::CompareSet)?;
        let value = calling(slf.py(), || store.compare_set(key, expected_value, desired_value))?;
        Ok(bytes(slf.py(), &value))
    }

    /// Removes a key; was it there?
    ///
    /// >>> store = HashStore()
    /// >>> store.set("a", "")
    /// >>> store.delete_key("a"), store.delete_key("a")
    /// (True, False)
    fn delete_key(slf: &Bound<'_, Self>, key: Text) -> PyResult<bool> {
        // A store that was written for c10d has it under its C++ name.
        let store = Store::inner_or_own_methods(slf, Operation::Delete);
        calling(slf.py(), || store.delete_key(key))
    }

    /// How many keys there are in the whole store, whatever the prefix, its own included.
    ///
    /// >>> store = HashStore()
    /// >>> store.multi_set(["a", "b"], ["1", "2"])
    /// >>> store.num_keys()
    /// 2
    fn num_keys(slf: &Bound<'_, Self>) -> PyResult<i64> {
        let store = Store::inner_or_own_methods(slf, Operation::NumKeys);
        calling(slf.py(), || store.num_keys())
    }

    /// All keys, in no particular order.
    ///
    /// >>> store = HashStore()
    /// >>> store.set("a", "")
    /// >>> store.list_keys()
    /// ['a']
    fn list_keys<'py>(slf: &Bound<'py, Self>) -> PyResult<Vec<Bound<'py, PyString>>> {
        let store = Store::inner(slf, Operation::ListKeys)?;
        let keys = calling(slf.py(), || store.list_keys())?;
        keys.iter().map(|key| PyString::from_encoded_object(&bytes(slf.py(), key), None, None)).collect()
    }

    /// Waits until all keys are there, up to the timeout, by default the store's.
    ///
    /// >>> from datetime import timedelta
    /// >>> store = HashStore()
    /// >>> store.set("ready", "")
    /// >>> store.wait(["ready"])
    /// >>> store.wait(["ready", "never"], timedelta(milliseconds=10))
    /// Traceback (most recent call last):
    /// ...
    /// tenfold.exceptions.DistStoreTimeoutError: store wait `ready`, `never` at this process failed after ...
    #[pyo3(signature = (keys, timeout=None))]
    fn wait(slf: &Bound<'_, Self>, keys: Vec<Text>, timeout: Option<Duration>) -> PyResult<()> {
        let store = Store::inner_or_own_methods(slf, Operation::Wait);
        calling(slf.py(), || store.wait_for(&keys, timeout.unwrap_or_else(|| store.timeout())))
    }

    /// Adds to the end of a value, creating it if needed.
    ///
    /// >>> store = HashStore()
    /// >>> store.append("word", "po")
    /// >>> store.append("word", "tato")
    /// >>> store.get("word")
    /// b'potato'
    fn append(slf: &Bound<'_, Self>, key: Text, value: Text) -> PyResult<()> {
        let store = Store::inner_or_own_methods(slf, Operation::Append);
        calling(slf.py(), || store.append(key, value))
    }

    /// Reads several keys, waiting for all of them up to the store's timeout.
    ///
    /// >>> store = HashStore()
    /// >>> store.multi_set(["a", "b"], ["1", "2"])
    /// >>> store.multi_get(["b", "a"])
    /// [b'2', b'1']
    fn multi_get<'py>(slf: &Bound<'py, Self>, keys: Vec<Text>) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let store = Store::inner_or_own_methods(slf, Operation::MultiGet);
        let values = calling(slf.py(), || store.multi_get(&keys))?;
        Ok(values.iter().map(|value| bytes(slf.py(), value)).collect())
    }

    /// Writes several keys: all at once if the store `has_extended_api`, otherwise one by one.
    ///
    /// >>> store = HashStore()
    /// >>> store.multi_set(["a", "b"], ["1", "2"])
    fn multi_set(slf: &Bound<'_, Self>, keys: Vec<Text>, values: Vec<Text>) -> PyResult<()> {
        let store = Store::inner_or_own_methods(slf, Operation::MultiSet);
        calling(slf.py(), || store.multi_set(&keys, &values))
    }

    /// Puts an item at the end of a queue.
    ///
    /// >>> store = HashStore()
    /// >>> store.queue_push("jobs", "first")
    /// >>> store.queue_push("jobs", "second")
    /// >>> store.queue_pop("jobs"), store.queue_len("jobs")
    /// (b'first', 1)
    fn queue_push(slf: &Bound<'_, Self>, key: Text, value: Text) -> PyResult<()> {
        let store = Store::inner(slf, Operation::QueuePush)?;
        calling(slf.py(), || store.queue_push(key, value))
    }

    /// Takes the oldest item of a queue; waits for one, unless `block` is false: then an empty queue is an error.
    ///
    /// >>> store = HashStore()
    /// >>> store.queue_pop("jobs", block=False)
    /// Traceback (most recent call last):
    /// ...
    /// tenfold.exceptions.DistQueueEmptyError: store queue_pop `jobs` at this process failed...: queue is empty
    #[pyo3(signature = (key, block=true))]
    fn queue_pop<'py>(slf: &Bound<'py, Self>, key: Text, block: bool) -> PyResult<Bound<'py, PyBytes>> {
        let store = Store::inner(slf, Operation::QueuePop)?;
        let pop = || match block {
            false => store.try_queue_pop(key),
            // A store without queues returns its error here, and not after the timeout.
            true => store.queue_len(&key).and_then(|_| store.queue_pop(&key)),
        };
        let item = calling(slf.py(), pop)?;
        Ok(bytes(slf.py(), &item))
    }

    /// Length of a queue; 0 if no client has pushed to it.
    ///
    /// >>> HashStore().queue_len("jobs")
    /// 0
    fn queue_len(slf: &Bound<'_, Self>, key: Text) -> PyResult<i64> {
        let store = Store::inner(slf, Operation::QueueLen)?;
        calling(slf.py(), || store.queue_len(key))
    }

    /// Waits until `world_size` clients have entered the barrier `key`, up to the timeout, by default the store's. A key works
    /// once: further calls with it return immediately.
    ///
    /// >>> HashStore().barrier("start", 1)
    #[pyo3(signature = (key, world_size, timeout=None))]
    fn barrier(
        slf: &Bound<'_, Self>,
        key: Text,
        world_size: Fits<i64>,
        timeout: Option<Duration>,
    ) -> PyResult<()> {
        let Some(world_size) = usize::try_from(world_size.0).ok().filter(|size| *size > 0) else {
            return Ok(()); // as c10d: does not wait for any client
        };
        let store = Store::inner_or_own_methods(slf, Operation::Barrier);
        let limit = || timeout.unwrap_or_else(|| store.timeout());
        calling(slf.py(), || store.barrier_for(key, world_size, limit()))
    }

    /// Another handle on the same data that can be used while this one waits. A TCPStore opens a connection of its own.
    ///
    /// >>> store = HashStore()
    /// >>> store.clone().set("a", "1")
    /// >>> store.get("a")
    /// b'1'
    fn clone(slf: &Bound<'_, Self>) -> PyResult<Py<Self>> {
        Err(missing(slf, "clone"))
    }

    /// Are `append`, `multi_get` and `multi_set` one step each?
    ///
    /// >>> HashStore().has_extended_api()
    /// True
    fn has_extended_api(&self) -> bool {
        self.inner.as_ref().is_some_and(|inner| inner.has_extended_api())
    }

    /// How long an operation may take; see `set_timeout`.
    ///
    /// >>> HashStore().timeout
    /// datetime.timedelta(seconds=300)
    #[getter]
    fn timeout(&self) -> Duration {
        match &self.inner {
            Some(inner) => inner.timeout(),
            None => *self.timeout.lock().unwrap_or_else(PoisonError::into_inner),
        }
    }

    /// Changes how long an operation may take that is given no other time.
    ///
    /// >>> from datetime import timedelta
    /// >>> store = HashStore()
    /// >>> store.set_timeout(timedelta(seconds=10))
    /// >>> store.timeout
    /// datetime.timedelta(seconds=10)
    fn set_timeout(&self, timeout: Duration) -> PyResult<()> {
        match &self.inner {
            Some(inner) if inner.set_timeout(timeout) => {}
            Some(inner) => {
                let message = format!("the timeout of {} cannot be changed", inner.name());
                return Err(PyNotImplementedError::new_err(message));
            }
            None => *self.timeout.lock().unwrap_or_else(PoisonError::into_inner) = timeout,
        }
        Ok(())
    }

    fn __reduce__(slf: &Bound<'_, Self>) -> PyResult<()> {
        let kind = slf.get_type().name()?;
        let message = format!(
            "cannot pickle or copy a {kind}: another process opens a store of its own, another thread takes a `clone()`"
        );
        Err(PyTypeError::new_err(message))
    }

    fn __repr__(slf: &Bound<'_, Self>) -> PyResult<String> {
        let kind = slf.get_type().name()?;
        Ok(match &slf.get().inner {
            Some(inner) => format!("<{kind} at {}>", inner.name()),
            None => format!("<{kind}>"),
        })
    }
}

/// The store behind a Python object: ours directly, any other by its methods.
pub(crate) fn from_python(object: &Bound<'_, PyAny>) -> PyResult<Arc<dyn tenfold_store::Store>> {
    if let Ok(store) = object.cast::<Store>() {
        // A subclass may have overridden anything.
        return Ok(match &store.get().inner {
            Some(inner) if kinds::is_ours(object) => Arc::clone(inner),
            _ => Arc::new(ForeignStore::new(object)),
        });
    }
    for method in ["set", "get", "add", "check"] {
        if !object.getattr_opt(method)?.is_some_and(|method| method.is_callable()) {
            let kind = object.get_type().name()?;
            let message = format!("a store is expected, not {kind}, which has no method `{method}`");
            return Err(PyTypeError::new_err(message));
        }
    }
    Ok(Arc::new(ForeignStore::new(object)))
}

/// c10d's check of a store that is written in Python: calls it as Rust code does, and looks at what comes back.
#[pyfunction]
#[pyo3(name = "_test_python_store", signature = (store, /))]
pub(crate) fn test_python_store(py: Python<'_>, store: &Bound<'_, PyAny>) -> PyResult<()> {
    let store = from_python(store)?;
    let wrong = calling(py, || {
        store.try_clone()?.set("foo", "bar")?;
        for number in 1..=3 {
            store.add("key", number)?;
        }
        for (number, value) in ["value0", "value1", "value2"].into_iter().enumerate() {
            store.set(format!("key{number}"), value)?;
        }
        for number in 1..=5 {
            store.add("key3", number)?;
        }
        let expected = [
            ("key", "6"),
            ("key0", "value0"),
            ("key1", "value1"),
            ("key2", "value2"),
            ("key3", "15"),
            ("foo", "bar"),
        ];
        for (key, expected) in expected {
            let value = store.get(key)?;
            if &*value != expected.as_bytes() {
                let value = String::from_utf8_lossy(&value).into_owned();
                return Ok(Some(format!("`{key}` is `{value}`, but `{expected}` was written")));
            }
        }
        Ok(None)
    })?;
    match wrong {
        None => Ok(()),
        Some(text) => {
            Err(PyRuntimeError::new_err(format!("the store does not keep what it is given: {text}")))
        }
    }
}

/// The store inside an object of one of our classes, for what a subclass has not overridden.
pub(crate) fn inside(object: &Bound<'_, PyAny>) -> Option<Arc<dyn tenfold_store::Store>> {
    object.cast::<Store>().ok().and_then(|store| store.get().inner.clone())
}
