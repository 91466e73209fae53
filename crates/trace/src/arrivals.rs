//! Stragglers: which ranks arrive late at collectives, and how much time that costs the others.
//!
//! The cost of a late rank is the time from the second-to-last arrival to the last: if it had arrived with
//! the others, all would have continued that much earlier. Arrival times are by each rank's own clock, and
//! hosts' clocks differ. A collective in which every rank needs every other ends at nearly the same moment
//! everywhere. So if the ends of two ranks repeatedly differ by the same time, that is the difference of
//! their clocks, and is subtracted. If no ends are recorded, the report says that clocks may differ.

use std::collections::{BTreeMap, BTreeSet};

use super::align::{Group, Job};
use super::dump::Record;
use super::verdict::{Finding, Kind};
use super::words;

/// With fewer collectives, no pattern is reported.
const ROWS_MIN: usize = 10;
/// A smaller cost is scheduling noise.
const COST_MIN_S: f64 = 1e-3;
/// A single arrival as late as this is worth a line, whatever the other arrivals are like.
const ONCE_S: f64 = 1.0;
/// Larger differences are attributed to the clocks.
const CLOCKS_S: f64 = 5e-3;

/// Seconds that each rank's clock is ahead.
pub(crate) struct Clocks {
    ahead: BTreeMap<u32, f64>,
    /// Whether enough ends were recorded to know.
    is_known: bool,
}

/// One collective that all members entered.
struct Arrival<'a> {
    record: &'a Record,
    last: u32,
    cost: f64,
}

pub(crate) fn find(job: &Job<'_>) -> Vec<Finding> {
    let clocks = Clocks::estimate(job);
    let mut findings = Vec::new();
    for group in job.groups.iter().filter(|group| group.members.len() > 1) {
        let arrivals = arrivals(group, &clocks);
        let found = habit(group, &arrivals).or_else(|| once(group, &arrivals));
        if let Some(mut finding) = found {
            finding.lines.extend(clocks.caveat(job));
            findings.push(finding);
        }
    }
    findings
}

fn arrivals<'a>(group: &Group<'a>, clocks: &Clocks) -> Vec<Arrival<'a>> {
    let mut arrivals = Vec::new();
    for row in group.rows.values().filter(|row| row.len() == group.members.len()) {
        let mut times: Vec<(f64, u32, &'a Record)> = row
            .iter()
            .filter_map(|(rank, records)| {
                let record = *records.first()?;
                Some((clocks.corrected(rank, record.created_ns?), rank, record))
            })
            .collect();
        times.sort_by(|one, other| one.0.total_cmp(&other.0));
        if let [.., before, last] = &times[..]
            && times.len() == row.len()
        {
            arrivals.push(Arrival { record: last.2, last: last.1, cost: last.0 - before.0 });
        }
    }
    arrivals
}

/// A rank that is last more often than not, and by more than noise.
fn habit(group: &Group<'_>, arrivals: &[Arrival<'_>]) -> Option<Finding> {
    let mut costs: BTreeMap<u32, Vec<f64>> = BTreeMap::new();
    for arrival in arrivals {
        costs.entry(arrival.last).or_default().push(arrival.cost);
    }
    let (&rank, times) = costs.iter().max_by_key(|(_, times)| times.len())?;
    let total: f64 = times.iter().sum();
    let is_often = arrivals.len() >= ROWS_MIN && 2 * times.len() > arrivals.len();
    let mean = total / times.len() as f64;
    if !is_often || mean < COST_MIN_S {
        return None;
    }
    let headline = format!(
        "rank {rank} is a straggler: the last to reach {} of {} collectives of {}",
        times.len(),
        arrivals.len(),
        group.title
    );
    let mut finding = Finding::note(Kind::Straggler, headline);
    let worst = arrivals
        .iter()
        .filter(|arrival| arrival.last == rank)
        .max_by(|one, other| one.cost.total_cmp(&other.cost))?;
    finding.lines.push(format!(
        "the other ranks waited {} for it, {} each time; longest in {}: {}",
        words::seconds(total),
        words::seconds(mean),
        worst.record.title(),
        words::seconds(worst.cost)
    ));
    finding.ranks = vec![rank];
    Some(finding)
}

/// The single arrival that was much later than all others.
fn once(group: &Group<'_>, arrivals: &[Arrival<'_>]) -> Option<Finding> {
    let worst = arrivals.iter().max_by(|one, other| one.cost.total_cmp(&other.cost))?;
    if worst.cost < ONCE_S {
        return None;
    }
    let (rank, title, cost) = (worst.last, worst.record.title(), words::seconds(worst.cost));
    let headline = format!("rank {rank} arrived {cost} late at {title} of {}", group.title);
    let mut finding = Finding::note(Kind::Straggler, headline);
    finding.ranks = vec![rank];
    finding.lines.extend(words::call_site(worst.record).map(|site| format!("it called it at {site}")));
    Some(finding)
}

impl Clocks {
    fn estimate(job: &Job<'_>) -> Clocks {
        let mut gaps: BTreeMap<u32, Vec<f64>> = BTreeMap::new();
        for group in job.groups.iter().filter(|group| group.members.len() > 1) {
            for row in group.rows.values().filter(|row| row.len() == group.members.len()) {
                let end = |records: &[&Record]| {
                    records.last().filter(|record| ends_together(record)).and_then(|record| record.ended_ns())
                };
                let ends: Option<Vec<i64>> = row.values().map(end).collect();
                let Some(ends) = ends else { continue };
                let middle = median(ends.iter().map(|&end| (end - ends[0]) as f64).collect());
                for (rank, &end) in row.ranks().zip(&ends) {
                    gaps.entry(rank).or_default().push(((end - ends[0]) as f64 - middle) / 1e9);
                }
            }
        }
        let is_known = !gaps.is_empty() && gaps.values().all(|gaps| gaps.len() >= 3);
        let mut ahead = BTreeMap::new();
        for (rank, gaps) in gaps.into_iter().filter(|_| is_known) {
            let usual = median(gaps.clone());
            let spread = median(gaps.iter().map(|gap| (gap - usual).abs()).collect());
            if usual.abs() > CLOCKS_S && usual.abs() > 4.0 * spread {
                ahead.insert(rank, usual);
            }
        }
        Clocks { ahead, is_known }
    }

    /// Seconds. A difference of nanoseconds since 1970 fits a float to half a microsecond.
    fn corrected(&self, rank: u32, moment_ns: i64) -> f64 {
        moment_ns as f64 / 1e9 - self.ahead.get(&rank).copied().unwrap_or(0.0)
    }

    fn caveat(&self, job: &Job<'_>) -> Option<String> {
        let hosts: BTreeSet<Option<&str>> = job.dumps.iter().map(|dump| dump.host.as_deref()).collect();
        let is_one_host = hosts.len() == 1 && !hosts.contains(&None);
        if is_one_host {
            return None;
        }
        let furthest = self.ahead.iter().max_by(|one, other| one.1.abs().total_cmp(&other.1.abs()));
        match furthest {
            Some((rank, seconds)) => {
                let way = if *seconds > 0.0 { "ahead" } else { "behind" };
                let time = words::seconds(seconds.abs());
                Some(format!("the hosts' clocks differ and were corrected: rank {rank}'s is {time} {way}"))
            }
            None if self.is_known => None,
            None => Some(
                "if the ranks run on several hosts, their clocks may differ, which is not corrected here"
                    .into(),
            ),
        }
    }
}

/// Whether no rank can complete it before all have entered.
fn ends_together(record: &Record) -> bool {
    let name = &*record.operation;
    ["all_reduce", "allreduce", "all_gather", "_all_gather", "all_to_all", "barrier"]
        .iter()
        .any(|start| name.starts_with(start))
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}
