use super::super::state::head_text;
use super::super::{Assignment, Outcome, scenarios};
use super::*;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex};
use tenfold_dashboard::job::Stamp;
use tenfold_store::{Deadline, ErrorKind, Fault, HashStore, Server, ServerOptions, StoreExt, TcpStore};

/// Longer than anything here takes.
const GUARD: Duration = Duration::from_secs(60);

struct Node {
    rendezvous: Rendezvous,
    events: Receiver<Event>,
}

impl Node {
    fn join(store: &Arc<dyn Store>, settings: &Settings, id: &str) -> Node {
        let (sender, events) = channel();
        let tell = move |event| drop(sender.send(event));
        let node = scenarios::node(id);
        let rendezvous = Rendezvous::join(store.duplicate().unwrap(), settings.clone(), node, tell).unwrap();
        Node { rendezvous, events }
    }

    /// The next event that is not a note.
    fn event(&self) -> Event {
        loop {
            match self.events.recv_timeout(GUARD).expect("there is an event") {
                Event::Note(_) | Event::Held(_) => {}
                event => return event,
            }
        }
    }

    fn start(&self) -> Assignment {
        match self.event() {
            Event::Start(assignment) => assignment,
            other => panic!("no start but {other:?}"),
        }
    }

    /// Expects a stop, and confirms it.
    fn stop(&self) -> String {
        match self.event() {
            Event::Stop { round, reason } => {
                self.rendezvous.tell(Order::Stopped { round });
                reason
            }
            other => panic!("no stop but {other:?}"),
        }
    }

    fn done(&self, round: u64) {
        self.rendezvous.tell(Order::Done { round });
    }
}

fn settings(nodes_min: usize, nodes_max: usize) -> Settings {
    Settings {
        beat_interval: Duration::from_millis(40),
        beats_missed_max: 250, // a node that only waits for a busy core is not declared dead
        ..scenarios::settings(nodes_min, nodes_max)
    }
}

/// The state in the store, put together as the folder does it.
fn state_in(store: &Arc<dyn Store>) -> State {
    let keys = Keys::new("job");
    let head = parse_head(&store.get(keys.state()).unwrap()).unwrap();
    let page = |(index, &stamp)| parse_page(&store.get(keys.page(index, stamp)).unwrap()).unwrap();
    let seats = head.pages.iter().enumerate().flat_map(page).collect();
    let failure = |stamp| serde_json::from_slice(&store.get(keys.failure(stamp)).unwrap()).unwrap();
    let failure = head.failure.map(failure);
    State::assemble(head, seats, failure).unwrap()
}

/// The nodes of the round that runs.
fn hosts(store: &Arc<dyn Store>) -> Vec<String> {
    state_in(store).members.iter().map(|seat| seat.node.host.clone()).collect()
}

fn failure(round: u64) -> JobFailure {
    scenarios::failure(round, "b", 1)
}

#[test]
fn a_store_that_outlives_many_jobs_keeps_the_last_ones() {
    const JOBS: usize = RUNS_KEPT + 8;
    let store: Arc<dyn Store> = Arc::new(HashStore::new());
    let settings = |job: usize| Settings { run_id: format!("job-{job}"), ..settings(1, 1) };
    // One that is not over is kept, however old.
    let _running = Node::join(&store, &settings(0), "a");
    _running.start();
    for job in 1..JOBS {
        let node = Node::join(&store, &settings(job), "a");
        node.start();
        node.done(0);
        assert_eq!(node.event(), Event::Over(Outcome::Success));
        assert!(node.rendezvous.settle(GUARD));
    }
    let keys: Vec<String> =
        store.list_keys().unwrap().iter().map(|key| String::from_utf8_lossy(key).into()).collect();
    let of =
        |job: usize| keys.iter().filter(|key| key.starts_with(&format!("tenfold/run/job-{job}/"))).count();
    assert!(of(0) > 0, "it runs");
    assert!((1..8).all(|job| of(job) == 0), "{keys:?}");
    assert!((8..JOBS).all(|job| of(job) > 0), "{keys:?}");
    let runs = store.get("tenfold/runs").unwrap();
    let runs: Vec<&str> = std::str::from_utf8(&runs).unwrap().lines().collect();
    assert_eq!((runs.len(), runs[0], runs[1]), (RUNS_KEPT + 1, "job-0", "job-8"));
}

/// Every store is one: in this process, and behind a server.
fn for_each_store(test: impl Fn(Arc<dyn Store>)) {
    test(Arc::new(HashStore::new()));
    let server = Server::start(ServerOptions::new("127.0.0.1", 0)).unwrap();
    test(Arc::new(TcpStore::connect("127.0.0.1", server.address().port()).unwrap()));
}

#[test]
fn nodes_start_together_fail_together_take_one_more_in_lose_one_and_succeed() {
    for_each_store(|store| {
        let settings = Settings { last_call: Duration::ZERO, ..settings(3, 4) };
        let mut nodes: Vec<Node> = ["a", "b", "c"].map(|id| Node::join(&store, &settings, id)).into();
        let mut order: Vec<String> = Vec::new();
        for node in &nodes {
            let start = node.start();
            assert_eq!((start.round, start.nodes), (0, 3));
            order = hosts(&store);
            assert_eq!(order[start.node_rank], start.node().host);
        }
        nodes[1].rendezvous.tell(Order::Failed { round: 0, failure: failure(0) });
        for node in &nodes {
            assert_eq!(node.stop(), "rank 1 on node b failed: exit code 3");
        }
        for node in &nodes {
            assert_eq!((node.start().round), 1);
        }
        nodes.push(Node::join(&store, &settings, "d"));
        for node in &nodes[..3] {
            assert_eq!(node.stop(), "node d joined");
        }
        order.push("d".into());
        for node in &nodes {
            let start = node.start();
            assert_eq!((start.round, &hosts(&store), start.nodes), (2, &order, 4));
        }
        drop(nodes.remove(1));
        for node in &nodes {
            assert_eq!(node.stop(), "node b sent no heartbeat for 10 s");
        }
        for node in &nodes {
            assert_eq!(node.start().round, 3);
            node.done(3);
        }
        for node in &nodes {
            assert_eq!(node.event(), Event::Over(Outcome::Success));
        }
        for node in nodes {
            assert!(node.rendezvous.settle(GUARD));
        }
        assert_eq!(store.get("tenfold/runs").unwrap(), b"job\n");
        assert!(!store.check(&["tenfold/run/job/node/b"]).unwrap());
    });
}

#[test]
fn a_node_that_leaves_is_answered_and_the_others_go_on() {
    for_each_store(|store| {
        let nodes = ["a", "b"].map(|id| Node::join(&store, &settings(1, 2), id));
        nodes.iter().for_each(|node| assert_eq!(node.start().round, 0));
        nodes[0].rendezvous.tell(Order::Leave { reason: "SIGTERM".into() });
        assert_eq!(nodes[0].event(), Event::Stop { round: 0, reason: "node a left: SIGTERM".into() });
        let outcome = Outcome::Closed("this node left the job: SIGTERM".into());
        assert_eq!(nodes[0].event(), Event::Over(outcome));
        assert_eq!(nodes[1].stop(), "node a left: SIGTERM");
        let start = nodes[1].start();
        assert_eq!((start.round, hosts(&store)), (1, vec!["b".into()]));
        // Also if no caller waits for the answer.
        nodes[1].rendezvous.tell(Order::Leave { reason: "SIGINT".into() });
        let [_, b] = nodes;
        drop(b.rendezvous);
        let state = state_in(&store);
        assert_eq!((state.members.len(), state.reason.as_str()), (0, "node b left: SIGINT"));
    });
}

#[test]
fn the_next_job_under_the_same_id_begins_when_the_one_before_is_over() {
    for_each_store(|store| {
        for job in 0..3 {
            let nodes = ["a", "b"].map(|id| Node::join(&store, &settings(2, 2), &format!("{id}{job}")));
            for node in &nodes {
                assert_eq!(node.start().round, 0);
                node.done(0);
            }
            for node in nodes {
                assert_eq!(node.event(), Event::Over(Outcome::Success));
            }
        }
    });
}

#[test]
fn what_a_rank_does_goes_out_with_the_beat() {
    let store: Arc<dyn Store> = Arc::new(HashStore::new());
    let node = Node::join(&store, &settings(1, 1), "a");
    node.start();
    let ranks = serde_json::json!([{"rank": 0, "pid": 7}]);
    node.rendezvous.tell(Order::Status(Box::new(NodeStatus { ranks, ..NodeStatus::default() })));
    let beat = |key: &str| serde_json::from_slice::<serde_json::Value>(&store.get(key).unwrap()).unwrap();
    loop {
        let seen = beat("tenfold/run/job/node/a");
        assert_eq!(seen["node"]["host"], "a");
        assert_eq!(seen["silence_max_seconds"], settings(1, 1).silence_max().as_secs_f64());
        if seen["ranks"][0]["pid"] == 7 {
            break;
        }
        std::thread::yield_now();
    }
}

#[test]
fn a_lost_store_ends_the_job_with_an_error_that_names_it() {
    let server = Server::start(ServerOptions::new("127.0.0.1", 0)).unwrap();
    let address = server.address();
    let store: Arc<dyn Store> = Arc::new(TcpStore::connect("127.0.0.1", address.port()).unwrap());
    let settings = Settings { beats_missed_max: 2, ..settings(1, 1) };
    let node = Node::join(&store, &settings, "a");
    node.start();
    drop(server);
    let Event::Stop { round: 0, reason } = node.event() else { panic!("it is stopped") };
    let Event::Over(Outcome::Closed(text)) = node.event() else { panic!("it is over") };
    assert!(text.starts_with(&format!("the store at {address} was lost: ")), "{text}");
    assert!(text.starts_with(&reason), "{reason}");
    assert!(node.rendezvous.settle(GUARD));
}

#[test]
fn a_key_that_holds_something_else_is_named_in_the_error() {
    let store: Arc<dyn Store> = Arc::new(HashStore::new());
    store.set("tenfold/run/job/state", "hello").unwrap();
    let node = Node::join(&store, &settings(1, 1), "a");
    let text = "the key `tenfold/run/job/state` of the store at this process does not hold the state of a job: \
                expected value at line 1 column 1\n  \
                hint: use another run id, or check whether another program or another version of tenfold uses that key";
    assert_eq!(node.event(), Event::Over(Outcome::Closed(text.into())));
}

#[test]
fn a_store_does_not_fill_with_versions() {
    let store: Arc<dyn Store> = Arc::new(HashStore::new());
    let settings = Settings { max_restarts: 100, ..settings(1, 1) };
    let node = Node::join(&store, &settings, "a");
    for round in 0..100 {
        assert_eq!(node.start().round, round);
        node.rendezvous.tell(Order::Failed { round, failure: failure(round) });
        node.stop();
    }
    assert_eq!(node.start().round, 100);
    let keys = u64::try_from(store.num_keys().unwrap()).unwrap();
    // The list of jobs, the state, its page and failure, the counter of wishes, the beat and the node's text.
    assert!(keys <= TURNS_KEPT + 7, "{keys} keys");
}

/// Every fifth answer gets lost, whether the request was served or not.
#[derive(Clone)]
struct Lossy {
    store: HashStore,
    calls: Arc<AtomicU64>,
}

impl Store for Lossy {
    fn call(&self, request: Request<'_>, deadline: Deadline) -> Result<Response, Fault> {
        let lost = || Err(Fault::new(ErrorKind::Lost, "the connection is lost"));
        match self.calls.fetch_add(1, Ordering::Relaxed) % 10 {
            4 => lost(),
            9 => self.store.call(request, deadline).and_then(|_| lost()),
            _ => self.store.call(request, deadline),
        }
    }
    fn duplicate(&self) -> Result<Arc<dyn Store>, Fault> {
        Ok(Arc::new(self.clone()))
    }
}

#[test]
fn requests_and_answers_that_get_lost_change_nothing() {
    let store = Lossy { store: HashStore::new(), calls: Arc::default() };
    let store: Arc<dyn Store> = Arc::new(store);
    let settings = Settings { max_restarts: 5, ..settings(3, 3) };
    let nodes = ["a", "b", "c"].map(|id| Node::join(&store, &settings, id));
    for round in 0..5 {
        nodes.iter().for_each(|node| assert_eq!(node.start().round, round));
        nodes[1].rendezvous.tell(Order::Failed { round, failure: failure(round) });
        nodes.iter().for_each(|node| assert_eq!(node.stop(), "rank 1 on node b failed: exit code 3"));
    }
    for node in &nodes {
        assert_eq!(node.start().round, 5);
        node.done(5);
    }
    nodes.iter().for_each(|node| assert_eq!(node.event(), Event::Over(Outcome::Success)));
}

/// Answers nothing until it is released.
struct Stuck(Arc<(Mutex<bool>, Condvar)>);

impl Store for Stuck {
    fn call(&self, _: Request<'_>, _: Deadline) -> Result<Response, Fault> {
        let (is_free, freed) = &*self.0;
        drop(freed.wait_while(is_free.lock().unwrap(), |is_free| !*is_free).unwrap());
        Err(Fault::new(ErrorKind::Protocol, "it was stuck"))
    }
    fn duplicate(&self) -> Result<Arc<dyn Store>, Fault> {
        Ok(Arc::new(Stuck(self.0.clone())))
    }
}

#[test]
fn a_store_that_does_not_answer_does_not_keep_a_rendezvous_from_being_dropped() {
    let gate: Arc<(Mutex<bool>, Condvar)> = Arc::default();
    let store: Arc<dyn Store> = Arc::new(Stuck(gate.clone()));
    let node = Node::join(&store, &settings(1, 1), "a");
    node.rendezvous.tell(Order::Leave { reason: "SIGTERM".into() });
    drop(node.rendezvous);
    *gate.0.lock().unwrap() = true;
    gate.1.notify_all();
    let text = "the store at a store of this program cannot be used: it was stuck";
    let last = node.events.iter().find(|event| !matches!(event, Event::Note(_) | Event::Held(_)));
    assert_eq!(last, Some(Event::Over(Outcome::Closed(text.into()))));
}

#[test]
fn a_state_that_was_not_announced_is_found_with_the_next_beat() {
    let store: Arc<dyn Store> = Arc::new(HashStore::new());
    let node = Node::join(&store, &Settings { last_call: Duration::ZERO, ..settings(1, 2) }, "a");
    node.start();
    // A node that dies as soon as it has written the state.
    let text = store.get("tenfold/run/job/state").unwrap();
    let before = state_in(&store);
    let mut state = before.clone();
    state.join(&scenarios::node("z"));
    let change = state.seal(&before, Stamp(before.term, 1000));
    for (index, seats) in &change.pages {
        let text = serde_json::to_vec(seats).unwrap();
        store.set(Keys::new("job").page(*index, change.stamp), text).unwrap();
    }
    let written = store.compare_set("tenfold/run/job/state", text, head_text(&state.head).unwrap()).unwrap();
    assert_eq!(parse_head(&written), Ok(state.head));
    assert_eq!(node.stop(), "node z joined");
    node.start();
    assert_eq!(hosts(&store), ["a", "z"], "nothing is known against it");
    assert_eq!(node.stop(), "node z sent no heartbeat for 10 s");
    node.start();
    assert_eq!(hosts(&store), ["a"]);
}

#[test]
fn many_nodes_find_each_other() {
    let server = Server::start(ServerOptions::new("127.0.0.1", 0)).unwrap();
    let store: Arc<dyn Store> = Arc::new(TcpStore::connect("127.0.0.1", server.address().port()).unwrap());
    let count = 40;
    // No node is declared dead, however long forty threads have to share a busy core.
    let settings = Settings { beats_missed_max: 1000, ..settings(count, count) };
    let nodes: Vec<Node> = (0..count).map(|at| Node::join(&store, &settings, &format!("n{at}"))).collect();
    let mut ranks: Vec<usize> = nodes.iter().map(|node| node.start().node_rank).collect();
    ranks.sort_unstable();
    assert!(ranks.into_iter().eq(0..count));
    nodes.iter().for_each(|node| node.done(0));
    nodes.iter().for_each(|node| assert_eq!(node.event(), Event::Over(Outcome::Success)));
    assert!(nodes[0].rendezvous.settle(GUARD));
}

#[test]
fn invalid_settings_are_an_immediate_error() {
    let store: Arc<dyn Store> = Arc::new(HashStore::new());
    let error = Rendezvous::join(store, settings(2, 1), scenarios::node("a"), |_| {}).unwrap_err();
    assert_eq!(error.to_string(), "invalid number of nodes, 2 to 1: expected 1 to 16384, the smaller first");
}
