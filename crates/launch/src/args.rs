//! torchrun's flags under both of their spellings.
//!
//! [`Args`] is what the user typed. [`LaunchPlan`] is what follows from it, or an error that says what to
//! type instead. Nothing is started or opened before the plan is complete.

mod counting;
mod plan;
mod values;

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::ArgAction::SetTrue;
use clap::ValueEnum;
use clap::builder::FalseyValueParser;

use super::logs::{LogOptions, Selection, parse_ranks, parse_selection, parse_words};
use tenfold_console::parse_duration;

pub(super) use plan::{Kind, LaunchPlan, Meeting};
pub(super) use values::{ELASTIC_PORT, Endpoint};
use values::{Nodes, RELAY_FROM, Settings, parse_relay_from};

/// torchrun uses the same name, so that jobs without a name find each other.
const NO_RUN_ID: &str = "none";

/// Start the ranks of a program on this machine, or on several machines, as torchrun does.
///
/// Every rank finds torchrun's variables in its environment (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, …)
/// and a store at MASTER_ADDR:MASTER_PORT, hosted by a launcher. PYTHONUNBUFFERED and, with several ranks,
/// OMP_NUM_THREADS and RAYON_NUM_THREADS are 1 unless they are set. Output of ranks is shown line by line with
/// the prefix `[rank]`. Ranks get no standard input, except a single-rank job whose standard input is not a terminal.
///
/// When a rank fails, the others are stopped: SIGTERM, and SIGKILL for those still alive after the shutdown
/// timeout. With --on-failure recover, only the failed one is replaced. Ctrl-C and SIGTERM are passed on to the ranks once; a second one kills them. Processes that
/// ranks leave behind are killed at the end of the run, even if the launcher itself is killed.
///
/// The exit code is torchrun's: 0 if all ranks succeeded, 1 if not, 2 for invalid arguments.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  tenfold run -n 4 train.py --epochs 3         a Python program, under the python3 on PATH
  tenfold run -n 2 --python .venv/bin/python train.py
  tenfold run -n 2 -- ./simulation --steps 10  any other program
  tenfold run -n 2 sh -c 'echo $RANK of $WORLD_SIZE at $MASTER_ADDR:$MASTER_PORT'
  # on each of 2 to 4 machines; the one with this address hosts the store:
  tenfold run --nnodes 2:4 -n 8 --rdzv-backend c10d --rdzv-endpoint 10.0.0.1:29400 train.py
  # on two machines with fixed node ranks:
  tenfold run --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 -n 8 train.py
  tenfold run --nnodes 2 --node-rank 1 --master-addr 10.0.0.1 -n 8 train.py

As with torchrun, options can also be set in the environment: PET_NPROC_PER_NODE=4.
Options may be spelled with `_` instead of `-`: --nproc_per_node.")]
pub struct Args {
    /// Number of ranks to start on this node: a number, `cpu` (one for each available processor), `gpu` (one for each
    /// NVIDIA device), or `auto` (gpu if there are devices, otherwise cpu)
    #[arg(short = 'n', long, alias = "nproc_per_node", value_name = "N|auto|cpu|gpu", default_value = "1")]
    #[arg(env = "PET_NPROC_PER_NODE", hide_env = true)]
    nproc_per_node: String,
    /// Number of nodes, each running its own `tenfold run`: a number or a range
    #[arg(long, value_name = "N|MIN:MAX", default_value = "1", env = "PET_NNODES", hide_env = true)]
    nnodes: Nodes,
    /// How often the ranks may be restarted after a failure, counted for the whole job; with --on-failure recover, how
    /// often in all ranks may be restarted and single processes replaced [default: 0, and 3 with --on-failure recover]
    #[arg(long, alias = "max_restarts", value_name = "COUNT")]
    #[arg(env = "PET_MAX_RESTARTS", hide_env = true)]
    max_restarts: Option<u64>,
    /// What to do when a rank dies: `restart` all ranks, or `recover`, which replaces the dead one alone. For recover, the
    /// program must use tenfold's recovery; if the ranks cannot recover, all are restarted
    #[arg(long, alias = "on_failure", value_name = "WHAT", default_value = "restart")]
    on_failure: OnFailure,
    /// With --on-failure recover: further processes on this node that wait to take the place of a dead rank
    #[arg(long, value_name = "COUNT", default_value_t = 0)]
    spares: usize,
    /// Time from SIGTERM to SIGKILL when ranks are stopped [default: $TORCH_ELASTIC_SHUTDOWN_TIMEOUT, else 10s]
    #[arg(long, alias = "shutdown_timeout", value_name = "TIME", value_parser = parse_duration)]
    #[arg(env = "PET_SHUTDOWN_TIMEOUT", hide_env = true)]
    shutdown_timeout: Option<Duration>,
    /// Signals that are passed on to the ranks and end the run. Other signals keep their default action, except SIGUSR1
    /// and SIGUSR2, which are passed on to ranks that catch them. Signals that are ignored when tenfold starts (nohup, jobs
    /// in the background of a script) stay ignored
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
    /// Bind each rank to processors: those of a NUMA node, of a socket, an exclusive part of a node, or those that share
    /// an L3 cache. NUMA nodes are assigned to local ranks in turn, since the device of a rank is not known
    #[arg(long, alias = "numa_binding", value_name = "MODE")]
    numa_binding: Option<Binding>,
    /// Set LOCAL_RANK to 0 for every rank, and CUDA_VISIBLE_DEVICES to its own device
    #[arg(long, alias = "virtual_local_rank", action = SetTrue, value_parser = FalseyValueParser::new())]
    #[arg(env = "PET_VIRTUAL_LOCAL_RANK", hide_env = true)]
    virtual_local_rank: bool,

    /// Treat the program as a Python module, as `python -m` does
    #[arg(short, long, action = SetTrue, value_parser = FalseyValueParser::new(), help_heading = "Program")]
    #[arg(env = "PET_MODULE", hide_env = true)]
    module: bool,
    /// Run the program directly, even if its name ends in .py
    #[arg(long, alias = "no_python", action = SetTrue, value_parser = FalseyValueParser::new(), help_heading = "Program")]
    #[arg(env = "PET_NO_PYTHON", hide_env = true)]
    no_python: bool,
    /// Treat the program as a Python file, given by its absolute path, whatever its name
    #[arg(long, alias = "run_path", action = SetTrue, value_parser = FalseyValueParser::new(), help_heading = "Program")]
    #[arg(env = "PET_RUN_PATH", hide_env = true)]
    run_path: bool,
    /// Python for such programs [default: the one that tenfold was installed with by pip, else $PYTHON_EXEC, else the
    /// first of python3 and python on PATH]
    #[arg(long, value_name = "PATH", help_heading = "Program")]
    python: Option<PathBuf>,

    /// How nodes find each other: `static`, with a given rank each, or `c10d` (also called `tenfold`), numbered in the
    /// order in which they join
    #[arg(
        long,
        alias = "rdzv_backend",
        value_name = "NAME",
        default_value = "static",
        help_heading = "Nodes"
    )]
    #[arg(env = "PET_RDZV_BACKEND", hide_env = true)]
    rdzv_backend: String,
    /// Address of the store that nodes use to find each other [default port: 29400]. The node that can bind it hosts the
    /// store, unless a store already answers there
    #[arg(long, alias = "rdzv_endpoint", value_name = "HOST[:PORT]", help_heading = "Nodes")]
    #[arg(env = "PET_RDZV_ENDPOINT", hide_env = true, default_value = "", hide_default_value = true)]
    rdzv_endpoint: String,
    /// Name of the job; nodes with the same name belong together
    #[arg(long, alias = "rdzv_id", value_name = "NAME", default_value = NO_RUN_ID, help_heading = "Nodes")]
    #[arg(env = "PET_RDZV_ID", hide_env = true)]
    rdzv_id: String,
    /// Further settings, in seconds where they are times: join_timeout=600, last_call_timeout=30,
    /// keep_alive_interval=5, keep_alive_max_attempt=3, read_timeout=60, is_host=true|false
    #[arg(long, alias = "rdzv_conf", value_name = "KEY=VALUE,…", help_heading = "Nodes")]
    #[arg(env = "PET_RDZV_CONF", hide_env = true, default_value = "", hide_default_value = true)]
    rdzv_conf: Settings,
    /// Run one node with a store on a free port, whatever the other options about nodes say
    #[arg(long, action = SetTrue, value_parser = FalseyValueParser::new(), help_heading = "Nodes")]
    #[arg(env = "PET_STANDALONE", hide_env = true)]
    standalone: bool,
    /// Rank of this node (static) [default: 0; required if several nodes use --rdzv-endpoint]
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
    /// Name or address by which other nodes reach this one [default: detected]
    #[arg(long, alias = "local_addr", value_name = "HOST", help_heading = "Nodes")]
    #[arg(env = "PET_LOCAL_ADDR", hide_env = true)]
    local_addr: Option<String>,
    /// Use a relay from this number of local ranks on: the ranks share one connection of this launcher to a store on another
    /// node, and MASTER_ADDR and MASTER_PORT are the relay's, on loopback. 0: never
    #[arg(long, alias = "relay_from", value_name = "RANKS", default_value_t = RELAY_FROM, help_heading = "Nodes")]
    #[arg(env = "PET_RELAY_FROM", hide_env = true, value_parser = parse_relay_from, allow_negative_numbers = true)]
    relay_from: usize,
    /// Let other users of this machine use a store or a relay of this launcher on loopback
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
    /// Another host name under which the page may be requested
    #[arg(
        long,
        alias = "dashboard_name",
        value_name = "NAME",
        requires = "dashboard",
        help_heading = "Dashboard"
    )]
    dashboard_name: Vec<String>,

    /// Let ranks that use tenfold answer questions on a socket in this folder, rank-N.sock: see `tenfold worker`
    /// [default folder: a temporary one]
    #[arg(long, alias = "worker_server", value_name = "FOLDER", num_args = 0..=1, require_equals = true)]
    #[arg(default_missing_value = "", help_heading = "Debugging")]
    worker_server: Option<String>,

    /// Ignored: exits are detected immediately
    #[arg(
        long,
        alias = "monitor_interval",
        value_name = "SECONDS",
        help_heading = "Accepted for compatibility with torchrun"
    )]
    #[arg(env = "PET_MONITOR_INTERVAL", hide_env = true)]
    monitor_interval: Option<f64>,
    /// Ignored: ranks are always separate programs
    #[arg(
        long,
        alias = "start_method",
        value_name = "METHOD",
        help_heading = "Accepted for compatibility with torchrun"
    )]
    #[arg(env = "PET_START_METHOD", hide_env = true)]
    start_method: Option<StartMethod>,
    /// Ignored with a warning: torchrun's handlers are Python code
    #[arg(
        long,
        alias = "event_log_handler",
        value_name = "NAME",
        help_heading = "Accepted for compatibility with torchrun"
    )]
    #[arg(env = "PET_EVENT_LOG_HANDLER", hide_env = true)]
    event_log_handler: Option<String>,
    /// Ignored with a warning: torchrun's log specs are Python code
    #[arg(
        long,
        alias = "logs_specs",
        value_name = "NAME",
        help_heading = "Accepted for compatibility with torchrun"
    )]
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
    /// Folder for log files; each run creates a folder in it [default: a temporary one if log files are requested].
    /// Without -r and -t, both streams of all ranks are written to files and shown here
    #[arg(long, alias = "log_dir", value_name = "FOLDER", env = "PET_LOG_DIR", hide_env = true)]
    log_dir: Option<PathBuf>,
    /// Write streams to log files instead of showing them: 1 standard output, 2 standard error, 3 both; or for some local ranks:
    /// 0:1,1:3
    #[arg(short, long, value_name = "STREAMS", value_parser = parse_selection, env = "PET_REDIRECTS", hide_env = true)]
    redirects: Option<Selection>,
    /// Write streams to log files and show them as well; same values as --redirects
    #[arg(short, long, value_name = "STREAMS", value_parser = parse_selection, env = "PET_TEE", hide_env = true)]
    tee: Option<Selection>,
    /// Show the output of these local ranks only: 0,1
    #[arg(long, alias = "local_ranks_filter", value_name = "RANKS", value_parser = parse_ranks)]
    #[arg(env = "PET_LOCAL_RANKS_FILTER", hide_env = true)]
    local_ranks_filter: Option<BTreeSet<usize>>,
    /// Prefix of each line, with ${rank}, ${local_rank}, ${role_name} and ${hostname} filled in
    #[arg(long, alias = "log_line_prefix_template", value_name = "TEXT")]
    #[arg(env = "PET_LOG_LINE_PREFIX_TEMPLATE", hide_env = true)]
    log_line_prefix_template: Option<String>,
    /// Copy lines of standard output that contain one of these words to a separate file; write a comma twice
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
pub(super) enum OnFailure {
    Restart,
    Recover,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum StartMethod {
    Spawn,
    Fork,
    Forkserver,
}
