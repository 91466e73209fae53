//! Is the file left over from another run?

use std::fs::{self, File};
use std::time::{Duration, SystemTime};

use tenfold_base::{ErrorKind, Fault, show_duration};

use super::log::Replica;

/// Clocks tick in steps of up to 10 ms, and a file server's may differ from ours.
pub(super) const CLOCK_SLACK: Duration = Duration::from_secs(1);

/// Refuses a file that all ranks of a world had joined and that no process has written to since this process
/// started.
///
/// Both are needed. A full count alone is not proof: clones count as well, so early ranks can fill the count
/// before the last one joins. Age alone is not proof either: a rank may start long after the others have
/// written and begun to wait. What remains is a rank that starts, perhaps by hand, a second after the others
/// have cloned and stopped writing. `accept_stale` is for that case.
pub(super) fn refuse_stale(replica: &Replica, world: usize, file: &File) -> Result<(), Fault> {
    let joined = usize::try_from(replica.refcount().saturating_add(replica.cleanup())).unwrap_or(0);
    if world == 0 || joined < world {
        return Ok(());
    }
    let written = file.metadata().and_then(|metadata| metadata.modified());
    let written = written.map_err(|error| Fault::io("cannot examine the file", error))?;
    let (Some(start), now) = (process_start(), wall_clock()) else { return Ok(()) };
    if start.duration_since(written).is_ok_and(|before| before > CLOCK_SLACK) {
        let ago = show_duration(now.duration_since(written).unwrap_or_default());
        let keys = replica.values.len();
        let message = format!(
            "left over from an earlier run: {world} of {world} ranks had joined, {keys} keys, last written {ago} ago"
        );
        return Err(Fault::new(ErrorKind::Corrupt, message)
            .hint("remove it or use another path; if it belongs to this run, open it with `accept_stale`"));
    }
    Ok(())
}

#[expect(
    clippy::disallowed_methods,
    reason = "the age of a file needs the wall clock; no operation waits by it"
)]
pub(super) fn wall_clock() -> SystemTime {
    SystemTime::now()
}

/// When this process started, by the wall clock.
#[cfg(target_os = "linux")]
pub(super) fn process_start() -> Option<SystemTime> {
    use rustix::time::{ClockId, clock_gettime};
    let stat = String::from_utf8_lossy(&fs::read("/proc/self/stat").ok()?).into_owned();
    // The second field is the program's name in parentheses, which may contain anything; the 22nd is the
    // start.
    let after_name = stat.rsplit_once(')')?.1;
    let ticks: u64 = after_name.split_ascii_whitespace().nth(19)?.parse().ok()?;
    let per_second = rustix::param::clock_ticks_per_second().max(1);
    let start = Duration::from_millis(ticks.checked_mul(1000)? / per_second);
    // The same clock that the ticks count. `btime` of /proc/stat also works, but only has whole seconds.
    let since_boot = Duration::try_from(clock_gettime(ClockId::Boottime)).ok()?;
    wall_clock().checked_sub(since_boot.checked_sub(start)?)
}

#[cfg(not(target_os = "linux"))]
pub(super) fn process_start() -> Option<SystemTime> {
    None
}
