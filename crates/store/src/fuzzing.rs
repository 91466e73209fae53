//! Both ends of a session, as the fuzzer plays against them. Only with the feature `fuzzing`, and not for use
//! by programs.
//!
//! A script is any bytes. [`serve`] lets several connections say them to a server's sessions, [`relay`] lets
//! them be what clients and the server say to a relay.

#![expect(clippy::disallowed_methods, reason = "a table needs a time, any time")]

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::relay::{Effects, LocalId, Merge, Reply};
use crate::request::{Request, Response};
use crate::sessions::{SessionId, Sessions};
use crate::table::{ClientId, Replies, Table, TableLimits};
use crate::wire::{self, Ask, Command, Decoded, Hello, MessageLimits, Scan, Status};

/// Connections, or clients of a relay.
const PEERS: u8 = 4;
/// From here on, the first byte of a line is an event instead of the beginning of a message.
const EVENTS: u8 = 0xf0;

/// Small, so that the fuzzer finds both sides of each.
fn limits() -> MessageLimits {
    MessageLimits { key: 64, value: 256, keys: 16, request: 1024 }
}

fn decode<'a>(script: &mut &'a [u8]) -> Option<Command<'a>> {
    match wire::decode(script, &limits(), &mut Scan::default()) {
        Ok(Decoded::Whole(command, length)) => {
            *script = &script[length..];
            Some(command)
        }
        _ => None,
    }
}

// ── the server's end ───────────────────────────────────────────────────────────────────────────────────────

struct Served {
    table: Table,
    sessions: Sessions,
    now: Instant,
    /// The session of each connection.
    open: HashMap<usize, SessionId>,
    /// By session: requests executed, and answers received.
    counts: HashMap<SessionId, (u64, u64)>,
}

impl Served {
    /// As the server delivers what a request has caused.
    fn route(&mut self, mut replies: Replies) {
        let mut next = 0;
        while next < replies.len() {
            let (client, response) = replies[next].clone();
            next += 1;
            if !Sessions::has(client) {
                continue;
            }
            let heard = self.sessions.hear(client, response, self.now, &mut self.table, &mut replies);
            if let Some((session, answer)) = heard {
                self.keep(session, answer);
            }
        }
    }

    fn keep(&mut self, session: SessionId, answer: wire::Answer) {
        let (executed, answers) =
            self.counts.get_mut(&session).expect("only sessions that exist are answered");
        *answers += 1;
        assert!((1..=*executed + 1).contains(&answer.number), "an answer to request {}", answer.number);
        let (_slot, kept) = self.sessions.keep(session, answer);
        let mut bytes = Vec::new();
        kept.encode(&mut bytes);
        assert_eq!(bytes.len(), wire::Answer::HEAD + kept.length());
    }

    fn lose(&mut self, slot: usize) {
        let mut replies = Replies::new();
        self.table.forget(ClientId(slot), &mut replies);
        if let Some(session) = self.open.remove(&slot) {
            self.sessions.leave(session, slot, self.now, &mut self.table, &mut replies);
        }
        self.route(replies);
    }

    fn say(&mut self, slot: usize, command: Command<'_>) {
        let mut replies = Replies::new();
        let session = self.open.get(&slot).copied();
        match (command, session) {
            (Command::Call(request), _) => {
                let _refused = self.table.apply(ClientId(slot), request, self.now, &mut replies);
            }
            (Command::CancelWait, _) => {
                self.table.cancel(ClientId(slot), &mut replies);
            }
            (Command::Session(hello), None) => {
                // A few names, or the fuzzer would never return to a session.
                let hello = Hello { token: [hello.token[0] % 3; 16], answers: hello.answers % 8, ..hello };
                let (table, sessions) = (&mut self.table, &mut self.sessions);
                if let Ok(opened) = sessions.open(&hello, slot, self.now, table, &mut replies) {
                    if let Some(old) = opened.replaces {
                        self.open.remove(&old);
                    }
                    self.open.retain(|_, other| *other != opened.session);
                    self.open.insert(slot, opened.session);
                    let counts = self.counts.entry(opened.session).or_default();
                    if !opened.resumed {
                        *counts = (0, 0);
                    }
                    assert_eq!(counts.0, opened.executed, "each executed request was counted once");
                }
            }
            (Command::Numbered { number, ask }, Some(id)) => {
                let (executed, _) = self.counts[&id];
                // An even number stands for the right one, which the fuzzer cannot know.
                let number = if number % 2 == 0 { executed + 1 } else { number };
                let (table, sessions) = (&mut self.table, &mut self.sessions);
                match sessions.execute(id, number, ask, self.now, table, &mut replies) {
                    Err(_) => {
                        self.route(replies);
                        return self.lose(slot);
                    }
                    Ok(answer) => {
                        assert_eq!(number, executed + 1);
                        self.route(std::mem::take(&mut replies));
                        self.counts.get_mut(&id).expect("it is open").0 += 1;
                        if let Some(answer) = answer {
                            assert_eq!(answer.number, number);
                            self.keep(id, answer);
                        }
                    }
                }
            }
            (Command::Acknowledge { answers }, Some(id)) => {
                let (_, sent) = self.counts[&id];
                if self.sessions.acknowledge(id, answers).is_err() {
                    assert!(answers > sent);
                    return self.lose(slot);
                }
            }
            (Command::Bye, Some(id)) => {
                self.open.remove(&slot);
                self.sessions.end(id, &mut self.table, &mut replies);
            }
            // A second session, or none: the server closes the connection. The others need no session.
            (Command::Session(_), Some(_)) => return self.lose(slot),
            (Command::Numbered { .. } | Command::Acknowledge { .. } | Command::Bye, None) => {
                return self.lose(slot);
            }
            (Command::Validate { .. } | Command::Ping { .. } | Command::Info, _) => {}
        }
        self.route(replies);
    }
}

/// Several connections say this to a server. It never panics, executes each numbered request once, keeps its
/// limits, and holds nothing after all have left.
pub fn serve(script: &[u8]) {
    let mut limits = TableLimits::default();
    (limits.keys, limits.bytes, limits.queue_items) = (12, 16 << 10, 10);
    let mut served = Served {
        table: Table::new(limits),
        sessions: Sessions::new(2, Duration::from_millis(20)),
        now: Instant::now(),
        open: HashMap::new(),
        counts: HashMap::new(),
    };
    let mut script = script;
    let mut queues = std::collections::HashSet::new();
    while let Some((&first, rest)) = script.split_first() {
        script = rest;
        served.now += Duration::from_millis(1);
        let slot = usize::from(first % PEERS);
        if first >= EVENTS {
            served.lose(slot);
            let mut replies = Replies::new();
            served.sessions.expire(served.now, &mut served.table, &mut replies);
            served.route(replies);
        } else {
            let Some(command) = decode(&mut script) else { break };
            if let Command::Call(Request::QueuePush { key, .. })
            | Command::Numbered {
                ask:
                    Ask::Call(Request::QueuePush { key, .. }) | Ask::CallAfter(_, Request::QueuePush { key, .. }),
                ..
            } = &command
            {
                queues.insert(key.to_vec());
            }
            served.say(slot, command);
        }
        assert!(served.table.bytes() <= limits.bytes, "{} bytes", served.table.bytes());
        assert!(served.sessions.count() <= 2);
    }

    (0..usize::from(PEERS)).for_each(|slot| served.lose(slot));
    served.now += Duration::from_secs(1);
    let mut replies = Replies::new();
    served.sessions.expire(served.now, &mut served.table, &mut replies);
    assert_eq!((served.sessions.count(), served.sessions.bytes()), (0, 0));
    assert_eq!(served.table.waiters_count(), 0);
    drop(replies);
    empty(&mut served.table, queues, served.now);
}

/// Deletes all keys and items: then the table must hold nothing.
fn empty(table: &mut Table, queues: impl IntoIterator<Item = Vec<u8>>, now: Instant) {
    table.sweep();
    let mut ask = |request: Request<'_>| {
        let mut replies = Replies::new();
        table.apply(ClientId(usize::from(PEERS)), request, now, &mut replies).expect("it frees memory");
        replies.pop().expect("it is answered").1
    };
    let Response::Keys(keys) = ask(Request::ListKeys) else { panic!("keys were asked for") };
    for key in keys {
        ask(Request::Delete { key: (&*key).into() });
    }
    for key in queues {
        while ask(Request::QueuePop { key: (&*key).into() }) != Response::Popped(None) {}
    }
    table.sweep(); // the list of keys held their names while they were deleted
    assert_eq!((table.keys(), table.queue_items(), table.bytes()), (0, 0, 0));
}

// ── the relay's end ────────────────────────────────────────────────────────────────────────────────────────

/// What a client of the relay has asked and not been answered.
#[derive(Debug, Default)]
struct Asked {
    requests: usize,
    waits: bool,
}

struct Relayed {
    merge: Merge,
    clients: Vec<(LocalId, Asked)>,
    next_client: u64,
}

impl Relayed {
    fn new_client(&mut self, index: usize) {
        self.next_client += 1;
        self.clients[index] = (LocalId(self.next_client), Asked::default());
    }

    /// Each reply is to a request.
    fn hand_out(&mut self, effects: &mut Effects) {
        let mut asked: HashMap<LocalId, &mut Asked> =
            self.clients.iter_mut().map(|(id, asked)| (*id, asked)).collect();
        for (client, reply) in effects.replies.drain(..) {
            let asked = asked.get_mut(&client).expect("only clients that are there are answered");
            match reply {
                Reply::Ready => {
                    assert!(std::mem::take(&mut asked.waits), "the end of a wait that it is not in");
                }
                Reply::Bytes(_) | Reply::Number(_) => {
                    asked.requests = asked.requests.checked_sub(1).expect("it has asked");
                }
            }
        }
        effects.resumed.clear();
        let refused: Vec<LocalId> = effects.refused.drain(..).map(|(client, _)| client).collect();
        for client in refused {
            if let Some(index) = self.clients.iter().position(|(id, _)| *id == client) {
                self.leave(index, effects); // the relay closes it
            }
        }
    }

    fn leave(&mut self, index: usize, effects: &mut Effects) {
        self.merge.forget(self.clients[index].0, effects);
        self.new_client(index);
    }

    /// The connection is lost, and the server says that it has executed so many requests.
    fn lose(&mut self, executed: u64, effects: &mut Effects) {
        self.merge.set_connected(false, effects);
        if self.merge.pipe.resume(executed) {
            self.merge.set_connected(true, effects);
            return;
        }
        self.merge = Merge::new([0; 16]);
        (0..self.clients.len()).for_each(|index| self.new_client(index));
        *effects = Effects::default();
    }

    /// What the relay writes is what a server decodes, with numbers that follow each other.
    fn write(&mut self, count: usize) {
        let (first, second) = self.merge.pipe.to_write();
        let bytes = [first, second].concat();
        let most = MessageLimits { key: 1 << 20, value: 1 << 20, keys: 1 << 20, request: 1 << 20 };
        let mut at = 0;
        let mut last = None;
        // After a part of a message was written, its rest is not a message.
        while let Ok(Decoded::Whole(command, length)) =
            wire::decode(&bytes[at..], &most, &mut Scan::default())
        {
            if let Command::Numbered { number, .. } = command {
                assert!(last.is_none_or(|last| number == last + 1), "{number} follows {last:?}");
                last = Some(number);
            }
            at += length;
        }
        self.merge.pipe.wrote(count.min(bytes.len()));
    }
}

/// Clients and a server say this to a relay. It never panics, and no client gets a reply that it has not asked
/// for, whatever the server answers.
pub fn relay(script: &[u8]) {
    let mut relayed =
        Relayed { merge: Merge::new([0; 16]), clients: Vec::new(), next_client: u64::from(PEERS) };
    relayed.clients = (0..PEERS).map(|id| (LocalId(id.into()), Asked::default())).collect();
    let mut effects = Effects::default();
    let mut script = script;
    while let Some((&first, rest)) = script.split_first() {
        script = rest;
        let index = usize::from(first % PEERS);
        let client = relayed.clients[index].0;
        match first {
            EVENTS.. => relayed.leave(index, &mut effects),
            // An answer: to which of the last requests, what, and with how many bytes.
            0xa0..EVENTS => {
                let Some((&[back, status, length], rest)) = script.split_first_chunk() else { break };
                let (body, rest) = rest.split_at(rest.len().min(usize::from(length)));
                script = rest;
                let number = relayed.merge.pipe.last().wrapping_add(1).wrapping_sub(back.into());
                let status = [Status::Done, Status::Parked, Status::Joined, Status::One, Status::Refused]
                    [usize::from(status % 5)];
                if relayed.merge.answer(number, status, body, &mut effects).is_err() {
                    relayed.hand_out(&mut effects);
                    relayed.lose(relayed.merge.pipe.last(), &mut effects);
                }
            }
            0x90..0xa0 => {
                let Some((&back, rest)) = script.split_first() else { break };
                script = rest;
                relayed.lose(relayed.merge.pipe.last().wrapping_sub(back.into()), &mut effects);
            }
            0x80..0x90 => {
                let Some((&count, rest)) = script.split_first() else { break };
                script = rest;
                relayed.write(count.into());
            }
            _ => {
                let Some(command) = decode(&mut script) else { break };
                match command {
                    Command::Call(request) if relayed.merge.allows_request(client) => {
                        let waits = matches!(request, Request::Wait { .. } | Request::Barrier { .. });
                        let asked = &mut relayed.clients[index].1;
                        match relayed.merge.ask(client, request) {
                            Err(_already_waiting) => relayed.leave(index, &mut effects),
                            Ok(()) if waits => asked.waits = true,
                            Ok(()) => asked.requests += 1,
                        }
                    }
                    Command::Info if relayed.merge.allows_request(client) => {
                        relayed.merge.ask_info(client);
                        relayed.clients[index].1.requests += 1;
                    }
                    Command::CancelWait if relayed.merge.allows_answer(client) => {
                        relayed.merge.cancel(client, &mut effects);
                        relayed.clients[index].1.waits = false;
                    }
                    _ => {}
                }
            }
        }
        relayed.hand_out(&mut effects);
    }
    for index in 0..relayed.clients.len() {
        relayed.leave(index, &mut effects);
    }
    assert_eq!(relayed.merge.waiting(), 0);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::Bytes;
    use proptest::prelude::*;

    fn key() -> impl Strategy<Value = Bytes<'static>> {
        prop::sample::select(vec![&b"a"[..], b"b", b"7"]).prop_map(Bytes::from)
    }

    fn request() -> impl Strategy<Value = Request<'static>> {
        let keys = || prop::collection::vec(key(), 1..4);
        let value = || prop::sample::select(vec![&b""[..], b"1", &[b'x'; 200]]).prop_map(Bytes::from);
        prop_oneof![
            1 => (key(), value()).prop_map(|(key, value)| Request::Set { key, value }),
            1 => key().prop_map(|key| Request::Get { key }),
            1 => (key(), -2_i64..3).prop_map(|(key, delta)| Request::Add { key, delta }),
            1 => keys().prop_map(|keys| Request::Check { keys }),
            3 => keys().prop_map(|keys| Request::Wait { keys }),
            1 => key().prop_map(|key| Request::Delete { key }),
            1 => (key(), value()).prop_map(|(key, value)| Request::QueuePush { key, value }),
            1 => key().prop_map(|key| Request::QueuePop { key }),
            1 => (key(), 1_i64..4).prop_map(|(key, world)| Request::Barrier { key, world }),
            1 => Just(Request::ListKeys),
        ]
    }

    fn ask() -> impl Strategy<Value = Ask<'static>> {
        let wait = || prop_oneof![0_u64..9, (0_u64..30).prop_map(|number| 1 << 63 | 1 << 48 | number)];
        prop_oneof![
            6 => request().prop_map(Ask::Call),
            2 => (wait(), request()).prop_map(|(wait, request)| Ask::CallAfter(wait, request)),
            1 => (wait(), prop::collection::vec(key(), 1..4)).prop_map(|(wait, keys)| Ask::Join(wait, keys)),
            1 => (0_u64..4, key(), 1_i64..4).prop_map(|(count, key, world)| Ask::Arrive { count, key, world }),
            2 => wait().prop_map(Ask::Leave),
            1 => Just(Ask::Info),
        ]
    }

    fn message(to_server: bool) -> impl Strategy<Value = Vec<u8>> {
        let hello = (0..3_u8, 0..9_u64).prop_map(|(name, answers)| {
            Command::Session(Hello { version: wire::VERSION, flags: 0, token: [name; 16], answers })
        });
        let session = prop_oneof![
            3 => hello,
            12 => (0..30_u64, ask()).prop_map(|(number, ask)| Command::Numbered { number: number & !1, ask }),
            1 => (0..9_u64).prop_map(|answers| Command::Acknowledge { answers }),
            1 => Just(Command::Bye),
        ];
        let plain = prop_oneof![
            12 => request().prop_map(Command::Call),
            2 => Just(Command::CancelWait),
            1 => Just(Command::Info),
        ];
        let command = if to_server { prop_oneof![plain, session].boxed() } else { plain.boxed() };
        command.prop_map(|command| {
            let mut bytes = Vec::new();
            wire::encode(&command, &mut bytes);
            bytes
        })
    }

    fn script(to_server: bool) -> impl Strategy<Value = Vec<u8>> {
        let events = if to_server { 0xf0_u8..=0xff } else { 0x80..=0xff };
        let line = prop_oneof![
            6 => (0..PEERS, message(to_server)).prop_map(|(peer, message)| [vec![peer], message].concat()),
            4 => (events, prop::collection::vec(0..20_u8, 3..12)).prop_map(move |(event, mut rest)| {
                match event {
                    EVENTS.. => rest.clear(),
                    0xa0.. => rest[2] = (rest.len() - 3) as u8,
                    _ => rest.truncate(1),
                }
                [vec![event], rest].concat()
            }),
        ];
        prop::collection::vec(line, 0..60).prop_map(|lines| lines.concat())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn a_server_holds_nothing_after_any_sessions(script in script(true)) {
            serve(&script);
        }

        #[test]
        fn a_relay_answers_only_what_was_asked_whatever_its_server_says(script in script(false)) {
            relay(&script);
        }
    }
}
