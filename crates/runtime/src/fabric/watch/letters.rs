//! Sends what councils and reconfigurations have to say, and wakes them up in time.

use std::sync::Arc;
use std::time::Instant;

use super::Watch;
use crate::fabric::councils::Post;
use crate::fabric::{Order, Peer};
use crate::wire::{ControlFrame, FabricId};

impl Watch {
    /// A peer sent a letter or the place of a room.
    pub(super) fn hear_letter(&mut self, from: FabricId, frame: &ControlFrame) {
        let fabric = Arc::clone(&self.fabric);
        match frame {
            ControlFrame::Letter { group, text } => {
                if let Err(why) = fabric.councils.hear(from, *group, text) {
                    self.complain(&format!("ignored a letter of a peer: {why}"));
                }
                self.has_letters = true;
            }
            ControlFrame::Room { group, sequence, offset } => {
                fabric.councils.hear_room(from, *group, *sequence, *offset);
            }
            ControlFrame::Reshape { id, text } => {
                if let Err(why) = fabric.reshapes.hear(from, *id, text, Instant::now()) {
                    self.complain(&format!("ignored what a process said about a reconfiguration: {why}"));
                }
                self.has_letters = true;
            }
            _ => {}
        }
    }

    /// Lets councils do what is due.
    pub(super) fn deliberate(&mut self) {
        while std::mem::take(&mut self.has_letters) {
            let (letters, next) = self.fabric.councils.drive();
            let (others, sooner) = self.fabric.reshapes.drive();
            self.deliberate_at = next.into_iter().chain(sooner).min().map(|left| Instant::now() + left);
            self.send(letters); // which may find out that a peer has died
            self.send(others);
        }
    }

    pub(super) fn send(&mut self, post: Post) {
        for (to, frame) in post {
            to.iter().for_each(|peer| self.send_to(peer, &frame));
        }
    }

    fn send_to(&mut self, peer: &Arc<Peer>, frame: &ControlFrame) {
        // One that was given up may be alive, and wants to know that the others continue without it.
        let is_alive = peer.fate().is_none();
        if is_alive && peer.thread().is_none() && self.told_stream(peer.id()).is_none() {
            self.call_up(peer);
        }
        if let Some(thread) = peer.thread() {
            return thread.order(Order::Hear { from: self.fabric.id, frame: frame.clone() });
        }
        // Letters and rooms go by the stream on which notices go, so that they are heard in order.
        let Some(token) = self.told_stream(peer.id()) else { return };
        let Some(stream) = self.streams.get_mut(&token) else { return };
        stream.has_told = true;
        frame.encode(&mut stream.to_write);
        if stream.write().is_err() {
            self.serve(token); // finds out why
        }
    }

    /// Opens a stream to a peer that this rank has not communicated with, or finds out that it is a thread of this process.
    fn call_up(&mut self, peer: &Arc<Peer>) {
        let fabric = Arc::clone(&self.fabric);
        if fabric.meet_if_thread(peer) {
            return;
        }
        if peer.begin_dialling() {
            self.dial(peer);
        }
    }
}
