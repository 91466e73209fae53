//! How much is reported when something goes wrong: c10d's debug level.
//!
//! One number for the whole process, from the variable that PyTorch reads, or as the program set it. Reading it costs almost
//! nothing, so every call may read it.
//!
//! Not here: what each level does (see `group/trouble/detail.rs`), and which log lines of INFO are shown, which the program's
//! subscriber decides.

use std::ffi::OsStr;
use std::fmt;
use std::sync::atomic::{AtomicU8, Ordering};

use crate::fault::Fault;

pub use crate::group::find_nan;

/// How much is checked and reported.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Level {
    /// Mismatches are detected and reported, as at every level.
    #[default]
    Off = 0,
    /// The life of a group is logged, too: its ranks and transports when it is made, its failure, its end.
    Info = 1,
    /// Errors also have shapes and call sites in them, and shapes must be the same on all ranks, not only sizes.
    Detail = 2,
}

/// The level has not been asked for yet.
const UNKNOWN: u8 = u8::MAX;

static LEVEL: AtomicU8 = AtomicU8::new(UNKNOWN);

impl Level {
    const ALL: [Level; 3] = [Level::Off, Level::Info, Level::Detail];

    /// As the variable has it.
    pub const fn name(self) -> &'static str {
        match self {
            Level::Off => "OFF",
            Level::Info => "INFO",
            Level::Detail => "DETAIL",
        }
    }

    /// What `TORCH_DISTRIBUTED_DEBUG` says; c10d takes any case, and nothing else.
    pub(crate) fn parse(value: Option<&OsStr>) -> Result<Level, Fault> {
        let Some(value) = value else { return Ok(Level::Off) };
        let named = |level: &Level| value.eq_ignore_ascii_case(level.name());
        let wrong = || Fault::argument("The value of TORCH_DISTRIBUTED_DEBUG must be OFF, INFO, or DETAIL.");
        Self::ALL.into_iter().find(named).ok_or_else(wrong)
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The level that was set, or else that of `TORCH_DISTRIBUTED_DEBUG`.
///
/// ```
/// use tenfold::debug::{self, Level};
///
/// debug::set_level(Level::Detail);
/// assert_eq!(debug::level(), Level::Detail);
/// ```
#[inline]
pub fn level() -> Level {
    match LEVEL.load(Ordering::Relaxed) {
        0 => Level::Off,
        1 => Level::Info,
        2 => Level::Detail,
        _ => first_look(),
    }
}

/// Sets the level, for every group of this process.
pub fn set_level(level: Level) {
    LEVEL.store(level as u8, Ordering::Relaxed);
}

/// Sets the level to that of `TORCH_DISTRIBUTED_DEBUG`.
///
/// # Errors
/// If its value is not a level.
pub fn set_level_from_environment() -> Result<(), Fault> {
    crate::environment::debug_level().map(set_level)
}

#[cold]
fn first_look() -> Level {
    // An invalid value is refused when a group is made.
    let level = crate::environment::debug_level().unwrap_or_default();
    let _set_meanwhile = LEVEL.compare_exchange(UNKNOWN, level as u8, Ordering::Relaxed, Ordering::Relaxed);
    self::level()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_are_read_as_pytorch_reads_them() {
        let read = |value: &str| Level::parse(Some(value.as_ref())).map_err(|fault| fault.message);
        let wrong = Err("The value of TORCH_DISTRIBUTED_DEBUG must be OFF, INFO, or DETAIL.".to_string());
        assert_eq!(read("OFF"), Ok(Level::Off));
        assert_eq!(read("info"), Ok(Level::Info));
        assert_eq!(read("Detail"), Ok(Level::Detail));
        for value in ["", " INFO", "2", "nonsense"] {
            assert_eq!(read(value), wrong, "{value}");
        }
        assert!(Level::parse(None).is_ok_and(|level| level == Level::Off));
    }
}
