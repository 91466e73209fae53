//! Listening sockets: only on the requested address.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, ToSocketAddrs};
use std::time::Duration;
use tenfold_base::{ErrorKind, Fault};

use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};

/// How many connections may wait to be accepted; the kernel cuts it to its own limit.
const BACKLOG: i32 = 16 << 10;

/// A client whose host died without closing the connection is noticed within `TIME + 3 × INTERVAL`.
const KEEPALIVE_TIME: Duration = Duration::from_secs(20);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
const KEEPALIVE_RETRIES: u32 = 3;

/// Listens on every address of `host` and on no other; port 0 picks one that is free on all of them. The
/// sockets do not block. If the port is taken, the error names the process that holds it.
pub fn listen(host: &str, port: u16) -> Result<Vec<TcpListener>, Fault> {
    let mut addresses: Vec<SocketAddr> = (host, port)
        .to_socket_addrs()
        .map_err(|error| {
            Fault::new(ErrorKind::Connect, format!("cannot listen on `{host}`: {error}"))
                .hint("give an address of this machine, or 0.0.0.0 for all of them")
        })?
        .collect();
    addresses.sort_unstable_by_key(|address| address.is_ipv6()); // the IPv4 address is the one that users expect to see
    addresses.dedup();
    const TRIES: usize = 16; // a port picked on one address may be taken on the other
    for attempt in 1.. {
        match listen_on_all(&addresses) {
            Err((address, error)) if port == 0 && attempt < TRIES && in_use(&error) => {
                tracing::debug!(%address, "a picked port was taken on another address, picking again");
            }
            Err((address, error)) => return Err(bind_fault(address, error)),
            Ok(listeners) => return Ok(listeners),
        }
    }
    unreachable!("the last attempt returns")
}

fn listen_on_all(addresses: &[SocketAddr]) -> Result<Vec<TcpListener>, (SocketAddr, io::Error)> {
    let mut listeners: Vec<TcpListener> = Vec::with_capacity(addresses.len());
    for address in addresses {
        let mut address = *address;
        if let Some(first) = listeners.first() {
            address.set_port(first.local_addr().map_err(|error| (address, error))?.port());
        }
        match listen_on(address) {
            Ok(listener) => listeners.push(listener),
            // A machine without IPv6 still has names that resolve to it.
            Err(error) if address.is_ipv6() && !listeners.is_empty() && !in_use(&error) => {
                tracing::debug!(%address, %error, "not listening on this address");
            }
            Err(error) => return Err((address, error)),
        }
    }
    Ok(listeners)
}

fn listen_on(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?; // a restarted server need not wait for old connections to expire
    if let SocketAddr::V6(v6) = address {
        socket.set_only_v6(!v6.ip().is_unspecified())?; // `::` means every address, as is usual
    }
    socket.bind(&address.into())?;
    adopt(socket.into())
}

/// Makes a bound socket listen, with the options that accepted connections inherit.
pub(crate) fn adopt(listener: TcpListener) -> io::Result<TcpListener> {
    let socket = SockRef::from(&listener);
    set_options(&socket, listener.local_addr()?)?;
    socket.listen(BACKLOG)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// No delay, keepalive, and no pacing within a machine. On Linux, accepted connections inherit the listener's
/// options.
pub(crate) fn set_options(socket: &SockRef<'_>, address: SocketAddr) -> io::Result<()> {
    socket.set_tcp_nodelay(true)?;
    // Where BBR is the default, it paces even loopback: 1 MiB to a client took 380 µs, 245 µs with cubic.
    // Between hosts, the machine's setting is kept.
    #[cfg(target_os = "linux")]
    if is_private(address.ip()) {
        let _ = socket.set_tcp_congestion(b"cubic"); // not essential: the kernel may not have it
    }
    let keepalive = TcpKeepalive::new()
        .with_time(KEEPALIVE_TIME)
        .with_interval(KEEPALIVE_INTERVAL)
        .with_retries(KEEPALIVE_RETRIES);
    socket.set_tcp_keepalive(&keepalive)
}

fn in_use(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::AddrInUse
}

#[cold]
fn bind_fault(address: SocketAddr, error: io::Error) -> Fault {
    // torchelastic looks for the words "address already in use" to try another port.
    if in_use(&error) {
        let holder = port_holder(address.port()).map_or(String::new(), |holder| format!(" by {holder}"));
        return Fault::new(
            ErrorKind::Connect,
            format!("cannot listen on {address}: address already in use{holder}"),
        )
        .hint("stop that program, choose another port, or give port 0 to have one picked");
    }
    let fault = Fault::io(format!("cannot listen on {address}"), io::Error::from(error.kind()))
        .kind_is(ErrorKind::Connect);
    match error.kind() {
        io::ErrorKind::AddrNotAvailable => {
            fault.hint("use an address of this machine, or 0.0.0.0 for all of them")
        }
        io::ErrorKind::PermissionDenied => {
            fault.hint("choose a port above 1023: lower ones need a privilege")
        }
        _ => fault,
    }
}

/// The process that listens on `port`, if it can be determined: only on Linux, and only for processes that we
/// may inspect.
fn port_holder(port: u16) -> Option<String> {
    const LISTENING: &str = "0A";
    let inodes: Vec<String> = ["/proc/net/tcp", "/proc/net/tcp6"]
        .iter()
        .filter_map(|table| std::fs::read_to_string(table).ok())
        .flat_map(|table| {
            let rows: Vec<String> = table
                .lines()
                .skip(1)
                .filter_map(|row| {
                    let mut fields = row.split_whitespace();
                    let local = fields.nth(1)?;
                    let state = fields.nth(1)?;
                    let inode = fields.nth(5)?;
                    let local_port = u16::from_str_radix(local.rsplit(':').next()?, 16).ok()?;
                    (local_port == port && state == LISTENING).then(|| format!("socket:[{inode}]"))
                })
                .collect();
            rows
        })
        .collect();
    if inodes.is_empty() {
        return None;
    }
    for process in std::fs::read_dir("/proc").ok()?.flatten() {
        let Some(pid) = process.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        let Ok(descriptors) = std::fs::read_dir(process.path().join("fd")) else { continue };
        let holds = descriptors.flatten().any(|descriptor| {
            std::fs::read_link(descriptor.path())
                .is_ok_and(|target| inodes.iter().any(|inode| target.as_os_str() == inode.as_str()))
        });
        if holds {
            let name = std::fs::read_to_string(process.path().join("comm")).unwrap_or_default();
            return Some(format!("process {pid} ({})", name.trim()));
        }
    }
    None
}

/// Can only this machine reach it?
pub(crate) fn is_private(address: IpAddr) -> bool {
    address.to_canonical().is_loopback()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpStream;

    #[test]
    fn it_listens_on_the_address_asked_for_and_on_no_other() {
        let listeners = listen("127.0.0.1", 0).expect("loopback can be bound");
        assert_eq!(listeners.len(), 1);
        let address = listeners[0].local_addr().unwrap();
        assert_eq!(address.ip(), IpAddr::from([127, 0, 0, 1]));
        // The same port on another loopback address is still free.
        TcpListener::bind(("127.0.0.2", address.port())).expect("another address of this machine is free");
    }

    #[test]
    fn what_is_accepted_is_probed_when_silent_and_never_delayed() {
        let listener = listen("127.0.0.1", 0).expect("loopback can be bound").remove(0);
        listener.set_nonblocking(false).unwrap();
        let _client =
            TcpStream::connect_timeout(&listener.local_addr().unwrap(), Duration::from_secs(10)).unwrap();
        let (accepted, _) = listener.accept().unwrap();
        let socket = SockRef::from(&accepted);
        #[cfg(not(target_os = "linux"))]
        set_options(&socket, listener.local_addr().unwrap()).unwrap();
        assert!(socket.tcp_nodelay().unwrap());
        assert!(socket.keepalive().unwrap());
        let dead_after = socket.tcp_keepalive_time().unwrap()
            + socket.tcp_keepalive_interval().unwrap() * socket.tcp_keepalive_retries().unwrap();
        assert!(dead_after <= Duration::from_secs(60), "{dead_after:?}");
    }

    #[test]
    fn a_taken_port_names_the_process_that_holds_it() {
        let held = TcpListener::bind("127.0.0.1:0").unwrap();
        let fault = listen("127.0.0.1", held.local_addr().unwrap().port()).unwrap_err();
        let expected = format!("address already in use by process {} (", std::process::id());
        assert!(fault.message.contains(&expected), "{}", fault.message);
    }

    #[test]
    fn a_foreign_address_and_an_unknown_name_are_clear_errors() {
        let fault = listen("192.0.2.1", 0).unwrap_err(); // TEST-NET-1, not assigned; binding sends nothing
        assert!(fault.message.starts_with("cannot listen on 192.0.2.1:0: "), "{}", fault.message);
        let fault = listen("no such host", 0).unwrap_err();
        assert!(fault.message.starts_with("cannot listen on `no such host`: "), "{}", fault.message);
    }
}
