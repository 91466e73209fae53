//! One live line at the bottom of a terminal: what the launcher is doing.
//!
//! [`Status`] is its content, and [`Status::text`] its form. [`StatusLine`] knows what is on the screen, and
//! when it may be drawn. The bytes go through the [`Outlet`](super::output::Outlet), which alone writes, so
//! that a line of a rank never mixes with the status line.

use std::time::{Duration, Instant};

use tenfold_console::WIPE;

/// Between two drawings because of a new text.
const CHANGE_PAUSE: Duration = Duration::from_millis(250);
/// Between two drawings because lines of ranks replaced it: it should not flicker.
const RETURN_PAUSE: Duration = Duration::from_millis(50);

/// The content. Set it as often as you like: it is drawn only when it has changed, and for the clock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Status {
    /// When the launcher started, for the clock.
    pub(super) started: Instant,
    pub(super) round: u64,
    /// Nodes of this round.
    pub(super) nodes: usize,
    /// What is waited for before the next round: `1 of 2 nodes have joined; waiting for the rest for up to 600 s`.
    pub(super) awaited: Option<String>,
    pub(super) ranks_running: usize,
    /// Of this node, in this round.
    pub(super) ranks: usize,
    /// They were asked to exit.
    pub(super) stopping: bool,
    /// Processes that wait to become ranks.
    pub(super) spares: usize,
    /// Of the ranks, if they recover by themselves.
    pub(super) generation: u64,
    pub(super) replaced: u64,
    pub(super) restarts_used: u64,
    pub(super) restarts_max: u64,
    /// `http://127.0.0.1:29580/`
    pub(super) dashboard: Option<String>,
}

impl Status {
    pub(super) fn new(started: Instant) -> Self {
        Status {
            started,
            round: 0,
            nodes: 0,
            awaited: None,
            ranks_running: 0,
            ranks: 0,
            stopping: false,
            spares: 0,
            generation: 0,
            replaced: 0,
            restarts_used: 0,
            restarts_max: 0,
            dashboard: None,
        }
    }

    fn seconds(&self, now: Instant) -> u64 {
        now.saturating_duration_since(self.started).as_secs()
    }

    /// At most `width` columns.
    fn text(&self, now: Instant, width: usize) -> String {
        let mut parts = vec![format!("tenfold {}", clock(self.seconds(now)))];
        if self.round > 0 {
            parts.push(format!("round {}", self.round));
        }
        if self.nodes > 1 {
            parts.push(count(self.nodes, "node"));
        }
        parts.extend(self.awaited.clone());
        if self.ranks > 0 {
            let doing = if self.stopping { "stopping" } else { "running" };
            parts.push(if self.ranks_running == self.ranks {
                format!("{} {doing}", count(self.ranks, "rank"))
            } else {
                format!("{} of {} {doing}", self.ranks_running, count(self.ranks, "rank"))
            });
        }
        if self.spares > 0 {
            parts.push(count(self.spares, "spare"));
        }
        if self.generation > 1 {
            parts.push(format!("generation {}", self.generation));
        }
        if self.restarts_used + self.replaced > 0 {
            let what = if self.replaced > 0 { "restarts and replacements" } else { "restarts" };
            let used = self.restarts_used + self.replaced;
            parts.push(format!("{used} of {} {what} used", self.restarts_max));
        }
        parts.extend(self.dashboard.clone());
        cut(&parts.join(" | "), width)
    }
}

fn count(number: usize, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}

fn clock(seconds: u64) -> String {
    let (hours, minutes, seconds) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    if hours > 0 { format!("{hours}:{minutes:02}:{seconds:02}") } else { format!("{minutes}:{seconds:02}") }
}

fn cut(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return text.to_string();
    }
    let kept: String = text.chars().take(width.saturating_sub(1)).collect();
    if width == 0 { kept } else { kept + "…" }
}

/// How much of a status is on the screen.
#[derive(Debug, Default)]
pub(super) struct StatusLine {
    wanted: Option<Status>,
    /// On the screen, or being written to it, with its clock.
    drawn: Option<(Status, u64)>,
    drawn_at: Option<Instant>,
}

impl StatusLine {
    pub(super) fn set(&mut self, status: Option<Status>) {
        self.wanted = status;
    }

    /// When to [`StatusLine::draw`] next, if needed; a time in the past means now.
    pub(super) fn next_draw(&self) -> Option<Instant> {
        let last = |status: &Status| self.drawn_at.unwrap_or(status.started);
        match (&self.wanted, &self.drawn) {
            (None, None) => None,
            (Some(wanted), Some((drawn, seconds))) if wanted == drawn => {
                Some(drawn.started + Duration::from_secs(seconds + 1))
            }
            (Some(status), None) => Some(last(status) + RETURN_PAUSE),
            (_, Some((status, _))) => Some(last(status) + CHANGE_PAUSE),
        }
    }

    /// What to write now, if anything.
    pub(super) fn draw(&mut self, now: Instant, width: usize) -> Option<String> {
        if self.next_draw().is_none_or(|at| now < at) {
            return None;
        }
        self.drawn_at = Some(now);
        self.drawn = self.wanted.clone().map(|status| {
            let seconds = status.seconds(now);
            (status, seconds)
        });
        let text = self.wanted.as_ref().map_or_else(String::new, |status| status.text(now, width));
        Some(format!("{WIPE}{text}"))
    }

    /// What to write before anything else goes to the terminal, if it is in the way.
    pub(super) fn make_way(&mut self) -> Option<&'static str> {
        self.drawn.take().map(|_| WIPE)
    }
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "a time to count from")]
mod tests {
    use super::*;

    fn four(started: Instant) -> Status {
        Status { nodes: 1, ranks: 4, ranks_running: 4, ..Status::new(started) }
    }

    #[test]
    fn the_text_has_what_matters() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        assert_eq!(four(start).text(at(75), 80), "tenfold 1:15 | 4 ranks running");
        let awaited = Some("1 of 2 nodes have joined; waiting for the rest".to_string());
        assert_eq!(
            Status { awaited, ..Status::new(start) }.text(at(5), 80),
            "tenfold 0:05 | 1 of 2 nodes have joined; waiting for the rest"
        );
        let all = Status {
            round: 2,
            nodes: 3,
            ranks_running: 1,
            stopping: true,
            restarts_used: 1,
            restarts_max: 3,
            dashboard: Some("http://127.0.0.1:29580/".into()),
            ..four(start)
        };
        assert_eq!(
            all.text(at(3723), 200),
            "tenfold 1:02:03 | round 2 | 3 nodes | 1 of 4 ranks stopping | 1 of 3 restarts used | \
             http://127.0.0.1:29580/"
        );
        let recovered = Status {
            spares: 1,
            generation: 3,
            replaced: 2,
            restarts_used: 1,
            restarts_max: 3,
            ..four(start)
        };
        assert_eq!(
            recovered.text(at(0), 200),
            "tenfold 0:00 | 4 ranks running | 1 spare | generation 3 | 3 of 3 restarts and replacements used"
        );
        for width in 0..200 {
            assert!(all.text(at(3723), width).chars().count() <= width);
        }
        assert_eq!(all.text(at(3723), 17), "tenfold 1:02:03 …");
    }

    #[test]
    fn a_change_is_drawn_at_most_four_times_a_second_a_return_sooner_and_the_clock_each_second() {
        let start = Instant::now();
        let at = |milliseconds| start + Duration::from_millis(milliseconds);
        let mut line = StatusLine::default();
        assert_eq!((line.draw(at(0), 80), line.next_draw()), (None, None));
        line.set(Some(four(start)));
        assert_eq!((line.draw(at(49), 80), line.next_draw()), (None, Some(at(50)))); // a run that ends immediately has none
        assert_eq!(line.draw(at(100), 80).as_deref(), Some("\r\x1b[2Ktenfold 0:00 | 4 ranks running"));
        assert_eq!((line.draw(at(999), 80), line.next_draw()), (None, Some(at(1000)))); // nothing new
        assert_eq!(line.draw(at(1001), 80).as_deref(), Some("\r\x1b[2Ktenfold 0:01 | 4 ranks running"));
        line.set(Some(Status { ranks_running: 3, ..four(start) }));
        assert_eq!((line.draw(at(1250), 80), line.next_draw()), (None, Some(at(1251))));
        assert!(line.draw(at(1251), 80).is_some());
        assert_eq!((line.make_way(), line.make_way()), (Some(WIPE), None));
        assert_eq!((line.draw(at(1300), 80), line.next_draw()), (None, Some(at(1301))));
        assert!(line.draw(at(1301), 80).is_some());
        line.set(None);
        assert_eq!(line.make_way(), Some(WIPE));
        assert_eq!((line.draw(at(5000), 80), line.next_draw()), (None, None));
    }
}
