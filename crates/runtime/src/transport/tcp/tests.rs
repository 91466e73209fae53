use super::*;

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener};

use proptest::prelude::*;

use crate::wire::{FabricId, HelloReader, Purpose};

const LEN_MAX: usize = 1 << 20;

const RECEIVER: FabricId = FabricId(2);

fn hello() -> Hello {
    let purpose = Purpose::Data { group: 5, from: 0, to: 1, lane: 0 };
    Hello { purpose, sender: FabricId(1), receiver: RECEIVER }
}

fn listener() -> TcpListener {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("loopback can be bound")
}

/// Both ends of a link over loopback, the hello said and heard.
fn link() -> (TcpOut, TcpIn) {
    link_with(|_| {})
}

/// The same, with something done to the sender's socket before anything is sent.
fn link_with(prepare: impl FnOnce(&SockRef<'_>)) -> (TcpOut, TcpIn) {
    let listener = listener();
    let mut out =
        TcpOut::connect(listener.local_addr().unwrap(), None, &hello()).expect("the listener is open");
    prepare(&SockRef::from(&out.stream));
    let (stream, _) = listener.accept().expect("a call was begun");
    assert_eq!(until_ready(|| out.poll_flush()), ());
    let heard = until_ready(|| HelloReader::new().poll(&stream, RECEIVER));
    assert_eq!(heard, hello());
    (out, TcpIn::new(stream, LEN_MAX).expect("options can be set"))
}

/// A raw sender and a receiving end: for what no [`TcpOut`] would send.
fn raw_link() -> (TcpStream, TcpIn) {
    let listener = listener();
    let address = listener.local_addr().unwrap();
    let socket = socket2::Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    socket.connect(&address.into()).expect("the listener is open");
    socket.set_tcp_nodelay(true).unwrap();
    let (stream, _) = listener.accept().unwrap();
    (socket.into(), TcpIn::new(stream, LEN_MAX).unwrap())
}

/// The kernel carries bytes through loopback without help from this thread, so a wait only lets other threads run.
fn until_ready<T>(mut poll: impl FnMut() -> io::Result<Poll<T>>) -> T {
    loop {
        match poll().expect("the link works") {
            Poll::Ready(value) => return value,
            Poll::Pending => std::thread::yield_now(),
        }
    }
}

fn until_error<T: std::fmt::Debug>(mut poll: impl FnMut() -> io::Result<Poll<T>>) -> io::Error {
    loop {
        match poll() {
            Err(error) => return error,
            Ok(Poll::Ready(value)) => panic!("there should be nothing: {value:?}"),
            Ok(Poll::Pending) => std::thread::yield_now(),
        }
    }
}

fn receive(link: &mut TcpIn, head: &Head, len: usize) -> Vec<u8> {
    let mut target = vec![0; len];
    until_ready(|| link.poll_recv(head, Span::of(&mut target)).map_err(|why| panic!("{why:?}")));
    target
}

/// Bytes that tell where they are.
fn pattern(seed: usize, len: usize) -> Vec<u8> {
    (0..len).map(|at| (at * 31 + at / 256 * 7 + seed * 13) as u8).collect()
}

fn frame(head: &Head, payload: &[u8]) -> Vec<u8> {
    [&encode_header(head, payload.len())[..], payload].concat()
}

#[test]
fn messages_of_every_length_arrive_whole_and_in_order_either_way_they_are_sent_or_received() {
    let (mut out, mut link) = link();
    let lens = [0, 1, 7, 8, 39, 40, 41, 4096, 0, 65_536, 100_003, LEN_MAX, 5, LEN_MAX - 1, 0, 0, 3];
    for (lend, straight) in [(false, false), (false, true), (true, false), (true, true)] {
        for (number, len) in lens.into_iter().enumerate() {
            let (head, payload) = ([number as u64, len as u64, u64::MAX], pattern(number, len));
            let mut target = vec![0; len];
            let (mut sent, mut received) = (false, false);
            while !(sent && received) {
                sent = sent || out.poll_send(&head, Bytes::of(&payload), lend).unwrap().is_ready();
                let _ = !sent || out.poll_flush().unwrap().is_ready();
                if straight {
                    received = received || link.poll_recv(&head, Span::of(&mut target)).unwrap().is_ready();
                } else if let Poll::Ready(message) = link.poll_message().unwrap() {
                    assert_eq!(message, (head, len));
                    target = link.bytes().to_vec();
                    received = true;
                }
            }
            if !straight {
                link.take();
            }
            assert!(target == payload, "message {number} of {len} bytes, lend {lend}, straight {straight}");
            assert!(out.is_idle());
        }
    }
}

#[test]
fn many_messages_sent_back_to_back_are_told_apart() {
    let (mut out, mut link) = link();
    let lens = [5, 0, 100, 3, 0, 0, 77, 2000, 1];
    for round in 0..50 {
        for (number, len) in lens.into_iter().enumerate() {
            let payload = pattern(number, len);
            assert!(
                out.poll_send(&[number as u64, round, 0], Bytes::of(&payload), false).unwrap().is_ready()
            );
        }
        for (number, len) in lens.into_iter().enumerate() {
            let head = [number as u64, round, 0];
            if (number + round as usize).is_multiple_of(2) {
                assert_eq!(receive(&mut link, &head, len), pattern(number, len));
            } else {
                assert_eq!(until_ready(|| link.poll_message()), (head, len));
                assert_eq!(link.bytes().to_vec(), pattern(number, len));
                link.take();
            }
        }
    }
}

#[test]
fn a_socket_that_takes_little_is_given_a_lent_message_bit_by_bit() {
    let (mut out, mut link) = link_with(|socket| socket.set_send_buffer_size(4096).unwrap());
    let payload = pattern(1, LEN_MAX);
    let head = [1, 2, 3];
    let mut pending = 0;
    let mut target = vec![0; LEN_MAX];
    while out.poll_send(&head, Bytes::of(&payload), true).unwrap().is_pending() {
        pending += 1;
        assert!(link.poll_recv(&head, Span::of(&mut target)).unwrap().is_pending(), "it is not whole");
    }
    assert!(pending > 1, "a megabyte does not fit a buffer of some KiB");
    until_ready(|| link.poll_recv(&head, Span::of(&mut target)).map_err(|why| panic!("{why:?}")));
    assert!(target == payload);
}

#[test]
fn a_message_that_is_not_lent_is_taken_at_once_and_the_next_one_waits_for_it() {
    let (mut out, mut link) = link_with(|socket| socket.set_send_buffer_size(4096).unwrap());
    let mut payloads = [pattern(1, LEN_MAX), pattern(2, LEN_MAX)];
    let mut taken = 0;
    // As many as go: at least one is taken whatever the socket takes. The other end does not read, so there is a last one.
    while out.poll_send(&[taken, 0, 0], Bytes::of(&payloads[taken as usize % 2]), false).unwrap().is_ready() {
        taken += 1;
    }
    assert!(taken >= 1);
    assert!(!out.is_idle());
    assert!(out.poll_flush().unwrap().is_pending());
    let expected = payloads.clone();
    payloads.iter_mut().for_each(|payload| payload.fill(0)); // they were copied
    for number in 0..taken {
        let mut target = vec![0; LEN_MAX];
        until_ready(|| {
            let _ = out.poll_flush()?;
            link.poll_recv(&[number, 0, 0], Span::of(&mut target)).map_err(|why| panic!("{why:?}"))
        });
        assert!(target == expected[number as usize % 2], "message {number} of {taken}");
    }
    assert!(out.is_idle());
}

#[test]
fn another_message_than_expected_is_named_and_kept_with_all_that_follows() {
    // Shorter, longer, as long but another, and empty; each followed by more in the same breath.
    for (len, expected_len) in [(10, 1000), (1000, 10), (64, 64), (0, 500), (500, 0), (0, 0)] {
        let (mut raw, mut link) = raw_link();
        let (other, next) = ([7, 8, 9], [1, 1, 1]);
        let stream = [frame(&other, &pattern(1, len)), frame(&next, &pattern(2, 300)), frame(&next, &[])];
        raw.write_all(&stream.concat()).unwrap();
        let mut target = vec![0; expected_len];
        for _ in 0..2 {
            let unexpected = loop {
                match link.poll_recv(&next, Span::of(&mut target)) {
                    Ok(Poll::Pending) => std::thread::yield_now(),
                    Ok(Poll::Ready(())) => panic!("it is another message"),
                    Err(unexpected) => break unexpected,
                }
            };
            let Unexpected::Other { head, len: their_len } = unexpected else { panic!("{unexpected:?}") };
            assert_eq!((head, their_len), (other, len), "said as often as it is asked");
        }
        assert_eq!(until_ready(|| link.peek_head()), (other, len));
        assert_eq!(until_ready(|| link.poll_message()), (other, len));
        assert_eq!(link.bytes().to_vec(), pattern(1, len));
        link.take();
        assert_eq!(receive(&mut link, &next, 300), pattern(2, 300));
        assert_eq!(receive(&mut link, &next, 0), Vec::<u8>::new());
        drop(raw);
        assert_eq!(until_error(|| link.poll_message()).to_string(), "closed between messages");
    }
}

#[test]
fn a_right_head_with_a_wrong_length_is_another_message() {
    let (mut raw, mut link) = raw_link();
    raw.write_all(&frame(&[1, 2, 3], &pattern(0, 16))).unwrap();
    let mut target = [0; 12];
    until_ready(|| link.peek_head());
    let unexpected = link.poll_recv(&[1, 2, 3], Span::of(&mut target)).expect_err("12 bytes were expected");
    assert!(matches!(unexpected, Unexpected::Other { head: [1, 2, 3], len: 16 }), "{unexpected:?}");
    assert_eq!(receive(&mut link, &[1, 2, 3], 16), pattern(0, 16), "nothing was lost");
}

#[test]
fn a_message_that_was_looked_at_can_still_be_received_straight() {
    let (mut raw, mut link) = raw_link();
    for first_part in [0, 40, 41, 100, 140] {
        let message = frame(&[1, 2, 3], &pattern(3, 100));
        raw.write_all(&message[..first_part]).unwrap();
        // Read what is there as a message of unknown length, then go on with a target.
        while link.header_read < first_part.min(HEADER) || link.payload_read + HEADER < first_part {
            let _ = link.poll_message().unwrap();
        }
        assert_eq!(link.poll_message().unwrap().is_ready(), first_part == message.len());
        raw.write_all(&message[first_part..]).unwrap();
        assert_eq!(receive(&mut link, &[1, 2, 3], 100), pattern(3, 100));
    }
}

#[test]
fn half_a_message_in_a_target_is_not_taken_for_one_in_the_buffer() {
    let (mut raw, mut link) = raw_link();
    raw.write_all(&frame(&[1, 2, 3], &pattern(0, 100))[..90]).unwrap();
    let mut target = [0; 100];
    while link.payload_read < 50 {
        assert!(link.poll_recv(&[1, 2, 3], Span::of(&mut target)).unwrap().is_pending());
    }
    let error = link.poll_message().expect_err("half of it is in the target");
    assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
}

#[test]
fn an_end_between_messages_and_one_inside_are_told_apart() {
    let message = frame(&[1, 2, 3], &pattern(0, 100));
    for cut in [0, 1, 39, 40, 41, 139] {
        for straight in [false, true] {
            let (mut raw, mut link) = raw_link();
            raw.write_all(&message).unwrap();
            raw.write_all(&message[..cut]).unwrap();
            raw.shutdown(Shutdown::Write).unwrap();
            assert_eq!(receive(&mut link, &[1, 2, 3], 100), pattern(0, 100));
            let mut target = [0; 100];
            let error = until_error(|| {
                if !straight {
                    return link.poll_message().map(|poll| poll.map(|_| ()));
                }
                link.poll_recv(&[1, 2, 3], Span::of(&mut target)).map_err(|unexpected| match unexpected {
                    Unexpected::Io(error) => error,
                    other => panic!("{other:?}"),
                })
            });
            assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
            let expected =
                if cut == 0 { "closed between messages" } else { "closed in the middle of a message" };
            assert_eq!(error.to_string(), expected, "cut at {cut}, straight {straight}");
        }
    }
}

#[test]
fn any_damage_to_a_header_is_noticed_and_stays_noticed() {
    let whole = frame(&[1, 2, 3], &[]);
    for bit in 0..8 * HEADER {
        let mut header: [u8; HEADER] = whole[..].try_into().unwrap();
        header[bit / 8] ^= 1 << (bit % 8);
        let error = decode_header(&header, LEN_MAX).expect_err("a bit was flipped");
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }
    let (mut raw, mut link) = raw_link();
    raw.write_all(&[b'?'; 100]).unwrap();
    for _ in 0..2 {
        let error = until_error(|| link.poll_message());
        assert_eq!(error.to_string(), "no message begins like that");
    }
}

#[test]
fn a_message_longer_than_allowed_is_refused_before_memory_is_taken_for_it() {
    let (mut raw, mut link) = raw_link();
    raw.write_all(&encode_header(&[1, 2, 3], LEN_MAX + 1)).unwrap();
    let error = until_error(|| link.poll_message());
    assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    assert_eq!(error.to_string(), "a message of 1048577 bytes where none has more than 1048576");
    assert_eq!(link.buffer.capacity(), 0);
}

#[test]
fn a_caller_that_says_nothing_is_waited_for_without_waiting() {
    let listener = listener();
    let socket = socket2::Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    socket.connect(&listener.local_addr().unwrap().into()).unwrap();
    let (stream, _) = listener.accept().unwrap();
    stream.set_nonblocking(true).unwrap();
    assert!(HelloReader::new().poll(&stream, RECEIVER).unwrap().is_pending());
    let mut link = TcpIn::new(stream, LEN_MAX).unwrap();
    assert!(link.peek_head().unwrap().is_pending());
    assert!(link.poll_message().unwrap().is_pending());
    assert!(link.poll_recv(&[0; 3], Span::empty()).unwrap().is_pending());
}

#[test]
fn a_port_where_nobody_listens_is_an_error_each_time_it_is_asked_about() {
    let address = listener().local_addr().unwrap(); // closed again immediately
    let mut out = match TcpOut::connect(address, None, &hello()) {
        Ok(out) => out,
        Err(error) => return assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused),
    };
    for _ in 0..2 {
        let error = until_error(|| out.poll_send(&[0; 3], Bytes::of(b"hello?"), true));
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
        assert_eq!(out.is_connected().map_err(|error| error.kind()), Err(io::ErrorKind::ConnectionRefused));
    }
}

#[test]
fn a_sender_calls_from_the_interface_it_was_given_and_is_not_paced_within_a_host() {
    let listener = listener();
    let from = IpAddr::from([127, 0, 0, 9]);
    let out = TcpOut::connect(listener.local_addr().unwrap(), Some(from), &hello()).unwrap();
    let (_, peer) = listener.accept().unwrap();
    assert_eq!(peer.ip(), from);
    let socket = SockRef::from(&out.stream);
    assert!(socket.tcp_nodelay().unwrap());
    assert!(socket.keepalive().unwrap());
    #[cfg(target_os = "linux")]
    {
        let name = socket.tcp_congestion().unwrap();
        assert!(!name.starts_with(b"bbr"), "{}", name.escape_ascii());
    }
}

#[test]
fn sending_to_a_receiver_that_has_gone_is_an_error_and_no_signal() {
    let (mut out, link) = link();
    drop(link);
    let payload = pattern(0, 1000);
    let error = loop {
        match out.poll_send(&[0; 3], Bytes::of(&payload), false) {
            Ok(_) => std::thread::yield_now(),
            Err(error) => break error,
        }
    };
    assert!(matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset), "{error}");
}

/// How a reader asks for the next message.
#[derive(Clone, Copy, Debug)]
enum Asking {
    Straight,
    Buffered,
    PeekFirst,
    ExpectingAnother { len: usize },
}

fn any_asking() -> impl Strategy<Value = Asking> {
    prop_oneof![
        Just(Asking::Straight),
        Just(Asking::Buffered),
        Just(Asking::PeekFirst),
        (0_usize..600).prop_map(|len| Asking::ExpectingAnother { len }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn any_cut_of_any_stream_gives_the_same_messages_however_they_are_asked_for(
        messages in proptest::collection::vec((any::<Head>(), 0_usize..500, any_asking()), 1..12),
        cuts in proptest::collection::vec(1_usize..300, 1..12),
    ) {
        let (mut raw, mut link) = raw_link();
        let stream: Vec<u8> =
            messages.iter().flat_map(|(head, len, _)| frame(head, &pattern(*len, *len))).collect();
        let mut cuts = cuts.iter().cycle();
        let mut rest = &stream[..];
        let mut write_more = || {
            let (now, later) = rest.split_at(rest.len().min(*cuts.next().expect("it goes round")));
            raw.write_all(now).expect("it is read in time");
            rest = later;
            std::thread::yield_now();
        };
        for (head, len, asking) in &messages {
            let mut target = vec![0; *len];
            loop {
                let other = [!head[0], 0, 0];
                let received = match asking {
                    Asking::Straight => link.poll_recv(head, Span::of(&mut target)).expect("as sent").is_ready(),
                    Asking::Buffered => link.poll_message().expect("as sent").is_ready(),
                    Asking::PeekFirst => {
                        link.peek_head().expect("as sent").is_ready()
                            && link.poll_recv(head, Span::of(&mut target)).expect("as sent").is_ready()
                    }
                    Asking::ExpectingAnother { len: expected } => {
                        match link.poll_recv(&other, Span::of(&mut vec![0; *expected])) {
                            Ok(poll) => {
                                prop_assert!(poll.is_pending());
                                false
                            }
                            Err(Unexpected::Other { head: theirs, len: their_len }) => {
                                prop_assert_eq!((theirs, their_len), (*head, *len));
                                link.poll_message().expect("as sent").is_ready()
                            }
                            Err(Unexpected::Io(error)) => panic!("{error}"),
                        }
                    }
                };
                if received {
                    break;
                }
                write_more();
            }
            if matches!(asking, Asking::Buffered | Asking::ExpectingAnother { .. }) {
                Span::of(&mut target).copy_from(link.bytes());
                link.take();
            }
            prop_assert_eq!(&target, &pattern(*len, *len));
        }
        prop_assert!(link.ahead.is_empty(), "nothing was sent after the last");
    }

    #[test]
    fn arbitrary_bytes_are_refused_and_take_no_memory(
        bytes in proptest::collection::vec(any::<u8>(), 1..300),
        whole_frames in 0_usize..3,
    ) {
        let (mut raw, mut link) = raw_link();
        let mut stream = frame(&[1, 2, 3], &pattern(0, 50)).repeat(whole_frames);
        stream.extend(&bytes);
        raw.write_all(&stream).unwrap();
        raw.shutdown(Shutdown::Write).unwrap();
        let mut messages = 0;
        let error = loop {
            match link.poll_message() {
                Ok(Poll::Pending) => std::thread::yield_now(),
                Ok(Poll::Ready(_)) => {
                    messages += 1;
                    link.take();
                }
                Err(error) => break error,
            }
        };
        prop_assert_eq!(messages, whole_frames);
        prop_assert!(matches!(error.kind(), io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof), "{}", error);
        prop_assert!(link.buffer.capacity() <= 64);
        let mut nothing = [0];
        drop(link);
        let _ = raw.read(&mut nothing);
    }
}
