//! A recorded conversation, and a server that plays its part of one.

#![allow(
    clippy::unwrap_used,
    reason = "a test fails by panicking; `expect` is not fulfilled in every crate that has this file"
)]

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::time::Duration;

use serde_json::Value as Json;

/// A test that hangs fails instead.
pub(crate) const GUARD: Duration = Duration::from_secs(20);

pub(crate) struct Transcript {
    pub(crate) name: String,
    pub(crate) python: Vec<String>,
    pub(crate) entries: Vec<Entry>,
    pub(crate) unordered_keys: bool,
}

#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) connection: usize,
    pub(crate) from_client: bool,
    pub(crate) bytes: Vec<u8>,
    pub(crate) close: bool,
    /// Repetitions were left out of the recording here, until another client joined.
    pub(crate) elided: bool,
}

impl Transcript {
    pub(crate) fn load(path: &Path) -> Transcript {
        let text = std::fs::read_to_string(path).unwrap();
        let json: Json = serde_json::from_str(&text).unwrap();
        let name = path.file_stem().unwrap().to_str().unwrap().to_string();
        let nonce = json["nonce_le_hex"].as_str().map(unhex).unwrap_or_default();
        let own_nonce = std::process::id().to_le_bytes();
        let entry = |entry: &Json| {
            let mut bytes = unhex(entry["hex"].as_str().unwrap());
            // The number in a ping is the process's id: ours, where the recording has another.
            let is_ping = entry["op"] == "PING" || (entry["dir"] == "s2c" && bytes == nonce);
            if is_ping && !name.starts_with("raw_") {
                let at = bytes.len() - nonce.len();
                bytes[at..].copy_from_slice(&own_nonce);
            }
            Entry {
                connection: entry["conn"].as_u64().unwrap() as usize,
                from_client: entry["dir"] == "c2s",
                bytes,
                close: entry["event"] == "close",
                elided: entry["op"] == "(elided)",
            }
        };
        Transcript {
            entries: json["transcript"].as_array().unwrap().iter().map(entry).collect(),
            name,
            python: json["python"]
                .as_array()
                .unwrap()
                .iter()
                .map(|line| line.as_str().unwrap().into())
                .collect(),
            unordered_keys: json["unordered_list_keys"] == true,
        }
    }

    pub(crate) fn load_all() -> Vec<Transcript> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/transcripts");
        let mut paths: Vec<_> =
            std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        paths.retain(|path| path.extension().is_some_and(|extension| extension == "json"));
        paths.sort();
        paths.iter().map(|path| Transcript::load(path)).collect()
    }

    /// One connection's part.
    pub(crate) fn of_connection(&self, connection: usize) -> impl Iterator<Item = &Entry> {
        self.entries.iter().filter(move |entry| entry.connection == connection)
    }

    pub(crate) fn connections(&self) -> usize {
        self.entries.iter().map(|entry| entry.connection + 1).max().unwrap_or(0)
    }
}

/// Plays the server of a recording: sends its bytes when they are due, and requires the client's exact bytes.
pub(crate) fn play_server(transcript: &Transcript, listener: &TcpListener) -> Result<(), String> {
    std::thread::scope(|scope| {
        let mut parts = Vec::new();
        for connection in 0..transcript.connections() {
            let (stream, _) = listener.accept().unwrap();
            parts.push(scope.spawn(move || play_connection(transcript, connection, stream)));
        }
        parts.into_iter().try_for_each(|part| part.join().unwrap())
    })
}

/// Our client's first ping has a special nonce, which distinguishes our server from PyTorch's. PyTorch's
/// sends it back.
fn as_our_client_says_it<'a>(entries: impl Iterator<Item = &'a Entry>) -> Vec<Entry> {
    const GREETING: [u8; 4] = 0xF01D_7E4F_u32.to_le_bytes();
    let mut entries: Vec<Entry> = entries.cloned().collect();
    let nonce = std::process::id().to_le_bytes();
    for from_client in [true, false] {
        let is_first = |entry: &&mut Entry| entry.from_client == from_client && entry.bytes.ends_with(&nonce);
        if let Some(entry) = entries.iter_mut().find(is_first) {
            let at = entry.bytes.len() - nonce.len();
            entry.bytes[at..].copy_from_slice(&GREETING);
        }
    }
    entries
}

fn play_connection(transcript: &Transcript, connection: usize, mut stream: TcpStream) -> Result<(), String> {
    stream.set_read_timeout(Some(GUARD)).unwrap();
    stream.set_nodelay(true).unwrap();
    for entry in &as_our_client_says_it(transcript.of_connection(connection)) {
        match (entry.from_client, entry.close) {
            (true, false) => {
                let mut got = vec![0; entry.bytes.len()];
                let place = || format!("connection {connection}, expected {}", hex(&entry.bytes));
                stream.read_exact(&mut got).map_err(|error| format!("{}: {error}", place()))?;
                if got != entry.bytes {
                    return Err(format!("{}, got {}", place(), hex(&got)));
                }
            }
            (false, false) => stream.write_all(&entry.bytes).map_err(|error| error.to_string())?,
            (true, true) => {}
            (false, true) => return Ok(()),
        }
    }
    // Nothing except the end may follow.
    let mut rest = Vec::new();
    stream
        .read_to_end(&mut rest)
        .map_err(|error| format!("connection {connection} after its end: {error}"))?;
    if rest.is_empty() {
        Ok(())
    } else {
        Err(format!("connection {connection} says more than recorded: {}", hex(&rest)))
    }
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.chars().map(|digit| digit.to_digit(16).unwrap() as u8).collect();
    digits.chunks_exact(2).map(|pair| pair[0] << 4 | pair[1]).collect()
}
