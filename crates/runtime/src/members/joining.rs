//! How a process becomes a member: with all others at the beginning, or later in place of one that died.

use std::sync::Arc;
use std::time::Duration;

use tenfold_plan::Rank;
use tenfold_store::{Deadline, Store, StoreExt as _};

use super::notes::{self, Admission, Joiner};
use super::{ATTEMPT_MAX, Members, StoreOfRound};
use crate::environment;
use crate::fault::{Error, ErrorKind, Fault, Result, show_duration, store_fault};
use crate::group::{Group, Options, Place, Seat, connect_error};

/// How long a process waits to be admitted before it asks the store again.
const WAIT: Duration = Duration::from_secs(60);

type Faulty<T> = std::result::Result<T, Fault>;

pub(super) fn error(options: &Options, deadline: &Deadline, fault: Fault) -> Error {
    connect_error(&options.name().into(), 0, 0, *deadline, fault)
}

/// The store of the world that the environment describes, and the place in it.
pub(super) fn store_of_world(options: &Options) -> Result<(Arc<dyn Store>, Seat, Option<Rank>)> {
    let deadline = Deadline::after(options.timeout_of_calls());
    let opened = || {
        let Place { rank, size, local_rank, meeting } = environment::place()?;
        let store = meeting.open(rank, size, options.timeout_of_calls())?;
        Ok((meeting.kept_of_this_round(&store), Seat { rank, size }, local_rank))
    };
    opened().map_err(|fault| error(options, &deadline, fault))
}

/// What the launcher has told a process that it started later.
pub(super) struct Wish {
    pub(super) store: Arc<dyn Store>,
    /// In place of which rank; a spare has none.
    pub(super) rank: Option<Rank>,
    pub(super) local_rank: Option<Rank>,
    /// What the launcher calls it.
    pub(super) joining: Option<String>,
}

pub(super) fn wish_of_launcher(joining: String, options: &Options) -> Result<Wish> {
    let deadline = Deadline::after(options.timeout_of_calls());
    let opened = || {
        let (rank, local_rank, meeting) = environment::place_of_joiner()?;
        // It hosts no store, whatever its rank, and waits for no others there.
        let store = meeting.open(usize::MAX, 1, options.timeout_of_calls())?;
        let store = meeting.of_this_round(&store);
        Ok(Wish { store, rank, local_rank, joining: Some(joining) })
    };
    opened().map_err(|fault| error(options, &deadline, fault))
}

/// Asks to join until the survivors of a failure have admitted this process.
pub(super) fn join(wish: Wish, options: &Options) -> Result<Members> {
    let Wish { store, rank, local_rank, joining } = wish;
    let deadline = Deadline::after(options.timeout_of_calls());
    let alone = Group::alone(options.clone())?;
    let handle = alone.handle()?;
    let (pid, host) = alone.process();
    let joiner = Joiner { handle, pid, host, joining, rank, local_rank };
    loop {
        let number = ask(&*store, &joiner).map_err(|fault| error(options, &deadline, fault))?;
        let limit = rank.is_some().then_some(&deadline);
        let admission = await_admission(&*store, number, limit);
        let admission = admission.map_err(|fault| error(options, &deadline, fault))?;
        let handles: Vec<&str> = admission.members.iter().map(|note| &*note.handle).collect();
        let limit = options.timeout_of_calls().min(ATTEMPT_MAX);
        match alone.with_timeout(limit).reconfigure_as(&handles, admission.id, &admission.name) {
            Ok(group) => {
                return Ok(Members {
                    group,
                    store: Some(StoreOfRound(store)),
                    notes: admission.members,
                    generation: admission.generation,
                    has_joined: true,
                });
            }
            Err(error) => tracing::warn!("this process could not join and asks again: {error}"),
        }
    }
}

fn ask(store: &dyn Store, joiner: &Joiner) -> Faulty<i64> {
    let number = store.add(notes::JOINERS, 1).map_err(store_fault)?;
    store.set(notes::joiner_key(number), notes::to_text(joiner)?).map_err(store_fault)?;
    Ok(number)
}

fn await_admission(store: &dyn Store, number: i64, deadline: Option<&Deadline>) -> Faulty<Admission> {
    let key = notes::admitted_key(number);
    loop {
        let left = deadline.and_then(|deadline| deadline.left()).unwrap_or(WAIT);
        match store.wait_for(&[&key], left.min(WAIT)) {
            Ok(()) => {
                let text = store.get(&key).map_err(store_fault)?;
                return notes::from_text(&text, &format!("key `{key}` of the store"));
            }
            Err(error) if error.kind() != tenfold_store::ErrorKind::Timeout => {
                return Err(store_fault(error));
            }
            Err(_) => {}
        }
        if let Some(deadline) = deadline
            && deadline.passed()
        {
            let waited = show_duration(deadline.elapsed());
            let message = format!("the other ranks have not admitted this process within {waited}");
            return Err(Fault::new(ErrorKind::Timeout, message)
                .hint("check that the other ranks have noticed the failure and call `recover`"));
        }
    }
}
