//! Any bytes from other processes to a rank: hellos, control frames, notices, and the headers of messages.
//!
//! The decoders never panic, say the same however the bytes were cut, and what is whole encodes to the very bytes it came from.
//! The rank itself, which hears a script of several connections (`crates/runtime/src/fabric/watch/hostile.rs` says how),
//! never panics, keeps bounded memory for each connection, and never gives up a rank that is alive.

#![no_main]

use std::cell::RefCell;

use libfuzzer_sys::fuzz_target;
use tenfold::fuzzing::{FRAME_MAX, HEADER, HELLO, Rank, frame, header, hello};

thread_local! {
    static RANK: RefCell<Rank> = RefCell::new(Rank::new());
}

// The first byte chooses the part, the rest is its input.
fuzz_target!(|data: &[u8]| {
    let Some((&part, data)) = data.split_first() else { return };
    match part % 4 {
        0 => hellos(data),
        1 => frames(data),
        2 => headers(data),
        _ => RANK.with_borrow_mut(|rank| rank.play(data)),
    }
});

fn hellos(data: &[u8]) {
    let whole = hello(data);
    if let Ok(Some(again)) = &whole {
        assert_eq!(again[..], data[..HELLO]);
    }
    // What is decided by fewer bytes stays decided.
    for length in 0..data.len().min(HELLO) {
        match hello(&data[..length]) {
            Ok(None) => {}
            Ok(Some(_)) => panic!("{length} bytes are not a hello"),
            Err(why) => assert_eq!(whole, Err(why).map_err(|why| longer(&whole, why))),
        }
    }
}

/// A stranger is shown as far as it has spoken, so the text may grow with what has arrived.
fn longer<T>(whole: &Result<T, String>, why: String) -> String {
    match whole {
        Err(full)
            if full.starts_with("it is not a tenfold process")
                && why.starts_with("it is not a tenfold process") =>
        {
            full.clone()
        }
        _ => why,
    }
}

fn frames(data: &[u8]) {
    let mut rest = data;
    loop {
        let whole = frame(rest);
        for length in 0..rest.len() {
            match frame(&rest[..length]) {
                Ok(None) => {}
                part => {
                    assert_eq!(part, whole, "{length} bytes");
                    break;
                }
            }
        }
        let Ok(Some((again, length))) = whole else { return };
        assert!((1..=FRAME_MAX.min(rest.len())).contains(&length));
        assert_eq!(again, rest[..length]);
        rest = &rest[length..];
    }
}

fn headers(data: &[u8]) {
    let Some((bytes, rest)) = data.split_first_chunk::<HEADER>() else { return };
    let len_max = rest.iter().fold(0, |sum, &byte| sum << 8 | usize::from(byte));
    if let Ok((again, length)) = header(bytes, len_max) {
        assert_eq!(again, *bytes);
        assert!(length <= len_max);
    }
}
