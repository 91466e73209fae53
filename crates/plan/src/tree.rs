//! The binomial tree: each rank has a parent and children that are a power of two away, so that all are
//! reached in as many hops as the size has binary digits.

use crate::Rank;

/// The parent of `rank` in the tree that starts at `root`; the root has none.
pub(crate) fn parent(rank: Rank, root: Rank, size: usize) -> Option<Rank> {
    let distance = (rank + size - root) % size;
    // Clearing the lowest bit leads towards the root.
    (distance != 0).then(|| (root + (distance & (distance - 1))) % size)
}

/// The children of `rank`, the one with the most descendants first.
pub(crate) fn children(rank: Rank, root: Rank, size: usize) -> Vec<Rank> {
    let distance = (rank + size - root) % size;
    let lowest = if distance == 0 { size.next_power_of_two() } else { distance & distance.wrapping_neg() };
    let hops = std::iter::successors(Some(lowest / 2), |hop| Some(hop / 2)).take_while(|&hop| hop > 0);
    hops.filter(|hop| distance + hop < size).map(|hop| (rank + hop) % size).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parents_and_children_agree_and_the_tree_has_all_ranks() {
        for size in 1..=64 {
            for root in 0..size {
                let mut reached = vec![root];
                let mut next = 0;
                while let Some(&rank) = reached.get(next) {
                    next += 1;
                    for child in children(rank, root, size) {
                        assert_eq!(parent(child, root, size), Some(rank));
                        reached.push(child);
                    }
                }
                reached.sort_unstable();
                assert!(reached.into_iter().eq(0..size), "size {size}, root {root}");
                assert_eq!(parent(root, root, size), None);
            }
        }
    }
}
