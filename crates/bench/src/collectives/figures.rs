//! Times of collectives as tables and as JSON.
//!
//! One figure is the median over the rounds of the mean time of an operation. A ratio is computed round by
//! round, since measurements of one round saw the same machine, against the peer with the best median.

use super::super::report::{align, median};
use super::layout::{Limits, Rate};
use super::operation::{Crew, Dtype, Memory, Operation, Point, Transport};
use super::peer::Implementation;
use tenfold_console::show_size;

/// The result of one column in one round, in microseconds of one operation.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Sample {
    pub(crate) mean_us: f64,
    pub(crate) batches_us: Vec<f64>,
    /// What an operation sent through the busiest direction of a link, if there are hosts.
    pub(crate) link_bytes: Option<f64>,
}

impl Sample {
    /// From the time of each batch of `operations` operations.
    pub(crate) fn new(batches_ns: &[u64], operations: u64) -> Self {
        let us = |ns: u64| ns as f64 / 1e3 / operations as f64;
        let mean_us = us(batches_ns.iter().sum()) / batches_ns.len() as f64;
        Sample { mean_us, batches_us: batches_ns.iter().map(|&ns| us(ns)).collect(), link_bytes: None }
    }
}

/// One implementation, with tensors in one kind of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Subject {
    pub(crate) implementation: Implementation,
    pub(crate) memory: Memory,
    pub(crate) transport: Transport,
}

impl Subject {
    fn name(self) -> String {
        match self.memory {
            Memory::Private => self.implementation.name().into(),
            Memory::Shared => format!("{} (shared)", self.implementation),
        }
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Column {
    pub(crate) subject: Subject,
    pub(crate) algorithm: Option<String>,
    /// In the order of the rounds; none if the implementation has no such case.
    pub(crate) samples: Vec<Sample>,
}

impl Column {
    fn median_us(&self) -> Option<f64> {
        let means: Vec<f64> = self.samples.iter().map(|sample| sample.mean_us).collect();
        (!means.is_empty()).then(|| median(means))
    }

    fn batches_us(&self) -> Vec<f64> {
        self.samples.iter().flat_map(|sample| sample.batches_us.iter().copied()).collect()
    }

    fn link_bytes(&self) -> Option<f64> {
        let counts: Option<Vec<f64>> = self.samples.iter().map(|sample| sample.link_bytes).collect();
        counts.filter(|counts| !counts.is_empty()).map(median)
    }

    /// Which share of the link `bytes` need in the time of an operation.
    fn share(&self, bytes: impl Fn(&Sample) -> Option<f64>, rate: Rate) -> Option<f64> {
        let share = |sample: &Sample| Some(bytes(sample)? / rate.bytes_in(sample.mean_us * 1e-6));
        let shares: Option<Vec<f64>> = self.samples.iter().map(share).collect();
        shares.filter(|shares| !shares.is_empty()).map(median)
    }

    /// The share that was used, counted at the link.
    fn link_share(&self, rate: Rate) -> Option<f64> {
        self.share(|sample| sample.link_bytes, rate)
    }

    /// The share that the best algorithm would have used in the same time.
    fn useful_share(&self, least: Option<f64>, rate: Rate) -> Option<f64> {
        self.share(|_| least, rate)
    }

    /// How many times faster than another: the median over the rounds.
    fn ratio_to(&self, other: &Column) -> Option<f64> {
        let pairs = self.samples.iter().zip(&other.samples);
        let ratios: Vec<f64> = pairs.map(|(ours, theirs)| theirs.mean_us / ours.mean_us).collect();
        (!ratios.is_empty()).then(|| median(ratios)).filter(|ratio| ratio.is_finite())
    }
}

/// The smallest figure that at least this share of them does not exceed.
fn percentile(mut figures: Vec<f64>, share: f64) -> Option<f64> {
    figures.sort_unstable_by(f64::total_cmp);
    let place = (figures.len() as f64 * share).ceil() as usize;
    figures.get(place.saturating_sub(1)).copied()
}

/// All rounds of one point, for all implementations.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    pub(crate) point: Point,
    pub(crate) columns: Vec<Column>,
}

impl Row {
    fn best_peer(&self) -> Option<&Column> {
        let peers = self.columns.iter().filter(|column| column.subject.implementation.is_peer());
        let timed = peers.filter_map(|column| Some((column.median_us()?, column)));
        timed.min_by(|(a, _), (b, _)| a.total_cmp(b)).map(|(_, column)| column)
    }

    fn ratio(&self, column: &Column) -> Option<f64> {
        let ours = !column.subject.implementation.is_peer();
        self.best_peer().filter(|_| ours).and_then(|peer| column.ratio_to(peer))
    }
}

/// One table for each operation and number of ranks, in the order measured; with hosts, another one for their
/// links.
pub(crate) fn tables(rows: &[Row], limits: Limits) -> String {
    let same_table =
        |a: &Row, b: &Row| (a.point.operation, a.point.crew) == (b.point.operation, b.point.crew);
    let of_links = |rows: &[Row]| match rows.first()?.point.crew {
        Crew::Machine(_) => None,
        Crew::Hosts(_) => Some(link_table(rows, limits)),
    };
    let tables: Vec<String> =
        rows.chunk_by(same_table).flat_map(|rows| [Some(table(rows)), of_links(rows)]).flatten().collect();
    tables.join("\n")
}

/// The fewest bytes that any algorithm must send in one direction of a link, if the links of a host share them equally.
fn least_on_a_link(point: Point, limits: Limits) -> Option<f64> {
    point.link_bytes_least().map(|bytes| bytes / limits.links as f64)
}

/// What passed the links, and with a rate, which share of what could have passed.
fn link_table(rows: &[Row], limits: Limits) -> String {
    let Some(first) = rows.first() else { return String::new() };
    let rate = limits.rate;
    let mut header = vec!["size".to_string(), "least".to_string()];
    for column in &first.columns {
        let name = column.subject.name();
        let shares = rate.map(|_| [format!("{name} share"), format!("{name} useful")]);
        header.push(name);
        header.extend(shares.into_iter().flatten());
    }
    let bytes = |bytes: Option<f64>| bytes.map_or("–".into(), |bytes| round_size(bytes.round() as usize));
    let percent = |share: Option<f64>| share.map_or("–".into(), |share| format!("{:.1} %", share * 100.0));
    let mut lines = vec![header];
    for row in rows {
        let least = least_on_a_link(row.point, limits);
        let mut line = vec![size(row.point), bytes(least)];
        for column in &row.columns {
            line.push(bytes(column.link_bytes()));
            if let Some(rate) = rate {
                line.push(percent(column.link_share(rate)));
                line.push(percent(column.useful_share(least, rate)));
            }
        }
        lines.push(line);
    }
    let rate = rate.map_or(String::new(), |rate| format!("; shares of {rate}"));
    let Point { operation, crew, .. } = first.point;
    format!(
        "{operation}, {crew}, the busiest link in one direction, bytes of an operation{rate}\n{}",
        align(&lines)
    )
}

fn table(rows: &[Row]) -> String {
    let Some(first) = rows.first() else { return String::new() };
    let Point { operation, dtype, crew, .. } = first.point;
    let ours: Vec<usize> = (0..first.columns.len())
        .filter(|&index| !first.columns[index].subject.implementation.is_peer())
        .collect();
    let compared = !ours.is_empty() && ours.len() < first.columns.len();

    let mut header = vec!["size".to_string()];
    header.extend(first.columns.iter().map(|column| column.subject.name()));
    if compared {
        header.push("best peer".into());
        header.extend(ours.iter().map(|&index| ratio_title(first.columns[index].subject)));
    }
    let mut lines = vec![header];
    for row in rows {
        let mut line = vec![size(row.point)];
        line.extend(row.columns.iter().map(|column| column.median_us().map_or("–".into(), three_digits)));
        if compared {
            line.push(row.best_peer().map_or("–".into(), |peer| peer.subject.name()));
            let ratios = ours.iter().map(|&index| row.ratio(&row.columns[index]));
            line.extend(ratios.map(|ratio| ratio.map_or("–".into(), |ratio| format!("{ratio:.2}×"))));
        }
        lines.push(line);
    }
    let elements = if operation == Operation::Barrier { String::new() } else { format!(" {}", dtype.name()) };
    format!("{operation}{elements}, {crew}, µs\n{}", align(&lines))
}

fn ratio_title(subject: Subject) -> String {
    match subject.memory {
        Memory::Private => "ratio".into(),
        Memory::Shared => "ratio (shared)".into(),
    }
}

/// `64 KiB`: without the `.0` of a round size.
fn size(point: Point) -> String {
    match point.operation {
        Operation::Barrier => "–".into(),
        _ => round_size(point.bytes),
    }
}

fn round_size(bytes: usize) -> String {
    show_size(bytes).replacen(".0 ", " ", 1)
}

/// `0.444`, `2.40`, `41.0`, `7060`, `33400`.
fn three_digits(us: f64) -> String {
    const PLACES_MAX: i32 = 3; // a nanosecond
    let magnitude = (us.log10().floor() as i32 - 2).max(-PLACES_MAX);
    let step = 10f64.powi(magnitude);
    let places = magnitude.min(0).unsigned_abs() as usize;
    format!("{:.places$}", (us / step).round() * step)
}

/// One column of one point, for `--json`.
#[derive(Debug, serde::Serialize)]
struct JsonRow {
    op: Operation,
    dtype: Dtype,
    ranks: usize,
    /// One if the ranks share this machine.
    hosts: usize,
    bytes: usize,
    transport: Transport,
    algorithm: Option<String>,
    implementation: Implementation,
    memory: Memory,
    /// Null if the implementation has no such case.
    median_us: Option<f64>,
    /// Over the batches of all rounds, each the mean of its operations; `min_us` likewise.
    p99_us: Option<f64>,
    min_us: Option<f64>,
    algorithm_gbps: Option<f64>,
    bus_gbps: Option<f64>,
    /// How many times faster than the best peer; not on the peers' own rows.
    ratio: Option<f64>,
    best_peer: Option<Implementation>,
    /// What passed the busiest direction of a link for one operation, and the least that must; with hosts.
    link_bytes: Option<f64>,
    link_bytes_least: Option<f64>,
    /// With a rate: which share of the link was used, and which share the least would have used.
    link_share: Option<f64>,
    useful_share: Option<f64>,
    rounds: usize,
}

pub(crate) fn json(rows: &[Row], limits: Limits) -> String {
    let columns = rows.iter().flat_map(|row| row.columns.iter().map(move |column| (row, column)));
    let list: Vec<JsonRow> = columns.map(|(row, column)| json_row(row, column, limits)).collect();
    let mut text = serde_json::to_string_pretty(&list).expect("numbers and names can be written as JSON");
    text.push('\n');
    text
}

fn json_row(row: &Row, column: &Column, limits: Limits) -> JsonRow {
    let (rate, least) = (limits.rate, least_on_a_link(row.point, limits));
    let Point { operation, dtype, crew, bytes } = row.point;
    let ranks = crew.ranks();
    let Subject { implementation, memory, transport } = column.subject;
    let median_us = column.median_us();
    // Bytes in a microsecond are megabytes in a second.
    let algorithm_gbps = median_us.filter(|_| bytes > 0).map(|us| bytes as f64 / us / 1e3);
    let ratio = row.ratio(column);
    JsonRow {
        op: operation,
        dtype,
        ranks,
        hosts: crew.hosts(),
        bytes,
        transport,
        algorithm: column.algorithm.clone(),
        implementation,
        memory,
        median_us,
        p99_us: percentile(column.batches_us(), 0.99),
        min_us: percentile(column.batches_us(), 0.0),
        algorithm_gbps,
        bus_gbps: algorithm_gbps.map(|gbps| gbps * operation.bus_factor(ranks)),
        ratio,
        best_peer: ratio.and(row.best_peer()).map(|peer| peer.subject.implementation),
        link_bytes: column.link_bytes(),
        link_bytes_least: least,
        link_share: rate.and_then(|rate| column.link_share(rate)),
        useful_share: rate.and_then(|rate| column.useful_share(least, rate)),
        rounds: column.samples.len(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::layout::Layout;
    use super::*;

    const PLAIN: Limits = Limits { links: 1, rate: None, delay: None };

    fn column(implementation: Implementation, memory: Memory, means: &[f64]) -> Column {
        let samples = means
            .iter()
            .map(|&mean_us| Sample { mean_us, batches_us: vec![mean_us], link_bytes: None })
            .collect();
        let subject = Subject { implementation, memory, transport: Transport::Shm };
        Column { subject, algorithm: None, samples }
    }

    fn row(bytes: usize, ours: &[f64], shared: &[f64], gloo: &[f64], openmpi: &[f64]) -> Row {
        let crew = Crew::Machine(2);
        let point = Point { operation: Operation::AllReduce, dtype: Dtype::F32, crew, bytes };
        let columns = vec![
            column(Implementation::Tenfold, Memory::Private, ours),
            column(Implementation::Tenfold, Memory::Shared, shared),
            column(Implementation::Gloo, Memory::Private, gloo),
            column(Implementation::OpenMpi, Memory::Private, openmpi),
        ];
        Row { point, columns }
    }

    #[test]
    fn a_batch_is_shared_among_its_operations() {
        let sample = Sample::new(&[10_000, 30_000], 10);
        assert_eq!(sample, Sample { mean_us: 2.0, batches_us: vec![1.0, 3.0], link_bytes: None });
    }

    #[test]
    fn times_have_three_digits() {
        let shown = [(0.4444, "0.444"), (2.396, "2.40"), (41.04, "41.0"), (853.4, "853"), (7063.0, "7060")];
        for (us, text) in shown.into_iter().chain([(33_449.0, "33400"), (229_512.0, "230000")]) {
            assert_eq!(three_digits(us), text);
        }
    }

    #[test]
    fn the_ninety_ninth_of_a_hundred_is_the_one_before_the_last() {
        assert_eq!(percentile((1..=100).rev().map(f64::from).collect(), 0.99), Some(99.0));
        assert_eq!(percentile(vec![3.0, 1.0, 2.0], 0.0), Some(1.0));
        assert_eq!(percentile(vec![3.0], 0.99), Some(3.0));
        assert_eq!(percentile(vec![], 0.99), None);
    }

    #[test]
    fn a_ratio_is_taken_within_rounds_against_the_peer_with_the_best_median() {
        let row = row(8, &[1.0, 10.0, 1.0], &[0.5; 3], &[100.0; 3], &[2.0, 20.0, 3.0]);
        assert_eq!(row.best_peer().unwrap().subject.implementation, Implementation::OpenMpi);
        assert_eq!(row.ratio(&row.columns[0]), Some(2.0));
        assert_eq!(row.ratio(&row.columns[1]), Some(6.0));
        assert_eq!(row.ratio(&row.columns[2]), None);
    }

    #[test]
    fn a_table_lines_up_and_shows_missing_cases() {
        let mut barrier = row(0, &[0.2], &[], &[73.0], &[0.31]);
        barrier.point.operation = Operation::Barrier;
        let rows = [
            row(8, &[0.2], &[0.1], &[128.0], &[0.5]),
            row(64 << 20, &[11_500.0], &[5600.0], &[31_800.0], &[]),
            barrier,
        ];
        assert_eq!(
            tables(&rows, PLAIN),
            [
                "all_reduce f32, 2 ranks, µs\n",
                "size    tenfold  tenfold (shared)   gloo  openmpi  best peer  ratio  ratio (shared)\n",
                "8 B       0.200             0.100    128    0.500    openmpi  2.50×           5.00×\n",
                "64 MiB    11500              5600  31800        –       gloo  2.77×           5.68×\n",
                "\n",
                "barrier, 2 ranks, µs\n",
                "size  tenfold  tenfold (shared)  gloo  openmpi  best peer  ratio  ratio (shared)\n",
                "–       0.200                 –  73.0    0.310    openmpi  1.55×               –\n",
            ]
            .concat()
        );
    }

    #[test]
    fn peers_alone_have_no_ratio() {
        let mut row = row(8, &[], &[], &[128.0], &[0.5]);
        row.columns.drain(..2);
        assert_eq!(
            tables(&[row], PLAIN),
            "all_reduce f32, 2 ranks, µs\nsize  gloo  openmpi\n8 B    128    0.500\n"
        );
    }

    #[test]
    fn json_rows_have_times_bandwidths_and_a_ratio_for_ours() {
        let mut row = row(1_000_000, &[100.0], &[], &[400.0], &[200.0]);
        row.point.crew = Crew::Machine(4);
        row.columns[0].algorithm = Some("ring".into());
        let list: Vec<serde_json::Value> = serde_json::from_str(&json(&[row], PLAIN)).unwrap();
        assert_eq!(list.len(), 4);
        assert_eq!((&list[0]["op"], &list[0]["algorithm"]), (&"all_reduce".into(), &"ring".into()));
        assert_eq!((&list[0]["median_us"], &list[0]["p99_us"]), (&100.0.into(), &100.0.into()));
        assert_eq!((&list[0]["algorithm_gbps"], &list[0]["bus_gbps"]), (&10.0.into(), &15.0.into()));
        assert_eq!((&list[0]["ratio"], &list[0]["best_peer"]), (&2.0.into(), &"openmpi".into()));
        assert_eq!((&list[1]["memory"], &list[1]["median_us"]), (&"shared".into(), &serde_json::Value::Null));
        assert_eq!(
            (&list[2]["implementation"], &list[2]["ratio"]),
            (&"gloo".into(), &serde_json::Value::Null)
        );
    }

    #[test]
    fn links_have_a_table_of_bytes_and_shares() {
        let mut row = row(1 << 20, &[10_000.0], &[], &[20_000.0], &[]);
        row.point.crew = Crew::Hosts(Layout { hosts: 2, ranks_each: 2 });
        row.columns.retain(|column| !column.samples.is_empty());
        row.columns[0].samples[0].link_bytes = Some(1_125_000.0);
        row.columns[1].samples[0].link_bytes = Some(2_250_000.0);
        let limited = Limits { rate: Some(Rate(1e9)), ..PLAIN };
        let text = tables(&[row.clone()], limited);
        let links = [
            "all_reduce, 2 hosts × 2 ranks, the busiest link in one direction, bytes of an operation; \
             shares of 1 Gbit/s\n",
            "size   least  tenfold  tenfold share  tenfold useful     gloo  gloo share  gloo useful\n",
            "1 MiB  1 MiB  1.1 MiB         90.0 %          83.9 %  2.1 MiB      90.0 %       41.9 %\n",
        ];
        assert!(text.ends_with(&links.concat()), "{text}");
        assert!(text.starts_with("all_reduce f32, 2 hosts × 2 ranks, µs\n"), "{text}");
        let list: Vec<serde_json::Value> = serde_json::from_str(&json(&[row.clone()], limited)).unwrap();
        assert_eq!((&list[0]["hosts"], &list[0]["ranks"]), (&2.into(), &4.into()));
        assert_eq!((&list[0]["link_bytes"], &list[0]["link_share"]), (&1_125_000.0.into(), &0.9.into()));
        assert_eq!(list[1]["useful_share"], 0.4194304);
        let shared_out = Limits { links: 2, ..limited };
        assert_eq!(least_on_a_link(row.point, shared_out), Some(f64::from(1 << 19)));
    }
}
