//! Values as symbols: which rank's value it is, or which symbols were combined.

use std::collections::HashMap;
use std::rc::Rc;

use crate::{Plan, Rank};

/// The contents of memory. Two are equal only if they stand for the same bits.
///
/// The first numbers are the ranks' values, by position; the others are combinations, in the order they were
/// first made.
pub(super) type Symbol = usize;

/// Symbols combined in this order.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(super) struct Combination {
    pub(super) operands: Rc<[Symbol]>,
    pub(super) finished: bool,
}

/// What is known of a symbol without decomposing it.
pub(super) struct Summary<'a> {
    /// Which part of which round it belongs to.
    pub(super) element: (usize, usize),
    pub(super) finished: bool,
    pub(super) contributors: Contributors<'a>,
}

pub(super) enum Contributors<'a> {
    One(Rank),
    Many(&'a RankSet),
}

/// All symbols so far, each combination under one number: comparing results means comparing numbers, and a
/// combination is as small as the list of its operands.
pub(super) struct Symbols {
    pub(super) size: usize,
    /// How many parts a rank has at most.
    pub(super) parts: usize,
    pub(super) given: usize,
    pub(super) numbers: HashMap<Combination, Symbol>,
    /// Of each combination: element, finished, contributors.
    pub(super) summaries: Vec<((usize, usize), bool, RankSet)>,
}

impl Symbols {
    pub(super) fn new(plans: &[Plan], rounds: usize) -> Self {
        let parts = plans.iter().map(|plan| plan.input.max(plan.output)).max().unwrap_or(0);
        let given = rounds * plans.len() * parts;
        Symbols { size: plans.len(), parts, given, numbers: HashMap::new(), summaries: Vec::new() }
    }

    /// The value of `rank` for this part in this round.
    pub(super) fn given(&self, rank: Rank, (part, round): (usize, usize)) -> Symbol {
        (round * self.size + rank) * self.parts + part
    }

    pub(super) fn combined(
        &mut self,
        operands: Rc<[Symbol]>,
        finished: bool,
        contributors: RankSet,
    ) -> Symbol {
        let element = self.summary(operands[0]).element;
        let next = self.given + self.summaries.len();
        let number = *self.numbers.entry(Combination { operands, finished }).or_insert(next);
        if number == next {
            self.summaries.push((element, finished, contributors));
        }
        number
    }

    /// Whether the symbol is the finished combination of the values of the first `ranks` ranks, in order of rank.
    pub(super) fn is_in_rank_order(&self, symbol: Symbol, element: (usize, usize), ranks: usize) -> bool {
        let operands = (0..ranks).map(|rank| self.given(rank, element)).collect();
        self.numbers.get(&Combination { operands, finished: true }) == Some(&symbol)
    }

    pub(super) fn summary(&self, symbol: Symbol) -> Summary<'_> {
        let Some(number) = symbol.checked_sub(self.given) else {
            let (part, place) = (symbol % self.parts, symbol / self.parts);
            let contributors = Contributors::One(place % self.size);
            return Summary { element: (part, place / self.size), finished: false, contributors };
        };
        let (element, finished, contributors) = &self.summaries[number];
        Summary { element: *element, finished: *finished, contributors: Contributors::Many(contributors) }
    }
}

/// A set of ranks, one bit each.
pub(super) struct RankSet(Vec<u64>);

impl RankSet {
    pub(super) fn new(size: usize) -> Self {
        RankSet(vec![0; size.div_ceil(64)])
    }

    /// Adds all of `contributors`, or returns the first rank that is already in the set.
    pub(super) fn add(&mut self, contributors: &Contributors<'_>) -> Result<(), Rank> {
        match contributors {
            Contributors::One(rank) => self.add_word(rank / 64, 1 << (rank % 64)),
            Contributors::Many(set) => {
                set.0.iter().enumerate().try_for_each(|(i, &word)| self.add_word(i, word))
            }
        }
    }

    pub(super) fn add_word(&mut self, i: usize, word: u64) -> Result<(), Rank> {
        let both = self.0[i] & word;
        self.0[i] |= word;
        if both == 0 { Ok(()) } else { Err(i * 64 + both.trailing_zeros() as usize) }
    }

    pub(super) fn count(&self) -> usize {
        self.0.iter().map(|word| word.count_ones() as usize).sum()
    }

    pub(super) fn first_missing(&self, size: usize) -> Option<Rank> {
        let (i, word) = self.0.iter().enumerate().find(|&(_, &word)| word != u64::MAX)?;
        Some(i * 64 + word.trailing_ones() as usize).filter(|&rank| rank < size)
    }
}
