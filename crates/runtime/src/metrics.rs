//! Counts, bytes, durations and waits of every operation of every group: a snapshot, and as Prometheus text.
//!
//! Fed where the recorder is, when an operation ends. All operations of a group end under its engine's lock, so every number has one
//! writer at a time and needs no atomic addition; a reader may see an operation counted whose duration is not yet.
//!
//! *Wait* is how long an operation stood still on this rank because of others, which is what arrival skew costs this rank. When each
//! of the others arrived is not known here: no message has a time on it. Comparing dumps of all ranks tells (`tenfold trace`).
//!
//! ```
//! use tenfold::{Group, OpKind, metrics};
//!
//! Group::threads(2, |group| group.barrier()?.wait())?;
//! let all = metrics::snapshot();
//! let barrier = all.iter().find(|one| one.operation == OpKind::Barrier).expect("there was one");
//! assert_eq!((barrier.count, barrier.failed, barrier.bytes), (1, 0, 0));
//! assert!(metrics::prometheus().contains("tenfold_operations_total{group=\"default\",rank=\"0\",op=\"barrier\"} 1"));
//! # Ok::<(), tenfold::Error>(())
//! ```

use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tenfold_plan::Rank;

use crate::OpKind;

/// Buckets of a histogram: each four times as wide as the one before, from about a microsecond to 17 seconds, and the rest.
pub const BUCKETS: usize = 14;

/// Kinds that are counted: those that c10d numbers, which are the first.
const KINDS: usize = 19;

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
}

/// The numbers of one group on one rank.
#[derive(Debug, Default)]
pub(crate) struct GroupMetrics {
    by_kind: [OpMetrics; KINDS],
}

impl GroupMetrics {
    #[inline]
    pub(crate) fn completed(&self, kind: OpKind, bytes: u64, duration: u64, wait: u64) {
        let Some(metrics) = self.by_kind.get(kind as usize) else { return };
        metrics.count.add(1);
        metrics.bytes.add(bytes);
        metrics.duration.add(duration);
        metrics.wait.add(wait);
        metrics.wait_max.raise(wait);
        metrics.durations[bucket_of(duration)].add(1);
        metrics.waits[bucket_of(wait)].add(1);
    }

    pub(crate) fn failed(&self, kind: OpKind) {
        if let Some(metrics) = self.by_kind.get(kind as usize) {
            metrics.failed.add(1);
        }
    }
}

/// What one rank did of one operation in one group.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct OperationMetrics {
    pub group: String,
    /// In that group.
    pub rank: Rank,
    pub operation: OpKind,
    /// How many ended well, and how many did not.
    pub count: u64,
    pub failed: u64,
    /// Of the larger side, input or output, of those that ended well.
    pub bytes: u64,
    /// From the call to the end.
    pub duration: Duration,
    /// How many took up to [`bucket_bound`] and more than the one before.
    pub durations: [u64; BUCKETS],
    /// How long they stood still because of other ranks.
    pub wait: Duration,
    pub wait_max: Duration,
    pub waits: [u64; BUCKETS],
}

/// Every operation that was called in a group that is there, or was until recently.
pub fn snapshot() -> Vec<OperationMetrics> {
    let mut all = Vec::new();
    for group in crate::recorder::groups() {
        for operation in OpKind::ALL {
            let Some(metrics) = group.metrics.by_kind.get(operation as usize) else { continue };
            if metrics.count.get() + metrics.failed.get() == 0 {
                continue;
            }
            let read = |counts: &[Count; BUCKETS]| std::array::from_fn(|bucket| counts[bucket].get());
            all.push(OperationMetrics {
                group: group.name().to_string(),
                rank: group.rank(),
                operation,
                count: metrics.count.get(),
                failed: metrics.failed.get(),
                bytes: metrics.bytes.get(),
                duration: Duration::from_nanos(metrics.duration.get()),
                durations: read(&metrics.durations),
                wait: Duration::from_nanos(metrics.wait.get()),
                wait_max: Duration::from_nanos(metrics.wait_max.get()),
                waits: read(&metrics.waits),
            });
        }
    }
    all
}

/// [`snapshot`] in the text format of Prometheus.
pub fn prometheus() -> String {
    render(&snapshot())
}

fn render(all: &[OperationMetrics]) -> String {
    let mut text = String::new();
    let mut counter = |name: &str, help: &str, value: fn(&OperationMetrics) -> String, kind: &str| {
        let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
        for one in all {
            let _ = writeln!(text, "{name}{{{}}} {}", labels(one), value(one));
        }
    };
    counter(
        "tenfold_operations_total",
        "Operations that ended well.",
        |one| one.count.to_string(),
        "counter",
    );
    counter(
        "tenfold_operations_failed_total",
        "Operations that failed.",
        |one| one.failed.to_string(),
        "counter",
    );
    counter(
        "tenfold_operation_bytes_total",
        "Bytes of the larger side, input or output, of operations that ended well.",
        |one| one.bytes.to_string(),
        "counter",
    );
    counter(
        "tenfold_operation_wait_max_seconds",
        "The longest that an operation stood still because of other ranks.",
        |one| one.wait_max.as_secs_f64().to_string(),
        "gauge",
    );
    histogram(&mut text, all, ("tenfold_operation_duration_seconds", "From the call to the end."), |one| {
        (&one.durations, one.duration)
    });
    histogram(
        &mut text,
        all,
        ("tenfold_operation_wait_seconds", "How long operations stood still because of other ranks."),
        |one| (&one.waits, one.wait),
    );
    text
}

fn histogram(
    text: &mut String,
    all: &[OperationMetrics],
    (name, help): (&str, &str),
    of: fn(&OperationMetrics) -> (&[u64; BUCKETS], Duration),
) {
    let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} histogram");
    for one in all {
        let (labels, (buckets, sum)) = (labels(one), of(one));
        let mut total = 0;
        for (bucket, count) in buckets.iter().enumerate() {
            total += count;
            let bound =
                bucket_bound(bucket).map_or("+Inf".to_string(), |bound| bound.as_secs_f64().to_string());
            let _ = writeln!(text, "{name}_bucket{{{labels},le=\"{bound}\"}} {total}");
        }
        let _ = writeln!(text, "{name}_sum{{{labels}}} {}", sum.as_secs_f64());
        let _ = writeln!(text, "{name}_count{{{labels}}} {total}");
    }
}

fn labels(one: &OperationMetrics) -> String {
    let group = one.group.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
    format!("group=\"{group}\",rank=\"{}\",op=\"{}\"", one.rank, one.operation)
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
    fn prometheus_gets_names_escaped_and_buckets_that_add_up() {
        let metrics = GroupMetrics::default();
        metrics.completed(OpKind::AllReduce, 8, 1000, 0);
        metrics.completed(OpKind::AllReduce, 8, 5_000_000, 4_000_000);
        metrics.failed(OpKind::AllReduce);
        metrics.completed(OpKind::Ddp, 1, 1, 1);
        let one = &metrics.by_kind[OpKind::AllReduce as usize];
        let read = |counts: &[Count; BUCKETS]| std::array::from_fn(|bucket| counts[bucket].get());
        let text = render(&[OperationMetrics {
            group: "a\"b\\".to_string(),
            rank: 3,
            operation: OpKind::AllReduce,
            count: one.count.get(),
            failed: one.failed.get(),
            bytes: one.bytes.get(),
            duration: Duration::from_nanos(one.duration.get()),
            durations: read(&one.durations),
            wait: Duration::from_nanos(one.wait.get()),
            wait_max: Duration::from_nanos(one.wait_max.get()),
            waits: read(&one.waits),
        }]);
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
