//! The implementations that recover, and how their ranks are started.
//!
//! What is missing excludes a contender, with a reason for the reader; the others are measured.

use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use tenfold_console::Program;

use super::super::Failure;
use super::super::collectives::hosts::Place;
use super::super::collectives::layout::interfaces;
use super::super::collectives::operation::Transport;
use super::super::collectives::peer::{Site, Start, core_count};
use super::ulfm::Ulfm;

const GLOO_PROGRAM: &str = include_str!("../peers/recover_gloo.py");

const GLOO_REMARK: &str = "`abort` after the error, handles through the store, `_reconfigure`; TCP whatever the \
                           transport; its survivors know beforehand which rank dies";
const ULFM_REMARK: &str = "MPIX_Comm_revoke and MPIX_Comm_shrink after the error; it has no store, rank 0 dies instead; \
                           between hosts without its component `han`";

#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Implementation {
    Tenfold,
    Gloo,
    Ulfm,
}

impl fmt::Display for Implementation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Implementation::Tenfold => "tenfold",
            Implementation::Gloo => "gloo",
            Implementation::Ulfm => "ulfm",
        })
    }
}

/// The names of peers for the user.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum PeerName {
    /// Gloo's reconfiguration, as PyTorch ships it since 2.14
    Gloo,
    /// Open MPI 5: revoke and shrink
    Ulfm,
}

/// What the ranks of one round have in common.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scene<'a> {
    pub(crate) site: Site<'a>,
    pub(crate) victim: usize,
    pub(crate) bytes: usize,
    pub(crate) timeout: Duration,
}

/// An implementation and what starts its ranks.
#[derive(Debug)]
pub(crate) enum Contender {
    /// This program, as `bench recover-rank`.
    Tenfold,
    Gloo {
        python: PathBuf,
    },
    Ulfm(Ulfm),
}

impl Contender {
    pub(crate) fn implementation(&self) -> Implementation {
        match self {
            Contender::Tenfold => Implementation::Tenfold,
            Contender::Gloo { .. } => Implementation::Gloo,
            Contender::Ulfm(_) => Implementation::Ulfm,
        }
    }

    /// Ranks of an MPI find each other without one.
    pub(crate) fn needs_store(&self) -> bool {
        !matches!(self, Contender::Ulfm(_))
    }

    /// The transport of its figures: Gloo only has TCP.
    pub(crate) fn transport(&self, asked: Transport) -> Transport {
        if matches!(self, Contender::Gloo { .. }) { Transport::Tcp } else { asked }
    }

    /// The processes that make a crew: one for each rank, or one that starts them all.
    pub(crate) fn starts(
        &self,
        scene: Scene<'_>,
        team: &str,
        coordinator: &Path,
    ) -> Result<Vec<Start>, Failure> {
        let hosts = scene.site.hosts();
        let start = |rank: usize, command: Command| {
            let place = hosts.map(|hosts| Place::Host(hosts.layout.host_of(rank)));
            Start { place, command }
        };
        let ranks = 0..scene.site.ranks();
        Ok(match self {
            Contender::Tenfold => {
                ranks.map(|rank| start(rank, own(rank, scene, team, coordinator))).collect()
            }
            Contender::Gloo { python } => {
                let command = |rank| gloo(python, rank, scene, team, coordinator);
                ranks.map(|rank| start(rank, command(rank))).collect()
            }
            Contender::Ulfm(ulfm) => {
                let mut command = ulfm.launch(scene.site)?;
                command.arg(coordinator).arg(team).arg(scene.bytes.to_string());
                vec![Start { place: hosts.map(|_| Place::Switch), command }]
            }
        })
    }

    /// What a reader should know about how it ran.
    pub(crate) fn remark(&self, ranks_max: usize) -> String {
        match self {
            Contender::Tenfold => "`Group::shrink` after the error".into(),
            Contender::Gloo { .. } => GLOO_REMARK.into(),
            Contender::Ulfm(_) if ranks_max > core_count() => {
                format!("{ULFM_REMARK}; mpi_yield_when_idle where ranks outnumber cores")
            }
            Contender::Ulfm(_) => ULFM_REMARK.into(),
        }
    }
}

fn own(rank: usize, scene: Scene<'_>, team: &str, coordinator: &Path) -> Command {
    let mut command = Program::own().command();
    command.args(["bench", "recover-rank", "--team", team, "--coordinator"]).arg(coordinator);
    command.arg(format!("--rank={rank}")).arg(format!("--ranks={}", scene.site.ranks()));
    command.arg(format!("--bytes={}", scene.bytes));
    command.arg(format!("--timeout-ms={}", scene.timeout.as_millis()));
    match scene.site {
        Site::Machine { transport, .. } => command.env("TENFOLD_TRANSPORT", transport.name()),
        Site::Hosts(hosts) => {
            command.env_remove("TENFOLD_TRANSPORT").env("TENFOLD_INTERFACE", interfaces(hosts.limits.links))
        }
    };
    command
}

fn gloo(python: &Path, rank: usize, scene: Scene<'_>, team: &str, coordinator: &Path) -> Command {
    let mut command = Command::new(python);
    command.args(["-c", GLOO_PROGRAM]).arg(coordinator).arg(team);
    let numbers = [rank, scene.site.ranks(), scene.bytes, scene.victim];
    command.args(numbers.map(|number| number.to_string())).arg(scene.timeout.as_secs_f64().to_string());
    if let Some(hosts) = scene.site.hosts() {
        command.env("GLOO_SOCKET_IFNAME", interfaces(hosts.limits.links));
    } else if std::env::var_os("GLOO_SOCKET_IFNAME").is_none() {
        // Otherwise it looks up the host's name, for which not every machine has an address.
        command.env("GLOO_SOCKET_IFNAME", if cfg!(target_os = "linux") { "lo" } else { "lo0" });
    }
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scene(ranks: usize) -> Scene<'static> {
        let site = Site::Machine { ranks, transport: Transport::Tcp };
        Scene { site, victim: 2, bytes: 4096, timeout: Duration::from_secs(20) }
    }

    #[test]
    fn gloo_gets_a_process_for_each_rank_and_an_mpi_one_launcher() {
        let gloo = Contender::Gloo { python: "/venv/python".into() };
        let starts = gloo.starts(scene(4), "t1", Path::new("/tmp/orders")).unwrap();
        let words: Vec<_> = starts[3].command.get_args().skip(2).map(|word| word.to_string_lossy()).collect();
        assert_eq!(starts.len(), 4);
        assert_eq!(words, ["/tmp/orders", "t1", "3", "4", "4096", "2", "20"]);
        assert!(starts[3].place.is_none());

        let ulfm = Contender::Ulfm(Ulfm { root: "/openmpi".into(), program: "/tmp/ulfm".into() });
        let starts = ulfm.starts(scene(4), "t1", Path::new("/tmp/orders")).unwrap();
        let words: Vec<_> = starts[0].command.get_args().map(|word| word.to_string_lossy()).collect();
        assert_eq!(starts.len(), 1);
        assert!(words.join(" ").ends_with("-n 4 /tmp/ulfm /tmp/orders t1 4096"), "{words:?}");
    }

    #[test]
    fn figures_of_gloo_say_tcp_whatever_was_asked_for() {
        let gloo = Contender::Gloo { python: "python3".into() };
        assert_eq!(gloo.transport(Transport::Shm), Transport::Tcp);
        assert_eq!(Contender::Tenfold.transport(Transport::Shm), Transport::Shm);
    }
}
