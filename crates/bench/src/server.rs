//! The servers under test: child processes that never outlive us.
//!
//! Three things ensure that: a server is killed when its [`Server`] is dropped, which happens on every error
//! and every signal; the kernel kills it if we are killed ([`host`]); and PyTorch's watches its standard
//! input, which ends when we do.
//!
//! The resources of a server are read from `/proc`; without it, those columns stay empty.
#![expect(
    clippy::disallowed_methods,
    reason = "a benchmark reads the clock, and looks at a server until it rests"
)]

use std::ffi::OsString;
use std::fmt;
use std::fs;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use super::cores::{self, Cores};
use super::load;
use super::{Failure, Interrupt};
use tenfold_console::Program;

/// Importing PyTorch from a cold disk takes a while.
const START_MAX: Duration = Duration::from_secs(120);
const GLANCE: Duration = Duration::from_millis(100);
/// A first connection slower than this is worth mentioning.
const FIRST_CONNECTION_SLOW: Duration = Duration::from_secs(1);

/// PyTorch's server looks up the name of every client, on its only thread, for its log. One lost packet stops
/// it for 5 s, and 1,000 clients took 100 s to connect on a machine with a lossy DNS. That says nothing about
/// the server, so it gets the best case: the first look-up finds no name server, fails immediately, and
/// PyTorch then makes no more.
const PYTORCH_SERVER: &str = r#"
import ctypes, sys
try:
    import torch.distributed as dist
except Exception as error:
    print(f"no torch: {type(error).__name__}: {error}", flush=True)
    sys.exit(3)
try:
    libc = ctypes.CDLL(None)
    libc.__res_init()
    libc.__res_state.restype = ctypes.c_void_p
    ctypes.c_int.from_address(libc.__res_state() + 16).value = 0  # nscount, of this thread
except Exception:
    pass  # not glibc: as shipped
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=True)
print(f"listening on 127.0.0.1:{store.port}", flush=True)
sys.stdin.read()
"#;

#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Implementation {
    Tenfold,
    Torch,
}

impl fmt::Display for Implementation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Implementation::Tenfold => "tenfold",
            Implementation::Torch => "torch",
        })
    }
}

/// How to start a server of one implementation.
#[derive(Clone, Debug)]
pub(crate) struct Recipe {
    pub(crate) implementation: Implementation,
    pub(crate) program: PathBuf,
    arguments: Vec<OsString>,
}

impl Recipe {
    /// Ours: this program, or the command line given instead.
    pub(crate) fn tenfold(command: Option<&str>) -> Result<Self, Failure> {
        let implementation = Implementation::Tenfold;
        match command {
            None => {
                let mut own = Program::own().command();
                own.args(["serve", "--host", "127.0.0.1", "--port", "0"]);
                let arguments = own.get_args().map(OsString::from).collect();
                Ok(Recipe { implementation, program: own.get_program().into(), arguments })
            }
            Some(command) => {
                let mut words = command.split_whitespace();
                let program = words.next().ok_or_else(|| Failure::new("`--server-command` is empty"))?;
                let arguments = words.map(OsString::from).collect();
                Ok(Recipe { implementation, program: program.into(), arguments })
            }
        }
    }

    /// Ours, with a page that shows it.
    pub(crate) fn tenfold_with_dashboard() -> Self {
        let mut own = Program::own().command();
        own.args(["serve", "--host", "127.0.0.1", "--port", "0", "--dashboard=127.0.0.1:0"]);
        let arguments = own.get_args().map(OsString::from).collect();
        Recipe { implementation: Implementation::Tenfold, program: own.get_program().into(), arguments }
    }

    /// Relays of the server at `upstream`, in one process.
    pub(crate) fn relays(upstream: SocketAddr, count: usize) -> Self {
        let mut own = Program::own().command();
        own.args(["bench", "scale-relays"]);
        own.args([format!("--upstream={upstream}"), format!("--count={count}")]);
        let arguments = own.get_args().map(OsString::from).collect();
        Recipe { implementation: Implementation::Tenfold, program: own.get_program().into(), arguments }
    }

    /// The same with further arguments.
    pub(crate) fn with(mut self, arguments: &[&str]) -> Self {
        self.arguments.extend(arguments.iter().map(OsString::from));
        self
    }

    pub(crate) fn torch(python: PathBuf) -> Self {
        let arguments = ["-c", PYTORCH_SERVER].map(OsString::from).to_vec();
        Recipe { implementation: Implementation::Torch, program: python, arguments }
    }
}

/// A running server that has answered its first client.
#[derive(Debug)]
pub(crate) struct Server {
    pub(crate) implementation: Implementation,
    pub(crate) address: SocketAddr,
    child: Child,
    _stdin: Option<ChildStdin>, // closing it makes PyTorch's server exit
}

impl Server {
    pub(crate) fn start(recipe: &Recipe, cores: &Cores, interrupt: &Interrupt) -> Result<Self, Failure> {
        Server::start_talkative(recipe, cores, interrupt).map(|(server, _)| server)
    }

    /// Starts one that prints more than its address; returns the lines after that.
    pub(crate) fn start_talkative(
        recipe: &Recipe,
        cores: &Cores,
        interrupt: &Interrupt,
    ) -> Result<(Self, Lines), Failure> {
        let program = recipe.program.display();
        let mut child = Program::own()
            .command()
            .args(["bench", "host-server"])
            .args(cores.servers.iter().map(|core| format!("--core={core}")))
            .arg("--")
            .arg(&recipe.program)
            .args(&recipe.arguments)
            .env("TORCH_CPP_LOG_LEVEL", "ERROR") // otherwise PyTorch warns about the look-up
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| Failure::new(format!("cannot start `{program}`: {error}")))?;
        let stdin = child.stdin.take();
        let stdout = child.stdout.take().expect("it was asked for");
        let address = SocketAddr::from(([127, 0, 0, 1], 0)); // until it has printed its own
        let mut server = Server { implementation: recipe.implementation, address, child, _stdin: stdin };
        let starting = |failure: Failure| failure.during(format_args!("starting `{program}`"));
        let lines = Lines::of(stdout).map_err(starting)?;
        server.address = parse_line(&lines.next(interrupt).map_err(starting)?, recipe)?;
        server.warm_up()?;
        Ok((server, lines))
    }

    /// If PyTorch's look-ups could not be avoided (see above), the first may take 10 s; if it fails, it is
    /// the last.
    fn warm_up(&self) -> Result<(), Failure> {
        let start = Instant::now();
        for _ in 0..3 {
            load::open(self.address).map_err(|error| {
                load::lost(&error).during(format_args!("first connection to {}", self.implementation))
            })?;
        }
        let elapsed = start.elapsed();
        if elapsed > FIRST_CONNECTION_SLOW {
            eprintln!(
                "note: the first connection to {}'s server took {:.1} s (its reverse-DNS look-up); not in the figures",
                self.implementation,
                elapsed.as_secs_f64()
            );
        }
        Ok(())
    }

    /// CPU time of all its threads, once it is idle: a thread's time is exact only while it sleeps.
    pub(crate) fn cpu_time(&self) -> Option<Duration> {
        const LOOKS_MAX: u32 = 40; // a server that polls is never idle; then use the last value
        let mut before = self.cpu_time_now()?;
        for _ in 0..LOOKS_MAX {
            thread::sleep(Duration::from_micros(500));
            let now = self.cpu_time_now()?;
            if now == before {
                break;
            }
            before = now;
        }
        Some(before)
    }

    fn cpu_time_now(&self) -> Option<Duration> {
        let process = format!("/proc/{}", self.child.id());
        let mut total = Duration::ZERO;
        for task in fs::read_dir(format!("{process}/task")).ok()? {
            match fs::read_to_string(task.ok()?.path().join("schedstat"))
                .ok()
                .as_deref()
                .and_then(parse_schedstat)
            {
                Some(time) => total += time,
                None => return parse_stat(&fs::read_to_string(format!("{process}/stat")).ok()?),
            }
        }
        Some(total)
    }

    /// Resident memory in bytes.
    pub(crate) fn resident(&self) -> Option<u64> {
        let process = format!("/proc/{}", self.child.id());
        match fs::read_to_string(format!("{process}/smaps_rollup")) {
            Ok(text) => parse_smaps(&text),
            // Less exact: the kernel updates this one in batches.
            Err(_) => {
                let text = fs::read_to_string(format!("{process}/statm")).ok()?;
                let pages: u64 = text.split(' ').nth(1)?.parse().ok()?;
                Some(pages * rustix::param::page_size() as u64)
            }
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // If it has exited already, there is nothing to do.
        let _gone = self.child.kill();
        let _reaped = self.child.wait();
    }
}

/// The output of a server, line by line.
pub(crate) struct Lines(Receiver<std::io::Result<String>>);

impl Lines {
    fn of(stdout: std::process::ChildStdout) -> Result<Self, Failure> {
        let (sender, receiver) = channel();
        // Reads to the end: a server that prints more must not find the pipe full.
        let read = move || {
            for line in BufReader::new(stdout).lines() {
                let _somebody_may_listen = sender.send(line);
            }
        };
        thread::Builder::new()
            .name("server output".into())
            .spawn(read)
            .map_err(|error| Failure::new(format!("cannot start a thread: {error}")))?;
        Ok(Lines(receiver))
    }

    /// The next line, or why there is none.
    pub(crate) fn next(&self, interrupt: &Interrupt) -> Result<String, Failure> {
        let start = Instant::now();
        loop {
            interrupt.check()?;
            match self.0.recv_timeout(GLANCE) {
                Ok(Ok(line)) => return Ok(line),
                Ok(Err(error)) => return Err(Failure::new(format!("cannot read its output: {error}"))),
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Failure::new("it exited without printing its address"));
                }
                Err(RecvTimeoutError::Timeout) if start.elapsed() > START_MAX => {
                    let seconds = START_MAX.as_secs();
                    return Err(Failure::new(format!("it did not say where it listens within {seconds} s")));
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }
}

fn parse_line(line: &str, recipe: &Recipe) -> Result<SocketAddr, Failure> {
    let program = recipe.program.display();
    if let Some(reason) = line.strip_prefix("no torch: ") {
        return Err(Failure::new(format!("`{program}` cannot import torch: {reason}"))
            .hint("name a Python that has PyTorch with `--python` or TENFOLD_PYTHON"));
    }
    line.strip_prefix("listening on ").and_then(|address| address.trim().parse().ok()).ok_or_else(|| {
        Failure::new(format!("`{program}` should print `listening on HOST:PORT`, but printed `{line}`"))
    })
}

fn parse_schedstat(text: &str) -> Option<Duration> {
    text.split(' ').next()?.parse().ok().map(Duration::from_nanos)
}

/// User and system time of `/proc/PID/stat`, in ticks: for kernels without schedstat.
fn parse_stat(text: &str) -> Option<Duration> {
    let (_, fields) = text.rsplit_once(')')?; // the name before it may hold anything
    let mut fields = fields.split_whitespace().skip(11);
    let user: u64 = fields.next()?.parse().ok()?;
    let system: u64 = fields.next()?.parse().ok()?;
    Some(Duration::from_secs_f64((user + system) as f64 / rustix::param::clock_ticks_per_second() as f64))
}

fn parse_smaps(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("Rss:"))?;
    let kilobytes: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kilobytes << 10)
}

/// The process between us and a server.
#[derive(Debug, clap::Args)]
pub(crate) struct HostArgs {
    /// The cores it may use; any if not given.
    #[arg(long = "core")]
    cores: Vec<usize>,
    #[arg(required = true, last = true)]
    command: Vec<OsString>,
}

/// Asks the kernel to kill this process when its parent dies, then becomes the server.
pub(crate) fn host(args: &HostArgs) -> Result<(), Failure> {
    if !args.cores.is_empty() {
        cores::stay_on(&args.cores)?;
    }
    tie_to_parent()?;
    let error =
        std::os::unix::process::CommandExt::exec(Command::new(&args.command[0]).args(&args.command[1..]));
    Err(Failure::new(format!("cannot run `{}`: {error}", args.command[0].display())))
}

/// Asks the kernel to kill this process when its parent dies.
pub(crate) fn tie_to_parent() -> Result<(), Failure> {
    #[cfg(target_os = "linux")]
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))
        .map_err(|error| Failure::new(format!("cannot tie a process to its parent: {error}")))?;
    Ok(())
}

/// Raises the limit of open files of this process and its children to the system's maximum; returns it.
pub(crate) fn raise_file_limit() -> u64 {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    let current = if setrlimit(Resource::Nofile, raised).is_ok() { limit.maximum } else { limit.current };
    current.unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_kernel_writes_about_a_process_is_read() {
        assert_eq!(parse_schedstat("59019265 94962 1\n"), Some(Duration::from_nanos(59_019_265)));
        let stat = "7 (a ) b) S 1 2 3 0 -1 4194560 1 2 3 4 250 50 0 0 20 0 1 0 1 2 3";
        let seconds = 300.0 / rustix::param::clock_ticks_per_second() as f64;
        assert_eq!(parse_stat(stat), Some(Duration::from_secs_f64(seconds)));
        let smaps = "55c5-7fff ---p 00000000 00:00 0   [rollup]\nRss:                1632 kB\nPss: 377 kB\n";
        assert_eq!(parse_smaps(smaps), Some(1632 << 10));
    }

    #[test]
    fn a_server_says_where_it_listens_or_why_it_cannot() {
        let recipe = Recipe::torch("python3".into());
        let says = |line| parse_line(line, &recipe).map_err(|failure| failure.to_string());
        assert_eq!(says("listening on 127.0.0.1:29500"), Ok(SocketAddr::from(([127, 0, 0, 1], 29500))));
        assert_eq!(
            says("no torch: ModuleNotFoundError: No module named 'torch'").unwrap_err(),
            "`python3` cannot import torch: ModuleNotFoundError: No module named 'torch'\n  \
             hint: name a Python that has PyTorch with `--python` or TENFOLD_PYTHON"
        );
        assert_eq!(
            says("hello").unwrap_err(),
            "`python3` should print `listening on HOST:PORT`, but printed `hello`"
        );
    }
}
