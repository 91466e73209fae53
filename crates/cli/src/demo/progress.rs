//! The progress of the training: a moving bar on a terminal, an occasional line elsewhere.

use std::io::{self, Write};

use tenfold_console::WIPE;

const GREEN: &str = "\x1b[32m";
const PLAIN: &str = "\x1b[0m";
/// The number of lines if the bar cannot move.
const LINES: usize = 5;

/// Where the demo writes, and what may be written there.
#[derive(Debug)]
pub(super) struct Screen<W> {
    pub(super) output: W,
    /// Whether a bar can move here.
    pub(super) is_terminal: bool,
    pub(super) has_colours: bool,
    /// Columns.
    pub(super) width: usize,
}

/// One point of the curve.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub(super) struct Progress {
    /// Steps done.
    pub(super) step: u32,
    pub(super) steps: u32,
    /// The mean of all workers since the previous point.
    pub(super) loss: f32,
}

impl<W: Write> Screen<W> {
    pub(super) fn line(&mut self, text: std::fmt::Arguments<'_>) -> io::Result<()> {
        writeln!(self.output, "{text}")
    }

    /// Moves the bar; elsewhere prints a line, if `before` is in an earlier fifth of the training.
    pub(super) fn progress(&mut self, before: Option<Progress>, now: Progress) -> io::Result<()> {
        if self.is_terminal {
            let bar = bar(now, self.width.saturating_sub(1), self.has_colours);
            write!(self.output, "{WIPE}{bar}")?;
            return self.output.flush();
        }
        let part = |progress: Progress| progress.step as usize * LINES / progress.steps as usize;
        if before.is_some_and(|before| part(before) == part(now)) {
            return Ok(());
        }
        self.line(format_args!("{}", told(now)))?;
        self.output.flush()
    }

    /// Removes the bar; lines stay, and an empty line follows them.
    pub(super) fn end_of_progress(&mut self) -> io::Result<()> {
        if self.is_terminal { write!(self.output, "{WIPE}") } else { writeln!(self.output) }
    }
}

fn told(Progress { step, steps, loss }: Progress) -> String {
    let digits = steps.to_string().len();
    format!("step {step:>digits$} of {steps}, loss {loss:.4}")
}

/// At most `width` columns.
fn bar(progress: Progress, width: usize, has_colours: bool) -> String {
    let told = told(progress);
    let room = width.saturating_sub(told.len() + 2).min(60);
    let done = room * progress.step as usize / progress.steps.max(1) as usize;
    let (done, left) = ("━".repeat(done), "·".repeat(room - done.min(room)));
    let (green, plain) = if has_colours { (GREEN, PLAIN) } else { ("", "") };
    let told: String = told.chars().take(width).collect();
    if room == 0 { told } else { format!("{green}{done}{plain}{left}  {told}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(step: u32) -> Progress {
        Progress { step, steps: 200, loss: 0.5 }
    }

    #[test]
    fn the_bar_fills_and_keeps_within_the_width() {
        assert_eq!(bar(at(50), 40, false), "━━········  step  50 of 200, loss 0.5000");
        assert_eq!(
            bar(at(200), 40, true),
            format!("{GREEN}{}{PLAIN}  step 200 of 200, loss 0.5000", "━".repeat(10))
        );
        for width in 0..150 {
            for step in [0, 1, 100, 199, 200] {
                assert!(bar(at(step), width, false).chars().count() <= width, "{width}");
            }
        }
    }

    fn written(is_terminal: bool, steps: impl Iterator<Item = u32>) -> String {
        let mut screen = Screen { output: Vec::new(), is_terminal, has_colours: false, width: 80 };
        let mut before = None;
        for step in steps {
            screen.progress(before, at(step)).unwrap();
            before = Some(at(step));
        }
        screen.end_of_progress().unwrap();
        String::from_utf8(screen.output).unwrap()
    }

    #[test]
    fn a_file_gets_a_few_lines_and_no_control_characters() {
        let text = written(false, (2..=200).step_by(2));
        assert!(!text.contains('\x1b') && !text.contains('\r'), "{text:?}");
        let steps: Vec<&str> = text.trim_end().lines().map(|line| &line[5..8]).collect();
        assert_eq!(steps, ["  2", " 40", " 80", "120", "160", "200"]);
    }

    #[test]
    fn a_terminal_gets_one_line_that_is_gone_at_the_end() {
        let text = written(true, [10, 20].into_iter());
        assert!(!text.contains('\n') && text.ends_with(WIPE), "{text:?}");
    }
}
