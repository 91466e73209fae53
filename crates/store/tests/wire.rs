//! The wire format by itself: what is written is read back, however it is split and whatever lengths it
//! claims.

use std::borrow::Cow;

use proptest::collection::vec;
use proptest::prelude::*;
use tenfold_store::wire::{
    self, Answer, Ask, Body, Cancelled, Command, Decoded, Hello, MAGIC, Malformed, REPLY_KEYS_MAX,
    REPLY_VALUE_MAX, ReplySource, Scan, Status, Welcome,
};
use tenfold_store::{Bytes, ErrorKind, Fault, MessageLimits, Operation, Request, Response, Value};

// ── commands ───────────────────────────────────────────────────────────────────────────────────────────────

fn string(length: usize) -> impl Strategy<Value = Bytes<'static>> {
    vec(any::<u8>(), 0..length).prop_map(Cow::Owned)
}

fn strings() -> impl Strategy<Value = Vec<Bytes<'static>>> {
    vec(string(12), 0..9)
}

fn command() -> impl Strategy<Value = Command<'static>> {
    let (key, value) = (|| string(12), || string(300));
    let request = prop_oneof![
        (key(), value()).prop_map(|(key, value)| Request::Append { key, value }),
        (key(), any::<i64>()).prop_map(|(key, delta)| Request::Add { key, delta }),
        (key(), any::<i64>()).prop_map(|(key, world)| Request::Barrier { key, world }),
        strings().prop_map(|keys| Request::Check { keys }),
        (key(), value(), value()).prop_map(|(key, expected, desired)| Request::CompareSet {
            key,
            expected,
            desired
        }),
        key().prop_map(|key| Request::Delete { key }),
        key().prop_map(|key| Request::Get { key }),
        Just(Request::ListKeys),
        strings().prop_map(|keys| Request::MultiGet { keys }),
        vec((key(), value()), 0..9).prop_map(|pairs| Request::MultiSet { pairs }),
        Just(Request::NumKeys),
        key().prop_map(|key| Request::QueueLen { key }),
        key().prop_map(|key| Request::QueuePop { key }),
        (key(), value()).prop_map(|(key, value)| Request::QueuePush { key, value }),
        (key(), value()).prop_map(|(key, value)| Request::Set { key, value }),
        strings().prop_map(|keys| Request::Wait { keys }),
    ];
    let request = request.boxed();
    let call = request.clone();
    let ask = prop_oneof![
        4 => call.clone().prop_map(Ask::Call),
        2 => (any::<u64>(), call).prop_map(|(wait, request)| Ask::CallAfter(wait, request)),
        2 => (any::<u64>(), strings()).prop_map(|(wait, keys)| Ask::Join(wait, keys)),
        1 => (any::<u64>(), key(), any::<i64>())
            .prop_map(|(count, key, world)| Ask::Arrive { count, key, world }),
        1 => any::<u64>().prop_map(Ask::Leave),
        1 => Just(Ask::Info),
    ];
    prop_oneof![
        1 => (any::<[u16; 2]>(), any::<[u8; 16]>(), any::<u64>()).prop_map(|([version, flags], token, answers)| {
            Command::Session(Hello { version, flags, token, answers })
        }),
        1 => any::<u64>().prop_map(|answers| Command::Acknowledge { answers }),
        1 => Just(Command::Bye),
        8 => (any::<u64>(), ask).prop_map(|(number, ask)| Command::Numbered { number, ask }),
        1 => any::<u32>().prop_map(|magic| Command::Validate { magic }),
        1 => any::<u32>().prop_map(|nonce| Command::Ping { nonce }),
        1 => Just(Command::CancelWait),
        1 => Just(Command::Info),
        16 => request.prop_map(Command::Call),
    ]
}

fn encoded(command: &Command<'_>) -> Vec<u8> {
    let mut bytes = Vec::new();
    wire::encode(command, &mut bytes);
    bytes
}

/// One command of each kind, which `proptest` does not guarantee.
fn every_command() -> Vec<Command<'static>> {
    let key = || Bytes::from(b"key".as_slice());
    let value = || Bytes::from(b"value".as_slice());
    let calls = [
        Request::Append { key: key(), value: value() },
        Request::Add { key: key(), delta: -3 },
        Request::Barrier { key: key(), world: 8 },
        Request::Check { keys: vec![key(), value()] },
        Request::CompareSet { key: key(), expected: value(), desired: key() },
        Request::Delete { key: key() },
        Request::Get { key: key() },
        Request::ListKeys,
        Request::MultiGet { keys: vec![key(), value()] },
        Request::MultiSet { pairs: vec![(key(), value()), (value(), key())] },
        Request::NumKeys,
        Request::QueueLen { key: key() },
        Request::QueuePop { key: key() },
        Request::QueuePush { key: key(), value: value() },
        Request::Set { key: key(), value: value() },
        Request::Wait { keys: vec![key(), value()] },
    ];
    assert!(Operation::ALL.iter().all(|operation| calls.iter().any(|call| call.operation() == *operation)));
    let numbered = |ask| Command::Numbered { number: 1 << 40, ask };
    let others = [
        Command::Validate { magic: MAGIC },
        Command::Ping { nonce: 7 },
        Command::CancelWait,
        Command::Info,
        Command::Session(Hello { version: 1, flags: 0, token: [7; 16], answers: 5 }),
        Command::Acknowledge { answers: 9 },
        Command::Bye,
        numbered(Ask::Info),
        numbered(Ask::Leave(3)),
        numbered(Ask::Join(3, vec![key(), value()])),
        numbered(Ask::Arrive { count: 4, key: key(), world: 8 }),
        numbered(Ask::CallAfter(3, Request::QueuePop { key: key() })),
        numbered(Ask::Call(Request::MultiSet { pairs: vec![(key(), value()), (value(), key())] })),
    ];
    others.into_iter().chain(calls.into_iter().map(Command::Call)).collect()
}

/// Receives a stream in pieces as a server does: keeps an incomplete message, and decodes again when there is
/// enough.
struct Receiver {
    limits: MessageLimits,
    input: Vec<u8>,
    scan: Scan,
    needs: usize,
    commands: Vec<Command<'static>>,
}

impl Receiver {
    fn new() -> Self {
        Receiver {
            limits: MessageLimits::default(),
            input: vec![],
            scan: Scan::default(),
            needs: 0,
            commands: vec![],
        }
    }

    /// `patient`: decodes only when as many bytes have arrived as the last attempt asked for. Otherwise after
    /// each piece.
    fn receive(&mut self, piece: &[u8], patient: bool) {
        self.input.extend_from_slice(piece);
        while !self.input.is_empty() && (!patient || self.input.len() >= self.needs) {
            let decoded = wire::decode(&self.input, &self.limits, &mut self.scan).expect("a valid stream");
            match decoded {
                Decoded::Whole(command, length) => {
                    assert_eq!(self.scan, Scan::default(), "the next message starts afresh");
                    assert!(self.needs <= length, "more was asked for than was needed");
                    self.commands.push(owned(command));
                    self.input.drain(..length);
                    self.needs = 0;
                }
                Decoded::Needs(needs) => {
                    assert!(needs > self.input.len(), "{needs} bytes are there");
                    assert!(needs >= self.needs, "what was needed has become less");
                    self.needs = needs;
                    return;
                }
            }
        }
    }
}

fn owned(command: Command<'_>) -> Command<'static> {
    let one = |bytes: Bytes<'_>| Bytes::Owned(bytes.into_owned());
    let all = |keys: Vec<Bytes<'_>>| keys.into_iter().map(one).collect();
    let request = |request: Request<'_>| match owned(Command::Call(request)) {
        Command::Call(request) => request,
        other => unreachable!("{other:?}"),
    };
    Command::Call(match command {
        Command::Session(hello) => return Command::Session(hello),
        Command::Acknowledge { answers } => return Command::Acknowledge { answers },
        Command::Bye => return Command::Bye,
        Command::Numbered { number, ask } => {
            let ask = match ask {
                Ask::Call(call) => Ask::Call(request(call)),
                Ask::CallAfter(wait, call) => Ask::CallAfter(wait, request(call)),
                Ask::Join(wait, keys) => Ask::Join(wait, all(keys)),
                Ask::Arrive { count, key, world } => Ask::Arrive { count, key: one(key), world },
                Ask::Leave(wait) => Ask::Leave(wait),
                Ask::Info => Ask::Info,
            };
            return Command::Numbered { number, ask };
        }
        Command::Validate { magic } => return Command::Validate { magic },
        Command::Ping { nonce } => return Command::Ping { nonce },
        Command::CancelWait => return Command::CancelWait,
        Command::Info => return Command::Info,
        Command::Call(request) => match request {
            Request::Append { key, value } => Request::Append { key: one(key), value: one(value) },
            Request::Add { key, delta } => Request::Add { key: one(key), delta },
            Request::Barrier { key, world } => Request::Barrier { key: one(key), world },
            Request::Check { keys } => Request::Check { keys: all(keys) },
            Request::CompareSet { key, expected, desired } => {
                Request::CompareSet { key: one(key), expected: one(expected), desired: one(desired) }
            }
            Request::Delete { key } => Request::Delete { key: one(key) },
            Request::Get { key } => Request::Get { key: one(key) },
            Request::ListKeys => Request::ListKeys,
            Request::MultiGet { keys } => Request::MultiGet { keys: all(keys) },
            Request::MultiSet { pairs } => Request::MultiSet {
                pairs: pairs.into_iter().map(|(key, value)| (one(key), one(value))).collect(),
            },
            Request::NumKeys => Request::NumKeys,
            Request::QueueLen { key } => Request::QueueLen { key: one(key) },
            Request::QueuePop { key } => Request::QueuePop { key: one(key) },
            Request::QueuePush { key, value } => Request::QueuePush { key: one(key), value: one(value) },
            Request::Set { key, value } => Request::Set { key: one(key), value: one(value) },
            Request::Wait { keys } => Request::Wait { keys: all(keys) },
            other => unreachable!("no such operation: {other:?}"),
        },
    })
}

fn cases() -> ProptestConfig {
    ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(1_000) }
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn a_stream_means_the_same_however_it_is_cut(
        commands in vec(command(), 1..8),
        sizes in vec(1_usize..400, 1..20),
        patient: bool,
    ) {
        let stream: Vec<u8> = commands.iter().flat_map(encoded).collect();
        let mut receiver = Receiver::new();
        let (mut rest, mut sizes) = (&stream[..], sizes.iter().cycle());
        while !rest.is_empty() {
            let (piece, later) = rest.split_at(rest.len().min(*sizes.next().expect("an endless iterator")));
            receiver.receive(piece, patient);
            rest = later;
        }
        prop_assert!(receiver.input.is_empty());
        prop_assert_eq!(&receiver.commands, &commands);

        let mut receiver = Receiver::new();
        stream.iter().for_each(|byte| receiver.receive(&[*byte], patient));
        prop_assert_eq!(receiver.commands, commands);
    }

    #[test]
    fn any_bytes_are_a_message_or_malformed_or_too_few_however_they_are_cut(
        mut bytes in vec(prop_oneof![3 => Just(0_u8), 2 => 0_u8..20, 1 => any::<u8>()], 1..200),
        opcode in 0_u8..19,
        cut in 0_usize..200,
    ) {
        bytes[0] = opcode;
        let limits = small_limits();
        let whole = wire::decode(&bytes, &limits, &mut Scan::default());
        let mut scan = Scan::default();
        let first = wire::decode(&bytes[..cut.min(bytes.len())], &limits, &mut scan);
        match first {
            Ok(Decoded::Needs(needs)) => {
                if whole.as_ref().is_ok_and(|whole| matches!(whole, Decoded::Whole(_, length) if *length < needs)) {
                    panic!("it needs {needs} bytes and is whole with fewer");
                }
                let again = wire::decode(&bytes, &limits, &mut scan);
                // A message with two faults may be refused for either.
                prop_assert!(again == whole || again.is_err() && whole.is_err(), "{:?} and {:?}", again, whole);
            }
            Ok(Decoded::Whole(..)) => prop_assert_eq!(first, whole),
            Err(_) => prop_assert!(whole.is_err()),
        }
    }
}

#[test]
fn every_command_is_read_back_and_each_beginning_of_it_needs_more() {
    let limits = MessageLimits::default();
    for command in every_command() {
        let bytes = encoded(&command);
        for length in 0..bytes.len() {
            let decoded = wire::decode(&bytes[..length], &limits, &mut Scan::default());
            let Ok(Decoded::Needs(needs)) = decoded else {
                panic!("{length} bytes of {command:?}: {decoded:?}")
            };
            assert!(
                (length + 1..=bytes.len()).contains(&needs),
                "{length} bytes of {command:?} need {needs}"
            );
        }
        let followed = [&bytes[..], &[0xff; 9]].concat();
        let decoded = wire::decode(&followed, &limits, &mut Scan::default());
        assert_eq!(decoded, Ok(Decoded::Whole(command, bytes.len())));
    }
}

#[test]
fn every_unknown_opcode_is_refused() {
    let limits = MessageLimits::default();
    for opcode in (19..=0xff).filter(|opcode| !(0x81..=0x85).contains(opcode)) {
        let bytes = [opcode];
        let decoded = wire::decode(&bytes, &limits, &mut Scan::default());
        assert_eq!(decoded, Err(Malformed::Opcode(opcode)));
    }
}

// ── lengths ────────────────────────────────────────────────────────────────────────────────────────────────

fn small_limits() -> MessageLimits {
    let mut limits = MessageLimits::default();
    (limits.key, limits.value, limits.keys, limits.request) = (8, 16, 4, 120);
    limits
}

#[derive(Clone, Copy, Debug)]
enum Field {
    Count,
    Key,
    Value,
}

/// The offsets of a message's length fields.
fn fields(bytes: &[u8]) -> Vec<(usize, Field)> {
    use Field::{Count, Key, Value};
    let string =
        |at: usize| at + 8 + u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes")) as usize;
    let kinds: &[Field] = match bytes[0] {
        1 | 9 | 14 => &[Key, Value],
        2 => &[Key, Value, Value],
        3 | 4 | 8 | 15 | 16 | 18 => &[Key],
        5 | 6 | 10 => &[Count, Key, Key],
        11 => &[Count, Key, Value, Key, Value],
        _ => &[],
    };
    let mut at = 1;
    let mut found = Vec::new();
    for kind in kinds {
        found.push((at, *kind));
        at = if matches!(kind, Count) { at + 8 } else { string(at) };
    }
    found
}

#[test]
fn a_length_over_its_limit_is_refused_when_it_is_read_and_one_within_waits_for_the_bytes() {
    for limits in [MessageLimits::default(), small_limits()] {
        let mut looked_at = 0;
        for command in every_command() {
            let bytes = encoded(&command);
            for (at, kind) in fields(&bytes) {
                let (limit, what) = match kind {
                    Field::Count => (limits.keys, "a number of keys"),
                    Field::Key => (limits.key, "a key"),
                    Field::Value => (limits.value, "a value"),
                };
                let limit = limit as u64;
                for length in [0, 1, limit, limit + 1, 1 << 31, 1 << 32, 1 << 63, u64::MAX - 7, u64::MAX] {
                    // Ends with the length field: not a byte of what it announces has arrived.
                    let mut start = bytes[..at + 8].to_vec();
                    start[at..].copy_from_slice(&length.to_le_bytes());
                    let decoded = wire::decode(&start, &limits, &mut Scan::default());
                    if length > limit {
                        let limit = limit as usize;
                        assert_eq!(decoded, Err(Malformed::TooLong { what, length, limit }), "{command:?}");
                    } else {
                        match decoded.expect("within the limits") {
                            Decoded::Needs(needs) => assert!(needs > start.len(), "{command:?}"),
                            Decoded::Whole(_, used) => assert_eq!((used, length), (start.len(), 0)),
                        }
                    }
                    looked_at += 1;
                }
            }
        }
        assert_eq!(looked_at, 9 * (3 * 2 + 3 + 6 + 3 * 3 + 5));
    }
}

#[test]
fn a_wrong_length_inside_a_message_never_panics() {
    let limits = small_limits();
    for command in every_command() {
        let bytes = encoded(&command);
        for (at, _) in fields(&bytes) {
            for length in (0..64).map(|bit| 1_u64 << bit).chain(0..40).chain([u64::MAX]) {
                let mut wrong = bytes.clone();
                wrong[at..at + 8].copy_from_slice(&length.to_le_bytes());
                for end in at..=wrong.len() {
                    let _ = wire::decode(&wrong[..end], &limits, &mut Scan::default());
                }
            }
        }
    }
}

#[test]
fn a_request_is_refused_at_the_string_that_makes_it_too_long() {
    let limits = small_limits();
    let pair = (Bytes::from(vec![1; 8]), Bytes::from(vec![2; 16]));
    let bytes = encoded(&Command::Call(Request::MultiSet { pairs: vec![pair; 4] }));
    // 9 + 4 * (8 + 8 + 8 + 16) bytes; the limit of 120 lies in the value of the third pair.
    let third_value = 9 + 2 * 40 + 16;
    let refusal = Malformed::TooLong { what: "a request", length: 129, limit: 120 };
    let mut scan = Scan::default();
    for end in 0..=bytes.len() {
        let decoded = wire::decode(&bytes[..end], &limits, &mut scan);
        match end < third_value + 8 {
            true => assert!(matches!(decoded, Ok(Decoded::Needs(_))), "{end}"),
            false => {
                assert_eq!(decoded, Err(refusal));
                return;
            }
        }
    }
}

// ── replies ────────────────────────────────────────────────────────────────────────────────────────────────

/// A server that has sent these bytes and no more. Remembers the largest piece it was asked for.
struct Said<'a> {
    bytes: &'a [u8],
    largest: usize,
}

impl ReplySource for Said<'_> {
    fn fill(&mut self, bytes: &mut [u8]) -> Result<(), Fault> {
        self.largest = self.largest.max(bytes.len());
        if bytes.len() > self.bytes.len() {
            return Err(Fault::new(ErrorKind::Lost, "no more bytes"));
        }
        let (now, later) = self.bytes.split_at(bytes.len());
        bytes.copy_from_slice(now);
        self.bytes = later;
        Ok(())
    }
}

fn said(bytes: &[u8]) -> Said<'_> {
    Said { bytes, largest: 0 }
}

fn value() -> impl Strategy<Value = Value> {
    vec(any::<u8>(), 0..200).prop_map(Value::from)
}

/// A reply as a server gives it, with what was asked and for how many values.
fn reply() -> impl Strategy<Value = (Operation, usize, Response)> {
    use Operation as O;
    let number = (any::<i64>(), prop::sample::select(vec![O::Add, O::NumKeys, O::QueueLen]));
    let silent = prop::sample::select(vec![O::Append, O::MultiSet, O::QueuePush, O::Set]);
    prop_oneof![
        silent.prop_map(|operation| (operation, 0, Response::Done)),
        any::<bool>().prop_map(|there| (O::Delete, 0, Response::Deleted(there))),
        vec(value(), 0..9).prop_map(|keys| (O::ListKeys, 0, Response::Keys(keys))),
        number.prop_map(|(number, operation)| (operation, 0, Response::Number(number))),
        Just((O::QueuePop, 0, Response::Popped(None))),
        (value(), 1_usize..1 << 40).prop_map(|(item, length)| (
            O::QueuePop,
            0,
            Response::Popped(Some((item, length)))
        )),
        any::<bool>().prop_map(|all| (O::Check, 0, Response::Present(all))),
        any::<bool>().prop_map(|wait| (if wait { O::Wait } else { O::Barrier }, 0, Response::Ready)),
        (prop::option::of(value()), any::<bool>()).prop_map(|(value, get)| {
            let operation = if get { O::Get } else { O::CompareSet };
            (operation, 0, Response::Value(value))
        }),
        vec(prop::option::of(value()), 0..9).prop_map(|values| (
            O::MultiGet,
            values.len(),
            Response::Values(values)
        )),
    ]
}

/// On the wire a missing key is an empty value.
fn as_heard(response: Response) -> Response {
    let empty = |value: Option<Value>| Some(value.unwrap_or_default());
    match response {
        Response::Value(value) => Response::Value(empty(value)),
        Response::Values(values) => Response::Values(values.into_iter().map(empty).collect()),
        other => other,
    }
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn every_reply_is_read_back_and_a_cut_one_is_an_error(
        (operation, count, response) in reply(),
        cut in 0_usize..1_000,
    ) {
        let mut bytes = Vec::new();
        wire::encode_response(response.clone(), &mut bytes);
        let length = bytes.len();
        bytes.extend_from_slice(b"the next reply");
        let mut source = said(&bytes);
        let heard = wire::decode_response(operation, count, &mut source);
        prop_assert_eq!(heard.expect("a whole reply"), as_heard(response));
        prop_assert_eq!(source.bytes, b"the next reply");
        if cut < length {
            let fault = wire::decode_response(operation, count, &mut said(&bytes[..cut])).expect_err("it is cut");
            prop_assert_eq!(fault.kind, ErrorKind::Lost);
        }
    }

    #[test]
    fn any_bytes_are_a_reply_or_an_error(
        bytes in vec(prop_oneof![2 => Just(0_u8), 1 => any::<u8>()], 0..100),
        operation in prop::sample::select(Operation::ALL.to_vec()),
        count in 0_usize..5,
    ) {
        let mut source = said(&bytes);
        let _ = wire::decode_response(operation, count, &mut source);
        prop_assert!(source.largest <= 1 << 20);
        let _ = wire::decode_cancelled(&mut said(&bytes));
        let _ = wire::decode_info(&mut said(&bytes));
    }
}

#[test]
fn absurd_lengths_from_a_server_are_refused() {
    for (operation, count) in [
        (Operation::Get, 0),
        (Operation::CompareSet, 0),
        (Operation::MultiGet, 1),
        (Operation::QueuePop, 0),
        (Operation::ListKeys, 0),
    ] {
        let front: &[u8] = match operation {
            Operation::QueuePop | Operation::ListKeys => &1_u64.to_le_bytes(),
            _ => &[],
        };
        for length in [0, 1, REPLY_VALUE_MAX, REPLY_VALUE_MAX + 1, 1 << 31, 1 << 63, u64::MAX] {
            let bytes = [front, &length.to_le_bytes()].concat();
            let mut source = said(&bytes);
            let heard = wire::decode_response(operation, count, &mut source);
            let kind = heard.as_ref().err().map(|fault| fault.kind);
            let expected = match length {
                0 => None,
                1..=REPLY_VALUE_MAX => Some(ErrorKind::Lost), // it goes on to read them
                _ => Some(ErrorKind::Protocol),
            };
            assert_eq!(kind, expected, "{operation:?} of {length}");
            assert!(source.largest <= 1 << 20, "memory follows the bytes that arrive");
        }
    }
    for count in [-1, REPLY_KEYS_MAX + 1, i64::MIN, i64::MAX] {
        let fault = wire::decode_response(Operation::ListKeys, 0, &mut said(&count.to_le_bytes()));
        assert_eq!(fault.expect_err("not believed").kind, ErrorKind::Protocol);
    }
}

#[test]
fn a_cancelled_wait_differs_from_one_whose_answer_crossed_the_cancel() {
    let mut cancelled = Vec::new();
    wire::encode_cancelled(&mut cancelled);
    assert_eq!(wire::decode_cancelled(&mut said(&cancelled)).expect("whole"), Cancelled::InTime);
    let mut crossed = Vec::new();
    wire::encode_response(Response::Ready, &mut crossed);
    wire::encode_cancelled(&mut crossed);
    assert_eq!(wire::decode_cancelled(&mut said(&crossed)).expect("whole"), Cancelled::TooLate);
    for wrong in [&[2][..], &[0, 0], &[0, 2]] {
        assert_eq!(wire::decode_cancelled(&mut said(wrong)).expect_err("wrong").kind, ErrorKind::Protocol);
    }
    let mut pong = Vec::new();
    wire::encode_pong(0x0102_0304, &mut pong);
    assert_eq!(pong, [4, 3, 2, 1]);
}

// ── sessions ───────────────────────────────────────────────────────────────────────────────────────────────

#[test]
fn the_bytes_of_a_session_are_those_that_are_documented() {
    let hello = Hello { version: 1, flags: 2, token: [7; 16], answers: 3 };
    let expected = [&[0x82, 1, 0, 26, 0, 2, 0][..], &[7; 16], &3_u64.to_le_bytes()].concat();
    assert_eq!(encoded(&Command::Session(hello)), expected);
    // A later version may say more.
    let longer = [&[0x82, 9, 0, 28, 0][..], &expected[5..], &[1, 2]].concat();
    let decoded = wire::decode(&longer, &MessageLimits::default(), &mut Scan::default());
    assert_eq!(decoded, Ok(Decoded::Whole(Command::Session(Hello { version: 9, ..hello }), longer.len())));
    for length in [0_u16, 25, 5_000] {
        let wrong = [&[0x82, 1, 0][..], &length.to_le_bytes()].concat();
        let decoded = wire::decode(&wrong, &MessageLimits::default(), &mut Scan::default());
        assert_eq!(decoded, Err(Malformed::Hello(length.into())));
    }
    let ask = Ask::Call(Request::Get { key: b"k".as_slice().into() });
    let expected = [&[0x83][..], &5_u64.to_le_bytes(), &[0, 3], &1_u64.to_le_bytes(), b"k"].concat();
    assert_eq!(encoded(&Command::Numbered { number: 5, ask }), expected);
    let expected = [&[0x83][..], &6_u64.to_le_bytes(), &[4], &2_u64.to_le_bytes()].concat();
    assert_eq!(encoded(&Command::Numbered { number: 6, ask: Ask::Leave(2) }), expected);
    assert_eq!(encoded(&Command::Acknowledge { answers: 1 }), [&[0x84][..], &1_u64.to_le_bytes()].concat());
    assert_eq!(encoded(&Command::Bye), [0x85]);
}

#[test]
fn only_requests_can_be_numbered_and_each_kind_has_its_own() {
    let decode = |kind: u8, argument: &[u8], inner: &[u8]| {
        let bytes = [&[0x83][..], &1_u64.to_le_bytes(), &[kind], argument, inner].concat();
        wire::decode(&bytes, &MessageLimits::default(), &mut Scan::default()).map(drop)
    };
    let wait = [6, 0, 0, 0, 0, 0, 0, 0, 0];
    let number = 9_u64.to_le_bytes();
    assert_eq!(decode(2, &number, &wait), Ok(()));
    assert_eq!(decode(3, &number, &wait), Err(Malformed::Opcode(6)), "only barriers are arrived at");
    assert_eq!(decode(2, &number, &[7]), Err(Malformed::Opcode(7)), "only waits are joined");
    assert_eq!(decode(0, &[], &[13, 1, 2, 3, 4]), Err(Malformed::Opcode(13)), "a ping has no number");
    assert_eq!(decode(0, &[], &[0x83]), Err(Malformed::Opcode(0x83)));
    assert_eq!(decode(6, &[], &[]), Err(Malformed::Opcode(6)));
}

#[test]
fn welcomes_and_answers_are_read_back_and_announce_their_length() {
    let limits = MessageLimits::default();
    let welcome = Welcome {
        version: 1,
        flags: Welcome::RESUMED,
        store: 1 << 100 | 5,
        requests: 7,
        kept_for: 300_000,
        limits,
    };
    let mut bytes = Vec::new();
    welcome.encode(&mut bytes);
    let (version, length) = Welcome::decode_head(bytes[..Welcome::HEAD].try_into().expect("four bytes"));
    assert_eq!(length, bytes.len() - Welcome::HEAD);
    assert_eq!(Welcome::decode(version, &bytes[Welcome::HEAD..]), Some(welcome));
    assert_eq!(Welcome::decode(version, &bytes[Welcome::HEAD + 1..]), None);

    let value = || Value::from("value");
    let replies = [
        Response::Done,
        Response::Deleted(true),
        Response::Keys(vec![value(), value()]),
        Response::Number(-5),
        Response::Popped(None),
        Response::Popped(Some((value(), 3))),
        Response::Present(false),
        Response::Ready,
        Response::Value(Some(value())),
        Response::Value(None),
        Response::Values(vec![Some(value()), None]),
    ];
    for reply in replies {
        let answer = Answer { number: 3, status: Status::One, body: Body::Reply(reply.clone()) };
        let (mut bytes, mut plain) = (Vec::new(), Vec::new());
        answer.encode(&mut bytes);
        wire::encode_response(reply, &mut plain);
        let head = bytes[..Answer::HEAD].try_into().expect("its length");
        assert_eq!(Answer::decode_head(head), Some((3, Status::One, plain.len() as u64)));
        assert_eq!(&bytes[Answer::HEAD..], plain);
    }
    assert_eq!(Answer::decode_head(&[9; Answer::HEAD]), None, "an unknown status");
}
