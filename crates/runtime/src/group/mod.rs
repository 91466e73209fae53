//! A group of ranks, and every operation of c10d on it.
//!
//! Each operation is checked here, on the caller's thread, turned into a [`Request`] and submitted; what it does is decided
//! by a plan (see `planner`), how it is done by the engine. Invalid calls are refused before anything is sent.

mod cards;
mod coalesced;
mod collectives;
pub(crate) mod connect;
mod cores;
pub(crate) mod directory;
pub(crate) mod from_environment;
mod hand_over;
#[cfg(test)]
mod hostile;
#[cfg(test)]
mod joining;
mod messages;
mod options;
mod planner;
mod point_to_point;
mod reconfigure;
mod scope;
#[cfg(test)]
mod scripted;
mod slices;
mod sparse;
pub(crate) mod state;
mod subgroup;
mod submit;
pub(crate) mod survivors;
pub(crate) mod trouble;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use tenfold_memory::{Buffer, DType, Region};
use tenfold_plan::{Algorithm, Rank, Topology};
use tenfold_store::{Deadline, HashStore, Store};

use crate::engine::GroupIndex;
use crate::environment::Environment;
use crate::fabric::{FabricHandle, Registration, is_local};
use crate::fault::{Error, Fault, Result, Scene, show_ranks};
use crate::label::{Label, OpKind};
use crate::recorder::{self, GroupRecord, Newcomer};
use crate::transport::mesh::{Member, Mesh};
use connect::Met;
use cores::Crowd;
pub use from_environment::Place;
pub use options::Options;
use planner::Planner;
use state::GroupState;

pub use scope::{Pending, Scope};
pub use sparse::SparseTensor;
pub use trouble::find_nan;
pub use trouble::stuck::{StuckPolicy, StuckReport};

/// Which rank of a group a process is, and how many ranks the group has. See [`Group::connect`] for an example.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Seat {
    /// Counted from 0.
    pub rank: Rank,
    /// How many ranks there are.
    pub size: usize,
}

/// Ranks that communicate. Cheap to clone; the group is left when the last clone is dropped.
///
/// # Threads and forks
/// Threads may share a group and call it at the same time. All ranks must call collectives in the same order, so threads that
/// call collectives of one group must agree on an order, or each use a group of its own. A forked child must not use its
/// parent's group: every call returns an error there.
///
/// ```
/// use tenfold::{Group, ReduceOp};
///
/// let ranks = Group::threads(4, |group| {
///     let mut values = [group.rank() as f32; 3];
///     group.all_reduce(&mut values, ReduceOp::Sum)?;
///     Ok(values)
/// })?;
/// assert_eq!(ranks, [[6.0; 3]; 4]);
/// # Ok::<(), tenfold::Error>(())
/// ```
#[derive(Clone)]
pub struct Group {
    inner: Arc<Inner>,
    /// Of the calls through this handle; nothing means the group's.
    timeout: Option<Duration>,
    background: bool,
}

pub(crate) struct Inner {
    fabric: FabricHandle,
    index: GroupIndex,
    id: u64,
    name: Arc<str>,
    rank: Rank,
    topology: Topology,
    options: Options,
    record: Arc<GroupRecord>,
    /// Groups made from this one.
    children: AtomicU64,
    /// Are inputs with a NaN in them refused? See `nan`.
    checks_numbers: bool,
    /// The worker server that the environment asked for lives as long as there is a group.
    control: crate::control::Lease,
    directory: Option<Arc<directory::Directory>>,
    crowd: Crowd,
}

impl Group {
    /// Joins the group: returns once all ranks have.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use tenfold::{Group, Options, Seat, store::HashStore};
    ///
    /// let store = Arc::new(HashStore::new()); // between processes: a `TcpStore`
    /// let group = Group::connect(store, Seat { rank: 0, size: 1 }, Options::default())?;
    /// assert_eq!((group.rank(), group.size()), (0, 1));
    /// # Ok::<(), tenfold::Error>(())
    /// ```
    ///
    /// # Errors
    /// If a rank does not join in time (it is named), or the store fails.
    pub fn connect(store: Arc<dyn Store>, seat: Seat, options: Options) -> Result<Group> {
        let Seat { rank, size } = seat;
        let deadline = Deadline::after(options.timeout);
        let name: Arc<str> = options.name.as_str().into();
        let joined = || {
            if size == 0 || rank >= size || u32::try_from(size).is_err() {
                let message = format!("rank {rank} of {size} makes no sense: ranks are counted from 0");
                return Err(Fault::argument(message));
            }
            let forced = forced_algorithms(&options)?;
            let settings = planner::settings(options.deterministic, options.quorum, &forced);
            Ok((connect::meet(&store, rank, size, &options, &settings)?, forced))
        };
        match joined() {
            Ok((met, forced)) => Ok(Group::from_met(met, name, rank, options.clone(), forced, None)),
            Err(fault) => Err(connect_error(&name, rank, size, deadline, fault)),
        }
    }

    /// Runs `body` on `size` threads, each a rank of one group, and returns what each returned. For tests, examples, and
    /// programs whose ranks are threads.
    ///
    /// # Errors
    /// The first error of a rank.
    ///
    /// # Panics
    /// If a rank panics.
    pub fn threads<R: Send>(size: usize, body: impl Fn(Group) -> Result<R> + Sync) -> Result<Vec<R>> {
        Self::threads_with(size, &Options::default(), body)
    }

    /// As [`Group::threads`], with options.
    ///
    /// # Errors
    /// The first error of a rank.
    ///
    /// # Panics
    /// If a rank panics.
    pub fn threads_with<R: Send>(
        size: usize,
        options: &Options,
        body: impl Fn(Group) -> Result<R> + Sync,
    ) -> Result<Vec<R>> {
        let store: Arc<dyn Store> = Arc::new(HashStore::new());
        std::thread::scope(|scope| {
            let start = |rank| {
                let (store, options, body) = (Arc::clone(&store), options.clone(), &body);
                scope.spawn(move || body(Group::connect(store, Seat { rank, size }, options)?))
            };
            let ranks: Vec<_> = (0..size).map(start).collect();
            ranks
                .into_iter()
                .map(|rank| rank.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
                .collect()
        })
    }

    /// A group with peers that were never met, for tests of what they may send.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn with_unmet(
        fabric: FabricHandle,
        id: u64,
        peers: &[Arc<crate::fabric::Peer>],
    ) -> std::result::Result<Group, Fault> {
        let members: Vec<Member> = std::iter::once(None)
            .chain(peers.iter().cloned().map(Some))
            .map(|peer| Member { near: peer.is_none(), peer, room: 0 })
            .collect();
        let size = members.len();
        let room = connect::new_room(&fabric, size, id)?;
        let control = crate::control::start_if_asked(None, 0)?;
        let topology = Topology::new((0..size).collect());
        let met = Met {
            fabric,
            id,
            room,
            members,
            directory: None,
            topology,
            control,
            confirms_roots: false,
            crowd: Crowd { is_crowded: false, kernels: vec![0; size].into() },
        };
        Ok(Group::from_met(met, "unmet".into(), 0, Options::default(), Vec::new(), None))
    }

    fn from_met(
        met: Met,
        name: Arc<str>,
        rank: Rank,
        options: Options,
        forced: Vec<&'static Algorithm>,
        global_ranks: Option<Arc<[Rank]>>,
    ) -> Group {
        let Met { fabric, id, room, members, directory, topology, control, confirms_roots, crowd } = met;
        let record = recorder::join(Newcomer {
            name: &name,
            rank,
            size: members.len(),
            global_ranks,
            fabric: fabric.id(),
            among_threads: members.iter().flat_map(|member| &member.peer).any(|peer| is_local(peer.id())),
        });
        tracing::info!("made group `{name}`: rank {rank} of {}, {}", members.len(), ways(&members, rank));
        fabric.open_council(id, rank, &members, options.limits());
        let mesh = Mesh::new(rank, id, Arc::clone(&fabric), room, members).with_directory(directory.clone());
        let planner = Planner::new(topology.clone(), rank, forced, confirms_roots).on_kernels(&crowd.kernels);
        let state = GroupState::new(id, Arc::clone(&name), rank, mesh, planner, Arc::clone(&record));
        let index = fabric.engine.add(state, crowd.is_crowded);
        let children = AtomicU64::new(0);
        let checks_numbers = crate::environment::nan_check().unwrap_or(false); // refused when ranks met
        let inner = Inner {
            fabric,
            index,
            id,
            name,
            rank,
            topology,
            options,
            record,
            children,
            checks_numbers,
            control,
            directory,
            crowd,
        };
        Group { inner: Arc::new(inner), timeout: None, background: false }
    }

    /// The number of this rank, counted from 0.
    pub fn rank(&self) -> Rank {
        self.inner.rank
    }

    #[cfg(test)]
    pub(crate) fn fabric(&self) -> &FabricHandle {
        &self.inner.fabric
    }

    /// How many ranks there are.
    pub fn size(&self) -> usize {
        self.inner.topology.size()
    }

    /// The name that all ranks gave to the group.
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// Which ranks share a host.
    pub fn topology(&self) -> &Topology {
        &self.inner.topology
    }

    /// The same group, for calls that may take `timeout`.
    #[must_use]
    pub fn with_timeout(&self, timeout: Duration) -> Group {
        Group { timeout: Some(timeout), ..self.clone() }
    }

    /// The same group, for calls that go on in the background: the caller has other things to do before it waits.
    ///
    /// Without this, the waiting thread drives the call, and the helper thread takes over later if no thread waits. That is
    /// quickest if the caller waits immediately.
    #[must_use]
    pub fn background(&self) -> Group {
        Group { background: true, ..self.clone() }
    }

    /// Zeroes in this rank's shared memory, which peers on this host read in place: collectives on such a tensor copy
    /// nothing.
    ///
    /// # Errors
    /// If there is not enough memory.
    pub fn shared_buffer(&self, dtype: DType, elements: usize) -> Result<Buffer> {
        let bytes = elements.checked_mul(dtype.size());
        let block = bytes
            .ok_or_else(|| {
                Fault::argument(format!("{elements} elements of {dtype} do not fit the address space"))
            })
            .and_then(|bytes| {
                let allocated = self.inner.fabric.segment().allocate(bytes);
                allocated.map_err(|error| Fault::io("no shared memory for a tensor", error))
            });
        match block {
            Ok(block) => Ok(Buffer::shared(block, dtype, elements)),
            Err(fault) => Err(self.error(Label::new(OpKind::Coalesced, 0), fault)),
        }
    }

    /// Lets peers on this host read tensors in `region` in place, as they do tensors of [`Group::shared_buffer`]: memory
    /// that another library shares, such as PyTorch. The region is known to all groups made from the same one as this
    /// group, until the registration is dropped. Ranks need not register alike, and those elsewhere see no difference.
    ///
    /// Returns once every rank on this host that is alive has mapped the memory: it waits for no more than their helper
    /// threads. On processors where copies are quicker it does nothing.
    ///
    /// ```
    /// use tenfold::{DType, Group, ReduceOp, Buffer};
    ///
    /// Group::threads(2, |group| {
    ///     let (mut tensor, region) = Buffer::in_file(DType::F32, 1000).expect("there is memory");
    ///     let registration = group.register(&region)?;
    ///     tensor.as_mut_slice::<f32>().fill(1.0);
    ///     group.start_all_reduce(tensor.lend(), ReduceOp::Sum)?.wait()?;
    ///     assert_eq!(tensor.as_slice::<f32>()[999], 2.0);
    ///     drop(registration);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), tenfold::Error>(())
    /// ```
    ///
    /// # Errors
    /// If the memory is registered already, too much is, or a rank on this host cannot map it or does not answer within
    /// the group's timeout, at most ten seconds. Nothing is lent from there then, and the group goes on.
    pub fn register(&self, region: &Arc<Region>) -> Result<Registration> {
        let fabric = &self.inner.fabric;
        let limit = self.timeout.unwrap_or(self.inner.options.timeout);
        let registered = fabric.check_process().and_then(|()| fabric.register(region, limit));
        registered.map_err(|fault| self.error(Label::new(OpKind::Register, 0), fault))
    }

    /// Gives the group up, on all ranks: whatever is under way fails with `reason`, and so does every later call.
    pub fn abort(&self, reason: &str) {
        let fabric = &self.inner.fabric;
        if fabric.check_process().is_err() {
            return; // the group is the parent's, which goes on with it
        }
        fabric.engine.fail(fabric, self.inner.index, self.given_up("aborted", reason));
        fabric.wait_until_told();
        recorder::wait_until_dumped();
    }

    fn given_up(&self, how: &str, reason: &str) -> Fault {
        let fabric = &self.inner.fabric;
        let (rank, host, pid) = (self.rank(), fabric.host(), fabric.pid());
        let message = format!("rank {rank} (host {host}, pid {pid}) {how} the group: {reason}");
        Fault::new(crate::ErrorKind::Aborted, message).peer(rank)
    }

    /// Says what the group is for, and which rank of the whole job each member is, in dumps of the [`recorder`](crate::recorder).
    /// A group that was made from another knows the ranks already.
    ///
    /// # Errors
    /// If there are not as many ranks as members.
    pub fn describe(&self, description: Option<&str>, global_ranks: Option<&[Rank]>) -> Result<()> {
        if let Some(ranks) = global_ranks
            && ranks.len() != self.size()
        {
            let message = format!("there are {} global ranks for {} members", ranks.len(), self.size());
            return Err(self.error(Label::new(OpKind::Connect, 0), Fault::argument(message)));
        }
        self.inner.record.describe(description, global_ranks);
        Ok(())
    }

    pub(crate) fn record(&self) -> &Arc<GroupRecord> {
        &self.inner.record
    }

    /// Why the group can no longer be used, if so.
    pub fn failure(&self) -> Option<Error> {
        let fabric = &self.inner.fabric;
        let fault = match fabric.check_process() {
            Ok(()) => fabric.engine.with(|state| state.group(self.inner.index).failed().cloned())?,
            Err(forked) => forked,
        };
        Some(self.error(Label::new(OpKind::Coalesced, 0), fault))
    }

    /// How many operations of this group have been called on this rank. None in a forked child, which can call none.
    pub fn sequence_number(&self) -> u64 {
        if self.inner.fabric.check_process().is_err() {
            return 0; // the engine may be locked by a thread that was not forked along
        }
        self.inner.fabric.engine.with(|state| state.group(self.inner.index).sequence_number())
    }

    #[cold]
    pub(crate) fn ddp_error(&self, fault: Fault) -> Error {
        self.error(Label::new(OpKind::Ddp, 0), fault)
    }

    /// An error of what continues after failures, `elapsed` after it began.
    #[cold]
    pub(crate) fn recovery_error(&self, elapsed: Duration, fault: Fault) -> Error {
        let timeout = Some(self.timeout_of_calls());
        let scene = self.scene(Label::new(OpKind::Reconfigure, 0));
        Error::new(Scene { elapsed, timeout, progress: Some(String::new()), ..scene }, fault)
    }

    pub(crate) fn timeout_of_calls(&self) -> Duration {
        self.timeout.unwrap_or(self.inner.options.timeout)
    }

    /// The number of this process and the name of its host.
    pub(crate) fn process(&self) -> (u32, String) {
        (self.inner.fabric.pid(), self.inner.fabric.host().to_string())
    }

    fn deadline(&self) -> Deadline {
        Deadline::after(self.timeout_of_calls())
    }

    #[cold]
    fn error(&self, label: Label, fault: Fault) -> Error {
        Error::new(self.scene(label), fault)
    }

    /// The same for an operation that has blocked.
    #[cold]
    fn error_after(&self, label: Label, deadline: &Deadline, fault: Fault) -> Error {
        let (elapsed, timeout) = (deadline.elapsed(), deadline.limit());
        let progress = Some(String::new());
        Error::new(Scene { elapsed, timeout, progress, ..self.scene(label) }, fault)
    }

    fn scene(&self, label: Label) -> Scene {
        Scene {
            label,
            group: Arc::clone(&self.inner.name),
            rank: self.rank(),
            size: self.size(),
            elapsed: Duration::ZERO,
            timeout: None,
            progress: None,
            detail: None,
        }
    }
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Group(`{}`, rank {} of {})", self.name(), self.rank(), self.size())
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.fabric.check_process().is_err() {
            return; // a forked child has nothing to say goodbye to
        }
        let fabric = &self.fabric;
        self.record.leave();
        let closed = Fault::new(crate::ErrorKind::Closed, "the group was dropped while this was under way");
        let Some(mut state) = fabric.engine.remove(self.index) else { return };
        state.say_goodbye(fabric);
        let (name, calls) = (&self.name, state.sequence_number());
        let had_failed = state.failed().is_some();
        let end = if had_failed { ", which had failed" } else { "" };
        let mut finished = Vec::new();
        state.close(closed, &mut finished);
        fabric.engine.wake_sleepers();
        fabric.bury(state.into_remains(had_failed));
        fabric.forget_group(self.id);
        fabric.retire_council(self.id);
        finished.into_iter().for_each(|work: Arc<crate::work::Shared>| work.tell());
        recorder::wait_until_dumped(); // a process that ends now has left its dump
        tracing::info!("left group `{name}`{end}; operations called: {calls}");
    }
}

/// As in `ranks 1, 2 by shared memory, ranks 3, 4 by TCP`.
fn ways(members: &[Member], rank: Rank) -> String {
    let those = |near: bool| -> Vec<Rank> {
        let others = members.iter().enumerate().filter(|(other, _)| *other != rank);
        others.filter(|(_, member)| member.near == near).map(|(other, _)| other).collect()
    };
    let ways = [(those(true), "shared memory"), (those(false), "TCP")];
    let ways = ways.iter().filter(|(ranks, _)| !ranks.is_empty());
    let texts: Vec<String> = ways.map(|(ranks, way)| format!("{} by {way}", show_ranks(ranks))).collect();
    if texts.is_empty() { "alone".to_string() } else { texts.join(", ") }
}

fn forced_algorithms(options: &Options) -> std::result::Result<Vec<&'static Algorithm>, Fault> {
    let mut pairs = options.algorithms.clone();
    pairs.extend(Environment::read()?.algorithms);
    planner::look_up(&pairs)
}

#[cold]
pub(crate) fn connect_error(
    name: &Arc<str>,
    rank: Rank,
    size: usize,
    deadline: Deadline,
    fault: Fault,
) -> Error {
    let scene = Scene {
        label: Label::new(OpKind::Connect, 0),
        group: Arc::clone(name),
        rank,
        size,
        elapsed: deadline.elapsed(),
        timeout: deadline.limit(),
        progress: None,
        detail: None,
    };
    Error::new(scene, fault)
}

/// Cores that this process may use: its affinity, and what its container's quota leaves.
pub(crate) fn usable_cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}
