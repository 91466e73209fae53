#![expect(clippy::disallowed_methods, reason = "some instant to count from")]

use std::time::Duration;

use proptest::prelude::*;
use serde_json::json;

use super::*;

fn node(id: &str, ranks: usize) -> serde_json::Value {
    json!({"id": id, "host": format!("host-{id}"), "ranks": ranks, "role": "default", "fixed_rank": null,
        "worker_store": null})
}

fn state(phase: &str, members: &[(&str, Option<usize>)]) -> serde_json::Value {
    let members: Vec<_> = members
        .iter()
        .map(|(id, rank)| json!({"node": node(id, 2), "rank": rank, "ready": true, "done": false}))
        .collect();
    json!({"version": 3, "round": 0, "phase": phase, "nodes_min": 2, "nodes_max": 4, "max_restarts": 3,
        "restarts_used": 1, "members": members, "spares": [], "failure": null, "outcome": null, "reason": ""})
}

fn rank(local_rank: usize, rank: usize, state: &str, peer: &str) -> serde_json::Value {
    let connections: Vec<&str> = Some(peer).into_iter().filter(|peer| !peer.is_empty()).collect();
    json!({"rank": rank, "local_rank": local_rank, "pid": 4711, "state": state, "end": null,
        "store_connections": connections, "cpu_seconds": 12.5, "memory_bytes": 1048576,
        "last_output_seconds": null, "started_unix": 1763280000.0})
}

fn left() -> Left {
    Left { nodes: NODES_MAX, bytes: BEATS_MAX, ranks: RANKS_MAX }
}

/// The state of a job as it is in the store: its head and one page, of a state with all its nodes.
fn stored(state: &serde_json::Value) -> (Head, Vec<Option<Value>>) {
    let spare = |node: &serde_json::Value| json!({"node": node, "spare": true});
    let list = |name: &str| state[name].as_array().cloned().unwrap_or_default();
    let seats: Vec<_> = list("members").into_iter().chain(list("spares").iter().map(spare)).collect();
    let mut head = state.clone();
    head["pages"] = json!([[1, 1]]);
    let text = |value: String| Some(Value::from(value.into_bytes()));
    (parse_head(head.to_string().as_bytes()).unwrap(), vec![text(json!(seats).to_string())])
}

fn parsed(state: &serde_json::Value) -> Result<State, String> {
    let (head, texts) = stored(state);
    parse_state(head, &mut texts.into_iter(), &mut left())
}

fn beat_of(ranks: Vec<RankStatus>) -> Beat {
    let (spares, generations) = (Vec::new(), Vec::new());
    Beat { seconds: 0.0, silence_max: 0.0, ranks, spares, generations }
}

fn raw(state: &serde_json::Value, beats: &[(&str, f64, Vec<serde_json::Value>)]) -> Raw {
    let beat = |(id, seconds, ranks): &(&str, f64, Vec<serde_json::Value>)| {
        let text = json!({"beat": 17, "node": node(id, 2), "ranks": ranks}).to_string();
        let text = parse_beat(text.as_bytes());
        (id.to_string(), Beat { seconds: *seconds, silence_max: silence_max(&text), ..beat_of(text.ranks.0) })
    };
    Raw { id: "job".into(), state: parsed(state), nodes: beats.iter().map(beat).collect() }
}

fn waiter(peer: &str, keys: &str, seconds: f64) -> WaiterFacts {
    let waiter =
        json!({"peer": peer, "operation": "wait", "keys": keys, "keys_count": 1, "seconds": seconds});
    serde_json::from_value(waiter).unwrap()
}

fn one(raw: Raw, waiters: &[WaiterFacts]) -> Run {
    describe(vec![raw], waiters, &[]).remove(0)
}

/// `host:status` of each node.
fn nodes(run: &Run) -> Vec<String> {
    let show = |node: &Node| {
        let id = node.node.as_ref().map_or("-", |node| &node.id);
        let rank = node.rank.map_or("-".into(), |rank| rank.to_string());
        format!("{rank} {id} {}", node.status.name())
    };
    run.nodes.iter().map(show).collect()
}

#[test]
fn a_rank_that_does_not_wait_is_shown_with_what_it_last_asked_for() {
    let running = state("running", &[("a", Some(0)), ("b", Some(1))]);
    let beats =
        [("a", 1.0, vec![rank(0, 0, "running", "127.0.0.1:7"), rank(1, 1, "running", "127.0.0.1:8")])];
    let client = |peer: &str, operation: Option<&str>, idle: f64| -> ClientFacts {
        serde_json::from_value(json!({"peer": peer, "last_operation": operation, "idle_seconds": idle}))
            .unwrap()
    };
    // A server that listens on `::` sees an IPv4 client as an IPv6 one.
    let clients = [client("[::ffff:127.0.0.1]:7", Some("set"), 33.0), client("127.0.0.1:8", None, 1.0)];
    let run = describe(vec![raw(&running, &beats)], &[], &clients).remove(0);
    let last: Vec<_> = run.nodes[0].ranks.iter().map(|rank| rank.store_last.clone()).collect();
    assert_eq!(last, [Some(StoreLast { operation: "set".into(), seconds: 33.0 }), None]);
}

/// The server sees only the relay, so the launcher says what its ranks wait for.
#[test]
fn a_rank_behind_a_relay_is_shown_with_what_its_launcher_reported() {
    let running = state("running", &[("a", Some(0)), ("b", Some(1))]);
    let behind = |local_rank: usize, number: usize, wait: serde_json::Value| {
        let mut rank = rank(local_rank, number, "running", &format!("127.0.0.1:{number} by relay of b"));
        rank["store_wait"] = wait;
        rank
    };
    let wait = json!({"operation": "wait", "keys": "`/k`", "keys_count": 1, "seconds": 9.0});
    let ranks = vec![behind(0, 2, wait), behind(1, 3, serde_json::Value::Null)];
    // The beat is two seconds old.
    let beats = [("a", 0.5, vec![rank(0, 0, "running", "127.0.0.1:2")]), ("b", 2.0, ranks)];
    // A rank of another node has the loopback address that rank 2 has on its own.
    let run = one(raw(&running, &beats), &[waiter("127.0.0.1:2", "`/other`", 3.0)]);
    let shown: Vec<_> = run.nodes[1].ranks.iter().map(|rank| (rank.joined, rank.why.as_str())).collect();
    assert_eq!(shown, [(true, "has waited 11 s in the store for `/k` (wait)"), (true, "")]);
    let expected =
        StoreOperation { operation: "wait".into(), keys: "`/k`".into(), keys_count: 1, seconds: 11.0 };
    assert_eq!(run.nodes[1].ranks[0].store_operation.as_ref(), Some(&expected));
    assert_eq!(
        run.nodes[0].ranks[0].store_operation.as_ref().map(|wait| wait.keys.as_str()),
        Some("`/other`")
    );
    let json = serde_json::to_value(&run.nodes[1].ranks[0]).unwrap();
    assert_eq!(json.get("store_wait"), None, "it is shown as `store_operation`");

    let alone = one(raw(&running, &beats), &[]);
    let reported: Vec<_> = alone.reported_waits().collect();
    assert_eq!(reported, [Reported { peer: "127.0.0.1:2 by relay of b", rank: 2, wait: &expected }]);
}

#[test]
fn waits_of_launchers_are_not_shown() {
    let facts = |waiters: &[WaiterFacts]| -> Facts {
        serde_json::from_value(json!({"waiters_count": 2, "oldest_wait_seconds": 40.0, "waiters": waiters}))
            .unwrap()
    };
    let launcher = waiter("127.0.0.1:1", "`/tenfold/run/job/version/7`", 40.0);
    let rank = waiter("127.0.0.1:2", "`/default_pg/0`", 3.0);
    let mut both = facts(&[launcher.clone(), rank.clone()]);
    leave_out_launchers(&mut both);
    assert_eq!((both.waiters_count, both.oldest_wait_seconds), (1, 3.0));
    assert_eq!(both.waiters, std::slice::from_ref(&rank));
    let mut launchers = facts(&[launcher.clone(), launcher]);
    leave_out_launchers(&mut launchers);
    assert_eq!((launchers.waiters_count, launchers.oldest_wait_seconds), (0, 0.0));
    let mut unlisted = facts(&[]);
    leave_out_launchers(&mut unlisted);
    assert_eq!((unlisted.waiters_count, unlisted.oldest_wait_seconds), (2, 40.0));
}

#[test]
fn a_node_is_lost_when_it_is_unresponsive_for_longer_than_it_announced() {
    let silence_max = |text: &str| silence_max(&parse_beat(text.as_bytes()));
    assert_eq!(silence_max(r#"{"beat": 1, "silence_max_seconds": 90.0}"#), 90.0);
    assert_eq!(silence_max(r#"{"beat": 1}"#), 15.0, "an older launcher says nothing of it");
    assert_eq!(
        silence_max(r#"{"beat": 1, "silence_max_seconds": 0.2}"#),
        5.0,
        "beats are read once per second"
    );
    let running = state("running", &[("a", Some(0)), ("b", Some(1))]);
    let mut raw = raw(&running, &[("a", 60.0, vec![]), ("b", 91.0, vec![])]);
    raw.nodes.values_mut().for_each(|beat| beat.silence_max = 90.0);
    assert_eq!(nodes(&one(raw, &[])), ["0 a joined", "1 b lost"]);
}

#[test]
fn nodes_are_joined_waiting_lost_spare_or_missing() {
    let running = state("running", &[("b", Some(1)), ("a", Some(0))]);
    let beats = [("a", 1.0, vec![]), ("b", 15.5, vec![])];
    assert_eq!(nodes(&one(raw(&running, &beats), &[])), ["0 a joined", "1 b lost"]);

    let mut with_spare = running;
    with_spare["spares"] = json!([node("c", 2), node("d", 2)]);
    let beats = [("a", 1.0, vec![]), ("c", 2.0, vec![]), ("d", 60.0, vec![])];
    let expected = ["0 a joined", "1 b joined", "- c spare", "- d lost"];
    assert_eq!(nodes(&one(raw(&with_spare, &beats), &[])), expected);

    let joining = state("joining", &[("a", None)]);
    assert_eq!(nodes(&one(raw(&joining, &[]), &[])), ["- a waiting", "1 - missing"]);

    let mut fixed = joining;
    fixed["members"][0]["node"]["fixed_rank"] = json!(1);
    assert_eq!(nodes(&one(raw(&fixed, &[]), &[])), ["- a waiting", "0 - missing"]);

    let over = state("over", &[("a", Some(0))]);
    let beats = [("a", 900.0, vec![])];
    assert_eq!(nodes(&one(raw(&over, &beats), &[])), ["0 a joined"], "who went home is not lost");
}

#[test]
fn ranks_that_have_not_joined_are_shown_with_their_numbers() {
    let running = state("running", &[("a", Some(0)), ("b", Some(1))]);
    let known = vec![rank(1, 3, "running", "10.0.0.2:40112"), rank(0, 2, "running", "")];
    let run = one(raw(&running, &[("b", 1.0, known)]), &[]);
    let seen = |node: usize| -> Vec<(Option<usize>, &str, bool)> {
        let ranks = run.nodes[node].ranks.iter();
        ranks.map(|rank| (rank.status.rank, rank.status.state.as_str(), rank.joined)).collect()
    };
    assert_eq!(seen(0), [(Some(0), "missing", false), (Some(1), "missing", false)]);
    assert_eq!(seen(1), [(Some(2), "running", false), (Some(3), "running", true)]);

    // A spare of the second node has become rank 1.
    let known = vec![rank(0, 2, "running", ""), rank(1, 3, "running", ""), rank(1, 1, "running", "")];
    let run = one(raw(&running, &[("a", 1.0, vec![rank(0, 0, "running", "")]), ("b", 1.0, known)]), &[]);
    let numbers = |node: usize| run.nodes[node].ranks.iter().map(|rank| rank.status.rank).collect::<Vec<_>>();
    assert_eq!(numbers(0), [Some(0)]);
    assert_eq!(numbers(1), [Some(2), Some(3), Some(1)]);

    // Before the round begins the numbers are unknown; after its end no rank is missing.
    let run = one(raw(&state("joining", &[("a", None)]), &[]), &[]);
    assert_eq!(run.nodes[0].ranks.len(), 2);
    assert_eq!(run.nodes[0].ranks[0].status.rank, None);
    let ended = vec![rank(0, 0, "ended", "")];
    let run = one(raw(&state("over", &[("a", Some(0))]), &[("a", 99.0, ended)]), &[]);
    assert_eq!(run.nodes[0].ranks.len(), 1);
    assert!(run.nodes[0].ranks[0].joined, "it was there");
}

#[test]
fn a_rank_is_stuck_when_stopped_or_when_it_waits_long() {
    let running = state("running", &[("a", Some(0)), ("b", Some(1))]);
    let known = |first: usize, peers: [&str; 2], state: &str| {
        vec![rank(0, first, state, peers[0]), rank(1, first + 1, "running", peers[1])]
    };
    let beats = [
        ("a", 1.0, known(0, ["10.0.0.1:1", "10.0.0.1:2"], "stopped")),
        ("b", 1.0, known(2, ["10.0.0.2:1", "10.0.0.2:2"], "running")),
    ];
    let waiters = [
        waiter("[::ffff:10.0.0.2]:1", "`/a/b`", 41.0), // as a server on `::` sees it
        waiter("10.0.0.2:1", "`/c`", 3.0),
        waiter("10.0.0.2:2", "`/d`", 10.0),
        waiter("10.0.0.9:9", "`/x`", 99.0),
    ];
    let run = one(raw(&running, &beats), &waiters);
    let whys: Vec<(bool, &str)> =
        run.nodes.iter().flat_map(|node| &node.ranks).map(|rank| (rank.stuck, rank.why.as_str())).collect();
    let expected = [
        (true, "stopped by a signal (SIGSTOP or Ctrl-Z); send SIGCONT to continue it"),
        (false, ""),
        (true, "has waited 41 s in the store for `/a/b` (wait)"),
        (false, ""),
    ];
    assert_eq!(whys, expected);
    let operation = run.nodes[1].ranks[1].store_operation.as_ref().unwrap();
    assert_eq!((operation.keys.as_str(), operation.seconds), ("`/d`", 10.0), "shown, but not yet stuck");
    let peers: Vec<(String, usize)> = run.ranks_by_peer().collect();
    assert_eq!(peers[2], ("10.0.0.2:1".into(), 2));
}

#[test]
fn a_rank_that_others_wait_for_in_a_collective_is_named() {
    let running = state("running", &[("a", Some(0)), ("b", Some(1))]);
    let at = |local_rank: usize, number: usize, state: &str, call: u64, under_way: bool| {
        let mut rank = rank(local_rank, number, state, "10.0.0.1:1");
        rank["collectives"] = json!([{"group": "default", "rank": number, "size": 4, "call": "all_reduce(sum, float32 × 9)",
            "number": call, "under_way": under_way, "seconds": 41.0}]);
        if number == 3 {
            rank["collectives"][0]["stuck"] =
                json!({"number": 288, "seconds": 30, "itself": false, "text": "rank 2"});
        }
        rank
    };
    let beats = |late: &str| {
        [
            ("a", 1.0, vec![at(0, 0, "running", 288, true), at(1, 1, "running", 288, true)]),
            ("b", 1.0, vec![at(0, 2, late, 287, false), at(1, 3, "running", 288, true)]),
        ]
    };
    let run = one(raw(&running, &beats("running")), &[]);
    let ranks: Vec<&Rank> = run.nodes.iter().flat_map(|node| &node.ranks).collect();
    let culprits: Vec<bool> = ranks.iter().map(|rank| rank.culprit).collect();
    assert_eq!(culprits, [false, false, true, false]);
    let why = "has not entered all_reduce #288 of group `default`, in which 3 other ranks have waited for 41 s; it last finished \
               all_reduce #287 (41 s)";
    assert_eq!((ranks[2].stuck, ranks[2].why.as_str()), (true, why));
    let verdict = super::super::verdict::verdict(&serde_json::to_value(&run).unwrap());
    assert_eq!(verdict.text, format!("job job: 4 of 4 ranks joined — rank 2 (host host-b) {why}"));

    let ended = one(raw(&running, &beats("ended")), &[]);
    assert!(
        ended.nodes.iter().flat_map(|node| &node.ranks).all(|rank| !rank.culprit),
        "that rank has exited"
    );
}

#[test]
fn a_state_that_cannot_be_read_is_an_error_text() {
    let error = |state: Result<State, String>| {
        let run = one(Raw { id: "job".into(), state, nodes: HashMap::new() }, &[]);
        assert_eq!((run.state, run.nodes), (None, Vec::new()));
        run.error.unwrap()
    };
    let head = |text: &str| parse_head(text.as_bytes()).map(|head| State::new(head, Vec::new(), None));
    let expected = "its state cannot be read: EOF while parsing an object at line 1 column 1";
    assert_eq!(error(head("{")), expected);
    let long = format!("{{\"pages\": [{}]}}", vec!["[1,1]"; job::PAGES_MAX + 1].join(","));
    assert!(error(head(&long)).contains("invalid length 513, expected a list of at most 512 pages"));
    let expected = "its state is 65537 bytes long, the limit is 65536";
    assert_eq!(error(head(&" ".repeat(HEAD_MAX + 1))), expected);
    let pages = |pages: &[usize]| {
        let pages: Vec<_> = pages.iter().map(|&count| format!("[{}]", vec!["{}"; count].join(","))).collect();
        let head = Head { pages: vec![job::Stamp(1, 1); pages.len()], ..Head::default() };
        let mut texts = pages.into_iter().map(|page| Some(Value::from(page.into_bytes())));
        parse_state(head, &mut texts, &mut left())
    };
    let expected = "invalid length 16385, expected a list of at most 16384 nodes";
    assert!(error(pages(&[NODES_MAX + 1])).contains(expected));
    let expected = "its 16386 nodes exceed the limit of 16384 nodes of all jobs";
    assert_eq!(error(pages(&[8193, 8193, 8193])), expected);
}

#[test]
fn nodes_are_in_order_whatever_pages_they_are_in_and_a_missing_page_is_left_out() {
    let seat = |id: &str, rank: Option<usize>, joined: u64| json!({"node": node(id, 1), "rank": rank, "joined": joined});
    let spare = |id: &str, joined: u64| json!({"node": node(id, 1), "spare": true, "joined": joined});
    let page = |seats: serde_json::Value| Some(Value::from(seats.to_string().into_bytes()));
    let failure = json!({"round": 2, "host": "b", "rank": 1, "summary": "exit code 3", "text": "oh"});
    let head = Head {
        pages: vec![job::Stamp(1, 1); 3],
        failure: Some(job::Stamp(1, 2)),
        phase: Phase::Running,
        ..Head::default()
    };
    let texts = [
        page(json!([spare("e", 9), seat("c", None, 7), seat("b", Some(1), 3)])),
        None,
        page(json!([spare("d", 8), seat("a", Some(0), 5)])),
        page(failure),
        page(json!("of another job")),
    ];
    let mut texts = texts.into_iter();
    let state = parse_state(head, &mut texts, &mut left()).unwrap();
    let ids: Vec<&str> = state.nodes().map(|node| node.id.as_str()).collect();
    assert_eq!((ids, state.members.len()), (vec!["a", "b", "c", "d", "e"], 3));
    assert_eq!(state.failure.unwrap().summary, "exit code 3");
    assert_eq!(texts.count(), 1, "the next job's texts are left");
}

#[test]
fn numbers_from_clients_are_bounded() {
    let mut boastful = state("running", &[("a", Some(0)), ("b", Some(usize::MAX))]);
    boastful["nodes_min"] = json!(u64::MAX);
    boastful["members"][0]["node"]["ranks"] = json!(u64::MAX);
    let run = one(raw(&boastful, &[]), &[]);
    assert_eq!(run.nodes[0].ranks.len(), UNKNOWN_MAX);
    assert_eq!(run.nodes.len(), 2 + NODES_MAX - 2);

    let list = (0..100).map(|index| format!("job{index}\n")).collect::<String>() + "job50\n\n";
    let ids = ids(&Value::from(list.into_bytes()));
    assert_eq!((ids.len(), ids[0].as_str(), ids[31].as_str()), (RUNS_MAX, "job69", "job50"));
}

#[test]
fn ranks_between_nonsense_are_still_read() {
    let text = json!({"beat": 3, "more": 1, "ranks": [7, null, {"rank": "x"}, rank(0, 5, "running", "")]});
    let NodeText { beat, ranks: Ranks(ranks), .. } = parse_beat(text.to_string().as_bytes());
    assert_eq!((beat, ranks.len(), ranks[0].rank), (3, 1, Some(5)));
    assert_eq!(parse_beat(b"nonsense").beat, 0);
    assert_eq!(parse_beat(b"{\"beat\": 4, \"ranks\": null}").beat, 4);
}

#[test]
fn a_beat_is_as_old_as_its_last_move() {
    let (mut beats, start) = (Beats::default(), Instant::now());
    let at = |seconds: u64| start + Duration::from_secs(seconds);
    assert_eq!(beats.age("job", "a", 7, at(0)), 0.0);
    assert_eq!(beats.age("job", "a", 7, at(20)), 20.0);
    assert_eq!(beats.age("other", "a", 7, at(20)), 0.0, "a node of the same name in another job");
    assert_eq!(beats.age("job", "a", 8, at(21)), 0.0);
    assert_eq!(beats.age("job", "a", 8, at(23)), 2.0);
    assert_eq!(beats.age("job", "a", 1, at(24)), 0.0, "a beat that starts again");
    beats.forget_others(&[]);
    assert!(beats.seen.is_empty());
}

/// Any JSON, often with the expected fields.
fn any_json() -> impl Strategy<Value = serde_json::Value> {
    let leaf = prop_oneof![
        Just(json!(null)),
        any::<bool>().prop_map(|value| json!(value)),
        any::<u64>().prop_map(|value| json!(value)),
        (0_u64..4).prop_map(|value| json!(value)),
        any::<f64>().prop_map(|value| json!(value)),
        prop::sample::select(vec!["running", "joining", "over", "stopped", "a", "127.0.0.1:1"])
            .prop_map(|value| json!(value)),
    ];
    let names = vec![
        "pages",
        "spare",
        "node",
        "rank",
        "ranks",
        "id",
        "phase",
        "nodes_min",
        "state",
        "local_rank",
        "failure",
        "fixed_rank",
        "store_connections",
        "beat",
    ];
    leaf.prop_recursive(5, 60, 6, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..5).prop_map(|list| json!(list)),
            prop::collection::btree_map(prop::sample::select(names.clone()), inner, 0..8)
                .prop_map(|fields| json!(fields)),
        ]
    })
}

proptest! {
    #[test]
    fn nothing_in_the_keys_harms_the_reader(state in any_json(), page in any_json(), beat in any_json()) {
        let ranks = parse_beat(beat.to_string().as_bytes()).ranks.0;
        let texts = [&page, &state].map(|text| Some(Value::from(text.to_string().into_bytes())));
        let state = parse_head(state.to_string().as_bytes())
            .and_then(|head| parse_state(head, &mut texts.into_iter(), &mut left()));
        let nodes = [("a".to_owned(), Beat { seconds: 1.0, silence_max: LOST_AFTER, ..beat_of(ranks) })].into();
        let run = one(Raw { id: "job".into(), state, nodes }, &[waiter("127.0.0.1:1", "`k`", 20.0)]);
        serde_json::to_string(&run).unwrap();
    }
}
