//! Tests of how ranks find each other: what that costs, in large groups, and after attempts that failed.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use tenfold_memory::{Buffer, DType, ReduceOp};
use tenfold_store::{Deadline, HashStore, Request, Response, Store, StoreExt as _};

use super::{Group, Options, Seat};
use crate::Tag;
use crate::fault::{ErrorKind, Fault, Result};

/// A store that counts what goes through it, and can be made to end.
#[derive(Default)]
struct Counting {
    inner: HashStore,
    requests: AtomicUsize,
    bytes: AtomicUsize,
    has_ended: AtomicBool,
}

impl Store for Counting {
    fn call(&self, request: Request<'_>, deadline: Deadline) -> std::result::Result<Response, Fault> {
        if self.has_ended.load(Ordering::Relaxed) {
            return Err(Fault::new(ErrorKind::Lost, "the store has ended"));
        }
        let sent: usize = match &request {
            Request::Set { value, .. } => value.len(),
            _ => 0,
        };
        let response = self.inner.call(request, deadline);
        let got: usize = match &response {
            Ok(Response::Value(value)) => value.as_ref().map_or(0, |value| value.len()),
            Ok(Response::Values(values)) => {
                values.iter().map(|value| value.as_ref().map_or(0, |value| value.len())).sum()
            }
            _ => 0,
        };
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(sent + got, Ordering::Relaxed);
        response
    }
}

/// Runs `body` as every rank of a group that is made through `store`.
fn ranks<R: Send>(
    store: &Arc<Counting>,
    size: usize,
    options: &Options,
    body: impl Fn(Group) -> Result<R> + Sync,
) -> Vec<R> {
    std::thread::scope(|scope| {
        let start = |rank| {
            let (store, options, body) = (Arc::clone(store), options.clone(), &body);
            scope.spawn(move || body(Group::connect(store, Seat { rank, size }, options)?))
        };
        let ranks: Vec<_> = (0..size).map(start).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap().unwrap()).collect()
    })
}

fn quick() -> Options {
    Options::default().timeout(Duration::from_secs(100))
}

/// Every rank exchanges a message with every other one, one distance after the other.
fn talk_to_all(group: &Group) -> Result<()> {
    let (rank, size) = (group.rank(), group.size());
    for distance in 1..size {
        let (to, from) = ((rank + distance) % size, (rank + size - distance) % size);
        let mut out = Buffer::from_slice(&[rank as u64]);
        let mut into = Buffer::zeros(DType::U64, 1);
        let received = group.start_recv(into.lend(), from, Tag(distance as u32))?;
        group.start_send(out.lend(), to, Tag(distance as u32))?.wait()?;
        received.wait()?;
        assert_eq!(into.as_slice::<u64>(), [from as u64]);
    }
    let mut sum = [1.0_f32; 1000];
    group.all_reduce(&mut sum, ReduceOp::Sum)?;
    assert_eq!(sum, [size as f32; 1000]);
    Ok(())
}

#[test]
fn a_rank_makes_the_same_number_of_requests_however_many_ranks_there_are() {
    let per_rank = |size: usize| {
        let store = Arc::new(Counting::default());
        ranks(&store, size, &quick(), |_| Ok(()));
        store.requests.load(Ordering::Relaxed) as f64 / size as f64
    };
    let (few, many) = (per_rank(4), per_rank(64));
    assert!(many <= few + 1.0 && many < 20.0, "{few} requests per rank among 4, {many} among 64");
}

#[test]
fn a_large_group_reaches_every_rank_although_a_rank_reads_few_cards() {
    let store = Arc::new(Counting::default());
    let options = Options { contacts_max: 2, ..quick().only_tcp() };
    ranks(&store, 12, &options, |group| {
        talk_to_all(&group)?;
        // Half of the ranks, numbered backwards, in a group that is made without the store.
        let some: Vec<usize> = (0..group.size()).rev().step_by(2).collect();
        let part = group.subgroup(&some, Options::new("part"))?;
        part.as_ref().map_or(Ok(()), talk_to_all)
    });
}

#[test]
fn a_rank_that_cannot_be_looked_up_because_the_store_has_ended_is_named() {
    let store = Arc::new(Counting::default());
    let options = Options { contacts_max: 2, ..quick().only_tcp() };
    let all_are_through = std::sync::Barrier::new(12);
    ranks(&store, 12, &options, |group| {
        group.start_barrier()?.wait()?;
        all_are_through.wait();
        store.has_ended.store(true, Ordering::Relaxed);
        // Rank 0 and the likely neighbours were looked up when the group was made; distances of 5 and 6 were not.
        let far = if group.rank() == 7 { 1 } else { (group.rank() + 5) % group.size() };
        let mut word = Buffer::from_slice(&[1_u8]);
        let error = group.start_send(word.lend(), far, Tag(0)).and_then(|work| work.wait()).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("the store has ended") || text.contains("cannot look up"), "{text}");
        assert!(text.contains("rank"), "{text}");
        Ok(())
    });
}

#[test]
fn ranks_that_do_not_fit_together_hear_the_same_reason() {
    let store = Arc::new(HashStore::new());
    let errors: Vec<String> = std::thread::scope(|scope| {
        let start = |rank: usize| {
            let store = Arc::clone(&store);
            scope.spawn(move || {
                let options = if rank == 2 { quick().deterministic() } else { quick() };
                Group::connect(store, Seat { rank, size: 3 }, options).unwrap_err().message().to_string()
            })
        };
        let ranks: Vec<_> = (0..3).map(start).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    assert!(errors[0].contains("deterministic"), "{}", errors[0]);
    assert!(errors.iter().all(|error| *error == errors[0]), "{errors:?}");
}

/// What a store says may be wrong: here rank 1 seems to share a host with rank 7 of 2.
#[test]
fn an_impossible_answer_of_a_rank_is_reported_to_all_ranks_with_its_number() {
    struct Lying(HashStore);
    impl Store for Lying {
        fn call(&self, request: Request<'_>, deadline: Deadline) -> std::result::Result<Response, Fault> {
            match request {
                Request::Set { key, value } if key.windows(6).any(|part| part == b"/found") => {
                    let text = String::from_utf8_lossy(&value).replace("\"host\":0", "\"host\":7");
                    let is_rank_1 = key.ends_with(b"/1");
                    let value = if is_rank_1 { text.into_bytes().into() } else { value };
                    self.0.call(Request::Set { key, value }, deadline)
                }
                other => self.0.call(other, deadline),
            }
        }
    }
    let store = Arc::new(Lying(HashStore::new()));
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let store = Arc::clone(&store);
            scope.spawn(move || {
                let error = Group::connect(store, Seat { rank, size: 2 }, quick()).unwrap_err();
                assert_eq!(error.peer(), Some(1), "{error}");
                assert!(
                    error.to_string().contains("rank 1 says that it shares a host with rank 7"),
                    "{error}"
                );
            });
        }
    });
}

/// Ranks that were refused and try again with other settings find each other, although the refusal is still in the store.
#[test]
fn ranks_that_were_refused_find_each_other_when_they_try_again() {
    let store = Arc::new(HashStore::new());
    let cards = || [1, 2].map(|rank| store.get(format!("tenfold/default/1/card/{rank}")).unwrap());
    std::thread::scope(|scope| {
        for rank in 0..3 {
            let (store, cards) = (Arc::clone(&store), &cards);
            scope.spawn(move || {
                let seat = Seat { rank, size: 3 };
                let options = if rank == 2 { quick().deterministic() } else { quick() };
                Group::connect(Arc::clone(&store) as Arc<dyn Store>, seat, options).unwrap_err();
                if rank == 0 {
                    let before = cards();
                    store.set("rank 0 was refused", "").unwrap();
                    while cards().iter().zip(&before).any(|(now, before)| now[..] == before[..]) {
                        std::thread::yield_now();
                    }
                } else {
                    store.wait(&["rank 0 was refused"]).unwrap();
                }
                let group = Group::connect(store, seat, quick()).unwrap();
                group.start_barrier().unwrap().wait().unwrap();
            });
        }
    });
}

#[test]
fn a_rank_that_waits_for_the_table_names_the_ranks_that_are_missing() {
    let store: Arc<dyn Store> = Arc::new(HashStore::new());
    let options = Options::default().timeout(Duration::from_millis(300));
    let error = Group::connect(store, Seat { rank: 1, size: 4 }, options).unwrap_err();
    assert!(error.is_timeout());
    assert!(error.to_string().contains("1 of 4 ranks have joined; missing ranks: 0, 2, 3"), "{error}");
}

#[test]
fn groups_of_one_process_share_what_a_process_has_once() {
    let store = Arc::new(Counting::default());
    ranks(&store, 2, &quick(), |first| {
        let store: Arc<dyn Store> = Arc::clone(&store) as Arc<dyn Store>;
        let seat = Seat { rank: first.rank(), size: 2 };
        let more: Result<Vec<Group>> = (0..20)
            .map(|index| Group::connect(Arc::clone(&store), seat, Options::new(format!("g{index}"))))
            .collect();
        let more = more?;
        let fabrics: std::collections::HashSet<u128> =
            more.iter().map(|group| group.fabric().id().0).collect();
        // Both ranks are threads of this process, so there are two.
        assert!(fabrics.len() <= 2, "{} fabrics", fabrics.len());
        for group in &more {
            let mut sum = [1_i32; 3];
            group.all_reduce(&mut sum, ReduceOp::Sum)?;
            assert_eq!(sum, [2; 3]);
        }
        drop(first);
        more.iter().try_for_each(|group| group.start_barrier()?.wait())
    });
}

/// Each group has more under way than sockets hold, in both directions, and in the first group it is not received until the end.
#[test]
fn groups_share_their_connections_and_one_that_is_not_read_holds_up_no_other() {
    const MESSAGE: usize = 24 << 20;
    let store = Arc::new(Counting::default());
    ranks(&store, 2, &quick().only_tcp(), |first| {
        let store: Arc<dyn Store> = Arc::clone(&store) as Arc<dyn Store>;
        let seat = Seat { rank: first.rank(), size: 2 };
        let other = 1 - first.rank();
        let more: Result<Vec<Group>> = (0..20)
            .map(|index| {
                let options = Options::new(format!("g{index}")).timeout(Duration::from_secs(100)).only_tcp();
                Group::connect(Arc::clone(&store), seat, options)
            })
            .collect();
        let more = more?;
        let mut out = Buffer::from_slice(&vec![first.rank() as u8; MESSAGE]);
        let sent = first.background().start_send(out.lend(), other, Tag(3))?;
        for _ in 0..3 {
            let mut sums: Vec<Buffer> = more.iter().map(|_| Buffer::zeros(DType::I32, 1 << 17)).collect();
            let works: Result<Vec<_>> = more
                .iter()
                .zip(&mut sums)
                .map(|(group, sum)| {
                    sum.as_mut_bytes().fill(1);
                    group.start_all_reduce(sum.lend(), ReduceOp::Sum)
                })
                .collect();
            works?.into_iter().try_for_each(|work| work.wait())?;
            assert!(sums.iter().all(|sum| sum.as_bytes().iter().all(|byte| *byte == 2)));
        }
        assert!(!sent.is_done(), "it was not received");
        let mut into = Buffer::zeros(DType::U8, MESSAGE);
        first.start_recv(into.lend(), other, Tag(3))?.wait()?;
        sent.wait()?;
        assert!(into.as_bytes().iter().all(|byte| usize::from(*byte) == other));
        let lines = first.fabric().open_connections();
        assert!(lines <= 2, "{lines} connections with one process");
        more.iter().try_for_each(|group| group.start_barrier()?.wait())
    });
}
