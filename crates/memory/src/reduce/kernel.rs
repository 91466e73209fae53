//! The loops: a block of elements of each source is loaded, combined in registers, and written.
//!
//! All loads of a block come before its store, so the target may be one of the sources, and the compiler needs no proof
//! that they are apart to use vectors. Blocks shrink towards the end: the same code with fewer elements.

use super::operation::Operation;
use super::storage::Storage;
use crate::span::Bytes;

/// Combines `sources`, each of so many bytes, into the target.
///
/// # Safety
/// The target is valid for writes and the sources for reads of that many bytes, a whole number of elements; the target
/// begins where a source begins or overlaps none; and the processor has the instructions of the kernel's level.
pub(super) type Combine = unsafe fn(*mut u8, &[Bytes<'_>], usize, Scale);

/// Multiplies the elements of a source with a factor.
///
/// # Safety
/// As for [`Combine`], with one source.
pub(super) type Prepare = unsafe fn(*mut u8, *const u8, usize, f64);

/// What happens to a combined element before it is rounded and written.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Scale {
    Keep,
    Multiply(f64),
    Divide(f64),
}

impl Scale {
    /// Division by a power of two is the same as multiplication by its inverse, to the last bit, and several times
    /// faster. For other divisors the inverse is not exact.
    pub(super) fn divide(divisor: usize) -> Scale {
        let exact = divisor as f64;
        if divisor.is_power_of_two() { Scale::Multiply(1.0 / exact) } else { Scale::Divide(exact) }
    }
}

/// # Safety
/// As for [`Combine`].
#[inline(always)]
pub(super) unsafe fn combine<S: Storage, O: Operation<S::Wide>>(
    target: *mut u8,
    sources: &[Bytes<'_>],
    bytes: usize,
    scale: Scale,
) {
    // SAFETY: passed on as it is. Two sources are the common case, and a known number unrolls the loop over them.
    unsafe {
        match *sources {
            [first, second] => blocks::<S, O>(target, &[first, second], bytes, scale),
            _ => blocks::<S, O>(target, sources, bytes, scale),
        }
    }
}

/// # Safety
/// As for [`Combine`].
#[inline(always)]
unsafe fn blocks<S: Storage, O: Operation<S::Wide>>(
    target: *mut u8,
    sources: &[Bytes<'_>],
    bytes: usize,
    scale: Scale,
) {
    let count = bytes / size_of::<S::Stored>();
    let mut done = 0;
    // SAFETY: each block ends before `count`; the rest is passed on as it is.
    unsafe {
        while count - done >= 32 {
            block::<S, O, 32>(target, sources, done, scale);
            done += 32;
        }
        while count - done >= 8 {
            block::<S, O, 8>(target, sources, done, scale);
            done += 8;
        }
        while done < count {
            block::<S, O, 1>(target, sources, done, scale);
            done += 1;
        }
    }
}

/// Combines the `N` elements that come after the first `done`.
///
/// # Safety
/// As for [`Combine`], and these elements are within.
#[inline(always)]
unsafe fn block<S: Storage, O: Operation<S::Wide>, const N: usize>(
    target: *mut u8,
    sources: &[Bytes<'_>],
    done: usize,
    scale: Scale,
) {
    // SAFETY: the elements are within the sources; an unaligned read of an array needs no more.
    let load = |source: Bytes<'_>| unsafe {
        S::widen_all(source.start().cast::<S::Stored>().add(done).cast::<[S::Stored; N]>().read_unaligned())
    };
    let mut combined = load(sources[0]);
    for source in &sources[1..] {
        let next = load(*source);
        for i in 0..N {
            combined[i] = O::apply(combined[i], next[i]);
        }
    }
    if scale != Scale::Keep {
        for value in &mut combined {
            *value = S::scale(*value, scale);
        }
    }
    // SAFETY: the elements are within the target.
    unsafe {
        let place = target.cast::<S::Stored>().add(done).cast::<[S::Stored; N]>();
        place.write_unaligned(S::narrow_all(combined));
    }
}

/// # Safety
/// As for [`Prepare`].
#[inline(always)]
pub(super) unsafe fn prepare<S: Storage, O: Operation<S::Wide>>(
    target: *mut u8,
    source: *const u8,
    bytes: usize,
    factor: f64,
) {
    let start = std::ptr::NonNull::new(source.cast_mut()).expect("spans are not null");
    // SAFETY: the caller lends the source for this call; the rest is passed on as it is.
    unsafe { blocks::<S, O>(target, &[Bytes::from_raw(start, bytes)], bytes, Scale::Multiply(factor)) }
}
