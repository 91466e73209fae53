//! Ranks that are behind the others of their group, and groups in which all ranks have arrived but nothing
//! moves.

use super::super::align::{Group, Job, Standing};
use super::super::dump::{End, Record};
use super::super::words;
use super::{Finding, Kind, Level, Waiting, failed, last_words};

/// Ranks at fault whose last calls are reported.
const TOLD_MAX: usize = 2;

/// `differing` are groups, by index, with the number at which their ranks differ: what comes after is a
/// consequence.
pub(super) fn find(job: &Job<'_>, differing: &[(usize, i64)]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (index, group) in job.groups.iter().enumerate() {
        let differs_at = differing.iter().find(|(other, _)| *other == index).map(|(_, sequence)| *sequence);
        match laggards(job, group) {
            Some(laggards) => {
                findings.extend(
                    behind(job, group, &laggards)
                        .filter(|_| differs_at.is_none_or(|at| at >= laggards.sequence)),
                );
            }
            None if differs_at.is_none() => findings.extend(stuck(job, group)),
            None => {}
        }
    }
    findings
}

/// The ranks that are behind, and the first collective that they are missing from.
struct Laggards {
    ranks: Vec<u32>,
    sequence: i64,
}

fn laggards(job: &Job<'_>, group: &Group<'_>) -> Option<Laggards> {
    let (&first, _) = group.rows.first_key_value()?;
    let reached = |&rank: &u32| match job.standing(group, rank) {
        Standing::Last(record) => Some((rank, record.sequence)),
        Standing::Nothing => Some((rank, first.saturating_sub(1))),
        Standing::NoDump | Standing::Lost => None,
    };
    let reached: Vec<(u32, i64)> = group.members.iter().filter_map(reached).collect();
    let lowest = reached.iter().map(|(_, sequence)| *sequence).min()?;
    let ranks: Vec<u32> =
        reached.iter().filter(|(_, sequence)| *sequence == lowest).map(|(rank, _)| *rank).collect();
    // What the other ranks have completed did not need these ranks, or a ring is older: the first that they
    // are still in counts.
    let mut later = group.rows.range(lowest.checked_add(1)?..);
    let next = later.clone().next().map(|(&sequence, _)| sequence)?;
    let is_open = |records: &[&Record]| records.iter().any(|record| !record.is_completed());
    let waited_for = later.find(|(_, row)| row.values().any(is_open)).map(|(&sequence, _)| sequence);
    Some(Laggards { ranks, sequence: waited_for.unwrap_or(next) })
}

fn behind(job: &Job<'_>, group: &Group<'_>, laggards: &Laggards) -> Option<Finding> {
    let Laggards { ranks, sequence } = laggards;
    let entered = records_of(group, *sequence);
    let title = entered.first()?.1.title();
    let excuses = failed::Excuses::new(job, group, &entered);
    let (excused, ranks): (Vec<u32>, Vec<u32>) = ranks.iter().partition(|&&rank| excuses.has(rank));
    if ranks.is_empty() {
        return Some(kept_away(group, &title, *sequence, excused));
    }
    let ranks = &ranks;
    let is_waited_for = entered.iter().any(|(_, record)| !record.is_completed());
    let waiting = Waiting::new(job, &entered);
    let (who, place) = (words::ranks(ranks), &group.title);
    let has = if ranks.len() == 1 { "has" } else { "have" };
    let headline = format!("{who} {has} not entered {title} of {place}");
    let mut finding = Finding::new(Kind::Behind, headline).of(group, Some(*sequence));
    finding.ranks.clone_from(ranks);
    finding.lines.push(waiting.text.clone());
    if is_waited_for {
        finding.waiting = group.ranks_in(*sequence);
    }
    for &rank in ranks.iter().take(TOLD_MAX) {
        finding.lines.extend(last_words(job, group, rank));
    }
    if !excused.is_empty() {
        finding.lines.push(format!("{} had not entered it when the group failed", words::ranks(&excused)));
    }
    if let Some(lead) = dumped_earlier(job, &entered, ranks) {
        let its = if ranks.len() == 1 { "its dump was" } else { "their dumps were" };
        finding.lines.push(format!(
            "{its} written {} earlier than that: it had exited by then, or it is still running",
            words::seconds(lead)
        ));
    }
    if !is_waited_for {
        finding.level = Level::Note;
        finding
            .lines
            .push("no rank is waiting for it: its dump is older, or the other ranks did not need it".into());
    } else if waiting.is_short() {
        finding.level = Level::Note;
        finding.lines.push("this is so short that it may still arrive".into());
    } else {
        finding.lines.extend(failed::line(job, group));
    }
    Some(finding)
}

/// They would have arrived, but the group had failed.
fn kept_away(group: &Group<'_>, title: &str, sequence: i64, ranks: Vec<u32>) -> Finding {
    let (who, place) = (words::ranks(&ranks), &group.title);
    let headline = format!("{who} had not entered {title} of {place} when the group failed");
    let mut finding = Finding::note(Kind::Behind, headline).of(group, Some(sequence));
    finding.ranks = ranks;
    finding.is_consequence = true;
    finding
}

/// By how many seconds the last of these ranks' dumps is older than the first call of the others.
fn dumped_earlier(job: &Job<'_>, entered: &[(u32, &Record)], ranks: &[u32]) -> Option<f64> {
    let first = entered.iter().filter_map(|(_, record)| record.created_ns).min()?;
    let written = ranks.iter().filter_map(|&rank| job.dump(rank)?.written_ns).max()?;
    (written < first).then(|| first.saturating_sub(written) as f64 / 1e9)
}

fn records_of<'a>(group: &Group<'a>, sequence: i64) -> Vec<(u32, &'a Record)> {
    let ranks = group.ranks_in(sequence);
    ranks.into_iter().filter_map(|rank| Some((rank, group.at(sequence, rank)?))).collect()
}

/// All ranks have entered, their calls match, and some are still in it.
fn stuck(job: &Job<'_>, group: &Group<'_>) -> Option<Finding> {
    if group.members.iter().any(|rank| job.missing.binary_search(rank).is_ok()) {
        return None; // reported with the missing ranks
    }
    let is_inside = |record: &Record| matches!(record.end, End::Open | End::Failed);
    let is_open = |records: &[&Record]| records.iter().any(|record| is_inside(record));
    let (&sequence, _) = group.rows.iter().find(|(_, row)| row.values().any(is_open))?;
    let all = records_of(group, sequence);
    let open: Vec<(u32, &Record)> = all.iter().copied().filter(|(_, record)| is_inside(record)).collect();
    let waiting = Waiting::new(job, &open);
    if waiting.is_short() || open.is_empty() {
        return None;
    }
    let inside: Vec<u32> = open.iter().map(|(rank, _)| *rank).collect();
    let failed: Vec<u32> =
        open.iter().filter(|(_, record)| record.end == End::Failed).map(|(rank, _)| *rank).collect();
    let (title, place) = (open[0].1.title(), &group.title);
    let (headline, remedy) = if !failed.is_empty() {
        let who = words::ranks(&failed);
        (
            format!("{who} failed in {title} of {place}"),
            "all ranks had entered it and their calls match: see the error in the log",
        )
    } else {
        let headline = if inside.len() == all.len() {
            format!(
                "all {} are in {title} of {place}, and none has completed it",
                words::counted(all.len(), "rank")
            )
        } else {
            let has = if inside.len() == 1 { "has" } else { "have" };
            format!("{} {has} not completed {title} of {place}, which the others have", words::ranks(&inside))
        };
        (
            headline,
            "all ranks have entered it and their calls match: check the network, and whether a rank died in it",
        )
    };
    let mut finding = Finding::new(Kind::Stuck, headline).of(group, Some(sequence));
    finding.lines = vec![waiting.text, remedy.into()];
    finding.lines.extend(failed::line(job, group));
    finding.ranks = if failed.is_empty() { inside.clone() } else { failed };
    finding.waiting = inside;
    Some(finding)
}
