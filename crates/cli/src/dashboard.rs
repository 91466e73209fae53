//! A page that shows what a store and its jobs do, the same facts as JSON, and as text for Prometheus.
//!
//! It only looks: nothing that it answers changes anything. It is for whoever can reach it, so it listens on loopback
//! unless told, tells names of keys and addresses but no values unless told, and leaves it to `tenfold-http` to keep other
//! sites' pages away.
//!
//! Two threads: one answers requests, by asking the store's server at that moment; one looks at the server once a second,
//! for the charts and for beats that stop moving.
//!
//! Not here: routes and their JSON (`dashboard/api`), what is made of jobs (`dashboard/runs`, `dashboard/collectives`), one sentence about each
//! (`dashboard/verdict`), how it looks (`dashboard/page`).

#![expect(clippy::disallowed_methods, reason = "owns the thread that looks, and is where its clock is read")]

mod api;
mod collectives;
mod history;
mod metrics;
mod runs;
pub(crate) mod verdict;

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::str::FromStr;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use tenfold_store::Server;

use api::{Board, Now};

/// Flags of every command that can show a dashboard.
#[derive(clap::Args, Clone, Debug, Default)]
pub(crate) struct Flags {
    /// Show what the store does on a web page, and at /metrics for Prometheus; for this machine only, unless an address
    /// is given
    #[arg(long, value_name = "HOST:PORT", num_args = 0..=1, help_heading = "Dashboard")]
    dashboard: Option<Option<Address>>,
    /// Let the dashboard show values of keys too, to whoever reaches it
    #[arg(long, requires = "dashboard", help_heading = "Dashboard")]
    dashboard_values: bool,
    /// A name by which browsers may ask for the dashboard, besides its address and localhost
    #[arg(long, value_name = "NAME", requires = "dashboard", help_heading = "Dashboard")]
    dashboard_name: Vec<String>,
}

impl Flags {
    /// What was asked for; nothing if no dashboard was. `port` is used where no address was given.
    pub(crate) fn options(&self, port: u16) -> Option<Options> {
        let address = self.dashboard.clone()?;
        let address = address.unwrap_or_else(|| Address { host: "127.0.0.1".into(), port });
        Some(Options { address, names: self.dashboard_name.clone(), values: self.dashboard_values })
    }
}

/// Where and what to show.
#[derive(Clone, Debug)]
pub(crate) struct Options {
    pub(crate) address: Address,
    pub(crate) names: Vec<String>,
    /// May values be shown?
    pub(crate) values: bool,
}

/// `HOST:PORT`, where the host may be a name, an address, or a v6 address in brackets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Address {
    pub(crate) host: String,
    pub(crate) port: u16,
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bad = || {
            format!(
                "`{text}` is no address: write HOST:PORT, such as 127.0.0.1:29580, or no value and another flag next"
            )
        };
        let (host, port) = text.rsplit_once(':').ok_or_else(bad)?;
        let host =
            host.strip_prefix('[').map_or(Some(host), |host| host.strip_suffix(']')).ok_or_else(bad)?;
        let port = port.parse().map_err(|_| bad())?;
        if host.is_empty() { Err(bad()) } else { Ok(Address { host: host.into(), port }) }
    }
}

/// A running dashboard. Dropping it ends it.
#[derive(Debug)]
pub(crate) struct Dashboard {
    http: tenfold_http::Server,
    shows_values: bool,
    _watch: Watch,
}

/// Unread answers of all clients together. The longest, about thousands of nodes with eight ranks each, have 20 MB.
const OUTPUT_MAX: usize = 64 << 20;

/// Descriptors that a dashboard may take: its clients, and a few for itself.
pub(crate) const DESCRIPTORS: usize = 256 + 16;

/// Shows what `server` does.
pub(crate) fn start(options: Options, server: Arc<Server>) -> io::Result<Dashboard> {
    let Options { address: Address { host, port }, mut names, values } = options;
    let listeners = tenfold_store::listen(&host, port)
        .map_err(|fault| io::Error::other(format!("dashboard: {fault}")))?;
    names.push(host); // whoever gave a name to listen on may ask by it
    let board = Arc::new(Board::new(server, values));
    let mut limits = tenfold_http::Limits::default();
    limits.output = OUTPUT_MAX;
    let http = tenfold_http::Options::default()
        .listeners(listeners)
        .names(names, "ask by the server's address or by localhost, or start it with --dashboard-name NAME")
        .limits(limits);
    let shown = board.clone();
    let http = tenfold_http::Server::start(http, move |request| shown.answer(request, now()))?;
    Ok(Dashboard { http, shows_values: values, _watch: Watch::start(board)? })
}

impl Dashboard {
    pub(crate) fn address(&self) -> SocketAddr {
        self.http.address()
    }

    /// What to tell whoever opened it to others.
    pub(crate) fn warning(&self) -> Option<String> {
        let is_open = |address: &SocketAddr| !address.ip().to_canonical().is_loopback();
        let address = self.http.addresses().iter().find(|address| is_open(address))?;
        let values = if self.shows_values { "values too" } else { "but no values" };
        Some(format!(
            "no authentication: whoever reaches the dashboard at {address} sees the names of keys, the addresses of \
             clients and what they wait for, {values}"
        ))
    }
}

/// The line that tells where it is.
impl fmt::Display for Dashboard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "dashboard on http://{}/", self.address())
    }
}

fn now() -> Now {
    let unix = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    Now { instant: Instant::now(), unix: unix.as_secs_f64() }
}

/// How often the server is looked at.
const STEP: Duration = Duration::from_secs(1);

/// The thread that looks at the server, until this is dropped.
#[derive(Debug)]
struct Watch {
    stop: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    fn start(board: Arc<Board>) -> io::Result<Watch> {
        let (stop, stopped) = mpsc::channel::<()>();
        let thread = std::thread::Builder::new().name("tenfold-watch".into()).spawn(move || {
            let mut next = Instant::now();
            loop {
                board.look(Instant::now());
                // After a long pause of the whole machine nothing is made up for.
                next = (next + STEP).max(Instant::now());
                let left = next.saturating_duration_since(Instant::now());
                if stopped.recv_timeout(left) != Err(mpsc::RecvTimeoutError::Timeout) {
                    return;
                }
            }
        })?;
        Ok(Watch { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // a panic there was printed there
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_a_host_and_a_port() {
        let address = |text: &str| text.parse::<Address>().map(|address| (address.host, address.port));
        assert_eq!(address("127.0.0.1:0"), Ok(("127.0.0.1".into(), 0)));
        assert_eq!(address("node-7:80"), Ok(("node-7".into(), 80)));
        assert_eq!(address("[::1]:29580"), Ok(("::1".into(), 29580)));
        for wrong in ["train.py", "80", ":80", "host:", "host:65536", "[::1:80", ""] {
            let expected = format!(
                "`{wrong}` is no address: write HOST:PORT, such as 127.0.0.1:29580, or no value and another flag next"
            );
            assert_eq!(address(wrong), Err(expected));
        }
    }
}
