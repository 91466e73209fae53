//! Encodes and decodes c10d's TCPStore protocol.
//!
//! A message is an opcode and its arguments, back to back: no length of the whole, no request number, no checksum.
//! Integers are little-endian; a string is its length as `u64` and its bytes; a list is its count and its items.
//! There is no error reply: a server that will not serve a message closes the connection. `docs/store-wire.md` has
//! the whole protocol.
//!
//! Decoding does not copy, allocates nothing for bytes that have not arrived, and reads each byte at most
//! twice however the message was split: [`Scan`] remembers how far a list had been checked when its bytes ran
//! out.
//!
//! Not here: sockets, what the messages mean, and tenfold's own messages for many clients on one connection
//! (`wire/session`).

mod session;

use std::borrow::Cow;

use crate::request::{Bytes, Operation, Request, Response};
use crate::value::Value;
use tenfold_base::{ErrorKind, Fault};

pub use self::session::{Answer, Ask, Body, Hello, Status, VERSION, Welcome, encode_numbered};
pub(crate) use self::session::{POP_AT_MAX, blunt_pop};

/// What a client sends first, so that a server can distinguish it from a stray browser.
pub const MAGIC: u32 = 0x3C85_F7CE;

/// The nonce of a tenfold client's first ping. PyTorch's clients send their process id, which is never this
/// large. Other servers send the nonce back unchanged.
pub const GREETING: u32 = 0xF01D_7E4F;
/// The answer of tenfold's server to that ping: this client can have its writes confirmed.
pub const GREETING_ANSWER: u32 = 0x4F7E_1DF0;

const VALIDATE: u8 = 0;
const SET: u8 = 1;
const COMPARE_SET: u8 = 2;
const GET: u8 = 3;
const ADD: u8 = 4;
const CHECK: u8 = 5;
const WAIT: u8 = 6;
const NUM_KEYS: u8 = 7;
const DELETE_KEY: u8 = 8;
const APPEND: u8 = 9;
const MULTI_GET: u8 = 10;
const MULTI_SET: u8 = 11;
const CANCEL_WAIT: u8 = 12;
const PING: u8 = 13;
const QUEUE_PUSH: u8 = 14;
const QUEUE_POP: u8 = 15;
const QUEUE_LEN: u8 = 16;
const LIST_KEYS: u8 = 17;
const BARRIER: u8 = 18;
/// Tenfold's own opcodes start at 128, where c10d has none: the server's facts as JSON.
const INFO: u8 = 0x81;

const READY: u8 = 0;
const NOT_READY: u8 = 1;
const CANCELLED: u8 = 1;

/// How large the parts of one message may be. The defaults are PyTorch's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MessageLimits {
    /// Bytes of one key, prefixes included.
    pub key: usize,
    /// Bytes of one value.
    pub value: usize,
    /// Keys of one request.
    pub keys: usize,
    /// Bytes of one whole request.
    pub request: usize,
}

impl Default for MessageLimits {
    fn default() -> Self {
        MessageLimits { key: 8 << 10, value: 8 << 20, keys: 128 << 10, request: 256 << 20 }
    }
}

/// A message from a client.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "each variant says what its fields are")]
pub enum Command<'a> {
    /// The first message of a connection.
    Validate { magic: u32 },
    /// Asks for the nonce back.
    Ping { nonce: u32 },
    /// Ends a wait.
    CancelWait,
    /// Asks for [`Facts`](crate::Facts) as JSON.
    Info,
    /// An operation on the store.
    Call(Request<'a>),
    /// Opens a session, in which one connection serves many clients.
    Session(Hello),
    /// A request of a session.
    Numbered { number: u64, ask: Ask<'a> },
    /// How many answers of the session have arrived.
    Acknowledge { answers: u64 },
    /// Ends the session.
    Bye,
}

/// Why bytes are not a valid message.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "each variant says what its fields are")]
pub enum Malformed {
    /// Unknown opcode.
    Opcode(u8),
    /// The hello of a session cannot have this length.
    Hello(usize),
    /// A part is larger than its limit.
    TooLong { what: &'static str, length: u64, limit: usize },
}

impl std::fmt::Display for Malformed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Malformed::Opcode(opcode) => write!(f, "unknown opcode {opcode}"),
            Malformed::Hello(length) => write!(f, "the hello of a session cannot have {length} bytes"),
            Malformed::TooLong { what, length, limit } => {
                write!(f, "{what} of {length} is over the limit of {limit}")
            }
        }
    }
}

/// The result of an attempt to decode.
#[derive(Debug, PartialEq, Eq)]
pub enum Decoded<'a> {
    /// A whole message, and its length in bytes.
    Whole(Command<'a>, usize),
    /// The message is not whole before this many bytes have arrived.
    Needs(usize),
}

/// How far an incomplete message has been checked. Starts empty; belongs to one message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Scan {
    /// Everything before this offset is complete and within the limits.
    checked: usize,
    /// Strings of the list that are still missing, once its count is known.
    strings_left: u64,
}

/// Decodes the message at the start of `bytes`. If it is not whole, call again with the same `scan` and more
/// bytes.
pub fn decode<'a>(
    bytes: &'a [u8],
    limits: &MessageLimits,
    scan: &mut Scan,
) -> Result<Decoded<'a>, Malformed> {
    match bytes.first() {
        Some(session::SESSION..=session::BYE) => session::decode(bytes, limits, scan),
        _ => decode_plain(bytes, limits, scan),
    }
}

#[inline]
fn decode_plain<'a>(
    bytes: &'a [u8],
    limits: &MessageLimits,
    scan: &mut Scan,
) -> Result<Decoded<'a>, Malformed> {
    if scan.strings_left > 0
        && let Some(needs) = check_strings(bytes, limits, scan)?
    {
        return Ok(Decoded::Needs(needs));
    }
    let mut cursor = Cursor { bytes, at: 0, limits };
    match cursor.command() {
        Ok(command) => {
            let length = cursor.at;
            *scan = Scan::default();
            Ok(Decoded::Whole(command, length))
        }
        Err(Stop::Malformed(malformed)) => Err(malformed),
        Err(Stop::Short { needs }) => Ok(Decoded::Needs(needs)),
        Err(Stop::ShortList { from, strings }) => {
            *scan = Scan { checked: from, strings_left: strings };
            let needs = check_strings(bytes, limits, scan)?.expect("a list that ran short lacks something");
            Ok(Decoded::Needs(needs))
        }
    }
}

/// Continues to check a list; returns the bytes it needs if it is still not whole.
fn check_strings(bytes: &[u8], limits: &MessageLimits, scan: &mut Scan) -> Result<Option<usize>, Malformed> {
    let pairs = bytes[0] == MULTI_SET;
    while scan.strings_left > 0 {
        let Some(field) = bytes.get(scan.checked..scan.checked + 8) else {
            return Ok(Some(scan.checked + 8));
        };
        let length = u64::from_le_bytes(field.try_into().expect("a slice of eight bytes"));
        let is_value = pairs && scan.strings_left % 2 == 1;
        let length = if is_value { limits.check_value(length)? } else { limits.check_key(length)? };
        let end = scan.checked + 8 + length;
        limits.check_request(end)?;
        if end > bytes.len() {
            return Ok(Some(end));
        }
        scan.checked = end;
        scan.strings_left -= 1;
    }
    Ok(None)
}

impl MessageLimits {
    fn check_key(&self, length: u64) -> Result<usize, Malformed> {
        check("a key", length, self.key)
    }
    fn check_value(&self, length: u64) -> Result<usize, Malformed> {
        check("a value", length, self.value)
    }
    fn check_count(&self, count: u64) -> Result<usize, Malformed> {
        check("a number of keys", count, self.keys)
    }
    fn check_request(&self, length: usize) -> Result<usize, Malformed> {
        check("a request", length as u64, self.request)
    }
}

fn check(what: &'static str, length: u64, limit: usize) -> Result<usize, Malformed> {
    if length > limit as u64 { Err(Malformed::TooLong { what, length, limit }) } else { Ok(length as usize) }
}

enum Stop {
    Malformed(Malformed),
    /// The message needs at least this many bytes.
    Short {
        needs: usize,
    },
    /// A list that begins at `from` and has this many strings is not whole.
    ShortList {
        from: usize,
        strings: u64,
    },
}

impl From<Malformed> for Stop {
    fn from(malformed: Malformed) -> Self {
        Stop::Malformed(malformed)
    }
}

struct Cursor<'a, 'l> {
    bytes: &'a [u8],
    at: usize,
    limits: &'l MessageLimits,
}

impl<'a> Cursor<'a, '_> {
    #[inline]
    fn command(&mut self) -> Result<Command<'a>, Stop> {
        let [opcode] = self.fixed()?;
        let request = match opcode {
            VALIDATE => return Ok(Command::Validate { magic: u32::from_le_bytes(self.fixed()?) }),
            PING => return Ok(Command::Ping { nonce: u32::from_le_bytes(self.fixed()?) }),
            CANCEL_WAIT => return Ok(Command::CancelWait),
            INFO => return Ok(Command::Info),
            SET => Request::Set { key: self.key()?, value: self.value()? },
            COMPARE_SET => {
                Request::CompareSet { key: self.key()?, expected: self.value()?, desired: self.value()? }
            }
            GET => Request::Get { key: self.key()? },
            ADD => Request::Add { key: self.key()?, delta: i64::from_le_bytes(self.fixed()?) },
            CHECK => Request::Check { keys: self.keys()? },
            WAIT => Request::Wait { keys: self.keys()? },
            NUM_KEYS => Request::NumKeys,
            DELETE_KEY => Request::Delete { key: self.key()? },
            APPEND => Request::Append { key: self.key()?, value: self.value()? },
            MULTI_GET => Request::MultiGet { keys: self.keys()? },
            MULTI_SET => Request::MultiSet { pairs: self.pairs()? },
            QUEUE_PUSH => Request::QueuePush { key: self.key()?, value: self.value()? },
            QUEUE_POP => Request::QueuePop { key: self.key()? },
            QUEUE_LEN => Request::QueueLen { key: self.key()? },
            LIST_KEYS => Request::ListKeys,
            BARRIER => Request::Barrier { key: self.key()?, world: i64::from_le_bytes(self.fixed()?) },
            unknown => return Err(Malformed::Opcode(unknown).into()),
        };
        Ok(Command::Call(request))
    }

    #[inline]
    fn take(&mut self, length: usize) -> Result<&'a [u8], Stop> {
        let end = self.at + length; // both are bounded by the limits
        let taken = self.bytes.get(self.at..end).ok_or(Stop::Short { needs: end })?;
        self.at = end;
        Ok(taken)
    }

    #[inline]
    fn fixed<const N: usize>(&mut self) -> Result<[u8; N], Stop> {
        Ok(self.take(N)?.try_into().expect("`take` returns what was asked"))
    }

    #[inline]
    fn length(&mut self) -> Result<u64, Stop> {
        Ok(u64::from_le_bytes(self.fixed()?))
    }

    #[inline]
    fn key(&mut self) -> Result<Bytes<'a>, Stop> {
        let length = self.length()?;
        let length = self.limits.check_key(length)?;
        Ok(Cow::Borrowed(self.take(length)?))
    }

    #[inline]
    fn value(&mut self) -> Result<Bytes<'a>, Stop> {
        let length = self.length()?;
        let length = self.limits.check_value(length)?;
        Ok(Cow::Borrowed(self.take(length)?))
    }

    fn keys(&mut self) -> Result<Vec<Bytes<'a>>, Stop> {
        self.list(1, |cursor| cursor.key())
    }

    fn pairs(&mut self) -> Result<Vec<(Bytes<'a>, Bytes<'a>)>, Stop> {
        self.list(2, |cursor| Ok((cursor.key()?, cursor.value()?)))
    }

    fn list<T>(
        &mut self,
        strings_each: u64,
        mut item: impl FnMut(&mut Self) -> Result<T, Stop>,
    ) -> Result<Vec<T>, Stop> {
        let count = self.length()?;
        let count = self.limits.check_count(count)?;
        let from = self.at;
        // Each string takes at least eight bytes, so a count alone cannot make us allocate more than has
        // arrived.
        let room = (self.bytes.len() - from) / 8;
        let mut items = Vec::with_capacity(count.min(room));
        for _ in 0..count {
            match item(self) {
                Ok(item) => items.push(item),
                Err(Stop::Short { .. }) => {
                    return Err(Stop::ShortList { from, strings: count as u64 * strings_each });
                }
                Err(other) => return Err(other),
            }
        }
        self.limits.check_request(self.at)?;
        Ok(items)
    }
}

// ── what a client writes ───────────────────────────────────────────────────────────────────────────────────

/// Appends the bytes of `command`.
pub fn encode(command: &Command<'_>, out: &mut Vec<u8>) {
    match command {
        Command::Validate { magic } => put_fixed(out, VALIDATE, &magic.to_le_bytes()),
        Command::Ping { nonce } => put_fixed(out, PING, &nonce.to_le_bytes()),
        Command::CancelWait => out.push(CANCEL_WAIT),
        Command::Info => out.push(INFO),
        Command::Call(request) => encode_request(request, out),
        Command::Session(hello) => session::encode_hello(hello, out),
        Command::Numbered { number, ask } => encode_numbered(*number, ask, out),
        Command::Acknowledge { answers } => put_fixed(out, session::ACKNOWLEDGE, &answers.to_le_bytes()),
        Command::Bye => out.push(session::BYE),
    }
}

fn encode_request(request: &Request<'_>, out: &mut Vec<u8>) {
    match request {
        Request::Append { key, value } => put_strings(out, APPEND, &[key, value]),
        Request::Add { key, delta } => {
            put_strings(out, ADD, &[key]);
            out.extend_from_slice(&delta.to_le_bytes());
        }
        Request::Barrier { key, world } => {
            put_strings(out, BARRIER, &[key]);
            out.extend_from_slice(&world.to_le_bytes());
        }
        Request::Check { keys } => put_keys(out, CHECK, keys),
        Request::CompareSet { key, expected, desired } => {
            put_strings(out, COMPARE_SET, &[key, expected, desired]);
        }
        Request::Delete { key } => put_strings(out, DELETE_KEY, &[key]),
        Request::Get { key } => put_strings(out, GET, &[key]),
        Request::ListKeys => out.push(LIST_KEYS),
        Request::MultiGet { keys } => put_keys(out, MULTI_GET, keys),
        Request::MultiSet { pairs } => {
            put_fixed(out, MULTI_SET, &(pairs.len() as u64).to_le_bytes());
            for (key, value) in pairs {
                put_string(out, key);
                put_string(out, value);
            }
        }
        Request::NumKeys => out.push(NUM_KEYS),
        Request::QueueLen { key } => put_strings(out, QUEUE_LEN, &[key]),
        Request::QueuePop { key } => put_strings(out, QUEUE_POP, &[key]),
        Request::QueuePush { key, value } => put_strings(out, QUEUE_PUSH, &[key, value]),
        Request::Set { key, value } => put_strings(out, SET, &[key, value]),
        Request::Wait { keys } => put_keys(out, WAIT, keys),
    }
}

fn put_fixed(out: &mut Vec<u8>, opcode: u8, argument: &[u8]) {
    out.push(opcode);
    out.extend_from_slice(argument);
}

fn put_string(out: &mut Vec<u8>, string: &[u8]) {
    out.extend_from_slice(&(string.len() as u64).to_le_bytes());
    out.extend_from_slice(string);
}

fn put_strings(out: &mut Vec<u8>, opcode: u8, strings: &[&[u8]]) {
    out.push(opcode);
    strings.iter().for_each(|string| put_string(out, string));
}

fn put_keys(out: &mut Vec<u8>, opcode: u8, keys: &[Bytes<'_>]) {
    put_fixed(out, opcode, &(keys.len() as u64).to_le_bytes());
    keys.iter().for_each(|key| put_string(out, key));
}

// ── what a server writes ───────────────────────────────────────────────────────────────────────────────────

/// Where a server's replies go: short values are copied, long ones may be taken by reference.
pub trait ReplySink {
    /// Adds bytes, copied.
    fn bytes(&mut self, bytes: &[u8]);
    /// Adds a value with its length before it.
    fn value(&mut self, value: &Value);
    /// Several values, each with its length; may be encoded later.
    fn list(&mut self, values: Vec<Option<Value>>)
    where
        Self: Sized,
    {
        values.iter().for_each(|value| put_value(self, value.as_ref()));
    }
}

impl ReplySink for Vec<u8> {
    fn bytes(&mut self, bytes: &[u8]) {
        self.extend_from_slice(bytes);
    }
    fn value(&mut self, value: &Value) {
        self.extend_from_slice(value);
    }
}

/// Writes a reply.
#[inline]
pub fn encode_response(response: Response, out: &mut impl ReplySink) {
    match response {
        Response::Done => {}
        Response::Deleted(was_there) => out.bytes(&i64::from(was_there).to_le_bytes()),
        Response::Keys(keys) => {
            out.bytes(&(keys.len() as u64).to_le_bytes());
            out.list(keys.into_iter().map(Some).collect());
        }
        Response::Number(number) => out.bytes(&number.to_le_bytes()),
        Response::Popped(None) => out.bytes(&0_u64.to_le_bytes()),
        Response::Popped(Some((item, length))) => {
            out.bytes(&(length as u64).to_le_bytes());
            put_value(out, Some(&item));
        }
        Response::Present(all) => out.bytes(&[if all { READY } else { NOT_READY }]),
        Response::Ready => out.bytes(&[READY]),
        Response::Value(value) => put_value(out, value.as_ref()),
        Response::Values(values) => out.list(values),
    }
}

/// Writes the answer to a ping.
pub fn encode_pong(nonce: u32, out: &mut impl ReplySink) {
    out.bytes(&nonce.to_le_bytes());
}

/// Writes the answer to a cancelled wait.
pub fn encode_cancelled(out: &mut impl ReplySink) {
    out.bytes(&[CANCELLED]);
}

/// A missing key is an empty value on the wire, as in PyTorch's libuv server.
#[inline]
pub(crate) fn put_value(out: &mut impl ReplySink, value: Option<&Value>) {
    match value {
        None => out.bytes(&0_u64.to_le_bytes()),
        Some(value) => {
            out.bytes(&(value.len() as u64).to_le_bytes());
            out.value(value);
        }
    }
}

/// Bytes that [`put_value`] writes.
pub(crate) fn value_length(value: Option<&Value>) -> usize {
    size_of::<u64>() + value.map_or(0, |value| value.len())
}

// ── what a client reads ────────────────────────────────────────────────────────────────────────────────────

/// The longest value that a client accepts from a server. Values may grow by `append` beyond what one request
/// may carry, but a length of 1 TB is certainly wrong.
pub const REPLY_VALUE_MAX: u64 = 1 << 30;

/// The most keys that a client accepts from a server.
pub const REPLY_KEYS_MAX: i64 = 1 << 26;

/// Where a client's replies come from.
pub trait ReplySource {
    /// Fills `bytes`, or returns why it could not.
    fn fill(&mut self, bytes: &mut [u8]) -> Result<(), Fault>;
}

/// Reads the reply to a request of this kind; `count` is the number of values a `MultiGet` asked for.
pub fn decode_response(
    operation: Operation,
    count: usize,
    source: &mut impl ReplySource,
) -> Result<Response, Fault> {
    Ok(match operation {
        Operation::Append | Operation::MultiSet | Operation::QueuePush | Operation::Set => Response::Done,
        Operation::Add | Operation::NumKeys | Operation::QueueLen => Response::Number(read_number(source)?),
        Operation::Delete => Response::Deleted(read_number(source)? == 1),
        Operation::Check => match read_byte(source)? {
            READY => Response::Present(true),
            NOT_READY => Response::Present(false),
            other => return Err(unexpected("0 or 1", other)),
        },
        Operation::Barrier | Operation::Wait => match read_byte(source)? {
            READY => Response::Ready,
            other => return Err(unexpected("0", other)),
        },
        Operation::CompareSet | Operation::Get => Response::Value(Some(read_value(source)?)),
        Operation::MultiGet => {
            let mut values = Vec::with_capacity(count);
            for _ in 0..count {
                values.push(Some(read_value(source)?));
            }
            Response::Values(values)
        }
        Operation::ListKeys => {
            let count = read_number(source)?;
            if !(0..=REPLY_KEYS_MAX).contains(&count) {
                return Err(Fault::new(ErrorKind::Protocol, format!("the server announces {count} keys")));
            }
            let mut keys = Vec::new();
            for _ in 0..count {
                keys.push(read_value(source)?);
            }
            Response::Keys(keys)
        }
        Operation::QueuePop => match read_number(source)? {
            ..=0 => Response::Popped(None),
            length => {
                let length = usize::try_from(length).expect("positive");
                Response::Popped(Some((read_value(source)?, length)))
            }
        },
    })
}

/// What followed a `CancelWait`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cancelled {
    /// The wait ended without success.
    InTime,
    /// The wait's own answer crossed the cancel on the wire: it did succeed.
    TooLate,
}

/// Reads the answer to `CancelWait`.
pub fn decode_cancelled(source: &mut impl ReplySource) -> Result<Cancelled, Fault> {
    match read_byte(source)? {
        CANCELLED => Ok(Cancelled::InTime),
        READY => match read_byte(source)? {
            CANCELLED => Ok(Cancelled::TooLate),
            other => Err(unexpected("1", other)),
        },
        other => Err(unexpected("0 or 1", other)),
    }
}

/// Reads the answer to `Info`.
pub fn decode_info(source: &mut impl ReplySource) -> Result<Value, Fault> {
    read_value(source)
}

fn unexpected(expected: &str, got: u8) -> Fault {
    Fault::new(ErrorKind::Protocol, format!("the server answered {got}, expected {expected}"))
        .hint("check whether another program listens on that port")
}

fn read_byte(source: &mut impl ReplySource) -> Result<u8, Fault> {
    let mut byte = [0];
    source.fill(&mut byte)?;
    Ok(byte[0])
}

fn read_number(source: &mut impl ReplySource) -> Result<i64, Fault> {
    let mut bytes = [0; 8];
    source.fill(&mut bytes)?;
    Ok(i64::from_le_bytes(bytes))
}

fn read_value(source: &mut impl ReplySource) -> Result<Value, Fault> {
    const STEP: usize = 1 << 20; // memory follows the bytes that arrive, not the length announced
    let length = read_number(source)? as u64;
    if length > REPLY_VALUE_MAX {
        return Err(Fault::new(
            ErrorKind::Protocol,
            format!("the server announces a value of {length} bytes"),
        )
        .hint("check whether another program listens on that port"));
    }
    let length = length as usize;
    let mut value = vec![0; length.min(STEP)];
    source.fill(&mut value)?;
    while value.len() < length {
        let from = value.len();
        value.resize(length.min(from + STEP), 0);
        source.fill(&mut value[from..])?;
    }
    Ok(value.into())
}
