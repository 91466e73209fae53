use super::super::json;
use super::*;

fn dump(text: &str) -> Result<Dump, String> {
    let (heap, value) = json::parse(text.as_bytes()).unwrap();
    read(heap.view(&value), &mut Calls::default())
}

#[test]
fn a_record_has_what_the_entry_says() {
    let text = r#"{"version": "2.10", "pg_config": {"": {"ranks": "[0, 1]"}, "7": {"desc": "dp", "ranks": "[4, 2]"}},
        "entries": [{"record_id": 3, "process_group": ["7", "dp"], "collective_seq_id": 5, "p2p_seq_id": 0,
          "profiling_name": "nccl:recv 1<-0", "is_p2p": true, "state": "completed", "time_created_ns": 10,
          "time_discovered_completed_ns": 30, "time_discovered_started_ns": 0, "timeout_ms": 600000,
          "output_sizes": [[2, 3]], "output_dtypes": ["Float"], "input_sizes": [], "input_dtypes": [],
          "frames": [{"name": "f", "filename": "a.py", "line": 3}]}]}"#;
    let dump = dump(text).unwrap();
    assert_eq!(dump.groups.len(), 1, "a group without a name is skipped");
    assert_eq!(dump.groups["7"].ranks, [4, 2]);
    let record = &dump.records[0];
    assert_eq!(record.detail, Detail::Message { source: Some(0), target: 1 });
    assert_eq!((&*record.library, &*record.operation, record.sequence), ("nccl", "recv", 5));
    assert_eq!(record.end, End::Completed(Some(30)));
    assert_eq!((record.started_ns, record.created_ns), (None, Some(10)));
    assert_eq!(record.outputs[0].elements(), 6);
    assert_eq!(record.frames[0].line, 3);
}

#[test]
fn the_failure_of_a_group_is_found_by_its_number_and_by_its_place() {
    let text = r#"{"version": "2.10",
        "pg_config": {"w": {"ranks": "[0, 1]"}, "x": {"ranks": "[0, 1]"}, "y": {"ranks": "[0, 1]"}},
        "pg_status": {"7": {"last_enqueued_collective": 3},
          "8": {"failed_at_ns": "5", "failure": "rank 1 died", "failure_rank": 1},
          "9": {"failed_at_ns": 6, "failure": "aborted", "failure_rank": -1}},
        "entries": [{"record_id": 0, "pg_id": 8, "process_group": ["x", ""], "collective_seq_id": 1,
          "profiling_name": "tenfold:barrier"}]}"#;
    let dump = dump(text).unwrap();
    let failure = |at_ns, text: &str, rank| Some(Failure { at_ns, text: text.into(), rank });
    assert_eq!(dump.groups["w"].failure, None);
    assert_eq!(dump.groups["x"].failure, failure(5, "rank 1 died", Some(1)));
    assert_eq!(dump.groups["y"].failure, failure(6, "aborted", None));
}

#[test]
fn equal_calls_are_stored_once() {
    let entry = |sequence: u32, name: &str| {
        format!(
            r#"{{"record_id": {sequence}, "process_group": ["0", "dp"], "collective_seq_id": {sequence}, "profiling_name": "{name}",
              "input_sizes": [[2]], "frames": [{{"name": "f", "filename": "a.py", "line": 3}}]}}"#
        )
    };
    let entries = [entry(1, "a:b"), entry(2, "a:b"), entry(3, "a:c")].join(", ");
    let text = format!(r#"{{"version": "2.1", "entries": [{entries}]}}"#);
    let mut calls = Calls::default();
    let mut records = Vec::new();
    for _file in 0..2 {
        let (heap, value) = json::parse(text.as_bytes()).unwrap();
        records.extend(read(heap.view(&value), &mut calls).unwrap().records);
    }
    assert_eq!(records.iter().map(|record| record.sequence).collect::<Vec<_>>(), [1, 2, 3, 1, 2, 3]);
    let same: Vec<bool> = records.iter().map(|record| Arc::ptr_eq(&record.call, &records[0].call)).collect();
    assert_eq!(same, [true, true, false, true, true, false]);
}

#[test]
fn an_old_minor_version_is_read_and_another_major_is_refused() {
    let old = r#"{"version": "2.0", "pg_config": {}, "entries": [
        {"record_id": 0, "process_group": "0", "seq_id": 9, "profiling_name": "nccl:all_reduce", "state": "started"}]}"#;
    let record = &dump(old).unwrap().records[0];
    assert_eq!((record.sequence, record.end), (9, End::Open));
    let refused = dump(r#"{"version": "3.0", "entries": []}"#).unwrap_err();
    assert!(refused.starts_with("unsupported format version `3.0`: this tenfold reads 2.x"), "{refused}");
}

#[test]
fn foreign_content_is_named() {
    assert_eq!(dump("[1]").unwrap_err(), "not a flight-recorder dump: expected a dictionary, found a list");
    assert_eq!(dump(r#"{"a": 1}"#).unwrap_err(), "not a flight-recorder dump: it has no `version`");
    let bad = r#"{"version": "2.1", "entries": [{"process_group": ["0", ""]}]}"#;
    assert_eq!(dump(bad).unwrap_err(), "entry 0: it has no `profiling_name`");
    assert_eq!(
        dump(r#"{"version": "2.1", "entries": 3}"#).unwrap_err(),
        "its `entries` are a number, not a list"
    );
}

#[test]
fn a_small_file_cannot_become_a_large_dump() {
    // One entry, one list of frames, each mentioned thousands of times.
    let mut bytes =
        b"\x80\x02}(X\x07\x00\x00\x00versionX\x03\x00\x00\x002.9X\x07\x00\x00\x00entries](}(".to_vec();
    for (key, value) in [("profiling_name", "a:b"), ("process_group", "0"), ("collective_seq_id", "1")] {
        for text in [key, value] {
            bytes.extend([&b"X"[..], &(text.len() as u32).to_le_bytes(), text.as_bytes()].concat());
        }
    }
    bytes.extend(b"X\x06\x00\x00\x00frames](}q\x01");
    bytes.extend(b"h\x01".repeat(10_000));
    bytes.extend(b"euq\x02");
    bytes.extend(b"h\x02".repeat(10_000));
    bytes.extend(b"eu.");
    assert!(refusal(&bytes).ends_with("operations, frames and sizes: no recorder writes that many"));
}

fn refusal(pickle: &[u8]) -> String {
    let (heap, value) = super::super::pickle::unpickle(pickle).unwrap();
    read(heap.view(&value), &mut Calls::default()).unwrap_err()
}

fn put(bytes: &mut Vec<u8>, text: &str) {
    bytes.extend([&b"X"[..], &(text.len() as u32).to_le_bytes(), text.as_bytes()].concat());
}

/// One entry with this name and many unknown fields, mentioned again and again.
fn again_and_again(name: &str, strange_fields: usize) -> Vec<u8> {
    let mut bytes = b"\x80\x02}(".to_vec();
    ["version", "2.9", "entries"].iter().for_each(|text| put(&mut bytes, text));
    bytes.extend(b"](}(");
    for text in ["profiling_name", name, "process_group", "0", "collective_seq_id", "1"] {
        put(&mut bytes, text);
    }
    bytes.extend(b"K\x01K\x01".repeat(strange_fields));
    bytes.extend(b"uq\x02");
    bytes.extend(b"h\x02".repeat(1_000_000));
    bytes.extend(b"eu.");
    bytes
}

#[test]
fn a_large_dictionary_that_is_mentioned_again_and_again_costs_each_time() {
    let refused = refusal(&again_and_again("a:b", 200_000));
    assert!(refused.ends_with("operations, frames and sizes: no recorder writes that many"), "{refused}");
}

#[test]
fn a_long_text_that_is_mentioned_again_and_again_costs_each_time() {
    let refused = refusal(&again_and_again(&"x".repeat(1 << 20), 0));
    assert!(refused.ends_with("its calls have more than 1024 MiB of text: no recorder writes that much"));
}

#[test]
fn the_members_of_all_groups_together_have_a_bound() {
    let mut bytes = b"\x80\x02}(".to_vec();
    ["version", "2.9", "pg_config"].iter().for_each(|text| put(&mut bytes, text));
    bytes.extend(b"}(");
    put(&mut bytes, "0");
    bytes.extend(b"}(");
    put(&mut bytes, "ranks");
    bytes.extend([&b"]("[..], &b"K\x01".repeat(10_000), b"euq\x02"].concat());
    for group in 1..1_000 {
        put(&mut bytes, &group.to_string());
        bytes.extend(b"h\x02");
    }
    bytes.extend(b"uu.");
    assert!(refusal(&bytes).ends_with("no recorder writes that many"));
}
