//! Tenfold's extension of the protocol: many clients on one connection, and requests that survive it.
//!
//! A session is a pair of numbered streams that outlives its connection. The client numbers its requests 1, 2,
//! 3 …; the server executes them in that order and sends answers, each with the number of its request, in any
//! order. Each side tells the other how much it has received: the server by answering and in [`Welcome`], the
//! client by [`Command::Acknowledge`] and in [`Hello`]. After a lost connection each side sends again what the
//! other has not received, so every request is executed once and every answer arrives once.
//!
//! A wait gets two answers: [`Status::Parked`] when the server has registered it, and later that it is ready.
//! The number of a wait also names it in later requests.
//!
//! `docs/store-wire.md` has the bytes. Not here: what the server keeps (`sessions`).

use std::borrow::Cow;

use super::{
    Command, Cursor, Decoded, MessageLimits, ReplySink, Scan, Stop, encode_request, encode_response,
};
use super::{Malformed, value_length};
use crate::request::{Bytes, Request, Response};
use crate::value::Value;

pub(super) const SESSION: u8 = 0x82;
pub(super) const NUMBERED: u8 = 0x83;
pub(super) const ACKNOWLEDGE: u8 = 0x84;
pub(super) const BYE: u8 = 0x85;

/// The version of the extension that this code speaks.
pub const VERSION: u16 = 1;

/// Opens or resumes a session; the first message after the handshake of the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// The version that the client speaks.
    pub version: u16,
    /// Reserved: clients send 0, servers ignore what they do not know.
    pub flags: u16,
    /// Names the session: 128 random bits.
    pub token: [u8; 16],
    /// How many answers of this session the client has received.
    pub answers: u64,
}

/// The answer to [`Hello`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Welcome {
    /// The version that the server speaks. If it differs from the client's, the server closes the connection.
    pub version: u16,
    /// [`Welcome::RESUMED`]: the server has kept this session.
    pub flags: u16,
    /// Names the state that the server holds: another number means that the keys are lost.
    pub store: u128,
    /// How many requests of this session the server has executed.
    pub requests: u64,
    /// How long the server keeps a session without a connection, in milliseconds.
    pub kept_for: u64,
    /// The server's limits: a longer request would cost the connection, again and again.
    pub limits: MessageLimits,
}

impl Welcome {
    /// The session existed.
    pub const RESUMED: u16 = 1;
    /// Bytes after version and length.
    const LENGTH: usize = 2 + 16 + 8 + 8 + 4 * 8;

    /// Bytes of version and length, which come first.
    pub const HEAD: usize = 4;

    /// Reads version and length; the length is that of what follows.
    pub fn decode_head(bytes: [u8; Self::HEAD]) -> (u16, usize) {
        let [a, b, c, d] = bytes;
        (u16::from_le_bytes([a, b]), usize::from(u16::from_le_bytes([c, d])))
    }

    /// Reads what follows the head; nothing if it is too short. More bytes are of later versions.
    pub fn decode(version: u16, bytes: &[u8]) -> Option<Welcome> {
        let limits = MessageLimits::default();
        let mut cursor = Cursor { bytes, at: 0, limits: &limits };
        let mut read = || -> Result<Welcome, Stop> {
            Ok(Welcome {
                version,
                flags: u16::from_le_bytes(cursor.fixed()?),
                store: u128::from_le_bytes(cursor.fixed()?),
                requests: cursor.length()?,
                kept_for: cursor.length()?,
                limits: MessageLimits {
                    key: as_size(cursor.length()?),
                    value: as_size(cursor.length()?),
                    keys: as_size(cursor.length()?),
                    request: as_size(cursor.length()?),
                },
            })
        };
        read().ok()
    }

    /// Writes it.
    pub fn encode(&self, out: &mut impl ReplySink) {
        out.bytes(&self.version.to_le_bytes());
        out.bytes(&(Self::LENGTH as u16).to_le_bytes());
        out.bytes(&self.flags.to_le_bytes());
        out.bytes(&self.store.to_le_bytes());
        let limits = &self.limits;
        let sizes = [limits.key, limits.value, limits.keys, limits.request].map(|size| size as u64);
        for number in [self.requests, self.kept_for].into_iter().chain(sizes) {
            out.bytes(&number.to_le_bytes());
        }
    }
}

fn as_size(length: u64) -> usize {
    usize::try_from(length).unwrap_or(usize::MAX)
}

/// What a numbered request asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ask<'a> {
    /// A request of any client.
    Call(Request<'a>),
    /// A request of the client to which the item of this promise is reserved: it may be for the item.
    CallAfter(u64, Request<'a>),
    /// A wait for the same keys as an earlier one that may still be pending.
    Join(u64, Vec<Bytes<'a>>),
    /// Several arrivals at a barrier.
    Arrive {
        /// How many.
        count: u64,
        /// The barrier.
        key: Bytes<'a>,
        /// How many have to arrive.
        world: i64,
    },
    /// No client waits in the wait of this number any more, or needs the item of this promise. Not answered.
    Leave(u64),
    /// The server's facts.
    Info,
}

const CALL: u8 = 0;
const CALL_AFTER: u8 = 1;
const JOIN: u8 = 2;
const ARRIVE: u8 = 3;
const LEAVE: u8 = 4;
const INFO: u8 = 5;

/// Bytes before the hello's own: opcode, version, length.
const HELLO_HEAD: usize = 5;
const HELLO_LENGTH: usize = 2 + 16 + 8;
/// A hello of a later version may be longer, but not by much.
const HELLO_LENGTH_MAX: usize = 4 << 10;

/// Decodes a message of this extension.
#[cold]
pub(super) fn decode<'a>(
    bytes: &'a [u8],
    limits: &MessageLimits,
    scan: &mut Scan,
) -> Result<Decoded<'a>, Malformed> {
    let mut cursor = Cursor { bytes, at: 1, limits };
    let mut read = || -> Result<Decoded<'a>, Stop> {
        let command = match bytes[0] {
            SESSION => {
                let version = u16::from_le_bytes(cursor.fixed()?);
                let length = usize::from(u16::from_le_bytes(cursor.fixed()?));
                if !(HELLO_LENGTH..=HELLO_LENGTH_MAX).contains(&length) {
                    return Err(Malformed::Hello(length).into());
                }
                let flags = u16::from_le_bytes(cursor.fixed()?);
                let hello = Hello { version, flags, token: cursor.fixed()?, answers: cursor.length()? };
                cursor.take(HELLO_HEAD + length - cursor.at)?;
                Command::Session(hello)
            }
            NUMBERED => return numbered(&mut cursor, scan),
            ACKNOWLEDGE => Command::Acknowledge { answers: cursor.length()? },
            _ => Command::Bye,
        };
        Ok(Decoded::Whole(command, cursor.at))
    };
    match read() {
        Ok(decoded) => Ok(decoded),
        Err(Stop::Malformed(malformed)) => Err(malformed),
        Err(Stop::Short { needs }) => Ok(Decoded::Needs(needs)),
        Err(Stop::ShortList { .. }) => unreachable!("lists are read by the inner decoding"),
    }
}

fn numbered<'a>(cursor: &mut Cursor<'a, '_>, scan: &mut Scan) -> Result<Decoded<'a>, Stop> {
    let number = cursor.length()?;
    let [kind] = cursor.fixed()?;
    let argument = if matches!(kind, CALL_AFTER..=LEAVE) { cursor.length()? } else { 0 };
    match kind {
        LEAVE => {
            return Ok(Decoded::Whole(Command::Numbered { number, ask: Ask::Leave(argument) }, cursor.at));
        }
        INFO => return Ok(Decoded::Whole(Command::Numbered { number, ask: Ask::Info }, cursor.at)),
        CALL..=ARRIVE => {}
        unknown => return Err(Malformed::Opcode(unknown).into()),
    }
    let from = cursor.at;
    let Some(&opcode) = cursor.bytes.get(from) else { return Err(Stop::Short { needs: from + 1 }) };
    let (request, length) = match super::decode_plain(&cursor.bytes[from..], cursor.limits, scan)? {
        Decoded::Whole(Command::Call(request), length) => (request, length),
        Decoded::Whole(..) => return Err(Malformed::Opcode(opcode).into()),
        Decoded::Needs(needs) => return Err(Stop::Short { needs: from + needs }),
    };
    let ask = match (kind, request) {
        (CALL, request) => Ask::Call(request),
        (CALL_AFTER, request) => Ask::CallAfter(argument, request),
        (JOIN, Request::Wait { keys }) => Ask::Join(argument, keys),
        (ARRIVE, Request::Barrier { key, world }) => Ask::Arrive { count: argument, key, world },
        _ => return Err(Malformed::Opcode(opcode).into()),
    };
    Ok(Decoded::Whole(Command::Numbered { number, ask }, from + length))
}

/// Appends the bytes of a numbered request.
pub fn encode_numbered(number: u64, ask: &Ask<'_>, out: &mut Vec<u8>) {
    let mut head = |kind: u8, argument: Option<u64>| {
        out.push(NUMBERED);
        out.extend_from_slice(&number.to_le_bytes());
        out.push(kind);
        if let Some(argument) = argument {
            out.extend_from_slice(&argument.to_le_bytes());
        }
    };
    match ask {
        Ask::Call(request) => {
            head(CALL, None);
            encode_request(request, out);
        }
        Ask::CallAfter(wait, request) => {
            head(CALL_AFTER, Some(*wait));
            encode_request(request, out);
        }
        Ask::Join(wait, keys) => {
            head(JOIN, Some(*wait));
            super::put_keys(out, super::WAIT, keys);
        }
        Ask::Arrive { count, key, world } => {
            head(ARRIVE, Some(*count));
            encode_request(&Request::Barrier { key: Cow::Borrowed(key), world: *world }, out);
        }
        Ask::Leave(wait) => head(LEAVE, Some(*wait)),
        Ask::Info => head(INFO, None),
    }
}

/// Where the opcode of a numbered request is, at most.
pub(crate) const POP_AT_MAX: usize = 1 + 8 + 1 + 8;

/// If these bytes begin with the numbered QUEUE_POP of this number: makes a QUEUE_LEN of it, and returns which
/// byte is now different. QUEUE_LEN has the same arguments and changes nothing.
pub(crate) fn blunt_pop(bytes: &mut [u8], number: u64) -> Option<usize> {
    let is_head = bytes.first() == Some(&NUMBERED) && bytes.get(1..9) == Some(&number.to_le_bytes());
    let at = match *bytes.get(9).filter(|_| is_head)? {
        CALL => 10,
        CALL_AFTER => POP_AT_MAX,
        _ => return None,
    };
    let opcode = bytes.get_mut(at).filter(|opcode| **opcode == super::QUEUE_POP)?;
    *opcode = super::QUEUE_LEN;
    Some(at)
}

pub(super) fn encode_hello(hello: &Hello, out: &mut Vec<u8>) {
    out.push(SESSION);
    out.extend_from_slice(&hello.version.to_le_bytes());
    out.extend_from_slice(&(HELLO_LENGTH as u16).to_le_bytes());
    out.extend_from_slice(&hello.flags.to_le_bytes());
    out.extend_from_slice(&hello.token);
    out.extend_from_slice(&hello.answers.to_le_bytes());
}

/// What an answer says about its request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// Executed; the reply follows as the plain protocol has it.
    Done,
    /// A wait is registered and will be answered again.
    Parked,
    /// A [`Ask::Join`] is part of the earlier wait and is answered with that one.
    Joined,
    /// A push wakes one client of the wait, which goes on. The number of the promise follows: the item is
    /// reserved for that client.
    One,
    /// Not executed; the reason follows as text.
    Refused,
}

impl Status {
    fn from_byte(byte: u8) -> Option<Status> {
        [Status::Done, Status::Parked, Status::Joined, Status::One, Status::Refused]
            .into_iter()
            .find(|status| *status as u8 == byte)
    }
}

/// An answer to a numbered request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The number of the request.
    pub number: u64,
    /// What became of it.
    pub status: Status,
    /// The reply, or the reason.
    pub body: Body,
}

/// What follows the status.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Body {
    /// Nothing.
    Empty,
    /// A reply.
    Reply(Response),
    /// Text.
    Text(Value),
}

impl Answer {
    /// Bytes before the body.
    pub const HEAD: usize = 8 + 1 + 8;

    /// Bytes of the body.
    pub fn length(&self) -> usize {
        match &self.body {
            Body::Empty => 0,
            Body::Reply(response) => response_length(response),
            Body::Text(text) => text.len(),
        }
    }

    /// Writes it.
    pub fn encode(&self, out: &mut impl ReplySink) {
        let mut head = [0; Self::HEAD];
        head[..8].copy_from_slice(&self.number.to_le_bytes());
        head[8] = self.status as u8;
        head[9..].copy_from_slice(&(self.length() as u64).to_le_bytes());
        out.bytes(&head);
        match &self.body {
            Body::Empty => {}
            Body::Reply(response) => encode_response(response.clone(), out),
            Body::Text(text) => out.bytes(text),
        }
    }

    /// Reads number, status and the length of the body; nothing if the status is unknown.
    pub fn decode_head(bytes: &[u8; Self::HEAD]) -> Option<(u64, Status, u64)> {
        let number = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        Some((number(0), Status::from_byte(bytes[8])?, number(9)))
    }
}

/// Bytes that [`encode_response`] writes.
fn response_length(response: &Response) -> usize {
    let list =
        |values: &[Option<Value>]| -> usize { values.iter().map(|value| value_length(value.as_ref())).sum() };
    match response {
        Response::Done => 0,
        Response::Deleted(_) | Response::Number(_) | Response::Popped(None) => 8,
        Response::Keys(keys) => 8 + keys.iter().map(|key| value_length(Some(key))).sum::<usize>(),
        Response::Popped(Some((item, _))) => 8 + value_length(Some(item)),
        Response::Present(_) | Response::Ready => 1,
        Response::Value(value) => value_length(value.as_ref()),
        Response::Values(values) => list(values),
    }
}
