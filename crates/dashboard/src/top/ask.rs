//! Requests to a dashboard's API, and messages for addresses that are not one.

use std::fmt;
use std::time::Duration;

use serde_json::Value;
use tenfold_http::client::{self, Address, Client};

/// The longest answer that is read, three times the facts of ten thousand ranks.
const ANSWER_MAX: usize = 16 << 20;

/// The address of a dashboard, and the time limit of a request.
#[derive(Clone, Debug)]
pub(super) struct Dashboard {
    client: Client,
}

/// Why there is no answer.
#[derive(Debug)]
pub(super) enum Trouble {
    /// No answer, or not an HTTP answer.
    Http(client::Error),
    /// An error of the dashboard, in its own words.
    Refused(String),
    /// The answer is not JSON.
    NotJson(String),
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Trouble::Http(error) => error.fmt(f),
            Trouble::Refused(text) | Trouble::NotJson(text) => write!(f, "{text}"),
        }
    }
}

impl Trouble {
    /// Whether something else listens there, such as a store.
    pub(super) fn is_not_http(&self) -> bool {
        matches!(self, Trouble::Http(client::Error::NotHttp))
    }

    /// The whole message, for a user who has just typed an address.
    pub(super) fn message(&self, address: &str) -> String {
        let hint =
            "\n  hint: use the address that `tenfold serve --dashboard` or `tenfold run --dashboard` prints";
        match self {
            Trouble::Refused(text) => format!("the dashboard at {address} refused: {text}"),
            _ => format!("no dashboard at {address}: {self}{hint}"),
        }
    }
}

impl Dashboard {
    pub(super) fn new(host: &str, port: u16, timeout: Duration) -> Dashboard {
        let address = Address::Tcp { host: host.into(), port };
        Dashboard { client: Client::new(address).timeout(timeout).body_max(ANSWER_MAX) }
    }

    /// Requests the JSON at this path.
    pub(super) fn get(&self, path: &str) -> Result<Value, Trouble> {
        let answer = self.client.get(path).map_err(Trouble::Http)?;
        let status = answer.status;
        let json: Value = serde_json::from_slice(&answer.body).map_err(|error| {
            Trouble::NotJson(format!("`{path}` did not answer with JSON (status {status}): {error}"))
        })?;
        if status == 200 {
            return Ok(json);
        }
        let said = [&json["error"], &json["hint"]].map(|text| text.as_str().unwrap_or_default());
        let said = said.into_iter().filter(|text| !text.is_empty()).collect::<Vec<_>>().join("\n  hint: ");
        Err(Trouble::Refused(if said.is_empty() { format!("`{path}`: status {status}") } else { said }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tenfold_http::{Options, Response, Server};

    /// The result for a dashboard that always gives this answer.
    fn answer(status: u16, body: &'static str) -> Result<Value, String> {
        let server = Server::start(Options::default(), move |_| Response::json(status, body)).unwrap();
        let dashboard = Dashboard::new("localhost", server.address().port(), Duration::from_secs(60));
        dashboard.get("/api/x").map_err(|trouble| trouble.message("HERE"))
    }

    #[test]
    fn an_answer_is_json() {
        assert_eq!(answer(200, r#"{"a":1}"#), Ok(serde_json::json!({"a": 1})));
        let expected = "no dashboard at HERE: `/api/x` did not answer with JSON (status 200): \
                        expected ident at line 1 column 2\n  hint: use the address that \
                        `tenfold serve --dashboard` or `tenfold run --dashboard` prints";
        assert_eq!(answer(200, "no"), Err(expected.into()));
    }

    #[test]
    fn an_error_of_the_dashboard_is_reported_in_its_own_words() {
        let expected = "the dashboard at HERE refused: no such host\n  hint: --dashboard-name";
        let body = r#"{"error": "no such host", "hint": "--dashboard-name"}"#;
        assert_eq!(answer(403, body), Err(expected.into()));
        let expected = "the dashboard at HERE refused: `/api/x`: status 500";
        assert_eq!(answer(500, "{}"), Err(expected.into()));
    }

    #[test]
    fn a_missing_dashboard_is_reported_with_a_hint() {
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let trouble = Dashboard::new("127.0.0.1", port, Duration::from_secs(60)).get("/").unwrap_err();
        let hint =
            "hint: use the address that `tenfold serve --dashboard` or `tenfold run --dashboard` prints";
        assert_eq!(trouble.message("HERE"), format!("no dashboard at HERE: connection refused\n  {hint}"));
        assert!(!trouble.is_not_http());
    }
}
