//! One line of a terminal that is written again and again.

use std::fmt::Display;
use std::io::{IsTerminal as _, Write as _};

/// Moves to the beginning of the line and clears it.
pub const WIPE: &str = "\r\x1b[2K";

/// Progress on standard error: shown if it is a terminal, otherwise nothing is written.
#[derive(Clone, Copy, Debug)]
pub struct ProgressLine {
    is_shown: bool,
}

impl ProgressLine {
    /// Nothing is written before the first [`ProgressLine::show`].
    pub fn new() -> Self {
        ProgressLine { is_shown: std::io::stderr().is_terminal() }
    }

    /// Replaces the line by this text.
    pub fn show(&self, text: impl Display) {
        if self.is_shown {
            let _closed = write!(std::io::stderr(), "{WIPE}{text}");
        }
    }

    /// Removes the line, before anything else is written.
    pub fn clear(&self) {
        self.show("");
    }
}

impl Default for ProgressLine {
    fn default() -> Self {
        ProgressLine::new()
    }
}
