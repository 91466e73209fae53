//! Connects to a store server by name and port, including the handshake.
//!
//! Every address of the name is tried, in rounds with growing pauses, until one answers or the deadline
//! passes. The error then lists each address with its own reason, because "timed out" alone does not help.

#![expect(clippy::disallowed_methods, reason = "looks up names on a thread that may be left behind")]

use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::mpsc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use socket2::SockRef;
use tenfold_memory::NotInherited;

use crate::wire::{self, Command, ReplySource};
use tenfold_base::{Deadline, ErrorKind, Fault, show_duration};

/// Pause before the second round; each later pause is 1.5 times as long.
const PAUSE_FIRST: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// How long one address may delay the others.
const ATTEMPT: Duration = Duration::from_secs(3);
/// How long a server that has accepted may take to answer: it may be busy with thousands of other clients.
const GREETING: Duration = Duration::from_secs(30);
/// How long to retry a name that cannot be resolved, since it may be about to appear.
const RESOLVING: Duration = Duration::from_secs(10);

/// A connection to a server, read and written with a deadline.
#[derive(Debug)]
pub(crate) struct Link {
    /// A forked child that kept a copy would hide the end of this process from the server.
    stream: NotInherited<TcpStream>,
    peer: SocketAddr,
    /// Bytes that have arrived but are not consumed yet: `input[at..]`.
    input: Vec<u8>,
    at: usize,
    output: Vec<u8>,
    /// Part of the answer to the last message has been read.
    answered: bool,
    /// The call that failed on this link left no reply in transit.
    pub(crate) in_step: bool,
    /// The server is tenfold's.
    pub(crate) is_tenfold: bool,
}

impl Link {
    /// Connects to a store server and verifies that it is one.
    pub(crate) fn open(host: &str, port: u16, deadline: Deadline) -> Result<Link, Fault> {
        if port == 0 {
            return Err(Fault::new(ErrorKind::Argument, "cannot connect to port 0")
                .hint("use the port that the server picked: a server started with port 0 reports it"));
        }
        let mut pause = PAUSE_FIRST;
        let mut reasons: Vec<(String, String)> = Vec::new();
        for round in 0_u32.. {
            match resolve(host, port, deadline) {
                Ok(addresses) => {
                    for address in addresses {
                        match Link::greet(address, deadline) {
                            Ok(link) => return Ok(link),
                            Err(fault) => remember(&mut reasons, address.to_string(), &fault.message),
                        }
                    }
                }
                Err(fault) => {
                    remember(&mut reasons, format!("`{host}`"), &fault.message);
                    if deadline.elapsed() > RESOLVING {
                        return Err(nobody_there(&reasons));
                    }
                }
            }
            deadline.pause(pause + jitter(pause, round));
            // Checked after the pause: a last try with no time left would only hide the reason of the
            // previous one.
            if deadline.passed() {
                return Err(nobody_there(&reasons));
            }
            pause = (pause * 3 / 2).min(PAUSE_MAX);
        }
        unreachable!("the deadline ends the loop")
    }

    /// One attempt at one address.
    fn greet(address: SocketAddr, deadline: Deadline) -> Result<Link, Fault> {
        // A limit of zero still allows the single attempt that a server on this machine needs.
        let limit = deadline.left().unwrap_or(ATTEMPT).clamp(Duration::from_millis(1), ATTEMPT);
        let stream = TcpStream::connect_timeout(&address, limit).map_err(|error| {
            let message = match error.kind() {
                io::ErrorKind::TimedOut => format!("no answer within {}", show_duration(limit)),
                _ => describe(&error),
            };
            Fault::new(ErrorKind::Connect, message)
        })?;
        let set_up = || -> io::Result<()> {
            crate::listen::set_options(&SockRef::from(&stream), address)?;
            stream.set_nonblocking(true)
        };
        set_up().map_err(|error| Fault::new(ErrorKind::Connect, describe(&error)))?;
        let mut link = Link {
            stream: stream.into(),
            peer: address,
            input: Vec::new(),
            at: 0,
            output: Vec::new(),
            answered: false,
            in_step: false,
            is_tenfold: false,
        };
        let greeting = deadline.at_most(GREETING);
        link.send(&Command::Validate { magic: wire::MAGIC });
        link.send(&Command::Ping { nonce: wire::GREETING });
        link.flush(greeting)?;
        let mut answer = [0; 4];
        link.fill(&mut answer, greeting).map_err(|fault| match fault.kind {
            ErrorKind::Timeout => Fault::new(
                ErrorKind::Connect,
                format!(
                    "accepted the connection, then sent nothing for {}",
                    show_duration(greeting.elapsed())
                ),
            ),
            _ => Fault::new(
                ErrorKind::Connect,
                format!("accepted the connection, then closed it ({})", fault.message),
            ),
        })?;
        link.is_tenfold = answer == wire::GREETING_ANSWER.to_le_bytes();
        if !link.is_tenfold && answer != wire::GREETING.to_le_bytes() {
            let message =
                format!("not a store: it answered the greeting with {:?}", answer.escape_ascii().to_string());
            return Err(Fault::new(ErrorKind::Connect, message));
        }
        Ok(link)
    }

    /// The stream and the bytes that have been read from it, for an owner that polls it.
    pub(crate) fn into_parts(self) -> io::Result<(TcpStream, Vec<u8>)> {
        Ok((self.stream.try_clone()?, self.input[self.at..].to_vec()))
    }

    /// The server's address.
    pub(crate) fn peer(&self) -> SocketAddr {
        self.peer
    }

    /// Queues a message; `flush` sends it.
    pub(crate) fn send(&mut self, command: &Command<'_>) {
        self.in_step = false;
        self.answered = false;
        wire::encode(command, &mut self.output);
    }

    /// Sends what is queued.
    pub(crate) fn flush(&mut self, deadline: Deadline) -> Result<(), Fault> {
        const KEPT: usize = 64 << 10; // a buffer that grew for one large value is not kept
        let mut sent = 0;
        while sent < self.output.len() {
            match self.stream.write(&self.output[sent..]) {
                Ok(length) => sent += length,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.poll(PollFlags::OUT, deadline)?;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(lost(&error)),
            }
        }
        self.output.clear();
        self.output.shrink_to(KEPT);
        Ok(())
    }

    /// Fills `bytes` with what the server sends.
    pub(crate) fn fill(&mut self, bytes: &mut [u8], deadline: Deadline) -> Result<(), Fault> {
        const BUFFER: usize = 8 << 10; // any reply except a large value fits in one read
        let mut filled = 0;
        loop {
            let ready = (self.input.len() - self.at).min(bytes.len() - filled);
            bytes[filled..filled + ready].copy_from_slice(&self.input[self.at..self.at + ready]);
            self.at += ready;
            filled += ready;
            if filled == bytes.len() {
                return Ok(());
            }
            // The clock is checked while waiting; but a server that always has one more byte never makes us
            // wait.
            if self.answered && deadline.passed() {
                return Err(too_late());
            }
            // The buffer is empty here; large parts go straight to where they belong.
            let direct = bytes.len() - filled >= BUFFER;
            let read = if direct {
                self.stream.read(&mut bytes[filled..])
            } else {
                self.input.resize(BUFFER, 0);
                self.at = 0;
                let read = self.stream.read(&mut self.input);
                self.input.truncate(*read.as_ref().unwrap_or(&0));
                read
            };
            match read {
                Ok(0) => return Err(closed()),
                Ok(length) => {
                    self.answered = true;
                    filled += if direct { length } else { 0 };
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.poll(PollFlags::IN, deadline)?;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(lost(&error)),
            }
        }
    }

    /// Sleeps until the socket is ready or the deadline passes.
    fn poll(&self, flags: PollFlags, deadline: Deadline) -> Result<(), Fault> {
        let mut descriptors = [PollFd::new(&self.stream, flags)];
        loop {
            let left = deadline.left();
            if left.is_some_and(|left| left.is_zero()) {
                return Err(too_late());
            }
            let timeout = left.and_then(|left| rustix::event::Timespec::try_from(left).ok());
            match poll(&mut descriptors, timeout.as_ref()) {
                Ok(0) | Err(rustix::io::Errno::INTR) => {}
                Ok(_) => return Ok(()),
                Err(errno) => return Err(lost(&errno.into())),
            }
        }
    }

    /// This link as a source of replies until `deadline`.
    pub(crate) fn replies(&mut self, deadline: Deadline) -> Replies<'_> {
        Replies { link: self, deadline }
    }
}

pub(crate) struct Replies<'a> {
    link: &'a mut Link,
    deadline: Deadline,
}

impl ReplySource for Replies<'_> {
    fn fill(&mut self, bytes: &mut [u8]) -> Result<(), Fault> {
        self.link.fill(bytes, self.deadline)
    }
}

/// All addresses of a name. A separate thread looks them up, because a resolver may exceed our deadline.
fn resolve(host: &str, port: u16, deadline: Deadline) -> Result<Vec<SocketAddr>, Fault> {
    if let Ok(address) = host.trim_matches(['[', ']']).parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(address, port)]);
    }
    let (answer, addresses) = mpsc::channel();
    let name = host.to_string();
    std::thread::Builder::new()
        .name("tenfold-resolve".into())
        .spawn(move || {
            let found = (name.as_str(), port).to_socket_addrs().map(Iterator::collect::<Vec<_>>);
            let _ = answer.send(found); // the caller may have timed out
        })
        .map_err(|error| Fault::io("cannot start a thread to look up a name", error))?;
    let patience = deadline.left().unwrap_or(RESOLVING).min(RESOLVING);
    match addresses.recv_timeout(patience) {
        Ok(Ok(found)) if !found.is_empty() => Ok(found),
        Ok(Ok(_)) => Err(Fault::new(ErrorKind::Connect, "the name has no address")),
        Ok(Err(error)) => Err(Fault::new(ErrorKind::Connect, describe(&error))),
        Err(_) => Err(Fault::new(
            ErrorKind::Connect,
            format!("no answer from the resolver in {}", show_duration(patience)),
        )),
    }
}

/// The last reason of each address, in the order they were first tried.
fn remember(reasons: &mut Vec<(String, String)>, address: String, reason: &str) {
    match reasons.iter_mut().find(|(known, _)| *known == address) {
        Some((_, last)) => *last = reason.to_string(),
        None => reasons.push((address, reason.to_string())),
    }
}

#[cold]
fn nobody_there(reasons: &[(String, String)]) -> Fault {
    let list =
        reasons.iter().map(|(address, reason)| format!("{address}: {reason}")).collect::<Vec<_>>().join("; ");
    Fault::new(ErrorKind::Connect, format!("no store answered ({list})"))
        .hint("check that the server is running at this address and that no firewall blocks it")
}

/// The system's error text without its number.
fn describe(error: &io::Error) -> String {
    let text = error.to_string();
    let text = text.split(" (os error").next().unwrap_or(&text);
    let mut characters = text.chars();
    characters.next().map(|first| first.to_lowercase().chain(characters).collect()).unwrap_or_default()
}

#[cold]
fn lost(error: &io::Error) -> Fault {
    Fault::new(ErrorKind::Lost, format!("connection lost: {}", describe(error))).hint(LOST_HINT)
}

#[cold]
fn too_late() -> Fault {
    Fault::timeout("the server did not answer in time")
        .hint("check whether the server's host is overloaded, frozen or unreachable")
}

#[cold]
fn closed() -> Fault {
    Fault::new(ErrorKind::Lost, "the server closed the connection").hint(LOST_HINT)
}

const LOST_HINT: &str = "check whether the server has exited; it also closes a connection whose request it refuses \
                         (over a limit, or `add` on a value that is not a number): see its log";

/// Keeps thousands of clients from retrying in step. The value only has to differ by process and round.
fn jitter(pause: Duration, round: u32) -> Duration {
    let mixed = (std::process::id() ^ round.wrapping_mul(0x9e37_79b9)).wrapping_mul(0x85eb_ca6b) >> 16;
    pause * (mixed % 256) / 512
}
