//! Many connections driven by one thread, at full speed.
//!
//! A connection writes a turn in one piece, counts reply bytes until all have arrived, and writes the next:
//! two system calls per turn, nothing allocated, nothing parsed. What counting would miss is checked outside
//! the measurement: the first and the last turn of a run go through [`Fleet::exchange`], which compares every
//! byte.
//!
//! Not here: what is sent (see `script`), and which clients connect when (see `crowd`).
#![expect(clippy::disallowed_methods, reason = "a benchmark reads the clock")]

use std::io::{self, ErrorKind, Read, Write};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use mio::net::TcpStream;
use mio::{Events, Interest, Poll, Token};

use super::script::{Exchange, Scripts};
use super::{Failure, Interrupt};

/// A server that sends nothing for this long while it owes replies is blocked. PyTorch's may be looking up
/// our name in a DNS that does not answer, which takes 10 s.
const SILENCE_MAX: Duration = Duration::from_secs(30);
/// How often a wait checks whether it has been interrupted.
const GLANCE: Duration = Duration::from_millis(100);
const EVENTS_MAX: usize = 1024;
const READ_BYTES: usize = 256 << 10; // a quarter of the largest reply, and it stays in the second-level cache

/// Connections to one server after the handshake.
pub(crate) struct Fleet {
    reactor: Reactor,
    links: Vec<Link>,
    buffer: Box<[u8]>,
}

/// The result of a steady run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Steady {
    /// Turns finished while the clock ran.
    pub(crate) turns: u64,
    pub(crate) elapsed: Duration,
    /// All turns the server has served, including those before and after the clock.
    pub(crate) turns_served: u64,
}

impl Fleet {
    pub(crate) fn open(
        address: SocketAddr,
        connections: usize,
        interrupt: &Interrupt,
    ) -> Result<Self, Failure> {
        let reactor = Reactor::new(interrupt)?;
        let mut links = Vec::with_capacity(connections);
        for index in 0..connections {
            interrupt.check()?;
            let mut stream = TcpStream::from_std(open(address).map_err(|error| lost(&error))?);
            reactor.watch(&mut stream, index)?;
            links.push(Link { stream, sent: 0, received: 0, turns: 0 });
        }
        Ok(Fleet { reactor, links, buffer: vec![0; READ_BYTES].into() })
    }

    pub(crate) fn len(&self) -> usize {
        self.links.len()
    }

    /// Sends something on every connection and compares each byte of the replies.
    pub(crate) fn exchange<'a>(
        &mut self,
        what: impl Fn(usize) -> (&'a [u8], &'a [u8]),
    ) -> Result<(), Failure> {
        let mut unanswered = 0;
        for (index, link) in self.links.iter_mut().enumerate() {
            let (request, reply) = what(index);
            link.begin(request).map_err(|error| lost(&error))?;
            assert!(
                !reply.is_empty() || link.sent == request.len(),
                "what has no reply fits in a socket's buffer"
            );
            unanswered += usize::from(!reply.is_empty());
        }
        while unanswered > 0 {
            self.reactor.turn()?;
            for event in &self.reactor.events {
                let index = event.token().0;
                let (request, reply) = what(index);
                let link = &mut self.links[index];
                link.push(request).map_err(|error| lost(&error))?;
                while link.received < reply.len() || event.is_read_closed() {
                    let Some(count) = link.pull(&mut self.buffer).map_err(|error| lost(&error))? else {
                        break;
                    };
                    compare(reply, link.received, &self.buffer[..count])?;
                    link.received += count;
                    unanswered -= usize::from(link.received == reply.len());
                }
            }
        }
        Ok(())
    }

    /// One exchange, the same on every connection.
    pub(crate) fn exchange_alike(&mut self, exchange: &Exchange) -> Result<(), Failure> {
        self.exchange(|_| (&exchange.request, &exchange.reply))
    }

    /// Lets every connection take turns for `window`, and returns when all are answered.
    ///
    /// The clock starts when every connection has had a turn, and starts and stops where a turn ends, so that
    /// the figure is right even if few turns fit.
    pub(crate) fn steady(&mut self, scripts: &Scripts, window: Duration) -> Result<Steady, Failure> {
        for (index, link) in self.links.iter_mut().enumerate() {
            link.turns = 0;
            link.begin(&scripts.of(index).turn.request).map_err(|error| lost(&error))?;
        }
        let mut cold = self.links.len();
        let mut busy = self.links.len();
        let mut turns = 0;
        let mut started: Option<(Instant, u64)> = None;
        let mut measured: Option<(Duration, u64)> = None;
        while busy > 0 {
            self.reactor.turn()?;
            for event in &self.reactor.events {
                let index = event.token().0;
                let turn = &scripts.of(index).turn;
                let link = &mut self.links[index];
                link.push(&turn.request).map_err(|error| lost(&error))?;
                if !event.is_readable() && !event.is_read_closed() {
                    continue;
                }
                while let Some(count) = link.pull(&mut self.buffer).map_err(|error| lost(&error))? {
                    link.received += count;
                    if link.received < turn.reply.len() {
                        if count < self.buffer.len() {
                            break; // later bytes cause a new event
                        }
                        continue;
                    }
                    if link.received > turn.reply.len() || link.sent < turn.request.len() {
                        return Err(Failure::new("the server answers more than it was asked"));
                    }
                    turns += 1;
                    cold -= usize::from(link.turns == 0);
                    link.turns += 1;
                    if measured.is_some() {
                        busy -= 1;
                    } else {
                        link.begin(&turn.request).map_err(|error| lost(&error))?;
                    }
                    break; // all replies have arrived
                }
            }
            match started {
                None if cold == 0 => started = Some((Instant::now(), turns)),
                Some((start, before)) if measured.is_none() && turns > before => {
                    let elapsed = start.elapsed();
                    if elapsed >= window {
                        measured = Some((elapsed, turns - before));
                    }
                }
                _ => {}
            }
        }
        let (elapsed, turns_measured) = measured.expect("the loop ends only after the clock has stopped");
        Ok(Steady { turns: turns_measured, elapsed, turns_served: turns })
    }

    /// Turns the connection has taken in the last steady run.
    pub(crate) fn turns(&self, connection: usize) -> u64 {
        self.links[connection].turns
    }
}

struct Link {
    stream: TcpStream,
    /// Bytes of the present request written, of its reply read.
    sent: usize,
    received: usize,
    turns: u64,
}

impl Link {
    fn begin(&mut self, request: &[u8]) -> io::Result<()> {
        self.sent = 0;
        self.received = 0;
        self.push(request)
    }

    /// Writes the rest, as far as the socket accepts it.
    #[inline]
    fn push(&mut self, request: &[u8]) -> io::Result<()> {
        while self.sent < request.len() {
            match self.stream.write(&request[self.sent..]) {
                Ok(count) => self.sent += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Reads what has arrived; nothing if nothing has.
    #[inline]
    fn pull(&mut self, buffer: &mut [u8]) -> io::Result<Option<usize>> {
        loop {
            match self.stream.read(buffer) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(count) => return Ok(Some(count)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
}

/// A poll that can be interrupted and does not wait forever.
pub(crate) struct Reactor {
    poll: Poll,
    pub(crate) events: Events,
    interrupt: Interrupt,
}

impl Reactor {
    pub(crate) fn new(interrupt: &Interrupt) -> Result<Self, Failure> {
        let poll = Poll::new().map_err(|error| Failure::new(format!("cannot poll: {error}")))?;
        Ok(Reactor { poll, events: Events::with_capacity(EVENTS_MAX), interrupt: interrupt.clone() })
    }

    pub(crate) fn watch(&self, stream: &mut TcpStream, index: usize) -> Result<(), Failure> {
        self.poll
            .registry()
            .register(stream, Token(index), Interest::READABLE | Interest::WRITABLE)
            .map_err(|error| Failure::new(format!("cannot watch a socket: {error}")))
    }

    /// Waits for the next events.
    #[inline]
    pub(crate) fn turn(&mut self) -> Result<(), Failure> {
        let mut silence = Duration::ZERO;
        loop {
            self.interrupt.check()?;
            match self.poll.poll(&mut self.events, Some(GLANCE)) {
                Ok(()) if !self.events.is_empty() => return Ok(()),
                Ok(()) => silence += GLANCE,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(Failure::new(format!("cannot poll: {error}"))),
            }
            if silence >= SILENCE_MAX {
                let seconds = SILENCE_MAX.as_secs();
                return Err(Failure::new(format!(
                    "the server owes replies and sent nothing for {seconds} s"
                )));
            }
        }
    }
}

/// Opens one connection and makes the handshake.
pub(crate) fn open(address: SocketAddr) -> io::Result<std::net::TcpStream> {
    let mut stream = std::net::TcpStream::connect_timeout(&address, SILENCE_MAX)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(SILENCE_MAX))?;
    let introduction = Exchange::introduction();
    stream.write_all(&introduction.request)?;
    let mut reply = vec![0; introduction.reply.len()];
    stream.read_exact(&mut reply)?;
    if reply != introduction.reply {
        let message = format!("a ping was answered with {reply:02x?}: this is not a store");
        return Err(io::Error::new(ErrorKind::InvalidData, message));
    }
    stream.set_nonblocking(true)?;
    Ok(stream)
}

#[cold]
pub(crate) fn lost(error: &io::Error) -> Failure {
    match error.kind() {
        ErrorKind::UnexpectedEof => Failure::new("the server closed a connection"),
        _ => Failure::new(format!("lost a connection: {error}")),
    }
}

/// Are these the bytes of `reply` from `at` on?
fn compare(reply: &[u8], at: usize, bytes: &[u8]) -> Result<(), Failure> {
    let Some(expected) = reply.get(at..at + bytes.len()) else {
        return Err(Failure::new(format!("a reply is longer than the {} bytes it should have", reply.len())));
    };
    if expected == bytes {
        return Ok(());
    }
    let wrong = expected.iter().zip(bytes).position(|(a, b)| a != b).expect("they differ");
    Err(Failure::new(format!(
        "a wrong reply: byte {} of {} is {:#04x}, not {:#04x}",
        at + wrong,
        reply.len(),
        bytes[wrong],
        expected[wrong]
    )))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::Case;
    use std::net::TcpListener;
    use std::thread;

    /// Answers the introduction, then `reply` for every `request_length` bytes, on every connection.
    fn parrot(connections: usize, request_length: usize, reply: Vec<u8>) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let serve = move || {
            let mut poll = Poll::new().unwrap();
            let mut streams = Vec::new();
            let introduction = Exchange::introduction();
            for index in 0..connections {
                let (mut stream, _) = listener.accept().unwrap();
                stream.set_nodelay(true).unwrap();
                stream.read_exact(&mut vec![0; introduction.request.len()]).unwrap();
                stream.write_all(&introduction.reply).unwrap();
                stream.set_nonblocking(true).unwrap();
                let mut stream = TcpStream::from_std(stream);
                poll.registry().register(&mut stream, Token(index), Interest::READABLE).unwrap();
                streams.push((stream, 0));
            }
            let mut events = Events::with_capacity(1024);
            let mut buffer = vec![0; 64 << 10];
            let mut open = connections;
            while open > 0 {
                poll.poll(&mut events, None).unwrap();
                for event in &events {
                    let (stream, received) = &mut streams[event.token().0];
                    match stream.read(&mut buffer) {
                        Ok(0) | Err(_) => open -= 1,
                        Ok(count) => *received += count,
                    }
                    while *received >= request_length {
                        *received -= request_length;
                        let _gone_or_written = stream.write(&reply);
                    }
                }
            }
        };
        thread::Builder::new().name("parrot".into()).spawn(serve).unwrap();
        address
    }

    #[test]
    fn a_run_counts_turns_and_ends_with_nothing_owed() {
        let scripts = Scripts::new(Case::Get, 3, 4);
        let turn = scripts.of(0).turn.clone();
        let address = parrot(3, turn.request.len(), turn.reply.clone());
        let mut fleet = Fleet::open(address, 3, &Interrupt::default()).unwrap();
        let steady = fleet.steady(&scripts, Duration::from_millis(5)).unwrap();
        assert!(steady.turns > 0 && steady.elapsed >= Duration::from_millis(5));
        assert_eq!(steady.turns_served, (0..3).map(|link| fleet.turns(link)).sum::<u64>());
        fleet.exchange(|index| (&scripts.of(index).turn.request, &turn.reply)).unwrap();
    }

    #[test]
    fn wrong_bytes_of_a_server_are_detected() {
        let scripts = Scripts::new(Case::Get, 1, 1);
        let turn = &scripts.of(0).turn;
        let mut wrong = turn.reply.clone();
        *wrong.last_mut().unwrap() = b'?';
        let mut fleet = Fleet::open(parrot(1, turn.request.len(), wrong), 1, &Interrupt::default()).unwrap();
        let failure = fleet.exchange_alike(turn).unwrap_err();
        assert_eq!(failure.to_string(), "a wrong reply: byte 23 of 24 is 0x3f, not 0x66");
    }

    #[test]
    fn too_many_bytes_of_a_server_are_detected() {
        let scripts = Scripts::new(Case::Get, 1, 1);
        let turn = &scripts.of(0).turn;
        let longer = [&turn.reply[..], b"?"].concat();
        let mut fleet = Fleet::open(parrot(1, turn.request.len(), longer), 1, &Interrupt::default()).unwrap();
        let failure = fleet.steady(&scripts, Duration::from_millis(5)).unwrap_err();
        assert_eq!(failure.to_string(), "the server answers more than it was asked");
    }

    #[test]
    fn a_server_that_exits_is_named_as_the_reason() {
        let scripts = Scripts::new(Case::Get, 1, 1);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let introduce = move || {
            let (mut stream, _) = listener.accept().unwrap();
            let introduction = Exchange::introduction();
            let mut said = vec![0; introduction.request.len() + scripts.of(0).turn.request.len()];
            stream.read_exact(&mut said[..introduction.request.len()]).unwrap();
            stream.write_all(&introduction.reply).unwrap();
            stream.read_exact(&mut said[introduction.request.len()..]).unwrap();
        };
        thread::Builder::new().name("quitter".into()).spawn(introduce).unwrap();
        let mut fleet = Fleet::open(address, 1, &Interrupt::default()).unwrap();
        let scripts = Scripts::new(Case::Get, 1, 1);
        let failure = fleet.steady(&scripts, Duration::from_millis(5)).unwrap_err();
        assert_eq!(failure.to_string(), "the server closed a connection");
    }
}
