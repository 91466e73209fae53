//! Tensors of any framework that speaks DLPack, looked at without taking them over.
//!
//! The capsule stays the exporter's: it is kept as long as the memory is lent and never renamed, so its own destructor
//! gives the tensor back.

#![expect(unsafe_code, reason = "DLPack is a pointer to a C struct")]

use std::ffi::{CStr, c_void};

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict};

use crate::exceptions::argument;
use crate::tensor::{Access, Elements, Memory};

const CPU: i32 = 1;
const READ_ONLY: u64 = 1;
const LEGACY: &CStr = c"dltensor";
const VERSIONED: &CStr = c"dltensor_versioned";

/// `DLTensor` of dlpack.h.
#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

/// `DLManagedTensorVersioned` of dlpack.h, as far as it is read here.
#[repr(C)]
struct Versioned {
    major: u32,
    minor: u32,
    manager_ctx: *mut c_void,
    deleter: *const c_void,
    flags: u64,
    tensor: DlTensor,
}

/// The memory of an object with `__dlpack__`.
pub(crate) fn memory(object: &Bound<'_, PyAny>, what: &str, access: Access) -> PyResult<Memory> {
    let py = object.py();
    let capsule = export(object)?;
    let capsule = capsule.cast::<PyCapsule>()?;
    let versioned = capsule.is_valid_checked(Some(VERSIONED));
    let start = capsule.pointer_checked(Some(if versioned { VERSIONED } else { LEGACY }))?;
    let (tensor, flags) = if versioned {
        // SAFETY: a capsule of this name points to this struct as long as it lives; major versions before 2 agree on it.
        let managed = unsafe { start.cast::<Versioned>().as_ref() };
        if managed.major != 1 {
            let message = format!("{what} speaks DLPack {}, of which nothing is known here", managed.major);
            return Err(argument(py, message));
        }
        (&managed.tensor, managed.flags)
    } else {
        // SAFETY: a capsule of this name points to a `DLManagedTensor`, which begins with its tensor.
        (unsafe { start.cast::<DlTensor>().as_ref() }, 0)
    };
    if tensor.device_type != CPU {
        let message =
            format!("{what} is on another device than the CPU (DLPack device {})", tensor.device_type);
        return Err(argument(py, message));
    }
    if access == Access::Write && flags & READ_ONLY != 0 {
        return Err(argument(py, format!("{what} is read-only")));
    }
    let elements = elements(tensor).ok_or_else(|| {
        argument(
            py,
            format!(
                "{what} has elements (DLPack code {}, {} bits) that cannot be sent",
                tensor.code, tensor.bits
            ),
        )
    })?;
    let dims = usize::try_from(tensor.ndim).unwrap_or(0);
    // SAFETY: `shape` has `ndim` numbers; so has `strides`, unless it is null, which means contiguous.
    let shape = if dims == 0 { &[][..] } else { unsafe { std::slice::from_raw_parts(tensor.shape, dims) } };
    let shape: Vec<usize> = shape.iter().map(|len| usize::try_from(*len).unwrap_or(0)).collect();
    let strides = (dims > 0 && !tensor.strides.is_null()).then(|| {
        // SAFETY: as above.
        let strides = unsafe { std::slice::from_raw_parts(tensor.strides, dims) };
        strides.iter().map(|step| *step as isize).collect()
    });
    let start = tensor.data.cast::<u8>().wrapping_add(tensor.byte_offset as usize);
    Ok(Memory { start, elements, shape, strides, keep: capsule.clone().into_any().unbind() })
}

/// Asks for the newer kind of capsule, which says whether it may be written; older exporters know no versions.
fn export<'py>(object: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let py = object.py();
    let newer = PyDict::new(py);
    newer.set_item("max_version", (1, 0))?;
    match object.call_method("__dlpack__", (), Some(&newer)) {
        Err(error) if error.is_instance_of::<PyTypeError>(py) => object.call_method0("__dlpack__"),
        capsule => capsule,
    }
}

fn elements(tensor: &DlTensor) -> Option<Elements> {
    let bits = u32::from(tensor.bits) * u32::from(tensor.lanes);
    let name = match (tensor.code, bits) {
        (0, 8) => "int8",
        (0, 16) => "int16",
        (0, 32) => "int32",
        (0, 64) => "int64",
        (1, 8) => "uint8",
        (1, 16) => "uint16",
        (1, 32) => "uint32",
        (1, 64) => "uint64",
        (2, 16) => "float16",
        (2, 32) => "float32",
        (2, 64) => "float64",
        (4, 16) => "bfloat16",
        (5, 64) => "complex64",
        (5, 128) => "complex128",
        (6, 8) => "bool",
        (10, 8) => "float8_e4m3fn",
        (11, 8) => "float8_e4m3fnuz",
        (12, 8) => "float8_e5m2",
        (13, 8) => "float8_e5m2fnuz",
        (_, bits) if bits % 8 == 0 => "opaque",
        _ => return None,
    };
    Elements::named(name, bits as usize / 8)
}

const _: () = assert!(size_of::<DlTensor>() == 48, "as dlpack.h lays it out");
