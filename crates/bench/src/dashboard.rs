//! `tenfold bench dashboard`: what an open dashboard costs a store server.
//!
//! Many clients request keys as fast as they get answers. In every other window, everything that the
//! dashboard has is requested once a second over HTTP, as an open page does, including a survey of all keys.
//! The result is the ratio of two adjacent windows.
#![expect(
    clippy::disallowed_methods,
    reason = "a benchmark reads the clock, and the observer has its own thread"
)]

use std::io::Write as _;
use std::net::SocketAddr;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use tenfold_http::client::{Address, Client};
use tenfold_store::{Request, Response};

use super::case::Case;
use super::cores::Cores;
use super::load::Fleet;
use super::report::median;
use super::script::{Exchange, Scripts};
use super::server::{Recipe, Server, raise_file_limit};
use super::{Failure, Interrupt};

/// Measure what the dashboard costs the server's clients.
///
/// Starts a server with a dashboard, connects many clients to it and fills it with keys. Then it counts the
/// clients' operations per second, with and without an observer that requests every page of the dashboard's
/// API once a second.
#[derive(Debug, clap::Args)]
pub(crate) struct DashboardArgs {
    /// Connected clients, all of which are at work
    #[arg(long, value_name = "N", default_value_t = 5000, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    clients: u32,

    /// Keys in the store
    #[arg(long, value_name = "N", default_value_t = 100_000, value_parser = clap::value_parser!(u32).range(1..=4_000_000))]
    keys: u32,

    /// Requests that each client sends before it waits for the answers
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    in_flight: u32,

    /// Pairs of windows, one with and one without the observer
    #[arg(long, value_name = "N", default_value_t = 9, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,

    /// How long a window is
    #[arg(long, value_name = "SECONDS", default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=600))]
    seconds: u64,
}

/// What is requested once a second: everything.
const ROUTES: [&str; 8] = [
    "/api/overview",
    "/api/history",
    "/api/runs",
    "/api/waiters",
    "/api/clients?limit=200",
    "/api/slow",
    "/api/keys?prefix=",
    "/metrics",
];
const PERIOD: Duration = Duration::from_secs(1);
const ANSWER_MAX: Duration = Duration::from_secs(10);
/// Keys that are written in one request.
const KEYS_AT_ONCE: u32 = 1000;
const FILES_SPARE: u64 = 512;

pub(crate) fn run(args: &DashboardArgs) -> Result<(), Failure> {
    let interrupt = Interrupt::install()?;
    let files = raise_file_limit();
    if files < u64::from(args.clients) + FILES_SPARE {
        return Err(Failure::new(format!(
            "{} clients need more than the {files} open files allowed",
            args.clients
        ))
        .hint("raise the limit with `ulimit -n`, or take fewer with `--clients`"));
    }
    let cores = Cores::settle()?;
    let (server, lines) = Server::start_talkative(&Recipe::tenfold_with_dashboard(), &cores, &interrupt)?;
    let page = parse_page(&lines.next(&interrupt)?)?;

    fill(&server, args.keys, &interrupt)?;
    let (clients, in_flight) = (args.clients as usize, args.in_flight as usize);
    let mut fleet = Fleet::open(server.address, clients, &interrupt)?;
    let scripts = Scripts::new(Case::Get, clients, in_flight);
    fleet.exchange(|index| (&scripts.of(index).prepare.request, &scripts.of(index).prepare.reply))?;
    let window = Duration::from_secs(args.seconds);
    let rate = |fleet: &mut Fleet| -> Result<f64, Failure> {
        let steady = fleet.steady(&scripts, window)?;
        Ok((steady.turns * in_flight as u64) as f64 / steady.elapsed.as_secs_f64())
    };
    rate(&mut fleet)?; // warm

    let mut pairs = Vec::new();
    let mut looks = Looks::default();
    for round in 0..args.rounds {
        let mut looked_at = |fleet: &mut Fleet| {
            let onlooker = Onlooker::start(page)?;
            let rate = rate(fleet);
            looks.add(onlooker.stop()?);
            rate
        };
        // In turns, so that a machine that becomes slower affects both.
        let (alone, watched) = if round % 2 == 0 {
            let watched = looked_at(&mut fleet)?;
            (rate(&mut fleet)?, watched)
        } else {
            let alone = rate(&mut fleet)?;
            (alone, looked_at(&mut fleet)?)
        };
        eprintln!("round {}: {alone:.0}/s alone, {watched:.0}/s observed: {:.3}", round + 1, watched / alone);
        pairs.push((alone, watched));
    }
    print(&report(args, &pairs, &looks))
}

fn print(text: &str) -> Result<(), Failure> {
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(Failure::new(format!("cannot print: {error}")))
        }
        _ => Ok(()),
    }
}

fn report(args: &DashboardArgs, pairs: &[(f64, f64)], looks: &Looks) -> String {
    let ratios: Vec<f64> = pairs.iter().map(|(alone, watched)| watched / alone).collect();
    let (least, most) = (
        ratios.iter().copied().fold(f64::INFINITY, f64::min),
        ratios.iter().copied().fold(f64::NEG_INFINITY, f64::max),
    );
    let mut text = format!(
        "{} clients, {} keys, {} in flight, get: {:.0} operations/s alone, {:.0} observed\n\
         ratio observed / alone: median {:.3}, from {least:.3} to {most:.3} in {} pairs of {} s\n",
        args.clients,
        args.keys,
        args.in_flight,
        median(pairs.iter().map(|pair| pair.0).collect()),
        median(pairs.iter().map(|pair| pair.1).collect()),
        median(ratios),
        pairs.len(),
        args.seconds,
    );
    text += "answers of the dashboard meanwhile, ms:\n";
    for (route, times) in ROUTES.iter().zip(&looks.millis) {
        let slowest = times.iter().copied().fold(0.0, f64::max);
        text += &format!("  {route:<24} median {:8.2}, slowest {slowest:8.2}\n", median(times.clone()));
    }
    text
}

/// Writes the keys that a job of many ranks might have, in groups.
fn fill(server: &Server, keys: u32, interrupt: &Interrupt) -> Result<(), Failure> {
    let mut writer = Fleet::open(server.address, 1, interrupt)?;
    let name =
        |number: u32| format!("/job/group{}/rank{}/address{number}", number % 20, number % 977).into_bytes();
    for first in (0..keys).step_by(KEYS_AT_ONCE as usize) {
        let numbers = first..keys.min(first + KEYS_AT_ONCE);
        let pairs = numbers.map(|number| (name(number).into(), b"127.0.0.1:29500".into())).collect();
        writer.exchange_alike(&Exchange::new().ask(Request::MultiSet { pairs }, Response::Done).ping())?;
    }
    Ok(())
}

/// How long answers took, by route.
#[derive(Debug, Default)]
struct Looks {
    millis: [Vec<f64>; ROUTES.len()],
}

impl Looks {
    fn add(&mut self, other: Looks) {
        for (all, more) in self.millis.iter_mut().zip(other.millis) {
            all.extend(more);
        }
    }
}

/// The observer, which requests everything once a second.
struct Onlooker {
    stop: Sender<()>,
    thread: JoinHandle<Result<Looks, Failure>>,
}

impl Onlooker {
    fn start(page: SocketAddr) -> Result<Self, Failure> {
        let (stop, stopped) = channel();
        let address = Address::Tcp { host: page.ip().to_string(), port: page.port() };
        let client = Client::new(address).timeout(ANSWER_MAX);
        let look = move || {
            let mut looks = Looks::default();
            loop {
                let start = Instant::now();
                for (route, times) in ROUTES.iter().zip(&mut looks.millis) {
                    let start = Instant::now();
                    fetch(&client, route)?;
                    times.push(start.elapsed().as_secs_f64() * 1e3);
                }
                match stopped.recv_timeout(PERIOD.saturating_sub(start.elapsed())) {
                    Err(RecvTimeoutError::Timeout) => {}
                    _ => return Ok(looks),
                }
            }
        };
        let thread = thread::Builder::new()
            .name("onlooker".into())
            .spawn(look)
            .map_err(|error| Failure::new(format!("cannot start a thread: {error}")))?;
        Ok(Onlooker { stop, thread })
    }

    fn stop(self) -> Result<Looks, Failure> {
        drop(self.stop);
        self.thread.join().map_err(|_| Failure::new("the thread that polls the dashboard has panicked"))?
    }
}

/// One answer, which must have the status 200.
fn fetch(client: &Client, route: &str) -> Result<(), Failure> {
    let answer = client.get(route).map_err(|error| Failure::new(format!("cannot get {route}: {error}")))?;
    match answer.status {
        200 => Ok(()),
        status => Err(Failure::new(format!("{route} answered with status {status}"))),
    }
}

fn parse_page(line: &str) -> Result<SocketAddr, Failure> {
    let address =
        line.strip_prefix("dashboard on http://").and_then(|rest| rest.trim_end_matches('/').parse().ok());
    address.ok_or_else(|| {
        Failure::new(format!(
            "expected the line `dashboard on http://HOST:PORT/` from the server, got `{line}`"
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_says_where_its_dashboard_is() {
        let says = |line| parse_page(line).map_err(|failure| failure.to_string());
        assert_eq!(says("dashboard on http://127.0.0.1:4000/"), Ok(SocketAddr::from(([127, 0, 0, 1], 4000))));
        assert_eq!(
            says("hello").unwrap_err(),
            "expected the line `dashboard on http://HOST:PORT/` from the server, got `hello`"
        );
    }
}
