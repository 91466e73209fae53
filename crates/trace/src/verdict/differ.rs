//! The first call of a group in which ranks differ, and which ranks are in the minority.

use std::cmp::Reverse;

use super::super::align::Group;
use super::super::compare::{self, Difference};
use super::super::dump::Record;
use super::super::words;
use super::{Finding, Kind};

/// Classes of ranks that are described.
const CLASSES_MAX: usize = 3;

/// Ranks whose calls match, and the calls of the first of them.
struct Class<'a> {
    ranks: Vec<u32>,
    records: &'a [&'a Record],
}

/// The number of the first difference in a group, with its finding.
pub(super) fn find(group: &Group<'_>) -> Option<(i64, Finding)> {
    group.rows.keys().find_map(|&sequence| {
        let finding = between_ranks(group, sequence).or_else(|| within_a_call(group, sequence))?;
        Some((sequence, finding.of(group, Some(sequence))))
    })
}

fn between_ranks(group: &Group<'_>, sequence: i64) -> Option<Finding> {
    let mut classes = classes(group, sequence);
    if classes.len() < 2 {
        return None;
    }
    // The first rank is the first of its class: the sort is stable, so in a tie the order of ranks is kept.
    classes.sort_by_key(|class| Reverse(class.ranks.len()));
    let is_draw = classes[0].ranks.len() == classes[1].ranks.len();
    let (expected, others) = classes.split_first().expect("there are two");
    let difference = compare::difference(expected.records, others[0].records)?;
    let (expected_name, other_name) = (name(expected), name(&others[0]));
    let who = words::ranks(&others[0].ranks);
    let rest = words::ranks(&expected.ranks);
    let place = &group.title;
    let headline = match difference {
        Difference::Operation if is_draw => {
            format!("at #{sequence} of {place}, {rest} called {expected_name} and {who} called {other_name}")
        }
        Difference::Operation => {
            format!("{who} called {other_name} #{sequence} of {place} where {rest} called {expected_name}")
        }
        Difference::Count => format!(
            "{who} called {} operations together at #{sequence} of {place}, {rest} {}",
            others[0].records.len(),
            expected.records.len()
        ),
        Difference::Argument => {
            format!("{who} and {rest} disagree on an argument of {other_name} #{sequence} of {place}")
        }
        Difference::ReduceOp | Difference::Root => {
            let argument = |class: &Class<'_>| match difference {
                Difference::Root => group.root_of(class.records[0]).map(|root| format!("root {root}")),
                _ => class.records[0].reduce_op.as_deref().map(str::to_owned),
            };
            let [theirs, ours] = [&others[0], expected].map(|class| argument(class).unwrap_or_default());
            match is_draw {
                true => format!(
                    "{rest} called {other_name} #{sequence} of {place} with {ours}, {who} with {theirs}"
                ),
                false => format!(
                    "{who} called {other_name} #{sequence} of {place} with {theirs} where {rest} have {ours}"
                ),
            }
        }
        Difference::Sizes if is_draw => {
            format!("{rest} and {who} called {other_name} #{sequence} of {place} with different sizes")
        }
        Difference::Sizes => {
            format!("{who} called {other_name} #{sequence} of {place} with other sizes than {rest}")
        }
        Difference::Dtype if is_draw => {
            format!("{rest} and {who} called {other_name} #{sequence} of {place} with different dtypes")
        }
        Difference::Dtype => {
            format!("{who} called {other_name} #{sequence} of {place} with another dtype than {rest}")
        }
    };
    let mut finding = Finding::new(Kind::OtherCall, headline);
    finding.ranks = match is_draw {
        true => classes.iter().flat_map(|class| class.ranks.clone()).collect(),
        false => others.iter().flat_map(|class| class.ranks.clone()).collect(),
    };
    finding.waiting = if is_draw { Vec::new() } else { expected.ranks.clone() };
    let mut shown: Vec<&Class<'_>> = others.iter().take(CLASSES_MAX - 1).collect();
    match is_draw {
        true => shown.insert(0, expected),
        false => shown.push(expected),
    }
    finding.lines = shown.into_iter().map(|class| describe(group, class)).collect();
    if difference == Difference::Operation && others.len() == 1 {
        finding.lines.extend(shift(group, sequence, expected, &others[0]));
    }
    Some(finding)
}

fn classes<'a>(group: &'a Group<'_>, sequence: i64) -> Vec<Class<'a>> {
    let mut classes: Vec<Class<'a>> = Vec::new();
    for (rank, records) in group.rows[&sequence].iter() {
        let known = classes.iter_mut().find(|class| compare::difference(class.records, records).is_none());
        match known {
            Some(class) => class.ranks.push(rank),
            None => classes.push(Class { ranks: vec![rank], records }),
        }
    }
    classes
}

fn name<'a>(class: &Class<'a>) -> &'a str {
    &class.records[0].operation
}

/// `rank 1: all_gather, Float [4] → [3, 4], called at train.py:12 in main`
fn describe(group: &Group<'_>, class: &Class<'_>) -> String {
    let first = class.records[0];
    let more = match class.records.len() {
        1 => String::new(),
        count => format!(" and {} more", count - 1),
    };
    let site = words::call_site(first).map(|site| format!(", called at {site}")).unwrap_or_default();
    let (who, what) = (words::ranks(&class.ranks), words::tensors(first, group.root_of(first)));
    format!("{who}: {}{more}, {what}{site}", first.operation)
}

/// One extra or missing call shifts all that follow: finds a rank whose next call is what the other ranks
/// call now.
fn shift(group: &Group<'_>, sequence: i64, expected: &Class<'_>, other: &Class<'_>) -> Option<String> {
    let records = |rank: u32, at: i64| group.rows.get(&at)?.get(rank);
    let (ours, theirs) = (*expected.ranks.first()?, *other.ranks.first()?);
    let fits = |one: Option<&[&Record]>, two: Option<&[&Record]>| match (one, two) {
        (Some(one), Some(two)) => compare::difference(one, two).is_none(),
        _ => false,
    };
    let next = sequence.checked_add(1)?;
    let who = words::ranks(&other.ranks);
    let verb = if other.ranks.len() == 1 { "seems" } else { "seem" };
    if fits(records(ours, sequence), records(theirs, next)) {
        return Some(format!(
            "{who} {verb} to make one extra call: its next call is what the others call here"
        ));
    }
    if fits(records(ours, next), records(theirs, sequence)) {
        return Some(format!("{who} {verb} to have skipped one call: this is what the others call next"));
    }
    None
}

/// Contradictions in one rank's sizes, or in all ranks' together.
fn within_a_call(group: &Group<'_>, sequence: i64) -> Option<Finding> {
    if !group.members_known {
        return None;
    }
    let row = &group.rows[&sequence];
    for (rank, records) in row.iter() {
        let index = group.place_of(rank);
        let wrong = records
            .iter()
            .find_map(|record| Some((record, compare::contradiction(record, group.everyone.len(), index)?)));
        let Some((record, contradiction)) = wrong else { continue };
        let (title, place) = (record.title(), &group.title);
        let headline = format!("rank {rank} called {title} of {place} with sizes that do not fit");
        let mut finding = Finding::new(Kind::OtherCall, headline);
        finding.lines = vec![contradiction, describe(group, &Class { ranks: vec![rank], records })];
        finding.ranks = vec![rank];
        return Some(finding);
    }
    let all = row.records();
    if row.len() < group.everyone.len() {
        return None;
    }
    let (put, got) = compare::all_to_all_sums(all)?;
    let (title, place) = (all[0].title(), &group.title);
    let headline = format!("in {title} of {place} all ranks together send {put} elements and receive {got}");
    let mut finding = Finding::new(Kind::OtherCall, headline);
    finding.ranks.clone_from(&group.members);
    finding.lines = row
        .iter()
        .take(CLASSES_MAX)
        .map(|(rank, records)| describe(group, &Class { ranks: vec![rank], records }))
        .collect();
    Some(finding)
}
