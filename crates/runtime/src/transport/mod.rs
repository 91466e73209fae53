//! Between ranks: what the interpreter asks of whatever carries its messages.
//!
//! A link is a first-in first-out channel from one rank to another. A message carries the sender's label, and arrives
//! whole. Nothing here waits: what cannot be done now is `Pending`, and [`Wants`] says to the engine what to sleep on
//! and which ranks to name after a timeout.

pub(crate) mod line;
pub(crate) mod mesh;
#[cfg(test)]
mod sim;

use std::net::TcpStream;
use std::sync::Arc;
use std::task::Poll;

use tenfold_memory::{Bytes, Head, Lane, NotInherited, Span};
use tenfold_plan::Rank;

use crate::fault::Fault;

/// Carries the messages of one rank in one group. Each lane has links of its own: those of collectives do not wait for messages.
pub(crate) trait Transport {
    /// Hands `bytes` to `to`. With `lend` they stay as they are until [`Transport::poll_flush`] is ready, and may be read in
    /// place or written out step by step; without, they have been copied or written once this is ready.
    ///
    /// Bytes for several ranks are staged once: `stage` is where, and [`Transport::close`] follows the last of them.
    fn poll_send(
        &mut self,
        lane: Lane,
        to: Rank,
        stage: &mut Option<Stage>,
        head: &Head,
        bytes: Bytes<'_>,
        lend: bool,
    ) -> Result<Poll<()>, Fault>;

    /// Ends the use of `stage`: its bytes are not sent to any further rank.
    fn close(&mut self, lane: Lane, stage: Option<Stage>);

    /// Is the next message of `from` here? It must be the one described by `head`, with `len` bytes.
    fn poll_ready(&mut self, lane: Lane, from: Rank, head: &Head, len: usize) -> Result<Poll<()>, Fault>;

    /// The bytes of a message that was `Ready`.
    fn peek(&self, lane: Lane, from: Rank) -> Bytes<'_>;

    /// The message has been read.
    fn take(&mut self, lane: Lane, from: Rank) -> Result<(), Fault>;

    /// Moves the next message of `from` into `target`.
    fn poll_recv(
        &mut self,
        lane: Lane,
        from: Rank,
        head: &Head,
        target: Span<'_>,
    ) -> Result<Poll<()>, Fault> {
        if self.poll_ready(lane, from, head, target.len())?.is_pending() {
            return Ok(Poll::Pending);
        }
        target.copy_from(self.peek(lane, from));
        self.take(lane, from)?;
        Ok(Poll::Ready(()))
    }

    /// Ready once peers have read what was lent, and what goes over sockets was written. What was copied for them they may
    /// read later, even if this rank has ended by then.
    fn poll_flush(&mut self, lane: Lane) -> Result<Poll<()>, Fault>;
}

/// A socket that may be slept on without the engine's lock.
pub(crate) type Socket = Arc<NotInherited<TcpStream>>;

/// A slot in which bytes wait for several readers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stage(pub u16);

/// Exactly what a run waits for.
#[derive(Debug, Default)]
pub(crate) struct Wants {
    /// Messages of these ranks.
    pub messages: Vec<Rank>,
    /// A message of any of these ranks.
    pub any_of: Vec<Rank>,
    /// Room for messages to these ranks, or word that they have read them.
    pub room: Vec<Rank>,
    /// Word from all ranks that were lent memory that they have read it.
    pub flush: bool,
}
