//! When ranks arrive at collectives: which are stragglers, and by how much.
//!
//! Every rank shows on its board when it entered its last collective. The helper thread looks at the boards twice a second and
//! compares each with when this rank entered the same collective. So an operation costs one note of its time. The result is a
//! sample of all arrivals: collectives with long pauses between them count for more than those that follow each other quickly.

use tenfold_memory::Doing;
use tenfold_plan::Rank;

use crate::OpKind;

/// Collectives of which it is known when they were begun here. Boards of other hosts are seen with every pulse only, so that many
/// may have passed.
const KEPT: usize = 256;

#[derive(Clone, Copy, Debug)]
struct Begun {
    number: u64,
    time: u64,
    kind: OpKind,
}

/// When this rank began its last collectives, and up to where the others were looked at.
#[derive(Debug)]
pub(crate) struct Arrivals {
    begun: Box<[Begun]>,
    newest: u64,
    seen: Vec<u64>,
}

/// What one look at the boards has shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Sample {
    /// The collective of the rank that arrived last.
    pub kind: OpKind,
    /// Between the first and the last, in nanoseconds.
    pub skew: u64,
    /// How much later than the first each rank came that could be seen, this one included.
    pub lateness: Vec<(Rank, u64)>,
}

impl Arrivals {
    pub(crate) fn new(size: usize) -> Self {
        let never = Begun { number: 0, time: 0, kind: OpKind::Barrier };
        Arrivals { begun: vec![never; KEPT].into(), newest: 0, seen: vec![0; size] }
    }

    /// This rank begins its `number`th collective.
    #[inline]
    pub(crate) fn begin(&mut self, number: u64, kind: OpKind, time: u64) {
        self.begun[number as usize % KEPT] = Begun { number, time, kind };
        self.newest = number;
    }

    /// Compares the others' boards with what this rank, `own`, did. `None` if no board has changed since the last look, or if
    /// a rank is beyond the next collective of this rank.
    pub(crate) fn sample(
        &mut self,
        own: Rank,
        boards: impl Iterator<Item = (Rank, Doing)>,
    ) -> Option<Sample> {
        let mut late: Vec<(Rank, i64, OpKind)> = Vec::new();
        let mut is_new = false;
        for (rank, Doing { current, since, .. }) in boards {
            // Of who is one ahead, and waits for this rank, the one before is compared: this rank's next arrival is still to come.
            let (number, since) = match current[1].checked_sub(self.newest) {
                Some(1) => (self.newest, since[1]),
                Some(2..) => return None,
                _ => (current[1], since[0]),
            };
            let begun = self.begun[number as usize % KEPT];
            if number == 0 || since == 0 || begun.number != number {
                continue;
            }
            is_new |= std::mem::replace(&mut self.seen[rank], number) != number;
            late.push((rank, since as i64 - begun.time as i64, begun.kind));
        }
        if !is_new {
            return None;
        }
        let kind = self.begun[self.newest as usize % KEPT].kind;
        late.push((own, 0, kind));
        late.sort_unstable_by_key(|(rank, ..)| *rank);
        let first = late.iter().map(|(_, late, _)| *late).min()?;
        let (_, last, kind) = late.iter().copied().max_by_key(|(_, late, _)| *late)?;
        let after_first = |late: i64| late.saturating_sub(first) as u64;
        let lateness = late.iter().map(|(rank, late, _)| (*rank, after_first(*late))).collect();
        Some(Sample { kind, skew: after_first(last), lateness })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(number: u64, since: u64) -> Doing {
        Doing { current: [0, number, 0], finished: [0; 3], since: [since, 1] }
    }

    fn arrivals() -> Arrivals {
        let mut arrivals = Arrivals::new(4);
        arrivals.begin(1, OpKind::AllReduce, 1000);
        arrivals.begin(2, OpKind::Broadcast, 2000);
        arrivals
    }

    #[test]
    fn lateness_is_counted_from_whoever_came_first() {
        let boards = [(0, at(2, 1990)), (2, at(1, 1300)), (3, at(2, 2050))];
        let sample = arrivals().sample(1, boards.into_iter()).unwrap();
        let lateness = vec![(0, 0), (1, 10), (2, 310), (3, 60)];
        assert_eq!(sample, Sample { kind: OpKind::AllReduce, skew: 310, lateness });
    }

    #[test]
    fn what_was_seen_before_is_not_counted_again() {
        let mut arrivals = arrivals();
        assert!(arrivals.sample(1, [(0, at(2, 1990))].into_iter()).is_some());
        assert_eq!(arrivals.sample(1, [(0, at(2, 1990))].into_iter()), None);
        arrivals.begin(3, OpKind::Barrier, 3000);
        assert!(arrivals.sample(1, [(0, at(3, 3000))].into_iter()).is_some());
    }

    #[test]
    fn of_those_who_wait_for_this_rank_the_collective_before_counts() {
        let ahead = Doing { since: [2500, 2040], ..at(3, 0) };
        let sample = arrivals().sample(1, [(0, at(2, 2000)), (2, ahead)].into_iter()).unwrap();
        assert_eq!(sample.lateness, [(0, 0), (1, 0), (2, 40)]);
        assert_eq!(arrivals().sample(1, [(0, at(2, 2000)), (2, at(4, 2500))].into_iter()), None);
    }

    #[test]
    fn what_nobody_knows_is_left_out() {
        let mut arrivals = arrivals();
        let boards = [(0, at(0, 0)), (2, at(1, 0)), (3, at(2, 2001))];
        let sample = arrivals.sample(1, boards.into_iter()).unwrap();
        assert_eq!(sample.lateness, [(1, 0), (3, 1)]);
        arrivals.begin(2 + KEPT as u64, OpKind::Barrier, 9000);
        assert_eq!(arrivals.sample(1, [(3, at(2, 2001))].into_iter()), None, "too long ago");
    }
}
