//! What is in the store: keys under a prefix, grouped by what follows up to the next `/`.
//!
//! There may be millions of keys, and one thread serves all clients, so a survey is a [`Walk`] in short steps
//! with requests of clients in between. It may or may not see what is written meanwhile. If the map moves all
//! keys to grow (see `map`), the walk starts over, a few times. After that it continues, may count a key
//! twice or not at all, and reports that. What it gathers is bounded however many keys there are. The thread
//! that asked makes it readable.
//!
//! If all keys of a group are deeper down, the group is shown with the whole path that they share:
//! `/worker/attempt_0/`. Clients put a `/` in front of every key. At the root it belongs to the first name,
//! or there would be one group `/`.
//!
//! Not here: when steps are made, and how long an answer stays valid (`server/surveys`).

use std::collections::BinaryHeap;
use std::fmt::Write as _;
use std::hash::BuildHasher;

use foldhash::fast::RandomState;
use hashbrown::HashTable;
use serde::{Deserialize, Serialize};

use crate::map::{Map, Slot};
use crate::table::{Queue, Table};
use crate::value::Value;

/// Keys and groups of keys under a prefix, as they were a moment ago.
///
/// Sizes are those of values and queue items, without keys and overhead; ages are whole seconds since the last write.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct Survey {
    /// The prefix that was asked for, readable.
    pub prefix: String,
    /// The prefix's bytes, if `prefix` had to be changed to be readable.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefix_hex: Option<String>,
    /// Values and queues under the prefix, whether listed below or not.
    pub keys: u64,
    /// Bytes of their values and items.
    pub bytes: u64,
    /// Items in their queues.
    pub queue_items: u64,
    /// The largest first: by bytes, then by keys, then by name. At most [`Survey::GROUPS_MAX`].
    pub groups: Vec<SurveyGroup>,
    /// Keys that have no further `/`, by name, at most [`Survey::ENTRIES_MAX`].
    pub entries: Vec<SurveyEntry>,
    /// Whether there are more groups or keys than those listed.
    pub truncated: bool,
    /// The store grew so much during the survey that keys may have been counted twice or not at all.
    pub approximate: bool,
    /// How old this is: a survey that took the server long is not repeated immediately.
    pub seconds_ago: f64,
    /// How much of the server's time it took, and in how many steps between requests.
    pub cost_microseconds: u64,
    /// In how many steps between requests it was made.
    pub cost_steps: u64,
}

impl Survey {
    /// How many groups are listed.
    pub const GROUPS_MAX: usize = 500;
    /// How many keys are listed.
    pub const ENTRIES_MAX: usize = 500;
}

/// Keys with a common beginning.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct SurveyGroup {
    /// What all of them begin with; the prefix to ask for next.
    pub prefix: String,
    /// The same as bytes, if `prefix` had to be changed to be readable.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefix_hex: Option<String>,
    /// How many there are.
    pub keys: u64,
    /// Bytes of their values and items.
    pub bytes: u64,
    /// Seconds since the last write to any of them.
    pub newest_seconds: u64,
    /// Seconds since the last write to the one that was not written for longest.
    pub oldest_seconds: u64,
}

/// One key.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct SurveyEntry {
    /// Its name, readable.
    pub key: String,
    /// The same as bytes, if `key` had to be changed to be readable.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key_hex: Option<String>,
    /// Bytes of its value or items.
    pub bytes: u64,
    /// Seconds since the last write.
    pub age_seconds: u64,
    /// What is under it.
    pub kind: KeyKind,
    /// Items, if it is a queue.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub items: Option<u64>,
}

/// What is under a key. A value and a queue may have the same name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum KeyKind {
    #[default]
    /// A value.
    Value,
    /// A queue.
    Queue,
}

/// Groups that are counted separately; keys of further groups are only counted in the total. More than are
/// listed, so that those listed are the largest unless there are very many.
const GROUPS_KEPT: usize = 2048;
/// How often a walk starts over after the map has moved its keys.
const RESTARTS_MAX: u32 = 3;

/// Work of one step, in [`PLACE`]s: some 0.1 ms.
pub(crate) const STEP: usize = 16 << 10;
/// The cost of looking at an empty place.
const PLACE: usize = 1;
/// The cost of looking at a key, beyond its bytes; it may not be in the cache.
const KEY: usize = 16;
/// Bytes of a key that are compared and searched for the work of one [`PLACE`].
const BYTES: usize = 8;

// ── walking ────────────────────────────────────────────────────────────────────────────────────────────

/// A survey that has not seen the whole table yet.
#[derive(Debug)]
pub(crate) struct Walk {
    prefix: Value,
    in_queues: bool,
    /// The place to look at next.
    at: usize,
    moves: u64,
    restarts: u32,
    tally: Tally,
}

impl Walk {
    pub(crate) fn new(prefix: Value) -> Self {
        Walk { prefix, in_queues: false, at: 0, moves: 0, restarts: 0, tally: Tally::default() }
    }

    pub(crate) fn prefix(&self) -> &Value {
        &self.prefix
    }

    /// Looks at as much as `work` allows, at least one place; true when everything has been seen.
    pub(crate) fn step(&mut self, table: &Table, work: usize) -> bool {
        self.tally.steps += 1;
        self.notice_moves(table);
        let mut left = work.max(PLACE);
        if !self.in_queues {
            if !self.look(table.values(), &mut left, Sight::of_value) {
                return false;
            }
            (self.in_queues, self.at) = (true, 0);
        }
        self.look(table.queues(), &mut left, Sight::of_queue)
    }

    pub(crate) fn finish(self) -> Tally {
        self.tally
    }

    fn notice_moves(&mut self, table: &Table) {
        let moves = table.values().moves() + table.queues().moves();
        if moves == self.moves {
            return;
        }
        self.moves = moves;
        if self.at == 0 && !self.in_queues {
            return; // nothing seen yet
        }
        if self.restarts == RESTARTS_MAX {
            self.tally.approximate = true;
            return;
        }
        self.restarts += 1;
        let steps = self.tally.steps;
        self.tally = Tally { steps, ..Tally::default() };
        (self.in_queues, self.at) = (false, 0);
    }

    /// Continues through one map; true at its end.
    fn look<T>(&mut self, map: &Map<T>, left: &mut usize, see: impl Fn(&Slot<T>) -> Sight) -> bool {
        while self.at < map.places() {
            if *left == 0 {
                return false;
            }
            let work = match map.place(self.at) {
                None => PLACE,
                Some(slot) => {
                    self.tally.note(&self.prefix, &slot.key, see(slot));
                    KEY + slot.key.len() / BYTES
                }
            };
            *left = left.saturating_sub(work);
            self.at += 1;
        }
        true
    }
}

/// What a walk sees under a key.
#[derive(Clone, Copy, Debug)]
struct Sight {
    bytes: usize,
    items: Option<usize>,
    written: u32,
}

impl Sight {
    fn of_value(slot: &Slot<Value>) -> Self {
        Sight { bytes: slot.held.len(), items: None, written: slot.written }
    }

    fn of_queue(slot: &Slot<Queue>) -> Self {
        Sight { bytes: slot.held.bytes, items: Some(slot.held.items.len()), written: slot.written }
    }
}

/// What a walk has gathered: bounded, and not yet readable.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    keys: u64,
    bytes: u64,
    queue_items: u64,
    groups: HashTable<Group>,
    hasher: RandomState,
    /// Those that come first by name.
    entries: BinaryHeap<Entry>,
    truncated: bool,
    approximate: bool,
    steps: u64,
}

#[derive(Debug)]
struct Group {
    /// One of its keys. Its first `name` bytes are the group's name; all keys of the group share the first `common`.
    sample: Value,
    name: usize,
    common: usize,
    keys: u64,
    bytes: u64,
    newest: u32,
    oldest: u32,
}

#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Entry {
    key: Value,
    kind: KeyKind,
    items: u64,
    bytes: u64,
    written: u32,
}

impl Tally {
    fn note(&mut self, prefix: &[u8], key: &Value, sight: Sight) {
        if !key.starts_with(prefix) {
            return;
        }
        self.keys += 1;
        self.bytes += sight.bytes as u64;
        self.queue_items += sight.items.unwrap_or(0) as u64;
        match group_of(prefix, key) {
            Some(name) => self.note_group(key, name, sight),
            None => self.note_entry(key, sight),
        }
    }

    fn note_group(&mut self, key: &Value, name: usize, sight: Sight) {
        let hash = self.hasher.hash_one(&key[..name]);
        let is_named = |group: &Group| group.sample[..group.name] == key[..name];
        let Some(group) = self.groups.find_mut(hash, is_named) else {
            if self.groups.len() == GROUPS_KEPT {
                self.truncated = true;
                return;
            }
            let group = Group {
                sample: key.clone(),
                name,
                common: key.len(),
                keys: 1,
                bytes: sight.bytes as u64,
                newest: sight.written,
                oldest: sight.written,
            };
            let rehash = |group: &Group| self.hasher.hash_one(&group.sample[..group.name]);
            self.groups.insert_unique(hash, group, rehash);
            return;
        };
        group.keys += 1;
        group.bytes += sight.bytes as u64;
        group.newest = group.newest.max(sight.written);
        group.oldest = group.oldest.min(sight.written);
        if group.common > name {
            let pairs = group.sample[name..group.common].iter().zip(&key[name..]);
            group.common = name + pairs.take_while(|(a, b)| a == b).count();
        }
    }

    fn note_entry(&mut self, key: &Value, sight: Sight) {
        let kind = if sight.items.is_some() { KeyKind::Queue } else { KeyKind::Value };
        if self.entries.len() == Survey::ENTRIES_MAX {
            self.truncated = true;
            let last = self.entries.peek().expect("it is full");
            if (key, kind) >= (&last.key, last.kind) {
                return;
            }
            self.entries.pop();
        }
        self.entries.push(Entry {
            key: key.clone(),
            kind,
            items: sight.items.unwrap_or(0) as u64,
            bytes: sight.bytes as u64,
            written: sight.written,
        });
    }
}

/// How much of `key` is the name of its group, including the `/` at its end; nothing if it is a key of the
/// prefix itself.
fn group_of(prefix: &[u8], key: &[u8]) -> Option<usize> {
    let start = if prefix.is_empty() && key.first() == Some(&b'/') { 1 } else { prefix.len() };
    key[start..].iter().position(|&byte| byte == b'/').map(|slash| start + slash + 1)
}

// ── making it readable ─────────────────────────────────────────────────────────────────────────────────

/// Bytes of keys that are listed in full; otherwise a store with many keys of 8 KiB would make an answer of
/// many megabytes.
const LISTED_BYTES_MAX: usize = 256 << 10;

impl Tally {
    /// The survey as of second `now` of the table's time. Not for the server's thread: it takes a while.
    pub(crate) fn show(&self, prefix: &[u8], now: u32) -> Survey {
        let age = |written: u32| u64::from(now.saturating_sub(written));
        let mut groups: Vec<&Group> = self.groups.iter().collect();
        groups.sort_unstable_by(|a, b| {
            (b.bytes, b.keys, a.shown()).cmp(&(a.bytes, a.keys, b.shown())) // largest first, then by name
        });
        let mut entries: Vec<&Entry> = self.entries.iter().collect();
        entries.sort_unstable();
        let mut room = LISTED_BYTES_MAX;
        let mut fits = |bytes: &[u8]| {
            let fits = bytes.len() <= room;
            room = room.saturating_sub(bytes.len());
            fits
        };
        let listed = groups.len().min(Survey::GROUPS_MAX) + entries.len();
        groups =
            groups.into_iter().take(Survey::GROUPS_MAX).take_while(|group| fits(group.shown())).collect();
        entries = entries.into_iter().take_while(|entry| fits(&entry.key)).collect();
        let truncated =
            self.truncated || self.groups.len() > Survey::GROUPS_MAX || groups.len() + entries.len() < listed;
        let (text, prefix_hex) = readable(prefix);
        Survey {
            prefix: text,
            prefix_hex,
            keys: self.keys,
            bytes: self.bytes,
            queue_items: self.queue_items,
            groups: groups
                .into_iter()
                .map(|group| {
                    let (prefix, prefix_hex) = readable(group.shown());
                    SurveyGroup {
                        prefix,
                        prefix_hex,
                        keys: group.keys,
                        bytes: group.bytes,
                        newest_seconds: age(group.newest),
                        oldest_seconds: age(group.oldest),
                    }
                })
                .collect(),
            entries: entries
                .into_iter()
                .map(|entry| {
                    let (key, key_hex) = readable(&entry.key);
                    SurveyEntry {
                        key,
                        key_hex,
                        bytes: entry.bytes,
                        age_seconds: age(entry.written),
                        kind: entry.kind,
                        items: (entry.kind == KeyKind::Queue).then_some(entry.items),
                    }
                })
                .collect(),
            truncated,
            approximate: self.approximate,
            cost_steps: self.steps,
            ..Survey::default()
        }
    }
}

impl Group {
    /// What all its keys share, up to its last `/`.
    fn shown(&self) -> &[u8] {
        let common = &self.sample[..self.common];
        let end = common.iter().rposition(|&byte| byte == b'/').map_or(self.name, |slash| slash + 1);
        &common[..end]
    }
}

/// Bytes as text that is safe on a page or a terminal, and as hexadecimal digits if the text differs from the
/// bytes.
pub(crate) fn readable(bytes: &[u8]) -> (String, Option<String>) {
    if let Ok(text) = str::from_utf8(bytes)
        && !text.chars().any(char::is_control)
    {
        return (text.into(), None);
    }
    let mut text = String::new();
    for part in String::from_utf8_lossy(bytes).chars() {
        match part.is_control() {
            true => text.extend(part.escape_unicode()),
            false => text.push(part),
        }
    }
    let mut hex = String::with_capacity(2 * bytes.len());
    for byte in bytes {
        let _ = write!(hex, "{byte:02x}"); // writing to a string cannot fail
    }
    (text, Some(hex))
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "a table needs a time, any time")]
mod tests;
