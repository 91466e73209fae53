"""c10d's other works: fake ones, and those that a function or a future of the user completes."""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

from tenfold.c10d.enums import OpType
from tenfold.work import Future, Work

__all__ = ["FakeWork", "PythonCallbackWork", "WorkInfo", "_create_work_from_future"]


class WorkInfo(NamedTuple):
    """The argument of a completion hook; see `ProcessGroup._register_on_completion_hook`."""

    op_type: OpType
    seq: int
    time_started: timedelta
    time_finished: timedelta
    active_duration: timedelta


class FakeWork(Work):
    """A work of `FakeProcessGroup`, which is complete from the start."""

    seq_id: int = -1

    def __init__(self) -> None:
        super().__init__()

    def result(self) -> list[Any]:
        raise RuntimeError("FakeWork: this work recorded no output.")

    def getFuture(self) -> Future:  # noqa: N802  c10d's name
        return self.get_future()

    def _tensors(self) -> None:  # type: ignore[override]
        return None


class PythonCallbackWork(Work):
    """A work that is complete when a function of the user says so.

    >>> PythonCallbackWork(lambda timeout: True).wait()
    True
    """

    def __init__(self, callback: Callable[[timedelta], bool]) -> None:
        super().__init__()
        self._callback = callback
        self._over: Future = Future()
        # A separate, reentrant lock: code that waits for the future may call other methods of the work.
        self._calling = threading.RLock()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        with self._calling:
            if not self._over.done():
                try:
                    self._over.set_result(self._callback(timeout))
                except BaseException as error:
                    self._over.set_exception(error)
        return self._over.result()

    def is_completed(self) -> bool:
        return self._over.done()

    def is_success(self) -> bool:
        return self._over.done() and self._over.exception() is None

    def exception(self) -> BaseException | None:
        return self._over.exception() if self._over.done() else None

    def get_future(self) -> Future:
        return self._over

    def notify(self, callback: Callable[[], None]) -> None:
        self._over.add_done_callback(lambda _: callback())


class _FutureWork(Work):
    """A work that completes with a future."""

    def __init__(self, future: Any) -> None:
        super().__init__()
        self._over = future

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if timeout > timedelta(0) and isinstance(self._over, Future):
            self._over.result(timeout.total_seconds())
        else:
            self._over.wait()
        return True

    def is_completed(self) -> bool:
        return self._over.done()

    def is_success(self) -> bool:
        return self._over.done() and self.exception() is None

    def exception(self) -> BaseException | None:
        if not self._over.done():
            return None
        try:
            self._over.wait()
        except Exception as error:
            return error
        return None

    def result(self) -> list[Any]:
        value = self._over.value()
        return list(value) if isinstance(value, list | tuple) else [value]

    def get_future(self) -> Any:
        return self._over

    def notify(self, callback: Callable[[], None]) -> None:
        self._over.add_done_callback(lambda _: callback())

    def abort(self) -> None:
        raise RuntimeError("a work made from a future cannot be aborted: fail the future instead")


def _create_work_from_future(future: Any) -> Work:
    """Returns a work that completes with `future`, PyTorch's or tenfold's."""
    return _FutureWork(future)
