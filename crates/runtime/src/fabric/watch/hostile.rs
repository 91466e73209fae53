//! A rank that hears whatever bytes a script says, for the fuzzer and for tests.
//!
//! The helper thread does not run: the script is that thread, so that a script means the same each time. The rank is in a
//! group with two others. Rank 1 is honest: it has a stream on which it shows that it is alive. Rank 2 has not come yet, so
//! anyone who knows its name can say hello as rank 2.
//!
//! A script is a list of steps. The first byte of a step chooses one of [`LINES`] lines (two TCP, two Unix) and what happens
//! there; see [`Step`].

#![cfg_attr(not(feature = "fuzzing"), expect(unreachable_pub, reason = "public for the fuzzer alone"))]

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Instant;

use tenfold_memory::Segment;

use super::stream::{Io, send_with};
use super::{ANSWERS_MAX, Watch, prepare};
use crate::fabric::beats::Beats;
use crate::fabric::{Bell, Fabric, FabricHandle, FabricOptions, Order, Peer, Shutdown, UNCLAIMED_MAX, lock};
use crate::group::Group;
use crate::wire::{ControlFrame, FabricId, Hello, Purpose};

/// The rank that hears.
pub const ME: u128 = 0x1111_2222_3333_4444_5555_6666_7777_8888;
/// The rank that is alive and honest.
const HONEST: u128 = 1;
/// The rank that has not come yet.
const ABSENT: u128 = 2;
/// A process that is in no group.
const STRANGER: u128 = 3;

/// The group that all three are in.
const GROUP: u64 = 7;

/// Lines on which a script can speak.
pub const LINES: usize = 4;

/// What happens on a line, from the bits above those that choose the line.
enum Step {
    /// The bytes that follow, whose number the next byte says.
    Say,
    /// A hello; the next byte says from which process and for what.
    Greet,
    /// A frame about the group; the next byte says which kind, then come the bytes as for `Say`.
    Frame,
    /// The line is closed, or, on line 3, time passes.
    End,
}

/// See the module's documentation.
pub struct Rank {
    watch: Watch,
    /// Keeps the fabric alive; the watch has it too.
    handle: FabricHandle,
    segment: Arc<Segment>,
    bell: Bell,
}

impl std::fmt::Debug for Rank {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Rank").finish_non_exhaustive()
    }
}

impl Rank {
    /// # Panics
    /// If the system has no memory or descriptors for it.
    #[allow(
        clippy::new_without_default,
        reason = "it takes descriptors and memory; the lint sees it only if it is public"
    )]
    pub fn new() -> Self {
        let (fabric, unix, tcp) =
            Fabric::without_helper(FabricId(ME), FabricOptions::for_tests()).expect("a fabric can be made");
        let watch = prepare(Arc::clone(&fabric), unix, tcp).expect("its helper can be prepared");
        let segment = Segment::new(1 << 20).expect("there is memory");
        let bell = Bell::new().expect("there is a descriptor");
        Rank { watch, handle: FabricHandle(Arc::new(Shutdown(fabric))), segment, bell }
    }

    /// Plays a script from the beginning: nothing is left of the one before.
    ///
    /// # Panics
    /// If the rank does something that no script may make it do.
    pub fn play(&mut self, script: &[u8]) {
        let mut scene = Scene::new(self);
        let mut rest = script;
        while let Some(more) = scene.step(rest) {
            rest = more;
            scene.check();
        }
        drop(scene);
        self.clear();
    }

    fn clear(&mut self) {
        self.watch.streams.clear();
        self.watch.unread.clear();
        self.watch.pulses.clear();
        self.watch.beats = Beats::new(FabricId(ME).mark(), self.watch.tick, self.handle.options.heartbeat);
        self.watch.near.clear();
        self.watch.informed.clear();
        self.watch.doings.clear();
        self.watch.tries.clear();
        self.watch.next_tick = Instant::now() + self.watch.tick; // scripts let time pass
        self.watch.processes.clear();
        self.watch.announced = Default::default();
        lock(&self.handle.orders).clear();
        lock(&self.handle.peers).clear();
        lock(&self.handle.lines).clear();
        *lock(&self.handle.early) = Default::default();
    }
}

/// One script.
struct Scene<'a> {
    rank: &'a mut Rank,
    /// Dropped with the scene.
    #[cfg_attr(not(test), expect(dead_code, reason = "only tests call something"))]
    group: Group,
    honest: Arc<Peer>,
    /// Its end of its stream.
    honest_line: TcpStream,
    lines: [Option<Line>; LINES],
    ticks: u32,
}

/// The far end of a stream, and its token.
struct Line {
    end: UnixStream,
    token: u64,
}

impl<'a> Scene<'a> {
    fn new(rank: &'a mut Rank) -> Self {
        let peers = [HONEST, ABSENT].map(|id| rank.handle.peer(FabricId(id)));
        let group =
            Group::with_unmet(rank.handle.clone(), GROUP, &peers).expect("there is memory for a group");
        let [honest, _] = peers;
        let (end, token) = open(&mut rank.watch, false);
        let mut honest_line = TcpStream::from(OwnedFd::from(end));
        let hello = Hello { purpose: Purpose::Control, sender: FabricId(HONEST), receiver: FabricId(ME) };
        honest_line.write_all(&hello.encode()).expect("its buffer has room");
        rank.watch.serve(token);
        assert!(rank.watch.streams.contains_key(&token), "an honest rank is let in");
        Scene { rank, group, honest, honest_line, lines: Default::default(), ticks: 0 }
    }

    /// Plays one step; what follows it.
    fn step<'s>(&mut self, script: &'s [u8]) -> Option<&'s [u8]> {
        let (&first, mut rest) = script.split_first()?;
        let line = usize::from(first) % LINES;
        let step = match first / LINES as u8 % 4 {
            0 => Step::Say,
            1 => Step::Greet,
            2 => Step::Frame,
            _ => Step::End,
        };
        match step {
            Step::Say => {
                let bytes = take(&mut rest);
                self.say(line, bytes, usize::from(first >> 4) % 4);
            }
            Step::Greet => {
                let (&who, more) = rest.split_first()?;
                rest = more;
                let sender = FabricId([HONEST, ABSENT, STRANGER, ME][usize::from(who) % 4]);
                let purpose = match who >> 2 & 1 {
                    0 => Purpose::Control,
                    _ => Purpose::Line { rail: who >> 3 & 7 },
                };
                let hello = Hello { purpose, sender, receiver: FabricId(ME) }.encode();
                self.say(line, &hello, 2);
            }
            Step::Frame => {
                let (&kind, more) = rest.split_first()?;
                rest = more;
                let body = take(&mut rest);
                let mut frame = Vec::new();
                match kind % 4 {
                    0 => ControlFrame::Notice { group: GROUP, text: body.to_vec() }.encode(&mut frame),
                    1 => ControlFrame::Notice { group: u64::from(kind), text: body.to_vec() }
                        .encode(&mut frame),
                    2 => ControlFrame::Goodbye.encode(&mut frame),
                    _ => {
                        // The kind and a length that fits, whatever the body is.
                        frame.extend([kind / 4 % 16, body.len() as u8, 0, 0, 0]);
                        frame.extend_from_slice(body);
                    }
                }
                self.say(line, &frame, usize::from(first >> 4) % 4);
            }
            Step::End if line == LINES - 1 => self.tick(),
            Step::End => {
                if let Some(Line { end, token }) = self.lines[line].take() {
                    drop(end);
                    self.rank.watch.serve(token);
                }
            }
        }
        self.obey();
        Some(rest)
    }

    /// Says something on a line, with so many descriptors if it can carry them.
    fn say(&mut self, line: usize, bytes: &[u8], descriptors: usize) {
        let is_unix = line >= LINES / 2;
        let watch = &mut self.rank.watch;
        // A line that the rank has closed is opened again, as anyone may.
        if self.lines[line].as_ref().is_none_or(|line| !watch.streams.contains_key(&line.token)) {
            let (end, token) = open(watch, is_unix);
            self.lines[line] = Some(Line { end, token });
        }
        let Some(Line { end, token }) = &mut self.lines[line] else { return };
        if bytes.is_empty() {
            return;
        }
        let segment = self.rank.segment.share().expect("there is a descriptor");
        let all = [segment.as_fd(), self.rank.bell.as_fd()];
        let sent = match descriptors.min(2) {
            count if is_unix && count > 0 => send_with(end, bytes, &all[..count]).map(|_| ()),
            _ => end.write_all(bytes),
        };
        // It may be full: the rank has more to say than a script reads.
        if sent.is_ok() {
            self.rank.watch.serve(*token);
        }
    }

    /// A look around, before which the honest rank shows that it is alive. Fewer than make a rank silent that shares memory: a
    /// process of the same user can do anything to this one.
    fn tick(&mut self) {
        self.ticks += 1;
        if self.rank.watch.tick * self.ticks > self.rank.handle.options.heartbeat / 2 {
            return;
        }
        let mut pulse = Vec::new();
        ControlFrame::Pulse { groups: Vec::new() }.encode(&mut pulse);
        self.honest_line.write_all(&pulse).expect("the rank reads");
        let tokens: Vec<u64> = self.rank.watch.streams.keys().copied().collect();
        tokens.into_iter().for_each(|token| self.rank.watch.serve(token));
        let now = self.rank.watch.next_tick;
        self.rank.watch.look_around(now);
    }

    /// What the helper thread does between events.
    fn obey(&mut self) {
        let watch = &mut self.rank.watch;
        for token in std::mem::take(&mut watch.unread) {
            watch.serve(token);
        }
        let orders = std::mem::take(&mut *lock(&watch.fabric.orders));
        for order in orders {
            // No rank of a script has an address that could be dialled, or shares memory.
            if let Order::Tell { to, group, text } = order {
                watch.tell(&to, group, &text);
            }
        }
        let mut buffer = [0; 4096];
        while matches!(self.honest_line.read(&mut buffer), Ok(1..)) {}
    }

    /// What holds whatever was said.
    fn check(&self) {
        assert!(self.honest.fate().is_none(), "an honest rank was given up: {:?}", self.honest.fate());
        let watch = &self.rank.watch;
        assert!(watch.streams.len() <= LINES + 1, "a stream is kept that no rank has open");
        for stream in watch.streams.values() {
            assert!(stream.to_write.len() <= 2 * ANSWERS_MAX, "answers pile up");
            assert!(stream.arrived.len() <= ControlFrame::LEN_MAX, "more than a frame is kept");
            assert!(stream.descriptors.len() <= 2, "descriptors pile up");
        }
        assert!(lock(&watch.fabric.lines).len() <= UNCLAIMED_MAX, "connections pile up");
    }
}

/// Opens a line to the rank: the far end, and the token of the near one.
fn open(watch: &mut Watch, is_unix: bool) -> (UnixStream, u64) {
    let (near, far) = UnixStream::pair().expect("there are descriptors");
    near.set_nonblocking(true).and_then(|()| far.set_nonblocking(true)).expect("they are sockets");
    // A stream of bytes is one, whatever carries it: only descriptors need a Unix socket.
    let io =
        if is_unix { Io::Unix(near.into()) } else { Io::Tcp(TcpStream::from(OwnedFd::from(near)).into()) };
    (far, watch.add(io, None, false))
}

/// The bytes that follow, whose number the first says.
fn take<'s>(script: &mut &'s [u8]) -> &'s [u8] {
    let Some((&count, rest)) = script.split_first() else { return &[] };
    let (bytes, rest) = rest.split_at(usize::from(count).min(rest.len()));
    *script = rest;
    bytes
}

#[cfg(test)]
mod tests;
