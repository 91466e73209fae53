//! What a rank owns once, whatever groups it is in (see `pool`): its segment, its bell, its listening sockets, its peers, its engine, and
//! one helper thread (see `watch`).
//!
//! Two ranks of one host meet over an abstract Unix socket: whether that can be connected *is* what being on one host means
//! here, and it carries the descriptors with which they map each other's segment and ring each other's bell. The
//! stream stays open for as long as both live: its end is the news of a death. Ranks of different hosts have a TCP stream
//! for the same purpose, on which they also show that they are alive.
//!
//! Ranks that are threads of one process find each other in a table instead, and need no socket at all.

mod beats;
pub(crate) mod councils;
mod early;
mod peer;
mod pool;
mod progress;
mod regions;
mod reshapes;
mod silence;
mod watch;

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::EventfdFlags;
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec};
use tenfold_memory::{ForkGuard, NotInherited, Segment, prefers_streaming};

pub(crate) use peer::{Fate, Peer, Whereabouts};
pub(crate) use progress::GroupProgress;
pub use progress::ProgressEntry;
pub use regions::Registration;
#[cfg(feature = "fuzzing")]
pub(crate) use watch::hostile;

use crate::engine::Engine;
use crate::fault::Fault;
use crate::group::trouble::stuck::StuckSettings;
use crate::transport::line::{Adopted, News, SharedLine, Standing, Surroundings};
use crate::transport::mesh::Remains;
use crate::wire::{ControlFrame, FabricId};

/// Largest segment: addresses, not memory. Rooms, slots and shared tensors of all groups of a rank must fit.
const SEGMENT_MAX: usize = 64 << 30;

/// Lines to peers, of which some may be in no group of this process.
const LINES_MAX: usize = 1 << 16;

/// Lines that peers opened and that no group has asked for yet.
const UNCLAIMED_MAX: usize = 4096;

/// How long such a line is kept: making a group takes far less from the first rank to the last, or fails.
const UNCLAIMED_FOR: Duration = Duration::from_secs(120);

/// Processes that have said hello and that no group of this rank knows.
const UNMET_MAX: usize = 4096;

/// Wakes the threads that sleep on a fabric. Peers on this host have a copy of the descriptor.
#[derive(Clone, Debug)]
pub(crate) struct Bell(Arc<OwnedFd>);

impl Bell {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Bell(Arc::new(rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)))
    }

    fn from_descriptor(descriptor: OwnedFd) -> Self {
        Bell(Arc::new(descriptor))
    }

    pub(crate) fn ring(&self) {
        // It can fail only if it has been rung 2⁶⁴ times, or if the peer sent something that is not a bell.
        let _ = rustix::io::write(&*self.0, &1_u64.to_ne_bytes());
    }

    pub(crate) fn silence(&self) {
        let _ = rustix::io::read(&*self.0, &mut [0_u8; 8]); // empty if it was not rung
    }
}

impl AsFd for Bell {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// How a fabric is made.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct FabricOptions {
    /// The address on which other hosts reach this rank.
    pub interface: Option<IpAddr>,
    /// Addresses of further interfaces, which carry their share of the messages.
    pub rails: Vec<IpAddr>,
    /// Ports to listen on; nothing leaves it to the system.
    pub ports: Option<std::ops::RangeInclusive<u16>>,
    /// How long a peer may show no sign of life.
    pub heartbeat: Duration,
    /// Peers on this host read shared memory in place even where copies are quicker.
    pub in_place: bool,
    /// After how long a rank that has not entered a collective is reported as stuck, and what happens then.
    pub stuck: StuckSettings,
    /// Where the launcher wants to read how far this rank is.
    pub progress: Option<PathBuf>,
}

#[cfg(any(test, feature = "fuzzing"))]
impl FabricOptions {
    /// On this host, and as patient as tests on a busy machine need.
    pub(crate) fn for_tests() -> Self {
        FabricOptions {
            interface: None,
            rails: Vec::new(),
            ports: None,
            heartbeat: Duration::from_secs(60),
            in_place: false,
            stuck: StuckSettings::default(),
            progress: None,
        }
    }
}

pub(crate) struct Fabric {
    id: FabricId,
    pid: u32,
    fork_guard: ForkGuard,
    host: String,
    segment: Arc<Segment>,
    pub(crate) bell: Bell,
    pub(crate) engine: Engine,
    options: FabricOptions,
    socket_name: String,
    address: Option<SocketAddr>,
    /// The same on further interfaces.
    rails: Vec<SocketAddr>,
    peers: Mutex<HashMap<FabricId, Arc<Peer>>>,
    /// Groups that this fabric has or had.
    groups: Mutex<pool::Groups>,
    /// Connections with processes on other hosts, for the messages of all groups, by process and rail.
    lines: Mutex<HashMap<(FabricId, u8), SharedLine>>,
    /// A message came for a group while another was polled.
    news: News,
    /// Notices about groups that this rank does not have.
    early: Mutex<early::Early>,
    /// Of groups that this rank left: messages that peers have not read yet.
    remains: Mutex<Vec<Remains>>,
    /// The agreements of its groups.
    councils: councils::Councils,
    /// Attempts to become another group.
    reshapes: reshapes::Reshapes,
    orders: Mutex<Vec<Order>>,
    /// Wakes the helper thread.
    waker: Bell,
    helper: Mutex<Option<JoinHandle<()>>>,
    /// Is the helper to drive what no thread waits for: one of the words below.
    call: AtomicU8,
    /// Wakes the helper thread a little later.
    alarm: OwnedFd,
    /// For which call the alarm is set, until the helper has heard it.
    alarm_is_set: AtomicU8,
    /// Notices that were sent, one for each peer.
    #[cfg(test)]
    pub(crate) notices_sent: std::sync::atomic::AtomicUsize,
}

/// When the helper is to drive what no thread waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum When {
    /// The caller most likely waits for it within this time.
    Later,
    /// Waking a thread that is then in the way costs more than most operations take.
    Soon,
    Now,
}

/// The helper is not needed; it will look when the alarm goes off, later or sooner; it was woken.
const NOT_CALLED: u8 = 0;
const CALLED_LATER: u8 = 1;
const CALLED_SOON: u8 = 2;
const CALLED: u8 = 3;

const CALL_LATER: Duration = Duration::from_millis(2);
const CALL_SOON: Duration = Duration::from_micros(200);

/// What the helper thread is asked to do.
#[derive(Debug)]
pub(crate) enum Order {
    Dial(Arc<Peer>),
    /// Tells peers something about a group.
    Tell {
        to: Vec<Arc<Peer>>,
        group: u64,
        text: Vec<u8>,
    },
    /// A thread of this process told us something about a group.
    Told {
        from: FabricId,
        group: u64,
        text: Vec<u8>,
    },
    /// Sends frames to peers, and opens streams to those that there is none to.
    Send(councils::Post),
    /// A thread of this process sent this.
    Hear {
        from: FabricId,
        frame: ControlFrame,
    },
    /// A council or a reconfiguration has something to do.
    Deliberate,
    /// Makes a region known to peers.
    Announce(regions::Announcement),
    /// Nothing points into the region at this offset any more.
    Retire {
        offset: usize,
    },
    /// Says when everything before it is done.
    Answer(std::sync::mpsc::Sender<()>),
    Stop,
}

/// Fabrics of this process, so that ranks that are its threads find each other.
static LOCAL: LazyLock<Mutex<HashMap<u128, Weak<Fabric>>>> = LazyLock::new(Mutex::default);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Is this the fabric of a rank that is a thread of this process?
pub(crate) fn is_local(id: FabricId) -> bool {
    lock(&LOCAL).contains_key(&id.0)
}

impl Fabric {
    pub(crate) fn new(options: FabricOptions) -> Result<Arc<Self>, Fault> {
        let (fabric, unix, tcp) = Fabric::without_helper(FabricId(random()?), options)?;
        fabric.start(unix, tcp)?;
        Ok(fabric)
    }

    /// With the sockets on which its helper thread is to listen.
    fn without_helper(
        id: FabricId,
        options: FabricOptions,
    ) -> Result<(Arc<Self>, UnixListener, Vec<TcpListener>), Fault> {
        let system = |what: &'static str| {
            move |error: io::Error| {
                let message = format!("{what}: {}", crate::network::explain(&error));
                Fault::new(crate::ErrorKind::Io, message)
            }
        };
        crate::network::raise_file_limit();
        let pid = std::process::id();
        let fork_guard = ForkGuard::new().map_err(system("cannot map a page"))?;
        let segment = new_segment().map_err(system("cannot make shared memory"))?;
        let bell = Bell::new().map_err(system("cannot make an eventfd"))?;
        let waker = Bell::new().map_err(system("cannot make an eventfd"))?;
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let alarm = rustix::time::timerfd_create(TimerfdClockId::Monotonic, flags)
            .map_err(|error| Fault::io("cannot make a timer", error.into()))?;
        // Every user can list the names of sockets. The id is what lets a caller in on TCP, so it must not be in the name.
        let door: u128 = random()?;
        let socket_name = format!("tenfold/{pid}/{door:032x}");
        let name = std::os::unix::net::SocketAddr::from_abstract_name(&socket_name)
            .map_err(system("cannot name a Unix socket"))?;
        let unix = UnixListener::bind_addr(&name).map_err(system("cannot listen on a Unix socket"))?;
        let interface = options.interface.unwrap_or(IpAddr::from([127, 0, 0, 1]));
        let listen = |interface: &IpAddr| crate::network::listen(*interface, options.ports.as_ref());
        let tcp: io::Result<Vec<TcpListener>> =
            std::iter::once(&interface).chain(&options.rails).map(listen).collect();
        let tcp = tcp.map_err(system("cannot listen for other hosts"))?;
        let address = tcp[0].local_addr().ok();
        let rails: io::Result<Vec<SocketAddr>> = tcp[1..].iter().map(TcpListener::local_addr).collect();
        let rails = rails.map_err(system("cannot find out where it listens"))?;
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let fabric = Arc::new(Fabric {
            id,
            pid,
            fork_guard,
            host,
            segment,
            bell,
            engine: Engine::new(),
            options,
            socket_name,
            address,
            rails,
            peers: Mutex::default(),
            groups: Mutex::default(),
            lines: Mutex::default(),
            news: News::default(),
            early: Mutex::default(),
            remains: Mutex::default(),
            councils: councils::Councils::default(),
            reshapes: reshapes::Reshapes::default(),
            orders: Mutex::default(),
            waker,
            helper: Mutex::default(),
            call: AtomicU8::new(NOT_CALLED),
            alarm,
            alarm_is_set: AtomicU8::new(NOT_CALLED),
            #[cfg(test)]
            notices_sent: 0.into(),
        });
        lock(&LOCAL).insert(id.0, Arc::downgrade(&fabric));
        Ok((fabric, unix, tcp))
    }

    fn start(self: &Arc<Self>, unix: UnixListener, tcp: Vec<TcpListener>) -> Result<(), Fault> {
        let helper = watch::start(Arc::clone(self), unix, tcp)
            .map_err(|error| Fault::io("cannot start the helper thread", error))?;
        *lock(&self.helper) = Some(helper);
        Ok(())
    }

    pub(crate) fn id(&self) -> FabricId {
        self.id
    }

    pub(crate) fn pid(&self) -> u32 {
        self.pid
    }

    pub(crate) fn host(&self) -> &str {
        &self.host
    }

    pub(crate) fn socket_name(&self) -> &str {
        &self.socket_name
    }

    /// Where other hosts reach this rank.
    pub(crate) fn address(&self) -> Option<SocketAddr> {
        self.address
    }

    /// The same on further interfaces.
    pub(crate) fn rails(&self) -> &[SocketAddr] {
        &self.rails
    }

    pub(crate) fn stuck(&self) -> &StuckSettings {
        &self.options.stuck
    }

    pub(crate) fn interface(&self) -> Option<IpAddr> {
        self.options.interface
    }

    /// From which address a line on this rail is opened.
    pub(crate) fn interface_of(&self, rail: u8) -> Option<IpAddr> {
        match usize::from(rail) {
            0 => self.options.interface,
            rail => self.options.rails.get(rail - 1).copied(),
        }
    }

    pub(crate) fn segment(&self) -> &Arc<Segment> {
        &self.segment
    }

    /// Do peers on this host read shared memory in place? Not where that is slower; see [`prefers_streaming`].
    pub(crate) fn lends(&self) -> bool {
        self.options.in_place || !prefers_streaming()
    }

    /// Is this still the process that made it? A forked child has the memory, but neither the threads nor the name.
    #[inline]
    pub(crate) fn check_process(&self) -> Result<(), Fault> {
        if self.fork_guard.is_same_process() { Ok(()) } else { Err(self.forked()) }
    }

    #[cold]
    fn forked(&self) -> Fault {
        let now = std::process::id();
        let message =
            format!("the group belongs to pid {}, and this is its forked child, pid {now}", self.pid);
        let hint = "connect a group of its own in the child, or start processes with spawn or exec";
        Fault::new(crate::ErrorKind::Closed, message).hint(hint)
    }

    /// The peer with this id, whether or not it is known yet.
    pub(crate) fn peer(&self, id: FabricId) -> Arc<Peer> {
        let mut peers = lock(&self.peers);
        Arc::clone(peers.entry(id).or_insert_with(|| Arc::new(Peer::new(id))))
    }

    /// The peer that says hello as `id`. Nothing if too many peers have said hello that are in no group; those that have ended
    /// are forgotten first.
    fn visitor(&self, id: FabricId) -> Option<Arc<Peer>> {
        let mut peers = lock(&self.peers);
        if peers.len() >= UNMET_MAX && !peers.contains_key(&id) {
            peers.retain(|_, peer| peer.is_introduced() || peer.fate().is_none());
            if peers.values().filter(|peer| !peer.is_introduced()).count() >= UNMET_MAX {
                return None;
            }
        }
        Some(Arc::clone(peers.entry(id).or_insert_with(|| Arc::new(Peer::new(id)))))
    }

    /// The peer with this id as if nothing had been tried: what became of an attempt to share memory with it says nothing
    /// about whether it can be reached by TCP.
    pub(crate) fn peer_anew(&self, id: FabricId) -> Arc<Peer> {
        let peer = Arc::new(Peer::new(id));
        lock(&self.peers).insert(id, Arc::clone(&peer));
        peer
    }

    /// Asks the helper to connect to `peer`, unless there is a connection or one was already asked for.
    pub(crate) fn dial(self: &Arc<Self>, peer: &Arc<Peer>) {
        if !peer.begin_dialling() {
            return;
        }
        if !self.meet_if_thread(peer) {
            self.order(Order::Dial(Arc::clone(peer)));
        }
    }

    /// Is it a thread of this process? Then both know each other from here on.
    fn meet_if_thread(self: &Arc<Self>, peer: &Peer) -> bool {
        let Some(other) = lock(&LOCAL).get(&peer.id().0).and_then(Weak::upgrade) else { return false };
        peer.meet_thread(&other);
        other.peer(self.id).meet_thread(self); // it can read what we leave there after we have left
        self.tell_news();
        true
    }

    /// The line to a process on a rail, whether it is open or not.
    pub(crate) fn line(&self, peer: FabricId, rail: u8) -> SharedLine {
        let new = || SharedLine::new(self.id, peer, rail);
        lock(&self.lines).entry((peer, rail)).or_insert_with(new).clone()
    }

    /// Takes a line that a peer has opened. Nothing if there are too many already.
    fn adopt(
        &self,
        peer: FabricId,
        rail: u8,
        stream: NotInherited<TcpStream>,
        now: Instant,
    ) -> io::Result<Option<Adopted>> {
        let line = {
            let mut lines = lock(&self.lines);
            if !lines.contains_key(&(peer, rail)) {
                let is_unclaimed = |line: &&SharedLine| line.lock().unclaimed_since().is_some();
                let too_many = || lines.values().filter(is_unclaimed).count() >= UNCLAIMED_MAX;
                if lines.len() >= LINES_MAX || lines.len() >= UNCLAIMED_MAX && too_many() {
                    return Ok(None);
                }
            }
            lines.entry((peer, rail)).or_insert_with(|| SharedLine::new(self.id, peer, rail)).clone()
        };
        line.lock().adopt(stream, now).map(Some)
    }

    /// Closes lines that no group has asked for in time, and forgets those that have ended.
    fn tidy_lines(&self, now: Instant) {
        lock(&self.lines).retain(|_, line| {
            if line.is_used() {
                return true;
            }
            let line = line.lock();
            let is_fresh = |since| now.saturating_duration_since(since) < UNCLAIMED_FOR;
            !line.is_over() && line.unclaimed_since().is_none_or(is_fresh)
        });
    }

    pub(crate) fn news(&self) -> &News {
        &self.news
    }

    /// Forgets messages and notices for a group that this rank has left.
    pub(crate) fn forget_group(&self, group: u64) {
        lock(&self.early).leave(group);
        let lines: Vec<SharedLine> = lock(&self.lines).values().cloned().collect();
        lines.iter().for_each(|line| line.lock().forget(group));
    }

    /// Keeps what peers have not read yet of a group that this rank left.
    pub(crate) fn bury(&self, remains: Option<Remains>) {
        let mut all = lock(&self.remains);
        all.extend(remains);
        all.retain_mut(|remains| !remains.are_read());
    }

    /// Looks what of it has been read by now.
    fn tidy_remains(&self) {
        lock(&self.remains).retain_mut(|remains| !remains.are_over());
    }

    /// Wakes waiting threads, because something happened that they should look at.
    fn tell_news(&self) {
        self.bell.ring();
    }

    /// Sends a notice about a group to the peers `to`. It reaches those that are connected.
    pub(crate) fn tell(&self, to: Vec<Arc<Peer>>, group: u64, text: Vec<u8>) {
        self.order(Order::Tell { to, group, text });
    }

    pub(crate) fn order(&self, order: Order) {
        lock(&self.orders).push(order);
        self.wake_helper();
    }

    /// Returns once the helper thread has done what it was asked to, or a moment later: a process that ends right after it
    /// told something should have told it.
    pub(crate) fn wait_until_told(&self) {
        let (sender, receiver) = std::sync::mpsc::channel();
        self.order(Order::Answer(sender));
        let _ = receiver.recv_timeout(Duration::from_millis(200));
    }

    pub(crate) fn wake_helper(&self) {
        self.waker.ring();
    }

    /// Has the helper drive what is under way while no thread waits. With `again` the helper is woken even if it was called
    /// before: it may sleep, and not know of the latest operation.
    ///
    /// An alarm that is set already will do: setting it again would cost more than many operations take.
    pub(crate) fn call_helper(&self, when: When, again: bool) {
        let (call, after) = match when {
            When::Now => {
                if self.call.swap(CALLED, Ordering::AcqRel) != CALLED || again {
                    self.wake_helper();
                }
                return;
            }
            When::Soon => (CALLED_SOON, CALL_SOON),
            When::Later => (CALLED_LATER, CALL_LATER),
        };
        if self.call.fetch_max(call, Ordering::AcqRel) >= call && !again {
            return;
        }
        if self.alarm_is_set.fetch_max(call, Ordering::AcqRel) >= call {
            return;
        }
        let once = Timespec { tv_sec: 0, tv_nsec: 0 };
        let after = Timespec { tv_sec: 0, tv_nsec: i64::from(after.subsec_nanos()) };
        let alarm = Itimerspec { it_interval: once, it_value: after };
        if rustix::time::timerfd_settime(&self.alarm, TimerfdTimerFlags::empty(), &alarm).is_err() {
            self.alarm_is_set.store(NOT_CALLED, Ordering::Release);
            self.call_helper(When::Now, true);
        }
    }

    /// The alarm went off, and the helper looks around next: a caller sets it again from now on.
    fn silence_alarm(&self) {
        let _ = rustix::io::read(&self.alarm, &mut [0_u8; 8]); // how often it went off
        self.alarm_is_set.swap(NOT_CALLED, Ordering::AcqRel); // not a store: it sees what callers did before they saw it set
    }

    pub(crate) fn helper_is_called(&self) -> bool {
        self.call.load(Ordering::Acquire) != NOT_CALLED
    }

    /// There is nothing left for the helper to drive.
    pub(crate) fn dismiss_helper(&self) {
        self.call.store(NOT_CALLED, Ordering::Release);
    }

    /// Ends the helper thread; peers see an orderly end.
    pub(crate) fn shut_down(&self) {
        if self.check_process().is_err() {
            return; // the thread was not forked along, and another may have held a lock
        }
        lock(&LOCAL).remove(&self.id.0);
        let helper = lock(&self.helper).take();
        self.segment.abandon();
        self.order(Order::Stop);
        if let Some(helper) = helper
            && helper.thread().id() != std::thread::current().id()
        {
            let _ = helper.join(); // a panic in it was reported by itself
        }
    }
}

/// For tests that play the helper thread themselves.
#[cfg(test)]
impl Fabric {
    /// Takes what this rank has asked of its helper thread.
    pub(crate) fn take_orders(&self) -> Vec<Order> {
        std::mem::take(&mut lock(&self.orders))
    }

    /// Connections for messages with other processes.
    pub(crate) fn open_connections(&self) -> usize {
        let mut sockets = Vec::new();
        lock(&self.lines).values().for_each(|line| line.lock().all_sockets(&mut sockets));
        sockets.len()
    }

    /// Hands in a line on which a rank of another host has said hello.
    pub(crate) fn hand_in(&self, peer: FabricId, stream: TcpStream, now: Instant) {
        assert_eq!(self.adopt(peer, 0, stream.into(), now).unwrap(), Some(Adopted::Yes));
    }
}

impl Surroundings for Fabric {
    fn news(&self) -> &News {
        &self.news
    }

    fn standing(&self, group: u64) -> Standing {
        if lock(&self.early).has_left(group) {
            Standing::Left
        } else if lock(&self.groups).contains(&group) {
            Standing::Member
        } else {
            Standing::Unknown
        }
    }
}

impl fmt::Debug for Fabric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fabric").field("id", &self.id).field("pid", &self.pid).finish_non_exhaustive()
    }
}

/// A fabric for as long as groups use it: the helper thread has a fabric too, and must not keep it alive.
#[derive(Clone, Debug)]
pub(crate) struct FabricHandle(Arc<Shutdown>);

#[derive(Debug)]
struct Shutdown(Arc<Fabric>);

impl FabricHandle {
    pub(crate) fn new(options: FabricOptions) -> Result<Self, Fault> {
        Ok(FabricHandle(Arc::new(Shutdown(Fabric::new(options)?))))
    }

    /// A fabric without a helper thread.
    #[cfg(test)]
    pub(crate) fn without_helper(options: FabricOptions) -> Result<Self, Fault> {
        let (fabric, ..) = Fabric::without_helper(FabricId(random()?), options)?;
        Ok(FabricHandle(Arc::new(Shutdown(fabric))))
    }
}

impl std::ops::Deref for FabricHandle {
    type Target = Arc<Fabric>;

    fn deref(&self) -> &Arc<Fabric> {
        &self.0.0
    }
}

impl Drop for Shutdown {
    fn drop(&mut self) {
        self.0.shut_down();
    }
}

/// Sparse, so only addresses are taken; where even those are limited, less does.
fn new_segment() -> io::Result<Arc<Segment>> {
    let mut len = SEGMENT_MAX;
    loop {
        match Segment::new(len) {
            Err(_) if len > 64 << 20 => len /= 4,
            other => return other,
        }
    }
}

/// Returns 128 random bits, enough that no two processes draw the same.
pub(crate) fn random() -> Result<u128, Fault> {
    let mut bytes = [0; 16];
    let count = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
        .map_err(|error| Fault::io("cannot get random numbers", error.into()))?;
    assert_eq!(count, bytes.len(), "short requests are answered whole");
    Ok(u128::from_ne_bytes(bytes))
}
