//! Checks whether some sequential order of all operations explains the answers that all clients got.
//!
//! The search of Wing and Gong with the memory of Lowe ("Testing for linearizability", 2017): take any
//! operation that no other one preceded, apply it to the object, and continue. Backtrack when an answer does
//! not fit. Never visit the same set of done operations with the same state of the object twice.
//!
//! Stricter than linearizability in one point: the operations of one connection happen in the order they were
//! sent, even if they were in flight together. So the set of done operations is one number per connection.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};

use tenfold_store::{Request, Response};

/// An operation that never returned: it may have happened at any time since, or not at all.
pub(crate) const NEVER: u64 = u64::MAX;

/// One operation: what was asked, when, what the answer was, when.
#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub(crate) request: Request<'static>,
    pub(crate) response: Option<Response>,
    /// Nanoseconds since the run began.
    pub(crate) invoked: u64,
    pub(crate) returned: u64,
}

/// What one key (or a few that are used together, or a queue) should do. Answers as on the wire: a missing key is an
/// empty value.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Object {
    values: BTreeMap<Vec<u8>, Vec<u8>>,
    queue: VecDeque<Vec<u8>>,
}

impl Object {
    fn apply(&mut self, request: &Request<'_>) -> Response {
        let read = |object: &Self, key: &[u8]| object.values.get(key).cloned().unwrap_or_default();
        match request {
            Request::Append { key, value } => {
                self.values.entry(key.to_vec()).or_default().extend_from_slice(value);
                Response::Done
            }
            Request::Add { key, delta } => {
                let text = String::from_utf8(read(self, key)).expect("counters are text");
                let sum = if text.is_empty() { 0 } else { text.parse::<i64>().expect("a number") } + delta;
                self.values.insert(key.to_vec(), sum.to_string().into());
                Response::Number(sum)
            }
            Request::Check { keys } => {
                let there = |key| self.values.contains_key(key) || !self.queue.is_empty();
                Response::Present(keys.iter().all(|key| there(&key[..])))
            }
            Request::CompareSet { key, expected, desired } => {
                let value = match self.values.get(&key[..]) {
                    Some(value) if value[..] != expected[..] => value,
                    None if !expected.is_empty() => &expected.to_vec(),
                    _ => {
                        self.values.insert(key.to_vec(), desired.to_vec());
                        &desired.to_vec()
                    }
                };
                Response::Value(Some(value.as_slice().into()))
            }
            Request::Delete { key } => Response::Deleted(self.values.remove(&key[..]).is_some()),
            Request::Get { key } => Response::Value(Some(read(self, key).into())),
            Request::MultiGet { keys } => {
                Response::Values(keys.iter().map(|key| Some(read(self, key).into())).collect())
            }
            Request::MultiSet { pairs } => {
                self.values.extend(pairs.iter().map(|(key, value)| (key.to_vec(), value.to_vec())));
                Response::Done
            }
            Request::QueueLen { .. } => Response::Number(self.queue.len() as i64),
            Request::QueuePop { .. } => {
                let length = self.queue.len();
                Response::Popped(self.queue.pop_front().map(|item| (item.into(), length)))
            }
            Request::QueuePush { value, .. } => {
                self.queue.push_back(value.to_vec());
                Response::Done
            }
            Request::Set { key, value } => {
                self.values.insert(key.to_vec(), value.to_vec());
                Response::Done
            }
            other => unreachable!("histories have no {other:?}"),
        }
    }
}

/// How far the best order got.
#[derive(Debug)]
pub(crate) struct Violation {
    done: usize,
    of: usize,
    object: Object,
    /// The next operation of each connection, none of which fits.
    next: Vec<(usize, Call)>,
    gave_up: bool,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.gave_up {
            writeln!(f, "  gave up after {MEMORY} states: no order was found, nor that there is none")?;
        }
        writeln!(f, "  after {} of {} operations it holds", self.done, self.of)?;
        for (key, value) in &self.object.values {
            writeln!(f, "    `{}` = `{}`", key.escape_ascii(), value.escape_ascii())?;
        }
        let queue: Vec<_> = self.object.queue.iter().map(|item| item.escape_ascii().to_string()).collect();
        writeln!(f, "    queue {queue:?}\n  and none of these can be next:")?;
        for (session, call) in &self.next {
            let (request, response) = (show(&format!("{:?}", call.request)), &call.response);
            let response = response.as_ref().map_or("never answered".into(), |r| show(&format!("{r:?}")));
            let returned = if call.returned == NEVER { "…".into() } else { call.returned.to_string() };
            writeln!(
                f,
                "    connection {session}, {}..{returned} ns: {request} -> {response}",
                call.invoked
            )?;
        }
        Ok(())
    }
}

/// Lists of byte numbers as text.
fn show(debug: &str) -> String {
    let mut shown = String::new();
    for part in debug.split_inclusive(']') {
        let (front, list) = part.rsplit_once('[').unwrap_or((part, ""));
        let numbers: Result<Vec<u8>, _> = list.trim_end_matches(']').split(", ").map(str::parse).collect();
        match numbers {
            Ok(bytes) => shown.push_str(&format!("{front}`{}`", bytes.escape_ascii())),
            Err(_) => shown.push_str(part),
        }
    }
    shown
}

/// States kept before giving up, a hundred megabytes of them. Histories of these tests need a few for each operation.
const MEMORY: usize = 4_000_000;

/// A visited state as 128 bits: a collision of two different states is practically impossible.
fn fingerprint(done: &[usize], object: &Object) -> (u64, u64) {
    let hash = |salt: u8| {
        let mut hasher = DefaultHasher::new();
        (salt, done, object).hash(&mut hasher);
        hasher.finish()
    };
    (hash(1), hash(2))
}

/// One operation of an order, and the state before it.
struct Step {
    session: usize,
    before: Object,
    untried: Vec<usize>,
}

/// Looks for an order of these connections' operations. The operations of each are in the order they were sent.
pub(crate) fn check(sessions: &[Vec<Call>]) -> Result<(), Violation> {
    // Reads without an answer carry no information.
    let matters = |call: &&Call| call.returned != NEVER || !is_read(&call.request);
    let sessions: Vec<Vec<Call>> =
        sessions.iter().map(|session| session.iter().filter(matters).cloned().collect()).collect();
    let sessions = &sessions[..];
    let of = sessions.iter().map(Vec::len).sum();
    let mut done = vec![0_usize; sessions.len()];
    let mut object = Object::default();
    let mut known = HashSet::new();
    let mut order: Vec<Step> = Vec::new();
    let mut best = (0, done.clone(), object.clone());
    loop {
        if answered(sessions, &done) {
            return Ok(());
        }
        if order.len() >= best.0 {
            best = (order.len(), done.clone(), object.clone());
        }
        let is_new = known.insert(fingerprint(&done, &object));
        let mut untried = if is_new { candidates(sessions, &done) } else { Vec::new() };
        // Forward with the first operation that fits, or back to the last choice.
        loop {
            if let Some(session) = untried.pop() {
                let call = &sessions[session][done[session]];
                let mut after = object.clone();
                let answer = after.apply(&call.request);
                if call.response.as_ref().is_none_or(|response| *response == answer) {
                    done[session] += 1;
                    order.push(Step { session, before: std::mem::replace(&mut object, after), untried });
                    break;
                }
            } else if let Some(step) = order.pop()
                && known.len() < MEMORY
            {
                done[step.session] -= 1;
                (object, untried) = (step.before, step.untried);
            } else {
                let (count, done, object) = best;
                let next = candidates(sessions, &done).into_iter().rev();
                let next = next.map(|session| (session, sessions[session][done[session]].clone())).collect();
                return Err(Violation { done: count, of, object, next, gave_up: known.len() >= MEMORY });
            }
        }
    }
}

fn is_read(request: &Request<'_>) -> bool {
    use Request::{Check, Get, MultiGet, QueueLen};
    matches!(request, Check { .. } | Get { .. } | MultiGet { .. } | QueueLen { .. })
}

/// Are all operations done that were answered?
fn answered(sessions: &[Vec<Call>], done: &[usize]) -> bool {
    let mut next = sessions.iter().zip(done).filter_map(|(session, &done)| session.get(done));
    next.all(|call| call.returned == NEVER)
}

/// Connections whose next operation may be the next of all: no pending operation returned before it began.
/// The one that returned first comes last, to be tried first.
fn candidates(sessions: &[Vec<Call>], done: &[usize]) -> Vec<usize> {
    let next = || {
        let sessions = sessions.iter().zip(done).enumerate();
        sessions.filter_map(|(index, (session, &done))| Some((index, session.get(done)?)))
    };
    let first_return = next().map(|(_, call)| call.returned).min().unwrap_or(NEVER);
    let mut candidates: Vec<_> = next().filter(|(_, call)| call.invoked <= first_return).collect();
    candidates.sort_by_key(|(_, call)| std::cmp::Reverse(call.returned));
    candidates.into_iter().map(|(index, _)| index).collect()
}

mod tests {
    use super::*;
    use tenfold_store::Bytes;

    fn bytes(text: &'static str) -> Bytes<'static> {
        text.as_bytes().into()
    }

    fn call(invoked: u64, returned: u64, request: Request<'static>, response: Response) -> Call {
        Call { request, response: Some(response), invoked, returned }
    }

    fn pending(invoked: u64, request: Request<'static>) -> Call {
        Call { request, response: None, invoked, returned: NEVER }
    }

    fn set(value: &'static str) -> Request<'static> {
        Request::Set { key: bytes("k"), value: bytes(value) }
    }

    fn add(delta: i64) -> Request<'static> {
        Request::Add { key: bytes("k"), delta }
    }

    fn push(value: &'static str) -> Request<'static> {
        Request::QueuePush { key: bytes("k"), value: bytes(value) }
    }

    fn write(from: u64, to: u64, value: &'static str) -> Call {
        call(from, to, set(value), Response::Done)
    }

    fn read(from: u64, to: u64, value: &'static str) -> Call {
        let value = Response::Value(Some(value.as_bytes().into()));
        call(from, to, Request::Get { key: bytes("k") }, value)
    }

    fn popped(from: u64, to: u64, item: Option<(&'static str, usize)>) -> Call {
        let item = item.map(|(item, length)| (item.as_bytes().into(), length));
        call(from, to, Request::QueuePop { key: bytes("k") }, Response::Popped(item))
    }

    fn fits(sessions: &[Vec<Call>]) -> bool {
        check(sessions).is_ok()
    }

    #[test]
    fn one_after_another_fits_and_an_empty_history_too() {
        assert!(fits(&[]));
        assert!(fits(&[vec![read(0, 1, ""), write(2, 3, "a"), read(4, 5, "a")]]));
    }

    #[test]
    fn operations_at_the_same_time_may_be_in_any_order_and_others_not() {
        for (value, at_the_same_time) in [("a", true), ("b", true), ("", false), ("c", false)] {
            let sessions = [vec![write(0, 10, "a")], vec![write(0, 10, "b")], vec![read(11, 12, value)]];
            assert_eq!(fits(&sessions), at_the_same_time, "{value}");
        }
        let one_after_another = [vec![write(0, 1, "a")], vec![write(2, 3, "b")], vec![read(4, 5, "a")]];
        assert!(!fits(&one_after_another));
    }

    #[test]
    fn a_stale_read_is_found() {
        assert!(!fits(&[vec![write(0, 1, "a"), write(2, 3, "b")], vec![read(4, 5, "a")]]));
        assert!(fits(&[vec![write(0, 1, "a"), write(2, 6, "b")], vec![read(4, 5, "a")]]));
        // New, then old again, while the write is in progress.
        let writes = || vec![write(0, 1, "a"), write(2, 20, "b")];
        assert!(!fits(&[writes(), vec![read(4, 5, "b")], vec![read(6, 7, "a")]]));
        assert!(fits(&[writes(), vec![read(4, 5, "a")], vec![read(6, 7, "b")]]));
    }

    #[test]
    fn a_lost_or_doubled_add_is_found() {
        let add = |sum| call(0, 10, add(1), Response::Number(sum));
        assert!(fits(&[vec![add(3)], vec![add(1)], vec![add(2)]]));
        assert!(!fits(&[vec![add(1)], vec![add(1)], vec![add(2)]]));
        assert!(!fits(&[vec![add(1)], vec![add(3)]]));
    }

    #[test]
    fn a_doubled_or_lost_pop_and_a_queue_out_of_order_are_found() {
        let pushes = || vec![call(0, 1, push("a"), Response::Done), call(2, 3, push("b"), Response::Done)];
        let (first, second) = (Some(("a", 2)), Some(("b", 1)));
        assert!(fits(&[pushes(), vec![popped(4, 9, second)], vec![popped(4, 9, first)]]));
        assert!(!fits(&[pushes(), vec![popped(4, 9, first)], vec![popped(4, 9, Some(("a", 1)))]]));
        assert!(!fits(&[pushes(), vec![popped(4, 5, None)]]));
        assert!(!fits(&[pushes(), vec![popped(4, 5, Some(("b", 2)))]]));
        assert!(!fits(&[pushes(), vec![popped(4, 5, first), popped(6, 7, second), popped(8, 9, second)]]));
    }

    #[test]
    fn a_half_done_write_of_two_keys_is_found() {
        let (both, keys) = (|value| vec![("a", value), ("b", value)], || vec![bytes("a"), bytes("b")]);
        let write = |from, to, value| {
            let pairs = both(value).into_iter().map(|(key, value)| (bytes(key), bytes(value))).collect();
            call(from, to, Request::MultiSet { pairs }, Response::Done)
        };
        let read = |a: &'static str, b: &'static str| {
            let values = [a, b].map(|value| Some(value.as_bytes().into())).to_vec();
            call(0, 10, Request::MultiGet { keys: keys() }, Response::Values(values))
        };
        for (a, b, fit) in
            [("", "", true), ("1", "1", true), ("2", "2", true), ("1", "2", false), ("", "1", false)]
        {
            assert_eq!(fits(&[vec![write(0, 10, "1")], vec![write(0, 10, "2")], vec![read(a, b)]]), fit);
        }
    }

    #[test]
    fn a_compare_set_that_two_clients_won_is_found() {
        let swap = |desired: &'static str, answer: &'static str| {
            let request =
                Request::CompareSet { key: bytes("k"), expected: bytes(""), desired: bytes(desired) };
            call(0, 10, request, Response::Value(Some(answer.as_bytes().into())))
        };
        assert!(fits(&[vec![swap("a", "a")], vec![swap("b", "a")]]));
        assert!(!fits(&[vec![swap("a", "a")], vec![swap("b", "b")]]));
    }

    #[test]
    fn an_unanswered_operation_may_happen_late_or_never_but_not_twice() {
        let lost = || vec![pending(0, set("a"))];
        assert!(fits(&[lost(), vec![read(1, 2, ""), read(3, 4, "")]]));
        assert!(fits(&[lost(), vec![read(1, 2, ""), read(3, 4, "a")]]));
        assert!(!fits(&[lost(), vec![read(1, 2, "a"), read(3, 4, "")]]));
        let overwritten = vec![read(1, 2, "a"), write(3, 4, "b"), read(5, 6, "a")];
        assert!(!fits(&[lost(), overwritten]));
        assert!(!fits(&[vec![pending(5, set("a"))], vec![read(1, 2, "a")]]));
    }

    #[test]
    fn one_connections_operations_happen_in_their_order() {
        let sent_together = vec![write(0, 10, "a"), write(0, 10, "b")];
        assert!(fits(&[sent_together.clone(), vec![read(11, 12, "b")]]));
        assert!(!fits(&[sent_together, vec![read(11, 12, "a")]]));
        let lost = vec![pending(0, set("10")), pending(0, add(1))];
        assert!(!fits(&[lost, vec![call(1, 2, add(1), Response::Number(2))]]), "the add without the set");
    }

    #[test]
    fn a_violation_says_where_the_best_order_ends() {
        let sessions = [vec![write(0, 1, "a"), write(2, 3, "b")], vec![read(4, 5, "a")]];
        let text = check(&sessions).expect_err("a stale read").to_string();
        assert_eq!(
            text,
            "  after 2 of 3 operations it holds\n    `k` = `b`\n    queue []\n  and none of these can be next:\n    \
             connection 1, 4..5 ns: Get { key: `k` } -> Value(Some(b\"a\"))\n"
        );
    }
}
