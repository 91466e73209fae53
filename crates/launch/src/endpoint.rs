//! Finds the store: does this node host it, or does it connect?
//!
//! This is decided by binding, not by comparing names: a machine can listen on an address if and only if the
//! address is its own. A node that cannot bind the address connects. A node that finds the port taken also
//! connects, if a store answers there. That store may belong to another launcher of this job or to a `tenfold
//! serve`.
//!
//! Opening may have to wait for other nodes, so it happens on a separate thread, see `run`.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, ToSocketAddrs, UdpSocket};
use std::sync::Arc;
use std::time::Duration;

use rustix::process::{Resource, getrlimit};
use tenfold_store::owner::{self, Owner};
use tenfold_store::{Deadline, Limits, Server, ServerOptions, TcpStore, TcpStoreOptions, show_duration};

use super::args::{ELASTIC_PORT, Endpoint, LaunchPlan, Meeting};

const LOOPBACK: &str = "127.0.0.1";
/// The limit of one attempt to connect; between two attempts the user may be informed.
const ATTEMPT: Duration = Duration::from_secs(3);
/// A store on this machine answers within this time.
const ANSWER: Duration = Duration::from_secs(3);
/// Between two lines that say that this node waits.
const NEWS_INTERVAL: Duration = Duration::from_secs(10);
/// The port may be released by one program and taken by the next while we check.
const LOOKS_MAX: usize = 5;

/// The store, from this node's point of view.
pub(super) struct Home {
    /// Present if this node hosts it; shared with the dashboard.
    pub(super) server: Option<Arc<Server>>,
    pub(super) store: Arc<TcpStore>,
    /// The address at which the ranks of all nodes reach it.
    pub(super) endpoint: Endpoint,
}

/// Opens the store; `note` is called with lines for the user.
pub(super) fn open(plan: &LaunchPlan, note: &dyn Fn(String)) -> Result<Home, String> {
    let home = match &plan.meeting {
        Meeting::Alone => {
            let server = start(LOOPBACK, 0, plan.other_users)?;
            host(server, &Endpoint { host: LOOPBACK.into(), port: 0 }, plan)?
        }
        Meeting::Static { endpoint, node_rank: 0 } => {
            check_port(endpoint, plan)?;
            let (server, why) = insist(endpoint, plan)?;
            tell(note, plan, &server, endpoint, why);
            host(server, endpoint, plan)?
        }
        Meeting::Static { endpoint, node_rank } => {
            check_port(endpoint, plan)?;
            if plan.tells_where {
                note(format!(
                    "node {node_rank} of {} connects to the store of node 0 at {endpoint}",
                    plan.nodes.max
                ));
            }
            connect(endpoint, plan, note)?
        }
        Meeting::Elastic { endpoint } => {
            check_port(endpoint, plan)?;
            match decide(endpoint, plan)? {
                Decision::Host(server, why) => {
                    tell(note, plan, &server, endpoint, why);
                    host(server, endpoint, plan)?
                }
                Decision::Guest(why) => {
                    note(format!("this node connects to the store at {endpoint} ({why})"));
                    connect(endpoint, plan, note)?
                }
            }
        }
    };
    Ok(home)
}

enum Decision {
    Host(Server, &'static str),
    Guest(&'static str),
}

const BOUND: &str = "the address could be bound here";

fn decide(endpoint: &Endpoint, plan: &LaunchPlan) -> Result<Decision, String> {
    match plan.settings.is_host {
        Some(false) => return Ok(Decision::Guest("is_host=false")),
        Some(true) => return insist(endpoint, plan).map(|(server, why)| Decision::Host(server, why)),
        None => {}
    }
    let (listen, why) = listen_where(endpoint, plan);
    let mut refused = String::new();
    for _ in 0..LOOKS_MAX {
        match start(listen, endpoint.port, plan.other_users) {
            Ok(server) => return Ok(Decision::Host(server, why)),
            Err(error) => refused = error,
        }
        match look(endpoint) {
            Look::Free => {} // it was taken and has become free
            Look::Elsewhere => return Ok(Decision::Guest("the address is not one of this machine's")),
            Look::Taken if answers(endpoint) => {
                trust_holder(endpoint, holder(endpoint))?;
                return Ok(Decision::Guest("a store answers there already"));
            }
            Look::Taken | Look::Refused => break,
        }
    }
    Err(refused)
}

/// Hosts, even if the address is not one of this machine's: it may be translated on the way.
fn insist(endpoint: &Endpoint, plan: &LaunchPlan) -> Result<(Server, &'static str), String> {
    let (listen, why) = listen_where(endpoint, plan);
    match start(listen, endpoint.port, plan.other_users) {
        Ok(server) => Ok((server, why)),
        Err(_) if look(endpoint) == Look::Elsewhere => {
            let is_v6 = endpoint.host.parse().is_ok_and(|address: IpAddr| address.is_ipv6());
            let server = start(if is_v6 { "::" } else { "0.0.0.0" }, endpoint.port, plan.other_users)?;
            Ok((
                server,
                "requested; the address is not one of this machine's, so the store listens on all addresses",
            ))
        }
        Err(error) => Err(error),
    }
}

/// A machine's name often means 127.0.1.1 on the machine itself, which other machines cannot reach.
fn listen_where<'a>(endpoint: &'a Endpoint, plan: &LaunchPlan) -> (&'a str, &'static str) {
    let is_name = endpoint.host.parse::<IpAddr>().is_err() && endpoint.host != "localhost";
    let only_here = || {
        resolve(endpoint).is_ok_and(|addresses| {
            !addresses.is_empty() && addresses.iter().all(|address| address.ip().is_loopback())
        })
    };
    if is_name && plan.nodes.max > 1 && only_here() {
        return ("0.0.0.0", "the name resolves to loopback here, so the store listens on all addresses");
    }
    (&endpoint.host, BOUND)
}

/// Open files that are not clients of the store: pipes of ranks, log files, a dashboard's connections.
const FILES_KEPT: usize = 512;
/// A store serves at least this many clients, as far as open files are concerned.
const CLIENTS_MIN: usize = 64;

/// Limits of a store or relay of a launcher. Clients beyond its open files would only be accepted and then
/// closed.
pub(super) fn limits(other_users: bool) -> Limits {
    let mut limits = Limits::default();
    limits.other_users = other_users;
    let files = getrlimit(Resource::Nofile).current.map_or(usize::MAX, |limit| limit as usize);
    let connections = limits.connections.min(files.saturating_sub(FILES_KEPT).max(CLIENTS_MIN));
    limits.with_connections(connections)
}

fn start(listen: &str, port: u16, other_users: bool) -> Result<Server, String> {
    Server::start(ServerOptions::new(listen, port).limits(limits(other_users))).map_err(|error| {
        let hint = error.hint().map_or(String::new(), |hint| format!("\n  hint: {hint}"));
        format!("cannot host the store: {}{hint}", error.message())
    })
}

fn resolve(endpoint: &Endpoint) -> io::Result<Vec<SocketAddr>> {
    Ok((endpoint.host.as_str(), endpoint.port).to_socket_addrs()?.collect())
}

/// What an attempt to bind shows about an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Look {
    Free,
    Elsewhere,
    Taken,
    Refused,
}

fn look(endpoint: &Endpoint) -> Look {
    let Ok(mut addresses) = resolve(endpoint) else { return Look::Elsewhere }; // a name that may still appear
    if addresses.iter().any(SocketAddr::is_ipv4) {
        addresses.retain(SocketAddr::is_ipv4); // a machine without IPv6 still has names that resolve to it
    }
    let errors = addresses.iter().filter_map(|address| TcpListener::bind(address).err());
    errors.map(|error| judge(&error)).next().unwrap_or(Look::Free)
}

fn judge(error: &io::Error) -> Look {
    match error.kind() {
        io::ErrorKind::AddrNotAvailable => Look::Elsewhere,
        io::ErrorKind::AddrInUse => Look::Taken,
        _ => Look::Refused,
    }
}

fn answers(endpoint: &Endpoint) -> bool {
    TcpStore::open(TcpStoreOptions::new(&endpoint.host, endpoint.port).timeout(ANSWER)).is_ok()
}

/// The owner of the socket that listens at an address of this machine, if the kernel reports it.
fn holder(endpoint: &Endpoint) -> Option<Owner> {
    resolve(endpoint).ok()?.into_iter().find_map(owner::of_listener)
}

/// On the default port, another user can wait for jobs that name no port, and a job's nodes do what its store
/// says.
fn trust_holder(endpoint: &Endpoint, holder: Option<Owner>) -> Result<(), String> {
    match holder {
        Some(holder) if endpoint.port == ELASTIC_PORT && !holder.is_trusted() => Err(format!(
            "the store at {endpoint} belongs to user {}: a store on the default port is joined only if it belongs to this user\n  \
             hint: give --rdzv-endpoint another port, on all nodes",
            holder.user
        )),
        _ => Ok(()),
    }
}

fn tell(note: &dyn Fn(String), plan: &LaunchPlan, server: &Server, endpoint: &Endpoint, why: &str) {
    if plan.tells_where {
        let port = server.address().port();
        let endpoint = Endpoint { port, ..endpoint.clone() };
        note(format!("this node hosts the store at {endpoint} ({why})"));
    }
    warn_if_open(note, server);
}

fn warn_if_open(note: &dyn Fn(String), server: &Server) {
    if !server.is_private() {
        note(format!(
            "warning: no authentication: anyone who can reach {} can read and write this store, and ranks trust what they \
             read there",
            server.address()
        ));
    }
}

fn check_port(endpoint: &Endpoint, plan: &LaunchPlan) -> Result<(), String> {
    if endpoint.port == 0 && plan.nodes.max > 1 {
        return Err(format!(
            "{endpoint}: the other nodes cannot know a port that is chosen here\n  hint: give a port other than 0"
        ));
    }
    Ok(())
}

/// Connects to the server of this process.
fn host(server: Server, endpoint: &Endpoint, plan: &LaunchPlan) -> Result<Home, String> {
    let own = server.address();
    let reached = match own.ip() {
        ip if !ip.is_unspecified() => ip.to_string(),
        ip if ip.is_ipv6() => "::1".into(),
        _ => LOOPBACK.into(),
    };
    let options = TcpStoreOptions::new(reached, own.port()).timeout(plan.settings.read_timeout);
    let store = TcpStore::open(options).map_err(|error| error.to_string())?;
    let endpoint = Endpoint { port: own.port(), ..endpoint.clone() };
    Ok(Home { server: Some(Arc::new(server)), store: Arc::new(store), endpoint })
}

/// Connects to another node's server, which may not have started yet.
fn connect(endpoint: &Endpoint, plan: &LaunchPlan, note: &dyn Fn(String)) -> Result<Home, String> {
    let deadline = Deadline::after(plan.settings.join_timeout);
    let mut told = deadline.elapsed();
    loop {
        let limit = deadline.left().unwrap_or(ATTEMPT).min(ATTEMPT);
        match TcpStore::open(TcpStoreOptions::new(&endpoint.host, endpoint.port).timeout(limit)) {
            Ok(store) => {
                tenfold_store::Store::set_timeout(&store, plan.settings.read_timeout);
                return Ok(Home { server: None, store: Arc::new(store), endpoint: endpoint.clone() });
            }
            Err(error) if deadline.passed() => {
                let waited = show_duration(deadline.elapsed());
                return Err(format!(
                    "cannot reach the store at {endpoint} within {waited}: {}\n  hint: check that the node that hosts it is up and that no \
                     firewall blocks it; raise join_timeout in --rdzv-conf to wait longer",
                    error.message()
                ));
            }
            Err(error) => {
                if deadline.elapsed() - told >= NEWS_INTERVAL {
                    told = deadline.elapsed();
                    let (waited, limit) = (show_duration(told), show_duration(plan.settings.join_timeout));
                    note(format!(
                        "no store at {endpoint} for {waited}, trying for up to {limit}: {}",
                        error.message()
                    ));
                }
            }
        }
    }
}

/// A store of this node for the ranks, if the nodes met in a store that no node of this job hosts.
pub(super) fn open_for_ranks(
    met_at: &Endpoint,
    local_address: Option<&str>,
    other_users: bool,
    note: &dyn Fn(String),
) -> Result<(Server, Endpoint), String> {
    let host = match local_address {
        Some(address) => address.to_string(),
        None => own_address(met_at)
            .map_err(|error| format!("cannot find this node's address towards {met_at}: {error}"))?
            .to_string(),
    };
    let server = match start(&host, 0, other_users) {
        Ok(server) => server,
        Err(_) if local_address.is_some() => {
            // A name that other machines know and this one does not.
            let server = start("0.0.0.0", 0, other_users)?;
            note(format!(
                "--local-addr {host} cannot be bound here, so the ranks' store listens on all addresses"
            ));
            warn_if_open(note, &server);
            server
        }
        Err(error) => return Err(error),
    };
    let port = server.address().port();
    Ok((server, Endpoint { host, port }))
}

/// The address from which this machine would connect to another; nothing is sent.
fn own_address(other: &Endpoint) -> io::Result<IpAddr> {
    let other = resolve(other)?.into_iter().next().ok_or(io::ErrorKind::NotFound)?;
    let any: SocketAddr =
        if other.is_ipv6() { (IpAddr::from([0; 16]), 0) } else { (IpAddr::from([0; 4]), 0) }.into();
    let socket = UdpSocket::bind(any)?;
    socket.connect(other)?;
    Ok(socket.local_addr()?.ip())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(host: &str, port: u16) -> Endpoint {
        Endpoint { host: host.into(), port }
    }

    #[test]
    fn binding_shows_whose_address_it_is() {
        let holder = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = holder.local_addr().unwrap().port();
        assert_eq!(look(&at("127.0.0.1", port)), Look::Taken);
        drop(holder);
        assert_eq!(look(&at("127.0.0.1", port)), Look::Free);
        assert_eq!(look(&at("192.0.2.1", 29400)), Look::Elsewhere); // reserved for documentation
        assert_eq!(look(&at("no-such-name.invalid", 29400)), Look::Elsewhere);
    }

    #[test]
    fn only_a_store_answers_as_one() {
        let server = start(LOOPBACK, 0, false).unwrap();
        assert!(answers(&at(LOOPBACK, server.address().port())));
    }

    #[test]
    fn a_store_of_another_user_on_the_default_port_is_not_joined() {
        let server = start(LOOPBACK, 0, false).unwrap();
        let Some(own) = holder(&at(LOOPBACK, server.address().port())) else { return }; // a kernel without `inet_diag`
        assert_eq!(trust_holder(&at(LOOPBACK, ELASTIC_PORT), Some(own)), Ok(()));
        assert_eq!(trust_holder(&at(LOOPBACK, ELASTIC_PORT), None), Ok(()), "it cannot be known");
        let mut other = own;
        other.user += 1;
        let text = trust_holder(&at(LOOPBACK, ELASTIC_PORT), Some(other)).unwrap_err();
        assert!(
            text.starts_with(&format!("the store at 127.0.0.1:29400 belongs to user {}: ", other.user)),
            "{text}"
        );
        // A user who names a port chooses its store.
        assert_eq!(trust_holder(&at(LOOPBACK, 29401), Some(other)), Ok(()));
    }

    #[test]
    fn a_store_for_ranks_is_at_an_address_that_other_nodes_can_reach() {
        let (server, endpoint) = open_for_ranks(&at("127.0.0.2", 29400), None, false, &|_| ()).unwrap();
        assert_eq!(endpoint.to_string(), server.address().to_string());
        assert!(server.is_private());
    }

    #[test]
    fn a_store_for_ranks_on_all_addresses_causes_a_warning() {
        let notes = std::cell::RefCell::new(Vec::new());
        let note = |line: String| notes.borrow_mut().push(line);
        let met_at = at("127.0.0.2", 29400);
        let (server, endpoint) = open_for_ranks(&met_at, Some("no-such-name.invalid"), false, &note).unwrap();
        assert_eq!(endpoint.host, "no-such-name.invalid");
        let port = server.address().port();
        assert_eq!(
            notes.into_inner(),
            [
                "--local-addr no-such-name.invalid cannot be bound here, so the ranks' store listens on all addresses".into(),
                format!(
                    "warning: no authentication: anyone who can reach 0.0.0.0:{port} can read and write this store, and ranks \
                     trust what they read there"
                )
            ]
        );
    }
}
