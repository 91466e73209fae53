//! A server under attack: whatever a client sends, or does not send or read, costs it its own connection and
//! bounded memory, and gives no other client a wrong answer.
//!
//! The server runs in this process, with small limits where a limit is under test. Attacks on the memory of a
//! whole process are in `crates/cli/tests/attacks.rs`.

#![expect(
    clippy::disallowed_methods,
    clippy::unwrap_used,
    reason = "tests: threads, sockets, the time things take; a helper may fail too"
)]

mod hostile;

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use hostile::*;
use tenfold_store::{Closed, ErrorKind, Limits, Server, ServerOptions, StoreExt, TcpStore, TcpStoreOptions};

fn serve(change: impl FnOnce(&mut Limits)) -> (Server, SocketAddr) {
    let mut limits = Limits::default();
    change(&mut limits);
    let server = Server::start(ServerOptions::new("127.0.0.1", 0).limits(limits)).unwrap();
    let address = server.address();
    (server, address)
}

fn closed(server: &Server, reason: Closed) -> u64 {
    server.facts().closed.get(&reason).copied().unwrap_or(0)
}

fn keys(count: usize) -> impl ExactSizeIterator<Item = String> {
    (0..count).map(|index| format!("/key/{index}"))
}

/// As many pairs as one message may have.
const MANY: usize = 128 << 10;

// ── the first bytes ────────────────────────────────────────────────────────────────────────────────────────

#[test]
fn unknown_protocols_are_closed_immediately_and_have_no_effect() {
    let (server, address) = serve(|_| {});
    let bystander = Bystander::watch(address);
    let set = message(SET, &[b"/stranger", b"was here"]);
    let wrong_then_set = [&[0, 1, 2, 3, 4], set.as_slice()].concat();
    let strangers: [(&str, &[u8]); 9] = [
        ("wrong magic", &[0, 0xcd, 0xf7, 0x85, 0x3c]),
        ("big-endian magic", &[0, 0x3c, 0x85, 0xf7, 0xce]),
        ("all zeros", &[0; 64]),
        ("HTTP", b"GET / HTTP/1.1\r\nHost: localhost:29500\r\n\r\n"),
        ("TLS hello", &[0x16, 0x03, 0x01, 0x02, 0x00, 0x01, 0x00, 0x01, 0xfc, 0x03, 0x03]),
        ("SSH", b"SSH-2.0-OpenSSH_9.9\r\n"),
        ("no hello", &set),
        ("a ping as hello", &[PING, 1, 2, 3, 4]),
        ("wrong magic and a set", &wrong_then_set),
    ];
    for (what, bytes) in strangers {
        let mut raw = Raw::connect(address);
        raw.send(bytes);
        assert_eq!(raw.until_closed(), b"", "{what}: no answer before the end");
    }
    until("all are counted", || closed(&server, Closed::Handshake) == strangers.len() as u64);
    assert!(!client(address, HANG).check(&["stranger"]).unwrap());
    bystander.report("strangers");
}

/// Every user of a machine can connect to its loopback.
#[test]
fn a_client_of_another_user_is_refused_unless_the_server_allows_it() {
    use std::os::unix::process::CommandExt as _;
    const NOBODY: u32 = 65534;
    let (server, address) = serve(|limits| limits.other_users = false);
    let (open, open_address) = serve(|_| {});
    client(address, HANG).set("own", "served").unwrap();
    let write = |address: SocketAddr| {
        let script = format!(
            "exec 3<>/dev/tcp/127.0.0.1/{}; printf '\\0\\316\\367\\205\\074\\015\\1\\2\\3\\4' >&3; head -c 4 <&3 | wc -c",
            address.port()
        );
        let output = Command::new("bash").args(["-c", &script]).uid(NOBODY).stderr(Stdio::null()).output();
        output.ok().map(|output| String::from_utf8(output.stdout).unwrap().trim().to_string())
    };
    let Some(answered) = write(open_address) else { return }; // only root can act as another user
    assert_eq!((answered.as_str(), open.facts().closed.len()), ("4", 0));
    assert_eq!(write(address).as_deref(), Some("0"));
    assert_eq!(closed(&server, Closed::User), 1);
}

#[test]
fn a_handshake_in_single_bytes_is_accepted() {
    let (server, address) = serve(|_| {});
    for cut in 1..HELLO.len() {
        let mut raw = Raw::connect(address);
        raw.send(&HELLO[..cut]);
        until("the first part has arrived", || server.facts().buffer_bytes > 0);
        raw.send(&HELLO[cut..]);
        raw.sync();
    }
    let mut raw = Raw::connect(address);
    for byte in HELLO {
        raw.send(&[byte]);
    }
    raw.sync();
    assert!(server.facts().closed.is_empty());
}

#[test]
fn a_second_handshake_and_every_unknown_opcode_close_the_connection() {
    let (server, address) = serve(|_| {});
    let bystander = Bystander::watch(address);
    let mut raw = Raw::greeted(address);
    raw.sync();
    raw.send(&HELLO);
    raw.until_closed();
    let unknown: Vec<u8> = (19..=255).filter(|opcode| !(INFO..=BYE).contains(opcode)).collect();
    for opcode in &unknown {
        let mut raw = Raw::greeted(address);
        // The ping before it is still answered.
        raw.send(&[PING, 9, 9, 9, 9, *opcode, 0, 0, 0, 0]);
        assert_eq!(raw.until_closed(), [9; 4], "opcode {opcode}");
    }
    until("all are counted", || closed(&server, Closed::UnknownOpcode) == unknown.len() as u64 + 1);
    bystander.report("unknown opcodes");
}

// ── lengths ────────────────────────────────────────────────────────────────────────────────────────────────

#[test]
fn absurd_lengths_are_refused_before_anything_is_allocated() {
    let (server, address) = serve(|_| {});
    let bystander = Bystander::watch(address);
    // What precedes each length field of each command.
    let text = |opcode: u8, strings: &[&[u8]]| message(opcode, strings);
    let one = 1_u64.to_le_bytes();
    let mut fields: Vec<(String, Vec<u8>, u64)> = Vec::new();
    let (key_max, value_max, keys_max) = (8 << 10, 8 << 20, MANY as u64);
    for opcode in [SET, COMPARE_SET, GET, ADD, DELETE, APPEND, QUEUE_PUSH, QUEUE_POP, QUEUE_LEN, BARRIER] {
        fields.push((format!("key of {opcode}"), vec![opcode], key_max));
    }
    for opcode in [SET, COMPARE_SET, APPEND, QUEUE_PUSH] {
        fields.push((format!("value of {opcode}"), text(opcode, &[b"/k"]), value_max));
    }
    fields.push(("second value of compare_set".into(), text(COMPARE_SET, &[b"/k", b"v"]), value_max));
    for opcode in [CHECK, WAIT, MULTI_GET, MULTI_SET] {
        fields.push((format!("count of {opcode}"), vec![opcode], keys_max));
        fields.push((format!("first key of {opcode}"), [&[opcode], one.as_slice()].concat(), key_max));
    }
    fields.push((
        "first value of multi_set".into(),
        [&[MULTI_SET], one.as_slice(), &one, b"k"].concat(),
        value_max,
    ));
    let mut refused = 0;
    for (what, before, limit) in &fields {
        for length in [limit + 1, 1 << 31, 1 << 40, 1 << 63, u64::MAX] {
            let mut raw = Raw::greeted(address);
            raw.send(&[before.as_slice(), &length.to_le_bytes()].concat());
            assert_eq!(raw.until_closed(), b"", "{what} {length}");
            refused += 1;
        }
        // A length at the limit is accepted.
        let mut raw = Raw::greeted(address);
        raw.send(&[before.as_slice(), &limit.to_le_bytes()].concat());
        until("it has arrived", || server.facts().buffer_bytes > 0);
        drop(raw);
        until("the connection is closed", || server.facts().buffer_bytes == 0);
    }
    until("all are counted", || closed(&server, Closed::TooLong) == refused);
    assert_eq!(server.facts().closed.len(), 1);
    bystander.report("absurd lengths");
}

#[test]
fn parts_as_long_as_their_limits_are_served() {
    let (_server, address) = serve(|_| {});
    let store = client(address, HANG);
    let (key, value) = ("k".repeat((8 << 10) - 1), vec![7; 8 << 20]);
    store.set(&key, &value).unwrap();
    assert!(*store.get(&key).unwrap() == *value);
    let error = store.set("k".repeat(8 << 10), "v").and_then(|()| store.num_keys()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Lost);
}

/// The protocol has no answer to a write, but a client whose write call succeeds relies on the write.
#[test]
fn a_write_that_is_refused_fails_by_itself_and_not_with_the_next_call() {
    let (server, address) = serve(|limits| {
        limits.table.keys = 2;
        limits.message.value = 1000;
    });
    let store = client(address, HANG);
    store.set("one", "1").unwrap();
    store.multi_set(&["two"], &["2"]).unwrap();
    store.append("two", "2").unwrap();
    store.queue_push("queue", "3").unwrap();
    let refused = [
        store.set("three", "3").unwrap_err(),
        store.multi_set(&["three"], &["3"]).unwrap_err(),
        store.append("three", "3").unwrap_err(),
        store.queue_push("queue", vec![3; 2000]).unwrap_err(),
    ];
    for error in refused {
        assert_eq!(error.kind(), ErrorKind::Lost);
        assert!(error.hint().unwrap().contains("refused the write"), "{error}");
    }
    assert_eq!((closed(&server, Closed::Full), closed(&server, Closed::TooLong)), (3, 1));
    assert_eq!(&*store.get("two").unwrap(), b"22");
}

#[test]
fn a_request_longer_than_the_limit_of_all_its_parts_is_refused() {
    let (server, address) = serve(|limits| limits.message.request = 100_000);
    let mut raw = Raw::greeted(address);
    let value = [0; 1000];
    let strings = (0..400).map(|index| if index % 2 == 0 { b"/k".as_slice() } else { &value });
    raw.try_send(&list(MULTI_SET, strings.collect::<Vec<_>>().into_iter()));
    raw.until_closed();
    assert_eq!(closed(&server, Closed::TooLong), 1);
    assert_eq!(server.facts().keys, 0);
}

// ── messages that never end ────────────────────────────────────────────────────────────────────────────────

#[test]
fn half_messages_cost_what_has_arrived_and_only_while_they_are_there() {
    let (server, address) = serve(|_| {});
    let bystander = Bystander::watch(address);
    let half = &message(SET, &[b"/half", &[1; 8000]])[..4000];
    let mut held: Vec<Raw> = (0..500).map(|_| Raw::greeted(address)).collect();
    held.iter_mut().for_each(|raw| raw.send(half));
    until("all have arrived", || server.facts().buffer_bytes >= 500 * half.len());
    let bytes = server.facts().buffer_bytes;
    println!("500 half messages of {} bytes: {bytes} bytes of buffers", half.len());
    assert!(bytes <= 500 * 2 * half.len());
    drop(held);
    until("they are forgotten", || server.facts().buffer_bytes == 0);
    assert!(!client(address, HANG).check(&["half"]).unwrap());
    bystander.report("500 half messages");
}

#[test]
fn a_client_that_sends_a_byte_at_a_time_is_cut_off_at_the_message_timeout() {
    let (server, address) = serve(|limits| limits.message_timeout = Duration::from_millis(300));
    let bystander = Bystander::watch(address);
    let mut raw = Raw::greeted(address);
    raw.sync();
    let start = Instant::now();
    let message = message(SET, &[b"/slow", &[1; 8000]]);
    raw.0.set_nonblocking(true).unwrap();
    let mut bytes = message.iter();
    loop {
        // The read doubles as the pause between two bytes.
        match raw.0.read(&mut [0; 16]) {
            Ok(0) => break,
            Ok(_) => panic!("no answer is due"),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(_) => break,
        }
        std::thread::park_timeout(Duration::from_millis(5));
        let byte = bytes.next().expect("it is cut off before it is done");
        if raw.0.write(&[*byte]).is_err() {
            break;
        }
        assert!(start.elapsed() < HANG);
    }
    assert!(start.elapsed() >= Duration::from_millis(300));
    until("it is counted", || closed(&server, Closed::MessageTimeout) == 1);
    assert_eq!(server.facts().buffer_bytes, 0);
    bystander.report("one byte at a time");
}

#[test]
fn whole_messages_at_any_pace_do_not_time_out() {
    let (server, address) = serve(|limits| limits.message_timeout = Duration::from_secs(1));
    let mut raw = Raw::greeted(address);
    let start = Instant::now();
    // Each one is begun in one write and ended in the next, together with the beginning of another.
    raw.send(&[PING, 1]);
    while start.elapsed() < Duration::from_millis(2500) {
        raw.send(&[2, 3, 4, PING, 1]);
        assert_eq!(raw.read(), [1, 2, 3, 4]);
        std::thread::park_timeout(Duration::from_millis(20));
    }
    assert!(server.facts().closed.is_empty());
}

#[test]
fn an_idle_client_is_closed_before_the_handshake_but_not_after() {
    let (server, address) = serve(|limits| limits.handshake_timeout = Duration::from_millis(200));
    let bystander = Bystander::watch(address);
    let mut idle = Raw::greeted(address);
    idle.sync();
    let mut silent: Vec<Raw> = (0..100).map(|_| Raw::connect(address)).collect();
    for (index, raw) in silent.iter_mut().enumerate() {
        raw.send(&HELLO[..index % HELLO.len()]);
    }
    silent.iter_mut().for_each(|raw| assert_eq!(raw.until_closed(), b""));
    until("all are counted", || closed(&server, Closed::HandshakeTimeout) == 100);
    idle.sync();
    bystander.report("no hello");
}

// ── clients that do not read ───────────────────────────────────────────────────────────────────────────────

const VALUE: usize = 1 << 20;

fn with_value(change: impl FnOnce(&mut Limits)) -> (Server, SocketAddr) {
    let (server, address) = serve(|limits| {
        limits.write_timeout = Duration::from_millis(500);
        change(limits);
    });
    client(address, HANG).set("large", vec![7; VALUE]).unwrap();
    (server, address)
}

#[test]
fn a_client_that_asks_for_half_a_gigabyte_and_never_reads_is_held_back_and_cut_off() {
    let (server, address) = with_value(|_| {});
    let bystander = Bystander::watch(address);
    let mut raw = Raw::greeted(address);
    raw.send(&message(GET, &[b"/large"]).repeat(512));
    let mut most = 0;
    until("it is cut off", || {
        let facts = server.facts();
        most = most.max(facts.buffer_bytes);
        facts.closed.contains_key(&Closed::WriteTimeout)
    });
    println!("512 MB asked for and not read: at most {most} bytes of buffers");
    assert!(most < 1 << 20, "the value itself is shared, not copied");
    assert_eq!(server.facts().buffer_bytes, 0);
    assert!(server.facts().bytes_out < 64 << 20, "requests beyond the output limit were not served");
    bystander.report("512 MB of get, not read");
}

#[test]
fn one_multi_get_for_half_a_gigabyte_costs_pointers() {
    let (server, address) = with_value(|_| {});
    let bystander = Bystander::watch(address);
    let request = list(MULTI_GET, std::iter::repeat_n(b"/large", 512));
    let mut raw = Raw::greeted(address);
    raw.send(&request);
    let mut most = 0;
    until("it is cut off", || {
        let facts = server.facts();
        most = most.max(facts.buffer_bytes);
        facts.closed.contains_key(&Closed::WriteTimeout)
    });
    println!("a multi_get of {} bytes for 512 MB: at most {most} bytes of buffers", request.len());
    assert!(most < 1 << 20);
    bystander.report("multi_get for 512 MB, not read");
}

#[test]
fn a_multi_get_that_is_read_arrives_whole() {
    let (_server, address) = with_value(|_| {});
    let bystander = Bystander::watch(address);
    let store = client(address, HANG);
    let values = store.multi_get(&["large"; 256]).unwrap();
    assert_eq!(values.len(), 256);
    let expected = vec![7; VALUE];
    assert!(values.iter().all(|value| **value == *expected));
    bystander.report("multi_get of 256 MB, read");
}

/// Values that are just too short to be shared: a request of 160 KB asks for 256 MB of them.
#[test]
fn a_multi_get_of_short_values_costs_a_piece_of_its_reply_at_a_time() {
    const SHORT: usize = (16 << 10) - 1;
    const COUNT: usize = 16 << 10;
    let (server, address) = serve(|limits| {
        limits.table.bytes = 16 << 20;
        limits.write_timeout = HANG;
    });
    client(address, HANG).set("short", vec![7; SHORT]).unwrap();
    let bystander = Bystander::watch(address);
    let mut raw = Raw::greeted(address);
    raw.send(&list(MULTI_GET, std::iter::repeat_n(b"/short", COUNT)));
    assert_eq!(u64::from_le_bytes(raw.read()), SHORT as u64);
    let unread = server.facts().buffer_bytes;
    println!("a multi_get for 256 MB, not read: {unread} bytes of buffers");
    assert!(unread < 2 << 20, "{unread} bytes of buffers");
    let mut value = vec![0; SHORT];
    for index in 0..COUNT {
        raw.0.read_exact(&mut value).expect("the whole reply comes");
        assert!(value.iter().all(|byte| *byte == 7), "value {index}");
        if index + 1 < COUNT {
            assert_eq!(u64::from_le_bytes(raw.read()), SHORT as u64);
        }
    }
    raw.sync();
    assert_eq!(server.facts().buffer_bytes, 0);
    bystander.report("multi_get for 256 MB of short values");
}

/// What a reply holds counts until it is read, even if the keys have other values by then.
#[test]
fn values_that_are_replaced_while_an_unread_reply_holds_them_count_against_the_limit() {
    const COUNT: usize = 1000;
    let value = [7; 8 << 10];
    let (server, address) = serve(|limits| limits.write_timeout = HANG);
    let store = client(address, HANG);
    let names: Vec<String> = keys(COUNT).collect();
    for name in &names {
        store.set(&name[1..], value).unwrap();
    }
    store.ping().unwrap();
    let before = server.facts().table_bytes;
    let mut raw = Raw::greeted(address);
    let asked = names.iter().cycle().take(8 * COUNT).collect::<Vec<_>>().into_iter();
    raw.send(&list(MULTI_GET, asked));
    raw.read::<8>();
    for name in &names {
        store.set(&name[1..], "short").unwrap();
    }
    store.ping().unwrap();
    let held = server.facts().table_bytes;
    assert!(held >= before, "{held} bytes are counted, {before} were before");
    drop(raw);
    until("nothing holds the old values", || server.facts().table_bytes < COUNT * 1000);
}

#[test]
fn a_client_that_closed_its_sending_side_still_gets_all_answers() {
    let (server, address) = serve(|_| {});
    let store = client(address, HANG);
    store.set("large", vec![7; 1 << 20]).unwrap();
    let mut raw = Raw::greeted(address);
    raw.send(&list(MULTI_GET, [b"/large"; 64].iter()));
    raw.0.shutdown(std::net::Shutdown::Write).unwrap();
    // Two rounds of the server's loop later it has read the end, and cannot have sent all.
    (0..2).for_each(|_| assert!(store.ping().is_ok()));
    assert!(server.facts().bytes_out < 64 << 20);
    for _ in 0..64 {
        assert_eq!(raw.read_value().len(), 1 << 20);
    }
    assert_eq!(raw.until_closed(), b"");
    until("the connection is closed", || server.facts().connections == 1);
}

#[test]
fn pings_with_unread_answers_are_held_back() {
    let (server, address) = serve(|limits| {
        limits.output = 256 << 10;
        limits.write_timeout = Duration::from_millis(500);
    });
    let bystander = Bystander::watch(address);
    let mut raw = Raw::greeted(address);
    // The kernel's buffers alone hold the answers to a million.
    let sent = raw.stuff(&[PING, 1, 2, 3, 4].repeat(5_000_000), Duration::from_millis(200));
    let mut most = 0;
    until("it is cut off", || {
        let facts = server.facts();
        most = most.max(facts.buffer_bytes);
        facts.closed.contains_key(&Closed::WriteTimeout)
    });
    println!("5,000,000 pings: the server took at most {sent} bytes and held {most}");
    assert!(most < 2 << 20);
    bystander.report("pings, not read");
}

#[test]
fn a_client_that_reads_late_gets_everything_in_order() {
    let (_server, address) = with_value(|limits| limits.output = 1 << 20);
    let mut raw = Raw::greeted(address);
    let mut reader = Raw(raw.0.try_clone().unwrap());
    let asking = std::thread::spawn(move || {
        for round in 0..200_u32 {
            raw.send(&message(GET, &[b"/large"]));
            raw.send(&[&[PING], round.to_le_bytes().as_slice()].concat());
        }
        raw
    });
    for round in 0..200_u32 {
        assert_eq!(reader.read_value().len(), VALUE);
        assert_eq!(u32::from_le_bytes(reader.read()), round);
    }
    drop(asking.join().unwrap());
}

/// Each of these replies is a short header and a shared value; the header must not take a whole buffer.
#[test]
fn many_replies_of_shared_values_cost_little_and_are_counted() {
    let (server, address) = serve(|limits| limits.write_timeout = Duration::from_secs(5));
    client(address, HANG).set("shared", vec![7; 16 << 10]).unwrap();
    let mut held: Vec<Raw> = (0..20).map(|_| Raw::greeted(address)).collect();
    let before = resident();
    held.iter_mut().for_each(|raw| raw.send(&message(GET, &[b"/shared"]).repeat(1200)));
    until("all were asked", || server.facts().operations.get("get").is_some_and(|gets| *gets >= 20 * 900));
    let (grown, counted) = (resident().saturating_sub(before), server.facts().buffer_bytes);
    println!("20 × 1,000 replies of 16 KB not read: {grown} bytes of memory, {counted} counted");
    assert!(grown < 24 << 20, "{grown} bytes");
    assert!(counted * 4 > grown.min(20 * 1000 * 64), "{counted} bytes counted of {grown}");
}

#[test]
fn expensive_requests_of_one_byte_get_their_turn_however_many_clients_send_them() {
    let (server, address) = serve(|_| {});
    let names: Vec<String> = keys(100).collect();
    let mut waiting: Vec<Raw> = (0..500).map(|_| Raw::greeted(address)).collect();
    waiting.iter_mut().for_each(|raw| raw.send(&list(WAIT, names.iter())));
    until("all wait", || server.facts_with(0).waiters_count == 500);
    let bystander = Bystander::watch(address);
    let mut asking: Vec<Raw> = (0..100).map(|_| Raw::greeted(address)).collect();
    // What follows the expensive request waits with it, and is answered after it.
    asking
        .iter_mut()
        .for_each(|raw| raw.send(&[&[INFO, PING, 1, 2, 3, 4, LIST_KEYS], &[PING, 5, 6, 7, 8][..]].concat()));
    for raw in &mut asking {
        let facts: tenfold_store::Facts = serde_json::from_slice(&raw.read_value()).unwrap();
        assert_eq!((facts.waiters_count, facts.waiters.len()), (500, 500));
        assert_eq!(facts.waiters[499].keys_count, 100);
        assert!(facts.waiters[499].keys.contains("`/key/0`"), "{}", facts.waiters[499].keys);
        assert_eq!(raw.read(), [1, 2, 3, 4]);
        let count = u64::from_le_bytes(raw.read());
        (0..count).for_each(|_| drop(raw.read_value()));
        assert_eq!(raw.read(), [5, 6, 7, 8]);
    }
    bystander.report("facts for 100 clients");
    // The last to join is the first to leave.
    while waiting.pop().is_some() {}
    until("all have left", || server.facts_with(0).waiters_count == 0);
}

// ── many connections ───────────────────────────────────────────────────────────────────────────────────────

#[test]
fn beyond_the_limit_of_connections_the_next_is_closed_and_a_free_place_is_used_again() {
    let (server, address) = serve(|limits| limits.connections = 10);
    let bystander = Bystander::watch(address);
    let mut inside: Vec<Raw> = (0..9).map(|_| Raw::greeted(address)).collect();
    inside.iter_mut().for_each(Raw::sync);
    for _ in 0..20 {
        assert_eq!(Raw::connect(address).until_closed(), b"");
    }
    assert_eq!(closed(&server, Closed::Connections), 20);
    inside.iter_mut().for_each(Raw::sync);
    drop(inside.pop());
    until("it is noticed", || server.facts().connections == 9);
    let mut fresh = Raw::greeted(address);
    fresh.sync();
    inside.iter_mut().for_each(Raw::sync);
    bystander.report("connection limit");
}

#[test]
fn ten_thousand_connections_that_come_and_go_leave_nothing() {
    let (server, address) = serve(|_| {});
    let bystander = Bystander::watch(address);
    for _ in 0..10_000 {
        drop(TcpStream::connect(address).unwrap());
    }
    let start = Instant::now();
    client(address, HANG).ping().unwrap();
    println!("fresh client after 10,000 that came and went: {:.1} ms", start.elapsed().as_secs_f64() * 1e3);
    until("all are closed", || server.facts().connections == 1);
    assert_eq!(server.facts().buffer_bytes, 0);
    bystander.report("10,000 connect and drop");
}

#[test]
fn many_clients_that_die_while_they_wait_leave_nothing() {
    let (server, address) = serve(|_| {});
    let bystander = Bystander::watch(address);
    let mut waiting: Vec<Raw> = (0..1000).map(|_| Raw::greeted(address)).collect();
    for (index, raw) in waiting.iter_mut().enumerate() {
        // One key that all wait for, and one that only this client waits for.
        let own = format!("/own/{index}");
        raw.send(&list(WAIT, [b"/all".as_slice(), own.as_bytes()].into_iter()));
    }
    until("all wait", || server.facts().waiters_count == 1000);
    let bytes = server.facts().table_bytes;
    drop(waiting);
    until("all are forgotten", || server.facts().waiters_count == 0);
    println!("1,000 waiters held {bytes} bytes, then {}", server.facts().table_bytes);
    assert!(server.facts().table_bytes < 1000);
    let store = client(address, HANG);
    store.set("all", "1").unwrap();
    store.ping().unwrap();
    bystander.report("1,000 waiters die");
}

#[test]
fn an_item_pushed_for_a_client_that_died_goes_to_the_next() {
    let (server, address) = serve(|_| {});
    let mut first = Raw::greeted(address);
    first.send(&list(WAIT, ["/queue"].into_iter()));
    until("the first waits", || server.facts().waiters_count == 1);
    let mut second = Raw::greeted(address);
    second.send(&list(WAIT, ["/queue"].into_iter()));
    until("both wait", || server.facts().waiters_count == 2);
    client(address, HANG).queue_push("queue", "item").unwrap();
    assert_eq!(first.read(), [0]);
    drop(first);
    assert_eq!(second.read(), [0]);
    second.send(&message(QUEUE_POP, &[b"/queue"]));
    assert_eq!(second.read(), 1_u64.to_le_bytes());
    assert_eq!(second.read_value(), b"item");
}

// ── memory ─────────────────────────────────────────────────────────────────────────────────────────────────

#[test]
fn a_full_store_refuses_writes_and_goes_on_reading_until_something_is_deleted() {
    let (server, address) = serve(|limits| limits.table.bytes = 1 << 20);
    let bystander = Bystander::watch(address);
    let store = client(address, HANG);
    let value = vec![7; 64 << 10];
    let mut stored = 0;
    while store.set(format!("fill/{stored}"), &value).and_then(|()| store.ping()).is_ok() {
        stored += 1;
        assert!(stored < 16);
    }
    println!("a store of 1 MiB took {stored} values of 64 KiB");
    assert!(stored >= 14);
    let writes: [(&str, Vec<u8>); 5] = [
        ("set", message(SET, &[b"/more", &value])),
        ("append", message(APPEND, &[b"/more", &value])),
        ("compare_set", message(COMPARE_SET, &[b"/more", b"", &value])),
        ("queue_push", message(QUEUE_PUSH, &[b"/more", &value])),
        ("multi_set", list(MULTI_SET, [b"/a".as_slice(), b"1", b"/more", &value].into_iter())),
    ];
    for (what, write) in &writes {
        let mut raw = Raw::greeted(address);
        raw.send(write);
        assert_eq!(raw.until_closed(), b"", "{what}");
    }
    until("all are counted", || closed(&server, Closed::Full) == 1 + writes.len() as u64);
    for index in 0..stored {
        assert!(*store.get(format!("fill/{index}")).unwrap() == *value);
    }
    assert!(!store.check(&["more"]).unwrap() && !store.check(&["a"]).unwrap());
    assert!(store.delete_key("fill/0").unwrap());
    store.set("more", &value).unwrap();
    assert!(*store.get("more").unwrap() == *value);
    bystander.report("full store");
}

#[test]
fn too_many_keys_and_too_many_items_are_refused() {
    let (server, address) = serve(|limits| {
        limits.table.keys = 100;
        limits.table.queue_items = 10;
    });
    let mut raw = Raw::greeted(address);
    for index in 0..200 {
        raw.try_send(&message(SET, &[format!("/{index}").as_bytes(), b""]));
    }
    raw.until_closed();
    let mut raw = Raw::greeted(address);
    raw.try_send(&message(QUEUE_PUSH, &[b"/q", b""]).repeat(20));
    raw.until_closed();
    let facts = server.facts();
    assert_eq!((facts.keys, facts.queue_items, facts.closed[&Closed::Full]), (100, 10, 2));
}

#[test]
fn buffers_count_as_memory_too() {
    let (server, address) = serve(|limits| limits.table.bytes = 4 << 20);
    let bystander = Bystander::watch(address);
    // Five uploads of 8 MiB that never end, into 4 MiB.
    let mut uploads: Vec<Raw> = (0..5).map(|_| Raw::greeted(address)).collect();
    let part = &message(SET, &[b"/upload", &vec![7; 8 << 20]])[..6 << 20];
    for raw in &mut uploads {
        raw.try_send(part);
    }
    until("they are refused", || closed(&server, Closed::Memory) == 5);
    assert_eq!(server.facts().buffer_bytes, 0);
    bystander.report("uploads beyond the memory limit");
}

/// Each of them holds little, and has held it longer than the client that needs memory now.
#[test]
fn connections_that_hoard_memory_are_closed_first() {
    let (server, address) = serve(|limits| limits.table.bytes = 4 << 20);
    let limit = (4 << 20) + (4 << 20) / 8;
    let part = &message(SET, &[b"/upload", &vec![7; 1 << 20]])[..40_000];
    let mut hoarders: Vec<Raw> = Vec::new();
    for count in 1..=200 {
        let mut raw = Raw::greeted(address);
        raw.send(part);
        hoarders.push(raw);
        until("it has arrived", || server.facts().accepted >= count);
    }
    until("the oldest are closed", || closed(&server, Closed::Memory) > 50);
    assert!(server.facts().buffer_bytes <= limit, "{:?}", server.facts());
    let honest = client(address, HANG);
    honest.set("long", vec![7; 2 << 20]).unwrap();
    assert_eq!(honest.get("long").unwrap().len(), 2 << 20);
    assert_eq!(hoarders[0].until_closed(), b"", "the oldest is closed");
    hoarders[199].send(&message(SET, &[b"/upload", &vec![7; 1 << 20]])[40_000..]);
    hoarders[199].sync();
}

#[test]
fn popping_unknown_queues_and_asking_for_unknown_keys_leaves_nothing() {
    let (server, address) = serve(|_| {});
    let bystander = Bystander::watch(address);
    const NAMES: usize = 300_000;
    let mut raw = Raw::greeted(address);
    let mut reader = Raw(raw.0.try_clone().unwrap());
    let asking = std::thread::spawn(move || {
        let mut pops = Vec::new();
        for index in 0..NAMES {
            pops.extend(message(QUEUE_POP, &[format!("/unknown/{index}").as_bytes()]));
        }
        raw.send(&pops);
        raw
    });
    let mut answers = vec![1; 8 * NAMES];
    reader.0.read_exact(&mut answers).unwrap();
    assert!(answers.iter().all(|byte| *byte == 0));
    let mut raw = asking.join().unwrap();
    raw.send(&list(CHECK, keys(MANY)));
    assert_eq!(raw.read(), [1]);
    raw.send(&message(GET, &[b"/unknown"]));
    assert_eq!(raw.read_value(), b"");
    let facts = server.facts();
    println!("{NAMES} pops of unknown queues: {} bytes in the table", facts.table_bytes);
    assert!(facts.table_bytes < 1000 && facts.queue_items == 0);
    bystander.report("300,000 pops of unknown queues");
}

/// A wait is charged for what it holds until it ends, including names of keys that were set and deleted
/// meanwhile.
#[test]
fn a_long_wait_is_charged_for_all_it_holds() {
    const KEYS: usize = 500;
    let (server, address) = serve(|limits| limits.table.bytes = 8 << 20);
    let store = client(address, HANG);
    let mut waiting = Vec::new();
    // Each wait holds 2 MB of names; all its keys except the last are set and deleted.
    for client in 0..20 {
        let names: Vec<String> =
            (0..KEYS).map(|key| format!("/{client}/{key}/{}", "n".repeat(4 << 10))).collect();
        let mut raw = Raw::greeted(address);
        raw.try_send(&list(WAIT, names.iter())); // it may be cut off before it has said all
        waiting.push(raw);
        for name in &names[1..] {
            let set_and_gone = store.set(&name[1..], "").and_then(|()| store.delete_key(&name[1..]));
            if set_and_gone.is_err() {
                break;
            }
        }
    }
    until("those that do not fit are refused", || {
        let facts = server.facts();
        facts.waiters_count as u64 + facts.closed.values().sum::<u64>() >= 20
    });
    let facts = server.facts();
    println!("{} waits of 2 MB in a store of 8 MB, {} bytes counted", facts.waiters_count, facts.table_bytes);
    assert!(facts.waiters_count <= 4, "{} waits", facts.waiters_count);
}

// ── waiting ────────────────────────────────────────────────────────────────────────────────────────────────

#[test]
fn a_second_wait_on_one_connection_closes_it() {
    let (server, address) = serve(|_| {});
    let bystander = Bystander::watch(address);
    let mut raw = Raw::greeted(address);
    let mut waits = Vec::new();
    for index in 0..200_000 {
        waits.extend(list(WAIT, [format!("/wait/{index}")].into_iter()));
    }
    raw.try_send(&waits);
    assert_eq!(raw.until_closed(), b"");
    until("it is counted", || closed(&server, Closed::AlreadyWaiting) == 1);
    let facts = server.facts();
    assert_eq!(facts.waiters_count, 0);
    assert!(facts.table_bytes < 1000, "{} bytes", facts.table_bytes);
    bystander.report("200,000 waits");
}

#[test]
fn a_wait_for_as_many_keys_as_allowed_ends_when_all_are_set_and_can_be_cancelled() {
    let (server, address) = serve(|_| {});
    let bystander = Bystander::watch(address);
    let start = Instant::now();
    let mut waiter = Raw::greeted(address);
    waiter.send(&list(WAIT, keys(MANY)));
    until("it waits", || server.facts().waiters_count == 1);
    let parked = start.elapsed();
    let mut canceller = Raw::greeted(address);
    canceller.send(&list(WAIT, keys(MANY)));
    until("both wait", || server.facts().waiters_count == 2);
    let cancelling = Instant::now();
    canceller.send(&[CANCEL_WAIT]);
    assert_eq!(canceller.read(), [1]);
    let cancelled = cancelling.elapsed();
    let setting = Instant::now();
    let mut writer = Raw::greeted(address);
    writer.send(&list(MULTI_SET, pairs(MANY).into_iter()));
    assert_eq!(waiter.read(), [0]);
    println!("{MANY} keys: parked in {parked:?}, cancelled in {cancelled:?}, set in {:?}", setting.elapsed());
    assert_eq!(server.facts().waiters_count, 0);
    canceller.sync();
    bystander.report("a wait for 131,072 keys");
}

fn pairs(count: usize) -> Vec<String> {
    keys(count).enumerate().flat_map(|(index, key)| [key, format!("value {index}")]).collect()
}

#[test]
fn an_honest_check_of_as_many_keys_as_allowed_is_answered() {
    let (_server, address) = serve(|_| {});
    let bystander = Bystander::watch(address);
    let mut raw = Raw::greeted(address);
    raw.send(&list(MULTI_SET, pairs(MANY).into_iter()));
    let start = Instant::now();
    raw.send(&list(CHECK, keys(MANY)));
    assert_eq!(raw.read(), [0]);
    println!("check of {MANY} keys: {:?}", start.elapsed());
    bystander.report("check of 131,072 keys");
}

// ── MULTI_SET is one step: all or nothing ──────────────────────────────────────────────────────────────────

#[test]
fn a_multi_set_cut_anywhere_sets_nothing() {
    let (server, address) = serve(|_| {});
    let bystander = Bystander::watch(address);
    let whole = list(MULTI_SET, ["/one", "1", "/two", "22", "/three", "333"].into_iter());
    let store = client(address, HANG);
    for cut in 0..whole.len() {
        let mut raw = Raw::greeted(address);
        raw.send(&[&[PING, 1, 2, 3, 4], &whole[..cut]].concat());
        raw.read::<4>();
        drop(raw);
        assert!(!store.check(&["one"]).unwrap(), "cut at {cut}");
    }
    until("all are closed", || server.facts().connections == 2);
    for key in ["one", "two", "three"] {
        assert!(!store.check(&[key]).unwrap(), "{key}");
    }
    let mut raw = Raw::greeted(address);
    raw.send(&whole);
    raw.sync();
    assert!(store.check(&["one", "two", "three"]).unwrap());
    bystander.report("multi_set cut at every byte");
}

#[test]
fn the_late_rest_of_a_multi_set_is_applied_once_and_as_one() {
    let (server, address) = serve(|_| {});
    let whole = list(MULTI_SET, ["/one", "old", "/two", "old"].into_iter());
    let store = client(address, HANG);
    for cut in 1..whole.len() {
        store.set("one", "newer").unwrap();
        let mut raw = Raw::greeted(address);
        raw.sync();
        let before = server.facts().bytes_in;
        raw.send(&whole[..cut]);
        until("the first part has arrived", || server.facts().bytes_in >= before + cut as u64);
        assert_eq!(&*store.get("one").unwrap(), b"newer", "nothing is applied before the end");
        raw.send(&whole[cut..]);
        raw.sync();
        assert_eq!(&*store.get("one").unwrap(), b"old", "then everything is");
        store.set("one", "newest").unwrap();
        raw.send(&[PING, 1]); // more bytes on that connection do not bring the old value back
        raw.send(&[2, 3, 4]);
        assert_eq!(raw.read(), [1, 2, 3, 4]);
        assert_eq!(&*store.get("one").unwrap(), b"newest");
    }
}

#[test]
fn a_large_multi_set_in_small_pieces_takes_linear_time() {
    let (server, address) = serve(|_| {});
    let bystander = Bystander::watch(address);
    let time = |count: usize| {
        let whole = list(MULTI_SET, pairs(count).into_iter());
        let mut raw = Raw::greeted(address);
        let start = Instant::now();
        whole.chunks(4 << 10).for_each(|piece| raw.send(piece));
        raw.sync();
        start.elapsed()
    };
    let (small, large) = (time(MANY / 8), time(MANY));
    println!("multi_set in pieces of 4 KB: {small:?} for {} keys, {large:?} for {MANY}", MANY / 8);
    assert_eq!(server.facts().keys, MANY + 2, "the bystander has two");
    assert!(large < HANG / 8);
    bystander.report("multi_set of 131,072 keys in 4 KB pieces");
}

// ── cheap to ask, expensive to answer ──────────────────────────────────────────────────────────────────────

#[test]
fn a_flood_of_appends_to_a_long_value_does_not_hold_up_others() {
    let (_server, address) = serve(|_| {});
    let mut raw = Raw::greeted(address);
    raw.send(&message(SET, &[b"/long", &vec![7; 8 << 20]]));
    raw.sync();
    let bystander = Bystander::watch(address);
    raw.send(&message(APPEND, &[b"/long", b"x"]).repeat(4000));
    raw.sync();
    let stall = bystander.report("4,000 appends to 8 MB"); // a copy of each would take far longer
    assert!(stall < HANG / 8, "{stall:?}");
}

#[test]
fn a_flood_of_questions_about_many_waiters_does_not_hold_up_others() {
    let (server, address) = serve(|limits| limits.write_timeout = Duration::from_secs(2));
    // One wait of which all keys except the last have been set.
    let mut waiter = Raw::greeted(address);
    waiter.send(&list(WAIT, keys(MANY)));
    let mut writer = Raw::greeted(address);
    writer.send(&list(MULTI_SET, pairs(MANY).split_off(2).into_iter()));
    writer.sync();
    assert_eq!(server.facts().waiters_count, 1);
    let bystander = Bystander::watch(address);
    let mut raw = Raw::greeted(address);
    raw.send(&[INFO; 1000]);
    (0..1000).for_each(|_| drop(raw.read_value()));
    let stall = bystander.report("1,000 infos about a wait of 131,072 keys");
    assert!(stall < HANG / 8, "{stall:?}");
}

// ── no descriptors left ────────────────────────────────────────────────────────────────────────────────────

/// Not a test itself: the server of the next one, in a process that has few descriptors.
#[test]
fn server_with_few_descriptors() {
    if std::env::var_os("TENFOLD_FEW_DESCRIPTORS").is_none() {
        return;
    }
    let (server, address) = serve(|_| {});
    println!("listening on {address}");
    std::io::stdin().read_line(&mut String::new()).unwrap();
    let facts = server.facts();
    println!("closed {}", facts.closed.get(&Closed::Connections).copied().unwrap_or(0));
}

struct FewDescriptors(Child);

impl Drop for FewDescriptors {
    fn drop(&mut self) {
        let _ = self.0.kill(); // it may have ended by itself
        let _ = self.0.wait();
    }
}

#[test]
fn without_descriptors_old_clients_are_served_new_ones_turned_away_and_the_server_does_not_spin() {
    let program = std::env::current_exe().unwrap();
    let child = Command::new("sh")
        .args(["-c", "ulimit -n 256; exec \"$0\" \"$@\""])
        .arg(program)
        .args(["--exact", "server_with_few_descriptors", "--nocapture", "--test-threads=1"])
        .env("TENFOLD_FEW_DESCRIPTORS", "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut child = FewDescriptors(child);
    let mut lines = BufReader::new(child.0.stdout.take().unwrap()).lines().map(Result::unwrap);
    let mut told = |word: &str| -> String {
        // The test harness prints the name of the test on the same line.
        lines.find_map(|line| line.split_once(word).map(|(_, rest)| rest.trim().to_string())).unwrap()
    };
    let address: SocketAddr = told("listening on").parse().unwrap();

    let bystander = Bystander::watch(address);
    let mut crowd: Vec<Raw> = (0..400).map(|_| Raw::connect(address)).collect();
    // Those inside are answered; the others are closed sooner or later, one by one.
    let mut served = 0;
    for raw in &mut crowd[..200] {
        raw.send(&HELLO);
        raw.sync();
        served += 1;
    }
    let (cpu, start) = (cpu_seconds(child.0.id()), Instant::now());
    let mut turned_away = 0;
    while start.elapsed() < Duration::from_millis(800) {
        // An event that the exhausted server has to handle: another client that connects and disconnects.
        drop(TcpStream::connect_timeout(&address, Duration::from_millis(20)));
        crowd[0].sync();
        std::thread::park_timeout(Duration::from_millis(20));
        turned_away += 1;
    }
    let share = (cpu_seconds(child.0.id()) - cpu) / start.elapsed().as_secs_f64();
    println!("{served} served, {turned_away} more came; the server used {:.0} % of a core", share * 100.0);
    assert!(share < 0.6, "a busy loop takes a whole core");
    crowd.clear();
    until("there is room again", || {
        let Ok(stream) = TcpStream::connect(address) else { return false };
        let mut raw = Raw(stream);
        raw.0.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        raw.try_send(&[HELLO.as_slice(), &[PING, 1, 2, 3, 4]].concat()) == 10
            && raw.0.read_exact(&mut [0; 4]).is_ok()
    });
    bystander.report("no descriptors left");
    child.0.stdin.take().unwrap().write_all(b"\n").unwrap();
    assert!(told("closed").parse::<u64>().unwrap() > 0);
}

/// User and system time of a process.
fn cpu_seconds(pid: u32) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    let ticks = fields[11].parse::<f64>().unwrap() + fields[12].parse::<f64>().unwrap();
    ticks / 100.0 // USER_HZ, fixed in the interface
}

/// Bytes of memory of this process.
fn resident() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

// ── a malicious server against our client ──────────────────────────────────────────────────────────────────

/// A server of one connection that greets properly and then answers the first message with `answer`.
fn mean(answer: &'static [u8], then: After) -> (TcpStore, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        // Only the first connection: a client that reconnects is refused.
        let (mut stream, _) = listener.accept().unwrap();
        drop(listener);
        let mut greeting = [0; 10];
        stream.read_exact(&mut greeting).unwrap();
        stream.write_all(&greeting[6..]).unwrap();
        let mut buffer = [0; 4096];
        if !matches!(stream.read(&mut buffer), Ok(1..)) {
            return;
        }
        // A client that timed out has closed its end.
        let _ = stream.write_all(answer);
        match then {
            After::Close => {}
            After::Silence => while matches!(stream.read(&mut buffer), Ok(1..)) {},
            After::More(more) => while stream.write_all(more).is_ok() {},
        }
    });
    let options = TcpStoreOptions::new("127.0.0.1", address.port()).timeout(PATIENCE);
    (TcpStore::open(options).unwrap(), address)
}

#[derive(Clone, Copy)]
enum After {
    Close,
    Silence,
    More(&'static [u8]),
}

/// How long our client waits for a malicious server, and what it may take beyond that: a second to cancel,
/// and delays of a busy machine. A client that ignores its timeout waits forever.
const PATIENCE: Duration = Duration::from_millis(600);
const GRACE: Duration = Duration::from_secs(10);

fn fails<T: std::fmt::Debug>(
    answer: &'static [u8],
    then: After,
    call: impl FnOnce(&TcpStore) -> tenfold_store::Result<T>,
) -> (ErrorKind, String) {
    let (store, address) = mean(answer, then);
    let start = Instant::now();
    let error = call(&store).expect_err("the error is detected");
    assert!(start.elapsed() < PATIENCE + GRACE, "{error}: {:?}", start.elapsed());
    (error.kind(), error.to_string().replace(&address.to_string(), "HERE"))
}

const TOO_LONG: [u8; 8] = (1_u64 << 40).to_le_bytes();
const HINT: &str = "\n  hint: check whether another program listens on that port";

#[test]
fn a_client_refuses_absurd_lengths() {
    let set = |store: &TcpStore| store.compare_set("k", "", "v");
    for (answer, number) in [
        (&TOO_LONG, "1099511627776"),
        (&(1_u64 << 63).to_le_bytes(), "9223372036854775808"),
        (&u64::MAX.to_le_bytes(), "18446744073709551615"),
    ] {
        let answer: &'static [u8] = Box::leak(answer.to_vec().into_boxed_slice());
        let (kind, text) = fails(answer, After::Silence, set);
        assert_eq!(kind, ErrorKind::Protocol);
        let text = without_time(&text);
        assert_eq!(
            text,
            format!(
                "store compare_set `k` at HERE failed: the server announces a value of {number} bytes{HINT}"
            )
        );
    }
    for (answer, number) in [(&u64::MAX.to_le_bytes(), "-1"), (&TOO_LONG, "1099511627776")] {
        let answer: &'static [u8] = Box::leak(answer.to_vec().into_boxed_slice());
        let (kind, text) = fails(answer, After::Silence, |store| store.list_keys());
        assert_eq!(kind, ErrorKind::Protocol);
        assert!(text.contains(&format!("the server announces {number} keys")), "{text}");
    }
    let popped: &[u8] = &[1, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff];
    let popped: &'static [u8] = Box::leak(popped.to_vec().into_boxed_slice());
    assert_eq!(fails(popped, After::Silence, |store| store.try_queue_pop("q")).0, ErrorKind::Protocol);
    let (kind, _) = fails(&[0xff; 8], After::Silence, |store| store.try_queue_pop("q"));
    assert_eq!(kind, ErrorKind::QueueEmpty);
}

/// Leaves out ` after 12 ms`, which is there only if it took a millisecond.
fn without_time(text: &str) -> String {
    let Some((before, rest)) = text.split_once(" failed after ") else { return text.into() };
    format!("{before} failed: {}", rest.split_once(": ").unwrap().1)
}

#[test]
fn a_client_keeps_its_timeout_whatever_the_server_does() {
    let half_a_value: &[u8] = &[100, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3];
    type Call = fn(&TcpStore) -> tenfold_store::Result<()>;
    let cases: [(&str, &'static [u8], Call); 7] = [
        ("silence after a short value", half_a_value, |store| store.compare_set("k", "", "v").map(drop)),
        ("no answer to add", &[], |store| store.add("k", 1).map(drop)),
        ("no answer to check", &[], |store| store.check(&["k"]).map(drop)),
        ("no answer to list_keys", &[], |store| store.list_keys().map(drop)),
        ("no answer to wait nor cancel", &[], |store| store.wait(&["k"])),
        ("no answer to barrier nor cancel", &[], |store| store.barrier("k", 2)),
        ("half a number", &[1, 2, 3], |store| store.num_keys().map(drop)),
    ];
    for (what, answer, call) in cases {
        let (store, address) = mean(answer, After::Silence);
        let start = Instant::now();
        let error = call(&store).expect_err(what);
        let took = start.elapsed();
        println!("{what}: {took:?} of {PATIENCE:?}");
        assert!(took >= PATIENCE && took < PATIENCE + GRACE, "{what}: {took:?}");
        assert_eq!(error.kind(), ErrorKind::Timeout, "{what}");
        let text = error.to_string();
        assert!(text.contains(&format!(" at {address} failed after ")), "{text}");
        assert!(text.ends_with("the server did not answer in time\n  hint: check whether the server's host is overloaded, frozen or unreachable"), "{text}");
    }
}

/// A server that always has one more byte must not keep a client beyond its timeout either.
#[test]
fn a_client_keeps_its_timeout_when_the_answer_never_ends() {
    const COUNT: [u8; 8] = (1_u64 << 26).to_le_bytes();
    // Endless empty keys; each is eight bytes on the wire.
    let (kind, text) = fails(&COUNT, After::More(&[0; 64 << 10]), |store| store.list_keys());
    assert_eq!(kind, ErrorKind::Timeout, "{text}");
}

#[test]
fn a_client_detects_wrong_bytes() {
    let (kind, text) = fails(&[7], After::Silence, |store| store.wait(&["k"]));
    assert_eq!(kind, ErrorKind::Protocol);
    let expected = format!("store wait `k` at HERE failed: the server answered 7, expected 0{HINT}");
    assert_eq!(without_time(&text), expected);
    let (kind, text) = fails(&[7], After::Silence, |store| store.check(&["k"]));
    assert_eq!(kind, ErrorKind::Protocol);
    let expected = format!("store check `k` at HERE failed: the server answered 7, expected 0 or 1{HINT}");
    assert_eq!(without_time(&text), expected);
    let (kind, _) = fails(&[1], After::Silence, |store| store.barrier("k", 2));
    assert_eq!(kind, ErrorKind::Protocol);
    let (kind, text) = fails(b"HTTP", After::Silence, |store| store.ping());
    assert_eq!(kind, ErrorKind::Protocol);
    assert!(text.contains("unexpected response to a ping"), "{text}");
}

#[test]
fn a_client_reports_a_server_that_closes_mid_reply_and_then_a_lost_store() {
    let (store, address) = mean(&[100, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3], After::Close);
    let error = store.compare_set("k", "", "v").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Lost);
    let text = without_time(&error.to_string());
    assert!(
        text.starts_with(&format!(
            "store compare_set `k` at {address} failed: the server closed the connection\n  hint: "
        )),
        "{text}"
    );
    let start = Instant::now();
    let error = store.num_keys().unwrap_err();
    assert!(start.elapsed() < PATIENCE + GRACE);
    assert_eq!(error.kind(), ErrorKind::Lost);
    let expected = format!(
        "store num_keys  at {address} failed after {}: the store is lost: no store answered ({address}: connection \
         refused) (it was lost earlier: the server closed the connection)\n  hint: check whether the server has exited; if it \
         has, its keys are lost",
        tenfold_store::show_duration(error.scene().elapsed)
    );
    assert_eq!(error.to_string().replace("num_keys at", "num_keys  at"), expected);
}

#[test]
fn a_client_detects_that_another_program_answers() {
    for (answer, reason) in [
        (b"HTTP/1.1 400 Bad Request\r\n".as_slice(), "not a store: it answered the greeting with \"HTTP\""),
        (b"".as_slice(), "accepted the connection, then closed it ("),
    ] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        std::thread::spawn(move || {
            while let Ok((mut stream, _)) = listener.accept() {
                let _ = stream.read(&mut [0; 10]);
                let _ = stream.write_all(answer);
            }
        });
        let options = TcpStoreOptions::new("127.0.0.1", address.port()).timeout(PATIENCE);
        let start = Instant::now();
        let error = TcpStore::open(options).unwrap_err();
        assert!(start.elapsed() < PATIENCE + GRACE);
        assert_eq!(error.kind(), ErrorKind::Connect);
        let text = error.to_string();
        assert!(text.contains(reason), "{text}");
        assert!(
            text.starts_with(&format!("store connect {address} ")) || text.contains(&address.to_string()),
            "{text}"
        );
    }
}

#[test]
fn a_client_whose_cancel_crosses_the_answer_is_still_in_step() {
    // The answer to the wait comes only with the answer to its cancel.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let server = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut raw = [0; 10];
        stream.read_exact(&mut raw).unwrap();
        stream.write_all(&raw[6..]).unwrap();
        let mut wait = vec![0; list(WAIT, ["/k"].into_iter()).len() + 1];
        stream.read_exact(&mut wait).unwrap();
        assert_eq!(*wait.last().unwrap(), CANCEL_WAIT);
        stream.write_all(&[0, 1]).unwrap();
        stream.read_exact(&mut [0; 1]).unwrap(); // num_keys, on the same connection
        stream.write_all(&5_u64.to_le_bytes()).unwrap();
    });
    let store = client(address, PATIENCE);
    store.wait(&["k"]).expect("it did succeed");
    assert_eq!(store.num_keys().unwrap(), 5);
    server.join().unwrap();
}
