//! Ranks, times, sizes and call sites, as parts of a sentence.

use std::fmt::Write as _;

use super::dump::{Detail, Dump, Frame, Record, Shape};

/// How many ranks, or ranges of ranks, are named individually.
const NAMED_MAX: usize = 6;
/// How many tensors of one operation are described.
const TENSORS_MAX: usize = 3;

/// `rank 2`, `ranks 0, 1 and 3`, `ranks 0-6 and 8`.
pub(crate) fn ranks(ranks: &[u32]) -> String {
    let word = if ranks.len() == 1 { "rank" } else { "ranks" };
    format!("{word} {}", numbers(ranks))
}

/// `2`, `0, 1 and 3`, `0-6 and 8`. Three or more consecutive ranks are written as a range.
pub(crate) fn numbers(ranks: &[u32]) -> String {
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for &rank in ranks {
        match runs.last_mut() {
            Some((_, end)) if end.checked_add(1) == Some(rank) => *end = rank,
            _ => runs.push((rank, rank)),
        }
    }
    let mut parts: Vec<String> = Vec::new();
    for (start, end) in runs {
        match end - start {
            0 => parts.push(start.to_string()),
            1 => parts.extend([start.to_string(), end.to_string()]),
            _ => parts.push(format!("{start}-{end}")),
        }
    }
    let more = parts.len().saturating_sub(NAMED_MAX);
    if more > 0 {
        parts.truncate(NAMED_MAX);
        parts.push(format!("{more} more"));
    }
    match &parts[..] {
        [] => "none".into(),
        [one] => one.clone(),
        [first @ .., last] => format!("{} and {last}", first.join(", ")),
    }
}

/// `850 µs`, `12.3 ms`, `40.1 s`, `31.0 min`.
pub(crate) fn seconds(seconds: f64) -> String {
    match seconds {
        s if s < 1e-3 => format!("{:.0} µs", s * 1e6),
        s if s < 1.0 => format!("{:.1} ms", s * 1e3),
        s if s < 600.0 => format!("{s:.1} s"),
        s if s < 7200.0 => format!("{:.1} min", s / 60.0),
        s => format!("{:.1} h", s / 3600.0),
    }
}

/// `1 collective`, `1,204 collectives`.
pub(crate) fn counted(count: usize, noun: &str) -> String {
    let plural = if count == 1 { "" } else { "s" };
    format!("{} {noun}{plural}", thousands(count))
}

fn thousands(number: usize) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// The arguments of an operation: `Float [4] → Float [3, 4], root 2`. The root is a rank of the job; the
/// record has one of its group.
pub(crate) fn tensors(record: &Record, root: Option<i64>) -> String {
    let (inputs, outputs) = (shapes(&record.inputs), shapes(&record.outputs));
    let mut argument = String::new();
    if let Detail::Argument(of_name) = &record.detail {
        argument += &format!(", {of_name}");
    }
    if let Some(op) = &record.reduce_op {
        argument += &format!(", {op}");
    }
    if let Some(root) = root {
        argument += &format!(", root {root}");
    }
    match (&inputs[..], &outputs[..]) {
        ("", "") => format!("no tensors{argument}"),
        (only, "") | ("", only) => format!("{only}{argument}"),
        (inputs, outputs) if inputs == outputs => format!("{inputs}{argument}"),
        (inputs, outputs) => format!("{inputs} → {outputs}{argument}"),
    }
}

fn shapes(shapes: &[Shape]) -> String {
    let mut text = String::new();
    let mut dtype = None;
    for (index, shape) in shapes.iter().take(TENSORS_MAX).enumerate() {
        let separator = if index == 0 { "" } else { ", " };
        let _cannot_fail = write!(text, "{separator}");
        if let Some(name) = shape.dtype.as_deref().filter(|name| dtype != Some(*name)) {
            let _cannot_fail = write!(text, "{name} ");
            dtype = Some(name);
        }
        let sizes: Vec<String> = shape.sizes.iter().map(i64::to_string).collect();
        let _cannot_fail = write!(text, "[{}]", sizes.join(", "));
    }
    match shapes.len().saturating_sub(TENSORS_MAX) {
        0 => text,
        more => format!("{text} and {more} more"),
    }
}

/// Where the program made the call: the innermost frame that is neither PyTorch's nor ours.
pub(crate) fn call_site(record: &Record) -> Option<String> {
    program_frames(record).next().map(frame)
}

/// `job/train.py:88 in step`
pub(crate) fn frame(frame: &Frame) -> String {
    format!("{}:{} in {}", short_file(frame), frame.line, frame.name)
}

/// Where PyTorch's code and ours is, installed or not. A program may itself be in a folder called `torch`.
const LIBRARIES: [&str; 8] = [
    "-packages/torch/", // site-packages, and Debian's dist-packages
    "-packages/tenfold/",
    "/torch/csrc/",
    "/torch/distributed/distributed_c10d.py",
    "/torch/distributed/c10d_logger.py",
    "/torch/distributed/_functional_collectives.py",
    "/tenfold/torch/",
    "/c10d/ProcessGroup",
];

/// The frames of the program itself, innermost first; all frames if there are none. Tenfold's recorder leaves
/// out its own frames, so all frames of its dumps count.
pub(crate) fn program_frames(record: &Record) -> impl Iterator<Item = &Frame> {
    let is_library = |frame: &&Frame| {
        let file = &*frame.file;
        LIBRARIES.iter().any(|part| file.contains(part)) || file.starts_with('<')
    };
    let any = record.frames.iter().any(|frame| !is_library(&frame));
    record.frames.iter().filter(move |frame| !any || !is_library(frame))
}

/// The last parts of a path: enough to find it.
fn short_file(frame: &Frame) -> &str {
    let file = &*frame.file;
    let mut slashes = file.rmatch_indices('/').map(|(index, _)| index);
    slashes.nth(1).map_or(file, |index| &file[index + 1..])
}

/// Seconds from the record's beginning to its rank's dump.
pub(crate) fn age(record: &Record, dump: &Dump) -> Option<f64> {
    before(record.created_ns?, dump)
}

/// Seconds from a moment to the dump.
pub(crate) fn before(moment_ns: i64, dump: &Dump) -> Option<f64> {
    Some((dump.written_ns?.checked_sub(moment_ns)?).max(0) as f64 / 1e9)
}

#[cfg(test)]
mod tests {
    use super::super::dump::Call;
    use super::*;

    #[test]
    fn ranks_read_as_people_say_them() {
        assert_eq!(ranks(&[2]), "rank 2");
        assert_eq!(ranks(&[0, 1, 3]), "ranks 0, 1 and 3");
        assert_eq!(ranks(&[0, 1, 2, 3, 4, 5, 6, 8]), "ranks 0-6 and 8");
        let even: Vec<u32> = (0..20).map(|half| 2 * half).collect();
        assert_eq!(ranks(&even), "ranks 0, 2, 4, 6, 8, 10 and 14 more");
    }

    #[test]
    fn times_and_counts_have_three_digits() {
        let all = [0.00085, 0.0123, 40.06, 1860.0, 8000.0].map(seconds);
        assert_eq!(all, ["850 µs", "12.3 ms", "40.1 s", "31.0 min", "2.2 h"]);
        assert_eq!(counted(1, "dump"), "1 dump");
        assert_eq!(counted(1_204_000, "collective"), "1,204,000 collectives");
    }

    #[test]
    fn the_call_site_is_the_programs() {
        let frame = |file: &str, line| Frame { name: "f".into(), file: file.into(), line };
        let frames = vec![
            frame("/venv/lib/python3.11/site-packages/torch/distributed/c.py", 1),
            frame("/home/me/job/train.py", 88),
        ];
        let of = |frames| Record { call: Call { frames, ..Call::default() }.into(), ..Record::default() };
        let record = of(frames);
        assert_eq!(call_site(&record).unwrap(), "job/train.py:88 in f");
        let record = of(vec![frame("/venv/lib/python3.11/site-packages/torch/distributed/c.py", 1)]);
        assert_eq!(call_site(&record).unwrap(), "distributed/c.py:1 in f");
        assert_eq!(call_site(&Record::default()), None);
        for home in ["/home/me/torch/train.py", "/work/tenfold/train.py", "/src/c10d/train.py"] {
            let record = of(vec![frame(home, 3), frame("/usr/bin/starter.py", 4)]);
            assert!(call_site(&record).unwrap().ends_with("/train.py:3 in f"), "{home}");
        }
        let of_hook = [
            "/x/package/tenfold/torch/process_group.py",
            "/usr/lib/python3/dist-packages/torch/distributed/distributed_c10d.py",
            "/home/me/torch/train.py",
        ];
        let record = of(of_hook.iter().map(|file| frame(file, 5)).collect());
        assert_eq!(call_site(&record).unwrap(), "torch/train.py:5 in f");
    }

    #[test]
    fn foreign_text_commands_no_terminal() {}
}
