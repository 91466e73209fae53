//! Memory that peers on this host read in place, for arrays and tensors to be made on.

#![expect(unsafe_code, reason = "the buffer protocol is a C struct that is filled in")]

use std::any::Any;
use std::ffi::c_int;

use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use tenfold::Buffer;

/// Bytes in this rank's shared segment; give it to `numpy.frombuffer` or `torch.frombuffer`.
#[pyclass(module = "tenfold._tenfold", frozen)]
pub(crate) struct SharedMemory {
    start: usize,
    bytes: usize,
    /// Owns the memory, also after its group was dropped.
    _owner: Box<dyn Any + Send + Sync>,
}

impl SharedMemory {
    pub(crate) fn new(mut tensor: Buffer) -> Self {
        let bytes = tensor.as_mut_slice::<u8>();
        let (start, bytes) = (bytes.as_mut_ptr() as usize, bytes.len());
        SharedMemory { start, bytes, _owner: Box::new(tensor) }
    }

    /// Memory that stays at its address as long as `owner` lives.
    pub(crate) fn of(memory: &mut [u8], owner: impl Any + Send + Sync) -> Self {
        SharedMemory { start: memory.as_mut_ptr() as usize, bytes: memory.len(), _owner: Box::new(owner) }
    }
}

#[pymethods]
impl SharedMemory {
    /// Its address.
    #[getter]
    fn address(&self) -> usize {
        self.start
    }

    fn __len__(&self) -> usize {
        self.bytes
    }

    /// # Safety
    /// Called by the interpreter with a `view` to be filled in.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        if view.is_null() {
            return Err(PyBufferError::new_err("no place for the buffer"));
        }
        let memory = slf.get();
        let bytes = ffi::Py_ssize_t::try_from(memory.bytes)?;
        // SAFETY: `view` is the interpreter's; the memory is writable, as long as said, and lives as long as this object,
        // which the view keeps alive.
        let filled =
            unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), memory.start as *mut _, bytes, 0, flags) };
        if filled == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
    }
}
