//! c10d's operations on top of one call.
//!
//! [`Store`] is what a store implements: a single method that serves a [`Request`]. [`StoreExt`] is what
//! users call: every operation of c10d, for any store. A [`Fault`] becomes an [`Error`] here, because the
//! operation, the keys, the store and the time waited are known here.
//!
//! A store that does not support a request answers [`Fault::unsupported`]. If c10d has a fallback (append by
//! compare_set, waiting by polling, a barrier by counting), the fallback is used.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use crate::error::{Error, Result, Scene};
use crate::request::{Bytes, Request, Response, show_keys};
use crate::value::Value;
use tenfold_base::{Deadline, ErrorKind, Fault};

/// The default limit of an operation; c10d's own.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(300);

/// Something that keeps values under keys for all ranks of a job.
///
/// One method makes a store. Here is one that lives in a map and cannot wait by itself; the waiting is done for it:
///
/// ```
/// use std::{collections::HashMap, sync::Mutex};
/// use tenfold_store::{Deadline, Fault, Request, Response, Store, StoreExt};
///
/// #[derive(Default)]
/// struct Mine(Mutex<HashMap<Vec<u8>, Vec<u8>>>);
///
/// impl Store for Mine {
///     fn call(&self, request: Request<'_>, _: Deadline) -> Result<Response, Fault> {
///         let mut map = self.0.lock().unwrap();
///         Ok(match request {
///             Request::Set { key, value } => {
///                 map.insert(key.into_owned(), value.into_owned());
///                 Response::Done
///             }
///             Request::Get { key } => Response::Value(map.get(&*key).map(|value| value.as_slice().into())),
///             Request::Check { keys } => Response::Present(keys.iter().all(|key| map.contains_key(&**key))),
///             other => return Err(Fault::unsupported(other.operation().name())),
///         })
///     }
/// }
///
/// let store = Mine::default();
/// store.set("color", "blue")?;
/// assert_eq!(&*store.get("color")?, b"blue");
/// assert!(store.add("counter", 1).unwrap_err().to_string().contains("has no add"));
/// # Ok::<(), tenfold_store::Error>(())
/// ```
pub trait Store: Send + Sync {
    /// Serves one request. Only `Wait` and `Barrier` may take until `deadline`; the others answer from the
    /// present state.
    fn call(&self, request: Request<'_>, deadline: Deadline) -> std::result::Result<Response, Fault>;

    /// Its name in error messages, such as `10.0.0.1:29500`.
    fn name(&self) -> String {
        "a store of this program".into()
    }

    /// The address of the server, for a store on the network. A store that wraps another has the address of
    /// that one.
    fn address(&self) -> Option<SocketAddr> {
        None
    }

    /// How long an operation may take.
    fn timeout(&self) -> Duration {
        DEFAULT_TIMEOUT
    }

    /// Changes how long an operation may take; true if this store supports that.
    fn set_timeout(&self, _timeout: Duration) -> bool {
        false
    }

    /// Are `append`, `multi_get` and `multi_set` one step each?
    fn has_extended_api(&self) -> bool {
        false
    }

    /// Another handle on the same data that can be used while this one waits (c10d's `clone`).
    fn duplicate(&self) -> std::result::Result<Arc<dyn Store>, Fault> {
        Err(Fault::unsupported("clone"))
    }
}

impl<S: Store + ?Sized> Store for Arc<S> {
    fn call(&self, request: Request<'_>, deadline: Deadline) -> std::result::Result<Response, Fault> {
        (**self).call(request, deadline)
    }
    fn name(&self) -> String {
        (**self).name()
    }
    fn address(&self) -> Option<SocketAddr> {
        (**self).address()
    }
    fn timeout(&self) -> Duration {
        (**self).timeout()
    }
    fn set_timeout(&self, timeout: Duration) -> bool {
        (**self).set_timeout(timeout)
    }
    fn has_extended_api(&self) -> bool {
        (**self).has_extended_api()
    }
    fn duplicate(&self) -> std::result::Result<Arc<dyn Store>, Fault> {
        (**self).duplicate()
    }
}

/// Every operation of c10d, for every [`Store`].
///
/// ```
/// use tenfold_store::{HashStore, StoreExt};
///
/// let store = HashStore::new();
/// store.set("answer", "42")?;
/// assert_eq!(store.add("answer", 1)?, 43);
/// assert_eq!(&*store.get("answer")?, b"43");
/// # Ok::<(), tenfold_store::Error>(())
/// ```
pub trait StoreExt: Store {
    /// Writes a key.
    fn set(&self, key: impl AsRef<[u8]>, value: impl AsRef<[u8]>) -> Result<()> {
        let (key, value) = (key.as_ref(), value.as_ref());
        let call = Op::new(self, "set", [key]);
        call.done(Request::Set { key: key.into(), value: value.into() })
    }

    /// Reads a key, waiting for it up to the timeout.
    fn get(&self, key: impl AsRef<[u8]>) -> Result<Value> {
        let key = key.as_ref();
        let call = Op::new(self, "get", [key]);
        loop {
            call.wait()?;
            match call.ask(Request::Get { key: key.into() })? {
                Response::Value(Some(value)) => return Ok(value),
                // Deleted in between, or a queue of that name: a key may still appear, so ask again after a
                // pause.
                Response::Value(None) if call.deadline.passed() => return Err(call.timed_out()),
                Response::Value(None) => call.deadline.pause(POLL_MAX),
                other => return Err(call.surprise(other)),
            }
        }
    }

    /// Adds to a counter and returns its new value; a missing counter is 0.
    fn add(&self, key: impl AsRef<[u8]>, delta: i64) -> Result<i64> {
        let key = key.as_ref();
        Op::new(self, "add", [key]).number(Request::Add { key: key.into(), delta })
    }

    /// Writes `desired` if the value is `expected`, or if the key is missing and `expected` is empty.
    ///
    /// Returns what the key holds now. If the key is missing and `expected` is not empty, returns `expected`.
    fn compare_set(
        &self,
        key: impl AsRef<[u8]>,
        expected: impl AsRef<[u8]>,
        desired: impl AsRef<[u8]>,
    ) -> Result<Value> {
        let (key, expected, desired) = (key.as_ref(), expected.as_ref(), desired.as_ref());
        let call = Op::new(self, "compare_set", [key]);
        let request =
            Request::CompareSet { key: key.into(), expected: expected.into(), desired: desired.into() };
        match call.ask(request)? {
            Response::Value(Some(value)) => Ok(value),
            other => Err(call.surprise(other)),
        }
    }

    /// Whether all keys exist. Never waits. A queue that is not empty counts as a key.
    fn check<K: AsRef<[u8]>>(&self, keys: &[K]) -> Result<bool> {
        let call = Op::new(self, "check", keys.iter().map(AsRef::as_ref));
        match call.ask(Request::Check { keys: call.keys() })? {
            Response::Present(all) => Ok(all),
            other => Err(call.surprise(other)),
        }
    }

    /// Waits for all keys, up to the store's timeout.
    fn wait<K: AsRef<[u8]>>(&self, keys: &[K]) -> Result<()> {
        self.wait_for(keys, self.timeout())
    }

    /// Waits for all keys, up to `timeout`.
    fn wait_for<K: AsRef<[u8]>>(&self, keys: &[K], timeout: Duration) -> Result<()> {
        Op::with_timeout(self, "wait", keys.iter().map(AsRef::as_ref), timeout).wait()
    }

    /// Adds to the end of a value, creating it if needed.
    fn append(&self, key: impl AsRef<[u8]>, value: impl AsRef<[u8]>) -> Result<()> {
        let (key, value) = (key.as_ref(), value.as_ref());
        let call = Op::new(self, "append", [key]);
        match call.done(Request::Append { key: key.into(), value: value.into() }) {
            Err(error) if error.kind() == ErrorKind::Unsupported => {}
            result => return result,
        }
        let mut current = Value::default();
        loop {
            let longer = [&*current, value].concat();
            let seen = self.compare_set(key, &current, &longer)?;
            if *seen == *longer {
                return Ok(());
            }
            current = seen;
        }
    }

    /// Reads several keys, waiting for all of them up to the timeout.
    fn multi_get<K: AsRef<[u8]>>(&self, keys: &[K]) -> Result<Vec<Value>> {
        let call = Op::new(self, "multi_get", keys.iter().map(AsRef::as_ref));
        call.wait()?;
        match call.ask(Request::MultiGet { keys: call.keys() }) {
            Ok(Response::Values(values)) if values.len() == keys.len() => values
                .into_iter()
                .map(|value| {
                    value.ok_or_else(|| {
                        call.fails(Fault::new(ErrorKind::Lost, "a key was deleted during the operation"))
                    })
                })
                .collect(),
            Ok(other) => Err(call.surprise(other)),
            Err(error) if error.kind() == ErrorKind::Unsupported => {
                keys.iter().map(|key| self.get(key)).collect()
            }
            Err(error) => Err(error),
        }
    }

    /// Writes several keys: all in one step if the store is extended, otherwise one by one.
    fn multi_set<K: AsRef<[u8]>, V: AsRef<[u8]>>(&self, keys: &[K], values: &[V]) -> Result<()> {
        let call = Op::new(self, "multi_set", keys.iter().map(AsRef::as_ref));
        if keys.len() != values.len() {
            let message = format!("{} keys but {} values", keys.len(), values.len());
            return Err(call.fails(Fault::new(ErrorKind::Argument, message)));
        }
        let pairs = keys
            .iter()
            .zip(values)
            .map(|(key, value)| (key.as_ref().into(), value.as_ref().into()))
            .collect();
        match call.done(Request::MultiSet { pairs }) {
            Err(error) if error.kind() == ErrorKind::Unsupported => {
                keys.iter().zip(values).try_for_each(|(key, value)| self.set(key, value))
            }
            result => result,
        }
    }

    /// Counts the keys. As in c10d this is the number in the whole store, whatever the prefix, and includes the
    /// store's own.
    fn num_keys(&self) -> Result<i64> {
        Op::new(self, "num_keys", []).number(Request::NumKeys)
    }

    /// Lists the keys, in no particular order.
    fn list_keys(&self) -> Result<Vec<Value>> {
        let call = Op::new(self, "list_keys", []);
        match call.ask(Request::ListKeys)? {
            Response::Keys(keys) => Ok(keys),
            other => Err(call.surprise(other)),
        }
    }

    /// Removes a key; returns whether it existed.
    fn delete_key(&self, key: impl AsRef<[u8]>) -> Result<bool> {
        let key = key.as_ref();
        let call = Op::new(self, "delete_key", [key]);
        match call.ask(Request::Delete { key: key.into() })? {
            Response::Deleted(was_there) => Ok(was_there),
            other => Err(call.surprise(other)),
        }
    }

    /// Puts an item at the end of a queue. Queues and keys have separate names.
    fn queue_push(&self, key: impl AsRef<[u8]>, value: impl AsRef<[u8]>) -> Result<()> {
        let (key, value) = (key.as_ref(), value.as_ref());
        Op::new(self, "queue_push", [key]).done(Request::QueuePush { key: key.into(), value: value.into() })
    }

    /// Takes the oldest item of a queue, waiting for one up to the timeout.
    ///
    /// As in c10d it can still find the queue empty ([`ErrorKind::QueueEmpty`]): a client that does not wait
    /// took the item first, or a key of the same name ended the wait.
    fn queue_pop(&self, key: impl AsRef<[u8]>) -> Result<Value> {
        let key = key.as_ref();
        let call = Op::new(self, "queue_pop", [key]);
        call.wait()?;
        call.pop()
    }

    /// Takes the oldest item of a queue; [`ErrorKind::QueueEmpty`] if there is none.
    fn try_queue_pop(&self, key: impl AsRef<[u8]>) -> Result<Value> {
        Op::new(self, "queue_pop", [key.as_ref()]).pop()
    }

    /// Length of a queue.
    fn queue_len(&self, key: impl AsRef<[u8]>) -> Result<i64> {
        let key = key.as_ref();
        Op::new(self, "queue_len", [key]).number(Request::QueueLen { key: key.into() })
    }

    /// Waits until `world_size` clients have joined the barrier `key`, up to the store's timeout. The key is
    /// used up: joining again returns immediately.
    fn barrier(&self, key: impl AsRef<[u8]>, world_size: usize) -> Result<()> {
        self.barrier_for(key, world_size, self.timeout())
    }

    /// As [`StoreExt::barrier`], up to `timeout`.
    fn barrier_for(&self, key: impl AsRef<[u8]>, world_size: usize, timeout: Duration) -> Result<()> {
        let key = key.as_ref();
        let call = Op::with_timeout(self, "barrier", [key], timeout);
        let world = i64::try_from(world_size).map_err(|_| {
            call.fails(Fault::new(ErrorKind::Argument, format!("a world size of {world_size} is too large")))
        })?;
        match call.ask(Request::Barrier { key: key.into(), world }) {
            Ok(Response::Ready) => return Ok(()),
            Ok(other) => return Err(call.surprise(other)),
            Err(error) if error.kind() == ErrorKind::Unsupported => {}
            Err(error) => return Err(error),
        }
        let part = |suffix: &str| [key, suffix.as_bytes()].concat();
        if self.add(part("/num_members"), 1)? == world {
            self.set(part("/last_member"), "1")?;
        }
        let left = call.deadline.left().unwrap_or(timeout);
        Op::with_timeout(self, "barrier", [part("/last_member").as_slice()], left).wait()
    }

    /// Another handle on the same data that can be used while this one waits: c10d's `clone`. A TCP store
    /// opens another connection.
    fn try_clone(&self) -> Result<Arc<dyn Store>> {
        let call = Op::new(self, "clone", []);
        self.duplicate().map_err(|fault| call.fails(fault))
    }
}

impl<S: Store + ?Sized> StoreExt for S {}

pub(crate) const POLL_MIN: Duration = Duration::from_millis(1);
pub(crate) const POLL_MAX: Duration = Duration::from_millis(10); // c10d's own interval where it polls

/// One operation in progress, with everything that an error message needs.
struct Op<'a, S: ?Sized> {
    store: &'a S,
    name: &'static str,
    keys: Vec<&'a [u8]>,
    deadline: Deadline,
}

impl<'a, S: Store + ?Sized> Op<'a, S> {
    fn new(store: &'a S, name: &'static str, keys: impl IntoIterator<Item = &'a [u8]>) -> Self {
        Op::with_timeout(store, name, keys, store.timeout())
    }

    fn with_timeout(
        store: &'a S,
        name: &'static str,
        keys: impl IntoIterator<Item = &'a [u8]>,
        timeout: Duration,
    ) -> Self {
        Op { store, name, keys: keys.into_iter().collect(), deadline: Deadline::after(timeout) }
    }

    fn keys(&self) -> Vec<Bytes<'a>> {
        self.keys.iter().map(|&key| key.into()).collect()
    }

    fn ask(&self, request: Request<'_>) -> Result<Response> {
        self.store.call(request, self.deadline).map_err(|fault| self.fails(fault))
    }

    fn done(&self, request: Request<'_>) -> Result<()> {
        match self.ask(request)? {
            Response::Done => Ok(()),
            other => Err(self.surprise(other)),
        }
    }

    fn number(&self, request: Request<'_>) -> Result<i64> {
        match self.ask(request)? {
            Response::Number(number) => Ok(number),
            other => Err(self.surprise(other)),
        }
    }

    fn pop(&self) -> Result<Value> {
        match self.ask(Request::QueuePop { key: self.keys[0].into() })? {
            Response::Popped(Some((item, _))) => Ok(item),
            Response::Popped(None) => Err(self.fails(Fault::new(ErrorKind::QueueEmpty, "queue is empty"))),
            other => Err(self.surprise(other)),
        }
    }

    /// Waits for all keys of this operation.
    fn wait(&self) -> Result<()> {
        match self.ask(Request::Wait { keys: self.keys() }) {
            Ok(Response::Ready) => return Ok(()),
            Ok(other) => return Err(self.surprise(other)),
            Err(error) if error.kind() == ErrorKind::Unsupported => {}
            Err(error) => return Err(error),
        }
        // A store that cannot wait is polled, less and less often.
        let mut pause = POLL_MIN;
        loop {
            match self.ask(Request::Check { keys: self.keys() })? {
                Response::Present(true) => return Ok(()),
                Response::Present(false) if self.deadline.passed() => return Err(self.timed_out()),
                Response::Present(false) => self.deadline.pause(pause),
                other => return Err(self.surprise(other)),
            }
            pause = (pause * 2).min(POLL_MAX);
        }
    }

    #[cold]
    fn timed_out(&self) -> Error {
        self.fails(Fault::timeout(NO_SUCH_KEY).hint(NO_SUCH_KEY_HINT))
    }

    #[cold]
    fn surprise(&self, response: Response) -> Error {
        self.fails(Fault::new(
            ErrorKind::Protocol,
            format!("unexpected response type from the store: {response:?}"),
        ))
    }

    #[cold]
    fn fails(&self, fault: Fault) -> Error {
        let request = match self.keys.is_empty() {
            true => self.name.to_string(),
            false => format!("{} {}", self.name, show_keys(&self.keys)),
        };
        let (elapsed, limit) = (self.deadline.elapsed(), self.deadline.limit());
        let scene = Scene { request, store: self.store.name(), elapsed, limit };
        Error::new(scene, fault)
    }
}

pub(crate) const NO_SUCH_KEY: &str = "timed out: the key was never set";
pub(crate) const NO_SUCH_KEY_HINT: &str =
    "check that the rank that sets it is alive and uses the same store and prefix, or raise the timeout";

/// An error that does not belong to an operation of a store: opening one, serving one.
#[cold]
pub(crate) fn failure(what: &str, store: &str, deadline: Deadline, fault: Fault) -> Error {
    let (elapsed, limit) = (deadline.elapsed(), deadline.limit());
    let scene = Scene { request: what.into(), store: store.into(), elapsed, limit };
    Error::new(scene, fault)
}
