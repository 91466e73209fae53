//! What `/proc` tells about a rank: is it stopped, what has it used, and by which connections does it talk to the store.
//!
//! Looked up once for each beat of the rendezvous, for the dashboard. The work is bounded: so many processes of a rank's
//! group, so many files of each.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::{Instant, SystemTime};

use serde::Serialize;

use super::progress::Collective;
use super::rank::{End, Rank};

/// Processes of one rank that are looked at, and files of one process.
const PROCESSES_MAX: usize = 64;
const FILES_MAX: usize = 4096;
/// Connections that are told of one rank.
const CONNECTIONS_MAX: usize = 16;

/// What the dashboard is told of one rank.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct RankStatus {
    pub(super) rank: usize,
    pub(super) local_rank: usize,
    pub(super) pid: u32,
    /// `running`, `stopped` (by a signal such as SIGSTOP) or `ended`.
    pub(super) state: &'static str,
    pub(super) end: Option<String>,
    pub(super) store_connections: Vec<String>,
    pub(super) cpu_seconds: f64,
    pub(super) memory_bytes: u64,
    pub(super) last_output_seconds: Option<f64>,
    pub(super) started_unix: f64,
    pub(super) collectives: Vec<Collective>,
}

impl RankStatus {
    pub(super) fn of(
        rank: &Rank,
        now: Instant,
        connections: &Connections,
        collectives: Vec<Collective>,
    ) -> Self {
        let process = rank.process().as_raw_pid().cast_unsigned();
        let usage = if rank.is_running() { Usage::of(process) } else { None };
        let usage = usage.unwrap_or_default();
        let state = match (rank.end, usage.is_stopped) {
            (Some(_), _) => "ended",
            (None, true) => "stopped",
            (None, false) => "running",
        };
        let started = rank.started.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        RankStatus {
            rank: rank.number,
            local_rank: rank.local_rank,
            pid: process,
            state,
            end: rank.end.as_ref().map(End::to_string),
            store_connections: if rank.is_running() { connections.of_group(process) } else { Vec::new() },
            cpu_seconds: usage.cpu_seconds,
            memory_bytes: usage.memory_bytes,
            last_output_seconds: rank
                .pipes
                .last_output()
                .map(|at| now.saturating_duration_since(at).as_secs_f64()),
            started_unix: started.as_secs_f64(),
            collectives,
        }
    }
}

/// What is used, from `/proc/PID/stat`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Usage {
    pub(super) is_stopped: bool,
    pub(super) cpu_seconds: f64,
    pub(super) memory_bytes: u64,
}

impl Usage {
    pub(super) fn of(process: u32) -> Option<Usage> {
        let text = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
        let ticks = rustix::param::clock_ticks_per_second();
        parse_usage(&text, ticks, rustix::param::page_size())
    }
}

fn parse_usage(stat: &str, ticks_a_second: u64, page: usize) -> Option<Usage> {
    let (_, fields) = stat.rsplit_once(") ")?; // the name before it may hold anything
    let fields: Vec<&str> = fields.split_whitespace().collect();
    // proc(5) counts from 1, and the two before are cut off.
    let field = |number: usize| fields.get(number - 3).and_then(|field| field.parse::<u64>().ok());
    let (user, system, pages) = (field(14)?, field(15)?, field(24)?);
    Some(Usage {
        is_stopped: matches!(fields.first(), Some(&("T" | "t"))),
        cpu_seconds: (user + system) as f64 / ticks_a_second as f64,
        memory_bytes: pages.saturating_mul(page as u64),
    })
}

/// Connections of this machine that lead to one port, and whose they may be.
#[derive(Debug, Default)]
pub(super) struct Connections {
    /// By the inode of their socket.
    own_ends: HashMap<u64, SocketAddr>,
    /// Processes by their group.
    groups: HashMap<u32, Vec<u32>>,
}

impl Connections {
    pub(super) fn to(port: u16) -> Connections {
        let mut own_ends = HashMap::new();
        for table in ["/proc/net/tcp", "/proc/net/tcp6"] {
            let text = std::fs::read_to_string(table).unwrap_or_default(); // without IPv6 there is none
            own_ends.extend(text.lines().skip(1).filter_map(|row| parse_row(row, port)));
        }
        let groups = if own_ends.is_empty() { HashMap::new() } else { groups() };
        Connections { own_ends, groups }
    }

    /// Those of the processes of one group, as the store's server sees them.
    pub(super) fn of_group(&self, group: u32) -> Vec<String> {
        let mut found: Vec<String> = Vec::new();
        for process in self.groups.get(&group).into_iter().flatten().take(PROCESSES_MAX) {
            let Ok(files) = std::fs::read_dir(format!("/proc/{process}/fd")) else { continue };
            for file in files.flatten().take(FILES_MAX) {
                let Ok(target) = std::fs::read_link(file.path()) else { continue };
                let inode = target.to_str().and_then(parse_socket);
                let Some(address) = inode.and_then(|inode| self.own_ends.get(&inode)) else { continue };
                let address = address.to_string();
                if found.len() < CONNECTIONS_MAX && !found.contains(&address) {
                    found.push(address); // forked processes share sockets
                }
            }
        }
        found
    }
}

fn groups() -> HashMap<u32, Vec<u32>> {
    let mut groups: HashMap<u32, Vec<u32>> = HashMap::new();
    let Ok(processes) = std::fs::read_dir("/proc") else { return groups };
    for process in processes.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok()) {
        let stat = std::fs::read_to_string(format!("/proc/{process}/stat"));
        if let Some(group) = stat.ok().and_then(|stat| parse_group(&stat)) {
            groups.entry(group).or_default().push(process);
        }
    }
    groups
}

fn parse_group(stat: &str) -> Option<u32> {
    let (_, fields) = stat.rsplit_once(") ")?;
    fields.split(' ').nth(2)?.parse().ok()
}

/// `socket:[4711]`.
fn parse_socket(target: &str) -> Option<u64> {
    target.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()
}

/// One row of `/proc/net/tcp`: inode and own address of an established connection to `port`.
fn parse_row(row: &str, port: u16) -> Option<(u64, SocketAddr)> {
    const ESTABLISHED: &str = "01";
    let mut fields = row.split_whitespace();
    let (local, remote) = (fields.nth(1)?, fields.next()?);
    let state = fields.next()?;
    if state != ESTABLISHED || parse_address(remote)?.port() != port {
        return None;
    }
    Some((fields.nth(5)?.parse().ok()?, parse_address(local)?))
}

/// `0100007F:1F90`: each 32-bit word in the byte order of the machine.
fn parse_address(text: &str) -> Option<SocketAddr> {
    let (address, port) = text.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    let word = |at: usize| u32::from_str_radix(address.get(at..at + 8)?, 16).ok().map(u32::to_ne_bytes);
    let address = match address.len() {
        8 => IpAddr::V4(Ipv4Addr::from(word(0)?)),
        32 => {
            let bytes: Vec<u8> = [word(0)?, word(8)?, word(16)?, word(24)?].concat();
            IpAddr::V6(Ipv6Addr::from(<[u8; 16]>::try_from(bytes).ok()?))
        }
        _ => return None,
    };
    Some(SocketAddr::new(address, port))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn usage_is_read_whatever_the_name_is() {
        let stat = "7 (a ) T b) T 1 7 7 0 -1 4194304 93 0 0 0 250 50 0 0 20 0 1 0 481 2400256 218 99\n";
        let usage = Usage { is_stopped: true, cpu_seconds: 3.0, memory_bytes: 218 * 4096 };
        assert_eq!(parse_usage(stat, 100, 4096), Some(usage));
        assert_eq!(
            parse_usage(&stat.replace(") T 1", ") S 1"), 100, 4096).map(|usage| usage.is_stopped),
            Some(false)
        );
        assert_eq!(parse_usage("7 (a) T 1 7", 100, 4096), None);
        assert!(Usage::of(std::process::id()).unwrap().memory_bytes > 0);
    }

    #[test]
    fn addresses_read_as_the_kernel_writes_them() {
        if cfg!(target_endian = "little") {
            assert_eq!(parse_address("0100007F:1F90"), Some("127.0.0.1:8080".parse().unwrap()));
            let one = "00000000000000000000000001000000:0050";
            assert_eq!(parse_address(one), Some("[::1]:80".parse().unwrap()));
        }
        for bad in ["", "0100007F", "0100007F:", "01:50", "0100007G:0050", "é00007F:0050"] {
            assert_eq!(parse_address(bad), None, "{bad}");
        }
    }

    #[test]
    fn only_established_connections_to_the_port_count() {
        let row = |state: &str| {
            format!(
                "   0: 0100007F:9C40 0200007F:1F90 {state} 00000000:00000000 00:00000000 00000000  1000 0 4711 1 0 20 4"
            )
        };
        if cfg!(target_endian = "little") {
            assert_eq!(parse_row(&row("01"), 8080), Some((4711, "127.0.0.1:40000".parse().unwrap())));
        }
        assert_eq!(parse_row(&row("01"), 8081), None);
        assert_eq!(parse_row(&row("0A"), 8080), None);
        assert_eq!(parse_row("  sl  local_address", 8080), None);
        assert_eq!(parse_socket("socket:[4711]"), Some(4711));
        assert_eq!(parse_socket("/dev/null"), None);
        assert_eq!(parse_group("12 (a ) b) S 1 7 9 0 -1"), Some(7));
    }

    #[test]
    fn a_connection_of_this_process_is_found() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let client = TcpStream::connect_timeout(&address, std::time::Duration::from_secs(10)).unwrap();
        let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
        let found = Connections::to(address.port()).of_group(parse_group(&stat).unwrap());
        assert!(found.contains(&client.local_addr().unwrap().to_string()), "{found:?}");
    }
}
