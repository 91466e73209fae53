//! `tenfold run` with a relay between the ranks of a node and their store on another node. Each launcher on this machine
//! stands for a node.

#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "tests: helpers that may fail")]

mod launching;
mod serving;

use std::net::TcpListener;

use launching::{Run, command, handle, pid, wait_until, wait_until_gone};
use rustix::process::{Signal, kill_process};
use serving::TENFOLD;
use tenfold_store::{Facts, StoreExt as _, TcpStore};

/// The two nodes of a job.
struct Job {
    host: Run,
    guest: Run,
    /// The store itself.
    store: TcpStore,
    port: u16,
}

impl Job {
    /// The host has one rank, rank 0, and the guest has the others. `$s` is the command that uses the ranks' store.
    fn start(guest_ranks: usize, options: &[&str], script: &str) -> Job {
        let port = TcpListener::bind("127.0.0.2:0").unwrap().local_addr().unwrap().port();
        let script = format!("s=\"{TENFOLD} store $MASTER_ADDR:$MASTER_PORT --timeout 60s\"; {script}");
        let node = |rank: usize, ranks: usize| {
            let (rank, ranks, port) = (rank.to_string(), ranks.to_string(), port.to_string());
            let name = format!("node{rank}");
            let words =
                ["--nnodes", "2", "--node-rank", &rank, "--master-addr", "127.0.0.2", "--local-addr", &name];
            let more = ["--master-port", &port, "-n", &ranks];
            Run::start(&[&words[..], &more, options, &[&script]].concat())
        };
        let mut host = node(0, 1);
        // The guest is not started before there is a store that this test can look into.
        let mut line = String::new();
        let mut byte = [0];
        let errors = host.launcher.0.stderr.as_mut().unwrap();
        while !line.ends_with('\n') {
            std::io::Read::read_exact(errors, &mut byte).unwrap();
            line.push(byte[0].into());
        }
        assert!(line.contains("this node hosts the store"), "{line}");
        let store = TcpStore::connect("127.0.0.2", port).unwrap();
        Job { host, guest: node(1, guest_ranks), store, port }
    }

    fn facts(&self) -> Facts {
        self.store.server_facts().unwrap()
    }

    /// How many clients wait for this key, as the server sees it.
    fn waiters(&self, key: &str) -> usize {
        let keys = format!("`/{key}`");
        self.facts().waiters.iter().filter(|waiter| waiter.keys == keys).count()
    }

    /// The next line of each rank of the guest.
    fn guest_lines(&mut self, ranks: usize) -> Vec<String> {
        let mut lines: Vec<String> = (0..ranks).map(|_| self.guest.any_line()).collect();
        lines.sort();
        lines
    }

    /// What both launchers print, and their exit codes.
    fn ended(self) -> [(String, Option<i32>); 2] {
        [self.host, self.guest].map(|run| {
            let (error, status) = run.ended();
            (error, status.code())
        })
    }
}

/// So that what a launcher reports about its ranks is seen soon, and a lost node not before a busy machine lets it run again.
const QUICK: [&str; 2] = ["--rdzv-conf", "keep_alive_interval=0.2,keep_alive_max_attempt=25"];

const SAYS: &str = "of this node use the store at 127.0.0.2:";

/// A program of which every rank counts itself and waits. Returns how many connections the server has then.
fn connections_of(guest_ranks: usize) -> usize {
    let script = "echo $MASTER_ADDR ${TENFOLD_STORE:-none} $($s add n 1); exec $s wait go";
    let options = [&QUICK[..], &["--relay-from", "2"]].concat();
    let mut job = Job::start(guest_ranks, &options, script);
    let mut lines = vec![job.host.any_line()];
    assert!(lines[0].starts_with("127.0.0.2 none "), "the host's ranks have no relay: {lines:?}");
    lines.extend(job.guest_lines(guest_ranks));
    let behind = format!("127.0.0.1 127.0.0.2:{} ", job.port);
    assert!(lines[1..].iter().all(|line| line.starts_with(&behind)), "{lines:?}");
    let mut counted: Vec<usize> =
        lines.iter().map(|line| line.rsplit_once(' ').unwrap().1.parse().unwrap()).collect();
    counted.sort_unstable();
    assert!(counted.into_iter().eq(1..=guest_ranks + 1), "{lines:?}");

    // The launcher reports which rank waits for what, because the server sees only the relay.
    let waits = |rank: &serde_json::Value| {
        let from = rank["store_connections"][0].as_str().unwrap_or_default();
        rank["store_wait"]["keys"] == "`/go`" && from.ends_with(" by relay of node1")
    };
    wait_until("the launcher reports the waits of all its ranks", || {
        let keys = job.store.list_keys().unwrap();
        let is_guest = |key: &&tenfold_store::Value| key.starts_with(b"tenfold/run/none/node/node1-");
        let Some(key) = keys.iter().find(is_guest) else { return false };
        let beat: serde_json::Value = serde_json::from_slice(&job.store.get(key).unwrap()).unwrap();
        beat["ranks"].as_array().is_some_and(|ranks| ranks.len() == guest_ranks && ranks.iter().all(waits))
    });
    assert_eq!(job.waiters("go"), 2, "the host's rank and the relay");
    let facts = job.facts();
    assert_eq!(facts.sessions, 1);
    job.store.set("go", "").unwrap();
    let [host, guest] = job.ended();
    assert_eq!((host.1, guest.1), (Some(0), Some(0)), "{host:?} {guest:?}");
    assert!(!host.0.contains("relay"), "{}", host.0);
    assert_eq!(guest.0.matches(&format!("the {guest_ranks} ranks {SAYS}")).count(), 1, "{}", guest.0);
    facts.connections
}

#[test]
fn all_ranks_of_a_node_are_one_connection_of_the_store() {
    assert_eq!(connections_of(2), connections_of(6));
}

#[test]
fn with_fewer_ranks_nothing_is_between_them_and_the_store() {
    for options in [["--relay-from", "3"], ["--relay-from", "0"]] {
        let mut job =
            Job::start(2, &options, "echo $MASTER_ADDR $MASTER_PORT ${TENFOLD_STORE:-none}; exec $s wait go");
        let direct = format!("127.0.0.2 {} none", job.port);
        assert_eq!(job.guest_lines(2), [direct.as_str(), direct.as_str()]);
        wait_until("all wait", || job.waiters("go") == 3);
        assert_eq!(job.facts().sessions, 0);
        job.store.set("go", "").unwrap();
        let [_, guest] = job.ended();
        assert_eq!(guest.1, Some(0), "{}", guest.0);
        assert!(!guest.0.contains("relay"), "{}", guest.0);
    }
}

#[test]
fn a_killed_rank_leaves_no_wait_behind_and_the_next_round_finds_an_empty_store() {
    let script = "echo $TORCHELASTIC_RESTART_COUNT $$ $($s add n 1)
        [ $TORCHELASTIC_RESTART_COUNT = 1 ] || exec $s wait never$RANK
        exec $s wait go";
    let options = [&QUICK[..], &["--relay-from", "1", "--max-restarts", "1"]].concat();
    let mut job = Job::start(2, &options, script);
    let first = job.guest_lines(2);
    wait_until("all wait", || (0..3).all(|rank| job.waiters(&format!("never{rank}")) == 1));
    let process = first[0].split(' ').nth(1).unwrap();
    kill_process(pid(process), Signal::KILL).unwrap();
    let mut second = job.guest_lines(2);
    job.host.any_line();
    second.push(job.host.any_line());
    let mut counted: Vec<&str> = second.iter().map(|line| line.rsplit_once(' ').unwrap().1).collect();
    counted.sort_unstable();
    assert!(second.iter().all(|line| line.starts_with("1 ")), "{second:?}");
    assert_eq!(counted, ["1", "2", "3"], "no request of the first round was executed in the second");
    wait_until("all wait", || job.waiters("go") == 2);
    assert!((0..3).all(|rank| job.waiters(&format!("never{rank}")) == 0));
    assert_eq!(job.facts().sessions, 1, "the relay of the first round has ended");
    job.store.set("go", "").unwrap();
    let [host, guest] = job.ended();
    assert_eq!((host.1, guest.1), (Some(0), Some(0)), "{host:?} {guest:?}");
    assert_eq!(guest.0.matches(SAYS).count(), 1, "once, not in each round: {}", guest.0);
}

/// Its relay is frozen, too. Without their guard, its ranks would wait until it continues.
#[test]
fn ranks_behind_the_relay_of_a_frozen_launcher_are_ended() {
    let options = [&QUICK[..], &["--relay-from", "1"]].concat();
    let mut job = Job::start(2, &options, "echo $$; exec $s wait never");
    let ranks: Vec<_> = job.guest_lines(2).iter().map(|process| handle(process)).collect();
    wait_until("all wait", || job.waiters("never") == 2);
    job.guest.launcher.freeze();
    ranks.iter().for_each(wait_until_gone);
    job.guest.launcher.signal(Signal::CONT);
    let [host, guest] = job.ended();
    assert_eq!((host.1, guest.1), (Some(1), Some(1)), "{host:?} {guest:?}");
    assert!(guest.0.contains("so its guard killed the ranks"), "{}", guest.0);
}

/// The relay cannot know whether the server returns, so its clients wait; the lease of the node ends that.
#[test]
fn ranks_behind_a_relay_do_not_wait_for_a_store_that_has_ended() {
    let options = [&QUICK[..], &["--relay-from", "1"]].concat();
    let mut job = Job::start(2, &options, "echo $$; exec $s wait never");
    let ranks: Vec<_> = job.guest_lines(2).iter().map(|process| handle(process)).collect();
    wait_until("all wait", || job.waiters("never") == 2);
    job.host.launcher.signal(Signal::KILL);
    ranks.iter().for_each(wait_until_gone);
    let (error, status) = job.guest.ended();
    assert_eq!(status.code(), Some(1), "{error}");
    let lost = format!("relay: lost the store server at 127.0.0.2:{}: it closed the connection", job.port);
    assert!(error.contains(&lost), "{error}");
}

#[test]
fn the_number_of_ranks_can_be_set_in_the_environment_and_a_wrong_one_is_refused() {
    for (value, code) in [("2", 0), ("0", 0), ("many", 2), ("-1", 2)] {
        let output = command(&["echo started"]).env("PET_RELAY_FROM", value).output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{value}");
        let error = String::from_utf8(output.stderr).unwrap();
        let expected = format!(
            "invalid value '{value}' for '--relay-from <RANKS>': expected a number of ranks such as 64, or 0 for no relay"
        );
        assert_eq!(error.contains(&expected), code != 0, "{error}");
    }
}
