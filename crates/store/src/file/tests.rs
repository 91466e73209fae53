//! Records and damage; what needs several objects or processes is in `tests/file_store.rs`.

use super::log::could_be_a_record;
use super::stale::{process_start, wall_clock};
use super::*;

fn log(records: &[(&str, &str)]) -> Vec<u8> {
    let mut draft = Draft::default();
    for (key, value) in records {
        draft.record(&[key.as_bytes()], value.as_bytes()).unwrap();
    }
    draft.log
}

fn replay(log: &[u8]) -> (Replica, Result<(), Fault>) {
    let mut replica = Replica::default();
    let result = replica.replay(log, log.len() as u64).map_err(|damage| damage.at(replica.offset));
    (replica, result)
}

#[test]
fn a_record_is_two_lengths_and_two_strings() {
    let mut draft = Draft::default();
    draft.set(b"k", b"va").unwrap();
    draft.delete(b"k").unwrap();
    draft.count(CLEANUP, 12);
    let golden = b"\x02\0\0\0/k\x02\0\0\0va\x03\0\0\0-/k\0\0\0\0\x08\0\0\0cleanup/\x02\0\0\x0012";
    assert_eq!(draft.log, golden);
}

#[test]
fn the_last_record_of_a_key_wins() {
    let (replica, result) = replay(&log(&[("/a", "1"), ("/b", "2"), ("/a", "3"), ("-/b", ""), ("-/x", "")]));
    result.unwrap();
    assert_eq!(replica.value(b"a").as_deref(), Some(b"3".as_slice()));
    assert_eq!(replica.values.len(), 1);
    assert_eq!(replica.num_keys(), 1);
}

#[test]
fn a_record_cut_anywhere_is_damage_and_all_before_it_is_read() {
    let whole = log(&[("refcount/", "1"), ("/a", "1")]);
    let start = log(&[("refcount/", "1")]).len();
    for end in start + 1..whole.len() {
        let (replica, result) = replay(&whole[..end]);
        let fault = result.unwrap_err();
        assert_eq!(fault.kind, ErrorKind::Corrupt);
        let place = format!("the file is damaged at offset {start}: a record breaks off: its ");
        assert!(fault.message.starts_with(&place), "{}", fault.message);
        assert_eq!(replica.refcount(), 1);
        assert_eq!(replica.offset, start as u64);
    }
}

#[test]
fn only_what_a_store_begins_to_write_could_be_a_record() {
    for record in [("/a", "1"), ("-/a", ""), ("refcount/", "1"), ("cleanup/", "12")] {
        let whole = log(&[record]);
        for end in 0..=whole.len() {
            assert!(could_be_a_record(&whole[..end]), "{record:?} up to {end}");
        }
    }
    for text in ["Chapter 1", "\0\0\0\0", "\x03\0\0\0key", "\x08\0\0\0refc", "\x09\0\0\0clea", "\x02\0\0\0-a"]
    {
        assert!(!could_be_a_record(text.as_bytes()), "{text:?}");
    }
}

#[test]
fn bytes_of_any_kind_are_read_or_refused_but_never_panic() {
    // A small generator of our own: the same bytes in every run.
    let mut state = 1_u64;
    for _ in 0..20_000 {
        let bytes: Vec<u8> = (0..24)
            .map(|index| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                // Lengths are kept short, so that some records are whole.
                if index % 4 == 0 { (state >> 60) as u8 } else { b"\0\0\0\0/-rc"[(state >> 61) as usize] }
            })
            .collect();
        let (replica, result) = replay(&bytes);
        assert_eq!(result.is_ok(), replica.offset == bytes.len() as u64);
    }
}

#[test]
fn damage_says_what_and_where() {
    let text = |log: &[u8]| replay(log).1.unwrap_err().message;
    assert_eq!(
        text(&[0xff; 64]),
        "the file is damaged at offset 0: a record breaks off: its key needs 4294967295 bytes, 60 are left"
    );
    assert_eq!(
        text(&[0; 64]),
        "the file is damaged at offset 0: a record has the key ``, which no store writes"
    );
    assert_eq!(
        text(&log(&[("refcount/", "one")])),
        "the file is damaged at offset 0: the counter `refcount/` is `one`"
    );
    assert_eq!(
        text(&log(&[("/a", "1"), ("key", "value")])),
        "the file is damaged at offset 11: a record has the key `key`, which no store writes"
    );
}

#[test]
#[cfg(target_os = "linux")]
fn this_process_began_in_the_past_but_not_long_ago() {
    let age = wall_clock().duration_since(process_start().unwrap()).unwrap_or_default();
    assert!(age < Duration::from_secs(3600), "{age:?}");
}
