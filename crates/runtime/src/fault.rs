//! What broke, and the error that it becomes.
//!
//! Below the groups everything reports a [`Fault`]. It becomes an [`Error`] where operation, group, rank and time are known:
//! [`Error::new`] needs a whole [`Scene`]. ARCHITECTURE.md lists these places.
//!
//! ```text
//! all_reduce #42 in group `default` failed on rank 3 of 8: rank 5 (host node-b, pid 4711) sent nothing for 30.0 s
//!   all_reduce(sum, float32 × 4194304) by `direct`, step 4 of 14; started 30.2 s ago, timeout 30.0 s
//!   hint: rank 5 last finished #41 broadcast(…); see its log, or raise `timeout`
//! ```

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

pub use tenfold_base::{ErrorKind, Fault};
pub(crate) use tenfold_base::{panic_text, show_duration, show_ranks};
use tenfold_plan::Rank;

use crate::label::Label;

/// The result of an operation of a group.
pub type Result<T> = std::result::Result<T, Error>;

/// What a store reported. Its message has all that is known, so it is kept whole.
#[cold]
pub(crate) fn store_fault(error: tenfold_store::Error) -> Fault {
    let kind = match error.kind() {
        tenfold_store::ErrorKind::Timeout => ErrorKind::Timeout,
        _ => ErrorKind::Store,
    };
    let text = error.to_string();
    let (message, hint) = match text.split_once("\n  hint: ") {
        Some((message, hint)) => (message, Some(hint.to_string())),
        None => (text.as_str(), None),
    };
    Fault { hint, ..Fault::new(kind, message).source(error) }
}

/// Where and when it broke.
#[derive(Clone, Debug)]
pub struct Scene {
    /// The operation.
    pub label: Label,
    /// The name of the group.
    pub group: Arc<str>,
    /// The rank on which it failed.
    pub rank: Rank,
    /// 0 if it broke before the rank was known.
    pub size: usize,
    /// From the call to the error.
    pub elapsed: Duration,
    /// How long the operation was allowed to take.
    pub timeout: Option<Duration>,
    /// Algorithm and how far it was, where the operation had begun.
    pub progress: Option<String>,
    /// At debug level DETAIL: with which shapes it was called, and where.
    pub detail: Option<String>,
}

/// An operation that failed: what, where, for how long, because of which rank, and what to do next.
///
/// Errors of a [store](crate::store) convert into it, so `?` works in a function that uses both. [`Error::source`] is then
/// the store's error.
///
/// [`Error::source`]: std::error::Error::source
///
/// ```
/// use tenfold::ErrorKind;
/// use tenfold::store::{HashStore, StoreExt as _};
///
/// fn address(store: &HashStore) -> tenfold::Result<Vec<u8>> {
///     store.wait_for(&["address"], std::time::Duration::from_millis(1))?;
///     Ok(store.get("address")?.to_vec())
/// }
/// assert_eq!(address(&HashStore::new()).unwrap_err().kind(), ErrorKind::Timeout);
/// ```
#[derive(Clone)]
pub struct Error {
    inner: Arc<(Option<Scene>, Fault)>,
}

impl Error {
    #[cold]
    pub(crate) fn new(scene: Scene, fault: Fault) -> Self {
        Error { inner: Arc::new((Some(scene), fault)) }
    }

    /// What kind of error it is.
    pub fn kind(&self) -> ErrorKind {
        self.inner.1.kind
    }

    /// The rank whose fault it is, where that is known.
    pub fn peer(&self) -> Option<Rank> {
        self.inner.1.peer
    }

    /// Was a limit exceeded?
    pub fn is_timeout(&self) -> bool {
        matches!(self.kind(), ErrorKind::Timeout | ErrorKind::PeerSilent)
    }

    /// What a user should do about it.
    pub fn hint(&self) -> Option<&str> {
        self.inner.1.hint.as_deref()
    }

    /// What broke, without the scene.
    pub fn message(&self) -> &str {
        &self.inner.1.message
    }

    /// The same error, with more about where it happened behind its message.
    #[cold]
    pub(crate) fn in_place(&self, place: &str) -> Self {
        let (scene, fault) = (*self.inner).clone();
        let message = format!("{}{place}", fault.message);
        Error { inner: Arc::new((scene, Fault { message, ..fault })) }
    }

    /// Which operation failed, and where. None for an error of a store that was converted.
    pub fn scene(&self) -> Option<&Scene> {
        self.inner.0.as_ref()
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (scene, fault) = &*self.inner;
        if let Some(scene) = scene {
            scene.fmt_with(f, &fault.message)?;
        } else {
            f.write_str(&fault.message)?;
        }
        match &fault.hint {
            Some(hint) => write!(f, "\n  hint: {hint}"),
            None => Ok(()),
        }
    }
}

impl Scene {
    fn fmt_with(&self, f: &mut fmt::Formatter<'_>, message: &str) -> fmt::Result {
        let Scene { label, group, rank, size, elapsed, timeout, progress, detail } = self;
        write!(f, "{}", label.kind)?;
        if label.seq > 0 {
            write!(f, " #{}", label.seq)?;
        }
        write!(f, " in group `{group}` failed")?;
        if *size > 0 {
            write!(f, " on rank {rank} of {size}")?;
        }
        write!(f, ": {message}")?;
        if let Some(progress) = progress {
            write!(f, "\n  {label}{progress}; started {} ago", show_duration(*elapsed))?;
            if let Some(timeout) = timeout {
                write!(f, ", timeout {}", show_duration(*timeout))?;
            }
        }
        if let Some(detail) = detail {
            write!(f, "\n  called {detail}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.inner.1.source.as_ref().map(|source| &**source as _)
    }
}

impl From<tenfold_store::Error> for Error {
    #[cold]
    fn from(error: tenfold_store::Error) -> Self {
        Error { inner: Arc::new((None, store_fault(error))) }
    }
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;

    use super::*;
    use tenfold_store::{HashStore, StoreExt as _};

    #[test]
    fn an_error_of_a_store_converts_and_remains_the_source() {
        let cause = HashStore::new().wait_for(&["key"], Duration::from_millis(1)).unwrap_err();
        let error = Error::from(cause.clone());
        assert_eq!(error.kind(), ErrorKind::Timeout);
        assert_eq!(error.to_string(), cause.to_string(), "it says all that the store said, and nothing else");
        assert!(error.scene().is_none());
        assert_eq!(error.source().unwrap().to_string(), cause.to_string());
        let there = error.in_place(", in bucket 3");
        assert!(there.message().ends_with(", in bucket 3"));
        assert!(there.source().is_some());
    }
}
