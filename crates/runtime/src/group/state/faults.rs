//! What can go wrong in a group, and how it is detected: broken connections, lost peers, mismatches and timeouts.

#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::{Duration, Instant};

use tenfold_memory::Doing;
use tenfold_plan::Rank;

use super::super::trouble::stuck;
use super::{GroupState, now};
use crate::fabric::{Fabric, Fate};
use crate::fault::{ErrorKind, Fault, show_duration, show_ranks};
use crate::transport::Wants;
use crate::transport::mesh::Lost;
use crate::work::Shared;

/// Ranks whose last deeds an error tells.
const EVIDENCE: usize = 4;

/// How long after a connection broke the control stream may take to tell what became of its peer.
pub(super) const NEWS: Duration = Duration::from_secs(1);

/// How long after a rank left its last words may take.
const WORD: Duration = Duration::from_millis(200);

/// A connection that broke although its peer seems to live.
#[derive(Debug)]
pub(super) struct Broken {
    pub rank: Rank,
    pub fault: Fault,
    pub since: Instant,
}

impl GroupState {
    /// Something went wrong while polling.
    #[cold]
    pub(super) fn trouble(&mut self, fabric: &Arc<Fabric>, fault: Fault, finished: &mut Vec<Arc<Shared>>) {
        if self.mesh.withdrawn.is_some() {
            return;
        }
        if let Some((peer, head)) = self.mesh.stray.take() {
            return self.start_comparison(fabric, peer, head);
        }
        let peer = fault.peer.and_then(|rank| Some((rank, self.mesh.members()[rank].peer.clone()?)));
        if let Some((rank, _)) = peer
            && fault.kind == ErrorKind::PeerLost
        {
            // The first sign of a death, of a departure, or of trouble in the network: the control stream knows which.
            let since = now();
            self.broken = Some(Broken { rank, fault, since });
            self.check_broken(fabric, since, finished);
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
        if let Some(comparison) = &self.comparison {
            if !comparison.is_over(now) {
                return self.poll(fabric, finished);
            }
            let conclusion = comparison.conclusion();
            self.comparison = None;
            self.fail(fabric, conclusion, finished);
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
            // Ranks that timed out leave one after the other. The cause is the rank that was missing, not the one that left first.
            let own = if has_left { self.timed_out(&wants) } else { None };
            self.fail(fabric, own.unwrap_or(fault), finished);
            return true;
        }
        if let Some(job) = self.queue.front() {
            let head = job.run.label().head();
            if let Some((peer, theirs)) = self.mesh.find_stray(&head) {
                self.start_comparison(fabric, peer, theirs);
                return true;
            }
        }
        if let Some(fault) = self.timed_out(&wants) {
            self.fail(fabric, fault, finished);
            return true;
        }
        false
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
    pub(super) fn timed_out(&self, wants: &Wants) -> Option<Fault> {
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
            match self.mesh.doing(rank) {
                Some(doing) => facts.push(stuck::deed(rank, &doing)),
                None if self.mesh.members()[rank].near => facts.push(stuck::deed(rank, &Doing::default())),
                None => {} // a rank on another host that has not said it, or not lately
            }
        }
        facts.extend(self.messages.obstacle());
        facts.push("see its log, or raise `timeout`".to_string());
        facts.join("; ")
    }
}
