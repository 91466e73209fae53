//! What the system knows of this process's threads: names, states, and what they sleep in. No stacks: those of Rust cannot
//! be had from another thread; Python's come from Python.

use std::fmt::Write as _;
use std::fs;

/// Threads that are listed; further ones are only counted.
const THREADS_MAX: usize = 1024;

/// A line for each thread, in the order in which they were started.
pub(super) fn dump() -> String {
    let tasks = fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let mut numbers: Vec<u32> = tasks.filter_map(|task| task.file_name().to_str()?.parse().ok()).collect();
    numbers.sort_unstable();
    let mut text = String::new();
    for number in numbers.iter().take(THREADS_MAX) {
        let read =
            |what: &str| fs::read_to_string(format!("/proc/self/task/{number}/{what}")).unwrap_or_default();
        let (name, stat, wait) = (read("comm"), read("stat"), read("wchan"));
        // The name before it may have spaces and brackets of its own.
        let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
        let _ = write!(text, "Thread {number} `{}`: {}", name.trim_end(), state_name(state));
        let place = wait.trim();
        if !place.is_empty() && place != "0" {
            let _ = write!(text, " in {place}");
        }
        text.push('\n');
    }
    if numbers.len() > THREADS_MAX {
        let _ = writeln!(text, "and {} more", numbers.len() - THREADS_MAX);
    }
    text
}

fn state_name(state: Option<char>) -> &'static str {
    match state {
        Some('R') => "running",
        Some('S') => "sleeping",
        Some('D') => "waiting for a device",
        Some('T' | 't') => "stopped",
        Some('Z' | 'X') => "gone",
        _ => "in an unknown state",
    }
}
