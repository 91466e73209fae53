//! Our client against PyTorch's own servers, libuv and legacy: the whole conformance suite, and a crowd.
//!
//! Needs a Python with PyTorch 2.15 in TENFOLD_TORCH_PYTHON; `./test` sets that up. Without it, nextest skips
//! this file (see `.config/nextest.toml`), and says so.

#[path = "conformance/suite.rs"]
mod suite;

use std::io::{BufRead, BufReader, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Arc, Barrier};
use std::time::Duration;

use suite::{Subject, promises};
use tenfold_store::{ErrorKind, Store, StoreExt, TcpStore};

/// A Python process that hosts as many of PyTorch's servers as requested. They end with it.
struct Torch {
    process: Child,
    orders: ChildStdin,
    ports: BufReader<ChildStdout>,
}

const HOST: &str = "
import sys
from torch.distributed import TCPStore
libuv = sys.argv[1] == 'libuv'
stores = []
for line in sys.stdin:
    store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False, use_libuv=libuv)
    assert store.libuvBackend == libuv
    stores.append(store)
    print(store.port, flush=True)
";

impl Torch {
    fn start(backend: &str) -> Torch {
        let python = std::env::var("TENFOLD_TORCH_PYTHON")
            .expect("run `./test`, or set TENFOLD_TORCH_PYTHON to a Python with PyTorch 2.15");
        let mut process = Command::new(&python)
            .args(["-c", HOST, backend])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("{python} does not start: {error}"));
        let orders = process.stdin.take().expect("piped");
        let ports = BufReader::new(process.stdout.take().expect("piped"));
        Torch { process, orders, ports }
    }

    /// The port of a new server.
    fn server(&mut self) -> u16 {
        writeln!(self.orders, "one more").expect("the process lives");
        let mut line = String::new();
        self.ports.read_line(&mut line).expect("the process lives");
        line.trim().parse().expect("a port")
    }
}

impl Drop for Torch {
    fn drop(&mut self) {
        let _ = self.process.kill(); // it may have ended by itself
        let _ = self.process.wait();
    }
}

fn client(port: u16) -> Arc<dyn Store> {
    Arc::new(TcpStore::connect("127.0.0.1", port).expect("PyTorch's server answers"))
}

macro_rules! table_of {
    (: $($promise:ident)*) => { &[$((stringify!($promise), suite::$promise as fn(&Subject))),*] };
}

type Promise = (&'static str, fn(&Subject));

const PROMISES: &[Promise] = promises! { table_of! };

/// One process for all, since importing PyTorch takes seconds; a fresh server for each.
fn keeps_every_promise(backend: &str) {
    let mut torch = Torch::start(backend);
    let mut failures = Vec::new();
    for (name, promise) in PROMISES {
        let port = torch.server();
        let libuv = backend == "libuv";
        let subject = Subject {
            queues: libuv,
            says_not_a_number: false,
            wakes_on_compare_set: libuv,
            ..Subject::new(move || client(port))
        };
        if catch_unwind(AssertUnwindSafe(|| promise(&subject))).is_err() {
            failures.push(*name);
        }
    }
    assert!(failures.is_empty(), "with PyTorch's {backend} server: {failures:?}");
    println!("{} promises kept with PyTorch's {backend} server", PROMISES.len());
}

#[test]
fn our_client_keeps_every_promise_with_the_libuv_server() {
    keeps_every_promise("libuv");
}

#[test]
fn our_client_keeps_every_promise_with_the_legacy_server() {
    keeps_every_promise("legacy");
}

#[test]
fn two_hundred_clients_of_ours_share_a_libuv_server() {
    const CLIENTS: usize = 200;
    const EACH: i64 = 20;
    let mut torch = Torch::start("libuv");
    let port = torch.server();
    let connected = Barrier::new(CLIENTS);
    std::thread::scope(|scope| {
        for index in 0..CLIENTS {
            let connected = &connected;
            scope.spawn(move || {
                let store = client(port);
                connected.wait();
                store.set(format!("key {index}"), [index as u8; 1000]).expect("set");
                (0..EACH).for_each(|_| assert!(store.add("n", 1).expect("add") > 0));
                store.barrier("all", CLIENTS).expect("barrier");
                let neighbour = (index + 1) % CLIENTS;
                assert_eq!(*store.get(format!("key {neighbour}")).expect("get"), [neighbour as u8; 1000]);
                assert_eq!(store.add("n", 0).expect("add"), EACH * CLIENTS as i64);
            });
        }
    });
}

#[test]
fn a_frozen_server_of_pytorch_costs_our_client_its_timeout_and_no_more() {
    let mut torch = Torch::start("libuv");
    let store = client(torch.server());
    let pid = rustix::process::Pid::from_child(&torch.process);
    rustix::process::kill_process(pid, rustix::process::Signal::STOP).expect("our own child");
    store.set_timeout(Duration::from_millis(300));
    for error in [
        store.get("k").expect_err("frozen"),
        store.add("k", 1).expect_err("frozen"),
        store.check(&["k"]).expect_err("frozen"),
    ] {
        assert!(matches!(error.kind(), ErrorKind::Timeout | ErrorKind::Lost), "{error:?}");
        assert!(error.scene().elapsed < Duration::from_secs(20), "{error}"); // a busy machine, not a forgotten timeout
    }
    rustix::process::kill_process(pid, rustix::process::Signal::CONT).expect("our own child");
    store.set_timeout(Duration::from_secs(20));
    assert_eq!(store.add("after", 1).expect("the same client goes on"), 1);
}

#[test]
fn a_server_without_queues_is_reported_as_the_reason() {
    let mut torch = Torch::start("legacy");
    let store = client(torch.server());
    let error = store.queue_len("q").expect_err("it has none");
    assert_eq!(error.kind(), ErrorKind::Lost);
    assert!(error.hint().is_some_and(|hint| hint.contains("has no queues")), "{error}");
    assert_eq!(store.add("n", 1).expect("the store goes on"), 1);
}

#[test]
fn a_server_without_facts_does_not_break_the_store() {
    let mut torch = Torch::start("libuv");
    let store = TcpStore::connect("127.0.0.1", torch.server()).expect("PyTorch's server answers");
    assert_eq!(store.server_facts().expect_err("PyTorch's server has none").kind(), ErrorKind::Unsupported);
    assert_eq!(store.add("n", 1).expect("the store goes on"), 1);
}
