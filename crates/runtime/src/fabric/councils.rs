//! Lets the ranks of a group agree: brings letters from processes to the group's council and back, and callers to its answers.
//!
//! Calls come from any thread. The helper thread does the rest: it hears letters, notices deaths, sends what is to be sent, and
//! keeps the time. A council outlives its group, because other ranks may need the answers of one that has left; the oldest
//! of those is forgotten first.
//!
//! Not here: what is decided (see `recovery`), streams (see `watch/letters.rs`).

#![expect(clippy::disallowed_methods, reason = "waits for decisions, by the clock")]

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tenfold_plan::Rank;
use tenfold_store::Deadline;

use super::{Fabric, Fate, Order, Peer, lock};
use crate::fault::{ErrorKind, Fault, show_ranks};
use crate::recovery::{Agreed, Council, Limits, Question};
use crate::transport::mesh::Member;
use crate::wire::{ControlFrame, FabricId};

/// Councils of groups that this rank has left.
const RETIRED_MAX: usize = 256;

/// How much longer a caller waits than its call may take: the helper thread ends the call.
const SLACK: Duration = Duration::from_secs(5);

/// A caller looks at least this often whether a rank that it waits for has died.
const LOOK: Duration = Duration::from_millis(100);

/// Frames, each with its receivers.
pub(super) type Post = Vec<(Vec<Arc<Peer>>, ControlFrame)>;

#[derive(Default)]
pub(super) struct Councils {
    all: Mutex<All>,
    /// Something was decided, or has become known.
    changed: Condvar,
}

#[derive(Default)]
struct All {
    chambers: HashMap<u64, Chamber>,
    /// Of groups that this rank has left, the oldest first.
    retired: VecDeque<u64>,
}

struct Chamber {
    council: Council,
    /// By rank; nothing for this rank, and for one that was not looked up yet.
    roster: Vec<Option<Arc<Peer>>>,
    opened: Instant,
}

impl Chamber {
    fn now(&self) -> Duration {
        self.opened.elapsed()
    }

    fn rank_of(&self, id: FabricId) -> Option<Rank> {
        self.roster.iter().position(|peer| peer.as_ref().is_some_and(|peer| peer.id() == id))
    }

    /// Looks which ranks have died.
    fn look(&mut self) {
        let now = self.now();
        for (rank, peer) in self.roster.iter().enumerate() {
            let Some(peer) = peer else { continue };
            match peer.fate() {
                Some(Fate::Left) => self.council.on_dead(rank, now),
                // Between hosts, a connection that ended may have been cut by something in between.
                Some(Fate::Died) if peer.is_near() => self.council.on_dead(rank, now),
                Some(_) => self.council.on_suspect(rank, now),
                None if peer.is_thread() && peer.thread().is_none() => self.council.on_dead(rank, now),
                None => {}
            }
        }
    }

    /// Keeps nothing of ranks that have ended: their memory stays mapped as long as something knows them.
    fn let_go_of_dead(&mut self) {
        self.look();
        for peer in &mut self.roster {
            peer.take_if(|peer| match peer.fate() {
                Some(Fate::Left) => true,
                Some(Fate::Died) => peer.is_near(),
                _ => false,
            });
        }
    }

    fn letters(&mut self, group: u64, post: &mut Post) {
        for (to, text) in self.council.take_letters() {
            let to: Vec<Arc<Peer>> = to.into_iter().filter_map(|rank| self.roster[rank].clone()).collect();
            post.push((to, ControlFrame::Letter { group, text }));
        }
    }
}

impl Councils {
    fn lock(&self) -> std::sync::MutexGuard<'_, All> {
        lock(&self.all)
    }

    /// What there is to send, and when to look again at the latest.
    pub(super) fn drive(&self) -> (Post, Option<Duration>) {
        let (mut post, mut next) = (Post::new(), None);
        for (&group, chamber) in &mut self.lock().chambers {
            if !chamber.council.is_active() {
                continue;
            }
            chamber.look();
            let now = chamber.now();
            chamber.council.on_tick(now);
            chamber.letters(group, &mut post);
            let wake = chamber.council.wake().map(|at| at.saturating_sub(now));
            next = next.into_iter().chain(wake).min();
        }
        self.changed.notify_all();
        (post, next)
    }

    /// Groups that this rank has left let go of ranks that have ended.
    pub(super) fn let_go_of_dead(&self) {
        let All { chambers, retired } = &mut *self.lock();
        for group in retired.iter() {
            chambers.get_mut(group).into_iter().for_each(Chamber::let_go_of_dead);
        }
    }

    /// # Errors
    /// Says what is wrong with the letter.
    pub(super) fn hear(&self, from: FabricId, group: u64, text: &[u8]) -> Result<(), String> {
        let mut all = self.lock();
        // A group that is about to be made here: the letter is repeated.
        let Some(chamber) = all.chambers.get_mut(&group) else { return Ok(()) };
        let Some(rank) = chamber.rank_of(from) else { return Ok(()) };
        let now = chamber.now();
        chamber.council.on_letter(rank, text, now)
    }

    pub(super) fn hear_room(&self, from: FabricId, group: u64, sequence: u32, offset: u64) {
        let mut all = self.lock();
        let Some(chamber) = all.chambers.get_mut(&group) else { return };
        if let Some(rank) = chamber.rank_of(from) {
            chamber.council.on_room(rank, sequence, offset);
            self.changed.notify_all();
        }
    }
}

impl Fabric {
    pub(crate) fn open_council(&self, group: u64, me: Rank, members: &[Member], limits: Limits) {
        let roster: Vec<_> = members.iter().map(|member| member.peer.clone()).collect();
        let council = Council::new(group, me, roster.len(), limits);
        let chamber = Chamber { council, roster, opened: Instant::now() };
        self.councils.lock().chambers.insert(group, chamber);
    }

    /// This rank leaves the group, and still answers the others.
    pub(crate) fn retire_council(&self, group: u64) {
        let mut all = self.councils.lock();
        all.retired.push_back(group);
        if all.retired.len() > RETIRED_MAX
            && let Some(oldest) = all.retired.pop_front()
        {
            all.chambers.remove(&oldest);
        }
    }

    /// A rank has left the group, and will not call.
    pub(crate) fn hear_left(&self, group: u64, rank: Rank) {
        let mut all = self.councils.lock();
        let Some(chamber) = all.chambers.get_mut(&group) else { return };
        let now = chamber.now();
        chamber.council.on_left(rank, now);
        if chamber.council.is_active() {
            drop(all);
            self.order(Order::Deliberate);
        }
    }

    /// Agrees with the other ranks of a group, and blocks until that is done. `members` are those that are known by now.
    pub(crate) fn consult(
        &self,
        group: u64,
        members: &[Member],
        question: Question,
        value: u64,
        without: &[Rank],
        deadline: &Deadline,
    ) -> Result<Agreed, Fault> {
        let left = deadline.left();
        let mut all = self.councils.lock();
        let chamber = all.chambers.get_mut(&group).ok_or_else(unknown)?;
        for (known, member) in chamber.roster.iter_mut().zip(members) {
            known.clone_from(&member.peer);
        }
        chamber.look();
        let now = chamber.now();
        let until = left.map_or(Duration::MAX, |left| now.saturating_add(left));
        chamber.council.call(question, value, without, until, now)?;
        self.order(Order::Deliberate);
        loop {
            let chamber = all.chambers.get_mut(&group).ok_or_else(unknown)?;
            let now = chamber.now();
            if let Some(outcome) = chamber.council.take_outcome(question, now) {
                self.order(Order::Deliberate); // the next agreement may have something to say
                return outcome;
            }
            if now > until.saturating_add(SLACK) {
                return Err(Fault::timeout("no agreement, and the helper thread of this rank does not run")
                    .hint("see the log of this rank"));
            }
            all = self.wait_for_change(all);
        }
    }

    /// Tells members on this host where this rank has its room, and waits for theirs. A member that has died meanwhile has
    /// none.
    pub(crate) fn exchange_rooms(
        &self,
        group: u64,
        sequence: u32,
        own: u64,
        others: &[Rank],
        deadline: &Deadline,
    ) -> Result<Vec<Option<u64>>, Fault> {
        let mut all = self.councils.lock();
        let chamber = all.chambers.get(&group).ok_or_else(unknown)?;
        let to = others.iter().filter_map(|rank| chamber.roster[*rank].clone()).collect();
        let frame = ControlFrame::Room { group, sequence, offset: own };
        self.order(Order::Send(vec![(to, frame)]));
        loop {
            let chamber = all.chambers.get(&group).ok_or_else(unknown)?;
            let is_gone = |rank: &Rank| {
                let peer = chamber.roster[*rank].as_ref();
                peer.is_none_or(|peer| peer.fate().is_some() || peer.is_thread() && peer.thread().is_none())
            };
            let room = |rank: &Rank| chamber.council.room(sequence, *rank);
            let missing: Vec<Rank> =
                others.iter().copied().filter(|rank| room(rank).is_none() && !is_gone(rank)).collect();
            if missing.is_empty() {
                return Ok(others.iter().map(room).collect());
            }
            if deadline.passed() {
                let message =
                    format!("{} agreed and then did not say where their memory is", show_ranks(&missing));
                return Err(Fault::new(ErrorKind::Timeout, message).peer(missing[0]).hint("call again"));
            }
            all = self.wait_for_change(all);
        }
    }

    fn wait_for_change<'a>(&self, all: std::sync::MutexGuard<'a, All>) -> std::sync::MutexGuard<'a, All> {
        let waited = self.councils.changed.wait_timeout(all, LOOK);
        waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

#[cold]
fn unknown() -> Fault {
    Fault::new(ErrorKind::Closed, "this rank has left the group")
}
