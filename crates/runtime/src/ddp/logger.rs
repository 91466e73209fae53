//! What happened, in c10d's words: the fields of its `DDPLoggingData`.
//!
//! Strings and integers live in two maps, as there. The reducer says what it does as it does it; times are measured here.

#![expect(clippy::disallowed_methods, reason = "the clock of the reducer: times of iterations, for humans")]

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::Param;
use super::buckets::Buckets;
use super::buckets::Graph;
use super::options::Options;
use crate::fault::show_duration;
use crate::{Error, Group};

/// Iterations that are averaged: these first ones, and then every so many.
const FIRST: u64 = 10;
const EVERY: u64 = 100;

/// How long an iteration took, and what it moved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Counted from 1; iterations without synchronisation count too.
    pub iteration: u64,
    /// From the start of forward to that of backward.
    pub forward_compute: Duration,
    /// From the start of backward until `finish` was called.
    pub backward_compute: Duration,
    /// From the launch of the first bucket to the landing of the last.
    pub backward_comm: Duration,
    /// The part of that during which backward still computed. The rest is what training waits for.
    pub overlap: Duration,
    /// How many buckets were reduced.
    pub buckets_reduced: usize,
    /// How many bytes they had.
    pub bytes_reduced: usize,
    /// Bytes of parameters that this rank did not use.
    pub unused_bytes: usize,
}

/// Two maps, by c10d's names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LoggingData {
    /// Fields with text.
    pub strings: BTreeMap<&'static str, String>,
    /// Fields with numbers.
    pub integers: BTreeMap<&'static str, i64>,
}

/// When the steps of the current iteration were, since 1970.
#[derive(Clone, Copy, Debug, Default)]
struct Times {
    forward_start: Option<Duration>,
    backward_start: Option<Duration>,
    comm_start: Option<Duration>,
    backward_end: Option<Duration>,
}

/// Collects what a reducer does.
#[derive(Debug, Default)]
pub struct Logger {
    data: LoggingData,
    times: Times,
    statistics: Statistics,
    averaged: i64,
    sums: [i64; 4],
}

const TIMES: [(&str, &str); 4] = [
    ("forward_compute_time", "avg_forward_compute_time"),
    ("backward_compute_time", "avg_backward_compute_time"),
    ("backward_comm_time", "avg_backward_comm_time"),
    ("backward_compute_comm_overlap_time", "avg_backward_compute_comm_overlap_time"),
];

impl Logger {
    pub(super) fn new(group: &Group, params: &[Param], options: &Options, buckets: &Buckets) -> Self {
        let mut logger = Logger::default();
        let mut dtypes: Vec<&str> = params.iter().map(|param| param.dtype.name()).collect();
        dtypes.sort_unstable();
        dtypes.dedup();
        let cap = options.limits.iter().max().copied().unwrap_or_default();
        logger.set("backend_name", "tenfold");
        logger.set("comm_hook", options.hook_name());
        logger.set("dtypes", dtypes.join(", "));
        logger.set("bucket_sizes", sizes(params, buckets));
        logger.count("world_size", group.size());
        logger.count("rank", group.rank());
        logger.count("bucket_cap_bytes", cap);
        logger.count("find_unused_parameters", usize::from(options.graph == Graph::Unused));
        logger.count("static_graph", usize::from(options.graph == Graph::Static));
        logger.count("gradient_as_bucket_view", 1);
        logger.count("join_uneven_inputs", usize::from(options.join.is_some()));
        logger.count("num_parameter_tensors", params.len());
        logger.count("total_parameter_size_bytes", params.iter().map(Param::bytes).sum());
        logger.count("has_rebuilt_buckets", 0);
        logger.count("has_error", 0);
        logger.count("iteration", 0);
        logger
    }

    /// Everything so far.
    pub fn data(&self) -> &LoggingData {
        &self.data
    }

    /// Sets a field that only the caller knows, such as `module_name` or `device_ids`.
    pub fn set(&mut self, name: &'static str, text: impl Into<String>) {
        self.data.strings.insert(name, text.into());
    }

    /// The same for numbers, such as `has_sync_bn`.
    pub fn set_integer(&mut self, name: &'static str, number: i64) {
        self.data.integers.insert(name, number);
    }

    /// Of the last iteration that has ended.
    pub fn statistics(&self) -> &Statistics {
        &self.statistics
    }

    fn count(&mut self, name: &'static str, number: usize) {
        self.set_integer(name, i64::try_from(number).unwrap_or(i64::MAX));
    }

    pub(super) fn forward_starts(&mut self) {
        self.times = Times { forward_start: Some(now()), ..Times::default() };
    }

    pub(super) fn backward_starts(&mut self) {
        self.times.backward_start = Some(now());
    }

    pub(super) fn bucket_starts(&mut self) {
        self.times.comm_start.get_or_insert_with(now);
    }

    pub(super) fn backward_ends(&mut self) {
        self.times.backward_end.get_or_insert_with(now);
    }

    /// The iteration is over; `moved` says what it was, but not how long.
    pub(super) fn iteration_ends(&mut self, moved: Statistics, buckets: &Buckets) {
        let end = now();
        let Times { forward_start, backward_start, comm_start, backward_end } = self.times;
        let span = |from: Option<Duration>, to: Option<Duration>| match (from, to) {
            (Some(from), Some(to)) => to.saturating_sub(from),
            _ => Duration::ZERO,
        };
        self.statistics = Statistics {
            forward_compute: span(forward_start, backward_start),
            backward_compute: span(backward_start, backward_end),
            backward_comm: span(comm_start, Some(end)),
            overlap: span(comm_start, backward_end),
            ..moved
        };
        self.times = Times::default();
        self.set_integer("iteration", moved.iteration as i64);
        if moved.iteration > FIRST && !moved.iteration.is_multiple_of(EVERY) {
            return;
        }
        self.averaged += 1;
        let Statistics { forward_compute, backward_compute, backward_comm, overlap, .. } = self.statistics;
        for (place, time) in
            [forward_compute, backward_compute, backward_comm, overlap].into_iter().enumerate()
        {
            self.sums[place] += time.as_nanos() as i64;
            self.set_integer(TIMES[place].0, time.as_nanos() as i64);
            self.set_integer(TIMES[place].1, self.sums[place] / self.averaged);
        }
        for (name, time) in [
            ("forward_compute_time_start", forward_start),
            ("backward_compute_time_start", backward_start),
            ("backward_comm_time_start", comm_start),
            ("backward_compute_time_end", backward_end),
            ("backward_comm_time_end", Some(end)),
        ] {
            self.set_integer(name, time.unwrap_or_default().as_nanos() as i64);
        }
        self.count("num_buckets_reduced", moved.buckets_reduced);
        self.count("unused_parameter_size", moved.unused_bytes);
        self.set("prev_iteration_grad_ready_order_indices", list(buckets.came()));
        let Statistics { buckets_reduced, bytes_reduced, .. } = moved;
        tracing::info!(
            "iteration {} of data-parallel training: forward {}, backward {}, communication {}, of which {} while \
             backward computed; buckets: {buckets_reduced}, bytes: {bytes_reduced}",
            moved.iteration,
            show_duration(forward_compute),
            show_duration(backward_compute),
            show_duration(backward_comm),
            show_duration(overlap),
        );
    }

    pub(super) fn rebuilt(&mut self, params: &[Param], buckets: &Buckets) {
        self.set_integer("has_rebuilt_buckets", 1);
        self.set("rebuilt_bucket_sizes", sizes(params, buckets));
        let members: Vec<String> =
            (0..buckets.len()).map(|index| join(&buckets.bucket(index).params, " ")).collect();
        self.set("rebuilt_per_bucket_param_indices", members.join(", "));
    }

    pub(super) fn failed(&mut self, error: &Error) {
        self.set_integer("has_error", 1);
        self.set("error", error.to_string());
    }
}

/// Bytes of each bucket.
fn sizes(params: &[Param], buckets: &Buckets) -> String {
    let size = |index| buckets.bucket(index).params.iter().map(|param| params[*param].bytes()).sum();
    list(&(0..buckets.len()).map(size).collect::<Vec<usize>>())
}

fn list(numbers: &[usize]) -> String {
    join(numbers, ", ")
}

fn join(numbers: &[usize], between: &str) -> String {
    numbers.iter().map(usize::to_string).collect::<Vec<_>>().join(between)
}

fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}
