//! Who called: the return addresses on this thread's stack, without their names.
//!
//! Looking up the names takes a hundred microseconds, collecting the addresses about one. So callers keep the names of
//! addresses that they have looked up before.

use std::ffi::{c_int, c_void};

/// What is asked about each frame: the unwinder's word on it, and the asker's own.
type Visit = extern "C" fn(frame: *mut c_void, found: *mut c_void) -> c_int;

// Of the unwinder that every Rust program on Linux has, for its panics.
unsafe extern "C" {
    fn _Unwind_Backtrace(visit: Visit, found: *mut c_void) -> c_int;
    fn _Unwind_GetIP(frame: *mut c_void) -> usize;
}

const GO_ON: c_int = 0; // _URC_NO_REASON
const ENOUGH: c_int = 4; // _URC_NORMAL_STOP

struct Found<'a> {
    addresses: &'a mut [usize],
    count: usize,
}

/// Writes the addresses, the innermost first, as many as there is room for. Returns how many.
#[inline(never)]
pub fn return_addresses(addresses: &mut [usize]) -> usize {
    let mut found = Found { addresses, count: 0 };
    // SAFETY: `visit` has the type that the unwinder calls, and unwinds through nothing itself; `found` outlives the call, which
    // hands it to `visit` only.
    unsafe { _Unwind_Backtrace(visit, (&raw mut found).cast()) };
    found.count
}

extern "C" fn visit(frame: *mut c_void, found: *mut c_void) -> c_int {
    // SAFETY: `return_addresses` passed a pointer to its own `Found`, and uses it again only when the unwinder has returned.
    let found = unsafe { &mut *found.cast::<Found<'_>>() };
    let Some(place) = found.addresses.get_mut(found.count) else { return ENOUGH };
    // SAFETY: the unwinder lends the frame for the time of this call.
    *place = unsafe { _Unwind_GetIP(frame) };
    found.count += 1;
    GO_ON
}

#[cfg(all(test, not(miri)))] // Miri calls no foreign functions.
mod tests {
    use std::hint::black_box;

    use super::*;

    fn addresses() -> Vec<usize> {
        let mut room = [0; 256];
        let count = return_addresses(&mut room);
        room[..count].to_vec()
    }

    #[test]
    fn the_same_call_has_the_same_addresses_and_another_has_others() {
        let mut twice = Vec::new();
        while twice.len() < black_box(2) {
            twice.push(addresses()); // from one place: `black_box` keeps the compiler from unrolling the loop
        }
        assert!(twice[0].len() > 2 && twice[0][..2].iter().all(|&address| address != 0), "{twice:?}");
        assert_eq!(twice[0], twice[1]);
        assert_ne!(twice[0], addresses());
    }

    #[test]
    fn no_more_are_written_than_there_is_room_for() {
        let all = addresses().len();
        let mut room = [0; 3];
        assert_eq!(return_addresses(&mut room), 3.min(all));
        assert_eq!(return_addresses(&mut []), 0);
    }
}
