//! Ranks of one host that die, freeze, stay away, disagree or give up: what each of the others sees, how soon, and in which
//! words.

#![expect(
    clippy::disallowed_methods,
    clippy::unwrap_used,
    reason = "tests: the time things take; a helper may fail too"
)]

#[path = "faults/disagree.rs"]
mod disagree;
#[path = "faults/jobs.rs"]
mod jobs;
#[path = "faults/stuck.rs"]
mod stuck;
mod support;

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use jobs::*;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, Signal, pidfd_getfd, pidfd_open};
use support::{Ended, Hosts, Job, Jobs, Rank, Ranks, local_store, once_within, run_as_rank};
use tenfold::{Buffer, DType, Error, Group, Options, ReduceOp, Result, Seat, Tag, Work};
use tenfold_store::{Deadline, Request, Response, Server, Store};

/// How long something may take before it is said to hang.
const SOON: Duration = Duration::from_secs(60);

/// A peer that has been silent this long is given up.
const HEARTBEAT: Duration = Duration::from_secs(2);

/// For ranks that must not be given up, however long a busy machine does not let them run.
const HEARTBEAT_LONG: Duration = Duration::from_secs(20);

/// The timeout of every operation, in the tests in which operations must time out.
const TIMEOUT: Duration = Duration::from_secs(1);

const JOBS: Jobs = &[
    ("sum_for_ever", sum_for_ever),
    ("sum_for_ever_patiently", sum_for_ever_patiently),
    ("sum_for_ever_by_default", sum_for_ever_by_default),
    ("sum_and_regroup", sum_and_regroup),
    ("differ", differ),
    ("stay_away", stay_away),
    ("time_out_and_leave", time_out_and_leave),
    ("name_different_roots", name_different_roots),
    ("give_up", give_up),
    ("leave", leave),
    ("send_to_one_who_is_late", send_to_one_who_is_late),
    ("sum_once", sum_once),
    ("make_groups", make_groups),
    ("make_another_group", make_another_group),
    ("sum_without_unix_sockets", sum_without_unix_sockets),
    ("come_late", stuck::come_late),
    ("wait_for_a_message", stuck::wait_for_a_message),
    ("come_a_little_late", stuck::come_a_little_late),
    ("come_late_to_a_subgroup", stuck::come_late_to_a_subgroup),
];

#[test]
#[ignore = "a rank, started by the tests"]
fn rank_entry() {
    run_as_rank(JOBS);
}

// ── what tests see ─────────────────────────────────────────────────────────────────────────────────────────

/// An error as a rank told it.
#[derive(Debug)]
struct Raised {
    rank: usize,
    took: Duration,
    /// `KIND PEER` of the error.
    kind: String,
    text: String,
}

/// Waits for the errors of these ranks.
fn raised(ranks: &mut Ranks, who: impl IntoIterator<Item = usize>, since: Instant) -> Vec<Raised> {
    let wait = |rank| {
        let event = ranks.wait_for_event(rank, "raised ", SOON);
        let (kind, text) = event.text["raised ".len()..].split_once('\n').expect("a kind and a text");
        let raised = Raised { rank, took: event.at - since, kind: kind.into(), text: text.into() };
        println!("rank {rank} after {:?}: {kind}\n{text}", raised.took);
        raised
    };
    who.into_iter().map(wait).collect()
}

fn longest(raised: &[Raised]) -> Duration {
    raised.iter().map(|raised| raised.took).max().unwrap()
}

fn finish(mut ranks: Ranks) -> Vec<Ended> {
    ranks.tell_all("end");
    ranks.join(SOON)
}

fn finish_well(mut ranks: Ranks) {
    ranks.tell_all("end");
    ranks.join_well(SOON);
}

/// A text with what changes from run to run, or with the algorithm, replaced by capitals.
fn masked(text: &str) -> String {
    let mut masked = String::new();
    let mut before = ["", "", ""];
    for piece in text.split_inclusive([' ', '\n']) {
        let word = piece.trim_end_matches([' ', '\n', ',', ';', ':', ')']);
        let rest = &piece[word.len()..];
        let is_number = word.parse::<f64>().is_ok();
        let mask = match before {
            [_, _, "(host"] => "HOST",
            [_, _, "by"] if word.starts_with('`') => "ALGORITHM",
            [_, _, "pid"] if is_number => "PID",
            [_, _, "step" | "piece"] | ["step" | "piece", _, "of"] if is_number => "N",
            _ if is_number && rest == " " && is_time(text, piece) => "TIME",
            _ if word.strip_prefix('#').is_some_and(|seq| seq.parse::<u64>().is_ok()) => "#N",
            _ => word,
        };
        write!(masked, "{mask}{rest}").unwrap();
        before = [before[1], before[2], word];
    }
    let masked = masked.replace("TIME ms", "TIME").replace("TIME s", "TIME");
    // A rank that heard of a fault from another rank names that rank.
    (0..8).fold(masked, |text, witness| text.replace(&format!(" (seen by rank {witness})"), ""))
}

/// Does a unit of time follow `piece`, a part of `text`?
fn is_time(text: &str, piece: &str) -> bool {
    let end = piece.as_ptr() as usize - text.as_ptr() as usize + piece.len();
    let unit = text[end..].split([' ', '\n', ',', ';', ':', ')']).next();
    matches!(unit, Some("ms" | "s"))
}

#[test]
fn a_masked_text_keeps_what_is_the_same_in_every_run() {
    let text = "all_reduce #42 in group `default` failed on rank 3 of 8: rank 5 (host node-b, pid 4711) sent nothing \
                for 30.0 s\n  all_reduce(sum, float32 × 1000) by `direct`, step 4 of 14, piece 2 of 3; started 30.2 s ago, \
                timeout 12.5 ms\n  hint: rank 5 last finished #41 broadcast(float32 × 1000, root 1)";
    let expected = "all_reduce #N in group `default` failed on rank 3 of 8: rank 5 (host HOST, pid PID) sent nothing \
                    for TIME\n  all_reduce(sum, float32 × 1000) by ALGORITHM, step N of N, piece N of N; started TIME \
                    ago, timeout TIME\n  hint: rank 5 last finished #N broadcast(float32 × 1000, root 1)";
    assert_eq!(masked(text), expected);
}

fn hostname() -> String {
    fs::read_to_string("/proc/sys/kernel/hostname").unwrap().trim_end().to_owned()
}

// ── a rank dies ────────────────────────────────────────────────────────────────────────────────────────────

/// Kills `victim` of `size` ranks in the middle of an all-reduce of 64 MiB; how long until all others know.
fn kill_one(size: usize, victim: usize) -> Duration {
    let store = local_store();
    let mut ranks = Job::new("sum_for_ever", size).argument(16 << 20).start(store.address());
    ranks.wait_for_all("round 2 begins", SOON);
    // Its all-reduce has begun, and takes far longer than the news of that.
    ranks.pass_over(victim);
    ranks.wait_for_event(victim, "round ", SOON);
    let (pid, since) = (ranks.pid(victim), Instant::now());
    ranks.kill(victim);
    let raised = raised(&mut ranks, (0..size).filter(|rank| *rank != victim), since);
    for Raised { rank, kind, text, .. } in &raised {
        assert_eq!(*kind, format!("PeerLost Some({victim})"));
        let name = format!("rank {victim} (host {}, pid {pid})", hostname());
        assert!(text.contains(&name), "rank {rank} does not say `{name}`: {text}");
        let expected = format!(
            "all_reduce #N in group `default` failed on rank {rank} of {size}: rank {victim} (host HOST, pid PID) died: its \
             process ended\n  all_reduce(sum, float32 × 16777216) by ALGORITHM, step N of N, piece N of N; started TIME ago, \
             timeout TIME\n  hint: see that rank's log, or the kernel's for `out of memory`"
        );
        // A rank that was filling its tensor meanwhile learns it from its next call.
        let between_calls = format!(
            "all_reduce in group `default` failed on rank {rank} of {size}: the group has failed before: rank {victim} (host \
             HOST, pid PID) died: its process ended\n  hint: see that rank's log, or the kernel's for `out of memory`"
        );
        let text = masked(text);
        assert!([&expected, &between_calls].contains(&&text), "{text}");
    }
    let ended = finish(ranks);
    let bad: Vec<_> = (0..size).filter(|rank| !ended[*rank].status.success()).collect();
    assert_eq!(bad, [victim], "the others end well");
    longest(&raised)
}

#[test]
fn ranks_of_one_host_that_cannot_share_memory_use_tcp_instead() {
    let store = local_store();
    let mut ranks = Job::new("sum_without_unix_sockets", 3).start(store.address());
    ranks.wait_for_all("summed", SOON);
    ranks.tell_all("end");
}

/// Copies of all descriptors of a process, as a child has that it forked.
fn copies_of_descriptors(pid: u32) -> Vec<OwnedFd> {
    let process = pidfd_open(Pid::from_raw(pid as i32).unwrap(), PidfdFlags::empty()).unwrap();
    let names = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().map(|entry| entry.unwrap().file_name());
    let numbers = names.filter_map(|name| name.to_str()?.parse().ok());
    numbers.filter_map(|number| pidfd_getfd(&process, number, PidfdGetfdFlags::empty()).ok()).collect()
}

#[test]
fn a_rank_that_is_killed_while_a_child_of_it_has_its_descriptors_is_known_to_have_died() {
    let server = local_store();
    // They would give it up after a long silence, with other words.
    let mut ranks = Job::new("sum_for_ever_patiently", 3).argument(1 << 16).start(server.address());
    ranks.wait_for_all("round 2 begins", SOON);
    let copies = copies_of_descriptors(ranks.pid(1));
    assert!(copies.len() > 5, "{copies:?}");
    ranks.kill(1);
    for rank in [0, 2] {
        let event = ranks.wait_for_event(rank, "raised", HEARTBEAT_LONG / 2);
        assert!(event.text.contains("rank 1 ") && event.text.contains(" died"), "{}", event.text);
    }
    drop(copies);
}

#[test]
fn all_three_survivors_of_a_kill_know_within_half_a_second_who_died() {
    once_within(Duration::from_millis(500), || kill_one(4, 2));
}

#[test]
fn all_seven_survivors_of_a_kill_know_within_a_second_who_died() {
    once_within(Duration::from_secs(1), || kill_one(8, 5));
}

#[test]
fn survivors_go_on_as_a_smaller_group_within_two_seconds() {
    once_within(Duration::from_secs(2), || {
        let store = local_store();
        let mut ranks = Job::new("sum_and_regroup", 4).argument(1 << 20).start(store.address());
        ranks.wait_for_all("round 3 begins", SOON);
        let since = Instant::now();
        ranks.kill(1);
        for survivor in [0, 2, 3] {
            ranks.wait_for_event(survivor, "raised ", SOON);
            ranks.tell(survivor, "1");
        }
        let sums = [0, 2, 3].map(|survivor| ranks.wait_for_event(survivor, "sum ", SOON));
        sums.iter().for_each(|event| assert_eq!(event.text, "sum 3"));
        finish(ranks);
        sums.iter().map(|event| event.at - since).max().unwrap()
    });
}

#[test]
fn a_rank_that_leaves_in_the_middle_is_named() {
    once_within(Duration::from_millis(500), || {
        let store = local_store();
        let mut ranks = Job::new("leave", 3).start(store.address());
        ranks.wait_for_all("joined", SOON);
        let since = Instant::now();
        ranks.tell(1, "leave");
        let raised = raised(&mut ranks, [0, 2], since);
        for raised in &raised {
            assert_eq!(raised.kind, "PeerLost Some(1)");
            let name = format!("rank 1 (host {}, pid {})", hostname(), ranks.pid(1));
            assert!(raised.text.contains(&name), "{raised:?}");
        }
        finish_well(ranks);
        longest(&raised)
    });
}

#[test]
fn what_a_root_sent_before_its_end_reaches_ranks_that_come_later() {
    let store = local_store();
    for (elements, transport, is_killed) in [
        (1, "auto", false),
        (1, "auto", true),
        (10_000, "auto", true),
        (1, "tcp", true),
        (10_000, "tcp", true),
    ] {
        let mut ranks = Job::new("send_to_one_who_is_late", 2)
            .argument(elements)
            .environment("TENFOLD_TRANSPORT", transport)
            .start(store.address());
        ranks.wait_for_event(0, "sent", SOON);
        if is_killed {
            ranks.kill(0);
        } else {
            ranks.tell(0, "leave");
        }
        ranks.tell(1, "come");
        ranks.wait_for_event(1, "received", SOON);
        let ended = ranks.join(SOON);
        assert!(ended[1].status.success(), "{elements} elements, {transport}: {:?}", ended[1]);
    }
}

#[test]
fn nothing_is_left_of_killed_ranks() {
    // A host of their own: whatever sockets it has are theirs.
    let Some(hosts) = Hosts::near(1) else { return };
    let store = hosts.serve_store();
    let files = std::env::temp_dir().join(format!("tenfold-faults-{}", std::process::id()));
    fs::create_dir(&files).unwrap();
    let mut ranks = Job::spread("sum_for_ever", 4, &hosts)
        .argument(1 << 20)
        .environment("TMPDIR", files.display())
        .environment("XDG_RUNTIME_DIR", files.display())
        .start(store.address());
    ranks.wait_for_all("round 3 begins", SOON);
    let sockets = || hosts.namespace(0).inside(|| fs::read_to_string("/proc/thread-self/net/unix").unwrap());
    assert!(sockets().lines().count() > 1, "ranks of one host talk by Unix sockets");
    for rank in 0..4 {
        let process = format!("/proc/{}", ranks.pid(rank));
        let maps = fs::read_to_string(format!("{process}/maps")).unwrap();
        assert!(!maps.contains("/dev/shm/"), "memory with a name outlives a kill: {maps}");
        let children = fs::read_dir(format!("{process}/task")).unwrap().flatten();
        for thread in children {
            let children = fs::read_to_string(thread.path().join("children")).unwrap_or_default();
            assert_eq!(children, "", "rank {rank} has started processes");
        }
        ranks.kill(rank);
    }
    ranks.join(SOON);
    let left: BTreeSet<_> = fs::read_dir(&files).unwrap().flatten().map(|file| file.file_name()).collect();
    fs::remove_dir_all(&files).unwrap();
    assert_eq!(left, BTreeSet::new(), "files");
    // The kernel takes away by and by what was on its way from one socket to another.
    let start = Instant::now();
    while sockets().lines().count() > 1 {
        assert!(start.elapsed() < SOON, "only the heading: {}", sockets());
        std::thread::park_timeout(Duration::from_millis(1));
    }
}

// ── a rank is silent ───────────────────────────────────────────────────────────────────────────────────────

#[test]
fn a_rank_stopped_for_less_than_the_heartbeat_is_no_error() {
    let store = local_store();
    let mut ranks = Job::new("sum_for_ever_patiently", 4).argument(1 << 16).start(store.address());
    ranks.wait_for_all("round 3 begins", SOON);
    ranks.stop(2);
    // A fault lasts as long as it lasts: the second is the test, not a wait for something.
    std::thread::park_timeout(Duration::from_secs(1));
    ranks.cont(2);
    for waiting in [0, 1, 3] {
        ranks.wait_for_event(waiting, "slow round ", SOON);
    }
    ranks.wait_for_all("round ", SOON);
    // They sum without end.
    (0..4).for_each(|rank| ranks.kill(rank));
    let ended = ranks.join(SOON);
    // A rank that is killed after another may have raised because of that, and only because of that.
    for end in ended {
        assert!(!end.told().iter().any(|told| told.contains("PeerSilent")), "{:?}", end.told());
    }
}

#[test]
fn by_default_a_rank_stopped_for_five_seconds_is_no_error_and_one_that_stays_is_unresponsive() {
    let store = local_store();
    let mut ranks = Job::new("sum_for_ever_by_default", 3).argument(1 << 10).start(store.address());
    ranks.wait_for_all("round 3 begins", SOON);
    ranks.stop(2);
    // A fault lasts as long as it lasts: this is the test, not a wait for something.
    std::thread::park_timeout(Duration::from_secs(5));
    ranks.cont(2);
    for waiting in 0..2 {
        ranks.wait_for_event(waiting, "slow round ", SOON);
        ranks.wait_for_event(waiting, "round ", SOON);
    }
    let since = Instant::now();
    ranks.stop(2);
    for Raised { rank, took, kind, text } in raised(&mut ranks, 0..2, since) {
        assert_eq!(kind, "PeerSilent Some(2)", "rank {rank}: {text}");
        assert!(took > Duration::from_secs(13), "rank {rank} is hasty: {took:?}");
    }
    finish_after_thaw(ranks, 2);
}

#[test]
fn a_frozen_rank_is_given_up_at_the_heartbeat_limit() {
    once_within(HEARTBEAT + Duration::from_secs(1), || {
        let store = local_store();
        let mut ranks = Job::new("sum_for_ever", 4).argument(1 << 16).start(store.address());
        ranks.wait_for_all("round 3 begins", SOON);
        let since = Instant::now();
        ranks.stop(1);
        let raised = raised(&mut ranks, [0, 2, 3], since);
        for Raised { rank, took, kind, text } in &raised {
            assert!(*took > HEARTBEAT / 2, "rank {rank} is hasty: {took:?}");
            assert_eq!(kind, "PeerSilent Some(1)");
            let name = format!("rank 1 (host {}, pid {})", hostname(), ranks.pid(1));
            assert!(text.contains(&name), "rank {rank} does not say `{name}`: {text}");
            let expected = format!(
                "all_reduce #N in group `default` failed on rank {rank} of 4: rank 1 (host HOST, pid PID) shows no sign of \
                 life for TIME\n  all_reduce(sum, float32 × 65536) by ALGORITHM, step N of N; started TIME ago, timeout \
                 TIME\n  hint: it is stopped or frozen, or the network to it is cut; `heartbeat` sets how long to wait"
            );
            assert_eq!(masked(text), expected);
        }
        finish_after_thaw(ranks, 1);
        longest(&raised)
    });
}

/// A thawed rank learns that it was given up.
fn finish_after_thaw(mut ranks: Ranks, frozen: usize) {
    ranks.cont(frozen);
    ranks.wait_for_event(frozen, "raised ", SOON);
    finish_well(ranks);
}

#[test]
fn a_rank_that_never_calls_is_named_with_what_it_finished_last() {
    once_within(TIMEOUT + Duration::from_secs(1), || {
        let store = local_store();
        let mut ranks = Job::new("stay_away", 4).start(store.address());
        let since = (0..3).map(|rank| ranks.wait_for_event(rank, "calls", SOON).at).max().unwrap();
        let raised = raised(&mut ranks, 0..3, since);
        for Raised { rank, kind, text, .. } in &raised {
            assert_eq!(kind, "Timeout Some(3)");
            let expected = format!(
                "all_reduce #N in group `default` failed on rank {rank} of 4: rank 3 (host HOST, pid PID) did not answer for \
                 TIME\n  all_reduce(sum, float32 × 1000) by ALGORITHM, step N of N; started TIME ago, timeout TIME\n  hint: \
                 rank 3 last finished #N broadcast(float32 × 1000, root 1) and has called nothing since; see its log, or \
                 raise `timeout`"
            );
            assert_eq!(masked(text), expected);
            assert!(text.starts_with("all_reduce #3 ") && text.contains("last finished #2 "), "{text}");
        }
        finish_well(ranks);
        longest(&raised)
    });
}

#[test]
fn ranks_that_time_out_together_say_so_and_do_not_blame_one_that_left_first() {
    for transport in ["shm", "tcp"] {
        for _ in 0..3 {
            let store = local_store();
            let mut ranks = Job::new("time_out_and_leave", 4).argument(transport).start(store.address());
            let since = Instant::now();
            for Raised { rank, kind, text, .. } in raised(&mut ranks, 0..3, since) {
                // Over TCP they wait for each other, too.
                assert!(kind.starts_with("Timeout "), "rank {rank}, {transport}: {text}");
                assert!(transport == "tcp" || kind == "Timeout Some(3)", "rank {rank}: {text}");
            }
            ranks.tell(3, "end");
            ranks.join_well(SOON);
        }
    }
}

// ── a rank gives up ────────────────────────────────────────────────────────────────────────────────────────

/// Rank 0 gives up while it waits for the others; then they come. How long it took to give up.
fn give_up_and_tell(argument: &str, reason: &str, trigger: impl Fn(&mut Ranks)) -> Duration {
    let store = local_store();
    let mut ranks = Job::new("give_up", 3).argument(argument).start(store.address());
    ranks.wait_for_all("joined", SOON);
    let since = Instant::now();
    trigger(&mut ranks);
    let own = raised(&mut ranks, [0], since);
    assert!(own[0].kind.starts_with("Aborted "), "{own:?}");
    assert!(own[0].text.contains(reason), "{own:?}");
    ranks.tell(1, "go");
    ranks.tell(2, "go");
    for raised in raised(&mut ranks, [1, 2], since) {
        assert_eq!(raised.kind, "Aborted Some(0)");
        assert!(raised.text.contains("rank 0 (host "), "{raised:?}");
        assert!(raised.text.contains(reason), "{raised:?}");
    }
    ranks.join_well(SOON);
    longest(&own)
}

#[test]
fn abort_frees_a_blocked_call_and_its_reason_is_told_to_the_others() {
    once_within(Duration::from_millis(200), || {
        give_up_and_tell("order", "the disk is full", |ranks| ranks.tell(0, "the disk is full"))
    });
}

#[test]
fn ctrl_c_frees_a_blocked_call() {
    once_within(Duration::from_millis(300), || {
        give_up_and_tell("signal", "interrupted by signal 2", |ranks| ranks.signal(0, Signal::INT))
    });
}

// ── what does not matter ───────────────────────────────────────────────────────────────────────────────────

#[test]
fn a_store_that_ends_disturbs_no_group_in_use() {
    let store: Server = local_store();
    let mut ranks = Job::new("sum_for_ever_patiently", 4).argument(1 << 16).start(store.address());
    ranks.wait_for_all("round 3 begins", SOON);
    drop(store);
    for _ in 0..200 {
        ranks.wait_for_all("round ", SOON);
    }
    (0..4).for_each(|rank| ranks.kill(rank));
    ranks.join(SOON);
}

#[test]
fn a_group_that_is_made_after_the_store_has_ended_fails_with_that_cause() {
    once_within(Duration::from_secs(1), || {
        let store: Server = local_store();
        let mut ranks = Job::new("make_another_group", 2).start(store.address());
        ranks.wait_for_all("ready", SOON);
        drop(store);
        ranks.tell_all("go on");
        let told = ranks.wait_for_all("", SOON);
        let took = told.iter().map(|event| {
            let (took, text) = event.text.split_once(' ').unwrap();
            assert!(text.starts_with("connect in group `another` failed on rank "), "{text}");
            assert!(text.contains(" of 2: store "), "{text}");
            Duration::from_millis(took.parse().unwrap())
        });
        let longest = took.max().unwrap();
        ranks.join_well(SOON);
        longest
    });
}

#[test]
fn sixty_four_processes_form_one_group_and_sum() {
    let store = local_store();
    let mut ranks = Job::new("sum_once", 64).start(store.address());
    ranks.wait_for_all("summed", SOON);
    finish_well(ranks);
}

#[test]
fn a_thousand_groups_leave_descriptors_threads_and_memory_as_they_were() {
    let store = local_store();
    for end in Job::new("make_groups", 2).start(store.address()).join_well(SOON) {
        println!("{:?}", end.told());
    }
}
