//! Separates causes from consequences: a rank that others wait for may itself wait.
//!
//! A finding is a consequence if all the ranks it blames wait in another. If every finding is a consequence,
//! ranks wait for each other in a circle. This is the typical fault of programs that use two groups in
//! different order on different ranks.

use super::{Finding, Kind, Level, words};

pub(super) fn find_consequences(all: &mut Vec<Finding>) {
    let is_wait = |finding: &Finding| {
        finding.level == Level::Bad && !finding.waiting.is_empty() && finding.kind != Kind::Stuck
    };
    let waits: Vec<usize> = (0..all.len()).filter(|&index| is_wait(&all[index])).collect();
    let blocked_by_another = |index: usize, rank: &u32| {
        waits.iter().any(|&other| other != index && all[other].waiting.contains(rank))
    };
    let consequences: Vec<usize> = waits
        .iter()
        .copied()
        .filter(|&index| matches!(all[index].kind, Kind::Behind | Kind::NoPartner))
        .filter(|&index| {
            let ranks = &all[index].ranks;
            !ranks.is_empty() && ranks.iter().all(|rank| blocked_by_another(index, rank))
        })
        .collect();
    if !consequences.is_empty()
        && consequences.len() == waits.len()
        && let Some(circle) = circle(all, &waits)
    {
        all.insert(0, circle);
        consequences.iter().for_each(|&index| all[index + 1].is_consequence = true);
        return;
    }
    consequences.iter().for_each(|&index| all[index].is_consequence = true);
}

/// Follows the waits from rank to rank until a rank appears again.
fn circle(all: &[Finding], waits: &[usize]) -> Option<Finding> {
    let mut path: Vec<(u32, usize)> = Vec::new();
    let mut rank = *all[*waits.first()?].waiting.first()?;
    let start = loop {
        if let Some(start) = path.iter().position(|(seen, _)| *seen == rank) {
            break start;
        }
        let is_its =
            |&&index: &&usize| all[index].waiting.contains(&rank) && !all[index].ranks.contains(&rank);
        let index = *waits.iter().find(is_its)?;
        path.push((rank, index));
        rank = *all[index].ranks.first()?;
    };
    let circle = &path[start..];
    let mut ranks: Vec<u32> = circle.iter().map(|(rank, _)| *rank).collect();
    ranks.sort_unstable();
    let headline = format!("{} wait for each other", words::ranks(&ranks));
    let mut finding = Finding::new(Kind::Deadlock, headline);
    for (rank, index) in circle {
        let other = &all[*index];
        let (others, what) = (words::ranks(&other.ranks), &other.headline);
        finding.lines.push(format!("rank {rank} waits for {others}: {what}"));
    }
    finding.lines.push("call the collectives of several groups in the same order on all ranks".into());
    finding.ranks = ranks.clone();
    finding.waiting = ranks;
    Some(finding)
}
