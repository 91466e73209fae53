//! Plain values as Python's pickle, protocol 2, and as JSON.
//!
//! Both orders are c10d's: a pickle has its keys as they were put, JSON has them sorted. No memo is kept: nothing is shared, so a
//! reader needs none.

use serde_json::{Map, Value};

/// What a dump is made of.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Plain {
    None,
    Bool(bool),
    Int(i64),
    Float(f64),
    Text(String),
    List(Vec<Plain>),
    Pair(Box<(Plain, Plain)>),
    Dict(Vec<(String, Plain)>),
}

impl From<&str> for Plain {
    fn from(text: &str) -> Self {
        Plain::Text(text.to_string())
    }
}

impl From<u64> for Plain {
    fn from(number: u64) -> Self {
        Plain::Int(i64::try_from(number).unwrap_or(i64::MAX))
    }
}

impl Plain {
    pub(super) fn dict<const N: usize>(pairs: [(&str, Plain); N]) -> Self {
        Plain::Dict(pairs.into_iter().map(|(key, value)| (key.to_string(), value)).collect())
    }

    pub(super) fn to_pickle(&self) -> Vec<u8> {
        let mut bytes = vec![0x80, 2]; // PROTO 2
        self.write(&mut bytes);
        bytes.push(b'.'); // STOP
        bytes
    }

    fn write(&self, to: &mut Vec<u8>) {
        match self {
            Plain::None => to.push(b'N'),
            Plain::Bool(true) => to.push(0x88),  // NEWTRUE
            Plain::Bool(false) => to.push(0x89), // NEWFALSE
            Plain::Int(number) => write_int(*number, to),
            Plain::Float(number) => {
                to.push(b'G'); // BINFLOAT
                to.extend(number.to_be_bytes());
            }
            Plain::Text(text) => write_text(text, to),
            Plain::List(items) => {
                to.extend(b"]("); // EMPTY_LIST MARK
                items.iter().for_each(|item| item.write(to));
                to.push(b'e'); // APPENDS
            }
            Plain::Pair(pair) => {
                pair.0.write(to);
                pair.1.write(to);
                to.push(0x86); // TUPLE2
            }
            Plain::Dict(pairs) => {
                to.extend(b"}("); // EMPTY_DICT MARK
                for (key, value) in pairs {
                    write_text(key, to);
                    value.write(to);
                }
                to.push(b'u'); // SETITEMS
            }
        }
    }

    pub(super) fn to_json(&self) -> Value {
        match self {
            Plain::None => Value::Null,
            Plain::Bool(truth) => Value::Bool(*truth),
            Plain::Int(number) => Value::from(*number),
            Plain::Float(number) => Value::from(*number),
            Plain::Text(text) => Value::from(text.as_str()),
            Plain::List(items) => items.iter().map(Plain::to_json).collect(),
            Plain::Pair(pair) => Value::from(vec![pair.0.to_json(), pair.1.to_json()]),
            Plain::Dict(pairs) => {
                let pairs = pairs.iter().map(|(key, value)| (key.clone(), value.to_json()));
                Value::Object(pairs.collect::<Map<_, _>>())
            }
        }
    }
}

fn write_int(number: i64, to: &mut Vec<u8>) {
    if let Ok(number) = u8::try_from(number) {
        to.extend([b'K', number]); // BININT1
    } else if let Ok(number) = i32::try_from(number) {
        to.push(b'J'); // BININT
        to.extend(number.to_le_bytes());
    } else {
        to.extend([0x8a, 8]); // LONG1, of eight bytes
        to.extend(number.to_le_bytes());
    }
}

fn write_text(text: &str, to: &mut Vec<u8>) {
    // Four bytes of length: no name, path or list of ranks comes near.
    let (len, text) = u32::try_from(text.len()).map_or((0, ""), |len| (len, text));
    to.push(b'X'); // BINUNICODE
    to.extend(len.to_le_bytes());
    to.extend(text.as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_value_is_pickled_as_python_reads_it() {
        let value = Plain::dict([
            ("a", Plain::List(vec![Plain::None, Plain::Bool(true), Plain::Bool(false)])),
            ("é", Plain::Pair(Box::new((Plain::Int(255), Plain::Int(-1))))),
            ("n", Plain::List(vec![Plain::Int(256), Plain::Int(1 << 40), Plain::Float(0.5)])),
        ]);
        // >>> pickle.loads(…) == {"a": [None, True, False], "é": (255, -1), "n": [256, 1 << 40, 0.5]}
        let expected: &[u8] =
            b"\x80\x02}(X\x01\0\0\0a](N\x88\x89eX\x02\0\0\0\xc3\xa9K\xffJ\xff\xff\xff\xff\x86\
            X\x01\0\0\0n](J\0\x01\0\0\x8a\x08\0\0\0\0\0\x01\0\0G?\xe0\0\0\0\0\0\0eu.";
        assert_eq!(value.to_pickle(), expected);
        let json = r#"{"a":[null,true,false],"n":[256,1099511627776,0.5],"é":[255,-1]}"#;
        assert_eq!(value.to_json().to_string(), json);
    }
}
