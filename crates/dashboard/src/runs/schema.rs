//! What launchers write into the store about a job, as far as it is shown.
//!
//! The writers are the launcher's `rendezvous/state.rs` and `inspect.rs`. The types here are lenient on purpose: a newer or
//! older launcher may have written the text, or any other client. Unknown fields are ignored and known ones may be missing.

use std::fmt;
use std::marker::PhantomData;

use serde::de::{Error as _, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

use super::super::collectives::Collective;
use super::{COLLECTIVES_MAX, LOST_AFTER, LOST_AFTER_MIN, NODES_MAX};

/// A job's state, as far as it is shown.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct State {
    pub(super) version: u64,
    pub(super) job: u64,
    pub(super) round: u64,
    pub(super) phase: String,
    pub(super) nodes_min: usize,
    pub(super) nodes_max: usize,
    pub(super) max_restarts: u64,
    pub(super) restarts_used: u64,
    #[serde(deserialize_with = "bounded")]
    pub(super) members: Vec<Member>,
    #[serde(deserialize_with = "bounded")]
    pub(super) spares: Vec<NodeInfo>,
    pub(super) failure: Option<Failure>,
    pub(super) outcome: Option<String>,
    pub(super) reason: String,
}

impl State {
    pub(super) fn nodes(&self) -> impl Iterator<Item = &NodeInfo> {
        self.members.iter().map(|member| &member.node).chain(&self.spares)
    }
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct Member {
    pub(super) node: NodeInfo,
    pub(super) rank: Option<usize>,
    pub(super) ready: bool,
    pub(super) done: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct NodeInfo {
    pub(super) id: String,
    pub(super) host: String,
    pub(super) ranks: usize,
    pub(super) role: String,
    pub(super) fixed_rank: Option<usize>,
    pub(super) worker_store: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct Failure {
    pub(super) round: u64,
    pub(super) node_rank: usize,
    pub(super) host: String,
    pub(super) rank: usize,
    pub(super) summary: String,
    pub(super) text: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct NodeText {
    pub(super) beat: u64,
    pub(super) silence_max_seconds: Option<f64>,
    #[serde(deserialize_with = "lenient")]
    pub(super) ranks: Vec<RankStatus>,
}

impl NodeText {
    pub(super) fn silence_max(&self) -> f64 {
        self.silence_max_seconds.unwrap_or(LOST_AFTER).max(LOST_AFTER_MIN)
    }
}

/// What a launcher knows of one of its ranks.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct RankStatus {
    pub(super) rank: Option<usize>,
    pub(super) local_rank: Option<usize>,
    pub(super) pid: Option<u64>,
    pub(super) state: String,
    pub(super) end: Option<String>,
    pub(super) store_connections: Vec<String>,
    pub(super) cpu_seconds: Option<f64>,
    pub(super) memory_bytes: Option<u64>,
    pub(super) last_output_seconds: Option<f64>,
    pub(super) started_unix: Option<f64>,
    /// Its calls in its groups, if it reports them.
    pub(super) collectives: Vec<Collective>,
}

impl RankStatus {
    /// Its calls in its groups; nothing if it has exited.
    pub(super) fn under_way(&self) -> &[Collective] {
        let count = if self.state == "ended" { 0 } else { self.collectives.len().min(COLLECTIVES_MAX) };
        &self.collectives[..count]
    }
}

/// A list that is refused as soon as it is too long: two bytes of text may become hundreds in memory.
fn bounded<'de, D: Deserializer<'de>, T: Deserialize<'de>>(deserializer: D) -> Result<Vec<T>, D::Error> {
    struct Bounded<T>(PhantomData<T>);
    impl<'de, T: Deserialize<'de>> Visitor<'de> for Bounded<T> {
        type Value = Vec<T>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "a list of at most {NODES_MAX} nodes")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<T>, A::Error> {
            let mut items = Vec::new();
            while let Some(item) = list.next_element()? {
                if items.len() == NODES_MAX {
                    return Err(A::Error::invalid_length(NODES_MAX + 1, &self));
                }
                items.push(item);
            }
            Ok(items)
        }
    }
    deserializer.deserialize_seq(Bounded(PhantomData))
}

/// The ranks that can be read, skipping everything else.
fn lenient<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<RankStatus>, D::Error> {
    let ranks = Option::<Vec<serde_json::Value>>::deserialize(deserializer)?.unwrap_or_default();
    Ok(ranks.into_iter().filter_map(|rank| serde_json::from_value(rank).ok()).collect())
}
