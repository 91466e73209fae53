//! Every store operation as a value.
//!
//! A `Request` is what a client asks of a store, a `Response` what the store answers. Because an operation is
//! a value, a prefix is one function over it ([`Request::with_prefix`]), a wire format is two (`wire`), and a
//! user's own store is one `match`.
//!
//! Only `Wait` and `Barrier` may take time; all others answer from the present state. What c10d calls `get`
//! is therefore two requests, `Wait` then `Get`, exactly as on the wire. `ops` combines them.

use std::borrow::Cow;
use std::fmt::Write as _;

use crate::value::Value;

/// A key or value of a request: borrowed from a socket's buffer or the caller wherever possible.
pub type Bytes<'a> = Cow<'a, [u8]>;

/// One operation on a store.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
#[expect(missing_docs, reason = "each variant says what its fields are")]
pub enum Request<'a> {
    /// Adds to the end of a value, creating it if needed.
    Append { key: Bytes<'a>, value: Bytes<'a> },
    /// Adds `delta` to a counter kept as decimal text; a missing key counts as 0.
    Add { key: Bytes<'a>, delta: i64 },
    /// Arrives at a barrier and waits until `world` clients have arrived.
    Barrier { key: Bytes<'a>, world: i64 },
    /// Whether all keys exist.
    Check { keys: Vec<Bytes<'a>> },
    /// Writes `desired` if the value is `expected`, or if the key is missing and `expected` is empty.
    CompareSet { key: Bytes<'a>, expected: Bytes<'a>, desired: Bytes<'a> },
    /// Removes a key.
    Delete { key: Bytes<'a> },
    /// Reads a key without waiting for it.
    Get { key: Bytes<'a> },
    /// Lists all keys, in no particular order.
    ListKeys,
    /// Reads several keys without waiting for them.
    MultiGet { keys: Vec<Bytes<'a>> },
    /// Writes several keys in one step: all of them or none.
    MultiSet { pairs: Vec<(Bytes<'a>, Bytes<'a>)> },
    /// Counts the keys.
    NumKeys,
    /// Length of a queue; a queue that was never pushed to is empty.
    QueueLen { key: Bytes<'a> },
    /// Takes the oldest item of a queue, without waiting for one.
    QueuePop { key: Bytes<'a> },
    /// Puts an item at the end of a queue.
    QueuePush { key: Bytes<'a>, value: Bytes<'a> },
    /// Writes a key.
    Set { key: Bytes<'a>, value: Bytes<'a> },
    /// Waits until every key has existed, as a key or as a queue that is not empty.
    Wait { keys: Vec<Bytes<'a>> },
}

/// What a store answers.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Response {
    /// Done, without a result: `Append`, `MultiSet`, `QueuePush`, `Set`.
    Done,
    /// `Delete`: whether the key existed.
    Deleted(bool),
    /// `ListKeys`.
    Keys(Vec<Value>),
    /// `Add`, `NumKeys`, `QueueLen`.
    Number(i64),
    /// `QueuePop`: the item and how many there were before it was taken.
    Popped(Option<(Value, usize)>),
    /// `Check`: whether all keys exist.
    Present(bool),
    /// `Wait`, `Barrier`: the wait has ended.
    Ready,
    /// `CompareSet`, `Get`; nothing if the store knows that the key does not exist.
    Value(Option<Value>),
    /// `MultiGet`, in the order asked.
    Values(Vec<Option<Value>>),
}

/// The kind of a request, for counters and messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operation {
    /// [`Request::Append`].
    Append,
    /// [`Request::Add`].
    Add,
    /// [`Request::Barrier`].
    Barrier,
    /// [`Request::Check`].
    Check,
    /// [`Request::CompareSet`].
    CompareSet,
    /// [`Request::Delete`].
    Delete,
    /// [`Request::Get`].
    Get,
    /// [`Request::ListKeys`].
    ListKeys,
    /// [`Request::MultiGet`].
    MultiGet,
    /// [`Request::MultiSet`].
    MultiSet,
    /// [`Request::NumKeys`].
    NumKeys,
    /// [`Request::QueueLen`].
    QueueLen,
    /// [`Request::QueuePop`].
    QueuePop,
    /// [`Request::QueuePush`].
    QueuePush,
    /// [`Request::Set`].
    Set,
    /// [`Request::Wait`].
    Wait,
}

impl Operation {
    /// Every operation, in the order of their discriminants.
    pub const ALL: [Operation; 16] = [
        Operation::Append,
        Operation::Add,
        Operation::Barrier,
        Operation::Check,
        Operation::CompareSet,
        Operation::Delete,
        Operation::Get,
        Operation::ListKeys,
        Operation::MultiGet,
        Operation::MultiSet,
        Operation::NumKeys,
        Operation::QueueLen,
        Operation::QueuePop,
        Operation::QueuePush,
        Operation::Set,
        Operation::Wait,
    ];

    /// Its name in c10d's interface.
    pub fn name(self) -> &'static str {
        match self {
            Operation::Append => "append",
            Operation::Add => "add",
            Operation::Barrier => "barrier",
            Operation::Check => "check",
            Operation::CompareSet => "compare_set",
            Operation::Delete => "delete_key",
            Operation::Get => "get",
            Operation::ListKeys => "list_keys",
            Operation::MultiGet => "multi_get",
            Operation::MultiSet => "multi_set",
            Operation::NumKeys => "num_keys",
            Operation::QueueLen => "queue_len",
            Operation::QueuePop => "queue_pop",
            Operation::QueuePush => "queue_push",
            Operation::Set => "set",
            Operation::Wait => "wait",
        }
    }
}

impl<'a> Request<'a> {
    /// What kind of request this is.
    pub fn operation(&self) -> Operation {
        match self {
            Request::Append { .. } => Operation::Append,
            Request::Add { .. } => Operation::Add,
            Request::Barrier { .. } => Operation::Barrier,
            Request::Check { .. } => Operation::Check,
            Request::CompareSet { .. } => Operation::CompareSet,
            Request::Delete { .. } => Operation::Delete,
            Request::Get { .. } => Operation::Get,
            Request::ListKeys => Operation::ListKeys,
            Request::MultiGet { .. } => Operation::MultiGet,
            Request::MultiSet { .. } => Operation::MultiSet,
            Request::NumKeys => Operation::NumKeys,
            Request::QueueLen { .. } => Operation::QueueLen,
            Request::QueuePop { .. } => Operation::QueuePop,
            Request::QueuePush { .. } => Operation::QueuePush,
            Request::Set { .. } => Operation::Set,
            Request::Wait { .. } => Operation::Wait,
        }
    }

    /// The same request on keys that begin with `prefix`. A prefix store consists of nothing else.
    #[must_use]
    pub fn with_prefix(mut self, prefix: &[u8]) -> Self {
        self.for_each_key(|key| {
            let mut longer = Vec::with_capacity(prefix.len() + key.len());
            longer.extend_from_slice(prefix);
            longer.extend_from_slice(key);
            *key = Cow::Owned(longer);
        });
        self
    }

    /// The keys it names, for messages and tests.
    pub fn keys(&self) -> Vec<&[u8]> {
        match self {
            Request::Append { key, .. }
            | Request::Add { key, .. }
            | Request::Barrier { key, .. }
            | Request::CompareSet { key, .. }
            | Request::Delete { key }
            | Request::Get { key }
            | Request::QueueLen { key }
            | Request::QueuePop { key }
            | Request::QueuePush { key, .. }
            | Request::Set { key, .. } => vec![key],
            Request::Check { keys } | Request::MultiGet { keys } | Request::Wait { keys } => {
                keys.iter().map(AsRef::as_ref).collect()
            }
            Request::MultiSet { pairs } => pairs.iter().map(|(key, _)| key.as_ref()).collect(),
            Request::ListKeys | Request::NumKeys => Vec::new(),
        }
    }

    /// The first key it names, and how many it names.
    pub(crate) fn first_key(&self) -> (Option<&[u8]>, usize) {
        match self {
            Request::Check { keys } | Request::MultiGet { keys } | Request::Wait { keys } => {
                (keys.first().map(AsRef::as_ref), keys.len())
            }
            Request::MultiSet { pairs } => (pairs.first().map(|(key, _)| key.as_ref()), pairs.len()),
            Request::ListKeys | Request::NumKeys => (None, 0),
            one => (one.keys().first().copied(), 1),
        }
    }

    fn for_each_key(&mut self, mut change: impl FnMut(&mut Bytes<'a>)) {
        match self {
            Request::Append { key, .. }
            | Request::Add { key, .. }
            | Request::Barrier { key, .. }
            | Request::CompareSet { key, .. }
            | Request::Delete { key }
            | Request::Get { key }
            | Request::QueueLen { key }
            | Request::QueuePop { key }
            | Request::QueuePush { key, .. }
            | Request::Set { key, .. } => change(key),
            Request::Check { keys } | Request::MultiGet { keys } | Request::Wait { keys } => {
                keys.iter_mut().for_each(change);
            }
            Request::MultiSet { pairs } => pairs.iter_mut().for_each(|(key, _)| change(key)),
            Request::ListKeys | Request::NumKeys => {}
        }
    }
}

/// Keys in readable form: the first few in backticks, unprintable bytes escaped, long ones cut.
pub fn show_keys<K: AsRef<[u8]>>(keys: &[K]) -> String {
    const SHOWN: usize = 4; // what fits on a line
    const LENGTH: usize = 80;
    let mut text = String::new();
    for key in keys.iter().take(SHOWN) {
        let key = key.as_ref();
        let separator = if text.is_empty() { "" } else { ", " };
        let cut = key[..key.len().min(LENGTH)].escape_ascii();
        let more = if key.len() > LENGTH { "…" } else { "" };
        // UTF-8 is shown as it is; anything else byte by byte.
        match str::from_utf8(key) {
            Ok(whole) if key.len() <= LENGTH && !whole.chars().any(char::is_control) => {
                let _ = write!(text, "{separator}`{whole}`");
            }
            _ => {
                let _ = write!(text, "{separator}`{cut}{more}`");
            }
        }
    }
    if keys.len() > SHOWN {
        let _ = write!(text, " and {} more", keys.len() - SHOWN);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_are_listed_in_the_order_of_their_discriminants() {
        for (index, operation) in Operation::ALL.into_iter().enumerate() {
            assert_eq!(operation as usize, index);
        }
    }

    #[test]
    fn a_prefix_reaches_every_key_and_nothing_else() {
        let pairs = vec![
            (Bytes::from(b"a".as_slice()), Bytes::from(b"1".as_slice())),
            ((b"b").into(), (b"2").into()),
        ];
        let request = Request::MultiSet { pairs }.with_prefix(b"p/");
        assert_eq!(request.keys(), [b"p/a", b"p/b"]);
        let Request::MultiSet { pairs } = request else { unreachable!("the kind stays") };
        assert_eq!(pairs[1].1.as_ref(), b"2");
        assert_eq!(Request::NumKeys.with_prefix(b"p/"), Request::NumKeys);
    }

    #[test]
    fn keys_are_shown_so_that_a_person_can_read_them() {
        assert_eq!(show_keys(&["rank0/addr"]), "`rank0/addr`");
        assert_eq!(show_keys(&["Zürich"]), "`Zürich`");
        assert_eq!(show_keys(&[b"\x00\xff".as_slice()]), r"`\x00\xff`");
        assert_eq!(show_keys(&["a", "b", "c", "d", "e", "f"]), "`a`, `b`, `c`, `d` and 2 more");
        assert!(show_keys(&["x".repeat(9_000)]).len() < 100);
    }
}
