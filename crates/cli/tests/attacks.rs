//! The memory of a whole server process under attack, and what it keeps afterwards.
//!
//! The figures are those of `reliability.md` (S4 to S10). Attacks that test a refusal or an answer are in
//! `crates/store/tests/attacks.rs`.

#![expect(
    clippy::disallowed_methods,
    clippy::unwrap_used,
    reason = "tests: threads, sockets, the time things take; a helper may fail too"
)]

#[path = "../../store/tests/hostile/mod.rs"]
mod hostile;
mod serving;

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::process::Stdio;
use std::time::{Duration, Instant};

use hostile::*;
use rustix::process::Signal;
use serving::Serve;
use tenfold_store::{Closed, Facts, StoreExt};

const KB: usize = 1 << 10;
const MB: usize = 1 << 20;

fn facts(serve: &Serve) -> Facts {
    client(serve.address, HANG).server_facts().unwrap()
}

fn closed(serve: &Serve, reason: Closed) -> u64 {
    facts(serve).closed.get(&reason).copied().unwrap_or(0)
}

/// Waits until only the given clients are left, and returns the memory that `attack` left behind.
fn kept(serve: &Serve, attack: &str, before: usize, others: usize) -> usize {
    until("the attackers are disconnected", || facts(serve).connections <= others + 2);
    let kept = serve.resident().saturating_sub(before);
    println!("{attack}: {} KB kept", kept / KB);
    kept
}

/// The most memory seen beyond `before` until `done`.
fn peak(serve: &Serve, before: usize, mut done: impl FnMut() -> bool) -> usize {
    let mut peak = 0;
    until("the attack is over", || {
        peak = peak.max(serve.resident().saturating_sub(before));
        done()
    });
    peak
}

#[test]
fn ten_thousand_garbage_connections_leave_nothing_behind() {
    let serve = Serve::start(&[]);
    let bystander = Bystander::watch(serve.address);
    let mut rubbish = 0x2545_f491_4f6c_dd1d_u64;
    let mut attack = |count: usize| {
        for _ in 0..count {
            rubbish ^= rubbish << 13;
            rubbish ^= rubbish >> 7;
            rubbish ^= rubbish << 17;
            let mut raw = Raw::connect(serve.address);
            raw.try_send(&rubbish.to_le_bytes().repeat(8));
        }
    };
    attack(500); // the first few allocate what the server needs anyway
    until("all are disconnected", || facts(&serve).connections <= 3);
    let before = serve.resident();
    let start = Instant::now();
    attack(10_000);
    let fresh = Instant::now();
    client(serve.address, HANG).ping().unwrap();
    let fresh = fresh.elapsed();
    let kept = kept(&serve, "10,000 garbage connections", before, 1);
    let seconds = start.elapsed().as_secs() as usize;
    let lines = serve.log_lines().len();
    println!("fresh client after it: {:.1} ms; {lines} log lines in {seconds} s", fresh.as_secs_f64() * 1e3);
    assert!(kept <= 4 * MB);
    assert!(fresh < Duration::from_secs(5));
    assert!(lines <= 12 * (seconds + 3), "ten lines a second and a sum");
    bystander.report("garbage");
}

#[test]
fn ten_thousand_connections_dropped_at_once_leave_nothing_behind() {
    let serve = Serve::start(&[]);
    let bystander = Bystander::watch(serve.address);
    let attack = |count| (0..count).for_each(|_| drop(TcpStream::connect(serve.address).unwrap()));
    attack(500);
    until("all are disconnected", || facts(&serve).connections <= 3);
    let before = serve.resident();
    attack(10_000);
    let fresh = Instant::now();
    client(serve.address, HANG).ping().unwrap();
    println!("fresh client after 10,000: {:.1} ms", fresh.elapsed().as_secs_f64() * 1e3);
    assert!(kept(&serve, "10,000 connect and drop", before, 1) <= 4 * MB);
    assert_eq!(serve.log_lines().len(), 0);
    bystander.report("connect and drop");
}

#[test]
fn an_upload_cut_after_seven_megabytes_leaves_nothing_behind() {
    const UPLOADS: usize = 60;
    let serve = Serve::start(&[]);
    let bystander = Bystander::watch(serve.address);
    let part = &message(SET, &[b"/cut", &vec![7; 8 * MB]])[..7 * MB];
    let upload = |count| {
        for _ in 0..count {
            Raw::greeted(serve.address).send(part);
        }
        until("all are disconnected", || facts(&serve).connections <= 3);
        serve.resident()
    };
    let before = upload(3);
    // The allocator sometimes keeps a block or two for the next such upload; what is lost per upload adds up.
    let each = (1..=10).find_map(|round| {
        let kept = upload(UPLOADS).saturating_sub(before);
        let uploads = round * UPLOADS;
        println!("{uploads} uploads cut after 7 MB: {} KB kept, {} each", kept / KB, kept / uploads);
        (kept / uploads <= 64 * KB).then_some(kept / uploads)
    });
    assert!(each.is_some(), "memory grows with every upload");
    assert_eq!(facts(&serve).buffer_bytes, 0);
    assert!(!client(serve.address, HANG).check(&["cut"]).unwrap());
    bystander.report("cut uploads");
}

#[test]
fn half_messages_dropped_leave_nothing_behind() {
    let serve = Serve::start(&[]);
    let bystander = Bystander::watch(serve.address);
    let half = &message(SET, &[b"/half", &[7; 100 * KB]])[..50 * KB];
    let round = || {
        let mut held: Vec<Raw> = (0..500).map(|_| Raw::greeted(serve.address)).collect();
        held.iter_mut().for_each(|raw| raw.send(half));
        until("all are there", || facts(&serve).buffer_bytes >= 500 * half.len());
        serve.resident()
    };
    let start = serve.resident();
    let most = round() - start;
    until("all are disconnected", || facts(&serve).connections <= 3);
    let before = serve.resident();
    for _ in 0..4 {
        round();
    }
    println!("500 half messages of 50 KB: {} KB while they are there", most / KB);
    assert!(most < 64 * MB);
    assert!(kept(&serve, "4 more rounds of them", before, 1) <= 4 * MB);
    bystander.report("500 half messages × 5");
}

#[test]
fn unread_replies_are_bounded() {
    let serve = Serve::start(&["--write-timeout", "1s"]);
    client(serve.address, HANG).set("large", vec![7; MB]).unwrap();
    let bystander = Bystander::watch(serve.address);
    let before = serve.resident();

    let mut raw = Raw::greeted(serve.address);
    raw.send(&message(GET, &[b"/large"]).repeat(512));
    let most = peak(&serve, before, || closed(&serve, Closed::WriteTimeout) == 1);
    println!("512 gets of 1 MiB, not read: at most {} KB", most / KB);
    assert!(most <= 16 * MB);

    let mut raw = Raw::greeted(serve.address);
    let request = list(MULTI_GET, std::iter::repeat_n(b"/large", 512));
    raw.send(&request);
    let most = peak(&serve, before, || closed(&serve, Closed::WriteTimeout) == 2);
    println!("a multi_get of {} bytes for 512 MiB, not read: at most {} KB", request.len(), most / KB);
    assert!(most <= 16 * MB);

    let mut raw = Raw::greeted(serve.address);
    let sent = raw.stuff(&[PING, 1, 2, 3, 4].repeat(8_380_000), Duration::from_millis(200));
    let most = peak(&serve, before, || closed(&serve, Closed::WriteTimeout) == 3);
    println!("{} pings, not read: at most {} KB", sent / 5, most / KB);
    assert!(most <= 64 * MB);
    assert!(kept(&serve, "three clients that never read", before, 1) <= 16 * MB);
    bystander.report("clients that never read");
}

#[test]
fn many_clients_that_do_not_read_shared_values_are_bounded() {
    let serve = Serve::start(&["--write-timeout", "2s"]);
    client(serve.address, HANG).set("shared", vec![7; 16 * KB]).unwrap();
    let bystander = Bystander::watch(serve.address);
    let before = serve.resident();
    let mut crowd: Vec<Raw> = (0..100).map(|_| Raw::greeted(serve.address)).collect();
    crowd.iter_mut().for_each(|raw| raw.send(&message(GET, &[b"/shared"]).repeat(1500)));
    let most = peak(&serve, before, || closed(&serve, Closed::WriteTimeout) == 100);
    println!("100 clients with 1,000 unread replies of 16 KiB each: at most {} KB", most / KB);
    assert!(most <= 64 * MB, "{most}");
    bystander.report("100 clients that never read");
}

#[test]
fn five_hundred_silent_connections_cost_little_and_are_closed() {
    let serve = Serve::start(&["--handshake-timeout", "1s"]);
    let bystander = Bystander::watch(serve.address);
    let before = serve.resident();
    let mut crowd: Vec<Raw> = (0..500).map(|_| Raw::connect(serve.address)).collect();
    for (index, raw) in crowd.iter_mut().enumerate() {
        raw.send(&HELLO[..index % HELLO.len()]);
    }
    let most = peak(&serve, before, || closed(&serve, Closed::HandshakeTimeout) == 500);
    println!("500 connections without a hello: at most {} KB", most / KB);
    assert!(most <= 16 * MB);
    crowd.iter_mut().for_each(|raw| assert_eq!(raw.until_closed(), b""));
    bystander.report("500 without hello");
}

#[test]
fn idle_connections_cost_little() {
    // Our descriptors and the server's are in two processes, so each has its own limit.
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(u64::MAX);
    let counts: &[usize] = if limit >= 11_000 { &[2_000, 10_000] } else { &[900] };
    let serve = Serve::start(&[]);
    let bystander = Bystander::watch(serve.address);
    for &count in counts {
        let before = serve.resident();
        let mut idle: Vec<Raw> = (0..count).map(|_| Raw::greeted(serve.address)).collect();
        idle.iter_mut().for_each(Raw::sync);
        let each = serve.resident().saturating_sub(before) / count;
        let start = Instant::now();
        client(serve.address, HANG).ping().unwrap();
        println!("{count} idle connections: {each} bytes each; fresh client {:?}", start.elapsed());
        assert!(each <= 16 * KB);
        drop(idle);
        until("all are disconnected", || facts(&serve).connections <= 3);
    }
    bystander.report("idle connections");
}

#[test]
fn a_full_store_stays_within_its_limit() {
    let serve = Serve::start(&["--max-memory", "64M"]);
    let bystander = Bystander::watch(serve.address);
    let before = serve.resident();
    let store = client(serve.address, HANG);
    let value = vec![7; MB];
    let mut stored = 0;
    while store.set(format!("fill/{stored}"), &value).and_then(|()| store.ping()).is_ok() {
        stored += 1;
        assert!(stored < 64);
    }
    let grown = serve.resident().saturating_sub(before);
    println!("--max-memory 64M took {stored} values of 1 MiB: {} KB", grown / KB);
    assert!(stored >= 60 && grown < 80 * MB);
    // Either its buffer was already too much, or finally the value.
    assert_eq!(closed(&serve, Closed::Full) + closed(&serve, Closed::Memory), 1);
    let line = serve.said("");
    assert!(line.contains(&format!("store server at {} closed the connection of ", serve.address)), "{line}");
    assert!(*store.get("fill/0").unwrap() == *value);
    assert!(store.delete_key("fill/0").unwrap());
    store.set("again", &value).unwrap();
    assert!(*store.get("again").unwrap() == *value);
    bystander.report("full store");
}

#[test]
fn small_keys_cost_at_most_what_is_counted() {
    const KEYS: usize = 300_000;
    let serve = Serve::start(&[]);
    let before = serve.resident();
    let mut raw = Raw::greeted(serve.address);
    let mut sets = Vec::new();
    for index in 0..KEYS {
        sets.extend(message(SET, &[format!("/key/{index:08}").as_bytes(), b"sixteen bytes ..."]));
    }
    raw.send(&sets);
    raw.sync();
    let (grown, counted) = (serve.resident().saturating_sub(before), facts(&serve).table_bytes);
    println!("{KEYS} keys: {} bytes each, {} counted", grown / KEYS, counted / KEYS);
    assert!(grown < counted * 3 / 2, "the limit of memory means memory");
}

#[test]
fn popping_unknown_queues_leaves_nothing_behind() {
    const NAMES: usize = 300_000;
    let serve = Serve::start(&[]);
    let bystander = Bystander::watch(serve.address);
    let before = serve.resident();
    let mut raw = Raw::greeted(serve.address);
    for names in (0..NAMES).collect::<Vec<_>>().chunks(10_000) {
        let pops = names.iter().flat_map(|name| message(QUEUE_POP, &[format!("/unknown/{name}").as_bytes()]));
        raw.send(&pops.collect::<Vec<_>>());
        (0..names.len()).for_each(|_| assert_eq!(raw.read(), [0; 8]));
    }
    assert!(kept(&serve, "300,000 pops of unknown queues", before, 2) <= 4 * MB);
    bystander.report("unknown queues");
}

/// A pager, a stopped terminal, a stuck log collector: if its reader stops reading, the log must not stop the
/// store.
#[test]
fn a_log_that_is_not_read_blocks_no_client_and_not_the_exit() {
    let (mut log, full) = std::io::pipe().unwrap();
    rustix::io::ioctl_fionbio(&full, true).unwrap();
    while (&full).write(&[b'\n'; 4096]).is_ok() {}
    rustix::io::ioctl_fionbio(&full, false).unwrap();
    let mut command = std::process::Command::new(serving::TENFOLD);
    command.args(["serve", "--port", "0"]).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(full);
    let mut process = serving::Process(command.spawn().unwrap());
    drop(command); // it holds the pipe
    let mut line = String::new();
    BufReader::new(process.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let address = line.trim().strip_prefix("listening on ").unwrap().parse().unwrap();
    let store = client(address, HANG);
    for _ in 0..20 {
        let mut raw = Raw::connect(address);
        raw.send(b"GET / HTTP/1.1\r\n\r\n");
        raw.until_closed();
        store.ping().unwrap();
    }
    // What was logged meanwhile arrives when it is read, including the last lines.
    process.signal(Signal::INT);
    let mut text = String::new();
    log.read_to_string(&mut text).unwrap();
    assert!(process.0.wait().unwrap().success());
    let lines: Vec<&str> = text.lines().filter(|line| !line.is_empty()).collect();
    assert!(lines[0].contains("closed the connection of 127.0.0.1:"), "{lines:?}");
    assert!(lines.iter().any(|line| line.starts_with("stopped after ")), "{lines:?}");
}

#[test]
fn few_descriptors_mean_fewer_clients_and_nothing_else() {
    let mut command = std::process::Command::new("sh");
    command.args(["-c", "ulimit -n 256; exec \"$0\" serve --port 0", serving::TENFOLD]);
    let serve = Serve::spawn(command);
    let bystander = Bystander::watch(serve.address);
    assert_eq!(facts(&serve).connections_max, 192, "64 of the 256 are kept for other things");
    let mut crowd: Vec<Raw> = (0..400).map(|_| Raw::connect(serve.address)).collect();
    let mut inside = 0;
    for raw in &mut crowd {
        raw.try_send(&[HELLO.as_slice(), &[PING, 1, 2, 3, 4]].concat());
        inside += usize::from(!raw.answer_or_end().is_empty());
    }
    println!("{inside} of 400 were served");
    assert!((189..=191).contains(&inside), "{inside}");
    crowd.clear();
    until("there is room again", || {
        let mut raw = Raw::connect(serve.address);
        raw.try_send(&[HELLO.as_slice(), &[PING, 1, 2, 3, 4]].concat());
        !raw.answer_or_end().is_empty()
    });
    bystander.report("few descriptors");
}
