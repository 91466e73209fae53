//! The end of a launcher: the ranks' remaining output, the final report, and the exit code.

#![expect(clippy::disallowed_methods, reason = "reads the clock while the last output is shown")]

use std::io::{self, Write as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::Launch;
use super::endpoint::Home;
use super::failure;
use super::rank::signal_name;
use super::rendezvous::{self, Order};
use tenfold_console::{FAILURE, Outcome, SUCCESS, printable};

/// Time for the other nodes to read how the job ended, when this node hosts the store.
const LAST_WORDS: Duration = Duration::from_secs(5);
impl Launch {
    /// Ends all ranks, the rendezvous and the store, and prints the report. Returns the exit code.
    pub(super) fn finish(mut self, outcome: Result<(), Box<dyn std::error::Error>>) -> Outcome {
        if let Err(error) = &outcome {
            self.tell(Order::Leave { reason: error.to_string() });
            self.kill();
            self.end_leftovers();
        }
        let Launch { outlet, logs, .. } = &mut self;
        outlet.set_status(None);
        if let Some(line) = logs.reminder() {
            outlet.note(&line);
        }
        self.drain()?;
        self.guard.end();
        let report = self.report();
        if let (Ok(()), Some(message)) = (&outcome, &report) {
            // Not `eprintln!`, which panics if the reader has closed the stream.
            let _nobody_reads = writeln!(io::stderr(), "error: {}", printable(message));
        }
        if self.hosts_others() && !self.impatient {
            let impatient = Arc::new(AtomicBool::new(false));
            for &signal in &self.plan.signals {
                signal_hook::flag::register_conditional_shutdown(signal, FAILURE.into(), impatient.clone())?;
            }
            impatient.store(true, Ordering::SeqCst); // from here on a signal ends the launcher immediately
            if let Some(rendezvous) = &self.rendezvous {
                rendezvous.settle(LAST_WORDS);
            }
        }
        drop(self.rendezvous.take());
        drop(self.dashboard.take());
        if let Some(Home { server: Some(server), store, .. }) = self.home.take() {
            drop(store);
            server.shutdown(Duration::ZERO);
        }
        outcome.map(|()| if report.is_some() { FAILURE } else { SUCCESS })
    }

    pub(super) fn hosts_others(&self) -> bool {
        self.plan.nodes.max > 1 && self.home.as_ref().is_some_and(|home| home.server.is_some())
    }

    /// What went wrong, if something did.
    fn report(&self) -> Option<String> {
        let message = match (self.leaving, &self.over) {
            (Some((signal, _)), _) => format!("ended by {}", signal_name(signal)),
            (None, None | Some(rendezvous::Outcome::Success)) => return None,
            (None, Some(rendezvous::Outcome::Closed(text))) => text.clone(),
            (None, Some(rendezvous::Outcome::Failed(failure))) => failure.text.clone(),
        };
        Some(format!("{message}{}", self.stubborn()))
    }

    /// Ranks that had to be killed.
    fn stubborn(&self) -> String {
        let ranks = self.round.iter().flat_map(|round| &round.ranks);
        let killed: Vec<usize> =
            ranks.filter(|rank| rank.killed).filter_map(|rank| Some(rank.seat?.number)).collect();
        failure::stubborn(&killed)
    }

    /// Shows what ranks left in their pipes. A launcher that was signalled twice does not wait for a reader.
    pub(super) fn drain(&mut self) -> io::Result<()> {
        loop {
            let mut all = true;
            let now = Instant::now();
            for rank in self.round.iter_mut().flat_map(|round| &mut round.ranks) {
                all &= rank.pipes.drain(now, &mut self.outlet);
            }
            if all && self.outlet.is_empty() {
                return Ok(());
            }
            let until = self.impatient.then(Instant::now);
            if self.wait(until)?.write {
                self.outlet.write();
            } else if self.impatient {
                return Ok(());
            }
            self.hear_signals();
        }
    }
}
