//! Reads JSON into plain data, value by value, without building a tree of JSON first.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};

use super::pickle::Problem;
use super::plain::{Heap, ITEMS_MAX, Plain, TooMuch};

/// Parses a value. The reader accepts at most 128 levels.
pub(super) fn parse(bytes: &[u8]) -> Result<(Heap, Plain), Problem> {
    let mut heap = Heap::default();
    let mut reader = serde_json::Deserializer::from_slice(bytes);
    let value = Seed(&mut heap).deserialize(&mut reader).and_then(|value| reader.end().map(|()| value));
    match value {
        Ok(value) => Ok((heap, value)),
        Err(error) => {
            let lines = bytes.split_inclusive(|&byte| byte == b'\n').take(error.line().saturating_sub(1));
            let position = lines.map(<[u8]>::len).sum::<usize>() + error.column().saturating_sub(1);
            let (position, what) =
                if error.is_eof() { (bytes.len(), "truncated JSON") } else { (position, "not JSON") };
            Err(Problem { position: position.min(bytes.len()), text: format!("{what}: {error}") })
        }
    }
}

struct Seed<'h>(&'h mut Heap);

fn too_much<E: serde::de::Error>(problem: TooMuch) -> E {
    E::custom(String::from(problem))
}

impl<'de> DeserializeSeed<'de> for Seed<'_> {
    type Value = Plain;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Plain, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Seed<'_> {
    type Value = Plain;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("plain data")
    }

    fn visit_unit<E>(self) -> Result<Plain, E> {
        Ok(Plain::None)
    }

    fn visit_bool<E>(self, truth: bool) -> Result<Plain, E> {
        Ok(Plain::Bool(truth))
    }

    fn visit_i64<E>(self, number: i64) -> Result<Plain, E> {
        Ok(Plain::Int(number))
    }

    fn visit_u64<E>(self, number: u64) -> Result<Plain, E> {
        Ok(i64::try_from(number).map_or(Plain::Float(number as f64), Plain::Int))
    }

    fn visit_f64<E>(self, number: f64) -> Result<Plain, E> {
        Ok(Plain::Float(number))
    }

    fn visit_str<E>(self, text: &str) -> Result<Plain, E> {
        Ok(self.0.text(text))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Plain, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = access.next_element_seed(Seed(self.0))? {
            items.push(item);
            if items.len() > ITEMS_MAX {
                return Err(too_much(TooMuch));
            }
        }
        self.0.list(items).map_err(too_much)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Plain, A::Error> {
        let dict = self.0.dict().map_err(too_much)?;
        let Plain::Dict(number) = dict else { return Err(A::Error::custom("a dictionary is one")) };
        while let Some(key) = access.next_key_seed(Seed(self.0))? {
            let value = access.next_value_seed(Seed(self.0))?;
            self.0.insert(number, key, value).map_err(too_much)?;
        }
        Ok(dict)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_becomes_the_same_as_a_pickle_of_it() {
        let (heap, value) = parse(br#"{"a": [1, 1.5, null, true], "b": {"c": "x"}, "n": "7"}"#).unwrap();
        let top = heap.view(&value);
        assert_eq!(top.get("a").items().len(), 4);
        assert_eq!(top.get("b").get("c").text().as_deref(), Some("x"));
        assert_eq!(top.get("n").integer(), Some(7));
    }

    #[test]
    fn a_cut_or_wrong_text_is_named_with_its_place() {
        let cut = parse(b"{\"a\": [1,\n2").unwrap_err();
        assert_eq!((cut.position, &cut.text[..16]), (11, "truncated JSON: "));
        let wrong = parse(b"{]").unwrap_err();
        assert_eq!((wrong.position, &wrong.text[..10]), (1, "not JSON: "));
        assert!(parse(&b"[".repeat(100_000)).unwrap_err().text.contains("recursion limit"));
    }
}
