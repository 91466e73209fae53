#![expect(clippy::disallowed_methods, reason = "a thread accepts the connections of the test")]

use std::io::Read as _;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread;

use tenfold_memory::Room;

use super::*;
use crate::fabric::{FabricHandle, FabricOptions, Whereabouts};
use crate::transport::Wants;
use crate::wire::FabricId;

const SIZE: usize = 200;
const HEAD: Head = [7; 3];

/// A mesh of rank 0 whose peers are all on other hosts, where one socket listens for all of them.
fn far(handle: &FabricHandle, listener: SocketAddr) -> Mesh {
    let peer = |rank: usize| {
        let peer = handle.peer(FabricId(rank as u128));
        let (host, socket_name, address) = (String::new(), String::new(), Some(listener));
        let (near, rails) = (false, Vec::new());
        peer.set_whereabouts(Whereabouts { host, pid: 1, socket_name, near, address, rails });
        peer
    };
    let member = |rank| Member { peer: (rank > 0).then(|| peer(rank)), near: rank == 0, room: 0 };
    let room = Arc::new(Room::new(handle.segment(), SIZE, 1).unwrap());
    Mesh::new(0, 7, Arc::clone(handle), room, (0..SIZE).map(member).collect())
}

#[test]
fn only_links_with_something_to_write_are_looked_at_and_a_socket_is_slept_on_once() {
    let handle = FabricHandle::new(FabricOptions::for_tests()).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut mesh = far(&handle, listener.local_addr().unwrap());
    // The helper dials all peers, and the message below opens one more connection. The listener queues 128 of them; if
    // none were accepted, the kernel would drop the message's connection whenever the helper is quicker.
    let accept = move || listener.incoming().take(SIZE).map(Result::unwrap).collect::<Vec<TcpStream>>();
    let accepted = thread::Builder::new().name("accepts".to_string()).spawn(accept).unwrap();
    for rank in 1..SIZE {
        mesh.connect(rank).unwrap();
    }
    assert!(mesh.unwritten.is_empty());
    // The peer does not read, so at some time its socket takes no more.
    let bytes = [0; 64 << 10];
    let mut sent = 0;
    let mut send =
        || mesh.poll_send(Lane::PointToPoint, 5, &mut None, &HEAD, Bytes::of(&bytes), false).unwrap();
    while send().is_pending() {
        thread::yield_now(); // it is not connected yet
    }
    while send().is_ready() {
        sent += 1;
        assert!(sent < 1000, "there is a window");
    }
    assert_eq!(mesh.unwritten, [5]);
    let wants = Wants { room: vec![5; 1000], messages: vec![9; 1000], ..Wants::default() };
    let mut sockets = Vec::new();
    mesh.prepare_to_sleep(&wants, &mut sockets);
    assert_eq!(sockets.iter().map(|(_, write)| *write).collect::<Vec<_>>(), [true]);
    assert!(mesh.poll_flush_of(Lane::PointToPoint, 5).unwrap().is_pending());
    let mut peers = accepted.join().unwrap();
    peers.iter().for_each(|peer| peer.set_nonblocking(true).unwrap());
    let mut buffer = vec![0; 1 << 20];
    while !mesh.unwritten.is_empty() {
        peers.iter_mut().for_each(|peer| _ = peer.read(&mut buffer));
        mesh.pump().unwrap();
    }
    assert!(mesh.poll_flush_of(Lane::PointToPoint, 5).unwrap().is_ready());
    sockets.clear();
    mesh.prepare_to_sleep(&Wants::default(), &mut sockets);
    assert!(sockets.is_empty(), "nothing is left to write");
}
