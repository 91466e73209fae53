//! A network that breaks: passes bytes between relays and a server, and cuts connections at any byte.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// Forwards connections to `server`, each for a random number of bytes.
pub(crate) struct Cutter {
    pub(crate) address: SocketAddr,
    stop: Arc<AtomicBool>,
    cuts: Arc<AtomicU64>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Cutter {
    /// `between`: how many bytes a connection carries in one direction before it is cut, on average.
    pub(crate) fn start(server: SocketAddr, seed: u64, between: u64) -> Cutter {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
        let address = listener.local_addr().expect("it is bound");
        let (stop, cuts) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (stopped, counted) = (stop.clone(), cuts.clone());
        let work = move || {
            let mut random = seed | 1;
            for client in listener.incoming() {
                if stopped.load(Ordering::Relaxed) {
                    return;
                }
                let Ok(client) = client else { continue };
                let Ok(upstream) = TcpStream::connect(server) else { continue };
                for stream in [&client, &upstream] {
                    stream.set_nodelay(true).expect("a TCP socket");
                }
                let mut allowance = || {
                    random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
                    200 + (random >> 33) % (2 * between)
                };
                let (up, down) = (allowance(), allowance());
                let halves = [
                    (client.try_clone().expect("a socket"), upstream.try_clone().expect("a socket"), up),
                    (upstream, client, down),
                ];
                for (from, to, allowance) in halves {
                    let cuts = counted.clone();
                    std::thread::spawn(move || pass(from, to, allowance, &cuts));
                }
            }
        };
        Cutter { address, stop, cuts, thread: Some(std::thread::spawn(work)) }
    }

    /// How many connections were cut.
    pub(crate) fn cuts(&self) -> u64 {
        self.cuts.load(Ordering::Relaxed)
    }
}

impl Drop for Cutter {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        drop(TcpStream::connect_timeout(&self.address, Duration::from_secs(1)));
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn pass(mut from: TcpStream, mut to: TcpStream, mut allowance: u64, cuts: &AtomicU64) {
    let mut buffer = vec![0; 16 << 10];
    while let Ok(length @ 1..) = from.read(&mut buffer) {
        let length = (length as u64).min(allowance) as usize;
        allowance -= length as u64;
        if to.write_all(&buffer[..length]).is_err() {
            break;
        }
        if allowance == 0 {
            cuts.fetch_add(1, Ordering::Relaxed);
            break;
        }
    }
    for stream in [from, to] {
        let _already = stream.shutdown(Shutdown::Both);
    }
}
