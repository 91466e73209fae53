#![expect(clippy::disallowed_methods, reason = "tests say what time it is")]

use std::task::Poll;

use crate::group::scripted::until_ready;
use tenfold_memory::Lane;

use super::super::super::scripted::Scripted;
use super::super::super::trouble::comparison::Comparison;
use super::super::notices::{Notice, encode};
use super::super::tests::{SECOND, check, fault};
use super::*;

#[test]
fn what_came_before_the_call_in_question_is_still_done() {
    let mut scene = Scripted::near(2);
    let works = [scene.barrier(0), scene.barrier(0)];
    scene.barrier(1);
    let start = Instant::now();
    scene.ranks[0].comparison = Some(Comparison::new(2, 0, 2));
    scene.settle();
    scene.barrier(1);
    scene.settle();
    assert!(works[0].succeeded() && !works[1].is_done());
    assert!(!check(&mut scene, start), "reports are still missing");
    assert!(check(&mut scene, Instant::now() + 20 * SECOND));
    assert_eq!(works[1].error().unwrap().kind(), ErrorKind::Mismatch);
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
        let (since, broke) = (Instant::now(), Fault::new(ErrorKind::PeerLost, "it broke").peer(1));
        scene.ranks[0].broken = Some(Broken { rank: 1, fault: broke, since });
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
    assert!(first.succeeded() && !second.is_done() && fault(&scene).is_none());
    assert!(check(&mut scene, Instant::now()));
    let text = "rank 1 (host h1, pid 101) died: its process ended";
    assert_eq!(fault(&scene), Some((ErrorKind::PeerLost, Some(1), text)));
    assert!(second.is_done() && !second.succeeded());
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
    let mut link = scene.open_link(1, Lane::PointToPoint);
    scene.receive(0, 4, Some(1), 5);
    link.send_part(&[1; 3], &[0], 4);
    until_ready(|| {
        scene.poll(0);
        let is_arriving = scene.ranks[0].mesh.is_arriving(1, left + 2 * grace);
        if is_arriving { Poll::Ready(()) } else { Poll::Pending }
    });
    let now = left + 2 * grace;
    let missed = |scene: &mut Scripted, wants, now| scene.ranks[0].lost_among(&wants, now).is_some();
    assert!(missed(&mut scene, wants(&[1], &[]), now), "it takes nothing any more");
    assert!(!missed(&mut scene, wants(&[], &[1]), now));
    assert!(missed(&mut scene, wants(&[], &[1]), now + 10 * SECOND), "nothing has arrived for long");
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
    let texts = [first, second].map(|work| work.error().unwrap().to_string());
    assert!(texts[0].contains(", step ") && !texts[0].contains("not begun"), "{}", texts[0]);
    assert!(texts[1].contains("not begun"), "{}", texts[1]);
}
