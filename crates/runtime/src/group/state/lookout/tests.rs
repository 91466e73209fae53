use std::io;
use std::sync::Mutex;
use std::sync::atomic::Ordering;

use super::super::super::scripted::Scripted;
use super::super::super::trouble::comparison::Comparison;
use super::super::super::trouble::stuck::StuckSettings;
use super::super::tests::{SECOND, fault, head, is_rung, move_into_engine, read};
use super::*;
use crate::fabric::Fate;

fn settings(after: Duration, policy: StuckPolicy) -> StuckSettings {
    StuckSettings { after: Some(after), policy }
}

/// What rank 0 writes into its log after a look at the boards.
fn look(scene: &mut Scripted) -> Vec<String> {
    scene.ranks[0].look_at_others(&scene.fabrics[0], &mut scene.finished);
    scene.ranks[0].take_warnings()
}

/// What rank 0 writes into its log if another rank waits in the barrier `number` for `late`.
fn hear(scene: &mut Scripted, number: u64, waited: Duration, late: &[Rank]) -> Vec<String> {
    let late = late.iter().map(|rank| (*rank, [0; 3], [0; 3])).collect();
    let (head, waited_ms) = (head(OpKind::Barrier, number), waited.as_millis() as u64);
    scene.hear(0, &encode(&Notice::Stuck { rank: 1, head, waited_ms, late }));
    scene.ranks[0].take_warnings()
}

/// What this thread has written into its log.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn is_reported(scene: &Scripted) -> bool {
    scene.ranks[0].progress().stuck.is_some()
}

fn dumps(scene: &Scripted) -> usize {
    scene.ranks[0].record.dumps.load(Ordering::Relaxed)
}

#[test]
fn a_rank_that_is_alive_and_late_is_reported_once_the_limit_has_passed() {
    let mut scene = Scripted::near(3);
    scene.barrier(0);
    scene.barrier(2);
    scene.ranks[0].doing.since[0] = recorder::host_now();
    assert_eq!(look(&mut scene), [""; 0]);
    scene.ranks[0].doing.since[0] = 1;
    let warnings = look(&mut scene);
    assert_eq!(warnings.len(), 1);
    let start = "rank 1 (host h1, pid 101) is alive and has not entered barrier #1 of group `scripted` for ";
    assert!(warnings[0].starts_with(start), "{warnings:?}");
    let told = scene.told(0);
    let Notice::Stuck { rank: 0, head: of, late, .. } = read(&told[0].1) else { panic!("{told:?}") };
    assert_eq!((of, &late[..]), (head(OpKind::Barrier, 1), &[(1, [0; 3], [0; 3])][..]));
    assert_eq!(look(&mut scene), [""; 0], "the wait has not doubled");
    assert!(is_reported(&scene), "it is still so");
    scene.barrier(1);
    scene.settle();
    look(&mut scene);
    assert!(!is_reported(&scene), "the barrier is over");
}

#[test]
fn an_engine_logs_what_its_groups_say_about_late_ranks_and_then_rings() {
    let mut scene = Scripted::near(2);
    scene.barrier(0);
    scene.ranks[0].doing.since[0] = 1;
    let index = move_into_engine(&mut scene);
    let fabric = &scene.fabrics[0];
    let look = || {
        let log = Log::default();
        let writer = log.clone();
        let subscriber = tracing_subscriber::fmt().with_writer(move || writer.clone()).finish();
        tracing::subscriber::with_default(subscriber, || fabric.engine.look_at_others(fabric));
        String::from_utf8(log.0.lock().unwrap().clone()).unwrap()
    };
    let log = look();
    assert!(log.contains("rank 1 (host h1, pid 101) is alive and has not entered barrier #1"), "{log:?}");
    assert!(is_rung(&fabric.bell), "the group may have failed");
    fabric.bell.silence();
    assert_eq!(look(), "", "the wait has not doubled");
    assert!(!is_rung(&fabric.bell));
    fabric.engine.remove(index);
}

#[test]
fn a_rank_that_died_is_not_reported_as_late_and_neither_is_one_during_a_mismatch() {
    let mut scene = Scripted::near(2);
    scene.barrier(0);
    scene.ranks[0].comparison = Some(Comparison::new(1, 0, 2));
    assert_eq!(look(&mut scene), [""; 0]);
    scene.ranks[0].comparison = None;
    scene.peer(0, 1).end(Fate::Died);
    assert_eq!(look(&mut scene), [""; 0]);
}

#[test]
fn a_message_without_a_partner_is_reported_once_the_limit_has_passed() {
    let mut scene = Scripted::near_with(2, settings(1000 * SECOND, StuckPolicy::Warn));
    scene.receive(0, 4, Some(1), 5);
    assert_eq!(look(&mut scene), [""; 0]);
    for (kind, text) in [
        (
            OpKind::Recv,
            "recv(uint8 × 4, tag 5) #1 of group `scripted` waits for 0 s for rank 1 (host h1, pid 101), \
                        which is alive and has sent nothing that matches; rank 1 has called nothing in this group",
        ),
        (
            OpKind::Send,
            "send(uint8 × 4, tag 5) #1 of group `scripted` waits for 0 s for rank 1 (host h1, pid 101), \
                        which is alive and does not receive it; rank 1 has called nothing in this group",
        ),
        (
            OpKind::RecvAnySource,
            "recv_any_source(uint8 × 4, tag 5) #1 of group `scripted` waits for 0 s for a message \
                                 of any rank",
        ),
    ] {
        let mut scene = Scripted::near_with(2, settings(Duration::ZERO, StuckPolicy::Warn));
        match kind {
            OpKind::Send => drop(scene.send(0, &[7; 4], 1, 5)),
            OpKind::Recv => drop(scene.receive(0, 4, Some(1), 5)),
            _ => drop(scene.receive(0, 4, None, 5)),
        }
        let warnings = look(&mut scene);
        let (start, end) = text.split_once("0 s").expect("a time is in it"); // longer on a busy machine
        assert_eq!(warnings.len(), 1);
        assert!(warnings[0].starts_with(start) && warnings[0].ends_with(end), "{warnings:?}");
        look(&mut scene);
        assert!(is_reported(&scene), "it is still so");
    }
}

#[test]
fn a_report_about_a_message_lasts_until_that_message_has_arrived() {
    let mut scene = Scripted::near_with(2, settings(1000 * SECOND, StuckPolicy::Warn));
    scene.receive(0, 4, Some(1), 5);
    scene.ranks[0].stuck.say(Waiting::Message(1), 2000 * SECOND, false, "it does not arrive");
    look(&mut scene);
    assert!(is_reported(&scene), "it is still so");
    scene.receive(0, 4, Some(1), 6);
    scene.send(1, &[7; 4], 0, 5);
    scene.settle();
    assert!(scene.ranks[0].is_busy(), "the second message is under way");
    look(&mut scene);
    assert!(!is_reported(&scene), "the first message has arrived");
}

#[test]
fn what_another_rank_reports_counts_once_and_until_the_collective_is_over() {
    let mut scene = Scripted::near(3);
    assert_eq!(hear(&mut scene, 1, 5 * SECOND, &[]), [""; 0], "no rank is late");
    assert_eq!(hear(&mut scene, 1, 5 * SECOND, &[2]).len(), 1);
    assert_eq!(hear(&mut scene, 1, 5 * SECOND, &[2]), [""; 0]);
    assert_eq!(hear(&mut scene, 1, 10 * SECOND, &[2]).len(), 1, "the wait has doubled");
    look(&mut scene);
    assert!(is_reported(&scene), "this rank has not entered it either");
    (0..3).for_each(|rank| drop(scene.barrier(rank)));
    scene.settle();
    look(&mut scene);
    assert!(!is_reported(&scene), "it is over");
    assert_eq!(hear(&mut scene, 1, 40 * SECOND, &[2]), [""; 0]);
}

#[test]
fn a_rank_that_keeps_others_waiting_says_so_unless_it_has_come_meanwhile() {
    let mut scene = Scripted::near(2);
    let warnings = hear(&mut scene, 1, 5 * SECOND, &[0]);
    let text = "the other ranks of group `scripted` wait for this one, which has not entered barrier #1 for 5 s; this \
                rank has called nothing in this group";
    assert_eq!(warnings, [text]);
    let mut scene = Scripted::near(2);
    scene.barrier(0);
    assert_eq!(hear(&mut scene, 1, 5 * SECOND, &[0]), [""; 0]);
}

#[test]
fn the_policy_decides_about_dumps_and_failures() {
    let (what, text) = (Waiting::Collective(1), || "rank 1 is late".to_string());
    for (policy, count) in [(StuckPolicy::Warn, 0), (StuckPolicy::Dump, 1)] {
        let mut scene = Scripted::near_with(2, settings(SECOND, policy));
        for waited in [5, 10] {
            let Scripted { fabrics, ranks, finished } = &mut scene;
            assert!(!ranks[0].say_stuck(&fabrics[0], what, waited * SECOND, text(), Some(1), finished));
            assert_eq!((dumps(&scene), scene.ranks[0].take_warnings().len()), (count, 1), "{policy:?}");
        }
        let mut scene = Scripted::near_with(2, settings(SECOND, policy));
        for waited in [5, 10] {
            assert_eq!(hear(&mut scene, 1, waited * SECOND, &[1]).len(), 1);
            assert_eq!(dumps(&scene), count, "{policy:?}");
        }
    }
    let mut scene = Scripted::near_with(2, settings(SECOND, StuckPolicy::Abort));
    let work = scene.barrier(0);
    let Scripted { fabrics, ranks, finished } = &mut scene;
    assert!(ranks[0].say_stuck(&fabrics[0], what, 5 * SECOND, text(), Some(1), finished));
    assert_eq!(fault(&scene), Some((ErrorKind::Timeout, Some(1), "rank 1 is late")));
    assert!(work.is_done() && look(&mut scene).len() == 1);
}

#[test]
fn ranks_of_a_subgroup_are_reported_with_their_numbers_in_the_job() {
    let scene = Scripted::near(2);
    let state = &scene.ranks[0];
    assert_eq!((state.job_rank(1), state.introduce_to_all(1)), (1, "rank 1 (host h1, pid 101)".to_string()));
    state.record.describe(None, Some(&[10, 11]));
    let text = "rank 11 (host h1, pid 101; rank 1 of group `scripted`)";
    assert_eq!((state.job_rank(1), &state.introduce_to_all(1)[..]), (11, text));
    assert_eq!(state.introduce_to_all(0), "rank 10 (rank 0 of group `scripted`)");
}
