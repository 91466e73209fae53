//! `tenfold top`: what the dashboard shows, in a terminal.
//!
//! A thread polls the dashboard's API; this one draws the last answer and reads keys, so that a slow server
//! never blocks the keyboard. `facts` makes tables of text, which `screen` draws and `--once` prints: both
//! show the same.
//!
//! The terminal is restored however this ends: by a key, an error, SIGTERM or a panic.

#![expect(clippy::disallowed_methods, reason = "the polling thread, and how long ago it got an answer")]

mod ask;
mod facts;
mod screen;

use std::io::{IsTerminal as _, Write as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, TryRecvError};
use std::thread;
use std::time::{Duration, Instant};

use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use signal_hook::consts::SIGTERM;
use tenfold_store::{TcpStore, TcpStoreOptions};

use crate::print_stats;
use tenfold_console::{Address, Outcome, SUCCESS, parse_address, parse_duration};

use ask::{Dashboard, Trouble};
use facts::Facts;
use screen::Screen;

/// Show a store and its jobs in the terminal: what hangs, which rank waits for what, how busy the store is.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  tenfold top 127.0.0.1:29580             the dashboard that `tenfold serve --dashboard` opened
  tenfold top 127.0.0.1:29580 --once      print it once, for a log or a bug report
  tenfold top 127.0.0.1:29580 --json      the same facts for a program

Keys: Tab and Shift-Tab switch panes, arrows, PgUp, PgDn, Home and End scroll, q, Esc or Ctrl-C quit.")]
pub struct Args {
    /// HOST:PORT of a dashboard: what `serve --dashboard` and `run --dashboard` print
    #[arg(value_parser = parse_address)]
    dashboard: Address,
    /// Print one snapshot and exit (the default when standard output is not a terminal)
    #[arg(long)]
    once: bool,
    /// Print one snapshot as JSON and exit
    #[arg(long)]
    json: bool,
    /// Time between updates
    #[arg(long, default_value = "1s", value_parser = parse_duration)]
    interval: Duration,
    /// Time limit for one answer of the dashboard
    #[arg(long, default_value = "10s", value_parser = parse_duration)]
    timeout: Duration,
}

/// How soon a key, a signal or new facts are noticed.
const GLANCE: Duration = Duration::from_millis(100);
const INTERVAL_MIN: Duration = Duration::from_millis(100);

/// Shows the dashboard at the given address until the user quits.
///
/// # Errors
/// If the address does not answer, or the terminal cannot be used.
pub fn run(args: Args) -> Outcome {
    let dashboard = Dashboard::new(&args.dashboard.host, args.dashboard.port, args.timeout);
    // The first request is made before the screen is taken, so that an error about the address is an ordinary
    // message.
    let first = match Facts::ask(&dashboard) {
        Ok(facts) => facts,
        Err(trouble) if trouble.is_not_http() => return show_store(&args, &trouble),
        Err(trouble) => return Err(trouble.message(&args.dashboard.to_string()).into()),
    };
    let mut out = std::io::stdout();
    if args.json {
        writeln!(out, "{}", first.to_json())?;
        return Ok(SUCCESS);
    }
    if args.once || !out.is_terminal() {
        out.write_all(first.to_text(&args.dashboard.to_string()).as_bytes())?;
        return Ok(SUCCESS);
    }
    watch(&args, dashboard, first)
}

/// The address is not an HTTP server: perhaps a store, which has its own statistics.
fn show_store(args: &Args, trouble: &Trouble) -> Outcome {
    let Address { host, port } = &args.dashboard;
    let options = TcpStoreOptions::new(host.clone(), *port).timeout(args.timeout);
    let Ok(store) = TcpStore::open(options) else {
        return Err(trouble.message(&args.dashboard.to_string()).into());
    };
    eprintln!(
        "note: {} is a store, not a dashboard; showing its own statistics once\n  \
         hint: start it with `tenfold serve --dashboard` and give `top` the address that it prints",
        args.dashboard
    );
    print_stats(&store, args.json)?;
    Ok(SUCCESS)
}

fn watch(args: &Args, dashboard: Dashboard, first: Facts) -> Outcome {
    let ended = Arc::new(AtomicBool::new(false));
    signal_hook::flag::register(SIGTERM, ended.clone())?;
    let answers = ask_again_and_again(dashboard, args.interval.max(INTERVAL_MIN))?;
    let mut screen = Screen::new(args.dashboard.to_string(), first);
    let mut terminal = ratatui::try_init()?; // its panic hook restores the terminal
    let _restore = Restore;
    let mut answered = Instant::now();
    let mut problem = None;
    loop {
        match answers.try_recv() {
            Ok(Ok(facts)) => {
                screen.update(facts);
                (answered, problem) = (Instant::now(), None);
            }
            Ok(Err(trouble)) => problem = Some(trouble.to_string()),
            Err(TryRecvError::Empty) => {}
            Err(TryRecvError::Disconnected) => problem = Some("the polling thread has exited".into()),
        }
        let silence = problem.as_ref().map(|problem| (answered.elapsed(), problem.as_str()));
        terminal.draw(|frame| screen.draw(frame, silence))?;
        if ended.load(Ordering::SeqCst) {
            return Ok(128 + SIGTERM as u8);
        }
        if event::poll(GLANCE)? && !react(&mut screen, &event::read()?) {
            return Ok(SUCCESS);
        }
    }
}

/// Restores the terminal on every exit except a panic, which has its hook.
struct Restore;

impl Drop for Restore {
    fn drop(&mut self) {
        let _nothing_to_do_about_it = ratatui::try_restore();
    }
}

/// One request at a time: the next waits for the last answer and then for the interval.
fn ask_again_and_again(
    dashboard: Dashboard,
    interval: Duration,
) -> std::io::Result<mpsc::Receiver<Result<Facts, Trouble>>> {
    let (sender, answers) = mpsc::sync_channel(1);
    let look = move || {
        loop {
            thread::park_timeout(interval); // never unparked: an early wake-up only polls early
            if sender.send(Facts::ask(&dashboard)).is_err() {
                return; // the screen was closed
            }
        }
    };
    thread::Builder::new().name("tenfold-top".into()).spawn(look)?;
    Ok(answers)
}

/// Handles a key; false if it quits.
fn react(screen: &mut Screen, event: &Event) -> bool {
    let Event::Key(key) = event else { return true };
    if key.kind == KeyEventKind::Release {
        return true;
    }
    match key.code {
        KeyCode::Char('q') | KeyCode::Esc => return false,
        KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return false,
        KeyCode::Tab | KeyCode::Right => screen.next_pane(),
        KeyCode::BackTab | KeyCode::Left => screen.previous_pane(),
        KeyCode::Up | KeyCode::Char('k') => screen.scroll(-1),
        KeyCode::Down | KeyCode::Char('j') => screen.scroll(1),
        KeyCode::PageUp => screen.scroll(-screen.page()),
        KeyCode::PageDown | KeyCode::Char(' ') => screen.scroll(screen.page()),
        KeyCode::Home => screen.scroll(isize::MIN),
        KeyCode::End => screen.scroll(isize::MAX),
        _ => {}
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use ratatui::crossterm::event::KeyEvent;

    #[test]
    fn q_escape_and_control_c_quit_and_nothing_else_does() {
        let mut screen = Screen::new("here".into(), Facts::default());
        let mut press = |code, modifiers| react(&mut screen, &Event::Key(KeyEvent::new(code, modifiers)));
        let none = KeyModifiers::NONE;
        assert!(!press(KeyCode::Char('q'), none));
        assert!(!press(KeyCode::Esc, none));
        assert!(!press(KeyCode::Char('c'), KeyModifiers::CONTROL));
        let others =
            [KeyCode::Char('c'), KeyCode::Tab, KeyCode::BackTab, KeyCode::Up, KeyCode::Down, KeyCode::Home];
        for code in
            others.into_iter().chain([KeyCode::End, KeyCode::PageUp, KeyCode::PageDown, KeyCode::F(1)])
        {
            assert!(press(code, none), "{code}");
        }
        assert!(react(&mut screen, &Event::Resize(1, 1)));
    }
}
