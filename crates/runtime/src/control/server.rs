//! A worker's HTTP server: routes to handlers, with c10d's statuses and texts.
//!
//! Handlers run on up to [`HANDLERS_MAX`] threads, which exist only while they are needed, because one that takes a profile
//! for a minute must not keep the next question waiting; c10d's server has as many, all the time.

use std::fmt::Write as _;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use tenfold_http::{Limits, Method, Options, Server, SocketFile, decode_pairs};

use super::{Endpoint, Handler, Request, Response};
use crate::fault::panic_text;

const HANDLERS_MAX: usize = 8;
/// What a question may say beside its name.
const BODY_MAX: usize = 1 << 20;
/// Clients at a time. With bodies this bounds what strangers can make a worker hold.
const CONNECTIONS_MAX: usize = 64;
/// Unsent bytes of all answers together. A dump of a ring of a million operations with call sites is some hundred megabytes.
const OUTPUT_MAX: usize = 512 << 20;

/// A server that lets this process be asked. Dropping it ends it; a handler that is running then ends by itself.
#[derive(Debug)]
pub struct WorkerServer {
    http: Server,
}

impl WorkerServer {
    /// On a Unix socket, which its owner alone can open.
    ///
    /// # Errors
    /// If the file cannot be made: see [`SocketFile::bind`].
    pub fn on_socket(path: impl AsRef<Path>) -> io::Result<WorkerServer> {
        let (listener, file) = SocketFile::bind(path)?;
        WorkerServer::start(Options::default().socket_file(listener, file))
    }

    /// On a TCP address; port 0 is a free one. Any client that reaches the address can call every handler, so an address that
    /// other machines reach causes a warning.
    ///
    /// # Errors
    /// If it cannot be listened on; the error names it.
    pub fn on_address(host: &str, port: u16) -> io::Result<WorkerServer> {
        let listener = TcpListener::bind((host, port)).map_err(|error| {
            let endpoint = Endpoint::Tcp { host: host.to_string(), port };
            io::Error::new(error.kind(), format!("cannot listen on {endpoint}: {error}"))
        })?;
        let address = listener.local_addr()?;
        if !address.ip().is_loopback() {
            tracing::warn!(
                "the worker server at {address} can be reached from other machines: any client there sees stacks \
                 and can run every handler; use a Unix socket or 127.0.0.1 to prevent that"
            );
        }
        // PyTorch's debug server asks workers by the names of their hosts.
        let own = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let hint = "ask a worker by its address or by its host's name";
        WorkerServer::start(Options::default().listeners(vec![listener]).names(vec![own], hint))
    }

    /// On either.
    ///
    /// # Errors
    /// As for those.
    pub fn on(endpoint: &Endpoint) -> io::Result<WorkerServer> {
        match endpoint {
            Endpoint::Socket(path) => WorkerServer::on_socket(path),
            Endpoint::Tcp { host, port } => WorkerServer::on_address(host, *port),
        }
    }

    fn start(options: Options) -> io::Result<WorkerServer> {
        let mut limits = Limits::default();
        limits.connections = CONNECTIONS_MAX;
        limits.output = OUTPUT_MAX;
        let options = options.limits(limits).posts(BODY_MAX);
        Ok(WorkerServer { http: Server::start_with_threads(options, HANDLERS_MAX, answer)? })
    }

    /// Where it listens, unless that is a file.
    pub fn address(&self) -> Option<SocketAddr> {
        self.http.addresses().first().copied()
    }

    /// Where it listens, if that is a file.
    pub fn path(&self) -> Option<&Path> {
        self.http.socket_files().first().map(SocketFile::path)
    }
}

fn answer(request: &tenfold_http::Request) -> tenfold_http::Response {
    let response = match (request.method(), request.path()) {
        (Method::Get | Method::Head, "/") => Response::new(200, "text/html", page()),
        (Method::Get | Method::Head, "/handler/") => names(),
        (Method::Get | Method::Head, "/metrics") => super::handlers::metrics(),
        (method, path) => {
            match path.strip_prefix("/handler/").map(|name| name.strip_suffix('/').unwrap_or(name)) {
                Some(name) if method == Method::Post => call(name, request),
                Some(name) => Response::text(404, format!("Handlers are run by POST: POST /handler/{name}")),
                None => Response::text(404, "Not found: see / for what can be asked here"),
            }
        }
    };
    let Response { status, content_type, body } = response;
    tenfold_http::Response::new(status, content_type, body)
}

fn call(name: &str, request: &tenfold_http::Request) -> Response {
    let wrong = |what: &dyn std::fmt::Display| Response::text(400, what.to_string());
    let (name, params) = match (decode_name(name), params(request)) {
        (Ok(name), Ok(params)) => (name, params),
        (Err(error), _) | (_, Err(error)) => return wrong(&error),
    };
    match super::handler(&name) {
        Err(error) => Response::text(404, format!("Handler {name} not found: {error}")),
        Ok(handler) => run(&name, &handler, &Request { body: request.body().to_vec(), params }),
    }
}

/// Whatever a handler does, the process goes on and the client hears of it.
fn run(name: &str, handler: &Handler, request: &Request) -> Response {
    let failed = |what: &str| Response::text(500, format!("Handler {name} failed: {what}"));
    match catch_unwind(AssertUnwindSafe(|| handler(request))) {
        Ok(response) if (200..=599).contains(&response.status) => response,
        Ok(response) => failed(&format!("{} is not a status of an answer", response.status)),
        Err(panic) => failed(&format!("it panicked: {}", panic_text(&*panic))),
    }
}

fn decode_name(escaped: &str) -> Result<String, tenfold_http::QueryError> {
    // A name is not a query, but is escaped like one; a plus is a plus there.
    let pairs = decode_pairs(&format!("={}", escaped.replace('+', "%2B").replace('&', "%26")))?;
    Ok(pairs.into_iter().next().map(|(_, name)| lossy(name)).unwrap_or_default())
}

/// Those of the query, and then those of a form.
fn params(request: &tenfold_http::Request) -> Result<Vec<(String, String)>, tenfold_http::QueryError> {
    let mut pairs = request.parameters()?;
    let is_form = request.header("content-type").is_some_and(|kind| {
        kind.split(';')
            .next()
            .unwrap_or_default()
            .trim()
            .eq_ignore_ascii_case("application/x-www-form-urlencoded")
    });
    if is_form && let Ok(form) = std::str::from_utf8(request.body()) {
        // Many clients declare any body as a form by default. A body that is not a form has no parameters.
        pairs.extend(decode_pairs(form).unwrap_or_default());
    }
    Ok(pairs.into_iter().map(|(key, value)| (lossy(key), lossy(value))).collect())
}

fn lossy(bytes: Vec<u8>) -> String {
    String::from_utf8(bytes).unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned())
}

fn names() -> Response {
    Response::json(serde_json::Value::from(super::handler_names()).to_string())
}

fn page() -> String {
    let mut page = format!(
        "<!doctype html>\n<title>tenfold worker {pid}</title>\n<h1>tenfold worker, process {pid}</h1>\n\
         <p><a href=\"/handler/\">Handler names</a> (JSON), <a href=\"/metrics\">metrics</a> (Prometheus)</p>\n\
         <p>Handlers, each run by <code>POST /handler/NAME?key=value</code>:</p>\n<ul>\n",
        pid = std::process::id()
    );
    for name in super::handler_names() {
        let name = name.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
        let _ = writeln!(page, "<li>{name}</li>");
    }
    page + "</ul>\n"
}
