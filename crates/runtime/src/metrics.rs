//! Counts, bytes, durations and waits of every operation of every group: a snapshot, and as Prometheus text.
//!
//! Fed where the recorder is, when an operation ends. All operations of a group end under its engine's lock, so every number has one
//! writer at a time and needs no atomic addition; a reader may see an operation counted whose duration is not yet.
//!
//! *Wait* is how long an operation stood still on this rank because of others, which is what arrival skew costs this rank. *Skew* is
//! how long the last rank came after the first, and *lateness* how long a rank came after the first: both are known of a sample of
//! collectives only, see `group/arrivals`. [`stragglers`] makes a report of it.
//!
//! ```
//! use tenfold::{Group, OpKind, metrics};
//!
//! Group::threads(2, |group| group.barrier())?;
//! let all = metrics::snapshot();
//! let barrier = all.iter().find(|one| one.operation == OpKind::Barrier).expect("there was one");
//! assert_eq!((barrier.count, barrier.failed, barrier.bytes), (1, 0, 0));
//! assert!(metrics::prometheus().contains("tenfold_operations_total{group=\"default\",rank=\"0\",op=\"barrier\"} 1"));
//! # Ok::<(), tenfold::Error>(())
//! ```

use std::fmt::{Display, Write as _};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tenfold_base::Exposition;
use tenfold_plan::Rank;

use crate::OpKind;
use crate::fault::show_duration;
use crate::group::trouble::arrivals::Sample;

/// Buckets of a histogram: each four times as wide as the one before, from about a microsecond to 17 seconds, and the rest.
pub const BUCKETS: usize = 14;

/// Kinds that are counted: the first of those that c10d numbers, which are not made of others, and ours.
const KINDS: usize = KINDS_OF_C10D + 1;
const KINDS_OF_C10D: usize = 19;

/// Where a kind is counted.
#[inline]
fn place(kind: OpKind) -> usize {
    match kind {
        OpKind::Scan => KINDS_OF_C10D,
        _ if (kind as usize) < KINDS_OF_C10D => kind as usize,
        _ => KINDS, // nowhere
    }
}

/// The upper bound of a bucket; nothing for the last.
pub fn bucket_bound(bucket: usize) -> Option<Duration> {
    (bucket + 1 < BUCKETS).then(|| Duration::from_nanos(1 << (10 + 2 * bucket)))
}

#[inline]
fn bucket_of(nanoseconds: u64) -> usize {
    // Bounds are 2^10, 2^12, …: how many bits a number needs that is one less says under which it is.
    let bits = 64 - (nanoseconds.max(1) - 1).leading_zeros() as usize;
    bits.saturating_sub(10).div_ceil(2).min(BUCKETS - 1)
}

/// A number with one writer at a time.
#[derive(Debug, Default)]
struct Count(AtomicU64);

impl Count {
    #[inline]
    fn add(&self, more: u64) {
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(more), Ordering::Relaxed);
    }

    #[inline]
    fn raise(&self, to: u64) {
        if to > self.0.load(Ordering::Relaxed) {
            self.0.store(to, Ordering::Relaxed);
        }
    }

    fn set(&self, value: u64) {
        self.0.store(value, Ordering::Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

#[derive(Debug, Default)]
struct OpMetrics {
    count: Count,
    failed: Count,
    bytes: Count,
    duration: Count,
    wait: Count,
    wait_max: Count,
    durations: [Count; BUCKETS],
    waits: [Count; BUCKETS],
    skew: Count,
    skew_max: Count,
    skews: [Count; BUCKETS],
}

impl OpMetrics {
    fn read(&self, group: &str, rank: Rank, operation: OpKind) -> OperationMetrics {
        let time = |count: &Count| Duration::from_nanos(count.get());
        let read = |counts: &[Count; BUCKETS]| std::array::from_fn(|bucket| counts[bucket].get());
        OperationMetrics {
            group: group.to_string(),
            rank,
            operation,
            count: self.count.get(),
            failed: self.failed.get(),
            bytes: self.bytes.get(),
            duration: time(&self.duration),
            durations: read(&self.durations),
            wait: time(&self.wait),
            wait_max: time(&self.wait_max),
            waits: read(&self.waits),
            skew: time(&self.skew),
            skew_max: time(&self.skew_max),
            skews: read(&self.skews),
        }
    }
}

/// How late a rank comes.
#[derive(Debug, Default)]
struct Lateness {
    samples: Count,
    total: Count,
    max: Count,
    /// How often no other rank arrived later.
    last: Count,
    /// A mean in which what was seen lately counts for more.
    recent: Count,
}

/// The numbers of one group on one rank.
#[derive(Debug, Default)]
pub(crate) struct GroupMetrics {
    by_kind: [OpMetrics; KINDS],
    by_rank: OnceLock<Box<[Lateness]>>,
}

impl GroupMetrics {
    #[inline]
    pub(crate) fn completed(&self, kind: OpKind, bytes: u64, duration: u64, wait: u64) {
        let Some(metrics) = self.by_kind.get(place(kind)) else { return };
        metrics.count.add(1);
        metrics.bytes.add(bytes);
        metrics.duration.add(duration);
        metrics.wait.add(wait);
        metrics.wait_max.raise(wait);
        metrics.durations[bucket_of(duration)].add(1);
        metrics.waits[bucket_of(wait)].add(1);
    }

    /// Some ranks of a group of `size` were seen to have come to a collective.
    pub(crate) fn arrived(&self, sample: &Sample, size: usize) {
        if let Some(metrics) = self.by_kind.get(place(sample.kind)) {
            metrics.skew.add(sample.skew);
            metrics.skew_max.raise(sample.skew);
            metrics.skews[bucket_of(sample.skew)].add(1);
        }
        let ranks = self.by_rank.get_or_init(|| (0..size).map(|_| Lateness::default()).collect());
        let last = sample.lateness.iter().max_by_key(|(_, late)| *late).map(|(rank, _)| *rank);
        for &(rank, late) in &sample.lateness {
            let Some(lateness) = ranks.get(rank) else { continue };
            lateness.samples.add(1);
            lateness.total.add(late);
            lateness.max.raise(late);
            lateness.last.add(u64::from(last == Some(rank)));
            let before = lateness.recent.get();
            lateness.recent.set(if lateness.samples.get() == 1 {
                late
            } else {
                before - before / 8 + late / 8
            });
        }
    }

    /// How late `rank` comes lately; nothing if it was not seen.
    pub(crate) fn recent_lateness(&self, rank: Rank) -> Option<Duration> {
        let lateness = self.by_rank.get()?.get(rank).filter(|lateness| lateness.samples.get() > 0)?;
        Some(Duration::from_nanos(lateness.recent.get()))
    }

    pub(crate) fn failed(&self, kind: OpKind) {
        if let Some(metrics) = self.by_kind.get(place(kind)) {
            metrics.failed.add(1);
        }
    }
}

/// What one rank did of one operation in one group.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct OperationMetrics {
    /// The name of the group.
    pub group: String,
    /// In the whole job, so that it means the same in all groups.
    pub rank: Rank,
    /// Which operation.
    pub operation: OpKind,
    /// How many ended well, and how many did not.
    pub count: u64,
    /// How many failed.
    pub failed: u64,
    /// Of the larger side, input or output, of those that ended well.
    pub bytes: u64,
    /// From the call to the end.
    pub duration: Duration,
    /// How many took up to [`bucket_bound`] and more than the one before.
    pub durations: [u64; BUCKETS],
    /// How long they stood still because of other ranks.
    pub wait: Duration,
    /// The longest of these waits.
    pub wait_max: Duration,
    /// These waits, counted as `durations` are.
    pub waits: [u64; BUCKETS],
    /// How long after the first rank the last one came, in the collectives that were looked at.
    pub skew: Duration,
    /// The largest.
    pub skew_max: Duration,
    /// The same, counted as `durations` are.
    pub skews: [u64; BUCKETS],
}

/// How late one rank comes to the collectives of a group, as seen by another.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Straggler {
    /// The name of the group.
    pub group: String,
    /// The rank that saw it. This and `rank` are ranks of the whole job, so that they mean the same in all groups.
    pub seen_by: Rank,
    /// The rank that is late.
    pub rank: Rank,
    /// How many of its arrivals were looked at, and in how many of them it came last of all.
    pub samples: u64,
    /// In how many it came last.
    pub last: u64,
    /// After the first rank that came: on average, at most, and on average of what was seen lately.
    pub mean: Duration,
    /// At most.
    pub max: Duration,
    /// On average of what was seen lately.
    pub recent: Duration,
}

/// Who comes late in the groups of this process: of each group every rank that was seen, the latest first.
///
/// Groups of one process only; a rank sees those that it exchanges messages with.
pub fn stragglers() -> Vec<Straggler> {
    let mut all = Vec::new();
    for group in crate::recorder::groups() {
        let Some(ranks) = group.metrics.by_rank.get() else { continue };
        let of_group = ranks.iter().enumerate().filter_map(|(rank, lateness)| {
            let samples = lateness.samples.get();
            Some(Straggler {
                group: group.name().to_string(),
                seen_by: group.global_rank(),
                rank: group.global_rank_of(rank),
                samples,
                last: lateness.last.get(),
                mean: Duration::from_nanos(lateness.total.get().checked_div(samples)?),
                max: Duration::from_nanos(lateness.max.get()),
                recent: Duration::from_nanos(lateness.recent.get()),
            })
        });
        let mut of_group: Vec<Straggler> = of_group.collect();
        of_group.sort_by_key(|straggler| std::cmp::Reverse(straggler.mean));
        all.extend(of_group);
    }
    all
}

/// [`stragglers`] as a table to read, the first few ranks of each group.
pub fn straggler_report() -> String {
    report(&stragglers())
}

/// Ranks of a group that a report has.
const REPORTED: usize = 8;

fn report(all: &[Straggler]) -> String {
    let mut text = String::new();
    for group in all.chunk_by(|a, b| (&a.group, a.seen_by) == (&b.group, b.seen_by)) {
        let first = &group[0];
        let most = group.iter().map(|one| one.samples).max().unwrap_or(0);
        let _ = writeln!(
            text,
            "group `{}`, seen by rank {}, {most} collectives looked at:",
            first.group, first.seen_by
        );
        for one in group.iter().take(REPORTED) {
            let share = 100 * one.last / one.samples.max(1);
            let _ = writeln!(
                text,
                "  rank {:<4} {:>10} late on average, {:>10} at most, the last {share:>3} % of the time",
                one.rank,
                show_duration(one.mean),
                show_duration(one.max)
            );
        }
        if group.len() > REPORTED {
            let _ = writeln!(text, "  and {} ranks that are earlier", group.len() - REPORTED);
        }
    }
    if text.is_empty() {
        text.push_str("no collective of two ranks was looked at yet\n");
    }
    text
}

/// Every operation that was called in a group that is there, or was until recently.
pub fn snapshot() -> Vec<OperationMetrics> {
    let mut all = Vec::new();
    for group in crate::recorder::groups() {
        for operation in OpKind::ALL {
            let Some(metrics) = group.metrics.by_kind.get(place(operation)) else { continue };
            if metrics.count.get() + metrics.failed.get() == 0 {
                continue;
            }
            all.push(metrics.read(group.name(), group.global_rank(), operation));
        }
    }
    all
}

/// [`snapshot`] in the text format of Prometheus.
pub fn prometheus() -> String {
    let own: Vec<Straggler> = stragglers().into_iter().filter(|one| one.rank == one.seen_by).collect();
    render(&snapshot(), &own)
}

/// `own` is how late this rank is in each group: with a series for each rank that it sees, n ranks had n² of them.
fn render(all: &[OperationMetrics], own: &[Straggler]) -> String {
    let mut page = Exposition::default();
    let each = |page: &mut Exposition, value: fn(&OperationMetrics) -> String| {
        for one in all {
            page.labelled(&labels(one), value(one));
        }
    };
    page.counter("tenfold_operations_total", "Operations that ended well.");
    each(&mut page, |one| one.count.to_string());
    page.counter("tenfold_operations_failed_total", "Operations that failed.");
    each(&mut page, |one| one.failed.to_string());
    page.counter(
        "tenfold_operation_bytes_total",
        "Bytes of the larger side, input or output, of operations that ended well.",
    );
    each(&mut page, |one| one.bytes.to_string());
    page.gauge(
        "tenfold_operation_wait_max_seconds",
        "The longest that an operation stood still because of other ranks.",
    );
    each(&mut page, |one| one.wait_max.as_secs_f64().to_string());
    page.histogram("tenfold_operation_duration_seconds", "From the call to the end.");
    histogram(&mut page, all, |one| (&one.durations, one.duration));
    page.histogram(
        "tenfold_operation_wait_seconds",
        "How long operations stood still because of other ranks.",
    );
    histogram(&mut page, all, |one| (&one.waits, one.wait));
    page.histogram(
        "tenfold_arrival_skew_seconds",
        "How long after the first rank the last one came, in a sample of collectives.",
    );
    histogram(&mut page, all, |one| (&one.skews, one.skew));
    page.summary(
        "tenfold_rank_lateness_seconds",
        "How long after the first rank this one came, in a sample of collectives.",
    );
    for one in own {
        let labels: [(&str, &dyn Display); 2] = [("group", &one.group), ("rank", &one.rank)];
        page.part("_sum", &labels, one.mean.as_secs_f64() * one.samples as f64);
        page.part("_count", &labels, one.samples);
    }
    page.into_text()
}

fn histogram(
    page: &mut Exposition,
    all: &[OperationMetrics],
    of: fn(&OperationMetrics) -> (&[u64; BUCKETS], Duration),
) {
    for one in all {
        let (counts, sum) = of(one);
        let bound = |bucket| bucket_bound(bucket).map(|bound| bound.as_secs_f64());
        let buckets = counts.iter().enumerate().map(|(bucket, count)| (bound(bucket), *count));
        page.distribution(&labels(one), buckets, sum.as_secs_f64());
    }
}

fn labels(one: &OperationMetrics) -> [(&str, &dyn Display); 3] {
    [("group", &one.group), ("rank", &one.rank), ("op", &one.operation)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_is_in_the_bucket_whose_bounds_are_around_it() {
        assert_eq!((bucket_of(0), bucket_of(1), bucket_of(u64::MAX)), (0, 0, BUCKETS - 1));
        for bucket in 0..BUCKETS - 1 {
            let bound = bucket_bound(bucket).unwrap().as_nanos() as u64;
            assert_eq!(
                (bucket_of(bound - 1), bucket_of(bound), bucket_of(bound + 1)),
                (bucket, bucket, bucket + 1)
            );
        }
    }

    #[test]
    fn stragglers_are_told_with_the_latest_first() {
        let metrics = GroupMetrics::default();
        let sample = |lateness: Vec<(Rank, u64)>| {
            let skew = lateness.iter().map(|(_, late)| *late).max().unwrap();
            metrics.arrived(&Sample { kind: OpKind::AllReduce, skew, lateness }, 3);
        };
        sample(vec![(0, 0), (1, 1_000_000), (2, 40_000_000)]);
        sample(vec![(0, 2_000_000), (1, 0), (2, 20_000_000)]);
        let ranks = metrics.by_rank.get().unwrap();
        let straggler = |rank: Rank| Straggler {
            group: "default".to_string(),
            seen_by: 1,
            rank,
            samples: ranks[rank].samples.get(),
            last: ranks[rank].last.get(),
            mean: Duration::from_nanos(ranks[rank].total.get() / 2),
            max: Duration::from_nanos(ranks[rank].max.get()),
            recent: Duration::from_nanos(ranks[rank].recent.get()),
        };
        assert_eq!(
            metrics.recent_lateness(2),
            Some(Duration::from_micros(37_500)),
            "an eighth of the way to 20 ms"
        );
        let all = [straggler(2), straggler(0), straggler(1)];
        let expected = "\
group `default`, seen by rank 1, 2 collectives looked at:
  rank 2       30.0 ms late on average,    40.0 ms at most, the last 100 % of the time
  rank 0        1.0 ms late on average,     2.0 ms at most, the last   0 % of the time
  rank 1        0.5 ms late on average,     1.0 ms at most, the last   0 % of the time
";
        assert_eq!(report(&all), expected);
        assert_eq!(report(&[]), "no collective of two ranks was looked at yet\n");

        let one = metrics.by_kind[OpKind::AllReduce as usize].read("default", 1, OpKind::AllReduce);
        assert_eq!((one.skew, one.skew_max), (Duration::from_millis(60), Duration::from_millis(40)));
        let text = render(&[one], &[straggler(1)]);
        for line in [
            "tenfold_arrival_skew_seconds_count{group=\"default\",rank=\"1\",op=\"all_reduce\"} 2",
            "tenfold_arrival_skew_seconds_sum{group=\"default\",rank=\"1\",op=\"all_reduce\"} 0.06",
            "tenfold_rank_lateness_seconds_count{group=\"default\",rank=\"1\"} 2",
            "tenfold_rank_lateness_seconds_sum{group=\"default\",rank=\"1\"} 0.001",
        ] {
            assert!(text.lines().any(|found| found == line), "no {line} in\n{text}");
        }
    }

    #[test]
    fn prometheus_gets_names_escaped_and_buckets_that_add_up() {
        let metrics = GroupMetrics::default();
        metrics.completed(OpKind::AllReduce, 8, 1000, 0);
        metrics.completed(OpKind::AllReduce, 8, 5_000_000, 4_000_000);
        metrics.failed(OpKind::AllReduce);
        metrics.completed(OpKind::Ddp, 1, 1, 1);
        let one = &metrics.by_kind[OpKind::AllReduce as usize];
        let text = render(&[one.read("a\"b\\", 3, OpKind::AllReduce)], &[]);
        let labels = r#"group="a\"b\\",rank="3",op="all_reduce""#;
        for line in [
            format!("tenfold_operations_total{{{labels}}} 2"),
            format!("tenfold_operations_failed_total{{{labels}}} 1"),
            format!("tenfold_operation_bytes_total{{{labels}}} 16"),
            format!("tenfold_operation_duration_seconds_bucket{{{labels},le=\"0.000001024\"}} 1"),
            format!("tenfold_operation_duration_seconds_bucket{{{labels},le=\"0.004194304\"}} 1"),
            format!("tenfold_operation_duration_seconds_bucket{{{labels},le=\"0.016777216\"}} 2"),
            format!("tenfold_operation_duration_seconds_bucket{{{labels},le=\"+Inf\"}} 2"),
            format!("tenfold_operation_duration_seconds_sum{{{labels}}} 0.005001"),
            format!("tenfold_operation_wait_max_seconds{{{labels}}} 0.004"),
            format!("tenfold_operation_wait_seconds_count{{{labels}}} 2"),
        ] {
            assert!(text.lines().any(|found| found == line), "no {line} in\n{text}");
        }
    }
}
