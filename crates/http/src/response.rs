//! An answer, and the headers of every answer.

use std::borrow::Cow;
use std::fmt::Write as _;

use crate::head::Refusal;

/// Sent with every answer, errors included: nothing is loaded from elsewhere, no page may frame it, its type
/// is not guessed, and no other site can read it or learn where a link from it was followed.
const PROTECTION: &str = "Content-Security-Policy: default-src 'self'; frame-ancestors 'none'; base-uri 'none'; \
    form-action 'none'\r\nX-Content-Type-Options: nosniff\r\nReferrer-Policy: no-referrer\r\n\
    Cross-Origin-Resource-Policy: same-origin\r\n";

/// The answer of a handler.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Response {
    status: u16,
    content_type: Cow<'static, str>,
    cache_control: &'static str,
    allow: Option<&'static str>,
    body: Cow<'static, [u8]>,
}

impl Response {
    /// A body that is part of the program is not copied. A type that contains a line end is cut there.
    pub fn new(
        status: u16,
        content_type: impl Into<Cow<'static, str>>,
        body: impl Into<Cow<'static, [u8]>>,
    ) -> Self {
        let mut content_type = content_type.into();
        if let Some(end) = content_type.find(|character: char| !(' '..='~').contains(&character)) {
            content_type.to_mut().truncate(end);
        }
        Response { status, content_type, cache_control: "no-store", allow: None, body: body.into() }
    }

    /// Plain text.
    pub fn text(status: u16, text: impl Into<String>) -> Self {
        Response::new(status, "text/plain; charset=utf-8", text.into().into_bytes())
    }

    /// The text must be JSON.
    pub fn json(status: u16, json: impl Into<Vec<u8>>) -> Self {
        Response::new(status, "application/json", json.into())
    }

    /// How long it may be cached; not at all unless set.
    #[must_use]
    pub fn cache_control(mut self, value: &'static str) -> Self {
        self.cache_control = value;
        self
    }

    /// The status code.
    pub fn status(&self) -> u16 {
        self.status
    }

    /// The bytes of the body.
    pub fn body(&self) -> &[u8] {
        &self.body
    }

    pub(crate) fn refusal(refusal: Refusal, hint: &str) -> Self {
        // Nothing that the client sent is in there, so nothing needs escaping.
        let hint = if refusal == Refusal::Host { hint } else { "" };
        let json = format!("{{\"error\":\"{refusal}\",\"hint\":\"{}\"}}\n", escape(hint));
        let allow = match refusal {
            Refusal::Method => Some("GET, HEAD"),
            Refusal::MethodOrPost => Some("GET, HEAD, POST"),
            _ => None,
        };
        Response { allow, ..Response::json(refusal.status(), json) }
    }

    /// The status line and the headers, and the body that follows them.
    pub(crate) fn into_parts(self, keep_alive: bool) -> (String, Cow<'static, [u8]>) {
        let mut head = format!("HTTP/1.1 {} {}\r\n", self.status, reason(self.status));
        let mut header = |name: &str, value: &dyn std::fmt::Display| {
            write!(head, "{name}: {value}\r\n").expect("a string takes everything");
        };
        header("Content-Type", &self.content_type);
        header("Content-Length", &self.body.len());
        header("Cache-Control", &self.cache_control);
        header("Connection", &if keep_alive { "keep-alive" } else { "close" });
        if let Some(methods) = self.allow {
            header("Allow", &methods);
        }
        head.push_str(PROTECTION);
        head.push_str("\r\n");
        (head, self.body)
    }
}

/// Escapes the only text that a program can set, for a string of JSON.
fn escape(text: &str) -> String {
    text.chars().filter(|character| !character.is_control()).fold(String::new(), |mut escaped, character| {
        if matches!(character, '"' | '\\') {
            escaped.push('\\');
        }
        escaped.push(character);
        escaped
    })
}

fn reason(status: u16) -> &'static str {
    match status {
        200 => "OK",
        400 => "Bad Request",
        403 => "Forbidden",
        404 => "Not Found",
        405 => "Method Not Allowed",
        408 => "Request Timeout",
        411 => "Length Required",
        413 => "Content Too Large",
        414 => "URI Too Long",
        421 => "Misdirected Request",
        431 => "Request Header Fields Too Large",
        500 => "Internal Server Error",
        503 => "Service Unavailable",
        505 => "HTTP Version Not Supported",
        _ => "", // the reason phrase is optional
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_has_its_type_and_the_protecting_headers() {
        let (head, body) = Response::text(200, "hello").into_parts(true);
        assert_eq!(
            head,
            "HTTP/1.1 200 OK\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: 5\r\n\
             Cache-Control: no-store\r\nConnection: keep-alive\r\n\
             Content-Security-Policy: default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'\r\n\
             X-Content-Type-Options: nosniff\r\nReferrer-Policy: no-referrer\r\n\
             Cross-Origin-Resource-Policy: same-origin\r\n\r\n"
        );
        assert_eq!(&*body, b"hello");
    }

    #[test]
    fn a_refusal_is_json_with_a_hint_where_one_helps() {
        let refused = Response::refusal(Refusal::Host, "use \"--name\"");
        let expected = "{\"error\":\"this server does not answer to the host in the Host header\",\
                        \"hint\":\"use \\\"--name\\\"\"}\n";
        assert_eq!((refused.status(), refused.body()), (421, expected.as_bytes()));
        let (head, body) = Response::refusal(Refusal::Method, "unused").into_parts(false);
        assert!(head.starts_with("HTTP/1.1 405 Method Not Allowed\r\n"), "{head}");
        assert!(head.contains("\r\nConnection: close\r\nAllow: GET, HEAD\r\n"), "{head}");
        assert_eq!(&*body, b"{\"error\":\"only GET and HEAD are answered here\",\"hint\":\"\"}\n");
    }
}
