//! Where the ranks of a round find their store.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tenfold_store::{Server, StoreExt as _, TcpStore};

use super::args::Endpoint;
use super::endpoint;
use super::rendezvous::Assignment;

/// For the launcher that has the store to say where it is.
const PATIENCE: Duration = Duration::from_secs(10);
/// How launchers' own keys begin; clients put the first `/` there.
const OWN_KEYS: &[u8] = b"/tenfold/";

/// What one launcher knows of it.
pub(super) struct RanksStore {
    pub(super) store: Arc<TcpStore>,
    pub(super) met_at: Endpoint,
    pub(super) local_address: Option<String>,
    /// The server there, if this launcher hosts it.
    pub(super) hosted: Option<Arc<Server>>,
    pub(super) node_id: String,
    /// Of the keys by which a launcher says where the ranks' store is.
    pub(super) prefix: String,
    pub(super) own: Mutex<Option<(Server, Endpoint)>>,
    /// Called with lines for people.
    pub(super) note: Box<dyn Fn(String) + Send + Sync>,
}

impl RanksStore {
    /// That of the launcher that hosts the store; if nobody of this job does, one that group rank 0's launcher opens.
    ///
    /// PyTorch's keys have the same names in every round and expect an empty store. By the time that a round begins all
    /// ranks of the one before have ended; its keys are removed before any rank of this one is started.
    pub(super) fn of(&self, assignment: &Assignment) -> Result<Endpoint, String> {
        let host = assignment.nodes.iter().find(|node| node.worker_store.is_some());
        let known = host.and_then(|host| host.worker_store.as_deref());
        if let (Some(address), 0) = (known, assignment.round) {
            return Endpoint::parse(address, 0);
        }
        let key = format!("{}/{}", self.prefix, assignment.round);
        let failed = |error: tenfold_store::Error| format!("cannot agree on a store for the ranks: {error}");
        let is_host = match host {
            Some(host) => host.id == self.node_id,
            None => assignment.node_rank == 0,
        };
        if !is_host {
            self.store.wait_for(&[&key], PATIENCE).map_err(failed)?;
            let address = self.store.get(&key).map_err(failed)?;
            return Endpoint::parse(&String::from_utf8_lossy(&address), 0);
        }
        if let (Some(server), Some(address)) = (&self.hosted, known) {
            let emptied = server.forget_all_but(OWN_KEYS, PATIENCE);
            emptied.ok_or("the store's server does not answer")?;
            self.store.set(&key, address).map_err(failed)?;
            return Endpoint::parse(address, 0);
        }
        let opened = endpoint::open_for_ranks(&self.met_at, self.local_address.as_deref(), &*self.note)?;
        let endpoint = opened.1.clone();
        *self.own.lock().expect("nothing panics while holding it") = Some(opened); // and that of the round before ends
        self.store.set(&key, endpoint.to_string()).map_err(failed)?;
        Ok(endpoint)
    }
}
