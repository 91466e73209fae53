//! Ranks that are alive but have not entered a collective: what the others and the ranks themselves report, and what happens then.

use super::*;

/// How long a rank may keep the others waiting. On a busy machine, ranks warn about each other before the test has begun. Tests
/// ignore these warnings.
const AFTER: &str = "0.3";

/// The same where it ends the group: longer than ranks take to begin.
const AFTER_ABORT: &str = "5";

// ── what ranks do ──────────────────────────────────────────────────────────────────────────────────────────

/// The last rank makes its third call when the test orders it.
pub(super) fn come_late(rank: &Rank) {
    rank.tell_log();
    let group = connect(rank, options().heartbeat(HEARTBEAT_LONG));
    let mut tensor = ones(DType::F32, 1000);
    sum(&group, &mut tensor).unwrap();
    group.start_broadcast(tensor.lend(), 1).unwrap().wait().unwrap();
    if rank.rank == rank.size - 1 {
        rank.order();
    }
    match sum(&group, &mut tensor) {
        Ok(()) => rank.event("summed"),
        Err(error) => rank.event(format!("raised {:?} {:?}\n{error}", error.kind(), error.peer())),
    }
    rank.order();
}

/// Rank 0 waits for a message that rank 1 sends when the test orders it.
pub(super) fn wait_for_a_message(rank: &Rank) {
    rank.tell_log();
    let group = connect(rank, options().heartbeat(HEARTBEAT_LONG));
    let mut tensor = ones(DType::F32, 1000);
    if rank.rank == 0 {
        group.start_recv(tensor.lend(), 1, Tag(7)).unwrap().wait().unwrap();
        rank.event("received");
    } else {
        rank.order();
        group.start_send(tensor.lend(), 0, Tag(7)).unwrap().wait().unwrap();
    }
    rank.order();
}

/// Of four ranks the last two have a group, and the last one comes late there.
pub(super) fn come_late_to_a_subgroup(rank: &Rank) {
    rank.tell_log();
    let world = connect(rank, options().heartbeat(HEARTBEAT_LONG));
    let options = Options::new("tp1").timeout(SOON);
    if let Some(group) = world.subgroup(&[2, 3], options).unwrap() {
        let mut tensor = ones(DType::F32, 1000);
        sum(&group, &mut tensor).unwrap();
        if rank.rank == 3 {
            rank.order();
        }
        sum(&group, &mut tensor).unwrap();
        rank.event("summed");
        let metrics = tenfold::metrics::prometheus();
        let label = format!("{{group=\"tp1\",rank=\"{}\",op=\"all_reduce\"}} 2", rank.rank);
        assert!(metrics.contains(&format!("tenfold_operations_total{label}")), "{metrics}");
    }
    rank.order();
}

/// The last rank comes late to every call, for as long as it takes rank 0 to see it.
pub(super) fn come_a_little_late(rank: &Rank) {
    let group = connect(rank, options().heartbeat(HEARTBEAT_LONG));
    let enough = |one: &tenfold::metrics::Straggler| one.rank == rank.size - 1 && one.samples >= 5;
    loop {
        if rank.rank == rank.size - 1 {
            std::thread::sleep(Duration::from_millis(200)); // more than a busy machine holds up another
        }
        let mut seen = Buffer::from_slice(&[i32::from(tenfold::metrics::stragglers().iter().any(enough))]);
        group.start_all_reduce(seen.lend(), ReduceOp::Min).unwrap().wait().unwrap();
        if seen.as_slice::<i32>()[0] == 1 {
            break;
        }
    }
    let stragglers = tenfold::metrics::stragglers();
    let mean = |rank: usize| stragglers.iter().find(|one| one.rank == rank).unwrap().mean.as_micros();
    rank.event(format!("report\n{}", tenfold::metrics::straggler_report()));
    rank.event(format!("late {} {}", stragglers[0].rank, mean(0)));
    let metrics = tenfold::metrics::prometheus();
    let skew = metrics.lines().find(|line| line.starts_with("tenfold_arrival_skew_seconds_count")).unwrap();
    rank.event(format!("skew {skew}"));
    rank.order();
}

// ── what the others see ────────────────────────────────────────────────────────────────────────────────────

fn job(name: &'static str, size: usize, policy: &str) -> Job<'static> {
    let after = if policy == "abort" { AFTER_ABORT } else { AFTER };
    Job::new(name, size).environment("TENFOLD_STUCK_AFTER", after).environment("TENFOLD_STUCK_POLICY", policy)
}

const SENTENCE: &str = "rank 3 (host HOST, pid PID) is alive and has not entered all_reduce(sum, float32 × 1000) #N of \
                        group `default` for TIME; rank 3 last finished #N broadcast(float32 × 1000, root 1) and has \
                        called nothing since; the others wait";

/// Waits until `rank` warns about the call `number`. Before, it may have named other ranks that had not joined yet. A warning is
/// repeated each time the wait has doubled, so the expected one appears.
fn wait_for_warning(ranks: &mut Ranks, rank: usize, number: &str, expected: &str) {
    loop {
        let event = ranks.wait_for_event(rank, "WARN ", SOON);
        println!("rank {rank}: {}", event.text);
        if event.text.contains(number) && masked(event.text.trim_start_matches("WARN ")) == expected {
            return;
        }
    }
}

fn everybody_names_the_rank_that_does_not_come(job: Job<'_>) {
    let store = local_store();
    let mut ranks = job.start(store.address());
    for rank in 0..3 {
        wait_for_warning(&mut ranks, rank, "#3", SENTENCE);
    }
    let confession = "the other ranks of group `default` wait for this one, which has not entered all_reduce(sum, float32 × \
                      1000) #N for TIME; this rank last finished #N broadcast(float32 × 1000, root 1) and has called \
                      nothing since";
    wait_for_warning(&mut ranks, 3, "#3", confession);
    ranks.tell(3, "come");
    ranks.wait_for_all("summed", SOON);
    finish_well(ranks);
}

#[test]
fn everybody_names_the_rank_that_does_not_come_and_goes_on_when_it_does() {
    everybody_names_the_rank_that_does_not_come(job("come_late", 4, "warn"));
}

#[test]
fn everybody_names_it_over_tcp_too_also_who_waits_by_way_of_others() {
    let job = job("come_late", 4, "warn").environment("TENFOLD_TRANSPORT", "tcp");
    everybody_names_the_rank_that_does_not_come(job.environment("TENFOLD_ALGORITHM", "all_reduce:ring"));
}

#[test]
fn a_group_that_is_told_to_gives_up_on_a_rank_that_does_not_come() {
    let store = local_store();
    let mut ranks = job("come_late", 4, "abort").start(store.address());
    for Raised { rank, kind, text, .. } in &raised(&mut ranks, 0..3, Instant::now()) {
        assert_eq!(kind, "Timeout Some(3)");
        let text = masked(text);
        let beginning = format!("all_reduce #N in group `default` failed on rank {rank} of 4: {SENTENCE}\n");
        assert!(text.starts_with(&beginning), "{text}");
        let end = "hint: see what that rank does; TENFOLD_STUCK_AFTER and TENFOLD_STUCK_POLICY say how long a rank may take, \
                   and what then";
        assert!(text.ends_with(end), "{text}");
    }
    // Before it hears of the failure, it could still sum what the others had sent.
    ranks.wait_for_event(3, "INFO group `default` failed", SOON);
    ranks.tell(3, "come");
    let event = ranks.wait_for_event(3, "raised ", SOON);
    assert!(event.text.contains("is alive and has not entered all_reduce"), "it hears why: {}", event.text);
    finish_well(ranks);
}

#[test]
fn every_rank_writes_a_dump_if_it_is_told_to_also_the_one_that_is_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = folder.path().join("dump_");
    let store = local_store();
    let job = job("come_late", 3, "dump").environment("TORCH_FR_DUMP_TEMP_FILE", prefix.display());
    let mut ranks = job.start(store.address());
    for rank in 0..3 {
        ranks.wait_for_event(rank, "WARN the last operations of rank ", SOON);
        let dump = fs::read(folder.path().join(format!("dump_{rank}"))).unwrap();
        assert!(dump.starts_with(b"\x80\x02"), "a pickle");
    }
    ranks.tell(2, "come");
    ranks.wait_for_all("summed", SOON);
    finish_well(ranks);
}

#[test]
fn a_message_that_nobody_sends_is_told_with_whom_it_is_waited_for() {
    let store = local_store();
    let mut ranks = job("wait_for_a_message", 2, "warn").start(store.address());
    let expected = "recv(float32 × 1000, tag 7) #N of group `default` waits for TIME for rank 1 (host HOST, pid PID), \
                    which is alive and has sent nothing that matches; rank 1 has called nothing in this group";
    let event = ranks.wait_for_event(0, "WARN ", SOON);
    assert!(masked(event.text.trim_start_matches("WARN ")).starts_with(expected), "{}", event.text);
    ranks.tell(1, "send");
    ranks.wait_for_event(0, "received", SOON);
    finish_well(ranks);
}

#[test]
fn in_a_subgroup_a_rank_is_named_by_its_number_in_the_job() {
    let store = local_store();
    let mut ranks = job("come_late_to_a_subgroup", 4, "warn").start(store.address());
    let expected = "rank 3 (host HOST, pid PID; rank 1 of group `tp1`) is alive and has not entered all_reduce(sum, \
                    float32 × 1000) #N of group `tp1` for TIME; rank 3 last finished #N all_reduce(sum, float32 × 1000) \
                    and has called nothing since; the others wait";
    wait_for_warning(&mut ranks, 2, "#2", expected);
    ranks.tell(3, "come");
    for rank in [2, 3] {
        ranks.wait_for_event(rank, "summed", SOON);
    }
    finish_well(ranks);
}

#[test]
fn a_rank_that_comes_a_little_late_each_time_is_the_straggler() {
    let store = local_store();
    let mut ranks = job("come_a_little_late", 3, "warn").start(store.address()); // looks every 0.15 s
    for rank in 0..3 {
        let report = ranks.wait_for_event(rank, "report", SOON).text;
        println!("{report}");
        let beginning = format!("report\ngroup `default`, seen by rank {rank}, ");
        assert!(report.starts_with(&beginning) && report.contains("\n  rank 2 "), "{report}");
        let late = ranks.wait_for_event(rank, "late ", SOON).text;
        assert!(late.starts_with("late 2 "), "{late}");
        let skew = ranks.wait_for_event(rank, "skew ", SOON).text;
        let labels = format!("{{group=\"default\",rank=\"{rank}\",op=\"all_reduce\"}} ");
        let count = skew.split(&labels).nth(1).unwrap_or_default();
        assert!(count.parse::<u32>().is_ok_and(|count| count >= 5), "{skew}");
    }
    finish_well(ranks);
}
