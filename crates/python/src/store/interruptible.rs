//! Stores whose waits Ctrl-C ends.
//!
//! A wait that a Python program makes is first tried for a moment right here: most are over by then. After that a store of
//! this host is asked again and again ([`Sliced`]). A server is not: every question would cancel a wait and begin another, for
//! thousands of clients, and a server that is slow to confirm would cost them their connection. There a thread waits instead
//! ([`Connection`]); if Ctrl-C comes, it is left to itself with its connection, and the next call opens a new one.
//!
//! Waits of others, such as a group that is being connected, go straight through.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use pyo3::prelude::*;
use tenfold_store::{Deadline, ErrorKind, Fault, Request, Response, Store};

use crate::waiting::{self, SLICE};

#[cold]
fn interrupted(error: PyErr) -> Fault {
    waiting::raise(error);
    Fault::new(ErrorKind::Io, "interrupted by a signal")
}

/// A wait that ended too early to be the end: only the moment was over, not the time.
fn is_too_short(outcome: &Result<Response, Fault>, deadline: Deadline) -> bool {
    matches!(outcome, Err(fault) if fault.kind == ErrorKind::Timeout) && !deadline.passed()
}

/// A store of this host.
pub(super) struct Sliced(pub(super) Arc<dyn Store>);

impl Store for Sliced {
    fn call(&self, request: Request<'_>, deadline: Deadline) -> Result<Response, Fault> {
        match &request {
            // As in c10d a barrier here is made of ordinary keys; one of the store's own could not be asked for twice.
            Request::Barrier { .. } => return Err(Fault::unsupported("barrier of its own")),
            Request::Wait { .. } if waiting::is_for_python() => {}
            _ => return self.0.call(request, deadline),
        }
        loop {
            let outcome = self.0.call(request.clone(), deadline.at_most(SLICE));
            if !is_too_short(&outcome, deadline) {
                return outcome;
            }
            Python::attach(|py| py.check_signals()).map_err(interrupted)?;
        }
    }

    fn name(&self) -> String {
        self.0.name()
    }

    fn address(&self) -> Option<SocketAddr> {
        self.0.address()
    }

    fn timeout(&self) -> Duration {
        self.0.timeout()
    }

    fn set_timeout(&self, timeout: Duration) -> bool {
        self.0.set_timeout(timeout)
    }

    fn has_extended_api(&self) -> bool {
        self.0.has_extended_api()
    }

    fn duplicate(&self) -> Result<Arc<dyn Store>, Fault> {
        Ok(Arc::new(Sliced(self.0.duplicate()?)))
    }
}

/// A store on a server.
pub(super) struct Connection {
    /// Also owns the server, if this process hosts it.
    first: Arc<dyn Store>,
    /// The client in use; nothing after Ctrl-C has left the last one waiting.
    current: Mutex<Option<Arc<dyn Store>>>,
    process: u32,
}

impl Connection {
    pub(super) fn new(first: Arc<dyn Store>) -> Self {
        let current = Mutex::new(Some(Arc::clone(&first)));
        Connection { first, current, process: std::process::id() }
    }

    fn current(&self) -> Result<Arc<dyn Store>, Fault> {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(client) = &*current {
            return Ok(Arc::clone(client));
        }
        let client = self.first.duplicate()?;
        *current = Some(Arc::clone(&client));
        Ok(client)
    }

    fn wait_on_a_thread(
        &self,
        client: Arc<dyn Store>,
        request: Request<'static>,
        deadline: Deadline,
    ) -> Result<Response, Fault> {
        let wait = move || client.call(request, deadline);
        let outcome = Python::attach(|py| waiting::on_a_thread(py, "tenfold-wait", wait));
        outcome.unwrap_or_else(|error| {
            *self.current.lock().unwrap_or_else(PoisonError::into_inner) = None;
            Err(interrupted(error))
        })
    }
}

impl Store for Connection {
    fn call(&self, request: Request<'_>, deadline: Deadline) -> Result<Response, Fault> {
        let client = self.current()?;
        if !waiting::is_for_python() {
            return client.call(request, deadline);
        }
        match request {
            Request::Wait { keys } => {
                let moment = client.call(Request::Wait { keys: keys.clone() }, deadline.at_most(SLICE));
                if !is_too_short(&moment, deadline) {
                    return moment;
                }
                let keys = keys.into_iter().map(|key| key.into_owned().into()).collect();
                self.wait_on_a_thread(client, Request::Wait { keys }, deadline)
            }
            // Once only: a second request would count as a second client.
            Request::Barrier { key, world } => {
                let request = Request::Barrier { key: key.into_owned().into(), world };
                self.wait_on_a_thread(client, request, deadline)
            }
            other => client.call(other, deadline),
        }
    }

    fn name(&self) -> String {
        self.first.name()
    }

    fn address(&self) -> Option<SocketAddr> {
        self.first.address()
    }

    fn timeout(&self) -> Duration {
        self.first.timeout()
    }

    fn set_timeout(&self, timeout: Duration) -> bool {
        self.first.set_timeout(timeout)
    }

    fn has_extended_api(&self) -> bool {
        self.first.has_extended_api()
    }

    fn duplicate(&self) -> Result<Arc<dyn Store>, Fault> {
        Ok(Arc::new(Connection::new(self.first.duplicate()?)))
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // A forked child has no server, only the parent's as it was: its thread, which would be waited for, is not here.
        if self.process != std::process::id() {
            std::mem::forget(Arc::clone(&self.first));
        }
    }
}
