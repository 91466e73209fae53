//! The combined meaning of the flags.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use super::super::logs::LogOptions;
use super::super::program::LOCAL_RANK;
use super::counting::{RANKS_MAX, count_ranks};
use super::values::{ELASTIC_PORT, Endpoint, Nodes, STATIC_PORT, Settings, nearest, parse_signals};
use super::{Args, Binding, OnFailure};
use tenfold_console::parse_duration;
use tenfold_dashboard as dashboard;

/// The default of `--max-restarts` if ranks recover.
const REPLACEMENTS_MAX: u64 = 3;
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(10);

/// How nodes find each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Meeting {
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

/// How to run the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A `.py` file under Python, anything else directly.
    ByName,
    /// Directly.
    Plain,
    /// A Python module.
    Module,
    /// A Python file, whatever its name.
    PythonFile,
}

/// What follows from the flags.
#[derive(Debug)]
pub(crate) struct LaunchPlan {
    pub(crate) nodes: Nodes,
    /// Of this node.
    pub(crate) ranks: usize,
    pub(crate) meeting: Meeting,
    /// None: a name that no other run has.
    pub(crate) run_id: Option<String>,
    pub(crate) settings: Settings,
    pub(crate) max_restarts: u64,
    /// Processes that die are replaced, as long as the others can recover.
    pub(crate) recovers: bool,
    /// Processes of this node that wait to become ranks.
    pub(crate) spares: usize,
    pub(crate) shutdown_timeout: Duration,
    pub(crate) signals: Vec<i32>,
    /// As it was typed, which is what torchrun passes to ranks.
    pub(crate) signals_named: String,
    pub(crate) role: String,
    pub(crate) binding: Option<Binding>,
    pub(crate) virtual_local_rank: bool,
    pub(crate) local_address: Option<String>,
    /// Whether this node has so many ranks that they use a store on another node through a relay.
    pub(crate) wants_relay: bool,
    /// Whether a store or relay on loopback also serves other users.
    pub(crate) other_users: bool,
    pub(crate) kind: Kind,
    pub(crate) python: Option<PathBuf>,
    pub(crate) program: Vec<OsString>,
    pub(crate) logs: LogOptions,
    pub(crate) dashboard: Option<dashboard::Options>,
    /// A folder, or empty for a temporary one.
    pub(crate) worker_server: Option<String>,
    /// `--log-line-prefix-template`
    pub(crate) template: Option<String>,
    /// Options that were given and have no effect.
    pub(crate) warnings: Vec<String>,
    /// The user named an endpoint, or there are several nodes.
    pub(crate) tells_where: bool,
}

impl Args {
    fn dashboard_options(&self) -> Result<Option<dashboard::Options>, String> {
        let Some(address) = &self.dashboard else { return Ok(None) };
        let (address, names) = (address.parse()?, self.dashboard_name.clone());
        Ok(Some(dashboard::Options { address, names, values: self.dashboard_values }))
    }

    pub(crate) fn plan(&self) -> Result<LaunchPlan, String> {
        if self.print_completion.is_some() {
            return Err(
                "tenfold has no shell completions\n  hint: `tenfold run --help` lists the options".into()
            );
        }
        // The value of --dashboard needs `=`, since the program may follow it.
        if let (Some(_), Some(address)) = (&self.dashboard, self.program[0].to_str())
            && address.parse::<std::net::SocketAddr>().is_ok()
        {
            return Err(format!("`{address}` is not a program\n  hint: write --dashboard={address}"));
        }
        let mut warnings = Vec::new();
        let meeting = self.meeting(&mut warnings)?;
        for (flag, is_given) in [
            ("--event-log-handler", self.event_log_handler.as_ref().is_some_and(|name| name != "null")),
            ("--logs-specs", self.logs_specs.is_some()),
        ] {
            if is_given {
                warnings.push(format!("{flag} has no effect: it names Python code of torchrun"));
            }
        }
        warnings.extend(ignored_variables(|name| std::env::var(name).ok()));
        let alone = meeting == Meeting::Alone;
        let ranks = count_ranks(&self.nproc_per_node)?;
        Ok(LaunchPlan {
            nodes: if alone { Nodes { min: 1, max: 1 } } else { self.nnodes },
            ranks,
            wants_relay: (1..=ranks).contains(&self.relay_from),
            run_id: (!alone).then(|| self.rdzv_id.clone()),
            settings: self.rdzv_conf.clone(),
            max_restarts: self.restarts_max()?,
            recovers: self.on_failure == OnFailure::Recover,
            spares: self.spares_allowed(ranks)?,
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

    /// Restarts and replacements together.
    fn restarts_max(&self) -> Result<u64, String> {
        match (self.on_failure, self.max_restarts) {
            (OnFailure::Restart, given) => Ok(given.unwrap_or(0)),
            (OnFailure::Recover, None) => Ok(REPLACEMENTS_MAX),
            (OnFailure::Recover, Some(0)) => Err(format!(
                "--on-failure recover --max-restarts 0: no process may be replaced
  hint: omit --max-restarts, which \
                 means {REPLACEMENTS_MAX}, or give a higher number"
            )),
            (OnFailure::Recover, Some(given)) => Ok(given),
        }
    }

    /// Nothing that depends on a process's local rank can be done for one that does not know it yet.
    fn spares_allowed(&self, ranks: usize) -> Result<usize, String> {
        let spares = self.spares;
        if spares == 0 {
            return Ok(0);
        }
        if self.on_failure == OnFailure::Restart {
            return Err(format!(
                "--spares {spares}: spares are for ranks that recover\n  hint: add --on-failure recover"
            ));
        }
        if ranks.saturating_add(spares) > RANKS_MAX {
            return Err(format!(
                "--spares {spares}: {ranks} ranks and {spares} spares are more than {RANKS_MAX} processes on one node"
            ));
        }
        let takes_local_rank = |word: &OsString| word.to_str().is_some_and(|word| word.contains(LOCAL_RANK));
        let what = [
            ("--virtual-local-rank", self.virtual_local_rank),
            ("--numa-binding", self.numa_binding.is_some()),
            ("an argument with ${local_rank}", self.program.iter().any(takes_local_rank)),
        ];
        match what.iter().find(|(_, is_given)| *is_given) {
            None => Ok(spares),
            Some((what, _)) => Err(format!(
                "--spares {spares} and {what} contradict each other: a spare does not know its local rank when it starts\n  \
                 hint: omit one of them; without spares, a replacement is started when a rank has died"
            )),
        }
    }

    /// torchrun's rules, in its order.
    fn meeting(&self, warnings: &mut Vec<String>) -> Result<Meeting, String> {
        let is_static = match self.rdzv_backend.as_str() {
            "static" => true,
            "c10d" | "tenfold" => false,
            name @ ("etcd" | "etcd-v2") => {
                return Err(format!(
                    "--rdzv-backend {name} is not supported: tenfold brings its own store\n  hint: use --rdzv-backend c10d \
                     --rdzv-endpoint HOST:29400, where HOST is one of the nodes"
                ));
            }
            name => {
                let near = nearest(name, &["static", "c10d", "tenfold"]);
                let near = near.map_or(String::new(), |near| format!("; did you mean `{near}`?"));
                return Err(format!(
                    "--rdzv-backend: unknown backend `{name}`{near}\n  hint: use static or c10d (also called tenfold)"
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
                    "--node-rank has no effect with --rdzv-backend {name}: nodes are numbered in the order in which they join"
                ));
            }
            let endpoint = if self.rdzv_endpoint.is_empty() { "localhost" } else { &self.rdzv_endpoint };
            let endpoint = Endpoint::parse(endpoint, ELASTIC_PORT)
                .map_err(|error| format!("--rdzv-endpoint: {error}"))?;
            return Ok(Meeting::Elastic { endpoint });
        }
        if self.nnodes.min != self.nnodes.max {
            return Err(format!(
                "--nnodes {}:{}: a range of nodes needs an elastic rendezvous\n  hint: add \
                 --rdzv-backend c10d, or give one number",
                self.nnodes.min, self.nnodes.max
            ));
        }
        // torchrun takes such a node for node 0. If no node is given a rank, every node would be node 0 and
        // wait for the others.
        if self.nnodes.max > 1 && self.node_rank.is_none() && !self.rdzv_endpoint.is_empty() {
            let nodes = self.nnodes.max;
            return Err(format!(
                "--nnodes {nodes} --rdzv-endpoint {}: cannot tell which of the {nodes} nodes this is\n  hint: add \
                 --rdzv-backend c10d on all nodes to have them numbered, or --node-rank 0 to {} to number them yourself",
                self.rdzv_endpoint,
                nodes - 1
            ));
        }
        let node_rank = self.node_rank.unwrap_or(0);
        if node_rank >= self.nnodes.max {
            let nodes = self.nnodes.max;
            return Err(format!(
                "--node-rank {node_rank} is out of range: with --nnodes {nodes}, node ranks are 0 to {}",
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

/// Variables for torchrun's agent that tenfold does not read, one line each.
fn ignored_variables(value: impl Fn(&str) -> Option<String>) -> Vec<String> {
    const IGNORED: [(&str, &str); 4] = [
        ("TORCHELASTIC_ENABLE_FILE_TIMER", "tenfold does not watch timers of ranks"),
        (
            "TORCHELASTIC_HEALTH_CHECK_PORT",
            "tenfold does not answer health checks; `--dashboard` offers its state as JSON",
        ),
        ("TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT", "`--shutdown-timeout` applies to all ranks"),
        (
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
            "ranks share the store of the rendezvous if a launcher hosts it",
        ),
    ];
    let is_set = |name: &&(&str, &str)| value(name.0).is_some_and(|value| !matches!(value.trim(), "" | "0"));
    IGNORED.iter().filter(is_set).map(|(name, why)| format!("{name} has no effect: {why}")).collect()
}

fn inherited_shutdown_timeout() -> Option<Duration> {
    let text = std::env::var("TORCH_ELASTIC_SHUTDOWN_TIMEOUT").ok()?;
    parse_duration(&text).ok()
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

    fn plan(words: &str) -> Result<LaunchPlan, String> {
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
    fn the_endpoint_follows_torchruns_rules() {
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
    fn invalid_arguments_are_reported_with_what_to_type() {
        let says = |words| plan(words).unwrap_err();
        assert_eq!(
            says("--nnodes 1:2"),
            "--nnodes 1:2: a range of nodes needs an elastic rendezvous\n  hint: add --rdzv-backend \
             c10d, or give one number"
        );
        // Without a rank, each of them would be node 0, host a store, and wait for the other.
        assert_eq!(
            says("--nnodes 2 --rdzv-endpoint b:7"),
            "--nnodes 2 --rdzv-endpoint b:7: cannot tell which of the 2 nodes this is\n  hint: add --rdzv-backend c10d \
             on all nodes to have them numbered, or --node-rank 0 to 1 to number them yourself"
        );
        assert_eq!(
            says("--nnodes 2 --node-rank 2"),
            "--node-rank 2 is out of range: with --nnodes 2, node ranks are 0 to 1"
        );
        assert_eq!(
            says("--rdzv-backend etcd-v2"),
            "--rdzv-backend etcd-v2 is not supported: tenfold brings its own store\n  hint: use --rdzv-backend c10d \
             --rdzv-endpoint HOST:29400, where HOST is one of the nodes"
        );
        assert_eq!(
            says("--rdzv-backend c10"),
            "--rdzv-backend: unknown backend `c10`; did you mean `c10d`?\n  hint: use static or c10d (also called tenfold)"
        );
        assert_eq!(says("--no-python --module"), "--no-python and --module contradict each other");
        assert_eq!(
            says("-n xpu"),
            "--nproc-per-node xpu: tenfold cannot count such devices\n  hint: give a number"
        );
        assert_eq!(
            says("-n 0"),
            "--nproc-per-node: 0 ranks on one node are out of range: expected 1 to 1024"
        );
        assert_eq!(
            says("-n four"),
            "--nproc-per-node: invalid number of ranks `four`\n  hint: give a number, or one of auto, cpu, gpu"
        );
        assert_eq!(
            says("--signals-to-handle SIGTERM,SIGUSR3"),
            "--signals-to-handle: unknown signal `SIGUSR3`; did you mean `SIGUSR1`?"
        );
        assert_eq!(says("--signals-to-handle SIGKILL"), "--signals-to-handle: SIGKILL cannot be handled");
        assert!(
            says("--rdzv-conf join_timeut=5")
                .contains("unknown setting `join_timeut`; did you mean `join_timeout`?")
        );
        let words = ["run", "--dashboard", "127.0.0.1:80", "train.py"];
        assert_eq!(
            Cli::try_parse_from(words).unwrap().args.plan().unwrap_err(),
            "`127.0.0.1:80` is not a program\n  hint: write --dashboard=127.0.0.1:80"
        );
        assert!(
            says("--nnodes 3:2").contains("expected a number of nodes such as 2, or a range such as 1:4")
        );
    }

    #[test]
    fn ranks_that_recover_have_a_budget_and_may_have_spares() {
        let of = |words: &str| {
            let plan = plan(words).unwrap();
            (plan.recovers, plan.max_restarts, plan.spares)
        };
        assert_eq!(of(""), (false, 0, 0));
        assert_eq!(of("--on-failure restart --max-restarts 2"), (false, 2, 0));
        assert_eq!(of("--on-failure=recover"), (true, 3, 0));
        assert_eq!(of("--on_failure recover --max-restarts 9 --spares 2 -n 4"), (true, 9, 2));
        assert_eq!(of("--on-failure recover --nnodes 1:4 --rdzv-backend c10d"), (true, 3, 0));
        let says = |words: &str| plan(words).unwrap_err();
        assert_eq!(
            says("--on-failure recover --max-restarts 0"),
            "--on-failure recover --max-restarts 0: no process may be replaced\n  hint: omit --max-restarts, which means 3, or \
             give a higher number"
        );
        assert_eq!(
            says("--spares 1"),
            "--spares 1: spares are for ranks that recover\n  hint: add --on-failure recover"
        );
        assert_eq!(
            says("--on-failure recover -n 1000 --spares 25"),
            "--spares 25: 1000 ranks and 25 spares are more than 1024 processes on one node"
        );
        for (flag, named) in [
            ("--virtual-local-rank", "--virtual-local-rank"),
            ("--numa-binding node", "--numa-binding"),
            ("-- x ${local_rank}", "an argument with ${local_rank}"),
        ] {
            let error = says(&format!("--on-failure recover --spares 1 {flag}"));
            assert!(error.starts_with(&format!("--spares 1 and {named} contradict each other: ")), "{error}");
        }
        assert!(says("--on-failure replace").contains("[possible values: restart, recover]"));
    }

    #[test]
    fn a_relay_is_used_from_a_number_of_local_ranks_on() {
        let wants = |words: &str| plan(words).unwrap().wants_relay;
        assert!(!wants("-n 63") && wants("-n 64") && wants("-n 1024"));
        assert!(!wants("-n 3 --relay-from 4") && wants("-n 4 --relay-from 4"));
        assert!(wants("-n 1 --relay_from=1"));
        assert!(!wants("-n 1024 --relay-from 0") && !wants("-n 1024 --relay-from 1025"));
        for wrong in ["-1", "many", "4.5", ""] {
            let error = plan(&format!("--relay-from={wrong}")).unwrap_err();
            assert!(
                error.contains(&format!("invalid value '{wrong}' for '--relay-from <RANKS>'")),
                "{error}"
            );
            assert!(error.contains("expected a number of ranks such as 64, or 0 for no relay"), "{error}");
        }
        assert!(plan("--relay-from -1").unwrap_err().contains("invalid value '-1'"));
    }

    #[test]
    fn an_unknown_flag_is_reported_with_the_nearest_one_in_either_spelling() {
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
    fn arguments_after_the_program_belong_to_it() {
        let words = ["run", "-n", "2", "train.py", "-n", "7", "--standalone", "--", "-x"];
        let plan = Cli::try_parse_from(words).unwrap().args.plan().unwrap();
        assert_eq!(plan.ranks, 2);
        assert_eq!(plan.program, ["train.py", "-n", "7", "--standalone", "--", "-x"].map(OsString::from));
    }

    #[test]
    fn variables_that_only_torchruns_agent_reads_are_reported() {
        let warned = |name: &'static str, value: &'static str| {
            ignored_variables(|asked| (asked == name).then(|| value.into()))
        };
        assert_eq!(
            warned("TORCHELASTIC_ENABLE_FILE_TIMER", "1"),
            ["TORCHELASTIC_ENABLE_FILE_TIMER has no effect: tenfold does not watch timers of ranks"]
        );
        assert_eq!(warned("TORCHELASTIC_ENABLE_FILE_TIMER", "0"), [""; 0]);
        assert_eq!(warned("TORCHELASTIC_HEALTH_CHECK_PORT", "8080").len(), 1);
        assert_eq!(warned("TORCHELASTIC_HEALTH_CHECK_PORT", ""), [""; 0]);
    }
}
