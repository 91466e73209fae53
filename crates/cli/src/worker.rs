//! `tenfold worker`: asks a running process what it does, by its worker server. Works with PyTorch's, too.
//!
//! One request over a connection of its own, which is all that this needs; every step has the rest of one deadline, and an
//! answer has a longest length.

use std::io::{self, IsTerminal as _, Read, Write};
use std::net::{TcpStream, ToSocketAddrs as _};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use tenfold::control::{Endpoint, EndpointError};
use tenfold_store::Deadline;

use tenfold_console::parse_duration;
use tenfold_console::{Outcome, SUCCESS};

/// The longest answer that is read; a profile of a minute may have some hundred megabytes.
const ANSWER_MAX: u64 = 1 << 30;

/// Asks a worker of a running job what it does: its stacks, its flight recorder, its health.
///
/// Workers listen if they are asked to, on a socket file or an address: see `tenfold run --worker-server`, the variable
/// TENFOLD_WORKER_SERVER, and docs/control-plane.md. PyTorch's worker servers answer as well.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  tenfold run --worker-server=/tmp/job -n 2 train.py
  tenfold worker /tmp/job/rank-0.sock                          what can be asked
  tenfold worker /tmp/job/rank-0.sock dump_traceback           the stacks of all Python threads
  tenfold worker /tmp/job/rank-1.sock fr_trace_json            the last collectives
  tenfold worker /tmp/job/rank-1.sock fr_trace_pickle > trace_1  the same with call sites, for `tenfold trace`
  tenfold worker 127.0.0.1:7000 torch_profile duration=2 > trace.json

Exit status: 0 answered, 1 not, 2 wrong arguments.")]
pub(crate) struct Args {
    /// Where the worker listens: the path of its socket (with a slash in it), or HOST:PORT
    #[arg(value_name = "SOCKET|HOST:PORT", value_parser = parse_endpoint)]
    worker: Endpoint,
    /// What to ask; without it, what can be asked is listed
    handler: Option<String>,
    /// Parameters of the handler
    #[arg(value_name = "KEY=VALUE", value_parser = parse_parameter)]
    parameters: Vec<(String, String)>,
    /// Text to send with it; `-` reads standard input
    #[arg(long, value_name = "TEXT", requires = "handler")]
    body: Option<String>,
    /// For the whole answer
    #[arg(long, default_value = "60s", value_parser = parse_duration)]
    timeout: Duration,
}

fn parse_endpoint(text: &str) -> Result<Endpoint, String> {
    text.parse().map_err(|error: EndpointError| format!("{error}\n  hint: {}", EndpointError::HINT))
}

fn parse_parameter(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or("write a parameter as KEY=VALUE")?;
    Ok((key.to_string(), value.to_string()))
}

pub(crate) fn run(args: &Args) -> Outcome {
    let deadline = Deadline::after(args.timeout);
    let body = match args.body.as_deref() {
        Some("-") => {
            let mut body = Vec::new();
            io::stdin().read_to_end(&mut body)?;
            body
        }
        body => body.unwrap_or_default().as_bytes().to_vec(),
    };
    let answer = match &args.handler {
        None => exchange(&args.worker, "GET /handler/", &[], deadline),
        Some(name) => exchange(&args.worker, &target(name, &args.parameters), &body, deadline),
    };
    let Answer { status, body } = answer.map_err(|error| told(&args.worker, &error))?;
    if !(200..300).contains(&status) {
        let said = String::from_utf8_lossy(&body);
        let said = if said.trim().is_empty() { "without a word".into() } else { said };
        return Err(format!("the worker at {} answered {status}: {}", args.worker, said.trim_end()).into());
    }
    let mut output = io::stdout().lock();
    if args.handler.is_none() {
        let names: Vec<String> = serde_json::from_slice(&body)
            .map_err(|error| format!("what answers at {} is no worker server: {error}", args.worker))?;
        for name in names {
            writeln!(output, "{name}")?;
        }
    } else {
        output.write_all(&body)?;
        if io::stdout().is_terminal() && !body.ends_with(b"\n") {
            writeln!(output)?;
        }
    }
    output.flush()?;
    Ok(SUCCESS)
}

/// The beginning of the request line.
fn target(name: &str, parameters: &[(String, String)]) -> String {
    let pairs = parameters.iter().map(|(key, value)| format!("{}={}", escape(key), escape(value)));
    let query = pairs.collect::<Vec<_>>().join("&");
    let mark = if query.is_empty() { "" } else { "?" };
    format!("POST /handler/{}{mark}{query}", escape(name))
}

fn escape(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
    text.bytes()
        .map(|byte| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") })
        .collect()
}

#[derive(Debug, PartialEq, Eq)]
struct Answer {
    status: u16,
    body: Vec<u8>,
}

fn exchange(worker: &Endpoint, line: &str, body: &[u8], deadline: Deadline) -> io::Result<Answer> {
    let length = body.len();
    let head = |host: &str| {
        let length =
            if line.starts_with("POST") { format!("Content-Length: {length}\r\n") } else { String::new() };
        format!(
            "{line} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Type: text/plain\r\n{length}\r\n"
        )
    };
    match worker {
        Endpoint::Socket(path) => {
            let mut stream = UnixStream::connect(path)?;
            stream.set_write_timeout(Some(left(deadline)?))?;
            stream.write_all(&[head("localhost").as_bytes(), body].concat())?;
            read(&mut stream, |stream| stream.set_read_timeout(Some(left(deadline)?)))
        }
        Endpoint::Tcp { host, port } => {
            let mut stream = connect(host, *port, deadline)?;
            // The address, not the name: a worker answers to its address whatever it is called.
            let peer = stream.peer_addr()?.to_string();
            stream.set_write_timeout(Some(left(deadline)?))?;
            stream.write_all(&[head(&peer).as_bytes(), body].concat())?;
            read(&mut stream, |stream| stream.set_read_timeout(Some(left(deadline)?)))
        }
        _ => Err(io::ErrorKind::Unsupported.into()),
    }
}

fn connect(host: &str, port: u16, deadline: Deadline) -> io::Result<TcpStream> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, format!("`{host}` has no address"));
    for address in (host, port).to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, left(deadline)?) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

fn left(deadline: Deadline) -> io::Result<Duration> {
    deadline.left().filter(|left| !left.is_zero()).ok_or_else(|| io::ErrorKind::TimedOut.into())
}

/// All until the worker closes; `before` is called before every read.
fn read<S: Read>(stream: &mut S, before: impl Fn(&S) -> io::Result<()>) -> io::Result<Answer> {
    let mut bytes = Vec::new();
    let mut piece = vec![0; 64 << 10];
    loop {
        before(stream)?;
        match stream.read(&mut piece) {
            Ok(0) => return parse(&bytes),
            Ok(length) => bytes.extend_from_slice(&piece[..length]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            // A server that refuses what it has not read whole may close hard, after its answer.
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return parse(&bytes),
            Err(error) => return Err(error),
        }
        if bytes.len() as u64 > ANSWER_MAX {
            let what = format!("the answer has more than {} MiB", ANSWER_MAX >> 20);
            return Err(io::Error::new(io::ErrorKind::InvalidData, what));
        }
    }
}

fn parse(bytes: &[u8]) -> io::Result<Answer> {
    let wrong = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what);
    if !bytes.starts_with(b"HTTP/1.") {
        return Err(wrong("no HTTP is spoken there"));
    }
    let end = bytes
        .windows(4)
        .position(|four| four == b"\r\n\r\n")
        .ok_or_else(|| wrong("the answer has no end"))?;
    let head = String::from_utf8_lossy(&bytes[..end]);
    let status = head.split(' ').nth(1).and_then(|word| word.get(..3)?.parse().ok());
    let status = status.ok_or_else(|| wrong("the answer has no status"))?;
    let length = head.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse::<usize>().ok())?
    });
    let body = &bytes[end + 4..];
    match length {
        Some(length) if length > body.len() => {
            Err(wrong(&format!("the answer ended after {} of {length} bytes", body.len())))
        }
        Some(length) => Ok(Answer { status, body: body[..length].to_vec() }),
        None => Ok(Answer { status, body: body.to_vec() }),
    }
}

/// What to tell somebody who has just typed a place.
fn told(worker: &Endpoint, error: &io::Error) -> String {
    let text = error.to_string();
    let text = text.split(" (os error").next().unwrap_or_default();
    let (what, hint) = match (worker, error.kind()) {
        (Endpoint::Socket(_), io::ErrorKind::NotFound) => ("there is no such file", true),
        (Endpoint::Socket(_), io::ErrorKind::ConnectionRefused) => {
            ("nobody listens on it any more: the process that made it has ended", false)
        }
        (_, io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock) => {
            ("no answer in time; --timeout gives it more", false)
        }
        (_, io::ErrorKind::InvalidData | io::ErrorKind::PermissionDenied) => (text, false),
        _ => (text, true),
    };
    let hint = if hint {
        "\n  hint: workers listen if they are told to: `tenfold run --worker-server`, or TENFOLD_WORKER_SERVER"
    } else {
        ""
    };
    format!("no answer from the worker at {worker}: {what}{hint}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_parameters_are_escaped() {
        let pair = |key: &str, value: &str| (key.to_string(), value.to_string());
        assert_eq!(target("ping", &[]), "POST /handler/ping");
        let parameters = [pair("a b", "1&2=3"), pair("ü", "")];
        assert_eq!(target("x/y", &parameters), "POST /handler/x%2Fy?a%20b=1%262%3D3&%C3%BC=");
        assert_eq!(parse_parameter("a=b=c"), Ok(pair("a", "b=c")));
        assert_eq!(parse_parameter("a"), Err("write a parameter as KEY=VALUE".to_string()));
    }

    #[test]
    fn an_answer_is_read_up_to_its_length_and_nonsense_is_named() {
        let good = parse(b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\nabc").unwrap();
        assert_eq!(good, Answer { status: 404, body: b"ab".to_vec() });
        assert_eq!(parse(b"HTTP/1.0 200\r\n\r\nabc").unwrap().body, b"abc");
        for (bytes, expected) in [
            (&b""[..], "no HTTP is spoken there"),
            (b"SSH-2.0", "no HTTP is spoken there"),
            (b"HTTP/1.1 200 OK\r\n", "the answer has no end"),
            (b"HTTP/1.1 what\r\n\r\n", "the answer has no status"),
            (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nabc", "the answer ended after 3 of 5 bytes"),
        ] {
            assert_eq!(parse(bytes).unwrap_err().to_string(), expected);
        }
    }
}
