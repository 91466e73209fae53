//! Asks peers on other hosts whether they are alive and what they do, answers such questions, and tells the peers of this host
//! which ranks this one hears. Which peers to ask, and what follows, is in `beats`.

use std::collections::{HashMap, HashSet};
use std::io;
use std::sync::Arc;
use std::time::Instant;

use tenfold_memory::Doing;

use super::Watch;
use super::stream::Stream;
use crate::fabric::Peer;
use crate::recorder;
use crate::wire::{ControlFrame, FabricId, GroupPulse, Mark, Seen};

/// Questions that are answered on one stream between two ticks: a peer has one of each kind.
const ANSWERS_MAX: u32 = 8;

/// Peers that are asked between two ticks what they do. A rank that waits for more asks the others later.
const WANTED_MAX: usize = 32;

impl Watch {
    /// Looks at the pulses of this host's ranks.
    pub(super) fn see_near(&mut self, now: Instant) {
        for peer in &self.near {
            if let Some(pulse) = peer.any_pulse().filter(|_| peer.fate().is_none()) {
                self.beats.see(peer.id().mark(), pulse, now);
            }
        }
    }

    /// The ranks of this host, for `peer`: a process that is in no group learns nothing.
    fn company_for(&mut self, peer: &Peer, now: Instant) -> Vec<Seen> {
        if !peer.is_introduced() {
            return Vec::new();
        }
        self.see_near(now);
        self.beats.company(now)
    }

    /// Asks peers whether they are alive: on one stream, or on all that there are.
    pub(super) fn ask(&mut self, peers: &[(Mark, bool)], now: Instant) {
        let peers: HashMap<Mark, bool> = peers.iter().copied().collect();
        if peers.is_empty() {
            return;
        }
        let mut tokens = self.far_streams();
        tokens.retain(|(mark, _)| peers.contains_key(mark));
        let mut before = None;
        for (mark, token) in tokens {
            if before.replace(mark) == Some(mark) && !peers[&mark] {
                continue;
            }
            let Some(peer) = self.streams.get(&token).and_then(|stream| stream.peer.clone()) else {
                continue;
            };
            let company = self.company_for(&peer, now);
            self.put(token, &ControlFrame::Ask { company });
        }
    }

    /// Asks those that this rank waits for what they do, and forgets what they did some time ago.
    pub(super) fn want(&mut self, now: Instant) {
        // An answer to the question before the last one is too old to accuse a peer of anything.
        let old = self.tick * 7 / 4;
        self.doings.retain(|_, (peer, said)| {
            let is_fresh = now.saturating_duration_since(*said) < old;
            if !is_fresh {
                peer.set_doing(&[], 0);
            }
            is_fresh
        });
        let awaited: HashSet<Mark> =
            self.fabric.engine.awaited().into_iter().map(|peer| peer.mark()).collect();
        if awaited.is_empty() {
            return;
        }
        let mut tokens = self.far_streams();
        tokens.retain(|(mark, _)| awaited.contains(mark));
        tokens.dedup_by_key(|(mark, _)| *mark);
        let first = if tokens.len() > WANTED_MAX { self.next_wanted % tokens.len() } else { 0 };
        self.next_wanted = first + WANTED_MAX;
        tokens.rotate_left(first);
        for (_, token) in tokens.into_iter().take(WANTED_MAX) {
            self.put(token, &ControlFrame::Want);
        }
    }

    /// Streams to peers on other hosts on which both have said hello, in the order of the peers, the first one first.
    fn far_streams(&self) -> Vec<(Mark, u64)> {
        let streams = self.streams.iter().filter(|(_, stream)| stream.greeted() && !stream.io.is_unix());
        let mut tokens: Vec<(Mark, u64)> = streams
            .filter_map(|(token, stream)| stream.peer.as_ref().map(|peer| (peer.id().mark(), *token)))
            .collect();
        tokens.sort_unstable();
        tokens
    }

    /// Puts a frame on a stream, unless its peer does not read what was sent before.
    fn put(&mut self, token: u64, frame: &ControlFrame) {
        if let Some(stream) = self.streams.get_mut(&token)
            && stream.to_write.len() < ControlFrame::LEN_MAX
        {
            frame.encode(&mut stream.to_write);
        }
    }

    /// The peer of a stream between hosts.
    fn far_peer(stream: &Stream) -> io::Result<Arc<Peer>> {
        match &stream.peer {
            Some(peer) if !stream.io.is_unix() => Ok(Arc::clone(peer)),
            _ => Err(io::Error::other("it said what is said between hosts only")),
        }
    }

    /// The peer of a stream within this host.
    fn near_peer(stream: &Stream) -> io::Result<Arc<Peer>> {
        match &stream.peer {
            Some(peer) if stream.io.is_unix() => Ok(Arc::clone(peer)),
            _ => Err(io::Error::other("it said what is said within a host only")),
        }
    }

    /// May another question be answered on this stream?
    fn answers(stream: &mut Stream) -> bool {
        stream.answers += 1;
        stream.answers <= ANSWERS_MAX && stream.to_write.len() < ControlFrame::LEN_MAX
    }

    pub(super) fn answer_ask(&mut self, stream: &mut Stream, company: &[Seen]) -> io::Result<()> {
        let peer = Self::far_peer(stream)?;
        self.hear_company(stream, company)?;
        if Self::answers(stream) {
            let company = self.company_for(&peer, Instant::now());
            ControlFrame::Beat { company }.encode(&mut stream.to_write);
        }
        Ok(())
    }

    pub(super) fn hear_company(&mut self, stream: &Stream, company: &[Seen]) -> io::Result<()> {
        let peer = Self::far_peer(stream)?;
        if peer.is_introduced() {
            self.beats.hear_company(peer.id().mark(), company, Instant::now());
        }
        Ok(())
    }

    pub(super) fn hear_hears(&mut self, stream: &Stream, afresh: bool, marks: Vec<Mark>) -> io::Result<()> {
        let peer = Self::near_peer(stream)?;
        if let Some(pulse) = peer.any_pulse() {
            self.beats.see(peer.id().mark(), pulse, Instant::now());
            self.beats.hear_hears(peer.id().mark(), afresh, marks);
        }
        Ok(())
    }

    pub(super) fn hear_misses(&mut self, stream: &Stream, misses: &[Seen]) -> io::Result<()> {
        let peer = Self::near_peer(stream)?;
        self.beats.hear_misses(peer.id().mark(), misses, Instant::now());
        Ok(())
    }

    pub(super) fn answer_want(&mut self, stream: &mut Stream) -> io::Result<()> {
        Self::far_peer(stream)?;
        if Self::answers(stream) {
            let host_now = recorder::host_now();
            let groups = self.fabric.engine.doing().into_iter().map(|(group, doing)| {
                let Doing { current, finished, since } = doing;
                GroupPulse {
                    group,
                    current,
                    finished,
                    ages: since.map(|since| host_now.saturating_sub(since)),
                }
            });
            ControlFrame::Pulse { groups: groups.collect() }.encode(&mut stream.to_write);
        }
        Ok(())
    }

    pub(super) fn hear_doing(&mut self, stream: &Stream, groups: &[GroupPulse]) {
        if let Some(peer) = &stream.peer {
            peer.set_doing(groups, recorder::host_now());
            self.doings.insert(peer.id(), (Arc::clone(peer), Instant::now()));
        }
    }

    /// Tells the ranks of this host which ranks this one hears: once all, then what has changed.
    pub(super) fn inform_near(&mut self, hears: Vec<Mark>, misses: Vec<Seen>) {
        let told = self.beats.told();
        let mut tokens: Vec<(FabricId, u64)> = Vec::new();
        for (token, stream) in &self.streams {
            if let Some(peer) = stream.peer.as_ref().filter(|_| stream.greeted() && stream.io.is_unix()) {
                tokens.push((peer.id(), *token));
            }
        }
        tokens.sort_unstable_by_key(|(id, token)| (id.0, *token));
        tokens.dedup_by_key(|(id, _)| *id); // always the same stream, so that all is heard in order
        let mut frames = Vec::new();
        if !misses.is_empty() {
            ControlFrame::Misses { seen: misses }.encode(&mut frames);
        }
        if !hears.is_empty() {
            ControlFrame::Hears { afresh: false, marks: hears }.encode(&mut frames);
        }
        for (id, token) in tokens {
            let Some(stream) = self.streams.get_mut(&token) else { continue };
            match self.informed.get(&id) {
                Some(true) if frames.is_empty() => continue,
                None if told.is_empty() => continue,
                // It does not read. Once it does, it hears all again.
                Some(_) if stream.to_write.len() >= ControlFrame::LEN_MAX => {
                    self.informed.insert(id, false);
                }
                Some(true) => stream.to_write.extend(&frames),
                Some(false) | None => {
                    ControlFrame::Hears { afresh: true, marks: told.clone() }.encode(&mut stream.to_write);
                    self.informed.insert(id, true);
                }
            }
            if stream.write().is_err() {
                self.serve(token); // finds out why
            }
        }
    }

    /// A stream to a rank of this host has ended: what it said counts no more, and on another stream it hears all again.
    pub(super) fn forget_near(&mut self, peer: FabricId) {
        self.informed.remove(&peer);
        self.beats.lose(peer.mark());
    }
}
