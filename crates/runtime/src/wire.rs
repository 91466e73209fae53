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

use tenfold_memory::{FileIdentity, Head};

/// Must be raised with every change to the bytes described here, or to the frames of `transport::line`.
pub(crate) const VERSION: u16 = 5;

const MAGIC: [u8; 8] = *b"tenfold\n";

/// What tells a process's fabric from every other, on any host and at any time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct FabricId(pub u128);

impl fmt::Display for FabricId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// What a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Signs of life and notices, in both directions.
    Control,
    /// Messages of all groups that both processes are in, from the caller to the receiver. Nothing flows back.
    Line,
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
            Purpose::Control => 0,
            Purpose::Line => 1,
            Purpose::Probe => 2,
        };
        let mut bytes = [0; Hello::LEN];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..10].copy_from_slice(&VERSION.to_le_bytes());
        bytes[10] = purpose; // 11..32 stay zero
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
        let is_zero = buffer[11..32].iter().all(|byte| *byte == 0);
        let purpose = match buffer[10] {
            0 if is_zero => Purpose::Control,
            1 if is_zero => Purpose::Line,
            2 if is_zero => Purpose::Probe,
            purpose => return Err(Refused::Purpose { purpose }),
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
    /// A sign of life, with what the sender does in each group.
    Pulse { groups: Vec<GroupPulse> },
    /// Why the sender gave up on a group, in its words; they are a stranger's, to be shown and nothing else.
    Notice { group: u64, text: Vec<u8> },
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

impl ControlFrame {
    /// Kind and length.
    const HEADER: usize = 5;

    /// What a pulse says about one group.
    const GROUP: usize = 9 * 8;

    /// What may follow a header.
    pub(crate) const BODY_MAX: usize = 64 << 10;

    /// The longest text of a notice.
    pub(crate) const TEXT_MAX: usize = Self::BODY_MAX - 8;

    /// No frame is longer: a buffer of this size always holds a whole one.
    pub(crate) const LEN_MAX: usize = Self::HEADER + Self::BODY_MAX;

    /// Appends the frame to `out`. A pulse of more groups than one frame holds becomes several; a text is cut to what one
    /// holds.
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
        }
    }

    /// The frame at the beginning of `buffer`, and its length there. Nothing if it is not whole.
    pub(crate) fn decode(buffer: &[u8]) -> Result<Option<(ControlFrame, usize)>, Refused> {
        let Some((&kind, rest)) = buffer.split_first() else { return Ok(None) };
        if !(PULSE..=RETIRED).contains(&kind) {
            return Err(Refused::Kind { kind });
        }
        let Some((len, rest)) = rest.split_first_chunk() else { return Ok(None) };
        let len = u32::from_le_bytes(*len) as usize;
        let fits = match kind {
            PULSE => len.is_multiple_of(Self::GROUP),
            NOTICE | MAPPED => len >= 8,
            REGION => len == 4 * 8,
            RETIRED => len == 8,
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
            REGION => {
                let file = FileIdentity { device: word(body, 2), inode: word(body, 3) };
                ControlFrame::Region { offset: word(body, 0), len: word(body, 1), file }
            }
            MAPPED => ControlFrame::Mapped { offset: word(body, 0), refusal: body[8..].to_vec() },
            RETIRED => ControlFrame::Retired { offset: word(body, 0) },
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
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ME: FabricId = FabricId(0x1234_5678_9abc_def0_1122_3344_5566_7788);

    fn hello() -> Hello {
        Hello { purpose: Purpose::Line, sender: FabricId(99), receiver: ME }
    }

    #[test]
    fn a_hello_is_read_once_it_is_whole_and_not_a_byte_further() {
        let control = Hello { purpose: Purpose::Control, ..hello() };
        let probe = Hello { purpose: Purpose::Probe, ..hello() };
        for hello in [hello(), control, probe] {
            let bytes = hello.encode();
            for len in 0..bytes.len() {
                assert_eq!(Hello::decode(&bytes[..len], ME), Ok(None));
            }
            assert_eq!(Hello::decode(&bytes, ME), Ok(Some(hello)));
            let mut stream = &[&bytes[..], b"what follows"].concat()[..];
            let read = HelloReader::new().poll(&mut stream, ME).expect("it is right");
            assert_eq!(read, Poll::Ready(hello));
            assert_eq!(stream, b"what follows");
        }
    }

    #[test]
    fn whoever_says_something_else_is_told_what_was_wrong() {
        let refusal = |bytes: &[u8]| Hello::decode(bytes, ME).expect_err("it is wrong").to_string();
        assert_eq!(refusal(b"GET / HTTP/1.1\r\n"), "it is not a tenfold process: it began with `GET / HT`");
        assert_eq!(
            refusal(b"t\0"),
            "it is not a tenfold process: it began with `t\\x00`",
            "known before it is whole"
        );
        let changed = |at: usize, to: u8| {
            let mut bytes = hello().encode();
            bytes[at] = to;
            bytes
        };
        assert_eq!(
            refusal(&changed(8, 1)[..10]),
            "it speaks version 1 of the protocol and this process version 5"
        );
        assert_eq!(
            refusal(&changed(63, 0)),
            "it meant to reach process 003456789abcdef01122334455667788, which listened on this port before"
        );
        assert_eq!(refusal(&changed(10, 9)), "its hello names no purpose known here (9)");
        assert_eq!(
            refusal(&changed(21, 1)),
            "its hello names no purpose known here (1)",
            "what must be zero"
        );
    }

    #[test]
    fn a_caller_that_closes_without_a_hello_is_no_surprise() {
        let mut reader = HelloReader::new();
        let error = reader.poll(&hello().encode()[..20], ME).expect_err("it ended");
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
        assert_eq!(error.to_string(), "closed before it said hello");
    }

    #[test]
    fn lengths_are_refused_before_anything_of_them_has_arrived() {
        let header = |kind: u8, len: u32| [&[kind][..], &len.to_le_bytes()].concat();
        for (kind, len) in [
            (PULSE, 71),
            (PULSE, 72 * 911),
            (NOTICE, 7),
            (NOTICE, 65537),
            (GOODBYE, 1),
            (REGION, 31),
            (REGION, 40),
            (MAPPED, 7),
            (MAPPED, 65537),
            (RETIRED, 0),
            (RETIRED, 16),
        ] {
            let refused = ControlFrame::decode(&header(kind, len)).expect_err("no frame is like that");
            assert_eq!(refused, Refused::Length { kind, len: len as usize });
        }
        for (kind, len) in [(PULSE, 72 * 910), (NOTICE, 65536), (MAPPED, 65536)] {
            assert_eq!(ControlFrame::decode(&header(kind, len)), Ok(None), "the longest there are");
        }
        for kind in [0, 7] {
            assert_eq!(ControlFrame::decode(&[kind]), Err(Refused::Kind { kind }));
        }
    }

    #[test]
    fn what_does_not_fit_one_frame_is_split_or_cut() {
        let pulse = |group| GroupPulse { group, current: [group; 3], finished: [1; 3], ages: [2, 3] };
        let groups: Vec<_> = (0..3000).map(pulse).collect();
        let mut bytes = Vec::new();
        ControlFrame::Pulse { groups: groups.clone() }.encode(&mut bytes);
        ControlFrame::Notice { group: 5, text: vec![b'x'; 100_000] }.encode(&mut bytes);
        let (mut frames, left) = frames_of(&bytes).expect("all are right");
        assert_eq!(left, 0);
        let text = vec![b'x'; ControlFrame::BODY_MAX - 8];
        assert_eq!(frames.pop(), Some(ControlFrame::Notice { group: 5, text }));
        let mut seen = Vec::new();
        for frame in frames {
            let ControlFrame::Pulse { groups } = frame else { panic!("only pulses are left: {frame:?}") };
            seen.extend(groups);
        }
        assert_eq!(seen, groups);
    }

    /// All whole frames, and how many bytes are left over.
    fn frames_of(mut bytes: &[u8]) -> Result<(Vec<ControlFrame>, usize), Refused> {
        let mut frames = Vec::new();
        while let Some((frame, len)) = ControlFrame::decode(bytes)? {
            frames.push(frame);
            bytes = &bytes[len..];
        }
        Ok((frames, bytes.len()))
    }

    fn any_frame() -> impl Strategy<Value = ControlFrame> {
        let group = any::<(u64, Head, Head, [u64; 2])>();
        let group =
            group.prop_map(|(group, current, finished, ages)| GroupPulse { group, current, finished, ages });
        prop_oneof![
            proptest::collection::vec(group, 0..20).prop_map(|groups| ControlFrame::Pulse { groups }),
            (any::<u64>(), proptest::collection::vec(any::<u8>(), 0..300))
                .prop_map(|(group, text)| ControlFrame::Notice { group, text }),
            Just(ControlFrame::Goodbye),
            any::<[u64; 4]>().prop_map(|[offset, len, device, inode]| {
                ControlFrame::Region { offset, len, file: FileIdentity { device, inode } }
            }),
            (any::<u64>(), proptest::collection::vec(any::<u8>(), 0..300))
                .prop_map(|(offset, refusal)| ControlFrame::Mapped { offset, refusal }),
            any::<u64>().prop_map(|offset| ControlFrame::Retired { offset }),
        ]
    }

    proptest! {
        #[test]
        fn any_cut_of_any_stream_gives_the_same_frames(
            frames in proptest::collection::vec(any_frame(), 0..8),
            cuts in proptest::collection::vec(1_usize..200, 1..20),
        ) {
            let mut stream = Vec::new();
            frames.iter().for_each(|frame| frame.encode(&mut stream));
            let (mut buffer, mut seen, mut rest) = (Vec::new(), Vec::new(), &stream[..]);
            for cut in cuts.iter().cycle() {
                let (now, later) = rest.split_at((*cut).min(rest.len()));
                buffer.extend_from_slice(now);
                rest = later;
                while let Some((frame, len)) = ControlFrame::decode(&buffer).expect("all are right") {
                    seen.push(frame);
                    buffer.drain(..len);
                }
                if rest.is_empty() {
                    break;
                }
            }
            prop_assert!(buffer.is_empty());
            prop_assert_eq!(seen, frames);
        }

        #[test]
        fn arbitrary_bytes_are_frames_or_refused_and_never_more_than_they_are(
            bytes in proptest::collection::vec(any::<u8>(), 0..400),
            kind in 0_u8..8,
            len in prop_oneof![0_u32..400, any::<u32>()],
        ) {
            let shaped = [&[kind][..], &len.to_le_bytes(), &bytes].concat();
            for bytes in [&bytes, &shaped] {
                if let Ok(Some((frame, len))) = ControlFrame::decode(bytes) {
                    prop_assert!(len <= bytes.len() && len <= ControlFrame::LEN_MAX);
                    let mut again = Vec::new();
                    frame.encode(&mut again);
                    prop_assert_eq!(&again[..], &bytes[..len], "a frame has one form");
                }
                let _ = Hello::decode(bytes, ME);
            }
        }

        #[test]
        fn any_hello_survives_the_journey(which in 0_usize..3, sender: u128) {
            let purpose = [Purpose::Control, Purpose::Line, Purpose::Probe][which];
            let hello = Hello { purpose, sender: FabricId(sender), receiver: ME };
            prop_assert_eq!(Hello::decode(&hello.encode(), ME), Ok(Some(hello)));
        }
    }
}
