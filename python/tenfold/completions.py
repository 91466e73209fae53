"""Threads that run callbacks after operations have completed.

The engine never calls Python. It records which operations have completed. The threads here fetch these
(`Completions.next` waits without the GIL) and run the callbacks.

A callback may start another operation and wait for *its* callback, as PowerSGD's hook does. So one thread
must always be left to fetch. The last free thread therefore starts another before it runs a callback. The
new thread waits for a moment, because most callbacks are short and their thread is soon free again: only a
callback that really blocks makes the pool grow.

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

# How long a callback may take before a second thread starts to fetch.
_PATIENCE_SECONDS = 0.005

# The most threads that may be free at a time. Others, left from a burst of blocking callbacks, exit.
_FREE_THREADS_MAX = 4

# How long the exit of the program waits for running callbacks.
_GRACE_SECONDS = 5.0


def notify(work: Work, callback: Callable[[], None]) -> None:
    """Runs `callback` on a thread of the pool once `work` has completed or failed.

    An exception of the callback is reported by `sys.unraisablehook`. Once the interpreter has started to shut
    down, no callback is called.

    >>> import threading
    >>> from tenfold.c10d import HashStore, ProcessGroup
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
        # Threads that fetch, or will soon.
        self._free = 0
        self._closed = False

    def notify(self, work: Work, callback: Callable[[], None]) -> None:
        self._completions.watch(work, callback)
        if not self._threads:
            self._start_thread_unless_one_is_free(patience=0.0)

    def close(self) -> None:
        """Ends all threads. Threads in a callback get some time to finish it."""
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
            except RuntimeError:  # the system cannot start more threads: continue with the existing ones
                if not self._threads:
                    raise
                return
            # Only now: `close` joins these threads, and a thread that was not started cannot be joined.
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
            del callback  # drop the reference, so that its objects do not live until the next callback
            with self._lock:
                self._free += 1
                self._somebody_is_free.notify_all()
                if self._free > _FREE_THREADS_MAX:
                    break
        with self._lock:
            self._free -= 1
            self._threads.discard(threading.current_thread())


class _Report:
    """Passes an error to `sys.unraisablehook`, which only the interpreter can call: by a weak reference."""

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
    """A forked child has none of its parent's threads, and maybe a lock that one of them held."""
    global _pool
    _pool = _Pool()


os.register_at_fork(after_in_child=_start_anew_in_child)
atexit.register(lambda: _pool.close())
