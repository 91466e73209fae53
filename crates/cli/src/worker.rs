//! `tenfold worker`: asks the worker server of a running process what the process is doing. Works with PyTorch's as well.

use std::io::{self, IsTerminal as _, Read as _, Write as _};
use std::time::Duration;

use tenfold::control::{Endpoint, EndpointError};
use tenfold_console::{Outcome, SUCCESS, parse_duration};
use tenfold_http::client::{self, Address, Answer, Client};

/// The longest answer that is read; a profile of a minute may have several hundred megabytes.
const ANSWER_MAX: usize = 1 << 30;

/// Ask a worker of a running job for its stacks, its flight recorder or its health.
///
/// Workers listen on a socket file or an address if `tenfold run --worker-server` or the variable TENFOLD_WORKER_SERVER
/// says so: see docs/control-plane.md. PyTorch's worker servers answer as well.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  tenfold run --worker-server=/tmp/job -n 2 train.py
  tenfold worker /tmp/job/rank-0.sock                          list the handlers
  tenfold worker /tmp/job/rank-0.sock dump_traceback           the stacks of all Python threads
  tenfold worker /tmp/job/rank-1.sock fr_trace_json            the last collectives
  tenfold worker /tmp/job/rank-1.sock fr_trace_pickle > trace_1  the same with call sites, for `tenfold trace`
  tenfold worker 127.0.0.1:7000 torch_profile duration=2 > trace.json

Exit status: 0 answered, 1 no answer or an error, 2 invalid arguments.")]
pub(crate) struct Args {
    /// Where the worker listens: the path of its socket (with a slash in it), or HOST:PORT
    #[arg(value_name = "SOCKET|HOST:PORT", value_parser = parse_endpoint)]
    worker: Endpoint,
    /// Handler to call [default: list the handlers]
    handler: Option<String>,
    /// Parameters of the handler
    #[arg(value_name = "KEY=VALUE", value_parser = parse_parameter)]
    parameters: Vec<(String, String)>,
    /// Body of the request; `-` reads standard input
    #[arg(long, value_name = "TEXT", requires = "handler")]
    body: Option<String>,
    /// Time limit for the whole answer
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
    let body = match args.body.as_deref() {
        Some("-") => {
            let mut body = Vec::new();
            io::stdin().read_to_end(&mut body)?;
            body
        }
        body => body.unwrap_or_default().as_bytes().to_vec(),
    };
    let Answer { status, body } = ask(args, &body)?;
    if !(200..300).contains(&status) {
        let said = String::from_utf8_lossy(&body);
        let said = if said.trim().is_empty() { "no message".into() } else { said };
        return Err(format!("the worker at {} answered {status}: {}", args.worker, said.trim_end()).into());
    }
    let mut output = io::stdout().lock();
    if args.handler.is_none() {
        let names: Vec<String> = serde_json::from_slice(&body)
            .map_err(|error| format!("the server at {} is not a worker server: {error}", args.worker))?;
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

/// The path and query of a call.
fn target(name: &str, parameters: &[(String, String)]) -> String {
    let pairs = parameters.iter().map(|(key, value)| format!("{}={}", escape(key), escape(value)));
    let query = pairs.collect::<Vec<_>>().join("&");
    let mark = if query.is_empty() { "" } else { "?" };
    format!("/handler/{}{mark}{query}", escape(name))
}

fn escape(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
    text.bytes()
        .map(|byte| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") })
        .collect()
}

/// Asks the worker for its list of handlers, or calls one.
fn ask(args: &Args, body: &[u8]) -> Result<Answer, String> {
    let address = match &args.worker {
        Endpoint::Socket(path) => Address::Unix(path.clone()),
        Endpoint::Tcp { host, port } => Address::Tcp { host: host.clone(), port: *port },
        _ => return Err(format!("cannot connect to {}: this kind of address is not supported", args.worker)),
    };
    let client = Client::new(address).timeout(args.timeout).body_max(ANSWER_MAX);
    let answer = match &args.handler {
        None => client.get("/handler/"),
        Some(name) => client.post(&target(name, &args.parameters), body),
    };
    answer.map_err(|error| message(&args.worker, &error))
}

/// The error for a user who has just typed an address.
fn message(worker: &Endpoint, error: &client::Error) -> String {
    let kind = match error {
        client::Error::Connect(error) => error.kind(),
        _ => io::ErrorKind::Other,
    };
    let text = error.to_string();
    let (what, hint) = match (worker, error, kind) {
        (Endpoint::Socket(_), _, io::ErrorKind::NotFound) => ("the file does not exist", true),
        (Endpoint::Socket(_), _, io::ErrorKind::ConnectionRefused) => {
            ("its process has exited, only the file is left", false)
        }
        (_, client::Error::TimedOut, _) => ("timed out; raise --timeout to wait longer", false),
        (_, client::Error::Connect(_), io::ErrorKind::PermissionDenied) => (text.as_str(), false),
        (_, client::Error::Connect(_) | client::Error::Broken(_), _) => (text.as_str(), true),
        _ => (text.as_str(), false),
    };
    let hint = if hint {
        "\n  hint: start the worker's server with `tenfold run --worker-server` or TENFOLD_WORKER_SERVER"
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
        assert_eq!(target("ping", &[]), "/handler/ping");
        let parameters = [pair("a b", "1&2=3"), pair("ü", "")];
        assert_eq!(target("x/y", &parameters), "/handler/x%2Fy?a%20b=1%262%3D3&%C3%BC=");
        assert_eq!(parse_parameter("a=b=c"), Ok(pair("a", "b=c")));
        assert_eq!(parse_parameter("a"), Err("write a parameter as KEY=VALUE".to_string()));
    }
}
