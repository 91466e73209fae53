//! `tenfold store`: talks to any TCPStore server, PyTorch's own included.

use std::io::{IsTerminal, Read as _, Write as _};
use std::time::Duration;

use serde_json::{Value as Json, json};
use tenfold_store::{StoreExt, TcpStore, TcpStoreOptions, Value};

use tenfold_console::{Address, FAILURE, Outcome, SUCCESS, parse_address, parse_duration};
use tenfold_dashboard::print_stats;

/// Read and write a running store: tenfold's, or one inside a PyTorch job.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  tenfold store 127.0.0.1:29500 set color blue
  tenfold store 127.0.0.1:29500 get color
  tenfold store 127.0.0.1:29500 --timeout 60s wait rank0/ready rank1/ready
  tenfold store 127.0.0.1:29500 keys default_pg/     keys that begin with default_pg/
  tenfold store 127.0.0.1:29500 stats --json         what the server does, which client waits for what
  head -c 100 /dev/urandom | tenfold store 127.0.0.1:29500 set blob -

Exit status: 0 done, 1 failed (check: a key does not exist), 2 invalid arguments.")]
pub(crate) struct Args {
    /// HOST:PORT of the server; an IPv6 address in brackets
    #[arg(value_parser = parse_address)]
    server: Address,
    /// Time limit for the connection and for every operation
    #[arg(long, default_value = "10s", value_parser = parse_duration, global = true)]
    timeout: Duration,
    /// Print JSON
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand, Debug)]
enum Command {
    /// Print a value, waiting for the key up to the timeout
    Get { key: String },
    /// Write a value; `-` reads it from standard input
    Set { key: String, value: String },
    /// Add to a counter and print its new value
    Add {
        key: String,
        #[arg(allow_negative_numbers = true, default_value_t = 1)]
        number: i64,
    },
    /// Add to the end of a value; `-` reads from standard input
    Append { key: String, value: String },
    /// Write DESIRED if the value is EXPECTED, or if the key does not exist and EXPECTED is empty; print the value
    CompareSet { key: String, expected: String, desired: String },
    /// Check whether all keys exist: exit status 0 or 1
    Check {
        #[arg(required = true)]
        keys: Vec<String>,
    },
    /// Wait until all keys exist, up to the timeout
    Wait {
        #[arg(required = true)]
        keys: Vec<String>,
    },
    /// List the keys that begin with PREFIX
    Keys {
        #[arg(default_value = "")]
        prefix: String,
    },
    /// Remove keys
    Delete {
        #[arg(required = true)]
        keys: Vec<String>,
    },
    /// Put an item at the end of a queue; `-` reads it from standard input
    Push { queue: String, value: String },
    /// Take the oldest item of a queue and print it
    Pop {
        queue: String,
        /// Wait for an item up to the timeout
        #[arg(long)]
        wait: bool,
    },
    /// Print the length of a queue
    Len { queue: String },
    /// Print the server's statistics
    Stats,
}

pub(crate) fn run(args: Args) -> Outcome {
    let Address { host, port } = &args.server;
    let store = TcpStore::open(TcpStoreOptions::new(host.clone(), *port).timeout(args.timeout))?;
    let json = args.json;
    match args.command {
        Command::Get { key } => print_value(&store.get(key)?, json)?,
        Command::Set { key, value } => {
            store.set(key, read_value(value)?)?;
            confirm(&store, json)?;
        }
        Command::Add { key, number } => print(json, json!({ "value": store.add(key, number)? }), "value")?,
        Command::Append { key, value } => {
            store.append(key, read_value(value)?)?;
            confirm(&store, json)?;
        }
        Command::CompareSet { key, expected, desired } => {
            print_value(&store.compare_set(key, expected, desired)?, json)?;
        }
        Command::Check { keys } => {
            let present = store.check(&keys)?;
            print(json, json!({ "present": present }), "present")?;
            return Ok(if present { SUCCESS } else { FAILURE });
        }
        Command::Wait { keys } => {
            store.wait(&keys)?;
            confirm(&store, json)?;
        }
        Command::Keys { prefix } => print_keys(store.list_keys()?, &prefix, json)?,
        Command::Delete { keys } => {
            let mut deleted = 0;
            for key in keys {
                deleted += usize::from(store.delete_key(key)?);
            }
            print(json, json!({ "deleted": deleted }), "deleted")?;
        }
        Command::Push { queue, value } => {
            store.queue_push(queue, read_value(value)?)?;
            confirm(&store, json)?;
        }
        Command::Pop { queue, wait: true } => print_value(&store.queue_pop(queue)?, json)?,
        Command::Pop { queue, wait: false } => print_value(&store.try_queue_pop(queue)?, json)?,
        Command::Len { queue } => print(json, json!({ "length": store.queue_len(queue)? }), "length")?,
        Command::Stats => print_stats(&store, json)?,
    }
    Ok(SUCCESS)
}

/// Confirms writes that the server does not answer before reporting success.
fn confirm(store: &TcpStore, json: bool) -> Result<(), Box<dyn std::error::Error>> {
    store.ping()?;
    if json {
        println!("{}", json!({ "ok": true }));
    }
    Ok(())
}

fn read_value(argument: String) -> std::io::Result<Vec<u8>> {
    if argument != "-" {
        return Ok(argument.into_bytes());
    }
    let mut value = Vec::new();
    std::io::stdin().lock().read_to_end(&mut value)?;
    Ok(value)
}

fn print(json: bool, answer: Json, field: &str) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    if json { writeln!(out, "{answer}") } else { writeln!(out, "{}", answer[field]) }
}

/// The raw bytes. A terminal also gets a line end, but no terminal commands, because other clients wrote the
/// value.
fn print_value(value: &[u8], json: bool) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    if json {
        return writeln!(out, "{}", json!({ "value": String::from_utf8_lossy(value), "bytes": value.len() }));
    }
    if out.is_terminal() {
        return writeln!(out, "{}", for_terminal(value));
    }
    out.write_all(value)?;
    out.flush()
}

fn print_keys(keys: Vec<Value>, prefix: &str, json: bool) -> std::io::Result<()> {
    let mut keys: Vec<_> = keys.into_iter().filter(|key| key.starts_with(prefix.as_bytes())).collect();
    keys.sort_unstable();
    let mut out = std::io::stdout().lock();
    if json {
        let keys: Vec<_> = keys.iter().map(|key| String::from_utf8_lossy(key)).collect();
        return writeln!(out, "{}", json!({ "keys": keys }));
    }
    for key in keys {
        writeln!(out, "{}", String::from_utf8_lossy(&key).escape_debug())?;
    }
    Ok(())
}

/// A value as a terminal shows it: its lines and tabs, and no terminal commands.
fn for_terminal(value: &[u8]) -> String {
    let keep = |character: char| match character {
        '\n' | '\t' => character,
        character if character.is_control() => '\u{fffd}',
        character => character,
    };
    String::from_utf8_lossy(value).chars().map(keep).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_cannot_command_a_terminal() {
        assert_eq!(for_terminal(b"a\tb\n\x1b[2J\xff\r\x07"), "a\tb\n\u{fffd}[2J\u{fffd}\u{fffd}\u{fffd}");
        assert_eq!(for_terminal("ä".as_bytes()), "ä");
    }
}
