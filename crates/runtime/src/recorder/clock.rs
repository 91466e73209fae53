//! The recorder's clock: nanoseconds since the process began to record.
//!
//! Monotonic, so that durations are right whatever happens to the time of day; a dump asks for the time of day once and
//! shows everything by that.

#![expect(clippy::disallowed_methods, reason = "entries have times, and this is where they come from")]

use std::sync::LazyLock;
use std::time::{Instant, SystemTime};

static BEGIN: LazyLock<Instant> = LazyLock::new(Instant::now);

/// Never 0, which stands for "not yet".
#[inline]
pub(super) fn now() -> u64 {
    BEGIN.elapsed().as_nanos() as u64 + 1
}

/// A time of this clock by the host's, which its other processes share.
#[inline]
pub(crate) fn to_host(time: u64) -> u64 {
    *TO_HOST + time
}

/// Nanoseconds by the host's monotonic clock.
#[inline]
pub(crate) fn host_now() -> u64 {
    to_host(now())
}

static TO_HOST: LazyLock<u64> = LazyLock::new(|| {
    let host = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    (host.tv_sec as u64 * 1_000_000_000 + host.tv_nsec as u64).saturating_sub(now())
});

/// Nanoseconds since 1970.
pub(super) fn unix_now() -> u64 {
    now().wrapping_add_signed(to_unix())
}

/// What to add to a time of this clock to get nanoseconds since 1970.
pub(super) fn to_unix() -> i64 {
    let unix = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_nanos());
    unix as i64 - now() as i64
}
