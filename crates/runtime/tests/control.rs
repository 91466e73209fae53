//! The control plane over real sockets: routes and texts, handlers that fail, and what the environment asks for.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::Path;

use serde_json::{Value, json};
use tenfold::control::{self, Request, Response, WorkerServer};
use tenfold::{Buffer, Group, ReduceOp};

/// Nothing here takes this long unless it hangs.
const HANG: std::time::Duration = std::time::Duration::from_secs(60);

/// The head of an answer and its body, of any bytes.
fn post_for_bytes(path: &Path, name: &str) -> (String, Vec<u8>) {
    let mut stream = UnixStream::connect(path).unwrap();
    stream.write_all(request("POST", &format!("/handler/{name}"), "").as_bytes()).unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    let end = answer.windows(4).position(|bytes| bytes == b"\r\n\r\n").unwrap();
    let body = answer.split_off(end + 4);
    (String::from_utf8(answer).unwrap(), body)
}

/// Status, type and body of an answer.
#[derive(Debug, PartialEq, Eq)]
struct Answer(u16, String, String);

fn read(mut stream: impl std::io::Read) -> Answer {
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    let kind = head.lines().find_map(|line| line.strip_prefix("Content-Type: ")).unwrap();
    Answer(status, kind.to_string(), body.to_string())
}

fn request(method: &str, target: &str, body: &str) -> String {
    let length = if method == "POST" { format!("Content-Length: {}\r\n", body.len()) } else { String::new() };
    format!("{method} {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{length}\r\n{body}")
}

fn ask(path: &Path, method: &str, target: &str) -> Answer {
    let mut stream = UnixStream::connect(path).unwrap();
    stream.write_all(request(method, target, "").as_bytes()).unwrap();
    read(stream)
}

fn post(path: &Path, name: &str) -> Answer {
    ask(path, "POST", &format!("/handler/{name}"))
}

fn text(status: u16, text: &str) -> Answer {
    Answer(status, "text/plain".to_string(), text.to_string())
}

fn server() -> (tempfile::TempDir, std::path::PathBuf, WorkerServer) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s.sock");
    let server = WorkerServer::on_socket(&path).unwrap();
    (folder, path, server)
}

#[test]
fn routes_and_texts_are_c10ds() {
    let (_folder, path, server) = server();
    assert_eq!((server.path(), server.address()), (Some(&*path), None));
    let Answer(status, kind, page) = ask(&path, "GET", "/");
    assert_eq!((status, &kind[..]), (200, "text/html"));
    assert!(page.contains("<a href=\"/handler/\">Handler names</a>"), "{page}");
    let Answer(status, kind, names) = ask(&path, "GET", "/handler/");
    assert_eq!((status, &kind[..]), (200, "application/json"));
    assert_eq!(serde_json::from_str::<Vec<String>>(&names).unwrap(), control::handler_names());
    assert_eq!(post(&path, "ping"), text(200, "pong"));
    assert_eq!(post(&path, "ping/"), text(200, "pong"), "as by c10d");
    assert_eq!(post(&path, "p%69ng"), text(200, "pong"));
    assert_eq!(post(&path, "nope"), text(404, "Handler nope not found: Failed to find handler nope"));
    assert_eq!(post(&path, "a+b%2Fc"), text(404, "Handler a+b/c not found: Failed to find handler a+b/c"));
    assert_eq!(post(&path, "%zz").0, 400);
    assert_eq!(ask(&path, "GET", "/handler/ping").0, 404, "only POST runs anything");
    for (method, target) in [("POST", "/"), ("GET", "/nope"), ("GET", "/handler"), ("POST", "/nope")] {
        assert_eq!(ask(&path, method, target).0, 404, "{method} {target}");
    }
    assert_eq!(ask(&path, "HEAD", "/").2, "");
    drop(server);
    assert!(!path.exists(), "the file goes with the server");
}

#[test]
fn a_handler_gets_parameters_and_body_and_its_name_is_its_own_for_ever() {
    let show = |request: &Request| {
        let body = String::from_utf8_lossy(request.body()).into_owned();
        Response::new(201, "text/x", format!("{:?} {:?} {body}", request.param("a"), request.params()))
    };
    control::register("show", show).unwrap();
    let error = control::register("show", show).unwrap_err();
    assert_eq!(error.to_string(), "Handler show already registered");
    let error = control::register("ping", show).unwrap_err();
    assert_eq!(error.to_string(), "Handler ping already registered");
    let (_folder, path, _server) = server();
    let expected = r#""1 2" [("a", "1 2"), ("a", "3"), ("b", "")] "#;
    assert_eq!(post(&path, "show?a=1%202&a=3&b"), Answer(201, "text/x".into(), expected.into()));
    let form = |kind: &str| {
        let mut stream = UnixStream::connect(&path).unwrap();
        let request = request("POST", "/handler/show", "a=5&c=6");
        let request = request.replace("\r\n\r\n", &format!("\r\nContent-Type: {kind}\r\n\r\n"));
        stream.write_all(request.as_bytes()).unwrap();
        read(stream).2
    };
    let expected = r#""5" [("a", "5"), ("c", "6")] a=5&c=6"#;
    assert_eq!(form("application/x-www-form-urlencoded; charset=utf-8"), expected);
    assert_eq!(form("text/plain"), r#""" [] a=5&c=6"#);
}

#[test]
fn a_handler_that_panics_or_answers_nonsense_is_a_500_and_the_worker_goes_on() {
    let (_folder, path, _server) = server();
    control::register("panics", |_: &Request| panic!("the shelf {} is empty", 7)).unwrap();
    control::register("odd", |_: &Request| Response::text(99, "")).unwrap();
    control::register("injects", |_: &Request| Response::new(200, "a/b\r\nX-Evil: 1", "")).unwrap();
    let expected = text(500, "Handler panics failed: it panicked: the shelf 7 is empty");
    assert_eq!(post(&path, "panics"), expected);
    assert_eq!(post(&path, "odd"), text(500, "Handler odd failed: 99 is not a status of an answer"));
    assert_eq!(post(&path, "injects"), Answer(200, "a/b".into(), String::new()));
    assert_eq!(post(&path, "ping"), text(200, "pong"));
}

#[test]
fn an_answer_of_many_megabytes_arrives_whole() {
    const LENGTH: usize = 24 << 20;
    control::register("large", |_: &Request| Response::text(200, "x".repeat(LENGTH))).unwrap();
    let (_folder, path, _server) = server();
    let Answer(status, _, body) = post(&path, "large");
    assert_eq!((status, body.len()), (200, LENGTH));
}

#[test]
fn what_a_worker_knows_of_its_groups_can_be_asked() {
    let (_folder, path, _server) = server();
    let none = "Flight Recorder rank is unset; no process group has registered with it yet";
    assert_eq!(post(&path, "fr_dump_file"), text(503, none));
    let healthy = r#"{"healthy":true,"unhealthy_backends":[]}"#;
    assert_eq!(post(&path, "c10d_health_check").2, healthy);
    assert_eq!(post(&path, "wait_counter_values").2, "{}");
    assert_eq!(post(&path, "stragglers"), text(200, "no collective of two ranks was looked at yet\n"));
    let nccl =
        r#"{"comm_lib_version":"","nccl_comm_state":{},"pg_config":{},"pg_status":{},"version":"2.10"}"#;
    assert_eq!(post(&path, "dump_nccl_trace_json?onlyactive=true").2, nccl);
    let wrong = "Invalid value for onlyactive valid values are true or false";
    assert_eq!(post(&path, "dump_nccl_trace_json?onlyactive=1"), text(400, wrong));
    assert_eq!(post(&path, "dump_nccl_trace_pickle?onlyactive=1"), text(400, wrong));
    assert_eq!(post(&path, "dump_nccl_trace_json?includestacktraces=true").0, 400, "JSON has none");
    let (head, nccl) = post_for_bytes(&path, "dump_nccl_trace_pickle?includestacktraces=true");
    assert!(head.contains("Content-Type: application/octet-stream\r\n"), "{head}");
    assert!(nccl.starts_with(b"\x80\x02") && nccl.ends_with(b"."), "a pickle");

    Group::threads(2, |group| {
        let mut tensor = Buffer::from_slice(&[1.0_f32]);
        group.start_all_reduce(tensor.lend(), ReduceOp::Sum)?.wait()
    })
    .unwrap();
    let trace: Value = serde_json::from_str(&post(&path, "fr_trace_json?backend=tenfold").2).unwrap();
    assert_eq!(trace["entries"].as_array().unwrap().len(), 2);
    assert_eq!(trace["entries"][0]["profiling_name"], "tenfold:all_reduce");
    let (head, whole) = post_for_bytes(&path, "fr_trace_pickle");
    assert!(head.starts_with("HTTP/1.1 200 ") && whole.starts_with(b"\x80\x02"), "{head}");
    let has = |text: &str| whole.windows(text.len()).any(|bytes| bytes == text.as_bytes());
    assert!(has("tenfold:all_reduce") && has("frames"), "call sites are in pickles only");
    let counters: Value = serde_json::from_str(&post(&path, "wait_counter_values").2).unwrap();
    let counter = &counters["tenfold.wait_counter.all_reduce"];
    assert_eq!((&counter["total_calls"], &counter["active_count"]), (&json!(2), &json!(0)));
    assert!(counter["total_time_us"].is_u64() && counter["max_time_us"].is_u64(), "{counter}");
    let Answer(status, kind, metrics) = ask(&path, "GET", "/metrics");
    assert_eq!((status, &kind[..]), (200, "text/plain; version=0.0.4; charset=utf-8"));
    assert!(metrics.contains("tenfold_operations_total{group=\"default\",rank=\"1\",op=\"all_reduce\"} 1"));
    assert_eq!(post(&path, "metrics").2, metrics);
}

#[test]
fn a_group_that_failed_is_unhealthy_until_it_is_left() {
    let (_folder, path, _server) = server();
    let health = || serde_json::from_str::<Value>(&post(&path, "c10d_health_check").2).unwrap();
    Group::threads(1, |group| {
        group.abort("the test says so");
        let expected = json!({
            "healthy": false, "unhealthy_backends": ["tenfold"], "unhealthy_groups": ["default"],
        });
        assert_eq!(health(), expected);
        Ok(())
    })
    .unwrap();
    assert_eq!(health(), json!({"healthy": true, "unhealthy_backends": []}));
}

#[test]
fn threads_are_told_by_name_and_state_where_there_is_no_python() {
    let (_folder, path, _server) = server();
    let Answer(status, _, threads) = post(&path, "dump_traceback");
    assert_eq!(status, 200);
    for name in ["tenfold-http", "tenfold-handler"] {
        assert!(threads.lines().any(|line| line.contains(&format!(" `{name}`: "))), "{threads}");
    }
}

#[test]
fn by_tcp_a_worker_answers_to_its_address_and_its_hosts_name_and_to_no_foreign_page() {
    let server = WorkerServer::on_address("127.0.0.1", 0).unwrap();
    let address = server.address().unwrap();
    assert_eq!((address.ip().to_string().as_str(), server.path()), ("127.0.0.1", None));
    let asked = |host: &str, headers: &str| {
        let mut stream = TcpStream::connect_timeout(&address, HANG).unwrap();
        let request = format!(
            "POST /handler/ping HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Length: 0\r\n{headers}\r\n"
        );
        stream.write_all(request.as_bytes()).unwrap();
        read(stream).0
    };
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    assert_eq!(asked(&name, ""), 200);
    assert_eq!(asked(&address.to_string(), ""), 200);
    assert_eq!(asked("evil.example", ""), 421);
    assert_eq!(asked(&address.to_string(), "Origin: http://evil.example\r\n"), 403);
    let error = WorkerServer::on_address("127.0.0.1", address.port()).unwrap_err().to_string();
    assert!(error.starts_with(&format!("cannot listen on {address}: Address already in use")), "{error}");
}

/// Runs alone: nextest has a process for each test, so that no other thread reads variables meanwhile.
#[test]
fn the_environment_asks_for_a_server_that_is_there_while_there_is_a_group() {
    if let Some(path) = std::env::var_os("TENFOLD_WORKER_SERVER") {
        let path = path.into_string().unwrap().replace("{rank}", "0");
        Group::threads(1, |group| {
            assert_eq!(post(Path::new(&path), "ping"), text(200, "pong"));
            group.start_barrier()?.wait()
        })
        .map_err(|error| println!("error: {error}"))
        .ok();
        assert!(!Path::new(&path).exists(), "it goes with the last group");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let again = |value: &str| {
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "the_environment_asks_for_a_server_that_is_there_while_there_is_a_group"]);
        let output = command.arg("--nocapture").env("TENFOLD_WORKER_SERVER", value).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let said = again(&format!("{}/rank-{{rank}}.sock", folder.path().display()));
    assert!(!said.contains("error: "), "{said}");
    let said = again("nowhere");
    let expected =
        "`TENFOLD_WORKER_SERVER=nowhere`: `nowhere` is neither the path of a socket nor a host and a port";
    assert!(said.contains(expected), "{said}");
    assert!(said.contains("hint: say a path with a slash in it"), "{said}");
}
