//! What broke, before anybody knows for whom; and the error it becomes.
//!
//! Below the engine everything reports a [`Fault`]. Only the engine turns one into an [`Error`], because only there the
//! operation, group, rank and time are known: [`Error::new`] wants a whole [`Scene`].
//!
//! ```text
//! all_reduce #42 in group `default` failed on rank 3 of 8: rank 5 (host node-b, pid 4711) sent nothing for 30.0 s
//!   all_reduce(sum, float32 × 4194304) by `direct`, step 4 of 14; started 30.2 s ago, timeout 30.0 s
//!   hint: rank 5 last finished #41 broadcast(…); see its log, or raise `timeout`
//! ```

use std::any::Any;
use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tenfold_plan::Rank;

use crate::label::Label;

/// The result of an operation of a group.
pub type Result<T> = std::result::Result<T, Error>;

/// What kind of thing went wrong; decides what a caller may do about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum FaultKind {
    /// A rank gave up on purpose, and said why.
    Aborted,
    /// The caller's mistake: a root out of range, lengths that do not divide.
    Argument,
    /// The group was closed, or belongs to another process.
    Closed,
    /// Peers could not be found or reached.
    Connect,
    /// The operating system refused.
    Io,
    /// Ranks called different things.
    Mismatch,
    /// A peer's process ended, or left the group.
    PeerLost,
    /// A peer shows no sign of life.
    PeerSilent,
    /// A peer sent what the protocol does not allow.
    Protocol,
    /// The store failed.
    Store,
    /// The time is up.
    Timeout,
}

/// What broke.
#[derive(Clone, Debug)]
pub struct Fault {
    pub kind: FaultKind,
    pub peer: Option<Rank>,
    pub message: String,
    pub hint: Option<String>,
}

impl Fault {
    /// A fault with its message: lower case, no full stop, values in it.
    #[cold]
    pub fn new(kind: FaultKind, message: impl Into<String>) -> Self {
        Fault { kind, peer: None, message: message.into(), hint: None }
    }

    #[cold]
    pub fn argument(message: impl Into<String>) -> Self {
        Fault::new(FaultKind::Argument, message)
    }

    #[cold]
    pub fn io(what: impl fmt::Display, error: &io::Error) -> Self {
        Fault::new(FaultKind::Io, format!("{what}: {error}"))
    }

    #[must_use]
    pub fn peer(mut self, peer: Rank) -> Self {
        self.peer = Some(peer);
        self
    }

    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }
}

/// Where and when it broke.
#[derive(Clone, Debug)]
pub struct Scene {
    pub label: Label,
    pub group: Arc<str>,
    pub rank: Rank,
    /// 0 if it broke before the rank was known.
    pub size: usize,
    pub elapsed: Duration,
    pub timeout: Option<Duration>,
    /// Algorithm and how far it was, where the operation had begun.
    pub progress: Option<String>,
    /// At debug level DETAIL: with which shapes it was called, and where.
    pub detail: Option<String>,
}

/// An operation that failed: what, where, for how long, whose fault, and what to do next.
#[derive(Clone)]
pub struct Error {
    inner: Arc<(Scene, Fault)>,
}

impl Error {
    #[cold]
    pub fn new(scene: Scene, fault: Fault) -> Self {
        Error { inner: Arc::new((scene, fault)) }
    }

    pub fn kind(&self) -> FaultKind {
        self.inner.1.kind
    }

    /// The rank whose fault it is, where that is known.
    pub fn peer(&self) -> Option<Rank> {
        self.inner.1.peer
    }

    pub fn is_timeout(&self) -> bool {
        matches!(self.kind(), FaultKind::Timeout | FaultKind::PeerSilent)
    }

    /// What a user should do about it.
    pub fn hint(&self) -> Option<&str> {
        self.inner.1.hint.as_deref()
    }

    /// What broke, without the scene.
    pub fn message(&self) -> &str {
        &self.inner.1.message
    }

    pub fn scene(&self) -> &Scene {
        &self.inner.0
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (scene, fault) = &*self.inner;
        let Scene { label, group, rank, size, elapsed, timeout, progress, detail } = scene;
        write!(f, "{}", label.kind)?;
        if label.seq > 0 {
            write!(f, " #{}", label.seq)?;
        }
        write!(f, " in group `{group}` failed")?;
        if *size > 0 {
            write!(f, " on rank {rank} of {size}")?;
        }
        write!(f, ": {}", fault.message)?;
        if let Some(progress) = progress {
            write!(f, "\n  {label}{progress}; started {} ago", show_duration(*elapsed))?;
            if let Some(timeout) = timeout {
                write!(f, ", timeout {}", show_duration(*timeout))?;
            }
        }
        if let Some(detail) = detail {
            write!(f, "\n  called {detail}")?;
        }
        match &fault.hint {
            Some(hint) => write!(f, "\n  hint: {hint}"),
            None => Ok(()),
        }
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl std::error::Error for Error {}

/// Seconds where they matter, else milliseconds.
pub(crate) fn show_duration(duration: Duration) -> String {
    if duration >= Duration::from_secs(1) {
        format!("{:.1} s", duration.as_secs_f64())
    } else {
        format!("{:.1} ms", duration.as_secs_f64() * 1e3)
    }
}

/// The message of a panic that was caught.
pub(crate) fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message")
}

/// As in `rank 3` or `ranks 1, 2, 5`.
pub(crate) fn show_ranks(ranks: &[Rank]) -> String {
    const SHOWN: usize = 16;
    let mut text = ranks.iter().take(SHOWN).map(Rank::to_string).collect::<Vec<_>>().join(", ");
    if ranks.len() > SHOWN {
        text += &format!(" and {} more", ranks.len() - SHOWN);
    }
    if ranks.len() == 1 { format!("rank {text}") } else { format!("ranks {text}") }
}
