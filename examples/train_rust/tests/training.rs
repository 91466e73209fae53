//! The example under the real launcher: it learns, on any number of ranks alike, and all replicas stay bit-identical.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

const TRAIN: &str = env!("CARGO_BIN_EXE_train_rust");

/// The command `tenfold`: the one asked for, or the one that `cargo build` made in this repository.
fn tenfold() -> PathBuf {
    if let Some(path) = std::env::var_os("TENFOLD_BINARY") {
        return path.into();
    }
    let built = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../target/debug/tenfold"));
    assert!(built.exists(), "no launcher: `cargo build` makes {}, or set TENFOLD_BINARY", built.display());
    built
}

fn train(ranks: usize, options: &[&str]) -> Output {
    let mut command = Command::new(tenfold());
    command.args(["run", "-n", &ranks.to_string(), TRAIN]).args(options).stdin(Stdio::null());
    command.output().unwrap()
}

struct Epoch {
    loss: f32,
    accuracy: f32,
}

/// What each epoch told, and the last line.
fn trained(ranks: usize, options: &[&str]) -> (Vec<Epoch>, String) {
    let output = train(ranks, options);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{}{text}", String::from_utf8_lossy(&output.stderr));
    // The launcher says whose line it is where there is more than one rank.
    let mut lines: Vec<&str> = text.lines().map(|line| line.strip_prefix("[0] ").unwrap_or(line)).collect();
    let last = lines.pop().expect("it says something").to_string();
    let number = |line: &str, name: &str| -> f32 {
        let (_, rest) = line.split_once(name).expect("every epoch tells it");
        rest.split_whitespace().next().unwrap().parse().unwrap()
    };
    let epoch = |line: &&str| Epoch { loss: number(line, "loss"), accuracy: number(line, "accuracy") };
    (lines.iter().map(epoch).collect(), last)
}

#[test]
fn four_ranks_learn_as_well_as_one_and_end_with_the_same_bits() {
    let mut losses = Vec::new();
    for ranks in [1, 4] {
        let (epochs, last) = trained(ranks, &[]);
        assert_eq!(epochs.len(), 20);
        let (first, end) = (&epochs[0], &epochs[19]);
        assert!(first.loss > 0.7 && end.loss < 0.05, "{ranks} ranks: {} → {}", first.loss, end.loss);
        assert!(end.accuracy > 97.0, "{ranks} ranks: {} %", end.accuracy);
        assert!(
            last.starts_with(&format!("replicas bit-identical: {ranks} of {ranks}, fingerprint ")),
            "{last}"
        );
        losses.push(end.loss);
    }
    assert!((losses[0] - losses[1]).abs() < 0.03, "{losses:?}");
}

#[test]
fn any_number_of_ranks_can_share_a_batch_and_too_many_are_told() {
    for (ranks, batch) in [(3, "48"), (3, "50"), (2, "1")] {
        let (epochs, last) = trained(ranks, &["--epochs", "1", "--batch", batch]);
        assert_eq!(epochs.len(), 1);
        assert!(last.starts_with("replicas bit-identical: "), "{last}");
    }
    let output = train(2, &["--batch", "100000"]);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success());
    assert!(text.contains("error: 960 points are too few for 2 ranks with 50000 each"), "{text}");
}

#[test]
fn without_a_launcher_it_says_how_to_start_it() {
    let mut command = Command::new(TRAIN);
    for name in ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"] {
        command.env_remove(name);
    }
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(
        String::from_utf8(output.stderr).unwrap(),
        "error: connect in group `default` failed: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT are not set in the environment\n  \
         hint: start it with `tenfold run -n 2 …`, which sets them\n"
    );
    let help = Command::new(TRAIN).arg("--help").output().unwrap();
    assert!(String::from_utf8(help.stdout).unwrap().contains("Examples:\n  tenfold run -n 4 "));
}
