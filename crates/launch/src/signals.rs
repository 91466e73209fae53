//! Signals: which of them the launcher handles, and which ranks handle one.
//!
//! Those of `--signals-to-handle` end the run. SIGUSR1 and SIGUSR2, unless they are among them, are passed on
//! to ranks and end nothing: a rank that catches one writes a dump or a checkpoint and continues. A rank that
//! does not catch it would be killed by it, so the kernel is asked first (`/proc/PID/status`). Signals that
//! are ignored when the launcher starts, such as SIGHUP under `nohup`, stay ignored.

use rustix::process::Pid;
use signal_hook::consts::{SIGCHLD, SIGUSR1, SIGUSR2};

/// Passed on to ranks that handle them, unless they end the run.
const PASSED_ON: [i32; 2] = [SIGUSR1, SIGUSR2];
/// Ranks that are named individually.
const NAMED_MAX: usize = 16;

/// The signals that the launcher handles; `ending` are the signals that end the run.
pub(super) fn heard(ending: &[i32]) -> Vec<i32> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default(); // without it nothing is known to be ignored
    heard_by(&status, ending)
}

fn heard_by(status: &str, ending: &[i32]) -> Vec<i32> {
    let passed_on = PASSED_ON.into_iter().filter(|signal| !ending.contains(signal));
    let asked_for = ending.iter().copied().chain(passed_on);
    asked_for.filter(|&signal| !is_in(status, "SigIgn:", signal)).chain([SIGCHLD]).collect()
}

/// Whether it survives this signal: whether it catches or ignores it.
pub(super) fn is_expected(process: Pid, signal: i32) -> bool {
    let path = format!("/proc/{}/status", process.as_raw_pid());
    let status = std::fs::read_to_string(path).unwrap_or_default(); // it has exited
    ["SigCgt:", "SigIgn:"].iter().any(|set| is_in(&status, set, signal))
}

/// Is a signal in one of the sets of `/proc/PID/status`? The lowest bit is signal 1.
fn is_in(status: &str, set: &str, signal: i32) -> bool {
    let mask = status.lines().find_map(|line| line.strip_prefix(set));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    mask >> (signal - 1) & 1 == 1
}

/// The line about a signal: the ranks that got it and those that do not handle it.
pub(super) fn note(name: &str, expecting: &[usize], others: &[usize]) -> String {
    let reason = if others.len() == 1 { "does" } else { "do" };
    let reason = format!("which {reason} not catch it and would be killed by it");
    match (expecting, others) {
        ([], []) => format!("{name}: no rank on this node to pass it on to"),
        (_, []) => format!("{name}: passed on to {}", show(expecting)),
        ([], _) => format!("{name}: not passed on to {}, {reason}", show(others)),
        _ => format!("{name}: passed on to {}; not to {}, {reason}", show(expecting), show(others)),
    }
}

fn show(ranks: &[usize]) -> String {
    let named: Vec<String> = ranks.iter().take(NAMED_MAX).map(usize::to_string).collect();
    let more = ranks.len() - named.len();
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!("rank{} {}{more}", if ranks.len() == 1 { "" } else { "s" }, named.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

    const STATUS: &str =
        "Name:\tsh\nSigBlk:\t0000000000000000\nSigIgn:\t0000000000001001\nSigCgt:\t0000000000000200\n";

    #[test]
    fn signals_that_are_ignored_at_the_start_stay_ignored() {
        assert_eq!(
            heard_by(STATUS, &[SIGTERM, SIGHUP, SIGINT]),
            [SIGTERM, SIGINT, SIGUSR1, SIGUSR2, SIGCHLD]
        );
        assert_eq!(heard_by("Name:\tsh\n", &[SIGHUP]), [SIGHUP, SIGUSR1, SIGUSR2, SIGCHLD]);
    }

    #[test]
    fn a_signal_that_ends_the_run_is_not_one_that_is_passed_on() {
        assert_eq!(heard_by(STATUS, &[SIGUSR2, SIGTERM]), [SIGUSR2, SIGTERM, SIGUSR1, SIGCHLD]);
    }

    #[test]
    fn the_kernel_reports_which_signals_a_process_catches() {
        assert!(is_in(STATUS, "SigCgt:", SIGUSR1) && !is_in(STATUS, "SigCgt:", SIGUSR2));
        assert!(is_in(STATUS, "SigIgn:", SIGHUP) && is_in(STATUS, "SigIgn:", 13));
        assert!(!is_in("SigCgt:\tnonsense\n", "SigCgt:", SIGUSR1) && !is_in("", "SigCgt:", SIGUSR1));
    }

    #[test]
    fn ranks_are_named_or_counted() {
        let lacks = "not catch it and would be killed by it";
        assert_eq!(note("SIGUSR1", &[], &[]), "SIGUSR1: no rank on this node to pass it on to");
        assert_eq!(note("SIGUSR1", &[3], &[]), "SIGUSR1: passed on to rank 3");
        assert_eq!(
            note("SIGUSR1", &[], &[0, 1]),
            format!("SIGUSR1: not passed on to ranks 0, 1, which do {lacks}")
        );
        let many: Vec<usize> = (0..20).collect();
        assert_eq!(
            note("SIGUSR2", &many, &[20]),
            format!(
                "SIGUSR2: passed on to ranks 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 and 4 more; not to rank 20, \
                 which does {lacks}"
            )
        );
    }
}
