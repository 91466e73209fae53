//! How fast a TCP link is within this host, beside a plain blocking stream.
//!
//! `cargo run --release -p tenfold --example tcp_link [-- <KiB of buffers>…]`: two threads; streams of pieces one way, both
//! ways at once as in an all-reduce of two ranks, and a ping-pong. Best and median of several rounds, since others use
//! the machine too, and all take turns for the same reason. For each size of buffers given, links with these are
//! measured beside those with the link's own choice.

#![expect(clippy::disallowed_methods, reason = "it measures time, and threads are what it measures between")]

#[allow(dead_code, reason = "the module as it is in the library, of which this uses a part")]
#[path = "../src/transport/tcp.rs"]
mod tcp;
#[allow(dead_code, reason = "the same")]
#[path = "../src/wire.rs"]
mod wire;

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::task::Poll;
use std::thread;
use std::time::{Duration, Instant};

use socket2::SockRef;
use tcp::{TcpIn, TcpOut};
use tenfold_memory::{Bytes, Span};
use wire::{FabricId, Hello, HelloReader, Purpose};

const ROUNDS: usize = 40;
const ROUND_BYTES: usize = 16 << 20;
const TURNS: usize = 200;
const HEAD: [u64; 3] = [1, 2, 3];

type Fallible<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

fn main() -> Fallible<()> {
    let sizes: Vec<usize> = std::env::args().skip(1).map(|size| size.parse()).collect::<Result<_, _>>()?;
    let buffers: Vec<Option<usize>> = std::iter::once(None).chain(sizes.into_iter().map(Some)).collect();
    println!("GB/s, best and median of {ROUNDS} rounds of {} MiB", ROUND_BYTES >> 20);
    print!("    piece |   plain stream |   plain, cubic");
    for kib in &buffers {
        let name = kib.map_or("link".to_string(), |kib| format!("link {kib} KiB"));
        print!(" | {name:>14} |      both ways");
    }
    println!();
    for piece in [64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20] {
        let mut times = vec![Vec::new(); 2 + 2 * buffers.len()];
        for _ in 0..ROUNDS {
            times[0].push(stream_plain(piece, None)?);
            times[1].push(stream_plain(piece, Some("cubic"))?);
            for (column, kib) in buffers.iter().enumerate() {
                times[2 + 2 * column].push(stream_link(piece, *kib)?);
                times[3 + 2 * column].push(exchange(piece, *kib)? / 2);
            }
        }
        print!("{:>5} KiB", piece >> 10);
        for times in &mut times {
            let rate = |time: Duration| ROUND_BYTES as f64 / time.as_secs_f64() / 1e9;
            let (best, median) = best_and_median(times);
            print!(" | {:>6.2} {:>7.2}", rate(best), rate(median));
        }
        println!();
    }
    println!("µs one way, best and median of {ROUNDS} rounds of {TURNS} turns");
    println!("      len | plain, polling |           link");
    for len in [8, 4 << 10, 32 << 10] {
        let mut times = vec![Vec::new(); 2];
        for _ in 0..ROUNDS {
            times[0].push(ping_pong_plain(len)?);
            times[1].push(ping_pong(len)?);
        }
        print!("{len:>7} B");
        for times in &mut times {
            let micros = |time: Duration| time.as_secs_f64() * 1e6 / (2 * TURNS) as f64;
            let (best, median) = best_and_median(times);
            print!(" | {:>6.1} {:>7.1}", micros(best), micros(median));
        }
        println!();
    }
    Ok(())
}

fn best_and_median(times: &mut [Duration]) -> (Duration, Duration) {
    times.sort_unstable();
    (times[0], times[times.len() / 2])
}

fn stream_plain(piece: usize, congestion: Option<&str>) -> Fallible<Duration> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let mut out = TcpStream::connect(listener.local_addr()?)?;
    let (mut stream, _) = listener.accept()?;
    if let Some(congestion) = congestion {
        SockRef::from(&out).set_tcp_congestion(congestion.as_bytes())?;
    }
    let sender = thread::spawn(move || -> Fallible<()> {
        let payload = vec![1; piece];
        for _ in 0..ROUND_BYTES / piece {
            out.write_all(&payload)?;
        }
        Ok(())
    });
    let mut target = vec![0; piece];
    let start = Instant::now();
    for _ in 0..ROUND_BYTES / piece {
        stream.read_exact(&mut target)?;
    }
    let took = start.elapsed();
    sender.join().expect("the sender ends")?;
    Ok(took)
}

fn link(buffers_kib: Option<usize>) -> Fallible<(TcpOut, TcpIn)> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let hello = Hello { purpose: Purpose::Control, sender: FabricId(1), receiver: FabricId(2) };
    let mut out = TcpOut::connect(listener.local_addr()?, None, &hello)?;
    let (stream, _) = listener.accept()?;
    while out.poll_flush()?.is_pending() {
        thread::yield_now();
    }
    let Poll::Ready(_) = HelloReader::new().poll(&stream, FabricId(2))? else {
        return Err("a blocking stream says it would block".into());
    };
    let link = TcpIn::new(stream, 1 << 20)?;
    if let Some(kib) = buffers_kib {
        SockRef::from(&out.as_fd()).set_send_buffer_size(kib << 10)?;
        SockRef::from(&link.as_fd()).set_recv_buffer_size(kib << 10)?;
    }
    Ok((out, link))
}

fn stream_link(piece: usize, buffers: Option<usize>) -> Fallible<Duration> {
    let (mut out, mut link) = link(buffers)?;
    let sender = thread::spawn(move || -> Fallible<()> {
        let payload = vec![1; piece];
        for _ in 0..ROUND_BYTES / piece {
            while out.poll_send(&HEAD, Bytes::of(&payload), true)?.is_pending() {
                thread::yield_now();
            }
        }
        Ok(())
    });
    let mut target = vec![0; piece];
    let start = Instant::now();
    for _ in 0..ROUND_BYTES / piece {
        while link.poll_recv(&HEAD, Span::of(&mut target)).map_err(|why| format!("{why:?}"))?.is_pending() {
            thread::yield_now();
        }
    }
    let took = start.elapsed();
    sender.join().expect("the sender ends")?;
    Ok(took)
}

/// Both threads send and receive the same number of pieces at once.
fn exchange(piece: usize, buffers: Option<usize>) -> Fallible<Duration> {
    let (there, here) = link(buffers)?;
    let (back, other) = link(buffers)?;
    let swap = move |mut out: TcpOut, mut link: TcpIn| -> Fallible<()> {
        let (payload, mut target) = (vec![1; piece], vec![0; piece]);
        let (mut sent, mut received) = (0, 0);
        let pieces = ROUND_BYTES / piece;
        while sent < pieces || received < pieces {
            let mut moved = false;
            if sent < pieces && out.poll_send(&HEAD, Bytes::of(&payload), true)?.is_ready() {
                (sent, moved) = (sent + 1, true);
            }
            if received < pieces
                && link.poll_recv(&HEAD, Span::of(&mut target)).map_err(|why| format!("{why:?}"))?.is_ready()
            {
                (received, moved) = (received + 1, true);
            }
            if !moved {
                thread::yield_now();
            }
        }
        Ok(())
    };
    let start = Instant::now();
    let peer = thread::spawn(move || swap(back, here));
    swap(there, other)?;
    peer.join().expect("the peer ends")?;
    Ok(start.elapsed())
}

/// One stream for both directions, polled as links are.
fn ping_pong_plain(len: usize) -> Fallible<Duration> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let there = TcpStream::connect(listener.local_addr()?)?;
    let (here, _) = listener.accept()?;
    let play = move |mut stream: TcpStream, begins: bool| -> Fallible<()> {
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        let mut payload = vec![1; len];
        for turn in 0..2 * TURNS {
            let mut done = 0;
            while done < len {
                let moved = match (turn % 2 == 0) == begins {
                    true => stream.write(&payload[done..]),
                    false => stream.read(&mut payload[done..]),
                };
                match moved {
                    Ok(count) => done += count,
                    Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => thread::yield_now(),
                    Err(error) => return Err(error.into()),
                }
            }
        }
        Ok(())
    };
    let start = Instant::now();
    let peer = thread::spawn(move || play(here, false));
    play(there, true)?;
    peer.join().expect("the peer ends")?;
    Ok(start.elapsed())
}

fn ping_pong(len: usize) -> Fallible<Duration> {
    let (there, here) = link(None)?;
    let (back, other) = link(None)?;
    let play = move |mut out: TcpOut, mut link: TcpIn, begins: bool| -> Fallible<()> {
        let (payload, mut target) = (vec![1; len], vec![0; len]);
        for turn in 0..2 * TURNS {
            if (turn % 2 == 0) == begins {
                while out.poll_send(&HEAD, Bytes::of(&payload), false)?.is_pending() {
                    thread::yield_now();
                }
            } else {
                while link
                    .poll_recv(&HEAD, Span::of(&mut target))
                    .map_err(|why| format!("{why:?}"))?
                    .is_pending()
                {
                    thread::yield_now();
                }
            }
        }
        Ok(())
    };
    let start = Instant::now();
    let peer = thread::spawn(move || play(back, here, false));
    play(there, other, true)?;
    peer.join().expect("the peer ends")?;
    Ok(start.elapsed())
}
