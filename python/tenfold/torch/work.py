"""A handle on an operation, in the forms that PyTorch accepts: `Work` and `Future`.

Two rules come from PyTorch. A future must fail by a callback that raises: an exception that is set as a value
looks like success to C++. And once `wait` has returned, the future must be complete, because the reducer
reads it then.
"""

import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tenfold import _tenfold
from tenfold.work import Parts

_c10d = torch._C._distributed_c10d
_OP_TYPES = {int(kind): kind for kind in _c10d.OpType.__members__.values()}
_UNKNOWN = _c10d.OpType.UNKNOWN


class _Forgetting(threading.local):
    """State while a thread removes a work from PyTorch's registry: the works that `wait` was called on."""

    works: "list[Work] | None" = None


_forgetting = _Forgetting()


class Work(Parts, dist.Work):
    """One operation, or several as one.

    `tensors` are the value of its future. For an operation with several lists of outputs, they are the lists.
    """

    def __init__(self, parts: list[_tenfold.Work], tensors: list[Any]) -> None:
        super().__init__()
        self._parts = parts
        self._tensors = tensors
        self._future: torch.futures.Future[Any] | None = None
        self._promise: torch.futures.Future[Any] | None = None
        self._lock = threading.Lock()
        self.is_registered = False  # in PyTorch's registry of works, under each of its tensors

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Waits until the operation has completed. If this times out, the operation continues and `wait`
        may be called again.
        """
        if _forgetting.works is not None:
            _forgetting.works.append(self)
            return True
        for part, limit in self._to_wait_for(timeout):
            part.wait(limit)
        if self._future is not None:
            self._settle()
        if self.is_registered:
            self._forget()
        return True

    def _forget(self) -> None:
        """Removes this work, and no other, from PyTorch's registry.

        PyTorch can only wait for all works of a tensor, and removes them. So this calls it while `wait`
        returns immediately, and then registers the other works again.
        """
        self.is_registered = False
        for tensor in self._flat():
            _forgetting.works = []
            try:
                torch.ops._c10d_functional.wait_tensor(tensor)
            finally:
                works, _forgetting.works = _forgetting.works, None
            for work in works:
                if work is not self:
                    _c10d._register_work(tensor, work)

    def _flat(self) -> Iterator[torch.Tensor]:
        for item in self._tensors:
            yield from item if isinstance(item, list) else [item]

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        if not self.is_completed():
            raise RuntimeError(
                "the operation is pending: Work needs to be completed before calling result(). "
                "Should call wait() before result()."
            )
        if self._tensors and isinstance(self._tensors[0], list):
            raise RuntimeError("work result does not support list of lists, use .getFuture() and value()")
        return self._tensors

    def source_rank(self) -> int:
        rank = self._parts[0].source_rank() if len(self._parts) == 1 else None
        if rank is None:
            raise RuntimeError(
                "only a completed receive has a source rank: sourceRank() may only be called on work "
                "objects that correspond to a recv or recv-from-any call."
            )
        return rank

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """Returns a future of the tensors. A separate thread completes it, or `wait`."""
        with self._lock:
            if self._future is not None:
                return self._future
            self._promise = torch.futures.Future()
            self._future = self._promise.then(self._outcome)
        if self.is_completed():
            self._settle()
        else:
            self._notify_after_all(self._settle)
        return self._future

    def get_future_result(self) -> torch.futures.Future[Any]:
        """As `get_future`, but the future has the result of the work instead of the tensors."""
        return self.get_future().then(lambda _: getattr(_c10d.WorkResult, self._result_name()))

    def _settle(self) -> None:
        with self._lock:
            promise, self._promise = self._promise, None
        if promise is not None:
            promise.set_result(None)
        elif not self._future.done():  # another thread will complete it
            torch.futures.collect_all([self._future.then(lambda _: None)]).wait()

    def _outcome(self, _: Any) -> list[torch.Tensor]:
        error = self.exception()
        if error is not None:
            raise error
        return self._tensors

    def _get_op_type(self) -> Any:
        return _OP_TYPES.get(self._parts[-1].op_type(), _UNKNOWN) if self._parts else _UNKNOWN

    def _get_sequence_number(self) -> int:
        return self._parts[-1].sequence_number() if self._parts else 0

    def _get_duration(self) -> float:
        """Returns the duration in milliseconds, as in c10d."""
        return self._milliseconds()

    def __repr__(self) -> str:
        return f"Work({', '.join(map(repr, self._parts))})"
