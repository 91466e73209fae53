//! Ranks without a dump: they died, were killed, or hang so that they cannot even write.

use super::super::align::Job;
use super::super::dump::Record;
use super::super::read::Refusal;
use super::super::words;
use super::{Finding, Kind, Waiting, failed};

/// Groups with waiting ranks that are named.
const GROUPS_MAX: usize = 3;

pub(super) fn find(job: &Job<'_>, refusals: &[Refusal]) -> Option<Finding> {
    if job.missing.is_empty() {
        return None;
    }
    let count = job.missing.len() + job.dumps.len();
    let verb = if job.missing.len() == 1 { "has" } else { "have" };
    let who = words::ranks(&job.missing);
    let headline = format!("{who} {verb} no dump here: {} of {count} ranks do", job.dumps.len());
    let mut finding = Finding::new(Kind::MissingDump, headline);
    finding.ranks.clone_from(&job.missing);
    let mut told = 0;
    for group in &job.groups {
        let absent: Vec<u32> =
            group.members.iter().copied().filter(|rank| job.missing.binary_search(rank).is_ok()).collect();
        let Some((&sequence, row)) = group.rows.last_key_value() else { continue };
        let inside: Vec<(u32, &Record)> = row
            .iter()
            .filter_map(|(rank, records)| Some((rank, *records.last()?)))
            .filter(|(_, record)| !record.is_completed())
            .collect();
        if absent.is_empty() || inside.is_empty() {
            continue;
        }
        finding.waiting.extend(inside.iter().map(|(rank, _)| *rank));
        if told < GROUPS_MAX {
            told += 1;
            let title = inside[0].1.title();
            let waiting = Waiting::new(job, &inside).text;
            let text = format!("{title} of {} needs {}: {waiting}", group.title, words::ranks(&absent));
            finding.lines.push(text);
            finding.lines.extend(failed::line(job, group));
        }
        if finding.group.is_none() {
            finding = finding.of(group, Some(sequence));
        }
    }
    if refusals.is_empty() {
        finding.lines.push("it died, was killed, or hangs where it cannot write: see its log".into());
    } else {
        finding.lines.push("a file that cannot be read (see above) may be its dump".into());
    }
    finding.waiting.sort_unstable();
    finding.waiting.dedup();
    Some(finding)
}
