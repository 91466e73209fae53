//! What a server must withstand to be left open on a developer's machine: twelve marks, each over a real
//! socket.
//!
//! | mark | what |
//! |---|---|
//! | 1 | it listens on loopback by default |
//! | 2 | it is read-only: GET and HEAD |
//! | 3 | a foreign or missing Host is refused (DNS rebinding) |
//! | 4 | every answer keeps other sites from reading, framing or reinterpreting it |
//! | 5 | long heads are refused at their limit |
//! | 6 | what could hide a second request is refused |
//! | 7 | garbage is refused immediately |
//! | 8 | a request that trickles in is cut at its deadline |
//! | 9 | half-sent requests do not keep an honest one waiting |
//! | 10 | unread answers are dropped |
//! | 11 | a handler that panics costs its own request only |
//! | 12 | answers are in order, and connections end when they should |

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use tenfold_http::{Limits, Options, Response, Server};

/// Nothing here takes this long unless it hangs.
const HANG: Duration = Duration::from_secs(30);
const LARGE: usize = 16 << 20;

fn start(change: impl FnOnce(&mut Limits)) -> Server {
    let mut limits = Limits::default();
    change(&mut limits);
    let options = Options::default().limits(limits).names(vec!["node.example".into()], "ask by another name");
    Server::start(options, |request| match request.path() {
        "/" => Response::text(200, "hello"),
        "/large" => Response::new(200, "application/octet-stream", vec![7; LARGE]),
        "/panic" => panic!("a handler that panics, for the test"),
        path => Response::text(404, format!("no {path}")),
    })
    .unwrap()
}

/// Long enough that only the subject of the test can end a connection.
fn patient(limits: &mut Limits) {
    let hour = Duration::from_secs(3600);
    (limits.head_timeout, limits.idle_timeout, limits.write_timeout) = (hour, hour, hour);
}

fn connect(server: &Server) -> TcpStream {
    let stream = TcpStream::connect_timeout(&server.address(), HANG).unwrap();
    stream.set_read_timeout(Some(HANG)).unwrap();
    stream.set_write_timeout(Some(HANG)).unwrap();
    stream
}

/// Everything that arrives until the server closes.
fn rest(stream: &mut TcpStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    match stream.read_to_end(&mut bytes) {
        Ok(_) => {}
        Err(error) if error.kind() == ErrorKind::ConnectionReset => {}
        Err(error) => panic!("the server neither answers nor closes: {error}"),
    }
    bytes
}

/// Sends this and returns everything that arrives until the server closes.
fn ask(server: &Server, request: impl AsRef<[u8]>) -> String {
    let mut stream = connect(server);
    stream.write_all(request.as_ref()).unwrap();
    String::from_utf8(rest(&mut stream)).unwrap()
}

fn get(server: &Server, path: &str) -> String {
    ask(server, format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"))
}

fn status(answer: &str) -> &str {
    answer.strip_prefix("HTTP/1.1 ").and_then(|rest| rest.get(..3)).unwrap_or(answer)
}

/// One answer with a body of `length` bytes; the connection stays.
fn one_answer(stream: &mut TcpStream, length: usize) -> String {
    let mut answer = Vec::new();
    let mut byte = [0];
    while !answer.ends_with(b"\r\n\r\n") {
        stream.read_exact(&mut byte).unwrap();
        answer.push(byte[0]);
    }
    let mut body = vec![0; length];
    stream.read_exact(&mut body).unwrap();
    String::from_utf8([answer, body].concat()).unwrap()
}

#[test]
fn mark_1_it_listens_on_loopback_by_default() {
    let server = start(|_| ());
    assert_eq!(server.address().ip(), Ipv4Addr::LOCALHOST);
    assert_eq!(server.addresses().len(), 1);
    // The same port on another address is free.
    TcpListener::bind((Ipv4Addr::new(127, 0, 0, 2), server.address().port())).unwrap();

    let listener = TcpListener::bind("127.0.0.2:0").unwrap();
    let told = listener.local_addr().unwrap();
    let server =
        Server::start(Options::default().listeners(vec![listener]), |_| Response::text(200, "")).unwrap();
    assert_eq!(server.address(), told);
}

#[test]
fn mark_2_only_get_and_head_are_answered() {
    let server = start(|_| ());
    for method in ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "BREW", "get"] {
        let answer =
            ask(&server, format!("{method} / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\nhello"));
        assert_eq!(status(&answer), "405", "{method}: {answer}");
        assert!(answer.contains("\r\nAllow: GET, HEAD\r\n"), "{answer}");
        assert!(
            answer.ends_with("{\"error\":\"only GET and HEAD are answered here\",\"hint\":\"\"}\n"),
            "{answer}"
        );
    }
    let got = get(&server, "/");
    assert!(got.ends_with("\r\n\r\nhello"), "{got}");
    let head = ask(&server, "HEAD / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
    assert_eq!(format!("{head}hello"), got, "the same without the body");
}

#[test]
fn mark_3_a_foreign_or_missing_host_is_refused() {
    let server = start(|_| ());
    let port = server.address().port();
    let asked =
        |host: &str| ask(&server, format!("GET / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"));
    for host in ["127.0.0.1", &format!("localhost:{port}"), "[::1]:80", "Node.Example:1234"] {
        assert_eq!(status(&asked(host)), "200", "{host}");
    }
    for host in ["evil.example", &format!("evil.example:{port}"), "localhost.evil.example", "10.1.2.3", ""] {
        let answer = asked(host);
        assert_eq!(status(&answer), "421", "{host}: {answer}");
        let expected = "{\"error\":\"this server does not answer to the host in the Host header\",\
                        \"hint\":\"ask by another name\"}\n";
        assert!(answer.ends_with(expected), "{answer}");
        assert!(!answer.contains("evil"), "nothing that was sent comes back: {answer}");
    }
    for version in ["1.1", "1.0"] {
        assert_eq!(status(&ask(&server, format!("GET / HTTP/{version}\r\n\r\n"))), "400");
    }
}

#[test]
fn mark_4_every_answer_keeps_other_sites_out() {
    let server = start(|_| ());
    let answers = [
        get(&server, "/"),
        get(&server, "/nothing"),
        get(&server, "/panic"),
        ask(&server, "POST / HTTP/1.1\r\n\r\n"),
        ask(&server, "GET / HTTP/1.1\r\nHost: evil.example\r\nOrigin: http://evil.example\r\n\r\n"),
        ask(&server, "\x16\x03\x01"),
    ];
    for answer in answers {
        for header in [
            "Content-Security-Policy: default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
            "X-Content-Type-Options: nosniff",
            "Referrer-Policy: no-referrer",
            "Cross-Origin-Resource-Policy: same-origin",
            "Cache-Control: no-store",
        ] {
            assert!(answer.contains(&format!("\r\n{header}\r\n")), "no {header} in {answer}");
        }
        assert!(!answer.contains("Access-Control"), "{answer}");
    }
}

#[test]
fn mark_5_long_heads_are_refused_at_their_limit() {
    let server = start(patient);
    let line = |length: usize| {
        let path = "a".repeat(length - "GET / HTTP/1.1\r".len());
        format!("GET /{path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    };
    assert_eq!(status(&ask(&server, line(8 << 10))), "404");
    assert_eq!(status(&ask(&server, line((8 << 10) + 1))), "414");
    let headers = |count: usize, length: usize| {
        let header = format!("X: {}\r\n", "a".repeat(length));
        format!("GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{}\r\n", header.repeat(count - 2))
    };
    assert_eq!(status(&ask(&server, headers(100, 1))), "200");
    assert_eq!(status(&ask(&server, headers(101, 1))), "431");
    assert_eq!(status(&ask(&server, headers(3, 32 << 10))), "431");
    // None of them needs a line end to be refused, or takes more than its limit.
    assert_eq!(status(&ask(&server, "G".repeat((8 << 10) + 1))), "414");
    assert_eq!(status(&ask(&server, format!("GET / HTTP/1.1\r\n{}", "H".repeat((32 << 10) + 1)))), "431");
}

#[test]
fn mark_6_what_could_hide_a_second_request_is_refused() {
    let server = start(patient);
    let second = "GET /hidden HTTP/1.1\r\nHost: localhost\r\n\r\n";
    for headers in [
        "Content-Length: 45\r\n",
        "Content-Length: 0\r\nContent-Length: 45\r\n",
        "Transfer-Encoding: chunked\r\n",
        "Transfer-Encoding: identity\r\n",
        "Content-Length : 0\r\n",
        "X: a\r\n\tContent-Length: 45\r\n",
        "X: a\nContent-Length: 45\r\n",
        "X: a\0b\r\n",
        "X: a\rb\r\n",
    ] {
        let answer = ask(&server, format!("GET / HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n{second}"));
        assert_eq!(status(&answer), "400", "{headers:?}: {answer}");
        assert_eq!(answer.matches("HTTP/1.1 ").count(), 1, "the connection ends with it: {answer}");
    }
    for target in ["http://localhost/", "//localhost\t/", "*", "localhost:80"] {
        let answer = ask(&server, format!("GET {target} HTTP/1.1\r\nHost: localhost\r\n\r\n"));
        assert_eq!(status(&answer), "400", "{target:?}: {answer}");
    }
    // Routes are exact: a path is compared as it was sent, and leads to no file.
    for path in ["/../", "/%2e%2e/", "//", "/./", "/%00"] {
        assert_eq!(status(&get(&server, path)), "404", "{path}");
    }
}

#[test]
fn mark_7_garbage_is_refused_immediately() {
    let server = start(patient);
    let tls = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03";
    for garbage in
        [&tls[..], b"\0\0\0\0", b"\r\n\r\n", b"\xff\xfe\xfd", b"SSH-2.0-OpenSSH_9.2\r\n", b"GET /\r\n"]
    {
        let answer = ask(&server, garbage);
        assert_eq!(status(&answer), "400", "{garbage:?}: {answer}");
    }
    assert_eq!(status(&ask(&server, "GET / HTTP/2.0\r\n\r\n")), "505");
    assert_eq!(status(&get(&server, "/")), "200");
}

#[test]
fn mark_8_a_request_that_trickles_in_is_cut_at_its_deadline() {
    let server = start(|limits| {
        patient(limits);
        limits.head_timeout = Duration::from_secs(3); // time to begin one, also on a busy machine
    });
    let mut slow = connect(&server);
    slow.set_read_timeout(Some(Duration::from_millis(10))).unwrap(); // the pace of the trickle
    slow.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\nX: ").unwrap();
    let mut answer = Vec::new();
    loop {
        let mut buffer = [0; 4096];
        match slow.read(&mut buffer) {
            Ok(0) => break,
            Ok(length) => answer.extend_from_slice(&buffer[..length]),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) if error.kind() == ErrorKind::ConnectionReset => break,
            Err(error) => panic!("{error}"),
        }
        let _ = slow.write_all(b"a"); // the server may have closed by now
    }
    let answer = String::from_utf8(answer).unwrap();
    assert_eq!(status(&answer), "408", "{answer}");
    assert!(answer.contains("the request did not arrive in time"), "{answer}");
    // A client that sends nothing at all is closed without an answer.
    assert_eq!(rest(&mut connect(&server)), b"");
}

#[test]
fn mark_9_half_sent_requests_do_not_keep_an_honest_one_waiting() {
    let server = start(patient); // no deadline helps: only closing connections does
    let half_sent: Vec<TcpStream> = (0..300)
        .map(|_| {
            let mut stream = connect(&server);
            stream.write_all(b"GET / HTTP/1.1\r\nHost: local").unwrap();
            stream
        })
        .collect();
    let mut kept = connect(&server);
    for _ in 0..50 {
        assert_eq!(status(&get(&server, "/")), "200");
        kept.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
        assert_eq!(status(&one_answer(&mut kept, 5)), "200");
    }
    // The oldest was closed, the newest may still finish.
    let mut half_sent = half_sent.into_iter();
    assert_eq!(rest(&mut half_sent.next().unwrap()), b"");
    let mut youngest = half_sent.next_back().unwrap();
    youngest.write_all(b"host\r\n\r\n").unwrap();
    assert_eq!(status(&one_answer(&mut youngest, 5)), "200");
}

#[test]
fn mark_10_unread_answers_are_dropped() {
    let ask_for_large = |server: &Server| {
        let mut stream = connect(server);
        stream.write_all(b"GET /large HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").unwrap();
        stream
    };
    // At the deadline.
    let server = start(|limits| {
        patient(limits);
        limits.write_timeout = Duration::from_millis(200);
        limits.output = usize::MAX;
    });
    let mut asleep = ask_for_large(&server);
    while asleep.write_all(b"x").is_ok() {
        std::thread::park_timeout(Duration::from_millis(5)); // it writes until the server closes, and reads nothing
    }
    let taken = rest(&mut asleep).len();
    assert!(taken < LARGE, "{taken}");

    // And earlier, when all of them together are too much.
    let server = start(|limits| {
        patient(limits);
        limits.output = 2 * LARGE + LARGE / 2;
    });
    let mut asleep: Vec<TcpStream> = (0..3)
        .map(|_| {
            let stream = ask_for_large(&server);
            stream.peek(&mut [0]).unwrap(); // its answer has begun before the next request
            stream
        })
        .collect();
    let taken = rest(&mut asleep[0]).len();
    assert!(taken < LARGE, "the oldest is given up: {taken}");
    let taken = rest(&mut asleep[2]).len();
    assert!(taken > LARGE, "the youngest is not: {taken}");

    // A single answer that exceeds the limit is not dropped.
    let server = start(|limits| {
        patient(limits);
        limits.output = LARGE / 2;
    });
    let taken = rest(&mut ask_for_large(&server)).len();
    assert!(taken > LARGE, "it is the only one: {taken}");
}

#[test]
fn mark_11_a_handler_that_panics_costs_its_own_request_only() {
    let server = start(patient);
    let mut kept = connect(&server);
    for _ in 0..3 {
        let answer = get(&server, "/panic");
        assert_eq!(status(&answer), "500", "{answer}");
        assert!(!answer.contains("for the test"), "what it said is not for strangers: {answer}");
        kept.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
        assert_eq!(status(&one_answer(&mut kept, 5)), "200");
    }
}

#[test]
fn mark_12_answers_are_in_order_and_connections_end_when_they_should() {
    let server = start(patient);
    // Forty in one write, more than one turn serves; the last one ends the connection, and what follows it is
    // not read.
    let mut all: String =
        (0..40).map(|index| format!("GET /{index} HTTP/1.1\r\nHost: localhost\r\n\r\n")).collect();
    all.push_str("GET /last HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\nGET /more HTTP/1.1\r\n");
    let answer = ask(&server, all);
    let bodies: Vec<&str> =
        answer.split("no /").skip(1).map(|rest| rest.split("HTTP/").next().unwrap()).collect();
    let expected: Vec<String> = (0..40).map(|index| index.to_string()).chain(["last".into()]).collect();
    assert_eq!(bodies, expected);

    let answer = ask(&server, "GET / HTTP/1.0\r\nHost: localhost\r\nConnection: keep-alive\r\n\r\n");
    assert!(answer.contains("\r\nConnection: close\r\n") && answer.ends_with("hello"), "{answer}");

    // A client that has closed its sending side still gets its answer.
    let mut done = connect(&server);
    done.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    done.shutdown(Shutdown::Write).unwrap();
    assert_eq!(status(&String::from_utf8(rest(&mut done)).unwrap()), "200");

    // Between requests a connection is kept, but not forever.
    let server = start(|limits| {
        patient(limits);
        limits.idle_timeout = Duration::from_millis(50);
    });
    let mut idle = connect(&server);
    idle.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    assert_eq!(status(&one_answer(&mut idle, 5)), "200");
    assert_eq!(rest(&mut idle), b"", "closed without a word");
}

#[test]
fn dropping_it_closes_everything() {
    let server = start(patient);
    let address: SocketAddr = server.address();
    let mut kept = connect(&server);
    kept.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    assert_eq!(status(&one_answer(&mut kept, 5)), "200");
    drop(server);
    assert_eq!(rest(&mut kept), b"");
    assert!(TcpStream::connect_timeout(&address, HANG).is_err());
}
