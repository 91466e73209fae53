//! Every operation × dtype × reduction × length × number of ranks, over threads, over shared memory between processes and
//! over TCP between processes.
//!
//! The suites are in `conformance`; here they are given their ranks. A new way to connect ranks is one more [`Carrier`] and one
//! more line in the macro.

#![allow(clippy::unwrap_used, reason = "tests: helpers may fail")]

mod conformance;
mod support;

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use conformance::{SIZES, algorithms, movement, reductions};
use support::{Job, Jobs, Rank, local_store};
use tenfold::{Group, Options};

/// What every rank of a group does; returns a digest of all results that ranks have alike.
type Suite = fn(&Group) -> u64;

const SUITES: &[(&str, Suite)] = &[
    ("reductions", reductions::short),
    ("long_reductions", reductions::long),
    ("movements", movement::short),
    ("long_movements", movement::long),
    ("algorithms", algorithms::forced),
    ("deterministic", algorithms::deterministic),
];

const JOBS: Jobs = &[("suite", run_suite)];

#[test]
#[ignore = "a rank, started by the tests"]
fn rank_entry() {
    support::run_as_rank(JOBS);
}

/// By what messages go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Carrier {
    /// Ranks are threads of one process.
    Threads,
    /// Ranks are processes of one host.
    SharedMemory,
    /// Ranks are processes that do not know they share a host.
    Tcp,
}

impl Carrier {
    fn options(self) -> Options {
        let options = Options::default().timeout(LIMIT);
        match self {
            // Of the two that share memory one reads in place and one as the processor prefers, so that both are tried.
            Carrier::Threads => options.read_in_place(),
            Carrier::SharedMemory => options.only_shared_memory(),
            Carrier::Tcp => options.only_tcp(),
        }
    }
}

impl fmt::Display for Carrier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self:?}")
    }
}

impl FromStr for Carrier {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let all = [Carrier::Threads, Carrier::SharedMemory, Carrier::Tcp];
        all.into_iter()
            .find(|carrier| carrier.to_string() == name)
            .ok_or_else(|| format!("no carrier `{name}`"))
    }
}

/// Nothing here takes this long unless it hangs.
const LIMIT: Duration = Duration::from_secs(150);

fn suite(name: &str) -> Suite {
    SUITES.iter().find(|(known, _)| *known == name).unwrap_or_else(|| panic!("no suite `{name}`")).1
}

/// In a process that is a rank.
fn run_suite(rank: &Rank) {
    let (carrier, name) = rank.argument.split_once(' ').expect("a carrier and a suite");
    let options = carrier.parse::<Carrier>().unwrap().options();
    let group = Group::connect(rank.store(), rank.seat(), options).unwrap();
    rank.event(suite(name)(&group));
}

/// Has `size` ranks do a suite; what it returned, which is the same on all of them.
fn run(carrier: Carrier, name: &'static str, size: usize) -> u64 {
    let digests = match carrier {
        Carrier::Threads => {
            Group::threads_with(size, &carrier.options(), |group| Ok(suite(name)(&group))).unwrap()
        }
        _ => {
            let store = local_store();
            let ranks = Job::new("suite", size).argument(format!("{carrier} {name}")).start(store.address());
            let ended = ranks.join_well(LIMIT);
            ended.iter().map(|end| end.told()[0].parse().unwrap()).collect()
        }
    };
    assert!(digests.iter().all(|digest| *digest == digests[0]), "{name} over {carrier}: {digests:x?}");
    digests[0]
}

macro_rules! suites {
    ($($suite:ident: $sentence:ident $sizes:expr;)*) => {
        suites!(@over threads Threads $($suite: $sentence $sizes;)*);
        suites!(@over shared_memory SharedMemory $($suite: $sentence $sizes;)*);
        suites!(@over tcp Tcp $($suite: $sentence $sizes;)*);
    };
    (@over $module:ident $carrier:ident $($suite:ident: $sentence:ident $sizes:expr;)*) => {
        mod $module {
            use super::*;

            $(
                #[test]
                fn $sentence() {
                    for size in $sizes {
                        run(Carrier::$carrier, stringify!($suite), size);
                    }
                }
            )*
        }
    };
}

suites! {
    reductions: every_reduction_of_every_dtype_is_what_the_reference_says_for_up_to_four_ranks [1, 2, 3, 4];
    reductions: every_reduction_of_every_dtype_is_what_the_reference_says_for_eight_ranks [8];
    long_reductions: a_million_elements_are_reduced_as_the_reference_says SIZES;
    movements: every_movement_of_every_dtype_brings_the_bytes_where_they_belong SIZES;
    long_movements: a_million_elements_arrive_where_they_belong SIZES;
    algorithms: every_algorithm_when_insisted_on_does_the_same [1, 3, 5, 8];
}

#[test]
fn the_long_runs_cover_every_dtype_and_every_reduction() {
    let cases: Vec<_> = (0..SIZES.len()).flat_map(reductions::long_cases).collect();
    for dtype in tenfold::DType::ALL {
        let ops = reductions::ops(dtype);
        let covered = ops.iter().filter(|op| cases.contains(&(dtype, (*op).clone()))).count();
        assert!(covered >= 2, "{dtype}");
        assert!(ops.iter().all(|op| cases.iter().any(|(_, covered)| covered == op)), "{dtype}");
    }
}

fn deterministic_everywhere(size: usize) {
    let over = |carrier| run(carrier, "deterministic", size);
    let threads = over(Carrier::Threads);
    assert_eq!(over(Carrier::SharedMemory), threads, "shared memory and threads differ");
    assert_eq!(over(Carrier::Tcp), threads, "TCP and threads differ");
}

#[test]
fn deterministic_results_have_the_same_bits_over_everything_for_three_ranks() {
    deterministic_everywhere(3);
}

#[test]
fn deterministic_results_have_the_same_bits_over_everything_for_eight_ranks() {
    deterministic_everywhere(8);
}

#[test]
fn results_have_the_same_bits_from_run_to_run() {
    for carrier in [Carrier::Threads, Carrier::SharedMemory, Carrier::Tcp] {
        let digests = [(); 2].map(|()| run(carrier, "algorithms", 4));
        assert!(digests.iter().all(|digest| *digest == digests[0]), "{carrier}: {digests:x?}");
    }
}
