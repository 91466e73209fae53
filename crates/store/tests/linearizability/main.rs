//! Many clients use a real server concurrently: does some sequential order explain what they saw?
//!
//! Eight clients do random operations on a few keys: some through [`TcpStore`](tenfold_store::TcpStore), some
//! over raw sockets with each message sent in pieces, some with several requests in flight. In every other
//! run connections are cut as well, in the middle of messages and of waits. Each operation is recorded with
//! the time before it was sent and the time after its answer; then the history of each key is checked
//! (`checker`).
//!
//! A run is identified by its seed: it decides which client sends what in which order and where messages are
//! cut. Only the interleaving of the clients depends on the machine. A failing seed prints how to run it
//! again. The same is done through relays, whose connections to the server are cut at any byte (`cutter`). The long run, a separate goal (S13), is
//!
//! ```text
//! TENFOLD_LINEARIZABILITY_SEEDS=10 TENFOLD_LINEARIZABILITY_OPS=17000 \
//!     cargo test --release -p tenfold-store --test linearizability histories
//! ```
//!
//! `TENFOLD_LINEARIZABILITY_SEED` is the first seed. Not here: what single operations mean (`model.rs`).

#![expect(clippy::disallowed_methods, reason = "histories are made of instants")]

mod checker;
mod clients;
mod cutter;
mod lost;

use std::collections::BTreeMap;

use checker::{Call, check};
use clients::{Path, Run};

/// A number from the environment, for long runs.
fn setting(name: &str, default: u64) -> u64 {
    let name = format!("TENFOLD_LINEARIZABILITY_{name}");
    match std::env::var(&name) {
        Err(_) => default,
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{name} is {text:?}, which is not a number")),
    }
}

#[test]
fn histories_are_linearizable_however_messages_and_connections_are_cut() {
    check_histories(Path::Direct, "histories_are");
}

#[test]
fn relayed_histories_are_linearizable() {
    check_histories(Path::Relays, "relayed");
}

#[test]
fn relayed_histories_are_linearizable_although_the_relays_lose_their_connections() {
    check_histories(Path::BrokenRelays, "although");
}

fn check_histories(path: Path, test: &str) {
    let (first, seeds, operations) = (setting("SEED", 1), setting("SEEDS", 10), setting("OPS", 1_700));
    for seed in first..first + seeds {
        let sessions = Run { seed, operations, cuts: seed % 2 == 0, path }.history();
        let count: usize = sessions.iter().map(Vec::len).sum();
        assert!(count as u64 >= operations, "{count} operations were recorded");
        for (name, sessions) in by_object(sessions) {
            if let Err(violation) = check(&sessions) {
                panic!(
                    "seed {seed}: what clients saw of `{name}` is not linearizable\n{violation}\n\
                     again: TENFOLD_LINEARIZABILITY_SEED={seed} TENFOLD_LINEARIZABILITY_SEEDS=1 \
                     TENFOLD_LINEARIZABILITY_OPS={operations} \
                     cargo test -p tenfold-store --test linearizability {test}"
                );
            }
        }
    }
}

/// A history that is linearizable object by object is linearizable as a whole, and much faster to check.
fn by_object(sessions: Vec<Vec<Call>>) -> BTreeMap<String, Vec<Vec<Call>>> {
    let mut objects = BTreeMap::<String, Vec<Vec<Call>>>::new();
    let count = sessions.len();
    for (index, session) in sessions.into_iter().enumerate() {
        for call in session {
            let name = clients::object_of(&call.request);
            objects.entry(name).or_insert_with(|| vec![Vec::new(); count])[index].push(call);
        }
    }
    objects.values_mut().for_each(|sessions| sessions.retain(|session| !session.is_empty()));
    objects
}
