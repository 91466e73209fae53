//! Tests of the test support: ranks report, obey, die and hang, tests notice that, and hosts have the network that was asked for.

#![expect(
    clippy::disallowed_methods,
    clippy::unwrap_used,
    reason = "tests: the time things take; a helper may fail too"
)]

mod support;

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::ExitStatusExt as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use support::{Cable, Hosts, Job, Jobs, Loss, Rank, Slow, local_store, once_within, run_as_rank};
use tenfold_store::StoreExt as _;

const SOON: Duration = Duration::from_secs(60);

const JOBS: Jobs = &[
    ("report", |rank| {
        rank.event(format!("rank {} of {}: {}", rank.rank, rank.size, rank.argument));
        rank.event("two\nlines, and a \\n that does not end a line");
    }),
    ("count_in_store", |rank| rank.event(rank.store().add("ranks", 1).unwrap())),
    ("obey", obey),
    ("nest", nest),
    ("panic", |rank| panic!("rank {} has had enough", rank.rank)),
    ("name_host", |rank| {
        rank.event(std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap().trim_end());
        rank.store().add("ranks", 1).unwrap();
    }),
];

#[test]
#[ignore = "a rank, started by the tests"]
fn rank_entry() {
    run_as_rank(JOBS);
}

fn obey(rank: &Rank) {
    rank.event("ready");
    loop {
        match rank.order().as_str() {
            "end" => return,
            order => rank.event(format!("did {order}")),
        }
    }
}

/// Starts a rank of its own, and is killed before that has ended.
fn nest(rank: &Rank) {
    let store = local_store();
    let mut inner = Job::new("obey", 1).start(store.address());
    inner.wait_for_event(0, "ready", SOON);
    rank.event(inner.pid(0));
    rank.order();
}

// ── ranks ──────────────────────────────────────────────────────────────────────────────────────────────────

#[test]
fn every_rank_does_its_job_and_tells_in_order() {
    let store = local_store();
    let ended = Job::new("report", 3).argument("all of it").start(store.address()).join_well(SOON);
    for (rank, end) in ended.iter().enumerate() {
        let first = format!("rank {rank} of 3: all of it");
        assert_eq!(end.told(), [first.as_str(), "two\nlines, and a \\n that does not end a line"]);
    }
}

#[test]
fn ranks_share_the_store_of_their_test() {
    let store = local_store();
    let ended = Job::new("count_in_store", 4).start(store.address()).join_well(SOON);
    let mut counts: Vec<_> = ended.iter().flat_map(|end| end.told()).collect();
    counts.sort_unstable();
    assert_eq!(counts, ["1", "2", "3", "4"]);
}

#[test]
fn a_stopped_rank_obeys_when_it_goes_on_and_a_killed_one_never() {
    let store = local_store();
    let mut ranks = Job::new("obey", 3).start(store.address());
    ranks.wait_for_all("ready", SOON);
    ranks.stop(0);
    ranks.tell_all("one");
    ranks.wait_for_event(1, "did one", SOON);
    let silent =
        catch_unwind(AssertUnwindSafe(|| ranks.wait_for_event(0, "did one", Duration::from_millis(50))));
    assert!(silent.is_err(), "a stopped rank does nothing");
    ranks.cont(0);
    ranks.wait_for_event(0, "did one", SOON);
    ranks.kill(2);
    ranks.tell(0, "end");
    ranks.tell(1, "end");
    let ended = ranks.join(SOON);
    let codes: Vec<_> = ended.iter().map(|end| (end.status.code(), end.status.signal())).collect();
    assert_eq!(codes, [(Some(0), None), (Some(0), None), (None, Some(9))]);
}

#[test]
fn a_rank_that_hangs_fails_its_test_with_the_words_and_threads_of_all_ranks() {
    let store = local_store();
    let mut ranks = Job::new("obey", 2).start(store.address());
    ranks.wait_for_all("ready", SOON);
    let pids = [ranks.pid(0), ranks.pid(1)];
    ranks.tell(1, "end");
    // A rank that has exited is a zombie until its parent waits for it. The other rank only waits for an order.
    let state = |thread: String| {
        let stat = std::fs::read_to_string(format!("/proc/{thread}/stat")).unwrap_or_default();
        stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next())
    };
    let waits = || {
        std::fs::read_dir(format!("/proc/{}/task", pids[0]))
            .unwrap()
            .flatten()
            .all(|thread| state(format!("{}/task/{}", pids[0], thread.file_name().display())) == Some('S'))
    };
    let start = Instant::now();
    while state(pids[1].to_string()) != Some('Z') || !waits() {
        assert!(start.elapsed() < SOON, "rank 1 does not end, or rank 0 does not wait");
        std::thread::yield_now();
    }
    let hang = catch_unwind(AssertUnwindSafe(|| ranks.join(Duration::from_millis(500)))).unwrap_err();
    let text = hang.downcast::<String>().expect("a message");
    assert!(text.starts_with("not all ranks ended within 500ms: the time is over\n"), "{text}");
    assert!(text.contains(&format!("── rank 0 (pid {}), running: ", pids[0])), "{text}");
    assert!(text.contains("`rank_entry` S in "), "{text}");
    assert!(text.contains("told: ready"), "{text}");
    assert!(text.contains(&format!("── rank 1 (pid {}), exit status: 0", pids[1])), "{text}");
    for pid in pids {
        assert!(!std::fs::exists(format!("/proc/{pid}")).unwrap(), "process {pid} outlived its test");
    }
}

#[test]
fn a_rank_that_panics_is_quoted() {
    let store = local_store();
    let failure = catch_unwind(|| Job::new("panic", 1).start(store.address()).join_well(SOON)).unwrap_err();
    let text = failure.downcast::<String>().expect("a message");
    assert!(text.starts_with("rank 0 of 1 did not end well\n── rank 0, exit status: 101\n"), "{text}");
    assert!(text.contains("rank 0 has had enough"), "{text}");
}

#[test]
fn ranks_die_with_a_test_that_is_killed() {
    let store = local_store();
    let mut ranks = Job::new("nest", 1).start(store.address());
    let inner = ranks.wait_for_event(0, "", SOON).text;
    let inner = rustix::process::Pid::from_raw(inner.parse().unwrap()).unwrap();
    let inner = rustix::process::pidfd_open(inner, rustix::process::PidfdFlags::empty()).unwrap();
    ranks.kill(0);
    // A pidfd is readable once its process has ended.
    let mut ends = [rustix::event::PollFd::new(&inner, rustix::event::PollFlags::IN)];
    let limit = rustix::time::Timespec { tv_sec: 20, tv_nsec: 0 };
    assert_eq!(
        rustix::event::poll(&mut ends, Some(&limit)).unwrap(),
        1,
        "the rank of a killed test lives on"
    );
}

// ── hosts ──────────────────────────────────────────────────────────────────────────────────────────────────

/// A connection from host 0 to host 1.
fn call(hosts: &Hosts) -> (TcpStream, TcpStream) {
    let listener = hosts.namespace(1).inside(|| TcpListener::bind((hosts.address(1), 0)).unwrap());
    let address = listener.local_addr().unwrap();
    let caller = hosts.namespace(0).inside(|| TcpStream::connect_timeout(&address, SOON).unwrap());
    let (called, from) = listener.accept().unwrap();
    assert_eq!(from.ip(), hosts.address(0));
    caller.set_nodelay(true).unwrap();
    called.set_nodelay(true).unwrap();
    called.set_read_timeout(Some(SOON)).unwrap();
    caller.set_read_timeout(Some(SOON)).unwrap();
    (caller, called)
}

fn say(stream: &mut TcpStream, text: &str) {
    stream.write_all(text.as_bytes()).unwrap();
}

fn hear(stream: &mut TcpStream, text: &str) {
    let mut heard = vec![0; text.len()];
    stream.read_exact(&mut heard).unwrap();
    assert_eq!(heard, text.as_bytes());
}

fn datagrams(hosts: &Hosts, host: usize) -> (UdpSocket, SocketAddr) {
    let socket = hosts.namespace(host).inside(|| UdpSocket::bind((hosts.address(host), 0)).unwrap());
    socket.set_read_timeout(Some(SOON)).unwrap();
    let address = socket.local_addr().unwrap();
    (socket, address)
}

fn received(socket: &UdpSocket) -> Vec<u8> {
    let mut packet = [0; 64];
    let length = socket.recv(&mut packet).unwrap();
    packet[..length].to_vec()
}

#[test]
fn hosts_talk_until_one_is_isolated_and_again_when_it_is_healed() {
    let Some(hosts) = Hosts::near(2) else { return };
    let (mut caller, mut called) = call(&hosts);
    say(&mut caller, "before");
    hear(&mut called, "before");

    hosts.isolate(0);
    say(&mut caller, "during");
    called.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    let silence = called.read(&mut [0; 8]).unwrap_err();
    assert_eq!(silence.kind(), ErrorKind::WouldBlock, "neither words nor a reset: {silence}");

    hosts.heal();
    called.set_read_timeout(Some(SOON)).unwrap();
    hear(&mut called, "during");
    say(&mut called, "after");
    hear(&mut caller, "after");
}

#[test]
fn an_isolated_host_reaches_nobody_while_the_others_reach_each_other() {
    let Some(hosts) = Hosts::near(3) else { return };
    let [(lone, lone_at), (left, left_at), (right, right_at)] = [0, 1, 2].map(|host| datagrams(&hosts, host));
    hosts.isolate(0);
    lone.send_to(b"lost", left_at).unwrap();
    left.send_to(b"lost", lone_at).unwrap();
    left.send_to(b"heard", right_at).unwrap();
    assert_eq!(received(&right), b"heard");
    hosts.heal();
    lone.send_to(b"healed", left_at).unwrap();
    left.send_to(b"healed", lone_at).unwrap();
    // Datagrams do not overtake each other here: had one come during the cut, it were the first.
    assert_eq!(received(&left), b"healed");
    assert_eq!(received(&lone), b"healed");
}

#[test]
fn a_one_way_cut_is_one_way() {
    let Some(hosts) = Hosts::near(2) else { return };
    let [(zero, zero_at), (one, one_at)] = [0, 1].map(|host| datagrams(&hosts, host));
    hosts.cut_one_way(0, 1);
    zero.send_to(b"lost", one_at).unwrap();
    one.send_to(b"heard", zero_at).unwrap();
    assert_eq!(received(&zero), b"heard");
    hosts.heal();
    zero.send_to(b"healed", one_at).unwrap();
    assert_eq!(received(&one), b"healed");
}

#[test]
fn hosts_share_neither_names_nor_abstract_sockets_nor_anything_with_this_network() {
    let Some(hosts) = Hosts::near(2) else { return };
    let name = std::os::unix::net::SocketAddr::from_abstract_name("tenfold-test-of-hosts").unwrap();
    let _listener = hosts.namespace(0).inside(|| UnixListener::bind_addr(&name).unwrap());
    let connect = || UnixStream::connect_addr(&name).map(drop).map_err(|error| error.kind());
    assert_eq!(hosts.namespace(0).inside(connect), Ok(()));
    assert_eq!(hosts.namespace(1).inside(connect), Err(ErrorKind::ConnectionRefused));
    assert_eq!(connect(), Err(ErrorKind::ConnectionRefused), "the thread is back where it came from");
    let route = std::fs::read_to_string("/proc/thread-self/net/dev").unwrap();
    assert!(!route.contains("port0"), "{route}");
}

#[test]
fn ranks_live_on_the_host_they_are_put_on_and_reach_the_store_from_there() {
    let Some(hosts) = Hosts::near(2) else { return };
    let store = hosts.serve_store();
    let ended = Job::spread("name_host", 2, &hosts).start(store.address()).join_well(SOON);
    let names: Vec<_> = ended.iter().flat_map(|end| end.told()).collect();
    assert_eq!(names, ["host-0", "host-0", "host-1", "host-1"]);
    let outside = TcpStream::connect_timeout(&store.address(), Duration::from_millis(300));
    assert!(outside.is_err(), "the store is in no network but its own");
}

// ── slow cables ────────────────────────────────────────────────────────────────────────────────────────────

#[test]
fn a_delay_is_felt_in_both_directions() {
    let delay = Duration::from_millis(20);
    let Some(hosts) = Hosts::join(&[Cable::Slow(Slow { delay, ..Slow::default() }), Cable::Ideal]) else {
        return;
    };
    let (mut caller, mut called) = call(&hosts);
    let trip = |_| {
        let start = Instant::now();
        say(&mut caller, "there");
        hear(&mut called, "there");
        let there = start.elapsed();
        say(&mut called, "and back");
        hear(&mut caller, "and back");
        (there, start.elapsed())
    };
    // One of many is not held up by a busy machine.
    let (mut trips, start) = ((0..).map(trip), Instant::now());
    loop {
        let (there, both) = trips.next().unwrap();
        println!("there {there:?}, and back {both:?}");
        assert!(there >= delay && both >= 2 * delay, "there {there:?}, and back {both:?}");
        if both < 3 * delay {
            break;
        }
        assert!(start.elapsed() < SOON, "the last of many took {both:?}");
    }
}

/// Sends 2,000 datagrams over a cable that loses a tenth of them; those that came, and what the cable counted.
fn lossy_traffic(seed: u64) -> Option<(Vec<u16>, Loss)> {
    let cable = Cable::Slow(Slow { loss_out: 0.1, seed, ..Slow::default() });
    let mut hosts = Hosts::join(&[cable, Cable::Ideal])?;
    let [(sender, _), (receiver, address)] = [0, 1].map(|host| datagrams(&hosts, host));
    let mut came = Vec::new();
    let mut sent = 0;
    // The first goes alone: those that wait for ARP are overtaken. Then as many as any queue on the way holds.
    for window in [1].into_iter().chain((200..=2000).step_by(200)) {
        for number in sent..window {
            sender.send_to(&u16::to_le_bytes(number), address).unwrap();
        }
        sent = window;
        let start = Instant::now();
        let expected = loop {
            let loss = hosts.loss(0);
            if loss.out_seen == u64::from(sent) {
                break loss.out_seen - loss.out_lost;
            }
            assert!(start.elapsed() < SOON, "packets are lost elsewhere: {loss:?}");
        };
        while came.len() < usize::try_from(expected).unwrap() {
            came.push(u16::from_le_bytes(received(&receiver).try_into().unwrap()));
        }
    }
    Some((came, hosts.loss(0)))
}

#[test]
fn a_seed_loses_about_the_share_asked_for_and_always_the_same_packets() {
    let Some((came, loss)) = lossy_traffic(7) else { return };
    println!("{loss:?}");
    assert_eq!((loss.out_seen, loss.in_lost), (2000, 0));
    assert_eq!(came.len() as u64, 2000 - loss.out_lost);
    // 200 are expected, with a standard deviation of 13.
    assert!((150..=250).contains(&loss.out_lost), "{loss:?}");
    let (again, _) = lossy_traffic(7).unwrap();
    assert_eq!(came, again, "the same seed");
    let (other, _) = lossy_traffic(8).unwrap();
    assert_ne!(came, other, "another seed");
}

#[test]
fn a_slow_cable_keeps_up_with_thousands_of_packets_a_second() {
    const BYTES: usize = 8 << 20;
    let Some(mut hosts) = Hosts::join(&[Cable::Slow(Slow::default()), Cable::Ideal]) else { return };
    let (mut caller, mut called) = call(&hosts);
    // One of a few is not held up by a busy machine.
    once_within(Duration::from_secs(1) / 3000, || {
        let before = hosts.loss(0);
        let start = Instant::now();
        std::thread::scope(|threads| {
            let sender = threads.spawn(|| caller.write_all(&vec![7; BYTES]));
            called.read_exact(&mut vec![0; BYTES]).unwrap();
            sender.join().unwrap().unwrap();
        });
        let (took, after) = (start.elapsed(), hosts.loss(0));
        let packets = after.out_seen + after.in_seen - before.out_seen - before.in_seen;
        println!("{BYTES} bytes in {took:?}, {packets} packets: {after:?}");
        took / u32::try_from(packets).unwrap()
    });
}
