//! The flight recorder and what goes with it, from outside: what a failed group leaves and says, what `tracing` sees, what is counted.
//!
//! Settings are read once in a process, so tests that need their own run this program again, as `in_a_process_of_its_own`.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io;
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tempfile::TempDir;
use tenfold::{Buffer, Group, ReduceOp, metrics, recorder};
use tracing_subscriber::fmt::MakeWriter;

/// The lines that a subscriber received.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    /// From now on for the whole process.
    fn install(level: tracing_subscriber::filter::LevelFilter) -> Log {
        let log = Log::default();
        let writer = log.clone();
        tracing_subscriber::fmt()
            .with_max_level(level)
            .without_time()
            .with_ansi(false)
            .with_writer(writer)
            .init();
        log
    }

    fn lines(&self) -> Vec<String> {
        String::from_utf8(self.0.lock().unwrap().clone())
            .unwrap()
            .lines()
            .map(|line| line.trim().to_string())
            .collect()
    }
}

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Log {
    type Writer = Log;

    fn make_writer(&'a self) -> Log {
        self.clone()
    }
}

/// Runs the test `name` of this program in another process, with these variables; what it printed after an `@`.
fn again(name: &str, variables: &[(&str, &str)]) -> String {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture"])
        .env(AGAIN, name)
        .envs(variables.iter().copied())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{said}\n{}", String::from_utf8_lossy(&output.stderr));
    said.lines().filter_map(|line| line.split_once("@ ")).map(|(_, told)| format!("{told}\n")).collect()
}

const AGAIN: &str = "TENFOLD_TEST_AGAIN";

fn is_again(name: &str) -> bool {
    std::env::var(AGAIN).is_ok_and(|again| again == name)
}

fn prefix(folder: &TempDir) -> String {
    folder.path().join("trace_").display().to_string()
}

/// Two ranks as threads, of which the second has nothing to say: both fail.
fn hang() -> Vec<String> {
    Group::threads(2, |group| {
        let mut tensor = Buffer::from_slice(&[1.0_f32, 2.0]);
        group.start_all_reduce(tensor.lend(), ReduceOp::Sum)?.wait()?;
        if group.rank() == 0 {
            let patient = group.with_timeout(Duration::from_millis(50));
            let error = patient.start_all_reduce(tensor.lend(), ReduceOp::Sum)?.wait().unwrap_err();
            return Ok(error.to_string());
        }
        while group.failure().is_none() {
            std::thread::yield_now(); // word of it is on its way
        }
        Ok(group.failure().unwrap().to_string())
    })
    .unwrap()
}

#[test]
fn a_dump_tells_when_a_group_failed_and_why_and_because_of_whom() {
    const NAME: &str = "a_dump_tells_when_a_group_failed_and_why_and_because_of_whom";
    if is_again(NAME) {
        hang();
        println!("@ {}", recorder::dump_json(&recorder::DumpOptions::default()));
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let said = again(NAME, &[("TORCH_FR_DUMP_TEMP_FILE", &prefix(&folder))]);
    let dump: serde_json::Value = serde_json::from_str(&said).unwrap();
    for status in dump["pg_status"].as_object().unwrap().values() {
        let failed = status["failed_at_ns"].as_u64().unwrap();
        assert!(failed <= dump["time_dumped_ns"].as_u64().unwrap(), "{status}");
        assert!(status["failure"].as_str().unwrap().starts_with("rank 1 (host "), "{status}");
        assert_eq!(status["failure_rank"], 1);
    }
}

#[test]
fn a_subscriber_sees_operations_with_the_fields_that_are_documented() {
    const NAME: &str = "a_subscriber_sees_operations_with_the_fields_that_are_documented";
    if is_again(NAME) {
        let log = Log::install(tracing_subscriber::filter::LevelFilter::DEBUG);
        hang();
        let operations = log.lines().into_iter().filter(|line| line.contains("tenfold::operation"));
        operations.for_each(|line| println!("@ {line}"));
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let said = again(NAME, &[("TORCH_FR_DUMP_TEMP_FILE", &prefix(&folder))]);
    let first =
        |rank: u32| format!("operation{{group=\"default\" rank={rank} op=\"all_reduce\" bytes=8 seq=1}}");
    let ended = |rank| {
        said.lines().any(|line| line.contains(&first(rank)) && line.contains("tenfold::operation: done"))
    };
    assert!(ended(0) && ended(1), "{said}");
    let failed = "operation{group=\"default\" rank=0 op=\"all_reduce\" bytes=8 seq=2}";
    let failure = said.lines().find(|line| line.contains(failed)).expect(&said);
    assert!(
        failure.contains("failed seconds=") && failure.contains("error=all_reduce #2 in group"),
        "{failure}"
    );
}

#[test]
fn a_failed_group_says_once_where_its_dumps_are_and_how_to_read_them() {
    const NAME: &str = "a_failed_group_says_once_where_its_dumps_are_and_how_to_read_them";
    if is_again(NAME) {
        let log = Log::install(tracing_subscriber::filter::LevelFilter::WARN);
        hang();
        hang();
        recorder::wait_until_written();
        log.lines().iter().for_each(|line| println!("@ {line}"));
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let prefix = prefix(&folder);
    let said = again(NAME, &[("TORCH_FR_DUMP_TEMP_FILE", &prefix)]);
    for rank in 0..2 {
        assert!(folder.path().join(format!("trace_{rank}")).exists());
        let told = format!(
            "the last operations of rank {rank} are in {prefix}{rank}; `tenfold trace {prefix}*` compares those of all ranks"
        );
        assert_eq!(said.matches(&told).count(), 1, "{said}");
    }
}

#[test]
fn a_dump_that_cannot_be_written_is_a_warning_and_the_error_is_the_same() {
    const NAME: &str = "a_dump_that_cannot_be_written_is_a_warning_and_the_error_is_the_same";
    if is_again(NAME) {
        let log = Log::install(tracing_subscriber::filter::LevelFilter::WARN);
        let errors = hang();
        recorder::wait_until_written();
        errors.iter().chain(&log.lines()).for_each(|line| println!("@ {line}"));
        return;
    }
    let file = tempfile::NamedTempFile::new().unwrap();
    let nowhere = format!("{}/trace_", file.path().display());
    let said = again(NAME, &[("TORCH_FR_DUMP_TEMP_FILE", &nowhere)]);
    assert!(said.starts_with("all_reduce #2 in group `default` failed on rank 0 of 2: rank 1 "), "{said}");
    for rank in 0..2 {
        let told = format!("no dump of the flight recorder: cannot write {nowhere}{rank}: ");
        assert_eq!(said.matches(&told).count(), 1, "{said}");
    }
}

#[test]
fn operations_are_counted_also_if_none_is_recorded() {
    const NAME: &str = "operations_are_counted_also_if_none_is_recorded";
    if is_again(NAME) {
        hang();
        assert!(!recorder::is_on() && recorder::entries().is_empty());
        let mut all = metrics::snapshot();
        all.sort_by_key(|one| one.rank);
        for one in all {
            let took_time = one.duration > Duration::ZERO;
            println!("@ rank {}: {} {} {} {took_time}", one.rank, one.count, one.failed, one.bytes);
        }
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let said = again(NAME, &[("TORCH_FR_BUFFER_SIZE", "0"), ("TORCH_FR_DUMP_TEMP_FILE", &prefix(&folder))]);
    assert_eq!(said, "rank 0: 1 1 8 true\nrank 1: 1 0 8 true\n");
    assert_eq!(files(folder.path()), 0, "there is nothing to dump");
}

fn files(folder: &Path) -> usize {
    std::fs::read_dir(folder).unwrap().count()
}

/// A rank that got what it wanted from the root hears that the others do not agree, although it waits for nothing.
#[test]
fn a_rank_that_is_done_hears_that_the_others_disagree() {
    let failures = Group::threads(3, |group| {
        let mut tensor = Buffer::from_slice(&[1.0_f32]);
        let root = if group.rank() == 1 { 2 } else { 0 };
        let _may_be_over = group.start_broadcast(tensor.lend(), root)?.wait();
        while group.failure().is_none() {
            std::thread::yield_now(); // word of it is on its way
        }
        Ok(group.failure().unwrap().to_string())
    })
    .unwrap();
    for failure in failures {
        assert!(
            failure.contains("ranks 0, 2 called broadcast(float32 × 1, root 0); rank 1 called broadcast"),
            "{failure}"
        );
    }
}
