//! Byte ranges that are lent: what kernels, copies and system calls work on.
//!
//! A [`Span`] is to memory what `&[Cell<u8>]` is: shared, writable, of one thread. Two spans may overlap or be the same,
//! as the target of an in-place reduction is one of its sources; so no `&mut [u8]` is ever made of one. [`Bytes`] is the
//! read-only kind, and may lie in memory that another process writes: it is read through raw pointers only, never as
//! a Rust reference, and what is read is data, never a length or an index.

use std::marker::PhantomData;
use std::ptr::{self, NonNull};

/// Memory that may be read and written while `'a` lasts.
#[derive(Clone, Copy, Debug)]
pub struct Span<'a> {
    start: NonNull<u8>,
    len: usize,
    lent: PhantomData<&'a std::cell::Cell<u8>>,
}

/// Memory that may be read while `'a` lasts.
#[derive(Clone, Copy, Debug)]
pub struct Bytes<'a> {
    start: NonNull<u8>,
    len: usize,
    lent: PhantomData<&'a std::cell::Cell<u8>>,
}

impl<'a> Span<'a> {
    /// # Safety
    /// `start` is valid for reads and writes of `len` bytes while `'a` lasts, and no Rust reference to them is used
    /// meanwhile.
    pub unsafe fn from_raw(start: NonNull<u8>, len: usize) -> Self {
        Span { start, len, lent: PhantomData }
    }

    /// No bytes.
    pub fn empty() -> Self {
        Span { start: NonNull::dangling(), len: 0, lent: PhantomData }
    }

    /// The bytes of a slice.
    pub fn of(bytes: &'a mut [u8]) -> Self {
        Span { start: NonNull::from(&mut *bytes).cast(), len: bytes.len(), lent: PhantomData }
    }

    /// Its length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Has it no bytes?
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Where it begins.
    pub fn start(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// The part from `from` to `to`.
    ///
    /// # Panics
    /// If it is not within.
    pub fn part(&self, from: usize, to: usize) -> Span<'a> {
        assert!(from <= to && to <= self.len, "{from}..{to} of {} bytes", self.len);
        // SAFETY: `from <= len` was asserted, so the pointer stays within the memory lent.
        Span { start: unsafe { self.start.add(from) }, len: to - from, lent: PhantomData }
    }

    /// The same memory, to be read only.
    pub fn bytes(&self) -> Bytes<'a> {
        Bytes { start: self.start, len: self.len, lent: PhantomData }
    }

    /// Copies `source` here; both may overlap.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn copy_from(&self, source: Bytes<'_>) {
        assert_eq!(self.len, source.len, "copied chunks are equally long");
        // SAFETY: both are valid for `len` bytes by the contract of `from_raw`; `copy` allows overlap.
        unsafe { ptr::copy(source.start.as_ptr(), self.start.as_ptr(), self.len) };
    }
}

/// Do lines that one core wrote reach another quicker through memory than from its cache?
///
/// So it is on AMD's EPYC, whose cores share a cache in small groups only: on two cores of one, streaming copies took an
/// all-reduce of 256 KiB from 153 to 28 µs where the cores were far from each other, and from 49 to 31 µs where they were
/// near; reading a peer's memory in place took 138 and 43 µs. On other processors lines go from cache to cache.
pub fn prefers_streaming() -> bool {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        static AMD: std::sync::OnceLock<bool> = std::sync::OnceLock::new();
        *AMD.get_or_init(|| {
            let leaf = std::arch::x86_64::__cpuid(0);
            let vendor = [leaf.ebx, leaf.edx, leaf.ecx].map(u32::to_le_bytes);
            vendor.as_flattened() == b"AuthenticAMD"
        })
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    false
}

impl Span<'_> {
    /// As [`Span::copy_from`], past the caches: for bytes that another core reads next.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn stream_from(&self, source: Bytes<'_>) {
        assert_eq!(self.len, source.len, "copied chunks are equally long");
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        if self.start.as_ptr().addr().is_multiple_of(64) && self.len >= 64 {
            let whole = self.len / 64 * 64;
            // SAFETY: both are valid for `len` bytes, the target is aligned, and every x86-64 has SSE2.
            unsafe { stream(self.start.as_ptr(), source.start.as_ptr(), whole) };
            return self.part(whole, self.len).copy_from(source.part(whole, self.len));
        }
        self.copy_from(source);
    }
}

/// # Safety
/// Both are valid for `len` bytes, a multiple of 64, and `target` is aligned to 16.
#[cfg(all(target_arch = "x86_64", not(miri)))]
unsafe fn stream(target: *mut u8, source: *const u8, len: usize) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};
    for at in (0..len).step_by(64) {
        // SAFETY: 64 bytes from `at` are within both, by the caller's promise.
        unsafe {
            let from = source.add(at).cast::<__m128i>();
            let to = target.add(at).cast::<__m128i>();
            let line = [0, 1, 2, 3].map(|word| _mm_loadu_si128(from.add(word)));
            for (word, value) in line.into_iter().enumerate() {
                _mm_stream_si128(to.add(word), value);
            }
        }
    }
    // SAFETY: every x86-64 has it. Streamed stores are not ordered by the release of a stamp.
    unsafe { _mm_sfence() };
}

impl<'a> Bytes<'a> {
    /// # Safety
    /// `start` is valid for reads of `len` bytes while `'a` lasts.
    pub unsafe fn from_raw(start: NonNull<u8>, len: usize) -> Self {
        Bytes { start, len, lent: PhantomData }
    }

    /// The bytes of a slice.
    pub fn of(bytes: &'a [u8]) -> Self {
        Bytes { start: NonNull::from(bytes).cast(), len: bytes.len(), lent: PhantomData }
    }

    /// Its length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Has it no bytes?
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Where it begins.
    pub fn start(&self) -> *const u8 {
        self.start.as_ptr()
    }

    /// The part from `from` to `to`.
    ///
    /// # Panics
    /// If it is not within.
    pub fn part(&self, from: usize, to: usize) -> Bytes<'a> {
        assert!(from <= to && to <= self.len, "{from}..{to} of {} bytes", self.len);
        // SAFETY: `from <= len` was asserted, so the pointer stays within the memory lent.
        Bytes { start: unsafe { self.start.add(from) }, len: to - from, lent: PhantomData }
    }

    /// A copy.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut copy = vec![0; self.len];
        Span::of(&mut copy).copy_from(*self);
        copy
    }
}
