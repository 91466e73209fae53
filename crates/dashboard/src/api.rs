//! The routes of the dashboard. Every field is documented in `docs/dashboard.md`, and a test keeps the two in
//! step.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::Serialize;
use tenfold_base::Exposition;
use tenfold_http::{QueryError, Request, Response};
use tenfold_store::{Clients, Facts, Server, Survey, WaiterFacts};

use super::history::History;
use super::metrics::{self, Process};
use super::runs::{self, Beats, Reported, Run};
use super::verdict;

/// The limit for a survey of keys.
const COUNTING_MAX: Duration = Duration::from_millis(300);
/// Clients that are listed unless more are requested.
const CLIENTS: usize = 200;
/// Bytes of a value that are shown.
const VALUE_SHOWN: usize = 4 << 10;

/// The time at which a request arrived.
#[derive(Clone, Copy, Debug)]
pub(super) struct Now {
    pub(super) instant: Instant,
    pub(super) unix: f64,
}

/// What all answers are made from.
#[derive(Debug)]
pub(super) struct Board {
    server: Arc<Server>,
    values: bool,
    history: Mutex<History>,
    beats: Mutex<Beats>,
}

/// Either an answer or the reason why there is none; both are sent.
type Answer = Result<Response, Response>;

impl Board {
    pub(super) fn new(server: Arc<Server>, values: bool) -> Self {
        Board { server, values, history: Mutex::default(), beats: Mutex::default() }
    }

    /// Once a second: adds a point to the charts, and reads every beat.
    pub(super) fn look(&self, now: Instant) {
        let facts = self.facts_with(0);
        hold(&self.history).note(now, facts);
        runs::read(&self.server, &mut hold(&self.beats), now);
    }

    pub(super) fn answer(&self, request: &Request, now: Now) -> Response {
        let answer = match request.path() {
            "/" => Ok(file("text/html; charset=utf-8", include_bytes!("page/index.html"))),
            "/style.css" => Ok(file("text/css; charset=utf-8", include_bytes!("page/style.css"))),
            "/app.js" => Ok(file("text/javascript; charset=utf-8", include_bytes!("page/app.js"))),
            "/icon.svg" => Ok(file("image/svg+xml", include_bytes!("page/icon.svg"))),
            "/api/overview" => Ok(self.overview()),
            "/api/history" => Ok(json(&hold(&self.history).lists(now.unix))),
            "/api/runs" => Ok(self.runs(now)),
            "/api/waiters" => Ok(self.waiters(now)),
            "/api/clients" => self.clients(request),
            "/api/slow" => Ok(json(&self.server.slowest())),
            "/api/keys" => self.keys(request),
            "/api/value" => self.value(request),
            "/metrics" => Ok(self.metrics(now)),
            _ => Err(error(404, "no such path", "the page is at /, the facts are under /api/")),
        };
        answer.unwrap_or_else(|refused| refused)
    }

    /// What the server reports, with at least `waiters` waiters listed, without launchers.
    fn facts_with(&self, waiters: usize) -> Facts {
        // To leave launchers out, their waits have to be listed; without a job there are none.
        let listed = if runs::are_there(&self.server) { waiters.max(Facts::WAITERS_MAX) } else { waiters };
        let mut facts = self.server.facts_with(listed);
        runs::leave_out_launchers(&mut facts);
        facts
    }

    fn overview(&self) -> Response {
        #[derive(Serialize)]
        struct Overview {
            version: &'static str,
            values_allowed: bool,
            process: Process,
            server: serde_json::Value,
        }
        let mut server = serde_json::to_value(self.facts_with(0)).unwrap_or_default();
        if let Some(fields) = server.as_object_mut() {
            fields.remove("waiters"); // they have a separate path
        }
        let version = env!("CARGO_PKG_VERSION");
        json(&Overview { version, values_allowed: self.values, process: process(), server })
    }

    fn described(&self, waiters: &[WaiterFacts], now: Now) -> Vec<Run> {
        let raw = runs::read(&self.server, &mut hold(&self.beats), now.instant);
        runs::describe(raw, waiters, &[])
    }

    fn runs(&self, now: Now) -> Response {
        // A rank that waits but is not listed elsewhere must not look as if it ran.
        let raw = runs::read(&self.server, &mut hold(&self.beats), now.instant);
        let ranks: usize = raw.iter().map(runs::Raw::connections).sum();
        let waiters = self.facts_with(ranks + Facts::WAITERS_MAX).waiters;
        // If the server is too busy to answer, everything else is still worth showing.
        let clients =
            (ranks > 0).then(|| self.server.clients(Clients::LIMIT_MAX)).flatten().unwrap_or_default();
        let runs = runs::describe(raw, &waiters, &clients.clients);
        let mut runs = serde_json::to_value(runs).unwrap_or_default();
        runs.as_array_mut().into_iter().flatten().for_each(verdict::annotate);
        json(&runs)
    }

    fn waiters(&self, now: Now) -> Response {
        #[derive(Serialize)]
        struct Waiter {
            peer: String,
            run: Option<String>,
            rank: Option<String>,
            operation: String,
            keys: String,
            keys_count: usize,
            seconds: f64,
        }
        let waiters = self.facts_with(Facts::WAITERS_MAX).waiters;
        let runs = self.described(&[], now);
        let of_run = |run: &Run| -> Vec<(String, (String, usize))> {
            run.ranks_by_peer().map(|(peer, rank)| (peer, (run.id.clone(), rank))).collect()
        };
        let known: HashMap<String, (String, usize)> = runs.iter().flat_map(of_run).collect();
        let show = |waiter: WaiterFacts| {
            let (run, rank) = known.get(&runs::canonical(&waiter.peer)).cloned().unzip();
            let rank = rank.map(|rank| rank.to_string());
            let WaiterFacts { peer, operation, keys, keys_count, seconds, .. } = waiter;
            Waiter { peer, run, rank, operation, keys, keys_count, seconds }
        };
        let reported = |run: &Run| -> Vec<Waiter> {
            let show = |Reported { peer, rank, wait }: Reported<'_>| Waiter {
                peer: peer.to_owned(),
                run: Some(run.id.clone()),
                rank: Some(rank.to_string()),
                operation: wait.operation.clone(),
                keys: wait.keys.clone(),
                keys_count: wait.keys_count,
                seconds: wait.seconds,
            };
            run.reported_waits().map(show).collect()
        };
        let mut waiters: Vec<Waiter> = waiters.into_iter().map(show).collect();
        waiters.extend(runs.iter().flat_map(reported));
        waiters.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
        waiters.truncate(Facts::WAITERS_MAX);
        json(&waiters)
    }

    fn clients(&self, request: &Request) -> Answer {
        let limit = match text(request, "limit")? {
            None => CLIENTS,
            Some(limit) => limit.parse().map_err(|_| bad("`limit` is not a number", "such as ?limit=200"))?,
        };
        self.server.clients(limit).map(|clients| json(&clients)).ok_or_else(busy)
    }

    fn keys(&self, request: &Request) -> Answer {
        let prefix = bytes(request, "prefix")?.unwrap_or_default();
        // Other requests wait for the same thread; a survey that takes long is ready for the next request.
        Ok(survey(self.server.survey_within(&prefix, COUNTING_MAX).as_ref()))
    }

    fn value(&self, request: &Request) -> Answer {
        #[derive(Serialize)]
        struct Shown<'a> {
            key: &'a str,
            #[serde(skip_serializing_if = "Option::is_none")]
            key_hex: Option<String>,
            bytes: usize,
            text: Option<&'a str>,
            hex: String,
            truncated: bool,
        }
        if !self.values {
            let hint =
                "start the server with --dashboard-values to show them to anyone who can reach this page";
            return Err(error(403, "this server does not show values", hint));
        }
        let Some(mut key) = bytes(request, "key")? else {
            return Err(bad("no key was given", "such as ?key=/a or ?key_hex=2f61"));
        };
        let mut value = self.server.value(&key);
        if value.is_none() && !key.starts_with(b"/") {
            key.insert(0, b'/'); // clients put it there, and few users know
            value = self.server.value(&key);
        }
        let hint = "a key is given as /api/keys lists it; a queue has no value";
        let value = value.ok_or_else(|| error(404, "no value under this key", hint))?;
        let shown = &value[..value.len().min(VALUE_SHOWN)];
        let name = String::from_utf8_lossy(&key);
        Ok(json(&Shown {
            key: &name,
            key_hex: std::str::from_utf8(&key).is_err().then(|| hex(&key)),
            bytes: value.len(),
            text: as_text(shown, shown.len() < value.len()),
            hex: hex(shown),
            truncated: shown.len() < value.len(),
        }))
    }

    fn metrics(&self, now: Now) -> Response {
        let facts = self.facts_with(Facts::WAITERS_MAX);
        let runs = self.described(&facts.waiters, now);
        Response::new(200, Exposition::CONTENT_TYPE, metrics::page(&facts, &process(), &runs).into_bytes())
    }
}

/// A panic leaves nothing in here half changed.
fn hold<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

// ── requests ───────────────────────────────────────────────────────────────────────────────────────────────

/// The bytes of a parameter, given as text or as `NAME_hex`.
fn bytes(request: &Request, name: &str) -> Result<Option<Vec<u8>>, Response> {
    let plain = request.parameter(name).map_err(bad_query)?;
    let in_hex = text(request, &format!("{name}_hex"))?;
    match (plain, in_hex) {
        (Some(_), Some(_)) => Err(bad("the same was given as text and in hexadecimal", "give one of them")),
        (None, Some(digits)) => match unhex(&digits) {
            Some(bytes) => Ok(Some(bytes)),
            None => Err(bad("this is not hexadecimal", "two digits for each byte, such as 2f61")),
        },
        (plain, None) => Ok(plain),
    }
}

fn text(request: &Request, name: &str) -> Result<Option<String>, Response> {
    let bytes = request.parameter(name).map_err(bad_query)?;
    bytes.map(String::from_utf8).transpose().map_err(|_| bad("a parameter is not text", "it must be UTF-8"))
}

fn bad_query(problem: QueryError) -> Response {
    bad(&problem.to_string(), "write % as %25, & as %26 and + as %2B")
}

// ── answers ────────────────────────────────────────────────────────────────────────────────────────────────

fn file(content_type: &'static str, bytes: &'static [u8]) -> Response {
    Response::new(200, content_type, bytes)
}

fn json(facts: &impl Serialize) -> Response {
    match serde_json::to_vec(facts) {
        Ok(text) => Response::json(200, text),
        Err(problem) => error(500, &format!("the answer is not JSON: {problem}"), "this is a bug"),
    }
}

fn error(status: u16, error: &str, hint: &str) -> Response {
    Response::json(status, serde_json::json!({"error": error, "hint": hint}).to_string())
}

fn bad(problem: &str, hint: &str) -> Response {
    error(400, problem, hint)
}

/// "Nothing yet" is also a good answer: browsers complain about any error status, and nothing is wrong.
fn survey(survey: Option<&Survey>) -> Response {
    #[derive(Serialize)]
    struct Shown<'a> {
        counting: bool,
        #[serde(flatten)]
        survey: Option<&'a Survey>,
    }
    json(&Shown { counting: survey.is_none(), survey })
}

fn busy() -> Response {
    error(503, "the store's server did not answer within 2 s", "it is busy or has exited; try again")
}

/// The text of a value; nothing if it is not text. The cut may be inside a character.
fn as_text(bytes: &[u8], is_cut: bool) -> Option<&str> {
    match std::str::from_utf8(bytes) {
        Ok(text) => Some(text),
        Err(error) if is_cut && error.error_len().is_none() => {
            std::str::from_utf8(&bytes[..error.valid_up_to()]).ok()
        }
        Err(_) => None,
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(digits: &str) -> Option<Vec<u8>> {
    let digit = |byte: u8| (byte as char).to_digit(16);
    let pairs = digits.as_bytes().chunks(2);
    pairs.map(|pair| Some((digit(pair[0])? << 4 | digit(*pair.get(1)?)?) as u8)).collect()
}

/// The resources that this process uses, if the system reports them.
fn process() -> Process {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages: u64 = pages.split_whitespace().nth(1).and_then(|pages| pages.parse().ok()).unwrap_or(0);
    let spent = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Process {
        pid: std::process::id(),
        memory_bytes: pages.saturating_mul(rustix::param::page_size() as u64),
        cpu_seconds: spent.tv_sec as f64 + spent.tv_nsec as f64 / 1e9,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_that_are_still_being_counted_are_not_an_error() {
        let said = |answer: Response| {
            let body: serde_json::Value = serde_json::from_slice(answer.body()).expect("it is JSON");
            (answer.status(), body["counting"].clone(), body["keys"].clone())
        };
        assert_eq!(said(survey(None)), (200, true.into(), serde_json::Value::Null));
        assert_eq!(said(survey(Some(&Survey::default()))), (200, false.into(), 0.into()));
    }

    #[test]
    fn hexadecimal_goes_both_ways_and_strictly() {
        assert_eq!(unhex(&hex(b"\x00/a\xff")), Some(b"\x00/a\xff".to_vec()));
        assert_eq!(unhex(""), Some(Vec::new()));
        for wrong in ["a", "0g", "+1", "\u{e4}"] {
            assert_eq!(unhex(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn a_value_is_text_if_all_of_it_is_but_for_a_character_that_was_cut() {
        assert_eq!(as_text("aä".as_bytes(), false), Some("aä"));
        assert_eq!(as_text(b"a\xc3", true), Some("a"));
        assert_eq!(as_text(b"a\xc3", false), None);
        assert_eq!(as_text(b"a\xffb", true), None);
    }
}
