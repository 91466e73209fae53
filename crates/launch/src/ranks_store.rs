//! Where the ranks of a round find their store.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tenfold_store::{Server, StoreExt as _, TcpStore};

use super::args::Endpoint;
use super::endpoint;
use super::rendezvous::Assignment;

/// Time for the launcher that has the store to publish its address.
const PATIENCE: Duration = Duration::from_secs(10);
/// The beginning of launchers' own keys; clients put the first `/` there.
const OWN_KEYS: &[u8] = b"/tenfold/";

/// What one launcher knows of it.
pub(super) struct RanksStore {
    pub(super) store: Arc<TcpStore>,
    pub(super) met_at: Endpoint,
    pub(super) local_address: Option<String>,
    /// Whether its own store also serves other users.
    pub(super) other_users: bool,
    /// The server there, if this launcher hosts it.
    pub(super) hosted: Option<Arc<Server>>,
    pub(super) node_id: String,
    /// The beginning of the keys by which a launcher publishes the address of the ranks' store.
    pub(super) prefix: String,
    pub(super) own: Mutex<Option<(Server, Endpoint)>>,
    /// The key by which this launcher last published the address of the ranks' store.
    pub(super) announced: Mutex<Option<String>>,
    /// Called with lines for the user.
    pub(super) note: Box<dyn Fn(String) + Send + Sync>,
}

impl RanksStore {
    /// The store of the launcher that hosts it. If no launcher of this job does, the launcher of group rank 0
    /// opens one.
    ///
    /// PyTorch's keys have the same names in every round and expect an empty store. When a round begins, all
    /// ranks of the previous one have exited. Its keys are removed before any rank of this round is started.
    pub(super) fn of(&self, assignment: &Assignment) -> Result<Endpoint, String> {
        let host = assignment.store.as_ref();
        let known = host.map(|host| host.address.as_str());
        if let (Some(address), 0) = (known, assignment.round) {
            return Endpoint::parse(address, 0);
        }
        // A long-lived server has had other jobs under this run id, each with a round 0.
        let key = format!("{}/{}/{}", self.prefix, assignment.job, assignment.round);
        let failed = |error: tenfold_store::Error| format!("cannot agree on a store for the ranks: {error}");
        if !self.is_here(assignment) {
            self.store.wait_for(&[&key], PATIENCE).map_err(failed)?;
            let address = self.store.get(&key).map_err(failed)?;
            return Endpoint::parse(&String::from_utf8_lossy(&address), 0);
        }
        if let (Some(server), Some(address)) = (&self.hosted, known) {
            let emptied = server.forget_all_but(OWN_KEYS, PATIENCE);
            emptied.ok_or("the store's server does not answer")?;
            self.announce(key, address).map_err(failed)?;
            return Endpoint::parse(address, 0);
        }
        let opened = endpoint::open_for_ranks(
            &self.met_at,
            self.local_address.as_deref(),
            self.other_users,
            &*self.note,
        )?;
        let endpoint = opened.1.clone();
        *self.own.lock().expect("nothing panics while holding it") = Some(opened); // this stops the previous round's store
        self.announce(key, &endpoint.to_string()).map_err(failed)?;
        Ok(endpoint)
    }

    /// Whether this launcher hosts the store of this round's ranks.
    pub(super) fn is_here(&self, assignment: &Assignment) -> bool {
        match &assignment.store {
            Some(host) => host.node == self.node_id,
            None => assignment.node_rank == 0,
        }
    }

    /// Publishes where the ranks of a round find their store. The key of the previous round is no longer
    /// needed.
    fn announce(&self, key: String, address: &str) -> tenfold_store::Result<()> {
        self.forget();
        self.store.set(&key, address)?;
        *self.announced.lock().expect("nothing panics while holding it") = Some(key);
        Ok(())
    }

    /// Removes what this launcher has published: the server may outlive the job.
    pub(super) fn forget(&self) {
        let announced = self.announced.lock().expect("nothing panics while holding it").take();
        if let Some(key) = announced {
            let _is_removed_with_the_store = self.store.delete_key(&key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::rendezvous::NodeInfo;
    use super::*;

    fn launcher(server: &Server, id: &str) -> RanksStore {
        let met_at = Endpoint::parse(&server.address().to_string(), 0).unwrap();
        RanksStore {
            store: Arc::new(TcpStore::connect("127.0.0.1", met_at.port).unwrap()),
            met_at,
            local_address: None,
            other_users: false,
            hosted: None,
            node_id: id.into(),
            prefix: "tenfold/run/x/store".into(),
            own: Mutex::new(None),
            announced: Mutex::new(None),
            note: Box::new(|_| ()),
        }
    }

    fn assignment(job: u64, round: u64, node_rank: usize) -> Assignment {
        let node = |id: &str| NodeInfo {
            id: id.into(),
            host: id.into(),
            ranks: 1,
            role: "default".into(),
            fixed_rank: None,
            worker_store: None,
        };
        Assignment { job, round, ..Assignment::among(&[node("a"), node("b")], node_rank) }
    }

    /// A job that dies leaves its keys, and the next one under its run id begins with round 0 again.
    #[test]
    fn the_next_job_under_a_run_id_does_not_find_the_previous_store() {
        let server = Server::start(tenfold_store::ServerOptions::new("127.0.0.1", 0)).unwrap();
        let mut before = None;
        for job in 0..2 {
            let (first, second) = (launcher(&server, "a"), launcher(&server, "b"));
            std::thread::scope(|scope| {
                // The one that connects starts first, and has to wait.
                let other = scope.spawn(|| second.of(&assignment(job, 0, 1)).unwrap());
                while before.is_some() && server.facts().waiters_count == 0 && !other.is_finished() {
                    std::thread::yield_now();
                }
                let endpoint = first.of(&assignment(job, 0, 0)).unwrap();
                assert_eq!(other.join().unwrap(), endpoint, "both nodes of job {job} have the same store");
                assert_ne!(before.replace(endpoint.clone()), Some(endpoint));
            });
        }
    }

    #[test]
    fn nothing_is_left_of_past_rounds_and_jobs() {
        let server = Server::start(tenfold_store::ServerOptions::new("127.0.0.1", 0)).unwrap();
        let first = launcher(&server, "a");
        for round in 0..3 {
            first.of(&assignment(0, round, 0)).unwrap();
            first.store.ping().unwrap();
            assert_eq!(server.facts().keys, 1);
        }
        first.forget();
        assert_eq!(server.facts().keys, 0);
    }
}
