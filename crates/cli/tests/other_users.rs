//! Other users of the machine: the store of a job does not serve them, and a job does not use theirs.

#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "tests: helpers that may fail")]

mod launching;
mod serving;

use std::io::{BufRead as _, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};

use launching::{HANG, Run, finished, make_fifo};
use rustix::process::Uid;
use rustix::thread::set_thread_res_uid;
use tenfold_store::{Server, ServerOptions};

const OTHER_USER: u32 = 65534;

/// Does something as another user; nothing if this user cannot become another one.
fn as_other_user<T: Send>(task: impl FnOnce() -> T + Send) -> Option<T> {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let other = Uid::from_raw(OTHER_USER);
            set_thread_res_uid(other, other, other).ok().map(|()| task())
        });
        let done = thread.join().unwrap();
        if done.is_none() {
            eprintln!("skipped: only root can be another user");
        }
        done
    })
}

/// The store's answer to a handshake and a ping, in bytes.
fn ping(address: SocketAddr) -> usize {
    let mut stream = TcpStream::connect_timeout(&address, HANG).unwrap();
    stream.set_read_timeout(Some(HANG)).unwrap();
    let _ = stream.write_all(b"\0\xce\xf7\x85\x3c\x0d\x01\x02\x03\x04"); // it may be closed already
    let mut answer = [0; 4];
    stream.read(&mut answer).unwrap_or(0)
}

#[test]
fn the_store_of_a_job_on_one_node_serves_its_own_user_only() {
    let folder = tempfile::tempdir().unwrap();
    let fifo = make_fifo(folder.path());
    let mut run = Run::start(&["-n", "1", &format!("echo $MASTER_ADDR:$MASTER_PORT; cat {fifo}")]);
    let mut line = String::new();
    run.output.read_line(&mut line).unwrap(); // a single rank has no prefix
    let address: SocketAddr = line.trim().parse().unwrap();
    assert_eq!(ping(address), 4);
    if let Some(answered) = as_other_user(|| ping(address)) {
        assert_eq!(answered, 0, "another user is answered");
    }
    assert_eq!(ping(address), 4, "the job continues");
    std::fs::write(fifo, "").unwrap();
    assert!(run.ended().1.success());
}

/// Otherwise the first process that listens on the default port would be the store of every job on the
/// machine that names no port.
#[test]
fn a_job_does_not_join_a_store_of_another_user_on_the_default_port() {
    // An address that only this test uses, so that its port is free.
    let [_, _, high, low] = std::process::id().to_be_bytes();
    let host = format!("127.77.{high}.{}", low | 1);
    let Some(_server) = as_other_user(|| Server::start(ServerOptions::new(&host, 29400)).unwrap()) else {
        return;
    };
    let options = ["--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", &host];
    let (_, errors, code) = finished(&[&options[..], &["-n", "1", "echo started"]].concat());
    assert_eq!(code, Some(1), "{errors}");
    assert!(errors.contains(&format!("the store at {host}:29400 belongs to user {OTHER_USER}")), "{errors}");
}
