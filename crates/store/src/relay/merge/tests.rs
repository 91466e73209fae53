//! Several relays and one table in one thread, with connections that are cut at any byte: some sequential order explains what all
//! clients saw, waits end exactly when they should, and nothing is left behind.
//!
//! A run is a seed. `TENFOLD_RELAY_SEED=N` runs one, `TENFOLD_RELAY_SEEDS=N` more of them.

#![expect(clippy::disallowed_methods, reason = "a table needs a time, any time")]

#[path = "../../../tests/linearizability/checker.rs"]
mod checker;

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use self::checker::{Call, NEVER, check};
use super::*;
use crate::sessions::{SessionId, Sessions};
use crate::table::{Replies, Table, TableLimits};
use crate::wire::{self, Answer, Command, Decoded, MessageLimits, ReplySource, Scan};
use tenfold_base::{ErrorKind, Fault};

/// Splitmix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }
    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }
}

/// A relay and its connection, whose bytes are on their way in both directions.
struct Node {
    merge: Merge,
    session: Option<SessionId>,
    slot: usize,
    up: VecDeque<u8>,
    down: VecDeque<u8>,
    server_input: Vec<u8>,
    relay_input: Vec<u8>,
}

struct Client {
    node: usize,
    id: LocalId,
    calls: Vec<Call>,
    /// Calls that are not answered, the oldest first.
    open: VecDeque<usize>,
    wait: Option<(Vec<Vec<u8>>, u64)>,
    /// The queue that it waited for: it pops next.
    pops: Option<Vec<u8>>,
}

struct World {
    random: Random,
    table: Table,
    sessions: Sessions,
    nodes: Vec<Node>,
    clients: Vec<Client>,
    histories: Vec<Vec<Call>>,
    next_id: u64,
    next_slot: usize,
    time: u64,
    serial: u64,
    /// When each key that is waited for began and ceased to exist.
    presence: BTreeMap<Vec<u8>, Vec<(u64, u64)>>,
    now: Instant,
    cuts: u64,
    merged: (u64, u64),
}

const WAITED: [&[u8]; 3] = [b"w0", b"w1", b"w2"];

impl World {
    fn new(seed: u64) -> Self {
        let mut world = World {
            random: Random(seed),
            table: Table::new(TableLimits::default()),
            sessions: Sessions::new(100, Duration::from_secs(300)),
            nodes: Vec::new(),
            clients: Vec::new(),
            histories: Vec::new(),
            next_id: 0,
            next_slot: 0,
            time: 0,
            serial: 0,
            presence: BTreeMap::new(),
            now: Instant::now(),
            cuts: 0,
            merged: (0, 0),
        };
        for node in 0..2 {
            world.nodes.push(Node {
                merge: Merge::new([node; 16]),
                session: None,
                slot: 0,
                up: VecDeque::new(),
                down: VecDeque::new(),
                server_input: Vec::new(),
                relay_input: Vec::new(),
            });
            world.connect(node.into());
        }
        for client in 0..8 {
            world.join(client % 2);
        }
        world
    }

    fn join(&mut self, node: usize) {
        self.next_id += 1;
        let id = LocalId(self.next_id);
        self.clients.push(Client { node, id, calls: vec![], open: VecDeque::new(), wait: None, pops: None });
    }

    // ── the network ────────────────────────────────────────────────────────────────────────────────────

    fn connect(&mut self, node: usize) {
        self.next_slot += 1;
        let slot = self.next_slot;
        let hello = self.nodes[node].merge.pipe.hello();
        let mut replies = Replies::new();
        let opened =
            self.sessions.open(&hello, slot, self.now, &mut self.table, &mut replies).expect("there is room");
        let target = &mut self.nodes[node];
        assert_eq!(opened.resumed, target.session.is_some(), "a session is resumed");
        assert!(!opened.resumed || target.merge.pipe.resume(opened.executed), "both agree");
        target.session = Some(opened.session);
        target.slot = slot;
        let mut bytes = Vec::new();
        self.sessions.unacknowledged(opened.session).for_each(|answer| answer.encode(&mut bytes));
        target.down.extend(bytes);
        self.route(replies);
    }

    /// Cuts the connection at any byte; the server may notice now or when the relay connects again.
    fn cut(&mut self, node: usize) {
        self.cuts += 1;
        let target = &mut self.nodes[node];
        for bytes in [&mut target.up, &mut target.down] {
            bytes.clear();
        }
        target.server_input.clear();
        target.relay_input.clear();
        let (session, slot) = (target.session.expect("connected"), target.slot);
        target.slot = 0; // what the server sends from now on is lost
        if self.random.below(2) == 0 {
            let mut replies = Replies::new();
            self.sessions.leave(session, slot, self.now, &mut self.table, &mut replies);
            self.route(replies);
        }
        // Some things may happen meanwhile.
        for _ in 0..self.random.below(6) {
            self.client_step();
            self.carry_other(node);
        }
        self.connect(node);
    }

    fn carry_other(&mut self, cut: usize) {
        for node in 0..self.nodes.len() {
            if node != cut {
                self.carry(node);
            }
        }
    }

    /// Some bytes travel.
    fn carry(&mut self, node: usize) {
        let target = &mut self.nodes[node];
        let (first, second) = target.merge.pipe.to_write();
        let bytes: Vec<u8> = first.iter().chain(second).copied().collect();
        let count = if self.random.below(3) == 0 { self.random.below(bytes.len() + 1) } else { bytes.len() };
        target.up.extend(&bytes[..count]);
        target.merge.pipe.wrote(count);
        let count = self.random.below(target.up.len() + 1).max(target.up.len().min(1));
        target.server_input.extend(target.up.drain(..count));
        self.serve(node);
        let target = &mut self.nodes[node];
        let count = self.random.below(target.down.len() + 1).max(target.down.len().min(1));
        target.relay_input.extend(target.down.drain(..count));
        self.hear(node);
    }

    fn serve(&mut self, node: usize) {
        let mut input = std::mem::take(&mut self.nodes[node].server_input);
        while !input.is_empty() {
            let decoded =
                wire::decode(&input, &MessageLimits::default(), &mut Scan::default()).expect("valid");
            let Decoded::Whole(command, length) = decoded else { break };
            let session = self.nodes[node].session.expect("connected");
            match command {
                Command::Acknowledge { answers } => {
                    self.sessions.acknowledge(session, answers).expect("sent");
                }
                Command::Numbered { number, ask } => {
                    self.merged.1 += 1;
                    let mut replies = Replies::new();
                    let answer = self
                        .sessions
                        .execute(session, number, ask, self.now, &mut self.table, &mut replies)
                        .expect("in order");
                    self.route(replies);
                    if let Some(answer) = answer {
                        self.send(session, answer);
                    }
                }
                other => panic!("a relay sent {other:?}"),
            }
            input.drain(..length);
            self.note_presence();
        }
        self.nodes[node].server_input = input;
    }

    fn note_presence(&mut self) {
        self.time += 1;
        for key in WAITED {
            let spans = self.presence.entry(key.to_vec()).or_default();
            match (self.table.has(key), spans.last_mut()) {
                (true, Some((_, end))) if *end == NEVER => {}
                (true, _) => spans.push((self.time, NEVER)),
                (false, Some((_, end))) if *end == NEVER => *end = self.time,
                (false, _) => {}
            }
        }
    }

    fn route(&mut self, mut replies: Replies) {
        let mut next = 0;
        while next < replies.len() {
            let (client, response) = replies[next].clone();
            next += 1;
            assert!(Sessions::has(client));
            if let Some((session, answer)) =
                self.sessions.hear(client, response, self.now, &mut self.table, &mut replies)
            {
                self.send(session, answer);
            }
        }
    }

    fn send(&mut self, session: SessionId, answer: Answer) {
        let (slot, answer) = self.sessions.keep(session, answer);
        let mut bytes = Vec::new();
        answer.encode(&mut bytes);
        if let Some(node) = self.nodes.iter_mut().find(|node| Some(node.slot) == slot) {
            node.down.extend(bytes);
        }
    }

    fn hear(&mut self, node: usize) {
        let mut effects = Effects::default();
        let target = &mut self.nodes[node];
        let mut at = 0;
        while let Some(head) = target.relay_input.get(at..at + Answer::HEAD) {
            let (number, status, length) = Answer::decode_head(head.try_into().unwrap()).expect("known");
            let from = at + Answer::HEAD;
            let Some(body) = target.relay_input.get(from..from + length as usize) else { break };
            target.merge.answer(number, status, body, &mut effects).expect("sensible");
            at = from + length as usize;
        }
        target.relay_input.drain(..at);
        self.time += 1;
        assert_eq!(effects.refused, []);
        for (id, reply) in effects.replies {
            if let Some(client) = self.clients.iter().position(|client| client.id == id) {
                self.replied(client, reply);
            }
        }
    }

    // ── the clients ────────────────────────────────────────────────────────────────────────────────────

    fn replied(&mut self, client: usize, reply: Reply) {
        let client = &mut self.clients[client];
        let bytes = match reply {
            Reply::Ready => {
                let (keys, since) = client.wait.take().expect("it waits");
                for key in keys.iter().filter(|key| key.starts_with(b"w")) {
                    let spans = self.presence.get(key).map(Vec::as_slice).unwrap_or_default();
                    let existed = spans.iter().any(|(_, end)| *end > since);
                    assert!(existed, "woken for {key:?}, which has not existed since {since}: {spans:?}");
                }
                client.pops = keys.into_iter().find(|key| key.starts_with(b"q"));
                return;
            }
            Reply::Number(number) => number.to_le_bytes().to_vec(),
            Reply::Bytes(bytes) => bytes.to_vec(),
        };
        struct Source(VecDeque<u8>);
        impl ReplySource for Source {
            fn fill(&mut self, bytes: &mut [u8]) -> Result<(), Fault> {
                for byte in bytes {
                    *byte = self.0.pop_front().ok_or_else(|| Fault::new(ErrorKind::Protocol, "short"))?;
                }
                Ok(())
            }
        }
        let index = client.open.pop_front().expect("it asked");
        let call = &mut client.calls[index];
        let count =
            if matches!(call.request, Request::MultiGet { .. }) { call.request.keys().len() } else { 0 };
        let mut source = Source(bytes.into());
        let response = wire::decode_response(call.request.operation(), count, &mut source).expect("whole");
        assert!(source.0.is_empty(), "the reply is too long");
        (call.response, call.returned) = (Some(response), self.time);
    }

    fn client_step(&mut self) {
        let index = self.random.below(self.clients.len());
        if self.random.below(60) == 0 {
            return self.replace(index);
        }
        let (node, id) = (self.clients[index].node, self.clients[index].id);
        if self.clients[index].wait.is_some() {
            if self.random.below(12) == 0 && self.nodes[node].merge.allows_answer(id) {
                self.nodes[node].merge.cancel(id, &mut Effects::default());
                self.clients[index].wait = None;
            }
            return;
        }
        if self.clients[index].open.len() > 3 || !self.nodes[node].merge.allows_request(id) {
            return;
        }
        self.time += 1;
        let client = &mut self.clients[index];
        if client.pops.is_none() && client.open.is_empty() && self.random.below(4) == 0 {
            let keys: Vec<Vec<u8>> = match self.random.below(4) {
                0 => vec![b"queue0".to_vec()],
                1 => vec![WAITED[0].to_vec(), WAITED[1].to_vec()],
                _ => vec![WAITED[self.random.below(3)].to_vec()],
            };
            client.wait = Some((keys.clone(), self.time));
            let keys = keys.into_iter().map(Bytes::from).collect();
            self.merged.0 += 1;
            return self.nodes[node].merge.ask(id, Request::Wait { keys }).expect("it does not wait");
        }
        let request = match self.clients[index].pops.take() {
            Some(queue) => Request::QueuePop { key: queue.into() },
            None => self.request(),
        };
        self.merged.0 += 1;
        let call = Call { request: request.clone(), response: None, invoked: self.time, returned: NEVER };
        let client = &mut self.clients[index];
        client.open.push_back(client.calls.len());
        client.calls.push(call);
        self.nodes[node].merge.ask(id, request).expect("not a wait");
    }

    fn request(&mut self) -> Request<'static> {
        self.serial += 1;
        let value: Bytes<'static> = format!("{};", self.serial).into_bytes().into();
        let count: Bytes<'static> = b"count".as_slice().into();
        let queue: Bytes<'static> = b"queue0".as_slice().into();
        let waited: Bytes<'static> = WAITED[self.random.below(3)].into();
        match self.random.below(22) {
            0..=5 => Request::Add { key: count, delta: self.random.below(100) as i64 },
            6 => Request::Set { key: count, value: b"7".as_slice().into() },
            7..=9 => Request::Get { key: count },
            10 => Request::Get { key: b"text".as_slice().into() },
            11 => Request::MultiGet { keys: vec![b"text".as_slice().into()] },
            12 => Request::Append { key: b"text".as_slice().into(), value },
            13 => Request::Set { key: b"text".as_slice().into(), value },
            14 => Request::Check { keys: vec![queue] },
            // More pops than pushes: the order of a long queue takes long to check.
            15 => Request::QueuePush { key: queue, value },
            16 | 17 => Request::QueuePop { key: queue },
            18 | 19 => Request::Set { key: waited, value },
            _ => Request::Delete { key: waited },
        }
    }

    /// A client disconnects, whatever it is doing, and another one comes.
    fn replace(&mut self, index: usize) {
        let client = self.clients.swap_remove(index);
        self.nodes[client.node].merge.forget(client.id, &mut Effects::default());
        self.histories.push(client.calls);
        self.join(client.node);
    }

    fn settle(&mut self) {
        for _ in 0..2_000 {
            for node in 0..self.nodes.len() {
                self.carry(node);
            }
        }
    }

    fn finish(mut self) -> (u64, u64, u64) {
        self.settle();
        // All that was asked is answered, and no item lies in a queue while a client waits for one.
        for client in &self.clients {
            assert!(client.open.is_empty(), "{:?} has no answer", client.calls[client.open[0]]);
        }
        let queued = |world: &Self| world.table.queue_items();
        let waits = |client: &&Client| client.wait.as_ref().is_some_and(|(keys, _)| keys[0] == b"queue0");
        for _ in 0..50 {
            let Some(index) = self.clients.iter().position(|client| client.pops.is_some()) else { break };
            let (node, id) = (self.clients[index].node, self.clients[index].id);
            let key = self.clients[index].pops.take().expect("it was just looked at");
            self.time += 1;
            let client = &mut self.clients[index];
            let request = Request::QueuePop { key: key.into() };
            client.open.push_back(client.calls.len());
            let call = Call { request: request.clone(), response: None, invoked: self.time, returned: NEVER };
            client.calls.push(call);
            self.nodes[node].merge.ask(id, request).expect("not a wait");
            self.settle();
        }
        let waiting = self.clients.iter().filter(waits).count();
        assert!(waiting == 0 || queued(&self) == 0, "{} items, {waiting} waiting", queued(&self));
        // Every key that exists now wakes all that wait for it.
        for (number, client) in self.clients.iter().enumerate() {
            if let Some((keys, _)) = &client.wait {
                let missing = keys.iter().filter(|key| !self.table.has(key)).count();
                let once = keys.len() > 1; // it may have seen one of them before
                assert!(missing > 0 || once, "client {number} waits for {keys:?}, which exist");
            }
        }
        while let Some(client) = self.clients.pop() {
            self.nodes[client.node].merge.forget(client.id, &mut Effects::default());
            self.histories.push(client.calls);
        }
        self.settle();
        assert_eq!(self.table.waiters_count(), 0, "a wait is left");
        for node in &self.nodes {
            assert_eq!((node.merge.waits(), node.merge.under_way(), node.merge.waiting()), (0, 0, 0));
            assert!(
                node.merge.groups.is_empty() && node.merge.reads.is_empty() && node.merge.adds.is_empty()
            );
        }
        let mut objects = BTreeMap::<Vec<u8>, Vec<Vec<Call>>>::new();
        for (session, calls) in self.histories.into_iter().enumerate() {
            for call in calls {
                let sessions = objects.entry(call.request.keys()[0].to_vec()).or_default();
                sessions.resize(sessions.len().max(session + 1), Vec::new());
                sessions[session].push(call);
            }
        }
        for (key, mut sessions) in objects {
            sessions.retain(|session| !session.is_empty());
            if let Err(violation) = check(&sessions) {
                panic!("`{}` is not linearizable\n{violation}", key.escape_ascii());
            }
        }
        (self.merged.0, self.merged.1, self.cuts)
    }
}

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().expect("a number"))
}

#[test]
fn what_clients_of_relays_see_is_linearizable_wherever_connections_are_cut() {
    let one = std::env::var("TENFOLD_RELAY_SEED").ok().map(|text| text.parse().expect("a number"));
    let seeds = one.map_or(0..setting("TENFOLD_RELAY_SEEDS", 200), |seed: u64| seed..seed + 1);
    let (mut asked, mut sent, mut cuts) = (0, 0, 0);
    for seed in seeds {
        let world = std::panic::catch_unwind(|| {
            let mut world = World::new(seed);
            for _ in 0..600 {
                match world.random.below(40) {
                    0 if seed % 4 != 0 => {
                        let node = world.random.below(2);
                        world.cut(node);
                    }
                    0..=12 => {
                        let node = world.random.below(2);
                        world.carry(node);
                    }
                    _ => world.client_step(),
                }
            }
            world.finish()
        });
        match world {
            Ok((one_asked, one_sent, one_cuts)) => {
                asked += one_asked;
                sent += one_sent;
                cuts += one_cuts;
            }
            Err(panic) => {
                eprintln!("again: TENFOLD_RELAY_SEED={seed} cargo test -p tenfold-store --lib relay");
                std::panic::resume_unwind(panic);
            }
        }
    }
    println!("{asked} requests of clients, {sent} of relays, {cuts} cuts");
    assert!(sent < asked, "something was merged");
}

/// A relay with clients, and what it would send.
fn sent(merge: &mut Merge) -> Vec<Ask<'static>> {
    let (first, second) = merge.pipe.to_write();
    let bytes: Vec<u8> = first.iter().chain(second).copied().collect();
    merge.pipe.wrote(bytes.len());
    let bytes: &'static [u8] = bytes.leak();
    let (mut at, mut asks) = (0, Vec::new());
    while at < bytes.len() {
        match wire::decode(&bytes[at..], &MessageLimits::default(), &mut Scan::default()).unwrap() {
            Decoded::Whole(Command::Numbered { ask, .. }, length) => {
                asks.push(ask);
                at += length;
            }
            other => panic!("{other:?}"),
        }
    }
    asks
}

fn add(delta: i64) -> Request<'static> {
    Request::Add { key: b"n".as_slice().into(), delta }
}

#[test]
fn adds_that_arrive_while_one_is_under_way_get_partial_sums_in_the_order_of_arrival() {
    let mut merge = Merge::new([0; 16]);
    for (client, delta) in [(1, 1), (2, 10), (3, 100)] {
        assert!(merge.allows_request(LocalId(client)));
        merge.ask(LocalId(client), add(delta)).unwrap();
    }
    assert_eq!(sent(&mut merge), [Ask::Call(add(1))]);
    assert!(!merge.allows_request(LocalId(2)), "its request is held back");
    let mut effects = Effects::default();
    merge.answer(1, Status::Done, &5_i64.to_le_bytes(), &mut effects).unwrap();
    assert_eq!(effects.replies, [(LocalId(1), Reply::Number(5))]);
    assert_eq!(effects.resumed, [LocalId(2)]);
    assert_eq!(sent(&mut merge), [Ask::Call(add(110))]);
    let mut effects = Effects::default();
    merge.answer(2, Status::Done, &1_115_i64.to_le_bytes(), &mut effects).unwrap();
    assert_eq!(effects.replies, [(LocalId(2), Reply::Number(1_015)), (LocalId(3), Reply::Number(1_115))]);
}

#[test]
fn a_get_that_arrives_after_one_was_sent_does_not_share_its_answer() {
    let mut merge = Merge::new([0; 16]);
    let get = || Request::Get { key: b"k".as_slice().into() };
    merge.ask(LocalId(1), get()).unwrap();
    assert_eq!(sent(&mut merge).len(), 1);
    for client in 2..=9 {
        merge.ask(LocalId(client), get()).unwrap();
    }
    assert_eq!(sent(&mut merge), []);
    let mut effects = Effects::default();
    merge.answer(1, Status::Done, b"old", &mut effects).unwrap();
    assert_eq!(effects.replies, [(LocalId(1), Reply::Bytes("old".into()))]);
    assert_eq!(sent(&mut merge), [Ask::Call(get())], "one for eight clients");
    let mut effects = Effects::default();
    merge.answer(2, Status::Done, b"new", &mut effects).unwrap();
    assert_eq!(effects.replies.len(), 8);
    assert!(effects.replies.iter().all(|(_, reply)| *reply == Reply::Bytes("new".into())));
}

#[test]
fn a_thousand_clients_wait_with_two_requests() {
    let mut merge = Merge::new([0; 16]);
    let keys = || vec![Bytes::from(b"k".as_slice())];
    for client in 0..1000 {
        merge.ask(LocalId(client), Request::Wait { keys: keys() }).unwrap();
    }
    assert_eq!(sent(&mut merge), [Ask::Call(Request::Wait { keys: keys() })]);
    let mut effects = Effects::default();
    merge.answer(1, Status::Parked, b"", &mut effects).unwrap();
    assert_eq!(sent(&mut merge), [Ask::Join(1, keys())]);
    merge.answer(2, Status::Joined, b"", &mut effects).unwrap();
    assert_eq!((effects.replies.len(), merge.waits()), (0, 1));
    merge.answer(1, Status::Done, &[0], &mut effects).unwrap();
    assert_eq!((effects.replies.len(), merge.waits(), merge.waiting()), (1000, 0, 0));
}

#[test]
fn a_push_wakes_one_client_and_the_others_go_on_waiting() {
    let mut merge = Merge::new([0; 16]);
    let keys = || vec![Bytes::from(b"q".as_slice())];
    for client in 1..=3 {
        merge.ask(LocalId(client), Request::Wait { keys: keys() }).unwrap();
    }
    let mut effects = Effects::default();
    merge.answer(1, Status::Parked, b"", &mut effects).unwrap();
    merge.answer(2, Status::Joined, b"", &mut effects).unwrap();
    merge.answer(1, Status::One, &77_u64.to_le_bytes(), &mut effects).unwrap();
    assert_eq!(effects.replies, [(LocalId(1), Reply::Ready)]);
    sent(&mut merge);
    // The item is for the first one: its pop says so. If it disconnects instead, the item is given up.
    let pop = || Request::QueuePop { key: b"q".as_slice().into() };
    merge.ask(LocalId(1), pop()).unwrap();
    assert_eq!(sent(&mut merge), [Ask::CallAfter(77, pop())]);
    merge.answer(1, Status::One, &78_u64.to_le_bytes(), &mut effects).unwrap();
    assert_eq!(effects.replies, [(LocalId(1), Reply::Ready), (LocalId(2), Reply::Ready)]);
    merge.forget(LocalId(2), &mut effects);
    assert_eq!(sent(&mut merge), [Ask::Leave(78)]);
    // The last one: the wait is left. What is pushed for it meanwhile is given up.
    merge.answer(1, Status::One, &79_u64.to_le_bytes(), &mut effects).unwrap();
    assert_eq!(sent(&mut merge), [Ask::Leave(1)]);
    merge.answer(1, Status::One, &80_u64.to_le_bytes(), &mut effects).unwrap();
    assert_eq!(sent(&mut merge), [Ask::Leave(80)]);
    assert_eq!(merge.answer(1, Status::One, b"short", &mut effects), Ok(()));
}

#[test]
fn arrivals_at_a_barrier_are_counted_even_if_a_client_leaves_before_they_are_sent() {
    let mut merge = Merge::new([0; 16]);
    let barrier = || Request::Barrier { key: b"b".as_slice().into(), world: 9 };
    for client in 1..=4 {
        merge.ask(LocalId(client), barrier()).unwrap();
    }
    let mut effects = Effects::default();
    merge.forget(LocalId(3), &mut effects);
    let arrive = |count| Ask::Arrive { count, key: b"b".as_slice().into(), world: 9 };
    assert_eq!(sent(&mut merge), [arrive(1)]);
    merge.answer(1, Status::Parked, b"", &mut effects).unwrap();
    assert_eq!(sent(&mut merge), [arrive(3)]);
    merge.answer(1, Status::Done, &[0], &mut effects).unwrap();
    merge.answer(2, Status::Done, &[0], &mut effects).unwrap();
    let woken: Vec<u64> = effects.replies.iter().map(|(client, _)| client.0).collect();
    assert_eq!(woken, [1, 2, 4]);
    assert!(merge.barriers.is_empty() && merge.waits.is_empty());
}

#[test]
fn nonsense_of_a_server_is_recognised() {
    let mut merge = Merge::new([0; 16]);
    let mut effects = Effects::default();
    assert_eq!(merge.answer(1, Status::Done, b"", &mut effects), Err(Nonsense::Number(1)));
    assert_eq!(merge.answer(0, Status::Done, b"", &mut effects), Err(Nonsense::Number(0)));
    merge.ask(LocalId(1), add(1)).unwrap();
    merge.ask(LocalId(2), Request::Wait { keys: vec![b"k".as_slice().into()] }).unwrap();
    assert_eq!(merge.answer(1, Status::Done, b"short", &mut effects), Err(Nonsense::Answer(1)));
    assert_eq!(merge.answer(2, Status::Joined, b"", &mut effects), Err(Nonsense::Answer(2)));
    // Any status and body for any request: never a panic.
    let mut random = Random(1);
    for _ in 0..20_000 {
        let client = LocalId(random.below(20) as u64);
        match random.below(6) {
            0 => merge.forget(client, &mut effects),
            1 => merge.cancel(client, &mut effects),
            2 if merge.allows_request(client) => {
                let key = Bytes::from(vec![random.below(3) as u8]);
                let _already_waits = merge.ask(
                    client,
                    match random.below(4) {
                        0 => Request::Wait { keys: vec![key] },
                        1 => Request::Barrier { key, world: 3 },
                        2 => Request::Get { key },
                        _ => add(1),
                    },
                );
            }
            _ => {
                let number = random.below(merge.pipe.last() as usize + 2) as u64;
                let statuses = [Status::Done, Status::Parked, Status::Joined, Status::One, Status::Refused];
                let status = statuses[random.below(5)];
                let body = [0; 8];
                let _nonsense = merge.answer(number, status, &body[..random.below(9)], &mut effects);
            }
        }
    }
}
