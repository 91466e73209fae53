//! A map from bytes that can be walked a little at a time.
//!
//! `std`'s map cannot go on where a walk stopped. This one has numbered places: a walk looks at some, remembers the
//! number, and comes back after others have read and written. A key stays in its place until the map makes room by moving
//! everything; [`Map::moves`] counts these, so that a walk knows that its number means nothing any more.
//!
//! Every key has the second of its last write with it.

use foldhash::fast::RandomState;
use hashbrown::HashTable;
use std::hash::BuildHasher;

use crate::value::Value;

/// What is under one key.
#[derive(Debug)]
pub(crate) struct Slot<T> {
    pub(crate) key: Value,
    pub(crate) held: T,
    /// When it was last written, in seconds of the table's time.
    pub(crate) written: u32,
}

// What a key costs in memory: see `ENTRY` in `table`.
const _: () = assert!(size_of::<Slot<Value>>() == 56);

#[derive(Debug)]
pub(crate) struct Map<T> {
    table: HashTable<Slot<T>>,
    hasher: RandomState,
    moves: u64,
}

impl<T> Default for Map<T> {
    fn default() -> Self {
        Map { table: HashTable::new(), hasher: RandomState::default(), moves: 0 }
    }
}

impl<T> Map<T> {
    #[inline]
    pub(crate) fn get(&self, key: &[u8]) -> Option<&T> {
        self.table.find(self.hasher.hash_one(key), |slot| *slot.key == *key).map(|slot| &slot.held)
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, key: &[u8]) -> Option<&mut Slot<T>> {
        self.table.find_mut(self.hasher.hash_one(key), |slot| *slot.key == *key)
    }

    pub(crate) fn contains(&self, key: &[u8]) -> bool {
        self.get(key).is_some()
    }

    /// Adds a key that is not there.
    pub(crate) fn insert(&mut self, key: &[u8], held: T, written: u32) {
        if self.table.len() == self.table.capacity() {
            // Now rather than inside of the insertion, so that it is known. All keys are hashed again, so with another seed: who
            // has found out keys that are slow to look up has to begin again.
            self.hasher = RandomState::default();
            self.table.reserve(1, |slot| self.hasher.hash_one(&*slot.key));
            self.moves += 1;
        }
        let rehash = |slot: &Slot<T>| self.hasher.hash_one(&*slot.key);
        let slot = Slot { key: key.into(), held, written };
        self.table.insert_unique(self.hasher.hash_one(key), slot, rehash);
    }

    /// Removes a key; its name as it was held, and what was under it.
    pub(crate) fn remove(&mut self, key: &[u8]) -> Option<(Value, T)> {
        let entry = self.table.find_entry(self.hasher.hash_one(key), |slot| *slot.key == *key).ok()?;
        let slot = entry.remove().0;
        Some((slot.key, slot.held))
    }

    pub(crate) fn len(&self) -> usize {
        self.table.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.table.is_empty()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Slot<T>> {
        self.table.iter()
    }

    // ── walking ────────────────────────────────────────────────────────────────────────────────────────

    /// Numbers of places are below this.
    pub(crate) fn places(&self) -> usize {
        self.table.num_buckets()
    }

    /// What is at a place; most often nothing, if the map was larger once.
    #[inline]
    pub(crate) fn place(&self, number: usize) -> Option<&Slot<T>> {
        self.table.get_bucket(number)
    }

    /// How often everything has been moved to another place.
    pub(crate) fn moves(&self) -> u64 {
        self.moves
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    proptest! {
        #[test]
        fn it_holds_what_a_map_of_the_standard_library_holds_and_keys_stay_in_place_between_moves(
            steps in prop::collection::vec((0_u16..300, any::<bool>()), 0..2000),
        ) {
            let (mut map, mut model) = (Map::default(), HashMap::new());
            let mut places: HashMap<Value, usize> = HashMap::new();
            let mut moves = 0;
            for (time, (key, is_write)) in steps.into_iter().enumerate() {
                let key = Value::from(key.to_string().as_str());
                if is_write {
                    match map.get_mut(&key) {
                        Some(slot) => (slot.held, slot.written) = (time, time as u32),
                        None => map.insert(&key, time, time as u32),
                    }
                    model.insert(key, time);
                } else {
                    prop_assert_eq!(map.remove(&key).map(|(_, held)| held), model.remove(&key));
                }
                if map.moves() != moves {
                    (moves, places) = (map.moves(), HashMap::new());
                }
                for number in 0..map.places() {
                    let Some(slot) = map.place(number) else { continue };
                    prop_assert_eq!(slot.written as usize, slot.held);
                    prop_assert_eq!(model.get(&slot.key), Some(&slot.held));
                    let before = places.insert(slot.key.clone(), number);
                    prop_assert!(before.is_none_or(|before| before == number || !model.contains_key(&slot.key)));
                }
                places.retain(|key, _| model.contains_key(key));
                prop_assert_eq!(map.len(), model.len());
                prop_assert_eq!((0..map.places()).filter(|&number| map.place(number).is_some()).count(), map.len());
            }
        }
    }
}
