//! Plain data, as a dump holds it: what JSON and the safe part of pickle have in common.
//!
//! Containers are in one [`Heap`] and are referred to by number, because a pickle may mention the same list
//! twice, or a list within itself. Nothing here follows such a reference by itself: a reader goes only as
//! deep as the format it expects, so that a small file cannot expand into a large one. The heap counts what
//! it holds and refuses more than [`ITEMS_MAX`].

use std::collections::HashMap;
use std::sync::Arc;

/// Values in all containers of a file together: ten times what a ring of 20,000 operations with deep stacks has.
pub(super) const ITEMS_MAX: usize = 16_000_000;
/// Lists and dictionaries of one file.
pub(super) const CONTAINERS_MAX: usize = 4_000_000;

/// The longest number, in characters.
const DIGITS_MAX: usize = 20;

/// One value of 16 bytes; text and containers are in the heap.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Plain {
    None,
    Bool(bool),
    Int(i64),
    Float(f64),
    Text(u32),
    /// The contents of bytes are not needed; only their presence is kept.
    Bytes,
    List(u32),
    Dict(u32),
}

#[derive(Debug, Default)]
pub(super) struct Heap {
    lists: Vec<Vec<Plain>>,
    dicts: Vec<Vec<(Plain, Plain)>>,
    items: usize,
    texts: Vec<Arc<str>>,
    numbers: HashMap<Arc<str>, u32>,
}

/// A key of dictionaries of one heap. Comparing numbers is quicker than comparing text, so a reader of many
/// dictionaries with the same keys looks these up once.
#[derive(Clone, Copy, Debug)]
pub(super) struct Key(Option<u32>);

/// The file holds more than any dump does.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct TooMuch;

impl Heap {
    /// The text as a value. Equal texts are stored once: a dump repeats its file names thousands of times.
    pub(super) fn text(&mut self, text: &str) -> Plain {
        if let Some(&known) = self.numbers.get(text) {
            return Plain::Text(known);
        }
        let new: Arc<str> = text.into();
        let number = self.texts.len() as u32; // a file has fewer bytes than 2³²
        self.texts.push(new.clone());
        self.numbers.insert(new, number);
        Plain::Text(number)
    }

    pub(super) fn list(&mut self, items: Vec<Plain>) -> Result<Plain, TooMuch> {
        self.count(items.len())?;
        self.lists.push(items);
        Ok(Plain::List((self.lists.len() - 1) as u32))
    }

    pub(super) fn dict(&mut self) -> Result<Plain, TooMuch> {
        self.count(0)?;
        self.dicts.push(Vec::new());
        Ok(Plain::Dict((self.dicts.len() - 1) as u32))
    }

    pub(super) fn extend_list(
        &mut self,
        list: u32,
        items: impl ExactSizeIterator<Item = Plain>,
    ) -> Result<(), TooMuch> {
        self.count(items.len())?;
        self.lists[list as usize].extend(items);
        Ok(())
    }

    pub(super) fn insert(&mut self, dict: u32, key: Plain, value: Plain) -> Result<(), TooMuch> {
        self.count(1)?;
        self.dicts[dict as usize].push((key, value));
        Ok(())
    }

    pub(super) fn extend_dict(
        &mut self,
        dict: u32,
        pairs: impl ExactSizeIterator<Item = (Plain, Plain)>,
    ) -> Result<(), TooMuch> {
        self.count(pairs.len())?;
        self.dicts[dict as usize].extend(pairs);
        Ok(())
    }

    fn count(&mut self, more: usize) -> Result<(), TooMuch> {
        self.items += more;
        let containers = self.lists.len() + self.dicts.len();
        if self.items > ITEMS_MAX || containers >= CONTAINERS_MAX { Err(TooMuch) } else { Ok(()) }
    }

    pub(super) fn view<'a>(&'a self, value: &'a Plain) -> View<'a> {
        View { heap: self, value }
    }
}

/// A value with the heap that its containers are in.
#[derive(Clone, Copy, Debug)]
pub(super) struct View<'a> {
    heap: &'a Heap,
    value: &'a Plain,
}

const NOTHING: &Plain = &Plain::None;

impl<'a> View<'a> {
    /// What a dictionary has under this key: the last value, as in Python. Nothing if it is not a dictionary
    /// or has no such key.
    pub(super) fn get(self, key: &str) -> View<'a> {
        self.at(self.key(key))
    }

    pub(super) fn key(self, key: &str) -> Key {
        Key(self.heap.numbers.get(key).copied())
    }

    /// The same for a key of this heap that was looked up before.
    pub(super) fn at(self, key: Key) -> View<'a> {
        let found = match (self.value, key) {
            (Plain::Dict(dict), Key(Some(number))) => self.heap.dicts[*dict as usize]
                .iter()
                .rev()
                .find(|(name, _)| matches!(name, Plain::Text(name) if *name == number)),
            _ => None,
        };
        View { heap: self.heap, value: found.map_or(NOTHING, |(_, value)| value) }
    }

    pub(super) fn is_none(self) -> bool {
        *self.value == Plain::None
    }

    pub(super) fn is_dict(self) -> bool {
        matches!(self.value, Plain::Dict(_))
    }

    pub(super) fn is_list(self) -> bool {
        matches!(self.value, Plain::List(_))
    }

    pub(super) fn pairs(self) -> impl Iterator<Item = (View<'a>, View<'a>)> {
        let heap = self.heap;
        let pairs = match self.value {
            Plain::Dict(dict) => &heap.dicts[*dict as usize][..],
            _ => &[],
        };
        pairs.iter().map(move |(key, value)| (heap.view(key), heap.view(value)))
    }

    /// How many pairs a dictionary has, which is the cost of a look-up.
    pub(super) fn pairs_len(self) -> usize {
        match self.value {
            Plain::Dict(dict) => self.heap.dicts[*dict as usize].len(),
            _ => 0,
        }
    }

    pub(super) fn items(self) -> impl ExactSizeIterator<Item = View<'a>> {
        let heap = self.heap;
        let items = match self.value {
            Plain::List(list) => &heap.lists[*list as usize][..],
            _ => &[],
        };
        items.iter().map(move |item| heap.view(item))
    }

    pub(super) fn text(self) -> Option<Arc<str>> {
        match self.value {
            Plain::Text(text) => Some(self.heap.texts[*text as usize].clone()),
            _ => None,
        }
    }

    /// A number, or a text that contains one: PyTorch's JSON writes some of its numbers as text.
    pub(super) fn integer(self) -> Option<i64> {
        match self.value {
            Plain::Int(number) => Some(*number),
            Plain::Float(number) if number.fract() == 0.0 && number.abs() < 9e15 => Some(*number as i64),
            Plain::Text(text) => {
                let text = &self.heap.texts[*text as usize];
                // A million zeros are a number too.
                (text.len() <= DIGITS_MAX).then(|| text.parse().ok()).flatten()
            }
            _ => None,
        }
    }

    pub(super) fn number(self) -> Option<f64> {
        match self.value {
            Plain::Float(number) => Some(*number),
            Plain::Int(number) => Some(*number as f64),
            _ => None,
        }
    }

    pub(super) fn truth(self) -> Option<bool> {
        match self.value {
            Plain::Bool(truth) => Some(*truth),
            _ => None,
        }
    }

    /// What kind of value it is, for an error.
    pub(super) fn kind(self) -> &'static str {
        match self.value {
            Plain::None => "nothing",
            Plain::Bool(_) => "a truth value",
            Plain::Int(_) | Plain::Float(_) => "a number",
            Plain::Text(_) => "text",
            Plain::Bytes => "bytes",
            Plain::List(_) => "a list",
            Plain::Dict(_) => "a dictionary",
        }
    }
}

#[cfg(test)]
impl Heap {
    /// How many values and containers there are.
    pub(super) fn size(&self) -> usize {
        self.items + self.lists.len() + self.dicts.len()
    }
}
