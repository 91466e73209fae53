//! The control plane of a worker: questions that a running process answers, by name, over HTTP. What c10d calls its
//! `WorkerServer`.
//!
//! A *handler* is a function from [`Request`] to [`Response`] with a name that is never given to another handler. Every handler
//! of the process is reached through every [`WorkerServer`] of the process, by `POST /handler/<name>?key=value`, also if another
//! library registered it. Routes and texts are c10d's, so that PyTorch's debug server and other clients of c10d's can ask
//! tenfold's workers; see docs/control-plane.md.
//!
//! ```
//! use tenfold::control::{self, Request, Response, WorkerServer};
//!
//! control::register("greet", |request: &Request| Response::text(200, format!("hello {}", request.param("who"))))?;
//! assert!(control::handler_names().contains(&"greet".to_string()));
//! assert_eq!(control::register("greet", |_: &Request| Response::text(200, "")).unwrap_err().to_string(),
//!     "Handler greet already registered");
//! // As a client would have it answered:
//! let response = control::handler("greet")?(&Request::new("", [("who", "rank 3")]));
//! assert_eq!(response.body(), b"hello rank 3");
//!
//! let folder = tempfile::tempdir()?;
//! let server = WorkerServer::on_socket(folder.path().join("rank-0.sock"))?;
//! // $ tenfold worker /…/rank-0.sock greet who=you
//! # drop(server);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! A process has no server unless one is made, or `TENFOLD_WORKER_SERVER` asks for one (`lease.rs`).
//!
//! Not here: HTTP (`tenfold-http`), Python's handlers (`crates/python/src/control.rs`).

mod endpoint;
mod handlers;
mod lease;
mod pyspy;
mod server;
mod threads;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

pub use endpoint::{Endpoint, EndpointError};
#[doc(hidden)]
pub use handlers::set_traceback_source;
pub use lease::place;
#[doc(hidden)]
pub use lease::stop;
pub use server::WorkerServer;

pub(crate) use lease::{Lease, start_if_asked};

/// What answers a request. May run on several threads at the same time, and beside everything else that the process does.
pub type Handler = Arc<dyn Fn(&Request) -> Response + Send + Sync>;

static REGISTRY: LazyLock<Mutex<BTreeMap<String, Handler>>> =
    LazyLock::new(|| Mutex::new(handlers::built_in()));

fn registry() -> MutexGuard<'static, BTreeMap<String, Handler>> {
    REGISTRY.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes a handler known under a name, for as long as the process lives.
///
/// # Errors
/// If the name is taken.
pub fn register(
    name: impl Into<String>,
    handler: impl Fn(&Request) -> Response + Send + Sync + 'static,
) -> Result<(), RegistryError> {
    let name = name.into();
    let mut registry = registry();
    if registry.contains_key(&name) {
        return Err(RegistryError::Taken(name));
    }
    registry.insert(name, Arc::new(handler));
    Ok(())
}

/// The handler of this name.
///
/// # Errors
/// If there is none.
pub fn handler(name: &str) -> Result<Handler, RegistryError> {
    registry().get(name).cloned().ok_or_else(|| RegistryError::Unknown(name.to_string()))
}

/// The names of all handlers, sorted.
pub fn handler_names() -> Vec<String> {
    registry().keys().cloned().collect()
}

/// Why the registry says no, in c10d's words.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RegistryError {
    /// There is a handler of this name already.
    Taken(String),
    /// There is no handler of this name.
    Unknown(String),
}

impl fmt::Display for RegistryError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RegistryError::Taken(name) => write!(f, "Handler {name} already registered"),
            RegistryError::Unknown(name) => write!(f, "Failed to find handler {name}"),
        }
    }
}

impl std::error::Error for RegistryError {}

/// What a handler is asked.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Request {
    body: Vec<u8>,
    params: Vec<(String, String)>,
}

impl Request {
    /// A request with a body and parameters.
    pub fn new<K: Into<String>, V: Into<String>>(
        body: impl Into<Vec<u8>>,
        params: impl IntoIterator<Item = (K, V)>,
    ) -> Self {
        let params = params.into_iter().map(|(key, value)| (key.into(), value.into())).collect();
        Request { body: body.into(), params }
    }

    /// The body.
    pub fn body(&self) -> &[u8] {
        &self.body
    }

    /// The first parameter of this name; empty if there is none, as c10d has it.
    pub fn param(&self, name: &str) -> &str {
        self.params.iter().find(|(key, _)| key == name).map_or("", |(_, value)| value)
    }

    /// All parameters, in the order in which they were sent.
    pub fn params(&self) -> &[(String, String)] {
        &self.params
    }
}

/// What a handler answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Response {
    status: u16,
    content_type: String,
    body: Vec<u8>,
}

impl Response {
    /// An answer with a status code and a body of some type.
    pub fn new(status: u16, content_type: impl Into<String>, body: impl Into<Vec<u8>>) -> Self {
        Response { status, content_type: content_type.into(), body: body.into() }
    }

    /// Plain text.
    pub fn text(status: u16, text: impl Into<String>) -> Self {
        Response::new(status, "text/plain", text.into())
    }

    /// The text must be JSON.
    pub fn json(json: impl Into<Vec<u8>>) -> Self {
        Response::new(200, "application/json", json)
    }

    /// The status code.
    pub fn status(&self) -> u16 {
        self.status
    }

    /// The type of the body.
    pub fn content_type(&self) -> &str {
        &self.content_type
    }

    /// The body.
    pub fn body(&self) -> &[u8] {
        &self.body
    }
}
