//! Is this still the process that made something, or a forked child of it? And which descriptors must such a child not keep?
//!
//! Asking the kernel for the process number takes a system call; a page that the kernel empties in every child takes a load.
//!
//! A child that keeps copies of its parent's streams hides the parent's death from the peers: a stream ends with its last
//! copy. [`NotInherited`] marks a descriptor in a static bitmap, and in every forked child a handler replaces what is marked by a
//! descriptor that leads nowhere. The numbers stay in use, so their owners in the child can close them as usual.

use std::io;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::ptr::{self, NonNull};
use std::sync::Once;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

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
    /// Recognises children that are forked from now on.
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
        // SAFETY: mapped by `new` with this length. No other value has the address.
        let _ = unsafe { rustix::mm::munmap(self.page.as_ptr().cast(), PAGE) };
    }
}

/// Descriptors that can be marked: as many as a process of a usual system may have.
const MARKS: usize = 1 << 20;

/// A bit for each descriptor that forked children must not keep.
static MARKED: [AtomicU64; MARKS / 64] = [const { AtomicU64::new(0) }; MARKS / 64];

/// Words of `MARKED` that were ever used.
static USED: AtomicUsize = AtomicUsize::new(0);

/// Something with a descriptor of which forked children have no working copy.
#[derive(Debug)]
pub struct NotInherited<T: AsFd>(T);

impl<T: AsFd> NotInherited<T> {
    /// A value that forked children give up.
    pub fn new(inner: T) -> Self {
        install();
        if let Some((word, bit)) = place(&inner) {
            USED.fetch_max(word + 1, Ordering::Relaxed);
            MARKED[word].fetch_or(bit, Ordering::Relaxed);
        }
        NotInherited(inner)
    }
}

impl<T: AsFd> Drop for NotInherited<T> {
    fn drop(&mut self) {
        // Before it is closed: afterwards the number may belong to another file.
        if let Some((word, bit)) = place(&self.0) {
            MARKED[word].fetch_and(!bit, Ordering::Relaxed);
        }
    }
}

impl<T: AsFd> From<T> for NotInherited<T> {
    fn from(inner: T) -> Self {
        NotInherited::new(inner)
    }
}

impl<T: AsFd> Deref for NotInherited<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T: AsFd> DerefMut for NotInherited<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.0
    }
}

impl<T: AsFd> AsFd for NotInherited<T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Word and bit of a descriptor, if it can be marked.
fn place(descriptor: &impl AsFd) -> Option<(usize, u64)> {
    let number = usize::try_from(descriptor.as_fd().as_raw_fd()).ok().filter(|number| *number < MARKS)?;
    Some((number / 64, 1 << (number % 64)))
}

type Handler = Option<unsafe extern "C" fn()>;

unsafe extern "C" {
    fn pthread_atfork(prepare: Handler, parent: Handler, child: Handler) -> libc::c_int;
}

/// Has forked children give up what is marked.
fn install() {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        // SAFETY: the handler may run in a forked child at any time: it makes system calls on numbers and uses atomics only.
        // If there is no memory for it, children keep their copies, as they would without it.
        let _ = unsafe { pthread_atfork(None, None, Some(give_up_in_child)) };
    });
}

/// Runs in a forked child, where locks of other threads stay locked: it takes none and allocates nothing.
unsafe extern "C" fn give_up_in_child() {
    let nowhere = || {
        // SAFETY: a system call without pointers.
        unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) }
    };
    let mut substitute = -1;
    for (index, word) in MARKED.iter().enumerate().take(USED.load(Ordering::Relaxed)) {
        let mut bits = word.swap(0, Ordering::Relaxed);
        while bits != 0 {
            let number = (index * 64) as libc::c_int + bits.trailing_zeros() as libc::c_int;
            bits &= bits - 1;
            if substitute < 0 {
                substitute = nowhere();
            }
            // SAFETY: system calls on numbers. This one is marked, so it is open, and its owner in this process only closes it.
            unsafe {
                if substitute >= 0 {
                    libc::dup3(substitute, number, libc::O_CLOEXEC);
                    continue;
                }
                // No descriptor is left for the substitute: this one is given up for it.
                libc::close(number);
                let other = nowhere();
                if other >= 0 && other != number {
                    libc::dup3(other, number, libc::O_CLOEXEC);
                    libc::close(other);
                }
            }
        }
    }
    if substitute >= 0 {
        // SAFETY: made above, and not handed out.
        unsafe { libc::close(substitute) };
    }
}

#[cfg(all(test, not(miri)))] // Miri has no madvise.
mod tests {
    use std::io::Read as _;
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_process_that_made_it_is_the_same() {
        assert!(ForkGuard::new().unwrap().is_same_process());
    }

    #[test]
    fn a_forked_child_is_not() {
        let guard = ForkGuard::new().unwrap();
        // SAFETY: the child only reads a value, then exits.
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

    #[test]
    fn a_stream_ends_with_its_process_although_a_forked_child_lives() {
        let (near, mut far) = UnixStream::pair().unwrap();
        let near = NotInherited::new(near);
        drop(UnixStream::pair().map(|(left, right)| [left, right].map(NotInherited::new)).unwrap());
        let (kept, mut kept_far) = UnixStream::pair().unwrap(); // with the numbers of those that were closed
        let (child_end, life) = UnixStream::pair().unwrap();
        // SAFETY: the child makes system calls only.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let mut byte = 0_u8;
            // SAFETY: the child waits for the parent's word and ends without running what belongs to the parent.
            unsafe {
                libc::close(life.as_raw_fd());
                libc::read(child_end.as_raw_fd(), (&raw mut byte).cast(), 1);
                // Its owner here may still close it.
                let closed = libc::close(near.as_raw_fd());
                libc::_exit(closed);
            }
        }
        drop((near, kept, child_end));
        far.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        assert_eq!(far.read(&mut [0]).expect("the child has no copy of it"), 0);
        kept_far.set_nonblocking(true).unwrap();
        let error = kept_far.read(&mut [0]).expect_err("the child has a copy of what is not marked");
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        drop(life);
        let mut status = -1;
        // SAFETY: waits for our own child, with a place for its status.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0, "the number was still taken");
    }
}
