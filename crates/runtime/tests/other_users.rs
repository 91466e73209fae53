//! Other users of the host, and processes that have learned the name of a rank, try to enter a group or to end it.

#![expect(
    clippy::disallowed_methods,
    clippy::unwrap_used,
    reason = "tests: threads and sockets; a helper may fail too"
)]

mod support;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::process::Uid;
use rustix::thread::set_thread_res_uid;
use support::{Job, Jobs, Rank, local_store, run_as_rank};
use tenfold::{Buffer, DType, Group, Options, ReduceOp};
use tenfold_store::{StoreExt as _, TcpStore};

const SOON: Duration = Duration::from_secs(60);

const NOBODY: u32 = 65534;

const JOBS: Jobs = &[("sum_before_and_after", sum_before_and_after)];

#[test]
#[ignore = "a rank, started by the tests"]
fn rank_entry() {
    run_as_rank(JOBS);
}

fn sum_before_and_after(rank: &Rank) {
    let options = Options::new("default").timeout(SOON).heartbeat(SOON);
    let group = Group::connect(rank.store(), rank.seat(), options).unwrap();
    for event in ["before", "after"] {
        // Rank 0 waits for a while, and looks meanwhile whether rank 1 is alive.
        if (event, rank.rank) == ("after", 1) {
            std::thread::sleep(Duration::from_millis(500));
        }
        let mut tensor = Buffer::zeros(DType::F32, 10_000);
        tensor.as_mut_slice::<f32>().fill(1.0);
        let work = group.start_all_reduce(tensor.lend(), ReduceOp::Sum);
        match work.and_then(|work| work.wait()) {
            Ok(()) => {
                assert!(tensor.as_slice::<f32>().iter().all(|value| *value == rank.size as f32));
                rank.event(event);
            }
            Err(error) => rank.event(format!("{error}")),
        }
        rank.order();
    }
}

/// A rank, as its card in the store shows it.
struct Target {
    id: u128,
    address: SocketAddr,
    socket: String,
}

fn targets(store: SocketAddr, ranks: usize) -> Vec<Target> {
    let store = TcpStore::connect("127.0.0.1", store.port()).unwrap();
    let target = |rank| {
        let card = store.get(format!("tenfold/default/1/card/{rank}")).unwrap();
        let card: serde_json::Value = serde_json::from_slice(&card).unwrap();
        Target {
            id: u128::from_str_radix(card["fabric"].as_str().unwrap(), 16).unwrap(),
            address: card["address"].as_str().unwrap().parse().unwrap(),
            socket: card["socket"].as_str().unwrap().to_string(),
        }
    };
    (0..ranks).map(target).collect()
}

/// As in `wire`: the beginning of a control stream.
fn hello(sender: u128, receiver: u128) -> Vec<u8> {
    let mut bytes = b"tenfold\n\x03\0".to_vec();
    bytes.extend([0; 22]);
    bytes.extend(sender.to_le_bytes());
    bytes.extend(receiver.to_le_bytes());
    assert_eq!(bytes.len(), 64);
    bytes
}

const GOODBYE: [u8; 5] = [3, 0, 0, 0, 0];

/// Says all of it, hears what is answered, and hangs up. It may be closed in between.
fn attack(mut stream: impl Read + Write, words: &[u8]) -> usize {
    let _ = stream.write_all(words);
    let mut answer = [0; 64];
    let mut heard = 0;
    while heard < answer.len() {
        match stream.read(&mut answer[heard..]) {
            Ok(0) | Err(_) => break,
            Ok(count) => heard += count,
        }
    }
    let _ = stream.write_all(&GOODBYE);
    heard
}

fn dial(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect_timeout(&address, SOON).unwrap();
    stream.set_read_timeout(Some(SOON)).unwrap();
    stream
}

/// In the name of every other rank, to every rank, by every way: how many bytes were answered.
fn attack_all(targets: &[Target]) -> usize {
    let mut answered = 0;
    for (rank, target) in targets.iter().enumerate() {
        let name = std::os::unix::net::SocketAddr::from_abstract_name(&target.socket).unwrap();
        for (_, other) in targets.iter().enumerate().filter(|(other, _)| *other != rank) {
            answered += attack(dial(target.address), &hello(other.id, target.id));
            if let Ok(stream) = UnixStream::connect_addr(&name) {
                stream.set_read_timeout(Some(SOON)).unwrap();
                answered += attack(stream, &hello(other.id, target.id));
            }
        }
    }
    answered
}

fn survives(transport: &str, attack: impl FnOnce(&[Target]) + Send) {
    let store = local_store();
    let job = Job::new("sum_before_and_after", 2).environment("TENFOLD_TRANSPORT", transport);
    let mut ranks = job.start(store.address());
    ranks.wait_for_all("before", SOON);
    let targets = targets(store.address(), 2);
    std::thread::scope(|scope| scope.spawn(|| attack(&targets)).join().unwrap());
    ranks.tell_all("go on");
    ranks.wait_for_all("after", SOON);
    ranks.tell_all("end");
    ranks.join_well(SOON);
}

/// On a thread that is another user for as long as it lives.
fn as_nobody(attack: impl FnOnce(&[Target]) + Send) -> impl FnOnce(&[Target]) + Send {
    move |targets| {
        let nobody = Uid::from_raw(NOBODY);
        if set_thread_res_uid(nobody, nobody, nobody).is_err() {
            return eprintln!("skipped: only root can be another user");
        }
        attack(targets);
    }
}

#[test]
fn another_user_who_knows_all_names_gets_no_answer_and_ends_no_group() {
    for transport in ["shm", "tcp"] {
        let refused = |targets: &[Target]| assert_eq!(attack_all(targets), 0, "it is answered");
        survives(transport, as_nobody(refused));
    }
}

/// A process on another host that has learned the names, as far as this can be tried on one host: its user is not known.
#[test]
fn a_process_that_knows_all_names_does_not_end_a_group_by_leaving() {
    for transport in ["shm", "tcp"] {
        survives(transport, |targets| _ = attack_all(targets));
    }
}
