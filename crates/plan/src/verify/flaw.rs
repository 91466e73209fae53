//! The possible flaws of a plan, with their messages.

use std::fmt;

use crate::{Chunk, Rank};

/// A flaw of plans. Steps and parts are counted from 0, as in the listing of a plan.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
#[expect(missing_docs, reason = "each variant says what its fields are")]
pub enum Flaw {
    /// A buffer is not split into as many parts as the collective requires.
    WrongParts { rank: Rank },
    /// Ranks differ on whether the plan may run in pieces.
    PiecesDiffer { rank: Rank, other: Rank },
    /// Ranks have different numbers of phases.
    PhasesDiffer { rank: Rank, other: Rank },
    /// Phases that are not in order, or in a plan that may not have any: one that does not run in pieces, or has
    /// scratch, which rounds that overlap would share.
    WrongPhases { rank: Rank },
    /// A chunk of several parts in a plan that is declared to run in pieces.
    ClaimsPieces { rank: Rank, step: usize },
    /// A chunk or a peer that does not exist.
    OutOfBounds { rank: Rank, step: usize },
    /// A rank sends to itself or waits for itself.
    SelfMessage { rank: Rank, step: usize },
    /// Peers of one step are named twice, or those of a reduction are not ascending.
    PeersNotAscending { rank: Rank, step: usize },
    /// The input belongs to the caller.
    WritesInput { rank: Rank, step: usize },
    /// What is written overlaps what is read in the same step, without being the same.
    Overlaps { rank: Rank, step: usize },
    /// Reads memory that has not been written yet.
    ReadsNothing { rank: Rank, step: usize, chunk: Chunk },
    /// What is combined or copied has another number of parts, or parts of other lengths.
    WrongShape { rank: Rank, step: usize, from: Rank },
    /// Combines different elements.
    MixesParts { rank: Rank, step: usize },
    /// Combines two sums that both include the value of `contributor`.
    CountedTwice { rank: Rank, step: usize, contributor: Rank },
    /// `finish` although the value of `missing` is not included yet.
    FinishedTooEarly { rank: Rank, step: usize, missing: Rank },
    /// Combines a result that is already finished.
    FinishedTwice { rank: Rank, step: usize },
    /// Writes memory that `reader` may still be reading.
    OverwritesLent { rank: Rank, step: usize, reader: Rank },
    /// No rank can continue.
    Deadlock { stuck: Vec<Stuck> },
    /// A message that no rank takes.
    LeftOver { from: Rank, to: Rank },
    /// Left a barrier without knowing that `absent` has joined.
    LeftAlone { rank: Rank, absent: Rank },
    /// A result without the value of `contributor`.
    Missing { rank: Rank, part: usize, contributor: Rank },
    /// A result that counts every rank but was never finished.
    NeverFinished { rank: Rank, part: usize },
    /// A result that is empty, or something else altogether.
    WrongResult { rank: Rank, part: usize },
    /// Two ranks combined the same values in different order, so their bits may differ.
    RanksDiffer { rank: Rank, other: Rank, part: usize },
    /// Not combined in one pass in order of rank.
    NotInRankOrder { rank: Rank, part: usize },
}

/// A rank that cannot continue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stuck {
    /// The rank that waits.
    pub rank: Rank,
    /// The step in which it waits.
    pub step: usize,
    /// What it waits for.
    pub waits_for: Wait,
}

/// What a blocked rank waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// A message of this rank.
    Message(Rank),
    /// This rank to take an earlier message.
    Room(Rank),
}

impl std::error::Error for Flaw {}

impl fmt::Display for Flaw {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Flaw::WrongParts { rank } => {
                write!(f, "rank {rank} does not split its buffers into the parts of the collective")
            }
            Flaw::PiecesDiffer { rank, other } => {
                write!(f, "only one of ranks {rank} and {other} may run in pieces")
            }
            Flaw::PhasesDiffer { rank, other } => {
                write!(f, "ranks {rank} and {other} have different numbers of phases")
            }
            Flaw::WrongPhases { rank } => {
                write!(f, "rank {rank} has phases in a plan that cannot have them, or in the wrong order")
            }
            Flaw::ClaimsPieces { rank, step } => {
                write!(
                    f,
                    "step {step} of rank {rank} has a chunk of several parts, so the plan cannot run in pieces"
                )
            }
            Flaw::OutOfBounds { rank, step } => {
                write!(f, "step {step} of rank {rank} names a part or a rank that does not exist")
            }
            Flaw::SelfMessage { rank, step } => {
                write!(f, "step {step} of rank {rank} is a message to itself")
            }
            Flaw::PeersNotAscending { rank, step } => {
                write!(f, "step {step} of rank {rank} does not name its peers once each in ascending order")
            }
            Flaw::WritesInput { rank, step } => {
                write!(f, "step {step} of rank {rank} writes the caller's input")
            }
            Flaw::Overlaps { rank, step } => {
                write!(f, "step {step} of rank {rank} overwrites what it is reading")
            }
            Flaw::ReadsNothing { rank, step, chunk } => {
                write!(f, "step {step} of rank {rank} reads {chunk}, which is not written yet")
            }
            Flaw::WrongShape { rank, step, from } if rank == from => {
                write!(f, "step {step} of rank {rank} has chunks of different lengths")
            }
            Flaw::WrongShape { rank, step, from } => {
                write!(
                    f,
                    "step {step} of rank {rank} gets a message of rank {from} that has a different length"
                )
            }
            Flaw::MixesParts { rank, step } => {
                write!(f, "step {step} of rank {rank} combines parts that do not belong together")
            }
            Flaw::CountedTwice { rank, step, contributor } => {
                write!(f, "step {step} of rank {rank} counts rank {contributor} twice")
            }
            Flaw::FinishedTooEarly { rank, step, missing } => {
                write!(f, "step {step} of rank {rank} finishes a result that lacks rank {missing}")
            }
            Flaw::FinishedTwice { rank, step } => {
                write!(f, "step {step} of rank {rank} combines a result that is already finished")
            }
            Flaw::OverwritesLent { rank, step, reader } => {
                write!(f, "step {step} of rank {rank} overwrites what rank {reader} may still be reading")
            }
            Flaw::Deadlock { stuck } => {
                f.write_str("deadlock: ")?;
                for (i, Stuck { rank, step, waits_for }) in stuck.iter().enumerate() {
                    let comma = if i == 0 { "" } else { ", " };
                    match waits_for {
                        Wait::Message(peer) => {
                            write!(f, "{comma}rank {rank} waits in step {step} for rank {peer}")?;
                        }
                        Wait::Room(peer) => {
                            write!(
                                f,
                                "{comma}rank {rank} waits in step {step} for rank {peer} to take a message"
                            )?;
                        }
                    }
                }
                Ok(())
            }
            Flaw::LeftOver { from, to } => write!(f, "rank {to} never takes a message of rank {from}"),
            Flaw::LeftAlone { rank, absent } => {
                write!(f, "rank {rank} may leave the barrier before rank {absent} has joined")
            }
            Flaw::Missing { rank, part, contributor } => {
                write!(f, "output[{part}] of rank {rank} lacks rank {contributor}")
            }
            Flaw::NeverFinished { rank, part } => {
                write!(f, "output[{part}] of rank {rank} counts every rank but was never finished")
            }
            Flaw::WrongResult { rank, part } => write!(f, "output[{part}] of rank {rank} is not the result"),
            Flaw::RanksDiffer { rank, other, part } => {
                write!(f, "ranks {rank} and {other} combined output[{part}] in different order")
            }
            Flaw::NotInRankOrder { rank, part } => {
                write!(f, "output[{part}] of rank {rank} was not combined in one pass in order of rank")
            }
        }
    }
}
