//! What the load generator sends in each case, and what a correct server answers.
//!
//! Everything is encoded before the clock starts. A *turn* is what one connection writes in one call: as many
//! operations as are to be in flight. It ends with something that has a reply, because a connection writes
//! its next turn when it has counted all reply bytes of this one. If operations have no reply (SET,
//! MULTI_SET), the turn ends with one PING.
//!
//! Each connection has its own keys, values are 16 bytes, and both are always the same. The cases of many
//! keys share one set, so that the generator's own caches are not measured.

use std::borrow::Cow;

use tenfold_store::wire::{self, Command};
use tenfold_store::{Bytes, Request, Response, Value};

use super::case::Case;

const VALUE: &[u8] = b"0123456789abcdef";
const MEBIBYTE: usize = 1 << 20;
const NONCE: u32 = 0x0bad_cafe;

/// Some requests and the exact bytes that answer them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Exchange {
    pub(crate) request: Vec<u8>,
    pub(crate) reply: Vec<u8>,
}

impl Exchange {
    pub(crate) fn new() -> Self {
        Exchange::default()
    }

    pub(crate) fn ask(mut self, request: Request<'_>, response: Response) -> Self {
        wire::encode(&Command::Call(request), &mut self.request);
        wire::encode_response(response, &mut self.reply);
        self
    }

    pub(crate) fn ping(mut self) -> Self {
        wire::encode(&Command::Ping { nonce: NONCE }, &mut self.request);
        wire::encode_pong(NONCE, &mut self.reply);
        self
    }

    /// What a client sends first.
    pub(crate) fn introduction() -> Self {
        let mut exchange = Exchange::new();
        wire::encode(&Command::Validate { magic: wire::MAGIC }, &mut exchange.request);
        exchange.ping()
    }

    /// Adds `count` times what `step` adds.
    fn repeat(self, count: usize, step: impl Fn(Exchange, usize) -> Exchange) -> Self {
        (0..count).fold(self, step)
    }
}

/// What one connection does in a case.
#[derive(Clone, Debug)]
pub(crate) struct Script {
    /// Before: what the turns rely on.
    pub(crate) prepare: Exchange,
    /// Repeatedly; the replies are those of the first turn.
    pub(crate) turn: Exchange,
    /// After: what proves that the turns had their effect, if their replies alone do not.
    pub(crate) proof: Exchange,
    /// If replies are the numbers of a counter: by how much one turn advances it.
    counts: Option<usize>,
}

impl Script {
    /// The reply to the turn number `turn`, counted from 0.
    pub(crate) fn reply(&self, turn: u64) -> Cow<'_, [u8]> {
        match self.counts {
            None => Cow::Borrowed(&self.turn.reply),
            Some(step) => {
                let before = turn as i64 * step as i64;
                (1..=step as i64).flat_map(|number| (before + number).to_le_bytes()).collect()
            }
        }
    }
}

/// The scripts of all connections in a case; a single one if the keys are shared.
#[derive(Debug)]
pub(crate) struct Scripts {
    scripts: Vec<Script>,
    /// Operations in one turn.
    pub(crate) in_flight: usize,
}

impl Scripts {
    pub(crate) fn of(&self, connection: usize) -> &Script {
        &self.scripts[connection % self.scripts.len()]
    }

    pub(crate) fn new(case: Case, connections: usize, in_flight: usize) -> Self {
        let distinct = match case {
            Case::MultiGet | Case::MultiSet => 1,
            _ => connections,
        };
        let scripts = (0..distinct).map(|connection| script(case, connection, in_flight)).collect();
        Scripts { scripts, in_flight }
    }
}

fn script(case: Case, connection: usize, in_flight: usize) -> Script {
    let key = |slot: usize| key(case, connection, slot);
    let start = Exchange::new;
    let set_all = || start().repeat(in_flight, |exchange, slot| set(exchange, &key(slot), VALUE)).ping();
    let get_all = || start().repeat(in_flight, |exchange, slot| get(exchange, &key(slot), VALUE));
    let turn = |step: &dyn Fn(Exchange, &[u8]) -> Exchange| {
        start().repeat(in_flight, |exchange, slot| step(exchange, &key(slot)))
    };
    let plain = |prepare, turn, proof| Script { prepare, turn, proof, counts: None };
    match case {
        Case::Set => plain(start().ping(), set_all(), get_all()),
        Case::Get => plain(set_all(), get_all(), start().ping()),
        Case::Add => {
            let counter = key(0);
            let prepare = set(start(), &counter, b"0").ping();
            let turn = start().repeat(in_flight, |exchange, slot| {
                let request = Request::Add { key: counter.as_slice().into(), delta: 1 };
                exchange.ask(request, Response::Number(slot as i64 + 1))
            });
            Script { prepare, turn, proof: start().ping(), counts: Some(in_flight) }
        }
        Case::Check => plain(
            set_all(),
            turn(&|exchange, key| {
                exchange.ask(Request::Check { keys: vec![key.into()] }, Response::Present(true))
            }),
            start().ping(),
        ),
        Case::CompareSet => plain(
            set_all(),
            turn(&|exchange, key| {
                let request =
                    Request::CompareSet { key: key.into(), expected: VALUE.into(), desired: VALUE.into() };
                exchange.ask(request, Response::Value(Some(VALUE.into())))
            }),
            get_all(),
        ),
        Case::WaitGet => plain(
            set_all(),
            turn(&|exchange, key| {
                let waited = exchange.ask(Request::Wait { keys: vec![key.into()] }, Response::Ready);
                get(waited, key, VALUE)
            }),
            start().ping(),
        ),
        Case::Queue => plain(
            start().ping(),
            turn(&|exchange, key| {
                let push = Request::QueuePush { key: key.into(), value: VALUE.into() };
                let popped = Response::Popped(Some((VALUE.into(), 1)));
                exchange.ask(push, Response::Done).ask(Request::QueuePop { key: key.into() }, popped)
            }),
            turn(&|exchange, key| exchange.ask(Request::QueueLen { key: key.into() }, Response::Number(0))),
        ),
        Case::Delete => plain(
            start().ping(),
            turn(&|exchange, key| {
                set(exchange, key, VALUE).ask(Request::Delete { key: key.into() }, Response::Deleted(true))
            }),
            turn(&|exchange, key| {
                exchange.ask(Request::Check { keys: vec![key.into()] }, Response::Present(false))
            }),
        ),
        Case::MultiGet => {
            let many = Many::new(case, 100);
            plain(
                many.set(start()).ping(),
                start().repeat(in_flight, |exchange, _| many.get(exchange)),
                start().ping(),
            )
        }
        Case::MultiSet | Case::MultiSetTenThousand => {
            let many = Many::new(case, if case == Case::MultiSet { 100 } else { 10_000 });
            plain(
                start().ping(),
                start().repeat(in_flight, |exchange, _| many.set(exchange)).ping(),
                many.get(start()),
            )
        }
        Case::SetMebibyte => {
            let value = large_value();
            plain(
                start().ping(),
                start().repeat(in_flight, |exchange, slot| set(exchange, &key(slot), &value)).ping(),
                get(start(), &key(0), &value),
            )
        }
        Case::GetMebibyte => {
            let value = large_value();
            plain(
                start().repeat(in_flight, |exchange, slot| set(exchange, &key(slot), &value)).ping(),
                start().repeat(in_flight, |exchange, slot| get(exchange, &key(slot), &value)),
                start().ping(),
            )
        }
        Case::Wake | Case::Connect | Case::Memory => unreachable!("`crowd` runs {}", case.name()),
    }
}

fn key(case: Case, connection: usize, slot: usize) -> Vec<u8> {
    format!("/{}/{connection:04}/{slot:02}", case.name()).into_bytes()
}

fn set(exchange: Exchange, key: &[u8], value: &[u8]) -> Exchange {
    exchange.ask(Request::Set { key: key.into(), value: value.into() }, Response::Done)
}

fn get(exchange: Exchange, key: &[u8], value: &[u8]) -> Exchange {
    exchange.ask(Request::Get { key: key.into() }, Response::Value(Some(value.into())))
}

/// Not all equal, so that bytes in the wrong place are noticed.
fn large_value() -> Vec<u8> {
    (0..MEBIBYTE).map(|index| (index % 251) as u8).collect()
}

/// Several keys for one request.
struct Many {
    keys: Vec<Vec<u8>>,
}

impl Many {
    fn new(case: Case, count: usize) -> Self {
        Many { keys: (0..count).map(|slot| key(case, 0, slot)).collect() }
    }

    fn set(&self, exchange: Exchange) -> Exchange {
        let pairs = self.keys.iter().map(|key| (Bytes::from(key), Bytes::from(VALUE))).collect();
        exchange.ask(Request::MultiSet { pairs }, Response::Done)
    }

    fn get(&self, exchange: Exchange) -> Exchange {
        let keys: Vec<Bytes<'_>> = self.keys.iter().map(Bytes::from).collect();
        let values = vec![Some(Value::from(VALUE)); keys.len()];
        exchange.ask(Request::MultiGet { keys }, Response::Values(values))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tenfold_store::wire::{Decoded, MessageLimits, Scan};

    fn messages(mut bytes: &[u8]) -> usize {
        let mut count = 0;
        while !bytes.is_empty() {
            match wire::decode(bytes, &MessageLimits::default(), &mut Scan::default()) {
                Ok(Decoded::Whole(_, length)) => bytes = &bytes[length..],
                other => panic!("a script is made of whole messages, not {other:?}"),
            }
            count += 1;
        }
        count
    }

    #[test]
    fn a_turn_holds_every_operation_in_flight_and_its_replies_have_the_known_length() {
        let expected = |case, in_flight: usize| match case {
            // (messages, reply bytes)
            Case::Set | Case::MultiSet | Case::MultiSetTenThousand | Case::SetMebibyte => (in_flight + 1, 4),
            Case::Get | Case::CompareSet => (in_flight, in_flight * 24),
            Case::Add => (in_flight, in_flight * 8),
            Case::Check => (in_flight, in_flight),
            Case::WaitGet => (2 * in_flight, in_flight * 25),
            Case::Queue => (2 * in_flight, in_flight * 32),
            Case::Delete => (2 * in_flight, in_flight * 8),
            Case::MultiGet => (in_flight, in_flight * 2400),
            Case::GetMebibyte => (in_flight, in_flight * (8 + MEBIBYTE)),
            Case::Wake | Case::Connect | Case::Memory => unreachable!("not loads"),
        };
        for case in Case::LOADS.into_iter().chain(Case::LARGE) {
            for in_flight in [1, 2, 16] {
                let scripts = Scripts::new(case, 3, in_flight);
                let turn = &scripts.of(2).turn;
                let found = (messages(&turn.request), turn.reply.len());
                assert_eq!(found, expected(case, in_flight), "{} P={in_flight}", case.name());
            }
        }
    }

    #[test]
    fn every_exchange_ends_with_a_reply() {
        for case in Case::LOADS.into_iter().chain(Case::LARGE) {
            let script = script(case, 0, 1);
            for exchange in [&script.prepare, &script.turn, &script.proof] {
                assert!(!exchange.reply.is_empty(), "{}", case.name());
            }
        }
    }

    #[test]
    fn a_counter_goes_on_where_the_turn_before_left_it() {
        let scripts = Scripts::new(Case::Add, 1, 2);
        let numbers = |turn| -> Vec<i64> {
            let reply = scripts.of(0).reply(turn);
            reply.chunks(8).map(|chunk| i64::from_le_bytes(chunk.try_into().unwrap())).collect()
        };
        assert_eq!(numbers(0), [1, 2]);
        assert_eq!(numbers(10), [21, 22]);
        assert_eq!(*scripts.of(0).reply(0), *scripts.of(0).turn.reply);
    }

    #[test]
    fn connections_do_not_share_keys_unless_there_are_many_in_a_request() {
        let requests = |case| {
            let scripts = Scripts::new(case, 2, 1);
            (scripts.of(0).turn.request.clone(), scripts.of(1).turn.request.clone())
        };
        let (first, second) = requests(Case::Get);
        assert_ne!(first, second);
        let (first, second) = requests(Case::MultiGet);
        assert_eq!(first, second);
    }

    #[test]
    fn a_handshake_is_what_pytorch_sends() {
        let introduction = Exchange::introduction();
        assert_eq!(introduction.request[..6], [0x00, 0xce, 0xf7, 0x85, 0x3c, 0x0d]);
        assert_eq!(introduction.reply, introduction.request[6..]);
    }
}
