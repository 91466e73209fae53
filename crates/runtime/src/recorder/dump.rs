//! What is in the ring, as the user sees it and as c10d writes it: version 2.10 of its format, as JSON and as pickle.
//!
//! The two differ where c10d's do: a time that has not come is `None` in a pickle and 0 in JSON, numbers of a group's status are
//! text in JSON, and stacks are in pickles only.
//!
//! Beyond c10d's, which its analyser passes over: whose dump it is, of which host and when (`rank`, `host`, `time_dumped_ns`), and of
//! an operation its `reduce_op` and `root`, where it has such, and when it failed (`time_failed_ns`), if it did. A group that failed has
//! in its status when (`failed_at_ns`), why (`failure`) and, where that is known, which rank of the job is to blame (`failure_rank`).

use super::entry::{Record, State, dtype_name};
use super::groups::GroupFacts;
use super::pickle::Plain;
use super::site::Frame;
use super::{Recorder, THREADS, clock};
use crate::OpKind;
use crate::wire::FabricId;
use tenfold_memory::DType;
use tenfold_plan::Rank;

const VERSION: &str = "2.10";

/// What goes into a dump.
#[derive(Clone, Debug)]
pub struct DumpOptions {
    /// The operations; else only what groups there are and how far they got.
    pub collectives: bool,
    /// Where they were called, as far as that was recorded.
    pub stacks: bool,
    /// Only operations that are not over.
    pub only_active: bool,
    /// Only what one of the ranks of this process recorded.
    only: Option<FabricId>,
}

impl Default for DumpOptions {
    /// Everything, unless `TORCH_INCLUDE_STACK_TRACE` or `TORCH_INCLUDE_ONLY_ACTIVE` say otherwise.
    fn default() -> Self {
        let settings = &super::RECORDER.settings;
        DumpOptions {
            collectives: true,
            stacks: settings.include_stacks,
            only_active: settings.only_active,
            only: None,
        }
    }
}

impl DumpOptions {
    /// Only what the rank of `group` recorded: for programs whose ranks are threads, each with a dump of its own.
    #[must_use]
    pub fn of_rank(mut self, group: &crate::Group) -> Self {
        self.only = group.record().only();
        self
    }

    pub(super) fn only(mut self, only: Option<FabricId>) -> Self {
        self.only = only;
        self
    }
}

/// One operation that was called. Times are nanoseconds since 1970.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Entry {
    /// Counts all entries of this process.
    pub record_id: u64,
    /// Tells groups of this process apart.
    pub group_id: u32,
    /// The name of the group.
    pub group: String,
    /// What the group is for.
    pub description: String,
    /// This process's rank in the group.
    pub rank: Rank,
    /// Which operation.
    pub operation: OpKind,
    /// As in `tenfold:all_reduce` or `tenfold:send 0->1`.
    pub profiling_name: String,
    /// How many collectives of the group were called, this one included; and messages; and both.
    pub collective_seq_id: u64,
    /// How many messages of the group were sent or received.
    pub p2p_seq_id: u64,
    /// How many operations of the group were called.
    pub op_id: u64,
    /// Is it a message between two ranks?
    pub is_p2p: bool,
    /// The type of its elements, if it has any.
    pub dtype: Option<DType>,
    /// `sum` or another, where it reduces.
    pub reduce_op: Option<&'static str>,
    /// A rank of the group, where it has one.
    pub root: Option<Rank>,
    /// Of each tensor; flat unless the caller told its shapes.
    pub input_shapes: Vec<Vec<u64>>,
    /// Of each tensor that comes out.
    pub output_shapes: Vec<Vec<u64>>,
    /// How far it is.
    pub state: State,
    /// When it was called.
    pub created_ns: u64,
    /// When it began.
    pub started_ns: Option<u64>,
    /// When it ended well.
    pub completed_ns: Option<u64>,
    /// Nothing more will happen to it: it ended, well or not.
    pub retired: bool,
    /// When it failed.
    pub failed_ns: Option<u64>,
    /// How long it may take.
    pub timeout_ms: u64,
    /// The thread that called it, by number.
    pub thread_id: String,
    /// The same, by name.
    pub thread_name: String,
    /// The innermost first; empty unless recorded.
    pub frames: Vec<Frame>,
}

/// All that a dump says.
pub(super) struct Snapshot {
    /// Nothing if the process is several ranks, or none yet.
    pub rank: Option<Rank>,
    pub host: String,
    pub time_ns: u64,
    pub groups: Vec<GroupFacts>,
    pub entries: Vec<Entry>,
}

/// `rank` is whose it is, if the caller knows better than the recorder.
pub(super) fn snapshot(recorder: &Recorder, rank: Option<Rank>, options: &DumpOptions) -> Snapshot {
    let recorded = || match options.only {
        Some(only) => recorder.groups.global_rank(only),
        None => recorder.process_rank.get().copied(),
    };
    Snapshot {
        rank: rank.or_else(recorded),
        host: rustix::system::uname().nodename().to_string_lossy().into_owned(),
        time_ns: clock::unix_now(),
        entries: if options.collectives { entries(recorder, options) } else { Vec::new() },
        groups: recorder.groups.facts(options.only),
    }
}

pub(super) fn entries(recorder: &Recorder, options: &DumpOptions) -> Vec<Entry> {
    let Some(ring) = &recorder.ring else { return Vec::new() };
    let records = ring.read();
    let groups = recorder.groups.facts(options.only); // after the ring, so that the group of every record is known
    let to_unix = clock::to_unix();
    let mut entries = Vec::with_capacity(records.len());
    for (id, words) in records {
        let Some(record) = Record::decode(&words) else { continue };
        let Some(group) = groups.iter().find(|group| group.id == record.group) else { continue };
        if !(options.only_active && record.completed != 0) {
            entries.push(entry(recorder, id, &record, group, to_unix));
        }
    }
    entries
}

fn entry(recorder: &Recorder, id: u64, record: &Record, group: &GroupFacts, to_unix: i64) -> Entry {
    let unix = |time: u64| time.wrapping_add_signed(to_unix);
    let thread = THREADS.get(record.thread);
    let site = record.has_site.then(|| recorder.sites.get(id)).flatten();
    let site = site.as_deref().map(super::site::Site::get);
    let flat = |lengths: Vec<u64>| lengths.into_iter().map(|length| vec![length]).collect();
    Entry {
        record_id: id,
        group_id: group.id,
        group: group.name.clone(),
        description: group.description.clone(),
        rank: group.rank,
        operation: record.kind,
        profiling_name: record.profiling_name(group.rank),
        collective_seq_id: record.collectives,
        p2p_seq_id: record.messages,
        op_id: record.collectives + record.messages,
        is_p2p: record.is_message(),
        dtype: record.dtype,
        reduce_op: record.reduce_op(),
        root: record.root(),
        input_shapes: site
            .and_then(|site| site.input_shapes.clone())
            .unwrap_or_else(|| flat(record.input_lengths())),
        output_shapes: site
            .and_then(|site| site.output_shapes.clone())
            .unwrap_or_else(|| flat(record.output_lengths())),
        state: record.state(),
        created_ns: unix(record.created),
        started_ns: (record.started != 0).then(|| unix(record.started)),
        completed_ns: (record.completed != 0).then(|| unix(record.completed)),
        retired: record.retired != 0,
        failed_ns: (record.retired != 0 && record.completed == 0).then(|| unix(record.retired)),
        timeout_ms: record.timeout_ms,
        thread_id: thread.id,
        thread_name: thread.name,
        frames: site.map(|site| site.frames.clone()).unwrap_or_default(),
    }
}

pub(super) fn pickle(snapshot: &Snapshot, options: &DumpOptions) -> Vec<u8> {
    let mut pairs = vec![
        ("version".to_string(), Plain::from(VERSION)),
        ("pg_config".to_string(), config(&snapshot.groups)),
        ("comm_lib_version".to_string(), Plain::from(env!("CARGO_PKG_VERSION"))),
        ("pg_status".to_string(), status(&snapshot.groups, Plain::Int)),
    ];
    pairs.extend(whose(snapshot));
    if options.collectives {
        let entries = snapshot.entries.iter().map(|entry| {
            let mut pairs = Vec::with_capacity(24);
            if options.stacks {
                pairs.push(("frames".to_string(), Plain::List(entry.frames.iter().map(frame).collect())));
            }
            pairs.extend(facts(entry, |time| time.map_or(Plain::None, Plain::from)));
            Plain::Dict(pairs)
        });
        pairs.push(("entries".to_string(), Plain::List(entries.collect())));
    }
    Plain::Dict(pairs).to_pickle()
}

/// The pickle of a recorder that knows no group and no library.
#[cfg(feature = "control")]
pub(crate) fn dump_of_nothing() -> Vec<u8> {
    let empty = || Plain::Dict(Vec::new());
    Plain::dict([
        ("version", Plain::from(VERSION)),
        ("pg_config", empty()),
        ("comm_lib_version", Plain::from("")),
        ("pg_status", empty()),
    ])
    .to_pickle()
}

pub(super) fn json(snapshot: &Snapshot, options: &DumpOptions) -> String {
    let mut pairs = vec![
        ("version".to_string(), Plain::from(VERSION)),
        ("pg_config".to_string(), config(&snapshot.groups)),
        ("comm_lib_version".to_string(), Plain::from(env!("CARGO_PKG_VERSION"))),
        ("nccl_comm_state".to_string(), Plain::Dict(Vec::new())),
        ("pg_status".to_string(), status(&snapshot.groups, |number| Plain::Text(number.to_string()))),
    ];
    pairs.extend(whose(snapshot));
    if options.collectives && !snapshot.entries.is_empty() {
        let entry = |entry| Plain::Dict(facts(entry, |time| Plain::from(time.unwrap_or(0))));
        pairs.push(("entries".to_string(), Plain::List(snapshot.entries.iter().map(entry).collect())));
    }
    Plain::Dict(pairs).to_json().to_string()
}

/// Whose dump it is, from where and when.
fn whose(snapshot: &Snapshot) -> impl Iterator<Item = (String, Plain)> {
    let rank = snapshot.rank.map(|rank| ("rank".to_string(), Plain::from(rank as u64)));
    let rest = [
        ("host".to_string(), Plain::from(snapshot.host.as_str())),
        ("time_dumped_ns".to_string(), Plain::from(snapshot.time_ns)),
    ];
    rank.into_iter().chain(rest)
}

fn config(groups: &[GroupFacts]) -> Plain {
    let of = |group: &GroupFacts| {
        let facts = Plain::dict([
            ("name", Plain::from(group.name.as_str())),
            ("desc", Plain::from(group.description.as_str())),
            ("ranks", Plain::Text(format!("{:?}", group.ranks))),
        ]);
        (group.name.clone(), facts)
    };
    Plain::Dict(groups.iter().map(of).collect())
}

fn status(groups: &[GroupFacts], number: impl Fn(i64) -> Plain) -> Plain {
    let of = |group: &GroupFacts| {
        let mut facts = vec![
            ("last_enqueued_collective", number(group.enqueued)),
            ("last_started_collective", number(group.started)),
            ("last_completed_collective", number(group.completed)),
        ];
        if let Some(failure) = &group.failure {
            facts.push(("failed_at_ns", Plain::from(failure.at_ns)));
            facts.push(("failure", Plain::from(failure.text.as_str())));
            facts.extend(failure.rank.map(|rank| ("failure_rank", Plain::from(rank as u64))));
        }
        let facts = facts.into_iter().map(|(key, value)| (key.to_string(), value));
        (group.id.to_string(), Plain::Dict(facts.collect()))
    };
    Plain::Dict(groups.iter().map(of).collect())
}

fn frame(frame: &Frame) -> Plain {
    Plain::dict([
        ("name", Plain::from(frame.name.as_str())),
        ("filename", Plain::from(frame.file.as_str())),
        ("line", Plain::from(u64::from(frame.line))),
    ])
}

fn facts(entry: &Entry, time: impl Fn(Option<u64>) -> Plain) -> Vec<(String, Plain)> {
    let shapes = |shapes: &[Vec<u64>]| {
        let shape = |shape: &Vec<u64>| Plain::List(shape.iter().map(|length| Plain::from(*length)).collect());
        Plain::List(shapes.iter().map(shape).collect())
    };
    let dtypes = |shapes: &[Vec<u64>]| {
        let name = entry.dtype.map_or("", dtype_name);
        Plain::List(shapes.iter().map(|_| Plain::from(name)).collect())
    };
    let group = (Plain::from(entry.group.as_str()), Plain::from(entry.description.as_str()));
    let mut facts = vec![
        ("record_id", Plain::from(entry.record_id)),
        ("pg_id", Plain::from(u64::from(entry.group_id))),
        ("process_group", Plain::Pair(Box::new(group))),
        ("thread_name", Plain::from(entry.thread_name.as_str())),
        ("thread_id", Plain::from(entry.thread_id.as_str())),
        ("collective_seq_id", Plain::from(entry.collective_seq_id)),
        ("p2p_seq_id", Plain::from(entry.p2p_seq_id)),
        ("op_id", Plain::from(entry.op_id)),
        ("profiling_name", Plain::from(entry.profiling_name.as_str())),
        ("time_created_ns", Plain::from(entry.created_ns)),
    ];
    if let (Some(started), Some(completed)) = (entry.started_ns, entry.completed_ns) {
        facts.push(("duration_ms", Plain::Float(completed.saturating_sub(started) as f64 / 1e6)));
    }
    facts.extend([
        ("input_sizes", shapes(&entry.input_shapes)),
        ("input_dtypes", dtypes(&entry.input_shapes)),
        ("output_sizes", shapes(&entry.output_shapes)),
        ("output_dtypes", dtypes(&entry.output_shapes)),
        ("state", Plain::from(entry.state.name())),
        ("time_discovered_started_ns", time(entry.started_ns)),
        ("time_discovered_completed_ns", time(entry.completed_ns)),
        ("retired", Plain::Bool(entry.retired)),
        ("timeout_ms", Plain::from(entry.timeout_ms)),
        ("is_p2p", Plain::Bool(entry.is_p2p)),
    ]);
    facts.extend(entry.reduce_op.map(|op| ("reduce_op", Plain::from(op))));
    facts.extend(entry.failed_ns.map(|at| ("time_failed_ns", Plain::from(at))));
    facts.extend(entry.root.map(|root| ("root", Plain::from(root as u64))));
    facts.into_iter().map(|(key, value)| (key.to_string(), value)).collect()
}

#[cfg(test)]
mod tests {
    use super::super::groups::Failure;
    use super::*;
    use std::path::Path;

    fn entry(record_id: u64) -> Entry {
        Entry {
            record_id,
            group_id: 0,
            group: "world".to_string(),
            description: "default_pg".to_string(),
            rank: 1,
            operation: OpKind::AllReduce,
            profiling_name: "tenfold:all_reduce".to_string(),
            collective_seq_id: record_id + 1,
            p2p_seq_id: 0,
            op_id: record_id + 1,
            is_p2p: false,
            dtype: Some(DType::F32),
            reduce_op: Some("sum"),
            root: None,
            input_shapes: vec![vec![3, 2]],
            output_shapes: vec![vec![3, 2]],
            state: State::Completed,
            created_ns: 1_794_830_275_365_354_939,
            started_ns: Some(1_794_830_275_365_354_939),
            completed_ns: Some(1_794_830_275_366_604_939),
            retired: true,
            failed_ns: None,
            timeout_ms: 1_800_000,
            thread_id: "4712".to_string(),
            thread_name: "python".to_string(),
            frames: vec![Frame { name: "train".into(), file: "/home/me/train.py".into(), line: 70 }],
        }
    }

    fn snapshot() -> Snapshot {
        let group = GroupFacts {
            id: 0,
            name: "world".to_string(),
            description: "default_pg".to_string(),
            rank: 1,
            ranks: vec![0, 1],
            enqueued: 2,
            started: 1,
            completed: 1,
            failure: Some(Failure {
                at_ns: 1_794_830_279_999_000_000,
                text: "rank 0 (host node6, pid 4711) did not answer for 4.6 s".to_string(),
                rank: Some(0),
            }),
        };
        let waiting = Entry {
            operation: OpKind::Gather,
            profiling_name: "tenfold:gather".to_string(),
            dtype: Some(DType::I64),
            reduce_op: None,
            root: Some(1),
            input_shapes: vec![vec![300]],
            output_shapes: vec![vec![300]; 2],
            state: State::Scheduled,
            started_ns: None,
            completed_ns: None,
            retired: false,
            frames: Vec::new(),
            ..entry(1)
        };
        let message = Entry {
            operation: OpKind::Send,
            profiling_name: "tenfold:send 1->0".to_string(),
            is_p2p: true,
            reduce_op: None,
            collective_seq_id: 2,
            p2p_seq_id: 1,
            op_id: 3,
            output_shapes: Vec::new(),
            state: State::Started,
            completed_ns: None,
            failed_ns: Some(1_794_830_279_999_000_000),
            ..entry(2)
        };
        Snapshot {
            rank: Some(1),
            host: "node7".to_string(),
            time_ns: 1_794_830_280_000_000_000,
            groups: vec![group],
            entries: vec![entry(0), waiting, message],
        }
    }

    /// Compares with a file beside the tests; `TENFOLD_BLESS=1` overwrites it. `tests/python/test_recorder.py` reads both files.
    fn golden(name: &str, ours: &[u8]) {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name);
        if std::env::var_os("TENFOLD_BLESS").is_some() {
            std::fs::write(&path, ours).unwrap();
        }
        let expected = std::fs::read(&path).unwrap();
        assert!(expected == ours, "{name} differs:\n{}", String::from_utf8_lossy(ours));
    }

    #[test]
    fn a_dump_is_the_same_byte_for_byte() {
        let options = DumpOptions::default();
        golden("recorder.pickle", &pickle(&snapshot(), &options));
        golden("recorder.json", json(&snapshot(), &options).as_bytes());
    }
}
