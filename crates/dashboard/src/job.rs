//! What launchers write into the store about a job: the names of its keys, and their JSON values.
//!
//! One definition for the launcher, which writes, and for the dashboard, which only reads. The types are
//! lenient on purpose: a newer or older launcher may have written a text, or any other client. Unknown fields
//! are ignored, and known ones may be missing. The launcher checks what it relies on after parsing.
//!
//! The [`Head`] is the only value that changes in place, by compare_set. It is small, because all nodes read
//! it. The nodes of the job are in *pages*, and the report of a failure is in a value of its own. These are
//! never changed: a new text gets a new [`Stamp`], and the head names the stamps that count.

use std::fmt;
use std::marker::PhantomData;

use serde::de::{DeserializeOwned, Error as _, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

/// Nodes of one job, spares included.
pub const NODES_MAX: usize = 16_384;
/// Nodes that share a page, on average.
const PAGE_NODES: usize = 32;
/// Pages of one job.
pub const PAGES_MAX: usize = NODES_MAX / PAGE_NODES;
/// Lists the jobs, in the order in which they began.
pub const RUNS: &str = "tenfold/runs";

/// The names of a job's keys.
#[derive(Clone, Debug)]
pub struct Keys {
    prefix: String,
}

impl Keys {
    /// The keys of the job with this run id.
    pub fn new(run_id: &str) -> Keys {
        Keys { prefix: format!("tenfold/run/{run_id}") }
    }
    /// The [`Head`] of the job's state.
    pub fn state(&self) -> String {
        format!("{}/state", self.prefix)
    }
    /// Appears when the state has changed in a way that concerns all nodes.
    pub fn turn(&self, turn: u64) -> String {
        format!("{}/turn/{turn}", self.prefix)
    }
    /// Counts the wishes.
    pub fn wishes(&self) -> String {
        format!("{}/wishes", self.prefix)
    }
    /// A wish of a node.
    pub fn wish(&self, number: u64) -> String {
        format!("{}/wish/{number}", self.prefix)
    }
    /// A number that grows as long as the node is alive.
    pub fn beat(&self, id: &str) -> String {
        format!("{}/beat/{id}", self.prefix)
    }
    /// The [`NodeText`] of a node.
    pub fn node(&self, id: &str) -> String {
        format!("{}/node/{id}", self.prefix)
    }
    /// Why the node with this id cannot join.
    pub fn answer(&self, id: &str) -> String {
        format!("{}/answer/{id}", self.prefix)
    }
    /// A list of [`Seat`]s.
    pub fn page(&self, index: usize, stamp: Stamp) -> String {
        format!("{}/page/{index}/{stamp}", self.prefix)
    }
    /// Counts the processes that were started in place of others that had died, in the job with this number.
    pub fn replaced(&self, job: u64) -> String {
        format!("{}/replaced/{job}", self.prefix)
    }
    /// A [`JobFailure`].
    pub fn failure(&self, stamp: Stamp) -> String {
        format!("{}/failure/{stamp}", self.prefix)
    }
}

/// Which text of a page or failure: the term of the node that wrote it, and that node's counter. No two texts
/// have the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Stamp(pub u64, pub u64);

impl fmt::Display for Stamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.0, self.1)
    }
}

/// The part of a job's state that all nodes read.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Head {
    /// Grows by 1 with every change, also from one job to the next.
    pub version: u64,
    /// Grows with every change that all nodes must see immediately.
    pub turn: u64,
    /// Counts the nodes that have had the task of changing the state.
    pub term: u64,
    /// The node that has it now.
    pub folder: String,
    /// Counts the jobs that have had this run id.
    pub job: u64,
    /// The round that runs, or will run next.
    pub round: u64,
    /// Whether a round runs.
    pub phase: Phase,
    /// The least number of nodes.
    pub nodes_min: usize,
    /// The largest number of nodes.
    pub nodes_max: usize,
    /// How often the ranks may be restarted.
    pub max_restarts: u64,
    /// How often they were.
    pub restarts_used: u64,
    /// How many processes were started in place of one that had died, in rounds that failed.
    pub replaced: u64,
    /// How the job ended.
    pub outcome: Option<Ending>,
    /// Why the last round was ended, or the job.
    pub reason: String,
    /// Over, and all nodes know.
    pub settled: bool,
    /// Members of the round.
    pub members_count: usize,
    /// Members whose ranks do not run, or that know that the job is over.
    pub ready_count: usize,
    /// Members whose ranks have succeeded.
    pub done_count: usize,
    /// Nodes beyond the maximum.
    pub spares_count: usize,
    /// While nodes join, some hosts for messages: those that have joined, or those that are not ready.
    pub hosts: Vec<String>,
    /// Ranks of all members.
    pub ranks: usize,
    /// The member that offers a store for ranks.
    pub store: Option<StoreHost>,
    /// All wishes up to this number have been dealt with.
    pub folded: u64,
    /// Counts the nodes that have ever joined.
    pub joined: u64,
    /// The pages that count. A node is in the page that [`page_of`] returns.
    #[serde(deserialize_with = "at_most_pages")]
    pub pages: Vec<Stamp>,
    /// The report of the last failure of a rank.
    pub failure: Option<Stamp>,
}

/// A node that offers a store for ranks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct StoreHost {
    /// The id of the node.
    pub node: String,
    /// HOST:PORT
    pub address: String,
}

/// What a job is doing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// Nodes join, or stop their ranks.
    Joining,
    /// A round runs.
    Running,
    /// The job has ended.
    Over,
    /// Not written by this version.
    #[default]
    #[serde(other)]
    Unknown,
}

/// How a job ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Ending {
    /// All ranks succeeded.
    Success,
    /// A rank failed.
    Failed,
    /// It ended without a failed rank.
    Closed,
    /// Not written by this version.
    #[serde(other)]
    Unknown,
}

/// A node of a job, and its part in the round.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Seat {
    /// The node.
    pub node: NodeInfo,
    /// Nodes are counted as they join.
    pub joined: u64,
    /// Whether it waits until there is room for it.
    pub spare: bool,
    /// In this round, or in the last one that this node took part in.
    pub rank: Option<usize>,
    /// Its ranks do not run; or it knows that the job is over.
    pub ready: bool,
    /// All its ranks have succeeded.
    pub done: bool,
    /// Rank of its first local rank.
    pub first_rank: usize,
    /// Rank of its first local rank among the ranks of the same role.
    pub first_role_rank: usize,
    /// Ranks of its role.
    pub role_ranks: usize,
}

/// The properties of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct NodeInfo {
    /// Unique for this launcher's process: host, process, something random.
    pub id: String,
    /// Name of the host, for the user.
    pub host: String,
    /// Ranks on this node; nodes may differ.
    pub ranks: usize,
    /// The role of its ranks.
    pub role: String,
    /// The node rank that it must have.
    pub fixed_rank: Option<usize>,
    /// HOST:PORT of a store for workers that this node offers.
    pub worker_store: Option<String>,
}

/// The failure that ended the job or a round, as it is reported to all nodes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct JobFailure {
    /// In which round.
    pub round: u64,
    /// On which node.
    pub node_rank: usize,
    /// The host of that node.
    pub host: String,
    /// Of the whole job.
    pub rank: usize,
    /// "exit code 3"
    pub summary: String,
    /// Several lines.
    pub text: String,
    /// How many processes the job had started in place of one that had died.
    pub replaced: u64,
}

/// What a node writes with every heartbeat. `R` is what is known of its ranks.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default, bound(deserialize = "R: Default + Deserialize<'de>"))]
pub struct NodeText<R> {
    /// Grows with every heartbeat.
    pub beat: u64,
    /// The node.
    pub node: NodeInfo,
    /// How long it may be unresponsive: the dashboard does not know the settings.
    pub silence_max_seconds: Option<f64>,
    /// Its ranks.
    pub ranks: R,
    /// Processes that wait to become ranks.
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "readable")]
    pub spares: Vec<SpareStatus>,
    /// The last generations of the job's ranks that it knows of, the oldest first.
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "readable")]
    pub generations: Vec<Generation>,
}

/// The items that can be read, skipping everything else.
pub(crate) fn readable<'de, D: Deserializer<'de>, T: DeserializeOwned>(
    deserializer: D,
) -> Result<Vec<T>, D::Error> {
    let items = Option::<Vec<serde_json::Value>>::deserialize(deserializer)?.unwrap_or_default();
    Ok(items.into_iter().filter_map(|item| serde_json::from_value(item).ok()).collect())
}

/// A process that waits to become a rank.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct SpareStatus {
    /// Its process.
    pub pid: u64,
    /// `running`, `stopped` or `ended`, as of a rank.
    pub state: String,
    /// When it was started.
    pub started_unix: Option<f64>,
}

/// The ranks continued without some of them, or with others (see `--on-failure=recover`).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Generation {
    /// In which round.
    pub round: u64,
    /// Counted from 1 in each round.
    pub generation: u64,
    /// How long the ranks needed for it.
    pub seconds: f64,
    /// When it began.
    pub at_unix: f64,
    /// Ranks of the generation before that are not in this one.
    pub left: Vec<Change>,
    /// Ranks of this generation that were not in the one before.
    pub joined: Vec<Change>,
}

/// A process that left or joined.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Change {
    /// As which rank.
    pub rank: Option<usize>,
    /// Its process.
    pub pid: u64,
    /// Its host.
    pub host: String,
    /// How it ended, if that is known.
    pub end: Option<String>,
}

impl Generation {
    /// What has changed, in words: `rank 1 (pid 7, killed by SIGKILL) was replaced by pid 9`.
    pub fn changes(&self, with_hosts: bool) -> Vec<String> {
        let place = |change: &Change| match with_hosts && !change.host.is_empty() {
            true => format!("pid {} on {}", change.pid, change.host),
            false => format!("pid {}", change.pid),
        };
        let name = |change: &Change| match change.rank {
            Some(rank) => format!("rank {rank}"),
            None => "a rank".to_owned(),
        };
        let heir = |left: &Change| self.joined.iter().find(|joined| joined.rank == left.rank);
        let left = self.left.iter().map(|left| {
            let end = left.end.iter().map(|end| format!(", {end}")).collect::<String>();
            let what = heir(left)
                .map_or_else(|| "left".to_owned(), |heir| format!("was replaced by {}", place(heir)));
            format!("{} ({}{end}) {what}", name(left), place(left))
        });
        let is_new = |joined: &&Change| self.left.iter().all(|left| left.rank != joined.rank);
        let joined = self.joined.iter().filter(is_new);
        left.chain(joined.map(|joined| format!("{} joined ({})", name(joined), place(joined)))).collect()
    }
}

/// What a launcher knows of one of its ranks. `C` is a call of the rank in a group.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, bound(deserialize = "C: Default + Deserialize<'de>"))]
pub struct RankStatus<C> {
    /// Of the whole job.
    pub rank: Option<usize>,
    /// Among the ranks of this node.
    pub local_rank: Option<usize>,
    /// Its process.
    pub pid: Option<u64>,
    /// `running`, `stopped` (by a signal such as SIGSTOP) or `ended`.
    pub state: String,
    /// How it ended.
    pub end: Option<String>,
    /// Its connections to the store, as the store's server sees them; or those to a relay, and where that is.
    pub store_connections: Vec<String>,
    /// What it waits for in the store, if its launcher's relay knows: the server sees only the relay.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub store_wait: Option<StoreOperation>,
    /// Processor time that it has used.
    pub cpu_seconds: Option<f64>,
    /// Memory that it has in use.
    pub memory_bytes: Option<u64>,
    /// The time since its last output.
    pub last_output_seconds: Option<f64>,
    /// When it was started.
    pub started_unix: Option<f64>,
    /// Its calls in its groups, if it reports them.
    pub collectives: Vec<C>,
}

/// A request to the store that waits.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct StoreOperation {
    /// In what.
    pub operation: String,
    /// The first few keys, as text.
    pub keys: String,
    /// How many there are.
    pub keys_count: usize,
    /// How long it has waited.
    pub seconds: f64,
}

/// How many pages a job with so many nodes has.
pub fn pages_for(nodes: usize) -> usize {
    if nodes == 0 { 0 } else { nodes.div_ceil(PAGE_NODES).next_power_of_two().min(PAGES_MAX) }
}

/// The page in which a node is, of `pages`.
pub fn page_of(id: &str, pages: usize) -> usize {
    // FNV-1a: short, and the same in every version and on every machine.
    let hash = id.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    let mixed = hash ^ (hash >> 32);
    usize::try_from(mixed % pages.max(1) as u64).unwrap_or(0)
}

/// A list that is refused as soon as it is too long: two bytes of text may become hundreds in memory.
struct Bounded<T> {
    max: usize,
    what: &'static str,
    item: PhantomData<T>,
}

impl<'de, T: Deserialize<'de>> Visitor<'de> for Bounded<T> {
    type Value = Vec<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a list of at most {} {}", self.max, self.what)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<T>, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = list.next_element()? {
            if items.len() == self.max {
                return Err(A::Error::invalid_length(self.max + 1, &self));
            }
            items.push(item);
        }
        Ok(items)
    }
}

fn at_most_pages<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Stamp>, D::Error> {
    deserializer.deserialize_seq(Bounded { max: PAGES_MAX, what: "pages", item: PhantomData })
}

/// The nodes in a page.
///
/// # Errors
/// If the text is not a list of nodes, or has more than a job may have.
pub fn parse_page(text: &[u8]) -> serde_json::Result<Vec<Seat>> {
    let mut deserializer = serde_json::Deserializer::from_slice(text);
    let seats = deserializer.deserialize_seq(Bounded { max: NODES_MAX, what: "nodes", item: PhantomData })?;
    deserializer.end()?;
    Ok(seats)
}
