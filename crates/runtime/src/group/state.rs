//! A group as the engine sees it: what is under way, and what went wrong.
//!
//! Collectives run one after the other, in the order in which they were called, which is the same on all ranks.
//! Point-to-point messages run beside them. When something breaks, all pending operations fail with the same cause, the
//! failure is reported to the other ranks, and the group refuses further calls.
//!
//! `state/faults.rs` finds out what went wrong, `state/mismatch.rs` deals with ranks that called different operations,
//! `state/notices.rs` has what ranks tell each other about both, and `state/lookout.rs` looks for ranks that are alive but have not
//! entered a collective.

mod faults;
mod lookout;
mod mismatch;
mod notices;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::task::Poll;
use std::time::Instant;

use tenfold_memory::{Doing, Head};
use tenfold_plan::Rank;

use super::planner::Planner;
use super::point_to_point::PointToPoint;
use super::trouble::arrivals::Arrivals;
use super::trouble::comparison::{CallReport, Comparison};
use super::trouble::detail::{Detail, Details};
use super::trouble::stuck::Told;
use crate::fabric::{Fabric, GroupProgress, Peer};
use crate::fault::{Error, ErrorKind, Fault};
use crate::label::{Label, Roots};
use crate::recorder::{self, GroupRecord, Stalls, Waited};
use crate::run::{Buffers, Run};
use crate::transport::mesh::{Member, Mesh, Remains};
use crate::transport::{Socket, Wants};
use crate::wire::FabricId;
use crate::work::{Shared, earlier};
use faults::{Broken, NEWS};

/// Calls that are remembered, so that a rank can still say what it called when others find out that they differ.
const HISTORY: usize = 64;

/// How often a short operation is polled before this rank checks whether a peer sleeps.
const LOOK_AFTER: u32 = 16;

/// What to do with the memory of a finished operation before its work is done.
pub(crate) type Finish = Box<dyn FnOnce(Buffers) + Send>;

/// A collective that was called.
pub(crate) struct Job {
    pub run: Run,
    pub work: Arc<Shared>,
    pub finish: Option<Finish>,
    pub stalls: Stalls,
}

impl std::fmt::Debug for Job {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Job({:?})", self.work)
    }
}

#[derive(Debug)]
pub(crate) struct GroupState {
    id: u64,
    name: Arc<str>,
    rank: Rank,
    pub(super) mesh: Mesh,
    queue: VecDeque<Job>,
    pub(super) messages: PointToPoint,
    pub(super) planner: Planner,
    pub(crate) record: Arc<GroupRecord>,
    /// Collectives and messages that were called.
    calls: u64,
    collectives: u64,
    /// Of the collectives.
    pub(super) roots: Roots,
    doing: Doing,
    arrivals: Arrivals,
    /// What was said about ranks that keep others waiting.
    stuck: Told,
    /// For the log, once the engine's lock is free.
    warnings: Vec<String>,
    /// Heads of the last calls.
    history: VecDeque<Head>,
    /// What they told of themselves, at debug level DETAIL.
    details: Details,
    failed: Option<Fault>,
    comparison: Option<Comparison>,
    /// What others said that they called, before this rank has come that far.
    early_reports: Vec<CallReport>,
    /// Who left the group, and when we heard of it.
    left: Vec<(Rank, Instant)>,
    /// A connection that broke, with its peer and when, until it is known what happened to that rank.
    broken: Option<Broken>,
    /// It has more ranks on this host than there are cores.
    pub(crate) is_crowded: bool,
}

impl GroupState {
    pub(crate) fn new(
        id: u64,
        name: Arc<str>,
        rank: Rank,
        mesh: Mesh,
        planner: Planner,
        record: Arc<GroupRecord>,
    ) -> Box<Self> {
        let size = mesh.members().len();
        Box::new(GroupState {
            id,
            name,
            rank,
            mesh,
            queue: VecDeque::new(),
            messages: PointToPoint::new(rank, size),
            planner,
            record,
            calls: 0,
            collectives: 0,
            roots: Roots::default(),
            doing: Doing::default(),
            arrivals: Arrivals::new(size),
            stuck: Told::default(),
            warnings: Vec::new(),
            history: VecDeque::new(),
            details: Details::default(),
            failed: None,
            comparison: None,
            early_reports: Vec::new(),
            left: Vec::new(),
            broken: None,
            is_crowded: false,
        })
    }

    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    pub(crate) fn doing(&self) -> &Doing {
        &self.doing
    }

    pub(crate) fn progress(&self) -> GroupProgress {
        let (name, size) = (Arc::clone(&self.name), self.mesh.members().len());
        let stuck = self.stuck.report.clone();
        let late = self.record.metrics.recent_lateness(self.rank);
        GroupProgress { id: self.id, name, rank: self.rank, size, doing: self.doing, stuck, late }
    }

    /// Adds up what members have called and finished, as far as it can be seen.
    pub(crate) fn count_calls(&self, calls: &mut HashMap<FabricId, u64>) {
        for (rank, member) in self.mesh.members().iter().enumerate() {
            if let (Some(peer), Some(doing)) = (&member.peer, self.mesh.doing(rank)) {
                let count = calls.entry(peer.id()).or_default();
                *count = count.wrapping_add(doing.current[1]).wrapping_add(doing.finished[1]);
            }
        }
    }

    /// Takes the lines that are to be written into the log.
    pub(crate) fn take_warnings(&mut self) -> Vec<String> {
        std::mem::take(&mut self.warnings)
    }

    /// Is anything under way?
    #[inline]
    pub(crate) fn is_busy(&self) -> bool {
        !self.queue.is_empty() || self.messages.is_busy() || self.comparison.is_some()
    }

    /// Why the group can no longer be used, if so.
    #[inline]
    pub(crate) fn failed(&self) -> Option<&Fault> {
        self.failed.as_ref()
    }

    pub(crate) fn sequence_number(&self) -> u64 {
        self.calls
    }

    /// The number of the next collective: the same on all ranks, whatever messages they sent meanwhile.
    #[inline]
    pub(super) fn next_sequence_number(&mut self) -> u64 {
        self.calls += 1;
        self.collectives += 1;
        self.collectives
    }

    pub(super) fn next_message_number(&mut self) -> u64 {
        self.calls += 1;
        self.calls
    }

    /// Collectives that were called, and messages.
    #[inline]
    pub(super) fn counts(&self) -> (u64, u64) {
        (self.collectives, self.calls - self.collectives)
    }

    /// Would a collective that is called now begin immediately?
    #[inline]
    pub(super) fn begins_next(&self) -> bool {
        self.queue.is_empty()
    }

    pub(super) fn members(&self) -> &[Member] {
        self.mesh.members()
    }

    /// All pending operations fail with `fault`. Does not report it to other ranks.
    pub(super) fn close(&mut self, fault: Fault, finished: &mut Vec<Arc<Shared>>) {
        self.mesh.withdraw(); // before the caller can write to what peers may still read
        for (index, job) in self.queue.drain(..).enumerate() {
            let progress = if index == 0 { job.run.progress() } else { "not begun".to_string() };
            let error = Error::new(job.work.scene(Some(progress)), fault.clone());
            drop(job.run);
            if job.work.finish(Err(error), job.stalls.total()) {
                finished.push(job.work);
            }
        }
        self.messages.fail(&fault, finished);
        self.failed = Some(fault);
    }

    pub(crate) fn has(&self, work: &Shared) -> bool {
        self.works().any(|other| std::ptr::eq(&**other, work))
    }

    /// A collective was called, at `now`.
    #[inline]
    pub(crate) fn remember(&mut self, label: &Label, now: u64) {
        if self.history.len() == HISTORY {
            self.history.pop_front();
        }
        self.history.push_back(label.head());
        if self.queue.is_empty() {
            self.begin(label, now);
            self.mesh.show(&self.doing);
        }
    }

    /// A collective is begun: nothing is before it.
    #[inline]
    fn begin(&mut self, label: &Label, now: u64) {
        (self.doing.current, self.doing.since) = (label.head(), [now, self.doing.since[0]]);
        self.arrivals.begin(label.seq, label.kind, now);
    }

    /// What the collective with this number tells of itself.
    pub(super) fn keep_detail(&mut self, seq: u64, detail: &Arc<Detail>) {
        self.details.keep(seq, Arc::clone(detail), HISTORY);
    }

    /// Polls a collective that is the only one under way and not in the queue, a few times: most short ones are over
    /// before it is worth making a note of them. If it is over: for how long it had to wait.
    #[inline]
    pub(crate) fn try_at_once(
        &mut self,
        run: &mut Run,
        turns: u32,
        give_way: impl Fn() -> bool,
    ) -> Option<Waited> {
        let mut over = None;
        for turn in 0..turns {
            match run.poll(&mut self.mesh) {
                Ok(Poll::Ready(())) => {
                    self.doing.finished = run.label().head();
                    self.mesh.show(&self.doing);
                    over = Some(if turn == 0 { Waited::Nanoseconds(0) } else { Waited::All });
                    break;
                }
                Ok(Poll::Pending) if !give_way() => std::hint::spin_loop(),
                // What went wrong goes wrong again when it is polled in the queue.
                _ => break,
            }
            // A peer that is awake has mostly answered by now; one that sleeps must be woken.
            if turn == LOOK_AFTER {
                self.mesh.wake_sleepers();
            }
        }
        self.mesh.wake_sleepers();
        over
    }

    /// Puts a collective into the queue.
    pub(crate) fn enqueue(&mut self, job: Job) {
        self.queue.push_back(job);
    }

    /// Goes as far as possible; true if anything moved.
    #[inline]
    pub(crate) fn poll(&mut self, fabric: &Arc<Fabric>, finished: &mut Vec<Arc<Shared>>) -> bool {
        if !self.early_reports.is_empty() {
            self.consider_early_reports(fabric);
        }
        if let Some(comparison) = &self.comparison
            && self.queue.front().is_none_or(|job| job.run.label().seq >= comparison.seq())
        {
            return false; // what came before the call in question is still done
        }
        if self.broken.is_some() {
            return false; // `check` finds out what became of the peer
        }
        let polled = self.try_poll(finished);
        self.mesh.wake_sleepers();
        match polled {
            Ok(moved) => moved,
            Err(fault) => {
                self.trouble(fabric, fault, finished);
                self.broken.is_none()
            }
        }
    }

    #[inline]
    fn try_poll(&mut self, finished: &mut Vec<Arc<Shared>>) -> Result<bool, Fault> {
        let mut moved = false;
        if self.mesh.withdrawn.is_some() {
            return Ok(false); // what was read does not count; the peer that withdrew it says why, or is found to be gone
        }
        while let Some(job) = self.queue.front_mut() {
            let before = job.run.position();
            let pending = job.run.poll(&mut self.mesh)?.is_pending();
            let advanced = !pending || job.run.position() != before;
            job.stalls.polled(advanced, pending);
            if pending {
                moved |= advanced;
                self.mesh.pump()?;
                break;
            }
            moved = true;
            self.finish_first(finished);
        }
        if self.messages.is_busy() {
            moved |= self.messages.poll(&mut self.mesh, finished)?;
            self.mesh.pump()?; // the sender may wait for credit, and no collective write it
        }
        Ok(moved)
    }

    fn finish_first(&mut self, finished: &mut Vec<Arc<Shared>>) {
        let Some(job) = self.queue.pop_front() else { return };
        self.doing.finished = job.run.label().head();
        if let Some(next) = self.queue.front() {
            let label = *next.run.label();
            self.begin(&label, recorder::host_now());
        }
        self.mesh.show(&self.doing);
        // The tensors are the caller's again before the work is done.
        let buffers = job.run.into_buffers();
        match job.finish {
            Some(finish) => finish(buffers),
            None => drop(buffers),
        }
        if job.work.finish(Ok(()), job.stalls.total()) {
            finished.push(job.work);
        }
        if let Some(next) = self.queue.front() {
            next.work.begin_next();
        }
    }

    fn wants(&self) -> Wants {
        let mut wants = Wants::default();
        if let Some(job) = self.queue.front() {
            job.run.wants(&mut wants);
        }
        self.messages.wants(&mut wants);
        wants.messages.extend(self.mesh.withdrawn);
        wants
    }

    pub(super) fn works(&self) -> impl Iterator<Item = &Arc<Shared>> {
        self.queue.iter().map(|job| &job.work).chain(self.messages.works())
    }

    /// As in ``rank 3 of group `default`; all_reduce(…) #812 waits for it``.
    pub(crate) fn waiting_for(&self, id: FabricId) -> Option<String> {
        let wants = self.wants();
        let is_it =
            |rank: &Rank| self.mesh.members()[*rank].peer.as_ref().is_some_and(|peer| peer.id() == id);
        let rank = wants.messages.iter().chain(&wants.room).find(|rank| is_it(rank))?;
        let work = self.works().next()?;
        Some(format!("rank {rank} of group `{}`; {work:?} waits for it", self.name))
    }

    /// Adds the members on other hosts that an operation waits for.
    pub(crate) fn add_awaited(&self, awaited: &mut HashSet<FabricId>) {
        if !self.is_busy() {
            return;
        }
        let wants = self.wants();
        let ranks = wants.messages.iter().chain(&wants.room).chain(&wants.any_of);
        let members = ranks.map(|rank| &self.mesh.members()[*rank]).filter(|member| !member.near);
        awaited.extend(members.filter_map(|member| Some(member.peer.as_ref()?.id())));
    }

    /// Tells the peers that are waited for that this rank sleeps; until when at most.
    pub(crate) fn prepare_to_sleep(&mut self, sockets: &mut Vec<(Socket, bool)>) -> Option<Instant> {
        let mut until = self.comparison.as_ref().map(Comparison::until);
        match &self.broken {
            // Its socket would be no sleep.
            Some(Broken { since, .. }) => until = earlier(until, Some(*since + NEWS)),
            None => {
                let wants = self.wants();
                self.mesh.prepare_to_sleep(&wants, sockets);
            }
        }
        self.works().fold(until, |first, work| earlier(first, work.deadline().at()))
    }

    pub(crate) fn wake_up(&mut self) {
        self.mesh.wake_up();
    }

    /// All pending operations fail with `fault`, which is reported to the other ranks.
    pub(crate) fn fail(&mut self, fabric: &Arc<Fabric>, fault: Fault, finished: &mut Vec<Arc<Shared>>) {
        if self.failed.is_some() {
            return;
        }
        tracing::info!("group `{}` failed: {}", self.name, fault.message);
        // Expected before any thread can see the failure, and written when the outcome of all operations is known.
        let dump = recorder::expect_dump(&self.record, &fault);
        self.close(fault, finished);
        if let Some(dump) = dump {
            dump.write();
        }
        if let Some(text) = self.notice() {
            fabric.tell(self.peers(), self.id, text);
        }
    }

    /// This rank goes on elsewhere: what is complete on others stays complete there.
    pub(crate) fn leave(&mut self, fabric: &Arc<Fabric>, fault: Fault, finished: &mut Vec<Arc<Shared>>) {
        if self.failed.is_none() {
            self.say_goodbye(fabric);
            self.close(fault, finished);
        }
    }

    pub(crate) fn abort(&mut self, fabric: &Arc<Fabric>, reason: &str, finished: &mut Vec<Arc<Shared>>) {
        let message = format!("{} aborted the group: {reason}", self.introduce(self.rank));
        self.fail(fabric, Fault::new(ErrorKind::Aborted, message).peer(self.rank), finished);
    }

    pub(crate) fn peers(&self) -> Vec<Arc<Peer>> {
        self.mesh.members().iter().filter_map(|member| member.peer.clone()).collect()
    }

    /// What members still have to read. `had_failed` says whether the group had before it was closed.
    pub(super) fn into_remains(self, had_failed: bool) -> Option<Remains> {
        self.mesh.into_remains(had_failed)
    }

    /// Is this the process of another member?
    pub(crate) fn has_member(&self, id: FabricId) -> bool {
        self.mesh.members().iter().flat_map(|member| &member.peer).any(|peer| peer.id() == id)
    }
}

#[expect(clippy::disallowed_methods, reason = "a notice is heard at some time")]
fn now() -> Instant {
    Instant::now()
}
