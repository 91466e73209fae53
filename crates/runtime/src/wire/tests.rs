use super::*;
use proptest::prelude::*;

const ME: FabricId = FabricId(0x1234_5678_9abc_def0_1122_3344_5566_7788);

fn hello() -> Hello {
    Hello { purpose: Purpose::Line { rail: 0 }, sender: FabricId(99), receiver: ME }
}

#[test]
fn a_hello_is_read_once_it_is_whole_and_not_a_byte_further() {
    let control = Hello { purpose: Purpose::Control, ..hello() };
    let probe = Hello { purpose: Purpose::Probe, ..hello() };
    for hello in [hello(), control, probe] {
        let bytes = hello.encode();
        for len in 0..bytes.len() {
            assert_eq!(Hello::decode(&bytes[..len], ME), Ok(None));
        }
        assert_eq!(Hello::decode(&bytes, ME), Ok(Some(hello)));
        let mut stream = &[&bytes[..], b"what follows"].concat()[..];
        let read = HelloReader::new().poll(&mut stream, ME).expect("it is right");
        assert_eq!(read, Poll::Ready(hello));
        assert_eq!(stream, b"what follows");
    }
}

#[test]
fn whoever_says_something_else_is_told_what_was_wrong() {
    let refusal = |bytes: &[u8]| Hello::decode(bytes, ME).expect_err("it is wrong").to_string();
    assert_eq!(refusal(b"GET / HTTP/1.1\r\n"), "it is not a tenfold process: it began with `GET / HT`");
    assert_eq!(
        refusal(b"t\0"),
        "it is not a tenfold process: it began with `t\\x00`",
        "known before it is whole"
    );
    let changed = |at: usize, to: u8| {
        let mut bytes = hello().encode();
        bytes[at] = to;
        bytes
    };
    assert_eq!(
        refusal(&changed(8, 1)[..10]),
        "it speaks version 1 of the protocol and this process version 8"
    );
    assert_eq!(
        refusal(&changed(63, 0)),
        "it meant to reach process 003456789abcdef01122334455667788, which listened on this port before"
    );
    assert_eq!(refusal(&changed(10, 9)), "its hello names no purpose known here (9)");
    assert_eq!(refusal(&changed(21, 1)), "its hello names no purpose known here (1)", "what must be zero");
    let rails = RAILS_MAX as u8;
    assert_eq!(
        refusal(&changed(11, rails)),
        "its hello names no purpose known here (1)",
        "more than there are"
    );
    let mut probe = Hello { purpose: Purpose::Probe, ..hello() }.encode();
    probe[11] = 1;
    assert_eq!(refusal(&probe), "its hello names no purpose known here (2)", "only lines have rails");
}

#[test]
fn a_caller_that_closes_without_a_hello_is_no_surprise() {
    let mut reader = HelloReader::new();
    let error = reader.poll(&hello().encode()[..20], ME).expect_err("it ended");
    assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    assert_eq!(error.to_string(), "closed before it said hello");
}

#[test]
fn lengths_are_refused_before_anything_of_them_has_arrived() {
    let header = |kind: u8, len: u32| [&[kind][..], &len.to_le_bytes()].concat();
    for (kind, len) in [
        (PULSE, 71),
        (PULSE, 72 * 911),
        (NOTICE, 7),
        (NOTICE, 65537),
        (GOODBYE, 1),
        (REGION, 31),
        (REGION, 40),
        (MAPPED, 7),
        (MAPPED, 65537),
        (RETIRED, 0),
        (RETIRED, 16),
        (WANT, 1),
        (ASK, 11),
        (ASK, 12 * 5462),
        (BEAT, 13),
        (HEARS, 7),
        (HEARS_TOO, 8 * 8193),
        (MISSES, 8),
        (LETTER, 7),
        (RESHAPE, 7),
        (ROOM, 16),
    ] {
        let refused = ControlFrame::decode(&header(kind, len)).expect_err("no frame is like that");
        assert_eq!(refused, Refused::Length { kind, len: len as usize });
    }
    for (kind, len) in [
        (PULSE, 72 * 910),
        (NOTICE, 65536),
        (MAPPED, 65536),
        (ASK, 12 * 5461),
        (BEAT, 12 * 5461),
        (HEARS, 8 * 8192),
        (HEARS_TOO, 8 * 8192),
        (MISSES, 12 * 5461),
        (LETTER, 65536),
    ] {
        assert_eq!(ControlFrame::decode(&header(kind, len)), Ok(None), "the longest there are");
    }
    for kind in [0, 16] {
        assert_eq!(ControlFrame::decode(&[kind]), Err(Refused::Kind { kind }));
    }
}

#[test]
fn what_does_not_fit_one_frame_is_split_or_cut() {
    let pulse = |group| GroupPulse { group, current: [group; 3], finished: [1; 3], ages: [2, 3] };
    let groups: Vec<_> = (0..3000).map(pulse).collect();
    let mut bytes = Vec::new();
    ControlFrame::Pulse { groups: groups.clone() }.encode(&mut bytes);
    ControlFrame::Notice { group: 5, text: vec![b'x'; 100_000] }.encode(&mut bytes);
    let (mut frames, left) = frames_of(&bytes).expect("all are right");
    assert_eq!(left, 0);
    let text = vec![b'x'; ControlFrame::BODY_MAX - 8];
    assert_eq!(frames.pop(), Some(ControlFrame::Notice { group: 5, text }));
    let mut seen = Vec::new();
    for frame in frames {
        let ControlFrame::Pulse { groups } = frame else { panic!("only pulses are left: {frame:?}") };
        seen.extend(groups);
    }
    assert_eq!(seen, groups);
}

/// A rank that was cut off a company is asked directly.
#[test]
fn ranks_beyond_what_a_frame_holds_are_named_in_further_frames_or_left_out() {
    let marks: Vec<Mark> = (0..20_000).map(Mark).collect();
    let seen: Vec<Seen> = marks.iter().map(|mark| (*mark, Duration::from_millis(mark.0))).collect();
    let mut bytes = Vec::new();
    ControlFrame::Hears { afresh: true, marks: marks.clone() }.encode(&mut bytes);
    ControlFrame::Misses { seen: seen.clone() }.encode(&mut bytes);
    ControlFrame::Beat { company: seen.clone() }.encode(&mut bytes);
    let (mut frames, left) = frames_of(&bytes).expect("all are right");
    assert_eq!((frames.len(), left), (3 + 4 + 1, 0));
    assert_eq!(frames.pop(), Some(ControlFrame::Beat { company: seen[..5461].to_vec() }));
    let (mut heard, mut missed, mut afresh) = (Vec::new(), Vec::new(), Vec::new());
    for frame in frames {
        match frame {
            ControlFrame::Hears { afresh: first, marks } => {
                afresh.push(first);
                heard.extend(marks);
            }
            ControlFrame::Misses { seen } => missed.extend(seen),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!((heard, missed, afresh), (marks, seen, vec![true, false, false]));
}

/// A list of ranks must not let its reader in there.
#[test]
fn a_mark_is_half_of_an_id() {
    let mut bytes = Vec::new();
    ControlFrame::Ask { company: vec![(ME.mark(), Duration::ZERO)] }.encode(&mut bytes);
    assert_eq!(bytes[5..13], ME.0.to_le_bytes()[..8]);
    assert!(!bytes.windows(8).any(|window| window == &ME.0.to_le_bytes()[8..]));
}

/// All whole frames, and how many bytes are left over.
fn frames_of(mut bytes: &[u8]) -> Result<(Vec<ControlFrame>, usize), Refused> {
    let mut frames = Vec::new();
    while let Some((frame, len)) = ControlFrame::decode(bytes)? {
        frames.push(frame);
        bytes = &bytes[len..];
    }
    Ok((frames, bytes.len()))
}

fn any_seen() -> impl Strategy<Value = Vec<Seen>> {
    let one = (any::<u64>(), any::<u32>());
    let one = one.prop_map(|(mark, age)| (Mark(mark), Duration::from_millis(age.into())));
    proptest::collection::vec(one, 0..20)
}

fn any_frame() -> impl Strategy<Value = ControlFrame> {
    let group = any::<(u64, Head, Head, [u64; 2])>();
    let group =
        group.prop_map(|(group, current, finished, ages)| GroupPulse { group, current, finished, ages });
    prop_oneof![
        proptest::collection::vec(group, 0..20).prop_map(|groups| ControlFrame::Pulse { groups }),
        (any::<u64>(), proptest::collection::vec(any::<u8>(), 0..300))
            .prop_map(|(group, text)| ControlFrame::Notice { group, text }),
        Just(ControlFrame::Goodbye),
        any::<[u64; 4]>().prop_map(|[offset, len, device, inode]| {
            ControlFrame::Region { offset, len, file: FileIdentity { device, inode } }
        }),
        (any::<u64>(), proptest::collection::vec(any::<u8>(), 0..300))
            .prop_map(|(offset, refusal)| ControlFrame::Mapped { offset, refusal }),
        (any::<u64>(), proptest::collection::vec(any::<u8>(), 0..300))
            .prop_map(|(group, text)| ControlFrame::Letter { group, text }),
        (any::<u64>(), proptest::collection::vec(any::<u8>(), 0..300))
            .prop_map(|(id, text)| ControlFrame::Reshape { id, text }),
        (any::<u64>(), any::<u32>(), any::<u64>()).prop_map(|(group, sequence, offset)| ControlFrame::Room {
            group,
            sequence,
            offset
        }),
        any::<u64>().prop_map(|offset| ControlFrame::Retired { offset }),
        Just(ControlFrame::Want),
        any_seen().prop_map(|company| ControlFrame::Ask { company }),
        any_seen().prop_map(|company| ControlFrame::Beat { company }),
        any_seen().prop_map(|seen| ControlFrame::Misses { seen }),
        (any::<bool>(), proptest::collection::vec(any::<u64>().prop_map(Mark), 0..20))
            .prop_map(|(afresh, marks)| ControlFrame::Hears { afresh, marks }),
    ]
}

proptest! {
    #[test]
    fn any_cut_of_any_stream_gives_the_same_frames(
        frames in proptest::collection::vec(any_frame(), 0..8),
        cuts in proptest::collection::vec(1_usize..200, 1..20),
    ) {
        let mut stream = Vec::new();
        frames.iter().for_each(|frame| frame.encode(&mut stream));
        let (mut buffer, mut seen, mut rest) = (Vec::new(), Vec::new(), &stream[..]);
        for cut in cuts.iter().cycle() {
            let (now, later) = rest.split_at((*cut).min(rest.len()));
            buffer.extend_from_slice(now);
            rest = later;
            while let Some((frame, len)) = ControlFrame::decode(&buffer).expect("all are right") {
                seen.push(frame);
                buffer.drain(..len);
            }
            if rest.is_empty() {
                break;
            }
        }
        prop_assert!(buffer.is_empty());
        prop_assert_eq!(seen, frames);
    }

    #[test]
    fn arbitrary_bytes_are_frames_or_refused_and_never_more_than_they_are(
        bytes in proptest::collection::vec(any::<u8>(), 0..400),
        kind in 0_u8..14,
        len in prop_oneof![0_u32..400, any::<u32>()],
    ) {
        let shaped = [&[kind][..], &len.to_le_bytes(), &bytes].concat();
        for bytes in [&bytes, &shaped] {
            if let Ok(Some((frame, len))) = ControlFrame::decode(bytes) {
                prop_assert!(len <= bytes.len() && len <= ControlFrame::LEN_MAX);
                let mut again = Vec::new();
                frame.encode(&mut again);
                prop_assert_eq!(&again[..], &bytes[..len], "a frame has one form");
            }
            let _ = Hello::decode(bytes, ME);
        }
    }

    #[test]
    fn any_hello_survives_the_journey(which in 0_usize..3, rail in 0..RAILS_MAX as u8, sender: u128) {
        let purpose = [Purpose::Control, Purpose::Line { rail }, Purpose::Probe][which];
        let hello = Hello { purpose, sender: FabricId(sender), receiver: ME };
        prop_assert_eq!(Hello::decode(&hello.encode(), ME), Ok(Some(hello)));
    }
}
