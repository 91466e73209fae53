//! What went wrong, most important first: a pure function of the aligned dumps.
//!
//! The rank that is waited for matters, not the ranks that wait. A rank without a dump comes first. Then the
//! first call of a group in which ranks differ, since what follows is its consequence. Then ranks that are
//! behind the others. Among these, ranks that do not wait for another rank come first: a rank in one group
//! may keep another from entering a collective of a second group.
//!
//! Each of these has its own file here: [`missing`], [`differ`], [`behind`], [`messages`]; [`circle`]
//! separates causes from consequences, and [`failed`] knows which ranks are missing because the group had
//! failed. How late ranks arrive is in `arrivals`.

mod behind;
mod circle;
mod differ;
mod failed;
mod messages;
mod missing;
#[cfg(test)]
mod tests;

use super::align::{Group, Job, Standing};
use super::arrivals;
use super::dump::{Dump, End, Record};
use super::read::Refusal;
use super::words;

/// A shorter wait may be about to end: a dump of a running job has such waits.
pub(super) const SHORT_S: f64 = 1.0;
/// Frames of a stack that are shown.
const FRAMES_MAX: usize = 3;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Level {
    /// Something is wrong.
    Bad,
    /// Worth a line, but not a problem.
    Note,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    MissingDump,
    Deadlock,
    OtherCall,
    Behind,
    NoPartner,
    Stuck,
    Failed,
    Straggler,
}

impl Kind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Kind::MissingDump => "missing-dump",
            Kind::Deadlock => "deadlock",
            Kind::OtherCall => "other-call",
            Kind::Behind => "behind",
            Kind::NoPartner => "no-partner",
            Kind::Stuck => "stuck",
            Kind::Failed => "failed",
            Kind::Straggler => "straggler",
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Finding {
    pub(crate) kind: Kind,
    pub(crate) level: Level,
    /// One sentence that names the rank at fault.
    pub(crate) headline: String,
    /// What is known about it, one line each.
    pub(crate) lines: Vec<String>,
    /// The ranks it is about.
    pub(crate) ranks: Vec<u32>,
    /// The ranks that wait for them.
    pub(crate) waiting: Vec<u32>,
    pub(crate) group: Option<String>,
    pub(crate) sequence: Option<i64>,
    /// Whether it follows from other findings: it is shown after its cause.
    pub(crate) is_consequence: bool,
}

impl Finding {
    pub(crate) fn new(kind: Kind, headline: String) -> Finding {
        Finding {
            kind,
            level: Level::Bad,
            headline,
            lines: Vec::new(),
            ranks: Vec::new(),
            waiting: Vec::new(),
            group: None,
            sequence: None,
            is_consequence: false,
        }
    }

    pub(crate) fn note(kind: Kind, headline: String) -> Finding {
        Finding { level: Level::Note, ..Finding::new(kind, headline) }
    }

    fn of(mut self, group: &Group<'_>, sequence: Option<i64>) -> Finding {
        self.group = Some(group.title.trim_start_matches("group ").to_owned());
        self.sequence = sequence;
        self
    }

    fn is_about(&self, group: &Group<'_>) -> bool {
        self.group.as_deref() == Some(group.title.trim_start_matches("group "))
    }

    fn with(mut self, line: Option<String>) -> Finding {
        self.lines.extend(line);
        self
    }
}

/// All findings, most important first.
pub(crate) fn findings(job: &Job<'_>, refusals: &[Refusal]) -> Vec<Finding> {
    let mut all = Vec::new();
    all.extend(missing::find(job, refusals));
    let mut differing = Vec::new();
    for (index, group) in job.groups.iter().enumerate() {
        if let Some((sequence, finding)) = differ::find(group) {
            differing.push((index, sequence));
            all.push(finding.with(failed::line(job, group)));
        }
    }
    all.extend(behind::find(job, &differing));
    for group in &job.groups {
        all.extend(messages::find(job, group));
    }
    circle::find_consequences(&mut all);
    let is_explained = |group: &Group<'_>| {
        let is_cause = |finding: &Finding| finding.level == Level::Bad && !finding.is_consequence;
        // A rank without a dump blocks every group that it is in.
        let lacks_one = || group.members.iter().any(|rank| job.missing.binary_search(rank).is_ok());
        lacks_one() || all.iter().any(|finding| is_cause(finding) && finding.is_about(group))
    };
    let failed = failed::find(job, is_explained);
    all.extend(failed);
    all.extend(arrivals::find(job));
    // Within one kind the order of groups is kept.
    all.sort_by_key(|finding| (finding.level, finding.is_consequence, finding.kind));
    all
}

/// What ranks do in one operation that other ranks are missing from.
struct Waiting {
    text: String,
    /// Seconds; known if a dump says when it was written.
    longest: Option<f64>,
    is_over: bool,
}

impl Waiting {
    /// `ranks 0 and 1 have been waiting in it for 40.1 s (timeout 30.0 s), called at train.py:88 in step`
    fn new(job: &Job<'_>, records: &[(u32, &Record)]) -> Waiting {
        let of = |end: End| -> Vec<(u32, &Record)> {
            records.iter().copied().filter(|(_, record)| record.end == end).collect()
        };
        // Of ranks in different states, those with the most information are reported.
        let [open, failed, unknown] = [End::Open, End::Failed, End::Unknown].map(of);
        let (shown, state) = match (open.is_empty(), failed.is_empty(), unknown.is_empty()) {
            (false, _, _) => (&open[..], End::Open),
            (_, false, _) => (&failed[..], End::Failed),
            (_, _, false) => (&unknown[..], End::Unknown),
            _ => (records, End::Completed(None)),
        };
        let ranks: Vec<u32> = shown.iter().map(|(rank, _)| *rank).collect();
        let age = |&(rank, record): &(u32, &Record)| words::age(record, job.dump(rank)?);
        let longest = shown.iter().filter_map(age).max_by(f64::total_cmp);
        let who = words::ranks(&ranks);
        let (waits, dumps) = if ranks.len() == 1 {
            ("has been waiting", "its dump")
        } else {
            ("have been waiting", "their dumps")
        };
        let since = longest.map(words::seconds);
        let mut text = match (state, since) {
            (End::Open, Some(since)) => format!("{who} {waits} in it for {since}"),
            (End::Open, None) => format!("{who} {waits} in it"),
            (End::Failed, Some(since)) => format!("{who} entered it {since} before {dumps} and failed"),
            (End::Failed, None) => format!("{who} entered it and failed"),
            (End::Unknown, Some(since)) => format!("{who} entered it {since} before {dumps}"),
            (End::Unknown, None) => format!("{who} entered it"),
            (End::Completed(_), _) => format!("{who} completed it"),
        };
        if let Some(limit) = shown.iter().find_map(|(_, record)| record.timeout_ms) {
            text += &format!(" (timeout {})", words::seconds(limit as f64 / 1e3));
        }
        if let Some(site) = shown.iter().find_map(|(_, record)| words::call_site(record)) {
            text += &format!(", called at {site}");
        }
        Waiting { text, longest, is_over: state == End::Failed }
    }

    /// Whether it is so short that it may be about to end.
    fn is_short(&self) -> bool {
        !self.is_over && self.longest.is_some_and(|longest| longest < SHORT_S)
    }
}

/// What a rank did last in a group, and last of all if that was in another group.
fn last_words(job: &Job<'_>, group: &Group<'_>, rank: u32) -> Vec<String> {
    let Some(dump) = job.dump(rank) else { return vec![format!("rank {rank} left no dump")] };
    let host = dump.host.as_ref().filter(|_| job.has_several_hosts());
    let here = match job.standing(group, rank) {
        Standing::Last(record) => {
            format!("rank {rank}'s last call in this group was {}{}", record.title(), fate(record, dump))
        }
        _ => format!("rank {rank} has not called a collective in this group"),
    };
    let mut lines = vec![here];
    lines.extend(host.map(|host| format!("rank {rank} is on host {host}")));
    let last_here = group.last(rank);
    if let Some(last) = dump.records.last().filter(|last| last_here.is_none_or(|here| here.id < last.id)) {
        let place = job.title_of(last, rank);
        lines.push(format!(
            "rank {rank}'s last call of all was {} of {place}{}",
            message_title(job, last, rank),
            fate(last, dump)
        ));
    }
    let frames = dump.records.last().into_iter().flat_map(words::program_frames).take(FRAMES_MAX);
    let stack: Vec<String> = frames.map(words::frame).collect();
    if !stack.is_empty() {
        lines.push(format!("rank {rank} made that call at {}", stack.join(" ← ")));
    }
    lines
}

/// `send to rank 1`, `all_reduce #3`.
fn message_title(job: &Job<'_>, record: &Record, rank: u32) -> String {
    match job.peer_of(record, rank) {
        Some(peer) if &*record.operation == "send" => format!("a send to rank {peer}"),
        Some(peer) => format!("a receive from rank {peer}"),
        None if &*record.operation == "recv" => "a receive from any rank".into(),
        None => record.title(),
    }
}

/// How an operation ended, as far as is known.
fn fate(record: &Record, dump: &Dump) -> String {
    let ended = record.ended_ns().and_then(|at| words::before(at, dump));
    match (record.end, ended.or_else(|| words::age(record, dump))) {
        (End::Completed(_), Some(ago)) if ended.is_some() => {
            format!(", completed {} before its dump", words::seconds(ago))
        }
        (End::Completed(_), _) => ", which it completed".into(),
        (End::Open, Some(ago)) => format!(", which it entered {} ago and has not left", words::seconds(ago)),
        (End::Open, None) => ", in which it still is".into(),
        (End::Failed, Some(ago)) => {
            format!(", entered {} before its dump, in which it failed", words::seconds(ago))
        }
        (End::Failed, None) => ", in which it failed".into(),
        (End::Unknown, Some(ago)) => format!(", entered {} before its dump", words::seconds(ago)),
        (End::Unknown, None) => String::new(),
    }
}
