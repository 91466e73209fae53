//! The relay between the ranks of this node and their store on another node.
//!
//! With many ranks on a node, their launcher stands in between: ranks connect to it, and the store's server
//! sees one connection of this node. On the node that hosts the store there is nothing to be saved.
//!
//! A relay lives for one round. What a rank has asked and the server has not received yet must not reach the
//! server after the round: the store of the next round is empty, and its keys have the same names. So the
//! relay ends, and its session with it, before this node reports that its ranks have exited.
//!
//! A relay saves connections and work; no job depends on it. If it cannot be started, ranks connect directly.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tenfold_store::{Relay, RelayOptions, WaiterFacts};

use super::args::Endpoint;
use super::endpoint;

/// The value of [`Relaying::connect_max`] in a launcher. The heartbeat waits meanwhile.
pub(super) const CONNECT_MAX: Duration = Duration::from_secs(5);
/// Time for the server to execute what ranks asked for before they exited. The launcher waits meanwhile.
const LAST_REQUESTS: Duration = Duration::from_millis(500);

/// Starts the relay of each round.
#[derive(Debug)]
pub(super) struct Relaying {
    /// Whether this node has so many ranks that it uses relays.
    pub(super) is_wanted: bool,
    pub(super) ranks: usize,
    /// Whether a relay also serves other users.
    pub(super) other_users: bool,
    /// Time for the server to accept a relay.
    pub(super) connect_max: Duration,
    /// The user knows that there are relays.
    pub(super) is_told: AtomicBool,
}

/// Where the ranks of a round reach their store.
#[derive(Debug)]
pub(super) struct Door {
    /// What they connect to.
    pub(super) endpoint: Endpoint,
    relay: Option<Relay>,
}

impl Relaying {
    /// A door to the store at `store`; `is_here` if this node hosts it. `note` is called with lines for the
    /// user.
    pub(super) fn open(&self, store: Endpoint, is_here: bool, note: &dyn Fn(String)) -> Door {
        if !self.is_wanted || is_here {
            return Door { endpoint: store, relay: None };
        }
        let options = RelayOptions::new(store.host.clone(), store.port)
            .connect_timeout(self.connect_max)
            .limits(endpoint::limits(self.other_users));
        let is_first = !self.is_told.swap(true, Ordering::Relaxed);
        match Relay::start(options) {
            Ok(relay) => {
                let address = relay.address();
                if is_first {
                    note(format!(
                        "the {} ranks of this node use the store at {store} through a relay in this launcher (see --relay-from)",
                        self.ranks
                    ));
                }
                let endpoint = Endpoint { host: address.ip().to_string(), port: address.port() };
                Door { endpoint, relay: Some(relay) }
            }
            Err(error) => {
                note(format!(
                    "warning: no relay, so each rank connects to the store at {store} directly: {}",
                    error.message()
                ));
                Door { endpoint: store, relay: None }
            }
        }
    }
}

impl Door {
    /// The store's server, if ranks reach it through a relay.
    pub(super) fn behind(&self) -> Option<SocketAddr> {
        self.relay.as_ref().map(Relay::upstream_address)
    }

    /// Which client of the relay waits for which keys, if there is a relay.
    pub(super) fn waiters(&self) -> Option<Vec<WaiterFacts>> {
        self.relay.as_ref().map(Relay::waiters)
    }

    /// The ranks have exited: nothing of what they have asked reaches the server after this.
    pub(super) fn close(&mut self) {
        if let Some(relay) = self.relay.take() {
            relay.shutdown(LAST_REQUESTS);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;
    use std::net::TcpListener;
    use tenfold_store::{Server, ServerOptions, StoreExt as _, TcpStore};

    fn relaying(is_wanted: bool) -> Relaying {
        let (other_users, is_told) = (false, AtomicBool::new(false));
        Relaying { is_wanted, ranks: 8, other_users, connect_max: Duration::from_millis(500), is_told }
    }

    #[test]
    fn a_relay_is_only_between_many_ranks_and_another_node() {
        let server = Server::start(ServerOptions::new("127.0.0.1", 0)).unwrap();
        let store = Endpoint { host: "127.0.0.1".into(), port: server.address().port() };
        for (is_wanted, is_here) in [(false, false), (false, true), (true, true)] {
            let door = relaying(is_wanted).open(store.clone(), is_here, &|line| panic!("{line}"));
            assert_eq!((&door.endpoint, door.behind()), (&store, None));
        }
        let notes = RefCell::new(Vec::new());
        let relaying = relaying(true);
        for _round in 0..2 {
            let mut door = relaying.open(store.clone(), false, &|line| notes.borrow_mut().push(line));
            assert_ne!(door.endpoint, store);
            assert_eq!(door.behind(), Some(server.address()));
            let client = TcpStore::connect(&door.endpoint.host, door.endpoint.port).unwrap();
            client.set("k", "v").unwrap();
            drop(client);
            door.close();
            while server.facts().sessions > 0 {
                std::thread::yield_now();
            }
        }
        let expected = format!(
            "the 8 ranks of this node use the store at {store} through a relay in this launcher (see --relay-from)"
        );
        assert_eq!(notes.into_inner(), [expected], "once, not in every round");
    }

    #[test]
    fn without_a_relay_ranks_connect_directly() {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let store = Endpoint { host: "127.0.0.1".into(), port };
        let notes = RefCell::new(Vec::new());
        let door = relaying(true).open(store.clone(), false, &|line| notes.borrow_mut().push(line));
        assert_eq!((&door.endpoint, door.behind()), (&store, None));
        let notes = notes.into_inner();
        let expected = format!("warning: no relay, so each rank connects to the store at {store} directly: ");
        assert!(notes.len() == 1 && notes[0].starts_with(&expected), "{notes:?}");
    }
}
