//! A client's stream and its listener: TCP or a Unix socket. No other code needs to know which.

use std::fmt;
use std::io::{self, IoSlice};
use std::net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr};

use mio::event::Source;
use mio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use mio::{Interest, Registry, Token};

#[derive(Debug)]
pub(crate) enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener),
}

impl Listener {
    pub(crate) fn accept(&self) -> io::Result<(Stream, Peer)> {
        match self {
            Listener::Tcp(listener) => listener.accept().map(|(stream, peer)| {
                let _ = stream.set_nodelay(true); // only slower without
                (Stream::Tcp(stream), Peer::Address(peer))
            }),
            Listener::Unix(listener) => {
                listener.accept().map(|(stream, _)| (Stream::Unix(stream), Peer::Local))
            }
        }
    }

    pub(crate) fn register(&mut self, registry: &Registry, token: Token) -> io::Result<()> {
        match self {
            Listener::Tcp(listener) => listener.register(registry, token, Interest::READABLE),
            Listener::Unix(listener) => listener.register(registry, token, Interest::READABLE),
        }
    }
}

/// The client's identity, for the log.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Peer {
    Address(SocketAddr),
    /// A client that may open the socket's file.
    Local,
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Peer::Address(address) => address.fmt(f),
            Peer::Local => f.write_str("unix"),
        }
    }
}

#[derive(Debug)]
pub(crate) enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Stream {
    /// Our address that it connected to; nothing for a file, which no web page can reach.
    pub(crate) fn local(&self) -> Option<IpAddr> {
        match self {
            // Without an address of our own, loopback addresses are still accepted.
            Stream::Tcp(stream) => {
                Some(stream.local_addr().map_or(IpAddr::V4(Ipv4Addr::LOCALHOST), |local| local.ip()))
            }
            Stream::Unix(_) => None,
        }
    }

    pub(crate) fn register(&mut self, registry: &Registry, token: Token) -> io::Result<()> {
        let interest = Interest::READABLE | Interest::WRITABLE;
        match self {
            Stream::Tcp(stream) => stream.register(registry, token, interest),
            Stream::Unix(stream) => stream.register(registry, token, interest),
        }
    }

    pub(crate) fn shut(&self) -> io::Result<()> {
        match self {
            Stream::Tcp(stream) => stream.shutdown(Shutdown::Write),
            Stream::Unix(stream) => stream.shutdown(Shutdown::Write),
        }
    }
}

impl io::Read for Stream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Tcp(stream) => stream.read(buffer),
            Stream::Unix(stream) => stream.read(buffer),
        }
    }
}

impl io::Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Stream::Tcp(stream) => stream.write(bytes),
            Stream::Unix(stream) => stream.write(bytes),
        }
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Stream::Tcp(stream) => stream.write_vectored(slices),
            Stream::Unix(stream) => stream.write_vectored(slices),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
