//! The commands as a new user types them: what they print, and their exit status.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod serving;

use std::io::Write as _;
use std::process::{Command, Output, Stdio};

use serving::{Serve, TENFOLD};

fn tenfold(arguments: &[&str]) -> Output {
    Command::new(TENFOLD).args(arguments).stdin(Stdio::null()).output().unwrap()
}

/// `tenfold store` on a server, with something on standard input.
fn store_with_input(serve: &Serve, input: &[u8], arguments: &[&str]) -> Output {
    let mut child = Command::new(TENFOLD)
        .args(["store", &serve.address.to_string()])
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(input).unwrap();
    child.wait_with_output().unwrap()
}

fn store(serve: &Serve, arguments: &[&str]) -> Output {
    store_with_input(serve, b"", arguments)
}

fn printed(output: &Output) -> String {
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {error}", output.status);
    String::from_utf8(output.stdout.clone()).unwrap()
}

#[test]
fn every_store_command_does_what_its_help_says() {
    let serve = Serve::start(&[]);
    let says = |arguments: &[&str], expected: &str| {
        assert_eq!(printed(&store(&serve, arguments)), expected, "{arguments:?}");
    };
    says(&["set", "color", "blue"], "");
    says(&["get", "color"], "blue"); // no line end: the raw bytes
    says(&["--json", "get", "color"], "{\"bytes\":4,\"value\":\"blue\"}\n");
    says(&["append", "color", "ish"], "");
    says(&["compare-set", "color", "blueish", "red"], "red");
    says(&["add", "n", "5"], "5\n");
    says(&["add", "n", "-7"], "-2\n");
    says(&["add", "n"], "-1\n");
    says(&["check", "color", "n"], "true\n");
    says(&["wait", "color"], "");
    says(&["keys"], "color\nn\n");
    says(&["keys", "c"], "color\n");
    says(&["keys", "--json"], "{\"keys\":[\"color\",\"n\"]}\n");
    says(&["push", "q", "first"], "");
    says(&["push", "q", "second"], "");
    says(&["len", "q"], "2\n");
    says(&["pop", "q"], "first");
    says(&["pop", "--wait", "q"], "second");
    says(&["delete", "color", "n", "nothing"], "2\n");
    says(&["keys"], "");
}

#[test]
fn a_value_may_be_any_bytes_from_standard_input() {
    let serve = Serve::start(&[]);
    let bytes: Vec<u8> = (0..=255).cycle().take(100_000).collect();
    printed(&store_with_input(&serve, &bytes, &["set", "blob", "-"]));
    assert!(store(&serve, &["get", "blob"]).stdout == bytes);
}

#[test]
fn failures_exit_with_status_one_and_a_reason() {
    let serve = Serve::start(&[]);
    let missing = store(&serve, &["check", "nope"]);
    assert_eq!((missing.status.code(), missing.stdout.as_slice()), (Some(1), b"false\n".as_slice()));
    let fails = |arguments: &[&str], expected: &str| {
        let output = store(&serve, arguments);
        assert_eq!(output.status.code(), Some(1), "{arguments:?}");
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(text.contains(expected), "{text}");
    };
    fails(&["pop", "q"], "error: store queue_pop `q` at 127.0.0.1:");
    fails(&["pop", "q"], ": queue is empty"); // after the time it took, if that was a millisecond or more
    fails(&["--timeout", "50ms", "get", "nope"], "timed out: the key was never set\n  hint: ");
    printed(&store(&serve, &["set", "text", "abc"]));
    fails(&["add", "text"], "the server closed the connection");
    // A write is confirmed before success is reported: this one is refused.
    let output = store_with_input(&serve, &vec![0; (8 << 20) + 1], &["set", "large", "-"]);
    assert_eq!(output.status.code(), Some(1));
}

#[test]
fn stats_show_what_the_server_does_and_which_clients_wait() {
    let serve = Serve::start(&[]);
    printed(&store(&serve, &["set", "k", "v"]));
    let text = printed(&store(&serve, &["stats"]));
    for expected in [
        "tenfold store at 127.0.0.1:",
        "connections  2 of ",
        "keys         1, queue items 0",
        "operations   set 1",
        "waiting      0",
    ] {
        assert!(text.contains(expected), "no `{expected}` in {text}");
    }
    let facts: serde_json::Value =
        serde_json::from_str(&printed(&store(&serve, &["stats", "--json"]))).unwrap();
    assert_eq!(facts["keys"], 1);
    assert_eq!(facts["operations"]["set"], 1);
    assert_eq!(facts["waiters"], serde_json::json!([]));
}

#[test]
fn keys_and_values_stay_out_of_the_servers_log() {
    let mut command = Command::new(TENFOLD);
    command.args(["serve", "--port", "0"]).env("TENFOLD_LOG", "trace");
    let mut serve = Serve::spawn(command);
    printed(&store(&serve, &["set", "secret-key", "secret-value"]));
    assert!(!store(&serve, &["add", "secret-key"]).status.success(), "the server refuses, and logs why");
    serve.process.signal(rustix::process::Signal::TERM);
    let log = serve.ended().1.join("\n");
    assert!(log.contains("ADD or BARRIER failed: the value is not a number (key of 11 bytes)"), "{log}");
    assert!(!log.contains("secret"), "{log}");
}

#[test]
fn the_commands_of_the_readme_do_what_it_says() {
    let readme = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../README.md")).unwrap();
    let serve = Serve::start(&[]);
    printed(&store(&serve, &["set", "rank0/ready", "yes"])); // what the example waits for
    let mut run = 0;
    for line in readme.lines().filter_map(|line| line.strip_prefix("tenfold store 127.0.0.1:29500 ")) {
        let (command, comment) = line.split_once('#').unwrap_or((line, ""));
        let output = printed(&store(&serve, &command.split_whitespace().collect::<Vec<_>>()));
        assert!(!command.starts_with("get") || output == comment.trim(), "{line}: {output}");
        run += 1;
    }
    assert_eq!(run, 4, "the README has other examples than this test knows");
}

#[test]
fn help_on_the_environment_is_the_list_of_variables() {
    let list = printed(&tenfold(&["help", "environment"]));
    assert!(list.starts_with("Read by every rank of a process group:\n  TENFOLD_TRANSPORT\n"), "{list}");
    assert_eq!(list, printed(&tenfold(&["environment"])));
}

#[test]
fn every_command_has_help_with_an_example() {
    let commands =
        "demo, run, serve, store, top, trace, worker, environment, bench, bench store, bench recover";
    for command in commands.split(", ") {
        let words: Vec<&str> = command.split(' ').chain(["--help"]).collect();
        let text = printed(&tenfold(&words));
        assert!(text.contains("Examples:\n  tenfold "), "{command}: {text}");
    }
    assert_eq!(tenfold(&["serv"]).status.code(), Some(2));
    let output = tenfold(&["serv"]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("serve"), "the nearest name is suggested");
}

#[test]
fn the_command_calls_itself_tenfold_whatever_its_file_is_called() {
    use std::os::unix::process::CommandExt as _;
    let output = Command::new(TENFOLD).arg0("__main__.py").args(["serve", "--bad"]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(text.contains("Usage: tenfold serve [OPTIONS]"), "{text}");
}

#[test]
fn a_benchmark_of_collectives_checks_measures_and_writes_its_rows() {
    let folder = tempfile::tempdir().unwrap();
    let rows = folder.path().join("rows.json");
    let arguments =
        ["bench", "all_reduce", "send_recv", "--sizes", "8", "--memory", "private", "--rounds", "1"];
    let text = printed(&tenfold(&[&arguments[..], &["--json", rows.to_str().unwrap()]].concat()));
    assert!(text.starts_with("all_reduce f32, 2 ranks, µs\nsize  tenfold\n8 B "), "{text}");
    assert!(text.contains("\nsend_recv f32, 2 ranks, µs\n"), "{text}");
    let rows: serde_json::Value = serde_json::from_slice(&std::fs::read(rows).unwrap()).unwrap();
    assert_eq!(rows.as_array().unwrap().len(), 2);
    assert_eq!(
        (&rows[0]["op"], &rows[0]["ranks"], &rows[0]["bytes"]),
        (&"all_reduce".into(), &2.into(), &8.into())
    );
    assert!(rows[0]["median_us"].as_f64().unwrap() > 0.0, "{rows}");
    assert_eq!(rows[0]["ratio"], serde_json::Value::Null);
}

#[test]
fn a_benchmark_of_recovery_kills_a_rank_and_sees_the_others_continue() {
    let folder = tempfile::tempdir().unwrap();
    let rows = folder.path().join("rows.json");
    let arguments = ["bench", "recover", "--ranks", "3,4", "--transport", "shm,tcp", "--size", "64K"];
    let text =
        printed(&tenfold(&[&arguments[..], &["--rounds", "2", "--json", rows.to_str().unwrap()]].concat()));
    let title = text.lines().next().unwrap().split_whitespace().collect::<Vec<_>>();
    assert_eq!(title[..5], ["ranks", "killed", "implementation", "transport", "recovered"], "{text}");
    assert!(!text.contains("never:"), "{text}");
    let rows: serde_json::Value = serde_json::from_slice(&std::fs::read(rows).unwrap()).unwrap();
    let cases = rows.as_array().unwrap().iter().map(|row| {
        assert_eq!((&row["rounds"], &row["recovered"]), (&2.into(), &2.into()), "{row}");
        // No survivor has completed anything without the dead rank before it knew of the death.
        assert!(row["median_us"].as_f64() > row["error_us"].as_f64(), "{row}");
        [&row["ranks"], &row["transport"], &row["victim"]].map(ToString::to_string).join(" ")
    });
    let expected = [
        r#"3 "shm" "other""#,
        r#"3 "shm" "store""#,
        r#"4 "shm" "other""#,
        r#"4 "shm" "store""#,
        r#"3 "tcp" "other""#,
        r#"3 "tcp" "store""#,
        r#"4 "tcp" "other""#,
        r#"4 "tcp" "store""#,
    ];
    assert_eq!(cases.collect::<Vec<_>>(), expected);
}

#[test]
fn a_peer_of_recovery_that_is_missing_is_reported_and_the_others_are_measured() {
    let output = Command::new(TENFOLD)
        .args(["bench", "recover", "--ranks", "3", "--rounds", "1", "--victim", "store", "--size", "8"])
        .args(["--against", "ulfm"])
        .env("TENFOLD_ULFM", "/nowhere")
        .output()
        .unwrap();
    let text = printed(&output);
    let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines[1][5..9], ["tenfold", "shm", "1", "of"], "{text}");
    assert_eq!(lines[2][5..], ["ulfm", "shm", "–", "–", "–", "–", "–"], "{text}");
    assert!(text.contains("ulfm: not measured: TENFOLD_ULFM=`/nowhere` is not an Open MPI 5"), "{text}");
}

#[test]
fn a_peer_that_cannot_start_is_reported_with_its_output() {
    let output = tenfold(&["bench", "--against", "gloo", "--python", "/nowhere/python", "--sizes", "8"]);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1));
    assert!(text.starts_with("error: starting gloo: a process ended early"), "{text}");
    assert!(text.contains("cannot run `/nowhere/python`"), "{text}");
}

#[test]
fn an_invalid_log_filter_is_reported_with_valid_ones() {
    let output = Command::new(TENFOLD).args(["demo"]).env("TENFOLD_LOG", "a=b=c").output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("invalid log filter TENFOLD_LOG=`a=b=c`: "));
}
