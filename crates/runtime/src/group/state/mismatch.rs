//! Ranks of a group called different operations: when this rank takes part in finding out which rank called what (see `comparison`).

#[cfg(test)]
mod tests;

use std::sync::Arc;

use tenfold_memory::Head;
use tenfold_plan::Rank;

use super::super::trouble::comparison::{CallReport, Comparison, Ranks};
use super::GroupState;
use super::notices::encode;
use crate::fabric::{Fabric, Peer};
use crate::label::{Label, differ_in_earlier_roots};
use crate::transport::mesh::Member;

/// In groups up to this size, a rank that sees a mismatch connects to all ranks. In larger groups, reports are passed on.
const DIALLED_MAX: usize = 64;

impl GroupState {
    /// Are there doubts about the next call, because others disagree about theirs?
    #[inline]
    pub(crate) fn is_doubtful(&self) -> bool {
        !self.early_reports.is_empty() || self.comparison.is_some()
    }

    /// Members that this rank is connected with.
    pub(super) fn connected(&self) -> impl Iterator<Item = Rank> {
        let is_connected = |peer: &Arc<Peer>| peer.is_met() && peer.fate().is_none();
        let members = self.mesh.members().iter().enumerate();
        members
            .filter(move |(_, member)| member.peer.as_ref().is_some_and(is_connected))
            .map(|(rank, _)| rank)
    }

    /// `peer` called something else than this rank: all ranks report what they called.
    pub(super) fn start_comparison(&mut self, fabric: &Arc<Fabric>, peer: Rank, head: Head) {
        let seq = head[1].min(self.doing.current[1]);
        let seq = self.earlier_root(seq, &head).unwrap_or(seq);
        self.join_comparison(fabric, seq, Some(peer));
        if let Some(comparison) = &mut self.comparison
            && head[1] == comparison.seq()
        {
            comparison.deduce(peer, head);
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
    pub(super) fn consider_early_reports(&mut self, fabric: &Arc<Fabric>) {
        let Some(seq) = self.early_reports.iter().map(|said| said.seq).min() else { return };
        if seq > self.collectives {
            return;
        }
        self.join_comparison(fabric, seq, None);
        let early_reports = std::mem::take(&mut self.early_reports);
        if let Some(comparison) = &mut self.comparison {
            early_reports.into_iter().for_each(|said| comparison.hear(said));
        }
    }

    fn join_comparison(&mut self, fabric: &Arc<Fabric>, seq: u64, saw: Option<Rank>) {
        if self.comparison.is_some() {
            return;
        }
        let head = self.history.iter().find(|head| head[1] == seq).copied();
        let (detail, told) = (self.details.of(seq).cloned(), Ranks::default());
        let mut own = CallReport { rank: self.rank, seq, head, detail, saw, told };
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
        let mut comparison = Comparison::new(seq, self.rank, members.len());
        comparison.hear(own.clone());
        self.comparison = Some(comparison);
        fabric.tell(self.peers(), self.id, encode(&own.into()));
    }
}
