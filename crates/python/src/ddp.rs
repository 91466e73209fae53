//! The reducer of data-parallel training.
//!
//! Gradients are written by Python, through arrays on the memory of buckets; what is said here is when they are ready. A hook
//! written in Python is called on the thread that called the reducer, with the interpreter.

#![expect(clippy::too_many_arguments, reason = "Python's keyword arguments")]

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;

use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use tenfold::ddp::autograd::{Autograd, Step};
use tenfold::ddp::raw::{self, Framework as _, Rebuilt};
use tenfold::ddp::{self, CommHook, GradBucket, Options, Param, hook_error, hooks};
use tenfold::{Buffer, DType, SparseTensor};

use crate::exceptions::{argument, group_error};
use crate::group::Group;
use crate::recorder::{Shapes, noted};
use crate::shared_memory::SharedMemory;
use crate::tensor::{Access, lend};
use crate::waiting::{self, SLICE};

/// A name, a shape, the name of a dtype, and whether gradients are sparse.
type Spec = (String, Vec<usize>, String, bool);

fn params(py: Python<'_>, specs: Vec<Spec>) -> PyResult<Vec<Param>> {
    let param = |(name, shape, dtype, sparse): Spec| {
        let message = || argument(py, format!("parameter `{name}` of {dtype} can have no gradient"));
        let dtype = named_dtype(&dtype).ok_or_else(message)?;
        Ok(Param { name, shape, dtype, sparse })
    };
    specs.into_iter().map(param).collect()
}

fn named_dtype(name: &str) -> Option<DType> {
    DType::ALL.into_iter().find(|known| known.name() == name)
}

/// c10d's `_compute_bucket_assignment_by_size`: the parameters of each bucket, and the limit that closed it.
#[pyfunction]
pub(crate) fn assign_by_size(
    py: Python<'_>,
    params: Vec<Spec>,
    limits: Vec<usize>,
    order: Option<Vec<usize>>,
) -> PyResult<(Vec<Vec<usize>>, Vec<usize>)> {
    let params = self::params(py, params)?;
    if limits.is_empty() {
        return Err(PyValueError::new_err("there must be a limit for the size of buckets"));
    }
    if let Some(number) = order.iter().flatten().find(|number| **number >= params.len()) {
        let message = format!("there is no tensor {number}: there are {}", params.len());
        return Err(PyValueError::new_err(message));
    }
    let buckets = raw::assign_by_size(&params, &limits, order.as_deref());
    Ok(buckets.into_iter().map(|bucket| (bucket.params, bucket.limit)).unzip())
}

/// Fails on all ranks alike if one has other parameters than rank 0.
#[pyfunction]
pub(crate) fn verify_params(py: Python<'_>, group: &Group, params: Vec<Spec>) -> PyResult<()> {
    let (group, params) = (group.inner.clone(), self::params(py, params)?);
    let verified = waiting::on_a_thread(py, "tenfold-verify", move || raw::verify_params(&group, &params))?;
    verified.map_err(|error| group_error(py, &error))
}

/// The memory of a bucket that was cut again while Python still had arrays on it.
type Former = Mutex<Option<Buffer>>;

/// Averages gradients over all ranks.
#[pyclass(module = "tenfold._tenfold", frozen)]
pub(crate) struct Reducer {
    inner: Mutex<ddp::Reducer>,
    /// Where the iteration is. A thread that holds this lock takes no other.
    autograd: Mutex<Autograd>,
    /// The thread that is in `inner`.
    inside: Mutex<Option<ThreadId>>,
    /// Where the memory of each bucket goes when the buckets are cut again.
    formers: Mutex<Vec<Arc<Former>>>,
    /// What a hook raised.
    raised: Arc<Mutex<Option<PyErr>>>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Reducer {
    /// A call without the interpreter. What a hook raised meanwhile comes out as it is.
    fn call<T: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut ddp::Reducer) -> tenfold::Result<T> + Send,
    ) -> PyResult<T> {
        let me = std::thread::current().id();
        if *locked(&self.inside) == Some(me) {
            return Err(PyRuntimeError::new_err(
                "a communication hook cannot call the reducer that called it",
            ));
        }
        let outcome = noted(py, Shapes::unknown(), || {
            let mut inner = locked(&self.inner);
            *locked(&self.inside) = Some(me);
            let outcome = call(&mut inner);
            *locked(&self.inside) = None;
            outcome
        })?;
        let raised = locked(&self.raised).take();
        outcome.map_err(|error| raised.unwrap_or_else(|| group_error(py, &error)))
    }

    /// Makes a gradient ready. True if it was the last, and the caller must finish.
    fn ready(
        &self,
        py: Python<'_>,
        ready: impl FnOnce(&mut ddp::Reducer) -> tenfold::Result<()> + Send,
    ) -> PyResult<bool> {
        let is_whole = self.call(py, |reducer| {
            ready(reducer)?;
            Ok(reducer.is_whole())
        })?;
        Ok(is_whole && !locked(&self.autograd).is_manual())
    }

    /// Counts a gradient of a static graph that is not whole yet; false if it is.
    fn counts(&self, py: Python<'_>, param: usize) -> PyResult<bool> {
        let is_counted = self.call(py, |reducer| {
            let is_whole = reducer.buckets().completes(param);
            if is_whole { Ok(false) } else { reducer.count_ready(param).map(|()| true) }
        })?;
        if is_counted {
            locked(&self.autograd).counted(param);
        }
        Ok(is_counted)
    }

    /// Gives the former memory to the arrays on it.
    fn leave(&self, rebuilt: Rebuilt, reducer: &ddp::Reducer) {
        let mut formers = locked(&self.formers);
        for (former, memory) in formers.iter().zip(rebuilt.memory) {
            *locked(former) = Some(memory);
        }
        *formers = Self::fresh_formers(reducer);
    }

    fn fresh_formers(reducer: &ddp::Reducer) -> Vec<Arc<Former>> {
        (0..reducer.buckets().len()).map(|_| Arc::default()).collect()
    }
}

#[pymethods]
impl Reducer {
    /// Joins the reducers of all ranks: returns once all have.
    #[new]
    #[pyo3(signature = (group, params, *, limits, first_buckets, find_unused_parameters=false, static_graph=false, reduce_dtype=None, successor_of=None))]
    fn new(
        py: Python<'_>,
        group: &Group,
        params: Vec<Spec>,
        limits: Vec<usize>,
        first_buckets: Vec<Vec<usize>>,
        find_unused_parameters: bool,
        static_graph: bool,
        reduce_dtype: Option<&str>,
        successor_of: Option<&Self>,
    ) -> PyResult<Self> {
        let (group, params) = (group.inner.clone(), self::params(py, params)?);
        let autograd = match successor_of {
            Some(former) => locked(&former.autograd).successor(),
            None => Autograd::new(find_unused_parameters, static_graph),
        };
        let mut options =
            Options::default().bucket_bytes(&limits).first_buckets(first_buckets).divided_by_caller();
        if autograd.finds_unused() {
            options = options.find_unused_parameters();
        }
        if autograd.is_static() {
            options = options.static_graph();
        }
        if let Some(name) = reduce_dtype {
            let unknown = || argument(py, format!("gradients cannot be reduced as {name}"));
            options = options.reduce_dtype(named_dtype(name).ok_or_else(unknown)?);
        }
        let make = move || ddp::Reducer::new(&group, &params, options);
        let inner =
            waiting::on_a_thread(py, "tenfold-reducer", make)?.map_err(|error| group_error(py, &error))?;
        let formers = Mutex::new(Self::fresh_formers(&inner));
        Ok(Reducer {
            inner: Mutex::new(inner),
            autograd: Mutex::new(autograd),
            inside: Mutex::default(),
            formers,
            raised: Arc::default(),
        })
    }

    /// The parameters of each bucket.
    fn layout(&self, py: Python<'_>) -> PyResult<Vec<Vec<usize>>> {
        self.call(py, |reducer| {
            let buckets = reducer.buckets();
            Ok((0..buckets.len()).map(|index| buckets.bucket(index).params.clone()).collect())
        })
    }

    /// Where a gradient is: its bucket, its first element there, and the first after it.
    fn place(&self, py: Python<'_>, param: usize) -> PyResult<(usize, usize, usize)> {
        let (bucket, elements) = self.call(py, |reducer| reducer.place(param))?;
        Ok((bucket, elements.start, elements.end))
    }

    /// The memory of a bucket, for arrays to be made on; they outlive the bucket.
    fn bucket_memory(slf: Bound<'_, Self>, index: usize) -> PyResult<SharedMemory> {
        let (py, reducer) = (slf.py(), slf.get());
        let former = locked(&reducer.formers).get(index).cloned();
        let owner = (slf.clone().unbind(), former);
        reducer.call(py, |reducer| Ok(SharedMemory::of(reducer.bucket_bytes(index)?, owner)))
    }

    /// Begins forward and the measurement of its time. Does not wait for other ranks.
    fn start_forward(&self, py: Python<'_>) -> PyResult<()> {
        self.call(py, ddp::Reducer::start_forward_as_is)
    }

    /// Cuts the buckets again if that is due, and returns whether it did. Arrays on their memory are then no longer gradients.
    fn rebuild(&self, py: Python<'_>) -> PyResult<bool> {
        self.call(py, |reducer| {
            let Some(rebuilt) = reducer.rebuild_buckets()? else { return Ok(false) };
            self.leave(rebuilt, reducer);
            locked(&self.autograd).rebuilt();
            Ok(true)
        })
    }

    /// Moves the buckets to new memory. Arrays on the old memory stay as they are.
    fn renew(&self, py: Python<'_>) -> PyResult<()> {
        self.call(py, |reducer| {
            let rebuilt = reducer.renew_memory()?;
            self.leave(rebuilt, reducer);
            Ok(())
        })
    }

    /// Forward starts without synchronisation, unless backward is prepared later. Returns whether buckets were rebuilt since
    /// the last call.
    fn rest(&self) -> bool {
        locked(&self.autograd).rest()
    }

    /// Backward is about to start, and these parameters get no gradient on this rank. `found` says that the caller found them
    /// by looking at the graph.
    #[pyo3(signature = (unused, found=false))]
    fn prepare(&self, unused: Vec<usize>, found: bool) {
        let mut autograd = locked(&self.autograd);
        if found { autograd.prepare_found(unused) } else { autograd.prepare(unused) }
    }

    /// A gradient was computed. Returns what follows: nothing while gradients accumulate, `begin`, `counted` (it is not whole yet),
    /// `load`, or `look` (load it if it exists).
    fn gradient(&self, py: Python<'_>, param: usize) -> PyResult<Option<&'static str>> {
        let (step, is_static, finds_unused) = {
            let mut autograd = locked(&self.autograd);
            (autograd.gradient(param), autograd.is_static(), autograd.finds_unused())
        };
        match step {
            Step::Accumulates => return Ok(None),
            Step::Begins => return Ok(Some("begin")),
            Step::Continues => {}
        }
        if is_static && self.counts(py, param)? {
            return Ok(Some("counted"));
        }
        Ok(Some(if finds_unused { "look" } else { "load" }))
    }

    /// The parameters that get no gradient in this iteration.
    fn unused(&self) -> Vec<usize> {
        locked(&self.autograd).unused().to_vec()
    }

    /// Backward begins.
    fn start_backward(&self, py: Python<'_>) -> PyResult<()> {
        let unused = self.unused();
        self.call(py, |reducer| reducer.start_backward_without(&unused))?;
        locked(&self.autograd).begun();
        Ok(())
    }

    /// A gradient lies in its bucket. True if it was the last, and the caller must finish.
    fn grad_ready(&self, py: Python<'_>, param: usize) -> PyResult<bool> {
        self.ready(py, |reducer| reducer.grad_ready(param))
    }

    /// A parameter has its turn and no gradient. True if it was the last, and the caller must finish.
    fn ready_without_gradient(&self, py: Python<'_>, param: usize) -> PyResult<bool> {
        self.ready(py, |reducer| reducer.ready_without_gradient(param))
    }

    /// A sparse gradient: rows of the parameter, and which ones. True if it was the last, and the caller must finish.
    fn grad_ready_sparse(
        &self,
        py: Python<'_>,
        param: usize,
        rows: Vec<i64>,
        values: &Bound<'_, PyAny>,
    ) -> PyResult<bool> {
        let values = copied(values)?;
        self.ready(py, |reducer| reducer.grad_ready_sparse(param, sparse(reducer, param, rows, values)))
    }

    /// As `keep`, with a sparse gradient.
    fn keep_sparse(
        &self,
        py: Python<'_>,
        param: usize,
        rows: Vec<i64>,
        values: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let (values, used) = (copied(values)?, locked(&self.autograd).is_used(param));
        self.call(py, |reducer| {
            let gradient = sparse(reducer, param, rows, values);
            reducer.keep_sparse(param, gradient, used)
        })
    }

    /// Rows and values of a sparse gradient after `finish`, as bytes.
    fn sparse_gradient<'py>(
        &self,
        py: Python<'py>,
        param: usize,
    ) -> PyResult<Option<(Vec<i64>, Bound<'py, PyBytes>)>> {
        let found = self.call(py, |reducer| {
            let average = reducer.sparse_gradient(param);
            Ok(average.map(|average| (average.indices.clone(), average.values.as_bytes().to_vec())))
        })?;
        Ok(found.map(|(rows, values)| (rows, PyBytes::new(py, &values))))
    }

    /// What lies in a gradient's memory goes into the next reduction even if the parameter gets none.
    fn keep(&self, py: Python<'_>, param: usize) -> PyResult<()> {
        let used = locked(&self.autograd).is_used(param);
        self.call(py, |reducer| reducer.keep(param, used))
    }

    /// Waits until all gradients are averages.
    fn finish(&self, py: Python<'_>) -> PyResult<()> {
        while !self.call(py, |reducer| Ok(reducer.wait_for(SLICE)))? {
            py.check_signals()?;
        }
        self.call(py, ddp::Reducer::finish)?;
        locked(&self.autograd).finished();
        Ok(())
    }

    /// Drops the iteration.
    fn reset(&self) {
        locked(&self.autograd).reset();
    }

    /// Adds nothing to an iteration of the others.
    fn take_part(&self, py: Python<'_>) -> PyResult<()> {
        self.call(py, ddp::Reducer::take_part)?;
        locked(&self.autograd).took_part();
        Ok(())
    }

    /// Did any rank use the parameter in the last iteration?
    fn is_used_anywhere(&self, py: Python<'_>, param: usize) -> PyResult<bool> {
        self.call(py, |reducer| Ok(reducer.is_used_anywhere(param)))
    }

    /// Declares a static graph. Returns whether it was not one before.
    fn set_static_graph(&self, py: Python<'_>) -> PyResult<bool> {
        if locked(&self.autograd).is_static() {
            return Ok(false);
        }
        self.call(py, ddp::Reducer::set_static_graph)?;
        locked(&self.autograd).set_static();
        Ok(true)
    }

    /// Sets whether the caller finishes iterations itself.
    fn set_manual(&self, required: bool) -> PyResult<()> {
        let is_set = locked(&self.autograd).set_manual(required);
        let message = "this cannot change while gradients are being reduced";
        if is_set { Ok(()) } else { Err(PyRuntimeError::new_err(message)) }
    }

    #[getter]
    fn is_running(&self) -> bool {
        locked(&self.autograd).is_running()
    }

    #[getter]
    fn is_manual(&self) -> bool {
        locked(&self.autograd).is_manual()
    }

    /// Is this the first iteration of a static graph?
    #[getter]
    fn learns(&self) -> bool {
        locked(&self.autograd).learns()
    }

    #[getter]
    fn has_learned(&self) -> bool {
        locked(&self.autograd).has_learned()
    }

    /// May parameters be left out of an iteration?
    #[getter]
    fn finds_unused(&self) -> bool {
        locked(&self.autograd).finds_unused()
    }

    /// Did all iterations so far leave out the same parameters?
    #[getter]
    fn seems_static(&self) -> bool {
        locked(&self.autograd).seems_static()
    }

    /// The parameters that got a gradient since the last reduction.
    fn used(&self) -> Vec<usize> {
        locked(&self.autograd).used()
    }

    /// Was the parameter counted in the first iteration of a static graph?
    fn was_counted(&self, param: usize) -> bool {
        locked(&self.autograd).was_counted(param)
    }

    /// Has `launch(index)` and `land(index)` called for every bucket instead of averaging it.
    fn set_hook(&self, py: Python<'_>, name: String, launch: Py<PyAny>, land: Py<PyAny>) -> PyResult<()> {
        let hook = Hook { name, launch, land, raised: Arc::clone(&self.raised) };
        self.call(py, |reducer| reducer.set_hook(hook))
    }

    /// One of the hooks that are written in Rust, by name.
    fn set_builtin_hook(&self, py: Python<'_>, name: &str) -> PyResult<()> {
        match name {
            "all_reduce" => self.call(py, |reducer| reducer.set_hook(hooks::AllReduce)),
            "fp16_compress" => self.call(py, |reducer| reducer.set_hook(hooks::Compress::fp16())),
            "bf16_compress" => self.call(py, |reducer| reducer.set_hook(hooks::Compress::bf16())),
            other => Err(PyValueError::new_err(format!("there is no built-in hook `{other}`"))),
        }
    }

    /// The reducer's own group, in which all ranks call the same.
    fn group(&self, py: Python<'_>) -> PyResult<Group> {
        self.call(py, |reducer| Ok(Group { inner: reducer.group().clone().into() }))
    }

    /// c10d's logging data: strings and integers.
    #[expect(clippy::type_complexity, reason = "two dictionaries for Python")]
    fn logging_data(&self, py: Python<'_>) -> PyResult<(Vec<(String, String)>, Vec<(String, i64)>)> {
        self.call(py, |reducer| {
            let data = reducer.logger().data();
            let strings = data.strings.iter().map(|(name, text)| (name.to_string(), text.clone()));
            let integers = data.integers.iter().map(|(name, number)| (name.to_string(), *number));
            Ok((strings.collect(), integers.collect()))
        })
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        self.call(py, |reducer| Ok(format!("{reducer:?}")))
    }
}

fn copied(values: &Bound<'_, PyAny>) -> PyResult<Buffer> {
    let view = lend(values, "values", Access::Read)?.view;
    let mut own = Buffer::zeros(view.dtype(), view.elements());
    view.pack(own.lend().span());
    Ok(own)
}

/// Rows of a parameter.
fn sparse(reducer: &ddp::Reducer, param: usize, rows: Vec<i64>, values: Buffer) -> SparseTensor {
    let shape = reducer.params().get(param).map_or(&[][..], |param| &param.shape);
    let first = shape.first().copied().unwrap_or_default();
    let dense = shape.iter().skip(1).product();
    SparseTensor { shape: vec![first], indices: rows, dense, values }
}

/// A hook that is written in Python.
struct Hook {
    name: String,
    launch: Py<PyAny>,
    land: Py<PyAny>,
    raised: Arc<Mutex<Option<PyErr>>>,
}

impl Hook {
    fn call(&self, function: &Py<PyAny>, bucket: &GradBucket, group: &tenfold::Group) -> tenfold::Result<()> {
        Python::attach(|py| {
            function.call1(py, (bucket.index(),)).map(drop).map_err(|raised| {
                let message = format!("the communication hook `{}` raised {raised}", self.name);
                *locked(&self.raised) = Some(raised);
                hook_error(group, message)
            })
        })
    }
}

impl CommHook for Hook {
    fn name(&self) -> &str {
        &self.name
    }

    fn launch(
        &mut self,
        bucket: &mut GradBucket,
        group: &tenfold::Group,
    ) -> tenfold::Result<Option<tenfold::Work>> {
        self.call(&self.launch, bucket, group)?;
        Ok(None)
    }

    fn land(&mut self, bucket: &mut GradBucket, group: &tenfold::Group) -> tenfold::Result<()> {
        self.call(&self.land, bucket, group)
    }
}
