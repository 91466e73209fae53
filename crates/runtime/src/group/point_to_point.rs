//! Messages between two ranks, matched by source and tag.
//!
//! Messages of one sender arrive in the order in which they were sent; a receive takes the first with its tag. A message
//! that was not asked for stays with the sender until a receive asks for a later one; then it is kept here, up to a limit.

#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::sync::Arc;
use std::task::Poll;

use tenfold_memory::{BufferView, Bytes, Head, Lane, SLOT, Span};
use tenfold_plan::Rank;

use crate::fault::{Error, ErrorKind, Fault};
use crate::label::{Label, OpKind};
use crate::recorder::Waited;
use crate::transport::line::TCP_PIECE;
use crate::transport::mesh::Mesh;
use crate::transport::{Transport as _, Wants};
use crate::work::Shared;

/// Bytes of messages that arrived before they were asked for, and had to make room for others. If so many are kept, no
/// further message is; one alone may be longer.
const KEPT_MAX: usize = 1 << 30;

const LANE: Lane = Lane::PointToPoint;

#[derive(Debug)]
pub(crate) struct PointToPoint {
    rank: Rank,
    sends: Vec<VecDeque<Sending>>,
    sends_left: usize,
    receives: Vec<Receiving>,
    /// By source: the message that is arriving.
    arriving: Vec<Option<Arriving>>,
    arriving_count: usize,
    /// The source that is looked at first in the next turn, so that a busy one does not starve the others.
    first: Rank,
    /// By source: whole messages for which no receive has asked yet.
    kept: Vec<VecDeque<(Label, Vec<u8>)>>,
    kept_bytes: usize,
    /// The last source whose message could not be kept, because too much is.
    refused: Option<Rank>,
}

#[derive(Debug)]
struct Sending {
    work: Arc<Shared>,
    view: BufferView,
    head: Head,
    /// Bytes sent; nothing before the first piece, which may be empty.
    sent: Option<usize>,
}

/// A receive that was called.
#[derive(Debug)]
pub(crate) struct Receiving {
    pub work: Arc<Shared>,
    pub view: BufferView,
    pub from: Option<Rank>,
    pub tag: u32,
}

#[derive(Debug)]
struct Arriving {
    label: Label,
    total: usize,
    received: Option<usize>,
    target: Target,
}

#[derive(Debug)]
enum Target {
    Receive(Receiving),
    Keep(Vec<u8>),
}

impl PointToPoint {
    pub(crate) fn new(rank: Rank, size: usize) -> Self {
        PointToPoint {
            rank,
            sends: (0..size).map(|_| VecDeque::new()).collect(),
            sends_left: 0,
            receives: Vec::new(),
            arriving: (0..size).map(|_| None).collect(),
            arriving_count: 0,
            first: 0,
            kept: (0..size).map(|_| VecDeque::new()).collect(),
            kept_bytes: 0,
            refused: None,
        }
    }

    #[inline]
    pub(crate) fn is_busy(&self) -> bool {
        self.sends_left > 0 || !self.receives.is_empty() || self.arriving_count > 0
    }

    pub(crate) fn works(&self) -> impl Iterator<Item = &Arc<Shared>> {
        let sends = self.sends.iter().flatten().map(|sending| &sending.work);
        let arriving = self.arriving.iter().flatten().filter_map(|arriving| match &arriving.target {
            Target::Receive(receiving) => Some(&receiving.work),
            Target::Keep(_) => None,
        });
        sends.chain(self.receives.iter().map(|receiving| &receiving.work)).chain(arriving)
    }

    /// The oldest pending message, and its peer; `None` for a receive from any rank.
    pub(crate) fn oldest(&self) -> Option<(&Arc<Shared>, Option<Rank>)> {
        let sends = self.sends.iter().enumerate();
        let sends = sends.flat_map(|(to, sends)| sends.iter().map(move |sending| (&sending.work, Some(to))));
        let receives = self.receives.iter().map(|receiving| (&receiving.work, receiving.from));
        let arriving = self.arriving.iter().enumerate().filter_map(|(from, arriving)| {
            match &arriving.as_ref()?.target {
                Target::Receive(receiving) => Some((&receiving.work, Some(from))),
                Target::Keep(_) => None,
            }
        });
        sends.chain(receives).chain(arriving).max_by_key(|(work, _)| work.deadline().elapsed())
    }

    pub(crate) fn send(&mut self, work: Arc<Shared>, view: BufferView, to: Rank) {
        let head = work.label().head();
        self.sends[to].push_back(Sending { work, view, head, sent: None });
        self.sends_left += 1;
    }

    pub(crate) fn receive(&mut self, receiving: Receiving) {
        self.receives.push(receiving);
    }

    pub(crate) fn wants(&self, wants: &mut Wants) {
        for (peer, sends) in self.sends.iter().enumerate() {
            if !sends.is_empty() {
                wants.room.push(peer);
            }
        }
        for receiving in &self.receives {
            match receiving.from {
                Some(from) => wants.messages.push(from),
                None => wants.any_of.extend((0..self.sends.len()).filter(|peer| *peer != self.rank)),
            }
        }
        wants.messages.extend((0..self.arriving.len()).filter(|peer| self.arriving[*peer].is_some()));
    }

    /// Goes as far as possible; true if anything moved.
    pub(crate) fn poll(&mut self, mesh: &mut Mesh, finished: &mut Vec<Arc<Shared>>) -> Result<bool, Fault> {
        let mut moved = false;
        if self.sends_left > 0 {
            for to in 0..self.sends.len() {
                moved |= self.poll_sends(to, mesh, finished)?;
            }
        }
        if self.receives.is_empty() && self.arriving_count == 0 {
            return Ok(moved);
        }
        moved |= self.take_kept(finished)?;
        let sources = self.arriving.len();
        self.first = (self.first + 1) % sources;
        for from in (self.first..sources).chain(0..self.first) {
            let asked = |receiving: &Receiving| receiving.from.is_none_or(|asked| asked == from);
            if from != self.rank && (self.arriving[from].is_some() || self.receives.iter().any(asked)) {
                moved |= self.poll_arriving(from, mesh, finished)?;
            }
        }
        Ok(moved)
    }

    fn poll_sends(
        &mut self,
        to: Rank,
        mesh: &mut Mesh,
        finished: &mut Vec<Arc<Shared>>,
    ) -> Result<bool, Fault> {
        let piece = piece(mesh, to);
        let mut moved = false;
        while let Some(sending) = self.sends[to].front_mut() {
            let whole = sending.view.bytes();
            while sending.sent.is_none_or(|sent| sent < whole.len()) {
                let from = sending.sent.unwrap_or(0);
                let until = whole.len().min(from + piece);
                let mut stage = None;
                let bytes = whole.part(from, until);
                let taken = mesh.poll_send(LANE, to, &mut stage, &sending.head, bytes, true)?;
                mesh.close(LANE, stage);
                if taken.is_pending() {
                    return Ok(moved);
                }
                if sending.sent.is_none() {
                    sending.work.begin();
                }
                sending.sent = Some(until);
                moved = true;
            }
            if mesh.poll_flush_of(LANE, to)?.is_pending() {
                return Ok(moved);
            }
            let Some(Sending { work, view, .. }) = self.sends[to].pop_front() else { break };
            self.sends_left -= 1;
            moved = true;
            drop(view);
            finish(work, finished);
        }
        Ok(moved)
    }

    fn poll_arriving(
        &mut self,
        from: Rank,
        mesh: &mut Mesh,
        finished: &mut Vec<Arc<Shared>>,
    ) -> Result<bool, Fault> {
        let piece = piece(mesh, from);
        let mut moved = false;
        loop {
            let polled = match mesh.poll_any(LANE, from) {
                // Another rank may send what is asked for. If none is left that could, `Mesh::lost_among` finds out.
                Err(fault) if fault.kind == ErrorKind::PeerLost && !self.needs(from) => return Ok(moved),
                polled => polled?,
            };
            let Poll::Ready((head, len)) = polled else { return Ok(moved) };
            if self.arriving[from].is_none() && !self.begin(from, &head)? {
                return Ok(moved);
            }
            let Some(arriving) = &mut self.arriving[from] else { return Ok(moved) };
            let received = arriving.received.unwrap_or(0);
            if head != arriving.label.head() || len != piece.min(arriving.total - received) {
                return Err(nonsense(from));
            }
            let bytes = mesh.peek(LANE, from);
            arriving.accept(received, bytes);
            arriving.received = Some(received + len);
            mesh.take(LANE, from)?;
            moved = true;
            if received + len == arriving.total
                && let Some(arriving) = self.arriving[from].take()
            {
                self.arriving_count -= 1;
                self.arrived(from, arriving, finished)?;
            }
            let wanted = |receiving: &Receiving| receiving.from.is_none_or(|asked| asked == from);
            if self.arriving[from].is_none() && !self.receives.iter().any(wanted) {
                return Ok(moved);
            }
        }
    }

    /// Is there a receive that only this source can complete?
    fn needs(&self, from: Rank) -> bool {
        self.arriving[from].is_some() || self.receives.iter().any(|receiving| receiving.from == Some(from))
    }

    /// A message begins to arrive: finds the receive that it is for. False if there is none and it cannot be kept.
    fn begin(&mut self, from: Rank, head: &Head) -> Result<bool, Fault> {
        let label = Label::from_head(head)
            .filter(|label| label.kind == OpKind::Send)
            .ok_or_else(|| nonsense(from))?;
        let element = label.dtype.map_or(1, tenfold_memory::DType::size);
        let total = usize::try_from(label.count).ok().and_then(|count| count.checked_mul(element));
        let total = total.ok_or_else(|| nonsense(from))?;
        let target = match self.matching(from, label.tag_of()) {
            Some(index) => {
                check(from, &label, total, &self.receives[index])?;
                let receiving = self.receives.remove(index);
                receiving.work.begin();
                Target::Receive(receiving)
            }
            None if self.kept_bytes >= KEPT_MAX => {
                self.refused = Some(from);
                return Ok(false);
            }
            None => {
                self.kept_bytes += total;
                Target::Keep(vec![0; total])
            }
        };
        self.arriving[from] = Some(Arriving { label, total, received: None, target });
        self.arriving_count += 1;
        Ok(true)
    }

    /// The receive that was called first among those that a message of `from` with `tag` may go to.
    fn matching(&self, from: Rank, tag: u32) -> Option<usize> {
        let fits =
            |receiving: &Receiving| receiving.tag == tag && receiving.from.is_none_or(|asked| asked == from);
        self.receives.iter().position(fits)
    }

    fn arrived(
        &mut self,
        from: Rank,
        arriving: Arriving,
        finished: &mut Vec<Arc<Shared>>,
    ) -> Result<(), Fault> {
        match arriving.target {
            Target::Keep(bytes) => {
                self.kept[from].push_back((arriving.label, bytes));
                // A receive may have asked for it meanwhile, and must not get a later message with the same tag instead.
                self.take_kept(finished)?;
            }
            Target::Receive(Receiving { work, view, .. }) => {
                drop(view);
                work.set_source(from);
                finish(work, finished);
            }
        }
        Ok(())
    }

    /// Why receives may wait although messages have arrived.
    pub(crate) fn obstacle(&self) -> Option<String> {
        let from = self.refused.filter(|_| self.kept_bytes >= KEPT_MAX)?;
        let kept = self.kept_bytes >> 20;
        Some(format!(
            "{kept} MiB of messages have arrived that were not received, and rank {from} has sent more: receive them first"
        ))
    }

    /// Hands out messages that came before they were asked for.
    fn take_kept(&mut self, finished: &mut Vec<Arc<Shared>>) -> Result<bool, Fault> {
        let mut moved = false;
        for from in 0..self.kept.len() {
            let mut index = 0;
            while let Some((label, bytes)) = self.kept[from].get(index) {
                let Some(receive) = self.matching(from, label.tag_of()) else {
                    index += 1;
                    continue;
                };
                check(from, label, bytes.len(), &self.receives[receive])?;
                let receiving = self.receives.remove(receive);
                receiving.work.begin();
                receiving.view.span().part(0, bytes.len()).copy_from(Bytes::of(bytes));
                self.kept_bytes -= bytes.len();
                self.kept[from].remove(index);
                let Receiving { work, view, .. } = receiving;
                drop(view);
                work.set_source(from);
                finish(work, finished);
                moved = true;
            }
        }
        Ok(moved)
    }

    /// Everything under way ends with `fault`.
    pub(crate) fn fail(&mut self, fault: &Fault, finished: &mut Vec<Arc<Shared>>) {
        let works: Vec<_> = self.works().cloned().collect();
        self.sends.iter_mut().for_each(VecDeque::clear);
        self.sends_left = 0;
        self.receives.clear();
        self.arriving.iter_mut().for_each(|arriving| *arriving = None);
        self.arriving_count = 0;
        for work in works {
            let error = Error::new(work.scene(None), fault.clone());
            if work.finish(Err(error), Waited::UntilStarted) {
                finished.push(work);
            }
        }
    }
}

impl Arriving {
    fn accept(&mut self, at: usize, bytes: Bytes<'_>) {
        let target = match &mut self.target {
            Target::Receive(receiving) => receiving.view.span(),
            Target::Keep(kept) => Span::of(kept),
        };
        target.part(at, at + bytes.len()).copy_from(bytes);
    }
}

fn finish(work: Arc<Shared>, finished: &mut Vec<Arc<Shared>>) {
    if work.finish(Ok(()), Waited::UntilStarted) {
        finished.push(work);
    }
}

/// May this message go into that receive?
fn check(from: Rank, label: &Label, total: usize, receiving: &Receiving) -> Result<(), Fault> {
    let view = &receiving.view;
    if label.dtype == Some(view.dtype()) && total <= view.byte_len() {
        return Ok(());
    }
    let message = format!(
        "rank {from} called {label}, but the receive has room for {} × {}",
        view.dtype(),
        view.elements()
    );
    let hint = "sender and receiver must have the same dtype, and the receiver at least as many elements";
    Err(Fault::new(ErrorKind::Mismatch, message).peer(from).hint(hint))
}

/// Bytes that travel as one message.
fn piece(mesh: &Mesh, peer: Rank) -> usize {
    if mesh.members()[peer].near { SLOT } else { TCP_PIECE }
}

#[cold]
fn nonsense(from: Rank) -> Fault {
    let message = format!("rank {from} sent a point-to-point message that is invalid");
    Fault::new(ErrorKind::Protocol, message).peer(from)
}
