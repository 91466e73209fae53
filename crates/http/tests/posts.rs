//! What a server must withstand when it also accepts `POST`, runs handlers on separate threads, and listens
//! on a Unix socket: the control plane's requirements, in addition to those of `marks.rs`.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Barrier, Mutex, mpsc};
use std::time::Duration;

use tenfold_http::{Limits, Method, Options, Response, Server, SocketFile};

/// Nothing here takes this long unless it hangs.
const HANG: Duration = Duration::from_secs(60);
const BODY_MAX: usize = 1000;
const THREADS: usize = 2;

fn echo(request: &tenfold_http::Request) -> Response {
    match (request.method(), request.path()) {
        (Method::Post, "/echo") => Response::new(200, "text/plain", request.body().to_vec()),
        (Method::Post, "/panic") => panic!("a handler that panics, for the test"),
        (Method::Post, "/type") => Response::new(200, "text/plain\r\nX-Evil: 1".to_string(), b"x".to_vec()),
        _ => Response::text(404, "nothing here"),
    }
}

fn start(change: impl FnOnce(&mut Limits)) -> Server {
    let mut limits = Limits::default();
    change(&mut limits);
    Server::start_with_threads(Options::default().limits(limits).posts(BODY_MAX), THREADS, echo).unwrap()
}

fn connect(server: &Server) -> TcpStream {
    let stream = TcpStream::connect_timeout(&server.address(), HANG).unwrap();
    stream.set_read_timeout(Some(HANG)).unwrap();
    stream
}

/// Everything that arrives until the server closes.
fn rest(stream: &mut impl Read) -> String {
    let mut bytes = Vec::new();
    match stream.read_to_end(&mut bytes) {
        Ok(_) => {}
        Err(error) if error.kind() == ErrorKind::ConnectionReset => {}
        Err(error) => panic!("the server neither answers nor closes: {error}"),
    }
    String::from_utf8(bytes).unwrap()
}

fn ask(server: &Server, request: &str) -> String {
    let mut stream = connect(server);
    stream.write_all(request.as_bytes()).unwrap();
    rest(&mut stream)
}

fn post(path: &str, headers: &str, body: &str) -> String {
    let length = body.len();
    format!(
        "POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {length}\r\n{headers}\r\n{body}"
    )
}

fn status(answer: &str) -> &str {
    answer.strip_prefix("HTTP/1.1 ").and_then(|rest| rest.get(..3)).unwrap_or(answer)
}

#[test]
fn a_body_arrives_whole_however_it_was_cut_and_the_next_request_follows_it() {
    let server = start(|_| ());
    let answer = ask(&server, &post("/echo", "", "hello"));
    assert!(answer.ends_with("\r\n\r\nhello"), "{answer}");
    let first = post("/echo", "", "one body").replace("Connection: close\r\n", "");
    let both = format!("{first}{}", post("/echo", "", "another"));
    let mut stream = connect(&server);
    for byte in both.as_bytes() {
        stream.write_all(&[*byte]).unwrap();
    }
    let answers = rest(&mut stream);
    assert!(answers.contains("one bodyHTTP/1.1 200 OK") && answers.ends_with("another"), "{answers}");
}

#[test]
fn a_body_that_is_too_long_or_of_unknown_length_is_refused_before_it_is_read() {
    let server = start(|_| ());
    let head = "POST /echo HTTP/1.1\r\nHost: localhost\r\n";
    let answer = ask(&server, &format!("{head}Content-Length: {}\r\n\r\n", BODY_MAX + 1));
    assert_eq!(status(&answer), "413", "{answer}");
    assert_eq!(status(&ask(&server, &post("/echo", "", &"x".repeat(BODY_MAX)))), "200");
    let answer = ask(&server, &format!("{head}Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"));
    assert_eq!(status(&answer), "411", "{answer}");
    let answer = ask(&server, "PUT / HTTP/1.1\r\nHost: localhost\r\n\r\n");
    assert_eq!(status(&answer), "405");
    assert!(answer.contains("\r\nAllow: GET, HEAD, POST\r\n"), "{answer}");
    let answer = ask(&server, "GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n\r\nabc");
    assert_eq!(status(&answer), "400", "{answer}");
}

#[test]
fn a_body_that_trickles_in_is_cut_at_the_deadline_of_its_request() {
    let server = start(|limits| limits.head_timeout = Duration::from_secs(3)); // time to begin, also on a busy machine
    let mut stream = connect(&server);
    stream.write_all(b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\nab").unwrap();
    assert_eq!(status(&rest(&mut stream)), "408");
    let mut stream = connect(&server);
    stream.write_all(b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n").unwrap();
    assert_eq!(status(&rest(&mut stream)), "408", "also if nothing of it came");
}

#[test]
fn a_page_of_another_site_cannot_send_a_post() {
    let server = start(|_| ());
    let from = |origin: &str| ask(&server, &post("/echo", &format!("Origin: {origin}\r\n"), "x"));
    assert_eq!(status(&from("http://localhost")), "200", "our own page");
    for origin in ["http://evil.example", "null", "https://localhost", "http://localhost:1", "\u{fc}"] {
        let answer = from(origin);
        assert_eq!(status(&answer), "403", "{origin}: {answer}");
        assert!(answer.contains("a page of another site may not send this"), "{answer}");
    }
    let named = post("/echo", "", "x").replace("Host: localhost", "Host: evil.example");
    assert_eq!(status(&ask(&server, &named)), "421");
}

#[test]
fn a_handler_cannot_write_headers_and_one_that_panics_costs_its_own_request_only() {
    let server = start(|_| ());
    let answer = ask(&server, &post("/type", "", ""));
    assert!(answer.contains("\r\nContent-Type: text/plain\r\n") && !answer.contains("Evil"), "{answer}");
    for _ in 0..2 * THREADS {
        assert_eq!(status(&ask(&server, &post("/panic", "", ""))), "500");
    }
    assert_eq!(status(&ask(&server, &post("/echo", "", "x"))), "200");
}

#[test]
fn slow_handlers_do_not_block_requests_while_a_thread_is_free() {
    let (all_here, release) = (Arc::new(Barrier::new(THREADS)), Arc::new(Barrier::new(THREADS)));
    let handler = {
        let (all_here, release) = (Arc::clone(&all_here), Arc::clone(&release));
        move |request: &tenfold_http::Request| {
            if request.path() == "/slow" {
                all_here.wait();
                release.wait();
            }
            Response::text(200, request.path().to_string())
        }
    };
    let options = Options::default().posts(BODY_MAX);
    let server = Server::start_with_threads(options, THREADS, handler).unwrap();
    std::thread::scope(|scope| {
        // One handler waits until the other thread has answered the test.
        let slow = scope.spawn(|| ask(&server, &post("/slow", "", "")));
        all_here.wait();
        assert!(ask(&server, &post("/quick", "", "")).ends_with("/quick"));
        release.wait();
        assert!(slow.join().unwrap().ends_with("/slow"));
    });
}

#[test]
fn when_every_thread_hangs_clients_get_an_error_and_the_server_can_still_stop() {
    let (begun, has_begun) = mpsc::channel();
    let (end, ended) = mpsc::channel::<()>();
    let (begun, ended) = (Mutex::new(begun), Mutex::new(ended));
    let mut limits = Limits::default();
    limits.handler_timeout = Duration::from_millis(100);
    limits.queue = 1;
    let options = Options::default().limits(limits).posts(BODY_MAX);
    let server = Server::start_with_threads(options, 1, move |_| {
        begun.lock().unwrap().send(()).unwrap();
        let _ = ended.lock().unwrap().recv(); // until the test is over
        Response::text(200, "late")
    })
    .unwrap();
    let answer = ask(&server, &post("/", "", ""));
    assert_eq!(status(&answer), "503", "{answer}");
    has_begun.recv_timeout(HANG).unwrap();
    assert_eq!(status(&ask(&server, &post("/", "", ""))), "503", "in the queue");
    assert_eq!(status(&ask(&server, &post("/", "", ""))), "503", "the queue is full");
    drop(server); // does not wait for the handler
    drop(end);
}

// ── Unix sockets ───────────────────────────────────────────────────────────────────────────────────────────

fn start_on(path: &std::path::Path) -> std::io::Result<Server> {
    let (listener, file) = SocketFile::bind(path)?;
    Server::start_with_threads(Options::default().posts(BODY_MAX).socket_file(listener, file), 1, echo)
}

#[test]
fn a_socket_file_is_for_its_owner_alone_and_is_removed_with_the_server() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s.sock");
    // nextest runs each test in its own process, so that no other test is affected.
    let before = rustix::process::umask(rustix::fs::Mode::empty());
    let server = start_on(&path);
    rustix::process::umask(before);
    let server = server.unwrap();
    assert_eq!(server.socket_files()[0].path(), path);
    assert!(server.addresses().is_empty(), "nothing but the file");
    let file = fs::symlink_metadata(&path).unwrap();
    assert!(file.file_type().is_socket());
    assert_eq!(file.permissions().mode() & 0o777, 0o600);
    // Any Host is accepted: no browser opens files.
    let mut stream = UnixStream::connect(&path).unwrap();
    let request =
        post("/echo", "Origin: http://evil.example\r\n", "hello").replace("localhost", "evil.example");
    stream.write_all(request.as_bytes()).unwrap();
    assert!(rest(&mut stream).ends_with("hello"));
    drop(server);
    assert!(!path.exists());
}

#[test]
fn a_file_of_a_dead_process_is_replaced_and_one_of_a_live_process_is_not() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s.sock");
    drop(UnixListener::bind(&path).unwrap()); // the file stays
    assert!(path.exists());
    let server = start_on(&path).unwrap();
    let error = start_on(&path).unwrap_err();
    let shown = path.display();
    assert_eq!(
        error.to_string(),
        format!("cannot listen on {shown}: it already exists, and a process listens on it")
    );
    assert_eq!(error.kind(), ErrorKind::AlreadyExists);
    // The refused one has removed nothing.
    let mut stream = UnixStream::connect(&path).unwrap();
    stream.write_all(post("/echo", "", "still here").as_bytes()).unwrap();
    assert!(rest(&mut stream).ends_with("still here"));
    // Another process's file under our name is not ours to remove.
    fs::remove_file(&path).unwrap();
    fs::write(&path, "a file").unwrap();
    let error = start_on(&path).unwrap_err();
    assert_eq!(error.to_string(), format!("cannot listen on {shown}: it already exists and is not a socket"));
    drop(server);
    assert_eq!(fs::read_to_string(&path).unwrap(), "a file");
}

#[test]
fn an_invalid_path_is_named() {
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(SocketFile::bind("").unwrap_err().to_string(), "the path of a socket is empty");
    let missing = folder.path().join("missing/s.sock");
    let error = SocketFile::bind(&missing).unwrap_err();
    assert_eq!(
        error.to_string(),
        format!("cannot listen on {}: No such file or directory", missing.display())
    );
    let long = folder.path().join("l".repeat(120));
    let error = SocketFile::bind(&long).unwrap_err().to_string();
    assert!(error.ends_with("bytes, the limit is 107"), "{error}");
}
