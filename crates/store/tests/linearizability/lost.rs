//! Counts adds, queue items and wake-ups: none is lost and none is duplicated.

use std::collections::BTreeSet;
use std::time::Instant;

use tenfold_store::{
    ErrorKind, Relay, RelayOptions, Server, ServerOptions, StoreExt, TcpStore, TcpStoreOptions,
};

use crate::clients::PATIENCE;
use crate::cutter::Cutter;

fn server() -> Server {
    Server::start(ServerOptions::new("127.0.0.1", 0)).expect("a port is free")
}

fn client(server: &Server) -> TcpStore {
    let options = TcpStoreOptions::new("127.0.0.1", server.address().port()).timeout(PATIENCE);
    TcpStore::open(options).expect("the server listens")
}

#[test]
fn twelve_thousand_adds_of_twelve_threads_are_all_counted_once() {
    let server = server();
    count_adds(server.address().port(), &server);
}

#[test]
fn adds_through_relays_are_counted_once_although_connections_are_cut() {
    let server = server();
    let cutter = Cutter::start(server.address(), 7, 3_000);
    let relay = Relay::start(RelayOptions::new("127.0.0.1", cutter.address.port())).expect("it listens");
    count_adds(relay.address().port(), &server);
    let facts = relay.facts();
    println!("{} cuts, {facts:?}", cutter.cuts());
    assert!(cutter.cuts() > 10 && facts.reconnects > 10, "{} cuts, {facts:?}", cutter.cuts());
    assert!(facts.requests_sent < facts.requests, "adds were merged: {facts:?}");
}

fn count_adds(port: u16, server: &Server) {
    let (threads, adds) = (12, 1_000);
    let sums: Vec<i64> = std::thread::scope(|scope| {
        let work = || {
            let options = TcpStoreOptions::new("127.0.0.1", port).timeout(PATIENCE);
            let store = TcpStore::open(options).expect("it listens");
            (0..adds).map(|_| store.add("count", 1).expect("counted")).collect::<Vec<_>>()
        };
        let running: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        running.into_iter().flat_map(|thread| thread.join().expect("a client failed")).collect()
    });
    assert_eq!(sums.len(), 12_000);
    assert_eq!(sums.into_iter().collect::<BTreeSet<_>>(), (1..=12_000).collect());
    assert_eq!(&*client(server).get("count").expect("there"), b"12000");
}

#[test]
fn six_thousand_items_are_popped_once_each_and_in_order() {
    const POPPERS: usize = 6;
    const ITEMS: usize = 1_000;
    let server = server();
    let popped: Vec<Vec<(usize, usize)>> = std::thread::scope(|scope| {
        let pop = || {
            let store = client(&server);
            let mut popped = Vec::new();
            loop {
                match store.queue_pop("queue") {
                    Ok(item) if *item == *b"stop" => return popped,
                    Ok(item) => {
                        let text = str::from_utf8(&item).expect("items are text");
                        let (pusher, serial) = text.split_once('.').expect("two numbers");
                        popped.push((pusher.parse().expect("a number"), serial.parse().expect("a number")));
                    }
                    // As in c10d: two clients may see the same item, and one of them is late.
                    Err(error) => assert_eq!(error.kind(), ErrorKind::QueueEmpty, "{error}"),
                }
            }
        };
        let poppers: Vec<_> = (0..POPPERS).map(|_| scope.spawn(pop)).collect();
        let pushers: Vec<_> = (0..6)
            .map(|pusher| {
                let store = client(&server);
                scope.spawn(move || {
                    for serial in 0..ITEMS {
                        store.queue_push("queue", format!("{pusher}.{serial}")).expect("pushed");
                    }
                    store.ping().expect("all are there");
                })
            })
            .collect();
        pushers.into_iter().for_each(|thread| thread.join().expect("a pusher failed"));
        let last = client(&server);
        (0..POPPERS).for_each(|_| last.queue_push("queue", "stop").expect("pushed"));
        poppers.into_iter().map(|thread| thread.join().expect("a popper failed")).collect()
    });
    for popped in &popped {
        for pusher in 0..6 {
            let serials = popped.iter().filter(|(by, _)| *by == pusher).map(|(_, serial)| serial);
            assert!(serials.is_sorted(), "items of one pusher overtook each other");
        }
    }
    let all: Vec<_> = popped.into_iter().flatten().collect();
    assert_eq!(all.len(), 6_000);
    let expected = (0..6).flat_map(|pusher| (0..ITEMS).map(move |serial| (pusher, serial))).collect();
    assert_eq!(all.into_iter().collect::<BTreeSet<_>>(), expected);
    let facts = server.facts();
    assert_eq!((facts.table_bytes, facts.queue_items, facts.waiters_count), (0, 0, 0));
}

/// Two hundred rounds of twelve waiting clients. In half of them all wait before the write; in the others the
/// write and the waits race.
#[test]
fn of_two_thousand_four_hundred_wake_ups_none_is_lost() {
    const WAITERS: usize = 12;
    const ROUNDS: usize = 200;
    let server = server();
    std::thread::scope(|scope| {
        for waiter in 0..WAITERS {
            let store = client(&server);
            scope.spawn(move || {
                for round in 0..ROUNDS {
                    let keys = [format!("a{round}"), format!("b{round}"), format!("a{round}")];
                    let woken = match waiter % 4 {
                        0 => store.get(&keys[0]).map(drop),
                        1 => store.multi_get(&keys).map(drop),
                        _ => store.wait(&keys),
                    };
                    woken.unwrap_or_else(|error| panic!("round {round}: {error}"));
                    store.add(format!("woken{round}"), 1).expect("counted");
                }
            });
        }
        let store = client(&server);
        for round in 0..ROUNDS {
            let (a, b) = (format!("a{round}"), format!("b{round}"));
            let all_wait = round % 2 == 0;
            if all_wait {
                let until = Instant::now() + PATIENCE;
                while server.facts().waiters_count < WAITERS {
                    assert!(Instant::now() < until, "round {round}: not all clients are waiting");
                    std::thread::yield_now();
                }
            }
            match round / 2 % 6 {
                0 => store.set(&a, "1").expect("set"),
                1 => drop(store.add(&a, 1).expect("added")),
                2 => store.append(&a, "1").expect("appended"),
                3 => drop(store.compare_set(&a, "", "1").expect("swapped")),
                4 => store.barrier(&a, 1).expect("open"),
                _ => store.multi_set(&[&a, &b], &["1", "1"]).expect("set"),
            }
            if all_wait && round % 4 == 0 {
                // All have seen it: deleting it does not prolong their wait.
                assert!(store.delete_key(&a).expect("asked"), "round {round}");
            }
            store.set(&b, "2").expect("set");
            store.ping().expect("answered"); // a client that waits from here on waits for the next round
        }
        (0..ROUNDS).for_each(|round| wait_until_woken(&store, round, WAITERS));
    });
    assert_eq!(server.facts().waiters_count, 0);
}

fn wait_until_woken(store: &TcpStore, round: usize, waiters: usize) {
    let until = Instant::now() + PATIENCE;
    while store.add(format!("woken{round}"), 0).expect("counted") < waiters as i64 {
        assert!(Instant::now() < until, "round {round}: a client is still asleep");
        std::thread::yield_now();
    }
}
