//! Is this still the process that made something, or a forked child of it?
//!
//! Asking the kernel for the process number takes a system call; a page that the kernel empties in every child takes a load.

use std::io;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::segment::PAGE;

/// Knows the process in which it was made.
#[derive(Debug)]
pub struct ForkGuard {
    page: NonNull<AtomicU64>,
}

// SAFETY: the page holds one atomic number and belongs to the guard.
unsafe impl Send for ForkGuard {}
// SAFETY: as above.
unsafe impl Sync for ForkGuard {}

impl ForkGuard {
    pub fn new() -> io::Result<Self> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice cannot touch memory of ours.
        let page = unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), PAGE, access, MapFlags::PRIVATE) }?;
        let guard = ForkGuard { page: NonNull::new(page.cast()).ok_or(io::ErrorKind::OutOfMemory)? };
        // SAFETY: the page was just mapped, and the advice changes it only in children.
        unsafe { rustix::mm::madvise(page, PAGE, Advice::LinuxWipeOnFork) }?;
        guard.number().store(1, Ordering::Relaxed);
        Ok(guard)
    }

    /// False in a forked child.
    #[inline]
    pub fn is_same_process(&self) -> bool {
        self.number().load(Ordering::Relaxed) == 1
    }

    fn number(&self) -> &AtomicU64 {
        // SAFETY: mapped by `new` until `drop`, and aligned to a page.
        unsafe { self.page.as_ref() }
    }
}

impl Drop for ForkGuard {
    fn drop(&mut self) {
        // SAFETY: mapped by `new` with this length; nobody else has the address.
        let _ = unsafe { rustix::mm::munmap(self.page.as_ptr().cast(), PAGE) };
    }
}

#[cfg(all(test, not(miri)))] // Miri has no madvise.
mod tests {
    use super::*;

    #[test]
    fn the_process_that_made_it_is_the_same() {
        assert!(ForkGuard::new().unwrap().is_same_process());
    }

    #[test]
    fn a_forked_child_is_not() {
        let guard = ForkGuard::new().unwrap();
        // SAFETY: the child does nothing but a load before it ends at once.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: ends the child without running what belongs to the parent.
            unsafe { libc::_exit(i32::from(guard.is_same_process())) };
        }
        let mut status = -1;
        // SAFETY: waits for our own child, with a place for its status.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0, "the child saw that it is one");
        assert!(guard.is_same_process());
    }
}
