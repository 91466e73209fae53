//! Shared memory of another library, such as a storage that PyTorch has shared, registered with a group.

#![expect(unsafe_code, reason = "takes Python's word for where a shared file is mapped")]

use std::os::fd::BorrowedFd;
use std::ptr::NonNull;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use tenfold::raw::Region;

use crate::exceptions::group_error;

/// As long as this exists, peers on this host read the memory in place.
#[pyclass(module = "tenfold._tenfold", frozen)]
pub(crate) struct Registration {
    _registration: tenfold::raw::Registration,
}

impl Registration {
    /// `keep` is what keeps the file mapped at `address`; it lives as long as this.
    pub(crate) fn new(
        group: &tenfold::Group,
        address: usize,
        bytes: usize,
        file: i32,
        keep: &Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        let py = keep.py();
        let start = NonNull::new(address as *mut u8).filter(|_| bytes > 0 && file >= 0);
        let start = start.ok_or_else(|| PyValueError::new_err("there is no memory at that address"))?;
        // SAFETY: the caller's descriptor stays open during this call. What outlives the call opens the file again.
        let file = unsafe { BorrowedFd::borrow_raw(file) };
        // SAFETY: the caller vouches that `bytes` of the file are mapped at `address`, and gave what keeps them mapped.
        let region = unsafe { Region::new(start, bytes, file, keep.clone().unbind()) }?;
        let registered = py.detach(|| group.register(&region));
        Ok(Registration { _registration: registered.map_err(|error| group_error(py, &error))? })
    }
}
