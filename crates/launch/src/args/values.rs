//! Values of flags: numbers of nodes, settings of the rendezvous, addresses, signals.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use super::super::rendezvous::NODES_MAX;
use tenfold_console::parse_duration;

/// Ports when none is given: torchrun's.
pub(super) const STATIC_PORT: u16 = 29500;
pub(crate) const ELASTIC_PORT: u16 = 29400;

/// The default of `--relay-from`: more ranks than machines have accelerators. With fewer, MASTER_ADDR stays
/// what torchrun makes it, because programs of that kind may start a server of their own there.
pub(super) const RELAY_FROM: usize = 64;

pub(super) fn parse_relay_from(text: &str) -> Result<usize, String> {
    text.trim().parse().map_err(|_| "expected a number of ranks such as 64, or 0 for no relay".to_string())
}

/// `2`, or `1:4`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Nodes {
    pub(crate) min: usize,
    pub(crate) max: usize,
}

impl FromStr for Nodes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (min, max) = text.split_once(':').unwrap_or((text, text));
        let bad =
            || format!("expected a number of nodes such as 2, or a range such as 1:4 (at most {NODES_MAX})");
        let number = |text: &str| text.trim().parse::<usize>().map_err(|_| bad());
        let nodes = Nodes { min: number(min)?, max: number(max)? };
        let is_range = 1 <= nodes.min && nodes.min <= nodes.max && nodes.max <= NODES_MAX;
        if is_range { Ok(nodes) } else { Err(bad()) }
    }
}

/// The settings of `--rdzv-conf`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Settings {
    /// How long to wait for enough nodes to join.
    pub(crate) join_timeout: Duration,
    /// From enough nodes to the start without more.
    pub(crate) last_call: Duration,
    pub(crate) beat_interval: Duration,
    pub(crate) beats_missed_max: u32,
    /// The limit of one operation on the store.
    pub(crate) read_timeout: Duration,
    /// Whether this node hosts the store; detected if not given.
    pub(crate) is_host: Option<bool>,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            join_timeout: Duration::from_secs(600),
            last_call: Duration::from_secs(30),
            beat_interval: Duration::from_secs(5),
            beats_missed_max: 3,
            read_timeout: Duration::from_secs(60),
            is_host: None,
        }
    }
}

/// The keys of `--rdzv-conf`; some have no effect here but are used in existing scripts.
const KEYS: [&str; 11] = [
    "join_timeout",
    "last_call_timeout",
    "close_timeout",
    "timeout",
    "read_timeout",
    "keep_alive_interval",
    "keep_alive_max_attempt",
    "heartbeat",
    "heartbeat_timeout",
    "cas_backoff_max_seconds",
    "is_host",
];

impl FromStr for Settings {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut settings = Settings::default();
        for setting in text.split(',').map(str::trim).filter(|setting| !setting.is_empty()) {
            let (key, value) = setting
                .split_once('=')
                .ok_or_else(|| format!("`{setting}` has no value: write key=value,key=value"))?;
            let (key, value) = (key.trim(), value.trim());
            let time = || parse_duration(value).map_err(|error| format!("{key}: {error}"));
            match key {
                "join_timeout" | "timeout" => settings.join_timeout = time()?, // the static back end calls it `timeout`
                "last_call_timeout" => settings.last_call = time()?,
                "keep_alive_interval" => settings.beat_interval = time()?.max(Duration::from_millis(100)),
                "read_timeout" => settings.read_timeout = time()?,
                "keep_alive_max_attempt" => {
                    let bad = |_| format!("{key}: `{value}` is not a number of heartbeats");
                    settings.beats_missed_max = value.parse().map_err(bad)?;
                    if settings.beats_missed_max < 2 {
                        return Err(format!(
                            "{key}: {value} is too few; at least 2, so that a node may miss a heartbeat"
                        ));
                    }
                }
                "is_host" => settings.is_host = Some(parse_truth(key, value)?),
                _ if KEYS.contains(&key) => {} // not needed here: nothing takes so long or can collide
                _ => {
                    let near =
                        nearest(key, &KEYS).map_or(String::new(), |near| format!("; did you mean `{near}`?"));
                    return Err(format!("unknown setting `{key}`{near}"));
                }
            }
        }
        Ok(settings)
    }
}

/// Parsed as in torchrun.
fn parse_truth(key: &str, value: &str) -> Result<bool, String> {
    match value.to_ascii_lowercase().as_str() {
        "1" | "true" | "t" | "yes" | "y" => Ok(true),
        "0" | "false" | "f" | "no" | "n" => Ok(false),
        _ => Err(format!("{key}: `{value}` is neither true nor false")),
    }
}

/// The word that `typed` was probably meant to be.
pub(crate) fn nearest<'a>(typed: &str, known: &[&'a str]) -> Option<&'a str> {
    let distances = known.iter().map(|&word| (strsim::levenshtein(typed, word), word));
    let (distance, word) = distances.min_by_key(|&(distance, _)| distance)?;
    (distance <= word.len() / 3).then_some(word)
}

/// The address at which nodes find each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Endpoint {
    pub(crate) host: String,
    pub(crate) port: u16,
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_v6 = self.host.contains(':');
        if is_v6 {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

impl Endpoint {
    /// `host`, `host:7`, `10.0.0.1:7`, `[::1]:7`; torchrun also accepts an IPv6 address without a port.
    pub(crate) fn parse(text: &str, default_port: u16) -> Result<Endpoint, String> {
        let text = text.trim();
        let bad =
            || format!("invalid endpoint `{text}`: expected HOST or HOST:PORT, and [ADDRESS]:PORT for IPv6");
        let (host, port) = match text.strip_prefix('[') {
            Some(rest) => {
                let (host, rest) = rest.split_once(']').ok_or_else(bad)?;
                (host, rest.strip_prefix(':').or(rest.is_empty().then_some("")).ok_or_else(bad)?)
            }
            None if text.matches(':').count() > 1 => (text, ""),
            None => text.split_once(':').unwrap_or((text, "")),
        };
        let port = if port.is_empty() { default_port } else { port.parse().map_err(|_| bad())? };
        let is_host =
            !host.is_empty() && !host.contains(|letter: char| letter.is_whitespace() || letter == '/');
        if is_host { Ok(Endpoint { host: host.into(), port }) } else { Err(bad()) }
    }
}

pub(super) fn parse_signals(text: &str) -> Result<Vec<i32>, String> {
    let known = || (1..32).filter_map(|number| Some((number, signal_hook::low_level::signal_name(number)?)));
    let mut signals = Vec::new();
    for name in text.split(',').map(str::trim).filter(|name| !name.is_empty()) {
        let found = known().find(|(_, known)| *known == name).ok_or_else(|| {
            let names: Vec<&str> = known().map(|(_, name)| name).collect();
            let near =
                nearest(name, &names).map_or(String::new(), |near| format!("; did you mean `{near}`?"));
            format!("--signals-to-handle: unknown signal `{name}`{near}")
        })?;
        if signal_hook::consts::FORBIDDEN.contains(&found.0) {
            return Err(format!("--signals-to-handle: {name} cannot be handled"));
        }
        if !signals.contains(&found.0) {
            signals.push(found.0);
        }
    }
    Ok(signals)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_read_as_torchrun_writes_them() {
        let settings: Settings =
            "join_timeout=10, last_call_timeout=2,is_host=True,keep_alive_max_attempt=2".parse().unwrap();
        let expected = Settings {
            join_timeout: Duration::from_secs(10),
            last_call: Duration::from_secs(2),
            beats_missed_max: 2,
            is_host: Some(true),
            ..Settings::default()
        };
        assert_eq!(settings, expected);
        assert_eq!("close_timeout=3".parse(), Ok(Settings::default()));
        let bad = |text: &str| text.parse::<Settings>().unwrap_err();
        assert_eq!(bad("is_host=maybe"), "is_host: `maybe` is neither true nor false");
        assert_eq!(bad("join_timeout"), "`join_timeout` has no value: write key=value,key=value");
        assert_eq!(
            bad("keep_alive_max_attempt=1"),
            "keep_alive_max_attempt: 1 is too few; at least 2, so that a node may miss a heartbeat"
        );
        assert_eq!(bad("nothing_like_it=1"), "unknown setting `nothing_like_it`");
    }

    #[test]
    fn endpoints_have_a_host_and_a_port() {
        let parse = |text| Endpoint::parse(text, 7);
        let endpoint = |host: &str, port| Endpoint { host: host.into(), port };
        assert_eq!(parse("host"), Ok(endpoint("host", 7)));
        assert_eq!(parse("host:8"), Ok(endpoint("host", 8)));
        assert_eq!(parse("10.0.0.1:0"), Ok(endpoint("10.0.0.1", 0)));
        assert_eq!(parse("[::1]"), Ok(endpoint("::1", 7)));
        assert_eq!(parse("[::1]:9"), Ok(endpoint("::1", 9)));
        assert_eq!(parse("fe80::1"), Ok(endpoint("fe80::1", 7)));
        for bad in ["", ":8", "host:x", "host:70000", "[::1", "[::1]9", "http://host", "a b"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
        assert_eq!(endpoint("::1", 9).to_string(), "[::1]:9");
    }
}
