//! `tenfold relay`: one connection to a store server for all ranks of a node.

use std::io::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use tenfold_store::{Limits, Relay, RelayOptions};

use tenfold_console::{
    Address, LogWriter, Outcome, SUCCESS, parse_address, parse_duration, parse_size, raise_open_files,
};

/// Serve the ranks of this node over one connection to a store server.
///
/// Ranks connect to the relay as to a store server: PyTorch's TCPStore and tenfold's clients work unchanged. The relay
/// merges their requests and sends them to the server over one connection. If that connection is lost, the relay
/// connects again and repeats what was not answered; every request is executed once, and ranks only see a pause.
///
/// The first line on standard output is `listening on HOST:PORT`. The server must be tenfold's: `tenfold serve`, or the
/// store of `tenfold run`. After Ctrl-C or SIGTERM the relay serves connected ranks until they leave or the drain time
/// is over. A second signal stops it immediately.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  tenfold relay --upstream 10.0.0.1:29500                             for ranks of this node, on 127.0.0.1:29500
  tenfold relay --upstream 10.0.0.1:29500 --listen 127.0.0.1:0        on a free port
  tenfold relay --upstream 10.0.0.1:29500 --connect-timeout 10m       before the server has started
  # a stock PyTorch rank that uses it:
  #   TCPStore(\"127.0.0.1\", 29500, is_master=False)")]
pub(crate) struct Args {
    /// HOST:PORT of the server; an IPv6 address in brackets
    #[arg(long, value_name = "HOST:PORT", value_parser = parse_address)]
    upstream: Address,
    /// The only address to listen on; port 0 picks a free one
    #[arg(long, value_name = "ADDR:PORT", default_value = "127.0.0.1:29500")]
    listen: Address,
    /// How long to wait for the server at the start; later the relay tries without limit
    #[arg(long, default_value = "60s", value_parser = parse_duration)]
    connect_timeout: Duration,
    /// After a signal, serve connected ranks for up to this long
    #[arg(long, default_value = "5s", value_parser = parse_duration)]
    drain: Duration,
    /// Serve other users of this machine on loopback as well (root is always served)
    #[arg(long)]
    allow_other_users: bool,
    /// Memory for buffers
    #[arg(long, default_value = "1G", value_parser = parse_size, help_heading = "Limits")]
    max_memory: usize,
    /// Ranks at a time (also bounded by the file-descriptor limit)
    #[arg(long, default_value_t = Limits::default().connections, help_heading = "Limits")]
    max_connections: usize,
    /// Unsent bytes of one rank beyond which its requests are not served until it reads
    #[arg(long, default_value = "16M", value_parser = parse_size, help_heading = "Limits")]
    max_output: usize,
}

pub(crate) fn run(args: &Args) -> Outcome {
    let mut limits = Limits::default();
    let connections = args.max_connections.min(raise_open_files().saturating_sub(DESCRIPTORS_KEPT));
    limits = limits.with_connections(connections);
    limits.table.bytes = args.max_memory;
    limits.other_users = args.allow_other_users;
    limits.output = args.max_output;
    let options = RelayOptions::new(args.upstream.host.clone(), args.upstream.port)
        .listen(args.listen.host.clone(), args.listen.port)
        .connect_timeout(args.connect_timeout)
        .limits(limits);
    let mut signals = Signals::new([SIGINT, SIGTERM])?; // before the address is printed
    let relay = Relay::start(options)?;
    let mut out = std::io::stdout().lock();
    for address in relay.addresses() {
        writeln!(out, "listening on {address}")?;
    }
    out.flush()?;
    if !relay.is_private() {
        eprintln!(
            "warning: no authentication: anyone who can reach {} can read and write the store behind it",
            relay.address()
        );
    }

    signals.forever().next();
    let impatient = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register_conditional_shutdown(signal, 128 + signal, impatient.clone())?;
    }
    impatient.store(true, Ordering::SeqCst); // from here on a second signal ends the relay immediately
    let facts = relay.facts();
    relay.shutdown(args.drain);
    let line = format!(
        "stopped: {} requests of {} clients, {} sent to {}, {} reconnects\n",
        facts.requests, facts.accepted, facts.requests_sent, facts.upstream, facts.reconnects
    );
    let _never_fails = LogWriter::new().write_all(line.as_bytes());
    Ok(SUCCESS)
}

/// Descriptors that are not clients: standard streams, the poll, listeners, the server, and a spare one for
/// refusing a client.
const DESCRIPTORS_KEPT: usize = 64;
