//! Which process takes the place of which rank that died. Pure.

use tenfold_plan::Rank;

use super::notes::Joiner;

/// The ranks from 0 to `size - 1` that none of `taken` is.
pub(super) fn vacant(size: usize, taken: &[Rank]) -> Vec<Rank> {
    (0..size).filter(|rank| !taken.contains(rank)).collect()
}

/// For each vacant rank the index of the process that takes it: one that was started in its place, or else a spare, in the
/// order in which they asked. Nothing as long as there are too few.
///
/// Of several that were started in place of the same rank the last one counts: the launcher starts another only if the one before
/// has ended.
pub(super) fn assign(vacant: &[Rank], joiners: &[(i64, Joiner)]) -> Option<Vec<usize>> {
    let mut spares = (0..joiners.len()).filter(|at| joiners[*at].1.rank.is_none());
    let replacement = |rank: &Rank| joiners.iter().rposition(|(_, joiner)| joiner.rank == Some(*rank));
    vacant.iter().map(|rank| replacement(rank).or_else(|| spares.next())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn joiners(ranks: &[Option<Rank>]) -> Vec<(i64, Joiner)> {
        let joiner = |rank: Option<Rank>| Joiner {
            handle: String::new(),
            pid: 0,
            host: String::new(),
            joining: None,
            rank,
            local_rank: None,
        };
        ranks.iter().enumerate().map(|(at, rank)| (at as i64 + 1, joiner(*rank))).collect()
    }

    #[test]
    fn vacant_ranks_are_those_that_nobody_has() {
        assert_eq!(vacant(4, &[0, 3]), [1, 2]);
        assert!(vacant(2, &[1, 0]).is_empty());
    }

    #[test]
    fn a_replacement_takes_its_rank_and_spares_take_the_others_in_order() {
        let waiting = joiners(&[None, Some(2), None]);
        assert_eq!(assign(&[1, 2], &waiting), Some(vec![0, 1]));
        assert_eq!(assign(&[0, 1, 2], &waiting), Some(vec![0, 2, 1]));
        assert_eq!(assign(&[0, 1, 3], &waiting), None, "only two are spare");
        assert_eq!(assign(&[1], &joiners(&[Some(2)])), None, "it was started in place of another rank");
        assert_eq!(assign(&[], &waiting), Some(vec![]));
    }

    #[test]
    fn of_several_replacements_of_a_rank_the_last_one_counts() {
        assert_eq!(assign(&[2], &joiners(&[Some(2), Some(2), None])), Some(vec![1]));
    }
}
