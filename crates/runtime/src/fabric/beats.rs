//! Which ranks of other hosts are alive, found out with few messages. Pure: time is an argument.
//!
//! With every tick a rank *asks* a peer on another host, and the peer answers immediately. Question and answer name the
//! sender's *company*: the ranks that the sender sees on its own host, with how long ago their pulses moved in shared memory.
//! So one question to one rank tells about all ranks of its host.
//!
//! Ranks of one host share what they hear. A rank that asks tells the others which ranks it *hears*, and later only what
//! has changed. What it said counts as long as its pulse moves. Of several ranks that could ask, the one with the lowest mark
//! does. So what two hosts exchange does not depend on how many ranks they have.
//!
//! Nothing of this is agreed on, and nothing has to be handed over. A peer of which no sign of life has come is asked directly,
//! whatever the reason: nothing was said about it yet, the rank that listened has died or is frozen, the rank that was asked is,
//! or the two hosts are cut off from each other. And no peer is given up because of what another rank said about it: it must
//! have left a question of this rank unanswered.
//!
//! Not here: streams, and the question on a new connection (see `watch/lives.rs`).

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use super::silence::{Look, Silence};
use crate::wire::{Mark, Seen};

/// Ranks on other hosts of which something is remembered, at most. Of others nothing is believed, so they are asked directly.
const FAR_MAX: usize = 1 << 16;

/// How many quarters of a tick something may be old.
///
/// A rank of this host whose pulse has not moved for longer listens for no other: its pulse moves with every tick, and may be
/// missed once, because ticks of two ranks are not aligned. The same holds for the answers of a rank that is asked.
const RESPONSIVE: u32 = 7;

/// A rank that was not heard for longer is asked directly. What an answer says is up to one tick old, and the next answer
/// arrives one tick later.
const FRESH: u32 = 10;

/// After this time without a sign of life from a rank, the other ranks of this host are notified that it is not heard.
const HEARD: u32 = 12;

/// A rank from which something arrived more recently is not asked: of two ranks that ask each other, one is enough.
const JUST_NOW: u32 = 3;

#[derive(Debug)]
pub(super) struct Beats {
    me: Mark,
    tick: Duration,
    limit: Duration,
    /// Until then this process did not run for some time, so no silence from before counts.
    away_until: Option<Instant>,
    last_turn: Option<Instant>,
    far: HashMap<Mark, Far>,
    near: HashMap<Mark, Near>,
    /// The ranks that this rank is said to hear.
    told: HashSet<Mark>,
}

/// A rank on another host.
#[derive(Debug)]
struct Far {
    since: Instant,
    /// When it is known to have been alive, by whatever way.
    heard: Option<Instant>,
    /// When something arrived from it.
    direct: Option<Instant>,
    /// The ranks that it sees on its host.
    company: Vec<Mark>,
    /// For how long it has been asked directly without an answer.
    asked: Option<Instant>,
    silence: Silence,
}

/// Another rank of this host.
#[derive(Debug)]
struct Near {
    pulse: u64,
    /// When the pulse was last seen to have moved.
    moved: Instant,
    /// The ranks that it says it hears.
    hears: HashSet<Mark>,
}

/// What follows from a look at all peers.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Turn {
    pub looks: Vec<(Mark, Look)>,
    /// Peers to ask, and whether on every stream there is.
    pub ask: Vec<(Mark, bool)>,
    /// For the other ranks of this host: who is heard from now on, …
    pub hears: Vec<Mark>,
    /// … and who no longer is, and was heard so long ago.
    pub misses: Vec<Seen>,
}

impl Far {
    fn new(now: Instant) -> Self {
        let (heard, direct, asked) = (None, None, None);
        Far { since: now, heard, direct, company: Vec::new(), asked, silence: Silence::new(now) }
    }

    fn was_alive(&mut self, at: Instant) {
        self.heard = self.heard.max(Some(at));
        if self.asked.is_some_and(|asked| asked <= at) {
            self.asked = None;
        }
    }
}

impl Beats {
    pub(super) fn new(me: Mark, tick: Duration, limit: Duration) -> Self {
        Beats {
            me,
            tick,
            limit,
            away_until: None,
            last_turn: None,
            far: HashMap::new(),
            near: HashMap::new(),
            told: HashSet::new(),
        }
    }

    fn is_within(&self, quarters: u32, since: Instant, now: Instant) -> bool {
        now.saturating_duration_since(since) < self.tick * quarters / 4
    }

    /// Something arrived from a peer on another host.
    pub(super) fn hear(&mut self, peer: Mark, now: Instant) {
        if let Some(far) = self.far.get_mut(&peer) {
            far.direct = Some(now);
            far.was_alive(now);
        }
    }

    /// There is a stream to a peer on another host, on which both have said hello.
    pub(super) fn meet(&mut self, peer: Mark, now: Instant) {
        self.far.entry(peer).or_insert_with(|| Far::new(now));
        self.hear(peer, now);
    }

    /// A peer on another host has said which ranks it sees there.
    pub(super) fn hear_company(&mut self, peer: Mark, company: &[Seen], now: Instant) {
        let Some(far) = self.far.get_mut(&peer) else { return };
        far.company = company.iter().map(|(mark, _)| *mark).collect();
        for (mark, age) in company {
            self.was_seen(*mark, *age, now);
        }
    }

    fn was_seen(&mut self, mark: Mark, age: Duration, now: Instant) {
        let Some(at) = now.checked_sub(age).filter(|_| mark != self.me && age < self.limit) else { return };
        if self.far.len() < FAR_MAX || self.far.contains_key(&mark) {
            self.far.entry(mark).or_insert_with(|| Far::new(now)).was_alive(at);
        }
    }

    /// The pulse of a rank of this host, as it is in shared memory now.
    pub(super) fn see(&mut self, near: Mark, pulse: u64, now: Instant) {
        let seen = self.near.entry(near).or_insert_with(|| Near { pulse, moved: now, hears: HashSet::new() });
        if seen.pulse != pulse {
            (seen.pulse, seen.moved) = (pulse, now);
        }
    }

    /// The ranks of this host, for those on other hosts.
    pub(super) fn company(&self, now: Instant) -> Vec<Seen> {
        let age = |near: &Near| now.saturating_duration_since(near.moved);
        self.near.iter().map(|(mark, near)| (*mark, age(near))).collect()
    }

    /// A rank of this host says which ranks it hears.
    pub(super) fn hear_hears(&mut self, near: Mark, afresh: bool, marks: Vec<Mark>) {
        if afresh {
            self.forget_hears(near);
        }
        if let Some(near) = self.near.get_mut(&near) {
            let room = FAR_MAX.saturating_sub(near.hears.len());
            near.hears.extend(marks.into_iter().take(room));
        }
    }

    /// A rank of this host says which ranks it does not hear any more.
    pub(super) fn hear_misses(&mut self, near: Mark, misses: &[Seen], now: Instant) {
        for (mark, age) in misses {
            if let Some(near) = self.near.get_mut(&near) {
                near.hears.remove(mark);
            }
            self.was_seen(*mark, *age, now);
        }
    }

    /// What a rank of this host said counts up to now.
    fn forget_hears(&mut self, near: Mark) {
        let Some(near) = self.near.get_mut(&near) else { return };
        for mark in std::mem::take(&mut near.hears) {
            if let Some(far) = self.far.get_mut(&mark) {
                far.was_alive(near.moved);
            }
        }
    }

    /// A rank of this host has ended, or does not report any more.
    pub(super) fn lose(&mut self, near: Mark) {
        self.forget_hears(near);
        self.near.remove(&near);
    }

    /// All that near peers believe that this rank hears, for one that has not heard of it.
    pub(super) fn told(&self) -> Vec<Mark> {
        self.told.iter().copied().collect()
    }

    /// Looks at all peers to which there is a stream between hosts. If this process was `away`, it did not run for some time.
    pub(super) fn turn(&mut self, peers: &[Mark], now: Instant, away: bool) -> Turn {
        if away {
            self.come_back(now);
        }
        self.last_turn = Some(now);
        let mut peers = peers.to_vec();
        peers.sort_unstable();
        peers.dedup();
        for peer in &peers {
            self.far.entry(*peer).or_insert_with(|| Far::new(now));
        }
        self.forget(&peers, now);
        let heard_near = self.heard_near();
        let looks = peers.iter().map(|peer| (*peer, self.look(*peer, heard_near.get(peer), now))).collect();
        let listened_for = self.listened_for(now);
        let ask = self.ask(&peers, &listened_for, now);
        let (hears, misses) = self.news(&listened_for, now);
        Turn { looks, ask, hears, misses }
    }

    /// What is read first after a pause may have been sent long ago, and says nothing about now.
    fn come_back(&mut self, now: Instant) {
        self.away_until = Some(now);
        let Some(last_turn) = self.last_turn else { return };
        for far in self.far.values_mut() {
            far.heard = far.heard.min(Some(last_turn));
            far.direct = far.direct.min(Some(last_turn));
            far.asked = None;
        }
    }

    /// Forgets ranks that have no stream and that no rank sees any more.
    fn forget(&mut self, peers: &[Mark], now: Instant) {
        let limit = self.limit;
        let is_heard = |far: &Far| far.heard.is_some_and(|at| now.saturating_duration_since(at) < limit);
        self.far.retain(|mark, far| is_heard(far) || peers.binary_search(mark).is_ok());
    }

    /// Until when ranks were heard by another rank of this host.
    fn heard_near(&self) -> HashMap<Mark, Instant> {
        let mut heard: HashMap<Mark, Instant> = HashMap::new();
        for near in self.near.values() {
            for mark in &near.hears {
                let at = heard.entry(*mark).or_insert(near.moved);
                *at = near.moved.max(*at);
            }
        }
        heard
    }

    fn look(&mut self, peer: Mark, heard_near: Option<&Instant>, now: Instant) -> Look {
        let Some(far) = self.far.get_mut(&peer) else { return Look::default() };
        let last = heard_near.copied().max(far.heard).max(self.away_until);
        let is_asked = far.asked.is_some_and(|since| now.saturating_duration_since(since) >= self.tick / 2);
        far.silence.look_back(last.map_or(far.since, |last| last.max(far.since)), now, self.limit, is_asked)
    }

    /// Ranks that another rank of this host listens for, so that this one need not.
    fn listened_for(&self, now: Instant) -> HashSet<Mark> {
        let listens = |mark: Mark, near: &Near| mark < self.me && self.is_within(RESPONSIVE, near.moved, now);
        let listeners = self.near.iter().filter(|(mark, near)| listens(**mark, near));
        listeners.flat_map(|(_, near)| near.hears.iter().copied()).collect()
    }

    fn ask(&mut self, peers: &[Mark], listened_for: &HashSet<Mark>, now: Instant) -> Vec<(Mark, bool)> {
        let (mut ask, mut expected) = (Vec::new(), HashSet::new());
        for peer in peers {
            let Some(far) = self.far.get(peer) else { continue };
            let is_within =
                |quarters, at: Option<Instant>| at.is_some_and(|at| self.is_within(quarters, at, now));
            let is_expected = expected.contains(peer) && is_within(FRESH, far.heard);
            let is_responsive = is_within(RESPONSIVE, far.direct);
            let is_spared = listened_for.contains(peer) || is_expected;
            let is_asked = !is_spared && !is_within(JUST_NOW, far.direct);
            if !is_spared && is_responsive {
                expected.extend(far.company.iter().copied());
            }
            if is_asked {
                ask.push((*peer, !is_responsive));
            }
            let Some(far) = self.far.get_mut(peer) else { continue };
            far.asked = if is_asked { far.asked.or(Some(now)) } else { None };
        }
        ask
    }

    /// What the other ranks of this host must know: about ranks for which none of them listens.
    fn news(&mut self, listened_for: &HashSet<Mark>, now: Instant) -> (Vec<Mark>, Vec<Seen>) {
        let is_heard = |mark: &Mark, quarters: u32| {
            let heard = self.far.get(mark).and_then(|far| far.heard);
            !listened_for.contains(mark) && heard.is_some_and(|at| self.is_within(quarters, at, now))
        };
        let hears: Vec<Mark> = self
            .far
            .keys()
            .filter(|mark| !self.told.contains(mark) && is_heard(mark, FRESH))
            .copied()
            .collect();
        let missed = self.told.iter().filter(|mark| !is_heard(mark, HEARD));
        let misses: Vec<Seen> = missed
            .map(|mark| {
                let heard = self.far.get(mark).and_then(|far| far.heard);
                (*mark, heard.map_or(self.limit, |at| now.saturating_duration_since(at)))
            })
            .collect();
        misses.iter().for_each(|(mark, _)| _ = self.told.remove(mark));
        self.told.extend(&hears);
        (hears, misses)
    }
}

#[cfg(test)]
mod tests;
