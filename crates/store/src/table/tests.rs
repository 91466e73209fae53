//! Every operation, wait, promise and limit of the table, one at a time.

use std::time::Duration;

use super::Response::{Deleted, Done, Keys, Number, Popped, Present, Ready, Values};
use super::*;

const ALICE: ClientId = ClientId(1);
const BOB: ClientId = ClientId(2);
const CAROL: ClientId = ClientId(3);

/// The answer to a bare `get` of a missing key.
const NONE: Response = Response::Value(None);

fn table() -> Table {
    Table::default()
}

fn limited(change: impl FnOnce(&mut TableLimits)) -> Table {
    let mut limits = TableLimits::default();
    change(&mut limits);
    Table::new(limits)
}

fn full<T>(what: &'static str, limit: usize) -> Result<T, Refusal> {
    Err(Refusal::Full { what, limit })
}

fn bytes(text: &str) -> Bytes<'_> {
    text.as_bytes().into()
}

fn value(text: &str) -> Value {
    text.as_bytes().into()
}

fn some(text: &str) -> Response {
    Response::Value(Some(value(text)))
}

fn item(text: &str, length: usize) -> Response {
    Popped(Some((value(text), length)))
}

fn keys<'a>(keys: &[&'a str]) -> Vec<Bytes<'a>> {
    keys.iter().map(|key| bytes(key)).collect()
}

/// Short forms of requests and replies, for the tests below.
impl Table {
    fn ask(&mut self, client: ClientId, request: Request<'_>) -> Result<Replies, Refusal> {
        let mut replies = Replies::new();
        self.apply(client, request, Instant::now(), &mut replies).map(|()| replies)
    }

    /// Sends a request as a client that never waits; returns its reply and the replies to other clients.
    fn tell(&mut self, request: Request<'_>) -> (Response, Replies) {
        let passer_by = ClientId(0);
        let mut replies = self.ask(passer_by, request).expect("not refused");
        let (client, own) = replies.pop().expect("everything but a wait is answered");
        assert_eq!(client, passer_by);
        (own, replies)
    }

    /// Sends a request as a client that never waits; no other client may get a reply.
    fn one(&mut self, request: Request<'_>) -> Response {
        let (own, others) = self.tell(request);
        assert_eq!(others, []);
        own
    }

    fn set(&mut self, key: &str, value: &str) -> Replies {
        let (done, woken) = self.tell(Request::Set { key: bytes(key), value: bytes(value) });
        assert_eq!(done, Done);
        woken
    }

    fn get(&mut self, key: &str) -> Response {
        self.one(Request::Get { key: bytes(key) })
    }

    fn try_add(&mut self, key: &str, delta: i64) -> Result<Replies, Refusal> {
        self.ask(ClientId(0), Request::Add { key: bytes(key), delta })
    }

    fn add(&mut self, key: &str, delta: i64) -> Response {
        self.one(Request::Add { key: bytes(key), delta })
    }

    fn remove(&mut self, key: &str) -> Response {
        self.one(Request::Delete { key: bytes(key) })
    }

    fn compare_set_of(&mut self, key: &str, expected: &str, desired: &str) -> (Response, Replies) {
        let (expected, desired) = (bytes(expected), bytes(desired));
        self.tell(Request::CompareSet { key: bytes(key), expected, desired })
    }

    fn multi_set_of(&mut self, pairs: &[(&str, &str)]) -> Result<Replies, Refusal> {
        let pairs = pairs.iter().map(|(key, value)| (bytes(key), bytes(value))).collect();
        self.ask(ClientId(0), Request::MultiSet { pairs })
    }

    fn push_of(&mut self, key: &str, item: &str) -> Replies {
        let (done, woken) = self.tell(Request::QueuePush { key: bytes(key), value: bytes(item) });
        assert_eq!(done, Done);
        woken
    }

    fn pop_of(&mut self, client: ClientId, key: &str) -> Replies {
        self.ask(client, Request::QueuePop { key: bytes(key) }).expect("a pop is never refused")
    }

    fn queue_len(&mut self, key: &str) -> Response {
        self.one(Request::QueueLen { key: bytes(key) })
    }

    fn wait(&mut self, client: ClientId, names: &[&str]) -> Result<Replies, Refusal> {
        self.ask(client, Request::Wait { keys: keys(names) })
    }

    fn waits(&mut self, client: ClientId, names: &[&str]) {
        assert_eq!(self.wait(client, names), Ok(vec![]));
    }

    fn barrier(&mut self, client: ClientId, key: &str, world: i64) -> Result<Replies, Refusal> {
        self.ask(client, Request::Barrier { key: bytes(key), world })
    }

    fn cancels(&mut self, client: ClientId) -> (bool, Replies) {
        let mut replies = Replies::new();
        (self.cancel(client, &mut replies), replies)
    }

    fn forgets(&mut self, client: ClientId) -> Replies {
        let mut replies = Replies::new();
        self.forget(client, &mut replies);
        replies
    }

    /// Everything that a client can observe, to show that a refusal changed nothing.
    fn picture(&self) -> impl PartialEq + std::fmt::Debug + use<> {
        let mut map: Vec<_> =
            self.map.iter().map(|slot| (slot.key.clone(), slot.held.clone(), slot.written)).collect();
        let mut queues: Vec<_> = self
            .queues
            .iter()
            .map(|slot| (slot.key.clone(), slot.held.items.clone(), slot.held.bytes))
            .collect();
        map.sort();
        queues.sort();
        let counts = [self.bytes, self.queue_items, self.waiting.len(), self.promised.len()];
        (map, queues, self.waiters(), counts)
    }
}

// ── ages ───────────────────────────────────────────────────────────────────────────────────────────

#[test]
fn only_writes_are_stamped_with_a_time() {
    let age_of = |table: &Table, key: &str| {
        let values = table.map.iter().map(|slot| (&slot.key, slot.written));
        let queues = table.queues.iter().map(|slot| (&slot.key, slot.written));
        values.chain(queues).find(|(name, _)| ***name == *key.as_bytes()).expect("it is there").1
    };
    let mut table = Table::new(TableLimits { bytes: 2000, ..TableLimits::default() });
    table.set("k", "1");
    table.set("long", &"x".repeat(100));
    table.push_of("q", "item");
    let writes: [(&str, Request<'_>); 8] = [
        ("k", Request::Set { key: bytes("k"), value: bytes("2") }),
        ("k", Request::Add { key: bytes("k"), delta: 1 }),
        ("k", Request::Append { key: bytes("k"), value: bytes("4") }),
        ("k", Request::CompareSet { key: bytes("k"), expected: bytes("34"), desired: bytes("5") }),
        ("k", Request::MultiSet { pairs: vec![(bytes("k"), bytes("6"))] }),
        ("k", Request::Barrier { key: bytes("k"), world: 1 }),
        ("long", Request::Set { key: bytes("long"), value: bytes("shorter") }),
        ("q", Request::QueuePush { key: bytes("q"), value: bytes("another") }),
    ];
    for (second, (key, write)) in (1..).zip(writes) {
        table.set_seconds(second);
        table.ask(ClientId(0), write.clone()).expect("there is room");
        assert_eq!(age_of(&table, key), second, "{write:?}");
    }
    let too_long = "x".repeat(2000);
    let others = [
        Request::Get { key: bytes("k") },
        Request::Check { keys: keys(&["k", "q", "long"]) },
        Request::CompareSet { key: bytes("k"), expected: bytes("another"), desired: bytes("5") },
        Request::MultiGet { keys: keys(&["k", "long"]) },
        Request::QueueLen { key: bytes("q") },
        Request::Set { key: bytes("k"), value: bytes(&too_long) },
        Request::Append { key: bytes("k"), value: bytes(&too_long) },
        Request::Add { key: bytes("long"), delta: 1 },
    ];
    for other in others {
        table.set_seconds(100);
        let _done_or_refused = table.ask(ClientId(0), other.clone());
        assert_eq!(["k", "long", "q"].map(|key| age_of(&table, key)), [6, 7, 8], "{other:?}");
    }
    table.pop_of(ALICE, "q");
    assert_eq!(age_of(&table, "q"), 100, "taking an item is a change");
}

// ── keys ───────────────────────────────────────────────────────────────────────────────────────────

#[test]
fn a_key_is_what_was_last_written_to_it() {
    let mut table = table();
    assert_eq!(table.get("k"), NONE);
    assert_eq!(table.set("k", "one"), []);
    assert_eq!(table.get("k"), some("one"));
    for text in ["two", "longer", "", "x"] {
        table.set("k", text); // the same length, longer, empty, longer again
        assert_eq!(table.get("k"), some(text));
    }
    assert_eq!(table.remove("k"), Deleted(true));
    assert_eq!(table.remove("k"), Deleted(false));
    assert_eq!(table.get("k"), NONE);
}

#[test]
fn a_reply_keeps_the_value_it_was_given() {
    let mut table = table();
    table.set("k", "old");
    let Response::Value(Some(reply)) = table.get("k") else { panic!("the key is there") };
    table.set("k", "new"); // as long as the old one: must not be written over it
    assert_eq!(*reply, *b"old");
    assert_eq!(table.get("k"), some("new"));
}

#[test]
fn appending_creates_and_lengthens() {
    let mut table = table();
    for (part, whole) in [("a", "a"), ("", "a"), ("bc", "abc")] {
        assert_eq!(table.one(Request::Append { key: bytes("k"), value: bytes(part) }), Done);
        assert_eq!(table.get("k"), some(whole));
    }
    assert_eq!(table.one(Request::Append { key: bytes("new"), value: bytes("") }), Done);
    assert_eq!(table.get("new"), some(""));
}

#[test]
fn several_keys_are_read_and_written_in_the_order_asked() {
    let mut table = table();
    table.multi_set_of(&[("a", "1"), ("b", "2"), ("a", "3")]).expect("not refused");
    let read = table.one(Request::MultiGet { keys: keys(&["b", "none", "a", "b"]) });
    assert_eq!(read, Values(vec![Some(value("2")), None, Some(value("3")), Some(value("2"))]));
    assert_eq!(table.one(Request::MultiGet { keys: vec![] }), Values(vec![]));
    assert_eq!(table.multi_set_of(&[]), Ok(vec![(ClientId(0), Done)]));
}

#[test]
fn check_requires_all_keys_and_accepts_a_queue_that_is_not_empty() {
    let mut table = table();
    table.set("k", "");
    table.push_of("q", "item");
    for (names, present) in [
        (&[][..], true),
        (&["k"], true),
        (&["q"], true),
        (&["k", "q", "k"], true),
        (&["k", "none"], false),
        (&["none", "q"], false),
    ] {
        assert_eq!(table.one(Request::Check { keys: keys(names) }), Present(present), "{names:?}");
    }
    table.pop_of(ALICE, "q");
    assert_eq!(table.one(Request::Check { keys: keys(&["q"]) }), Present(false));
}

#[test]
fn keys_are_counted_and_listed_and_queues_are_not() {
    let mut table = table();
    assert_eq!(table.one(Request::NumKeys), Number(0));
    table.set("a", "1");
    table.set("b", "2");
    table.set("a", "3");
    table.push_of("q", "item");
    table.waits(ALICE, &["missing"]);
    assert_eq!(table.one(Request::NumKeys), Number(2));
    let Keys(mut listed) = table.one(Request::ListKeys) else { panic!("keys are listed") };
    listed.sort();
    assert_eq!(listed, [value("a"), value("b")]);
}

#[test]
fn compare_set_answers_and_wakes_in_its_four_cases() {
    // (value before, expected, reply, value after, whether waiting clients are woken)
    for (before, expected, reply, after, wakes) in [
        (None, "", "new", some("new"), true),
        (None, "old", "old", NONE, false),
        (Some("old"), "old", "new", some("new"), true),
        (Some(""), "", "new", some("new"), true),
        (Some("other"), "old", "other", some("other"), false),
        (Some("other"), "", "other", some("other"), false),
    ] {
        let mut table = table();
        table.barrier(ALICE, "k", 9).expect("not refused"); // waits for a write, whether the key exists or not
        table.remove("k");
        if let Some(before) = before {
            table.store(b"k", before.as_bytes()).expect("there is room");
        }
        let woken = if wakes { vec![(ALICE, Ready)] } else { vec![] };
        assert_eq!(table.compare_set_of("k", expected, "new"), (some(reply), woken), "{before:?}");
        assert_eq!(table.get("k"), after);
    }
}

// ── numbers ────────────────────────────────────────────────────────────────────────────────────────

#[test]
fn adding_counts_from_zero_and_keeps_decimal_text() {
    let mut table = table();
    assert_eq!(table.add("n", 0), Number(0));
    assert_eq!(table.get("n"), some("0"));
    assert_eq!(table.add("n", -12), Number(-12));
    assert_eq!(table.get("n"), some("-12"));
    assert_eq!(table.add("n", 22), Number(10));
    assert_eq!(table.get("n"), some("10"));
}

#[test]
fn numbers_are_read_as_strtoll_reads_them() {
    for (text, number) in [
        ("0", Some(0)),
        ("-0", Some(0)),
        ("007", Some(7)),
        (" \t\n\u{b}\u{c}\r+5", Some(5)),
        ("  -5", Some(-5)),
        ("12abc", Some(12)),
        ("12 34", Some(12)),
        ("1.9", Some(1)),
        ("0x10", Some(0)),
        ("9223372036854775807", Some(i64::MAX)),
        ("-9223372036854775808", Some(i64::MIN)),
        ("00000000000000000000000000009", Some(9)),
        ("9223372036854775808", None),
        ("-9223372036854775809", None),
        ("99999999999999999999999", None),
        ("99999999999999999999999junk", None),
        ("", None),
        (" ", None),
        ("-", None),
        ("+", None),
        ("+-1", None),
        ("- 1", None),
        ("abc", None),
        ("\0\x31", None),
        ("é1", None),
    ] {
        assert_eq!(parse_number(text.as_bytes()), number, "{text:?}");
    }
}

#[test]
fn a_sum_wraps_and_a_value_that_is_not_a_number_is_unchanged() {
    let mut table = table();
    table.set("n", "9223372036854775807");
    assert_eq!(table.add("n", 1), Number(i64::MIN));
    assert_eq!(table.add("n", -1), Number(i64::MAX));
    table.set("n", "12abc");
    assert_eq!(table.add("n", 1), Number(13));
    assert_eq!(table.get("n"), some("13"));
    for text in ["", "abc", "9223372036854775808"] {
        table.set("n", text);
        let refusal = Refusal::NotANumber { key: value("n") };
        assert_eq!(table.try_add("n", 1), Err(refusal.clone()));
        assert_eq!(table.barrier(ALICE, "n", 1), Err(refusal));
        assert_eq!(table.get("n"), some(text));
    }
}

// ── waiting ────────────────────────────────────────────────────────────────────────────────────────

#[test]
fn waiting_for_existing_keys_returns_immediately() {
    let mut table = table();
    assert_eq!(table.wait(ALICE, &[]), Ok(vec![(ALICE, Ready)]));
    table.set("k", "1");
    table.push_of("q", "item");
    assert_eq!(table.wait(ALICE, &["k", "q", "k"]), Ok(vec![(ALICE, Ready)]));
    assert_eq!(table.waiters_count(), 0);
}

#[test]
fn every_kind_of_write_ends_a_wait() {
    let key = || bytes("k");
    for write in [
        Request::Set { key: key(), value: bytes("1") },
        Request::Append { key: key(), value: bytes("") },
        Request::Add { key: key(), delta: 0 },
        Request::CompareSet { key: key(), expected: bytes(""), desired: bytes("1") },
        Request::MultiSet { pairs: vec![(bytes("other"), bytes("1")), (key(), bytes("1"))] },
        Request::Barrier { key: key(), world: 1 },
        Request::QueuePush { key: key(), value: bytes("1") },
    ] {
        let mut table = table();
        table.waits(ALICE, &["k"]);
        let name = write.operation().name();
        assert_eq!(table.tell(write).1, [(ALICE, Ready)], "{name}");
        assert_eq!(table.set("k", "2"), [], "{name} ended the wait for good");
    }
}

#[test]
fn a_wait_is_over_with_its_last_key_and_a_key_listed_twice_counts_once() {
    let mut table = table();
    table.waits(ALICE, &["a", "b", "a", "a"]);
    assert_eq!(table.set("a", "1"), []);
    assert_eq!(table.set("a", "2"), []);
    assert_eq!(table.set("b", "1"), [(ALICE, Ready)]);
    assert_eq!(table.set("b", "1"), []);
}

#[test]
fn a_write_wakes_all_clients_that_wait_for_it_the_oldest_first() {
    let mut table = table();
    table.waits(BOB, &["k"]);
    table.waits(ALICE, &["k"]);
    table.waits(CAROL, &["k", "more"]);
    assert_eq!(table.set("k", "1"), [(BOB, Ready), (ALICE, Ready)]);
    assert_eq!(table.set("more", "1"), [(CAROL, Ready)]);
}

#[test]
fn deleting_a_key_that_was_seen_does_not_prolong_the_wait() {
    let mut table = table();
    table.set("there", "1");
    table.waits(ALICE, &["there", "a", "b"]);
    table.set("a", "1");
    assert_eq!(table.remove("there"), Deleted(true));
    assert_eq!(table.remove("a"), Deleted(true));
    assert_eq!(table.set("b", "1"), [(ALICE, Ready)]);
}

#[test]
fn a_client_that_waits_may_ask_and_may_wake_itself() {
    let mut table = table();
    table.waits(ALICE, &["k"]);
    assert_eq!(table.ask(ALICE, Request::NumKeys), Ok(vec![(ALICE, Number(0))]));
    let woken_first = vec![(ALICE, Ready), (ALICE, Number(1))];
    assert_eq!(table.ask(ALICE, Request::Add { key: bytes("k"), delta: 1 }), Ok(woken_first));
}

#[test]
fn a_second_wait_is_refused_and_the_first_one_stays() {
    let mut table = table();
    table.set("there", "1");
    table.waits(ALICE, &["k"]);
    let before = table.picture();
    assert_eq!(table.wait(ALICE, &["other"]), Err(Refusal::AlreadyWaiting));
    assert_eq!(table.barrier(ALICE, "b", 2), Err(Refusal::AlreadyWaiting));
    assert_eq!(table.barrier(ALICE, "b", 1), Err(Refusal::AlreadyWaiting));
    assert_eq!(table.picture(), before);
    assert_eq!(table.wait(ALICE, &["there"]), Ok(vec![(ALICE, Ready)])); // nothing to wait for
    assert_eq!(table.set("k", "1"), [(ALICE, Ready)]);
}

#[test]
fn a_cancelled_wait_and_a_forgotten_client_are_never_woken() {
    let mut table = table();
    assert_eq!(table.cancels(ALICE), (false, vec![]));
    table.waits(ALICE, &["a", "b"]);
    table.waits(BOB, &["b", "c"]);
    table.waits(CAROL, &["b"]);
    table.set("a", "1");
    assert_eq!(table.cancels(ALICE), (true, vec![]));
    assert_eq!(table.cancels(ALICE), (false, vec![]));
    assert_eq!(table.forgets(BOB), []);
    assert_eq!(table.set("b", "1"), [(CAROL, Ready)]);
    assert_eq!(table.set("c", "1"), []);
    // The ids may be used again.
    table.waits(ALICE, &["d"]);
    assert_eq!(table.set("d", "1"), [(ALICE, Ready)]);
}

#[test]
fn waits_are_listed_with_their_missing_keys_the_longest_first() {
    let mut table = table();
    let start = Instant::now();
    let mut wait = |client, names: &[&str], seconds| {
        let mut replies = Replies::new();
        let now = start + Duration::from_secs(seconds);
        table.apply(client, Request::Wait { keys: keys(names) }, now, &mut replies).expect("not refused");
    };
    let many: Vec<String> = (10..30).map(|index| format!("k{index}")).collect();
    wait(ALICE, &many.iter().map(String::as_str).collect::<Vec<_>>(), 2);
    wait(BOB, &["z", "a"], 1);
    table.set("k10", "seen");
    let [bob, alice] = &table.waiters()[..] else { panic!("two wait") };
    assert_eq!((bob.client, bob.missing_count, bob.since), (BOB, 2, start + Duration::from_secs(1)));
    assert_eq!(bob.missing, [value("a"), value("z")]);
    assert_eq!((alice.client, alice.missing_count, alice.operation), (ALICE, 19, Operation::Wait));
    assert_eq!((alice.missing.len(), &alice.missing[0]), (8, &value("k11")));
}

// ── queues ─────────────────────────────────────────────────────────────────────────────────────────

#[test]
fn a_queue_is_first_in_first_out_and_apart_from_a_key_of_its_name() {
    let mut table = table();
    assert_eq!(table.queue_len("q"), Number(0));
    assert_eq!(table.pop_of(ALICE, "q"), [(ALICE, Popped(None))]);
    for text in ["1", "", "3"] {
        table.push_of("q", text);
    }
    table.set("q", "key");
    assert_eq!(table.queue_len("q"), Number(3));
    assert_eq!(table.remove("q"), Deleted(true));
    for (text, length) in [("1", 3), ("", 2), ("3", 1)] {
        assert_eq!(table.pop_of(ALICE, "q"), [(ALICE, item(text, length))]);
    }
    assert_eq!(table.pop_of(ALICE, "q"), [(ALICE, Popped(None))]);
    assert_eq!(table.get("q"), NONE);
    assert_eq!((table.queue_items(), table.bytes()), (0, 0));
}

#[test]
fn a_push_wakes_exactly_one_the_oldest_that_waits_for_nothing_else() {
    let mut table = table();
    table.waits(ALICE, &["q", "k"]);
    table.waits(BOB, &["q"]);
    table.waits(CAROL, &["q"]);
    assert_eq!(table.push_of("q", "1"), [(BOB, Ready)]);
    assert_eq!(table.push_of("q", "2"), [(CAROL, Ready)]);
    assert_eq!(table.push_of("q", "3"), []);
    assert_eq!(table.set("k", "1"), [(ALICE, Ready)]); // it saw the queue with the first push
}

#[test]
fn a_client_woken_by_a_push_is_not_woken_by_the_next_for_something_unrelated() {
    let mut table = table();
    table.waits(ALICE, &["q"]);
    assert_eq!(table.push_of("q", "1"), [(ALICE, Ready)]);
    assert_eq!(table.pop_of(ALICE, "q"), [(ALICE, item("1", 1))]);
    table.waits(ALICE, &["unrelated"]);
    assert_eq!(table.push_of("q", "2"), []); // PyTorch's server wakes it here
    assert_eq!(table.set("unrelated", "1"), [(ALICE, Ready)]);
}

#[test]
fn a_wait_for_a_filled_queue_and_a_missing_key_ends_when_the_key_is_set() {
    let mut table = table();
    table.push_of("q", "1");
    table.waits(ALICE, &["q", "k"]);
    table.pop_of(BOB, "q");
    assert_eq!(table.set("k", "1"), [(ALICE, Ready)]); // PyTorch's server sleeps on
}

#[test]
fn an_item_for_a_client_that_does_not_fetch_it_is_offered_to_the_next() {
    type Leave = fn(&mut Table) -> Replies;
    let leaves: [(&str, Leave); 6] = [
        ("dies", |table| table.forgets(ALICE)),
        ("cancels", |table| table.cancels(ALICE).1),
        ("asks for another queue", |table| table.pop_of(ALICE, "other")),
        ("asks for a key", |table| table.ask(ALICE, Request::NumKeys).expect("not refused")),
        ("waits for something else", |table| table.wait(ALICE, &["else"]).expect("not refused")),
        ("fails", |table| {
            let mut replies = Replies::new();
            let request = Request::Add { key: bytes("text"), delta: 1 };
            table.apply(ALICE, request, Instant::now(), &mut replies).expect_err("no number");
            replies
        }),
    ];
    for (how, leave) in leaves {
        let mut table = table();
        table.set("text", "no number");
        table.waits(ALICE, &["q"]);
        table.waits(BOB, &["q"]);
        assert_eq!(table.push_of("q", "item"), [(ALICE, Ready)]);
        let woken: Vec<_> = leave(&mut table).into_iter().filter(|(client, _)| *client != ALICE).collect();
        assert_eq!(woken, [(BOB, Ready)], "the one that waits {how}");
        assert_eq!(table.pop_of(BOB, "q"), [(BOB, item("item", 1))]);
        assert!(table.promised.is_empty());
    }
}

#[test]
fn an_item_is_passed_on_until_a_client_takes_it() {
    let mut table = table();
    for client in [ALICE, BOB, CAROL] {
        table.waits(client, &["q"]);
    }
    assert_eq!(table.push_of("q", "item"), [(ALICE, Ready)]);
    assert_eq!(table.forgets(ALICE), [(BOB, Ready)]);
    assert_eq!(table.cancels(BOB), (false, vec![(CAROL, Ready)]));
    assert_eq!(table.forgets(CAROL), []);
    assert_eq!(table.wait(ALICE, &["q"]), Ok(vec![(ALICE, Ready)])); // nothing is lost
    assert_eq!(table.pop_of(ALICE, "q"), [(ALICE, item("item", 1))]);
}

#[test]
fn an_item_that_was_taken_is_offered_to_no_other_client() {
    let mut table = table();
    table.waits(ALICE, &["q"]);
    table.waits(BOB, &["q"]);
    table.push_of("q", "item");
    assert_eq!(table.pop_of(CAROL, "q"), [(CAROL, item("item", 1))]);
    assert_eq!(table.forgets(ALICE), []);
    assert_eq!(table.push_of("q", "next"), [(BOB, Ready)]);
}

#[test]
fn a_client_that_fetches_its_item_wakes_no_other_client() {
    let mut table = table();
    table.waits(ALICE, &["q"]);
    table.waits(BOB, &["q"]);
    table.push_of("q", "item");
    assert_eq!(table.pop_of(ALICE, "q"), [(ALICE, item("item", 1))]);
    assert_eq!(table.forgets(ALICE), []);
    assert_eq!(table.waiters_count(), 1);
}

// ── barriers ───────────────────────────────────────────────────────────────────────────────────────

#[test]
fn a_barrier_opens_with_its_last_arrival_and_stays_open() {
    let mut table = table();
    assert_eq!(table.barrier(ALICE, "b", 3), Ok(vec![]));
    assert_eq!(table.barrier(BOB, "b", 3), Ok(vec![]));
    let all = vec![(ALICE, Ready), (BOB, Ready), (CAROL, Ready)];
    assert_eq!(table.barrier(CAROL, "b", 3), Ok(all));
    assert_eq!(table.barrier(ALICE, "b", 3), Ok(vec![(ALICE, Ready)]));
    assert_eq!(table.get("b"), some("4"));
    assert_eq!(table.waiters_count(), 0);
}

#[test]
fn an_arrival_that_timed_out_stays_counted() {
    let mut table = table();
    assert_eq!(table.barrier(ALICE, "b", 2), Ok(vec![]));
    assert_eq!(table.cancels(ALICE), (true, vec![]));
    assert_eq!(table.barrier(BOB, "b", 2), Ok(vec![(BOB, Ready)]));
}

#[test]
fn a_barrier_of_zero_clients_is_open() {
    for world in [1, 0, -1, i64::MIN] {
        let mut table = table();
        assert_eq!(table.barrier(ALICE, "b", world), Ok(vec![(ALICE, Ready)]));
        assert_eq!(table.get("b"), some("1"));
    }
}

#[test]
fn any_other_write_opens_a_barrier_and_a_failed_compare_set_does_not() {
    let mut table = table();
    assert_eq!(table.barrier(ALICE, "b", 9), Ok(vec![]));
    assert_eq!(table.barrier(BOB, "b", 9), Ok(vec![])); // an arrival alone wakes no client
    assert_eq!(table.compare_set_of("b", "7", "9"), (some("2"), vec![]));
    assert_eq!(table.remove("b"), Deleted(true));
    assert_eq!(table.set("b", "x"), [(ALICE, Ready), (BOB, Ready)]);
}

#[test]
fn a_barrier_lists_its_waiting_clients() {
    let mut table = table();
    table.barrier(ALICE, "b", 2).expect("not refused");
    let [waiter] = &table.waiters()[..] else { panic!("one waits") };
    assert_eq!((waiter.operation, &waiter.missing[..]), (Operation::Barrier, &[value("b")][..]));
}

// ── limits and memory ──────────────────────────────────────────────────────────────────────────────

#[test]
fn a_table_with_all_its_keys_refuses_new_ones_and_changes_old_ones() {
    let mut table = limited(|limits| limits.keys = 2);
    table.set("a", "1");
    table.set("b", "2");
    table.waits(ALICE, &["c"]);
    let before = table.picture();
    let key = || bytes("c");
    for write in [
        Request::Set { key: key(), value: bytes("1") },
        Request::Append { key: key(), value: bytes("1") },
        Request::Add { key: key(), delta: 1 },
        Request::CompareSet { key: key(), expected: bytes(""), desired: bytes("1") },
        Request::MultiSet { pairs: vec![(bytes("a"), bytes("changed")), (key(), bytes("1"))] },
        Request::Barrier { key: key(), world: 1 },
        Request::Barrier { key: key(), world: 2 },
    ] {
        let name = write.operation().name();
        assert_eq!(table.ask(BOB, write), full("keys", 2), "{name}");
        assert_eq!(table.picture(), before, "{name}");
    }
    table.set("a", "3");
    assert_eq!(table.multi_set_of(&[("a", "4"), ("b", "5")]), Ok(vec![(ClientId(0), Done)]));
    table.remove("b");
    assert_eq!(table.set("c", "1"), [(ALICE, Ready)]);
}

#[test]
fn a_table_at_its_limit_of_bytes_refuses_to_grow_and_is_left_as_it_was() {
    for room in 0..600 {
        let mut table = limited(|limits| limits.bytes = room);
        let long = "x".repeat(40);
        for (client, request) in [
            (BOB, Request::Set { key: bytes("k"), value: bytes(&long) }),
            (BOB, Request::Set { key: bytes("k"), value: bytes(&long[1..]) }),
            (BOB, Request::Append { key: bytes("k"), value: bytes(&long) }),
            (BOB, Request::Add { key: bytes("n"), delta: 1 }),
            (BOB, Request::CompareSet { key: bytes("c"), expected: bytes(""), desired: bytes(&long) }),
            (ALICE, Request::Barrier { key: bytes("b"), world: 2 }),
            (CAROL, Request::Wait { keys: keys(&["x", "y"]) }),
            (BOB, Request::QueuePush { key: bytes("q"), value: bytes(&long) }),
            (BOB, Request::QueuePush { key: bytes("q"), value: bytes(&long) }),
            (BOB, Request::MultiSet { pairs: vec![(bytes("k"), bytes("")), (bytes("m"), bytes(&long))] }),
            (BOB, Request::Barrier { key: bytes("b"), world: 2 }),
        ] {
            let (before, name) = (table.picture(), request.operation().name());
            match table.ask(client, request) {
                Ok(_) => assert!(table.bytes() <= room, "{name} with room for {room} bytes"),
                refused => {
                    assert_eq!(refused, full("bytes", room), "{name}");
                    assert_eq!(table.picture(), before, "{name} with room for {room} bytes");
                }
            }
        }
    }
}

#[test]
fn queues_share_one_limit_of_items() {
    let mut table = limited(|limits| limits.queue_items = 2);
    table.push_of("q", "1");
    table.push_of("r", "2");
    let before = table.picture();
    for queue in ["q", "new"] {
        let push = Request::QueuePush { key: bytes(queue), value: bytes("3") };
        assert_eq!(table.ask(ALICE, push), full("queue items", 2));
        assert_eq!(table.picture(), before);
    }
    table.pop_of(ALICE, "q");
    assert_eq!(table.push_of("new", "3"), []);
}

#[test]
fn the_byte_count_returns_to_zero() {
    let mut table = table();
    assert_eq!(table.bytes(), 0);
    table.set("a", "value");
    table.set("a", "a longer value");
    table.set("a", "short");
    table.one(Request::Append { key: bytes("a"), value: bytes("er") });
    table.add("n", 99);
    table.add("n", 1);
    table.compare_set_of("a", "shorter", "x");
    table.multi_set_of(&[("m", "1"), ("m", "22"), ("a", "")]).expect("not refused");
    table.push_of("q", "one");
    table.push_of("q", "two");
    table.waits(ALICE, &["w1", "w2", "w1"]);
    table.barrier(BOB, "b", 2).expect("not refused");
    table.waits(CAROL, &["w1", "q2"]);
    table.set("w1", "seen");
    table.push_of("q2", "three");
    let with_everything = table.bytes();
    table.cancels(ALICE);
    assert!(table.bytes() < with_everything);
    table.forgets(BOB);
    table.forgets(CAROL);
    for queue in ["q", "q", "q2"] {
        table.pop_of(ALICE, queue);
    }
    for key in ["a", "n", "m", "b", "w1"] {
        assert_eq!(table.remove(key), Deleted(true));
    }
    assert_eq!((table.bytes(), table.keys(), table.queue_items(), table.waiters_count()), (0, 0, 0, 0));
}

#[test]
fn a_value_counts_until_the_last_reply_that_holds_it_is_sent() {
    let mut table = table();
    let long = "x".repeat(SHARED_VALUE);
    table.set("k", &long);
    let full = table.bytes();
    let reply = table.get("k");
    let other = table.get("k");
    assert_eq!(table.remove("k"), Deleted(true));
    table.sweep();
    assert_eq!(table.bytes(), SHARED_VALUE);
    drop(reply);
    table.sweep();
    assert_eq!(table.bytes(), SHARED_VALUE);
    drop(other);
    table.sweep();
    assert_eq!(table.bytes(), 0);
    // A shorter one may wait in a list of many; one that fits into the table's slot is copied.
    for (length, counted) in [(SHARED_VALUE - 1, SHARED_VALUE - 1), (23, 23), (22, 0)] {
        table.set("k", &long[..length]);
        let reply = table.get("k");
        assert_eq!(table.remove("k"), Deleted(true));
        assert_eq!(table.bytes(), counted);
        drop(reply);
        table.sweep();
        assert_eq!(table.bytes(), 0);
    }
    assert!(full > SHARED_VALUE);
}

/// A value that takes most of the memory there is can still be added to: it is not copied.
#[test]
fn a_long_value_is_appended_to_in_place() {
    let mut table = table();
    let long = "x".repeat(SHARED_VALUE);
    let append = || Request::Append { key: bytes("k"), value: bytes("yz") };
    table.set("k", &long);
    table.ask(ALICE, append()).unwrap(); // the last time that it is copied
    let place = table.value(b"k").unwrap().as_ptr();
    let before = table.bytes();
    table.ask(ALICE, append()).unwrap();
    assert_eq!(table.value(b"k").unwrap().as_ptr(), place);
    assert_eq!(table.bytes(), before + 2);
    // A value that a reply holds does not change.
    let reply = table.get("k");
    table.ask(ALICE, append()).unwrap();
    assert_eq!(table.get("k"), Response::Value(Some(format!("{long}yzyzyz").as_str().into())));
    assert_eq!(reply, Response::Value(Some(format!("{long}yzyz").as_str().into())));
    drop(reply);
    assert_eq!(table.remove("k"), Deleted(true));
    table.sweep();
    assert_eq!(table.bytes(), 0);
}

#[test]
fn a_name_counts_until_the_last_list_that_holds_it_is_dropped() {
    let mut table = table();
    let name = "n".repeat(100);
    table.set(&name, "v");
    let list = table.ask(ALICE, Request::ListKeys).unwrap();
    assert_eq!(table.remove(&name), Deleted(true));
    assert_eq!(table.bytes(), 100);
    drop(list);
    table.sweep();
    assert_eq!(table.bytes(), 0);
}

#[test]
fn values_that_only_replies_hold_are_swept_when_memory_is_needed() {
    let mut table = limited(|limits| limits.bytes = 3 * SHARED_VALUE);
    let long = "x".repeat(SHARED_VALUE);
    let mut replies = Vec::new();
    for _ in 0..2 {
        table.set("k", &long);
        replies.push(table.get("k"));
    }
    assert!(table.bytes() > 2 * SHARED_VALUE);
    let set = || Request::Set { key: bytes("other"), value: bytes(&long) };
    assert_eq!(table.ask(ALICE, set()), full("bytes", 3 * SHARED_VALUE));
    replies.clear();
    assert_eq!(table.ask(ALICE, set()), Ok(vec![(ALICE, Done)]));
}

#[test]
fn a_value_that_a_reply_still_holds_leaves_no_room_for_its_successor() {
    let limit = ENTRY + 1 + SHARED_VALUE + 10;
    let mut table = limited(|limits| limits.bytes = limit);
    let long = "x".repeat(SHARED_VALUE);
    table.set("k", &long);
    let reply = table.get("k");
    let before = table.picture();
    let writes = || {
        [
            Request::Set { key: bytes("k"), value: bytes(&long) },
            Request::Append { key: bytes("k"), value: bytes("1") },
        ]
    };
    for write in writes() {
        assert_eq!(table.ask(ALICE, write), full("bytes", limit));
        assert_eq!(table.picture(), before);
    }
    drop((reply, before));
    for write in writes() {
        assert_eq!(table.ask(ALICE, write), Ok(vec![(ALICE, Done)]));
    }
}

#[test]
fn keys_that_a_host_removes_cost_nothing_and_waiters_still_wait() {
    let mut table = Table::new(TableLimits::default());
    let (now, mut replies) = (Instant::now(), Replies::new());
    let mut apply = |table: &mut Table, client, request| {
        table.apply(ClientId(client), request, now, &mut replies).unwrap();
        std::mem::take(&mut replies).len()
    };
    let set = |key: &'static [u8]| Request::Set { key: key.into(), value: b"1"[..].into() };
    apply(&mut table, 1, set(b"/tenfold/state"));
    let kept = table.bytes();
    apply(&mut table, 1, set(b"/default_pg/0"));
    apply(&mut table, 1, Request::QueuePush { key: b"/queue"[..].into(), value: b"item"[..].into() });
    apply(&mut table, 1, Request::QueuePush { key: b"/queue"[..].into(), value: b"item"[..].into() });
    assert_eq!(forget_all_but(&mut table, b"/tenfold/").0, 2);
    assert_eq!((table.keys(), table.queue_items(), table.bytes()), (1, 0, kept));
    assert_eq!(apply(&mut table, 2, Request::Wait { keys: vec![b"/default_pg/0"[..].into()] }), 0);
    assert_eq!(forget_all_but(&mut table, b"/tenfold/").0, 0);
    assert_eq!(apply(&mut table, 1, set(b"/default_pg/0")), 2, "the setter and the one that waited");
}

/// How many keys and queues were removed, and in how many steps.
fn forget_all_but(table: &mut Table, prefix: &[u8]) -> (usize, usize) {
    let mut forgetting = Forgetting::new(table, prefix.into());
    let steps = 1 + std::iter::repeat_with(|| forgetting.step(table)).take_while(|is_over| !is_over).count();
    (forgetting.count(), steps)
}

#[test]
fn a_host_removes_many_keys_in_steps_while_clients_write() {
    let mut table = Table::new(TableLimits::default());
    let (now, mut replies) = (Instant::now(), Replies::new());
    let mut set = |table: &mut Table, key: String| {
        let request = Request::Set { key: key.into_bytes().into(), value: b"1"[..].into() };
        table.apply(ClientId(1), request, now, &mut replies).unwrap();
        replies.clear();
    };
    set(&mut table, "/tenfold/state".into());
    let kept = table.bytes();
    (0..20_000).for_each(|index| set(&mut table, format!("/key/{index}")));
    let mut forgetting = Forgetting::new(&table, b"/tenfold/"[..].into());
    assert!(!forgetting.step(&mut table));
    // So many that the map grows and moves all keys to other places.
    (0..40_000).for_each(|index| set(&mut table, format!("/later/{index}")));
    while !forgetting.step(&mut table) {}
    assert_eq!((forgetting.count(), table.keys(), table.bytes()), (60_000, 1, kept));
    assert_eq!(forget_all_but(&mut table, b"").0, 0);
}

/// A client that sees where the map has its keys can find keys that are slow to look up.
#[test]
fn a_list_of_keys_does_not_reveal_their_places() {
    let mut table = Table::new(TableLimits::default());
    let now = Instant::now();
    for index in 0..1000 {
        let request = Request::Set { key: format!("/{index}").into_bytes().into(), value: b""[..].into() };
        table.apply(ClientId(1), request, now, &mut Replies::new()).unwrap();
    }
    let mut list = || {
        let mut replies = Replies::new();
        table.apply(ClientId(1), Request::ListKeys, now, &mut replies).unwrap();
        let Some((_, Response::Keys(keys))) = replies.pop() else { panic!("keys were asked for") };
        keys
    };
    let (mut first, mut second) = (list(), list());
    assert_ne!(first, second, "the order is another each time");
    first.sort();
    second.sort();
    assert_eq!((first.len(), first), (1000, second));
}
