//! What a rank finds in its environment: torchrun's variables, with torchrun's meaning.

use std::ffi::OsString;

/// What all ranks of one run have in common.
#[derive(Clone, Debug)]
pub(super) struct Job {
    pub(super) ranks: usize,
    /// Of the launcher's store, on 127.0.0.1.
    pub(super) store_port: u16,
    /// Differs between runs.
    pub(super) id: String,
}

/// The variables of one rank; `inherited` is what the launcher itself was given, which some of them respect.
pub(super) fn environment(
    rank: usize,
    job: &Job,
    inherited: impl Fn(&str) -> Option<OsString>,
) -> Vec<(&'static str, String)> {
    let (own, all) = (rank.to_string(), job.ranks.to_string());
    let (zero, one) = ("0".to_string(), "1".to_string());
    let mut variables = vec![
        ("RANK", own.clone()),
        ("LOCAL_RANK", own.clone()),
        ("ROLE_RANK", own),
        ("WORLD_SIZE", all.clone()),
        ("LOCAL_WORLD_SIZE", all.clone()),
        ("ROLE_WORLD_SIZE", all),
        ("ROLE_NAME", "default".to_string()),
        ("GROUP_RANK", zero.clone()), // nodes, of which there is one
        ("GROUP_WORLD_SIZE", one.clone()),
        ("MASTER_ADDR", "127.0.0.1".to_string()),
        ("MASTER_PORT", job.store_port.to_string()),
        // Else PyTorch's rank 0 would host a store itself, on a port that is taken.
        ("TORCHELASTIC_USE_AGENT_STORE", "True".to_string()),
        ("TORCHELASTIC_RUN_ID", job.id.clone()),
        ("TORCHELASTIC_RESTART_COUNT", zero.clone()),
        ("TORCHELASTIC_MAX_RESTARTS", zero),
    ];
    let mut defaults =
        vec![("PYTHONUNBUFFERED", one.clone()), ("TORCH_NCCL_ASYNC_ERROR_HANDLING", one.clone())];
    if job.ranks > 1 {
        defaults.push(("OMP_NUM_THREADS", one)); // ranks with a thread for every core each would fight for them
    }
    variables.extend(defaults.into_iter().filter(|(name, _)| inherited(name).is_none()));
    variables
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(ranks: usize, inherited: &[&str]) -> Vec<&'static str> {
        let job = Job { ranks, store_port: 1, id: "job".into() };
        let inherited = |name: &str| inherited.contains(&name).then(OsString::new);
        environment(0, &job, inherited).into_iter().map(|(name, _)| name).collect()
    }

    #[test]
    fn what_the_user_chose_is_kept() {
        assert!(names(2, &[]).contains(&"OMP_NUM_THREADS"));
        assert!(!names(2, &["OMP_NUM_THREADS"]).contains(&"OMP_NUM_THREADS"));
        assert!(names(2, &[]).contains(&"PYTHONUNBUFFERED"));
        assert!(!names(2, &["PYTHONUNBUFFERED"]).contains(&"PYTHONUNBUFFERED"));
    }

    #[test]
    fn who_runs_under_a_launcher_within_a_rank_gets_the_inner_ones_place() {
        assert!(names(2, &["RANK", "MASTER_PORT"]).contains(&"RANK"));
        assert!(names(2, &["RANK", "MASTER_PORT"]).contains(&"MASTER_PORT"));
    }

    #[test]
    fn a_rank_that_is_alone_may_use_every_core() {
        assert!(!names(1, &[]).contains(&"OMP_NUM_THREADS"));
    }
}
