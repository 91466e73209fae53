//! Figures as a table and as JSON.

use std::fmt::Write as _;

use super::case::{Goal, Point, Unit, goal};
use super::server::Implementation;

/// The result of one implementation in one round.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sample {
    /// In the case's unit.
    pub(crate) figure: f64,
    /// The server's CPU time for one operation.
    pub(crate) cpu_us: Option<f64>,
}

/// All rounds of one point: for each implementation its samples, in the order of the rounds.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    pub(crate) point: Point,
    pub(crate) columns: Vec<(Implementation, Vec<Sample>)>,
}

impl Row {
    /// How many times better the first implementation is than the second: the median over the rounds, because
    /// the two of one round saw the same machine.
    fn ratio(&self) -> Option<f64> {
        let [(_, ours), (_, theirs)] = self.columns.as_slice() else { return None };
        let unit = self.point.case.unit();
        let ratios = ours.iter().zip(theirs).map(|(a, b)| unit.ratio(a.figure, b.figure)).collect();
        finite(median(ratios))
    }

    fn goal(&self) -> Option<(Goal, Option<bool>)> {
        let goal = goal(self.point)?;
        let (_, ours) = self.columns.first()?;
        Some((goal, goal.met(Summary::of(ours).median, self.ratio())))
    }
}

/// The middle of the rounds, and how far apart they were.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Summary {
    median: f64,
    least: f64,
    most: f64,
    cpu_us: Option<f64>,
}

impl Summary {
    fn of(samples: &[Sample]) -> Self {
        let figures = || samples.iter().map(|sample| sample.figure);
        let cpu: Option<Vec<f64>> = samples.iter().map(|sample| sample.cpu_us).collect();
        Summary {
            median: median(figures().collect()),
            least: figures().fold(f64::INFINITY, f64::min),
            most: figures().fold(f64::NEG_INFINITY, f64::max),
            cpu_us: cpu.map(median),
        }
    }
}

pub(crate) fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_unstable_by(f64::total_cmp);
    match figures.len() {
        0 => f64::NAN,
        length if length % 2 == 1 => figures[length / 2],
        length => (figures[length / 2 - 1] + figures[length / 2]) / 2.0,
    }
}

fn finite(figure: f64) -> Option<f64> {
    figure.is_finite().then_some(figure)
}

/// The table for the terminal.
pub(crate) fn table(rows: &[Row]) -> String {
    let Some(first) = rows.first() else { return String::new() };
    let implementations: Vec<Implementation> = first.columns.iter().map(|(which, _)| *which).collect();
    let compared = implementations.len() > 1;

    let mut header = vec!["case".to_string(), "clients".into(), "in flight".into()];
    header.extend(implementations.iter().map(|which| format!("{which} (min–max)")));
    header.extend(implementations.iter().map(|which| format!("CPU µs/op {which}")));
    if compared {
        header.push("ratio".into());
    }
    header.extend(["goal".into(), String::new()]);

    let mut lines = vec![header];
    for row in rows {
        let unit = row.point.case.unit();
        let summaries: Vec<Summary> = row.columns.iter().map(|(_, samples)| Summary::of(samples)).collect();
        let mut line = vec![
            row.point.case.name().to_string(),
            row.point.connections.to_string(),
            row.point.in_flight.to_string(),
        ];
        line.extend(summaries.iter().map(|summary| show(unit, summary)));
        line.extend(summaries.iter().map(|summary| summary.cpu_us.map_or("–".into(), show_cpu)));
        if compared {
            line.push(row.ratio().map_or("–".into(), |ratio| format!("{ratio:.2}×")));
        }
        let goal = row.goal();
        line.push(goal.map_or(String::new(), |(goal, _)| goal.to_string()));
        line.push(match goal.and_then(|(_, met)| met) {
            None => String::new(),
            Some(true) => "met".into(),
            Some(false) => "MISSED".into(),
        });
        lines.push(line);
    }
    align(&lines)
}

/// Columns as wide as their widest cell: the first left-aligned, the others right-aligned.
pub(crate) fn align(lines: &[Vec<String>]) -> String {
    let columns = lines.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        lines.iter().filter_map(|line| line.get(column)).map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text = String::new();
    for line in lines {
        let mut row = String::new();
        for (column, (cell, width)) in line.iter().zip(&widths).enumerate() {
            match column {
                0 => write!(row, "{cell:<width$}"),
                _ => write!(row, "  {cell:>width$}"),
            }
            .expect("a string takes what is written to it");
        }
        text.push_str(row.trim_end());
        text.push('\n');
    }
    text
}

/// A figure with its spread, all three in the scale of the middle one: `287 k/s (280–291)`.
fn show(unit: Unit, summary: &Summary) -> String {
    if !summary.median.is_finite() {
        return "–".into();
    }
    let scales: &[(f64, &str)] = match unit {
        Unit::Rate => &[(1e6, "M/s"), (1e3, "k/s"), (1.0, "/s")],
        Unit::Micros => &[(1e6, "s"), (1e3, "ms"), (1.0, "µs")],
        Unit::Bytes => &[(1.0, "B")],
    };
    let &(scale, name) =
        scales.iter().find(|(scale, _)| summary.median >= *scale).unwrap_or(&scales[scales.len() - 1]);
    let digits = digits(summary.median / scale);
    let [median, least, most] = [summary.median, summary.least, summary.most].map(|figure| figure / scale);
    format!("{median:.digits$} {name} ({least:.digits$}–{most:.digits$})")
}

fn show_cpu(us: f64) -> String {
    format!("{us:.0$}", digits(us))
}

/// Digits after the decimal point, for three in total.
fn digits(figure: f64) -> usize {
    match figure {
        figure if figure < 10.0 => 2,
        figure if figure < 100.0 => 1,
        _ => 0,
    }
}

/// One implementation at one point, for `--json`.
#[derive(Debug, serde::Serialize)]
struct JsonRow {
    op: &'static str,
    connections: usize,
    in_flight: usize,
    implementation: Implementation,
    ops_per_second: Option<f64>,
    ops_per_second_min: Option<f64>,
    ops_per_second_max: Option<f64>,
    /// From writing a turn to its last reply; for `wake` and `connect` until the last client is done.
    median_us: Option<f64>,
    cpu_us_per_op: Option<f64>,
    bytes_per_connection: Option<f64>,
    /// How many times better than the peer; only if there was one, and not on the peer's own rows.
    ratio: Option<f64>,
    goal: Option<String>,
    met: Option<bool>,
    rounds: usize,
}

pub(crate) fn json(rows: &[Row]) -> String {
    let list: Vec<JsonRow> = rows.iter().flat_map(json_rows).collect();
    let mut text = serde_json::to_string_pretty(&list).expect("numbers and names can be written as JSON");
    text.push('\n');
    text
}

fn json_rows(row: &Row) -> impl Iterator<Item = JsonRow> + '_ {
    let Point { case, in_flight, connections } = row.point;
    // Operations in flight on all connections together: rate = in flight / time.
    let under_way = (connections * in_flight) as f64 * 1e6;
    row.columns.iter().enumerate().map(move |(index, (implementation, samples))| {
        let Summary { median, least, most, cpu_us } = Summary::of(samples);
        let (rates, median_us, bytes) = match case.unit() {
            Unit::Rate => ([Some(median), Some(least), Some(most)], Some(under_way / median), None),
            Unit::Micros => ([median, most, least].map(|us| Some(under_way / us)), Some(median), None),
            Unit::Bytes => ([None; 3], None, Some(median)),
        };
        let [ops_per_second, ops_per_second_min, ops_per_second_max] =
            rates.map(|rate| rate.and_then(finite));
        let ours = index == 0;
        let goal = row.goal().filter(|_| ours);
        JsonRow {
            op: case.name(),
            connections,
            in_flight,
            implementation: *implementation,
            ops_per_second,
            ops_per_second_min,
            ops_per_second_max,
            median_us: median_us.and_then(finite),
            cpu_us_per_op: cpu_us.and_then(finite),
            bytes_per_connection: bytes.and_then(finite),
            ratio: row.ratio().filter(|_| ours),
            goal: goal.map(|(goal, _)| goal.to_string()),
            met: goal.and_then(|(_, met)| met),
            rounds: samples.len(),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::Case;

    fn samples(figures: &[f64]) -> Vec<Sample> {
        figures.iter().map(|&figure| Sample { figure, cpu_us: Some(1e6 / figure) }).collect()
    }

    fn row(case: Case, connections: usize, in_flight: usize, ours: &[f64], theirs: &[f64]) -> Row {
        let columns =
            vec![(Implementation::Tenfold, samples(ours)), (Implementation::Torch, samples(theirs))];
        Row { point: Point { case, in_flight, connections }, columns }
    }

    #[test]
    fn the_median_is_the_middle_or_between_the_two_middles() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(vec![4.0, 1.0, 2.0, 3.0]), 2.5);
        assert!(median(vec![]).is_nan());
    }

    #[test]
    fn a_ratio_is_taken_within_rounds_so_that_a_busy_round_does_not_count() {
        let row = row(Case::Get, 64, 16, &[100.0, 1000.0, 1000.0], &[10.0, 100.0, 50.0]);
        assert_eq!(row.ratio(), Some(10.0));
    }

    #[test]
    fn a_table_lines_up_and_says_which_goals_are_met() {
        let mut rows = vec![
            row(Case::Get, 64, 16, &[2.61e6, 2.5e6, 2.7e6], &[287e3, 280e3, 291e3]),
            row(Case::Connect, 5000, 1, &[200_000.0], &[177_000.0]),
        ];
        rows[1].columns[0].1[0].cpu_us = None;
        assert_eq!(
            table(&rows),
            [
                "case     clients  in flight     tenfold (min–max)    torch (min–max)  CPU µs/op tenfold  \
                 CPU µs/op torch  ratio    goal\n",
                "get           64         16  2.61 M/s (2.50–2.70)  287 k/s (280–291)               0.38  \
                 \u{20}          3.48  9.09×    ≥ 9×     met\n",
                "connect     5000          1      200 ms (200–200)   177 ms (177–177)                  –  \
                 \u{20}          5.65  0.89×  ≥ 1.3×  MISSED\n",
            ]
            .concat()
        );
    }

    #[test]
    fn without_a_peer_there_is_no_ratio_and_no_verdict() {
        let mut row = row(Case::Get, 64, 16, &[2.61e6], &[]);
        row.columns.truncate(1);
        let table = table(&[row]);
        assert!(!table.contains("ratio") && table.contains("≥ 9×") && !table.contains("met"), "{table}");
    }

    #[test]
    fn json_rows_have_a_rate_and_a_time_whatever_the_table_shows() {
        let rows = [
            row(Case::Get, 64, 16, &[2e6], &[2e5]),
            row(Case::Connect, 5000, 1, &[100_000.0], &[200_000.0]),
            row(Case::Memory, 2000, 1, &[500.0], &[1000.0]),
        ];
        let list: Vec<serde_json::Value> = serde_json::from_str(&json(&rows)).unwrap();
        assert_eq!(list.len(), 6);
        assert_eq!(
            (list[0]["ops_per_second"].as_f64(), list[0]["median_us"].as_f64()),
            (Some(2e6), Some(512.0))
        );
        assert_eq!((list[0]["ratio"].as_f64(), list[1]["ratio"].as_f64()), (Some(10.0), None));
        assert_eq!((list[0]["met"].as_bool(), list[0]["goal"].as_str()), (Some(true), Some("≥ 9×")));
        assert_eq!(list[2]["ops_per_second"].as_f64(), Some(50_000.0));
        assert_eq!((list[2]["ratio"].as_f64(), list[2]["median_us"].as_f64()), (Some(2.0), Some(100_000.0)));
        assert_eq!(list[4]["bytes_per_connection"].as_f64(), Some(500.0));
        assert_eq!(list[5]["implementation"], "torch");
    }
}
