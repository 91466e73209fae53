//! A small HTTP/1.1 client for the same tools: one request per connection, over TCP or a Unix socket.
//!
//! One deadline covers the whole exchange, and an answer has a longest length. A server that sends a byte at a time, or
//! never stops sending, can neither hold nor fill the caller.
//!
//! Not here: TLS, redirects, proxies, compression, connections that are used twice. Name resolution is the system's and
//! is not covered by the deadline.

use std::fmt;
use std::io::{self, Read as _, Write as _};
use std::net::{TcpStream, ToSocketAddrs as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use tenfold_base::Deadline;

/// Limits of a status line with its headers, and of the line that begins a chunk.
const HEAD_MAX: usize = 16 << 10;
const CHUNK_LINE_MAX: usize = 1 << 10;
const BUFFER: usize = 64 << 10;

/// Where a server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "each variant says what its fields are")]
pub enum Address {
    /// A TCP server.
    Tcp { host: String, port: u16 },
    /// A server on a Unix socket.
    Unix(PathBuf),
}

/// Sends requests to one server.
///
/// ```
/// use tenfold_http::client::{Address, Client};
/// use tenfold_http::{Options, Response, Server};
///
/// let server = Server::start(Options::default(), |_| Response::text(200, "hello"))?;
/// let address = Address::Tcp { host: "127.0.0.1".into(), port: server.address().port() };
/// let answer = Client::new(address).get("/")?;
/// assert_eq!((answer.status, answer.body.as_slice()), (200, &b"hello"[..]));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Client {
    address: Address,
    timeout: Duration,
    body_max: usize,
}

/// What a server answered. The status may be that of an error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The status code, such as 200.
    pub status: u16,
    /// The body, decoded.
    pub body: Vec<u8>,
}

/// Why there is no answer.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// The connection was not made.
    Connect(io::Error),
    /// The connection broke.
    Broken(io::Error),
    /// The deadline passed first.
    TimedOut,
    /// Something else listens there.
    NotHttp,
    /// The answer is not valid HTTP/1.1; the text says where it is wrong.
    Invalid(String),
    /// The body is longer than this many bytes.
    TooLong(usize),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Connect(error) | Error::Broken(error) => f.write_str(&without_number(error)),
            Error::TimedOut => f.write_str("timed out"),
            Error::NotHttp => f.write_str("not an HTTP server"),
            Error::Invalid(what) => write!(f, "invalid HTTP answer: {what}"),
            Error::TooLong(limit) => write!(f, "the answer is longer than {} MiB", limit >> 20),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Error::Connect(error) | Error::Broken(error) => Some(error),
            _ => None,
        }
    }
}

/// The text of the system, without the number that Rust adds.
fn without_number(error: &io::Error) -> String {
    let text = error.to_string();
    let end = text.find(" (os error").unwrap_or(text.len());
    text[..end].to_lowercase()
}

impl Client {
    /// A client with a timeout of 10 s for an exchange, and bodies of up to 16 MiB.
    pub fn new(address: Address) -> Self {
        Client { address, timeout: Duration::from_secs(10), body_max: 16 << 20 }
    }

    /// For the whole exchange, from the connection to the last byte.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// The longest body to accept, in bytes.
    #[must_use]
    pub fn body_max(mut self, bytes: usize) -> Self {
        self.body_max = bytes;
        self
    }

    /// # Errors
    /// If no valid answer arrives in time. An answer with the status of an error is an answer.
    pub fn get(&self, target: &str) -> Result<Answer, Error> {
        self.exchange(&format!("GET {target} HTTP/1.1\r\n"), &[])
    }

    /// Sends `body` as plain text.
    ///
    /// # Errors
    /// As [`Client::get`].
    pub fn post(&self, target: &str, body: &[u8]) -> Result<Answer, Error> {
        let length = body.len();
        let line =
            format!("POST {target} HTTP/1.1\r\nContent-Type: text/plain\r\nContent-Length: {length}\r\n");
        self.exchange(&line, body)
    }

    fn exchange(&self, line: &str, body: &[u8]) -> Result<Answer, Error> {
        let deadline = Deadline::after(self.timeout);
        let stream = Stream::open(&self.address, deadline).map_err(|error| match is_timeout(&error) {
            true => Error::TimedOut,
            false => Error::Connect(error),
        })?;
        // The address, not the name: a server answers to its address, and to names only if it was given them.
        let host = stream.peer().map_err(Error::Connect)?;
        let mut incoming = Incoming { stream, deadline, buffer: vec![0; BUFFER], start: 0, end: 0 };
        let head = format!("{line}Host: {host}\r\nConnection: close\r\n\r\n");
        incoming.send(&[head.as_bytes(), body].concat())?;
        incoming.answer(self.body_max)
    }
}

/// What is left for the next system call.
///
/// # Errors
/// If the deadline has passed: the system takes a limit of zero for none.
fn left(deadline: Deadline) -> io::Result<Option<Duration>> {
    match deadline.left() {
        Some(Duration::ZERO) => Err(io::ErrorKind::TimedOut.into()),
        left => Ok(left),
    }
}

fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock)
}

fn is_hang_up(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionAborted
    )
}

enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Stream {
    fn open(address: &Address, deadline: Deadline) -> io::Result<Stream> {
        match address {
            Address::Tcp { host, port } => open_tcp(host, *port, deadline).map(Stream::Tcp),
            Address::Unix(path) => open_unix(path, deadline).map(Stream::Unix),
        }
    }

    /// For the header `Host`.
    fn peer(&self) -> io::Result<String> {
        match self {
            Stream::Tcp(stream) => stream.peer_addr().map(|peer| peer.to_string()),
            Stream::Unix(_) => Ok("localhost".into()),
        }
    }

    fn read(&mut self, buffer: &mut [u8], deadline: Deadline) -> io::Result<usize> {
        let left = left(deadline)?;
        match self {
            Stream::Tcp(stream) => stream.set_read_timeout(left).and_then(|()| stream.read(buffer)),
            Stream::Unix(stream) => stream.set_read_timeout(left).and_then(|()| stream.read(buffer)),
        }
    }

    fn write(&mut self, bytes: &[u8], deadline: Deadline) -> io::Result<usize> {
        let left = left(deadline)?;
        match self {
            Stream::Tcp(stream) => stream.set_write_timeout(left).and_then(|()| stream.write(bytes)),
            Stream::Unix(stream) => stream.set_write_timeout(left).and_then(|()| stream.write(bytes)),
        }
    }
}

#[expect(clippy::disallowed_methods, reason = "without a limit it may take as long as the system lets it")]
fn open_tcp(host: &str, port: u16, deadline: Deadline) -> io::Result<TcpStream> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, format!("`{host}` has no address"));
    for address in (host, port).to_socket_addrs()? {
        let attempt = match left(deadline)? {
            Some(left) => TcpStream::connect_timeout(&address, left),
            None => TcpStream::connect(address),
        };
        match attempt {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Connecting waits while the server's queue is full, for as long as a send may take.
fn open_unix(path: &Path, deadline: Deadline) -> io::Result<UnixStream> {
    let address = SocketAddrUnix::new(path)?;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    set_socket_timeout(&socket, Timeout::Send, left(deadline)?)?;
    connect(&socket, &address)?;
    Ok(socket.into())
}

/// How long a body is.
#[derive(Debug, PartialEq, Eq)]
enum Length {
    Known(usize),
    Chunked,
    /// It ends with the connection.
    UntilClosed,
}

/// A connection and what was read from it but not used yet.
struct Incoming {
    stream: Stream,
    deadline: Deadline,
    buffer: Vec<u8>,
    start: usize,
    end: usize,
}

fn invalid(what: impl Into<String>) -> Error {
    Error::Invalid(what.into())
}

impl Incoming {
    fn send(&mut self, mut bytes: &[u8]) -> Result<(), Error> {
        while !bytes.is_empty() {
            match self.stream.write(bytes, self.deadline) {
                Ok(count) => bytes = &bytes[count..],
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // A server may refuse a request that it has not read whole, and say why.
                Err(error) if is_hang_up(&error) => return Ok(()),
                Err(error) if is_timeout(&error) => return Err(Error::TimedOut),
                Err(error) => return Err(Error::Broken(error)),
            }
        }
        Ok(())
    }

    fn unread(&self) -> &[u8] {
        &self.buffer[self.start..self.end]
    }

    /// Reads more; false at the end of the stream. All that was read before must have been used.
    fn refill(&mut self) -> Result<bool, Error> {
        debug_assert_eq!(self.start, self.end);
        loop {
            match self.stream.read(&mut self.buffer, self.deadline) {
                Ok(count) => {
                    (self.start, self.end) = (0, count);
                    return Ok(count > 0);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if is_hang_up(&error) => return Ok(false),
                Err(error) if is_timeout(&error) => return Err(Error::TimedOut),
                Err(error) => return Err(Error::Broken(error)),
            }
        }
    }

    /// Bytes up to and including `end`, at most `max`; fewer if the stream ends.
    fn until(&mut self, end: &[u8], max: usize) -> Result<Vec<u8>, Error> {
        let mut taken = Vec::new();
        loop {
            while self.start < self.end {
                taken.push(self.buffer[self.start]);
                self.start += 1;
                if taken.ends_with(end) || taken.len() == max {
                    return Ok(taken);
                }
            }
            if !looks_like_http(&taken) && end == HEAD_END || !self.refill()? {
                return Ok(taken);
            }
        }
    }

    /// Adds `count` bytes to the body; fewer if the stream ends.
    fn take(&mut self, count: usize, body: &mut Vec<u8>) -> Result<(), Error> {
        let mut missing = count;
        while missing > 0 && (self.start < self.end || self.refill()?) {
            let piece = missing.min(self.end - self.start);
            body.extend_from_slice(&self.unread()[..piece]);
            self.start += piece;
            missing -= piece;
        }
        Ok(())
    }

    fn answer(&mut self, body_max: usize) -> Result<Answer, Error> {
        let (status, length) = loop {
            let head = self.until(HEAD_END, HEAD_MAX)?;
            if head.is_empty() || !looks_like_http(&head) {
                return Err(Error::NotHttp);
            }
            let (status, length) = parse_head(&head)?;
            if !(100..200).contains(&status) {
                break (status, length); // else the answer follows
            }
        };
        let mut body = Vec::new();
        match length {
            Length::Known(length) if length > body_max => return Err(Error::TooLong(body_max)),
            Length::Known(length) => {
                self.take(length, &mut body)?;
                if body.len() < length {
                    return Err(invalid(format!("it ended after {} of {length} bytes", body.len())));
                }
            }
            Length::Chunked => self.chunks(body_max, &mut body)?,
            Length::UntilClosed => {
                self.take(body_max.saturating_add(1), &mut body)?;
                if body.len() > body_max {
                    return Err(Error::TooLong(body_max));
                }
            }
        }
        Ok(Answer { status, body })
    }

    fn chunks(&mut self, body_max: usize, body: &mut Vec<u8>) -> Result<(), Error> {
        loop {
            let line = self.until(b"\n", CHUNK_LINE_MAX)?;
            let length = parse_chunk_line(&line)?;
            if length == 0 {
                return Ok(()); // trailers may follow; the connection is closed without them
            }
            if length > body_max - body.len() {
                return Err(Error::TooLong(body_max));
            }
            let whole = body.len() + length;
            self.take(length, body)?;
            if body.len() < whole {
                return Err(invalid("it ended inside a chunk"));
            }
            if self.until(b"\n", 2)? != b"\r\n" {
                return Err(invalid("a chunk is longer than it says"));
            }
        }
    }
}

const HTTP: &[u8] = b"HTTP/1.";
const HEAD_END: &[u8] = b"\r\n\r\n";

fn looks_like_http(bytes: &[u8]) -> bool {
    let length = bytes.len().min(HTTP.len());
    bytes[..length] == HTTP[..length]
}

/// The status, and how long the body is.
fn parse_head(head: &[u8]) -> Result<(u16, Length), Error> {
    if !head.ends_with(HEAD_END) {
        let why = if head.len() == HEAD_MAX { "are too long" } else { "have no end" };
        return Err(invalid(format!("its headers {why}")));
    }
    let head = str::from_utf8(head).map_err(|_| invalid("its headers are not text"))?;
    let mut lines = head.split("\r\n");
    let status = lines.next().and_then(|line| line.split(' ').nth(1)).and_then(parse_status);
    let status = status.ok_or_else(|| invalid("it has no status"))?;
    let (mut length, mut is_chunked) = (None, false);
    for (name, value) in lines.filter_map(|line| line.split_once(':')) {
        let value = value.trim();
        if name.eq_ignore_ascii_case("content-length") {
            let said = parse_digits(value, 10).ok_or_else(|| invalid("its length is not a number"))?;
            if length.replace(said).is_some_and(|before| before != said) {
                return Err(invalid("it has two lengths"));
            }
        } else if name.eq_ignore_ascii_case("transfer-encoding") {
            if !value.eq_ignore_ascii_case("chunked") {
                return Err(invalid("its transfer encoding is not supported"));
            }
            is_chunked = true;
        }
    }
    let length = match (status, is_chunked, length) {
        (204 | 304, ..) => Length::Known(0),
        (_, true, _) => Length::Chunked,
        (_, false, Some(length)) => Length::Known(length),
        (_, false, None) => Length::UntilClosed,
    };
    Ok((status, length))
}

fn parse_status(word: &str) -> Option<u16> {
    parse_digits(word, 10).filter(|status| (100..1000).contains(status)).map(|status| status as u16)
}

/// A hexadecimal length, and perhaps an extension after a semicolon.
fn parse_chunk_line(line: &[u8]) -> Result<usize, Error> {
    let line = line.strip_suffix(b"\r\n").ok_or_else(|| invalid("it ended before a chunk"))?;
    let end = line.iter().position(|byte| *byte == b';').unwrap_or(line.len());
    let digits = str::from_utf8(&line[..end]).ok().map(str::trim);
    digits
        .and_then(|digits| parse_digits(digits, 16))
        .ok_or_else(|| invalid("the length of a chunk is not a number"))
}

/// Digits alone: `from_str_radix` also takes a sign. A number that does not fit is longer than any limit.
fn parse_digits(text: &str, radix: u32) -> Option<usize> {
    let is_number = !text.is_empty() && text.chars().all(|character| character.is_digit(radix));
    is_number.then(|| usize::from_str_radix(text, radix).unwrap_or(usize::MAX))
}

#[cfg(test)]
mod tests;
