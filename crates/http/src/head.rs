//! Parses the head of a request from bytes: no socket, no clock.
//!
//! The parser gets everything that has arrived since the last request and says whether that is a whole head,
//! the beginning of one, or invalid. The result depends only on the bytes and not on how they were split:
//! each error is decided by a whole line, or by the byte that exceeds a limit.
//!
//! It is strict, because requests are smuggled where two programs parse the same bytes differently: lines end
//! in CR LF and nothing else, names are tokens, there is exactly one `Host`, no line continues in the next,
//! and nothing follows the head. The length of a body is read only in [`finish`], and there is only one way
//! to give it: one `Content-Length`.

use std::fmt;

use crate::request::{Header, Method, Request};

/// Limits of the parts of a head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadLimits {
    /// Bytes of the first line.
    pub request_line: usize,
    /// Bytes of all headers together.
    pub headers: usize,
    /// Number of headers.
    pub headers_count: usize,
    /// Bytes of the body of a `POST`; nothing if only `GET` and `HEAD` are answered.
    pub body: Option<usize>,
}

impl Default for HeadLimits {
    fn default() -> Self {
        HeadLimits { request_line: 8 << 10, headers: 32 << 10, headers_count: 100, body: None }
    }
}

/// Why a request is refused. The connection ends with it, because it is unknown where the next request would
/// begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Refusal {
    /// Not valid HTTP; the text says why.
    Malformed(&'static str),
    /// A body, where none is accepted.
    Body,
    /// A method that is not answered here.
    Method,
    /// The same if `POST` is accepted.
    MethodOrPost,
    /// A body without a length.
    NoLength,
    /// A body that is longer than allowed.
    LongBody,
    /// Neither HTTP/1.1 nor HTTP/1.0.
    Version,
    /// A request line that is longer than allowed.
    LongRequestLine,
    /// Headers that are longer than allowed.
    LongHeaders,
    /// The `Host` is not one of ours.
    Host,
    /// A page of another site sent it.
    Origin,
    /// The head did not arrive in time.
    Slow,
    /// The handler panicked.
    Handler,
    /// The handler has not answered in time, or has not started because others are busy.
    Busy,
}

impl Refusal {
    /// The status code of the answer.
    pub fn status(self) -> u16 {
        match self {
            Refusal::Malformed(_) | Refusal::Body => 400,
            Refusal::Origin => 403,
            Refusal::Method | Refusal::MethodOrPost => 405,
            Refusal::Slow => 408,
            Refusal::NoLength => 411,
            Refusal::LongBody => 413,
            Refusal::LongRequestLine => 414,
            Refusal::Host => 421,
            Refusal::LongHeaders => 431,
            Refusal::Handler => 500,
            Refusal::Busy => 503,
            Refusal::Version => 505,
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Refusal::Malformed(what) => what,
            Refusal::Body => "a request here has no body",
            Refusal::Method => "only GET and HEAD are answered here",
            Refusal::MethodOrPost => "only GET, HEAD and POST are answered here",
            Refusal::NoLength => "a body needs a Content-Length",
            Refusal::LongBody => "the body is too long",
            Refusal::Version => "only HTTP/1.1 and HTTP/1.0 are supported",
            Refusal::LongRequestLine => "the request line is too long",
            Refusal::LongHeaders => "the headers are too many or too long",
            Refusal::Host => "this server does not answer to the host in the Host header",
            Refusal::Origin => "a page of another site may not send this",
            Refusal::Slow => "the request did not arrive in time",
            Refusal::Handler => "the handler of this request failed, which is a bug; see the log",
            Refusal::Busy => "no answer in time: the request is still running, or waits for other requests",
        })
    }
}

/// Parses one head from bytes that arrive in pieces. Every byte is read once.
#[derive(Debug, Default)]
pub struct HeadParser {
    limits: HeadLimits,
    /// Where the incomplete line begins.
    line: usize,
    /// There is no line end before this offset.
    searched: usize,
    /// Where the headers begin, and the request so far.
    begun: Option<(usize, Request)>,
}

impl HeadParser {
    /// Reads heads up to these limits.
    pub fn new(limits: HeadLimits) -> Self {
        HeadParser { limits, ..HeadParser::default() }
    }

    /// `input` is all that has arrived since the last request. A whole head is returned with its length in
    /// bytes, and ends the use of this parser; so does a refusal. After the head come
    /// [`Request::body_length`] bytes of body.
    pub fn advance(&mut self, input: &[u8]) -> Result<Option<(Request, usize)>, Refusal> {
        // A TLS client would wait for our answer, and we for the end of its line.
        if input.first().is_some_and(|&byte| !is_token(&[byte])) {
            return Err(Refusal::Malformed("not an HTTP request"));
        }
        loop {
            let end = input[self.searched..].iter().position(|&byte| byte == b'\n');
            let end = end.map(|at| self.searched + at);
            self.check_length(end.unwrap_or(input.len()))?;
            let Some(end) = end else {
                self.searched = input.len();
                return Ok(None);
            };
            let Some(line) = input[self.line..end].strip_suffix(b"\r") else {
                return Err(Refusal::Malformed("a line ends without a carriage return"));
            };
            self.line = end + 1;
            self.searched = end + 1;
            match self.begun.take() {
                None => self.begun = Some((self.line, request_line(line, self.limits.body.is_some())?)),
                Some((_, request)) if line.is_empty() => {
                    return Ok(Some((finish(request, self.limits.body)?, self.line)));
                }
                Some((start, mut request)) => {
                    if request.headers.len() == self.limits.headers_count {
                        return Err(Refusal::LongHeaders);
                    }
                    request.headers.push(header_line(line)?);
                    self.begun = Some((start, request));
                }
            }
        }
    }

    fn check_length(&self, end: usize) -> Result<(), Refusal> {
        match &self.begun {
            None if end > self.limits.request_line => Err(Refusal::LongRequestLine),
            Some((start, _)) if end - start > self.limits.headers => Err(Refusal::LongHeaders),
            _ => Ok(()),
        }
    }
}

fn request_line(line: &[u8], takes_posts: bool) -> Result<Request, Refusal> {
    const SHAPE: Refusal = Refusal::Malformed("the request line is not `METHOD TARGET VERSION`");
    let mut words = line.split(|&byte| byte == b' ');
    let (Some(method), Some(target), Some(version), None) =
        (words.next(), words.next(), words.next(), words.next())
    else {
        return Err(SHAPE);
    };
    if !is_token(method) {
        return Err(SHAPE);
    }
    let method = match method {
        b"GET" => Method::Get,
        b"HEAD" => Method::Head,
        b"POST" if takes_posts => Method::Post,
        _ if takes_posts => return Err(Refusal::MethodOrPost),
        _ => return Err(Refusal::Method),
    };
    let keep_alive = match version {
        b"HTTP/1.1" => true,
        b"HTTP/1.0" => false,
        _ if version.starts_with(b"HTTP/") => return Err(Refusal::Version),
        _ => return Err(SHAPE),
    };
    if target.first() != Some(&b'/') {
        return Err(Refusal::Malformed("the target does not begin with `/`"));
    }
    let target = std::str::from_utf8(target).ok().filter(|target| target.bytes().all(is_in_target));
    let target = target.ok_or(Refusal::Malformed("the target has characters that must be escaped"))?;
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let (path, query, headers) = (path.into(), query.into(), Vec::new());
    Ok(Request { method, path, query, headers, keep_alive, body_length: 0, body: Vec::new() })
}

fn header_line(line: &[u8]) -> Result<Header, Refusal> {
    if line.starts_with(b" ") || line.starts_with(b"\t") {
        return Err(Refusal::Malformed("a header continues in a second line"));
    }
    let colon = line.iter().position(|&byte| byte == b':');
    let colon = colon.ok_or(Refusal::Malformed("a header has no colon"))?;
    let (name, value) = (&line[..colon], &line[colon + 1..]);
    if !is_token(name) {
        return Err(Refusal::Malformed("the name of a header is not a token"));
    }
    // A tab is the only control character that is allowed.
    if value.iter().any(|&byte| byte != b'\t' && byte.is_ascii_control()) {
        return Err(Refusal::Malformed("the value of a header has control characters"));
    }
    let name = name.iter().map(|&byte| byte.to_ascii_lowercase() as char).collect();
    Ok(Header { name, value: value.trim_ascii().to_vec() })
}

/// The checks that need all headers.
fn finish(mut request: Request, body_max: Option<usize>) -> Result<Request, Refusal> {
    match request.values("host").count() {
        0 => return Err(Refusal::Malformed("the request has no Host header")),
        1 => {}
        _ => return Err(Refusal::Malformed("the request has several Host headers")),
    }
    request.body_length = match body_max {
        Some(max) if request.method == Method::Post => body_length(&request, max)?,
        _ => {
            let has_length = request.values("content-length").any(|value| value != b"0");
            if has_length || request.values("transfer-encoding").next().is_some() {
                return Err(Refusal::Body);
            }
            0
        }
    };
    let says_close = |value: &[u8]| {
        value.split(|&byte| byte == b',').any(|wish| wish.trim_ascii().eq_ignore_ascii_case(b"close"))
    };
    let closes = request.values("connection").any(says_close);
    request.keep_alive &= !closes;
    Ok(request)
}

/// One number in digits. Several numbers, or another way to mark the end of the body, allow request
/// smuggling.
fn body_length(request: &Request, max: usize) -> Result<usize, Refusal> {
    if request.values("transfer-encoding").next().is_some() {
        return Err(Refusal::NoLength);
    }
    let mut lengths = request.values("content-length");
    let Some(digits) = lengths.next() else { return Ok(0) };
    if lengths.next().is_some() || digits.is_empty() || !digits.iter().all(u8::is_ascii_digit) {
        return Err(Refusal::Malformed("the Content-Length is not one number"));
    }
    // A number that is too long to parse is too long a body.
    let length = std::str::from_utf8(digits).ok().and_then(|digits| digits.parse().ok());
    length.filter(|length| *length <= max).ok_or(Refusal::LongBody)
}

/// Is this a token of RFC 9110: the name of a method or a header?
fn is_token(bytes: &[u8]) -> bool {
    let is_in_token = |byte: &u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(byte);
    !bytes.is_empty() && bytes.iter().all(is_in_token)
}

/// More than RFC 3986 allows, because browsers do not escape everything that they should, but nothing that
/// needs care later.
fn is_in_target(byte: u8) -> bool {
    byte.is_ascii_graphic() && byte != b'#'
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    type Verdict = Result<Option<(Request, usize)>, Refusal>;

    fn whole(input: &[u8]) -> Verdict {
        HeadParser::default().advance(input)
    }

    /// The result when the bytes arrive in pieces of these sizes, repeated.
    fn in_pieces(input: &[u8], sizes: &[usize]) -> Verdict {
        let mut parser = HeadParser::default();
        let mut end = 0;
        for size in sizes.iter().cycle() {
            end = input.len().min(end + size);
            let verdict = parser.advance(&input[..end]);
            if verdict != Ok(None) || end == input.len() {
                return verdict;
            }
        }
        unreachable!("a cycle of sizes above zero reaches the end")
    }

    fn refusal(input: &str) -> Refusal {
        whole(input.as_bytes()).expect_err(input)
    }

    #[test]
    fn a_request_is_read_with_its_path_query_and_headers() {
        let input =
            b"GET /api/keys?prefix=a%2Fb HTTP/1.1\r\nHost: localhost:80\r\nX-Some: \t a b \r\n\r\nGET";
        let (request, length) = whole(input).unwrap().unwrap();
        assert_eq!(length, input.len() - 3);
        assert_eq!((request.method(), request.path()), (Method::Get, "/api/keys"));
        assert_eq!(request.parameter("prefix"), Ok(Some(b"a/b".to_vec())));
        assert_eq!(request.header("hOST"), Some("localhost:80"));
        assert_eq!(request.header("x-some"), Some("a b"));
        assert_eq!(request.header("x-none"), None);
        assert!(request.keep_alive);
    }

    #[test]
    fn a_connection_ends_when_the_client_says_so_or_speaks_http_1_0() {
        let keeps = |input: &str| whole(input.as_bytes()).unwrap().unwrap().0.keep_alive;
        assert!(keeps("GET / HTTP/1.1\r\nHost: a\r\nConnection: keep-alive\r\n\r\n"));
        assert!(!keeps("GET / HTTP/1.1\r\nHost: a\r\nConnection: x , Close\r\n\r\n"));
        assert!(!keeps("HEAD / HTTP/1.0\r\nHost: a\r\nConnection: keep-alive\r\n\r\n"));
    }

    #[test]
    fn a_post_is_read_where_it_is_taken_and_the_length_of_its_body_is_one_number() {
        let read = |headers: &str| {
            let limits = HeadLimits { body: Some(1000), ..HeadLimits::default() };
            let input = format!("POST /handler/ping HTTP/1.1\r\nHost: a\r\n{headers}\r\nbody");
            HeadParser::new(limits).advance(input.as_bytes())
        };
        let length = |headers: &str| read(headers).map(|head| head.expect("it is whole").0.body_length());
        assert_eq!(length(""), Ok(0));
        assert_eq!(length("Content-Length: 4\r\n"), Ok(4));
        assert_eq!(length("Content-Length: 1000\r\n"), Ok(1000));
        for long in ["1001", "99999999999999999999999999"] {
            assert_eq!(length(&format!("Content-Length: {long}\r\n")), Err(Refusal::LongBody));
        }
        for wrong in ["", "+4", "-4", "4, 4", "0x4", "4 4", "4\r\nContent-Length: 4"] {
            let expected = Refusal::Malformed("the Content-Length is not one number");
            assert_eq!(length(&format!("Content-Length: {wrong}\r\n")), Err(expected), "{wrong}");
        }
        assert_eq!(length("Transfer-Encoding: chunked\r\n"), Err(Refusal::NoLength));
        assert_eq!(length("Content-Length: 4\r\nTransfer-Encoding: identity\r\n"), Err(Refusal::NoLength));
        let limits = HeadLimits { body: Some(1000), ..HeadLimits::default() };
        let refused = |input: &[u8]| HeadParser::new(limits).advance(input).expect_err("it is refused");
        assert_eq!(refused(b"PUT / HTTP/1.1\r\n"), Refusal::MethodOrPost);
        assert_eq!(refused(b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n\r\n"), Refusal::Body);
    }

    #[test]
    fn ambiguous_requests_are_refused() {
        let after_line = |headers: &str| refusal(&format!("GET / HTTP/1.1\r\n{headers}\r\n"));
        let malformed = [
            ("", "the request has no Host header"),
            ("Host: a\r\nHost: a\r\n", "the request has several Host headers"),
            ("Host: a\nX: b\r\n", "a line ends without a carriage return"),
            ("Host: a\r\n b\r\n", "a header continues in a second line"),
            ("Host : a\r\n", "the name of a header is not a token"),
            (": a\r\n", "the name of a header is not a token"),
            ("Host\r\n", "a header has no colon"),
            ("Host: a\r\nX: \0\r\n", "the value of a header has control characters"),
            ("Host: a\r\nX: b\rc\r\n", "the value of a header has control characters"),
        ];
        for (headers, expected) in malformed {
            assert_eq!(after_line(headers), Refusal::Malformed(expected), "{headers:?}");
        }
        for body in
            ["Content-Length: 1", "Content-Length: 0, 0", "Content-Length: +0", "Transfer-Encoding: chunked"]
        {
            assert_eq!(after_line(&format!("Host: a\r\n{body}\r\n")), Refusal::Body, "{body}");
        }
        assert!(whole(b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n").unwrap().is_some());
        let shape = Refusal::Malformed("the request line is not `METHOD TARGET VERSION`");
        let target = Refusal::Malformed("the target does not begin with `/`");
        let escaped = Refusal::Malformed("the target has characters that must be escaped");
        let lines = [
            ("GET  / HTTP/1.1", shape),
            ("GET /", shape),
            ("GET / HTTP/1.1 ", shape),
            ("GET / http/1.1", shape),
            ("G(T / HTTP/1.1", shape),
            ("GET / HTTP/2.0", Refusal::Version),
            ("GET / HTTP/1.10", Refusal::Version),
            ("get / HTTP/1.1", Refusal::Method),
            ("POST / HTTP/1.1", Refusal::Method),
            ("CONNECT a:80 HTTP/1.1", Refusal::Method),
            ("GET http://a/ HTTP/1.1", target),
            ("GET * HTTP/1.1", target),
            ("GET /#a HTTP/1.1", escaped),
            ("GET /\t HTTP/1.1", escaped),
            ("GET /\u{e4} HTTP/1.1", escaped),
        ];
        for (line, expected) in lines {
            assert_eq!(refusal(&format!("{line}\r\nHost: a\r\n\r\n")), expected, "{line}");
        }
        for beginning in ["\x16\x03\x01", "\r\n", " GET", "\0"] {
            assert_eq!(refusal(beginning), Refusal::Malformed("not an HTTP request"), "{beginning:?}");
        }
    }

    #[test]
    fn limits_hold_to_the_byte_and_need_no_line_end() {
        let limits = HeadLimits { request_line: 20, headers: 30, headers_count: 3, body: None };
        let verdict = |input: &str| HeadParser::new(limits).advance(input.as_bytes());
        let line = |length: usize| format!("GET /{} HTTP/1.1\r", "a".repeat(length - 15));
        assert_eq!(verdict(&line(20)), Ok(None));
        assert_eq!(verdict(&line(21)), Err(Refusal::LongRequestLine));
        assert_eq!(verdict(&"G".repeat(21)), Err(Refusal::LongRequestLine));
        let headers = |length: usize| format!("GET / HTTP/1.1\r\nHost: {}", "a".repeat(length - 6));
        assert_eq!(verdict(&headers(30)), Ok(None));
        assert_eq!(verdict(&headers(31)), Err(Refusal::LongHeaders));
        assert!(verdict("GET / HTTP/1.1\r\nHost:a\r\nA:\r\nB:\r\n\r\n").unwrap().is_some());
        assert_eq!(verdict("GET / HTTP/1.1\r\nHost:a\r\nA:\r\nB:\r\nC:\r\n\r\n"), Err(Refusal::LongHeaders));
    }

    /// Bytes that resemble HTTP often enough to get far.
    fn almost_http() -> impl Strategy<Value = Vec<u8>> {
        let piece = prop_oneof![
            4 => prop::sample::select(vec![
                "GET / HTTP/1.1\r\n", "HEAD /a?b=c HTTP/1.0\r\n", "POST / HTTP/1.1\r\n", "Host: a\r\n", "X: y\r\n",
                "Connection: close\r\n", "Content-Length: 0\r\n", "Content-Length: 5\r\n", "\r\n", "\n", " ", ":",
            ]).prop_map(|text| text.as_bytes().to_vec()),
            1 => prop::collection::vec(any::<u8>(), 0..8),
            1 => (1_usize..9000).prop_map(|length| vec![b'a'; length]),
        ];
        prop::collection::vec(piece, 0..12).prop_map(|pieces| pieces.concat())
    }

    proptest! {
        #[test]
        fn a_request_means_the_same_however_it_is_cut(
            input in almost_http(),
            sizes in prop::collection::vec(1_usize..3000, 1..4),
        ) {
            prop_assert_eq!(in_pieces(&input, &sizes), whole(&input));
        }

        #[test]
        fn a_request_means_the_same_byte_by_byte_and_whatever_follows(input in almost_http(), more in almost_http()) {
            let verdict = whole(&input);
            prop_assert_eq!(&in_pieces(&input, &[1]), &verdict);
            if verdict != Ok(None) {
                prop_assert_eq!(whole(&[input, more].concat()), verdict);
            }
        }

        #[test]
        fn no_bytes_harm_the_parser(input in prop::collection::vec(any::<u8>(), 0..2000)) {
            let _ = whole(&input);
            let _ = whole(&[b"GET / HTTP/1.1\r\nHost: a\r\n", input.as_slice()].concat());
        }
    }
}
