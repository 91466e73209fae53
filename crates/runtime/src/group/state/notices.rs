//! What the ranks of a group tell each other through their helper threads: failures, calls that differ, departures and late ranks.

#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tenfold_memory::{Doing, Head};
use tenfold_plan::Rank;

use super::super::trouble::comparison::{CallReport, Ranks};
use super::super::trouble::detail::Detail;
use super::{GroupState, now};
use crate::fabric::Fabric;
use crate::fault::{ErrorKind, Fault};
use crate::transport::Wants;
use crate::transport::mesh::Member;
use crate::wire::{ControlFrame, FabricId};
use crate::work::Shared;

/// What members of a group tell each other when something is wrong.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Notice {
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

/// Stands in front of the number of the rank that made an observation, in the message about it.
const SEEN_BY: &str = "(seen by rank";

/// The rank that saw what the message is about; the message may have reached us through another one.
fn observer(message: &str) -> Option<Rank> {
    message.rsplit_once(SEEN_BY)?.1.trim().trim_end_matches(')').parse().ok()
}

impl From<CallReport> for Notice {
    fn from(CallReport { rank, seq, head, detail, saw, told }: CallReport) -> Self {
        Notice::Called { rank, seq, head, detail, saw, told }
    }
}

impl GroupState {
    /// What a process should know that we have just met: nothing if it is in another group.
    pub(crate) fn notices(&mut self, to: FabricId) -> Vec<Vec<u8>> {
        let is_it = |member: &Member| member.peer.as_ref().is_some_and(|peer| peer.id() == to);
        let Some(rank) = self.mesh.members().iter().position(is_it) else { return Vec::new() };
        match (self.notice(), &mut self.comparison) {
            (Some(failed), _) => vec![failed],
            (None, None) => Vec::new(),
            (None, Some(comparison)) => {
                comparison.reports_for(rank).into_iter().map(|said| encode(&said.into())).collect()
            }
        }
    }

    /// What to tell members about why the group failed.
    pub(super) fn notice(&self) -> Option<Vec<u8>> {
        let Fault { kind, peer, message, hint, .. } = self.failed.clone()?;
        let seen = matches!(kind, ErrorKind::Timeout | ErrorKind::PeerSilent) && !message.contains(SEEN_BY);
        let message = if seen { format!("{message} {SEEN_BY} {})", self.rank) } else { message };
        Some(encode(&Notice::Failed { rank: self.rank, kind, peer, message, hint }))
    }

    /// The last thing that members hear of this rank.
    pub(crate) fn say_goodbye(&self, fabric: &Arc<Fabric>) {
        fabric.tell(self.peers(), self.id, encode(&Notice::Left { rank: self.rank }));
    }

    fn waits_for(&self, rank: Rank) -> bool {
        let Wants { messages, any_of, room, .. } = self.wants();
        [messages, any_of, room].concat().contains(&rank)
    }

    /// A member said something.
    pub(crate) fn hear(&mut self, fabric: &Arc<Fabric>, text: &[u8], finished: &mut Vec<Arc<Shared>>) {
        let size = self.mesh.members().len();
        match serde_json::from_slice(text) {
            Ok(Notice::Failed { rank, kind, peer, message, hint })
                if rank < size && peer.is_none_or(|peer| peer < size) =>
            {
                // A rank that compares calls comes to the same conclusion by itself.
                if self.comparison.is_none() {
                    // It failed there in a call that may be further on: what is complete here has not failed.
                    while matches!(self.try_poll(finished), Ok(true)) {}
                    // A rank that has timed out itself reports its own timeout.
                    let own = if kind == ErrorKind::Timeout { self.timed_out(&self.wants()) } else { None };
                    let observer = observer(&message).filter(|rank| *rank < size).unwrap_or(rank);
                    let is_about_me = peer == Some(self.rank);
                    let theirs = if kind == ErrorKind::PeerSilent && is_about_me {
                        // This rank is alive: the network between the two is broken, in one direction.
                        let message =
                            format!("{} does not hear this rank: {message}", self.introduce(observer));
                        Fault { peer: Some(observer), hint, ..Fault::new(kind, message) }
                    } else if kind == ErrorKind::Timeout && is_about_me && self.waits_for(observer) {
                        // Neither is late: what they send does not arrive.
                        let message = format!(
                            "{} waits for this rank, which waits for it: {message}",
                            self.introduce(observer)
                        );
                        Fault { peer: Some(observer), hint, ..Fault::new(kind, message) }
                    } else {
                        Fault { peer, hint, ..Fault::new(kind, message) }
                    };
                    self.fail(fabric, own.unwrap_or(theirs), finished);
                }
            }
            Ok(Notice::Called { rank, seq, head, detail, saw, told })
                if rank < size
                    && saw.is_none_or(|saw| saw < size)
                    && told.fits(size)
                    && self.failed.is_none() =>
            {
                let mut said = CallReport { rank, seq, head, detail: detail.map(Detail::heard), saw, told };
                let known = self.comparison.as_ref().is_some_and(|comparison| comparison.knows(&said))
                    || self.early_reports.iter().any(|report| report.is_same(&said));
                if !known && self.early_reports.len() < 4 * size {
                    // Its author may have no way to some ranks to which this rank has one.
                    let to = said.pass_on(self.connected());
                    if !to.is_empty() {
                        let peers = to.iter().filter_map(|rank| self.mesh.members()[*rank].peer.clone());
                        fabric.tell(peers.collect(), self.id, encode(&said.clone().into()));
                    }
                    self.early_reports.push(said);
                    self.consider_early_reports(fabric);
                }
            }
            Ok(Notice::Called { .. }) => {}
            Ok(Notice::Left { rank }) if rank < size => {
                if self.left.iter().all(|(gone, _)| *gone != rank) {
                    self.left.push((rank, now()));
                    fabric.hear_left(self.id, rank);
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
                let warning = format!("a member of group `{}` sent an invalid notice; ignored", self.name);
                self.warnings.push(warning);
            }
        }
    }
}

/// A notice as bytes that one control frame holds: a text that is too long is cut, and says so.
pub(super) fn encode(notice: &Notice) -> Vec<u8> {
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
