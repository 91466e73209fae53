"""The backend `tenfold` of `torch.distributed`, for CPU tensors.

`Backend` implements the operations: each converts c10d's arguments to those of a tenfold group. PyTorch calls
it through its dispatcher, so that its flight recorder, its hooks and its debug modes see every operation.
`ProcessGroup` is the object that users hold. It returns the `Work` that `Backend` made, because the work that
comes out of the dispatcher only has `wait`.

In a group of several devices, such as "cpu:tenfold,cuda:nccl", PyTorch's own process group holds the backends
of all of them, and only `Backend` is tenfold's.

If the caller waits immediately (`async_op=False`), the operation has completed when the call returns, and the
call returns nothing: making a handle costs more than a small collective.
"""

import functools
import threading
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.autograd import _profiler_enabled

from tenfold import _tenfold
from tenfold.exceptions import DistError
from tenfold.torch import refusals, sparse
from tenfold.torch.exceptions import DistArgumentError, DistBackendError
from tenfold.torch.memory import WORTH_SHARING, SharedStorages
from tenfold.torch.profiling import ProfiledCall
from tenfold.torch.work import Work

_c10d = torch._C._distributed_c10d
_Base = getattr(dist, "BackendBase", _c10d.Backend)
_CPU = torch.device("cpu")
_CUSTOM = dist.ProcessGroup.BackendType.CUSTOM
_UNSET = timedelta(milliseconds=-1)
_PREMUL_SUM = int(dist.ReduceOp.RedOpType.PREMUL_SUM)

# At level DETAIL PyTorch puts its `_ProcessGroupWrapper` around a backend that shares its group with others.
# The wrapper holds only the C++ half of the backend, which does not work without its Python half. So this
# keeps the Python half alive as long as the group.
_in_groups_of_pytorch: "WeakKeyDictionary[dist.ProcessGroup, list[Backend]]" = WeakKeyDictionary()


def create(options: Any, backend_options: Any = None) -> "Backend | ProcessGroup":
    """Makes a group of this backend. `torch.distributed` calls it."""
    # Both read the same variable, but a program may have set a higher level in PyTorch alone.
    if (level := int(dist.get_debug_level())) > _tenfold.debug_level():
        _tenfold.set_debug_level(level)
    backend = Backend(
        options.store,
        options.group_rank,
        options.group_size,
        options.timeout,
        options.group_id,
        options.global_ranks_in_group,  # empty for the default group
    )
    # "custom" is this backend. Another name means that the group is PyTorch's, with several backends.
    group = options.process_group
    if group is not None and group.name() != "custom":
        backend.is_beside_others = True
        _in_groups_of_pytorch.setdefault(group, []).append(backend)
        return backend
    return ProcessGroup(options.store, backend)


def _one(tensors: list[torch.Tensor], what: str) -> torch.Tensor:
    if len(tensors) != 1:
        raise DistArgumentError(f"{what} must be a list of one tensor, not of {len(tensors)}")
    return tensors[0]


def _options(timeout: timedelta, name: str, global_ranks: Sequence[int]) -> Any:
    options = _c10d.Backend.Options("tenfold", timeout)
    options.group_name, options.global_ranks_in_group = name, list(global_ranks)
    return options


def _list(lists: list[list[torch.Tensor]], what: str) -> list[torch.Tensor]:
    """Returns the list that only the root passes."""
    if len(lists) > 1:
        raise DistArgumentError(f"{what} must be one list of tensors, not {len(lists)}")
    return lists[0] if lists else []


def _op(op: Any) -> int | tuple[int, float]:
    code = op.op.value
    return code if code != _PREMUL_SUM else (code, float(op.factor))


class _Left:
    """Replaces the group of a backend that was shut down."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, operation: str) -> Any:
        raise DistBackendError(f"{operation}: group `{self._name}` was shut down")


class Backend(_Base):
    """Moves tensors between the ranks of one group."""

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        timeout: timedelta,
        name: str,
        global_ranks: Sequence[int] = (),
    ) -> None:
        try:
            super().__init__(rank, size)
        except TypeError as error:  # this PyTorch has no such constructor
            message = "tenfold needs a PyTorch with backends written in Python: 2.14 or newer"
            raise RuntimeError(message) from error
        self._name = name
        self._options = _options(timeout, name, global_ranks)
        self._seconds: float | None = None  # set if the timeout of the group was changed
        self._coalescing: list[Work] | None = None
        self.is_beside_others = False  # in a group of several devices
        self.shared_storages = SharedStorages()
        # PyTorch's DDP keeps only the C++ half of a handle on a single number (how many ranks have data left)
        # and waits for it in backward, which needs the Python half. So small handles are kept for a while.
        self._small: deque[Work] = deque(maxlen=1024)
        self.made = threading.local()  # the handle of this thread's last call; see `_dispatched`
        seconds = timeout.total_seconds()
        # The tenfold group behind this backend.
        self.group = _tenfold.Group(store, rank, size, name=name or "default", timeout=seconds)
        self._global_ranks = list(global_ranks) or list(range(size))
        self.group.describe(None, self._global_ranks)

    # c10d's properties of a backend. The inherited ones call themselves, so each is defined here.
    supports_splitting = property(lambda self: True)
    supports_coalescing = property(lambda self: True)
    _supports_time_estimate = property(lambda self: False)
    supports_shrinking = property(lambda self: False)
    supports_reconfigure = property(lambda self: False)
    supports_window = property(lambda self: False)
    options = property(lambda self: self._options)

    def supports_tensor_alloc(self, device_index: int) -> bool:
        return False  # `tenfold.torch.empty` is for that

    def getBackendName(self) -> str:  # noqa: N802, the name that PyTorch looks for
        return "tenfold"

    name = getBackendName

    def _limit(self, options: Any) -> float | None:
        timeout = options.timeout
        return self._seconds if timeout == _UNSET else timeout.total_seconds()

    def _finish(self, work: _tenfold.Work | None, tensors: list[torch.Tensor]) -> Work | None:
        if work is None:
            return None
        handle = self._made(Work([work], tensors))
        if self._coalescing is not None:
            self._coalescing.append(handle)
        return handle

    def _made(self, work: Work) -> Work:
        """Stores the handle for the `ProcessGroup` through which this thread called, if it did."""
        if hasattr(self.made, "work"):
            self.made.work = work
        return work

    def _note(self, tensor: torch.Tensor) -> None:
        if tensor.numel() >= WORTH_SHARING:
            self.shared_storages.note(self.group, tensor)

    def _refuse(self, operation: str, mistake: str | None) -> None:
        if mistake is not None:
            raise refusals.error(self.group, operation, mistake)

    def _is_async(self, options: Any) -> bool:
        return options.asyncOp or self._coalescing is not None

    # Collectives.

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> Work | None:
        # Written out, unlike the others: it is called most often, with the smallest tensors.
        if len(tensors) != 1:
            return self._allreduce_several(tensors, opts)
        (tensor,) = tensors
        if tensor.numel() >= WORTH_SHARING:
            self.shared_storages.note(self.group, tensor)
        timeout = opts.timeout
        limit = self._seconds if timeout == _UNSET else timeout.total_seconds()
        is_async = opts.asyncOp or self._coalescing is not None
        try:
            work = self.group.all_reduce(tensor, _op(opts.reduceOp), is_async, limit)
        except DistArgumentError as error:
            if tensor.layout is torch.strided:
                words = refusals.reduction(tensors, opts.reduceOp)
                raise refusals.explained(error, words) from error.__cause__
            return self.allreduce_sparse(tensors, opts)
        if not is_async:
            return None
        handle = self._finish(work, tensors)
        if tensor.numel() == 1:
            self._small.append(handle)
        return handle

    def _allreduce_several(self, tensors: list[torch.Tensor], opts: Any) -> Work | None:
        """Reduces over ranks and tensors, and stores the result in each tensor."""
        self._refuse("all_reduce", refusals.allreduce(tensors))
        if tensors[0].layout is not torch.strided:
            return self.allreduce_sparse(tensors, opts)
        op, limit = _op(opts.reduceOp), self._limit(opts)
        work = self.group.all_reduce_several(tensors, op, self._is_async(opts), limit)
        return self._finish(work, tensors)

    def allreduce_sparse(self, tensors: list[torch.Tensor], opts: Any) -> Work | None:
        self._refuse("all_reduce", refusals.allreduce(tensors))
        sparse.all_reduce(self.group, tensors, opts.reduceOp, self._limit(opts))
        return self._finished(tensors)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any) -> Work | None:
        op, limit = _op(opts.reduceOp), self._limit(opts)
        return self._finish(
            self.group.all_reduce_coalesced(tensors, op, self._is_async(opts), limit), tensors
        )

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> Work | None:
        if len(tensors) != 1 or opts.rootTensor != 0:
            return self._broadcast_several(tensors, opts)
        (tensor,) = tensors
        self._note(tensor)
        work = self.group.broadcast(tensor, opts.rootRank, self._is_async(opts), self._limit(opts))
        return self._finish(work, tensors)

    def _broadcast_several(self, tensors: list[torch.Tensor], opts: Any) -> Work | None:
        """Copies one tensor of the root to each tensor of each rank."""
        root, root_tensor = opts.rootRank, opts.rootTensor
        self._refuse("broadcast", refusals.broadcast(tensors, root, root_tensor, self.size()))
        work = self.group.broadcast_several(
            tensors, root, root_tensor, self._is_async(opts), self._limit(opts)
        )
        return self._finish(work, tensors)

    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> Work | None:
        tensor = _one(tensors, "tensors")
        if opts.rootTensor != 0:
            raise DistArgumentError(f"there is one tensor, with index 0, not {opts.rootTensor}")
        if opts.rootRank != self.rank():
            tensor = tensor.clone()  # only the root's tensor may change
        op, limit = _op(opts.reduceOp), self._limit(opts)
        return self._finish(
            self.group.reduce(tensor, opts.rootRank, op, self._is_async(opts), limit), tensors
        )

    def allgather(
        self, output_tensors: list[list[torch.Tensor]], input_tensors: list[torch.Tensor], opts: Any
    ) -> Work | None:
        if len(input_tensors) != 1 or len(output_tensors) != 1:
            return self._allgather_several(output_tensors, input_tensors, opts)
        (tensor,), (outputs,) = input_tensors, output_tensors
        work = self.group.all_gather(outputs, tensor, self._is_async(opts), self._limit(opts))
        return self._finish(work, outputs)

    def _allgather_several(
        self, output_tensors: list[list[torch.Tensor]], input_tensors: list[torch.Tensor], opts: Any
    ) -> Work | None:
        """Collects all inputs of all ranks, ordered by rank, in each list of outputs."""
        self._refuse("all_gather", refusals.allgather(output_tensors, input_tensors, self.size()))
        count = len(input_tensors)
        outputs = [targets[place::count] for targets in output_tensors for place in range(count)]
        work = self.group.all_gather_coalesced(
            outputs, input_tensors * count, self._is_async(opts), self._limit(opts)
        )
        return self._finish(work, output_tensors)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> Work | None:
        self._note(input)
        work = self.group.all_gather_into(output, input, self._is_async(opts), self._limit(opts))
        return self._finish(work, [output])

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any
    ) -> Work | None:
        work = self.group.all_gather_into_coalesced(outputs, inputs, self._is_async(opts), self._limit(opts))
        return self._finish(work, outputs)

    def allgather_coalesced(
        self, output_lists: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any
    ) -> Work | None:
        if len(output_lists) != self.size():
            raise DistArgumentError(f"{len(output_lists)} lists of outputs for {self.size()} ranks")
        per_input = [list(outputs) for outputs in zip(*output_lists, strict=True)]
        work = self.group.all_gather_coalesced(per_input, inputs, self._is_async(opts), self._limit(opts))
        return self._finish(work, output_lists)

    def gather(
        self, output_tensors: list[list[torch.Tensor]], input_tensors: list[torch.Tensor], opts: Any
    ) -> Work | None:
        outputs = _list(output_tensors, "output_tensors")
        tensor = _one(input_tensors, "input_tensors")
        work = self.group.gather(outputs, tensor, opts.rootRank, self._is_async(opts), self._limit(opts))
        return self._finish(work, outputs)

    def gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> Work | None:
        target = output if opts.rootRank == self.rank() else None
        work = self.group.gather_into(target, input, opts.rootRank, self._is_async(opts), self._limit(opts))
        return self._finish(work, [output])

    def scatter(
        self, output_tensors: list[torch.Tensor], input_tensors: list[list[torch.Tensor]], opts: Any
    ) -> Work | None:
        inputs = _list(input_tensors, "input_tensors")
        output = _one(output_tensors, "output_tensors")
        work = self.group.scatter(output, inputs, opts.rootRank, self._is_async(opts), self._limit(opts))
        return self._finish(work, output_tensors)

    def reduce_scatter(
        self, output_tensors: list[torch.Tensor], input_tensors: list[list[torch.Tensor]], opts: Any
    ) -> Work | None:
        output, op = _one(output_tensors, "output_tensors"), _op(opts.reduceOp)
        work = self.group.reduce_scatter(
            output, _list(input_tensors, "input_tensors"), op, self._is_async(opts), self._limit(opts)
        )
        return self._finish(work, output_tensors)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> Work | None:
        self._note(input)
        op, limit = _op(opts.reduceOp), self._limit(opts)
        return self._finish(
            self.group.reduce_scatter_into(output, input, op, self._is_async(opts), limit), [output]
        )

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any
    ) -> Work | None:
        op, limit = _op(opts.reduceOp), self._limit(opts)
        work = self.group.reduce_scatter_into_coalesced(outputs, inputs, op, self._is_async(opts), limit)
        return self._finish(work, outputs)

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any) -> Work | None:
        work = self.group.all_to_all(outputs, inputs, self._is_async(opts), self._limit(opts))
        return self._finish(work, outputs)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any,
    ) -> Work | None:
        self._note(input)
        work = self.group.all_to_all_single(
            output, input, output_splits, input_splits, self._is_async(opts), self._limit(opts)
        )
        return self._finish(work, [output])

    def barrier(self, opts: Any) -> Work | None:
        return self._finish(self.group.barrier(self._is_async(opts), self._limit(opts)), [])

    def monitored_barrier(
        self, opts: Any = None, wait_all_ranks: bool = False, *, timeout: timedelta | None = None
    ) -> None:
        """Raises errors with c10d's phrases, which programs match on.

        PyTorch's groups pass `BarrierOptions`; a program that holds the backend passes a timeout.
        """
        if timeout is None:
            timeout = opts if opts is None or isinstance(opts, timedelta) else opts.timeout
        if timeout is None or timeout == _UNSET:
            timeout = self.options._timeout
        seconds = timeout.total_seconds()
        try:
            self.group.monitored_barrier(seconds, wait_all_ranks)
        except DistError as error:
            told = type(error)(self._barrier_text(error, seconds))
            told.__dict__.update(error.__dict__)
            raise told from error

    def _barrier_text(self, error: DistError, seconds: float) -> str:
        if self.rank() > 0:
            return (
                f"[Rank {self.rank()}]: Rank {self.rank()} successfully reached monitoredBarrier, "
                "but received errors "
                f"while waiting for send/recv from rank 0. Please check rank 0 logs for faulty rank.\n{error}"
            )
        if seconds <= 0:
            return f"[Rank 0]: Rank 0 timed out in monitoredBarrier after {seconds * 1000:.0f} ms.\n{error}"
        ranks = (error.reason or "").split(" did not reach")[0].capitalize()
        return f"[Rank 0]: {ranks} failed to pass monitoredBarrier in {seconds * 1000:.0f} ms.\n{error}"

    # Point-to-point.

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> Work | None:
        return self._finish(self.group.send(_one(tensors, "tensors"), dst, tag, True, self._seconds), tensors)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> Work | None:
        return self._finish(self.group.recv(_one(tensors, "tensors"), src, tag, True, self._seconds), tensors)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> Work | None:
        return self._finish(self.group.recv_any(_one(tensors, "tensors"), tag, self._seconds), tensors)

    # Several calls as one work.

    def start_coalescing(self) -> None:
        self._coalescing = []

    def end_coalescing(self) -> Work | None:
        works, self._coalescing = self._coalescing or [], None
        return self._joined(works)

    def _joined(self, works: list[Work]) -> Work:
        parts = [part for work in works for part in work._parts]
        return self._made(Work(parts, [tensor for work in works for tensor in work._tensors]))

    def _finished(self, tensors: list[torch.Tensor]) -> Work:
        return self._made(Work([], tensors))

    # The group itself.

    def split(self, store: Any, ranks: list[int], opts: Any) -> "Backend | None":
        if self.rank() not in ranks:
            if self.is_beside_others:
                raise RuntimeError(
                    f"split in group `{self._name}` failed on rank {self.rank()} of {self.size()}: this "
                    "rank is not among those of the new group, and PyTorch's groups of several devices crash "
                    "then; use `new_group`"
                )
            return None
        timeout = getattr(opts, "_timeout", None) or self.options._timeout
        name = getattr(opts, "group_name", "") or f"{self._name}:split"
        global_ranks = [self._global_ranks[rank] for rank in ranks]
        return Backend(store, ranks.index(self.rank()), len(ranks), timeout, name, global_ranks)

    def merge(self, store: Any, opts: Any, rank: int, size: int) -> "Backend":
        timeout = getattr(opts, "_timeout", None) or self.options._timeout
        name = getattr(opts, "group_name", "") or f"{self._name}:merged"
        return Backend(store, rank, size, timeout, name)

    def set_timeout(self, timeout: timedelta) -> None:
        self._options._timeout, self._seconds = timeout, timeout.total_seconds()

    _set_default_timeout = set_timeout

    def _get_sequence_number_for_group(self) -> int:
        return self.group.sequence_number()

    def _set_sequence_number_for_group(self) -> None:
        pass  # they start at 0 everywhere

    def get_error(self) -> Any:
        failure = None if self._is_left() else self.group.failure()
        if failure is None:
            return _c10d.ErrorType.SUCCESS
        if isinstance(failure, TimeoutError):
            return _c10d.ErrorType.TIMEOUT
        return (
            _c10d.ErrorType.REMOTE_ERROR
            if failure.peer not in (None, self.rank())
            else _c10d.ErrorType.COMM_ERROR
        )

    def abort(self) -> None:
        """Fails all pending operations, here and on all other ranks."""
        if not self._is_left():
            self.group.abort("torch.distributed was asked to")

    def shutdown(self) -> None:
        """Leaves the group. Memory that other ranks still read stays readable."""
        self.shared_storages.clear()
        self.group = _Left(self._name)

    def _is_left(self) -> bool:
        return isinstance(self.group, _Left)


# For each operation: c10d's phrase for invalid arguments. `allreduce` of one tensor needs none.
_WORDS = {
    "allreduce_coalesced": lambda self, tensors, opts: (
        refusals.allreduce_coalesced(tensors) or refusals.reduction(tensors, opts.reduceOp)
    ),
    "broadcast": lambda self, tensors, opts: refusals.broadcast(
        tensors, opts.rootRank, opts.rootTensor, self.size()
    ),
    "reduce": lambda self, tensors, opts: (
        refusals.reduce(tensors, opts.rootRank, opts.rootTensor, self.size())
        or refusals.reduction(tensors, opts.reduceOp)
    ),
    "reduce_scatter": lambda self, output_tensors, input_tensors, opts: (
        refusals.reduce_scatter(output_tensors, input_tensors, self.size())
        or refusals.reduction(output_tensors, opts.reduceOp)
    ),
    "reduce_scatter_single": lambda self, output, input, opts: refusals.reduction([input], opts.reduceOp),
    "reduce_scatter_single_coalesced": lambda self, outputs, inputs, opts: (
        refusals.pairs(outputs, inputs) or refusals.reduction(inputs, opts.reduceOp)
    ),
    "all_gather_single_coalesced": lambda self, outputs, inputs, opts: refusals.pairs(outputs, inputs),
    "allgather": lambda self, output_tensors, input_tensors, opts: refusals.allgather(
        output_tensors, input_tensors, self.size()
    ),
    "all_gather_single": lambda self, output, input, opts: refusals.all_gather_single(
        output, input, self.size()
    ),
    "allgather_coalesced": lambda self, output_lists, inputs, opts: refusals.allgather_coalesced(
        output_lists, inputs, self.size()
    ),
    "gather": lambda self, output_tensors, input_tensors, opts: refusals.gather(
        output_tensors, input_tensors, opts.rootRank, self.rank(), self.size()
    ),
    "scatter": lambda self, output_tensors, input_tensors, opts: refusals.scatter(
        output_tensors, input_tensors, opts.rootRank, self.rank(), self.size()
    ),
    "alltoall": lambda self, outputs, inputs, opts: refusals.alltoall(outputs, inputs, self.size()),
    "all_to_all_single": lambda self, output, input, output_splits, input_splits, opts: (
        refusals.splits(input, input_splits, self.size())
        or refusals.splits(output, output_splits, self.size())
    ),
    "send": lambda self, tensors, dst, tag: refusals.message(tensors, tag),
    "recv": lambda self, tensors, src, tag: refusals.message(tensors, tag),
    "recv_anysource": lambda self, tensors, tag: refusals.message(tensors, tag),
}


def _explaining(name: str, words: Any) -> Any:
    """Makes the operation `name`, whose errors for invalid arguments also have c10d's phrases."""
    operation = getattr(Backend, name)

    @functools.wraps(operation)
    def explaining(self: Backend, *arguments: Any, **named: Any) -> Any:
        try:
            return operation(self, *arguments, **named)
        except DistArgumentError as error:
            raise refusals.explained(error, words(self, *arguments, **named)) from error.__cause__

    return explaining


for _name, _words in _WORDS.items():
    setattr(Backend, _name, _explaining(_name, _words))


class ProcessGroup(dist.ProcessGroup):
    """A group of ranks whose CPU tensors tenfold moves."""

    def __init__(self, store: Any, backend: Backend) -> None:
        super().__init__(store, backend.rank(), backend.size())
        self._backend = backend
        self._set_default_backend(_CUSTOM)
        self._register_backend(_CPU, _CUSTOM, backend)

    def getBackendName(self) -> str:  # noqa: N802, the name that PyTorch looks for
        return "tenfold"

    def _set_group_desc(self, desc: str) -> None:
        """Stores PyTorch's description of the group, which is set after it is made, for dumps as well."""
        super()._set_group_desc(desc)
        self._backend.group.describe(desc)

    def gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> Work | None:
        return self._backend.gather_single(output, input, opts)  # the dispatcher has no route yet

    def split_group(self, ranks: list[int], *arguments: Any, **options: Any) -> "ProcessGroup | None":
        if ranks and self.rank() not in ranks:
            return None  # PyTorch's own code fails with a backend in Python that supports this
        return self._ours(super().split_group(ranks, *arguments, **options))

    def merge_remote_group(self, *arguments: Any, **options: Any) -> "ProcessGroup | None":
        return self._ours(super().merge_remote_group(*arguments, **options))

    def _ours(self, made: dist.ProcessGroup | None) -> "ProcessGroup | None":
        """Makes a group of this class from PyTorch's group, which was made from tenfold's backend."""
        if made is None:
            return None
        group = ProcessGroup(made.get_group_store(), made._get_backend(_CPU))
        group._set_group_name(made.group_name)
        group._set_group_desc(made.group_desc)
        return group


def _hide_from_compiler(function: Any) -> None:
    """Hides a collective, and what it calls, from `torch.compile`.

    Does what `torch.compiler.disable` does, without importing the compiler in every program.
    """
    frames = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    if hasattr(frames, "set_code_exec_strategy"):
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))


# Gloo's names of operations in PyTorch's profiler, where they differ from the method's name.
_TITLES = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "allgather": "all_gather",
    "all_gather_single": "all_gather",
    "all_gather_single_coalesced": "all_gather",
    "allgather_coalesced": "all_gather",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_single_coalesced": "reduce_scatter",
    "alltoall": "all_to_all",
    "all_to_all_single": "all_to_all",
    "recv_anysource": "recvAnySource",
}

_MESSAGES = {"send", "recv", "recv_anysource"}
_INT_MAX = (1 << 31) - 1  # the limit of ranks and tags in PyTorch

# Whether asynchronous operations are kept in PyTorch's registry of works, for `wait_tensor`.
_is_registered = _c10d._allow_inflight_collective_as_graph_input


def _is_for_dispatcher(arguments: tuple, options: dict[str, Any]) -> bool:
    """Whether the dispatcher can pass a message to `Backend`. If not, `Backend` reports the error itself."""
    tensors = arguments[0] if arguments else options.get("tensors", ())
    numbers = (*arguments[1:], *options.values())
    return all(
        isinstance(tensor, torch.Tensor) and tensor.is_cpu and tensor.layout is torch.strided
        for tensor in tensors
    ) and not any(isinstance(number, int) and abs(number) > _INT_MAX for number in numbers)


def _dispatched(name: str) -> Any:
    """Makes the collective `name` of PyTorch's group, which goes through the dispatcher to `Backend`.

    The dispatcher returns a handle that only has `wait`. Python callers get the handle that `Backend` made,
    which also has the state and the error of the operation.
    """
    inherited = getattr(dist.ProcessGroup, name)
    title = f"tenfold:{_TITLES.get(name, name)}"
    is_message = name in _MESSAGES

    def collective(self: ProcessGroup, *arguments: Any, **options: Any) -> Any:
        if is_message and not _is_for_dispatcher(arguments, options):
            return getattr(self._backend, name)(*arguments, **options)
        made = self._backend.made
        made.work = None
        if _profiler_enabled():
            record = ProfiledCall(title)
            try:
                work = inherited(self, *arguments, **options)
            finally:
                record.end_with(made.work)
        else:
            work = inherited(self, *arguments, **options)
        ours, made.work = made.work, None  # its tensors must not live until the next call
        if ours is None:
            return work
        if _is_registered():
            ours.is_registered = True
        return ours

    # PyTorch distinguishes a call of the inherited method from one of this method by the caller's name.
    collective.__code__ = collective.__code__.replace(co_name=name)
    _hide_from_compiler(collective)
    collective.__name__, collective.__doc__ = name, inherited.__doc__
    return collective


# By the names that PyTorch's C++ looks for; its other names for them call these.
for _name in (
    "allreduce",
    "allreduce_coalesced",
    "broadcast",
    "reduce",
    "allgather",
    "all_gather_single",
    "all_gather_single_coalesced",
    "allgather_coalesced",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "alltoall",
    "all_to_all_single",
    "barrier",
    "send",
    "recv",
    "recv_anysource",
):
    if hasattr(dist.ProcessGroup, _name):
        setattr(ProcessGroup, _name, _dispatched(_name))
