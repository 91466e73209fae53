//! A process that drives some thousand clients from one thread.
//!
//! It reads orders from standard input, lets each of its clients carry them out, and prints `done`.
#![expect(clippy::disallowed_methods, reason = "starts a process and a thread that reads its output")]

use std::io::{BufRead as _, BufReader, ErrorKind, Read as _, Write as _};
use std::net::SocketAddr;
use std::ops::Range;
use std::process::{Child, ChildStdin, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use mio::net::TcpStream;
use tenfold_console::Program;
use tenfold_store::{Bytes, Request, Response};

use crate::load::{Reactor, lost};
use crate::script::Exchange;
use crate::server::{raise_file_limit, tie_to_parent};
use crate::{Failure, Interrupt};

/// The value that all clients read.
pub(crate) const VALUE: &[u8] = b"0123456789abcdef0123456789abcdef";

/// Clients of one crew that connect at the same time: the queue of a listener has 4,096 places on Linux, and
/// the kernel retries a dropped one after a whole second.
const ARRIVING_MAX: usize = 1024;
const GLANCE: Duration = Duration::from_millis(100);
/// A crew that takes longer than this for one order is stuck.
const ORDER_MAX: Duration = Duration::from_secs(300);

/// A crew, seen from the process that started it.
pub(crate) struct Crew {
    child: Child,
    orders: Option<ChildStdin>,
    answers: Receiver<String>,
}

impl Crew {
    /// Starts one for the clients of these ranks, of `world` in all. `addresses` are those of their relays, of
    /// `relays` in all.
    pub(crate) fn start(
        addresses: &[SocketAddr],
        relays: usize,
        ranks: Range<usize>,
        world: usize,
    ) -> Result<Crew, Failure> {
        let mut command = Program::own().command();
        command.args(["bench", "scale-clients"]);
        let (first, count) = (ranks.start, ranks.len());
        command.args([format!("--first={first}"), format!("--count={count}")]);
        command.args([format!("--world={world}"), format!("--relays={relays}")]);
        command.args(addresses.iter().map(|address| format!("--address={address}")));
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| Failure::new(format!("cannot start clients: {error}")))?;
        let orders = child.stdin.take();
        let output = BufReader::new(child.stdout.take().expect("it was asked for"));
        let (sender, answers) = channel();
        let read = move || {
            for line in output.lines().map_while(Result::ok) {
                let _somebody_may_listen = sender.send(line);
            }
        };
        std::thread::Builder::new()
            .name("clients output".into())
            .spawn(read)
            .map_err(|error| Failure::new(format!("cannot start a thread: {error}")))?;
        Ok(Crew { child, orders, answers })
    }

    pub(crate) fn tell(&mut self, order: &str) -> Result<(), Failure> {
        let orders = self.orders.as_mut().expect("it is closed only at the end");
        writeln!(orders, "{order}")
            .and_then(|()| orders.flush())
            .map_err(|error| Failure::new(format!("the clients have exited: {error}")))
    }

    /// Waits until the last order is done.
    pub(crate) fn wait(&self, interrupt: &Interrupt) -> Result<(), Failure> {
        for _ in 0..ORDER_MAX.as_millis() / GLANCE.as_millis() {
            interrupt.check()?;
            match self.answers.recv_timeout(GLANCE) {
                Ok(line) if line == "done" => return Ok(()),
                Ok(line) => return Err(Failure::new(line)),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Err(Failure::new("the clients have exited")),
            }
        }
        Err(Failure::new(format!("the clients were not done within {} s", ORDER_MAX.as_secs())))
    }

    /// Disconnects the clients.
    pub(crate) fn end(&mut self) {
        self.orders = None;
        let _reaped = self.child.wait();
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        let _exited = self.child.kill();
        let _reaped = self.child.wait();
    }
}

/// The clients of one process.
#[derive(Debug, clap::Args)]
pub(crate) struct ClientsArgs {
    #[arg(long)]
    first: usize,
    #[arg(long)]
    count: usize,
    #[arg(long)]
    world: usize,
    #[arg(long)]
    relays: usize,
    /// One for each relay that this crew's clients have.
    #[arg(long = "address", required = true)]
    addresses: Vec<SocketAddr>,
}

/// Carries out orders until there are none.
pub(crate) fn host(args: &ClientsArgs) -> Result<(), Failure> {
    tie_to_parent()?;
    raise_file_limit();
    let interrupt = Interrupt::default();
    let mut clients = Clients {
        reactor: Reactor::new(&interrupt)?,
        clients: Vec::with_capacity(args.count),
        buffer: vec![0; 64 << 10],
    };
    for order in std::io::stdin().lines() {
        let Ok(order) = order else { break };
        let answer = match clients.obey(args, &order) {
            Ok(()) => "done".into(),
            Err(failure) => failure.to_string().replace('\n', " "),
        };
        println!("{answer}");
    }
    // Closed by reset: thousands of ports that linger would leave none for the next round.
    for client in &clients.clients {
        let _lingers = rustix::net::sockopt::set_socket_linger(&client.stream, Some(Duration::ZERO));
    }
    Ok(())
}

struct Clients {
    reactor: Reactor,
    clients: Vec<Client>,
    buffer: Vec<u8>,
}

struct Client {
    stream: TcpStream,
    sent: usize,
    received: usize,
}

fn key(name: &str) -> Bytes<'static> {
    format!("/{name}").into_bytes().into()
}

fn address_of(rank: usize) -> String {
    format!("10.{}.{}.{}:{:05}", rank >> 16, rank >> 8 & 255, rank & 255, 20_000 + rank % 10_000)
}

fn address_key(name: &str, rank: usize) -> Bytes<'static> {
    key(&format!("address-{name}/{rank}"))
}

impl Clients {
    fn obey(&mut self, args: &ClientsArgs, order: &str) -> Result<(), Failure> {
        let words: Vec<&str> = order.split(' ').collect();
        match words[..] {
            ["connect", name] => self.connect(args, name),
            ["barrier", name] => {
                let barrier = Request::Barrier { key: key(name), world: args.world as i64 };
                self.exchange(|_| Exchange::new().ask(barrier.clone(), Response::Ready), false)
            }
            // A server answers a ping while its sender waits: the pong shows that the wait has begun.
            ["park", name] => {
                let wait = Request::Wait { keys: vec![key(name)] };
                self.exchange(|_| Exchange::new().ask(wait.clone(), Response::Done).ping(), false)
            }
            ["read", name] => {
                let ready = Exchange { request: Vec::new(), reply: vec![0] };
                self.exchange(|_| ready.clone(), false)?;
                let get =
                    Exchange::new().ask(Request::Get { key: key(name) }, Response::Value(Some(VALUE.into())));
                self.exchange(|_| get.clone(), false)
            }
            ["publish", name] => self.exchange(
                |index| {
                    let rank = args.first + index;
                    let value = address_of(rank).into_bytes().into();
                    let set = Request::Set { key: address_key(name, rank), value };
                    Exchange::new().ask(set, Response::Done).ping()
                },
                false,
            ),
            ["gather", name, count] => {
                let count = count.parse::<usize>().unwrap_or(1).min(args.world);
                let ranks: Vec<usize> = (0..count).map(|index| index * args.world / count).collect();
                let keys = || ranks.iter().map(|rank| address_key(name, *rank)).collect();
                let wait = Exchange::new().ask(Request::Wait { keys: keys() }, Response::Ready);
                self.exchange(|_| wait.clone(), false)?;
                let values = ranks.iter().map(|rank| Some(address_of(*rank).as_str().into())).collect();
                let read = Exchange::new().ask(Request::MultiGet { keys: keys() }, Response::Values(values));
                self.exchange(|_| read.clone(), false)
            }
            _ => Err(Failure::new(format!("unknown order `{order}`"))),
        }
    }

    fn connect(&mut self, args: &ClientsArgs, name: &str) -> Result<(), Failure> {
        let add = Request::Add { key: key(name), delta: 1 };
        let hello = Exchange::introduction().ask(add, Response::Number(0));
        let relay_of = |rank: usize| rank * args.relays / args.world;
        let mut open = 0;
        let mut next = 0;
        while next < args.count || open > 0 {
            while next < args.count && open < ARRIVING_MAX {
                let address = args.addresses[relay_of(args.first + next) - relay_of(args.first)];
                let mut stream = TcpStream::connect(address).map_err(|error| lost(&error))?;
                self.reactor.watch(&mut stream, next)?;
                self.clients.push(Client { stream, sent: 0, received: 0 });
                next += 1;
                open += 1;
            }
            self.reactor.turn()?;
            for event in &self.reactor.events {
                let client = &mut self.clients[event.token().0];
                if client.received < hello.reply.len() && client.advance(&hello, true, &mut self.buffer)? {
                    open -= 1;
                }
            }
        }
        Ok(())
    }

    /// Lets every client send something and compares the replies; `any_number`: except for the last eight
    /// bytes.
    fn exchange(&mut self, what: impl Fn(usize) -> Exchange, any_number: bool) -> Result<(), Failure> {
        let mut open = 0;
        for (index, client) in self.clients.iter_mut().enumerate() {
            (client.sent, client.received) = (0, 0);
            let exchange = what(index);
            open += usize::from(!client.advance(&exchange, any_number, &mut self.buffer)?);
        }
        while open > 0 {
            self.reactor.turn()?;
            for event in &self.reactor.events {
                let index = event.token().0;
                let client = &mut self.clients[index];
                let exchange = what(index);
                if client.received < exchange.reply.len()
                    && client.advance(&exchange, any_number, &mut self.buffer)?
                {
                    open -= 1;
                }
            }
        }
        Ok(())
    }
}

impl Client {
    /// Continues as far as the socket allows; true once the whole reply has arrived.
    fn advance(&mut self, exchange: &Exchange, any_number: bool, buffer: &mut [u8]) -> Result<bool, Failure> {
        let not_yet =
            |kind| matches!(kind, ErrorKind::WouldBlock | ErrorKind::NotConnected | ErrorKind::Interrupted);
        while self.sent < exchange.request.len() {
            match self.stream.write(&exchange.request[self.sent..]) {
                Ok(count) => self.sent += count,
                Err(error) if not_yet(error.kind()) => return Ok(false),
                Err(error) => return Err(lost(&error)),
            }
        }
        while self.received < exchange.reply.len() {
            let left = buffer.len().min(exchange.reply.len() - self.received);
            match self.stream.read(&mut buffer[..left]) {
                Ok(0) => return Err(lost(&ErrorKind::UnexpectedEof.into())),
                Ok(count) => {
                    let end = self.received + count;
                    let checked = if any_number { exchange.reply.len() - 8 } else { exchange.reply.len() };
                    let compared = end.min(checked).saturating_sub(self.received);
                    let expected = &exchange.reply[self.received..self.received + compared];
                    if buffer[..compared] != *expected {
                        return Err(Failure::new("a server gave a wrong reply"));
                    }
                    self.received = end;
                }
                Err(error) if not_yet(error.kind()) => return Ok(false),
                Err(error) => return Err(lost(&error)),
            }
        }
        Ok(true)
    }
}
