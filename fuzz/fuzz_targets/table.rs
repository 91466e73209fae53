//! Commands of several clients, as decoded from any bytes, applied to a table of small limits.
//!
//! The table never panics. It answers only clients that are connected, and each wait at most once. It stays within its limits.
//! When all clients have left and all keys are deleted, it holds nothing.

#![no_main]

use std::collections::HashSet;
use std::time::{Duration, Instant};

use libfuzzer_sys::fuzz_target;
use tenfold_store::wire::{Command, Decoded, Scan, decode};
use tenfold_store::{
    ClientId, MessageLimits, Operation, Refusal, Replies, Request, Response, Table, TableLimits,
};

const CLIENTS: usize = 4;

fuzz_target!(|data: &[u8]| {
    let Some((&room, mut stream)) = data.split_first() else { return };
    let mut limits = TableLimits::default();
    (limits.keys, limits.bytes, limits.queue_items) = (12, 256 + 32 * usize::from(room), 10);
    let mut message = MessageLimits::default();
    (message.key, message.value, message.keys, message.request) = (64, 256, 16, 1024);

    let mut table = Table::new(limits);
    let mut now = Instant::now();
    let mut waiting: HashSet<ClientId> = HashSet::new();
    let mut queues: HashSet<Vec<u8>> = HashSet::new();
    // Replies of clients that do not read: they hold long values.
    let mut unread: Replies = Vec::new();

    while let Some((&who, rest)) = stream.split_first() {
        let client = ClientId(usize::from(who) % CLIENTS);
        let mut replies: Replies = Vec::new();
        stream = rest;
        if who >= 0xf0 {
            table.forget(client, &mut replies);
            waiting.remove(&client);
            hand_out(&mut waiting, None, replies, &mut unread);
            continue;
        }
        let Ok(Decoded::Whole(command, length)) = decode(stream, &message, &mut Scan::default()) else {
            break;
        };
        stream = &stream[length..];
        now += Duration::from_millis(1);
        match command {
            Command::Call(request) => {
                let operation = request.operation();
                let waits = matches!(operation, Operation::Wait | Operation::Barrier);
                if let Request::QueuePush { key, .. } = &request {
                    queues.insert(key.to_vec());
                }
                let (keys, items) = (table.keys(), table.queue_items());
                let applied = table.apply(client, request, now, &mut replies);
                let answered = replies.iter().filter(|(to, _)| *to == client).count();
                match applied {
                    Ok(()) if waits && answered == 0 => assert!(waiting.insert(client)),
                    Ok(()) => assert!(answered >= 1, "{operation:?} is answered"),
                    Err(refusal) => {
                        assert_eq!((table.keys(), table.queue_items()), (keys, items), "{refusal:?}");
                        if refusal == Refusal::AlreadyWaiting {
                            assert!(waiting.contains(&client));
                        }
                    }
                }
                hand_out(&mut waiting, Some((client, operation)), replies, &mut unread);
            }
            Command::CancelWait => {
                assert_eq!(table.cancel(client, &mut replies), waiting.remove(&client));
                hand_out(&mut waiting, None, replies, &mut unread);
            }
            Command::Info => {
                assert_eq!(table.waiters().len(), waiting.len());
                unread.clear(); // all clients read
                table.sweep();
            }
            // The table does not see these: they belong to connections and sessions.
            Command::Validate { .. }
            | Command::Ping { .. }
            | Command::Session(_)
            | Command::Numbered { .. }
            | Command::Acknowledge { .. }
            | Command::Bye => {}
        }
        assert!(table.keys() <= limits.keys && table.queue_items() <= limits.queue_items);
        assert!(table.bytes() <= limits.bytes, "{} of {}", table.bytes(), limits.bytes);
        assert_eq!(table.waiters_count(), waiting.len());
    }

    let mut replies: Replies = Vec::new();
    (0..CLIENTS).for_each(|client| table.forget(ClientId(client), &mut replies));
    assert_eq!(table.waiters_count(), 0);
    drop((unread, replies));
    table.sweep();
    let mut ask = |request: Request<'_>| {
        let mut replies = Vec::new();
        table
            .apply(ClientId(CLIENTS), request, now, &mut replies)
            .expect("reading and deleting is never refused");
        replies.pop().expect("it is answered").1
    };
    let Response::Keys(keys) = ask(Request::ListKeys) else { panic!("keys were asked for") };
    for key in keys {
        assert_eq!(ask(Request::Delete { key: (&*key).into() }), Response::Deleted(true));
    }
    for key in &queues {
        while ask(Request::QueuePop { key: key.into() }) != Response::Popped(None) {}
    }
    table.sweep(); // the list of keys held their names while they were deleted
    assert_eq!((table.keys(), table.queue_items(), table.bytes()), (0, 0, 0));
});

/// Notes which waits ended. An answer to a client that does not wait and has not asked is a mistake.
fn hand_out(
    waiting: &mut HashSet<ClientId>,
    asker: Option<(ClientId, Operation)>,
    replies: Replies,
    unread: &mut Replies,
) {
    for (client, response) in replies {
        match asker {
            // A wait that is over immediately is answered beside one that is pending, and does not end it.
            Some((asker, Operation::Wait)) if client == asker => {}
            // Its own write may have ended its own wait.
            Some((asker, _)) if client == asker && response != Response::Ready => {}
            Some((asker, Operation::Barrier)) if client == asker => {}
            _ => {
                assert_eq!(response, Response::Ready);
                assert!(waiting.remove(&client), "an answer to {client:?}, who does not wait");
            }
        }
        unread.push((client, response));
    }
}
