#![expect(clippy::disallowed_methods, reason = "a line notes when it was opened")]

use super::*;

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, Shutdown, TcpListener, TcpStream};

use proptest::prelude::*;
use socket2::SockRef;
use tenfold_memory::Span;

use crate::wire::{Hello, HelloReader, Purpose};

const SMALL: FabricId = FabricId(1);
const LARGE: FabricId = FabricId(2);
const GROUP: u64 = 5;
const OTHER: u64 = 6;
const LEFT: u64 = 7;
const STRANGE: u64 = 8;

#[derive(Default)]
struct Around(News);

impl Surroundings for Around {
    fn news(&self) -> &News {
        &self.0
    }

    fn standing(&self, group: u64) -> Standing {
        match group {
            LEFT => Standing::Left,
            STRANGE.. => Standing::Unknown,
            _ => Standing::Member,
        }
    }
}

/// A process's end of a line, as one group uses it.
struct End {
    line: Line,
    around: Around,
    claim: Claim,
}

impl End {
    fn new(own: FabricId, peer: FabricId) -> End {
        let mut line = Line::new(own, peer, 0);
        let claim = line.claim(GROUP);
        End { line, around: Around::default(), claim }
    }

    fn send(&mut self, head: &Head, bytes: &[u8]) -> io::Result<Poll<u64>> {
        self.send_as(self.claim, 0, head, bytes)
    }

    fn send_as(&mut self, claim: Claim, lane: u8, head: &Head, bytes: &[u8]) -> io::Result<Poll<u64>> {
        self.line.poll_send(&self.around, claim, lane, head, Bytes::of(bytes))
    }

    fn poll_recv(&mut self, head: &Head, target: &mut [u8]) -> Result<Poll<()>, Unexpected> {
        self.line.poll_recv(&self.around, self.claim, 0, head, Span::of(target))
    }

    fn poll_message(&mut self) -> io::Result<Poll<(Head, Vec<u8>)>> {
        self.message_of(self.claim, 0)
    }

    /// Also takes it.
    fn message_of(&mut self, claim: Claim, lane: u8) -> io::Result<Poll<(Head, Vec<u8>)>> {
        let polled = self.line.poll_message(&self.around, claim, lane)?;
        Ok(polled.map(|message| {
            let copy = (message.head, message.bytes().to_vec());
            self.line.take(claim, lane, message);
            copy
        }))
    }

    fn receive(&mut self, head: &Head, len: usize) -> Vec<u8> {
        let mut target = vec![0; len];
        until_ready(|| self.poll_recv(head, &mut target).map_err(|why| panic!("{why:?}")));
        target
    }

    fn peek(&mut self) -> Option<(Head, usize)> {
        self.line.peek_head(&self.around, self.claim, 0)
    }

    fn outgoing(&mut self) -> &mut Outgoing {
        self.line.outgoing.open().expect("it is open")
    }

    fn current(&mut self) -> Option<&Current> {
        self.line.incoming.open().expect("it is open").current.as_ref()
    }

    fn flush_all(&mut self) {
        while self.line.flush().unwrap() {
            std::thread::yield_now();
        }
    }

    fn sockets(&self) -> Vec<bool> {
        let mut sockets = Vec::new();
        self.line.sleep_on(&mut sockets);
        sockets.into_iter().map(|(_, write)| write).collect()
    }
}

/// The news say that there is more, because no socket does.
#[test]
fn short_messages_that_have_arrived_are_read_at_once_and_told_of() {
    let (mut one, mut other) = pair();
    for number in 0..10 {
        assert!(one.send(&[number; 3], &[number as u8; 100]).unwrap().is_ready());
    }
    one.flush_all();
    let socket = Arc::clone(&other.line.incoming.open().expect("it is open").stream);
    let mut all = vec![0; 2 * 10 * (HEADER + 100)];
    until_ready(|| {
        Ok(if socket.peek(&mut all)? == 10 * (HEADER + 100) { Poll::Ready(()) } else { Poll::Pending })
    });
    for number in 0..10 {
        let mut target = [0; 100];
        other.around.0.take();
        assert!(matches!(other.poll_recv(&[number; 3], &mut target), Ok(Poll::Ready(()))));
        assert_eq!(target, [number as u8; 100]);
        let left = socket.peek(&mut all);
        assert_eq!(left.unwrap_err().kind(), io::ErrorKind::WouldBlock, "all of it was read with the first");
        assert_eq!(other.around.0.are_there(), number < 9, "after message {number}");
    }
}

fn listener() -> TcpListener {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("loopback can be bound")
}

/// What the helper thread does: accepts, and hears the hello.
fn accept(listener: &TcpListener, me: FabricId) -> (Hello, TcpStream) {
    let (stream, _) = listener.accept().expect("a call was begun");
    let hello = until_ready(|| HelloReader::new().poll(&stream, me));
    (hello, stream)
}

fn adopt(end: &mut End, stream: TcpStream) -> Adopted {
    end.line.adopt(stream.into(), Instant::now()).unwrap()
}

/// Both ends of a line over loopback, with both of its connections.
fn pair() -> (End, End) {
    let (mut one, mut other) = (End::new(SMALL, LARGE), End::new(LARGE, SMALL));
    connect(&mut one, &mut other);
    connect(&mut other, &mut one);
    (one, other)
}

/// Opens the connection on which one end sends.
fn connect(from: &mut End, to: &mut End) {
    let listener = listener();
    from.line.open(listener.local_addr().unwrap(), None).expect("the listener is open");
    from.flush_all();
    let (hello, stream) = accept(&listener, to.line.own);
    assert_eq!(
        hello,
        Hello { purpose: Purpose::Line { rail: 0 }, sender: from.line.own, receiver: to.line.own }
    );
    assert_eq!(adopt(to, stream), Adopted::Yes);
}

/// A raw sender and a receiving end: for what no [`Line`] would send.
fn raw() -> (TcpStream, End) {
    let mut end = End::new(LARGE, SMALL);
    let listener = listener();
    let (raw, accepted) = call(&listener);
    assert_eq!(adopt(&mut end, accepted), Adopted::Yes);
    (raw, end)
}

/// Both ends of a connection to `listener`.
fn call(listener: &TcpListener) -> (TcpStream, TcpStream) {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    socket.connect(&listener.local_addr().unwrap().into()).expect("the listener is open");
    let raw = TcpStream::from(socket);
    raw.set_nodelay(true).unwrap();
    (raw, listener.accept().unwrap().0)
}

/// The kernel carries bytes through loopback without help from this thread, so a wait only lets other threads run.
fn until_ready<T>(mut poll: impl FnMut() -> io::Result<Poll<T>>) -> T {
    loop {
        match poll().expect("the line works") {
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

/// Bytes that tell where they are.
fn pattern(seed: usize, len: usize) -> Vec<u8> {
    (0..len).map(|at| (at * 31 + at / 256 * 7 + seed * 13) as u8).collect()
}

fn frame_of(group: u64, lane: u8, head: &Head, payload: &[u8]) -> Vec<u8> {
    let link = LinkId { group, lane };
    [&Frame::Message { link, head: *head, len: payload.len(), credit: 0 }.encode()[..], payload].concat()
}

fn frame(head: &Head, payload: &[u8]) -> Vec<u8> {
    frame_of(GROUP, 0, head, payload)
}

#[test]
fn messages_of_every_length_arrive_whole_and_in_order_in_both_directions_however_they_are_received() {
    let (mut one, mut other) = pair();
    let lens = [0, 1, 7, 8, 55, 56, 57, 4096, 0, 65_536, 100_003, TCP_PIECE, 5, TCP_PIECE - 1, 0, 0, 3];
    for straight in [false, true] {
        for (number, len) in lens.into_iter().enumerate() {
            for _ in 0..2 {
                let (head, payload) = ([number as u64, len as u64, u64::MAX], pattern(number, len));
                let mut target = vec![0; len];
                let (mut until, mut received) = (None, false);
                while !received {
                    if until.is_none()
                        && let Poll::Ready(queued) = one.send(&head, &payload).unwrap()
                    {
                        until = Some(queued);
                    }
                    if let Some(until) = until {
                        let _ = one.line.poll_flush(one.claim, until).unwrap();
                    }
                    if straight {
                        received = other.poll_recv(&head, &mut target).unwrap().is_ready();
                    } else if let Poll::Ready((theirs, bytes)) = other.poll_message().unwrap() {
                        assert_eq!(theirs, head);
                        target = bytes;
                        received = true;
                    }
                }
                assert!(target == payload, "message {number} of {len} bytes, straight {straight}");
                assert!(!one.line.has_unwritten());
                std::mem::swap(&mut one, &mut other);
            }
        }
    }
}

#[test]
fn many_messages_sent_back_to_back_are_told_apart() {
    let (mut one, mut other) = pair();
    let lens = [5, 0, 100, 3, 0, 0, 77, 2000, 1];
    for round in 0..50 {
        for (number, len) in lens.into_iter().enumerate() {
            assert!(one.send(&[number as u64, round, 0], &pattern(number, len)).unwrap().is_ready());
        }
        for (number, len) in lens.into_iter().enumerate() {
            let head = [number as u64, round, 0];
            if (number + round as usize).is_multiple_of(2) {
                assert_eq!(other.receive(&head, len), pattern(number, len));
            } else {
                assert_eq!(until_ready(|| other.poll_message()), (head, pattern(number, len)));
            }
        }
    }
}

/// The other end does not read. What was taken is out of the caller's hands.
#[test]
fn what_the_socket_does_not_take_is_copied_and_long_messages_wait_while_short_ones_are_put_together() {
    let (mut one, mut other) = pair();
    SockRef::from(&**one.outgoing().socket()).set_send_buffer_size(4096).unwrap();
    let mut payloads = [pattern(1, TCP_PIECE), pattern(2, TCP_PIECE)];
    let mut taken = 0;
    while one.send(&[taken, 0, 0], &payloads[taken as usize % 2]).unwrap().is_ready() {
        taken += 1;
    }
    assert!(taken >= 1 && one.line.has_unwritten());
    let until = one.outgoing().queued;
    assert!(one.line.poll_flush(one.claim, until).unwrap().is_pending());
    assert_eq!(one.sockets(), [true, false]);
    let expected = payloads.clone();
    payloads.iter_mut().for_each(|payload| payload.fill(0)); // they were copied
    for number in 0..taken {
        let mut target = vec![0; TCP_PIECE];
        until_ready(|| {
            let _ = one.line.flush()?;
            other.poll_recv(&[number, 0, 0], &mut target).map_err(|why| panic!("{why:?}"))
        });
        assert!(target == expected[number as usize % 2], "message {number} of {taken}");
    }
    assert!(one.line.poll_flush(one.claim, until).unwrap().is_ready());
    assert!(!one.line.has_unwritten());
    assert_eq!(one.sockets(), [false]);

    // Behind a rest that does not go out, short messages are taken until they are many.
    let long = pattern(3, TCP_PIECE);
    while !(one.line.has_unwritten() && one.outgoing().queued - one.outgoing().written < 60 << 10) {
        assert!(one.send(&[0; 3], &long[..30_000]).unwrap().is_ready());
    }
    let mut short = 0;
    while one.send(&[1; 3], b"short").unwrap().is_ready() {
        short += 1;
        assert!(short < 10_000, "they are not taken without end");
    }
    assert!(short > 10, "{short}");
}

#[test]
fn another_message_than_expected_is_named_and_kept_with_all_that_follows() {
    // Shorter, longer, as long but another, and empty; each followed by more in the same breath.
    for (len, expected_len) in [(10, 1000), (1000, 10), (64, 64), (0, 500), (500, 0), (0, 0)] {
        let (mut raw, mut end) = raw();
        let (other, next) = ([7, 8, 9], [1, 1, 1]);
        let stream = [frame(&other, &pattern(1, len)), frame(&next, &pattern(2, 300)), frame(&next, &[])];
        raw.write_all(&stream.concat()).unwrap();
        let mut target = vec![0; expected_len];
        for _ in 0..2 {
            let unexpected = loop {
                match end.poll_recv(&next, &mut target) {
                    Ok(Poll::Pending) => std::thread::yield_now(),
                    Ok(Poll::Ready(())) => panic!("it is another message"),
                    Err(unexpected) => break unexpected,
                }
            };
            let Unexpected::Other { head, len: their_len } = unexpected else { panic!("{unexpected:?}") };
            assert_eq!((head, their_len), (other, len), "said as often as it is asked");
        }
        assert_eq!(end.peek(), Some((other, len)));
        assert_eq!(until_ready(|| end.poll_message()), (other, pattern(1, len)));
        assert_eq!(end.receive(&next, 300), pattern(2, 300));
        assert_eq!(end.receive(&next, 0), Vec::<u8>::new());
        drop(raw);
        assert_eq!(until_error(|| end.poll_message()).to_string(), "closed between messages");
    }
}

#[test]
fn a_right_head_with_a_wrong_length_is_another_message() {
    let (mut raw, mut end) = raw();
    raw.write_all(&frame(&[1, 2, 3], &pattern(0, 16))).unwrap();
    let mut target = [0; 12];
    until_ready(|| Ok(end.peek().map_or(Poll::Pending, Poll::Ready)));
    let unexpected = end.poll_recv(&[1, 2, 3], &mut target).expect_err("12 bytes were expected");
    assert_eq!(target, [0; 12]);
    assert!(matches!(unexpected, Unexpected::Other { head: [1, 2, 3], len: 16 }), "{unexpected:?}");
    assert_eq!(end.receive(&[1, 2, 3], 16), pattern(0, 16), "nothing was lost");
}

#[test]
fn a_message_that_was_looked_at_can_still_be_received_straight_and_one_in_a_target_only_there() {
    let (mut raw, mut end) = raw();
    for first_part in [0, 56, 57, 100, 156] {
        let message = frame(&[1, 2, 3], &pattern(3, 100));
        raw.write_all(&message[..first_part]).unwrap();
        // Read what is there as a message of unknown length, then go on with a target.
        let before = end.line.arrived(end.claim, 0).unwrap_or(0);
        let there = if first_part < HEADER { 0 } else { first_part as u64 };
        while end.line.arrived(end.claim, 0).unwrap_or(0) < before + there {
            let id = Some(LinkId { group: GROUP, lane: 0 });
            let _ = end.line.poll_any_frame(&end.around, id).unwrap();
        }
        raw.write_all(&message[first_part..]).unwrap();
        assert_eq!(end.receive(&[1, 2, 3], 100), pattern(3, 100));
    }
    let message = frame(&[4, 5, 6], &pattern(0, 100));
    raw.write_all(&message[..90]).unwrap();
    let mut target = [0; 100];
    while !matches!(end.current(), Some(current) if current.read > 30) {
        assert!(end.poll_recv(&[4, 5, 6], &mut target).unwrap().is_pending());
    }
    raw.write_all(&message[90..]).unwrap();
    for _ in 0..100 {
        assert!(end.poll_message().unwrap().is_pending(), "half of it is in the target");
    }
    until_ready(|| end.poll_recv(&[4, 5, 6], &mut target).map_err(|why| panic!("{why:?}")));
    assert_eq!(target[..], pattern(0, 100));
}

#[test]
fn an_end_between_messages_and_one_inside_are_told_apart() {
    let message = frame(&[1, 2, 3], &pattern(0, 100));
    for cut in [0, 1, 55, 56, 57, 155] {
        for straight in [false, true] {
            let (mut raw, mut end) = raw();
            raw.write_all(&message).unwrap();
            raw.write_all(&message[..cut]).unwrap();
            raw.shutdown(Shutdown::Write).unwrap();
            assert_eq!(end.receive(&[1, 2, 3], 100), pattern(0, 100));
            let mut target = [0; 100];
            for _ in 0..2 {
                let error = until_error(|| {
                    if !straight {
                        return end.poll_message().map(|poll| poll.map(|_| ()));
                    }
                    end.poll_recv(&[1, 2, 3], &mut target).map_err(|unexpected| match unexpected {
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
}

#[test]
fn any_damage_to_a_header_is_noticed_and_stays_noticed() {
    let whole = frame(&[1, 2, 3], &[]);
    for bit in 0..8 * HEADER {
        let mut header: [u8; HEADER] = whole[..].try_into().unwrap();
        header[bit / 8] ^= 1 << (bit % 8);
        let error = Frame::decode(&header, TCP_PIECE).expect_err("a bit was flipped");
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }
    let (mut raw, mut end) = raw();
    raw.write_all(&[b'?'; 100]).unwrap();
    for _ in 0..2 {
        let error = until_error(|| end.poll_message());
        assert_eq!(error.to_string(), "no message begins like that");
    }
    assert!(end.line.is_over() && end.sockets().is_empty(), "its socket would be no sleep");
}

#[test]
fn a_message_longer_than_allowed_is_refused_before_memory_is_taken_for_it() {
    let (mut raw, mut end) = raw();
    let link = LinkId { group: GROUP, lane: 0 };
    raw.write_all(&Frame::Message { link, head: [1, 2, 3], len: TCP_PIECE + 1, credit: 0 }.encode()).unwrap();
    let error = until_error(|| end.poll_message());
    assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    assert_eq!(error.to_string(), "a message of 524289 bytes where none has more than 524288");
}

#[test]
fn a_peer_that_says_nothing_is_waited_for_without_waiting() {
    let (_raw, mut end) = raw();
    assert_eq!(end.peek(), None);
    assert!(end.poll_message().unwrap().is_pending());
    assert!(end.poll_recv(&[0; 3], &mut []).unwrap().is_pending());
    let mut absent = End::new(SMALL, LARGE);
    assert!(absent.line.cannot_send() && absent.sockets().is_empty());
    assert!(absent.poll_message().unwrap().is_pending());
    assert!(absent.send(&[0; 3], b"x").unwrap().is_pending());
}

#[test]
fn a_port_where_nobody_listens_is_an_error_each_time_until_another_group_tries() {
    let address = listener().local_addr().unwrap(); // closed again immediately
    let mut end = End::new(SMALL, LARGE);
    if let Err(error) = end.line.open(address, None) {
        return assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
    }
    for _ in 0..2 {
        let error = until_error(|| end.send(&[0; 3], b"hello?"));
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
    }
    assert!(!end.line.cannot_send());
    end.line.claim(OTHER);
    assert!(end.line.cannot_send());
    let error = end.send(&[0; 3], b"hello?").expect_err("its connection broke");
    assert_eq!(error.to_string(), "it was opened again after this group began");
}

#[test]
fn a_caller_calls_from_the_interface_it_was_given_and_is_not_paced_within_a_host() {
    let listener = listener();
    let from = IpAddr::from([127, 0, 0, 9]);
    let (mut end, mut other) = (End::new(SMALL, LARGE), End::new(LARGE, SMALL));
    end.line.open(listener.local_addr().unwrap(), Some(from)).unwrap();
    end.flush_all();
    let (_, stream) = accept(&listener, LARGE);
    assert_eq!(stream.peer_addr().unwrap().ip(), from);
    assert_eq!(adopt(&mut other, stream), Adopted::Yes);
    let sending = end.outgoing().socket();
    let receiving = Arc::clone(&other.line.incoming.open().unwrap().stream);
    for stream in [&sending, &receiving] {
        let socket = SockRef::from(&***stream);
        assert!(socket.tcp_nodelay().unwrap());
        assert!(socket.keepalive().unwrap());
    }
    #[cfg(target_os = "linux")]
    {
        let name = SockRef::from(&**sending).tcp_congestion().unwrap();
        assert!(!name.starts_with(b"bbr"), "{}", name.escape_ascii());
    }
}

#[test]
fn sending_to_a_receiver_that_has_gone_is_an_error_and_no_signal() {
    let (mut one, other) = pair();
    drop(other);
    let payload = pattern(0, 1000);
    let error = loop {
        match one.send(&[0; 3], &payload) {
            Ok(_) => std::thread::yield_now(),
            Err(error) => break error,
        }
    };
    assert!(
        matches!(
            error.kind(),
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset | io::ErrorKind::UnexpectedEof
        ),
        "{error}"
    );
    one.line.claim(OTHER);
    assert!(one.line.cannot_send(), "the next group opens another");
}

/// A process may end with messages unread. What it sent before must still arrive: on a connection with something unread in the
/// other direction the kernel would throw it away.
#[test]
fn what_was_sent_before_the_end_arrives_although_the_sender_has_not_read_everything() {
    let (mut one, mut other) = pair();
    for number in 0..10 {
        assert!(other.send(&[number; 3], &pattern(0, 1000)).unwrap().is_ready());
        assert!(one.send(&[number; 3], &pattern(1, 1000)).unwrap().is_ready());
    }
    drop(one);
    for number in 0..10 {
        assert_eq!(other.receive(&[number; 3], 1000), pattern(1, 1000));
    }
    assert_eq!(until_error(|| other.poll_message()).to_string(), "closed between messages");
}

/// A rank that only receives has no connection on which it could give credit until it owes some.
#[test]
fn a_rank_that_only_receives_opens_a_connection_to_give_credit() {
    let (mut one, mut other) = (End::new(SMALL, LARGE), End::new(LARGE, SMALL));
    connect(&mut one, &mut other);
    let payload = pattern(1, TCP_PIECE);
    let (mut sent, mut received) = (0, 0);
    while !other.line.has_owed() {
        if one.send(&[sent, 0, 0], &payload).unwrap().is_ready() {
            sent += 1;
        }
        let mut target = vec![0; TCP_PIECE];
        let _ = one.line.flush().unwrap();
        while other.poll_recv(&[received, 0, 0], &mut target).unwrap().is_pending() && received < sent {
            let _ = one.line.flush().unwrap();
        }
        received += 1;
    }
    assert!(other.line.cannot_send() && !other.line.has_unwritten());
    assert_eq!(received as usize, CREDIT.div_ceil(HEADER + TCP_PIECE), "after half of the window");
    let before = one.line.links[&LinkId { group: GROUP, lane: 0 }].sendable.0;
    connect(&mut other, &mut one);
    assert!(!other.line.has_owed());
    while one.line.links[&LinkId { group: GROUP, lane: 0 }].sendable.0 == before {
        assert!(one.poll_message().unwrap().is_pending());
    }
}

#[test]
fn a_second_connection_never_takes_the_place_of_a_living_one_but_of_one_that_has_ended() {
    let (mut first, mut end) = raw();
    first.write_all(&frame(&[1; 3], b"first")).unwrap();
    let listener = listener();
    let (_second, accepted) = call(&listener);
    assert_eq!(adopt(&mut end, accepted), Adopted::Twin);
    assert_eq!(until_ready(|| end.poll_message()), ([1; 3], b"first".to_vec()));
    assert!(!end.line.is_over());
    drop(first);
    until_ready(|| Ok(if end.line.is_over() { Poll::Ready(()) } else { Poll::Pending }));
    let (mut third, accepted) = call(&listener);
    assert_eq!(adopt(&mut end, accepted), Adopted::Yes);
    let error = end.poll_message().expect_err("a group that began on the first cannot know what was lost");
    assert_eq!(error.to_string(), "it was opened again after this group began");
    end.claim = end.line.claim(GROUP);
    third.write_all(&frame(&[2; 3], b"third")).unwrap();
    assert_eq!(until_ready(|| end.poll_message()), ([2; 3], b"third".to_vec()));
}

#[test]
fn groups_and_lanes_share_a_line_and_none_waits_for_another() {
    let (mut one, mut other) = pair();
    let (theirs, ours) = (one.line.claim(OTHER), other.line.claim(OTHER));
    // The first of them is not received.
    for (claim, lane, number) in [(theirs, 0, 1), (theirs, 1, 2), (one.claim, 1, 3), (one.claim, 0, 4)] {
        let sent = one.send_as(claim, lane, &[number; 3], &pattern(number as usize, 1000)).unwrap();
        assert!(sent.is_ready());
    }
    assert!(!other.around.0.are_there());
    // What an operation receives into may still have to be sent until its message has come.
    let mut target = vec![77; 1000];
    while let Ok(polled) = other.poll_recv(&[5; 3], &mut target) {
        assert!(polled.is_pending());
    }
    assert_eq!(target, [77; 1000]);
    assert_eq!(other.receive(&[4; 3], 1000), pattern(4, 1000));
    assert!(other.around.0.take(), "others must look, for what is read is not on the socket any more");
    assert!(!other.around.0.take());
    let own = other.claim;
    assert_eq!(until_ready(|| other.message_of(own, 1)), ([3; 3], pattern(3, 1000)));
    assert_eq!(until_ready(|| other.message_of(ours, 1)), ([2; 3], pattern(2, 1000)));
    assert_eq!(until_ready(|| other.message_of(ours, 0)), ([1; 3], pattern(1, 1000)));
}

#[test]
fn a_link_that_nobody_reads_stops_at_its_window_and_the_others_go_on() {
    let (mut one, mut other) = pair();
    let theirs = one.line.claim(OTHER);
    let ours = other.line.claim(OTHER);
    let payload = pattern(1, 100_000);
    // The receiver waits for a message that comes last.
    let (mut stuck, mut rounds) = (0, 0);
    let mut target = vec![0; 8];
    while rounds < 1000 {
        match one.send(&[stuck, 0, 0], &payload).unwrap() {
            Poll::Ready(_) => {
                stuck += 1;
                rounds = 0;
            }
            Poll::Pending => rounds += 1,
        }
        let polled = other.line.poll_recv(&other.around, ours, 0, &[9; 3], Span::of(&mut target)).unwrap();
        assert!(polled.is_pending());
    }
    let bytes = stuck as usize * (HEADER + payload.len());
    assert!((WINDOW..WINDOW + TCP_PIECE).contains(&bytes), "{bytes} bytes of a link are under way");
    // The other group is not affected, in spite of it.
    for round in 0..100 {
        until_ready(|| one.send_as(theirs, 0, &[round, 1, 1], &payload));
        let mut target = vec![0; payload.len()];
        until_ready(|| {
            let _ = one.line.flush()?;
            other
                .line
                .poll_recv(&other.around, ours, 0, &[round, 1, 1], Span::of(&mut target))
                .map_err(|why| panic!("{why:?}"))
        });
        assert!(target == payload);
    }
    // Once the messages are taken, credit comes back and the rest follows.
    let (all, mut sent) = (stuck + 50, stuck);
    for number in 0..all {
        let mut target = vec![0; payload.len()];
        until_ready(|| {
            if sent < all && one.send(&[sent, 0, 0], &payload)?.is_ready() {
                sent += 1;
            }
            let _ = one.line.flush()?;
            other.poll_recv(&[number, 0, 0], &mut target).map_err(|why| panic!("{why:?}"))
        });
        assert!(target == payload, "message {number}");
    }
}

#[test]
fn a_peer_that_ignores_the_window_or_fills_memory_for_strange_groups_is_refused() {
    for (groups, why) in [
        (GROUP..GROUP + 1, "more than 4194304 bytes were sent of which none was taken"),
        (STRANGE..100, "more than 33554432 bytes were sent for groups that this process does not have"),
    ] {
        let (mut raw, mut end) = raw();
        let sender = std::thread::spawn(move || {
            let long = vec![7; TCP_PIECE];
            for group in groups.cycle().take(200) {
                if raw.write_all(&frame_of(group, 1, &[0; 3], &long)).is_err() {
                    return;
                }
            }
        });
        let error = until_error(|| end.poll_message());
        assert_eq!(error.to_string(), why);
        drop(end);
        sender.join().unwrap();
    }
}

#[test]
fn what_a_group_that_failed_or_was_left_does_not_read_is_thrown_away() {
    let (mut raw, mut end) = raw();
    let ours = end.line.claim(OTHER);
    // Half of a message is in the memory of an operation that fails then.
    let message = frame(&[1; 3], &pattern(0, 1000));
    raw.write_all(&message[..500]).unwrap();
    let mut target = vec![0; 1000];
    while end.line.arrived(end.claim, 0).unwrap_or(0) < 500 {
        assert!(end.poll_recv(&[1; 3], &mut target).unwrap().is_pending());
    }
    end.line.fail(end.claim);
    raw.write_all(&message[500..]).unwrap();
    // More than a window of it, which takes neither memory nor credit.
    let writer = std::thread::spawn(move || {
        let piece = vec![1; TCP_PIECE];
        for group in [GROUP, LEFT] {
            for _ in 0..10 {
                raw.write_all(&frame_of(group, 0, &[2; 3], &piece)).unwrap();
            }
        }
        raw.write_all(&frame_of(OTHER, 0, &[3; 3], b"through")).unwrap();
        raw
    });
    assert_eq!(until_ready(|| end.message_of(ours, 0)), ([3; 3], b"through".to_vec()));
    let mut raw = writer.join().unwrap();
    assert!(end.line.links.values().all(|link| link.inbox.is_empty()));
    assert!(!end.line.links.contains_key(&LinkId { group: LEFT, lane: 0 }));

    // The same when this process leaves the group in the middle of a message.
    raw.write_all(&frame_of(OTHER, 0, &[4; 3], &pattern(0, 1000))[..500]).unwrap();
    while end.line.arrived(ours, 0).unwrap_or(0) < 500 + HEADER as u64 + 7 {
        let polled = end.line.poll_recv(&end.around, ours, 0, &[4; 3], Span::of(&mut target));
        assert!(polled.unwrap().is_pending());
    }
    end.line.forget(OTHER);
    let third = end.line.claim(4);
    raw.write_all(&frame_of(OTHER, 0, &[4; 3], &pattern(0, 1000))[500..]).unwrap();
    raw.write_all(&frame_of(4, 0, &[5; 3], b"last")).unwrap();
    assert_eq!(until_ready(|| end.message_of(third, 0)), ([5; 3], b"last".to_vec()));
}

#[test]
fn a_message_that_comes_before_its_group_is_made_waits_for_it() {
    let (mut raw, mut end) = raw();
    raw.write_all(&frame_of(STRANGE, 0, &[1; 3], b"early")).unwrap();
    raw.write_all(&frame(&[2; 3], b"x")).unwrap();
    assert_eq!(until_ready(|| end.poll_message()), ([2; 3], b"x".to_vec()));
    assert_eq!(end.line.unknown, HEADER + 5 + size_of::<Link>());
    let claim = end.line.claim(STRANGE);
    assert_eq!(end.line.unknown, 0);
    assert_eq!(until_ready(|| end.message_of(claim, 0)), ([1; 3], b"early".to_vec()));
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

    /// Messages of three links and credit, in any order, cut anywhere, asked for in any way.
    #[test]
    fn any_cut_of_any_stream_gives_the_same_messages_however_they_are_asked_for(
        messages in proptest::collection::vec((any::<Head>(), 0_usize..500, 0_usize..4, any_asking()), 1..16),
        cuts in proptest::collection::vec(1_usize..300, 1..12),
        rotation in 0_usize..16,
    ) {
        let (mut raw, mut end) = raw();
        let links = [(GROUP, 0), (GROUP, 1), (OTHER, 0)];
        let claims = [end.claim, end.claim, end.line.claim(OTHER)];
        let stream: Vec<u8> = messages.iter().flat_map(|(head, len, which, _)| match links.get(*which) {
            Some((group, lane)) => frame_of(*group, *lane, head, &pattern(*len, *len)),
            None => Frame::Credit { link: LinkId { group: OTHER, lane: 1 }, credit: 1 }.encode().to_vec(),
        }).collect();
        let mut cuts = cuts.iter().cycle();
        let mut rest = &stream[..];
        let mut write_more = || {
            let (now, later) = rest.split_at(rest.len().min(*cuts.next().expect("it goes round")));
            raw.write_all(now).expect("it is read in time");
            rest = later;
            std::thread::yield_now();
        };
        // Link after link, beginning with any of them.
        for turn in 0..3 {
            let which = (turn + rotation) % 3;
            let (claim, lane) = (claims[which], links[which].1);
            for (head, len, _, asking) in messages.iter().filter(|message| message.2 == which) {
                let mut target = vec![0; *len];
                let around = &end.around;
                loop {
                    let other = [!head[0], 0, 0];
                    let line = &mut end.line;
                    let message = match asking {
                        Asking::Straight => {
                            let polled = line.poll_recv(around, claim, lane, head, Span::of(&mut target));
                            if polled.expect("as sent").is_ready() { break }
                            Poll::Pending
                        }
                        Asking::PeekFirst => {
                            if line.peek_head(around, claim, lane).is_some() {
                                let polled = line.poll_recv(around, claim, lane, head, Span::of(&mut target));
                                if polled.expect("as sent").is_ready() { break }
                                Poll::Pending
                            } else {
                                // Behind messages of other links.
                                line.poll_message(around, claim, lane).expect("as sent")
                            }
                        }
                        Asking::Buffered => line.poll_message(around, claim, lane).expect("as sent"),
                        Asking::ExpectingAnother { len: expected } => {
                            match line.poll_recv(around, claim, lane, &other, Span::of(&mut vec![0; *expected])) {
                                Ok(poll) => {
                                    prop_assert!(poll.is_pending());
                                    Poll::Pending
                                }
                                Err(Unexpected::Other { head: theirs, len: their_len }) => {
                                    prop_assert_eq!((theirs, their_len), (*head, *len));
                                    line.poll_message(around, claim, lane).expect("as sent")
                                }
                                Err(Unexpected::Io(error)) => panic!("{error}"),
                            }
                        }
                    };
                    if let Poll::Ready(message) = message {
                        prop_assert_eq!(message.head, *head);
                        target = message.bytes().to_vec();
                        line.take(claim, lane, message);
                        break;
                    }
                    write_more();
                }
                prop_assert_eq!(&target, &pattern(*len, *len));
            }
        }
        prop_assert!(end.line.links.values().all(|link| link.inbox.is_empty()));
    }

    #[test]
    fn arbitrary_bytes_are_refused_and_take_no_memory(
        bytes in proptest::collection::vec(any::<u8>(), 1..300),
        whole_frames in 0_usize..3,
    ) {
        let (mut raw, mut end) = raw();
        let mut stream = frame(&[1, 2, 3], &pattern(0, 50)).repeat(whole_frames);
        stream.extend(&bytes);
        raw.write_all(&stream).unwrap();
        raw.shutdown(Shutdown::Write).unwrap();
        let mut messages = 0;
        let error = loop {
            match end.poll_message() {
                Ok(Poll::Pending) => std::thread::yield_now(),
                Ok(Poll::Ready(_)) => messages += 1,
                Err(error) => break error,
            }
        };
        prop_assert_eq!(messages, whole_frames);
        prop_assert!(matches!(error.kind(), io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof), "{}", error);
        let mut nothing = [0];
        drop(end);
        let _ = raw.read(&mut nothing);
    }
}
