//! The groups and threads that records are about.
//!
//! A record names its group and its thread by number. What the numbers mean is kept here, for as long as the ring may have a
//! record with them.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use tenfold_plan::Rank;

use super::entry::{COMPLETED, Called, RETIRED, Record, STARTED};
use super::ring::Ring;
use super::{Recorder, clock, site};
use crate::fault::Fault;
use crate::metrics::GroupMetrics;
use crate::wire::FabricId;

/// Threads that are remembered.
const THREADS_MAX: usize = 1024;

/// No collective yet.
const NONE: u64 = u64::MAX;

/// What c10d shows for a group without a description.
const UNDESCRIBED: &str = "undefined";

/// Groups that were left and whose numbers are still reported.
const LEFT_MAX: usize = 16;

/// A group of this process, as the recorder knows it.
#[derive(Debug)]
pub(crate) struct GroupRecord {
    identity: Arc<Identity>,
    pub(crate) metrics: GroupMetrics,
    /// Dumps that were asked for although the group has not failed.
    #[cfg(test)]
    pub(crate) dumps: std::sync::atomic::AtomicUsize,
}

/// What records of a group refer to: small, because it is kept for as long as there are any.
#[derive(Debug)]
pub(crate) struct Identity {
    recorder: &'static Recorder,
    /// c10d's `pg_id`.
    id: u32,
    /// As the user named it; a second group of that name gets a number behind it.
    name: String,
    rank: Rank,
    size: usize,
    facts: Mutex<Facts>,
    fabric: FabricId,
    /// Other members are threads of this process, and record here, too.
    among_threads: bool,
    enqueued: AtomicU64,
    started: AtomicU64,
    completed: AtomicU64,
    /// When something of it last ended well.
    ended: AtomicU64,
    /// The number of its last record, plus one.
    last: AtomicU64,
    /// This rank left it.
    left: AtomicBool,
    /// Why it can no longer be used.
    failure: OnceLock<Failure>,
}

/// Why a group failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Failure {
    pub at_ns: u64,
    pub text: String,
    /// Who is to blame, by its rank in the whole job.
    pub rank: Option<Rank>,
}

impl std::ops::Deref for GroupRecord {
    type Target = Identity;

    #[inline]
    fn deref(&self) -> &Identity {
        &self.identity
    }
}

#[derive(Clone, Debug)]
struct Facts {
    description: Option<String>,
    /// Each member's rank in the whole job; nothing if that is its rank here.
    global_ranks: Option<Arc<[Rank]>>,
}

/// A record that is not finished.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ticket {
    id: u64,
    created: u64,
    started: u64,
    kind: crate::OpKind,
    bytes: u64,
    collective: u64,
}

impl Ticket {
    /// When it was called, by the host's clock.
    #[inline]
    pub(crate) fn called_at(&self) -> u64 {
        clock::to_host(self.created)
    }
}

/// What is known of a group when it is made.
#[derive(Debug)]
pub(crate) struct Newcomer<'a> {
    pub name: &'a str,
    pub rank: Rank,
    pub size: usize,
    pub global_ranks: Option<Arc<[Rank]>>,
    pub fabric: FabricId,
    pub among_threads: bool,
}

/// What a dump says of a group.
#[derive(Clone, Debug)]
pub(super) struct GroupFacts {
    pub id: u32,
    pub name: String,
    pub description: String,
    pub rank: Rank,
    pub ranks: Vec<Rank>,
    pub enqueued: i64,
    pub started: i64,
    pub completed: i64,
    pub failure: Option<Failure>,
}

impl GroupRecord {
    /// An operation was called. It is counted even if nothing is recorded.
    #[inline]
    pub(crate) fn called(&self, call: &Called) -> Ticket {
        let now = clock::now();
        let id = match &self.recorder.ring {
            Some(ring) => self.write(ring, call, now),
            None => 0,
        };
        let collective = if call.kind.is_message() { NONE } else { call.collectives };
        if collective != NONE {
            self.enqueued.store(collective, Ordering::Relaxed);
            if call.starts {
                self.started.store(collective, Ordering::Relaxed);
            }
        }
        let element = call.dtype.map_or(0, |dtype| dtype.size() as u64);
        let bytes = call.input.total().max(call.output.total()) * element;
        let started = if call.starts { now } else { 0 };
        Ticket { id, created: now, started, kind: call.kind, bytes, collective }
    }

    /// The number of the record.
    #[inline]
    fn write(&self, ring: &Ring, call: &Called, now: u64) -> u64 {
        let site = site::current(self.recorder.settings.stacks);
        let record = Record::new(call, self.id, self.recorder.this_thread(), site.is_some(), now);
        let id = ring.push(&record.encode());
        if let Some(site) = site {
            self.recorder.sites.put(id, site, ring.capacity());
        }
        self.last.store(id + 1, Ordering::Relaxed);
        id
    }

    /// A message has found its partner.
    pub(crate) fn started(&self, ticket: &mut Ticket) {
        self.started_at(ticket, clock::now());
    }

    /// A collective is begun because the one before it has just ended: no other look at the clock is needed.
    pub(crate) fn started_next(&self, ticket: &mut Ticket) {
        self.started_at(ticket, self.ended.load(Ordering::Relaxed).max(ticket.created));
    }

    #[inline]
    fn started_at(&self, ticket: &mut Ticket, now: u64) {
        if ticket.started == 0 {
            ticket.started = now;
            if let Some(ring) = &self.recorder.ring {
                ring.update(ticket.id, [(STARTED, ticket.started)]);
            }
            if ticket.collective != NONE {
                self.started.store(ticket.collective, Ordering::Relaxed);
            }
        }
    }

    /// An operation ended well. `waited` is how long it stood still because of others.
    #[inline]
    pub(crate) fn completed(&self, ticket: &Ticket, waited: Waited) {
        let now = clock::now();
        if let Some(ring) = &self.recorder.ring {
            ring.update(ticket.id, [(COMPLETED, now), (RETIRED, now)]);
        }
        self.ended.store(now, Ordering::Relaxed);
        if ticket.collective != NONE {
            self.completed.store(ticket.collective, Ordering::Relaxed);
        }
        let duration = now.saturating_sub(ticket.created);
        let waited = match waited {
            Waited::All => duration,
            Waited::Nanoseconds(waited) => waited,
            Waited::UntilStarted => ticket.started.max(ticket.created) - ticket.created,
        };
        self.metrics.completed(ticket.kind, ticket.bytes, duration, waited);
    }

    /// An operation failed: it keeps its state.
    #[cold]
    pub(crate) fn failed(&self, ticket: &Ticket) {
        if let Some(ring) = &self.recorder.ring {
            ring.update(ticket.id, [(RETIRED, clock::now())]);
        }
        self.metrics.failed(ticket.kind);
    }
}

impl Identity {
    /// Says what a group is for, and which rank of the whole job each member is.
    pub(crate) fn describe(&self, description: Option<&str>, global_ranks: Option<&[Rank]>) {
        let mut facts = self.lock();
        if let Some(description) = description {
            facts.description = Some(description.to_string());
        }
        if let Some(ranks) = global_ranks {
            facts.global_ranks = Some(ranks.into());
        }
    }

    /// The ranks of some members in the whole job; nothing if that is what they are called here.
    pub(crate) fn global_ranks_of(&self, members: &[Rank]) -> Option<Arc<[Rank]>> {
        let facts = self.lock();
        let global = facts.global_ranks.as_ref();
        Some(members.iter().map(|rank| global.map_or(*rank, |global| global[*rank])).collect())
    }

    /// This rank's number in the whole job.
    pub(crate) fn global_rank(&self) -> Rank {
        self.global_rank_of(self.rank)
    }

    /// A member's number in the whole job.
    pub(crate) fn global_rank_of(&self, member: Rank) -> Rank {
        self.lock().global_ranks.as_ref().and_then(|ranks| ranks.get(member).copied()).unwrap_or(member)
    }

    /// If several ranks are threads of this process, the rank whose records are meant; otherwise `None`.
    pub(super) fn only(&self) -> Option<FabricId> {
        self.among_threads.then_some(self.fabric)
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn recorder(&self) -> &'static Recorder {
        self.recorder
    }

    pub(crate) fn leave(&self) {
        self.left.store(true, Ordering::Release);
    }

    /// It can no longer be used, because of `fault`. The first one stays.
    pub(super) fn fail(&self, fault: &Fault) {
        let text = fault.message.lines().next().unwrap_or_default().to_string();
        let rank = fault.peer.map(|peer| self.global_rank_of(peer));
        self.failure.get_or_init(|| Failure { at_ns: clock::unix_now(), text, rank });
    }

    /// Has the group failed, without having been left since?
    #[cfg_attr(not(feature = "control"), expect(dead_code, reason = "who asks is the control plane"))]
    pub(crate) fn is_unhealthy(&self) -> bool {
        self.failure.get().is_some() && !self.left.load(Ordering::Acquire)
    }

    fn lock(&self) -> MutexGuard<'_, Facts> {
        self.facts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn facts(&self) -> GroupFacts {
        let facts = self.lock().clone();
        let number = |of: &AtomicU64| of.load(Ordering::Relaxed) as i64; // `NONE` is -1, as c10d has it
        GroupFacts {
            id: self.id,
            name: self.name.clone(),
            description: facts.description.unwrap_or_else(|| UNDESCRIBED.to_string()),
            rank: self.rank,
            ranks: facts.global_ranks.map_or_else(|| (0..self.size).collect(), |ranks| ranks.to_vec()),
            enqueued: number(&self.enqueued),
            started: number(&self.started),
            completed: number(&self.completed),
            failure: self.failure.get().cloned(),
        }
    }
}

/// How long an operation stood still because of others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Waited {
    /// From its call to its end.
    All,
    Nanoseconds(u64),
    /// From its call until it was begun.
    UntilStarted,
}

/// How long a collective in the queue stands still.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Stalls {
    since: u64,
    total: u64,
}

impl Stalls {
    /// It was polled. Reads the clock only when it stops or goes on.
    #[inline]
    pub(crate) fn polled(&mut self, moved: bool, pending: bool) {
        let stands = self.since != 0;
        if (stands && !moved && pending) || (!stands && !pending) {
            return;
        }
        let now = clock::now();
        if stands {
            self.total += now.saturating_sub(self.since);
        }
        self.since = if pending { now } else { 0 };
    }

    pub(crate) fn total(&self) -> Waited {
        Waited::Nanoseconds(self.total)
    }
}

/// Every group whose records may be in the ring.
#[derive(Debug, Default)]
pub(super) struct Groups {
    list: Mutex<GroupList>,
}

#[derive(Debug, Default)]
struct GroupList {
    next: u32,
    groups: Vec<Known>,
    /// How many groups of a name a rank has had.
    names: std::collections::HashMap<(String, Rank), u32>,
}

/// A group, and its numbers unless it was left long ago.
#[derive(Debug)]
struct Known {
    identity: Arc<Identity>,
    whole: Option<Arc<GroupRecord>>,
}

/// Names that are counted. In a process with more names, the numbers start again.
const NAMES_MAX: usize = 65536;

impl Groups {
    fn lock(&self) -> MutexGuard<'_, GroupList> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn add(&self, recorder: &'static Recorder, new: Newcomer<'_>) -> Arc<GroupRecord> {
        let mut list = self.lock();
        let oldest =
            recorder.ring.as_ref().map_or(0, |ring| ring.next().saturating_sub(ring.capacity() as u64));
        let mut left = 0;
        for known in list.groups.iter_mut().rev().filter(|known| known.identity.left.load(Ordering::Acquire))
        {
            left += 1;
            if left > LEFT_MAX {
                known.whole = None;
            }
        }
        list.groups
            .retain(|known| known.whole.is_some() || known.identity.last.load(Ordering::Relaxed) > oldest);
        if list.names.len() > NAMES_MAX {
            list.names.clear();
        }
        let global_rank = new.global_ranks.as_ref().map_or(new.rank, |ranks| ranks[new.rank]);
        let count = list.names.entry((new.name.to_string(), global_rank)).or_default();
        *count += 1;
        let name = if *count == 1 { new.name.to_string() } else { format!("{}#{count}", new.name) };
        let id = list.next;
        list.next += 1;
        let identity = Arc::new(Identity {
            recorder,
            id,
            name,
            rank: new.rank,
            size: new.size,
            facts: Mutex::new(Facts { description: None, global_ranks: new.global_ranks }),
            fabric: new.fabric,
            among_threads: new.among_threads,
            enqueued: AtomicU64::new(NONE),
            started: AtomicU64::new(NONE),
            completed: AtomicU64::new(NONE),
            ended: AtomicU64::new(0),
            last: AtomicU64::new(0),
            left: AtomicBool::new(false),
            failure: OnceLock::new(),
        });
        let group = Arc::new(GroupRecord {
            identity: Arc::clone(&identity),
            metrics: GroupMetrics::default(),
            #[cfg(test)]
            dumps: 0.into(),
        });
        list.groups.push(Known { identity, whole: Some(Arc::clone(&group)) });
        group
    }

    /// Those that are there, or were until recently.
    pub(super) fn all(&self) -> Vec<Arc<GroupRecord>> {
        self.lock().groups.iter().filter_map(|known| known.whole.clone()).collect()
    }

    /// The number in the whole job of one of the ranks of this process.
    pub(super) fn global_rank(&self, of: FabricId) -> Option<Rank> {
        self.lock()
            .groups
            .iter()
            .find(|known| known.identity.fabric == of)
            .map(|known| known.identity.global_rank())
    }

    /// Those of one rank, or all.
    pub(super) fn facts(&self, only: Option<FabricId>) -> Vec<GroupFacts> {
        let groups: Vec<_> = self.lock().groups.iter().map(|known| Arc::clone(&known.identity)).collect();
        let wanted = groups.iter().filter(|group| only.is_none_or(|only| only == group.fabric));
        wanted.map(|group| group.facts()).collect()
    }
}

/// Threads that called operations.
#[derive(Debug, Default)]
pub(super) struct Threads {
    list: Mutex<(u32, VecDeque<(u32, ThreadFacts)>)>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ThreadFacts {
    pub id: String,
    pub name: String,
}

impl Threads {
    /// A number for the thread that calls this.
    #[cold]
    pub(super) fn add(&self) -> u32 {
        // As in `4711/task/4712`.
        let path = std::fs::read_link("/proc/thread-self").unwrap_or_default();
        let id = path.file_name().map_or_else(String::new, |id| id.to_string_lossy().into_owned());
        let name = std::fs::read_to_string("/proc/thread-self/comm").unwrap_or_default().trim().to_string();
        let mut list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        if list.1.len() == THREADS_MAX {
            list.1.pop_front();
        }
        list.0 += 1;
        let number = list.0;
        list.1.push_back((number, ThreadFacts { id, name }));
        number
    }

    pub(super) fn get(&self, number: u32) -> ThreadFacts {
        let list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        list.1.iter().find(|(of, _)| *of == number).map(|(_, facts)| facts.clone()).unwrap_or_default()
    }
}
