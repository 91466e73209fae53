//! Cases that need many clients: connecting together, and being woken together.
#![expect(clippy::disallowed_methods, reason = "a benchmark reads the clock")]

use std::io::{ErrorKind, Read, Write};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use mio::net::TcpStream;
use tenfold_store::{Request, Response};

use super::load::{Fleet, Reactor, lost};
use super::script::Exchange;
use super::{Failure, Interrupt};

/// Clients that connect at the same time. More would overflow the server's queue of connections (4,096 on
/// Linux), and a dropped one retries after a whole second: that would measure the kernel's retries.
const ARRIVING_MAX: usize = 2048;

const PONG_BYTES: usize = 4;
const NUMBER_BYTES: usize = 8;

/// Clients that have connected; closed when dropped.
#[derive(Debug)]
pub(crate) struct Arrived {
    pub(crate) elapsed: Duration,
    streams: Vec<Option<TcpStream>>,
}

impl Drop for Arrived {
    /// Closes by reset: thousands of ports that linger after each round would leave none for the next.
    fn drop(&mut self) {
        for stream in self.streams.iter().flatten() {
            let _lingers_then = rustix::net::sockopt::set_socket_linger(stream, Some(Duration::ZERO));
        }
    }
}

/// Lets `count` clients connect, introduce themselves and add 1 to `init/`, until all have their answers.
pub(crate) fn arrive(address: SocketAddr, count: usize, interrupt: &Interrupt) -> Result<Arrived, Failure> {
    // The numbers are checked below, as they are assigned in any order.
    let add = Request::Add { key: b"init/".into(), delta: 1 };
    let exchange = Exchange::introduction().ask(add, Response::Done);
    let mut reactor = Reactor::new(interrupt)?;
    let mut clients: Vec<Option<Client>> = Vec::with_capacity(count);
    let mut numbers = Vec::with_capacity(count);
    let mut arrived = Vec::with_capacity(count);
    arrived.resize_with(count, || None);

    let start = Instant::now();
    while numbers.len() < count {
        while clients.len() < count && clients.len() - numbers.len() < ARRIVING_MAX {
            let mut stream = TcpStream::connect(address).map_err(|error| lost(&error))?;
            reactor.watch(&mut stream, clients.len())?;
            clients.push(Some(Client {
                stream,
                sent: 0,
                received: 0,
                reply: [0; PONG_BYTES + NUMBER_BYTES],
            }));
        }
        reactor.turn()?;
        for event in &reactor.events {
            let index = event.token().0;
            let Some(client) = clients[index].as_mut() else { continue };
            if let Some(number) = client.advance(&exchange)? {
                numbers.push(number);
                arrived[index] = clients[index].take().map(|client| client.stream);
            }
        }
    }
    let elapsed = start.elapsed();

    numbers.sort_unstable();
    if numbers.windows(2).any(|pair| pair[0] + 1 != pair[1]) {
        return Err(Failure::new("the server gave two clients the same number, or left one out"));
    }
    Ok(Arrived { elapsed, streams: arrived })
}

struct Client {
    stream: TcpStream,
    sent: usize,
    received: usize,
    reply: [u8; PONG_BYTES + NUMBER_BYTES],
}

impl Client {
    /// Continues as far as the socket allows; returns the number once it has arrived.
    fn advance(&mut self, exchange: &Exchange) -> Result<Option<i64>, Failure> {
        while self.sent < exchange.request.len() {
            match self.stream.write(&exchange.request[self.sent..]) {
                Ok(count) => self.sent += count,
                Err(error) if not_yet(error.kind()) => return Ok(None),
                Err(error) => return Err(lost(&error)),
            }
        }
        while self.received < self.reply.len() {
            match self.stream.read(&mut self.reply[self.received..]) {
                Ok(0) => return Err(lost(&ErrorKind::UnexpectedEof.into())),
                Ok(count) => self.received += count,
                Err(error) if not_yet(error.kind()) => return Ok(None),
                Err(error) => return Err(lost(&error)),
            }
        }
        let (pong, number) = self.reply.split_at(PONG_BYTES);
        if pong != exchange.reply {
            return Err(Failure::new(format!("a ping was answered with {pong:02x?}")));
        }
        Ok(Some(i64::from_le_bytes(number.try_into().expect("what is left is a number"))))
    }
}

fn not_yet(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::WouldBlock | ErrorKind::NotConnected | ErrorKind::Interrupted)
}

/// Lets every connection of `waiters` wait for one key, sets it, and measures the time until the last one is
/// woken.
pub(crate) fn wake(waiters: &mut Fleet, setter: &mut Fleet) -> Result<Duration, Failure> {
    const KEY: &[u8] = b"/wake/key";
    // A server serves a ping while its sender waits: the pong shows that the wait has begun.
    let wait = Request::Wait { keys: vec![KEY.into()] };
    waiters.exchange_alike(&Exchange::new().ask(wait, Response::Done).ping())?;

    let set = Exchange::new().ask(Request::Set { key: KEY.into(), value: b"1".into() }, Response::Done);
    let released = Exchange { request: Vec::new(), reply: vec![0] };
    let start = Instant::now();
    setter.exchange_alike(&set)?;
    waiters.exchange_alike(&released)?;
    let elapsed = start.elapsed();

    let delete = Request::Delete { key: KEY.into() };
    setter.exchange_alike(&Exchange::new().ask(delete, Response::Deleted(true)))?;
    Ok(elapsed)
}
