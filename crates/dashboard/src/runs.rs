//! The jobs that use the store, read from its keys: which ranks have joined, are missing, lost or stuck.
//!
//! The launchers keep a state for each job and a beat for each node in the store (see `run/rendezvous`). Each
//! beat has what is known of the node's ranks. To that we add what only the server sees: which rank waits for
//! which key, by the address of its connection. And what only repeated reading shows: a beat that does not
//! move any more.
//!
//! Everything in these keys was written by clients, perhaps by malicious ones: sizes are bounded, unknown
//! fields are ignored, known ones may be missing, and what cannot be read is shown as such.
//!
//! Pure except for [`read`]; the time is an argument.

mod generations;
mod schema;

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::time::Instant;

use super::collectives::{Collective, culprits};
use super::job::{
    self, Generation, Head, JobFailure, Keys, NodeInfo, NodeText, Phase, Seat, SpareStatus, StoreOperation,
    parse_page,
};
use serde::Serialize;
use tenfold_store::{ClientFacts, Facts, Server, Value, WaiterFacts};

use generations::ShownGeneration;
use schema::{RankStatus, Ranks, State, silence_max, under_way};

/// Jobs that are shown: the last ones that were started.
const RUNS_MAX: usize = 32;
/// Bytes of the list of jobs that are read; its end, where the last ones are.
const LIST_MAX: usize = 64 << 10;
const ID_MAX: usize = 256;
/// Bytes of the head of a job's state, of a page of its nodes, and of a failure; launchers write no longer
/// ones.
const HEAD_MAX: usize = 64 << 10;
const PAGE_MAX: usize = 1 << 20;
const FAILURE_MAX: usize = 64 << 10;
/// Bytes of one node's beat; launchers write no longer ones.
const NODE_MAX: usize = 1 << 20;
/// Nodes of all jobs together, the bytes of their beats, and the ranks in them.
const NODES_MAX: usize = job::NODES_MAX;
const BEATS_MAX: usize = 16 << 20;
const RANKS_MAX: usize = 64 << 10;
/// Groups of one rank that are shown; launchers report no more.
const COLLECTIVES_MAX: usize = 8;
/// Ranks that are listed although nothing is known of them.
const UNKNOWN_MAX: usize = 16 << 10;

/// A node is lost if its beat has not moved for this long, unless the beat says how long the node may be
/// unresponsive: three beats, the default of launchers.
const LOST_AFTER: f64 = 15.0;
/// The least such time, because beats are read once per second.
const LOST_AFTER_MIN: f64 = 5.0;
/// A rank that waits in the store for longer than this is called stuck.
const STUCK_AFTER: f64 = 10.0;

// ── what is read ───────────────────────────────────────────────────────────────────────────────────────────

/// What the store holds about one job.
#[derive(Debug)]
pub(super) struct Raw {
    id: String,
    state: Result<State, String>,
    /// By node id.
    nodes: HashMap<String, Beat>,
}

impl Raw {
    /// How many connections its ranks have to the store.
    pub(super) fn connections(&self) -> usize {
        let ranks = self.nodes.values().flat_map(|beat| &beat.ranks);
        ranks.map(|rank| rank.store_connections.len()).sum()
    }
}

/// A node's last beat, and how long ago it changed.
#[derive(Debug)]
struct Beat {
    seconds: f64,
    /// How long the node may be unresponsive.
    silence_max: f64,
    ranks: Vec<RankStatus>,
    spares: Vec<SpareStatus>,
    generations: Vec<Generation>,
}

/// When each node's beat last changed.
#[derive(Debug, Default)]
pub(super) struct Beats {
    /// By job and node.
    seen: HashMap<(String, String), (u64, Instant)>,
}

impl Beats {
    /// How long ago this beat changed.
    fn age(&mut self, run: &str, node: &str, beat: u64, now: Instant) -> f64 {
        let seen = self.seen.entry((run.into(), node.into())).or_insert((beat, now));
        if seen.0 != beat {
            *seen = (beat, now);
        }
        now.saturating_duration_since(seen.1).as_secs_f64()
    }

    fn forget_others(&mut self, runs: &[Raw]) {
        let is_there = |run: &String, node: &String| {
            runs.iter().any(|raw| raw.id == *run && raw.nodes.contains_key(node))
        };
        self.seen.retain(|(run, node), _| is_there(run, node));
    }
}

/// Reads everything about all jobs. Asks the server four times, however many jobs and nodes there are,
/// because a busy server delays each answer.
pub(super) fn read(server: &Server, beats: &mut Beats, now: Instant) -> Vec<Raw> {
    let Some(list) = server.value(&key(job::RUNS)) else { return Vec::new() };
    let mut left = Left { nodes: NODES_MAX, bytes: BEATS_MAX, ranks: RANKS_MAX };
    let ids = ids(&list);
    let keys = ids.iter().map(|id| key(&Keys::new(id).state())).collect();
    let Some(heads) = server.values(keys) else { return Vec::new() };
    let heads: Vec<Result<Head, String>> = heads
        .into_iter()
        .map(|head| head.ok_or_else(|| "it has no state in the store".to_owned()))
        .map(|head| head.and_then(|head| parse_head(&head)))
        .collect();
    let named = ids.iter().zip(&heads).filter_map(|(id, head)| Some(named(id, head.as_ref().ok()?)));
    let mut texts = server.values(named.flatten().collect()).unwrap_or_default().into_iter();
    let mut jobs = Vec::new();
    let mut keys = Vec::new();
    for (id, head) in ids.into_iter().zip(heads) {
        let state = head.and_then(|head| parse_state(head, &mut texts, &mut left));
        let nodes = state.iter().flat_map(State::nodes);
        keys.extend(nodes.map(|node| key(&Keys::new(&id).node(&node.id))));
        jobs.push((id, state));
    }
    let mut said = server.values(keys).unwrap_or_default().into_iter();
    let mut runs = Vec::new();
    for (id, state) in jobs {
        let mut nodes = HashMap::new();
        for node in state.iter().flat_map(State::nodes).map(|node| &node.id) {
            let beat = said.next().flatten().filter(|_| left.bytes > 0);
            let Some(beat) = beat.filter(|beat| beat.len() <= NODE_MAX) else { continue };
            left.bytes = left.bytes.saturating_sub(beat.len());
            let text = parse_beat(&beat);
            let (silence_max, seconds) = (silence_max(&text), beats.age(&id, node, text.beat, now));
            let (Ranks(mut ranks), mut spares) = (text.ranks, text.spares);
            ranks.truncate(left.ranks);
            left.ranks -= ranks.len();
            spares.truncate(left.ranks);
            left.ranks -= spares.len();
            let generations = generations::bounded(text.generations);
            nodes.insert(node.clone(), Beat { seconds, silence_max, ranks, spares, generations });
        }
        runs.push(Raw { id, state, nodes });
    }
    beats.forget_others(&runs);
    runs
}

/// Clients put a `/` in front of every key.
fn key(name: &str) -> Value {
    Value::from(format!("/{name}").as_str())
}

/// The keys that a head names: its pages, then its failure.
fn named(id: &str, head: &Head) -> Vec<Value> {
    let keys = Keys::new(id);
    let pages = head.pages.iter().enumerate().map(|(index, &stamp)| key(&keys.page(index, stamp)));
    pages.chain(head.failure.map(|stamp| key(&keys.failure(stamp)))).collect()
}

/// Whether there are any jobs.
pub(super) fn are_there(server: &Server) -> bool {
    server.value(&key(job::RUNS)).is_some()
}

/// How much may still be read for one answer.
struct Left {
    nodes: usize,
    bytes: usize,
    ranks: usize,
}

/// The ids of the last jobs in the list, each once, in the order in which they were started.
fn ids(list: &Value) -> Vec<String> {
    let list = &list[list.len().saturating_sub(LIST_MAX)..];
    let text = String::from_utf8_lossy(list);
    let mut ids: Vec<String> = Vec::new();
    for id in text.lines().rev().filter(|id| !id.is_empty() && id.len() <= ID_MAX) {
        if ids.len() < RUNS_MAX && !ids.iter().any(|known| known == id) {
            ids.push(id.into());
        }
    }
    ids.reverse();
    ids
}

fn parse_head(text: &[u8]) -> Result<Head, String> {
    if text.len() > HEAD_MAX {
        return Err(format!("its state is {} bytes long, the limit is {HEAD_MAX}", text.len()));
    }
    serde_json::from_slice(text).map_err(|error| format!("its state cannot be read: {error}"))
}

/// Takes the texts that the head names. A page that is missing was replaced at this moment: its nodes are
/// shown the next time.
fn parse_state(
    head: Head,
    texts: &mut impl Iterator<Item = Option<Value>>,
    left: &mut Left,
) -> Result<State, String> {
    let texts: Vec<Option<Value>> =
        texts.take(head.pages.len() + usize::from(head.failure.is_some())).collect();
    let mut seats: Vec<Seat> = Vec::new();
    for page in texts.iter().take(head.pages.len()).flatten().filter(|page| page.len() <= PAGE_MAX) {
        seats.extend(parse_page(page).map_err(|error| format!("its state cannot be read: {error}"))?);
        if seats.len() > left.nodes {
            break;
        }
    }
    let failure = texts.get(head.pages.len()).and_then(Option::as_ref);
    let failure = failure.filter(|failure| failure.len() <= FAILURE_MAX);
    let failure: Option<JobFailure> = failure.and_then(|failure| serde_json::from_slice(failure).ok());
    let count = seats.len();
    left.nodes = left
        .nodes
        .checked_sub(count)
        .ok_or_else(|| format!("its {count} nodes exceed the limit of {NODES_MAX} nodes of all jobs"))?;
    Ok(State::new(head, seats, failure))
}

fn parse_beat(text: &[u8]) -> NodeText<Ranks> {
    serde_json::from_slice(text).unwrap_or_default()
}

/// Removes the waits of launchers from the waiters: they wait for the next state of their job as long as it
/// runs, and not for a rank.
pub(super) fn leave_out_launchers(facts: &mut Facts) {
    let listed = facts.waiters.len();
    facts.waiters.retain(|waiter| !is_launchers(waiter));
    let left_out = listed - facts.waiters.len();
    facts.waiters_count -= left_out.min(facts.waiters_count);
    if left_out > 0 {
        facts.oldest_wait_seconds = facts.waiters.first().map_or(0.0, |waiter| waiter.seconds);
    }
}

/// Only launchers use keys under this one.
fn is_launchers(waiter: &WaiterFacts) -> bool {
    waiter.keys.trim_start_matches(['`', '/']).starts_with("tenfold/run/")
}

// ── analysis ───────────────────────────────────────────────────────────────────────────────────────────────

/// One job of `/api/runs`.
#[derive(Debug, PartialEq, Serialize)]
pub(super) struct Run {
    pub(super) id: String,
    state: Option<State>,
    pub(super) nodes: Vec<Node>,
    /// Those of its ranks, if they recover by themselves.
    generations: Vec<ShownGeneration>,
    /// Why there is no state.
    error: Option<String>,
}

#[derive(Debug, PartialEq, Serialize)]
pub(super) struct Node {
    /// None for a node that has not joined.
    node: Option<NodeInfo>,
    rank: Option<usize>,
    pub(super) status: NodeStatus,
    beat_seconds: Option<f64>,
    pub(super) ranks: Vec<Rank>,
    /// Processes that wait to become ranks.
    spares: Vec<SpareStatus>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum NodeStatus {
    /// It takes part in the current round, or in the last one.
    Joined,
    /// It has joined, and the round has not begun.
    Waiting,
    /// Its beat does not move.
    Lost,
    /// The job has its maximum of nodes.
    Spare,
    /// It has not joined.
    Missing,
}

impl NodeStatus {
    pub(super) const ALL: [NodeStatus; 5] =
        [NodeStatus::Joined, NodeStatus::Waiting, NodeStatus::Lost, NodeStatus::Spare, NodeStatus::Missing];

    pub(super) fn name(self) -> &'static str {
        match self {
            NodeStatus::Joined => "joined",
            NodeStatus::Waiting => "waiting",
            NodeStatus::Lost => "lost",
            NodeStatus::Spare => "spare",
            NodeStatus::Missing => "missing",
        }
    }
}

#[derive(Debug, PartialEq, Serialize)]
pub(super) struct Rank {
    #[serde(flatten)]
    status: RankStatus,
    pub(super) joined: bool,
    pub(super) stuck: bool,
    /// Whether other ranks wait for it in a collective.
    culprit: bool,
    why: String,
    store_operation: Option<StoreOperation>,
    store_last: Option<StoreLast>,
}

impl Rank {
    pub(super) fn state(&self) -> &str {
        &self.status.state
    }
}

/// The last request of a rank to the store.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct StoreLast {
    operation: String,
    seconds: f64,
}

impl Run {
    pub(super) fn round(&self) -> u64 {
        self.state.as_ref().map_or(0, |state| state.round)
    }

    pub(super) fn restarts_used(&self) -> u64 {
        self.state.as_ref().map_or(0, |state| state.restarts_used)
    }

    /// The rank behind each connection to the store.
    pub(super) fn ranks_by_peer(&self) -> impl Iterator<Item = (String, usize)> {
        let ranks = self.nodes.iter().flat_map(|node| &node.ranks);
        let ranks = ranks.filter_map(|rank| Some((rank.status.rank?, &rank.status.store_connections)));
        ranks.flat_map(|(rank, peers)| peers.iter().map(move |peer| (canonical(peer), rank)))
    }

    /// The ranks behind relays that wait, if this was described without the waiters that the server sees.
    pub(super) fn reported_waits(&self) -> impl Iterator<Item = Reported<'_>> {
        let ranks = self.nodes.iter().flat_map(|node| &node.ranks);
        ranks.filter_map(|rank| {
            let peer = rank.status.store_connections.first().map_or("", String::as_str);
            Some(Reported { peer, rank: rank.status.rank?, wait: rank.store_operation.as_ref()? })
        })
    }
}

/// A rank that waits, as a launcher reported it.
#[derive(Debug, PartialEq)]
pub(super) struct Reported<'a> {
    pub(super) peer: &'a str,
    pub(super) rank: usize,
    pub(super) wait: &'a StoreOperation,
}

/// The jobs, given the waiters of the store and its clients.
pub(super) fn describe(runs: Vec<Raw>, waiters: &[WaiterFacts], clients: &[ClientFacts]) -> Vec<Run> {
    let seen = Seen { waits: longest_waits(waiters), last: last_operations(clients) };
    let mut unknown_left = UNKNOWN_MAX;
    runs.into_iter().map(|raw| describe_one(raw, &seen, &mut unknown_left)).collect()
}

fn describe_one(raw: Raw, seen: &Seen, unknown_left: &mut usize) -> Run {
    let Raw { id, state, nodes: mut beats } = raw;
    let state = match state {
        Ok(state) => state,
        Err(error) => {
            let (nodes, generations) = (Vec::new(), Vec::new());
            return Run { id, state: None, nodes, generations, error: Some(error) };
        }
    };
    let reports = beats.values_mut().map(|beat| std::mem::take(&mut beat.generations));
    let generations = generations::merged(reports, state.members.len() > 1);
    let first_ranks = first_ranks(&state);
    // A spare of one node may have become a rank of another.
    let reported: HashSet<usize> =
        beats.values().flat_map(|beat| &beat.ranks).filter_map(|rank| rank.rank).collect();
    let mut nodes: Vec<Node> = Vec::new();
    for member in &state.members {
        let beat = beats.remove(&member.node.id);
        let status = match state.phase {
            Phase::Over => NodeStatus::Joined, // its launcher has exited, so its beat does not move
            _ if is_lost(beat.as_ref()) => NodeStatus::Lost,
            Phase::Running if member.rank.is_some() => NodeStatus::Joined,
            _ => NodeStatus::Waiting,
        };
        let beat_seconds = beat.as_ref().map(|beat| beat.seconds);
        let (mut known, spares) = beat.map_or_else(Default::default, |beat| (beat.ranks, beat.spares));
        for wait in known.iter_mut().filter_map(|rank| rank.store_wait.as_mut()) {
            wait.seconds += beat_seconds.unwrap_or_default(); // as it was then
        }
        if state.phase != Phase::Over {
            let first_rank = member.rank.and_then(|rank| first_ranks.get(&rank).copied());
            let mut unknown = unknown_ranks(&known, member.node.ranks, first_rank, *unknown_left);
            unknown.retain(|rank| rank.rank.is_none_or(|rank| !reported.contains(&rank)));
            *unknown_left -= unknown.len();
            known.extend(unknown);
        }
        known.sort_by_key(|rank| rank.local_rank);
        let ranks = known.into_iter().map(|rank| judge(rank, seen)).collect();
        let node = Some(member.node.clone());
        nodes.push(Node { node, rank: member.rank, status, beat_seconds, ranks, spares });
    }
    nodes.sort_by_key(|node| (node.rank.is_none(), node.rank));
    for spare in &state.spares {
        let beat = beats.remove(&spare.id);
        let status = if is_lost(beat.as_ref()) { NodeStatus::Lost } else { NodeStatus::Spare };
        let beat_seconds = beat.map(|beat| beat.seconds);
        let (node, ranks, spares) = (Some(spare.clone()), Vec::new(), Vec::new());
        nodes.push(Node { node, rank: None, status, beat_seconds, ranks, spares });
    }
    nodes.extend(missing(&state));
    if state.phase == Phase::Running {
        blame(&mut nodes);
    }
    Run { id, state: Some(state), nodes, generations, error: None }
}

/// A node without a beat has just joined.
fn is_lost(beat: Option<&Beat>) -> bool {
    beat.is_some_and(|beat| beat.seconds > beat.silence_max)
}

/// Nodes that must join and have not, with the ranks that no other node has.
fn missing(state: &State) -> Vec<Node> {
    if state.phase == Phase::Over {
        return Vec::new();
    }
    let count = state.nodes_min.min(NODES_MAX).saturating_sub(state.members.len());
    let claims = state.members.iter().map(|member| member.rank.or(member.node.fixed_rank));
    let taken: HashSet<usize> = claims.clone().flatten().collect();
    // Nodes that have joined and have no rank yet will take the first free ones.
    let unranked = claims.filter(Option::is_none).count();
    let free = (0..state.nodes_min).filter(|rank| !taken.contains(rank)).skip(unranked).take(count);
    let missing = |rank| Node {
        node: None,
        rank: Some(rank),
        status: NodeStatus::Missing,
        beat_seconds: None,
        ranks: Vec::new(),
        spares: Vec::new(),
    };
    free.map(missing).collect()
}

/// By node rank, the world rank of the node's first rank. Unknown while nodes are joining, and after a gap in
/// the node ranks.
fn first_ranks(state: &State) -> HashMap<usize, usize> {
    let sizes: HashMap<usize, usize> =
        state.members.iter().filter_map(|member| Some((member.rank?, member.node.ranks))).collect();
    let mut first_ranks = HashMap::new();
    let mut first = 0_usize;
    for rank in (0..NODES_MAX).filter(|_| state.phase != Phase::Joining) {
        first_ranks.insert(rank, first);
        let next = sizes.get(&rank).and_then(|size| first.checked_add(*size));
        let Some(next) = next else { break };
        first = next;
    }
    first_ranks
}

/// Ranks that a node should have but has not reported.
fn unknown_ranks(
    known: &[RankStatus],
    expected: usize,
    first_rank: Option<usize>,
    most: usize,
) -> Vec<RankStatus> {
    let known: HashSet<Option<usize>> = known.iter().map(|rank| rank.local_rank).collect();
    let unknown = (0..expected).filter(|local_rank| !known.contains(&Some(*local_rank))).take(most);
    unknown
        .map(|local_rank| RankStatus {
            rank: first_rank.and_then(|first| first.checked_add(local_rank)),
            local_rank: Some(local_rank),
            state: "missing".into(),
            ..RankStatus::default()
        })
        .collect()
}

fn judge(mut status: RankStatus, seen: &Seen) -> Rank {
    let peers: Vec<String> = status.store_connections.iter().map(|peer| canonical(peer)).collect();
    let last = peers.iter().filter_map(|peer| seen.last.get(peer));
    let store_last = last.min_by(|a, b| a.seconds.total_cmp(&b.seconds)).cloned();
    let own = peers.iter().filter_map(|peer| seen.waits.get(peer)).cloned().chain(status.store_wait.take());
    let longest = own.max_by(|a, b| a.seconds.total_cmp(&b.seconds));
    let why = match &longest {
        _ if status.state == "stopped" => {
            "stopped by a signal (SIGSTOP or Ctrl-Z); send SIGCONT to continue it".into()
        }
        Some(wait) if wait.seconds > STUCK_AFTER => {
            format!("has waited {1:.0} s in the store for {0} ({2})", wait.keys, wait.seconds, wait.operation)
        }
        _ => String::new(),
    };
    // A rank that has exited has left the store too, but it had joined.
    let joined = !status.store_connections.is_empty() || status.state == "ended";
    Rank { joined, stuck: !why.is_empty(), culprit: false, why, store_operation: longest, store_last, status }
}

/// Marks the ranks for which others wait in a collective.
fn blame(nodes: &mut [Node]) {
    let told: Vec<&[Collective]> =
        nodes.iter().flat_map(|node| &node.ranks).map(|rank| under_way(&rank.status)).collect();
    let culprits = culprits(&told);
    let ranks = nodes.iter_mut().flat_map(|node| &mut node.ranks);
    for (rank, why) in ranks.zip(culprits).filter_map(|(rank, why)| Some((rank, why?))) {
        (rank.culprit, rank.stuck) = (true, true);
        if rank.why.is_empty() {
            rank.why = why;
        }
    }
}

/// What the server sees of ranks, by the addresses of their connections.
struct Seen {
    waits: Waits,
    last: HashMap<String, StoreLast>,
}

fn last_operations(clients: &[ClientFacts]) -> HashMap<String, StoreLast> {
    let last = |client: &ClientFacts| {
        let operation = client.last_operation.clone()?;
        Some((canonical(&client.peer), StoreLast { operation, seconds: client.idle_seconds }))
    };
    clients.iter().filter_map(last).collect()
}

/// By peer, its longest wait.
type Waits = HashMap<String, StoreOperation>;

fn longest_waits(waiters: &[WaiterFacts]) -> Waits {
    let mut longest = Waits::new();
    for waiter in waiters {
        let (operation, keys) = (waiter.operation.clone(), waiter.keys.clone());
        let (keys_count, seconds) = (waiter.keys_count, waiter.seconds);
        let wait = StoreOperation { operation, keys, keys_count, seconds };
        let known = longest.entry(canonical(&waiter.peer)).or_insert_with(|| wait.clone());
        if known.seconds < wait.seconds {
            *known = wait;
        }
    }
    longest
}

/// One spelling for each address: a server that listens on `::` sees an IPv4 client as an IPv6 one.
pub(super) fn canonical(peer: &str) -> String {
    match peer.parse::<SocketAddr>() {
        Ok(address) => SocketAddr::new(address.ip().to_canonical(), address.port()).to_string(),
        Err(_) => peer.to_owned(),
    }
}

/// A job without a readable state.
#[cfg(test)]
pub(super) fn unreadable(id: &str) -> Run {
    let (nodes, generations) = (Vec::new(), Vec::new());
    Run { id: id.into(), state: None, nodes, generations, error: Some("nonsense".into()) }
}

#[cfg(test)]
mod tests;
