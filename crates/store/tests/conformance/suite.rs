//! What every store does. Each function tests one promise; `conformance.rs` and `against_torch.rs` run all of
//! them for every implementation.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;
use std::time::Duration;

use tenfold_store::{ErrorKind, Store, StoreExt, Value};

/// One store under test: how to get another handle on its data, and what it supports beyond the basics.
pub(crate) struct Subject {
    pub(crate) open: Box<dyn Fn() -> Arc<dyn Store> + Sync>,
    pub(crate) queues: bool,
    /// Does `add` on a value that is not a number cost the client its connection?
    pub(crate) says_not_a_number: bool,
    /// Are waiters woken by every write? PyTorch's legacy server forgets compare_set.
    pub(crate) wakes_on_compare_set: bool,
}

impl Subject {
    pub(crate) fn new(open: impl Fn() -> Arc<dyn Store> + Sync + 'static) -> Self {
        Subject { open: Box::new(open), queues: true, says_not_a_number: true, wakes_on_compare_set: true }
    }

    pub(crate) fn open(&self) -> Arc<dyn Store> {
        (self.open)()
    }
}

const SOON: Duration = Duration::from_secs(20);
const BRIEFLY: Duration = Duration::from_millis(30);

fn texts(values: &[Value]) -> Vec<String> {
    values.iter().map(|value| String::from_utf8_lossy(value).into_owned()).collect()
}

/// Passes the names of all promises to another macro.
macro_rules! promises {
    ($macro:ident! $($argument:ident)?) => {
        $macro! { $($argument)? :
            what_is_set_is_read_and_the_last_one_wins
            keys_and_values_are_any_bytes
            large_values_arrive_whole
            counters_count_as_c10d_counts
            counting_on_text_is_an_error_and_changes_nothing
            compare_set_writes_only_what_was_expected
            check_sees_keys_and_never_waits
            a_wait_ends_when_the_last_key_comes_by_whatever_write
            a_wait_that_times_out_names_the_keys_and_leaves_the_store_usable
            several_keys_are_read_in_the_order_asked
            lists_of_different_lengths_are_refused_and_nothing_is_written
            append_adds_to_the_end_or_creates
            a_deleted_key_is_gone
            keys_are_counted_and_listed
            queues_are_first_in_first_out
            a_blocking_pop_waits_for_a_push
            everybody_meets_at_a_barrier
            a_barrier_that_lacks_somebody_times_out
            a_clone_works_while_the_first_one_waits
            timeouts_can_be_changed
            many_clients_count_exactly
        }
    };
}
pub(crate) use promises;

pub(crate) fn what_is_set_is_read_and_the_last_one_wins(subject: &Subject) {
    let (one, other) = (subject.open(), subject.open());
    one.set("key", "first").unwrap();
    assert_eq!(&*other.get("key").unwrap(), b"first");
    other.set("key", "second, longer").unwrap();
    other.check(&["key"]).unwrap(); // a set has no answer; what follows on the same handle proves that it was served
    assert_eq!(&*one.get("key").unwrap(), b"second, longer");
    one.set("key", "").unwrap();
    assert_eq!(&*one.get("key").unwrap(), b"");
}

pub(crate) fn keys_and_values_are_any_bytes(subject: &Subject) {
    let store = subject.open();
    let all: Vec<u8> = (0..=255).collect();
    for key in [&b""[..], b"\0", b"a/b//c", b"\xff\xfe", "Zürich".as_bytes(), &all] {
        store.set(key, &all).unwrap();
        assert_eq!(&*store.get(key).unwrap(), all, "{key:?}");
        assert!(store.delete_key(key).unwrap());
    }
}

pub(crate) fn large_values_arrive_whole(subject: &Subject) {
    let (one, other) = (subject.open(), subject.open());
    for length in [1439, 1440, 1441, 64 << 10, 8 << 20] {
        let value: Vec<u8> = (0..length).map(|index: usize| (index * 7 + index / 251) as u8).collect();
        one.set("large", &value).unwrap();
        one.check(&["large"]).unwrap();
        assert!(*other.get("large").unwrap() == *value, "{length} bytes");
    }
}

pub(crate) fn counters_count_as_c10d_counts(subject: &Subject) {
    let store = subject.open();
    assert_eq!(store.add("n", 40).unwrap(), 40);
    assert_eq!(store.add("n", 2).unwrap(), 42);
    assert_eq!(store.add("n", -50).unwrap(), -8);
    assert_eq!(&*store.get("n").unwrap(), b"-8");
    assert_eq!(store.add("zero", 0).unwrap(), 0);
    assert!(store.check(&["zero"]).unwrap());
    store.set("text", " \t+12abc").unwrap();
    assert_eq!(store.add("text", 1).unwrap(), 13);
    store.set("most", i64::MAX.to_string()).unwrap();
    assert_eq!(store.add("most", 1).unwrap(), i64::MIN);
}

pub(crate) fn counting_on_text_is_an_error_and_changes_nothing(subject: &Subject) {
    for text in ["abc", "", "9223372036854775808"] {
        let store = subject.open();
        store.set("text", text).unwrap();
        let error = store.add("text", 1).unwrap_err();
        let expected = if subject.says_not_a_number { ErrorKind::NotANumber } else { ErrorKind::Lost };
        assert_eq!(error.kind(), expected, "{error}");
        assert!(error.to_string().starts_with("store add `text` at "), "{error}");
        assert_eq!(&*store.get("text").unwrap(), text.as_bytes(), "the same handle goes on");
    }
}

pub(crate) fn compare_set_writes_only_what_was_expected(subject: &Subject) {
    let store = subject.open();
    assert_eq!(&*store.compare_set("k", "other", "new").unwrap(), b"other");
    assert!(!store.check(&["k"]).unwrap());
    assert_eq!(&*store.compare_set("k", "", "one").unwrap(), b"one");
    assert_eq!(&*store.compare_set("k", "wrong", "two").unwrap(), b"one");
    assert_eq!(&*store.compare_set("k", "", "two").unwrap(), b"one");
    assert_eq!(&*store.compare_set("k", "one", "two").unwrap(), b"two");
    assert_eq!(&*store.compare_set("k", "two", "").unwrap(), b"");
    assert_eq!(&*store.compare_set("k", "", "three").unwrap(), b"three");
    assert_eq!(&*store.get("k").unwrap(), b"three");
}

pub(crate) fn check_sees_keys_and_never_waits(subject: &Subject) {
    let store = subject.open();
    assert!(store.check::<&str>(&[]).unwrap());
    assert!(!store.check(&["k"]).unwrap());
    store.set("k", "").unwrap();
    assert!(store.check(&["k", "k"]).unwrap());
    assert!(!store.check(&["k", "z"]).unwrap());
}

pub(crate) fn a_wait_ends_when_the_last_key_comes_by_whatever_write(subject: &Subject) {
    type Write = fn(&dyn Store, &str) -> tenfold_store::Result<()>;
    let mut writes: Vec<(&str, Write)> = vec![
        ("set", |store, key| store.set(key, "v")),
        ("add", |store, key| store.add(key, 1).map(drop)),
        ("append", |store, key| store.append(key, "v")),
        ("multi_set", |store, key| store.multi_set(&["other", key], &["", "v"])),
    ];
    if subject.wakes_on_compare_set {
        writes.push(("compare_set", |store, key| store.compare_set(key, "", "v").map(drop)));
    }
    let (waiting, writing) = (subject.open(), subject.open());
    writing.set("there", "").unwrap();
    for (name, write) in writes {
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| waiting.wait_for(&["there", name, name], SOON));
            write(&*writing, name).unwrap();
            thread.join().unwrap().unwrap_or_else(|error| panic!("{name}: {error}"));
        });
    }
    waiting.wait::<&str>(&[]).unwrap();
}

pub(crate) fn a_wait_that_times_out_names_the_keys_and_leaves_the_store_usable(subject: &Subject) {
    let store = subject.open();
    for timeout in [Duration::ZERO, BRIEFLY] {
        let error = store.wait_for(&["never", "ever"], timeout).unwrap_err();
        assert!(error.is_timeout(), "{error}");
        let text = error.to_string();
        assert!(text.starts_with("store wait `never`, `ever` at "), "{text}");
        assert!(text.contains("timed out: the key was never set\n  hint: "), "{text}");
        assert!(error.scene().elapsed >= timeout);
    }
    store.set("k", "v").unwrap();
    store.wait_for(&["k"], Duration::ZERO).unwrap();
    assert_eq!(&*store.get("k").unwrap(), b"v");
}

pub(crate) fn several_keys_are_read_in_the_order_asked(subject: &Subject) {
    let (one, other) = (subject.open(), subject.open());
    one.multi_set(&["a", "b", "c"], &["1", "", "3"]).unwrap();
    one.check(&["a"]).unwrap();
    assert_eq!(texts(&other.multi_get(&["c", "a", "b", "a"]).unwrap()), ["3", "1", "", "1"]);
    assert!(other.multi_get::<&str>(&[]).unwrap().is_empty());
    one.multi_set::<&str, &str>(&[], &[]).unwrap();
    let keys: Vec<String> = (0..1000).map(|index| format!("many/{index}")).collect();
    one.multi_set(&keys, &keys).unwrap();
    one.check(&["a"]).unwrap();
    assert_eq!(texts(&other.multi_get(&keys).unwrap()), keys);
}

pub(crate) fn lists_of_different_lengths_are_refused_and_nothing_is_written(subject: &Subject) {
    let store = subject.open();
    let error = store.multi_set(&["a", "b"], &["1"]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Argument);
    assert!(error.to_string().contains("2 keys but 1 values"), "{error}");
    assert!(!store.check(&["a"]).unwrap());
}

pub(crate) fn append_adds_to_the_end_or_creates(subject: &Subject) {
    let store = subject.open();
    store.append("k", "po").unwrap();
    store.append("k", "ta").unwrap();
    store.append("k", "").unwrap();
    store.append("k", "to").unwrap();
    assert_eq!(&*store.get("k").unwrap(), b"potato");
    assert_eq!(store.add("n", 1).unwrap(), 1);
    store.append("n", "2").unwrap();
    assert_eq!(store.add("n", 1).unwrap(), 13);
}

pub(crate) fn a_deleted_key_is_gone(subject: &Subject) {
    let store = subject.open();
    assert!(!store.delete_key("k").unwrap());
    store.set("k", "v").unwrap();
    assert!(store.delete_key("k").unwrap());
    assert!(!store.check(&["k"]).unwrap());
    assert!(!store.delete_key("k").unwrap());
    store.set_timeout(BRIEFLY);
    assert!(store.get("k").unwrap_err().is_timeout());
}

pub(crate) fn keys_are_counted_and_listed(subject: &Subject) {
    let store = subject.open();
    let before = store.num_keys().unwrap();
    store.multi_set(&["b", "a", "c/d"], &["", "", ""]).unwrap();
    store.set("a", "again").unwrap();
    assert_eq!(store.num_keys().unwrap(), before + 3);
    let mut keys = texts(&store.list_keys().unwrap());
    keys.sort();
    assert_eq!(keys, ["a", "b", "c/d"]);
}

pub(crate) fn queues_are_first_in_first_out(subject: &Subject) {
    let (one, other) = (subject.open(), subject.open());
    if !subject.queues {
        return; // each such store has a test of its error
    }
    assert_eq!(one.queue_len("q").unwrap(), 0);
    assert_eq!(one.try_queue_pop("q").unwrap_err().kind(), ErrorKind::QueueEmpty);
    for item in ["1", "", "3"] {
        one.queue_push("q", item).unwrap();
    }
    assert_eq!(one.queue_len("q").unwrap(), 3);
    assert!(other.check(&["q"]).unwrap(), "a queue with something in it counts as a key");
    one.set("q", "key").unwrap();
    assert_eq!(&*other.try_queue_pop("q").unwrap(), b"1");
    assert_eq!(&*one.queue_pop("q").unwrap(), b"");
    assert_eq!(&*other.queue_pop("q").unwrap(), b"3");
    assert_eq!(one.queue_len("q").unwrap(), 0);
    assert_eq!(&*one.get("q").unwrap(), b"key", "a queue and a key may share a name");
}

/// A pop is a wait and then a take, as in c10d. Another client may take the item in between; then the pop is
/// retried.
fn pop_in_the_end(store: &impl StoreExt) -> Value {
    loop {
        match store.queue_pop("q") {
            Err(error) if error.kind() == ErrorKind::QueueEmpty => {}
            popped => return popped.unwrap(),
        }
    }
}

pub(crate) fn a_blocking_pop_waits_for_a_push(subject: &Subject) {
    if !subject.queues {
        return;
    }
    let pusher = subject.open();
    let poppers: Vec<_> = (0..3).map(|_| subject.open()).collect();
    let mut popped: Vec<String> = std::thread::scope(|scope| {
        let threads: Vec<_> = poppers.iter().map(|store| scope.spawn(|| pop_in_the_end(store))).collect();
        for item in ["a", "b", "c"] {
            pusher.queue_push("q", item).unwrap();
        }
        threads
            .into_iter()
            .map(|thread| String::from_utf8_lossy(&thread.join().unwrap()).into_owned())
            .collect()
    });
    popped.sort();
    assert_eq!(popped, ["a", "b", "c"]);
    pusher.set_timeout(BRIEFLY);
    assert!(pusher.queue_pop("q").unwrap_err().is_timeout());
}

pub(crate) fn everybody_meets_at_a_barrier(subject: &Subject) {
    let stores: Vec<_> = (0..4).map(|_| subject.open()).collect();
    for round in 0..3 {
        std::thread::scope(|scope| {
            for store in &stores {
                scope.spawn(move || {
                    store.add(format!("come/{round}"), 1).unwrap();
                    store.barrier(format!("meet/{round}"), 4).unwrap();
                    // No client passes before all have joined.
                    assert_eq!(store.add(format!("come/{round}"), 0).unwrap(), 4);
                });
            }
        });
    }
    stores[0].barrier("meet/0", 4).expect("a barrier that was passed stays open");
}

pub(crate) fn a_barrier_that_lacks_somebody_times_out(subject: &Subject) {
    let store = subject.open();
    let error = store.barrier_for("meet", 2, BRIEFLY).unwrap_err();
    assert!(error.is_timeout(), "{error}");
    assert!(error.to_string().contains("barrier `meet"), "{error}");
    // The arrival stays counted, as in c10d.
    store.barrier_for("meet", 2, SOON).unwrap();
}

pub(crate) fn a_clone_works_while_the_first_one_waits(subject: &Subject) {
    let store = subject.open();
    let clone = store.try_clone().unwrap();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| store.get("late"));
        clone.set("late", "now").unwrap();
        assert_eq!(&*waiting.join().unwrap().unwrap(), b"now");
    });
}

pub(crate) fn timeouts_can_be_changed(subject: &Subject) {
    let store = subject.open();
    assert!(store.set_timeout(BRIEFLY));
    assert_eq!(store.timeout(), BRIEFLY);
    let error = store.get("never").unwrap_err();
    assert!(error.is_timeout(), "{error}");
    assert!(error.to_string().starts_with("store get `never` at "), "{error}");
    assert!(error.scene().elapsed >= BRIEFLY);
}

pub(crate) fn many_clients_count_exactly(subject: &Subject) {
    const EACH: i64 = 200;
    let stores: Vec<_> = (0..8).map(|_| subject.open()).collect();
    std::thread::scope(|scope| {
        for store in &stores {
            scope.spawn(move || (0..EACH).for_each(|_| assert!(store.add("n", 1).unwrap() <= EACH * 8)));
        }
    });
    assert_eq!(stores[0].add("n", 0).unwrap(), EACH * 8);
}
