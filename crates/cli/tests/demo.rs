//! `tenfold demo` as a new user sees it: it learns, its replicas are identical, and however it ends, no
//! process is left behind.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod launching;
mod serving;

use std::io::{BufRead as _, BufReader, Read as _};
use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{ChildStdout, Command, Output, Stdio};

use launching::{ended, handle, pid, wait_until_gone};
use rustix::process::{Signal, kill_process};
use serving::{Process, TENFOLD};

fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(TENFOLD);
    command.arg("demo").args(arguments).stdin(Stdio::null());
    command
}

fn printed(output: &Output) -> &str {
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && error.is_empty(), "{}: {error}", output.status);
    std::str::from_utf8(&output.stdout).unwrap()
}

#[test]
fn it_learns_with_identical_replicas_on_any_number_of_workers() {
    for workers in [1, 2, 4] {
        let arguments = ["-n", &workers.to_string(), "--steps", "400", "--operations", "5", "--json"];
        let output = command(&arguments).output().unwrap();
        let report: serde_json::Value = serde_json::from_str(printed(&output)).unwrap();
        let training = &report["training"];
        let number = |name: &str| training[name].as_f64().unwrap();
        assert!(number("loss_first") > 0.8 && number("loss_last") < 0.1, "{training}");
        assert!(number("accuracy") > 0.97, "{training}");
        assert!(number("step_us") > 0.0 && (0.0..1.0).contains(&number("communication_share")), "{training}");
        assert_eq!(training["replicas_identical"], true);
        assert_eq!(training["loss"].as_array().unwrap().len(), 100);
        let reports = report["workers"].as_array().unwrap();
        assert_eq!(reports.len(), workers);
        for report in reports {
            assert_eq!(report["fingerprint"], training["fingerprint"]);
            assert_eq!(report["met"], workers);
        }
        assert!(report["server"]["operations"]["set"].as_u64().unwrap() > 100);
    }
}

#[test]
fn a_pipe_gets_lines_and_a_curve_and_no_control_characters() {
    let output = command(&["-n", "3", "--steps", "50", "--operations", "20"]).output().unwrap();
    let text = printed(&output);
    assert!(
        text.starts_with("3 worker processes train one network, each on its share of the points\npids "),
        "{text}"
    );
    assert!(!text.contains('\x1b') && !text.contains('\r'), "{text:?}");
    let steps: Vec<&str> = text
        .lines()
        .filter_map(|line| line.strip_prefix("step ")?.split(' ').find(|it| !it.is_empty()))
        .collect();
    assert_eq!(steps, ["1", "10", "20", "30", "40", "50"]);
    for expected in [
        "█",
        " in 50 steps\n",
        "% of 1500 points that were not used for training\n",
        "%) waiting for gradients of other workers\n",
        "replicas   bit-identical: 3 workers × 4547 parameters, ",
        "\nstore      set + check ",
        "\nall_reduce 8 B ",
    ] {
        assert!(text.contains(expected), "no `{expected}` in {text}");
    }
    assert!(text.lines().count() <= 24 + 7, "one screen, and the lines where a terminal has a bar: {text}");
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
}

#[test]
fn the_tour_has_tables() {
    let output =
        command(&["--workers", "2", "--steps", "5", "--operations", "20", "--tour"]).output().unwrap();
    let text = printed(&output);
    for expected in [
        "\noperation           median µs    all workers/s\nset + check ",
        "\nall_reduce       4.0 MiB ",
        "\nbarrier ",
    ] {
        assert!(text.contains(expected), "no `{expected}` in {text}");
    }
}

#[test]
fn a_terminal_gets_a_bar_and_colours_unless_disabled() {
    use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
    for (no_color, has_colours) in [("", true), ("1", false)] {
        let controller = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&controller).unwrap();
        unlockpt(&controller).unwrap();
        let name = ptsname(&controller, Vec::new()).unwrap();
        let flags = rustix::fs::OFlags::RDWR | rustix::fs::OFlags::NOCTTY;
        let terminal = rustix::fs::open(name, flags, rustix::fs::Mode::empty()).unwrap();
        let size = rustix::termios::Winsize { ws_row: 24, ws_col: 60, ws_xpixel: 0, ws_ypixel: 0 };
        rustix::termios::tcsetwinsize(&terminal, size).unwrap();
        let mut command = command(&["-n", "2", "--steps", "20", "--operations", "5"]);
        command.env("TERM", "xterm").env("NO_COLOR", no_color).stdout(terminal);
        let mut demo = Process(command.spawn().unwrap());
        drop(command); // it holds the terminal
        let (mut controller, mut text) = (std::fs::File::from(controller), Vec::new());
        let _the_last_one_has_closed_it = controller.read_to_end(&mut text);
        assert!(demo.0.wait().unwrap().success());
        let text = String::from_utf8(text).unwrap();
        assert!(text.contains("step 20 of 20, loss ") && text.contains("\r\x1b[2K"), "{text:?}");
        assert_eq!(text.contains("\x1b[32m"), has_colours, "{text:?}");
        let curve: Vec<&str> = text.lines().filter(|line| line.contains('█')).collect();
        assert!(
            !curve.is_empty() && curve.iter().all(|line| line.trim_end().chars().count() <= 60),
            "{text}"
        );
    }
}

/// A demo in the middle of a training that takes longer than any test, with handles of its workers by rank.
struct Running {
    demo: Process,
    output: BufReader<ChildStdout>,
    workers: Vec<(String, OwnedFd)>,
}

fn running(workers: usize) -> Running {
    let mut command = command(&["-n", &workers.to_string(), "--steps", "1000000"]);
    let mut demo = Process(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap());
    let mut output = BufReader::new(demo.0.stdout.take().unwrap());
    let mut line = String::new();
    while !line.starts_with("step ") {
        line.clear();
        assert!(output.read_line(&mut line).unwrap() > 0, "it trains");
    }
    let id = demo.0.id();
    let children = std::fs::read_to_string(format!("/proc/{id}/task/{id}/children")).unwrap();
    let rank = |process: &str| {
        let words = std::fs::read_to_string(format!("/proc/{process}/cmdline")).unwrap();
        let (_, rest) = words.split_once("--rank\0").unwrap();
        rest.split('\0').next().unwrap().parse::<usize>().unwrap()
    };
    let mut children: Vec<&str> = children.split_whitespace().collect();
    children.sort_by_key(|process| rank(process));
    let workers: Vec<_> = children.iter().map(|process| (process.to_string(), handle(process))).collect();
    Running { demo, output, workers }
}

#[test]
fn a_worker_that_is_killed_is_named_and_no_process_is_left() {
    let Running { demo, output, workers } = running(3);
    assert_eq!(workers.len(), 3);
    let process = &workers[1].0;
    kill_process(pid(process), Signal::KILL).unwrap();
    let (text, status) = ended(demo);
    assert_eq!(status.code(), Some(1), "{text}");
    let named = format!("error: worker 1 (pid {process}) ended with signal: 9 (SIGKILL) after step ");
    assert!(text.starts_with(&named), "{text}");
    // A worker that waited for it reports that, with the library's message.
    let (_, said) = text.split_once(" of 1000000\n  worker ").unwrap_or_else(|| panic!("no witness: {text}"));
    assert!(said.contains(" reports: ") && said.contains(": rank 1 (") && said.contains(process), "{text}");
    assert_eq!(text.matches("error: ").count(), 1, "{text}");
    workers.iter().for_each(|(_, worker)| wait_until_gone(worker));
    drop(output);
}

#[test]
fn a_demo_that_is_interrupted_or_killed_leaves_no_process() {
    for signal in [Signal::INT, Signal::TERM, Signal::KILL] {
        let Running { mut demo, output, workers } = running(2);
        demo.signal(signal);
        assert_eq!(demo.0.wait().unwrap().signal(), Some(signal.as_raw()));
        workers.iter().for_each(|(_, worker)| wait_until_gone(worker));
        drop(output);
    }
}

#[test]
fn a_closed_reader_ends_it_quietly() {
    let mut command = command(&["-n", "2", "--steps", "200", "--operations", "5"]);
    let mut demo = Process(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap());
    let mut line = String::new();
    BufReader::new(demo.0.stdout.take().unwrap()).read_line(&mut line).unwrap(); // as `head -1` does
    assert!(line.starts_with("2 worker processes "), "{line}");
    let (text, status) = ended(demo);
    assert_eq!((text.as_str(), status.code()), ("", Some(0)));
}
