//! Do all ranks have the same model?
//!
//! Ranks compare fingerprints. Only if those differ do they send each other what they have, and all find the same first
//! difference: also the rank that is right learns which one is not.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use super::Param;
use crate::fault::{Fault, Result};
use crate::{Buffer, DType, ErrorKind, Group, Rank};

/// What a rank tells of its model in detail; one that needs more is only said to differ.
const TEXT_MAX: usize = 64 << 20;

/// Checks that all ranks have parameters of the same number, shapes and dtypes, in the same order. Names may differ.
///
/// # Errors
/// On all ranks alike: the first parameter that differs from rank 0's, and on which rank.
pub fn verify_params(group: &Group, params: &[Param]) -> Result<()> {
    verify(group, params, "")
}

/// The same, and `settings` as well.
pub(super) fn verify(group: &Group, params: &[Param], settings: &str) -> Result<()> {
    let description = describe(params, settings);
    let mut hasher = DefaultHasher::new();
    description.comparable().for_each(|line| line.hash(&mut hasher));
    let facts = group.exchange(&[hasher.finish() as i64, description.text.len() as i64])?;
    if facts.iter().all(|theirs| theirs[0] == facts[0][0]) {
        return Ok(());
    }
    let longest = facts.iter().map(|theirs| theirs[1]).max().unwrap_or_default();
    if longest > TEXT_MAX as i64 {
        return Err(group.ddp_error(Fault::new(ErrorKind::Mismatch, "ranks have different models")));
    }
    let lengths: Vec<usize> = facts.iter().map(|theirs| theirs[1].max(0) as usize).collect();
    let all = gather(group, &description.text, &lengths)?;
    let all: Vec<Description> = all.into_iter().map(|text| Description { text }).collect();
    let other = (1..group.size()).find_map(|rank| Some((rank, difference(&all[0], &all[rank], rank)?)));
    let Some((rank, message)) = other else {
        return Ok(()); // builds with different ways to hash
    };
    let fault = Fault::new(ErrorKind::Mismatch, message).peer(rank);
    let hint =
        "build the same model with the same options on all ranks, with its parameters in the same order";
    Err(group.ddp_error(fault.hint(hint)))
}

/// A line for the settings, and two for each parameter: what it is, and its name.
struct Description {
    text: String,
}

impl Description {
    fn settings(&self) -> &str {
        self.text.lines().next().unwrap_or_default()
    }

    fn params(&self) -> Vec<(&str, &str)> {
        let lines: Vec<&str> = self.text.lines().skip(1).collect();
        lines.chunks_exact(2).map(|pair| (pair[0], pair[1])).collect()
    }

    fn comparable(&self) -> impl Iterator<Item = &str> {
        std::iter::once(self.settings()).chain(self.params().into_iter().map(|(kind, _)| kind))
    }
}

fn describe(params: &[Param], settings: &str) -> Description {
    let mut text = format!("{settings}\n");
    for param in params {
        let sparse = if param.sparse { " sparse" } else { "" };
        text += &format!("{:?} {}{sparse}\n", param.shape, param.dtype);
        text += &format!("{}\n", param.name.replace(['\n', '\r'], " "));
    }
    Description { text }
}

fn difference(first: &Description, other: &Description, rank: Rank) -> Option<String> {
    let (ours, theirs) = (first.params(), other.params());
    for (number, (our, their)) in ours.iter().zip(&theirs).enumerate() {
        if our.0 != their.0 {
            let (our, their) = (format!("`{}` {}", our.1, our.0), format!("`{}` {}", their.1, their.0));
            return Some(format!(
                "rank {rank} has another model than rank 0: parameter {number} is {their} there, and {our} on rank 0"
            ));
        }
    }
    if ours.len() != theirs.len() {
        let (longer, place) = if ours.len() > theirs.len() { (&ours, 0) } else { (&theirs, rank) };
        let extra = longer[ours.len().min(theirs.len())].1;
        return Some(format!(
            "rank {rank} has {} parameters, and rank 0 has {}: only rank {place} has `{extra}`",
            theirs.len(),
            ours.len()
        ));
    }
    let (our, their) = (first.settings(), other.settings());
    (our != their)
        .then(|| format!("rank {rank} has other options than rank 0: {their} there, {our} on rank 0"))
}

/// The texts of all ranks.
fn gather(group: &Group, own: &str, lengths: &[usize]) -> Result<Vec<String>> {
    let mut input = Buffer::from_slice(own.as_bytes());
    let mut outputs: Vec<Buffer> = lengths.iter().map(|len| Buffer::zeros(DType::U8, *len)).collect();
    group.start_all_gather(outputs.iter_mut().map(Buffer::lend).collect(), input.lend())?.wait()?;
    Ok(outputs.iter().map(|text| String::from_utf8_lossy(text.as_bytes()).into_owned()).collect())
}
