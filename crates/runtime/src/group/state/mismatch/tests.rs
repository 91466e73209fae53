#![expect(clippy::disallowed_methods, reason = "tests say what time it is")]

use std::time::Instant;

use super::super::super::scripted::{Scripted, far_id};
use super::super::notices::Notice;
use super::super::tests::{called, check, fault, head, read, said};
use super::*;
use crate::fabric::{Fate, Order};
use crate::{ErrorKind, OpKind};

#[test]
fn calls_are_doubtful_while_there_are_reports_of_a_mismatch() {
    let mut scene = Scripted::near(2);
    let state = &mut scene.ranks[0];
    assert!(!state.is_doubtful());
    state.early_reports.push(said(1, 1, None));
    assert!(state.is_doubtful());
    state.early_reports.clear();
    state.comparison = Some(Comparison::new(1, 0, 2));
    assert!(state.is_doubtful());
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
fn a_rank_says_what_it_called_once_it_has_come_that_far() {
    let mut scene = Scripted::near(2);
    let start = Instant::now();
    scene.barrier(0);
    scene.hear(0, &called(said(1, 2, Some(head(OpKind::Split, 2)))));
    assert!(scene.ranks[0].comparison.is_none() && scene.ranks[0].early_reports.len() == 1);
    assert!(scene.poll(0), "the first barrier goes on");
    assert!(scene.ranks[0].comparison.is_none());
    scene.told(0);
    scene.barrier(0);
    scene.poll(0);
    assert!(scene.ranks[0].early_reports.is_empty());
    assert_eq!(scene.ranks[0].comparison.as_ref().map(Comparison::seq), Some(2));
    let told = scene.told(0);
    let Notice::Called { rank: 0, seq: 2, head: own, .. } = read(&told[0].1) else { panic!("{told:?}") };
    assert_eq!(own, Some(head(OpKind::Barrier, 2)), "not that of another call");
    assert!(check(&mut scene, start), "all ranks have reported");
    let text = "ranks called different operations as #2: rank 0 called barrier; rank 1 called split";
    assert_eq!(fault(&scene), Some((ErrorKind::Mismatch, Some(1), text)));
}

#[test]
fn a_stray_message_tells_what_its_sender_called_if_it_is_of_the_same_number() {
    for (theirs, is_known) in [(head(OpKind::Split, 1), true), (head(OpKind::Split, 2), false)] {
        let (mut scene, start) = (Scripted::near(2), Instant::now());
        scene.barrier(0);
        scene.ranks[0].start_comparison(&scene.fabrics[0], 1, theirs);
        let comparison = scene.ranks[0].comparison.as_ref().unwrap();
        assert_eq!((comparison.seq(), comparison.is_over(start)), (1, is_known));
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
    scene.ranks[0].start_comparison(&scene.fabrics[0], 1, theirs[2]);
    assert_eq!(scene.ranks[0].comparison.as_ref().map(Comparison::seq), Some(2));
}

#[test]
fn ranks_with_a_mismatch_dial_all_ranks_in_small_groups_and_none_in_large_ones() {
    for (size, dials) in [(3, 2), (DIALLED_MAX, DIALLED_MAX - 1), (DIALLED_MAX + 1, 0)] {
        let mut scene = Scripted::far(size);
        scene.ranks[0].join_comparison(&scene.fabrics[0], 1, None);
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
fn a_peer_that_is_met_while_reports_are_collected_gets_one() {
    let mut scene = Scripted::near(3);
    scene.barrier(0);
    scene.barrier(0);
    scene.ranks[0].join_comparison(&scene.fabrics[0], 1, Some(2));
    let peer = scene.fabrics[1].id();
    let notices: Vec<Notice> = scene.ranks[0].notices(peer).iter().map(|text| read(text)).collect();
    let [Notice::Called { rank: 0, seq: 1, head: called, saw: Some(2), .. }] = &notices[..] else {
        panic!("{notices:?}")
    };
    assert_eq!(*called, Some(head(OpKind::Barrier, 1)));
    assert_eq!(scene.ranks[0].notices(far_id(7)), Vec::<Vec<u8>>::new());
}
