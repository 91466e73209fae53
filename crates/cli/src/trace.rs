//! `tenfold trace`: what went wrong, from the flight-recorder dumps of all ranks.
//!
//! [`read`] makes dumps from files, ours or PyTorch's, [`align`] lays them side by side, [`verdict`] says what is wrong with that;
//! [`report`] writes it down, [`timeline`] and [`html`] draw it. All but the first are pure.

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
use std::fs::File;
use std::io::{BufWriter, ErrorKind, IsTerminal as _, Write as _};
use std::path::{Path, PathBuf};

use crate::{FAILURE, Outcome, SUCCESS};

use align::{Filter, Job};
use report::Report;
use timeline::Timeline;

/// Says what went wrong, from the flight-recorder dumps of all ranks: who is behind, who called something else.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  tenfold trace /tmp/dumps                        a folder with trace_0, trace_1, ...
  tenfold trace nccl_trace_rank_*                 PyTorch's own, pickle or JSON
  tenfold trace dumps --timeline trace.json       open it in https://ui.perfetto.dev
  tenfold trace dumps --html trace.html           the timeline as a page that needs nothing else
  tenfold trace dumps --ranks 0-7 --group dp      a part of the job

The rank is the number at the end of a file's name. docs/debugging-hangs.md says how to get dumps.

Exit status: 0 no trouble found, 1 trouble found, 2 nothing found to be wrong but not every
file could be read; or a file could not be written, or wrong arguments.")]
pub(crate) struct Args {
    /// Dumps, and folders with dumps
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Write the operations of all ranks over time for Perfetto or chrome://tracing
    #[arg(long, value_name = "FILE")]
    timeline: Option<PathBuf>,
    /// Write the timeline as a page of its own
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Look at these ranks only: 0,2,4-7
    #[arg(long, value_parser = parse_ranks)]
    ranks: Option<Ranks>,
    /// Look at this group only, by its name or description; may be given more than once
    #[arg(long, value_name = "NAME")]
    group: Vec<String>,
    /// Print as many findings
    #[arg(long, default_value_t = 5, value_name = "N")]
    limit: usize,
}

type Ranks = std::sync::Arc<BTreeSet<u32>>;

/// Some file could not be read, and no trouble was found in the others.
const UNSURE: u8 = 2;
/// Ranks that can be listed.
const RANKS_MAX: u32 = 1 << 20;

pub(crate) fn run(args: &Args) -> Outcome {
    let filter =
        Filter { ranks: args.ranks.as_deref().cloned().unwrap_or_default(), groups: args.group.clone() };
    let mut found = read::read_all(&args.files);
    for refusal in &found.refusals {
        eprintln!("error: {}: {}", words::clean(&refusal.file), clean_lines(&refusal.problem));
    }
    if found.dumps.is_empty() {
        if found.refusals.is_empty() {
            eprintln!("error: no dump was found");
        }
        return Ok(UNSURE);
    }
    found.dumps.retain(|dump| filter.has_rank(dump.rank));
    let job = Job::new(&found.dumps, &found.ranks_mentioned, &filter);
    if let Some(problem) = nothing_left(&job, &filter) {
        eprintln!("error: {problem}");
        return Ok(UNSURE);
    }
    let findings = verdict::findings(&job, &found.refusals);
    let report =
        Report { job: &job, findings: &findings, refusals: &found.refusals, left_out: found.left_out };
    if let Err(problem) = draw(args, &report) {
        eprintln!("error: {problem}");
        return Ok(UNSURE);
    }
    match say(args, &report) {
        Ok(()) => {}
        Err(error) if error.kind() == ErrorKind::BrokenPipe => return Err(error.into()),
        Err(error) => {
            eprintln!("error: cannot write the verdict: {error}");
            return Ok(UNSURE);
        }
    }
    Ok(match (report.is_bad(), found.refusals.is_empty()) {
        (true, _) => FAILURE,
        (false, true) => SUCCESS,
        (false, false) => UNSURE,
    })
}

fn say(args: &Args, report: &Report<'_>) -> std::io::Result<()> {
    let mut out = std::io::stdout();
    match args.json {
        true => writeln!(out, "{:#}", report.json())?,
        false => out.write_all(report.text(args.limit, out.is_terminal()).as_bytes())?,
    }
    out.flush()
}

/// Writes the pictures that were asked for.
fn draw(args: &Args, report: &Report<'_>) -> Result<(), String> {
    if args.timeline.is_none() && args.html.is_none() {
        return Ok(());
    }
    let timeline = Timeline::new(report.job);
    if let Some(file) = &args.timeline {
        write(file, timeline.to_chrome().to_string().as_bytes())?;
    }
    if let Some(file) = &args.html {
        write(file, html::page(report, &timeline).as_bytes())?;
    }
    Ok(())
}

/// What was asked for and is not there.
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
            .map(|name| words::clean(name))
            .collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let wanted = filter.groups.join("`, `");
        return Some(format!("no group is called `{wanted}`\n  hint: there are {}", names.join(", ")));
    }
    None
}

/// Hints are on lines of their own.
fn clean_lines(text: &str) -> String {
    text.lines().map(words::clean).collect::<Vec<_>>().join("\n")
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), String> {
    let write = || {
        let mut file = BufWriter::new(File::create(path)?);
        file.write_all(bytes)?;
        file.flush()
    };
    write().map_err(|error: std::io::Error| format!("cannot write {}: {error}", path.display()))
}

/// `0,2,4-7`
fn parse_ranks(text: &str) -> Result<Ranks, String> {
    let bad = || format!("`{text}` is no list of ranks: write such as 0,2,4-7");
    let mut ranks = BTreeSet::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let first: u32 = first.trim().parse().map_err(|_| bad())?;
        let last: u32 = last.trim().parse().map_err(|_| bad())?;
        if last < first || last >= RANKS_MAX {
            return Err(bad());
        }
        ranks.extend(first..=last);
    }
    Ok(ranks.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_read_as_people_list_them() {
        let ranks: Vec<u32> = parse_ranks("0,2,4-6").unwrap().iter().copied().collect();
        assert_eq!(ranks, [0, 2, 4, 5, 6]);
        for wrong in ["", "a", "3-1", "1,,2", "0-4294967295"] {
            assert!(parse_ranks(wrong).unwrap_err().contains("is no list of ranks"), "{wrong}");
        }
    }
}
