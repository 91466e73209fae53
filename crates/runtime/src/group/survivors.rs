//! What a group does after failures: its ranks agree on who is left, and go on as a smaller group. No store takes part.

use std::sync::Arc;

use tenfold_plan::{Rank, Topology};

use super::connect::{Met, group_id, new_room};
use super::{Group, Options, forced_algorithms};
use crate::fault::{Fault, Result, show_ranks};
use crate::label::{Label, OpKind};
use crate::recovery::{Agreed, Question};
use crate::transport::mesh::Member;

/// Keeps ids of smaller groups apart from those of subgroups.
const SMALLER: u64 = 0x7e2f_01d5_0bad_50c1;

impl Group {
    /// Ends everything that is under way in this group, on all ranks, so that all of them find out that something is wrong:
    /// it fails with `reason`, and so does every later call. [`Group::shrink`] works afterwards. Does not block.
    ///
    /// A rank whose peer has died need not call it: the ranks that wait for the dead one tell the others.
    pub fn revoke(&self, reason: &str) {
        let fabric = &self.inner.fabric;
        if fabric.check_process().is_err() {
            return; // the group is the parent's, which goes on with it
        }
        fabric.engine.fail(fabric, self.inner.index, self.given_up("revoked", reason));
    }

    /// The ranks of this group that are alive, as a smaller group with the same options: ranks closed up in order. Every rank
    /// that is alive must call it, after this group has failed or before. Blocks until all of them have agreed.
    ///
    /// All ranks that return a group return the same one. A rank that dies before the agreement is not a member. If one dies
    /// afterwards, the smaller group fails as any other, and can shrink in its turn. Which ranks must be alive is decided by
    /// [`Options::quorum`]. This group is not used any more, and may be dropped.
    ///
    /// No store takes part: ranks talk to each other on connections that they have, or open. In groups of more than 256 ranks,
    /// ranks that have never communicated need the store to find each other.
    ///
    /// ```
    /// use tenfold::{Group, ReduceOp};
    ///
    /// let sums = Group::threads(3, |group| {
    ///     if group.rank() == 1 {
    ///         return Ok(0); // it leaves
    ///     }
    ///     let group = group.shrink()?;
    ///     let mut sum = [1];
    ///     group.all_reduce(&mut sum, ReduceOp::Sum)?;
    ///     Ok(sum[0])
    /// })?;
    /// assert_eq!(sums, [2, 0, 2]);
    /// # Ok::<(), tenfold::Error>(())
    /// ```
    ///
    /// # Errors
    /// If too few ranks are alive or reachable, if a rank that is alive does not call in time (it is named), or if the others
    /// agreed without this rank.
    pub fn shrink(&self) -> Result<Group> {
        self.shrink_without(&[])
    }

    /// As [`Group::shrink`], without some ranks that are alive. Those do not call it.
    ///
    /// # Errors
    /// As [`Group::shrink`], and if a rank is out of range or this one.
    pub fn shrink_without(&self, ranks: &[Rank]) -> Result<Group> {
        let label = Label::new(OpKind::Shrink, 0);
        if let Some(rank) = ranks.iter().find(|rank| **rank >= self.size()) {
            return self
                .refuse(&label, format!("rank {rank} is out of range: ranks are 0 to {}", self.size() - 1));
        }
        if ranks.contains(&self.rank()) {
            return self
                .refuse(&label, format!("rank {} is this rank itself, which is to stay", self.rank()));
        }
        let deadline = self.deadline();
        let smaller = self.agree_on(Question::Survivors, 0, ranks, &deadline).and_then(|agreed| {
            tracing::info!(
                "group `{}`: {} of {} ranks continue: {}",
                self.name(),
                agreed.members.len(),
                self.size(),
                show_ranks(&agreed.members)
            );
            self.make_smaller(&agreed, &deadline)
        });
        smaller.map_err(|fault| self.error_after(label, &deadline, fault))
    }

    /// Agrees on a number: the bitwise AND of what the ranks that are alive contribute, the same on all of them, also if ranks
    /// die meanwhile. With a bit that each rank sets if it has succeeded, all ranks know whether all have. Works in a group that
    /// has failed. All ranks must call it in the same order. Blocks.
    ///
    /// ```
    /// use tenfold::Group;
    ///
    /// let all = Group::threads(3, |group| group.agree(0b111 ^ 1 << group.rank()))?;
    /// assert_eq!(all, [0, 0, 0]);
    /// # Ok::<(), tenfold::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Group::shrink`].
    pub fn agree(&self, value: u64) -> Result<u64> {
        let deadline = self.deadline();
        match self.agree_on(Question::Value, value, &[], &deadline) {
            Ok(agreed) => Ok(agreed.value),
            Err(fault) => Err(self.error_after(Label::new(OpKind::Agree, 0), &deadline, fault)),
        }
    }

    fn agree_on(
        &self,
        question: Question,
        value: u64,
        without: &[Rank],
        deadline: &tenfold_store::Deadline,
    ) -> std::result::Result<Agreed, Fault> {
        let inner = &self.inner;
        inner.fabric.check_process()?;
        inner.fabric.consult(inner.id, &self.known_members(), question, value, without, deadline)
    }

    /// The members, after those were looked up that this rank has not needed before.
    fn known_members(&self) -> Vec<Member> {
        let inner = &self.inner;
        let mut members = inner.fabric.engine.with(|state| state.group(inner.index).members().to_vec());
        let Some(directory) = &inner.directory else { return members };
        let is_unknown = |rank: &Rank| *rank != self.rank() && members[*rank].peer.is_none();
        let unknown: Vec<Rank> = (0..members.len()).filter(is_unknown).collect();
        // One that cannot be looked up counts as one that does not answer.
        for (rank, peer) in directory.find(&inner.fabric, &unknown) {
            members[rank].peer = Some(peer);
        }
        members
    }

    fn make_smaller(
        &self,
        agreed: &Agreed,
        deadline: &tenfold_store::Deadline,
    ) -> std::result::Result<Group, Fault> {
        let inner = &self.inner;
        let ranks = &agreed.members;
        let place = ranks.iter().position(|rank| *rank == self.rank());
        let place = place.expect("a rank that is left out gets an error");
        let id = group_id("smaller", (inner.id ^ SMALLER).wrapping_add(u64::from(agreed.sequence)));
        let room = new_room(&inner.fabric, ranks.len(), id)?;
        let parents = self.known_members();
        let confirms_roots =
            inner.fabric.engine.with(|state| state.group(inner.index).planner.confirms_roots());
        let near: Vec<Rank> =
            ranks.iter().copied().filter(|rank| *rank != self.rank() && parents[*rank].near).collect();
        let rooms =
            inner.fabric.exchange_rooms(inner.id, agreed.sequence, room.offset() as u64, &near, deadline)?;
        let mut members: Vec<Member> = ranks.iter().map(|rank| parents[*rank].clone()).collect();
        let mut roomless = None;
        for (member, rank) in members.iter_mut().zip(ranks) {
            match near.iter().position(|other| other == rank) {
                Some(at) => {
                    member.room = rooms[at].and_then(|offset| usize::try_from(offset).ok()).unwrap_or(0);
                    roomless = roomless.or(rooms[at].is_none().then_some(*rank));
                }
                None => member.room = if *rank == self.rank() { room.offset() } else { 0 },
            }
        }
        let forced = forced_algorithms(&inner.options)?;
        let options = Options { name: next_name(&inner.name), ..inner.options.clone() };
        let met = Met {
            fabric: inner.fabric.clone(),
            id,
            room,
            members,
            directory: None,
            topology: Topology::new(ranks.iter().map(|rank| inner.topology.host_of(*rank)).collect()),
            control: inner.control.clone(),
            confirms_roots,
            crowd: inner.crowd.among(ranks, place),
        };
        let name: Arc<str> = options.name.as_str().into();
        let global_ranks = inner.record.global_ranks_of(ranks);
        let smaller = Group::from_met(met, name, place, options, forced, global_ranks);
        if let Some(rank) = roomless {
            // Before anything can look for its memory.
            let peer = parents[rank].peer.as_ref().map_or_else(String::new, |peer| format!(" ({peer})"));
            let rank = ranks.iter().position(|other| *other == rank).unwrap_or(rank);
            let message = format!("rank {rank}{peer} died after the ranks had agreed to continue with it");
            let fault =
                Fault::new(crate::ErrorKind::PeerLost, message).peer(rank).hint("shrink the new group, too");
            smaller.inner.fabric.engine.fail(&smaller.inner.fabric, smaller.inner.index, fault);
        }
        Ok(smaller)
    }
}

/// As in `default`, `default@2`, `default@3`.
fn next_name(name: &str) -> String {
    let (base, number) = parts(name);
    format!("{base}@{}", number.unwrap_or(1).saturating_add(1))
}

/// As in `default@7`, whatever number was there before. Processes with different histories make the same of it.
pub(crate) fn name_of(name: &str, number: u64) -> String {
    format!("{}@{number}", parts(name).0)
}

fn parts(name: &str) -> (&str, Option<u64>) {
    let parts = name.rsplit_once('@').and_then(|(base, number)| Some((base, number.parse().ok()?)));
    parts.map_or((name, None), |(base, number)| (base, Some(number)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn smaller_groups_are_numbered() {
        assert_eq!(next_name("default"), "default@2");
        assert_eq!(next_name("default@2"), "default@3");
        assert_eq!(next_name("someone@home"), "someone@home@2");
        assert_eq!(next_name("@"), "@@2");
        assert_eq!(name_of("default", 7), "default@7");
        assert_eq!(name_of("default@3", 7), "default@7");
        assert_eq!(name_of("someone@home", 7), "someone@home@7");
    }
}
