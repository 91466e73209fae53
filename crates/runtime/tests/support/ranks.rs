//! Ranks as processes that a test watches, stops and kills.
//!
//! A rank is the test program once more, told by its environment which job of the test's table to do. It reports by lines on
//! its standard output that begin with a marker (*events*) and obeys lines on its standard input (*orders*), so that a test
//! waits for what has happened instead of sleeping. The store is served by the test itself: no killed rank takes it along.
//!
//! Ranks end with the test, also if it is killed. If an event does not arrive in time, the test fails and shows the output of
//! all ranks and what their threads are doing.

use std::fmt::{self, Display, Write as _};
use std::fs;
use std::io::{BufRead, BufReader, Read, Write as _};
use std::net::SocketAddr;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, getppid, kill_process, set_parent_process_death_signal};
use tenfold::Seat;
use tenfold_store::{Server, ServerOptions, TcpStore, TcpStoreOptions};

use super::hosts::Hosts;
use super::namespace::Namespace;

/// The name of a job, and what a rank does for it.
pub type Jobs = &'static [(&'static str, fn(&Rank))];

const ENTRY: &str = "rank_entry";
const MARKER: &str = "@event ";
const JOB: &str = "RANK_JOB";
const RANK: &str = "RANK_NUMBER";
const SIZE: &str = "RANK_COUNT";
const STORE: &str = "RANK_STORE";
const ARGUMENT: &str = "RANK_ARGUMENT";
const PARENT: &str = "RANK_PARENT";

/// Nothing in these tests takes this long unless it hangs.
pub const HANG: Duration = Duration::from_secs(40);

/// A store server for ranks of this host.
pub fn local_store() -> Server {
    Server::start(ServerOptions::new("127.0.0.1", 0)).unwrap()
}

// ── in a rank ──────────────────────────────────────────────────────────────────────────────────────────────

/// What a rank knows about itself.
#[derive(Debug)]
pub struct Rank {
    pub rank: usize,
    pub size: usize,
    /// What the test said to all ranks of the job.
    pub argument: String,
    store: SocketAddr,
}

impl Rank {
    pub fn seat(&self) -> Seat {
        Seat { rank: self.rank, size: self.size }
    }

    /// A connection of its own to the store.
    pub fn store(&self) -> Arc<TcpStore> {
        let options = TcpStoreOptions::new(self.store.ip().to_string(), self.store.port()).timeout(HANG);
        Arc::new(TcpStore::open(options).expect("the test serves the store"))
    }

    /// Tells the test something; it may have several lines.
    pub fn event(&self, text: impl Display) {
        println!("{MARKER}{}", text.to_string().replace('\\', "\\\\").replace('\n', "\\n"));
    }

    /// Tells the test every line of the log from now on, beginning with its level.
    pub fn tell_log(&self) {
        let log = tracing_subscriber::fmt().without_time().with_target(false).with_ansi(false);
        log.with_writer(|| LogTeller).init();
    }

    /// Waits for the test's next order.
    pub fn order(&self) -> String {
        let mut line = String::new();
        let length = std::io::stdin().read_line(&mut line).unwrap();
        assert!(length > 0, "the test has no more orders");
        line.trim_end().to_owned()
    }
}

struct LogTeller;

impl std::io::Write for LogTeller {
    fn write(&mut self, line: &[u8]) -> std::io::Result<usize> {
        print!("{MARKER}{}", String::from_utf8_lossy(line).trim_start()); // a line is written in one piece
        Ok(line.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// The whole life of a process that [`Job::start`] started; nothing at all in any other.
pub fn run_as_rank(jobs: Jobs) {
    let read = |name| std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set"));
    let Ok(name) = std::env::var(JOB) else {
        return println!("not a test, but where the ranks of the other tests begin");
    };
    set_parent_process_death_signal(Some(Signal::KILL)).unwrap();
    // If the parent had died before that call, the signal would never be sent.
    let parent = getppid().map_or(0, |pid| pid.as_raw_nonzero().get());
    assert_eq!(parent.to_string(), read(PARENT), "the test has ended");
    let (_, job) = jobs.iter().find(|(job, _)| *job == name).unwrap_or_else(|| panic!("no job `{name}`"));
    job(&Rank {
        rank: read(RANK).parse().unwrap(),
        size: read(SIZE).parse().unwrap(),
        argument: read(ARGUMENT),
        store: read(STORE).parse().unwrap(),
    });
}

// ── in the test ────────────────────────────────────────────────────────────────────────────────────────────

/// What ranks must do, and where.
#[derive(Debug)]
pub struct Job<'a> {
    name: &'static str,
    size: usize,
    argument: String,
    environment: Vec<(String, String)>,
    places: Vec<&'a Namespace>,
}

impl<'a> Job<'a> {
    /// On this host.
    pub fn new(name: &'static str, size: usize) -> Job<'a> {
        Job { name, size, argument: String::new(), environment: Vec::new(), places: Vec::new() }
    }

    /// The same number of ranks on each host, neighbours together.
    pub fn spread(name: &'static str, per_host: usize, hosts: &'a Hosts) -> Job<'a> {
        let places: Vec<_> = (0..per_host * hosts.count()).map(|rank| rank / per_host).collect();
        Job::place(name, &places, hosts)
    }

    /// A rank on each of these hosts; a host may come several times.
    pub fn place(name: &'static str, places: &[usize], hosts: &'a Hosts) -> Job<'a> {
        let namespaces = places.iter().map(|host| hosts.namespace(*host)).collect();
        Job { places: namespaces, ..Job::new(name, places.len()) }
    }

    pub fn argument(mut self, argument: impl Display) -> Job<'a> {
        self.argument = argument.to_string();
        self
    }

    pub fn environment(mut self, name: &str, value: impl Display) -> Job<'a> {
        self.environment.push((name.to_owned(), value.to_string()));
        self
    }

    /// Starts the ranks. The calling thread must live as long as the ranks: a rank is killed when its parent *thread* ends.
    pub fn start(self, store: SocketAddr) -> Ranks {
        let board = Arc::new(Board::new(self.size));
        let mut ranks = Ranks { processes: Vec::new(), board };
        for rank in 0..self.size {
            let mut command = self.command(rank, store);
            let mut child = match self.places.get(rank) {
                Some(place) => place.inside(|| command.spawn().unwrap()),
                None => command.spawn().unwrap(),
            };
            ranks.board.listen(rank, Stream::Output, child.stdout.take().unwrap());
            ranks.board.listen(rank, Stream::Errors, child.stderr.take().unwrap());
            let orders = child.stdin.take().unwrap();
            ranks.processes.push(Process { child, orders });
        }
        ranks
    }

    fn command(&self, rank: usize, store: SocketAddr) -> Command {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", ENTRY, "--ignored", "--nocapture", "--test-threads=1"])
            .envs(self.environment.iter().map(|(name, value)| (name, value)))
            .env(JOB, self.name)
            .env(RANK, rank.to_string())
            .env(SIZE, self.size.to_string())
            .env(STORE, store.to_string())
            .env(ARGUMENT, &self.argument)
            .env(PARENT, std::process::id().to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }
}

/// Something that a rank told, and when the test heard it.
#[derive(Clone, Debug)]
pub struct Event {
    pub at: Instant,
    pub text: String,
}

/// A rank that is no more.
#[derive(Debug)]
pub struct Ended {
    pub status: ExitStatus,
    pub events: Vec<Event>,
    pub stderr: String,
}

impl Ended {
    /// What it told, without the times.
    pub fn told(&self) -> Vec<&str> {
        self.events.iter().map(|event| event.text.as_str()).collect()
    }
}

/// Running ranks; killed when this value goes.
#[derive(Debug)]
pub struct Ranks {
    processes: Vec<Process>,
    board: Arc<Board>,
}

#[derive(Debug)]
struct Process {
    child: Child,
    orders: ChildStdin,
}

impl Ranks {
    pub fn pid(&self, rank: usize) -> u32 {
        self.processes[rank].child.id()
    }

    /// Waits for the next event of `rank` that begins like this, and passes over those before it.
    pub fn wait_for_event(&mut self, rank: usize, beginning: &str, within: Duration) -> Event {
        let deadline = Instant::now() + within;
        match self.board.wait(deadline, |words| words[rank].next(beginning)) {
            Ok(event) => event,
            Err(why) => {
                self.give_up(&format!("rank {rank} did not tell `{beginning}` within {within:?}: {why}"))
            }
        }
    }

    /// The same of every rank.
    pub fn wait_for_all(&mut self, beginning: &str, within: Duration) -> Vec<Event> {
        let deadline = Instant::now() + within;
        let left = || deadline.saturating_duration_since(Instant::now());
        (0..self.processes.len()).map(|rank| self.wait_for_event(rank, beginning, left())).collect()
    }

    /// Waiting for events of `rank` finds only those that it has not told yet.
    pub fn pass_over(&mut self, rank: usize) {
        let words = &mut self.board.words.lock().unwrap()[rank];
        words.heard = words.events.len();
    }

    /// Gives `rank` an order; nothing happens if it is no more.
    pub fn tell(&mut self, rank: usize, order: &str) {
        let _ = writeln!(self.processes[rank].orders, "{order}");
    }

    pub fn tell_all(&mut self, order: &str) {
        (0..self.processes.len()).for_each(|rank| self.tell(rank, order));
    }

    pub fn signal(&self, rank: usize, signal: Signal) {
        let pid = Pid::from_child(&self.processes[rank].child);
        kill_process(pid, signal).expect("it is our child and not waited for");
    }

    pub fn kill(&self, rank: usize) {
        self.signal(rank, Signal::KILL);
    }

    /// Stops it, and returns when every thread of it has stopped.
    pub fn stop(&self, rank: usize) {
        self.signal(rank, Signal::STOP);
        let start = Instant::now();
        while !threads(self.pid(rank)).iter().all(|thread| thread.state == 'T') {
            assert!(start.elapsed() < HANG, "rank {rank} does not stop");
            std::thread::yield_now();
        }
    }

    pub fn cont(&self, rank: usize) {
        self.signal(rank, Signal::CONT);
    }

    /// Waits until all have ended.
    pub fn join(mut self, within: Duration) -> Vec<Ended> {
        let deadline = Instant::now() + within;
        let all_silent = |words: &mut Vec<Words>| words.iter().all(|words| words.open == 0).then_some(Ok(()));
        if let Err(why) = self.board.wait(deadline, all_silent) {
            self.give_up(&format!("not all ranks ended within {within:?}: {why}"));
        }
        let statuses: Vec<_> =
            self.processes.iter_mut().map(|process| process.child.wait().unwrap()).collect();
        let mut words = self.board.words.lock().unwrap();
        let ended = |(status, words): (ExitStatus, Words)| {
            let stderr = words.errors.concat();
            Ended { status, events: words.events, stderr }
        };
        std::iter::zip(statuses, words.drain(..)).map(ended).collect()
    }

    /// Waits until all have ended, each of them well; what they told.
    pub fn join_well(self, within: Duration) -> Vec<Ended> {
        let ended = self.join(within);
        let bad = ended.iter().position(|end| !end.status.success());
        if let Some(bad) = bad {
            let mut text = format!("rank {bad} of {} did not end well\n", ended.len());
            for (rank, end) in ended.iter().enumerate() {
                let Ended { status, stderr, .. } = end;
                writeln!(text, "── rank {rank}, {status}\ntold: {:?}\n{stderr}", end.told()).unwrap();
            }
            panic!("{text}");
        }
        ended
    }

    fn give_up(&mut self, complaint: &str) -> ! {
        let mut text = format!("{complaint}\n");
        let words = self.board.words.lock().unwrap();
        for (rank, (process, words)) in std::iter::zip(&mut self.processes, words.iter()).enumerate() {
            let state = match process.child.try_wait().unwrap() {
                Some(status) => status.to_string(),
                None => format!("running: {}", Threads(threads(process.child.id()))),
            };
            writeln!(text, "── rank {rank} (pid {}), {state}\n{words}", process.child.id()).unwrap();
        }
        drop(words);
        panic!("{text}");
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for process in &mut self.processes {
            let _ = process.child.kill(); // it may have ended by itself; a stopped one is killed too
            let _ = process.child.wait();
        }
    }
}

// ── what ranks say ─────────────────────────────────────────────────────────────────────────────────────────

#[derive(Clone, Copy, Debug)]
enum Stream {
    Output,
    Errors,
}

/// What one rank has said so far.
#[derive(Debug, Default)]
struct Words {
    events: Vec<Event>,
    /// Events before this one have been waited for.
    heard: usize,
    /// Lines that are not events, and the standard error.
    errors: Vec<String>,
    /// Streams that may say more.
    open: usize,
}

impl Words {
    /// The next event that begins so; an error if there will be none.
    fn next(&mut self, beginning: &str) -> Option<Result<Event, &'static str>> {
        let found = self.events[self.heard..].iter().position(|event| event.text.starts_with(beginning));
        match found {
            Some(index) => {
                self.heard += index + 1;
                Some(Ok(self.events[self.heard - 1].clone()))
            }
            None if self.open == 0 => Some(Err("it ended")),
            None => None,
        }
    }
}

impl Display for Words {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for event in &self.events {
            writeln!(f, "told: {}", event.text)?;
        }
        self.errors.iter().try_for_each(|line| f.write_str(line))
    }
}

/// What all ranks have said, and a bell for those who wait for more.
#[derive(Debug)]
struct Board {
    words: Mutex<Vec<Words>>,
    changed: Condvar,
}

impl Board {
    fn new(size: usize) -> Board {
        Board { words: Mutex::new((0..size).map(|_| Words::default()).collect()), changed: Condvar::new() }
    }

    /// Starts a thread that writes down what comes from `source`, until that ends.
    fn listen(self: &Arc<Self>, rank: usize, stream: Stream, source: impl Read + Send + 'static) {
        self.words.lock().unwrap()[rank].open += 1;
        let board = self.clone();
        std::thread::spawn(move || {
            let mut source = BufReader::new(source);
            let mut line = Vec::new();
            // A killed rank may leave half a line, in half a character.
            while source.read_until(b'\n', &mut line).is_ok_and(|length| length > 0) {
                board.note(rank, stream, &String::from_utf8_lossy(&line));
                line.clear();
            }
            let mut words = board.words.lock().unwrap();
            // A test that has collected the words has no room for more.
            if let Some(words) = words.get_mut(rank) {
                words.open -= 1;
            }
            board.changed.notify_all();
        });
    }

    fn note(&self, rank: usize, stream: Stream, line: &str) {
        let at = Instant::now();
        let mut words = self.words.lock().unwrap();
        let Some(words) = words.get_mut(rank) else { return };
        // The test runner may have written something in front of it.
        match (stream, line.split_once(MARKER)) {
            (Stream::Output, Some((_, text))) => words.events.push(Event { at, text: decode(text) }),
            (Stream::Output, None) if ["", "running 1 test"].contains(&line.trim_end()) => (),
            _ => words.errors.push(line.to_owned()),
        }
        self.changed.notify_all();
    }

    /// Waits until `look` finds something.
    fn wait<T>(
        &self,
        deadline: Instant,
        mut look: impl FnMut(&mut Vec<Words>) -> Option<Result<T, &'static str>>,
    ) -> Result<T, &'static str> {
        let mut words = self.words.lock().unwrap();
        loop {
            if let Some(found) = look(&mut words) {
                return found;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err("the time is over");
            }
            words = self.changed.wait_timeout(words, left).unwrap().0;
        }
    }
}

/// The text whose line breaks [`Rank::event`] has written as `\n`, and backslashes as two.
fn decode(line: &str) -> String {
    let mut text = String::new();
    let mut characters = line.trim_end_matches('\n').chars();
    while let Some(character) = characters.next() {
        text.push(match character {
            '\\' if characters.as_str().starts_with('n') => '\n',
            other => other,
        });
        if character == '\\' {
            characters.next();
        }
    }
    text
}

// ── what their threads do ──────────────────────────────────────────────────────────────────────────────────

struct Thread {
    name: String,
    state: char,
    waits_in: String,
}

struct Threads(Vec<Thread>);

/// The threads of a process; those that end meanwhile are left out.
fn threads(pid: u32) -> Vec<Thread> {
    let Ok(tasks) = fs::read_dir(format!("/proc/{pid}/task")) else { return Vec::new() };
    let look = |path: std::path::PathBuf| {
        let read = |file| fs::read_to_string(path.join(file)).ok();
        let state = read("stat")?.rsplit_once(") ")?.1.chars().next()?;
        Some(Thread { name: read("comm")?.trim_end().to_owned(), state, waits_in: read("wchan")? })
    };
    tasks.flatten().filter_map(|task| look(task.path())).collect()
}

impl Display for Threads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, Thread { name, state, waits_in }) in self.0.iter().enumerate() {
            let comma = if index == 0 { "" } else { ", " };
            write!(f, "{comma}`{name}` {state} in {waits_in}")?;
        }
        Ok(())
    }
}
