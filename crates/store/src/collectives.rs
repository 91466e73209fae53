//! Small collectives over a store, for control data while no faster transport exists.
//!
//! Key names are those of c10d's StoreCollectives, so that both kinds of ranks interoperate. A rank sets
//! `key/<rank>` before it waits, so that a timeout can name the missing ranks instead of only counting them.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::error::{Error, Result};
use crate::ops::{Store, StoreExt, failure};
use crate::value::Value;
use tenfold_base::{Deadline, ErrorKind, Fault};

/// Collectives among `world_size` ranks that share a store. Each key serves one call.
///
/// ```
/// use std::{sync::Arc, thread, time::Duration};
/// use tenfold_store::{HashStore, StoreCollectives};
///
/// let store = Arc::new(HashStore::new());
/// thread::scope(|scope| {
///     for rank in 0..3 {
///         let ranks = StoreCollectives::new(store.clone(), rank, 3);
///         scope.spawn(move || assert_eq!(ranks.all_sum("sum", 10, Duration::from_secs(10)).unwrap(), 30));
///     }
/// });
/// ```
pub struct StoreCollectives {
    store: Arc<dyn Store>,
    rank: usize,
    world_size: usize,
    /// c10d refuses a key that this object has used before, because the second call would read the first
    /// call's values.
    used: Mutex<HashSet<Vec<u8>>>,
}

impl StoreCollectives {
    /// Collectives of `world_size` ranks through `store`, for this rank.
    pub fn new(store: Arc<dyn Store>, rank: usize, world_size: usize) -> Self {
        StoreCollectives { store, rank, world_size, used: Mutex::default() }
    }

    /// Waits until every rank has joined.
    pub fn barrier(&self, key: impl AsRef<[u8]>, timeout: Duration) -> Result<()> {
        let call = self.begin("barrier", key.as_ref(), timeout)?;
        call.barrier(true)
    }

    /// Marks this rank as joined without waiting. The last rank to join releases the waiting ranks.
    pub fn arrive(&self, key: impl AsRef<[u8]>, timeout: Duration) -> Result<()> {
        let call = self.begin("barrier", key.as_ref(), timeout)?;
        call.barrier(false)
    }

    /// Sends `data` to every rank that calls [`StoreCollectives::broadcast_recv`].
    pub fn broadcast_send(
        &self,
        key: impl AsRef<[u8]>,
        data: impl AsRef<[u8]>,
        timeout: Duration,
    ) -> Result<()> {
        let call = self.begin("broadcast", key.as_ref(), timeout)?;
        self.store.set(call.key, data)
    }

    /// Receives the data of the sending rank.
    pub fn broadcast_recv(&self, key: impl AsRef<[u8]>, timeout: Duration) -> Result<Value> {
        let call = self.begin("broadcast", key.as_ref(), timeout)?;
        call.collect(vec![call.key.to_vec()]).map(|mut values| values.remove(0))
    }

    /// Receives what one rank writes under `key` once it has seen `marks/<rank>` of every rank. If that takes too long, the
    /// error names the ranks without such a key.
    pub fn await_root(
        &self,
        key: impl AsRef<[u8]>,
        marks: impl AsRef<[u8]>,
        timeout: Duration,
    ) -> Result<Value> {
        let call = self.begin("gather", marks.as_ref(), timeout)?;
        self.store.wait_for(&[key.as_ref()], timeout).map_err(|error| call.name_missing(error))?;
        self.store.get(key)
    }

    /// Sends this rank's `data` to the gathering rank.
    pub fn gather_send(
        &self,
        key: impl AsRef<[u8]>,
        data: impl AsRef<[u8]>,
        timeout: Duration,
    ) -> Result<()> {
        let call = self.begin("gather", key.as_ref(), timeout)?;
        self.store.set(call.of_rank(self.rank), data)
    }

    /// The data of all ranks, by rank, including this one.
    pub fn gather_recv(
        &self,
        key: impl AsRef<[u8]>,
        data: impl AsRef<[u8]>,
        timeout: Duration,
    ) -> Result<Vec<Value>> {
        let call = self.begin("gather", key.as_ref(), timeout)?;
        let others = (0..self.world_size).filter(|&rank| rank != self.rank);
        let mut values = call.collect(others.map(|rank| call.of_rank(rank)).collect())?;
        values.insert(self.rank.min(values.len()), data.as_ref().into());
        Ok(values)
    }

    /// Sends each rank its item, and returns this rank's own.
    pub fn scatter_send<V: AsRef<[u8]>>(
        &self,
        key: impl AsRef<[u8]>,
        data: &[V],
        timeout: Duration,
    ) -> Result<Value> {
        let call = self.begin("scatter", key.as_ref(), timeout)?;
        if data.len() != self.world_size {
            let message = format!("{} items for {} ranks", data.len(), self.world_size);
            return Err(call.fails(Fault::new(ErrorKind::Argument, message)));
        }
        let others = (0..self.world_size).filter(|&rank| rank != self.rank);
        let (keys, values): (Vec<_>, Vec<_>) =
            others.map(|rank| (call.of_rank(rank), data[rank].as_ref())).unzip();
        self.store.multi_set(&keys, &values)?;
        Ok(data[self.rank].as_ref().into())
    }

    /// This rank's item.
    pub fn scatter_recv(&self, key: impl AsRef<[u8]>, timeout: Duration) -> Result<Value> {
        let call = self.begin("scatter", key.as_ref(), timeout)?;
        call.collect(vec![call.of_rank(self.rank)]).map(|mut values| values.remove(0))
    }

    /// The data of all ranks on every rank, by rank.
    pub fn all_gather(
        &self,
        key: impl AsRef<[u8]>,
        data: impl AsRef<[u8]>,
        timeout: Duration,
    ) -> Result<Vec<Value>> {
        let call = self.begin("all_gather", key.as_ref(), timeout)?;
        self.store.set(call.of_rank(self.rank), data)?;
        call.collect((0..self.world_size).map(|rank| call.of_rank(rank)).collect())
    }

    /// The sum of all ranks' numbers, on every rank.
    pub fn all_sum(&self, key: impl AsRef<[u8]>, number: i64, timeout: Duration) -> Result<i64> {
        let call = self.begin("all_sum", key.as_ref(), timeout)?;
        self.store.add(call.key, number)?;
        let met = [call.key, b"/barrier"].concat();
        self.barrier(&met, call.deadline.left().unwrap_or(timeout))?;
        self.store.add(call.key, 0)
    }

    fn begin<'a>(&'a self, name: &'static str, key: &'a [u8], timeout: Duration) -> Result<Collective<'a>> {
        let call = Collective { ranks: self, name, key, timeout, deadline: Deadline::after(timeout) };
        if self.rank >= self.world_size {
            let message = format!("rank {} is outside a world of {}", self.rank, self.world_size);
            return Err(call.fails(Fault::new(ErrorKind::Argument, message)));
        }
        let fresh = self.used.lock().expect("nothing panics while holding it").insert(key.to_vec());
        if !fresh {
            let fault = Fault::new(ErrorKind::Argument, "this key has been used before")
                .hint("use a different key for each call");
            return Err(call.fails(fault));
        }
        Ok(call)
    }
}

impl std::fmt::Debug for StoreCollectives {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "StoreCollectives(rank {} of {} at {})", self.rank, self.world_size, self.store.name())
    }
}

/// One call of one collective.
struct Collective<'a> {
    ranks: &'a StoreCollectives,
    name: &'static str,
    key: &'a [u8],
    timeout: Duration,
    deadline: Deadline,
}

impl Collective<'_> {
    fn of_rank(&self, rank: usize) -> Vec<u8> {
        [self.key, format!("/{rank}").as_bytes()].concat()
    }

    fn part(&self, suffix: &str) -> Vec<u8> {
        [self.key, suffix.as_bytes()].concat()
    }

    fn left(&self) -> Duration {
        self.deadline.left().unwrap_or(self.timeout)
    }

    fn barrier(&self, blocking: bool) -> Result<()> {
        let StoreCollectives { store, rank, world_size, .. } = self.ranks;
        let (members, last) = (self.part("/num_members"), self.part("/last_members"));
        let come = store.add(&members, 1)?;
        store.set(self.of_rank(*rank), "joined")?;
        if usize::try_from(come).is_ok_and(|come| come == *world_size) {
            return store.set(&last, "<val_ignored>");
        }
        if !blocking {
            return Ok(());
        }
        store.wait_for(&[&last], self.left()).map_err(|error| self.name_missing(error))
    }

    fn collect(&self, keys: Vec<Vec<u8>>) -> Result<Vec<Value>> {
        let store = &self.ranks.store;
        store.wait_for(&keys, self.left()).map_err(|error| self.name_missing(error))?;
        store.multi_get(&keys)
    }

    /// Turns a timeout into one that names the missing ranks.
    #[cold]
    fn name_missing(&self, error: Error) -> Error {
        if !error.is_timeout() {
            return error;
        }
        let store = &self.ranks.store;
        let others = (0..self.ranks.world_size).filter(|&rank| rank != self.ranks.rank);
        let missing = others.filter(|&rank| !store.check(&[self.of_rank(rank)]).unwrap_or(true));
        let missing: Vec<usize> = missing.collect();
        match missing.is_empty() {
            true => error,
            false => self.fails(missing_ranks(&missing, self.ranks.world_size)),
        }
    }

    #[cold]
    fn fails(&self, fault: Fault) -> Error {
        let what = format!("{} {} on rank {}", self.name, crate::show_keys(&[self.key]), self.ranks.rank);
        failure(&what, &self.ranks.store.name(), self.deadline, fault)
    }
}

fn missing_ranks(missing: &[usize], world_size: usize) -> Fault {
    const SHOWN: usize = 32;
    let list = missing.iter().take(SHOWN).map(ToString::to_string).collect::<Vec<_>>().join(", ");
    let more =
        if missing.len() > SHOWN { format!(" and {} more", missing.len() - SHOWN) } else { String::new() };
    let come = world_size - missing.len();
    Fault::timeout(format!("{come} of {world_size} ranks have joined; missing ranks: {list}{more}"))
        .hint("see the logs of the missing ranks: they have not started or have not reached this call")
}

/// The barrier at the start of a group, over the keys that PyTorch uses for it. Each rank also sets a key of
/// its own, so that the error can name the missing ranks.
pub fn init_barrier(
    store: &dyn Store,
    group: &str,
    rank: usize,
    world_size: usize,
    timeout: Duration,
) -> Result<()> {
    let deadline = Deadline::after(timeout);
    let what = || format!("init_barrier of group `{group}` on rank {rank}");
    if rank >= world_size {
        let message = format!("rank {rank} is outside a world of {world_size}");
        return Err(failure(&what(), &store.name(), deadline, Fault::new(ErrorKind::Argument, message)));
    }
    let key = format!("store_based_barrier_key:{group}");
    let (mark, last) = (|rank| format!("{key}:rank{rank}"), format!("{key}:last_worker"));
    store.set(mark(rank), "joined")?;
    let come = store.add(&key, 1)?;
    // PyTorch's own ranks set no such key, but they count. At or beyond the world size, this rank must
    // release the others.
    if usize::try_from(come).is_ok_and(|come| come >= world_size) {
        store.set(&last, "1")?;
    }
    let left = deadline.left().unwrap_or(timeout);
    store.wait_for(&[&last], left).map_err(|error| {
        if !error.is_timeout() {
            return error;
        }
        let missing: Vec<usize> =
            (0..world_size).filter(|&rank| !store.check(&[mark(rank)]).unwrap_or(true)).collect();
        match missing.is_empty() {
            true => error,
            false => failure(&what(), &store.name(), deadline, missing_ranks(&missing, world_size)),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::HashStore;

    const SOON: Duration = Duration::from_secs(20);

    /// Runs `body` as every rank of a world that shares one store.
    fn on_ranks<T: Send>(world_size: usize, body: impl Fn(StoreCollectives, usize) -> T + Sync) -> Vec<T> {
        let store = Arc::new(HashStore::new());
        std::thread::scope(|scope| {
            let run = |rank| {
                let (ranks, body) = (StoreCollectives::new(store.clone(), rank, world_size), &body);
                scope.spawn(move || body(ranks, rank))
            };
            let threads: Vec<_> = (0..world_size).map(run).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    fn text(values: &[Value]) -> Vec<String> {
        values.iter().map(|value| String::from_utf8_lossy(value).into_owned()).collect()
    }

    #[test]
    fn every_collective_gives_every_rank_what_it_should() {
        for world_size in 1..=5 {
            let all: Vec<String> = (0..world_size).map(|rank| format!("r{rank}")).collect();
            on_ranks(world_size, |ranks, rank| {
                ranks.barrier("meet", SOON).unwrap();
                assert_eq!(text(&ranks.all_gather("all", format!("r{rank}"), SOON).unwrap()), all);
                assert_eq!(
                    ranks.all_sum("sum", rank as i64, SOON).unwrap(),
                    (0..world_size as i64).sum::<i64>()
                );
                let root = world_size - 1;
                let got = match rank == root {
                    true => {
                        ranks.broadcast_send("b", "news", SOON).unwrap();
                        assert_eq!(text(&ranks.gather_recv("g", format!("r{rank}"), SOON).unwrap()), all);
                        ranks.scatter_send("s", &all, SOON).unwrap()
                    }
                    false => {
                        assert_eq!(&*ranks.broadcast_recv("b", SOON).unwrap(), b"news");
                        ranks.gather_send("g", format!("r{rank}"), SOON).unwrap();
                        ranks.scatter_recv("s", SOON).unwrap()
                    }
                };
                assert_eq!(&*got, format!("r{rank}").as_bytes());
            });
        }
    }

    #[test]
    fn a_barrier_that_times_out_names_the_ranks_that_have_not_come() {
        let store = Arc::new(HashStore::new());
        StoreCollectives::new(store.clone(), 2, 5).arrive("meet", SOON).unwrap();
        let error =
            StoreCollectives::new(store, 0, 5).barrier("meet", Duration::from_millis(20)).unwrap_err();
        let text = error.to_string();
        assert!(text.starts_with("store barrier `meet` on rank 0 at this process failed after "), "{text}");
        assert!(text.contains(": 2 of 5 ranks have joined; missing ranks: 1, 3, 4\n  hint: "), "{text}");
        assert!(error.is_timeout());
    }

    #[test]
    fn an_init_barrier_that_times_out_names_the_ranks_that_have_not_come() {
        let store = HashStore::new();
        init_barrier(&store, "default", 1, 3, Duration::ZERO).unwrap_err();
        let error = init_barrier(&store, "default", 0, 3, Duration::from_millis(20)).unwrap_err();
        assert!(error.to_string().contains(": 2 of 3 ranks have joined; missing ranks: 2\n"), "{error}");
        init_barrier(&store, "default", 2, 3, Duration::ZERO).expect("the last rank releases the others");
    }

    #[test]
    fn a_key_serves_one_call() {
        let ranks = StoreCollectives::new(Arc::new(HashStore::new()), 0, 1);
        ranks.barrier("k", SOON).unwrap();
        let error = ranks.barrier("k", SOON).unwrap_err();
        assert!(error.to_string().contains("this key has been used before"), "{error}");
    }
}
