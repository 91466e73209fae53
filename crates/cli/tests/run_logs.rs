//! `tenfold run` with real processes: where ranks' output goes, what is left in files, how a failure is
//! reported.

#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "tests: helpers that may fail")]

mod launching;
mod serving;

use std::fs;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use launching::{Run, command, finished, make_fifo, without_numbers};
use serving::{Process, TENFOLD};

/// A folder for logs, and the arguments for it.
struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Self {
        Folder(tempfile::tempdir().unwrap())
    }

    fn path(&self) -> &str {
        self.0.path().to_str().unwrap()
    }

    /// The only run in it.
    fn run(&self) -> PathBuf {
        let runs: Vec<PathBuf> =
            fs::read_dir(self.0.path()).unwrap().map(|run| run.unwrap().path()).collect();
        assert_eq!(runs.len(), 1, "{runs:?}");
        runs[0].clone()
    }

    fn read(&self, file: &str) -> String {
        let path = self.run().join(file);
        fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    }

    fn has(&self, file: &str) -> bool {
        self.run().join(file).exists()
    }
}

fn sorted(text: &str) -> Vec<&str> {
    let mut lines: Vec<&str> = text.lines().collect();
    lines.sort_unstable();
    lines
}

/// The output of ranks in the launcher's standard error.
fn of_ranks(error: &str) -> Vec<&str> {
    sorted(error).into_iter().filter(|line| !line.starts_with("tenfold: ")).collect()
}

const BOTH: &str = "echo out $RANK; echo err $RANK >&2";

#[test]
fn a_log_folder_alone_gets_both_streams_and_so_does_the_console() {
    let folder = Folder::new();
    let (output, error, code) = finished(&["-n", "2", "--log-dir", folder.path(), BOTH]);
    assert_eq!((sorted(&output), code), (vec!["[0] out 0", "[1] out 1"], Some(0)), "{error}");
    assert_eq!(of_ranks(&error), ["[0] err 0", "[1] err 1"]);
    for rank in 0..2 {
        assert_eq!(folder.read(&format!("attempt_0/{rank}/stdout.log")), format!("out {rank}\n"));
        assert_eq!(folder.read(&format!("attempt_0/{rank}/stderr.log")), format!("err {rank}\n"));
        assert!(!folder.has(&format!("attempt_0/{rank}/error.json")));
    }
}

#[test]
fn a_folder_of_logs_has_the_runs_name() {
    let folder = Folder::new();
    let (output, error, code) = finished(&["--log-dir", folder.path(), "echo $TORCHELASTIC_RUN_ID"]);
    assert_eq!(code, Some(0), "{error}");
    let run = folder.run();
    let (name, random) = run.file_name().unwrap().to_str().unwrap().rsplit_once('_').unwrap();
    assert_eq!((name, random.len()), (output.trim_end(), 8));
}

#[test]
fn only_the_user_can_read_the_folders_of_a_run() {
    use std::os::unix::fs::PermissionsExt as _;
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    let folder = Folder::new();
    let own = folder.0.path().join("logs");
    let script = format!("umask 022; exec {TENFOLD} run --log-dir {} true", own.display());
    assert!(Command::new("sh").args(["-c", &script]).output().unwrap().status.success());
    assert_eq!(mode(&fs::read_dir(&own).unwrap().next().unwrap().unwrap().path()), 0o700);
    // Error files, which always exist, and logs for which no folder was given.
    for (flags, depth) in [("", 3), ("-t 1", 4)] {
        let script = format!(
            "umask 022; export TMPDIR={}; exec {TENFOLD} run {flags} sh -c 'f=$TORCHELASTIC_ERROR_FILE; \
             for i in $(seq {depth}); do f=$(dirname $f); done; stat -c %a $f'",
            folder.path()
        );
        let output = Command::new("sh").args(["-c", &script]).output().unwrap();
        assert_eq!(String::from_utf8(output.stdout).unwrap(), "700\n", "{flags}");
    }
}

#[test]
fn redirected_output_goes_only_to_the_file() {
    let folder = Folder::new();
    let script = "readlink /proc/$$/fd/1; echo err $RANK >&2";
    let (output, error, code) =
        finished(&["-n", "2", "--log-dir", folder.path(), "--redirects", "1", script]);
    assert_eq!((output.as_str(), code), ("", Some(0)), "{error}");
    assert_eq!(of_ranks(&error), ["[0] err 0", "[1] err 1"]);
    let file = folder.run().join("attempt_0/1/stdout.log");
    assert_eq!(
        fs::read_to_string(&file).unwrap().trim_end(),
        fs::canonicalize(&file).unwrap().to_str().unwrap()
    );
    assert!(!folder.has("attempt_0/1/stderr.log"));
}

#[test]
fn a_stream_of_one_rank_can_be_shown_and_kept() {
    let folder = Folder::new();
    let (output, error, code) =
        finished(&["-n", "2", "--log-dir", folder.path(), "-r", "3", "-t", "0:1", BOTH]);
    assert_eq!((output.as_str(), code), ("[0] out 0\n", Some(0)), "{error}");
    assert_eq!(of_ranks(&error), Vec::<&str>::new());
    for (file, text) in [("0/stdout", "out 0\n"), ("0/stderr", "err 0\n"), ("1/stdout", "out 1\n")] {
        assert_eq!(folder.read(&format!("attempt_0/{file}.log")), text);
    }
}

#[test]
fn the_console_can_be_left_to_some_ranks() {
    let folder = Folder::new();
    let words = ["-n", "3", "--local-ranks-filter", "0,2", "--tee", "1:3", "--log-dir", folder.path(), BOTH];
    let (output, error, code) = finished(&words);
    assert_eq!((sorted(&output), code), (vec!["[0] out 0", "[2] out 2"], Some(0)), "{error}");
    assert_eq!(of_ranks(&error), ["[0] err 0", "[2] err 2"]);
    assert_eq!(folder.read("attempt_0/1/stdout.log"), "out 1\n");
    assert!(!folder.has("attempt_0/0/stdout.log"));
}

#[test]
fn lines_with_certain_words_are_copied_to_one_file() {
    let folder = Folder::new();
    let script = "echo loss $RANK; echo noise; echo a,b $RANK; echo loss >&2";
    let words = ["-n", "2", "--log-dir", folder.path(), "--duplicate-stdout-filters", "loss,a,,b", script];
    let (_, error, code) = finished(&words);
    assert_eq!(code, Some(0), "{error}");
    let filtered = folder.read("attempt_0/filtered_stdout.log");
    assert_eq!(sorted(&filtered), ["[0] a,b 0", "[0] loss 0", "[1] a,b 1", "[1] loss 1"]);
    assert!(!folder.has("attempt_0/filtered_stderr.log"));
}

#[test]
fn a_log_folder_that_cannot_be_made_is_reported_before_anything_starts() {
    let folder = Folder::new();
    let file = folder.0.path().join("file");
    fs::write(&file, "").unwrap();
    let (output, error, code) = finished(&["-n", "2", "--log-dir", file.to_str().unwrap(), "echo started"]);
    let expected = format!(
        "error: cannot create the log folder `{}`: File exists\n  hint: choose another one with `--log-dir`\n",
        file.display()
    );
    assert_eq!((output.as_str(), error.as_str(), code), ("", expected.as_str(), Some(1)));
}

#[test]
fn invalid_streams_are_wrong_usage() {
    for flag in ["--redirects", "-t"] {
        let (_, error, code) = finished(&[flag, "0:7", "true"]);
        assert!(
            error.contains("invalid streams `0:7`: expected 0 for none, 1 for standard output"),
            "{error}"
        );
        assert_eq!(code, Some(2));
    }
    let (_, error, code) = finished(&["--local-ranks-filter", "all", "true"]);
    assert!(error.contains("invalid ranks `all`"), "{error}");
    assert_eq!(code, Some(2));
}

#[test]
fn ranks_continue_when_the_log_disk_is_full() {
    let folder = Folder::new();
    let logs = folder.path();
    // Each file needs one of the four pages, and folders none; 40 KB are more than what is left.
    let script = "i=0; while [ $i -lt 40 ]; do printf '%01000d\\n' 0; i=$((i + 1)); done; exit 0";
    let mounted = format!(
        "mount -t tmpfs -o size=16k tmpfs {logs} || exit 77
        {TENFOLD} run -n 2 --tee 0:1 --log-dir {logs} sh -c \"$0\"
        code=$?; ls -s {logs} >/dev/null; exit $code"
    );
    let output = Command::new("unshare").args(["-Urm", "sh", "-c", &mounted, script]).output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    if output.status.code() == Some(77) || error.starts_with("unshare: ") {
        eprintln!("not tested, for nothing can be mounted here: {error}");
        return;
    }
    assert_eq!(output.status.code(), Some(0), "{error}");
    assert_eq!(String::from_utf8(output.stdout).unwrap().lines().count(), 80);
    let mut notes = error.lines().filter(|line| line.contains(".log"));
    let note = notes.next().unwrap();
    assert!(note.starts_with(&format!("tenfold: cannot write {logs}/")), "{note}");
    let end =
        "/attempt_0/0/stdout.log: No space left on device; the output of rank 0 goes to the console only";
    assert!(note.ends_with(end), "{note}");
    let reminder = notes.next().unwrap();
    assert!(
        reminder.ends_with("/attempt_0/0/stdout.log is incomplete: it could not be written"),
        "{reminder}"
    );
    assert_eq!(notes.next(), None);
}

#[test]
fn a_full_log_disk_is_reported_as_the_cause() {
    let folder = Folder::new();
    let logs = folder.path();
    let mounted = format!(
        "mount -t tmpfs -o size=16k tmpfs {logs} || exit 77
        exec {TENFOLD} run -n 1 -r 3 --log-dir {logs} sh -c 'head -c 100000 /dev/zero || exit 5'"
    );
    let output = Command::new("unshare").args(["-Urm", "sh", "-c", &mounted]).output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    if output.status.code() == Some(77) || error.starts_with("unshare: ") {
        eprintln!("not tested, for nothing can be mounted here: {error}");
        return;
    }
    assert_eq!(output.status.code(), Some(1), "{error}");
    let cause = error.lines().find(|line| line.starts_with("  cause: ")).unwrap();
    assert!(cause.starts_with(&format!("  cause: the disk of {logs}/")), "{error}");
    assert!(cause.ends_with("/attempt_0/0/stderr.log is full"), "{error}");
}

#[test]
fn a_limit_of_file_sizes_does_not_end_the_launcher() {
    let folder = Folder::new();
    let script = "i=0; while [ $i -lt 40 ]; do printf '%01000d\\n' 0; i=$((i + 1)); done";
    let limited =
        format!("ulimit -f 8; exec {TENFOLD} run -n 1 --tee 1 --log-dir {} sh -c \"$0\"", folder.path());
    let output = Command::new("sh").args(["-c", &limited, script]).output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(0), "{error}");
    assert_eq!(output.stdout.len(), 40 * 1001);
    let end = "/attempt_0/0/stdout.log: File too large; the output of rank 0 goes to the console only\n";
    assert!(error.contains(end), "{error}");
}

#[test]
fn a_traceback_that_a_rank_left_is_shown() {
    let script = r#"echo $TORCHELASTIC_ERROR_FILE
        cat > $TORCHELASTIC_ERROR_FILE <<'END'
{"message": {"message": "ValueError: no", "extraInfo": {"py_callstack":
"Traceback (most recent call last):\n  File \"a.py\", line 1, in <module>\nValueError: no\n", "timestamp": "1"}}}
END
        exit 1"#;
    let (output, error, code) = finished(&["-n", "1", script]);
    assert_eq!(code, Some(1));
    let (_, report) = error.split_once("error: ").unwrap();
    let traceback =
        "  Traceback (most recent call last):\n    File \"a.py\", line 1, in <module>\n  ValueError: no\n";
    assert_eq!(without_numbers(report), format!("the rank failed: exit code 1\n{traceback}"));
    let file = Path::new(output.trim_end());
    assert!(file.ends_with("attempt_0/0/error.json") && !file.exists(), "{output}");

    let folder = Folder::new();
    let (_, error, code) = finished(&["-n", "1", "-r", "3", "--log-dir", folder.path(), script]);
    assert_eq!(code, Some(1));
    let (_, report) = error.split_once("error: ").unwrap();
    let place = folder.run().join("attempt_0/0");
    let logs = format!("  log: {0}/stderr.log\n  log: {0}/stdout.log\n", place.display());
    assert_eq!(without_numbers(report), format!("the rank failed: exit code 1\n{traceback}{logs}"));
    assert!(place.join("error.json").is_file());
}

#[test]
fn a_failure_is_reported_with_its_likely_cause() {
    let script = "[ $RANK = 0 ] && exec sleep 1000; echo 'listen on 127.0.0.1:29500: Address already in use' >&2; exit 1";
    let (_, error, code) = finished(&["-n", "2", script]);
    assert_eq!(code, Some(1));
    let (_, report) = error.split_once("error: ").unwrap();
    assert_eq!(
        without_numbers(report),
        "rank 1 of 2 failed first: exit code 1\n  cause: port 29500 is already in use\n  hint: find the process with \
         `ss -ltnp 'sport = :29500'`, or use another port\n  | listen on 127.0.0.1:29500: Address already in use\n"
    );
}

#[test]
fn each_round_has_its_own_files() {
    let folder = Folder::new();
    let script = "echo round $TORCHELASTIC_RESTART_COUNT; [ $TORCHELASTIC_RESTART_COUNT = 1 ]";
    let words = ["-n", "1", "--max-restarts", "1", "--log-dir", folder.path(), script];
    let (output, error, code) = finished(&words);
    assert_eq!((output.as_str(), code), ("round 0\nround 1\n", Some(0)), "{error}");
    for round in 0..2 {
        assert_eq!(folder.read(&format!("attempt_{round}/0/stdout.log")), format!("round {round}\n"));
    }
    assert!(error.contains("tenfold: restart 1 of 1: round 1 starts on 1 node"), "{error}");
}

#[test]
fn progress_bars_become_lines_and_stay_as_they_were_in_files() {
    let folder = Folder::new();
    let script = "[ $RANK = 1 ] || for i in 0 1 2 3 4 5 6 7 8 9; do printf '%s0 %%\\r' $i; done; echo done";
    let (output, error, code) = finished(&["-n", "2", "--log-dir", folder.path(), script]);
    assert_eq!(code, Some(0), "{error}");
    let shown: Vec<&str> = output.lines().filter_map(|line| line.strip_prefix("[0] ")).collect();
    assert_eq!((shown[0], *shown.last().unwrap()), ("00 %", "done"));
    assert!(!output.contains('\r') && shown.len() <= 11, "{output}");
    let whole: String = (0..10).map(|i| format!("{i}0 %\r")).collect();
    assert_eq!(folder.read("attempt_0/0/stdout.log"), whole + "done\n");
}

#[test]
fn text_without_a_line_end_is_shown_while_the_rank_waits() {
    let folder = Folder::new();
    let fifo = make_fifo(folder.0.path());
    let script = format!("[ $RANK = 1 ] || {{ printf 'name? '; read name < {fifo}; echo $name; }}");
    let mut run = Run::start(&["-n", "2", &script]);
    let mut line = String::new();
    std::io::BufRead::read_line(&mut run.output, &mut line).unwrap();
    assert_eq!(line, "[0] name? \n");
    fs::write(&fifo, "Ada\n").unwrap();
    let mut rest = String::new();
    run.output.read_to_string(&mut rest).unwrap();
    assert_eq!(rest, "[0] Ada\n");
    assert_eq!(run.ended().1.code(), Some(0));
}

#[test]
fn a_template_sets_the_prefix_of_lines() {
    let template = "<${role_name}/${local_rank}/${rank}> ";
    let words = ["-n", "2", "--role", "trainer", "--log-line-prefix-template", template, "echo hello"];
    let (output, error, code) = finished(&words);
    assert_eq!(code, Some(0), "{error}");
    assert_eq!(sorted(&output), ["<trainer/0/0> hello", "<trainer/1/1> hello"]);
}

#[test]
fn colours_can_be_forced() {
    let output =
        command(&["-n", "2", "[ $RANK = 1 ] || echo hello"]).env("CLICOLOR_FORCE", "1").output().unwrap();
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "\x1b[36m[0]\x1b[0m hello\n");
}

#[test]
fn a_terminal_has_a_status_line_that_is_removed_at_the_end() {
    use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
    let folder = Folder::new();
    let fifo = make_fifo(folder.0.path());
    let controller = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&controller).unwrap();
    unlockpt(&controller).unwrap();
    let name = ptsname(&controller, Vec::new()).unwrap();
    let flags = rustix::fs::OFlags::RDWR | rustix::fs::OFlags::NOCTTY;
    let terminal = rustix::fs::open(name, flags, rustix::fs::Mode::empty()).unwrap();
    let script = format!("[ $RANK = 1 ] || read word < {fifo}; echo said >&2; [ $RANK = 1 ] || exit 4");
    let mut command = command(&["-n", "2", &script]);
    command.env("TERM", "xterm").env_remove("NO_COLOR").stdout(Stdio::null()).stderr(terminal);
    let mut launcher = Process(command.spawn().unwrap());
    drop(command); // it holds the terminal
    let mut controller = fs::File::from(controller);
    let (mut text, mut buffer, mut told) = (Vec::new(), [0; 4096], false);
    while let Ok(count) = controller.read(&mut buffer) {
        text.extend_from_slice(&buffer[..count]); // fails when the last process has closed it
        if !told && String::from_utf8_lossy(&text).contains(" ranks running") {
            told = true;
            fs::write(&fifo, "go\n").unwrap();
        }
    }
    assert_eq!(launcher.0.wait().unwrap().code(), Some(1));
    let text = String::from_utf8(text).unwrap();
    assert!(told && text.contains("\r\x1b[2Ktenfold 0:0"), "{text}");
    for line in text.split('\n').filter(|line| line.contains("said") && !line.contains('|')) {
        let shown = line.rsplit("\x1b[2K").next().unwrap();
        let is_whole =
            ["36m[0]", "33m[1]"].iter().any(|prefix| shown == format!("\x1b[{prefix}\x1b[0m said\r"));
        assert!(is_whole, "{line:?} in {text:?}");
    }
    let (_, report) = text.rsplit_once("error: ").unwrap();
    assert!(
        report.starts_with("rank 0 of 2 failed first: exit code 4") && !report.contains("tenfold 0:"),
        "{text:?}"
    );
}
