//! Removes the keys outside a prefix, in small steps.

use super::Table;
use crate::value::Value;

/// Removes every key and queue that does not begin with a prefix, in small steps, because there may be
/// millions. Waiting clients continue to wait.
#[derive(Debug)]
pub(crate) struct Forgetting {
    pub(super) all_but: Value,
    pub(super) next: usize,
    pub(super) next_queue: usize,
    /// The state of the maps that the walk's numbers belong to.
    pub(super) moves: (u64, u64),
    pub(super) count: usize,
}

impl Forgetting {
    /// Places looked at in one step.
    pub(super) const STEP: usize = 4096;

    pub(crate) fn new(table: &Table, all_but: Value) -> Self {
        Forgetting { all_but, next: 0, next_queue: 0, moves: table.moves(), count: 0 }
    }

    /// How many keys and queues it has removed.
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// Removes some; true when none is left.
    pub(crate) fn step(&mut self, table: &mut Table) -> bool {
        if self.moves != table.moves() {
            (self.next, self.next_queue, self.moves) = (0, 0, table.moves()); // the maps have moved since the last step
        }
        let is_other = |key: &&Value| !key.starts_with(&self.all_but);
        let places = self.next..table.map.places().min(self.next + Self::STEP);
        self.next += Self::STEP;
        let keys = places.filter_map(|place| table.map.place(place)).map(|slot| &slot.key);
        let keys: Vec<Value> = keys.filter(is_other).cloned().collect();
        for key in &keys {
            table.delete(key);
        }
        let places = self.next_queue..table.queues.places().min(self.next_queue + Self::STEP);
        self.next_queue += Self::STEP;
        let queues = places.filter_map(|place| table.queues.place(place)).map(|slot| &slot.key);
        let queues: Vec<Value> = queues.filter(is_other).cloned().collect();
        for queue in &queues {
            while table.pop(queue).is_some() {}
        }
        self.count += keys.len() + queues.len();
        drop(keys);
        table.sweep(); // the list of keys held their names
        self.next >= table.map.places() && self.next_queue >= table.queues.places()
    }
}
