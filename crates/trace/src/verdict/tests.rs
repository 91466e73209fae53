//! Every verdict with its exact text, from small constructed dumps.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use super::super::align::{Filter, Job};
use super::super::dump::{Call, Calls, Detail, Dump, End, Failure, Frame, GroupConfig, Record, Shape};
use super::super::html;
use super::super::read::{self, Refusal};
use super::super::report::Report;
use super::super::timeline::Timeline;
use super::super::trace_events;
use super::*;
use proptest::prelude::*;

const SECOND: i64 = 1_000_000_000;
/// When the dumps of these tests are written.
const NOW: i64 = 1_000 * SECOND;

/// Dumps of ranks `0..ranks` with one group `dp` of all.
fn dumps(ranks: u32) -> Vec<Dump> {
    let dump = |rank| Dump {
        rank,
        file: format!("trace_{rank}"),
        version: "2.10".into(),
        written_ns: Some(NOW),
        host: Some("a".into()),
        ..Dump::default()
    };
    let mut dumps: Vec<Dump> = (0..ranks).map(dump).collect();
    add_group(&mut dumps, "0", "dp", &(0..ranks).collect::<Vec<_>>());
    dumps
}

fn add_group(dumps: &mut [Dump], name: &str, description: &str, ranks: &[u32]) {
    for dump in dumps.iter_mut().filter(|dump| ranks.contains(&dump.rank)) {
        let config = GroupConfig { description: description.into(), ranks: ranks.to_vec(), failure: None };
        dump.groups.insert(name.into(), config);
    }
}

fn shapes(sizes: &[i64]) -> Vec<Shape> {
    vec![Shape { sizes: sizes.to_vec(), dtype: Some("Float".into()) }]
}

/// A call of group `0`, begun this many seconds before the dumps; it ends this many milliseconds later, if at
/// all.
fn call(dump: &mut Dump, operation: &str, sequence: i64, ago: f64, ended_after_ms: Option<i64>) {
    call_in(dump, "0", operation, sequence, ago, ended_after_ms);
}

fn call_in(
    dump: &mut Dump,
    group: &str,
    operation: &str,
    sequence: i64,
    ago: f64,
    ended_after_ms: Option<i64>,
) {
    let created = NOW - (ago * 1e9) as i64;
    let frame = |name: &str, line| Frame { name: name.into(), file: "/job/train.py".into(), line };
    let description = dump.groups.get(group).map_or_else(Arc::default, |config| config.description.clone());
    dump.records.push(Record {
        id: dump.records.len() as i64,
        sequence,
        created_ns: Some(created),
        started_ns: Some(created),
        end: ended_after_ms.map_or(End::Open, |ms| End::Completed(Some(created + ms * SECOND / 1000))),
        call: Arc::new(Call {
            group: group.into(),
            description,
            operation: operation.into(),
            library: "tenfold".into(),
            inputs: shapes(&[4]),
            outputs: shapes(&[4]),
            timeout_ms: Some(30_000),
            frames: vec![frame("step", 80 + sequence), frame("main", 140)],
            ..Call::default()
        }),
        ..Record::default()
    });
}

fn message(dump: &mut Dump, operation: &str, detail: (Option<u32>, u32), ago: f64, ended: Option<i64>) {
    call(dump, operation, 0, ago, ended);
    let record = dump.records.last_mut().unwrap();
    record.is_p2p = true;
    record.detail = Detail::Message { source: detail.0, target: detail.1 };
}

fn text(dumps: &[Dump]) -> String {
    text_with(dumps, &[], &[], &Filter::default())
}

fn text_with(dumps: &[Dump], mentioned: &[u32], refusals: &[Refusal], filter: &Filter) -> String {
    let job = Job::new(dumps, mentioned, filter);
    let findings = findings(&job, refusals);
    let text = Report { job: &job, findings: &findings, refusals, left_out: 0 }.text(9, false);
    let lines: Vec<&str> = text.lines().collect();
    lines[..lines.len() - 1].join("\n") // the last says how many dumps there were
}

/// Three ranks that have each completed `all_gather #1` and `#2`.
fn so_far_well() -> Vec<Dump> {
    let mut dumps = dumps(3);
    for dump in &mut dumps {
        call(dump, "all_to_all", 1, 60.0, Some(5));
        call(dump, "all_reduce", 2, 50.0, Some(5));
    }
    dumps
}

#[test]
fn nothing_is_wrong() {
    assert_eq!(text(&so_far_well()), "✓ no problem found: all ranks have reached all_reduce #2 of group dp");
    let mut unwatched = so_far_well();
    let records = unwatched.iter_mut().flat_map(|dump| &mut dump.records);
    records.for_each(|record| record.end = End::Unknown);
    assert_eq!(
        text(&unwatched),
        "✓ no problem found: all ranks have reached all_reduce #2 of group dp; whether it completed is not recorded"
    );
    assert_eq!(text(&dumps(2)), "✓ no operations were recorded");
}

#[test]
fn a_rank_that_does_not_arrive_is_named() {
    let mut dumps = so_far_well();
    call(&mut dumps[0], "all_reduce", 3, 40.1, None);
    call(&mut dumps[1], "all_reduce", 3, 40.0, None);
    assert_eq!(
        text(&dumps),
        "✗ rank 2 has not entered all_reduce #3 of group dp\n    \
         ranks 0 and 1 have been waiting in it for 40.1 s (timeout 30.0 s), called at job/train.py:83 in step\n    \
         rank 2's last call in this group was all_reduce #2, completed 50.0 s before its dump\n    \
         rank 2 made that call at job/train.py:82 in step ← job/train.py:140 in main"
    );
}

#[test]
fn a_rank_that_never_called_anything_is_named_and_one_whose_ring_lost_it_is_not() {
    let mut dumps = dumps(3);
    call(&mut dumps[0], "barrier", 1, 9.0, None);
    call(&mut dumps[1], "barrier", 1, 9.0, None);
    assert_eq!(
        text(&dumps),
        "✗ rank 2 has not entered barrier #1 of group dp\n    \
         ranks 0 and 1 have been waiting in it for 9.0 s (timeout 30.0 s), called at job/train.py:81 in step\n    \
         rank 2 has not called a collective in this group"
    );
    add_group(&mut dumps, "1", "own", &[2]);
    call_in(&mut dumps[2], "1", "barrier", 900, 3.0, Some(1));
    dumps[2].records[0].id = 2_000;
    assert!(!text(&dumps).contains("rank 2 has not entered"), "{}", text(&dumps));
}

#[test]
fn a_wait_of_milliseconds_is_not_a_problem() {
    let mut dumps = so_far_well();
    call(&mut dumps[0], "all_reduce", 3, 0.004, None);
    let text = text(&dumps);
    assert!(text.starts_with("✓ no problem found"), "{text}");
    assert!(text.contains("! ranks 1 and 2 have not entered all_reduce #3 of group dp\n"), "{text}");
    assert!(text.ends_with("this is so short that it may still arrive"), "{text}");
}

#[test]
fn rings_that_begin_at_different_records_are_laid_side_by_side() {
    let mut dumps = so_far_well();
    for dump in &mut dumps {
        call(dump, "all_reduce", 3, 20.0, Some(5));
    }
    dumps[1].records.drain(..2);
    dumps[2].records.drain(..1);
    assert_eq!(text(&dumps), "✓ no problem found: all ranks have reached all_reduce #3 of group dp");
}

#[test]
fn a_rank_that_is_waited_for_comes_before_a_rank_that_waits() {
    let mut dumps = so_far_well();
    add_group(&mut dumps, "1", "a", &[0, 1]);
    add_group(&mut dumps, "2", "b", &[1, 2]);
    // Rank 2 does not enter `b`, so rank 1 blocks there and does not enter `a`.
    call_in(&mut dumps[0], "1", "all_reduce", 1, 20.0, None);
    call_in(&mut dumps[1], "2", "all_reduce", 1, 21.0, None);
    let text = text(&dumps);
    let heads: Vec<&str> = text.lines().filter(|line| line.starts_with('✗')).collect();
    assert_eq!(
        heads,
        [
            "✗ rank 2 has not entered all_reduce #1 of group b",
            "✗ rank 1 has not entered all_reduce #1 of group a (follows from the above)"
        ]
    );
    assert!(text.contains(
        "rank 1's last call of all was all_reduce #1 of group b, which it entered 21.0 s ago and has not left"
    ));
}

#[test]
fn ranks_that_wait_for_each_other_are_a_circle() {
    let mut dumps = so_far_well();
    add_group(&mut dumps, "1", "a", &[0, 1]);
    add_group(&mut dumps, "2", "b", &[0, 1]);
    call_in(&mut dumps[0], "1", "all_reduce", 1, 20.0, None);
    call_in(&mut dumps[1], "2", "all_reduce", 1, 21.0, None);
    let text = text(&dumps);
    assert!(
        text.starts_with(
            "✗ ranks 0 and 1 wait for each other\n    \
             rank 0 waits for rank 1: rank 1 has not entered all_reduce #1 of group a\n    \
             rank 1 waits for rank 0: rank 0 has not entered all_reduce #1 of group b\n    \
             call the collectives of several groups in the same order on all ranks\n"
        ),
        "{text}"
    );
}

#[test]
fn a_rank_that_calls_something_else_is_named_with_both_places() {
    let mut dumps = so_far_well();
    call(&mut dumps[0], "all_reduce", 3, 40.0, None);
    call(&mut dumps[1], "broadcast", 3, 40.0, None);
    call(&mut dumps[2], "all_reduce", 3, 40.0, None);
    dumps[1].records[2].frames[0].line = 12;
    assert_eq!(
        text(&dumps),
        "✗ rank 1 called broadcast #3 of group dp where ranks 0 and 2 called all_reduce\n    \
         rank 1: broadcast, Float [4], called at job/train.py:12 in step\n    \
         ranks 0 and 2: all_reduce, Float [4], called at job/train.py:83 in step"
    );
}

#[test]
fn one_call_too_many_or_too_few_is_guessed() {
    let mut dumps = so_far_well();
    for (rank, names) in
        [["barrier", "all_reduce"], ["all_reduce", "barrier"], ["barrier", "all_reduce"]].iter().enumerate()
    {
        call(&mut dumps[rank], names[0], 3, 40.0, None);
        call(&mut dumps[rank], names[1], 4, 39.0, None);
    }
    // Both fit: the first is reported.
    assert!(
        text(&dumps)
            .ends_with("rank 1 seems to make one extra call: its next call is what the others call here")
    );
    dumps[1].records.pop();
    assert!(
        text(&dumps).contains("rank 1 seems to have skipped one call: this is what the others call next")
    );
}

#[test]
fn other_sizes_and_dtypes_are_named() {
    let mut dumps = so_far_well();
    for dump in &mut dumps {
        call(dump, "all_reduce", 3, 40.0, None);
    }
    dumps[1].records[2].inputs = shapes(&[5]);
    dumps[1].records[2].outputs = shapes(&[5]);
    assert_eq!(
        text(&dumps),
        "✗ rank 1 called all_reduce #3 of group dp with other sizes than ranks 0 and 2\n    \
         rank 1: all_reduce, Float [5], called at job/train.py:83 in step\n    \
         ranks 0 and 2: all_reduce, Float [4], called at job/train.py:83 in step"
    );
    let record = &mut dumps[1].records[2];
    record.inputs = shapes(&[4]);
    record.outputs = shapes(&[4]);
    record.inputs[0].dtype = Some("Half".into());
    record.outputs[0].dtype = Some("Half".into());
    assert!(
        text(&dumps)
            .starts_with("✗ rank 1 called all_reduce #3 of group dp with another dtype than ranks 0 and 2\n")
    );
}

#[test]
fn two_ranks_that_differ_are_both_named() {
    let mut dumps = dumps(2);
    call(&mut dumps[0], "all_reduce", 1, 40.0, None);
    call(&mut dumps[1], "barrier", 1, 40.0, None);
    let text = text(&dumps);
    assert!(
        text.starts_with("✗ at #1 of group dp, rank 0 called all_reduce and rank 1 called barrier\n"),
        "{text}"
    );
}

#[test]
fn an_output_that_does_not_hold_all_inputs_is_named() {
    let mut dumps = so_far_well();
    for dump in &mut dumps {
        call(dump, "_all_gather_base", 3, 40.0, None);
        dump.records[2].outputs = shapes(&[8]);
    }
    assert_eq!(
        text(&dumps),
        "✗ rank 0 called _all_gather_base #3 of group dp with sizes that do not fit\n    \
         its output has 8 elements and its input 4: with 3 ranks, 12 are expected\n    \
         rank 0: _all_gather_base, Float [4] → Float [8], called at job/train.py:83 in step"
    );
}

#[test]
fn a_rank_without_a_dump_comes_first() {
    let mut dumps = so_far_well();
    dumps.pop();
    for dump in &mut dumps {
        call(dump, "all_reduce", 3, 40.0, None);
    }
    assert_eq!(
        text(&dumps),
        "✗ rank 2 has no dump here: 2 of 3 ranks do\n    \
         all_reduce #3 of group dp needs rank 2: ranks 0 and 1 have been waiting in it for 40.0 s (timeout 30.0 s), called at job/train.py:83 in step\n    \
         it died, was killed, or hangs where it cannot write: see its log"
    );
    let refusals = [Refusal { file: "trace_2".into(), problem: "it is empty".into() }];
    let text = text_with(&dumps, &[], &refusals, &Filter::default());
    assert!(text.ends_with("a file that cannot be read (see above) may be its dump"), "{text}");
}

/// The rank's dump says that its group `0` failed this many seconds before.
fn fail(dump: &mut Dump, ago: f64, text: &str, rank: Option<u32>) {
    let at_ns = NOW - (ago * 1e9) as i64;
    dump.groups.get_mut("0").unwrap().failure = Some(Failure { at_ns, text: text.into(), rank });
}

/// Rank 0 is in all_reduce #3 and failed there after two seconds; the other ranks did not enter it, and
/// learned of the failure.
fn told_of_a_failure(rank: Option<u32>) -> Vec<Dump> {
    let mut dumps = so_far_well();
    call(&mut dumps[0], "all_reduce", 3, 20.0, None);
    let record = dumps[0].records.last_mut().unwrap();
    (record.end, record.failed_ns) = (End::Failed, Some(NOW - 18 * SECOND));
    dumps.iter_mut().for_each(|dump| fail(dump, 18.0, "rank 1 died\n  hint: see its log", rank));
    dumps
}

#[test]
fn a_rank_that_is_missing_because_of_a_failure_is_not_blamed() {
    // Rank 1 died.
    let mut dumps = told_of_a_failure(Some(1));
    dumps.remove(1);
    assert_eq!(
        text(&dumps),
        "✗ rank 1 has no dump here: 2 of 3 ranks do\n    \
         all_reduce #3 of group dp needs rank 1: rank 0 entered it 20.0 s before its dump and failed (timeout 30.0 s), \
         called at job/train.py:83 in step\n    \
         rank 0's error: rank 1 died\n    \
         it died, was killed, or hangs where it cannot write: see its log\n\
         ! rank 2 had not entered all_reduce #3 of group dp when the group failed (follows from the above)"
    );
    dumps.iter_mut().for_each(|dump| dump.groups.get_mut("0").unwrap().failure = None);
    assert!(
        text(&dumps).contains("✗ rank 2 has not entered all_reduce #3 of group dp\n"),
        "no rank contradicts it: {}",
        text(&dumps)
    );
}

#[test]
fn only_the_rank_that_caused_a_failure_is_named() {
    let said = text(&told_of_a_failure(Some(1)));
    assert!(said.starts_with("✗ rank 1 has not entered all_reduce #3 of group dp\n"), "{said}");
    assert!(said.contains("    rank 2 had not entered it when the group failed\n"), "{said}");
    assert!(said.ends_with("    rank 0's error: rank 1 died"), "{said}");
    // The rank at fault is unknown: the failure itself is reported.
    let said = text(&told_of_a_failure(None));
    assert_eq!(
        said,
        "✗ group dp failed\n    rank 0's error: rank 1 died\n\
         ! ranks 1 and 2 had not entered all_reduce #3 of group dp when the group failed (follows from the above)"
    );
}

#[test]
fn a_rank_that_is_missing_until_others_time_out_is_not_excused() {
    let mut dumps = told_of_a_failure(None);
    let record = dumps[0].records.last_mut().unwrap();
    record.created_ns = Some(NOW - 48 * SECOND);
    let said = text(&dumps);
    assert!(said.starts_with("✗ ranks 1 and 2 have not entered all_reduce #3 of group dp\n"), "{said}");
}

#[test]
fn a_partner_that_is_missing_because_of_a_failure_is_not_blamed() {
    let mut dumps = so_far_well();
    message(&mut dumps[0], "recv", (Some(1), 0), 20.0, None);
    let record = dumps[0].records.last_mut().unwrap();
    (record.end, record.failed_ns) = (End::Failed, Some(NOW - 18 * SECOND));
    dumps.iter_mut().for_each(|dump| fail(dump, 18.0, "rank 2 died", Some(2)));
    let said = text(&dumps);
    assert!(
        said.starts_with("✗ group dp failed because of rank 2\n    rank 0's error: rank 2 died\n! rank 0"),
        "{said}"
    );
    assert!(said.contains("which does not send (group dp) (follows from the above)\n"), "{said}");
}

#[test]
fn ranks_and_groups_that_are_not_selected_do_not_count() {
    let mut dumps = so_far_well();
    dumps.pop();
    let filter = Filter { ranks: [0, 1].into(), groups: Vec::new() };
    assert!(text_with(&dumps, &[], &[], &filter).starts_with("✓ no problem found"));
    add_group(&mut dumps, "1", "a", &[0, 1]);
    call_in(&mut dumps[0], "1", "all_reduce", 1, 20.0, None);
    let filter = Filter { ranks: [0, 1].into(), groups: vec!["a".into()] };
    assert!(
        text_with(&dumps, &[], &[], &filter).starts_with("✗ rank 1 has not entered all_reduce #1 of group a")
    );
}

#[test]
fn members_that_no_recorder_names_are_those_seen() {
    // As Gloo writes it: no group has a name, ranks are mentioned.
    let mut dumps = so_far_well();
    for dump in &mut dumps {
        dump.groups.clear();
        for record in &mut dump.records {
            record.description = "default_pg".into();
        }
    }
    let third = Record { id: 2, sequence: 3, ..dumps[0].records[1].clone() };
    dumps[0].records.push(third);
    dumps[0].records[2].end = End::Unknown;
    dumps[0].records[2].created_ns = Some(NOW - 3 * SECOND);
    let text = text_with(&dumps[..2], &[0, 1, 2], &[], &Filter::default());
    assert!(text.starts_with("✗ rank 2 has no dump here: 2 of 3 ranks do\n"), "{text}");
    assert!(text.contains("✗ rank 1 has not entered all_reduce #3 of group default_pg\n"), "{text}");
    assert!(text.contains("    rank 0 entered it 3.0 s before its dump (timeout 30.0 s)"), "{text}");
}

#[test]
fn a_complete_group_that_does_not_move_is_reported() {
    let mut dumps = so_far_well();
    for dump in &mut dumps {
        call(dump, "all_reduce", 3, 40.0, None);
    }
    assert_eq!(
        text(&dumps),
        "✗ all 3 ranks are in all_reduce #3 of group dp, and none has completed it\n    \
         ranks 0-2 have been waiting in it for 40.0 s (timeout 30.0 s), called at job/train.py:83 in step\n    \
         all ranks have entered it and their calls match: check the network, and whether a rank died in it"
    );
    dumps[0].records[2].end = End::Completed(None);
    let text = text(&dumps);
    let head = "✗ ranks 1 and 2 have not completed all_reduce #3 of group dp, which the others have\n";
    assert!(text.starts_with(head), "{text}");
}

#[test]
fn ranks_that_failed_in_a_matching_call_are_reported() {
    let mut dumps = so_far_well();
    for dump in &mut dumps {
        call(dump, "all_reduce", 3, 0.5, Some(1));
    }
    dumps[1].records[2].end = End::Failed;
    assert_eq!(
        text(&dumps),
        "✗ rank 1 failed in all_reduce #3 of group dp\n    \
         rank 1 entered it 500.0 ms before its dump and failed (timeout 30.0 s), called at job/train.py:83 in step\n    \
         all ranks had entered it and their calls match: see the error in the log"
    );
}

#[test]
fn a_message_without_a_partner_is_named() {
    let mut dumps = so_far_well();
    message(&mut dumps[0], "send", (Some(0), 1), 30.0, Some(1));
    message(&mut dumps[1], "recv", (Some(0), 1), 30.0, Some(1));
    message(&mut dumps[0], "recv", (Some(1), 0), 20.0, None);
    assert_eq!(
        text(&dumps),
        "✗ rank 0 receives from rank 1, which does not send (group dp)\n    \
         rank 0 has been waiting in it for 20.0 s (timeout 30.0 s), called at job/train.py:80 in step, Float [4]\n    \
         rank 1's last call in this group was all_reduce #2, completed 50.0 s before its dump\n    \
         rank 1's last call of all was a receive from rank 0 of group dp, completed 30.0 s before its dump\n    \
         rank 1 made that call at job/train.py:80 in step ← job/train.py:140 in main"
    );
    message(&mut dumps[1], "send", (Some(1), 0), 19.0, None);
    assert!(!text(&dumps).contains("does not send"), "{}", text(&dumps));
}

#[test]
fn ranks_of_a_group_count_in_the_order_of_the_group() {
    let mut dumps = dumps(3);
    dumps.iter_mut().for_each(|dump| dump.groups.clear());
    add_group(&mut dumps, "0", "turned", &[2, 1, 0]);
    // Group rank 0, rank 2, sends to group rank 1, rank 1; group rank 2, rank 0, receives from group rank 0,
    // which does not send.
    message(&mut dumps[2], "send", (Some(0), 1), 30.0, Some(1));
    message(&mut dumps[1], "recv", (Some(0), 1), 30.0, Some(1));
    message(&mut dumps[0], "recv", (Some(0), 2), 20.0, None);
    let said = text(&dumps);
    assert!(
        said.starts_with("✗ rank 0 receives from rank 2, which does not send (group turned)\n"),
        "{said}"
    );
    assert!(said.contains("rank 2's last call of all was a send to rank 1 of group turned"), "{said}");
    assert_eq!(said.matches('✗').count(), 1, "the matching messages are not reported: {said}");
}

#[test]
fn uneven_parts_are_looked_up_in_the_order_of_the_group() {
    let mut dumps = dumps(2);
    dumps.iter_mut().for_each(|dump| dump.groups.clear());
    add_group(&mut dumps, "0", "turned", &[1, 0]);
    for (dump, own) in dumps.iter_mut().zip([5, 3]) {
        call(dump, "all_gather", 1, 20.0, Some(1));
        let record = dump.records.last_mut().unwrap();
        record.inputs = shapes(&[own]);
        record.outputs = [shapes(&[3]), shapes(&[5])].concat();
    }
    assert!(text(&dumps).starts_with("✓ no problem found"), "{}", text(&dumps));
}

#[test]
fn a_root_is_reported_as_a_rank_of_the_job() {
    let mut dumps = dumps(3);
    dumps.iter_mut().for_each(|dump| dump.groups.clear());
    add_group(&mut dumps, "0", "turned", &[2, 1, 0]);
    for (dump, root) in dumps.iter_mut().zip([0, 2, 0]) {
        call(dump, "broadcast", 1, 20.0, None);
        dump.records.last_mut().unwrap().root = Some(root);
    }
    let said = text(&dumps);
    let head = "✗ rank 1 called broadcast #1 of group turned with root 0 where ranks 0 and 2 have root 2\n";
    assert!(said.starts_with(head), "{said}");
    assert!(said.contains("ranks 0 and 2: broadcast, Float [4], root 2, called at"), "{said}");
    let job = Job::new(&dumps, &[], &Filter::default());
    assert!(Timeline::new(&job).to_chrome().to_string().contains("Float [4], root 2"));
}

#[test]
fn a_receiver_from_any_rank_needs_a_sender() {
    let mut dumps = so_far_well();
    message(&mut dumps[0], "recv", (None, 0), 20.0, None);
    assert!(
        text(&dumps).starts_with("✗ rank 0 receives from any rank, but no rank sends to it (group dp)\n")
    );
    message(&mut dumps[2], "send", (Some(2), 0), 19.0, None);
    assert!(text(&dumps).starts_with("✓"), "{}", text(&dumps));
}

#[test]
fn a_message_that_does_not_match_its_receiver_is_named() {
    let mut dumps = so_far_well();
    message(&mut dumps[0], "send", (Some(0), 1), 30.0, None);
    message(&mut dumps[1], "recv", (Some(0), 1), 30.0, None);
    dumps[1].records[2].outputs = shapes(&[6]);
    dumps[1].records[2].inputs.clear();
    assert_eq!(
        text(&dumps),
        "✗ rank 1 receives a different tensor than rank 0 sends: message 1 between them (group dp)\n    \
         rank 0 sends Float [4], called at job/train.py:80 in step\n    \
         rank 1 receives Float [6], called at job/train.py:80 in step"
    );
}

/// Twenty collectives at which rank 1 arrives 20 ms after the others.
fn late() -> Vec<Dump> {
    let mut dumps = dumps(3);
    for sequence in 1..=20 {
        for dump in &mut dumps {
            let late = if dump.rank == 1 { 0.02 } else { 0.0 };
            let ago = 100.0 - sequence as f64 - late;
            call(dump, "all_reduce", sequence, ago, Some(30 - (late * 1e3) as i64));
        }
    }
    dumps
}

#[test]
fn a_straggler_is_named_with_what_it_costs() {
    let told = "✓ no problem found: all ranks have reached all_reduce #20 of group dp\n\
         ! rank 1 is a straggler: the last to reach 20 of 20 collectives of group dp\n    \
         the other ranks waited 400.0 ms for it, 20.0 ms each time; longest in all_reduce #";
    let text = text(&late());
    assert!(text.starts_with(told), "{text}");
    assert!(!text.contains("clock"), "all are on one host: {text}");
}

#[test]
fn differences_of_clocks_are_subtracted_before_a_rank_is_called_late() {
    let mut dumps = late();
    let skew = 3 * SECOND;
    for dump in &mut dumps {
        dump.host = Some(if dump.rank == 2 { "b".into() } else { "a".into() });
    }
    for record in &mut dumps[2].records {
        record.created_ns = record.created_ns.map(|at| at + skew);
        if let End::Completed(Some(at)) = &mut record.end {
            *at += skew;
        }
    }
    let text = text(&dumps);
    assert!(text.contains("! rank 1 is a straggler: the last to reach 20 of 20"), "{text}");
    assert!(text.ends_with("the hosts' clocks differ and were corrected: rank 2's is 3.0 s ahead"), "{text}");
    for dump in &mut dumps {
        dump.host = None;
        dump.records.iter_mut().for_each(|record| record.end = End::Unknown);
    }
    let text = super::tests::text(&dumps);
    assert!(
        text.ends_with(
            "if the ranks run on several hosts, their clocks may differ, which is not corrected here"
        ),
        "{text}"
    );
}

#[test]
fn one_very_late_arrival_is_reported() {
    let mut dumps = so_far_well();
    for dump in &mut dumps {
        let ago = if dump.rank == 2 { 10.0 } else { 14.2 };
        call(dump, "all_reduce", 3, ago, Some(5));
    }
    assert!(text(&dumps).contains(
        "! rank 2 arrived 4.2 s late at all_reduce #3 of group dp\n    it called it at job/train.py:83 in step"
    ));
}

#[test]
fn text_of_a_dump_cannot_command_the_terminal() {
    let mut dumps = so_far_well();
    add_group(&mut dumps, "1", "\u{1b}[2J", &[0, 1]);
    call_in(&mut dumps[0], "1", "\u{1b}]0;x\u{7}", 1, 20.0, None);
    assert!(!text(&dumps).contains('\u{1b}'));
}

#[test]
fn every_event_of_the_timeline_follows_the_format() {
    let mut dumps = late();
    add_group(&mut dumps, "1", "tp", &[0, 2]);
    for (rank, operation, detail) in
        [(0, "send", (Some(0), 1)), (1, "recv", (Some(0), 1)), (2, "recv", (None, 2))]
    {
        message(&mut dumps[rank], operation, detail, 30.0, Some(5).filter(|_| rank < 2));
    }
    call_in(&mut dumps[0], "1", "broadcast", 1, 20.0, None);
    call_in(&mut dumps[2], "1", "broadcast", 1, 20.0, Some(7));
    for (sequence, end) in [(21, End::Failed), (22, End::Unknown), (23, End::Open)] {
        call(&mut dumps[1], "all_reduce", sequence, 10.0, None);
        let record = dumps[1].records.last_mut().unwrap();
        record.end = end;
        record.failed_ns = (end == End::Failed).then_some(NOW);
    }
    let job = Job::new(&dumps, &[], &Filter::default());
    let trace = Timeline::new(&job).to_chrome();
    assert_eq!(trace_events::check(&trace), Ok(()));
    let phases = |phase: &str| {
        trace["traceEvents"].as_array().unwrap().iter().filter(|event| event["ph"] == phase).count()
    };
    assert_eq!(phases("X"), dumps.iter().map(|dump| dump.records.len()).sum::<usize>());
    assert_eq!(
        (phases("s"), phases("t"), phases("f")),
        (21, 20, 21),
        "20 collectives of three ranks, one of two"
    );
}

#[test]
fn operations_that_overlap_cross_in_no_lane() {
    for together in [12, 300] {
        let mut dumps = dumps(2);
        for sequence in 1..=together {
            // Each begins a little later than the one before and lasts longer.
            call(
                &mut dumps[0],
                "all_reduce",
                sequence,
                100.0 - 0.01 * sequence as f64,
                Some(9000 + 20 * sequence),
            );
        }
        let job = Job::new(&dumps, &[], &Filter::default());
        let timeline = Timeline::new(&job);
        assert_eq!(trace_events::check(&timeline.to_chrome()), Ok(()), "{together}");
        let marks = timeline.boxes.iter().filter(|one| one.begin_ns == one.end_ns).count();
        assert_eq!(marks, (together as usize).saturating_sub(256), "there are lanes enough");
    }
}

/// Numbers as an untrusted file may have them.
fn extreme() -> impl Strategy<Value = i64> {
    prop_oneof![prop::sample::select(vec![i64::MIN, -1, 0, 1, 2, 3, NOW, i64::MAX]), any::<i64>()]
}

fn any_record() -> impl Strategy<Value = Record> {
    let operation = prop::sample::select(vec![
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "all_to_all",
        "send",
        "recv",
        "x",
    ]);
    let end = prop_oneof![
        Just(End::Open),
        Just(End::Failed),
        Just(End::Unknown),
        extreme().prop_map(|at| End::Completed((at > 0).then_some(at)))
    ];
    let sizes = || prop::collection::vec(prop::collection::vec(extreme(), 0..4), 0..3);
    let detail = prop_oneof![
        Just(Detail::None),
        Just(Detail::Argument("root=1".into())),
        (any::<Option<u32>>(), 0..4u32).prop_map(|(source, target)| Detail::Message { source, target })
    ];
    let numbers = (extreme(), extreme(), extreme(), 0..2u32, any::<Option<f64>>());
    (operation, end, sizes(), sizes(), detail, numbers).prop_map(
        |(operation, end, inputs, outputs, detail, numbers)| {
            let (id, sequence, created, group, duration_ms) = numbers;
            let shape = |sizes: Vec<i64>| Shape { sizes, dtype: None };
            let call = Call {
                group: group.to_string().into(),
                operation: operation.into(),
                detail,
                is_p2p: matches!(operation, "send" | "recv"),
                inputs: inputs.into_iter().map(shape).collect(),
                outputs: outputs.into_iter().map(shape).collect(),
                timeout_ms: (sequence > 0).then_some(sequence),
                ..Call::default()
            };
            Record {
                id,
                sequence,
                created_ns: (created > 0).then_some(created),
                end,
                duration_ms: duration_ms.filter(|ms| ms.is_finite() && *ms >= 0.0),
                call: call.into(),
                ..Record::default()
            }
        },
    )
}

/// Dumps of real jobs, of rank 0 or 1, pickled and as JSON.
fn real_dumps() -> &'static [Vec<u8>] {
    static ALL: OnceLock<Vec<Vec<u8>>> = OnceLock::new();
    ALL.get_or_init(|| {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/dumps");
        let cases =
            ["torch/no-partner", "torch/wrong-size", "torch/wrong-size-json", "ours/clean", "ours/size"];
        let files_of =
            |case: &&str| fs::read_dir(folder.join(case)).unwrap().map(|entry| entry.unwrap().path());
        let mut files: Vec<PathBuf> = cases.iter().flat_map(files_of).collect();
        files.sort();
        files.iter().map(|file| fs::read(file).unwrap()).collect()
    })
}

/// Damage to a byte: it is changed, lost, or repeated; and the file may end there.
fn damage(bytes: &mut Vec<u8>, (place, kind, byte): (prop::sample::Index, u8, u8)) {
    let Some(last) = bytes.len().checked_sub(1) else { return };
    let at = place.index(last + 1);
    match kind {
        0..=5 => bytes[at] = byte,
        6 | 7 => drop(bytes.remove(at)),
        8 | 9 => bytes.insert(at, byte),
        10 => bytes[at] ^= 1 << (byte % 8),
        _ => bytes.truncate(at),
    }
}

fn has_a_verdict_and_a_picture(dumps: &[Dump]) -> Result<(), TestCaseError> {
    let job = Job::new(dumps, &[], &Filter::default());
    let findings = findings(&job, &[]);
    let report = Report { job: &job, findings: &findings, refusals: &[], left_out: 0 };
    prop_assert!(report.text(9, false).lines().count() >= 2);
    let timeline = Timeline::new(&job);
    prop_assert_eq!(trace_events::check(&timeline.to_chrome()), Ok(()));
    prop_assert!(html::page(&report, &timeline).contains("<!doctype html>"));
    Ok(())
}

proptest! {
    #[test]
    fn a_damaged_dump_is_refused_or_has_a_verdict_and_a_picture(
        which in any::<prop::sample::Index>(),
        damages in prop::collection::vec((any::<prop::sample::Index>(), 0..12u8, any::<u8>()), 1..6),
    ) {
        let mut bytes = which.get(real_dumps()).clone();
        damages.into_iter().for_each(|one| damage(&mut bytes, one));
        let mut calls = Calls::default();
        let mut all = Vec::new();
        for (rank, file) in [&bytes, which.get(real_dumps())].into_iter().enumerate() {
            match read::read_bytes(file, &mut calls) {
                Ok((dump, ..)) => all.push(Dump { rank: rank as u32, ..dump }),
                Err(problem) => prop_assert!(!problem.is_empty()),
            }
        }
        has_a_verdict_and_a_picture(&all)?;
    }

    #[test]
    fn any_records_have_a_verdict_and_a_picture(
        records in prop::collection::vec(prop::collection::vec(any_record(), 0..12), 1..4),
        ranks in prop::collection::vec(prop_oneof![0..5u32, Just(u32::MAX)], 0..5),
    ) {
        let mut dumps = dumps(records.len() as u32);
        dumps[0].groups.insert("1".into(), GroupConfig { description: "other".into(), ranks, failure: None });
        for (dump, records) in dumps.iter_mut().zip(records) {
            dump.records = records;
        }
        has_a_verdict_and_a_picture(&dumps)?;
    }
}
