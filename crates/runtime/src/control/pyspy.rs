//! What py-spy says of this process: stacks of all threads, read from outside, so that no interpreter has to answer.
//!
//! py-spy is the user's, found by `PATH` as c10d's shell finds it. It stops this process while it reads. A py-spy that never
//! ends must not occupy a handler's thread: after [`LIMIT`], it is killed with all processes that it started. The answer has what
//! it wrote to both of its streams, in the order of writing, up to [`OUTPUT_MAX`].

#![expect(clippy::disallowed_methods, reason = "a program that does not end is killed")]

use std::io::{self, PipeReader, Read as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};

use super::{Request, Response};

/// Half of what the server gives a handler. A stack takes py-spy milliseconds, with native frames seconds.
const LIMIT: Duration = Duration::from_secs(60);

/// Bytes of output in an answer: enough for thousands of deep stacks.
const OUTPUT_MAX: usize = 16 << 20;

pub(super) fn dump(request: &Request) -> Response {
    dump_by("py-spy", request, LIMIT)
}

fn dump_by(program: &str, request: &Request, limit: Duration) -> Response {
    let mut command = Command::new(program);
    command.args(["dump", "--pid", &std::process::id().to_string()]);
    for flag in ["native", "subprocesses", "nonblocking"] {
        if !request.param(flag).is_empty() {
            command.arg(format!("--{flag}"));
        }
    }
    match run(command, limit) {
        Ok(Said { text, end: End::Good }) => Response::new(200, "text/plain", text),
        Ok(Said { text, end: End::Bad }) => Response::new(500, "text/plain", text),
        Ok(Said { mut text, end: End::Killed }) => {
            let seconds = limit.as_secs_f64();
            text.extend(format!("py-spy did not end within {seconds:.1} s and was killed\n").bytes());
            Response::new(500, "text/plain", text)
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Response::text(500, "py-spy: not found: install it with `pip install py-spy`\n")
        }
        Err(error) => Response::text(500, format!("py-spy cannot be started: {error}\n")),
    }
}

struct Said {
    text: Vec<u8>,
    end: End,
}

enum End {
    Good,
    Bad,
    Killed,
}

fn run(mut command: Command, limit: Duration) -> io::Result<Said> {
    let deadline = Instant::now() + limit;
    let (mut reader, writer) = io::pipe()?;
    command.stdin(Stdio::null()).stdout(writer.try_clone()?).stderr(writer);
    let mut child = command.process_group(0).spawn()?;
    drop(command); // has the pipe's other end
    let mut text = Vec::new();
    let ended = listen(&child, &mut reader, deadline, &mut text);
    if !matches!(ended, Ok(true))
        && let Some(group) = Pid::from_raw(child.id() as i32)
    {
        let _ = kill_process_group(group, Signal::KILL); // it is not reaped yet, so the number is still its own
    }
    let status = child.wait()?;
    let end = match ended? {
        true if status.success() => End::Good,
        true => End::Bad,
        false => End::Killed,
    };
    Ok(Said { text, end })
}

/// Takes what the program writes until it ends. False if it has not by the deadline.
fn listen(child: &Child, reader: &mut PipeReader, deadline: Instant, text: &mut Vec<u8>) -> io::Result<bool> {
    let pid = Pid::from_raw(child.id() as i32).ok_or(io::ErrorKind::InvalidInput)?;
    let process = pidfd_open(pid, PidfdFlags::empty())?;
    let mut is_open = true;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(false);
        }
        let (may_read, has_ended) = {
            let mut fds = [PollFd::new(&process, PollFlags::IN), PollFd::new(&*reader, PollFlags::IN)];
            let fds = if is_open { &mut fds[..] } else { &mut fds[..1] };
            match poll(fds, Some(&Timespec::try_from(left).map_err(io::Error::other)?)) {
                Err(rustix::io::Errno::INTR) => continue,
                polled => polled?,
            };
            (fds.get(1).is_some_and(|fd| !fd.revents().is_empty()), !fds[0].revents().is_empty())
        };
        if may_read {
            let mut bytes = [0; 8192];
            let count = reader.read(&mut bytes)?;
            is_open = count > 0;
            // What is too much is read all the same, so that the writer does not stand still.
            let room = OUTPUT_MAX.saturating_sub(text.len());
            text.extend_from_slice(&bytes[..count.min(room)]);
        } else if has_ended {
            return Ok(true); // a process that it started may still have the pipe
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    /// What a script in py-spy's place makes of a request.
    fn asked(script: &str, params: &[(&str, &str)], limit: Duration) -> (u16, String) {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("py-spy");
        fs::write(&program, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o700)).unwrap();
        let request = Request::new("", params.iter().copied());
        // Another thread that forks just now may hold the file open for writing, which is `ETXTBSY` here.
        loop {
            let response = dump_by(program.to_str().unwrap(), &request, limit);
            let text = String::from_utf8(response.body().to_vec()).unwrap();
            if !text.contains("Text file busy") {
                return (response.status(), text);
            }
        }
    }

    #[test]
    fn it_is_asked_for_this_process_and_with_the_flags_of_the_request() {
        let pid = std::process::id();
        assert_eq!(asked("echo \"$@\"", &[], LIMIT), (200, format!("dump --pid {pid}\n")));
        let params = [("native", "1"), ("nonblocking", "true"), ("subprocesses", ""), ("other", "1")];
        assert_eq!(
            asked("echo \"$@\"", &params, LIMIT).1,
            format!("dump --pid {pid} --native --nonblocking\n")
        );
    }

    #[test]
    fn what_it_says_is_told_in_order_and_its_failure_too() {
        let (status, text) = asked("echo a; echo b >&2; echo c; exit 1", &[], LIMIT);
        assert_eq!((status, &text[..]), (500, "a\nb\nc\n"));
        // More than a pipe holds, and more than an answer has.
        let (status, text) = asked("head -c 20000000 /dev/zero | tr '\\0' x", &[], LIMIT);
        assert_eq!((status, text.len()), (200, OUTPUT_MAX));
        // A program that it leaves behind has the pipe, and is not waited for.
        let (status, text) = asked("sleep 1000 & echo $!", &[], LIMIT);
        assert_eq!(status, 200);
        let left = Pid::from_raw(text.trim().parse().unwrap()).unwrap();
        rustix::process::kill_process(left, Signal::KILL).expect("it is still there");
    }

    #[test]
    fn one_that_never_ends_is_killed_with_all_that_it_started() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("pid");
        let script =
            format!("sleep 1000 & echo $! > {0}.new; mv {0}.new {0}; echo begun; wait", file.display());
        let limit = Duration::from_millis(500);
        let (status, text) = asked(&script, &[], limit);
        assert_eq!(status, 500);
        assert!(text.ends_with("py-spy did not end within 0.5 s and was killed\n"), "{text}");
        // On a machine that had no time for the script there is nothing left to look for.
        if let Ok(pid) = fs::read_to_string(file) {
            let stat = || fs::read_to_string(format!("/proc/{}/stat", pid.trim()));
            let is_alive = || stat().is_ok_and(|stat| !stat.contains(") Z"));
            while is_alive() {
                std::thread::yield_now();
            }
        }
    }

    #[test]
    fn one_that_is_not_there_is_named() {
        let response = dump_by("/nowhere/py-spy", &Request::default(), LIMIT);
        assert_eq!(response.status(), 500);
        assert_eq!(response.body(), b"py-spy: not found: install it with `pip install py-spy`\n");
    }
}
