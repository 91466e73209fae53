//! Clients that do random operations and record what they saw.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tenfold_store::wire::{self, Command, MAGIC, ReplySource};
use tenfold_store::{
    Bytes, Deadline, ErrorKind, Fault, Operation, Relay, RelayOptions, Request, Response, Server,
    ServerOptions, Store, TcpStore,
};

use crate::checker::{Call, NEVER};
use crate::cutter::Cutter;

/// Long enough for any machine; only a lost answer takes longer.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// One seed's run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Run {
    pub(crate) seed: u64,
    /// At least this many, by all clients together.
    pub(crate) operations: u64,
    /// Whether connections are cut as well. Some thirty in a run of any length: an operation without an
    /// answer may happen at any later time, and hundreds of them make checking very slow.
    pub(crate) cuts: bool,
    pub(crate) path: Path,
}

/// How clients reach the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Path {
    Direct,
    /// Most of them through two relays.
    Relays,
    /// The same, and the connections of the relays are cut now and then.
    BrokenRelays,
}

/// How a client talks to the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Style {
    /// As users do.
    Library,
    /// Each message in pieces.
    Pieces,
    /// Several messages in flight, together in pieces.
    Pipeline,
}

const STYLES: [Style; 8] = [
    Style::Library,
    Style::Pieces,
    Style::Pipeline,
    Style::Library,
    Style::Pieces,
    Style::Pipeline,
    Style::Library,
    Style::Pieces,
];

impl Run {
    /// What each connection saw, in the order it asked.
    pub(crate) fn history(self) -> Vec<Vec<Call>> {
        let server = Server::start(ServerOptions::new("127.0.0.1", 0)).expect("a port is free");
        // A message of 150,000 bytes must get through now and then.
        let cutter =
            (self.path == Path::BrokenRelays).then(|| Cutter::start(server.address(), self.seed, 200_000));
        let upstream = cutter.as_ref().map_or(server.address(), |cutter| cutter.address);
        let relay =
            || Relay::start(RelayOptions::new("127.0.0.1", upstream.port())).expect("the server listens");
        let relays: Vec<Relay> = if self.path == Path::Direct { vec![] } else { vec![relay(), relay()] };
        // Three of eight clients at each relay, two directly at the server.
        let addresses = match &relays[..] {
            [one, other] => [one.address(), one.address(), one.address(), server.address()]
                .into_iter()
                .chain([other.address(), other.address(), other.address(), server.address()])
                .collect(),
            _ => vec![server.address(); STYLES.len()],
        };
        let shared =
            Shared { start: Instant::now(), gate: Barrier::new(STYLES.len()), answers: AtomicU64::new(0) };
        let quota = self.operations.div_ceil(STYLES.len() as u64);
        let sessions = std::thread::scope(|scope| {
            let work = |(index, style)| {
                let client = Client {
                    address: addresses[index as usize],
                    shared: &shared,
                    random: Random(self.seed << 8 | index),
                    name: index,
                    serial: 0,
                    last_seen: HashMap::new(),
                    calls: Vec::new(),
                    sessions: Vec::new(),
                };
                move || match style {
                    Style::Library => client.with_library(quota),
                    _ => client.with_sockets(quota, style, self.cuts.then_some(25.max(quota as usize / 8))),
                }
            };
            let threads: Vec<_> = (0..).zip(STYLES).map(work).map(|work| scope.spawn(work)).collect();
            threads.into_iter().flat_map(|thread| thread.join().expect("a client failed")).collect()
        });
        let closed = server.facts().closed;
        assert!(closed.is_empty(), "seed {}: the server closed connections: {closed:?}", self.seed);
        for relay in &relays {
            assert_eq!(relay.facts().closed, 0, "seed {}: {:?}", self.seed, relay.facts());
        }
        if let Some(cutter) = &cutter {
            let reconnects: u64 = relays.iter().map(|relay| relay.facts().reconnects).sum();
            println!("seed {}: {} cuts, {reconnects} reconnects", self.seed, cutter.cuts());
            assert!(cutter.cuts() > 0 && reconnects > 0, "no connection was cut");
        }
        sessions
    }
}

struct Shared {
    start: Instant,
    gate: Barrier,
    /// Answers that all clients got.
    answers: AtomicU64,
}

/// Splitmix64: short, and the same on every machine.
#[derive(Clone, Debug)]
pub(crate) struct Random(pub(crate) u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    fn one_in(&mut self, bound: usize) -> bool {
        self.below(bound) == 0
    }
}

struct Client<'a> {
    address: SocketAddr,
    shared: &'a Shared,
    random: Random,
    name: u64,
    serial: u64,
    /// Values to expect in `compare_set`.
    last_seen: HashMap<Vec<u8>, Vec<u8>>,
    /// The open connection's.
    calls: Vec<Call>,
    /// Those of closed connections.
    sessions: Vec<Vec<Call>>,
}

// ── what is asked ──────────────────────────────────────────────────────────────────────────────────────────

/// The object that a request is about: a key, a queue, or two keys that are used together.
pub(crate) fn object_of(request: &Request<'_>) -> String {
    let key = String::from_utf8_lossy(request.keys()[0]).into_owned();
    if key.starts_with("both") { "both".into() } else { key }
}

/// Long values as a short form that differs if they do.
fn brief(value: &[u8]) -> Vec<u8> {
    if value.len() <= 64 {
        return value.into();
    }
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    let front = value[..16].escape_ascii();
    format!("{front}… {} bytes, {:016x}", value.len(), hasher.finish()).into_bytes()
}

impl Client<'_> {
    /// A value that no other client writes.
    fn unique(&mut self) -> Vec<u8> {
        self.serial += 1;
        format!("{}.{};", self.name, self.serial).into_bytes()
    }

    fn request(&mut self) -> Request<'static> {
        match self.random.below(9) {
            0 | 1 => self.about_text(),
            2 | 3 => self.about_counter(),
            4 => self.about_long_value(),
            5 | 6 => self.about_two_keys(),
            _ => self.about_queue(),
        }
    }

    fn key(&mut self, kind: &str) -> Bytes<'static> {
        format!("{kind}{}", self.random.below(2)).into_bytes().into()
    }

    fn compare_set(&mut self, key: Bytes<'static>, desired: Vec<u8>) -> Request<'static> {
        let expected = self.last_seen.get(&key[..]).cloned().unwrap_or_default();
        Request::CompareSet { key, expected: expected.into(), desired: desired.into() }
    }

    fn about_text(&mut self) -> Request<'static> {
        let (key, value) = (self.key("text"), self.unique());
        match self.random.below(10) {
            0 | 1 => Request::Set { key, value: value.into() },
            2 | 3 => Request::Append { key, value: value.into() },
            4 | 5 => self.compare_set(key, value),
            6 => Request::Delete { key },
            7 => Request::Check { keys: vec![key] },
            _ => Request::Get { key },
        }
    }

    fn about_counter(&mut self) -> Request<'static> {
        let key = self.key("count");
        let delta = self.random.below(2_001) as i64 - 1_000;
        match self.random.below(12) {
            0 => Request::Set { key, value: delta.to_string().into_bytes().into() },
            1 => Request::Delete { key },
            2 => Request::Check { keys: vec![key] },
            3 | 4 => Request::Get { key },
            5 => self.compare_set(key, (delta * 10_000).to_string().into()),
            _ => Request::Add { key, delta },
        }
    }

    fn about_long_value(&mut self) -> Request<'static> {
        let key = Bytes::from(b"long".as_slice());
        let mut value = self.unique();
        if self.random.one_in(3) {
            let length = self.random.below(150_000); // more than the server reads at a time
            value.resize(value.len() + length, b'.');
        }
        match self.random.below(8) {
            0 | 1 => Request::Set { key, value: value.into() },
            2 | 3 => self.compare_set(key, value),
            4 => Request::Delete { key },
            _ => Request::Get { key },
        }
    }

    /// Written together and read together, so that a half-done write shows.
    fn about_two_keys(&mut self) -> Request<'static> {
        let keys: Vec<Bytes<'static>> = vec![(b"both0").into(), (b"both1").into()];
        let (key, value) = (self.key("both"), self.unique());
        match self.random.below(10) {
            0..=2 => {
                let pairs = keys.into_iter().map(|key| (key, value.clone().into())).collect();
                Request::MultiSet { pairs }
            }
            3..=5 => Request::MultiGet { keys },
            6 => Request::Check { keys },
            7 => Request::Get { key },
            8 => Request::Delete { key },
            _ => Request::Set { key, value: value.into() },
        }
    }

    fn about_queue(&mut self) -> Request<'static> {
        let (key, value) = (self.key("queue"), self.unique());
        // More pops than pushes: in a long queue it takes long until the order of two pushes shows, and
        // checking is slow.
        match self.random.below(10) {
            0..=2 => Request::QueuePush { key, value: value.into() },
            3 => Request::QueueLen { key },
            4 => Request::Check { keys: vec![key] },
            _ => Request::QueuePop { key },
        }
    }
}

// ── what is written down ───────────────────────────────────────────────────────────────────────────────────

impl Client<'_> {
    fn now(&self) -> u64 {
        self.shared.start.elapsed().as_nanos() as u64
    }

    /// Records that this request is about to be sent.
    fn asks(&mut self, request: &Request<'static>) {
        let mut request = request.clone();
        match &mut request {
            Request::Set { key, value } if **key == *b"long" => *value = brief(value).into(),
            Request::CompareSet { key, expected, desired } if **key == *b"long" => {
                (*expected, *desired) = (brief(expected).into(), brief(desired).into());
            }
            _ => {}
        }
        let invoked = self.now();
        self.calls.push(Call { request, response: None, invoked, returned: NEVER });
    }

    /// Records the answer to the call at `index`, which proves that all earlier ones are done.
    fn hears(&mut self, index: usize, mut response: Response) {
        let request = &self.calls[index].request;
        if let Response::Value(Some(value)) = &mut response {
            let key = request.keys()[0].to_vec();
            self.last_seen.insert(key.clone(), value.to_vec());
            if key == b"long" {
                *value = brief(value).into();
            }
        }
        self.proves(index);
        let returned = self.now();
        let call = &mut self.calls[index];
        (call.response, call.returned) = (Some(response), returned);
        self.shared.answers.fetch_add(1, Ordering::Relaxed);
    }

    /// Some operations have no answer on the wire: they are known to be done when a later one is answered.
    fn proves(&mut self, before: usize) {
        let now = self.now();
        for call in self.calls[..before].iter_mut().rev().take_while(|call| call.returned == NEVER) {
            (call.response, call.returned) = (Some(Response::Done), now);
        }
    }

    fn is_answered(request: &Request<'_>) -> bool {
        use Operation::{Append, MultiSet, QueuePush, Set};
        !matches!(request.operation(), Append | MultiSet | QueuePush | Set)
    }

    fn closes(&mut self) {
        let session = std::mem::take(&mut self.calls);
        self.sessions.push(session);
    }
}

// ── how it is asked ────────────────────────────────────────────────────────────────────────────────────────

impl Client<'_> {
    fn with_library(mut self, quota: u64) -> Vec<Vec<Call>> {
        let address = self.address;
        let store = TcpStore::connect(&address.ip().to_string(), address.port()).expect("the server listens");
        self.shared.gate.wait();
        for _ in 0..quota {
            let request = self.request();
            self.asks(&request);
            let answered = Self::is_answered(&request);
            let response = store.call(request, Deadline::after(PATIENCE)).expect("the server answers");
            if answered {
                self.hears(self.calls.len() - 1, response);
            }
        }
        store.ping().expect("the server answers");
        self.proves(self.calls.len());
        self.closes();
        self.sessions
    }

    fn with_sockets(mut self, quota: u64, style: Style, cut_in: Option<usize>) -> Vec<Vec<Call>> {
        let mut socket = self.connect();
        self.shared.gate.wait();
        while (self.sessions.iter().chain([&self.calls]).map(Vec::len).sum::<usize>() as u64) < quota {
            let count = if style == Style::Pipeline { 1 + self.random.below(6) } else { 1 };
            let requests: Vec<_> = (0..count).map(|_| self.request()).collect();
            if cut_in.is_some_and(|bound| self.random.one_in(bound)) {
                self.vanish(socket, requests);
                socket = self.connect();
            } else {
                self.talk(&mut socket, requests);
            }
        }
        self.ping(&mut socket);
        self.proves(self.calls.len());
        self.closes();
        self.sessions
    }

    fn connect(&mut self) -> Socket {
        let stream = TcpStream::connect_timeout(&self.address, PATIENCE).expect("the server listens");
        stream.set_nodelay(true).expect("a TCP socket");
        stream.set_read_timeout(Some(PATIENCE)).expect("not zero");
        let mut socket = Socket(stream);
        let mut hello = Vec::new();
        wire::encode(&Command::Validate { magic: MAGIC }, &mut hello);
        self.send(&mut socket, &hello);
        self.ping(&mut socket);
        socket
    }

    fn ping(&mut self, socket: &mut Socket) {
        let nonce = self.random.next() as u32;
        let mut bytes = Vec::new();
        wire::encode(&Command::Ping { nonce }, &mut bytes);
        self.send(socket, &bytes);
        let mut answer = [0; 4];
        socket.fill(&mut answer).expect("the server answers");
        assert_eq!(answer, nonce.to_le_bytes());
    }

    fn talk(&mut self, socket: &mut Socket, requests: Vec<Request<'static>>) {
        let first = self.calls.len();
        let mut bytes = Vec::new();
        for request in &requests {
            self.asks(request);
            encode(request, &mut bytes);
        }
        self.send(socket, &bytes);
        for (index, request) in (first..).zip(requests).filter(|(_, request)| Self::is_answered(request)) {
            let count = if matches!(request, Request::MultiGet { .. }) { request.keys().len() } else { 0 };
            let response = wire::decode_response(request.operation(), count, socket);
            self.hears(index, response.expect("the server answers"));
        }
    }

    /// Sends these, the last one perhaps in part, and disconnects without waiting for answers, perhaps during
    /// a wait.
    fn vanish(&mut self, mut socket: Socket, mut requests: Vec<Request<'static>>) {
        let mut bytes = Vec::new();
        if self.random.one_in(2) {
            let (queue, key) = (self.key("queue"), self.key("text"));
            let keys = if self.random.one_in(2) { vec![queue] } else { vec![queue, key] };
            encode(&Request::Wait { keys }, &mut bytes);
        }
        let half = if self.random.one_in(2) { requests.pop() } else { None };
        for request in &requests {
            self.asks(request);
            encode(request, &mut bytes);
        }
        if let Some(half) = half {
            // Not recorded: a part of a message must have no effect, and its value would be noticed if it had
            // one.
            let mut message = Vec::new();
            encode(&half, &mut message);
            bytes.extend_from_slice(&message[..self.random.below(message.len())]);
        }
        self.send(&mut socket, &bytes);
        match self.random.below(3) {
            0 => drop(socket.0.shutdown(Shutdown::Both)),
            1 => {
                // All that it has sent is served before the end of its stream is seen.
                socket.0.shutdown(Shutdown::Write).expect("it is connected");
                socket.0.read_to_end(&mut Vec::new()).expect("the server closes too");
            }
            _ => {}
        }
        self.closes();
    }

    /// Writes in pieces, some of them with other clients' operations in between.
    fn send(&mut self, socket: &mut Socket, bytes: &[u8]) {
        let mut rest = bytes;
        let mut pieces = self.random.below(6);
        while pieces > 0 && rest.len() > 1 {
            // Near the start more often: that is where the opcode and the lengths are.
            let bound = if self.random.one_in(2) { rest.len().min(12) } else { rest.len() };
            let (piece, later) = rest.split_at(1 + self.random.below(bound - 1));
            socket.0.write_all(piece).expect("the server reads");
            self.let_others_go_first();
            (rest, pieces) = (later, pieces - 1);
        }
        socket.0.write_all(rest).expect("the server reads");
    }

    /// Yields for a moment, so that the server sees the piece by itself; occasionally for much longer.
    fn let_others_go_first(&mut self) {
        let frozen = self.random.one_in(50);
        let (more, yields) = if frozen { (20, 300) } else { (1, 4) }; // bounded: all clients may be here
        let answers = || self.shared.answers.load(Ordering::Relaxed);
        let enough = answers() + more;
        for _ in 0..yields {
            if answers() >= enough {
                return;
            }
            std::thread::yield_now();
        }
    }
}

fn encode(request: &Request<'static>, bytes: &mut Vec<u8>) {
    wire::encode(&Command::Call(request.clone().with_prefix(b"/")), bytes);
}

struct Socket(TcpStream);

impl ReplySource for Socket {
    fn fill(&mut self, bytes: &mut [u8]) -> Result<(), Fault> {
        self.0.read_exact(bytes).map_err(|error| Fault::io("cannot read", error).kind_is(ErrorKind::Lost))
    }
}
