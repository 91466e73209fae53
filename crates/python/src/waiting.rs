//! Waiting without the interpreter, and hearing Ctrl-C meanwhile.

#![expect(clippy::disallowed_methods, reason = "what cannot be waited for in slices gets a thread")]

use std::cell::RefCell;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::exceptions::store_error;

/// How long Ctrl-C may go unheard.
pub(crate) const SLICE: Duration = Duration::from_millis(100);

/// Calls `attempt` with a time until it has an answer, looking for signals in between. `limit` bounds the whole.
///
/// `attempt` waits at most as long as its argument says and returns `None` if that was not enough. The last attempt before the
/// limit gets `true`: its answer is final.
pub(crate) fn in_slices<T: Send>(
    py: Python<'_>,
    limit: Option<Duration>,
    mut attempt: impl FnMut(Duration, bool) -> Option<T> + Send,
) -> PyResult<T> {
    let mut left = limit;
    loop {
        let last = left.is_some_and(|left| left <= SLICE);
        let slice = left.unwrap_or(SLICE).min(SLICE);
        if let Some(answer) = py.detach(|| attempt(slice, last)) {
            return Ok(answer);
        }
        py.check_signals()?;
        left = left.map(|left| left.saturating_sub(slice));
    }
}

/// Runs what cannot be interrupted on a thread, so that the caller can be: after Ctrl-C the thread is left to its own limit.
pub(crate) fn on_a_thread<T: Send + 'static>(
    py: Python<'_>,
    name: &str,
    body: impl FnOnce() -> T + Send + 'static,
) -> PyResult<T> {
    on_a_thread_showing(py, name, body, || Ok(()))
}

/// The same, and calls `show` with the interpreter after each slice of time. What it raises ends the wait, too.
pub(crate) fn on_a_thread_showing<T: Send + 'static>(
    py: Python<'_>,
    name: &str,
    body: impl FnOnce() -> T + Send + 'static,
    mut show: impl FnMut() -> PyResult<()>,
) -> PyResult<T> {
    let (sender, mut receiver) = channel();
    let run = move || drop(sender.send(body()));
    std::thread::Builder::new().name(name.to_string()).spawn(run)?;
    loop {
        let receiver = &mut receiver; // `&mut` may go to where there is no interpreter, `&` may not
        match py.detach(move || receiver.recv_timeout(SLICE)) {
            Ok(answer) => return Ok(answer),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => {
                let message = format!("the thread {name} panicked; see its message above");
                return Err(PyRuntimeError::new_err(message));
            }
        }
        py.check_signals()?;
        show()?;
    }
}

/// On whose behalf a thread is in a store.
enum Caller {
    /// Rust code, which has no use for Python's exceptions.
    Rust,
    /// A Python program, and what was raised meanwhile that it should get to see.
    Python(Option<PyErr>),
}

thread_local! {
    static CALLER: RefCell<Caller> = const { RefCell::new(Caller::Rust) };
}

/// A call of a store on behalf of a Python program, without the interpreter.
///
/// What Python raises meanwhile, be it Ctrl-C or an exception of a store that is written in Python, comes out as it is.
pub(crate) fn calling<T: Send>(
    py: Python<'_>,
    call: impl FnOnce() -> tenfold_store::Result<T> + Send,
) -> PyResult<T> {
    // Calls nest: a store written in Python may use another store.
    let outer = CALLER.replace(Caller::Python(None));
    let outcome = py.detach(call);
    let inner = CALLER.replace(outer);
    outcome.map_err(|error| match inner {
        Caller::Python(Some(raised)) => raised,
        _ => store_error(py, &error),
    })
}

/// Does this thread act for a Python program, which Ctrl-C may interrupt?
pub(crate) fn is_for_python() -> bool {
    CALLER.with_borrow(|caller| matches!(caller, Caller::Python(_)))
}

/// Keeps an exception for the Python program that this thread acts for, if it does.
pub(crate) fn raise(error: PyErr) {
    CALLER.with_borrow_mut(|caller| {
        if let Caller::Python(raised) = caller {
            *raised = Some(error);
        }
    });
}
