//! One sentence about a job: what the user with a hung job wants to read first.
//!
//! A pure function of what `/api/runs` says about the run, so that the page, `tenfold top` and the JSON say
//! the same. It names the ranks that keep others waiting, not those that wait: with eight ranks and one
//! missing, seven are waiting and one is the reason.
//!
//! Every field may be missing or of another type: what is not understood is left out of the sentence.

use serde_json::{Value, json};

/// How bad it is, as a word for programs: the page's colour, a script's test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Level {
    /// Runs, or has succeeded.
    Ok,
    /// Ranks wait for another one, and it is not yet known to be wrong.
    Waiting,
    /// Something is wrong: a rank is stuck, missing or failed.
    Bad,
}

impl Level {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Level::Ok => "ok",
            Level::Waiting => "waiting",
            Level::Bad => "bad",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Verdict {
    pub(crate) level: Level,
    pub(crate) text: String,
}

/// How many ranks or nodes are named individually.
const NAMED_MAX: usize = 4;

/// Seconds from which a wait is mentioned.
const LONG: f64 = 10.0;

/// Puts the verdict into one run of `/api/runs`, as `verdict` and `verdict_level`.
pub(crate) fn annotate(run: &mut Value) {
    let Verdict { level, text } = verdict(run);
    if let Value::Object(fields) = run {
        fields.insert("verdict".into(), json!(text));
        fields.insert("verdict_level".into(), json!(level.name()));
    }
}

/// The verdict about this run.
pub(crate) fn verdict(run: &Value) -> Verdict {
    let job = format!("job {}", run["id"].as_str().unwrap_or("?"));
    let state = &run["state"];
    let (level, text) = match (state["outcome"].as_str(), state["phase"].as_str()) {
        _ if run["error"].is_string() => {
            let error = run["error"].as_str().unwrap_or_default();
            (Level::Bad, format!(" cannot be shown: {}", first_line(error)))
        }
        (Some("success"), _) => (Level::Ok, ended_well(run)),
        (Some("failed"), _) => (Level::Bad, failed(state)),
        (Some("closed"), _) => (Level::Bad, closed(state)),
        (_, Some("joining")) => joining(run),
        _ => running(run),
    };
    Verdict { level, text: format!("{job}{text}") }
}

/// The verdict about a store without known jobs: a long wait may be one that never ends.
pub(crate) fn store_verdict(server: &Value, waiters: &Value) -> Verdict {
    let number = |name: &str| server[name].as_u64().unwrap_or(0) as usize;
    let longest = &list(waiters).first().unwrap_or(&Value::Null);
    let seconds = longest["seconds"].as_f64().unwrap_or(0.0);
    if seconds < LONG {
        let (clients, keys) = (counted(number("connections"), "client"), counted(number("keys"), "key"));
        let text = format!("store: {clients}, {keys}, no long waits");
        return Verdict { level: Level::Ok, text };
    }
    let count = number("waiters_count").max(list(waiters).len());
    let verb = if count == 1 { "is waiting" } else { "are waiting" };
    let keys = longest["keys"].as_str().unwrap_or("?");
    let text =
        format!("{} {verb}, the longest for {}: {keys}", counted(count, "client"), show_seconds(seconds));
    Verdict { level: Level::Waiting, text }
}

fn ended_well(run: &Value) -> String {
    let ranks = ranks(run).len();
    let restarts = match run["state"]["restarts_used"].as_u64().unwrap_or(0) {
        0 => String::new(),
        count => format!(", after {}", counted(count as usize, "restart")),
    };
    format!(" succeeded: {}{restarts}", counted(ranks, "rank"))
}

fn failed(state: &Value) -> String {
    let failure = &state["failure"];
    let what = failure["summary"].as_str().unwrap_or("a rank failed");
    let who = match failure["rank"].as_u64() {
        Some(rank) => format!("rank {rank}{}: ", on_host(failure["host"].as_str())),
        None => String::new(),
    };
    let used = state["restarts_used"].as_u64().unwrap_or(0);
    let restarts = match used {
        0 => String::new(),
        _ => format!("; failed again after {}", counted(used as usize, "restart")),
    };
    format!(" failed: {who}{what}{restarts}")
}

fn closed(state: &Value) -> String {
    match state["reason"].as_str().unwrap_or_default() {
        "" => " was closed".into(),
        reason => format!(" was closed: {}", first_line(reason)),
    }
}

fn joining(run: &Value) -> (Level, String) {
    let nodes = nodes(run);
    let here = nodes.iter().filter(|node| matches!(node.status, "joined" | "waiting")).count();
    let wanted = run["state"]["nodes_min"].as_u64().unwrap_or(0) as usize;
    let mut text = format!(": {here} of {} joined", counted(wanted.max(here), "node"));
    let lost: Vec<String> = nodes.iter().filter(|node| node.status == "lost").map(Node::name).collect();
    if !lost.is_empty() {
        text += &format!(" — {} unresponsive", are(&lost));
        return (Level::Bad, text);
    }
    let missing: Vec<String> = nodes.iter().filter(|node| node.status == "missing").map(Node::name).collect();
    if !missing.is_empty() {
        text += &format!(" — {} not joined", have(&missing));
    } else if here < wanted {
        text += &format!(" — {} more must join", wanted - here);
    } else {
        text += " — the ranks are about to start";
    }
    (Level::Waiting, text)
}

/// The ranks run, or should: finds those that keep the others waiting.
fn running(run: &Value) -> (Level, String) {
    let ranks = ranks(run);
    let nodes = nodes(run);
    let joined = ranks.iter().filter(|rank| rank.joined).count();
    let waits: Vec<&Rank<'_>> = ranks.iter().filter(|rank| rank.waits.is_some()).collect();
    let longest = waits.iter().filter_map(|rank| rank.waits).fold(0.0, f64::max);

    let mut blamed: Vec<String> = Vec::new();
    let lost: Vec<String> = nodes
        .iter()
        .filter(|node| node.status == "lost")
        .map(|node| match node.beat_seconds {
            Some(seconds) => format!("{} for {}", node.name(), show_seconds(seconds)),
            None => node.name(),
        })
        .collect();
    if !lost.is_empty() {
        blamed.push(format!("no heartbeat from {}", listed(&lost)));
    }
    let missing: Vec<String> = nodes.iter().filter(|node| node.status == "missing").map(Node::name).collect();
    if !missing.is_empty() {
        blamed.push(format!("{} not joined", have(&missing)));
    }
    for (end, who) in by_end(&ranks) {
        blamed.push(format!("{who} ended: {end}"));
    }
    // A rank on a lost node is not blamed a second time.
    let blame = |kind: fn(&Rank<'_>) -> bool| -> Vec<String> {
        ranks.iter().filter(|rank| !rank.lost && !rank.ended && kind(rank)).map(Rank::name).collect()
    };
    let stopped = blame(|rank| rank.stopped);
    if !stopped.is_empty() {
        blamed.push(format!("{} stopped by a signal", are(&stopped)));
    }
    let late = ranks.iter().filter(|rank| rank.culprit && !rank.lost && !rank.ended && !rank.stopped);
    let late: Vec<String> =
        late.map(|rank| format!("{} {}", rank.name(), rank.why)).take(NAMED_MAX).collect();
    blamed.extend(late);
    let absent = blame(|rank| !rank.joined && !rank.stopped);
    if !absent.is_empty() {
        blamed.push(format!("{} not joined", have(&absent)));
    }
    if blamed.is_empty() && ranks.iter().any(|rank| rank.stuck) {
        blamed.push(stuck(&ranks, longest));
    } else if !waits.is_empty() && !blamed.is_empty() {
        let verb = if waits.len() == 1 { "has" } else { "have" };
        blamed.push(format!("{} {verb} waited up to {}", waits.len(), show_seconds(longest)));
    }

    let count = format!(": {joined} of {} joined", counted(ranks.len(), "rank"));
    if blamed.is_empty() {
        let done = ranks.iter().filter(|rank| rank.ended).count();
        let rest = match (ranks.len(), done) {
            (0, _) => ": no rank has been started yet".into(),
            (_, 0) => format!("{count} and running"),
            (_, done) => format!("{count}, {done} exited successfully"),
        };
        return (Level::Ok, rest);
    }
    // A rank needs a moment to join; it is wrong only once another rank has waited for it for long.
    let early = !absent.is_empty() && blamed.len() <= 2 && !ranks.iter().any(|rank| rank.stuck);
    let level = if early
        && lost.is_empty()
        && stopped.is_empty()
        && missing.is_empty()
        && by_end(&ranks).is_empty()
    {
        Level::Waiting
    } else {
        Level::Bad
    };
    (level, format!("{count} — {}", blamed.join(", ")))
}

/// All ranks have joined and some have waited for long: those that do not wait are the reason, if they are
/// fewer.
fn stuck(ranks: &[Rank<'_>], longest: f64) -> String {
    let stuck: Vec<&Rank<'_>> = ranks.iter().filter(|rank| rank.stuck).collect();
    let others: Vec<&Rank<'_>> =
        ranks.iter().filter(|rank| rank.waits.is_none() && !rank.stuck && !rank.ended).collect();
    let keys = stuck.iter().find_map(|rank| rank.keys).map(|keys| format!(" for {keys}")).unwrap_or_default();
    let who = match stuck.len() {
        1 => format!("{} has", stuck[0].name()),
        count if count == ranks.len() => format!("all {count} have"),
        count => format!("{count} have"),
    };
    let mut text = format!("{who} waited up to {}{keys}", show_seconds(longest));
    if !others.is_empty() && others.len() < stuck.len() {
        let names: Vec<String> = others.iter().map(|rank| rank.name()).collect();
        let verb = if names.len() == 1 { "is" } else { "are" };
        text += &format!("; {} {verb} not waiting", listed(&names));
    }
    text
}

/// Ranks that ended badly, by how.
fn by_end(ranks: &[Rank<'_>]) -> Vec<(String, String)> {
    let mut ends: Vec<(&str, Vec<String>)> = Vec::new();
    for rank in ranks {
        let Some(end) = rank.bad_end else { continue };
        match ends.iter_mut().find(|(known, _)| *known == end) {
            Some((_, names)) => names.push(rank.name()),
            None => ends.push((end, vec![rank.name()])),
        }
    }
    ends.truncate(NAMED_MAX);
    ends.into_iter().map(|(end, names)| (first_line(end).to_string(), listed(&names))).collect()
}

/// The fields of one rank that are used.
struct Rank<'a> {
    rank: Option<u64>,
    host: Option<&'a str>,
    joined: bool,
    stuck: bool,
    stopped: bool,
    ended: bool,
    /// On a node that is unresponsive.
    lost: bool,
    bad_end: Option<&'a str>,
    /// Other ranks wait for it in a collective; `why` says which.
    culprit: bool,
    why: &'a str,
    /// For how long it has waited in the store.
    waits: Option<f64>,
    keys: Option<&'a str>,
}

impl Rank<'_> {
    fn name(&self) -> String {
        match self.rank {
            Some(rank) => format!("rank {rank}{}", on_host(self.host)),
            None => format!("a rank{}", on_host(self.host)),
        }
    }
}

fn ranks(run: &Value) -> Vec<Rank<'_>> {
    let mut ranks: Vec<Rank<'_>> = list(&run["nodes"])
        .iter()
        .flat_map(|node| list(&node["ranks"]).iter().map(move |rank| read_rank(node, rank)))
        .collect();
    ranks.sort_by_key(|rank| rank.rank);
    ranks
}

fn read_rank<'a>(node: &'a Value, rank: &'a Value) -> Rank<'a> {
    let ended = rank["state"] == "ended";
    let operation = &rank["store_operation"];
    Rank {
        rank: rank["rank"].as_u64(),
        host: node["node"]["host"].as_str(),
        joined: rank["joined"].as_bool().unwrap_or(false),
        stuck: rank["stuck"].as_bool().unwrap_or(false),
        stopped: rank["state"] == "stopped",
        ended,
        lost: node["status"] == "lost",
        bad_end: rank["end"].as_str().filter(|end| ended && !is_good_end(end)),
        culprit: rank["culprit"].as_bool().unwrap_or(false),
        why: rank["why"].as_str().unwrap_or_default(),
        waits: operation["seconds"].as_f64().filter(|_| !ended),
        keys: operation["keys"].as_str(),
    }
}

/// Whether this is the end of a rank that succeeded.
pub(crate) fn is_good_end(end: &str) -> bool {
    matches!(end, "" | "exit code 0" | "success" | "ended well")
}

/// The fields of one node that are used.
struct Node<'a> {
    rank: Option<u64>,
    host: Option<&'a str>,
    status: &'a str,
    beat_seconds: Option<f64>,
}

impl Node<'_> {
    fn name(&self) -> String {
        match (self.rank, self.host) {
            (Some(rank), host) => format!("node {rank}{}", on_host(host)),
            (None, Some(host)) => format!("node {host}"),
            (None, None) => "a node".into(),
        }
    }
}

fn nodes(run: &Value) -> Vec<Node<'_>> {
    fn read(node: &Value) -> Node<'_> {
        Node {
            rank: node["rank"].as_u64(),
            host: node["node"]["host"].as_str(),
            status: node["status"].as_str().unwrap_or_default(),
            beat_seconds: node["beat_seconds"].as_f64(),
        }
    }
    list(&run["nodes"]).iter().map(read).collect()
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn on_host(host: Option<&str>) -> String {
    host.map(|host| format!(" (host {host})")).unwrap_or_default()
}

/// `a, b, c and 5 more`; ranks of one host are not combined, because few are named.
fn listed(names: &[String]) -> String {
    match names.len() {
        0 => String::new(),
        1 => names[0].clone(),
        count if count <= NAMED_MAX => {
            format!("{} and {}", names[..count - 1].join(", "), names[count - 1])
        }
        count => format!("{} and {} more", names[..NAMED_MAX - 1].join(", "), count - (NAMED_MAX - 1)),
    }
}

fn are(names: &[String]) -> String {
    format!("{} {}", listed(names), if names.len() == 1 { "is" } else { "are" })
}

fn have(names: &[String]) -> String {
    format!("{} {}", listed(names), if names.len() == 1 { "has" } else { "have" })
}

fn counted(count: usize, noun: &str) -> String {
    if count == 1 { format!("{count} {noun}") } else { format!("{count} {noun}s") }
}

fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or_default()
}

/// `0.4 s`, `41 s`, `3 min 20 s`, `2 h 5 min`: as precise as useful.
pub(crate) fn show_seconds(seconds: f64) -> String {
    let whole = seconds.max(0.0) as u64;
    match whole {
        0..10 => format!("{:.1} s", seconds.max(0.0)),
        10..120 => format!("{whole} s"),
        120..7200 => format!("{} min {} s", whole / 60, whole % 60),
        7200..172_800 => format!("{} h {} min", whole / 3600, whole / 60 % 60),
        _ => format!("{} d {} h", whole / 86_400, whole / 3600 % 24),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rank(number: u64) -> Value {
        json!({"rank": number, "local_rank": number % 4, "pid": 100 + number, "state": "running", "end": null,
               "joined": true, "stuck": false, "why": "", "store_operation": null})
    }

    fn waiting(number: u64, seconds: f64) -> Value {
        let mut rank = rank(number);
        rank["store_operation"] = json!({"operation": "wait", "keys": "`pg/5`", "seconds": seconds});
        rank["stuck"] = json!(seconds > 10.0);
        rank
    }

    fn node(number: u64, host: &str, ranks: Vec<Value>) -> Value {
        json!({"node": {"id": host, "host": host}, "rank": number, "status": "joined", "beat_seconds": 1.0, "ranks": ranks})
    }

    fn run(nodes: Vec<Value>) -> Value {
        json!({"id": "x", "state": {"phase": "running", "round": 0, "nodes_min": 2, "nodes_max": 2, "restarts_used": 0,
               "max_restarts": 0, "failure": null, "outcome": null, "reason": ""}, "nodes": nodes})
    }

    fn says(run: &Value) -> (Level, String) {
        let verdict = verdict(run);
        (verdict.level, verdict.text)
    }

    #[test]
    fn a_rank_that_has_not_joined_is_named_and_waiting_ranks_are_counted() {
        let mut nodes = vec![node(0, "a1", (0..4).map(|rank| waiting(rank, 41.3)).collect())];
        nodes.push(node(1, "b7", vec![waiting(4, 40.0), rank(5), waiting(6, 12.0), rank(7)]));
        nodes[1]["ranks"][1]["joined"] = json!(false);
        assert_eq!(
            says(&run(nodes)),
            (
                Level::Bad,
                "job x: 7 of 8 ranks joined — rank 5 (host b7) has not joined, 6 have waited up to 41 s"
                    .into()
            )
        );
    }

    #[test]
    fn a_job_that_has_just_started_is_not_yet_called_bad() {
        let mut ranks = vec![waiting(0, 0.4), rank(1)];
        ranks[1]["joined"] = json!(false);
        let expected =
            "job x: 1 of 2 ranks joined — rank 1 (host a1) has not joined, 1 has waited up to 0.4 s";
        assert_eq!(says(&run(vec![node(0, "a1", ranks)])), (Level::Waiting, expected.into()));
    }

    #[test]
    fn a_rank_stopped_by_a_signal_is_the_reason_that_others_wait() {
        let mut ranks: Vec<Value> = (0..3).map(|rank| waiting(rank, 200.0)).collect();
        ranks.push(rank(3));
        ranks[3]["state"] = json!("stopped");
        ranks[3]["stuck"] = json!(true);
        let expected = "job x: 4 of 4 ranks joined — rank 3 (host a1) is stopped by a signal, 3 have waited up to 3 min 20 s";
        assert_eq!(says(&run(vec![node(0, "a1", ranks)])), (Level::Bad, expected.into()));
    }

    #[test]
    fn when_all_joined_and_most_wait_the_one_that_does_not_is_named() {
        let mut ranks: Vec<Value> = (0..3).map(|rank| waiting(rank, 60.0)).collect();
        ranks.push(rank(3));
        let expected = "job x: 4 of 4 ranks joined — 3 have waited up to 60 s for `pg/5`; rank 3 (host a1) is not waiting";
        assert_eq!(says(&run(vec![node(0, "a1", ranks)])), (Level::Bad, expected.into()));
    }

    #[test]
    fn when_nothing_is_wrong_it_says_so() {
        let ranks = vec![rank(0), waiting(1, 2.0)];
        let expected = "job x: 2 of 2 ranks joined and running";
        assert_eq!(says(&run(vec![node(0, "a1", ranks)])), (Level::Ok, expected.into()));
        let mut ranks = vec![rank(0), rank(1)];
        (ranks[1]["state"], ranks[1]["end"]) = (json!("ended"), json!("exit code 0"));
        let expected = "job x: 2 of 2 ranks joined, 1 exited successfully";
        assert_eq!(says(&run(vec![node(0, "a1", ranks)])), (Level::Ok, expected.into()));
    }

    #[test]
    fn a_lost_node_and_a_failed_rank_are_named() {
        let mut nodes = vec![node(0, "a1", vec![rank(0), rank(1)]), node(1, "b7", vec![rank(2), rank(3)])];
        nodes[1]["status"] = json!("lost");
        nodes[1]["beat_seconds"] = json!(23.0);
        (nodes[0]["ranks"][1]["state"], nodes[0]["ranks"][1]["end"]) =
            (json!("ended"), json!("killed by SIGKILL (out of memory?)\nmore"));
        let expected = "job x: 4 of 4 ranks joined — no heartbeat from node 1 (host b7) for 23 s, \
                        rank 1 (host a1) ended: killed by SIGKILL (out of memory?)";
        assert_eq!(says(&run(nodes)), (Level::Bad, expected.into()));
    }

    #[test]
    fn while_nodes_join_the_missing_ones_are_named() {
        let mut nodes = vec![node(0, "a1", vec![])];
        nodes.push(json!({"node": null, "rank": 1, "status": "missing", "beat_seconds": null, "ranks": []}));
        let mut joining = run(nodes);
        joining["state"]["phase"] = json!("joining");
        assert_eq!(
            says(&joining),
            (Level::Waiting, "job x: 1 of 2 nodes joined — node 1 has not joined".into())
        );
        joining["nodes"][1] = node(1, "b7", vec![]);
        let expected = "job x: 2 of 2 nodes joined — the ranks are about to start";
        assert_eq!(says(&joining), (Level::Waiting, expected.into()));
        joining["nodes"][1]["status"] = json!("lost");
        let expected = "job x: 1 of 2 nodes joined — node 1 (host b7) is unresponsive";
        assert_eq!(says(&joining), (Level::Bad, expected.into()));
    }

    #[test]
    fn a_job_that_is_over_says_how_it_ended() {
        let mut over = run(vec![node(0, "a1", vec![rank(0), rank(1)])]);
        over["state"]["phase"] = json!("over");
        over["state"]["outcome"] = json!("success");
        assert_eq!(says(&over), (Level::Ok, "job x succeeded: 2 ranks".into()));
        over["state"]["restarts_used"] = json!(1);
        assert_eq!(says(&over), (Level::Ok, "job x succeeded: 2 ranks, after 1 restart".into()));
        over["state"]["outcome"] = json!("failed");
        over["state"]["failure"] = json!({"rank": 1, "host": "a1", "summary": "exit code 3"});
        let expected = "job x failed: rank 1 (host a1): exit code 3; failed again after 1 restart";
        assert_eq!(says(&over), (Level::Bad, expected.into()));
        over["state"]["outcome"] = json!("closed");
        over["state"]["reason"] = json!("1 of 2 nodes joined within 600 s\n  hint: …");
        let expected = "job x was closed: 1 of 2 nodes joined within 600 s";
        assert_eq!(says(&over), (Level::Bad, expected.into()));
    }

    #[test]
    fn many_ranks_are_not_all_named() {
        let ranks = (0..512).map(|number| if number % 4 == 0 { waiting(number, 11.0) } else { rank(number) });
        let mut ranks: Vec<Value> = ranks.collect();
        for rank in ranks.iter_mut().filter(|rank| rank["store_operation"].is_null()) {
            rank["joined"] = json!(false);
        }
        let expected = "job x: 128 of 512 ranks joined — rank 1 (host a1), rank 2 (host a1), rank 3 (host a1) \
                        and 381 more have not joined, 128 have waited up to 11 s";
        assert_eq!(says(&run(vec![node(0, "a1", ranks)])), (Level::Bad, expected.into()));
    }

    #[test]
    fn unknown_data_is_left_out_and_nothing_panics() {
        for strange in [json!(null), json!(3), json!([]), json!({"id": 5, "nodes": "?", "state": []})] {
            assert_eq!(says(&strange), (Level::Ok, "job ?: no rank has been started yet".into()));
        }
        let unreadable =
            json!({"id": "x", "state": null, "nodes": [], "error": "it has no state in the store"});
        assert_eq!(
            says(&unreadable),
            (Level::Bad, "job x cannot be shown: it has no state in the store".into())
        );
        let mut untouched = json!(7);
        annotate(&mut untouched);
        assert_eq!(untouched, json!(7));
        let mut annotated = json!({"id": "x", "nodes": [{"ranks": [null, {"rank": -1}]}]});
        annotate(&mut annotated);
        assert_eq!(annotated["verdict"], "job x: 0 of 2 ranks joined — a rank and a rank have not joined");
        assert_eq!(annotated["verdict_level"], "waiting");
    }

    #[test]
    fn a_store_without_a_job_reports_long_waits() {
        let server = json!({"connections": 1, "keys": 12, "waiters_count": 3});
        let Verdict { level, text } = store_verdict(&server, &json!([{"keys": "`a`", "seconds": 9.9}]));
        assert_eq!((level, text.as_str()), (Level::Ok, "store: 1 client, 12 keys, no long waits"));
        let Verdict { level, text } = store_verdict(&server, &json!([{"keys": "`a`", "seconds": 41.0}]));
        assert_eq!(
            (level, text.as_str()),
            (Level::Waiting, "3 clients are waiting, the longest for 41 s: `a`")
        );
    }

    #[test]
    fn seconds_are_readable() {
        let said = [0.04, 9.96, 41.9, 119.0, 120.0, 7300.0, 200_000.0].map(show_seconds);
        assert_eq!(said, ["0.0 s", "10.0 s", "41 s", "119 s", "2 min 0 s", "2 h 1 min", "2 d 7 h"]);
    }
}
