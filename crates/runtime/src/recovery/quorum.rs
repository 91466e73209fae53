//! How many ranks must live for the group to continue.

use super::ranks::Ranks;

/// What a group may continue with. Two different questions are asked of it: which ranks must have accepted a proposal
/// (`is_met`), and which membership may be proposed at all (`allows`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Quorum {
    /// More than half of the last generation, or exactly half if rank 0 of the last generation is among them. Any two such
    /// sets have a rank in common: two halves have rank 0, and a half and more than a half are more ranks than there are. So
    /// it is safe under partitions and wrong suspicions. The price of the second case: if rank 0 dies, the other half of the
    /// group is not enough.
    Majority,
    /// A majority, or all ranks that are not known to be dead. Under partitions and wrong suspicions no two ranks that are
    /// alive ever continue with different members: each rank of the second kind of set has declared the same ranks dead before
    /// it accepted, and handles nothing more that they sent. What is possible: a majority decides, all of its ranks die, and
    /// the others, who see that and never heard of the decision, decide differently.
    Living,
    /// All ranks that the leader does not suspect. Safe if every suspected rank is dead or never answers again. If live
    /// ranks suspect each other, as in a partition, each side may continue without the other.
    AllReachable,
    /// At least so many. If that is more than half of the last generation, proposals must be accepted by a majority, and it
    /// is as safe as `Majority`; otherwise by all that the leader does not suspect, as in `AllReachable`.
    AtLeast(usize),
}

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
        let all_but =
            |others: &Ranks| (0..answered.size()).all(|rank| answered.contains(rank) || others.contains(rank));
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
            Quorum::Living => is_majority(members) || is_majority_of(members, &dead.others()),
            _ => self.may_allow(members),
        }
    }

    /// The same for whoever does not know which ranks are dead.
    pub(super) fn may_allow(self, members: &Ranks) -> bool {
        match self {
            Quorum::Majority => is_majority(members),
            Quorum::Living | Quorum::AllReachable => !members.is_empty(),
            Quorum::AtLeast(least) => members.len() >= least.max(1),
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
        assert!(!Quorum::AtLeast(3).allows(&two, &others), "as many as were asked for, whatever became of the rest");
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
