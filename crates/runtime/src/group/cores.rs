//! Which processor cores a rank may use, and whether ranks have to share them.
//!
//! A rank that waits spins only if no other rank needs its core. Whether one does depends on the kernel, not on the network: ranks
//! in containers with networks of their own share the cores of their machine, and ranks that are bound to different cores
//! do not.

use std::sync::Arc;

use rustix::thread::{CpuSet, sched_getaffinity};
use serde::{Deserialize, Serialize};
use tenfold_plan::Rank;

/// What a rank may run on.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Cores {
    /// The kernel, by the id of its boot.
    kernel: String,
    /// The cores of its affinity, as ranges: `[[0, 3], [8, 11]]` are eight.
    cpus: Vec<(usize, usize)>,
    /// The control group, and how many cores of time it may use: less than it has cores, where a container has a quota.
    quota: Option<(String, f64)>,
}

/// Whether a rank of a group shares its cores with other ranks of it.
#[derive(Clone, Debug)]
pub(super) struct Crowd {
    pub is_crowded: bool,
    /// By rank: which kernel it runs on.
    pub kernels: Arc<[usize]>,
}

impl Crowd {
    /// The same for a group of some of the ranks, of which this one has number `place`: it is not crowded if it has enough
    /// cores for all ranks of its kernel.
    pub(super) fn among(&self, ranks: &[Rank], place: usize) -> Crowd {
        let kernels: Arc<[usize]> = ranks.iter().map(|rank| self.kernels[*rank]).collect();
        let count = kernels.iter().filter(|kernel| **kernel == kernels[place]).count();
        Crowd { is_crowded: self.is_crowded && count > super::usable_cores(), kernels }
    }
}

impl Cores {
    pub(super) fn kernel(&self) -> &String {
        &self.kernel
    }

    /// Of the calling thread.
    pub(super) fn here() -> Self {
        let kernel = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let cpus = sched_getaffinity(None).map_or_else(
            |_| vec![(0, super::usable_cores() - 1)],
            |set| ranges((0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu))),
        );
        let mut cores = Cores { kernel: kernel.trim().to_string(), cpus, quota: None };
        let usable = super::usable_cores();
        if usable < cores.count() {
            cores.quota = Some((control_group(), usable as f64));
        }
        cores
    }

    fn count(&self) -> usize {
        self.cpus.iter().map(|(first, last)| last.saturating_sub(*first).saturating_add(1)).sum()
    }

    /// How many cores both may use.
    fn shared_with(&self, other: &Cores) -> usize {
        let overlap = |a: &(usize, usize), b: &(usize, usize)| {
            let (first, last) = (a.0.max(b.0), a.1.min(b.1));
            (last + 1).saturating_sub(first)
        };
        self.cpus.iter().map(|own| other.cpus.iter().map(|their| overlap(own, their)).sum::<usize>()).sum()
    }
}

/// For each rank: is there more than one rank for each core that it may use?
///
/// A rank that may use several cores counts for a part of each of them.
pub(super) fn crowded(ranks: &[Cores]) -> Vec<bool> {
    // Most ranks have the same cores as their neighbours: what is found for one set of cores holds for all with the same.
    let mut kinds: Vec<(&Cores, usize)> = Vec::new();
    for cores in ranks {
        match kinds.iter_mut().rev().find(|(kind, _)| *kind == cores) {
            Some((_, count)) => *count += 1,
            None => kinds.push((cores, 1)),
        }
    }
    let is_crowded = |cores: &Cores| {
        let neighbours = || kinds.iter().filter(|(kind, _)| kind.kernel == cores.kernel);
        let wanted: f64 = neighbours()
            .map(|(kind, count)| *count as f64 * cores.shared_with(kind) as f64 / kind.count().max(1) as f64)
            .sum();
        let group = cores.quota.as_ref();
        let in_group = neighbours()
            .filter(|(kind, _)| {
                group.is_some()
                    && kind.quota.as_ref().map(|(group, _)| group) == group.map(|(group, _)| group)
            })
            .map(|(_, count)| *count as f64)
            .sum::<f64>();
        // Halves of cores do not add up exactly.
        wanted > cores.count() as f64 + 1e-6 || group.is_some_and(|(_, quota)| in_group > *quota)
    };
    let found: Vec<bool> = kinds.iter().map(|(kind, _)| is_crowded(kind)).collect();
    let kind_of = |cores: &Cores| kinds.iter().rposition(|(kind, _)| *kind == cores);
    ranks.iter().map(|cores| kind_of(cores).is_some_and(|kind| found[kind])).collect()
}

/// Numbers in ascending order as ranges, both ends included.
fn ranges(numbers: impl Iterator<Item = usize>) -> Vec<(usize, usize)> {
    let mut ranges: Vec<(usize, usize)> = Vec::new();
    for number in numbers {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == number => *last = number,
            _ => ranges.push((number, number)),
        }
    }
    ranges
}

/// The same text for processes that share a quota. A container has a namespace of its own, in which its path may be `/`.
fn control_group() -> String {
    let namespace = std::fs::read_link("/proc/self/ns/cgroup").unwrap_or_default();
    let path = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    format!("{} {}", namespace.display(), path.lines().last().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn on(kernel: &str, cpus: &[(usize, usize)]) -> Cores {
        Cores { kernel: kernel.to_string(), cpus: cpus.to_vec(), quota: None }
    }

    #[test]
    fn ranks_crowd_the_cores_of_their_kernel_whatever_their_network_is() {
        let two = on("a", &[(0, 1)]);
        assert_eq!(crowded(&vec![two.clone(); 2]), [false; 2]);
        assert_eq!(crowded(&vec![two.clone(); 3]), [true; 3]);
        let other = on("b", &[(0, 1)]);
        assert_eq!(crowded(&[two.clone(), other.clone(), two, other]), [false; 4]);
    }

    #[test]
    fn ranks_that_are_bound_to_different_cores_do_not_share_them() {
        let bound: Vec<Cores> = (0..8).map(|core| on("a", &[(core, core)])).collect();
        assert_eq!(crowded(&bound), [false; 8]);
        // Two on core 0, and one that may use both, which is half a rank for each core.
        let mixed = [on("a", &[(0, 0)]), on("a", &[(0, 0)]), on("a", &[(0, 1)])];
        assert_eq!(crowded(&mixed), [true, true, true]);
        let apart = [on("a", &[(0, 3), (8, 11)]), on("a", &[(4, 7)]), on("a", &[(4, 7)])];
        assert_eq!(crowded(&apart), [false; 3]);
    }

    #[test]
    fn a_container_with_a_quota_is_crowded_by_its_own_ranks_only() {
        let within = |group: &str| Cores { quota: Some((group.to_string(), 2.0)), ..on("a", &[(0, 63)]) };
        let ranks = [within("x"), within("x"), within("x"), within("y"), within("y")];
        assert_eq!(crowded(&ranks), [true, true, true, false, false]);
    }

    #[test]
    fn what_this_process_may_use_is_found() {
        let here = Cores::here();
        assert!(here.count() >= super::super::usable_cores());
        assert_eq!(here.shared_with(&here), here.count());
    }

    #[test]
    fn numbers_become_ranges() {
        assert_eq!(ranges([0, 1, 2, 5, 7, 8].into_iter()), [(0, 2), (5, 5), (7, 8)]);
        assert_eq!(ranges([].into_iter()), []);
    }
}
