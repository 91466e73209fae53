//! What the dashboard shows of a rank: its state, its resource usage, and its connections to the store.
//!
//! Read from `/proc` once for each heartbeat of the rendezvous. The work is bounded: only the first processes of a rank's
//! group are looked at, and only the first files of each.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::{Instant, SystemTime};

use rustix::process::Pid;
use tenfold_dashboard::job::{self, SpareStatus, StoreOperation};
use tenfold_store::WaiterFacts;

use super::proc::{self, Stat, Unnamed};
use super::progress::Collective;
use super::rank::{End, Rank};

/// Processes of one rank that are looked at, and files of one process.
const PROCESSES_MAX: usize = 64;
const FILES_MAX: usize = 4096;
/// Connections of one rank that are reported.
const CONNECTIONS_MAX: usize = 16;

/// What is reported to the dashboard about one rank.
pub(super) type RankStatus = job::RankStatus<Collective>;

pub(super) fn status_of(
    rank: &Rank,
    now: Instant,
    connections: &Connections,
    collectives: Vec<Collective>,
) -> RankStatus {
    let process = rank.process();
    let stat = if rank.is_running() { Stat::read(process) } else { None };
    let state = state_of(rank, stat);
    let store = if rank.is_running() { connections.of_group(process) } else { OfRank::default() };
    RankStatus {
        rank: rank.seat.map(|seat| seat.number),
        local_rank: rank.seat.map(|seat| seat.local_rank),
        pid: Some(process.as_raw_pid().cast_unsigned().into()),
        state: state.to_owned(),
        end: rank.end.as_ref().map(End::to_string),
        store_connections: store.addresses,
        store_wait: store.wait,
        cpu_seconds: Some(stat.map_or(0.0, cpu_seconds)),
        memory_bytes: Some(stat.map_or(0, memory_bytes)),
        last_output_seconds: rank
            .pipes
            .last_output()
            .map(|at| now.saturating_duration_since(at).as_secs_f64()),
        started_unix: Some(started_unix(rank)),
        collectives,
    }
}

/// What is reported about a process that waits to become a rank.
pub(super) fn spare_status_of(spare: &Rank) -> SpareStatus {
    let stat = if spare.is_running() { Stat::read(spare.process()) } else { None };
    SpareStatus {
        pid: spare.process().as_raw_pid().cast_unsigned().into(),
        state: state_of(spare, stat).to_owned(),
        started_unix: Some(started_unix(spare)),
    }
}

fn state_of(rank: &Rank, stat: Option<Stat>) -> &'static str {
    match (rank.end, stat.is_some_and(Stat::is_stopped)) {
        (Some(_), _) => "ended",
        (None, true) => "stopped",
        (None, false) => "running",
    }
}

fn started_unix(rank: &Rank) -> f64 {
    rank.started.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

fn cpu_seconds(stat: Stat) -> f64 {
    stat.ticks as f64 / rustix::param::clock_ticks_per_second() as f64
}

fn memory_bytes(stat: Stat) -> u64 {
    stat.pages.saturating_mul(rustix::param::page_size() as u64)
}

/// This machine's connections to one port, and the processes that may own them.
#[derive(Debug, Default)]
pub(super) struct Connections {
    /// By the inode of their socket.
    own_ends: HashMap<u64, SocketAddr>,
    /// Processes by their group.
    groups: HashMap<i32, Vec<Pid>>,
    relay: Option<RelaySeen>,
}

/// The relay that these connections go to. The store's server does not see its clients.
#[derive(Debug)]
struct RelaySeen {
    host: String,
    /// By the client's address.
    waits: HashMap<SocketAddr, StoreOperation>,
}

/// The connections of one rank.
#[derive(Debug, Default, PartialEq)]
pub(super) struct OfRank {
    pub(super) addresses: Vec<String>,
    /// What it waits for, if a relay knows: the longest wait.
    pub(super) wait: Option<StoreOperation>,
}

impl Connections {
    pub(super) fn to(port: u16) -> Connections {
        let own_ends = proc::connections_to(port);
        let groups = if own_ends.is_empty() { HashMap::new() } else { groups() };
        Connections { own_ends, groups, relay: None }
    }

    /// They go to this node's relay, whose clients wait for this. The same loopback addresses occur on other
    /// nodes, so they are named with the host.
    pub(super) fn go_to_relay(&mut self, host: &str, waiters: Vec<WaiterFacts>) {
        let wait = |waiter: WaiterFacts| {
            let WaiterFacts { operation, keys, keys_count, seconds, .. } = waiter;
            Some((waiter.peer.parse().ok()?, StoreOperation { operation, keys, keys_count, seconds }))
        };
        let waits = waiters.into_iter().filter_map(wait).collect();
        self.relay = Some(RelaySeen { host: host.into(), waits });
    }

    /// The connections of the processes of one group, as the store's server or the relay sees them.
    pub(super) fn of_group(&self, group: Pid) -> OfRank {
        let mut found = OfRank::default();
        for &process in self.groups.get(&group.as_raw_pid()).into_iter().flatten().take(PROCESSES_MAX) {
            let inodes = proc::open_inodes(process, Unnamed::Socket, FILES_MAX);
            for address in inodes.filter_map(|inode| self.own_ends.get(&inode)) {
                let name = match &self.relay {
                    Some(relay) => format!("{address} by relay of {}", relay.host),
                    None => address.to_string(),
                };
                let wait = self.relay.as_ref().and_then(|relay| relay.waits.get(address)).cloned();
                found.wait = [found.wait.take(), wait]
                    .into_iter()
                    .flatten()
                    .max_by(|a, b| a.seconds.total_cmp(&b.seconds));
                if found.addresses.len() < CONNECTIONS_MAX && !found.addresses.contains(&name) {
                    found.addresses.push(name); // forked processes share sockets
                }
            }
        }
        found
    }
}

fn groups() -> HashMap<i32, Vec<Pid>> {
    let mut groups: HashMap<i32, Vec<Pid>> = HashMap::new();
    for process in proc::processes() {
        if let Some(stat) = Stat::read(process) {
            groups.entry(stat.group).or_default().push(process);
        }
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::getpid;
    use std::net::{TcpListener, TcpStream};
    use tenfold_store::{Relay, RelayOptions, Server, ServerOptions, StoreExt as _, TcpStore};

    #[test]
    fn ticks_and_pages_become_seconds_and_bytes() {
        let stat = Stat::read(getpid()).unwrap();
        let ticks = 3 * rustix::param::clock_ticks_per_second();
        assert_eq!(cpu_seconds(Stat { ticks, ..stat }), 3.0);
        assert_eq!(memory_bytes(Stat { pages: 2, ..stat }), 2 * rustix::param::page_size() as u64);
    }

    #[test]
    fn a_connection_of_this_process_group_is_found() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let client = TcpStream::connect_timeout(&address, std::time::Duration::from_secs(60)).unwrap();
        let found = Connections::to(address.port()).of_group(rustix::process::getpgrp());
        assert!(found.addresses.contains(&client.local_addr().unwrap().to_string()), "{found:?}");
        assert_eq!(found.wait, None, "the server knows it");
    }

    #[test]
    fn a_rank_behind_a_relay_is_named_with_its_host_and_its_longest_wait() {
        let server = Server::start(ServerOptions::new("127.0.0.1", 0)).unwrap();
        let relay = Relay::start(RelayOptions::new("127.0.0.1", server.address().port())).unwrap();
        let clients = ["a", "b"].map(|key| {
            let store = TcpStore::connect("127.0.0.1", relay.address().port()).unwrap();
            std::thread::spawn(move || store.get(key))
        });
        while relay.waiters().len() < 2 {
            std::thread::yield_now();
        }
        let mut connections = Connections::to(relay.address().port());
        connections.go_to_relay("node-b", relay.waiters());
        let found = connections.of_group(rustix::process::getpgrp());
        let wait = found.wait.unwrap();
        assert_eq!((wait.operation.as_str(), wait.keys_count), ("wait", 1));
        assert!(wait.keys == "`/a`" || wait.keys == "`/b`", "{}", wait.keys);
        let is_named =
            |address: &String| address.starts_with("127.0.0.1:") && address.ends_with(" by relay of node-b");
        assert!(found.addresses.len() >= 2 && found.addresses.iter().all(is_named), "{:?}", found.addresses);
        let setter = TcpStore::connect("127.0.0.1", server.address().port()).unwrap();
        setter.multi_set(&["a", "b"], &["", ""]).unwrap();
        clients.into_iter().for_each(|client| assert!(client.join().unwrap().is_ok()));
        assert_eq!(relay.waiters(), []);
    }
}
