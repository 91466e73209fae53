//! How many ranks must live for the group to continue.

use super::ranks::Ranks;

/// How many ranks must live for a group to continue after failures: see [`Group::shrink`](crate::Group::shrink).
///
/// All ranks of a group must have the same, see [`Options::quorum`](crate::Options::quorum).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Quorum {
    /// More than half of the ranks, or exactly half if rank 0 is among them. Under partitions and wrong suspicions, the ranks
    /// of a group never continue with different members. The price: if more than half of them die, the others cannot continue,
    /// nor can the half without rank 0.
    Majority,
    /// A majority, or all ranks whose death was not seen. Safe under partitions and wrong suspicions, because a rank that only
    /// cannot be reached counts as alive: a death is seen by a rank of the same host, or announced by the rank itself. No two
    /// ranks that are alive ever continue with different members. What is possible: a majority continues, all of its ranks die,
    /// and the others, who never heard of that, continue after them. The default.
    #[default]
    Living,
    /// All ranks that the others can reach. If ranks that are alive cannot reach each other, as in a partition, each side may
    /// continue without the other.
    AllReachable,
    /// At least so many. If that is more than half of the ranks, it is as safe as `Majority`; otherwise as `AllReachable`.
    AtLeast(usize),
}

// Any two majorities have a rank in common: two halves have rank 0, and a half and more than a half are more ranks than there
// are. A set of all that are not dead has a rank of every majority that is not all dead. Each rank of such a set has declared
// the same ranks dead before it accepted, and handles nothing more that they sent. So what the dead have decided is known to
// the set, or never heard of.
//
// Two different questions are asked: which ranks must have accepted a proposal (`is_met`), and which membership may be
// proposed at all (`allows`).
impl Quorum {
    /// Is it safe whichever ranks suspect each other?
    pub(super) fn is_safe_under_partitions(self, size: usize) -> bool {
        match self {
            Quorum::Majority | Quorum::Living => true,
            Quorum::AllReachable => false,
            Quorum::AtLeast(least) => 2 * least > size,
        }
    }

    /// Have enough ranks answered, if `absent` are those that no answer is expected of, and `dead` those of them that can
    /// never answer again?
    pub(super) fn is_met(self, answered: &Ranks, absent: &Ranks, dead: &Ranks) -> bool {
        let all_but = |others: &Ranks| {
            (0..answered.size()).all(|rank| answered.contains(rank) || others.contains(rank))
        };
        match self.is_safe_under_partitions(answered.size()) {
            true => is_majority(answered) || self.counts_dead() && all_but(dead),
            false => all_but(absent),
        }
    }

    /// Does it matter which ranks are known to be dead?
    pub(super) fn counts_dead(self) -> bool {
        self == Quorum::Living
    }

    /// May the group continue with these?
    pub(super) fn allows(self, members: &Ranks, dead: &Ranks) -> bool {
        match self {
            Quorum::Majority => is_majority(members),
            Quorum::Living => is_majority(members) || is_majority_of(members, &dead.others()),
            _ => self.may_allow(members),
        }
    }

    /// The same for a rank that does not know which ranks are dead, or have left.
    pub(super) fn may_allow(self, members: &Ranks) -> bool {
        match self {
            Quorum::AtLeast(least) => members.len() >= least.max(1),
            _ => !members.is_empty(),
        }
    }
}

fn is_majority_of(ranks: &Ranks, all: &Ranks) -> bool {
    let twice = 2 * ranks.iter().filter(|rank| all.contains(*rank)).count();
    twice > all.len() || twice == all.len() && all.iter().next().is_some_and(|first| ranks.contains(first))
}

fn is_majority(ranks: &Ranks) -> bool {
    let twice = 2 * ranks.len();
    twice > ranks.size() || (twice == ranks.size() && ranks.contains(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_two_majorities_have_a_rank_in_common() {
        for size in 1..=8 {
            let sets: Vec<Ranks> = (0..1_u32 << size)
                .map(|bits| Ranks::of(size, (0..size).filter(|rank| bits >> rank & 1 == 1)))
                .filter(|set| Quorum::Majority.is_met(set, &Ranks::none(size), &Ranks::none(size)))
                .collect();
            assert!(!sets.is_empty());
            for one in &sets {
                assert!(sets.iter().all(|other| other.iter().any(|rank| one.contains(rank))), "{one:?}");
            }
        }
        let half = |ranks: [usize; 2]| Quorum::Majority.allows(&Ranks::of(4, ranks), &Ranks::none(4));
        assert!(half([0, 3]) && !half([1, 2]), "of two halves, the one with rank 0");
    }

    #[test]
    fn the_dead_are_not_counted_and_those_that_only_seem_to_be_are() {
        let (two, none) = (Ranks::of(4, [2, 3]), Ranks::none(4));
        let others = Ranks::of(4, [0, 1]);
        assert!(Quorum::Living.is_met(&two, &others, &others) && Quorum::Living.allows(&two, &others));
        assert!(!Quorum::Living.is_met(&two, &others, &none) && !Quorum::Living.allows(&two, &none));
        assert!(!Quorum::Majority.is_met(&two, &others, &others) && !Quorum::Majority.allows(&two, &others));
        let (one, all_but_one) = (Ranks::of(4, [3]), Ranks::of(4, [0, 1, 2]));
        assert!(Quorum::Living.allows(&one, &all_but_one));
        // Rank 2 is alive and has not called: of two that live, the half with the lower one continues.
        assert!(!Quorum::Living.allows(&one, &others) && Quorum::Living.allows(&Ranks::of(4, [2]), &others));
        assert!(
            !Quorum::AtLeast(3).allows(&two, &others),
            "as many as were asked for, whatever became of the rest"
        );
    }

    #[test]
    fn at_least_a_few_ranks_need_all_that_are_reachable() {
        let absent = Ranks::of(4, [3]);
        let none = Ranks::none(4);
        assert!(!Quorum::AtLeast(2).is_met(&Ranks::of(4, [0, 1]), &absent, &none));
        assert!(Quorum::AtLeast(2).is_met(&Ranks::of(4, [0, 1, 2]), &absent, &none));
        assert!(Quorum::AtLeast(3).is_met(&Ranks::of(4, [0, 1]), &absent, &none), "a majority for safety");
        assert!(!Quorum::AtLeast(3).allows(&Ranks::of(4, [0, 1]), &none), "and three to continue");
        assert!(!Quorum::AtLeast(0).allows(&none, &none) && !Quorum::AllReachable.allows(&none, &none));
    }
}
