//! Reads the safe part of pickle: numbers, text, bytes, lists, tuples and dictionaries of protocols 2 to 5.
//!
//! A pickle is a program for a small stack machine, and Python's reader lets that program call any function.
//! This reader refuses every opcode that creates an object or calls something, and names it in the error. The
//! rest cannot loop, so the time is that of reading the file once; `dump` counts values that are mentioned
//! again and again. Every length is checked against the rest of the file before memory is allocated, and what
//! a file may accumulate is bounded: [`STACK_MAX`], [`MEMO_MAX`], and the limits of the [`Heap`].
//!
//! Not here: what the values mean (see `dump`).

use super::plain::{CONTAINERS_MAX, Heap, ITEMS_MAX, Plain, TooMuch};

/// Values not yet in a container. PyTorch writes all values of a container before the container: as many as a
/// ring has operations.
const STACK_MAX: usize = 2_000_000;
/// Values that may be mentioned again.
const MEMO_MAX: usize = 4_000_000;
/// Bytes of an integer. No time and no size needs more than eight.
const LONG_MAX: usize = 255;

/// What is wrong, and where.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Problem {
    pub(super) position: usize,
    pub(super) text: String,
}

/// Returns the value that the pickle describes.
pub(super) fn unpickle(bytes: &[u8]) -> Result<(Heap, Plain), Problem> {
    let mut machine = Machine {
        bytes,
        position: 0,
        heap: Heap::default(),
        stack: Vec::new(),
        marks: Vec::new(),
        memo: Vec::new(),
    };
    let mut start = 0;
    let result = loop {
        start = machine.position.max(start);
        match machine.step() {
            Ok(None) => {}
            Ok(Some(value)) => break Ok(value),
            Err(text) => break Err(text),
        }
    };
    match result {
        Ok(value) => Ok((machine.heap, value)),
        Err(text) => Err(Problem { position: start, text }),
    }
}

struct Machine<'a> {
    bytes: &'a [u8],
    position: usize,
    heap: Heap,
    stack: Vec<Plain>,
    /// Heights of the stack at which a container's values begin.
    marks: Vec<usize>,
    memo: Vec<Option<Plain>>,
}

impl From<TooMuch> for String {
    fn from(_: TooMuch) -> String {
        format!("it holds more than {CONTAINERS_MAX} containers or {ITEMS_MAX} values, which no dump does")
    }
}

impl<'a> Machine<'a> {
    /// Executes the next opcode. Returns the result if it was the last.
    fn step(&mut self) -> Result<Option<Plain>, String> {
        let opcode = self.byte()?;
        match opcode {
            0x80 => self.protocol()?,
            0x95 => {
                let announced = self.number::<8>()?;
                self.check_left(announced)?;
            }
            b'.' => return self.pop().map(Some),
            b'(' => {
                let height = self.stack.len();
                self.check_room(self.marks.len())?;
                self.marks.push(height);
            }
            b'0' => drop(self.pop()?),
            b'1' => {
                let mark = self.pop_mark()?;
                self.stack.truncate(mark);
            }
            b'N' => self.push(Plain::None)?,
            0x88 => self.push(Plain::Bool(true))?,
            0x89 => self.push(Plain::Bool(false))?,
            b'J' => {
                let number = self.number::<4>()? as u32 as i32;
                self.push(Plain::Int(number.into()))?;
            }
            b'K' => self.small_integer::<1>()?,
            b'M' => self.small_integer::<2>()?,
            0x8a => self.long::<1>()?,
            0x8b => self.long::<4>()?,
            b'G' => {
                let number = f64::from_bits(self.number::<8>()?.swap_bytes());
                self.push(Plain::Float(number))?;
            }
            0x8c => self.text::<1>()?,
            b'X' => self.text::<4>()?,
            0x8d => self.text::<8>()?,
            // Bytes, and Python 2's strings.
            b'C' | b'U' => self.skip_bytes::<1>()?,
            b'B' | b'T' => self.skip_bytes::<4>()?,
            0x8e | 0x96 => self.skip_bytes::<8>()?,
            b']' => self.push_list(Vec::new())?,
            b')' => self.push_list(Vec::new())?,
            b'l' | b't' => {
                let mark = self.pop_mark()?;
                self.push_list_from(mark)?;
            }
            0x85..=0x87 => {
                let start = self.start_of(usize::from(opcode - 0x84))?;
                self.push_list_from(start)?;
            }
            b'a' => {
                let start = self.start_of(1)?;
                self.append(start)?;
            }
            b'e' => {
                let mark = self.pop_mark()?;
                self.append(mark)?;
            }
            b'}' => {
                let dict = self.heap.dict()?;
                self.push(dict)?;
            }
            b'd' => {
                let mark = self.pop_mark()?;
                let dict = self.heap.dict()?;
                self.insert_into(dict, mark)?;
                self.push(dict)?;
            }
            b's' => {
                let start = self.start_of(2)?;
                self.insert(start)?;
            }
            b'u' => {
                let mark = self.pop_mark()?;
                self.insert(mark)?;
            }
            b'q' => self.put::<1>()?,
            b'r' => self.put::<4>()?,
            0x94 => self.memoize(self.memo.len())?,
            b'h' => self.get::<1>()?,
            b'j' => self.get::<4>()?,
            other => return Err(refused(other)),
        }
        Ok(None)
    }

    fn protocol(&mut self) -> Result<(), String> {
        match self.byte()? {
            2..=5 => Ok(()),
            other => Err(format!("pickle protocol {other} is not supported (2 to 5 are)")),
        }
    }

    fn small_integer<const WIDTH: usize>(&mut self) -> Result<(), String> {
        let number = self.number::<WIDTH>()? as i64;
        self.push(Plain::Int(number))
    }

    /// An integer of any length, little-endian, two's complement. If it does not fit our integers, it becomes
    /// inexact.
    fn long<const WIDTH: usize>(&mut self) -> Result<(), String> {
        let length = self.number::<WIDTH>()?;
        if length > LONG_MAX as u64 {
            return Err(format!("a number of {length} bytes; at most {LONG_MAX} are read"));
        }
        let bytes = self.take(length)?;
        let negative = bytes.last().is_some_and(|&last| last >= 0x80);
        let value = if bytes.len() <= 8 {
            let mut whole = if negative { [0xff; 8] } else { [0; 8] };
            whole[..bytes.len()].copy_from_slice(bytes);
            Plain::Int(i64::from_le_bytes(whole))
        } else {
            let magnitude = bytes.iter().rev().fold(0.0, |sum, &byte| sum * 256.0 + f64::from(byte));
            let wrapped = if negative { 256f64.powi(bytes.len() as i32) } else { 0.0 };
            Plain::Float(magnitude - wrapped)
        };
        self.push(value)
    }

    fn text<const WIDTH: usize>(&mut self) -> Result<(), String> {
        let length = self.number::<WIDTH>()?;
        let bytes = self.take(length)?;
        // A file name may have any bytes; it is shown, not opened.
        let text = String::from_utf8_lossy(bytes);
        let text = self.heap.text(&text);
        self.push(text)
    }

    fn skip_bytes<const WIDTH: usize>(&mut self) -> Result<(), String> {
        let length = self.number::<WIDTH>()?;
        self.take(length)?;
        self.push(Plain::Bytes)
    }

    fn push_list(&mut self, items: Vec<Plain>) -> Result<(), String> {
        let list = self.heap.list(items)?;
        self.push(list)
    }

    /// A list of what is on the stack from this height on.
    fn push_list_from(&mut self, start: usize) -> Result<(), String> {
        let items = self.stack.split_off(start);
        self.push_list(items)
    }

    /// Moves what is on the stack from this height on to the list below.
    fn append(&mut self, start: usize) -> Result<(), String> {
        let Some(&Plain::List(list)) = self.below(start) else {
            return Err("values are appended to something that is not a list".into());
        };
        Ok(self.heap.extend_list(list, self.stack.drain(start..))?)
    }

    fn insert(&mut self, start: usize) -> Result<(), String> {
        match self.below(start) {
            Some(&dict @ Plain::Dict(_)) => self.insert_into(dict, start),
            _ => Err("pairs are put into something that is not a dictionary".into()),
        }
    }

    /// Moves keys and values, in turns on the stack from this height on, to the dictionary.
    fn insert_into(&mut self, dict: Plain, start: usize) -> Result<(), String> {
        let Plain::Dict(dict) = dict else {
            return Err("pairs are put into something that is not a dictionary".into());
        };
        let (pairs, rest) = self.stack[start..].as_chunks();
        if !rest.is_empty() {
            return Err("a key has no value".into());
        }
        self.heap.extend_dict(dict, pairs.iter().map(|&[key, value]| (key, value)))?;
        self.stack.truncate(start);
        Ok(())
    }

    fn put<const WIDTH: usize>(&mut self) -> Result<(), String> {
        let index = self.number::<WIDTH>()? as usize;
        self.memoize(index)
    }

    fn memoize(&mut self, index: usize) -> Result<(), String> {
        // Writers number these values consecutively: a number far beyond the file's length means damage.
        if index >= MEMO_MAX.min(self.bytes.len()) {
            return Err(format!("memo index {index} is too large for the length of the file"));
        }
        let value = self.stack.last().copied().ok_or("a memo opcode has no value to store")?;
        if self.memo.len() <= index {
            self.memo.resize(index + 1, None);
        }
        self.memo[index] = Some(value);
        Ok(())
    }

    fn get<const WIDTH: usize>(&mut self) -> Result<(), String> {
        let index = self.number::<WIDTH>()? as usize;
        let value = self.memo.get(index).copied().flatten();
        self.push(value.ok_or_else(|| format!("memo index {index} is used but was never set"))?)
    }

    fn push(&mut self, value: Plain) -> Result<(), String> {
        self.check_room(self.stack.len())?;
        self.stack.push(value);
        Ok(())
    }

    fn check_room(&self, held: usize) -> Result<(), String> {
        if held < STACK_MAX { Ok(()) } else { Err(format!("more than {STACK_MAX} values are on the stack")) }
    }

    fn pop(&mut self) -> Result<Plain, String> {
        let floor = self.marks.last().copied().unwrap_or(0);
        if self.stack.len() <= floor {
            return Err("the stack is empty where a value is expected".into());
        }
        Ok(self.stack.pop().expect("there is one above the floor"))
    }

    /// The height at which the last `count` values begin.
    fn start_of(&self, count: usize) -> Result<usize, String> {
        let floor = self.marks.last().copied().unwrap_or(0);
        match self.stack.len().checked_sub(count) {
            Some(start) if start >= floor => Ok(start),
            _ => Err(format!("the stack has fewer than {count} values")),
        }
    }

    fn pop_mark(&mut self) -> Result<usize, String> {
        Ok(self.marks.pop().ok_or("the end of a container without a beginning")?)
    }

    /// The value below those from this height on.
    fn below(&self, start: usize) -> Option<&Plain> {
        self.stack[..start].last()
    }

    fn byte(&mut self) -> Result<u8, String> {
        Ok(self.take(1)?[0])
    }

    /// A little-endian number without sign.
    #[inline]
    fn number<const WIDTH: usize>(&mut self) -> Result<u64, String> {
        let mut whole = [0; 8];
        whole[..WIDTH].copy_from_slice(self.take(WIDTH as u64)?);
        Ok(u64::from_le_bytes(whole))
    }

    #[inline]
    fn take(&mut self, length: u64) -> Result<&'a [u8], String> {
        self.check_left(length)?;
        let bytes: &'a [u8] = &self.bytes[self.position..][..length as usize];
        self.position += length as usize;
        Ok(bytes)
    }

    #[inline]
    fn check_left(&self, length: u64) -> Result<(), String> {
        let left = self.bytes.len() - self.position;
        if length <= left as u64 { Ok(()) } else { Err(truncated(length, left)) }
    }
}

#[cold]
fn truncated(length: u64, left: usize) -> String {
    match left {
        0 => "the file ends here: it is truncated".into(),
        left => format!("{length} bytes should follow and there are {left}: truncated or damaged"),
    }
}

/// Why an opcode is refused.
fn refused(opcode: u8) -> String {
    let name = match opcode {
        b'c' => "GLOBAL",
        0x93 => "STACK_GLOBAL",
        b'R' => "REDUCE",
        b'b' => "BUILD",
        b'i' => "INST",
        b'o' => "OBJ",
        0x81 => "NEWOBJ",
        0x92 => "NEWOBJ_EX",
        b'P' => "PERSID",
        b'Q' => "BINPERSID",
        0x82 => "EXT1",
        0x83 => "EXT2",
        0x84 => "EXT4",
        0x8f => "EMPTY_SET",
        0x90 => "ADDITEMS",
        0x91 => "FROZENSET",
        0x97 => "NEXT_BUFFER",
        0x98 => "READONLY_BUFFER",
        b'2' => "DUP",
        b'I' | b'L' | b'F' | b'S' | b'V' | b'p' | b'g' => {
            let letter = char::from(opcode);
            return format!("opcode `{letter}` of pickle protocol 0, which no flight recorder writes");
        }
        other => return format!("{other:#04x} is not a pickle opcode: the file is damaged, or not a pickle"),
    };
    format!("opcode {name} would create an object: a dump contains plain data only")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn problem(bytes: &[u8]) -> String {
        let Problem { position, text } = unpickle(bytes).unwrap_err();
        format!("{position}: {text}")
    }

    #[test]
    fn every_plain_kind_is_read_as_python_means_it() {
        // pickle.dumps({"a": [1, -1, 300, 2**40, -2**70, 1.5, None, True, False], "b": ("x", b"y"), "c": {}}, 2..5)
        let made: [&[u8]; 2] = [
            b"\x80\x02}(X\x01\x00\x00\x00aq\x01](K\x01J\xff\xff\xff\xffM\x2c\x01\x8a\x06\x00\x00\x00\x00\x00\x01\x8a\x09\
              \x00\x00\x00\x00\x00\x00\x00\x00\xc0G?\xf8\x00\x00\x00\x00\x00\x00N\x88\x89eX\x01\x00\x00\x00bX\x01\x00\
              \x00\x00xC\x01y\x86X\x01\x00\x00\x00c}u.",
            b"\x80\x04\x95\x4a\x00\x00\x00\x00\x00\x00\x00}\x94(\x8c\x01a\x94]\x94(K\x01J\xff\xff\xff\xffM\x2c\x01\x8a\
              \x06\x00\x00\x00\x00\x00\x01\x8a\x09\x00\x00\x00\x00\x00\x00\x00\x00\xc0G?\xf8\x00\x00\x00\x00\x00\x00N\
              \x88\x89e\x8c\x01b\x94\x8c\x01x\x94C\x01y\x94\x86\x94\x8c\x01c\x94}\x94u.",
        ];
        for bytes in made {
            let (heap, value) = unpickle(bytes).unwrap();
            let top = heap.view(&value);
            let numbers: Vec<_> = top.get("a").items().map(|item| item.number()).collect();
            let power = -(2f64.powi(70));
            let expected = [1.0, -1.0, 300.0, 2f64.powi(40), power, 1.5].map(Some);
            assert_eq!(numbers, [&expected[..], &[None; 3]].concat());
            assert_eq!(top.get("a").items().last().and_then(super::super::plain::View::truth), Some(false));
            let pair: Vec<_> = top.get("b").items().map(super::super::plain::View::kind).collect();
            assert_eq!(pair, ["text", "bytes"]);
            assert!(top.get("c").is_dict() && top.get("d").is_none());
        }
    }

    #[test]
    fn a_list_may_be_remembered_before_it_is_filled_and_may_hold_itself() {
        let (heap, value) = unpickle(b"\x80\x02]q\x00(h\x00K\x07e.").unwrap();
        let items: Vec<_> = heap.view(&value).items().collect();
        assert_eq!(items.len(), 2);
        assert_eq!(items[0].items().len(), 2, "the list within the list is the list");
    }

    #[test]
    fn what_would_make_an_object_is_refused_by_name() {
        // pickle.dumps(os.system) and friends begin so.
        assert_eq!(
            problem(b"\x80\x02cposix\nsystem\nq\x00."),
            "2: opcode GLOBAL would create an object: a dump contains plain data only"
        );
        let opcodes = b"cRbioPQ\x81\x82\x83\x84\x8f\x90\x91\x92\x93\x97\x98";
        for &opcode in opcodes {
            let text = problem(&[0x80, 4, opcode, b'.']);
            assert!(text.contains("would create an object"), "{opcode:#x}: {text}");
        }
    }

    #[test]
    fn damage_is_named_with_its_place() {
        assert_eq!(problem(b""), "0: the file ends here: it is truncated");
        assert_eq!(problem(b"\x80\x02}"), "3: the file ends here: it is truncated");
        assert_eq!(
            problem(b"\x80\x02X\xff\xff\xff\x7fab"),
            "2: 2147483647 bytes should follow and there are 2: truncated or damaged"
        );
        assert_eq!(problem(b"\x80\x09."), "0: pickle protocol 9 is not supported (2 to 5 are)");
        assert_eq!(problem(b"\x80\x02h\x05."), "2: memo index 5 is used but was never set");
        assert_eq!(problem(b"\x80\x02e."), "2: the end of a container without a beginning");
        assert_eq!(problem(b"\x80\x02(."), "3: the stack is empty where a value is expected");
        assert_eq!(problem(b"\x80\x02(K\x01a."), "5: values are appended to something that is not a list");
        assert_eq!(problem(b"\x80\x02}(K\x01u."), "6: a key has no value");
        assert_eq!(
            problem(b"\x80\x02Nr\xff\xff\xff\x00."),
            "3: memo index 16777215 is too large for the length of the file"
        );
        assert_eq!(
            problem(b"\x80\x02\xff."),
            "2: 0xff is not a pickle opcode: the file is damaged, or not a pickle"
        );
    }

    #[test]
    fn what_piles_up_has_a_bound() {
        let mut bytes = vec![0x80, 2];
        bytes.resize(STACK_MAX + 10, b'N');
        assert!(problem(&bytes).ends_with(": more than 2000000 values are on the stack"));
    }

    /// Random bytes, with more opcodes than chance would give.
    fn likely() -> impl Strategy<Value = Vec<u8>> {
        let opcodes =
            b"(.01NJKMGXUBCT]})ltaedsuqrhj\x80\x85\x86\x87\x88\x89\x8a\x8b\x8c\x8d\x8e\x94\x95\x96".to_vec();
        prop::collection::vec(prop_oneof![3 => prop::sample::select(opcodes), 1 => any::<u8>()], 0..400)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1000))]
        #[test]
        fn any_bytes_are_read_or_refused_within_the_memory_of_their_length(bytes in likely()) {
            match unpickle(&bytes) {
                Ok((heap, _)) => prop_assert!(heap.size() <= 2 * bytes.len()),
                Err(Problem { position, .. }) => prop_assert!(position <= bytes.len()),
            }
        }
    }
}
