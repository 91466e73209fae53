use std::collections::BTreeMap;
use std::time::Instant;

use proptest::prelude::*;

use super::*;
use crate::request::Request;
use crate::table::{ClientId, Replies, TableLimits};

fn tell(table: &mut Table, request: Request<'_>) {
    table.apply(ClientId(0), request, Instant::now(), &mut Replies::new()).expect("there is room");
}

fn set(table: &mut Table, key: &[u8], value: &[u8]) {
    tell(table, Request::Set { key: key.into(), value: value.into() });
}

fn push(table: &mut Table, key: &[u8], value: &[u8]) {
    tell(table, Request::QueuePush { key: key.into(), value: value.into() });
}

fn delete(table: &mut Table, key: &[u8]) {
    tell(table, Request::Delete { key: key.into() });
}

fn table() -> Table {
    Table::new(TableLimits::default())
}

/// A table with values of one byte.
fn table_of(keys: &[&str]) -> Table {
    let mut table = table();
    keys.iter().for_each(|key| set(&mut table, key.as_bytes(), b"v"));
    table
}

/// Surveys in steps of `work`, and calls `between` after each.
fn survey_while(
    table: &mut Table,
    prefix: &[u8],
    work: usize,
    mut meanwhile: impl FnMut(&mut Table),
) -> Survey {
    let mut walk = Walk::new(prefix.into());
    while !walk.step(table, work) {
        meanwhile(table);
    }
    walk.finish().show(prefix, table.seconds())
}

fn survey(table: &mut Table, prefix: &str) -> Survey {
    survey_while(table, prefix.as_bytes(), STEP, |_| {})
}

fn groups(survey: &Survey) -> Vec<(&str, u64)> {
    survey.groups.iter().map(|group| (group.prefix.as_str(), group.keys)).collect()
}

fn entries(survey: &Survey) -> Vec<&str> {
    survey.entries.iter().map(|entry| entry.key.as_str()).collect()
}

// ── groups ─────────────────────────────────────────────────────────────────────────────────────────────

#[test]
fn keys_of_a_pytorch_job_are_grouped_by_prefix() {
    let mut table = table_of(&[
        "init/",
        "/worker/attempt_0/default_pg/0//cpu//0/1",
        "/worker/attempt_0/default_pg/0//cpu//1/0",
        "/worker/attempt_0/default_pg/0//cpu//0",
        "/worker/attempt_0/barrier",
        "/tenfold/run/x/state",
        "/tenfold/run/x/version/1",
        "/ready",
    ]);
    let root = survey(&mut table, "");
    assert_eq!(groups(&root), [("/worker/attempt_0/", 4), ("/tenfold/run/x/", 2), ("init/", 1)]);
    assert_eq!(entries(&root), ["/ready"]);
    assert_eq!((root.keys, root.bytes, root.truncated, root.approximate), (8, 8, false, false));

    let attempt = survey(&mut table, "/worker/attempt_0/");
    assert_eq!(groups(&attempt), [("/worker/attempt_0/default_pg/0//cpu//", 3)]);
    assert_eq!(entries(&attempt), ["/worker/attempt_0/barrier"]);

    let ranks = survey(&mut table, "/worker/attempt_0/default_pg/0//cpu//");
    assert_eq!(
        groups(&ranks),
        [("/worker/attempt_0/default_pg/0//cpu//0/", 1), ("/worker/attempt_0/default_pg/0//cpu//1/", 1)]
    );
    assert_eq!(entries(&ranks), ["/worker/attempt_0/default_pg/0//cpu//0"]);

    assert_eq!(entries(&survey(&mut table, "init/")), ["init/"]);
    assert_eq!(
        survey(&mut table, "nothing/of/that/name"),
        Survey { prefix: "nothing/of/that/name".into(), cost_steps: 1, ..Survey::default() }
    );
}

#[test]
fn a_name_between_two_slashes_may_be_empty() {
    let mut table = table_of(&["a//b", "a//c", "a/", "//x", "//y", "/"]);
    assert_eq!(groups(&survey(&mut table, "")), [("a/", 3), ("//", 2)]);
    assert_eq!(entries(&survey(&mut table, "")), ["/"]);
    assert_eq!(groups(&survey(&mut table, "a/")), [("a//", 2)]);
    assert_eq!(entries(&survey(&mut table, "a/")), ["a/"]);
    assert_eq!(groups(&survey(&mut table, "/")), [("//", 2)]);
}

#[test]
fn a_prefix_may_end_anywhere() {
    let mut table = table_of(&["rank10/a", "rank11/a", "rank2/a", "rank1"]);
    assert_eq!(groups(&survey(&mut table, "rank1")), [("rank10/", 1), ("rank11/", 1)]);
    assert_eq!(entries(&survey(&mut table, "rank1")), ["rank1"]);
}

#[test]
fn sizes_are_those_of_values_and_ages_those_of_the_last_write() {
    let mut table = table();
    set(&mut table, b"/a/old", b"12345");
    set(&mut table, b"/a/new", b"1");
    table.set_seconds(70);
    set(&mut table, b"/a/new", b"123");
    tell(&mut table, Request::Add { key: b"/b/count".into(), delta: 5 });
    push(&mut table, b"/a/queue", b"item one");
    table.set_seconds(75);
    tell(&mut table, Request::Add { key: b"/b/count".into(), delta: 5 });
    tell(&mut table, Request::Get { key: b"/a/old".into() });
    push(&mut table, b"/a/queue", b"two");
    table.set_seconds(100);

    let root = survey(&mut table, "");
    assert_eq!((root.keys, root.bytes, root.queue_items), (4, 21, 2));
    let group = |prefix: &str, keys, bytes, newest_seconds, oldest_seconds| SurveyGroup {
        prefix: prefix.into(),
        prefix_hex: None,
        keys,
        bytes,
        newest_seconds,
        oldest_seconds,
    };
    assert_eq!(root.groups, [group("/a/", 3, 19, 25, 100), group("/b/", 1, 2, 25, 25)]);
    let entry = |key: &str, bytes, age_seconds, items: Option<u64>| SurveyEntry {
        key: key.into(),
        key_hex: None,
        bytes,
        age_seconds,
        kind: if items.is_some() { KeyKind::Queue } else { KeyKind::Value },
        items,
    };
    assert_eq!(
        survey(&mut table, "/a/").entries,
        [entry("/a/new", 3, 30, None), entry("/a/old", 5, 100, None), entry("/a/queue", 11, 25, Some(2))]
    );
    assert_eq!(survey(&mut table, "/b/").entries, [entry("/b/count", 2, 25, None)]);
}

#[test]
fn keys_that_are_not_text_are_also_given_as_bytes() {
    let mut table = table();
    for key in [b"\xff\x00/a".as_slice(), b"plain \xc3\xbc", b"\x1b[2J"] {
        set(&mut table, key, b"");
    }
    let root = survey(&mut table, "");
    assert_eq!(root.groups[0].prefix, "\u{fffd}\\u{0}/");
    assert_eq!(root.groups[0].prefix_hex.as_deref(), Some("ff002f"));
    assert_eq!(
        (root.entries[0].key.as_str(), root.entries[0].key_hex.as_deref()),
        ("\\u{1b}[2J", Some("1b5b324a"))
    );
    assert_eq!((root.entries[1].key.as_str(), root.entries[1].key_hex.as_deref()), ("plain ü", None));
}

// ── bounds ─────────────────────────────────────────────────────────────────────────────────────────────

#[test]
fn what_is_listed_is_bounded_and_the_rest_is_counted() {
    let mut table = table();
    for number in 0..3000 {
        set(&mut table, format!("group{number:04}/key").as_bytes(), &vec![0; number % 700]);
        set(&mut table, format!("key{number:04}").as_bytes(), b"v");
    }
    let root = survey(&mut table, "");
    assert_eq!((root.keys, root.truncated), (6000, true));
    assert_eq!((root.groups.len(), root.entries.len()), (500, 500));
    assert_eq!((entries(&root)[0], entries(&root)[499]), ("key0000", "key0499"), "the first by name");
    assert!(root.groups.is_sorted_by_key(|group| std::cmp::Reverse(group.bytes)), "the largest first");

    let few = survey(&mut table, "key29");
    assert_eq!((few.keys, few.entries.len(), few.truncated), (100, 100, false));
}

#[test]
fn very_long_keys_do_not_make_an_answer_of_many_megabytes() {
    let mut table = table();
    for number in 0..400 {
        set(&mut table, format!("{number:03}{}", "\u{1}".repeat(8000)).as_bytes(), b"v");
    }
    let root = survey(&mut table, "");
    assert_eq!((root.keys, root.entries.len(), root.truncated), (400, (256 << 10) / 8003, true));
}

#[test]
fn a_step_stays_within_its_work_however_long_keys_are() {
    // Counted, not timed: the tally shows how many keys were looked at.
    for (length, most) in [(5, STEP / KEY + 1), (8000, STEP / (KEY + 1000) + 1)] {
        let mut table = table();
        for number in 0..2500 {
            set(&mut table, format!("{number:05}{}", "x".repeat(length - 5)).as_bytes(), b"v");
        }
        let mut walk = Walk::new(Value::default());
        let mut seen = 0;
        loop {
            let is_whole = walk.step(&table, STEP);
            let looked_at = walk.tally.keys - seen;
            assert!(looked_at <= most as u64, "{looked_at} keys of {length} bytes in one step");
            seen = walk.tally.keys;
            if is_whole {
                break;
            }
        }
        assert_eq!(seen, 2500);
        assert!(walk.tally.steps >= (2500 / most) as u64);
    }
}

#[test]
fn empty_places_cost_little() {
    let mut table = table();
    for number in 0..100_000 {
        set(&mut table, format!("{number}").as_bytes(), b"v");
    }
    for number in 10..100_000 {
        delete(&mut table, format!("{number}").as_bytes());
    }
    let root = survey(&mut table, "");
    let places = table.values().places() as u64;
    assert_eq!(root.keys, 10);
    assert!(root.cost_steps <= places / STEP as u64 + 1, "{} steps for {places} places", root.cost_steps);
}

#[test]
fn a_table_that_grows_starts_the_walk_over_and_the_survey_is_right() {
    let mut table = table_of(&["a/1", "a/2", "a/3", "b"]);
    let mut grown = false;
    let survey = survey_while(&mut table, b"", 1, |table| {
        if !std::mem::replace(&mut grown, true) {
            (0..100).for_each(|number| set(table, format!("c/{number}").as_bytes(), b"v"));
        }
    });
    assert_eq!((survey.keys, survey.approximate), (104, false));
    assert_eq!(groups(&survey), [("c/", 100), ("a/", 3)]);
}

#[test]
fn a_table_that_never_stops_growing_gets_a_survey_that_says_so() {
    let mut table = table_of(&["a", "b", "c", "d", "e", "f", "g", "h"]);
    let mut next = 8;
    let survey = survey_while(&mut table, b"", 4 * KEY, |table| {
        // Faster than the walk: without a bound, it could chase the end forever.
        for _ in 0..if next < 100_000 { 1000 } else { 0 } {
            set(table, format!("{next}").as_bytes(), b"v");
            next += 1;
        }
    });
    assert!(survey.approximate);
    assert!(survey.keys <= 2 * next, "{} keys counted of {next}", survey.keys);
}

// ── any keys, any steps ────────────────────────────────────────────────────────────────────────────────

/// Keys and bytes of a group.
type Totals = (u64, u64);

/// The reference: every key in one pass, without any optimization.
fn naive(keys: &BTreeMap<Vec<u8>, Vec<u8>>, prefix: &[u8]) -> (BTreeMap<Vec<u8>, Totals>, Vec<Vec<u8>>) {
    let mut groups: BTreeMap<Vec<u8>, Vec<&Vec<u8>>> = BTreeMap::new();
    let mut entries = Vec::new();
    for key in keys.keys() {
        let Some(rest) = key.strip_prefix(prefix) else { continue };
        let lead = usize::from(prefix.is_empty() && rest.starts_with(b"/"));
        match rest[lead..].split(|&byte| byte == b'/').collect::<Vec<_>>()[..] {
            [_] => entries.push(key.clone()),
            ref names => {
                let name = [prefix, &rest[..lead], names[0], b"/"].concat();
                groups.entry(name).or_default().push(key);
            }
        }
    }
    let joined = groups.into_iter().map(|(mut name, members)| {
        // Descends as long as all members share the next name.
        loop {
            let way = |key: &Vec<u8>| {
                let end = key[name.len()..].iter().position(|&byte| byte == b'/')?;
                Some(key[..=name.len() + end].to_vec())
            };
            match way(members[0]) {
                Some(longer) if members.iter().all(|key| way(key).as_ref() == Some(&longer)) => name = longer,
                _ => break,
            }
        }
        let bytes = members.iter().map(|key| keys[*key].len() as u64).sum();
        (name, (members.len() as u64, bytes))
    });
    (joined.collect(), entries)
}

fn arbitrary_key() -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(prop::sample::select(b"ab/".to_vec()), 0..9)
}

proptest! {
    #[test]
    fn a_survey_in_any_steps_equals_the_reference(
        keys in prop::collection::btree_map(arbitrary_key(), prop::collection::vec(any::<u8>(), 0..30), 0..60),
        prefix in prop_oneof![Just(vec![]), prop::collection::vec(prop::sample::select(b"ab/".to_vec()), 0..4)],
        work in 1_usize..400,
    ) {
        let mut table = table();
        for (key, value) in &keys {
            set(&mut table, key, value);
        }
        let survey = survey_while(&mut table, &prefix, work, |_| {});
        let (expected_groups, expected_entries) = naive(&keys, &prefix);
        let groups: BTreeMap<_, _> = survey
            .groups
            .iter()
            .map(|group| (group.prefix.clone().into_bytes(), (group.keys, group.bytes)))
            .collect();
        prop_assert_eq!(groups.len(), survey.groups.len());
        prop_assert_eq!(groups, expected_groups);
        let entries: Vec<_> = survey.entries.iter().map(|entry| entry.key.clone().into_bytes()).collect();
        prop_assert_eq!(entries, expected_entries);
        let under: Vec<_> = keys.iter().filter(|(key, _)| key.starts_with(&prefix)).collect();
        prop_assert_eq!(survey.keys, under.len() as u64);
        prop_assert_eq!(survey.bytes, under.iter().map(|(_, value)| value.len() as u64).sum::<u64>());
        prop_assert!(!survey.truncated && !survey.approximate);
    }

    #[test]
    fn with_concurrent_writes_totals_stay_within_bounds(
        staying in prop::collection::btree_set(arbitrary_key(), 0..40),
        changes in prop::collection::vec((arbitrary_key(), any::<bool>(), any::<bool>()), 0..200),
        work in 1_usize..200,
        changes_a_step in 1_usize..20,
    ) {
        let mut table = table();
        for key in &staying {
            set(&mut table, key, b"12");
        }
        let mut coming: std::collections::BTreeSet<(Vec<u8>, bool)> = Default::default();
        let mut changes = changes.into_iter();
        let survey = survey_while(&mut table, b"", work, |table| {
            for (key, is_queue, is_write) in changes.by_ref().take(changes_a_step) {
                match (is_queue, is_write) {
                    (true, true) => push(table, &key, b"12"),
                    (true, false) => tell(table, Request::QueuePop { key: key.clone().into() }),
                    (false, true) => set(table, &key, b"12"),
                    (false, false) if !staying.contains(&key) => delete(table, &key),
                    (false, false) => {}
                }
                if is_write && (is_queue || !staying.contains(&key)) {
                    coming.insert((key, is_queue));
                }
            }
        });
        if !survey.approximate {
            prop_assert!(survey.keys >= staying.len() as u64);
        }
        // A key that was deleted and set again may be seen in both of its places.
        prop_assert!(survey.keys <= 200 + staying.len() as u64);
        prop_assert!(survey.bytes >= 2 * survey.keys, "every value has two bytes, a queue has more");
        let listed = survey.groups.iter().map(|group| group.keys).sum::<u64>() + survey.entries.len() as u64;
        prop_assert_eq!(listed, survey.keys);
        for entry in &survey.entries {
            let key = entry.key.clone().into_bytes();
            let is_queue = entry.kind == KeyKind::Queue;
            prop_assert!(!is_queue && staying.contains(&key) || coming.contains(&(key, is_queue)));
        }
    }
}
