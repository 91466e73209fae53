#![expect(clippy::disallowed_methods, reason = "tests say what time it is")]

use std::cell::{Cell, RefCell};

use rustix::event::{PollFd, PollFlags, Timespec};

use super::super::scripted::{GROUP, Scripted, far_id};
use super::*;
use crate::OpKind;
use crate::fabric::Bell;
use crate::fabric::Order;
use crate::recorder::{CallSite, Site, Sizes};

const SECOND: Duration = Duration::from_secs(1);

fn is_rung(bell: &Bell) -> bool {
    let mut polled = [PollFd::new(bell, PollFlags::IN)];
    rustix::event::poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() == 1
}

fn failed(rank: Rank, kind: ErrorKind, peer: Option<Rank>) -> Vec<u8> {
    let (message, hint) = ("theirs".to_string(), Some("do this".to_string()));
    encode(&Notice::Failed { rank, kind, peer, message, hint })
}

fn said(rank: Rank, seq: u64, head: Option<Head>) -> Testimony {
    Testimony { rank, seq, head, detail: None, saw: None, told: Ranks::default() }
}

fn called(said: Testimony) -> Vec<u8> {
    encode(&said.into())
}

fn head(kind: OpKind, seq: u64) -> Head {
    Label::new(kind, seq).head()
}

fn read(text: &[u8]) -> Notice {
    serde_json::from_slice(text).unwrap()
}

/// What is wrong with the group of rank 0, in short.
fn fault(scene: &Scripted) -> Option<(ErrorKind, Option<Rank>, &str)> {
    scene.ranks[0].failed().map(|fault| (fault.kind, fault.peer, &fault.message[..]))
}

fn check(scene: &mut Scripted, now: Instant) -> bool {
    scene.ranks[0].check(&scene.fabrics[0], now, &mut scene.finished)
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
    assert!(barrier.is_success() && !scene.ranks[0].is_busy());
    let own = scene.receive(0, 4, Some(1), 5);
    scene.receive(1, 4, Some(0), 5);
    let works: Vec<Arc<Shared>> = scene.ranks.iter().flat_map(|state| state.works().cloned()).collect();
    let state = &mut scene.ranks[0];
    assert!(state.is_busy() && state.begins_next());
    assert!(state.has(&works[0]) && !state.has(&works[1]));
    let mut finished = Vec::new();
    state.messages.fail(&Fault::argument("over"), &mut finished);
    assert!(!state.is_busy() && own.1.is_done());
    state.inquest = Some(Inquest::new(1, 0, 2));
    assert!(state.is_busy(), "a verdict is to come");
}

#[test]
fn calls_are_doubtful_while_there_are_reports_of_a_mismatch() {
    let mut scene = Scripted::near(2);
    let state = &mut scene.ranks[0];
    assert!(!state.is_doubtful());
    state.rumours.push(said(1, 1, None));
    assert!(state.is_doubtful());
    state.rumours.clear();
    state.inquest = Some(Inquest::new(1, 0, 2));
    assert!(state.is_doubtful());
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
    assert!(works[0].is_success() && !works[1].is_done());
    let doing = scene.ranks[0].doing();
    assert_eq!((doing.finished, doing.current), (head(OpKind::Barrier, 1), head(OpKind::Barrier, 2)));
    assert!(!scene.poll(0));
}

#[test]
fn what_came_before_the_call_in_question_is_still_done() {
    let mut scene = Scripted::near(2);
    let works = [scene.barrier(0), scene.barrier(0)];
    scene.barrier(1);
    scene.ranks[0].inquest = Some(Inquest::new(2, 0, 2));
    scene.settle();
    scene.barrier(1);
    scene.settle();
    assert!(works[0].is_success() && !works[1].is_done());
    assert!(!check(&mut scene, Instant::now()), "reports are still missing");
    assert!(check(&mut scene, Instant::now() + 20 * SECOND));
    assert_eq!(works[1].exception().unwrap().kind(), ErrorKind::Mismatch);
    assert!(!scene.ranks[0].is_busy());
}

#[test]
fn a_broken_connection_waits_for_news_and_any_other_fault_is_one() {
    let lost = || Fault::new(ErrorKind::PeerLost, "the connection with rank 1 broke: reset by peer").peer(1);
    let mut scene = Scripted::near(2);
    let work = scene.barrier(0);
    let Scripted { fabrics, ranks, finished } = &mut scene;
    ranks[0].trouble(&fabrics[0], lost(), finished);
    assert!(ranks[0].broken.is_some() && ranks[0].failed().is_none());
    assert!(!scene.poll(0) && !work.is_done());
    let Some(Broken { since, .. }) = scene.ranks[0].broken else { panic!("it broke") };
    let mut sockets = Vec::new();
    assert_eq!(scene.ranks[0].prepare_to_sleep(&mut sockets), Some(since + NEWS));
    for (after, is_known) in [(Duration::ZERO, false), (NEWS - SECOND / 1000, false), (NEWS, true)] {
        assert_eq!(check(&mut scene, since + after), is_known, "{after:?}");
        assert_eq!(scene.ranks[0].failed().is_some(), is_known, "{after:?}");
    }
    let message = "the connection with rank 1 (host h1, pid 101) broke: reset by peer";
    assert_eq!(fault(&scene), Some((ErrorKind::PeerLost, Some(1), message)));
    assert!(work.is_done());

    let mut scene = Scripted::near(2);
    scene.barrier(0);
    let Scripted { fabrics, ranks, finished } = &mut scene;
    ranks[0].trouble(&fabrics[0], Fault::new(ErrorKind::Io, "no memory").peer(1), finished);
    assert!(ranks[0].broken.is_none());
    assert_eq!(fault(&scene), Some((ErrorKind::Io, Some(1), "no memory")));

    let mut scene = Scripted::near(2);
    scene.barrier(0);
    let Scripted { fabrics, ranks, finished } = &mut scene;
    ranks[0].trouble(&fabrics[0], Fault::new(ErrorKind::PeerLost, "of no rank"), finished);
    assert_eq!(fault(&scene), Some((ErrorKind::PeerLost, None, "of no rank")));
}

#[test]
fn a_broken_connection_is_explained_by_what_became_of_the_peer() {
    for (fate, is_known_after, text) in [
        (Fate::Died, Duration::ZERO, "rank 1 (host h1, pid 101) died: its process ended"),
        (Fate::Left, WORD, "rank 1 (host h1, pid 101) left: it closed its groups"),
    ] {
        let mut scene = Scripted::near(2);
        scene.barrier(0);
        let (since, fault_) = (Instant::now(), Fault::new(ErrorKind::PeerLost, "it broke").peer(1));
        scene.ranks[0].broken = Some(Broken { rank: 1, fault: fault_, since });
        scene.peer(0, 1).end(fate);
        if !is_known_after.is_zero() {
            assert!(!check(&mut scene, since));
            assert!(!check(&mut scene, since + is_known_after - SECOND / 1000));
            assert_eq!(fault(&scene), None);
        }
        assert!(check(&mut scene, since + is_known_after));
        assert_eq!(fault(&scene), Some((ErrorKind::PeerLost, Some(1), text)));
    }
}

#[test]
fn what_a_rank_sent_before_it_died_still_counts() {
    let mut scene = Scripted::near(2);
    let (_, first) = scene.receive(0, 4, Some(1), 5);
    let (_, second) = scene.receive(0, 4, Some(1), 6);
    scene.send(1, &[7; 4], 0, 5);
    scene.poll(1);
    scene.peer(0, 1).end(Fate::Died);
    assert!(check(&mut scene, Instant::now()));
    assert!(first.is_success() && !second.is_done() && fault(&scene).is_none());
    assert!(check(&mut scene, Instant::now()));
    let text = "rank 1 (host h1, pid 101) died: its process ended";
    assert_eq!(fault(&scene), Some((ErrorKind::PeerLost, Some(1), text)));
    assert!(second.is_done() && !second.is_success());
}

#[test]
fn a_rank_that_left_is_missed_where_it_is_waited_for() {
    let wants = |room: &[Rank], messages: &[Rank]| Wants {
        room: room.to_vec(),
        messages: messages.to_vec(),
        ..Wants::default()
    };
    let mut scene = Scripted::near(3);
    scene.hear(0, &encode(&Notice::Left { rank: 2 }));
    let left = scene.ranks[0].left[0].1;
    for (wants, is_lost) in [
        (wants(&[], &[]), false),
        (wants(&[1], &[1]), false),
        (wants(&[2], &[]), true),
        (wants(&[], &[2]), true),
    ] {
        let lost = scene.ranks[0].lost_among(&wants, left);
        assert_eq!(lost.is_some_and(|lost| lost.has_left), is_lost, "{wants:?}");
    }

    // Of a rank on another host, messages may still arrive for a while.
    let mut scene = Scripted::far(2);
    scene.hear(0, &encode(&Notice::Left { rank: 1 }));
    let left = scene.ranks[0].left[0].1;
    let grace = Fate::Left.grace();
    for wants in [wants(&[1], &[]), wants(&[], &[1])] {
        for (after, is_lost) in [(Duration::ZERO, false), (grace, false), (grace + SECOND / 1000, true)] {
            let lost = scene.ranks[0].lost_among(&wants, left + after);
            assert_eq!(lost.is_some(), is_lost, "{wants:?} after {after:?}");
        }
    }
    assert!(scene.ranks[0].lost_among(&wants(&[], &[]), left + 2 * grace).is_none());

    // And as long as its connection delivers something.
    let _link = scene.open_link(1, Lane::PointToPoint);
    scene.receive(0, 4, Some(1), 5);
    scene.poll(0);
    let now = left + 2 * grace;
    let missed = |scene: &mut Scripted, wants, now| scene.ranks[0].lost_among(&wants, now).is_some();
    assert!(missed(&mut scene, wants(&[1], &[]), now), "it takes nothing any more");
    assert!(!missed(&mut scene, wants(&[], &[1]), now));
    assert!(missed(&mut scene, wants(&[], &[1]), now + 10 * SECOND), "nothing has arrived for long");
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
fn an_operation_that_times_out_names_the_missing_rank() {
    let mut scene = Scripted::near(3);
    let patient = scene.barrier(0);
    assert!(!check(&mut scene, Instant::now()) && !patient.is_done());
    let mut scene = Scripted::near(3);
    let work = scene.receive_within(0, 4, Some(2), 5, Duration::ZERO).1;
    assert!(check(&mut scene, Instant::now()));
    let (kind, peer, message) = fault(&scene).unwrap();
    assert_eq!((kind, peer), (ErrorKind::Timeout, Some(2)));
    assert!(message.starts_with("rank 2 (host h2, pid 102) did not answer for "), "{message}");
    let hint = scene.ranks[0].failed().unwrap().hint.clone().unwrap();
    assert!(hint.starts_with("rank 2 has ") && hint.ends_with("; see its log, or raise `timeout`"), "{hint}");
    assert!(work.is_done());
    assert_eq!(scene.ranks[0].introduce(0), "rank 0");

    let mut scene = Scripted::near(3);
    let first = scene.barrier(0);
    let second = scene.barrier_within(0, Duration::ZERO);
    scene.poll(0);
    assert!(check(&mut scene, Instant::now()));
    let texts = [first, second].map(|work| work.exception().unwrap().to_string());
    assert!(texts[0].contains(", step ") && !texts[0].contains("not begun"), "{}", texts[0]);
    assert!(texts[1].contains("not begun"), "{}", texts[1]);
}

#[test]
fn an_abort_ends_pending_operations_and_is_reported_to_all_ranks() {
    let mut scene = Scripted::near(3);
    let work = scene.barrier(0);
    scene.told(0);
    let [one, two] = [1, 2].map(|rank| scene.fabrics[rank].id());
    assert_eq!(scene.ranks[0].notices(one), Vec::<Vec<u8>>::new());
    let Scripted { fabrics, ranks, finished } = &mut scene;
    ranks[0].abort(&fabrics[0], "enough", finished);
    let message = "rank 0 aborted the group: enough";
    assert_eq!(fault(&scene), Some((ErrorKind::Aborted, Some(0), message)));
    assert_eq!(work.exception().unwrap().kind(), ErrorKind::Aborted);
    let told = scene.told(0);
    assert_eq!(told.len(), 1);
    assert_eq!(told[0].0, [one, two]);
    let notices = scene.ranks[0].notices(two);
    assert_eq!(notices, [told[0].1.clone()], "a peer that is met later hears the same");
    let Notice::Failed { rank: 0, kind: ErrorKind::Aborted, peer: Some(0), message: told, .. } =
        read(&notices[0])
    else {
        panic!("{:?}", read(&notices[0]))
    };
    assert_eq!(told, message);
    assert_eq!(scene.ranks[0].notices(far_id(7)), Vec::<Vec<u8>>::new(), "it is in another group");
    // The first cause stays.
    let Scripted { fabrics, ranks, finished } = &mut scene;
    ranks[0].abort(&fabrics[0], "again", finished);
    assert_eq!(fault(&scene).map(|(.., text)| text), Some(message));
    assert_eq!(scene.told(0), []);
    scene.ranks[0].say_goodbye(&scene.fabrics[0]);
    let told = scene.told(0);
    assert!(matches!(read(&told[0].1), Notice::Left { rank: 0 }) && told[0].0 == [one, two]);
}

#[test]
fn a_timeout_names_the_rank_that_saw_it_once() {
    for (kind, message, told) in [
        (ErrorKind::Timeout, "rank 2 is late", "rank 2 is late (seen by rank 0)"),
        (ErrorKind::PeerSilent, "rank 2 is silent", "rank 2 is silent (seen by rank 0)"),
        (ErrorKind::Timeout, "rank 2 is late (seen by rank 1)", "rank 2 is late (seen by rank 1)"),
        (ErrorKind::PeerLost, "rank 2 died", "rank 2 died"),
    ] {
        let mut scene = Scripted::near(3);
        let Scripted { fabrics, ranks, finished } = &mut scene;
        ranks[0].fail(&fabrics[0], Fault::new(kind, message), finished);
        let Notice::Failed { message, .. } = read(&ranks[0].notice().unwrap()) else { panic!("it failed") };
        assert_eq!(message, told);
    }
}

#[test]
fn a_peer_that_is_met_while_reports_are_collected_gets_one() {
    let mut scene = Scripted::near(3);
    scene.barrier(0);
    scene.barrier(0);
    scene.ranks[0].join_inquest(&scene.fabrics[0], 1, Some(2));
    let peer = scene.fabrics[1].id();
    let notices: Vec<Notice> = scene.ranks[0].notices(peer).iter().map(|text| read(text)).collect();
    let [Notice::Called { rank: 0, seq: 1, head: called, saw: Some(2), .. }] = &notices[..] else {
        panic!("{notices:?}")
    };
    assert_eq!(*called, Some(head(OpKind::Barrier, 1)));
    assert_eq!(scene.ranks[0].notices(far_id(7)), Vec::<Vec<u8>>::new());
}

#[test]
fn what_members_still_have_to_read_outlives_the_group() {
    let mut scene = Scripted::near(2);
    scene.send(0, &[7; 4], 1, 5);
    scene.poll(0);
    let state = scene.ranks.remove(0);
    assert!(state.into_remains().is_some());
    let scene = Scripted::near(2);
    assert!(scene.ranks.into_iter().all(|state| state.into_remains().is_none()));
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
fn a_failure_elsewhere_counts_if_its_ranks_exist() {
    for (rank, peer, is_heard) in
        [(1, None, true), (1, Some(1), true), (2, Some(1), false), (1, Some(2), false), (2, None, false)]
    {
        let mut scene = Scripted::near(2);
        let work = scene.barrier(0);
        scene.hear(0, &failed(rank, ErrorKind::Aborted, peer));
        let expected = is_heard.then_some((ErrorKind::Aborted, peer, "theirs"));
        assert_eq!(fault(&scene), expected, "rank {rank}, peer {peer:?}");
        assert_eq!(work.is_done(), is_heard);
        let warnings = scene.ranks[0].take_warnings();
        if is_heard {
            assert_eq!(warnings, [""; 0]);
            assert_eq!(scene.ranks[0].failed().unwrap().hint.as_deref(), Some("do this"));
        } else {
            assert!(warnings.len() == 1 && warnings[0].contains("group `scripted`"), "{warnings:?}");
        }
        assert_eq!(scene.ranks[0].take_warnings(), [""; 0]);
    }
}

#[test]
fn a_rank_that_has_timed_out_itself_reports_its_own_timeout() {
    for (kind, limit, is_own) in [
        (ErrorKind::Timeout, Duration::ZERO, true),
        (ErrorKind::Timeout, 100 * SECOND, false),
        (ErrorKind::Aborted, Duration::ZERO, false),
    ] {
        let mut scene = Scripted::near(2);
        scene.receive_within(0, 4, Some(1), 5, limit);
        scene.hear(0, &failed(1, kind, None));
        let (heard, _, message) = fault(&scene).unwrap();
        assert_eq!((heard, message != "theirs"), (kind, is_own));
    }
}

#[test]
fn a_failure_elsewhere_does_not_undo_what_is_complete_here() {
    let mut scene = Scripted::near(2);
    let (_, work) = scene.receive(0, 4, Some(1), 5);
    scene.send(1, &[7; 4], 0, 5);
    scene.poll(1);
    scene.hear(0, &failed(1, ErrorKind::Aborted, None));
    assert!(work.is_success() && fault(&scene).is_some());

    // A rank that collects reports itself comes to its own conclusion.
    let mut scene = Scripted::near(2);
    scene.ranks[0].inquest = Some(Inquest::new(1, 0, 2));
    scene.hear(0, &failed(1, ErrorKind::Mismatch, None));
    assert_eq!(fault(&scene), None);
}

#[test]
fn a_report_of_a_call_counts_if_its_ranks_exist() {
    let mut many = Ranks::default();
    many.insert(64);
    for (said, is_heard) in [
        (said(1, 1, None), true),
        (Testimony { saw: Some(1), ..said(1, 1, None) }, true),
        (said(2, 1, None), false),
        (Testimony { saw: Some(2), ..said(1, 1, None) }, false),
        (Testimony { told: many, ..said(1, 1, None) }, false),
    ] {
        let mut scene = Scripted::near(2);
        scene.hear(0, &called(said.clone()));
        assert_eq!(scene.ranks[0].rumours.len(), usize::from(is_heard), "{said:?}");
        let mut scene = Scripted::near(2);
        let Scripted { fabrics, ranks, finished } = &mut scene;
        ranks[0].abort(&fabrics[0], "over", finished);
        scene.hear(0, &called(said));
        assert!(!scene.ranks[0].is_doubtful(), "it has failed already");
        assert_eq!(scene.ranks[0].take_warnings(), [""; 0], "which happens often");
    }
}

#[test]
fn reports_about_later_calls_are_kept_once_each_and_up_to_a_limit() {
    let mut scene = Scripted::near(2);
    for seq in 1..=20 {
        for _ in 0..3 {
            scene.hear(0, &called(said(1, seq, None)));
        }
        assert_eq!(scene.ranks[0].rumours.len(), (seq as usize).min(8));
    }
}

#[test]
fn a_report_is_passed_on_to_ranks_that_do_not_have_it() {
    let mut scene = Scripted::near(4);
    let mut first = said(1, 7, None);
    first.told.insert(0);
    first.told.insert(2);
    scene.hear(0, &called(first.clone()));
    let told = scene.told(0);
    assert_eq!(told.len(), 1);
    assert_eq!(told[0].0, [scene.fabrics[3].id()]);
    let Notice::Called { rank: 1, seq: 7, told: passed, .. } = read(&told[0].1) else { panic!("{told:?}") };
    assert!(passed.contains(3));
    scene.hear(0, &called(Testimony { seq: 8, told: passed, ..first }));
    assert_eq!(scene.told(0), [], "all ranks have it");
}

#[test]
fn only_peers_with_a_way_to_them_count_as_connected() {
    let scene = Scripted::near(3);
    let connected = |scene: &Scripted| scene.ranks[0].connected().collect::<Vec<_>>();
    assert_eq!(connected(&scene), [1, 2]);
    scene.peer(0, 1).end(Fate::Died);
    assert_eq!(connected(&scene), [2]);
    assert_eq!(connected(&Scripted::far(3)), [0; 0], "no peer has been met");
}

#[test]
fn who_left_is_noted_once() {
    let mut scene = Scripted::near(3);
    for rank in [1, 2, 1, 3, 2] {
        scene.hear(0, &encode(&Notice::Left { rank }));
    }
    let left: Vec<Rank> = scene.ranks[0].left.iter().map(|(rank, _)| *rank).collect();
    assert_eq!(left, [1, 2]);
    assert_eq!(scene.ranks[0].take_warnings().len(), 1, "there is no rank 3");
}

#[test]
fn a_report_of_a_late_rank_counts_if_its_ranks_exist() {
    let head = head(OpKind::Barrier, 1);
    for (rank, late, is_heard) in [
        (1, vec![2], true),
        (2, vec![1, 2], true),
        (3, vec![2], false),
        (1, vec![3], false),
        (1, vec![2, 3], false),
    ] {
        let mut scene = Scripted::near(3);
        let told = late.iter().map(|rank| (*rank, [0; 3], [0; 3])).collect();
        scene.hear(0, &encode(&Notice::Stuck { rank, head, waited_ms: 5000, late: told }));
        let warnings = scene.ranks[0].take_warnings();
        assert_eq!(warnings.len(), 1);
        let is_told = warnings[0].contains("not entered barrier #1 of group `scripted` for 5 s");
        assert_eq!(is_told, is_heard, "rank {rank}, {late:?}: {warnings:?}");
        assert_eq!(scene.ranks[0].progress().stuck.is_some(), is_heard);
    }
}

#[test]
fn a_rank_says_what_it_called_once_it_has_come_that_far() {
    let mut scene = Scripted::near(2);
    scene.barrier(0);
    scene.hear(0, &called(said(1, 2, Some(head(OpKind::Split, 2)))));
    assert!(scene.ranks[0].inquest.is_none() && scene.ranks[0].rumours.len() == 1);
    assert!(scene.poll(0), "the first barrier goes on");
    assert!(scene.ranks[0].inquest.is_none());
    scene.told(0);
    scene.barrier(0);
    scene.poll(0);
    assert!(scene.ranks[0].rumours.is_empty());
    assert_eq!(scene.ranks[0].inquest.as_ref().map(Inquest::seq), Some(2));
    let told = scene.told(0);
    let Notice::Called { rank: 0, seq: 2, head: own, .. } = read(&told[0].1) else { panic!("{told:?}") };
    assert_eq!(own, Some(head(OpKind::Barrier, 2)), "not that of another call");
    assert!(scene.ranks[0].inquest.as_ref().is_some_and(|inquest| inquest.is_over(Instant::now())));
    assert!(check(&mut scene, Instant::now()));
    let text = "ranks called different operations as #2: rank 0 called barrier; rank 1 called split";
    assert_eq!(fault(&scene), Some((ErrorKind::Mismatch, Some(1), text)));
}

#[test]
fn a_stray_message_tells_what_its_sender_called_if_it_is_of_the_same_number() {
    for (theirs, is_known) in [(head(OpKind::Split, 1), true), (head(OpKind::Split, 2), false)] {
        let mut scene = Scripted::near(2);
        scene.barrier(0);
        scene.ranks[0].start_inquest(&scene.fabrics[0], 1, theirs);
        let inquest = scene.ranks[0].inquest.as_ref().unwrap();
        assert_eq!((inquest.seq(), inquest.is_over(Instant::now())), (1, is_known));
    }
}

#[test]
fn ranks_that_named_different_roots_before_are_asked_about_that_call() {
    let mut scene = Scripted::near(2);
    let roots = |scene: &mut Scripted, rank: Rank, first: Rank| {
        scene.barrier(rank);
        scene.broadcast(rank, first);
        scene.barrier(rank);
        scene.broadcast(rank, 1);
        scene.barrier(rank);
        scene.ranks[rank].history.clone()
    };
    let own = roots(&mut scene, 0, 0);
    let theirs = roots(&mut scene, 1, 1);
    let earlier = |seq: u64, head: &Head| scene.ranks[0].earlier_root(seq, head);
    let asked: Vec<_> = (1..=5).map(|seq| earlier(seq, &theirs[seq as usize - 1])).collect();
    assert_eq!(asked, [None, None, Some(2), Some(2), Some(4)]);
    assert!((1..=5).all(|seq| earlier(seq, &own[seq as usize - 1]).is_none()), "they agree");
    assert_eq!(earlier(9, &theirs[2]), None, "this rank has not called it");
    assert_eq!(earlier(3, &theirs[4]), None, "another call");
    scene.ranks[0].doing.current = own[2];
    scene.ranks[0].start_inquest(&scene.fabrics[0], 1, theirs[2]);
    assert_eq!(scene.ranks[0].inquest.as_ref().map(Inquest::seq), Some(2));
}

#[test]
fn ranks_with_a_mismatch_dial_all_ranks_in_small_groups_and_none_in_large_ones() {
    for (size, dials) in [(3, 2), (DIALLED_MAX, DIALLED_MAX - 1), (DIALLED_MAX + 1, 0)] {
        let mut scene = Scripted::far(size);
        scene.ranks[0].join_inquest(&scene.fabrics[0], 1, None);
        let orders = scene.fabrics[0].take_orders();
        let dialled = orders.iter().filter(|order| matches!(order, Order::Dial(_))).count();
        assert_eq!(dialled, dials, "of {size}");
        let told = orders.into_iter().find_map(|order| match order {
            Order::Tell { text, .. } => Some(read(&text)),
            _ => None,
        });
        let Some(Notice::Called { told, .. }) = told else { panic!("{told:?}") };
        assert_eq!((0..size).filter(|rank| told.contains(*rank)).count(), dials, "of {size}");
    }
}

#[test]
fn a_reason_of_any_length_arrives_as_a_notice_that_can_be_read() {
    for text in ["disk full; ".repeat(100_000), "ä\u{1}\"\n".repeat(50_000), "short".to_string()] {
        let (kind, hint) = (ErrorKind::Aborted, Some(text.clone()));
        let notice = Notice::Failed { rank: 3, kind, peer: Some(1), message: text.clone(), hint };
        let mut stream = Vec::new();
        ControlFrame::Notice { group: 7, text: encode(&notice) }.encode(&mut stream);
        let Ok(Some((ControlFrame::Notice { text: arrived, .. }, _))) = ControlFrame::decode(&stream) else {
            panic!("it is a notice")
        };
        let heard: Notice = serde_json::from_slice(&arrived).expect("it can be read");
        let Notice::Failed { rank: 3, peer: Some(1), message, .. } = heard else { panic!("{heard:?}") };
        let whole = message == text;
        assert!(whole || message.ends_with(" … (cut)"), "{}", message.len());
        assert!(whole || message.len() > 1000 && message[..9] == text[..9]);
    }
}

#[test]
fn only_what_is_too_long_is_cut() {
    let notice = |len: usize| {
        let message = "a".repeat(len);
        Notice::Failed { rank: 3, kind: ErrorKind::Aborted, peer: None, message, hint: None }
    };
    let longest = ControlFrame::TEXT_MAX - encode(&notice(0)).len();
    for (len, arrives) in [(longest, longest), (longest + 1, ControlFrame::TEXT_MAX / 2 + " … (cut)".len())]
    {
        let Notice::Failed { message, .. } = read(&encode(&notice(len))) else { panic!("another notice") };
        assert_eq!(message.len(), arrives);
    }
    let mut text = "äbc".to_string();
    for (longest, left) in [(4, "äbc"), (3, "äb … (cut)"), (1, " … (cut)")] {
        text.replace_range(.., "äbc");
        cut(&mut text, longest);
        assert_eq!(text, left);
    }
}

#[test]
fn a_call_goes_without_its_detail_where_that_is_too_much() {
    let site = Site::Given(CallSite::default());
    let detail = Some(Detail::new(&site, Sizes::one(5), Sizes::NONE));
    let mut told = Ranks::default();
    for (rank, is_whole) in [(63, true), (64 * ControlFrame::TEXT_MAX, false)] {
        told.insert(rank);
        let notice = Testimony { detail: detail.clone(), told: told.clone(), ..said(1, 7, None) }.into();
        let Notice::Called { detail, .. } = read(&encode(&notice)) else { panic!("another notice") };
        assert_eq!(detail.is_some(), is_whole);
    }
    let late = (0..lookout::STUCK_TOLD).map(|rank| (rank + u32::MAX as usize, [u64::MAX; 3], [u64::MAX; 3]));
    let (head, late) = ([u64::MAX; 3], late.collect());
    let longest = Notice::Stuck { rank: usize::MAX, head, waited_ms: u64::MAX, late };
    assert!(encode(&longest).len() < ControlFrame::TEXT_MAX);
}
