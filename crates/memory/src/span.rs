//! Byte ranges that somebody lends: what kernels, copies and system calls work on.
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

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

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

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

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

    pub fn to_vec(&self) -> Vec<u8> {
        let mut copy = vec![0; self.len];
        Span::of(&mut copy).copy_from(*self);
        copy
    }
}
