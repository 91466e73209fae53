//! The extension module `tenfold._tenfold`: what the Python package cannot do in Python.
//!
//! Groups, works and stores, as classes without much polish; names and habits of c10d are put around them
//! by `python/tenfold`. The rules here: whatever waits lets go of the interpreter and looks for Ctrl-C now and then
//! ([`waiting`]); memory comes in through one door ([`tensor`]); errors go out through one ([`exceptions`]); and no Python
//! object is touched from a thread of the engine: what an operation keeps alive is given back to PyO3's pool, which the next
//! call into this module empties.

mod arguments;
mod control;
mod ddp;
mod dlpack;
mod exceptions;
mod foreign_store;
mod group;
mod log;
mod phrases;
mod recorder;
mod registration;
mod shared_memory;
mod store;
mod survivors;
mod tensor;
mod waiting;
mod work;

use pyo3::prelude::*;

#[pymodule(gil_used = false)]
fn _tenfold(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_function(wrap_pyfunction!(ddp::assign_by_size, module)?)?;
    module.add_function(wrap_pyfunction!(ddp::verify_params, module)?)?;
    module.add_class::<control::WorkerServer>()?;
    module.add_function(wrap_pyfunction!(control::control_answer, module)?)?;
    module.add_function(wrap_pyfunction!(control::control_call, module)?)?;
    module.add_function(wrap_pyfunction!(control::control_close, module)?)?;
    module.add_function(wrap_pyfunction!(control::control_keep, module)?)?;
    module.add_function(wrap_pyfunction!(control::control_names, module)?)?;
    module.add_function(wrap_pyfunction!(control::control_next, module)?)?;
    module.add_function(wrap_pyfunction!(control::control_offer_tracebacks, module)?)?;
    module.add_function(wrap_pyfunction!(control::control_place, module)?)?;
    module.add_function(wrap_pyfunction!(control::control_register, module)?)?;
    module.add_class::<ddp::Reducer>()?;
    module.add_function(wrap_pyfunction!(tensor::find_nan, module)?)?;
    module.add_function(wrap_pyfunction!(log::debug_level, module)?)?;
    module.add_function(wrap_pyfunction!(log::set_debug_level, module)?)?;
    module.add_function(wrap_pyfunction!(log::set_debug_level_from_env, module)?)?;
    module.add_function(wrap_pyfunction!(recorder::recorder_pickle, module)?)?;
    module.add_function(wrap_pyfunction!(recorder::recorder_json, module)?)?;
    module.add_function(wrap_pyfunction!(recorder::recorder_file, module)?)?;
    module.add_function(wrap_pyfunction!(recorder::recorder_reset, module)?)?;
    module.add_function(wrap_pyfunction!(recorder::recorder_wait, module)?)?;
    module.add_function(wrap_pyfunction!(recorder::metrics_snapshot, module)?)?;
    module.add_function(wrap_pyfunction!(recorder::metrics_prometheus, module)?)?;
    module.add_function(wrap_pyfunction!(recorder::metrics_stragglers, module)?)?;
    module.add_function(wrap_pyfunction!(recorder::metrics_straggler_report, module)?)?;
    module.add_class::<group::Group>()?;
    module.add_class::<registration::Registration>()?;
    module.add_class::<shared_memory::SharedMemory>()?;
    module.add_function(wrap_pyfunction!(store::test_python_store, module)?)?;
    module.add_class::<survivors::Members>()?;
    module.add_class::<store::Store>()?;
    module.add_class::<store::tcp::TcpStore>()?;
    module.add_class::<store::kinds::FakeStore>()?;
    module.add_class::<store::kinds::FileStore>()?;
    module.add_class::<store::kinds::HashStore>()?;
    module.add_class::<store::kinds::PrefixStore>()?;
    module.add_class::<store::collectives::ControlCollectives>()?;
    module.add_class::<store::collectives::StoreCollectives>()?;
    module.add_class::<work::Work>()?;
    module.add_class::<work::Completions>()?;
    Ok(())
}
