//! Every algorithm is proved for every number of ranks, every root and many topologies. The proof is strong,
//! because no plan with a step missing or changed passes it.

use tenfold_plan::{ALGORITHMS, Algorithm, Area, Chunk, Kind, Plan, Step, Topology, named, verify};
use verify::{Claim, Flaw};

fn of_kind(kind: Kind) -> impl Iterator<Item = &'static Algorithm> {
    ALGORITHMS.iter().copied().filter(move |algorithm| algorithm.kind == kind)
}

fn roots(algorithm: &Algorithm, size: usize) -> std::ops::Range<usize> {
    if algorithm.kind.has_root() { 0..size } else { 0..1 }
}

fn claim(algorithm: &Algorithm, root: usize) -> Claim {
    let Algorithm { kind, equal_parts, in_rank_order, .. } = *algorithm;
    Claim { kind, root, equal_parts, in_rank_order }
}

#[track_caller]
fn prove(algorithm: &Algorithm, topology: &Topology, root: usize) {
    if let Err(flaw) = verify::algorithm(algorithm, topology, root) {
        panic!("{algorithm} with root {root} on {topology:?}: {flaw}");
    }
}

#[track_caller]
fn prove_up_to_64_ranks(kind: Kind) {
    for algorithm in of_kind(kind) {
        for size in 1..=64 {
            roots(algorithm, size).for_each(|root| prove(algorithm, &Topology::one_host(size), root));
        }
    }
}

/// `size` ranks distributed over hosts in every way that might break an algorithm.
fn spread(size: usize) -> Vec<Topology> {
    let over = |host: &dyn Fn(usize) -> usize| Topology::new((0..size).map(host).collect());
    let mut topologies = vec![
        over(&|rank| rank),                                        // one rank each
        over(&|rank| (8 * rank + 1).isqrt().div_ceil(2)),          // ever larger hosts
        over(&|rank| rank.saturating_sub(size / 2)),               // one full host, the others alone
        over(&|rank| size.saturating_sub(rank + size / 2)),        // the same, the full one last
        over(&|rank| (rank * rank + 3 * rank) % 7 % 3),            // neither order nor equal sizes
        over(&|rank| (rank.wrapping_mul(2_654_435_761) >> 7) % 5), // scattered
    ];
    for count in [2, 3, 4, 8] {
        topologies.push(over(&|rank| rank / count)); // blocks; the last may be smaller
        topologies.push(over(&|rank| rank % count)); // dealt out in turn
    }
    // Few ranks can be spread in few ways.
    topologies.sort_by_key(|topology| format!("{topology:?}"));
    topologies.dedup();
    topologies
}

#[test]
fn all_gathers_are_right_for_up_to_64_ranks() {
    prove_up_to_64_ranks(Kind::AllGather);
}

#[test]
fn all_reduces_are_right_for_up_to_64_ranks() {
    prove_up_to_64_ranks(Kind::AllReduce);
}

#[test]
fn all_to_alls_are_right_for_up_to_64_ranks() {
    prove_up_to_64_ranks(Kind::AllToAll);
}

#[test]
fn barriers_are_right_for_up_to_64_ranks() {
    prove_up_to_64_ranks(Kind::Barrier);
}

#[test]
fn broadcasts_are_right_for_up_to_64_ranks_and_every_root() {
    prove_up_to_64_ranks(Kind::Broadcast);
}

#[test]
fn gathers_and_scatters_are_right_for_up_to_64_ranks_and_every_root() {
    prove_up_to_64_ranks(Kind::Gather);
    prove_up_to_64_ranks(Kind::Scatter);
}

#[test]
fn reduces_are_right_for_up_to_64_ranks_and_every_root() {
    prove_up_to_64_ranks(Kind::Reduce);
}

#[test]
fn reduce_scatters_are_right_for_up_to_64_ranks() {
    prove_up_to_64_ranks(Kind::ReduceScatter);
}

#[test]
fn scans_are_right_for_up_to_64_ranks() {
    prove_up_to_64_ranks(Kind::Scan);
}

#[test]
fn every_algorithm_is_right_wherever_24_ranks_or_fewer_are() {
    for topology in (1..=24).flat_map(spread) {
        for algorithm in ALGORITHMS {
            // Every root up to a dozen ranks; beyond, every fifth to save time.
            let stride = if topology.size() <= 12 { 1 } else { 5 };
            roots(algorithm, topology.size())
                .step_by(stride)
                .for_each(|root| prove(algorithm, &topology, root));
        }
    }
}

#[test]
fn every_algorithm_is_right_for_more_ranks_than_a_word_has_bits() {
    for algorithm in ALGORITHMS {
        for size in [65, 129] {
            prove(algorithm, &Topology::one_host(size), 0);
            prove(algorithm, &Topology::new((0..size).map(|rank| rank % 10).collect()), 0);
        }
    }
}

#[test]
fn a_link_that_holds_a_message_for_each_phase_is_enough_even_where_plans_lend() {
    for topology in (1..=16).flat_map(spread) {
        for algorithm in ALGORITHMS {
            let mut plans = algorithm.plans(&topology, 0);
            plans.iter_mut().for_each(|plan| plan.lends = false);
            let proof = verify::run(&claim(algorithm, 0), &plans);
            assert_eq!(proof, Ok(()), "{algorithm} on {topology:?}");
        }
    }
}

#[test]
fn an_algorithm_that_does_not_lend_could_not() {
    for algorithm in ALGORITHMS {
        let mut could = true;
        for topology in (1..=8).flat_map(spread) {
            let mut plans = algorithm.plans(&topology, 0);
            plans.iter_mut().for_each(|plan| plan.lends = true);
            match verify::run(&claim(algorithm, 0), &plans) {
                Ok(()) => {}
                Err(Flaw::OverwritesLent { .. }) => could = false,
                Err(flaw) => panic!("{algorithm} on {topology:?}: {flaw}"),
            }
        }
        let lends = algorithm.plans(&Topology::new(vec![0, 0, 1, 1]), 0).iter().all(|plan| plan.lends);
        assert_eq!(lends, could, "{algorithm}");
    }
}

#[test]
fn plans_with_phases_lend_so_that_no_send_waits_for_a_peer() {
    let mut with_phases = 0;
    for topology in (1..=24).flat_map(spread) {
        for plan in ALGORITHMS.iter().flat_map(|algorithm| algorithm.plans(&topology, 0)) {
            assert!(plan.seams.is_empty() || plan.lends);
            with_phases += usize::from(!plan.seams.is_empty());
        }
    }
    assert!(with_phases > 1_000, "only {with_phases} plans have phases");
}

#[test]
fn rows_and_plans_agree_about_pieces() {
    for algorithm in ALGORITHMS {
        for topology in (1..=9).flat_map(spread) {
            let plans = algorithm.plans(&topology, 0);
            assert!(plans.iter().all(|plan| plan.pieces == algorithm.pieces), "{algorithm}");
        }
    }
}

#[test]
fn rows_claim_rank_order_and_unequal_parts_if_they_have_them() {
    for algorithm in ALGORITHMS {
        let always = |claim: Claim| {
            let mut topologies = (1..=7).flat_map(spread);
            topologies.all(|topology| verify::run(&claim, &algorithm.plans(&topology, 0)).is_ok())
        };
        let honest = claim(algorithm, 0);
        if algorithm.kind.reduces() {
            let ordered = always(Claim { in_rank_order: true, ..honest });
            assert_eq!(ordered, algorithm.in_rank_order, "{algorithm}");
        }
        let any_parts = always(Claim { equal_parts: false, ..honest });
        assert_eq!(any_parts, !algorithm.equal_parts, "{algorithm}");
    }
}

/// All plans that differ from `plan` in one step: without it, with another chunk, with another peer, or with
/// `finish` inverted.
fn mutants(plan: &Plan, size: usize, rank: usize) -> Vec<(String, Plan)> {
    let mut mutants = Vec::new();
    let mut mutate = |what: &str, at: usize, step: Option<Step>| {
        let mut mutant = plan.clone();
        match step {
            Some(step) if step == plan.steps[at] => return,
            Some(step) => mutant.steps[at] = step,
            None => drop(mutant.steps.remove(at)),
        }
        mutants.push((format!("{what} of step {at} of rank {rank}"), mutant));
    };
    let next_part = |chunk: Chunk| {
        let parts = match chunk.buffer {
            Area::Input => plan.input,
            Area::Output => plan.output,
            Area::Scratch => plan.scratch.len(),
        };
        let first =
            if chunk.count == 0 { chunk.first } else { (chunk.first + 1) % (parts + 1 - chunk.count) };
        Chunk { first, ..chunk }
    };
    // Another rank than this one, and than the original one.
    let next_rank =
        |peer: usize| (1..size).map(|i| (peer + i) % size).find(|&other| other != rank).unwrap_or(peer);
    for (at, step) in plan.steps.iter().enumerate() {
        mutate("lack", at, None);
        match step.clone() {
            Step::Send { to, chunk } => {
                mutate("chunk", at, Some(Step::Send { to: to.clone(), chunk: next_part(chunk) }));
                for left_out in 0..to.len() {
                    let mut fewer = to.clone();
                    fewer.remove(left_out);
                    mutate("fewer peers", at, Some(Step::Send { to: fewer, chunk }));
                }
                if let [peer] = to[..] {
                    mutate("peer", at, Some(Step::Send { to: vec![next_rank(peer)], chunk }));
                }
            }
            Step::Recv { from, chunk } => {
                mutate("chunk", at, Some(Step::Recv { from, chunk: next_part(chunk) }));
                mutate("peer", at, Some(Step::Recv { from: next_rank(from), chunk }));
            }
            Step::Reduce { from, own, to, finish } => {
                let reduce =
                    |from: &[usize], own, to, finish| Step::Reduce { from: from.to_vec(), own, to, finish };
                mutate("own", at, Some(reduce(&from, next_part(own), to, finish)));
                mutate("target", at, Some(reduce(&from, own, next_part(to), finish)));
                mutate("both chunks", at, Some(reduce(&from, next_part(own), next_part(to), finish)));
                mutate("finish", at, Some(reduce(&from, own, to, !finish)));
                if let Some((_, fewer)) = from.split_last() {
                    mutate("fewer peers", at, Some(reduce(fewer, own, to, finish)));
                }
            }
            Step::Copy { from, to } => {
                mutate("source", at, Some(Step::Copy { from: next_part(from), to }));
                mutate("target", at, Some(Step::Copy { from, to: next_part(to) }));
            }
        }
    }
    mutants
}

#[test]
fn no_plan_with_a_missing_or_changed_step_is_proved() {
    let mut count = 0;
    for topology in [1, 2, 3, 4, 5, 6, 8]
        .map(Topology::one_host)
        .into_iter()
        .chain([vec![0, 0, 1, 1], vec![0, 1, 0, 2, 1, 0, 0], vec![0, 1, 2]].map(Topology::new))
    {
        for algorithm in ALGORITHMS {
            let root = topology.size() / 2;
            let plans = algorithm.plans(&topology, root);
            // Most mistakes show in the lengths; with equal parts they have to show in the results.
            let claim = Claim { equal_parts: true, ..claim(algorithm, root) };
            for rank in 0..plans.len() {
                for (what, mutant) in mutants(&plans[rank], plans.len(), rank) {
                    let mut changed = plans.clone();
                    changed[rank] = mutant;
                    assert!(
                        verify::run(&claim, &changed).is_err(),
                        "{algorithm} on {topology:?} passes with another {what}"
                    );
                    count += 1;
                }
            }
        }
    }
    assert!(count > 20_000, "only {count} mutants were tried");
}

/// Messages that the busiest rank sends.
fn messages(kind: Kind, name: &str, topology: &Topology) -> usize {
    let plans = named(kind, name).expect("the algorithm is in the table").plans(topology, 0);
    let sent = |plan: &Plan| {
        let targets =
            plan.steps.iter().map(|step| if let Step::Send { to, .. } = step { to.len() } else { 0 });
        targets.sum::<usize>()
    };
    plans.iter().map(sent).max().expect("there is a rank")
}

#[test]
fn algorithms_send_as_many_messages_as_the_textbook_says() {
    for size in 2..=40 {
        let topology = Topology::one_host(size);
        let digits = size.next_power_of_two().ilog2() as usize;
        let count = |kind, name| messages(kind, name, &topology);
        assert_eq!(count(Kind::AllReduce, "one_shot"), size - 1);
        assert_eq!(count(Kind::AllReduce, "direct"), 2 * (size - 1));
        assert_eq!(count(Kind::AllReduce, "ring"), 2 * (size - 1));
        assert_eq!(count(Kind::ReduceScatter, "ring"), size - 1);
        assert_eq!(count(Kind::AllGather, "ring"), size - 1);
        assert_eq!(count(Kind::AllToAll, "pairwise"), size - 1);
        assert_eq!(count(Kind::AllToAll, "bruck"), digits);
        assert_eq!(count(Kind::Barrier, "dissemination"), digits);
        assert_eq!(count(Kind::Broadcast, "binomial"), digits);
        assert_eq!(count(Kind::Broadcast, "direct"), size - 1);
        assert_eq!(count(Kind::Broadcast, "scatter_all_gather"), size - 1);
        assert_eq!(count(Kind::Reduce, "binomial"), 1);
        assert_eq!(count(Kind::Scan, "direct"), size - 1);
        assert_eq!(count(Kind::Scan, "recursive_doubling"), digits);
        assert_eq!(count(Kind::Scan, "chain"), 1);
        if size.is_power_of_two() {
            assert_eq!(count(Kind::AllReduce, "recursive_doubling"), digits);
            assert_eq!(count(Kind::AllReduce, "halving_doubling"), 2 * (size - 1));
        } else {
            assert_eq!(
                count(Kind::AllReduce, "recursive_doubling"),
                digits,
                "⌊log2⌋, and one to the extra rank"
            );
        }
    }
}

#[test]
fn bruck_gathers_in_as_many_rounds_as_the_size_has_digits() {
    for size in 2..=40 {
        let plans = named(Kind::AllGather, "bruck").unwrap().plans(&Topology::one_host(size), 0);
        for plan in plans {
            let mut peers: Vec<_> = plan
                .steps
                .iter()
                .filter_map(|step| if let Step::Recv { from, .. } = step { Some(*from) } else { None })
                .collect();
            peers.dedup();
            assert_eq!(peers.len(), size.next_power_of_two().ilog2() as usize);
        }
    }
}

#[test]
fn leaders_send_one_message_from_host_to_host() {
    let topology = Topology::new((0..12).map(|rank| rank / 4).collect());
    for kind in [Kind::AllGather, Kind::AllReduce, Kind::AllToAll, Kind::Barrier, Kind::ReduceScatter] {
        let plans = named(kind, "leaders").unwrap().plans(&topology, 0);
        let mut pairs = Vec::new();
        for (rank, plan) in plans.iter().enumerate() {
            for step in &plan.steps {
                let Step::Send { to, .. } = step else { continue };
                pairs.extend(to.iter().map(|&peer| (topology.host_of(rank), topology.host_of(peer))));
            }
        }
        pairs.retain(|(from, to)| from != to);
        pairs.sort_unstable();
        assert_eq!(pairs, [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)], "{kind}");
    }
}

#[test]
fn a_root_has_one_message_for_each_other_host_and_each_neighbour() {
    let topology = Topology::new((0..32).map(|rank| rank / 8).collect());
    assert_eq!(messages(Kind::Scatter, "leaders", &topology), 3 + 7);
    let plans = named(Kind::Gather, "leaders").expect("the algorithm is in the table").plans(&topology, 0);
    let taken = plans[0].steps.iter().filter(|step| matches!(step, Step::Recv { .. })).count();
    assert_eq!(taken, 3 + 7);
}

#[test]
fn two_levels_send_each_part_to_each_host_once() {
    let topology = Topology::new((0..32).map(|rank| rank / 8).collect());
    for (kind, name, expected) in [
        (Kind::AllReduce, "two_level", 2 * 3 * 32), // a lane per rank: 3 parts out, 3 results out
        (Kind::AllGather, "two_level", 3 * 32),
        (Kind::ReduceScatter, "two_level", 3 * 32),
        (Kind::Broadcast, "two_level", 3),
        (Kind::Reduce, "two_level", 3),
    ] {
        let plans = named(kind, name).expect("the algorithm is in the table").plans(&topology, 0);
        let mut between_hosts = 0;
        for (rank, plan) in plans.iter().enumerate() {
            for step in &plan.steps {
                let Step::Send { to, .. } = step else { continue };
                between_hosts +=
                    to.iter().filter(|&&to| topology.host_of(to) != topology.host_of(rank)).count();
            }
        }
        assert_eq!(between_hosts, expected, "{kind}");
    }
}
