//! Ranks that call different things.

use super::*;

/// Rank 3 differs from the others: every rank must report that immediately, with the same text.
pub(super) fn disagree(case: &'static str, many: &str, odd: &str) {
    once_within(Duration::from_secs(1), || disagree_once(case, many, odd));
}

pub(super) fn disagree_once(case: &'static str, many: &str, odd: &str) -> Duration {
    let store = local_store();
    let mut ranks = Job::new("differ", 4).argument(case).start(store.address());
    let since = ranks.wait_for_all("calls", SOON).iter().map(|event| event.at).max().unwrap();
    let raised = raised(&mut ranks, 0..4, since);
    for Raised { rank, kind, text, .. } in &raised {
        assert_eq!(kind, "Mismatch Some(3)", "the one is to blame, not the many");
        let called = if *rank == 3 { odd } else { many };
        let operation = called.split('(').next().unwrap();
        let expected = format!(
            "{operation} #N in group `default` failed on rank {rank} of 4: ranks called different operations as #N: ranks 0, \
             1, 2 called {many}; rank 3 called {odd}\n  {called} by ALGORITHM, step N of N; started TIME ago, timeout \
             TIME\n  hint: all ranks must call the same collectives in the same order, with the same dtype, shape, reduce \
             operation and root"
        );
        // Only a large tensor has several pieces.
        assert_eq!(masked(text).replace(", piece N of N", ""), expected);
        assert!(text.contains("as #3: "), "{text}");
    }
    finish_well(ranks);
    longest(&raised)
}

pub(super) const SUM: &str = "all_reduce(sum, float32 × 1000)";

#[test]
fn ranks_that_call_different_collectives_are_told_who_called_what() {
    disagree("kind", SUM, "broadcast(float32 × 1000, root 0)");
}

#[test]
fn a_rank_that_is_in_a_barrier_is_told_from_those_that_sum() {
    disagree("barrier", SUM, "barrier");
}

#[test]
fn different_shapes_are_told() {
    disagree("shape", SUM, "all_reduce(sum, float32 × 2000)");
}

#[test]
fn very_different_shapes_are_told_although_they_take_different_algorithms() {
    disagree("large shape", SUM, "all_reduce(sum, float32 × 1000000)");
}

#[test]
fn different_dtypes_of_one_size_are_told() {
    disagree("dtype", SUM, "all_reduce(sum, int32 × 1000)");
}

#[test]
fn different_reduce_operations_are_told() {
    disagree("reduce op", SUM, "all_reduce(max, float32 × 1000)");
}

#[test]
fn different_roots_are_told() {
    once_within(Duration::from_secs(1), || {
        let store = local_store();
        let mut ranks = Job::new("differ", 4).argument("root").start(store.address());
        let since = ranks.wait_for_all("calls", SOON).iter().map(|event| event.at).max().unwrap();
        let raised = raised(&mut ranks, 0..4, since);
        for Raised { kind, text, .. } in &raised {
            assert_eq!(kind, "Mismatch Some(3)");
            let told = "ranks called different operations as #3: ranks 0, 1, 2 called broadcast(float32 × 1000, root 0); \
                        rank 3 called broadcast(float32 × 1000, root 1)";
            assert!(text.contains(told), "{text}");
        }
        finish_well(ranks);
        longest(&raised)
    });
}

/// Roots by rank, and what every rank must hear of them.
pub(super) fn different_roots(roots: &str, told: &str, level: &str, transport: &str) -> Vec<String> {
    let store = local_store();
    let job = Job::new("name_different_roots", 4).argument(roots).environment("TENFOLD_TRANSPORT", transport);
    let mut ranks = job.environment("TORCH_DISTRIBUTED_DEBUG", level).start(store.address());
    let first = ranks.wait_for_all("first ", SOON).into_iter().map(|event| event.text).collect();
    for Raised { rank, kind, text, .. } in raised(&mut ranks, 0..4, Instant::now()) {
        assert!(kind.starts_with("Mismatch "), "rank {rank}: {text}");
        let text = text.split(" [").map(|part| part.rsplit_once(']').map_or(part, |(_, rest)| rest));
        let text: String = text.collect();
        assert!(text.contains(told), "rank {rank} does not say `{told}`: {text}");
    }
    finish_well(ranks);
    first
}

pub(super) const ROOTS: [(&str, &str); 3] = [
    (
        "0 0 0 1",
        "ranks 0, 1, 2 called broadcast(float32 × 1000, root 0); rank 3 called broadcast(float32 × 1000, root 1)",
    ),
    (
        "0 0 2 2",
        "ranks 0, 1 called broadcast(float32 × 1000, root 0); ranks 2, 3 called broadcast(float32 × 1000, root 2)",
    ),
    (
        "1 0 3 2",
        "rank 2 called broadcast(float32 × 1000, root 3); rank 3 called broadcast(float32 × 1000, root 2)",
    ),
];

#[test]
fn different_roots_fail_the_next_call_on_every_rank_at_the_latest() {
    for (roots, told) in ROOTS {
        different_roots(roots, told, "OFF", "auto");
        different_roots(roots, told, "OFF", "tcp");
    }
}

#[test]
fn in_detail_different_roots_fail_the_call_itself_on_every_rank() {
    for (roots, told) in ROOTS {
        for transport in ["auto", "tcp"] {
            let first = different_roots(roots, told, "DETAIL", transport);
            assert_eq!(first, ["first failed"; 4], "{roots} by {transport}");
        }
    }
}
