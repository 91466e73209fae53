//! What broke, before the operation that it broke is known.
//!
//! Everything below an operation reports a [`Fault`]. The crate that runs the operation turns it into its error, at the place
//! where the operation, its arguments and the time are known. The message says what happened, the hint what to do about it.

use std::fmt;
use std::io;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// What kind of thing went wrong; decides what a caller may do about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A rank gave up on purpose, and said why.
    Aborted,
    /// The caller's mistake: a root out of range, a world size of zero, lengths that do not divide.
    Argument,
    /// The group was closed, or belongs to another process.
    Closed,
    /// A store or a peer could not be reached, or an address could not be bound.
    Connect,
    /// The data of a store are damaged, left over from another run, or not a store's at all.
    Corrupt,
    /// The operating system refused: a full disk, no permission.
    Io,
    /// A limit with a name was reached.
    Limit,
    /// The connection to a store was lost: the server died, or it closed the connection.
    Lost,
    /// Ranks called different things.
    Mismatch,
    /// `add` or `barrier` of a store on a value that is not a number.
    NotANumber,
    /// A peer's process ended, or left the group.
    PeerLost,
    /// A peer shows no sign of life.
    PeerSilent,
    /// A peer or a store sent what the protocol does not allow.
    Protocol,
    /// `queue_pop` of a store found nothing.
    QueueEmpty,
    /// The store of a group failed.
    Store,
    /// The operation timed out.
    Timeout,
    /// This store cannot do that.
    Unsupported,
}

/// What broke.
///
/// ```
/// use tenfold_base::{ErrorKind, Fault};
/// let fault = Fault::new(ErrorKind::PeerLost, "rank 5 left").peer(5).hint("see its log");
/// assert_eq!(fault.to_string(), "rank 5 left\n  hint: see its log");
/// ```
#[derive(Clone, Debug)]
pub struct Fault {
    /// What kind of thing went wrong.
    pub kind: ErrorKind,
    /// The rank that caused it, where that is known.
    pub peer: Option<usize>,
    /// What happened: lower case, no full stop, values in it.
    pub message: String,
    /// What a user should do about it, if there is evidence for advice.
    pub hint: Option<String>,
    /// The error of another library that caused it.
    pub source: Option<Arc<dyn std::error::Error + Send + Sync>>,
}

impl Fault {
    /// A fault with its message: lower case, no full stop, values in it.
    #[cold]
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Fault { kind, peer: None, message: message.into(), hint: None, source: None }
    }

    /// The caller's mistake.
    #[cold]
    pub fn argument(message: impl Into<String>) -> Self {
        Fault::new(ErrorKind::Argument, message)
    }

    /// The operating system's error, with what was being done.
    #[cold]
    pub fn io(what: impl fmt::Display, error: io::Error) -> Self {
        Fault::new(ErrorKind::Io, format!("{what}: {error}")).source(error)
    }

    /// A fault of the kind [`Timeout`](ErrorKind::Timeout).
    #[cold]
    pub fn timeout(message: impl Into<String>) -> Self {
        Fault::new(ErrorKind::Timeout, message)
    }

    /// This store cannot do `what`.
    #[cold]
    pub fn unsupported(what: &str) -> Self {
        Fault::new(ErrorKind::Unsupported, format!("this store has no {what}"))
    }

    /// The same fault of another kind.
    #[must_use]
    pub fn kind_is(mut self, kind: ErrorKind) -> Self {
        self.kind = kind;
        self
    }

    /// The rank that caused it.
    #[must_use]
    pub fn peer(mut self, peer: usize) -> Self {
        self.peer = Some(peer);
        self
    }

    /// What a user should do about it.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// The error of another library that caused it.
    #[must_use]
    pub fn source(mut self, source: impl std::error::Error + Send + Sync + 'static) -> Self {
        self.source = Some(Arc::new(source));
        self
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        match &self.hint {
            Some(hint) => write!(f, "\n  hint: {hint}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_of_the_system_remains_the_source() {
        for (code, cause) in [(Some(28), io::Error::from_raw_os_error(28)), (None, io::Error::other("own"))] {
            let text = cause.to_string();
            let fault = Fault::io("cannot write", cause);
            assert_eq!(fault.message, format!("cannot write: {text}"));
            let kept = fault.source.as_ref().unwrap().downcast_ref::<io::Error>().unwrap();
            assert_eq!((kept.raw_os_error(), kept.to_string()), (code, text));
        }
    }
}
