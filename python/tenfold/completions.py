"""Threads that run what is to happen once an operation is over.

The engine never calls Python. It writes down which operations are over, and the threads here fetch that
(`Completions.next` waits without the interpreter) and run the callbacks.

A callback may start another operation and wait for *its* callback, as PowerSGD's hook does, so there must
always be a thread left that fetches. Whoever takes the last free place therefore starts another thread first.
That one holds back for a moment, because most callbacks are short and their thread is free again soon: only
a callback that really blocks makes the pool grow.

Not here: futures, see `tenfold.work`.
"""

import atexit
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable

from tenfold._tenfold import Completions, Work

__all__ = ["notify"]

# How long a callback may take before a second thread helps out.
_PATIENCE_SECONDS = 0.005

# Threads that may be free at a time; what a burst of blocking callbacks needed beyond that goes again.
_FREE_THREADS_MAX = 4

# How long the end of the program waits for callbacks that are running.
_GRACE_SECONDS = 5.0


def notify(work: Work, callback: Callable[[], None]) -> None:
    """Runs `callback` on a thread of the pool once `work` is over, well or not.

    What the callback raises is reported by `sys.unraisablehook`. When the interpreter has begun to end,
    nothing is called any more.

    >>> import threading
    >>> from tenfold import HashStore, ProcessGroup
    >>> over = threading.Event()
    >>> group = ProcessGroup(HashStore(), 0, 1)
    >>> work = group.allreduce(bytearray(8))
    >>> work.notify(over.set)
    >>> over.wait(timeout=10)
    True
    """
    _pool.notify(work, callback)


class _Pool:
    def __init__(self) -> None:
        self._completions = Completions()
        self._lock = threading.Lock()
        self._somebody_is_free = threading.Condition(self._lock)
        self._threads: set[threading.Thread] = set()
        self._numbers = itertools.count(1)
        # Threads that fetch, or are about to.
        self._free = 0
        self._closed = False

    def notify(self, work: Work, callback: Callable[[], None]) -> None:
        self._completions.watch(work, callback)
        if not self._threads:
            self._start_thread_unless_one_is_free(patience=0.0)

    def close(self) -> None:
        """Ends all threads; those in a callback get a while to finish it."""
        with self._lock:
            self._closed = True
            threads = list(self._threads)
            self._somebody_is_free.notify_all()
        self._completions.close()
        deadline = time.monotonic() + _GRACE_SECONDS
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _start_thread_unless_one_is_free(self, patience: float) -> None:
        with self._lock:
            if self._free > 0 or self._closed:
                return
            name = f"tenfold-completion-{next(self._numbers)}"
            thread = threading.Thread(target=self._run, args=(patience,), name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system has no more threads for us: those that are there must do
                if not self._threads:
                    raise
                return
            # Only now: `close` joins these, and what was not started cannot be joined.
            self._threads.add(thread)
            self._free = 1

    def _run(self, patience: float) -> None:
        with self._lock:
            self._somebody_is_free.wait_for(lambda: self._free > 1 or self._closed, patience)
        while (callback := self._completions.next()) is not None:
            with self._lock:
                self._free -= 1
            try:
                self._start_thread_unless_one_is_free(_PATIENCE_SECONDS)
                callback()
            except BaseException as error:
                _Report(error, callback)
            del callback  # what it refers to is not to live until the next one comes
            with self._lock:
                self._free += 1
                self._somebody_is_free.notify_all()
                if self._free > _FREE_THREADS_MAX:
                    break
        with self._lock:
            self._free -= 1
            self._threads.discard(threading.current_thread())


class _Report:
    """Hands an error to `sys.unraisablehook`, which only the interpreter can call: as for weak references."""

    def __init__(self, error: BaseException, callback: Callable[[], None]) -> None:
        self._error = error
        self._callback = callback
        nothing = type("Nothing", (), {})()
        self._reference = weakref.ref(nothing, self)

    def __call__(self, _: weakref.ref) -> None:
        raise self._error

    def __repr__(self) -> str:
        return f"the callback of a work: {self._callback!r}"


_pool = _Pool()


def _start_anew_in_child() -> None:
    """A fork has none of its parent's threads, and maybe a lock that one of them held."""
    global _pool
    _pool = _Pool()


os.register_at_fork(after_in_child=_start_anew_in_child)
atexit.register(lambda: _pool.close())
