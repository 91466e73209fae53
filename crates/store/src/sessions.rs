//! Sessions: what the server keeps for a relay, so that a lost connection loses and repeats nothing.
//!
//! A session has two counters. Requests are executed in the order of their numbers, each once: the next one
//! must have the next number. Answers are kept until the client has acknowledged them, and are sent again on
//! a new connection. A session whose client does not return in time is forgotten.
//!
//! Each pending wait of a session is a client of the table by itself, named by the number of its request. It
//! may stand for several clients of a relay, so a push does not end it: the answer names a promise, for one
//! client, and the wait goes on until the relay leaves it. The item stays promised until the session asks for
//! it, or for something else in the name of the promise. While a session has no connection, its waits are
//! passed over by pushes: the relay may never return.
//!
//! Pure: no sockets, no clock. Not here: bytes (`wire/session`), and who executes requests (`table`).

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use foldhash::HashMap;

use crate::request::{Request, Response};
use crate::table::{ClientId, Refusal, Replies, Table};
use crate::value::Value;
use crate::wire::{Answer, Ask, Body, Hello, Status};

/// Answers that one client may leave unacknowledged. A relay acknowledges after a few hundred.
const KEPT_MAX: usize = 256 << 10;
/// Bytes of answers that one client may leave unacknowledged, not counting the newest, which may be any size.
const KEPT_BYTES_MAX: usize = 64 << 20;
/// Numbers of promises begin here; those of waits are below.
const PROMISES: u64 = 1 << 63;
/// The table's clients from here on are waits of sessions; below are connections.
const WAITS: usize = 1 << 48;

/// Where a session is in the list.
pub(crate) type SessionId = usize;

/// All sessions of a server.
#[derive(Debug)]
pub(crate) struct Sessions {
    sessions: Vec<Option<Session>>,
    by_token: HashMap<[u8; 16], SessionId>,
    /// The sessions that the table's clients belong to.
    clients: HashMap<ClientId, Owner>,
    next_client: usize,
    count_max: usize,
    /// How long a session without a connection is kept.
    kept_for: Duration,
    bytes: usize,
}

#[derive(Clone, Copy, Debug)]
struct Owner {
    session: SessionId,
    /// The number of the wait; zero for all requests that do not wait.
    wait: u64,
}

#[derive(Debug)]
struct Session {
    token: [u8; 16],
    /// The connection.
    slot: Option<usize>,
    /// Since when it has none.
    alone_since: Option<Instant>,
    /// The number of the last request executed.
    executed: u64,
    /// Answers that the client has acknowledged.
    acknowledged: u64,
    /// Those that follow.
    kept: VecDeque<Kept>,
    bytes: usize,
    /// For requests that do not wait.
    client: ClientId,
    /// Pending waits and promises.
    waits: HashMap<u64, ClientId>,
    /// Waits that pushes have passed over while there was no connection, and their queues.
    passed_over: Vec<(u64, Value)>,
}

#[derive(Debug)]
struct Kept {
    answer: Answer,
    bytes: usize,
}

/// The client of a session broke a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Violation {
    Number { got: u64, expected: u64 },
    Acknowledged { answers: u64, sent: u64 },
    Unacknowledged { answers: usize, bytes: usize },
    TooMany { limit: usize },
}

impl std::fmt::Display for Violation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Violation::Number { got, expected } => {
                write!(f, "its session has request {got} where request {expected} is next")
            }
            Violation::Acknowledged { answers, sent } => {
                write!(f, "its session acknowledges {answers} answers, but {sent} were sent")
            }
            Violation::Unacknowledged { answers, bytes } => {
                write!(f, "its session has not acknowledged {answers} answers of {bytes} bytes")
            }
            Violation::TooMany { limit } => write!(f, "the limit of {limit} sessions is reached"),
        }
    }
}

/// A session that was opened on a connection.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Opened {
    pub(crate) session: SessionId,
    pub(crate) resumed: bool,
    /// Requests executed so far.
    pub(crate) executed: u64,
    /// The connection that had it: the client has a new one.
    pub(crate) replaces: Option<usize>,
}

impl Sessions {
    pub(crate) fn new(count_max: usize, kept_for: Duration) -> Self {
        Sessions {
            sessions: Vec::new(),
            by_token: HashMap::default(),
            clients: HashMap::default(),
            next_client: WAITS,
            count_max,
            kept_for,
            bytes: 0,
        }
    }

    /// How many there are.
    pub(crate) fn count(&self) -> usize {
        self.by_token.len()
    }

    /// Bytes of answers that are counted nowhere else.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// How long a session without a connection is kept.
    pub(crate) fn kept_for(&self) -> Duration {
        self.kept_for
    }

    /// The connection that a client of the table belongs to; nothing if it has none now.
    pub(crate) fn slot_of(&self, client: ClientId) -> Option<usize> {
        self.sessions[self.clients.get(&client)?.session].as_ref()?.slot
    }

    /// Is this client of the table part of a session?
    #[inline]
    pub(crate) fn has(client: ClientId) -> bool {
        client.0 >= WAITS
    }

    /// Opens or resumes a session on the connection `slot`. The answers after those that the client has are in
    /// [`Sessions::unacknowledged`].
    pub(crate) fn open(
        &mut self,
        hello: &Hello,
        slot: usize,
        now: Instant,
        table: &mut Table,
        replies: &mut Replies,
    ) -> Result<Opened, Violation> {
        let known = self.by_token.get(&hello.token).copied();
        if let Some(id) = known
            && let Some(session) = self.sessions[id].as_mut()
            && session.may_acknowledge(hello.answers)
        {
            let replaces = session.slot.replace(slot).filter(|old| *old != slot);
            session.alone_since = None;
            let executed = session.executed;
            for (wait, queue) in std::mem::take(&mut session.passed_over) {
                if let Some(client) = session.waits.get(&wait) {
                    table.wait_for_push(*client, queue, now, replies);
                }
            }
            self.bytes -= session.acknowledge(hello.answers);
            return Ok(Opened { session: id, resumed: true, executed, replaces });
        }
        // A client that has other answers than those of this session is not the one that it belonged to.
        let replaces = known.and_then(|id| self.end(id, table, replies)).filter(|old| *old != slot);
        if self.count() >= self.count_max && !self.end_oldest_alone(table, replies) {
            return Err(Violation::TooMany { limit: self.count_max });
        }
        let session = self.sessions.iter().position(Option::is_none).unwrap_or_else(|| {
            self.sessions.push(None);
            self.sessions.len() - 1
        });
        let client = self.new_client(Owner { session, wait: 0 });
        self.sessions[session] = Some(Session {
            token: hello.token,
            slot: Some(slot),
            alone_since: None,
            executed: 0,
            acknowledged: 0,
            kept: VecDeque::new(),
            bytes: 0,
            client,
            waits: HashMap::default(),
            passed_over: Vec::new(),
        });
        self.by_token.insert(hello.token, session);
        Ok(Opened { session, resumed: false, executed: 0, replaces })
    }

    /// Answers that the client has not acknowledged, the oldest first.
    pub(crate) fn unacknowledged(&self, id: SessionId) -> impl Iterator<Item = &Answer> {
        self.sessions[id].iter().flat_map(|session| session.kept.iter().map(|kept| &kept.answer))
    }

    /// The client has received this many answers in all.
    pub(crate) fn acknowledge(&mut self, id: SessionId, answers: u64) -> Result<(), Violation> {
        let session = self.session(id);
        // After a new connection, what was acknowledged on the old one may be acknowledged again.
        if answers > session.acknowledged && !session.may_acknowledge(answers) {
            let sent = session.acknowledged + session.kept.len() as u64;
            return Err(Violation::Acknowledged { answers, sent });
        }
        self.bytes -= self.session(id).acknowledge(answers);
        Ok(())
    }

    /// Executes the next request. Replies of the table, also those to other clients, are appended to
    /// `replies`: see [`Sessions::hear`]. Returns an answer that no reply of the table causes.
    pub(crate) fn execute(
        &mut self,
        id: SessionId,
        number: u64,
        ask: Ask<'_>,
        now: Instant,
        table: &mut Table,
        replies: &mut Replies,
    ) -> Result<Option<Answer>, Violation> {
        let session = self.session(id);
        let newest = session.kept.back().map_or(0, |kept| kept.bytes);
        if session.kept.len() > KEPT_MAX || session.bytes - newest > KEPT_BYTES_MAX {
            return Err(Violation::Unacknowledged { answers: session.kept.len(), bytes: session.bytes });
        }
        if number != session.executed + 1 {
            return Err(Violation::Number { got: number, expected: session.executed + 1 });
        }
        session.executed = number;
        let client = session.client;
        let refused = |refusal: Refusal| Answer {
            number,
            status: Status::Refused,
            body: Body::Text(refusal.without_key().as_str().into()),
        };
        let nothing = |status| Answer { number, status, body: Body::Empty };
        let ask = match ask {
            // Only a request that does not wait can be for the item.
            Ask::CallAfter(wait, request @ (Request::Wait { .. } | Request::Barrier { .. })) => {
                self.forget_wait(id, wait).inspect(|wait| table.forget(*wait, replies));
                Ask::Call(request)
            }
            Ask::CallAfter(wait, request) if !self.is_promised(id, wait, table) => Ask::Call(request),
            other => other,
        };
        let applied = match ask {
            Ask::Call(request @ (Request::Wait { .. } | Request::Barrier { .. })) => {
                let wait = self.new_wait(id, number);
                return Ok(match table.apply(wait, request, now, replies) {
                    Ok(()) => table.is_waiting(wait).then_some(nothing(Status::Parked)),
                    Err(refusal) => {
                        self.forget_wait(id, number);
                        Some(refused(refusal))
                    }
                });
            }
            Ask::Join(other, keys) => {
                let earlier = self.session(id).waits.get(&other);
                if earlier.is_some_and(|earlier| table.waits_afresh(*earlier, &keys)) {
                    return Ok(Some(nothing(Status::Joined)));
                }
                let wait = self.new_wait(id, number);
                return Ok(match table.apply(wait, Request::Wait { keys }, now, replies) {
                    Ok(()) => table.is_waiting(wait).then_some(nothing(Status::Parked)),
                    Err(refusal) => {
                        self.forget_wait(id, number);
                        Some(refused(refusal))
                    }
                });
            }
            Ask::Arrive { count, key, world } => {
                let wait = self.new_wait(id, number);
                return Ok(match table.arrive(wait, &key, (world, count), now, replies) {
                    Ok(false) => Some(nothing(Status::Parked)),
                    Ok(true) => {
                        replies.push((wait, Response::Ready));
                        None
                    }
                    Err(refusal) => {
                        self.forget_wait(id, number);
                        Some(refused(refusal))
                    }
                });
            }
            Ask::Leave(wait) => {
                self.forget_wait(id, wait).inspect(|wait| table.forget(*wait, replies));
                return Ok(None);
            }
            Ask::Info => return Ok(None), // the caller answers
            Ask::Call(request) => table.apply(client, request, now, replies),
            Ask::CallAfter(wait, request) => match self.forget_wait(id, wait) {
                None => table.apply(client, request, now, replies),
                // In the name of the wait, which settles the promise; the answer is to this request.
                Some(wait) => {
                    let first = replies.len();
                    let applied = table.apply(wait, request, now, replies);
                    for (answered, _) in &mut replies[first..] {
                        if *answered == wait {
                            *answered = client;
                        }
                    }
                    applied
                }
            },
        };
        Ok(applied.err().map(refused))
    }

    /// A reply of the table to a client of a session: the answer that it is. Pass it to [`Sessions::keep`].
    pub(crate) fn hear(
        &mut self,
        client: ClientId,
        response: Response,
        now: Instant,
        table: &mut Table,
        replies: &mut Replies,
    ) -> Option<(SessionId, Answer)> {
        let Owner { session: id, wait } = *self.clients.get(&client)?;
        let session = self.session(id);
        if wait == 0 {
            let answer =
                Answer { number: session.executed, status: Status::Done, body: Body::Reply(response) };
            return Some((id, answer));
        }
        let done = Answer { number: wait, status: Status::Done, body: Body::Reply(response) };
        let Some(queue) = table.promised_queue(client) else {
            self.forget_wait(id, wait);
            return Some((id, done));
        };
        if session.slot.is_none() {
            session.passed_over.push((wait, queue));
            table.cancel(client, replies);
            return None;
        }
        let promise = PROMISES | self.next_client as u64;
        let promised = self.new_wait(id, promise);
        if table.share_promise(client, promised, now).is_err() {
            // No memory for the wait to go on: all of its clients are woken, and the first one has the item.
            self.forget_wait(id, wait);
            self.forget_wait(id, promise).inspect(|promised| table.forget(*promised, replies));
            return Some((id, done));
        }
        let body = Body::Reply(Response::Number(promise as i64));
        Some((id, Answer { number: wait, status: Status::One, body }))
    }

    /// Keeps an answer until it is acknowledged; returns it with the connection to send it on.
    pub(crate) fn keep(&mut self, id: SessionId, answer: Answer) -> (Option<usize>, &Answer) {
        let bytes = size_of::<Kept>() + held(&answer);
        self.bytes += bytes;
        let session = self.session(id);
        session.bytes += bytes;
        session.kept.push_back(Kept { answer, bytes });
        let newest = session.kept.back().expect("it was just put there");
        (session.slot, &newest.answer)
    }

    /// The connection is lost; the client may return.
    pub(crate) fn leave(
        &mut self,
        id: SessionId,
        slot: usize,
        now: Instant,
        table: &mut Table,
        replies: &mut Replies,
    ) {
        let Some(session) = self.sessions[id].as_mut().filter(|session| session.slot == Some(slot)) else {
            return; // ended, or taken over by a newer connection
        };
        session.slot = None;
        session.alone_since = Some(now);
        let promised: Vec<(u64, ClientId)> = session
            .waits
            .iter()
            .filter(|(_, client)| table.is_promised(**client))
            .map(|(wait, client)| (*wait, *client))
            .collect();
        for (wait, client) in promised {
            table.cancel(client, replies);
            self.forget_wait(id, wait);
        }
    }

    /// Ends sessions whose clients have not returned in time.
    pub(crate) fn expire(&mut self, now: Instant, table: &mut Table, replies: &mut Replies) {
        for id in 0..self.sessions.len() {
            let alone_since = self.sessions[id].as_ref().and_then(|session| session.alone_since);
            if alone_since.is_some_and(|since| now.duration_since(since) >= self.kept_for) {
                self.end(id, table, replies);
            }
        }
    }

    /// Ends the session that has been without a connection for the longest time, if there is one.
    pub(crate) fn end_oldest_alone(&mut self, table: &mut Table, replies: &mut Replies) -> bool {
        let alone = |(id, session): (usize, &Option<Session>)| Some((session.as_ref()?.alone_since?, id));
        let Some((_, oldest)) = self.sessions.iter().enumerate().filter_map(alone).min() else {
            return false;
        };
        self.end(oldest, table, replies);
        true
    }

    /// Forgets a session and what it waits for; returns its connection.
    pub(crate) fn end(&mut self, id: SessionId, table: &mut Table, replies: &mut Replies) -> Option<usize> {
        let session = self.sessions[id].take()?;
        self.by_token.remove(&session.token);
        self.bytes -= session.bytes;
        self.clients.remove(&session.client);
        for client in session.waits.into_values() {
            self.clients.remove(&client);
            table.forget(client, replies);
        }
        session.slot
    }

    fn is_promised(&mut self, id: SessionId, wait: u64, table: &Table) -> bool {
        self.session(id).waits.get(&wait).is_some_and(|client| table.is_promised(*client))
    }

    fn session(&mut self, id: SessionId) -> &mut Session {
        self.sessions[id].as_mut().expect("a connection has a session only while it exists")
    }

    fn new_client(&mut self, owner: Owner) -> ClientId {
        let client = ClientId(self.next_client);
        self.next_client += 1;
        self.clients.insert(client, owner);
        client
    }

    fn new_wait(&mut self, session: SessionId, wait: u64) -> ClientId {
        let client = self.new_client(Owner { session, wait });
        self.session(session).waits.insert(wait, client);
        client
    }

    fn forget_wait(&mut self, id: SessionId, wait: u64) -> Option<ClientId> {
        let client = self.session(id).waits.remove(&wait)?;
        self.clients.remove(&client);
        Some(client)
    }
}

impl Session {
    fn may_acknowledge(&self, answers: u64) -> bool {
        (self.acknowledged..=self.acknowledged + self.kept.len() as u64).contains(&answers)
    }

    /// Returns the bytes that this frees.
    fn acknowledge(&mut self, answers: u64) -> usize {
        let mut freed = 0;
        while self.acknowledged < answers
            && let Some(kept) = self.kept.pop_front()
        {
            self.acknowledged += 1;
            freed += kept.bytes;
        }
        self.bytes -= freed;
        freed
    }
}

/// Bytes of an answer that the table does not count.
fn held(answer: &Answer) -> usize {
    let value = |value: &Value| size_of::<Value>() + if value.is_shared() { 0 } else { value.len() };
    match &answer.body {
        Body::Empty => 0,
        Body::Text(text) => value(text),
        Body::Reply(Response::Value(Some(one)) | Response::Popped(Some((one, _)))) => value(one),
        Body::Reply(Response::Values(all)) => all.iter().flatten().map(value).sum(),
        Body::Reply(Response::Keys(all)) => all.iter().map(value).sum(),
        Body::Reply(_) => 0,
    }
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "a table needs a time, any time")]
mod tests;
