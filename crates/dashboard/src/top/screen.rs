//! The screen of `tenfold top`: a title, the verdicts, four small charts, and one pane that scrolls.

use std::time::Duration;

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Paragraph, Sparkline, Wrap};

use super::facts::{Facts, Pane, Tone, sign};
use crate::verdict::{Level, show_seconds};
use tenfold_console::show_size;

/// What is shown, and the position in it.
#[derive(Debug)]
pub(super) struct Screen {
    address: String,
    facts: Facts,
    panes: Vec<Pane>,
    pane: usize,
    /// The first row shown, of each pane.
    tops: Vec<usize>,
    /// Rows that fit: known once it was drawn.
    height: usize,
}

/// In a smaller terminal there is no room for the charts.
const CHARTS_FROM: (u16, u16) = (50, 16);
const VERDICT_LINES_MAX: u16 = 6;

impl Screen {
    pub(super) fn new(address: String, facts: Facts) -> Screen {
        let panes = facts.panes();
        let tops = vec![0; panes.len()];
        // Without a job there are no ranks, so the waiting clients are shown first.
        let pane = usize::from(panes.first().is_some_and(|ranks| ranks.rows.is_empty()));
        Screen { address, facts, panes, pane, tops, height: 1 }
    }

    pub(super) fn update(&mut self, facts: Facts) {
        self.panes = facts.panes();
        self.facts = facts;
    }

    pub(super) fn next_pane(&mut self) {
        self.pane = (self.pane + 1) % self.panes.len();
    }

    pub(super) fn previous_pane(&mut self) {
        self.pane = (self.pane + self.panes.len() - 1) % self.panes.len();
    }

    pub(super) fn scroll(&mut self, rows: isize) {
        let top = self.tops[self.pane];
        self.tops[self.pane] = top.saturating_add_signed(rows).min(self.top_max());
    }

    /// Rows of one screen, minus one that stays visible.
    pub(super) fn page(&self) -> isize {
        self.height.saturating_sub(1).max(1) as isize
    }

    fn top_max(&self) -> usize {
        self.panes[self.pane].rows.len().saturating_sub(self.height)
    }

    /// `silence`: for how long the server has not answered, and why.
    pub(super) fn draw(&mut self, frame: &mut Frame<'_>, silence: Option<(Duration, &str)>) {
        let area = frame.area();
        let verdicts = Paragraph::new(self.verdict_lines(silence)).wrap(Wrap { trim: false });
        let charts = area.width >= CHARTS_FROM.0 && area.height >= CHARTS_FROM.1;
        // Lines break between words, so each may need one more row than its length suggests.
        let wanted = self.verdict_height(area.width, silence);
        let rows = Layout::vertical([
            Constraint::Length(1),
            Constraint::Length(wanted),
            Constraint::Length(if charts { 4 } else { 0 }),
            Constraint::Length(1),
            Constraint::Min(1),
            Constraint::Length(1),
        ])
        .split(area);
        let title = Line::styled(self.facts.title(&self.address), Style::new().add_modifier(Modifier::BOLD));
        frame.render_widget(title, rows[0]);
        frame.render_widget(verdicts, rows[1]);
        if charts {
            self.draw_charts(frame, rows[2]);
        }
        frame.render_widget(self.tabs(), rows[3]);
        self.draw_pane(frame, rows[4]);
        let keys = "q quit   Tab next pane   ↑↓ PgUp PgDn scroll";
        frame.render_widget(Line::styled(keys, dim()), rows[5]);
    }

    fn verdict_lines(&self, silence: Option<(Duration, &str)>) -> Vec<Line<'static>> {
        let mut lines = Vec::new();
        if let Some((since, why)) = silence {
            let since = show_seconds(since.as_secs_f64());
            let text = format!("✗ no answer for {since}: {why}; showing the last known state");
            lines.push(Line::styled(text, tone(Tone::Bad).add_modifier(Modifier::BOLD)));
        }
        for verdict in self.facts.verdicts() {
            let style = match verdict.level {
                Level::Ok => tone(Tone::Good),
                Level::Waiting => tone(Tone::Warning),
                Level::Bad => tone(Tone::Bad),
            };
            let text = format!("{} {}", sign(verdict.level), verdict.text);
            lines.push(Line::styled(text, style.add_modifier(Modifier::BOLD)));
        }
        lines
    }

    fn verdict_height(&self, width: u16, silence: Option<(Duration, &str)>) -> u16 {
        let lines = self.verdict_lines(silence);
        let rows = |line: &Line<'_>| {
            let full = line.width().div_ceil(usize::from(width.max(1)));
            // Words are not broken: what does not fit moves down, at most one line more for every three.
            if full > 1 { full + full / 3 } else { 1 }
        };
        u16::try_from(lines.iter().map(rows).sum::<usize>()).unwrap_or(u16::MAX).clamp(1, VERDICT_LINES_MAX)
    }

    fn draw_charts(&self, frame: &mut Frame<'_>, area: Rect) {
        type Show = fn(u64) -> String;
        let bytes: Show = |value| format!("{}/s", show_size(value as usize));
        let charts: [(&str, &str, Show, Color); 4] = [
            ("operations/s", "operations", |value| value.to_string(), Color::Blue),
            ("in", "bytes_in", bytes, Color::Cyan),
            ("out", "bytes_out", bytes, Color::Yellow),
            ("memory", "memory_bytes", |value| show_size(value as usize), Color::Magenta),
        ];
        let columns = Layout::horizontal([Constraint::Fill(1); 4]).spacing(2).split(area);
        for ((name, series, show, colour), column) in charts.into_iter().zip(columns.iter()) {
            let values = self.facts.series(series);
            let shown = &values[values.len().saturating_sub(usize::from(column.width))..];
            let now = show(values.last().copied().unwrap_or(0));
            let rows = Layout::vertical([Constraint::Length(1), Constraint::Min(1)]).split(*column);
            let title = Line::from(vec![
                Span::styled(format!("{name} "), dim()),
                Span::styled(now, Style::new().add_modifier(Modifier::BOLD)),
            ]);
            frame.render_widget(title, rows[0]);
            frame.render_widget(Sparkline::default().data(shown).style(Style::new().fg(colour)), rows[1]);
        }
    }

    fn tabs(&self) -> Line<'static> {
        let tab = |(place, pane): (usize, &Pane)| {
            let chosen = place == self.pane;
            let count = if pane.count.is_empty() { String::new() } else { format!(" {}", pane.count) };
            let style = if chosen { Style::new().add_modifier(Modifier::REVERSED) } else { dim() };
            // Brackets too: without colours, reversed text may look like plain text.
            let (open, close) = if chosen { ("[", "]") } else { (" ", " ") };
            Span::styled(format!("{open}{}{count}{close}", pane.title), style)
        };
        Line::from(self.panes.iter().enumerate().map(tab).collect::<Vec<_>>())
    }

    fn draw_pane(&mut self, frame: &mut Frame<'_>, area: Rect) {
        self.height = usize::from(area.height).saturating_sub(1).max(1);
        let top = self.tops[self.pane].min(self.top_max());
        self.tops[self.pane] = top; // there may be fewer rows than before
        let pane = &self.panes[self.pane];
        if pane.rows.is_empty() {
            frame.render_widget(Line::styled(pane.nothing, dim()), area);
            return;
        }
        let widths = pane.widths();
        let head: Vec<String> = pane.columns.iter().map(|column| column.name.into()).collect();
        let mut lines = vec![Line::styled(pane.line(&head, &widths), dim())];
        for row in pane.rows.iter().skip(top).take(self.height) {
            lines.push(Line::styled(pane.line(&row.cells, &widths), tone(row.tone)));
        }
        frame.render_widget(Paragraph::new(lines), area);
    }
}

fn dim() -> Style {
    Style::new().fg(Color::DarkGray)
}

/// Colours of the terminal's own palette, so that they suit its background.
fn tone(tone: Tone) -> Style {
    match tone {
        Tone::Plain => Style::new(),
        Tone::Good => Style::new().fg(Color::Green),
        Tone::Busy => Style::new().fg(Color::Blue),
        Tone::Warning => Style::new().fg(Color::Yellow),
        Tone::Bad => Style::new().fg(Color::Red),
        Tone::Dim => dim(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use serde_json::json;

    /// Eight ranks, of which the fifth has not joined.
    fn hung() -> Facts {
        let rank = |number: u64| {
            let waits = !matches!(number, 5 | 6);
            let operation = json!({"operation": "wait", "keys": "`pg/0/5`", "seconds": 41.2});
            json!({"rank": number, "local_rank": number % 4, "pid": 700 + number, "state": "running", "end": null,
                   "cpu_seconds": 3.5, "memory_bytes": 2 << 20, "last_output_seconds": 43.0, "joined": number != 5,
                   "stuck": waits, "why": "", "store_operation": if waits { operation } else { json!(null) }})
        };
        let node = |number: u64, host: &str| {
            let ranks: Vec<_> = (number * 4..number * 4 + 4).map(rank).collect();
            json!({"node": {"host": host}, "rank": number, "status": "joined", "beat_seconds": 1.0, "ranks": ranks})
        };
        let waiter = |rank: u64| {
            json!({"peer": "10.0.0.7:4", "rank": rank.to_string(), "operation": "wait",
                                        "keys": "`pg/0/5`", "keys_count": 1, "seconds": 41.2})
        };
        Facts {
            overview: json!({"version": "0.1.0", "server": {"address": "10.0.0.1:29500", "uptime_seconds": 300.0,
                "connections": 8, "connections_max": 100, "keys": 12, "keys_max": 15, "queue_items": 0,
                "queue_items_max": 10, "table_bytes": 990, "buffer_bytes": 10, "memory_max": 1024,
                "waiters_count": 6, "operations": {"set": 12, "wait": 100}, "closed": {"handshake": 2}}}),
            runs: json!([{"id": "x", "state": {"phase": "running", "outcome": null}, "nodes": [node(0, "a1"), node(1, "b7")]}]),
            waiters: json!([waiter(0), waiter(1), waiter(2), waiter(3), waiter(4), waiter(7)]),
            history: json!({"step_seconds": 1, "operations": [0, 5, 10, 20, 40], "by_operation": {"wait": [3], "set": [1]},
                "bytes_in": [0, 1024], "bytes_out": [2048, 1024], "memory_bytes": [500, 1000], "connections": [8], "waiters": [6]}),
            slow: json!([{"operation": "list", "key": "k", "keys_count": 3, "bytes": 2048, "microseconds": 1530,
                "peer": "10.0.0.7:4", "seconds_ago": 3.0}]),
            keys: json!({"keys": 12, "groups": [{"prefix": "pg/", "keys": 11, "bytes": 900, "newest_seconds": 4}],
                "entries": [{"key": "\u{1b}[2Jkey", "bytes": 9, "age_seconds": 1}]}),
        }
    }

    fn drawn(screen: &mut Screen, silence: Option<(Duration, &str)>, width: u16, height: u16) -> String {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| screen.draw(frame, silence)).unwrap();
        let cells = terminal.backend().buffer().content();
        let line = |row: &[ratatui::buffer::Cell]| row.iter().map(|cell| cell.symbol()).collect::<String>();
        cells.chunks(usize::from(width)).map(|row| format!("{}\n", line(row).trim_end())).collect()
    }

    #[test]
    fn the_screen_first_names_the_missing_ranks_and_then_shows_every_rank() {
        let mut screen = Screen::new("127.0.0.1:29580".into(), hung());
        let expected = "\
tenfold 0.1.0 · store 10.0.0.1:29500 · dashboard 127.0.0.1:29580 · up 5 min 0 s
✗ job x: 7 of 8 ranks joined — rank 5 (host b7) has not joined, 6 have waited up to 41 s
operations/s 40         in 1.0 KiB/s           out 1.0 KiB/s           memory 1000 B
(charts)
(charts)
(charts)
[Ranks 8] Waiting 6  Operations  Slowest  Keys 12  Limits
rank  host  state        for  output    cpu   memory  pid  doing
   0  a1    stuck       41 s    44 s  3.5 s  2.0 MiB  700  wait `pg/0/5`
   1  a1    stuck       41 s    44 s  3.5 s  2.0 MiB  701  wait `pg/0/5`
   2  a1    stuck       41 s    44 s  3.5 s  2.0 MiB  702  wait `pg/0/5`
   3  a1    stuck       41 s    44 s  3.5 s  2.0 MiB  703  wait `pg/0/5`
   4  b7    stuck       41 s    44 s  3.5 s  2.0 MiB  704  wait `pg/0/5`
   5  b7    not joined          44 s  3.5 s  2.0 MiB  705
   6  b7    running             44 s  3.5 s  2.0 MiB  706
   7  b7    stuck       41 s    44 s  3.5 s  2.0 MiB  707  wait `pg/0/5`

q quit   Tab next pane   ↑↓ PgUp PgDn scroll
";
        let charts = |text: String| -> String {
            text.lines()
                .enumerate()
                .filter(|(at, _)| !(3..6).contains(at))
                .map(|(_, line)| format!("{line}\n"))
                .collect()
        };
        assert_eq!(charts(drawn(&mut screen, None, 92, 18)), charts(expected.into()));
        assert!(drawn(&mut screen, None, 92, 18).contains('█'), "the charts are drawn");
    }

    #[test]
    fn a_line_across_the_table_makes_no_column_wider() {
        let mut facts = hung();
        let what = "rank 3 (pid 903, killed by SIGKILL) was replaced by pid 4003";
        facts.runs[0]["generations"] = json!([{"generation": 2, "seconds": 0.31, "what": what}]);
        let shown = drawn(&mut Screen::new("127.0.0.1:29580".into(), facts), None, 100, 30);
        assert!(shown.contains(&format!("\ngeneration 2 after 0.31 s: {what}\n")), "{shown}");
        assert!(shown.contains("\nrank  host  state "), "{shown}");
    }

    #[test]
    fn panes_are_switched_and_scrolled_and_stay_within_their_rows() {
        let mut screen = Screen::new("here".into(), hung());
        screen.next_pane();
        assert!(drawn(&mut screen, None, 100, 14).contains(
            "clients  for up to  wait for       who\n      6       41 s  wait `pg/0/5`  rank 0, rank 1, rank 2, rank 3, rank 4, rank 7\n"
        ));
        screen.previous_pane();
        let small = |screen: &mut Screen| drawn(screen, None, 100, 8);
        assert!(small(&mut screen).contains("   0  a1"));
        screen.scroll(1);
        let text = small(&mut screen);
        assert!(text.contains("   1  a1") && !text.contains("   0  a1"), "{text}");
        screen.scroll(isize::MAX);
        let text = small(&mut screen);
        assert!(text.contains("   7  b7") && text.contains("   5  b7"), "{text}");
        screen.scroll(isize::MIN);
        assert!(small(&mut screen).contains("   0  a1"));
        screen.scroll(screen.page());
        assert!(small(&mut screen).contains("   2  a1"));
        screen.previous_pane();
        let limits = drawn(&mut screen, None, 80, 16);
        assert!(
            limits.contains("[Limits]") && limits.contains("memory              1000 B  1.0 KiB  97.7 %"),
            "{limits}"
        );
        assert!(limits.contains("refused: handshake"), "{limits}");
        let mut fewer = hung();
        fewer.runs = json!([]);
        screen.next_pane();
        screen.scroll(isize::MAX);
        screen.update(fewer);
        assert!(small(&mut screen).contains("No job of `tenfold run` is known to this store."));
    }

    #[test]
    fn a_server_that_does_not_answer_is_reported_first() {
        let mut screen = Screen::new("here".into(), hung());
        let text = drawn(&mut screen, Some((Duration::from_secs(5), "connection refused")), 100, 12);
        let second = text.lines().nth(1).unwrap();
        assert_eq!(second, "✗ no answer for 5.0 s: connection refused; showing the last known state");
    }

    /// A server with unexpected data in every field.
    #[test]
    fn a_hostile_server_cannot_command_the_terminal() {
        fn poison(value: &mut serde_json::Value) {
            const POISON: &str = "\u{1b}]52;c;cHduZWQ=\u{7}\u{1b}[2J";
            match value {
                serde_json::Value::Array(items) => items.iter_mut().for_each(poison),
                serde_json::Value::Object(fields) => {
                    fields.values_mut().for_each(poison);
                    fields.insert(POISON.into(), json!(POISON));
                }
                other => *other = json!(POISON),
            }
        }
        let leaves = |change: fn(&mut Facts) -> &mut serde_json::Value| {
            let mut facts = hung();
            poison(change(&mut facts));
            facts
        };
        let all: [fn(&mut Facts) -> &mut serde_json::Value; 6] = [
            |facts| &mut facts.overview,
            |facts| &mut facts.runs,
            |facts| &mut facts.waiters,
            |facts| &mut facts.history,
            |facts| &mut facts.slow,
            |facts| &mut facts.keys,
        ];
        for change in all {
            let text = leaves(change).to_text("here");
            assert!(!text.contains(['\u{1b}', '\u{7}']), "{text:?}");
            for pane in 0..6 {
                let mut screen = Screen::new("here".into(), leaves(change));
                screen.pane = pane;
                let text = drawn(&mut screen, None, 120, 30);
                assert!(!text.contains(['\u{1b}', '\u{7}']), "{text:?}");
            }
        }
    }

    #[test]
    fn text_of_clients_cannot_command_the_terminal() {
        let mut screen = Screen::new("here".into(), hung());
        screen.pane = 4;
        let text = drawn(&mut screen, None, 80, 16);
        assert!(text.contains("\u{fffd}[2Jkey") && !text.contains('\u{1b}'), "{text}");
        assert!(!hung().to_text("here").contains('\u{1b}'));
    }

    #[test]
    fn no_size_of_a_terminal_and_no_lack_of_facts_makes_it_panic() {
        for facts in [hung(), Facts::default()] {
            for (width, height) in [(1, 1), (2, 3), (10, 5), (49, 15), (50, 16), (300, 100)] {
                let mut screen = Screen::new("here".into(), facts.clone());
                for _ in 0..7 {
                    drawn(&mut screen, Some((Duration::ZERO, "why")), width, height);
                    screen.scroll(3);
                    screen.next_pane();
                }
            }
        }
    }

    #[test]
    fn a_snapshot_has_all_of_it_as_plain_text() {
        let expected = "\
tenfold 0.1.0 · store 10.0.0.1:29500 · dashboard here · up 5 min 0 s
✗ job x: 7 of 8 ranks joined — rank 5 (host b7) has not joined, 6 have waited up to 41 s
now: 40 operations/s, 1.0 KiB/s in, 1.0 KiB/s out, 8 clients, 6 waiting

Ranks (8)
  rank  host  state        for  output    cpu   memory  pid  doing
     0  a1    stuck       41 s    44 s  3.5 s  2.0 MiB  700  wait `pg/0/5`
     1  a1    stuck       41 s    44 s  3.5 s  2.0 MiB  701  wait `pg/0/5`
     2  a1    stuck       41 s    44 s  3.5 s  2.0 MiB  702  wait `pg/0/5`
     3  a1    stuck       41 s    44 s  3.5 s  2.0 MiB  703  wait `pg/0/5`
     4  b7    stuck       41 s    44 s  3.5 s  2.0 MiB  704  wait `pg/0/5`
     5  b7    not joined          44 s  3.5 s  2.0 MiB  705
     6  b7    running             44 s  3.5 s  2.0 MiB  706
     7  b7    stuck       41 s    44 s  3.5 s  2.0 MiB  707  wait `pg/0/5`

Waiting (6)
  clients  for up to  wait for       who
        6       41 s  wait `pg/0/5`  rank 0, rank 1, rank 2, rank 3, rank 4, rank 7

Operations
  operation  per second  in all
  wait                3     100
  set                 1      12

Slowest
     took  operation     size    ago  client      key
  1.53 ms  list       2.0 KiB  3.0 s  10.0.0.7:4  k (3 keys)

Keys (12)
   size  keys  written  prefix or key
  900 B    11    4.0 s  pg/
    9 B          1.0 s  \u{fffd}[2Jkey

Limits
  what                  used       of   share
  memory              1000 B  1.0 KiB  97.7 %
  connections              8      100   8.0 %
  keys                    12       15  80.0 %
  queue items              0       10   0.0 %
  refused: handshake       2
";
        assert_eq!(hung().to_text("here"), expected);
    }
}
