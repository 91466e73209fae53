//! A peer on another host: this group's share of the line to it, and whether bytes still arrive after the peer's end.

use std::io;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use tenfold_memory::{Bytes, Head, Lane, Span};
use tenfold_plan::Rank;

use super::{Mesh, Route};
use crate::fabric::{Fabric, Fate, Peer};
use crate::fault::{ErrorKind, Fault};
use crate::transport::Socket;
use crate::transport::line::{Claim, Line, Message, SharedLine, Unexpected};

/// If no byte of a rank that has left arrives for this long, none will.
const STALLED: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub(super) struct Far {
    peer: Arc<Peer>,
    line: SharedLine,
    claim: Claim,
    /// A message that was received and not taken, by lane.
    pub(super) here: [Option<Message>; 2],
    /// How far the line must be written until all that this group sent is out, by lane.
    sent_until: [u64; 2],
    /// There are bytes on the line that its socket did not take, credit among them.
    has_unwritten: bool,
    /// Nothing more comes: sleeping on the socket would be no sleep.
    ended: bool,
    /// How many bytes had arrived at the last look that found more than before, and when that was.
    progress: Option<(u64, Instant)>,
}

impl Far {
    pub(super) fn new(fabric: &Fabric, group: u64, peer: Arc<Peer>) -> Far {
        let line = fabric.line(peer.id());
        let claim = line.lock().claim(group);
        Far {
            peer,
            line,
            claim,
            here: [None, None],
            sent_until: [0; 2],
            has_unwritten: false,
            ended: false,
            progress: None,
        }
    }

    /// With whether bytes are left that the socket did not take.
    pub(super) fn poll_send(
        &mut self,
        fabric: &Fabric,
        to: Rank,
        lane: Lane,
        head: &Head,
        bytes: Bytes<'_>,
    ) -> Result<(Poll<()>, bool), Fault> {
        let mut line = self.line.lock();
        if line.cannot_send() {
            open(fabric, &self.peer, to, &mut line)?;
        }
        let sent = line.poll_send(fabric, self.claim, lane as u8, head, bytes);
        let has_unwritten = line.has_unwritten();
        match sent.map_err(|error| lost(to, &error))? {
            Poll::Pending => Ok((Poll::Pending, has_unwritten)),
            Poll::Ready(until) => {
                self.sent_until[lane as usize] = until;
                Ok((Poll::Ready(()), has_unwritten))
            }
        }
    }

    pub(super) fn poll_flush(&mut self, lane: Lane) -> io::Result<Poll<()>> {
        match self.sent_until[lane as usize] {
            0 => Ok(Poll::Ready(())),
            until => self.line.lock().poll_flush(self.claim, until),
        }
    }

    /// The next message, if it is here: what it is and how long.
    pub(super) fn poll_message(&mut self, fabric: &Fabric, lane: Lane) -> io::Result<Poll<(Head, usize)>> {
        let here = &mut self.here[lane as usize];
        if here.is_none() {
            let mut line = self.line.lock();
            let polled = line.poll_message(fabric, self.claim, lane as u8);
            self.has_unwritten = line.has_unwritten() || line.has_owed();
            self.ended |= polled.is_err();
            match polled? {
                Poll::Pending => return Ok(Poll::Pending),
                Poll::Ready(message) => *here = Some(message),
            }
        }
        let message = here.as_ref().expect("it is here");
        Ok(Poll::Ready((message.head, message.len)))
    }

    pub(super) fn take(&mut self, lane: Lane) {
        let message = self.here[lane as usize].take().expect("the message was ready");
        let mut line = self.line.lock();
        line.take(self.claim, lane as u8, message);
        self.has_unwritten = line.has_unwritten() || line.has_owed();
    }

    pub(super) fn poll_recv(
        &mut self,
        fabric: &Fabric,
        lane: Lane,
        head: &Head,
        target: Span<'_>,
    ) -> Result<Poll<()>, Unexpected> {
        if let Some(message) = &self.here[lane as usize] {
            if !crate::label::is_same_call(&message.head, head) || message.len != target.len() {
                return Err(Unexpected::Other { head: message.head, len: message.len });
            }
            target.copy_from(message.bytes());
            self.take(lane);
            return Ok(Poll::Ready(()));
        }
        let mut line = self.line.lock();
        let polled = line.poll_recv(fabric, self.claim, lane as u8, head, target);
        self.has_unwritten = line.has_unwritten() || line.has_owed();
        self.ended |= matches!(polled, Err(Unexpected::Io(_)));
        polled
    }

    pub(super) fn peek_head(&mut self, fabric: &Fabric, lane: Lane) -> Option<Head> {
        match &self.here[lane as usize] {
            Some(message) => Some(message.head),
            None => Some(self.line.lock().peek_head(fabric, self.claim, lane as u8)?.0),
        }
    }

    /// Did receiving leave something to be written?
    #[inline]
    pub(super) fn owes_credit(&self) -> bool {
        self.has_unwritten
    }

    /// Writes what waits on the line; true if some still does.
    pub(super) fn flush(&mut self, fabric: &Fabric, to: Rank) -> Result<bool, Fault> {
        let mut line = self.line.lock();
        if line.has_owed() && line.cannot_send() {
            open(fabric, &self.peer, to, &mut line)?;
        }
        self.has_unwritten = line.flush().map_err(|error| lost(to, &error))?;
        Ok(self.has_unwritten)
    }

    pub(super) fn sleep_on(&self, sockets: &mut Vec<(Socket, bool)>) {
        if !self.ended {
            self.line.lock().sleep_on(sockets);
        }
    }

    /// The group has failed.
    pub(super) fn fail(&self) {
        self.line.lock().fail(self.claim);
    }

    fn arrived(&self) -> Option<u64> {
        if self.ended {
            return None;
        }
        let line = self.line.lock();
        let lanes = [Lane::Collective, Lane::PointToPoint].map(|lane| line.arrived(self.claim, lane as u8));
        lanes.into_iter().flatten().reduce(|one, other| one + other)
    }
}

impl Mesh {
    pub(super) fn pump_far(&mut self) -> Result<(), Fault> {
        let mut index = 0;
        while let Some(&peer) = self.unwritten.get(index) {
            let is_left = match &mut self.routes[peer] {
                Route::Far(far) => far.flush(&self.fabric, peer)?,
                _ => false,
            };
            if is_left {
                index += 1;
            } else {
                self.unwritten.swap_remove(index);
            }
        }
        Ok(())
    }

    /// Do bytes of a rank that has left or died still arrive? As long as they do, the end of the line is the truth: the
    /// kernel sends what a process wrote before its end, however long that takes.
    pub(crate) fn is_arriving(&mut self, rank: Rank, now: Instant) -> bool {
        let Some(peer) = &self.members[rank].peer else { return false };
        if matches!(peer.fate(), Some(Fate::Silent(_) | Fate::Unreachable(_))) {
            return false;
        }
        let Route::Far(far) = &mut self.routes[rank] else { return false };
        let Some(arrived) = far.arrived() else { return false };
        match far.progress {
            Some((before, at)) if before == arrived => now.saturating_duration_since(at) < STALLED,
            _ => {
                far.progress = Some((arrived, now));
                true
            }
        }
    }
}

/// Begins to connect to the peer.
#[cold]
fn open(fabric: &Fabric, peer: &Peer, rank: Rank, line: &mut Line) -> Result<(), Fault> {
    let address = peer.address().ok_or_else(|| {
        Fault::new(ErrorKind::Connect, format!("rank {rank} ({peer}) has no TCP address")).peer(rank)
    })?;
    line.open(address, fabric.interface()).map_err(|error| {
        let reason = crate::network::explain(&error);
        Fault::new(ErrorKind::Connect, format!("cannot reach rank {rank} ({peer}) at {address}: {reason}"))
            .peer(rank)
    })
}

#[cold]
pub(super) fn lost(peer: Rank, error: &io::Error) -> Fault {
    // The fabric knows more about a peer that died than its broken connection does; see `Mesh::lost_among`.
    Fault::new(ErrorKind::PeerLost, format!("the connection with rank {peer} broke: {error}")).peer(peer)
}
