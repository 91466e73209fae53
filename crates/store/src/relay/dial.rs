//! Connects a relay to its server, the first time and after each loss.

#![expect(
    clippy::disallowed_methods,
    reason = "connects on a thread of its own, so that no client waits for it"
)]

use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use mio::Waker;

use super::Order;
use crate::connect::Link;
use crate::wire::{self, Command, Hello, Welcome};
use tenfold_base::{Deadline, ErrorKind, Fault, show_duration};

/// How long a series of attempts to connect again lasts before its failure is logged.
const SERIES: Duration = Duration::from_secs(10);
/// How long the relay keeps trying the server before it looks whether it has to stop.
const GLANCE: Duration = Duration::from_millis(500);
/// How long a server may take to answer the hello.
const HELLO_MAX: Duration = Duration::from_secs(30);
/// A welcome of a later version may be longer, but not by much.
const WELCOME_MAX: usize = 4 << 10;

/// The server of a relay.
#[derive(Clone, Debug)]
pub(super) struct Upstream {
    pub(super) host: String,
    pub(super) port: u16,
}

impl std::fmt::Display for Upstream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}", self.host, self.port)
    }
}

/// A connection on which the server has welcomed the session.
#[derive(Debug)]
pub(super) struct Dialed {
    pub(super) stream: TcpStream,
    /// Bytes that arrived after the welcome.
    pub(super) rest: Vec<u8>,
    pub(super) welcome: Welcome,
}

impl Upstream {
    /// Connects and opens or resumes the session.
    pub(super) fn dial(&self, hello: &Hello, deadline: Deadline) -> Result<Dialed, Fault> {
        let mut link = Link::open(&self.host, self.port, deadline)?;
        if !link.is_tenfold {
            return Err(Fault::new(
                ErrorKind::Unsupported,
                format!("the server at {} is not tenfold's: it cannot serve a relay", link.peer()),
            )
            .hint("run `tenfold serve` or `tenfold run` there; PyTorch's server does not support relays"));
        }
        let deadline = deadline.at_most(HELLO_MAX);
        link.send(&Command::Session(*hello));
        link.flush(deadline)?;
        let mut head = [0; Welcome::HEAD];
        link.fill(&mut head, deadline).map_err(|fault| match fault.kind {
            ErrorKind::Lost => Fault::new(
                ErrorKind::Unsupported,
                format!("the server at {} closed the connection when a relay introduced itself", link.peer()),
            )
            .hint("use the same version of tenfold on both sides: see the server's log"),
            _ => fault,
        })?;
        let (version, length) = Welcome::decode_head(head);
        let mismatch = |what: String| {
            Fault::new(ErrorKind::Protocol, what).hint("use the same version of tenfold on both sides")
        };
        if version != wire::VERSION {
            let own = wire::VERSION;
            return Err(mismatch(format!(
                "the server at {} speaks version {version} of sessions, this relay {own}",
                link.peer()
            )));
        }
        if length > WELCOME_MAX {
            return Err(mismatch(format!("the server announces a welcome of {length} bytes")));
        }
        let mut body = vec![0; length];
        link.fill(&mut body, deadline)?;
        let welcome = Welcome::decode(version, &body)
            .ok_or_else(|| mismatch(format!("the server's welcome has only {length} bytes")))?;
        let (stream, rest) = link
            .into_parts()
            .map_err(|error| Fault::io("cannot take over the connection to the server", error))?;
        Ok(Dialed { stream, rest, welcome })
    }
}

/// How the thread that connects reaches the loop.
#[derive(Debug)]
pub(super) struct Line {
    pub(super) upstream: Upstream,
    pub(super) orders: mpsc::Sender<Order>,
    pub(super) waker: Arc<Waker>,
    pub(super) stopping: Arc<AtomicBool>,
}

impl Line {
    /// Connects again on a separate thread, however long it takes. Failures are logged now and then.
    pub(super) fn reconnect(&self, hello: Hello) {
        let (upstream, orders) = (self.upstream.clone(), self.orders.clone());
        let (waker, stopping) = (self.waker.clone(), self.stopping.clone());
        let work = move || {
            let since = Deadline::never();
            let mut series = Deadline::after(SERIES);
            while !stopping.load(Ordering::Relaxed) {
                match upstream.dial(&hello, Deadline::after(GLANCE)) {
                    Ok(dialed) => {
                        if orders.send(Order::Connected(Box::new(dialed))).is_ok() {
                            let _ = waker.wake(); // fails only if the loop has ended
                        }
                        return;
                    }
                    Err(fault) if series.passed() || fault.kind != ErrorKind::Connect => {
                        tracing::warn!(
                            "relay: no connection to the store server at {upstream} for {}: {}",
                            show_duration(since.elapsed()),
                            fault.message
                        );
                        series = Deadline::after(SERIES);
                        if fault.kind != ErrorKind::Connect {
                            Deadline::after(SERIES).pause(GLANCE * 4); // it answers, but not as it should
                        }
                    }
                    Err(_) => {}
                }
            }
        };
        if let Err(error) = std::thread::Builder::new().name("tenfold-relay-dial".into()).spawn(work) {
            tracing::error!(%error, "relay: cannot start a thread to connect to the store server");
        }
    }
}
