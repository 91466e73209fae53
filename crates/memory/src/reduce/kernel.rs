//! The loops: a block of elements of each source is loaded, combined in registers, and written.
//!
//! All loads of a block come before its store, so the target may be one of the sources, and the compiler needs no proof
//! that they are apart to use vectors. Blocks shrink towards the end: the same code with fewer elements.

use std::ptr::NonNull;

use super::operation::Operation;
use super::storage::Storage;
use crate::span::Bytes;

/// Combines `sources`, each of so many bytes, into the target.
///
/// # Safety
/// The target is valid for writes and the sources for reads of that many bytes, a whole number of elements, and the
/// processor has the instructions of the kernel's level.
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
pub(super) unsafe fn combine<V, S, O>(target: *mut u8, sources: &[Bytes<'_>], bytes: usize, scale: Scale)
where
    V: Storage,
    S: Storage,
    O: Operation<V::Wide> + Operation<S::Wide>,
{
    // SAFETY: passed on as it is. Two sources are the common case, and a known number unrolls the loop over them.
    unsafe {
        match *sources {
            [first, second] => sweep::<V, S, O>(target, &[first, second], bytes, scale),
            _ => sweep::<V, S, O>(target, sources, bytes, scale),
        }
    }
}

/// # Safety
/// As for [`Prepare`].
#[inline(always)]
pub(super) unsafe fn prepare<V, S, O>(target: *mut u8, source: *const u8, bytes: usize, factor: f64)
where
    V: Storage,
    S: Storage,
    O: Operation<V::Wide> + Operation<S::Wide>,
{
    let start = NonNull::new(source.cast_mut()).expect("spans are not null");
    // SAFETY: the caller lends the source for this call; the rest is passed on as it is.
    unsafe { sweep::<V, S, O>(target, &[Bytes::from_raw(start, bytes)], bytes, Scale::Multiply(factor)) }
}

/// From the first byte to the last: blocks of four `V`, then single ones, then what is too little for one.
///
/// # Safety
/// As for [`Combine`].
#[inline(always)]
unsafe fn sweep<V, S, O>(target: *mut u8, sources: &[Bytes<'_>], bytes: usize, scale: Scale)
where
    V: Storage,
    S: Storage,
    O: Operation<V::Wide> + Operation<S::Wide>,
{
    let mut from = 0;
    // SAFETY: each block ends within `bytes`; the rest is passed on as it is.
    unsafe {
        while bytes - from >= 4 * V::BYTES {
            block::<V, O, 4>(target, sources, from, scale);
            from += 4 * V::BYTES;
        }
        while bytes - from >= V::BYTES {
            block::<V, O, 1>(target, sources, from, scale);
            from += V::BYTES;
        }
        while from < bytes {
            block::<S, O, 1>(target, sources, from, scale);
            from += S::BYTES;
        }
    }
}

/// Combines `N` vectors of `S`, from byte `from` on.
///
/// # Safety
/// As for [`Combine`], and these bytes are within.
#[inline(always)]
unsafe fn block<S: Storage, O: Operation<S::Wide>, const N: usize>(
    target: *mut u8,
    sources: &[Bytes<'_>],
    from: usize,
    scale: Scale,
) {
    // Plain loops throughout: a closure is compiled by itself, without the level's instructions.
    // SAFETY: the bytes are within the sources and the target.
    unsafe {
        let mut combined = load::<S, N>(&sources[0], from);
        for source in &sources[1..] {
            let next = load::<S, N>(source, from);
            for i in 0..N {
                combined[i] = O::apply(combined[i], next[i]);
            }
        }
        if scale != Scale::Keep {
            for wide in &mut combined {
                *wide = S::scale(*wide, scale);
            }
        }
        for (i, wide) in combined.iter().enumerate() {
            S::store(target.add(from + i * S::BYTES), *wide);
        }
    }
}

/// # Safety
/// The source has `N` vectors of `S`, from byte `from` on.
#[inline(always)]
unsafe fn load<S: Storage, const N: usize>(source: &Bytes<'_>, from: usize) -> [S::Wide; N] {
    // SAFETY: the caller's promise.
    unsafe {
        let mut loaded = [S::load(source.start().add(from)); N];
        for (i, wide) in loaded.iter_mut().enumerate().skip(1) {
            *wide = S::load(source.start().add(from + i * S::BYTES));
        }
        loaded
    }
}
