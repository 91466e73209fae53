//! How a group is made.

use std::net::IpAddr;
use std::time::Duration;

use super::cards;
use super::trouble::stuck::StuckPolicy;
use crate::environment::TransportChoice;
use crate::recovery::{Limits, Quorum};

/// c10d's default.
const TIMEOUT: Duration = Duration::from_secs(30 * 60);

/// Long enough for a process that is stopped for a moment, short enough for a job that is stuck for good.
pub(super) const HEARTBEAT: Duration = Duration::from_secs(15);

/// How a group is made.
///
/// ```
/// use std::time::Duration;
/// use tenfold::{Group, Options};
///
/// let options = Options::new("evaluation").timeout(Duration::from_secs(60)).deterministic();
/// Group::threads_with(2, &options, |group| group.barrier())?;
/// # Ok::<(), tenfold::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Options {
    pub(super) name: String,
    pub(super) timeout: Duration,
    pub(super) heartbeat: Option<Duration>,
    pub(super) deterministic: bool,
    pub(super) transport: Option<TransportChoice>,
    pub(super) interfaces: Vec<IpAddr>,
    pub(super) in_place: bool,
    pub(super) stuck_after: Option<Duration>,
    pub(super) on_stuck: Option<StuckPolicy>,
    pub(super) quorum: Quorum,
    pub(super) patience: Option<Duration>,
    pub(super) algorithms: Vec<(String, String)>,
    /// A larger group looks up its ranks when they are needed; see `cards`.
    pub(super) contacts_max: usize,
}

impl Default for Options {
    fn default() -> Self {
        Options::new("default")
    }
}

impl Options {
    /// A name that all ranks give to this group; groups made through one store at the same time need different ones.
    pub fn new(name: impl Into<String>) -> Self {
        Options {
            name: name.into(),
            timeout: TIMEOUT,
            heartbeat: None,
            deterministic: false,
            transport: None,
            interfaces: Vec::new(),
            in_place: false,
            stuck_after: None,
            on_stuck: None,
            quorum: Quorum::default(),
            patience: None,
            algorithms: Vec::new(),
            contacts_max: cards::FULL_MAX,
        }
    }

    /// How long an operation may take, unless it says otherwise. 30 minutes by default, as c10d's.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// How long a rank may show no sign of life before it is given up. 15 seconds by default, or `TENFOLD_HEARTBEAT`. A rank
    /// that computes for long is alive; one that is stopped, frozen or cut off is not.
    #[must_use]
    pub fn heartbeat(mut self, limit: Duration) -> Self {
        self.heartbeat = Some(limit);
        self
    }

    /// How long a rank that lives may keep others waiting in a collective before they report which rank it is; zero means
    /// that they never do. 30 seconds by default, or `TENFOLD_STUCK_AFTER`. Counts, like `heartbeat`, for all groups of a rank
    /// that are made from this one.
    #[must_use]
    pub fn stuck_after(mut self, time: Duration) -> Self {
        self.stuck_after = Some(time);
        self
    }

    /// What they do then. They warn by default, or do as `TENFOLD_STUCK_POLICY` says.
    #[must_use]
    pub fn on_stuck(mut self, policy: StuckPolicy) -> Self {
        self.on_stuck = Some(policy);
        self
    }

    /// Reductions give the same bits whatever the size of the tensor, the algorithm or the transport: every element is
    /// combined once, in the order of ranks. Without it they are the same on all ranks and from run to run, but may
    /// differ between, say, one tensor and the same tensor in two halves. Costs speed across hosts.
    #[must_use]
    pub fn deterministic(mut self) -> Self {
        self.deterministic = true;
        self
    }

    /// TCP even between ranks of one host; for tests and measurements. `TENFOLD_TRANSPORT=tcp` does the same.
    #[must_use]
    pub fn only_tcp(mut self) -> Self {
        self.transport = Some(TransportChoice::Tcp);
        self
    }

    /// Shared memory or an error; `TENFOLD_TRANSPORT=shm` does the same.
    #[must_use]
    pub fn only_shared_memory(mut self) -> Self {
        self.transport = Some(TransportChoice::SharedMemory);
        self
    }

    /// The address by which other hosts reach this rank. By default the one that routes to the store.
    #[must_use]
    pub fn interface(self, address: IpAddr) -> Self {
        self.interfaces([address])
    }

    /// Addresses of several interfaces, which share out the messages between hosts; `TENFOLD_INTERFACE=eth0,eth1` does the
    /// same. The first one of this host talks to the first one of another, and so on, up to eight of them. Beyond the number
    /// that the other host has, they are not used.
    #[must_use]
    pub fn interfaces(mut self, addresses: impl IntoIterator<Item = IpAddr>) -> Self {
        self.interfaces = addresses.into_iter().collect();
        self
    }

    /// Ranks of one host read each other's shared memory in place even on processors where copies are quicker; for tests
    /// and measurements. Groups made from this one do the same.
    #[must_use]
    pub fn read_in_place(mut self) -> Self {
        self.in_place = true;
        self
    }

    /// How many ranks must live for [`Group::shrink`](crate::Group::shrink) and [`Group::agree`](crate::Group::agree). The same
    /// on all ranks.
    #[must_use]
    pub fn quorum(mut self, quorum: Quorum) -> Self {
        self.quorum = quorum;
        self
    }

    /// After how long [`Group::shrink`](crate::Group::shrink) and [`Group::agree`](crate::Group::agree) leave out a rank that is
    /// alive but does not call them. Half of the timeout by default.
    #[must_use]
    pub fn patience(mut self, time: Duration) -> Self {
        self.patience = Some(time);
        self
    }

    pub(crate) fn timeout_of_calls(&self) -> Duration {
        self.timeout
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// When survivors give up on ranks that are alive.
    pub(super) fn limits(&self) -> Limits {
        let patience = self.patience.unwrap_or(self.timeout / 2);
        let grace = 2 * self.heartbeat.unwrap_or(HEARTBEAT);
        Limits { quorum: self.quorum, patience, grace }
    }

    /// Insists on an algorithm where it can be used, such as `("all_reduce", "ring")`; `TENFOLD_ALGORITHM` does the same.
    #[must_use]
    pub fn algorithm(mut self, operation: &str, name: &str) -> Self {
        self.algorithms.push((operation.to_string(), name.to_string()));
        self
    }
}
