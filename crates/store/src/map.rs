//! A map from bytes that can be walked in small steps.
//!
//! `std`'s map cannot resume an interrupted walk. This one has numbered places: a walk looks at some of them,
//! remembers the number, and resumes after other clients have read and written. A key stays in its place
//! until the map grows. [`Map::moves`] counts these growths, so that a walk knows that its number has become
//! invalid.
//!
//! Every key carries the second of its last write.

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

/// The number of tables that the map consists of. A full table moves all its keys to a larger one, and all
/// clients wait: with four million keys in one table, that took 0.4 to 2 s.
const TABLES: usize = 128;

#[derive(Debug)]
pub(crate) struct Map<T> {
    tables: Box<[HashTable<Slot<T>>]>,
    /// The number of the first place of each table, and one beyond the last.
    starts: Vec<usize>,
    len: usize,
    hasher: RandomState,
    moves: u64,
}

impl<T> Default for Map<T> {
    fn default() -> Self {
        Map {
            tables: (0..TABLES).map(|_| HashTable::new()).collect(),
            starts: vec![0; TABLES + 1],
            len: 0,
            hasher: RandomState::default(),
            moves: 0,
        }
    }
}

/// Which table has keys with this hash. A table uses the lowest bits and the seven highest.
#[inline]
fn table_of(hash: u64) -> usize {
    (hash >> 32) as usize % TABLES
}

impl<T> Map<T> {
    #[inline]
    pub(crate) fn get(&self, key: &[u8]) -> Option<&T> {
        let hash = self.hasher.hash_one(key);
        self.tables[table_of(hash)].find(hash, |slot| *slot.key == *key).map(|slot| &slot.held)
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, key: &[u8]) -> Option<&mut Slot<T>> {
        let hash = self.hasher.hash_one(key);
        self.tables[table_of(hash)].find_mut(hash, |slot| *slot.key == *key)
    }

    pub(crate) fn contains(&self, key: &[u8]) -> bool {
        self.get(key).is_some()
    }

    /// Adds a key that does not exist.
    pub(crate) fn insert(&mut self, key: &[u8], held: T, written: u32) {
        let hash = self.hasher.hash_one(key);
        let rehash = |slot: &Slot<T>| self.hasher.hash_one(&*slot.key);
        let table = &mut self.tables[table_of(hash)];
        let is_full = table.len() == table.capacity();
        if is_full {
            // Grow now rather than inside the insertion, so that the move is counted.
            table.reserve(1, rehash);
        }
        let slot = Slot { key: key.into(), held, written };
        table.insert_unique(hash, slot, rehash);
        self.len += 1;
        if is_full {
            self.number_places();
        }
    }

    /// Removes a key; returns its stored name and its value.
    pub(crate) fn remove(&mut self, key: &[u8]) -> Option<(Value, T)> {
        let hash = self.hasher.hash_one(key);
        let entry = self.tables[table_of(hash)].find_entry(hash, |slot| *slot.key == *key).ok()?;
        let slot = entry.remove().0;
        self.len -= 1;
        Some((slot.key, slot.held))
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Slot<T>> {
        self.tables.iter().flat_map(HashTable::iter)
    }

    // ── walking ────────────────────────────────────────────────────────────────────────────────────────

    /// Numbers of places are below this.
    pub(crate) fn places(&self) -> usize {
        self.starts[TABLES]
    }

    /// What is at a place; usually nothing, if the map was larger before.
    #[inline]
    pub(crate) fn place(&self, number: usize) -> Option<&Slot<T>> {
        let after = self.starts.partition_point(|start| *start <= number);
        let table = after.checked_sub(1)?;
        self.tables.get(table)?.get_bucket(number - self.starts[table])
    }

    /// How often keys have been moved to other places.
    pub(crate) fn moves(&self) -> u64 {
        self.moves
    }

    /// A table has grown, and the places of the tables after it have other numbers.
    #[cold]
    fn number_places(&mut self) {
        let mut next = 0;
        for (start, table) in self.starts.iter_mut().zip(&self.tables) {
            *start = next;
            next += table.num_buckets();
        }
        self.starts[TABLES] = next;
        self.moves += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    /// A client that waits while a table grows waits for a small part of all keys.
    #[test]
    fn keys_are_spread_over_all_tables() {
        let mut map = Map::default();
        for number in 0..100 * TABLES {
            map.insert(number.to_string().as_bytes(), (), 0);
        }
        let largest = map.tables.iter().map(HashTable::len).max();
        assert!(largest.is_some_and(|largest| largest < 200), "{largest:?} of {} keys", map.len());
    }

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
