//! An allocator that counts, for tests that nothing is allocated on a hot path.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    static COUNT: Cell<u64> = const { Cell::new(0) };
}

/// The system's allocator, and how often each thread asked it for memory.
#[derive(Debug)]
pub struct CountingAllocator;

impl CountingAllocator {
    /// How often the calling thread has asked for memory.
    pub fn count() -> u64 {
        COUNT.with(Cell::get)
    }
}

fn count() {
    // A thread that ends may have no counter any more; nobody asks for it either.
    let _ = COUNT.try_with(|count| count.set(count.get() + 1));
}

// SAFETY: every call is handed to the system's allocator as it is.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller keeps the promises of `GlobalAlloc::alloc`, which are those of `System`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        // SAFETY: as above; `start` came from `System`, because everything does.
        unsafe { System.dealloc(start, layout) }
    }

    unsafe fn realloc(&self, start: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: as above.
        unsafe { System.realloc(start, layout, size) }
    }
}
