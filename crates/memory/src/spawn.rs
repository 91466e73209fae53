//! What a child process does between its birth and its program.
//!
//! A forked child of a program with threads may do little: a lock that another thread held, such as that of the allocator,
//! stays locked forever. The functions here hand the child closures that only make system calls, on values that were
//! prepared before the fork. If such a call fails, `spawn` returns its error to the parent.

use std::io;
use std::os::unix::process::CommandExt as _;
use std::process::Command;

use rustix::process::{
    Pid, Resource, Rlimit, Signal, getpid, getppid, set_parent_process_death_signal, setrlimit, setsid,
};
use rustix::thread::{CpuSet, sched_setaffinity};

/// The kernel kills the child when the thread that spawns it ends, and so when this process does, however that happens.
///
/// It survives `exec`, and is not inherited by what the program starts in turn.
pub fn die_with_parent(command: &mut Command) {
    let parent = getpid();
    let at_birth = move || {
        set_parent_process_death_signal(Some(Signal::KILL))?;
        // A parent that died before that line was not noticed.
        if getppid() == Some(parent) { Ok(()) } else { Err(io::Error::from_raw_os_error(SEARCHED_IN_VAIN)) }
    };
    // SAFETY: the closure makes two system calls and compares two numbers; it allocates nothing and takes no lock.
    unsafe { command.pre_exec(at_birth) };
}

/// ESRCH, "no such process".
const SEARCHED_IN_VAIN: i32 = 3;

/// The child leads a session of its own: it has no terminal, and no key pressed there reaches it.
pub fn lead_session(command: &mut Command) {
    let at_birth = || Ok(setsid().map(|_: Pid| ())?);
    // SAFETY: the closure makes one system call.
    unsafe { command.pre_exec(at_birth) };
}

/// The child runs on these processors from its first instruction on. Numbers beyond what the system call can name are
/// left out.
pub fn run_on(command: &mut Command, processors: &[usize]) {
    let mut set = CpuSet::new();
    processors
        .iter()
        .filter(|&&processor| processor < CpuSet::MAX_CPU)
        .for_each(|&processor| set.set(processor));
    let at_birth = move || Ok(sched_setaffinity(None, &set)?);
    // SAFETY: the closure makes one system call on a value of its own.
    unsafe { command.pre_exec(at_birth) };
}

/// The child may have this many open files, from its first instruction on.
pub fn limit_files(command: &mut Command, limit: Rlimit) {
    let at_birth = move || Ok(setrlimit(Resource::Nofile, limit)?);
    // SAFETY: the closure makes one system call on a value of its own.
    unsafe { command.pre_exec(at_birth) };
}

#[cfg(all(test, not(miri)))] // Miri starts no processes.
mod tests {
    use super::*;

    #[test]
    fn a_child_leads_a_session_runs_where_it_is_told_and_still_runs_its_program() {
        let mut command = Command::new("sh");
        command
            .args(["-c", "echo $$ $(cut -d' ' -f6 /proc/$$/stat); grep Cpus_allowed_list /proc/$$/status"]);
        let own = rustix::thread::sched_getaffinity(None).unwrap();
        let first = (0..CpuSet::MAX_CPU).find(|&processor| own.is_set(processor)).unwrap();
        die_with_parent(&mut command);
        lead_session(&mut command);
        run_on(&mut command, &[first, usize::MAX]);
        let text = String::from_utf8(command.output().unwrap().stdout).unwrap();
        let (session, processors) = text.split_once('\n').unwrap();
        let (process, session) = session.split_once(' ').unwrap();
        assert_eq!(process, session);
        assert_eq!(processors.trim_end(), format!("Cpus_allowed_list:\t{first}"));
    }

    #[test]
    fn a_child_has_the_limit_of_files_that_it_is_given() {
        let mut command = Command::new("sh");
        command.args(["-c", "ulimit -S -n"]);
        let own = rustix::process::getrlimit(Resource::Nofile);
        limit_files(&mut command, Rlimit { current: Some(97), maximum: own.maximum });
        assert_eq!(command.output().unwrap().stdout, b"97\n");
    }

    #[test]
    fn what_cannot_be_done_or_run_is_the_error_of_the_spawn() {
        let mut nowhere = Command::new("true");
        run_on(&mut nowhere, &[]);
        assert_eq!(nowhere.spawn().unwrap_err().kind(), io::ErrorKind::InvalidInput);
        let mut missing = Command::new("/no/such/program");
        die_with_parent(&mut missing);
        assert_eq!(missing.spawn().unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    #[expect(clippy::disallowed_methods, reason = "a thread that ends")]
    fn a_child_ends_with_the_thread_that_started_it() {
        use std::os::unix::process::ExitStatusExt as _;
        let start = || {
            let mut command = Command::new("sleep");
            die_with_parent(command.arg("1000"));
            command.spawn().unwrap()
        };
        let mut child = std::thread::spawn(start).join().unwrap();
        assert_eq!(child.wait().unwrap().signal(), Some(9));
    }
}
