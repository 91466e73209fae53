//! Accepts connections, or refuses them.

use std::io;
use std::net::SocketAddr;

use mio::{Interest, Token};

use super::{ACCEPT_REST, ACCEPTS, Backend, Loop};
use crate::connection::Connection;
use crate::server::Closed;

impl<B: Backend> Loop<B> {
    pub(super) fn accept(&mut self) {
        self.accept_again = None;
        for index in 0..self.listeners.len() {
            for accepted in 0.. {
                if accepted == ACCEPTS {
                    self.accept_again = Some(self.now);
                    break;
                }
                match self.listeners[index].accept() {
                    Ok((stream, peer)) => self.admit(stream, peer),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    Err(error) if is_exhaustion(&error) => {
                        self.turn_away(index, &error);
                        break;
                    }
                    // The peer closed the connection before it was accepted.
                    Err(error) => tracing::debug!(%error, "a connection was closed before it was accepted"),
                }
            }
        }
    }

    pub(super) fn admit(&mut self, mut stream: mio::net::TcpStream, peer: SocketAddr) {
        self.counters.accepted += 1;
        if self.count >= self.limits.connections {
            return self.note(Closed::Connections, Some(peer), "the limit of connections is reached");
        }
        if !self.limits.other_users
            && peer.ip().to_canonical().is_loopback()
            && let Some(user) = stranger(&stream, peer)
        {
            let reason = format!("it belongs to user {user}, and this server serves its own user only");
            return self.note(Closed::User, Some(peer), &reason);
        }
        if !self.callers.admit(peer) {
            let reason = "the limit of connections from one address is reached";
            return self.note(Closed::Connections, Some(peer), reason);
        }
        #[cfg(not(target_os = "linux"))] // Linux hands the listener's options on
        if let Err(error) = crate::listen::set_options(&socket2::SockRef::from(&stream), peer) {
            tracing::debug!(%error, %peer, "cannot set socket options");
        }
        let slot = self.free.pop().unwrap_or_else(|| {
            self.connections.push(None);
            self.connections.len() - 1
        });
        let interest = Interest::READABLE | Interest::WRITABLE;
        if let Err(error) = self.poll.registry().register(&mut stream, Token(slot), interest) {
            self.free.push(slot);
            self.callers.forget(peer);
            return self.note(Closed::Connections, Some(peer), &format!("cannot poll it: {error}"));
        }
        self.count += 1;
        self.connections[slot] = Some(Box::new(Connection::new(stream, peer, self.now)));
    }

    /// No descriptor is left: closes the next client's connection, so that it notices, and pauses.
    pub(super) fn turn_away(&mut self, index: usize, error: &io::Error) {
        self.accept_again = Some(self.now + ACCEPT_REST);
        drop(self.spare.take());
        let peer = self.listeners[index].accept().ok().map(|(_, peer)| peer);
        self.spare = std::fs::File::open("/dev/null").ok();
        self.note(Closed::Connections, peer, &format!("cannot accept: {error}"));
    }
}

/// The user of a client on this machine, if that user's clients are not served.
pub(super) fn stranger(stream: &mio::net::TcpStream, peer: SocketAddr) -> Option<u32> {
    let owner = crate::owner::of_connection(peer, stream.local_addr().ok()?)?;
    (!owner.is_trusted()).then_some(owner.user)
}

/// Out of descriptors or memory, as opposed to a problem of one connection.
pub(super) fn is_exhaustion(error: &io::Error) -> bool {
    use rustix::io::Errno;
    let errno = Errno::from_io_error(error);
    [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM].map(Some).contains(&errno)
}
