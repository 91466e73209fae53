//! What can go wrong, and how it reads.
//!
//! A store reports a [`Fault`]: what broke. Only `ops` turns it into an [`Error`], because only there the
//! operation, its keys, the store and the time waited are all known. What happened and what to do about it
//! are kept apart: the message says the first, [`Error::hint`] the second.
//!
//! ```text
//! store get `rank0/addr` from 10.0.0.1:29500 failed after 300.0 s: no such key
//!   hint: nobody set it in that time; is the rank that should set it alive?
//! ```

use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// The result of a store operation.
pub type Result<T> = std::result::Result<T, Error>;

/// What kind of thing went wrong; decides what a caller may do about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The caller's mistake: a world size of zero, lists of different lengths.
    Argument,
    /// Nobody could be reached, or the address could not be bound.
    Connect,
    /// The data are damaged, left over from another run, or not a store's at all.
    Corrupt,
    /// The operating system refused: a full disk, no permission.
    Io,
    /// A limit with a name was reached.
    Limit,
    /// The connection is gone: the server died, or it closed the connection.
    Lost,
    /// `add` or `barrier` on a value that is no number.
    NotANumber,
    /// The peer answered with something that the protocol does not allow.
    Protocol,
    /// `queue_pop` found nothing.
    QueueEmpty,
    /// The time is up.
    Timeout,
    /// This store cannot do that.
    Unsupported,
}

/// What broke, before anybody knows for whom.
#[derive(Clone, Debug)]
pub struct Fault {
    kind: ErrorKind,
    message: String,
    hint: Option<String>,
    source: Option<Arc<io::Error>>,
}

impl Fault {
    /// A fault with its message: lower case, no full stop, values in it.
    #[cold]
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Fault { kind, message: message.into(), hint: None, source: None }
    }

    /// The operating system's error, with what was being done as `message`.
    #[cold]
    pub fn io(message: impl Into<String>, source: io::Error) -> Self {
        let message = format!("{}: {source}", message.into());
        Fault { kind: ErrorKind::Io, message, hint: None, source: Some(Arc::new(source)) }
    }

    /// The same fault of another kind.
    #[must_use]
    pub fn kind_is(mut self, kind: ErrorKind) -> Self {
        self.kind = kind;
        self
    }

    /// What a user should do about it.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// This store cannot do `what`.
    #[cold]
    pub fn unsupported(what: &str) -> Self {
        Fault::new(ErrorKind::Unsupported, format!("this store has no {what}"))
    }

    /// The time is up.
    #[cold]
    pub fn timeout(message: impl Into<String>) -> Self {
        Fault::new(ErrorKind::Timeout, message)
    }

    /// What kind of error it is.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// What went wrong, without the scene.
    pub fn message(&self) -> &str {
        &self.message
    }
}

/// Where and when it broke.
#[derive(Clone, Debug)]
pub struct Scene {
    /// The operation and its keys, such as ``get `rank0/addr` ``.
    pub request: String,
    /// The store, such as `10.0.0.1:29500`.
    pub store: String,
    /// How long the operation had been under way.
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

    /// What kind of thing went wrong.
    pub fn kind(&self) -> ErrorKind {
        self.inner.1.kind
    }

    /// Did it end because the time was up?
    pub fn is_timeout(&self) -> bool {
        self.kind() == ErrorKind::Timeout
    }

    /// What to do about it, if there is evidence for advice.
    pub fn hint(&self) -> Option<&str> {
        self.inner.1.hint.as_deref()
    }

    /// Where and when.
    pub fn scene(&self) -> &Scene {
        &self.inner.0
    }

    /// What broke, without where.
    pub fn fault(&self) -> &Fault {
        &self.inner.1
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

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (scene, fault) = &*self.inner;
        write!(f, "store {} at {} failed", scene.request, scene.store)?;
        // A time is evidence only if there was one to speak of.
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
        self.inner.1.source.as_ref().map(|source| source.as_ref() as _)
    }
}

/// A duration as people write it: `30.2 s`, `250 ms`.
pub fn show_duration(duration: Duration) -> String {
    if duration < Duration::from_secs(1) {
        format!("{} ms", duration.as_millis())
    } else {
        format!("{:.1} s", duration.as_secs_f64())
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
        let error = Error::new(scene, Fault::timeout("no such key").hint("nobody set it"));
        assert_eq!(
            error.to_string(),
            "store get `rank0/addr` at 10.0.0.1:29500 failed after 300.0 s: no such key\n  hint: nobody set it"
        );
        assert!(error.is_timeout());
    }

    #[test]
    fn durations_have_units() {
        assert_eq!(show_duration(Duration::from_millis(250)), "250 ms");
        assert_eq!(show_duration(Duration::from_millis(30_249)), "30.2 s");
    }
}
