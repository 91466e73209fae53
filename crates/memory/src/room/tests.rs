use super::*;
use crate::Payload;

fn rooms() -> (Room, PeerRoom, Arc<Segment>) {
    let segment = Segment::new(Room::len_for(3) + 4 * PAGE).unwrap();
    let room = Room::new(&segment, 3, 5).unwrap();
    let peer = Arc::new(PeerSegment::map(&segment.share().unwrap()).unwrap());
    let theirs = PeerRoom::new(peer, room.offset(), 3, 5).unwrap();
    (room, theirs, segment)
}

#[test]
fn peers_see_what_a_rank_does() {
    let (room, theirs, _segment) = rooms();
    assert_eq!(theirs.doing(), Some(Doing::default()));
    let doing = Doing { current: [1, 2, 3], finished: [4, 5, 6], since: [7, 8] };
    room.show(&doing);
    assert_eq!(theirs.doing(), Some(doing));
}

#[test]
fn peers_never_see_half_of_what_a_rank_does() {
    let (room, theirs, _segment) = rooms();
    let is_over = std::sync::atomic::AtomicBool::new(false);
    let of = |number: u64| Doing { current: [number; 3], finished: [number; 3], since: [number; 2] };
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut seen = 0;
            while !is_over.load(Ordering::Relaxed) {
                // Nothing: the writer was stopped in the middle.
                if let Some(doing) = theirs.doing() {
                    assert_eq!(doing, of(doing.current[0]));
                    assert!(doing.current[0] >= seen, "time goes forward");
                    seen = doing.current[0];
                }
            }
        });
        (1..=300_000).for_each(|number| room.show(&of(number)));
        is_over.store(true, Ordering::Relaxed);
        reader.join().unwrap();
    });
    assert_eq!(theirs.doing(), Some(of(300_000)));
}

#[test]
fn while_a_rank_writes_what_it_does_peers_see_nothing() {
    let (room, theirs, _segment) = rooms();
    room.show(&Doing::default());
    let version = &room.board().version;
    assert_eq!(version.load(Ordering::Relaxed), 2);
    version.store(3, Ordering::Relaxed); // stopped in the middle
    assert_eq!(theirs.doing(), None);
    room.show(&Doing::default());
    assert_eq!(version.load(Ordering::Relaxed), 4);
    assert_eq!(theirs.doing(), Some(Doing::default()));
}

#[test]
fn a_room_is_as_long_as_its_board_its_records_and_its_slots() {
    assert_eq!(slots(3), [16, 14]);
    assert_eq!(slots(100), [100, 208]);
    assert_eq!(slots(10_000), [10_000, 8 + 2 * 8192]);
    assert_eq!(Room::len_for(3), 4 * 4096 + 30 * 128 * 1024);
    let (room, ..) = rooms();
    assert_eq!(room.key(), 5);
    assert_eq!(format!("{room:?}"), "Room(3 places at 4096)");
}

#[test]
fn slots_fill_the_room_behind_its_records_and_peers_find_them() {
    let (room, theirs, _segment) = rooms();
    let count: usize = slots(3).iter().sum();
    for index in 0..count {
        assert_eq!(room.slot(index).len(), SLOT);
        room.slot(index).copy_from(Bytes::of(&[1 + index as u8; SLOT]));
    }
    for index in 0..count {
        let seen = theirs.bytes(room.slot_place(index), SLOT).unwrap().to_vec();
        assert!(seen.iter().all(|byte| *byte == 1 + index as u8), "slot {index}");
    }
    let records = theirs.bytes((room.offset() + PAGE) as u64, 3 * PAGE).unwrap().to_vec();
    assert!(records.iter().all(|byte| *byte == 0), "no slot lies in a record");
    let (first, end) = (room.slot_place(0), (room.offset() + Room::len_for(3)) as u64);
    assert_eq!(room.slot_place(count - 1) + SLOT as u64, end);
    let staged = [first - 1, first, end - 1, end].map(|place| theirs.is_staged(place));
    assert_eq!(staged, [false, true, true, false]);
}

#[test]
fn a_room_whose_owner_goes_stays_as_it_is() {
    let (room, theirs, segment) = rooms();
    segment.abandon();
    drop(room);
    assert!(theirs.is_open(), "what peers have not read yet is still there");
}

#[test]
fn a_link_knows_what_was_read_and_who_sleeps() {
    let (room, theirs, _segment) = rooms();
    let room = Arc::new(room);
    let mut sender = Link::new(&room, 1, theirs.clone(), 0).unwrap();
    let mut receiver = Link::new(&room, 0, theirs, 1).unwrap();
    for lane in [Lane::Collective, Lane::PointToPoint] {
        assert!(sender.is_read(), "nothing was sent");
        sender.outbox(lane).post(&[1, 0, 0], Payload::Inline(b"short"));
        assert!(receiver.peek(lane).is_some());
        assert!(!sender.is_read(), "{lane:?}");
        assert!(receiver.take(lane));
    }
    assert!(sender.is_read());
    assert!(!sender.peer_sleeps());
    receiver.want(Wanted::ANYTHING);
    assert!(sender.peer_sleeps());
    assert!(!receiver.peer_sleeps());
    receiver.want(Wanted::NOTHING);
    assert!(!sender.peer_sleeps());
}

#[test]
fn a_room_whose_owner_left_is_closed_and_says_nothing() {
    let (room, theirs, segment) = rooms();
    drop(room);
    assert!(!theirs.is_open());
    assert_eq!(theirs.doing(), None);
    assert_eq!(segment.used(), 0);
    let _next = Room::new(&segment, 3, 6).unwrap();
    assert!(!theirs.is_open(), "the next room in the same place is another one");
}

#[test]
fn a_place_has_one_link_at_a_time() {
    let (room, theirs, _segment) = rooms();
    let room = Arc::new(room);
    let link = Link::new(&room, 1, theirs.clone(), 2).unwrap();
    assert!(Link::new(&room, 1, theirs.clone(), 2).is_none());
    assert!(Link::new(&room, 3, theirs.clone(), 2).is_none(), "there is no such place");
    drop(link);
    assert!(Link::new(&room, 1, theirs, 2).is_some());
}

#[test]
fn a_message_that_points_outside_the_segment_has_no_bytes() {
    let (room, theirs, _segment) = rooms();
    let room = Arc::new(room);
    // A room that is its own peer: place 0 speaks to place 1.
    let mut sender = Link::new(&room, 1, theirs.clone(), 0).unwrap();
    let receiver = Link::new(&room, 0, theirs, 1).unwrap();
    sender.outbox(Lane::Collective).post(&[1, 0, 0], Payload::At { place: room.slot_place(0), len: 5 });
    assert_eq!(
        receiver.peek(Lane::Collective).map(|(_, bytes)| bytes.map(|bytes| bytes.len())),
        Some(Some(5))
    );
    let mut receiver = receiver;
    for (place, len) in [(u64::MAX - 1, 8), (0, u64::MAX), (1 << 40, 1)] {
        assert!(receiver.take(Lane::Collective));
        sender.outbox(Lane::Collective).post(&[1, 0, 0], Payload::At { place, len });
        assert!(matches!(receiver.peek(Lane::Collective), Some((_, None))), "{place} {len}");
    }
}

#[test]
fn a_message_in_a_region_stays_readable_until_it_is_taken_and_a_later_one_is_not() {
    let (room, theirs, segment) = rooms();
    let room = Arc::new(room);
    let peer = Arc::clone(&theirs.segment);
    let mut sender = Link::new(&room, 1, theirs.clone(), 0).unwrap();
    let mut receiver = Link::new(&room, 0, theirs, 1).unwrap();
    let (mut tensor, region) = crate::Buffer::in_file(crate::DType::U8, 100).unwrap();
    tensor.as_mut_bytes()[95..].copy_from_slice(b"hello");
    let lease = segment.register(&region, |_| ()).unwrap();
    let message = Payload::At { place: lease.offset() as u64 + 95, len: 5 };
    let read = |receiver: &Link| {
        receiver.peek(Lane::Collective).and_then(|(_, bytes)| bytes).map(|bytes| bytes.to_vec())
    };

    sender.outbox(Lane::Collective).post(&[1, 0, 0], message);
    assert_eq!(read(&receiver), None, "it does not know the region yet");
    peer.add_region(lease.offset(), Arc::clone(region.readable())).unwrap();
    assert_eq!(read(&receiver).unwrap(), b"hello");
    peer.remove_region(lease.offset());
    assert_eq!(read(&receiver).unwrap(), b"hello", "a reader that has begun goes on");
    assert!(receiver.take(Lane::Collective));
    sender.outbox(Lane::Collective).post(&[1, 0, 0], message);
    assert_eq!(read(&receiver), None, "it is stale");
}

#[test]
fn what_is_read_of_memory_that_was_taken_back_does_not_count_and_what_was_staged_does() {
    let (room, theirs, segment) = rooms();
    let room = Arc::new(room);
    let lent = segment.allocate(PAGE).unwrap();
    let mut sender = Link::new(&room, 1, theirs.clone(), 0).unwrap();
    let mut receiver = Link::new(&room, 0, theirs, 1).unwrap();
    let in_place = Payload::At { place: lent.offset() as u64, len: 100 };
    let messages = [in_place, Payload::At { place: room.slot_place(1), len: 100 }, Payload::Inline(b"short")];
    let read = |receiver: &mut Link, meanwhile: &dyn Fn()| {
        assert!(matches!(receiver.peek(Lane::PointToPoint), Some((_, Some(_)))));
        meanwhile();
        receiver.take(Lane::PointToPoint)
    };
    for message in messages.iter().chain(&messages) {
        sender.outbox(Lane::PointToPoint).post(&[1, 0, 0], *message);
    }
    for _ in &messages {
        assert!(read(&mut receiver, &|| ()));
    }
    assert!(!read(&mut receiver, &|| room.withdraw()), "taken back while it was read");
    assert!(read(&mut receiver, &|| ()) && read(&mut receiver, &|| ()), "staged and short messages stay");
    sender.outbox(Lane::PointToPoint).post(&[1, 0, 0], in_place);
    assert!(!read(&mut receiver, &|| ()), "taken back before it was read");
}

#[test]
fn a_message_is_what_it_was_at_the_first_look() {
    let (room, theirs, _segment) = rooms();
    let room = Arc::new(room);
    let mut sender = Link::new(&room, 1, theirs.clone(), 0).unwrap();
    let mut receiver = Link::new(&room, 0, theirs, 1).unwrap();
    let post = |sender: &mut Link, len| {
        sender.outbox(Lane::Collective).post(&[1, len, 0], Payload::At { place: room.slot_place(0), len });
    };
    post(&mut sender, 100);
    let look = |receiver: &Link| {
        let (head, bytes) = receiver.peek(Lane::Collective).unwrap();
        (head[1], bytes.unwrap().len())
    };
    assert_eq!(look(&receiver), (100, 100));
    room.bytes_of_room().part(PAGE, 4 * PAGE).copy_from(Bytes::of(&[0xff; 3 * PAGE])); // all records
    assert_eq!(look(&receiver), (100, 100));
    assert!(receiver.take(Lane::Collective));
    assert!(receiver.peek(Lane::Collective).is_none());
}

#[test]
fn a_room_that_cannot_be_there_is_refused() {
    let (room, theirs, _segment) = rooms();
    for (offset, places) in [(room.offset() + 1, 3), (usize::MAX, 3), (room.offset(), 1000), (0, 1 << 40)] {
        assert!(PeerRoom::new(theirs.segment.clone(), offset, places, 5).is_none(), "{offset} {places}");
    }
}
