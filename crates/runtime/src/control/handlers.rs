//! The handlers that every worker has: c10d's, with its answers, and `metrics`.
//!
//! A handler that is added here needs no further registration. `torch_profile` is PyTorch's, and comes with `tenfold.torch`.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

use serde_json::{Map, Value, json};

use super::{Handler, Request, Response, pyspy, threads};
use crate::recorder::{self, DumpOptions};
use crate::{metrics as numbers, recorder::Entry};

/// What c10d calls this backend, and asks for when it is not well.
const BACKEND: &str = "tenfold";

pub(super) fn built_in() -> BTreeMap<String, Handler> {
    type Plain = fn(&Request) -> Response;
    let list: [(&str, Plain); 12] = [
        ("ping", |_| Response::text(200, "pong")),
        ("c10d_health_check", |_| health_check()),
        ("fr_trace_json", |_| Response::json(recorder::dump_json(&DumpOptions::default()))),
        ("fr_trace_pickle", |_| fr_trace_pickle()),
        ("fr_dump_file", |_| fr_dump_file()),
        ("dump_nccl_trace_json", nccl_trace_json),
        ("dump_nccl_trace_pickle", nccl_trace_pickle),
        ("dump_traceback", |_| Response::text(200, traceback())),
        ("pyspy_dump", pyspy::dump),
        ("wait_counter_values", |_| wait_counter_values()),
        ("metrics", |_| metrics()),
        ("stragglers", |_| Response::text(200, numbers::straggler_report())),
    ];
    list.into_iter().map(|(name, handler)| (name.to_string(), Arc::new(handler) as Handler)).collect()
}

/// Prometheus' text, for `GET /metrics` too.
pub(super) fn metrics() -> Response {
    Response::new(200, tenfold_base::Exposition::CONTENT_TYPE, numbers::prometheus())
}

/// Well, unless a group that this process still has can no longer be used. Which ones is more than c10d says.
fn health_check() -> Response {
    let groups = recorder::groups();
    let unwell: Vec<&str> =
        groups.iter().filter(|group| group.is_unhealthy()).map(|group| group.name()).collect();
    let mut answer = json!({"healthy": unwell.is_empty(), "unhealthy_backends": []});
    if !unwell.is_empty() {
        answer["unhealthy_backends"] = json!([BACKEND]);
        answer["unhealthy_groups"] = json!(unwell);
    }
    Response::json(answer.to_string())
}

/// The whole dump, with call sites as far as they were recorded: what a file of it holds. c10d has none of its name.
fn fr_trace_pickle() -> Response {
    let mut options = DumpOptions::default();
    options.stacks = true;
    pickled(recorder::dump_pickle(&options))
}

fn pickled(bytes: Vec<u8>) -> Response {
    Response::new(200, "application/octet-stream", bytes)
}

fn fr_dump_file() -> Response {
    let files: Vec<_> = recorder::write_all().into_iter().map(|(_, written)| written).collect();
    if files.is_empty() {
        let text = "Flight Recorder rank is unset; no process group has registered with it yet";
        return Response::text(503, text);
    }
    let all_written = files.iter().all(Result::is_ok);
    let line = |file: std::io::Result<std::path::PathBuf>| match file {
        Ok(path) => format!("Flight Recorder dump written to {}\n", path.display()),
        Err(error) => format!("{error}\n"),
    };
    Response::text(if all_written { 200 } else { 500 }, files.into_iter().map(line).collect::<String>())
}

/// PyTorch's debug server has a page for NCCL's recorder. There is no NCCL here: an empty trace, as from a PyTorch without it.
fn nccl_trace_json(request: &Request) -> Response {
    if let Some(refusal) = refuse_unknown(request, &["includecollectives", "onlyactive"]) {
        return refusal;
    }
    let empty = json!({
        "comm_lib_version": "", "nccl_comm_state": {}, "pg_config": {}, "pg_status": {}, "version": "2.10",
    });
    Response::json(empty.to_string())
}

/// The same as a pickle.
fn nccl_trace_pickle(request: &Request) -> Response {
    let known = ["includecollectives", "includestacktraces", "onlyactive"];
    refuse_unknown(request, &known).unwrap_or_else(|| pickled(recorder::dump_of_nothing()))
}

/// c10d's complaint about parameters that it does not know, or not with this value.
fn refuse_unknown(request: &Request, known: &[&str]) -> Option<Response> {
    request.params().iter().find_map(|(key, value)| {
        if !known.contains(&&key[..]) {
            return Some(Response::text(400, "Invalid parameters - unexpected param passed in"));
        }
        let wrong = || Response::text(400, format!("Invalid value for {key} valid values are true or false"));
        (!matches!(&value[..], "true" | "false")).then(wrong)
    })
}

/// How long operations of each kind stood still because of others, in c10d's form.
fn wait_counter_values() -> Response {
    let active = |entry: &Entry| !entry.retired;
    let entries = recorder::entries();
    let mut counters: BTreeMap<&str, (u64, u128, u128)> = BTreeMap::new();
    for one in numbers::snapshot() {
        let counter = counters.entry(one.operation.name()).or_default();
        counter.0 += one.count;
        counter.1 += one.wait.as_micros();
        counter.2 = counter.2.max(one.wait_max.as_micros());
    }
    for entry in entries.iter().filter(|entry| active(entry)) {
        counters.entry(entry.operation.name()).or_default();
    }
    let mut values = Map::new();
    for (operation, (calls, total, max)) in counters {
        let now = entries.iter().filter(|entry| active(entry) && entry.operation.name() == operation).count();
        let value = json!({
            "active_count": now,
            "max_time_us": u64::try_from(max).unwrap_or(u64::MAX),
            "total_calls": calls,
            "total_time_us": u64::try_from(total).unwrap_or(u64::MAX),
        });
        values.insert(format!("tenfold.wait_counter.{operation}"), value);
    }
    Response::json(Value::Object(values).to_string())
}

type TracebackSource = Box<dyn Fn() -> Result<String, String> + Send + Sync>;

static TRACEBACKS: OnceLock<TracebackSource> = OnceLock::new();

/// Who knows the stacks of this process's threads: Python, if it is here. The first one stays.
pub fn set_traceback_source(source: impl Fn() -> Result<String, String> + Send + Sync + 'static) {
    let _ = TRACEBACKS.set(Box::new(source)); // a second one knows no more
}

fn traceback() -> String {
    match TRACEBACKS.get().map(|source| source()) {
        Some(Ok(stacks)) => stacks,
        // An interpreter that does not even answer this is a finding of its own.
        Some(Err(why)) => format!("{why}\n\n{}", threads::dump()),
        None => threads::dump(),
    }
}
