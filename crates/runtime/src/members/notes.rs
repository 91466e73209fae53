//! What processes tell each other in the store so that one can take the place of a rank that died: keys and texts.
//!
//! The launcher reads [`Generation`] and nothing else. Its keys are those of a round: each start of all ranks has a prefix of its own.
//!
//! Not here: when what is written (see `members`), who takes which place (see `seats`).

use serde::{Deserialize, Serialize, de::DeserializeOwned};
use tenfold_plan::Rank;
use tenfold_store::{Store, StoreExt as _};

use crate::fault::{ErrorKind, Fault, store_fault};

/// What the members are since the last change.
pub(super) const GENERATION: &str = "recover/generation";

/// How many processes have asked to join.
pub(super) const JOINERS: &str = "recover/joiners";

/// A number in place of a note: that process was admitted, or an attempt to do so has failed.
const TAKEN: &str = "null";

pub(super) fn joiner_key(number: i64) -> String {
    format!("recover/joiner/{number}")
}

pub(super) fn admitted_key(number: i64) -> String {
    format!("recover/admitted/{number}")
}

/// What the members of a group know about one of them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Note {
    /// Its number in the last group that was whole.
    pub seat: Rank,
    pub handle: String,
    pub pid: u32,
    pub host: String,
    pub local_rank: Option<Rank>,
    /// What the launcher calls it, if it was started after the others.
    pub joining: Option<String>,
    /// Has it all that training needs, or has it joined and not received that yet?
    pub has_state: bool,
}

/// A process that waits to be admitted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Joiner {
    pub handle: String,
    pub pid: u32,
    pub host: String,
    pub joining: Option<String>,
    /// The rank that it replaces; nothing for a spare, which takes any.
    pub rank: Option<Rank>,
    pub local_rank: Option<Rank>,
}

/// The group that survivors and joiners are to become.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Admission {
    pub generation: u64,
    /// Of the attempt.
    pub id: u64,
    /// Of the new group.
    pub name: String,
    /// All members, by rank.
    pub members: Vec<Note>,
    pub left: Vec<Rank>,
    pub joined: Vec<Rank>,
}

/// What the lowest survivor tells the others.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Choice {
    Admit(Admission),
    Refuse { message: String, hint: String, timed_out: bool },
}

/// For the launcher: see docs/recovery.md.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Generation<'a> {
    pub generation: u64,
    pub took_ms: u64,
    pub at_unix_ms: u64,
    pub ranks: Vec<Process<'a>>,
    pub left: Vec<Process<'a>>,
    pub joined: Vec<Process<'a>>,
}

#[derive(Clone, Debug, Serialize)]
pub(super) struct Process<'a> {
    pub rank: Rank,
    pub pid: u32,
    pub host: &'a str,
    pub joining: Option<&'a str>,
    pub local_rank: Option<Rank>,
}

impl<'a> Process<'a> {
    pub(super) fn of(note: &'a Note) -> Self {
        Process {
            rank: note.seat,
            pid: note.pid,
            host: &note.host,
            joining: note.joining.as_deref(),
            local_rank: note.local_rank,
        }
    }
}

pub(super) fn to_text(note: &impl Serialize) -> Result<String, Fault> {
    serde_json::to_string(note).map_err(|error| Fault::argument(error.to_string()))
}

/// # Errors
/// Says where the text is from: another program may have written it.
pub(super) fn from_text<T: DeserializeOwned>(text: &[u8], whence: &str) -> Result<T, Fault> {
    serde_json::from_slice(text).map_err(|error| {
        let message = format!("{whence} is not what a rank of this version of tenfold writes: {error}");
        Fault::new(ErrorKind::Store, message).hint("start all ranks of the job with the same version")
    })
}

/// Processes that wait, with their numbers.
pub(super) type Waiting = Vec<(i64, Joiner)>;

/// Those with numbers from 1 to `count`, and the first number whose text is not written yet.
pub(super) fn waiting(store: &dyn Store, count: i64) -> Result<(Waiting, Option<i64>), Fault> {
    let (mut joiners, mut unwritten) = (Vec::new(), None);
    for number in 1..=count {
        let key = joiner_key(number);
        if !store.check(&[&key]).map_err(store_fault)? {
            unwritten = unwritten.or(Some(number));
            continue;
        }
        let text = store.get(&key).map_err(store_fault)?;
        if *text != *TAKEN.as_bytes() {
            let joiner: Joiner = from_text(&text, &format!("key `{key}` of the store"))?;
            // A process that asks again waits for its new number.
            joiners.retain(|(_, other): &(i64, Joiner)| other.handle != joiner.handle);
            joiners.push((number, joiner));
        }
    }
    Ok((joiners, unwritten))
}

/// Notes that these are not to be tried again. One that lives asks again.
pub(super) fn take(store: &dyn Store, numbers: &[i64]) -> Result<(), Fault> {
    let set = |number: &i64| store.set(joiner_key(*number), TAKEN).map_err(store_fault);
    numbers.iter().try_for_each(set)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tenfold_store::HashStore;

    fn ask(store: &HashStore, number: i64, handle: &str) {
        let joiner = Joiner {
            handle: handle.into(),
            pid: 1,
            host: "a".into(),
            joining: None,
            rank: None,
            local_rank: None,
        };
        store.set(joiner_key(number), to_text(&joiner).unwrap()).unwrap();
    }

    #[test]
    fn a_process_waits_for_the_last_number_with_which_it_asked_and_not_if_that_was_taken() {
        let store = HashStore::new();
        let numbers = |count| {
            let (joiners, unwritten) = waiting(&store, count).unwrap();
            (joiners.into_iter().map(|(number, _)| number).collect::<Vec<_>>(), unwritten)
        };
        ask(&store, 1, "x");
        ask(&store, 2, "y");
        ask(&store, 4, "x");
        assert_eq!(numbers(4), (vec![2, 4], Some(3)));
        take(&store, &[2]).unwrap();
        assert_eq!(numbers(4), (vec![4], Some(3)));
        take(&store, &[1, 4]).unwrap();
        assert_eq!(numbers(4), (vec![], Some(3)));
    }
}
