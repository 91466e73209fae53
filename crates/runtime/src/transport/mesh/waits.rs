//! What a rank does before it sleeps: tell the peers, find the sockets, and look for what will never come.

use std::time::Instant;

use tenfold_memory::{Head, Lane, Wanted};
use tenfold_plan::Rank;

use super::{Lost, Mesh, Route};
use crate::fabric::Fate;
use crate::fault::Fault;
use crate::label::is_same_call;
use crate::transport::{Socket, Wants};

impl Mesh {
    /// Returns a rank among those that are waited for that will never answer, with the reason.
    pub(crate) fn lost_among(&mut self, wants: &Wants, now: Instant) -> Option<Lost> {
        let flushed = if wants.flush { self.unread().to_vec() } else { Vec::new() };
        if let Some(lost) = wants.room.iter().chain(&flushed).find_map(|rank| self.gone(*rank)) {
            return Some(lost);
        }
        if let Some(lost) = wants.messages.iter().find_map(|rank| self.ended(*rank, now)) {
            return Some(lost);
        }
        // Of those who may all send, one is enough.
        let mut reasons = wants.any_of.iter().map(|rank| self.ended(*rank, now));
        let first = reasons.next()??;
        reasons.all(|reason| reason.is_some()).then(|| {
            let message = format!("every rank that could send is gone; {}", first.fault.message);
            Lost { fault: Fault { message, ..first.fault }, ..first }
        })
    }

    fn gone(&self, rank: Rank) -> Option<Lost> {
        let peer = self.members[rank].peer.as_ref()?;
        let (fate, since) = peer.fate_and_age()?;
        // What another host sent before may still be on its way, on another connection than the news of its end.
        let settled = self.members[rank].near || since >= fate.grace();
        settled.then(|| Lost { fault: fate.fault(rank, peer), has_left: *fate == Fate::Left })
    }

    /// Is `rank` gone, with nothing left of it that may still arrive?
    fn ended(&mut self, rank: Rank, now: Instant) -> Option<Lost> {
        let lost = self.gone(rank)?;
        (!self.is_arriving(rank, now)).then_some(lost)
    }

    /// Looks for messages that the operation under way, called `head`, will never read: a peer called something else.
    pub(crate) fn find_stray(&mut self, head: &Head) -> Option<(Rank, Head)> {
        for rank in 0..self.routes.len() {
            let theirs = match &mut self.routes[rank] {
                Route::Unknown => continue,
                Route::Near(near) => near.link.peek(Lane::Collective).map(|(head, _)| head),
                Route::Far(far) => far.peek_head(&self.fabric, Lane::Collective),
            };
            if let Some(theirs) = theirs
                && theirs[1] <= head[1]
                && !is_same_call(&theirs, head)
            {
                return Some((rank, theirs));
            }
            // If the ranks passed different roots, all may wait and none sends: then only the boards show the mismatch.
            if let Some(theirs) = self.doing(rank).map(|doing| doing.current)
                && theirs[1] == head[1]
                && !is_same_call(&theirs, head)
            {
                return Some((rank, theirs));
            }
        }
        None
    }

    /// Tells the peers that are waited for that this rank sleeps, and lists the sockets to sleep on, with whether to write.
    pub(crate) fn prepare_to_sleep(&mut self, wants: &Wants, sockets: &mut Vec<(Socket, bool)>) {
        let none: &[Rank] = &[];
        let flushed = if wants.flush { &self.unread[0] } else { none };
        // A free slot may be what is missing, and any peer that holds one may give it back.
        let [first, second] = &self.holders;
        let holders =
            if wants.room.is_empty() { none.iter().chain(none) } else { first.iter().chain(second) };
        let near =
            wants.messages.iter().chain(&wants.any_of).chain(&wants.room).chain(flushed).chain(holders);
        for &rank in near {
            if let Route::Near(near) = &self.routes[rank] {
                near.link.want(Wanted::ANYTHING);
                self.sleeping_on.push(rank);
            }
        }
        // Room for a message comes with credit, which is read.
        let far = self.unwritten.iter().chain(&wants.room).chain(&wants.messages).chain(&wants.any_of);
        for rank in distinct(far) {
            let Route::Far(far) = &self.routes[rank] else { continue };
            far.sleep_on(sockets);
        }
    }

    /// This rank is awake again.
    pub(crate) fn wake_up(&mut self) {
        for rank in self.sleeping_on.drain(..) {
            if let Route::Near(near) = &self.routes[rank] {
                near.link.want(Wanted::NOTHING);
            }
        }
    }
}

/// Each rank once: many receives may wait for the same rank, and a socket that is slept on twice takes two places.
fn distinct<'a>(ranks: impl Iterator<Item = &'a Rank>) -> Vec<Rank> {
    let mut ranks: Vec<Rank> = ranks.copied().collect();
    ranks.sort_unstable();
    ranks.dedup();
    ranks
}
