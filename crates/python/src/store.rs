//! c10d's stores.

use std::sync::Arc;

use pyo3::prelude::*;

use crate::foreign_store::ForeignStore;

/// The store behind a Python object: ours directly, anybody else's by its methods.
pub(crate) fn from_python(object: &Bound<'_, PyAny>) -> PyResult<Arc<dyn tenfold_store::Store>> {
    Ok(Arc::new(ForeignStore::new(object)))
}
