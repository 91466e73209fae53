use signal_hook::consts::SIGKILL;

use super::*;

const KILLED: End = End::Signal(SIGKILL);
const DONE: End = End::Exit(0);
/// The process number of rank 0; that of process n is n more.
const FIRST: u32 = 100;

fn terms() -> Terms {
    Terms { round: 0, has_others: false, hosts: vec!["here".into()], restarts_max: 3, restarts_used: 0 }
}

/// This many ranks of one node, and the spares that were started after them.
fn crew_of(terms: Terms, ranks: usize, spares: usize) -> Crew {
    let mut crew = Crew::new(terms);
    for id in 0..ranks {
        crew.started(id, FIRST + id as u32, None, Part::Rank(id));
    }
    for id in ranks..ranks + spares {
        start(&mut crew, id, Part::Spare);
    }
    crew
}

fn crew(ranks: usize, spares: usize) -> Crew {
    crew_of(terms(), ranks, spares)
}

fn start(crew: &mut Crew, id: Id, part: Part) {
    crew.started(id, FIRST + id as u32, Some(format!("0-{id}")), part);
}

fn member(id: Id) -> Member {
    Member { pid: FIRST + id as u32, host: "here".into(), local_rank: id % 10, ..Member::default() }
}

/// A generation of these processes, by rank.
fn generation(number: u64, ids: &[Id]) -> Generation {
    let ranks = ids.iter().map(|&id| member(id)).collect();
    Generation { generation: number, ranks, ..Generation::default() }
}

fn answer(look: u64, generation: Option<Generation>) -> Seen {
    Seen { look, generation: Ok(generation), replaced: 0, missing: 0, finished: 0 }
}

/// What a generation leads to, without the news that it is there.
fn saw(crew: &mut Crew, look: u64, generation: Generation) -> Vec<Act> {
    let acts = crew.seen(answer(look, Some(generation)));
    acts.into_iter().filter(|act| !matches!(act, Act::Show(_))).collect()
}

fn gave_up(acts: &[Act]) -> &str {
    match acts {
        [.., Act::GiveUp(reason)] => reason,
        other => panic!("{other:?}"),
    }
}

fn replacement(rank: usize, of: Id) -> Act {
    Act::Start { part: Part::Replacement(rank), of }
}

fn spare(of: Id) -> Act {
    Act::Start { part: Part::Spare, of }
}

#[test]
fn a_dead_rank_is_replaced_after_the_generation_was_read() {
    let mut crew = crew(4, 0);
    assert_eq!(crew.ended(1, KILLED), [Act::Look(1)]);
    assert!(crew.is_recovering());
    assert_eq!(saw(&mut crew, 0, generation(1, &[0, 1, 2, 3])), [], "that was read before the death");
    assert_eq!(saw(&mut crew, 1, generation(1, &[0, 1, 2, 3])), [replacement(1, 1)]);
    start(&mut crew, 4, Part::Replacement(1));
    assert!(crew.is_recovering());
    assert_eq!(saw(&mut crew, 1, generation(1, &[0, 1, 2, 3])), []);
    assert_eq!(saw(&mut crew, 1, generation(2, &[0, 4, 2, 3])), [Act::Forget(1)]);
    assert!(!crew.is_recovering());
    assert_eq!(crew.replaced(), 1);
    // The replacement is a rank like any other.
    assert_eq!(crew.ended(4, KILLED), [Act::Look(2)]);
    assert_eq!(saw(&mut crew, 2, generation(2, &[0, 4, 2, 3])), [replacement(1, 4)]);
}

#[test]
fn a_generation_tells_how_those_that_left_have_ended() {
    let mut crew = crew(2, 0);
    crew.ended(1, KILLED);
    let left = vec![Member { rank: Some(1), ..member(1) }];
    let joined = vec![Member { rank: Some(1), pid: 7, host: "there".into(), ..Member::default() }];
    let new = Generation { left, joined, ..generation(2, &[0, 9]) };
    let Act::Show(facts) = crew.seen(answer(0, Some(new))).remove(0) else { panic!("it is new") };
    assert_eq!((facts.left[0].pid, facts.left[0].end.as_deref()), (101, Some("killed by SIGKILL")));
    assert_eq!((facts.joined[0].pid, &facts.joined[0].end), (7, &None));
}

#[test]
fn a_job_whose_ranks_made_no_generation_is_restarted() {
    let mut crew = crew(2, 0);
    crew.ended(1, End::Exit(3));
    let acts = crew.seen(answer(1, None));
    assert_eq!(gave_up(&acts), "the program has not begun to use recovery");
    assert!(!crew.is_recovering());
    assert_eq!(crew.ended(0, KILLED), [], "from now on the round ends as without recovery");
}

#[test]
fn a_process_that_no_generation_has_is_not_replaced() {
    let mut crew = crew(3, 0);
    crew.ended(2, KILLED);
    assert_eq!(
        gave_up(&saw(&mut crew, 1, generation(1, &[0, 1]))),
        "rank 2 (pid 102) is not in generation 1"
    );
}

#[test]
fn a_store_that_cannot_be_read_ends_the_round() {
    let mut crew = crew(2, 0);
    crew.ended(1, KILLED);
    let lost = || Seen { look: 1, generation: Err("the store is lost".into()), ..answer(1, None) };
    assert_eq!(gave_up(&crew.seen(lost())), "the store is lost");
    // If nothing depends on it, it does not matter.
    assert_eq!(self::crew(2, 0).seen(lost()), []);
}

#[test]
fn a_spare_takes_the_place_and_another_spare_is_started() {
    let mut crew = crew(3, 1);
    crew.seen(answer(0, Some(generation(1, &[0, 1, 2]))));
    crew.ended(2, KILLED);
    assert_eq!(saw(&mut crew, 1, generation(1, &[0, 1, 2])), [spare(2)]);
    start(&mut crew, 4, Part::Spare);
    let seat = Seat { number: 2, local_rank: 3 };
    let next = generation(2, &[0, 1, 3]);
    assert_eq!(saw(&mut crew, 1, next.clone()), [Act::Admit { id: 3, seat }, Act::Forget(2)]);
    // It is judged as a rank, and the new spare is warm by now.
    crew.ended(3, KILLED);
    assert_eq!(saw(&mut crew, 2, next), [spare(3)]);
}

#[test]
fn a_spare_that_was_quicker_than_the_launcher_is_followed_by_another() {
    let mut crew = crew(2, 1);
    crew.ended(1, KILLED);
    let acts = saw(&mut crew, 1, generation(2, &[0, 2]));
    let seat = Seat { number: 1, local_rank: 2 };
    assert_eq!(acts, [Act::Admit { id: 2, seat }, spare(1), Act::Forget(1)]);
    assert_eq!(crew.replaced(), 1);
}

#[test]
fn two_ranks_that_die_at_once_are_both_replaced_and_a_cold_spare_does_not_count() {
    let mut crew = crew(4, 1);
    crew.seen(answer(0, Some(generation(1, &[0, 1, 2, 3]))));
    assert_eq!(crew.ended(1, KILLED), [Act::Look(1)]);
    assert_eq!(crew.ended(2, KILLED), [Act::Look(2)]);
    assert_eq!(saw(&mut crew, 2, generation(1, &[0, 1, 2, 3])), [spare(1), replacement(2, 2)]);
    start(&mut crew, 5, Part::Spare);
    start(&mut crew, 6, Part::Replacement(2));
    let acts = saw(&mut crew, 2, generation(2, &[0, 4, 6, 3]));
    let seat = Seat { number: 1, local_rank: 4 };
    assert_eq!(acts, [Act::Admit { id: 4, seat }, Act::Forget(1), Act::Forget(2)]);
    assert!(!crew.is_recovering());
    // A third one, while the spare that was started for the first is still cold.
    let mut crew = self::crew(3, 1);
    crew.ended(0, KILLED);
    assert_eq!(saw(&mut crew, 1, generation(1, &[0, 1, 2])), [spare(0)]);
    start(&mut crew, 4, Part::Spare);
    crew.ended(1, KILLED);
    assert_eq!(saw(&mut crew, 2, generation(1, &[0, 1, 2])), [replacement(1, 1)]);
}

#[test]
fn a_replacement_that_dies_before_it_joined_is_replaced() {
    let mut crew = crew(2, 0);
    crew.ended(1, KILLED);
    saw(&mut crew, 1, generation(1, &[0, 1]));
    start(&mut crew, 2, Part::Replacement(1));
    assert_eq!(crew.ended(2, End::Exit(1)), [Act::Forget(1), Act::Look(2)]);
    assert_eq!(saw(&mut crew, 2, generation(1, &[0, 1])), [replacement(1, 2)]);
    start(&mut crew, 3, Part::Replacement(1));
    assert_eq!(saw(&mut crew, 2, generation(2, &[0, 3])), [Act::Forget(2)]);
}

#[test]
fn a_replacement_that_gives_up_without_an_error_ends_the_round() {
    let mut crew = crew(2, 0);
    crew.ended(1, KILLED);
    saw(&mut crew, 1, generation(1, &[0, 1]));
    start(&mut crew, 2, Part::Replacement(1));
    assert_eq!(crew.ended(2, DONE), [Act::Look(2)]);
    let acts = saw(&mut crew, 2, generation(1, &[0, 1]));
    assert_eq!(
        gave_up(&acts),
        "pid 102, started in place of rank 1, ended (exit code 0) without taking part"
    );
    // If it had taken part by then, it has finished.
    let mut crew = self::crew(2, 0);
    crew.ended(1, KILLED);
    saw(&mut crew, 1, generation(1, &[0, 1]));
    start(&mut crew, 2, Part::Replacement(1));
    crew.ended(2, DONE);
    assert_eq!(saw(&mut crew, 2, generation(2, &[0, 2])), [Act::Forget(1)]);
    assert_eq!(crew.ended(0, DONE), [Act::StopSpares]);
}

#[test]
fn a_spare_that_dies_is_followed_by_another_once_there_is_a_generation() {
    let mut crew = crew(2, 1);
    assert_eq!(crew.ended(2, End::Exit(1)), [Act::Look(1)]);
    let note = |why: &str| {
        Act::Note(format!("the spare with pid 102 ended (exit code 1) and is not replaced: {why}"))
    };
    let expected = [note("the program has not begun to use recovery")];
    assert_eq!(crew.seen(answer(1, None)), expected);
    let mut crew = self::crew(2, 1);
    crew.ended(2, End::Exit(1));
    assert_eq!(saw(&mut crew, 1, generation(1, &[0, 1])), [spare(2)]);
    assert_eq!(saw(&mut crew, 1, generation(2, &[0, 1])), [Act::Forget(2)]);
    let mut crew = crew_of(Terms { restarts_used: 3, ..terms() }, 2, 1);
    crew.ended(2, End::Exit(1));
    let expected = [note("all restarts and replacements are used (3)")];
    assert_eq!(saw(&mut crew, 1, generation(1, &[0, 1])), expected);
    // It may also find that it is not needed.
    let mut crew = self::crew(2, 1);
    crew.ended(2, DONE);
    let text = "the spare with pid 102 ended (exit code 0) and is not replaced";
    assert_eq!(saw(&mut crew, 1, generation(1, &[0, 1])), [Act::Note(text.into())]);
}

#[test]
fn a_spare_that_dies_while_a_rank_waits_for_it_is_followed_by_a_replacement() {
    let mut crew = crew(2, 1);
    crew.ended(1, KILLED);
    assert_eq!(saw(&mut crew, 1, generation(1, &[0, 1])), [spare(1)]);
    start(&mut crew, 3, Part::Spare);
    crew.ended(2, KILLED);
    assert_eq!(saw(&mut crew, 2, generation(1, &[0, 1])), [replacement(1, 2)]);
    start(&mut crew, 4, Part::Replacement(1));
    // The cold spare was quicker: the replacement waits as a spare from now on.
    let seat = Seat { number: 1, local_rank: 3 };
    let expected = [Act::Admit { id: 3, seat }, Act::Forget(1), Act::Forget(2)];
    assert_eq!(saw(&mut crew, 2, generation(2, &[0, 3])), expected);
    crew.ended(3, KILLED);
    assert_eq!(saw(&mut crew, 3, generation(2, &[0, 3])), [spare(3)]);
}

#[test]
fn a_spare_that_is_admitted_and_dies_in_the_same_moment_is_a_dead_rank() {
    let mut crew = crew(2, 1);
    crew.ended(1, KILLED);
    assert_eq!(saw(&mut crew, 1, generation(1, &[0, 1])), [spare(1)]);
    start(&mut crew, 3, Part::Spare);
    assert_eq!(crew.ended(2, KILLED), [Act::Look(2)]);
    let seat = Seat { number: 1, local_rank: 2 };
    let acts = saw(&mut crew, 2, generation(2, &[0, 2]));
    assert_eq!(acts, [Act::Admit { id: 2, seat }, Act::Forget(1), replacement(1, 2)]);
    assert!(crew.is_recovering());
    start(&mut crew, 4, Part::Replacement(1));
    assert_eq!(saw(&mut crew, 2, generation(3, &[0, 4])), [Act::Forget(2)]);
    // The launcher may read too early to see that it was admitted, and has started a process for it by then.
    let mut crew = self::crew(2, 1);
    crew.ended(1, KILLED);
    saw(&mut crew, 1, generation(1, &[0, 1]));
    start(&mut crew, 3, Part::Spare);
    crew.ended(2, KILLED);
    assert_eq!(saw(&mut crew, 2, generation(1, &[0, 1])), [replacement(1, 2)]);
    start(&mut crew, 4, Part::Replacement(1));
    let acts = saw(&mut crew, 2, generation(2, &[0, 2]));
    assert_eq!(acts, [Act::Admit { id: 2, seat }, Act::Forget(1)]);
    assert!(crew.is_recovering());
    assert_eq!(saw(&mut crew, 2, generation(3, &[0, 4])), [Act::Forget(2)]);
    assert!(!crew.is_recovering());
}

#[test]
fn after_a_rank_has_finished_no_other_is_replaced() {
    let mut crew = crew(2, 0);
    crew.ended(0, DONE);
    crew.ended(1, KILLED);
    let reason = "rank 0 has already finished, so the others cannot take in another rank 1";
    assert_eq!(gave_up(&saw(&mut crew, 1, generation(1, &[0, 1]))), reason);
    let mut crew = self::crew(3, 1);
    assert_eq!(crew.ended(0, DONE), []);
    crew.ended(1, End::Exit(1));
    assert_eq!(gave_up(&saw(&mut crew, 1, generation(1, &[0, 1, 2]))), reason);
    // It may also finish after the death: then no rank takes the replacement in.
    let mut crew = self::crew(3, 0);
    crew.ended(1, End::Exit(1));
    saw(&mut crew, 1, generation(1, &[0, 1, 2]));
    start(&mut crew, 3, Part::Replacement(1));
    assert_eq!(gave_up(&crew.ended(0, DONE)), reason);
}

#[test]
fn when_all_ranks_have_finished_spares_are_stopped() {
    let mut crew = crew(2, 1);
    assert_eq!(crew.ended(1, DONE), []);
    assert_eq!(crew.ended(0, DONE), [Act::StopSpares]);
    assert!(!crew.is_recovering());
    assert_eq!(crew.ended(2, KILLED), []);
    // Also if a spare has just died.
    let mut crew = self::crew(1, 1);
    crew.ended(1, KILLED);
    assert_eq!(crew.ended(0, DONE), []);
    let text =
        "the spare with pid 101 ended (killed by SIGKILL) and is not replaced: rank 0 has already finished";
    let expected = [Act::Note(text.into()), Act::StopSpares];
    assert_eq!(saw(&mut crew, 1, generation(1, &[0])), expected);
}

#[test]
fn when_no_rank_is_left_the_round_ends() {
    let mut crew = crew(2, 1);
    crew.ended(0, KILLED);
    crew.ended(1, KILLED);
    assert_eq!(gave_up(&saw(&mut crew, 2, generation(1, &[0, 1]))), "no rank of generation 1 is left");
    // They may also die one after the other. That is one failure, and uses no more of the budget than that.
    let mut crew = self::crew(3, 0);
    for rank in 0..2 {
        crew.ended(rank, End::Exit(1));
        let acts = saw(&mut crew, rank as u64 + 1, generation(1, &[0, 1, 2]));
        assert_eq!(acts, [replacement(rank, rank)]);
        start(&mut crew, 3 + rank, Part::Replacement(rank));
    }
    crew.ended(2, End::Exit(1));
    let acts = saw(&mut crew, 3, generation(1, &[0, 1, 2]));
    let reason = "no rank of generation 1 is left".to_owned();
    assert_eq!(acts, [Act::Refund(2), Act::GiveUp(reason)]);
    assert_eq!(crew.replaced(), 0);
    // Ranks of other nodes may go on.
    let mut crew = crew_of(Terms { has_others: true, ..terms() }, 2, 0);
    crew.ended(0, KILLED);
    crew.ended(1, KILLED);
    let acts = saw(&mut crew, 2, generation(1, &[0, 1, 50]));
    assert_eq!(acts, [replacement(0, 0), replacement(1, 1)]);
    // Unless the launchers have counted all of them.
    let mut crew = crew_of(Terms { has_others: true, ..terms() }, 1, 0);
    crew.ended(0, KILLED);
    let generation = Ok(Some(generation(1, &[0, 50])));
    let acts = crew.seen(Seen { generation, missing: 2, ..answer(1, None) });
    assert_eq!(gave_up(&acts), "no rank of generation 1 is left");
}

#[test]
fn launchers_count_for_each_other_which_ranks_are_missing_or_have_finished() {
    let mut crew = crew_of(Terms { has_others: true, ..terms() }, 3, 0);
    let tally = |missing, finished| Act::Tally { missing, finished };
    assert_eq!(crew.ended(1, KILLED), [tally(1, 0), Act::Look(1)]);
    let ranks = |second| generation(1 + u64::from(second != 1), &[0, second, 2, 50]);
    assert_eq!(saw(&mut crew, 1, ranks(1)), [replacement(1, 1)]);
    start(&mut crew, 3, Part::Replacement(1));
    assert_eq!(crew.ended(3, KILLED), [Act::Forget(1), Act::Look(2)], "it is still missing");
    assert_eq!(saw(&mut crew, 2, ranks(1)), [replacement(1, 3)]);
    start(&mut crew, 4, Part::Replacement(1));
    assert_eq!(saw(&mut crew, 2, ranks(4)), [tally(-1, 0), Act::Forget(3)]);
    assert_eq!(crew.ended(0, DONE), [tally(0, 1)]);
    // A rank that finished on another node cannot take in another either.
    let mut crew = crew_of(Terms { has_others: true, ..terms() }, 2, 0);
    crew.ended(1, KILLED);
    assert_eq!(saw(&mut crew, 1, generation(1, &[0, 1, 50])), [replacement(1, 1)]);
    start(&mut crew, 2, Part::Replacement(1));
    let acts = crew.seen(Seen { finished: 1, ..answer(1, None) });
    assert_eq!(acts, [Act::GiveUp("a rank of another node has already finished".into())]);
}

#[test]
fn restarts_and_replacements_of_all_nodes_have_one_limit() {
    let dies = |used: u64, replaced: u64| {
        let mut crew = crew_of(Terms { restarts_used: used, ..terms() }, 2, 0);
        crew.ended(1, KILLED);
        let generation = Ok(Some(generation(1, &[0, 1])));
        crew.seen(Seen { generation, replaced, ..answer(1, None) }).pop()
    };
    assert_eq!(dies(0, 2), Some(replacement(1, 1)));
    assert_eq!(dies(1, 1), Some(replacement(1, 1)));
    let spent = Some(Act::GiveUp("all restarts and replacements are used (3)".into()));
    assert_eq!((dies(0, 3), dies(2, 1), dies(3, 0)), (spent.clone(), spent.clone(), spent));
}

#[test]
fn a_rank_that_the_others_left_out_is_killed_and_not_replaced() {
    let mut crew = crew(3, 1);
    crew.seen(answer(0, Some(generation(1, &[0, 1, 2]))));
    let seat = Seat { number: 1, local_rank: 3 };
    let acts = saw(&mut crew, 0, generation(2, &[0, 3, 2]));
    assert_eq!(acts, [Act::Admit { id: 3, seat }, Act::Kill(1)]);
    assert_eq!(crew.ended(1, KILLED), [Act::Forget(1)]);
    assert!(!crew.is_recovering());
}

#[test]
fn processes_that_a_generation_names_by_other_numbers_are_left_alone() {
    let mut crew = crew(2, 0);
    let strangers =
        |number| Generation { generation: number, ranks: vec![Member::default(); 2], ..generation(1, &[]) };
    assert_eq!(saw(&mut crew, 0, strangers(1)), []);
    assert_eq!(saw(&mut crew, 0, strangers(2)), []);
    // Those of other hosts may have the same numbers.
    let elsewhere = Member { host: "there".into(), ..member(1) };
    let ranks = vec![member(0), elsewhere];
    assert_eq!(saw(&mut crew, 0, Generation { ranks, ..generation(3, &[]) }), []);
    crew.ended(1, KILLED);
    let reason = "rank 1 (pid 101) is not in generation 3";
    assert_eq!(gave_up(&crew.seen(answer(1, None))), reason);
}

#[test]
fn a_joiner_is_known_by_its_name_whatever_its_process() {
    let mut crew = crew(2, 1);
    let joined =
        Member { pid: 1, host: "container".into(), joining: Some("0-2".into()), ..Member::default() };
    let ranks = vec![member(0), joined];
    let seat = Seat { number: 1, local_rank: 0 };
    crew.ended(1, KILLED);
    let acts = saw(&mut crew, 1, Generation { ranks, ..generation(2, &[]) });
    assert_eq!(acts[0], Act::Admit { id: 2, seat });
}

#[test]
fn a_rank_that_a_spare_of_another_node_took_over_is_not_missed_here() {
    let mut crew = crew_of(Terms { has_others: true, ..terms() }, 2, 0);
    crew.ended(1, KILLED);
    saw(&mut crew, 1, generation(1, &[0, 1, 50]));
    start(&mut crew, 2, Part::Replacement(1));
    let counted = Act::Tally { missing: -1, finished: 0 };
    assert_eq!(saw(&mut crew, 1, generation(2, &[0, 51, 50])), [counted, Act::Forget(1)]);
    assert!(!crew.is_recovering());
    // What was started for it waits as a spare, and ends with this node's ranks.
    let counted = Act::Tally { missing: 0, finished: 1 };
    assert_eq!(crew.ended(0, DONE), [counted, Act::StopSpares]);
}
