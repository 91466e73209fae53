use std::cell::{Cell, RefCell};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};

use super::super::scripted::{GROUP, Scripted, far_id};
use super::super::trouble::comparison::Ranks;
use super::notices::{Notice, encode};
use super::*;
use crate::OpKind;
use crate::engine::{GroupIndex, Urgency};
use crate::fabric::Bell;
use crate::recorder::{CallSite, Site, Sizes};

pub(super) const SECOND: Duration = Duration::from_secs(1);

pub(super) fn is_rung(bell: &Bell) -> bool {
    let mut polled = [PollFd::new(bell, PollFlags::IN)];
    rustix::event::poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() == 1
}

pub(super) fn said(rank: Rank, seq: u64, head: Option<Head>) -> CallReport {
    CallReport { rank, seq, head, detail: None, saw: None, told: Ranks::default() }
}

pub(super) fn called(said: CallReport) -> Vec<u8> {
    encode(&said.into())
}

pub(super) fn head(kind: OpKind, seq: u64) -> Head {
    Label::new(kind, seq).head()
}

pub(super) fn read(text: &[u8]) -> Notice {
    serde_json::from_slice(text).unwrap()
}

/// What is wrong with the group of rank 0, in short.
pub(super) fn fault(scene: &Scripted) -> Option<(ErrorKind, Option<Rank>, &str)> {
    scene.ranks[0].failed().map(|fault| (fault.kind, fault.peer, &fault.message[..]))
}

pub(super) fn check(scene: &mut Scripted, now: Instant) -> bool {
    scene.ranks[0].check(&scene.fabrics[0], now, &mut scene.finished)
}

/// Puts rank 0 into the engine of its process, which takes no part in the test before.
pub(super) fn move_into_engine(scene: &mut Scripted) -> GroupIndex {
    scene.fabrics[0].engine.add(Box::new(scene.ranks.remove(0)), false)
}

#[test]
fn calls_are_counted_and_remembered() {
    let mut scene = Scripted::near(2);
    let state = &mut scene.ranks[0];
    assert_eq!((state.id(), state.counts(), state.sequence_number()), (GROUP, (0, 0), 0));
    let numbers = [
        state.next_sequence_number(),
        state.next_message_number(),
        state.next_sequence_number(),
        state.next_message_number(),
        state.next_message_number(),
    ];
    assert_eq!(numbers, [1, 2, 2, 4, 5], "collectives have numbers of their own");
    assert_eq!((state.counts(), state.sequence_number()), ((2, 3), 5));
    for seq in 1..=HISTORY as u64 + 2 {
        state.remember(&Label::new(OpKind::Barrier, seq), 1000 + seq);
    }
    let remembered: Vec<u64> = state.history.iter().map(|head| head[1]).collect();
    assert_eq!(remembered, (3..=HISTORY as u64 + 2).collect::<Vec<_>>());
    assert_eq!((state.doing().current[1], state.doing().since), (66, [1066, 1065]));
    let site = Site::Given(CallSite::default());
    for seq in [7, 8] {
        state.keep_detail(seq, &Arc::new(Detail::new(&site, Sizes::one(seq as usize), Sizes::NONE)));
    }
    assert_eq!(state.details.of(7).unwrap().to_string(), "with input 7");
}

#[test]
fn a_group_is_busy_while_anything_is_under_way() {
    let mut scene = Scripted::near(2);
    assert!(!scene.ranks[0].is_busy() && scene.ranks[0].begins_next());
    let barrier = scene.barrier(0);
    let state = &scene.ranks[0];
    assert!(state.is_busy() && !state.begins_next());
    assert_eq!(format!("{:?}", state.queue[0]), "Job(barrier #1)");
    scene.barrier(1);
    scene.settle();
    assert!(barrier.succeeded() && !scene.ranks[0].is_busy());
    let own = scene.receive(0, 4, Some(1), 5);
    scene.receive(1, 4, Some(0), 5);
    let works: Vec<Arc<Shared>> = scene.ranks.iter().flat_map(|state| state.works().cloned()).collect();
    let state = &mut scene.ranks[0];
    assert!(state.is_busy() && state.begins_next());
    assert!(state.has(&works[0]) && !state.has(&works[1]));
    let mut finished = Vec::new();
    state.messages.fail(&Fault::argument("over"), &mut finished);
    assert!(!state.is_busy() && own.1.is_done());
    state.comparison = Some(Comparison::new(1, 0, 2));
    assert!(state.is_busy(), "a conclusion is to come");
}

#[test]
fn a_collective_that_is_over_at_once_has_waited_for_its_peers_or_not_at_all() {
    for meanwhile in [0, 3] {
        let mut scene = Scripted::near(2);
        let mut run = scene.plan_barrier(0);
        scene.barrier(1);
        if meanwhile == 0 {
            scene.poll(1);
        }
        let Scripted { fabrics, ranks, finished } = &mut scene;
        let [first, second] = &mut ranks[..] else { panic!("there are two ranks") };
        let second = RefCell::new(second);
        let asked = Cell::new(0);
        let over = first.try_at_once(&mut run, 100, || {
            asked.set(asked.get() + 1);
            if asked.get() == meanwhile {
                second.borrow_mut().poll(&fabrics[1], &mut finished.clone());
            }
            false
        });
        let waited = if meanwhile == 0 { Waited::Nanoseconds(0) } else { Waited::All };
        assert_eq!((over, asked.get()), (Some(waited), meanwhile));
        assert_eq!(first.doing().finished, head(OpKind::Barrier, 1));
        assert_eq!(second.borrow().mesh.doing(0).map(|doing| doing.finished), Some(first.doing().finished));
    }
}

#[test]
fn a_short_call_looks_as_often_as_it_may_unless_another_thread_wants_the_lock() {
    let mut scene = Scripted::near(2);
    let mut run = scene.plan_barrier(0);
    let asked = Cell::new(0);
    let mut look = |gives_way: bool| {
        let over = scene.ranks[0].try_at_once(&mut run, 5, || {
            asked.set(asked.get() + 1);
            gives_way
        });
        assert_eq!(over, None);
        asked.replace(0)
    };
    assert_eq!((look(false), look(true)), (5, 1));
}

#[test]
fn a_short_call_wakes_a_peer_that_sleeps() {
    let mut scene = Scripted::near(2);
    scene.barrier(1);
    scene.poll(1);
    scene.ranks[1].prepare_to_sleep(&mut Vec::new());
    let mut run = scene.plan_barrier(0);
    assert!(scene.ranks[0].try_at_once(&mut run, 1, || false).is_some());
    assert!(is_rung(&scene.fabrics[1].bell));
}

#[test]
fn a_peer_that_sleeps_is_woken_in_the_middle_of_a_call_that_takes_longer() {
    let mut scene = Scripted::near(2);
    scene.receive(1, 4, Some(0), 5); // rank 1 sleeps until it hears from rank 0
    scene.poll(1);
    scene.ranks[1].prepare_to_sleep(&mut Vec::new());
    let mut run = scene.plan_barrier(0);
    let rung = RefCell::new(Vec::new());
    let bell = &scene.fabrics[1].bell;
    let over = scene.ranks[0].try_at_once(&mut run, 2 * LOOK_AFTER, || {
        rung.borrow_mut().push(is_rung(bell));
        false
    });
    assert_eq!(over, None);
    let before = rung.borrow().iter().position(|rung| *rung);
    assert_eq!(
        before,
        Some(LOOK_AFTER as usize + 1),
        "not sooner: a peer that is awake has answered by then"
    );
}

#[test]
fn a_rank_that_is_awake_again_is_not_woken() {
    let mut scene = Scripted::near(2);
    for sleeps in [true, false] {
        scene.receive(1, 4, Some(0), 5);
        scene.poll(1);
        scene.ranks[1].prepare_to_sleep(&mut Vec::new());
        if !sleeps {
            scene.ranks[1].wake_up();
        }
        scene.send(0, &[7; 4], 1, 5);
        scene.poll(0);
        assert_eq!(is_rung(&scene.fabrics[1].bell), sleeps);
        scene.fabrics[1].bell.silence();
        scene.ranks[1].wake_up();
        scene.settle();
        assert!(!scene.ranks[1].is_busy());
    }
}

#[test]
fn a_poll_says_whether_anything_moved() {
    let mut scene = Scripted::near(2);
    let works = [scene.barrier(0), scene.barrier(0)];
    assert!(scene.poll(0), "its messages were sent");
    assert!(!scene.poll(0));
    scene.send(0, &[7; 4], 1, 5);
    assert!(scene.poll(0), "the message was sent");
    assert!(!scene.poll(0));
    scene.barrier(1);
    scene.poll(1);
    assert!(scene.poll(0), "one is over, and the next has begun");
    assert!(works[0].succeeded() && !works[1].is_done());
    let doing = scene.ranks[0].doing();
    assert_eq!((doing.finished, doing.current), (head(OpKind::Barrier, 1), head(OpKind::Barrier, 2)));
    assert!(!scene.poll(0));
}

#[test]
fn the_rank_that_is_waited_for_is_named_with_the_operation() {
    let mut scene = Scripted::near(3);
    let id = |rank: Rank| scene.fabrics[rank].id();
    let ids = [id(0), id(1), id(2)];
    assert_eq!(scene.ranks[0].waiting_for(ids[2]), None);
    scene.receive(0, 4, Some(2), 5);
    let waiting_for = |of: usize| scene.ranks[0].waiting_for(ids[of]);
    let text = "rank 2 of group `scripted`; recv(uint8 × 4, tag 5) #1 waits for it";
    assert_eq!((waiting_for(1), waiting_for(2).as_deref()), (None, Some(text)));
    assert!(scene.ranks[0].has_member(ids[1]) && !scene.ranks[0].has_member(far_id(7)));
    assert!(!scene.ranks[0].has_member(ids[0]), "of another member");
}

#[test]
fn what_members_still_have_to_read_outlives_the_group() {
    let mut scene = Scripted::near(2);
    scene.send(0, &[7; 4], 1, 5);
    scene.poll(0);
    let state = scene.ranks.remove(0);
    assert!(state.into_remains(false).is_some());
    let scene = Scripted::near(2);
    assert!(scene.ranks.into_iter().all(|state| state.into_remains(false).is_none()));
}

/// Ranks may have left messages for each other that none of them reads any more.
#[test]
fn what_a_failed_group_leaves_is_not_kept_for_good() {
    for had_failed in [false, true] {
        let mut scene = Scripted::near(2);
        scene.send(0, &[7; 4], 1, 5);
        scene.poll(0);
        let mut remains = scene.ranks.remove(0).into_remains(had_failed).unwrap();
        let looks = (0..100).take_while(|_| !remains.are_over()).count();
        assert!(if had_failed { (2..20).contains(&looks) } else { looks == 100 }, "{looks}");
    }
}

#[test]
fn calls_of_peers_are_counted_by_process() {
    let mut scene = Scripted::near(3);
    for rank in 0..3 {
        scene.barrier(rank);
    }
    scene.settle();
    scene.barrier(1);
    let mut calls = HashMap::new();
    scene.ranks[0].count_calls(&mut calls);
    let counts = [0, 1, 2].map(|rank| calls.get(&scene.fabrics[rank].id()).copied());
    assert_eq!(counts, [None, Some(3), Some(2)]);
}

#[test]
fn an_engine_counts_the_calls_of_peers_in_all_its_groups() {
    let mut scene = Scripted::near(2);
    scene.barrier(0);
    scene.barrier(1);
    scene.settle();
    let index = move_into_engine(&mut scene);
    let engine = &scene.fabrics[0].engine;
    assert_eq!(engine.calls_of_peers(), HashMap::from([(scene.fabrics[1].id(), 2)]));
    engine.remove(index);
}

#[test]
fn an_engine_that_fails_a_group_ends_its_operations_and_reports_the_failure() {
    let mut scene = Scripted::near(2);
    let work = scene.barrier(0);
    let index = move_into_engine(&mut scene);
    let fabric = &scene.fabrics[0];
    scene.told(0);
    fabric.engine.fail(fabric, index, Fault::argument("enough"));
    assert!(is_rung(&fabric.bell), "the thread that watches has to look");
    assert!(work.error().unwrap().to_string().contains("enough"));
    let told = scene.told(0);
    assert_eq!(told[0].0, [scene.fabrics[1].id()]);
    assert!(matches!(read(&told[0].1), Notice::Failed { rank: 0, .. }));
    fabric.engine.remove(index);
}

#[test]
fn a_short_call_is_polled_unless_the_group_is_busy_or_ranks_disagree() {
    let turns = |prepare: fn(&mut Scripted)| {
        let mut scene = Scripted::near(2);
        prepare(&mut scene);
        let index = move_into_engine(&mut scene);
        let fabric = &scene.fabrics[0];
        let turns = fabric.engine.submit(fabric, index, Urgency::Quick, |_, looks| looks.turns).unwrap();
        fabric.engine.remove(index);
        turns
    };
    assert!(turns(|_| {}) > 0);
    assert_eq!(turns(|scene| drop(scene.barrier(0))), 0, "a collective is pending");
    let disagree = |scene: &mut Scripted| scene.hear(0, &called(said(1, 7, Some(head(OpKind::Barrier, 7)))));
    assert_eq!(turns(disagree), 0, "ranks disagree about a later call");
}

#[test]
fn a_thread_that_stopped_waiting_is_not_woken_by_peers() {
    let mut scene = Scripted::near(2);
    let (_, work) = scene.receive(0, 4, Some(1), 5);
    let sent = scene.send(1, &[7; 4], 0, 5);
    let index = move_into_engine(&mut scene);
    assert!(work.wait_for(SECOND / 20).is_err(), "rank 1 has not been polled");
    let Scripted { fabrics, ranks, finished } = &mut scene;
    ranks[0].poll(&fabrics[1], finished);
    assert!(!is_rung(&fabrics[0].bell));
    assert!(work.succeeded());
    ranks[0].poll(&fabrics[1], finished);
    assert!(sent.succeeded());
    fabrics[0].engine.remove(index);
}
