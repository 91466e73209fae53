//! `Group`: the ranks, and every operation on any kind of tensor.
//!
//! Every operation does the same: it lends the memory of its arguments and makes a `Call`. `Group::run` submits all of them
//! without the interpreter, and either waits or returns a `Work`. A call with `async_op` goes on in the background. So the
//! table at the end has one entry for each operation, and a macro makes the methods.

#![expect(clippy::too_many_arguments, reason = "Python's keyword arguments")]

use std::ops::Deref;
use std::time::Duration;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use tenfold::{Call, DType, Options, Seat, StuckPolicy};

use crate::arguments::{checked_tag, each, in_elements, moved, reduce_op, reduced};
use crate::exceptions::{connect_error, group_error, refused};
use crate::recorder::{Shapes, noted};
use crate::registration::Registration;
use crate::shared_memory::SharedMemory;
use crate::store;
use crate::survivors;
use crate::tensor::Access;
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
    /// The group, for a call that may take so many seconds.
    fn limited(&self, timeout: Option<f64>) -> PyResult<tenfold::Group> {
        Ok(match timeout {
            Some(timeout) => self.inner.with_timeout(duration(timeout)?),
            None => self.inner.clone(),
        })
    }

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
        let mut group = self.limited(timeout)?;
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

pub(crate) fn options(
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

pub(crate) fn with_lookout(
    mut options: Options,
    stuck_after: Option<f64>,
    on_stuck: Option<&str>,
) -> PyResult<Options> {
    if let Some(time) = stuck_after {
        options = options.stuck_after(duration(time)?);
    }
    if let Some(policy) = on_stuck {
        let known = StuckPolicy::from_name(policy).ok_or_else(|| {
            PyValueError::new_err(format!("there is no policy `{policy}`; there are warn, dump and abort"))
        })?;
        options = options.on_stuck(known);
    }
    Ok(options)
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

    /// What a broadcast does with this rank's tensor.
    fn access(&self, root: usize) -> Access {
        if root == self.inner.rank() { Access::Read } else { Access::Write }
    }

    /// The part that a rank sends to itself must have the length of the part that it receives. The group refuses invalid splits.
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

/// The class as Python sees it. PyO3 takes all methods of a class in one block, so the macro makes the whole block: methods
/// that are written out, and one for each operation of the table. An entry has the name, the arguments, the tensors that go
/// in and out (for the recorder), those that the work returns, and the `Call`.
macro_rules! group_class {
    (
        { $($written_out:tt)* }
        $($(#[$about:meta])* $name:ident($self:ident, $py:ident $(, $argument:ident: $kind:ty $(= $default:tt)?)*)
            $inputs:expr => $outputs:expr, $tensors:expr, $call:expr;)*
    ) => {
        #[pymethods]
        impl Group {
            $($written_out)*

            $($(#[$about])*
            #[pyo3(signature = ($($argument $(= $default)?,)* async_op=false, timeout=None))]
            fn $name<'py>(
                &$self,
                $py: Python<'py>,
                $($argument: $kind,)*
                async_op: bool,
                timeout: Option<f64>,
            ) -> PyResult<Option<Work>> {
                let shapes = Shapes::of($inputs, $outputs);
                let call = $call;
                $self.run($py, shapes, $tensors, async_op, timeout, call)
            })*
        }
    };
}

group_class! {
    {
        /// Joins a group: returns once all ranks have.
        #[new]
        #[pyo3(signature = (store, rank, size, *, name="default", timeout=None, heartbeat=None, transport=None, deterministic=false, read_in_place=false, stuck_after=None, on_stuck=None, quorum=None, patience=None))]
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
            quorum: Option<&Object<'_>>,
            patience: Option<f64>,
        ) -> PyResult<Self> {
            crate::log::start()?;
            let store = store::from_python(store)?;
            let options = options(name, timeout, heartbeat, transport, deterministic)?;
            let options = with_lookout(options, stuck_after, on_stuck)?;
            let mut options = survivors::with_quorum(options, quorum, patience)?;
            if read_in_place {
                options = options.read_in_place();
            }
            let connect = move || tenfold::Group::connect(store, Seat { rank, size }, options);
            let connected = waiting::on_a_thread(py, "tenfold-connect", connect)?;
            Ok(Group { inner: connected.map_err(|error| connect_error(py, &error, timeout))?.into() })
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

        /// Aborts the group on all ranks. Their pending operations fail with the reason.
        #[pyo3(signature = (reason="by request"))]
        fn abort(&self, py: Python<'_>, reason: &str) {
            py.detach(|| self.inner.abort(reason));
        }

        /// A group of this process alone, to begin with; see `reconfigure`.
        #[staticmethod]
        #[pyo3(signature = (*, name="default", timeout=None, heartbeat=None, transport=None, deterministic=false, stuck_after=None, on_stuck=None, quorum=None, patience=None))]
        fn alone(
            py: Python<'_>,
            name: &str,
            timeout: Option<f64>,
            heartbeat: Option<f64>,
            transport: Option<&str>,
            deterministic: bool,
            stuck_after: Option<f64>,
            on_stuck: Option<&str>,
            quorum: Option<&Object<'_>>,
            patience: Option<f64>,
        ) -> PyResult<Self> {
            crate::log::start()?;
            let options = options(name, timeout, heartbeat, transport, deterministic)?;
            let options = with_lookout(options, stuck_after, on_stuck)?;
            let options = survivors::with_quorum(options, quorum, patience)?;
            let alone = py.detach(|| tenfold::Group::alone(options));
            Ok(Group { inner: alone.map_err(|error| group_error(py, &error))?.into() })
        }

        /// What other processes need to make a group with this one.
        fn handle(&self, py: Python<'_>) -> PyResult<String> {
            py.detach(|| self.inner.handle()).map_err(|error| group_error(py, &error))
        }

        /// A group of the processes with these handles, which all call it. Without them all, the group stays as it is.
        #[pyo3(signature = (handles, id, timeout=None))]
        fn reconfigure(
            &self,
            py: Python<'_>,
            handles: Vec<String>,
            id: u64,
            timeout: Option<f64>,
        ) -> PyResult<Self> {
            survivors::made(py, self.limited(timeout)?, move |group| group.reconfigure(&handles, id))
        }

        /// Ends everything that is under way on all ranks. `shrink` and `reconfigure` work afterwards.
        #[pyo3(signature = (reason="by request"))]
        fn revoke(&self, py: Python<'_>, reason: &str) {
            py.detach(|| self.inner.revoke(reason));
        }

        /// The ranks that are alive as a smaller group, without some that are. All others call it.
        #[pyo3(signature = (without=Vec::new(), timeout=None))]
        fn shrink(&self, py: Python<'_>, without: Vec<usize>, timeout: Option<f64>) -> PyResult<Self> {
            survivors::made(py, self.limited(timeout)?, move |group| group.shrink_without(&without))
        }

        /// Copies tensors from ranks that all have the same values to ranks that need them. All ranks of the group call it.
        #[pyo3(signature = (tensors, sources, targets, progress=None, timeout=None))]
        fn hand_over<'py>(
            &self,
            py: Python<'py>,
            tensors: Vec<Object<'py>>,
            sources: Vec<usize>,
            targets: Vec<usize>,
            progress: Option<Object<'py>>,
            timeout: Option<f64>,
        ) -> PyResult<()> {
            let is_target = targets.contains(&self.inner.rank());
            let access = if is_target { Access::Write } else { Access::Read };
            let views = each(&tensors, "tensors", access, moved)?;
            survivors::hand_over(py, self.limited(timeout)?, views, sources, targets, progress)
        }

        /// The bitwise AND of the numbers of all ranks that are alive; also in a group that has failed.
        #[pyo3(signature = (value, timeout=None))]
        fn agree(&self, py: Python<'_>, value: u64, timeout: Option<f64>) -> PyResult<u64> {
            survivors::agreed(py, self.limited(timeout)?, value)
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

        /// Lets peers on this host read shared memory of another library in place: `bytes` of a file that is mapped at `address`
        /// from its beginning, and that `keep` keeps mapped.
        fn register(&self, address: usize, bytes: usize, file: i32, keep: &Object<'_>) -> PyResult<Registration> {
            Registration::new(&self.inner, address, bytes, file, keep)
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
            let views = each(&tensors, "tensors", self.access(root), moved)?;
            let group = self.inner.clone();
            let send = move || tenfold::ddp::broadcast_coalesced(&group, views, root, buffer_size);
            let outcome = waiting::on_a_thread(py, "tenfold-broadcast", send)?;
            outcome.map_err(|error| group_error(py, &error))
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

        /// Receives a message from any rank. Always returns the `Work`, which knows the source.
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

    all_reduce(self, py, tensor: Object<'py>, op: &Object<'py>) [&tensor] => [&tensor], vec![tensor],
        Call::AllReduce { tensor: reduced(&tensor, "tensor", Access::Write)?, op: reduce_op(op)? };

    all_reduce_coalesced(self, py, tensors: Vec<Object<'py>>, op: &Object<'py>) &tensors => &tensors, tensors,
        Call::AllReduceCoalesced {
            tensors: each(&tensors, "tensors", Access::Write, reduced)?,
            op: reduce_op(op)?,
        };

    /// Reduces all tensors of all ranks, and stores the result in each of them.
    all_reduce_several(self, py, tensors: Vec<Object<'py>>, op: &Object<'py>) &tensors => &tensors, tensors,
        Call::AllReduceSeveral {
            tensors: each(&tensors, "tensors", Access::Write, reduced)?,
            op: reduce_op(op)?,
        };

    reduce(self, py, tensor: Object<'py>, root: i64, op: &Object<'py>) [&tensor] => [&tensor], vec![tensor],
        Call::Reduce {
            root: self.root(py, "reduce", root)?,
            tensor: reduced(&tensor, "tensor", Access::Write)?,
            op: reduce_op(op)?,
        };

    scan(self, py, tensor: Object<'py>, op: &Object<'py>) [&tensor] => [&tensor], vec![tensor],
        Call::Scan { tensor: reduced(&tensor, "tensor", Access::Write)?, op: reduce_op(op)? };

    broadcast(self, py, tensor: Object<'py>, root: i64) [&tensor] => [&tensor], vec![tensor], {
        let root = self.root(py, "broadcast", root)?;
        Call::Broadcast { tensor: moved(&tensor, "tensor", self.access(root))?, root }
    };

    /// Copies one of the root's tensors to every tensor of every rank.
    broadcast_several(self, py, tensors: Vec<Object<'py>>, root: i64, root_tensor: usize)
        &tensors => &tensors, tensors,
        Call::BroadcastSeveral {
            root: self.root(py, "broadcast", root)?,
            tensors: each(&tensors, "tensors", Access::Write, moved)?,
            root_tensor,
        };

    all_gather(self, py, outputs: Vec<Object<'py>>, input: Object<'py>) [&input] => &outputs, outputs,
        Call::AllGather {
            input: moved(&input, "input", Access::Read)?,
            outputs: each(&outputs, "outputs", Access::Write, moved)?,
        };

    all_gather_into(self, py, output: Object<'py>, input: Object<'py>) [&input] => [&output], vec![output],
        Call::AllGatherInto {
            input: moved(&input, "input", Access::Read)?,
            output: moved(&output, "output", Access::Write)?,
        };

    all_gather_into_coalesced(self, py, outputs: Vec<Object<'py>>, inputs: Vec<Object<'py>>)
        &inputs => &outputs, outputs,
        Call::AllGatherIntoCoalesced {
            inputs: each(&inputs, "inputs", Access::Read, moved)?,
            outputs: each(&outputs, "outputs", Access::Write, moved)?,
        };

    /// Takes a list of outputs for every input, one output for each rank.
    all_gather_coalesced(self, py, outputs: Vec<Vec<Object<'py>>>, inputs: Vec<Object<'py>>)
        &inputs => outputs.iter().flatten(), outputs.into_iter().flatten().collect(),
        Call::AllGatherCoalesced {
            inputs: each(&inputs, "inputs", Access::Read, moved)?,
            outputs: (outputs.iter().enumerate())
                .map(|(place, list)| each(list, &format!("outputs[{place}]"), Access::Write, moved))
                .collect::<PyResult<_>>()?,
        };

    gather(self, py, outputs: Vec<Object<'py>>, input: Object<'py>, root: i64) [&input] => &outputs, outputs,
        Call::Gather {
            root: self.root(py, "gather", root)?,
            input: moved(&input, "input", Access::Read)?,
            outputs: each(&outputs, "outputs", Access::Write, moved)?,
        };

    gather_into(self, py, output: Option<Object<'py>>, input: Object<'py>, root: i64)
        [&input] => &output, output.into_iter().collect(),
        Call::GatherInto {
            root: self.root(py, "gather", root)?,
            input: moved(&input, "input", Access::Read)?,
            output: output.as_ref().map(|output| moved(output, "output", Access::Write)).transpose()?,
        };

    scatter(self, py, output: Object<'py>, inputs: Vec<Object<'py>>, root: i64) &inputs => [&output], vec![output],
        Call::Scatter {
            root: self.root(py, "scatter", root)?,
            inputs: each(&inputs, "inputs", Access::Read, moved)?,
            output: moved(&output, "output", Access::Write)?,
        };

    reduce_scatter(self, py, output: Object<'py>, inputs: Vec<Object<'py>>, op: &Object<'py>)
        &inputs => [&output], vec![output],
        Call::ReduceScatter {
            inputs: each(&inputs, "inputs", Access::Read, reduced)?,
            op: reduce_op(op)?,
            output: reduced(&output, "output", Access::Write)?,
        };

    reduce_scatter_into(self, py, output: Object<'py>, input: Object<'py>, op: &Object<'py>)
        [&input] => [&output], vec![output],
        Call::ReduceScatterInto {
            input: reduced(&input, "input", Access::Read)?,
            op: reduce_op(op)?,
            output: reduced(&output, "output", Access::Write)?,
        };

    reduce_scatter_into_coalesced(self, py, outputs: Vec<Object<'py>>, inputs: Vec<Object<'py>>, op: &Object<'py>)
        &inputs => &outputs, outputs,
        Call::ReduceScatterIntoCoalesced {
            inputs: each(&inputs, "inputs", Access::Read, reduced)?,
            op: reduce_op(op)?,
            outputs: each(&outputs, "outputs", Access::Write, reduced)?,
        };

    all_to_all(self, py, outputs: Vec<Object<'py>>, inputs: Vec<Object<'py>>) &inputs => &outputs, outputs,
        Call::AllToAll {
            inputs: each(&inputs, "inputs", Access::Read, moved)?,
            outputs: each(&outputs, "outputs", Access::Write, moved)?,
        };

    send(self, py, tensor: Object<'py>, to: i64, tag: i64 = 0) [&tensor] => NOTHING, vec![tensor],
        Call::Send {
            to: self.peer(py, "send", to)?,
            tensor: moved(&tensor, "tensor", Access::Read)?,
            tag: checked_tag(py, tag)?,
        };

    recv(self, py, tensor: Object<'py>, source: i64, tag: i64 = 0) NOTHING => [&tensor], vec![tensor],
        Call::Recv {
            from: self.peer(py, "recv", source)?,
            tensor: moved(&tensor, "tensor", Access::Write)?,
            tag: checked_tag(py, tag)?,
        };

    barrier(self, py) NOTHING => NOTHING, Vec::new(), Call::Barrier {};
}
