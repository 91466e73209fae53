//! Ranks as real processes, and hosts as network namespaces, for the tests that need both to be real.
//!
//! `ranks` starts the test program again, once for each rank, and watches. `hosts` lays cables between namespaces and cuts
//! them. `link.py` is a cable that delays and loses.
//!
//! A test file that uses this has a table of jobs and one entry for the processes it starts:
//!
//! ```ignore
//! const JOBS: Jobs = &[("sum", sum)];
//! #[test]
//! #[ignore = "a rank, started by the tests"]
//! fn rank_entry() {
//!     support::run_as_rank(JOBS);
//! }
//! ```

#![allow(dead_code, unreachable_pub, unused_imports, reason = "each test file uses its part")]
#![allow(
    clippy::disallowed_methods,
    clippy::unwrap_used,
    reason = "tests: threads, the time things take, and helpers that may fail"
)]

mod hosts;
mod namespace;
mod ranks;

use std::time::Duration;

pub use hosts::{Cable, Hosts, Loss, Slow};
pub use namespace::Namespace;
pub use ranks::{Ended, Event, Job, Jobs, Rank, Ranks, local_store, run_as_rank};

/// Limits of time are for a machine that has nothing else to do: one of a few attempts must keep to `limit`. What ranks report
/// must be right in each of them.
pub fn once_within(limit: Duration, mut attempt: impl FnMut() -> Duration) {
    const ATTEMPTS: usize = 5;
    let mut all = Vec::new();
    while all.last().is_none_or(|took| *took >= limit) {
        assert!(all.len() < ATTEMPTS, "never within {limit:?}: {all:?}");
        all.push(attempt());
    }
}
