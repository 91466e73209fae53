//! The dashboard of a real `tenfold serve`: what each path answers, and what it does not reveal.

#![expect(
    clippy::disallowed_methods,
    clippy::unwrap_used,
    reason = "tests: a client on its own thread, a limit for waiting, and helpers that may fail"
)]

#[path = "../../dashboard/src/metrics/grammar.rs"]
mod grammar;
mod serving;

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use serving::{Serve, TENFOLD};
use tenfold_store::{StoreExt as _, TcpStore};

/// Nothing in these tests takes this long unless it hangs.
const HANG: Duration = Duration::from_secs(40);

struct Shown {
    serve: Serve,
    dashboard: SocketAddr,
}

impl Shown {
    fn start(arguments: &[&str]) -> Shown {
        Shown::of(Serve::start(&[&["--dashboard", "127.0.0.1:0"], arguments].concat()))
    }

    fn of(mut serve: Serve) -> Shown {
        let line = serve.next_line();
        let address = line.strip_prefix("dashboard on http://").and_then(|rest| rest.strip_suffix('/'));
        let dashboard = address.unwrap_or_else(|| panic!("{line:?}")).parse().unwrap();
        Shown { serve, dashboard }
    }

    fn store(&self) -> TcpStore {
        TcpStore::connect("127.0.0.1", self.serve.address.port()).unwrap()
    }

    /// Status, headers and body.
    fn ask(&self, request: &str) -> (u16, String, String) {
        let mut stream = TcpStream::connect_timeout(&self.dashboard, HANG).unwrap();
        stream.set_read_timeout(Some(HANG)).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        (head[9..12].parse().unwrap(), head.into(), body.into())
    }

    fn get(&self, path: &str) -> (u16, String, String) {
        let host = self.dashboard;
        self.ask(&format!("GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"))
    }

    /// Asks again while the server still counts, as it may on a busy machine.
    fn get_counted(&self, path: &str) -> (u16, String, String) {
        loop {
            let (status, head, body) = self.get(path);
            if !body.contains("\"counting\":true") {
                return (status, head, body);
            }
        }
    }

    fn json(&self, path: &str) -> Value {
        let (status, head, body) = self.get_counted(path);
        assert_eq!(status, 200, "{path}: {body}");
        assert!(head.contains("\r\nContent-Type: application/json\r\n"), "{head}");
        serde_json::from_str(&body).unwrap()
    }

    /// Asks until the answer is as expected.
    fn json_when(&self, path: &str, is_so: impl Fn(&Value) -> bool) -> Value {
        let start = Instant::now();
        loop {
            let answer = self.json(path);
            if is_so(&answer) {
                return answer;
            }
            assert!(start.elapsed() < HANG, "{path}: {answer}");
            std::thread::park_timeout(Duration::from_millis(20));
        }
    }
}

fn error(error: &str, hint: &str) -> Value {
    json!({"error": error, "hint": hint})
}

/// A client that waits for a key until it is released.
struct Waiting {
    store: Arc<TcpStore>,
    key: &'static str,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Waiting {
    fn start(shown: &Shown, key: &'static str) -> Waiting {
        let waiter = shown.store();
        let thread = std::thread::Builder::new();
        let thread = thread.spawn(move || {
            waiter.get(key).unwrap();
        });
        Waiting { store: Arc::new(shown.store()), key, thread: Some(thread.unwrap()) }
    }

    fn end(mut self) {
        self.store.set(self.key, "now").unwrap();
        self.thread.take().unwrap().join().unwrap();
    }
}

/// A job as launchers write it: two nodes of two ranks. Rank 0 waits in the store from `waits`, rank 1 has
/// not connected, rank 2 is stopped and nothing is known of rank 3; one spare, one node missing.
fn write_job(store: &TcpStore, waits: &str) {
    let node = |id: &str| {
        json!({"id": id, "host": format!("host-{id}"), "ranks": 2, "role": "default", "fixed_rank": null,
            "worker_store": null})
    };
    let rank = |rank: usize, state: &str, connections: &[&str]| {
        json!({"rank": rank, "local_rank": rank % 2, "pid": 100 + rank, "state": state, "end": null,
            "store_connections": connections, "cpu_seconds": 1.5, "memory_bytes": 4096,
            "last_output_seconds": null, "started_unix": 1763280000.0, "collectives": [{"group": "default",
            "rank": rank, "size": 4, "call": "barrier", "number": 7, "under_way": false, "seconds": 2.0}]})
    };
    let member =
        |id: &str, rank: usize| json!({"node": node(id), "rank": rank, "ready": true, "done": false});
    let state = json!({"version": 7, "round": 1, "phase": "running", "nodes_min": 3, "nodes_max": 4, "max_restarts": 3,
        "restarts_used": 1, "pages": [[1, 6]], "failure": [1, 4],
        "outcome": null, "reason": "rank 3 on node b failed", "something_new": 1});
    let page = json!([member("a", 0), member("b", 1), {"node": node("c"), "spare": true}]);
    let failure = json!({"round": 0, "node_rank": 1, "host": "host-b", "rank": 3, "summary": "exit code 3", "text": "a\nb"});
    for (key, value) in [("page/0/1.6", page), ("failure/1.4", failure), ("state", state)] {
        store.set(format!("tenfold/run/job/{key}"), value.to_string().as_str()).unwrap();
    }
    let beats = [
        ("a", json!([rank(0, "running", &[waits]), rank(1, "running", &[])])),
        ("b", json!([rank(2, "stopped", &["192.0.2.1:1"])])),
    ];
    for (id, ranks) in beats {
        let change = |pid: u64, end| json!({"rank": 1, "pid": pid, "host": "host-a", "end": end});
        let generation = json!({"round": 1, "generation": 2, "seconds": 0.5, "at_unix": 1763280000.0,
            "left": [change(90, json!("killed by SIGKILL"))], "joined": [change(101, json!(null))]});
        let spare = json!({"pid": 110, "state": "running", "started_unix": 1763280000.0});
        let beat = json!({"beat": 17, "node": node(id), "ranks": ranks, "spares": [spare, 7],
            "generations": [7, generation]});
        store.set(format!("tenfold/run/job/node/{id}"), beat.to_string().as_str()).unwrap();
    }
    store.set("tenfold/run/broken/state", "{\"round\": \"x\"}").unwrap();
    store.append("tenfold/runs", "job\nbroken\njob\nnever\n").unwrap();
    store.ping().unwrap(); // writes have no answer; now they have been applied
}

/// A server with an example of everything: values, a queue, a job, a waiter, a refused client.
fn busy() -> (Shown, Waiting) {
    let shown = Shown::start(&["--dashboard-values"]);
    let store = shown.store();
    store.set("color", "blue").unwrap();
    store.set("blob", &b"\xff\x00"[..]).unwrap();
    store.set("deep/er/1", "x").unwrap();
    store.set("deep/er/2", &vec![b'y'; 1 << 20][..]).unwrap();
    store.queue_push("queue", "item").unwrap();
    let mut stranger = TcpStream::connect_timeout(&shown.serve.address, HANG).unwrap();
    stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    let _ = stranger.read_to_end(&mut Vec::new()); // until it is closed
    let waiting = Waiting::start(&shown, "never/here");
    let waiters = shown.json_when("/api/waiters", |waiters| waiters[0] != Value::Null);
    write_job(&store, waiters[0]["peer"].as_str().unwrap());
    (shown, waiting)
}

#[test]
fn it_shows_what_the_server_does_and_which_client_waits_for_what() {
    let (shown, waiting) = busy();
    // The connection through which `busy` filled the store may take a moment to close; the two of `waiting`
    // stay.
    let overview = shown.json_when("/api/overview", |overview| overview["server"]["connections"] == 2);
    assert_eq!(overview["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(overview["values_allowed"], true);
    assert_eq!(overview["process"]["pid"], shown.serve.process.0.id());
    assert!(overview["process"]["memory_bytes"].as_u64().unwrap() > 1 << 20, "{overview}");
    let server = &overview["server"];
    assert_eq!(server["address"], shown.serve.address.to_string());
    assert_eq!(server["closed"], json!({"handshake": 1}));
    assert_eq!((&server["waiters_count"], &server["queue_items"]), (&json!(1), &json!(1)));
    assert_eq!(server["waiters"], Value::Null, "they have a path of their own");

    let waiters = shown.json("/api/waiters");
    assert_eq!(waiters.as_array().unwrap().len(), 1);
    let waiter = &waiters[0];
    assert_eq!((&waiter["operation"], &waiter["keys_count"]), (&json!("wait"), &json!(1)));
    assert!(waiter["keys"].as_str().unwrap().contains("never/here"), "{waiter}");
    assert!(waiter["seconds"].as_f64().unwrap() >= 0.0, "{waiter}");
    assert_eq!((&waiter["run"], &waiter["rank"]), (&json!("job"), &json!("0")), "known by its address");

    let clients = shown.json("/api/clients");
    assert_eq!(clients["count"], server["connections"]);
    let waits = |client: &&Value| client["waits"] == true;
    let waiting_client = clients["clients"].as_array().unwrap().iter().find(waits).unwrap();
    assert_eq!(waiting_client["peer"], waiter["peer"]);
    assert_eq!(shown.json("/api/clients?limit=1")["clients"].as_array().unwrap().len(), 1);

    let keys = shown.json("/api/keys?prefix=/deep/er/");
    assert_eq!((&keys["keys"], &keys["bytes"]), (&json!(2), &json!((1 << 20) + 1)));
    assert_eq!(keys["entries"][0]["key"], "/deep/er/1");
    let hex: String = "/deep/er/".bytes().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(shown.json(&format!("/api/keys?prefix_hex={hex}"))["entries"], keys["entries"]);
    assert!(shown.json("/api/slow").is_array());

    waiting.end();
    assert_eq!(shown.json_when("/api/waiters", |waiters| *waiters == json!([])), json!([]));
}

#[test]
fn a_job_shows_missing_and_stuck_ranks() {
    let (shown, waiting) = busy();
    let runs = shown.json("/api/runs");
    let ids: Vec<&str> = runs.as_array().unwrap().iter().map(|run| run["id"].as_str().unwrap()).collect();
    assert_eq!(ids, ["broken", "job", "never"], "each once, by when it was last begun");
    let error = runs[0]["error"].as_str().unwrap();
    assert!(error.starts_with("its state cannot be read: invalid type: string \"x\""), "{error}");
    assert_eq!(runs[2]["error"], "it has no state in the store");

    let run = &runs[1];
    assert_eq!((&run["error"], &run["state"]["round"]), (&Value::Null, &json!(1)));
    assert_eq!(run["state"]["something_new"], Value::Null, "what is not known is not passed on");
    let nodes: Vec<String> = run["nodes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|node| format!("{} {} {}", node["rank"], node["node"]["id"], node["status"]))
        .collect();
    let expected = ["0 \"a\" \"joined\"", "1 \"b\" \"joined\"", "null \"c\" \"spare\"", "2 null \"missing\""];
    assert_eq!(nodes, expected);
    let ranks: Vec<&Value> =
        run["nodes"].as_array().unwrap().iter().flat_map(|node| node["ranks"].as_array().unwrap()).collect();
    let facts: Vec<Value> = ranks
        .iter()
        .map(|rank| json!([rank["rank"], rank["state"], rank["joined"], rank["stuck"]]))
        .collect();
    let expected = [
        json!([0, "running", true, false]),
        json!([1, "running", false, false]),
        json!([2, "stopped", true, true]),
        json!([3, "missing", false, false]),
    ];
    assert_eq!(facts, expected);
    let generations = run["generations"].as_array().unwrap();
    let what = "rank 1 (pid 90 on host-a, killed by SIGKILL) was replaced by pid 101 on host-a";
    assert_eq!((generations.len(), &generations[0]["what"]), (1, &json!(what)));
    assert_eq!(run["nodes"][0]["spares"].as_array().unwrap().len(), 1, "what cannot be read is left out");
    assert_eq!(ranks[0]["store_operation"]["operation"], "wait");
    assert_eq!(ranks[2]["why"], "stopped by a signal (SIGSTOP or Ctrl-Z); send SIGCONT to continue it");
    assert!(run["verdict"].as_str().unwrap().starts_with("job job"), "{}", run["verdict"]);
    waiting.end();
}

#[test]
fn metrics_are_what_prometheus_reads_and_what_is_documented() {
    let (shown, waiting) = busy();
    let (status, head, body) = shown.get("/metrics");
    assert_eq!(status, 200);
    assert!(head.contains("\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"), "{head}");
    let metrics = grammar::parse(&body).unwrap();
    let number = |name: &str, labels: &[(&str, &str)]| grammar::number(&metrics, name, labels);
    assert_eq!(number("tenfold_store_closed_total", &[("reason", "handshake")]), Some(1.0));
    assert_eq!(number("tenfold_store_waiters", &[]), Some(1.0));
    assert!(number("tenfold_store_operations_total", &[("operation", "set")]).unwrap() >= 4.0);
    assert_eq!(number("tenfold_run_ranks", &[("run", "job"), ("state", "missing")]), Some(1.0));
    assert_eq!(number("tenfold_run_ranks_stuck", &[("run", "job")]), Some(1.0));
    assert_eq!(number("tenfold_run_nodes", &[("run", "job"), ("status", "missing")]), Some(1.0));
    assert_eq!(number("tenfold_run_nodes", &[("run", "broken"), ("status", "joined")]), Some(0.0));

    let told: BTreeSet<String> = metrics
        .iter()
        .map(|(name, labels, _)| {
            let labels: Vec<String> = labels.iter().map(|(label, _)| format!("`{label}`")).collect();
            format!("`{name}` | {}", labels.join(", "))
        })
        .collect();
    let documentation = documentation();
    let (_, table) = documentation.split_once("## `/metrics`").unwrap();
    let documented: BTreeSet<String> = table
        .lines()
        .filter_map(|line| line.strip_prefix("| `"))
        .map(|row| {
            let mut cells = row.split('|').map(str::trim);
            format!("`{} | {}", cells.next().unwrap(), cells.next().unwrap())
        })
        .collect();
    assert_eq!(told, documented);
    waiting.end();
}

#[test]
fn the_last_minutes_are_available_for_charts() {
    let shown = Shown::start(&[]);
    let store = shown.store();
    for _ in 0..100 {
        store.add("n", 1).unwrap();
    }
    let has_seen =
        |history: &Value| history["by_operation"]["add"].as_array().is_some_and(|adds| !adds.is_empty());
    let history = shown.json_when("/api/history", has_seen);
    let length = history["operations"].as_array().unwrap().len();
    for list in ["bytes_in", "bytes_out", "connections", "keys", "memory_bytes", "waiters"] {
        assert_eq!(history[list].as_array().unwrap().len(), length, "{list}: {history}");
    }
    assert_eq!(history["step_seconds"], 1);
    assert_eq!(history["keys"].as_array().unwrap().last(), Some(&json!(1)));
    assert!(history["now_unix"].as_f64().unwrap() > 1.7e9, "{history}");
}

#[test]
fn values_are_shown_only_by_a_server_that_allows_it() {
    let shown = Shown::start(&[]);
    let store = shown.store();
    store.set("color", "blue").unwrap();
    store.ping().unwrap();
    let (status, _, body) = shown.get("/api/value?key=/color");
    let hint = "start the server with --dashboard-values to show them to anyone who can reach this page";
    assert_eq!(status, 403);
    assert_eq!(
        serde_json::from_str::<Value>(&body).unwrap(),
        error("this server does not show values", hint)
    );
    assert_eq!(shown.json("/api/overview")["values_allowed"], false);
    for path in
        ["/", "/api/overview", "/api/keys?prefix=", "/api/clients", "/api/slow", "/api/history", "/metrics"]
    {
        assert!(!shown.get(path).2.contains("blue"), "{path}");
    }

    let (shown, waiting) = busy();
    let blue = json!({"key": "/color", "bytes": 4, "text": "blue", "hex": "626c7565", "truncated": false});
    assert_eq!(shown.json("/api/value?key=%2Fcolor"), blue);
    assert_eq!(shown.json("/api/value?key=color"), blue);
    assert_eq!(shown.json("/api/value?key_hex=2f636f6c6f72"), blue);
    let blob = json!({"key": "/blob", "bytes": 2, "text": null, "hex": "ff00", "truncated": false});
    assert_eq!(shown.json("/api/value?key=/blob"), blob);
    let long = shown.json("/api/value?key=/deep/er/2");
    assert_eq!((&long["bytes"], &long["truncated"]), (&json!(1 << 20), &json!(true)));
    assert_eq!(long["text"], "y".repeat(4096));
    for missing in ["/api/value?key=/nope", "/api/value?key=/queue"] {
        assert_eq!(shown.get(missing).0, 404, "{missing}");
    }
    waiting.end();
}

#[test]
fn requests_that_cannot_be_answered_get_a_reason() {
    let shown = Shown::start(&["--dashboard-values"]);
    let refused = [
        ("/nothing", 404, "no such path"),
        ("/api/", 404, "no such path"),
        ("/api/clients?limit=-1", 400, "`limit` is not a number"),
        ("/api/clients?limit=99999999999999999999", 400, "`limit` is not a number"),
        (
            "/api/keys?prefix=%zz",
            400,
            "the query cannot be read: a `%` is not followed by two hexadecimal digits",
        ),
        ("/api/keys?prefix_hex=abc", 400, "this is not hexadecimal"),
        ("/api/value", 400, "no key was given"),
        ("/api/value?key=a&key=b", 400, "the query cannot be read: it names a parameter twice"),
        ("/api/value?key=a&key_hex=61", 400, "the same was given as text and in hexadecimal"),
    ];
    for (path, expected, message) in refused {
        let (status, _, body) = shown.get(path);
        let body: Value = serde_json::from_str(&body).unwrap();
        assert_eq!((status, &body["error"]), (expected, &json!(message)), "{path}");
        assert_ne!(body["hint"], "", "{path}");
    }
}

#[test]
fn it_is_read_only_and_answers_to_its_own_names() {
    let shown = Shown::start(&["--dashboard-name", "node-7.cluster"]);
    for method in ["POST", "PUT", "DELETE", "OPTIONS"] {
        let request =
            format!("{method} /api/overview HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
        assert_eq!(shown.ask(&request).0, 405, "{method}");
    }
    let by_host = |host: &str| {
        shown.ask(&format!("GET /api/overview HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"))
    };
    for host in ["localhost", "127.0.0.1:1", "node-7.cluster:29580"] {
        assert_eq!(by_host(host).0, 200, "{host}");
    }
    let (status, _, body) = by_host("evil.example");
    let message = "this server does not answer to the host in the Host header";
    let hint = "use the server's address or localhost, or start it with --dashboard-name NAME";
    assert_eq!((status, serde_json::from_str::<Value>(&body).unwrap()), (421, error(message, hint)));
}

#[test]
fn the_page_loads_only_local_files() {
    let shown = Shown::start(&[]);
    let (status, head, page) = shown.get("/");
    assert_eq!(status, 200);
    assert!(head.contains("\r\nContent-Type: text/html; charset=utf-8\r\n"), "{head}");
    let attributes = page.split(['"', '\'']).zip(page.split(['"', '\'']).skip(1));
    let links: Vec<&str> = attributes
        .filter(|(before, _)| before.ends_with("href=") || before.ends_with("src="))
        .map(|(_, link)| link)
        .filter(|link| !link.starts_with('#'))
        .collect();
    assert!(links.contains(&"app.js") && links.contains(&"style.css"), "{links:?}");
    for link in links {
        assert_eq!(shown.get(&format!("/{link}")).0, 200, "{link}");
    }
    // The policy allows neither scripts nor styles in the page itself.
    assert!(!page.contains("<style") && !page.contains(" style=") && !page.contains(" onclick="), "{page}");
}

#[test]
fn neither_keys_nor_values_are_logged() {
    let mut command = Command::new(TENFOLD);
    command.args(["serve", "--port", "0", "--dashboard", "127.0.0.1:0", "--dashboard-values"]);
    command.env("TENFOLD_LOG", "trace");
    let mut shown = Shown::of(Serve::spawn(command));
    let store = shown.store();
    store.set("secret-key", "secret-value").unwrap();
    store.ping().unwrap();
    assert_eq!(shown.json("/api/value?key=secret-key")["text"], "secret-value");
    assert_eq!(shown.json("/api/keys?prefix=/secret")["keys"], 1);
    shown.serve.process.signal(rustix::process::Signal::TERM);
    let (status, log) = shown.serve.ended();
    let log = log.join("\n");
    assert!(status.success() && log.contains("/api/value"), "{log}");
    assert!(!log.contains("secret"), "{log}");
}

#[test]
fn a_dashboard_that_others_can_reach_causes_a_warning() {
    let serve = Serve::start(&["--dashboard", "0.0.0.0:0"]);
    let line = serve.said("warning: no authentication: anyone who can reach the dashboard at 0.0.0.0:");
    let seen = "sees the names of keys, the addresses of clients and what they wait for, but no values";
    assert!(line.ends_with(seen), "{line}");
    let serve = Serve::start(&["--dashboard", "0.0.0.0:0", "--dashboard-values"]);
    let line = serve.said("warning: no authentication: anyone who can reach the dashboard at 0.0.0.0:");
    assert!(line.ends_with("and what they wait for, values too"), "{line}");
}

#[test]
fn a_taken_port_names_its_holder_and_an_invalid_address_the_expected_form() {
    let fails = |address: &str| {
        let mut serve = Command::new(TENFOLD);
        serve.args(["serve", "--port", "0", "--dashboard", address]).stdin(Stdio::null());
        let output = serve.output().unwrap();
        assert_eq!(
            String::from_utf8_lossy(&output.stdout),
            "",
            "a server that stops immediately is not announced"
        );
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let held = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = held.local_addr().unwrap().to_string();
    let (code, text) = fails(&address);
    let pid = std::process::id();
    let expected =
        format!("error: dashboard: cannot listen on {address}: address already in use by process {pid} (");
    assert!(text.starts_with(&expected), "{text}");
    assert!(
        text.ends_with(
            ")\n  hint: stop that program, choose another port, or give port 0 to have one picked\n"
        )
    );
    assert_eq!(code, Some(1));
    let (code, text) = fails("here");
    assert!(text.contains("invalid address `here`: expected HOST:PORT, such as 127.0.0.1:29500"), "{text}");
    assert_eq!(code, Some(2));
    let alone = Command::new(TENFOLD).args(["serve", "--dashboard-values"]).output().unwrap();
    assert_eq!(alone.status.code(), Some(2), "values of no dashboard");
}

// ── every field is documented, and every documented field is there ─────────────────────────────────────────

fn documentation() -> String {
    std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/dashboard.md")).unwrap()
}

/// Names of maps whose keys are names of events.
const MAPS: [&str; 3] = ["operations", "closed", "by_operation"];

/// The paths of all leaves: `a.b[].c`, `operations.*`.
fn leaves(value: &Value, way: &str, found: &mut BTreeSet<String>) {
    match value {
        Value::Array(items) if !items.is_empty() => {
            items.iter().for_each(|item| leaves(item, &format!("{way}[]"), found));
        }
        Value::Object(fields) if !fields.is_empty() => {
            for (name, value) in fields {
                let is_map = MAPS.iter().any(|map| way == *map || way.ends_with(&format!(".{map}")));
                let name = if is_map { "*" } else { name };
                let dot = if way.is_empty() { "" } else { "." };
                leaves(value, &format!("{way}{dot}{name}"), found);
            }
        }
        _ => {
            found.insert(way.into());
        }
    }
}

#[test]
fn every_field_is_documented_and_every_documented_field_exists() {
    let (shown, waiting) = busy();
    let big = vec![b'z'; 1 << 20];
    let store = shown.store();
    store.set("bytes\n", &big[..]).unwrap(); // a key that is shown escaped, and an operation worth timing
    store.ping().unwrap();
    shown.json_when("/api/history", |history| history["by_operation"]["set"].is_array());

    let mut documented: BTreeMap<String, BTreeSet<(String, bool)>> = BTreeMap::new();
    let mut path = String::new();
    for line in documentation().lines().take_while(|line| !line.starts_with("## `/metrics`")) {
        if let Some(rest) = line.strip_prefix("### `GET ") {
            path = rest.trim_end_matches('`').into();
        } else if let Some(row) = line.strip_prefix("| `") {
            let (field, meaning) = row.split_once("` | ").unwrap();
            documented
                .entry(path.clone())
                .or_default()
                .insert((field.into(), meaning.starts_with("optional")));
        }
    }
    assert_eq!(documented.len(), 9, "{:?}", documented.keys());

    for (path, fields) in documented {
        // Where the example in the documentation does not show every field.
        let asked: &[&str] = match path.as_str() {
            "/api/keys?prefix=/a/" => &["/api/keys?prefix=", "/api/keys?prefix=/"],
            "/api/value?key=/a" => &["/api/value?key=/color"],
            path => &[path],
        };
        let mut found = BTreeSet::new();
        for path in asked {
            leaves(&serde_json::from_str(&shown.get_counted(path).2).unwrap(), "", &mut found);
        }
        let names: BTreeSet<&str> = fields.iter().map(|(name, _)| name.as_str()).collect();
        for way in &found {
            // An empty list or a null says nothing about its contents.
            let is_begun = |name: &&str| {
                name.strip_prefix(way.as_str())
                    .is_some_and(|rest| rest.starts_with("[]") || rest.starts_with('.'))
            };
            assert!(
                names.contains(way.as_str()) || names.iter().any(is_begun),
                "{path} has `{way}`: {found:?}"
            );
        }
        for (name, is_optional) in &fields {
            let is_begun = |way: &String| way.starts_with(&format!("{name}."));
            let is_there = found.contains(name) || found.iter().any(is_begun);
            assert!(is_there || *is_optional, "{path} has no `{name}`: {found:?}");
        }
    }
    waiting.end();
}
