//! What can go wrong, and how it reads.
//!
//! A store reports a [`Fault`]: what failed. Only `ops` turns it into an [`Error`], because only `ops` knows
//! the operation, its keys, the store and the time waited. The message says what happened, [`Error::hint`]
//! what to do about it.
//!
//! ```text
//! store get `rank0/addr` from 10.0.0.1:29500 failed after 300.0 s: timed out: the key was never set
//!   hint: check that the rank that sets it is alive and uses the same store and prefix, or raise the timeout
//! ```

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tenfold_base::{ErrorKind, Fault, show_duration};

/// The result of a store operation.
pub type Result<T> = std::result::Result<T, Error>;

/// Where and when an operation failed.
#[derive(Clone, Debug)]
pub struct Scene {
    /// The operation and its keys, such as ``get `rank0/addr` ``.
    pub request: String,
    /// The store, such as `10.0.0.1:29500`.
    pub store: String,
    /// How long the operation had been running.
    pub elapsed: Duration,
    /// How long it was allowed to take.
    pub limit: Option<Duration>,
}

/// A store operation that failed: what, where, for how long, and what to do next.
#[derive(Clone)]
pub struct Error {
    inner: Arc<(Scene, Fault)>,
}

impl Error {
    #[cold]
    pub(crate) fn new(scene: Scene, fault: Fault) -> Self {
        Error { inner: Arc::new((scene, fault)) }
    }

    /// The kind of failure.
    pub fn kind(&self) -> ErrorKind {
        self.inner.1.kind
    }

    /// Did it time out?
    pub fn is_timeout(&self) -> bool {
        self.kind() == ErrorKind::Timeout
    }

    /// What to do about it, if there is evidence for advice.
    pub fn hint(&self) -> Option<&str> {
        self.inner.1.hint.as_deref()
    }

    /// What failed, without where and without the hint.
    pub fn message(&self) -> &str {
        &self.inner.1.message
    }

    /// Where and when.
    pub fn scene(&self) -> &Scene {
        &self.inner.0
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (scene, fault) = &*self.inner;
        write!(f, "store {} at {} failed", scene.request, scene.store)?;
        // A time is worth showing only if the operation took a while.
        if scene.elapsed >= Duration::from_millis(1) || fault.kind == ErrorKind::Timeout {
            write!(f, " after {}", show_duration(scene.elapsed))?;
        }
        write!(f, ": {fault}")
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self} ({:?})", self.kind())
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.inner.1.source.as_ref().map(|source| &**source as _)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_says_what_where_how_long_why_and_what_to_do() {
        let scene = Scene {
            request: "get `rank0/addr`".into(),
            store: "10.0.0.1:29500".into(),
            elapsed: Duration::from_secs(300),
            limit: Some(Duration::from_secs(300)),
        };
        let error = Error::new(scene, Fault::timeout("no such key").hint("start the rank that sets it"));
        assert_eq!(
            error.to_string(),
            "store get `rank0/addr` at 10.0.0.1:29500 failed after 300.0 s: no such key\n  hint: start the rank that sets it"
        );
        assert!(error.is_timeout());
    }
}
