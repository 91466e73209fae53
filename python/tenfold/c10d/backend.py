# ruff: noqa: N802  c10d's names
"""`Backend`: c10d's base class for what moves the bytes of a group. `ProcessGroupTenfold`: tenfold's backend.

`Backend` can be subclassed in Python: override the operations that the backend has, in their form with lists
and options. The others raise an error: the backend does not support them, as in c10d.
"""

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from tenfold import _tenfold
from tenfold.arrays import Tensor
from tenfold.c10d.collectives import COLLECTIVES
from tenfold.c10d.enums import ErrorType, OpType
from tenfold.c10d.operations import Operations
from tenfold.c10d.options import _DEFAULT_PG_TIMEOUT, UNSET_TIMEOUT, Fields, ReconfigureOptions
from tenfold.c10d.reconfigure import AbortHooks, Reconfigurable
from tenfold.c10d.work import WorkInfo
from tenfold.completions import notify
from tenfold.exceptions import DistTimeoutError
from tenfold.work import Work

__all__ = ["Backend", "ProcessGroupTenfold"]


class Backend(Operations):
    """Moves the bytes of a group."""

    class Options(Fields):
        """The settings of a backend."""

        backend: str = "undefined"
        _timeout: timedelta = _DEFAULT_PG_TIMEOUT
        global_ranks_in_group: list[int] = []  # noqa: RUF012
        group_name: str = ""
        enable_reconfigure: bool = False

        def __init__(self, backend: str, timeout: timedelta = _DEFAULT_PG_TIMEOUT) -> None:
            super().__init__()
            self.backend = backend
            self._timeout = timeout

    bound_device_id: Any = None

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def name(self) -> str:
        """Returns the kind of backend."""
        return self._get_backend_name()

    def _get_backend_name(self) -> str:
        return type(self).__name__

    def _perform(self, name: str, arguments: list[Any], options: Fields | None) -> Any:
        raise self._unsupported(name)

    def _unsupported(self, what: str) -> RuntimeError:
        return RuntimeError(f"Backend {self.name()} does not support {what}")

    @property
    def options(self) -> Any:
        raise self._unsupported("options")

    # Only some backends support these. A subclass that overrides one also overrides its `supports_…`.

    @property
    def supports_splitting(self) -> bool:
        return False

    def split(self, store: Any, ranks: Sequence[int], opts: Any) -> "Backend | None":
        raise self._unsupported("split")

    def merge(self, store: Any, opts: Any, rank: int, size: int) -> "Backend":
        raise self._unsupported("merge")

    @property
    def supports_coalescing(self) -> bool:
        return False

    def _start_coalescing(self) -> None:
        raise self._unsupported("coalescing")

    def _end_coalescing(self) -> Work:
        raise self._unsupported("coalescing")

    @property
    def _supports_time_estimate(self) -> bool:
        return False

    def _start_time_estimate(self) -> None:
        raise self._unsupported("time estimation")

    def _end_time_estimate(self) -> float:
        raise self._unsupported("time estimation")

    @property
    def supports_shrinking(self) -> bool:
        return False

    def shrink(
        self, ranks_to_exclude: Sequence[int], shrink_flags: int = 0, opts_override: Any = None
    ) -> "Backend":
        raise self._unsupported("shrink")

    @property
    def supports_reconfigure(self) -> bool:
        return False

    def get_reconfigure_handle(self) -> str:
        raise self._unsupported("reconfigure")

    def reconfigure(self, opts: ReconfigureOptions) -> Work:
        raise self._unsupported("reconfigure")

    @property
    def supports_window(self) -> bool:
        return False

    def new_window(self, tensor: Tensor | None = None) -> Any:
        raise self._unsupported("new_window")

    @property
    def supports_abort_hooks(self) -> bool:
        return False

    def register_abort_hook(self, hook_id: int, hook: Callable[[], None]) -> None:
        raise self._unsupported("abort hooks")

    def unregister_abort_hook(self, hook_id: int) -> None:
        raise self._unsupported("abort hooks")

    @property
    def supports_completion_hooks(self) -> bool:
        return False

    def _register_on_completion_hook(self, hook: Callable[[Any], None]) -> None:
        raise self._unsupported("completion hooks")

    def _wait_for_pending_works(self) -> None:
        raise self._unsupported("waiting for pending works")

    def supports_tensor_alloc(self, device: Any) -> bool:
        return False

    def allocate_tensor(self, size: int, *, dtype: Any, device: Any) -> Tensor:
        raise self._unsupported("allocate_tensor")

    @property
    def mem_allocator(self) -> Any:
        raise self._unsupported("mem_allocator")

    def suspend(self) -> None:
        raise self._unsupported("suspend")

    def resume(self) -> None:
        raise self._unsupported("resume")

    def memory_stats(self) -> dict[str, int]:
        raise self._unsupported("memory_stats")

    def set_timeout(self, timeout: timedelta) -> None:
        raise self._unsupported("set_timeout")

    def abort(self) -> None:
        raise self._unsupported("abort")

    def shutdown(self) -> None:
        raise self._unsupported("shutdown")

    def get_error(self) -> ErrorType:
        return ErrorType.SUCCESS

    def _get_sequence_number_for_group(self) -> int:
        raise self._unsupported("sequence numbers")

    # c10d always calls these. On the CPU there is nothing to do.

    def _set_sequence_number_for_group(self) -> None: ...

    def _set_group_uid(self, pg_uid: str) -> None: ...

    def _add_ephemeral_timeout(self, timeout: timedelta) -> None: ...

    def _enable_collectives_timing(self) -> None: ...

    def eager_connect_single_device(self, device: Any, /) -> None: ...

    def setUsePgForSymmMemRendezvous(self, value: bool) -> None: ...


class ProcessGroupTenfold(Reconfigurable, Backend):
    """Tenfold as a backend. The constructor joins the group and returns once all ranks have joined.

    >>> from tenfold import HashStore
    >>> backend = ProcessGroupTenfold(HashStore(), 0, 1)
    >>> numbers = bytearray([1, 2])
    >>> backend.allreduce([numbers]).wait()
    True
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        timeout: timedelta = _DEFAULT_PG_TIMEOUT,
        *,
        name: str = "default",
        enable_reconfigure: bool = False,
    ) -> None:
        """With `enable_reconfigure`, this process is alone until `reconfigure` is called."""
        seconds = timeout.total_seconds()
        if enable_reconfigure:
            self._join(_tenfold.Group.alone(name=name, timeout=seconds), timeout)
        else:
            self._join(_tenfold.Group(store, rank, size, name=name, timeout=seconds), timeout)
        self._options.enable_reconfigure = enable_reconfigure

    @classmethod
    def _of(cls, group: _tenfold.Group, timeout: timedelta) -> "ProcessGroupTenfold":
        """Makes a backend from a group that has been joined already."""
        backend = cls.__new__(cls)
        backend._join(group, timeout)
        return backend

    def _join(self, group: _tenfold.Group, timeout: timedelta) -> None:
        super().__init__(group.rank, group.size)
        self._group: _tenfold.Group | None = group
        self._options = Backend.Options("tenfold", timeout)
        self._options.group_name = group.name
        self._abort_hooks = AbortHooks()
        self._shrinking = None
        # The works started so far, while operations are being coalesced.
        self._coalesced: list[_tenfold.Work] | None = None
        self._completion_hook: Callable[[WorkInfo], None] | None = None
        self._hooks_pending = 0
        self._hook_was_called = threading.Condition()

    def _get_backend_name(self) -> str:
        return "tenfold"

    @property
    def options(self) -> Any:
        return self._options

    @property
    def supports_splitting(self) -> bool:
        return True

    @property
    def supports_coalescing(self) -> bool:
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the timeout of all operations that are called from now on."""
        self._options._timeout = timeout

    def is_open(self) -> bool:
        """Whether operations can be called."""
        return self._group is not None

    def group(self) -> _tenfold.Group:
        """Returns the extension's group, which offers more than c10d."""
        if self._group is None:
            raise RuntimeError("the group was shut down")
        return self._group

    def abort(self) -> None:
        """Fails the group on all ranks. `reconfigure` works afterwards."""
        self._abort_hooks.call()
        self.group().abort()

    def shutdown(self) -> None:
        """Leaves the group. Pending operations continue; new calls raise an error."""
        self._group = self._shrinking = None

    def get_error(self) -> ErrorType:
        error = self.group().failure()
        if error is None:
            return ErrorType.SUCCESS
        if isinstance(error, DistTimeoutError):
            return ErrorType.TIMEOUT
        return ErrorType.REMOTE_ERROR if getattr(error, "peer", None) is not None else ErrorType.COMM_ERROR

    def _get_sequence_number_for_group(self) -> int:
        return self.group().sequence_number()

    def split(self, store: Any, ranks: Sequence[int], opts: Any) -> "Backend | None":
        """Makes a backend of some of the ranks. All ranks must call it. The store is not used."""
        ranks = list(ranks)
        colour = ranks[0] if self._rank in ranks else None
        key = ranks.index(self._rank) if self._rank in ranks else 0
        name = opts.group_name or f"{self.group().name}:{','.join(map(str, ranks))}"
        seconds = opts._timeout.total_seconds()
        part = self.group().split(colour, key, name=name, timeout=seconds)
        if part is None:
            return None
        backend = ProcessGroupTenfold._of(part, opts._timeout)
        own = self._options.global_ranks_in_group or list(range(self._size))
        backend._options.global_ranks_in_group = [own[rank] for rank in ranks]
        return backend

    def merge(self, store: Any, opts: Any, rank: int, size: int) -> "Backend":
        """Makes a backend of all ranks that join through `store`."""
        return ProcessGroupTenfold(store, rank, size, opts._timeout, name=opts.group_name or "merged")

    def _start_coalescing(self) -> None:
        if self._coalesced is not None:
            raise RuntimeError("operations are being coalesced already")
        self._coalesced = []

    def _end_coalescing(self) -> Work:
        """Returns one work for all operations called since `_start_coalescing`."""
        if self._coalesced is None:
            raise RuntimeError("operations are not being coalesced")
        parts, self._coalesced = self._coalesced, None
        return Work(parts, op_type=OpType.COALESCED)

    def _perform(self, name: str, arguments: list[Any], options: Fields | None) -> Any:
        if name == "monitored_barrier":
            return self._monitored_barrier(*arguments)
        timeout = getattr(options, "timeout", UNSET_TIMEOUT)
        limit = (self._options._timeout if timeout < timedelta(0) else timeout).total_seconds()
        start = COLLECTIVES[name].start
        part = start(self.group(), *arguments, options, True, limit)
        if part is None:
            return Work((), list(arguments[0]))
        if self._coalesced is not None:
            self._coalesced.append(part)
        if self._completion_hook is not None:
            self._call_when_over(self._completion_hook, part)
        if self._abort_hooks:
            group = self._group
            notify(part, lambda: self._group is group and self._abort_hooks.call_if_failed(group))
        return Work((part,))

    def _monitored_barrier(self, timeout: timedelta | None, wait_all_ranks: bool) -> None:
        if timeout is None or timeout < timedelta(0):
            timeout = self._options._timeout
        self.group().monitored_barrier(timeout.total_seconds(), wait_all_ranks)

    @property
    def supports_completion_hooks(self) -> bool:
        return True

    def _register_on_completion_hook(self, hook: Callable[[WorkInfo], None]) -> None:
        """Calls `hook` on another thread whenever an operation has completed."""
        self._completion_hook = hook

    def _wait_for_pending_works(self) -> None:
        """Waits until the completion hook was called for all operations."""
        with self._hook_was_called:
            self._hook_was_called.wait_for(lambda: self._hooks_pending == 0)

    def _call_when_over(self, hook: Callable[[WorkInfo], None], part: _tenfold.Work) -> None:
        started = timedelta(seconds=time.monotonic())
        with self._hook_was_called:
            self._hooks_pending += 1

        def over() -> None:
            finished = timedelta(seconds=time.monotonic())
            try:
                times = (started, finished, timedelta(seconds=part.duration() or 0.0))
                hook(WorkInfo(OpType(part.op_type()), part.sequence_number(), *times))
            finally:
                with self._hook_was_called:
                    self._hooks_pending -= 1
                    self._hook_was_called.notify_all()

        notify(part, over)
