//! Memory of Python objects, lent to an operation.
//!
//! One door for everything: PyTorch tensors by their pointer, NumPy arrays and anything else with the buffer protocol,
//! and DLPack. Nothing is copied; what is not contiguous is lent with its strides. The object is kept alive, and where it
//! could be resized also exported, until the operation is over.

#![expect(unsafe_code, reason = "turns pointers that Python objects vouch for into views")]

use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::{PoisonError, RwLock};

use pyo3::buffer::PyUntypedBuffer;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyMemoryView, PyTuple};
use tenfold::{BufferView, DType};

use crate::dlpack;
use crate::exceptions::argument;

/// What an operation does with the memory.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    Write,
}

/// What the elements are, for the engine and for messages.
#[derive(Clone, Copy)]
pub(crate) struct Elements {
    /// For what has no arithmetic here: one of the same size, which moves as well.
    pub(crate) dtype: DType,
    pub(crate) can_be_reduced: bool,
}

impl Elements {
    pub(crate) fn named(name: &str, size: usize) -> Option<Self> {
        let known = DType::ALL.into_iter().find(|dtype| dtype.name() == name && dtype.size() == size);
        let known = known.map(|dtype| Elements { dtype, can_be_reduced: true });
        known.or_else(|| {
            let dtype = match size {
                1 => DType::U8,
                2 => DType::U16,
                4 => DType::U32,
                8 => DType::U64,
                16 => DType::Complex128,
                _ => return None,
            };
            Some(Elements { dtype, can_be_reduced: false })
        })
    }
}

/// What an object says of its memory.
pub(crate) struct Memory {
    pub(crate) start: *mut u8,
    pub(crate) elements: Elements,
    pub(crate) shape: Vec<usize>,
    /// In elements; nothing means contiguous.
    pub(crate) strides: Option<Vec<isize>>,
    pub(crate) keep: Py<PyAny>,
}

/// Memory that can be lent, and whether it can be reduced.
pub(crate) struct Lent {
    pub(crate) view: BufferView,
    can_be_reduced: bool,
}

impl Lent {
    /// For an operation that computes.
    pub(crate) fn reducible(self, object: &Bound<'_, PyAny>, what: &str) -> PyResult<BufferView> {
        if self.can_be_reduced {
            return Ok(self.view);
        }
        let dtype = object.getattr("dtype").and_then(|dtype| dtype.str()).map(|dtype| dtype.to_string());
        let dtype = dtype.unwrap_or_else(|_| "unknown".to_string());
        let message = format!("{what} has dtype {dtype}, which can be moved but not reduced");
        Err(argument(object.py(), message))
    }
}

/// Lends the memory of `object`, the argument called `what`.
pub(crate) fn lend(object: &Bound<'_, PyAny>, what: &str, access: Access) -> PyResult<Lent> {
    let py = object.py();
    if object.get_type().hasattr(intern!(py, "data_ptr"))? {
        return lend_torch(object, what);
    }
    let memory = match PyMemoryView::from(object) {
        Ok(export) => buffer_memory(object, &export, what, access)?,
        Err(_) if object.hasattr(intern!(py, "__array_interface__"))? => array_memory(object, what, access)?,
        Err(_) if object.hasattr(intern!(py, "__dlpack__"))? => dlpack::memory(object, what, access)?,
        Err(_) => {
            let kind = object.get_type().name()?;
            let message = format!(
                "{what} must be a tensor: a NumPy array, a PyTorch tensor, or any object with the buffer protocol or \
                 DLPack; it is a {kind}"
            );
            return Err(pyo3::exceptions::PyTypeError::new_err(message));
        }
    };
    view(py, memory, what)
}

fn view(py: Python<'_>, memory: Memory, what: &str) -> PyResult<Lent> {
    let Memory { start, elements: Elements { dtype, can_be_reduced }, shape, strides, keep } = memory;
    let count = shape.iter().product();
    let Some(start) = NonNull::new(start).filter(|_| count > 0) else {
        if count > 0 {
            return Err(argument(py, format!("{what} has no memory (is it a meta tensor?)")));
        }
        return Ok(Lent { view: BufferView::empty(dtype), can_be_reduced });
    };
    let view = match strides {
        // SAFETY: the object says that so many elements lie there, and is kept alive with the view. As with every collective, the
        // caller must not let other code touch them meanwhile.
        None => unsafe { BufferView::from_raw(start, count, dtype, keep) },
        // SAFETY: as above, for every element that shape and strides reach.
        Some(steps) => unsafe { BufferView::from_strided(start, &shape, &steps, dtype, keep) },
    };
    Ok(Lent { view, can_be_reduced })
}

/// A PyTorch tensor: asked as little as possible, because this is in the way of every call.
fn lend_torch(object: &Bound<'_, PyAny>, what: &str) -> PyResult<Lent> {
    let py = object.py();
    if !object.getattr(intern!(py, "is_cpu"))?.is_truthy()? {
        let device = object.getattr(intern!(py, "device"))?;
        return Err(argument(py, format!("{what} is on device {device}; tenfold works on the CPU")));
    }
    let elements = torch_elements(&object.getattr(intern!(py, "dtype"))?, what)?;
    let start = match object.call_method0(intern!(py, "data_ptr")) {
        Ok(start) => start.extract::<usize>()? as *mut u8,
        Err(_) => {
            let layout = object.getattr(intern!(py, "layout"))?;
            return Err(argument(
                py,
                format!("{what} has layout {layout}; this operation takes strided tensors"),
            ));
        }
    };
    let lazily_negated = object.call_method0(intern!(py, "is_neg"))?.is_truthy()?;
    let complex = matches!(elements.dtype, DType::Complex64 | DType::Complex128);
    if lazily_negated || (complex && object.call_method0(intern!(py, "is_conj"))?.is_truthy()?) {
        let message =
            format!("{what} is a lazy conjugate or negative; call `.resolve_conj().resolve_neg()` first");
        return Err(argument(py, message));
    }
    let keep = object.clone().unbind();
    if object.call_method0(intern!(py, "is_contiguous"))?.is_truthy()? {
        let count = object.call_method0(intern!(py, "numel"))?.extract()?;
        return view(py, Memory { start, elements, shape: vec![count], strides: None, keep }, what);
    }
    let shape = object.getattr(intern!(py, "shape"))?.extract()?;
    let strides = Some(object.call_method0(intern!(py, "stride"))?.extract()?);
    view(py, Memory { start, elements, shape, strides, keep }, what)
}

/// What is known of PyTorch's dtypes, by address: they are few and are never freed.
static TORCH_DTYPES: RwLock<Option<HashMap<usize, Elements>>> = RwLock::new(None);

fn torch_elements(dtype: &Bound<'_, PyAny>, what: &str) -> PyResult<Elements> {
    let address = dtype.as_ptr() as usize;
    let known = TORCH_DTYPES.read().unwrap_or_else(PoisonError::into_inner);
    if let Some(elements) = known.as_ref().and_then(|known| known.get(&address)) {
        return Ok(*elements);
    }
    drop(known);
    let name = dtype.str()?.to_string();
    if matches!(name.as_str(), "torch.quint4x2" | "torch.quint2x4") {
        let message =
            format!("{what} has dtype {name}, with several elements in a byte, which cannot be sent");
        return Err(argument(dtype.py(), message));
    }
    let size = dtype.getattr("itemsize")?.extract()?;
    let elements = Elements::named(name.trim_start_matches("torch."), size).ok_or_else(|| {
        argument(
            dtype.py(),
            format!("{what} has dtype {name} with elements of {size} bytes, which cannot be sent"),
        )
    })?;
    let mut known = TORCH_DTYPES.write().unwrap_or_else(PoisonError::into_inner);
    known.get_or_insert_default().insert(address, elements);
    Ok(elements)
}

/// Anything with the buffer protocol. The export is what is kept: it keeps the object from being resized.
fn buffer_memory(
    object: &Bound<'_, PyAny>,
    export: &Bound<'_, PyMemoryView>,
    what: &str,
    access: Access,
) -> PyResult<Memory> {
    let py = object.py();
    let buffer = PyUntypedBuffer::get(export)?;
    if access == Access::Write && buffer.readonly() {
        return Err(argument(py, format!("{what} is read-only")));
    }
    let size = buffer.item_size();
    let format = buffer.format().to_string_lossy().into_owned();
    let foreign = if cfg!(target_endian = "little") { ['>', '!'] } else { ['<', '<'] };
    if format.starts_with(foreign) && size > 1 {
        return Err(argument(
            py,
            format!("{what} has elements in the byte order of other machines (`{format}`)"),
        ));
    }
    let elements = match format_elements(&format, size) {
        Some(elements) => elements,
        None => named_elements(object, size).ok_or_else(|| {
            argument(py, format!("{what} has elements of format `{format}`, which cannot be sent"))
        })?,
    };
    let strides =
        (!buffer.is_c_contiguous()).then(|| in_elements(py, buffer.strides(), size, what)).transpose()?;
    let shape = buffer.shape().to_vec();
    let start = buffer.buf_ptr().cast();
    buffer.release(py);
    Ok(Memory { start, elements, shape, strides, keep: export.clone().into_any().unbind() })
}

/// NumPy arrays whose elements have no buffer format, such as `ml_dtypes.bfloat16`.
fn array_memory(object: &Bound<'_, PyAny>, what: &str, access: Access) -> PyResult<Memory> {
    let py = object.py();
    let interface = object.getattr("__array_interface__")?.cast_into::<PyDict>()?;
    let field = |name: &str| {
        interface
            .get_item(name)?
            .ok_or_else(|| argument(py, format!("{what} has no `{name}` in its __array_interface__")))
    };
    let (start, read_only): (usize, bool) = field("data")?.cast_into::<PyTuple>()?.extract()?;
    if access == Access::Write && read_only {
        return Err(argument(py, format!("{what} is read-only")));
    }
    let kind: String = field("typestr")?.extract()?;
    let size = kind.trim_start_matches(|letter: char| !letter.is_ascii_digit()).parse().unwrap_or(0);
    let elements = named_elements(object, size)
        .ok_or_else(|| argument(py, format!("{what} has elements of type `{kind}`, which cannot be sent")))?;
    let strides: Option<Vec<isize>> =
        interface.get_item("strides")?.map(|strides| strides.extract()).transpose()?.flatten();
    let strides = strides.map(|strides| in_elements(py, &strides, size, what)).transpose()?;
    let shape = field("shape")?.extract()?;
    Ok(Memory { start: start as *mut u8, elements, shape, strides, keep: object.clone().unbind() })
}

/// By the name of the object's dtype.
fn named_elements(object: &Bound<'_, PyAny>, size: usize) -> Option<Elements> {
    let name = object
        .getattr("dtype")
        .and_then(|dtype| dtype.getattr("name"))
        .and_then(|name| name.extract::<String>());
    Elements::named(name.as_deref().unwrap_or("opaque"), size)
}

fn in_elements(py: Python<'_>, strides: &[isize], size: usize, what: &str) -> PyResult<Vec<isize>> {
    let size = size as isize;
    if strides.iter().any(|step| step % size != 0) {
        return Err(argument(py, format!("{what} has strides that are not whole elements")));
    }
    Ok(strides.iter().map(|step| step / size).collect())
}

/// By the letter of the `struct` module.
fn format_elements(format: &str, size: usize) -> Option<Elements> {
    let native = if cfg!(target_endian = "little") { '<' } else { '>' };
    let letters = format.trim_start_matches(['@', '=', native]);
    let name = match (letters, size) {
        ("?", 1) => "bool",
        ("b", 1) => "int8",
        ("B" | "c", 1) => "uint8",
        ("h" | "i" | "l" | "q" | "n", 2) => "int16",
        ("h" | "i" | "l" | "q" | "n", 4) => "int32",
        ("h" | "i" | "l" | "q" | "n", 8) => "int64",
        ("H" | "I" | "L" | "Q" | "N", 2) => "uint16",
        ("H" | "I" | "L" | "Q" | "N", 4) => "uint32",
        ("H" | "I" | "L" | "Q" | "N", 8) => "uint64",
        ("e", 2) => "float16",
        ("f", 4) => "float32",
        ("d", 8) => "float64",
        ("Zf", 8) => "complex64",
        ("Zd", 16) => "complex128",
        _ => return None,
    };
    Elements::named(name, size)
}

/// How many rows a tensor has: what splits are counted in.
pub(crate) fn rows(object: &Bound<'_, PyAny>) -> PyResult<usize> {
    object.len()
}

/// The first element that is not a number, or None.
#[pyfunction]
pub(crate) fn find_nan(tensor: &Bound<'_, PyAny>) -> PyResult<Option<usize>> {
    Ok(tenfold::debug::find_nan(&lend(tensor, "tensor", Access::Read)?.view))
}
