//! Any bytes, cut anywhere, into the decoder of the store's wire format.
//!
//! Never panics; says the same however the bytes were cut; never waits for more than the limits allow; and a whole
//! message encodes to the very bytes it came from.

#![no_main]

use libfuzzer_sys::fuzz_target;
use tenfold_store::MessageLimits;
use tenfold_store::wire::{Command, Decoded, Malformed, Scan, decode, encode};

/// Small, so that the fuzzer finds both sides of each.
fn limits() -> MessageLimits {
    let mut limits = MessageLimits::default();
    (limits.key, limits.value, limits.keys, limits.request) = (16, 40, 8, 200);
    limits
}

/// Opens a session.
const SESSION: u8 = 0x82;

/// Bytes before a request of a session, at most: opcode, its number, what is asked, and the number of a wait.
const NUMBERS: usize = 1 + 8 + 1 + 8;

#[derive(Debug, PartialEq)]
enum Outcome {
    Whole(Vec<u8>),
    Short,
    UnknownOpcode(u8),
    Hello(usize),
    TooLong,
}

fn outcome(result: Result<Decoded<'_>, Malformed>, bytes: &[u8], limits: &MessageLimits) -> Outcome {
    match result {
        Ok(Decoded::Whole(command, length)) => {
            assert!((1..=bytes.len()).contains(&length));
            let mut again = Vec::new();
            encode(&command, &mut again);
            if matches!(command, Command::Session(_)) {
                // A hello may be longer than this version writes; its length is in bytes 3 and 4.
                assert_eq!((&again[..3], &again[5..]), (&bytes[..3], &bytes[5..again.len()]), "{command:?}");
                again = bytes[..length].to_vec();
            }
            assert_eq!(again, bytes[..length], "{command:?}");
            if let Command::Call(request) = &command {
                assert!(request.keys().len() <= limits.keys);
                assert!(request.keys().iter().all(|key| key.len() <= limits.key));
            }
            Outcome::Whole(again)
        }
        Ok(Decoded::Needs(needs)) => {
            assert!(needs > bytes.len(), "it needs no more than it has");
            // A list may announce one more string than the request may hold, but never ask to wait for it.
            let single = 1 + 3 * 8 + limits.key + 2 * limits.value;
            // A hello may have 4 KiB; a request of a session has its numbers before it.
            let numbered = NUMBERS + single.max(limits.request + 8);
            let longest = if bytes[0] == SESSION { 5 + (4 << 10) } else { numbered };
            assert!(needs <= longest, "{needs} bytes");
            Outcome::Short
        }
        Err(Malformed::Opcode(opcode)) => Outcome::UnknownOpcode(opcode),
        Err(Malformed::Hello(length)) => Outcome::Hello(length),
        Err(Malformed::TooLong { length, limit, .. }) => {
            assert!(length > limit as u64);
            Outcome::TooLong
        }
    }
}

// The first bytes say where to cut, the rest is the stream.
fuzz_target!(|data: &[u8]| {
    let Some((&cuts, data)) = data.split_first() else { return };
    let cuts = usize::from(cuts % 8).min(data.len());
    let (cuts, mut stream) = data.split_at(cuts);
    let limits = limits();
    // Message by message, as a server does.
    while !stream.is_empty() {
        let at_once = outcome(decode(stream, &limits, &mut Scan::default()), stream, &limits);

        let (mut scan, mut seen, mut needs) = (Scan::default(), 0, 0);
        let mut in_parts = Outcome::Short;
        let ends = cuts.iter().map(|cut| usize::from(*cut) + 1).chain([stream.len()]);
        for step in ends {
            seen = (seen + step).min(stream.len());
            if seen < needs {
                continue; // as the server, which does not look before there is enough
            }
            let part = &stream[..seen];
            let result = decode(part, &limits, &mut scan);
            if let Ok(Decoded::Needs(more)) = &result {
                needs = *more;
            }
            in_parts = outcome(result, part, &limits);
            if in_parts != Outcome::Short {
                break;
            }
        }
        assert_eq!(in_parts, at_once);

        let Outcome::Whole(message) = at_once else { return };
        stream = &stream[message.len()..];
    }
});
