//! Which plan an operation gets.
//!
//! All ranks must come to the same answer from what they all know: the kind, the size, the root, who shares a host.

use std::sync::Arc;

use tenfold_plan::{Algorithm, Kind, Needs, Plan, Rank, Topology, choose, fingerprint, named, names};

use crate::Quorum;
use crate::fault::{ErrorKind, Fault};
use crate::transport::line::TCP_PIECE;

/// Plans that are kept: each algorithm that fits the group, and for operations with a root, some roots.
const PLANS: usize = 64;

/// Calls whose choice is kept for the next of the same kind, size and root: it takes one look instead of two.
const RECENT: usize = 16;

#[derive(Debug)]
pub(crate) struct Planner {
    topology: Topology,
    rank: Rank,
    /// Algorithms that the user insists on.
    forced: Vec<&'static Algorithm>,
    /// No rank finishes an operation with a root before all have called it: for groups whose ranks are all at debug level DETAIL.
    confirms_roots: bool,
    /// All ranks run on one machine, even if they share no memory.
    one_kernel: bool,
    /// By what decides them, whatever the size of a call.
    plans: Vec<(&'static Algorithm, Rank, Arc<Plan>)>,
    recent: Vec<(Key, Choice)>,
}

type Key = (Kind, usize, Rank, Needs);

#[derive(Clone, Debug)]
pub(crate) struct Choice {
    pub name: &'static str,
    pub plan: Arc<Plan>,
    /// Elements of all ranks are combined in one step; otherwise partial results are rounded in between.
    pub in_rank_order: bool,
}

impl Planner {
    pub(crate) fn new(
        topology: Topology,
        rank: Rank,
        forced: Vec<&'static Algorithm>,
        confirms_roots: bool,
    ) -> Self {
        let (plans, recent) = (Vec::new(), Vec::new());
        Planner { topology, rank, forced, confirms_roots, one_kernel: false, plans, recent }
    }

    pub(super) fn confirms_roots(&self) -> bool {
        self.confirms_roots
    }

    /// Says which kernel each rank runs on.
    pub(crate) fn on_kernels(self, kernels: &[usize]) -> Self {
        Planner { one_kernel: kernels.windows(2).all(|pair| pair[0] == pair[1]), ..self }
    }

    /// The longest message: what fits a staging slot, and more between machines. Ranks of one machine that use TCP share its
    /// caches, out of which a longer message would have been pushed before it is read.
    pub(crate) fn piece(&self) -> usize {
        let is_apart = self.topology.hosts() == self.topology.size() && self.topology.size() > 1;
        if is_apart && !self.one_kernel { TCP_PIECE } else { tenfold_memory::SLOT }
    }

    #[inline]
    pub(crate) fn plan(&mut self, kind: Kind, bytes: usize, root: Rank, needs: Needs) -> Choice {
        let key = (kind, bytes, root, needs);
        if let Some(index) = self.recent.iter().position(|(known, _)| *known == key) {
            self.recent.swap(0, index); // the usual one is found first
            return self.recent[0].1.clone();
        }
        let choice = self.choose(kind, bytes, root, needs);
        if self.recent.len() == RECENT {
            self.recent.pop();
        }
        self.recent.push((key, choice.clone()));
        choice
    }

    fn choose(&mut self, kind: Kind, bytes: usize, root: Rank, needs: Needs) -> Choice {
        let forced =
            self.forced.iter().find(|algorithm| algorithm.kind == kind && algorithm.suits(bytes, needs));
        let algorithm = forced.copied().unwrap_or_else(|| choose(kind, bytes, &self.topology, needs));
        let root = if kind.has_root() { root } else { 0 };
        let plan = self.plan_of(algorithm, root);
        Choice { name: algorithm.name, plan, in_rank_order: algorithm.in_rank_order }
    }

    fn plan_of(&mut self, algorithm: &'static Algorithm, root: Rank) -> Arc<Plan> {
        let is_it =
            |(known, of, _): &(&'static Algorithm, Rank, _)| std::ptr::eq(*known, algorithm) && *of == root;
        if let Some(index) = self.plans.iter().position(is_it) {
            return Arc::clone(&self.plans[index].2);
        }
        let mut plan = (algorithm.plan)(&self.topology, self.rank, root);
        if self.confirms_roots && algorithm.kind.has_root() {
            // The messages of a barrier carry the label of this operation, so a rank with another root is found out.
            let barrier = choose(Kind::Barrier, 0, &self.topology, Needs::default());
            plan.steps.extend((barrier.plan)(&self.topology, self.rank, 0).steps);
        }
        let plan = Arc::new(plan);
        if self.plans.len() == PLANS {
            self.plans.remove(0); // the oldest: a root that is used rarely need not keep its plan
        }
        self.plans.push((algorithm, root, Arc::clone(&plan)));
        plan
    }
}

/// The settings of a rank that decide which plan an operation gets, in words: they must be equal on all ranks.
pub(super) fn settings(deterministic: bool, quorum: Quorum, forced: &[&'static Algorithm]) -> String {
    let order = if deterministic { "deterministic" } else { "not deterministic" };
    let forced: Vec<String> =
        forced.iter().map(|algorithm| format!("{}={}", algorithm.kind.name(), algorithm.name)).collect();
    let forced = if forced.is_empty() { "no forced algorithms".to_string() } else { forced.join(", ") };
    let quorum = if quorum == Quorum::default() { String::new() } else { format!("; quorum {quorum:?}") };
    format!("{order}; {forced}; table {:08x}{quorum}", fingerprint() >> 32)
}

/// Fails if two ranks have different settings, and names both; in the same words on all ranks.
pub(super) fn check_settings<'a>(settings: impl IntoIterator<Item = &'a str>) -> Result<(), Fault> {
    let mut settings = settings.into_iter().enumerate();
    let Some((_, first)) = settings.next() else { return Ok(()) };
    let Some((rank, other)) = settings.find(|(_, other)| *other != first) else { return Ok(()) };
    let message = format!("ranks have different settings: rank 0 has `{first}`, rank {rank} has `{other}`");
    let hint = "set `deterministic`, `algorithm`, `quorum` and TENFOLD_ALGORITHM to the same values on all ranks, and run the same tenfold everywhere";
    Err(Fault::new(ErrorKind::Mismatch, message).peer(rank).hint(hint))
}

/// Algorithms by the names of operation and algorithm.
pub(crate) fn look_up(pairs: &[(String, String)]) -> Result<Vec<&'static Algorithm>, Fault> {
    let find = |(operation, name): &(String, String)| {
        let Some(kind) = Kind::ALL.into_iter().find(|kind| kind.name() == operation) else {
            let known: Vec<&str> = Kind::ALL.iter().map(|kind| kind.name()).collect();
            let message = format!("there is no collective `{operation}`; there are {}", known.join(", "));
            return Err(Fault::argument(message));
        };
        named(kind, name).ok_or_else(|| {
            let known: Vec<&str> = names(kind).collect();
            Fault::argument(format!(
                "there is no algorithm `{name}` for {operation}; there are {}",
                known.join(", ")
            ))
        })
    };
    pairs.iter().map(find).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_longer_only_between_machines() {
        let piece = |hosts: &[usize], kernels: &[usize]| {
            Planner::new(Topology::new(hosts.to_vec()), 0, Vec::new(), false).on_kernels(kernels).piece()
        };
        assert_eq!(piece(&[0, 1, 2], &[0, 1, 2]), TCP_PIECE);
        assert_eq!(piece(&[0, 1, 2], &[0, 0, 1]), TCP_PIECE);
        assert_eq!(piece(&[0, 1, 2], &[0, 0, 0]), tenfold_memory::SLOT);
        assert_eq!(piece(&[0, 0, 2], &[0, 0, 1]), tenfold_memory::SLOT);
    }

    #[test]
    fn an_unknown_algorithm_is_answered_with_the_known_ones() {
        let error = look_up(&[("all_reduce".into(), "magic".into())]).unwrap_err();
        assert!(
            error.message.starts_with("there is no algorithm `magic` for all_reduce; there are one_shot, ")
        );
        let error = look_up(&[("reduce_all".into(), "ring".into())]).unwrap_err();
        assert!(
            error.message.starts_with("there is no collective `reduce_all`; there are "),
            "{}",
            error.message
        );
    }

    #[test]
    fn different_settings_are_told_with_both() {
        let forced = look_up(&[("all_reduce".into(), "ring".into())]).unwrap();
        let (usual, other) =
            (settings(false, Quorum::default(), &[]), settings(true, Quorum::default(), &forced));
        assert!(check_settings([usual.as_str(); 3]).is_ok());
        let fault = check_settings([usual.as_str(), usual.as_str(), other.as_str()]).unwrap_err();
        assert_eq!(fault.peer, Some(2));
        assert!(
            fault.message.contains("rank 0 has `not deterministic; no forced algorithms; table "),
            "{fault:?}"
        );
        assert!(fault.message.contains("rank 2 has `deterministic; all_reduce=ring; table "), "{fault:?}");
    }

    #[test]
    fn a_plan_is_made_once_whatever_the_sizes_of_calls() {
        let mut planner = Planner::new(Topology::one_host(8), 1, Vec::new(), false);
        let all_reduce =
            |planner: &mut Planner, bytes| planner.plan(Kind::AllReduce, bytes, 0, Needs::default());
        let (short, long) = (all_reduce(&mut planner, 8), all_reduce(&mut planner, 1 << 20));
        assert_ne!(short.name, long.name);
        for bytes in 1..1000 {
            assert!(Arc::ptr_eq(&all_reduce(&mut planner, bytes).plan, &short.plan), "{bytes} bytes");
            let more = (1 << 20) + bytes;
            assert!(Arc::ptr_eq(&all_reduce(&mut planner, more).plan, &long.plan), "{more} bytes");
        }
        assert_eq!((planner.plans.len(), planner.recent.len()), (2, RECENT));
        let same = planner.plan(Kind::AllReduce, 8, 3, Needs::default());
        assert!(Arc::ptr_eq(&same.plan, &short.plan), "an operation without a root has one plan");
    }

    #[test]
    fn plans_for_many_roots_do_not_pile_up_and_are_those_of_their_root() {
        let mut planner = Planner::new(Topology::one_host(100), 1, Vec::new(), false);
        let broadcast =
            |planner: &mut Planner, root| planner.plan(Kind::Broadcast, 8, root, Needs::default());
        for root in (0..100).chain(0..100) {
            let choice = broadcast(&mut planner, root);
            let algorithm = named(Kind::Broadcast, choice.name).unwrap();
            assert_eq!(choice.plan.steps, (algorithm.plan)(&Topology::one_host(100), 1, root).steps);
            assert!(planner.plans.len() <= PLANS && planner.recent.len() <= RECENT);
        }
    }

    #[test]
    fn what_the_user_insists_on_is_taken_where_it_fits() {
        let forced = look_up(&[("all_reduce".into(), "ring".into())]).unwrap();
        let mut planner = Planner::new(Topology::one_host(4), 1, forced, false);
        assert_eq!(planner.plan(Kind::AllReduce, 8, 0, Needs::default()).name, "ring");
        let in_order = Needs { in_rank_order: true, ..Needs::default() };
        assert_ne!(planner.plan(Kind::AllReduce, 8, 0, in_order).name, "ring");
    }
}
