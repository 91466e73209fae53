//! Finds the ranks of a large group when they are first needed.
//!
//! A rank of a large group talks to few others: those on its host, and in most algorithms some tens elsewhere. It reads the
//! contacts of the likely ones when the group is made, and the others here, in the background: the engine must not wait for
//! the store. If the store has ended by then, ranks that were not looked up cannot be reached any more.

#![expect(clippy::disallowed_methods, reason = "asks the store on a thread of its own")]

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::Builder;

use tenfold_plan::Rank;
use tenfold_store::{Store, StoreExt as _};

use super::cards::{Brief, Contact};
use super::connect::{fabric_id, whereabouts};
use crate::fabric::{Fabric, Peer};
use crate::fault::{ErrorKind, Fault, store_fault};

pub(crate) struct Directory {
    fabric: Weak<Fabric>,
    store: Arc<dyn Store>,
    /// Contacts are under `<prefix>/<rank>`.
    prefix: String,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    known: HashMap<Rank, Result<Contact, Fault>>,
    wanted: HashSet<Rank>,
    /// Does a thread look for those that are wanted?
    is_asking: bool,
}

impl Directory {
    pub(super) fn new(fabric: &Arc<Fabric>, store: Arc<dyn Store>, prefix: String) -> Self {
        Directory { fabric: Arc::downgrade(fabric), store, prefix, state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The process of `rank`, which is not on this host; nothing as long as it is being looked up. The waiting thread is
    /// woken when it is known.
    pub(crate) fn poll(self: &Arc<Self>, fabric: &Fabric, rank: Rank) -> Result<Option<Arc<Peer>>, Fault> {
        let mut state = self.state();
        if let Some(known) = state.known.get(&rank) {
            let contact = known.as_ref().map_err(Fault::clone)?;
            let peer = fabric.peer(fabric_id(rank, contact)?);
            peer.set_whereabouts(whereabouts(contact, false));
            return Ok(Some(peer));
        }
        state.wanted.insert(rank);
        if !state.is_asking {
            let this = Arc::clone(self);
            Builder::new()
                .name("tenfold-cards".to_string())
                .spawn(move || this.ask())
                .map_err(|error| Fault::io("cannot start a thread that looks up ranks", error))?;
            state.is_asking = true;
        }
        Ok(None)
    }

    /// Reads the contacts of all that are wanted, until no more are.
    fn ask(&self) {
        loop {
            let mut state = self.state();
            let ranks: Vec<Rank> = state.wanted.drain().collect();
            if ranks.is_empty() {
                state.is_asking = false;
                return;
            }
            drop(state);
            self.look_up(&ranks);
            if let Some(fabric) = self.fabric.upgrade() {
                fabric.bell.ring();
                fabric.wake_helper();
            }
        }
    }
}

impl Directory {
    /// The processes of those ranks that can be looked up. Blocks.
    pub(super) fn find(&self, fabric: &Fabric, ranks: &[Rank]) -> Vec<(Rank, Arc<Peer>)> {
        let is_known = |rank: &Rank| matches!(self.state().known.get(rank), Some(Ok(_)));
        let unknown: Vec<Rank> = ranks.iter().copied().filter(|rank| !is_known(rank)).collect();
        if !unknown.is_empty() {
            self.look_up(&unknown);
        }
        let state = self.state();
        let find = |rank: &Rank| {
            let contact = state.known.get(rank)?.as_ref().ok()?;
            let peer = fabric.peer(fabric_id(*rank, contact).ok()?);
            peer.set_whereabouts(whereabouts(contact, false));
            Some((*rank, peer))
        };
        ranks.iter().filter_map(find).collect()
    }

    fn look_up(&self, ranks: &[Rank]) {
        let keys: Vec<String> = ranks.iter().map(|rank| format!("{}/{rank}", self.prefix)).collect();
        let values = self.store.multi_get(&keys).map_err(store_fault);
        let contact = |rank: Rank, at: usize| -> Result<Contact, Fault> {
            let values = values.as_ref().map_err(|fault| gone(rank, fault))?;
            let brief = values.get(at).and_then(|value| serde_json::from_slice::<Brief>(value).ok());
            brief.map(Contact::from).ok_or_else(|| {
                Fault::new(ErrorKind::Protocol, format!("rank {rank} has no proper card")).peer(rank)
            })
        };
        let found: Vec<_> = ranks.iter().enumerate().map(|(at, rank)| (*rank, contact(*rank, at))).collect();
        self.state().known.extend(found);
    }
}

impl std::fmt::Debug for Directory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Directory({} at {})", self.prefix, self.store.name())
    }
}

#[cold]
fn gone(rank: Rank, fault: &Fault) -> Fault {
    let message = format!("cannot look up how to reach rank {rank}: {}", fault.message);
    let hint = "groups of more than 256 ranks need their store for as long as ranks talk to each other for the first time";
    Fault::new(ErrorKind::Store, message).peer(rank).hint(hint)
}

/// Ranks that `rank` is likely to talk to: those of its own place, rank 0, and those at one, two and three times a power of
/// four, which rings, trees and the barrier use.
pub(super) fn neighbours(rank: Rank, places: &[Rank]) -> Vec<Rank> {
    let size = places.len();
    let mut wanted: Vec<Rank> = (0..size).filter(|other| places[*other] == places[rank]).collect();
    wanted.push(0);
    let powers = std::iter::successors(Some(1), |power| Some(4 * power)).take_while(|power| *power < size);
    for distance in powers.flat_map(|power| [power, 2 * power, 3 * power]).filter(|it| *it < size) {
        wanted.extend([(rank + distance) % size, (rank + size - distance) % size]);
    }
    wanted.sort_unstable();
    wanted.dedup();
    wanted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_of_a_large_group_reads_some_tens_of_cards() {
        let places: Vec<Rank> = (0..4096).map(|rank| rank / 8 * 8).collect();
        let wanted = neighbours(2051, &places);
        assert!(wanted.len() < 50, "{}", wanted.len());
        for other in [0, 2048, 2055, 2050, 2052, 3, 4099 % 4096] {
            assert!(wanted.contains(&other), "{other}");
        }
    }
}
