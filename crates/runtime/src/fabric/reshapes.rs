//! Lets a list of processes become a group: connects them, brings what they say to each other's attempt, and lets the caller
//! wait.
//!
//! The caller's thread introduces the processes, the helper thread does the rest. An attempt still answers after its caller has
//! got the outcome, because another process may need that to get its own; the oldest is forgotten first. What a process says
//! about an attempt that this one has not begun is kept for a while: it is said only once.
//!
//! Not here: what is decided (see `recovery::reshape`), handles (see `group::reconfigure`).

#![expect(clippy::disallowed_methods, reason = "waits for decisions, by the clock")]

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tenfold_store::Deadline;

use super::councils::Post;
use super::{Fabric, Order, Peer, lock};
use crate::fault::{ErrorKind, Fault};
use crate::recovery::{Reshape, Reshaped, UsedIds};
use crate::wire::{ControlFrame, FabricId};

/// Attempts that still answer.
const ENDED_MAX: usize = 16;

/// What was said about attempts that have not begun here.
const EARLY_MAX: usize = 4096;
/// Longer than anything that is said in a reconfiguration of the largest group.
const EARLY_LEN: usize = 4 << 10;
const EARLY_FOR: Duration = Duration::from_secs(600);

/// What is said again after. Streams lose nothing unless they break.
const REPEAT: Duration = Duration::from_millis(100);

/// How much longer a caller waits than its call may take: the helper thread ends the call.
const SLACK: Duration = Duration::from_secs(5);

const LOOK: Duration = Duration::from_millis(100);

#[derive(Default)]
pub(super) struct Reshapes {
    all: Mutex<All>,
    changed: Condvar,
}

#[derive(Default)]
struct All {
    used: UsedIds,
    attempts: HashMap<u64, Attempt>,
    /// Their ids, the oldest first.
    begun: VecDeque<u64>,
    early: VecDeque<Early>,
}

struct Early {
    id: u64,
    from: FabricId,
    text: Vec<u8>,
    came: Instant,
}

struct Attempt {
    reshape: Reshape,
    /// By rank; nothing for this process.
    roster: Vec<Option<Arc<Peer>>>,
    begun: Instant,
}

impl Attempt {
    fn now(&self) -> Duration {
        self.begun.elapsed()
    }

    fn rank_of(&self, id: FabricId) -> Option<usize> {
        self.roster.iter().position(|peer| peer.as_ref().is_some_and(|peer| peer.id() == id))
    }

    /// Looks who is connected.
    fn look(&mut self) {
        let now = self.now();
        for (rank, peer) in self.roster.iter().enumerate() {
            let Some(peer) = peer else { continue };
            let has_ended = peer.is_thread() && peer.thread().is_none();
            if peer.fate().is_some() || has_ended {
                self.reshape.on_lost(rank, now);
            } else if if peer.is_near() { peer.segment().is_some() } else { peer.is_met() } {
                self.reshape.on_connected(rank, now);
            }
        }
    }

    fn hear(&mut self, from: FabricId, text: &[u8]) -> Result<(), String> {
        let Some(rank) = self.rank_of(from) else { return Ok(()) };
        let now = self.now();
        self.reshape.on_letter(rank, text, now)
    }
}

impl Reshapes {
    fn lock(&self) -> MutexGuard<'_, All> {
        lock(&self.all)
    }

    /// What there is to send, and when to look again at the latest.
    pub(super) fn drive(&self) -> (Post, Option<Duration>) {
        let (mut post, mut next) = (Post::new(), None);
        for (&id, attempt) in &mut self.lock().attempts {
            attempt.look();
            let now = attempt.now();
            if attempt.reshape.wake().is_some_and(|at| at <= now) {
                attempt.reshape.on_tick(now);
            }
            for (to, text) in attempt.reshape.take_letters() {
                let to = to.into_iter().filter_map(|rank| attempt.roster[rank].clone()).collect();
                post.push((to, ControlFrame::Reshape { id, text }));
            }
            let wake = attempt.reshape.wake().map(|at| at.saturating_sub(now));
            next = next.into_iter().chain(wake).min();
        }
        self.changed.notify_all();
        (post, next)
    }

    /// # Errors
    /// Says what is wrong with it.
    pub(super) fn hear(&self, from: FabricId, id: u64, text: &[u8], now: Instant) -> Result<(), String> {
        let mut all = self.lock();
        if let Some(attempt) = all.attempts.get_mut(&id) {
            return attempt.hear(from, text);
        }
        if text.len() > EARLY_LEN {
            return Err(format!("{} bytes are too many", text.len()));
        }
        if all.early.len() == EARLY_MAX {
            all.early.pop_front();
        }
        all.early.push_back(Early { id, from, text: text.to_vec(), came: now });
        Ok(())
    }
}

impl Fabric {
    /// Tries to become a group with these processes, of which this is one, in this order, and blocks until that is decided. The
    /// result is where each of them has its room.
    pub(crate) fn reshape(
        self: &Arc<Self>,
        id: u64,
        processes: &[FabricId],
        roster: &[Option<Arc<Peer>>],
        room: u64,
        deadline: &Deadline,
    ) -> Result<Vec<u64>, Fault> {
        let limit = deadline.left().unwrap_or(Duration::MAX / 8);
        let reshape = Reshape::new(id, processes, self.id(), room, REPEAT, limit)?;
        let mut all = self.reshapes.lock();
        all.used.take(id)?;
        let mut attempt = Attempt { reshape, roster: roster.to_vec(), begun: Instant::now() };
        let is_fresh = |early: &Early| early.came.elapsed() < EARLY_FOR;
        let (early, others) = all.early.drain(..).filter(is_fresh).partition(|early| early.id == id);
        all.early = others;
        let early: VecDeque<Early> = early;
        attempt.look();
        for Early { from, text, .. } in early {
            if let Err(why) = attempt.hear(from, &text) {
                tracing::warn!("ignored what a process said about reconfiguration {id}: {why}");
            }
        }
        all.attempts.insert(id, attempt);
        all.begun.push_back(id);
        if all.begun.len() > ENDED_MAX
            && let Some(oldest) = all.begun.pop_front()
        {
            all.attempts.remove(&oldest);
        }
        drop(all);
        roster.iter().flatten().for_each(|peer| self.dial(peer));
        self.order(Order::Deliberate);
        let mut all = self.reshapes.lock();
        loop {
            let Some(attempt) = all.attempts.get(&id) else {
                return Err(Fault::new(ErrorKind::Limit, "too many reconfigurations at the same time"));
            };
            match attempt.reshape.outcome() {
                Some(Reshaped::Committed) => return Ok(attempt.reshape.rooms().to_vec()),
                Some(Reshaped::Aborted(cause)) => return Err(cause.fault()),
                Some(Reshaped::InDoubt(failure)) => {
                    let Fault { message, .. } = failure.fault();
                    let message = format!("it is not known whether the others have reconfigured: {message}");
                    let hint = "reconfigure again under another id, with those that can be reached";
                    return Err(Fault::new(ErrorKind::PeerLost, message).hint(hint));
                }
                None if attempt.now() > limit.saturating_add(SLACK) => {
                    return Err(Fault::timeout(
                        "not reconfigured: the helper thread of this rank does not run",
                    ));
                }
                None => {}
            }
            let waited = self.reshapes.changed.wait_timeout(all, LOOK);
            all = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
