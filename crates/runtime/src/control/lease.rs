//! The server that `TENFOLD_WORKER_SERVER` asks for: one for the process, from the first group on, and as long as there is a
//! group, so that its socket file goes when the program is done.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use tenfold_plan::Rank;

use super::{Endpoint, EndpointError, WorkerServer};
use crate::fault::Fault;

/// Held by every group.
#[derive(Clone, Debug)]
pub(crate) struct Lease {
    _server: Option<Arc<Mutex<Option<WorkerServer>>>>,
}

/// The one that runs, and the process that started it: a forked child has a copy of this and no server.
static RUNNING: Mutex<(u32, Weak<Mutex<Option<WorkerServer>>>)> = Mutex::new((0, Weak::new()));

/// Starts the server unless it runs already. In `asked`, `{rank}` and `{pid}` are filled in.
pub(crate) fn start_if_asked(asked: Option<&str>, rank: Rank) -> Result<Lease, Fault> {
    let Some(asked) = asked else { return Ok(Lease { _server: None }) };
    let mut running = RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
    let pid = std::process::id();
    if let (true, Some(server)) = (running.0 == pid, running.1.upgrade()) {
        return Ok(Lease { _server: Some(server) });
    }
    let place = asked.replace("{rank}", &rank.to_string()).replace("{pid}", &pid.to_string());
    let said = format!("`TENFOLD_WORKER_SERVER={asked}`");
    let endpoint: Endpoint = place
        .parse()
        .map_err(|error| Fault::argument(format!("{said}: {error}")).hint(EndpointError::HINT))?;
    let server = WorkerServer::on(&endpoint).map_err(|error| {
        let hint = "ranks of one host need a place each: a path with `{rank}` in it, or port 0";
        Fault::argument(format!("{said}: {error}")).hint(hint)
    })?;
    match server.address() {
        Some(address) => tracing::info!(rank, "this worker can be asked at {address}"),
        None => tracing::info!(rank, "this worker can be asked at {endpoint}"),
    }
    let server = Arc::new(Mutex::new(Some(server)));
    *running = (pid, Arc::downgrade(&server));
    Ok(Lease { _server: Some(server) })
}

/// Where that server listens; nothing if none was asked for, or while there is no group.
pub fn place() -> Option<String> {
    let running = RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
    let server = running.1.upgrade().filter(|_| running.0 == std::process::id())?;
    let server = server.lock().unwrap_or_else(PoisonError::into_inner);
    let server = server.as_ref()?;
    let path = || server.path().map(|path| path.display().to_string());
    server.address().map(|address| address.to_string()).or_else(path)
}

/// Ends that server even if groups are left: for a host whose own end is near, such as Python.
pub fn stop() {
    let running = RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(server) = running.1.upgrade().filter(|_| running.0 == std::process::id()) {
        drop(server.lock().unwrap_or_else(PoisonError::into_inner).take());
    }
}
