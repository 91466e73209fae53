//! `Group`: the ranks, and every operation on any kind of tensor.
//!
//! Every operation does the same: it lends the memory of its arguments and makes a `Call`. `Group::run` submits all of them
//! without the interpreter, and either waits or returns a `Work`. A call with `async_op` goes on in the background.

#![expect(clippy::too_many_arguments, reason = "Python's keyword arguments")]

use std::ops::Deref;
use std::time::Duration;

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyInt, PyTuple};
use tenfold::{BufferView, Call, DType, Options, ReduceOp, Seat, StuckPolicy, Tag};

use crate::exceptions::{argument, group_error, refused};
use crate::recorder::{Shapes, noted};
use crate::registration::Registration;
use crate::shared_memory::SharedMemory;
use crate::store;
use crate::tensor::{Access, lend, rows};
use crate::waiting;
use crate::work::{Work, duration, wait};

/// Ranks that communicate.
#[pyclass(module = "tenfold._tenfold", frozen, subclass)]
pub(crate) struct Group {
    pub(crate) inner: Member,
}

/// The group, which is left without the interpreter: it says goodbye to its peers and may wait for a dump to be on disk.
pub(crate) struct Member(Option<tenfold::Group>);

impl From<tenfold::Group> for Member {
    fn from(group: tenfold::Group) -> Self {
        Member(Some(group))
    }
}

impl Deref for Member {
    type Target = tenfold::Group;

    #[inline]
    fn deref(&self) -> &tenfold::Group {
        self.0.as_ref().expect("it is taken when it is dropped")
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        // At the end of the interpreter there is none to let go of; the group is then dropped as any field is.
        Python::try_attach(|py| py.detach(|| drop(self.0.take())));
    }
}

type Object<'py> = Bound<'py, PyAny>;

/// No tensors on a side of a call.
const NOTHING: [&Object<'static>; 0] = [];

impl Group {
    /// Calls an operation and waits for it, or not.
    fn run<'py>(
        &self,
        py: Python<'py>,
        shapes: Shapes,
        tensors: Vec<Object<'py>>,
        async_op: bool,
        timeout: Option<f64>,
        call: Call,
    ) -> PyResult<Option<Work>> {
        let mut group = self.inner.clone();
        if let Some(timeout) = timeout {
            group = group.with_timeout(duration(timeout)?);
        }
        if async_op {
            group = group.background();
        }
        let work = noted(py, shapes, || group.submit(call))?.map_err(|error| group_error(py, &error))?;
        if async_op {
            return Work::new(py, work, tensors).map(Some);
        }
        wait(py, &work, None)?;
        Ok(None)
    }
}

fn options(
    name: &str,
    timeout: Option<f64>,
    heartbeat: Option<f64>,
    transport: Option<&str>,
    deterministic: bool,
) -> PyResult<Options> {
    let mut options = Options::new(name);
    if let Some(timeout) = timeout {
        options = options.timeout(duration(timeout)?);
    }
    if let Some(heartbeat) = heartbeat {
        options = options.heartbeat(duration(heartbeat)?);
    }
    options = match transport {
        None | Some("auto") => options,
        Some("shm") => options.only_shared_memory(),
        Some("tcp") => options.only_tcp(),
        Some(other) => {
            let message = format!("there is no transport `{other}`; there are auto, shm and tcp");
            return Err(PyValueError::new_err(message));
        }
    };
    Ok(if deterministic { options.deterministic() } else { options })
}

/// An operation as c10d's number, with a factor for PREMUL_SUM, or as its name.
fn reduce_op(op: &Object<'_>) -> PyResult<ReduceOp> {
    if let Ok(code) = op.cast::<PyInt>() {
        let op = match code.extract::<u8>()? {
            0 => ReduceOp::Sum,
            1 => ReduceOp::Avg,
            2 => ReduceOp::Product,
            3 => ReduceOp::Min,
            4 => ReduceOp::Max,
            5 => ReduceOp::Band,
            6 => ReduceOp::Bor,
            7 => ReduceOp::Bxor,
            other => return Err(PyValueError::new_err(format!("there is no reduction number {other}"))),
        };
        return Ok(op);
    }
    if let Ok(pair) = op.cast::<PyTuple>() {
        let (code, factor): (u8, f64) = pair.extract()?;
        if code == 8 {
            return Ok(ReduceOp::PremulSum(factor));
        }
    }
    let Ok(name) = op.extract::<String>() else {
        let message = format!("op must be a ReduceOp or the name of one, not {}", op.get_type().name()?);
        return Err(PyTypeError::new_err(message));
    };
    name.to_lowercase()
        .parse()
        .map_err(|error: tenfold::error::UnknownOp| PyValueError::new_err(error.to_string()))
}

fn reduced(object: &Object<'_>, what: &str, access: Access) -> PyResult<BufferView> {
    lend(object, what, access)?.reducible(object, what)
}

fn moved(object: &Object<'_>, what: &str, access: Access) -> PyResult<BufferView> {
    Ok(lend(object, what, access)?.view)
}

/// Every tensor of a list, named by its place.
fn each(
    list: &[Object<'_>],
    what: &str,
    access: Access,
    lend: impl Fn(&Object<'_>, &str, Access) -> PyResult<BufferView>,
) -> PyResult<Vec<BufferView>> {
    list.iter().enumerate().map(|(place, object)| lend(object, &format!("{what}[{place}]"), access)).collect()
}

impl Group {
    /// A root as a caller gave it, which must be a rank.
    fn root(&self, py: Python<'_>, operation: &str, root: i64) -> PyResult<usize> {
        let size = self.inner.size();
        usize::try_from(root).ok().filter(|root| *root < size).ok_or_else(|| {
            let last = size - 1;
            let reason =
                format!("invalid root rank: {root}: root {root} is out of range: ranks are 0 to {last}");
            refused(py, &self.inner, operation, &reason)
        })
    }

    /// What a rank sends to itself has a place of that length. Splits that make no sense are the group's to refuse.
    fn check_own_part(
        &self,
        (from, sent): (&[usize], usize),
        (to, received): (&[usize], usize),
    ) -> Result<(), String> {
        let (rank, size) = (self.inner.rank(), self.inner.size());
        let part = |splits: &[usize], elements: usize| match splits {
            [] => elements.is_multiple_of(size).then_some(elements / size),
            _ => splits.get(rank).copied().filter(|_| splits.len() == size),
        };
        match (part(from, sent), part(to, received)) {
            (Some(sent), Some(received)) if sent != received => Err(format!(
                "this rank's part of the input has {sent} elements, but its place in the output has {received}"
            )),
            _ => Ok(()),
        }
    }

    /// A peer as a caller gave it; the group looks whether there is one of that number.
    fn peer(&self, py: Python<'_>, operation: &str, peer: i64) -> PyResult<usize> {
        usize::try_from(peer).map_err(|_| {
            let last = self.inner.size() - 1;
            let reason = format!("rank {peer} is out of range: ranks are 0 to {last}");
            refused(py, &self.inner, operation, &reason)
        })
    }
}

/// A tag that c10d's protocol can carry; the group refuses those that are its own.
fn checked_tag(py: Python<'_>, tag: i64) -> PyResult<Tag> {
    u32::try_from(tag)
        .map(Tag)
        .map_err(|_| argument(py, format!("tag {tag} is out of range: tags are 32-bit and not negative")))
}

/// Splits in rows, as elements.
fn in_elements(object: &Object<'_>, what: &str, view: &BufferView, splits: &[i64]) -> PyResult<Vec<usize>> {
    if splits.is_empty() {
        return Ok(Vec::new());
    }
    let py = object.py();
    if let Some(split) = splits.iter().find(|split| **split < 0) {
        return Err(argument(py, format!("the split sizes of {what} include {split}, which is negative")));
    }
    let rows = rows(object)?;
    let sum = splits.iter().try_fold(0_i64, |sum, split| sum.checked_add(*split));
    if sum.map(|sum| sum as usize) != Some(rows) {
        let sum = sum.map_or("more than fits".to_string(), |sum| sum.to_string());
        return Err(argument(
            py,
            format!("the split sizes of {what} add up to {sum}, but it has {rows} rows"),
        ));
    }
    let row = view.elements().checked_div(rows).unwrap_or(0);
    Ok(splits.iter().map(|split| *split as usize * row).collect())
}

#[pymethods]
impl Group {
    /// Joins a group: returns once all ranks have.
    #[new]
    #[pyo3(signature = (store, rank, size, *, name="default", timeout=None, heartbeat=None, transport=None, deterministic=false, read_in_place=false, stuck_after=None, on_stuck=None))]
    fn new(
        py: Python<'_>,
        store: &Object<'_>,
        rank: usize,
        size: usize,
        name: &str,
        timeout: Option<f64>,
        heartbeat: Option<f64>,
        transport: Option<&str>,
        deterministic: bool,
        read_in_place: bool,
        stuck_after: Option<f64>,
        on_stuck: Option<&str>,
    ) -> PyResult<Self> {
        crate::log::start()?;
        let store = store::from_python(store)?;
        let mut options = options(name, timeout, heartbeat, transport, deterministic)?;
        if read_in_place {
            options = options.read_in_place();
        }
        if let Some(time) = stuck_after {
            options = options.stuck_after(duration(time)?);
        }
        if let Some(policy) = on_stuck {
            let known = StuckPolicy::from_name(policy).ok_or_else(|| {
                PyValueError::new_err(format!(
                    "there is no policy `{policy}`; there are warn, dump and abort"
                ))
            })?;
            options = options.on_stuck(known);
        }
        let connect = move || tenfold::Group::connect(store, Seat { rank, size }, options);
        let connected = waiting::on_a_thread(py, "tenfold-connect", connect)?;
        Ok(Group { inner: connected.map_err(|error| group_error(py, &error))?.into() })
    }

    #[getter]
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    #[getter]
    fn size(&self) -> usize {
        self.inner.size()
    }

    #[getter]
    fn name(&self) -> &str {
        self.inner.name()
    }

    /// The host of every rank, as a number.
    fn hosts(&self) -> Vec<usize> {
        let topology = self.inner.topology();
        (0..self.inner.size()).map(|rank| topology.host_of(rank)).collect()
    }

    /// How many operations this rank has called.
    fn sequence_number(&self, py: Python<'_>) -> u64 {
        py.detach(|| self.inner.sequence_number())
    }

    /// Why the group can no longer be used, or None.
    fn failure(&self, py: Python<'_>) -> Option<PyErr> {
        py.detach(|| self.inner.failure()).map(|error| group_error(py, &error))
    }

    /// Gives the group up on all ranks, which are told the reason.
    #[pyo3(signature = (reason="by request"))]
    fn abort(&self, py: Python<'_>, reason: &str) {
        py.detach(|| self.inner.abort(reason));
    }

    /// Says what the group is for, and which rank of the whole job each member is, in dumps of the recorder.
    #[pyo3(signature = (description=None, global_ranks=None))]
    fn describe(
        &self,
        py: Python<'_>,
        description: Option<&str>,
        global_ranks: Option<Vec<usize>>,
    ) -> PyResult<()> {
        let described = self.inner.describe(description, global_ranks.as_deref());
        described.map_err(|error| group_error(py, &error))
    }

    /// A group of some ranks of this one, which all ranks of this one must ask for; None for the others.
    #[pyo3(signature = (ranks, *, name, timeout=None, deterministic=false))]
    fn subgroup(
        &self,
        py: Python<'_>,
        ranks: Vec<usize>,
        name: &str,
        timeout: Option<f64>,
        deterministic: bool,
    ) -> PyResult<Option<Self>> {
        let options = options(name, timeout, None, None, deterministic)?;
        let group = self.inner.clone();
        let made = waiting::on_a_thread(py, "tenfold-connect", move || group.subgroup(&ranks, options))?;
        Ok(made.map_err(|error| group_error(py, &error))?.map(|inner| Group { inner: inner.into() }))
    }

    /// Ranks with the same colour form a group, in the order of their keys; None for a rank without a colour.
    #[pyo3(signature = (colour, key=0, *, name, timeout=None, deterministic=false))]
    fn split(
        &self,
        py: Python<'_>,
        colour: Option<u32>,
        key: i64,
        name: &str,
        timeout: Option<f64>,
        deterministic: bool,
    ) -> PyResult<Option<Self>> {
        let options = options(name, timeout, None, None, deterministic)?;
        let group = self.inner.clone();
        let made = waiting::on_a_thread(py, "tenfold-connect", move || group.split(colour, key, options))?;
        Ok(made.map_err(|error| group_error(py, &error))?.map(|inner| Group { inner: inner.into() }))
    }

    /// `bytes` zeroed bytes that peers on this host read in place.
    fn shared_memory(&self, py: Python<'_>, bytes: usize) -> PyResult<SharedMemory> {
        let tensor = py.detach(|| self.inner.shared_buffer(DType::U8, bytes));
        Ok(SharedMemory::new(tensor.map_err(|error| group_error(py, &error))?))
    }

    /// Has peers on this host read shared memory of somebody else in place: `bytes` of a file that is mapped at `address` from
    /// its beginning, and that `keep` keeps mapped.
    fn register(&self, address: usize, bytes: usize, file: i32, keep: &Object<'_>) -> PyResult<Registration> {
        Registration::new(&self.inner, address, bytes, file, keep)
    }

    #[pyo3(signature = (tensor, op, async_op=false, timeout=None))]
    fn all_reduce<'py>(
        &self,
        py: Python<'py>,
        tensor: Object<'py>,
        op: &Object<'py>,
        async_op: bool,
        timeout: Option<f64>,
    ) -> PyResult<Option<Work>> {
        let shapes = Shapes::of([&tensor], [&tensor]);
        let (view, op) = (reduced(&tensor, "tensor", Access::Write)?, reduce_op(op)?);
        let call = Call::AllReduce { tensor: view, op };
        self.run(py, shapes, vec![tensor], async_op, timeout, call)
    }

    #[pyo3(signature = (tensors, op, async_op=false, timeout=None))]
    fn all_reduce_coalesced<'py>(
        &self,
        py: Python<'py>,
        tensors: Vec<Object<'py>>,
        op: &Object<'py>,
        async_op: bool,
        timeout: Option<f64>,
    ) -> PyResult<Option<Work>> {
        let shapes = Shapes::of(&tensors, &tensors);
        let (views, op) = (each(&tensors, "tensors", Access::Write, reduced)?, reduce_op(op)?);
        let call = Call::AllReduceCoalesced { tensors: views, op };
        self.run(py, shapes, tensors, async_op, timeout, call)
    }

    /// All tensors of all ranks reduced, for each of them.
    #[pyo3(signature = (tensors, op, async_op=false, timeout=None))]
    fn all_reduce_several<'py>(
        &self,
        py: Python<'py>,
        tensors: Vec<Object<'py>>,
        op: &Object<'py>,
        async_op: bool,
        timeout: Option<f64>,
    ) -> PyResult<Option<Work>> {
        let shapes = Shapes::of(&tensors, &tensors);
        let (views, op) = (each(&tensors, "tensors", Access::Write, reduced)?, reduce_op(op)?);
        let call = Call::AllReduceSeveral { tensors: views, op };
        self.run(py, shapes, tensors, async_op, timeout, call)
    }

    #[pyo3(signature = (tensor, root, op, async_op=false, timeout=None))]
    fn reduce<'py>(
        &self,
        py: Python<'py>,
        tensor: Object<'py>,
        root: i64,
        op: &Object<'py>,
        async_op: bool,
        timeout: Option<f64>,
    ) -> PyResult<Option<Work>> {
        let root = self.root(py, "reduce", root)?;
        let shapes = Shapes::of([&tensor], [&tensor]);
        let (view, op) = (reduced(&tensor, "tensor", Access::Write)?, reduce_op(op)?);
        let call = Call::Reduce { tensor: view, op, root };
        self.run(py, shapes, vec![tensor], async_op, timeout, call)
    }

    #[pyo3(signature = (tensor, root, async_op=false, timeout=None))]
    fn broadcast<'py>(
        &self,
        py: Python<'py>,
        tensor: Object<'py>,
        root: i64,
        async_op: bool,
        timeout: Option<f64>,
    ) -> PyResult<Option<Work>> {
        let root = self.root(py, "broadcast", root)?;
        let shapes = Shapes::of([&tensor], [&tensor]);
        let access = if root == self.inner.rank() { Access::Read } else { Access::Write };
        let view = moved(&tensor, "tensor", access)?;
        let call = Call::Broadcast { tensor: view, root };
        self.run(py, shapes, vec![tensor], async_op, timeout, call)
    }

    /// One of the root's tensors for every tensor of every rank.
    #[pyo3(signature = (tensors, root, root_tensor, async_op=false, timeout=None))]
    fn broadcast_several<'py>(
        &self,
        py: Python<'py>,
        tensors: Vec<Object<'py>>,
        root: i64,
        root_tensor: usize,
        async_op: bool,
        timeout: Option<f64>,
    ) -> PyResult<Option<Work>> {
        let root = self.root(py, "broadcast", root)?;
        let shapes = Shapes::of(&tensors, &tensors);
        let views = each(&tensors, "tensors", Access::Write, moved)?;
        let call = Call::BroadcastSeveral { tensors: views, root, root_tensor };
        self.run(py, shapes, tensors, async_op, timeout, call)
    }

    /// Many tensors of the root for all ranks, in flat pieces of about `buffer_size` bytes; waits for all of them.
    fn broadcast_coalesced<'py>(
        &self,
        py: Python<'py>,
        tensors: Vec<Object<'py>>,
        root: i64,
        buffer_size: usize,
    ) -> PyResult<()> {
        let root = self.root(py, "broadcast", root)?;
        let access = if root == self.inner.rank() { Access::Read } else { Access::Write };
        let views = each(&tensors, "tensors", access, moved)?;
        let group = self.inner.clone();
        let send = move || tenfold::ddp::broadcast_coalesced(&group, views, root, buffer_size);
        let outcome = waiting::on_a_thread(py, "tenfold-broadcast", send)?;
        outcome.map_err(|error| group_error(py, &error))
    }

    #[pyo3(signature = (outputs, input, async_op=false, timeout=None))]
    fn all_gather<'py>(
        &self,
        py: Python<'py>,
        outputs: Vec<Object<'py>>,
        input: Object<'py>,
        async_op: bool,
        timeout: Option<f64>,
    ) -> PyResult<Option<Work>> {
        let shapes = Shapes::of([&input], &outputs);
        let view = moved(&input, "input", Access::Read)?;
        let views = each(&outputs, "outputs", Access::Write, moved)?;
        let call = Call::AllGather { outputs: views, input: view };
        self.run(py, shapes, outputs, async_op, timeout, call)
    }

    #[pyo3(signature = (output, input, async_op=false, timeout=None))]
    fn all_gather_into<'py>(
        &self,
        py: Python<'py>,
        output: Object<'py>,
        input: Object<'py>,
        async_op: bool,
        timeout: Option<f64>,
    ) -> PyResult<Option<Work>> {
        let shapes = Shapes::of([&input], [&output]);
        let view = moved(&input, "input", Access::Read)?;
        let target = moved(&output, "output", Access::Write)?;
        let call = Call::AllGatherInto { output: target, input: view };
        self.run(py, shapes, vec![output], async_op, timeout, call)
    }

    #[pyo3(signature = (outputs, inputs, async_op=false, timeout=None))]
    fn all_gather_into_coalesced<'py>(
        &self,
        py: Python<'py>,
        outputs: Vec<Object<'py>>,
        inputs: Vec<Object<'py>>,
        async_op: bool,
        timeout: Option<f64>,
    ) -> PyResult<Option<Work>> {
        let shapes = Shapes::of(&inputs, &outputs);
        let views = each(&inputs, "inputs", Access::Read, moved)?;
        let targets = each(&outputs, "outputs", Access::Write, moved)?;
        let call = Call::AllGatherIntoCoalesced { outputs: targets, inputs: views };
        self.run(py, shapes, outputs, async_op, timeout, call)
    }

    /// For every input a list of outputs, one per rank.
    #[pyo3(signature = (outputs, inputs, async_op=false, timeout=None))]
    fn all_gather_coalesced<'py>(
        &self,
        py: Python<'py>,
        outputs: Vec<Vec<Object<'py>>>,
        inputs: Vec<Object<'py>>,
        async_op: bool,
        timeout: Option<f64>,
    ) -> PyResult<Option<Work>> {
        let shapes = Shapes::of(&inputs, outputs.iter().flatten());
        let views = each(&inputs, "inputs", Access::Read, moved)?;
        let lists = outputs.iter().enumerate();
        let targets = lists
            .map(|(place, list)| each(list, &format!("outputs[{place}]"), Access::Write, moved))
            .collect::<PyResult<_>>()?;
        let tensors = outputs.into_iter().flatten().collect();
        let call = Call::AllGatherCoalesced { outputs: targets, inputs: views };
        self.run(py, shapes, tensors, async_op, timeout, call)
    }

    #[pyo3(signature = (outputs, input, root, async_op=false, timeout=None))]
    fn gather<'py>(
        &self,
        py: Python<'py>,
        outputs: Vec<Object<'py>>,
        input: Object<'py>,
        root: i64,
        async_op: bool,
        timeout: Option<f64>,
    ) -> PyResult<Option<Work>> {
        let root = self.root(py, "gather", root)?;
        let shapes = Shapes::of([&input], &outputs);
        let view = moved(&input, "input", Access::Read)?;
        let views = each(&outputs, "outputs", Access::Write, moved)?;
        let call = Call::Gather { outputs: views, input: view, root };
        self.run(py, shapes, outputs, async_op, timeout, call)
    }

    #[pyo3(signature = (output, input, root, async_op=false, timeout=None))]
    fn gather_into<'py>(
        &self,
        py: Python<'py>,
        output: Option<Object<'py>>,
        input: Object<'py>,
        root: i64,
        async_op: bool,
        timeout: Option<f64>,
    ) -> PyResult<Option<Work>> {
        let root = self.root(py, "gather", root)?;
        let shapes = Shapes::of([&input], &output);
        let view = moved(&input, "input", Access::Read)?;
        let target = output.as_ref().map(|output| moved(output, "output", Access::Write)).transpose()?;
        let tensors = output.into_iter().collect();
        let call = Call::GatherInto { output: target, input: view, root };
        self.run(py, shapes, tensors, async_op, timeout, call)
    }

    #[pyo3(signature = (output, inputs, root, async_op=false, timeout=None))]
    fn scatter<'py>(
        &self,
        py: Python<'py>,
        output: Object<'py>,
        inputs: Vec<Object<'py>>,
        root: i64,
        async_op: bool,
        timeout: Option<f64>,
    ) -> PyResult<Option<Work>> {
        let root = self.root(py, "scatter", root)?;
        let shapes = Shapes::of(&inputs, [&output]);
        let views = each(&inputs, "inputs", Access::Read, moved)?;
        let target = moved(&output, "output", Access::Write)?;
        let call = Call::Scatter { output: target, inputs: views, root };
        self.run(py, shapes, vec![output], async_op, timeout, call)
    }

    #[pyo3(signature = (output, inputs, op, async_op=false, timeout=None))]
    fn reduce_scatter<'py>(
        &self,
        py: Python<'py>,
        output: Object<'py>,
        inputs: Vec<Object<'py>>,
        op: &Object<'py>,
        async_op: bool,
        timeout: Option<f64>,
    ) -> PyResult<Option<Work>> {
        let shapes = Shapes::of(&inputs, [&output]);
        let (views, op) = (each(&inputs, "inputs", Access::Read, reduced)?, reduce_op(op)?);
        let target = reduced(&output, "output", Access::Write)?;
        let call = Call::ReduceScatter { output: target, inputs: views, op };
        self.run(py, shapes, vec![output], async_op, timeout, call)
    }

    #[pyo3(signature = (output, input, op, async_op=false, timeout=None))]
    fn reduce_scatter_into<'py>(
        &self,
        py: Python<'py>,
        output: Object<'py>,
        input: Object<'py>,
        op: &Object<'py>,
        async_op: bool,
        timeout: Option<f64>,
    ) -> PyResult<Option<Work>> {
        let shapes = Shapes::of([&input], [&output]);
        let (view, op) = (reduced(&input, "input", Access::Read)?, reduce_op(op)?);
        let target = reduced(&output, "output", Access::Write)?;
        let call = Call::ReduceScatterInto { output: target, input: view, op };
        self.run(py, shapes, vec![output], async_op, timeout, call)
    }

    #[pyo3(signature = (outputs, inputs, op, async_op=false, timeout=None))]
    fn reduce_scatter_into_coalesced<'py>(
        &self,
        py: Python<'py>,
        outputs: Vec<Object<'py>>,
        inputs: Vec<Object<'py>>,
        op: &Object<'py>,
        async_op: bool,
        timeout: Option<f64>,
    ) -> PyResult<Option<Work>> {
        let shapes = Shapes::of(&inputs, &outputs);
        let (views, op) = (each(&inputs, "inputs", Access::Read, reduced)?, reduce_op(op)?);
        let targets = each(&outputs, "outputs", Access::Write, reduced)?;
        let call = Call::ReduceScatterIntoCoalesced { outputs: targets, inputs: views, op };
        self.run(py, shapes, outputs, async_op, timeout, call)
    }

    #[pyo3(signature = (outputs, inputs, async_op=false, timeout=None))]
    fn all_to_all<'py>(
        &self,
        py: Python<'py>,
        outputs: Vec<Object<'py>>,
        inputs: Vec<Object<'py>>,
        async_op: bool,
        timeout: Option<f64>,
    ) -> PyResult<Option<Work>> {
        let shapes = Shapes::of(&inputs, &outputs);
        let views = each(&inputs, "inputs", Access::Read, moved)?;
        let targets = each(&outputs, "outputs", Access::Write, moved)?;
        let call = Call::AllToAll { outputs: targets, inputs: views };
        self.run(py, shapes, outputs, async_op, timeout, call)
    }

    /// Splits are counted in rows; without them both tensors are cut equally.
    #[pyo3(signature = (output, input, output_splits=None, input_splits=None, async_op=false, timeout=None))]
    fn all_to_all_single<'py>(
        &self,
        py: Python<'py>,
        output: Object<'py>,
        input: Object<'py>,
        output_splits: Option<Vec<i64>>,
        input_splits: Option<Vec<i64>>,
        async_op: bool,
        timeout: Option<f64>,
    ) -> PyResult<Option<Work>> {
        let shapes = Shapes::of([&input], [&output]);
        let view = moved(&input, "input", Access::Read)?;
        let target = moved(&output, "output", Access::Write)?;
        let from = in_elements(&input, "input", &view, &input_splits.unwrap_or_default())?;
        let to = in_elements(&output, "output", &target, &output_splits.unwrap_or_default())?;
        self.check_own_part((&from, view.elements()), (&to, target.elements()))
            .map_err(|reason| refused(py, &self.inner, "all_to_all_single", &reason))?;
        let call =
            Call::AllToAllSingle { output: target, input: view, output_splits: to, input_splits: from };
        self.run(py, shapes, vec![output], async_op, timeout, call)
    }

    #[pyo3(signature = (tensor, to, tag=0, async_op=false, timeout=None))]
    fn send<'py>(
        &self,
        py: Python<'py>,
        tensor: Object<'py>,
        to: i64,
        tag: i64,
        async_op: bool,
        timeout: Option<f64>,
    ) -> PyResult<Option<Work>> {
        let to = self.peer(py, "send", to)?;
        let shapes = Shapes::of([&tensor], NOTHING);
        let (view, tag) = (moved(&tensor, "tensor", Access::Read)?, checked_tag(py, tag)?);
        let call = Call::Send { tensor: view, to, tag };
        self.run(py, shapes, vec![tensor], async_op, timeout, call)
    }

    #[pyo3(signature = (tensor, source, tag=0, async_op=false, timeout=None))]
    fn recv<'py>(
        &self,
        py: Python<'py>,
        tensor: Object<'py>,
        source: i64,
        tag: i64,
        async_op: bool,
        timeout: Option<f64>,
    ) -> PyResult<Option<Work>> {
        let source = self.peer(py, "recv", source)?;
        let shapes = Shapes::of(NOTHING, [&tensor]);
        let (view, tag) = (moved(&tensor, "tensor", Access::Write)?, checked_tag(py, tag)?);
        let call = Call::Recv { tensor: view, from: source, tag };
        self.run(py, shapes, vec![tensor], async_op, timeout, call)
    }

    /// Receives from anybody: the `Work`, always, because it knows who it was.
    #[pyo3(signature = (tensor, tag=0, timeout=None))]
    fn recv_any<'py>(
        &self,
        py: Python<'py>,
        tensor: Object<'py>,
        tag: i64,
        timeout: Option<f64>,
    ) -> PyResult<Option<Work>> {
        let shapes = Shapes::of(NOTHING, [&tensor]);
        let (view, tag) = (moved(&tensor, "tensor", Access::Write)?, checked_tag(py, tag)?);
        let call = Call::RecvAny { tensor: view, tag };
        self.run(py, shapes, vec![tensor], true, timeout, call)
    }

    #[pyo3(signature = (async_op=false, timeout=None))]
    fn barrier(&self, py: Python<'_>, async_op: bool, timeout: Option<f64>) -> PyResult<Option<Work>> {
        let shapes = Shapes::of(NOTHING, NOTHING);
        self.run(py, shapes, Vec::new(), async_op, timeout, Call::Barrier {})
    }

    /// A barrier in which rank 0 finds out who is missing.
    fn monitored_barrier(&self, py: Python<'_>, timeout: f64, wait_for_all: bool) -> PyResult<()> {
        let timeout: Duration = duration(timeout)?;
        let group = self.inner.clone();
        let meet = move || group.monitored_barrier(timeout, wait_for_all);
        let outcome = waiting::on_a_thread(py, "tenfold-barrier", meet)?;
        outcome.map_err(|error| group_error(py, &error))
    }

    fn __repr__(&self) -> String {
        format!("{:?}", *self.inner)
    }
}
