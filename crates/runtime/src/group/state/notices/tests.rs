use super::super::super::scripted::{Scripted, far_id};
use super::super::super::trouble::comparison::Comparison;
use super::super::lookout::STUCK_TOLD;
use super::super::tests::{SECOND, called, fault, head, read, said};
use super::*;
use crate::OpKind;
use crate::recorder::{CallSite, Site, Sizes};

fn failed(rank: Rank, kind: ErrorKind, peer: Option<Rank>) -> Vec<u8> {
    let (message, hint) = ("theirs".to_string(), Some("do this".to_string()));
    encode(&Notice::Failed { rank, kind, peer, message, hint })
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
    assert_eq!(work.error().unwrap().kind(), ErrorKind::Aborted);
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

/// With one rank for both directions, each of two ranks may be the first that times out.
#[test]
fn a_rank_that_is_reported_as_late_and_waits_for_the_observer_names_it() {
    for (waits, culprit) in [(true, 1), (false, 0)] {
        let mut scene = Scripted::near(2);
        if waits {
            scene.barrier(0);
        }
        scene.hear(0, &failed(1, ErrorKind::Timeout, Some(0)));
        let (kind, peer, message) = fault(&scene).unwrap();
        assert_eq!((kind, peer), (ErrorKind::Timeout, Some(culprit)));
        let is_mirrored = message.contains(" waits for this rank, which waits for it: theirs");
        assert_eq!(is_mirrored, waits, "{message}");
    }
}

#[test]
fn a_rank_that_is_reported_as_silent_names_the_rank_that_does_not_hear_it() {
    let mut scene = Scripted::near(3);
    scene.barrier(0);
    scene.hear(0, &failed(2, ErrorKind::PeerSilent, Some(0)));
    let (kind, peer, message) = fault(&scene).unwrap();
    assert_eq!((kind, peer), (ErrorKind::PeerSilent, Some(2)));
    assert!(
        message.starts_with("rank 2 ") && message.ends_with(" does not hear this rank: theirs"),
        "{message}"
    );
    for (text, seen_by) in
        [("is silent (seen by rank 12)", Some(12)), ("is silent", None), ("(seen by rank x)", None)]
    {
        assert_eq!(observer(text), seen_by, "{text}");
    }
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
    assert!(work.succeeded() && fault(&scene).is_some());

    // A rank that collects reports itself comes to its own conclusion.
    let mut scene = Scripted::near(2);
    scene.ranks[0].comparison = Some(Comparison::new(1, 0, 2));
    scene.hear(0, &failed(1, ErrorKind::Mismatch, None));
    assert_eq!(fault(&scene), None);
}

#[test]
fn a_report_of_a_call_counts_if_its_ranks_exist() {
    let mut many = Ranks::default();
    many.insert(64);
    for (said, is_heard) in [
        (said(1, 1, None), true),
        (CallReport { saw: Some(1), ..said(1, 1, None) }, true),
        (said(2, 1, None), false),
        (CallReport { saw: Some(2), ..said(1, 1, None) }, false),
        (CallReport { told: many, ..said(1, 1, None) }, false),
    ] {
        let mut scene = Scripted::near(2);
        scene.hear(0, &called(said.clone()));
        assert_eq!(scene.ranks[0].early_reports.len(), usize::from(is_heard), "{said:?}");
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
        assert_eq!(scene.ranks[0].early_reports.len(), (seq as usize).min(8));
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
    scene.hear(0, &called(CallReport { seq: 8, told: passed, ..first }));
    assert_eq!(scene.told(0), [], "all ranks have it");
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
        let notice = CallReport { detail: detail.clone(), told: told.clone(), ..said(1, 7, None) }.into();
        let Notice::Called { detail, .. } = read(&encode(&notice)) else { panic!("another notice") };
        assert_eq!(detail.is_some(), is_whole);
    }
    let late = (0..STUCK_TOLD).map(|rank| (rank + u32::MAX as usize, [u64::MAX; 3], [u64::MAX; 3]));
    let (head, late) = ([u64::MAX; 3], late.collect());
    let longest = Notice::Stuck { rank: usize::MAX, head, waited_ms: u64::MAX, late };
    assert!(encode(&longest).len() < ControlFrame::TEXT_MAX);
}
