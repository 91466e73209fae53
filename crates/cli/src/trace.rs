//! `tenfold trace`: finds out what went wrong, from the flight-recorder dumps of all ranks. The analysis is
//! in `tenfold-trace`.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{BufWriter, ErrorKind, IsTerminal as _, Write as _};
use std::path::{Path, PathBuf};

use tenfold_console::{FAILURE, Outcome, SUCCESS};
use tenfold_trace::{Analysis, Filter};

/// Find out what went wrong from the flight-recorder dumps of all ranks: which rank is behind, which calls do not match.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  tenfold trace /tmp/dumps                        a folder with trace_0, trace_1, ...
  tenfold trace nccl_trace_rank_*                 PyTorch's own, pickle or JSON
  tenfold trace dumps --timeline trace.json       open it in https://ui.perfetto.dev
  tenfold trace dumps --html trace.html           the timeline as a self-contained page
  tenfold trace dumps --ranks 0-7 --group dp      a part of the job

The rank is the number at the end of a file's name. See docs/debugging-hangs.md for how to get dumps.

Exit status: 0 no problem found, 1 problem found, 2 no problem found but a file could not be
read; or a file could not be written, or invalid arguments.")]
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
    /// Write the timeline as a self-contained page
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Look at these ranks only: 0,2,4-7
    #[arg(long, value_parser = parse_ranks)]
    ranks: Option<Ranks>,
    /// Look at this group only, by its name or description; may be given more than once
    #[arg(long, value_name = "NAME")]
    group: Vec<String>,
    /// Print at most this many findings
    #[arg(long, default_value_t = 5, value_name = "N")]
    limit: usize,
}

type Ranks = std::sync::Arc<BTreeSet<u32>>;

/// Some file could not be read, and no problem was found in the others.
const UNSURE: u8 = 2;
/// Ranks that can be listed.
const RANKS_MAX: u32 = 1 << 20;

pub(crate) fn run(args: &Args) -> Outcome {
    let filter =
        Filter { ranks: args.ranks.as_deref().cloned().unwrap_or_default(), groups: args.group.clone() };
    let mut dumps = tenfold_trace::read(&args.files);
    for refusal in dumps.refusals() {
        eprintln!("error: {refusal}");
    }
    let was_all_read = dumps.refusals().is_empty();
    if dumps.is_empty() {
        if was_all_read {
            eprintln!("error: no dumps found");
        }
        return Ok(UNSURE);
    }
    let analysis = match dumps.analyse(&filter) {
        Ok(analysis) => analysis,
        Err(problem) => {
            eprintln!("error: {problem}");
            return Ok(UNSURE);
        }
    };
    if let Err(problem) = draw(args, &analysis) {
        eprintln!("error: {problem}");
        return Ok(UNSURE);
    }
    match say(args, &analysis) {
        Ok(()) => {}
        Err(error) if error.kind() == ErrorKind::BrokenPipe => return Err(error.into()),
        Err(error) => {
            eprintln!("error: cannot write the verdict: {error}");
            return Ok(UNSURE);
        }
    }
    Ok(match (analysis.is_bad(), was_all_read) {
        (true, _) => FAILURE,
        (false, true) => SUCCESS,
        (false, false) => UNSURE,
    })
}

fn say(args: &Args, analysis: &Analysis<'_>) -> std::io::Result<()> {
    let mut out = std::io::stdout();
    match args.json {
        true => writeln!(out, "{:#}", analysis.json())?,
        false => out.write_all(analysis.text(args.limit, out.is_terminal()).as_bytes())?,
    }
    out.flush()
}

/// Writes the requested timelines.
fn draw(args: &Args, analysis: &Analysis<'_>) -> Result<(), String> {
    if let Some(file) = &args.timeline {
        write(file, analysis.trace_events().to_string().as_bytes())?;
    }
    if let Some(file) = &args.html {
        write(file, analysis.html().as_bytes())?;
    }
    Ok(())
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
    let bad = || format!("invalid list of ranks `{text}`: expected numbers and ranges, such as 0,2,4-7");
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
            assert!(parse_ranks(wrong).unwrap_err().contains("invalid list of ranks"), "{wrong}");
        }
    }
}
