//! What tenfold's commands share: exit codes, how sizes, times and addresses are written, log lines, progress
//! lines, text from elsewhere that is safe to print, limits, and how a command starts itself again.

#![warn(missing_docs)]

mod address;
mod limits;
#[cfg(feature = "log")]
mod log;
mod program;
mod progress_line;
mod text;
mod units;

pub use address::{Address, parse_address};
pub use limits::raise_open_files;
#[cfg(feature = "log")]
pub use log::{LogWriter, log_filter};
pub use program::Program;
pub use progress_line::{ProgressLine, WIPE};
pub use text::{command_len, one_line, printable};
pub use units::{parse_duration, parse_size, show_size};

/// Exit code of a command that did what was asked.
pub const SUCCESS: u8 = 0;
/// Exit code of a command that failed.
pub const FAILURE: u8 = 1;

/// What a subcommand ends with: the exit code, or an error for the user.
pub type Outcome = Result<u8, Box<dyn std::error::Error>>;
