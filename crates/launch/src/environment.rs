//! The environment of a rank: torchrun's variables, with torchrun's meaning.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::Path;

use super::mark::{self, Mark};
use super::progress;
use super::rank::Seat;
use super::rendezvous::Assignment;
use super::worker_sockets;

/// A number that grows from round to round and from job to job. A program that stores something for the next
/// round (a checkpoint) can refuse a number that is lower than the last it has seen: it comes from ranks that
/// should have exited.
const FENCE: &str = "TENFOLD_FENCE";

/// The address of the store itself, for ranks whose MASTER_ADDR and MASTER_PORT are those of a relay. The runtime
/// reads it, too: it shows which of this host's addresses other hosts can reach.
const STORE: &str = "TENFOLD_STORE";

/// Says that the launcher replaces processes that die: `recover`. The runtime reads both; see
/// `docs/recovery.md`.
const ON_FAILURE: &str = "TENFOLD_ON_FAILURE";
/// The name of a process that was not started with the round: it joins ranks that run.
const JOINING: &str = "TENFOLD_JOINING";

/// What all ranks of one node have in common, in all rounds.
#[derive(Clone, Debug)]
pub(super) struct Job {
    pub(super) run_id: String,
    pub(super) role: String,
    pub(super) max_restarts: u64,
    /// In torchrun's form: the names, with commas.
    pub(super) signals: String,
    pub(super) virtual_local_rank: bool,
    /// `--on-failure=recover`
    pub(super) recovers: bool,
    /// What the guard looks for.
    pub(super) mark: String,
}

/// The position of one rank in one round.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place<'a> {
    /// None for a spare.
    pub(super) seat: Option<Seat>,
    /// The name of a process that was not started with the round.
    pub(super) serial: Option<&'a str>,
    /// Its own mark, if it has one besides the run's.
    pub(super) mark: Option<&'a Mark>,
    pub(super) assignment: &'a Assignment,
    /// Host and port of the ranks' store.
    pub(super) store: (&'a str, u16),
    /// The store itself, if that is the address of a relay.
    pub(super) behind: Option<SocketAddr>,
    /// Where PyTorch's `record` writes its error.
    pub(super) error_file: Option<&'a Path>,
    /// Where tenfold's runtime writes the rank's progress.
    pub(super) progress: Option<&'a Path>,
    /// The socket on which the rank answers questions.
    pub(super) worker_server: Option<&'a Path>,
}

/// What a process must not inherit: it may have been set for this launcher, as a rank of another one.
pub(super) fn removed(job: &Job, place: &Place<'_>) -> Vec<&'static str> {
    let is_spare = place.seat.is_none();
    let names = [
        ("RANK", is_spare),
        ("LOCAL_RANK", is_spare),
        ("ROLE_RANK", is_spare),
        (ON_FAILURE, !job.recovers),
        (JOINING, place.serial.is_none()),
    ];
    names.into_iter().filter(|(_, is_removed)| *is_removed).map(|(name, _)| name).collect()
}

/// The variables of one rank; `inherited` is the launcher's own environment, which some of them respect.
pub(super) fn environment(
    job: &Job,
    place: Place<'_>,
    inherited: impl Fn(&str) -> Option<OsString>,
) -> Result<Vec<(&'static str, OsString)>, String> {
    let Place { seat, serial, assignment, store, behind, error_file, progress, worker_server, .. } = place;
    let local_ranks = assignment.node().ranks;
    let mut variables: Vec<(&'static str, OsString)> = Vec::new();
    let mut set = |name: &'static str, value: String| variables.push((name, value.into()));
    if let Some(Seat { number, local_rank }) = seat {
        set("RANK", number.to_string());
        set("LOCAL_RANK", if job.virtual_local_rank { 0 } else { local_rank }.to_string());
        // A rank of another node that a spare of this one took over keeps its distance.
        let in_role = (assignment.first_role_rank() + number).saturating_sub(assignment.first_rank());
        set("ROLE_RANK", in_role.to_string());
    }
    if job.recovers {
        set(ON_FAILURE, "recover".to_string());
    }
    if let Some(serial) = serial {
        set(JOINING, serial.to_string());
    }
    set("WORLD_SIZE", assignment.world_size.to_string());
    set("LOCAL_WORLD_SIZE", local_ranks.to_string());
    set("GROUP_RANK", assignment.node_rank.to_string());
    set("GROUP_WORLD_SIZE", assignment.nodes.to_string());
    set("ROLE_NAME", job.role.clone());
    set("ROLE_WORLD_SIZE", assignment.role_world_size().to_string());
    set("MASTER_ADDR", store.0.to_string());
    set("MASTER_PORT", store.1.to_string());
    match behind {
        Some(address) => set(STORE, address.to_string()),
        // A nested launcher: its ranks have another store than it has itself.
        None if inherited(STORE).is_some() => set(STORE, String::new()),
        None => {}
    }
    // Otherwise PyTorch's rank 0 would host a store itself, on a port that is taken.
    set("TORCHELASTIC_USE_AGENT_STORE", "True".to_string());
    set("TORCHELASTIC_RUN_ID", job.run_id.clone());
    // PyTorch puts it in front of all keys of a round, so it grows with every round, even without a failure.
    set("TORCHELASTIC_RESTART_COUNT", assignment.round.to_string());
    set(FENCE, assignment.fence().to_string());
    set("TORCHELASTIC_MAX_RESTARTS", job.max_restarts.to_string());
    set("TORCHELASTIC_SIGNALS_TO_HANDLE", job.signals.clone());
    set(mark::VARIABLE, place.mark.map_or_else(|| job.mark.clone(), |own| own.beside(&job.mark)));
    let mut defaults = vec![("PYTHONUNBUFFERED", "1"), ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")];
    if local_ranks > 1 {
        // Otherwise each rank would start a thread for every core; Rust programs (candle) read rayon's
        // variable.
        defaults.extend([("OMP_NUM_THREADS", "1"), ("RAYON_NUM_THREADS", "1")]);
    }
    for (name, value) in defaults {
        if inherited(name).is_none() {
            set(name, value.to_string());
        }
    }
    variables.extend(error_file.map(|file| ("TORCHELASTIC_ERROR_FILE", file.into())));
    variables.extend(progress.map(|folder| (progress::VARIABLE, folder.into())));
    variables.extend(worker_server.map(|socket| (worker_sockets::VARIABLE, socket.into())));
    if let Some(seat) = seat.filter(|_| job.virtual_local_rank) {
        variables.extend(own_device(seat.local_rank, inherited)?);
    }
    Ok(variables)
}

/// The only device that a rank sees; if AMD's variable is set, it takes precedence, as in PyTorch.
fn own_device(
    local_rank: usize,
    inherited: impl Fn(&str) -> Option<OsString>,
) -> Result<Vec<(&'static str, OsString)>, String> {
    const NVIDIA: &str = "CUDA_VISIBLE_DEVICES";
    const AMD: &str = "HIP_VISIBLE_DEVICES";
    let amd = inherited(AMD).filter(|devices| !devices.is_empty());
    let (name, visible) = if amd.is_some() { (AMD, amd.clone()) } else { (NVIDIA, inherited(NVIDIA)) };
    let device = match &visible {
        None => local_rank.to_string(),
        Some(devices) => {
            let devices = devices.to_string_lossy();
            let device = devices.split(',').nth(local_rank).map(|device| device.trim().to_string());
            device.ok_or_else(|| {
                format!("--virtual-local-rank: no device for local rank {local_rank} in {name}={devices}")
            })?
        }
    };
    let names = [NVIDIA].into_iter().chain(amd.map(|_| AMD));
    Ok(names.map(|name| (name, OsString::from(&device))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rendezvous::NodeInfo;

    fn node(ranks: usize, role: &str) -> NodeInfo {
        NodeInfo {
            id: "id".into(),
            host: "host".into(),
            ranks,
            role: role.into(),
            fixed_rank: None,
            worker_store: None,
        }
    }

    fn job(virtual_local_rank: bool) -> Job {
        Job {
            run_id: "job".into(),
            role: "trainer".into(),
            max_restarts: 3,
            signals: "SIGTERM".into(),
            virtual_local_rank,
            recovers: false,
            mark: "mark".into(),
        }
    }

    fn variables(
        local_rank: usize,
        ranks: usize,
        job: &Job,
        inherited: &[(&str, &str)],
    ) -> Result<Vec<(&'static str, OsString)>, String> {
        variables_behind(None, local_rank, ranks, job, inherited)
    }

    fn variables_behind(
        behind: Option<SocketAddr>,
        local_rank: usize,
        ranks: usize,
        job: &Job,
        inherited: &[(&str, &str)],
    ) -> Result<Vec<(&'static str, OsString)>, String> {
        let nodes = vec![node(3, "trainer"), node(2, "reader"), node(ranks, "trainer")];
        let assignment = Assignment { job: 2, round: 4, ..Assignment::among(&nodes, 2) };
        let number = assignment.first_rank() + local_rank;
        let place = Place {
            seat: Some(Seat { number, local_rank }),
            serial: None,
            mark: None,
            assignment: &assignment,
            store: ("a", 7),
            behind,
            error_file: Some(Path::new("/e.json")),
            progress: Some(Path::new("/p")),
            worker_server: Some(Path::new("/w.sock")),
        };
        let inherited =
            |name: &str| inherited.iter().find(|(other, _)| *other == name).map(|(_, value)| value.into());
        environment(job, place, inherited)
    }

    #[test]
    fn processes_that_join_later_know_it_and_a_spare_has_no_rank() {
        let nodes = vec![node(2, "reader"), node(3, "trainer")];
        let assignment = Assignment::among(&nodes, 1);
        let job = Job { recovers: true, ..job(false) };
        let (own, store) = (Mark::parse(&"a".repeat(32)).unwrap(), ("a", 7));
        let place = |seat, serial| Place {
            seat,
            serial,
            mark: Some(&own),
            assignment: &assignment,
            store,
            behind: None,
            error_file: None,
            progress: None,
            worker_server: None,
        };
        let names = ["RANK", "LOCAL_RANK", "ROLE_RANK", "WORLD_SIZE", ON_FAILURE, JOINING];
        let found = |seat, serial| {
            let variables = environment(&job, place(seat, serial), |_| None).unwrap();
            let value = |name: &str| {
                let found = variables.iter().find(|(other, _)| *other == name);
                found.map_or("-".into(), |(_, value)| value.clone().into_string().unwrap())
            };
            assert_eq!(value(mark::VARIABLE), format!("mark,{}", "a".repeat(32)));
            (names.map(value).join(" "), removed(&job, &place(seat, serial)).join(" "))
        };
        let seat = Some(Seat { number: 3, local_rank: 1 });
        assert_eq!(found(seat, None), ("3 1 1 5 recover -".into(), JOINING.into()));
        assert_eq!(found(seat, Some("1-7")), ("3 1 1 5 recover 1-7".into(), String::new()));
        let without = "RANK LOCAL_RANK ROLE_RANK".to_owned();
        assert_eq!(found(None, Some("1-7")), ("- - - 5 recover 1-7".into(), without));
        // A rank of another node that a spare took over.
        let seat = Some(Seat { number: 1, local_rank: 1 });
        assert_eq!(found(seat, Some("1-7")).0, "1 1 0 5 recover 1-7");
        let removed = removed(&Job { recovers: false, ..job.clone() }, &place(seat, None));
        assert_eq!(removed, [ON_FAILURE, JOINING]);
    }

    #[test]
    fn a_rank_gets_its_place_among_nodes_and_roles() {
        let mut found: Vec<(&str, String)> = variables(1, 2, &job(false), &[])
            .unwrap()
            .into_iter()
            .map(|(name, value)| (name, value.into_string().unwrap()))
            .collect();
        found.sort();
        let expected = [
            ("GROUP_RANK", "2"),
            ("GROUP_WORLD_SIZE", "3"),
            ("LOCAL_RANK", "1"),
            ("LOCAL_WORLD_SIZE", "2"),
            ("MASTER_ADDR", "a"),
            ("MASTER_PORT", "7"),
            ("OMP_NUM_THREADS", "1"),
            ("PYTHONUNBUFFERED", "1"),
            ("RANK", "6"),
            ("RAYON_NUM_THREADS", "1"),
            ("ROLE_NAME", "trainer"),
            ("ROLE_RANK", "4"),
            ("ROLE_WORLD_SIZE", "5"),
            ("TENFOLD_FENCE", "8589934596"),
            ("TENFOLD_PROGRESS", "/p"),
            ("TENFOLD_RUN_MARK", "mark"),
            ("TENFOLD_WORKER_SERVER", "/w.sock"),
            ("TORCHELASTIC_ERROR_FILE", "/e.json"),
            ("TORCHELASTIC_MAX_RESTARTS", "3"),
            ("TORCHELASTIC_RESTART_COUNT", "4"),
            ("TORCHELASTIC_RUN_ID", "job"),
            ("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM"),
            ("TORCHELASTIC_USE_AGENT_STORE", "True"),
            ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
            ("WORLD_SIZE", "7"),
        ];
        assert_eq!(found, expected.map(|(name, value)| (name, value.to_string())));
    }

    fn names(ranks: usize, inherited: &[(&str, &str)]) -> Vec<&'static str> {
        variables(0, ranks, &job(false), inherited).unwrap().into_iter().map(|(name, _)| name).collect()
    }

    #[test]
    fn variables_that_the_user_set_are_kept() {
        let threads = ["OMP_NUM_THREADS", "RAYON_NUM_THREADS"];
        for name in threads.into_iter().chain(["PYTHONUNBUFFERED", "TORCH_NCCL_ASYNC_ERROR_HANDLING"]) {
            assert!(names(2, &[]).contains(&name));
            assert!(!names(2, &[(name, "7")]).contains(&name));
        }
        let alone = names(1, &[]);
        assert!(!threads.iter().any(|name| alone.contains(name)), "a rank that is alone may use every core");
    }

    #[test]
    fn a_rank_of_a_nested_launcher_gets_the_inner_place() {
        assert!(names(2, &[("RANK", "1"), ("MASTER_PORT", "1")]).contains(&"RANK"));
        assert!(names(2, &[("RANK", "1"), ("MASTER_PORT", "1")]).contains(&"MASTER_PORT"));
    }

    #[test]
    fn a_rank_behind_a_relay_is_given_the_address_of_the_store_itself() {
        let store_of = |behind: Option<&str>, inherited: &[(&str, &str)]| {
            let behind = behind.map(|address| address.parse().unwrap());
            let variables = variables_behind(behind, 0, 2, &job(false), inherited).unwrap();
            variables.into_iter().find(|(name, _)| *name == STORE).map(|(_, value)| value)
        };
        assert_eq!(store_of(None, &[]), None);
        assert_eq!(store_of(Some("10.0.0.1:29500"), &[]), Some("10.0.0.1:29500".into()));
        assert_eq!(store_of(Some("[::1]:7"), &[(STORE, "10.0.0.1:29500")]), Some("[::1]:7".into()));
        let nested = store_of(None, &[(STORE, "10.0.0.1:29500")]);
        assert_eq!(nested, Some("".into()), "that of the outer job");
    }

    #[test]
    fn a_virtual_local_rank_sees_one_device() {
        let device = |inherited: &[(&str, &str)]| {
            let variables = variables(1, 2, &job(true), inherited)?;
            let of = |name: &str| {
                variables
                    .iter()
                    .find(|(other, _)| *other == name)
                    .map(|(_, value)| value.to_str().unwrap().to_string())
            };
            Ok::<_, String>((of("LOCAL_RANK"), of("CUDA_VISIBLE_DEVICES"), of("HIP_VISIBLE_DEVICES")))
        };
        let some = |text: &str| Some(text.to_string());
        assert_eq!(device(&[]), Ok((some("0"), some("1"), None)));
        assert_eq!(device(&[("CUDA_VISIBLE_DEVICES", "4, 6")]), Ok((some("0"), some("6"), None)));
        let both = [("CUDA_VISIBLE_DEVICES", "4,6"), ("HIP_VISIBLE_DEVICES", "2,3")];
        assert_eq!(device(&both), Ok((some("0"), some("3"), some("3"))));
        assert_eq!(
            device(&[("CUDA_VISIBLE_DEVICES", "4")]),
            Err("--virtual-local-rank: no device for local rank 1 in CUDA_VISIBLE_DEVICES=4".into())
        );
    }
}
