//! What goes into the engine and out of it besides operations: failures of groups, notices of other ranks, and how far each
//! group is.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use tenfold_memory::Doing;

use super::{Engine, GroupIndex, State};
use crate::fabric::{Fabric, GroupProgress, When};
use crate::fault::Fault;
use crate::group::state::GroupState;
use crate::wire::FabricId;
use crate::work::Shared;

impl Engine {
    pub(crate) fn abort_group_of(&self, fabric: &Arc<Fabric>, work: &Shared, reason: &str) {
        if fabric.check_process().is_err() {
            return;
        }
        self.with(|state| {
            let State { groups, to_tell, .. } = state;
            for group in groups.iter_mut().flatten().filter(|group| group.has(work)) {
                group.abort(fabric, reason, to_tell);
            }
        });
        fabric.bell.ring();
    }

    /// Fails a group with `fault` and tells its other members.
    pub(crate) fn fail(&self, fabric: &Arc<Fabric>, index: GroupIndex, fault: Fault) {
        if fabric.check_process().is_err() {
            return;
        }
        self.with(|state| {
            let State { groups, to_tell, .. } = state;
            if let Some(group) = groups[index.0].as_deref_mut() {
                group.fail(fabric, fault, to_tell);
            }
        });
        fabric.bell.ring();
    }

    /// Ends what is under way in a group with `fault`, and tells its other members no more than that this rank has left.
    pub(crate) fn leave(&self, fabric: &Arc<Fabric>, index: GroupIndex, fault: Fault) {
        self.with(|state| {
            let State { groups, to_tell, .. } = state;
            if let Some(group) = groups[index.0].as_deref_mut() {
                group.leave(fabric, fault, to_tell);
            }
        });
        fabric.bell.ring();
    }

    /// A member of group `id` said something. False if there is no such group (yet).
    pub(crate) fn hear(&self, fabric: &Arc<Fabric>, from: FabricId, id: u64, text: &[u8]) -> bool {
        let heard = self.with(|state| {
            let State { groups, to_tell, .. } = state;
            let group = groups.iter_mut().flatten().find(|group| group.id() == id);
            let group = group?;
            // Group ids can be guessed: what a process says about a group that it is not in does not count.
            if group.has_member(from) {
                group.hear(fabric, text, to_tell);
            }
            Some((group.is_busy(), group.take_warnings()))
        });
        let Some((is_busy, warnings)) = heard else { return false };
        fabric.bell.ring();
        warn(&warnings);
        if is_busy {
            fabric.call_helper(When::Now, false); // what it heard may ask for a conclusion, and no thread may wait for anything
        }
        true
    }

    /// Looks for stragglers in every group, and for ranks that keep this rank waiting for too long.
    pub(crate) fn look_at_others(&self, fabric: &Arc<Fabric>) {
        let warnings = self.with(|state| {
            let State { groups, to_tell, .. } = state;
            let mut warnings = Vec::new();
            for group in groups.iter_mut().flatten() {
                group.look_at_others(fabric, to_tell);
                warnings.append(&mut group.take_warnings());
            }
            warnings
        });
        if !warnings.is_empty() {
            fabric.bell.ring(); // a group may have failed
        }
        warn(&warnings);
    }

    /// For every peer whose board can be seen, a number that changes with each collective that it calls or finishes.
    pub(crate) fn calls_of_peers(&self) -> HashMap<FabricId, u64> {
        let mut calls = HashMap::new();
        self.with(|state| state.groups.iter().flatten().for_each(|group| group.count_calls(&mut calls)));
        calls
    }

    /// For every group: its id and what this rank does in it.
    pub(crate) fn doing(&self) -> Vec<(u64, Doing)> {
        self.with(|state| state.groups.iter().flatten().map(|group| (group.id(), *group.doing())).collect())
    }

    /// How far this rank is, in every group.
    pub(crate) fn progress(&self) -> Vec<GroupProgress> {
        self.with(|state| state.groups.iter().flatten().map(|group| group.progress()).collect())
    }

    /// What a peer should know that we have just met: of which group, and what.
    pub(crate) fn notices(&self, to: FabricId) -> Vec<(u64, Vec<u8>)> {
        let of = |group: &mut GroupState| {
            group.notices(to).into_iter().map(|text| (group.id(), text)).collect::<Vec<_>>()
        };
        self.with(|state| state.groups.iter_mut().flatten().flat_map(|group| of(group)).collect())
    }

    /// Peers on other hosts that an operation of this rank waits for.
    pub(crate) fn awaited(&self) -> HashSet<FabricId> {
        let mut awaited = HashSet::new();
        self.with(|state| state.groups.iter().flatten().for_each(|group| group.add_awaited(&mut awaited)));
        awaited
    }

    /// What waits for the peer `id`, for a warning that it is silent: its rank, the group, the operation.
    pub(crate) fn waiting_for(&self, id: FabricId) -> Option<String> {
        self.with(|state| state.groups.iter().flatten().find_map(|group| group.waiting_for(id)))
    }
}

/// Must be called without the lock: a subscriber may do anything.
fn warn(warnings: &[String]) {
    for warning in warnings {
        tracing::warn!("{warning}");
    }
}
