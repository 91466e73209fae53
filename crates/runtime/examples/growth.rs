//! What making groups costs: `growth [RANKS…]`. The ranks are threads of this process, and make their groups through a
//! TCP store of it. Prints, for each number of ranks: the time until all have the group, store requests and bytes, and threads and
//! descriptors of the process before and after each rank has made some more groups.

#![expect(clippy::disallowed_methods, reason = "measures time")]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use tenfold::store::{Deadline, Fault, Request, Response, Server, ServerOptions, Store, TcpStore};
use tenfold::{Group, Options, Seat};

/// Groups that each rank makes after the first; fewer if all ranks of a host are many, who must all know each other.
fn more_groups(size: usize) -> usize {
    if size <= 256 { 20 } else { 2 }
}

static REQUESTS: AtomicUsize = AtomicUsize::new(0);
static BYTES: AtomicUsize = AtomicUsize::new(0);

/// A client of the store that counts.
struct Counting(TcpStore);

impl Store for Counting {
    fn call(&self, request: Request<'_>, deadline: Deadline) -> Result<Response, Fault> {
        let sent = if let Request::Set { value, .. } = &request { value.len() } else { 0 };
        let response = self.0.call(request, deadline);
        let got = match &response {
            Ok(Response::Value(Some(value))) => value.len(),
            Ok(Response::Values(values)) => values.iter().flatten().map(|value| value.len()).sum(),
            _ => 0,
        };
        REQUESTS.fetch_add(1, Ordering::Relaxed);
        BYTES.fetch_add(sent + got, Ordering::Relaxed);
        response
    }
}

fn entries(folder: &str) -> usize {
    std::fs::read_dir(folder).map_or(0, Iterator::count)
}

fn main() -> tenfold::Result<()> {
    let asked: Vec<usize> = std::env::args().skip(1).filter_map(|text| text.parse().ok()).collect();
    let sizes = if asked.is_empty() { vec![2, 16, 64, 256] } else { asked };
    println!(
        "ranks | ms to make a group | requests per rank | bytes per rank | threads, descriptors | with more groups each"
    );
    for size in sizes {
        REQUESTS.store(0, Ordering::Relaxed);
        BYTES.store(0, Ordering::Relaxed);
        let server = Server::start(ServerOptions::new("127.0.0.1", 0))?;
        let port = server.address().port();
        let (made, measured) = (Barrier::new(size + 1), Barrier::new(size + 1));
        let (last, more) = (Barrier::new(size + 1), Barrier::new(size + 1));
        let outcome: tenfold::Result<()> = std::thread::scope(|scope| {
            let start = |rank| {
                let (made, measured, last, more) = (&made, &measured, &last, &more);
                std::thread::Builder::new().stack_size(256 << 10).spawn_scoped(scope, move || {
                    let store: Arc<dyn Store> = Arc::new(Counting(TcpStore::connect("127.0.0.1", port)?));
                    let connect = |name: String| {
                        let options = Options::new(name).timeout(Duration::from_secs(300));
                        Group::connect(Arc::clone(&store), Seat { rank, size }, options)
                    };
                    let first = connect("first".to_string());
                    made.wait();
                    measured.wait();
                    let others: Result<Vec<Group>, _> =
                        (0..more_groups(size)).map(|at| connect(format!("more{at}"))).collect();
                    more.wait();
                    last.wait();
                    first.and(others).map(drop)
                })
            };
            let began = Instant::now();
            let ranks: Vec<_> = (0..size).map(start).collect();
            made.wait();
            let took = began.elapsed();
            let (requests, bytes) = (REQUESTS.swap(0, Ordering::Relaxed), BYTES.swap(0, Ordering::Relaxed));
            let before = (entries("/proc/self/task"), entries("/proc/self/fd"));
            measured.wait();
            more.wait();
            let after = (entries("/proc/self/task"), entries("/proc/self/fd"));
            println!(
                "{size} | {:.1} | {:.1} | {} | {}, {} | {}: {}, {}",
                took.as_secs_f64() * 1e3,
                requests as f64 / size as f64,
                bytes / size,
                before.0,
                before.1,
                more_groups(size),
                after.0,
                after.1
            );
            last.wait();
            ranks
                .into_iter()
                .try_for_each(|rank| rank.expect("a thread can be started").join().expect("no rank panics"))
        });
        outcome?;
    }
    Ok(())
}
