//! Shows peers that this rank is alive, and looks which of them are.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::process::{PidfdFlags, pidfd_open};

use super::stream::{Io, Stream, connect};
use super::{After, TICK, Watch};
use crate::fabric::early::Kept;
use crate::fabric::silence::{Look, Silence};
use crate::fabric::{Fate, Peer, lock};
use crate::fault::show_duration;
use crate::recorder;
use crate::wire::{FabricId, Hello, Mark, Purpose};

/// A stranger has so long to say hello.
const GREETING_MAX: Duration = Duration::from_secs(10);

/// How a peer on this host was last seen.
pub(super) struct Pulse {
    pub(super) last: u64,
    /// What it had called when its pulse was last found unchanged; see `Engine::calls_of_peers`.
    calls: Option<u64>,
    pub(super) silence: Silence,
}

impl Watch {
    /// A peer asks whether this rank responds, or has answered the same question.
    pub(super) fn respond(&mut self, stream: &mut Stream, hello: &Hello) -> io::Result<After> {
        self.beats.hear(hello.sender.mark(), Instant::now());
        if stream.probe.is_none() {
            let answer = Hello { purpose: Purpose::Probe, sender: self.fabric.id, receiver: hello.sender };
            stream.to_write.extend(answer.encode());
            stream.write()?; // a new socket has room for it
        }
        Ok(After::Drop)
    }

    /// Asks a peer on another host whether it responds, on a new connection.
    pub(super) fn probe(&mut self, peer: &Arc<Peer>) {
        let earlier = self
            .streams
            .iter()
            .find(|(_, stream)| stream.probe.as_ref().is_some_and(|asked| asked.id() == peer.id()));
        if let Some((&token, stream)) = earlier {
            // The peer's kernel has answered, so the peer will, too, as soon as it runs.
            if matches!(&stream.io, Io::Tcp(socket) if socket.peer_addr().is_ok()) {
                return;
            }
            self.streams.remove(&token);
        }
        let Some(address) = peer.address() else { return };
        let Ok(socket) = connect(address, self.fabric.interface()) else { return }; // the stream's own end is the news
        let token = self.add(Io::Tcp(socket.into()), None, true);
        let Some(stream) = self.streams.get_mut(&token) else { return };
        stream.probe = Some(Arc::clone(peer));
        let hello = Hello { purpose: Purpose::Probe, sender: self.fabric.id, receiver: peer.id() };
        stream.to_write.extend(hello.encode());
        self.serve(token);
    }

    /// Watches the process at the other end of a Unix stream; if that cannot be, the end of the stream must do.
    pub(super) fn watch_process(&mut self, peer: &Arc<Peer>, io: &Io) {
        let is_known = self.processes.values().any(|(known, _)| known.id() == peer.id());
        let Ok(them) = rustix::net::sockopt::socket_peercred(io.fd()) else { return };
        // In another PID namespace there may be no name for it; its own process is this one if ranks are threads.
        if is_known || them.pid == rustix::process::getpid() {
            return;
        }
        let Ok(process) = pidfd_open(them.pid, PidfdFlags::empty()) else { return };
        let token = self.next_token;
        self.next_token += 1;
        if epoll::add(&self.poll, &process, EventData::new_u64(token), EventFlags::IN).is_ok() {
            self.processes.insert(token, (Arc::clone(peer), process));
        }
    }

    pub(super) fn process_ended(&mut self, token: u64) {
        let Some((peer, process)) = self.processes.remove(&token) else { return };
        let _ = epoll::delete(&self.poll, &process);
        // What it said before it ended still counts, its goodbye for one.
        self.serve_all_of(&peer);
        self.end(&peer, Fate::Died);
    }

    /// Shows that we live, and looks who else does.
    pub(super) fn look_around(&mut self, now: Instant) {
        // If this thread did not run for long, neither peers' silence nor their deadlines count: we were away, not they.
        let away_after = (self.fabric.options.heartbeat / 2).min(2 * TICK).max(2 * self.tick);
        let away = now.saturating_duration_since(self.next_tick) > away_after;
        self.next_tick = now + self.tick;
        self.fabric.segment.beat();
        let early = lock(&self.fabric.early).take(now);
        for Kept { from, group, text, came } in early {
            if !self.fabric.engine.hear(&self.fabric, from, group, &text) {
                lock(&self.fabric.early).keep(from, group, text, came);
            }
        }
        self.fabric.tidy_lines(now);
        self.fabric.tidy_remains();
        self.watch_near(now, away);
        self.watch_far(now, away);
        if !away {
            self.fabric.engine.look_at_others(&self.fabric);
        }
        recorder::dump_if_signalled();
        if let Some(progress) = &mut self.progress {
            progress.tell(&self.fabric.engine.progress(), SystemTime::now());
        }
    }

    pub(super) fn watch_near(&mut self, now: Instant, away: bool) {
        self.fabric.councils.let_go_of_dead();
        let peers: Vec<Arc<Peer>> = {
            let mut peers = lock(&self.fabric.peers);
            // Of a process that has ended, nothing is left to see; groups that had it keep it.
            peers.retain(|_, peer| peer.fate().is_none() || Arc::strong_count(peer) > 1);
            self.pulses.retain(|id, _| peers.contains_key(id));
            peers.values().cloned().collect()
        };
        let is_near = |peer: &&Arc<Peer>| peer.any_pulse().is_some() && peer.fate().is_none();
        self.near = peers.iter().filter(is_near).cloned().collect();
        let mut boards: Option<HashMap<FabricId, u64>> = None;
        for peer in peers {
            let Some(last) = peer.pulse() else { continue };
            let fresh = || Pulse { last, calls: None, silence: Silence::new(now) };
            let seen = self.pulses.entry(peer.id()).or_insert_with(fresh);
            if last != seen.last || away {
                *seen = fresh();
            } else {
                // Its helper thread may not have run, on a host that is busy, while another thread of it has.
                let boards = boards.get_or_insert_with(|| self.fabric.engine.calls_of_peers());
                let calls = boards.get(&peer.id()).copied();
                if seen.calls.is_some() && seen.calls != calls {
                    seen.silence.heard(now);
                }
                seen.calls = calls;
            }
            let look = seen.silence.look(now, self.fabric.options.heartbeat);
            self.judge(&peer, &look);
        }
    }

    pub(super) fn judge(&mut self, peer: &Arc<Peer>, look: &Look) {
        if look.warn {
            self.warn(peer, look.silence);
        }
        if look.over && peer.fate().is_none() {
            self.end(peer, Fate::Silent(look.silence));
        }
    }

    pub(super) fn watch_far(&mut self, now: Instant, away: bool) {
        let (mut peers, mut broken, mut late) = (HashMap::new(), Vec::new(), Vec::new());
        for (token, stream) in &mut self.streams {
            stream.answers = 0;
            if !stream.greeted() && stream.peer.is_none() {
                if now.saturating_duration_since(stream.since) > GREETING_MAX {
                    late.push(*token);
                }
                continue;
            }
            if let Some(peer) = stream.peer.as_ref().filter(|peer| peer.fate().is_none())
                && !stream.io.is_unix()
            {
                peers.insert(peer.id().mark(), Arc::clone(peer));
            }
        }
        self.see_near(now);
        let marks: Vec<Mark> = peers.keys().copied().collect();
        let turn = self.beats.turn(&marks, now, away);
        for (mark, look) in &turn.looks {
            let peer = &peers[mark];
            self.judge(peer, look);
            if look.probe && !look.over {
                self.probe(peer);
            }
        }
        self.ask(&turn.ask, now);
        self.want(now);
        self.inform_near(turn.hears, turn.misses);
        for (token, stream) in &mut self.streams {
            if !stream.io.is_unix() && stream.write().is_err() {
                broken.push(*token);
            }
        }
        broken.into_iter().for_each(|token| self.serve(token));
        late.into_iter().for_each(|token| _ = self.streams.remove(&token));
    }

    pub(super) fn warn(&self, peer: &Peer, silence: Duration) {
        if let Some(who) = self.fabric.engine.waiting_for(peer.id()) {
            tracing::warn!("no sign of life for {} from {peer}, {who}", show_duration(silence));
        }
    }
}
