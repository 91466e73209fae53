use super::*;
use crate::StoreExt;

/// A hosting client talks to its own server, which a test cannot observe, so this test connects its client
/// part to a recording.
#[test]
fn a_host_that_waits_for_workers_sends_the_recorded_bytes() {
    let recordings = transcript::Transcript::load_all();
    let mut replayed = 0;
    for recording in
        recordings.iter().filter(|recording| recording.name.starts_with("master_wait_for_workers"))
    {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        std::thread::scope(|scope| {
            let server = scope.spawn(|| transcript::play_server(recording, &listener));
            let mut store = TcpStore::connect("127.0.0.1", port).unwrap();
            store.server = Some(Arc::new(Server::start(ServerOptions::new("127.0.0.1", 0)).unwrap()));
            store.meet_workers(2, Deadline::after(transcript::GUARD)).unwrap();
            assert_eq!(store.num_keys().unwrap(), 1);
            assert!(store.list_keys().unwrap().is_empty());
            drop(store);
            assert_eq!(server.join().unwrap(), Ok(()));
        });
        replayed += 1;
    }
    assert_eq!(replayed, 2);
}

#[test]
fn a_host_with_missing_workers_reports_how_many_joined_and_which_are_connected() {
    let options = TcpStoreOptions::new("127.0.0.1", 0)
        .is_server(true)
        .world_size(3)
        .timeout(Duration::from_millis(100));
    let error = TcpStore::open(options).unwrap_err();
    let text = error.to_string();
    assert!(text.contains(": 1 of 3 clients joined\n  hint: 0 other clients are connected"), "{text}");
    assert!(error.is_timeout());
}

#[test]
fn a_thread_that_times_out_on_the_connection_learns_what_holds_it() {
    let host = TcpStore::open(TcpStoreOptions::new("127.0.0.1", 0).is_server(true)).unwrap();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| host.wait(&["late"]));
        while host.server().unwrap().facts().waiters_count == 0 {
            std::thread::yield_now();
        }
        let error = host.wait_for(&["other"], Duration::from_millis(20)).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("another thread has been using this client in wait `/late` for "), "{text}");
        host.try_clone().unwrap().set("late", "").unwrap();
        waiting.join().unwrap().unwrap();
    });
}

#[test]
fn stores_of_one_process_that_ask_for_it_share_a_server() {
    let open =
        |port| TcpStore::open(TcpStoreOptions::new("127.0.0.1", port).is_server(true).multi_tenant(true));
    let first = open(0).unwrap();
    let second = open(first.port()).unwrap();
    first.set("k", "v").unwrap();
    assert_eq!(&*second.get("k").unwrap(), b"v");
    drop(first);
    assert_eq!(&*second.get("k").unwrap(), b"v");
    let alone = TcpStore::open(TcpStoreOptions::new("127.0.0.1", second.port()).is_server(true));
    assert!(alone.unwrap_err().to_string().contains("address already in use"));
}

#[test]
fn a_socket_that_is_bound_already_is_adopted_if_its_port_is_right() {
    let bound = || {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        (listener, port)
    };
    let (listener, port) = bound();
    let store =
        TcpStore::open(TcpStoreOptions::new("127.0.0.1", port).is_server(true).listener(listener)).unwrap();
    assert_eq!(store.port(), port);
    let (listener, port) = bound();
    let wrong =
        TcpStoreOptions::new("127.0.0.1", port.wrapping_add(1).max(1)).is_server(true).listener(listener);
    let text = TcpStore::open(wrong).unwrap_err().to_string();
    assert!(text.contains(&format!("is bound to port {port}, expected port ")), "{text}");
}

#[test]
fn invalid_arguments_are_explained() {
    let wrong = |options: TcpStoreOptions| TcpStore::open(options).unwrap_err();
    let error = wrong(TcpStoreOptions::new("127.0.0.1", 0).is_server(true).world_size(0));
    assert!(error.to_string().contains("invalid world size 0"), "{error}");
    let error = wrong(TcpStoreOptions::new("127.0.0.1", 0));
    assert!(error.to_string().contains("cannot connect to port 0"), "{error}");
    let error = wrong(TcpStoreOptions::new("127.0.0.1", 5).bind("0.0.0.0"));
    assert!(error.to_string().contains("only the hosting process can have"), "{error}");
}

#[test]
fn every_address_of_a_name_is_tried_and_each_has_its_reason_in_the_error() {
    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let options = TcpStoreOptions::new("127.0.0.1", closed).timeout(Duration::from_millis(60));
    let text = TcpStore::open(options).unwrap_err().to_string();
    assert!(text.contains(&format!("no store answered (127.0.0.1:{closed}: connection refused)")), "{text}");
}

#[test]
fn ipv6_works_where_the_machine_has_it() {
    if TcpListener::bind("[::1]:0").is_err() {
        return; // nothing to test on such a machine
    }
    let host = TcpStore::open(TcpStoreOptions::new("::1", 0).is_server(true)).unwrap();
    let client = TcpStore::connect("::1", host.port()).unwrap();
    client.set("k", "v").unwrap();
    assert_eq!(&*host.get("k").unwrap(), b"v");
    assert_eq!(host.name(), format!("[::1]:{}", host.port()));
    // A name with both kinds of address is reached, whichever the server listens on.
    let by_name =
        TcpStore::open(TcpStoreOptions::new("localhost", host.port()).timeout(Duration::from_millis(300)));
    if let Ok(by_name) = by_name {
        assert_eq!(&*by_name.get("k").unwrap(), b"v");
    }
}
