//! Real processes that die, freeze, restart, drain, or lose the network: what a client sees, and when.

#![expect(
    clippy::disallowed_methods,
    clippy::unwrap_used,
    reason = "tests: threads, the time things take; a helper may fail too"
)]

mod serving;

use std::net::{SocketAddr, TcpListener};
use std::process::{Command, Output, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serving::{Process, Serve, TENFOLD};
use tenfold_store::{
    Error, ErrorKind, Result, Store as _, StoreExt, TcpStore, TcpStoreOptions, show_duration,
};

const TIMEOUT: Duration = Duration::from_millis(1500);
/// What a call may take beyond its timeout: a second to cancel, and delays of a busy machine. A call that
/// ignores its timeout never returns.
const GRACE: Duration = Duration::from_secs(10);
/// For calls that must not wait so long.
const TIMEOUT_LONG: Duration = Duration::from_secs(30);

fn client(server: SocketAddr) -> TcpStore {
    patient_client(server, TIMEOUT)
}

fn patient_client(server: SocketAddr, timeout: Duration) -> TcpStore {
    let options = TcpStoreOptions::new(server.ip().to_string(), server.port()).timeout(timeout);
    TcpStore::open(options).expect("the server is there")
}

fn waiting(serve: &Serve, count: usize) {
    let store = patient_client(serve.address, Duration::from_secs(30));
    let start = Instant::now();
    while store.server_facts().unwrap().waiters_count != count {
        assert!(start.elapsed() < Duration::from_secs(30), "not {count} wait");
        std::thread::park_timeout(Duration::from_millis(2));
    }
}

type Call = fn(&TcpStore) -> Result<()>;

/// Calls that the server does not answer immediately, with the beginnings of their errors.
const PATIENT: [(&str, Call); 4] = [
    ("get `missing`", |store| store.get("missing").map(drop)),
    ("wait `missing`, `also`", |store| store.wait(&["missing", "also"])),
    ("barrier `meeting`", |store| store.barrier("meeting", 100)),
    ("queue_pop `queue`", |store| store.queue_pop("queue").map(drop)),
];

/// Calls that it answers immediately.
const QUICK: [(&str, Call); 5] = [
    ("add `counter`", |store| store.add("counter", 1).map(drop)),
    ("check `key`", |store| store.check(&["key"]).map(drop)),
    ("delete_key `key`", |store| store.delete_key("key").map(drop)),
    // A write has no answer: it is in trouble only when the network takes no more.
    ("set `large`", |store| {
        loop {
            store.set("large", vec![7; 8 << 20])?;
        }
    }),
    ("compare_set `key`", |store| store.compare_set("key", "", "x").map(drop)),
];

struct Failure {
    what: &'static str,
    error: Error,
    took: Duration,
    store: TcpStore,
}

fn start(server: SocketAddr, timeout: Duration, what: &'static str, call: Call) -> JoinHandle<Failure> {
    let store = patient_client(server, timeout);
    std::thread::spawn(move || {
        let begin = Instant::now();
        let error = call(&store).expect_err("the server is in trouble");
        Failure { what, error, took: begin.elapsed(), store }
    })
}

/// The whole message: operation, keys, server, time, reason, advice.
fn expect_message(failure: &Failure, server: SocketAddr, reason: &str, hint: &str) {
    let elapsed = failure.error.scene().elapsed;
    // Less than a millisecond is not shown: the server may have been killed that soon.
    let after = match elapsed < Duration::from_millis(1) {
        true => String::new(),
        false => format!(" after {}", show_duration(elapsed)),
    };
    let expected = format!("store {} at {server} failed{after}: {reason}\n  hint: {hint}", failure.what);
    assert_eq!(failure.error.to_string(), expected);
}

const LOST_HINT: &str = "check whether the server has exited; it also closes a connection whose request it refuses (over \
                         a limit, or `add` on a value that is not a number): see its log";
const FROZEN: (&str, &str) = (
    "the server did not answer in time",
    "check whether the server's host is overloaded, frozen or unreachable",
);

#[test]
fn a_killed_server_fails_every_waiting_client_immediately_and_later_calls_report_a_lost_store() {
    let mut serve = Serve::start(&[]);
    let address = serve.address;
    let calls = PATIENT.map(|(what, call)| start(address, TIMEOUT_LONG, what, call));
    let bystander = patient_client(address, TIMEOUT);
    waiting(&serve, PATIENT.len());
    let killed = Instant::now();
    serve.process.signal(Signal::KILL);
    serve.ended();
    let failures = calls.map(|call| call.join().unwrap());
    println!("all have failed {:?} after the kill", killed.elapsed());
    assert!(killed.elapsed() < TIMEOUT_LONG / 2, "they do not wait for their timeout");
    for failure in failures {
        assert_eq!(failure.error.kind(), ErrorKind::Lost);
        // Which of the two depends on what the kernel still had to send.
        let reset = failure.error.to_string().contains("reset by peer");
        let reason = match reset {
            true => "connection lost: connection reset by peer",
            false => "the server closed the connection",
        };
        expect_message(&failure, address, reason, LOST_HINT);

        failure.store.set_timeout(TIMEOUT);
        let begin = Instant::now();
        let error = failure.store.add("counter", 1).unwrap_err();
        assert!(begin.elapsed() < TIMEOUT + GRACE);
        let expected = format!(
            "store add `counter` at {address} failed after {}: the store is lost: no store answered ({address}: \
             connection refused) (it was lost earlier: {reason})\n  hint: check whether the server has \
             exited; if it has, its keys are lost",
            show_duration(error.scene().elapsed)
        );
        assert_eq!(error.to_string(), expected);
    }
    let error = bystander.num_keys().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Lost);
    assert!(error.to_string().starts_with(&format!("store num_keys at {address} failed")), "{error}");
}

#[test]
fn a_frozen_server_costs_each_call_its_timeout_and_a_thawed_one_serves_the_same_client_again() {
    let serve = Serve::start(&[]);
    let address = serve.address;
    let stores: Vec<_> = QUICK.iter().map(|_| client(address)).collect();
    // A waiting client must not time out before the server is frozen.
    let long = Duration::from_secs(4);
    let patient = PATIENT.map(|(what, call)| start(address, long, what, call));
    waiting(&serve, PATIENT.len());
    serve.process.freeze();
    let quick: Vec<_> = std::iter::zip(QUICK, stores)
        .map(|((what, call), store)| {
            std::thread::spawn(move || {
                let begin = Instant::now();
                let error = call(&store).expect_err("the server is frozen");
                Failure { what, error, took: begin.elapsed(), store }
            })
        })
        .collect();
    let failures: Vec<_> =
        patient.into_iter().chain(quick).map(|call| call.join().expect("it ended in time")).collect();
    let timeouts = PATIENT.map(|_| long).into_iter().chain(QUICK.map(|_| TIMEOUT));
    for (failure, timeout) in std::iter::zip(&failures, timeouts) {
        println!("{}: {:?} of {timeout:?}", failure.what, failure.took);
        // Several calls of `set` may succeed first.
        let since =
            if failure.what.starts_with("set") { failure.error.scene().elapsed } else { failure.took };
        assert!(since >= timeout && since < timeout + GRACE, "{}: {since:?}", failure.what);
        assert_eq!(failure.error.kind(), ErrorKind::Timeout);
        expect_message(failure, address, FROZEN.0, FROZEN.1);
    }
    // The kernel accepts a new connection, but no server answers the handshake.
    let options = TcpStoreOptions::new("127.0.0.1", address.port()).timeout(Duration::from_millis(300));
    let text = TcpStore::open(options).unwrap_err().to_string();
    assert!(
        text.contains(&format!(
            "no store answered ({address}: accepted the connection, then sent nothing for "
        )),
        "{text}"
    );

    serve.process.signal(Signal::CONT);
    for (index, failure) in failures.iter().enumerate() {
        failure.store.set_timeout(TIMEOUT_LONG);
        let key = format!("thawed/{index}");
        failure.store.set(&key, "yes").expect("it connects again");
        assert_eq!(&*failure.store.get(&key).unwrap(), b"yes");
    }
    waiting(&serve, 0);
}

#[test]
fn a_short_freeze_is_not_noticed() {
    let serve = Serve::start(&[]);
    let store = patient_client(serve.address, Duration::from_secs(30));
    store.set("key", "value").unwrap();
    serve.process.freeze();
    let asking = std::thread::spawn(move || store.get("key").map(|value| value.to_vec()));
    // Long enough that the request arrives before the server continues; nothing depends on it.
    std::thread::park_timeout(Duration::from_millis(100));
    serve.process.signal(Signal::CONT);
    assert_eq!(asking.join().unwrap().unwrap(), b"value");
}

#[test]
fn a_server_restarted_on_its_port_is_found_again_and_its_keys_are_lost() {
    let mut serve = Serve::start(&[]);
    let address = serve.address;
    let store = patient_client(address, Duration::from_secs(10));
    store.set("key", "value").unwrap();
    store.ping().unwrap();
    serve.process.signal(Signal::KILL);
    serve.ended();
    let mut again = Command::new(TENFOLD);
    again.args(["serve", "--port", &address.port().to_string()]);
    let _serve = Serve::spawn(again);
    // The first call may be the one that notices.
    if let Err(error) = store.num_keys() {
        assert_eq!(error.kind(), ErrorKind::Lost);
    }
    assert_eq!(store.num_keys().unwrap(), 0);
    store.set("key", "new").unwrap();
    assert_eq!(&*store.get("key").unwrap(), b"new");
}

#[test]
fn a_client_waits_for_a_server_that_is_being_restarted() {
    let mut serve = Serve::start(&[]);
    let address = serve.address;
    let store = patient_client(address, Duration::from_secs(10));
    serve.process.signal(Signal::KILL);
    serve.ended();
    store.num_keys().expect_err("this one finds out");
    let asking = std::thread::spawn(move || store.add("counter", 5));
    let mut again = Command::new(TENFOLD);
    again.args(["serve", "--port", &address.port().to_string()]);
    let _serve = Serve::spawn(again);
    assert_eq!(asking.join().unwrap().expect("it keeps knocking for up to 5 s"), 5);
}

// ── signals ────────────────────────────────────────────────────────────────────────────────────────────────

#[test]
fn a_stopping_server_serves_connected_clients_until_they_leave() {
    let mut serve = Serve::start(&["--drain", "30s"]);
    let address = serve.address;
    let waiter = patient_client(address, Duration::from_secs(30));
    let helper = patient_client(address, Duration::from_secs(30));
    let waits = std::thread::spawn(move || waiter.get("key").map(|value| value.to_vec()));
    waiting(&serve, 1);
    serve.process.signal(Signal::TERM);
    let line = serve.said("stopping: ");
    assert!(line.ends_with(" clients are still connected, serving them for up to 30 s"), "{line}");
    // No new client is accepted; the listening socket closes a moment after the line.
    let newcomer = || TcpStoreOptions::new("127.0.0.1", address.port()).timeout(Duration::from_millis(300));
    let start = Instant::now();
    while TcpStore::open(newcomer()).is_ok() {
        assert!(start.elapsed() < Duration::from_secs(20));
    }
    helper.set("key", "late").unwrap();
    assert_eq!(waits.join().unwrap().unwrap(), b"late");
    drop(helper);
    let (status, rest) = serve.ended();
    assert_eq!(status.code(), Some(0));
    assert!(rest.last().unwrap().starts_with("stopped after "), "{rest:?}");
}

#[test]
fn a_drain_that_takes_too_long_is_ended() {
    let mut serve = Serve::start(&["--drain", "300ms"]);
    let store = client(serve.address);
    let begin = Instant::now();
    serve.process.signal(Signal::INT);
    let (status, _) = serve.ended();
    assert_eq!(status.code(), Some(0));
    assert!(begin.elapsed() >= Duration::from_millis(300) && begin.elapsed() < TIMEOUT_LONG);
    assert_eq!(store.num_keys().unwrap_err().kind(), ErrorKind::Lost);
}

#[test]
fn a_second_signal_ends_the_server_immediately() {
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        let mut serve = Serve::start(&["--drain", "1h"]);
        let _store = client(serve.address);
        serve.process.signal(Signal::TERM);
        serve.said("stopping: ");
        serve.process.signal(signal);
        assert_eq!(serve.ended().0.code(), Some(code));
    }
}

#[test]
fn without_clients_a_signal_ends_the_server_immediately() {
    for signal in [Signal::INT, Signal::TERM] {
        let mut serve = Serve::start(&["--drain", "1h"]);
        serve.process.signal(signal);
        let (status, rest) = serve.ended();
        assert_eq!(status.code(), Some(0));
        assert_eq!(rest.len(), 1, "{rest:?}");
    }
}

#[test]
fn ctrl_c_ends_a_waiting_client_immediately() {
    use std::os::unix::process::ExitStatusExt as _;
    let serve = Serve::start(&[]);
    let child = Command::new(TENFOLD)
        .args(["store", &serve.address.to_string(), "--timeout", "60s", "wait", "missing"])
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    let mut child = Process(child);
    waiting(&serve, 1);
    let begin = Instant::now();
    child.signal(Signal::INT);
    let status = child.0.wait().unwrap();
    println!("ended {:?} after Ctrl-C with {status}", begin.elapsed());
    assert_eq!(status.signal(), Some(Signal::INT.as_raw()));
    waiting(&serve, 0);
}

// ── command-line arguments ─────────────────────────────────────────────────────────────────────────────────

fn tenfold(arguments: &[&str]) -> (i32, String) {
    let Output { status, stderr, stdout } =
        Command::new(TENFOLD).args(arguments).stdin(Stdio::null()).output().unwrap();
    assert_eq!(stdout, b"");
    (status.code().unwrap(), String::from_utf8(stderr).unwrap())
}

#[test]
fn invalid_arguments_exit_with_status_two_and_a_reason() {
    let cases: [(&[&str], &str); 7] = [
        (
            &["serve", "--max-memory", "banana"],
            "error: invalid value 'banana' for '--max-memory <MAX_MEMORY>': invalid size `banana`: expected \
             a number with an optional unit, such as 65536, 64K or 2G\n\nFor more information, try '--help'.\n",
        ),
        (
            &["serve", "--wat"],
            "error: unexpected argument '--wat' found\n\nUsage: tenfold serve [OPTIONS]\n\nFor more information, try \
             '--help'.\n",
        ),
        (
            &["serve", "--port", "65536"],
            "error: invalid value '65536' for '--port <PORT>': 65536 is not in 0..=65535\n\nFor more information, try \
             '--help'.\n",
        ),
        (
            &["store", "localhost", "get", "k"],
            "error: invalid value 'localhost' for '<SERVER>': invalid address `localhost`: expected \
             HOST:PORT, such as 127.0.0.1:29500\n\nFor more information, try '--help'.\n",
        ),
        (
            &["store", "127.0.0.1:0", "get", "k"],
            "error: invalid value '127.0.0.1:0' for '<SERVER>': invalid address `127.0.0.1:0`: a \
             server does not listen on port 0\n\nFor more information, try '--help'.\n",
        ),
        (
            &["store", ":1", "get", "k"],
            "error: invalid value ':1' for '<SERVER>': invalid address `:1`: expected HOST:PORT, such as \
             127.0.0.1:29500\n\nFor more information, try '--help'.\n",
        ),
        (
            &["store", "127.0.0.1:1", "--timeout", "soon", "get", "k"],
            "error: invalid value 'soon' for '--timeout <TIMEOUT>': invalid duration `soon`: expected \
             seconds, or a number followed by ms, s, m or h, such as 500ms\n\nFor more information, try '--help'.\n",
        ),
    ];
    for (arguments, text) in cases {
        assert_eq!(tenfold(arguments), (2, text.into()));
    }
}

#[test]
fn a_taken_port_names_the_process_that_has_it() {
    let held = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = held.local_addr().unwrap();
    let (code, text) = tenfold(&["serve", "--port", &address.port().to_string()]);
    assert_eq!(code, 1);
    let expected =
        format!("cannot listen on {address}: address already in use by process {} (", std::process::id());
    assert!(text.contains(&expected), "{text}");
    let hint = "\n  hint: stop that program, choose another port, or give port 0 to have one picked\n";
    assert!(
        text.starts_with(&format!("error: store serve at {address} failed")) && text.ends_with(hint),
        "{text}"
    );
}

#[test]
fn a_closed_port_and_an_unknown_name_are_distinguished() {
    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap(); // closed again by now
    let (code, text) = tenfold(&["store", &closed.to_string(), "--timeout", "300ms", "get", "k"]);
    assert_eq!(code, 1);
    assert!(text.contains(&format!("no store answered ({closed}: connection refused)")), "{text}");
    let (code, text) = tenfold(&["store", "no-such-host.invalid:1", "--timeout", "300ms", "get", "k"]);
    assert_eq!(code, 1);
    assert!(text.starts_with("error: store connect at no-such-host.invalid:1 failed after "), "{text}");
    assert!(text.contains("no store answered (`no-such-host.invalid`: "), "{text}");
    let (code, text) = tenfold(&["serve", "--host", "no-such-host.invalid"]);
    assert_eq!(code, 1);
    assert!(text.contains("cannot listen on `no-such-host.invalid`: "), "{text}");
}

// ── a partition ────────────────────────────────────────────────────────────────────────────────────────────

/// Two network namespaces with a cable between them; both are removed with it.
struct Cable {
    server: String,
    client: String,
}

const SERVER_IP: &str = "10.213.77.1";
const CLIENT_IP: &str = "10.213.77.2";

impl Cable {
    /// Needs root and iproute2; returns the reason if it is not possible.
    fn lay() -> std::result::Result<Cable, String> {
        let id = std::process::id();
        let cable = Cable { server: format!("tfs{id}"), client: format!("tfc{id}") };
        let Cable { server, client } = &cable;
        for line in [
            format!("netns add {server}"),
            format!("netns add {client}"),
            format!("-n {server} link add veth0 type veth peer name veth0 netns {client}"),
            format!("-n {server} addr add {SERVER_IP}/24 dev veth0"),
            format!("-n {client} addr add {CLIENT_IP}/24 dev veth0"),
            format!("-n {server} link set lo up"), // for clients on the same side
            format!("-n {server} link set veth0 up"),
            format!("-n {client} link set veth0 up"),
        ] {
            ip(&line)?;
        }
        Ok(cable)
    }

    /// Packets from the server are dropped without notice to the client.
    fn cut(&self) {
        ip(&format!("-n {} link set veth0 down", self.server)).unwrap();
    }

    fn inside(namespace: &str) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", namespace, TENFOLD]);
        command
    }
}

impl Drop for Cable {
    fn drop(&mut self) {
        let _ = ip(&format!("netns del {}", self.server)); // it may not exist
        let _ = ip(&format!("netns del {}", self.client));
    }
}

fn ip(line: &str) -> std::result::Result<(), String> {
    let output = Command::new("ip").args(line.split(' ')).output().map_err(|error| format!("ip: {error}"))?;
    let text = String::from_utf8_lossy(&output.stderr);
    if output.status.success() { Ok(()) } else { Err(format!("ip {line}: {}", text.trim())) }
}

#[test]
fn a_partition_costs_each_call_its_timeout() {
    let cable = match Cable::lay() {
        Ok(cable) => cable,
        Err(reason) => return println!("skipped, no network namespaces here: {reason}"),
    };
    let mut command = Cable::inside(&cable.server);
    command.args(["serve", "--host", SERVER_IP, "--port", "0"]);
    let serve = Serve::spawn(command);
    let address = serve.address.to_string();
    let calls: [(&str, &[&str]); 4] = [
        ("get `missing`", &["get", "missing"]),
        ("wait `missing`", &["wait", "missing"]),
        ("queue_pop `queue`", &["pop", "queue", "--wait"]),
        ("wait `a`, `b`, `c`", &["wait", "a", "b", "c"]),
    ];
    // Enough time for four processes to start and wait before the network is cut.
    const SECONDS: u64 = 6;
    let begin = Instant::now();
    let clients: Vec<_> = calls
        .iter()
        .map(|(_, call)| {
            let mut command = Cable::inside(&cable.client);
            command.args(["store", &address, "--timeout", &format!("{SECONDS}s")]).args(*call);
            Process(command.stdin(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap())
        })
        .collect();
    // Asked from the server's own side of the cable.
    let start = Instant::now();
    loop {
        let mut stats = Cable::inside(&cable.server);
        let output = stats.args(["store", &address, "stats", "--json"]).output().unwrap();
        if String::from_utf8_lossy(&output.stdout).contains("\"waiters_count\": 4,") {
            break;
        }
        assert!(start.elapsed() < Duration::from_secs(SECONDS), "the clients have not connected: {output:?}");
    }
    cable.cut();
    for ((what, _), mut client) in std::iter::zip(calls, clients) {
        let mut text = String::new();
        std::io::Read::read_to_string(&mut client.0.stderr.take().unwrap(), &mut text).unwrap();
        assert_eq!(client.0.wait().unwrap().code(), Some(1));
        println!("{what}: {:?} of {SECONDS} s, partition after {:?}", begin.elapsed(), start.elapsed());
        assert!(begin.elapsed() < Duration::from_secs(SECONDS) + GRACE);
        assert!(text.starts_with(&format!("error: store {what} at {address} failed after ")), "{text}");
        assert!(text.ends_with(&format!(": {}\n  hint: {}\n", FROZEN.0, FROZEN.1)), "{text}");
    }
}
