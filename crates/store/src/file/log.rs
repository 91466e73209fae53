//! The log in the file: its records, how far they have been read, and how they can be damaged.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::os::unix::fs::FileExt;

use tenfold_base::{ErrorKind, Fault};

use super::lock::length;
use crate::request::show_keys;
use crate::table::parse_number;
use crate::value::Value;

pub(super) const REFCOUNT: &[u8] = b"refcount/";

pub(super) const CLEANUP: &[u8] = b"cleanup/";

pub(super) const USER: u8 = b'/';

pub(super) const DELETED: u8 = b'-';

/// What to do about half a record at the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tail {
    /// By readers.
    PassOver,
    /// By writers, which have the exclusive lock.
    Cut,
}

/// The contents of the log, up to an offset.
#[derive(Clone, Debug, Default)]
pub(super) struct Replica {
    pub(super) values: HashMap<Value, Value>,
    pub(super) refcount: Option<i64>,
    pub(super) cleanup: Option<i64>,
    /// Where the next record begins.
    pub(super) offset: u64,
}

impl Replica {
    pub(super) fn value(&self, key: &[u8]) -> Option<Value> {
        self.values.get(key).cloned()
    }

    /// Objects there are.
    pub(super) fn refcount(&self) -> i64 {
        self.refcount.unwrap_or(0)
    }

    /// Objects that have left.
    pub(super) fn cleanup(&self) -> i64 {
        self.cleanup.unwrap_or(0)
    }

    /// As c10d counts: including the store's own two.
    pub(super) fn num_keys(&self) -> i64 {
        let own = usize::from(self.refcount.is_some()) + usize::from(self.cleanup.is_some());
        i64::try_from(self.values.len() + own).expect("a count of things in memory fits 63 bits")
    }

    /// Reads what was added since. The caller has a lock on `file`, so no process is in the middle of a
    /// record.
    pub(super) fn catch_up(&mut self, mut file: &File, tail: Tail) -> Result<(), Fault> {
        let length = length(file)?;
        if length < self.offset {
            let message = format!("the file shrank from {} to {length} bytes", self.offset);
            return Err(Fault::new(ErrorKind::Corrupt, message)
                .hint("use a new path for each run, and check whether another program writes to the file"));
        }
        if length == self.offset {
            return Ok(());
        }
        file.seek(SeekFrom::Start(self.offset)).map_err(cannot_read)?;
        match self.replay(BufReader::new(file), length) {
            Err(Damage::Torn { .. }) if self.is_unfinished(file, length)? => match tail {
                Tail::PassOver => Ok(()),
                Tail::Cut => self.cut(file, length),
            },
            result => result.map_err(|damage| damage.at(self.offset)),
        }
    }

    /// Applies the records from here to the offset `end`, up to the first that is damaged.
    pub(super) fn replay(&mut self, mut log: impl Read, end: u64) -> Result<(), Damage> {
        while self.offset < end {
            let mut left = end - self.offset;
            let key = read_string(&mut log, &mut left, "key")?;
            if !is_of_a_store(&key) {
                return Err(Damage::Alien(key));
            }
            let value = read_string(&mut log, &mut left, "value")?;
            self.apply(&key, value)?;
            self.offset = end - left;
        }
        Ok(())
    }

    /// Whether the bytes after the last whole record are the beginning of a record that a store was writing.
    /// Only after a record: a file without one may not be a store's at all.
    #[cold]
    pub(super) fn is_unfinished(&self, file: &File, end: u64) -> Result<bool, Fault> {
        const LOOKED_AT: u64 = 64;
        let mut tail = vec![0; (end - self.offset).min(LOOKED_AT) as usize];
        file.read_exact_at(&mut tail, self.offset).map_err(cannot_read)?;
        Ok(self.offset > 0 && could_be_a_record(&tail))
    }

    /// Removes half a record. The caller has the exclusive lock, so its writer is dead.
    #[cold]
    pub(super) fn cut(&self, file: &File, end: u64) -> Result<(), Fault> {
        let (length, offset) = (end - self.offset, self.offset);
        file.set_len(offset).map_err(|error| {
            let what =
                format!("cannot remove the {length} bytes at offset {offset} left by a killed process");
            Fault::io(what, error)
        })?;
        tracing::warn!(
            "removed {length} bytes at the end of a store's file: a process was killed while writing"
        );
        Ok(())
    }

    pub(super) fn apply(&mut self, key: &[u8], value: Vec<u8>) -> Result<(), Damage> {
        match key {
            REFCOUNT => self.refcount = Some(parse_number(&value).ok_or(Damage::Count(REFCOUNT, value))?),
            CLEANUP => self.cleanup = Some(parse_number(&value).ok_or(Damage::Count(CLEANUP, value))?),
            [DELETED, USER, key @ ..] => drop(self.values.remove(key)),
            [USER, key @ ..] => drop(self.values.insert(key.into(), value.into())),
            _ => unreachable!("such a key was refused"),
        }
        Ok(())
    }

    /// Appends the draft to the log: all of it or nothing. The caller has the exclusive lock and has read the
    /// log to its end.
    pub(super) fn commit(&mut self, file: &File, draft: &Draft) -> Result<(), Fault> {
        if draft.log.is_empty() {
            return Ok(());
        }
        if let Err(error) = file.write_all_at(&draft.log, self.offset) {
            return Err(self.take_back(file, draft, error));
        }
        let end = self.offset + draft.log.len() as u64;
        self.replay(draft.log.as_slice(), end).map_err(|damage| damage.at(self.offset))
    }

    /// A write failed: what it left is certainly ours, since we have the exclusive lock and the log ended
    /// here.
    #[cold]
    pub(super) fn take_back(&self, file: &File, draft: &Draft, error: io::Error) -> Fault {
        let kind = error.kind();
        let mut what = format!("cannot add {} bytes at offset {}", draft.log.len(), self.offset);
        if let Err(error) = file.set_len(self.offset) {
            what = format!("{what}, or remove the part that was written ({error})");
        }
        let fault = Fault::io(what, error);
        match kind {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => {
                fault.hint("free some disk space and try again; everything stored before is intact")
            }
            _ => fault,
        }
    }
}

/// Records that are to be added.
#[derive(Debug, Default)]
pub(super) struct Draft {
    pub(super) log: Vec<u8>,
}

impl Draft {
    pub(super) fn set(&mut self, key: &[u8], value: &[u8]) -> Result<(), Fault> {
        self.record(&[&[USER], key], value)
    }

    pub(super) fn delete(&mut self, key: &[u8]) -> Result<(), Fault> {
        self.record(&[&[DELETED, USER], key], &[])
    }

    pub(super) fn count(&mut self, counter: &[u8], count: i64) {
        self.record(&[counter], count.to_string().as_bytes()).expect("a counter is short");
    }

    pub(super) fn record(&mut self, key: &[&[u8]], value: &[u8]) -> Result<(), Fault> {
        let key_length = length_field(key.iter().map(|part| part.len()).sum(), "key")?;
        let value_length = length_field(value.len(), "value")?;
        self.log.extend_from_slice(&key_length);
        key.iter().for_each(|part| self.log.extend_from_slice(part));
        self.log.extend_from_slice(&value_length);
        self.log.extend_from_slice(value);
        Ok(())
    }
}

pub(super) fn length_field(length: usize, what: &str) -> Result<[u8; 4], Fault> {
    u32::try_from(length).map(u32::to_le_bytes).map_err(|_| {
        let message =
            format!("a {what} of {length} bytes is too long: the file format ends at {} bytes", u32::MAX);
        Fault::new(ErrorKind::Limit, message)
    })
}

pub(super) fn is_of_a_store(key: &[u8]) -> bool {
    matches!(key, REFCOUNT | CLEANUP | [USER, ..] | [DELETED, USER, ..])
}

/// Could these be the first bytes of a record that a store writes?
pub(super) fn could_be_a_record(bytes: &[u8]) -> bool {
    let Some((length, rest)) = bytes.split_first_chunk() else { return true };
    let length = u32::from_le_bytes(*length) as usize;
    match rest.get(..length) {
        Some(key) => is_of_a_store(key),
        None => {
            let own = [REFCOUNT, CLEANUP];
            matches!(rest, [] | [USER, ..] | [DELETED] | [DELETED, USER, ..])
                || own.iter().any(|key| length == key.len() && key.starts_with(rest))
        }
    }
}

/// Why a record is invalid.
#[derive(Debug)]
pub(super) enum Damage {
    /// It ends too early: `part` needs more than is left.
    Torn {
        part: String,
        needed: u64,
        left: u64,
    },
    /// No store writes such a key.
    Alien(Vec<u8>),
    /// One of the store's own counters is not a number.
    Count(&'static [u8], Vec<u8>),
    Unreadable(io::Error),
}

impl Damage {
    #[cold]
    pub(super) fn at(self, offset: u64) -> Fault {
        let what = match self {
            Damage::Torn { part, needed, left } => {
                format!("a record breaks off: its {part} needs {needed} bytes, {left} are left")
            }
            Damage::Alien(key) => {
                format!("a record has the key {}, which no store writes", show_keys(&[key]))
            }
            Damage::Count(counter, text) => {
                format!("the counter {} is {}", show_keys(&[counter]), show_keys(&[text]))
            }
            Damage::Unreadable(error) if error.kind() != io::ErrorKind::UnexpectedEof => {
                return cannot_read(error);
            }
            Damage::Unreadable(_) => "the file shrank while it was read".into(),
        };
        let hint = match offset {
            0 => "check the path: no store has completed a record in this file; it was left unchanged",
            _ => {
                "stop the job, remove the file and start again: another program wrote to it, or the disk is damaged"
            }
        };
        Fault::new(ErrorKind::Corrupt, format!("the file is damaged at offset {offset}: {what}")).hint(hint)
    }
}

#[cold]
pub(super) fn cannot_read(error: io::Error) -> Fault {
    Fault::io("cannot read the file", error)
}

/// Reads a length and as many bytes, all of which must be within `left`; allocates nothing beyond that.
pub(super) fn read_string(
    log: &mut impl Read,
    left: &mut u64,
    what: &'static str,
) -> Result<Vec<u8>, Damage> {
    let mut take = |needed: u64, part: &str| match left.checked_sub(needed) {
        Some(rest) => {
            *left = rest;
            Ok(())
        }
        None => Err(Damage::Torn { part: part.into(), needed, left: *left }),
    };
    let mut field = [0; 4];
    take(field.len() as u64, &format!("{what} length"))?;
    log.read_exact(&mut field).map_err(Damage::Unreadable)?;
    let length = u32::from_le_bytes(field);
    take(length.into(), what)?;
    let mut bytes = vec![0; length as usize];
    log.read_exact(&mut bytes).map_err(Damage::Unreadable)?;
    Ok(bytes)
}
