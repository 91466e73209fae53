//! The control plane for Python: servers, the registry, and handlers that are written in Python.
//!
//! Those run on threads of Python's own, which fetch requests from here ([`control_next`]) and bring answers back: a thread of
//! the server waits for Python without touching it. So an interpreter that is busy, stuck or ending costs the question and
//! nothing else.

use std::collections::{HashMap, VecDeque};
use std::sync::mpsc::{self, RecvTimeoutError, SyncSender};
use std::sync::{Condvar, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use tenfold::control::{self, Request, Response};

/// How long Python may take to begin with a request. A thread that computes in C without letting go of the interpreter's lock
/// for so long is stuck, for all that one can tell.
const BEGIN_MAX: Duration = Duration::from_secs(5);

/// Requests for Python's handlers; as many at most as a server has threads.
#[derive(Default)]
struct Questions {
    next: u64,
    waiting: VecDeque<(u64, String, Request)>,
    /// Who waits for the answers to these, and to those that Python has.
    askers: HashMap<u64, Asker>,
    /// Python is ending.
    closed: bool,
}

struct Asker {
    answer: SyncSender<Response>,
    /// Python has it, and the interpreter to answer it.
    begun: bool,
}

static QUESTIONS: LazyLock<Mutex<Questions>> = LazyLock::new(Mutex::default);
static ARRIVED: Condvar = Condvar::new();

fn questions() -> MutexGuard<'static, Questions> {
    QUESTIONS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What [`BEGIN_MAX`] is for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Patience {
    UntilBegun,
    UntilBegunAndDone,
}

/// Asks Python, on behalf of a client. Without the interpreter: called by the server's threads.
/// `Patience` is for handlers that may take long once they are begun.
fn ask(name: &str, request: &Request, patience: Patience) -> Result<Response, String> {
    const ENDING: &str = "Python is ending";
    let (sender, answer) = mpsc::sync_channel(1);
    let number = {
        let mut questions = questions();
        if questions.closed {
            return Err(ENDING.to_string());
        }
        questions.next += 1;
        let number = questions.next;
        questions.waiting.push_back((number, name.to_string(), request.clone()));
        questions.askers.insert(number, Asker { answer: sender, begun: false });
        number
    };
    ARRIVED.notify_one();
    match answer.recv_timeout(BEGIN_MAX) {
        Ok(response) => return Ok(response),
        Err(RecvTimeoutError::Disconnected) => return Err(ENDING.to_string()),
        Err(RecvTimeoutError::Timeout) => {}
    }
    {
        let mut questions = questions();
        // Not there: the answer has come since.
        let begun = questions.askers.get(&number).map(|asker| asker.begun);
        if let Some(is_begun) = begun.filter(|begun| !begun || patience == Patience::UntilBegunAndDone) {
            questions.askers.remove(&number);
            questions.waiting.retain(|(waiting, ..)| *waiting != number);
            let seconds = BEGIN_MAX.as_secs();
            let what = if is_begun { "get through with it" } else { "begin with it" };
            return Err(format!(
                "Python did not {what} within {seconds} s: some thread holds the interpreter's lock"
            ));
        }
    }
    // It was begun: how long it takes is its own affair, and the server's limit.
    answer.recv().map_err(|_| ENDING.to_string())
}

/// Makes the Python handler `name` known. Its function stays with Python.
#[pyfunction]
pub(crate) fn control_register(name: String) -> PyResult<()> {
    let handler = {
        let name = name.clone();
        move |request: &Request| {
            ask(&name, request, Patience::UntilBegun)
                .unwrap_or_else(|why| Response::text(500, format!("Handler {name} failed: {why}")))
        }
    };
    control::register(name, handler).map_err(|error| PyValueError::new_err(error.to_string()))
}

/// From now on the stacks of Python's threads are what `dump_traceback` tells.
#[pyfunction]
pub(crate) fn control_offer_tracebacks() {
    control::set_traceback_source(|| {
        let response = ask("dump_traceback", &Request::default(), Patience::UntilBegunAndDone)?;
        let text = String::from_utf8_lossy(response.body()).into_owned();
        if response.status() == 200 { Ok(text) } else { Err(text) }
    });
}

#[pyfunction]
pub(crate) fn control_names() -> Vec<String> {
    control::handler_names()
}

/// Runs a handler that is written in Rust: status, type and content of its answer.
#[pyfunction]
pub(crate) fn control_call<'py>(
    py: Python<'py>,
    name: &str,
    body: Vec<u8>,
    params: Vec<(String, String)>,
) -> PyResult<(u16, String, Bound<'py, PyBytes>)> {
    let handler = control::handler(name).map_err(|error| PyValueError::new_err(error.to_string()))?;
    let response = py.detach(|| handler(&Request::new(body, params)));
    Ok((response.status(), response.content_type().to_string(), PyBytes::new(py, response.body())))
}

/// Number, handler, body and parameters of a request.
type Question<'py> = (u64, String, Bound<'py, PyBytes>, Vec<(String, String)>);

/// The next request for a handler of Python's; None once Python is ending.
#[pyfunction]
pub(crate) fn control_next(py: Python<'_>) -> Option<Question<'_>> {
    let next = || {
        let mut questions = questions();
        loop {
            if questions.closed {
                return None;
            }
            if let Some(next) = questions.waiting.pop_front() {
                return Some(next);
            }
            questions = ARRIVED.wait(questions).unwrap_or_else(PoisonError::into_inner);
        }
    };
    loop {
        let (number, name, request) = py.detach(next)?;
        // Checked here, after the interpreter's lock was taken: that may have taken longer than the client waits.
        let mut questions = questions();
        if let Some(asker) = questions.askers.get_mut(&number) {
            asker.begun = true;
            return Some((number, name, PyBytes::new(py, request.body()), request.params().to_vec()));
        }
    }
}

/// What a handler of Python's answered to the request of this number.
#[pyfunction]
pub(crate) fn control_answer(number: u64, status: u16, content_type: String, content: Vec<u8>) {
    if let Some(asker) = questions().askers.remove(&number) {
        let _ = asker.answer.send(Response::new(status, content_type, content)); // who asked may have gone
    }
}

/// Keeps an object forever: for a registry of PyTorch, which drops its objects after the interpreter has ended.
#[pyfunction]
pub(crate) fn control_keep(object: Py<PyAny>) {
    std::mem::forget(object);
}

/// Where the server listens that `TENFOLD_WORKER_SERVER` asked for.
#[pyfunction]
pub(crate) fn control_place() -> Option<String> {
    control::place()
}

/// Python is ending: nothing more is asked of it, and the server that the environment asked for ends.
#[pyfunction]
pub(crate) fn control_close(py: Python<'_>) {
    {
        let mut questions = questions();
        questions.closed = true;
        questions.waiting.clear();
        questions.askers.clear();
    }
    ARRIVED.notify_all();
    py.detach(control::stop);
}

/// A server through which this process can be asked.
#[pyclass(module = "tenfold._tenfold", frozen)]
pub(crate) struct WorkerServer {
    inner: Mutex<Option<control::WorkerServer>>,
    port: u16,
}

#[pymethods]
impl WorkerServer {
    #[new]
    fn new(py: Python<'_>, host_or_file: &str, port: i64) -> PyResult<Self> {
        let server = match u16::try_from(port) {
            Ok(port) => py.detach(|| control::WorkerServer::on_address(host_or_file, port)),
            Err(_) if port == -1 => py.detach(|| control::WorkerServer::on_socket(host_or_file)),
            Err(_) => {
                return Err(PyValueError::new_err(format!(
                    "{port} is not a port: say 0 to 65535, or -1 for a file"
                )));
            }
        };
        let server = server.map_err(|error| PyRuntimeError::new_err(error.to_string()))?;
        let port = server.address().map_or(0, |address| address.port());
        Ok(WorkerServer { inner: Mutex::new(Some(server)), port })
    }

    #[getter]
    fn port(&self) -> u16 {
        self.port
    }

    fn shutdown(&self, py: Python<'_>) {
        let server = self.inner.lock().unwrap_or_else(PoisonError::into_inner).take();
        py.detach(|| drop(server));
    }
}
