//! One question to a dashboard: HTTP/1.1 over a plain connection, which is all that its API needs.
//!
//! Every step has the rest of one deadline, and an answer has a longest length, so that a server that drips bytes or
//! never stops cannot hold or fill us.

use std::fmt;
use std::io::{self, Read as _, Write as _};
use std::net::{TcpStream, ToSocketAddrs as _};
use std::time::Duration;

use serde_json::Value;
use tenfold_store::Deadline;

/// The longest answer that is read: the facts of ten thousand ranks are a third of it.
const ANSWER_MAX: usize = 16 << 20;
const HEAD_MAX: usize = 16 << 10;

/// Where a dashboard is, and how long it may take.
#[derive(Clone, Debug)]
pub(super) struct Dashboard {
    host: String,
    port: u16,
    patience: Duration,
}

/// Why there is no answer.
#[derive(Debug)]
pub(super) enum Trouble {
    /// Nobody there, or not in time.
    Unreachable(io::Error),
    /// Somebody who speaks another protocol.
    NotHttp,
    /// An error of the dashboard, in its own words.
    Refused(String),
    /// What it said makes no sense.
    Nonsense(String),
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Trouble::Unreachable(error) => write!(f, "{}", plain(error)),
            Trouble::NotHttp => write!(f, "no HTTP is spoken there"),
            Trouble::Refused(text) | Trouble::Nonsense(text) => write!(f, "{text}"),
        }
    }
}

impl Trouble {
    /// The whole message, for somebody who has just typed an address.
    pub(super) fn told(&self, address: &str) -> String {
        let hint =
            "\n  hint: give the address that `tenfold serve --dashboard` or `tenfold run --dashboard` prints";
        match self {
            Trouble::Refused(text) => format!("the dashboard at {address} refused: {text}"),
            _ => format!("no dashboard at {address}: {self}{hint}"),
        }
    }
}

/// Without the number that Rust puts behind it.
fn plain(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => "no answer in time".into(),
        _ => {
            let text = error.to_string();
            let end = text.find(" (os error").unwrap_or(text.len());
            text[..end].to_lowercase()
        }
    }
}

impl Dashboard {
    pub(super) fn new(host: &str, port: u16, patience: Duration) -> Dashboard {
        Dashboard { host: host.into(), port, patience }
    }

    /// The JSON at this path.
    pub(super) fn get(&self, path: &str) -> Result<Value, Trouble> {
        let deadline = Deadline::after(self.patience);
        let answer = self.exchange(path, deadline)?;
        let (status, body) = read_answer(&answer)?;
        let json: Value = serde_json::from_slice(body).map_err(|error| {
            Trouble::Nonsense(format!("`{path}` gave no JSON (status {status}): {error}"))
        })?;
        if status == 200 {
            return Ok(json);
        }
        let said = [&json["error"], &json["hint"]].map(|text| text.as_str().unwrap_or_default());
        let said = said.into_iter().filter(|text| !text.is_empty()).collect::<Vec<_>>().join("\n  hint: ");
        Err(Trouble::Refused(if said.is_empty() { format!("`{path}`: status {status}") } else { said }))
    }

    /// Sends the request, and returns all bytes that come back.
    fn exchange(&self, path: &str, deadline: Deadline) -> Result<Vec<u8>, Trouble> {
        let mut stream = self.connect(deadline).map_err(Trouble::Unreachable)?;
        let peer = stream.peer_addr().map_err(Trouble::Unreachable)?;
        // The address, not the name: a dashboard answers to its address, and to names only if told so.
        let request = format!("GET {path} HTTP/1.1\r\nHost: {peer}\r\nConnection: close\r\n\r\n");
        let mut answer = Vec::new();
        let mut talk = || -> io::Result<()> {
            stream.set_write_timeout(Some(left(deadline)?))?;
            stream.write_all(request.as_bytes())?;
            let mut piece = [0; 16 << 10];
            loop {
                stream.set_read_timeout(Some(left(deadline)?))?;
                match stream.read(&mut piece) {
                    Ok(0) => return Ok(()),
                    Ok(length) => answer.extend_from_slice(&piece[..length]),
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                    Err(error) => return Err(error),
                }
                let enough =
                    answer.len() > ANSWER_MAX || whole_length(&answer).is_some_and(|all| answer.len() >= all);
                if enough || !looks_like_http(&answer) {
                    return Ok(());
                }
            }
        };
        match talk() {
            Ok(()) => {}
            // A store hangs up on a hello it does not know.
            Err(error) if is_hang_up(&error) && answer.is_empty() => return Err(Trouble::NotHttp),
            Err(error) => return Err(Trouble::Unreachable(error)),
        }
        if !looks_like_http(&answer) || answer.is_empty() {
            return Err(Trouble::NotHttp);
        }
        if answer.len() > ANSWER_MAX {
            return Err(Trouble::Nonsense(format!("`{path}` has more than {} MiB", ANSWER_MAX >> 20)));
        }
        Ok(answer)
    }

    fn connect(&self, deadline: Deadline) -> io::Result<TcpStream> {
        let mut last = io::Error::new(io::ErrorKind::NotFound, format!("`{}` has no address", self.host));
        for address in (self.host.as_str(), self.port).to_socket_addrs()? {
            match TcpStream::connect_timeout(&address, left(deadline)?) {
                Ok(stream) => return Ok(stream),
                Err(error) => last = error,
            }
        }
        Err(last)
    }
}

fn is_hang_up(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionAborted
    )
}

fn left(deadline: Deadline) -> io::Result<Duration> {
    deadline.left().filter(|left| !left.is_zero()).ok_or_else(|| io::ErrorKind::TimedOut.into())
}

const HTTP: &[u8] = b"HTTP/1.";

fn looks_like_http(answer: &[u8]) -> bool {
    let length = answer.len().min(HTTP.len());
    answer[..length] == HTTP[..length]
}

/// Where the body begins.
fn body_start(answer: &[u8]) -> Option<usize> {
    let head = &answer[..answer.len().min(HEAD_MAX)];
    head.windows(4).position(|four| four == b"\r\n\r\n").map(|end| end + 4)
}

fn content_length(head: &str) -> Option<usize> {
    let value = head.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case("content-length").then_some(value)
    })?;
    value.trim().parse().ok()
}

/// How long the answer is in all, once its head says so.
fn whole_length(answer: &[u8]) -> Option<usize> {
    let start = body_start(answer)?;
    let length = content_length(std::str::from_utf8(&answer[..start]).ok()?)?;
    start.checked_add(length)
}

/// Its status and body.
fn read_answer(answer: &[u8]) -> Result<(u16, &[u8]), Trouble> {
    let nonsense = |what: &str| Trouble::Nonsense(format!("an answer {what}"));
    let start = body_start(answer).ok_or_else(|| nonsense("without an end of its head"))?;
    let head = std::str::from_utf8(&answer[..start]).map_err(|_| nonsense("whose head is no text"))?;
    let status = head.split(' ').nth(1).and_then(|word| word.parse().ok());
    let status = status.ok_or_else(|| nonsense("without a status"))?;
    let body = &answer[start..];
    match content_length(head) {
        Some(length) if length > body.len() => {
            Err(nonsense(&format!("of {} bytes that ended after {}", length, body.len())))
        }
        Some(length) => Ok((status, &body[..length])),
        None => Ok((status, body)),
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::disallowed_methods, reason = "a server for one test")]

    use super::*;
    use std::net::TcpListener;
    use std::thread;

    const PATIENCE: Duration = Duration::from_secs(20);

    /// A server that says this to whoever asks, and what it was asked.
    fn server(says: Vec<u8>) -> (Dashboard, thread::JoinHandle<String>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let serve = move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut asked = Vec::new();
            let mut byte = [0];
            while !asked.ends_with(b"\r\n\r\n") && stream.read(&mut byte).unwrap() == 1 {
                asked.push(byte[0]);
            }
            let _the_client_may_have_enough = stream.write_all(&says);
            String::from_utf8(asked).unwrap()
        };
        (Dashboard::new("localhost", port, PATIENCE), thread::Builder::new().spawn(serve).unwrap())
    }

    fn told(says: &[u8]) -> Result<Value, String> {
        let (dashboard, thread) = server(says.to_vec());
        let answer = dashboard.get("/api/x");
        thread.join().unwrap();
        answer.map_err(|trouble| trouble.told("HERE"))
    }

    #[test]
    fn a_question_names_the_address_and_the_answer_is_read_up_to_its_length() {
        let (dashboard, thread) =
            server(b"HTTP/1.1 200 OK\r\ncontent-LENGTH: 7\r\n\r\n{\"a\":1} and more".to_vec());
        assert_eq!(dashboard.get("/api/x").unwrap(), serde_json::json!({"a": 1}));
        let expected =
            format!("GET /api/x HTTP/1.1\r\nHost: 127.0.0.1:{}\r\nConnection: close\r\n\r\n", dashboard.port);
        assert_eq!(thread.join().unwrap(), expected);
        assert_eq!(told(b"HTTP/1.1 200 OK\r\n\r\n[]"), Ok(serde_json::json!([])));
    }

    #[test]
    fn an_error_of_the_dashboard_is_told_in_its_own_words() {
        let body = br#"{"error": "no such host", "hint": "--dashboard-name"}"#;
        let answer =
            [format!("HTTP/1.1 403 No\r\nContent-Length: {}\r\n\r\n", body.len()).as_bytes(), body].concat();
        let expected = "the dashboard at HERE refused: no such host\n  hint: --dashboard-name";
        assert_eq!(told(&answer), Err(expected.into()));
        let expected = "the dashboard at HERE refused: `/api/x`: status 500";
        assert_eq!(told(b"HTTP/1.1 500 Oh\r\nContent-Length: 2\r\n\r\n{}"), Err(expected.into()));
    }

    #[test]
    fn nonsense_is_named_and_never_panics() {
        let hint =
            "\n  hint: give the address that `tenfold serve --dashboard` or `tenfold run --dashboard` prints";
        let cases: [(&[u8], &str); 6] = [
            (b"", "no HTTP is spoken there"),
            (b"220 mail.example.com ESMTP\r\n", "no HTTP is spoken there"),
            (b"HTTP/1.1 200 OK\r\n", "an answer without an end of its head"),
            (b"HTTP/1.1\r\n\r\n", "an answer without a status"),
            (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}", "an answer of 9 bytes that ended after 2"),
            (
                b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nno",
                "`/api/x` gave no JSON (status 200): expected ident at line 1 column 2",
            ),
        ];
        for (says, expected) in cases {
            assert_eq!(told(says), Err(format!("no dashboard at HERE: {expected}{hint}")));
        }
        let huge = b"HTTP/1.1 200 OK\r\nContent-Length: 18446744073709551615\r\n\r\n";
        let expected =
            format!("no dashboard at HERE: an answer of {} bytes that ended after 0{hint}", u64::MAX);
        assert_eq!(told(huge), Err(expected));
    }

    #[test]
    fn nobody_there_is_said_without_numbers_of_the_system() {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let trouble = Dashboard::new("127.0.0.1", port, PATIENCE).get("/").unwrap_err();
        let hint =
            "hint: give the address that `tenfold serve --dashboard` or `tenfold run --dashboard` prints";
        assert_eq!(trouble.told("HERE"), format!("no dashboard at HERE: connection refused\n  {hint}"));
    }
}
