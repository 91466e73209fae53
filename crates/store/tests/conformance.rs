//! One suite for every store: in this process, in a file, on a server, under prefixes, and one that a user wrote.

#[path = "conformance/suite.rs"]
mod suite;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use suite::{Subject, promises};
use tenfold_store::{
    Deadline, ErrorKind, Fault, FileStore, HashStore, PrefixStore, Relay, RelayOptions, Request, Response,
    Server, ServerOptions, Store, StoreExt, TcpStore,
};

fn hash() -> Subject {
    let store = HashStore::new();
    Subject::new(move || Arc::new(store.clone()))
}

fn file() -> Subject {
    let folder = tempfile::tempdir().expect("a folder for the file");
    let first = FileStore::open(folder.path().join("store"), None).expect("a file of our own");
    let open = move || {
        let _keep = (&first, &folder);
        Arc::new(FileStore::open(folder.path().join("store"), None).expect("the same file")) as Arc<dyn Store>
    };
    Subject { queues: false, ..Subject::new(open) }
}

fn tcp() -> Subject {
    let server = Server::start(ServerOptions::new("127.0.0.1", 0)).expect("loopback can be bound");
    let open = move || {
        Arc::new(TcpStore::connect("127.0.0.1", server.address().port()).expect("our server"))
            as Arc<dyn Store>
    };
    Subject { says_not_a_number: false, ..Subject::new(open) }
}

fn relay() -> Subject {
    let server = Server::start(ServerOptions::new("127.0.0.1", 0)).expect("loopback can be bound");
    let relay = |server: &Server| Relay::start(RelayOptions::new("127.0.0.1", server.address().port()));
    let relays = [relay(&server).expect("our server"), relay(&server).expect("our server")];
    let count = std::sync::atomic::AtomicUsize::new(0);
    let open = move || {
        let _keep = &server;
        // Clients of two nodes, in turns.
        let relay = &relays[count.fetch_add(1, std::sync::atomic::Ordering::Relaxed) % relays.len()];
        Arc::new(TcpStore::connect("127.0.0.1", relay.address().port()).expect("our relay")) as Arc<dyn Store>
    };
    Subject { says_not_a_number: false, ..Subject::new(open) }
}

fn under_prefix(inner: Subject) -> Subject {
    let (queues, says_not_a_number) = (inner.queues, inner.says_not_a_number);
    let open = move || {
        let outer = Arc::new(PrefixStore::new("outer", inner.open()));
        Arc::new(PrefixStore::new("in/ner", outer)) as Arc<dyn Store>
    };
    Subject { queues, says_not_a_number, ..Subject::new(open) }
}

fn prefix_over_hash() -> Subject {
    under_prefix(hash())
}

fn prefix_over_file() -> Subject {
    under_prefix(file())
}

fn prefix_over_tcp() -> Subject {
    under_prefix(tcp())
}

/// A store as a user would write it: one method and the basics. Everything else is derived from these.
fn user_written() -> Subject {
    #[derive(Clone, Default)]
    struct Mine {
        map: Arc<Mutex<BTreeMap<Vec<u8>, Vec<u8>>>>,
        timeout: Arc<Mutex<Option<std::time::Duration>>>,
    }
    impl Store for Mine {
        fn call(&self, request: Request<'_>, _: Deadline) -> Result<Response, Fault> {
            let mut map = self.map.lock().expect("nothing panics while holding it");
            Ok(match request {
                Request::Add { key, delta } => {
                    let old = map.get(&*key).map(|text| String::from_utf8_lossy(text).into_owned());
                    let sum = old.map_or(Some(0), |text| c10d_number(&text));
                    let sum = sum
                        .ok_or_else(|| Fault::new(ErrorKind::NotANumber, "no number"))?
                        .wrapping_add(delta);
                    map.insert(key.into_owned(), sum.to_string().into_bytes());
                    Response::Number(sum)
                }
                Request::Check { keys } => Response::Present(keys.iter().all(|key| map.contains_key(&**key))),
                Request::CompareSet { key, expected, desired } => {
                    let current = map.get(&*key).cloned();
                    let answer = match current {
                        Some(current) if current != *expected => current,
                        None if !expected.is_empty() => expected.into_owned(),
                        _ => {
                            map.insert(key.into_owned(), desired.to_vec());
                            desired.into_owned()
                        }
                    };
                    Response::Value(Some(answer.into()))
                }
                Request::Delete { key } => Response::Deleted(map.remove(&*key).is_some()),
                Request::Get { key } => Response::Value(map.get(&*key).map(|value| value.as_slice().into())),
                Request::ListKeys => Response::Keys(map.keys().map(|key| key.as_slice().into()).collect()),
                Request::NumKeys => Response::Number(map.len() as i64),
                Request::Set { key, value } => {
                    map.insert(key.into_owned(), value.into_owned());
                    Response::Done
                }
                other => return Err(Fault::unsupported(other.operation().name())),
            })
        }
        fn timeout(&self) -> std::time::Duration {
            self.timeout
                .lock()
                .expect("nothing panics while holding it")
                .unwrap_or(tenfold_store::DEFAULT_TIMEOUT)
        }
        fn set_timeout(&self, timeout: std::time::Duration) -> bool {
            *self.timeout.lock().expect("nothing panics while holding it") = Some(timeout);
            true
        }
        fn duplicate(&self) -> Result<Arc<dyn Store>, Fault> {
            Ok(Arc::new(self.clone()))
        }
    }
    fn c10d_number(text: &str) -> Option<i64> {
        let text = text.trim_start();
        let end = text
            .char_indices()
            .find(|(at, digit)| !digit.is_ascii_digit() && (*at > 0 || !"+-".contains(*digit)));
        text[..end.map_or(text.len(), |(at, _)| at)].parse().ok()
    }
    let store = Mine::default();
    Subject { queues: false, ..Subject::new(move || Arc::new(store.clone())) }
}

macro_rules! tests_of {
    ($subject:ident: $($promise:ident)*) => {
        mod $subject {
            $(#[test] fn $promise() { crate::suite::$promise(&crate::$subject()); })*
        }
    };
}

promises! { tests_of! hash }
promises! { tests_of! file }
promises! { tests_of! tcp }
promises! { tests_of! relay }
promises! { tests_of! prefix_over_hash }
promises! { tests_of! prefix_over_file }
promises! { tests_of! prefix_over_tcp }
promises! { tests_of! user_written }

#[test]
fn a_store_without_queues_says_so() {
    for subject in [file(), prefix_over_file(), user_written()] {
        let store = subject.open();
        for error in [
            store.queue_push("q", "").unwrap_err(),
            store.queue_len("q").unwrap_err(),
            store.try_queue_pop("q").unwrap_err(),
        ] {
            assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
            assert!(error.to_string().contains("this store has no queue"), "{error}");
        }
    }
}

#[test]
fn only_stores_that_do_it_in_one_step_claim_the_extended_api() {
    let claims = [hash(), tcp(), prefix_over_tcp(), file(), prefix_over_file(), user_written()]
        .map(|subject| subject.open().has_extended_api());
    assert_eq!(claims, [true, true, true, false, false, false]);
}
