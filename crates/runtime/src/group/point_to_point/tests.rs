use std::task::Poll;

use tenfold_memory::DType;

use super::super::scripted::{Scripted, Started, until_ready};
use super::*;
use crate::fabric::Fate;

/// More than the receiver's mailbox and the sender's slots hold, and not a multiple of a piece.
const LONG: usize = 20 * SLOT + 5;

fn bytes(len: usize) -> Vec<u8> {
    (0..len).map(|index| (index / 7 + index / SLOT) as u8).collect()
}

fn messages(scene: &Scripted) -> &PointToPoint {
    &scene.ranks[0].messages
}

fn kept(scene: &Scripted) -> (Vec<u32>, usize) {
    let messages = messages(scene);
    (messages.kept.iter().flatten().map(|(label, _)| label.tag_of()).collect(), messages.kept_bytes)
}

fn error(work: &Started) -> String {
    work.error().expect("it failed").to_string()
}

fn head(len: usize, tag: u32) -> Head {
    Label::new(OpKind::Send, 9).elements(DType::U8, len).tag(tag).head()
}

#[test]
fn a_long_message_arrives_piece_by_piece_and_the_lane_is_busy_until_then() {
    let mut scene = Scripted::near(2);
    assert!(!messages(&scene).is_busy());
    let sent = scene.send(1, &bytes(LONG), 0, 5);
    assert!(scene.ranks[1].messages.is_busy());
    let (received, work) = scene.receive(0, LONG, Some(1), 5);
    assert!(messages(&scene).is_busy());
    assert!(scene.poll(1), "pieces were sent");
    assert!(!scene.poll(1), "the mailbox is full");
    assert!(scene.poll(0), "pieces were received");
    assert!(messages(&scene).receives.is_empty() && messages(&scene).is_busy(), "it is arriving");
    assert!(!scene.poll(0), "nothing new was sent");
    scene.settle();
    assert!(work.succeeded() && sent.succeeded());
    assert!(received.as_slice::<u8>() == bytes(LONG));
    for rank in 0..2 {
        assert!(!scene.ranks[rank].messages.is_busy());
        assert!(!scene.ranks[rank].is_busy());
    }
}

#[test]
fn one_poll_takes_all_that_is_there() {
    let mut scene = Scripted::near(2);
    for (len, tag) in [(2 * SLOT + 1, 5), (3, 6), (0, 7)] {
        scene.send(1, &bytes(len), 0, tag);
    }
    let works = [(2 * SLOT + 1, 5), (3, 6), (0, 7)].map(|(len, tag)| scene.receive(0, len, Some(1), tag).1);
    scene.poll(1);
    assert!(scene.poll(0));
    assert!(works.iter().all(|work| work.succeeded()));
}

#[test]
fn a_message_that_was_not_asked_for_stays_with_its_sender() {
    let mut scene = Scripted::near(3);
    for tag in [5, 6] {
        scene.send(1, &bytes(4), 0, tag);
    }
    let (_, first) = scene.receive(0, 4, Some(1), 5);
    let (_, other) = scene.receive(0, 4, Some(2), 9);
    scene.settle();
    assert!(first.succeeded() && !other.is_done());
    assert_eq!(kept(&scene), (vec![], 0));
    let (_, any) = scene.receive(0, 4, None, 6);
    scene.settle();
    assert_eq!((any.succeeded(), any.source()), (true, Some(1)));
}

#[test]
fn messages_that_are_passed_over_are_kept_until_they_are_asked_for() {
    let mut scene = Scripted::near(2);
    for (len, tag) in [(3, 5), (4, 6), (5, 7)] {
        scene.send(1, &bytes(len), 0, tag);
    }
    let (_, last) = scene.receive(0, 5, Some(1), 7);
    scene.settle();
    assert!(last.succeeded());
    assert_eq!(kept(&scene), (vec![5, 6], 7));
    let (second, work) = scene.receive(0, 10, None, 6);
    assert!(scene.poll(0), "it is here");
    assert!(work.succeeded() && work.source() == Some(1));
    assert_eq!(second.as_slice::<u8>()[..4], bytes(4));
    assert_eq!(kept(&scene), (vec![5], 3));
    let (_, first) = scene.receive(0, 3, Some(1), 5);
    assert!(scene.poll(0));
    assert!(first.succeeded());
    assert_eq!(kept(&scene), (vec![], 0));
}

#[test]
fn a_receive_takes_messages_of_its_tag_and_source_only() {
    let mut scene = Scripted::near(3);
    let (_, wrong_tag) = scene.receive(0, 4, Some(1), 6);
    let (_, wrong_source) = scene.receive(0, 4, Some(2), 5);
    let (_, right) = scene.receive(0, 4, Some(1), 5);
    scene.send(1, &bytes(4), 0, 5);
    scene.settle();
    assert!(right.succeeded());
    assert!(!wrong_tag.is_done() && !wrong_source.is_done());
}

#[test]
fn sources_take_turns() {
    let mut scene = Scripted::near(3);
    for rank in [1, 1, 2, 2] {
        scene.send(rank, &bytes(4), 0, 5);
    }
    scene.poll(1);
    scene.poll(2);
    let sources: Vec<_> = (0..4)
        .map(|_| {
            let (_, work) = scene.receive(0, 4, None, 5);
            assert!(scene.poll(0));
            work.source()
        })
        .collect();
    assert_eq!(sources, [Some(1), Some(2), Some(1), Some(2)]);
}

#[test]
fn no_message_is_kept_beyond_the_limit_and_an_error_says_so() {
    let mut scene = Scripted::near(2);
    assert_eq!(messages(&scene).obstacle(), None);
    scene.ranks[0].messages.kept_bytes = KEPT_MAX - 1;
    for tag in [5, 6, 7] {
        scene.send(1, &bytes(4), 0, tag);
    }
    let (_, work) = scene.receive(0, 4, Some(1), 7);
    scene.settle();
    assert!(!work.is_done());
    assert_eq!(kept(&scene), (vec![5], KEPT_MAX + 3), "one more is kept while there is room for a byte");
    let obstacle = messages(&scene).obstacle().unwrap();
    assert_eq!(
        obstacle,
        "1024 MiB of messages have arrived that were not received, and rank 1 has sent more: receive them first"
    );
    scene.ranks[0].messages.kept_bytes = KEPT_MAX;
    assert!(messages(&scene).obstacle().is_some());
    let (_, first) = scene.receive(0, 4, Some(1), 5);
    scene.settle();
    assert!(first.succeeded());
    assert!(work.succeeded(), "there was room again for the one between");
    assert_eq!(kept(&scene), (vec![6], KEPT_MAX));
    scene.ranks[0].messages.kept_bytes = KEPT_MAX - 1;
    assert_eq!(messages(&scene).obstacle(), None);
}

#[test]
fn a_message_must_fit_the_receive_that_asks_for_it() {
    for was_kept in [false, true] {
        for (dtype, count, fits) in [
            (DType::U8, 4, true),
            (DType::U8, 5, true),
            (DType::U8, 3, false),
            (DType::I8, 4, false),
            (DType::I8, 3, false),
        ] {
            let mut scene = Scripted::near(2);
            scene.send(1, &bytes(4), 0, 5);
            if was_kept {
                scene.send(1, &bytes(0), 0, 6);
                scene.receive(0, 0, Some(1), 6);
                scene.settle();
                assert_eq!(kept(&scene).0, [5]);
            }
            let (_, work) = scene.receive(0, 0, Some(1), 5);
            let Some(receiving) = scene.ranks[0].messages.receives.last_mut() else { panic!("it waits") };
            receiving.view = tenfold_memory::Buffer::zeros(dtype, count).lend();
            scene.settle();
            assert_eq!(work.succeeded(), fits, "{dtype} × {count}");
            if !fits {
                let expected = format!(
                    "rank 1 called send(uint8 × 4, tag 5), but the receive has room for {dtype} × {count}"
                );
                assert!(error(&work).contains(&expected), "{}", error(&work));
            }
        }
    }
}

#[test]
fn messages_that_break_the_protocol_are_refused() {
    let barrier = Label::new(OpKind::Barrier, 9).head();
    for (pieces, fits) in [
        (vec![(head(4, 5), 4)], true),
        (vec![(head(4, 5), 3)], false),
        (vec![(head(4, 5), 5)], false),
        (vec![(barrier, 0)], false),
        (vec![([u64::MAX; 3], 4)], false),
        (vec![(head(SLOT + 2, 5), SLOT), (head(SLOT + 2, 5), 2)], true),
        (vec![(head(SLOT + 2, 5), SLOT), (head(SLOT + 2, 6), 2)], false),
        (vec![(head(SLOT + 2, 5), SLOT), (head(SLOT + 2, 5), 1)], false),
        (vec![(head(SLOT + 2, 5), SLOT), (head(SLOT + 2, 5), SLOT)], false),
    ] {
        let mut scene = Scripted::near(2);
        let (_, work) = scene.receive(0, 2 * SLOT, Some(1), 5);
        scene.send(1, &[], 0, 4); // so that there is a link
        scene.settle();
        for (head, len) in &pieces {
            scene.post(1, 0, head, &bytes(*len));
        }
        scene.settle();
        assert_eq!(work.succeeded(), fits, "{pieces:?}");
        if !fits {
            let expected = ": rank 1 sent a point-to-point message that ";
            assert!(error(&work).contains(expected), "{}", error(&work));
        }
    }
}

#[test]
fn a_rank_waits_for_room_and_for_messages_of_exactly_those_that_it_needs() {
    let mut scene = Scripted::near(4);
    let mut wants = Wants::default();
    messages(&scene).wants(&mut wants);
    assert!(wants.room.is_empty() && wants.messages.is_empty() && wants.any_of.is_empty());
    scene.send(0, &bytes(4), 3, 5);
    scene.receive(0, 4, Some(2), 5);
    scene.receive(0, 4, None, 6);
    messages(&scene).wants(&mut wants);
    assert_eq!(
        (&wants.room[..], &wants.messages[..], &wants.any_of[..]),
        (&[3][..], &[2][..], &[1, 2, 3][..])
    );
    let mut scene = Scripted::near(2);
    scene.send(1, &bytes(LONG), 0, 5);
    scene.receive(0, LONG, Some(1), 5);
    scene.poll(1);
    scene.poll(0);
    let mut wants = Wants::default();
    messages(&scene).wants(&mut wants);
    assert_eq!(wants.messages, [1], "the rest of a message that is arriving");
}

#[test]
fn the_message_that_is_under_way_for_longest_is_known_whichever_way_it_goes() {
    let mut scene = Scripted::near(3);
    assert!(messages(&scene).oldest().is_none());
    let oldest = |scene: &Scripted| messages(scene).oldest().map(|(work, peer)| (work.label().seq, peer));
    scene.send(1, &bytes(LONG), 0, 5);
    scene.receive(0, LONG, Some(1), 5);
    assert_eq!(oldest(&scene), Some((1, Some(1))));
    scene.poll(1);
    scene.poll(0);
    assert!(messages(&scene).receives.is_empty());
    scene.receive(0, 4, None, 6);
    scene.send(0, &bytes(4), 2, 7);
    assert_eq!(oldest(&scene), Some((1, Some(1))), "it is arriving");
    scene.ranks[0].messages.arriving = vec![None, None, None];
    assert_eq!(oldest(&scene), Some((2, None)));
    scene.ranks[0].messages.receives.clear();
    assert_eq!(oldest(&scene), Some((3, Some(2))));
}

#[test]
fn pieces_are_as_long_as_the_link_allows() {
    assert_eq!(piece(&Scripted::near(2).ranks[0].mesh, 1), SLOT);
    assert_eq!(piece(&Scripted::far(2).ranks[0].mesh, 1), TCP_PIECE);
}

/// Polls rank 0 until something happens.
fn poll_until(scene: &mut Scripted, is_so: impl Fn(&Scripted) -> bool) {
    until_ready(|| {
        scene.poll(0);
        if is_so(scene) { Poll::Ready(()) } else { Poll::Pending }
    });
}

#[test]
fn a_lost_link_fails_only_receives_that_no_other_rank_can_complete() {
    // A message of any rank: rank 2 can still send it.
    let mut scene = Scripted::far(3);
    let mut links = [scene.open_link(1, LANE), scene.open_link(2, LANE)];
    let (_, any) = scene.receive(0, 4, None, 5);
    links[0].send(&head(4, 4), &bytes(4));
    poll_until(&mut scene, |scene| kept(scene).0 == [4]);
    let [first, mut second] = links;
    drop(first);
    until_ready(|| {
        let polled = scene.ranks[0].mesh.poll_any(LANE, 1);
        if polled.is_err() { Poll::Ready(()) } else { Poll::Pending }
    });
    let state = &mut scene.ranks[0];
    let moved = state.messages.poll(&mut state.mesh, &mut scene.finished);
    assert!(!moved.expect("rank 2 can still send it") && state.is_busy());
    second.send(&head(4, 5), &bytes(4));
    poll_until(&mut scene, |_| any.is_done());
    assert_eq!((any.succeeded(), any.source()), (true, Some(2)));
    assert!(scene.ranks[0].failed().is_none());

    // A message of rank 1: no other rank can send it.
    let (_, own) = scene.receive(0, 4, Some(1), 5);
    scene.peer(0, 1).end(Fate::Died);
    scene.poll(0);
    assert!(own.is_done() && scene.ranks[0].failed().is_some());
    assert_eq!(own.error().unwrap().kind(), ErrorKind::PeerLost);
}

#[test]
fn a_lost_link_fails_a_message_that_has_begun_to_arrive() {
    let mut scene = Scripted::far(3);
    let mut link = scene.open_link(1, LANE);
    let (_, any) = scene.receive(0, TCP_PIECE + 1, None, 5);
    link.send(&head(TCP_PIECE + 1, 5), &bytes(TCP_PIECE));
    poll_until(&mut scene, |scene| messages(scene).arriving[1].is_some());
    scene.peer(0, 1).end(Fate::Died);
    drop(link);
    poll_until(&mut scene, |_| any.is_done());
    assert_eq!(any.error().unwrap().kind(), ErrorKind::PeerLost);
}

#[test]
fn a_damaged_link_fails_every_receive() {
    let mut scene = Scripted::far(3);
    let mut link = scene.open_link(1, LANE);
    let (_, any) = scene.receive(0, 4, None, 5);
    link.send(&[u64::MAX; 3], &bytes(4));
    poll_until(&mut scene, |_| any.is_done());
    assert_eq!(any.error().unwrap().kind(), ErrorKind::Protocol);
}
