//! Operations over time, as boxes in lanes: the common part of the Perfetto trace and the page.
//!
//! Each rank is a process and each group a thread of it. Operations that overlap get further lanes, since a
//! thread's boxes must not cross. An end that was not recorded is not invented: such a box is a mark at its
//! beginning. An operation that was in progress lasts until the dump.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};
use tenfold_console::one_line;

use super::align::{Group, Job};
use super::dump::{Detail, Dump, End, Record};
use super::words;

/// Lanes of one group on one rank: more than a program has operations in progress. A box that does not fit
/// becomes a mark at its beginning, which crosses nothing.
const LANES_MAX: usize = 256;

pub(crate) struct Timeline<'a> {
    /// The first moment, in nanoseconds since 1970.
    pub(crate) start_ns: i64,
    pub(crate) end_ns: i64,
    pub(crate) boxes: Vec<Box<'a>>,
    /// What a lane is called, by rank and group.
    pub(crate) groups: Vec<String>,
}

/// One operation of one rank.
pub(crate) struct Box<'a> {
    pub(crate) rank: u32,
    /// Index into `groups`.
    pub(crate) group: usize,
    pub(crate) lane: usize,
    pub(crate) begin_ns: i64,
    /// The same as `begin_ns` if it is not known.
    pub(crate) end_ns: i64,
    /// A rank of the job.
    pub(crate) root: Option<i64>,
    pub(crate) record: &'a Record,
}

impl<'a> Timeline<'a> {
    pub(crate) fn new(job: &Job<'a>) -> Timeline<'a> {
        let mut boxes = Vec::new();
        for (index, group) in job.groups.iter().enumerate() {
            for (rank, record) in records(group) {
                let (Some(dump), Some(begin_ns)) = (job.dump(rank), record.created_ns) else { continue };
                let end_ns = end_of(record, dump).max(begin_ns);
                let root = group.root_of(record);
                boxes.push(Box { rank, group: index, lane: 0, begin_ns, end_ns, root, record });
            }
        }
        boxes.sort_by_key(|one| (one.rank, one.group, one.begin_ns, one.record.id));
        choose_lanes(&mut boxes);
        let start_ns = boxes.iter().map(|one| one.begin_ns).min().unwrap_or(0);
        let end_ns = boxes.iter().map(|one| one.end_ns).max().unwrap_or(start_ns);
        let groups = job.groups.iter().map(|group| one_line(&group.title)).collect();
        Timeline { start_ns, end_ns, boxes, groups }
    }

    /// The trace event format: <https://ui.perfetto.dev> and chrome://tracing read it.
    pub(crate) fn to_chrome(&self) -> Value {
        let mut events = Vec::new();
        let mut named = BTreeMap::new();
        for one in &self.boxes {
            named.entry((one.rank, thread_of(one))).or_insert(one);
        }
        let ranks: BTreeSet<u32> = named.keys().map(|(rank, _)| *rank).collect();
        for rank in ranks {
            events.push(json!({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": format!("rank {rank}")}}));
            events.push(
                json!({"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}),
            );
        }
        for (&(rank, thread), one) in &named {
            let lane = if one.lane == 0 { String::new() } else { format!(" ({})", one.lane + 1) };
            let thread_name = format!("{}{lane}", self.groups[one.group]);
            events.push(json!({"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": thread_name}}));
        }
        let mut arrived: BTreeMap<(usize, i64), Vec<&Box<'_>>> = BTreeMap::new();
        for one in &self.boxes {
            events.push(self.event(one));
            if !one.record.is_p2p {
                arrived.entry((one.group, one.record.sequence)).or_default().push(one);
            }
        }
        for (flow, mut together) in arrived.into_values().enumerate() {
            together.sort_by_key(|one| one.begin_ns);
            events.extend(self.arrows(flow, &together));
        }
        json!({"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"start_ns": self.start_ns.to_string()}})
    }

    fn microseconds(&self, moment_ns: i64) -> f64 {
        moment_ns.saturating_sub(self.start_ns) as f64 / 1e3
    }

    fn event(&self, one: &Box<'_>) -> Value {
        json!({
            "ph": "X",
            "name": one.record.title(),
            "cat": if one.record.is_p2p { "message" } else { "collective" },
            "pid": one.rank,
            "tid": thread_of(one),
            "ts": self.microseconds(one.begin_ns),
            "dur": one.end_ns.saturating_sub(one.begin_ns) as f64 / 1e3,
            "args": fields(one).into_iter().collect::<serde_json::Map<_, _>>(),
        })
    }

    /// From the first rank that entered a collective, through the others, to the last.
    fn arrows(&self, flow: usize, together: &[&Box<'_>]) -> Vec<Value> {
        if together.len() < 2 {
            return Vec::new();
        }
        let last = together.len() - 1;
        let arrow = |(index, one): (usize, &&Box<'_>)| {
            let phase = if index == 0 {
                "s"
            } else if index == last {
                "f"
            } else {
                "t"
            };
            let mut event = json!({
                "ph": phase, "id": flow, "name": "arrivals", "cat": "arrivals", "pid": one.rank,
                "tid": thread_of(one), "ts": self.microseconds(one.begin_ns),
            });
            if phase == "f" {
                event["bp"] = json!("e"); // it ends in the box around it, not in the next one
            }
            event
        };
        together.iter().enumerate().map(arrow).collect()
    }
}

/// The number of a box's thread: groups are as far apart as lanes can ever need.
fn thread_of(one: &Box<'_>) -> u64 {
    ((one.group as u64) << 16) + one.lane as u64 + 1
}

/// What is shown of an operation, in this order.
pub(crate) fn fields(one: &Box<'_>) -> Vec<(String, Value)> {
    let record = one.record;
    let mut fields = vec![
        ("sequence".to_owned(), json!(record.sequence)),
        ("tensors".to_owned(), json!(words::tensors(record, one.root))),
        ("state".to_owned(), json!(state(record))),
    ];
    let mut add = |name: &str, value: Option<Value>| {
        fields.extend(value.map(|value| (name.to_owned(), value)));
    };
    if let Detail::Message { source, target } = &record.detail {
        let source = source.map_or("any".into(), |source| source.to_string());
        add("message", Some(json!(format!("{source} → {target} (ranks of the group)"))));
    }
    add("called at", words::call_site(record).map(|site| json!(site)));
    add("duration_ms", record.duration_ms.map(|ms| json!(ms)));
    add("timeout_ms", record.timeout_ms.map(|ms| json!(ms)));
    add("library", (!record.library.is_empty()).then(|| json!(&*record.library)));
    add("thread", record.thread.as_deref().filter(|thread| !thread.is_empty()).map(|thread| json!(thread)));
    add("record", Some(json!(record.id)));
    fields
}

pub(crate) fn state(record: &Record) -> &'static str {
    match record.end {
        End::Open => "in progress when the dump was written",
        End::Completed(_) => "completed",
        End::Failed => "failed",
        End::Unknown => "its end was not recorded",
    }
}

fn records<'a>(group: &Group<'a>) -> impl Iterator<Item = (u32, &'a Record)> {
    let of_rows = group.rows.values().flat_map(|row| {
        row.iter().flat_map(|(rank, records)| records.iter().map(move |&record| (rank, record)))
    });
    let sent = group.sends.iter().flat_map(|(&(rank, _), sends)| sends.iter().map(move |&send| (rank, send)));
    let received =
        group.receives.iter().flat_map(|(&(_, rank), all)| all.iter().map(move |&receive| (rank, receive)));
    of_rows.chain(sent).chain(received)
}

fn end_of(record: &Record, dump: &Dump) -> i64 {
    let begin = record.created_ns.unwrap_or(0);
    let last = || {
        let times = dump.records.iter().flat_map(|record| [record.created_ns, record.ended_ns()]);
        times.flatten().max().unwrap_or(begin)
    };
    match record.end {
        End::Open => dump.written_ns.unwrap_or_else(last),
        End::Completed(_) => record.ended_ns().unwrap_or(begin),
        End::Failed => record.failed_ns.unwrap_or(begin),
        End::Unknown => begin,
    }
}

/// Puts each box into the first free lane of its rank and group. Boxes are sorted by beginning.
fn choose_lanes(boxes: &mut [Box<'_>]) {
    let mut lanes: Vec<i64> = Vec::new();
    let mut of = None;
    for one in boxes {
        if of != Some((one.rank, one.group)) {
            of = Some((one.rank, one.group));
            lanes.clear();
        }
        let free = lanes.iter().position(|&busy_until| busy_until <= one.begin_ns);
        one.lane = free.unwrap_or(lanes.len()).min(LANES_MAX - 1);
        match lanes.get_mut(one.lane) {
            Some(busy_until) if free.is_some() => *busy_until = one.end_ns,
            Some(_) => one.end_ns = one.begin_ns,
            None => lanes.push(one.end_ns),
        }
    }
}
