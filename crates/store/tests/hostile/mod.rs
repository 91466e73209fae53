//! What attack tests need: bytes by hand, a socket that sends them, and a well-behaved client that watches.
//!
//! Messages are built here and not by `tenfold_store::wire`, so that a mistake there cannot hide itself.

#![allow(dead_code, unreachable_pub, reason = "each test file uses its part")]
#![allow(
    clippy::disallowed_methods,
    clippy::unwrap_used,
    reason = "tests: threads, sockets, the time things take"
)]

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tenfold_store::{StoreExt, TcpStore, TcpStoreOptions};

pub const HELLO: [u8; 5] = [0x00, 0xce, 0xf7, 0x85, 0x3c];

pub const SET: u8 = 1;
pub const COMPARE_SET: u8 = 2;
pub const GET: u8 = 3;
pub const ADD: u8 = 4;
pub const CHECK: u8 = 5;
pub const WAIT: u8 = 6;
pub const DELETE: u8 = 8;
pub const APPEND: u8 = 9;
pub const MULTI_GET: u8 = 10;
pub const MULTI_SET: u8 = 11;
pub const CANCEL_WAIT: u8 = 12;
pub const PING: u8 = 13;
pub const QUEUE_PUSH: u8 = 14;
pub const QUEUE_POP: u8 = 15;
pub const QUEUE_LEN: u8 = 16;
pub const LIST_KEYS: u8 = 17;
pub const BARRIER: u8 = 18;
pub const INFO: u8 = 0x81;
pub const SESSION: u8 = 0x82;
pub const NUMBERED: u8 = 0x83;
pub const ACKNOWLEDGE: u8 = 0x84;
pub const BYE: u8 = 0x85;

/// Nothing in these tests takes this long unless it hangs.
pub const HANG: Duration = Duration::from_secs(40);

/// An opcode and strings, each with its length in front.
pub fn message(opcode: u8, strings: &[&[u8]]) -> Vec<u8> {
    let mut out = vec![opcode];
    strings.iter().for_each(|string| put(&mut out, string));
    out
}

/// An opcode, a count, and strings; pairs of them count as one.
pub fn list<S: AsRef<[u8]>>(opcode: u8, strings: impl ExactSizeIterator<Item = S>) -> Vec<u8> {
    let count = strings.len() / if opcode == MULTI_SET { 2 } else { 1 };
    let mut out = vec![opcode];
    out.extend_from_slice(&(count as u64).to_le_bytes());
    strings.for_each(|string| put(&mut out, string.as_ref()));
    out
}

fn put(out: &mut Vec<u8>, string: &[u8]) {
    out.extend_from_slice(&(string.len() as u64).to_le_bytes());
    out.extend_from_slice(string);
}

/// A raw connection.
pub struct Raw(pub TcpStream);

impl Raw {
    pub fn connect(server: SocketAddr) -> Raw {
        let stream = TcpStream::connect(server).expect("the server listens");
        stream.set_read_timeout(Some(HANG)).unwrap();
        stream.set_write_timeout(Some(HANG)).unwrap();
        stream.set_nodelay(true).unwrap();
        Raw(stream)
    }

    /// A connection after the handshake.
    pub fn greeted(server: SocketAddr) -> Raw {
        let mut raw = Raw::connect(server);
        raw.send(&HELLO);
        raw
    }

    pub fn send(&mut self, bytes: &[u8]) {
        self.0.write_all(bytes).expect("the server takes it");
    }

    /// Sends to a server that may close the connection meanwhile; returns how many bytes were sent.
    pub fn try_send(&mut self, bytes: &[u8]) -> usize {
        let mut sent = 0;
        while sent < bytes.len() {
            match self.0.write(&bytes[sent..]) {
                Ok(length) => sent += length,
                Err(_) => break,
            }
        }
        sent
    }

    /// Sends without ever blocking, as long as the server takes something within `patience`.
    pub fn stuff(&mut self, bytes: &[u8], patience: Duration) -> usize {
        self.0.set_write_timeout(Some(patience)).unwrap();
        self.try_send(bytes)
    }

    pub fn read<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        self.0.read_exact(&mut bytes).expect("the server answers");
        bytes
    }

    pub fn read_value(&mut self) -> Vec<u8> {
        let length = u64::from_le_bytes(self.read());
        let mut value = vec![0; usize::try_from(length).unwrap()];
        self.0.read_exact(&mut value).expect("the whole value comes");
        value
    }

    /// Waits until everything sent so far has been served.
    pub fn sync(&mut self) {
        self.send(&[PING, 1, 2, 3, 4]);
        assert_eq!(self.read(), [1, 2, 3, 4]);
    }

    /// What arrives first: some bytes, or nothing if the server closes.
    pub fn answer_or_end(&mut self) -> Vec<u8> {
        let mut buffer = vec![0; 64];
        let length = self.0.read(&mut buffer).unwrap_or(0);
        buffer.truncate(length);
        buffer
    }

    /// Reads until the server closes; returns the bytes before that.
    pub fn until_closed(&mut self) -> Vec<u8> {
        let (mut all, mut buffer) = (Vec::new(), vec![0; 64 << 10]);
        loop {
            match self.0.read(&mut buffer) {
                Ok(0) => return all,
                Ok(length) => all.extend_from_slice(&buffer[..length]),
                Err(error) if matches!(error.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe) => {
                    return all;
                }
                Err(error) => panic!("the server did not close the connection: {error}"),
            }
        }
    }
}

/// Polls `seen` until it is true.
pub fn until(what: &str, mut seen: impl FnMut() -> bool) {
    let start = Instant::now();
    while !seen() {
        assert!(start.elapsed() < HANG, "timed out waiting until {what}");
        std::thread::park_timeout(Duration::from_millis(2));
    }
}

pub fn client(server: SocketAddr, timeout: Duration) -> TcpStore {
    let options = TcpStoreOptions::new(server.ip().to_string(), server.port()).timeout(timeout);
    TcpStore::open(options).expect("a well-behaved client is let in")
}

/// A well-behaved client at work on a thread of its own: checks every answer and records its longest wait for
/// one.
pub struct Bystander {
    stop: mpsc::Sender<()>,
    thread: Option<JoinHandle<(u32, Duration)>>,
}

impl Bystander {
    pub fn watch(server: SocketAddr) -> Bystander {
        let store = client(server, HANG);
        let (stop, stopped) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            const PACE: Duration = Duration::from_millis(1);
            let (mut round, mut longest) = (0_u32, Duration::ZERO);
            while stopped.recv_timeout(PACE) == Err(mpsc::RecvTimeoutError::Timeout) {
                round += 1;
                let start = Instant::now();
                let text = round.to_string();
                store.set("bystander/value", &text).expect("set works");
                assert_eq!(&*store.get("bystander/value").expect("get works"), text.as_bytes());
                assert_eq!(store.add("bystander/count", 1).expect("add works"), i64::from(round));
                assert!(!store.check(&["bystander/never"]).expect("check works"));
                longest = longest.max(start.elapsed());
            }
            (round, longest)
        });
        Bystander { stop, thread: Some(thread) }
    }

    /// Ends the watch and prints what it saw. The longest stall is only information: a busy machine causes
    /// stalls too.
    pub fn report(mut self, attack: &str) -> Duration {
        self.stop.send(()).expect("the bystander is still there: no answer was wrong");
        let (rounds, longest) =
            self.thread.take().expect("reported once").join().expect("no answer was wrong");
        println!(
            "{attack}: bystander did {rounds} rounds, longest stall {:.1} ms",
            longest.as_secs_f64() * 1e3
        );
        assert!(longest < HANG / 4, "the bystander hung for {longest:?}");
        longest
    }
}
