//! Slices that are lent to operations for the length of a call.
//!
//! The borrow checker knows how long a slice is borrowed, but an operation keeps its views in structures without
//! lifetimes. [`lend`] joins the two as `std::thread::scope` does for threads: it counts the views of all slices that
//! were lent, and returns only when all of them are dropped. So nothing that safe code does with a view can make it
//! outlive its slice. Code that keeps a view for good (`mem::forget`, a view in its own result) makes `lend` wait for good.

#![expect(
    clippy::disallowed_methods,
    reason = "waits for views of another thread, which has no event for that"
)]

use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::{BufferView, DType, Element};

/// Looks for views that another thread is about to drop, before they are demanded back.
const LOOKS: u32 = 64;

/// The pause between two demands.
const PAUSE: Duration = Duration::from_millis(1);

/// Makes views of slices. See [`lend`].
#[derive(Debug)]
pub struct Lender<'env> {
    /// Views that are not dropped yet.
    views: AtomicUsize,
    /// Slices of bools that are lent to be written: start and length.
    bools: Mutex<Vec<(SendPointer, usize)>>,
    /// Invariant: a shorter lifetime would let slices in that end before [`lend`] returns.
    env: PhantomData<&'env mut &'env ()>,
}

#[derive(Debug)]
struct SendPointer(NonNull<u8>);

// SAFETY: points into a slice of bools, which may be sent; only the thread that runs `lend` uses it.
unsafe impl Send for SendPointer {}

/// Runs `body`, which may lend slices to operations, and returns once all views of them are dropped; also if `body`
/// panics.
///
/// Normally all views are dropped by the time `body` returns. If not, `demand` is called again and again until they are:
/// it should make whatever holds them let go.
///
/// ```
/// use tenfold_memory::{Bytes, lend};
///
/// let mut values = [1_u8, 2, 3];
/// lend(
///     |lender| {
///         let view = lender.write(&mut values);
///         view.span().part(0, 1).copy_from(Bytes::of(&[7]));
///     },
///     || {},
/// );
/// assert_eq!(values, [7, 2, 3]);
/// ```
///
/// A slice that ends before `lend` returns is refused:
///
/// ```compile_fail
/// tenfold_memory::lend(
///     |lender| {
///         let mut values = [1_u8, 2, 3];
///         drop(lender.write(&mut values));
///     },
///     || {},
/// );
/// ```
pub fn lend<'env, R>(body: impl FnOnce(&Lender<'env>) -> R, demand: impl Fn()) -> R {
    let lender = Lender { views: AtomicUsize::new(0), bools: Mutex::new(Vec::new()), env: PhantomData };
    // Caught, because nothing may leave this function before all views are dropped.
    let outcome = catch_unwind(AssertUnwindSafe(|| body(&lender)));
    lender.get_back(demand);
    outcome.unwrap_or_else(|panic| resume_unwind(panic))
}

impl<'env> Lender<'env> {
    /// Lends a slice that the operation may write.
    pub fn write<T: Element>(&self, slice: &'env mut [T]) -> BufferView {
        let (start, elements) = (NonNull::from(&mut *slice).cast(), slice.len());
        if T::DTYPE == DType::Bool {
            let mut bools = self.bools.lock().unwrap_or_else(PoisonError::into_inner);
            bools.push((SendPointer(start), elements));
        }
        self.view::<T>(start, elements, true)
    }

    /// Lends a slice that the operation only reads.
    pub fn read<T: Element>(&self, slice: &'env [T]) -> BufferView {
        self.view::<T>(NonNull::from(slice).cast(), slice.len(), false)
    }

    #[inline]
    fn view<T: Element>(&self, start: NonNull<u8>, elements: usize, is_writable: bool) -> BufferView {
        self.views.fetch_add(1, Ordering::Relaxed);
        // SAFETY: a slice of `elements` elements, which is borrowed until `lend` returns: exclusively if it may be written.
        // `lend` keeps the counter until then, and does not return before the view is dropped.
        unsafe { BufferView::borrowed(start, elements, T::DTYPE, is_writable, NonNull::from(&self.views)) }
    }

    fn get_back(&self, demand: impl Fn()) {
        let mut looks = 0;
        while self.views.load(Ordering::Acquire) != 0 {
            if looks < LOOKS {
                looks += 1;
                std::thread::yield_now();
                continue;
            }
            if let Err(panic) = catch_unwind(AssertUnwindSafe(&demand)) {
                std::mem::forget(panic); // dropping it may panic again
            }
            std::thread::sleep(PAUSE);
        }
        for (start, len) in self.bools.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            // SAFETY: the slice is borrowed exclusively until `lend` returns, and no view of it is left.
            let bytes = unsafe { std::slice::from_raw_parts_mut(start.0.as_ptr(), len) };
            // A peer may have sent other bytes than 0 and 1, which no Rust `bool` may have.
            bytes.iter_mut().for_each(|byte| *byte = u8::from(*byte != 0));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::sync::mpsc::channel;

    use super::*;
    use crate::Bytes;

    fn set(view: &BufferView, place: usize, value: u8) {
        view.span().part(place, place + 1).copy_from(Bytes::of(&[value]));
    }

    #[test]
    fn a_slice_is_written_in_place_and_another_read() {
        let (mut values, input) = ([1_u8, 2, 3], [9_u8]);
        let elements = lend(
            |lender| {
                let (target, source) = (lender.write(&mut values), lender.read(&input));
                target.span().part(2, 3).copy_from(source.bytes());
                target.elements()
            },
            || panic!("all views are dropped"),
        );
        assert_eq!((elements, values), (3, [1, 2, 9]));
    }

    #[test]
    fn the_call_returns_when_another_thread_has_dropped_its_view() {
        let mut values = [0_u8; 4];
        let is_demanded = AtomicBool::new(false);
        let (sender, receiver) = channel::<BufferView>();
        std::thread::scope(|threads| {
            let is_demanded = &is_demanded;
            threads.spawn(move || {
                let view = receiver.recv().unwrap();
                while !is_demanded.load(Ordering::Acquire) {
                    std::thread::yield_now();
                }
                set(&view, 3, 5);
            });
            lend(
                |lender| sender.send(lender.write(&mut values)).unwrap(),
                || is_demanded.store(true, Ordering::Release),
            );
            assert_eq!(values, [0, 0, 0, 5]); // written before the call returned
        });
    }

    #[test]
    fn a_panic_goes_on_once_the_views_are_dropped() {
        let mut values = [0_u8];
        let kept = Mutex::new(None);
        let caught = catch_unwind(AssertUnwindSafe(|| {
            lend(
                |lender| {
                    *kept.lock().unwrap() = Some(lender.write(&mut values));
                    panic!("on purpose");
                },
                || {
                    if let Some(view) = kept.lock().unwrap().take() {
                        set(&view, 0, 1);
                        drop(view);
                        panic!("a demand that panics is tried again");
                    }
                },
            );
        }));
        assert_eq!(caught.unwrap_err().downcast_ref(), Some(&"on purpose"));
        assert_eq!(values, [1]);
    }

    #[test]
    fn bools_are_bools_whatever_was_written() {
        let mut values = [false, true, false];
        lend(
            |lender| {
                let view = lender.write(&mut values);
                set(&view, 0, 0xff);
                set(&view, 1, 0);
            },
            || {},
        );
        assert_eq!(values, [true, false, false]);
    }

    #[test]
    #[should_panic(expected = "lent only to be read")]
    fn what_is_lent_to_be_read_cannot_be_written() {
        let values = [1_u8];
        lend(|lender| set(&lender.read(&values), 0, 2), || {});
    }

    #[test]
    fn an_empty_slice_is_fine() {
        let mut none: [f64; 0] = [];
        assert!(lend(|lender| lender.write(&mut none).span().is_empty(), || {}));
    }
}
