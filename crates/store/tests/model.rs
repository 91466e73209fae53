//! Random programs of many clients against the table and against a model of it.
//!
//! The model is written from the protocol's text and as simply as possible: lists that are searched from one
//! end to the other, and for each waiting client the keys it wants and those it has seen. It shares nothing
//! with the table except the types of requests and replies. After each step every reply to every client must
//! be the same, and what the table reports about itself must fit the model.
//!
//! A failure prints the shortest program that proptest finds, one step per line. `PROPTEST_CASES=100000` for
//! a long run.

#![expect(clippy::disallowed_methods, reason = "one instant to count the table's time from")]

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use tenfold_store::{Bytes, ClientId, Operation, Refusal, Replies, Request, Response, Table, TableLimits};

// ── programs ───────────────────────────────────────────────────────────────────────────────────────────────

/// One step of a program. Its debug form is short, because people read it after a failure.
#[derive(Clone, Debug)]
enum Step {
    Add(Key, i64),
    Append(Key, Text),
    Barrier(Key, i64),
    Cancel,
    Check(Vec<Key>),
    CompareSet(Key, Text, Text),
    Delete(Key),
    Forget,
    Get(Key),
    ListKeys,
    MultiGet(Vec<Key>),
    MultiSet(Vec<(Key, Text)>),
    NumKeys,
    Pop(Key),
    Push(Key, Text),
    QueueLen(Key),
    Set(Key, Text),
    Wait(Vec<Key>),
}

type Key = &'static str;
type Text = &'static str;

/// The client that takes the step.
type Turn = (usize, Step);

fn key() -> impl Strategy<Value = Key> {
    select(vec!["a", "b", "c", "q", "r"])
}

fn text() -> impl Strategy<Value = Text> {
    select(vec!["", "1", "-7", " +2x", "junk", "longer than the others", "9223372036854775807"])
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        2 => (key(), prop_oneof![-2_i64..3, Just(i64::MAX)]).prop_map(|(key, delta)| Step::Add(key, delta)),
        1 => (key(), text()).prop_map(|(key, text)| Step::Append(key, text)),
        3 => (key(), -1_i64..5).prop_map(|(key, world)| Step::Barrier(key, world)),
        3 => Just(Step::Cancel),
        1 => vec(key(), 0..4).prop_map(Step::Check),
        2 => (key(), text(), text()).prop_map(|(key, old, new)| Step::CompareSet(key, old, new)),
        4 => key().prop_map(Step::Delete),
        2 => Just(Step::Forget),
        1 => key().prop_map(Step::Get),
        1 => Just(Step::ListKeys),
        1 => vec(key(), 0..4).prop_map(Step::MultiGet),
        1 => vec((key(), text()), 0..4).prop_map(Step::MultiSet),
        1 => Just(Step::NumKeys),
        6 => key().prop_map(Step::Pop),
        4 => (key(), text()).prop_map(|(key, text)| Step::Push(key, text)),
        1 => key().prop_map(Step::QueueLen),
        2 => (key(), text()).prop_map(|(key, text)| Step::Set(key, text)),
        8 => vec(key(), 0..4).prop_map(Step::Wait),
    ]
}

#[derive(Clone)]
struct Program(Vec<Turn>);

impl std::fmt::Debug for Program {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|(client, step)| write!(f, "\n    client {client}: {step:?}"))
    }
}

fn program() -> impl Strategy<Value = Program> {
    (1_usize..=6).prop_flat_map(|clients| vec((0..clients, step()), 0..200)).prop_map(Program)
}

fn bytes(text: &'static str) -> Bytes<'static> {
    text.as_bytes().into()
}

/// The step as a request to the table; nothing for steps that are not requests.
fn request(step: &Step) -> Option<Request<'static>> {
    let all = |keys: &[Key]| keys.iter().map(|key| bytes(key)).collect();
    Some(match step {
        Step::Cancel | Step::Forget => return None,
        Step::Add(key, delta) => Request::Add { key: bytes(key), delta: *delta },
        Step::Append(key, text) => Request::Append { key: bytes(key), value: bytes(text) },
        Step::Barrier(key, world) => Request::Barrier { key: bytes(key), world: *world },
        Step::Check(keys) => Request::Check { keys: all(keys) },
        Step::CompareSet(key, old, new) => {
            Request::CompareSet { key: bytes(key), expected: bytes(old), desired: bytes(new) }
        }
        Step::Delete(key) => Request::Delete { key: bytes(key) },
        Step::Get(key) => Request::Get { key: bytes(key) },
        Step::ListKeys => Request::ListKeys,
        Step::MultiGet(keys) => Request::MultiGet { keys: all(keys) },
        Step::MultiSet(pairs) => {
            Request::MultiSet { pairs: pairs.iter().map(|(key, text)| (bytes(key), bytes(text))).collect() }
        }
        Step::NumKeys => Request::NumKeys,
        Step::Pop(key) => Request::QueuePop { key: bytes(key) },
        Step::Push(key, text) => Request::QueuePush { key: bytes(key), value: bytes(text) },
        Step::QueueLen(key) => Request::QueueLen { key: bytes(key) },
        Step::Set(key, text) => Request::Set { key: bytes(key), value: bytes(text) },
        Step::Wait(keys) => Request::Wait { keys: all(keys) },
    })
}

// ── the model ──────────────────────────────────────────────────────────────────────────────────────────────

/// A client that waits, at a barrier or for keys.
#[derive(Clone, Debug)]
struct Parked {
    client: usize,
    at_barrier: bool,
    wants: BTreeSet<Key>,
    seen: BTreeSet<Key>,
    since: usize,
}

impl Parked {
    fn misses(&self) -> Vec<Key> {
        self.wants.difference(&self.seen).copied().collect()
    }
}

#[derive(Clone, Debug, Default)]
struct Model {
    map: BTreeMap<Key, Vec<u8>>,
    /// All items of all queues, oldest first.
    items: Vec<(Key, Text)>,
    /// Waiting clients, the oldest first.
    parked: Vec<Parked>,
    /// Clients that a push has woken and that have not sent a request since, with the queue.
    invited: Vec<(usize, Key)>,
    time: usize,
    replies: Vec<(usize, Response)>,
}

impl Model {
    fn step(&mut self, client: usize, step: &Step) -> Result<(), Refusal> {
        self.time += 1;
        self.hear_from(client, step);
        let reply = match step {
            Step::Cancel | Step::Forget => {
                self.parked.retain(|parked| parked.client != client);
                return Ok(());
            }
            Step::Add(key, delta) => {
                let sum = self.number(key)?.wrapping_add(*delta);
                self.write(key, sum.to_string());
                Response::Number(sum)
            }
            Step::Append(key, text) => {
                let mut value = self.map.get(key).cloned().unwrap_or_default();
                value.extend_from_slice(text.as_bytes());
                self.write(key, value);
                Response::Done
            }
            Step::Barrier(key, world) => {
                if self.parked.iter().any(|parked| parked.client == client) {
                    return Err(Refusal::AlreadyWaiting);
                }
                let arrived = self.number(key)?.wrapping_add(1);
                if arrived < *world {
                    self.map.insert(key, arrived.to_string().into());
                    self.park(client, BTreeSet::from([*key]), true);
                    return Ok(());
                }
                self.write(key, arrived.to_string());
                Response::Ready
            }
            Step::Check(keys) => Response::Present(keys.iter().all(|key| self.is_there(key))),
            Step::CompareSet(key, old, new) => match self.map.get(key) {
                None if !old.is_empty() => Response::Value(Some(old.as_bytes().into())),
                Some(value) if value != old.as_bytes() => Response::Value(Some(value.as_slice().into())),
                _ => {
                    self.write(key, *new);
                    Response::Value(Some(new.as_bytes().into()))
                }
            },
            Step::Delete(key) => Response::Deleted(self.map.remove(key).is_some()),
            Step::Get(key) => Response::Value(self.map.get(key).map(|value| value.as_slice().into())),
            Step::ListKeys => Response::Keys(self.map.keys().map(|key| key.as_bytes().into()).collect()),
            Step::MultiGet(keys) => {
                let read = |key| self.map.get(key).map(|value| value.as_slice().into());
                Response::Values(keys.iter().map(read).collect())
            }
            Step::MultiSet(pairs) => {
                for (key, text) in pairs {
                    self.map.insert(key, text.as_bytes().into());
                }
                for (key, _) in pairs {
                    self.show_to_all(key);
                }
                Response::Done
            }
            Step::NumKeys => Response::Number(self.map.len() as i64),
            Step::Pop(key) => {
                let length = self.queue_len(key);
                let first = self.items.iter().position(|(queue, _)| queue == key);
                Response::Popped(first.map(|first| (self.items.remove(first).1.as_bytes().into(), length)))
            }
            Step::Push(key, text) => {
                self.items.push((key, text));
                self.show_until_one_comes(key);
                Response::Done
            }
            Step::QueueLen(key) => Response::Number(self.queue_len(key) as i64),
            Step::Set(key, text) => {
                self.write(key, *text);
                Response::Done
            }
            Step::Wait(keys) => {
                let wants: BTreeSet<Key> = keys.iter().copied().filter(|key| !self.is_there(key)).collect();
                if !wants.is_empty() {
                    if self.parked.iter().any(|parked| parked.client == client) {
                        return Err(Refusal::AlreadyWaiting);
                    }
                    self.park(client, wants, false);
                    return Ok(());
                }
                Response::Ready
            }
        };
        self.replies.push((client, reply));
        Ok(())
    }

    /// A client that was offered an item and sends any other request has declined: the item is offered to the
    /// next one.
    fn hear_from(&mut self, client: usize, step: &Step) {
        let Some(index) = self.invited.iter().position(|(invited, _)| *invited == client) else { return };
        let (_, queue) = self.invited.remove(index);
        let accepts = matches!(step, Step::Pop(key) if *key == queue);
        if !accepts && self.queue_len(queue) > 0 {
            self.show_until_one_comes(queue);
        }
    }

    fn is_there(&self, key: Key) -> bool {
        self.map.contains_key(key) || self.queue_len(key) > 0
    }

    fn queue_len(&self, key: Key) -> usize {
        self.items.iter().filter(|(queue, _)| *queue == key).count()
    }

    /// Decimal text with white space and a sign in front and anything behind.
    fn number(&self, key: Key) -> Result<i64, Refusal> {
        let Some(value) = self.map.get(key) else { return Ok(0) };
        let text = str::from_utf8(value).expect("programs write text only").trim_start();
        let digits = text.trim_start_matches(['+', '-']).chars().take_while(char::is_ascii_digit).count();
        let signs = text.chars().take_while(|letter| "+-".contains(*letter)).count();
        let number = text[..signs + digits].parse::<i128>().ok();
        let refusal = || Refusal::NotANumber { key: key.as_bytes().into() };
        number.and_then(|number| i64::try_from(number).ok()).ok_or_else(refusal)
    }

    fn write(&mut self, key: Key, value: impl Into<Vec<u8>>) {
        self.map.insert(key, value.into());
        self.show_to_all(key);
    }

    fn park(&mut self, client: usize, wants: BTreeSet<Key>, at_barrier: bool) {
        let since = self.time;
        self.parked.push(Parked { client, at_barrier, wants, seen: BTreeSet::new(), since });
    }

    /// All waiting clients see that the key exists.
    fn show_to_all(&mut self, key: Key) {
        for parked in &mut self.parked {
            parked.seen.insert(key);
        }
        self.release();
    }

    /// One client after another sees that the queue is not empty, until that ends a client's wait.
    fn show_until_one_comes(&mut self, key: Key) {
        for index in 0..self.parked.len() {
            if !self.parked[index].misses().contains(&key) {
                continue;
            }
            self.parked[index].seen.insert(key);
            if self.parked[index].misses().is_empty() {
                self.invited.push((self.parked[index].client, key));
                break;
            }
        }
        self.release();
    }

    /// Answers the clients that have seen all their keys.
    fn release(&mut self) {
        for parked in self.parked.clone() {
            if parked.misses().is_empty() {
                self.replies.push((parked.client, Response::Ready));
                self.parked.retain(|other| other.client != parked.client);
            }
        }
    }

    fn is_empty(&self) -> bool {
        self.map.is_empty() && self.items.is_empty() && self.parked.is_empty() && self.invited.is_empty()
    }
}

// ── both side by side ──────────────────────────────────────────────────────────────────────────────────────

struct Pair {
    table: Table,
    model: Model,
    limits: TableLimits,
    start: Instant,
}

impl Pair {
    fn new(limits: TableLimits) -> Self {
        Pair { table: Table::new(limits), model: Model::default(), limits, start: Instant::now() }
    }

    /// Takes one step with both; true if it was refused because a limit was reached.
    fn step(&mut self, client: usize, step: &Step) -> bool {
        let mut replies = Replies::new();
        let (id, now) = (ClientId(client), self.start + Duration::from_secs(self.model.time as u64 + 1));
        let result = match request(step) {
            Some(request) => self.table.apply(id, request, now, &mut replies),
            None => {
                let waited = self.model.parked.iter().any(|parked| parked.client == client);
                match step {
                    Step::Cancel => assert_eq!(self.table.cancel(id, &mut replies), waited),
                    _ => self.table.forget(id, &mut replies),
                }
                Ok(())
            }
        };
        let refused = matches!(result, Err(Refusal::Full { .. }));
        if refused {
            // A client that declined an item is handled before it is refused; nothing else may have changed.
            self.model.time += 1;
            self.model.hear_from(client, step);
        } else {
            assert_eq!(result, self.model.step(client, step));
        }
        let expected = by_client(std::mem::take(&mut self.model.replies));
        let replies =
            by_client(replies.into_iter().map(|(ClientId(client), reply)| (client, reply)).collect());
        assert_eq!(replies, expected, "replies of the table and of the model");
        self.compare();
        refused
    }

    /// What the table reports about itself.
    fn compare(&mut self) {
        let Pair { table, model, limits, .. } = self;
        assert_eq!(table.keys(), model.map.len());
        assert_eq!(table.queue_items(), model.items.len());
        assert_eq!(table.bytes() == 0, model.is_empty());
        let plain: usize = model.map.iter().map(|(key, value)| key.len() + value.len()).sum();
        assert!(table.bytes() >= plain);
        assert!(table.bytes() <= limits.bytes);
        assert!(table.keys() <= limits.keys && table.queue_items() <= limits.queue_items);

        let waiters: Vec<_> = table
            .waiters()
            .into_iter()
            .map(|waiter| {
                assert_eq!(waiter.missing.len(), waiter.missing_count);
                let since = (waiter.since - self.start).as_secs() as usize;
                let missing: Vec<_> = waiter.missing.iter().map(|key| key.to_vec()).collect();
                (waiter.client.0, waiter.operation == Operation::Barrier, missing, since)
            })
            .collect();
        let parked: Vec<_> = model
            .parked
            .iter()
            .map(|parked| {
                let missing: Vec<_> =
                    parked.misses().into_iter().map(|key| key.as_bytes().to_vec()).collect();
                (parked.client, parked.at_barrier, missing, parked.since)
            })
            .collect();
        assert_eq!(waiters, parked);
        assert_eq!(table.waiters_count(), model.parked.len());
    }

    /// Reads every key and queue.
    fn compare_contents(&mut self) {
        let passer_by = 99;
        for key in ["a", "b", "c", "q", "r"] {
            self.step(passer_by, &Step::Get(key));
            self.step(passer_by, &Step::QueueLen(key));
        }
        self.step(passer_by, &Step::ListKeys);
    }

    /// All clients leave and everything is deleted.
    fn tidy_up(&mut self) {
        for client in 0..6 {
            self.step(client, &Step::Forget);
        }
        for key in ["a", "b", "c", "q", "r"] {
            self.step(0, &Step::Delete(key));
            while self.model.queue_len(key) > 0 {
                self.step(0, &Step::Pop(key));
            }
        }
        assert!(self.model.is_empty());
        assert_eq!(self.table.bytes(), 0);
    }
}

/// The order among clients does not matter; the order of one client's replies does.
fn by_client(replies: Vec<(usize, Response)>) -> BTreeMap<usize, Vec<Response>> {
    let mut sorted = BTreeMap::<_, Vec<_>>::new();
    for (client, mut reply) in replies {
        if let Response::Keys(keys) = &mut reply {
            keys.sort();
        }
        sorted.entry(client).or_default().push(reply);
    }
    sorted
}

fn cases() -> ProptestConfig {
    // A failing program becomes a test of its own, not an entry in a file of seeds.
    ProptestConfig {
        failure_persistence: None,
        max_shrink_iters: 20_000,
        ..ProptestConfig::with_cases(1_000)
    }
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn a_table_does_what_the_protocol_says(program in program()) {
        let mut pair = Pair::new(TableLimits::default());
        for (client, step) in &program.0 {
            assert!(!pair.step(*client, step));
        }
        pair.compare_contents();
        pair.tidy_up();
    }

    #[test]
    fn a_table_that_is_full_refuses_and_stays_as_it_was(
        program in program(),
        keys in 0_usize..5,
        room in 0_usize..1_500,
        queue_items in 0_usize..5,
    ) {
        let mut limits = TableLimits::default();
        (limits.keys, limits.bytes, limits.queue_items) = (keys, room, queue_items);
        let mut pair = Pair::new(limits);
        for (client, step) in &program.0 {
            let before = pair.table.bytes();
            let invited = pair.model.invited.clone();
            if pair.step(*client, step) && pair.model.invited == invited {
                assert_eq!(pair.table.bytes(), before);
                pair.compare_contents();
            }
        }
        pair.tidy_up();
    }
}
