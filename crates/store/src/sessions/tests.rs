//! Sessions with a table, without a network. Random schedules are in `relay/merge/tests`.

use super::*;
use crate::request::Bytes;
use crate::table::TableLimits;

struct World {
    table: Table,
    sessions: Sessions,
    now: Instant,
}

impl World {
    fn new() -> Self {
        World {
            table: Table::new(TableLimits::default()),
            sessions: Sessions::new(3, Duration::from_secs(60)),
            now: Instant::now(),
        }
    }

    fn open(&mut self, token: u8, answers: u64, slot: usize) -> Result<Opened, Violation> {
        let hello = Hello { version: 1, flags: 0, token: [token; 16], answers };
        let mut replies = Replies::new();
        let opened = self.sessions.open(&hello, slot, self.now, &mut self.table, &mut replies);
        self.route(replies);
        opened
    }

    /// Executes a request and returns the answers that it causes, of all sessions.
    fn ask(&mut self, id: SessionId, number: u64, ask: Ask<'_>) -> Result<Vec<(u64, Status)>, Violation> {
        let mut replies = Replies::new();
        let answer = self.sessions.execute(id, number, ask, self.now, &mut self.table, &mut replies)?;
        let mut answers = self.route(replies);
        if let Some(answer) = answer {
            answers.push((answer.number, answer.status));
            self.sessions.keep(id, answer);
        }
        Ok(answers)
    }

    fn route(&mut self, mut replies: Replies) -> Vec<(u64, Status)> {
        let (mut next, mut answers) = (0, Vec::new());
        while next < replies.len() {
            let (client, response) = std::mem::replace(&mut replies[next], (ClientId(0), Response::Done));
            next += 1;
            if let Some((id, answer)) =
                self.sessions.hear(client, response, self.now, &mut self.table, &mut replies)
            {
                answers.push((answer.number, answer.status));
                self.sessions.keep(id, answer);
            }
        }
        answers
    }

    fn lose(&mut self, id: SessionId, slot: usize) {
        let mut replies = Replies::new();
        self.sessions.leave(id, slot, self.now, &mut self.table, &mut replies);
        self.route(replies);
    }
}

fn add() -> Ask<'static> {
    Ask::Call(Request::Add { key: b"n".as_slice().into(), delta: 1 })
}

fn keys(name: &'static str) -> Vec<Bytes<'static>> {
    vec![name.as_bytes().into()]
}

fn wait(name: &'static str) -> Ask<'static> {
    Ask::Call(Request::Wait { keys: keys(name) })
}

fn push(name: &'static str) -> Ask<'static> {
    Ask::Call(Request::QueuePush { key: name.as_bytes().into(), value: b"item".as_slice().into() })
}

#[test]
fn a_request_is_executed_once_and_its_answer_is_kept_until_it_is_acknowledged() {
    let mut world = World::new();
    let id = world.open(1, 0, 10).unwrap().session;
    assert_eq!(world.ask(id, 1, add()), Ok(vec![(1, Status::Done)]));
    assert_eq!(world.ask(id, 2, add()), Ok(vec![(2, Status::Done)]));
    assert_eq!(world.ask(id, 2, add()), Err(Violation::Number { got: 2, expected: 3 }));
    assert_eq!(world.ask(id, 4, add()), Err(Violation::Number { got: 4, expected: 3 }));
    world.lose(id, 10);
    // The client got the first answer; the second is sent again.
    let opened = world.open(1, 1, 11).unwrap();
    assert_eq!(opened, Opened { session: id, resumed: true, executed: 2, replaces: None });
    let again: Vec<u64> = world.sessions.unacknowledged(id).map(|answer| answer.number).collect();
    assert_eq!(again, [2]);
    assert_eq!(world.sessions.acknowledge(id, 3), Err(Violation::Acknowledged { answers: 3, sent: 2 }));
    assert_eq!(world.sessions.acknowledge(id, 1), Ok(()), "as before");
    assert_eq!(world.sessions.acknowledge(id, 2), Ok(()));
    assert_eq!((world.sessions.unacknowledged(id).count(), world.sessions.bytes()), (0, 0));
    assert_eq!(world.table.value(b"n"), Some("2".into()));
}

#[test]
fn a_newer_connection_takes_the_session_over() {
    let mut world = World::new();
    let id = world.open(1, 0, 10).unwrap().session;
    assert_eq!(world.open(1, 0, 11).unwrap().replaces, Some(10));
    world.lose(id, 10); // the old connection's end
    assert_eq!(world.ask(id, 1, wait("k")), Ok(vec![(1, Status::Parked)]));
    assert!(world.sessions.sessions[id].as_ref().unwrap().slot == Some(11));
}

#[test]
fn a_client_that_has_other_answers_than_the_session_gets_a_new_one() {
    let mut world = World::new();
    let id = world.open(1, 0, 10).unwrap().session;
    world.ask(id, 1, wait("k")).unwrap();
    let opened = world.open(1, 5, 11).unwrap();
    assert!(!opened.resumed && opened.executed == 0 && opened.replaces == Some(10));
    assert_eq!((world.sessions.count(), world.table.waiters_count()), (1, 0));
}

#[test]
fn a_wait_is_joined_only_while_no_key_was_seen() {
    let mut world = World::new();
    let id = world.open(1, 0, 10).unwrap().session;
    let two = || vec![Bytes::from(b"a".as_slice()), b"b".as_slice().into()];
    let set = |name: &'static str| {
        Ask::Call(Request::Set { key: name.as_bytes().into(), value: b"".as_slice().into() })
    };
    let delete = |name: &'static str| Ask::Call(Request::Delete { key: name.as_bytes().into() });
    assert_eq!(world.ask(id, 1, Ask::Call(Request::Wait { keys: two() })), Ok(vec![(1, Status::Parked)]));
    assert_eq!(world.ask(id, 2, Ask::Join(1, two())), Ok(vec![(2, Status::Joined)]));
    world.ask(id, 3, set("a")).unwrap();
    world.ask(id, 4, delete("a")).unwrap();
    // The first wait has seen `a`, a later one has not.
    assert_eq!(world.ask(id, 5, Ask::Join(1, two())), Ok(vec![(5, Status::Parked)]));
    assert_eq!(world.ask(id, 6, set("b")), Ok(vec![(1, Status::Done), (6, Status::Done)]));
    assert_eq!(world.ask(id, 7, Ask::Join(1, two())), Ok(vec![(7, Status::Parked)]), "it has ended");
    assert_eq!(world.ask(id, 8, set("a")), Ok(vec![(5, Status::Done), (7, Status::Done), (8, Status::Done)]));
    assert_eq!(world.ask(id, 9, Ask::Join(5, two())), Ok(vec![(9, Status::Done)]), "both exist");
}

/// The promise in the newest answer.
fn promise_of(world: &World, id: SessionId) -> u64 {
    match world.sessions.unacknowledged(id).filter(|answer| answer.status == Status::One).last() {
        Some(Answer { body: Body::Reply(Response::Number(number)), .. }) => *number as u64,
        other => panic!("{other:?}"),
    }
}

#[test]
fn an_item_is_promised_to_one_client_of_a_wait_until_the_relay_asks_for_something_else() {
    let mut world = World::new();
    let id = world.open(1, 0, 10).unwrap().session;
    for number in 1..=2 {
        assert_eq!(world.ask(id, number, wait("q")), Ok(vec![(number, Status::Parked)]));
    }
    assert_eq!(world.ask(id, 3, push("q")), Ok(vec![(1, Status::One), (3, Status::Done)]));
    let first = promise_of(&world, id);
    // The wait goes on, behind the other one. A client that arrives now finds an item in the queue.
    assert_eq!(world.table.waiters_count(), 2);
    assert_eq!(world.ask(id, 4, Ask::Join(1, keys("q"))), Ok(vec![(4, Status::Done)]));
    assert_eq!(world.ask(id, 5, Ask::Leave(first)), Ok(vec![(2, Status::One)]), "the next one");
    let second = promise_of(&world, id);
    let get = || Request::Get { key: b"k".as_slice().into() };
    assert_eq!(
        world.ask(id, 6, Ask::CallAfter(second, get())),
        Ok(vec![(1, Status::One), (6, Status::Done)])
    );
    let third = promise_of(&world, id);
    let pop = || Request::QueuePop { key: b"q".as_slice().into() };
    assert_eq!(world.ask(id, 7, Ask::CallAfter(third, pop())), Ok(vec![(7, Status::Done)]));
    assert_eq!(world.ask(id, 8, Ask::CallAfter(third, pop())), Ok(vec![(8, Status::Done)]), "it is settled");
    for (number, wait) in [(9, 1), (10, 2)] {
        assert_eq!(world.ask(id, number, Ask::Leave(wait)), Ok(vec![]));
    }
    let session = world.sessions.sessions[id].as_ref().unwrap();
    assert!(session.waits.is_empty());
    assert_eq!(world.sessions.clients.len(), 1);
    assert_eq!((world.table.queue_items(), world.table.waiters_count(), world.table.bytes()), (0, 0, 0));
}

#[test]
fn items_are_offered_to_others_while_a_session_has_no_connection() {
    let mut world = World::new();
    let (first, second) = (world.open(1, 0, 10).unwrap().session, world.open(2, 0, 20).unwrap().session);
    world.ask(first, 1, wait("q")).unwrap();
    world.ask(first, 2, wait("q")).unwrap();
    world.ask(second, 1, wait("q")).unwrap();
    assert_eq!(
        world.ask(second, 2, push("q")),
        Ok(vec![(1, Status::One), (2, Status::Done)]),
        "of the first"
    );
    let answers = |world: &World, id| {
        world.sessions.unacknowledged(id).map(|a| (a.number, a.status)).collect::<Vec<_>>()
    };
    world.lose(first, 10);
    assert_eq!(answers(&world, second).last(), Some(&(1, Status::One)), "a client that is there gets it");
    let promise = promise_of(&world, second);
    world.ask(second, 3, Ask::Leave(1)).unwrap();
    world.ask(second, 4, Ask::Leave(promise)).unwrap();
    // No other client waits: the item is there when the first one returns.
    assert_eq!(world.table.queue_items(), 1);
    let before = answers(&world, first).len();
    world.open(1, 0, 11).unwrap();
    let later: Vec<_> = answers(&world, first).split_off(before);
    assert_eq!(later.len(), 1, "one item for one client: {later:?}");
    assert_eq!(later[0].1, Status::One);
    assert_eq!(world.table.waiters_count(), 2);
}

#[test]
fn sessions_expire_and_make_room_for_others() {
    let mut world = World::new();
    for token in 1..=3 {
        let id = world.open(token, 0, token.into()).unwrap().session;
        world.ask(id, 1, wait("k")).unwrap();
    }
    assert_eq!(world.open(4, 0, 4), Err(Violation::TooMany { limit: 3 }));
    world.lose(0, 1);
    assert!(world.open(4, 0, 4).is_ok(), "one without a connection makes room");
    assert_eq!((world.sessions.count(), world.table.waiters_count()), (3, 2));
    world.lose(1, 2);
    let mut replies = Replies::new();
    world.sessions.expire(world.now + Duration::from_secs(59), &mut world.table, &mut replies);
    assert_eq!(world.sessions.count(), 3);
    world.sessions.expire(world.now + Duration::from_secs(60), &mut world.table, &mut replies);
    assert_eq!((world.sessions.count(), world.table.waiters_count()), (2, 1));
    assert!(world.open(2, 0, 5).is_ok_and(|opened| !opened.resumed));
}

#[test]
fn a_client_that_never_acknowledges_is_refused() {
    let mut world = World::new();
    let id = world.open(1, 0, 10).unwrap().session;
    let value = vec![7; 1 << 20];
    let refused = (1..1000).find_map(|number| {
        let queue = Bytes::from(b"q".as_slice());
        let ask = match number % 2 {
            1 => Request::QueuePush { key: queue, value: value.as_slice().into() },
            _ => Request::QueuePop { key: queue },
        };
        world.ask(id, number, Ask::Call(ask)).err().map(|violation| (number, violation))
    });
    let (number, violation) = refused.expect("it is refused");
    assert!(matches!(violation, Violation::Unacknowledged { .. }), "{violation}");
    assert!((120..140).contains(&number), "refused at request {number}");
}

#[test]
fn arrivals_together_are_as_arrivals_one_by_one() {
    let mut world = World::new();
    let id = world.open(1, 0, 10).unwrap().session;
    let arrive = |count| Ask::Arrive { count, key: b"b".as_slice().into(), world: 5 };
    assert_eq!(world.ask(id, 1, arrive(2)), Ok(vec![(1, Status::Parked)]));
    assert_eq!(world.table.value(b"b"), Some("2".into()));
    assert_eq!(world.ask(id, 2, arrive(4)), Ok(vec![(1, Status::Done), (2, Status::Done)]));
    assert_eq!(world.table.value(b"b"), Some("6".into()));
}
