use super::*;
use crate::fabric::UNCLAIMED_FOR;
use crate::fabric::watch::READS;
use crate::transport::line::{Frame, LinkId};
use crate::{ErrorKind, Tag};
use proptest::prelude::*;
use std::task::Poll;
use tenfold_memory::{Buffer, DType, Lane};

const TCP: usize = 0;
const OTHER_TCP: usize = 1;

fn hello(sender: u128, purpose: Purpose) -> [u8; Hello::LEN] {
    Hello { purpose, sender: FabricId(sender), receiver: FabricId(ME) }.encode()
}

fn frame(frame: &ControlFrame) -> Vec<u8> {
    let mut bytes = Vec::new();
    frame.encode(&mut bytes);
    bytes
}

fn message(payload: &[u8]) -> Vec<u8> {
    let link = LinkId { group: GROUP, lane: Lane::Collective as u8 };
    [&Frame::Message { link, head: [1; 3], len: payload.len(), credit: 0 }.encode(), payload].concat()
}

fn failed() -> ControlFrame {
    let text = br#"{"Failed":{"rank":1,"kind":"Aborted","peer":null,"message":"over","hint":null}}"#;
    ControlFrame::Notice { group: GROUP, text: text.to_vec() }
}

impl Scene<'_> {
    fn has_failed(&self) -> bool {
        !self.rank.handle.engine.notices(FabricId(HONEST)).is_empty()
    }

    /// The next message of a process for the group, once its bytes have come.
    fn message_of(&self, sender: u128) -> Option<Vec<u8>> {
        let line = self.rank.handle.line(FabricId(sender), 0);
        let mut line = line.lock();
        let claim = line.claim(GROUP);
        let polled = line.poll_message(&**self.rank.handle, claim, Lane::Collective as u8);
        match polled.expect("it works") {
            Poll::Pending => None,
            Poll::Ready(message) => Some(message.bytes().to_vec()),
        }
    }

    fn is_open(&self, line: usize) -> bool {
        let line = self.lines[line].as_ref();
        line.is_some_and(|line| self.rank.watch.streams.contains_key(&line.token))
    }
}

#[test]
fn a_second_stream_in_the_name_of_a_peer_is_refused_and_its_end_is_not_the_peers() {
    let mut rank = Rank::new();
    let mut scene = Scene::new(&mut rank);
    scene.say(TCP, &hello(HONEST, Purpose::Control), 0);
    assert!(!scene.is_open(TCP), "it is closed");
    scene.check();
    // Where it is let in, as a rank that has dialled by both ways is, its goodbye speaks for itself alone.
    let unix = LINES / 2;
    scene.say(unix, &hello(HONEST, Purpose::Control), 2);
    assert!(scene.is_open(unix));
    scene.say(unix, &frame(&ControlFrame::Goodbye), 0);
    assert!(!scene.is_open(unix));
    scene.check();
    // The last stream speaks for the peer.
    scene.say(TCP, &hello(ABSENT, Purpose::Control), 0);
    scene.say(TCP, &frame(&ControlFrame::Goodbye), 0);
    let absent = scene.rank.handle.peer(FabricId(ABSENT));
    assert_eq!(absent.fate(), Some(&crate::fabric::Fate::Left));
}

#[test]
fn a_notice_counts_only_from_a_member_of_the_group() {
    let mut rank = Rank::new();
    let mut scene = Scene::new(&mut rank);
    scene.say(TCP, &hello(STRANGER, Purpose::Control), 0);
    scene.say(TCP, &frame(&failed()), 0);
    assert!(scene.is_open(TCP));
    assert!(!scene.has_failed(), "a process that is in no group ended one");
    scene.say(OTHER_TCP, &hello(ABSENT, Purpose::Control), 0);
    scene.say(OTHER_TCP, &frame(&failed()), 0);
    assert!(scene.has_failed(), "a member is heard");
}

#[test]
fn a_connection_for_messages_never_takes_the_place_of_another() {
    let mut rank = Rank::new();
    let mut scene = Scene::new(&mut rank);
    scene.say(TCP, &hello(ABSENT, Purpose::Line { rail: 0 }), 0);
    let mut first = scene.lines[TCP].take().expect("it was opened").end;
    first.write_all(&message(b"first")).unwrap();
    scene.say(OTHER_TCP, &hello(ABSENT, Purpose::Line { rail: 0 }), 0);
    let mut second = scene.lines[OTHER_TCP].take().expect("it was opened").end;
    let _ = second.write_all(&message(b"other")); // it is closed
    scene.say(TCP, &hello(STRANGER, Purpose::Line { rail: 0 }), 0);
    let mut third = scene.lines[TCP].take().expect("it was opened").end;
    third.write_all(&message(b"third")).unwrap();
    assert_eq!(scene.message_of(ABSENT).as_deref(), Some(&b"first"[..]));
    assert_eq!(scene.message_of(ABSENT), None);
}

#[test]
fn a_connection_that_has_ended_gives_way_to_the_next() {
    let mut rank = Rank::new();
    let mut scene = Scene::new(&mut rank);
    scene.say(TCP, &hello(ABSENT, Purpose::Line { rail: 0 }), 0);
    scene.lines[TCP] = None;
    scene.say(TCP, &hello(ABSENT, Purpose::Line { rail: 0 }), 0);
    scene.lines[TCP].as_mut().expect("it was opened").end.write_all(&message(b"x")).unwrap();
    assert_eq!(scene.message_of(ABSENT).as_deref(), Some(&b"x"[..]));
}

/// A firewall, or a limit of open files, may end a line whose peer is alive, as its control stream shows.
#[test]
fn a_broken_data_link_is_not_reported_as_a_death() {
    let mut rank = Rank::new();
    let mut scene = Scene::new(&mut rank);
    scene.say(TCP, &hello(HONEST, Purpose::Line { rail: 0 }), 0);
    scene.lines[TCP] = None;
    let mut tensor = Buffer::zeros(DType::F32, 1);
    let error = scene.group.start_recv(tensor.lend(), 1, Tag(0)).unwrap().wait().unwrap_err();
    assert_eq!((error.kind(), error.peer()), (ErrorKind::PeerLost, Some(1)), "{error}");
    assert!(error.message().starts_with("the connection with rank 1 ("), "{error}");
    assert!(error.to_string().contains("hint: that rank is alive; check the network "), "{error}");
    scene.check();
}

#[test]
fn a_connection_that_no_group_asks_for_expires() {
    let mut rank = Rank::new();
    let mut scene = Scene::new(&mut rank);
    scene.say(TCP, &hello(ABSENT, Purpose::Line { rail: 0 }), 0);
    let mut end = scene.lines[TCP].take().expect("it was opened").end;
    let line = |scene: &Scene<'_>| lock(&scene.rank.handle.lines).get(&(FabricId(ABSENT), 0)).cloned();
    let came = line(&scene).expect("it is kept").lock().unclaimed_since().expect("no group has asked for it");
    let just_before = UNCLAIMED_FOR - std::time::Duration::from_millis(1);
    scene.rank.watch.look_around(came + just_before);
    assert!(line(&scene).is_some());
    scene.rank.watch.look_around(came + UNCLAIMED_FOR);
    assert!(line(&scene).is_none());
    assert_eq!(end.read(&mut [0]).expect("it has ended"), 0);
    scene.check();
}

/// Each frame has a descriptor with it, so that it takes a read of its own.
#[test]
fn a_peer_that_says_much_has_its_turn_and_then_others_have_theirs() {
    let mut rank = Rank::new();
    let mut scene = Scene::new(&mut rank);
    let unix = LINES / 2;
    scene.say(unix, &hello(ABSENT, Purpose::Control), 2);
    let notice = frame(&ControlFrame::Notice { group: GROUP + 1, text: Vec::new() });
    let bell = scene.rank.bell.clone();
    let Line { end, token } = scene.lines[unix].as_ref().expect("it was opened");
    for _ in 0..READS + 10 {
        send_with(end, &notice, &[bell.as_fd()]).expect("its buffer has room");
    }
    let token = *token;
    let heard = |scene: &Scene<'_>| lock(&scene.rank.handle.early).take(Instant::now()).len();
    scene.rank.watch.serve(token);
    assert_eq!(heard(&scene), READS);
    assert_eq!(scene.rank.watch.unread, [token], "its turn comes again, after those of others");
    scene.rank.watch.unread.clear();
    scene.rank.watch.serve(token);
    assert_eq!((heard(&scene), scene.rank.watch.unread.len()), (10, 0));
}

#[test]
fn names_that_no_group_knows_are_bounded() {
    let mut rank = Rank::new();
    let mut scene = Scene::new(&mut rank);
    for name in 0..2 * crate::fabric::UNMET_MAX as u128 {
        scene.say(TCP, &hello(100 + name, Purpose::Control), 0);
        scene.lines[TCP] = None;
        let tokens: Vec<u64> = scene.rank.watch.streams.keys().copied().collect();
        tokens.into_iter().for_each(|token| scene.rank.watch.serve(token));
    }
    let known = lock(&scene.rank.handle.peers).len();
    assert!(known <= crate::fabric::UNMET_MAX, "{known} names are remembered");
    scene.check();
}

#[test]
fn a_peer_that_asks_and_does_not_read_is_closed() {
    let mut rank = Rank::new();
    let mut scene = Scene::new(&mut rank);
    let file = tenfold_memory::FileIdentity { device: 1, inode: 1 };
    let ask = frame(&ControlFrame::Region { offset: 0, len: 1, file }).repeat(1000);
    scene.say(TCP, &hello(ABSENT, Purpose::Control), 0);
    for _ in 0..1000 {
        if !scene.is_open(TCP) {
            return;
        }
        scene.say(TCP, &ask, 0);
        scene.obey();
        scene.check();
    }
    panic!("a million answers are kept for a peer that reads none");
}

/// All frames that the rank has sent on a line.
fn sent(line: &mut Line) -> Vec<ControlFrame> {
    let (mut bytes, mut buffer, mut frames) = (Vec::new(), [0; 4096], Vec::new());
    while let Ok(count @ 1..) = line.end.read(&mut buffer) {
        bytes.extend_from_slice(&buffer[..count]);
    }
    if bytes.starts_with(b"tenfold") {
        bytes.drain(..Hello::LEN);
    }
    while let Some((frame, len)) = ControlFrame::decode(&bytes).expect("the rank sends frames") {
        frames.push(frame);
        bytes.drain(..len);
    }
    frames
}

fn introduce(scene: &Scene<'_>, id: u128) {
    let (host, socket_name, address) = (String::new(), String::new(), None);
    let (near, rails) = (false, Vec::new());
    let whereabouts = crate::fabric::Whereabouts { host, pid: 1, socket_name, near, address, rails };
    scene.rank.handle.peer(FabricId(id)).set_whereabouts(whereabouts);
}

/// It could find out which ranks share a host.
#[test]
fn only_members_of_groups_are_told_whom_a_rank_sees() {
    let mut rank = Rank::new();
    let mut scene = Scene::new(&mut rank);
    scene.say(LINES / 2, &hello(ABSENT, Purpose::Control), 2);
    scene.tick();
    let ask = frame(&ControlFrame::Ask { company: vec![(FabricId(5).mark(), std::time::Duration::ZERO)] });
    for (line, who) in [(TCP, STRANGER), (OTHER_TCP, 4)] {
        if who != STRANGER {
            introduce(&scene, who);
        }
        scene.say(line, &hello(who, Purpose::Control), 0);
        scene.say(line, &ask, 0);
        let frames = sent(scene.lines[line].as_mut().expect("it was opened"));
        let [ControlFrame::Beat { company }] = &frames[..] else { panic!("one answer: {frames:?}") };
        let marks: Vec<_> = company.iter().map(|(mark, _)| *mark).collect();
        let expected = if who == STRANGER { vec![] } else { vec![FabricId(ABSENT).mark()] };
        assert_eq!(marks, expected);
    }
    scene.check();
}

#[test]
fn a_peer_that_asks_again_and_again_is_answered_a_few_times_between_two_ticks() {
    let mut rank = Rank::new();
    let mut scene = Scene::new(&mut rank);
    scene.say(TCP, &hello(ABSENT, Purpose::Control), 0);
    let questions = [ControlFrame::Want, ControlFrame::Ask { company: Vec::new() }];
    let questions = questions.iter().map(frame).collect::<Vec<_>>().concat();
    for _ in 0..2 {
        scene.say(TCP, &questions.repeat(100), 0);
        assert_eq!(sent(scene.lines[TCP].as_mut().expect("it was opened")).len(), 8);
        scene.rank.watch.look_around(scene.rank.watch.next_tick);
        sent(scene.lines[TCP].as_mut().expect("it was opened")); // the rank asks, too
    }
    assert!(scene.is_open(TCP));
}

#[test]
fn what_ranks_of_a_host_tell_each_other_is_heard_from_no_other_host_and_the_other_way_round() {
    let (marks, seen) =
        (vec![FabricId(HONEST).mark()], vec![(FabricId(HONEST).mark(), std::time::Duration::MAX)]);
    let within = [ControlFrame::Hears { afresh: true, marks }, ControlFrame::Misses { seen: seen.clone() }];
    let between = [
        ControlFrame::Want,
        ControlFrame::Ask { company: seen.clone() },
        ControlFrame::Beat { company: seen },
    ];
    for (line, frames) in [(TCP, &within[..]), (LINES / 2, &between[..])] {
        for said in frames {
            let mut rank = Rank::new();
            let mut scene = Scene::new(&mut rank);
            scene.say(line, &hello(ABSENT, Purpose::Control), 2);
            assert!(scene.is_open(line));
            scene.say(line, &frame(said), 0);
            assert!(!scene.is_open(line), "{said:?}");
            scene.check();
        }
    }
}

/// A peer is given up for what it does, and not for what is said about it.
#[test]
fn no_company_and_no_miss_ends_a_rank_that_answers() {
    let mut rank = Rank::new();
    let mut scene = Scene::new(&mut rank);
    let seen = vec![(FabricId(HONEST).mark(), scene.rank.handle.options.heartbeat * 2)];
    introduce(&scene, ABSENT);
    scene.say(TCP, &hello(ABSENT, Purpose::Control), 0);
    scene.say(LINES / 2, &hello(STRANGER, Purpose::Control), 2);
    for _ in 0..100 {
        scene.say(TCP, &frame(&ControlFrame::Beat { company: seen.clone() }), 0);
        scene.say(LINES / 2, &frame(&ControlFrame::Misses { seen: seen.clone() }), 0);
        scene.tick();
        scene.obey();
        scene.check();
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn no_script_panics_or_ends_an_honest_rank(scripts in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..300), 1..8)) {
        let mut rank = Rank::new();
        for script in scripts {
            rank.play(&script);
        }
    }
}
