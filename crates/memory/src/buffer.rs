//! Memory that a tensor lends to one operation, and tensors of our own.
//!
//! A [`BufferView`] is contiguous memory that no other code reads or writes until the view is dropped. It comes from a
//! [`Buffer`] (ours, private or in the shared segment), from a slice that is borrowed for the length of a call (see
//! [`lend`](crate::lend)), or, by `from_raw`, from memory of another library such as PyTorch.

use std::any::Any;
use std::fmt;
use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::fs::SealFlags;
use rustix::mm::ProtFlags;

use crate::segment::{Mapping, memory_file};
use crate::{Block, Bytes, DType, Element, Region, Span};

/// Contiguous elements that are lent to an operation.
///
/// ```
/// use tenfold_memory::{Buffer, DType};
/// let mut buffer = Buffer::from_slice(&[1.0_f32; 3]);
/// let view = buffer.lend();
/// assert_eq!((view.dtype(), view.elements(), view.byte_len()), (DType::F32, 3, 12));
/// assert!(buffer.is_lent());
/// drop(view); // an operation drops it when it is done
/// assert_eq!(buffer.as_slice::<f32>(), [1.0; 3]);
/// ```
pub struct BufferView {
    start: NonNull<u8>,
    elements: usize,
    dtype: DType,
    /// Nothing if the elements lie one after the other.
    strides: Option<Box<Strides>>,
    is_writable: bool,
    owner: Owner,
}

/// Where the elements of a tensor lie that is not contiguous: lengths and steps of its dimensions, in elements.
#[derive(Clone, Debug)]
struct Strides {
    shape: Vec<usize>,
    steps: Vec<isize>,
}

enum Owner {
    /// Kept alive until the view is dropped.
    Kept { _keep: Box<dyn Any + Send> },
    /// A tensor of ours, which is not to be read or lent again meanwhile.
    Buffer(Arc<Memory>),
    /// A borrowed slice, whose lender counts its views.
    Borrowed(NonNull<AtomicUsize>),
}

// SAFETY: the memory belongs to the view alone while it exists, and its owner is `Send`; the counter of a lender is atomic.
unsafe impl Send for BufferView {}

impl BufferView {
    /// # Safety
    /// `start` is valid for reads and writes of `elements` elements of `dtype` until `owner` is dropped. Until this view is
    /// dropped, no other code writes to them or reads what this view writes.
    pub unsafe fn from_raw(
        start: NonNull<u8>,
        elements: usize,
        dtype: DType,
        owner: impl Any + Send,
    ) -> Self {
        let owner = Owner::Kept { _keep: Box::new(owner) };
        BufferView { start, elements, dtype, strides: None, is_writable: true, owner }
    }

    /// A view of elements that do not lie one after the other: `steps[d]` elements apart in dimension `d` of `shape`.
    ///
    /// # Safety
    /// As for [`BufferView::from_raw`], for every element that shape and steps reach from `start`.
    pub unsafe fn from_strided(
        start: NonNull<u8>,
        shape: &[usize],
        steps: &[isize],
        dtype: DType,
        owner: impl Any + Send,
    ) -> Self {
        assert_eq!(shape.len(), steps.len(), "every dimension has a step");
        let elements = shape.iter().product();
        let mut dense = 1;
        let dimensions = shape.iter().zip(steps).rev();
        let contiguous = elements == 0
            || dimensions.into_iter().all(|(len, step)| {
                let fits = *len == 1 || *step == dense;
                dense *= *len as isize;
                fits
            });
        let strides = Strides { shape: shape.to_vec(), steps: steps.to_vec() };
        let strides = (!contiguous).then(|| Box::new(strides));
        let owner = Owner::Kept { _keep: Box::new(owner) };
        BufferView { start, elements, dtype, strides, is_writable: true, owner }
    }

    /// No elements.
    pub fn empty(dtype: DType) -> Self {
        let owner = Owner::Kept { _keep: Box::new(()) };
        BufferView { start: NonNull::dangling(), elements: 0, dtype, strides: None, is_writable: true, owner }
    }

    /// A view of a borrowed slice; `views` counts one less once it is dropped.
    ///
    /// # Safety
    /// Until the view is dropped, `views` exists, `start` is valid for reads of `elements` elements of `dtype`, and no other code
    /// writes to them. If the view is writable, it is valid for writes too, and no other code reads them.
    #[inline]
    pub(crate) unsafe fn borrowed(
        start: NonNull<u8>,
        elements: usize,
        dtype: DType,
        is_writable: bool,
        views: NonNull<AtomicUsize>,
    ) -> Self {
        BufferView { start, elements, dtype, strides: None, is_writable, owner: Owner::Borrowed(views) }
    }

    /// How many elements it has.
    pub fn elements(&self) -> usize {
        self.elements
    }

    /// The type of its elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// How many bytes its elements take.
    pub fn byte_len(&self) -> usize {
        self.elements * self.dtype.size()
    }

    /// Do its elements lie one after the other?
    #[inline]
    pub fn is_contiguous(&self) -> bool {
        self.strides.is_none()
    }

    /// Copies its elements, in order, into contiguous memory.
    ///
    /// # Panics
    /// If `target` is not as long as the elements.
    pub fn pack(&self, target: Span<'_>) {
        self.each_element(target.len(), |element, at| {
            target.part(at, at + element.len()).copy_from(element.bytes());
        });
    }

    /// Sets its elements, in order, from contiguous memory.
    ///
    /// # Panics
    /// If `source` is not as long as the elements, or the view is only for reading.
    pub fn unpack(&self, source: Bytes<'_>) {
        self.check_writable();
        self.each_element(source.len(), |element, at| element.copy_from(source.part(at, at + element.len())));
    }

    /// Calls `action` with every element and its place in contiguous memory; with all at once where they lie together.
    fn each_element(&self, len: usize, action: impl Fn(Span<'_>, usize)) {
        assert_eq!(len, self.byte_len(), "as long as the tensor");
        let Some(strides) = &self.strides else { return action(self.whole(), 0) };
        let size = self.dtype.size();
        let mut place = vec![0; strides.shape.len()];
        for number in 0..self.elements {
            let step: isize = place.iter().zip(&strides.steps).map(|(at, step)| *at as isize * step).sum();
            // SAFETY: an element that shape and steps reach, by the contract of `from_strided`.
            let element = unsafe { Span::from_raw(self.start.offset(step * size as isize), size) };
            action(element, number * size);
            for dimension in (0..place.len()).rev() {
                place[dimension] += 1;
                if place[dimension] < strides.shape[dimension] {
                    break;
                }
                place[dimension] = 0;
            }
        }
    }

    /// All its bytes, to be written.
    ///
    /// # Panics
    /// If it is not contiguous, or only for reading.
    #[inline]
    pub fn span(&self) -> Span<'_> {
        self.check_writable();
        self.whole()
    }

    /// All its bytes, to be read.
    ///
    /// # Panics
    /// If it is not contiguous.
    #[inline]
    pub fn bytes(&self) -> Bytes<'_> {
        self.whole().bytes()
    }

    #[inline]
    fn check_writable(&self) {
        assert!(self.is_writable, "a slice that is lent only to be read is not written");
    }

    /// All its bytes. Callers that write have checked that they may.
    #[inline]
    fn whole(&self) -> Span<'_> {
        assert!(self.strides.is_none(), "a strided tensor is packed before it is used");
        // SAFETY: valid and ours until the view is dropped, by the contracts of those who make views; a span cannot
        // outlive the view.
        unsafe { Span::from_raw(self.start, self.elements * self.dtype.size()) }
    }
}

/// What is left of a view that was cut; gives it back once all parts are dropped.
pub struct Whole(Arc<Mutex<BufferView>>);

impl Whole {
    /// The view, if no part of it is left.
    ///
    /// # Errors
    /// Itself, if there is one.
    pub fn back(self) -> Result<BufferView, Whole> {
        let view = Arc::try_unwrap(self.0).map_err(Whole)?;
        Ok(view.into_inner().unwrap_or_else(PoisonError::into_inner))
    }
}

impl fmt::Debug for Whole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Whole({} parts)", Arc::strong_count(&self.0) - 1)
    }
}

impl BufferView {
    /// Cuts it into views of at most `bytes` bytes, which different operations may take.
    ///
    /// ```
    /// use tenfold_memory::Buffer;
    ///
    /// let mut buffer = Buffer::from_slice(&[1_u8, 2, 3]);
    /// let (parts, whole) = buffer.lend().cut(2);
    /// assert_eq!(parts.iter().map(|part| part.byte_len()).collect::<Vec<_>>(), [2, 1]);
    /// drop(parts);
    /// assert_eq!(whole.back().expect("no part is left").byte_len(), 3);
    /// ```
    ///
    /// # Panics
    /// If it is not contiguous, or `bytes` is 0.
    pub fn cut(self, bytes: usize) -> (Vec<BufferView>, Whole) {
        assert!(self.is_contiguous(), "a strided tensor is packed before it is used");
        let (start, len, is_writable) = (self.start, self.byte_len(), self.is_writable);
        let whole = Arc::new(Mutex::new(self));
        let part = |at: usize| BufferView {
            // SAFETY: `at` is within the view, which lives until all parts are dropped. Parts do not overlap.
            start: unsafe { start.add(at) },
            elements: bytes.min(len - at),
            dtype: DType::U8,
            strides: None,
            is_writable,
            owner: Owner::Kept { _keep: Box::new(Arc::clone(&whole)) },
        };
        let parts = (0..len).step_by(bytes).map(part).collect();
        (parts, Whole(whole))
    }
}

impl Drop for BufferView {
    fn drop(&mut self) {
        match &self.owner {
            Owner::Kept { .. } => {}
            Owner::Buffer(memory) => memory.lent.store(false, Ordering::Release),
            // SAFETY: the counter exists until the view is dropped, by the contract of `borrowed`.
            Owner::Borrowed(views) => _ = unsafe { views.as_ref() }.fetch_sub(1, Ordering::Release),
        }
    }
}

impl fmt::Debug for BufferView {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BufferView({} × {})", self.dtype, self.elements)
    }
}

/// Elements in memory of ours: private, or in the shared segment where peers read them in place.
///
/// ```
/// use tenfold_memory::{DType, Buffer};
/// let mut tensor = Buffer::zeros(DType::F32, 3);
/// tensor.as_mut_slice::<f32>().copy_from_slice(&[1.0, 2.0, 3.0]);
/// assert_eq!(tensor.as_slice::<f32>()[1], 2.0);
/// ```
pub struct Buffer {
    memory: Arc<Memory>,
    dtype: DType,
    elements: usize,
}

struct Memory {
    start: NonNull<u8>,
    lent: AtomicBool,
    keep: Keep,
}

enum Keep {
    /// So many lines from `start`, which `Box::into_raw` gave away.
    Private {
        lines: usize,
    },
    Shared {
        _block: Block,
    },
    File {
        _mapping: Arc<Mapping>,
    },
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Keep::Private { lines } = self.keep {
            let lines = std::ptr::slice_from_raw_parts_mut(self.start.as_ptr().cast::<PrivateLine>(), lines);
            // SAFETY: a box of this many lines was given away as `start` by `Buffer::zeros`.
            drop(unsafe { Box::from_raw(lines) });
        }
    }
}

/// A cache line: private tensors begin on one.
#[repr(align(64))]
#[derive(Clone, Copy)]
struct PrivateLine {
    _bytes: [u8; 64],
}

// SAFETY: the memory is owned; `lent` decides who may touch it.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Buffer {
    /// Zeroes in private memory.
    pub fn zeros(dtype: DType, elements: usize) -> Self {
        let lines = elements.checked_mul(dtype.size()).expect("a tensor fits the address space").div_ceil(64);
        let words = Box::into_raw(vec![PrivateLine { _bytes: [0; 64] }; lines].into_boxed_slice());
        let start = NonNull::new(words.cast()).expect("a box is not null");
        Self::over(start, Keep::Private { lines }, dtype, elements)
    }

    /// Zeroes in the shared segment.
    ///
    /// # Panics
    /// If the block is too short.
    pub fn shared(block: Block, dtype: DType, elements: usize) -> Self {
        assert!(
            elements.checked_mul(dtype.size()).is_some_and(|len| len <= block.len()),
            "the block is long enough"
        );
        let start =
            NonNull::new(block.span(0, block.len()).start()).expect("a mapping does not begin at null");
        Self::over(start, Keep::Shared { _block: block }, dtype, elements)
    }

    /// Zeroes in a file of their own in memory, and that file as a region: groups with which it is registered have peers
    /// read it in place, as they would a storage that PyTorch shares.
    ///
    /// # Errors
    /// If the system refuses, or there are no elements.
    pub fn in_file(dtype: DType, elements: usize) -> io::Result<(Self, Arc<Region>)> {
        let len = elements.checked_mul(dtype.size()).ok_or(io::ErrorKind::OutOfMemory)?;
        let file = memory_file("tenfold-tensor", len)?;
        rustix::fs::fcntl_add_seals(&file, SealFlags::SEAL)?; // there are to be no others
        let mapping = Arc::new(Mapping::new(&file, len, ProtFlags::READ | ProtFlags::WRITE)?);
        let start = mapping.start();
        // SAFETY: mapped above from this file, with the length of the region. No other process has the file open for writing.
        let region = unsafe { Region::new(start, len, &file, Arc::clone(&mapping)) }?;
        Ok((Self::over(start, Keep::File { _mapping: mapping }, dtype, elements), region))
    }

    /// A copy of `values` in private memory.
    pub fn from_slice<T: Element>(values: &[T]) -> Self {
        let mut tensor = Buffer::zeros(T::DTYPE, values.len());
        tensor.as_mut_slice().copy_from_slice(values);
        tensor
    }

    fn over(start: NonNull<u8>, keep: Keep, dtype: DType, elements: usize) -> Self {
        let memory = Memory { start, lent: AtomicBool::new(false), keep };
        Buffer { memory: Arc::new(memory), dtype, elements }
    }

    /// The type of its elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// How many elements it has.
    pub fn elements(&self) -> usize {
        self.elements
    }

    /// Is it lent to an operation that has not finished?
    pub fn is_lent(&self) -> bool {
        self.memory.lent.load(Ordering::Acquire)
    }

    /// Lends it to one operation.
    ///
    /// # Panics
    /// If it is lent already.
    #[track_caller]
    pub fn lend(&mut self) -> BufferView {
        assert!(
            !self.memory.lent.swap(true, Ordering::Acquire),
            "the tensor is lent already: wait for its operation"
        );
        BufferView {
            start: self.memory.start,
            elements: self.elements,
            dtype: self.dtype,
            strides: None,
            is_writable: true,
            owner: Owner::Buffer(Arc::clone(&self.memory)),
        }
    }

    /// Lends some of its elements as a tensor that is not contiguous, such as a transposed one or every second row: from
    /// element `first` on, `steps[d]` elements apart in dimension `d` of `shape`.
    ///
    /// ```
    /// # use tenfold_memory::{Bytes, Buffer};
    /// let mut matrix = Buffer::from_slice(&[1_u8, 2, 3, 4, 5, 6]); // 2 rows of 3
    /// matrix.lend_strided(1, &[2], &[3]).unpack(Bytes::of(&[20, 50])); // the middle column
    /// assert_eq!(matrix.as_slice::<u8>(), [1, 20, 3, 4, 50, 6]);
    /// ```
    ///
    /// # Panics
    /// If it is lent already, or an element lies outside.
    #[track_caller]
    pub fn lend_strided(&mut self, first: usize, shape: &[usize], steps: &[isize]) -> BufferView {
        assert_eq!(shape.len(), steps.len(), "every dimension has a step");
        let mut reach = (first as i128, first as i128);
        for (len, step) in shape.iter().zip(steps) {
            let way = (len.saturating_sub(1) as i128).saturating_mul(*step as i128);
            reach = if way < 0 { (reach.0 + way, reach.1) } else { (reach.0, reach.1 + way) };
        }
        let inside = shape.contains(&0) || reach.0 >= 0 && reach.1 < self.elements as i128;
        assert!(inside, "elements {} to {} of a tensor of {}", reach.0, reach.1, self.elements);
        let whole = self.lend();
        // SAFETY: every element that shape and steps reach lies within the tensor, which `whole` keeps lent.
        unsafe {
            let start = whole.start.add(first.min(self.elements) * self.dtype.size());
            BufferView::from_strided(start, shape, steps, self.dtype, whole)
        }
    }

    /// Its elements.
    ///
    /// # Panics
    /// If it is lent, has another dtype, or is of bool and has bytes other than 0 and 1.
    #[track_caller]
    pub fn as_slice<T: Element>(&self) -> &[T] {
        let start = self.check::<T>();
        // SAFETY: `check` saw that the memory is not lent. While `self` is borrowed, it cannot be lent. It holds `elements`
        // initialised elements of `T` and begins on a cache line or a page.
        unsafe { std::slice::from_raw_parts(start.as_ptr(), self.elements) }
    }

    /// Its elements, to be written.
    ///
    /// # Panics
    /// If it is lent, has another dtype, or is of bool and has bytes other than 0 and 1.
    #[track_caller]
    pub fn as_mut_slice<T: Element>(&mut self) -> &mut [T] {
        let start = self.check::<T>();
        // SAFETY: as in `as_slice`, and `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), self.elements) }
    }

    /// Its bytes, whatever the dtype.
    ///
    /// # Panics
    /// If it is lent.
    #[track_caller]
    pub fn as_bytes(&self) -> &[u8] {
        assert!(!self.is_lent(), "the tensor is lent: wait for its operation");
        // SAFETY: as in `as_slice`; every byte is initialised.
        unsafe { std::slice::from_raw_parts(self.memory.start.as_ptr(), self.elements * self.dtype.size()) }
    }

    /// Its bytes, to be written. Bools other than 0 and 1 count as true.
    ///
    /// # Panics
    /// If it is lent.
    #[track_caller]
    pub fn as_mut_bytes(&mut self) -> &mut [u8] {
        assert!(!self.is_lent(), "the tensor is lent: wait for its operation");
        // SAFETY: as in `as_bytes`, and `self` is borrowed exclusively.
        unsafe {
            std::slice::from_raw_parts_mut(self.memory.start.as_ptr(), self.elements * self.dtype.size())
        }
    }

    #[track_caller]
    fn check<T: Element>(&self) -> NonNull<T> {
        assert!(!self.is_lent(), "the tensor is lent: wait for its operation");
        assert_eq!(self.dtype, T::DTYPE, "a tensor of {} is read as {}", self.dtype, T::DTYPE);
        // A peer may have sent other bytes, and `as_mut_bytes` lets a caller write them.
        let is_valid = T::DTYPE != DType::Bool || self.as_bytes().iter().all(|byte| *byte <= 1);
        assert!(is_valid, "a tensor of bool has bytes other than 0 and 1: read them with `as_bytes`");
        self.memory.start.cast()
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({} × {})", self.dtype, self.elements)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tensor_is_readable_again_once_its_view_is_gone() {
        let mut tensor = Buffer::from_slice(&[1_i32, 2, 3]);
        let view = tensor.lend();
        assert!(tensor.is_lent());
        view.span().part(4, 8).copy_from(crate::Bytes::of(&9_i32.to_ne_bytes()));
        drop(view);
        assert_eq!(tensor.as_slice::<i32>(), [1, 9, 3]);
    }

    #[test]
    #[should_panic(expected = "the tensor is lent: wait for its operation")]
    fn a_lent_tensor_cannot_be_read() {
        let mut tensor = Buffer::zeros(DType::F32, 4);
        let _view = tensor.lend();
        tensor.as_slice::<f32>();
    }

    #[test]
    #[should_panic(expected = "a tensor of float32 is read as int32")]
    fn a_tensor_of_floats_is_not_read_as_integers() {
        Buffer::zeros(DType::F32, 4).as_slice::<i32>();
    }

    #[test]
    fn bytes_that_are_not_bools_cannot_be_read_as_bools() {
        let mut tensor = Buffer::from_slice(&[true, false]);
        assert_eq!(tensor.as_slice::<bool>(), [true, false]);
        tensor.as_mut_bytes()[1] = 2;
        assert!(std::panic::catch_unwind(|| tensor.as_slice::<bool>().len()).is_err());
        assert_eq!(tensor.as_bytes(), [1, 2]);
    }

    #[test]
    fn an_empty_tensor_is_fine() {
        let mut tensor = Buffer::zeros(DType::F64, 0);
        assert!(tensor.lend().span().is_empty());
        assert!(tensor.as_slice::<f64>().is_empty());
    }
}
