//! What ranks tell each other when a gradient is missing: all ranks report which gradient, and on which ranks.
//!
//! A rank without a gradient reports that to all other ranks and waits for their reports: often the same gradient is missing
//! there. If they do not answer soon, they are waiting for a bucket that will not arrive. The rank then aborts the reducer's
//! group. That makes the others look for reports, and answer. All this goes through a group of its own: if a rank never
//! answers, only that group fails.

use std::time::Duration;

use tenfold_store::Deadline;

use super::Param;
use super::bucket::NAMES_SHOWN;
use crate::fault::{show_duration, show_ranks};
use crate::work::Work;
use crate::{Buffer, DType, Group, Rank, Tag};

/// How long a rank listens before it disturbs the others: they need the time to get to the end of their iteration.
const GRACE: Duration = Duration::from_secs(2);

/// How long a rank listens in all.
const WAIT: Duration = Duration::from_secs(6);

/// In the reason of an abort it says that ranks have more to tell each other.
pub(super) const MISSING: &str = "no gradient at the end of iteration";

/// What a rank misses.
#[derive(Clone, Debug)]
pub(super) struct Complaint {
    /// In which it is.
    pub(super) iteration: u64,
    /// A byte per parameter that is 1 for a missing one.
    pub(super) missing: Vec<u8>,
}

/// What each rank misses, as far as known. `disturb` is called when all have answered, or have not done so for a while.
pub(super) fn exchange(group: &Group, own: &Complaint, disturb: impl FnOnce()) -> Vec<Option<Complaint>> {
    let message = [own.iteration.to_le_bytes().as_slice(), &own.missing].concat();
    let (soon, late) = (Deadline::after(GRACE), Deadline::after(WAIT));
    let group = group.background();
    let others: Vec<Rank> = (0..group.size()).filter(|rank| *rank != group.rank()).collect();
    let say = |rank: &Rank| group.start_send(Buffer::from_slice(&message).lend(), *rank, Tag(0));
    let said: Vec<Work> = others.iter().filter_map(|rank| say(rank).ok()).collect();
    let mut expected: Vec<(Rank, Buffer, Work)> = Vec::new();
    for rank in others {
        let mut answer = Buffer::zeros(DType::U8, message.len());
        if let Ok(work) = group.start_recv(answer.lend(), rank, Tag(0)) {
            expected.push((rank, answer, work));
        }
    }
    let in_time = expected.iter().all(|(_, _, work)| work.wait_by(soon).is_ok());
    disturb();
    let mut all = vec![None; group.size()];
    all[group.rank()] = Some(own.clone());
    for (rank, answer, work) in expected {
        if in_time || work.wait_by(late).is_ok() {
            all[rank] = answer.as_bytes().split_first_chunk().map(|(iteration, missing)| Complaint {
                iteration: u64::from_le_bytes(*iteration),
                missing: missing.to_vec(),
            });
        }
    }
    // If this rank left before the others have received its report, the report would be lost.
    said.iter().for_each(|work| _ = work.wait_by(late));
    all
}

/// The message for all ranks; `None` if no gradient is missing.
pub(super) fn describe(params: &[Param], all: &[Option<Complaint>]) -> Option<String> {
    let misses =
        |rank: &Rank, param| all[*rank].as_ref().is_some_and(|complaint| complaint.missing[param] == 1);
    let missing: Vec<(usize, Vec<Rank>)> = (0..params.len())
        .map(|param| (param, (0..all.len()).filter(|rank| misses(rank, param)).collect::<Vec<Rank>>()))
        .filter(|(_, ranks)| !ranks.is_empty())
        .collect();
    let complaining = all.iter().flatten().filter(|complaint| complaint.missing.contains(&1));
    let iteration = complaining.map(|complaint| complaint.iteration).max()?;
    let shown = missing.iter().take(NAMES_SHOWN).map(|(param, ranks)| {
        let name = &params[*param].name;
        if ranks.len() == all.len() {
            format!("`{name}` on all ranks")
        } else {
            format!("`{name}` on {}", show_ranks(ranks))
        }
    });
    let mut text = match missing.len() {
        1 => "1 parameter has".to_owned(),
        count => format!("{count} parameters have"),
    };
    text += &format!(" {MISSING} {iteration}: {}", shown.collect::<Vec<_>>().join(", "));
    if missing.len() > NAMES_SHOWN {
        text += &format!(" and {} more", missing.len() - NAMES_SHOWN);
    }
    let silent: Vec<Rank> = (0..all.len()).filter(|rank| all[*rank].is_none()).collect();
    if !silent.is_empty() {
        text += &format!("; {} did not answer within {}", show_ranks(&silent), show_duration(WAIT));
    }
    Some(text)
}
