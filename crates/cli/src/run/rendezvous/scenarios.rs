//! One scenario for each rule.

use super::*;

pub(super) fn settings(nodes_min: usize, nodes_max: usize) -> Settings {
    Settings {
        run_id: "job".into(),
        nodes_min,
        nodes_max,
        max_restarts: 3,
        join_timeout: Duration::from_secs(600),
        last_call: Duration::from_secs(30),
        beat_interval: Duration::from_secs(5),
        beats_missed_max: 3,
    }
}

pub(super) fn node(id: &str) -> NodeInfo {
    let (id, host, role) = (id.into(), id.into(), "default".into());
    NodeInfo { id, host, ranks: 1, role, fixed_rank: None, worker_store: None }
}

pub(super) fn failure(round: u64, host: &str, rank: usize) -> JobFailure {
    let (host, summary, text) = (host.into(), "exit code 3".into(), "exit code 3\n  | oh no".into());
    JobFailure { round, node_rank: rank, host, rank, summary, text }
}
