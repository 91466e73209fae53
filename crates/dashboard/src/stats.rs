//! What a store server reports about itself, as text.

use std::io::Write as _;
use std::time::Duration;

use serde_json::json;
use tenfold_console::{one_line, show_size};
use tenfold_store::{ErrorKind, StoreExt as _, TcpStore};

/// Prints what the server behind `store` reports: as a table, or as JSON.
///
/// # Errors
/// If the server cannot be asked, or standard output cannot be written.
pub fn print_stats(store: &TcpStore, json: bool) -> Result<(), Box<dyn std::error::Error>> {
    let round_trip = store.ping()?;
    let facts = match store.server_facts() {
        Ok(facts) => facts,
        Err(error) if error.kind() == ErrorKind::Unsupported => return print_little(store, round_trip, json),
        Err(error) => return Err(error.into()),
    };
    let mut out = std::io::stdout().lock();
    if json {
        writeln!(out, "{}", serde_json::to_string_pretty(&facts)?)?;
        return Ok(());
    }
    writeln!(
        out,
        "tenfold store at {}, up {:.1} s, round trip {} µs",
        one_line(&facts.address),
        facts.uptime_seconds,
        round_trip.as_micros()
    )?;
    writeln!(
        out,
        "connections  {} of {} ({} accepted)",
        facts.connections, facts.connections_max, facts.accepted
    )?;
    let (held, limit) = (facts.table_bytes + facts.buffer_bytes, facts.memory_max);
    writeln!(out, "memory       {} of {}", show_size(held), show_size(limit))?;
    writeln!(out, "keys         {}, queue items {}", facts.keys, facts.queue_items)?;
    writeln!(
        out,
        "traffic      {} in, {} out",
        show_size(facts.bytes_in as usize),
        show_size(facts.bytes_out as usize)
    )?;
    let list =
        facts.operations.iter().map(|(name, count)| format!("{name} {count}")).collect::<Vec<_>>().join(", ");
    writeln!(out, "operations   {}", if list.is_empty() { "none yet".into() } else { one_line(&list) })?;
    for (reason, count) in &facts.closed {
        writeln!(out, "closed       {count} × {}", json!(reason).as_str().unwrap_or_default())?;
    }
    writeln!(out, "waiting      {}", facts.waiters_count)?;
    for waiter in &facts.waiters {
        writeln!(
            out,
            "  {} in {} for {} ({} keys), {:.1} s",
            one_line(&waiter.peer),
            one_line(&waiter.operation),
            one_line(&waiter.keys),
            waiter.keys_count,
            waiter.seconds
        )?;
    }
    Ok(())
}

/// What any TCPStore server reports.
fn print_little(
    store: &TcpStore,
    round_trip: Duration,
    json: bool,
) -> Result<(), Box<dyn std::error::Error>> {
    let keys = store.num_keys()?;
    let mut out = std::io::stdout().lock();
    if json {
        writeln!(out, "{}", json!({ "keys": keys, "round_trip_us": round_trip.as_micros() as u64 }))?;
    } else {
        writeln!(out, "a TCPStore that is not tenfold's, round trip {} µs", round_trip.as_micros())?;
        writeln!(out, "keys         {keys}")?;
    }
    Ok(())
}
