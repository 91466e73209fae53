//! Bytes that a store keeps: a key, a value, an item of a queue.
//!
//! Most are short: counters, flags, addresses, names of keys. Those are stored inside the table's slot, so
//! that finding, comparing and answering one touches no other memory and allocates nothing. Long ones are
//! shared: a reply of many megabytes is a pointer.

use std::borrow::Borrow;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::ops::Deref;
use std::sync::Arc;

/// What fits beside the length into the space that the long form needs anyway.
const SHORT: usize = 22;

/// Immutable bytes, cheap to clone. Dereferences to `[u8]`.
///
/// ```
/// use tenfold_store::Value;
///
/// let value = Value::from("blue");
/// assert_eq!(value, b"blue");
/// assert_eq!(value.len(), 4);
/// ```
#[derive(Clone)]
pub struct Value(Form);

#[derive(Clone)]
enum Form {
    Short {
        length: u8,
        bytes: [u8; SHORT],
    },
    Long(Arc<[u8]>),
    /// Long and appended to: the next bytes are added without copying the whole, as long as there is no other
    /// reference.
    Grown(Arc<Vec<u8>>),
}

const _: () = assert!(size_of::<Value>() == 24);

impl Value {
    /// Overwrites the bytes in place; false if they are shared or of another length.
    #[inline]
    pub(crate) fn rewrite(&mut self, new: &[u8]) -> bool {
        match &mut self.0 {
            Form::Short { .. } if new.len() <= SHORT => {
                *self = Value::from(new);
                true
            }
            Form::Long(bytes) if bytes.len() == new.len() => match Arc::get_mut(bytes) {
                Some(place) => {
                    place.copy_from_slice(new);
                    true
                }
                None => false,
            },
            Form::Grown(bytes) if bytes.len() == new.len() => match Arc::get_mut(bytes) {
                Some(place) => {
                    place.copy_from_slice(new);
                    true
                }
                None => false,
            },
            _ => false,
        }
    }

    /// Adds bytes at the end in place; false if the value is shared, or was never appended to.
    pub(crate) fn extend(&mut self, more: &[u8]) -> bool {
        let Form::Grown(bytes) = &mut self.0 else { return false };
        let Some(bytes) = Arc::get_mut(bytes) else { return false };
        if bytes.capacity() - bytes.len() < more.len() {
            bytes.reserve_exact(more.len() + spare(bytes.len()));
        }
        bytes.extend_from_slice(more);
        true
    }

    /// A value with `more` at its end, which can grow further without a copy.
    pub(crate) fn grown(&self, more: &[u8]) -> Value {
        let length = self.len() + more.len();
        let mut bytes = Vec::with_capacity(length + spare(length));
        bytes.extend_from_slice(self);
        bytes.extend_from_slice(more);
        Value(Form::Grown(Arc::new(bytes)))
    }

    /// Whether another reference to the same memory exists.
    pub(crate) fn is_shared(&self) -> bool {
        match &self.0 {
            Form::Short { .. } => false,
            Form::Long(bytes) => Arc::strong_count(bytes) > 1,
            Form::Grown(bytes) => Arc::strong_count(bytes) > 1,
        }
    }
}

/// Spare capacity for later appends, so that many short pieces do not move a long value each time. It is not
/// counted, because the system only provides memory for pages that are written to.
fn spare(length: usize) -> usize {
    (length / 16).min(1 << 20)
}

impl Deref for Value {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        match &self.0 {
            Form::Short { length, bytes } => &bytes[..usize::from(*length)],
            Form::Long(bytes) => bytes,
            Form::Grown(bytes) => bytes,
        }
    }
}

impl From<&[u8]> for Value {
    #[inline]
    fn from(bytes: &[u8]) -> Self {
        if bytes.len() > SHORT {
            return Value(Form::Long(bytes.into()));
        }
        let mut short = [0; SHORT];
        short[..bytes.len()].copy_from_slice(bytes);
        Value(Form::Short { length: bytes.len() as u8, bytes: short })
    }
}

impl Default for Value {
    fn default() -> Self {
        Value::from("")
    }
}

impl<const N: usize> From<&[u8; N]> for Value {
    fn from(bytes: &[u8; N]) -> Self {
        bytes.as_slice().into()
    }
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        text.as_bytes().into()
    }
}

impl From<Vec<u8>> for Value {
    fn from(bytes: Vec<u8>) -> Self {
        if bytes.len() > SHORT { Value(Form::Long(bytes.into())) } else { bytes.as_slice().into() }
    }
}

// As a key of a map, look-ups use plain bytes: equality, order and hash must be those of the bytes.

impl Borrow<[u8]> for Value {
    #[inline]
    fn borrow(&self) -> &[u8] {
        self
    }
}

impl AsRef<[u8]> for Value {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl PartialEq for Value {
    #[inline]
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl Eq for Value {}

impl PartialEq<[u8]> for Value {
    fn eq(&self, other: &[u8]) -> bool {
        **self == *other
    }
}

impl<const N: usize> PartialEq<&[u8; N]> for Value {
    fn eq(&self, other: &&[u8; N]) -> bool {
        **self == other[..]
    }
}

impl PartialOrd for Value {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Value {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (**self).cmp(&**other)
    }
}

impl Hash for Value {
    #[inline]
    fn hash<H: Hasher>(&self, state: &mut H) {
        (**self).hash(state);
    }
}

impl fmt::Debug for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "b\"{}\"", self.escape_ascii())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::hash::BuildHasher;

    #[test]
    fn a_value_is_its_bytes_whatever_their_length() {
        let hasher = std::hash::RandomState::new();
        for length in 0..100_usize {
            let bytes: Vec<u8> = (0..length as u8).collect();
            let value = Value::from(bytes.as_slice());
            assert_eq!(*value, *bytes);
            assert_eq!(value, Value::from(bytes.clone()));
            assert_eq!(hasher.hash_one(&value), hasher.hash_one(bytes.as_slice()));
            assert!(value < Value::from([&bytes[..], b"\0"].concat()));
            assert_eq!(value.clone(), value);
        }
    }

    #[test]
    fn bytes_are_rewritten_in_place_where_nobody_else_sees_it() {
        let mut short = Value::from("9");
        assert!(short.rewrite(b"10"));
        assert_eq!(short, b"10");
        assert!(!short.rewrite(&[7; 100]));
        let mut long = Value::from(vec![1; 100]);
        assert!(!long.rewrite(&[2; 99]));
        assert!(long.rewrite(&[2; 100]));
        let held = long.clone();
        assert!(long.is_shared() && !long.rewrite(&[3; 100]));
        assert_eq!(held, Value::from(vec![2; 100]));
        assert!(!short.is_shared(), "a short value is copied, not shared");
    }

    #[test]
    fn a_value_that_was_appended_to_grows_where_it_is_unless_it_is_shared() {
        let mut value = Value::from(vec![1; 1 << 20]);
        assert!(!value.extend(b"2"), "the first time it is copied");
        value = value.grown(b"2");
        let place = value.as_ptr();
        for _ in 0..1000 {
            assert!(value.extend(&[3]));
        }
        assert_eq!(value.as_ptr(), place, "nothing was moved");
        assert!(*value == *[vec![1; 1 << 20], b"2".to_vec(), vec![3; 1000]].concat());
        let held = value.clone();
        assert!(value.is_shared() && !value.extend(b"4") && !value.rewrite(&vec![5; held.len()]));
        drop(held);
        assert!(value.rewrite(&vec![5; value.len()]) && value.iter().all(|byte| *byte == 5));
    }
}
