//! Errors of tenfold as Python exceptions.
//!
//! The classes are Python's (`tenfold.exceptions`), so that they can be imported without PyTorch, and so that the plug-in
//! can put PyTorch's own in their place. Here is only what an error says of itself.

use std::time::Duration;

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyDict;
use tenfold_store::ErrorKind;

use crate::phrases::{self, with_words};

static MAKE: PyOnceLock<Py<PyAny>> = PyOnceLock::new();

/// The exception that `tenfold.exceptions` makes of a kind, a text and what else is known.
fn make(py: Python<'_>, kind: &str, text: String, fields: &Bound<'_, PyDict>) -> PyErr {
    let make = || Ok(py.import("tenfold.exceptions")?.getattr("_from_rust")?.unbind());
    match MAKE.get_or_try_init(py, make).and_then(|make| make.bind(py).call1((kind, text, fields))) {
        Ok(exception) => PyErr::from_value(exception),
        Err(error) => error,
    }
}

/// A group's error.
pub(crate) fn group_error(py: Python<'_>, error: &tenfold::Error) -> PyErr {
    group_error_saying(py, error, phrases::of_group(error, None, None))
}

/// The error of a group that could not be made within so many seconds.
pub(crate) fn connect_error(py: Python<'_>, error: &tenfold::Error, limit: Option<f64>) -> PyErr {
    let words = phrases::of_connect(error, limit).or_else(|| phrases::of_group(error, None, None));
    group_error_saying(py, error, words)
}

/// The same of an operation that was waited for: at most for `waited`, and it may take `limit` in all.
pub(crate) fn wait_error(
    py: Python<'_>,
    error: &tenfold::Error,
    waited: Option<Duration>,
    limit: Option<Duration>,
) -> PyErr {
    group_error_saying(py, error, phrases::of_group(error, waited, limit))
}

fn group_error_saying(py: Python<'_>, error: &tenfold::Error, words: Option<String>) -> PyErr {
    let fields = PyDict::new(py);
    let filled = (|| {
        if let Some(scene) = error.scene() {
            fields.set_item("operation", scene.label.kind.name())?;
            fields.set_item("sequence_number", scene.label.seq)?;
            fields.set_item("group", &*scene.group)?;
            fields.set_item("rank", scene.rank)?;
            fields.set_item("world_size", scene.size)?;
            fields.set_item("elapsed", scene.elapsed.as_secs_f64())?;
        }
        fields.set_item("peer", error.peer())?;
        fields.set_item("hint", error.hint())?;
        fields.set_item("reason", error.message())
    })();
    match filled {
        Ok(()) => {
            let text = with_words(&error.to_string(), words);
            make(py, &format!("{:?}", error.kind()), text, &fields)
        }
        Err(error) => error,
    }
}

/// A store's error.
pub(crate) fn store_error(py: Python<'_>, error: &tenfold_store::Error) -> PyErr {
    let fields = PyDict::new(py);
    let scene = error.scene();
    let filled = (|| {
        // The request is the operation and its keys. No operation has a blank in its name.
        fields.set_item("operation", scene.request.split(' ').next())?;
        fields.set_item("store", &scene.store)?;
        fields.set_item("elapsed", scene.elapsed.as_secs_f64())?;
        fields.set_item("hint", error.hint())?;
        fields.set_item("reason", error.message())
    })();
    let kind = match error.kind() {
        ErrorKind::NotANumber => ErrorKind::Argument, // a ValueError, as c10d has it
        other => other,
    };
    match filled {
        Ok(()) => {
            let text = with_words(&error.to_string(), phrases::of_store(error));
            make(py, &format!("Store{kind:?}"), text, &fields)
        }
        Err(error) => error,
    }
}

/// A caller's mistake in a call of a group, found before the group saw it; in the words and with the facts of the group's own.
pub(crate) fn refused(py: Python<'_>, group: &tenfold::Group, operation: &str, reason: &str) -> PyErr {
    let fields = PyDict::new(py);
    let (name, rank, size) = (group.name(), group.rank(), group.size());
    let filled = (|| {
        fields.set_item("operation", operation)?;
        fields.set_item("group", name)?;
        fields.set_item("rank", rank)?;
        fields.set_item("world_size", size)?;
        fields.set_item("reason", reason)
    })();
    let text = format!("{operation} in group `{name}` failed on rank {rank} of {size}: {reason}");
    match filled {
        Ok(()) => make(py, "Argument", text, &fields),
        Err(error) => error,
    }
}

/// A caller's mistake that was found here, before any group saw it.
pub(crate) fn argument(py: Python<'_>, text: String) -> PyErr {
    make(py, "Argument", text, &PyDict::new(py))
}
