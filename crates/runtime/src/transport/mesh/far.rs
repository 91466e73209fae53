//! A peer on another host: this group's share of the lines to it, one for each rail, and whether bytes still arrive after the
//! peer's end.

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
    /// The messages of a lane take turns on them: both ends know on which the next one travels.
    rails: Vec<Rail>,
    /// On which rail the next message goes, by lane, and on which the next one comes.
    next_out: [usize; 2],
    next_in: [usize; 2],
    /// A message that was received and not taken, by lane.
    pub(super) here: [Option<Message>; 2],
    /// Nothing more comes: sleeping on the socket would be no sleep.
    ended: bool,
    /// How many bytes had arrived at the last look that found more than before, and when that was.
    progress: Option<(u64, Instant)>,
}

/// The line between two interfaces.
#[derive(Debug)]
struct Rail {
    line: SharedLine,
    claim: Claim,
    /// How far the line must be written until all that this group sent is out, by lane.
    sent_until: [u64; 2],
    /// There are bytes on the line that its socket did not take, credit among them.
    has_unwritten: bool,
}

impl Far {
    pub(super) fn new(fabric: &Fabric, group: u64, peer: Arc<Peer>) -> Far {
        let rail = |rail| {
            let line = fabric.line(peer.id(), rail);
            let claim = line.lock().claim(group);
            Rail { line, claim, sent_until: [0; 2], has_unwritten: false }
        };
        let rails = (0..peer.rails_with(fabric.rails().len())).map(rail).collect();
        Far {
            peer,
            rails,
            next_out: [0; 2],
            next_in: [0; 2],
            here: [None, None],
            ended: false,
            progress: None,
        }
    }

    #[inline]
    fn after(&self, rail: usize) -> usize {
        if rail + 1 < self.rails.len() { rail + 1 } else { 0 }
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
        let number = self.next_out[lane as usize];
        let rail = &mut self.rails[number];
        let mut line = rail.line.lock();
        if line.cannot_send() {
            open(fabric, &self.peer, to, number as u8, &mut line)?;
        }
        let sent = line.poll_send(fabric, rail.claim, lane as u8, head, bytes);
        let has_unwritten = line.has_unwritten();
        match sent.map_err(|error| lost(to, &error))? {
            Poll::Pending => Ok((Poll::Pending, has_unwritten)),
            Poll::Ready(until) => {
                rail.sent_until[lane as usize] = until;
                drop(line);
                self.next_out[lane as usize] = self.after(number);
                Ok((Poll::Ready(()), has_unwritten))
            }
        }
    }

    pub(super) fn poll_flush(&mut self, lane: Lane) -> io::Result<Poll<()>> {
        let mut flushed = Poll::Ready(());
        for rail in &mut self.rails {
            let until = rail.sent_until[lane as usize];
            if until > 0 && rail.line.lock().poll_flush(rail.claim, until)?.is_pending() {
                flushed = Poll::Pending;
            }
        }
        Ok(flushed)
    }

    /// The next message, if it is here: what it is and how long.
    pub(super) fn poll_message(&mut self, fabric: &Fabric, lane: Lane) -> io::Result<Poll<(Head, usize)>> {
        let here = &mut self.here[lane as usize];
        if here.is_none() {
            let rail = &mut self.rails[self.next_in[lane as usize]];
            let mut line = rail.line.lock();
            let polled = line.poll_message(fabric, rail.claim, lane as u8);
            rail.has_unwritten = owes(&line);
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
        let number = self.next_in[lane as usize];
        let rail = &mut self.rails[number];
        let mut line = rail.line.lock();
        line.take(rail.claim, lane as u8, message);
        rail.has_unwritten = owes(&line);
        drop(line);
        self.next_in[lane as usize] = self.after(number);
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
        let number = self.next_in[lane as usize];
        let rail = &mut self.rails[number];
        let mut line = rail.line.lock();
        let polled = line.poll_recv(fabric, rail.claim, lane as u8, head, target);
        rail.has_unwritten = owes(&line);
        drop(line);
        self.ended |= matches!(polled, Err(Unexpected::Io(_)));
        if matches!(polled, Ok(Poll::Ready(()))) {
            self.next_in[lane as usize] = self.after(number);
        }
        polled
    }

    pub(super) fn peek_head(&mut self, fabric: &Fabric, lane: Lane) -> Option<Head> {
        match &self.here[lane as usize] {
            Some(message) => Some(message.head),
            None => {
                let rail = &self.rails[self.next_in[lane as usize]];
                Some(rail.line.lock().peek_head(fabric, rail.claim, lane as u8)?.0)
            }
        }
    }

    /// Does one of its lines?
    #[inline]
    pub(super) fn owes_credit(&self) -> bool {
        self.rails.iter().any(|rail| rail.has_unwritten)
    }

    /// Writes what waits on the lines; true if some still does.
    pub(super) fn flush(&mut self, fabric: &Fabric, to: Rank) -> Result<bool, Fault> {
        for (number, rail) in (0..).zip(&mut self.rails) {
            let mut line = rail.line.lock();
            if line.has_owed() && line.cannot_send() {
                open(fabric, &self.peer, to, number, &mut line)?;
            }
            rail.has_unwritten = line.flush().map_err(|error| lost(to, &error))?;
        }
        Ok(self.owes_credit())
    }

    pub(super) fn sleep_on(&self, sockets: &mut Vec<(Socket, bool)>) {
        if !self.ended {
            self.rails.iter().for_each(|rail| rail.line.lock().sleep_on(sockets));
        }
    }

    /// The group has failed.
    pub(super) fn fail(&self) {
        self.rails.iter().for_each(|rail| rail.line.lock().fail(rail.claim));
    }

    fn arrived(&self) -> Option<u64> {
        if self.ended {
            return None;
        }
        let on = |rail: &Rail| {
            let line = rail.line.lock();
            [Lane::Collective, Lane::PointToPoint].map(|lane| line.arrived(rail.claim, lane as u8))
        };
        self.rails.iter().flat_map(on).flatten().reduce(|one, other| one + other)
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

/// Did receiving leave something to be written?
#[inline]
fn owes(line: &Line) -> bool {
    line.has_unwritten() || line.has_owed()
}

/// Begins to connect to the peer.
#[cold]
fn open(fabric: &Fabric, peer: &Peer, rank: Rank, rail: u8, line: &mut Line) -> Result<(), Fault> {
    let address = peer.address_of(rail).ok_or_else(|| {
        Fault::new(ErrorKind::Connect, format!("rank {rank} ({peer}) has no TCP address")).peer(rank)
    })?;
    line.open(address, fabric.interface_of(rail)).map_err(|error| {
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
