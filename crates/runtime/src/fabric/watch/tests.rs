use std::os::unix::net::UnixStream;

use rustix::net::{AddressFamily, SocketAddrUnix, SocketType};

use super::*;
use crate::fabric::{FabricHandle, FabricOptions};

fn fabric() -> FabricHandle {
    FabricHandle::new(FabricOptions::for_tests()).unwrap()
}

/// A process that knows the id is let in on TCP, and every user can list the names of sockets.
#[test]
fn the_name_of_the_socket_does_not_tell_the_id() {
    let fabric = fabric();
    let names = std::fs::read_to_string("/proc/net/unix").unwrap();
    assert!(names.contains(&fabric.socket_name), "it is listed");
    let id = fabric.id.to_string();
    assert!(!names.contains(&id) && !names.contains(&id[..16]) && !names.contains(&id[16..]));
}

/// Two helpers that wait for each other to accept would wait without end.
#[test]
fn a_peer_without_room_for_callers_does_not_stop_the_helper_and_is_dialled_again() {
    let fabric = fabric();
    let name = format!("tenfold-test/{}/{:032x}", std::process::id(), crate::fabric::random().unwrap());
    let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap();
    let full = rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
    rustix::net::bind(&full, &address).unwrap();
    rustix::net::listen(&full, 0).unwrap();
    let callers: Vec<UnixStream> = std::iter::from_fn(|| connect_near(&name).ok()).collect();
    assert!(!callers.is_empty());
    let peer = fabric.peer(FabricId(7));
    let pid = std::process::id();
    let (host, socket_name) = (String::new(), name);
    let (address, rails) = (None, Vec::new());
    peer.set_whereabouts(crate::fabric::Whereabouts { host, pid, socket_name, near: true, address, rails });
    fabric.dial(&peer);
    let (sender, receiver) = std::sync::mpsc::channel();
    fabric.order(Order::Answer(sender));
    receiver.recv_timeout(Duration::from_secs(40)).expect("the helper does not wait for the peer");
    assert_eq!(peer.fate(), None);
    let listener = UnixListener::from(full);
    callers.iter().for_each(|_| drop(listener.accept().unwrap()));
    let (mut dialled, _) = listener.accept().unwrap();
    dialled.set_read_timeout(Some(Duration::from_secs(40))).unwrap();
    let mut hello = [0; Hello::LEN];
    dialled.read_exact(&mut hello).expect("it is dialled again");
    let hello = Hello::decode(&hello, FabricId(7)).unwrap().unwrap();
    assert_eq!(hello, Hello { purpose: Purpose::Control, sender: fabric.id, receiver: FabricId(7) });
}

/// A rank closes the oldest of too many callers, and that may be a peer.
#[test]
fn a_peer_that_closes_before_its_hello_is_dialled_again_and_not_for_ever() {
    let fabric = fabric();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let peer = fabric.peer(FabricId(7));
    let (host, socket_name, address) = (String::new(), String::new(), listener.local_addr().ok());
    let pid = std::process::id();
    let (near, rails) = (false, Vec::new());
    peer.set_whereabouts(crate::fabric::Whereabouts { host, pid, socket_name, near, address, rails });
    fabric.dial(&peer);
    for _ in 0..TRIES_MAX {
        drop(listener.accept().unwrap());
    }
    let (mut dialled, _) = listener.accept().unwrap();
    dialled.set_read_timeout(Some(Duration::from_secs(40))).unwrap();
    dialled.read_exact(&mut [0; Hello::LEN]).expect("it says hello again");
    assert_eq!(peer.fate(), None);
    drop(dialled);
    let start = Instant::now();
    while peer.fate().is_none() {
        assert!(start.elapsed() < Duration::from_secs(40), "it is given up after the last try");
        std::thread::yield_now();
    }
    assert_eq!(peer.fate(), Some(&Fate::Died));
}

/// Letters that a rank sends one after another would wait for acknowledgements, which a receiver delays by 40 ms.
#[test]
fn both_ends_of_a_stream_between_hosts_send_immediately() {
    let (id, options) = (FabricId(crate::fabric::random().unwrap()), FabricOptions::for_tests());
    let (fabric, unix, tcp) = Fabric::without_helper(id, options).unwrap();
    let address = tcp[0].local_addr().unwrap();
    let mut watch = prepare(fabric, unix, tcp).unwrap();
    let dialled = connect(address, None).unwrap();
    assert!(dialled.nodelay().unwrap());
    while watch.streams.is_empty() {
        watch.accept_tcp(0);
    }
    let accepted = watch.streams.values().next().unwrap();
    let Io::Tcp(socket) = &accepted.io else { panic!("it is a TCP stream") };
    assert!(accepted.accepted && socket.nodelay().unwrap());
}
