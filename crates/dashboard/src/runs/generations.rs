//! The generations of a job's ranks, from what all its launchers report.
//!
//! Each launcher knows how its own processes have ended, and it may miss a generation that was soon
//! followed by another. Together they know more.

use std::collections::BTreeMap;

use serde::Serialize;

use super::super::job::{Change, Generation};

/// Generations that are shown; a launcher reports no more.
const GENERATIONS_MAX: usize = 32;
/// Ranks that left or joined which are shown.
const CHANGES_MAX: usize = 64;

#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct ShownGeneration {
    #[serde(flatten)]
    pub(super) facts: Generation,
    /// What has changed, in words.
    pub(super) what: String,
}

/// What a launcher may report.
pub(super) fn bounded(mut generations: Vec<Generation>) -> Vec<Generation> {
    generations.drain(..generations.len().saturating_sub(GENERATIONS_MAX));
    for generation in &mut generations {
        generation.left.truncate(CHANGES_MAX);
        generation.joined.truncate(CHANGES_MAX);
    }
    generations
}

/// The last generations, the oldest first. Hosts are named if there are several nodes.
pub(super) fn merged(
    reports: impl Iterator<Item = Vec<Generation>>,
    has_nodes: bool,
) -> Vec<ShownGeneration> {
    let mut all: BTreeMap<(u64, u64), Generation> = BTreeMap::new();
    for report in reports.flatten() {
        let known = all.entry((report.round, report.generation)).or_insert_with(|| report.clone());
        for change in &mut known.left {
            change.end = change.end.take().or_else(|| end_in(&report.left, change));
        }
    }
    let old = all.len().saturating_sub(GENERATIONS_MAX);
    let shown = |facts: Generation| {
        let what = facts.changes(has_nodes).join("; ");
        ShownGeneration { facts, what }
    };
    all.into_values().skip(old).map(shown).collect()
}

/// How another launcher says that this process has ended.
fn end_in(report: &[Change], change: &Change) -> Option<String> {
    let is_it =
        |other: &&Change| (other.rank, other.pid, &other.host) == (change.rank, change.pid, &change.host);
    report.iter().find(is_it)?.end.clone()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn change(rank: usize, pid: u64, end: Option<&str>) -> Change {
        Change { rank: Some(rank), pid, host: "a".into(), end: end.map(str::to_owned) }
    }

    fn generation(number: u64, end: Option<&str>) -> Generation {
        let (left, joined) = (vec![change(1, 7, end)], vec![change(1, 9, None)]);
        Generation { generation: number, left, joined, seconds: 0.5, ..Generation::default() }
    }

    #[test]
    fn what_one_launcher_does_not_know_another_does() {
        let ended = Some("killed by SIGKILL");
        let reports = [vec![generation(2, None), generation(3, None)], vec![generation(2, ended)]];
        let shown = merged(reports.into_iter(), false);
        let told: Vec<(u64, &str)> = shown.iter().map(|one| (one.facts.generation, &*one.what)).collect();
        let expected = [
            (2, "rank 1 (pid 7, killed by SIGKILL) was replaced by pid 9"),
            (3, "rank 1 (pid 7) was replaced by pid 9"),
        ];
        assert_eq!(told, expected);
        let shown = merged([vec![generation(2, ended)]].into_iter(), true);
        assert_eq!(shown[0].what, "rank 1 (pid 7 on a, killed by SIGKILL) was replaced by pid 9 on a");
    }

    #[test]
    fn no_more_is_shown_than_a_launcher_reports() {
        let long = Generation { left: vec![change(0, 1, None); 1000], ..generation(0, None) };
        let many = (0..1000).map(|number| Generation { generation: number, ..long.clone() }).collect();
        let kept = bounded(many);
        assert_eq!((kept.len(), kept[0].generation, kept[0].left.len()), (32, 968, 64));
        let other = Generation { round: 1, ..generation(1, None) };
        let shown = merged([kept, vec![other]].into_iter(), false);
        assert_eq!((shown.len(), shown[31].facts.round, shown[0].facts.generation), (32, 1, 969));
    }
}
