//! `tenfold serve` as a child process that does not outlive its test.

#![allow(dead_code, unreachable_pub, reason = "each test file uses its part")]
#![allow(
    clippy::disallowed_methods,
    clippy::unwrap_used,
    reason = "tests: threads, and helpers that may fail"
)]

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

pub const TENFOLD: &str = env!("CARGO_BIN_EXE_tenfold");

/// Nothing in these tests takes this long unless it hangs.
const HANG: Duration = Duration::from_secs(40);

/// A child process that is killed with its test.
pub struct Process(pub Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill(); // it may have ended by itself; a stopped one is killed too
        let _ = self.0.wait();
    }
}

impl Process {
    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).expect("it is our child and not waited for");
    }

    /// Stops it, and returns when every thread of it has stopped.
    pub fn freeze(&self) {
        self.signal(Signal::STOP);
        let stopped = |stat: String| stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('T'));
        let start = Instant::now();
        let threads = || std::fs::read_dir(format!("/proc/{}/task", self.0.id())).unwrap().flatten();
        while !threads().all(|thread| stopped(std::fs::read_to_string(thread.path().join("stat")).unwrap())) {
            assert!(start.elapsed() < HANG, "it does not stop");
            std::thread::park_timeout(Duration::from_millis(1));
        }
    }
}

/// A running server.
pub struct Serve {
    pub process: Process,
    pub address: SocketAddr,
    output: BufReader<ChildStdout>,
    log: mpsc::Receiver<String>,
}

impl Serve {
    pub fn start(arguments: &[&str]) -> Serve {
        let mut command = Command::new(TENFOLD);
        command.args(["serve", "--port", "0"]).args(arguments);
        Serve::spawn(command)
    }

    /// From a command that runs `tenfold serve`.
    pub fn spawn(mut command: Command) -> Serve {
        let child =
            command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut process = Process(child);
        let mut line = String::new();
        let mut output = BufReader::new(process.0.stdout.take().unwrap());
        output.read_line(&mut line).unwrap();
        let log = BufReader::new(process.0.stderr.take().unwrap());
        let Some(address) = line.trim().strip_prefix("listening on ") else {
            panic!("{line:?}: {:?}", log.lines().collect::<Vec<_>>());
        };
        let address = address.parse().unwrap();
        let (lines, inbox) = mpsc::channel();
        std::thread::spawn(move || {
            // A test that has ended no longer listens.
            log.lines().map_while(Result::ok).all(|line| lines.send(line).is_ok());
        });
        Serve { process, address, output, log: inbox }
    }

    /// The next line on standard output.
    pub fn next_line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.trim_end().into()
    }

    /// Waits for a line on standard error that begins like this.
    pub fn said(&self, beginning: &str) -> String {
        loop {
            let line = self.log.recv_timeout(HANG).expect("it says so before it ends");
            if line.starts_with(beginning) {
                return line;
            }
        }
    }

    /// Lines on standard error so far.
    pub fn log_lines(&self) -> Vec<String> {
        self.log.try_iter().collect()
    }

    /// Waits for it to exit, and returns the rest of its output.
    pub fn ended(&mut self) -> (ExitStatus, Vec<String>) {
        let mut rest = Vec::new();
        // Standard error ends with the process.
        loop {
            match self.log.recv_timeout(HANG) {
                Ok(line) => rest.push(line),
                Err(mpsc::RecvTimeoutError::Disconnected) => break,
                Err(mpsc::RecvTimeoutError::Timeout) => panic!("the server did not end"),
            }
        }
        (self.process.0.wait().unwrap(), rest)
    }

    /// Bytes of memory.
    pub fn resident(&self) -> usize {
        let statm = std::fs::read_to_string(format!("/proc/{}/statm", self.process.0.id())).unwrap();
        statm.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * 4096
    }
}
