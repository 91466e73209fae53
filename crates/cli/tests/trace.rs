//! `tenfold trace` on dumps of real jobs: PyTorch's recorder under Gloo and under its hook (`dumps/torch`,
//! made by an earlier version of tests/python/programs/trace_scenes.py), and ours (`dumps/ours`).

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, UNIX_EPOCH};

use tempfile::TempDir;

const TENFOLD: &str = env!("CARGO_BIN_EXE_tenfold");

/// A copy of recorded dumps. A file's time says when its dump was written; a checkout's says nothing, so it
/// is removed here.
fn copy(case: &str) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../trace/tests/dumps").join(case);
    for entry in fs::read_dir(source).unwrap() {
        let entry = entry.unwrap();
        let file = folder.path().join(entry.file_name());
        fs::copy(entry.path(), &file).unwrap();
        File::options()
            .append(true)
            .open(file)
            .unwrap()
            .set_modified(UNIX_EPOCH + Duration::from_secs(1))
            .unwrap();
    }
    folder
}

fn trace(arguments: &[&str], folder: &Path) -> Output {
    Command::new(TENFOLD).arg("trace").args(arguments).arg(folder).stdin(Stdio::null()).output().unwrap()
}

/// The report about a case, and the exit status.
fn told(case: &str) -> (String, i32) {
    let folder = copy(case);
    let output = trace(&[], folder.path());
    let complaints = String::from_utf8(output.stderr).unwrap();
    assert_eq!(complaints, "", "{case}");
    (String::from_utf8(output.stdout).unwrap(), output.status.code().unwrap())
}

#[test]
fn a_rank_that_sleeps_under_gloo() {
    let said = "✗ rank 1 has not entered all_reduce #5 of group default_pg\n    \
        ranks 0 and 2 have been waiting in it (timeout 60.0 s), called at programs/trace_scenes.py:51 in train_step\n    \
        rank 1's last call in this group was barrier #4\n    \
        rank 1 made that call at programs/trace_scenes.py:38 in warm_up ← programs/trace_scenes.py:120 in <module>\n\
        3 dumps (format 2.10), 1 group, 5 collectives\n";
    assert_eq!(told("torch/sleeps"), (said.into(), 1));
}

#[test]
fn a_rank_that_calls_another_collective_under_gloo() {
    let said = "✗ rank 1 called broadcast #5 of group default_pg where ranks 0 and 2 called all_reduce\n    \
        rank 1: broadcast, Float [4], called at programs/trace_scenes.py:62 in wrong_collective\n    \
        ranks 0 and 2: all_reduce, Float [4], called at programs/trace_scenes.py:51 in train_step\n\
        3 dumps (format 2.10), 1 group, 5 collectives\n";
    assert_eq!(told("torch/wrong-collective"), (said.into(), 1));
}

#[test]
fn a_rank_with_another_size_under_gloo_as_pickle_and_as_json() {
    let said = |site: &str| {
        format!(
            "✗ rank 1 called all_reduce #5 of group default_pg with other sizes than ranks 0 and 2\n    \
             rank 1: all_reduce, Float [5]{site}\n    \
             ranks 0 and 2: all_reduce, Float [4]{site}\n\
             3 dumps (format 2.10), 1 group, 5 collectives\n"
        )
    };
    assert_eq!(told("torch/wrong-size"), (said(", called at programs/trace_scenes.py:51 in train_step"), 1));
    assert_eq!(told("torch/wrong-size-json"), (said(""), 1));
}

#[test]
fn a_message_without_a_partner_under_pytorchs_hook() {
    let said = "✗ rank 0 receives from rank 1, which does not send (group default_pg)\n    \
        rank 0 entered it (timeout 30.0 min), called at programs/trace_scenes.py:103 in no_partner, Float [2]\n    \
        rank 1's last call in this group was barrier #4\n    \
        rank 1's last call of all was a receive from rank 0 of group default_pg\n    \
        rank 1 made that call at programs/trace_scenes.py:101 in no_partner ← programs/trace_scenes.py:151 in <module>\n\
        3 dumps (format 2.10), 1 group, 4 collectives, 3 message calls\n";
    assert_eq!(told("torch/no-partner"), (said.into(), 1));
}

#[test]
fn dumps_of_our_own_recorder() {
    let end = "\n4 dumps (format 2.10), 1 group, 7 collectives\n";
    let cases = [
        (
            "ours/mismatch",
            "✗ rank 2 called broadcast #7 of group default_pg where ranks 0, 1 and 3 called all_reduce\n    \
             rank 2: broadcast, Byte [8]\n    ranks 0, 1 and 3: all_reduce, Byte [8]",
        ),
        (
            "ours/missing",
            "✗ rank 3 has not entered all_reduce #7 of group default_pg\n    \
             ranks 0-2 entered it and failed (timeout 2.0 s)\n    \
             rank 3's last call in this group was barrier #6, which it completed",
        ),
        (
            "ours/size",
            "✗ rank 1 called all_reduce #7 of group default_pg with other sizes than ranks 0, 2 and 3\n    \
             rank 1: all_reduce, Byte [5]\n    ranks 0, 2 and 3: all_reduce, Byte [8]",
        ),
    ];
    for (case, said) in cases {
        assert_eq!(told(case), (format!("{said}{end}"), 1), "{case}");
    }
    let fine = "✓ no problem found: all ranks have reached barrier #7 of group default_pg\n\
        4 dumps (format 2.10), 3 groups, 9 collectives\n";
    assert_eq!(told("ours/clean"), (fine.into(), 0));
}

#[test]
fn every_cut_of_a_dump_is_refused_by_name_and_the_others_are_analysed() {
    let folder = copy("torch/sleeps");
    let file = folder.path().join("trace_2");
    let whole = fs::read(&file).unwrap();
    for length in (0..whole.len()).step_by(97) {
        fs::write(&file, &whole[..length]).unwrap();
        let output = trace(&[], folder.path());
        let (said, complaints) =
            (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
        assert!(complaints.starts_with(&format!("error: {}: ", file.display())), "{length}: {complaints}");
        assert!(!complaints.contains("panicked"), "{length}: {complaints}");
        assert!(
            said.contains("✗ rank 1 has not entered all_reduce #5 of group default_pg\n"),
            "{length}: {said}"
        );
        assert_eq!(output.status.code(), Some(1), "{length}");
    }
}

#[test]
fn files_that_are_not_dumps_are_counted_and_compressed_ones_named() {
    let folder = copy("ours/clean");
    for name in ["notes.md", "job.log"] {
        fs::write(folder.path().join(name), "groceries").unwrap();
    }
    let packed = folder.path().join("trace_7.gz");
    fs::write(&packed, b"\x1f\x8b\x08\x00").unwrap();
    let output = trace(&[], folder.path());
    let complaints = String::from_utf8(output.stderr).unwrap();
    assert_eq!(
        complaints,
        format!("error: {}: it is compressed\n  hint: `gunzip` it first\n", packed.display())
    );
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(said.ends_with("; 1 file not read; 2 files ignored (no rank in the name)\n"), "{said}");
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn a_file_that_cannot_be_written_is_reported_and_is_not_a_verdict() {
    let folder = copy("ours/clean");
    let output = trace(&["--html", "/nowhere/page.html"], folder.path());
    let complaints = String::from_utf8(output.stderr).unwrap();
    assert_eq!(
        complaints,
        "error: cannot write /nowhere/page.html: No such file or directory (os error 2)\n"
    );
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn a_verdict_that_cannot_be_written_is_not_a_success() {
    let folder = copy("torch/sleeps");
    for format in [&[][..], &["--json"]] {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let output = Command::new(TENFOLD)
            .arg("trace")
            .args(format)
            .arg(folder.path())
            .stdout(full)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
            .wait_with_output()
            .unwrap();
        let complaints = String::from_utf8(output.stderr).unwrap();
        assert_eq!(complaints, "error: cannot write the verdict: No space left on device (os error 28)\n");
        assert_eq!(output.status.code(), Some(2));
    }
}

#[test]
fn the_page_loads_nothing_external() {
    let folder = copy("torch/sleeps");
    let page = folder.path().join("page.html");
    trace(&["--html", page.to_str().unwrap()], folder.path());
    let page = fs::read_to_string(page).unwrap();
    assert!(page.starts_with("<!doctype html>") && page.contains("rank 1 has not entered all_reduce #5"));
    for outside in ["http:", "https:", "src=", "@import", "url("] {
        assert!(!page.contains(outside), "{outside}");
    }
}
