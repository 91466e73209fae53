"""`Backend`: tenfold as a backend of `torch.distributed`, for CPU tensors.

Its operations are made from the table of c10d's operations, except for a few that differ. PyTorch calls them
through its dispatcher; see `process_group.py`.

If the caller waits immediately (`async_op=False`), the operation has completed when the call returns, and the
call returns nothing: making a handle costs more than a small collective.
"""

import inspect
import threading
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, get_overloads

import torch
import torch.distributed as dist

from tenfold import _tenfold
from tenfold.c10d.collectives import COLLECTIVES, Collective
from tenfold.c10d.operations import Operations
from tenfold.c10d.reconfigure import AbortHooks
from tenfold.exceptions import DistError, refused
from tenfold.torch import refusals, sparse
from tenfold.torch.exceptions import DistArgumentError
from tenfold.torch.memory import WORTH_SHARING, SharedStorages
from tenfold.torch.reconfigure import Absent, Reconfigurable, Unconnected
from tenfold.torch.work import Work

_c10d = torch._C._distributed_c10d
_Base = getattr(dist, "BackendBase", _c10d.Backend)
_UNSET = timedelta(milliseconds=-1)
_PREMUL_SUM = int(dist.ReduceOp.RedOpType.PREMUL_SUM)


def _options(timeout: timedelta, name: str, global_ranks: Sequence[int]) -> Any:
    options = _c10d.Backend.Options("tenfold", timeout)
    options.group_name, options.global_ranks_in_group = name, list(global_ranks)
    return options


def _op(op: Any) -> int | tuple[int, float]:
    code = op.op.value
    return code if code != _PREMUL_SUM else (code, float(op.factor))


class Backend(Reconfigurable, _Base):
    """Moves tensors between the ranks of one group."""

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        timeout: timedelta,
        name: str,
        global_ranks: Sequence[int] = (),
        enable_reconfigure: bool = False,
    ) -> None:
        """Returns once all ranks have joined; with `enable_reconfigure`, connects nothing."""
        seconds, title = timeout.total_seconds(), name or "default"
        if enable_reconfigure:
            alone = _tenfold.Group.alone(name=title, timeout=seconds)
            self._begin(Unconnected(name, alone), rank, size, timeout, name, global_ranks)
        else:
            group = _tenfold.Group(store, rank, size, name=title, timeout=seconds)
            self._begin(group, rank, size, timeout, name, global_ranks)
            self.describe(None)

    @classmethod
    def of(
        cls, group: _tenfold.Group, timeout: timedelta, name: str = "", global_ranks: Sequence[int] = ()
    ) -> "Backend":
        """Makes a backend of a group that was made already."""
        backend = cls.__new__(cls)
        backend._begin(group, group.rank, group.size, timeout, name or group.name, global_ranks)
        backend.describe(None)
        return backend

    def _begin(
        self, group: Any, rank: int, size: int, timeout: timedelta, name: str, global_ranks: Sequence[int]
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
        self.abort_hooks = AbortHooks()
        # PyTorch's DDP keeps only the C++ half of a handle on a single number (how many ranks have data left)
        # and waits for it in backward, which needs the Python half. So small handles are kept for a while.
        self._small: deque[Work] = deque(maxlen=1024)
        self.made = threading.local()  # the handle of this thread's last call; see `_dispatched`
        # The tenfold group behind this backend.
        self.group = group
        self._rank, self._size = rank, size
        self._global_ranks = list(global_ranks) or list(range(size))

    # c10d's properties of a backend. The inherited ones call themselves, so each is defined here.
    supports_splitting = property(lambda self: True)
    supports_coalescing = property(lambda self: True)
    _supports_time_estimate = property(lambda self: False)
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
        if self.abort_hooks:
            group = self.group
            handle._notify_after_all(lambda: self.group is group and self.abort_hooks.call_if_failed(group))
        if self._coalescing is not None:
            self._coalescing.append(handle)
        return handle

    def _made(self, work: Work) -> Work:
        """Stores the handle for the `ProcessGroup` through which this thread called, if it did."""
        if hasattr(self.made, "work"):
            self.made.work = work
        return work

    def _note(self, tensor: torch.Tensor | list[torch.Tensor]) -> None:
        if isinstance(tensor, list):
            if len(tensor) != 1:
                return
            (tensor,) = tensor
        if tensor.numel() >= WORTH_SHARING:
            self.shared_storages.note(self.group, tensor)

    def _refuse(self, operation: str, mistake: str | None) -> None:
        if isinstance(self.group, Absent):
            raise self.group.error(operation)
        if mistake is not None:
            raise refused(self.group, operation, mistake)

    def _is_async(self, options: Any) -> bool:
        return options.asyncOp or self._coalescing is not None

    # Collectives that are not made from the table, as the others are below.

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> Work | None:
        # Written out because it is called most often, with the smallest tensors.
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
        except DistError:
            self.abort_hooks.call_if_failed(self.group)
            raise
        if not is_async:
            return None
        handle = self._finish(work, tensors)
        if tensor.numel() == 1:
            self._small.append(handle)
        return handle

    def _allreduce_several(self, tensors: list[torch.Tensor], opts: Any) -> Work | None:
        """Reduces over ranks and tensors, and stores the result in each tensor."""
        self._refuse("all_reduce", refusals.allreduce(self, tensors, opts))
        if tensors[0].layout is not torch.strided:
            return self.allreduce_sparse(tensors, opts)
        op, limit = _op(opts.reduceOp), self._limit(opts)
        work = self.group.all_reduce_several(tensors, op, self._is_async(opts), limit)
        return self._finish(work, tensors)

    def allreduce_sparse(self, tensors: list[torch.Tensor], opts: Any) -> Work | None:
        self._refuse("all_reduce", refusals.allreduce(self, tensors, opts))
        sparse.all_reduce(self.group, tensors, opts.reduceOp, self._limit(opts))
        return self._finished(tensors)

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
        failure = None if isinstance(self.group, Absent) else self.group.failure()
        if failure is None:
            return _c10d.ErrorType.SUCCESS
        if isinstance(failure, TimeoutError):
            return _c10d.ErrorType.TIMEOUT
        return (
            _c10d.ErrorType.REMOTE_ERROR
            if failure.peer not in (None, self.rank())
            else _c10d.ErrorType.COMM_ERROR
        )


def _copied_unless_root(backend: Backend, given: Sequence[Any], opts: Any) -> Sequence[Any]:
    """Copies the tensors that `reduce` uses as scratch memory: only the root's may change."""
    if opts.rootTensor != 0:
        mistake = f"there is one tensor, with index 0, not {opts.rootTensor}"
        raise refused(backend.group, "reduce", mistake)
    (tensors,) = given
    return given if opts.rootRank == backend.rank() else [[tensor.clone() for tensor in tensors]]


_PREPARED = {"reduce": _copied_unless_root}

# With several tensors, Gloo compares their shapes. A group of tenfold compares only their lengths.
_ARE_COMPARED = {"broadcast", "allgather"}


def _outputs(collective: Collective, given: Sequence[Any]) -> list[Any]:
    """Returns the value of the operation's future."""
    if not given:
        return []
    first = given[0]
    if isinstance(first, torch.Tensor):
        return [first]
    return first[0] if collective.unpacks and len(first) == 1 else first


def _operation(collective: Collective) -> Any:
    """Makes an operation of `Backend`. Its errors for invalid arguments also have c10d's phrases."""
    name, start, shared = collective.name, collective.start, collective.shared
    words = getattr(refusals, name, None)
    prepared, are_compared = _PREPARED.get(name), name in _ARE_COMPARED
    is_message = collective.is_message
    declared = getattr(Operations, name)
    form = inspect.signature((get_overloads(declared) or [declared.__wrapped__])[0])

    def call(self: Backend, *arguments: Any, **named: Any) -> Work | None:
        if named:
            arguments = form.bind(self, *arguments, **named).args[1:]
        group = self.group
        if isinstance(group, Absent):
            raise group.error(collective.title)
        if is_message:
            given, opts, is_async, limit = arguments, None, True, self._seconds
        else:
            *given, opts = arguments
            is_async, limit = self._is_async(opts), self._limit(opts)
        if shared is not None:
            self._note(given[shared])
        try:
            if are_compared and (len(given[0]) != 1 or len(given[-1]) != 1 or getattr(opts, "rootTensor", 0)):
                self._refuse(collective.title, words(self, *arguments))
            tensors = given if prepared is None else prepared(self, given, opts)
            work = start(group, *tensors, opts, is_async, limit)
        except DistArgumentError as error:
            mistake = None if words is None else words(self, *arguments)
            raise refusals.explained(error, mistake) from error.__cause__
        except DistError:
            self.abort_hooks.call_if_failed(self.group)
            raise
        return None if work is None else self._finish(work, _outputs(collective, given))

    call.__name__, call.__doc__ = name, declared.__doc__
    return call


for _collective in COLLECTIVES.values():
    if _collective.name not in vars(Backend):
        setattr(Backend, _collective.name, _operation(_collective))
