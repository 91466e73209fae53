//! Failures under `tenfold run`: each with its exit code, its message, and no process left.

#![cfg(target_os = "linux")]

mod launching;
mod serving;

use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::Command;

use launching::{Run, finished, handle, make_fifo, pid, wait_until, wait_until_gone, without_numbers};
use rustix::process::{Signal, kill_process};
use serving::{Serve, TENFOLD};

#[test]
fn a_rank_that_fails_ends_the_others_and_is_named_with_its_last_lines() {
    let script = "if [ $RANK = 1 ]; then echo about to fail; echo why >&2; exit 3; fi; exec sleep 1000";
    let (output, error, code) = finished(&["-n", "3", script]);
    assert_eq!((output.as_str(), code), ("[1] about to fail\n", Some(1)));
    let (said, report) = error.split_once("error: ").unwrap();
    for line in ["[1] why\n", "tenfold: rank 1 failed (exit code 3): stopping the others\n"] {
        assert!(said.contains(line), "{error}");
    }
    let mut lines: Vec<String> = without_numbers(report).lines().map(str::to_string).collect();
    lines[1..].sort(); // two streams, read in either order
    assert_eq!(lines, ["rank 1 of 3 failed first: exit code 3", "  | about to fail", "  | why"]);
}

#[test]
fn a_rank_that_is_killed_is_named_with_the_signal() {
    let mut run = Run::start(&["-n", "2", "echo $$; exec sleep 1000"]);
    let pids = run.lines(2);
    let other = handle(&pids[0]);
    kill_process(pid(&pids[1]), Signal::KILL).unwrap();
    let (error, status) = run.ended();
    assert_eq!(status.code(), Some(1));
    assert!(error.contains("error: rank 1 of 2 failed first: killed by SIGKILL after "), "{error}");
    wait_until_gone(&other);
}

#[test]
fn the_rank_that_was_killed_is_named_and_not_those_that_failed_because_of_it() {
    for _ in 0..12 {
        let folder = tempfile::tempdir().unwrap();
        for rank in 0..3 {
            let path = folder.path().join(rank.to_string());
            assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
        }
        // Each waits for the end of its pipe from rank 3, which it sees before the launcher notices rank 3's
        // exit.
        let script = "if [ $RANK = 3 ]; then exec 7> F/0 8> F/1 9> F/2; kill -KILL $$; fi
            read nothing < F/$RANK; exit 1";
        let script = script.replace("F/", &format!("{}/", folder.path().display()));
        let (_, error, code) = finished(&["-n", "4", &script]);
        assert_eq!(code, Some(1));
        assert!(error.contains("error: rank 3 of 4 failed first: killed by SIGKILL after "), "{error}");
        let mut notes = error.lines().filter(|line| line.starts_with("tenfold: rank "));
        assert!(
            notes.all(|note| note.starts_with("tenfold: rank 3 failed (killed by SIGKILL): ")),
            "{error}"
        );
    }
}

#[test]
fn a_rank_that_ignores_sigterm_is_killed_after_the_timeout() {
    let folder = tempfile::tempdir().unwrap();
    let fifo = make_fifo(folder.path());
    let script = format!(
        "if [ $RANK = 1 ]; then read ready < {fifo}; exit 3; fi
        trap '' TERM; echo ready > {fifo}; exec sleep 1000"
    );
    let (_, error, code) = finished(&["-n", "2", "--shutdown-timeout", "100ms", &script]);
    assert_eq!(code, Some(1));
    let (_, report) = error.split_once("error: ").unwrap();
    assert_eq!(
        without_numbers(report),
        "rank 1 of 2 failed first: exit code 3\n  rank 0 did not exit after SIGTERM and was killed\n"
    );
}

/// Rank 0 prints that it writes a dump, then that it saw the launcher notice rank 1's failure; the next line
/// is how it continues.
const DUMPING: &str = "if [ $RANK = 1 ]; then echo $$ > FOLDER/fifo; exit 3; fi
    marker=$TENFOLD_PROGRESS/1.dumping; touch $marker
    trap 'echo asked; exit 0' TERM; trap 'echo interrupted; exit 0' INT
    read failed < FOLDER/fifo
    while kill -0 $failed 2> /dev/null; do :; done # until it is reaped
    echo dumping; until [ -e FOLDER/go ]; do :; done
    echo dumped; rm $marker
    while :; do sleep 1000 & wait; done";

/// Makes rank 0 write a dump, calls `answer` with the run and the file that lets it finish, and returns the
/// launcher's output once rank 0 printed `expected`. A dump may take a second; if that is too short on a busy
/// machine, it tries again.
fn while_dumping(expected: &[&str], answer: impl Fn(&Run, &Path)) -> (String, Option<i32>) {
    const ATTEMPTS: usize = 20;
    let mut seen = Vec::new();
    for _ in 0..ATTEMPTS {
        let folder = tempfile::tempdir().expect("a folder of ours");
        make_fifo(folder.path());
        let script = DUMPING.replace("FOLDER", folder.path().to_str().expect("it is text"));
        let mut run = Run::start(&["-n", "2", &script]);
        let first = run.any_line();
        if first == "dumping" {
            answer(&run, &folder.path().join("go"));
        } // otherwise its second had passed: it was asked to exit, and does
        let mut rest = String::new();
        std::io::Read::read_to_string(&mut run.output, &mut rest).expect("it is text");
        let (error, status) = run.ended();
        let said = rest.lines().map(|line| line.trim_start_matches("[0] "));
        if first == "dumping" && said.eq(expected.iter().copied()) {
            return (error, status.code());
        }
        seen.push(format!("{first}\n{rest}"));
    }
    panic!("not once in {ATTEMPTS} attempts: {seen:?}");
}

#[test]
fn a_signal_is_handled_while_ranks_write_dumps_and_their_output_is_shown() {
    let (error, code) = while_dumping(&["interrupted"], |run, _| run.launcher.signal(Signal::INT));
    assert!(error.contains("tenfold: SIGINT: passed on to all ranks; they have "), "{error}");
    assert!(error.ends_with("error: ended by SIGINT\n"), "{error}");
    assert_eq!(code, Some(1));
}

#[test]
fn ranks_that_write_dumps_are_asked_to_exit_afterwards() {
    let (error, code) = while_dumping(&["dumped", "asked"], |_, go| std::fs::write(go, "").unwrap());
    assert!(error.contains("tenfold: rank 1 failed (exit code 3): stopping the others\n"), "{error}");
    assert!(error.contains("error: rank 1 of 2 failed first: exit code 3 after "), "{error}");
    assert_eq!(code, Some(1));
}

#[test]
fn a_finished_job_whose_output_is_not_read_exits_when_it_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let go = folder.path().join("go");
    let serve = Serve::start(&["--host", "127.0.0.2"]);
    let endpoint = serve.address.to_string();
    // More than a pipe holds, less than the launcher holds.
    let script =
        format!("echo ready; until [ -e {} ]; do :; done; head -c 300000 /dev/zero; exit 3", go.display());
    let meeting = ["--rdzv-backend", "c10d", "--rdzv-id", "job", "--rdzv-endpoint", &endpoint];
    let mut run = Run::start(&[&meeting[..], &[&script]].concat());
    let mut line = String::new();
    std::io::BufRead::read_line(&mut run.output, &mut line).unwrap();
    assert_eq!(line, "ready\n");
    // While the store does not answer, the rank fails; the launcher only has its output.
    serve.process.freeze();
    std::fs::write(&go, "").unwrap();
    let launcher = run.launcher.0.id();
    let children = || std::fs::read_to_string(format!("/proc/{launcher}/task/{launcher}/children")).unwrap();
    wait_until("the guard is alone", || children().split_whitespace().count() <= 1);
    serve.process.signal(Signal::CONT);
    let is_over = || {
        let threads = std::fs::read_dir(format!("/proc/{launcher}/task")).unwrap();
        let names = threads.flatten().map(|thread| std::fs::read_to_string(thread.path().join("comm")));
        !names.flatten().any(|name| name.trim() == "rendezvous")
    };
    wait_until("the rendezvous is over", is_over);
    let mut rest = Vec::new();
    std::io::Read::read_to_end(&mut run.output, &mut rest).unwrap();
    assert_eq!(rest.len(), 300_000);
    let (error, status) = run.ended();
    assert!(error.contains("error: the rank failed: exit code 3 after "), "{error}");
    assert_eq!(status.code(), Some(1));
}

/// A rank that ignores signals, with a child in its group, and one that has left group, session and parent.
const FAMILY: &str = "trap '' TERM HUP INT; sleep 1000 & echo $!
    sh -c 'setsid sh -c \"trap : TERM; echo \\$\\$; while :; do sleep 1000 & wait; done\" &'
    echo $$; exec sleep 1001";

#[test]
fn a_launcher_that_is_killed_leaves_no_process() {
    let mut run = Run::start(&["-n", "2", FAMILY]);
    let all: Vec<OwnedFd> = (0..6).map(|_| handle(&run.any_line())).collect();
    run.launcher.signal(Signal::KILL);
    all.iter().for_each(wait_until_gone);
}

/// Two that have lost the mark: one still has the rank's output, the other its group.
const UNMARKED: &str = "env -i setsid sh -c 'trap \"\" TERM; echo $$; exec sleep 1000' &
    env -i sh -c 'echo $$; exec sleep 1000 > /dev/null 2>&1' &
    exec sleep 1001";

#[test]
fn a_launcher_that_is_killed_leaves_no_process_that_left_group_or_environment() {
    let mut run = Run::start(&["-n", "2", UNMARKED]);
    let all: Vec<OwnedFd> = (0..4).map(|_| handle(&run.any_line())).collect();
    run.launcher.signal(Signal::KILL);
    all.iter().for_each(wait_until_gone);
}

#[test]
fn a_guard_that_is_killed_is_replaced() {
    let mut run = Run::start(&["-n", "1", "sleep 1000 & echo $!; echo $PPID; exec sleep 1001"]);
    let mut line = || {
        let mut line = String::new();
        std::io::BufRead::read_line(&mut run.output, &mut line).unwrap();
        line.trim_end().to_string()
    };
    let (child, launcher) = (handle(&line()), line());
    let guard = || {
        let children = std::fs::read_to_string(format!("/proc/{launcher}/task/{launcher}/children")).unwrap();
        let is_guard = |process: &&str| {
            let words = std::fs::read(format!("/proc/{process}/cmdline")).unwrap_or_default();
            words.ends_with(b"run-guard\0")
        };
        children.split_whitespace().find(is_guard).map(str::to_string)
    };
    let first = guard().unwrap();
    kill_process(pid(&first), Signal::KILL).unwrap();
    wait_until("there is another guard", || guard().is_some_and(|next| next != first));
    run.launcher.signal(Signal::KILL);
    wait_until_gone(&child);
}

#[test]
fn a_nested_run_ends_with_the_outer_run() {
    // The inner launcher is killed as well: only the outer guard is left.
    let inner =
        format!("exec {TENFOLD} run -n 2 sh -c 'setsid sleep 1000 & echo $!; echo $PPID; exec sleep 1001'");
    for kill_inner_first in [false, true] {
        let mut run = Run::start(&["-n", "1", &inner]);
        let mut line = || {
            let mut line = String::new();
            std::io::BufRead::read_line(&mut run.output, &mut line).unwrap();
            line.trim_end().split_once("] ").unwrap().1.to_string()
        };
        let processes: Vec<String> = (0..4).map(|_| line()).collect();
        let handles: Vec<OwnedFd> = processes.iter().map(|process| handle(process)).collect();
        if kill_inner_first {
            run.launcher.signal(Signal::STOP); // or it would end all processes itself
            let inner = processes
                .iter()
                .find(|process| processes.iter().filter(|other| other == process).count() == 2);
            kill_process(pid(inner.unwrap()), Signal::KILL).unwrap();
        }
        run.launcher.signal(Signal::KILL);
        handles.iter().for_each(wait_until_gone);
    }
}

#[test]
fn a_process_that_left_its_group_and_its_environment_ends_with_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let go = make_fifo(folder.path());
    let script =
        format!("env -i setsid sh -c 'trap \"\" TERM; echo $$; exec sleep 1000' & read word < {go}; exit 3");
    let mut run = Run::start(&["-n", "2", &script]);
    let left: Vec<OwnedFd> = (0..2).map(|_| handle(&run.any_line())).collect();
    std::fs::write(&go, "go\ngo\n").unwrap();
    let (error, status) = run.ended();
    assert_eq!(status.code(), Some(1), "{error}");
    left.iter().for_each(wait_until_gone);
}

#[test]
fn children_that_the_launcher_had_before_are_left_alone() {
    let script = format!("sleep 1000 > /dev/null 2>&1 & echo $!; exec {TENFOLD} run -n 1 true");
    let mut run = Run::spawn(Command::new("sh").args(["-c", &script]));
    let mut line = String::new();
    std::io::BufRead::read_line(&mut run.output, &mut line).unwrap();
    let stranger = handle(line.trim_end());
    let (error, status) = run.ended();
    assert_eq!((error.as_str(), status.code()), ("", Some(0)));
    rustix::process::pidfd_send_signal(&stranger, Signal::KILL).expect("it still lives");
    wait_until_gone(&stranger);
}

#[test]
fn a_port_that_is_taken_is_reported_with_its_holder() {
    let holder = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = holder.local_addr().unwrap().port().to_string();
    let own = std::process::id();
    let name = std::fs::read_to_string("/proc/self/comm").unwrap();
    let (output, error, code) = finished(&["-n", "2", "--master-port", &port, "echo started"]);
    assert_eq!(
        error,
        format!(
            "error: cannot host the store: cannot listen on 127.0.0.1:{port}: address already in use by process {own} \
             ({})\n  hint: stop that program, choose another port, or give port 0 to have one picked\n",
            name.trim()
        )
    );
    assert_eq!((output.as_str(), code), ("", Some(1)));
    let endpoint = format!("127.0.0.1:{port}");
    let (_, error, code) = finished(&["--rdzv-backend", "c10d", "--rdzv-endpoint", &endpoint, "true"]);
    assert!(error.contains(&format!("address already in use by process {own} ")), "{error}");
    assert_eq!(code, Some(1));
}

#[test]
fn processes_that_a_rank_left_behind_end_with_the_run() {
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
fn a_program_that_cannot_run_is_reported_before_anything_starts() {
    let says = |words: &[&str]| {
        let output = Command::new(TENFOLD).arg("run").args(words).output().unwrap();
        (String::from_utf8(output.stderr).unwrap(), output.status.code())
    };
    assert_eq!(
        says(&["-n", "2", "./no-such-program"]),
        ("error: program `./no-such-program` not found\n".into(), Some(1))
    );
    assert_eq!(
        says(&["-n", "2", "no-such-file.py"]),
        ("error: file `no-such-file.py` not found\n".into(), Some(1))
    );
    let (error, code) = says(&["--nproc-per-nod", "2", "true"]);
    assert!(error.contains("a similar argument exists: '--nproc-per-node'"), "{error}");
    assert_eq!(code, Some(2));
    assert_eq!(
        says(&["/proc/version"]),
        (
            "error: `/proc/version` is not executable\n  hint: run `chmod +x /proc/version`, or put its interpreter before it\n"
                .into(),
            Some(1)
        )
    );
}

#[test]
fn a_program_that_the_system_cannot_run_is_reported_with_the_likely_reason() {
    use std::os::unix::fs::PermissionsExt as _;
    let folder = tempfile::tempdir().unwrap();
    let says = |text: &str| {
        let file = folder.path().join("program");
        std::fs::write(&file, text).unwrap();
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o755)).unwrap();
        let output = Command::new(TENFOLD).args(["run", "-n", "2"]).arg(&file).output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        String::from_utf8(output.stderr).unwrap().replace(file.to_str().unwrap(), "FILE")
    };
    assert_eq!(
        says("#!/no/such/interpreter\n"),
        "error: cannot start rank 0: cannot run `FILE`: No such file or directory (os error 2)\n  hint: check that the interpreter named in its first line exists\n"
    );
}
