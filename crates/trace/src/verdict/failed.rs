//! What ranks say of the failure of a group, and who did not come because of it.
//!
//! A call on a group that has failed is refused before it is recorded: a rank that heard of the failure early looks as if it had
//! not come. It is a witness, no culprit, unless the others had waited their whole time for it, or the failure is said to be its.
//! Only tenfold's recorder tells of failures; without that, nobody is excused.

use std::collections::BTreeSet;

use super::super::align::{Group, Job};
use super::super::dump::{Failure, Record};
use super::super::words::{self, counted};
use super::{Finding, Kind};

/// What the rank's dump says of its group's failure.
pub(super) fn of_rank<'a>(job: &Job<'a>, group: &Group<'_>, rank: u32) -> Option<&'a Failure> {
    job.dump(rank)?.groups.get(&group.name)?.failure.as_ref()
}

/// The rank whose words say most: who is to blame, else those that came first.
pub(super) fn of_group<'a>(job: &Job<'a>, group: &Group<'_>) -> Option<(u32, &'a Failure)> {
    let all = group.members.iter().filter_map(|&rank| Some((rank, of_rank(job, group, rank)?)));
    all.min_by_key(|(rank, failure)| (failure.rank.is_none(), failure.at_ns, *rank))
}

/// Who was kept from coming to an operation by a failure that is another's?
pub(super) struct Excuses<'j, 'a, 'g> {
    job: &'j Job<'a>,
    group: &'j Group<'g>,
    blamed: BTreeSet<u32>,
    /// Somebody waited for as long as it was allowed to: whoever was meant to come had time enough.
    is_time_up: bool,
}

impl<'j, 'a, 'g> Excuses<'j, 'a, 'g> {
    /// `entered` are those who came.
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

/// `rank 0's error: rank 1 died`: the first line, as far as it is given.
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
