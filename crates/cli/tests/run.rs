//! `tenfold run` with real processes: what ranks are given, what people see, how it ends, and that nobody is left.

#![cfg(target_os = "linux")]
#![expect(
    clippy::disallowed_methods,
    clippy::unwrap_used,
    reason = "tests: helpers that may fail, and read the clock"
)]

mod serving;

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Read as _};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};
use serving::{Process, TENFOLD};

/// Nothing in these tests takes this long unless it hangs.
const HANG: Duration = Duration::from_secs(40);

/// `tenfold run` with what one would type behind it; the last word is a script for `sh`.
fn command(words: &[&str]) -> Command {
    let (script, options) = words.split_last().unwrap();
    let mut command = Command::new(TENFOLD);
    command.arg("run").args(options).args(["sh", "-c", script]).stdin(Stdio::null());
    for name in ["OMP_NUM_THREADS", "PYTHONUNBUFFERED", "TORCH_NCCL_ASYNC_ERROR_HANDLING"] {
        command.env_remove(name);
    }
    command
}

/// Standard output, standard error and exit code of a run that ends by itself.
fn finished(words: &[&str]) -> (String, String, Option<i32>) {
    let output = command(words).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (text(output.stdout), text(output.stderr), output.status.code())
}

/// A message without what differs from run to run: `after 0.1 s (pid 7)`.
fn without_numbers(text: &str) -> String {
    let Some((before, rest)) = text.split_once(" after ") else { return text.into() };
    let (_, rest) = rest.split_once(" s (pid ").unwrap();
    let (_, rest) = rest.split_once(')').unwrap();
    format!("{before}{rest}")
}

/// A run whose standard output the test reads line by line.
struct Run {
    launcher: Process,
    output: BufReader<std::process::ChildStdout>,
}

impl Run {
    fn start(words: &[&str]) -> Run {
        Run::spawn(&mut command(words))
    }

    fn spawn(command: &mut Command) -> Run {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Run { launcher: Process(child), output }
    }

    /// The next line of each rank, by rank.
    fn lines(&mut self, ranks: usize) -> Vec<String> {
        let lines = (0..ranks).map(|_| {
            let mut line = String::new();
            self.output.read_line(&mut line).unwrap();
            let (rank, text) = line.trim_end().strip_prefix('[').unwrap().split_once("] ").unwrap();
            (rank.parse::<usize>().unwrap(), text.to_string())
        });
        let by_rank: BTreeMap<usize, String> = lines.collect();
        assert_eq!(by_rank.len(), ranks, "one line of each");
        by_rank.into_values().collect()
    }

    /// The next line, of whichever rank.
    fn any_line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.trim_end().split_once("] ").unwrap().1.to_string()
    }

    fn ended(self) -> (String, ExitStatus) {
        ended(self.launcher)
    }
}

/// Waits for a launcher's end; standard error and how it ended.
fn ended(mut launcher: Process) -> (String, ExitStatus) {
    wait_until_gone(&handle(&launcher.0.id().to_string()));
    let mut text = String::new();
    launcher.0.stderr.take().unwrap().read_to_string(&mut text).unwrap();
    (text, launcher.0.wait().unwrap())
}

/// Of a process by its number, which stays the same process's as long as it is held.
fn handle(process: &str) -> OwnedFd {
    pidfd_open(pid(process), PidfdFlags::empty()).unwrap()
}

fn pid(process: &str) -> Pid {
    Pid::from_raw(process.parse().unwrap()).unwrap()
}

fn wait_until_gone(handle: &OwnedFd) {
    let limit = Timespec { tv_sec: HANG.as_secs() as i64, tv_nsec: 0 };
    let ended = poll(&mut [PollFd::new(handle, PollFlags::IN)], Some(&limit)).unwrap();
    assert_eq!(ended, 1, "it does not end");
}

fn make_fifo(folder: &Path) -> String {
    let path = folder.join("fifo");
    assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
    path.to_str().unwrap().to_string()
}

#[test]
fn every_rank_finds_the_environment_that_torchrun_sets() {
    let (output, _, code) = finished(&["-n", "3", "env"]);
    assert_eq!(code, Some(0));
    let find = |rank: usize, name: &str| {
        let beginning = format!("[{rank}] {name}=");
        let mut found = output.lines().filter_map(|line| line.strip_prefix(&beginning));
        let value = found.next().unwrap_or_else(|| panic!("no {beginning} in {output}"));
        assert_eq!(found.next(), None);
        value.to_string()
    };
    for rank in 0..3 {
        let own = rank.to_string();
        for (name, expected) in [
            ("RANK", own.as_str()),
            ("LOCAL_RANK", &own),
            ("ROLE_RANK", &own),
            ("WORLD_SIZE", "3"),
            ("LOCAL_WORLD_SIZE", "3"),
            ("ROLE_WORLD_SIZE", "3"),
            ("ROLE_NAME", "default"),
            ("GROUP_RANK", "0"),
            ("GROUP_WORLD_SIZE", "1"),
            ("MASTER_ADDR", "127.0.0.1"),
            ("TORCHELASTIC_USE_AGENT_STORE", "True"),
            ("TORCHELASTIC_RESTART_COUNT", "0"),
            ("TORCHELASTIC_MAX_RESTARTS", "0"),
            ("OMP_NUM_THREADS", "1"),
            ("PYTHONUNBUFFERED", "1"),
            ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        ] {
            assert_eq!(find(rank, name), expected, "{name}");
        }
        for name in ["MASTER_PORT", "TORCHELASTIC_RUN_ID"] {
            assert_eq!(find(rank, name), find(0, name));
        }
    }
}

#[test]
fn the_store_is_there_for_all_and_outlives_rank_0() {
    let script = format!(
        r#"store() {{ {TENFOLD} store $MASTER_ADDR:$MASTER_PORT "$@"; }}
        if [ $RANK = 0 ]; then store set pid $$; exit; fi
        pid=$(store get pid)
        until grep -q 'State:.Z' /proc/$pid/status; do :; done # it has ended
        store set after-rank-0 yes && store get after-rank-0"#
    );
    let (output, error, code) = finished(&["--nproc_per_node", "2", &script]);
    assert_eq!((output.as_str(), code), ("[1] yes\n", Some(0)), "{error}");
}

#[test]
fn torchruns_spellings_and_arguments_with_hyphens_are_understood() {
    let words = ["run", "--nproc-per-node=2", "--", "echo", "-n", "7", "--", "--python", "x"];
    let output = Command::new(TENFOLD).args(words).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let mut lines: Vec<&str> = text.lines().collect();
    lines.sort_unstable();
    assert_eq!(lines, ["[0] 7 -- --python x", "[1] 7 -- --python x"]);
}

#[test]
fn the_exit_code_is_that_of_the_rank_that_failed_first() {
    assert_eq!(finished(&["-n", "2", "exit 0"]), (String::new(), String::new(), Some(0)));
    let (_, error, code) = finished(&["exit 5"]);
    assert_eq!((without_numbers(&error).as_str(), code), ("error: the rank failed: exit code 5\n", Some(5)));
    let (_, error, code) = finished(&["kill -SEGV $$"]);
    assert_eq!(
        (without_numbers(&error).as_str(), code),
        ("error: the rank failed: killed by SIGSEGV\n", Some(139))
    );
}

#[test]
fn a_rank_that_fails_ends_the_others_and_is_named_with_its_last_lines() {
    let script = "if [ $RANK = 1 ]; then echo about to fail; echo why >&2; exit 3; fi; exec sleep 1000";
    let (output, error, code) = finished(&["-n", "3", script]);
    assert_eq!((output.as_str(), code), ("[1] about to fail\n", Some(3)));
    let (said, report) = error.split_once("error: ").unwrap();
    for line in ["[1] why\n", "tenfold: rank 1 failed (exit code 3): the others are asked to end\n"] {
        assert!(said.contains(line), "{error}");
    }
    let mut lines: Vec<String> = without_numbers(report).lines().map(str::to_string).collect();
    lines[1..].sort(); // two streams: the order in which they are read is not known
    assert_eq!(lines, ["rank 1 of 3 failed first: exit code 3", "  | about to fail", "  | why"]);
}

#[test]
fn a_rank_that_is_killed_is_named_with_the_signal() {
    let mut run = Run::start(&["-n", "2", "echo $$; exec sleep 1000"]);
    let pids = run.lines(2);
    let other = handle(&pids[0]);
    kill_process(pid(&pids[1]), Signal::KILL).unwrap();
    let (error, status) = run.ended();
    assert_eq!(status.code(), Some(137));
    assert!(error.contains("error: rank 1 of 2 failed first: killed by SIGKILL after "), "{error}");
    wait_until_gone(&other);
}

#[test]
fn a_rank_that_ignores_sigterm_is_killed_when_its_time_is_up() {
    let folder = tempfile::tempdir().unwrap();
    let fifo = make_fifo(folder.path());
    let script = format!(
        "if [ $RANK = 1 ]; then read ready < {fifo}; exit 3; fi
        trap '' TERM; echo ready > {fifo}; exec sleep 1000"
    );
    let (_, error, code) = finished(&["-n", "2", "--shutdown-timeout", "100ms", &script]);
    assert_eq!(code, Some(3));
    let (_, report) = error.split_once("error: ").unwrap();
    assert_eq!(
        without_numbers(report),
        "rank 1 of 2 failed first: exit code 3\n  rank 0 did not end when asked, and was killed\n"
    );
}

#[test]
fn a_signal_is_passed_on_once_and_told_by_the_exit_code() {
    for (signal, name, code) in [(Signal::TERM, "TERM", 143), (Signal::INT, "INT", 130)] {
        let script =
            format!("trap 'echo asked; exit 0' {name}; echo ready; while :; do sleep 1000 & wait; done");
        let mut run = Run::start(&["-n", "2", &script]);
        assert_eq!(run.lines(2), ["ready", "ready"]);
        run.launcher.signal(signal);
        let mut rest = String::new();
        run.output.read_to_string(&mut rest).unwrap();
        let mut lines: Vec<&str> = rest.lines().collect();
        lines.sort_unstable();
        assert_eq!(lines, ["[0] asked", "[1] asked"]);
        let (error, status) = run.ended();
        assert_eq!(status.code(), Some(code));
        assert!(error.ends_with(&format!("error: ended by SIG{name}\n")), "{error}");
    }
}

#[test]
fn a_second_signal_kills_at_once() {
    let mut run =
        Run::start(&["-n", "2", "--shutdown-timeout", "1h", "trap '' TERM; echo ready; exec sleep 1000"]);
    assert_eq!(run.lines(2), ["ready", "ready"]);
    run.launcher.signal(Signal::TERM);
    let mut error = BufReader::new(run.launcher.0.stderr.take().unwrap());
    let mut note = String::new();
    error.read_line(&mut note).unwrap();
    assert_eq!(note, "tenfold: SIGTERM: passed on to all ranks, which have 3600 s\n");
    run.launcher.signal(Signal::TERM);
    let mut rest = String::new();
    error.read_to_string(&mut rest).unwrap();
    assert_eq!(rest, "error: ended by SIGTERM\n  ranks 0, 1 did not end when asked, and were killed\n");
    assert_eq!(run.launcher.0.wait().unwrap().code(), Some(143));
}

#[test]
fn a_launcher_under_nohup_does_not_mind_a_closed_terminal() {
    let folder = tempfile::tempdir().unwrap();
    let go = make_fifo(folder.path());
    let script = format!("trap '' HUP; exec {TENFOLD} run sh -c 'echo ready; read word < {go}'");
    let mut run = Run::spawn(Command::new("sh").args(["-c", &script]));
    let mut line = String::new();
    run.output.read_line(&mut line).unwrap();
    assert_eq!(line, "ready\n");
    run.launcher.signal(Signal::HUP);
    std::fs::write(&go, "go\n").unwrap(); // a rank that ends now is noticed after the signal
    let (error, status) = run.ended();
    assert_eq!((error.as_str(), status.code()), ("", Some(0)));
}

#[test]
fn a_launcher_that_is_killed_leaves_no_rank() {
    let mut run = Run::start(&["-n", "3", "trap '' TERM HUP INT; echo $$; exec sleep 1000"]);
    let ranks: Vec<OwnedFd> = run.lines(3).iter().map(|process| handle(process)).collect();
    run.launcher.signal(Signal::KILL);
    ranks.iter().for_each(wait_until_gone);
}

#[test]
fn what_a_rank_left_behind_ends_with_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let go = make_fifo(folder.path());
    let script = format!(
        "sleep 1000 & echo $!; sh -c 'trap \"\" TERM; echo $$; exec sleep 1000' &
        if [ $RANK = 0 ]; then read word < {go}; fi"
    );
    let mut run = Run::start(&["-n", "2", &script]);
    let left: Vec<OwnedFd> = (0..4).map(|_| handle(&run.any_line())).collect();
    std::fs::write(&go, "go\n").unwrap();
    let (error, status) = run.ended();
    assert_eq!((error.as_str(), status.code()), ("", Some(0)));
    left.iter().for_each(wait_until_gone);
}

#[test]
fn what_cannot_be_run_is_told_before_anything_starts() {
    let says = |words: &[&str]| {
        let output = Command::new(TENFOLD).arg("run").args(words).output().unwrap();
        (String::from_utf8(output.stderr).unwrap(), output.status.code())
    };
    assert_eq!(
        says(&["-n", "2", "./no-such-program"]),
        ("error: there is no program `./no-such-program`\n".into(), Some(127))
    );
    assert_eq!(
        says(&["-n", "2", "no-such-file.py"]),
        ("error: there is no file `no-such-file.py`\n".into(), Some(127))
    );
    let (error, code) = says(&["--nproc-per-nod", "2", "true"]);
    assert!(error.contains("a similar argument exists: '--nproc-per-node'"), "{error}");
    assert_eq!(code, Some(2));
    let output = Command::new(TENFOLD).args(["run", "/proc/version"]).output().unwrap();
    assert_eq!(output.status.code(), Some(126));
}

#[test]
fn lines_of_ranks_are_never_torn() {
    const LINES: usize = 300;
    // Two writes for each line, on both streams, into one pipe; some lines are longer than a pipe takes at once.
    let script = format!(
        "pad=$(printf '%05000d' 0); i=0
        while [ $i -lt {LINES} ]; do
            printf 'rank %s ' $RANK; printf 'line %s %s\\n' $i $([ $((i % 10)) = 0 ] && echo $pad)
            printf 'rank %s ' $RANK >&2; printf 'error %s\\n' $i >&2
            i=$((i + 1))
        done"
    );
    let joined = format!("exec {TENFOLD} run -n 4 sh -c \"$0\" 2>&1");
    let output = Command::new("sh").args(["-c", &joined, &script]).output().unwrap();
    assert!(output.status.success());
    let output = String::from_utf8(output.stdout).unwrap();
    let pad = "0".repeat(5000);
    for rank in 0..4 {
        let of = |what: &str| {
            let beginning = format!("[{rank}] rank {rank} {what} ");
            let lines = output.lines().filter_map(|line| line.strip_prefix(&beginning));
            lines.map(str::to_string).collect::<Vec<_>>()
        };
        let expected =
            |line: usize| if line.is_multiple_of(10) { format!("{line} {pad}") } else { format!("{line} ") };
        assert!(of("line") == (0..LINES).map(expected).collect::<Vec<_>>());
        assert_eq!(of("error"), (0..LINES).map(|line| line.to_string()).collect::<Vec<_>>());
    }
    assert_eq!(output.lines().count(), 4 * 2 * LINES);
}

#[test]
fn a_rank_that_is_alone_writes_what_it_writes() {
    let (output, error, code) = finished(&["printf '10 %%\\r20 %%'; printf oops >&2"]);
    assert_eq!((output.as_str(), error.as_str(), code), ("10 %\r20 %", "oops", Some(0)));
}

#[test]
fn a_last_line_without_end_gets_one() {
    let (output, _, code) = finished(&["-n", "2", "[ $RANK = 1 ] || printf unfinished"]);
    assert_eq!((output.as_str(), code), ("[0] unfinished\n", Some(0)));
}

#[test]
fn ranks_whose_output_nobody_reads_can_still_be_stopped() {
    let mut run = Run::start(&["-n", "2", "echo $$; exec yes"]);
    let mut ranks = Vec::new();
    while ranks.len() < 2 {
        let line = run.any_line();
        ranks.extend((line != "y").then(|| handle(&line)));
    }
    // From here on nobody reads: the launcher waits for us once the pipe takes no more.
    let (start, mut held, mut looks_alike) = (Instant::now(), 0, 0);
    while looks_alike < 50 {
        assert!(start.elapsed() < HANG, "the pipe does not fill");
        std::thread::park_timeout(Duration::from_millis(1));
        let now = rustix::io::ioctl_fionread(run.output.get_ref()).unwrap();
        looks_alike = if now == held && now > 0 { looks_alike + 1 } else { 0 };
        held = now;
    }
    run.launcher.signal(Signal::TERM);
    ranks.iter().for_each(wait_until_gone);
    run.launcher.signal(Signal::TERM); // what was not shown by now is not worth waiting for
    let (_, status) = run.ended();
    assert_eq!(status.code(), Some(143));
}

#[test]
fn ranks_go_on_when_nobody_reads_what_they_write() {
    let script = "i=0; while [ $i -lt 2000 ]; do echo $i; i=$((i + 1)); done";
    let mut run = Run::start(&["-n", "2", script]);
    run.any_line();
    let Run { launcher, output } = run;
    drop(output);
    let (error, status) = ended(launcher);
    assert_eq!(status.code(), Some(0));
    let note =
        "tenfold: cannot write to standard output: Broken pipe (os error 32); what ranks say there is lost\n";
    assert!(error.is_empty() || error == note, "{error}"); // all may have been written by then
}
