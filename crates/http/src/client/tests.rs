#![expect(clippy::disallowed_methods, reason = "servers of the tests are threads, one of which sends slowly")]

use super::*;
use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::thread::{self, JoinHandle};

const TIMEOUT: Duration = Duration::from_secs(60);

/// Reads a request's head.
fn request_of(stream: &mut TcpStream) -> String {
    let mut asked = Vec::new();
    let mut byte = [0];
    while !asked.ends_with(b"\r\n\r\n") && stream.read(&mut byte).unwrap() == 1 {
        asked.push(byte[0]);
    }
    String::from_utf8(asked).unwrap()
}

/// A server for one request; `serve` gets the connection after the head was read.
fn server(serve: impl FnOnce(&mut TcpStream) + Send + 'static) -> (Client, JoinHandle<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let thread = thread::Builder::new().spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let asked = request_of(&mut stream);
        serve(&mut stream);
        asked
    });
    (Client::new(Address::Tcp { host: "localhost".into(), port }).timeout(TIMEOUT), thread.unwrap())
}

fn answered(says: &[u8]) -> Result<Answer, String> {
    let says = says.to_vec();
    let (client, thread) = server(move |stream| {
        let _the_client_may_have_hung_up = stream.write_all(&says);
    });
    let answer = client.body_max(1 << 20).get("/");
    thread.join().unwrap();
    answer.map_err(|error| error.to_string())
}

fn good(status: u16, body: &[u8]) -> Result<Answer, String> {
    Ok(Answer { status, body: body.to_vec() })
}

#[test]
fn a_request_names_the_address_and_carries_the_body() {
    let says = b"HTTP/1.1 200 OK\r\ncontent-LENGTH: 2\r\n\r\nok and more";
    let (client, thread) = server(|stream| stream.write_all(says).unwrap());
    let Address::Tcp { port, .. } = client.address else { unreachable!() };
    assert_eq!(client.get("/api/x?y=1").unwrap().body, b"ok");
    let expected = format!("GET /api/x?y=1 HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n\r\n");
    assert_eq!(thread.join().unwrap(), expected);

    let (client, thread) = server(|stream| {
        let mut body = [0; 4];
        stream.read_exact(&mut body).unwrap();
        stream.write_all(&[b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n", &body[..]].concat()).unwrap();
    });
    assert_eq!(client.post("/", b"echo").unwrap().body, b"echo");
    assert!(thread.join().unwrap().contains("\r\nContent-Length: 4\r\n"));
}

#[test]
fn a_body_ends_where_its_framing_says() {
    assert_eq!(answered(b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\nabc"), good(404, b"ab"));
    assert_eq!(answered(b"HTTP/1.0 200\r\n\r\nabc"), good(200, b"abc"));
    assert_eq!(answered(b"HTTP/1.1 204 No Content\r\n\r\n"), good(204, b""));
    let chunked =
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n3\r\nabc\r\nA;x=y\r\n0123456789\r\n0\r\n\r\n";
    assert_eq!(answered(chunked), good(200, b"abc0123456789"));
    let continued = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx";
    assert_eq!(answered(continued), good(200, b"x"));
}

#[test]
fn an_invalid_answer_is_an_error_that_says_what_is_wrong() {
    let invalid = |what: &str| Err(format!("invalid HTTP answer: {what}"));
    let not_http = || Err("not an HTTP server".to_string());
    assert_eq!(answered(b""), not_http());
    assert_eq!(answered(b"220 mail.example.com ESMTP\r\n"), not_http());
    assert_eq!(answered(b"SSH-2.0"), not_http());
    assert_eq!(answered(b"HTTP/1.1 200 OK\r\n"), invalid("its headers have no end"));
    assert_eq!(answered(b"HTTP/1.1\r\n\r\n"), invalid("it has no status"));
    assert_eq!(answered(b"HTTP/1.1 99999 Hm\r\n\r\n"), invalid("it has no status"));
    assert_eq!(answered(b"HTTP/1.1 200 \xff\r\n\r\n"), invalid("its headers are not text"));
    let with =
        |header: &str, body: &str| answered(format!("HTTP/1.1 200 OK\r\n{header}\r\n\r\n{body}").as_bytes());
    assert_eq!(with("Content-Length: 5", "abc"), invalid("it ended after 3 of 5 bytes"));
    for number in ["-1", "+3", "x", "", "3, 3"] {
        assert_eq!(with(&format!("Content-Length: {number}"), "abc"), invalid("its length is not a number"));
    }
    assert_eq!(with("Content-Length: 1\r\nContent-Length: 2", "abc"), invalid("it has two lengths"));
    assert_eq!(with("Transfer-Encoding: gzip", ""), invalid("its transfer encoding is not supported"));
}

#[test]
fn nonsense_between_chunks_is_an_error() {
    let chunks =
        |body: &[u8]| answered(&[b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", body].concat());
    let invalid = |what: &str| Err(format!("invalid HTTP answer: {what}"));
    for line in ["x", "", "-1", "+1", "0x1", ";"] {
        let expected = invalid("the length of a chunk is not a number");
        assert_eq!(chunks(format!("{line}\r\na\r\n").as_bytes()), expected, "{line:?}");
    }
    assert_eq!(chunks(b""), invalid("it ended before a chunk"));
    assert_eq!(chunks(b"3"), invalid("it ended before a chunk"));
    assert_eq!(chunks(&b"1".repeat(1 << 20)), invalid("it ended before a chunk"));
    assert_eq!(chunks(b"3\r\nab"), invalid("it ended inside a chunk"));
    assert_eq!(chunks(b"3\r\nabcd\r\n"), invalid("a chunk is longer than it says"));
    let too_long = Err("the answer is longer than 1 MiB".to_string());
    assert_eq!(chunks(b"ffffffffffffffffffffffff\r\n"), too_long);
    assert_eq!(chunks(b"1\r\na\r\n100000\r\n"), too_long);
}

#[test]
fn an_answer_is_bounded() {
    let too_long = || Err("the answer is longer than 1 MiB".to_string());
    assert_eq!(answered(b"HTTP/1.1 200 OK\r\nContent-Length: 18446744073709551615\r\n\r\n"), too_long());
    assert_eq!(answered(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999\r\n\r\n"), too_long());
    // Servers that never stop, unless the client does.
    let endless = |start: &'static [u8], more: &'static [u8]| {
        let (client, thread) = server(move |stream| {
            stream.write_all(start).unwrap();
            while stream.write_all(more).is_ok() {}
        });
        let error = client.body_max(1 << 20).get("/").unwrap_err();
        thread.join().unwrap();
        error.to_string()
    };
    let expected = "invalid HTTP answer: its headers are too long";
    assert_eq!(endless(b"HTTP/1.1 200 OK\r\n", b"X-More: and more\r\n"), expected);
    assert_eq!(endless(b"HTTP/1.1 200 OK\r\n\r\n", b"and more"), too_long().unwrap_err());
}

#[test]
fn one_deadline_covers_an_answer_that_trickles() {
    // The server sends until the client hangs up, which it does only because of its deadline.
    let trickle = |start: &'static [u8]| {
        let (client, thread) = server(move |stream| {
            stream.set_nodelay(true).unwrap();
            stream.write_all(start).unwrap();
            while stream.write_all(b"a").is_ok() {
                thread::sleep(Duration::from_millis(1));
            }
        });
        let error = client.timeout(Duration::from_millis(300)).get("/").unwrap_err();
        assert!(matches!(error, Error::TimedOut), "{error:?}");
        drop(thread); // on a very busy machine no connection was made in time
    };
    trickle(b"HTTP/1.1 200 OK\r\nContent-Length: 10000000\r\n\r\n");
    trickle(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n900000\r\n");
    trickle(b"HTTP/1.1 200 OK\r\n\r\n");
}

#[test]
fn a_server_that_does_not_answer_times_out() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let client = Client::new(Address::Tcp { host: "127.0.0.1".into(), port });
    let error = client.timeout(Duration::from_millis(50)).get("/").unwrap_err();
    assert_eq!(error.to_string(), "timed out");
}

#[test]
fn a_unix_socket_whose_queue_is_full_times_out() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("full.sock");
    let listener = UnixListener::bind(&path).unwrap();
    rustix::net::listen(&listener, 0).unwrap();
    let _waits_in_the_queue = UnixStream::connect(&path).unwrap();
    let client = Client::new(Address::Unix(path)).timeout(Duration::from_millis(50));
    assert!(matches!(client.get("/").unwrap_err(), Error::TimedOut));
}

#[test]
fn a_missing_server_is_reported_without_numbers_of_the_system() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let error = Client::new(Address::Tcp { host: "127.0.0.1".into(), port }).get("/").unwrap_err();
    assert_eq!(error.to_string(), "connection refused");
    let folder = tempfile::tempdir().unwrap();
    let missing = Client::new(Address::Unix(folder.path().join("none.sock"))).get("/").unwrap_err();
    assert!(matches!(&missing, Error::Connect(error) if error.kind() == io::ErrorKind::NotFound));
    assert_eq!(missing.to_string(), "no such file or directory");
}

#[test]
fn a_refusal_is_read_although_the_request_was_not() {
    let says = b"HTTP/1.1 413 Content Too Large\r\nContent-Length: 3\r\n\r\nbig";
    let (client, thread) = server(|stream| stream.write_all(says).unwrap());
    let answer = client.post("/", &vec![b'x'; 256 << 10]);
    thread.join().unwrap();
    // Whether the answer or the reset arrives first is the kernel's choice; the client never hangs or panics.
    match answer {
        Ok(answer) => assert_eq!((answer.status, answer.body.as_slice()), (413, &b"big"[..])),
        Err(error) => assert!(matches!(error, Error::NotHttp | Error::Invalid(_)), "{error:?}"),
    }
}
