"""`Work`: a pending operation, as in c10d, and `Future`, its result.

A `Work` wraps one work of the extension, several if operations were coalesced, or none if there was nothing
to do. Futures cost nothing until the program requests one. Then the threads of `tenfold.completions` complete
it, or `wait` does if it is first: after `wait` returns, the future is complete.
"""

import concurrent.futures
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from tenfold import _tenfold
from tenfold.completions import notify

if TYPE_CHECKING:
    from tenfold.c10d.enums import OpType

__all__ = ["Future", "Parts", "Work"]

# c10d's number of an unknown operation.
_UNKNOWN = 100


class Future(concurrent.futures.Future):
    """A Python future that also has the methods of PyTorch's futures.

    >>> future = Future()
    >>> doubled = future.then(lambda future: 2 * future.value())
    >>> future.set_result(21)
    >>> doubled.wait()
    42
    """

    def wait(self) -> Any:
        """Waits for the result, or raises the exception."""
        return self.result()

    def value(self) -> Any:
        """Returns the result, which must be available."""
        if not self.done():
            raise RuntimeError("the future has no value yet; `wait` for it")
        return self.result()

    def then(self, callback: Callable[["Future"], Any]) -> "Future":
        """Returns a future of the result of `callback`, which runs once this future is complete."""
        outcome = Future()

        def run(_: concurrent.futures.Future) -> None:
            try:
                outcome.set_result(callback(self))
            except BaseException as error:
                outcome.set_exception(error)

        self.add_done_callback(run)
        return outcome


class Parts:
    """What all kinds of `Work` have in common: they are made of works of the extension."""

    _parts: Sequence[_tenfold.Work]

    def _to_wait_for(self, timeout: timedelta) -> Iterator[tuple[_tenfold.Work, float | None]]:
        """Yields each part, with the seconds that are left when its turn comes. 0 means no timeout."""
        seconds = timeout.total_seconds()
        deadline = time.monotonic() + seconds if seconds > 0 else None
        for part in self._parts:
            yield part, None if deadline is None else max(0.0, deadline - time.monotonic())

    def is_completed(self) -> bool:
        """Whether the operation has completed or failed."""
        return all(part.is_completed() for part in self._parts)

    def is_success(self) -> bool:
        """Whether the operation has succeeded."""
        return all(part.is_success() for part in self._parts)

    def exception(self) -> BaseException | None:
        """Returns why the operation failed, or None."""
        return next((error for part in self._parts if (error := part.exception()) is not None), None)

    @property
    def timeout(self) -> timedelta:
        """Returns the timeout of the operation."""
        limits = [limit for part in self._parts if (limit := part.timeout()) is not None]
        return timedelta(seconds=max(limits, default=0.0))

    def _result_name(self) -> str:
        """Returns the name of c10d's `WorkResult`."""
        error = self.exception()
        if error is None:
            return "SUCCESS"
        return "TIMEOUT" if isinstance(error, TimeoutError) else "COMM_ERROR"

    def _milliseconds(self) -> float:
        """Returns the time from the call to the end, or to now."""
        return 1000 * max((part.duration() or 0.0 for part in self._parts), default=0.0)

    def _notify_after_all(self, callback: Callable[[], None]) -> None:
        """Runs `callback` on a thread of the pool once all parts have completed or failed."""
        pending, lock = len(self._parts), threading.Lock()

        def one_is_over() -> None:
            nonlocal pending
            with lock:
                pending -= 1
                if pending > 0:
                    return
            callback()

        for part in self._parts:
            notify(part, one_is_over)


class Work(Parts):
    """A pending operation. Its tensors belong to it until it has completed.

    >>> from tenfold.c10d import HashStore, ProcessGroup
    >>> numbers = bytearray([1, 2, 3])
    >>> work = ProcessGroup(HashStore(), 0, 1).allreduce(numbers)
    >>> work.wait()
    True
    >>> work.get_future().value()
    [bytearray(b'\\x01\\x02\\x03')]
    """

    def __init__(
        self,
        parts: Sequence[_tenfold.Work] = (),
        result: list[Any] | None = None,
        op_type: "OpType | None" = None,
    ) -> None:
        self._parts = parts
        self._result = result
        self._kind = op_type
        self._lock = threading.Lock()
        self._future: Future | None = None
        self._future_result: Future | None = None
        self.is_registered = False  # for `wait_tensor`

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Waits until the operation has completed. If this times out, the operation continues."""
        try:
            for part, limit in self._to_wait_for(timeout):
                part.wait(limit)
        finally:
            if self._future is not None and self.is_completed():
                self._complete(self._future)
        if self.is_registered:
            from tenfold.c10d.work_registry import unregister_work

            unregister_work(self)
        return True

    def synchronize(self) -> None:
        """Waits: on the CPU there are no streams to synchronise."""
        self.wait()

    def block_current_stream(self) -> None:
        raise RuntimeError("there is no stream to block: tenfold works on the CPU")

    def result(self) -> list[Any]:
        """Returns the output tensors of a completed operation."""
        if not self.is_completed():
            raise RuntimeError("the work is under way: `wait` for it before asking for its result")
        return self._tensors()

    def source_rank(self) -> int:
        """Returns the sender of a receive from any rank."""
        ranks = [rank for part in self._parts if (rank := part.source_rank()) is not None]
        if not ranks:
            raise RuntimeError("source_rank() may only be called on works of a recv or recv_anysource")
        return ranks[0]

    def _source_rank(self) -> int:
        return self.source_rank()

    def abort(self) -> None:
        """Fails the operation and its group on all ranks."""
        for part in self._parts:
            part.abort("by request")

    def _get_op_type(self) -> int:
        if self._kind is not None:
            return self._kind.value
        return self._parts[0].op_type() if self._parts else _UNKNOWN

    def _get_duration(self) -> float:
        """Returns the milliseconds from the call to the end."""
        if not self.is_completed():
            raise RuntimeError("the work is pending: its duration is not known yet")
        return self._milliseconds()

    def _get_sequence_number(self) -> int:
        if not self._parts:
            raise RuntimeError("this work has no sequence number: there was nothing to do")
        return self._parts[-1].sequence_number()

    def boxed(self) -> "Work":
        """Returns itself: there is no TorchScript here."""
        return self

    @staticmethod
    def unbox(obj: "Work") -> "Work":
        return obj

    def notify(self, callback: Callable[[], None]) -> None:
        """Runs `callback` once the work has completed or failed: now, or on a thread of the pool."""
        if self.is_completed():
            callback()
            return
        self._notify_after_all(callback)

    def get_future(self) -> Future:
        """Returns a future of the output tensors. The future fails if the work fails."""
        with self._lock:
            if self._future is not None:
                return self._future
            future = self._future = Future()
        self.notify(lambda: self._complete(future))
        return future

    def get_future_result(self) -> Future:
        """Returns a future of the result of the work: the number of a `WorkResult`."""
        with self._lock:
            if self._future_result is not None:
                return self._future_result
            future = self._future_result = Future()
        from tenfold.c10d.enums import WorkResult

        self.notify(lambda: future.set_result(WorkResult[self._result_name()].value))
        return future

    def _tensors(self) -> list[Any]:
        if self._result is not None:
            return self._result
        return [tensor for part in self._parts for tensor in part.tensors()]

    def _complete(self, future: Future) -> None:
        """Completes the future. Both `wait` and the pool call this; the second call has no effect."""
        error = self.exception()
        with suppress(concurrent.futures.InvalidStateError):
            if error is None:
                future.set_result(self._tensors())
            else:
                future.set_exception(error)
