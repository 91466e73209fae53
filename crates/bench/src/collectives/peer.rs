//! The implementations that are measured, and how their ranks are started.
//!
//! Nothing is installed here: if something is missing, the error has the command that installs it. Peers run
//! as shipped, with the settings that the requested transport needs and no tuning; [`Recipe::remark`] says
//! which.

use std::ffi::OsString;
use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::super::Failure;
use super::hosts::{Agents, Hosts, Place, host_name};
use super::layout::interfaces;
use super::operation::Transport;
use tenfold_console::Program;

const GLOO_PROGRAM: &str = include_str!("../peers/gloo.py");
const MPI_PROGRAM: &str = include_str!("../peers/mpi.c");

#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Implementation {
    Tenfold,
    Gloo,
    OpenMpi,
    Mpich,
    IntelMpi,
}

impl Implementation {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Implementation::Tenfold => "tenfold",
            Implementation::Gloo => "gloo",
            Implementation::OpenMpi => "openmpi",
            Implementation::Mpich => "mpich",
            Implementation::IntelMpi => "intelmpi",
        }
    }

    pub(crate) fn is_peer(self) -> bool {
        self != Implementation::Tenfold
    }
}

impl fmt::Display for Implementation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The names of peers for the user.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
#[value(rename_all = "lowercase")]
pub(crate) enum PeerName {
    /// Gloo as PyTorch ships it
    Gloo,
    OpenMpi,
    Mpich,
    IntelMpi,
    /// The first MPI that is found: Open MPI, MPICH, Intel MPI
    Mpi,
}

/// Where the ranks of a team run.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Site<'a> {
    Machine { ranks: usize, transport: Transport },
    Hosts(&'a Hosts),
}

impl Site<'_> {
    pub(crate) fn ranks(self) -> usize {
        match self {
            Site::Machine { ranks, .. } => ranks,
            Site::Hosts(hosts) => hosts.layout.ranks(),
        }
    }

    pub(crate) fn transport(self) -> Transport {
        match self {
            Site::Machine { transport, .. } => transport,
            Site::Hosts(_) => Transport::ByHost,
        }
    }

    pub(crate) fn hosts(&self) -> Option<&Hosts> {
        match self {
            Site::Machine { .. } => None,
            Site::Hosts(hosts) => Some(hosts),
        }
    }
}

/// Where the ranks of a team find each other, and us.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Meeting<'a> {
    pub(crate) team: &'a str,
    /// A Unix socket, which ranks in other network namespaces reach, too.
    pub(crate) coordinator: &'a Path,
    pub(crate) store: SocketAddr,
    pub(crate) site: Site<'a>,
    /// Programs that start processes on the hosts, if there are any.
    pub(crate) agents: Option<&'a Agents>,
}

/// A process to start, and where; on this machine if there are no hosts.
#[derive(Debug)]
pub(crate) struct Start {
    pub(crate) place: Option<Place>,
    pub(crate) command: Command,
}

/// How to start all ranks of one implementation.
#[derive(Clone, Debug)]
pub(crate) struct Recipe {
    pub(crate) implementation: Implementation,
    how: How,
}

#[derive(Clone, Debug)]
enum How {
    /// This program, as `bench collective-rank`.
    Own,
    Python(PathBuf),
    Mpi {
        launcher: PathBuf,
        program: PathBuf,
        root: Option<PathBuf>,
    },
}

impl Recipe {
    pub(crate) fn tenfold() -> Self {
        Recipe { implementation: Implementation::Tenfold, how: How::Own }
    }

    pub(crate) fn gloo(python: Option<&Path>) -> Self {
        Recipe { implementation: Implementation::Gloo, how: How::Python(python_with_torch(python)) }
    }

    /// Finds an MPI and compiles its program into `folder`.
    pub(crate) fn mpi(implementation: Implementation, folder: &Path) -> Result<Self, Failure> {
        let installed = Mpi::find(implementation).ok_or_else(|| {
            Failure::new(format!(
                "`--against {implementation}`: there is no {implementation} on this machine"
            ))
            .hint(install_hint(implementation))
        })?;
        let program = installed.compile(implementation, folder)?;
        let Mpi { launcher, root, .. } = installed;
        Ok(Recipe { implementation, how: How::Mpi { launcher, program, root } })
    }

    pub(crate) fn first_mpi(folder: &Path) -> Result<Self, Failure> {
        const ORDER: [Implementation; 3] =
            [Implementation::OpenMpi, Implementation::Mpich, Implementation::IntelMpi];
        match ORDER.into_iter().find(|&implementation| Mpi::find(implementation).is_some()) {
            Some(found) => Recipe::mpi(found, folder),
            None => Err(Failure::new("`--against mpi`: there is no MPI on this machine")
                .hint(install_hint(Implementation::OpenMpi))),
        }
    }

    /// The transport of its figures: Gloo only has TCP.
    pub(crate) fn transport(&self, asked: Transport) -> Transport {
        if self.implementation == Implementation::Gloo { Transport::Tcp } else { asked }
    }

    /// Whether its ranks can be started on hosts that we made.
    pub(crate) fn runs_on_hosts(&self) -> bool {
        !matches!(self.implementation, Implementation::Mpich | Implementation::IntelMpi)
    }

    /// The processes that make a team: one for each rank, or one that starts them all.
    pub(crate) fn starts(&self, meeting: Meeting<'_>) -> Vec<Start> {
        let hosts = meeting.site.hosts();
        let start = |rank: usize, command: Command| {
            let place = hosts.map(|hosts| Place::Host(hosts.layout.host_of(rank)));
            Start { place, command }
        };
        let ranks = 0..meeting.site.ranks();
        match &self.how {
            How::Own => ranks.map(|rank| start(rank, own(rank, meeting))).collect(),
            How::Python(python) => ranks.map(|rank| start(rank, gloo(python, rank, meeting))).collect(),
            How::Mpi { launcher, program, root } => {
                let mut command = Command::new(launcher);
                self.mpi_settings(&mut command, root.as_deref(), meeting);
                command.arg("-n").arg(meeting.site.ranks().to_string()).arg(program);
                command.arg(meeting.coordinator).arg(meeting.team);
                vec![Start { place: hosts.map(|_| Place::Switch), command }]
            }
        }
    }

    fn mpi_settings(&self, command: &mut Command, root: Option<&Path>, meeting: Meeting<'_>) {
        let tcp = meeting.site.transport() == Transport::Tcp;
        match self.implementation {
            Implementation::OpenMpi => {
                command.args(["--allow-run-as-root", "--oversubscribe"]);
                if meeting.site.ranks() > core_count() {
                    command.args(["--mca", "mpi_yield_when_idle", "1"]);
                }
                if tcp {
                    command.args(["--mca", "btl", "tcp,self", "--mca", "pml", "ob1"]);
                }
                if let (Some(hosts), Some(agents)) = (meeting.site.hosts(), meeting.agents) {
                    let name = |host| format!("{}:{}", host_name(host), hosts.layout.ranks_each);
                    let names: Vec<String> = (0..hosts.layout.hosts).map(name).collect();
                    // UCX would find out that the hosts have one kernel, and use memory between them.
                    command.args(["--mca", "btl", "vader,tcp,self", "--mca", "pml", "ob1"]);
                    // Its daemons stay our descendants, so that they end with us.
                    command.arg("--leave-session-attached").arg("--launch-agent").arg(&agents.daemon);
                    command.args(["--mca", "plm_rsh_no_tree_spawn", "1"]);
                    command.args(["--mca", "plm_rsh_agent"]).arg(&agents.shell);
                    // Its own folder may belong to another user who is root in a namespace.
                    let folder = agents.shell.parent().unwrap_or(Path::new("/tmp"));
                    command.args(["--mca", "orte_tmpdir_base"]).arg(folder);
                    command.args(["--map-by", "slot", "--host", &names.join(",")]);
                }
            }
            Implementation::IntelMpi => {
                let root = root.expect("Intel MPI was found by its folder");
                command.env("I_MPI_ROOT", root).env("FI_PROVIDER_PATH", root.join("lib"));
                command.env("LD_LIBRARY_PATH", joined(root.join("lib"), "LD_LIBRARY_PATH"));
                command.env("PATH", joined(root.join("bin"), "PATH"));
                command.env("I_MPI_FABRICS", if tcp { "ofi" } else { "shm" });
                if tcp {
                    // Its collectives would otherwise use shared memory within a host.
                    command.env("FI_PROVIDER", "tcp").env("I_MPI_COLL_INTRANODE", "pt2pt");
                }
            }
            Implementation::Mpich if tcp => {
                // The first disables shared memory between ranks of one host; the others are for builds on
                // UCX and on libfabric.
                command.env("MPIR_CVAR_NOLOCAL", "1").env("UCX_TLS", "tcp,self").env("FI_PROVIDER", "tcp");
            }
            Implementation::Mpich | Implementation::Tenfold | Implementation::Gloo => {}
        }
    }

    /// What a reader should know about how it ran.
    pub(crate) fn remark(&self, transport: Transport, ranks_max: usize) -> String {
        let tcp = transport == Transport::Tcp;
        let crowded = ranks_max > core_count();
        match self.implementation {
            Implementation::Tenfold => "not bound to cores".into(),
            Implementation::Gloo if transport == Transport::ByHost => {
                "its process group called from Python, GLOO_SOCKET_IFNAME with all links of a host".into()
            }
            Implementation::Gloo => {
                "its process group called from Python, TCP over loopback whatever the transport".into()
            }
            Implementation::OpenMpi => {
                let transport = match transport {
                    Transport::Tcp => "--mca btl tcp,self --mca pml ob1",
                    Transport::Shm => "its default transport",
                    Transport::ByHost => "--mca btl vader,tcp,self --mca pml ob1",
                };
                let patience = if crowded { ", mpi_yield_when_idle where ranks outnumber cores" } else { "" };
                format!("{transport}, --oversubscribe, its default binding{patience}")
            }
            Implementation::Mpich if tcp => "MPIR_CVAR_NOLOCAL=1 UCX_TLS=tcp,self FI_PROVIDER=tcp".into(),
            Implementation::Mpich => "its defaults".into(),
            Implementation::IntelMpi if tcp => {
                "I_MPI_FABRICS=ofi FI_PROVIDER=tcp I_MPI_COLL_INTRANODE=pt2pt, its default binding".into()
            }
            Implementation::IntelMpi => "I_MPI_FABRICS=shm, its default binding".into(),
        }
    }
}

pub(crate) fn core_count() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

fn own(rank: usize, meeting: Meeting<'_>) -> Command {
    let Meeting { team, coordinator, store, site, .. } = meeting;
    let mut command = Program::own().command();
    command.args(["bench", "collective-rank", "--team", team, "--coordinator"]).arg(coordinator);
    command.arg(format!("--store={store}"));
    command.arg(format!("--rank={rank}")).arg(format!("--ranks={}", site.ranks()));
    match site {
        Site::Machine { transport, .. } => command.env("TENFOLD_TRANSPORT", transport.name()),
        Site::Hosts(hosts) => {
            command.env_remove("TENFOLD_TRANSPORT").env("TENFOLD_INTERFACE", interfaces(hosts.limits.links))
        }
    };
    command
}

fn gloo(python: &Path, rank: usize, meeting: Meeting<'_>) -> Command {
    let Meeting { team, coordinator, store, site, .. } = meeting;
    let mut command = Command::new(python);
    command.args(["-c", GLOO_PROGRAM]).arg(coordinator).arg(team);
    command.args([rank, site.ranks()].map(|number| number.to_string()));
    command.args([store.ip().to_string(), store.port().to_string()]);
    if let Some(hosts) = site.hosts() {
        command.env("GLOO_SOCKET_IFNAME", interfaces(hosts.limits.links));
    } else if std::env::var_os("GLOO_SOCKET_IFNAME").is_none() {
        // Otherwise it looks up the host's name, for which not every machine has an address. The path is
        // loopback anyway.
        command.env("GLOO_SOCKET_IFNAME", if cfg!(target_os = "linux") { "lo" } else { "lo0" });
    }
    command
}

/// Puts a folder in front of the variable's value.
fn joined(first: PathBuf, variable: &str) -> OsString {
    let rest = std::env::var_os(variable).unwrap_or_default();
    let all =
        std::iter::once(first.clone()).chain(std::env::split_paths(&rest).filter(|path| path.is_absolute()));
    std::env::join_paths(all).unwrap_or_else(|_| first.into_os_string())
}

/// An MPI on this machine.
#[derive(Debug)]
struct Mpi {
    compiler: PathBuf,
    launcher: PathBuf,
    /// Its folder, if the compiler does not know it.
    root: Option<PathBuf>,
}

impl Mpi {
    fn find(implementation: Implementation) -> Option<Self> {
        match implementation {
            Implementation::OpenMpi => Mpi::in_path("openmpi", "Open MPI"),
            Implementation::Mpich => Mpi::in_path("mpich", "HYDRA"),
            Implementation::IntelMpi => Mpi::intel(),
            Implementation::Tenfold | Implementation::Gloo => None,
        }
    }

    /// Debian installs several side by side under different names. Elsewhere the plain name is the only one,
    /// and its launcher says which MPI it is.
    fn in_path(suffix: &str, signature: &str) -> Option<Self> {
        let named = |suffix: &str| {
            let (compiler, launcher) =
                (program(&format!("mpicc{suffix}"))?, program(&format!("mpirun{suffix}"))?);
            Some(Mpi { compiler, launcher, root: None })
        };
        named(&format!(".{suffix}")).or_else(|| {
            let plain = named("")?;
            let said = Command::new(&plain.launcher).arg("--version").stdin(Stdio::null()).output().ok()?;
            String::from_utf8_lossy(&said.stdout).contains(signature).then_some(plain)
        })
    }

    fn intel() -> Option<Self> {
        let folders =
            [std::env::var_os("I_MPI_ROOT").map(PathBuf::from), cache().map(|cache| cache.join("intel-mpi"))];
        folders.into_iter().flatten().find_map(|root| {
            let launcher = root.join("bin/mpiexec.hydra");
            let whole = launcher.is_file() && root.join("include/mpi.h").is_file();
            let compiler = program("cc").or_else(|| program("gcc"))?;
            whole.then_some(Mpi { compiler, launcher, root: Some(root) })
        })
    }

    fn compile(&self, implementation: Implementation, folder: &Path) -> Result<PathBuf, Failure> {
        let (source, program) = (folder.join("mpi.c"), folder.join(implementation.name()));
        std::fs::write(&source, MPI_PROGRAM)
            .map_err(|error| Failure::new(format!("cannot write `{}`: {error}", source.display())))?;
        let mut command = Command::new(&self.compiler);
        command.arg("-O2").arg("-o").arg(&program).arg(&source);
        if let Some(root) = &self.root {
            let library = root.join("lib");
            command.arg("-I").arg(root.join("include")).arg("-L").arg(&library).arg("-lmpi");
            command.arg("-Wl,-rpath").arg("-Xlinker").arg(&library);
        }
        let compiler = self.compiler.display();
        let output = command
            .stdin(Stdio::null())
            .output()
            .map_err(|error| Failure::new(format!("cannot start `{compiler}`: {error}")))?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            return Err(Failure::new(format!(
                "`{compiler}` cannot compile {implementation}'s program: {}",
                said.trim()
            )));
        }
        Ok(program)
    }
}

fn install_hint(implementation: Implementation) -> String {
    match implementation {
        Implementation::OpenMpi => "on Debian: apt-get install openmpi-bin libopenmpi-dev".into(),
        Implementation::Mpich => "on Debian: apt-get install mpich libmpich-dev".into(),
        _ => "python3 -m venv ~/.cache/tenfold/intel-mpi && ~/.cache/tenfold/intel-mpi/bin/pip install impi-rt \
              impi-devel, or name the folder of another installation with I_MPI_ROOT"
            .into(),
    }
}

fn program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join(name)).find(|file| file.is_file())
}

/// Where `./test` keeps its downloads.
pub(crate) fn cache() -> Option<PathBuf> {
    let folder = |variable| std::env::var_os(variable).map(PathBuf::from);
    folder("TENFOLD_CACHE")
        .or_else(|| folder("XDG_CACHE_HOME").map(|cache| cache.join("tenfold")))
        .or_else(|| folder("HOME").map(|home| home.join(".cache/tenfold")))
}

/// The given Python; otherwise the one that `./test` set up; otherwise any.
pub(crate) fn python_with_torch(named: Option<&Path>) -> PathBuf {
    named.map(Path::to_owned).or_else(cached_python).unwrap_or_else(|| "python3".into())
}

/// The Python with PyTorch that `./test` set up last.
fn cached_python() -> Option<PathBuf> {
    let pythons = std::fs::read_dir(cache()?).ok()?.filter_map(|entry| {
        let entry = entry.ok()?;
        let python = entry.path().join("bin/python");
        let ours = entry.file_name().to_str()?.starts_with("venv-") && python.is_file();
        ours.then_some((entry.metadata().ok()?.modified().ok()?, python))
    });
    pythons.max().map(|(_, python)| python)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn meeting() -> Meeting<'static> {
        Meeting {
            team: "t1",
            coordinator: Path::new("/tmp/orders"),
            store: SocketAddr::from(([127, 0, 0, 1], 7001)),
            site: Site::Machine { ranks: 3, transport: Transport::Tcp },
            agents: None,
        }
    }

    fn words(command: &Command) -> Vec<String> {
        command.get_args().map(|argument| argument.to_string_lossy().into_owned()).collect()
    }

    #[test]
    fn gloo_gets_a_process_for_each_rank_and_an_mpi_one_launcher() {
        let gloo = Recipe::gloo(Some(Path::new("/venv/python"))).starts(meeting());
        assert_eq!(gloo.len(), 3);
        assert_eq!(words(&gloo[2].command)[2..], ["/tmp/orders", "t1", "2", "3", "127.0.0.1", "7001"]);
        assert_eq!(gloo[2].place, None);

        let how = How::Mpi { launcher: "mpirun".into(), program: "/tmp/rank".into(), root: None };
        let mpi = Recipe { implementation: Implementation::OpenMpi, how }.starts(meeting());
        let line = words(&mpi[0].command).join(" ");
        assert_eq!(mpi.len(), 1);
        assert!(line.starts_with("--allow-run-as-root --oversubscribe"), "{line}");
        assert!(line.ends_with("--mca btl tcp,self --mca pml ob1 -n 3 /tmp/rank /tmp/orders t1"), "{line}");
    }

    #[test]
    fn intel_mpi_gets_its_folder_and_its_fabric() {
        let how =
            How::Mpi { launcher: "mpiexec".into(), program: "/tmp/rank".into(), root: Some("/intel".into()) };
        let starts = Recipe { implementation: Implementation::IntelMpi, how }.starts(meeting());
        let set = |name: &str| {
            let value =
                starts[0].command.get_envs().find(|(key, _)| *key == name).and_then(|(_, value)| value);
            value.map(|value| value.to_string_lossy().into_owned()).unwrap_or_default()
        };
        assert_eq!((set("I_MPI_FABRICS"), set("FI_PROVIDER")), ("ofi".into(), "tcp".into()));
        assert_eq!(set("I_MPI_ROOT"), "/intel");
        assert!(set("PATH").starts_with("/intel/bin:"), "{}", set("PATH"));
    }

    #[test]
    fn a_missing_program_is_named_with_the_command_that_installs_it() {
        for implementation in [Implementation::OpenMpi, Implementation::Mpich, Implementation::IntelMpi] {
            assert!(install_hint(implementation).contains("install"), "{implementation}");
        }
        assert!(Mpi::in_path("no-such-mpi", "a signature that no launcher prints").is_none());
    }

    #[test]
    fn figures_of_gloo_say_tcp_whatever_was_asked_for() {
        assert_eq!(Recipe::gloo(None).transport(Transport::Shm), Transport::Tcp);
    }
}
