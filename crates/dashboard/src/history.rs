//! The last five minutes, one point per second: the data of the charts.
//!
//! The server counts from its start; a point is the difference between two readings, per second. If a reading
//! is late, its rate is used for all the seconds that it covers, so that one second stays one step of the
//! chart.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use serde::Serialize;
use tenfold_store::Facts;

/// Points kept: five minutes.
pub(super) const POINTS_MAX: usize = 300;

#[derive(Debug, Default)]
pub(super) struct History {
    last: Option<(Instant, Facts)>,
    points: VecDeque<Point>,
}

#[derive(Clone, Debug, Default)]
struct Point {
    by_operation: BTreeMap<String, f64>,
    bytes_in: f64,
    bytes_out: f64,
    connections: usize,
    keys: usize,
    memory_bytes: usize,
    waiters: usize,
}

/// `/api/history`: each list has one number per second, the oldest first.
#[derive(Debug, PartialEq, Serialize)]
pub(super) struct Lists {
    step_seconds: u64,
    now_unix: f64,
    operations: Vec<f64>,
    by_operation: BTreeMap<String, Vec<f64>>,
    bytes_in: Vec<f64>,
    bytes_out: Vec<f64>,
    connections: Vec<usize>,
    keys: Vec<usize>,
    memory_bytes: Vec<usize>,
    waiters: Vec<usize>,
}

impl History {
    pub(super) fn note(&mut self, now: Instant, facts: Facts) {
        if let Some((then, before)) = &self.last {
            let elapsed = now.duration_since(*then);
            let seconds = (elapsed.as_secs_f64().round() as usize).clamp(1, POINTS_MAX);
            let point = Point::between(before, &facts, elapsed);
            self.points.extend(std::iter::repeat_n(point, seconds));
            let too_many = self.points.len().saturating_sub(POINTS_MAX);
            self.points.drain(..too_many);
        }
        self.last = Some((now, facts));
    }

    pub(super) fn lists(&self, now_unix: f64) -> Lists {
        let names: BTreeSet<&String> =
            self.points.iter().flat_map(|point| point.by_operation.keys()).collect();
        let of = |name: &String| {
            self.points.iter().map(|point| point.by_operation.get(name).copied().unwrap_or(0.0)).collect()
        };
        let rates = |of: fn(&Point) -> f64| self.points.iter().map(of).collect();
        let levels = |of: fn(&Point) -> usize| self.points.iter().map(of).collect();
        Lists {
            step_seconds: 1,
            now_unix,
            operations: rates(|point| tenths(point.by_operation.values().sum())),
            by_operation: names.into_iter().map(|name| (name.clone(), of(name))).collect(),
            bytes_in: rates(|point| point.bytes_in),
            bytes_out: rates(|point| point.bytes_out),
            connections: levels(|point| point.connections),
            keys: levels(|point| point.keys),
            memory_bytes: levels(|point| point.memory_bytes),
            waiters: levels(|point| point.waiters),
        }
    }
}

impl Point {
    fn between(before: &Facts, after: &Facts, elapsed: Duration) -> Point {
        // Two readings at the same instant do not differ, so their rate is zero.
        let seconds = elapsed.as_secs_f64().max(1e-3);
        let rate = |before: u64, after: u64| tenths(after.saturating_sub(before) as f64 / seconds);
        let operation = |(name, &count): (&String, &u64)| {
            (name.clone(), rate(before.operations.get(name).copied().unwrap_or(0), count))
        };
        Point {
            by_operation: after.operations.iter().map(operation).collect(),
            bytes_in: rate(before.bytes_in, after.bytes_in),
            bytes_out: rate(before.bytes_out, after.bytes_out),
            connections: after.connections,
            keys: after.keys,
            memory_bytes: after.table_bytes + after.buffer_bytes,
            waiters: after.waiters_count,
        }
    }
}

/// A chart cannot show more than a tenth of an operation per second.
fn tenths(number: f64) -> f64 {
    (number * 10.0).round() / 10.0
}

#[cfg(test)]
mod tests {
    #![expect(clippy::disallowed_methods, reason = "some instant to count from")]

    use super::*;

    fn facts(gets: u64, keys: usize) -> Facts {
        let mut facts = Facts::default();
        facts.operations.insert("get".into(), gets);
        (facts.keys, facts.bytes_in) = (keys, 100 * gets);
        facts
    }

    #[test]
    fn a_point_is_what_happened_in_its_second() {
        let (mut history, start) = (History::default(), Instant::now());
        history.note(start, facts(10, 1));
        assert_eq!(history.lists(5.0).operations, [] as [f64; 0], "one look says nothing about a rate");
        history.note(start + Duration::from_secs(1), facts(15, 2));
        let mut other = facts(15, 3);
        other.operations.insert("set".into(), 7);
        history.note(start + Duration::from_secs(2), other);
        let lists = history.lists(5.0);
        assert_eq!((lists.step_seconds, lists.now_unix), (1, 5.0));
        assert_eq!(lists.operations, [5.0, 7.0]);
        assert_eq!(lists.by_operation["get"], [5.0, 0.0]);
        assert_eq!(lists.by_operation["set"], [0.0, 7.0], "what had not happened yet is zero, not left out");
        assert_eq!(lists.bytes_in, [500.0, 0.0]);
        assert_eq!(lists.keys, [2, 3]);
    }

    #[test]
    fn a_late_reading_counts_for_all_seconds_it_covers_and_old_points_are_dropped() {
        let (mut history, start) = (History::default(), Instant::now());
        history.note(start, facts(0, 0));
        history.note(start + Duration::from_millis(3100), facts(31, 1));
        assert_eq!(history.lists(0.0).operations, [10.0; 3]);
        history.note(start + Duration::from_secs(100_000), facts(31, 9));
        let lists = history.lists(0.0);
        assert_eq!((lists.keys.len(), lists.keys[0]), (POINTS_MAX, 9));
        // A stopped server reports zero, which is less than before.
        history.note(start + Duration::from_secs(100_001), Facts::default());
        assert_eq!(history.lists(0.0).bytes_in.last(), Some(&0.0));
    }
}
