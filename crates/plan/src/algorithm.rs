//! Algorithms as rows of a table. There is nothing to implement, so there is no trait. Tests, benchmarks and
//! the environment variable that names one all use the same list.

use std::fmt;

use crate::{
    Plan, Rank, Topology, all_gather, all_reduce, all_to_all, barrier, broadcast, gather, reduce,
    reduce_scatter, scan, scatter,
};

/// What a collective does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// All ranks get the inputs of all ranks.
    AllGather,
    /// All ranks get the combination of all inputs.
    AllReduce,
    /// Every rank sends a part to every rank.
    AllToAll,
    /// No rank ends before all have begun.
    Barrier,
    /// All ranks get the root's input.
    Broadcast,
    /// The root gets the inputs of all ranks.
    Gather,
    /// The root gets the combination of all inputs.
    Reduce,
    /// Every rank gets its part of the combination of all inputs.
    ReduceScatter,
    /// Every rank gets the combination of the inputs of all ranks up to its own.
    Scan,
    /// Every rank gets its part of the root's input.
    Scatter,
}

impl Kind {
    /// Every kind.
    pub const ALL: [Kind; 10] = [
        Kind::AllGather,
        Kind::AllReduce,
        Kind::AllToAll,
        Kind::Barrier,
        Kind::Broadcast,
        Kind::Gather,
        Kind::Reduce,
        Kind::ReduceScatter,
        Kind::Scan,
        Kind::Scatter,
    ];

    /// Its name: `all_reduce`.
    pub fn name(self) -> &'static str {
        match self {
            Kind::AllGather => "all_gather",
            Kind::AllReduce => "all_reduce",
            Kind::AllToAll => "all_to_all",
            Kind::Barrier => "barrier",
            Kind::Broadcast => "broadcast",
            Kind::Gather => "gather",
            Kind::Reduce => "reduce",
            Kind::ReduceScatter => "reduce_scatter",
            Kind::Scan => "scan",
            Kind::Scatter => "scatter",
        }
    }

    /// Whether one rank has a special role.
    pub fn has_root(self) -> bool {
        matches!(self, Kind::Broadcast | Kind::Gather | Kind::Reduce | Kind::Scatter)
    }

    /// Whether ranks' values are combined.
    pub fn reduces(self) -> bool {
        matches!(self, Kind::AllReduce | Kind::Reduce | Kind::ReduceScatter | Kind::Scan)
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// An algorithm of a collective. [`crate::verify`] proves that each has the properties of its fields.
#[derive(Clone, Copy, Debug)]
pub struct Algorithm {
    /// What it computes.
    pub kind: Kind,
    /// Its name among the algorithms of its kind.
    pub name: &'static str,
    /// The steps of one rank, given the root (which matters only if the kind has one).
    pub plan: fn(&Topology, Rank, Rank) -> Plan,
    /// Reduces in one pass over all ranks in order of rank: the bits of the result depend neither on the
    /// length nor on which of these algorithms was used.
    pub in_rank_order: bool,
    /// Works only if all parts have the same length.
    pub equal_parts: bool,
    /// Long operations may run in pieces. If not, no message may be longer than one piece: see
    /// [`crate::PIECE`].
    pub pieces: bool,
}

impl Algorithm {
    pub(crate) const fn new(kind: Kind, name: &'static str, plan: fn(&Topology, Rank, Rank) -> Plan) -> Self {
        Algorithm { kind, name, plan, in_rank_order: false, equal_parts: false, pieces: true }
    }

    /// The plans of all ranks.
    pub fn plans(&self, topology: &Topology, root: Rank) -> Vec<Plan> {
        (0..topology.size()).map(|rank| (self.plan)(topology, rank, root)).collect()
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.kind, self.name)
    }
}

/// All algorithms.
pub static ALGORITHMS: &[&Algorithm] = &[
    &all_gather::DIRECT,
    &all_gather::RING,
    &all_gather::BRUCK,
    &all_gather::TWO_LEVEL,
    &all_gather::LEADERS,
    &all_reduce::ONE_SHOT,
    &all_reduce::DIRECT,
    &all_reduce::RING,
    &all_reduce::RECURSIVE_DOUBLING,
    &all_reduce::HALVING_DOUBLING,
    &all_reduce::TWO_LEVEL,
    &all_reduce::LEADERS,
    &all_to_all::DIRECT,
    &all_to_all::PAIRWISE,
    &all_to_all::BRUCK,
    &all_to_all::LEADERS,
    &barrier::DIRECT,
    &barrier::DISSEMINATION,
    &barrier::LEADERS,
    &broadcast::DIRECT,
    &broadcast::BINOMIAL,
    &broadcast::SCATTER_ALL_GATHER,
    &broadcast::TWO_LEVEL,
    &gather::DIRECT,
    &gather::LEADERS,
    &reduce::DIRECT,
    &reduce::SCATTER_GATHER,
    &reduce::BINOMIAL,
    &reduce::TWO_LEVEL,
    &reduce_scatter::DIRECT,
    &reduce_scatter::RING,
    &reduce_scatter::TWO_LEVEL,
    &reduce_scatter::LEADERS,
    &scan::DIRECT,
    &scan::RECURSIVE_DOUBLING,
    &scan::CHAIN,
    &scatter::DIRECT,
    &scatter::LEADERS,
];

/// The algorithm of that name.
pub fn named(kind: Kind, name: &str) -> Option<&'static Algorithm> {
    ALGORITHMS.iter().copied().find(|algorithm| algorithm.kind == kind && algorithm.name == name)
}

/// The names of all algorithms for `kind`.
pub fn names(kind: Kind) -> impl Iterator<Item = &'static str> {
    ALGORITHMS.iter().filter(move |algorithm| algorithm.kind == kind).map(|algorithm| algorithm.name)
}
