//! Describes a rank that failed.
//!
//! How it ended and what it printed are facts. From them follows the likely cause, if there is evidence for
//! one, by two tables: what programs print, and what signals mean. Whether the kernel killed a process for
//! lack of memory is read from the control group's counters ([`MemoryWatch`]).
//!
//! How a launcher uses it: it creates a [`MemoryWatch`] before the first rank starts. When a rank has failed,
//! it calls [`Pipes::catch_up`](super::pipes::Pipes::catch_up), then makes a [`Failure`] with
//! [`Pipes::words`](super::pipes::Pipes::words). Its [`Failure::summary`] and [`Failure::text`] become those
//! of the `JobFailure` that is sent to every node, and all nodes print `error: ` and the text. [`stubborn`]
//! adds what becomes known later, on the node that knows it.

mod error_file;
mod memory_watch;
mod sayings;

use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::Duration;

use signal_hook::consts::SIGKILL;

use super::rank::{End, signal_name};
use tenfold_console::printable;

pub(super) use error_file::ErrorFile;
pub(super) use memory_watch::{MemoryKills, MemoryWatch};
use sayings::{Cause, SAYINGS, cause, meaning};

/// The longest text of a failure: it goes through the store to every node.
pub(super) const TEXT_MAX: usize = 8 << 10;
/// How much of a log file's end is read for its last lines.
const TAIL_MAX: u64 = 16 << 10;
const TAIL_LINES: usize = 12;
/// The exit code that shells report for SIGKILL.
const SHELLS_KILL: u8 = 128 + SIGKILL as u8;
/// Ranks that failed together are named one by one up to this many.
const TOGETHER_MAX: usize = 16;

/// A rank that failed, the first one of its round.
#[derive(Clone, Debug)]
pub(super) struct Failure {
    pub(super) rank: usize,
    pub(super) world_size: usize,
    pub(super) local_rank: usize,
    /// If there are several nodes.
    pub(super) host: Option<String>,
    pub(super) process: u32,
    /// None if it wrote an error file and has not exited since.
    pub(super) end: Option<End>,
    pub(super) ran: Duration,
    pub(super) words: Words,
    /// From [`MemoryWatch::kills`], after the rank has exited.
    pub(super) memory: Option<MemoryKills>,
    /// What it ran: the first word, for advice about Python.
    pub(super) program: String,
    /// Others may have failed because of it. Otherwise the others recover.
    pub(super) is_first: bool,
    /// Ranks that had also failed by the time of the report, before any rank was asked to exit.
    pub(super) together: Vec<(usize, End)>,
}

/// What a rank left behind for the report.
#[derive(Clone, Debug, Default)]
pub(super) struct Words {
    pub(super) last_lines: Vec<String>,
    /// They are the last thing on the screen, so the summary need not repeat them.
    pub(super) are_on_screen: bool,
    /// What `record` wrote, or why it cannot be read.
    pub(super) error_file: Option<Result<ErrorFile, String>>,
    pub(super) log_files: Vec<PathBuf>,
    /// The log file whose disk is full: the rank may have failed because of it, without being able to log
    /// that.
    pub(super) full: Option<PathBuf>,
}

impl Failure {
    /// `exit code 3`, `killed by SIGKILL`.
    pub(super) fn summary(&self) -> String {
        self.end.map_or_else(|| "an error; it has not exited yet".into(), |end| end.to_string())
    }

    /// Several lines, the first without `error: `, the last without a line end; at most [`TEXT_MAX`] bytes.
    pub(super) fn text(&self) -> String {
        let head = self.head();
        let mut below = String::new();
        for file in &self.words.log_files {
            let _infallible = write!(below, "\n  log: {}", file.display());
        }
        for (rank, end) in self.together.iter().take(TOGETHER_MAX) {
            let _infallible = write!(below, "\n  rank {rank} failed at the same time: {end}");
        }
        if let Some(more) = self.together.len().checked_sub(TOGETHER_MAX).filter(|&more| more > 0) {
            let _infallible = write!(below, "\n  and {more} more ranks");
        }
        let room = TEXT_MAX.saturating_sub(head.len() + below.len());
        let text = head + &leave_out_middle(&self.body(), room) + &below;
        first_bytes(&text, TEXT_MAX).to_string()
    }

    fn head(&self) -> String {
        let Failure { rank, world_size, local_rank, process, .. } = self;
        let end = self.summary();
        let failed = if self.is_first { "failed first" } else { "failed" };
        let mut text = match &self.host {
            None if *world_size == 1 => "the rank failed".to_string(),
            None => format!("rank {rank} of {world_size} {failed}"),
            Some(host) => format!("rank {rank} of {world_size} on host {host} {failed}"),
        };
        let seconds = self.ran.as_secs_f64();
        let place = if self.host.is_some() { format!("local rank {local_rank}, ") } else { String::new() };
        let _infallible = write!(text, ": {end} after {seconds:.1} s ({place}pid {process})");
        if let Some(Cause { words, hint }) = self.cause() {
            let _infallible = write!(text, "\n  cause: {words}");
            text += &hint.map_or_else(String::new, |hint| format!("\n  hint: {hint}"));
        }
        text
    }

    /// The traceback if there is one, else the last lines.
    fn body(&self) -> Vec<String> {
        let mut lines = Vec::new();
        match &self.words.error_file {
            Some(Ok(ErrorFile { traceback: Some(traceback), .. })) => {
                return traceback.lines().map(|line| format!("  {}", printable(line))).collect();
            }
            Some(Ok(ErrorFile { message, .. })) => {
                return message.lines().map(|line| format!("  | {}", printable(line))).collect();
            }
            Some(Err(problem)) => lines.push(format!("  {problem}")),
            None => {}
        }
        if !self.words.are_on_screen {
            lines.extend(self.words.last_lines.iter().map(|line| format!("  | {}", printable(line))));
        }
        lines
    }

    /// What it printed, newest first.
    fn evidence(&self) -> impl Iterator<Item = &str> {
        let file = self.words.error_file.as_ref().and_then(|file| file.as_ref().ok());
        let told = file.into_iter().flat_map(|file| {
            let traceback = file.traceback.as_deref().unwrap_or_default();
            file.message.lines().chain(traceback.lines()).rev()
        });
        told.chain(self.words.last_lines.iter().map(String::as_str).rev())
    }

    fn cause(&self) -> Option<Cause> {
        let killed = matches!(self.end, Some(End::Signal(SIGKILL) | End::Exit(SHELLS_KILL)));
        if let Some(memory) = self.memory.filter(|_| killed) {
            return Some(memory.cause());
        }
        let said = SAYINGS.iter().find_map(|saying| {
            let line = self.evidence().find(|line| saying.is_in(line))?;
            Some(saying.cause(line, &self.program))
        });
        let full = self.words.full.as_ref().map(|file| Cause {
            words: format!("the disk of {} is full", file.display()),
            hint: Some("check `df -h`; choose another folder with `--log-dir`".into()),
        });
        said.or(full).or_else(|| match self.end? {
            End::Signal(signal) => meaning(signal),
            End::Exit(126) => {
                cause("a program that it tried to start is not executable", "see its last lines")
            }
            End::Exit(127) => cause("a program that it tried to start was not found", "see its last lines"),
            End::Exit(code) => {
                let signal = i32::from(code.checked_sub(128).filter(|signal| (1..32).contains(signal))?);
                let name = signal_name(signal);
                Some(Cause {
                    words: format!(
                        "a child process was probably killed by {name} (shells report that with this exit code)"
                    ),
                    hint: meaning(signal).and_then(|meaning| meaning.hint),
                })
            }
        })
    }
}

/// Ranks that had to be killed, for the end of the summary; empty if there are none.
pub(super) fn stubborn(ranks: &[usize]) -> String {
    let killed: Vec<String> = ranks.iter().map(usize::to_string).collect();
    match killed.as_slice() {
        [] => String::new(),
        [one] => format!("\n  rank {one} did not exit after SIGTERM and was killed"),
        several => format!("\n  ranks {} did not exit after SIGTERM and were killed", several.join(", ")),
    }
}

/// The last lines of a log file that the launcher did not see; none if it cannot be read.
pub(super) fn tail(path: &Path) -> Vec<String> {
    let read = || -> io::Result<Vec<u8>> {
        let mut file = File::open(path)?;
        let start = file.metadata()?.len().saturating_sub(TAIL_MAX);
        file.seek(SeekFrom::Start(start))?;
        let mut bytes = Vec::new();
        file.take(TAIL_MAX).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    let bytes = read().unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(TAIL_LINES)..].iter().map(|line| line.to_string()).collect()
}

/// At most this many bytes, and no half character.
pub(super) fn first_bytes(text: &str, max: usize) -> &str {
    let end = (0..=max.min(text.len())).rev().find(|&at| text.is_char_boundary(at));
    &text[..end.unwrap_or(0)]
}

/// Lines, each after a line end. If they do not fit, some of the first are kept, and as many of the last as
/// possible.
fn leave_out_middle(lines: &[String], room: usize) -> String {
    let joined = |lines: &[String]| lines.iter().fold(String::new(), |text, line| text + "\n" + line);
    let all = joined(lines);
    if all.len() <= room {
        return all;
    }
    const MARK_MAX: usize = "\n  … 99999999 lines left out …".len();
    let budget = room.saturating_sub(MARK_MAX);
    let fitting = |lines: &mut dyn Iterator<Item = &String>, mut budget: usize| {
        let fits = |line: &&String| {
            let left = budget.checked_sub(line.len() + 1);
            budget = left.unwrap_or(0);
            left.is_some()
        };
        lines.take_while(fits).count()
    };
    let first = fitting(&mut lines.iter(), budget / 4);
    let used = joined(&lines[..first]).len();
    let last = fitting(&mut lines[first..].iter().rev(), budget - used);
    if last == 0 && room > MARK_MAX {
        // One line that is longer than the limit: keep its end.
        let line = lines.last().map_or("", String::as_str);
        let from = line.len().saturating_sub(budget.saturating_sub(8));
        let from = (from..=line.len()).find(|&at| line.is_char_boundary(at)).unwrap_or(line.len());
        return format!("\n  … {}", &line[from..]);
    }
    let left_out = lines.len() - first - last;
    joined(&lines[..first])
        + &format!("\n  … {left_out} lines left out …")
        + &joined(&lines[lines.len() - last..])
}

#[cfg(test)]
mod tests {
    use super::*;
    use signal_hook::consts::{
        SIGABRT, SIGBUS, SIGFPE, SIGHUP, SIGILL, SIGINT, SIGPIPE, SIGQUIT, SIGSEGV, SIGSYS, SIGTERM, SIGXCPU,
        SIGXFSZ,
    };
    use std::fs;

    fn failure(end: End, last_lines: &[&str]) -> Failure {
        Failure {
            rank: 5,
            world_size: 8,
            local_rank: 1,
            host: None,
            process: 4711,
            end: Some(end),
            ran: Duration::from_millis(12_345),
            words: Words {
                last_lines: last_lines.iter().map(|line| line.to_string()).collect(),
                ..Words::default()
            },
            memory: None,
            program: "/opt/venv/bin/python3".into(),
            is_first: true,
            together: Vec::new(),
        }
    }

    #[test]
    fn a_failure_report_has_the_last_lines_the_logs_and_other_failed_ranks() {
        let mut failed = failure(End::Exit(1), &["loading", "\x1b[31mgiving up\x1b[0m\x07"]);
        failed.words.log_files = vec!["/logs/job_x/attempt_0/1/stderr.log".into()];
        failed.together = vec![(6, End::Signal(SIGKILL))];
        assert_eq!(failed.summary(), "exit code 1");
        let text = "rank 5 of 8 failed first: exit code 1 after 12.3 s (pid 4711)\n  | loading\n  | giving up\n  \
                    log: /logs/job_x/attempt_0/1/stderr.log\n  rank 6 failed at the same time: killed by SIGKILL";
        assert_eq!(failed.text() + &stubborn(&[]), text);
        assert_eq!(stubborn(&[0]), "\n  rank 0 did not exit after SIGTERM and was killed");
        assert_eq!(stubborn(&[0, 1]), "\n  ranks 0, 1 did not exit after SIGTERM and were killed");
        failed.host = Some("b7".into());
        failed.words.are_on_screen = true;
        assert_eq!(
            failed.text(),
            "rank 5 of 8 on host b7 failed first: exit code 1 after 12.3 s (local rank 1, pid 4711)\n  log: \
             /logs/job_x/attempt_0/1/stderr.log\n  rank 6 failed at the same time: killed by SIGKILL"
        );
        let alone = Failure { world_size: 1, rank: 0, ..failure(End::Exit(5), &[]) };
        assert_eq!(alone.text(), "the rank failed: exit code 5 after 12.3 s (pid 4711)");
    }

    #[test]
    fn a_traceback_takes_the_place_of_the_last_lines() {
        let json = r#"{"message": {"message": "ValueError: no", "extraInfo": {
            "py_callstack": "Traceback (most recent call last):\n  File \"a.py\", line 1\nValueError: no\n",
            "timestamp": "1763280000"}}}"#;
        let mut failed = failure(End::Exit(1), &["seen"]);
        failed.words.error_file = Some(Ok(ErrorFile::parse(json.as_bytes()).unwrap()));
        assert_eq!(
            failed.text(),
            "rank 5 of 8 failed first: exit code 1 after 12.3 s (pid 4711)\n  Traceback (most recent call last):\n    \
             File \"a.py\", line 1\n  ValueError: no"
        );
        let plain = ErrorFile::parse(br#"{"message": "two\nlines"}"#).unwrap();
        failed.words.error_file = Some(Ok(plain));
        assert!(failed.text().ends_with("(pid 4711)\n  | two\n  | lines"), "{}", failed.text());
        failed.words.error_file = Some(Err("its error file x was not written by `record`".into()));
        let text = failed.text();
        assert!(
            text.ends_with("(pid 4711)\n  its error file x was not written by `record`\n  | seen"),
            "{text}"
        );
    }

    #[track_caller]
    fn assert_cause(end: End, line: &str, words: &str, hint: &str) {
        let found = failure(end, &["before", line, "after"]).cause();
        let expected = Cause { words: words.into(), hint: (!hint.is_empty()).then(|| hint.into()) };
        assert_eq!(found, Some(expected), "{line}");
    }

    #[test]
    fn the_cause_is_found_in_what_programs_print() {
        let failed = End::Exit(1);
        let torch = "RuntimeError: The server socket has failed to listen on any local network address. port: 29500, \
                     useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use";
        for (line, port) in [
            (torch, Some(29500)),
            (
                "OSError: [Errno 98] error while attempting to bind on ('0.0.0.0', 8000): address already in use",
                Some(8000),
            ),
            ("listen tcp 127.0.0.1:6006: bind: address already in use", Some(6006)),
            ("cannot bind [::]:7000: Address already in use (os error 98)", Some(7000)),
            ("[12:30:45] OSError: [Errno 98] Address already in use", None),
        ] {
            let (words, list) = match port {
                Some(port) => {
                    (format!("port {port} is already in use"), format!("ss -ltnp 'sport = :{port}'"))
                }
                None => ("a port is already in use".into(), "ss -ltnp".into()),
            };
            assert_cause(
                failed,
                line,
                &words,
                &format!("find the process with `{list}`, or use another port"),
            );
        }
        for line in [
            "ModuleNotFoundError: No module named 'numpy.core'",
            "/usr/bin/python3: No module named numpy.core",
        ] {
            assert_cause(
                failed,
                line,
                "the Python module `numpy.core` is missing in /opt/venv/bin/python3",
                "run `/opt/venv/bin/python3 -m pip install numpy`, or choose another Python with `--python`",
            );
        }
        assert_cause(
            failed,
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
            "the GPU's memory is full",
            "use a smaller batch; `nvidia-smi` lists the processes on the GPU",
        );
        assert_cause(
            failed,
            "OSError: [Errno 24] Too many open files: 'x'",
            "the limit of open files was reached",
            "show and raise it with `ulimit -n`",
        );
        assert_cause(
            End::Signal(SIGBUS),
            "ERROR: Unexpected bus error. This might be caused by insufficient shared memory (shm).",
            "shared memory is full",
            "check `df -h /dev/shm`; in Docker, use `--shm-size` or `--ipc=host`",
        );
        assert_cause(
            failed,
            "OSError: [Errno 28] No space left on device",
            "a disk is full",
            "check `df -h`, and `df -h /dev/shm` for shared memory",
        );
        assert_cause(
            failed,
            "sh: fork: Cannot allocate memory",
            "the system is out of memory",
            "check `free -m` and `ulimit -v`",
        );
        let mut told = failure(failed, &[]);
        told.program = "sh".into();
        told.words.error_file = Some(Ok(ErrorFile {
            message: "ModuleNotFoundError: No module named 'apex'".into(),
            traceback: None,
            timestamp: None,
            modified: None,
        }));
        assert_eq!(told.cause().unwrap().words, "the Python module `apex` is missing");
        assert_eq!(failure(failed, &["ValueError: no"]).cause(), None);
    }

    #[test]
    fn the_cause_is_found_in_signals_and_exit_codes_of_shells() {
        assert_cause(
            End::Signal(SIGKILL),
            "",
            "killed by a user, or by the kernel's OOM killer",
            "run `dmesg | grep -i oom` to see if it was the kernel",
        );
        assert_cause(
            End::Signal(SIGBUS),
            "",
            "access to memory that could not be provided: shared memory may be full",
            "check `df -h /dev/shm`; in Docker, use `--shm-size` or `--ipc=host`",
        );
        assert_cause(
            End::Signal(SIGSEGV),
            "",
            "invalid memory access: a bug in native code",
            "PYTHONFAULTHANDLER=1 shows where a Python program was",
        );
        for signal in
            [SIGILL, SIGFPE, SIGABRT, SIGTERM, SIGINT, SIGQUIT, SIGHUP, SIGPIPE, SIGXCPU, SIGXFSZ, SIGSYS]
        {
            assert!(failure(End::Signal(signal), &[]).cause().is_some(), "{signal}");
        }
        assert_cause(
            End::Exit(126),
            "",
            "a program that it tried to start is not executable",
            "see its last lines",
        );
        assert_cause(
            End::Exit(127),
            "",
            "a program that it tried to start was not found",
            "see its last lines",
        );
        assert_cause(
            End::Exit(139),
            "",
            "a child process was probably killed by SIGSEGV (shells report that with this exit code)",
            "PYTHONFAULTHANDLER=1 shows where a Python program was",
        );
        for code in [1, 2, 128, 160, 255] {
            assert_eq!(failure(End::Exit(code), &[]).cause(), None, "{code}");
        }
    }

    #[test]
    fn a_kill_by_the_memory_limit_is_reported_with_the_limit() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("job/step/memory.events", "low 0\nmax 4\noom 1\noom_kill 2\noom_group_kill 0\n");
        write("job/step/memory.max", "max\n");
        write("job/memory.max", "536870912\n");
        let watch = MemoryWatch::at("0::/job/step\n", root.path());
        assert_eq!(watch.kills(), None);
        write("job/step/memory.events", "oom 2\noom_kill 3\n");
        let kills = watch.kills();
        assert_eq!(kills, Some(MemoryKills { limit: Some(512 << 20) }));
        let mut failed = failure(End::Signal(SIGKILL), &["no space left on device"]);
        failed.memory = kills;
        assert_eq!(
            failed.text().lines().skip(1).take(2).collect::<Vec<_>>(),
            [
                "  cause: killed by the memory limit (512.0 MiB) of its control group",
                "  hint: raise the limit of the container or the job, or use less memory in each rank"
            ]
        );
        failed.end = Some(End::Exit(137)); // as a shell reports it
        assert!(failed.text().contains("cause: killed by the memory limit"));
        failed.end = Some(End::Exit(1)); // the killed process was another one
        assert!(failed.text().contains("cause: a disk is full"));
        write("job/memory.max", "max\n");
        let cause = watch.kills().unwrap().cause();
        assert_eq!(cause.words, "killed by the kernel's OOM killer");
    }

    #[test]
    fn a_long_text_loses_its_middle_and_keeps_its_end() {
        let lines: Vec<String> = (0..2000).map(|i| format!("  line {i} ä")).collect();
        for room in (0..6000).step_by(97).chain([TEXT_MAX]) {
            let text = leave_out_middle(&lines, room);
            assert!(text.len() <= room.max(40), "{room}: {}", text.len());
            if room > 100 {
                assert!(
                    text.starts_with("\n  line 0 ä") && text.ends_with("\n  line 1999 ä"),
                    "{room}: {text}"
                );
                assert!(text.contains(" lines left out …\n"), "{text}");
            }
        }
        let long = vec!["ä".repeat(TEXT_MAX) + "end"];
        let text = leave_out_middle(&long, 1000);
        assert!(
            text.len() <= 1000 && text.starts_with("\n  … ä") && text.ends_with("äend"),
            "{}",
            text.len()
        );

        let line = "x".repeat(1000);
        let mut failed = failure(End::Exit(1), &[line.as_str(); 12]);
        failed.words.last_lines.push("ValueError: no".into());
        failed.together = (6..1000).map(|rank| (rank, End::Exit(1))).collect();
        let text = failed.text();
        assert!(text.len() <= TEXT_MAX && text.len() > TEXT_MAX - 2100, "{}", text.len());
        assert!(
            text.contains("\n  | ValueError: no\n") && text.ends_with("\n  and 978 more ranks"),
            "{text}"
        );
    }

    #[test]
    fn the_end_of_a_file_is_its_last_lines() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("stderr.log");
        assert_eq!(tail(&path), Vec::<String>::new());
        fs::write(&path, (0..5000).map(|i| format!("line {i}\n")).collect::<String>()).unwrap();
        let expected: Vec<String> = (4988..5000).map(|i| format!("line {i}")).collect();
        assert_eq!(tail(&path), expected);
    }
}
