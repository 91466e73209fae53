//! A page that shows a store and its jobs, the same facts as JSON, and as text for Prometheus.
//!
//! It is read-only: no request changes anything. Every client that can reach it may read it. So it listens on
//! loopback unless configured otherwise, shows names of keys and addresses but values only on request, and
//! relies on `tenfold-http` to keep other sites' pages away.
//!
//! Two threads: one answers requests by asking the store's server at that moment; one reads the server once a
//! second, for the charts and for beats that stop moving.
//!
//! Not here: routes and their JSON (`dashboard/api`), the analysis of jobs (`dashboard/runs`,
//! `dashboard/collectives`), one sentence about each (`dashboard/verdict`), the page (`dashboard/page`).

#![warn(missing_docs)]
#![expect(clippy::disallowed_methods, reason = "owns the watching thread, and reads its clock")]

mod api;
mod collectives;
mod history;
pub mod job;
mod metrics;
mod runs;
mod stats;
#[cfg(feature = "top")]
pub mod top;
mod verdict;

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use tenfold_console::Address;
use tenfold_store::Server;

use api::{Board, Now};

pub use stats::print_stats;

/// Flags of every command that can show a dashboard.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct Flags {
    /// Show what the store does on a web page, and at /metrics for Prometheus; for this machine only, unless an address
    /// is given
    #[arg(long, value_name = "HOST:PORT", num_args = 0..=1, help_heading = "Dashboard")]
    dashboard: Option<Option<Address>>,
    /// Let the dashboard show values of keys, to anyone who can reach it
    #[arg(long, requires = "dashboard", help_heading = "Dashboard")]
    dashboard_values: bool,
    /// A name by which browsers may ask for the dashboard, besides its address and localhost
    #[arg(long, value_name = "NAME", requires = "dashboard", help_heading = "Dashboard")]
    dashboard_name: Vec<String>,
}

impl Flags {
    /// The requested dashboard, if any. `port` is used if no address was given.
    pub fn options(&self, port: u16) -> Option<Options> {
        let address = self.dashboard.clone()?;
        let address = address.unwrap_or_else(|| Address { host: "127.0.0.1".into(), port });
        Some(Options { address, names: self.dashboard_name.clone(), values: self.dashboard_values })
    }
}

/// Where to listen and what to show.
#[derive(Clone, Debug)]
pub struct Options {
    /// Where to listen.
    pub address: Address,
    /// Names by which browsers may request it, besides the address and localhost.
    pub names: Vec<String>,
    /// May values be shown?
    pub values: bool,
}

/// A running dashboard. Dropping it stops it.
#[derive(Debug)]
pub struct Dashboard {
    http: tenfold_http::Server,
    shows_values: bool,
    _watch: Watch,
}

/// Unread answers of all clients together. The longest, about thousands of nodes with eight ranks each, have
/// 20 MB.
const OUTPUT_MAX: usize = 64 << 20;

/// Descriptors that a dashboard may take: its clients, and a few for itself.
pub const DESCRIPTORS: usize = 256 + 16;

/// Serves a dashboard of `server`.
///
/// # Errors
/// If it cannot listen at the address.
pub fn start(options: Options, server: Arc<Server>) -> io::Result<Dashboard> {
    let Options { address: Address { host, port }, mut names, values } = options;
    let listeners = tenfold_store::listen(&host, port)
        .map_err(|fault| io::Error::other(format!("dashboard: {fault}")))?;
    names.push(host); // a name that was given to listen on is also accepted
    let board = Arc::new(Board::new(server, values));
    let mut limits = tenfold_http::Limits::default();
    limits.output = OUTPUT_MAX;
    let http = tenfold_http::Options::default()
        .listeners(listeners)
        .names(names, "use the server's address or localhost, or start it with --dashboard-name NAME")
        .limits(limits);
    let shown = board.clone();
    let http = tenfold_http::Server::start(http, move |request| shown.answer(request, now()))?;
    Ok(Dashboard { http, shows_values: values, _watch: Watch::start(board)? })
}

impl Dashboard {
    /// The address on which it listens.
    pub fn address(&self) -> SocketAddr {
        self.http.address()
    }

    /// The warning for a user who made it reachable from other machines.
    pub fn warning(&self) -> Option<String> {
        let is_open = |address: &SocketAddr| !address.ip().to_canonical().is_loopback();
        let address = self.http.addresses().iter().find(|address| is_open(address))?;
        let values = if self.shows_values { "values too" } else { "but no values" };
        Some(format!(
            "no authentication: anyone who can reach the dashboard at {address} sees the names of keys, the addresses of \
             clients and what they wait for, {values}"
        ))
    }
}

/// The line that says where it is.
impl fmt::Display for Dashboard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "dashboard on http://{}/", self.address())
    }
}

fn now() -> Now {
    let unix = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    Now { instant: Instant::now(), unix: unix.as_secs_f64() }
}

/// How often the server is read.
const STEP: Duration = Duration::from_secs(1);

/// The thread that watches the server, until this is dropped.
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
                // After a long pause of the whole machine, missed readings are not repeated.
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
            let _ = thread.join(); // a panic has already been printed
        }
    }
}
