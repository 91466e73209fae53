//! Checks events against the trace-event format, as described for chrome://tracing and read by Perfetto's
//! importer: <https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU>. For tests,
//! which cannot run Perfetto.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

/// A process and one of its threads.
type Thread = (u64, u64);

/// The first event that violates the format.
pub(crate) fn check(trace: &Value) -> Result<(), String> {
    let unit = trace["displayTimeUnit"].as_str();
    let events = trace["traceEvents"].as_array().ok_or("`traceEvents` is not a list")?;
    if !matches!(unit, Some("ms" | "ns")) || !trace["otherData"].is_object() {
        return Err(format!("{unit:?} is not a unit, or `otherData` is not an object"));
    }
    let mut all = Events::default();
    for event in events {
        all.take(event).map_err(|problem| format!("{problem}: {event}"))?;
    }
    all.check_names()?;
    all.check_flows()?;
    all.check_nesting()
}

#[derive(Default)]
struct Events {
    processes: BTreeSet<u64>,
    sorted: BTreeSet<u64>,
    threads: BTreeSet<Thread>,
    /// Beginnings and durations, in microseconds.
    slices: BTreeMap<Thread, Vec<(f64, f64)>>,
    /// Phases, places and times by number, in the order of the file.
    flows: BTreeMap<u64, Vec<(char, Thread, f64)>>,
}

impl Events {
    fn take(&mut self, event: &Value) -> Result<(), String> {
        let is_text = |name: &str| event[name].as_str().is_some_and(|text| !text.is_empty());
        let number = |name: &str| event[name].as_u64().ok_or(format!("`{name}` is not a number"));
        let time = |name: &str| {
            let time = event[name].as_f64().filter(|time| time.is_finite() && *time >= 0.0);
            time.ok_or(format!("`{name}` is not a time"))
        };
        let thread = || Ok::<Thread, String>((number("pid")?, number("tid")?));
        let pid = number("pid")?;
        if !is_text("name") {
            return Err("it has no `name`".into());
        }
        match event["ph"].as_str().unwrap_or_default() {
            "M" => {
                let args = &event["args"];
                let is_new = match event["name"].as_str().unwrap_or_default() {
                    "process_name" if args["name"].is_string() => self.processes.insert(pid),
                    "process_sort_index" if args["sort_index"].is_u64() => self.sorted.insert(pid),
                    "thread_name" if args["name"].is_string() => self.threads.insert(thread()?),
                    _ => return Err("it is not a metadata event that viewers know".into()),
                };
                if !is_new {
                    return Err("it is a duplicate".into());
                }
            }
            "X" => {
                if !is_text("cat") || !event["args"].is_object() {
                    return Err("it has no `cat` or no `args`".into());
                }
                self.slices.entry(thread()?).or_default().push((time("ts")?, time("dur")?));
            }
            phase @ ("s" | "t" | "f") => {
                // Viewers connect those that have the same category, name and number.
                if event["cat"] != "arrivals" || event["name"] != "arrivals" {
                    return Err("its category or name is wrong".into());
                }
                // Only an end has `bp`: it binds to the slice around it, not to the next one.
                let binding = if phase == "f" { Value::from("e") } else { Value::Null };
                if event["bp"] != binding {
                    return Err("its `bp` is wrong".into());
                }
                let phase = phase.chars().next().expect("it is one letter");
                self.flows.entry(number("id")?).or_default().push((phase, thread()?, time("ts")?));
            }
            other => return Err(format!("`{other}` is not a phase that is written here")),
        }
        Ok(())
    }

    fn check_names(&self) -> Result<(), String> {
        for thread in self.slices.keys() {
            let (pid, _) = thread;
            let is_named = self.processes.contains(pid) && self.sorted.contains(pid);
            if !is_named || !self.threads.contains(thread) {
                return Err(format!("{thread:?} has no name or no position"));
            }
        }
        let named: BTreeSet<&Thread> = self.slices.keys().collect();
        match self.threads.iter().find(|thread| !named.contains(thread)) {
            None => Ok(()),
            Some(thread) => Err(format!("{thread:?} has a name and no slices")),
        }
    }

    /// One begins, others continue, one ends, each later than the one before, and each in a slice.
    fn check_flows(&self) -> Result<(), String> {
        for (id, steps) in &self.flows {
            let phases: String = steps.iter().map(|(phase, ..)| *phase).collect();
            let inner = phases.strip_prefix('s').and_then(|rest| rest.strip_suffix('f'));
            if inner.is_none_or(|inner| inner.chars().any(|phase| phase != 't')) {
                return Err(format!("flow {id} goes {phases}"));
            }
            if !steps.is_sorted_by_key(|(_, _, time)| *time) {
                return Err(format!("flow {id} goes back in time: {steps:?}"));
            }
            for (_, thread, time) in steps {
                let slices = self.slices.get(thread).map(Vec::as_slice).unwrap_or_default();
                if !slices.iter().any(|(begin, length)| begin <= time && *time <= begin + length) {
                    return Err(format!(
                        "flow {id} has a step outside of any slice: {thread:?} at {time} µs"
                    ));
                }
            }
        }
        Ok(())
    }

    /// Slices of one thread are beside or within each other.
    fn check_nesting(&self) -> Result<(), String> {
        for (thread, slices) in &self.slices {
            let crosses = |one: &(f64, f64), other: &(f64, f64)| {
                one.0 < other.0 && other.0 < one.0 + one.1 && one.0 + one.1 < other.0 + other.1
            };
            // Times in an untrusted file may be so large that a sum is rounded.
            let is_exact = |(begin, length): &&(f64, f64)| begin + length < 2f64.powi(50);
            let slices: Vec<&(f64, f64)> = slices.iter().filter(is_exact).collect();
            if slices.iter().any(|one| slices.iter().any(|other| crosses(one, other))) {
                return Err(format!("slices of {thread:?} cross"));
            }
        }
        Ok(())
    }
}

mod tests {
    use serde_json::json;

    use super::*;

    fn trace(events: Value) -> Value {
        json!({"traceEvents": events, "displayTimeUnit": "ms", "otherData": {}})
    }

    #[test]
    fn what_no_viewer_would_take_is_told() {
        let names = json!([
            {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "rank 0"}},
            {"ph": "M", "name": "process_sort_index", "pid": 0, "args": {"sort_index": 0}},
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": 1, "args": {"name": "dp"}},
            {"ph": "X", "name": "a", "cat": "c", "pid": 0, "tid": 1, "ts": 1.0, "dur": 2.0, "args": {}},
        ]);
        let with = |event: Value| {
            let mut events = names.as_array().unwrap().clone();
            events.push(event);
            check(&trace(events.into()))
        };
        assert_eq!(check(&trace(names.clone())), Ok(()));
        let slice = |ts: f64, dur: f64, tid: u64| json!({"ph": "X", "name": "a", "cat": "c", "pid": 0, "tid": tid, "ts": ts, "dur": dur, "args": {}});
        assert_eq!(with(slice(3.0, 1.0, 1)), Ok(()));
        for (event, problem) in [
            (slice(-1.0, 1.0, 1), "`ts` is not a time"),
            (slice(2.0, 2.0, 1), "slices of (0, 1) cross"),
            (slice(3.0, 1.0, 2), "(0, 2) has no name"),
            (names[0].clone(), "it is a duplicate"),
            (json!({"ph": "B", "name": "a", "pid": 0}), "`B` is not a phase"),
            (json!({"ph": "X", "name": "a"}), "`pid` is not a number"),
            (
                json!({"ph": "s", "id": 7, "name": "arrivals", "cat": "arrivals", "pid": 0, "tid": 1, "ts": 2.0}),
                "flow 7 goes s",
            ),
        ] {
            assert!(with(event).is_err_and(|told| told.contains(problem)), "{problem}");
        }
    }
}
