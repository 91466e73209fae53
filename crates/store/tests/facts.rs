//! What a running server reports to its observers, while its clients notice nothing.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tenfold_store::{Facts, KeyKind, Request, Server, ServerOptions, Store, StoreExt, TcpStore};

fn start() -> (Server, TcpStore) {
    let server = Server::start(ServerOptions::new("127.0.0.1", 0)).expect("a free port");
    let store = connect(&server);
    (server, store)
}

fn connect(server: &Server) -> TcpStore {
    TcpStore::connect("127.0.0.1", server.address().port()).expect("it listens")
}

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    for _ in 0..10_000 {
        if is_so() {
            return;
        }
        std::thread::yield_now();
    }
    let deadline = tenfold_store::Deadline::after(Duration::from_secs(20));
    while !is_so() {
        assert!(deadline.left().is_none_or(|left| !left.is_zero()), "{what}");
        std::thread::yield_now();
    }
}

/// Fills a store with `count` keys `/many/<number mod 100>/<number>`.
fn fill(store: &TcpStore, count: usize) {
    for numbers in (0..count).collect::<Vec<_>>().chunks(10_000) {
        let keys: Vec<_> = numbers.iter().map(|number| format!("many/{}/{number}", number % 100)).collect();
        store.multi_set(&keys, &vec!["value"; keys.len()]).expect("there is room");
    }
    written(store);
}

/// A write has no reply; one that was sent before a request is served before it.
fn written(store: &TcpStore) {
    store.num_keys().expect("it answers");
}

#[test]
fn a_server_reports_its_keys_by_prefix() {
    let (server, store) = start();
    store.set("worker/attempt_0/a", "12345").unwrap();
    store.set("worker/attempt_0/b", "1").unwrap();
    store.queue_push("worker/queue", "item").unwrap();
    store.set("top", "x").unwrap();
    written(&store);

    let root = server.survey(b"").unwrap();
    assert_eq!((root.keys, root.bytes, root.queue_items), (4, 11, 1));
    let groups: Vec<_> =
        root.groups.iter().map(|group| (group.prefix.as_str(), group.keys, group.bytes)).collect();
    assert_eq!(groups, [("/worker/", 3, 10)]);
    assert_eq!(root.entries[0].key, "/top");

    let worker = server.survey(b"/worker/").unwrap();
    assert_eq!(worker.groups[0].prefix, "/worker/attempt_0/");
    let queue = &worker.entries[0];
    assert_eq!(
        (queue.key.as_str(), queue.kind, queue.items, queue.bytes),
        ("/worker/queue", KeyKind::Queue, Some(1), 4)
    );
    assert_eq!(serde_json::to_value(queue).unwrap()["kind"], "queue");
}

#[test]
fn clients_are_served_while_many_keys_are_surveyed() {
    const KEYS: usize = 200_000;
    let (server, store) = start();
    fill(&store, KEYS);
    let is_over = Arc::new(AtomicBool::new(false));
    let served = std::thread::scope(|scope| {
        let clients: Vec<_> = (0..3)
            .map(|client| {
                let (store, is_over) = (connect(&server), Arc::clone(&is_over));
                scope.spawn(move || {
                    let mut served = 0;
                    while !is_over.load(Ordering::Relaxed) {
                        served += 1;
                        assert_eq!(store.add(format!("count{client}"), 1).unwrap(), served);
                    }
                    served
                })
            })
            .collect();
        until("all are at work", || server.facts().operations.get("add").is_some_and(|adds| *adds >= 3));
        // The thread that waits for the survey is not the one that serves: the server has one thread.
        let survey = server.survey_within(b"", Duration::from_secs(60));
        is_over.store(true, Ordering::Relaxed); // before anything can fail, or they would never stop
        let survey = survey.unwrap();
        let served: i64 = clients.into_iter().map(|client| client.join().unwrap()).sum();
        assert!((KEYS as u64..KEYS as u64 + 4).contains(&survey.keys), "{survey:?}");
        assert_eq!(survey.groups.len(), 1);
        assert_eq!((survey.groups[0].prefix.as_str(), survey.groups[0].keys), ("/many/", KEYS as u64));
        // A step looks at 1,024 keys at most, and requests that have arrived are served before the next.
        assert!(survey.cost_steps >= KEYS as u64 / 1024, "{} steps", survey.cost_steps);
        served
    });
    println!("{served} requests were served meanwhile");
    assert!(served >= 3);
}

#[test]
fn many_concurrent_surveys_are_all_answered() {
    let (server, store) = start();
    fill(&store, 20_000);
    std::thread::scope(|scope| {
        for number in 0..12 {
            let server = &server;
            scope.spawn(move || {
                let prefix = format!("/many/{number}/");
                let survey = server.survey_within(prefix.as_bytes(), Duration::from_secs(60)).unwrap();
                assert_eq!((survey.keys, survey.entries.len(), survey.groups.len()), (200, 200, 0));
            });
        }
    });
}

#[test]
fn clients_are_listed_with_the_most_recently_active_first() {
    let (server, _store) = start();
    let clients: Vec<_> = (0..20).map(|_| connect(&server)).collect();
    for (number, client) in clients.iter().enumerate() {
        client.set(format!("{number}"), "x".repeat(1000 * number)).unwrap();
        written(client);
    }
    let all = server.clients(usize::MAX).unwrap();
    assert_eq!((all.count, all.clients.len()), (21, 21));
    let few = server.clients(5).unwrap();
    assert_eq!((few.count, few.clients.len()), (21, 5));
    let peers = |clients: &[tenfold_store::ClientFacts]| {
        clients.iter().map(|client| client.peer.clone()).collect::<Vec<_>>()
    };
    assert_eq!(peers(&few.clients), peers(&all.clients)[..5]);
    for (client, number) in few.clients.iter().zip((15..20).rev()) {
        assert_eq!(client.last_operation.as_deref(), Some("num_keys"));
        assert!((1000 * number..1000 * number + 200).contains(&(client.bytes_in as i32)), "{client:?}");
        assert!(client.bytes_out > 0 && !client.waits);
        assert!(client.idle_seconds <= client.connected_seconds);
    }
    assert!(server.clients(0).unwrap().clients.is_empty());

    let (facts, listed, brief) = std::thread::scope(|scope| {
        scope.spawn(|| clients[3].wait(&["never before"]));
        until("it waits", || server.facts().waiters_count == 1);
        let seen = (server.facts(), server.clients(1), server.facts_with(0));
        clients[0].set("never before", "").unwrap();
        seen
    });
    let listed = &listed.unwrap().clients[0];
    assert_eq!((listed.waits, listed.last_operation.as_deref()), (true, Some("wait")));
    assert_eq!(listed.peer, facts.waiters[0].peer);
    assert_eq!(facts.oldest_wait_seconds, facts.waiters[0].seconds);
    assert_eq!((brief.waiters_count, brief.waiters), (1, vec![]));
}

#[test]
fn operations_that_can_be_slow_are_timed_and_others_are_not() {
    let (server, store) = start();
    store.set("short", "x").unwrap();
    store.set("long", vec![7; 1 << 20]).unwrap();
    store.append("log", "line").unwrap();
    store.check(&["short"]).unwrap();
    let many: Vec<_> = (0..17).map(|number| format!("many{number}")).collect();
    store.check(&many).unwrap();
    store.list_keys().unwrap();
    store.server_facts().unwrap();
    let mut slowest = server.slowest();
    assert!(slowest.is_sorted_by_key(|slow| std::cmp::Reverse(slow.microseconds)), "{slowest:?}");
    slowest.sort_by(|a, b| a.operation.cmp(&b.operation));
    let told: Vec<_> =
        slowest.iter().map(|slow| (slow.operation.as_str(), slow.key.as_str(), slow.keys_count)).collect();
    assert_eq!(
        told,
        [
            ("append", "/log", 1),
            ("check", "/many0", 17),
            ("info", "", 0),
            ("list_keys", "", 0),
            ("set", "/long", 1)
        ]
    );
    assert!(slowest[4].bytes > 1 << 20);
    assert!(slowest.iter().all(|slow| slow.seconds_ago < 60.0));
    let peers: Vec<_> =
        slowest.iter().filter(|slow| slow.operation != "info").map(|slow| &slow.peer).collect();
    let clients = server.clients(10).unwrap().clients;
    assert!(
        clients.iter().any(|client| peers.iter().all(|peer| **peer == client.peer)),
        "{clients:?} {peers:?}"
    );
}

#[test]
fn the_hosting_process_can_read_values() {
    let (server, store) = start();
    store.set("k", "v").unwrap();
    store.set("long", vec![7; 100_000]).unwrap();
    written(&store);
    assert_eq!(server.value(b"/k").unwrap(), b"v");
    assert_eq!(server.value(b"k"), None);
    // Held here, replaced there.
    let held = server.value(b"/long").unwrap();
    store.set("long", vec![8; 100_000]).unwrap();
    assert_eq!(store.get("long").unwrap()[0], 8);
    assert_eq!(*held, [7; 100_000]);
}

#[test]
fn a_stopped_server_reports_nothing_and_no_call_hangs() {
    let (server, store) = start();
    fill(&store, 10_000);
    server.shutdown(Duration::ZERO);
    assert_eq!(server.facts(), Facts::default());
    assert_eq!(server.clients(10), None);
    assert_eq!(server.slowest(), []);
    assert_eq!(server.survey(b""), None);
    assert_eq!(server.value(b"/many/0/0"), None);
}

#[test]
fn facts_include_the_limits_and_tolerate_unknown_and_missing_fields() {
    let (server, store) = start();
    let facts = server.facts();
    assert_eq!((facts.keys_max, facts.queue_items_max), (4 << 20, 1 << 20));
    assert_eq!(store.server_facts().unwrap().keys_max, 4 << 20);

    let mut json = serde_json::to_value(&facts).unwrap();
    json["something_newer"] = 5.into();
    assert_eq!(serde_json::from_value::<Facts>(json.clone()).unwrap(), facts);
    json.as_object_mut().unwrap().remove("keys_max");
    let mut older = facts;
    older.keys_max = 0;
    assert_eq!(serde_json::from_value::<Facts>(json).unwrap(), older);
}

#[test]
fn ages_are_those_of_the_last_write_and_reading_does_not_count() {
    let (server, store) = start();
    store
        .call(Request::Set { key: b"k".into(), value: b"v".into() }, tenfold_store::Deadline::never())
        .unwrap();
    store.get("k").unwrap();
    let age = server.survey(b"").unwrap().entries[0].age_seconds;
    assert!(age <= server.facts().uptime_seconds as u64);
}
