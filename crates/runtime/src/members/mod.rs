//! The ranks of a job that outlives the death of some of them: survivors continue, and other processes join in their place.
//!
//! After a failure all survivors call [`Members::recover`]. They agree on who is left (see `group::survivors`). If a launcher
//! replaces the dead (`tenfold run --on-failure=recover`), the lowest survivor waits until as many processes have asked to join,
//! tells each of them who the members will be, and all become one group (see `group::reconfigure`), in which each survivor
//! keeps its number. Otherwise the survivors continue alone.
//!
//! Joiners and survivors find each other in the store. Nothing else is kept there: if a survivor dies meanwhile, the others
//! begin again with what they know.
//!
//! Not here: what a rank trains with (see `hand_over`), starting processes (`tenfold run`).

#![expect(clippy::disallowed_methods, reason = "says how long a recovery took, and when it was")]

mod joining;
mod notes;
mod seats;

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use tenfold_plan::Rank;
use tenfold_store::{Deadline, Store, StoreExt as _};

use crate::environment::Environment;
use crate::fabric::random;
use crate::fault::{ErrorKind, Fault, Result, show_duration, show_ranks, store_fault};
use crate::group::survivors::name_of;
use crate::group::{Group, Options, Seat};
use joining::Wish;
use notes::{Admission, Choice, Generation, Joiner, Note, Process};

/// How often a new group is tried with the same survivors before they give up.
const ATTEMPTS: usize = 16;

/// How long one attempt may take at most: a process that asked to join may have stopped since.
const ATTEMPT_MAX: Duration = Duration::from_secs(30);

/// How long the lowest survivor waits for a process before it looks whether the other survivors are alive.
const LOOK: Duration = Duration::from_millis(50);

/// The members of a job, of which this process is one.
///
/// ```no_run
/// use tenfold::{Members, Options, ReduceOp};
///
/// let mut members = Members::from_environment(Options::default())?;
/// let mut gradients = [1.0_f32; 1000];
/// for _step in 0..100 {
///     while let Err(error) = members.group().all_reduce(&mut gradients, ReduceOp::Avg) {
///         eprintln!("{error}");
///         let recovered = members.recover()?; // returns on all survivors
///         eprintln!("ranks {:?} were replaced", recovered.joined);
///         // Here the survivors roll back to a step that all have completed, and hand over what ranks that joined need.
///     }
/// }
/// # Ok::<(), tenfold::Error>(())
/// ```
#[derive(Debug)]
pub struct Members {
    group: Group,
    /// Where processes ask to join; nothing if the dead are not replaced.
    store: Option<StoreOfRound>,
    /// By rank.
    notes: Vec<Note>,
    generation: u64,
    has_joined: bool,
}

#[derive(Clone)]
struct StoreOfRound(Arc<dyn Store>);

impl std::fmt::Debug for StoreOfRound {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("store")
    }
}

/// What a recovery has changed.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Recovered {
    /// Counted from 1, one more with each change.
    pub generation: u64,
    /// The numbers of the ranks that died, in the group before.
    pub left: Vec<Rank>,
    /// The ranks that joined.
    pub joined: Vec<Rank>,
    /// From the call until the new group was made.
    pub took: Duration,
}

impl Members {
    /// Joins the world that a launcher made, as [`Group::from_environment`] does. A process that the launcher started in place of
    /// a rank that died, or as a spare, waits until the survivors admit it.
    ///
    /// # Errors
    /// As [`Group::from_environment`].
    pub fn from_environment(options: Options) -> Result<Members> {
        let deadline = Deadline::after(options.timeout_of_calls());
        let failed = |fault| joining::error(&options, &deadline, fault);
        let environment = Environment::read().map_err(failed)?;
        let Some(serial) = environment.joining else {
            let (store, seat, local_rank) = joining::store_of_world(&options)?;
            return Members::meet(store, seat, options, environment.recovers, local_rank);
        };
        joining::join(joining::wish_of_launcher(serial, &options)?, &options)
    }

    /// The same with a store, for programs that start their processes themselves. If `is_replaced`, each recovery waits until a
    /// process has called [`Members::join`] for each rank that died.
    ///
    /// # Errors
    /// As [`Group::connect`].
    pub fn connect(
        store: Arc<dyn Store>,
        seat: Seat,
        options: Options,
        is_replaced: bool,
    ) -> Result<Members> {
        Members::meet(store, seat, options, is_replaced, None)
    }

    /// Joins in place of rank `rank`, or of any: returns when the survivors of a failure have admitted this process. With a
    /// `rank`, that may take as long as [`Options::timeout`] says; a spare waits without limit.
    ///
    /// # Errors
    /// If the store fails, or the survivors do not admit this process in time.
    pub fn join(store: Arc<dyn Store>, rank: Option<Rank>, options: Options) -> Result<Members> {
        joining::join(Wish { store, rank, local_rank: None, joining: None }, &options)
    }

    fn meet(
        store: Arc<dyn Store>,
        seat: Seat,
        options: Options,
        is_replaced: bool,
        local_rank: Option<Rank>,
    ) -> Result<Members> {
        let began = Instant::now();
        let group = Group::connect(Arc::clone(&store), seat, options)?;
        let mut members = Members {
            store: is_replaced.then_some(StoreOfRound(store)),
            notes: Vec::new(),
            generation: 1,
            has_joined: false,
            group,
        };
        let own = members.note(seat.rank, local_rank, None, true)?;
        members.notes = all_notes(&members.group, &own)?;
        if members.group.rank() == 0 {
            members.publish(began, &[], &[])?;
        }
        Ok(members)
    }

    /// The group of all members. Each recovery makes another.
    pub fn group(&self) -> &Group {
        &self.group
    }

    /// How many groups there were, counted from 1.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Has this process joined in place of one that died?
    pub fn has_joined(&self) -> bool {
        self.has_joined
    }

    /// `LOCAL_RANK`, or for a spare that of the rank whose place it has taken.
    pub fn local_rank(&self) -> Option<Rank> {
        self.notes[self.group.rank()].local_rank
    }

    /// The ranks that have joined and have not yet got from others what they need to train. All ranks have the same list.
    pub fn without_state(&self) -> Vec<Rank> {
        self.ranks_where(|note| !note.has_state)
    }

    /// The ranks that can hand over what training needs.
    pub fn with_state(&self) -> Vec<Rank> {
        self.ranks_where(|note| note.has_state)
    }

    fn ranks_where(&self, is_meant: impl Fn(&Note) -> bool) -> Vec<Rank> {
        (0..self.notes.len()).filter(|rank| is_meant(&self.notes[*rank])).collect()
    }

    /// Notes that the ranks without state have got it. All ranks call it after the hand-over.
    pub fn state_is_complete(&mut self) {
        self.notes.iter_mut().for_each(|note| note.has_state = true);
    }

    /// Continues after a failure with those that are left, and with processes that take the places of the dead, if a launcher
    /// starts such. Every survivor must call it. Blocks until the new group is made. If ranks die meanwhile, the others begin again.
    ///
    /// # Errors
    /// If too few ranks are left (see [`Options::quorum`]), this rank was left out, or no process joins in time.
    pub fn recover(&mut self) -> Result<Recovered> {
        let began = Instant::now();
        let mut survivors = self.group.shrink()?;
        for _ in 0..ATTEMPTS {
            match self.recover_with(&survivors, began) {
                Ok(Some(recovered)) => return Ok(recovered),
                Ok(None) => {}
                Err(error) if survivors.failure().is_none() => return Err(error),
                Err(error) => {
                    tracing::warn!("a survivor died during the recovery, which begins again: {error}");
                    survivors = survivors.shrink()?;
                }
            }
        }
        let message = format!("{ATTEMPTS} attempts to admit other processes have failed");
        let fault = Fault::new(ErrorKind::Connect, message).hint("see the warnings in the log of each rank");
        Err(survivors.recovery_error(began.elapsed(), fault))
    }

    /// One attempt; nothing if a process did not take part that was to join. Then every survivor still has `survivors`.
    fn recover_with(&mut self, survivors: &Group, began: Instant) -> Result<Option<Recovered>> {
        let before = &self.notes[self.group.rank()];
        let own = self.note(before.seat, before.local_rank, before.joining.clone(), before.has_state)?;
        let present = all_notes(survivors, &own)?;
        let is_first = survivors.rank() == 0;
        let seats: Vec<Rank> = present.iter().map(|note| note.seat).collect();
        let vacant = seats::vacant(self.notes.len(), &seats);
        let Some(StoreOfRound(store)) = self.store.clone().filter(|_| !vacant.is_empty()) else {
            let admission = self.without_the_dead(present, vacant);
            return self.enter(survivors.clone(), admission, is_first, began).map(Some);
        };
        let chosen = is_first.then(|| self.choose(&*store, survivors, &present, vacant));
        let admission = announce(survivors, chosen, began)?;
        let handles: Vec<&str> = admission.members.iter().map(|note| &*note.handle).collect();
        let limit = survivors.timeout_of_calls().min(ATTEMPT_MAX);
        match survivors.with_timeout(limit).reconfigure_as(&handles, admission.id, &admission.name) {
            Ok(group) => self.enter(group, admission, is_first, began).map(Some),
            Err(error) => {
                tracing::warn!("the recovery is tried again: {error}");
                Ok(None)
            }
        }
    }

    fn without_the_dead(&self, present: Vec<Note>, left: Vec<Rank>) -> Admission {
        let closed_up = present.into_iter().enumerate().map(|(seat, note)| Note { seat, ..note });
        Admission {
            generation: self.generation + 1,
            id: 0,
            name: String::new(),
            members: closed_up.collect(),
            left,
            joined: Vec::new(),
        }
    }

    /// Waits for processes that take the vacant places, and tells them.
    fn choose(
        &self,
        store: &dyn Store,
        survivors: &Group,
        present: &[Note],
        vacant: Vec<Rank>,
    ) -> std::result::Result<Admission, Fault> {
        let joiners = self.await_joiners(store, survivors, &vacant)?;
        let mut members = present.to_vec();
        for (seat, (_, joiner)) in vacant.iter().zip(&joiners) {
            let Joiner { handle, pid, host, joining, local_rank, .. } = joiner.clone();
            let local_rank = local_rank.or(self.notes[*seat].local_rank);
            members.push(Note { seat: *seat, handle, pid, host, local_rank, joining, has_state: false });
        }
        members.sort_by_key(|note| note.seat);
        let admission = Admission {
            generation: self.generation + 1,
            id: random()? as u64,
            name: name_of(survivors.name(), self.generation + 1),
            members,
            joined: vacant.clone(),
            left: vacant,
        };
        let text = notes::to_text(&admission)?;
        let numbers: Vec<i64> = joiners.iter().map(|(number, _)| *number).collect();
        // In this order: a process that was taken and not told would wait for good if this one died in between.
        for number in &numbers {
            store.set(notes::admitted_key(*number), &text).map_err(store_fault)?;
        }
        notes::take(store, &numbers)?;
        Ok(admission)
    }

    /// For each vacant rank the process that takes it.
    fn await_joiners(
        &self,
        store: &dyn Store,
        survivors: &Group,
        vacant: &[Rank],
    ) -> std::result::Result<Vec<(i64, Joiner)>, Fault> {
        let deadline = Deadline::after(survivors.timeout_of_calls());
        loop {
            let count = store.add(notes::JOINERS, 0).map_err(store_fault)?;
            let (mut waiting, unwritten) = notes::waiting(store, count)?;
            if let Some(chosen) = seats::assign(vacant, &waiting) {
                return Ok(chosen.into_iter().map(|at| waiting[at].clone()).collect());
            }
            if survivors.failure().is_some() {
                return Err(Fault::new(ErrorKind::PeerLost, "another survivor died"));
            }
            if deadline.passed() {
                waiting.retain(|(_, joiner)| joiner.rank.is_none_or(|rank| vacant.contains(&rank)));
                let message = format!(
                    "no process has joined in place of {} within {}; {} wait to join",
                    show_ranks(vacant),
                    show_duration(deadline.elapsed()),
                    waiting.len()
                );
                return Err(Fault::new(ErrorKind::Timeout, message)
                    .hint("check the launcher's log for why it started no replacement, or keep some ready with `--spares`"));
            }
            let next = notes::joiner_key(unwritten.unwrap_or(count + 1));
            match store.wait_for(&[next], LOOK) {
                Err(error) if error.kind() != tenfold_store::ErrorKind::Timeout => {
                    return Err(store_fault(error));
                }
                _ => {}
            }
        }
    }

    fn enter(
        &mut self,
        group: Group,
        admission: Admission,
        is_first: bool,
        began: Instant,
    ) -> Result<Recovered> {
        let before = std::mem::replace(&mut self.notes, admission.members);
        self.group = group;
        self.generation = admission.generation;
        if is_first {
            let left: Vec<&Note> = admission.left.iter().map(|rank| &before[*rank]).collect();
            if let Err(error) = self.publish(began, &left, &admission.joined) {
                // The group is made; only the launcher does not learn of it.
                tracing::warn!("the launcher was not told about generation {}: {error}", self.generation);
            }
        }
        let took = began.elapsed();
        tracing::info!(
            "generation {} of `{}` after {}: {} left, {} joined",
            self.generation,
            self.group.name(),
            show_duration(took),
            show_ranks(&admission.left),
            show_ranks(&admission.joined)
        );
        Ok(Recovered { generation: self.generation, left: admission.left, joined: admission.joined, took })
    }

    /// Tells the launcher.
    fn publish(&self, began: Instant, left: &[&Note], joined: &[Rank]) -> Result<()> {
        let Some(StoreOfRound(store)) = &self.store else { return Ok(()) };
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let generation = Generation {
            generation: self.generation,
            took_ms: millis(began.elapsed()),
            at_unix_ms: millis(now),
            ranks: self.notes.iter().map(Process::of).collect(),
            left: left.iter().map(|note| Process::of(note)).collect(),
            joined: joined.iter().map(|rank| Process::of(&self.notes[*rank])).collect(),
        };
        let text = notes::to_text(&generation);
        let set = text.and_then(|text| store.set(notes::GENERATION, text).map_err(store_fault));
        set.map_err(|fault| self.group.recovery_error(began.elapsed(), fault))
    }

    /// What others need to know of this process.
    fn note(
        &self,
        seat: Rank,
        local_rank: Option<Rank>,
        joining: Option<String>,
        has_state: bool,
    ) -> Result<Note> {
        let (pid, host) = self.group.process();
        let handle = if self.store.is_some() { self.group.handle()? } else { String::new() };
        Ok(Note { seat, handle, pid, host, local_rank, joining, has_state })
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

fn all_notes(group: &Group, own: &Note) -> Result<Vec<Note>> {
    let failed = |fault| group.recovery_error(Duration::ZERO, fault);
    let text = notes::to_text(own).map_err(failed)?;
    let texts = group.all_gather(text.as_bytes())?;
    let read = |(rank, text): (usize, &Vec<u8>)| notes::from_text(text, &format!("what rank {rank} sent"));
    let notes = texts.iter().enumerate().map(read).collect::<std::result::Result<Vec<Note>, Fault>>();
    notes.map_err(failed)
}

/// Rank 0 tells the others what it has chosen, or why it could not. Others give nothing.
fn announce(
    group: &Group,
    chosen: Option<std::result::Result<Admission, Fault>>,
    began: Instant,
) -> Result<Admission> {
    let failed = |fault| group.recovery_error(began.elapsed(), fault);
    let choice = chosen.map(|chosen| match chosen {
        Ok(admission) => Choice::Admit(admission),
        Err(fault) => {
            let timed_out = fault.kind == ErrorKind::Timeout;
            Choice::Refuse { message: fault.message, hint: fault.hint.unwrap_or_default(), timed_out }
        }
    });
    let text = choice.map_or_else(|| Ok(String::new()), |choice| notes::to_text(&choice)).map_err(failed)?;
    // Rank 0 may wait for processes as long as an operation may take.
    let patient = group.with_timeout(group.timeout_of_calls().saturating_mul(2).saturating_add(ATTEMPT_MAX));
    let texts = patient.all_gather(text.as_bytes())?;
    match notes::from_text(&texts[0], "what rank 0 sent").map_err(failed)? {
        Choice::Admit(admission) => Ok(admission),
        Choice::Refuse { message, hint, timed_out } => {
            let kind = if timed_out { ErrorKind::Timeout } else { ErrorKind::Store };
            Err(failed(Fault::new(kind, message).hint(hint)))
        }
    }
}
