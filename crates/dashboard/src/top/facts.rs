//! What the dashboard's API answered at one moment, and what is shown of it: tables of text.
//!
//! Everything in it comes from untrusted clients and goes to a terminal, so [`clean`] removes terminal
//! commands.

use serde_json::{Value, json};

use super::ask::{Dashboard, Trouble};
use crate::verdict::{self, Level, Verdict, is_good_end, show_seconds};
use tenfold_console::{one_line, show_size};

/// The answers of the API, unchanged.
#[derive(Clone, Debug, Default)]
pub(super) struct Facts {
    pub(super) overview: Value,
    pub(super) runs: Value,
    pub(super) waiters: Value,
    pub(super) history: Value,
    pub(super) slow: Value,
    pub(super) keys: Value,
}

/// How a row is drawn; a cell also has the word as plain text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tone {
    Plain,
    Good,
    Busy,
    Warning,
    Bad,
    Dim,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Row {
    pub(super) cells: Vec<String>,
    pub(super) tone: Tone,
}

/// One table with its name.
#[derive(Clone, Debug)]
pub(super) struct Pane {
    pub(super) title: &'static str,
    /// After the title: how many there are.
    pub(super) count: String,
    pub(super) columns: Vec<Column>,
    pub(super) rows: Vec<Row>,
    /// The text if there are no rows.
    pub(super) nothing: &'static str,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Column {
    pub(super) name: &'static str,
    pub(super) right: bool,
}

fn left(name: &'static str) -> Column {
    Column { name, right: false }
}

fn right(name: &'static str) -> Column {
    Column { name, right: true }
}

/// Rows of one pane; more are not useful.
const ROWS_MAX: usize = 2000;
/// Generations of one job.
const GENERATIONS_SHOWN: usize = 5;
/// Characters of one cell.
const CELL_MAX: usize = 200;
const VERDICT_MAX: usize = 600;
const RANKS_AS_THEY_ARE: usize = 64;

impl Facts {
    pub(super) fn ask(dashboard: &Dashboard) -> Result<Facts, Trouble> {
        Ok(Facts {
            overview: dashboard.get("/api/overview")?,
            runs: dashboard.get("/api/runs")?,
            waiters: dashboard.get("/api/waiters")?,
            history: dashboard.get("/api/history")?,
            slow: dashboard.get("/api/slow")?,
            keys: keys(dashboard)?,
        })
    }

    pub(super) fn to_json(&self) -> Value {
        json!({"overview": self.overview, "runs": self.runs, "waiters": self.waiters, "history": self.history,
               "slow": self.slow, "keys": self.keys})
    }

    /// One line about the server.
    pub(super) fn title(&self, address: &str) -> String {
        let server = &self.overview["server"];
        let up = server["uptime_seconds"].as_f64().map(show_seconds).unwrap_or_else(|| "?".into());
        let version = clean(&text(&self.overview["version"]));
        format!(
            "tenfold {version} · store {} · dashboard {address} · up {up}",
            clean(&text(&server["address"]))
        )
    }

    /// The verdict of each job, or of the store if there is no job.
    pub(super) fn verdicts(&self) -> Vec<Verdict> {
        let mut runs: Vec<&Value> = list(&self.runs).iter().collect();
        runs.sort_by_key(|run| run["state"]["outcome"].is_string()); // those that are over come last
        if runs.is_empty() {
            runs.push(&Value::Null);
        }
        let judge = |run: &Value| {
            let Verdict { level, text } = match run {
                Value::Null => verdict::store_verdict(&self.overview["server"], &self.waiters),
                run => verdict::verdict(run),
            };
            Verdict { level, text: clean_to(VERDICT_MAX, &text) }
        };
        runs.into_iter().take(8).map(judge).collect()
    }

    pub(super) fn panes(&self) -> Vec<Pane> {
        vec![
            self.ranks(),
            self.waiting(),
            self.operations(),
            self.slowest(),
            self.keys_by_prefix(),
            self.limits(),
        ]
    }

    fn ranks(&self) -> Pane {
        let mut rows = Vec::new();
        let mut count = 0;
        for run in list(&self.runs) {
            let mut ranks: Vec<(Tone, u64, Row)> = Vec::new();
            for node in list(&run["nodes"]) {
                rows.extend(node_row(node));
                rows.extend(spares_row(node));
                for rank in list(&node["ranks"]) {
                    let row = rank_row(run, node, rank);
                    ranks.push((row.tone, rank["rank"].as_u64().unwrap_or(u64::MAX), row));
                }
            }
            count += ranks.len();
            let generations = list(&run["generations"]);
            let last = &generations[generations.len().saturating_sub(GENERATIONS_SHOWN)..];
            rows.extend(last.iter().filter_map(generation_row));
            // With many ranks, those with a problem come first, so that no scrolling is needed.
            let many = ranks.len() > RANKS_AS_THEY_ARE;
            ranks.sort_by_key(|(tone, rank, _)| (if many { urgency(*tone) } else { 0 }, *rank));
            rows.extend(ranks.into_iter().map(|(_, _, row)| row));
        }
        Pane {
            title: "Ranks",
            count: if count > 0 { count.to_string() } else { String::new() },
            columns: vec![
                right("rank"),
                left("host"),
                left("state"),
                right("for"),
                right("output"),
                right("cpu"),
                right("memory"),
                right("pid"),
                left("doing"),
            ],
            rows: capped(rows),
            nothing: "No job of `tenfold run` is known to this store.",
        }
    }

    fn waiting(&self) -> Pane {
        let mut groups: Vec<(String, usize, f64, Vec<String>)> = Vec::new();
        let mut places = std::collections::HashMap::new();
        for waiter in list(&self.waiters) {
            let what = format!("{} {}", text(&waiter["operation"]), text(&waiter["keys"]));
            let place = *places.entry(what.clone()).or_insert(groups.len());
            if place == groups.len() {
                groups.push((what, 0, 0.0, Vec::new()));
            }
            let (_, count, longest, who) = &mut groups[place];
            *count += 1;
            *longest = longest.max(waiter["seconds"].as_f64().unwrap_or(0.0));
            if who.len() < 8 {
                let rank = waiter["rank"].as_str().map(|rank| format!("rank {rank}"));
                who.push(rank.unwrap_or_else(|| text(&waiter["peer"])));
            }
        }
        groups.sort_by(|(.., a, _), (.., b, _)| b.total_cmp(a));
        let rows = groups.into_iter().map(|(what, count, longest, who)| {
            let rest =
                if count > who.len() { format!(" and {} more", count - who.len()) } else { String::new() };
            let tone = if longest >= 10.0 { Tone::Warning } else { Tone::Plain };
            row(tone, [count.to_string(), show_seconds(longest), what, format!("{}{rest}", who.join(", "))])
        });
        let total = self.overview["server"]["waiters_count"].as_u64().unwrap_or(0);
        Pane {
            title: "Waiting",
            count: if total > 0 { total.to_string() } else { String::new() },
            columns: vec![right("clients"), right("for up to"), left("wait for"), left("who")],
            rows: capped(rows.collect()),
            nothing: "No client is waiting for a key.",
        }
    }

    fn operations(&self) -> Pane {
        let totals = self.overview["server"]["operations"].as_object();
        let mut rows: Vec<(u64, Row)> = totals
            .into_iter()
            .flatten()
            .map(|(name, total)| {
                let total = total.as_u64().unwrap_or(0);
                let rate = list(&self.history["by_operation"][name]).last().and_then(Value::as_f64);
                let rate = rate.map_or("–".into(), |rate| format!("{:.0}", rate / self.step()));
                (total, row(Tone::Plain, [name.clone(), rate, total.to_string()]))
            })
            .collect();
        rows.sort_by(|(a, _), (b, _)| b.cmp(a));
        Pane {
            title: "Operations",
            count: String::new(),
            columns: vec![left("operation"), right("per second"), right("in all")],
            rows: capped(rows.into_iter().map(|(_, row)| row).collect()),
            nothing: "None yet.",
        }
    }

    fn slowest(&self) -> Pane {
        let rows = list(&self.slow).iter().map(|slow| {
            let took = slow["microseconds"].as_f64().unwrap_or(0.0);
            let ago = slow["seconds_ago"].as_f64().map_or(String::new(), show_seconds);
            let further = match slow["keys_count"].as_u64() {
                Some(count) if count > 1 => format!(" ({count} keys)"),
                _ => String::new(),
            };
            let key = format!("{}{further}", text(&slow["key"]));
            let cells =
                [format!("{:.2} ms", took / 1e3), text(&slow["operation"]), size(&slow["bytes"]), ago];
            row(Tone::Plain, cells.into_iter().chain([text(&slow["peer"]), key]))
        });
        Pane {
            title: "Slowest",
            count: String::new(),
            columns: vec![
                right("took"),
                left("operation"),
                right("size"),
                right("ago"),
                left("client"),
                left("key"),
            ],
            rows: capped(rows.collect()),
            nothing: "No slow operations.",
        }
    }

    fn keys_by_prefix(&self) -> Pane {
        let groups = list(&self.keys["groups"]).iter().map(|group| {
            let newest = group["newest_seconds"].as_f64().map_or(String::new(), show_seconds);
            row(Tone::Plain, [size(&group["bytes"]), text(&group["keys"]), newest, text(&group["prefix"])])
        });
        let entries = list(&self.keys["entries"]).iter().map(|entry| {
            let age = entry["age_seconds"].as_f64().map_or(String::new(), show_seconds);
            row(Tone::Dim, [size(&entry["bytes"]), String::new(), age, text(&entry["key"])])
        });
        Pane {
            title: "Keys",
            count: text(&self.keys["keys"]),
            columns: vec![right("size"), right("keys"), right("written"), left("prefix or key")],
            rows: capped(groups.chain(entries).collect()),
            nothing: "No keys.",
        }
    }

    fn limits(&self) -> Pane {
        let server = &self.overview["server"];
        let number = |name: &str| server[name].as_u64();
        let held = number("table_bytes").unwrap_or(0) + number("buffer_bytes").unwrap_or(0);
        let bytes = |bytes: u64| show_size(bytes as usize);
        let plain = |count: u64| count.to_string();
        let mut rows = vec![
            limit_row("memory", Some(held), number("memory_max"), bytes),
            limit_row("connections", number("connections"), number("connections_max"), plain),
            limit_row("keys", number("keys"), number("keys_max"), plain),
            limit_row("queue items", number("queue_items"), number("queue_items_max"), plain),
        ];
        for (reason, count) in server["closed"].as_object().into_iter().flatten() {
            let cells = [format!("refused: {reason}"), count.to_string(), String::new(), String::new()];
            rows.push(row(Tone::Warning, cells));
        }
        Pane {
            title: "Limits",
            count: String::new(),
            columns: vec![left("what"), right("used"), right("of"), right("share")],
            rows: capped(rows),
            nothing: "",
        }
    }

    fn step(&self) -> f64 {
        self.history["step_seconds"].as_f64().filter(|step| *step > 0.0).unwrap_or(1.0)
    }

    /// One series of the history, oldest first, per second if it counts events.
    pub(super) fn series(&self, name: &str) -> Vec<u64> {
        let scale = if matches!(name, "operations" | "bytes_in" | "bytes_out") { self.step() } else { 1.0 };
        list(&self.history[name])
            .iter()
            .map(|value| (value.as_f64().unwrap_or(0.0) / scale).max(0.0) as u64)
            .collect()
    }

    /// All panes as plain text.
    pub(super) fn to_text(&self, address: &str) -> String {
        let mut out = format!("{}\n", self.title(address));
        for Verdict { level, text } in self.verdicts() {
            out += &format!("{} {text}\n", sign(level));
        }
        let last = |name: &str| self.series(name).last().copied().unwrap_or(0);
        out += &format!(
            "now: {} operations/s, {}/s in, {}/s out, {} clients, {} waiting\n",
            last("operations"),
            show_size(last("bytes_in") as usize),
            show_size(last("bytes_out") as usize),
            last("connections"),
            last("waiters"),
        );
        for pane in self.panes() {
            let count = if pane.count.is_empty() { String::new() } else { format!(" ({})", pane.count) };
            out += &format!("\n{}{count}\n", pane.title);
            if pane.rows.is_empty() {
                out += &format!("  {}\n", pane.nothing);
                continue;
            }
            let widths = pane.widths();
            let head: Vec<String> = pane.columns.iter().map(|column| column.name.into()).collect();
            for cells in std::iter::once(&head).chain(pane.rows.iter().map(|row| &row.cells)) {
                out += &format!("  {}\n", pane.line(cells, &widths).trim_end());
            }
        }
        out
    }
}

impl Pane {
    /// How wide each column must be.
    pub(super) fn widths(&self) -> Vec<usize> {
        let width = |place: usize, column: &Column| {
            // A line across all columns makes none of them wider.
            let rows = self.rows.iter().filter(|row| row.cells.len() > 1 || self.columns.len() == 1);
            let cells = rows.filter_map(|row| row.cells.get(place)).map(|cell| wide(cell));
            cells.chain([wide(column.name)]).max().unwrap_or(0)
        };
        self.columns.iter().enumerate().map(|(place, column)| width(place, column)).collect()
    }

    /// Cells side by side; the last one is not padded.
    pub(super) fn line(&self, cells: &[String], widths: &[usize]) -> String {
        if cells.len() == 1 {
            return cells[0].clone(); // a line across all columns
        }
        let mut line = String::new();
        for (place, ((cell, column), width)) in cells.iter().zip(&self.columns).zip(widths).enumerate() {
            let gap = " ".repeat(width.saturating_sub(wide(cell)));
            let separator = if place == 0 { "" } else { "  " };
            line += separator;
            line += &if column.right { gap + cell } else { cell.clone() + &gap };
        }
        line
    }
}

/// Columns of a terminal that a text takes.
fn wide(text: &str) -> usize {
    ratatui::text::Span::raw(text).width()
}

pub(super) fn sign(level: Level) -> &'static str {
    match level {
        Level::Ok => "✓",
        Level::Waiting => "…",
        Level::Bad => "✗",
    }
}

fn urgency(tone: Tone) -> u8 {
    match tone {
        Tone::Bad => 0,
        Tone::Warning => 1,
        _ => 2,
    }
}

/// A node that has not simply joined.
fn node_row(node: &Value) -> Option<Row> {
    let rank = node["rank"].as_u64().map_or("a node".into(), |rank| format!("node {rank}"));
    let host = text(&node["node"]["host"]);
    let beat =
        node["beat_seconds"].as_f64().map_or(String::new(), |beat| format!(" for {}", show_seconds(beat)));
    let (tone, what) = match node["status"].as_str()? {
        "missing" => (Tone::Bad, format!("{rank} has not joined")),
        "lost" => (Tone::Bad, format!("{rank} on {host} is unresponsive{beat}")),
        "spare" => (Tone::Dim, format!("{host} is a spare node")),
        _ => return None,
    };
    Some(row(tone, [what]))
}

/// The processes of a node that wait to become ranks.
fn spares_row(node: &Value) -> Option<Row> {
    let host = text(&node["node"]["host"]);
    let spares = list(&node["spares"]);
    let pids: Vec<String> = spares.iter().take(8).map(|spare| text(&spare["pid"])).collect();
    let count = match spares.len() {
        0 => return None,
        1 => "1 spare waits".to_owned(),
        several => format!("{several} spares wait"),
    };
    Some(row(Tone::Dim, [format!("{count} on {host}: pid {}", pids.join(", "))]))
}

/// A generation of ranks that recovered; the first one of a round has no changes.
fn generation_row(generation: &Value) -> Option<Row> {
    let what = text(&generation["what"]);
    let took = generation["seconds"].as_f64().unwrap_or(0.0);
    let number = text(&generation["generation"]);
    (!what.is_empty()).then(|| row(Tone::Warning, [format!("generation {number} after {took:.2} s: {what}")]))
}

/// Keys by prefix. The server counts them between requests: if it has many keys or clients, it has to be
/// asked again.
fn keys(dashboard: &Dashboard) -> Result<Value, Trouble> {
    const TRIES: usize = 10;
    for _ in 0..TRIES {
        match dashboard.get("/api/keys?prefix=") {
            Ok(answer) if answer["counting"] == true => {}
            answer => return answer,
        }
    }
    Ok(Value::Null) // everything else is worth showing
}

/// How late a rank must be in collectives, in seconds, to be shown as late.
const LATE: f64 = 1e-3;

/// The current or last call of a rank in a group, and how late the rank is.
fn collective(one: &Value) -> String {
    let Some(call) = one["call"].as_str() else { return String::new() };
    let when = if one["under_way"] == true { "in" } else { "after" };
    let kind = call.split('(').next().unwrap_or(call);
    let late = one["late_seconds"].as_f64().filter(|late| *late >= LATE);
    let late = late.map_or_else(String::new, |late| format!(", recently {:.0} ms late", late * 1e3));
    format!("{when} {kind} #{} of {}{late}", one["number"], text(&one["group"]))
}

/// The last request of a rank to the store.
fn last_asked(last: &Value) -> String {
    let Some(seconds) = last["seconds"].as_f64() else { return String::new() };
    format!("after {} in the store, {} ago", text(&last["operation"]), show_seconds(seconds))
}

fn rank_row(run: &Value, node: &Value, rank: &Value) -> Row {
    let over = run["state"]["outcome"].is_string();
    let ended = rank["state"] == "ended";
    let end = rank["end"].as_str().unwrap_or_default();
    let operation = &rank["store_operation"];
    let (tone, state) = match () {
        () if ended && !is_good_end(end) => (Tone::Bad, "failed"),
        () if ended || over => (Tone::Dim, "ended"),
        () if node["status"] == "lost" => (Tone::Bad, "node lost"),
        () if rank["state"] == "stopped" => (Tone::Bad, "stopped"),
        () if rank["joined"] != true => (Tone::Bad, "not joined"),
        () if rank["stuck"] == true => (Tone::Warning, "stuck"),
        () if operation.is_object() => (Tone::Busy, "waiting"),
        () => (Tone::Good, "running"),
    };
    let doing = match operation.is_object() {
        _ if ended => end.into(),
        true => format!("{} {}", text(&operation["operation"]), text(&operation["keys"])),
        false if rank["why"] != "" => text(&rank["why"]),
        false if rank["collectives"][0].is_object() => collective(&rank["collectives"][0]),
        false => last_asked(&rank["store_last"]),
    };
    let beat = node["beat_seconds"].as_f64().unwrap_or(0.0);
    let seconds =
        |value: &Value, more: f64| value.as_f64().map_or(String::new(), |value| show_seconds(value + more));
    row(
        tone,
        [
            text(&rank["rank"]),
            text(&node["node"]["host"]),
            state.into(),
            if ended { String::new() } else { seconds(&operation["seconds"], 0.0) },
            seconds(&rank["last_output_seconds"], beat),
            seconds(&rank["cpu_seconds"], 0.0),
            size(&rank["memory_bytes"]),
            text(&rank["pid"]),
            doing,
        ],
    )
}

fn limit_row(name: &str, used: Option<u64>, most: Option<u64>, show: impl Fn(u64) -> String) -> Row {
    let share = match (used, most) {
        (Some(used), Some(most)) if most > 0 => Some(used as f64 / most as f64),
        _ => None,
    };
    let tone = match share {
        Some(share) if share >= 0.95 => Tone::Bad,
        Some(share) if share >= 0.8 => Tone::Warning,
        _ => Tone::Plain,
    };
    let shown = |number: Option<u64>| number.map_or("–".into(), &show);
    let percent = share.map_or(String::new(), |share| format!("{:.1} %", share * 100.0));
    row(tone, [name.into(), shown(used), shown(most), percent])
}

fn row(tone: Tone, cells: impl IntoIterator<Item = String>) -> Row {
    Row { cells: cells.into_iter().map(|cell| clean(&cell)).collect(), tone }
}

fn capped(mut rows: Vec<Row>) -> Vec<Row> {
    if rows.len() > ROWS_MAX {
        let rest = rows.len() - ROWS_MAX;
        rows.truncate(ROWS_MAX);
        rows.push(row(Tone::Dim, [format!("… and {rest} more")]));
    }
    rows
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// A string without terminal commands, a number in digits, anything else as nothing.
fn text(value: &Value) -> String {
    match value {
        Value::String(text) => clean(text),
        Value::Number(number) => number.to_string(),
        _ => String::new(),
    }
}

fn size(value: &Value) -> String {
    value.as_u64().map_or(String::new(), |bytes| show_size(bytes as usize))
}

/// Removes what moves a cursor, changes colours or changes the writing direction, and shortens the text.
fn clean(text: &str) -> String {
    clean_to(CELL_MAX, text)
}

fn clean_to(letters_max: usize, text: &str) -> String {
    let taken: String = text.chars().take(letters_max).collect();
    let mut clean = one_line(&taken);
    if text.chars().nth(letters_max).is_some() {
        clean.push('…');
    }
    clean
}
