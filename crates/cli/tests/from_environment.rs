//! Rust programs that join their world by `Group::from_environment`: under `tenfold run`, and started one by one.
//!
//! The programs are this test executable, started with a role.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "tests: helpers that may fail")]

use std::process::{Command, Output, Stdio};
use std::time::Duration;

use tenfold::{Buffer, Group, Options, Place, ReduceOp};

const TENFOLD: &str = env!("CARGO_BIN_EXE_tenfold");

const JOB: &str = "FROM_ENVIRONMENT_JOB";

/// Nothing in these tests takes this long unless it hangs.
const HANG: Duration = Duration::from_secs(100);

fn main_of_a_rank(job: &str) -> tenfold::Result<()> {
    match job {
        "sum" => sum(),
        "dies in the first round" => {
            // Rank 1 has then joined once more than the others: its keys must not be taken for those of the
            // next round.
            if std::env::var("TORCHELASTIC_RESTART_COUNT").as_deref() == Ok("0") {
                while Place::from_environment()?.rank != 1 {
                    std::thread::park();
                }
                let alone = Group::from_environment(Options::default().timeout(Duration::from_secs(1)));
                println!("@ {}", alone.unwrap_err().kind() == tenfold::ErrorKind::Timeout);
                std::process::exit(7);
            }
            sum()
        }
        "twice" => sum().and_then(|()| sum()),
        other => panic!("no job `{other}`"),
    }
}

fn sum() -> tenfold::Result<()> {
    let group = Group::from_environment(Options::default().timeout(HANG))?;
    let mut tensor = Buffer::from_slice(&[group.rank() as u32 + 1]);
    group.start_all_reduce(tensor.lend(), ReduceOp::Sum)?.wait()?;
    let local = Place::from_environment()?.local_rank;
    println!("@ rank {} of {}, local {local:?}: {}", group.rank(), group.size(), tensor.as_slice::<u32>()[0]);
    Ok(())
}

#[test]
#[ignore = "a rank, started by the tests"]
fn rank_entry() {
    let Ok(job) = std::env::var(JOB) else {
        return println!("not a test, but where the ranks of the other tests begin");
    };
    if let Err(error) = main_of_a_rank(&job) {
        println!("@ {error}");
        std::process::exit(1);
    }
}

const ENTRY: [&str; 5] = ["--exact", "rank_entry", "--ignored", "--nocapture", "--test-threads=1"];

/// The sorted output of the ranks of a job under the launcher, and the launcher's exit code.
fn run(job: &str, options: &[&str]) -> (Vec<String>, Option<i32>) {
    let output = Command::new(TENFOLD)
        .arg("run")
        .args(options)
        .arg(std::env::current_exe().unwrap())
        .args(ENTRY)
        .env(JOB, job)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    (said(&output), output.status.code())
}

fn said(output: &Output) -> Vec<String> {
    let text = String::from_utf8(output.stdout.clone()).unwrap();
    let mut lines: Vec<String> = text
        .split_inclusive('\n')
        .filter_map(|line| Some(line.split_once("@ ")?.1.trim_end().to_string()))
        .collect();
    lines.sort();
    lines
}

fn sums_of_three() -> Vec<String> {
    (0..3).map(|rank| format!("rank {rank} of 3, local Some({rank}): 6")).collect()
}

#[test]
fn ranks_under_the_launcher_join_also_in_a_round_after_one_that_failed() {
    assert_eq!(run("sum", &["-n", "3"]), (sums_of_three(), Some(0)));
    let (mut restarted, code) = run("dies in the first round", &["-n", "3", "--max-restarts", "1"]);
    assert_eq!(
        restarted.pop().as_deref(),
        Some("true"),
        "rank 1 waited for the others without success: {restarted:?}"
    );
    assert_eq!((restarted, code), (sums_of_three(), Some(0)));
}

/// A rank that was started by hand, at an address that only this test uses.
fn by_hand(job: &str, variables: &[(&str, &str)]) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(ENTRY).env(JOB, job).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    for name in
        ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"]
    {
        command.env_remove(name);
    }
    command.envs(variables.iter().copied());
    command
}

#[test]
fn without_a_launchers_store_rank_0_hosts_one_until_all_ranks_have_joined() {
    // Ports below those that the system assigns, on loopback addresses that no other test uses.
    let [_, _, high, low] = std::process::id().to_be_bytes();
    let host = format!("127.81.{high}.{low}");
    let start = |rank: usize| {
        let rank = rank.to_string();
        let variables =
            [("RANK", &rank[..]), ("WORLD_SIZE", "3"), ("MASTER_ADDR", &host[..]), ("MASTER_PORT", "20081")];
        by_hand("twice", &variables).spawn().unwrap()
    };
    let ranks: Vec<_> = (0..3).map(start).collect();
    for (rank, child) in ranks.into_iter().enumerate() {
        let output = child.wait_with_output().unwrap();
        let expected = format!("rank {rank} of 3, local None: 6");
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(
            (said(&output), output.status.code()),
            (vec![expected.clone(), expected], Some(0)),
            "{errors}"
        );
    }
}

#[test]
fn a_program_without_a_launcher_gets_a_hint_how_to_start_it() {
    let output = by_hand("sum", &[("WORLD_SIZE", "2"), ("MASTER_ADDR", "")]).output().unwrap();
    assert_eq!(
        said(&output),
        ["connect in group `default` failed: RANK, MASTER_ADDR, MASTER_PORT are not set in the environment"]
    );
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("\n  hint: start it with `tenfold run -n 2 …`, which sets them\n"), "{text}");
}
