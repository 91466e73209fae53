//! One rank's flight-recorder dump, as values with names.
//!
//! The format is PyTorch's, version 2.x. A minor version only adds fields, so all of them are read by taking
//! the fields that exist. Fields that are missing or of another type are left out; only what identifies a
//! record (its group, its name and its number) is required. Numbers come from untrusted files: none is used
//! as an index or a length before it was checked.
//!
//! A program makes few different calls, and each of them thousands of times on every rank. What these calls
//! have in common is stored once, in a [`Call`] that its records share.

use std::collections::{BTreeMap, HashSet};
use std::ops::Deref;
use std::sync::Arc;

use super::plain::{Key, View};

/// Operations, frames, sizes and members of one dump together. Mentioning one list a million times takes a
/// million bytes in a pickle; here each mention costs memory.
const PARTS_MAX: usize = 4_000_000;
/// Pairs of a dictionary that can be searched in about the time that a part takes. A large one may be
/// mentioned many times.
const PAIRS_A_PART: usize = 8;
/// Bytes of the texts of all calls, counted each time they are mentioned, because they are compared.
const TEXT_MAX: usize = 1 << 30;
/// Members of one group.
const MEMBERS_MAX: usize = 1 << 20;

#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Dump {
    pub(crate) rank: u32,
    /// The user's name for it.
    pub(crate) file: String,
    pub(crate) version: String,
    /// The host, if the recorder has it: tenfold's does, PyTorch's does not.
    pub(crate) host: Option<Arc<str>>,
    /// When it was written, in nanoseconds since 1970: as the dump says, otherwise its file's time if that is
    /// plausible.
    pub(crate) written_ns: Option<i64>,
    /// What the recorder knows of its groups, by name. Gloo's own recorder has nothing useful here.
    pub(crate) groups: BTreeMap<Arc<str>, GroupConfig>,
    pub(crate) records: Vec<Record>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct GroupConfig {
    pub(crate) description: Arc<str>,
    /// Global ranks, in the order of the group.
    pub(crate) ranks: Vec<u32>,
    /// Why it cannot be used any more; only tenfold's recorder has it.
    pub(crate) failure: Option<Failure>,
}

/// What a rank knows of the failure of one of its groups.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) at_ns: i64,
    pub(crate) text: Arc<str>,
    /// The rank that caused it, as a rank of the job.
    pub(crate) rank: Option<u32>,
}

/// One operation on one rank. The fields of its call can be read as if they were the record's own.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Record {
    /// Counts all records of the rank: if the first is not 0, the ring has lost some.
    pub(crate) id: i64,
    pub(crate) call: Arc<Call>,
    pub(crate) sequence: i64,
    pub(crate) created_ns: Option<i64>,
    pub(crate) started_ns: Option<i64>,
    pub(crate) end: End,
    /// When it failed; only tenfold's recorder has it.
    pub(crate) failed_ns: Option<i64>,
    pub(crate) duration_ms: Option<f64>,
}

const _: () = assert!(size_of::<Record>() <= 104, "there are millions of them");

impl Deref for Record {
    type Target = Call;

    fn deref(&self) -> &Call {
        &self.call
    }
}

/// What was called and where, independent of time.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Call {
    pub(crate) group: Arc<str>,
    pub(crate) description: Arc<str>,
    /// `all_reduce`, `send`.
    pub(crate) operation: Arc<str>,
    /// The recorder: `gloo`, `nccl`, `tenfold`.
    pub(crate) library: Arc<str>,
    pub(crate) detail: Detail,
    /// `sum`, and a rank of the group: only tenfold's recorder has them.
    pub(crate) reduce_op: Option<Arc<str>>,
    pub(crate) root: Option<i64>,
    pub(crate) is_p2p: bool,
    pub(crate) inputs: Vec<Shape>,
    pub(crate) outputs: Vec<Shape>,
    pub(crate) timeout_ms: Option<i64>,
    pub(crate) thread: Option<Arc<str>>,
    /// The call's stack, innermost first.
    pub(crate) frames: Vec<Frame>,
}

/// Every call that was read, once.
#[derive(Debug, Default)]
pub(super) struct Calls(HashSet<Arc<Call>>);

impl Calls {
    fn share(&mut self, call: Call) -> Arc<Call> {
        if let Some(known) = self.0.get(&call) {
            return known.clone();
        }
        let new = Arc::new(call);
        self.0.insert(new.clone());
        new
    }
}

/// What follows the name of an operation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) enum Detail {
    #[default]
    None,
    /// From and to, as ranks of the group. A receiver may not know its sender.
    Message { source: Option<u32>, target: u32 },
    /// An argument that must be the same on all ranks, such as a root.
    Argument(Arc<str>),
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum End {
    /// In progress when the dump was written.
    #[default]
    Open,
    /// Completed; the time is not always known.
    Completed(Option<i64>),
    /// Not completed, according to a recorder that records completions: it failed or timed out.
    Failed,
    /// The recorder no longer watches it. It may have completed, failed, or still be running: Gloo's recorder
    /// and PyTorch's hook do not say.
    Unknown,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Shape {
    pub(crate) sizes: Vec<i64>,
    pub(crate) dtype: Option<Arc<str>>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Frame {
    pub(crate) name: Arc<str>,
    pub(crate) file: Arc<str>,
    pub(crate) line: i64,
}

impl Shape {
    /// Bounded, so that sums over all tensors and ranks of an untrusted file cannot overflow.
    pub(crate) fn elements(&self) -> i128 {
        const BOUND: i128 = 1 << 80;
        let product = self.sizes.iter().fold(1, |product: i128, &size| product.saturating_mul(size.into()));
        product.clamp(-BOUND, BOUND)
    }
}

impl Record {
    /// Its name in messages: `all_reduce #288`.
    pub(crate) fn title(&self) -> String {
        match self.is_p2p {
            false => format!("{} #{}", self.operation, self.sequence),
            true => self.operation.to_string(),
        }
    }

    /// Whether it is known to be completed.
    pub(crate) fn is_completed(&self) -> bool {
        matches!(self.end, End::Completed(_))
    }

    /// When it completed, if that was recorded.
    pub(crate) fn ended_ns(&self) -> Option<i64> {
        let by_duration = || {
            let start = self.started_ns.or(self.created_ns)?;
            Some(start.saturating_add((self.duration_ms? * 1e6) as i64))
        };
        match self.end {
            End::Completed(at) => at.or_else(by_duration),
            End::Open | End::Failed | End::Unknown => None,
        }
    }
}

/// Checks the top level of a dump before anything else is trusted.
pub(super) fn read(top: View<'_>, calls: &mut Calls) -> Result<Dump, String> {
    if !top.is_dict() {
        return Err(format!("not a flight-recorder dump: expected a dictionary, found {}", top.kind()));
    }
    let version = match top.get("version").text() {
        Some(version) => version,
        None if top.get("entries").is_list() => return Err("its entries have no `version`".into()),
        None => return Err("not a flight-recorder dump: it has no `version`".into()),
    };
    let major = version.split('.').next().and_then(|major| major.parse::<u32>().ok());
    if major != Some(2) {
        return Err(format!(
            "unsupported format version `{version}`: this tenfold reads 2.x\n  \
             hint: use PyTorch 2.4 or later, or a newer tenfold for a newer format"
        ));
    }
    let entries = top.get("entries");
    if !entries.is_list() && !entries.is_none() {
        return Err(format!("its `entries` are {}, not a list", entries.kind()));
    }
    let mut parts = Parts::default();
    let keys = Keys::new(top);
    let mut dump = Dump {
        version: version.to_string(),
        host: top.get("hostname").text().or_else(|| top.get("host").text()),
        written_ns: time(top.get("time_dumped_ns")),
        groups: groups(top.get("pg_config"), &mut parts)?,
        ..Dump::default()
    };
    for (index, entry) in entries.items().enumerate() {
        let record = record(entry, &keys, &mut parts, calls);
        dump.records.push(record.map_err(|problem| format!("entry {index}: {problem}"))?);
    }
    add_failures(&mut dump, top, entries, &mut parts)?;
    dump.records.shrink_to_fit();
    dump.records.sort_by_key(|record| record.id);
    Ok(dump)
}

/// The rank, where the dump itself says it.
pub(super) fn rank(top: View<'_>) -> Option<u32> {
    top.get("rank").integer().and_then(|rank| u32::try_from(rank).ok())
}

/// Counts what is read, so that a small file cannot become a large dump.
#[derive(Default)]
struct Parts {
    count: usize,
    text: usize,
}

impl Parts {
    fn add(&mut self, more: usize) -> Result<(), String> {
        self.count += more + 1;
        if self.count <= PARTS_MAX {
            return Ok(());
        }
        Err(format!("more than {PARTS_MAX} operations, frames and sizes: no recorder writes that many"))
    }

    /// Counts a look-up of fields of a dictionary.
    fn add_fields(&mut self, dict: View<'_>) -> Result<(), String> {
        self.add(dict.pairs_len() / PAIRS_A_PART)
    }

    fn add_text(&mut self, call: &Call) -> Result<(), String> {
        let frames = call.frames.iter().map(|frame| frame.name.len() + frame.file.len());
        let dtypes = call.inputs.iter().chain(&call.outputs).filter_map(|shape| shape.dtype.as_ref());
        let argument = if let Detail::Argument(text) = &call.detail { text.len() } else { 0 };
        let names = [&call.group, &call.description, &call.operation, &call.library].into_iter();
        let texts = names.chain(&call.reduce_op).chain(&call.thread).chain(dtypes).map(|text| text.len());
        self.text += frames.chain(texts).sum::<usize>() + argument;
        if self.text <= TEXT_MAX {
            return Ok(());
        }
        Err(format!("its calls have more than {} MiB of text: no recorder writes that much", TEXT_MAX >> 20))
    }
}

fn groups(config: View<'_>, parts: &mut Parts) -> Result<BTreeMap<Arc<str>, GroupConfig>, String> {
    let mut groups = BTreeMap::new();
    for (name, group) in config.pairs() {
        let Some(name) = name.text().filter(|name| !name.is_empty()) else {
            continue; // Gloo writes its groups before they have a name.
        };
        parts.add_fields(group)?;
        let ranks = members(group.get("ranks"));
        parts.add(ranks.len())?;
        if ranks.len() > MEMBERS_MAX {
            return Err(format!("group `{name}` has more than {MEMBERS_MAX} ranks"));
        }
        let description = group.get("desc").text().unwrap_or_default();
        groups.insert(name, GroupConfig { description, ranks, failure: None });
    }
    Ok(groups)
}

/// A group's status is stored under its number, and its configuration under its name: entries have both.
/// Groups without entries are in the same order in both.
fn add_failures(dump: &mut Dump, top: View<'_>, entries: View<'_>, parts: &mut Parts) -> Result<(), String> {
    let mut failures: Vec<(Arc<str>, usize, Failure)> = Vec::new();
    for (place, (id, status)) in top.get("pg_status").pairs().enumerate() {
        parts.add_fields(status)?;
        failures.extend(id.text().zip(failure(status)).map(|(id, failure)| (id, place, failure)));
    }
    if failures.is_empty() {
        return Ok(()); // as in every dump that is not ours
    }
    let (id, process_group) = (top.key("pg_id"), top.key("process_group"));
    let mut names: BTreeMap<String, Arc<str>> = BTreeMap::new();
    for entry in entries.items() {
        if let (Some(id), Some((name, _))) = (entry.at(id).integer(), group_of(entry.at(process_group))) {
            names.insert(id.to_string(), name);
        }
    }
    let configured: Vec<Option<Arc<str>>> =
        top.get("pg_config").pairs().map(|(name, _)| name.text()).collect();
    let is_same_list = configured.len() == top.get("pg_status").pairs().count();
    for (id, place, failure) in failures {
        let by_place = || configured.get(place).filter(|_| is_same_list).cloned().flatten();
        let name = names.get(&*id).cloned().or_else(by_place);
        if let Some(group) = name.and_then(|name| dump.groups.get_mut(&name)) {
            group.failure = Some(failure);
        }
    }
    Ok(())
}

fn failure(status: View<'_>) -> Option<Failure> {
    Some(Failure {
        at_ns: time(status.get("failed_at_ns"))?,
        text: status.get("failure").text().unwrap_or_default(),
        rank: status.get("failure_rank").integer().and_then(|rank| u32::try_from(rank).ok()),
    })
}

/// `"[0, 1]"`, or a list of numbers.
fn members(ranks: View<'_>) -> Vec<u32> {
    if ranks.is_list() {
        let numbers = ranks.items().take(MEMBERS_MAX + 1);
        return numbers.filter_map(|rank| u32::try_from(rank.integer()?).ok()).collect();
    }
    let text = ranks.text().unwrap_or_default();
    let inner = text.trim().trim_start_matches('[').trim_end_matches(']');
    inner.split(',').filter_map(|rank| rank.trim().parse().ok()).take(MEMBERS_MAX + 1).collect()
}

/// What Gloo's recorder records about its last group, whose name it does not know: ranks that exist.
pub(super) fn nameless_members(top: View<'_>) -> Vec<u32> {
    let nameless = top.get("pg_config").get("");
    members(nameless.get("ranks"))
}

/// The names of the fields of entries, as numbers in the dump that is read.
macro_rules! keys {
    ($($name:ident)*) => {
        struct Keys { $($name: Key),* }

        impl Keys {
            fn new(dump: View<'_>) -> Keys {
                Keys { $($name: dump.key(stringify!($name))),* }
            }
        }
    };
}

keys! {
    record_id profiling_name process_group collective_seq_id seq_id is_p2p reduce_op root input_sizes input_dtypes output_sizes
    output_dtypes state retired time_created_ns time_discovered_started_ns time_discovered_completed_ns time_failed_ns
    duration_ms timeout_ms thread_name frames name filename line
}

fn record(entry: View<'_>, keys: &Keys, parts: &mut Parts, calls: &mut Calls) -> Result<Record, String> {
    if !entry.is_dict() {
        return Err(format!("it is {}, not a dictionary", entry.kind()));
    }
    parts.add_fields(entry)?;
    let call = call(entry, keys, parts)?;
    parts.add_text(&call)?;
    // Before 2.1 there was one number for both.
    let numbered = entry.at(keys.collective_seq_id).integer().or_else(|| entry.at(keys.seq_id).integer());
    let state = entry.at(keys.state).text().unwrap_or_default();
    let retired = entry.at(keys.retired).truth().unwrap_or(false);
    Ok(Record {
        id: entry.at(keys.record_id).integer().unwrap_or(0),
        sequence: numbered.ok_or("it has no `collective_seq_id`")?,
        created_ns: time(entry.at(keys.time_created_ns)),
        started_ns: time(entry.at(keys.time_discovered_started_ns)),
        end: match &*state {
            "completed" => End::Completed(time(entry.at(keys.time_discovered_completed_ns))),
            _ if retired => End::Unknown,
            _ => End::Open,
        },
        failed_ns: time(entry.at(keys.time_failed_ns)),
        duration_ms: entry.at(keys.duration_ms).number().filter(|ms| ms.is_finite() && *ms >= 0.0),
        call: calls.share(call),
    })
}

fn call(entry: View<'_>, keys: &Keys, parts: &mut Parts) -> Result<Call, String> {
    let full_name = entry.at(keys.profiling_name).text().ok_or("it has no `profiling_name`")?;
    let (library, name) = full_name.rsplit_once(':').unwrap_or(("", &full_name));
    let (operation, detail) = name.split_once(' ').unwrap_or((name, ""));
    let (group, description) = group_of(entry.at(keys.process_group)).ok_or("it has no `process_group`")?;
    let frames = entry.at(keys.frames);
    for frame in frames.items() {
        parts.add_fields(frame)?;
    }
    let is_message = matches!(operation, "send" | "recv");
    Ok(Call {
        group,
        description,
        operation: operation.into(),
        library: library.into(),
        detail: detail_of(is_message, detail),
        reduce_op: entry.at(keys.reduce_op).text(),
        root: entry.at(keys.root).integer(),
        is_p2p: entry.at(keys.is_p2p).truth().unwrap_or(false) || is_message,
        inputs: shapes(entry.at(keys.input_sizes), entry.at(keys.input_dtypes), parts)?,
        outputs: shapes(entry.at(keys.output_sizes), entry.at(keys.output_dtypes), parts)?,
        timeout_ms: entry.at(keys.timeout_ms).integer().filter(|&ms| ms > 0),
        thread: entry.at(keys.thread_name).text(),
        frames: frames.items().filter_map(|value| frame(value, keys)).collect(),
    })
}

/// `("0", "default_pg")`; early versions had the name alone.
fn group_of(value: View<'_>) -> Option<(Arc<str>, Arc<str>)> {
    let mut items = value.items();
    match items.next() {
        Some(name) => Some((name.text()?, items.next().and_then(View::text).unwrap_or_default())),
        None => Some((value.text()?, Arc::default())),
    }
}

/// A time; in JSON, 0 means none.
fn time(value: View<'_>) -> Option<i64> {
    value.integer().filter(|&nanoseconds| nanoseconds > 0)
}

fn detail_of(is_message: bool, text: &str) -> Detail {
    if text.is_empty() {
        return Detail::None;
    }
    let message = || {
        let ((source, target), backwards) = match text.split_once("->") {
            Some(both) => (both, false),
            None => (text.split_once("<-")?, true),
        };
        let (source, target) = if backwards { (target, source) } else { (source, target) };
        Some(Detail::Message { source: source.trim().parse().ok(), target: target.trim().parse().ok()? })
    };
    match is_message {
        true => message().unwrap_or_default(),
        false => Detail::Argument(text.into()),
    }
}

fn shapes(sizes: View<'_>, dtypes: View<'_>, parts: &mut Parts) -> Result<Vec<Shape>, String> {
    let mut dtypes = dtypes.items();
    let mut shapes = Vec::new();
    for size in sizes.items() {
        parts.add(size.items().len())?;
        let sizes = size.items().map(|size| size.integer().unwrap_or(-1)).collect();
        shapes.push(Shape { sizes, dtype: dtypes.next().and_then(View::text) });
    }
    Ok(shapes)
}

fn frame(value: View<'_>, keys: &Keys) -> Option<Frame> {
    let line = value.at(keys.line).integer().unwrap_or(0);
    Some(Frame { name: value.at(keys.name).text()?, file: value.at(keys.filename).text()?, line })
}

#[cfg(test)]
impl std::ops::DerefMut for Record {
    /// Changes the call of this record only.
    fn deref_mut(&mut self) -> &mut Call {
        Arc::make_mut(&mut self.call)
    }
}

#[cfg(test)]
mod tests;
