//! A store inside a store: every key gets a prefix.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use crate::ops::Store;
use crate::request::{Request, Response};
use crate::value::Value;
use tenfold_base::{Deadline, Fault};

/// The part of a store whose keys begin with `prefix/`. Prefixes nest.
///
/// As in c10d, `num_keys` counts the whole store below, and the timeout is that of the store below.
///
/// ```
/// use std::sync::Arc;
/// use tenfold_store::{HashStore, PrefixStore, StoreExt};
///
/// let store = Arc::new(HashStore::new());
/// let group = PrefixStore::new("group0", store.clone());
/// group.set("address", "10.0.0.1")?;
/// assert_eq!(&*store.get("group0/address")?, b"10.0.0.1");
/// # Ok::<(), tenfold_store::Error>(())
/// ```
pub struct PrefixStore {
    /// The prefix with its slash.
    prefix: Vec<u8>,
    inner: Arc<dyn Store>,
}

impl PrefixStore {
    /// A store whose keys are those of `inner` that begin with `prefix`.
    pub fn new(prefix: impl AsRef<[u8]>, inner: Arc<dyn Store>) -> Self {
        PrefixStore { prefix: [prefix.as_ref(), b"/"].concat(), inner }
    }

    /// The prefix, without the slash that follows it.
    pub fn prefix(&self) -> &[u8] {
        &self.prefix[..self.prefix.len() - 1]
    }

    /// The store that this one is a part of.
    pub fn underlying_store(&self) -> &Arc<dyn Store> {
        &self.inner
    }
}

impl Store for PrefixStore {
    fn call(&self, request: Request<'_>, deadline: Deadline) -> Result<Response, Fault> {
        // As in c10d, a barrier under a prefix consists of ordinary keys, so that it works on any store
        // below.
        if let Request::Barrier { .. } = request {
            return Err(Fault::unsupported("barrier of its own"));
        }
        Ok(match self.inner.call(request.with_prefix(&self.prefix), deadline)? {
            Response::Keys(keys) => Response::Keys(
                keys.iter().filter_map(|key| key.strip_prefix(&*self.prefix).map(Value::from)).collect(),
            ),
            other => other,
        })
    }

    fn name(&self) -> String {
        format!("{} under `{}`", self.inner.name(), self.prefix().escape_ascii())
    }

    fn address(&self) -> Option<SocketAddr> {
        self.inner.address()
    }

    fn timeout(&self) -> Duration {
        self.inner.timeout()
    }

    fn set_timeout(&self, timeout: Duration) -> bool {
        self.inner.set_timeout(timeout)
    }

    fn has_extended_api(&self) -> bool {
        self.inner.has_extended_api()
    }

    fn duplicate(&self) -> Result<Arc<dyn Store>, Fault> {
        Ok(Arc::new(PrefixStore { prefix: self.prefix.clone(), inner: self.inner.duplicate()? }))
    }
}

impl std::fmt::Debug for PrefixStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PrefixStore({})", self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{HashStore, StoreExt};

    #[test]
    fn only_keys_under_the_whole_prefix_are_listed() {
        let store = Arc::new(HashStore::new());
        for key in ["p/a", "pp/a", "px", "p"] {
            store.set(key, "").unwrap();
        }
        let keys = PrefixStore::new("p", store).list_keys().unwrap();
        assert_eq!(keys, [Value::from(b"a".as_slice())]);
    }

    #[test]
    fn prefixes_nest_from_the_outside_in() {
        let store = Arc::new(HashStore::new());
        let outer = Arc::new(PrefixStore::new("out", store.clone()));
        PrefixStore::new("in", outer).set("k", "v").unwrap();
        assert_eq!(&*store.get("out/in/k").unwrap(), b"v");
    }

    #[test]
    fn an_error_names_the_prefix_and_the_store_below() {
        let store = Arc::new(HashStore::new());
        store.set_timeout(Duration::ZERO);
        let error = PrefixStore::new("p", store).get("k").unwrap_err();
        let text = error.to_string();
        assert!(text.starts_with("store get `k` at this process under `p` failed after "), "{text}");
    }
}
