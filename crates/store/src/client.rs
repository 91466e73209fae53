//! A store on a server elsewhere: c10d's TCPStore.
//!
//! One client is one connection. Threads can share it and take turns. A thread that waits keeps its turn. A
//! program that wants to do something else meanwhile uses a
//! [`StoreExt::try_clone`](crate::StoreExt::try_clone).
//!
//! Every call keeps its deadline, even if the server is frozen or unreachable. If a call leaves a connection
//! out of step, the client drops the connection, and the next call opens a new one.
//!
//! c10d puts a `/` in front of every key to keep its own counter `init/` separate from users' keys. So do we.

use std::collections::HashMap;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs as _};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, Weak};
use std::time::Duration;

use crate::connect::Link;
use crate::error::Result;
use crate::ops::{DEFAULT_TIMEOUT, NO_SUCH_KEY, NO_SUCH_KEY_HINT, Store, failure};
use crate::request::{Operation, Request, Response, show_keys};
use crate::server::{Facts, Limits, Server, ServerOptions};
use crate::value::Value;
use crate::wire::{self, Cancelled, Command};
use tenfold_base::{Deadline, ErrorKind, Fault, show_duration};

/// Counts the workers that have joined. The only key without a slash in front.
const WORKERS: &[u8] = b"init/";

/// How long a server may take, beyond the wait's own limit, to confirm that it has cancelled a wait.
const CANCEL_GRACE: Duration = Duration::from_secs(1);

const REFUSED_HINT: &str = "check whether the server has exited or refused the write: it closes the connection of a \
                            client whose request is over a limit: see its log and `closed` in `tenfold store HOST:PORT stats`";

const NO_QUEUES_HINT: &str = "check whether the server has exited; PyTorch's legacy server (use_libuv=False) has no queues and \
                              closes the connection";

const PONG_DIFFERS: &str = "unexpected response to a ping";

/// The nonce of the ping that follows a write.
const CONFIRM: u32 = 1;

/// How long to try to replace a lost connection.
const RECONNECT: Duration = Duration::from_secs(5);

/// How to reach a store server, and whether to host it.
#[derive(Debug)]
#[non_exhaustive]
pub struct TcpStoreOptions {
    /// Name or address of the server. For the hosting process: the address to listen on, unless `bind` is
    /// set.
    pub host: String,
    /// Port of the server. 0 picks a free port; only for the hosting process.
    pub port: u16,
    /// Host the server in this process.
    pub is_server: bool,
    /// The number of clients, including the host's own.
    pub world_size: Option<usize>,
    /// Count this client, and, if hosting, wait until `world_size` clients have joined.
    pub wait_workers: bool,
    /// The limit for connecting, and the default for every operation.
    pub timeout: Duration,
    /// Share one server among all stores of this process that host on the same port and set this option.
    pub multi_tenant: bool,
    /// Hosting: listen on this socket instead of binding one.
    pub listener: Option<TcpListener>,
    /// Hosting: listen on this address instead of `host`; `0.0.0.0` for every interface.
    pub bind: Option<String>,
    /// Hosting: the server's limits.
    pub limits: Limits,
}

impl TcpStoreOptions {
    /// A client of the server at `host`:`port`.
    pub fn new(host: impl Into<String>, port: u16) -> Self {
        TcpStoreOptions {
            host: host.into(),
            port,
            is_server: false,
            world_size: None,
            wait_workers: true,
            timeout: DEFAULT_TIMEOUT,
            multi_tenant: false,
            listener: None,
            bind: None,
            limits: Limits::default(),
        }
    }

    #[must_use]
    /// Sets [`TcpStoreOptions::is_server`](Self#structfield.is_server).
    pub fn is_server(mut self, is_server: bool) -> Self {
        self.is_server = is_server;
        self
    }

    #[must_use]
    /// Sets [`TcpStoreOptions::world_size`](Self#structfield.world_size).
    pub fn world_size(mut self, world_size: usize) -> Self {
        self.world_size = Some(world_size);
        self
    }

    #[must_use]
    /// Sets [`TcpStoreOptions::wait_workers`](Self#structfield.wait_workers).
    pub fn wait_workers(mut self, wait_workers: bool) -> Self {
        self.wait_workers = wait_workers;
        self
    }

    #[must_use]
    /// Sets [`TcpStoreOptions::timeout`](Self#structfield.timeout).
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    #[must_use]
    /// Sets [`TcpStoreOptions::multi_tenant`](Self#structfield.multi_tenant).
    pub fn multi_tenant(mut self, multi_tenant: bool) -> Self {
        self.multi_tenant = multi_tenant;
        self
    }

    #[must_use]
    /// Sets [`TcpStoreOptions::listener`](Self#structfield.listener).
    pub fn listener(mut self, listener: TcpListener) -> Self {
        self.listener = Some(listener);
        self
    }

    #[must_use]
    /// Sets [`TcpStoreOptions::bind`](Self#structfield.bind).
    pub fn bind(mut self, bind: impl Into<String>) -> Self {
        self.bind = Some(bind.into());
        self
    }

    #[must_use]
    /// Sets [`TcpStoreOptions::limits`](Self#structfield.limits).
    pub fn limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }
}

/// A client of a TCPStore server, tenfold's or PyTorch's.
///
/// ```
/// use tenfold_store::{StoreExt, TcpStore, TcpStoreOptions};
///
/// // Rank 0 hosts; port 0 picks a free one, which the other ranks need to know.
/// let host = TcpStore::open(TcpStoreOptions::new("127.0.0.1", 0).is_server(true))?;
/// let other = TcpStore::connect("127.0.0.1", host.port())?;
/// other.set("who", "me")?;
/// assert_eq!(&*host.get("who")?, b"me");
/// # Ok::<(), tenfold_store::Error>(())
/// ```
#[derive(Debug)]
pub struct TcpStore {
    host: String,
    /// Where this client connects: `host`, or the address of our own server.
    dial: String,
    port: u16,
    timeout_millis: AtomicU64,
    seat: Mutex<Seat>,
    seat_free: Condvar,
    server: Option<Arc<Server>>,
}

/// The connection, or the thread that has it.
#[derive(Debug)]
struct Seat {
    link: Option<Link>,
    /// What the thread that has the connection is doing, and for how long.
    taken_by: Option<(String, Deadline)>,
    /// A connection must not be shared with a forked child, because replies could go to either process.
    pid: u32,
    /// Why the last connection was given up.
    lost: Option<String>,
}

impl TcpStore {
    /// A client of the server at `host`:`port`, with the default options.
    pub fn connect(host: &str, port: u16) -> Result<TcpStore> {
        TcpStore::open(TcpStoreOptions::new(host, port))
    }

    /// Hosts a server if asked to, connects, and waits for the workers if asked to.
    pub fn open(options: TcpStoreOptions) -> Result<TcpStore> {
        let deadline = Deadline::after(options.timeout);
        let name = format!("{}:{}", options.host, options.port);
        TcpStore::try_open(options, deadline).map_err(|fault| failure("connect", &name, deadline, fault))
    }

    fn try_open(mut options: TcpStoreOptions, deadline: Deadline) -> std::result::Result<TcpStore, Fault> {
        if options.world_size == Some(0) {
            return Err(Fault::new(ErrorKind::Argument, "invalid world size 0: expected at least 1")
                .hint("omit the world size if the number of workers is not known"));
        }
        if !options.is_server && (options.listener.is_some() || options.bind.is_some()) {
            return Err(Fault::new(
                ErrorKind::Argument,
                "only the hosting process can have a listening socket or a bind address",
            ));
        }
        let server = if options.is_server { Some(host_server(&mut options)?) } else { None };
        let (dial, port) = match &server {
            None => (options.host.clone(), options.port),
            // Our own server may listen on another address than the one that other ranks connect to.
            Some(server) => (reachable(server), server.address().port()),
        };
        let store = TcpStore {
            timeout_millis: AtomicU64::new(millis(options.timeout)),
            seat: Mutex::new(Seat {
                link: Some(Link::open(&dial, port, deadline)?),
                taken_by: None,
                pid: std::process::id(),
                lost: None,
            }),
            seat_free: Condvar::new(),
            host: options.host,
            dial,
            port,
            server,
        };
        if let Some(world_size) = options.world_size
            && options.wait_workers
        {
            store.meet_workers(world_size, deadline)?;
        }
        Ok(store)
    }

    /// The server's host, as it was given.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// The server's port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The server, if this process hosts it.
    pub fn server(&self) -> Option<&Server> {
        self.server.as_deref()
    }

    /// Returns what the server reports about itself. Only tenfold's server does; PyTorch's closes the
    /// connection.
    pub fn server_facts(&self) -> Result<Facts> {
        let deadline = Deadline::after(self.timeout());
        let ask = || {
            let mut link = Link::open(&self.dial, self.port, deadline)?; // a separate one: the server may close it
            link.send(&Command::Info);
            link.flush(deadline)?;
            let facts = wire::decode_info(&mut link.replies(deadline)).map_err(|fault| match fault.kind {
                ErrorKind::Lost => {
                    Fault::new(ErrorKind::Unsupported, "this server does not report facts about itself")
                        .hint("use tenfold's server; PyTorch's does not support this")
                }
                _ => fault,
            })?;
            serde_json::from_slice(&facts).map_err(|error| {
                Fault::new(ErrorKind::Protocol, format!("cannot parse the server's facts: {error}"))
            })
        };
        ask().map_err(|fault| failure("info", &self.name(), deadline, fault))
    }

    /// Measures one round trip.
    pub fn ping(&self) -> Result<Duration> {
        let deadline = Deadline::after(self.timeout());
        let nonce = std::process::id();
        let ping = |link: &mut Link| {
            link.send(&Command::Ping { nonce });
            link.flush(deadline)?;
            let mut answer = [0; 4];
            link.fill(&mut answer, deadline)?;
            match answer == nonce.to_le_bytes() {
                true => Ok(deadline.elapsed()),
                false => Err(Fault::new(ErrorKind::Protocol, PONG_DIFFERS)),
            }
        };
        self.with_link("ping".into(), deadline, ping)
            .map_err(|fault| failure("ping", &self.name(), deadline, fault))
    }

    /// Counts this client; the host waits until all clients have joined.
    fn meet_workers(&self, world_size: usize, deadline: Deadline) -> std::result::Result<(), Fault> {
        const PAUSE: Duration = Duration::from_millis(10);
        self.raw(Request::Add { key: WORKERS.into(), delta: 1 }, deadline)?;
        let Some(server) = &self.server else { return Ok(()) };
        loop {
            // The server is ours and answers, so a round is never interrupted: the deadline is checked
            // between rounds.
            let round = Deadline::after(self.timeout().max(CANCEL_GRACE));
            self.raw(Request::Wait { keys: vec![WORKERS.into()] }, round)?;
            let Response::Value(Some(count)) = self.raw(Request::Get { key: WORKERS.into() }, round)? else {
                return Err(Fault::new(ErrorKind::Protocol, "the counter of workers was deleted"));
            };
            let count = crate::table::parse_number(&count).unwrap_or(0);
            if usize::try_from(count).is_ok_and(|count| count >= world_size) {
                return Ok(());
            }
            if deadline.passed() {
                return Err(Fault::timeout(format!("{count} of {world_size} clients joined"))
                    .hint(describe_waiting(&server.facts())));
            }
            deadline.pause(PAUSE);
        }
    }

    /// Serves a request whose keys already have the slash in front.
    fn raw(&self, request: Request<'_>, deadline: Deadline) -> std::result::Result<Response, Fault> {
        let operation = request.operation();
        let count = if let Request::MultiGet { keys } = &request { keys.len() } else { 0 };
        let command = Command::Call(request);
        let Command::Call(request) = &command else { unreachable!("it was just made") };
        let what = format!("{} {}", operation.name(), show_keys(&request.keys()));
        let mut is_tenfold = false;
        let result = self.with_link(what, deadline, |link| {
            is_tenfold = link.is_tenfold;
            link.send(&command);
            match operation {
                Operation::Wait | Operation::Barrier => wait(link, operation, deadline),
                // The protocol has no reply to these. Tenfold's server answers the ping only if it has not
                // refused the write.
                Operation::Append | Operation::MultiSet | Operation::QueuePush | Operation::Set
                    if link.is_tenfold =>
                {
                    link.send(&Command::Ping { nonce: CONFIRM });
                    link.flush(deadline)?;
                    let answer = &mut [0; 4];
                    link.fill(answer, deadline).map_err(|fault| match fault.kind {
                        ErrorKind::Lost => fault.hint(REFUSED_HINT),
                        _ => fault,
                    })?;
                    match *answer == CONFIRM.to_le_bytes() {
                        true => Ok(Response::Done),
                        false => Err(Fault::new(ErrorKind::Protocol, PONG_DIFFERS)),
                    }
                }
                _ => {
                    link.flush(deadline)?;
                    wire::decode_response(operation, count, &mut link.replies(deadline))
                }
            }
        });
        let is_queue = matches!(operation, Operation::QueueLen | Operation::QueuePop | Operation::QueuePush);
        result.map_err(|fault| match fault.kind {
            ErrorKind::Lost if is_queue && !is_tenfold => fault.hint(NO_QUEUES_HINT),
            _ => fault,
        })
    }

    /// Takes this thread's turn with the connection.
    fn with_link<T>(
        &self,
        what: String,
        deadline: Deadline,
        work: impl FnOnce(&mut Link) -> std::result::Result<T, Fault>,
    ) -> std::result::Result<T, Fault> {
        let mut seat = self.sit_down(deadline)?;
        seat.taken_by = Some((what, deadline));
        let (link, lost) = (seat.link.take(), seat.lost.take());
        drop(seat); // other threads must see that it is taken, and time out

        let link = link.map_or_else(|| self.reconnect(deadline, lost.as_deref()), Ok);
        let (link, result) = match link {
            Err(fault) => (None, Err(fault)),
            Ok(mut link) => {
                let result = work(&mut link);
                (Some(link), result)
            }
        };

        let mut seat = self.lock();
        // A call that failed half-way leaves a reply in transit, which the next call would take for its own.
        seat.link = link.filter(|link| result.is_ok() || link.in_step);
        if seat.link.is_none() {
            seat.lost = lost.or_else(|| result.as_ref().err().map(|fault| fault.message.to_string()));
        }
        seat.taken_by = None;
        drop(seat);
        self.seat_free.notify_one();
        result
    }

    /// Waits until no other thread has the connection.
    fn sit_down(&self, deadline: Deadline) -> std::result::Result<MutexGuard<'_, Seat>, Fault> {
        let mut seat = self.lock();
        let pid = std::process::id();
        if seat.pid != pid {
            // This is a forked child: the thread that had the connection is in the parent.
            *seat = Seat { link: None, taken_by: None, pid, lost: None };
        }
        while let Some((what, since)) = &seat.taken_by {
            let Some(left) = deadline.left() else {
                seat = self.seat_free.wait(seat).expect(NO_PANIC);
                continue;
            };
            if left.is_zero() {
                let busy = show_duration(since.elapsed());
                let message = format!("another thread has been using this client in {what} for {busy}");
                return Err(
                    Fault::timeout(message).hint("use a clone of the store for each thread that waits")
                );
            }
            seat = self.seat_free.wait_timeout(seat, left).expect(NO_PANIC).0;
        }
        Ok(seat)
    }

    fn lock(&self) -> MutexGuard<'_, Seat> {
        self.seat.lock().expect(NO_PANIC)
    }

    fn reconnect(&self, deadline: Deadline, lost: Option<&str>) -> std::result::Result<Link, Fault> {
        let link = Link::open(&self.dial, self.port, deadline.at_most(RECONNECT)).map_err(|fault| {
            let earlier = lost.map_or(String::new(), |lost| format!(" (it was lost earlier: {lost})"));
            Fault::new(ErrorKind::Lost, format!("the store is lost: {}{earlier}", fault.message))
                .hint("check whether the server has exited; if it has, its keys are lost")
        })?;
        if let Some(lost) = lost {
            tracing::warn!(
                "reconnected to the store at {} after: {lost}; if the server was restarted, its keys are lost",
                link.peer()
            );
        }
        Ok(link)
    }
}

const NO_PANIC: &str = "nothing panics while holding it";

/// Waits for the answer to a queued `Wait` or `Barrier`, and cancels it at the deadline.
fn wait(link: &mut Link, operation: Operation, deadline: Deadline) -> std::result::Result<Response, Fault> {
    link.flush(deadline)?;
    let fault = match wire::decode_response(operation, 0, &mut link.replies(deadline)) {
        Err(fault) if fault.kind == ErrorKind::Timeout => fault,
        result => return result,
    };
    let grace = Deadline::after(CANCEL_GRACE);
    link.send(&Command::CancelWait);
    let cancelled = link.flush(grace).and_then(|()| wire::decode_cancelled(&mut link.replies(grace)));
    match cancelled {
        Ok(Cancelled::TooLate) => Ok(Response::Ready),
        Ok(Cancelled::InTime) => {
            link.in_step = true;
            Err(Fault::timeout(NO_SUCH_KEY).hint(NO_SUCH_KEY_HINT))
        }
        // It does not answer the cancel either, so the server has a problem, not the key.
        Err(_) => Err(fault),
    }
}

impl Store for TcpStore {
    fn call(&self, request: Request<'_>, deadline: Deadline) -> std::result::Result<Response, Fault> {
        let response = self.raw(request.with_prefix(b"/"), deadline)?;
        Ok(match response {
            Response::Keys(keys) => Response::Keys(user_keys(keys)),
            other => other,
        })
    }

    fn name(&self) -> String {
        if self.host.contains(':') {
            format!("[{}]:{}", self.host, self.port)
        } else {
            format!("{}:{}", self.host, self.port)
        }
    }

    fn address(&self) -> Option<SocketAddr> {
        (self.host.as_str(), self.port).to_socket_addrs().ok()?.next()
    }

    fn timeout(&self) -> Duration {
        Duration::from_millis(self.timeout_millis.load(Ordering::Relaxed))
    }

    fn set_timeout(&self, timeout: Duration) -> bool {
        self.timeout_millis.store(millis(timeout), Ordering::Relaxed);
        true
    }

    fn has_extended_api(&self) -> bool {
        true
    }

    /// A separate connection to the same server. It does not keep a server alive that this store hosts.
    fn duplicate(&self) -> std::result::Result<Arc<dyn Store>, Fault> {
        let options = TcpStoreOptions::new(self.dial.clone(), self.port).timeout(self.timeout());
        let deadline = Deadline::after(self.timeout());
        Ok(Arc::new(TcpStore::try_open(options, deadline)?))
    }
}

/// The users' keys without the slash in front.
fn user_keys(keys: Vec<Value>) -> Vec<Value> {
    keys.into_iter().filter_map(|key| key.strip_prefix(b"/").map(Value::from)).collect()
}

fn millis(timeout: Duration) -> u64 {
    u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX)
}

/// Servers that several stores of this process share, by port.
static TENANTS: LazyLock<Mutex<HashMap<u16, Weak<Server>>>> = LazyLock::new(Mutex::default);

fn host_server(options: &mut TcpStoreOptions) -> std::result::Result<Arc<Server>, Fault> {
    let host = options.bind.clone().unwrap_or_else(|| options.host.clone());
    let server_options = ServerOptions {
        listener: options.listener.take(),
        limits: options.limits,
        ..ServerOptions::new(host, options.port)
    };
    if !options.multi_tenant {
        return Server::try_start(server_options).map(Arc::new);
    }
    let mut tenants = TENANTS.lock().expect(NO_PANIC);
    tenants.retain(|_, server| server.strong_count() > 0);
    if let Some(server) = tenants.get(&options.port).and_then(Weak::upgrade) {
        return Ok(server);
    }
    let server = Arc::new(Server::try_start(server_options)?);
    tenants.insert(server.address().port(), Arc::downgrade(&server));
    Ok(server)
}

/// An address at which this process reaches its own server.
fn reachable(server: &Server) -> String {
    let ip = server.address().ip();
    match ip.is_unspecified() {
        true if ip.is_ipv6() => "::1".into(),
        true => "127.0.0.1".into(),
        false => ip.to_string(),
    }
}

/// Evidence for a host whose workers have not joined: which clients are connected and what they wait for.
fn describe_waiting(facts: &Facts) -> String {
    let others = facts.connections.saturating_sub(1);
    let waiting =
        facts.waiters.iter().take(3).map(|waiter| format!("{} waits for {}", waiter.peer, waiter.keys));
    let waiting = waiting.collect::<Vec<_>>().join(", ");
    match waiting.is_empty() {
        true => format!(
            "{others} other clients are connected; check that the missing ones were started with this address"
        ),
        false => format!("{others} other clients are connected; {waiting}"),
    }
}

#[cfg(test)]
#[path = "../tests/transcript/mod.rs"]
#[expect(dead_code, reason = "shared with tests/transcripts.rs, which needs all of it")]
mod transcript;

#[cfg(test)]
mod tests;
