//! Another rank's process, as this one knows it.

#![expect(clippy::disallowed_methods, reason = "notes when a peer ended")]

use std::collections::HashMap;
use std::fmt;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use tenfold_memory::{Doing, PeerSegment};
use tenfold_plan::Rank;

use super::{Bell, Fabric};
use crate::fault::{ErrorKind, Fault, show_duration};
use crate::wire::{FabricId, GroupPulse, RAILS_MAX};

/// Where a peer can be found; from its card in the store.
#[derive(Clone, Debug)]
pub(crate) struct Whereabouts {
    pub host: String,
    pub pid: u32,
    pub socket_name: String,
    /// On this host: its Unix socket was seen to answer.
    pub near: bool,
    pub address: Option<SocketAddr>,
    /// The same on further interfaces.
    pub rails: Vec<SocketAddr>,
}

/// What became of a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    /// Its process ended without a word.
    Died,
    /// It closed its last group.
    Left,
    /// It shows no sign of life, for so long.
    Silent(Duration),
    /// There is no way to it, and why.
    Unreachable(String),
}

impl Fate {
    /// How long after the news of it messages from another host may still arrive.
    pub(crate) fn grace(&self) -> Duration {
        match self {
            Fate::Left => Duration::from_secs(2),
            Fate::Died => Duration::from_millis(200),
            Fate::Silent(_) | Fate::Unreachable(_) => Duration::ZERO,
        }
    }

    pub(crate) fn fault(&self, rank: Rank, peer: &Peer) -> Fault {
        let (kind, what, hint) = match self {
            Fate::Died => (
                ErrorKind::PeerLost,
                "died: its process ended".to_string(),
                "see that rank's log, or the kernel's for `out of memory`",
            ),
            Fate::Left => (
                ErrorKind::PeerLost,
                "left: it closed its groups".to_string(),
                "a rank that is done with a group must not leave it before the others are",
            ),
            Fate::Silent(time) => (
                ErrorKind::PeerSilent,
                format!("shows no sign of life for {}", show_duration(*time)),
                "it is stopped or frozen, or the network to it is cut; `heartbeat` sets how long to wait",
            ),
            Fate::Unreachable(why) => (
                ErrorKind::Connect,
                format!("cannot be reached: {why}"),
                "check that no firewall is between the hosts; TENFOLD_INTERFACE and TENFOLD_PORT_RANGE choose address and ports",
            ),
        };
        Fault::new(kind, format!("rank {rank} ({peer}) {what}")).peer(rank).hint(hint)
    }
}

#[derive(Debug)]
pub(crate) struct Peer {
    id: FabricId,
    whereabouts: Mutex<Option<Whereabouts>>,
    dialling: AtomicBool,
    near: OnceLock<(Arc<PeerSegment>, Bell)>,
    /// There is, or was, a stream to it on which both have said hello, or it is a thread.
    met: AtomicBool,
    /// A thread of this process.
    thread: OnceLock<Weak<Fabric>>,
    fate: OnceLock<(Fate, Instant)>,
    /// Regions of this rank that it has mapped, by offset.
    regions: Mutex<Vec<usize>>,
    /// What it last said that it does, by group; of peers on other hosts that this rank waits for.
    doing: Mutex<HashMap<u64, Doing>>,
}

impl Peer {
    pub(super) fn new(id: FabricId) -> Self {
        Peer {
            id,
            whereabouts: Mutex::default(),
            dialling: AtomicBool::new(false),
            near: OnceLock::new(),
            met: AtomicBool::new(false),
            thread: OnceLock::new(),
            fate: OnceLock::new(),
            regions: Mutex::default(),
            doing: Mutex::default(),
        }
    }

    pub(crate) fn id(&self) -> FabricId {
        self.id
    }

    pub(crate) fn set_whereabouts(&self, whereabouts: Whereabouts) {
        let before = self.whereabouts().replace(whereabouts.clone());
        if before.is_some_and(|before| before.near != whereabouts.near) {
            self.dialling.store(false, Ordering::Relaxed); // there may be another way
        }
    }

    fn whereabouts(&self) -> MutexGuard<'_, Option<Whereabouts>> {
        self.whereabouts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn address(&self) -> Option<SocketAddr> {
        self.whereabouts().as_ref()?.address
    }

    /// Where it can be reached on a rail.
    pub(crate) fn address_of(&self, rail: u8) -> Option<SocketAddr> {
        match usize::from(rail) {
            0 => self.address(),
            rail => self.whereabouts().as_ref()?.rails.get(rail - 1).copied(),
        }
    }

    /// Over how many rails it and a process with `own` further interfaces share their messages out. Both find the same number.
    pub(crate) fn rails_with(&self, own: usize) -> u8 {
        let theirs = self.whereabouts().as_ref().map_or(0, |known| known.rails.len());
        1 + own.min(theirs).min(RAILS_MAX - 1) as u8
    }

    /// Has a group said where it can be found?
    pub(super) fn is_introduced(&self) -> bool {
        self.whereabouts().is_some()
    }

    /// Name of its Unix socket, if that can be reached from here.
    pub(super) fn near_name(&self) -> Option<String> {
        self.whereabouts().as_ref().filter(|known| known.near).map(|known| known.socket_name.clone())
    }

    /// Does it share memory with this rank?
    pub(super) fn is_near(&self) -> bool {
        self.whereabouts().as_ref().is_some_and(|known| known.near)
    }

    /// True for the first who asks.
    pub(super) fn begin_dialling(&self) -> bool {
        self.near.get().is_none() && !self.dialling.swap(true, Ordering::Relaxed)
    }

    /// Its segment, once it is mapped.
    #[inline]
    pub(crate) fn segment(&self) -> Option<Arc<PeerSegment>> {
        self.near.get().map(|(segment, _)| Arc::clone(segment))
    }

    fn regions(&self) -> MutexGuard<'_, Vec<usize>> {
        self.regions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has it mapped the region at this offset? One that joined later has not.
    pub(crate) fn knows_region(&self, offset: usize) -> bool {
        self.regions().contains(&offset)
    }

    pub(super) fn learn_region(&self, offset: usize) {
        self.regions().push(offset);
    }

    pub(super) fn forget_region(&self, offset: usize) {
        self.regions().retain(|known| *known != offset);
    }

    /// Wakes it.
    pub(crate) fn ring(&self) {
        if let Some((_, bell)) = self.near.get() {
            bell.ring();
        }
    }

    pub(super) fn meet(&self, segment: PeerSegment, bell: Bell) {
        let _ = self.near.set((Arc::new(segment), bell)); // both may have dialled at the same time
    }

    pub(super) fn set_met(&self) {
        self.met.store(true, Ordering::Relaxed);
    }

    /// Returns whether notices reach the peer.
    pub(crate) fn is_met(&self) -> bool {
        self.met.load(Ordering::Relaxed)
    }

    pub(super) fn meet_thread(&self, fabric: &Arc<Fabric>) {
        let _ = self.thread.set(Arc::downgrade(fabric));
        self.set_met();
        self.meet(PeerSegment::local(Arc::clone(fabric.segment())), fabric.bell.clone());
    }

    /// Is it, or was it, a thread of this process?
    pub(super) fn is_thread(&self) -> bool {
        self.thread.get().is_some()
    }

    pub(super) fn thread(&self) -> Option<Arc<Fabric>> {
        self.thread.get().and_then(Weak::upgrade)
    }

    /// Its pulse, if it shares memory with this rank; not of a thread of this process, which lives as long as we do.
    pub(super) fn pulse(&self) -> Option<u64> {
        if self.is_thread() { None } else { self.any_pulse() }
    }

    /// The same, also of a thread: ranks on other hosts want to know whether that runs.
    pub(super) fn any_pulse(&self) -> Option<u64> {
        self.near.get().map(|(segment, _)| segment.pulse())
    }

    pub(crate) fn fate(&self) -> Option<&Fate> {
        self.fate.get().map(|(fate, _)| fate)
    }

    /// What became of it, and for how long that is known.
    pub(crate) fn fate_and_age(&self) -> Option<(&Fate, Duration)> {
        self.fate.get().map(|(fate, since)| (fate, since.elapsed()))
    }

    /// True if it was alive until now.
    pub(crate) fn end(&self, fate: Fate) -> bool {
        self.fate.set((fate, Instant::now())).is_ok()
    }

    /// What it said that it does; `now` is the time by this host's clock.
    pub(super) fn set_doing(&self, groups: &[GroupPulse], now: u64) {
        let doing = groups.iter().map(|&GroupPulse { group, current, finished, ages }| {
            (group, Doing { current, finished, since: ages.map(|age| now.saturating_sub(age)) })
        });
        let doing = doing.collect();
        *self.doing.lock().unwrap_or_else(PoisonError::into_inner) = doing;
    }

    pub(crate) fn doing(&self, group: u64) -> Option<Doing> {
        self.doing.lock().unwrap_or_else(PoisonError::into_inner).get(&group).copied()
    }
}

/// As in `host node-b, pid 4711`.
impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &*self.whereabouts() {
            Some(known) => write!(f, "host {}, pid {}", known.host, known.pid),
            None => write!(f, "not introduced yet"),
        }
    }
}
