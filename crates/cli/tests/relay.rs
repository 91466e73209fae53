//! `tenfold relay` as a process: what it prints, and what happens when it or its server is killed.

#![expect(clippy::unwrap_used, reason = "a helper may fail")]

mod serving;

use std::net::TcpListener;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use rustix::process::Signal;
use serving::{Serve, TENFOLD};
use tenfold_store::{ErrorKind, StoreExt, TcpStore, TcpStoreOptions};

fn relay_at(upstream: &str, listen: &str) -> Serve {
    let mut command = Command::new(TENFOLD);
    command.args(["relay", "--upstream", upstream, "--listen", listen]);
    Serve::spawn(command)
}

fn tenfold(arguments: &[&str]) -> Output {
    Command::new(TENFOLD).args(arguments).stdin(Stdio::null()).output().unwrap()
}

fn client(serve: &Serve) -> TcpStore {
    let address = serve.address;
    let options = TcpStoreOptions::new(address.ip().to_string(), address.port());
    TcpStore::open(options.timeout(Duration::from_secs(40))).unwrap()
}

#[test]
fn a_relay_serves_the_commands_and_says_what_it_did() {
    let serve = Serve::start(&[]);
    let mut relay = relay_at(&serve.address.to_string(), "127.0.0.1:0");
    let at = relay.address.to_string();
    assert!(tenfold(&["store", &at, "set", "color", "blue"]).status.success());
    assert_eq!(tenfold(&["store", &serve.address.to_string(), "get", "color"]).stdout, b"blue");
    assert_eq!(tenfold(&["store", &at, "keys"]).stdout, b"color\n");
    let stats = String::from_utf8(tenfold(&["store", &at, "stats"]).stdout).unwrap();
    assert!(stats.contains(&format!("tenfold store at {}", serve.address)), "{stats}");
    relay.process.signal(Signal::TERM);
    let (status, log) = relay.ended();
    assert!(status.success(), "{status}: {log:?}");
    let expected = format!("sent to {}, 0 reconnects", serve.address);
    assert!(log.iter().any(|line| line.starts_with("stopped: ") && line.contains(&expected)), "{log:?}");
}

#[test]
fn a_relay_that_is_killed_can_be_started_again_and_leaves_nothing_in_the_way() {
    let serve = Serve::start(&[]);
    let relay = relay_at(&serve.address.to_string(), "127.0.0.1:0");
    let (at, store) = (relay.address.to_string(), client(&relay));
    assert_eq!(store.add("n", 1).unwrap(), 1);
    drop(relay); // SIGKILL
    assert_eq!(store.add("n", 1).unwrap_err().kind(), ErrorKind::Lost);
    let _again = relay_at(&serve.address.to_string(), &at);
    assert_eq!(store.add("n", 1).unwrap(), 2);
    assert_eq!(client(&serve).add("n", 1).unwrap(), 3);
}

#[test]
fn the_log_names_the_server_that_was_lost_and_clients_time_out_by_themselves() {
    let serve = Serve::start(&[]);
    let relay = relay_at(&serve.address.to_string(), "127.0.0.1:0");
    let store = client(&relay);
    store.set("k", "v").unwrap();
    let upstream = serve.address;
    drop(serve); // SIGKILL
    let error = store.wait_for(&["never"], Duration::from_millis(100)).unwrap_err();
    assert!(error.is_timeout(), "{error}");
    let mut lines = relay.log_lines();
    while !lines.iter().any(|line| line.contains(&format!("lost the store server at {upstream}"))) {
        std::thread::park_timeout(Duration::from_millis(10));
        lines.extend(relay.log_lines());
    }
}

#[test]
fn errors_at_the_start_name_the_server_and_the_time() {
    let closed_port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let output = tenfold(&[
        "relay",
        "--upstream",
        &closed_port,
        "--listen",
        "127.0.0.1:0",
        "--connect-timeout",
        "50ms",
    ]);
    assert_eq!(output.status.code(), Some(1));
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(text.contains(&closed_port) && text.contains("connection refused"), "{text}");
    assert!(text.contains(" ms: no store answered"), "{text}");
    assert_eq!(tenfold(&["relay", "--upstream", "nowhere"]).status.code(), Some(2));
}
