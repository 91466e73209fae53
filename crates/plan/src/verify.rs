//! Runs the plans of all ranks on symbols and names the first flaw.
//!
//! A symbol stands for what a part of a buffer holds: what one rank gave, or the combination of symbols in a certain
//! order. Equal symbols are equal bits, whatever the values. So one run proves, for all values and lengths: the result
//! is right, every rank is counted once, all ranks get the same bits, nobody waits forever, no message is left over,
//! and nothing is overwritten that a peer may still read.
//!
//! One schedule is enough. Each rank's steps are fixed, a link has one writer and one reader, and waiting is for one
//! thing that nobody else can take away (a Kahn network, with room in a link as a token going back); so any order of
//! execution leads to the same messages, the same end, and the same set of stuck ranks. What must hold in *every*
//! order (who may still be reading) is asked of the happens-before relation, kept as vector clocks, and not of the
//! order that was run.

use std::{
    collections::{HashMap, VecDeque},
    fmt,
    rc::Rc,
};

use crate::{Algorithm, Area, Chunk, Kind, Plan, Rank, Step, Topology};

/// What is to be proved of plans.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claim {
    /// What the plans are to compute.
    pub kind: Kind,
    /// Matters only if the kind has a root.
    pub root: Rank,
    /// It may be assumed that all parts are equally long.
    pub equal_parts: bool,
    /// Results are combined in one pass over all ranks in order of rank.
    pub in_rank_order: bool,
}

/// Proves that `algorithm` is what it says for these ranks and this root.
pub fn algorithm(algorithm: &Algorithm, topology: &Topology, root: Rank) -> Result<(), Flaw> {
    let claim = Claim {
        kind: algorithm.kind,
        root,
        equal_parts: algorithm.equal_parts,
        in_rank_order: algorithm.in_rank_order,
    };
    run(&claim, &algorithm.plans(topology, root))
}

/// Proves `claim` of the plans of all ranks (`plans[r]` is what rank `r` does).
///
/// Plans that may go in pieces are run twice in a row, since pieces follow each other on the same links.
pub fn run(claim: &Claim, plans: &[Plan]) -> Result<(), Flaw> {
    inspect(claim, plans)?;
    let mut machine = Machine::new(claim, plans);
    machine.run_until_stuck()?;
    machine.all_came_to_the_end()?;
    machine.all_heard_of_each_other()?;
    machine.results_are_right()
}

/// What is wrong with plans. Steps and parts are counted from 0, as in the listing of a plan.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
#[expect(missing_docs, reason = "each variant says what its fields are")]
pub enum Flaw {
    /// A buffer is not cut into as many parts as the collective has it.
    WrongParts { rank: Rank },
    /// Ranks do not agree on whether the plan may go in pieces.
    PiecesDiffer { rank: Rank, other: Rank },
    /// A chunk of several parts in a plan that is said to go in pieces.
    ClaimsPieces { rank: Rank, step: usize },
    /// A chunk or a peer that does not exist.
    OutOfBounds { rank: Rank, step: usize },
    /// A rank sends to itself or waits for itself.
    SelfMessage { rank: Rank, step: usize },
    /// Peers of one step are named twice, or those of a reduction are not ascending.
    PeersNotAscending { rank: Rank, step: usize },
    /// The input is the caller's.
    WritesInput { rank: Rank, step: usize },
    /// What is written overlaps what is read in the same step, without being the same.
    Overlaps { rank: Rank, step: usize },
    /// Reads memory that holds nothing yet.
    ReadsNothing { rank: Rank, step: usize, chunk: Chunk },
    /// What is combined or copied has another number of parts, or parts of other lengths.
    WrongShape { rank: Rank, step: usize, from: Rank },
    /// Combines different elements.
    MixesParts { rank: Rank, step: usize },
    /// Combines two sums that both hold what `contributor` gave.
    CountedTwice { rank: Rank, step: usize, contributor: Rank },
    /// `finish` though what `missing` gave is not in yet.
    FinishedTooEarly { rank: Rank, step: usize, missing: Rank },
    /// Combines what was finished already.
    FinishedTwice { rank: Rank, step: usize },
    /// Writes memory that `reader` may still be reading.
    OverwritesLent { rank: Rank, step: usize, reader: Rank },
    /// Nobody can go on.
    Deadlock { stuck: Vec<Stuck> },
    /// A message that nobody takes.
    LeftOver { from: Rank, to: Rank },
    /// Left a barrier without word that `absent` has come.
    LeftAlone { rank: Rank, absent: Rank },
    /// A result without what `contributor` gave.
    Missing { rank: Rank, part: usize, contributor: Rank },
    /// A result that counts every rank but was never finished.
    NeverFinished { rank: Rank, part: usize },
    /// A result that is nothing, or something else altogether.
    WrongResult { rank: Rank, part: usize },
    /// Two ranks combined the same values in different order, so their bits may differ.
    RanksDiffer { rank: Rank, other: Rank, part: usize },
    /// Combined in another way than in one pass in order of rank.
    NotInRankOrder { rank: Rank, part: usize },
}

/// A rank that cannot go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stuck {
    /// A rank that waits.
    pub rank: Rank,
    /// The step in which it waits.
    pub step: usize,
    /// What it waits for.
    pub waits_for: Wait,
}

/// What a stuck rank waits for.
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
                write!(f, "rank {rank} cuts its buffers into other parts than the collective does")
            }
            Flaw::PiecesDiffer { rank, other } => {
                write!(f, "only one of ranks {rank} and {other} may go in pieces")
            }
            Flaw::ClaimsPieces { rank, step } => {
                write!(
                    f,
                    "step {step} of rank {rank} has a chunk of several parts, so the plan cannot go in pieces"
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
                write!(f, "step {step} of rank {rank} writes over what it is reading")
            }
            Flaw::ReadsNothing { rank, step, chunk } => {
                write!(f, "step {step} of rank {rank} reads {chunk}, which holds nothing yet")
            }
            Flaw::WrongShape { rank, step, from } if rank == from => {
                write!(f, "step {step} of rank {rank} has chunks of different lengths")
            }
            Flaw::WrongShape { rank, step, from } => {
                write!(f, "step {step} of rank {rank} gets a message of rank {from} that has another length")
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
                write!(f, "step {step} of rank {rank} combines what was finished already")
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
                write!(f, "rank {rank} may leave the barrier before rank {absent} has come")
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

// What can be seen without running anything.

fn inspect(claim: &Claim, plans: &[Plan]) -> Result<(), Flaw> {
    for (rank, plan) in plans.iter().enumerate() {
        if !has_right_parts(claim, plans, rank) {
            return Err(Flaw::WrongParts { rank });
        }
        if plan.pieces != plans[0].pieces {
            return Err(Flaw::PiecesDiffer { rank: 0, other: rank });
        }
        for (step, what) in plan.steps.iter().enumerate() {
            inspect_step(what, plan, rank, step, plans.len())?;
        }
    }
    Ok(())
}

fn has_right_parts(claim: &Claim, plans: &[Plan], rank: Rank) -> bool {
    let size = plans.len();
    let plan = &plans[rank];
    let at_root = |parts| if rank == claim.root { parts } else { 0 };
    let (input, output) = match claim.kind {
        Kind::AllReduce | Kind::Reduce | Kind::Broadcast => (0, plans[0].output.max(1)),
        Kind::ReduceScatter => (size, 1),
        Kind::AllGather => (1, size),
        Kind::Gather => (1, at_root(size)),
        Kind::Scatter => (at_root(size), 1),
        Kind::AllToAll => (size, size),
        Kind::Barrier => (0, 0),
    };
    let measured = |&(buffer, part): &(Area, usize)| match buffer {
        Area::Input => part < input,
        Area::Output => part < output,
        Area::Scratch => false,
    };
    (plan.input, plan.output) == (input, output) && plan.scratch.iter().all(measured)
}

fn inspect_step(what: &Step, plan: &Plan, rank: Rank, step: usize, size: usize) -> Result<(), Flaw> {
    let (peers, read, written): (&[Rank], Option<Chunk>, Option<Chunk>) = match what {
        Step::Send { to, chunk } => (to, Some(*chunk), None),
        Step::Recv { from, chunk } => (std::slice::from_ref(from), None, Some(*chunk)),
        Step::Reduce { from, own, to, .. } => (from, Some(*own), Some(*to)),
        Step::Copy { from, to } => (&[], Some(*from), Some(*to)),
    };
    let chunks = || read.iter().chain(&written);
    let parts = |buffer| match buffer {
        Area::Input => plan.input,
        Area::Output => plan.output,
        Area::Scratch => plan.scratch.len(),
    };
    if chunks().any(|chunk| chunk.parts().end > parts(chunk.buffer)) || peers.iter().any(|&peer| peer >= size)
    {
        return Err(Flaw::OutOfBounds { rank, step });
    }
    if peers.contains(&rank) {
        return Err(Flaw::SelfMessage { rank, step });
    }
    let twice = |peers: &[Rank]| (1..peers.len()).any(|i| peers[..i].contains(&peers[i]));
    let ascending = |peers: &[Rank]| peers.windows(2).all(|pair| pair[0] < pair[1]);
    let in_order = if matches!(what, Step::Reduce { .. }) { ascending(peers) } else { !twice(peers) };
    if !in_order {
        return Err(Flaw::PeersNotAscending { rank, step });
    }
    if written.is_some_and(|chunk| chunk.buffer == Area::Input && chunk.count > 0) {
        return Err(Flaw::WritesInput { rank, step });
    }
    if plan.pieces && chunks().any(|chunk| chunk.count > 1) {
        return Err(Flaw::ClaimsPieces { rank, step });
    }
    let same_is_fine = matches!(what, Step::Reduce { .. });
    if let (Some(read), Some(written)) = (read, written)
        && read.overlaps(&written)
        && !(same_is_fine && read == written)
    {
        return Err(Flaw::Overlaps { rank, step });
    }
    Ok(())
}

// Symbols.

/// What memory holds. Two are equal only if they stand for the same bits.
///
/// The first numbers are what ranks gave, by place; the others are combinations, in the order they were first made.
type Symbol = usize;

/// Symbols combined in this order.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Combination {
    operands: Rc<[Symbol]>,
    finished: bool,
}

/// What is known of a symbol without taking it apart.
struct Summary<'a> {
    /// Which part of which round it belongs to.
    element: (usize, usize),
    finished: bool,
    contributors: Contributors<'a>,
}

enum Contributors<'a> {
    One(Rank),
    Many(&'a RankSet),
}

/// All symbols so far, each combination under one number: comparing results is comparing numbers, and a combination is
/// as small as the list of its operands.
struct Symbols {
    size: usize,
    /// How many parts a rank has at most.
    parts: usize,
    given: usize,
    numbers: HashMap<Combination, Symbol>,
    /// Of each combination: element, finished, contributors.
    summaries: Vec<((usize, usize), bool, RankSet)>,
}

impl Symbols {
    fn new(plans: &[Plan], rounds: usize) -> Self {
        let parts = plans.iter().map(|plan| plan.input.max(plan.output)).max().unwrap_or(0);
        let given = rounds * plans.len() * parts;
        Symbols { size: plans.len(), parts, given, numbers: HashMap::new(), summaries: Vec::new() }
    }

    /// What `rank` gave as this part in this round.
    fn given(&self, rank: Rank, (part, round): (usize, usize)) -> Symbol {
        (round * self.size + rank) * self.parts + part
    }

    fn combined(&mut self, operands: Rc<[Symbol]>, finished: bool, contributors: RankSet) -> Symbol {
        let element = self.summary(operands[0]).element;
        let next = self.given + self.summaries.len();
        let number = *self.numbers.entry(Combination { operands, finished }).or_insert(next);
        if number == next {
            self.summaries.push((element, finished, contributors));
        }
        number
    }

    /// Whether the symbol is the finished combination of what all ranks gave, in order of rank.
    fn is_in_rank_order(&self, symbol: Symbol, element: (usize, usize)) -> bool {
        let operands = (0..self.size).map(|rank| self.given(rank, element)).collect();
        self.numbers.get(&Combination { operands, finished: true }) == Some(&symbol)
    }

    fn summary(&self, symbol: Symbol) -> Summary<'_> {
        let Some(number) = symbol.checked_sub(self.given) else {
            let (part, place) = (symbol % self.parts, symbol / self.parts);
            let contributors = Contributors::One(place % self.size);
            return Summary { element: (part, place / self.size), finished: false, contributors };
        };
        let (element, finished, contributors) = &self.summaries[number];
        Summary { element: *element, finished: *finished, contributors: Contributors::Many(contributors) }
    }
}

/// A set of ranks, a bit each.
struct RankSet(Vec<u64>);

impl RankSet {
    fn new(size: usize) -> Self {
        RankSet(vec![0; size.div_ceil(64)])
    }

    /// Adds all of `contributors`, or gives the first rank that was there already.
    fn add(&mut self, contributors: &Contributors<'_>) -> Result<(), Rank> {
        match contributors {
            Contributors::One(rank) => self.add_word(rank / 64, 1 << (rank % 64)),
            Contributors::Many(set) => {
                set.0.iter().enumerate().try_for_each(|(i, &word)| self.add_word(i, word))
            }
        }
    }

    fn add_word(&mut self, i: usize, word: u64) -> Result<(), Rank> {
        let both = self.0[i] & word;
        self.0[i] |= word;
        if both == 0 { Ok(()) } else { Err(i * 64 + both.trailing_zeros() as usize) }
    }

    fn first_missing(&self, size: usize) -> Option<Rank> {
        let (i, word) = self.0.iter().enumerate().find(|&(_, &word)| word != u64::MAX)?;
        Some(i * 64 + word.trailing_ones() as usize).filter(|&rank| rank < size)
    }
}

// The run.

/// The length of a part, without knowing it: equal ones are equally long.
type Length = (usize, usize);

/// What a chunk holds: each part's symbol and length.
type Parts = Rc<[(Symbol, Length)]>;

/// How many steps of a rank have happened. A vector clock is one of these per rank.
type Time = u32;

/// A message under way.
struct Message {
    parts: Parts,
    /// When it was sent, by the sender's time.
    sent: Time,
    /// What the sender knew of all ranks then.
    known: Rc<[Time]>,
    /// If it was lent: its number in `Machine::loans`.
    loan: Option<usize>,
}

/// Memory that a peer may read in place.
struct Loan {
    reader: Rank,
    /// When the reader took it, by the reader's time.
    taken: Option<Time>,
}

#[derive(Clone, Default)]
struct Cell {
    symbol: Option<Symbol>,
    loans: Vec<usize>,
}

/// One rank on its way through its plan.
struct Walker {
    round: usize,
    step: usize,
    now: Time,
    /// The last step of each rank that this one has heard of: its vector clock. Shared with the messages it sent since
    /// it last heard anything.
    known: Rc<[Time]>,
    /// When each round began.
    entered: Vec<Time>,
    /// Input and output of each round, then scratch, which rounds share.
    cells: Vec<Cell>,
}

struct Machine<'a> {
    claim: Claim,
    plans: &'a [Plan],
    rounds: usize,
    symbols: Symbols,
    walkers: Vec<Walker>,
    /// From each rank to each: `from * size + to`.
    links: Vec<VecDeque<Message>>,
    loans: Vec<Loan>,
}

impl<'a> Machine<'a> {
    fn new(claim: &Claim, plans: &'a [Plan]) -> Self {
        let size = plans.len();
        let rounds = if plans[0].pieces { 2 } else { 1 };
        let symbols = Symbols::new(plans, rounds);
        let walkers = (0..size).map(|rank| Walker::new(claim, rank, plans, rounds, &symbols)).collect();
        let links = (0..size * size).map(|_| VecDeque::new()).collect();
        Machine { claim: *claim, plans, rounds, symbols, walkers, links, loans: Vec::new() }
    }

    fn run_until_stuck(&mut self) -> Result<(), Flaw> {
        let mut ready: VecDeque<Rank> = (0..self.plans.len()).collect();
        while let Some(rank) = ready.pop_front() {
            while self.try_step(rank)? {
                // Only those it dealt with can be waiting for what it just did.
                if let Some((_, what)) = self.previous_step(rank) {
                    match what {
                        Step::Send { to, .. } => ready.extend(to),
                        Step::Recv { from, .. } => ready.push_back(*from),
                        Step::Reduce { from, .. } => ready.extend(from),
                        Step::Copy { .. } => {}
                    }
                }
            }
        }
        Ok(())
    }

    /// Does the next step of `rank` if it need not wait.
    fn try_step(&mut self, rank: Rank) -> Result<bool, Flaw> {
        let walker = &mut self.walkers[rank];
        if walker.step == self.plans[rank].steps.len() && walker.round + 1 < self.rounds {
            walker.round += 1;
            walker.step = 0;
            walker.entered.push(walker.now);
        }
        let plan = &self.plans[rank];
        let Some(what) = plan.steps.get(self.walkers[rank].step) else { return Ok(false) };
        if self.waits_for(rank, what).is_some() {
            return Ok(false);
        }
        self.walkers[rank].now += 1;
        match what {
            Step::Send { to, chunk } => self.send(rank, to, *chunk)?,
            Step::Recv { from, chunk } => {
                let parts = self.take(rank, *from, *chunk)?;
                self.write(rank, *chunk, &parts)?;
            }
            Step::Reduce { from, own, to, finish } => self.reduce(rank, from, *own, *to, *finish)?,
            Step::Copy { from, to } => {
                let parts = self.read(rank, *from)?;
                self.check_shape(rank, rank, &parts, *to)?;
                self.write(rank, *to, &parts)?;
            }
        }
        self.walkers[rank].step += 1;
        Ok(true)
    }

    fn previous_step(&self, rank: Rank) -> Option<(usize, &'a Step)> {
        let step = self.walkers[rank].step.checked_sub(1)?;
        Some((step, &self.plans[rank].steps[step]))
    }

    /// What the step has to wait for now. A send begins when all its links have room, and a reduction when all messages
    /// are there: whoever runs plans may be less strict, and then gets stuck less.
    fn waits_for(&self, rank: Rank, what: &Step) -> Option<Wait> {
        let size = self.plans.len();
        let empty = |&from: &Rank| self.links[from * size + rank].is_empty();
        let full = |&to: &Rank| !self.plans[rank].lends && !self.links[rank * size + to].is_empty();
        match what {
            Step::Send { to, .. } => to.iter().copied().find(full).map(Wait::Room),
            Step::Recv { from, .. } => Some(*from).filter(empty).map(Wait::Message),
            Step::Reduce { from, .. } => from.iter().copied().find(empty).map(Wait::Message),
            Step::Copy { .. } => None,
        }
    }

    fn send(&mut self, rank: Rank, to: &[Rank], chunk: Chunk) -> Result<(), Flaw> {
        let parts = self.read(rank, chunk)?;
        let size = self.plans.len();
        for &reader in to {
            let loan = self.plans[rank].lends.then(|| {
                self.loans.push(Loan { reader, taken: None });
                self.loans.len() - 1
            });
            if let Some(loan) = loan {
                for index in self.cells(rank, chunk) {
                    self.walkers[rank].cells[index].loans.push(loan);
                }
            }
            let Walker { now, known, .. } = &self.walkers[rank];
            let message = Message { parts: parts.clone(), sent: *now, known: known.clone(), loan };
            self.links[rank * size + reader].push_back(message);
        }
        Ok(())
    }

    /// The next message of `from`; it must have the shape of where it goes.
    fn take(&mut self, rank: Rank, from: Rank, target: Chunk) -> Result<Parts, Flaw> {
        let link = from * self.plans.len() + rank;
        let message = self.links[link].pop_front().expect("a step begins when its messages are there");
        let Walker { now, known, .. } = &mut self.walkers[rank];
        if let Some(loan) = message.loan {
            self.loans[loan].taken = Some(*now);
        }
        let known = Rc::make_mut(known);
        known.iter_mut().zip(&*message.known).for_each(|(mine, theirs)| *mine = (*mine).max(*theirs));
        known[from] = known[from].max(message.sent);
        self.check_shape(rank, from, &message.parts, target)?;
        Ok(message.parts)
    }

    fn reduce(&mut self, rank: Rank, from: &[Rank], own: Chunk, to: Chunk, finish: bool) -> Result<(), Flaw> {
        let mine = self.read(rank, own)?;
        self.check_shape(rank, rank, &mine, to)?;
        let mut operands: Vec<Parts> = Vec::with_capacity(from.len() + 1);
        for &peer in from {
            operands.push(self.take(rank, peer, to)?);
        }
        operands.insert(from.partition_point(|&peer| peer < rank), mine.clone());
        let mut sums = Vec::with_capacity(to.count);
        for (part, &(_, length)) in mine.iter().enumerate() {
            let column = operands.iter().map(|parts| parts[part].0).collect();
            sums.push((self.combine(rank, column, finish)?, length));
        }
        self.write(rank, to, &sums)
    }

    fn combine(&mut self, rank: Rank, operands: Rc<[Symbol]>, finish: bool) -> Result<Symbol, Flaw> {
        let step = self.walkers[rank].step;
        let mut contributors = RankSet::new(self.plans.len());
        let element = self.symbols.summary(operands[0]).element;
        for operand in operands.iter().map(|&operand| self.symbols.summary(operand)) {
            if operand.element != element {
                return Err(Flaw::MixesParts { rank, step });
            }
            if operand.finished {
                return Err(Flaw::FinishedTwice { rank, step });
            }
            contributors.add(&operand.contributors).map_err(|contributor| Flaw::CountedTwice {
                rank,
                step,
                contributor,
            })?;
        }
        if let (true, Some(missing)) = (finish, contributors.first_missing(self.plans.len())) {
            return Err(Flaw::FinishedTooEarly { rank, step, missing });
        }
        Ok(self.symbols.combined(operands, finish, contributors))
    }

    fn read(&self, rank: Rank, chunk: Chunk) -> Result<Parts, Flaw> {
        let Walker { cells, step, .. } = &self.walkers[rank];
        let held = self.cells(rank, chunk).map(|index| cells[index].symbol);
        let nothing = Flaw::ReadsNothing { rank, step: *step, chunk };
        let parts = held
            .zip(chunk.parts())
            .map(|(symbol, part)| Some((symbol?, self.length(rank, chunk.buffer, part))));
        parts.collect::<Option<_>>().ok_or(nothing)
    }

    /// Only if everyone to whom the memory was lent is known to have read it: this rank has heard, through whatever
    /// chain of messages, of something the reader sent after taking it.
    fn write(&mut self, rank: Rank, chunk: Chunk, parts: &[(Symbol, Length)]) -> Result<(), Flaw> {
        for (index, &(symbol, _)) in self.cells(rank, chunk).zip(parts) {
            let Walker { step, known, cells, .. } = &mut self.walkers[rank];
            for loan in cells[index].loans.drain(..).map(|loan| &self.loans[loan]) {
                if loan.taken.is_none_or(|taken| known[loan.reader] <= taken) {
                    return Err(Flaw::OverwritesLent { rank, step: *step, reader: loan.reader });
                }
            }
            cells[index].symbol = Some(symbol);
        }
        Ok(())
    }

    fn check_shape(&self, rank: Rank, from: Rank, parts: &Parts, target: Chunk) -> Result<(), Flaw> {
        let lengths = target.parts().map(|part| self.length(rank, target.buffer, part));
        let fits = parts.iter().map(|&(_, length)| length).eq(lengths);
        if fits { Ok(()) } else { Err(Flaw::WrongShape { rank, step: self.walkers[rank].step, from }) }
    }

    fn cells(&self, rank: Rank, chunk: Chunk) -> std::ops::Range<usize> {
        let start = first_cell(&self.plans[rank], chunk.buffer, self.walkers[rank].round, self.rounds);
        start + chunk.first..start + chunk.first + chunk.count
    }

    /// Which parts are equally long, on which rank: the contract of each collective with its caller.
    fn length(&self, rank: Rank, buffer: Area, part: usize) -> Length {
        let (buffer, part) = match buffer {
            Area::Scratch => self.plans[rank].scratch[part],
            _ => (buffer, part),
        };
        match (self.claim.kind, buffer) {
            _ if self.claim.equal_parts => (0, 0),
            (Kind::AllToAll, Area::Input) => (rank, part),
            (Kind::AllToAll, _) => (part, rank),
            (Kind::AllGather | Kind::Gather, Area::Input) => (rank, 0),
            (Kind::ReduceScatter | Kind::Scatter, Area::Output) => (rank, 0),
            _ => (part, 0),
        }
    }

    fn all_came_to_the_end(&self) -> Result<(), Flaw> {
        let stuck: Vec<Stuck> = (0..self.plans.len()).filter_map(|rank| self.stuck(rank)).collect();
        if !stuck.is_empty() {
            return Err(Flaw::Deadlock { stuck });
        }
        let size = self.plans.len();
        match self.links.iter().position(|link| !link.is_empty()) {
            Some(link) => Err(Flaw::LeftOver { from: link / size, to: link % size }),
            None => Ok(()),
        }
    }

    fn stuck(&self, rank: Rank) -> Option<Stuck> {
        let step = self.walkers[rank].step;
        let what = self.plans[rank].steps.get(step)?;
        let waits_for = self.waits_for(rank, what).expect("a rank that can go on does");
        Some(Stuck { rank, step, waits_for })
    }

    /// A barrier moves nothing; its result is that everyone knows of something everyone else did since it came.
    fn all_heard_of_each_other(&self) -> Result<(), Flaw> {
        if self.claim.kind != Kind::Barrier {
            return Ok(());
        }
        for (rank, walker) in self.walkers.iter().enumerate() {
            let unheard = |&other: &Rank| walker.known[other] <= self.walkers[other].entered[self.rounds - 1];
            let others = (0..self.plans.len()).filter(|&other| other != rank);
            if let Some(absent) = others.into_iter().find(unheard) {
                return Err(Flaw::LeftAlone { rank, absent });
            }
        }
        Ok(())
    }

    fn results_are_right(&self) -> Result<(), Flaw> {
        for round in 0..self.rounds {
            for rank in 0..self.plans.len() {
                if self.claim.kind == Kind::Reduce && rank != self.claim.root {
                    continue;
                }
                for part in 0..self.plans[rank].output {
                    self.result_is_right(rank, part, round)?;
                }
            }
        }
        Ok(())
    }

    fn result_is_right(&self, rank: Rank, part: usize, round: usize) -> Result<(), Flaw> {
        let result = self.result(rank, part, round).ok_or(Flaw::WrongResult { rank, part })?;
        let (giver, element) = match self.claim.kind {
            Kind::AllReduce | Kind::Reduce => return self.sum_is_right(result, rank, part, (part, round)),
            Kind::ReduceScatter => return self.sum_is_right(result, rank, part, (rank, round)),
            Kind::Broadcast => (self.claim.root, part),
            Kind::AllGather | Kind::Gather => (part, 0),
            Kind::Scatter => (self.claim.root, rank),
            Kind::AllToAll => (part, rank),
            Kind::Barrier => unreachable!("a barrier has no parts"),
        };
        let expected = self.symbols.given(giver, (element, round));
        if result == expected { Ok(()) } else { Err(Flaw::WrongResult { rank, part }) }
    }

    fn sum_is_right(
        &self,
        result: Symbol,
        rank: Rank,
        part: usize,
        element: (usize, usize),
    ) -> Result<(), Flaw> {
        let size = self.plans.len();
        let summary = self.symbols.summary(result);
        if summary.element != element {
            return Err(Flaw::WrongResult { rank, part });
        }
        let mut contributors = RankSet::new(size);
        contributors.add(&summary.contributors).expect("an empty set has no rank of another");
        if let Some(contributor) = contributors.first_missing(size) {
            return Err(Flaw::Missing { rank, part, contributor });
        }
        if !summary.finished {
            return Err(Flaw::NeverFinished { rank, part });
        }
        if self.claim.kind == Kind::AllReduce && self.result(0, part, element.1) != Some(result) {
            return Err(Flaw::RanksDiffer { rank: 0, other: rank, part });
        }
        if self.claim.in_rank_order && !self.symbols.is_in_rank_order(result, element) {
            return Err(Flaw::NotInRankOrder { rank, part });
        }
        Ok(())
    }

    fn result(&self, rank: Rank, part: usize, round: usize) -> Option<Symbol> {
        let start = first_cell(&self.plans[rank], Area::Output, round, self.rounds);
        self.walkers[rank].cells[start + part].symbol
    }
}

impl Walker {
    /// At the start of its plan, with memory that holds what the caller gave.
    fn new(claim: &Claim, rank: Rank, plans: &[Plan], rounds: usize, symbols: &Symbols) -> Self {
        let plan = &plans[rank];
        let in_place = match claim.kind {
            Kind::AllReduce | Kind::Reduce => true,
            Kind::Broadcast => rank == claim.root,
            _ => false,
        };
        let mut cells = vec![Cell::default(); rounds * (plan.input + plan.output) + plan.scratch.len()];
        for round in 0..rounds {
            let input = first_cell(plan, Area::Input, round, rounds);
            for part in 0..plan.input {
                cells[input + part].symbol = Some(symbols.given(rank, (part, round)));
            }
            let output = first_cell(plan, Area::Output, round, rounds);
            for part in (0..plan.output).filter(|_| in_place) {
                cells[output + part].symbol = Some(symbols.given(rank, (part, round)));
            }
        }
        Walker { round: 0, step: 0, now: 0, known: vec![0; plans.len()].into(), entered: vec![0], cells }
    }
}

/// Where a buffer of a round begins among the cells of a rank.
fn first_cell(plan: &Plan, buffer: Area, round: usize, rounds: usize) -> usize {
    match buffer {
        Area::Input => round * (plan.input + plan.output),
        Area::Output => round * (plan.input + plan.output) + plan.input,
        Area::Scratch => rounds * (plan.input + plan.output),
    }
}
