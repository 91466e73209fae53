//! The steps of one rank in a collective.
//!
//! Steps run in order. A `Send` sends a chunk to each rank named; links are first in, first out. A `Recv` or
//! `Reduce` waits for the next message of each rank named. Chunks of length zero are sent as empty messages:
//! they still tell the peer that this rank has joined, and what it called.
//!
//! What the executor of a plan must provide, and [`crate::verify`] relies on:
//! - A link holds at least one message that has not been taken. A plan that does not lend never needs more;
//!   one that lends may have any number in flight (those of this crate need one for each phase, which a test
//!   proves).
//! - A `Send` of a plan that does not lend is complete once the chunk is copied, so the next step may
//!   overwrite it.
//! - A plan with `pieces` may run repeatedly over successive slices of all parts, without a pause in between.
//!   Scratch may be the same memory each time.
//! - Each such run is a *round*. [`Place::advance`] says which step comes next. Without seams one round follows
//!   the other. Seams cut a plan into *phases*, and rounds overlap: a rank that has done the first phase of a
//!   round does the first phase of the next one before it waits for what the second phase needs. So links are
//!   in use while ranks wait for each other.
//! - The caller may use the memory again when all steps are done *and* peers have read what was lent to them.

use std::fmt;

use crate::Rank;

/// The most seams of a plan whose phases follow from the number of ranks: those of an all-reduce around 8 ranks. More
/// were not measured, and each of them means one more piece under way.
pub(crate) const SEAMS_MAX: usize = 14;

/// Memory that a plan works on. Each buffer is split into parts, numbered from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Area {
    /// The caller's input; never written.
    Input,
    /// The caller's output; also holds the input if the operation works in place.
    Output,
    /// Memory of the run. The next round may overwrite what a round leaves there.
    Scratch,
}

/// A run of consecutive parts of a buffer; `count` 0 is the empty chunk of a barrier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Chunk {
    /// Where it is.
    pub buffer: Area,
    /// Its first part.
    pub first: usize,
    /// How many parts it has.
    pub count: usize,
}

impl Chunk {
    /// No memory at all.
    pub const EMPTY: Chunk = Chunk { buffer: Area::Output, first: 0, count: 0 };

    /// One part of the caller's input.
    pub fn input(part: usize) -> Self {
        Chunk { buffer: Area::Input, first: part, count: 1 }
    }

    /// One part of the caller's output.
    pub fn output(part: usize) -> Self {
        Chunk { buffer: Area::Output, first: part, count: 1 }
    }

    /// One part of the run's own memory.
    pub fn scratch(part: usize) -> Self {
        Chunk { buffer: Area::Scratch, first: part, count: 1 }
    }

    /// The numbers of the parts.
    pub fn parts(&self) -> std::ops::Range<usize> {
        self.first..self.first + self.count
    }

    /// Whether the two have a part in common.
    pub fn overlaps(&self, other: &Chunk) -> bool {
        self.buffer == other.buffer
            && self.parts().start.max(other.parts().start) < self.parts().end.min(other.parts().end)
    }
}

/// One action of a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "each variant says what its fields are")]
pub enum Step {
    /// Sends `chunk` to each of `to`.
    Send { to: Vec<Rank>, chunk: Chunk },
    /// Copies the next message of `from` into `chunk`.
    Recv { from: Rank, chunk: Chunk },
    /// Sets `to` to the combination of `own` and the next message of each of `from` (which is ascending), in
    /// ascending order of rank (`own` has this rank's position), in one pass and rounded once. `finish`: the
    /// result includes every rank that it should, so the final step of an operation (the division of an average)
    /// happens here. `from` is empty in a group of one, and where a scan finishes what it has passed on. `to` is `own` or does not overlap it.
    Reduce { from: Vec<Rank>, own: Chunk, to: Chunk, finish: bool },
    /// Copies within this rank; the two do not overlap.
    Copy { from: Chunk, to: Chunk },
}

/// The steps of one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// What the rank does, in order.
    pub steps: Vec<Step>,
    /// How many parts `Input` is split into.
    pub input: usize,
    /// How many parts `Output` is split into.
    pub output: usize,
    /// Each part of `Scratch` is as long as the part of `Input` or `Output` named here.
    pub scratch: Vec<(Area, usize)>,
    /// A `Send` need not be taken before the next step begins, and peers may read the chunk in place: nothing
    /// is overwritten that a peer may still read.
    pub lends: bool,
    /// Every chunk has at most one part, so a long operation may run the plan over successive pieces of all parts.
    pub pieces: bool,
    /// Where the phases after the first begin, in steps, ascending. All ranks have as many.
    pub seams: Vec<usize>,
}

/// Where a rank is in a plan that it runs for several rounds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// Which round. After the last step of all rounds: how many there are.
    pub round: usize,
    /// The next step in this round.
    pub step: usize,
    phase: usize,
}

impl Place {
    /// The step is done: goes on to the next one of `rounds` rounds of `plan`.
    #[inline]
    pub fn advance(&mut self, plan: &Plan, rounds: usize) {
        self.step += 1;
        self.settle(plan, rounds);
    }

    /// The place itself if there is a step, else the next place where there is one.
    #[inline]
    pub fn settle(&mut self, plan: &Plan, rounds: usize) {
        while self.round < rounds && self.step >= plan.end_of_phase(self.phase) {
            self.end_phase(plan, rounds);
        }
    }

    /// Rounds start one after the other. With each start, all rounds under way do one phase, the youngest first.
    fn end_phase(&mut self, plan: &Plan, rounds: usize) {
        if self.phase < plan.seams.len() && self.round > 0 {
            (self.round, self.phase) = (self.round - 1, self.phase + 1);
        } else {
            let starts = self.round + self.phase + 1;
            self.phase = (starts + 1).saturating_sub(rounds);
            self.round = if self.phase > plan.seams.len() { rounds } else { starts - self.phase };
        }
        self.step = if self.round < rounds { plan.start_of_phase(self.phase) } else { 0 };
    }
}

/// The operations in which algorithms are written.
impl Plan {
    /// No steps yet; `input` and `output` are the numbers of parts. Does not lend, and allows pieces.
    pub fn new(input: usize, output: usize) -> Self {
        Plan {
            steps: Vec::new(),
            input,
            output,
            scratch: Vec::new(),
            lends: false,
            pieces: true,
            seams: Vec::new(),
        }
    }

    /// Claims that nothing is overwritten that a peer may still read.
    pub fn lending(self) -> Self {
        Plan { lends: true, ..self }
    }

    /// Declares that chunks have several parts.
    pub fn whole(self) -> Self {
        Plan { pieces: false, ..self }
    }

    /// A phase ends here. Messages of a link must all be taken the same number of phases after they were sent,
    /// or they would overtake each other.
    pub fn seam(&mut self) {
        self.seams.push(self.steps.len());
    }

    /// Leaves out all seams if there are more than [`SEAMS_MAX`].
    pub(crate) fn with_few_seams(mut self) -> Self {
        if self.seams.len() > SEAMS_MAX {
            self.seams.clear();
        }
        self
    }

    fn start_of_phase(&self, phase: usize) -> usize {
        if phase == 0 { 0 } else { self.seams[phase - 1] }
    }

    #[inline]
    fn end_of_phase(&self, phase: usize) -> usize {
        self.seams.get(phase).copied().unwrap_or(self.steps.len())
    }

    /// Adds a part of scratch as long as a part of `Input` or `Output`.
    pub fn add_scratch(&mut self, buffer: Area, part: usize) -> Chunk {
        self.scratch.push((buffer, part));
        Chunk::scratch(self.scratch.len() - 1)
    }

    /// Adds `count` adjacent parts of scratch, each as long as a part of `Input` or `Output`: to travel together, they
    /// must all have the same length.
    pub fn add_packet(&mut self, buffer: Area, part: usize, count: usize) -> Chunk {
        let first = self.scratch.len();
        self.scratch.extend(std::iter::repeat_n((buffer, part), count));
        Chunk { buffer: Area::Scratch, first, count }
    }

    /// Sends `chunk` to one rank.
    pub fn send(&mut self, to: Rank, chunk: Chunk) {
        self.send_all(&[to], chunk);
    }

    /// Sends `chunk` to several ranks in one step; without ranks there is no step.
    pub fn send_all(&mut self, to: &[Rank], chunk: Chunk) {
        if !to.is_empty() {
            self.steps.push(Step::Send { to: to.to_vec(), chunk });
        }
    }

    /// Copies the next message of `from` into `chunk`.
    pub fn recv(&mut self, from: Rank, chunk: Chunk) {
        self.steps.push(Step::Recv { from, chunk });
    }

    /// Combines `own` and the next message of each of `from` into `to`, in order of rank; some ranks are
    /// still missing.
    pub fn reduce(&mut self, from: &[Rank], own: Chunk, to: Chunk) {
        self.push_reduce(from, own, to, false);
    }

    /// Like [`Plan::reduce`], and after it every rank is included.
    pub fn reduce_last(&mut self, from: &[Rank], own: Chunk, to: Chunk) {
        self.push_reduce(from, own, to, true);
    }

    /// Copies within this rank.
    pub fn copy(&mut self, from: Chunk, to: Chunk) {
        self.steps.push(Step::Copy { from, to });
    }

    fn push_reduce(&mut self, from: &[Rank], own: Chunk, to: Chunk, finish: bool) {
        let mut from = from.to_vec();
        from.sort_unstable();
        self.steps.push(Step::Reduce { from, own, to, finish });
    }
}

impl fmt::Display for Chunk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self.buffer {
            Area::Input => "input",
            Area::Output => "output",
            Area::Scratch => "scratch",
        };
        match self.count {
            0 => write!(f, "nothing"),
            1 => write!(f, "{name}[{}]", self.first),
            count => write!(f, "{name}[{}..{}]", self.first, self.first + count),
        }
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Step::Send { to, chunk } => write!(f, "send {chunk} to {}", Ranks(to)),
            Step::Recv { from, chunk } => write!(f, "receive {chunk} from {from}"),
            Step::Reduce { from, own, to, finish } => {
                write!(f, "reduce {own} with {}", Ranks(from))?;
                if own != to {
                    write!(f, " into {to}")?;
                }
                if *finish { f.write_str(", finish") } else { Ok(()) }
            }
            Step::Copy { from, to } => write!(f, "copy {from} to {to}"),
        }
    }
}

/// One numbered line per step, as errors count them.
impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, step) in self.steps.iter().enumerate() {
            if self.seams.contains(&number) {
                writeln!(f, "     --")?;
            }
            writeln!(f, "{number:>3}  {step}")?;
        }
        Ok(())
    }
}

struct Ranks<'a>(&'a [Rank]);

impl fmt::Display for Ranks<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("no rank");
        }
        for (i, rank) in self.0.iter().enumerate() {
            write!(f, "{}{rank}", if i == 0 { "" } else { ", " })?;
        }
        Ok(())
    }
}
