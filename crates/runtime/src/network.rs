//! Where peers on other hosts reach this process: which address, and which port.
//!
//! The address is the one from which the system would call the store, since a peer that can reach the store's host can
//! probably reach that address too; or it is on one of the interfaces that the user named. Several that were named share
//! the messages out.
//!
//! Not here: connections (see `transport::line`).

use std::hash::{BuildHasher, RandomState};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket};
use std::ops::RangeInclusive;
use std::os::fd::AsFd as _;

use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use socket2::{Domain, Protocol, Socket, Type};

use crate::environment::{Interfaces, Rule};

/// How many connections may wait to be accepted: all ranks may connect at the same time. The kernel reduces it to
/// its own limit.
const BACKLOG: i32 = 4096;

/// Listens on `interface` and on no other, on a free port of `ports` or one that the system picks.
pub(crate) fn listen(interface: IpAddr, ports: Option<&RangeInclusive<u16>>) -> io::Result<TcpListener> {
    let Some(ports) = ports else { return listen_on(SocketAddr::new(interface, 0)) };
    let count = ports.len();
    // Processes that start together begin their search at different ports.
    let start = RandomState::new().hash_one(std::process::id()) as usize % count;
    for step in 0..count {
        let port = ports.start() + ((start + step) % count) as u16;
        match listen_on(SocketAddr::new(interface, port)) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
            result => return result,
        }
    }
    let (first, last) = (ports.start(), ports.end());
    Err(io::Error::new(
        io::ErrorKind::AddrInUse,
        format!("all {count} ports of TENFOLD_PORT_RANGE={first}-{last} are taken on {interface}"),
    ))
}

fn listen_on(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?; // a restarted job need not wait for old connections to fade
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

/// Open files that a rank asks for at most: all pairs of 512 ranks over TCP need some 2,500 for each group.
const FILES_MAX: u64 = 1 << 20;

/// Raises the limit of open files to what this process may have. Many systems give a process 1,024 unless it asks.
pub(crate) fn raise_file_limit() {
    let limit = getrlimit(Resource::Nofile);
    let wanted = limit.maximum.unwrap_or(FILES_MAX).min(FILES_MAX);
    if limit.current.is_some_and(|current| current < wanted) {
        // If the system refuses, the old limit stays. A rank that exceeds it gets an error that says so.
        let _ = setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum: limit.maximum });
    }
}

/// Is the error that no descriptors or no memory are left, as opposed to something about the peer?
pub(crate) fn is_exhaustion(error: &io::Error) -> bool {
    let errno = Errno::from_io_error(error);
    [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM].map(Some).contains(&errno)
}

/// Why a connection cannot be made, with what to do if this process is the reason.
pub(crate) fn explain(error: &io::Error) -> String {
    match (Errno::from_io_error(error), getrlimit(Resource::Nofile).current) {
        (Some(Errno::MFILE), Some(limit)) => {
            format!(
                "this process is out of file descriptors (its limit is {limit}): raise the limit, as by `ulimit -n`"
            )
        }
        (Some(Errno::NFILE), _) => {
            format!("this host is out of file descriptors: raise `fs.file-max` ({error})")
        }
        _ => error.to_string(),
    }
}

/// Binds a socket that is about to connect to the address of `interface`. The port is chosen when it connects: then it need
/// differ only from ports of connections to the same peer, so that a host has one for each of its many links.
pub(crate) fn bind_without_port(socket: &Socket, interface: IpAddr) -> io::Result<()> {
    let _ = tenfold_memory::socket::choose_port_late(socket.as_fd()); // a kernel that refuses chooses the port now
    socket.bind(&SocketAddr::new(interface, 0).into())
}

/// The store on the network: a launcher may have put a relay in front of it, on loopback.
pub(crate) fn behind_relay(store: Option<SocketAddr>, behind: Option<SocketAddr>) -> Option<SocketAddr> {
    let is_relay = store.is_some_and(|store| store.ip().to_canonical().is_loopback());
    behind.filter(|_| is_relay).or(store)
}

/// This host's addresses for its peers, at least one, given that of the store where there is one on the network.
pub(crate) fn addresses_towards(
    store: Option<SocketAddr>,
    interfaces: Option<&Interfaces>,
) -> io::Result<Vec<IpAddr>> {
    let routed = store.map(route_to).transpose();
    let Some(interfaces) = interfaces else {
        return Ok(vec![routed?.unwrap_or(Ipv4Addr::LOCALHOST.into())]);
    };
    let known =
        if_addrs::get_if_addrs()?.into_iter().map(|interface| (interface.name.clone(), interface.ip()));
    // An address of which the store's host does not even speak the protocol is of no use; nor one that needs a scope.
    let usable = |address: &IpAddr| match (address, store) {
        (IpAddr::V6(v6), _) if v6.is_unicast_link_local() => false,
        (address, Some(store)) => address.is_ipv4() == store.ip().to_canonical().is_ipv4(),
        (_, None) => true,
    };
    let mut known: Vec<(String, IpAddr)> = known.filter(|(_, address)| usable(address)).collect();
    // An interface has several addresses: the v4 one is what people expect, and loopback is for when there is no other.
    known.sort_by_key(|(_, address)| (address.is_loopback(), address.is_ipv6()));
    let chosen = choose(&known, &interfaces.rule, routed.ok().flatten());
    if chosen.is_empty() {
        let known: Vec<String> = known.iter().map(|(name, address)| format!("{name} ({address})")).collect();
        let message = format!("`{}` leaves no interface of {}", interfaces.said, known.join(", "));
        return Err(io::Error::new(io::ErrorKind::AddrNotAvailable, message));
    }
    Ok(chosen)
}

/// An address for each name of the rule that this host has an interface for, or of the first interface that the rule does not
/// exclude. Among several addresses that are equally good, `routed` is best. Loopback is only for when there is no other.
fn choose(known: &[(String, IpAddr)], rule: &Rule, routed: Option<IpAddr>) -> Vec<IpAddr> {
    let best = |allowed: &dyn Fn(&str) -> bool| {
        let mut addresses = known.iter().filter(|(name, _)| allowed(name)).map(|(_, address)| *address);
        let first = addresses.clone().next();
        addresses.find(|address| Some(*address) == routed).or(first)
    };
    match rule {
        Rule::Except(names) => {
            best(&|interface| !names.iter().any(|name| name.matches(interface))).into_iter().collect()
        }
        Rule::Only(names) => {
            let mut chosen: Vec<IpAddr> = Vec::new();
            for name in names {
                let address =
                    best(&|interface| interface == name.text).or_else(|| best(&|it| name.matches(it)));
                chosen.extend(address.filter(|address| {
                    !chosen.contains(address) && (chosen.is_empty() || !address.is_loopback())
                }));
            }
            chosen
        }
    }
}

/// An address of this host that is not loopback, for ranks of other hosts: the one that would call `towards`, one of
/// them, or the one with the default route, or that of any other interface.
pub(crate) fn address_for_others(towards: impl IntoIterator<Item = SocketAddr>) -> Option<IpAddr> {
    // Nothing is sent there: an address that is reserved for documents, for which there is a route if there is a default.
    let outside = SocketAddr::from(([192, 0, 2, 1], 9));
    let routed = towards.into_iter().chain([outside]).filter_map(|to| route_to(to).ok());
    let mut routed = routed.filter(|address| !address.is_loopback() && !address.is_unspecified());
    routed.next().or_else(|| {
        let mut known: Vec<IpAddr> =
            if_addrs::get_if_addrs().ok()?.into_iter().map(|interface| interface.ip()).collect();
        known.retain(|address| match address {
            IpAddr::V4(v4) => !v4.is_loopback() && !v4.is_link_local(),
            IpAddr::V6(v6) => !v6.is_loopback() && !v6.is_unicast_link_local(),
        });
        known.sort_by_key(IpAddr::is_ipv6);
        known.first().copied()
    })
}

/// The address from which this host would call `to`. Connecting a datagram socket asks for the route, and sends nothing.
fn route_to(to: SocketAddr) -> io::Result<IpAddr> {
    let any: IpAddr = match to {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind((any, 0))?;
    socket.connect(to)?;
    Ok(socket.local_addr()?.ip().to_canonical())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::environment::Name;

    const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

    fn names(texts: &[&str], exact: bool) -> Vec<Name> {
        texts.iter().map(|text| Name { text: text.to_string(), exact }).collect()
    }

    #[test]
    fn it_listens_on_the_interface_given_and_on_no_other() {
        let listener = listen(LOOPBACK, None).expect("loopback can be bound");
        let address = listener.local_addr().unwrap();
        assert_eq!(address.ip(), LOOPBACK);
        TcpListener::bind(("127.0.0.2", address.port())).expect("the same port of another address is free");
    }

    #[test]
    fn a_range_is_used_up_to_its_last_port_and_then_said_to_be() {
        // An address of its own, so that no other test takes its ports.
        let interface = IpAddr::from([127, 7, 7, 7]);
        let ports = 20000..=20004;
        let mut listeners: Vec<TcpListener> =
            (0..5).map(|_| listen(interface, Some(&ports)).expect("one is free")).collect();
        let mut taken: Vec<u16> = listeners.iter().map(|it| it.local_addr().unwrap().port()).collect();
        taken.sort_unstable();
        assert_eq!(taken, ports.clone().collect::<Vec<_>>());
        let error = listen(interface, Some(&ports)).expect_err("all are taken");
        assert_eq!(error.to_string(), "all 5 ports of TENFOLD_PORT_RANGE=20000-20004 are taken on 127.7.7.7");
        let freed = listeners.remove(2).local_addr().unwrap();
        let again = listen(interface, Some(&ports)).expect("one was given back");
        assert_eq!(again.local_addr().unwrap(), freed);
    }

    #[test]
    fn an_address_that_is_not_ours_is_an_error_of_its_own() {
        let error =
            listen(IpAddr::from([192, 0, 2, 1]), Some(&(20000..=20004))).expect_err("it is for examples");
        assert_eq!(error.kind(), io::ErrorKind::AddrNotAvailable);
    }

    #[test]
    fn connections_to_different_peers_may_share_a_source_port() {
        // Of an address of its own, whose ports no other test takes. With the default range there are 28,232 of them.
        let interface = IpAddr::from([127, 7, 7, 8]);
        let port = |socket: &Socket| socket.local_addr().unwrap().as_socket().unwrap().port();
        let socket = Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::TCP)).unwrap();
        bind_without_port(&socket, interface).unwrap();
        assert_eq!(port(&socket), 0, "chosen when it connects");
        let listener = listen(IpAddr::from([127, 7, 7, 9]), None).unwrap();
        socket.connect(&listener.local_addr().unwrap().into()).unwrap();
        assert_ne!(port(&socket), 0);
        assert_eq!(socket.local_addr().unwrap().as_socket().unwrap().ip(), interface);
    }

    #[test]
    fn the_limit_of_open_files_is_raised_and_named_when_it_is_reached() {
        let before = getrlimit(Resource::Nofile);
        let hard = before.maximum.unwrap_or(FILES_MAX).min(FILES_MAX);
        let low = hard.min(512);
        setrlimit(Resource::Nofile, Rlimit { current: Some(low), maximum: before.maximum }).unwrap();
        let text = explain(&Errno::MFILE.into());
        assert!(
            text.starts_with(&format!("this process is out of file descriptors (its limit is {low})")),
            "{text}"
        );
        raise_file_limit();
        assert_eq!(getrlimit(Resource::Nofile), Rlimit { current: Some(hard), maximum: before.maximum });
        assert_eq!(explain(&Errno::CONNREFUSED.into()), io::Error::from(Errno::CONNREFUSED).to_string());
    }

    #[test]
    fn a_relay_on_loopback_shows_no_way_to_other_hosts_but_the_store_behind_it_does() {
        let at = |address: &str| Some(address.parse::<SocketAddr>().unwrap());
        let store = at("10.0.0.1:29500");
        assert_eq!(behind_relay(at("127.0.0.1:40000"), store), store);
        assert_eq!(behind_relay(at("[::ffff:127.0.0.1]:40000"), store), store);
        assert_eq!(behind_relay(at("127.0.0.1:40000"), None), at("127.0.0.1:40000"));
        // Another store than the launcher's.
        assert_eq!(behind_relay(at("10.0.0.9:1"), store), at("10.0.0.9:1"));
        assert_eq!(behind_relay(None, store), None);
    }

    #[test]
    fn a_local_store_or_none_means_loopback() {
        assert_eq!(addresses_towards(None, None).unwrap(), [LOOPBACK]);
        assert_eq!(addresses_towards(Some((LOOPBACK, 29500).into()), None).unwrap(), [LOOPBACK]);
    }

    #[test]
    fn the_interface_asked_for_is_used_and_one_that_is_not_there_is_named() {
        let interfaces = |said: &str, rule: Rule| Interfaces { said: said.to_string(), rule };
        let loopback =
            if_addrs::get_if_addrs().unwrap().into_iter().find(|it| it.ip() == LOOPBACK).unwrap().name;
        let only = interfaces("TENFOLD_INTERFACE=lo", Rule::Only(names(&[&loopback], true)));
        assert_eq!(addresses_towards(None, Some(&only)).unwrap(), [LOOPBACK]);
        let missing = interfaces("TENFOLD_INTERFACE=wan9", Rule::Only(names(&["wan9"], false)));
        let error = addresses_towards(None, Some(&missing)).expect_err("there is none").to_string();
        assert!(error.starts_with("`TENFOLD_INTERFACE=wan9` leaves no interface of "), "{error}");
        assert!(error.contains(&format!("{loopback} (127.0.0.1)")), "{error}");
    }

    #[test]
    fn rules_choose_as_gloo_and_nccl_users_expect() {
        let known: Vec<(String, IpAddr)> = [
            ("eth0", [10, 0, 0, 1]),
            ("eth1", [10, 0, 1, 1]),
            ("eth10", [10, 0, 2, 1]),
            ("docker0", [172, 17, 0, 1]),
            ("lo", [127, 0, 0, 1]),
        ]
        .map(|(name, address)| (name.to_string(), address.into()))
        .into();
        let all = |rule: &Rule, routed: Option<[u8; 4]>| -> Vec<&str> {
            let name = |address| &known.iter().find(|(_, known)| *known == address).unwrap().0[..];
            choose(&known, rule, routed.map(IpAddr::from)).into_iter().map(name).collect()
        };
        let chosen = |rule: &Rule, routed: Option<[u8; 4]>| {
            let all = all(rule, routed);
            assert!(all.len() <= 1, "{all:?}");
            all.first().copied()
        };
        let only = |texts: &[&str], exact| Rule::Only(names(texts, exact));
        let except = |texts: &[&str]| Rule::Except(names(texts, false));
        assert_eq!(chosen(&only(&["eth1"], false), None), Some("eth1"), "not eth10");
        assert_eq!(
            chosen(&only(&["eth1"], false), Some([10, 0, 2, 1])),
            Some("eth1"),
            "even if routed there"
        );
        assert_eq!(chosen(&only(&["eth"], false), None), Some("eth0"));
        assert_eq!(chosen(&only(&["eth"], false), Some([10, 0, 2, 1])), Some("eth10"));
        assert_eq!(chosen(&only(&["eth"], true), None), None);
        let several = |texts: &[&str]| all(&only(texts, false), None);
        assert_eq!(
            several(&["ib0", "eth1", "eth0"]),
            ["eth1", "eth0"],
            "those that there are, in this order"
        );
        assert_eq!(several(&["eth0", "eth", "eth0"]), ["eth0"], "none twice");
        assert_eq!(several(&["eth1", "lo"]), ["eth1"], "loopback only if there is no other");
        assert_eq!(several(&["ib0", "lo"]), ["lo"]);
        assert_eq!(chosen(&except(&["lo", "docker"]), None), Some("eth0"));
        assert_eq!(
            chosen(&except(&["lo", "eth0"]), Some([10, 0, 0, 1])),
            Some("eth1"),
            "the route is excluded"
        );
        assert_eq!(chosen(&except(&["eth", "docker"]), None), Some("lo"));
        assert_eq!(chosen(&except(&["eth", "docker", "lo"]), None), None);
    }
}
