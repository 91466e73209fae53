//! Finds out what went wrong in a job, from the flight-recorder dumps of all ranks: tenfold's own or
//! PyTorch's.
//!
//! `read` makes dumps from files, `align` aligns them, `verdict` finds what is wrong; `report` writes it
//! down, `timeline` and `html` draw it. All except the first are pure. This file is the public interface.
//!
//! ```
//! let dumps = tenfold_trace::read(&["/no/such/folder".into()]);
//! assert!(dumps.is_empty());
//! assert!(dumps.refusals()[0].to_string().contains("/no/such/folder"));
//! ```

#![warn(missing_docs)]

mod align;
mod arrivals;
mod compare;
mod dump;
mod html;
mod json;
mod pickle;
mod plain;
mod read;
mod report;
mod timeline;
#[cfg(test)]
mod trace_events;
mod verdict;
mod words;

use std::collections::BTreeSet;
use std::fmt;
use std::path::PathBuf;

use tenfold_console::one_line;

use align::Job;
use report::Report;
use timeline::Timeline;
use verdict::Finding;

pub use align::Filter;
pub use read::Refusal;

/// Reads files, and all dumps in folders. Files that cannot be read are among the [refusals](Dumps::refusals).
pub fn read(paths: &[PathBuf]) -> Dumps {
    Dumps(read::read_all(paths))
}

/// The dumps of a job.
#[derive(Debug)]
pub struct Dumps(read::Dumps);

impl Dumps {
    /// Whether no file could be read.
    pub fn is_empty(&self) -> bool {
        self.0.dumps.is_empty()
    }

    /// What could not be read, and why.
    pub fn refusals(&self) -> &[Refusal] {
        &self.0.refusals
    }

    /// Compares the ranks and groups that the filter selects. Dumps of other ranks are dropped.
    ///
    /// # Errors
    /// If nothing is left to compare; the error lists what exists.
    pub fn analyse(&mut self, filter: &Filter) -> Result<Analysis<'_>, String> {
        self.0.dumps.retain(|dump| filter.has_rank(dump.rank));
        let job = Job::new(&self.0.dumps, &self.0.ranks_mentioned, filter);
        if let Some(problem) = nothing_left(&job, filter) {
            return Err(problem);
        }
        let findings = verdict::findings(&job, &self.0.refusals);
        Ok(Analysis { job, findings, refusals: &self.0.refusals, left_out: self.0.left_out })
    }
}

/// What the dumps of a job show.
pub struct Analysis<'a> {
    job: Job<'a>,
    findings: Vec<Finding>,
    refusals: &'a [Refusal],
    left_out: usize,
}

impl Analysis<'_> {
    fn report(&self) -> Report<'_> {
        Report { job: &self.job, findings: &self.findings, refusals: self.refusals, left_out: self.left_out }
    }

    /// Is anything wrong?
    pub fn is_bad(&self) -> bool {
        self.report().is_bad()
    }

    /// The verdict and the first `limit` findings, as text.
    pub fn text(&self, limit: usize, colour: bool) -> String {
        self.report().text(limit, colour)
    }

    /// The same as JSON.
    pub fn json(&self) -> serde_json::Value {
        self.report().json()
    }

    /// The operations of all ranks over time, in the trace event format that Perfetto and chrome://tracing read.
    pub fn trace_events(&self) -> serde_json::Value {
        Timeline::new(&self.job).to_chrome()
    }

    /// The same as an HTML page that needs no other file.
    pub fn html(&self) -> String {
        html::page(&self.report(), &Timeline::new(&self.job))
    }
}

impl fmt::Debug for Analysis<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Analysis").field("findings", &self.findings).finish_non_exhaustive()
    }
}

impl fmt::Display for Refusal {
    /// Safe to show in a terminal, whatever the file contains.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Hints are on separate lines.
        let problem = self.problem.lines().map(one_line).collect::<Vec<_>>().join("\n");
        write!(f, "{}: {problem}", one_line(&self.file))
    }
}

/// What was requested but does not exist.
fn nothing_left(job: &Job<'_>, filter: &Filter) -> Option<String> {
    if job.dumps.is_empty() {
        let ranks: Vec<u32> = filter.ranks.iter().copied().collect();
        return Some(format!("there is no dump of {}", words::ranks(&ranks)));
    }
    if job.groups.is_empty() && !filter.groups.is_empty() {
        let names: BTreeSet<String> = job
            .dumps
            .iter()
            .flat_map(|dump| &dump.records)
            .map(|record| if record.description.is_empty() { &record.group } else { &record.description })
            .map(|name| one_line(name))
            .collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let wanted = filter.groups.join("`, `");
        return Some(format!("no group is named `{wanted}`\n  hint: the groups are {}", names.join(", ")));
    }
    None
}
