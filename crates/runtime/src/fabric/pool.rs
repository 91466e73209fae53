//! One fabric for all groups of a process: threads, descriptors, heartbeats and mappings do not grow with the number of groups.
//!
//! A group takes a fabric that another group of this process uses, if it has the same settings. It makes a new one if the
//! process has none, or if each of them already had a group with the same id: ranks of one group that are threads of one
//! process need a fabric each, and no memory or message of an earlier group may be taken for one of the new group's.

use std::collections::HashSet;
use std::sync::{Mutex, Weak};

use super::{FabricHandle, FabricOptions, Shutdown, lock};
use crate::fault::Fault;

/// Fabrics that groups of this process use.
static SHARED: Mutex<Vec<Weak<Shutdown>>> = Mutex::new(Vec::new());

/// Ids of groups that a fabric remembers. One that has had more takes no further group.
const GROUPS_MAX: usize = 1 << 16;

/// The groups that a fabric has or had.
pub(super) type Groups = HashSet<u64>;

impl FabricHandle {
    /// A fabric with these options for the group `id`. If the interface was not `chosen`, a fabric that other hosts reach
    /// is as good as one on loopback.
    pub(crate) fn shared(options: FabricOptions, chosen: bool, id: u64) -> Result<FabricHandle, Fault> {
        let mut shared = lock(&SHARED);
        shared.retain(|fabric| fabric.strong_count() > 0);
        let living: Vec<FabricHandle> = shared.iter().filter_map(Weak::upgrade).map(FabricHandle).collect();
        let fitting = living.into_iter().filter(|fabric| fabric.serves(&options, chosen));
        let (on_loopback, reachable): (Vec<_>, Vec<_>) = fitting.partition(|fabric| fabric.is_on_loopback());
        for fabric in reachable.into_iter().chain(on_loopback) {
            if fabric.takes(id) {
                return Ok(fabric);
            }
        }
        let fabric = FabricHandle::new(options)?;
        shared.push(std::sync::Arc::downgrade(&fabric.0));
        lock(&fabric.groups).insert(id);
        Ok(fabric)
    }

    /// Takes the group `id`, unless there is or was one with the same id.
    fn takes(&self, id: u64) -> bool {
        let mut groups = lock(&self.groups);
        groups.len() < GROUPS_MAX && groups.insert(id)
    }

    fn serves(&self, wanted: &FabricOptions, chosen: bool) -> bool {
        let own = &self.options;
        let same = own.interface == wanted.interface;
        let loopback = wanted.interface.is_none_or(|address| address.is_loopback());
        self.check_process().is_ok()
            && (same || loopback && !chosen)
            && *own == FabricOptions { interface: own.interface, ..wanted.clone() }
    }

    fn is_on_loopback(&self) -> bool {
        self.options.interface.is_none_or(|address| address.is_loopback())
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;

    const LOOPBACK: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

    /// Options that no other test has: tests run as threads of one process, too.
    fn options(mark: u64) -> FabricOptions {
        let heartbeat = Duration::from_secs(1000 + mark);
        FabricOptions { interface: Some(LOOPBACK), heartbeat, ..FabricOptions::for_tests() }
    }

    fn is_same(one: &FabricHandle, other: &FabricHandle) -> bool {
        Arc::ptr_eq(&one.0, &other.0)
    }

    #[test]
    fn groups_of_a_process_share_a_fabric_until_the_last_has_ended() {
        let first = FabricHandle::shared(options(1), false, 1).unwrap();
        let second = FabricHandle::shared(options(1), false, 2).unwrap();
        assert!(is_same(&first, &second));
        let id = first.id();
        drop((first, second));
        let third = FabricHandle::shared(options(1), false, 3).unwrap();
        assert_ne!(third.id(), id);
    }

    #[test]
    fn ranks_of_one_group_never_share_and_neither_do_groups_with_the_same_id_after_each_other() {
        let first = FabricHandle::shared(options(2), false, 7).unwrap();
        let second = FabricHandle::shared(options(2), false, 7).unwrap();
        assert!(!is_same(&first, &second));
        let third = FabricHandle::shared(options(2), false, 7).unwrap();
        assert!(!is_same(&first, &third) && !is_same(&second, &third));
    }

    #[test]
    fn other_settings_or_a_chosen_interface_get_a_fabric_of_their_own() {
        let first = FabricHandle::shared(options(3), false, 1).unwrap();
        let other = FabricHandle::shared(options(4), false, 2).unwrap();
        assert!(!is_same(&first, &other));
        let all = FabricOptions { interface: Some([0, 0, 0, 0].into()), ..options(3) };
        let chosen = FabricHandle::shared(all, true, 3).unwrap();
        assert!(!is_same(&first, &chosen));
        // A rank that other hosts reach serves those that would be content with loopback.
        let next = FabricHandle::shared(options(3), false, 4).unwrap();
        assert!(is_same(&next, &chosen));
        let local = FabricHandle::shared(options(3), true, 5).unwrap();
        assert!(is_same(&local, &first));
    }
}
