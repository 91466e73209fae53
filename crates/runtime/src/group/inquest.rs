//! Ranks called different things: who called what?
//!
//! A rank that reads a message of another call stops, and tells all members what it called itself; whoever hears that does
//! the same. When everybody has spoken, or some time later, all ranks come to the same verdict from the same testimony.

#![expect(clippy::disallowed_methods, reason = "an inquest ends after some time")]

use std::time::{Duration, Instant};

use tenfold_memory::Head;
use tenfold_plan::Rank;

use crate::fault::{Fault, FaultKind, show_ranks};
use crate::label::Label;

/// How long ranks that disagree wait for the others to say what they called.
const PATIENCE: Duration = Duration::from_millis(500);

#[derive(Debug)]
pub(super) struct Inquest {
    seq: u64,
    rank: Rank,
    /// By rank: has it spoken, and what did it call as number `seq`?
    testimony: Vec<Option<Option<Head>>>,
    until: Instant,
}

impl Inquest {
    pub(super) fn new(seq: u64, rank: Rank, size: usize) -> Self {
        Inquest { seq, rank, testimony: vec![None; size], until: Instant::now() + PATIENCE }
    }

    pub(super) fn seq(&self) -> u64 {
        self.seq
    }

    pub(super) fn until(&self) -> Instant {
        self.until
    }

    pub(super) fn testify(&mut self, rank: Rank, seq: u64, head: Option<Head>) {
        if seq == self.seq && !matches!(self.testimony[rank], Some(Some(_))) {
            self.testimony[rank] = Some(head);
        }
    }

    /// Who said what.
    pub(super) fn testimony(&self) -> impl Iterator<Item = (Rank, Option<Head>)> {
        self.testimony.iter().enumerate().filter_map(|(rank, said)| Some((rank, (*said)?)))
    }

    /// Has `rank` said this already?
    pub(super) fn knows(&self, rank: Rank, head: Option<Head>) -> bool {
        self.testimony[rank] == Some(head) || matches!(self.testimony[rank], Some(Some(_)))
    }

    pub(super) fn is_over(&self, now: Instant) -> bool {
        now >= self.until || self.testimony.iter().all(Option::is_some)
    }

    /// Who called what: the same text on all ranks that heard the same.
    pub(super) fn verdict(&self) -> Fault {
        let mut calls: Vec<(Option<Head>, Vec<Rank>)> = Vec::new();
        for (rank, head) in self.testimony.iter().enumerate() {
            let head = head.flatten();
            match calls.iter_mut().find(|(call, _)| *call == head) {
                Some((_, ranks)) => ranks.push(rank),
                None => calls.push((head, vec![rank])),
            }
        }
        // The few are named as the culprits; of two equal camps, the one without the lowest rank.
        let most = calls.iter().map(|(_, ranks)| ranks.len()).max().unwrap_or(0);
        let usual = calls.iter().position(|(_, ranks)| ranks.len() == most).unwrap_or(0);
        let culprit =
            calls.iter().enumerate().find(|(index, _)| *index != usual).map(|(_, (_, ranks))| ranks[0]);
        let texts: Vec<String> = calls
            .iter()
            .map(|(head, ranks)| {
                let who = show_ranks(ranks);
                match head.as_ref().and_then(Label::from_head) {
                    Some(label) => format!("{who} called {label}"),
                    None => format!("{who} had not called it yet"),
                }
            })
            .collect();
        let message = format!("ranks called different operations as #{}: {}", self.seq, texts.join("; "));
        let hint = "all ranks must call the same collectives in the same order, with the same dtype, shape, \
                    reduce operation and root";
        let mut fault = Fault::new(FaultKind::Mismatch, message).hint(hint);
        fault.peer = culprit.or(Some(self.rank));
        fault
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::label::OpKind;
    use tenfold_memory::{DType, ReduceOp};

    fn sum(count: usize) -> Option<Head> {
        Some(Label::new(OpKind::AllReduce, 7).elements(DType::F32, count).reduction(&ReduceOp::Sum).head())
    }

    #[test]
    fn the_verdict_names_everybody_and_blames_the_few() {
        let mut inquest = Inquest::new(7, 0, 4);
        for rank in [0, 1, 3] {
            inquest.testify(rank, 7, sum(1000));
        }
        assert!(!inquest.is_over(Instant::now()));
        inquest.testify(2, 7, sum(2000));
        assert!(inquest.is_over(Instant::now()));
        let fault = inquest.verdict();
        assert_eq!(
            fault.message,
            "ranks called different operations as #7: ranks 0, 1, 3 called all_reduce(sum, float32 × 1000); \
             rank 2 called all_reduce(sum, float32 × 2000)"
        );
        assert_eq!(fault.peer, Some(2));
    }

    #[test]
    fn a_rank_that_has_not_called_yet_is_said_to_be_so() {
        let mut inquest = Inquest::new(7, 0, 2);
        inquest.testify(0, 7, sum(1));
        inquest.testify(1, 7, None);
        assert_eq!(
            inquest.verdict().message,
            "ranks called different operations as #7: rank 0 called all_reduce(sum, float32 × 1); \
             rank 1 had not called it yet"
        );
    }

    #[test]
    fn what_was_said_about_another_call_does_not_count() {
        let mut inquest = Inquest::new(7, 0, 2);
        inquest.testify(1, 6, sum(1));
        assert_eq!(inquest.testimony, [None, None]);
    }
}
