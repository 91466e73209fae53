//! Every recorded conversation of PyTorch's TCPStore, replayed with our server and with our client, byte for byte.

#![expect(clippy::disallowed_methods, reason = "raw sockets, and a guard against hanging")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod transcript;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tenfold_store::{
    ErrorKind, PrefixStore, Relay, RelayOptions, Server, ServerOptions, Store, StoreExt, TcpStore,
    TcpStoreOptions,
};
use transcript::{Entry, GUARD, Transcript, hex, play_server};

/// Recordings that our server does not follow, and why its own behaviour is right.
const NOT_OUR_SERVER: &[(&str, &str)] = &[
    (
        "get_vs_failed_compare_set.libuv",
        "wakes a waiter for a key that is not there; ours does as legacy does",
    ),
    ("wait_vs_failed_compare_set.libuv", "the same"),
    (
        "wait_vs_successful_compare_set.legacy",
        "does not wake for a key that is there; ours does as libuv does",
    ),
    ("queue_stale_waiter_spurious_wake", "wakes a waiter for a key that is not there"),
    ("queue_libuv_client_to_legacy_server", "legacy has no queues, ours has"),
    ("raw_get_missing_key.legacy", "closes; ours answers as libuv, the default, does"),
    ("raw_multi_get_one_missing.legacy", "the same"),
    ("raw_key_count_131073.legacy", "has no limits; ours has libuv's"),
    ("raw_key_len_8193.legacy", "the same"),
    ("raw_value_len_prefix_8MiB_plus_1.legacy", "the same"),
    ("raw_no_validate_first.libuv", "serves strangers; ours closes as legacy does"),
    (
        "raw_validate_split_in_two_segments.libuv",
        "closes a client whose hello was cut; ours waits as legacy does",
    ),
    ("raw_wrong_magic.libuv", "keeps strangers; ours closes as legacy does"),
    ("raw_wrong_magic_big_endian.libuv", "the same"),
];

/// Recordings in which our client has no part.
const NOT_OUR_CLIENT: &[(&str, &str)] = &[
    ("queue_client_refuses_on_legacy", "our client has no switch that makes it refuse queues"),
    (
        "master_wait_for_workers.legacy",
        "the hosting process talks to itself: replayed inside the crate, in client.rs",
    ),
    ("master_wait_for_workers.libuv", "the same"),
];

fn check_all(transcripts: &[&Transcript], check: impl Fn(&Transcript) -> Result<(), String> + Sync) {
    let failures: Vec<String> = std::thread::scope(|scope| {
        let check = &check;
        let run = |transcript| {
            scope.spawn(move || check(transcript).map_err(|error| format!("{}: {error}", transcript.name)))
        };
        let threads: Vec<_> = transcripts.iter().map(|&transcript| run(transcript)).collect();
        threads.into_iter().filter_map(|thread| thread.join().unwrap().err()).collect()
    });
    assert!(
        failures.is_empty(),
        "{} of {} failed:\n{}",
        failures.len(),
        transcripts.len(),
        failures.join("\n")
    );
}

#[test]
fn our_server_answers_every_recorded_client_byte_for_byte() {
    let all = Transcript::load_all();
    assert_eq!(all.len(), 146, "a transcript was added or lost");
    let exceptions: BTreeSet<&str> = NOT_OUR_SERVER.iter().map(|(name, _)| *name).collect();
    let (others, ours): (Vec<_>, Vec<_>) =
        all.iter().partition(|transcript| exceptions.contains(transcript.name.as_str()));
    assert_eq!(others.len(), exceptions.len(), "an exception names no transcript");
    check_all(&ours, |transcript| replay_to_server(transcript, GUARD, &Place::server()));
    // An exception that no longer applies must be removed from the list.
    check_all(&others, |transcript| {
        match replay_to_server(transcript, Duration::from_secs(2), &Place::server()) {
            Ok(()) => Err("is listed as an exception, but our server follows it".into()),
            Err(_) => Ok(()),
        }
    });
}

#[test]
fn our_relay_answers_every_recorded_client_byte_for_byte() {
    let exceptions: BTreeSet<&str> = NOT_OUR_SERVER.iter().map(|(name, _)| *name).collect();
    let all = Transcript::load_all();
    let ours: Vec<_> =
        all.iter().filter(|transcript| !exceptions.contains(transcript.name.as_str())).collect();
    assert!(ours.len() > 100);
    for some in ours.chunks(40) {
        check_all(some, |transcript| replay_to_server(transcript, GUARD, &Place::relay()));
    }
}

/// What a recorded client speaks to: a fresh server, or a fresh relay of one.
struct Place {
    server: Server,
    relay: Option<Relay>,
}

/// What it has seen so far.
struct Seen {
    bytes_in: u64,
    bytes_out: u64,
    closed: u64,
    /// Nothing is on its way to the server.
    is_settled: bool,
}

impl Place {
    fn server() -> Place {
        Place { server: Server::start(ServerOptions::new("127.0.0.1", 0)).unwrap(), relay: None }
    }

    fn relay() -> Place {
        let server = Place::server().server;
        let relay = Relay::start(RelayOptions::new("127.0.0.1", server.address().port())).unwrap();
        Place { server, relay: Some(relay) }
    }

    fn address(&self) -> std::net::SocketAddr {
        self.relay.as_ref().map_or(self.server.address(), Relay::address)
    }

    fn seen(&self) -> Seen {
        match &self.relay {
            None => {
                let facts = self.server.facts();
                let closed = facts.closed.values().sum();
                Seen { bytes_in: facts.bytes_in, bytes_out: facts.bytes_out, closed, is_settled: true }
            }
            Some(relay) => {
                let facts = relay.facts();
                Seen {
                    bytes_in: facts.bytes_in,
                    bytes_out: facts.bytes_out,
                    closed: facts.closed,
                    is_settled: facts.under_way == 0 && facts.registering == 0,
                }
            }
        }
    }
}

#[test]
fn our_client_says_what_the_recorded_clients_said_byte_for_byte() {
    let all = Transcript::load_all();
    let exceptions: BTreeSet<&str> = NOT_OUR_CLIENT.iter().map(|(name, _)| *name).collect();
    let (raw, clients): (Vec<_>, Vec<_>) =
        all.iter().partition(|transcript| transcript.name.starts_with("raw_"));
    assert!(raw.iter().all(
        |transcript| transcript.python[0].contains("send ") || transcript.python[0].contains("TCPStore")
    ));
    let ours: Vec<_> =
        clients.iter().filter(|transcript| !exceptions.contains(transcript.name.as_str())).copied().collect();
    assert_eq!(ours.len() + exceptions.len(), clients.len(), "an exception names no transcript");
    check_all(&ours, replay_to_client);
}

// ── the server's side ──────────────────────────────────────────────────────────────────────────────────────

/// Sends the recorded client's part to a fresh server and requires the recorded answers, each of them within
/// `patience`.
fn replay_to_server(transcript: &Transcript, patience: Duration, place: &Place) -> Result<(), String> {
    let mut streams: BTreeMap<usize, TcpStream> = BTreeMap::new();
    let mut closed = BTreeSet::new();
    let (mut sent, mut received) = (0, 0);
    // In the one recording that ends with the server's death, what follows does not concern a server.
    let entries = transcript
        .entries
        .iter()
        .take_while(|entry| !(transcript.name == "server_gone_mid_request" && entry.close));
    for entry in entries {
        if entry.elided {
            TcpStore::open(TcpStoreOptions::new("127.0.0.1", place.address().port()).world_size(2)).unwrap();
            (sent, received) = (place.seen().bytes_in, place.seen().bytes_out);
            continue;
        }
        let connection = entry.connection;
        let stream = streams.entry(connection).or_insert_with(|| {
            let stream = TcpStream::connect(place.address()).unwrap();
            stream.set_read_timeout(Some(patience)).unwrap();
            stream.set_nodelay(true).unwrap();
            stream
        });
        let hung_up = place.seen().closed;
        if entry.from_client && hung_up > closed.len() as u64 {
            return Err("the server hung up earlier than recorded".into());
        }
        match (entry.from_client, entry.close) {
            (true, true) => stream.shutdown(std::net::Shutdown::Both).unwrap_or(()),
            (true, false) if closed.contains(&connection) => drop(stream.write_all(&entry.bytes)),
            (true, false) => {
                stream.write_all(&entry.bytes).map_err(|error| error.to_string())?;
                sent += entry.bytes.len() as u64;
                wait_until_seen(place, sent);
            }
            (false, true) => {
                expect_end(stream).map_err(|error| format!("connection {connection}: {error}"))?;
                closed.insert(connection);
            }
            (false, false) => {
                // The server must not send anything that is not recorded.
                received += entry.bytes.len() as u64;
                let mut got = vec![0; entry.bytes.len()];
                stream
                    .read_exact(&mut got)
                    .map_err(|error| format!("expected {}: {error}", hex(&entry.bytes)))?;
                if !same_answer(&got, entry, transcript.unordered_keys) {
                    return Err(format!(
                        "connection {connection}: expected {}, got {}",
                        hex(&entry.bytes),
                        hex(&got)
                    ));
                }
            }
        }
    }
    let said = place.seen().bytes_out;
    if said == received {
        Ok(())
    } else {
        Err(format!("the server said {said} bytes, recorded are {received}"))
    }
}

/// Order between connections matters: the next one sends when the server has received from the last one.
fn wait_until_seen(place: &Place, sent: u64) {
    let start = Instant::now();
    loop {
        let seen = place.seen();
        if seen.bytes_in >= sent && seen.is_settled || seen.closed > 0 {
            return;
        }
        assert!(start.elapsed() < GUARD, "{} of {sent} bytes were seen", seen.bytes_in);
        std::thread::yield_now();
    }
}

fn expect_end(stream: &mut TcpStream) -> Result<(), String> {
    let mut byte = [0];
    match stream.read(&mut byte) {
        Ok(0) => Ok(()),
        Ok(_) => Err(format!("expected the end, got {:02x}", byte[0])),
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => Ok(()),
        Err(error) => Err(format!("expected the end: {error}")),
    }
}

fn same_answer(got: &[u8], entry: &Entry, unordered: bool) -> bool {
    let keys = |mut bytes: &[u8]| {
        let mut keys = Vec::new();
        bytes = bytes.get(8..).unwrap_or_default();
        while let Some(length) = bytes.get(..8) {
            let length = u64::from_le_bytes(length.try_into().unwrap()) as usize;
            keys.push(bytes.get(8..8 + length)?.to_vec());
            bytes = &bytes[8 + length..];
        }
        keys.sort();
        Some(keys)
    };
    got == entry.bytes || (unordered && keys(got).is_some() && keys(got) == keys(&entry.bytes))
}

// ── the client's side ──────────────────────────────────────────────────────────────────────────────────────

/// Makes the recorded calls with our client against a server that plays the recorded answers.
fn replay_to_client(transcript: &Transcript) -> Result<(), String> {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::scope(|scope| {
        let server = scope.spawn(|| play_server(transcript, &listener));
        let calls = make_calls(transcript, port);
        if calls.is_err() {
            // Let the server see the end of connections that were never made.
            for _ in 0..transcript.connections() {
                drop(TcpStream::connect(listener.local_addr().unwrap()));
            }
        }
        let played = server.join().unwrap();
        calls.and(played)
    })
}

fn make_calls(transcript: &Transcript, port: u16) -> Result<(), String> {
    let mut stores: HashMap<String, Arc<dyn Store>> = HashMap::new();
    for line in &transcript.python {
        if line == "<server destroyed>" {
            return Ok(()); // what PyTorch's client sends to a dead server is not a reference
        }
        make_call(line, port, &mut stores).map_err(|error| format!("{line}: {error}"))?;
    }
    Ok(())
}

fn make_call(line: &str, port: u16, stores: &mut HashMap<String, Arc<dyn Store>>) -> Result<(), String> {
    if let Some((name, arguments)) = line.split_once(" = TCPStore(") {
        let store = TcpStore::open(options_of(arguments, port)).map_err(|error| error.to_string())?;
        stores.insert(name.into(), Arc::new(store));
        return Ok(());
    }
    if let Some(special) = SPECIAL.iter().find(|(prefix, _)| line.starts_with(prefix)) {
        return special.1(stores, port).map_err(|error| error.to_string());
    }
    let (target, call) = split_call(line);
    if call.starts_with("clone()") {
        let clone = stores[target].try_clone().map_err(|error| error.to_string())?;
        stores.insert("clone".into(), clone);
        return Ok(());
    }
    let store = find_store(target, stores);
    let (method, rest) = call.split_once('(').unwrap();
    let mut reader = Reader { text: rest.as_bytes() };
    let arguments = reader.arguments();
    let rest = String::from_utf8_lossy(reader.text).into_owned();
    let outcome = perform(&*store, method, &arguments);
    match (rest.strip_prefix(" -> "), outcome) {
        (Some(expected), Ok(got)) => {
            let expected = Reader { text: expected.as_bytes() }.value();
            if got == expected { Ok(()) } else { Err(format!("got {got:?}")) }
        }
        (Some(_), Err(error)) => Err(error.to_string()),
        (None, Ok(got)) => Err(format!("got {got:?} instead of an error")),
        (None, Err(error)) => {
            let kinds: &[ErrorKind] = match () {
                () if rest.contains("timeout after") => &[ErrorKind::Timeout],
                () if rest.contains("QueueEmptyError") => &[ErrorKind::QueueEmpty],
                () if rest.contains("must be of same size") => &[ErrorKind::Argument],
                () => &[ErrorKind::Lost],
            };
            if kinds.contains(&error.kind()) { Ok(()) } else { Err(format!("got {error:?}")) }
        }
    }
}

type Special = fn(&HashMap<String, Arc<dyn Store>>, u16) -> tenfold_store::Result<()>;

/// Calls of PyTorch's Python layer, as the store operations that they consist of.
const SPECIAL: &[(&str, Special)] = &[
    ("b = C10dRendezvousBackend", |stores, _| {
        stores["c"]
            .compare_set("torch.rendezvous.run1", "", "Y2FuaW1hZGFt")
            .map(|answer| assert_eq!(&*answer, b"Y2FuaW1hZGFt"))
    }),
    ("b.get_state()", |stores, _| stores["c"].get("torch.rendezvous.run1").map(drop)),
    ("b.set_state(b'STATE-A')", |stores, _| {
        set_state(stores, "Y2FuaW1hZGFt", "U1RBVEUtQQ==", "U1RBVEUtQQ==")
    }),
    ("b.set_state(b'STATE-B', token)", |stores, _| {
        set_state(stores, "U1RBVEUtQQ==", "U1RBVEUtQg==", "U1RBVEUtQg==")
    }),
    ("b.set_state(b'STATE-C', stale token)", |stores, _| {
        set_state(stores, "U1RBVEUtQQ==", "U1RBVEUtQw==", "U1RBVEUtQg==")
    }),
    ("elastic.utils.store.barrier", |stores, _| elastic_barrier(&*stores["c"], "bar")),
    ("elastic.utils.store.synchronize", |stores, _| {
        stores["c"].set("sync/0", "data0")?;
        assert_eq!(&*stores["c"].multi_get(&["sync/0"])?[0], b"data0");
        elastic_barrier(&*stores["c"], "sync//finished")
    }),
    ("next(rendezvous(", |_, port| {
        TcpStore::open(TcpStoreOptions::new("127.0.0.1", port).world_size(2)).map(drop)
    }),
];

fn set_state(
    stores: &HashMap<String, Arc<dyn Store>>,
    old: &str,
    new: &str,
    now: &str,
) -> tenfold_store::Result<()> {
    stores["c"]
        .compare_set("torch.rendezvous.run1", old, new)
        .map(|answer| assert_eq!(&*answer, now.as_bytes()))
}

fn elastic_barrier(store: &dyn Store, key: &str) -> tenfold_store::Result<()> {
    assert_eq!(store.add(format!("{key}/num_members"), 1)?, 1);
    store.set(format!("{key}/last_member"), "<val_ignored>")?;
    store.wait(&[format!("{key}/last_member")])
}

fn options_of(arguments: &str, port: u16) -> TcpStoreOptions {
    let option = |name: &str| arguments.split_once(&format!("{name}=")).map(|(_, rest)| rest);
    let mut options = TcpStoreOptions::new("127.0.0.1", port);
    if let Some(world_size) = option("world_size") {
        options = options.world_size(world_size.split([',', ')']).next().unwrap().parse().unwrap());
    }
    if option("wait_for_workers").is_some_and(|rest| rest.starts_with("False")) {
        options = options.wait_workers(false);
    }
    if let Some(timeout) = option("timeout") {
        let Argument::Time(timeout) = (Reader { text: timeout.as_bytes() }).value() else {
            panic!("{arguments}")
        };
        options = options.timeout(timeout);
    }
    options
}

/// `PrefixStore('p', c).set(…` → (`PrefixStore('p', c)`, `set(…`).
fn split_call(line: &str) -> (&str, &str) {
    let at =
        if line.starts_with("PrefixStore") { line.find(").").unwrap() + 1 } else { line.find('.').unwrap() };
    (&line[..at], &line[at + 1..])
}

fn find_store(target: &str, stores: &HashMap<String, Arc<dyn Store>>) -> Arc<dyn Store> {
    let Some(inside) = target.strip_prefix("PrefixStore(") else { return stores[target].clone() };
    let (prefix, inner) = inside.strip_suffix(')').unwrap().split_once(", ").unwrap();
    Arc::new(PrefixStore::new(prefix.trim_matches('\''), find_store(inner, stores)))
}

/// A Python value, as far as the recordings have them.
#[derive(Clone, Debug, PartialEq)]
enum Argument {
    Bool(bool),
    Bytes(Vec<u8>),
    List(Vec<Argument>),
    None,
    Number(i64),
    Time(Duration),
}

impl Argument {
    fn bytes(&self) -> &[u8] {
        let Argument::Bytes(bytes) = self else { panic!("{self:?} is not a string") };
        bytes
    }
    fn number(&self) -> i64 {
        let Argument::Number(number) = self else { panic!("{self:?} is not a number") };
        *number
    }
    fn list(&self) -> Vec<&[u8]> {
        let Argument::List(items) = self else { panic!("{self:?} is not a list") };
        items.iter().map(Argument::bytes).collect()
    }
}

fn perform(store: &dyn Store, method: &str, arguments: &[Argument]) -> tenfold_store::Result<Argument> {
    let bytes = |index: usize| arguments[index].bytes();
    let nothing = |()| Argument::None;
    let value = |value: tenfold_store::Value| Argument::Bytes(value.to_vec());
    let values = |values: Vec<tenfold_store::Value>| Argument::List(values.into_iter().map(value).collect());
    match (method, arguments) {
        ("add", _) => store.add(bytes(0), arguments[1].number()).map(Argument::Number),
        ("append", _) => store.append(bytes(0), bytes(1)).map(nothing),
        ("barrier", [_, world, Argument::Time(timeout)]) => {
            store.barrier_for(bytes(0), world.number() as usize, *timeout).map(nothing)
        }
        ("barrier", [_, world]) => store.barrier(bytes(0), world.number() as usize).map(nothing),
        ("check", _) => store.check(&arguments[0].list()).map(Argument::Bool),
        ("compare_set", _) => store.compare_set(bytes(0), bytes(1), bytes(2)).map(value),
        ("delete_key", _) => store.delete_key(bytes(0)).map(Argument::Bool),
        ("get", _) => store.get(bytes(0)).map(value),
        ("has_extended_api", _) => Ok(Argument::Bool(store.has_extended_api())),
        ("list_keys", _) => store.list_keys().map(values),
        ("multi_get", _) => store.multi_get(&arguments[0].list()).map(values),
        ("multi_set", _) => store.multi_set(&arguments[0].list(), &arguments[1].list()).map(nothing),
        ("num_keys", _) => store.num_keys().map(Argument::Number),
        ("queue_len", _) => store.queue_len(bytes(0)).map(Argument::Number),
        ("queue_pop", [_, Argument::Bool(false)]) => store.try_queue_pop(bytes(0)).map(value),
        ("queue_pop", _) => store.queue_pop(bytes(0)).map(value),
        ("queue_push", _) => store.queue_push(bytes(0), bytes(1)).map(nothing),
        ("set", _) => store.set(bytes(0), bytes(1)).map(nothing),
        ("set_timeout", [Argument::Time(timeout)]) => {
            assert!(store.set_timeout(*timeout));
            Ok(Argument::None)
        }
        ("wait", [keys, Argument::Time(timeout)]) => store.wait_for(&keys.list(), *timeout).map(nothing),
        ("wait", [keys]) => store.wait(&keys.list()).map(nothing),
        other => panic!("no such call: {other:?}"),
    }
}

/// Reads Python literals.
struct Reader<'a> {
    text: &'a [u8],
}

impl Reader<'_> {
    /// Up to the closing parenthesis.
    fn arguments(&mut self) -> Vec<Argument> {
        self.items(b')')
    }

    fn items(&mut self, end: u8) -> Vec<Argument> {
        let mut items = Vec::new();
        loop {
            match self.text[0] {
                byte if byte == end => {
                    self.text = &self.text[1..];
                    return items;
                }
                b',' | b' ' => self.text = &self.text[1..],
                _ => items.push(self.value()),
            }
        }
    }

    fn value(&mut self) -> Argument {
        for (word, value) in
            [("None", Argument::None), ("True", Argument::Bool(true)), ("False", Argument::Bool(false))]
        {
            if self.take(word) {
                return value;
            }
        }
        if self.take("timedelta(") {
            let end = self.text.iter().position(|byte| *byte == b')').unwrap();
            let parts = String::from_utf8_lossy(&self.text[..end]).into_owned();
            self.text = &self.text[end + 1..];
            let part = |name: &str| {
                let found = parts.split(", ").find_map(|part| part.strip_prefix(name));
                found.map_or(0, |number| number.parse::<u64>().unwrap())
            };
            return Argument::Time(
                Duration::from_secs(part("seconds=")) + Duration::from_micros(part("microseconds=")),
            );
        }
        if self.take("[") {
            return Argument::List(self.items(b']'));
        }
        if matches!(self.text[0], b'-' | b'0'..=b'9') {
            let end = self
                .text
                .iter()
                .skip(1)
                .position(|byte| !byte.is_ascii_digit())
                .map_or(self.text.len(), |at| at + 1);
            let number = str::from_utf8(&self.text[..end]).unwrap().parse().unwrap();
            self.text = &self.text[end..];
            return Argument::Number(number);
        }
        self.take("b");
        self.string()
    }

    fn take(&mut self, word: &str) -> bool {
        let rest = self.text.strip_prefix(word.as_bytes());
        self.text = rest.unwrap_or(self.text);
        rest.is_some()
    }

    fn string(&mut self) -> Argument {
        let quote = self.text[0];
        self.text = &self.text[1..];
        let mut bytes = Vec::new();
        while self.text[0] != quote {
            if self.take("...(2002 chars)") {
                // The only value that the recording truncates.
                return Argument::Bytes(vec![b'x'; 2000]);
            }
            let (byte, length) = match self.text {
                [b'\\', b'x', high, low, ..] => {
                    (u8::from_str_radix(str::from_utf8(&[*high, *low]).unwrap(), 16).unwrap(), 4)
                }
                [b'\\', b't', ..] => (b'\t', 2),
                [b'\\', b'n', ..] => (b'\n', 2),
                [b'\\', other, ..] => (*other, 2),
                [byte, ..] => (*byte, 1),
                [] => panic!("a string without end"),
            };
            bytes.push(byte);
            self.text = &self.text[length..];
        }
        self.text = &self.text[1..];
        Argument::Bytes(bytes)
    }
}
