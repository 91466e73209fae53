//! For each flaw, plans that have it: the verifier reports exactly that one, with a helpful message.

use tenfold_plan::{Area, Chunk, Kind, Place, Plan, Step, Topology, named, verify};
use verify::{Claim, Flaw, Stuck, Wait};

const ALL: Chunk = Chunk { buffer: Area::Output, first: 0, count: 1 };

fn claim(kind: Kind) -> Claim {
    Claim { kind, root: 0, equal_parts: false, in_rank_order: false }
}

fn plans(kind: Kind, name: &str, size: usize) -> Vec<Plan> {
    named(kind, name).expect("the algorithm is in the table").plans(&Topology::one_host(size), 0)
}

/// On a host each.
fn plans_apart(kind: Kind, name: &str, size: usize) -> Vec<Plan> {
    named(kind, name).expect("the algorithm is in the table").plans(&Topology::new((0..size).collect()), 0)
}

/// The plans of `size` ranks, each written by `steps`.
fn written(empty: Plan, size: usize, steps: impl Fn(&mut Plan, usize)) -> Vec<Plan> {
    let one = |rank| {
        let mut plan = empty.clone();
        steps(&mut plan, rank);
        plan
    };
    (0..size).map(one).collect()
}

#[track_caller]
fn assert_flaw(claim: Claim, plans: &[Plan], flaw: Flaw, words: &str) {
    assert_eq!(verify::run(&claim, plans), Err(flaw.clone()));
    assert_eq!(flaw.to_string(), words);
}

#[test]
fn buffers_are_split_as_the_collective_requires() {
    let mut gather = plans(Kind::Gather, "direct", 3);
    gather[1].output = 3;
    let words = "rank 1 does not split its buffers into the parts of the collective";
    assert_flaw(claim(Kind::Gather), &gather, Flaw::WrongParts { rank: 1 }, words);

    let mut ring = plans(Kind::AllReduce, "ring", 3);
    ring[2].output = 4;
    assert_flaw(claim(Kind::AllReduce), &ring, Flaw::WrongParts { rank: 2 }, &words.replace('1', "2"));

    let mut scatter = plans(Kind::ReduceScatter, "ring", 3);
    scatter[1].scratch[0] = (Area::Scratch, 0);
    assert_flaw(claim(Kind::ReduceScatter), &scatter, Flaw::WrongParts { rank: 1 }, words);
}

#[test]
fn all_ranks_run_in_pieces_or_none() {
    let mut ring = plans(Kind::AllReduce, "ring", 3);
    ring[2].pieces = false;
    let words = "only one of ranks 0 and 2 may run in pieces";
    assert_flaw(claim(Kind::AllReduce), &ring, Flaw::PiecesDiffer { rank: 0, other: 2 }, words);
}

#[test]
fn all_ranks_have_as_many_phases() {
    let mut ring = plans_apart(Kind::AllReduce, "ring", 3);
    ring[1].seams.pop();
    let words = "ranks 0 and 1 have different numbers of phases";
    assert_flaw(claim(Kind::AllReduce), &ring, Flaw::PhasesDiffer { rank: 0, other: 1 }, words);
}

#[test]
fn phases_are_in_order_and_only_in_plans_whose_rounds_may_overlap() {
    let words = "rank 2 has phases in a plan that cannot have them, or in the wrong order";
    let wrong = Flaw::WrongPhases { rank: 2 };
    let mut ring = plans_apart(Kind::AllReduce, "ring", 3);
    ring[2].seams.swap(0, 1);
    assert_flaw(claim(Kind::AllReduce), &ring, wrong.clone(), words);
    ring[2].seams.swap(0, 1);
    ring[2].seams[3] = 99;
    assert_flaw(claim(Kind::AllReduce), &ring, wrong, words);

    let first = Flaw::WrongPhases { rank: 0 };
    let with_seam = |mut plans: Vec<Plan>| {
        plans.iter_mut().for_each(|plan| plan.seams = vec![1]);
        plans
    };
    let scratch = with_seam(plans(Kind::ReduceScatter, "ring", 3));
    assert_flaw(claim(Kind::ReduceScatter), &scratch, first.clone(), &words.replace('2', "0"));
    let whole = with_seam(plans(Kind::AllGather, "bruck", 3));
    assert_flaw(claim(Kind::AllGather), &whole, first, &words.replace('2', "0"));
}

/// Rank 0 sends two parts. The first is taken a phase later, the second in the same phase: the second of a round
/// would come before the first of the next.
#[test]
fn messages_do_not_overtake_each_other_at_seams() {
    let two = Plan::new(0, 2).lending();
    let broadcast = |seams: [usize; 2]| {
        let mut plans = written(two.clone(), 2, |plan, rank| {
            for part in 0..2 {
                match rank {
                    0 => plan.send(1, Chunk::output(part)),
                    _ => plan.recv(0, Chunk::output(part)),
                }
            }
        });
        plans.iter_mut().zip(seams).for_each(|(plan, seam)| plan.seams = vec![seam]);
        plans
    };
    assert_eq!(verify::run(&claim(Kind::Broadcast), &broadcast([2, 0])), Ok(()));
    assert_eq!(verify::run(&claim(Kind::Broadcast), &broadcast([1, 1])), Ok(()));
    let words = "step 1 of rank 1 gets a message of rank 0 that has a different length";
    let flaw = Flaw::WrongShape { rank: 1, step: 1, from: 0 };
    assert_flaw(claim(Kind::Broadcast), &broadcast([1, 0]), flaw, words);
    let equal = Claim { equal_parts: true, ..claim(Kind::Broadcast) };
    let words = "output[1] of rank 1 is not the result";
    assert_flaw(equal, &broadcast([1, 0]), Flaw::WrongResult { rank: 1, part: 1 }, words);
}

#[test]
fn rounds_overlap_by_a_phase_and_the_youngest_goes_first() {
    let mut plan = Plan::new(0, 1);
    (0..3).for_each(|_| {
        plan.copy(ALL, ALL);
        plan.seam();
    });
    plan.copy(ALL, ALL);
    let order = |rounds| {
        let mut place = Place::default();
        let mut order = Vec::new();
        while place.round < rounds {
            order.push((place.round, place.step));
            place.advance(&plan, rounds);
        }
        assert_eq!((place.round, place.step), (rounds, 0));
        order
    };
    assert_eq!(order(1), [(0, 0), (0, 1), (0, 2), (0, 3)]);
    assert_eq!(order(2), [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2), (0, 3), (1, 3)]);
    let six = order(6);
    assert_eq!(six[..6], [(0, 0), (1, 0), (0, 1), (2, 0), (1, 1), (0, 2)]);
    assert_eq!(six[21..], [(5, 2), (4, 3), (5, 3)]);
    let mut sorted = six;
    sorted.sort_unstable();
    sorted.dedup();
    assert_eq!(sorted.len(), 24, "every step of every round, once");
}

#[test]
fn a_plan_with_chunks_of_several_parts_cannot_run_in_pieces() {
    let mut bruck = plans(Kind::AllGather, "bruck", 4);
    bruck.iter_mut().for_each(|plan| plan.pieces = true);
    let words = "step 3 of rank 0 has a chunk of several parts, so the plan cannot run in pieces";
    assert_flaw(claim(Kind::AllGather), &bruck, Flaw::ClaimsPieces { rank: 0, step: 3 }, words);
}

#[test]
fn parts_and_ranks_must_exist() {
    let words = "step 0 of rank 1 names a part or a rank that does not exist";
    let flaw = Flaw::OutOfBounds { rank: 1, step: 0 };
    let mut broadcast = plans(Kind::Broadcast, "direct", 2);
    broadcast[1].steps[0] = Step::Recv { from: 0, chunk: Chunk::output(1) };
    assert_flaw(claim(Kind::Broadcast), &broadcast, flaw.clone(), words);
    broadcast[1].steps[0] = Step::Recv { from: 2, chunk: ALL };
    assert_flaw(claim(Kind::Broadcast), &broadcast, flaw, words);
}

#[test]
fn no_rank_sends_to_itself() {
    let mut broadcast = plans(Kind::Broadcast, "direct", 2);
    broadcast[0].steps[0] = Step::Send { to: vec![0, 1], chunk: ALL };
    let words = "step 0 of rank 0 is a message to itself";
    assert_flaw(claim(Kind::Broadcast), &broadcast, Flaw::SelfMessage { rank: 0, step: 0 }, words);
}

#[test]
fn peers_are_named_once_and_those_of_a_reduction_in_order() {
    let flaw = Flaw::PeersNotAscending { rank: 0, step: 0 };
    let words = "step 0 of rank 0 does not name its peers once each in ascending order";
    let mut reduce = plans(Kind::Reduce, "direct", 3);
    reduce[0].steps[0] = Step::Reduce { from: vec![2, 1], own: ALL, to: ALL, finish: true };
    assert_flaw(claim(Kind::Reduce), &reduce, flaw.clone(), words);
    let mut broadcast = plans(Kind::Broadcast, "direct", 3);
    broadcast[0].steps[0] = Step::Send { to: vec![2, 1, 2], chunk: ALL };
    assert_flaw(claim(Kind::Broadcast), &broadcast, flaw, words);
}

#[test]
fn the_input_is_not_written() {
    let gather = written(Plan::new(1, 2), 2, |plan, rank| {
        plan.send(1 - rank, Chunk::input(0));
        plan.recv(1 - rank, Chunk::input(0));
    });
    let words = "step 1 of rank 0 writes the caller's input";
    assert_flaw(claim(Kind::AllGather), &gather, Flaw::WritesInput { rank: 0, step: 1 }, words);
}

#[test]
fn a_step_does_not_write_what_it_reads() {
    let flaw = Flaw::Overlaps { rank: 0, step: 0 };
    let words = "step 0 of rank 0 overwrites what it is reading";
    let copy = written(Plan::new(0, 1), 1, |plan, _| plan.copy(ALL, ALL));
    assert_flaw(claim(Kind::AllReduce), &copy, flaw.clone(), words);
    let shifted = written(Plan::new(0, 3).whole(), 1, |plan, _| {
        plan.reduce_last(&[], Chunk { count: 2, ..ALL }, Chunk { first: 1, count: 2, ..ALL });
    });
    assert_flaw(claim(Kind::AllReduce), &shifted, flaw, words);
}

#[test]
fn no_rank_passes_on_what_it_does_not_have_yet() {
    let mut broadcast = plans(Kind::Broadcast, "binomial", 4);
    broadcast[2].steps.swap(0, 1);
    let flaw = Flaw::ReadsNothing { rank: 2, step: 0, chunk: ALL };
    let words = "step 0 of rank 2 reads output[0], which is not written yet";
    assert_flaw(claim(Kind::Broadcast), &broadcast, flaw, words);
}

#[test]
fn a_message_has_the_length_of_its_destination() {
    let mut ring = plans(Kind::AllReduce, "ring", 3);
    ring[1].lends = false; // what it sends by mistake is overwritten immediately
    let Step::Send { chunk, .. } = &mut ring[1].steps[0] else { panic!("the ring begins with a send") };
    *chunk = Chunk::output(0);
    let flaw = Flaw::WrongShape { rank: 2, step: 1, from: 1 };
    let words = "step 1 of rank 2 gets a message of rank 1 that has a different length";
    assert_flaw(claim(Kind::AllReduce), &ring, flaw, words);

    let mut gather = plans(Kind::AllGather, "direct", 2);
    gather[1].steps[1] = Step::Copy { from: Chunk::input(0), to: Chunk::output(0) };
    let flaw = Flaw::WrongShape { rank: 1, step: 1, from: 1 };
    assert_flaw(claim(Kind::AllGather), &gather, flaw, "step 1 of rank 1 has chunks of different lengths");

    let bruck = plans(Kind::AllToAll, "bruck", 3);
    let flaw = verify::run(&claim(Kind::AllToAll), &bruck);
    assert!(matches!(flaw, Err(Flaw::WrongShape { .. })), "bruck needs equal parts, so {flaw:?} is too late");
}

#[test]
fn a_reduction_combines_what_belongs_together() {
    let mut direct = plans(Kind::AllReduce, "direct", 2);
    direct[1].lends = false; // what it sends by mistake is overwritten immediately
    let Step::Send { chunk, .. } = &mut direct[1].steps[0] else { panic!("it begins with a send") };
    *chunk = Chunk::output(1);
    let equal = Claim { equal_parts: true, ..claim(Kind::AllReduce) };
    let words = "step 1 of rank 0 combines parts that do not belong together";
    assert_flaw(equal, &direct, Flaw::MixesParts { rank: 0, step: 1 }, words);
}

#[test]
fn a_piece_does_not_use_what_the_last_one_left_in_scratch() {
    let mut empty = Plan::new(0, 1);
    empty.add_scratch(Area::Output, 0);
    let plans = written(empty, 2, |plan, rank| {
        plan.send(1 - rank, ALL);
        plan.reduce_last(&[1 - rank], ALL, Chunk::scratch(0));
        plan.copy(Chunk::scratch(0), ALL);
    });
    assert_eq!(verify::run(&claim(Kind::AllReduce), &plans), Ok(()));
    let mut stale = plans;
    stale[1].steps.swap(1, 2);
    stale[1].steps.insert(0, Step::Copy { from: ALL, to: Chunk::scratch(0) });
    let words = "output[0] of rank 1 lacks rank 0";
    assert_flaw(claim(Kind::AllReduce), &stale, Flaw::Missing { rank: 1, part: 0, contributor: 0 }, words);
}

#[test]
fn every_rank_is_counted_once() {
    let twice = written(Plan::new(0, 1), 2, |plan, rank| {
        plan.send(1 - rank, ALL);
        plan.reduce(&[1 - rank], ALL, ALL);
        plan.send(1 - rank, ALL);
        plan.reduce_last(&[1 - rank], ALL, ALL);
    });
    let flaw = Flaw::CountedTwice { rank: 1, step: 3, contributor: 0 };
    assert_flaw(claim(Kind::AllReduce), &twice, flaw, "step 3 of rank 1 counts rank 0 twice");
}

#[test]
fn a_finish_comes_when_all_are_counted() {
    let mut ring = plans(Kind::AllReduce, "ring", 3);
    let Step::Reduce { finish, .. } = &mut ring[0].steps[1] else { panic!("it reduces second") };
    *finish = true;
    let flaw = Flaw::FinishedTooEarly { rank: 0, step: 1, missing: 1 };
    let words = "step 1 of rank 0 finishes a result that lacks rank 1";
    assert_flaw(claim(Kind::AllReduce), &ring, flaw, words);
}

#[test]
fn a_finish_comes_once() {
    let again = written(Plan::new(0, 1), 1, |plan, _| {
        plan.reduce_last(&[], ALL, ALL);
        plan.reduce_last(&[], ALL, ALL);
    });
    let words = "step 1 of rank 0 combines a result that is already finished";
    assert_flaw(claim(Kind::AllReduce), &again, Flaw::FinishedTwice { rank: 0, step: 1 }, words);
}

#[test]
fn a_finish_comes_at_all_even_for_one_rank() {
    let nothing = [Plan::new(0, 1)];
    let words = "output[0] of rank 0 counts every rank but was never finished";
    assert_flaw(claim(Kind::AllReduce), &nothing, Flaw::NeverFinished { rank: 0, part: 0 }, words);
    let mut doubling = plans(Kind::AllReduce, "recursive_doubling", 4);
    for step in doubling.iter_mut().flat_map(|plan| &mut plan.steps) {
        if let Step::Reduce { finish, .. } = step {
            *finish = false;
        }
    }
    assert_flaw(claim(Kind::AllReduce), &doubling, Flaw::NeverFinished { rank: 0, part: 0 }, words);
}

#[test]
fn recursive_doubling_may_not_lend() {
    let mut doubling = plans(Kind::AllReduce, "recursive_doubling", 2);
    doubling.iter_mut().for_each(|plan| plan.lends = true);
    // The other rank lent its value too, before it read: its message says nothing about that.
    let flaw = Flaw::OverwritesLent { rank: 1, step: 1, reader: 0 };
    let words = "step 1 of rank 1 overwrites what rank 0 may still be reading";
    assert_flaw(claim(Kind::AllReduce), &doubling, flaw, words);
}

#[test]
fn lent_scratch_is_not_reused_by_the_next_piece_while_a_peer_may_read_it() {
    let mut ring = plans(Kind::ReduceScatter, "ring", 3);
    ring.iter_mut().for_each(|plan| (plan.lends, plan.pieces) = (true, false));
    assert_eq!(verify::run(&claim(Kind::ReduceScatter), &ring), Ok(()), "one piece alone is fine");
    ring.iter_mut().for_each(|plan| plan.pieces = true);
    let flaw = Flaw::OverwritesLent { rank: 0, step: 1, reader: 1 };
    let words = "step 1 of rank 0 overwrites what rank 1 may still be reading";
    assert_flaw(claim(Kind::ReduceScatter), &ring, flaw, words);
}

/// Rank 0 lends scratch to rank 1 and learns through rank 2 that it was read, before it takes what rank 1
/// sent earlier.
fn heard_through_another() -> Vec<Plan> {
    let mut empty = Plan::new(0, 1).lending().whole();
    let (lent, other) = (empty.add_scratch(Area::Output, 0), empty.add_scratch(Area::Output, 0));
    let word = |plan: &mut Plan, rank: usize| match rank {
        0 => {
            plan.copy(ALL, lent);
            plan.send(1, lent);
            plan.recv(2, other);
            plan.recv(1, other);
            plan.copy(ALL, lent);
            plan.reduce_last(&[1, 2], ALL, ALL);
            plan.send_all(&[1, 2], ALL);
        }
        1 => {
            plan.send(0, ALL);
            plan.recv(0, other);
            plan.send(2, other);
            plan.send(0, ALL);
            plan.recv(0, ALL);
        }
        _ => {
            plan.recv(1, other);
            plan.send(0, ALL);
            plan.send(0, ALL);
            plan.recv(0, ALL);
        }
    };
    written(empty, 3, word)
}

#[test]
fn evidence_of_a_read_may_come_through_other_ranks_and_is_kept() {
    let mut plans = heard_through_another();
    assert_eq!(verify::run(&claim(Kind::AllReduce), &plans), Ok(()));
    plans[0].steps.swap(2, 4);
    let flaw = Flaw::OverwritesLent { rank: 0, step: 2, reader: 1 };
    let words = "step 2 of rank 0 overwrites what rank 1 may still be reading";
    assert_flaw(claim(Kind::AllReduce), &plans, flaw, words);
}

#[test]
fn evidence_that_was_sent_before_reading_does_not_count() {
    let mut plans = heard_through_another();
    plans[1].steps.swap(1, 0); // takes it first: its own early message is now sufficient evidence
    assert_eq!(verify::run(&claim(Kind::AllReduce), &plans), Ok(()));
    let mut early = heard_through_another();
    early[0].steps.swap(2, 3);
    early[0].steps.swap(3, 4); // overwrites after the early message, before that of rank 2
    let flaw = Flaw::OverwritesLent { rank: 0, step: 3, reader: 1 };
    assert_eq!(verify::run(&claim(Kind::AllReduce), &early), Err(flaw));
}

#[test]
fn ranks_that_all_receive_first_wait_forever() {
    let mut barrier = plans(Kind::Barrier, "dissemination", 2);
    barrier.iter_mut().for_each(|plan| plan.steps.swap(0, 1));
    let stuck = |rank, peer| Stuck { rank, step: 0, waits_for: Wait::Message(peer) };
    let flaw = Flaw::Deadlock { stuck: vec![stuck(0, 1), stuck(1, 0)] };
    let words = "deadlock: rank 0 waits in step 0 for rank 1, rank 1 waits in step 0 for rank 0";
    assert_flaw(claim(Kind::Barrier), &barrier, flaw, words);
}

#[test]
fn only_a_lending_plan_sends_twice_before_the_peer_takes_one() {
    let eager = |empty: Plan| {
        written(empty, 2, |plan, rank| {
            (0..2).for_each(|_| plan.send(1 - rank, Chunk::EMPTY));
            (0..2).for_each(|_| plan.recv(1 - rank, Chunk::EMPTY));
        })
    };
    assert_eq!(verify::run(&claim(Kind::Barrier), &eager(Plan::new(0, 0).lending())), Ok(()));
    let stuck = |rank, peer| Stuck { rank, step: 1, waits_for: Wait::Room(peer) };
    let flaw = Flaw::Deadlock { stuck: vec![stuck(0, 1), stuck(1, 0)] };
    let words = "deadlock: rank 0 waits in step 1 for rank 1 to take a message, \
                 rank 1 waits in step 1 for rank 0 to take a message";
    assert_flaw(claim(Kind::Barrier), &eager(Plan::new(0, 0)), flaw, words);
}

#[test]
fn no_message_is_left_over() {
    let mut broadcast = plans(Kind::Broadcast, "direct", 3);
    broadcast[2].send(1, ALL);
    let words = "rank 1 never takes a message of rank 2";
    assert_flaw(claim(Kind::Broadcast), &broadcast, Flaw::LeftOver { from: 2, to: 1 }, words);
}

#[test]
fn no_rank_leaves_a_barrier_before_all_have_joined() {
    let mut barrier = plans(Kind::Barrier, "dissemination", 4);
    barrier.iter_mut().for_each(|plan| plan.steps.truncate(2));
    let words = "rank 0 may leave the barrier before rank 1 has joined";
    assert_flaw(claim(Kind::Barrier), &barrier, Flaw::LeftAlone { rank: 0, absent: 1 }, words);
    barrier.iter_mut().for_each(|plan| plan.pieces = false);
    assert_flaw(claim(Kind::Barrier), &barrier, Flaw::LeftAlone { rank: 0, absent: 1 }, words);
}

#[test]
fn a_result_includes_all_ranks() {
    let mut reduce = plans(Kind::Reduce, "direct", 3);
    reduce[2].steps.clear();
    reduce[0].steps[0] = Step::Reduce { from: vec![1], own: ALL, to: ALL, finish: false };
    let flaw = Flaw::Missing { rank: 0, part: 0, contributor: 2 };
    assert_flaw(claim(Kind::Reduce), &reduce, flaw, "output[0] of rank 0 lacks rank 2");
}

#[test]
fn a_result_is_what_the_collective_says() {
    let words = "output[1] of rank 1 is not the result";
    let mut gather = plans(Kind::AllGather, "direct", 2);
    gather[1].steps.remove(1);
    assert_flaw(claim(Kind::AllGather), &gather, Flaw::WrongResult { rank: 1, part: 1 }, words);

    let everything = plans(Kind::AllReduce, "one_shot", 2);
    let words = "output[0] of rank 0 is not the result";
    assert_flaw(claim(Kind::Scan), &everything, Flaw::WrongResult { rank: 0, part: 0 }, words);

    let mut scatter = plans(Kind::Scatter, "direct", 3);
    for step in &mut scatter[0].steps {
        if let Step::Send { to, .. } = step {
            to[0] = 3 - to[0];
        }
    }
    let equal = Claim { equal_parts: true, ..claim(Kind::Scatter) };
    let words = "output[0] of rank 1 is not the result";
    assert_flaw(equal, &scatter, Flaw::WrongResult { rank: 1, part: 0 }, words);
}

#[test]
fn a_sum_is_that_of_the_part_meant_for_the_rank() {
    let swapped = written(Plan::new(2, 1), 2, |plan, rank| {
        plan.send(1 - rank, Chunk::input(rank));
        plan.reduce_last(&[1 - rank], Chunk::input(1 - rank), Chunk::output(0));
    });
    let equal = Claim { equal_parts: true, ..claim(Kind::ReduceScatter) };
    let words = "output[0] of rank 0 is not the result";
    assert_flaw(equal, &swapped, Flaw::WrongResult { rank: 0, part: 0 }, words);
}

#[test]
fn ranks_that_each_add_to_their_own_value_first_differ() {
    let naive = written(Plan::new(0, 1), 3, |plan, rank| {
        let others: Vec<usize> = (0..3).filter(|&other| other != rank).collect();
        plan.send_all(&others, ALL);
        plan.reduce(&others[..1], ALL, ALL);
        plan.reduce_last(&others[1..], ALL, ALL);
    });
    let flaw = Flaw::RanksDiffer { rank: 0, other: 2, part: 0 };
    let words = "ranks 0 and 2 combined output[0] in different order";
    assert_flaw(claim(Kind::AllReduce), &naive, flaw, words);
}

#[test]
fn the_ring_does_not_add_in_order_of_rank() {
    let ordered = Claim { in_rank_order: true, ..claim(Kind::AllReduce) };
    let words = "output[0] of rank 0 was not combined in one pass in order of rank";
    let flaw = Flaw::NotInRankOrder { rank: 0, part: 0 };
    assert_flaw(ordered, &plans(Kind::AllReduce, "ring", 3), flaw, words);
}

#[test]
fn a_ring_with_any_missing_step_is_noticed() {
    for step in 0..plans(Kind::AllReduce, "ring", 4)[0].steps.len() {
        let mut ring = plans(Kind::AllReduce, "ring", 4);
        ring[1].steps.remove(step);
        assert!(verify::run(&claim(Kind::AllReduce), &ring).is_err(), "step {step}");
    }
}
