//! A relay between real clients and a real server, when things go wrong: clients that disappear, connections that are cut,
//! servers that end, and both sides hostile.

#![expect(
    clippy::disallowed_methods,
    clippy::unwrap_used,
    reason = "tests: threads, sockets, the time things take; a helper may fail too"
)]

mod hostile;

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hostile::*;
use tenfold_store::wire::{self, MessageLimits, Status, Welcome};
use tenfold_store::{
    Closed, ErrorKind, Limits, Relay, RelayOptions, Server, ServerOptions, StoreExt, TcpStore,
    TcpStoreOptions,
};

fn serve() -> Server {
    Server::start(ServerOptions::new("127.0.0.1", 0)).unwrap()
}

fn relay_of(upstream: SocketAddr) -> Relay {
    Relay::start(RelayOptions::new("127.0.0.1", upstream.port())).unwrap()
}

fn client_of(relay: &Relay) -> TcpStore {
    client(relay.address(), HANG)
}

/// Bytes between a relay and a server, which can be stopped.
struct Valve {
    address: SocketAddr,
    is_open: Arc<AtomicBool>,
    streams: Arc<Mutex<Vec<TcpStream>>>,
}

impl Valve {
    fn new(server: SocketAddr) -> Valve {
        let target = Arc::new(Mutex::new(server));
        Valve::to(target)
    }

    fn to(server: Arc<Mutex<SocketAddr>>) -> Valve {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (is_open, streams) = (Arc::new(AtomicBool::new(true)), Arc::new(Mutex::new(Vec::new())));
        let valve = Valve { address, is_open: is_open.clone(), streams: streams.clone() };
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let target = *server.lock().unwrap();
                let Some(server) =
                    is_open.load(Ordering::SeqCst).then(|| TcpStream::connect(target).ok()).flatten()
                else {
                    continue;
                };
                for (mut from, mut to) in [
                    (client.try_clone().unwrap(), server.try_clone().unwrap()),
                    (server.try_clone().unwrap(), client.try_clone().unwrap()),
                ] {
                    std::thread::spawn(move || {
                        let _ended = std::io::copy(&mut from, &mut to);
                        let _ended = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
                    });
                }
                streams.lock().unwrap().extend([client, server]);
            }
        });
        valve
    }

    fn close(&self) {
        self.is_open.store(false, Ordering::SeqCst);
        for stream in self.streams.lock().unwrap().drain(..) {
            let _ended = stream.shutdown(Shutdown::Both);
        }
    }

    fn open(&self) {
        self.is_open.store(true, Ordering::SeqCst);
    }
}

// ── what is merged ─────────────────────────────────────────────────────────────────────────────────────────

#[test]
fn clients_that_wait_for_one_key_are_one_wait_at_the_server() {
    let server = serve();
    let relay = relay_of(server.address());
    let mut waiting: Vec<Raw> = (0..200).map(|_| Raw::greeted(relay.address())).collect();
    waiting.iter_mut().for_each(|raw| raw.send(&list(WAIT, ["/k"].iter())));
    until("all wait", || relay.facts().waiting == 200 && relay.facts().registering == 0);
    assert_eq!((relay.facts().waits, server.facts().waiters_count), (1, 1));
    assert_eq!(server.facts().connections, 1);
    client(server.address(), HANG).set("k", "v").unwrap();
    for raw in &mut waiting {
        assert_eq!(raw.read(), [0]);
    }
    assert_eq!((relay.facts().waiting, relay.facts().waits), (0, 0));
}

#[test]
fn a_relay_lists_which_client_waits_for_what() {
    let server = serve();
    let relay = relay_of(server.address());
    assert_eq!(relay.upstream_address(), server.address());
    let _idle = client_of(&relay);
    let mut waiting: Vec<Raw> = (0..3).map(|_| Raw::greeted(relay.address())).collect();
    waiting[0].send(&list(WAIT, ["/a", "/b"].iter()));
    waiting[1].send(&list(WAIT, ["/a", "/b"].iter()));
    waiting[2].send(&[message(BARRIER, &[b"/c"]), 2_i64.to_le_bytes().to_vec()].concat());
    until("all wait", || relay.waiters().len() == 3);
    for (raw, (operation, keys)) in
        waiting.iter().zip([("wait", "`/a`, `/b`"), ("wait", "`/a`, `/b`"), ("barrier", "`/c`")])
    {
        let peer = raw.0.local_addr().unwrap().to_string();
        let found: Vec<_> = relay.waiters().into_iter().filter(|waiter| waiter.peer == peer).collect();
        assert_eq!(found.len(), 1);
        let waiter = &found[0];
        assert_eq!((waiter.operation.as_str(), waiter.keys.as_str()), (operation, keys));
        assert_eq!(waiter.keys_count, keys.split(',').count());
        assert!(waiter.seconds >= 0.0);
    }
    drop(waiting.remove(0));
    until("one has left", || relay.waiters().len() == 2);
    relay.shutdown(Duration::ZERO);
    assert_eq!(relay.waiters(), []);
}

#[test]
fn a_wait_is_left_when_its_last_client_has_left_or_cancelled() {
    let server = serve();
    let relay = relay_of(server.address());
    let mut waiting: Vec<Raw> = (0..3).map(|_| Raw::greeted(relay.address())).collect();
    waiting.iter_mut().for_each(|raw| raw.send(&list(WAIT, ["/k"].iter())));
    until("all wait", || relay.facts().waiting == 3 && relay.facts().registering == 0);
    waiting.pop();
    let mut cancels = waiting.pop().unwrap();
    cancels.send(&[CANCEL_WAIT]);
    assert_eq!(cancels.read(), [1]);
    until("two have left", || relay.facts().waiting == 1);
    assert_eq!(server.facts().waiters_count, 1);
    waiting.clear();
    until("the server knows", || server.facts().waiters_count == 0);
    assert_eq!(relay.facts().waits, 0);
}

#[test]
fn an_item_pushed_for_a_client_that_leaves_goes_to_the_next_one_here_or_elsewhere() {
    let server = serve();
    let (here, there) = (relay_of(server.address()), relay_of(server.address()));
    let pusher = client(server.address(), HANG);
    let wait = |relay: &Relay, server: &Server, number: usize| {
        let mut raw = Raw::greeted(relay.address());
        let before = relay.facts().waiting;
        raw.send(&list(WAIT, ["/q"].iter()));
        until("it waits", || relay.facts().waiting == before + 1 && relay.facts().registering == 0);
        assert!(server.facts().waiters_count <= number);
        raw
    };
    let mut first = wait(&here, &server, 1);
    let mut second = wait(&here, &server, 2);
    let mut third = wait(&there, &server, 3);
    pusher.queue_push("q", "item").unwrap();
    assert_eq!(first.read(), [0]);
    drop(first); // without a pop
    // The other client of the same relay waits again, behind the client of the other relay.
    assert_eq!(third.read(), [0]);
    third.send(&[PING, 1, 2, 3, 4]); // a ping is not a request: the item is still its own
    assert_eq!(third.read(), [1, 2, 3, 4]);
    third.send(&message(GET, &[b"/other"]));
    assert_eq!(third.read_value(), b"", "it asks for something else");
    assert_eq!(second.read(), [0]);
    second.send(&message(QUEUE_POP, &[b"/q"]));
    assert_eq!(i64::from_le_bytes(second.read()), 1);
    assert_eq!(second.read_value(), b"item");
    assert_eq!((server.facts().queue_items, server.facts().waiters_count), (0, 0));
}

#[test]
fn each_push_wakes_one_client_of_a_relay_and_the_oldest_first() {
    let server = serve();
    let relay = relay_of(server.address());
    let mut waiting: Vec<Raw> = (1..=5)
        .map(|count| {
            let mut raw = Raw::greeted(relay.address());
            raw.send(&list(WAIT, ["/q"].iter()));
            until("it waits", || relay.facts().waiting == count && relay.facts().registering == 0);
            raw
        })
        .collect();
    let pusher = client(server.address(), HANG);
    for item in ["a", "b"] {
        pusher.queue_push("q", item).unwrap(); // neither is popped before both are pushed
    }
    for raw in &mut waiting[..2] {
        assert_eq!(raw.read(), [0]);
    }
    waiting[2..].iter_mut().for_each(Raw::sync); // nothing but the answer to a ping
    assert_eq!(relay.facts().waiting, 3);
    for raw in &mut waiting[..2] {
        raw.send(&message(QUEUE_POP, &[b"/q"]));
        assert!(i64::from_le_bytes(raw.read()) > 0);
        raw.read_value();
    }
    waiting[2..].iter_mut().for_each(Raw::sync);
    assert_eq!((relay.facts().waiting, server.facts().waiters_count), (3, 1));
}

#[test]
fn an_item_pushed_for_a_relay_that_is_killed_goes_to_the_next_client() {
    let server = serve();
    let valve = Valve::new(server.address());
    let relay = relay_of(valve.address);
    let mut first = Raw::greeted(relay.address());
    first.send(&list(WAIT, ["/q"].iter()));
    until("it waits", || server.facts().waiters_count == 1);
    let mut second = Raw::greeted(server.address());
    second.send(&list(WAIT, ["/q"].iter()));
    until("it waits", || server.facts().waiters_count == 2);
    valve.close();
    until("the server has noticed", || server.facts().connections == 1);
    client(server.address(), HANG).queue_push("q", "item").unwrap();
    assert_eq!(second.read(), [0], "although the relay was first");
    second.send(&message(QUEUE_POP, &[b"/q"]));
    assert_eq!(i64::from_le_bytes(second.read()), 1);
}

#[test]
fn an_item_is_not_taken_for_a_client_that_leaves_while_the_connection_is_lost() {
    let server = serve();
    let valve = Valve::new(server.address());
    let relay = relay_of(valve.address);
    let pusher = client(server.address(), HANG);
    let mut clients: Vec<Raw> = (0..3).map(|_| Raw::greeted(relay.address())).collect();
    pusher.queue_push("q", "item").unwrap();
    clients[0].send(&list(WAIT, ["/q"].iter()));
    assert_eq!(clients[0].read(), [0]);
    valve.close();
    until("the relay has noticed", || !relay.facts().is_connected);
    let mut stays = clients.pop().unwrap();
    for raw in &mut clients {
        raw.send(&message(QUEUE_POP, &[b"/q"]));
    }
    until("both have asked", || relay.facts().under_way == 2);
    drop(clients);
    until("they have left", || relay.facts().connections == 1);
    stays.send(&message(QUEUE_POP, &[b"/q"]));
    valve.open();
    assert_eq!(i64::from_le_bytes(stays.read()), 1);
    assert_eq!(stays.read_value(), b"item");
    until("all is answered", || relay.facts().under_way == 0);
    assert_eq!(server.facts().queue_items, 0);
}

#[test]
fn a_barrier_through_relays_opens_when_all_have_arrived() {
    let server = serve();
    let relays = [relay_of(server.address()), relay_of(server.address())];
    let mut clients: Vec<Raw> = (0..100).map(|index| Raw::greeted(relays[index % 2].address())).collect();
    let arrive = [message(BARRIER, &[b"/b"]), 100_i64.to_le_bytes().to_vec()].concat();
    for client in &mut clients[..99] {
        client.send(&arrive);
    }
    until("all but one have arrived", || server.value(b"/b").is_some_and(|count| &*count == b"99"));
    assert_eq!(relays[0].facts().waiting + relays[1].facts().waiting, 99);
    clients[99].send(&arrive);
    for client in &mut clients {
        assert_eq!(client.read(), [0]);
    }
    assert_eq!(server.facts().waiters_count, 0);
}

#[test]
fn a_write_is_confirmed_when_the_server_has_it() {
    let server = serve();
    let relay = relay_of(server.address());
    let (here, there) = (client_of(&relay), client(server.address(), HANG));
    for round in 0..200 {
        here.set("k", round.to_string()).unwrap();
        assert_eq!(&*there.get("k").unwrap(), round.to_string().as_bytes());
    }
    // A refused write fails in its own call, and costs only its own client.
    here.set("text", "not a number").unwrap();
    let other = client_of(&relay);
    assert_eq!(here.add("text", 1).unwrap_err().kind(), ErrorKind::Lost);
    assert_eq!(other.add("n", 1).unwrap(), 1);
    assert_eq!(here.add("n", 1).unwrap(), 2, "it connects again");
}

#[test]
fn the_facts_of_the_server_pass_through() {
    let server = serve();
    let relay = relay_of(server.address());
    let facts = client_of(&relay).server_facts().unwrap();
    assert_eq!((facts.address, facts.sessions), (server.address().to_string(), 1));
}

#[test]
fn large_values_pass_and_are_shared_by_many_readers() {
    let server = serve();
    let relay = relay_of(server.address());
    let value: Vec<u8> = (0..4 << 20).map(|index: usize| (index * 7) as u8).collect();
    client_of(&relay).set("large", &value).unwrap();
    let readers: Vec<_> = (0..16).map(|_| client_of(&relay)).collect();
    std::thread::scope(|scope| {
        for reader in &readers {
            scope.spawn(|| assert!(*reader.get("large").unwrap() == *value));
        }
    });
}

// ── losses ─────────────────────────────────────────────────────────────────────────────────────────────────

#[test]
fn clients_notice_nothing_but_a_pause_when_the_connection_is_lost() {
    let server = serve();
    let valve = Valve::new(server.address());
    let relay = relay_of(valve.address);
    let (waiter, counter) = (client_of(&relay), client_of(&relay));
    assert_eq!(counter.add("n", 1).unwrap(), 1);
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| waiter.get("k"));
        until("it waits", || server.facts().waiters_count == 1);
        for round in 2..6 {
            valve.close();
            until("the relay has noticed", || !relay.facts().is_connected);
            let counts = scope.spawn(|| counter.add("n", 1));
            until("the request waits", || relay.facts().under_way == 1);
            valve.open();
            assert_eq!(counts.join().unwrap().unwrap(), round);
        }
        assert_eq!(server.facts().waiters_count, 1, "it is still the same wait");
        client(server.address(), HANG).set("k", "v").unwrap();
        assert_eq!(&*waits.join().unwrap().unwrap(), b"v");
    });
    assert_eq!(relay.facts().reconnects, 4);
    assert_eq!(server.facts().sessions, 1);
}

#[test]
fn a_key_that_existed_during_a_loss_ends_the_wait_although_it_was_deleted() {
    let server = serve();
    let valve = Valve::new(server.address());
    let relay = relay_of(valve.address);
    let mut waiter = Raw::greeted(relay.address());
    waiter.send(&list(WAIT, ["/k"].iter()));
    until("it waits", || server.facts().waiters_count == 1);
    valve.close();
    until("both have noticed", || !relay.facts().is_connected && server.facts().connections == 0);
    let direct = client(server.address(), HANG);
    direct.set("k", "v").unwrap();
    assert!(direct.delete_key("k").unwrap());
    valve.open();
    assert_eq!(waiter.read(), [0]);
}

#[test]
fn while_the_server_is_away_clients_time_out_by_their_own_clock() {
    let server = serve();
    let valve = Valve::new(server.address());
    let relay = relay_of(valve.address);
    let store = client_of(&relay);
    valve.close();
    until("the relay has noticed", || !relay.facts().is_connected);
    let brief = Duration::from_millis(50);
    let error = store.wait_for(&["k"], brief).unwrap_err();
    assert!(error.is_timeout(), "{error}");
    let late = client(relay.address(), HANG); // clients are still accepted
    valve.open();
    assert_eq!(late.add("n", 1).unwrap(), 1);
    assert!(store.wait_for(&["k"], brief).unwrap_err().is_timeout());
    until("no wait is left", || server.facts().waiters_count == 0);
}

#[test]
fn a_server_that_was_started_again_costs_clients_their_connections() {
    let server = serve();
    let target = Arc::new(Mutex::new(server.address()));
    let valve = Valve::to(target.clone());
    let relay = relay_of(valve.address);
    let mut idle = Raw::greeted(relay.address());
    let mut waiter = Raw::greeted(relay.address());
    idle.sync();
    waiter.send(&list(WAIT, ["/k"].iter()));
    until("it waits", || server.facts().waiters_count == 1);
    drop(server);
    let server = serve();
    *target.lock().unwrap() = server.address();
    assert_eq!(idle.until_closed(), b"", "its keys are lost");
    assert_eq!(waiter.until_closed(), b"");
    // New clients are served.
    assert_eq!(client_of(&relay).add("n", 1).unwrap(), 1);
    assert_eq!(server.facts().sessions, 1);
}

#[test]
fn a_session_that_expired_costs_clients_their_connections() {
    let mut limits = Limits::default();
    limits.session_timeout = Duration::from_millis(1);
    let server = Server::start(ServerOptions::new("127.0.0.1", 0).limits(limits)).unwrap();
    let valve = Valve::new(server.address());
    let relay = relay_of(valve.address);
    let mut waiter = Raw::greeted(relay.address());
    waiter.send(&list(WAIT, ["/k"].iter()));
    until("it waits", || server.facts().waiters_count == 1);
    valve.close();
    until("it has expired", || server.facts().sessions == 0);
    assert_eq!(server.facts().waiters_count, 0);
    valve.open();
    assert_eq!(waiter.until_closed(), b"");
    assert_eq!(client_of(&relay).add("n", 1).unwrap(), 1);
}

/// A rank's last SET has no answer, and the rank may exit immediately after it.
#[test]
fn a_relay_that_ends_leaves_no_request_of_its_clients_on_the_way() {
    let server = serve();
    for round in 0..50 {
        let relay = relay_of(server.address());
        let mut clients: Vec<Raw> = (0..8).map(|_| Raw::greeted(relay.address())).collect();
        for (number, raw) in clients.iter_mut().enumerate() {
            raw.send(&message(SET, &[format!("/{round}/{number}").as_bytes(), b"v"]));
        }
        drop(clients);
        until("all is read", || relay.facts().requests == 8);
        relay.shutdown(HANG);
        assert_eq!(server.facts().keys, 8 * (round + 1));
    }
}

#[test]
fn a_relay_that_ends_says_so_and_clients_connect_to_the_next_one() {
    let server = serve();
    let relay = relay_of(server.address());
    let port = relay.address().port();
    let store = client_of(&relay);
    assert_eq!(store.add("n", 1).unwrap(), 1);
    let mut waiter = Raw::greeted(relay.address());
    waiter.send(&list(WAIT, ["/k"].iter()));
    until("it waits", || server.facts().waiters_count == 1);
    relay.shutdown(Duration::ZERO);
    until("the session has ended", || server.facts().sessions == 0);
    assert_eq!(server.facts().waiters_count, 0);
    assert_eq!(waiter.until_closed(), b"");
    let options = RelayOptions::new("127.0.0.1", server.address().port()).listen("127.0.0.1", port);
    let _again = Relay::start(options).unwrap();
    assert_eq!(store.add("n", 1).unwrap_err().kind(), ErrorKind::Lost);
    assert_eq!(store.add("n", 1).unwrap(), 2);
}

// ── the wrong server ───────────────────────────────────────────────────────────────────────────────────────

/// A server of one connection: what it says after the greeting is up to the test.
fn fake_server(answer_greeting: [u8; 4], then: impl FnOnce(&mut TcpStream) + Send + 'static) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        let mut then = Some(then);
        for mut stream in listener.incoming().flatten() {
            let mut greeting = [0; 10];
            if stream.read_exact(&mut greeting).is_err() || stream.write_all(&answer_greeting).is_err() {
                continue;
            }
            if let Some(then) = then.take() {
                then(&mut stream);
            }
        }
    });
    address
}

fn start_error(upstream: SocketAddr) -> String {
    let options = RelayOptions::new("127.0.0.1", upstream.port()).connect_timeout(Duration::from_secs(2));
    Relay::start(options).unwrap_err().to_string()
}

#[test]
fn a_server_that_is_not_tenfolds_is_refused() {
    let stock = fake_server(wire::GREETING.to_le_bytes(), |_| {});
    let error = start_error(stock);
    assert!(
        error.contains(&format!("the server at {stock} is not tenfold's: it cannot serve a relay")),
        "{error}"
    );
    assert!(error.contains("hint: run `tenfold serve` or `tenfold run` there"), "{error}");

    let older = fake_server(wire::GREETING_ANSWER.to_le_bytes(), |stream| {
        let _ended = stream.shutdown(Shutdown::Both);
    });
    let error = start_error(older);
    assert!(error.contains("use the same version of tenfold on both sides"), "{error}");

    let newer = fake_server(wire::GREETING_ANSWER.to_le_bytes(), |stream| {
        stream.write_all(&[9, 0, 0, 0]).unwrap();
    });
    let error = start_error(newer);
    assert!(error.contains("speaks version 9 of sessions, this relay 1"), "{error}");

    let closed_port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let error = start_error(closed_port);
    assert!(error.contains(&format!("{closed_port}: connection refused")), "{error}");
    assert!(error.contains("failed after 2."), "{error}");
}

fn welcome() -> Vec<u8> {
    let mut bytes = Vec::new();
    Welcome { version: 1, flags: 0, store: 1, requests: 0, kept_for: 1000, limits: MessageLimits::default() }
        .encode(&mut bytes);
    bytes
}

fn answer(number: u64, status: u8, length: u64) -> Vec<u8> {
    [&number.to_le_bytes()[..], &[status], &length.to_le_bytes()].concat()
}

#[test]
fn nonsense_of_a_server_costs_it_the_connection_and_clients_keep_their_timeouts() {
    let nonsense: [(&str, Vec<u8>); 8] = [
        ("garbage", vec![0xa5; 400]),
        ("an unknown status", answer(1, 77, 0)),
        ("a number that was never sent", answer(99, 0, 0)),
        ("the number zero", answer(0, 0, 0)),
        ("an add without a sum", [answer(1, 0, 3), vec![1, 2, 3]].concat()),
        ("a wait's answer to an add", answer(1, Status::Joined as u8, 0)),
        ("a length beyond memory, and then nothing", answer(1, 0, u64::MAX)),
        ("half an answer", answer(1, 0, 8)[..5].to_vec()),
    ];
    for (what, bytes) in nonsense {
        let server = fake_server(wire::GREETING_ANSWER.to_le_bytes(), move |stream| {
            stream.read_exact(&mut [0; 31]).unwrap();
            stream.write_all(&welcome()).unwrap();
            let mut request = [0; 27]; // the add below
            stream.read_exact(&mut request).unwrap();
            stream.write_all(&bytes).unwrap();
            if bytes.len() < 17 {
                let _ended = stream.shutdown(Shutdown::Both);
            }
            let _ended = stream.read_to_end(&mut Vec::new());
        });
        let relay = relay_of(server);
        let mut adds = Raw::greeted(relay.address());
        adds.send(&[message(ADD, &[b"/"]), 1_i64.to_le_bytes().to_vec()].concat());
        if what.starts_with("a length beyond memory") {
            // Its client cannot have that; the others go on.
            assert_eq!(adds.until_closed(), b"", "{what}");
        } else {
            until(what, || !relay.facts().is_connected);
        }
        // The relay still serves: a wait ends by its client's own clock.
        let store = client(relay.address(), Duration::from_secs(10));
        if !relay.facts().is_connected {
            let error = store.wait_for(&["k"], Duration::from_millis(20)).unwrap_err();
            assert!(error.is_timeout(), "{what}: {error}");
        }
        relay.shutdown(Duration::ZERO);
    }
}

// ── hostile clients ────────────────────────────────────────────────────────────────────────────────────────

#[test]
fn hostile_clients_of_a_relay_cost_only_themselves() {
    let server = serve();
    let relay = relay_of(server.address());
    let bystander = Bystander::watch(relay.address());
    let huge = u64::MAX.to_le_bytes();
    let attacks: [(&str, Vec<u8>); 8] = [
        ("a huge key", [&[GET][..], &huge].concat()),
        ("a huge value", [&message(SET, &[b"/k"])[..], &huge].concat()),
        ("a huge list", [&[WAIT][..], &huge].concat()),
        ("an unknown opcode", vec![99]),
        ("a session", [&[SESSION, 1, 0, 26, 0][..], &[0; 26]].concat()),
        ("a numbered request", [&[NUMBERED][..], &[0; 9], &[7]].concat()),
        ("an acknowledgement", [&[ACKNOWLEDGE][..], &[0; 8]].concat()),
        ("two waits", [list(WAIT, ["/a"].iter()), list(WAIT, ["/b"].iter())].concat()),
    ];
    for (what, bytes) in &attacks {
        let mut raw = Raw::greeted(relay.address());
        raw.send(bytes);
        assert_eq!(raw.until_closed(), b"", "{what}");
    }
    let halves: Vec<Raw> = (0..50)
        .map(|index| {
            let mut raw = Raw::greeted(relay.address());
            raw.send(&message(SET, &[b"/half", b"value"])[..index % 20 + 1]);
            raw
        })
        .collect();
    until("no wait is left", || relay.facts().waits == 0);
    drop(halves);
    bystander.report("hostile clients of a relay");
    assert_eq!(relay.facts().reconnects, 0);
    assert!(server.facts().closed.is_empty(), "{:?}", server.facts().closed);
    assert!(server.value(b"/half").is_none());
}

#[test]
fn the_servers_limits_hold_at_the_relay_so_that_no_message_costs_the_session() {
    let mut limits = Limits::default();
    limits.message.value = 1000;
    let server = Server::start(ServerOptions::new("127.0.0.1", 0).limits(limits)).unwrap();
    let relay = relay_of(server.address());
    let store = client_of(&relay);
    assert_eq!(store.set("k", vec![0; 1001]).unwrap_err().kind(), ErrorKind::Lost);
    store.set("k", vec![0; 1000]).unwrap();
    assert_eq!(relay.facts().reconnects, 0);
}

#[test]
fn a_client_that_pipelines_and_never_reads_is_bounded() {
    let server = serve();
    let mut limits = Limits::default();
    limits.output = 1 << 20;
    let options = RelayOptions::new("127.0.0.1", server.address().port()).limits(limits);
    let relay = Relay::start(options).unwrap();
    client_of(&relay).set("large", vec![7; 256 << 10]).unwrap();
    let bystander = Bystander::watch(relay.address());
    let mut raw = Raw::greeted(relay.address());
    let gets = message(GET, &[b"/large"]).repeat(20_000);
    raw.stuff(&gets, Duration::from_millis(300));
    // Others have hundreds of turns, in each of which it could be served.
    let other = client_of(&relay);
    for number in 1..=500 {
        assert_eq!(other.add("n", 1).unwrap(), number);
    }
    bystander.report("a client that never reads");
    assert!(relay.facts().requests < 10_000, "{:?}", relay.facts());
}

// ── hostile relays ─────────────────────────────────────────────────────────────────────────────────────────

#[test]
fn hostile_sessions_cost_only_themselves() {
    let server = serve();
    let bystander = Bystander::watch(server.address());
    let hello = |token: u8| [&[SESSION, 1, 0, 26, 0, 0, 0][..], &[token; 16], &[0; 8]].concat();
    let numbered =
        |number: u64, kind: u8, rest: &[u8]| [&[NUMBERED][..], &number.to_le_bytes(), &[kind], rest].concat();
    let get = message(GET, &[b"/k"]);
    let attacks: [(&str, Vec<u8>); 9] = [
        ("no session", numbered(1, 0, &get)),
        ("the wrong number", [hello(1), numbered(2, 0, &get)].concat()),
        ("the same number twice", [hello(2), numbered(1, 0, &get), numbered(1, 0, &get)].concat()),
        ("acknowledging too much", [&hello(3)[..], &[ACKNOWLEDGE], &[9; 8]].concat()),
        ("acknowledging without a session", [&[ACKNOWLEDGE][..], &[0; 8]].concat()),
        ("two sessions", [hello(4), hello(5)].concat()),
        ("an unknown kind", [hello(6), numbered(1, 9, &get)].concat()),
        ("a short hello", vec![SESSION, 1, 0, 3, 0, 1, 2, 3]),
        ("another version", [&[SESSION, 7, 0, 26, 0][..], &[0; 26]].concat()),
    ];
    for (what, bytes) in &attacks {
        let mut raw = Raw::greeted(server.address());
        raw.send(bytes);
        raw.until_closed();
        println!("{what}: closed");
    }
    // Waits that were never made can be left, joined and referred to.
    let mut raw = Raw::greeted(server.address());
    let wait = list(WAIT, ["/k"].iter());
    let nine = 9_u64.to_le_bytes();
    raw.send(
        &[
            hello(8),
            numbered(1, 4, &nine),
            numbered(2, 2, &[&nine[..], &wait].concat()),
            numbered(3, 1, &[&nine[..], &get].concat()),
            numbered(4, 1, &[&2_u64.to_le_bytes()[..], &wait].concat()),
            numbered(5, 4, &4_u64.to_le_bytes()),
        ]
        .concat(),
    );
    raw.sync_after_frames();
    until("no wait is left", || server.facts().waiters_count == 0);
    bystander.report("hostile sessions");
    let closed = server.facts().closed;
    assert_eq!(closed.values().sum::<u64>(), attacks.len() as u64, "{closed:?}");
    assert!(closed[&Closed::Session] >= 6, "{closed:?}");
}

trait AfterFrames {
    fn sync_after_frames(&mut self);
}

impl AfterFrames for Raw {
    /// Reads until the answer to a ping, whatever else arrives before it.
    fn sync_after_frames(&mut self) {
        const MARK: [u8; 4] = [0xde, 0xad, 0xbe, 0xef];
        self.send(&[&[PING][..], &MARK].concat());
        let start = Instant::now();
        let mut seen = Vec::new();
        while !seen.ends_with(&MARK) {
            seen.extend(self.read::<1>());
            assert!(start.elapsed() < HANG);
        }
    }
}

#[test]
fn a_client_of_the_wrong_timeout_is_not_confused_by_its_neighbours() {
    let server = serve();
    let relay = relay_of(server.address());
    let options = || TcpStoreOptions::new("127.0.0.1", relay.address().port());
    let (patient, hasty) = (TcpStore::open(options()).unwrap(), TcpStore::open(options()).unwrap());
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| patient.wait(&["k"]));
        until("it waits", || server.facts().waiters_count == 1);
        for _ in 0..20 {
            assert!(hasty.wait_for(&["k"], Duration::from_millis(1)).unwrap_err().is_timeout());
        }
        hasty.set("k", "v").unwrap();
        waits.join().unwrap().unwrap();
    });
}
