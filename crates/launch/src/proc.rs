//! Reads `/proc`: one process's state, its children and open files, and the machine's TCP connections.
//!
//! A process may exit at any moment, and a process of another user shows little. Functions return nothing then, or less.

use std::collections::HashMap;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::Path;

use rustix::process::Pid;

/// What is needed of `/proc/PID/stat`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stat {
    /// `R`, `S`, `T`, `Z` and so on.
    pub(super) state: u8,
    /// The process group.
    pub(super) group: i32,
    pub(super) flags: u64,
    /// Processor time in user and kernel mode, in clock ticks.
    pub(super) ticks: u64,
    /// Time of the start since boot, in clock ticks. Distinguishes a process from a later one with the same
    /// number.
    pub(super) started: u64,
    /// Resident memory, in pages.
    pub(super) pages: u64,
}

impl Stat {
    /// Nothing if the process does not exist.
    pub(super) fn read(process: Pid) -> Option<Stat> {
        Stat::parse(&fs::read_to_string(format!("/proc/{process}/stat")).ok()?)
    }

    fn parse(text: &str) -> Option<Stat> {
        let (_, fields) = text.rsplit_once(") ")?; // the name before it may contain anything
        let fields: Vec<&str> = fields.split_whitespace().collect();
        // proc(5) counts from 1, and the first two fields are cut off.
        let field = |number: usize| fields.get(number - 3).copied();
        let number = |number: usize| field(number)?.parse::<u64>().ok();
        Some(Stat {
            state: *field(3)?.as_bytes().first()?,
            group: field(5)?.parse().ok()?,
            flags: number(9)?,
            ticks: number(14)?.saturating_add(number(15)?),
            started: number(22)?,
            pages: number(24)?,
        })
    }

    /// In a container the first process often does not reap its children: zombies stay.
    pub(super) fn is_alive(self) -> bool {
        !matches!(self.state, b'Z' | b'X')
    }

    /// Stopped by a signal or a debugger.
    pub(super) fn is_stopped(self) -> bool {
        matches!(self.state, b'T' | b't')
    }

    /// A zombie, or about to be one: its files are closed before its parent is notified.
    pub(super) fn is_exiting(self) -> bool {
        const PF_EXITING: u64 = 0x4;
        !self.is_alive() || self.flags & PF_EXITING != 0
    }
}

pub(super) fn parse_pid(text: &str) -> Option<Pid> {
    text.parse().ok().and_then(Pid::from_raw)
}

/// All processes that the kernel shows this one.
pub(super) fn processes() -> impl Iterator<Item = Pid> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| parse_pid(entry.file_name().to_str()?))
}

/// Does this kernel list children?
pub(super) fn lists_children(process: Pid) -> bool {
    Path::new(&format!("/proc/{process}/task/{process}/children")).exists()
}

/// Children of all threads of a process.
pub(super) fn children(process: Pid) -> Vec<Pid> {
    let Ok(threads) = fs::read_dir(format!("/proc/{process}/task")) else { return Vec::new() };
    let lists =
        threads.flatten().filter_map(|thread| fs::read_to_string(thread.path().join("children")).ok());
    lists.flat_map(|list| list.split_whitespace().filter_map(parse_pid).collect::<Vec<_>>()).collect()
}

/// The environment that a process was started with: variables, each followed by a zero byte.
pub(super) fn environment(process: Pid) -> Option<Vec<u8>> {
    fs::read(format!("/proc/{process}/environ")).ok()
}

/// What kind of file an inode belongs to, where the file has no path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unnamed {
    Pipe,
    Socket,
}

/// Inodes of the pipes or sockets among the first `files_max` open files of a process. Empty for processes of other users.
pub(super) fn open_inodes(process: Pid, kind: Unnamed, files_max: usize) -> impl Iterator<Item = u64> {
    let files = fs::read_dir(format!("/proc/{process}/fd")).into_iter().flatten().flatten();
    files.take(files_max).filter_map(move |file| parse_link(&fs::read_link(file.path()).ok()?, kind))
}

/// `pipe:[4711]` or `socket:[4711]`.
fn parse_link(link: &Path, kind: Unnamed) -> Option<u64> {
    let beginning = match kind {
        Unnamed::Pipe => "pipe:[",
        Unnamed::Socket => "socket:[",
    };
    link.to_str()?.strip_prefix(beginning)?.strip_suffix(']')?.parse().ok()
}

/// This machine's established TCP connections to a port: the own address, by the inode of the socket.
pub(super) fn connections_to(port: u16) -> HashMap<u64, SocketAddr> {
    let mut found = HashMap::new();
    for table in ["/proc/net/tcp", "/proc/net/tcp6"] {
        let text = fs::read_to_string(table).unwrap_or_default(); // missing without IPv6
        found.extend(text.lines().skip(1).filter_map(|row| parse_row(row, port)));
    }
    found
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
    use rustix::process::getpid;
    use std::os::linux::fs::MetadataExt as _;

    fn line(name: &str, state: &str, flags: u64) -> String {
        format!("7 ({name}) {state} 1 8 9 0 -1 {flags} 93 0 0 0 250 50 0 0 20 0 1 0 481 2400256 218 99\n")
    }

    #[test]
    fn a_process_is_read_whatever_its_name_is() {
        let expected = Stat { state: b'T', group: 8, flags: 4_194_304, ticks: 300, started: 481, pages: 218 };
        for name in ["sh", "two words", "a ) Z 1 2", ")", ") ", "", "(((", "new\nline", "\u{fffd}ü"] {
            assert_eq!(Stat::parse(&line(name, "T", 4_194_304)), Some(expected), "{name:?}");
        }
    }

    #[test]
    fn an_incomplete_line_is_ignored() {
        for text in
            ["", "7", "7 (sh)", "7 (sh) ", "7 (sh) Z 1", "7 (sh) S 1 x 9 0", &line("sh", "S", 0)[..60]]
        {
            assert_eq!(Stat::parse(text), None, "{text:?}");
        }
    }

    #[test]
    fn stopped_exiting_and_dead_processes_are_distinguished() {
        let is = |state, flags| {
            let stat = Stat::parse(&line("a ) Z b", state, flags)).unwrap();
            (stat.is_alive(), stat.is_stopped(), stat.is_exiting())
        };
        assert_eq!(is("S", 4_194_304), (true, false, false));
        assert_eq!(is("t", 4_194_304), (true, true, false));
        assert_eq!(is("R", 4_194_308), (true, false, true));
        assert_eq!(is("Z", 4_194_304), (false, false, true));
        assert_eq!(is("X", 0), (false, false, true));
    }

    #[test]
    fn a_process_that_does_not_exist_shows_nothing() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let process = Pid::from_child(&child);
        child.wait().unwrap();
        // Reaped, and its number is not reused so soon.
        assert_eq!(Stat::read(process), None);
        assert!(children(process).is_empty() && !lists_children(process));
        assert_eq!(environment(process), None);
        assert_eq!(open_inodes(process, Unnamed::Pipe, usize::MAX).count(), 0);
        assert!(processes().all(|other| other != process));
    }

    #[test]
    fn this_process_shows_itself() {
        let own = Stat::read(getpid()).unwrap();
        assert!(own.is_alive() && !own.is_exiting() && own.started > 0 && own.pages > 0, "{own:?}");
        assert!(processes().any(|process| process == getpid()));
        let (reader, _writer) = std::io::pipe().unwrap();
        let inode = fs::File::from(std::os::fd::OwnedFd::from(reader)).metadata().unwrap().st_ino();
        // Its own handle is closed by now; the writer's end has the same inode.
        assert!(open_inodes(getpid(), Unnamed::Pipe, usize::MAX).any(|other| other == inode));
        assert!(!open_inodes(getpid(), Unnamed::Socket, usize::MAX).any(|other| other == inode));
    }

    #[test]
    fn a_connection_of_this_process_is_found() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let limit = std::time::Duration::from_secs(60);
        let client = std::net::TcpStream::connect_timeout(&address, limit).unwrap();
        let found = connections_to(address.port());
        let own: Vec<_> = open_inodes(getpid(), Unnamed::Socket, usize::MAX)
            .filter_map(|inode| found.get(&inode))
            .collect();
        assert!(own.contains(&&client.local_addr().unwrap()), "{own:?}");
    }

    #[test]
    fn links_read_as_the_kernel_writes_them() {
        let parse = |text: &str, kind| parse_link(Path::new(text), kind);
        assert_eq!(parse("pipe:[12]", Unnamed::Pipe), Some(12));
        assert_eq!(parse("socket:[4711]", Unnamed::Socket), Some(4711));
        assert_eq!(parse("socket:[12]", Unnamed::Pipe), None);
        assert_eq!(parse("/dev/null", Unnamed::Socket), None);
        assert_eq!(parse("pipe:[x]", Unnamed::Pipe), None);
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
    }
}
