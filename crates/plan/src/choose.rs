//! Selects an algorithm by the number of bytes and the topology.
//!
//! One table, read from the top: the first row that covers the case and whose algorithm meets the needs is
//! used. The last rows of a kind cover everything, so there always is one.

use crate::{
    Algorithm, Kind, Topology, all_gather, all_reduce, all_to_all, barrier, broadcast, gather, reduce,
    reduce_scatter, scan, scatter,
};

/// The longest message of a plan that does not run in pieces, in bytes. No message is longer than the whole
/// vector, so such a plan is for vectors of up to this size.
pub const PIECE: usize = 128 * 1024;

const KIB: usize = 1024;
const ANY: usize = usize::MAX;

/// Leaders of more hosts than this have too many messages to send, one after the other.
const FEW: usize = 8;

/// Where a row applies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Hosts {
    /// All ranks share one.
    One,
    /// More than one.
    Several,
    /// Up to [`FEW`], of which some have several ranks.
    Few,
    /// Several, and no two ranks share one: no rank has neighbours.
    Apart,
    Any,
}

/// `algorithm` is used for up to `ranks` ranks and up to `bytes` bytes.
struct Row {
    hosts: Hosts,
    ranks: usize,
    bytes: usize,
    algorithm: &'static Algorithm,
}

const fn row(hosts: Hosts, ranks: usize, bytes: usize, algorithm: &'static Algorithm) -> Row {
    Row { hosts, ranks, bytes, algorithm }
}

/// The thresholds. Those of all_reduce for up to 8 ranks, on one host or apart over loopback, and those of two,
/// four and eight hosts with two ranks each were measured, on two cores; the others are estimates that are not
/// measured yet. Few ranks on a host share memory, so every rank reads from every other. Many ranks, or several
/// hosts, need few messages when these are short and few bytes when they are long.
#[rustfmt::skip]
static TABLE: &[Row] = &[
    //  hosts           ranks bytes      algorithm
    row(Hosts::One,     2,    64 * KIB,  &all_reduce::ONE_SHOT),
    row(Hosts::One,     8,    16 * KIB,  &all_reduce::ONE_SHOT),
    row(Hosts::One,     16,   256,       &all_reduce::ONE_SHOT),
    row(Hosts::One,     16,   ANY,       &all_reduce::DIRECT),
    row(Hosts::One,     ANY,  16 * KIB,  &all_reduce::RECURSIVE_DOUBLING),
    row(Hosts::One,     ANY,  ANY,       &all_reduce::HALVING_DOUBLING),
    row(Hosts::Few,     ANY,  64 * KIB,  &all_reduce::LEADERS),
    row(Hosts::Few,     ANY,  ANY,       &all_reduce::TWO_LEVEL),
    row(Hosts::Several, ANY,  16 * KIB,  &all_reduce::RECURSIVE_DOUBLING),
    row(Hosts::Apart,   ANY,  64 * KIB,  &all_reduce::RECURSIVE_DOUBLING),
    row(Hosts::Several, ANY,  256 * KIB, &all_reduce::HALVING_DOUBLING),
    row(Hosts::Apart,   ANY,  ANY,       &all_reduce::RING),
    row(Hosts::Several, ANY,  ANY,       &all_reduce::TWO_LEVEL),
    row(Hosts::Any,     ANY,  2 * KIB,   &all_reduce::ONE_SHOT),
    row(Hosts::Any,     ANY,  ANY,       &all_reduce::DIRECT),

    row(Hosts::Few,     ANY,  64 * KIB,  &reduce_scatter::LEADERS),
    row(Hosts::Few,     ANY,  ANY,       &reduce_scatter::TWO_LEVEL),
    row(Hosts::Several, ANY,  64 * KIB,  &reduce_scatter::DIRECT),
    row(Hosts::Apart,   ANY,  ANY,       &reduce_scatter::RING),
    row(Hosts::Several, ANY,  ANY,       &reduce_scatter::TWO_LEVEL),
    row(Hosts::Any,     ANY,  ANY,       &reduce_scatter::DIRECT),

    row(Hosts::One,     16,   ANY,       &all_gather::DIRECT),
    row(Hosts::Few,     ANY,  64 * KIB,  &all_gather::LEADERS),
    row(Hosts::Any,     ANY,  64 * KIB,  &all_gather::BRUCK),
    row(Hosts::One,     ANY,  ANY,       &all_gather::RING),
    row(Hosts::Apart,   ANY,  ANY,       &all_gather::RING),
    row(Hosts::Several, ANY,  ANY,       &all_gather::TWO_LEVEL),

    row(Hosts::One,     16,   ANY,       &broadcast::DIRECT),
    row(Hosts::One,     ANY,  ANY,       &broadcast::BINOMIAL),
    row(Hosts::Several, ANY,  16 * KIB,  &broadcast::BINOMIAL),
    row(Hosts::Apart,   ANY,  ANY,       &broadcast::SCATTER_ALL_GATHER),
    row(Hosts::Several, ANY,  ANY,       &broadcast::TWO_LEVEL),

    row(Hosts::One,     8,    16 * KIB,  &reduce::DIRECT),
    row(Hosts::One,     16,   ANY,       &reduce::SCATTER_GATHER),
    row(Hosts::One,     ANY,  ANY,       &reduce::BINOMIAL),
    row(Hosts::Several, ANY,  16 * KIB,  &reduce::BINOMIAL),
    row(Hosts::Apart,   ANY,  ANY,       &reduce::SCATTER_GATHER),
    row(Hosts::Several, ANY,  ANY,       &reduce::TWO_LEVEL),
    row(Hosts::Any,     ANY,  16 * KIB,  &reduce::DIRECT),
    row(Hosts::Any,     ANY,  ANY,       &reduce::SCATTER_GATHER),

    row(Hosts::Any,     8,    16 * KIB,  &scan::DIRECT),
    row(Hosts::Any,     ANY,  16 * KIB,  &scan::RECURSIVE_DOUBLING),
    row(Hosts::Any,     ANY,  ANY,       &scan::CHAIN),
    row(Hosts::Any,     ANY,  ANY,       &scan::DIRECT),

    row(Hosts::Few,     ANY,  32 * KIB,  &all_to_all::LEADERS),
    row(Hosts::Any,     16,   ANY,       &all_to_all::DIRECT),
    row(Hosts::Any,     ANY,  64 * KIB,  &all_to_all::BRUCK),
    row(Hosts::Any,     ANY,  ANY,       &all_to_all::PAIRWISE),

    row(Hosts::One,     8,    ANY,       &barrier::DIRECT),
    row(Hosts::Few,     ANY,  ANY,       &barrier::LEADERS),
    row(Hosts::Any,     ANY,  ANY,       &barrier::DISSEMINATION),

    row(Hosts::Apart,   ANY,  ANY,       &gather::DIRECT),
    row(Hosts::Several, ANY,  64 * KIB,  &gather::LEADERS),
    row(Hosts::Any,     ANY,  ANY,       &gather::DIRECT),

    row(Hosts::Apart,   ANY,  ANY,       &scatter::DIRECT),
    row(Hosts::Several, ANY,  64 * KIB,  &scatter::LEADERS),
    row(Hosts::Any,     ANY,  ANY,       &scatter::DIRECT),
];

/// The requirements of an operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Needs {
    /// The bits of a reduction may depend only on the values and the ranks.
    pub in_rank_order: bool,
    /// All parts have the same length, so algorithms that rely on it may be used.
    pub equal_parts: bool,
}

/// The algorithm for a vector of `bytes`: the whole tensor of an all-reduce, reduce, scan or broadcast, the whole output of
/// a gather, the whole input of a scatter, reduce-scatter or all-to-all.
///
/// All ranks must get the same result, so they must pass the same arguments. If only some ranks know how long
/// the vector is (a gather, a scatter, an all-to-all of unequal parts), the result does not depend on
/// `bytes`.
pub fn choose(kind: Kind, bytes: usize, topology: &Topology, needs: Needs) -> &'static Algorithm {
    let covers = |row: &&Row| {
        let here = match row.hosts {
            Hosts::One => topology.hosts() == 1,
            Hosts::Several => topology.hosts() > 1,
            Hosts::Few => (2..=FEW).contains(&topology.hosts()) && topology.hosts() < topology.size(),
            Hosts::Apart => topology.hosts() > 1 && topology.hosts() == topology.size(),
            Hosts::Any => true,
        };
        here && topology.size() <= row.ranks && bytes <= row.bytes
    };
    TABLE
        .iter()
        .filter(|row| row.algorithm.kind == kind)
        .filter(covers)
        .map(|row| row.algorithm)
        .find(|algorithm| algorithm.suits(bytes, needs))
        .expect("the last row of each kind covers everything")
}

/// A hash of the table: builds with another table may choose another algorithm in the same case.
pub fn fingerprint() -> u64 {
    let words = TABLE.iter().flat_map(|row| {
        let name = row.algorithm.name.bytes().map(u64::from);
        [row.hosts as u64, row.ranks as u64, row.bytes as u64, row.algorithm.kind as u64]
            .into_iter()
            .chain(name)
    });
    // FNV-1a, by words.
    words
        .chain([PIECE as u64])
        .fold(0xcbf2_9ce4_8422_2325, |hash: u64, word| (hash ^ word).wrapping_mul(0x100_0000_01b3))
}

impl Algorithm {
    /// Whether it may be used for a vector of `bytes` with these needs, even if it is not the best.
    pub fn suits(&self, bytes: usize, needs: Needs) -> bool {
        (self.in_rank_order || !needs.in_rank_order || !self.kind.reduces())
            && (needs.equal_parts || !self.equal_parts)
            && (self.pieces || bytes <= PIECE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verify;

    fn topologies() -> impl Iterator<Item = Topology> {
        let sizes = [1, 2, 3, 7, 8, 9, 16, 17, 33, 500];
        sizes.into_iter().flat_map(|size| {
            let spread = |hosts: usize| Topology::new((0..size).map(|rank| rank % hosts).collect());
            [1, 2, 5.min(size), 9.min(size), size].map(spread)
        })
    }

    /// Around every threshold, and the ends.
    fn sizes() -> Vec<usize> {
        let mut sizes = vec![0, 1, PIECE, PIECE + 1, ANY];
        sizes.extend(TABLE.iter().flat_map(|row| [row.bytes, row.bytes.saturating_add(1)]));
        sizes.sort_unstable();
        sizes.dedup();
        sizes
    }

    fn needs() -> impl Iterator<Item = Needs> {
        let both = [false, true];
        both.into_iter()
            .flat_map(move |in_rank_order| both.map(|equal_parts| Needs { in_rank_order, equal_parts }))
    }

    #[test]
    fn every_case_gets_an_algorithm_that_suits_it() {
        for topology in topologies() {
            for (kind, bytes) in
                Kind::ALL.into_iter().flat_map(|kind| sizes().into_iter().map(move |b| (kind, b)))
            {
                for needs in needs() {
                    let chosen = choose(kind, bytes, &topology, needs);
                    assert_eq!(chosen.kind, kind);
                    assert!(!kind.reduces() || chosen.in_rank_order || !needs.in_rank_order);
                    assert!(!chosen.equal_parts || needs.equal_parts);
                    assert!(chosen.pieces || bytes <= PIECE);
                }
            }
        }
    }

    #[test]
    fn no_row_is_hidden_by_those_above_it() {
        for row in TABLE {
            let chosen = |topology: &Topology| {
                let bytes = row.bytes;
                needs().any(|needs| {
                    std::ptr::eq(choose(row.algorithm.kind, bytes, topology, needs), row.algorithm)
                })
            };
            assert!(topologies().any(|topology| chosen(&topology)), "{} is never chosen", row.algorithm);
        }
    }

    #[test]
    fn the_length_does_not_matter_if_ranks_do_not_know_each_others() {
        for (kind, topology) in [Kind::AllToAll, Kind::Gather, Kind::Scatter]
            .into_iter()
            .flat_map(|kind| topologies().map(move |t| (kind, t)))
        {
            let chosen = |bytes| choose(kind, bytes, &topology, Needs::default()).name;
            assert!(sizes().into_iter().all(|bytes| chosen(bytes) == chosen(0)), "{kind} on {topology:?}");
        }
    }

    #[test]
    fn sums_in_rank_order_whatever_the_size_if_asked_to() {
        let needs = Needs { in_rank_order: true, ..Needs::default() };
        let topology = Topology::new(vec![0, 0, 1, 1, 1]);
        for bytes in sizes() {
            let chosen = choose(Kind::AllReduce, bytes, &topology, needs);
            let claim =
                verify::Claim { kind: Kind::AllReduce, root: 0, equal_parts: false, in_rank_order: true };
            assert_eq!(verify::run(&claim, &chosen.plans(&topology, 0)), Ok(()), "{chosen}");
        }
    }

    #[test]
    fn the_choice_follows_the_design() {
        let chosen = |bytes, hosts: &dyn Fn(usize) -> usize, size| {
            let topology = Topology::new((0..size).map(hosts).collect());
            choose(Kind::AllReduce, bytes, &topology, Needs::default()).name
        };
        let here = |_| 0;
        let in_fours = |rank| rank / 4;
        let apart = |rank| rank;
        assert_eq!(chosen(8, &here, 8), "one_shot");
        assert_eq!(chosen(64 * 1024 * KIB, &here, 8), "direct");
        assert_eq!(chosen(8, &here, 500), "recursive_doubling");
        assert_eq!(chosen(64 * 1024 * KIB, &here, 500), "halving_doubling");
        assert_eq!(chosen(8, &in_fours, 16), "leaders");
        assert_eq!(chosen(65 * KIB, &in_fours, 16), "two_level");
        assert_eq!(chosen(64 * 1024 * KIB, &in_fours, 16), "two_level");
        assert_eq!(chosen(8, &in_fours, 36), "recursive_doubling");
        assert_eq!(chosen(65 * KIB, &in_fours, 36), "halving_doubling");
        assert_eq!(chosen(64 * 1024 * KIB, &apart, 16), "ring");
    }
}
