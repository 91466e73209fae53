//! What is said at the beginning of a connection, and on control streams, as values and as bytes.
//!
//! A connection opens with a [`Hello`] of fixed length: the caller, the intended receiver, and the purpose. Nothing
//! else of a stranger is read before the hello was found valid. Control streams then carry [`ControlFrame`]s, lines the
//! frames of `transport::line`. All numbers are little endian.
//!
//! What arrives is input: a length is checked against its limit before memory is taken, and a refusal says why. Decoding is
//! resumable: given too few bytes it says so, and is asked again with more.
//!
//! Not here: sockets (see `transport::line` and `network`), what the values mean.

use std::fmt;
#[cfg(test)]
use std::io::{self, Read};
#[cfg(test)]
use std::task::Poll;
use std::time::Duration;

use tenfold_memory::{FileIdentity, Head};

/// Must be raised with every change to the bytes described here, or to the frames of `transport::line`.
pub(crate) const VERSION: u16 = 8;

const MAGIC: [u8; 8] = *b"tenfold\n";

/// Two processes share messages out among at most so many lines, each between interfaces of its own.
pub(crate) const RAILS_MAX: usize = 8;

/// What tells a process's fabric from every other, on any host and at any time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct FabricId(pub u128);

impl fmt::Display for FabricId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl FabricId {
    pub(crate) fn mark(self) -> Mark {
        Mark(self.0 as u64)
    }
}

/// Half of a [`FabricId`]: enough to recognise a process, and too little to be let in by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Mark(pub u64);

/// A process that another one sees, and how long ago it was last seen to be alive. Durations travel, because no two hosts
/// have the same clock.
pub(crate) type Seen = (Mark, Duration);

/// What a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Signs of life and notices, in both directions.
    Control,
    /// Messages of all groups that both processes are in, from the caller to the receiver. Nothing flows back. Two processes
    /// have one for each of their rails.
    Line { rail: u8 },
    /// Asks whether the receiver responds. It answers with the same, and both close the connection.
    Probe,
}

/// The first bytes on a connection, from the side that opened it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hello {
    pub purpose: Purpose,
    pub sender: FabricId,
    /// The fabric that the sender means to reach: ports are reused, and another job may listen on this one by now.
    pub receiver: FabricId,
}

impl Hello {
    pub(crate) const LEN: usize = 64;

    pub(crate) fn encode(&self) -> [u8; Hello::LEN] {
        let purpose = match self.purpose {
            Purpose::Control => [0, 0],
            Purpose::Line { rail } => [1, rail],
            Purpose::Probe => [2, 0],
        };
        let mut bytes = [0; Hello::LEN];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..10].copy_from_slice(&VERSION.to_le_bytes());
        bytes[10..12].copy_from_slice(&purpose); // 12..32 stay zero
        bytes[32..48].copy_from_slice(&self.sender.0.to_le_bytes());
        bytes[48..].copy_from_slice(&self.receiver.0.to_le_bytes());
        bytes
    }

    /// Reads a hello said to `me`. Nothing if `buffer` does not hold all of it; what cannot become one is refused as soon
    /// as that is clear.
    pub(crate) fn decode(buffer: &[u8], me: FabricId) -> Result<Option<Hello>, Refused> {
        let known = buffer.len().min(MAGIC.len());
        if buffer[..known] != MAGIC[..known] {
            return Err(Refused::Stranger { began_with: buffer[..known].to_vec() });
        }
        if buffer.len() >= 10 {
            let version = u16::from_le_bytes(array(buffer, 8));
            if version != VERSION {
                return Err(Refused::Version { theirs: version });
            }
        }
        if buffer.len() < Hello::LEN {
            return Ok(None);
        }
        let receiver = FabricId(u128::from_le_bytes(array(buffer, 48)));
        if receiver != me {
            return Err(Refused::Receiver { meant: receiver });
        }
        let is_zero = buffer[12..32].iter().all(|byte| *byte == 0);
        let purpose = match (buffer[10], buffer[11]) {
            (0, 0) if is_zero => Purpose::Control,
            (1, rail) if is_zero && usize::from(rail) < RAILS_MAX => Purpose::Line { rail },
            (2, 0) if is_zero => Purpose::Probe,
            (purpose, _) => return Err(Refused::Purpose { purpose }),
        };
        Ok(Some(Hello { purpose, sender: FabricId(u128::from_le_bytes(array(buffer, 32))), receiver }))
    }
}

/// Reads a hello from a non-blocking stream, and not a byte more; for tests of links without a fabric.
#[cfg(test)]
#[derive(Debug)]
pub(crate) struct HelloReader {
    bytes: [u8; Hello::LEN],
    len: usize,
}

#[cfg(test)]
impl HelloReader {
    pub(crate) fn new() -> Self {
        HelloReader { bytes: [0; Hello::LEN], len: 0 }
    }

    /// A [`Refused`] comes as [`io::ErrorKind::InvalidData`].
    pub(crate) fn poll(&mut self, mut stream: impl Read, me: FabricId) -> io::Result<Poll<Hello>> {
        loop {
            match stream.read(&mut self.bytes[self.len..]) {
                Ok(0) => {
                    return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "closed before it said hello"));
                }
                Ok(count) => self.len += count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(Poll::Pending),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            }
            match Hello::decode(&self.bytes[..self.len], me) {
                Ok(None) => {}
                Ok(Some(hello)) => return Ok(Poll::Ready(hello)),
                Err(refused) => return Err(io::Error::new(io::ErrorKind::InvalidData, refused)),
            }
        }
    }
}

/// What a process says about itself and its groups, beside their messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ControlFrame {
    /// What the sender does in each group: the answer to `Want`.
    Pulse { groups: Vec<GroupPulse> },
    /// The sender wants to know what the receiver does, because it waits for the receiver.
    Want,
    /// Asks whether the receiver is alive. With the ranks that the sender sees on its host; between hosts only.
    Ask { company: Vec<Seen> },
    /// The answer to that.
    Beat { company: Vec<Seen> },
    /// Between ranks of one host: processes on other hosts that the sender hears as long as its pulse moves, unless it says
    /// otherwise. They replace all that it named before, or are further ones.
    Hears { afresh: bool, marks: Vec<Mark> },
    /// Between ranks of one host: processes that the sender no longer listens to, or no longer hears.
    Misses { seen: Vec<Seen> },
    /// Why the sender gave up on a group, in its words; they are a stranger's, to be shown and nothing else.
    Notice { group: u64, text: Vec<u8> },
    /// One rank of a group to another, about what they agree on: see `recovery::message`.
    Letter { group: u64, text: Vec<u8> },
    /// One process to another, about becoming a group: see `recovery::reshape`.
    Reshape { id: u64, text: Vec<u8> },
    /// The sender's room for what the agreement of this number made of the group.
    Room { group: u64, sequence: u32, offset: u64 },
    /// The sender will point into a file, from `offset` on, once the receiver has mapped its first `len` bytes. The
    /// descriptor travels with the frame; `file` says which file it is, so that no two are ever mixed up.
    Region { offset: u64, len: u64, file: FileIdentity },
    /// The answer to that: why the receiver could not, in its words; no words mean that it could.
    Mapped { offset: u64, refusal: Vec<u8> },
    /// The sender will point there no more.
    Retired { offset: u64 },
    /// The sender closes on purpose: the end of the stream is not a failure.
    Goodbye,
}

/// What the sender of a pulse does in one group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GroupPulse {
    pub group: u64,
    /// The operation under way, or the last one.
    pub current: Head,
    /// The one that finished last.
    pub finished: Head,
    /// How long ago the current one was begun, and the one before it, in nanoseconds: no two hosts have the same clock.
    pub ages: [u64; 2],
}

const PULSE: u8 = 1;
const NOTICE: u8 = 2;
const GOODBYE: u8 = 3;
const REGION: u8 = 4;
const MAPPED: u8 = 5;
const RETIRED: u8 = 6;
const WANT: u8 = 7;
const ASK: u8 = 8;
const BEAT: u8 = 9;
const HEARS: u8 = 10;
const HEARS_TOO: u8 = 11;
const MISSES: u8 = 12;
const LETTER: u8 = 13;
const ROOM: u8 = 14;
const RESHAPE: u8 = 15;

impl ControlFrame {
    /// Kind and length.
    const HEADER: usize = 5;

    /// What a pulse says about one group.
    const GROUP: usize = 9 * 8;

    /// A mark, and with a time in milliseconds.
    const MARK: usize = 8;
    const SEEN: usize = Self::MARK + 4;

    /// What may follow a header.
    pub(crate) const BODY_MAX: usize = 64 << 10;

    /// The longest text of a notice.
    pub(crate) const TEXT_MAX: usize = Self::BODY_MAX - 8;

    /// No frame is longer: a buffer of this size always holds a whole one.
    pub(crate) const LEN_MAX: usize = Self::HEADER + Self::BODY_MAX;

    /// Appends the frame to `out`. A list that is longer than one frame holds becomes several frames, except a company, which
    /// is cut, as is a text.
    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        match self {
            ControlFrame::Pulse { groups } if groups.is_empty() => put_header(out, PULSE, 0),
            ControlFrame::Pulse { groups } => {
                for groups in groups.chunks(Self::BODY_MAX / Self::GROUP) {
                    put_header(out, PULSE, groups.len() * Self::GROUP);
                    for GroupPulse { group, current, finished, ages } in groups {
                        let words = [group].into_iter().chain(current).chain(finished).chain(ages);
                        words.for_each(|word| out.extend(word.to_le_bytes()));
                    }
                }
            }
            ControlFrame::Notice { group: number, text } => put_text(out, NOTICE, *number, text),
            ControlFrame::Letter { group, text } => put_text(out, LETTER, *group, text),
            ControlFrame::Reshape { id, text } => put_text(out, RESHAPE, *id, text),
            ControlFrame::Room { group, sequence, offset } => {
                put_header(out, ROOM, 3 * 8);
                [*group, u64::from(*sequence), *offset]
                    .iter()
                    .for_each(|word| out.extend(word.to_le_bytes()));
            }
            ControlFrame::Mapped { offset: number, refusal } => put_text(out, MAPPED, *number, refusal),
            ControlFrame::Region { offset, len, file } => {
                put_header(out, REGION, 4 * 8);
                [*offset, *len, file.device, file.inode]
                    .iter()
                    .for_each(|word| out.extend(word.to_le_bytes()));
            }
            ControlFrame::Retired { offset } => {
                put_header(out, RETIRED, 8);
                out.extend(offset.to_le_bytes());
            }
            ControlFrame::Goodbye => put_header(out, GOODBYE, 0),
            ControlFrame::Want => put_header(out, WANT, 0),
            ControlFrame::Ask { company } => put_seen(out, ASK, first(company, Self::BODY_MAX / Self::SEEN)),
            ControlFrame::Beat { company } => {
                put_seen(out, BEAT, first(company, Self::BODY_MAX / Self::SEEN));
            }
            ControlFrame::Misses { seen } if seen.is_empty() => put_header(out, MISSES, 0),
            ControlFrame::Misses { seen } => {
                seen.chunks(Self::BODY_MAX / Self::SEEN).for_each(|seen| put_seen(out, MISSES, seen));
            }
            ControlFrame::Hears { afresh, marks } => {
                let (now, later) = marks.split_at(marks.len().min(Self::BODY_MAX / Self::MARK));
                put_marks(out, if *afresh { HEARS } else { HEARS_TOO }, now);
                later.chunks(Self::BODY_MAX / Self::MARK).for_each(|marks| put_marks(out, HEARS_TOO, marks));
            }
        }
    }

    /// The frame at the beginning of `buffer`, and its length there. Nothing if it is not whole.
    pub(crate) fn decode(buffer: &[u8]) -> Result<Option<(ControlFrame, usize)>, Refused> {
        let Some((&kind, rest)) = buffer.split_first() else { return Ok(None) };
        if !(PULSE..=RESHAPE).contains(&kind) {
            return Err(Refused::Kind { kind });
        }
        let Some((len, rest)) = rest.split_first_chunk() else { return Ok(None) };
        let len = u32::from_le_bytes(*len) as usize;
        let fits = match kind {
            PULSE => len.is_multiple_of(Self::GROUP),
            NOTICE | MAPPED | LETTER | RESHAPE => len >= 8,
            ROOM => len == 3 * 8,
            REGION => len == 4 * 8,
            RETIRED => len == 8,
            ASK | BEAT | MISSES => len.is_multiple_of(Self::SEEN),
            HEARS | HEARS_TOO => len.is_multiple_of(Self::MARK),
            _ => len == 0,
        };
        if !fits || len > Self::BODY_MAX {
            return Err(Refused::Length { kind, len });
        }
        let Some(body) = rest.get(..len) else { return Ok(None) };
        let frame = match kind {
            PULSE => {
                ControlFrame::Pulse { groups: body.chunks_exact(Self::GROUP).map(group_pulse).collect() }
            }
            NOTICE => ControlFrame::Notice { group: word(body, 0), text: body[8..].to_vec() },
            LETTER => ControlFrame::Letter { group: word(body, 0), text: body[8..].to_vec() },
            RESHAPE => ControlFrame::Reshape { id: word(body, 0), text: body[8..].to_vec() },
            ROOM => match u32::try_from(word(body, 1)) {
                Ok(sequence) => ControlFrame::Room { group: word(body, 0), sequence, offset: word(body, 2) },
                Err(_) => return Err(Refused::Length { kind, len }),
            },
            REGION => {
                let file = FileIdentity { device: word(body, 2), inode: word(body, 3) };
                ControlFrame::Region { offset: word(body, 0), len: word(body, 1), file }
            }
            MAPPED => ControlFrame::Mapped { offset: word(body, 0), refusal: body[8..].to_vec() },
            RETIRED => ControlFrame::Retired { offset: word(body, 0) },
            WANT => ControlFrame::Want,
            ASK => ControlFrame::Ask { company: seen(body) },
            BEAT => ControlFrame::Beat { company: seen(body) },
            MISSES => ControlFrame::Misses { seen: seen(body) },
            HEARS | HEARS_TOO => {
                let marks = body.chunks_exact(Self::MARK).map(|mark| Mark(word(mark, 0)));
                ControlFrame::Hears { afresh: kind == HEARS, marks: marks.collect() }
            }
            _ => ControlFrame::Goodbye,
        };
        Ok(Some((frame, Self::HEADER + len)))
    }
}

fn group_pulse(bytes: &[u8]) -> GroupPulse {
    let word = |at: usize| word(bytes, at);
    GroupPulse {
        group: word(0),
        current: [1, 2, 3].map(word),
        finished: [4, 5, 6].map(word),
        ages: [7, 8].map(word),
    }
}

fn seen(bytes: &[u8]) -> Vec<Seen> {
    let one = |bytes: &[u8]| {
        let age = u32::from_le_bytes(array(bytes, ControlFrame::MARK));
        (Mark(word(bytes, 0)), Duration::from_millis(age.into()))
    };
    bytes.chunks_exact(ControlFrame::SEEN).map(one).collect()
}

fn first<T>(list: &[T], count: usize) -> &[T] {
    &list[..list.len().min(count)]
}

fn put_seen(out: &mut Vec<u8>, kind: u8, seen: &[Seen]) {
    put_header(out, kind, seen.len() * ControlFrame::SEEN);
    for (mark, age) in seen {
        out.extend(mark.0.to_le_bytes());
        out.extend(u32::try_from(age.as_millis()).unwrap_or(u32::MAX).to_le_bytes());
    }
}

fn put_marks(out: &mut Vec<u8>, kind: u8, marks: &[Mark]) {
    put_header(out, kind, marks.len() * ControlFrame::MARK);
    marks.iter().for_each(|mark| out.extend(mark.0.to_le_bytes()));
}

/// The number in the `at`th eight bytes.
fn word(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(array(bytes, 8 * at))
}

fn put_text(out: &mut Vec<u8>, kind: u8, number: u64, text: &[u8]) {
    let text = &text[..text.len().min(ControlFrame::TEXT_MAX)];
    put_header(out, kind, 8 + text.len());
    out.extend(number.to_le_bytes());
    out.extend(text);
}

fn put_header(out: &mut Vec<u8>, kind: u8, len: usize) {
    out.push(kind);
    out.extend((len as u32).to_le_bytes());
}

/// The `N` bytes from `at`, of which the caller knows that they are there.
fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    bytes[at..at + N].try_into().expect("N bytes were taken")
}

/// Why what a peer said is not listened to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    /// It does not speak this protocol at all.
    Stranger {
        began_with: Vec<u8>,
    },
    Version {
        theirs: u16,
    },
    /// The caller wants another fabric.
    Receiver {
        meant: FabricId,
    },
    Purpose {
        purpose: u8,
    },
    Kind {
        kind: u8,
    },
    Length {
        kind: u8,
        len: usize,
    },
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refused::Stranger { began_with } => {
                write!(f, "it is not a tenfold process: it began with `{}`", began_with.escape_ascii())
            }
            Refused::Version { theirs } => {
                write!(f, "it speaks version {theirs} of the protocol and this process version {VERSION}")
            }
            Refused::Receiver { meant } => {
                write!(f, "it meant to reach process {meant}, which listened on this port before")
            }
            Refused::Purpose { purpose } => write!(f, "its hello names no purpose known here ({purpose})"),
            Refused::Kind { kind } => write!(f, "it sent a control frame of unknown kind {kind}"),
            Refused::Length { kind, len } => {
                write!(f, "it announced a control frame of kind {kind} with {len} bytes, which none has")
            }
        }
    }
}

impl std::error::Error for Refused {}

#[cfg(test)]
mod tests;
