//! Looks for ranks that are alive but have not entered a collective, reports them to the other ranks, and hears their reports.
//! When to report, and the texts, are in `group/trouble/stuck.rs`.

#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use tenfold_memory::{Doing, Head};
use tenfold_plan::Rank;

use super::super::trouble::stuck::{self, StuckPolicy, Waiting};
use super::GroupState;
use super::notices::{Notice, encode};
use crate::fabric::Fabric;
use crate::fault::{ErrorKind, Fault};
use crate::label::{Label, OpKind};
use crate::recorder;
use crate::work::Shared;

/// Ranks that are named to others as stuck.
pub(super) const STUCK_TOLD: usize = 64;

impl GroupState {
    /// Looks at the boards: who came when, and who keeps this rank waiting for too long. Called with every tick.
    pub(crate) fn look_at_others(&mut self, fabric: &Arc<Fabric>, finished: &mut Vec<Arc<Shared>>) {
        if self.failed.is_some() {
            return;
        }
        let others = (0..self.mesh.members().len()).filter(|rank| *rank != self.rank);
        let boards: Vec<(Rank, Doing)> =
            others.filter_map(|rank| Some((rank, self.mesh.doing(rank)?))).collect();
        if let Some(sample) = self.arrivals.sample(self.rank, boards.iter().copied()) {
            self.record.metrics.arrived(&sample, self.mesh.members().len());
        }
        let under_way = self.queue.front().map(|job| job.run.label().seq);
        let (entered, messages) = (self.collectives, &self.messages);
        self.stuck.forget_unless(|what| match what {
            Waiting::Collective(number) => under_way == Some(number) || entered < number,
            Waiting::Message(number) => messages.works().any(|work| work.label().seq == number),
        });
        let Some(limit) = fabric.stuck().after else { return };
        if self.comparison.is_none() && !self.look_for_late(fabric, &boards, limit, finished) {
            self.look_for_partner(fabric, limit, finished);
        }
    }

    /// Ranks that have not entered the collective in which this one waits; true if the group failed.
    fn look_for_late(
        &mut self,
        fabric: &Arc<Fabric>,
        boards: &[(Rank, Doing)],
        limit: Duration,
        finished: &mut Vec<Arc<Shared>>,
    ) -> bool {
        let Some(job) = self.queue.front() else { return false };
        let label = *job.run.label();
        let waited = Duration::from_nanos(recorder::host_now().saturating_sub(self.doing.since[0]));
        let what = Waiting::Collective(label.seq);
        if !self.stuck.is_due(what, waited, limit) {
            return false;
        }
        let lives =
            |rank: Rank| self.mesh.members()[rank].peer.as_ref().is_some_and(|peer| peer.fate().is_none());
        let is_late = |(rank, doing): &&(Rank, Doing)| doing.current[1] < label.seq && lives(*rank);
        let late: Vec<(Rank, Doing)> = boards.iter().filter(is_late).copied().collect();
        let Some((first, _)) = late.first().copied() else { return false };
        let text = self.sentence(&label, &late, waited);
        let told = late.iter().take(STUCK_TOLD).map(|(rank, doing)| (*rank, doing.current, doing.finished));
        let (head, waited_ms) = (label.head(), waited.as_millis() as u64);
        let notice = Notice::Stuck { rank: self.rank, head, waited_ms, late: told.collect() };
        fabric.tell(self.peers(), self.id, encode(&notice));
        self.say_stuck(fabric, what, waited, text, Some(first), finished)
    }

    /// Looks for a message that the peer does not send or does not receive.
    fn look_for_partner(&mut self, fabric: &Arc<Fabric>, limit: Duration, finished: &mut Vec<Arc<Shared>>) {
        let Some((work, peer)) = self.messages.oldest() else { return };
        let (label, waited) = (*work.label(), work.deadline().elapsed());
        let what = Waiting::Message(label.seq);
        if !self.stuck.is_due(what, waited, limit) {
            return;
        }
        let lacks =
            if label.kind == OpKind::Send { "does not receive it" } else { "has sent nothing that matches" };
        let operation =
            format!("{label} #{} of group `{}` waits for {} s", label.seq, self.name, waited.as_secs());
        let text = match peer {
            Some(rank) => {
                let deed = self.mesh.doing(rank).map_or_else(String::new, |doing| {
                    format!("; {}", stuck::deed(self.job_rank(rank), &doing))
                });
                format!("{operation} for {}, which is alive and {lacks}{deed}", self.introduce_to_all(rank))
            }
            None => format!("{operation} for a message of any rank"),
        };
        self.say_stuck(fabric, what, waited, text, peer, finished);
    }

    /// Another rank says who keeps it waiting.
    pub(super) fn hear_of_stuck(
        &mut self,
        fabric: &Arc<Fabric>,
        head: &Head,
        waited: Duration,
        late: &[(Rank, Doing)],
        text: &[u8],
    ) {
        let Some(label) = Label::from_head(head).filter(|_| !late.is_empty() && self.failed.is_none()) else {
            return;
        };
        let what = Waiting::Collective(label.seq);
        let is_over = head[1] <= self.doing.finished[1];
        if is_over || !self.stuck.is_due(what, waited, Duration::ZERO) {
            return;
        }
        // Passed on, since not every rank has a connection to every other.
        fabric.tell(self.peers(), self.id, text.to_vec());
        let itself = late.iter().any(|(rank, _)| *rank == self.rank);
        let words = if itself {
            if self.collectives >= label.seq {
                return; // it has come meanwhile
            }
            stuck::confession(&self.doing, &format!("{label} #{}", label.seq), &self.name, waited)
        } else {
            self.sentence(&label, late, waited)
        };
        let dump = fabric.stuck().policy != StuckPolicy::Warn && !self.stuck.knows(what);
        self.stuck.say(what, waited, itself, &words);
        self.warnings.push(words);
        if dump {
            recorder::dump_for(&self.record);
        }
    }

    /// Says it, and does what is to be done about it; true if the group failed.
    fn say_stuck(
        &mut self,
        fabric: &Arc<Fabric>,
        what: Waiting,
        waited: Duration,
        text: String,
        culprit: Option<Rank>,
        finished: &mut Vec<Arc<Shared>>,
    ) -> bool {
        let is_new = !self.stuck.knows(what);
        self.stuck.say(what, waited, false, &text);
        self.warnings.push(text.clone());
        match fabric.stuck().policy {
            StuckPolicy::Warn => {}
            StuckPolicy::Dump if is_new => recorder::dump_for(&self.record),
            StuckPolicy::Dump => {}
            StuckPolicy::Abort => {
                let hint = "see what that rank does; TENFOLD_STUCK_AFTER and TENFOLD_STUCK_POLICY say how long a rank may \
                            take, and what then";
                let mut fault = Fault::new(ErrorKind::Timeout, text).hint(hint);
                fault.peer = culprit;
                self.fail(fabric, fault, finished);
                return true;
            }
        }
        false
    }

    fn sentence(&self, label: &Label, late: &[(Rank, Doing)], waited: Duration) -> String {
        let operation = format!("{label} #{}", label.seq);
        let introduce = |rank| self.introduce_to_all(rank);
        stuck::sentence(late, introduce, |rank| self.job_rank(rank), &operation, &self.name, waited)
    }

    fn job_rank(&self, rank: Rank) -> Rank {
        self.record.global_rank_of(rank)
    }

    /// As in ``rank 3 (host node-b, pid 4711; rank 1 of group `tp1`)``: for those who may not know the group. The launcher shows it
    /// beside what other groups say.
    fn introduce_to_all(&self, rank: Rank) -> String {
        let job_rank = self.job_rank(rank);
        if job_rank == rank {
            return self.introduce(rank);
        }
        let here = format!("rank {rank} of group `{}`", self.name);
        match &self.mesh.members()[rank].peer {
            Some(peer) => format!("rank {job_rank} ({peer}; {here})"),
            None => format!("rank {job_rank} ({here})"),
        }
    }
}
