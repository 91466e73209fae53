//! The timeline as a page: one file without any external resource, not even a font.
//!
//! The page (`page.html`) is a frame with a placeholder for data. The data is JSON with `<` escaped, so that
//! no text of a dump can end the element it is in. The script writes it into the page as text only. Names are
//! kept in a table, because thousands of operations have few different ones.

use std::collections::HashMap;

use serde_json::{Value, json};
use tenfold_console::one_line;

use super::dump::End;
use super::report::Report;
use super::timeline::{self, Timeline};

const PAGE: &str = include_str!("page.html");
/// Fields that are stored in each box: as text they would make every box different.
const OWN: [&str; 3] = ["sequence", "duration_ms", "record"];
const PLACE: &str = "/*DATA*/null";

pub(crate) fn page(report: &Report<'_>, timeline: &Timeline<'_>) -> String {
    let mut names = Names::default();
    let boxes: Vec<Value> = timeline
        .boxes
        .iter()
        .map(|one| {
            let record = one.record;
            let fields = timeline::fields(one).into_iter().filter(|(name, _)| !OWN.contains(&name.as_str()));
            let text: Vec<String> = fields
                .map(|(name, value)| match value.as_str() {
                    Some(text) => format!("{name}: {}", one_line(text)),
                    None => format!("{name}: {value}"),
                })
                .collect();
            let end = (one.end_ns > one.begin_ns).then(|| one.end_ns - timeline.start_ns);
            json!([
                one.rank,
                one.group,
                one.lane,
                one.begin_ns.saturating_sub(timeline.start_ns),
                end,
                names.number(&record.operation),
                record.sequence,
                state_number(record.end),
                names.number(&text.join("\n")),
            ])
        })
        .collect();
    let findings: Vec<Value> = report.json()["findings"].as_array().cloned().unwrap_or_default();
    let data = json!({
        "verdict": report.verdict(),
        "bad": report.is_bad(),
        "findings": findings,
        "start_ms": timeline.start_ns / 1_000_000,
        "length": timeline.end_ns.saturating_sub(timeline.start_ns),
        "groups": timeline.groups,
        "missing": report.job.missing,
        "names": names.all,
        "boxes": boxes,
    });
    let data = data.to_string().replace('<', "\\u003c").replace('\u{2028}', "\\u2028");
    PAGE.replacen(PLACE, &data, 1)
}

fn state_number(end: End) -> u8 {
    match end {
        End::Open => 0,
        End::Completed(_) => 1,
        End::Unknown => 2,
        End::Failed => 3,
    }
}

/// Each text once, by number.
#[derive(Default)]
struct Names {
    all: Vec<String>,
    numbers: HashMap<String, usize>,
}

impl Names {
    fn number(&mut self, text: &str) -> usize {
        if let Some(&number) = self.numbers.get(text) {
            return number;
        }
        self.all.push(text.to_owned());
        self.numbers.insert(text.to_owned(), self.all.len() - 1);
        self.all.len() - 1
    }
}
