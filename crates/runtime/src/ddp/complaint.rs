//! What ranks tell each other when a gradient is missing: everybody shall hear which, and on which ranks.
//!
//! The rank that misses one aborts the reducer's group, so that nobody waits for it any longer. Then each rank that failed sends
//! to all others what it misses, by messages of the group from which the reducer was made, and listens for a while.

use std::time::Duration;

use tenfold_store::Deadline;

use super::Param;
use super::bucket::NAMES_SHOWN;
use crate::fault::{show_duration, show_ranks};
use crate::{DType, Group, Rank, Tensor};

/// How long a rank listens: others need no more than to notice that the group was aborted, unless they compute.
const WAIT: Duration = Duration::from_secs(5);

/// Messages of earlier reducers that are passed over.
const STALE_MAX: usize = 8;

/// In the reason of an abort it says that ranks have more to tell each other.
pub(super) const MISSING: &str = "no gradient at the end of iteration";

/// What each rank misses, as far as known: a byte per parameter that is 1 for a missing one.
pub(super) fn exchange(group: &Group, reducer: u64, own: &[u8]) -> Vec<Option<Vec<u8>>> {
    let mut message = reducer.to_le_bytes().to_vec();
    message.extend(own);
    let until = Deadline::after(WAIT);
    let calls = group.with_timeout(WAIT * 2);
    let others: Vec<Rank> = (0..group.size()).filter(|rank| *rank != group.rank()).collect();
    for rank in &others {
        // Whoever does not listen has failed or will hear of the abort.
        let sent = calls.background().send_reserved(Tensor::from_slice(&message).lend(), *rank);
        drop(sent);
    }
    let mut all = vec![None; group.size()];
    all[group.rank()] = Some(own.to_vec());
    for rank in others {
        all[rank] = receive(&calls, rank, &message, until);
    }
    all
}

fn receive(group: &Group, from: Rank, like: &[u8], until: Deadline) -> Option<Vec<u8>> {
    for _ in 0..STALE_MAX {
        let mut tensor = Tensor::zeros(DType::U8, like.len());
        group.recv_reserved(tensor.lend(), from).ok()?.wait_by(until).ok()?;
        let (reducer, states) = tensor.as_slice::<u8>().split_at(8);
        if reducer == &like[..8] {
            return Some(states.to_vec());
        }
    }
    None
}

/// The message for all; nothing if nobody misses anything.
pub(super) fn describe(params: &[Param], all: &[Option<Vec<u8>>], iteration: u64) -> Option<String> {
    let answered = all.iter().flatten().count();
    let missing: Vec<(usize, Vec<Rank>)> = (0..params.len())
        .map(|param| {
            let misses = |states: &Option<Vec<u8>>| states.as_ref().is_some_and(|states| states[param] == 1);
            (param, (0..all.len()).filter(|rank| misses(&all[*rank])).collect::<Vec<Rank>>())
        })
        .filter(|(_, ranks)| !ranks.is_empty())
        .collect();
    if missing.is_empty() {
        return None;
    }
    let shown = missing.iter().take(NAMES_SHOWN).map(|(param, ranks)| {
        let name = &params[*param].name;
        if ranks.len() == answered && answered == all.len() {
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
        text +=
            &format!("; {} did not say what it misses within {}", show_ranks(&silent), show_duration(WAIT));
    }
    Some(text)
}
