//! Runs the plans of all ranks on symbols and reports the first flaw.
//!
//! A symbol stands for the contents of a part of a buffer: one rank's value, or the combination of symbols in
//! a certain order. Equal symbols are equal bits, whatever the values. So one run proves, for all values and
//! lengths: the result is right, every rank is counted once, all ranks get the same bits, no rank waits
//! forever, no message is left over, and nothing is overwritten that a peer may still read.
//!
//! One schedule is enough. Each rank's steps are fixed, a link has one writer and one reader, and a rank
//! waits for one thing that no other rank can take away (a Kahn network, with free space in a link as a token
//! going back). So any order of execution leads to the same messages, the same end, and the same set of
//! blocked ranks. What must hold in *every* order (which rank may still be reading) is decided by the
//! happens-before relation, kept as vector clocks, and not by the order of this run.

mod flaw;
mod symbols;

use std::{collections::VecDeque, rc::Rc};

use self::symbols::{RankSet, Symbol, Symbols};
use crate::{Algorithm, Area, Chunk, Kind, Place, Plan, Rank, Step, Topology};

pub use self::flaw::{Flaw, Stuck, Wait};

/// What must be proved of plans.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claim {
    /// What the plans are to compute.
    pub kind: Kind,
    /// Matters only if the kind has a root.
    pub root: Rank,
    /// All parts can be assumed to have the same length.
    pub equal_parts: bool,
    /// Results are combined in one pass over all ranks in order of rank.
    pub in_rank_order: bool,
}

/// Proves that `algorithm` has its declared properties for these ranks and this root.
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
/// Plans that may run in pieces are run twice in a row, since pieces follow each other on the same links; those with
/// phases as often as it takes until as many rounds are under way as there ever are, and until one was over
/// meanwhile.
pub fn run(claim: &Claim, plans: &[Plan]) -> Result<(), Flaw> {
    inspect(claim, plans)?;
    let mut machine = Machine::new(claim, plans);
    machine.run_until_stuck()?;
    machine.all_came_to_the_end()?;
    machine.all_heard_of_each_other()?;
    machine.results_are_right()
}

// Checks that need no run.

fn inspect(claim: &Claim, plans: &[Plan]) -> Result<(), Flaw> {
    for (rank, plan) in plans.iter().enumerate() {
        if !has_right_parts(claim, plans, rank) {
            return Err(Flaw::WrongParts { rank });
        }
        if plan.pieces != plans[0].pieces {
            return Err(Flaw::PiecesDiffer { rank: 0, other: rank });
        }
        if plan.seams.len() != plans[0].seams.len() {
            return Err(Flaw::PhasesDiffer { rank: 0, other: rank });
        }
        let in_order = plan.seams.is_sorted() && plan.seams.iter().all(|seam| *seam <= plan.steps.len());
        let may_have = plan.pieces && plan.scratch.is_empty();
        if !in_order || !plan.seams.is_empty() && !may_have {
            return Err(Flaw::WrongPhases { rank });
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
        Kind::AllReduce | Kind::Reduce | Kind::Scan | Kind::Broadcast => (0, plans[0].output.max(1)),
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

/// The unknown length of a part: equal ones stand for equal lengths.
type Length = (usize, usize);

/// What a chunk holds: each part's symbol and length.
type Parts = Rc<[(Symbol, Length)]>;

/// How many steps of a rank have happened. A vector clock has one of these per rank.
type Time = u32;

/// A message in transit.
struct Message {
    parts: Parts,
    /// When it was sent, by the sender's time.
    sent: Time,
    /// What the sender knew of all ranks at that time.
    known: Rc<[Time]>,
    /// If it was lent: its index in `Machine::loans`.
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

/// One rank executing its plan.
struct Walker {
    place: Place,
    /// The step before, if there was one.
    previous: Option<usize>,
    now: Time,
    /// The last step of each rank that this one knows of: its vector clock. Shared with the messages that it
    /// sent since it last received anything.
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
        let rounds = if plans[0].pieces { plans[0].seams.len() + 2 } else { 1 };
        let symbols = Symbols::new(plans, rounds);
        let walkers = (0..size).map(|rank| Walker::new(claim, rank, plans, rounds, &symbols)).collect();
        let links = (0..size * size).map(|_| VecDeque::new()).collect();
        Machine { claim: *claim, plans, rounds, symbols, walkers, links, loans: Vec::new() }
    }

    fn run_until_stuck(&mut self) -> Result<(), Flaw> {
        let mut ready: VecDeque<Rank> = (0..self.plans.len()).collect();
        while let Some(rank) = ready.pop_front() {
            while self.try_step(rank)? {
                // Only the peers of this step can be waiting for it.
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

    /// Executes the next step of `rank` if it need not wait.
    fn try_step(&mut self, rank: Rank) -> Result<bool, Flaw> {
        let plan = &self.plans[rank];
        let walker = &mut self.walkers[rank];
        walker.place.settle(plan, self.rounds);
        while walker.entered.len() <= walker.place.round.min(self.rounds - 1) {
            walker.entered.push(walker.now);
        }
        let Some(what) = self.next_step(rank) else { return Ok(false) };
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
        let walker = &mut self.walkers[rank];
        walker.previous = Some(walker.place.step);
        walker.place.advance(plan, self.rounds);
        Ok(true)
    }

    fn next_step(&self, rank: Rank) -> Option<&'a Step> {
        let Place { round, step, .. } = self.walkers[rank].place;
        self.plans[rank].steps.get(step).filter(|_| round < self.rounds)
    }

    fn previous_step(&self, rank: Rank) -> Option<(usize, &'a Step)> {
        let step = self.walkers[rank].previous?;
        Some((step, &self.plans[rank].steps[step]))
    }

    /// What the step has to wait for now. A send begins when all its links have space, and a reduction when
    /// all messages have arrived. A real executor may be less strict, and then blocks less often.
    fn waits_for(&self, rank: Rank, what: &Step) -> Option<Wait> {
        let size = self.plans.len();
        let empty = |&from: &Rank| self.links[from * size + rank].is_empty();
        let Plan { lends, seams, .. } = &self.plans[rank];
        let full = |&to: &Rank| !lends && self.links[rank * size + to].len() > seams.len();
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

    /// The next message of `from`; it must have the shape of its destination.
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
        let step = self.walkers[rank].place.step;
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
        if let (true, Some(missing)) = (finish, contributors.first_missing(self.contributors(rank))) {
            return Err(Flaw::FinishedTooEarly { rank, step, missing });
        }
        Ok(self.symbols.combined(operands, finish, contributors))
    }

    /// The first so many ranks are in the result of `rank`.
    fn contributors(&self, rank: Rank) -> usize {
        if self.claim.kind == Kind::Scan { rank + 1 } else { self.plans.len() }
    }

    fn read(&self, rank: Rank, chunk: Chunk) -> Result<Parts, Flaw> {
        let Walker { cells, place: Place { step, .. }, .. } = &self.walkers[rank];
        let held = self.cells(rank, chunk).map(|index| cells[index].symbol);
        let nothing = Flaw::ReadsNothing { rank, step: *step, chunk };
        let parts = held
            .zip(chunk.parts())
            .map(|(symbol, part)| Some((symbol?, self.length(rank, chunk.buffer, part))));
        parts.collect::<Option<_>>().ok_or(nothing)
    }

    /// Only if every rank to which the memory was lent is known to have read it: this rank has received,
    /// through any chain of messages, something that the reader sent after reading.
    fn write(&mut self, rank: Rank, chunk: Chunk, parts: &[(Symbol, Length)]) -> Result<(), Flaw> {
        for (index, &(symbol, _)) in self.cells(rank, chunk).zip(parts) {
            let Walker { place: Place { step, .. }, known, cells, .. } = &mut self.walkers[rank];
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
        if fits { Ok(()) } else { Err(Flaw::WrongShape { rank, step: self.walkers[rank].place.step, from }) }
    }

    fn cells(&self, rank: Rank, chunk: Chunk) -> std::ops::Range<usize> {
        let start = first_cell(&self.plans[rank], chunk.buffer, self.walkers[rank].place.round, self.rounds);
        start + chunk.first..start + chunk.first + chunk.count
    }

    /// Which parts have the same length, on which rank: the contract of each collective with its caller.
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
        let what = self.next_step(rank)?;
        let step = self.walkers[rank].place.step;
        let waits_for = self.waits_for(rank, what).expect("a rank that can go on does");
        Some(Stuck { rank, step, waits_for })
    }

    /// A barrier moves no data; its result is that every rank knows that every other rank has joined.
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
            Kind::AllReduce | Kind::Reduce | Kind::Scan => {
                return self.sum_is_right(result, rank, part, (part, round));
            }
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
        let wanted = self.contributors(rank);
        if let Some(contributor) = contributors.first_missing(wanted) {
            return Err(Flaw::Missing { rank, part, contributor });
        }
        if contributors.count() != wanted {
            return Err(Flaw::WrongResult { rank, part });
        }
        if !summary.finished {
            return Err(Flaw::NeverFinished { rank, part });
        }
        if self.claim.kind == Kind::AllReduce && self.result(0, part, element.1) != Some(result) {
            return Err(Flaw::RanksDiffer { rank: 0, other: rank, part });
        }
        if self.claim.in_rank_order && !self.symbols.is_in_rank_order(result, element, wanted) {
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
    /// At the start of its plan, with memory that holds the caller's values.
    fn new(claim: &Claim, rank: Rank, plans: &[Plan], rounds: usize, symbols: &Symbols) -> Self {
        let plan = &plans[rank];
        let in_place = match claim.kind {
            Kind::AllReduce | Kind::Reduce | Kind::Scan => true,
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
        Walker {
            place: Place::default(),
            previous: None,
            now: 0,
            known: vec![0; plans.len()].into(),
            entered: vec![0],
            cells,
        }
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
