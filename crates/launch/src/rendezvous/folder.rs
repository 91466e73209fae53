//! The task of one node at a time: to fold the wishes of all nodes into the state.
//!
//! The head names that node, the *folder*. Another node takes the task over when the folder's beat has not
//! moved for too long, by a claim: the same head with the next term. A former folder that wakes up cannot
//! change anything: its write expects a head that is not there any more, and the texts that it wrote before
//! have names that no head mentions.
//!
//! The folder also removes dead nodes, begins rounds, and answers nodes that cannot join. Nothing here
//! depends on what an earlier folder knew, except for the state.

use std::time::Duration;

use tenfold_dashboard::job::{NodeInfo, Phase, Seat, Stamp};

use super::member::{Member, What, Wish};
use super::state::{Change, Limits, State};

/// What the folder does next.
#[derive(Debug, Default)]
pub(super) struct Fold {
    /// To be written in place of the state that was folded into, and of no other.
    pub(super) next: Option<(State, Change)>,
    /// Nodes that cannot join, and why.
    pub(super) answers: Vec<(String, String)>,
    /// Fold again at this time at the latest.
    pub(super) wake: Option<Duration>,
}

impl Member {
    /// Folds wishes into the state. `folded` is the number up to which all wishes have been dealt with.
    pub(super) fn fold(&mut self, state: &State, wishes: &[Wish], folded: u64, now: Duration) -> Fold {
        let mut fold = Fold::default();
        let mut next = state.clone();
        // A node that leaves never joins again: if a wish of it to join arrives late, it must not count.
        let (last, first): (Vec<&Wish>, Vec<&Wish>) =
            wishes.iter().partition(|wish| matches!(wish.what, What::Leave { .. }));
        for wish in first.into_iter().chain(last) {
            self.grant(&mut next, wish, &mut fold.answers);
        }
        self.remove_dead(state, &mut next);
        let goes = |wish: &Wish| wish.node == self.node.id && self.is_gone(&next, &wish.what);
        if wishes.iter().any(goes) {
            self.appoint(&mut next);
        }
        fold.wake = self.begin_if_due(&mut next, now);
        if next != *state {
            next.folded = folded.max(state.folded);
            self.stamps += 1;
            let change = next.seal(state, Stamp(state.term, self.stamps));
            change.removed.iter().for_each(|id| self.forget(id));
            fold.next = Some((next, change));
        }
        fold
    }

    /// Gives the task to another node, because this one ends.
    pub(super) fn hand_over(&mut self, state: &State) -> Option<(State, Change)> {
        let mut next = state.clone();
        self.appoint(&mut next);
        if next.folder == state.folder {
            return None;
        }
        self.stamps += 1;
        let change = next.seal(state, Stamp(state.term, self.stamps));
        Some((next, change))
    }

    fn grant(&self, next: &mut State, wish: &Wish, answers: &mut Vec<(String, String)>) {
        let id = wish.node.as_str();
        if wish.job != next.job {
            return;
        }
        let is_now = wish.round == next.round;
        match &wish.what {
            What::Join { node, limits } if is_now && node.id == id => {
                self.admit(next, node, *limits, answers);
            }
            What::Ready if is_now => next.ready(id),
            What::Done => next.done(id, wish.round),
            What::Failed { failure } => next.fail(id, failure.clone()),
            What::Leave { .. } if next.phase == Phase::Over => next.acknowledge(id),
            What::Leave { why } => next.remove(id, why),
            What::GiveUp if is_now && next.phase == Phase::Joining && !next.can_begin() => {
                let host = next.nodes().find(|node| node.id == id).map(|node| node.host.clone());
                if let Some(host) = host {
                    next.remove(id, &format!("node {host} left: it had waited too long"));
                }
            }
            What::Acknowledge => next.acknowledge(id),
            _ => {}
        }
    }

    /// Whether the folder exits now that this wish of it was granted.
    fn is_gone(&self, next: &State, what: &What) -> bool {
        match what {
            What::Leave { .. } => true,
            What::GiveUp => next.ids().all(|id| id != self.node.id),
            _ => false,
        }
    }

    fn admit(&self, next: &mut State, node: &NodeInfo, limits: Limits, answers: &mut Vec<(String, String)>) {
        if next.phase == Phase::Over || next.ids().any(|id| id == node.id) {
            return;
        }
        match next.objection(&self.settings.run_id, limits, node) {
            None => next.join(node),
            // What dead nodes left behind is not a reason: it will be removed, and the node asks again.
            Some((text, who)) => {
                let blocks = |id: &str| who.as_ref().is_none_or(|who| who == id) && self.is_alive(id);
                if next.ids().any(blocks) {
                    answers.push((node.id.clone(), text));
                }
            }
        }
    }

    /// Another node becomes the folder: if possible one that is known to be alive, and the one that hosts the
    /// store, because it is the last to exit. A node that is known to be dead does not.
    fn appoint(&self, next: &mut State) {
        let own = &self.node.id;
        let others = next.seats().filter(|seat| seat.node.id != *own && !self.is_dead(&seat.node.id));
        let merit =
            |seat: &Seat| (self.is_alive(&seat.node.id), seat.node.worker_store.is_some(), !seat.spare);
        // The first of the best: `max_by_key` would return the last.
        let best = others.rev().max_by_key(|seat| merit(seat)).map(|seat| seat.node.id.clone());
        if let Some(id) = best {
            next.term += 1;
            next.folder = id;
        }
    }

    fn remove_dead(&self, state: &State, next: &mut State) {
        // After taking over, beats must be read first: a node may have joined again meanwhile.
        if self.heard_in != Some(state.term) {
            return;
        }
        let silence = self.settings.silence_max().as_secs_f64();
        for seat in state.seats().filter(|seat| self.is_dead(&seat.node.id)) {
            let (id, host) = (&seat.node.id, &seat.node.host);
            match (state.phase, next.phase) {
                // A node that has acknowledged the end may exit.
                (Phase::Over, _) if !seat.spare && seat.ready => {}
                (Phase::Over, _) => next.remove(id, ""),
                (_, Phase::Over) => break, // a missing node has not acknowledged it
                _ => next.remove(id, &format!("node {host} sent no heartbeat for {silence} s")),
            }
        }
    }

    /// Begins a round if it is due; returns when it will be.
    fn begin_if_due(&mut self, next: &mut State, now: Duration) -> Option<Duration> {
        if !next.can_begin() {
            self.enough_since = None;
            return None;
        }
        let enough_since = *self.enough_since.get_or_insert(now);
        let last_call = enough_since.saturating_add(self.settings.last_call);
        if next.round > 0 || next.members.len() == next.nodes_max || now >= last_call {
            self.enough_since = None;
            next.begin();
            return None;
        }
        Some(last_call)
    }
}
