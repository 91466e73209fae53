//! `TCPStore`.

#![expect(unsafe_code, reason = "`master_listen_fd` is a number that stands for a socket")]
#![expect(clippy::too_many_arguments, reason = "c10d's keyword arguments")]

use std::net::TcpListener;
use std::os::fd::{FromRawFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use tenfold_store::{DEFAULT_TIMEOUT, StoreExt, TcpStoreOptions};

use super::interruptible::Connection;
use super::{Fits, Store};
use crate::exceptions::store_error;
use crate::waiting;

/// A store on a server that all ranks reach over TCP; one of them hosts it.
///
/// The server may be tenfold's or PyTorch's, and so may every client. The one that hosts it (`is_master`) listens on `host_name`
/// and nowhere else; `0.0.0.0` is every interface. Port 0 picks a free one, which `port` then tells. With a `world_size` the
/// host waits until so many clients have come, itself included, unless `wait_for_workers` is false. With `multi_tenant` all
/// stores of this process that host on one port share a server. `master_listen_fd` is a bound socket to listen on, which is
/// taken over. `use_libuv` chooses between PyTorch's two servers; tenfold has one, which can do all that either can.
///
/// >>> host = TCPStore("127.0.0.1", 0, is_master=True)
/// >>> other = TCPStore("127.0.0.1", host.port)
/// >>> other.set("who", "me")
/// >>> host.get("who")
/// b'me'
#[pyclass(module = "tenfold._tenfold", name = "TCPStore", extends = Store, subclass, frozen)]
pub(crate) struct TcpStore {
    host: String,
    port: u16,
    use_libuv: bool,
}

#[pymethods]
impl TcpStore {
    #[new]
    #[pyo3(signature = (
        host_name, port, world_size=None, is_master=false, timeout=DEFAULT_TIMEOUT, wait_for_workers=true,
        multi_tenant=false, master_listen_fd=None, use_libuv=true
    ))]
    fn new(
        py: Python<'_>,
        host_name: String,
        port: Fits<u16>,
        world_size: Option<Fits<i64>>,
        is_master: bool,
        timeout: Duration,
        wait_for_workers: bool,
        multi_tenant: bool,
        master_listen_fd: Option<Fits<RawFd>>,
        use_libuv: bool,
    ) -> PyResult<PyClassInitializer<Self>> {
        crate::log::start()?;
        let mut options = TcpStoreOptions::new(host_name.as_str(), port.0)
            .is_server(is_master)
            .timeout(timeout)
            .wait_workers(wait_for_workers)
            .multi_tenant(multi_tenant);
        match world_size.map(|size| usize::try_from(size.0)) {
            Some(Ok(0)) => return Err(PyValueError::new_err("TCPStore world size cannot be 0")),
            Some(Ok(world_size)) => options = options.world_size(world_size),
            Some(Err(_)) | None => {} // as c10d: a negative size is not a size
        }
        if let Some(listener) = master_listen_fd.filter(|_| is_master) {
            options = options.listener(adopt(py, listener.0)?);
        }
        let opened = waiting::on_a_thread(py, "tenfold-open", || tenfold_store::TcpStore::open(options))?;
        let store = opened.map_err(|error| store_error(py, &error))?;
        let port = store.port();
        let base = Store::around(Connection::new(Arc::new(store)));
        Ok(PyClassInitializer::from(base).add_subclass(TcpStore { host: host_name, port, use_libuv }))
    }

    fn clone(slf: &Bound<'_, Self>) -> PyResult<Py<Self>> {
        let (py, own) = (slf.py(), slf.get());
        let store = slf.as_super().get().inner.clone().expect("a TCPStore has a store inside");
        let opened = waiting::on_a_thread(py, "tenfold-open", move || store.try_clone())?;
        let inner = opened.map_err(|error| store_error(py, &error))?;
        let clone = TcpStore { host: own.host.clone(), port: own.port, use_libuv: own.use_libuv };
        Py::new(py, PyClassInitializer::from(Store::around(inner)).add_subclass(clone))
    }

    /// The server's host, as it was given.
    #[getter]
    fn host(&self) -> &str {
        &self.host
    }

    /// The server's port.
    #[getter]
    fn port(&self) -> u16 {
        self.port
    }

    /// What `use_libuv` was.
    #[getter]
    #[pyo3(name = "libuvBackend")]
    fn libuv_backend(&self) -> bool {
        self.use_libuv
    }
}

/// The socket behind a number that Python has for it.
fn adopt(py: Python<'_>, listener: RawFd) -> PyResult<TcpListener> {
    py.import("os")?.call_method1("fstat", (listener,))?; // raises if there is no such descriptor
    // SAFETY: it is open, and the caller hands over its ownership, as in c10d.
    Ok(unsafe { TcpListener::from_raw_fd(listener) })
}
