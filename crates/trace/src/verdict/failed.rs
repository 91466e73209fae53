//! The failure of a group as ranks report it, and which ranks are missing because of it.
//!
//! A call on a group that has failed is refused before it is recorded, so a rank that learned of the failure
//! early looks as if it had not arrived. It is not at fault, unless the other ranks had waited for it until
//! they timed out, or the failure names it. Only tenfold's recorder records failures; without that, no rank
//! is excused.

use std::collections::BTreeSet;

use super::super::align::{Group, Job};
use super::super::dump::{Failure, Record};
use super::super::words::{self, counted};
use super::{Finding, Kind};

/// What the rank's dump says about its group's failure.
pub(super) fn of_rank<'a>(job: &Job<'a>, group: &Group<'_>, rank: u32) -> Option<&'a Failure> {
    job.dump(rank)?.groups.get(&group.name)?.failure.as_ref()
}

/// The rank with the best information: one that names the rank at fault, otherwise the earliest.
pub(super) fn of_group<'a>(job: &Job<'a>, group: &Group<'_>) -> Option<(u32, &'a Failure)> {
    let all = group.members.iter().filter_map(|&rank| Some((rank, of_rank(job, group, rank)?)));
    all.min_by_key(|(rank, failure)| (failure.rank.is_none(), failure.at_ns, *rank))
}

/// The ranks that did not enter an operation because of a failure that another rank caused.
pub(super) struct Excuses<'j, 'a, 'g> {
    job: &'j Job<'a>,
    group: &'j Group<'g>,
    blamed: BTreeSet<u32>,
    /// A rank waited until it timed out, so the missing ranks had enough time.
    is_time_up: bool,
}

impl<'j, 'a, 'g> Excuses<'j, 'a, 'g> {
    /// `entered` are the ranks that entered.
    pub(super) fn new(job: &'j Job<'a>, group: &'j Group<'g>, entered: &[(u32, &Record)]) -> Self {
        let failures = group.members.iter().filter_map(|&rank| of_rank(job, group, rank));
        let blamed = failures.filter_map(|failure| failure.rank).collect();
        Excuses { job, group, blamed, is_time_up: entered.iter().any(|(_, record)| is_time_up(record)) }
    }

    pub(super) fn has(&self, rank: u32) -> bool {
        !self.is_time_up && !self.blamed.contains(&rank) && of_rank(self.job, self.group, rank).is_some()
    }
}

/// The limit may begin a moment before the record does.
fn is_time_up(record: &Record) -> bool {
    let waited =
        record.failed_ns.zip(record.created_ns).map(|(failed, created)| failed.saturating_sub(created));
    let limit = record.timeout_ms.map(|ms| ms.saturating_mul(1_000_000));
    waited.zip(limit).is_some_and(|(waited, limit)| waited >= limit - limit / 20)
}

/// `rank 0's error: rank 1 died`: the first line, if there is one.
pub(super) fn line(job: &Job<'_>, group: &Group<'_>) -> Option<String> {
    let (rank, failure) = of_group(job, group)?;
    let text = failure.text.lines().next().filter(|text| !text.is_empty())?;
    Some(format!("rank {rank}'s error: {text}"))
}

/// Groups that failed and that no other finding is about.
pub(super) fn find(job: &Job<'_>, explained: impl Fn(&Group<'_>) -> bool) -> Vec<Finding> {
    let unexplained = job.groups.iter().filter(|group| !explained(group));
    unexplained.filter_map(|group| of_failure(job, group)).collect()
}

fn of_failure(job: &Job<'_>, group: &Group<'_>) -> Option<Finding> {
    let (_, failure) = of_group(job, group)?;
    let headline = match failure.rank {
        Some(rank) => format!("{} failed because of rank {rank}", group.title),
        None => format!("{} failed", group.title),
    };
    let mut finding = Finding::new(Kind::Failed, headline).of(group, None);
    finding.ranks = failure.rank.into_iter().collect();
    finding.lines.extend(line(job, group));
    let told: Vec<u32> =
        group.members.iter().copied().filter(|&rank| of_rank(job, group, rank).is_some()).collect();
    if told.len() < group.members.len() {
        finding.lines.push(format!(
            "{} of {} know of it",
            words::ranks(&told),
            counted(group.members.len(), "rank")
        ));
    }
    Some(finding)
}
