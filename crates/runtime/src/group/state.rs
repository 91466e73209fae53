//! A group as the engine sees it: what is under way, and what went wrong.
//!
//! Collectives run one after the other, in the order in which they were called, which is the same on all ranks.
//! Point-to-point messages run beside them. When something breaks, everything under way fails with the same cause, the
//! other members are told, and the group refuses further calls.
//!
//! `state/lookout.rs` looks for ranks that live and do not come.

mod lookout;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tenfold_memory::{Doing, Head, Lane};
use tenfold_plan::Rank;

use super::arrivals::Arrivals;
use super::detail::{Detail, Details};
use super::inquest::{Inquest, Ranks, Testimony};
use super::planner::Planner;
use super::point_to_point::PointToPoint;
use super::stuck::{self, Told};
use crate::fabric::{Fabric, Fate, GroupProgress, Peer};
use crate::fault::{Error, ErrorKind, Fault, show_duration, show_ranks};
use crate::label::{Label, Roots, differ_in_earlier_roots};
use crate::recorder::{self, GroupRecord, Stalls, Waited};
use crate::run::{Buffers, Run};
use crate::transport::mesh::{Lost, Member, Mesh, Remains};
use crate::transport::{Socket, Wants};
use crate::wire::{ControlFrame, FabricId};
use crate::work::{Shared, earlier};

/// Calls that are remembered, so that a rank can still say what it called when others find out that they differ.
const HISTORY: usize = 64;

/// In groups up to this size, ranks that disagree find a way to everybody; in larger ones word is passed on.
const DIALLED_MAX: usize = 64;

/// Ranks whose last deeds an error tells.
const EVIDENCE: usize = 4;

/// How long after a connection broke the control stream may take to tell what became of its peer.
const NEWS: Duration = Duration::from_secs(1);

/// How long after a rank left its last words may take.
const WORD: Duration = Duration::from_millis(200);

/// Turns of polling a short operation before it is looked whether a peer sleeps.
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

/// What members of a group tell each other when something is wrong.
#[derive(Clone, Debug, Serialize, Deserialize)]
enum Notice {
    /// The sender's group failed, and why.
    Failed { rank: Rank, kind: ErrorKind, peer: Option<Rank>, message: String, hint: Option<String> },
    /// Calls differ: what the sender called as number `seq`, if it has called that yet.
    Called {
        rank: Rank,
        seq: u64,
        head: Option<Head>,
        /// At debug level DETAIL.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        detail: Option<Detail>,
        /// The rank in whose memory or message the sender saw another call.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        saw: Option<Rank>,
        /// The ranks to which this is sent.
        #[serde(default)]
        told: Ranks,
    },
    /// The sender left the group.
    Left { rank: Rank },
    /// The sender waits in the operation `head` for ranks that live and have not entered it: their current and last operations.
    Stuck { rank: Rank, head: Head, waited_ms: u64, late: Vec<(Rank, Head, Head)> },
}

impl From<Testimony> for Notice {
    fn from(Testimony { rank, seq, head, detail, saw, told }: Testimony) -> Self {
        Notice::Called { rank, seq, head, detail, saw, told }
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
    inquest: Option<Inquest>,
    /// What others said that they called, before this rank has come that far.
    rumours: Vec<Testimony>,
    /// Who left the group, and when we heard of it.
    left: Vec<(Rank, Instant)>,
    /// A connection that broke, with whom and when, until it is known what became of that rank.
    broken: Option<Broken>,
    /// It has more ranks on this host than there are cores.
    pub(crate) is_crowded: bool,
}

/// A connection that broke although its peer seems to live.
#[derive(Debug)]
struct Broken {
    rank: Rank,
    fault: Fault,
    since: Instant,
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
            inquest: None,
            rumours: Vec::new(),
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

    /// What the log is to be told.
    pub(crate) fn take_warnings(&mut self) -> Vec<String> {
        std::mem::take(&mut self.warnings)
    }

    /// Is anything under way?
    #[inline]
    pub(crate) fn is_busy(&self) -> bool {
        !self.queue.is_empty() || self.messages.is_busy() || self.inquest.is_some()
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

    /// Is a collective that is called now begun at once?
    #[inline]
    pub(super) fn begins_next(&self) -> bool {
        self.queue.is_empty()
    }

    pub(super) fn members(&self) -> &[Member] {
        self.mesh.members()
    }

    /// Everything under way ends with `fault`; nobody is told.
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

    /// Are there doubts about the next call, because others disagree about theirs?
    #[inline]
    pub(crate) fn is_doubtful(&self) -> bool {
        !self.rumours.is_empty() || self.inquest.is_some()
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
            match run.poll(&mut self.mesh.lane(Lane::Collective)) {
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
        if !self.rumours.is_empty() {
            self.consider_rumours(fabric);
        }
        if let Some(inquest) = &self.inquest
            && self.queue.front().is_none_or(|job| job.run.label().seq >= inquest.seq())
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
            let pending = job.run.poll(&mut self.mesh.lane(Lane::Collective))?.is_pending();
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

    /// Something went wrong while polling.
    #[cold]
    fn trouble(&mut self, fabric: &Arc<Fabric>, fault: Fault, finished: &mut Vec<Arc<Shared>>) {
        if self.mesh.withdrawn.is_some() {
            return;
        }
        if let Some((peer, head)) = self.mesh.stray.take() {
            return self.start_inquest(fabric, peer, head);
        }
        let peer = fault.peer.and_then(|rank| Some((rank, self.mesh.members()[rank].peer.clone()?)));
        if let Some((rank, _)) = peer
            && fault.kind == ErrorKind::PeerLost
        {
            // The first sign of a death, of a departure, or of trouble in the network: the control stream knows which.
            self.broken = Some(Broken { rank, fault, since: now() });
            self.check_broken(fabric, now(), finished);
            return;
        }
        self.fail(fabric, fault, finished);
    }

    /// A connection broke: says why, if that is known, or if it should be by now. True if something changed.
    #[cold]
    fn check_broken(&mut self, fabric: &Arc<Fabric>, now: Instant, finished: &mut Vec<Arc<Shared>>) -> bool {
        let Some(Broken { rank, fault, since }) = &self.broken else { return false };
        let Some(peer) = &self.mesh.members()[*rank].peer else { return false };
        let waited = now.saturating_duration_since(*since);
        let fault = match peer.fate() {
            // A rank that left because its group failed has said so before, maybe on a stream that is a little later.
            Some(Fate::Left) if waited < WORD => return false,
            Some(fate @ Fate::Left) => {
                let own = self.timed_out(&self.wants());
                own.unwrap_or_else(|| fate.fault(*rank, peer))
            }
            Some(fate) => fate.fault(*rank, peer),
            None if waited < NEWS => return false,
            None => {
                let reason = fault.message.rsplit_once("broke: ").map_or("", |(_, reason)| reason);
                let message = format!("the connection with rank {rank} ({peer}) broke: {reason}");
                let hint = "that rank is alive; check the network between the hosts, firewalls, and limits of open files";
                Fault { message, ..fault.clone() }.hint(hint)
            }
        };
        self.fail(fabric, fault, finished);
        true
    }

    /// Looks for what polling cannot see; true if something changed.
    pub(crate) fn check(
        &mut self,
        fabric: &Arc<Fabric>,
        now: Instant,
        finished: &mut Vec<Arc<Shared>>,
    ) -> bool {
        if let Some(inquest) = &self.inquest {
            if !inquest.is_over(now) {
                return self.poll(fabric, finished);
            }
            let verdict = inquest.verdict();
            self.inquest = None;
            self.fail(fabric, verdict, finished);
            return true;
        }
        if self.broken.is_some() {
            return self.check_broken(fabric, now, finished);
        }
        let wants = self.wants();
        if self.lost_among(&wants, now).is_some() {
            // What it said before it went still counts: what it sent, and that it has read what it was sent.
            let moved = self.poll(fabric, finished);
            if moved || self.broken.is_some() {
                return moved;
            }
            let wants = self.wants();
            let Some(Lost { fault, has_left }) = self.lost_among(&wants, now) else { return false };
            // Ranks whose time is up leave one after the other; the cause is who was missing, not who left first.
            let own = if has_left { self.timed_out(&wants) } else { None };
            self.fail(fabric, own.unwrap_or(fault), finished);
            return true;
        }
        if let Some(job) = self.queue.front() {
            let head = job.run.label().head();
            if let Some((peer, theirs)) = self.mesh.find_stray(&head) {
                self.start_inquest(fabric, peer, theirs);
                return true;
            }
        }
        if let Some(fault) = self.timed_out(&wants) {
            self.fail(fabric, fault, finished);
            return true;
        }
        false
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

    fn lost_among(&mut self, wants: &Wants, now: Instant) -> Option<Lost> {
        if let Some(lost) = self.mesh.lost_among(wants, now) {
            return Some(lost);
        }
        let mesh = &mut self.mesh;
        let (gone, _) = self.left.iter().find(|(gone, when)| {
            let is_settled =
                mesh.members()[*gone].near || now.saturating_duration_since(*when) > Fate::Left.grace();
            let is_awaited = wants.room.contains(gone)
                || wants.messages.contains(gone) && !(is_settled && mesh.is_arriving(*gone, now));
            is_settled && is_awaited
        })?;
        let peer = self.mesh.members()[*gone].peer.as_ref()?;
        Some(Lost { fault: Fate::Left.fault(*gone, peer), has_left: true })
    }

    /// The time of an operation is up: says who is waited for, and what they did last.
    fn timed_out(&self, wants: &Wants) -> Option<Fault> {
        let late = self.works().find(|work| work.deadline().passed())?;
        let mut waited: Vec<Rank> = wants.messages.iter().chain(&wants.room).copied().collect();
        if wants.flush {
            waited.extend(self.mesh.unread());
        }
        waited.sort_unstable();
        waited.dedup();
        let time = show_duration(late.deadline().elapsed());
        let message = match waited.as_slice() {
            [] => format!("not done after {time}"),
            [one] => format!("{} did not answer for {time}", self.introduce(*one)),
            many => format!("{} did not answer for {time}", show_ranks(many)),
        };
        let mut fault = Fault::new(ErrorKind::Timeout, message).hint(self.evidence(&waited));
        fault.peer = waited.first().copied();
        Some(fault)
    }

    /// As in `rank 3 (host node-b, pid 4711)`: for errors, which name the group and speak of its ranks.
    pub(super) fn introduce(&self, rank: Rank) -> String {
        match &self.mesh.members()[rank].peer {
            Some(peer) => format!("rank {rank} ({peer})"),
            None => format!("rank {rank}"),
        }
    }

    /// What the ranks that are waited for did last.
    fn evidence(&self, waited: &[Rank]) -> String {
        let mut facts: Vec<String> = Vec::new();
        for &rank in waited.iter().take(EVIDENCE) {
            let doing = self.mesh.doing(rank).unwrap_or_default();
            facts.push(stuck::deed(rank, &doing));
        }
        facts.extend(self.messages.obstacle());
        facts.push("see its log, or raise `timeout`".to_string());
        facts.join("; ")
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

    /// Tells the peers that are waited for that this rank sleeps; until when at most.
    pub(crate) fn prepare_to_sleep(&mut self, sockets: &mut Vec<(Socket, bool)>) -> Option<Instant> {
        let mut until = self.inquest.as_ref().map(Inquest::until);
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

    /// Everything under way ends with `fault`, and the other members are told.
    pub(crate) fn fail(&mut self, fabric: &Arc<Fabric>, fault: Fault, finished: &mut Vec<Arc<Shared>>) {
        if self.failed.is_some() {
            return;
        }
        tracing::info!("group `{}` failed: {}", self.name, fault.message);
        // Expected before anybody can see the failure, and written after everything knows its fate.
        let dump = recorder::expect_dump(&self.record, &fault);
        self.close(fault, finished);
        if let Some(dump) = dump {
            dump.write();
        }
        if let Some(text) = self.notice() {
            fabric.tell(self.peers(), self.id, text);
        }
    }

    pub(crate) fn abort(&mut self, fabric: &Arc<Fabric>, reason: &str, finished: &mut Vec<Arc<Shared>>) {
        let message = format!("{} aborted the group: {reason}", self.introduce(self.rank));
        self.fail(fabric, Fault::new(ErrorKind::Aborted, message).peer(self.rank), finished);
    }

    pub(crate) fn peers(&self) -> Vec<Arc<Peer>> {
        self.mesh.members().iter().filter_map(|member| member.peer.clone()).collect()
    }

    /// What a process should know that we have just met: nothing if it is in another group.
    pub(crate) fn notices(&mut self, to: FabricId) -> Vec<Vec<u8>> {
        let is_it = |member: &Member| member.peer.as_ref().is_some_and(|peer| peer.id() == to);
        let Some(rank) = self.mesh.members().iter().position(is_it) else { return Vec::new() };
        match (self.notice(), &mut self.inquest) {
            (Some(failed), _) => vec![failed],
            (None, None) => Vec::new(),
            (None, Some(inquest)) => {
                inquest.testimony_for(rank).into_iter().map(|said| encode(&said.into())).collect()
            }
        }
    }

    /// Members with whom there is a way.
    fn connected(&self) -> impl Iterator<Item = Rank> {
        let is_connected = |peer: &Arc<Peer>| peer.is_met() && peer.fate().is_none();
        let members = self.mesh.members().iter().enumerate();
        members
            .filter(move |(_, member)| member.peer.as_ref().is_some_and(is_connected))
            .map(|(rank, _)| rank)
    }

    /// What to tell members about why the group failed.
    fn notice(&self) -> Option<Vec<u8>> {
        let Fault { kind, peer, message, hint, .. } = self.failed.clone()?;
        let seen =
            matches!(kind, ErrorKind::Timeout | ErrorKind::PeerSilent) && !message.contains("(seen by rank");
        let message = if seen { format!("{message} (seen by rank {})", self.rank) } else { message };
        Some(encode(&Notice::Failed { rank: self.rank, kind, peer, message, hint }))
    }

    /// What members still have to read.
    pub(super) fn into_remains(self) -> Option<Remains> {
        self.mesh.into_remains()
    }

    /// The last thing that members hear of this rank.
    pub(crate) fn say_goodbye(&self, fabric: &Arc<Fabric>) {
        fabric.tell(self.peers(), self.id, encode(&Notice::Left { rank: self.rank }));
    }

    /// Is this the process of another member?
    pub(crate) fn has_member(&self, id: FabricId) -> bool {
        self.mesh.members().iter().flat_map(|member| &member.peer).any(|peer| peer.id() == id)
    }

    /// A member said something.
    pub(crate) fn hear(&mut self, fabric: &Arc<Fabric>, text: &[u8], finished: &mut Vec<Arc<Shared>>) {
        let size = self.mesh.members().len();
        match serde_json::from_slice(text) {
            Ok(Notice::Failed { rank, kind, peer, message, hint })
                if rank < size && peer.is_none_or(|peer| peer < size) =>
            {
                // Whoever disagrees comes to a verdict of its own, which is the same.
                if self.inquest.is_none() {
                    // It failed there in a call that may be further on: what is complete here has not failed.
                    while matches!(self.try_poll(finished), Ok(true)) {}
                    // A rank whose own time is up says so in its own words.
                    let own = if kind == ErrorKind::Timeout { self.timed_out(&self.wants()) } else { None };
                    self.fail(
                        fabric,
                        own.unwrap_or(Fault { peer, hint, ..Fault::new(kind, message) }),
                        finished,
                    );
                }
            }
            Ok(Notice::Called { rank, seq, head, detail, saw, told })
                if rank < size
                    && saw.is_none_or(|saw| saw < size)
                    && told.fits(size)
                    && self.failed.is_none() =>
            {
                let mut said = Testimony { rank, seq, head, detail: detail.map(Detail::heard), saw, told };
                let known = self.inquest.as_ref().is_some_and(|inquest| inquest.knows(&said))
                    || self.rumours.iter().any(|rumour| rumour.is_same(&said));
                if !known && self.rumours.len() < 4 * size {
                    // Its author may have no way to some ranks to which this rank has one.
                    let to = said.pass_on(self.connected());
                    if !to.is_empty() {
                        let peers = to.iter().filter_map(|rank| self.mesh.members()[*rank].peer.clone());
                        fabric.tell(peers.collect(), self.id, encode(&said.clone().into()));
                    }
                    self.rumours.push(said);
                    self.consider_rumours(fabric);
                }
            }
            Ok(Notice::Called { .. }) => {}
            Ok(Notice::Left { rank }) if rank < size => {
                if self.left.iter().all(|(gone, _)| *gone != rank) {
                    self.left.push((rank, now()));
                }
            }
            Ok(Notice::Stuck { rank, head, waited_ms, late })
                if rank < size && late.iter().all(|(rank, ..)| *rank < size) =>
            {
                let late: Vec<_> = late
                    .into_iter()
                    .map(|(rank, current, finished)| (rank, Doing { current, finished, since: [0; 2] }))
                    .collect();
                self.hear_of_stuck(fabric, &head, Duration::from_millis(waited_ms), &late, text);
            }
            _ => {
                let warning =
                    format!("a member of group `{}` sent a notice that makes no sense; ignored", self.name);
                self.warnings.push(warning);
            }
        }
    }

    /// `peer` called something else than we did: everybody says what they called.
    fn start_inquest(&mut self, fabric: &Arc<Fabric>, peer: Rank, head: Head) {
        let seq = head[1].min(self.doing.current[1]);
        let seq = self.earlier_root(seq, &head).unwrap_or(seq);
        self.join_inquest(fabric, seq, Some(peer));
        if let Some(inquest) = &mut self.inquest
            && head[1] == inquest.seq()
        {
            inquest.deduce(peer, head);
        }
    }

    /// If a peer made the same call as this rank but named another root before: the last call with a root.
    fn earlier_root(&self, seq: u64, theirs: &Head) -> Option<u64> {
        let own = self.history.iter().find(|head| head[1] == seq)?;
        let is_rooted = |head: &Head| Label::from_head(head).is_some_and(|label| label.root_of().is_some());
        let mut before = self.history.iter().rev().filter(|head| head[1] < seq);
        let rooted = before.find(|head| is_rooted(head))?;
        differ_in_earlier_roots(own, theirs).then_some(rooted[1])
    }

    /// Others disagree about a call. If this rank has made it, it says what it called; if not, it first goes on.
    fn consider_rumours(&mut self, fabric: &Arc<Fabric>) {
        let Some(seq) = self.rumours.iter().map(|said| said.seq).min() else { return };
        if seq > self.collectives {
            return;
        }
        self.join_inquest(fabric, seq, None);
        let rumours = std::mem::take(&mut self.rumours);
        if let Some(inquest) = &mut self.inquest {
            rumours.into_iter().for_each(|said| inquest.testify(said));
        }
    }

    fn join_inquest(&mut self, fabric: &Arc<Fabric>, seq: u64, saw: Option<Rank>) {
        if self.inquest.is_some() {
            return;
        }
        let head = self.history.iter().find(|head| head[1] == seq).copied();
        let (detail, told) = (self.details.of(seq).cloned(), Ranks::default());
        let mut own = Testimony { rank: self.rank, seq, head, detail, saw, told };
        let members = self.mesh.members();
        if members.len() <= DIALLED_MAX {
            // A peer that is met later hears of it then.
            members.iter().filter_map(|member| member.peer.as_ref()).for_each(|peer| fabric.dial(peer));
            let is_told = |member: &Member| member.peer.as_ref().is_some_and(|peer| peer.fate().is_none());
            own.pass_on(
                members.iter().enumerate().filter(|(_, member)| is_told(member)).map(|(rank, _)| rank),
            );
        } else {
            own.pass_on(self.connected());
        }
        let mut inquest = Inquest::new(seq, self.rank, members.len());
        inquest.testify(own.clone());
        self.inquest = Some(inquest);
        fabric.tell(self.peers(), self.id, encode(&own.into()));
    }
}

#[expect(clippy::disallowed_methods, reason = "a notice is heard at some time")]
fn now() -> Instant {
    Instant::now()
}

/// A notice as bytes that one control frame holds: a text that is too long is cut, and says so.
fn encode(notice: &Notice) -> Vec<u8> {
    let bytes = |notice: &Notice| serde_json::to_vec(notice).expect("a notice is plain data");
    let mut encoded = bytes(notice);
    let mut shorter = notice.clone();
    let mut longest = ControlFrame::TEXT_MAX;
    while encoded.len() > ControlFrame::TEXT_MAX && longest > 0 {
        longest /= 2; // a character may take several bytes in JSON
        match &mut shorter {
            Notice::Failed { message, hint, .. } => {
                cut(message, longest);
                hint.iter_mut().for_each(|hint| cut(hint, longest));
            }
            Notice::Called { detail, .. } => *detail = None,
            Notice::Stuck { .. } | Notice::Left { .. } => {} // never long: see `STUCK_TOLD`
        }
        encoded = bytes(&shorter);
    }
    encoded
}

fn cut(text: &mut String, longest: usize) {
    if text.len() > longest {
        let end = (0..=longest).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
        text.truncate(end);
        text.push_str(" … (cut)");
    }
}
