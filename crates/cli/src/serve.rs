//! `tenfold serve`: a store server on its own, for stock PyTorch and for tenfold.

use std::io::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use tenfold_store::{Limits, Server, ServerOptions};

use tenfold_console::{LogWriter, Outcome, SUCCESS, parse_duration, parse_size, raise_open_files, show_size};
use tenfold_dashboard::{self as dashboard, Dashboard};

/// Run a store server that PyTorch's TCPStore and tenfold's clients can use.
///
/// The first line on standard output is `listening on HOST:PORT`; with a dashboard, the one after it is `dashboard on
/// http://HOST:PORT/`. After Ctrl-C or SIGTERM the server takes no new
/// clients and serves those that are connected until they leave or the drain time is over. A second signal stops it
/// immediately.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  tenfold serve                                   on 127.0.0.1:29500, for this machine only
  tenfold serve --host 10.0.0.1 --port 0          on one address, on a free port
  tenfold serve --host 0.0.0.0 --max-memory 4G    on every address: anyone who can reach it can read and write
  tenfold serve --dashboard                       with a page on http://127.0.0.1:29580/ that shows what it does
  # a stock PyTorch rank that uses it:
  #   TCPStore(\"127.0.0.1\", 29500, is_master=False)")]
pub(crate) struct Args {
    /// The only address or name of this machine to listen on; 0.0.0.0 or :: for all
    #[arg(long, default_value = "127.0.0.1")]
    host: String,
    /// Port to listen on; 0 picks a free one
    #[arg(long, default_value_t = 29500)]
    port: u16,
    /// After a signal, serve connected clients for up to this long
    #[arg(long, default_value = "5s", value_parser = parse_duration)]
    drain: Duration,

    #[command(flatten)]
    dashboard: dashboard::Flags,

    /// Memory for keys, values and buffers; when it is full, writes are refused and reads go on
    #[arg(long, default_value = "1G", value_parser = parse_size, help_heading = "Limits")]
    max_memory: usize,
    /// Serve other users of this machine on loopback as well (root is always served)
    #[arg(long)]
    allow_other_users: bool,
    /// Clients at a time (also bounded by the file-descriptor limit)
    #[arg(long, default_value_t = Limits::default().connections, help_heading = "Limits")]
    max_connections: usize,
    /// Keys in the store
    #[arg(long, default_value_t = Limits::default().table.keys, help_heading = "Limits")]
    max_keys: usize,
    /// Items in all queues together
    #[arg(long, default_value_t = Limits::default().table.queue_items, help_heading = "Limits")]
    max_queue_items: usize,
    /// Length of one key
    #[arg(long, default_value = "8K", value_parser = parse_size, help_heading = "Limits")]
    max_key: usize,
    /// Length of one value
    #[arg(long, default_value = "8M", value_parser = parse_size, help_heading = "Limits")]
    max_value: usize,
    /// Keys of one request
    #[arg(long, default_value = "128K", value_parser = parse_size, help_heading = "Limits")]
    max_request_keys: usize,
    /// Length of one whole request
    #[arg(long, default_value = "256M", value_parser = parse_size, help_heading = "Limits")]
    max_request: usize,
    /// Unsent bytes of one client beyond which its requests are not served until it reads
    #[arg(long, default_value = "16M", value_parser = parse_size, help_heading = "Limits")]
    max_output: usize,
    /// Time from a connection to the client's hello
    #[arg(long, default_value = "10s", value_parser = parse_duration, help_heading = "Limits")]
    handshake_timeout: Duration,
    /// Time from the first byte of a message to its last
    #[arg(long, default_value = "60s", value_parser = parse_duration, help_heading = "Limits")]
    message_timeout: Duration,
    /// Time for which a client may not read what it asked for
    #[arg(long, default_value = "30s", value_parser = parse_duration, help_heading = "Limits")]
    write_timeout: Duration,
}

pub(crate) fn run(args: Args) -> Outcome {
    let options = ServerOptions::new(args.host.clone(), args.port).limits(limits(&args));
    let mut signals = Signals::new([SIGINT, SIGTERM])?; // before the address is printed
    let server = Arc::new(Server::start(options)?);
    let dashboard = args.dashboard.options(DASHBOARD_PORT);
    let dashboard = dashboard.map(|options| dashboard::start(options, server.clone())).transpose()?;
    let mut out = std::io::stdout().lock();
    writeln!(out, "listening on {}", server.address())?;
    for further in &server.addresses()[1..] {
        writeln!(out, "listening on {further}")?;
    }
    if let Some(dashboard) = &dashboard {
        writeln!(out, "{dashboard}")?;
    }
    out.flush()?;
    if !server.is_private() {
        eprintln!(
            "warning: no authentication: anyone who can reach {} can read and write this store, and torchrun's agents run \
             what they read there",
            server.address()
        );
    }
    if let Some(warning) = dashboard.as_ref().and_then(Dashboard::warning) {
        eprintln!("warning: {warning}");
    }

    signals.forever().next();
    let impatient = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register_conditional_shutdown(signal, 128 + signal, impatient.clone())?;
    }
    impatient.store(true, Ordering::SeqCst); // from here on a second signal ends the server immediately
    let facts = server.facts();
    if facts.connections > 0 {
        let seconds = args.drain.as_secs_f64();
        say(format!(
            "stopping: {} clients are still connected, serving them for up to {seconds} s",
            facts.connections
        ));
    }
    server.shutdown(args.drain);
    let operations: u64 = facts.operations.values().sum();
    say(format!(
        "stopped after {:.1} s: {operations} operations for {} clients, {} keys, {} held",
        facts.uptime_seconds,
        facts.accepted,
        facts.keys,
        show_size(facts.table_bytes)
    ));
    Ok(SUCCESS)
}

/// A line on standard error, which may not be read: that must not keep the server from stopping.
fn say(mut line: String) {
    line.push('\n');
    let _never_fails = LogWriter::new().write_all(line.as_bytes());
}

fn limits(args: &Args) -> Limits {
    let mut limits = Limits::default();
    limits.message.key = args.max_key;
    limits.message.value = args.max_value;
    limits.message.keys = args.max_request_keys;
    limits.message.request = args.max_request;
    limits.table.keys = args.max_keys;
    limits.table.bytes = args.max_memory;
    limits.table.queue_items = args.max_queue_items;
    let is_shown = args.dashboard.options(DASHBOARD_PORT).is_some();
    let kept = DESCRIPTORS_KEPT + if is_shown { dashboard::DESCRIPTORS } else { 0 };
    limits = limits.with_connections(args.max_connections.min(raise_open_files().saturating_sub(kept)));
    limits.other_users = args.allow_other_users;
    limits.output = args.max_output;
    limits.handshake_timeout = args.handshake_timeout;
    limits.message_timeout = args.message_timeout;
    limits.write_timeout = args.write_timeout;
    limits
}

/// The default port of the dashboard; easy to remember, next to the store's.
const DASHBOARD_PORT: u16 = 29580;

/// Descriptors that are not clients: standard streams, the poll, listeners, and a spare one for refusing a
/// client.
const DESCRIPTORS_KEPT: usize = 64;
