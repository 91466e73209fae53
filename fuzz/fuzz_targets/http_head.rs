//! Any bytes, cut anywhere, into the parser of the head of an HTTP request.
//!
//! Never panics; says the same however the bytes were cut, and whatever follows; stays within its limits; and what it takes for a
//! head has the shape that every other program reads in the same way: lines that end in CR LF, one `Host`, one way to say
//! how long the body is.

#![no_main]

use libfuzzer_sys::fuzz_target;
use tenfold_http::{HeadLimits, HeadParser, Method, Refusal, Request};

type Verdict = Result<Option<(Request, usize)>, Refusal>;

// The first byte says whether bodies are taken and where to cut, the second how small the limits are.
fuzz_target!(|data: &[u8]| {
    let &[shape, room, ref rest @ ..] = data else { return };
    let cuts = usize::from(shape >> 1 & 7).min(rest.len());
    let (cuts, input) = rest.split_at(cuts);
    let limits = HeadLimits {
        request_line: 16 + usize::from(room),
        headers: 16 + 2 * usize::from(room),
        headers_count: 1 + usize::from(room % 16),
        body: (shape & 1 == 1).then_some(1000),
    };
    let at_once = HeadParser::new(limits).advance(input);
    assert_eq!(in_parts(input, cuts, limits), at_once);

    match at_once {
        Ok(Some((request, length))) => check(&request, &input[..length], &limits),
        Ok(None) => assert!(input.len() <= limits.request_line + limits.headers + 2, "it waits for too much"),
        Err(refusal) => assert!((400..=505).contains(&refusal.status())),
    }
});

fn in_parts(input: &[u8], cuts: &[u8], limits: HeadLimits) -> Verdict {
    let mut parser = HeadParser::new(limits);
    let mut seen = 0;
    for step in cuts.iter().map(|cut| usize::from(*cut) + 1).chain([input.len()]) {
        seen = (seen + step).min(input.len());
        let verdict = parser.advance(&input[..seen]);
        if verdict != Ok(None) {
            return verdict;
        }
    }
    Ok(None)
}

/// `head` was taken for `request`: it can be read in no other way.
fn check(request: &Request, head: &[u8], limits: &HeadLimits) {
    let text = head.strip_suffix(b"\r\n\r\n").expect("a head ends with an empty line");
    let lines: Vec<&[u8]> = text.split(|&byte| byte == b'\n').collect();
    let (last, others) = lines.split_last().expect("there is a first line");
    assert!(others.iter().all(|line| line.ends_with(b"\r") && !line[..line.len() - 1].contains(&b'\r')));
    assert!(!last.contains(&b'\r'));
    assert!(lines.len() - 1 <= limits.headers_count);
    assert!(lines[0].len() <= limits.request_line + 1);

    let name = |line: &[u8]| line.split(|&byte| byte == b':').next().map(<[u8]>::to_ascii_lowercase);
    let count =
        |wanted: &[u8]| lines[1..].iter().filter(|line| name(line).as_deref() == Some(wanted)).count();
    assert_eq!(count(b"host"), 1);
    match request.method() {
        Method::Post => {
            assert!(request.body_length() <= limits.body.expect("a POST is taken only where bodies are"));
            assert!(count(b"content-length") <= 1);
        }
        Method::Get | Method::Head => assert_eq!(request.body_length(), 0),
    }
    assert_eq!(count(b"transfer-encoding"), 0);

    assert!(request.path().starts_with('/'));
    assert!(request.path().bytes().all(|byte| byte.is_ascii_graphic() && byte != b'?' && byte != b'#'));
    let _ = request.parameters(); // may be refused
    let _ = request.parameter("prefix");
    let again = HeadParser::new(*limits).advance(&[head, b"GET / HTTP/1.1\r\n"].concat());
    assert_eq!(again, Ok(Some((request.clone(), head.len()))), "what follows a head does not change it");
}
