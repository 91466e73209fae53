//! `tenfold run --on-failure=recover`: processes that die are replaced while the others go on.
//!
//! The ranks are shell scripts. The test plays what the library does in them: it writes into the ranks' store
//! which processes form the next generation.

#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "tests: helpers that may fail")]

mod launching;
mod serving;

use std::io::{BufRead as _, BufReader, Read as _};
use std::path::Path;
use std::process::{ChildStderr, ExitStatus};
use std::sync::Arc;

use launching::{Run, command, handle, pid, wait_until, wait_until_gone};
use rustix::process::{Signal, kill_process};
use serde_json::{Value, json};
use tenfold_store::{PrefixStore, StoreExt as _, TcpStore};

/// Each process prints what it is, then ends with the code that the test sends it.
const SCRIPT: &str = "mkfifo FOLDER/$$
    echo $$ ${RANK-none} ${LOCAL_RANK-none} ${TENFOLD_JOINING-none} $TENFOLD_ON_FAILURE $MASTER_PORT $TORCHELASTIC_RESTART_COUNT
    read code < FOLDER/$$; exit $code";

/// A process of the job, as it has described itself.
#[derive(Clone, Debug, PartialEq)]
struct Worker {
    shown_as: String,
    process: String,
    rank: String,
    local_rank: String,
    joining: String,
    port: u16,
    round: u64,
}

impl Worker {
    fn kill(&self) {
        kill_process(pid(&self.process), Signal::KILL).unwrap();
    }
}

/// A launcher whose notes and ranks' lines the test reads.
struct Job {
    run: Run,
    notes: BufReader<ChildStderr>,
    folder: tempfile::TempDir,
}

impl Job {
    fn start(words: &[&str]) -> Job {
        Job::start_with(words, SCRIPT)
    }

    fn start_with(words: &[&str], script: &str) -> Job {
        let folder = tempfile::tempdir().unwrap();
        let script = script.replace("FOLDER", folder.path().to_str().unwrap());
        let words = [&["--on-failure=recover"], words, &[&script]].concat();
        let mut command = command(&words);
        // As in a rank of another launcher.
        command.env("TENFOLD_JOINING", "outer").env("RANK", "9").env("LOCAL_RANK", "9");
        command.env("TEST_FOLDER", folder.path());
        let mut run = Run::spawn(&mut command);
        let notes = BufReader::new(run.launcher.0.stderr.take().unwrap());
        Job { run, notes, folder }
    }

    /// The next processes, by rank; spares last.
    fn workers(&mut self, count: usize) -> Vec<Worker> {
        let mut workers: Vec<Worker> = (0..count).map(|_| self.worker()).collect();
        workers.sort_by(|a, b| (a.rank == "none", &a.rank).cmp(&(b.rank == "none", &b.rank)));
        workers
    }

    fn worker(&mut self) -> Worker {
        let mut line = String::new();
        self.run.output.read_line(&mut line).unwrap();
        let (shown_as, said) = line.trim_end().split_once("] ").unwrap();
        let words: Vec<&str> = said.split(' ').collect();
        let [process, rank, local_rank, joining, on_failure, port, round] = words[..] else {
            panic!("{line}")
        };
        assert_eq!(on_failure, "recover");
        Worker {
            shown_as: shown_as.trim_start_matches('[').into(),
            process: process.into(),
            rank: rank.into(),
            local_rank: local_rank.into(),
            joining: joining.into(),
            port: port.parse().unwrap(),
            round: round.parse().unwrap(),
        }
    }

    fn send(&self, worker: &Worker, code: u8) {
        std::fs::write(self.folder.path().join(&worker.process), format!("{code}\n")).unwrap();
    }

    /// The first note that contains these words.
    fn note(&mut self, words: &str) -> String {
        let mut seen = String::new();
        loop {
            let mut line = String::new();
            let count = self.notes.read_line(&mut line).unwrap();
            assert_ne!(count, 0, "the launcher never says `{words}`:\n{seen}");
            if line.contains(words) {
                return line.trim_end().into();
            }
            seen += &line;
        }
    }

    /// The rest of what the launcher says, and how it ends.
    fn ended(mut self) -> (String, ExitStatus) {
        let mut said = String::new();
        self.notes.read_to_string(&mut said).unwrap();
        (said, self.run.launcher.0.wait().unwrap())
    }
}

fn host() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// Writes a generation, as its rank 0 does. `left` and `joined` are ranks with their processes.
fn publish(number: u64, ranks: &[&Worker], left: &[(usize, &Worker)], joined: &[(usize, &Worker)]) {
    publish_at("127.0.0.1", number, ranks, left, joined);
}

fn publish_at(
    address: &str,
    number: u64,
    ranks: &[&Worker],
    left: &[(usize, &Worker)],
    joined: &[(usize, &Worker)],
) {
    let host = host();
    let member = |rank: usize, worker: &Worker| -> Value {
        let process: u32 = worker.process.parse().unwrap();
        let joining = (worker.joining != "none").then_some(&worker.joining);
        json!({"rank": rank, "pid": process, "host": host, "joining": joining, "local_rank": rank})
    };
    let changes = |list: &[(usize, &Worker)]| -> Vec<Value> {
        list.iter().map(|(rank, worker)| member(*rank, worker)).collect()
    };
    let members: Vec<Value> = ranks.iter().enumerate().map(|(rank, worker)| member(rank, worker)).collect();
    let text = json!({"generation": number, "took_ms": 84, "at_unix_ms": 1_763_280_000_000_u64,
        "ranks": members, "left": changes(left), "joined": changes(joined)});
    let store = TcpStore::connect(address, ranks[0].port).unwrap();
    let prefix = format!("/worker/attempt_{}", ranks[0].round);
    PrefixStore::new(prefix, Arc::new(store)).set("recover/generation", text.to_string()).unwrap();
}

#[test]
fn a_dead_rank_is_replaced_and_the_others_go_on() {
    let mut job = Job::start(&["-n", "3"]);
    let ranks = job.workers(3);
    let described: Vec<_> =
        ranks.iter().map(|rank| (&*rank.rank, &*rank.local_rank, &*rank.joining)).collect();
    assert_eq!(described, [("0", "0", "none"), ("1", "1", "none"), ("2", "2", "none")]);
    let [a, b, c] = &ranks[..] else { unreachable!() };
    publish(1, &[a, b, c], &[], &[]);
    b.kill();
    let report = job.note("rank 1 of 3 failed: killed by SIGKILL after ");
    assert!(report.ends_with(&format!(" s (pid {})", b.process)), "{report}");
    let new = job.worker();
    assert_eq!((&*new.shown_as, &*new.rank, &*new.local_rank, &*new.joining), ("1", "1", "1", "0-3"));
    let expected = format!("tenfold: replacement 1 of 3: started pid {} in place of rank 1", new.process);
    assert_eq!(job.note("replacement 1"), expected);
    publish(2, &[a, &new, c], &[(1, b)], &[(1, &new)]);
    let expected = format!(
        "tenfold: generation 2 after 0.08 s: rank 1 (pid {}, killed by SIGKILL) was replaced by pid {}",
        b.process, new.process
    );
    assert_eq!(job.note("generation 2"), expected);
    [a, &new, c].into_iter().for_each(|worker| job.send(worker, 0));
    let (said, status) = job.ended();
    assert_eq!((said.as_str(), status.code()), ("", Some(0)));
}

#[test]
fn a_spare_becomes_the_dead_rank_and_another_spare_waits() {
    let script = format!("{SCRIPT}\n")
        .replace("; exit", "; echo $code $RANK; [ $code = 7 ] && read code < FOLDER/$$.again; exit");
    let script = format!("mkfifo FOLDER/$$.again; {script}"); // of another writer
    let mut job = Job::start_with(&["-n", "2", "--spares", "1"], &script);
    let workers = job.workers(3);
    let [a, b, spare] = &workers[..] else { unreachable!() };
    assert_eq!((&*spare.shown_as, &*spare.rank, &*spare.local_rank), ("spare", "none", "none"));
    assert_eq!(spare.joining, "0-2");
    publish(1, &[a, b], &[], &[]);
    b.kill();
    job.note("rank 1 of 2 failed: killed by SIGKILL after ");
    let next = job.worker();
    assert_eq!((&*next.shown_as, &*next.joining), ("spare", "0-3"));
    let expected = format!("tenfold: replacement 1 of 3: started the spare pid {}", next.process);
    assert_eq!(job.note("replacement 1"), expected);
    publish(2, &[a, spare], &[(1, b)], &[(1, spare)]);
    job.note("generation 2 after 0.08 s: rank 1 (pid ");
    // It is shown as rank 1 from now on, and a failure of it is one of rank 1.
    job.send(spare, 7);
    let mut line = String::new();
    job.run.output.read_line(&mut line).unwrap();
    assert_eq!(line, "[1] 7\n");
    std::fs::write(job.folder.path().join(format!("{}.again", spare.process)), "5\n").unwrap();
    let expected = format!(" s (pid {})", spare.process);
    assert!(job.note("rank 1 of 2 failed: exit code 5 after ").ends_with(&expected));
    let last = job.worker();
    assert_eq!(last.joining, "0-4");
    publish(3, &[a, &next], &[(1, spare)], &[(1, &next)]);
    let expected = format!(
        "tenfold: generation 3 after 0.08 s: rank 1 (pid {}, exit code 5) was replaced by pid {}",
        spare.process, next.process
    );
    assert_eq!(job.note("generation 3"), expected);
    let waiting = handle(&last.process);
    [a, &next].into_iter().for_each(|worker| job.send(worker, 0));
    let (said, status) = job.ended();
    assert_eq!((said.as_str(), status.code()), ("", Some(0)));
    wait_until_gone(&waiting);
}

#[test]
fn a_program_that_does_not_use_recovery_is_restarted_as_a_whole() {
    let mut job = Job::start(&["-n", "2", "--max-restarts", "1"]);
    let [a, b] = &job.workers(2)[..] else { unreachable!() };
    let other = handle(&a.process);
    job.send(b, 3);
    job.note("the ranks cannot recover: the program has not begun to use recovery");
    wait_until_gone(&other);
    job.note("restart 1 of 1: round 1 starts on 1 node");
    let again = job.workers(2);
    assert!(again.iter().all(|rank| rank.round == 1 && rank.joining == "none"), "{again:?}");
    again.iter().for_each(|rank| job.send(rank, 0));
    assert_eq!(job.ended().1.code(), Some(0));
}

#[test]
fn two_ranks_that_die_at_once_are_both_replaced() {
    let mut job = Job::start(&["-n", "4", "--spares", "1"]);
    let workers = job.workers(5);
    let [a, b, c, d, spare] = &workers[..] else { unreachable!() };
    publish(1, &[a, b, c, d], &[], &[]);
    b.kill();
    c.kill();
    let mut started = [job.worker(), job.worker()];
    started.sort_by(|a, b| a.rank.cmp(&b.rank));
    let [replacement, next] = &started;
    assert_eq!(next.rank, "none", "it waits, since the first spare takes part");
    let (left, rank) = if replacement.rank == "1" { (c, 2) } else { (b, 1) };
    let ranks = if rank == 2 { [a, replacement, spare, d] } else { [a, spare, replacement, d] };
    publish(2, &ranks, &[(1, b), (2, c)], &[(rank, spare), (3 - rank, replacement)]);
    let note = job.note("generation 2");
    let expected = format!(
        "rank {rank} (pid {}, killed by SIGKILL) was replaced by pid {}",
        left.process, spare.process
    );
    assert!(note.contains(&expected), "{note}");
    ranks.into_iter().for_each(|worker| job.send(worker, 0));
    assert_eq!(job.ended().1.code(), Some(0));
}

#[test]
fn a_replacement_that_dies_before_it_joined_is_replaced_until_the_budget_is_used() {
    let mut job = Job::start(&["-n", "2", "--max-restarts", "2"]);
    let [a, b] = &job.workers(2)[..] else { unreachable!() };
    publish(1, &[a, b], &[], &[]);
    let survivor = handle(&a.process);
    b.kill();
    for count in 1..=2 {
        let replacement = job.worker();
        assert_eq!((&*replacement.rank, replacement.joining), ("1", format!("0-{}", count + 1)));
        job.note(&format!("replacement {count} of 2: started pid {}", replacement.process));
        job.send(&Worker { process: replacement.process, ..b.clone() }, 4);
        if count == 1 {
            job.note("rank 1 of 2 failed: exit code 4 after ");
        }
    }
    job.note("the ranks cannot recover: all restarts and replacements are used (2)");
    let (said, status) = job.ended();
    assert!(said.contains("error: rank 1 of 2 failed first: exit code 4 after "), "{said}");
    assert_eq!(status.code(), Some(1));
    wait_until_gone(&survivor);
}

#[test]
fn a_restart_after_replacements_counts_them() {
    let mut job = Job::start(&["-n", "2", "--max-restarts", "2"]);
    let [a, b] = &job.workers(2)[..] else { unreachable!() };
    publish(1, &[a, b], &[], &[]);
    b.kill();
    let replacement = job.worker();
    publish(2, &[a, &replacement], &[(1, b)], &[(1, &replacement)]);
    job.note("generation 2");
    job.send(a, 0);
    wait_until_gone_or_ended(&a.process);
    job.send(&replacement, 6);
    job.note(
        "the ranks cannot recover: rank 0 has already finished, so the others cannot take in another rank 1",
    );
    job.note("restart 1 of 2: round 1 starts on 1 node");
    let [a, b] = &job.workers(2)[..] else { unreachable!() };
    assert_eq!((a.round, b.round), (1, 1));
    publish(1, &[a, b], &[], &[]);
    b.kill();
    job.note("the ranks cannot recover: all restarts and replacements are used (2)");
    let (said, status) = job.ended();
    assert!(said.contains("error: rank 1 of 2 failed first: killed by SIGKILL after "), "{said}");
    assert_eq!(status.code(), Some(1));
}

/// The launcher reaps it.
fn wait_until_gone_or_ended(process: &str) {
    wait_until("it is reaped", || !Path::new(&format!("/proc/{process}")).exists());
}

#[test]
fn a_rank_that_fails_after_another_has_finished_fails_the_job() {
    let mut job = Job::start(&["-n", "2", "--spares", "1", "--max-restarts", "1"]);
    let workers = job.workers(3);
    let [a, b, spare] = &workers[..] else { unreachable!() };
    publish(1, &[a, b], &[], &[]);
    let waiting = handle(&spare.process);
    job.send(a, 0);
    wait_until_gone_or_ended(&a.process);
    b.kill();
    job.note(
        "the ranks cannot recover: rank 0 has already finished, so the others cannot take in another rank 1",
    );
    wait_until_gone(&waiting);
    job.note("restart 1 of 1: ");
    job.run.launcher.signal(Signal::TERM);
    assert_eq!(job.ended().1.code(), Some(1));
}

#[test]
fn a_launcher_that_is_asked_to_stop_during_recovery_stops_everything() {
    let mut job = Job::start(&["-n", "2", "--spares", "1"]);
    let workers = job.workers(3);
    let [a, b, spare] = &workers[..] else { unreachable!() };
    publish(1, &[a, b], &[], &[]);
    b.kill();
    let next = job.worker();
    let all = [&a.process, &spare.process, &next.process].map(|process| handle(process));
    job.run.launcher.signal(Signal::TERM);
    let (said, status) = job.ended();
    assert!(said.ends_with("error: ended by SIGTERM\n"), "{said}");
    assert_eq!(status.code(), Some(1));
    all.iter().for_each(wait_until_gone);
}

#[test]
fn when_all_ranks_die_the_job_is_restarted() {
    let mut job = Job::start(&["-n", "2", "--spares", "1", "--max-restarts", "4"]);
    let workers = job.workers(3);
    let [a, b, spare] = &workers[..] else { unreachable!() };
    publish(1, &[a, b], &[], &[]);
    let waiting = handle(&spare.process);
    job.run.launcher.freeze(); // it notices both together
    let both = [a, b].map(|worker| handle(&worker.process));
    a.kill();
    b.kill();
    both.iter().for_each(wait_until_gone);
    job.run.launcher.signal(Signal::CONT);
    job.note("the ranks cannot recover: no rank of generation 1 is left");
    wait_until_gone(&waiting);
    job.note("round 1 starts on 1 node");
    let again = job.workers(3);
    assert!(again.iter().all(|worker| worker.round == 1), "{again:?}");
    again[..2].iter().for_each(|rank| job.send(rank, 0));
    assert_eq!(job.ended().1.code(), Some(0));
}

#[test]
fn a_spare_that_is_admitted_and_dies_in_the_same_moment_is_replaced_as_a_rank() {
    let mut job = Job::start(&["-n", "2", "--spares", "1"]);
    let workers = job.workers(3);
    let [a, b, spare] = &workers[..] else { unreachable!() };
    publish(1, &[a, b], &[], &[]);
    b.kill();
    let next = job.worker();
    spare.kill();
    publish(2, &[a, spare], &[(1, b)], &[(1, spare)]);
    // The launcher may have noticed the death first, or the generation: then the next spare can take the place.
    let third = job.worker();
    let (fourth, other) = if third.rank == "1" { (&third, &next) } else { (&next, &third) };
    publish(3, &[a, fourth], &[(1, spare)], &[(1, fourth)]);
    job.note("generation 3 after 0.08 s: rank 1 (pid ");
    let waiting = handle(&other.process);
    [a, fourth].into_iter().for_each(|worker| job.send(worker, 0));
    assert_eq!(job.ended().1.code(), Some(0));
    wait_until_gone(&waiting);
}

#[test]
fn what_a_dead_rank_has_started_ends_with_it_and_that_of_others_does_not() {
    // One child in the group of its rank, and one in a session of its own.
    let script = format!("sleep 1000 & setsid sleep 1000 & {SCRIPT}");
    let mut job = Job::start_with(&["-n", "2"], &script);
    let [a, b] = &job.workers(2)[..] else { unreachable!() };
    let folder = job.folder.path().to_path_buf();
    let of_rank = |rank: &str| processes_of_rank(rank, &folder);
    wait_until("all children run", || (of_rank("0").len(), of_rank("1").len()) == (3, 3));
    let (kept, gone) = (of_rank("0"), of_rank("1"));
    publish(1, &[a, b], &[], &[]);
    let gone: Vec<_> = gone.iter().map(|process| handle(process)).collect();
    b.kill();
    gone.iter().for_each(wait_until_gone);
    let replacement = job.worker();
    assert_eq!(of_rank("0"), kept);
    publish(2, &[a, &replacement], &[(1, b)], &[(1, &replacement)]);
    job.note("generation 2");
    [a, &replacement].into_iter().for_each(|worker| job.send(worker, 0));
    assert_eq!(job.ended().1.code(), Some(0));
}

/// The processes of a job that a rank has started, and its own.
fn processes_of_rank(rank: &str, folder: &Path) -> Vec<String> {
    let wanted = [format!("RANK={rank}"), format!("TEST_FOLDER={}", folder.display())];
    let is_it = |process: &String| {
        let Ok(environment) = std::fs::read(format!("/proc/{process}/environ")) else { return false };
        wanted.iter().all(|wanted| environment.split(|&byte| byte == 0).any(|one| one == wanted.as_bytes()))
    };
    let entries = std::fs::read_dir("/proc").unwrap().flatten();
    let processes = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let mut found: Vec<String> = processes.filter(|name| name.parse::<u32>().is_ok()).filter(is_it).collect();
    found.sort();
    found
}

#[test]
fn a_replacement_continues_the_log_files_of_its_rank_and_so_does_a_spare() {
    let logs = tempfile::tempdir().unwrap();
    let script = SCRIPT.replace("; exit", "; echo told $code; exit");
    let words =
        ["-n", "2", "--spares", "1", "--max-restarts", "2", "--log-dir", logs.path().to_str().unwrap()];
    let mut job = Job::start_with(&words, &script);
    let workers = job.workers(3);
    let [a, b, spare] = &workers[..] else { unreachable!() };
    publish(1, &[a, b], &[], &[]);
    job.send(b, 3);
    let mut told = String::new();
    job.run.output.read_line(&mut told).unwrap();
    assert_eq!(told, "[1] told 3\n");
    let next = job.worker();
    publish(2, &[a, spare], &[(1, b)], &[(1, spare)]);
    job.note("generation 2");
    next.kill(); // the next one is a replacement then
    job.note("the spare with pid");
    job.worker();
    let [a, spare] = [a, spare].map(|worker| {
        job.send(worker, 0);
        worker.clone()
    });
    let mut rest = String::new();
    job.run.output.read_to_string(&mut rest).unwrap();
    assert_eq!(job.ended().1.code(), Some(0));
    let run = std::fs::read_dir(logs.path()).unwrap().next().unwrap().unwrap().path().join("attempt_0");
    let read = |name: &str| std::fs::read_to_string(run.join(name)).unwrap();
    let first = |worker: &Worker| format!("{} ", worker.process);
    let lines = read("1/stdout.log");
    let lines: Vec<&str> = lines.lines().collect();
    assert!(lines[0].starts_with(&first(b)) && lines[1..] == ["told 3", "told 0"], "{lines:?}");
    assert!(read("0/stdout.log").starts_with(&first(&a)));
    assert!(read("spare-0-2/stdout.log").starts_with(&first(&spare)));
}

fn top(address: &str, option: &str) -> String {
    let output =
        std::process::Command::new(serving::TENFOLD).args(["top", address, option]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn the_dashboard_shows_spares_and_who_replaced_whom() {
    let mut job = Job::start(&["-n", "2", "--spares", "1", "--dashboard"]);
    let address = job.note("dashboard on http://");
    let address = address.split_once("http://").unwrap().1.trim_end_matches('/').to_owned();
    let workers = job.workers(3);
    let [a, b, spare] = &workers[..] else { unreachable!() };
    let waits = format!("  1 spare waits on {}: pid {}\n", host(), spare.process);
    wait_until("the spare is shown", || top(&address, "--once").contains(&waits));
    publish(1, &[a, b], &[], &[]);
    b.kill();
    let next = job.worker();
    publish(2, &[a, spare], &[(1, b)], &[(1, spare)]);
    let what = format!("rank 1 (pid {}, killed by SIGKILL) was replaced by pid {}", b.process, spare.process);
    let line = format!("  generation 2 after 0.08 s: {what}\n");
    wait_until("the generation is shown", || top(&address, "--once").contains(&line));
    let waits = format!("  1 spare waits on {}: pid {}\n", host(), next.process);
    wait_until("the next spare is shown", || top(&address, "--once").contains(&waits));
    let facts: Value = serde_json::from_str(&top(&address, "--json")).unwrap();
    let run = &facts["runs"][0];
    let generation = run["generations"].as_array().unwrap().last().unwrap();
    assert_eq!((&generation["generation"], &generation["what"]), (&json!(2), &json!(what)));
    let ranks = run["nodes"][0]["ranks"].as_array().unwrap();
    let pids: Vec<String> = ranks.iter().map(|rank| rank["pid"].to_string()).collect();
    assert_eq!(pids, [a, spare].map(|worker| worker.process.clone()));
    [a, spare].into_iter().for_each(|worker| job.send(worker, 0));
    assert_eq!(job.ended().1.code(), Some(0));
}

/// Options for one of two nodes that soon notice missing ones, but not before a busy machine lets them run.
fn node(port: &str, name: &str) -> Vec<String> {
    let endpoint = format!("127.0.0.2:{port}");
    let settings = "last_call_timeout=0.1,keep_alive_interval=0.2,keep_alive_max_attempt=25";
    let words = ["--nnodes", "2", "-n", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", &endpoint];
    let more = ["--rdzv-id", "job", "--rdzv-conf", settings, "--local-addr", name];
    words.into_iter().chain(more).map(str::to_string).collect()
}

/// Two nodes of two ranks each, in the order of their ranks.
fn two_nodes() -> ([Job; 2], [Vec<Worker>; 2]) {
    let port = {
        let listener = std::net::TcpListener::bind("127.0.0.2:0").unwrap();
        listener.local_addr().unwrap().port().to_string()
    };
    let mut jobs = ["a", "b"].map(|name| {
        let words = node(&port, name);
        Job::start(&words.iter().map(String::as_str).collect::<Vec<_>>())
    });
    let mut nodes = jobs.each_mut().map(|job| job.workers(2));
    let first = usize::from(nodes[1][0].rank == "0"); // nodes are numbered as they join
    jobs.rotate_left(first);
    nodes.rotate_left(first);
    (jobs, nodes)
}

#[test]
fn a_rank_that_finished_on_another_node_cannot_take_in_another() {
    let (mut jobs, nodes) = two_nodes();
    let ([a, b], [c, d]) = (&nodes[0][..], &nodes[1][..]) else { unreachable!() };
    publish_at("127.0.0.2", 1, &[a, b, c, d], &[], &[]);
    let [near, far] = &mut jobs;
    far.send(d, 0);
    wait_until_gone_or_ended(&d.process);
    b.kill();
    near.note("the ranks cannot recover: a rank of another node has already finished");
    for job in jobs.iter_mut() {
        job.note("restart 1 of 3: round 1 starts on 2 nodes");
    }
    jobs.iter().for_each(|job| job.run.launcher.signal(Signal::TERM));
    jobs.into_iter().for_each(|job| assert_eq!(job.ended().1.code(), Some(1)));
}

#[test]
fn when_the_ranks_of_all_nodes_die_the_job_is_restarted() {
    let (mut jobs, nodes) = two_nodes();
    let ([a, b], [c, d]) = (&nodes[0][..], &nodes[1][..]) else { unreachable!() };
    publish_at("127.0.0.2", 1, &[a, b, c, d], &[], &[]);
    [a, b, c, d].into_iter().for_each(Worker::kill);
    for job in jobs.iter_mut() {
        job.note("round 1 starts on 2 nodes");
    }
    jobs.iter().for_each(|job| job.run.launcher.signal(Signal::TERM));
    jobs.into_iter().for_each(|job| assert_eq!(job.ended().1.code(), Some(1)));
}

#[test]
fn each_node_replaces_its_own_ranks_and_all_nodes_tell() {
    let (mut jobs, nodes) = two_nodes();
    let [near, far] = &mut jobs;
    let ([a, b], [c, d]) = (&nodes[0][..], &nodes[1][..]) else { unreachable!() };
    publish_at("127.0.0.2", 1, &[a, b, c, d], &[], &[]);
    d.kill();
    let new = far.worker();
    assert_eq!((&*new.rank, &*new.local_rank, &*new.joining), ("3", "1", "1-2"));
    far.note("rank 3 of 4 on host ");
    publish_at("127.0.0.2", 2, &[a, b, c, &new], &[(3, d)], &[(3, &new)]);
    let host = host();
    let end = format!(" was replaced by pid {} on {host}", new.process);
    let note = far.note("generation 2");
    let expected = format!("rank 3 (pid {} on {host}, killed by SIGKILL){end}", d.process);
    assert!(note.ends_with(&expected), "{note}");
    let note = near.note("generation 2");
    assert!(note.ends_with(&format!("rank 3 (pid {} on {host}){end}", d.process)), "{note}");
    [a, b].into_iter().for_each(|worker| near.send(worker, 0));
    [c, &new].into_iter().for_each(|worker| far.send(worker, 0));
    jobs.into_iter().for_each(|job| assert_eq!(job.ended().1.code(), Some(0)));
}
