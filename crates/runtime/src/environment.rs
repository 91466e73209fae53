//! What users choose by environment variables; the only file of this crate that reads them.
//!
//! An invalid value is an error that says which values are valid: a run that silently ignores its settings is worse than one
//! that does not start. An empty value counts as not set.

use std::ffi::OsString;
use std::fmt;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use crate::debug::Level;
use crate::fault::Fault;
use crate::group::StuckPolicy;
use crate::group::from_environment::{Meeting, Place};
use crate::recorder;
use tenfold_plan::Rank;

/// An environment variable and what it is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct KnownVariable {
    /// The first that is set counts.
    pub names: &'static [&'static str],
    /// What it may be set to, and what holds if it is not.
    pub values: &'static str,
    /// What it is for.
    pub meaning: &'static str,
}

/// Every variable that a rank reads for its settings; its place in the world is not among them. `tenfold environment` prints it.
pub const VARIABLES: &[KnownVariable] = &[
    known(
        &["TENFOLD_TRANSPORT"],
        "auto (default), shm, tcp",
        "what carries messages within a host: shared memory where possible, shared memory or an error, TCP",
    ),
    known(
        &["TENFOLD_INTERFACE", "GLOO_SOCKET_IFNAME"],
        "eth0 · eth0,ib0 · =eth0 · ^lo,docker (default: the route to the store)",
        "the network interface by which other hosts reach this one, or several that share the messages out; `=` for exactly \
         these names, `^` for all but these",
    ),
    known(&["TENFOLD_PORT_RANGE"], "20000-20100 (default: any free port)", "ports to listen on"),
    known(
        &["TENFOLD_ALGORITHM"],
        "all_reduce:ring,broadcast:binomial (default: by size and topology)",
        "algorithms to insist on where they can be used",
    ),
    known(
        &["TENFOLD_HEARTBEAT"],
        "seconds (default: 15)",
        "how long a rank may show no sign of life (stopped, frozen or cut off) before the others give it up",
    ),
    known(
        &["TENFOLD_STUCK_AFTER"],
        "seconds (default: 30; 0: never)",
        "how long a rank that lives may keep others waiting before they name it",
    ),
    known(
        &["TENFOLD_STUCK_POLICY"],
        "warn (default), dump, abort",
        "what they do then: say so; write their flight recorders, too; end the group, too",
    ),
    known(
        &["TENFOLD_WORKER_SERVER"],
        "/tmp/rank-{rank}.sock · 127.0.0.1:0 (default: none)",
        "where this rank can be asked what it does, see `tenfold worker`",
    ),
    known(
        &["TENFOLD_PROGRESS"],
        "a folder",
        "set by `tenfold run`: where this rank tells how far it is in each group",
    ),
    known(
        &["TENFOLD_STORE"],
        "10.0.0.1:29500",
        "set by `tenfold run` for ranks that use a relay: the address of the store itself",
    ),
    known(
        &["TENFOLD_ON_FAILURE"],
        "restart (default), recover",
        "set by `tenfold run`: whether it starts processes in place of ranks that die",
    ),
    known(
        &["TENFOLD_JOINING"],
        "a name",
        "set by `tenfold run` for a process that it starts in place of a rank that died, or as a spare",
    ),
    known(
        &["TORCH_DISTRIBUTED_DEBUG"],
        "OFF (default), INFO, DETAIL",
        "how much is reported: DETAIL puts shapes and call sites of all ranks into errors",
    ),
    known(&["TORCH_DIST_NAN_CHECK"], "0 (default), 1", "refuse tensors with a NaN in them"),
    known(
        &["TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"],
        "operations (default: 2000; 0: off)",
        "how many operations the flight recorder remembers",
    ),
    known(
        &["TENFOLD_FR_DUMP_TEMP_FILE", "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"],
        "how a path begins (default: ~/.cache/torch/comm_lib_trace_rank_)",
        "where its dumps go; the rank follows",
    ),
    known(&["TORCH_FR_DUMP_DYNAMIC_FILE_NAME"], "0 (default), 1", "look that path up again at each dump"),
    known(
        &["TORCH_FR_DUMP_ON_TIMEOUT", "TORCH_NCCL_DUMP_ON_TIMEOUT"],
        "0, 1 (default)",
        "leave a dump when a group fails",
    ),
    known(
        &["TORCH_FR_WAIT_TIMEOUT_DUMP_MILSEC", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"],
        "milliseconds (default: 15000)",
        "how long the end of a process waits for that dump",
    ),
    known(
        &["TENFOLD_FR_STACK", "TORCH_FR_CPP_STACK", "TORCH_NCCL_TRACE_CPP_STACK"],
        "0 (default), 1",
        "note where each call comes from",
    ),
    known(&["TORCH_INCLUDE_STACK_TRACE"], "0, 1 (default)", "dumps have call sites in them"),
    known(&["TORCH_INCLUDE_ONLY_ACTIVE"], "0 (default), 1", "dumps have only operations that are not over"),
    known(
        &["TENFOLD_FR_SIGNAL"],
        "SIGUSR1, SIGUSR2, SIGHUP, SIGQUIT (default: none)",
        "a signal that asks for a dump",
    ),
];

const fn known(names: &'static [&'static str], values: &'static str, meaning: &'static str) -> KnownVariable {
    KnownVariable { names, values, meaning }
}

/// Every setting, as read once at the start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Environment {
    /// `TENFOLD_INTERFACE`, or else `GLOO_SOCKET_IFNAME`.
    pub interfaces: Option<Interfaces>,
    /// `TENFOLD_PORT_RANGE`: where to listen; nothing leaves it to the system.
    pub ports: Option<RangeInclusive<u16>>,
    /// `TENFOLD_TRANSPORT`.
    pub transport: TransportChoice,
    /// `TENFOLD_ALGORITHM`: pairs of an operation and the algorithm to run it with. Which there are, the caller knows.
    pub algorithms: Vec<(String, String)>,
    /// `TENFOLD_HEARTBEAT`: how long a rank may show no sign of life.
    pub heartbeat: Option<Duration>,
    /// `TENFOLD_STUCK_AFTER`: how long a rank may keep others waiting before they say so; zero means without limit.
    pub stuck_after: Option<Duration>,
    /// `TENFOLD_STUCK_POLICY`: what they do then.
    pub on_stuck: Option<StuckPolicy>,
    /// `TENFOLD_PROGRESS`: a folder in which the launcher wants to read how far this rank is.
    pub progress: Option<PathBuf>,
    /// `TENFOLD_STORE`: the address of the store itself, if this rank reaches it through a relay on this host.
    pub store: Option<SocketAddr>,
    /// `TENFOLD_ON_FAILURE`: does the launcher start processes in place of ranks that die?
    pub recovers: bool,
    /// `TENFOLD_JOINING`: what the launcher calls this process, if it was started after the others.
    pub joining: Option<String>,
    /// `TENFOLD_WORKER_SERVER`: where this process is to be asked what it does.
    pub worker_server: Option<String>,
    /// c10d's `TORCH_FR_…`: what is recorded, and where dumps go.
    pub recorder: recorder::Settings,
}

/// By what messages may go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum TransportChoice {
    /// Shared memory within a host, TCP between hosts.
    #[default]
    Auto,
    /// Shared memory or not at all.
    SharedMemory,
    /// TCP even within a host.
    Tcp,
}

/// Which network interfaces may be used, and the words of the user who said so.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Interfaces {
    /// `TENFOLD_INTERFACE=eth0`, for messages.
    pub said: String,
    pub rule: Rule,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Rule {
    /// Those of these that there are.
    Only(Vec<Name>),
    /// None of these.
    Except(Vec<Name>),
}

/// The name of an interface, or how it begins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Name {
    pub text: String,
    pub exact: bool,
}

impl Name {
    /// As NCCL has it: `eth` means `eth0` and `eth1` too.
    pub(crate) fn matches(&self, interface: &str) -> bool {
        if self.exact { interface == self.text } else { interface.starts_with(&self.text) }
    }
}

impl Environment {
    pub(crate) fn read() -> Result<Environment, Fault> {
        if variable("TORCH_DISTRIBUTED_DEBUG")?.is_some() {
            debug_level()?;
        }
        nan_check()?;
        Environment::parse(|name| std::env::var_os(name))
    }

    fn parse(look_up: impl Fn(&str) -> Option<OsString>) -> Result<Environment, Fault> {
        let look_up = |name: &'static str| Variable::of(name, look_up(name).unwrap_or_default());
        let interfaces = match look_up("TENFOLD_INTERFACE")? {
            None => look_up("GLOO_SOCKET_IFNAME")?,
            chosen => chosen,
        };
        Ok(Environment {
            interfaces: interfaces.map(|variable| variable.interfaces()).transpose()?,
            ports: look_up("TENFOLD_PORT_RANGE")?.map(|variable| variable.ports()).transpose()?,
            transport: look_up("TENFOLD_TRANSPORT")?
                .map_or(Ok(TransportChoice::Auto), |it| it.transport())?,
            algorithms: look_up("TENFOLD_ALGORITHM")?.map_or(Ok(Vec::new()), |it| it.algorithms())?,
            heartbeat: look_up("TENFOLD_HEARTBEAT")?
                .map(|variable| variable.positive_seconds())
                .transpose()?,
            stuck_after: look_up("TENFOLD_STUCK_AFTER")?.map(|variable| variable.seconds()).transpose()?,
            on_stuck: look_up("TENFOLD_STUCK_POLICY")?.map(|variable| variable.stuck_policy()).transpose()?,
            progress: look_up("TENFOLD_PROGRESS")?.map(|variable| variable.value.into()),
            store: look_up("TENFOLD_STORE")?.map(|variable| variable.address()).transpose()?,
            recovers: look_up("TENFOLD_ON_FAILURE")?.map_or(Ok(false), |variable| variable.recovers())?,
            joining: look_up("TENFOLD_JOINING")?.map(|variable| variable.value),
            worker_server: look_up("TENFOLD_WORKER_SERVER")?.map(|variable| variable.value),
            recorder: recorder::Settings::parse(&look_up)?,
        })
    }
}

/// What a launcher tells this process.
pub(crate) fn place() -> Result<Place, Fault> {
    read_place(|name| std::env::var_os(name))
}

fn read_place(look_up: impl Fn(&str) -> Option<OsString>) -> Result<Place, Fault> {
    const NEEDED: [&str; 4] = ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"];
    let look_up = |name: &'static str| Variable::of(name, look_up(name).unwrap_or_default());
    let [rank, size, host, port] = NEEDED.map(look_up);
    let (Some(rank), Some(size), Some(host), Some(port)) = (rank?, size?, host?, port?) else {
        let missing: Vec<&str> =
            NEEDED.into_iter().filter(|name| matches!(look_up(name), Ok(None))).collect();
        let are = if missing.len() == 1 { "is" } else { "are" };
        let message = format!("{} {are} not set in the environment", missing.join(", "));
        return Err(Fault::argument(message).hint("start it with `tenfold run -n 2 …`, which sets them"));
    };
    let (number, ranks) = (rank.number()?, size.number()?);
    if ranks == 0 || u32::try_from(ranks).is_err() {
        return Err(size.wrong("is not a number of ranks", "say how many processes there are, 1 or more"));
    }
    if number >= ranks {
        return Err(rank.wrong(&format!("is not a rank with `{size}`"), "ranks are counted from 0"));
    }
    let local_rank = look_up("LOCAL_RANK")?.map(|variable| variable.number()).transpose()?;
    Ok(Place { rank: number, size: ranks, local_rank, meeting: meeting(look_up, host, &port)? })
}

fn meeting(
    look_up: impl Fn(&'static str) -> Result<Option<Variable>, Fault>,
    host: Variable,
    port: &Variable,
) -> Result<Meeting, Fault> {
    // As PyTorch reads it, to the letter.
    let is_of_launcher = look_up("TORCHELASTIC_USE_AGENT_STORE")?.is_some_and(|it| it.value == "True");
    let round = || look_up("TORCHELASTIC_RESTART_COUNT")?.map_or(Ok(0), |variable| variable.number());
    Ok(Meeting {
        host: host.value,
        port: port.port()?,
        round: if is_of_launcher { Some(round()?) } else { None },
    })
}

/// The place of a process that was started later: `RANK` and `LOCAL_RANK`, unless it is a spare, and where it asks.
pub(crate) fn place_of_joiner() -> Result<(Option<Rank>, Option<Rank>, Meeting), Fault> {
    let number = |name| variable(name)?.map(|variable: Variable| variable.number()).transpose();
    let (rank, local_rank) = (number("RANK")?, number("LOCAL_RANK")?);
    let (Some(host), Some(port)) = (variable("MASTER_ADDR")?, variable("MASTER_PORT")?) else {
        let message = "MASTER_ADDR or MASTER_PORT is not set in the environment";
        return Err(
            Fault::argument(message).hint("only `tenfold run` sets TENFOLD_JOINING, and these with it")
        );
    };
    Ok((rank, local_rank, meeting(variable, host, &port)?))
}

/// The recorder's settings alone: it starts before the other settings are read.
pub(crate) fn recorder_settings() -> Result<recorder::Settings, Fault> {
    recorder::Settings::parse(&variable)
}

/// Where the launcher looks.
pub(crate) fn progress_folder() -> Option<PathBuf> {
    variable("TENFOLD_PROGRESS").ok()?.map(|variable| variable.value.into())
}

/// Where dumps go now.
pub(crate) fn recorder_prefix() -> Result<PathBuf, Fault> {
    recorder::Settings::prefix(&variable)
}

/// `TORCH_DISTRIBUTED_DEBUG`, read as c10d reads it: there an empty value is a wrong one.
pub(crate) fn debug_level() -> Result<Level, Fault> {
    Level::parse(std::env::var_os("TORCH_DISTRIBUTED_DEBUG").as_deref())
}

/// c10d's `TORCH_DIST_NAN_CHECK`: are tensors with a NaN in them refused?
pub(crate) fn nan_check() -> Result<bool, Fault> {
    variable("TORCH_DIST_NAN_CHECK")?.map_or(Ok(false), |variable| variable.truth())
}

fn variable(name: &'static str) -> Result<Option<Variable>, Fault> {
    Variable::of(name, std::env::var_os(name).unwrap_or_default())
}

/// A variable that is set, shown as one would set it.
#[derive(Debug)]
pub(crate) struct Variable {
    name: &'static str,
    pub(crate) value: String,
}

impl fmt::Display for Variable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.name, self.value)
    }
}

impl Variable {
    /// Nothing if the value is empty.
    pub(crate) fn of(name: &'static str, value: OsString) -> Result<Option<Variable>, Fault> {
        let value = value
            .into_string()
            .map_err(|value| Fault::argument(format!("`{name}={}` is not text", value.to_string_lossy())))?;
        let value = value.trim().to_string();
        Ok((!value.is_empty()).then_some(Variable { name, value }))
    }

    #[cold]
    fn wrong(&self, what: &str, hint: &str) -> Fault {
        Fault::argument(format!("`{self}` {what}")).hint(hint)
    }

    fn recovers(&self) -> Result<bool, Fault> {
        match &*self.value {
            "recover" => Ok(true),
            "restart" => Ok(false),
            _ => Err(self.wrong("is not an answer to failures", "`tenfold run` sets it: recover or restart")),
        }
    }

    fn address(&self) -> Result<SocketAddr, Fault> {
        let hint = "write an address and a port, such as 10.0.0.1:29500 or [fd00::1]:29500";
        self.value.parse().map_err(|_| self.wrong("is not an address with a port", hint))
    }

    fn interfaces(&self) -> Result<Interfaces, Fault> {
        let (is_exclusion, rest) = match self.value.strip_prefix('^') {
            Some(rest) => (true, rest),
            None => (false, &self.value[..]),
        };
        let (exact, rest) = match rest.strip_prefix('=') {
            Some(rest) => (true, rest),
            None => (false, rest),
        };
        let names = rest.split(',').map(|name| Name { text: name.trim().to_string(), exact });
        let names: Vec<Name> = names.filter(|name| !name.text.is_empty()).collect();
        if names.is_empty() {
            return Err(self.wrong(
                "names no interface",
                "say `eth0`, `eth0,eth1`, `=eth0` for exactly that one, or `^lo,docker` for all but those",
            ));
        }
        let rule = if is_exclusion { Rule::Except(names) } else { Rule::Only(names) };
        Ok(Interfaces { said: self.to_string(), rule })
    }

    fn ports(&self) -> Result<RangeInclusive<u16>, Fault> {
        let (first, last) = self.value.split_once('-').unwrap_or((&self.value, &self.value));
        match (first.trim().parse::<u16>(), last.trim().parse::<u16>()) {
            (Ok(first), Ok(last)) if 0 < first && first <= last => Ok(first..=last),
            _ => Err(self.wrong(
                "is not a range of ports",
                "say the first and the last, as in `20000-20100`, both from 1 to 65535",
            )),
        }
    }

    fn port(&self) -> Result<u16, Fault> {
        let port = self.value.parse().ok().filter(|port| *port > 0);
        port.ok_or_else(|| self.wrong("is not a port", "say a number from 1 to 65535"))
    }

    /// What c10d takes for yes and no.
    pub(crate) fn truth(&self) -> Result<bool, Fault> {
        match &self.value.to_lowercase()[..] {
            "1" | "y" | "yes" | "t" | "true" | "on" => Ok(true),
            "0" | "n" | "no" | "f" | "false" | "off" => Ok(false),
            _ => Err(self.wrong("is neither yes nor no", "say `1` or `0`")),
        }
    }

    pub(crate) fn number(&self) -> Result<usize, Fault> {
        self.value.parse().map_err(|_| self.wrong("is not a number", "say a number, 0 or more"))
    }

    fn seconds(&self) -> Result<Duration, Fault> {
        let wrong =
            || self.wrong("is not a time", "say seconds, as in `40` or `2.5`; `0` means without limit");
        self.duration().ok_or_else(wrong)
    }

    fn positive_seconds(&self) -> Result<Duration, Fault> {
        let hint = "set a number of seconds greater than 0, such as `15` or `2.5`";
        self.duration().filter(|time| !time.is_zero()).ok_or_else(|| self.wrong("is not a valid time", hint))
    }

    fn duration(&self) -> Option<Duration> {
        let text = self.value.trim();
        let seconds: f64 = text.strip_suffix('s').unwrap_or(text).trim().parse().ok()?;
        Duration::try_from_secs_f64(seconds).ok()
    }

    fn stuck_policy(&self) -> Result<StuckPolicy, Fault> {
        let known = StuckPolicy::from_name(&self.value.to_lowercase());
        known.ok_or_else(|| self.wrong("is not a policy", "say `warn`, `dump` or `abort`"))
    }

    /// A signal that nothing else needs.
    pub(crate) fn signal(&self) -> Result<i32, Fault> {
        let name = self.value.to_uppercase();
        let signal = match name.strip_prefix("SIG").unwrap_or(&name) {
            "USR1" => rustix::process::Signal::USR1,
            "USR2" => rustix::process::Signal::USR2,
            "HUP" => rustix::process::Signal::HUP,
            "QUIT" => rustix::process::Signal::QUIT,
            _ => {
                let hint = "say `SIGUSR1`, `SIGUSR2`, `SIGHUP` or `SIGQUIT`";
                return Err(self.wrong("is not a signal that can be asked for", hint));
            }
        };
        Ok(signal.as_raw())
    }

    fn transport(&self) -> Result<TransportChoice, Fault> {
        match &self.value[..] {
            "auto" => Ok(TransportChoice::Auto),
            "shm" => Ok(TransportChoice::SharedMemory),
            "tcp" => Ok(TransportChoice::Tcp),
            _ => Err(self.wrong("is not a transport", "say `auto`, `shm` or `tcp`")),
        }
    }

    fn algorithms(&self) -> Result<Vec<(String, String)>, Fault> {
        let wrong = || {
            let hint = "say an operation and an algorithm, as in `all_reduce:ring,broadcast:tree`";
            self.wrong("is not a list of algorithms", hint)
        };
        let pair = |pair: &str| {
            let (operation, algorithm) = pair.split_once(':').ok_or_else(wrong)?;
            let (operation, algorithm) = (operation.trim(), algorithm.trim());
            let is_whole = !operation.is_empty() && !algorithm.is_empty() && !algorithm.contains(':');
            is_whole.then(|| (operation.to_string(), algorithm.to_string())).ok_or_else(wrong)
        };
        self.value.split(',').map(pair).collect()
    }
}

#[cfg(test)]
mod tests;
