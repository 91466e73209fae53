//! torchrun's flags under both of their spellings, and what they mean together.
//!
//! [`Args`] is what was typed; [`Plan`] is what follows from it, or an error that says what to type instead. Nothing is
//! started or opened before there is a plan.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::ArgAction::SetTrue;
use clap::ValueEnum;
use clap::builder::FalseyValueParser;

use super::logs::{LogOptions, Selection, parse_ranks, parse_selection, parse_words};
use tenfold_console::parse_duration;
use tenfold_dashboard as dashboard;

/// Ports when none is given: torchrun's.
const STATIC_PORT: u16 = 29500;
pub(super) const ELASTIC_PORT: u16 = 29400;
/// torchrun says the same, so that jobs without a name meet.
const NO_RUN_ID: &str = "none";
/// Ranks of one node; a limit on typing errors.
const RANKS_MAX: usize = 1024;
use super::rendezvous::NODES_MAX;
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(10);

/// Starts the ranks of a program on this machine, or on several that meet, as torchrun does.
///
/// Every rank finds torchrun's variables in its environment (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, …)
/// and a store at MASTER_ADDR:MASTER_PORT, which a launcher hosts. PYTHONUNBUFFERED and, with several ranks,
/// OMP_NUM_THREADS and RAYON_NUM_THREADS are 1 unless they are set. What ranks write passes through line by line behind
/// `[rank]`; they read nothing from standard input, but for a rank that is alone in its job, unless it is a terminal.
///
/// The first rank that fails ends the others: SIGTERM, and SIGKILL for those that are still there after the shutdown
/// timeout. Ctrl-C and SIGTERM are passed on to the ranks once; a second one kills them. Processes that ranks started and
/// left behind end with the run, also if the launcher is killed.
///
/// The exit code is torchrun's: 0 if all ranks ended well, 1 if not, 2 for wrong usage.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  tenfold run -n 4 train.py --epochs 3         a Python program, under the python3 on PATH
  tenfold run -n 2 --python .venv/bin/python train.py
  tenfold run -n 2 -- ./simulation --steps 10  any other program
  tenfold run -n 2 sh -c 'echo $RANK of $WORLD_SIZE at $MASTER_ADDR:$MASTER_PORT'
  # on each of 2 to 4 machines; the one that has the address hosts the store:
  tenfold run --nnodes 2:4 -n 8 --rdzv-backend c10d --rdzv-endpoint 10.0.0.1:29400 train.py
  # on two machines with ranks that are given:
  tenfold run --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 -n 8 train.py
  tenfold run --nnodes 2 --node-rank 1 --master-addr 10.0.0.1 -n 8 train.py

Options are also read from the environment, as torchrun does: PET_NPROC_PER_NODE=4.
Each can be written with `_` for `-` too: --nproc_per_node.")]
pub struct Args {
    /// Ranks to start on this node: a number, `cpu` (one for each processor that this process may use), `gpu` (one for
    /// each NVIDIA device), or `auto` (gpu if there are any, else cpu)
    #[arg(short = 'n', long, alias = "nproc_per_node", value_name = "N|auto|cpu|gpu", default_value = "1")]
    #[arg(env = "PET_NPROC_PER_NODE", hide_env = true)]
    nproc_per_node: String,
    /// Nodes, each with a `tenfold run` of its own: a number, or a range
    #[arg(long, value_name = "N|MIN:MAX", default_value = "1", env = "PET_NNODES", hide_env = true)]
    nnodes: Nodes,
    /// How often the ranks may be started again after a failure, counted for the whole job
    #[arg(long, alias = "max_restarts", value_name = "COUNT", default_value_t = 0)]
    #[arg(env = "PET_MAX_RESTARTS", hide_env = true)]
    max_restarts: u64,
    /// From asking ranks to end to killing them [default: $TORCH_ELASTIC_SHUTDOWN_TIMEOUT, else 10s]
    #[arg(long, alias = "shutdown_timeout", value_name = "TIME", value_parser = parse_duration)]
    #[arg(env = "PET_SHUTDOWN_TIMEOUT", hide_env = true)]
    shutdown_timeout: Option<Duration>,
    /// Signals that are passed on to the ranks and end the run; others keep their default action, but for SIGUSR1 and
    /// SIGUSR2, which are passed on to ranks that catch them and end nothing. What is ignored when tenfold is started, as by
    /// nohup or in the background of a script, stays ignored
    #[arg(
        long,
        alias = "signals_to_handle",
        value_name = "NAMES",
        default_value = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    )]
    #[arg(env = "PET_SIGNALS_TO_HANDLE", hide_env = true)]
    signals_to_handle: String,
    /// Role of this node's ranks: ROLE_NAME, and what ROLE_RANK counts
    #[arg(long, value_name = "NAME", default_value = "default", env = "PET_ROLE", hide_env = true)]
    role: String,
    /// Keep each rank on some processors: those of a NUMA node, of a socket, a part of a node that no other rank has, or
    /// those that share an L3 cache. Nodes are dealt to local ranks in turn: which device a rank will use is not known
    #[arg(long, alias = "numa_binding", value_name = "MODE")]
    numa_binding: Option<Binding>,
    /// LOCAL_RANK is 0 for every rank, and CUDA_VISIBLE_DEVICES names its device alone
    #[arg(long, alias = "virtual_local_rank", action = SetTrue, value_parser = FalseyValueParser::new())]
    #[arg(env = "PET_VIRTUAL_LOCAL_RANK", hide_env = true)]
    virtual_local_rank: bool,

    /// The program is a Python module, as with `python -m`
    #[arg(short, long, action = SetTrue, value_parser = FalseyValueParser::new(), help_heading = "Program")]
    #[arg(env = "PET_MODULE", hide_env = true)]
    module: bool,
    /// Run the program as it is, also if it ends in .py
    #[arg(long, alias = "no_python", action = SetTrue, value_parser = FalseyValueParser::new(), help_heading = "Program")]
    #[arg(env = "PET_NO_PYTHON", hide_env = true)]
    no_python: bool,
    /// The program is a Python file, given by its absolute path, whatever its name ends in
    #[arg(long, alias = "run_path", action = SetTrue, value_parser = FalseyValueParser::new(), help_heading = "Program")]
    #[arg(env = "PET_RUN_PATH", hide_env = true)]
    run_path: bool,
    /// Python for such programs [default: the one that tenfold was installed with by pip, else $PYTHON_EXEC, else the
    /// first of python3 and python on PATH]
    #[arg(long, value_name = "PATH", help_heading = "Program")]
    python: Option<PathBuf>,

    /// How nodes meet: `static`, by the rank that each is given, or `c10d` (also `tenfold`), in the order in which they
    /// come
    #[arg(
        long,
        alias = "rdzv_backend",
        value_name = "NAME",
        default_value = "static",
        help_heading = "Nodes"
    )]
    #[arg(env = "PET_RDZV_BACKEND", hide_env = true)]
    rdzv_backend: String,
    /// Where nodes meet: the store's address [default port: 29400]. The node that can bind it hosts the store, unless a
    /// store answers there already
    #[arg(long, alias = "rdzv_endpoint", value_name = "HOST[:PORT]", help_heading = "Nodes")]
    #[arg(env = "PET_RDZV_ENDPOINT", hide_env = true, default_value = "", hide_default_value = true)]
    rdzv_endpoint: String,
    /// Name of the job; nodes with the same one meet
    #[arg(long, alias = "rdzv_id", value_name = "NAME", default_value = NO_RUN_ID, help_heading = "Nodes")]
    #[arg(env = "PET_RDZV_ID", hide_env = true)]
    rdzv_id: String,
    /// Further settings, in seconds where they are times: join_timeout=600, last_call_timeout=30,
    /// keep_alive_interval=5, keep_alive_max_attempt=3, read_timeout=60, is_host=true|false
    #[arg(long, alias = "rdzv_conf", value_name = "KEY=VALUE,…", help_heading = "Nodes")]
    #[arg(env = "PET_RDZV_CONF", hide_env = true, default_value = "", hide_default_value = true)]
    rdzv_conf: Settings,
    /// One node with a store on a free port, whatever else is said about nodes
    #[arg(long, action = SetTrue, value_parser = FalseyValueParser::new(), help_heading = "Nodes")]
    #[arg(env = "PET_STANDALONE", hide_env = true)]
    standalone: bool,
    /// Rank of this node (static); 0 by default, but needed if several nodes meet at --rdzv-endpoint
    #[arg(long, alias = "node_rank", value_name = "RANK", help_heading = "Nodes")]
    #[arg(env = "PET_NODE_RANK", hide_env = true)]
    node_rank: Option<usize>,
    /// Address of node 0, which hosts the store (static)
    #[arg(
        long,
        alias = "master_addr",
        value_name = "HOST",
        default_value = "127.0.0.1",
        help_heading = "Nodes"
    )]
    #[arg(env = "PET_MASTER_ADDR", hide_env = true)]
    master_addr: String,
    /// Port of the store on node 0 (static) [default: 29500]
    #[arg(long, alias = "master_port", value_name = "PORT", help_heading = "Nodes")]
    #[arg(env = "PET_MASTER_PORT", hide_env = true)]
    master_port: Option<u16>,
    /// Name or address by which other nodes reach this one [default: found out]
    #[arg(long, alias = "local_addr", value_name = "HOST", help_heading = "Nodes")]
    #[arg(env = "PET_LOCAL_ADDR", hide_env = true)]
    local_addr: Option<String>,
    /// Let processes of other users of this machine use a store that this launcher hosts on loopback
    #[arg(long, help_heading = "Nodes")]
    allow_other_users: bool,

    #[command(flatten)]
    output: OutputArgs,

    /// Show the store and the ranks on a web page [default address: a free port of 127.0.0.1]
    #[arg(long, value_name = "HOST:PORT", num_args = 0..=1, require_equals = true, help_heading = "Dashboard")]
    #[arg(default_missing_value = "127.0.0.1:0")]
    dashboard: Option<String>,
    /// Let the page show values of the store
    #[arg(long, alias = "dashboard_values", requires = "dashboard", help_heading = "Dashboard")]
    dashboard_values: bool,
    /// A further name by which browsers may ask for the page
    #[arg(
        long,
        alias = "dashboard_name",
        value_name = "NAME",
        requires = "dashboard",
        help_heading = "Dashboard"
    )]
    dashboard_name: Vec<String>,

    /// Let ranks that use tenfold be asked what they do, each by a socket in this folder, rank-N.sock: see `tenfold worker`
    /// [default folder: a temporary one]
    #[arg(long, alias = "worker_server", value_name = "FOLDER", num_args = 0..=1, require_equals = true)]
    #[arg(default_missing_value = "", help_heading = "Debugging")]
    worker_server: Option<String>,

    /// Has no effect: ends are noticed when they happen
    #[arg(
        long,
        alias = "monitor_interval",
        value_name = "SECONDS",
        help_heading = "Accepted for torchrun's sake"
    )]
    #[arg(env = "PET_MONITOR_INTERVAL", hide_env = true)]
    monitor_interval: Option<f64>,
    /// Has no effect: ranks are programs of their own
    #[arg(
        long,
        alias = "start_method",
        value_name = "METHOD",
        help_heading = "Accepted for torchrun's sake"
    )]
    #[arg(env = "PET_START_METHOD", hide_env = true)]
    start_method: Option<StartMethod>,
    /// Has no effect, with a warning: handlers of torchrun are Python code
    #[arg(
        long,
        alias = "event_log_handler",
        value_name = "NAME",
        help_heading = "Accepted for torchrun's sake"
    )]
    #[arg(env = "PET_EVENT_LOG_HANDLER", hide_env = true)]
    event_log_handler: Option<String>,
    /// Has no effect, with a warning: log specs of torchrun are Python code
    #[arg(long, alias = "logs_specs", value_name = "NAME", help_heading = "Accepted for torchrun's sake")]
    logs_specs: Option<String>,
    #[arg(long, alias = "print_completion", value_name = "SHELL", hide = true, exclusive = true)]
    print_completion: Option<String>,

    /// Program and its arguments
    #[arg(required_unless_present = "print_completion", trailing_var_arg = true, value_name = "PROGRAM")]
    #[arg(help_heading = "Arguments")]
    program: Vec<OsString>,
}

/// Where what ranks write goes.
#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Output")]
struct OutputArgs {
    /// Folder for log files; each run makes a folder of its own in it [default: a temporary one if files are wanted].
    /// Without -r and -t both streams of all ranks go to files and are shown here too
    #[arg(long, alias = "log_dir", value_name = "FOLDER", env = "PET_LOG_DIR", hide_env = true)]
    log_dir: Option<PathBuf>,
    /// Streams that go to log files instead of here: 1 standard output, 2 standard error, 3 both; or for some local ranks:
    /// 0:1,1:3
    #[arg(short, long, value_name = "STREAMS", value_parser = parse_selection, env = "PET_REDIRECTS", hide_env = true)]
    redirects: Option<Selection>,
    /// Streams that go to log files as well as here, written as for --redirects
    #[arg(short, long, value_name = "STREAMS", value_parser = parse_selection, env = "PET_TEE", hide_env = true)]
    tee: Option<Selection>,
    /// Local ranks whose output is shown here: 0,1
    #[arg(long, alias = "local_ranks_filter", value_name = "RANKS", value_parser = parse_ranks)]
    #[arg(env = "PET_LOCAL_RANKS_FILTER", hide_env = true)]
    local_ranks_filter: Option<BTreeSet<usize>>,
    /// What stands before each line, with ${rank}, ${local_rank}, ${role_name} and ${hostname} filled in
    #[arg(long, alias = "log_line_prefix_template", value_name = "TEXT")]
    #[arg(env = "PET_LOG_LINE_PREFIX_TEMPLATE", hide_env = true)]
    log_line_prefix_template: Option<String>,
    /// Lines of standard output that hold one of these words also go to a file of their own; a comma is written twice
    #[arg(
        long,
        alias = "duplicate_stdout_filters",
        value_name = "WORDS",
        default_value = "",
        hide_default_value = true
    )]
    #[arg(env = "PET_DUPLICATE_STDOUT_FILTERS", hide_env = true)]
    duplicate_stdout_filters: String,
    /// The same for standard error
    #[arg(
        long,
        alias = "duplicate_stderr_filters",
        value_name = "WORDS",
        default_value = "",
        hide_default_value = true
    )]
    #[arg(env = "PET_DUPLICATE_STDERR_FILTERS", hide_env = true)]
    duplicate_stderr_filters: String,
}

impl OutputArgs {
    fn options(&self) -> LogOptions {
        LogOptions {
            folder: self.log_dir.clone(),
            redirects: self.redirects.clone(),
            tee: self.tee.clone(),
            shown: self.local_ranks_filter.clone(),
            output_words: parse_words(&self.duplicate_stdout_filters),
            error_words: parse_words(&self.duplicate_stderr_filters),
        }
    }

    fn template(&self) -> Option<String> {
        let inherited = || std::env::var("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE").ok();
        self.log_line_prefix_template.clone().or_else(inherited).filter(|template| !template.is_empty())
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Binding {
    Node,
    Socket,
    Exclusive,
    CoreComplex,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum StartMethod {
    Spawn,
    Fork,
    Forkserver,
}

/// `2`, or `1:4`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Nodes {
    pub(super) min: usize,
    pub(super) max: usize,
}

impl FromStr for Nodes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (min, max) = text.split_once(':').unwrap_or((text, text));
        let bad =
            || format!("write a number of nodes such as 2, or a range such as 1:4 (at most {NODES_MAX})");
        let number = |text: &str| text.trim().parse::<usize>().map_err(|_| bad());
        let nodes = Nodes { min: number(min)?, max: number(max)? };
        let is_range = 1 <= nodes.min && nodes.min <= nodes.max && nodes.max <= NODES_MAX;
        if is_range { Ok(nodes) } else { Err(bad()) }
    }
}

/// What `--rdzv-conf` says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Settings {
    /// For enough nodes to come.
    pub(super) join_timeout: Duration,
    /// From enough nodes to the start without more.
    pub(super) last_call: Duration,
    pub(super) beat_interval: Duration,
    pub(super) beats_missed_max: u32,
    /// One operation on the store.
    pub(super) read_timeout: Duration,
    /// Whether this node hosts the store; found out if not said.
    pub(super) is_host: Option<bool>,
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

/// The keys of `--rdzv-conf`; some mean nothing here but are in people's scripts.
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
                "join_timeout" | "timeout" => settings.join_timeout = time()?, // `timeout` is what static calls it
                "last_call_timeout" => settings.last_call = time()?,
                "keep_alive_interval" => settings.beat_interval = time()?.max(Duration::from_millis(100)),
                "read_timeout" => settings.read_timeout = time()?,
                "keep_alive_max_attempt" => {
                    let bad = |_| format!("{key}: `{value}` is no number of beats");
                    settings.beats_missed_max = value.parse().map_err(bad)?;
                    if settings.beats_missed_max < 2 {
                        return Err(format!(
                            "{key}: {value} is too few: a node must be allowed to be late with a beat, so 2 or more"
                        ));
                    }
                }
                "is_host" => settings.is_host = Some(parse_truth(key, value)?),
                _ if KEYS.contains(&key) => {} // nothing here takes so long, or can collide
                _ => {
                    let near = nearest(key, &KEYS).map_or(String::new(), |near| format!("; is it `{near}`?"));
                    return Err(format!("there is no setting `{key}`{near}"));
                }
            }
        }
        Ok(settings)
    }
}

/// As torchrun reads it.
fn parse_truth(key: &str, value: &str) -> Result<bool, String> {
    match value.to_ascii_lowercase().as_str() {
        "1" | "true" | "t" | "yes" | "y" => Ok(true),
        "0" | "false" | "f" | "no" | "n" => Ok(false),
        _ => Err(format!("{key}: `{value}` is neither true nor false")),
    }
}

/// The word that `typed` was probably meant to be.
pub(super) fn nearest<'a>(typed: &str, known: &[&'a str]) -> Option<&'a str> {
    let distances = known.iter().map(|&word| (distance(typed, word), word));
    let (distance, word) = distances.min_by_key(|&(distance, _)| distance)?;
    (distance <= word.len() / 3).then_some(word)
}

/// Letters to insert, remove or replace.
fn distance(left: &str, right: &str) -> usize {
    let right: Vec<char> = right.chars().collect();
    let mut row: Vec<usize> = (0..=right.len()).collect();
    for (line, letter) in left.chars().take(100).enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], line + 1);
        for (column, other) in right.iter().enumerate() {
            let replaced = diagonal + usize::from(letter != *other);
            diagonal = row[column + 1];
            row[column + 1] = replaced.min(row[column] + 1).min(diagonal + 1);
        }
    }
    row[right.len()]
}

/// Where nodes meet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Endpoint {
    pub(super) host: String,
    pub(super) port: u16,
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
    /// `host`, `host:7`, `10.0.0.1:7`, `[::1]:7`; torchrun also takes an address of the new kind without a port.
    pub(super) fn parse(text: &str, default_port: u16) -> Result<Endpoint, String> {
        let text = text.trim();
        let bad = || format!("`{text}` is no endpoint: write HOST or HOST:PORT, and [ADDRESS]:PORT for IPv6");
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

/// How nodes meet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Meeting {
    /// One node; the store's port is picked.
    Alone,
    Static {
        endpoint: Endpoint,
        node_rank: usize,
    },
    Elastic {
        endpoint: Endpoint,
    },
}

/// How the program is to be understood.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A `.py` file under Python, anything else as it is.
    ByName,
    /// As it is.
    Plain,
    /// A Python module.
    Module,
    /// A Python file, whatever its name.
    PythonFile,
}

/// What follows from the flags.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) nodes: Nodes,
    /// Of this node.
    pub(super) ranks: usize,
    pub(super) meeting: Meeting,
    /// None: a name that no other run has.
    pub(super) run_id: Option<String>,
    pub(super) settings: Settings,
    pub(super) max_restarts: u64,
    pub(super) shutdown_timeout: Duration,
    pub(super) signals: Vec<i32>,
    /// As it was typed, which is what torchrun tells ranks.
    pub(super) signals_named: String,
    pub(super) role: String,
    pub(super) binding: Option<Binding>,
    pub(super) virtual_local_rank: bool,
    pub(super) local_address: Option<String>,
    /// A store on loopback serves other users, too.
    pub(super) other_users: bool,
    pub(super) kind: Kind,
    pub(super) python: Option<PathBuf>,
    pub(super) program: Vec<OsString>,
    pub(super) logs: LogOptions,
    pub(super) dashboard: Option<dashboard::Options>,
    /// A folder, or empty for a temporary one.
    pub(super) worker_server: Option<String>,
    /// `--log-line-prefix-template`
    pub(super) template: Option<String>,
    /// What was typed and has no effect.
    pub(super) warnings: Vec<String>,
    /// Somebody named a place to meet, or there are several nodes.
    pub(super) tells_where: bool,
}

impl Args {
    fn dashboard_options(&self) -> Result<Option<dashboard::Options>, String> {
        let Some(address) = &self.dashboard else { return Ok(None) };
        let (address, names) = (address.parse()?, self.dashboard_name.clone());
        Ok(Some(dashboard::Options { address, names, values: self.dashboard_values }))
    }

    pub(super) fn plan(&self) -> Result<Plan, String> {
        if self.print_completion.is_some() {
            return Err(
                "tenfold has no completions for shells\n  hint: `tenfold run --help` lists the options"
                    .into(),
            );
        }
        // The value of --dashboard needs `=`, since the program may follow it.
        if let (Some(_), Some(address)) = (&self.dashboard, self.program[0].to_str())
            && address.parse::<std::net::SocketAddr>().is_ok()
        {
            return Err(format!("`{address}` is no program\n  hint: write --dashboard={address}"));
        }
        let mut warnings = Vec::new();
        let meeting = self.meeting(&mut warnings)?;
        for (flag, is_given) in [
            ("--event-log-handler", self.event_log_handler.as_ref().is_some_and(|name| name != "null")),
            ("--logs-specs", self.logs_specs.is_some()),
        ] {
            if is_given {
                warnings.push(format!("{flag} has no effect: it names Python code of torchrun's"));
            }
        }
        warnings.extend(ignored_variables(|name| std::env::var(name).ok()));
        let alone = meeting == Meeting::Alone;
        Ok(Plan {
            nodes: if alone { Nodes { min: 1, max: 1 } } else { self.nnodes },
            ranks: count_ranks(&self.nproc_per_node)?,
            run_id: (!alone).then(|| self.rdzv_id.clone()),
            settings: self.rdzv_conf.clone(),
            max_restarts: self.max_restarts,
            shutdown_timeout: self
                .shutdown_timeout
                .or_else(inherited_shutdown_timeout)
                .unwrap_or(SHUTDOWN_TIMEOUT),
            signals: parse_signals(&self.signals_to_handle)?,
            signals_named: self.signals_to_handle.clone(),
            role: self.role.clone(),
            binding: self.numa_binding,
            virtual_local_rank: self.virtual_local_rank,
            local_address: self.local_addr.clone(),
            other_users: self.allow_other_users,
            kind: self.kind()?,
            python: self.python.clone(),
            program: self.program.clone(),
            logs: self.output.options(),
            dashboard: self.dashboard_options()?,
            worker_server: self.worker_server.clone(),
            template: self.output.template(),
            warnings,
            tells_where: !alone,
            meeting,
        })
    }

    /// torchrun's rules, in its order.
    fn meeting(&self, warnings: &mut Vec<String>) -> Result<Meeting, String> {
        let is_static = match self.rdzv_backend.as_str() {
            "static" => true,
            "c10d" | "tenfold" => false,
            name @ ("etcd" | "etcd-v2") => {
                return Err(format!(
                    "--rdzv-backend {name} is not offered: tenfold brings its own store\n  hint: --rdzv-backend c10d \
                     --rdzv-endpoint HOST:29400, where HOST is one of the nodes; no etcd is needed"
                ));
            }
            name => {
                let near = nearest(name, &["static", "c10d", "tenfold"]);
                let near = near.map_or(String::new(), |near| format!("; is it `{near}`?"));
                return Err(format!(
                    "--rdzv-backend: there is no `{name}`{near}\n  hint: static, c10d (also called tenfold)"
                ));
            }
        };
        let says_nothing = is_static && self.rdzv_endpoint.is_empty() && self.master_port.is_none();
        if self.standalone || says_nothing && self.nnodes.max == 1 {
            return Ok(Meeting::Alone);
        }
        if !is_static {
            if self.node_rank.is_some_and(|rank| rank != 0) {
                let name = &self.rdzv_backend;
                warnings.push(format!(
                    "--node-rank has no effect with --rdzv-backend {name}: ranks are given as nodes come"
                ));
            }
            let endpoint = if self.rdzv_endpoint.is_empty() { "localhost" } else { &self.rdzv_endpoint };
            let endpoint = Endpoint::parse(endpoint, ELASTIC_PORT)
                .map_err(|error| format!("--rdzv-endpoint: {error}"))?;
            return Ok(Meeting::Elastic { endpoint });
        }
        if self.nnodes.min != self.nnodes.max {
            return Err(format!(
                "--nnodes {}:{}: the number of nodes cannot change when their ranks are given\n  hint: add \
                 --rdzv-backend c10d, or give one number",
                self.nnodes.min, self.nnodes.max
            ));
        }
        // torchrun takes such a node for node 0. If no node is given a rank, all of them are, and wait for each other.
        if self.nnodes.max > 1 && self.node_rank.is_none() && !self.rdzv_endpoint.is_empty() {
            let nodes = self.nnodes.max;
            return Err(format!(
                "--nnodes {nodes} --rdzv-endpoint {}: it is not known which of the {nodes} nodes this is\n  hint: add \
                 --rdzv-backend c10d on all nodes to have them numbered, or --node-rank 0 to {} to number them yourself",
                self.rdzv_endpoint,
                nodes - 1
            ));
        }
        let node_rank = self.node_rank.unwrap_or(0);
        if node_rank >= self.nnodes.max {
            let nodes = self.nnodes.max;
            return Err(format!(
                "--node-rank {node_rank}: of --nnodes {nodes} the last has rank {}",
                nodes - 1
            ));
        }
        let endpoint = if self.rdzv_endpoint.is_empty() {
            let host = Endpoint::parse(&self.master_addr, STATIC_PORT)
                .map_err(|error| format!("--master-addr: {error}"))?
                .host;
            Endpoint { host, port: self.master_port.unwrap_or(STATIC_PORT) }
        } else {
            Endpoint::parse(&self.rdzv_endpoint, STATIC_PORT)
                .map_err(|error| format!("--rdzv-endpoint: {error}"))?
        };
        Ok(Meeting::Static { endpoint, node_rank })
    }

    fn kind(&self) -> Result<Kind, String> {
        match (self.run_path, self.no_python, self.module) {
            (true, ..) => Ok(Kind::PythonFile), // takes precedence, as torchrun says
            (false, true, true) => Err("--no-python and --module contradict each other".into()),
            (false, true, false) => Ok(Kind::Plain),
            (false, false, true) => Ok(Kind::Module),
            (false, false, false) => Ok(Kind::ByName),
        }
    }
}

/// What is set for torchrun's agent and not read here, a line each.
fn ignored_variables(value: impl Fn(&str) -> Option<String>) -> Vec<String> {
    const IGNORED: [(&str, &str); 4] = [
        ("TORCHELASTIC_ENABLE_FILE_TIMER", "tenfold watches no timers of ranks"),
        (
            "TORCHELASTIC_HEALTH_CHECK_PORT",
            "tenfold answers no health checks; `--dashboard` has what it knows as JSON",
        ),
        ("TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT", "`--shutdown-timeout` holds for all ranks"),
        (
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
            "ranks share the store in which nodes meet if a launcher hosts it",
        ),
    ];
    let is_set = |name: &&(&str, &str)| value(name.0).is_some_and(|value| !matches!(value.trim(), "" | "0"));
    IGNORED.iter().filter(is_set).map(|(name, why)| format!("{name} has no effect: {why}")).collect()
}

fn inherited_shutdown_timeout() -> Option<Duration> {
    let text = std::env::var("TORCH_ELASTIC_SHUTDOWN_TIMEOUT").ok()?;
    parse_duration(&text).ok()
}

fn count_ranks(text: &str) -> Result<usize, String> {
    let ranks = match text {
        "cpu" => processors(),
        "auto" => match devices() {
            0 => processors(),
            devices => devices,
        },
        "gpu" => match devices() {
            0 => {
                return Err("--nproc-per-node gpu: there is no NVIDIA device that ranks could use\n  hint: \
                            /proc/driver/nvidia/gpus and /dev/nvidia0 are not there, or CUDA_VISIBLE_DEVICES names none of \
                            them; give a number, or `cpu`"
                    .into());
            }
            devices => devices,
        },
        "xpu" => return Err("--nproc-per-node xpu: tenfold cannot count such devices\n  hint: give a number".into()),
        number => number.parse().map_err(|_| {
            format!("--nproc-per-node: `{number}` is no number of ranks\n  hint: a number, or one of auto, cpu, gpu")
        })?,
    };
    if (1..=RANKS_MAX).contains(&ranks) {
        Ok(ranks)
    } else {
        Err(format!("--nproc-per-node: {ranks} ranks on one node; from 1 to {RANKS_MAX} are possible"))
    }
}

/// Processors that this process may run on.
fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// NVIDIA devices that ranks can use.
fn devices() -> usize {
    let present = devices_present();
    std::env::var("CUDA_VISIBLE_DEVICES").map_or(present, |list| visible(&list, present))
}

/// How many devices CUDA_VISIBLE_DEVICES leaves, read as CUDA and PyTorch do: numbers, or names that all begin alike; the first that
/// is none ends the list, and one that is there twice empties it.
fn visible(list: &str, present: usize) -> usize {
    let kind = ["GPU-", "MIG-"].into_iter().find(|kind| list.trim_start().starts_with(kind));
    let mut seen = Vec::new();
    for entry in list.split(',').map(str::trim) {
        let device = match kind {
            Some(kind) => entry.starts_with(kind).then_some(entry),
            None => entry.parse().is_ok_and(|number: usize| number < present).then_some(entry),
        };
        let Some(device) = device else { break };
        if seen.contains(&device) {
            return 0;
        }
        seen.push(device);
    }
    if kind == Some("MIG-") && present > 0 { seen.len() } else { seen.len().min(present) } // one device has several parts
}

/// NVIDIA devices of this machine, without asking NVIDIA's library.
fn devices_present() -> usize {
    let listed = std::fs::read_dir("/proc/driver/nvidia/gpus").map_or(0, |devices| devices.flatten().count());
    if listed > 0 {
        return listed;
    }
    let is_device = |name: &std::ffi::OsStr| {
        let number = name.to_str().and_then(|name| name.strip_prefix("nvidia"));
        number.is_some_and(|number| !number.is_empty() && number.bytes().all(|digit| digit.is_ascii_digit()))
    };
    let files = std::fs::read_dir("/dev")
        .map(|files| files.flatten().filter(|file| is_device(&file.file_name())).count());
    files.unwrap_or(0)
}

fn parse_signals(text: &str) -> Result<Vec<i32>, String> {
    let known = || (1..32).filter_map(|number| Some((number, signal_hook::low_level::signal_name(number)?)));
    let mut signals = Vec::new();
    for name in text.split(',').map(str::trim).filter(|name| !name.is_empty()) {
        let found = known().find(|(_, known)| *known == name).ok_or_else(|| {
            let names: Vec<&str> = known().map(|(_, name)| name).collect();
            let near = nearest(name, &names).map_or(String::new(), |near| format!("; is it `{near}`?"));
            format!("--signals-to-handle: there is no signal `{name}`{near}")
        })?;
        if signal_hook::consts::FORBIDDEN.contains(&found.0) {
            return Err(format!("--signals-to-handle: {name} cannot be handled by any program"));
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
    use clap::Parser;

    #[derive(Parser, Debug)]
    struct Cli {
        #[command(flatten)]
        args: Args,
    }

    fn plan(words: &str) -> Result<Plan, String> {
        let words = std::iter::once("run").chain(words.split_whitespace()).chain(["train.py"]);
        Cli::try_parse_from(words).map_err(|error| error.to_string())?.args.plan()
    }

    fn meeting(words: &str) -> Meeting {
        plan(words).unwrap().meeting
    }

    fn endpoint(host: &str, port: u16) -> Endpoint {
        Endpoint { host: host.into(), port }
    }

    #[test]
    fn where_nodes_meet_follows_torchruns_rules() {
        assert_eq!(meeting(""), Meeting::Alone);
        assert_eq!(meeting("--nnodes 1:1 --node-rank 0"), Meeting::Alone);
        let at = |host, port, node_rank| Meeting::Static { endpoint: endpoint(host, port), node_rank };
        assert_eq!(meeting("--master-port 1234"), at("127.0.0.1", 1234, 0));
        assert_eq!(meeting("--nnodes 2 --node_rank=1 --master_addr=a"), at("a", 29500, 1));
        assert_eq!(meeting("--nnodes 2 --node-rank 0 --rdzv-endpoint b:7"), at("b", 7, 0));
        assert_eq!(meeting("--rdzv-endpoint b:7"), at("b", 7, 0));
        assert_eq!(meeting("--nnodes 2 --master-addr b"), at("b", 29500, 0));
        let elastic = |host, port| Meeting::Elastic { endpoint: endpoint(host, port) };
        assert_eq!(meeting("--nnodes 1:4 --rdzv-backend c10d --rdzv-endpoint [::1]:8"), elastic("::1", 8));
        assert_eq!(meeting("--rdzv_backend tenfold"), elastic("localhost", 29400));
        assert_eq!(meeting("--standalone --nnodes 2 --rdzv-backend c10d --rdzv-endpoint a"), Meeting::Alone);
        assert_eq!(plan("--standalone --nnodes 2").unwrap().nodes, Nodes { min: 1, max: 1 });
    }

    #[test]
    fn what_cannot_be_meant_is_told_with_what_to_type() {
        let says = |words| plan(words).unwrap_err();
        assert_eq!(
            says("--nnodes 1:2"),
            "--nnodes 1:2: the number of nodes cannot change when their ranks are given\n  hint: add --rdzv-backend \
             c10d, or give one number"
        );
        // Without a rank each of them would be node 0, host a store, and wait for the other.
        assert_eq!(
            says("--nnodes 2 --rdzv-endpoint b:7"),
            "--nnodes 2 --rdzv-endpoint b:7: it is not known which of the 2 nodes this is\n  hint: add --rdzv-backend c10d \
             on all nodes to have them numbered, or --node-rank 0 to 1 to number them yourself"
        );
        assert_eq!(says("--nnodes 2 --node-rank 2"), "--node-rank 2: of --nnodes 2 the last has rank 1");
        assert_eq!(
            says("--rdzv-backend etcd-v2"),
            "--rdzv-backend etcd-v2 is not offered: tenfold brings its own store\n  hint: --rdzv-backend c10d \
             --rdzv-endpoint HOST:29400, where HOST is one of the nodes; no etcd is needed"
        );
        assert_eq!(
            says("--rdzv-backend c10"),
            "--rdzv-backend: there is no `c10`; is it `c10d`?\n  hint: static, c10d (also called tenfold)"
        );
        assert_eq!(says("--no-python --module"), "--no-python and --module contradict each other");
        assert_eq!(
            says("-n xpu"),
            "--nproc-per-node xpu: tenfold cannot count such devices\n  hint: give a number"
        );
        assert_eq!(says("-n 0"), "--nproc-per-node: 0 ranks on one node; from 1 to 1024 are possible");
        assert_eq!(
            says("-n four"),
            "--nproc-per-node: `four` is no number of ranks\n  hint: a number, or one of auto, cpu, gpu"
        );
        assert_eq!(
            says("--signals-to-handle SIGTERM,SIGUSR3"),
            "--signals-to-handle: there is no signal `SIGUSR3`; is it `SIGUSR1`?"
        );
        assert_eq!(
            says("--signals-to-handle SIGKILL"),
            "--signals-to-handle: SIGKILL cannot be handled by any program"
        );
        assert!(
            says("--rdzv-conf join_timeut=5")
                .contains("there is no setting `join_timeut`; is it `join_timeout`?")
        );
        let words = ["run", "--dashboard", "127.0.0.1:80", "train.py"];
        assert_eq!(
            Cli::try_parse_from(words).unwrap().args.plan().unwrap_err(),
            "`127.0.0.1:80` is no program\n  hint: write --dashboard=127.0.0.1:80"
        );
        assert!(says("--nnodes 3:2").contains("write a number of nodes such as 2, or a range such as 1:4"));
    }

    #[test]
    fn an_unknown_flag_is_told_with_the_nearest_one_in_either_spelling() {
        for (typed, meant) in [
            ("--nproc-per-nod", "--nproc-per-node"),
            ("--nproc_pernode", "--nproc_per_node"),
            ("--rdzv-endpont", "--rdzv-endpoint"),
            ("--rdzv_bakend", "--rdzv_backend"),
            ("--max-restart", "--max-restarts"),
            ("--stand-alone", "--standalone"),
        ] {
            let error = plan(&format!("{typed}=1")).unwrap_err();
            assert!(error.contains(&format!("a similar argument exists: '{meant}'")), "{typed}: {error}");
        }
    }

    #[test]
    fn every_flag_of_torchrun_is_known_in_both_spellings() {
        let flags = "nnodes=1 nproc-per-node=1 rdzv-backend=static rdzv-endpoint=a rdzv-id=x rdzv-conf=timeout=1 standalone \
             max-restarts=0 monitor-interval=0.1 start-method=fork event-log-handler=null role=r module run-path \
             log-dir=/tmp redirects=3 tee=0:1 log-line-prefix-template=x local-ranks-filter=0 \
             duplicate-stdout-filters=a,b duplicate-stderr-filters=a node-rank=0 master-addr=a master-port=1 local-addr=b \
             logs-specs=x numa-binding=core-complex signals-to-handle=SIGUSR1 shutdown-timeout=30 virtual-local-rank";
        for flag in flags.split_whitespace() {
            let (name, value) = flag.split_once('=').unwrap_or((flag, ""));
            let value = if value.is_empty() { String::new() } else { format!("={value}") };
            plan(&format!("--{name}{value}")).unwrap();
            plan(&format!("--{}{value}", name.replace('-', "_"))).unwrap();
        }
        plan("-m -r 3 -t 1 -n 1 --no_python").unwrap_err();
        plan("-m -r 3 -t 1 -n 1").unwrap();
    }

    #[test]
    fn what_follows_the_program_is_its_own() {
        let words = ["run", "-n", "2", "train.py", "-n", "7", "--standalone", "--", "-x"];
        let plan = Cli::try_parse_from(words).unwrap().args.plan().unwrap();
        assert_eq!(plan.ranks, 2);
        assert_eq!(plan.program, ["train.py", "-n", "7", "--standalone", "--", "-x"].map(OsString::from));
    }

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
            "keep_alive_max_attempt: 1 is too few: a node must be allowed to be late with a beat, so 2 or more"
        );
        assert_eq!(bad("nothing_like_it=1"), "there is no setting `nothing_like_it`");
    }

    #[test]
    fn devices_that_ranks_cannot_see_are_not_counted() {
        for (list, devices) in [
            ("0,1", 2),
            ("3", 1),
            (" 2 , 0 ", 2),
            ("", 0),
            ("-1", 0),
            ("0,-1,1", 1),
            ("0,4,1", 1), // of four the last is 3
            ("1,1", 0),
            ("none", 0),
            ("GPU-8932f937,GPU-1b7c2d11", 2),
            ("GPU-8932f937,1", 1),
            ("MIG-a,MIG-b,MIG-c,MIG-d,MIG-e", 5),
        ] {
            assert_eq!(visible(list, 4), devices, "{list}");
        }
        assert_eq!(visible("0,1", 0), 0);
    }

    #[test]
    fn what_torchruns_agent_would_read_and_tenfold_does_not_is_told() {
        let warned = |name: &'static str, value: &'static str| {
            ignored_variables(|asked| (asked == name).then(|| value.into()))
        };
        assert_eq!(
            warned("TORCHELASTIC_ENABLE_FILE_TIMER", "1"),
            ["TORCHELASTIC_ENABLE_FILE_TIMER has no effect: tenfold watches no timers of ranks"]
        );
        assert_eq!(warned("TORCHELASTIC_ENABLE_FILE_TIMER", "0"), [""; 0]);
        assert_eq!(warned("TORCHELASTIC_HEALTH_CHECK_PORT", "8080").len(), 1);
        assert_eq!(warned("TORCHELASTIC_HEALTH_CHECK_PORT", ""), [""; 0]);
    }

    #[test]
    fn endpoints_have_a_host_and_a_port() {
        let parse = |text| Endpoint::parse(text, 7);
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
