//! Which algorithm for how many bytes on what topology.
//!
//! One table, read from the top: the first row that covers the case and whose algorithm meets the needs is taken. The
//! last rows of a kind cover everything, so there always is one.

use crate::{
    Algorithm, Kind, Topology, all_gather, all_reduce, all_to_all, barrier, broadcast, gather, reduce,
    reduce_scatter, scatter,
};

/// The longest message of a plan that does not go in pieces, in bytes. Since no message is longer than the whole vector,
/// such a plan is for vectors of up to this.
pub const PIECE: usize = 128 * 1024;

const KIB: usize = 1024;
const MIB: usize = 1024 * KIB;
const ANY: usize = usize::MAX;

/// Where a row applies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Hosts {
    One,
    Several,
    Any,
}

/// `algorithm` is right for up to `ranks` ranks and up to `bytes` bytes.
struct Row {
    hosts: Hosts,
    ranks: usize,
    bytes: usize,
    algorithm: &'static Algorithm,
}

const fn row(hosts: Hosts, ranks: usize, bytes: usize, algorithm: &'static Algorithm) -> Row {
    Row { hosts, ranks, bytes, algorithm }
}

/// The thresholds. First guesses that await measuring: few ranks on a host share memory, so everyone reads from everyone;
/// many ranks, or hosts, want few messages when these are short and few bytes when they are long.
#[rustfmt::skip]
static TABLE: &[Row] = &[
    //  hosts           ranks bytes      algorithm
    row(Hosts::One,     2,    8 * KIB,   &all_reduce::ONE_SHOT),
    row(Hosts::One,     8,    2 * KIB,   &all_reduce::ONE_SHOT),
    row(Hosts::One,     16,   256,       &all_reduce::ONE_SHOT),
    row(Hosts::One,     16,   ANY,       &all_reduce::DIRECT),
    row(Hosts::One,     ANY,  16 * KIB,  &all_reduce::RECURSIVE_DOUBLING),
    row(Hosts::One,     ANY,  ANY,       &all_reduce::HALVING_DOUBLING),
    row(Hosts::Several, ANY,  16 * KIB,  &all_reduce::RECURSIVE_DOUBLING),
    row(Hosts::Several, ANY,  256 * KIB, &all_reduce::HALVING_DOUBLING),
    row(Hosts::Several, ANY,  ANY,       &all_reduce::TWO_LEVEL),
    row(Hosts::Any,     ANY,  2 * KIB,   &all_reduce::ONE_SHOT),
    row(Hosts::Any,     ANY,  ANY,       &all_reduce::DIRECT),

    row(Hosts::Any,     ANY,  ANY,       &reduce_scatter::DIRECT),

    row(Hosts::One,     16,   ANY,       &all_gather::DIRECT),
    row(Hosts::Any,     ANY,  64 * KIB,  &all_gather::BRUCK),
    row(Hosts::One,     ANY,  ANY,       &all_gather::RING),
    row(Hosts::Several, ANY,  ANY,       &all_gather::TWO_LEVEL),

    row(Hosts::One,     8,    256 * KIB, &broadcast::DIRECT),
    row(Hosts::One,     16,   ANY,       &broadcast::SCATTER_ALL_GATHER),
    row(Hosts::One,     ANY,  ANY,       &broadcast::BINOMIAL),
    row(Hosts::Several, ANY,  16 * KIB,  &broadcast::BINOMIAL),
    row(Hosts::Several, ANY,  ANY,       &broadcast::TWO_LEVEL),

    row(Hosts::One,     8,    16 * KIB,  &reduce::DIRECT),
    row(Hosts::One,     16,   ANY,       &reduce::SCATTER_GATHER),
    row(Hosts::One,     ANY,  ANY,       &reduce::BINOMIAL),
    row(Hosts::Several, ANY,  16 * KIB,  &reduce::BINOMIAL),
    row(Hosts::Several, ANY,  ANY,       &reduce::TWO_LEVEL),
    row(Hosts::Any,     ANY,  16 * KIB,  &reduce::DIRECT),
    row(Hosts::Any,     ANY,  ANY,       &reduce::SCATTER_GATHER),

    row(Hosts::Any,     16,   MIB,       &all_to_all::DIRECT),
    row(Hosts::Any,     ANY,  64 * KIB,  &all_to_all::BRUCK),
    row(Hosts::Any,     ANY,  ANY,       &all_to_all::PAIRWISE),

    row(Hosts::One,     8,    ANY,       &barrier::DIRECT),
    row(Hosts::Any,     ANY,  ANY,       &barrier::DISSEMINATION),

    row(Hosts::Any,     ANY,  ANY,       &gather::DIRECT),
    row(Hosts::Any,     ANY,  ANY,       &scatter::DIRECT),
];

/// What an operation asks of its algorithm.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// The bits of a reduction may depend on nothing but the values and the ranks.
    pub in_rank_order: bool,
    /// All parts are equally long, so that algorithms that count on it may be taken.
    pub equal_parts: bool,
}

/// The algorithm for a vector of `bytes`: the whole tensor of an all-reduce, reduce or broadcast, the whole output of
/// a gather, the whole input of a scatter, reduce-scatter or all-to-all.
pub fn choose(kind: Kind, bytes: usize, topology: &Topology, needs: Needs) -> &'static Algorithm {
    let covers = |row: &&Row| {
        let here = match row.hosts {
            Hosts::One => topology.hosts() == 1,
            Hosts::Several => topology.hosts() > 1,
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

impl Algorithm {
    /// Whether it may be used for a vector of `bytes` with these needs, be it the best or not.
    pub fn suits(&self, bytes: usize, needs: Needs) -> bool {
        (self.in_rank_order || !needs.in_rank_order || !self.kind.reduces())
            && (needs.equal_parts || !self.equal_parts)
            && (self.pieces || bytes <= PIECE)
    }
}
