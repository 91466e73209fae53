//! The public interface of the server: options, start and end.
//!
//! Not here: the loop (`server/turns`), what bytes mean (`head`).

#![expect(clippy::disallowed_methods, reason = "owns the responder's thread")]

mod turns;
mod workers;

use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use mio::{Poll, Waker};

use crate::head::HeadLimits;
use crate::request::Request;
use crate::response::Response;
use crate::socket_file::SocketFile;
use crate::stream::Listener;
use turns::{Handler, Loop, WAKE};
use workers::Workers;

/// Limits on what clients can make the server hold and wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// Of requests.
    pub head: HeadLimits,
    /// Clients at a time. One more, and the client that has kept us waiting longest for its request is
    /// closed.
    pub connections: usize,
    /// Unsent bytes of all answers together; beyond it the oldest unread answer is dropped, unless it is the
    /// only one.
    pub output: usize,
    /// Time from connecting, or from the first byte of a later request, to its end.
    pub head_timeout: Duration,
    /// Time between an answer and the next request.
    pub idle_timeout: Duration,
    /// Time for the client to take an answer, or the next large piece of a long one.
    pub write_timeout: Duration,
    /// Time for a handler on a separate thread; then the client gets an error.
    pub handler_timeout: Duration,
    /// Requests that may wait for such a thread.
    pub queue: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            head: HeadLimits::default(),
            connections: 256,
            output: 16 << 20,
            head_timeout: Duration::from_secs(5),
            idle_timeout: Duration::from_secs(30),
            write_timeout: Duration::from_secs(10),
            // PyTorch's debug server times out on a worker after 60 s, and asks for profiles that long.
            handler_timeout: Duration::from_secs(120),
            queue: 64,
        }
    }
}

/// Where to listen and which requests to answer.
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct Options {
    /// Sockets that listen already. Without any socket: a free port of 127.0.0.1, for this machine only.
    pub listeners: Vec<TcpListener>,
    /// Unix sockets; their files are removed with the server.
    pub socket_files: Vec<(UnixListener, SocketFile)>,
    /// Names that requests may use, besides `localhost`, loopback addresses, and the address that was
    /// connected to.
    pub names: Vec<String>,
    /// The hint for a client that used another name.
    pub name_hint: String,
    /// What clients may use.
    pub limits: Limits,
}

impl Options {
    #[must_use]
    /// Listens on these sockets.
    pub fn listeners(mut self, listeners: Vec<TcpListener>) -> Self {
        self.listeners = listeners;
        self
    }

    #[must_use]
    /// Listens on a Unix socket, too.
    pub fn socket_file(mut self, listener: UnixListener, file: SocketFile) -> Self {
        self.socket_files.push((listener, file));
        self
    }

    /// Accepts `POST` too, with bodies of up to `body_max` bytes. A browser's request must come from one of
    /// our pages.
    #[must_use]
    pub fn posts(mut self, body_max: usize) -> Self {
        self.limits.head.body = Some(body_max);
        self
    }

    #[must_use]
    /// Sets the names by which it may be asked, and the hint for clients that use another.
    pub fn names(mut self, names: Vec<String>, hint: impl Into<String>) -> Self {
        self.names = names;
        self.name_hint = hint.into();
        self
    }

    #[must_use]
    /// Sets the limits.
    pub fn limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }
}

/// A running server. Dropping it stops it, including unfinished answers.
#[derive(Debug)]
pub struct Server {
    addresses: Vec<SocketAddr>,
    stop: Arc<AtomicBool>,
    waker: Arc<Waker>,
    /// Removed when the loop has ended.
    socket_files: Vec<SocketFile>,
    thread: Option<JoinHandle<()>>,
    /// A forked child has a copy of this and none of the threads.
    owner: u32,
}

impl Server {
    /// Answers on a separate thread. `handler` runs there too: while it works, other requests wait. If it
    /// panics, that request is answered with status 500 and the others continue.
    pub fn start(
        options: Options,
        handler: impl Fn(&Request) -> Response + Send + 'static,
    ) -> io::Result<Server> {
        Server::start_as(options, move |_| Handler::Here(Box::new(handler)))
    }

    /// The same, for handlers that may take long: each request is handed to one of up to `threads` threads,
    /// which are started when they are needed. Other requests continue meanwhile.
    pub fn start_with_threads(
        options: Options,
        threads: usize,
        handler: impl Fn(&Request) -> Response + Send + Sync + 'static,
    ) -> io::Result<Server> {
        assert!(threads > 0, "at least one thread must run handlers");
        let queue_max = options.limits.queue;
        Server::start_as(options, move |waker| {
            Handler::There(Workers::new(Box::new(handler), waker, threads, queue_max))
        })
    }

    fn start_as(options: Options, handler: impl FnOnce(Arc<Waker>) -> Handler) -> io::Result<Server> {
        let mut listeners = options.listeners;
        if listeners.is_empty() && options.socket_files.is_empty() {
            listeners.push(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?);
        }
        listeners.iter().try_for_each(|listener| listener.set_nonblocking(true))?;
        let addresses = listeners.iter().map(TcpListener::local_addr).collect::<io::Result<Vec<_>>>()?;
        let poll = Poll::new()?;
        let waker = Arc::new(Waker::new(poll.registry(), WAKE)?);
        let stop = Arc::new(AtomicBool::new(false));
        let policy = turns::Policy {
            limits: options.limits,
            names: options.names,
            name_hint: options.name_hint,
            handler: handler(Arc::clone(&waker)),
        };
        let mut listeners: Vec<Listener> =
            listeners.into_iter().map(|one| Listener::Tcp(mio::net::TcpListener::from_std(one))).collect();
        let mut socket_files = Vec::new();
        for (listener, file) in options.socket_files {
            listener.set_nonblocking(true)?;
            listeners.push(Listener::Unix(mio::net::UnixListener::from_std(listener)));
            socket_files.push(file);
        }
        let server = Loop::new(poll, listeners, policy, stop.clone())?;
        let thread = std::thread::Builder::new().name("tenfold-http".into()).spawn(move || server.run())?;
        tracing::debug!(?addresses, ?socket_files, "answering HTTP");
        Ok(Server { addresses, stop, waker, socket_files, thread: Some(thread), owner: std::process::id() })
    }

    /// The first address it answers on. Panics if it only has socket files.
    pub fn address(&self) -> SocketAddr {
        self.addresses[0]
    }

    /// Every address it answers on.
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }
}

impl Server {
    /// The socket files it answers on.
    pub fn socket_files(&self) -> &[SocketFile] {
        &self.socket_files
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if self.owner != std::process::id() {
            return; // the waker belongs to the parent
        }
        self.stop.store(true, Ordering::SeqCst);
        let woken = self.waker.wake().is_ok();
        if let Some(thread) = self.thread.take().filter(|_| woken) {
            let _ = thread.join(); // a panic has already been printed
        }
    }
}
