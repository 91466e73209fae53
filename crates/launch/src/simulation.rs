//! Many nodes without ranks in one process, for `tenfold bench launch --simulated-nodes`.
//!
//! The rendezvous is the real one, with its two threads and two connections for each node. Only the launcher
//! around it is missing: its ranks start and succeed at the caller's word.
#![expect(clippy::disallowed_methods, reason = "starts nodes on several threads, and waits for them")]

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use tenfold_dashboard::job::{Head, Keys};
use tenfold_store::{StoreExt as _, TcpStore};

use super::rendezvous::{Event, NodeInfo, Order, Outcome, Rendezvous, Settings};

/// Threads that start nodes.
const STARTERS: usize = 8;
/// From one look at `is_interrupted` to the next.
const GLANCE: Duration = Duration::from_millis(100);

/// The nodes of a job.
pub struct Simulation {
    nodes: Vec<Rendezvous>,
    events: Receiver<Event>,
    store: TcpStore,
    run_id: String,
}

impl std::fmt::Debug for Simulation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Simulation").field("nodes", &self.nodes.len()).finish_non_exhaustive()
    }
}

impl Simulation {
    /// Starts the nodes of a job that has exactly so many, with the default settings of `tenfold run`.
    ///
    /// # Errors
    /// If the store cannot be reached, or a thread cannot be started.
    pub fn start(address: SocketAddr, run_id: &str, nodes: usize) -> io::Result<Simulation> {
        let settings = Settings {
            run_id: run_id.into(),
            nodes_min: nodes,
            nodes_max: nodes,
            max_restarts: 0,
            join_timeout: Duration::from_secs(600),
            last_call: Duration::from_secs(30),
            beat_interval: Duration::from_secs(5),
            beats_missed_max: 3,
        };
        let connect =
            || TcpStore::connect(&address.ip().to_string(), address.port()).map_err(io::Error::other);
        let (sender, events) = channel();
        let start_some = |first: usize, sender: Sender<Event>| -> io::Result<Vec<Rendezvous>> {
            let start_one = |number: usize| {
                let sender = sender.clone();
                let tell = move |event| {
                    if !matches!(event, Event::Note(_) | Event::Held(_)) {
                        let _nobody_waits = sender.send(event);
                    }
                };
                let host = format!("node-{number:05}.simulated");
                let node = NodeInfo {
                    id: format!("{host}-{}-0123456789abcdef", std::process::id()),
                    host,
                    ranks: 8,
                    role: "default".into(),
                    ..NodeInfo::default()
                };
                Rendezvous::join(Arc::new(connect()?), settings.clone(), node, tell)
            };
            (first..nodes).step_by(STARTERS).map(start_one).collect()
        };
        let all = std::thread::scope(|scope| {
            let starters: Vec<_> = (0..STARTERS)
                .map(|first| {
                    let (sender, start_some) = (sender.clone(), &start_some);
                    let name = format!("start-{first}");
                    std::thread::Builder::new()
                        .name(name)
                        .spawn_scoped(scope, move || start_some(first, sender))
                })
                .collect();
            let mut all = Vec::with_capacity(nodes);
            for starter in starters {
                all.extend(starter?.join().expect("it does not panic")?);
            }
            io::Result::Ok(all)
        })?;
        Ok(Simulation { nodes: all, events, store: connect()?, run_id: run_id.into() })
    }

    /// Waits until all nodes were asked to start their ranks.
    ///
    /// # Errors
    /// If the job ends instead, or the wait times out or is interrupted.
    pub fn wait_started(&self, patience: Duration, is_interrupted: &dyn Fn() -> bool) -> Result<(), String> {
        self.wait("started", patience, is_interrupted, |event| matches!(event, Event::Start(_)))
    }

    /// All ranks succeed; waits until all nodes know that the job is over.
    ///
    /// # Errors
    /// If the job ends otherwise, or the wait times out or is interrupted.
    pub fn finish(&self, patience: Duration, is_interrupted: &dyn Fn() -> bool) -> Result<(), String> {
        self.nodes.iter().for_each(|node| node.tell(Order::Done { round: 0 }));
        self.wait("ended", patience, is_interrupted, |event| *event == Event::Over(Outcome::Success))
    }

    fn wait(
        &self,
        what: &str,
        patience: Duration,
        is_interrupted: &dyn Fn() -> bool,
        is_it: impl Fn(&Event) -> bool,
    ) -> Result<(), String> {
        let until = Instant::now() + patience;
        let mut count = 0;
        while count < self.nodes.len() {
            match self.events.recv_timeout(GLANCE) {
                Ok(event) if is_it(&event) => count += 1,
                Ok(event) => return Err(format!("a simulated node reported {event:?}")),
                Err(RecvTimeoutError::Timeout) if is_interrupted() => return Err("interrupted".into()),
                Err(RecvTimeoutError::Timeout) if Instant::now() < until => {}
                Err(_) => {
                    let all = self.nodes.len();
                    let seconds = patience.as_secs_f64();
                    return Err(format!(
                        "timed out: {count} of {all} simulated nodes {what} within {seconds} s"
                    ));
                }
            }
        }
        Ok(())
    }

    /// How often the state has changed.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn states(&self) -> Result<u64, String> {
        let text = self.store.get(Keys::new(&self.run_id).state()).map_err(|error| error.to_string())?;
        serde_json::from_slice::<Head>(&text).map(|head| head.version).map_err(|error| error.to_string())
    }
}
