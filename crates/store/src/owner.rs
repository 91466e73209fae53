//! Which user a socket of this machine belongs to.
//!
//! Loopback is private to a machine, not to a user: every local user can connect to 127.0.0.1. The kernel
//! knows the user of the peer's socket and reports it for the four numbers of a connection
//! (NETLINK_SOCK_DIAG, no privileges needed). This distinguishes PyTorch's own clients, which cannot present
//! a secret, from those of other users.
//!
//! The owner is unknown if the kernel has no `inet_diag`, or if the peer has already closed the connection.

use std::net::{IpAddr, SocketAddr};

use rustix::net::netlink::{self, SocketAddrNetlink};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

/// The owner of a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner {
    /// The user's number.
    pub user: u32,
    /// Older kernels report root as the owner of a socket that its process has closed.
    is_open: bool,
}

impl Owner {
    /// Whether it is this process's user, or root, which nothing keeps out anyway.
    pub fn is_trusted(self) -> bool {
        self.user == rustix::process::geteuid().as_raw() || self.user == 0 && self.is_open
    }
}

/// The owner of the TCP socket of this machine that has the address `own` and is connected to `other`.
pub fn of_connection(own: SocketAddr, other: SocketAddr) -> Option<Owner> {
    ask(canonical(own), canonical(other))
}

/// The owner of the TCP socket of this machine that listens on `own`.
pub fn of_listener(own: SocketAddr) -> Option<Owner> {
    let own = canonical(own);
    let nobody = match own.ip() {
        IpAddr::V4(_) => IpAddr::from([0; 4]),
        IpAddr::V6(_) => IpAddr::from([0; 16]),
    };
    ask(own, SocketAddr::new(nobody, 0))
}

/// As the kernel stores it: an IPv4 address stays one, even if it arrived at an IPv6 socket.
fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

// From linux/netlink.h, linux/sock_diag.h and linux/inet_diag.h.
const HEADER: usize = 16;
const REQUEST: usize = HEADER + 56;
const SOCK_DIAG_BY_FAMILY: u16 = 20;
const NLM_F_REQUEST: u16 = 1;
const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;
const IPPROTO_TCP: u8 = 6;
const ESTABLISHED: u8 = 1;
const LISTEN: u8 = 10;
/// Offsets of the state and the user in an answer.
const STATE: usize = HEADER + 1;
const USER: usize = HEADER + 64;
const ANSWER: usize = HEADER + 72;

fn ask(own: SocketAddr, other: SocketAddr) -> Option<Owner> {
    let socket = rustix::net::socket_with(
        AddressFamily::NETLINK,
        SocketType::DGRAM,
        SocketFlags::CLOEXEC,
        Some(netlink::SOCK_DIAG),
    )
    .ok()?;
    rustix::net::sendto(&socket, &request(own, other), SendFlags::empty(), &SocketAddrNetlink::new(0, 0))
        .ok()?;
    let mut answer = [0; 1024];
    // The kernel answers while it handles the request; if there is no answer, the owner is unknown.
    let (length, _) = rustix::net::recv(&socket, &mut answer, RecvFlags::DONTWAIT).ok()?;
    read(&answer[..length])
}

fn request(own: SocketAddr, other: SocketAddr) -> [u8; REQUEST] {
    let mut bytes = [0; REQUEST];
    let mut at = 0;
    let mut put = |field: &[u8]| {
        bytes[at..at + field.len()].copy_from_slice(field);
        at += field.len();
    };
    put(&(REQUEST as u32).to_ne_bytes());
    put(&SOCK_DIAG_BY_FAMILY.to_ne_bytes());
    put(&NLM_F_REQUEST.to_ne_bytes());
    put(&[0; 8]); // number and port of the asker
    put(&[if own.is_ipv4() { AF_INET } else { AF_INET6 }, IPPROTO_TCP, 0, 0]);
    put(&u32::MAX.to_ne_bytes()); // in any state
    put(&own.port().to_be_bytes());
    put(&other.port().to_be_bytes());
    put(&octets(own.ip()));
    put(&octets(other.ip()));
    put(&[0; 4]); // on any interface
    put(&[0xff; 8]); // no cookie
    bytes
}

fn octets(address: IpAddr) -> [u8; 16] {
    let mut octets = [0; 16];
    match address {
        IpAddr::V4(address) => octets[..4].copy_from_slice(&address.octets()),
        IpAddr::V6(address) => octets = address.octets(),
    }
    octets
}

fn read(answer: &[u8]) -> Option<Owner> {
    let kind = u16::from_ne_bytes(answer.get(4..6)?.try_into().ok()?);
    if kind != SOCK_DIAG_BY_FAMILY || answer.len() < ANSWER {
        return None;
    }
    let user = u32::from_ne_bytes(answer[USER..USER + 4].try_into().ok()?);
    Some(Owner { user, is_open: matches!(answer[STATE], ESTABLISHED | LISTEN) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn the_owner_of_both_ends_and_of_a_listener_is_known() {
        for address in ["127.0.0.1:0", "[::1]:0", "0.0.0.0:0"] {
            let Ok(listener) = TcpListener::bind(address) else { continue };
            let port = listener.local_addr().unwrap().port();
            let host = if address.starts_with('[') { "::1" } else { "127.0.0.1" };
            let there = SocketAddr::new(host.parse().unwrap(), port);
            let Some(listening) = of_listener(there) else { return }; // a kernel without `inet_diag`
            let own = rustix::process::geteuid().as_raw();
            assert_eq!((listening.user, listening.is_trusted()), (own, true));
            let client = TcpStream::connect_timeout(&there, std::time::Duration::from_secs(40)).unwrap();
            let (server, peer) = listener.accept().unwrap();
            let owner = of_connection(peer, server.local_addr().unwrap()).unwrap();
            assert_eq!((owner.user, owner.is_trusted()), (own, true));
            drop(client);
        }
    }

    #[test]
    fn nothing_is_known_of_a_connection_that_does_not_exist() {
        let address = |port| SocketAddr::from(([127, 0, 0, 3], port));
        assert_eq!(of_connection(address(1), address(2)), None);
        assert_eq!(read(&[0; 10]), None);
    }

    #[test]
    fn another_user_is_not_trusted_nor_is_a_closed_socket_of_root() {
        let own = rustix::process::geteuid().as_raw();
        assert!(!Owner { user: own + 1, is_open: true }.is_trusted());
        assert!(Owner { user: 0, is_open: true }.is_trusted());
        assert_eq!(Owner { user: 0, is_open: false }.is_trusted(), own == 0);
    }
}
