//! The memory of one bucket.

use std::fmt;
use std::ops::Range;

use super::{Param, numbers};
use crate::{Buffer, DType, Element, Group};

/// Gradients of some parameters, one after the other in one tensor: what a [`CommHook`](super::CommHook) works on.
pub struct GradBucket {
    index: usize,
    is_last: bool,
    memory: Buffer,
    /// What is reduced in place of the memory.
    buffer: Option<Buffer>,
    /// What was so in the last iteration, to be used again.
    spare: Option<Buffer>,
    parts: Vec<Part>,
}

struct Part {
    number: usize,
    param: Param,
    elements: Range<usize>,
}

impl GradBucket {
    /// Zeroes for the gradients of `params`, which have one dtype. A sparse one has no memory here.
    pub(super) fn new(
        group: &Group,
        index: usize,
        is_last: bool,
        params: impl Iterator<Item = (usize, Param)>,
    ) -> Self {
        let mut end = 0;
        let part = |(number, param): (usize, Param)| {
            let start = end;
            end += if param.sparse { 0 } else { param.elements() };
            Part { number, param, elements: start..end }
        };
        let parts: Vec<Part> = params.map(part).collect();
        let dtype = parts.first().map_or(DType::F32, |part| part.param.dtype);
        GradBucket { index, is_last, memory: allocate(group, dtype, end), buffer: None, spare: None, parts }
    }

    /// Which bucket it is: they are launched in this order.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Is it the last of its iteration that a hook sees?
    pub fn is_last(&self) -> bool {
        self.is_last
    }

    /// All its gradients, flat. Not to be read while it is lent to an operation.
    pub fn buffer(&self) -> &Buffer {
        self.buffer.as_ref().unwrap_or(&self.memory)
    }

    /// The same, to be lent or written.
    pub fn buffer_mut(&mut self) -> &mut Buffer {
        self.buffer.as_mut().unwrap_or(&mut self.memory)
    }

    /// Reduces `buffer` in place of the gradients, which it becomes in the end, converted to their dtype.
    ///
    /// # Panics
    /// If it has another number of elements, or a dtype that does not convert.
    pub fn set_buffer(&mut self, buffer: Buffer) {
        let (own, other) = (self.memory.dtype(), buffer.dtype());
        assert_eq!(buffer.elements(), self.memory.elements(), "a bucket keeps its number of elements");
        let convertible = own == other || numbers::is_convertible(own) && numbers::is_convertible(other);
        assert!(convertible, "{other} does not convert to {own}");
        self.buffer = Some(buffer);
    }

    /// Number and description of each of its parameters, in the order of the buffer.
    pub fn parameters(&self) -> impl Iterator<Item = (usize, &Param)> {
        self.parts.iter().map(|part| (part.number, &part.param))
    }

    /// Where each parameter's elements are in the buffer.
    pub fn ranges(&self) -> impl Iterator<Item = Range<usize>> {
        self.parts.iter().map(|part| part.elements.clone())
    }

    /// Each parameter's gradient.
    ///
    /// # Panics
    /// If the buffer is lent, or has another dtype.
    pub fn gradients<T: Element>(&self) -> Vec<&[T]> {
        let all = self.buffer().as_slice::<T>();
        self.ranges().map(|range| &all[range]).collect()
    }

    /// Has it a sparse parameter?
    pub fn is_sparse(&self) -> bool {
        self.parts.iter().any(|part| part.param.sparse)
    }

    pub(super) fn memory(&self) -> &Buffer {
        &self.memory
    }

    pub(super) fn memory_mut(&mut self) -> &mut Buffer {
        &mut self.memory
    }

    pub(super) fn into_memory(self) -> Buffer {
        self.memory
    }

    /// Reduces a copy in another dtype.
    pub(super) fn reduce_as(&mut self, group: &Group, dtype: DType) {
        if dtype != self.memory.dtype() {
            let fits = |spare: &Buffer| spare.dtype() == dtype && !spare.is_lent();
            let spare = self.spare.take().filter(fits);
            let mut narrow = spare.unwrap_or_else(|| allocate(group, dtype, self.memory.elements()));
            numbers::convert(&self.memory, &mut narrow);
            self.set_buffer(narrow);
        }
    }

    /// What was reduced becomes the gradients.
    pub(super) fn settle(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            numbers::convert(&buffer, &mut self.memory);
            self.spare = Some(buffer);
        }
    }

    /// As in "bucket 0 with `fc.weight`, `fc.bias` and 3 more".
    pub(super) fn describe(&self) -> String {
        let names = show_names(self.parts.iter().map(|part| part.param.name.as_str()));
        format!("bucket {} with {names}", self.index)
    }
}

impl fmt::Debug for GradBucket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GradBucket({}, {:?})", self.describe(), self.memory)
    }
}

/// Names that a message lists.
pub(super) const NAMES_SHOWN: usize = 20;

/// As in "`a`, `b` and 3 more".
pub(super) fn show_names<'a>(names: impl ExactSizeIterator<Item = &'a str>) -> String {
    let more = names.len().saturating_sub(NAMES_SHOWN);
    let shown: Vec<String> = names.take(NAMES_SHOWN).map(|name| format!("`{name}`")).collect();
    let mut text = shown.join(", ");
    if more > 0 {
        text += &format!(" and {more} more");
    }
    text
}

/// Zeroes that peers read in place; where there is no more shared memory, private ones, which are copied.
pub(super) fn allocate(group: &Group, dtype: DType, elements: usize) -> Buffer {
    if elements == 0 {
        return Buffer::zeros(dtype, 0);
    }
    group.shared_buffer(dtype, elements).unwrap_or_else(|error| {
        tracing::warn!("gradients are not in shared memory, which is slower: {error}");
        Buffer::zeros(dtype, elements)
    })
}
