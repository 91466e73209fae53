//! Ranks called different operations: finds out which rank called what.
//!
//! A rank that reads a message of another call stops, and reports to all ranks what it called itself. Each rank that receives
//! such a report does the same. When all ranks have reported, or after a limit, every rank draws the same conclusion from the
//! same reports.
//!
//! A report carries the set of ranks that it was sent to. A rank passes it on only to peers that are not in this set. So in a
//! group in which all ranks are connected nothing is passed on, and each rank sends one notice to each peer.
//!
//! At debug level DETAIL, reports contain shapes and source lines too; see `detail`.

#![expect(clippy::disallowed_methods, reason = "the collection of reports has a time limit")]

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tenfold_memory::Head;
use tenfold_plan::Rank;

use super::detail::{Detail, show_all};
use crate::fault::{ErrorKind, Fault, show_ranks};
use crate::label::{Label, is_same_call};

/// How long ranks that disagree wait for the others to say what they called: one of them may never call anything.
const PATIENCE: Duration = Duration::from_secs(1);

/// How long they wait for ranks that are known to have called, and whose own words are on their way. Only a host that is very
/// busy keeps them so long.
const PATIENCE_EXPECTED: Duration = Duration::from_secs(10);

/// Calls whose details are shown in an error.
const DETAILED_MAX: usize = 8;

/// A set of ranks, 64 to a word.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(in crate::group) struct Ranks(Vec<u64>);

impl Ranks {
    pub(in crate::group) fn contains(&self, rank: Rank) -> bool {
        self.0.get(rank / 64).is_some_and(|word| word >> (rank % 64) & 1 == 1)
    }

    /// True if it was not in the set.
    pub(in crate::group) fn insert(&mut self, rank: Rank) -> bool {
        let is_new = !self.contains(rank);
        if self.0.len() <= rank / 64 {
            self.0.resize(rank / 64 + 1, 0);
        }
        self.0[rank / 64] |= 1 << (rank % 64);
        is_new
    }

    /// Has it no more words than ranks of a group of `size` need?
    pub(in crate::group) fn fits(&self, size: usize) -> bool {
        self.0.len() <= size.div_ceil(64)
    }
}

/// What a rank says that it called as number `seq`, if it has called that yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::group) struct CallReport {
    pub rank: Rank,
    pub seq: u64,
    pub head: Option<Head>,
    pub detail: Option<Detail>,
    /// The rank in whose memory or message it saw another call.
    pub saw: Option<Rank>,
    /// The ranks to which this was sent, by its author or by a rank that passed it on.
    pub told: Ranks,
}

impl CallReport {
    /// Does `other` say the same? To which ranks it was sent does not count.
    pub(in crate::group) fn is_same(&self, other: &CallReport) -> bool {
        let CallReport { rank, seq, head, detail, saw, told: _ } = self;
        (rank, seq, head, detail, saw) == (&other.rank, &other.seq, &other.head, &other.detail, &other.saw)
    }

    /// To which of `connected` this has not been sent: it is sent to them now.
    pub(in crate::group) fn pass_on(&mut self, connected: impl IntoIterator<Item = Rank>) -> Vec<Rank> {
        let (author, told) = (self.rank, &mut self.told);
        connected.into_iter().filter(|rank| *rank != author && told.insert(*rank)).collect()
    }
}

#[derive(Debug)]
pub(in crate::group) struct Comparison {
    seq: u64,
    rank: Rank,
    /// By rank: is it known, and what did it call as number `seq`?
    heads: Vec<Option<Option<Head>>>,
    details: Vec<Option<Detail>>,
    saw: Vec<Option<Rank>>,
    /// By rank: the ranks that its report was sent to.
    told: Vec<Ranks>,
    /// Whose call was seen in a message, and who may have more to tell of it.
    expected: Vec<Rank>,
    started: Instant,
}

impl Comparison {
    pub(in crate::group) fn new(seq: u64, rank: Rank, size: usize) -> Self {
        let (heads, details, saw) = (vec![None; size], vec![None; size], vec![None; size]);
        let (told, expected) = (vec![Ranks::default(); size], Vec::new());
        Comparison { seq, rank, heads, details, saw, told, expected, started: Instant::now() }
    }

    pub(in crate::group) fn seq(&self) -> u64 {
        self.seq
    }

    /// When it ends at the latest, as far as is known now.
    pub(in crate::group) fn until(&self) -> Instant {
        self.started + if self.expected.is_empty() { PATIENCE } else { PATIENCE_EXPECTED }
    }

    pub(in crate::group) fn hear(&mut self, said: CallReport) {
        let CallReport { rank, seq, head, detail, saw, told } = said;
        if seq != self.seq {
            return;
        }
        self.told[rank] = told;
        self.expected.retain(|other| *other != rank);
        self.saw[rank] = self.saw[rank].or(saw);
        if !matches!(self.heads[rank], Some(Some(_))) {
            self.heads[rank] = Some(head);
        }
        if self.details[rank].is_none() && self.heads[rank] == Some(head) {
            self.details[rank] = detail;
        }
    }

    /// A message of `rank` shows what it called.
    pub(in crate::group) fn deduce(&mut self, rank: Rank, head: Head) {
        if !matches!(self.heads[rank], Some(Some(_))) {
            self.heads[rank] = Some(Some(head));
            // If this rank has details, the peer has them too, and its own report is worth waiting for.
            if self.details[self.rank].is_some() {
                self.expected.push(rank);
            }
        }
    }

    /// What to tell `peer`, which has just been met: what this rank called, and what others called if no rank has sent it there.
    pub(in crate::group) fn reports_for(&mut self, peer: Rank) -> Vec<CallReport> {
        let is_due = |rank: &Rank| *rank == self.rank || *rank != peer && !self.told[*rank].contains(peer);
        let due: Vec<Rank> = (0..self.heads.len()).filter(is_due).collect();
        let said = due.into_iter().filter_map(|rank| {
            let (head, detail, saw) = (self.heads[rank]?, self.details[rank].clone(), self.saw[rank]);
            self.told[rank].insert(peer);
            Some(CallReport { rank, seq: self.seq, head, detail, saw, told: self.told[rank].clone() })
        });
        said.collect()
    }

    /// Is this nothing new? What is new is passed on, so it must be known once it was heard.
    pub(in crate::group) fn knows(&self, said: &CallReport) -> bool {
        let CallReport { rank, seq, head, detail, .. } = said;
        let (known, is_same) = (self.heads[*rank], self.heads[*rank] == Some(*head));
        let tells_more =
            self.expected.contains(rank) || is_same && detail.is_some() && self.details[*rank].is_none();
        !(tells_more && *seq == self.seq) && (is_same || matches!(known, Some(Some(_))))
    }

    pub(in crate::group) fn is_over(&self, now: Instant) -> bool {
        now >= self.until() || self.expected.is_empty() && self.heads.iter().all(Option::is_some)
    }

    /// Who called what: the same text on all ranks that heard the same.
    pub(in crate::group) fn conclusion(&self) -> Fault {
        let mut calls: Vec<(Option<Head>, Vec<Rank>)> = Vec::new();
        let same = |one: &Option<Head>, other: &Option<Head>| match (one, other) {
            (Some(one), Some(other)) => is_same_call(one, other),
            (one, other) => one == other,
        };
        for (rank, head) in self.heads.iter().enumerate() {
            let head = head.flatten();
            match calls.iter_mut().find(|(call, _)| same(call, &head)) {
                Some((_, ranks)) => ranks.push(rank),
                None => calls.push((head, vec![rank])),
            }
        }
        if let [(Some(head), _)] = calls.as_slice() {
            return self.contradiction(head);
        }
        // The few are named as the culprits; of two equal camps, the one without the lowest rank.
        let most = calls.iter().map(|(_, ranks)| ranks.len()).max().unwrap_or(0);
        let usual = calls.iter().position(|(_, ranks)| ranks.len() == most).unwrap_or(0);
        let culprit =
            calls.iter().enumerate().find(|(index, _)| *index != usual).map(|(_, (_, ranks))| ranks[0]);
        let texts: Vec<String> = calls
            .iter()
            .enumerate()
            .map(|(index, (head, ranks))| {
                let who = show_ranks(ranks);
                let more = if index < DETAILED_MAX { self.details_of(ranks) } else { String::new() };
                match head.as_ref().and_then(Label::from_head) {
                    Some(label) => format!("{who} called {label}{more}"),
                    None => format!("{who} had not called it yet"),
                }
            })
            .collect();
        let message = format!("ranks called different operations as #{}: {}", self.seq, texts.join("; "));
        let hint = "all ranks must call the same collectives in the same order, with the same dtype, shape, \
                    reduce operation and root";
        let mut fault = Fault::new(ErrorKind::Mismatch, message).hint(hint);
        fault.peer = culprit.or(Some(self.rank));
        fault
    }

    /// All ranks say that they called the same, and yet one of them saw another call.
    fn contradiction(&self, head: &Head) -> Fault {
        let what = Label::from_head(head).map_or_else(|| "the same".to_string(), |label| label.to_string());
        let suspect = self.saw.iter().find_map(|saw| *saw);
        let message = match suspect {
            Some(rank) => {
                format!("rank {rank} showed another call as #{} than {what}, which all ranks made", self.seq)
            }
            None => format!(
                "a message of another call as #{} than {what} was seen, which all ranks made",
                self.seq
            ),
        };
        let hint = "its shared memory or a message of it is damaged: look for wild writes in that process";
        let mut fault = Fault::new(ErrorKind::Protocol, message).hint(hint);
        fault.peer = suspect;
        fault
    }

    /// What these ranks told of their call.
    fn details_of(&self, ranks: &[Rank]) -> String {
        show_all(ranks.iter().filter_map(|rank| Some((*rank, self.details[*rank].as_ref()?))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::label::OpKind;
    use crate::recorder::{CallSite, Frame, Site, Sizes};
    use crate::{Group, Options};
    use std::collections::VecDeque;
    use std::sync::Barrier;
    use std::sync::atomic::Ordering;
    use tenfold_memory::{Buffer, DType, ReduceOp};

    fn sum(count: usize) -> Option<Head> {
        Some(Label::new(OpKind::AllReduce, 7).elements(DType::F32, count).reduction(&ReduceOp::Sum).head())
    }

    fn said(rank: Rank, seq: u64, head: Option<Head>) -> CallReport {
        CallReport { rank, seq, head, detail: None, saw: None, told: Ranks::default() }
    }

    #[test]
    fn the_conclusion_names_everybody_and_blames_the_few() {
        let mut comparison = Comparison::new(7, 0, 4);
        for rank in [0, 1, 3] {
            comparison.hear(said(rank, 7, sum(1000)));
        }
        assert!(!comparison.is_over(Instant::now()));
        comparison.hear(said(2, 7, sum(2000)));
        assert!(comparison.is_over(Instant::now()));
        let fault = comparison.conclusion();
        assert_eq!(
            fault.message,
            "ranks called different operations as #7: ranks 0, 1, 3 called all_reduce(sum, float32 × 1000); \
             rank 2 called all_reduce(sum, float32 × 2000)"
        );
        assert_eq!(fault.peer, Some(2));
    }

    #[test]
    fn ranks_that_agree_blame_the_one_in_whose_memory_another_call_was_seen() {
        let mut comparison = Comparison::new(7, 0, 3);
        for rank in [0, 1, 2] {
            comparison.hear(CallReport { saw: (rank == 2).then_some(1), ..said(rank, 7, sum(1000)) });
        }
        let told: Vec<_> = comparison.reports_for(1).iter().filter_map(|said| said.saw).collect();
        assert_eq!(told, [1], "a peer that is met hears it");
        let fault = comparison.conclusion();
        assert_eq!((fault.kind, fault.peer), (ErrorKind::Protocol, Some(1)));
        assert_eq!(
            fault.message,
            "rank 1 showed another call as #7 than all_reduce(sum, float32 × 1000), which all ranks made"
        );
    }

    #[test]
    fn a_rank_that_has_not_called_yet_is_said_to_be_so() {
        let mut comparison = Comparison::new(7, 0, 2);
        comparison.hear(said(0, 7, sum(1)));
        comparison.hear(said(1, 7, None));
        assert_eq!(
            comparison.conclusion().message,
            "ranks called different operations as #7: rank 0 called all_reduce(sum, float32 × 1); \
             rank 1 had not called it yet"
        );
    }

    fn detailed(rank: Rank, head: Option<Head>, line: u32) -> CallReport {
        let frame = Frame { name: "step".into(), file: "/me/train.py".into(), line };
        let site =
            CallSite { frames: vec![frame], input_shapes: Some(vec![vec![10, 100]]), output_shapes: None };
        let detail = Detail::new(&Site::Given(site), Sizes::NONE, Sizes::NONE);
        CallReport { detail: Some(detail), ..said(rank, 7, head) }
    }

    #[test]
    fn in_detail_the_conclusion_has_shapes_and_places_and_the_call_counts_not_the_place() {
        let mut comparison = Comparison::new(7, 0, 4);
        for (rank, line) in [(0, 42), (1, 42), (3, 50)] {
            comparison.hear(detailed(rank, sum(1000), line));
        }
        comparison.hear(said(2, 7, sum(2000))); // at another level
        assert_eq!(
            comparison.conclusion().message,
            "ranks called different operations as #7: ranks 0, 1, 3 called all_reduce(sum, float32 × 1000) \
             [input 10×100, at train.py:42 in step and 1 other place]; \
             rank 2 called all_reduce(sum, float32 × 2000)"
        );
    }

    #[test]
    fn in_detail_the_words_of_a_rank_are_waited_for_even_if_its_call_was_seen() {
        let mut comparison = Comparison::new(7, 0, 2);
        comparison.hear(detailed(0, sum(1000), 42));
        comparison.deduce(1, sum(2000).unwrap());
        assert!(
            !comparison.is_over(Instant::now() + PATIENCE),
            "not even if ranks that never speak are given up"
        );
        assert!(comparison.is_over(Instant::now() + PATIENCE_EXPECTED));
        let own_words = detailed(1, sum(2000), 90);
        assert!(!comparison.knows(&own_words));
        comparison.hear(own_words.clone());
        assert!(comparison.knows(&own_words) && comparison.is_over(Instant::now()));
        assert!(comparison.conclusion().message.ends_with("[input 10×100, at train.py:90 in step]"));
    }

    #[test]
    fn what_a_rank_says_is_new_once_whatever_it_says() {
        let mut comparison = Comparison::new(7, 0, 2);
        comparison.hear(detailed(0, sum(1000), 42));
        comparison.deduce(1, sum(2000).unwrap());
        let contradicts_itself = [detailed(1, sum(3000), 1), detailed(1, None, 2), said(1, 7, sum(4000))];
        for (index, said) in contradicts_itself.into_iter().enumerate() {
            assert_eq!(comparison.knows(&said), index > 0, "only its first words were waited for");
            comparison.hear(said.clone());
            assert!(comparison.knows(&said));
        }
        let about_another = CallReport { seq: 8, ..detailed(1, sum(2000), 3) };
        assert!(comparison.knows(&about_another));
    }

    #[test]
    fn otherwise_a_call_that_was_seen_is_enough() {
        let mut comparison = Comparison::new(7, 0, 2);
        comparison.hear(said(0, 7, sum(1000)));
        comparison.deduce(1, sum(2000).unwrap());
        assert!(comparison.is_over(Instant::now()));
        assert!(comparison.knows(&said(1, 7, sum(2000))));
    }

    #[test]
    fn what_was_said_about_another_call_does_not_count() {
        let mut comparison = Comparison::new(7, 0, 2);
        comparison.hear(said(1, 6, sum(1)));
        assert_eq!(comparison.heads, [None, None]);
    }

    /// Ranks tell each other what they called over `edges`. How many notices are passed on, and whether all ranks hear all.
    fn spread(size: usize, edges: &[(Rank, Rank)]) -> (usize, bool) {
        let connected = |rank: Rank| {
            let ends = edges.iter().flat_map(|&(one, other)| [(one, other), (other, one)]);
            ends.filter(move |(from, _)| *from == rank).map(|(_, to)| to).collect::<Vec<_>>()
        };
        let mut under_way = VecDeque::new();
        let send = |under_way: &mut VecDeque<_>, from: Rank, mut said: CallReport| {
            let to = said.pass_on(connected(from));
            under_way.extend(to.iter().map(|to| (*to, said.clone())));
            to.len()
        };
        let mut comparisons: Vec<Comparison> = (0..size).map(|rank| Comparison::new(7, rank, size)).collect();
        for (rank, comparison) in comparisons.iter_mut().enumerate() {
            comparison.hear(said(rank, 7, sum(1)));
            send(&mut under_way, rank, said(rank, 7, sum(1)));
        }
        let mut passed_on = 0;
        while let Some((at, said)) = under_way.pop_front() {
            if !comparisons[at].knows(&said) {
                comparisons[at].hear(said.clone());
                passed_on += send(&mut under_way, at, said);
            }
        }
        (passed_on, comparisons.iter().all(|comparison| comparison.is_over(comparison.started)))
    }

    #[test]
    fn word_is_passed_on_where_its_author_has_no_way_and_only_there() {
        let all = |size: usize| (0..size).flat_map(|one| (0..one).map(move |other| (other, one))).collect();
        let complete: Vec<(Rank, Rank)> = all(32);
        assert_eq!(spread(32, &complete), (0, true));
        let one_is_missing: Vec<_> = complete.into_iter().filter(|edge| *edge != (3, 20)).collect();
        let (passed_on, all_heard) = spread(32, &one_is_missing);
        assert!(all_heard && (2..=2 * 30).contains(&passed_on), "{passed_on}");
        let line: Vec<(Rank, Rank)> = (1..100).map(|rank| (rank - 1, rank)).collect();
        assert_eq!(spread(100, &line), (100 * 99 - 2 * 99, true), "once to each rank");
        assert!(!spread(4, &[(0, 1), (2, 3)]).1, "some have no way to the others");
    }

    #[test]
    fn a_peer_that_is_met_hears_what_no_rank_has_sent_it() {
        let mut comparison = Comparison::new(7, 0, 4);
        comparison.hear(said(0, 7, sum(1)));
        let mut one = said(1, 7, sum(1));
        one.told.insert(3);
        comparison.hear(one);
        comparison.deduce(2, sum(2).unwrap());
        let told = |comparison: &mut Comparison, peer| {
            comparison.reports_for(peer).iter().map(|said| said.rank).collect::<Vec<_>>()
        };
        assert_eq!(told(&mut comparison, 3), [0, 2]);
        assert_eq!(
            told(&mut comparison, 3),
            [0],
            "on another stream: the first may have ended before it was heard"
        );
        assert_eq!(told(&mut comparison, 2), [0, 1]);
    }

    #[test]
    fn a_set_of_ranks_has_words_for_its_group_only() {
        let mut ranks = Ranks::default();
        assert!(ranks.insert(64) && !ranks.insert(64) && ranks.insert(3));
        assert!(ranks.contains(3) && ranks.contains(64) && !ranks.contains(65) && !ranks.contains(1000));
        assert!(ranks.fits(65) && !ranks.fits(64));
        assert_eq!(serde_json::to_string(&ranks).unwrap(), "[8,1]");
    }

    /// How many notices a rank sends at most when one of `size` ranks calls something else.
    fn notices_sent(size: usize) -> usize {
        let options = Options::default().timeout(Duration::from_secs(100));
        let left = Barrier::new(size);
        let sent = Group::threads_with(size, &options, |group| {
            let count = if group.rank() == 1 { 2000 } else { 1000 };
            let mut tensor = Buffer::zeros(DType::F32, count);
            let work = group.start_all_reduce(tensor.lend(), ReduceOp::Sum)?;
            let error = work.wait().expect_err("ranks called different operations");
            assert_eq!(error.kind(), ErrorKind::Mismatch, "{error}");
            assert!(error.to_string().contains("; rank 1 called "), "{error}");
            left.wait(); // all ranks have heard all
            group.fabric().wait_until_told();
            Ok(group.fabric().notices_sent.load(Ordering::Relaxed))
        });
        sent.unwrap().into_iter().max().unwrap()
    }

    /// A rank tells each peer what it called and how that ended. What others called, others tell.
    #[test]
    fn a_mismatch_costs_each_rank_a_few_notices_to_each_peer() {
        for size in [16, 32] {
            let sent = notices_sent(size);
            assert!(sent <= 4 * size, "a rank of {size} sent {sent} notices");
        }
    }
}
