//! Links between ranks that all live in one thread, with a seed for a clock.
//!
//! The network knows the two carriers that there are: *near* links (cells, staging slots, memory read where it lies)
//! and *far* ones (sockets that take a message in parts). The seed decides how many messages a link holds, how many
//! slots a rank has, how long a message travels, when word of its reading comes back, and which socket blocks half-way.
//! Time is a number that moves when the scheduler says so (see `world`), so every seed repeats exactly.
//!
//! Lent memory is read late: a message remembers where its bytes lie and what they were, and the reader looks
//! into the sender's run again. Bytes that changed meanwhile, or a run that is over, are a bug of plan or interpreter.
//!
//! - `calls`: random operations, and what must come out
//! - `world`: who moves next, who dies, who is stuck; the tests
//!
//! Not here: sockets, threads, real shared memory (see `mesh`, `tcp`, and their tests).

mod calls;
mod world;

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::task::Poll;

use tenfold_memory::{Bytes, Head, Lane};
use tenfold_plan::{Rank, Topology};

use crate::fault::{ErrorKind, Fault};
use crate::run::Run;
use crate::transport::{Stage, Transport, Wants};

/// Random numbers by splitmix64: small, and the same everywhere.
#[derive(Clone, Debug)]
struct Chance(u64);

impl Chance {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ (word >> 31)
    }

    /// Below `limit`.
    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }

    /// True once in `count` times.
    fn once_in(&mut self, count: usize) -> bool {
        self.below(count) == 0
    }

    fn pick<T: Clone>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())].clone()
    }
}

/// Where the bytes of a message are until it is read.
#[derive(Clone, Copy, Debug)]
enum Place {
    /// In the message itself.
    Inside,
    Slot(u16),
    /// In the sender's memory, from this address on.
    Lent(usize),
}

#[derive(Debug)]
struct Message {
    head: Head,
    /// What the bytes were when it was sent.
    bytes: Vec<u8>,
    place: Place,
    number: u64,
    arrives: u64,
}

/// Why a link did not take a message the last time it was tried.
#[derive(Clone, Copy, Debug)]
enum Blocked {
    Full,
    NoSlot,
    /// The socket takes more at this time.
    Until(u64),
}

/// From one rank to another.
#[derive(Debug)]
struct Link {
    near: bool,
    capacity: usize,
    queue: VecDeque<Message>,
    /// Messages that were read: number, slot, and when the sender sees it.
    receipts: VecDeque<(u64, Option<u16>, u64)>,
    sent: u64,
    /// Up to which message the sender knows that they were read.
    read: u64,
    /// The last one that lies in the sender's memory.
    lent: u64,
    /// When the socket has taken what was copied for it.
    written: u64,
    /// A lent message that the socket has taken a part of, and when it takes the rest.
    half: Option<(Head, Vec<u8>, u64)>,
    blocked: Option<Blocked>,
}

impl Link {
    fn is_flushed(&self, now: u64) -> bool {
        if !self.near {
            return now >= self.written;
        }
        self.read >= self.lent
    }
}

/// The staging slots of a rank.
#[derive(Debug, Default)]
struct Slots {
    free: Vec<u16>,
    readers: Vec<usize>,
    open: Vec<bool>,
}

impl Slots {
    fn new(count: usize) -> Self {
        Slots { free: (0..count as u16).collect(), readers: vec![0; count], open: vec![false; count] }
    }

    fn free_if_unused(&mut self, slot: u16) {
        let index = usize::from(slot);
        if self.readers[index] == 0 && !self.open[index] {
            self.free.push(slot);
        }
    }
}

/// All links of a group.
#[derive(Debug)]
struct Network {
    size: usize,
    links: Vec<Link>,
    slots: Vec<Slots>,
    /// Ranks whose tensors peers can read in place.
    lendable: Vec<bool>,
    /// The longest message that fits a cell.
    inline: usize,
    delay_max: usize,
    now: u64,
    alarms: BinaryHeap<Reverse<u64>>,
    /// Counts everything that happens.
    changes: u64,
    chance: Chance,
}

impl Network {
    fn new(topology: &Topology, chance: &mut Chance) -> Self {
        let size = topology.size();
        let deepest = chance.pick(&[1, 1, 2, 4, 16]);
        let links = (0..size * size).map(|pair| Link {
            near: topology.host_of(pair / size) == topology.host_of(pair % size),
            capacity: 1 + chance.below(deepest),
            queue: VecDeque::new(),
            receipts: VecDeque::new(),
            sent: 0,
            read: 0,
            lent: 0,
            written: 0,
            half: None,
            blocked: None,
        });
        Network {
            size,
            links: links.collect(),
            // With fewer slots than peers a rank can wait for a peer to read what that peer reads only together with
            // what waits for a slot: `Reduce` takes nothing before everything is here.
            slots: (0..size).map(|_| Slots::new(size + chance.pick(&[0, 1, 8]))).collect(),
            lendable: (0..size).map(|_| !chance.once_in(3)).collect(),
            inline: chance.pick(&[0, 8, 40]),
            delay_max: chance.pick(&[0, 3, 20, 100]),
            now: 0,
            alarms: BinaryHeap::new(),
            changes: 0,
            chance: Chance(chance.next()),
        }
    }

    fn link(&mut self, from: Rank, to: Rank) -> &mut Link {
        &mut self.links[from * self.size + to]
    }

    fn link_of(&self, from: Rank, to: Rank) -> &Link {
        &self.links[from * self.size + to]
    }

    /// Some time from now, at which the clock will stop.
    fn later(&mut self) -> u64 {
        let time = self.now + self.chance.below(self.delay_max + 1) as u64;
        self.alarm(time);
        time
    }

    fn alarm(&mut self, time: u64) {
        if time > self.now {
            self.alarms.push(Reverse(time));
        }
    }

    /// Moves the clock to the next thing that happens; false if nothing is on its way.
    fn advance(&mut self) -> bool {
        while let Some(Reverse(time)) = self.alarms.pop() {
            if time > self.now {
                self.now = time;
                self.changes += 1;
                (0..self.size).for_each(|rank| self.hand_out_receipts(rank));
                return true;
            }
        }
        false
    }

    /// Lets `from` see what its peers have read by now.
    fn hand_out_receipts(&mut self, from: Rank) {
        for to in 0..self.size {
            let now = self.now;
            let link = &mut self.links[from * self.size + to];
            while let Some(&(number, slot, _)) = link.receipts.front().filter(|receipt| receipt.2 <= now) {
                link.receipts.pop_front();
                link.read = number;
                if let Some(slot) = slot {
                    let slots = &mut self.slots[from];
                    slots.readers[usize::from(slot)] -= 1;
                    slots.free_if_unused(slot);
                }
            }
        }
    }

    fn has_message(&self, from: Rank, to: Rank) -> bool {
        self.link_of(from, to).queue.front().is_some_and(|message| message.arrives <= self.now)
    }

    /// Whether what `rank` sleeps on has come.
    fn grants(&self, rank: Rank, wants: &Wants) -> bool {
        let room = |to: &Rank| match self.link_of(rank, *to).blocked {
            None => false,
            Some(Blocked::Full) => self.has_room(rank, *to),
            Some(Blocked::NoSlot) => !self.slots[rank].free.is_empty(),
            Some(Blocked::Until(time)) => self.now >= time,
        };
        wants.messages.iter().any(|from| self.has_message(*from, rank))
            || wants.room.iter().any(room)
            || (wants.flush && self.unread(rank).next().is_none())
    }

    fn has_room(&self, from: Rank, to: Rank) -> bool {
        let link = self.link_of(from, to);
        link.queue.len() + link.receipts.len() < link.capacity
    }

    /// The ranks that `rank` waits for in a flush.
    fn unread(&self, rank: Rank) -> impl Iterator<Item = Rank> + '_ {
        (0..self.size).filter(move |to| !self.link_of(rank, *to).is_flushed(self.now))
    }

    /// A message to `to` that does not belong to the operation `head`, nor to a later one.
    fn stray(&self, to: Rank, head: &Head) -> Option<Rank> {
        (0..self.size).find(|from| {
            let first = self.link_of(*from, to).queue.front();
            first.is_some_and(|message| message.head[1] <= head[1] && message.head != *head)
        })
    }

    /// Whether a link holds a message that no rank has read.
    fn has_unheard(&self) -> bool {
        self.links.iter().any(|link| !link.queue.is_empty())
    }

    /// Everything was read and every slot is free again.
    fn assert_empty(&self) {
        for (pair, link) in self.links.iter().enumerate() {
            let (from, to) = (pair / self.size, pair % self.size);
            assert!(link.queue.is_empty(), "left over between {from} and {to}: {:?}", link.queue);
            assert!(link.half.is_none(), "half a message is left over between {from} and {to}");
        }
        for (rank, slots) in self.slots.iter().enumerate() {
            assert_eq!(slots.free.len(), slots.readers.len(), "rank {rank} lost a slot: {slots:?}");
        }
    }
}

/// The network as one rank sees it, while the others' runs lie still.
struct Port<'a> {
    rank: Rank,
    network: &'a mut Network,
    runs: &'a [Option<Run>],
}

impl Port<'_> {
    fn block(&mut self, to: Rank, reason: Blocked) -> Poll<()> {
        self.network.link(self.rank, to).blocked = Some(reason);
        Poll::Pending
    }

    fn post(&mut self, to: Rank, head: &Head, bytes: Vec<u8>, place: Place) {
        let arrives = self.network.later();
        let link = self.network.link(self.rank, to);
        link.sent += 1;
        if let Place::Lent(_) = place {
            link.lent = link.sent;
        }
        // Nothing overtakes on a link.
        let arrives = link.queue.back().map_or(arrives, |last| last.arrives.max(arrives));
        link.queue.push_back(Message { head: *head, bytes, place, number: link.sent, arrives });
        self.network.changes += 1;
    }

    fn send_near(
        &mut self,
        to: Rank,
        stage: &mut Option<Stage>,
        head: &Head,
        bytes: Bytes<'_>,
        lend: bool,
    ) -> Poll<()> {
        let place = if bytes.len() <= self.network.inline {
            Place::Inside
        } else if lend && self.network.lendable[self.rank] {
            Place::Lent(bytes.start().addr())
        } else {
            let slots = &mut self.network.slots[self.rank];
            let slot = match stage {
                Some(Stage(slot)) => *slot,
                None => match slots.free.pop() {
                    Some(slot) => slot,
                    None => return self.block(to, Blocked::NoSlot),
                },
            };
            *stage = Some(Stage(slot));
            slots.open[usize::from(slot)] = true;
            slots.readers[usize::from(slot)] += 1;
            Place::Slot(slot)
        };
        self.post(to, head, bytes.to_vec(), place);
        Poll::Ready(())
    }

    /// A socket: what was copied goes out in time; what is lent may be taken in two bites.
    fn send_far(&mut self, to: Rank, head: &Head, bytes: Bytes<'_>, lend: bool) -> Poll<()> {
        let now = self.network.now;
        let written = self.network.link(self.rank, to).written;
        if now < written {
            return self.block(to, Blocked::Until(written));
        }
        match self.network.link(self.rank, to).half.take() {
            Some((half_head, half, rest_at)) => {
                assert_eq!(half_head, *head, "rank {} sent {to} half of another message before", self.rank);
                assert_eq!(half, bytes.to_vec(), "rank {} changed what {to} has half of", self.rank);
                if now < rest_at {
                    self.network.link(self.rank, to).half = Some((half_head, half, rest_at));
                    return self.block(to, Blocked::Until(rest_at));
                }
            }
            None if lend && self.network.chance.once_in(2) => {
                let rest_at = self.network.later() + 1;
                self.network.alarm(rest_at);
                self.network.link(self.rank, to).half = Some((*head, bytes.to_vec(), rest_at));
                self.network.changes += 1;
                return self.block(to, Blocked::Until(rest_at));
            }
            None => {}
        }
        if !lend {
            let written = self.network.later();
            self.network.link(self.rank, to).written = written;
        }
        self.post(to, head, bytes.to_vec(), Place::Inside);
        Poll::Ready(())
    }
}

impl Transport for Port<'_> {
    fn poll_send(
        &mut self,
        _: Lane,
        to: Rank,
        stage: &mut Option<Stage>,
        head: &Head,
        bytes: Bytes<'_>,
        lend: bool,
    ) -> Result<Poll<()>, Fault> {
        if !self.network.has_room(self.rank, to) {
            return Ok(self.block(to, Blocked::Full));
        }
        Ok(match self.network.link(self.rank, to).near {
            true => self.send_near(to, stage, head, bytes, lend),
            false => self.send_far(to, head, bytes, lend),
        })
    }

    fn close(&mut self, _: Lane, stage: Option<Stage>) {
        if let Some(Stage(slot)) = stage {
            let slots = &mut self.network.slots[self.rank];
            slots.open[usize::from(slot)] = false;
            slots.free_if_unused(slot);
            self.network.changes += 1;
        }
    }

    fn poll_ready(&mut self, _: Lane, from: Rank, head: &Head, len: usize) -> Result<Poll<()>, Fault> {
        if !self.network.has_message(from, self.rank) {
            return Ok(Poll::Pending);
        }
        let message = &self.network.link_of(from, self.rank).queue[0];
        if message.head == *head && message.bytes.len() == len {
            return Ok(Poll::Ready(()));
        }
        let text = format!("rank {from} called something else, or sent {} bytes", message.bytes.len());
        Err(Fault::new(ErrorKind::Mismatch, text).peer(from))
    }

    fn peek(&self, _: Lane, from: Rank) -> Bytes<'_> {
        let message = &self.network.link_of(from, self.rank).queue[0];
        assert!(message.arrives <= self.network.now, "only a message that was ready is read");
        if let Place::Lent(start) = message.place {
            let (to, seq) = (self.rank, message.head[1]);
            let run = self.runs[from].as_ref().filter(|run| run.label().seq == seq);
            let run = run.unwrap_or_else(|| panic!("rank {from} took back what {to} still reads, of #{seq}"));
            let bytes = run.bytes_at(start, message.bytes.len()).expect("lent memory is memory of its run");
            assert_eq!(bytes.to_vec(), message.bytes, "rank {from} changed what {to} still reads, of #{seq}");
        }
        Bytes::of(&message.bytes)
    }

    fn take(&mut self, lane: Lane, from: Rank) -> Result<(), Fault> {
        self.peek(lane, from); // a reader in place must have had the right bytes to the end
        let seen = self.network.later();
        let link = self.network.link(from, self.rank);
        let message = link.queue.pop_front().expect("a message that was read");
        let slot = if let Place::Slot(slot) = message.place { Some(slot) } else { None };
        let seen = link.receipts.back().map_or(seen, |last| last.2.max(seen));
        link.receipts.push_back((message.number, slot, seen));
        self.network.changes += 1;
        self.network.hand_out_receipts(from);
        Ok(())
    }

    fn poll_flush(&mut self, _: Lane) -> Result<Poll<()>, Fault> {
        Ok(if self.network.unread(self.rank).next().is_none() { Poll::Ready(()) } else { Poll::Pending })
    }
}
