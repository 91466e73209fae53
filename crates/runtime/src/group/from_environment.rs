//! Joining the world that a launcher made: the variables of `tenfold run`, torchrun and PyTorch's `env://`.
//!
//! Which store the ranks meet through follows from them, too. A launcher that hosts one says so; its store outlives ranks
//! that are started again, so each round has keys of its own there. Else rank 0 hosts one as long as it lives.
//! Python's `tenfold.init` does the same: ranks of both kinds can be in one world.
//!
//! Not here: reading the variables (see `environment`).

#![expect(clippy::disallowed_methods, reason = "looks whether the others have left the store")]

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tenfold_plan::Rank;
use tenfold_store::{Deadline, PrefixStore, Server, Store, TcpStore, TcpStoreOptions};

use super::{Group, Options, Seat, connect_error};
use crate::environment;
use crate::fault::{Fault, Result, store_fault};

/// How long a rank that hosts the store waits at most for others to be done with it. They are as soon as they have met; only
/// ranks that keep the store open, as Python's do, make it wait that long.
const FAREWELL_MAX: Duration = Duration::from_secs(1);

/// Where a launcher has put this process.
///
/// ```no_run
/// let place = tenfold::Place::from_environment()?;
/// if let Some(device) = place.local_rank {
///     println!("rank {} of {} takes device {device}", place.rank, place.size);
/// }
/// # Ok::<(), tenfold::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Place {
    /// `RANK`.
    pub rank: Rank,
    /// `WORLD_SIZE`.
    pub size: usize,
    /// `LOCAL_RANK`, if it is set: the number of this process on its host, such as that of its device.
    pub local_rank: Option<Rank>,
    pub(crate) meeting: Meeting,
}

/// Where ranks meet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Meeting {
    /// `MASTER_ADDR`.
    pub host: String,
    /// `MASTER_PORT`.
    pub port: u16,
    /// How often ranks were started before through this same store, which the launcher hosts; nothing if rank 0 does.
    pub round: Option<usize>,
}

impl Place {
    /// Reads `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR` and `MASTER_PORT`.
    ///
    /// # Errors
    /// If one of them is invalid, or if one other than `LOCAL_RANK` is missing.
    pub fn from_environment() -> Result<Place> {
        place(&Options::default())
    }
}

impl Group {
    /// Joins the world that a launcher made: returns once all ranks have. The one call that a program needs under
    /// `tenfold run`, under torchrun, or wherever torchrun's variables are set for each process: `RANK`, `WORLD_SIZE`,
    /// `MASTER_ADDR` and `MASTER_PORT`.
    ///
    /// ```no_run
    /// use tenfold::{Group, Options, ReduceOp};
    ///
    /// // tenfold run -n 4 target/release/my_program
    /// let group = Group::from_environment(Options::default())?;
    /// let mut sum = [group.rank() as f32];
    /// group.all_reduce(&mut sum, ReduceOp::Sum)?;
    /// println!("rank {} of {}: {sum:?}", group.rank(), group.size());
    /// # Ok::<(), tenfold::Error>(())
    /// ```
    ///
    /// Where `TORCHELASTIC_USE_AGENT_STORE` is `True` the launcher hosts the store, and the keys of a round have the prefix
    /// `/worker/attempt_<TORCHELASTIC_RESTART_COUNT>`; else rank 0 hosts it at `MASTER_ADDR`, as with PyTorch's `env://`, as
    /// long as it lives. All of it may take as long as [`Options::timeout`] says. [`Place`] has `LOCAL_RANK`.
    ///
    /// # Errors
    /// If a variable is missing or invalid, the store cannot be reached or hosted, or a rank does not join in time.
    pub fn from_environment(options: Options) -> Result<Group> {
        let deadline = Deadline::after(options.timeout);
        let Place { rank, size, meeting, .. } = place(&options)?;
        let failed = |fault| connect_error(&options.name.as_str().into(), rank, size, deadline, fault);
        let store = meeting.open(rank, size, options.timeout).map_err(failed)?;
        // What is left of the time is for meeting the others.
        store.set_timeout(deadline.left().unwrap_or(options.timeout));
        let group = Group::connect(meeting.of_this_round(&store), Seat { rank, size }, options)?;
        if store.server().is_some() {
            keep(store);
        }
        Ok(group)
    }
}

fn place(options: &Options) -> Result<Place> {
    let now = Deadline::after(options.timeout);
    let nobody = |fault| connect_error(&options.name.as_str().into(), 0, 0, now, fault);
    environment::place().map_err(nobody)
}

impl Meeting {
    pub(crate) fn open(
        &self,
        rank: Rank,
        size: usize,
        timeout: Duration,
    ) -> std::result::Result<Arc<TcpStore>, Fault> {
        let hosts = rank == 0 && self.round.is_none();
        let options = TcpStoreOptions::new(&self.host, self.port)
            .timeout(timeout)
            .is_server(hosts)
            .multi_tenant(true) // a second group may be made while the first is there
            .world_size(size)
            .wait_workers(!hosts); // the host of the store need not count clients: the exchange of cards names missing ranks
        TcpStore::open(options).map(Arc::new).map_err(store_fault)
    }

    /// The same, of a rank that may host the store: it ends with this process.
    pub(crate) fn kept_of_this_round(&self, store: &Arc<TcpStore>) -> Arc<dyn Store> {
        if store.server().is_some() {
            let mut hosted = HOSTED.lock().unwrap_or_else(PoisonError::into_inner);
            hosted.push(Arc::clone(store));
        }
        self.of_this_round(store)
    }

    pub(crate) fn of_this_round(&self, store: &Arc<TcpStore>) -> Arc<dyn Store> {
        let store: Arc<dyn Store> = Arc::clone(store) as _;
        match self.round {
            Some(round) => Arc::new(PrefixStore::new(format!("/worker/attempt_{round}"), store)),
            None => store,
        }
    }
}

/// Stores that this process hosts. They end with it: groups may be made again through the same one.
static HOSTED: Mutex<Vec<Arc<TcpStore>>> = Mutex::new(Vec::new());

/// Keeps a store that this rank hosts, and waits until the others are done with it: after this the rank may end.
fn keep(store: Arc<TcpStore>) {
    let mut hosted = HOSTED.lock().unwrap_or_else(PoisonError::into_inner);
    let is_kept = hosted.iter().any(|other| other.port() == store.port());
    if !is_kept {
        hosted.push(Arc::clone(&store));
    }
    drop(hosted);
    let own = if is_kept { 2 } else { 1 };
    let others_read = |server: &Server| server.facts().connections > own;
    let deadline = Deadline::after(FAREWELL_MAX);
    while store.server().is_some_and(others_read) && !deadline.passed() {
        std::thread::sleep(Duration::from_millis(1));
    }
}
