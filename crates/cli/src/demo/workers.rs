//! The worker processes, seen from the parent: none outlives the demo, and one that fails is named.

#![expect(clippy::disallowed_methods, reason = "waits for processes, with a limit")]

use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use tenfold_store::{ErrorKind, Server, StoreExt, TcpStore, TcpStoreOptions, Value};

use super::progress::Progress;
use super::{Args, LIMIT, keys};
use tenfold_console::{FAILURE, Program};

/// How often to check whether all are alive.
const SLICE: Duration = Duration::from_millis(100);
/// Workers fail because of one another. Once the first has exited, this is how long to wait for the worker
/// that caused it, and for one that reports it.
const SETTLING: Duration = Duration::from_secs(2);
const LOOK_AGAIN: Duration = Duration::from_millis(10);

pub(super) struct Workers {
    store: TcpStore,
    children: Vec<Child>,
    /// Their last reported progress.
    last: Option<Progress>,
}

impl Workers {
    pub(super) fn start(server: &Server, args: &Args) -> Result<Self, Box<dyn std::error::Error>> {
        let port = server.address().port();
        let store = TcpStore::open(TcpStoreOptions::new("127.0.0.1", port).timeout(LIMIT))?;
        let mut workers = Workers { store, children: Vec::new(), last: None };
        for rank in 0..args.workers {
            let mut command = Program::own().command();
            command
                .arg("demo-worker")
                .args(["--port", &port.to_string(), "--rank", &rank.to_string()])
                .args(["--workers", &args.workers.to_string(), "--steps", &args.steps.to_string()])
                .args(["--operations", &args.operations.to_string()])
                .args(args.tour.then_some("--tour"))
                .stdin(Stdio::null())
                .stdout(Stdio::null());
            // A failing demo reports the reason; its user does not need dumps.
            command.env("TORCH_FR_DUMP_ON_TIMEOUT", "0");
            tenfold_memory::spawn::die_with_parent(&mut command); // a killed demo leaves no process behind
            workers.children.push(command.spawn()?);
        }
        Ok(workers)
    }

    pub(super) fn pids(&self) -> Vec<u32> {
        self.children.iter().map(Child::id).collect()
    }

    /// The next point of the curve, by its number.
    pub(super) fn progress(&mut self, number: u32) -> Result<Progress, Box<dyn std::error::Error>> {
        let progress = serde_json::from_slice(&self.wait_for(&keys::progress(number))?)?;
        self.last = Some(progress);
        Ok(progress)
    }

    /// Their final reports, by rank; all have succeeded.
    pub(super) fn reports<R: serde::de::DeserializeOwned>(
        &mut self,
    ) -> Result<Vec<R>, Box<dyn std::error::Error>> {
        let mut reports = Vec::new();
        for rank in 0..self.children.len() {
            reports.push(serde_json::from_slice(&self.wait_for(&keys::report(rank))?)?);
        }
        for child in &mut self.children {
            child.wait()?;
        }
        self.failure().map_or(Ok(reports), |failure| Err(failure.into()))
    }

    /// A value, or why it will not arrive.
    fn wait_for(&mut self, key: &str) -> Result<Value, Box<dyn std::error::Error>> {
        let started = Instant::now();
        loop {
            match self.store.wait_for(&[key], SLICE) {
                Ok(()) => return Ok(self.store.get(key)?),
                Err(error) if error.kind() == ErrorKind::Timeout && started.elapsed() < LIMIT => {}
                Err(error) => return Err(error.into()),
            }
            if let Some(failure) = self.failure() {
                return Err(failure.into());
            }
        }
    }

    /// The worker that made others fail, and what one of them noticed; nothing if no worker has failed.
    fn failure(&mut self) -> Option<String> {
        self.ended_badly().first()?;
        let started = Instant::now();
        let ended = loop {
            let ended = self.ended_badly();
            let is_known = ended.iter().any(|(_, status)| blame(*status) > 0);
            let has_witness = ended.iter().any(|(_, status)| blame(*status) == 0);
            if is_known && has_witness || ended.len() == self.children.len() || started.elapsed() > SETTLING {
                break ended;
            }
            std::thread::sleep(LOOK_AGAIN);
        };
        let (culprit, status) = *ended.iter().rev().max_by_key(|(_, status)| blame(*status))?;
        let pid = self.children[culprit].id();
        let when = match self.last {
            Some(Progress { step, steps, .. }) => format!("after step {step} of {steps}"),
            None => "before the first step was reported".to_string(),
        };
        let mut text = format!("worker {culprit} (pid {pid}) ended with {status} {when}");
        let witness = ended.iter().map(|(rank, _)| *rank).find_map(|rank| Some((rank, self.told(rank)?)));
        if let Some((rank, told)) = witness {
            text += &format!("\n  worker {rank} reports: {}", told.replace('\n', "\n  "));
        }
        Some(text)
    }

    fn ended_badly(&mut self) -> Vec<(usize, ExitStatus)> {
        let status = |(rank, child): (usize, &mut Child)| Some((rank, child.try_wait().ok()??));
        let ended = self.children.iter_mut().enumerate().filter_map(status);
        ended.filter(|(_, status)| !status.success()).collect()
    }

    /// Why a worker has failed, in its own words.
    fn told(&self, rank: usize) -> Option<String> {
        let key = keys::failure(rank);
        let is_there = self.store.check(&[&key]).unwrap_or(false);
        let told = is_there.then(|| self.store.get(&key).ok())??;
        Some(String::from_utf8_lossy(&told).into_owned())
    }
}

/// A worker that was killed or panicked did not fail because of others; one that reports why it failed may
/// have.
fn blame(status: ExitStatus) -> u8 {
    match (status.signal(), status.code()) {
        (Some(_), _) => 2,
        (None, Some(code)) if code != i32::from(FAILURE) => 1,
        _ => 0,
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill(); // it may have exited by itself
        }
        for child in &mut self.children {
            let _ = child.wait();
        }
    }
}
