//! `tenfold top` against real servers: a snapshot, and the error for an invalid address.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod serving;

use std::net::TcpListener;
use std::process::{Command, Output, Stdio};

use serving::{Serve, TENFOLD};

fn top(arguments: &[&str]) -> Output {
    Command::new(TENFOLD).arg("top").args(arguments).stdin(Stdio::null()).output().unwrap()
}

fn store(serve: &Serve, arguments: &[&str]) {
    let address = serve.address.to_string();
    let output = Command::new(TENFOLD).args(["store", &address]).args(arguments).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// The port of the dashboard, from the server's second line.
fn dashboard_of(serve: &mut Serve) -> String {
    let line = serve.next_line();
    let url = line.trim().strip_prefix("dashboard on http://").unwrap_or_else(|| panic!("{line:?}"));
    url.trim_end_matches('/').to_owned()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[test]
fn one_snapshot_of_a_real_server_has_every_part() {
    let mut serve = Serve::start(&["--dashboard", "127.0.0.1:0"]);
    let dashboard = dashboard_of(&mut serve);
    store(&serve, &["set", "job/color", "blue"]);
    store(&serve, &["set", "\u{1b}[2J", "x"]);
    let output = top(&[&dashboard, "--once"]);
    let printed = text(&output.stdout);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let first = printed.lines().next().unwrap();
    let expected = format!(
        "tenfold {} · store {} · dashboard {dashboard} · up ",
        env!("CARGO_PKG_VERSION"),
        serve.address
    );
    assert!(first.starts_with(&expected), "{first}");
    let verdict = printed.lines().nth(1).unwrap();
    assert!(verdict.starts_with("✓ store: ") && verdict.ends_with(", 2 keys, no long waits"), "{verdict}");
    let titles: Vec<&str> = printed.split("\n\n").skip(1).map(|part| part.lines().next().unwrap()).collect();
    assert_eq!(titles, ["Ranks", "Waiting", "Operations", "Slowest", "Keys (2)", "Limits"]);
    assert!(printed.contains("  No job of `tenfold run` is known to this store.\n"), "{printed}");
    assert!(printed.contains("  /job/\n"), "{printed}");
    assert!(!printed.contains('\u{1b}'), "text of clients cannot command the terminal");
    assert!(!printed.contains("blue"), "values are not shown");
    // Standard output is not a terminal here, so it is the same without the flag.
    let titles_of = |printed: &str| {
        printed.split("\n\n").skip(1).map(|part| part.lines().next().map(str::to_owned)).collect::<Vec<_>>()
    };
    assert_eq!(titles_of(&text(&top(&[&dashboard]).stdout)), titles_of(&printed));
}

#[test]
fn as_json_it_has_the_answers_of_the_api() {
    let mut serve = Serve::start(&["--dashboard", "127.0.0.1:0"]);
    let dashboard = dashboard_of(&mut serve);
    let facts: serde_json::Value = serde_json::from_slice(&top(&[&dashboard, "--json"]).stdout).unwrap();
    assert_eq!(facts["overview"]["server"]["address"], serve.address.to_string());
    let names: Vec<&String> = facts.as_object().unwrap().keys().collect();
    assert_eq!(names, ["history", "keys", "overview", "runs", "slow", "waiters"]);
}

#[test]
fn at_a_store_it_says_so_and_shows_the_stores_statistics() {
    let serve = Serve::start(&[]);
    let address = serve.address.to_string();
    let output = top(&[&address]);
    let expected = format!(
        "note: {address} is a store, not a dashboard; showing its own statistics once\n  \
         hint: start it with `tenfold serve --dashboard` and give `top` the address that it prints\n"
    );
    assert_eq!((output.status.code(), text(&output.stderr)), (Some(0), expected));
    assert!(text(&output.stdout).starts_with(&format!("tenfold store at {address}, up ")));
}

#[test]
fn without_an_answer_it_exits_with_one_and_a_hint() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let output = top(&[&format!("127.0.0.1:{port}")]);
    let expected = format!(
        "error: no dashboard at 127.0.0.1:{port}: connection refused\n  \
         hint: use the address that `tenfold serve --dashboard` or `tenfold run --dashboard` prints\n"
    );
    assert_eq!((output.status.code(), text(&output.stderr)), (Some(1), expected));
    assert_eq!(top(&["nonsense"]).status.code(), Some(2));
}
