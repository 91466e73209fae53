//! Any bytes to both ends of a session: to a server from several connections, to a relay from its clients and its server.
//!
//! Neither end panics. The server executes each numbered request once, stays within its limits, and holds nothing after all have
//! left. A client of the relay gets no reply that it has not asked for. What the server says first is read without panic, and
//! encodes to the very bytes it came from. `crates/store/src/fuzzing.rs` says how the scripts are played.

#![no_main]

use libfuzzer_sys::fuzz_target;
use tenfold_store::fuzzing::{relay, serve};
use tenfold_store::wire::{Answer, Welcome};

// The first byte chooses the part, the rest is its input.
fuzz_target!(|data: &[u8]| {
    let Some((&part, data)) = data.split_first() else { return };
    match part % 3 {
        0 => serve(data),
        1 => relay(data),
        _ => heads(data),
    }
});

fn heads(data: &[u8]) {
    if let Some((head, rest)) = data.split_first_chunk::<{ Welcome::HEAD }>() {
        let (version, length) = Welcome::decode_head(*head);
        if let Some(welcome) = rest.get(..length).and_then(|body| Welcome::decode(version, body)) {
            let mut again = Vec::new();
            welcome.encode(&mut again);
            // A welcome may be longer than this version writes.
            assert_eq!((&again[..2], &again[4..]), (&data[..2], &data[4..again.len()]));
        }
    }
    if let Some(head) = data.first_chunk::<{ Answer::HEAD }>()
        && let Some((number, status, length)) = Answer::decode_head(head)
    {
        assert_eq!(number.to_le_bytes(), head[..8]);
        assert_eq!(status as u8, head[8]);
        assert_eq!(length.to_le_bytes(), head[9..]);
    }
}
